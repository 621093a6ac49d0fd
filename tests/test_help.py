"""Every module that can be run says what it is about and which flags it has, and refuses others in one line.

`if __name__ == "__main__"` is what makes a module one that can be run, so a new one is found here by itself.
"""
import ast
import os
import re
from pathlib import Path

import pytest
from program import python

from bench import __main__ as bench

ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT, *(path.parent for path in ROOT.glob("*/__init__.py"))]
SECONDS = 30  # help comes without work; mostly it takes one second, to import torch


def runnable() -> dict[str, Path]:
    """What one writes after python -> its file."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted(folder.glob("*.py"))):
        if re.search(r'^if __name__ == "__main__":$', path.read_text(), re.MULTILINE):
            name = str(path.relative_to(ROOT))
            module = name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
            found[f"-m {module}" if "/" in name else name] = path
    return found


RUNNABLE = runnable()


def declared_flags(source: str) -> set[str]:
    """The flags that a file declares, with argparse or as fields of a class Flags."""
    found = set(re.findall(r'add_argument\("(--[\w-]+)"', source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "Flags":
            names = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
            found |= {"--" + name.replace("_", "-") for name in names}
    return found


def words_of(text: str) -> str:
    return " ".join(text.split())


def test_modules_that_can_be_run_are_found():
    assert {"train.py", "tp.py", "-m plan", "-m bench", "-m learn.pictures", "-m run.data"} <= set(RUNNABLE)
    assert not any("__init__" in command or "huggingface" in command for command in RUNNABLE)
    assert declared_flags((ROOT / "learn/pictures.py").read_text()) == {"--out"}
    assert declared_flags((ROOT / "bench/check.py").read_text()) == {"--preset"}


@pytest.mark.parametrize("command", RUNNABLE)
def test_help_says_what_a_module_is_about_and_its_flags(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # one line for each flag
    source = RUNNABLE[command].read_text()
    about = "Train a Llama-style model." if command == "train.py" else ast.get_docstring(ast.parse(source))
    for flag in "--help", "-h":
        done = python(*command.split(), flag, timeout=SECONDS)
        assert (done.returncode, done.stderr) == (0, "")
        assert words_of(about) in words_of(done.stdout)
        assert declared_flags(source) <= set(re.findall(r"--[\w-]+", done.stdout))


@pytest.mark.parametrize("command", RUNNABLE)
def test_a_wrong_argument_is_one_line(command):
    for words in (["--no-such-flag"], ["no-such-word", "--no-such-flag"]):
        done = python(*command.split(), *words, timeout=SECONDS)
        assert (done.returncode, done.stdout) == (2, "")
        name = command.removeprefix("-m ").removeprefix("learn.")
        assert re.fullmatch(rf"(learn\.)?{re.escape(name)}(\.py)?: .+\n", done.stderr)


@pytest.mark.parametrize("part", bench.PARTS)
def test_help_of_a_part_of_bench_is_about_that_part(part):
    page = words_of(bench.__doc__)
    for words in ([part, "--help"], [part, "--tp", "2", "-h"]):
        done = python("-m", "bench", *words, timeout=SECONDS)
        assert (done.returncode, done.stderr) == (0, "") and page not in words_of(done.stdout)
        assert re.match(rf"usage: (python|torchrun --nproc_per_node=\w+) -m bench {part}\b", done.stdout)
        others = [ours for other in bench.TRAINING for ours in bench.TRAINING[other] if other != part]
        for _, rival, _ in bench.TRAINING.get(part, []):
            assert rival in done.stdout
        if part in bench.TRAINING:
            assert not any(rival in done.stdout for _, rival, _ in others)
        own = ROOT / "bench" / f"{part}.py"
        if own.exists():
            assert words_of(ast.get_docstring(ast.parse(own.read_text()))) in words_of(done.stdout)
            assert declared_flags(own.read_text()) <= set(re.findall(r"--[\w-]+", done.stdout))


def test_a_prompt_may_be_help(tmp_path):
    """Sampling then looks for its checkpoint."""
    done = python("-m", "run.generate", tmp_path / "none", "--prompt", "--help", timeout=SECONDS)
    assert done.returncode == 2 and os.fspath(tmp_path / "none") in done.stderr
