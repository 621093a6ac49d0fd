"""Find a passage of code in a source file by its tokens, whatever comments, docstrings and line breaks surround it.

A passage is written as code and is found inside one function or class:

    replace(source, "Bucket.ready", "self.left == 0", "self.left <= 1")

Only tokens are compared. A passage therefore survives when somebody rewords a comment or a docstring, wraps a line
inside brackets or indents a block. It is lost when the code itself changes, which is the point.
"""
import ast
import io
import tokenize
from functools import cache
from typing import NamedTuple

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
STARTS_STATEMENT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Token(NamedTuple):
    text: str
    start: tuple[int, int]  # line, counted from 1, and column
    end: tuple[int, int]


@cache
def code_tokens(source: str, is_fragment: bool = False) -> list[Token]:
    """Return the tokens that compute something: no comments, no docstrings, no line breaks and no indentation.

    A fragment may have unbalanced brackets, and a string at its beginning is no docstring.
    """
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            tokens.append(token)
    except tokenize.TokenError:  # raised at the end of a fragment with an open bracket, after all its tokens
        pass
    found, is_start = [], not is_fragment
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        ends_statement = following is not None and following.type in {tokenize.NEWLINE, tokenize.COMMENT}
        is_docstring = token.type == tokenize.STRING and is_start and ends_statement
        if token.type not in LAYOUT and not is_docstring:
            found.append(Token(token.string, token.start, token.end))
        if token.type not in {tokenize.COMMENT, tokenize.NL}:
            is_start = token.type in STARTS_STATEMENT
    return found


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


@cache
def spans(source: str, symbol: str) -> list[tuple[int, int]]:
    """Return (first line, last line) of each function or class of that qualified name, with its decorators.

    "" is the whole file. A property and its setter share a name, so that there may be several.
    """
    found = []

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{path}.{child.name}".lstrip(".")
                if name == symbol:
                    first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                    found.append((first, child.end_lineno))
                visit(child, name)
            else:
                visit(child, path)

    if not symbol:
        return [(1, len(source.splitlines()))]
    visit(ast.parse(source), "")
    return found


def find(source: str, symbol: str, passage: str) -> list[tuple[Token, Token]]:
    """Return the first and last token of each place in `symbol` where the passage's tokens stand."""
    wanted = [token.text for token in code_tokens(passage.strip(), is_fragment=True)]
    found = []
    for start, stop in spans(source, symbol):
        tokens = [token for token in code_tokens(source) if start <= token.start[0] and token.end[0] <= stop]
        texts = [token.text for token in tokens]
        for at in range(len(texts) - len(wanted) + 1):
            if wanted and texts[at:at + len(wanted)] == wanted:
                found.append((tokens[at], tokens[at + len(wanted) - 1]))
    return found


def replace(source: str, symbol: str, passage: str, new: str) -> str:
    """Return the source with `new` in the passage's place, indented as the passage was.

    Raise ValueError unless the passage stands in `symbol` exactly once.
    """
    found = find(source, symbol, passage)
    if len(found) != 1:
        raise ValueError(f"{len(found)} places, not one, in {symbol or 'the file'}: {passage.strip()}")
    (first, last), lines = found[0], source.splitlines(keepends=True)
    start_line, start_column = first.start
    end_line, end_column = last.end
    deeper = indent_of(lines[start_line - 1]) - indent_of(passage.lstrip("\n"))
    head, *rest = new.strip("\n").split("\n")
    replacement = "\n".join([head.lstrip(), *(" " * deeper + line if line else line for line in rest)])
    line = lines[start_line - 1]
    before = "".join(lines[:start_line - 1]) + line[:start_column]
    after = lines[end_line - 1][end_column:] + "".join(lines[end_line:])
    return before + replacement + after
