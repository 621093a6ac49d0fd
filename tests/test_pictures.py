"""Pictures: as many files as functions, small and well-formed, and drawn from what the code says."""
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ep
from learn import pictures

ROOT = Path(__file__).parent.parent


def test_every_picture_is_there_small_and_well_formed():
    files = {path.stem: path for path in (ROOT / "docs" / "pictures").iterdir()}
    assert set(files) == set(pictures.PICTURES)
    for path in files.values():
        ElementTree.parse(path)
        assert path.stat().st_size < 150_000, path
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "RUNNING.md").read_text()
    shown = set(re.findall(r"pictures/([\w-]+)\.svg\)", pages))
    assert shown == set(files)


def test_pictures_are_those_that_the_code_draws(tmp_path, monkeypatch):
    """Of the others, losses, fp8, steps and experts train; bubble and planner take long."""
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for name in set(pictures.PICTURES) - {"losses", "fp8", "steps", "experts", "bubble", "planner"}:
        pictures.PICTURES[name]()
        assert (tmp_path / f"{name}.svg").read_bytes() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_bytes()


def test_losses_of_runs_are_drawn_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for name, loss in ("a", 5.0), ("b", 5.001):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"step": 0, "loss": {loss}}}\n{{"step": 1, "loss": {loss - 1}}}\n')
    pictures.main(["loss", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    text = (tmp_path / "loss.svg").read_text()
    assert "absolute difference to “a”" in text and ">b<" in text


@pytest.mark.parametrize("names, says", [
    (["rings"], "rings: unknown, use grid, timeline, "),
    (["loss", "no.jsonl"], "no.jsonl: cannot be read as --metrics: "), (["loss", "/dev/null"], "/dev/null: is empty"),
    (["loss", __file__], f"{__file__}: cannot be read as --metrics: ")])
def test_a_wrong_name_is_one_line(monkeypatch, names, says):
    def refuse(error, program):
        assert program == "learn.pictures" and str(error).startswith(says)
        raise SystemExit(2)
    monkeypatch.setattr(pictures.start, "refuse", refuse)
    with pytest.raises(SystemExit):
        pictures.main(names)


def test_experts_of_the_picture_learn():
    (_, before), (shares, after) = (pictures.train_experts(ep.Balance(bias_rate=0.01), steps) for steps in (20, 40))
    assert sum(shares) == pytest.approx(1) and after < before
