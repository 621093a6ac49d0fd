import datetime
import gc
import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it: what is tested is then what runs
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests"), os.path.join(ROOT, "tests", "help")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # for the pool's processes

import program  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Before anybody imports kernels.py: transformers does, which looks for a package of that name.
    os.environ["TRITON_INTERPRET"] = "1"

from pool import Pool  # noqa: E402

if find_spec("triton"):  # which is for Linux alone
    from triton.runtime import interpreter

    # The interpreter searches Triton's whole language for what it must wrap at each call of each function of a kernel,
    # in a quarter of its time. This searches a module or class once. Ranks of the pool have the interpreter as it is.
    is_builtin = interpreter.tl.core.is_builtin
    builtins_of = cache(lambda part: [name for name in dir(part) if is_builtin(getattr(part, name))])
    interpreter._patch_builtin = lambda part, *rest: [interpreter._patch_attr(part, name, getattr(part, name), *rest)
                                                      for name in builtins_of(part) if is_builtin(getattr(part, name))]


@pytest.fixture(autouse=True)
def seed():
    """A test draws the same numbers whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def kernels_run():
    """What is said of a kernel is not said of the torch that replaces one that does not run."""
    yield
    if "kernels" in sys.modules:
        assert not getattr(sys.modules["kernels"], "failed", {})


def pytest_configure(config):
    if " " in ROOT:
        pytest.exit(f"{ROOT}: tests split command lines at spaces, clone into a folder whose path has none", 2)
    if hasattr(config, "workerinput"):  # one of several processes, which will need its servers
        program.start_servers()


def pytest_addoption(parser):
    parser.addoption("--grids", type=int, default=20, help="with -m random: how many grids")
    parser.addoption("--record", action="store_true", help="with -m baseline: record what the program does now")
    parser.addoption("--first-grid", type=int, default=0, help="with -m random: the seed of the first of them")


def pytest_xdist_auto_num_workers(config):
    """Three processes share the tests of a whole tier, then what the others have left; in the default tier, which
    hardly waits, not more than there are cores. Tests chosen by name, and -m timing, run in this process."""
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    most = os.cpu_count() if "not slow" in config.option.markexpr else 3
    return 0 if chosen or config.option.markexpr == "timing" else min(3, most)


def pytest_collection_modifyitems(items):
    """Files whose tests need no worlds of processes first: much of what is broken shows soon."""
    needs_pool = {item.path for item in items if "pool" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in needs_pool)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Modules, and what earlier tests keep, are no garbage: train.py, which collects before its loop, need not look at
    them every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def pytest_terminal_summary(terminalreporter):
    """After `pytest -m mutants`: which planted bugs were found, by which test; how many, also in tests/README.md."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])
               if report.when == "call" and "test_a_mutant_is_killed" in report.nodeid]
    if not reports:
        return
    from planted import BUGS
    tests = {bug.name: bug.test for bug in BUGS}
    terminalreporter.section("mutants")
    for report in reports:
        name = report.nodeid.split("[", 1)[1][:-1]
        outcome = dict(report.user_properties).get("outcome", "error")
        terminalreporter.line(f"{'SURVIVED' if outcome == 'passed' else outcome:12s} {name:52s} {tests[name]}")
    killed = sum(report.passed for report in reports)
    lost = sum(dict(report.user_properties).get("outcome") == "no passage" for report in reports)
    terminalreporter.line(f"kill rate: {killed} of {len(reports)}; bugs whose passage is gone: {lost}")
    if len(reports) == len(BUGS):
        readme = Path(ROOT, "tests", "README.md")
        line = f"Planted bugs found: {killed} of {len(reports)} ({datetime.date.today()})."
        readme.write_text(re.sub(r"Planted bugs found: .*\.", line, readme.read_text()))


@pytest.fixture
def cudnn():
    """Torch's two operators of cuDNN's attention, on the CPU: what they must be given, and results in their layout."""
    from operations import Mask, math_backward, math_forward

    def forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        assert attn_bias is scale is None and compute_log_sumexp and dropout_p == 0
        o, lse = math_forward(q, k, v, Mask(is_causal))
        empty = q.new_empty(0, dtype=torch.int64)
        return o, lse.float().unsqueeze(-1), empty, empty, q.shape[2], k.shape[2], empty, empty, q.new_empty(0)

    def backward(do, q, k, v, o, lse, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *,
                 scale=None):
        assert attn_bias is cum_q is cum_k is scale is None and dropout_p == 0 and seed.dtype == torch.int64
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert lse.dtype == torch.float32 and do.stride(-1) == 1
        return math_backward(do, q, k, v, o, lse[..., 0], Mask(is_causal))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    yield
    library._destroy()
