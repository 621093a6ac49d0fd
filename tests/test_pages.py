"""learn/pages.py: every line of every file once, every link leads somewhere, and outputs are those of the demos."""
import html
import json
import re
from html.parser import HTMLParser

import pytest

from learn import pages


class Page(HTMLParser):
    """Its links, its anchors, and the text of its lines of code."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors, self.open = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "a":
            self.links.append(attributes["href"])
        if "id" in attributes:
            self.anchors.add(attributes["id"])
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, f"<{tag}> is closed out of order"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    pages.main(["--out", str(folder)])
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_there_is_a_page_for_each_file_and_every_link_leads_somewhere(made):
    assert set(made) == {"index.html", *map(pages.page_of, [*pages.files(), *pages.documents()])}
    parsed = {name: Page(text) for name, text in made.items()}
    for name, page in parsed.items():
        assert page.open == [], f"{name}: {page.open} not closed"
        for link in page.links:
            target, _, anchor = link.partition("#")
            assert link.startswith("https://") or (target in parsed and (
                not anchor or anchor in parsed[target].anchors)), f"{name}: {link}"
    assert set(parsed["index.html"].links) >= set(made) - {"index.html"}


def test_following_next_reads_every_file_in_the_order_of_the_readme(made):
    """And "previous" leads back. The files that README's table does not have come after it."""
    readme = (pages.ROOT / "README.md").read_text().split("## The files")[1].split("\n## ")[0]
    table = re.findall(r"^\| \[(.*?)\]", readme, re.MULTILINE)
    file, read = table[0], []
    while file:
        read.append(file)
        before = [*{link: None for link in re.findall('rel="prev">previous: (.*?)<', made[pages.page_of(file)])}]
        assert before == read[-2:-1]
        after = re.findall('<a href="([^"]*)" rel="next">next: (.*?)<', made[pages.page_of(file)])
        assert len(after) in (0, 2) and len(set(after)) <= 1  # above and below the code
        file = after[0][1] if after else ""
        assert not file or after[0][0] == pages.page_of(file)
    assert len(table) > 20 and read[:len(table)] == table and sorted(read) == sorted(pages.files())


def test_a_heading_of_a_document_has_the_anchor_that_github_gives_it():
    text = "[a](#save-resume-and-change-the-grid) [b](#2-gpus)\n\n## Save, resume, and change the `grid`\n\n### 2 GPUs?"
    html_text = pages.markdown_html(text, "own.html")
    assert '<h2 id="save-resume-and-change-the-grid">Save, resume' in html_text and '<h3 id="2-gpus">' in html_text
    assert '<a href="own.html#save-resume-and-change-the-grid">a</a> <a href="own.html#2-gpus">b</a>' in html_text


def test_what_a_document_links_is_linked_on_its_page(made):
    """As far as there is a page of it; the playbook's table of contents is the index."""
    for file in ["docs/PLAYBOOK.md", *pages.documents()]:
        text = (pages.ROOT / file).read_text()
        if file == "docs/PLAYBOOK.md":
            text = text.split("\n## ")[0].split("\n| section")[1]  # the index has only the table
        targets = set(re.findall(r"\]\(([^)#]+)\)", text))
        wanted = {target for target in targets if target.startswith("https://")}
        for target in targets - wanted:
            path = (pages.ROOT / "docs" / target).resolve().relative_to(pages.ROOT)
            if (path.suffix == ".py" and path.parts[0] != "tests") or path.match("docs/*.md"):  # tests have no pages
                wanted.add(".".join(path.with_suffix("").parts) + ".html")
        page = "index.html" if file == "docs/PLAYBOOK.md" else f"docs.{file[5:-3]}.html"
        assert wanted <= set(Page(made[page]).links), file
    assert {"docs.NOTES.html", "docs.RESULTS.html", "bench.probe.html"} <= set(
        re.findall(r'href="([^"]+)"', made["index.html"].split("<h2>To read")[0]))


def test_a_document_has_all_its_words_and_the_tables_all_their_cells(made):
    for file in pages.documents():
        text, page = (pages.ROOT / file).read_text(), made[pages.page_of(file)].split('<main class="document">')[1]
        text = re.sub(r"\]\([^)]*\)|<!--.*?-->", "]", text)  # targets of links, comments
        shown = html.unescape(re.sub(r"<[^>]+>", " ", page))
        assert re.findall(r"[^\W_]+", shown) == re.findall(r"[^\W_]+", text), file
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        assert page.count("<td>") + page.count("<th>") == sum(len(line.split(" | ")) for line in lines), file


def test_markdown_is_what_it_says():
    text = ("# A `title`\nfirst\nline\n\n- one\n  goes on\n- two\n\n| a | b |\n|---|---|\n| `x | y` |\n\n<!-- no -->\n"
            "```\n# a < b\n\n  *c*\n```\nsee [*the* loop](../train.py), [x](nowhere.md)")
    name = '<a href="train.html" title="train.py"><em>the</em> loop</a>'
    assert pages.markdown_html(text) == (
        "<h1>A <code>title</code></h1><p>first line</p><ul><li>one goes on</li><li>two</li></ul><table><tr><th>a</th>"
        "<th>b</th></tr><tr><td>`x</td><td>y`</td></tr></table>"
        f"<pre># a &lt; b\n\n  *c*</pre><p>see {name}, x</p>")


@pytest.mark.parametrize("text, shown", [
    ("the *sum* of *two words*, *one-two*", "the <em>sum</em> of <em>two words</em>, <em>one-two</em>"),
    ("(*hops*), *all*.", "(<em>hops</em>), <em>all</em>."), ("**Data** (a)", "<b>Data</b> (a)"),
    ("f(*a, *b) and dO * O * 2", None), ("2**24 and 2**r", None), ("(n-1)*X*β + L*α", None),
    ("`a *b* c`", "<code>a *b* c</code>"),
    ("o *= exp(m), l *= 2", None), ("*a, b*", None), ("**", None)])
def test_emphasis_is_shown_and_no_product_is_emphasis(text, shown):
    assert pages.prose_html([text], {}) == f"<p>{shown or text}</p>"


@pytest.mark.parametrize("text, shown", [
    ("A:\n- one\n  goes on: and on\n- *two*", "<p>A:</p><ul><li>one goes on: and on</li><li><em>two</em></li></ul>"),
    ("- one\n\n- two\nAfter.", "<ul><li>one</li><li>two</li></ul><p>After.</p>"),
    ("- one\n\nBetween.\n\n- two", "<ul><li>one</li></ul><p>Between.</p><ul><li>two</li></ul>"),
    ("- one\n\n    a - b\n- two", "<ul><li>one</li></ul><pre>    a - b</pre><ul><li>two</li></ul>"),
    ("n - 1\n-1 is less", "<p>n - 1 -1 is less</p>")])
def test_lines_that_begin_with_a_dash_are_a_list(text, shown):
    assert pages.prose_html(text.splitlines(), {}) == shown


def test_under_every_picture_is_its_caption(made):
    """tests/test_pictures.py compares the captions with the functions that draw."""
    for file, names in pages.PICTURES.items():
        page = made[pages.page_of(file)]
        figures = re.findall(r'<figure><img alt="([\w-]+)" .*?<figcaption>(.*?)</figcaption>', page)
        shown = [(name, re.findall(r"\w+", html.unescape(re.sub(r"<[^>]+>", " ", text)))) for name, text in figures]
        assert shown == [(name, re.findall(r"\w+", pages.captions()[name])) for name in names], file


@pytest.mark.parametrize("lines, references", [
    (["Li et al. 2020, sections 3.2 and 4.2."], ["Li et al. 2020, sections 3.2 and 4.2."]),
    (["Sources: a.py; Hwu, Kirk & El Hajj, GPUs (a; b); Llama Team", "2024."],
     ["Sources: a.py;", "Hwu, Kirk &amp; El Hajj, GPUs (a; b);", "Llama Team 2024."]),
    (["Hensgen, Finkel and Manber 1988 (dissemination); Dao 2023."],
     ["Hensgen, Finkel and Manber 1988 (dissemination);", "Dao 2023."]),
    (["RMSNorm: Zhang & Sennrich 2019; SwiGLU: Shazeer 2020. Shapes: H hidden."],
     ["RMSNorm: Zhang &amp; Sennrich 2019;", "SwiGLU: Shazeer 2020."]),
    (["Korthikanti et al. 2022 drop scores; others drop more."], []), (["As Dao 2023, in one loop; no more."], [])])
def test_each_reference_is_a_line_of_its_own(lines, references):
    text = pages.prose_html(["Text before.", *lines, "Shapes: B batch"], {})
    assert re.findall(r'<p class="reference">(.*?)</p>', text) == references
    assert text.startswith("<p>Text before.</p>" if references else "<p>Text before. ")
    assert text.endswith("<p>Shapes: B batch</p>")


def test_files_that_cite_papers_show_references_on_lines_of_their_own(made):
    """Not in a paragraph of their first docstring: no author and year follow the end of a sentence there."""
    for file in pages.files():
        first = made[pages.page_of(file)].split('<div class="code">')[0]
        for paragraph in re.findall(r"<p>(.*?)</p>", first):
            assert not re.search(r"\. [A-Z]\w+ et al\. \d{4}[;,(]", paragraph), (file, paragraph)
    assert made["tp.html"].count('<p class="reference">') == 3


def test_120_columns_of_code_fit_beside_the_prose():
    """From 1280 pixels on. A character is at most 0.603 em wide (DejaVu Sans Mono, Menlo), a scroll bar 15 pixels."""
    css = " ".join(pages.STYLE.split())
    prose, = re.findall(r"\.row \{ display: grid; grid-template-columns: minmax\(0, (\d+)rem\) minmax\(0, 1fr\)", css)
    least, taken, parts, most = map(float, re.findall(
        r"\.code pre \{ font-size: clamp\((\d+)px, calc\(\(100vw - ([\d.]+)rem\) / (\d+)\), (\d+)px\) \}", css)[0])
    padding, = re.findall(r"\.code \{[^}]*padding: \.4rem (\d+)rem;", css)
    number, = re.findall(r"\.n \{[^}]*width: ([\d.]+)em", css)
    narrow, = re.findall(r"@media \(max-width: ([\d.]+)rem\) \{ \.row \{ grid-template-columns: minmax\(0, 1fr\)", css)
    assert float(narrow) * 16 < 1280 and most <= 13 and least >= 11
    for width in range(1280, 2600):
        size = min(max(least, (width - 16 * taken) / parts), most)
        room = width - 15 - 16 * (float(prose) + 2 * float(padding)) - float(number) * size
        assert room >= 120 * 0.603 * size, (width, size)


def test_each_line_is_on_its_page_once_as_prose_or_as_code_and_prose_is_escaped(made):
    everywhere = {file: pages.definitions(file) for file in pages.files()}
    for file in pages.files():
        source, page = (pages.ROOT / file).read_text(), made[pages.page_of(file)]
        rows, lines = pages.rows(source), source.splitlines()
        found = re.findall(r'<span class="n" id="L(\d+)">\d+</span>(.*)', page)
        code = [int(number) for number, _ in found]
        assert code == sorted(set(code)), file
        for number, line in zip(code, found):
            text = html.unescape(re.sub(r"<[^>]+>", "", line[1])).removesuffix("</pre></div></div>")
            assert text == lines[number - 1], (file, number)
        shown = re.findall(r'<div class="prose">(?!<figure|<h2>What it prints)(.*?)</div>', page, re.S)
        names, prose = pages.names_seen(file, everywhere), [line for row in rows for line in row.prose]
        assert shown == [pages.prose_html(row.prose, names) for row in rows], file
        others = [re.sub('^r"""', "", line) for number, line in enumerate(lines, 1) if number not in code]
        one, other = (sorted(re.findall(r"\w+", " ".join(part))) for part in (others, prose))
        assert one == other, file
    assert pages.prose_html(["a < b & `c`"], {}) == "<p>a &lt; b &amp; <code>c</code></p>"


def test_a_name_leads_to_its_definition(made):
    line = (pages.ROOT / "core/collectives.py").read_text().splitlines().index("class Pending:") + 1
    link = f'<a href="core.collectives.html#L{line}" title="class Pending:&#10;A collective in flight'
    assert link in made["tp.html"]


def test_pages_are_not_written_into_a_file(capsys):
    with pytest.raises(SystemExit, match="2"):
        pages.main(["--out", __file__])
    assert f"--out {__file__}: is a file, name a folder" in capsys.readouterr().err


def test_a_demo_that_is_interrupted_leaves_the_kept_outputs(monkeypatch, tmp_path):
    """Also those of the demos before it."""
    def interrupted():
        yield "dp.py", "something new"
        raise KeyboardInterrupt

    kept = tmp_path / "demos.json"
    kept.write_text(pages.DEMOS.read_text())
    monkeypatch.setattr(pages, "DEMOS", kept)
    monkeypatch.setattr(pages, "run_demos", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pages.main(["--demos", "--out", str(tmp_path / "pages")])
    assert kept.read_text() == (pages.ROOT / "docs" / "demos.json").read_text()


@pytest.mark.slow
def test_demos_print_what_the_pages_show():
    kept = json.loads(pages.DEMOS.read_text())["outputs"]
    assert dict(pages.run_demos()) == kept


def test_pages_have_the_demos_outputs(made):
    kept = json.loads(pages.DEMOS.read_text())["outputs"]
    assert set(kept) >= {"dp.py", "zero.py", "tp.py", "cp.py", "pp.py", "ep.py", "fp8.py"} and all(kept.values())
    for file, output in kept.items():
        assert html.escape(output, quote=False) in made[pages.page_of(file)]
