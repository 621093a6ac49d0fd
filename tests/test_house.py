"""The rules of the house: files that read only files below them and keep to their budgets, and names that exist."""
import ast
import importlib
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
         for folder in (".", "plan", "run", "bench", "learn") for path in (ROOT / folder).glob("*.py")}
FOLDERS = {"plan", "run", "bench", "learn"}
# From the top to the bottom: a file imports files of lower lines alone.
FLOORS = """
bench.__main__ bench.all bench.check bench.gpu bench.kernels bench.rows bench.smoke
learn.pictures
learn.journey
plan.fit
plan.__main__
plan.published
plan.predict
plan.scaling
bench.probe
train
run.job
run.dryrun
run.log
run.device
run.faults
plan.search
plan.time
plan.machines
run.checkpoint
run.sampling
run.ranks
run.offload
model
latent
zero
muon
update
dp
tp
cp
pp
ep
fp8
flash
operations
kernels
recompute
run.data
plan.memory
plan.costs
run.timeline
run.start
run.huggingface
groups
config
param
learn.collectives
learn.gpu
learn.judge
learn.pages
learn.puzzles
collectives
run.meter
schedules
bench.__init__ learn.__init__ plan.__init__ run.__init__
"""
# These numbers only fall. A commit that needs more raises one here, and lowers another.
LINES = {  # of a root file: the most lines in all, of its docstring, and of its demo
    "train": (251, 14, 0), "model": (355, 18, 20), "dp": (151, 25, 22), "zero": (444, 31, 23), "muon": (267, 33, 18),
    "tp": (433, 33, 21), "cp": (408, 35, 13), "pp": (181, 30, 19), "ep": (454, 30, 14), "fp8": (327, 31, 23),
    "kernels": (423, 24, 0), "update": (63, 8, 0),
    "schedules": (299, 29, 0), "recompute": (187, 27, 20), "operations": (414, 14, 0), "flash": (384, 28, 26),
    "latent": (101, 21, 12),
    "param": (336, 27, 0), "collectives": (323, 21, 0), "groups": (154, 20, 0), "config": (728, 14, 0)}
FOLDER_LINES = dict(bench=2125, learn=2885, plan=2938, run=4137)
CHAIN = 10  # files of the longest chain of imports
READ = 9, 3505  # the most files, and their lines, that a technique and all that it imports are
SHARED = {"collectives", "schedules", "param", "operations", "recompute", "kernels", "flash",
          "config", "update"}
TECHNIQUES = {"dp": set(), "zero": {"dp", "muon"}, "muon": set(), "tp": set(), "cp": set(), "pp": {"schedules"},
              "ep": set(), "fp8": set()}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@cache
def imports(name: str) -> set[str]:
    """The project's files that a file imports, inside functions and by name too."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update({node.module} | {f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found.add(getattr(node.args[0], "value", ""))
    return found & set(FILES) - {name}


def test_imports_form_no_circle():
    TopologicalSorter({name: imports(name) for name in FILES}).prepare()  # raises CycleError, naming it


def test_imports_point_down():
    floors = [line.split() for line in FLOORS.strip().splitlines()]
    assert sorted(name for floor in floors for name in floor) == sorted(FILES)
    below = set()
    for floor in reversed(floors):
        for name in floor:
            assert imports(name) <= below | set(floor), name
        below |= set(floor)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_imports_no_other(name):
    assert imports(name) - SHARED <= TECHNIQUES[name]


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_read_in_few_files(name):
    found, left = set(), {name}
    while left:
        found |= left
        left = set().union(*map(imports, left)) - found
    assert len(found) <= READ[0] and sum(map(lines_of, found)) <= READ[1]


def test_of_the_root_only_train_imports_a_folder():
    assert [name for name in FILES if "." not in name and any("." in other for other in imports(name))] == ["train"]


def test_the_readme_has_every_file_of_the_root_and_every_folder():
    shown = set(re.findall(r"\[([\w/.]+)\]\(\1\)", (ROOT / "README.md").read_text()))
    assert {f"{name}.py" for name in FILES if "." not in name} | {f"{folder}/" for folder in FOLDERS} <= shown


def lines_of(name: str) -> int:
    return len(FILES[name].read_text().splitlines())


def sizes(name: str) -> tuple[int, int, int]:
    lines = FILES[name].read_text().splitlines()
    demo = next((i for i, line in enumerate(lines) if line.startswith("# ---- demo")), len(lines))
    return len(lines), tree_of(name).body[0].end_lineno, len(lines) - demo


def test_no_file_grows():
    names = [name for name in FILES if "." not in name]
    assert {name: sizes(name) for name in names if any(map(int.__gt__, sizes(name), LINES.get(name, (0, 0, 0))))} == {}
    for folder, most in FOLDER_LINES.items():
        assert sum(lines_of(name) for name in FILES if name.startswith(folder + ".")) <= most, folder


def test_chains_of_imports_are_short():
    @cache
    def chain(name: str) -> int:
        return 1 + max((chain(other) for other in imports(name) if not other.endswith("__init__")), default=0)

    assert max(map(chain, FILES)) <= CHAIN


def test_functions_are_short():
    long = {f"{name}.{node.name}": node.end_lineno - node.lineno + 1 for name in FILES
            for node in ast.walk(tree_of(name)) if isinstance(node, ast.FunctionDef)}
    assert {function: lines for function, lines in long.items() if lines > 60} == {}


def test_the_model_is_a_page_that_anybody_can_read():
    """Few names from other files, and attention's forward on a third of a screen."""
    taken = [alias.name for node in tree_of("model").body if isinstance(node, ast.ImportFrom) and node.module in FILES
             for alias in node.names]
    attention = next(node for node in tree_of("model").body if getattr(node, "name", "") == "Attention")
    forward = next(node for node in attention.body if getattr(node, "name", "") == "forward")
    assert len(taken) <= 25 and forward.end_lineno - forward.lineno < 25


@pytest.mark.parametrize("name", FILES)
def test_names_taken_from_other_files_exist(name):
    """Also those in functions that run on GPUs only."""
    nodes, modules, taken = list(ast.walk(tree_of(name))), {}, []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update({alias.name: alias.name for alias in node.names if alias.name in FILES})
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:
            modules.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            taken += [(node.module, alias.name) for alias in node.names]
    variables = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    variables |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    taken += [(modules[node.value.id], node.attr) for node in nodes if isinstance(node, ast.Attribute)
              and isinstance(node.value, ast.Name) and node.value.id in modules.keys() - variables]
    assert [f"{module}.{attribute}" for module, attribute in taken
            if not hasattr(importlib.import_module(module), attribute)] == []
