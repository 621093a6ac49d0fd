"""Pictures: as many files as functions, small and well-formed, and drawn from what the code says."""
import inspect
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ep
from learn import pictures
from learn.pages import captions

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


def test_the_captions_of_the_pages_are_the_docstrings_of_what_draws():
    assert captions() == {name: inspect.getdoc(picture.draw) for name, picture in pictures.PICTURES.items()}


LONG = {name for name, picture in pictures.PICTURES.items() if picture.seconds > 2}  # most of them train


def test_pictures_are_those_that_the_code_draws(tmp_path, capsys):
    assert len(LONG) < len(pictures.PICTURES) / 2
    names = sorted(set(pictures.PICTURES) - LONG)
    pictures.main([*names, "--out", str(tmp_path)])
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{name}.svg") for name in names]
    for name in names:
        assert (tmp_path / f"{name}.svg").read_bytes() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_bytes()


def test_without_a_name_all_are_listed_and_none_is_drawn(tmp_path, monkeypatch, capsys):
    def draw() -> str:
        """What there is to see. A second sentence."""
        raise AssertionError("is drawn")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "pictures")
    monkeypatch.setattr(pictures, "PICTURES", pictures.PICTURES | {"new": pictures.Picture(draw, 12)})
    pictures.main([])
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(pictures.PICTURES)
    assert all(re.fullmatch(r"[\w-]+ +\d+ s   .+\.", line) for line in lines)
    assert lines[-1].split() == "new 12 s What there is to see.".split() and not any(tmp_path.iterdir())


def test_all_draws_all_in_a_folder_that_is_not_in_docs(tmp_path, monkeypatch, capsys):
    assert (ROOT / "docs") not in pictures.FOLDER.parents
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "new" / "pictures")
    names = list(pictures.PICTURES)
    monkeypatch.setattr(pictures, "PICTURES", {name: pictures.Picture(lambda: "<svg/>", 1) for name in names})
    pictures.main(["all"])
    assert capsys.readouterr().out.split() == [str(pictures.FOLDER / f"{name}.svg") for name in names]
    assert {path.name: path.read_text() for path in pictures.FOLDER.iterdir()} == {
        f"{name}.svg": "<svg/>" for name in names}


def test_losses_of_runs_are_drawn_beside_each_other(tmp_path):
    for name, loss in ("a", 5.0), ("b", 5.001):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"step": 0, "loss": {loss}}}\n{{"step": 1, "loss": {loss - 1}}}\n')
    pictures.main(["loss", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--out", str(tmp_path)])
    text = (tmp_path / "loss.svg").read_text()
    assert "absolute difference to “a”" in text and ">b<" in text


def drawn(figure) -> dict[str, list[tuple[float, float]]]:
    """Name in the legend -> the points of the left axes."""
    return {line.get_label(): list(zip(*line.get_data())) for line in figure.axes[0].lines}


def test_losses_of_validation_are_drawn_beside_those_of_training(tmp_path):
    """Of runs whose files have one name, and of steps that have no loss."""
    paths = []
    for folder, last in ("a", 3.0), ("b", 2.0):
        (tmp_path / folder).mkdir()
        paths.append(str(tmp_path / folder / "m.jsonl"))
        Path(paths[-1]).write_text(f"""{{"step": 4, "loss": 5.0, "val_loss": 5.5}}
            {{"step": 5, "loss": null, "val_loss": null}}\n{{"step": 6, "loss": {last}, "val_loss": {last + 1}}}\n""")
    found = drawn(pictures.loss(pictures.read_all_losses(paths)))
    assert found == {paths[0]: [(4, 5.0), (6, 3.0)], f"{paths[0]}, validation": [(4, 5.5), (6, 4.0)],
                     paths[1]: [(4, 5.0), (6, 2.0)], f"{paths[1]}, validation": [(4, 5.5), (6, 3.0)]}
    Path(paths[1]).rename(tmp_path / "c.jsonl")
    assert list(drawn(pictures.loss(pictures.read_all_losses([paths[0], str(tmp_path / "c.jsonl")])))) == [
        "m", "m, validation", "c", "c, validation"]


@pytest.mark.parametrize("names, says", [
    (["rings"], "rings: unknown, use grid, timeline, "), (["grid", "all"], "all: unknown, use grid, "),
    (["loss"], "loss: unknown, use grid, "), (["grid", "--out", __file__], f"--out {__file__}: is a file, name a "),
    (["loss", "no.jsonl"], "no.jsonl: cannot be read as --metrics: "), (["loss", "/dev/null"], "/dev/null: is empty"),
    (["loss", __file__], f"{__file__}: cannot be read as --metrics: ")])
def test_a_wrong_name_is_one_line(capsys, names, says):
    with pytest.raises(SystemExit, match="^2$"):
        pictures.main(names)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith(f"learn.pictures: {says}")


def test_experts_of_the_picture_learn():
    balance = ep.Balance(router_bias_rate=0.01)
    (_, before), (shares, after) = (pictures.train_experts(balance, steps) for steps in (20, 40))
    assert sum(shares) == pytest.approx(1) and after < before
