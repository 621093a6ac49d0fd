"""Rename flags, files and pieces of code everywhere at once: code, tests, planted bugs, baseline, pages and documents.

    python tests/help/renames.py table.toml            change the working tree, which has to be clean
    python tests/help/same_code.py HEAD --renames table.toml     then shows that nothing else has changed

The table:

    [flags]                            # --seq becomes --seq-len, and --no-seq becomes --no-seq-len
    seq = "seq-len"

    [files]                            # also the imports of a file, `python -m`, links and names in prose
    "config.py" = "core/config.py"
    "latent.py" = "mla.py"

    [[code]]                           # text that stands between characters that are no part of a name
    old = "batch.seq"
    new = "batch.seq_len"
    files = "*.py"                     # the default; planted.toml is code, too

Two things are left to the author: computed paths, such as `dirname(config.__file__)`, and lines
that have become too long. The program lists both, and all remaining uses of old names.
"""
import argparse
import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
SUFFIXES = (".py", ".md", ".json", ".toml", ".txt")
CODE_FILES = ("*.py", "tests/data/planted.toml")


class Code(NamedTuple):
    old: str
    new: str
    files: str = ""  # a pattern of paths; "" is CODE_FILES


class Renames(NamedTuple):
    flags: dict[str, str]  # without dashes in front
    files: dict[str, str]
    code: list[Code]


def read(path: Path) -> Renames:
    table = tomllib.loads(path.read_text())
    return Renames(table.get("flags", {}), table.get("files", {}), [Code(**one) for one in table.get("code", [])])


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def rewrite_flags(text: str, flags: dict[str, str]) -> str:
    if not flags:
        return text
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])--(no-)?({names})(?![\w-])",
                  lambda found: f"--{found[1] or ''}{flags[found[2]]}", text)


def rewrite_files(text: str, files: dict[str, str]) -> str:
    """Rewrite names of files in prose, links and commands. `../config.py` is a link; `x/config.py`
    is another file."""
    for old, new in files.items():
        text = re.sub(rf"(?<![\w/.-])((?:\.\./)*){re.escape(old)}(?!\w)", lambda found, new=new: found[1] + new, text)
        if "/" in old:
            # `run.sampling`, as in `python -m run.sampling` and in imports. A module of the root has no dot to know it
            # by: rewrite_imports finds its imports.
            text = re.sub(rf"(?<![\w.]){re.escape(module_of(old))}(?!\w)", module_of(new), text)
    return text


def rewrite_imports(text: str, files: dict[str, str]) -> str:
    """Rewrite imports of moved modules, even in code inside strings, and uses of a module's name if
    the name changes."""
    for old, new in files.items():
        old_package, _, was = module_of(old).rpartition(".")
        package, _, name = module_of(new).rpartition(".")
        is_imported = False
        if not old_package:
            statement = f"from {package} import {name}" if package else f"import {name}"
            text, count = re.subn(rf"(?m)^([ ]*)import {was}$", rf"\1{statement}", text)
            is_imported = bool(count)
            text = re.sub(rf"(?m)^([ ]*)from {was} import ", rf"\1from {module_of(new)} import ", text)
        elif package:
            pattern = rf"(?m)^([ ]*from {re.escape(old_package)} import (?:[\w, ]*\b)?){was}\b"
            text, count = re.subn(pattern, rf"\g<1>{name}", text)
            is_imported = bool(count)
        if is_imported and was != name:
            text = re.sub(rf"(?<![\w./\"'-]){was}\.(?=[A-Za-z_])(?!py\b)", f"{name}.", text)
    return text


def rewrite_code(path: str, text: str, code: list[Code]) -> str:
    for old, new, files in code:
        if any(fnmatch.fnmatch(path, pattern) for pattern in ([files] if files else CODE_FILES)):
            before = "" if not old[:1].isalnum() else r"(?<!\w)" if "." in old else r"(?<![\w.])"
            after = r"(?!\w)" if old[-1:].isalnum() or old.endswith("_") else ""
            text = re.sub(before + re.escape(old) + after, lambda _, new=new: new, text)
    return text


def rewrite(path: str, text: str, renames: Renames) -> str:
    text = rewrite_flags(text, renames.flags)
    if path.endswith((".py", ".md", "planted.toml")):
        text = rewrite_imports(text, renames.files)
    text = rewrite_files(text, renames.files)
    return rewrite_code(path, text, renames.code)


def rewrite_tree(tree: dict[str, str], renames: Renames) -> dict[str, str]:
    """Return path -> text after the renames. tree: path -> text before."""
    return {renames.files.get(path, path): rewrite(path, text, renames) for path, text in tree.items()}


def leftovers(tree: dict[str, str], renames: Renames) -> list[str]:
    """Return lines that still use an old name, or compute a path from a file that moved."""
    modules = [module_of(old).rpartition(".")[2] for old in renames.files]
    wanted = [rf"(?<![\w-])--(?:no-)?{re.escape(flag)}(?![\w-])" for flag in renames.flags]
    wanted += [rf"\bimport [\w, ]*\b{name}\b|\b{name}\.__file__" for name in modules]
    wanted += [rf"(?<![\w/.-]){re.escape(old)}(?!\w)" for old in renames.files]
    return [f"{path}:{number}: {line.strip()[:100]}" for path, text in sorted(tree.items()) if path.endswith(SUFFIXES)
            for number, line in enumerate(text.splitlines(), 1)
            if any(re.search(pattern, line) for pattern in wanted)
            and not any(re.search(rf"\bfrom {re.escape(module_of(new).rpartition('.')[0])} import", line)
                        for new in renames.files.values() if "/" in new)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    renames = read(parser.parse_args().table)

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    if git("status", "--porcelain", "--untracked-files=no"):
        print("renames: commit or stash your changes first", file=sys.stderr)
        return 2
    for old, new in renames.files.items():
        (ROOT / new).parent.mkdir(exist_ok=True)
        git("mv", old, new)
    tree = {name: (ROOT / name).read_text() for name in git("ls-files").splitlines() if name.endswith(SUFFIXES)}
    moved = {new: old for old, new in renames.files.items()}
    for name, text in tree.items():
        if (changed := rewrite(moved.get(name, name), text, renames)) != text:
            (ROOT / name).write_text(changed)
            tree[name] = changed
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "--select", "I", "--fix", "."], cwd=ROOT)
    print("\n".join(leftovers(tree, renames)))
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "--output-format", "concise", "."], cwd=ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
