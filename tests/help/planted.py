"""Plant a bug of data/planted.toml in a copy of the project, and see whether a test finds it.

The test runs in a process forked from a server that has torch loaded, which takes seconds instead of a minute. This
file imports nothing of the project, since the fork must import the copy's files.
"""
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import passages
from program import ROOT, SECOND_ADDRESS, ends, forks, second_server

LIMIT_S = 60  # a bug that makes its test hang is found, too


class Bug(NamedTuple):
    name: str
    file: str
    symbol: str  # the function or class with the passage, "Bucket.reduce"; "" is the whole file
    old: str  # code that stands in the symbol once; comments, docstrings and line breaks do not matter
    new: str  # the code that replaces it
    test: str  # the test that must fail, as pytest names it


BUGS = [Bug(**bug) for bug in tomllib.loads((ROOT / "tests" / "data" / "planted.toml").read_text())["bug"]]


def find(folder: Path, bug: Bug) -> tuple[str, str]:
    """Plant the bug in a copy of the project and run its test there.

    Return "failed", "passed", "hung", "no such test" or "no passage", and what pytest printed.
    """
    try:
        mutated = passages.replace((ROOT / bug.file).read_text(), bug.symbol, bug.old, bug.new)
    except ValueError:
        return "no passage", ""
    return run_with(folder, bug.file, mutated, bug.test)


def run_with(folder: Path, file: str, source: str, test: str) -> tuple[str, str]:
    """Run the test on a copy of the project in which the file has this source."""
    compile(source, file, "exec")  # a bug, not a typing error
    copy, printed = folder / "project", folder / "printed"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    (copy / file).write_text(source)

    second_server().ensure_running()
    process = forks().Process(target=run, args=(str(copy), str(printed), test, os.environ[SECOND_ADDRESS]))
    process.start()
    ended, text = ends(process, LIMIT_S), printed.read_text() if printed.exists() else ""
    if not ended:
        return "hung", text
    return ("failed" if "1 failed" in text else "passed" if "1 passed" in text else "no such test"), text


def run(folder: str, printed: str, test: str, second_address: str) -> None:
    """Run the test in the forked process, and write what it prints to a file. Exit with pytest's
    code."""
    os.setsid()
    os.chdir(folder)
    descriptor = os.open(printed, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.path[:] = [path for path in sys.path if Path(path) not in (ROOT, ROOT / "tests", ROOT / "tests" / "help")]
    os.environ.pop("PYTHONPATH", None)
    os.environ[SECOND_ADDRESS] = second_address
    del sys.modules["program"], sys.modules["passages"]
    import pytest
    sys.exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "", test])))
