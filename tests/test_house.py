"""The rules of the house: files that read only files below them, short functions, and names that exist."""
import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}
SHARED = {"collectives", "param", "operations", "recompute", "offload", "kernels", "flash", "fp8_kernels", "adamw",
          "config", "profiling"}
TECHNIQUES = {"dp": set(), "zero": {"dp"}, "tp": set(), "cp": set(), "pp": {"schedules"}, "ep": set(), "fp8": set()}


def imports(name: str, demo: bool = True) -> set[str]:
    """The project's files that a file imports, inside functions too; demo: those of its demo, at its end, as well."""
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("# ---- demo") and not demo), len(lines))
    found = set()
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Import) and node.lineno <= end:
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.lineno <= end:
            found.add(node.module)
    return found & set(FILES)


def test_imports_form_no_circle():
    TopologicalSorter({name: imports(name) for name in FILES}).prepare()  # raises CycleError, naming it


def test_imports_point_down_the_table_of_the_readme():
    rows = [re.findall(r"\[(\w+)\.py\]", line) for line in (ROOT / "README.md").read_text().splitlines()
            if line.startswith("| [") and "](tests/" not in line]
    assert sorted(name for row in rows for name in row) == sorted(FILES)
    below = set()
    for row in reversed(rows):
        below |= set(row)
        for name in row:
            assert imports(name, demo=False) <= below, name


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_imports_no_other(name):
    assert imports(name, demo=False) - SHARED <= TECHNIQUES[name]


def test_functions_are_short():
    long = {f"{name}.{node.name}": node.end_lineno - node.lineno + 1 for name, tree in FILES.items()
            for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {function: lines for function, lines in long.items() if lines > 60} == {}


def test_the_model_is_a_page_that_anybody_can_read():
    """Few names from other files, and attention's forward on a third of a screen."""
    taken = [alias.name for node in FILES["model"].body if isinstance(node, ast.ImportFrom) and node.module in FILES
             for alias in node.names]
    attention = next(node for node in FILES["model"].body if getattr(node, "name", "") == "Attention")
    forward = next(node for node in attention.body if getattr(node, "name", "") == "forward")
    assert len(taken) <= 25 and forward.end_lineno - forward.lineno < 25


@pytest.mark.parametrize("name", FILES)
def test_names_taken_from_other_files_exist(name):
    """Also those in functions that run on GPUs only."""
    nodes = list(ast.walk(FILES[name]))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names} & set(FILES)
    variables = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    variables |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    taken = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) and node.module in FILES
             for alias in node.names]
    taken += [(node.value.id, node.attr) for node in nodes if isinstance(node, ast.Attribute)
              and isinstance(node.value, ast.Name) and node.value.id in modules - variables]
    assert [f"{module}.{attribute}" for module, attribute in taken
            if not hasattr(importlib.import_module(module), attribute)] == []
