"""Process groups: which ranks communicate along which axis of the grid.

    --pp 2 --dp 2 --tp 2 on 8 ranks                      numpy.arange(8).reshape(pp, dp, tp)

                pipeline rank 0           pipeline rank 1
                tp 0      tp 1            tp 0      tp 1
        dp 0     0 ─────── 1               4 ─────── 5       rank 5 is (pp 1, dp 0, tp 1)
                 │         │               │         │
        dp 1     2 ─────── 3               6 ─────── 7

    axis    its groups                          rank 5 is in
    pp      {0, 4}  {1, 5}  {2, 6}  {3, 7}      {1, 5}        ranks that differ only in pp: one pipeline
    dp      {0, 2}  {1, 3}  {4, 6}  {5, 7}      {5, 7}        a column of the figure: the same layers, other tokens
    tp      {0, 1}  {2, 3}  {4, 5}  {6, 7}      {4, 5}        a row of the figure: parts of the same layers

A rank's number is its place in an array with one dimension per kind of parallelism. To list the groups of an axis, move
its dimension to the end: each row of the last dimension is then a group. For dp:

    numpy.arange(8).reshape(2, 2, 2).transpose(0, 2, 1).reshape(-1, 2)      [[0, 2], [1, 3], [4, 6], [5, 7]]

The last dimension varies fastest. Tensor parallel ranks communicate most, so they are neighbours in one node. Pipeline
ranks communicate least, so they are furthest apart.

The real arrays have more dimensions. There are four, and each numbers all ranks, because experts, for example, are
sharded differently from the other layers. "others" is the product of the outer dimensions, which such an array does not
need separately:

    dense       [pp, replicate, shard, cp, tp]      --sites N puts a dimension "sites" of size N before these
    ulysses     [others, cp_keys, cp_heads, tp]     cp_keys x cp_heads = cp: Ulysses within groups of cp_heads
                                                    ranks, and a ring or an all-gather between the groups (cp.py)
    heads       [others, kv, kv_copy]               kv x kv_copy = tp, if there are more tp ranks than KV heads (heads
                                                    of keys and values): ranks of one kv_copy group have copies of the
                                                    same head
    experts     [others, edp, ep]                   edp x ep = shard x cp x tp: an ep group has each expert once, an edp
                                                    group ("expert data parallel") has copies of the same experts

`AXES` defines every axis by the dimensions along which it lies. An axis may join several dimensions. Do not confuse the
following four. In the figure they coincide, because it has one replica, no context parallelism and no experts:

    --dp        the flag: replicate x shard. The flag --dp-replicate is the number of replicas, 1 except in hybrid
                sharding.
    axis dp     shard x cp, the ranks over which ZeRO shards. It includes the context parallel ranks, which have the
                same weights and other tokens. Megatron calls this group intra_dp_cp.
    axis data   replicate x shard x cp, all ranks that have the same weights and other tokens. Megatron's dp_cp.
    data axis   of a parameter: its `spec.data_axis` (core/param.py), the axis over which ZeRO shards it. This is the
                axis dp, or edp for experts. It is never the axis data.

With --sites (diloco.py) the outermost dimension is the site. All axes except "world" and "sites" then lie within a
site. So the files of the techniques need not know about other sites. Their operations on all ranks
run on the ranks of one site: see within_site.
"""
import datetime
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch.distributed as dist

from core.collectives import Group, Groups, run_demo
from core.config import Grid, Model, need

# ---- the axes -------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """An axis of the grid. The ranks of one of its groups differ only in `dimensions` of the array."""
    array: str
    dimensions: str
    traffic: str  # its kind of heavy traffic, or "" for none; see share_groups
    users: str  # which files communicate over the axis, and what


# The order matters: run/dryrun.py attributes the calls of a shared process group to the last of its axes here. muon and
# world come first, so that a narrower axis with the same ranks gets the calls.
#
# A group of tie contains only the two ends of a group of pp: see members_of_axes.
#
# With one site, "site" would be "world" and "sites" nothing, so neither is there.
#
# No file communicates over kv. It is an axis because core/param.py needs a rank's coordinate on it,
# which is Group.rank. Group.rank asks the process group, so kv has one (with NCCL, a communicator)
# anyway.
AXES = {
    "muon": Axis("dense", "shard cp tp", "", "muon.py: momenta and updates of matrices"),
    "world": Axis("dense", "sites pp replicate shard cp tp", "",
                  "zero.py: the gradient norm; run/: errors and settings"),
    "site": Axis("dense", "pp replicate shard cp tp", "", "zero.py: the gradient norm of a site, if there are several"),
    "sites": Axis("dense", "sites", "outer gradients", "diloco.py: changes of weights; run/: requests to stop"),
    "pp": Axis("dense", "pp", "", "pp.py: activations and their gradients, over links; train.py: losses"),
    "tie": Axis("dense", "pp", "", "zero.py: gradients of a table that the first and the last stage share"),
    "data": Axis("dense", "replicate shard cp", "", "train.py: losses and counts of tokens; ep.py: loads of experts"),
    "replicate": Axis("dense", "replicate", "", "zero.py: gradients of a shard, in hybrid sharding"),
    "dp": Axis("dense", "shard cp", "gradients", "dp.py and zero.py: gradients and weights, except for experts"),
    "cp": Axis("dense", "cp", "keys", "cp.py: keys and values; or, in Ulysses, heads"),
    "cp_keys": Axis("ulysses", "cp_keys", "keys", "cp.py: keys and values, between ranks with the same heads"),
    "cp_heads": Axis("ulysses", "cp_heads", "keys", "cp.py: heads, exchanged for tokens between neighbours"),
    "tp": Axis("dense", "tp", "activations", "tp.py: activations and their gradients"),
    "kv": Axis("heads", "kv", "", "none; a rank's coordinate is the number of its key and value head"),
    "kv_copy": Axis("heads", "kv_copy", "", "zero.py: gradients of wk and wv, between ranks with the same head"),
    "ep": Axis("experts", "ep", "tokens", "ep.py: tokens, to their experts and back"),
    "edp": Axis("experts", "edp", "gradients", "zero.py: gradients and weights of experts"),
}


def arrays_of_ranks(grid: Grid, model: Model, world: int) -> dict[str, dict[str, int]]:
    """Return the arrays that number the ranks: name -> sizes of its dimensions, outermost first.

    Arrays that the grid or the model has no use for are left out. Raises ValueError unless each has `world` elements.
    """
    shards = grid.dp // grid.dp_replicate
    sites = dict(sites=grid.sites) if grid.sites > 1 else {}
    arrays = {"dense": dict(**sites, pp=grid.pp, replicate=grid.dp_replicate, shard=shards, cp=grid.cp, tp=grid.tp)}
    if grid.cp_ulysses > 1:
        arrays["ulysses"] = dict(others=world // (grid.cp * grid.tp), cp_keys=grid.cp // grid.cp_ulysses,
                                 cp_heads=grid.cp_ulysses, tp=grid.tp)
    if grid.tp > model.kv_heads:
        arrays["heads"] = dict(others=world // grid.tp, kv=model.kv_heads, kv_copy=grid.tp // model.kv_heads)
    if model.experts:
        arrays["experts"] = dict(others=grid.sites * grid.pp * grid.dp_replicate,
                                 edp=shards * grid.cp * grid.tp // grid.ep, ep=grid.ep)
    for sizes in arrays.values():
        count = math.prod(sizes.values())
        need(count == world, f"the array [{', '.join(sizes)}] numbers {count} ranks, and there are {world}: the grid's "
                             "sizes must divide each other")
    return arrays


def groups_along(sizes: dict[str, int], *along: str) -> list[list[int]]:
    """Return the groups of ranks that differ only in the dimensions `along` of an array.

    sizes: the sizes of its dimensions, by name. The docstring of this file has an example.
    """
    names = list(sizes)
    outer = [i for i, name in enumerate(names) if name not in along]
    inner = [i for i, name in enumerate(names) if name in along]
    groups = math.prod(sizes[names[i]] for i in outer)
    ranks_per_group = math.prod(sizes[names[i]] for i in inner)
    # Not torch.arange: in a dry run torch's tensors have no values.
    ranks = numpy.arange(groups * ranks_per_group).reshape(*sizes.values())
    return ranks.transpose(*outer, *inner).reshape(groups, ranks_per_group).tolist()


def members_of_axes(grid: Grid, model: Model, world: int) -> dict[str, list[list[int]]]:
    """Return axis -> its groups, each a list of ranks. Axes that the grid or the model has no use for are left out.

    Every rank is in one group of each axis, except that ranks with middle stages are in no group of "tie".
    Raises ValueError if the grid does not fit on `world` ranks.
    """
    arrays = arrays_of_ranks(grid, model, world)
    members = {}
    for name, axis in AXES.items():
        if axis.array in arrays:
            members[name] = groups_along(arrays[axis.array], *axis.dimensions.split())
    if grid.pp > 1 and not grid.v_shaped:
        members["tie"] = [[pipeline[0], pipeline[-1]] for pipeline in members["pp"]]  # only its ends
    else:
        del members["tie"]  # one rank has both the first and the last stage
    if grid.sites == 1:
        del members["site"], members["sites"]
    return members


# ---- process groups -------------------------------------------------------------------------------------------------

def build_groups(grid: Grid, model: Model, timeout_s: float = 600) -> Groups:
    """Return axis -> this rank's group. Every rank must call this, with equal arguments."""
    groups = {axis: Group(axis) for axis in AXES}  # the default: a group of one rank
    if not dist.is_initialized():
        return groups
    members = members_of_axes(grid, model, dist.get_world_size())
    for shared in share_groups(members):
        process_group = dist.group.WORLD if "world" in shared.axes else create_groups(shared.members, timeout_s)
        for axis in shared.axes:
            links = make_links(members["pp"], rounds_of(grid), timeout_s) if axis == "pp" else {}
            groups[axis] = Group(axis, process_group, links)
    return groups


def within_site(groups: Groups) -> Groups:
    """Return the groups for everything that a site does by itself: its "world" has the ranks of the site only."""
    return groups | {"world": groups["site"]} if groups["sites"].size > 1 else groups


@dataclass
class SharedGroups:
    """Process groups that serve one or more axes."""
    members: list[list[int]]
    axes: list[str]
    traffic: str  # the kind of heavy traffic that they carry, or ""


def share_groups(members: dict[str, list[list[int]]]) -> list[SharedGroups]:
    """Return the process groups to make. Axes with the same ranks share process groups, unless their kinds of heavy
    traffic differ. An axis of one rank needs no process group.

    With NCCL each process group has a communicator with buffers of its own, so few are made. But torch gives each
    communicator one stream, which executes its collectives in order. While gradients are reduced, backward continues to
    communicate over cp, tp and ep. In the same process group, the collectives of backward would wait for the reduction.
    So one process group carries heavy traffic of at most one kind.

    Axes whose traffic is "" make no other axis wait:

        world, site, data       have little traffic
        muon, tie, kv_copy      have no traffic until all backward passes have ended
        pp                      sends activations over links, which are separate process groups; its own process group
                                carries only a few scalars, such as losses
        replicate               never has the same ranks as an axis with heavy traffic
        kv                      has no traffic
        sites                   sends outer gradients under later steps; only "world" may have the same ranks
    """
    made: list[SharedGroups] = []
    for axis, groups in members.items():
        if all(len(ranks) == 1 for ranks in groups):
            continue
        traffic = AXES[axis].traffic
        for shared in made:
            if shared.members == groups and (not traffic or shared.traffic in ("", traffic)):
                shared.axes.append(axis)
                shared.traffic = shared.traffic or traffic
                break
        else:
            made.append(SharedGroups(groups, [axis], traffic))
    return made


def create_groups(members: list[list[int]], timeout_s: float, is_link: bool = False) -> dist.ProcessGroup | None:
    """Make one process group per list of ranks in `members`. The lists are disjoint. Every rank must call this.

    Return the group of this rank, or None if no other rank is in it. With NCCL, one split of the world's communicator
    makes all the groups. Every rank must be in one of them, so a rank that is in none gets a group of its own. With
    other backends a rank makes only its own group.
    """
    grouped = set().union(*members)
    members = members + [[rank] for rank in range(dist.get_world_size()) if rank not in grouped]
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.group.WORLD.bound_device_id is not None:  # NCCL: collectives.world passes a device only to NCCL
        options = None
        if is_link:  # a receive is posted early and waits on the GPU: with 4 blocks it holds 4 SMs, not up to 32
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = 4
        group = dist.split_group(split_ranks=members, timeout=timeout, pg_options=options)
    else:
        mine = group_with(dist.get_rank(), members)
        group = dist.new_group(mine, timeout=timeout, use_local_synchronization=True)
    return group if group.size() > 1 else None


def group_with(rank: int, members: list[list[int]]) -> list[int]:
    """Return the group that has the rank."""
    for ranks in members:
        if rank in ranks:
            return ranks
    raise ValueError(f"rank {rank} is in no group")


# ---- links ----------------------------------------------------------------------------------------------------------
# A link is a process group of two ranks, for transfers in one direction. A process group executes its transfers in
# order. If the group of a whole pipeline carried all transfers, a rank that waits to receive from one neighbour could
# not send to the other. So each directed pair of neighbours (sender, receiver) has a link.
#
#     4 pipeline ranks    0 ⇄ 1 ⇄ 2 ⇄ 3    --virtual-stages 2 also has 3 ⇄ 0: from the last rank's first chunk to the
#                                           first rank's second chunk
#     round 1             0 → 1    2 → 3    one call of create_groups makes all links of a round, in every pipeline
#     round 2             1 → 0    3 → 2
#     round 3             1 → 2   (3 → 0)
#     round 4             2 → 1   (0 → 3)

def rounds_of(grid: Grid) -> list[list[tuple[int, int]]]:
    """Return the rounds of links of a pipeline: in each, a list of directed pairs (sender, receiver) of pipeline ranks.

    Each pair gets a link. No rank is in two pairs of one round. Activations go in one direction and their gradients in
    the other, so each two neighbours make two directed pairs, one per direction.
    """
    p = grid.pp
    # With 2 ranks a ring has no other pairs than a line: 0 → 1 and 1 → 0.
    is_ring = grid.virtual_stages > 1 and not grid.v_shaped and p > 2
    edges = [(r, (r + 1) % p) for r in range(p if is_ring else p - 1)]
    rounds = [edges[::2], edges[1::2]]
    if is_ring and p % 2 == 1:  # the first and the last edge both have rank 0, so the last one is a third round
        rounds.append([rounds[0].pop()])
    directed = []
    for pairs in rounds:
        if pairs:
            directed.append(pairs)
            directed.append([(receiver, sender) for sender, receiver in pairs])
    return directed


def make_links(pipelines: list[list[int]], rounds: list[list[tuple[int, int]]],
               timeout_s: float) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return the links of this rank: (sender, receiver) -> process group. Both are pipeline ranks."""
    rank, links = dist.get_rank(), {}
    pipeline = group_with(rank, pipelines)
    for pairs in rounds:
        members = [[ranks[sender], ranks[receiver]] for ranks in pipelines for sender, receiver in pairs]
        process_group = create_groups(members, timeout_s, is_link=True)
        for sender, receiver in pairs:
            if rank in (pipeline[sender], pipeline[receiver]):
                links[sender, receiver] = process_group
    return links


# ---- the coordinates of other ranks, for muon.py --------------------------------------------------------------------

class Place(NamedTuple):
    """Where a rank is on an axis. Group has the same attributes for this process; a Place is about any rank.

    So functions of core/param.py that read only `size` and `rank` take either.
    """
    size: int  # of the rank's group on the axis
    rank: int  # its rank in this group: its coordinate on the axis


def peers_of(grid: Grid, model: Model) -> list[dict[str, Place]]:
    """Return axis -> Place for each rank of this rank's group "muon", in rank order. This rank is one of them."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    members = members_of_axes(grid, model, world)
    peers = group_with(rank, members["muon"])
    places = {peer: {} for peer in peers}
    for axis, groups in members.items():
        for ranks in groups:
            for rank_in_group, peer in enumerate(ranks):
                if peer in places:
                    places[peer][axis] = Place(len(ranks), rank_in_group)
    return list(places.values())


# ---- demo: python -m core.groups ------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """Show the groups of one rank of 16, and which axes share process groups."""
    grid, model, rank = Grid(pp=2, dp=2, cp=2, tp=2, ep=4), Model(experts=8), 5
    arrays = arrays_of_ranks(grid, model, 16)
    members = members_of_axes(grid, model, 16)
    print("16 ranks, --pp 2 --dp 2 --cp 2 --tp 2 --ep 4")
    for name, sizes in arrays.items():
        indices = numpy.unravel_index(rank, tuple(sizes.values()))
        coordinates = ", ".join(f"{dimension} {i} of {size}" for i, (dimension, size) in zip(indices, sizes.items()))
        print(f"rank {rank} in the array of the {name} axes: {coordinates}")

    print(f"\naxis       rank {rank}'s group               who communicates over it, and what")
    for axis, groups in members.items():
        ranks = [ranks for ranks in groups if rank in ranks]
        if len(groups) == 1:
            shown = f"all {len(groups[0])} ranks"
        else:
            shown = ", ".join(map(str, ranks[0])) if ranks else "none"
        print(f"{axis:11s}{shown:29s}{AXES[axis].users}")

    print("\nProcess groups, each for all axes with the same ranks, and for one kind of heavy traffic:")
    for shared in share_groups(members):
        print(f"    {len(shared.members):2} of {len(shared.members[0]):2} ranks   {', '.join(shared.axes):20s}"
              f"{shared.traffic}".rstrip())
    links = sum(len(pairs) for pairs in rounds_of(grid))
    print(f"Each of the {len(members['pp'])} pipelines has {links} links: one per direction of a pair of neighbours.")


if __name__ == "__main__":
    run_demo(demo)
