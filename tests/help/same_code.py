"""Check that a commit only rewords, or only moves and renames: does every file compute the same as
before?

    python tests/help/same_code.py HEAD                        the working tree against HEAD: only words may differ
    python tests/help/same_code.py main~3 main                 two revisions
    python tests/help/same_code.py HEAD --renames table.toml   after the table's renames, as renames.py applies them

Words are comments, docstrings and messages. Messages are the texts of exceptions, assertions, print
calls and help.
Everything else of a Python file is compared as a syntax tree, with its imports in any order. Files of other kinds are
compared only with --renames, word by word, so that paragraphs may wrap anew. Each difference is one line, which names
the file and the function. The exit code is 1 if there is one.
"""
import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "help"))
import renames  # noqa: E402

# Calls whose strings are read by people. The last part of the name counts: `faults.warn` is `warn`.
MESSAGE_CALLS = {"print", "need", "setting", "positive", "number", "warn", "say", "write", "Failure", "Needs",
                 "Divides"}
TEXT_FILES = (".md", ".json", ".toml", ".txt", ".cfg", ".yml")
Tree = dict[str, str]  # path -> text


class WithoutWords(ast.NodeTransformer):
    """Replace messages, and drop docstrings."""

    def drop_docstring(self, node: ast.AST) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = drop_docstring

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        self.generic_visit(node)
        if node.exc:
            node.exc = without_messages(node.exc)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if node.msg:
            node.msg = without_messages(node.msg)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in MESSAGE_CALLS or name.endswith("Error"):
            node.args = [without_messages(argument) for argument in node.args]
        for keyword in node.keywords:
            if name in MESSAGE_CALLS or keyword.arg == "help":
                keyword.value = without_messages(keyword.value)
        return node


class Messages(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("a message")

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_prose = isinstance(node.value, str) and len(re.findall(r"[A-Za-z]{2,}", node.value)) >= 2
        return ast.Constant("a message") if is_prose else node


def without_messages(node: ast.AST) -> ast.AST:
    return Messages().visit(node)


def code_of(source: str) -> dict[str, str]:
    """Return symbol -> its code without words. "imports" are the imports of the whole file, in
    alphabetical order."""
    tree = WithoutWords().visit(ast.parse(source))
    found: dict[str, list[str]] = {}
    imports = []
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                kept = [one for one in statements if not isinstance(one, ast.Import | ast.ImportFrom)]
                imports += [name for one in statements if one not in kept for name in imported(one)]
                setattr(node, field, kept)
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in inside:
            names = [getattr(one, "name", "") for one in ([node] if part is node else [node, part])]
            found.setdefault(".".join(filter(None, names)) or "the module", []).append(ast.dump(part))
        if isinstance(node, ast.ClassDef):
            head = ast.dump(ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list))
            found.setdefault(node.name, []).append(head)
    return {name: "\n".join(parts) for name, parts in found.items()} | {"imports": " ".join(sorted(imports))}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """`from core import config` and `import core.config as config` read alike."""
    names = []
    for alias in node.names:
        path = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        names.append(f"{path}={alias.asname or alias.name}")
    return names


def differences(old: Tree, new: Tree, with_text: bool = False) -> list[str]:
    """Return one line for each difference of code. with_text: and of files that are not Python."""
    found = [f"{path}: is gone" for path in old.keys() - new.keys()]
    found += [f"{path}: is new" for path in new.keys() - old.keys()]
    for path in sorted(old.keys() & new.keys()):
        if path.endswith(".py"):
            before, after = code_of(old[path]), code_of(new[path])
            found += [f"{path}: {name} differs" for name in sorted(before.keys() | after.keys())
                      if before.get(name) != after.get(name)]
        elif with_text and path.endswith(TEXT_FILES) and old[path].split() != new[path].split():
            found.append(f"{path}: has other words")
    return sorted(found)


def tree_of(revision: str | None) -> Tree:
    """Return the text files of a revision, or of the working tree."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    wanted = (".py", *TEXT_FILES)
    if revision:
        names = git("ls-tree", "-r", "--name-only", revision).splitlines()
        return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(wanted)}
    names = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return {name: (ROOT / name).read_text() for name in names if name.endswith(wanted) and (ROOT / name).exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--renames", type=Path)
    asked = parser.parse_args()
    old, new = tree_of(asked.old), tree_of(asked.new)
    if asked.renames:
        old = renames.rewrite_tree(old, renames.read(asked.renames))
    found = differences(old, new, with_text=bool(asked.renames))
    print("\n".join(found) or f"the same code in {sum(path.endswith('.py') for path in new)} Python files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
