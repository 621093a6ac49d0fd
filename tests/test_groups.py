"""Process groups: few calls however many ranks, none twice for the same members, a link for each pair that sends."""
from itertools import product
from types import SimpleNamespace

import grids
import pytest
import torch
import torch.distributed as dist
from grids import MIXTRAL
from pool import slow
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from core import collectives, config, groups, rules
from run import dryrun
from run.meter import Meter
from schedules import SCHEDULES, Transfer, make_plan, with_transfers

EVERY_AXIS = ("--layers 32 --heads 16 --kv-heads 4 --head-dim 6 --hidden 40 --vocab 97 --experts 8 --cp 2 --tp 8 "
              "--pp 4 --zero 1 --dp-replicate 2 --ep 2 --schedule interleaved --micro-batch 1 --data " + __file__)


@pytest.mark.parametrize("along", [["dp"], ["pp"], ["tp"], ["pp", "tp"], ["pp", "dp", "tp"], []])
def test_ranks_of_a_group_differ_only_along_its_dimensions(along):
    sizes, found = dict(pp=2, dp=3, tp=4), {}
    for rank, place in enumerate(product(range(2), range(3), range(4))):
        others = tuple(n for name, n in zip(sizes, place) if name not in along)
        found.setdefault(others, []).append(rank)
    assert groups.groups_along(sizes, *along) == list(found.values())


@pytest.mark.parametrize("world", [128, *slow(16384)])
def test_a_rank_makes_groups_in_as_many_calls_as_there_are_axes(monkeypatch, world):
    """A recording stand-in for NCCL, which makes all groups of one call by one split of the world's communicator."""
    settings = rules.parse(f"{EVERY_AXIS} --global-batch {world}".split(), world)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=world)
    calls, blocks, timeouts = [], [], set()

    def split(split_ranks, timeout, pg_options):
        calls.append(split_ranks)
        blocks.append(pg_options and pg_options.config.max_ctas)
        timeouts.add(timeout.total_seconds())
        mine, = (ranks for ranks in split_ranks if 5 in ranks)
        return SimpleNamespace(size=lambda: len(mine), rank=lambda: mine.index(5))

    monkeypatch.setattr(dist, "split_group", split)
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)  # not in a torch for CPUs
    dist.group.WORLD.bound_device_id = torch.device("cpu:0")
    try:
        made = groups.build_groups(settings.grid, settings.model, 90)
    finally:
        dist.destroy_process_group()
    assert timeouts == {90}, "of axes and of links"
    assert all(sorted(sum(call, [])) == list(range(world)) for call in calls), "every rank is in one group of each call"
    assert len(calls) <= len(groups.AXES) + 4  # a ring of 4 ranks has 8 directed pairs, two of them disjoint
    assert blocks.count(4) == 4 and set(blocks) == {None, 4}, "the links, in four calls, hold few SMs"
    assert set(made["pp"].links) == {(0, 1), (1, 0), (3, 0), (0, 3)}
    assert [made[axis].size for axis in ("pp", "tp", "ep", "kv", "kv_copy", "world")] == [4, 8, 2, 4, 2, world]


@pytest.mark.parametrize("schedule", [name for name, schedule in SCHEDULES.items() if schedule.runs])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_every_pair_that_exchanges_has_a_link_and_pairs_without_a_common_rank_in_one_call(monkeypatch, schedule, p):
    """No other pair has one. 2 calls for two ranks, 4 for a chain, and for a ring 4, or 6 if its ranks are odd: its
    edges need 3 colours."""
    lists = with_transfers(make_plan(schedule, p, 2 * p))
    exchanging = {(r, item.peer) for r, items in enumerate(lists) for item in items
                  if isinstance(item, Transfer) and item.op == "send"}
    calls, pipelines = [], [list(range(p)), list(range(p, 2 * p))]
    monkeypatch.setattr(groups, "create_groups", lambda members, *_, **__: calls.append(members) or len(calls))
    monkeypatch.setattr(dist, "get_rank", lambda: p + 1)
    rounds = groups.rounds_of(config.Grid(pp=p, virtual_stages=SCHEDULES[schedule].chunks, schedule=schedule))
    links, pairs = groups.make_links(pipelines, rounds, 60), sum(rounds, [])
    assert set(pairs) == exchanging and len(pairs) == len(exchanging)
    is_ring = (p - 1, 0) in exchanging
    assert len(calls) == (2 if p == 2 else 6 if is_ring and p % 2 else 4)
    assert all(len(set(sum(call, []))) == len(sum(call, [])) for call in calls)
    assert links == {(a, b): number for number, call in enumerate(calls, 1) for a, b in pairs
                     if [a, b] in call and 1 in (a, b)}


def transfers() -> dict[str, set]:
    """The collectives of a step on each link, and on all other groups."""
    made, model, pipeline, optimizer, share = grids.ready("--pp 4 --schedule interleaved --layers 8 --micro-batch 12")
    with Meter(memory=False) as meter:
        train.forward_backward(model, pipeline, optimizer, share, made)
    names = {link.group_name: f"{a} to {b}" for (a, b), link in made["pp"].links.items()}
    out = {}
    for call in meter.collectives:
        out.setdefault(names.get(call.group, "others"), set()).add(call.name)
    return out


def test_a_link_has_one_direction_and_the_group_of_all_stages_sums_the_loss(pool):
    for r, seen in enumerate(pool.run(4, transfers)):
        to, back = (r + 1) % 4, (r - 1) % 4
        assert seen == {f"{r} to {to}": {"send"}, f"{r} to {back}": {"send"}, f"{to} to {r}": {"recv_"},
                        f"{back} to {r}": {"recv_"}, "others": {"allreduce_"}}


def test_replicas_exchange_no_matrices():
    """Each updates what it has by itself: ranks 0 and 1 are one, 2 and 3 the other."""
    settings = grids.settings_of("--dp-replicate 2 --zero 1", 4)
    assert groups.members_of_axes(settings.grid, settings.model, 4)["muon"] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("flags", ["--dp 8 --ep 4", "--dp 4 --tp 2 --ep 2 --zero 1 --dp-replicate 2",
                                   "--cp 2 --dp 2 --pp 2 --ep 2", "--dp 8 --ep 2 --zero 1 --dp-replicate 4"])
def test_an_expert_is_on_the_ranks_of_edp_in_each_replica(flags):
    """And on no others of its pipeline rank; dense weights of a tensor parallel rank on those of dp in each replica."""
    settings = grids.settings_of(f"{MIXTRAL} {flags}", 8)
    members = groups.members_of_axes(settings.grid, settings.model, 8)

    def place(axis: str, rank: int) -> int:
        return next(ranks.index(rank) for ranks in members.get(axis, [[rank]]) if rank in ranks)

    def group(axis: str, rank: int) -> list[int]:
        return next(ranks for ranks in members[axis] if rank in ranks)

    for rank in range(8):
        for shard, data_axis in ("ep", "edp"), ("tp", "dp"):
            reduced = [copy for same in group(data_axis, rank) for copy in group("replicate", same)]
            there = [other for other in range(8) if place("pp", other) == place("pp", rank)
                     and place(shard, other) == place(shard, rank)]
            assert sorted(reduced) == there, (rank, data_axis)


@pytest.mark.parametrize("flags, axes", [
    ("", [["muon", "world", "data", "dp"]]),
    ("--cp 4", [["cp"], ["muon", "world", "data", "dp"]]),  # keys and values are not to wait for gradients
    (f"{MIXTRAL} --ep 4", [["ep"], ["muon", "world", "data", "dp"]]),  # nor tokens
    (MIXTRAL, [["muon", "world", "data", "dp", "edp"]]),  # dense and experts' gradients
    ("--tp 4", [["muon", "world", "tp"]]),  # a key and value head per rank
    ("--tp 4 --kv-heads 2", [["kv"], ["kv_copy"], ["muon", "world", "tp"]]),
    (f"{MIXTRAL} --tp 4", [["edp"], ["muon", "world", "tp"]]),  # experts' gradients are not to wait for activations
    (f"{MIXTRAL} --tp 4 --ep 4 --kv-heads 1", [["ep"], ["muon", "world", "tp", "kv_copy"]])])  # nor tokens
def test_axes_with_the_same_ranks_share_a_group_unless_they_are_busy_together(flags, axes):
    """Bytes are counted by axis all the same."""
    settings, names = grids.settings_of(flags, 4), {}
    with dryrun.fake_world(4, 0):
        made = groups.build_groups(settings.grid, settings.model)
        for axis, group in made.items():
            if group.size > 1:
                names.setdefault(group.process_group.group_name, []).append(axis)
        collectives.sent.clear()
        collectives.all_reduce(torch.zeros(4), made["muon"])
        collectives.all_reduce(torch.zeros(8), made["world"])
    assert sorted(names.values()) == axes and collectives.sent == {"muon": 2 * 3 * 4, "world": 2 * 6 * 4}


@pytest.mark.parametrize("flags", ["", "--pp 2 --tp 2", "--tp 8 --kv-heads 2", "--zero 1 --dp-replicate 2 --cp 2",
                                   "--cp 4 --cp-style ring --cp-ulysses 2", f"{MIXTRAL} --tp 2 --ep 4"])
def test_the_groups_of_each_site_are_those_of_a_run_with_one_site(flags):
    """3 sites of 8 ranks, one site's after the other's. Ranks in the same place of all sites are a group of "sites"."""
    batch = "--micro-batch 1 --global-batch 48 --sync-every 2"
    alone = grids.settings_of(f"{flags} --micro-batch 1 --global-batch 48", 8)
    settings = grids.settings_of(f"{flags} {batch} --sites 3", 24)
    want = groups.members_of_axes(alone.grid, alone.model, 8)
    found = groups.members_of_axes(settings.grid, settings.model, 24)
    assert sorted(found.pop("sites")) == [[rank, rank + 8, rank + 16] for rank in range(8)]
    assert found.pop("world") == [[*range(24)]]
    assert found.pop("site") == [[*range(first, first + 8)] for first in (0, 8, 16)]
    del want["world"]
    assert found.keys() == want.keys()
    for axis, members in want.items():
        sites = [[rank + 8 * site for rank in ranks] for site in range(3) for ranks in members]
        assert sorted(found[axis]) == sorted(sites), axis
