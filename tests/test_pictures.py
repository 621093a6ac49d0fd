"""Pictures: as many files as functions, small and well-formed, and drawn from what the code says."""
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from learn import pictures

ROOT = Path(__file__).parent.parent


def test_every_picture_is_there_small_and_well_formed():
    files = {path.stem: path for path in (ROOT / "docs" / "pictures").iterdir()}
    assert set(files) == set(pictures.PICTURES)
    for path in files.values():
        ElementTree.parse(path)
        assert path.stat().st_size < 150_000, path
    shown = set(re.findall(r"\(docs/pictures/(\w+)\.svg\)", (ROOT / "README.md").read_text()))
    assert shown == set(files)


def test_pictures_are_those_that_the_code_draws(tmp_path, monkeypatch):
    """Of the others, losses, steps and experts train; bubble and planner take long."""
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for name in "schedules", "timeline", "zigzag", "grid", "ring", "collectives", "formats", "memory":
        pictures.PICTURES[name]()
        assert (tmp_path / f"{name}.svg").read_bytes() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_bytes()


def test_losses_of_runs_are_drawn_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for name, shift in ("a", 0.0), ("b", 1e-3):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(dict(step=step, loss=5 - step / 10 + shift)) + "\n"
                                                        for step in range(10)))
    pictures.main(["loss", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    text = (tmp_path / "loss.svg").read_text()
    assert "absolute difference to “a”" in text and ">b<" in text


@pytest.mark.parametrize("names, says", [
    (["rings"], "rings: unknown, use grid, timeline, "), (["loss", "no.jsonl"], "no.jsonl: there is no such file")])
def test_a_wrong_name_is_one_line(monkeypatch, names, says):
    def refuse(error, program):
        assert program == "learn.pictures" and str(error).startswith(says)
        raise SystemExit(2)
    monkeypatch.setattr(pictures.start, "refuse", refuse)
    with pytest.raises(SystemExit):
        pictures.main(names)
