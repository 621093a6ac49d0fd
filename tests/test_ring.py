"""Written-out collectives: results equal to torch.distributed's; messages, bytes and hops equal to the docstrings."""
import contextlib
import io
import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
from grids import everyone
from pool import Pool, slow

from core import collectives
from learn import written_out as ring

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
    there, total = x.clone(), x.clone()
    dist.broadcast(there, root)
    collected = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(collected, x)
    gathered = torch.stack(collected)  # torch's own gather takes no bool
    results = {"broadcast": there, "gather": gathered if r == root else None,
               "ring_all_gather": gathered, "bruck_all_gather": gathered}
    if x.dtype in SUMMED:
        dist.all_reduce(total)
        results |= {name: total for name in NAMES if name.endswith("all_reduce")}
        results["reduce"] = total if r == root else None
    if x.ndim:
        results["scatter"] = there.tensor_split(n)[r]  # torch's own scatter needs equal shards
        received = [splits(i, n, len(x))[r] for i in range(n)]
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x, received, splits(r, n, len(x)))
        results["all_to_all"] = out
        if x.dtype in SUMMED:
            results["ring_reduce_scatter"] = total.tensor_split(n)[r]
    return results


def ours(name: str, x: torch.Tensor, root: int, inner, outer) -> torch.Tensor | None:
    n, r, function = dist.get_world_size(), dist.get_rank(), getattr(ring, name)
    group = everyone() if n > 1 else collectives.ALONE
    if name in ("broadcast", "reduce", "gather", "scatter"):
        return function(x, root, group)
    if name == "all_to_all":
        return function(x, [splits(i, n, len(x))[r] for i in range(n)], splits(r, n, len(x)), group)
    return function(x, inner, outer) if name == "hierarchical_all_reduce" else function(x, group)


def compare(every_dtype: bool) -> tuple[list[str], dict[str, list], int]:
    """On every rank: results that differ, its steps of each collective, bytes sent."""
    n, r = dist.get_world_size(), dist.get_rank()
    m, inner, outer = ring.two_levels(n)
    cases = [((2 * n + 1, 3), torch.float32), ((1, 2), torch.int64), ((0, 3), torch.float32)]
    if n <= 4:
        cases += [((n,), torch.float64), ((), torch.float32)]
    if every_dtype:
        cases += [((7,), dtype) for dtype in SUMMED + MOVED]
    wrong = []
    for case, (shape, dtype) in enumerate(cases):
        root = (n - 1) * (case % 2)
        x = pattern(r, shape, dtype)
        expected = theirs(x, root)
        given = x.t().contiguous().t().requires_grad_() if case == 0 else x  # not contiguous, on purpose
        for name, tensor in expected.items():
            found = ours(name, given, root, inner, outer)
            same = found is None if tensor is None else (
                torch.equal(found, tensor) and found.dtype == dtype and not found.requires_grad)
            if name == "ring_reduce_scatter" and n > 1:  # no view, which would keep all of the sum
                same &= found.untyped_storage().nbytes() == found.nbytes
            if not same:
                wrong.append(f"{name} of {dtype} {shape}, root {root}: {found}, not {tensor}")
        if not torch.equal(given, pattern(r, shape, dtype)):
            wrong.append(f"{dtype} {shape} was changed")
    logs, before = {}, sum(collectives.sent.values())
    x = torch.arange(4 * n, dtype=torch.float32)
    for function, call in ring.examples(everyone(), inner, outer, x, x[:4]).items():
        with ring.recording() as steps:
            call()
        logs[function.__name__] = steps
    return wrong, logs, sum(collectives.sent.values()) - before


@pytest.fixture(scope="module")
def comparison(pool):
    """`compare` on n ranks, run once per n."""
    @cache
    def run(n: int) -> list[tuple]:
        with contextlib.ExitStack() as stack:
            ranks = pool if n <= 8 else stack.enter_context(contextlib.closing(Pool(n)))
            return ranks.run(n, compare, every_dtype=n in (3, 9))
    return run


RANKS = [1, 2, 3, 4, 6, *slow(5, 7, 8, 9)]


@pytest.mark.parametrize("n", RANKS)
def test_results_are_those_of_torch_for_any_dtype_and_size(comparison, n):
    assert [wrong for wrong, *_ in comparison(n)] == n * [[]]


@pytest.mark.parametrize("n", RANKS)
def test_messages_bytes_hops_and_time_are_those_of_the_docstring(comparison, n):
    outcomes, total, m = comparison(n), 0, n // 2 if n % 2 == 0 and n > 2 else n
    links = {True: (3.0, 0.5), False: (11.0, 1.25)}  # α and β inside a node, and between nodes
    for name in NAMES:
        logs = [logs[name] for _, logs, _ in outcomes]
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
    assert total == sum(sent for *_, sent in outcomes)  # what core/collectives.py counts


@pytest.mark.parametrize("n, printed", [(4, "0.8"), (8, "1.9"), (64, "11")])
def test_a_ring_beats_a_tree_from_the_size_that_its_docstring_gives(n, printed):
    α, β, L = 5e-6, 2e-11, (n - 1).bit_length()
    size = (n - 1 - L) / (L - (n - 1) / n) * α / β
    assert f"{size * β / α:.2g}" == printed and f"{printed} " in ring.ring_all_reduce.__doc__
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
    messages = ring.replay([logs[used] for _, logs, _ in comparison(n)])
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
    assert "doubling_all_reduce" in pool.run(1, shown)[0]
    printed, *others = pool.run(4, shown)
    assert not any(others)
    for name in ("reduce_round", "all_to_all"):  # whose pictures have the terms, too
        for line in re.findall(r"hop \d.*", getattr(ring, name).__doc__):
            drawn = re.findall(r"\d → \d: \w+", line)
            assert drawn and any(drawn == re.findall(r"\d → \d: \w+", shown) for shown in printed.splitlines())
    assert set(NAMES) <= {line.split(" ")[0] for line in printed.splitlines()}
    assert ring.label([0] * 7 + [8] + [8, 8] + [0] * 6, 8) == "h7,h01"


@pytest.mark.parametrize("n", RANKS)
def test_nobody_passes_a_barrier_before_the_last_has_come(comparison, n):
    """Each rank has then heard, perhaps through others, of all."""
    messages = ring.replay([logs["barrier"] for _, logs, _ in comparison(n)])
    heard = [{r} for r in range(n)]
    for hop in range(1, n):
        heard = [known.union(*(heard[message.source] for message in messages if (message.to, message.end) == (r, hop)))
                 for r, known in enumerate(heard)]
    assert heard == n * [set(range(n))]
