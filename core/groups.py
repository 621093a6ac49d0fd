"""The groups of the grid: which ranks share an axis, and torch's process groups for them.

Ranks are numbered like the elements of an array with the dimensions pp, replicate, shard, cp, tp: tp varies fastest, so
its ranks are in one node, and pipeline stages are furthest apart. Ranks that differ in one coordinate alone are a group
of that axis; "dp" is of shard and cp, "data" also of replicate. An example, --pp 2 --dp 2 --tp 2 on 8 ranks:

    rank       0  1  2  3  4  5  6  7          groups of pp     {0, 4}  {1, 5}  {2, 6}  {3, 7}
    pp         0  0  0  0  1  1  1  1                    dp     {0, 2}  {1, 3}  {4, 6}  {5, 7}
    shard      0  0  1  1  0  0  1  1                    tp     {0, 1}  {2, 3}  {4, 5}  {6, 7}
    tp         0  1  0  1  0  1  0  1          rank 5 is in     {1, 5}, {5, 7} and {4, 5}

Experts divide the same ranks in another way: within a replica, the shard x cp x tp ranks of a
pipeline rank are edp x ep, and ep varies fastest. The ranks of an ep group hold each expert once.
The ranks of an edp group hold the same experts. Every replica holds all experts, too.

The data axis of a parameter is "dp" or, for an expert, "edp". ZeRO shards the parameter over its
data axis. Its gradient is summed over its data axis and over "replicate", which has one rank
unless --dp-replicate (hybrid sharding) asks for more.

With NCCL each process group has a communicator with buffers, and a stream that executes its asynchronous work in order.
So few are made: one call makes all groups of an axis, and axes with the same ranks share a group unless both are busy
at once (TRAFFIC): while gradients are reduced, backward goes on to communicate over cp, tp and ep.

Because of that order, a pipeline rank that waits to receive from one neighbour could send nothing to the other if both
transfers were in the group of all stages. So each directed pair of ranks that communicate has its own group, a link.
One call makes the links of a round, pairs without a common rank: 2 calls for two ranks, 4 for a chain, 4 or 6 for a
ring.
"""
import datetime
from itertools import chain, product
from typing import NamedTuple

import torch.distributed as dist

from core.collectives import Group, Groups
from core.config import Grid, Model, need

AXES = ("muon", "world", "pp", "tie", "data", "replicate", "dp", "cp", "cp_keys", "cp_heads", "tp", "kv", "kv_copy",
        "ep", "edp")  # members_of_axes says what each is
TRAFFIC = {"gradients": ("dp", "edp"), "keys": ("cp", "cp_keys", "cp_heads"), "activations": ("tp",),
           "tokens": ("ep",)}  # kind -> the axes that it is on; a process group has one kind. Other axes send little


def build_groups(grid: Grid, model: Model, timeout_s: float = 600) -> Groups:
    """Axis -> this rank's group. Every rank must call this, with equal arguments."""
    groups = {axis: Group(axis) for axis in AXES}
    if not dist.is_initialized():
        return groups
    everyone = list(range(dist.get_world_size()))
    made = [dict(members=[everyone], group=dist.group.WORLD, kinds=set())]  # kinds: of traffic, at most one
    for axis, members in members_of_axes(grid, model, len(everyone)).items():
        if max(map(len, members)) == 1:
            continue
        # One with the same ranks serves, unless both carry much traffic, of different kinds.
        kinds = {kind for kind, axes in TRAFFIC.items() if axis in axes}
        shared = next((one for one in made if one["members"] == members and len(one["kinds"] | kinds) <= 1), None)
        if not shared:
            shared = dict(members=members, group=create_groups(members, timeout_s), kinds=set())
            made.append(shared)
        shared["kinds"] |= kinds
        links = make_links(members, rounds_of(grid), timeout_s) if axis == "pp" else {}
        groups[axis] = Group(axis, shared["group"], links)
    return groups


def members_of_axes(grid: Grid, model: Model, world: int) -> dict[str, list[list[int]]]:
    """Axis -> the ranks of each of its groups. Raises ValueError unless each rank is in one group of each axis."""
    shards = grid.dp // grid.dp_replicate
    dense = dict(pp=grid.pp, replicate=grid.dp_replicate, shard=shards, cp=grid.cp, tp=grid.tp)
    members = {
        "world": [list(range(world))],
        "pp": groups_along(dense, "pp"),  # the ranks of one pipeline
        "muon": groups_along(dense, "shard", "cp", "tp"),  # those that share the matrices of a pipeline rank (muon.py)
        "data": groups_along(dense, "replicate", "shard", "cp"),  # all with different tokens
        "replicate": groups_along(dense, "replicate"),  # hybrid sharding: those with the same shard
        "dp": groups_along(dense, "shard", "cp"),  # those that ZeRO shards over
        "cp": groups_along(dense, "cp"),  # those with shards of the same sequences
        "tp": groups_along(dense, "tp"),  # those with shards of the same layers
    }
    if grid.cp_ulysses > 1:  # neighbours, which exchange heads; and those that then have the same heads
        both = dict(others=world // (grid.cp * grid.tp), keys=grid.cp // grid.cp_ulysses, heads=grid.cp_ulysses,
                    tp=grid.tp)
        members |= {"cp_keys": groups_along(both, "keys"), "cp_heads": groups_along(both, "heads")}
    if grid.tp > model.kv_heads:  # kv: ranks with different key and value heads; kv_copy: with copies of the same one
        heads = dict(others=world // grid.tp, kv=model.kv_heads, copy=grid.tp // model.kv_heads)
        members |= {"kv": groups_along(heads, "kv"), "kv_copy": groups_along(heads, "copy")}
    if model.experts:  # an ep group has each expert once, an edp group the same ones
        experts = dict(others=grid.pp * grid.dp_replicate, edp=shards * grid.cp * grid.tp // grid.ep, ep=grid.ep)
        members |= {"edp": groups_along(experts, "edp"), "ep": groups_along(experts, "ep")}
    for axis, groups in members.items():
        found = sorted(chain(*groups))
        need(found == [*range(world)], f"axis {axis}: its groups have {len(found)} ranks, and there are {world}: the "
                                       "grid's sizes must divide each other")
    if grid.pp > 1 and not grid.v_shaped:  # the first and the last stage, which may share an embedding
        members["tie"] = [[pipeline[0], pipeline[-1]] for pipeline in members["pp"]]
    return members


class Place(NamedTuple):
    """Of a rank on an axis, with the names that a Group has."""
    size: int
    rank: int


def peers_of(grid: Grid, model: Model) -> list[dict[str, Place]]:
    """For each rank of this rank's group "muon", itself included: axis -> its place. (For muon.py.)"""
    me, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    members = members_of_axes(grid, model, world)
    places = {axis: {rank: Place(len(ranks), i) for ranks in groups for i, rank in enumerate(ranks)}
              for axis, groups in members.items()}
    peers = next(ranks for ranks in members["muon"] if me in ranks)
    return [{axis: of_rank[rank] for axis, of_rank in places.items() if rank in of_rank} for rank in peers]


def groups_along(dimensions: dict[str, int], *along: str) -> list[list[int]]:
    """The groups of ranks that differ in the coordinates `along` alone. dimensions: name -> size, of the array whose
    elements the ranks number; the last varies fastest."""
    groups = {}  # the coordinates that the ranks of a group share -> these ranks
    for rank, coordinates in enumerate(product(*map(range, dimensions.values()))):
        shared = tuple(i for name, i in zip(dimensions, coordinates) if name not in along)
        groups.setdefault(shared, []).append(rank)
    return list(groups.values())


def create_groups(members: list[list[int]], timeout_s: float, is_link: bool = False) -> dist.ProcessGroup | None:
    """The one of these process groups that this rank is in; None if it is in none or alone. Every rank calls this.
    NCCL makes all in one split of the world, which is of every rank; with other backends a rank makes its own alone."""
    grouped = set().union(*members)
    members = members + [[rank] for rank in range(dist.get_world_size()) if rank not in grouped]
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.group.WORLD.bound_device_id is not None:  # NCCL: see collectives.world
        options = None
        if is_link:  # a receive is posted early and waits on the GPU: with 4 blocks it holds 4 SMs, not up to 32
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = 4
        group = dist.split_group(split_ranks=members, timeout=timeout, pg_options=options)
    else:
        mine = next(ranks for ranks in members if dist.get_rank() in ranks)
        group = dist.new_group(mine, timeout=timeout, use_local_synchronization=True)
    return group if group.size() > 1 else None


# ---- links ----------------------------------------------------------------------------------------------------------

def rounds_of(grid: Grid) -> list[list[tuple[int, int]]]:
    """(sender, receiver) of all transfers of a pipeline: activations in one direction, their gradients in the other. No
    rank is in two pairs of a round."""
    p = grid.pp
    # From the last rank's chunk to the first's next one.
    is_ring = grid.virtual_stages > 1 and not grid.v_shaped and p > 2
    edges = [(r, (r + 1) % p) for r in range(p if is_ring else p - 1)]
    rounds = [edges[::2], edges[1::2]]
    if is_ring and p % 2 == 1:  # both the first edge and the last have rank 0
        rounds.append([rounds[0].pop()])
    return [pairs for forth in rounds for pairs in (forth, [(b, a) for a, b in forth]) if pairs]


def make_links(pipelines: list[list[int]], rounds: list[list[tuple[int, int]]],
               timeout_s: float) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The links of this rank: (sender, receiver) -> process group."""
    me, links = dist.get_rank(), {}
    mine = next(ranks for ranks in pipelines if me in ranks)
    for pairs in rounds:
        members = [[ranks[a], ranks[b]] for ranks in pipelines for a, b in pairs]
        group = create_groups(members, timeout_s, is_link=True)
        links |= {(a, b): group for a, b in pairs if me in (mine[a], mine[b])}
    return links
