import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it: what is tested is then what runs
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the pool's processes

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Before anybody imports kernels.py: transformers does, which looks for a package of that name.
    os.environ["TRITON_INTERPRET"] = "1"

from pool import Pool  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    """A test draws the same numbers whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def pytest_terminal_summary(terminalreporter):
    """After `pytest -m mutants`: which planted bugs were found, by which test, and how many."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])
               if report.when == "call" and "test_a_mutant_is_killed" in report.nodeid]
    if reports:
        from test_mutants import MUTANTS
        killers = {mutant.name: mutant.killer for mutant in MUTANTS}
        terminalreporter.section("mutants")
        for report in reports:
            name = report.nodeid.split("[", 1)[1][:-1]
            terminalreporter.line(f"{'killed  ' if report.passed else 'SURVIVED'} {name:52s} {killers[name]}")
        killed = sum(report.passed for report in reports)
        terminalreporter.line(f"kill rate: {killed} of {len(reports)}")
