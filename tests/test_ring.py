"""Written-out collectives: results equal to torch.distributed's; messages, bytes and hops equal to the docstrings."""
import contextlib
import io
import re
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from grids import everyone
from pool import Pool, slow
from program import ROOT

import collectives
from learn import collectives as ring

SUMMED = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
          torch.uint8]
MOVED = [torch.bool, torch.complex64]  # whose sums differ between backends, or do not exist
NAMES = ["broadcast", "reduce", "tree_all_reduce", "ring_all_reduce", "doubling_all_reduce", "hierarchical_all_reduce",
         "ring_reduce_scatter", "gather", "scatter", "ring_all_gather", "bruck_all_gather", "all_to_all", "barrier"]


def pattern(r: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rank r's tensor, of integers so small that every dtype adds them exactly."""
    return ((torch.arange(torch.Size(shape).numel()) * 7 + 3 * r) % 5).to(dtype).view(shape)


def splits(i: int, n: int, rows: int) -> list[int]:
    """How many rows rank i sends to each of n: unequal, some of them 0."""
    first = min(i, rows)
    return [first, *[0] * (n - 2), rows - first] if n > 1 else [rows]


def theirs(x: torch.Tensor, root: int) -> dict[str, torch.Tensor | None]:
    """What torch.distributed makes of x. A root's tensor is None elsewhere."""
    n, r = dist.get_world_size(), dist.get_rank()
    there, total, reduced = x.clone(), x.clone(), x.clone()
    dist.broadcast(there, root)
    collected = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(collected, x)
    gathered = collected if r == root else None
    if x.dtype in SUMMED:  # gloo gathers no bool
        gathered = [torch.empty_like(x) for _ in range(n)] if r == root else None
        dist.gather(x, gathered, root)
    results = {"broadcast": there, "gather": torch.stack(gathered) if r == root else None,
               "ring_all_gather": torch.stack(collected), "bruck_all_gather": torch.stack(collected)}
    if x.dtype in SUMMED:
        dist.all_reduce(total)
        dist.reduce(reduced, root)
        results |= dict.fromkeys((name for name in NAMES if name.endswith("all_reduce")), total)
        results["reduce"] = reduced if r == root else None
    if x.ndim:
        results["scatter"] = there.tensor_split(n)[r]  # torch's own scatter needs equal shards
        received = [splits(i, n, len(x))[r] for i in range(n)]
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x, received, splits(r, n, len(x)))
        results["all_to_all"] = out
        if x.dtype in SUMMED:
            results["ring_reduce_scatter"] = total.tensor_split(n)[r]
    return results


def ours(x: torch.Tensor, root: int, names, inner, outer) -> dict[str, torch.Tensor | None]:
    group, n, r = everyone(), dist.get_world_size(), dist.get_rank()
    calls = {name: getattr(ring, name) for name in NAMES}
    results = {}
    for name in names:
        if name in ("broadcast", "reduce", "gather", "scatter"):
            results[name] = calls[name](x, root, group)
        elif name == "all_to_all":
            received = [splits(i, n, len(x))[r] for i in range(n)]
            results[name] = ring.all_to_all(x, received, splits(r, n, len(x)), group)
        elif name == "hierarchical_all_reduce":
            results[name] = ring.hierarchical_all_reduce(x, inner, outer)
        else:
            results[name] = calls[name](x, group)
    return results


def compare(every_dtype: bool) -> tuple[int, list[str], dict[str, list], int]:
    """On every rank: how many results were compared, those that differ, its steps of each collective, bytes sent."""
    n, r = dist.get_world_size(), dist.get_rank()
    m, inner, outer = ring.two_levels(n)
    cases = [((2 * n + 1, 3), torch.float32), ((1, 2), torch.int64), ((0, 3), torch.float32)]
    if n <= 4:
        cases += [((n,), torch.float64), ((), torch.float32)]
    if every_dtype:
        cases += [((7,), dtype) for dtype in SUMMED + MOVED]
    compared, wrong = 0, []
    for case, (shape, dtype) in enumerate(cases):
        root = (n - 1) * (case % 2)
        x = pattern(r, shape, dtype)
        expected = theirs(x, root)
        given = x.t().contiguous().t().requires_grad_() if case == 0 else x  # not contiguous, on purpose
        found = ours(given, root, expected, inner, outer)
        for name, tensor in expected.items():
            same = found[name] is None if tensor is None else (
                torch.equal(found[name], tensor) and found[name].dtype == dtype and not found[name].requires_grad)
            compared += 1
            if not same:
                wrong.append(f"{name} of {dtype} {shape}, root {root}: {found[name]}, not {tensor}")
        if not torch.equal(given, pattern(r, shape, dtype)):
            wrong.append(f"{dtype} {shape} was changed")
    logs, before = {}, sum(collectives.sent.values())
    x = torch.arange(4 * n, dtype=torch.float32)
    for function, call in ring.examples(everyone(), inner, outer, x, x[:4]).items():
        with ring.recording() as steps:
            call()
        logs[function.__name__] = [tuple(step) for step in steps]
    return compared, wrong, logs, sum(collectives.sent.values()) - before


@pytest.fixture(scope="module")
def comparison(pool):
    """`compare` on n ranks, run once per n."""
    return cache(lambda n: pool.run(n, "test_ring:compare", every_dtype=n == 3))


def check_results(outcomes: list, n: int) -> None:
    for compared, wrong, *_ in outcomes:
        assert wrong == [] and compared >= 3 * 12


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, *slow(5, 7, 8)])
def test_results_are_those_of_torch_for_any_dtype_and_size(comparison, n):
    check_results(comparison(n), n)


def check_costs(outcomes: list, n: int) -> None:
    """Counted messages, bytes, hops and time are those of the docstrings."""
    m = n // 2 if n % 2 == 0 and n > 2 else n
    links = {True: (3.0, 0.5), False: (11.0, 1.25)}  # α and β inside a node, and between nodes
    total = 0
    for name in NAMES:
        logs = [[ring.Step(*step) for step in logs[name]] for _, _, logs, _ in outcomes]
        X = 16 if "gather" in name else 16 * n
        want = ring.cost(getattr(ring, name), n, X, *links[True], m=m, α2=11.0, β2=1.25)
        messages = ring.replay(logs)
        nbytes = sum(message.nbytes for message in messages)
        hops = messages[-1].end if messages else 0
        two_level = name == "hierarchical_all_reduce"
        timed = ring.replay(logs, lambda i, j: links[not two_level or i // m == j // m])  # noqa: B023
        assert (len(messages), nbytes, hops) == want[:3], name
        assert (timed[-1].end if timed else 0) == pytest.approx(want.time), name
        total += nbytes
    assert total == sum(sent for *_, sent in outcomes)  # what collectives.py counts


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, *slow(5, 7, 8)])
def test_messages_bytes_hops_and_time_are_those_of_the_docstring(comparison, n):
    check_costs(comparison(n), n)


@pytest.mark.slow
def test_nine_ranks():
    with contextlib.closing(Pool(9)) as pool:
        outcomes = pool.run(9, "test_ring:compare", every_dtype=True)
    check_results(outcomes, 9)
    check_costs(outcomes, 9)


@pytest.mark.parametrize("name, n, messages, hops", [
    ("broadcast", 8, 7, 3), ("broadcast", 5, 4, 3), ("reduce", 6, 5, 3), ("ring_all_reduce", 8, 112, 14),
    ("tree_all_reduce", 8, 14, 6), ("doubling_all_reduce", 8, 24, 3), ("doubling_all_reduce", 5, 10, 4),
    ("ring_reduce_scatter", 4, 12, 3), ("ring_all_gather", 5, 20, 4), ("bruck_all_gather", 5, 15, 3),
    ("gather", 7, 6, 3), ("scatter", 8, 7, 3), ("all_to_all", 8, 56, 7), ("barrier", 5, 15, 3)])
def test_formulas_give_the_counts_worked_out_by_hand(name, n, messages, hops):
    cost = ring.cost(getattr(ring, name), n, 1)
    assert (cost.messages, cost.hops) == (messages, hops)


def test_the_bytes_of_trees_and_of_two_levels_are_those_worked_out_by_hand():
    assert ring.cost(ring.gather, 8, 10).bytes == (4 * 1 + 2 * 2 + 1 * 4) * 10
    assert ring.cost(ring.scatter, 4, 40).bytes == 20 + 2 * 10
    between = ring.cost(ring.hierarchical_all_reduce, 8, 80, α=0, β=0, m=4, α2=0, β2=1).time
    assert between == 2 * 80 / 8  # of each rank: one exchange of half its quarter in each of two rounds
    inside = ring.cost(ring.hierarchical_all_reduce, 8, 80, α=5, β=1, m=4, α2=0, β2=0).time
    assert inside == 2 * 3 * (5 + 80 / 4)  # of links between nodes that take no time
    alike = ring.cost(ring.hierarchical_all_reduce, 8, 80, α=5, β=1, m=4).time
    assert alike == inside + 2 * (5 + 80 / 8)  # of links between nodes that are as those inside


def test_ring_beats_tree_from_the_size_given():
    assert [ring.break_even(ring.ring_all_reduce, ring.tree_all_reduce, n) for n in (2, 4, 8)] == [0, 0.8, 4 / 2.125]
    assert ring.break_even(ring.ring_all_reduce, ring.doubling_all_reduce, 2) == float("inf")
    assert ring.break_even(ring.doubling_all_reduce, ring.tree_all_reduce, 8) == 0  # 3 hops and loads against 6
    assert ring.break_even(ring.bruck_all_gather, ring.ring_all_gather, 8) == 0  # 3 hops against 7, and equal loads
    assert ring.break_even(ring.ring_all_gather, ring.bruck_all_gather, 8) == float("inf")
    α, β = 5e-6, 2e-11
    for n in (4, 5, 64):
        size = ring.break_even(ring.ring_all_reduce, ring.tree_all_reduce, n) * α / β
        for factor, ring_wins in (0.99, False), (1.01, True):
            times = [ring.cost(function, n, factor * size, α, β).time
                     for function in (ring.ring_all_reduce, ring.tree_all_reduce)]
            assert (times[0] < times[1]) == ring_wins


PICTURES = {"broadcast": 8, "reduce": 8, "gather": 8, "scatter": 8, "reduce_round": 4, "gather_round": 4,
            "doubling_all_reduce": 8, "bruck_all_gather": 4, "barrier": 4, "all_to_all": 4}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_in_a_docstring_is_what_is_sent(comparison, name):
    n = PICTURES[name]
    used = {"reduce_round": "ring_reduce_scatter", "gather_round": "ring_all_gather"}.get(name, name)
    messages = ring.replay([[ring.Step(*step) for step in logs[used]] for _, _, logs, _ in comparison(n)])
    drawn = set()
    for hop, line in re.findall(r"hop (\d)(.+)", getattr(ring, name).__doc__):
        for source, arrow, to in re.findall(r"(\d) ([→↔]) (\d)", line):
            drawn.add((int(hop), int(source), int(to)))
            if arrow == "↔":
                drawn.add((int(hop), int(to), int(source)))
    assert drawn == {(message.end, message.source, message.to) for message in messages}


def shown() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ring.demo(everyone())
    return printed.getvalue()


def test_the_demo_shows_who_sends_which_terms_of_which_chunk(pool):
    assert "doubling_all_reduce" in pool.run(1, "test_ring:shown")[0]
    printed, *others = pool.run(4, "test_ring:shown")
    assert not any(others)
    for name in ("reduce_round", "all_to_all"):  # whose pictures have the terms, too
        for line in re.findall(r"hop \d.*", getattr(ring, name).__doc__):
            drawn = re.findall(r"\d → \d: \w+", line)
            assert drawn and any(drawn == re.findall(r"\d → \d: \w+", shown) for shown in printed.splitlines())
    for line in ("    hop 3   0 → 1: b023   1 → 2: c013   2 → 3: d012   3 → 0: a123",
                 "    hop 2   0 → 2: a0,b1   1 → 3: b1,c2   2 → 0: c2,d3   3 → 1: d3,a0"):
        assert re.sub(" {2,}", "  ", line.strip()) in re.sub(" {2,}", "  ", printed)
    rows = {name: numbers.split() for name, numbers in re.findall(r"^(\w+) +((?:[\d,]+ +){3})", printed, re.MULTILINE)}
    assert rows.keys() == set(NAMES)
    assert rows["ring_all_reduce"] == ["24", "768", "6"]  # 2 · 4 · 3 messages of a chunk, 4 numbers of 8 bytes each
    assert rows["gather"] == ["3", "128", "2"] and rows["barrier"] == ["8", "8", "2"]
    assert "than a tree above 0.8 α/β on 4 ranks, 1.9 α/β on 8 ranks, 11." in printed  # as ring_all_reduce says
    assert ring.label([0] * 7 + [8] + [8, 8] + [0] * 6, 8) == "h7,h01"


def test_a_picture_is_no_wider_than_a_screen():
    """16 messages of a hop take two lines; a line more names no hop. Recording ends with its block."""
    messages = [ring.Message(i, 15 - i, 8, [1] * 16, hop) for hop in (1.0, 2.0) for i in range(16)]
    lines = ring.picture(messages, 16)
    assert all(len(line) <= 120 for line in lines) and sum("hop" in line for line in lines) == 2
    assert [line[:12] for line in lines if "hop" not in line] == [" " * 12] * (len(lines) - 2) and len(lines) > 2
    assert len(lines[0]) > 80 and " ".join(lines).count("→") == 32
    with pytest.raises(KeyError), ring.recording():
        raise KeyError
    assert ring.log is None


def barriers() -> list[tuple[float, float]]:
    """When this rank came to each of three barriers, and when it was let go; another rank is late each time."""
    times = []
    for late in range(3):
        time.sleep(0.05 * (dist.get_rank() == late))
        came = time.monotonic()
        ring.barrier(everyone())
        times.append((came, time.monotonic()))
    return times


def test_nobody_passes_a_barrier_before_the_last_has_come(pool):
    for times in zip(*pool.run(5, "test_ring:barriers")):
        assert max(came for came, _ in times) <= min(left for _, left in times)


def refusals() -> list[str]:
    group, r = everyone(), dist.get_rank()
    x, said = torch.zeros(4), []
    inner, outer = (collectives.Group("", dist.new_subgroups_by_enumeration(ranks)[0])
                    for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    for call in (lambda: ring.ring_all_reduce(torch.zeros(3 + (r == 2)), group),
                 lambda: ring.hierarchical_all_reduce(torch.zeros(3 + (r == 3)), inner, outer),
                 lambda: ring.bruck_all_gather(x.double() if r == 1 else x, group),
                 lambda: ring.broadcast(x, r // 3, group),
                 lambda: ring.gather(x, 4, group),
                 lambda: ring.gather(x, -1, group),
                 lambda: ring.scatter(torch.tensor(1.0), 0, group),
                 lambda: ring.all_to_all(x, [1, 1, 1, 1], [1, 1, 2, 0] if r == 1 else [1, 1, 1, 1], group),
                 lambda: ring.ring_reduce_scatter(torch.tensor(1.0), group),
                 lambda: ring.all_to_all(x, [1, 1, 1, 1], [4], group),
                 lambda: ring.all_to_all(x, [4], [1, 1, 1, 1], group),
                 lambda: ring.all_to_all(x, [1, 1, 1, 1], [1, 1, 1, 0 if r == 3 else 1], group),
                 lambda: ring.all_to_all(x, [-1, 2, 2, 1], [-1, 2, 2, 1], group),
                 lambda: ring.all_to_all(torch.tensor(1.0), [0] * 4, [0] * 4, group),
                 lambda: ring.all_to_all(torch.zeros(4, 2 + r), [1, 1, 1, 1], [1, 1, 1, 1], group)):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_is_refused_in_one_line_on_every_rank(pool):
    for said in pool.run(4, "test_ring:refusals"):
        assert said == [
            "rank 0 passes float32 [3], but rank 2 passes float32 [4]: all must pass the same",
            "rank 0 passes float32 [3], but rank 3 passes float32 [4]: all must pass the same",
            "rank 0 passes float32 [4], but rank 1 passes float64 [4]: all must pass the same",
            "rank 0 passes float32 [4] and root 0, but rank 3 passes float32 [4] and root 1: all must pass the same",
            "root 4 is not a rank of this group: use 0 to 3",
            "root -1 is not a rank of this group: use 0 to 3",
            "x is a scalar, which has no rows to divide among ranks: pass x[None]",
            "rank 1 sends 2 rows to rank 2, which expects 1",
            "x is a scalar, which has no rows to divide among ranks: pass x[None]",
            *(f"rank {rank} cannot divide {rows} rows as input_splits {inputs} and output_splits {outputs} say: each "
              "needs 4 numbers, and the first must sum to the rows" for rank, rows, inputs, outputs in (
                  (0, 4, [4], [1, 1, 1, 1]), (0, 4, [1, 1, 1, 1], [4]), (3, 4, [1, 1, 1, 0], [1, 1, 1, 1]),
                  (0, 4, [-1, 2, 2, 1], [-1, 2, 2, 1]), (0, 0, [0, 0, 0, 0], [0, 0, 0, 0]))),
            "rank 0 passes float32 rows of shape [2], but rank 1 passes float32 rows of shape [3]: all must pass the "
            "same"]


def test_without_a_group_they_are_the_identity():
    x = torch.arange(6.0).view(3, 2)
    for function, call in ring.examples(*3 * [collectives.ALONE], x, x).items():
        found = call()
        assert function is ring.barrier or torch.equal(found.view(3, 2), x)


@pytest.mark.slow
def test_the_demo_of_collectives_shows_every_hop():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "learn.collectives"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "hop 2   0 → 1: a01" in re.sub("  +", "   ", done.stdout)
