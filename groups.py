"""The grid: which ranks share an axis, and the process groups in which they communicate.

RANKS is an einops pattern that numbers the ranks: its last name varies fastest, so tensor parallel ranks (kv x copy)
are adjacent and pipeline ranks furthest apart. Patterns below arrange the same ranks as matrices [groups, members]:

    pp          the stages of a pipeline
    data        all ranks with different tokens: --dp x --cp
    replicate   hybrid sharding: ranks that have the same shard, --dp-replicate of them
    dp          the ranks that ZeRO shards over: --dp / --dp-replicate x --cp
    cp          those with shards of the same sequences
    tp          those with shards of the same layers; if there are more of them than key and value heads:
    kv, kv_copy    one rank of each head, and the ranks with a copy of one head
    ep, edp     a second way to divide the ranks of a stage and replica: an ep group has each expert once, an edp group
                has copies of the same experts
    tie         the first and the last pipeline rank, which share a tied embedding
    world       all ranks

With NCCL a process group has a communicator with buffers, and a stream on which its work is executed in order. So a
rank makes few of them: all groups of an axis in one call, and no second one for the same members, unless two axes of
TRAFFIC are busy at the same time. (While gradients are reduced, backward goes on to communicate over cp, tp and ep.)

Pipeline transfers are the opposite case: a receive that waits for its sender must not hold up others. So each directed
pair of ranks that exchange has a group of its own. Pairs without a common rank are made in one call: 2 for two ranks, 4
for a chain of ranks, 4 or 6 for a ring.
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
TRAFFIC = {"dp": "gradients", "edp": "gradients", "cp": "keys", "tp": "activations", "ep": "tokens"}  # others: scalars


def build_groups(grid: config.Grid, model: config.Model, timeout_s: float = 600) -> Groups:
    """This rank's group on every axis, None where it is alone; every rank calls this."""
    groups: Groups = dict.fromkeys(AXES)
    if not dist.is_initialized():
        return groups
    made = []  # [members of all groups of an axis, this rank's group, the kind of traffic that it has]
    for axis, members in members_of_axes(grid, model, dist.get_world_size()).items():
        if max(map(len, members)) == 1:
            continue
        traffic = TRAFFIC.get(axis)
        equal = [row for row in made if row[0] == members and (not traffic or row[2] in (None, traffic))]
        if not equal:
            equal.append([members, create_groups(members, timeout_s) if made else dist.group.WORLD, None])
            made.append(equal[0])
        equal[0][2] = traffic or equal[0][2]
        links = connect(members, pairs_of(grid), timeout_s) if axis == "pp" else {}
        groups[axis] = equal[0][1] and AxisGroup(axis, equal[0][1], links)
    return groups


def members_of_axes(grid: config.Grid, model: config.Model, world: int) -> dict[str, list[list[int]]]:
    """Axis -> the ranks of each of its groups, which together are all ranks. The world comes first."""
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
        members["tie"] = [pair for first, *middle, last in members["pp"]
                          for pair in ([first, last], *([rank] for rank in middle))]
    return members


def pairs_of(grid: config.Grid) -> list[tuple[int, int]]:
    """(from, to): the pipeline ranks between which results of forwards and backwards are sent."""
    p = grid.pp
    chain = [(r, r + 1) for r in range(p - 1)]
    if grid.chunks > 1 and not SCHEDULES[grid.schedule].v_shaped and p > 2:
        chain.append((p - 1, 0))  # from the last rank's chunk to the next chunk of the first
    return [pair for a, b in chain for pair in ((a, b), (b, a))]


def connect(pipelines: list[list[int]], pairs: list[tuple[int, int]],
            timeout_s: float) -> dict[tuple[int, int], dist.ProcessGroup]:
    """This rank's links: a process group for each directed pair that it is in."""
    rounds: list[list[tuple[int, int]]] = []  # of pairs without a common rank
    for pair in pairs:
        free = [done for done in rounds if not any(set(pair) & set(other) for other in done)]
        (free[0] if free else rounds.append([]) or rounds[-1]).append(pair)
    me, links = dist.get_rank(), {}
    for together in rounds:
        alone = set(range(len(pipelines[0]))) - {r for pair in together for r in pair}
        members = [[ranks[r] for r in part] for ranks in pipelines for part in (*together, *((r,) for r in alone))]
        group = create_groups(members, timeout_s)
        for ranks in pipelines:
            links |= {(a, b): group for a, b in together if me in (ranks[a], ranks[b])}
    return links
