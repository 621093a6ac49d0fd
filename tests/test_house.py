"""The rules of the house: imports point down and form no circle, functions and lines are short, names exist.

Nothing here counts the lines of a file: a file is as long as it needs to be to be understood at first reading.
"""
import ast
import importlib
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
         for folder in (".", "core", "plan", "run", "bench", "learn") for path in (ROOT / folder).glob("*.py")}
FOLDERS = {"core", "plan", "run", "bench", "learn"}
# From the top to the bottom: a file imports files of lower lines alone.
FLOORS = """
bench.__main__ bench.check bench.gpu bench.smoke
bench.gpu_rows bench.probe_gpu
bench.kernels bench.training
bench.rows
learn.pictures
plan.__main__
plan.scaling
bench.probe
train
run.job
run.dryrun
run.log
run.device
run.faults
plan.search
plan.step_time
plan.machines
run.checkpoint
run.generate
run.ranks
run.offload
model
mla
zero
muon
diloco
optimizers
dp
tp
cp
pp
ep
fp8
fp8_kernels
flash
sdpa
operations
kernels
recompute
run.data
run.tokenizing
run.chat
run.texts
run.token_files
plan.memory
plan.costs
run.timeline
run.cli
run.huggingface
core.groups
core.rules
core.config
core.param
core.gradients
learn.written_out
learn.triton_primer
learn.judge
learn.pages
learn.puzzles
core.collectives
run.meter
plan.printing
schedules
bench.__init__ core.__init__ learn.__init__ plan.__init__ run.__init__
"""
SHARED = {"core.collectives", "schedules", "core.param", "core.gradients", "operations", "recompute", "kernels",
          "flash", "sdpa", "core.config", "optimizers"}
TECHNIQUES = {"dp": set(), "zero": {"dp", "muon"}, "muon": set(), "diloco": set(), "tp": set(), "cp": set(),
              "pp": {"schedules"}, "ep": set(), "fp8": {"fp8_kernels"}}
# Files of the root without a demo yet. train.py is the demo of all of them.
WITHOUT_DEMO = {"train"}


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


def test_the_planner_stands_on_settings_and_schedules_alone():
    """So that it runs without torch, and that run/ may import it."""
    for name in FILES:
        if name.startswith("plan."):
            others = {other for other in imports(name) if not other.startswith("plan.")}
            assert others <= {"core.config", "core.rules", "schedules"}, name


def test_of_the_root_only_train_imports_a_folder_other_than_core():
    assert [name for name in FILES if "." not in name and any(
        "." in other and not other.startswith("core.") for other in imports(name))] == ["train"]


def test_the_readme_has_every_file_of_the_root_and_every_folder():
    shown = set(re.findall(r"\[([\w/.]+)\]\(\1\)", (ROOT / "README.md").read_text()))
    assert {f"{name}.py" for name in FILES if "." not in name} | {f"{folder}/" for folder in FOLDERS} <= shown


def test_functions_are_short():
    long = {f"{name}.{node.name}": node.end_lineno - node.lineno + 1 for name in FILES
            for node in ast.walk(tree_of(name)) if isinstance(node, ast.FunctionDef)}
    assert {function: lines for function, lines in long.items() if lines > 60} == {}


@cache
def paths() -> list[Path]:
    """Every file of the project, and of its tests."""
    return [path for folder in (".", *FOLDERS, "tests", "tests/help") for path in (ROOT / folder).glob("*.py")]


def test_loops_assign_to_names():
    """A reader overlooks that `for self.x in ...` changes an object."""
    loops = [(path, node.target) for path in paths() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.For | ast.comprehension)]
    others = [f"{path.relative_to(ROOT)}:{target.lineno}" for path, target in loops
              if any(isinstance(part, ast.Attribute | ast.Subscript) for part in ast.walk(target))]
    assert others == [] and len(loops) > 1000


def test_lines_are_at_most_120_columns():
    wide = {f"{path.relative_to(ROOT)}:{number}" for path in paths()
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120}
    assert wide == set()


def test_a_file_of_the_root_has_a_docstring_and_a_demo_that_prints():
    silent = set()
    for name in FILES:
        if "." in name:
            continue
        assert ast.get_docstring(tree_of(name)), name
        # The demo, and what it calls, are the functions from `demo` or the heading above it on.
        text = FILES[name].read_text()
        calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(text[text.find("# ---- demo"):]))
                 if isinstance(node, ast.Call)] if "\ndef demo(" in text and "# ---- demo" in text else []
        is_run = any(ast.unparse(node.test) == "__name__ == '__main__'" for node in tree_of(name).body
                     if isinstance(node, ast.If))
        if "print" not in calls or not is_run:
            silent.add(name)
    assert silent == WITHOUT_DEMO


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
