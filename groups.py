"""The grid: which ranks share an axis, and the process groups in which they communicate.

RANKS is an einops pattern that numbers the ranks. Its last name varies fastest: tensor parallel ranks (kv x copy) have
consecutive numbers, pipeline ranks are furthest apart. AXIS_GROUPS arranges the ranks as matrices [groups, members]:

    pp          the ranks of one pipeline
    data        all ranks with different tokens: --dp x --cp
    replicate   hybrid sharding: ranks that have the same shard, --dp-replicate of them
    dp          the ranks that ZeRO shards over: --dp / --dp-replicate x --cp
    cp          the ranks with shards of the same sequences
    tp          the ranks with shards of the same layers; if they are more than the key and value heads, also:
    kv, kv_copy    one rank per head, and the ranks with copies of the same head
    ep, edp     the same ranks divided for experts: an ep group has each expert once, an edp group copies of the same
    tie         the first and the last pipeline rank, which share a tied embedding
    world       all ranks

With NCCL each process group has a communicator with buffers, and a stream that executes its work in order. So few are
made: one call makes all groups of an axis, and axes with the same members share a group unless both have TRAFFIC, of
different kinds. (While gradients are reduced, backward goes on to communicate over cp, tp and ep.)

Pipeline transfers need the opposite: a receive that waits for its sender must not block any other. So each directed
pair of ranks that communicate has its own group, a link. One call makes the links of all pairs without a common rank:
2 calls for two ranks, 4 for a chain, 4 or 6 for a ring.
"""
import torch
import torch.distributed as dist
from einops import rearrange

import config
from collectives import AxisGroup, Groups, create_groups
from schedules import SCHEDULES

RANKS = "(pp replicate shard cp kv copy)"
AXIS_GROUPS = {
    "pp": "(replicate shard cp kv copy) pp",
    "data": "(pp kv copy) (replicate shard cp)",
    "replicate": "(pp shard cp kv copy) replicate",
    "dp": "(pp replicate kv copy) (shard cp)",
    "cp": "(pp replicate shard kv copy) cp",
    "tp": "(pp replicate shard cp) (kv copy)",
    "kv": "(pp replicate shard cp copy) kv",
    "kv_copy": "(pp replicate shard cp kv) copy",
}
EXPERT_RANKS, EXPERT_GROUPS = "(pp replicate edp ep)", {"edp": "(pp replicate ep) edp", "ep": "(pp replicate edp) ep"}
AXES = ("world", "pp", "tie", "data", "replicate", "dp", "cp", "tp", "kv", "kv_copy", "ep", "edp")
TRAFFIC = {"dp": "gradients", "edp": "gradients", "cp": "keys", "tp": "activations", "ep": "tokens"}  # rest: scalars


def build_groups(grid: config.Grid, model: config.Model, timeout_s: float = 600) -> Groups:
    """Axis -> this rank's group, None where the group has one rank. Every rank must call this, with equal arguments."""
    groups: Groups = dict.fromkeys(AXES)
    if not dist.is_initialized():
        return groups
    made = []  # per call: the ranks of all groups that it makes, this rank's group, the kind of traffic on it or None
    for axis, members in members_of_axes(grid, model, dist.get_world_size()).items():
        if max(map(len, members)) == 1:
            continue
        traffic = TRAFFIC.get(axis)
        entry = next((e for e in made if e["ranks"] == members and (not traffic or e["kind"] in (None, traffic))), None)
        if not entry:
            group = create_groups(members, timeout_s) if made else dist.group.WORLD  # "world" is the first axis
            entry = dict(ranks=members, group=group, kind=None)
            made.append(entry)
        entry["kind"] = traffic or entry["kind"]
        links = connect(members, pairs_of(grid), timeout_s) if axis == "pp" else {}
        groups[axis] = entry["group"] and AxisGroup(axis, entry["group"], links)
    return groups


def members_of_axes(grid: config.Grid, model: config.Model, world: int) -> dict[str, list[list[int]]]:
    """Axis -> a list of the ranks of each of its groups; "world" comes first. An axis's groups cover all ranks."""
    ranks, heads = torch.arange(world), min(grid.tp, model.kv_heads)
    lengths = dict(pp=grid.pp, replicate=grid.dp_replicate, cp=grid.cp, kv=heads, copy=grid.tp // heads)
    matrices = {axis: rearrange(ranks, f"{RANKS} -> {pattern}", **lengths) for axis, pattern in AXIS_GROUPS.items()
                if axis not in ("kv", "kv_copy") or grid.tp > model.kv_heads}
    if model.experts:
        lengths = dict(pp=grid.pp, replicate=grid.dp_replicate, ep=grid.ep)
        matrices |= {axis: rearrange(ranks, f"{EXPERT_RANKS} -> {pattern}", **lengths)
                     for axis, pattern in EXPERT_GROUPS.items()}
    members = {"world": [list(range(world))]} | {axis: matrix.tolist() for axis, matrix in matrices.items()}
    if grid.pp > 1 and not SCHEDULES[grid.schedule].v_shaped:  # else one rank has the first and the last stage
        members["tie"] = []
        for pipeline in members["pp"]:
            members["tie"] += [[pipeline[0], pipeline[-1]]] + [[rank] for rank in pipeline[1:-1]]
    return members


def pairs_of(grid: config.Grid) -> list[tuple[int, int]]:
    """(sender, receiver) of all transfers of a pipeline: activations in one direction, their gradients in the other."""
    p = grid.pp
    chain = [(r, r + 1) for r in range(p - 1)]
    if grid.chunks > 1 and not SCHEDULES[grid.schedule].v_shaped and p > 2:
        chain.append((p - 1, 0))  # from the last rank's chunk to the next chunk of the first
    return [pair for a, b in chain for pair in ((a, b), (b, a))]


def connect(pipelines: list[list[int]], pairs: list[tuple[int, int]],
            timeout_s: float) -> dict[tuple[int, int], dist.ProcessGroup]:
    """This rank's links: (sender, receiver) -> process group, for each pair that this rank is in."""
    rounds = [[] for _ in pairs]  # each pair joins the first round in which both of its ranks are free
    for pair in pairs:
        next(busy for busy in rounds if not any(set(pair) & set(other) for other in busy)).append(pair)
    me, links = dist.get_rank(), {}
    for together in filter(None, rounds):
        alone = [(r,) for r in range(len(pipelines[0])) if not any(r in pair for pair in together)]
        members = [[ranks[r] for r in part] for ranks in pipelines for part in together + alone]
        group = create_groups(members, timeout_s)
        for ranks in pipelines:
            links |= {(a, b): group for a, b in together if me in (ranks[a], ranks[b])}
    return links
