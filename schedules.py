"""Pipeline schedules as data: the order in which each rank runs its forwards and backwards.

                     warmup│ steady: one forward, one backward       │ cooldown
    1f1b     rank 0   F0 F1 F2             B0    F3 B1    F4 B2       B3       B4
             rank 1      F0 F1       B0    F2 B1    F3 B2    F4 B3       B4
             rank 2         F0 B0    F1 B1    F2 B2    F3 B3    F4 B4

    zb-h1    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
             rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
             rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

F3 is the forward of micro-batch 3. F, I and W take one unit of time here, B takes two. Blanks are idle time. The bars
mark the phases of rank 0. Later ranks have a shorter warmup.

A schedule is a function that returns the order of one rank: a list of actions (op, stage, micro-batch).

    F   the forward of a stage for one micro-batch
    B   the whole backward of a stage for one micro-batch; I and W are its two halves
    I   computes the gradient of the stage's input, for which the previous stage waits
        (the zero-bubble papers call this half B)
    W   computes the gradients of the stage's weights, for which nothing waits before the end of the step

A rank is idle while it waits for an activation or a gradient: this is the bubble. In the figure rank 0 is idle for six
units of time under 1f1b. Under zb-h1 it is idle for two, because the other ranks send their gradients on before they
compute their weight gradients. W then fills the gaps: this is the whole idea of "zero bubble".

    p      pipeline ranks, of which this one is rank r, counted from 0
    m      micro-batches per step
    v      model chunks per rank: how many stages a rank has (Megatron: virtual stages). The model is cut into v p
           stages. Only dualpipe cuts it into p, because it has every stage on two ranks
    n      micro-batches per group. A rank takes a group through one chunk after the other, then the next group

make_plan makes the orders of all ranks and checks them. with_transfers inserts the sends and receives, simulate says
when each action runs, and pp.py's Engine runs a plan. This file does not need torch.

What the schedules cost. In this table, F, B, I and W are times: what 1/p of the layers needs for one micro-batch. The
bubble is the time for which a rank is idle in a step. The unit of activations is what one micro-batch leaves in 1/p of
the layers.

    schedule      forwards in the warmup    bubble                      most activations held
    afab          all                       (p-1)(F+B)                  m
    1f1b          p-1-r                     (p-1)(F+B)                  p
    interleaved   2(p-1-r) + (v-1)n         (p-1)(F+B)/v                p + (p-1)/v, if n = p
    zb-h1         p-1-r                     (p-1)(F+I-W)                p
    zb-h2         2(p-1-r)                  (p-1)(F+I-2W), see below    2p-1
    zb1p          (p-1-r) + (v-1)n          (p-1)(F+I-W)/v              p, if n = p
    zb-v          see `zb_v`                (p-1)F/2, if F = I = W      p
    dualpipev     see `dual_pipe_steps`     (p-1)F/2, if F = I = W      p + 1/2
    dualpipe      see `dual_pipe_steps`     (p-2)F/2, if F = I = W      p + 1

The formulas hold if m >= 2p, n divides m, and W <= min(F, I). Papers divide a bubble in one of two ways. For 1f1b:

    share of the step (GPipe)                        bubble / (m(F+B) + bubble) = (p-1)/(m+p-1)
    relative to the computation (Megatron, Llama)    bubble / (m(F+B))          = (p-1)/m

For zb-h2 the bubble is counted from a rank's own first F to its own last W. Its ranks start and end one after the
other, and the next step would fill the gap. All other bubbles are of a whole step, which begins on all ranks together
and ends when the last rank is done. `bubble` and the demo count a whole step for zb-h2, too: they print as much as for
zb-h1.

In the repository DualPipe, a forward and the backward after it are one action, which takes the time F&B and sends both
results at its end. Its bubble is (p/2-1)(F&B + B - 3W). Without overlap, F&B = F + B, this is (p-2)F if F = I = W.
This file keeps both as separate actions and sends each result as soon as it exists, which halves the bubble. It gives
up the purpose of the joint action: the experts' all-to-all of the forward runs under the computation of the backward,
and vice versa.

Huang et al. 2019 (GPipe: afab); Narayanan et al. 2021 (1F1B, interleaved); Llama Team 2024, section 3.3.2 (any n); Qi
et al. 2023 (zero bubble: H1, H2) and 2024 (V); DeepSeek-AI 2024, section 3.2.1, and the repository DualPipe.
"""
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Action(NamedTuple):
    """What a rank does for one stage and one micro-batch. It is printed with both: F3.1 is the forward of stage 3 for
    micro-batch 1. (The figure has one stage per rank, and only shows micro-batches.)"""
    op: str  # "F", "B", "I" or "W"
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.micro_batch}"

    @property
    def result(self) -> "Action":
        """The name under which other actions wait for this one. B and I have the same: the gradient of the input."""
        return self._replace(op="B") if self.op == "I" else self


class Plan(NamedTuple):
    """The orders of all ranks."""
    ranks: list[list[Action]]  # the order of each rank
    # (stage, micro-batch) -> the rank that has it. Only in dualpipe, which has two copies of every stage, does it
    # depend on the micro-batch.
    owner: dict[tuple[int, int], int]

    @property
    def stages(self) -> int:
        return 1 + max(stage for stage, _ in self.owner)


# ---- schedules with a warmup, a steady phase and a cooldown ---------------------------------------------------------
# A schedule is a function of (r, p, m, v, n) that returns the order of rank r; most need three of the five numbers.

def one_f_one_b(r: int, p: int, m: int, v: int, n: int, warmup: int) -> list[Action]:
    """Run `warmup` forwards, then alternate one forward and one backward, then run the backwards that are left.

    Rank r has the stages r, p + r, 2p + r ... With n = p the order is called depth first, with n = m breadth first.
    """
    in_turn = []  # (chunk, micro-batch), in the order of this rank's forwards
    for first in range(0, m, n):
        for chunk in range(v):
            for k in range(first, min(first + n, m)):
                in_turn.append((chunk, k))
    forwards = [Action("F", chunk * p + r, k) for chunk, k in in_turn]
    backwards = [Action("B", (v - 1 - chunk) * p + r, k) for chunk, k in in_turn]  # begin in the last chunk

    actions = forwards[:warmup]  # warmup
    in_steady = forwards[warmup:]
    for forward, backward in zip(in_steady, backwards):  # steady 1F1B
        actions += [forward, backward]
    return actions + backwards[len(in_steady):]  # cooldown


def split_backwards(actions: list[Action], lag: int) -> list[Action]:
    """Zero bubble: replace each B by an I in its place and a W that follows `lag` backwards later, or at the end."""
    split, waiting = [], deque()  # waiting: each W whose I is done, the oldest first
    for action in actions:
        if action.op != "B":
            split.append(action)
            continue
        split.append(action._replace(op="I"))
        waiting.append(action._replace(op="W"))
        if len(waiting) > lag:
            split.append(waiting.popleft())
    return [*split, *waiting]


def afab(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """All forwards, then all backwards (GPipe)."""
    return one_f_one_b(r, p, m, v, n, warmup=m)


def one_chunk_1f1b(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """1F1B with one stage per rank, after a warmup of p-1-r forwards.

    The p-1-r ranks after this one need a micro-batch each. With fewer in the warmup they would wait in the steady
    phase. More would be held for nothing.
    """
    return one_f_one_b(r, p, m, v, n, warmup=p - 1 - r)


def interleaved(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """1F1B with several chunks per rank, which fill and drain the pipeline in steps of 1/v of the time.

    The warmup has the first group's n micro-batches in all chunks except the last, (v-1)n forwards. Then micro-batch 0
    enters the last chunk: its forward passes the p-1-r ranks after this one, and its gradient comes back through them.
    Meanwhile this rank runs 2(p-1-r) more forwards.
    """
    if v == 1:
        return one_chunk_1f1b(r, p, m, v, n)
    return one_f_one_b(r, p, m, v, n, warmup=(v - 1) * n + 2 * (p - 1 - r))


def zb_h1(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """1F1B with split backwards, which holds no more activations than rank 0 of 1f1b.

    With the warmup of 1f1b, rank r has p-r micro-batches between F and I. It may let r more wait between I and W:
    then every rank holds p.
    """
    return split_backwards(one_chunk_1f1b(r, p, m, v, n), lag=r)


def zb_h2(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """Enough forwards to be busy until the first gradient is back: it passes p-1-r ranks twice, forward and backward.

    Then rank r has 2(p-1-r) + 1 micro-batches between F and I. With 2r between I and W every rank holds 2p-1.
    """
    return split_backwards(one_f_one_b(r, p, m, v, n, warmup=2 * (p - 1 - r)), lag=2 * r)


def zb1p(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """zb-h1 with several chunks per rank, as PyTorch's ScheduleInterleavedZeroBubble. (DeepSeek-V3 calls zb-h1 ZB1P.)

    The warmup takes the first group through all chunks except the last, as in `interleaved`.
    """
    return split_backwards(one_f_one_b(r, p, m, v, n, warmup=(v - 1) * n + p - 1 - r), lag=r)


# ---- schedules with two chunks per rank, written down step by step --------------------------------------------------

class TwoChunkOrder:
    """Writes down the order of a rank that has two stages, of chunk 0 and of chunk 1.

    In its words, the letter after the action is the chunk: a for chunk 0, b for chunk 1. No word has a number, because
    micro-batches are counted here. For the stages 0 and 3, repeat(2, "Fa") and then repeat(1, "Fb Ib W") write F0.0
    F0.1 F3.0 I3.0 W3.0.

        "Fb", "Bb", "Ib"    the next micro-batch of chunk 1; forwards and backwards are counted separately
        "Wb"                the W of the oldest I of chunk 1 that has no W yet
        "W"                 the W of the oldest I of either chunk that has no W yet
    """

    def __init__(self, stages: tuple[int, int], m: int):
        self.stages, self.m = stages, m
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]  # how many each chunk has had
        self.without_w: list[tuple[int, int]] = []  # (chunk, micro-batch) of each I that has no W yet, oldest first

    def repeat(self, times: int, words: str) -> None:
        """Write the words `times` times. Micro-batches from number m on do not exist and are left out."""
        for word in words.split() * times:
            op = word[0]
            chunk = "ab".index(word[1]) if len(word) == 2 else None
            if op == "W":
                chunk, k = self.oldest_without_w(chunk)
                self.without_w.remove((chunk, k))
            else:
                count = self.forwards if op == "F" else self.backwards
                k = count[chunk]
                count[chunk] += 1
                if op == "I":
                    self.without_w.append((chunk, k))
            if k < self.m:
                self.actions.append(Action(op, self.stages[chunk], k))

    def oldest_without_w(self, chunk: int | None) -> tuple[int, int]:
        """Return (chunk, micro-batch) of the oldest I that has no W yet. chunk: 0, 1, or None for either."""
        for pair in self.without_w:
            if chunk is None or pair[0] == chunk:
                return pair
        raise ValueError("a W without an I before it")


def zb_v(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """The stages of a rank are r and 2p-1-r, a V: the last stage is on rank 0, and its backward starts early.

    Three ranks, one per row, and six micro-batches; chunk 1 is in lower case:

    0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 F5 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 f5 i5 w5 I3 W3 I4 W4 I5 W5
    1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 F5 I1 W1 f4 i3 w3 I2 W2 f5 i4 w4 I3 i5 I4 W3 I5 W4 w5 W5
    2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 F5 I2 W2 f5 i3 w3 I3 i4 I4 i5 I5 W3 w4 w5 W4 W5

    The counts below are times, with F = I = W = 1. The bend of the V is on rank p-1, which has the stages p-1 and p.
    """
    order = TwoChunkOrder((r, 2 * p - 1 - r), m)
    full = max(2 * p - 1, m)  # fewer do not fill the pipeline: micro-batches beyond m are left out
    # Warmup, until micro-batch 0 is in this rank's second stage. From stage r to stage 2p-1-r are 2(p-r)-1 forwards.
    order.repeat(2 * (p - r) - 1, "Fa")
    # Until the gradient of micro-batch 0 is back from the last stage, on rank 0. Its forward passes r stages to there,
    # and its gradient r stages from there: 2r.
    order.repeat(r, "Fb Fa")
    # Until this gradient is back from rank p-1, for this rank's first stage: in the figure, from i0 to I0. From here to
    # the bend it takes p-r units, one per rank. On the way back it takes two per rank, because a forward is run in
    # between. That makes 3(p-r) units, and the three words take three.
    order.repeat(p - r, "Fb Ib W")
    # Steady: all forwards of chunk 0 that are left.
    order.repeat(full - (2 * (p - r) - 1) - r, "Fa Ia W Fb Ib W")
    # Cooldown: input gradients, for which other ranks wait, come before weight gradients.
    order.repeat(p - 1 - r, "Ia W Fb Ib W")  # the forwards of chunk 1 that are left
    order.repeat(r, "Ia Ib")  # the input gradients of chunk 1 that are left
    order.repeat(p - r, "Ia Wa")  # the input gradients of chunk 0 that are left
    order.repeat(r, "Wb")  # the weight gradients of chunk 1 that are left
    order.repeat(r, "Wa")  # the weight gradients of chunk 0 that are left
    return order.actions


def dual_pipe_v(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """DualPipeV: the orders of the first p ranks of DualPipe on 2p ranks. The stages of rank r are r and 2p-1-r.

    Where rank p-1 of DualPipe would exchange with rank p, it now goes on with its own other stage: the bend of the V.
    """
    return dual_pipe_steps((r, 2 * p - 1 - r), r, p, m)


def dual_pipe(r: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """Half of the micro-batches enter at rank 0, half at rank p-1. Every stage is on two ranks.

    Rank r has stage r for the first half of the micro-batches, and stage p-1-r for the others.
    """
    if p % 2 or m % 2:
        raise ValueError(f"{m} micro-batches on {p} ranks: schedule dualpipe needs even numbers of both")
    each = m // 2  # micro-batches that enter at each end
    # The distances are stages, too. A micro-batch that enters at the nearer end is in stage `from_nearer_end` here:
    # chunk 0. One that enters at the other end is in stage `from_other_end`: chunk 1.
    from_nearer_end = min(r, p - 1 - r)
    from_other_end = p - 1 - from_nearer_end
    actions = dual_pipe_steps((from_nearer_end, from_other_end), from_nearer_end, p // 2, each)
    # So far, micro-batches from each end are numbered from 0. The ones that enter at rank p-1 get the later numbers.
    return [action if action.stage == r else action._replace(micro_batch=action.micro_batch + each)
            for action in actions]


def dual_pipe_steps(stages: tuple[int, int], from_start: int, ranks: int, m: int) -> list[Action]:
    """The eight steps of DualPipe, numbered as in its repository, for m micro-batches of each chunk.

    from_start: this rank's distance from the end where its chunk 0 begins.
    ranks: how many ranks lie between that end and the bend of the V, both included: p in DualPipeV. In DualPipe the
        middle takes the place of the bend, and there are p/2.

    In step 4, the repository runs each forward and the backward after it as one action; here they are separate (see the
    top of this file).
    """
    order = TwoChunkOrder(stages, m)
    to_turn = ranks - 1 - from_start  # this rank's distance from the bend
    # Step 1, warmup: micro-batch 0 of chunk 0 goes to the bend and back, through to_turn ranks each way. (In DualPipe,
    # micro-batch 0 of the other end comes in its place, at the same time.)
    order.repeat(2 * to_turn, "Fa")
    # Step 2. Micro-batch 0 of chunk 1 is here after one more forward. It goes to the start, and its gradient comes
    # back, through from_start ranks each way.
    order.repeat(from_start + 1, "Fa Fb")
    # Step 3, until the gradient of micro-batch 0 of chunk 0 is back from the bend.
    order.repeat(to_turn, "Ib W Fb")
    # Step 4, steady: all forwards of chunk 0 that are left. Steps 1 and 2 had 2 to_turn + from_start + 1 of them,
    # which is ranks + to_turn.
    order.repeat(m - ranks - to_turn, "Fa Bb Fb Ba")
    # Step 5, cooldown: all forwards of chunk 1 that are left.
    order.repeat(to_turn, "Bb Fb Ba")
    # Step 6: 2 (from_start + 1) backwards. The second half of them is split, because other ranks wait for the input
    # gradients.
    order.repeat((from_start + 1) // 2, "Bb Ba")
    order.repeat((from_start + 1) % 2, "Bb Ia")
    order.repeat((from_start + 1) // 2, "Ib Ia")
    # Step 7: the input gradients that are left, each behind a W.
    order.repeat(to_turn, "W Ia")
    # Step 8: the W of the last from_start + 1 input gradients.
    order.repeat(from_start + 1, "W")
    return order.actions


# ---- the table of schedules, and a plan -----------------------------------------------------------------------------
# To add a schedule, write a function that returns the order of one rank, and add it to SCHEDULES. make_plan refuses an
# order that lacks an action, and says which.

class Schedule(NamedTuple):
    """A schedule and its requirements."""
    order: Callable[[int, int, int, int, int], list[Action]]  # (r, p, m, v, n) -> the order of rank r
    chunks: int = 1  # model chunks per rank
    # Whether micro-batches go through the chunks in groups of n. Such an order exists for any number of chunks, and
    # `chunks` is only its default.
    grouped: bool = False
    min_micro_batches_per_rank: int = 0
    v_shaped: bool = False  # a rank's second stage counts from the end: the last stage is on the rank of the first
    # Whether training offers it. The others can only be drawn. dualpipe needs two copies of the
    # weights, and nothing sums the gradients of the two. zb-h2 is faster only if a rank can begin
    # the next step before others end this one. Our steps end with the gradient norm, for which all
    # ranks wait.
    runs: bool = True

    def allows(self, chunks: int) -> bool:
        return self.grouped or chunks == self.chunks

    def rank_of(self, stage: int, p: int) -> int:
        """Return the rank that has a stage. Only for schedules that run: others may have a stage on two ranks.

        Stages go round the ranks, 0 1 2 0 1 2, or in a V, 0 1 2 2 1 0.
        """
        turn, r = divmod(stage, p)  # turn: how many times stages have gone through all ranks before
        return p - 1 - r if self.v_shaped and turn % 2 else r


SCHEDULES = {
    "afab": Schedule(afab),
    "1f1b": Schedule(one_chunk_1f1b),
    "interleaved": Schedule(interleaved, chunks=2, grouped=True),
    "zb-h1": Schedule(zb_h1),
    "zb-h2": Schedule(zb_h2, runs=False),
    "zb1p": Schedule(zb1p, chunks=2, grouped=True),
    "zb-v": Schedule(zb_v, chunks=2, v_shaped=True),
    "dualpipev": Schedule(dual_pipe_v, chunks=2, min_micro_batches_per_rank=2, v_shaped=True),
    "dualpipe": Schedule(dual_pipe, chunks=2, min_micro_batches_per_rank=2, runs=False),
}


def make_plan(schedule: str, p: int, m: int, v: int = 0, n: int = 0) -> Plan:
    """Make the plan of a schedule for p ranks and m micro-batches.

    v: model chunks per rank. 0 means as many as the schedule has by default.
    n: micro-batches per group. 0 means as few as possible, which holds the fewest activations. Larger groups are faster
        only if transfers take time: they have more computation to hide it (Llama Team 2024, section 3.3.2).
    Raises ValueError, with what would work, for an unknown schedule or numbers with which it does not work.
    """
    if min(p, m) < 1:
        raise ValueError(f"{p} ranks, {m} micro-batches: must be above 0")
    if min(v, n) < 0:
        raise ValueError(f"{v} model chunks per rank, groups of {n}: must be 0, for the default, or more")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule}: unknown, use one of {', '.join(SCHEDULES)}")
    chosen = SCHEDULES[schedule]
    v = v or chosen.chunks
    if not chosen.allows(v):
        any_number = " and ".join(name for name, needed in SCHEDULES.items() if needed.grouped)
        raise ValueError(f"{v} model chunks per rank: schedule {schedule} has {chosen.chunks}, {any_number} any")
    if n == 0:
        n = smallest_group(p, m)
    n = min(n, m)  # a batch ramp may begin with fewer micro-batches than a group has
    if v > 1 and chosen.grouped and not groups_are_large_enough(n, p, m):
        raise ValueError(f"groups of {n} of {m} micro-batches on {p} ranks would wait for each other forever: groups "
                         f"must hold at least {p}, the last one, too, or all {m}")
    needed = chosen.min_micro_batches_per_rank * p
    if m < needed:
        raise ValueError(f"{m} micro-batches: schedule {schedule} needs at least {needed} on {p} ranks")
    ranks = [chosen.order(r, p, m, v, n) for r in range(p)]
    owner = {(stage, k): r for r, actions in enumerate(ranks) for op, stage, k in actions if op == "F"}
    plan = Plan(ranks, owner)
    check_plan(plan, schedule, m, v)
    return plan


def groups_are_large_enough(n: int, p: int, m: int) -> bool:
    """Whether ranks with several chunks can go through groups of n micro-batches.

    A group of at least p micro-batches keeps rank 0 busy until the first of them has passed all ranks and is back for
    the next chunk. If any group is smaller, even if only the last, ranks may deadlock, unless it is the only group.
    """
    last = m % n
    return n == m or (n >= p and (last == 0 or last >= p))


def smallest_group(p: int, m: int) -> int:
    for n in range(p, m):
        if groups_are_large_enough(n, p, m):
            return n
    return m


def check_plan(plan: Plan, schedule: str, m: int, v: int) -> None:
    """Raise ValueError unless a plan is complete and its stages are where all other files expect them.

    Every stage must compute each of m micro-batches forward and then backward, once. v: model chunks per rank.
    (`in_turns` finds ranks that wait forever.)
    """
    chosen, p = SCHEDULES[schedule], len(plan.ranks)
    stages = p * v if chosen.runs else plan.stages  # one that is only drawn may have copies of a stage on two ranks
    missing = {(stage, k) for stage in range(stages) for k in range(m)} - plan.owner.keys()
    if missing:
        stage, k = min(missing)
        raise ValueError(f"schedule {schedule}: no rank has {Action('F', stage, k)}, the forward of stage {stage} and "
                         f"micro-batch {k}")
    for r, actions in enumerate(plan.ranks):
        ops_of = defaultdict(str)
        for op, stage, k in actions:
            ops_of[stage, k] += op
        for (stage, k), ops in ops_of.items():
            if ops not in ("FB", "FIW"):
                raise ValueError(f"schedule {schedule}: stage {stage} and micro-batch {k} have {' '.join(ops)} on rank "
                                 f"{r}, and need F B or F I W")
            if chosen.runs and (stage >= stages or r != chosen.rank_of(stage, p)):
                raise ValueError(
                    f"schedule {schedule}: stage {stage} is on rank {r}: {v} stages per rank go round {p} ranks, "
                    "0, 1, 2 ... 0, 1, 2 ..., or with v_shaped=True to and fro, 0, 1, 2 ... 2, 1, 0")


def plan_of(grid, micro_batches: int) -> Plan:
    """Make the plan of a core.config.Grid, which this file cannot import, because core/config.py imports this file.

    Training uses the smallest groups: this never passes n. Without --pp the plan is 1f1b on one rank: gradient
    accumulation. Raises ValueError as `make_plan` does.
    """
    return make_plan(grid.schedule if grid.pp > 1 else "1f1b", grid.pp, micro_batches, grid.virtual_stages)


# ---- sends and receives ---------------------------------------------------------------------------------------------

class Transfer(NamedTuple):
    """A send to another rank, or a receive from it, of a result that a later action of the receiver needs."""
    op: str  # "send" or "receive"
    what: str  # "F": an activation; "B": a gradient
    stage: int  # the stage that needs it, on the receiving rank
    micro_batch: int
    peer: int  # the rank at the other end


def required_results(action: Action, stages: int) -> set[Action]:
    """The results that must exist before an action can start, each named by `Action.result`."""
    op, stage, k = action
    needs = set()
    if op == "F":
        if stage > 0:
            needs.add(Action("F", stage - 1, k))
    elif op == "W":
        needs.add(Action("B", stage, k))  # its own I
    else:  # B and I
        needs.add(Action("F", stage, k))
        if stage < stages - 1:
            needs.add(Action("B", stage + 1, k))
    return needs


def send_of(plan: Plan, r: int, action: Action) -> Transfer | None:
    """What rank r sends after an action; None if nobody needs the result, or if this rank itself does."""
    what, stage, k = action.result
    if what == "W":
        return None
    receiving_stage = stage + 1 if what == "F" else stage - 1
    peer = plan.owner.get((receiving_stage, k), r)  # the last activation and the first gradient have no receiver
    return None if peer == r else Transfer("send", what, receiving_stage, k, peer)


def in_turns(plan: Plan) -> list[tuple[int, Action, Transfer | None]]:
    """All actions of a plan in an order in which they can run one by one: (rank, action, its send).

    Goes round the ranks, again and again. Each rank runs its next action if that can start. Raises ValueError, naming
    ranks and actions, if no rank can.
    """
    turns, results, stages = [], set(), plan.stages
    waiting = [deque(actions) for actions in plan.ranks]
    while any(waiting):
        before = len(turns)
        for r, actions in enumerate(waiting):
            if actions and required_results(actions[0], stages) <= results:
                action = actions.popleft()
                results.add(action.result)
                turns.append((r, action, send_of(plan, r, action)))
        if len(turns) == before:
            stuck = ", ".join(f"rank {r} cannot start {actions[0]}" for r, actions in enumerate(waiting) if actions)
            raise ValueError(f"ranks wait for each other: {stuck}")
    return turns


def with_transfers(plan: Plan) -> list[list[Action | Transfer]]:
    """The order of each rank with its sends and receives.

    A transfer joins the lists of both its ranks right after the action that computes its tensor, in the order of
    `in_turns`. So any two ranks have their transfers in the same order. NCCL needs this: it matches transfers by their
    order, and one may block the next. Raises ValueError if ranks wait for each other forever.
    """
    lists = [[] for _ in plan.ranks]
    for r, action, send in in_turns(plan):
        lists[r].append(action)
        if send:
            lists[r].append(send)
            lists[send.peer].append(send._replace(op="receive", peer=r))
    return lists


# ---- time and memory ------------------------------------------------------------------------------------------------

class Costs(NamedTuple):
    """The times of one stage for one micro-batch, in any unit."""
    forward: float = 1.0
    input: float = 1.0  # I, the half of a backward that computes the gradient of the input
    weight: float = 1.0  # W, the half that computes the gradients of the weights
    hop: float = 0.0  # sending a result to another rank

    def of(self, op: str) -> float:
        return {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}[op]


class Span(NamedTuple):
    """When an action runs."""
    action: Action
    start: float
    stop: float


def simulate(plan: Plan, costs: Costs | Sequence[Costs] | None = None,
             turns: list[tuple[int, Action, Transfer | None]] | None = None) -> list[list[Span]]:
    """For each rank, when its actions run if each starts as soon as it can, in the plan's order.

    costs: of every stage, or one for all of them. turns: in_turns(plan), if the caller has it. Raises ValueError as
    `in_turns` does.
    """
    if costs is None or isinstance(costs, Costs):
        costs = [costs or Costs()] * plan.stages
    times = [{op: cost.of(op) for op in "FBIW"} for cost in costs]
    spans = [[] for _ in plan.ranks]
    ended = [0.0] * len(plan.ranks)  # when each rank's latest action ended
    received = {}  # ("F" or "B", the stage that needs it, micro-batch) -> when its rank has it
    for r, action, send in turns or in_turns(plan):
        op, stage, k = action
        # A result of this rank is not in `received`: the rank's order says that it exists. A W finds the gradient that
        # its I has received, so it never waits for it.
        start = max(ended[r], received.get(("F" if op == "F" else "B", stage, k), 0.0))
        ended[r] = start + times[stage][op]
        spans[r].append(Span(action, start, ended[r]))
        if send:
            received[send.what, send.stage, send.micro_batch] = ended[r] + costs[stage].hop
    return spans


def bubble(spans: list[list[Span]]) -> float:
    """The time for which the rank that works least is idle, from time 0 to the last stop of all ranks."""
    end = max(row[-1].stop for row in spans)
    return end - min(sum(span.stop - span.start for span in row) for row in spans)


def activations_held(actions: list[Action]) -> list[int]:
    """How many activations a rank holds after each action, counted per stage and micro-batch. A split backward frees
    its activation in W."""
    return list(accumulate(dict(F=1, B=-1, I=0, W=-1)[action.op] for action in actions))


# ---- demo: python schedules.py --------------------------------------------------------------------------------------

def demo() -> None:
    """All schedules to one scale. python -m run.timeline draws them for other numbers, in color or as SVG."""
    p, m = 4, 8
    print(f"{p} ranks, {m} micro-batches. F, I and W of 1/p of the layers take one unit of time, two characters wide;\n"
          "B = I + W takes two. The digit is the micro-batch. A rank's second chunk is in lower case. A chunk takes\n"
          "half as long if the model is cut into 2p stages: in all schedules with two chunks except dualpipe.\n"
          "Dots are the bubble: on the right as a time and in both conventions.\n")
    for name in SCHEDULES:
        plan = make_plan(name, p, m)
        time = p / plan.stages  # of a stage, if all stages together take p units of time
        spans = simulate(plan, Costs(forward=time, input=time, weight=time))
        end, idle = max(row[-1].stop for row in spans), bubble(spans)
        notes = [f"idle {idle:g} of {end:g}", f"{idle / end:.0%} of the step",
                 f"{idle / (end - idle):.0%} of the computation"] + [""] * (p - 3)
        for r, (row, note) in enumerate(zip(spans, notes)):
            print(f"{name if r == 0 else '':12s}{r}  {picture(row, end, plan.stages == p):68s}{note}".rstrip())


def picture(row: list[Span], end: float, numbered: bool) -> str:
    """One rank's actions, two characters per unit of time. numbered: with the micro-batches' numbers."""
    line, first_stage = "", row[0].action.stage
    for (op, stage, k), start, stop in row:
        name = op if stage == first_stage else op.lower()
        if numbered:
            name += str(k)
        line = line.ljust(round(2 * start), ".") + name.ljust(round(2 * (stop - start)), "-")
    return line.ljust(round(2 * end), ".")


if __name__ == "__main__":
    import sys

    if sys.argv[1:] in (["--help"], ["-h"]):
        print(__doc__)
    elif sys.argv[1:]:
        print(f"schedules.py: error: unrecognized arguments: {' '.join(sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)
    else:
        demo()
