"""learn/puzzles.py: the repository's own solution is right, an empty body is not, and the checkout is not touched."""
import ast

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


@pytest.mark.parametrize("name", ["boxes", *slow(*(name for name in PUZZLES if name != "boxes"))])
def test_an_empty_body_fails_and_ours_is_a_solution(name, tmp_path):
    puzzle, folder = PUZZLES[name], tmp_path / name
    puzzles.copy(puzzle, folder)
    assert puzzles.judge(puzzle, folder).returncode == 1
    (folder / puzzle.file).write_text((ROOT / puzzle.file).read_text())
    assert puzzles.judge(puzzle, folder).returncode == 0


def test_hints_come_one_at_a_time_and_the_solution_last(tmp_path, capsys):
    def said(*arguments: str) -> str:
        puzzles.main([*arguments, "--in", str(tmp_path)])
        return capsys.readouterr().out.strip()

    assert "write boxes in param.py" in said("boxes") and BLANK in (tmp_path / "boxes" / "param.py").read_text()
    assert [said("boxes", "--hint") for _ in range(3)] == [*PUZZLES["boxes"].hints, PUZZLES["boxes"].hints[-1]]
    assert said("boxes", "--reveal").startswith("def boxes(") and len(said("--list").splitlines()) == 24
    assert BLANK not in (ROOT / "param.py").read_text()
    assert said("bug-1", "--reveal").startswith("param.py: ")
    with pytest.raises(ValueError, match="boxs: unknown, use one of boxes, "):
        puzzles.main(["boxs"])
