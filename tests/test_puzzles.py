"""learn/puzzles.py: the repository's own solution is right, an empty body is not, and the checkout is not touched."""
import ast
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
    file, test = puzzle.test.split("::")
    assert f"def {test}(" in (ROOT / file).read_text() and puzzle.hints


@pytest.mark.parametrize("name", slow(*PUZZLES))
def test_an_empty_body_fails(name, tmp_path):
    """Ours are solutions, since their tests pass in the tiers where they are."""
    puzzle = PUZZLES[name]
    source = (ROOT / puzzle.file).read_text()
    empty = puzzles.blanked(source, puzzle.function)
    outcome, printed = planted.run_with(tmp_path, puzzle.file, empty, puzzle.test)
    assert outcome == "failed" and "this is the puzzle" in printed, f"{outcome}\n{printed[-2000:]}"


def test_what_is_written_is_judged_and_hints_come_one_at_a_time(tmp_path, capsys):
    def said(*arguments: str) -> str:
        puzzles.main([*arguments, "--in", str(tmp_path)])
        return capsys.readouterr().out.strip()

    ours, copied = ROOT / "param.py", tmp_path / "boxes" / "param.py"
    assert "write boxes in param.py" in said("boxes") and BLANK in copied.read_text()
    assert "this is the puzzle" in said("boxes")
    assert [said("boxes", "--hint") for _ in range(3)] == [*PUZZLES["boxes"].hints, PUZZLES["boxes"].hints[-1]]
    assert said("boxes", "--reveal").startswith("def boxes(") and len(said("--list").splitlines()) == 24
    assert BLANK not in ours.read_text()
    copied.write_text(ours.read_text())
    assert said("boxes") == "solved"
    assert said("bug-1", "--reveal").startswith("param.py: ")
    with pytest.raises(ValueError, match="boxs: unknown, use one of boxes, "):
        puzzles.main(["boxs"])


def test_every_bug_can_be_planted_as_a_puzzle(tmp_path, monkeypatch):
    """In a project of that one file."""
    monkeypatch.setattr(puzzles.shutil, "copytree", lambda *_, **__: None)
    for bug in tomllib.loads((ROOT / "tests" / "data" / "planted.toml").read_text())["bug"]:
        file = tmp_path / bug["file"]
        file.parent.mkdir(exist_ok=True)
        file.write_text((ROOT / bug["file"]).read_text())
        puzzles.copy(bug, tmp_path)
        compile(file.read_text(), bug["file"], "exec")
        assert file.read_text() != (ROOT / bug["file"]).read_text()
