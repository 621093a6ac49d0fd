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
    assert set(made) == {"index.html", *map(pages.page_of, pages.files())}
    parsed = {name: Page(text) for name, text in made.items()}
    for name, page in parsed.items():
        assert page.open == [], f"{name}: {page.open} not closed"
        for link in page.links:
            target, _, anchor = link.partition("#")
            assert link.startswith("https://") or (target in parsed and (
                not anchor or anchor in parsed[target].anchors)), f"{name}: {link}"
    assert {link for link in parsed["index.html"].links} >= {pages.page_of(file) for file in pages.files()}


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
        shown = re.findall(r'<div class="prose">(?!<img|<h2>What it prints)(.*?)</div>', page, re.S)
        names, prose = pages.names_seen(file, everywhere), [line for row in rows for line in row.prose]
        assert shown == [pages.prose_html(row.prose, names) for row in rows], file
        others = [re.sub('^r"""', "", line) for number, line in enumerate(lines, 1) if number not in code]
        one, other = (sorted(re.findall(r"\w+", " ".join(part))) for part in (others, prose))
        assert one == other, file
    assert pages.prose_html(["a < b & `c`"], {}) == "<p>a &lt; b &amp; <code>c</code></p>"


def test_a_name_leads_to_its_definition(made):
    line = (pages.ROOT / "collectives.py").read_text().splitlines().index("class Pending:") + 1
    assert f'<a href="collectives.html#L{line}" title="class Pending:&#10;A collective in flight' in made["tp.html"]


def test_pages_are_not_written_into_a_file(capsys):
    with pytest.raises(SystemExit, match="2"):
        pages.main(["--out", __file__])
    assert f"--out {__file__}: is a file, name a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_demos_print_what_the_pages_show():
    kept = json.loads(pages.DEMOS.read_text())["outputs"]
    assert dict(pages.run_demos()) == kept


def test_pages_have_the_demos_outputs(made):
    kept = json.loads(pages.DEMOS.read_text())["outputs"]
    assert set(kept) >= {"dp.py", "zero.py", "tp.py", "cp.py", "pp.py", "ep.py", "fp8.py"} and all(kept.values())
    for file, output in kept.items():
        assert html.escape(output, quote=False) in made[pages.page_of(file)]
