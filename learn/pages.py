"""Make a web page of every file, with its prose beside its code, its pictures, and the output of its demo.

    python -m learn.pages [--out pages]     static HTML, no network; open pages/index.html
    python -m learn.pages --demos           run all demos again and keep their output in docs/demos.json

Docstrings and comments are on the left, and the code that they explain is on the right; on a narrow screen it is below
them. A name links to its definition, and shows its first lines when the mouse rests on it. Each page links the previous
and the next one in reading order, which is the order of the table in README.md. The documents of docs/ are pages, too.
The index is the playbook's table of contents, from docs/PLAYBOOK.md. The layout is modelled on
labml.ai's annotated papers.
"""
import ast
import builtins
import io
import json
import keyword
import os
import re
import subprocess
import sys
import tokenize
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import NamedTuple

from learn import Parser

ROOT = Path(__file__).parent.parent
DEMOS = ROOT / "docs" / "demos.json"
PICTURES = {"train.py": ["grid", "losses"], "dp.py": ["overlap"], "zero.py": ["memory"], "tp.py": ["layer"],
            "cp.py": ["zigzag"], "pp.py": ["timeline"], "schedules.py": ["schedules", "bubble", "zero-bubble"],
            "ep.py": ["experts"], "fp8.py": ["formats", "fp8"], "recompute.py": ["steps"], "flash.py": ["hierarchy"],
            "learn/written_out.py": ["ring", "collectives"]}  # each is shown with its caption: see `captions`
STYLE = """
:root { --text: #1b1f24; --page: #fff; --side: #f6f8fa; --line: #d8dee4; --link: #0b5cad; --word: #a0209c;
        --text2: #59636e; --string: #0a6b3d; --number: #9a4a00 }
@media (prefers-color-scheme: dark) { :root { --text: #dde3ea; --page: #14181d; --side: #1b2128; --line: #333b45;
        --link: #78b7ff; --word: #e19aee; --text2: #9aa5b1; --string: #86d6a2; --number: #f0b27a } }
* { box-sizing: border-box } img { background: #fff; max-width: 100%; height: auto }
body { margin: 0; color: var(--text); background: var(--page); font: 16px/1.5 system-ui, sans-serif }
a { color: var(--link); text-decoration: none } code a, pre a { color: inherit; border-bottom: 1px dotted var(--line) }
a:hover { text-decoration: underline } header, footer, main { max-width: 76rem; margin: auto; padding: 1rem }
header nav { float: right } nav a { margin-left: 1.5rem } footer nav { text-align: right }
/* From 1280 pixels on, prose is beside the code, and the font is so large that a line of 120 columns fits. */
.row { display: grid; grid-template-columns: minmax(0, 24rem) minmax(0, 1fr); border-top: 1px solid var(--line) }
.prose { padding: .4rem 1rem; font-size: 15px } .code { background: var(--side); padding: .4rem 1rem; overflow-x: auto }
.row.wide { grid-template-columns: minmax(0, 1fr) } .wide .prose { max-width: 62rem }
pre { margin: .3rem 0; font: 13px/1.45 ui-monospace, monospace; overflow-x: auto }
.code pre { font-size: clamp(11px, calc((100vw - 27.5rem) / 76), 13px) }
code { font: 0.9em ui-monospace, monospace } .reference { margin: .1rem 0; color: var(--text2); font-size: 14px }
.n { color: var(--text2); user-select: none; display: inline-block; width: 3.2em } .k { color: var(--word) }
.s { color: var(--string) } .d { color: var(--number) } .c { color: var(--text2) }
figure { margin: .4rem 0 } ul { margin: .3rem 0; padding-left: 1.3rem }
table { border-collapse: collapse } .index a { color: var(--link) }
tr { border-top: 1px solid var(--line) } td, th { padding: .3rem .8rem .3rem 0; vertical-align: top; text-align: left }
@media (max-width: 79.9rem) { .row { grid-template-columns: minmax(0, 1fr) } .code pre { font-size: 13px } }
@media (max-width: 60rem) { .index td { display: block } main { overflow-x: auto } }
"""


class Name(NamedTuple):
    """The definition that a name links to, and the text that is shown when the mouse rests on it."""
    page: str
    line: int
    title: str


@cache
def files() -> list[str]:
    """Every file that has a page, in reading order: first the rows of README's table, then the other files."""
    readme = (ROOT / "README.md").read_text()
    first = re.findall(r"^\| \[([\w/]+\.py)\]", readme, re.MULTILINE)
    found = [sorted((ROOT / folder).glob("*.py")) for folder in (".", "core", "learn", "plan", "run", "bench")]
    every = [str(path.relative_to(ROOT)) for paths in found for path in paths if path.name != "__init__.py"]
    return [*first, *(file for file in every if file not in first)]


@cache
def documents() -> list[str]:
    """The documents of docs/, except the playbook's table of contents, which is the index."""
    return [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "PLAYBOOK.md"]


def page_of(file: str) -> str:
    return str(Path(file).with_suffix("")).replace("/", ".") + ".html"


def definitions(file: str) -> dict[str, Name]:
    """Return the names that a file defines at its top level; methods as Class.method."""
    source, found = (ROOT / file).read_text(), {}
    lines = source.splitlines()

    def visit(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                stop = node.body[0].lineno - 1 if isinstance(node, ast.FunctionDef) else node.lineno
                signature = " ".join(line.strip() for line in lines[node.lineno - 1:max(stop, node.lineno)])
                first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
                found[prefix + node.name] = Name(page_of(file), node.lineno, f"{signature}\n{first}".strip())
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.Assign) and not prefix:
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = Name(page_of(file), node.lineno, lines[node.lineno - 1])
    visit(ast.parse(source).body, "")
    return found


def names_seen(file: str, everywhere: dict[str, dict[str, Name]]) -> dict[str, Name]:
    """Return the names that a file can use: its own, and the names that it imports from other
    pages."""
    seen = {}
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = node.module.replace(".", "/") + ".py"
            seen |= {alias.asname or alias.name: everywhere[source][alias.name] for alias in node.names
                     if alias.name in everywhere.get(source, {})}
            modules = {alias.asname or alias.name: f"{node.module}/{alias.name}.py" for alias in node.names}
            seen |= {name: Name(page_of(path), 0, path) for name, path in modules.items() if path in everywhere}
        elif isinstance(node, ast.Import):
            seen |= {alias.name: Name(page_of(f"{alias.name}.py"), 0, f"{alias.name}.py") for alias in node.names
                     if f"{alias.name}.py" in everywhere}
    return seen | everywhere[file]


# ---- a file, in rows of prose and code ------------------------------------------------------------------------------

class Row(NamedTuple):
    prose: list[str]  # lines
    code: list[int]  # numbers of lines, from 1


def rows(source: str) -> list[Row]:
    """Return the rows of a file, with each of its lines once, as prose or as code.

    A row begins at a definition that has a docstring, or at a block of comments. It contains the
    code up to the next row.
    """
    lines, tree = source.splitlines(), ast.parse(source)
    prose_of: dict[int, list[str]] = {}  # number of the line at which a row begins -> its prose
    hidden: set[int] = set()  # lines that are prose
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
            first = node.body[0]
            start = 1 if isinstance(node, ast.Module) else min([node.lineno, *(d.lineno for d in node.decorator_list)])
            prose_of[start] = ast.get_docstring(node).splitlines()
            hidden |= set(range(first.lineno, first.end_lineno + 1))
    strings = {number for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
               for number in range(node.lineno + 1, node.end_lineno + 1)}
    block: list[int] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("#") and number not in strings:
            block.append(number)
        elif block:
            text = [re.sub(r"^\s*# ?", "", lines[i - 1]) for i in block]
            hidden |= set(block)
            prose_of[block[0]] = text + ["", *prose_of.pop(number, [])] if number in prose_of else text
            block = []
    out = [Row([], [])]
    for number in range(1, len(lines) + 1):
        if number in prose_of:
            out.append(Row(prose_of[number], []))
        if number not in hidden:
            out[-1].code.append(number)
    return [row for row in out if row.prose or any(lines[i - 1].strip() for i in row.code)]


def inline(text: str, names: dict[str, Name]) -> str:
    """Return the HTML of a paragraph with `code`, *emphasis*, **strong** words and addresses.
    `names` become links."""
    out = []
    for part in re.split(r"(`[^`]+`)", escape(text, quote=False)):
        if re.fullmatch(r"`[^`]+`", part):
            word = part[1:-1]
            name = names.get(word) or names.get(word.removesuffix(".py"))
            out.append(f"<code>{link(word, name) if name else word}</code>")
        else:
            part = re.sub(r"(?<![\w*])\*\*(\w(?:[^*]*[\w).?:])?)\*\*(?![\w*])", r"<b>\1</b>", part)
            part = re.sub(r"(?<![\w*])\*(\w(?:[\w' -]*\w)?)\*(?![\w*])", r"<em>\1</em>", part)  # not (*args), not 2**24
            out.append(re.sub(r"(https://[^\s<)]+)", r'<a href="\1">\1</a>', part))
    return "".join(out)


def is_reference(line: str) -> bool:
    """Return whether a line begins a list of references.

    Examples are "Sources: …", "Li et al. 2020, …" and "SwiGLU: Shazeer 2020". A sentence such as
    "Li et al. 2020 say that …" is not a reference.
    """
    name = r"[A-Z][\w'-]+"
    authors = rf"{name}(, {name})*( (and|&) {name})?( et al\.| Team)?"
    return bool(re.match(rf"(Sources?|References?): |([A-Z][\w -]*: )?{authors} \d{{4}}([,;.]| \(|$)", line))


def is_entry(line: str) -> bool:
    """Return whether a line begins an entry of a list."""
    return line.startswith("- ")


def paragraph_html(lines: list[str], render: Callable[[str], str]) -> str:
    """Return the HTML of a paragraph, or of references, each on its own line. render: makes HTML of
    text without line breaks."""
    text = " ".join(line.strip() for line in lines)
    if not is_reference(lines[0]):
        return f"<p>{render(text)}</p>"
    references, label, shapes = text.partition(" Shapes: ")  # shapes may follow in the same line
    entries = re.split(r"(?<=;) (?![^(]*\))", references)  # a semicolon in brackets does not end a reference
    out = [f'<p class="reference">{render(entry)}</p>' for entry in entries]
    return "".join(out) + (f"<p>{render(label.strip() + ' ' + shapes)}</p>" if shapes else "")


def prose_html(lines: list[str], names: dict[str, Name]) -> str:
    """Return the HTML of prose: paragraphs, lists, unchanged indented lines, and one line per
    reference.

    names: the names that become links.
    """
    out, paragraph, block = [], [], []

    def flush() -> None:
        if paragraph and is_entry(paragraph[0]):
            text = " ".join(paragraph).removeprefix("- ")
            before = out.pop().removesuffix("</ul>") if out and out[-1].endswith("</ul>") else "<ul>"
            out.append(f"{before}<li>{inline(text, names)}</li></ul>")
        elif paragraph:
            out.append(paragraph_html(paragraph, partial(inline, names=names)))
        while block and not block[-1].strip():
            block.pop()
        if block:
            out.append(f"<pre>{escape(chr(10).join(block), quote=False)}</pre>")
        paragraph.clear()
        block.clear()

    for line in lines:
        heading = re.fullmatch(r"-{3,} (.*?) -*", line)
        if heading:
            flush()
            out.append(f"<h2>{escape(heading[1])}</h2>")
        elif line.startswith("    ") and paragraph and re.match(r"\w[\w ]*: ", paragraph[0]):
            paragraph.append(line.strip())  # "Saves: ..." goes on
        elif line.startswith("    ") or (block and not line.strip()):
            if not block:
                flush()
            block.append(line)
        elif line.strip():
            goes_on = bool(paragraph) and is_reference(paragraph[0])
            ends_entry = bool(paragraph) and is_entry(paragraph[0]) and not line.startswith(" ")
            if block or re.match(r"([A-Z][\w ]*:|- )", line) or (is_reference(line) and not goes_on) or ends_entry:
                flush()
            paragraph.append(line.strip())
        else:
            flush()
    flush()
    return "".join(out)


def link(text: str, name: Name) -> str:
    at, title = f"#L{name.line}" if name.line else "", escape(name.title).replace("\n", "&#10;")
    return f'<a href="{name.page}{at}" title="{title}">{text}</a>'


def code_html(source: str, names: dict[str, Name]) -> list[str]:
    """Return the lines of a file, coloured and linked."""
    lines, marks = source.splitlines(), defaultdict(list)  # number of a line -> (begin, end, html)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, text = token.type, token.string
        if kind == tokenize.NAME and keyword.iskeyword(text):
            made = f'<span class="k">{text}</span>'
        elif kind == tokenize.NAME and text in names and not hasattr(builtins, text):
            made = link(text, names[text])
        elif kind in (tokenize.STRING, tokenize.NUMBER, tokenize.COMMENT):
            style = {tokenize.NUMBER: "d", tokenize.COMMENT: "c"}.get(kind, "s")
            for number in range(token.start[0], token.end[0] + 1):  # a string may have several lines
                begin = token.start[1] if number == token.start[0] else 0
                end = token.end[1] if number == token.end[0] else len(lines[number - 1])
                part = escape(lines[number - 1][begin:end], quote=False)
                marks[number].append((begin, end, f'<span class="{style}">{part}</span>'))
            continue
        else:
            continue
        marks[token.start[0]].append((token.start[1], token.end[1], made))
    out = []
    for number, line in enumerate(lines, 1):
        html, at = "", 0
        for begin, end, made in sorted(marks[number]):
            html, at = html + escape(line[at:begin], quote=False) + made, end
        out.append(html + escape(line[at:], quote=False))
    return out


def neighbours_html(file: str) -> str:
    """Return links to the previous and the next page in reading order."""
    order = files()
    at = order.index(file)
    links = []
    if at > 0:
        links.append(f'<a href="{page_of(order[at - 1])}" rel="prev">previous: {order[at - 1]}</a>')
    if at + 1 < len(order):
        links.append(f'<a href="{page_of(order[at + 1])}" rel="next">next: {order[at + 1]}</a>')
    return f"<nav>{' '.join(links)}</nav>"


def page(title: str, body: str) -> str:
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
            f"{body}</body></html>\n")


@cache
def captions() -> dict[str, str]:
    """Picture -> the docstring of the function of learn/pictures.py that draws it.

    The file is read, not imported: importing it needs matplotlib and torch.
    """
    body = ast.parse((ROOT / "learn" / "pictures.py").read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    table = next(node.value for node in body
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PICTURES")
    return {key.value: ast.get_docstring(functions[call.args[0].id]) for key, call in zip(table.keys, table.values)}


def file_html(file: str, everywhere: dict[str, dict[str, Name]], demos: dict) -> str:
    source, names = (ROOT / file).read_text(), names_seen(file, everywhere)
    lines = code_html(source, names)
    body = [f'<header>{neighbours_html(file)}<a href="index.html">penteract</a> / <b>{file}</b></header>']
    for i, row in enumerate(rows(source)):
        code = "".join(f'<span class="n" id="L{n}">{n}</span>{lines[n - 1]}\n' for n in row.code)
        prose = prose_html(row.prose, names)
        body.append(f'<div class="row{"" if i else " wide"}"><div class="prose">{prose}</div>'
                    + (f'<div class="code"><pre>{code}</pre></div>' if row.code else "") + "</div>")
        if i == 0:
            for name in PICTURES.get(file, []):
                data = b64encode((ROOT / "docs" / "pictures" / f"{name}.svg").read_bytes()).decode()
                body.append(f'<div class="row wide"><div class="prose"><figure><img alt="{name}" '
                            f'src="data:image/svg+xml;base64,{data}"><figcaption>'
                            f'{prose_html(captions()[name].splitlines(), {})}</figcaption></figure></div></div>')
    if file in demos["outputs"]:
        body.append(f'<div class="row wide"><div class="prose"><h2>What it prints ({demos["date"]})</h2><pre>'
                    f'{escape(demos["outputs"][file], quote=False)}</pre></div></div>')
    return page(file, "".join(body) + f"<footer>{neighbours_html(file)}</footer>")


# ---- documents ------------------------------------------------------------------------------------------------------

def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it: "Save, and resume" becomes
    "save-and-resume"."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def markdown_line(text: str, names: dict[str, Name], own: str = "") -> str:
    """Return the HTML of a line of a document in docs/. own: its page, for links to its headings.

    Links to pages and to the web are kept. Other links, such as to a test, become plain text.
    """
    def part_html(part: str) -> str:
        match = re.fullmatch(r"\[([^]]+)\]\(([^)#]*)(#[^)]*)?\)", part)
        if not match:
            return inline(part, names)
        label, target = inline(match[1].replace("\\_", "_"), {}), match[2]
        if target.startswith("https://"):
            return f'<a href="{escape(target)}">{label}</a>'
        if not target:
            return f'<a href="{own}{match[3]}">{label}</a>'
        file = os.path.normpath(f"docs/{target}")
        return link(label, Name(page_of(file), 0, file)) if file in {*files(), *documents()} else label
    return "".join(map(part_html, re.split(r"(\[[^]]+\]\([^)]+\))", text)))


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def markdown_blocks(text: str) -> list[list[str]]:
    """Return the lines of each heading, paragraph, list, table, and block of code. A block of code
    begins with its fence."""
    blocks, is_code = [[]], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
            blocks.append([line] if is_code else [])
        elif line.startswith("#") and not is_code:
            blocks += [[line], []]
        elif is_code or (line.strip() and not line.startswith("<!--")):
            blocks[-1].append(line)
        else:
            blocks.append([])
    return [block for block in blocks if block]


def markdown_html(text: str, own: str = "") -> str:
    """Return the HTML of headings, paragraphs, lists, tables and blocks of code. The documents
    contain nothing else.

    own: the page of the document. If it is given, headings have anchors.
    """
    out = []
    render = partial(markdown_line, names={}, own=own)
    for lines in markdown_blocks(text):
        first = lines[0]
        if first.startswith("```"):
            out.append(f"<pre>{escape(chr(10).join(lines[1:]), quote=False)}</pre>")
        elif first.startswith("#"):
            level = len(first) - len(first.lstrip("#"))
            heading = first.strip("# ")
            anchor = f' id="{anchor_of(heading)}"' if own else ""
            out.append(f"<h{level}{anchor}>{render(heading)}</h{level}>")
        elif first.startswith("|"):
            out.append("<table>")
            for number, line in enumerate(lines):
                if number == 1:
                    continue  # the line of dashes
                kind = "td" if number else "th"
                cells = [f"<{kind}>{render(cell)}</{kind}>" for cell in cells_of(line)]
                out.append(f"<tr>{''.join(cells)}</tr>")
            out.append("</table>")
        elif first.startswith("- "):
            entries = re.split(r"^- ", "\n".join(lines), flags=re.MULTILINE)[1:]
            items = [f"<li>{render(' '.join(entry.split()))}</li>" for entry in entries]
            out.append(f"<ul>{''.join(items)}</ul>")
        else:
            out.append(paragraph_html(lines, render))
    return "".join(out)


def document_html(file: str) -> str:
    text = (ROOT / file).read_text()
    return page(file, f'<header><a href="index.html">penteract</a> / <b>{file}</b></header><main class="document">'
                      f"{markdown_html(text, page_of(file))}</main>")


def index_html(everywhere: dict[str, dict[str, Name]]) -> str:
    """The playbook's table of contents, each section with its files and commands."""
    body = ['<main class="index"><h1>penteract</h1>'
            "<p>The Ultra-Scale Playbook in PyTorch, section by section. To read the files one after the other, begin "
            f'with <a href="{page_of(files()[0])}">{files()[0]}</a>; each page links the next one.</p><table>']
    for line in (ROOT / "docs" / "PLAYBOOK.md").read_text().split("\n## ")[0].splitlines():
        if line.startswith("| ") and not line.startswith("| section"):
            cells, names = [], {}
            for cell in cells_of(line):
                for file in re.findall(r"\]\(\.\./([^)]+)\)", cell):
                    names |= everywhere.get(file, {})
                cells.append(markdown_line(cell, names))
            body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    first = {file: ast.get_docstring(ast.parse((ROOT / file).read_text())).splitlines()[0] for file in everywhere}
    items = [f'<li><a href="{page_of(file)}">{file}</a> {escape(line)}</li>' for file, line in first.items()]
    read = [f'<li><a href="{page_of(file)}">{file}</a> {(ROOT / file).read_text().splitlines()[0].strip("# ")}</li>'
            for file in documents()]
    body.append(f"</table><h2>To read</h2><ul>{''.join(read)}</ul>"
                f"<h2>The files, in the order in which to read them</h2><ol>{''.join(items)}</ol></main>")
    return page("penteract", "".join(body))


def run_demos() -> Iterator[tuple[str, str]]:
    """Run every demo, and yield (file, output)."""
    for file in files():
        if "\n# ---- demo" in (ROOT / file).read_text():
            command = ["-m", file.removesuffix(".py").replace("/", ".")] if "/" in file else [file]
            yield file, subprocess.check_output([sys.executable, *command], cwd=ROOT, text=True)


def main(arguments: list[str]) -> None:
    parser = Parser("learn.pages", __doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "pages", help="where to write [pages/]")
    parser.add_argument("--demos", action="store_true", help="run all demos first, and keep what they print")
    asked = parser.parse_args(arguments)
    if asked.out.exists() and not asked.out.is_dir():
        parser.error(f"--out {asked.out}: is a file, name a folder")
    if asked.demos:
        found = dict(date=str(date.today()), outputs=dict(run_demos()))
        DEMOS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    demos = json.loads(DEMOS.read_text())
    everywhere = {file: definitions(file) for file in files()}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "index.html").write_text(index_html(everywhere))
    for file in everywhere:
        (asked.out / page_of(file)).write_text(file_html(file, everywhere, demos))
    for file in documents():
        (asked.out / page_of(file)).write_text(document_html(file))
    print(asked.out / "index.html")


if __name__ == "__main__":
    main(sys.argv[1:])
