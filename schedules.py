"""Pipeline schedules as data: who does what in which order, what is sent when, and what it costs in time and memory.

A schedule makes a Plan for p ranks and m micro-batches: for each rank a list of actions (op, stage, micro-batch), op
one of F, forward; B, backward; and its halves: I computes the gradient of the input, W those of the weights. Nothing
but the end of the step waits for a W, so W can fill bubbles: that is the whole idea of "zero bubble".

Shapes: p ranks, rank r, m micro-batches, v model chunks per rank (each the layers of one of v p stages), groups of n
micro-batches; F, B, I, W: a rank's time for one micro-batch in all chunks that it goes through.

warmup: the forwards that rank r does before it alternates one forward and one backward; lag: by how many backwards a W
trails its I. Activations: in those of 1/p of the layers for one micro-batch. Formulas hold if m >= 2p, n divides m, and
W <= min(F, I). The bubble of zb-h2 is that between a rank's first F and last W, the others are of the whole step.

                    warmup                   lag    bubble per rank            activations held, at most
    afab            all                      -      (p-1)(F+B)                 m
    1f1b            p-1-r                    -      (p-1)(F+B)                 p
    interleaved     2(p-1-r) + (v-1)n        -      (p-1)(F+B)/v               p + (p-1)/v, for n = p
    zb-h1           p-1-r                    r      (p-1)(F+I-W)               p
    zb-h2           2(p-1-r)                 2r     (p-1)(F+I-2W)              2p-1
    zb1p            (p-1-r) + (v-1)n         r      (p-1)(F+I-W)/v             p, for n = p
    zb-v            not fixed                -      (p-1)F/2, if F = I = W     p
    dualpipev       not fixed                -      (p-1)F/2, if F = I = W     p + 1/2
    dualpipe        not fixed                -      (p-2)F/2, if F = I = W     p + 1

Each action here is separate, and its result is sent at once. DualPipe's repository runs a forward
and the backward after it as one action, whose two results are sent at its end. The action takes the
time F&B, and the bubble is (p/2-1)(F&B + B - 3W). Without overlap, F&B = F + B, this is (p-2)F if
F = I = W: twice the bubble here.

To add a schedule, write a function that returns the order of one rank, and add it to SCHEDULES. `make_plan` refuses an
order that lacks an action, and says which. Nothing here needs torch.

Huang et al. 2019 (GPipe: afab); Narayanan et al. 2021 (1F1B, interleaved); Llama Team 2024, section 3.3.2 (any n); Qi
et al. 2023 and 2024 (zero bubble: H1, H2; V); DeepSeek-AI 2024, section 3.2.1, and the repository DualPipe.
"""
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, count, islice
from typing import NamedTuple


class Action(NamedTuple):
    op: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.micro_batch}"

    @property
    def result(self) -> "Action":
        """What other actions need of it: B and I alike give the gradient of the input, "B"."""
        return Action("B", *self[1:]) if self.op == "I" else self


class Plan(NamedTuple):
    ranks: list[list[Action]]  # what each rank does, in order
    owner: dict[tuple[int, int], int]  # (stage, micro-batch) -> the rank that has it

    @property
    def stages(self) -> int:
        return 1 + max(stage for stage, _ in self.owner)


# ---- schedules: the order of one rank -------------------------------------------------------------------------------

def alternating(r: int, p: int, m: int, v: int, n: int, *, warmup: int, lag: int | None = None) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turns, then the remaining backwards.

    Rank r has the stages r, p + r, 2p + r … and goes through them in groups of n micro-batches: n = p is depth first,
    n = m breadth first. lag: by how many backwards a W trails its I; None: backwards are not split.
    """
    order = [(chunk, k) for first in range(0, m, n) for chunk in range(v) for k in range(first, min(first + n, m))]
    forwards = iter([Action("F", chunk * p + r, k) for chunk, k in order])
    backwards = [Action("B" if lag is None else "I", (v - 1 - chunk) * p + r, k) for chunk, k in order]
    weights = iter([] if lag is None else [backward._replace(op="W") for backward in backwards])
    actions = [*islice(forwards, warmup)]
    for i, backward in enumerate(backwards):
        actions += [*islice(forwards, 1), backward]  # no forward once all are done
        if lag is not None and i >= lag:
            actions.append(next(weights))
    return [*actions, *weights]


def two_chunks(stages: tuple[int, int], m: int, steps: list[tuple[str, int]]) -> list[Action]:
    """The order of a rank with two stages, from (words, how many times): of the stages 0 and 3, [("F0", 2), ("F1 I1 W",
    1)] makes F0.0 F0.1 F3.0 I3.0 W3.0. "F1" is the next forward of the second stage; "W" belongs to the oldest I that
    has no W yet, "W0" to the oldest of the first stage. Words beyond the m micro-batches of a stage are left out."""
    actions, without_w = [], []
    numbers = defaultdict(count)  # (whether it is a forward, chunk) -> micro-batches
    for words, times in steps:
        for word in words.split() * times:
            op, chunk = word[0], int(word[1:]) if word[1:] else None
            if op == "W":
                chunk, k = next(pair for pair in without_w if chunk in (None, pair[0]))
                without_w.remove((chunk, k))
            else:
                k = next(numbers[op == "F", chunk])
                if op == "I":
                    without_w.append((chunk, k))
            if k < m:
                actions.append(Action(op, stages[chunk], k))
    return actions


def zb_v(r: int, p: int, m: int) -> list[Action]:
    """The stages of a rank are r and 2p-1-r: the last stage is on the first rank, and backward starts early. The counts
    are those of the paper's figure."""
    full = max(2 * p - 1, m)  # fewer do not fill the pipeline: of their order, what is beyond m is left out
    return two_chunks((r, 2 * p - 1 - r), m, [
        ("F0", 2 * (p - r) - 1), ("F1 F0", r), ("F1 I1 W", p - r),  # warm-up
        ("F0 I0 W F1 I1 W", full - 2 * p + 1 + r), ("I0 W F1 I1 W", p - 1 - r),  # steady
        ("I0 I1", r), ("I0 W0", p - r), ("W1", r), ("W0", r)])  # drain


def dual_pipe(r: int, p: int, m: int) -> list[Action]:
    """Half of the micro-batches enter at the first rank, half at the last; each rank has two copies of the weights."""
    if p % 2 or m % 2:
        raise ValueError(f"{m} micro-batches on {p} ranks: schedule dualpipe needs even numbers of both")
    near, each = min(r, p - 1 - r), m // 2  # the stage of micro-batches from the nearer end; how many from each
    actions = two_chunks((near, p - 1 - near), each, dual(near, p // 2, each))
    return [action if action.stage == r else action._replace(micro_batch=action.micro_batch + each)
            for action in actions]  # those that enter at the last rank have the later numbers


def dual(near: int, middle: int, m: int) -> list[tuple[str, int]]:
    """The eight steps of DualPipe for a rank with the stages `near` and 2 middle - 1 - near, where `middle` is half of
    their number. A forward and the backward after it may run at the same time; here they do not."""
    far = middle - near - 1
    return [("F0", 2 * far), ("F0 F1", near + 1), ("I1 W F1", far),  # warm-up
            ("F0 B1 F1 B0", m - middle - far),  # steady
            ("B1 F1 B0", far), ("B1 B0", (near + 1) // 2), ("B1 I0", (near + 1) % 2), ("I1 I0", (near + 1) // 2),
            ("W I0", far), ("W", near + 1)]  # drain


class Schedule(NamedTuple):
    """A schedule and what it needs."""
    order: Callable[[int, int, int, int, int], list[Action]]  # (r, p, m, v, n) -> what rank r does
    chunks: int = 1  # model chunks per rank
    grouped: bool = False  # any number of chunks will do, too, gone through in groups of n micro-batches
    least: int = 0  # the fewest micro-batches, per rank
    v_shaped: bool = False  # a rank's second stage counts from the end: the last stage is on the rank of the first
    runs: bool = True  # whether training offers it; otherwise it is only drawn

    def allows(self, chunks: int) -> bool:
        return self.grouped or chunks == self.chunks

    def rank_of(self, stage: int, p: int) -> int:
        """The rank of a stage, of a schedule that runs: stages go round the ranks or, in a V, to and fro."""
        turn, r = divmod(stage, p)
        return p - 1 - r if self.v_shaped and turn % 2 else r


SCHEDULES = {
    "afab": Schedule(lambda r, p, m, v, n: alternating(r, p, m, v, n, warmup=m)),
    "1f1b": Schedule(lambda r, p, m, v, n: alternating(r, p, m, v, n, warmup=p - 1 - r)),
    "interleaved": Schedule(lambda r, p, m, v, n: alternating(
        r, p, m, v, n, warmup=p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * n), chunks=2, grouped=True),
    "zb-h1": Schedule(lambda r, p, m, v, n: alternating(r, p, m, v, n, warmup=p - 1 - r, lag=r)),
    "zb-h2": Schedule(lambda r, p, m, v, n: alternating(r, p, m, v, n, warmup=2 * (p - 1 - r), lag=2 * r), runs=False),
    "zb1p": Schedule(lambda r, p, m, v, n: alternating(r, p, m, v, n, warmup=p - 1 - r + (v - 1) * n, lag=r),
                     chunks=2, grouped=True),
    "zb-v": Schedule(lambda r, p, m, v, n: zb_v(r, p, m), chunks=2, v_shaped=True),
    "dualpipev": Schedule(lambda r, p, m, v, n: two_chunks((r, 2 * p - 1 - r), m, dual(r, p, m)), chunks=2, least=2,
                          v_shaped=True),
    "dualpipe": Schedule(lambda r, p, m, v, n: dual_pipe(r, p, m), chunks=2, least=2, runs=False),
}


def make_plan(schedule: str, p: int, m: int, v: int = 0, n: int = 0) -> Plan:
    """The plan of a schedule for p ranks and m micro-batches. v: model chunks per rank, by default as many as the
    schedule has. n: micro-batches per group, by default as few as possible: that holds least, and takes no longer.

    Raises ValueError, with what would work, for an unknown schedule or numbers with which it does not work.
    """
    if min(p, m) < 1 or min(v, n) < 0:
        raise ValueError(f"{p} ranks, {m} micro-batches, {v} model chunks per rank, groups of {n}: must be above 0")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule}: unknown, use one of {', '.join(SCHEDULES)}")
    chosen = SCHEDULES[schedule]
    v = v or chosen.chunks
    if not chosen.allows(v):
        any_number = " and ".join(name for name, needed in SCHEDULES.items() if needed.grouped)
        raise ValueError(f"{v} model chunks per rank: schedule {schedule} has {chosen.chunks}, {any_number} any")

    def never_stuck(group: int) -> bool:  # at least p micro-batches in each group, the last one, too, or all in one
        return group == m or (group >= p and (m % group == 0 or m % group >= p))

    n = min(n, m) or next(group for group in range(1, m + 1) if never_stuck(group))
    if v > 1 and chosen.grouped and not never_stuck(n):
        raise ValueError(f"groups of {n} of {m} micro-batches on {p} ranks would wait for each other for ever: groups "
                         f"must hold at least {p}, the last one, too, or all {m}")
    if m < chosen.least * p:
        raise ValueError(f"{m} micro-batches: schedule {schedule} needs at least {chosen.least * p} on {p} ranks")
    ranks = [chosen.order(r, p, m, v, n) for r in range(p)]
    plan = Plan(ranks, {(stage, k): r for r, actions in enumerate(ranks) for op, stage, k in actions if op == "F"})
    check_plan(plan, schedule, m, v)
    return plan


def check_plan(plan: Plan, schedule: str, m: int, v: int) -> None:
    """Raise ValueError unless every stage computes each of m micro-batches forward and then backward, once, and is on
    the rank where all other files expect it. v: model chunks per rank. (`in_turns` finds ranks that wait for ever.)"""
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
    """The plan of a config.Grid. Raises ValueError as `make_plan` does."""
    return make_plan(grid.schedule if grid.pp > 1 else "1f1b", grid.pp, micro_batches, grid.virtual_stages)


# ---- sends and receives ---------------------------------------------------------------------------------------------

class Transfer(NamedTuple):
    """A send to, or receive from, another rank of what one of its ends needs next."""
    op: str  # "send" or "receive"
    what: str  # "F": an activation; "B": a gradient
    stage: int  # the stage that needs it
    micro_batch: int
    peer: int  # the rank at the other end


def required_results(action: Action, stages: int) -> set[Action]:
    """The results that an action cannot start without."""
    op, stage, k = action
    needs = {"F": [("F", stage - 1)], "W": [("B", stage)]}.get(op, [("F", stage), ("B", stage + 1)])  # B and I
    return {Action(what, other, k) for what, other in needs if 0 <= other < stages}


def send_of(plan: Plan, r: int, action: Action) -> Transfer | None:
    """What rank r sends after an action; None if nobody needs the result, or this rank itself."""
    what, stage, k = action.result
    to = {"F": stage + 1, "B": stage - 1, "W": -1}[what]  # nobody needs the result of a W
    peer = plan.owner.get((to, k), r)
    return None if peer == r else Transfer("send", what, to, k, peer)


def in_turns(plan: Plan) -> list[tuple[int, Action, Transfer | None]]:
    """All actions of a plan, each after all that it needs: (rank, action, what the rank then sends). Ranks take turns,
    each with its next action if that can start. Raises ValueError, naming ranks and actions, if none can."""
    turns, done, stages = [], set(), plan.stages
    waiting = [deque(actions) for actions in plan.ranks]
    while any(waiting):
        before = len(turns)
        for r, actions in enumerate(waiting):
            if actions and required_results(actions[0], stages) <= done:
                action = actions.popleft()
                done.add(action.result)
                turns.append((r, action, send_of(plan, r, action)))
        if len(turns) == before:
            stuck = ", ".join(f"rank {r} cannot start {actions[0]}" for r, actions in enumerate(waiting) if actions)
            raise ValueError(f"ranks wait for each other: {stuck}")
    return turns


def with_transfers(plan: Plan) -> list[list[Action | Transfer]]:
    """The ranks' lists of a plan with sends and receives, each entered on both ranks right after what it sends is made.

    So any two ranks have their transfers in the same order, as NCCL needs: it matches them by order, and one may block
    the next. Raises ValueError if ranks wait for each other for ever.
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
    """Times of a stage, for one micro-batch, in any unit. Of v model chunks each takes 1/v of a rank's time."""
    forward: float = 1.0
    input: float = 1.0  # the half of backward that gives the gradient of the input
    weight: float = 1.0  # the half that gives that of the weights
    hop: float = 0.0  # sending a result to another rank

    def of(self, op: str) -> float:
        return {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}[op]


class Span(NamedTuple):
    action: Action
    start: float
    stop: float


def simulate(plan: Plan, costs: Costs | Sequence[Costs] | None = None,
             turns: list[tuple[int, Action, Transfer | None]] | None = None) -> list[list[Span]]:
    """When each rank does what, if each action, in order, starts as soon as it can. costs: of every stage, or one for
    all of them. turns: in_turns(plan), if it is known. Raises ValueError as `in_turns`."""
    if costs is None or isinstance(costs, Costs):
        costs = [costs or Costs()] * plan.stages
    seconds = [{op: cost.of(op) for op in "FBIW"} for cost in costs]
    spans = [[] for _ in plan.ranks]
    ended = [0.0] * len(plan.ranks)  # when each rank's latest action ended
    received = {}  # ("F" or "B", the stage that needs it, micro-batch) -> when its rank has it
    for r, action, send in turns or in_turns(plan):
        op, stage, k = action
        start = max(ended[r], received.get(("F" if op == "F" else "B", stage, k), 0.0))
        ended[r] = start + seconds[stage][op]
        spans[r].append(Span(action, start, ended[r]))
        if send:
            received[send.what, send.stage, send.micro_batch] = ended[r] + costs[stage].hop
    return spans


def bubble(spans: list[list[Span]]) -> float:
    """The longest time that a rank is idle, from time 0 to the last stop of all ranks."""
    end = max(row[-1].stop for row in spans)
    return end - min(sum(span.stop - span.start for span in row) for row in spans)


def activations_held(actions: list[Action]) -> list[int]:
    """Activations after each action, in those of one stage and micro-batch. An I, half a backward, frees none."""
    return list(accumulate(dict(F=1, B=-1, I=0, W=-1)[action.op] for action in actions))
