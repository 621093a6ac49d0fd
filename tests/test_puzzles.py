"""learn/puzzles.py: the repository's own solution is right, an empty body is not, and the checkout is not touched."""
import ast
import re
import subprocess
import sys
import tomllib

import planted
import pytest
from pool import slow

from learn import puzzles
from learn.puzzles import BLANK, PUZZLES, ROOT


@pytest.mark.parametrize("name", PUZZLES)
def test_a_puzzle_has_its_function_and_its_test(name):
    puzzle = PUZZLES[name]
    source = (ROOT / puzzle.file).read_text()
    empty = puzzles.blanked(source, puzzle.function)
    compile(empty, puzzle.file, "exec")
    node = puzzles.function_in(empty, puzzle.function)
    assert ast.get_docstring(node) == ast.get_docstring(puzzles.function_in(source, puzzle.function))
    assert BLANK in empty and len(node.body) == 1 + bool(ast.get_docstring(node))
    assert puzzle.hints and puzzles.tests_of(puzzle) == [puzzle.test, *puzzle.also]
    for each in puzzles.tests_of(puzzle):
        file, test = each.partition("[")[0].split("::")
        assert f"def {test}(" in (ROOT / file).read_text(), each


@pytest.mark.parametrize("name", slow(*PUZZLES))
def test_an_empty_body_fails(name, tmp_path):
    """Ours are solutions, since their tests pass in the tiers where they are."""
    puzzle = PUZZLES[name]
    source = (ROOT / puzzle.file).read_text()
    empty = puzzles.blanked(source, puzzle.function)
    outcome, printed = planted.run_with(tmp_path, puzzle.file, empty, puzzle.test)
    assert outcome == "failed" and "this is the puzzle" in printed, f"{outcome}\n{printed[-2000:]}"


HALF_SOLVED = [  # puzzle, code of the solution, what is there instead: the puzzle's first test does not see it
    ("drop", "if not until.requires_grad:\n        return", "pass"), ("drop", "storage.resize_(0)", "pass"),
    ("drop", "hook.remove()", "pass"),
    ("assign", "stages_with[param]", "1"), ("assign", ' or "tie" in param.spec.along', ""),
    ("assign", "key = param.spec.data_axis, kind(param.spec)", "key = kind(param.spec)"),
    ("assign", "key = param.spec.data_axis, kind(param.spec)", "key = param.spec.data_axis"),
    ("reduction", "if self.reduced == self.reductions:", "if False:"),
    ("balance", "(mean - loads)", "(loads.mean() - loads)"), ("bubble", "end - min(", "end - max("),
    ("engine", "sending = [pending for pending in sending if not pending.completed()]", "pass"),
    ("grid", "transpose(*outer, *inner)", "transpose(*inner, *outer)"),
    ("norm", "if self.owns(spec):", "if True:"),
    ("async-tp", "incoming, total, group)", "incoming, total, group)\n        pending.wait()"),
    ("zig-zag", "return i, 2 * c - 1 - i", "return 2 * i, 2 * i + 1"),
    ("ring-attention", "yield kv\n        #", "receiving.wait()\n        yield kv\n        #"),
    ("1f1b", "for chunk in range(v):", "for chunk in range(1):"), ("1f1b", "range(0, m, n)", "range(0, m, m)")]


@pytest.mark.parametrize("name, old, new", slow(*HALF_SOLVED))
def test_half_a_solution_is_refused(name, old, new, tmp_path):
    puzzle = PUZZLES[name]
    source = (ROOT / puzzle.file).read_text()
    solution = ast.get_source_segment(source, puzzles.function_in(source, puzzle.function))
    assert solution.count(old) == 1
    half = source.replace(solution, solution.replace(old, new))
    outcomes = [planted.run_with(tmp_path / str(number), puzzle.file, half, test)[0]
                for number, test in enumerate(puzzle.also)]
    assert {"failed", "hung"} & {*outcomes}, outcomes


def test_what_is_written_is_judged_and_hints_come_one_at_a_time(tmp_path, capsys):
    def said(*arguments: str) -> list[str]:
        puzzles.main([*arguments, "--in", str(tmp_path)])
        return capsys.readouterr().out.strip().splitlines()

    ours, copied = ROOT / "core/param.py", tmp_path / "boxes" / "core/param.py"
    assert "write boxes in core/param.py" in said("boxes")[0] and BLANK in copied.read_text()
    running, *printed, end = said("boxes")
    assert f"running {PUZZLES['boxes'].test} in {tmp_path / 'boxes'}, which takes" in running
    assert any("this is the puzzle" in line for line in printed)
    assert end == f"not solved yet; for a hint: python -m learn.puzzles boxes --hint --in {tmp_path}"
    hints = [said("boxes", "--hint")[0] for _ in range(3)]
    assert hints == [*PUZZLES["boxes"].hints, PUZZLES["boxes"].hints[-1]]
    assert said("boxes", "--reveal")[0].startswith("def boxes(") and len(said("--list")) == 24
    assert BLANK not in ours.read_text()
    copied.write_text(ours.read_text())
    assert said("boxes")[1:] == [f"solved; the next one: python -m learn.puzzles drop --in {tmp_path}"]
    assert said("bug-1", "--reveal")[0].startswith("core/param.py: ")
    with pytest.raises(ValueError, match="boxs: unknown, use one of boxes, "):
        puzzles.main(["boxs"])


def test_every_bug_can_be_planted_as_a_puzzle(tmp_path, monkeypatch):
    """In a project of that one file."""
    monkeypatch.setattr(puzzles.shutil, "copytree", lambda *_, **__: None)
    for bug in tomllib.loads((ROOT / "tests" / "data" / "planted.toml").read_text())["bug"]:
        file = tmp_path / bug["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((ROOT / bug["file"]).read_text())
        puzzles.copy(bug, tmp_path)
        compile(file.read_text(), bug["file"], "exec")
        assert file.read_text() != (ROOT / bug["file"]).read_text()


def test_each_puzzle_is_followed_by_another_until_the_last_bug():
    order, name = [], next(iter(PUZZLES))
    while name:
        order.append(name)
        name = puzzles.next_name(name)
    assert order == [*PUZZLES, *(f"bug-{number}" for number in range(1, len(planted.BUGS) + 1))]


@pytest.mark.parametrize("test, says", [
    ("import pytest\n\ndef test(): pytest.skip()", "1 skipped"),
    ("def test(): assert 1 == 2", "1 failed"), ("def test(:", "SyntaxError"), ("", "no tests ran")])
def test_only_a_test_that_passes_is_a_solution(tmp_path, test, says):
    """So must all the tests that a puzzle has."""
    (tmp_path / "test_it.py").write_text(test)
    passes, printed = puzzles.judge(PUZZLES["boxes"]._replace(test="test_it.py"), tmp_path)
    assert not passes and says in printed
    (tmp_path / "test_it.py").write_text("def test(): pass")
    assert puzzles.judge(PUZZLES["boxes"]._replace(test="test_it.py"), tmp_path)[0]
    (tmp_path / "test_more.py").write_text("def test(): assert 3 == 4")
    passes, printed = puzzles.judge(PUZZLES["boxes"]._replace(test="test_it.py", also=("test_more.py",)), tmp_path)
    assert not passes and "assert 3 == 4" in printed


def test_without_pytest_a_line_says_what_to_install(tmp_path):
    """-S: without what pip has installed."""
    command = [sys.executable, "-S", "-m", "learn.puzzles", "boxes", "--in", tmp_path / "mine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "mine").exists()
    assert re.fullmatch(r"learn.puzzles: .*: pip install -r requirements-test.txt\n", done.stderr)
    assert "pytest==" in (ROOT / "requirements-test.txt").read_text()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", ["mine", "deep/er", ".", "learn", "tests/data", "link", "../outside"])
def test_a_copy_has_the_project_and_no_copy_nor_outputs(tmp_path, monkeypatch, where):
    """Wherever --in is, inside the project or outside, and in both orders. The link leads into the project."""
    project = tmp_path / "project"
    puzzles.copy(PUZZLES["bubble"], project)
    ours = contents(project)
    for extra in ("venv/pyvenv.cfg", "venv/lib/big.py", "runs/a/model.bin", ".git/index", "learn/__pycache__/x.pyc"):
        (project / extra).parent.mkdir(parents=True, exist_ok=True)
        (project / extra).write_text("is no part of it")
    (project / "linked").mkdir()
    (project / "link").symlink_to(project / "linked")
    (project / "docs" / "up").symlink_to(project)  # a circle
    monkeypatch.setattr(puzzles, "ROOT", project)
    monkeypatch.chdir(project)
    for name in "held", "1f1b", "bug-2":
        puzzle, folder = puzzles.find(name), project / where / name
        puzzles.copy(puzzle, folder)
        copied = contents(folder)
        changed = {file for file in ours if copied[file] != ours[file]}
        assert set(copied) == set(ours) and changed == {getattr(puzzle, "file", None) or puzzle["file"]}


def test_copies_are_not_made_in_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^--in {tmp_path}/file: is a file, name a folder$"):
        puzzles.main(["boxes", "--in", str(tmp_path / "file")])
