"""Pipeline schedules as data: who does what in which order, what is sent when, and what it costs in time and memory.

A schedule makes a Plan for p ranks and m micro-batches: for each rank a list of actions (op, stage, micro-batch), op
one of

    F  forward     B  backward     I  the half of it that gives the gradient of the input     W  that of the weights

Nothing but the end of the step waits for a W, so W can fill bubbles: that is the whole idea of "zero bubble". Most
schedules differ by two numbers only: how many forwards a rank does before it alternates one forward and one backward,
`warmup`, and by how many backwards a W trails its I, `lag`.

Shapes: p ranks, rank r, m micro-batches, v model chunks per rank (each the layers of one of v p stages), groups of n
micro-batches; F, B, I, W: a rank's time for one micro-batch in all chunks that it goes through.

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

The unit of activations is those of 1/p of the layers for one micro-batch. Formulas hold if m >= 2p, n divides m, and W
<= min(F, I). The bubble of zb-h2 is that between a rank's first F and last W; the others are of the whole step.

Groups of n = p are depth first, n = m is breadth first; Llama 3 is in between. A group must hold at least p, the last
one, too, or all m; the smallest possible n holds the least, and no other n makes the bubble shorter. zb-v and dualpipev
give rank r the stages r and 2p-1-r: the last stage is on the first rank, and backward starts early. dualpipev and
dualpipe allow a forward and a backward at the same time (here they are not); dualpipe sends micro-batches through the
ranks in both directions, with two copies of the weights. zb-h2 takes as long as zb-h1 where all ranks wait for the
gradient norm at the end of a step: so it is only drawn here, as is dualpipe.
To add a schedule, write a function that returns its Plan and add it to SCHEDULES. Nothing here needs torch.

Huang et al. 2019 (GPipe: afab); Narayanan et al. 2021 (1F1B, interleaved); Llama Team 2024, section 3.3.2 (any n); Qi
et al. 2023 and 2024 (zero bubble: H1, H2; V); DeepSeek-AI 2024, section 3.2.1, and the repository DualPipe.
"""
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
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
    owners: list[list[int]]  # the rank of every stage, for each direction in which micro-batches flow: one, or two
    micro_batches: int

    @property
    def stages(self) -> int:
        return len(self.owners[0])

    def owner(self, stage: int, micro_batch: int) -> int:
        """The rank of a stage. With two directions, the first half of the micro-batches flows in the first one."""
        return self.owners[micro_batch * len(self.owners) // self.micro_batches][stage]


# ---- schedules ------------------------------------------------------------------------------------------------------

def alternating(warmup: Callable[..., int], lag: Callable[[int], int] | None = None) -> Callable[..., Plan]:
    """Schedules of `warmup` forwards, then one forward and one backward in turns, then the remaining backwards.

    warmup(r, p, m, v, n): a number of forwards. lag(r): by how many backwards a W trails its I; None: backwards are not
    split. Rank r has the stages r, p + r, 2p + r … and goes through them in groups of n micro-batches.
    """
    def build(p: int, m: int, v: int, n: int) -> Plan:
        groups = [range(first, min(first + n, m)) for first in range(0, m, n)]
        order = [(chunk, k) for group in groups for chunk in range(v) for k in group]
        ranks = []
        for r in range(p):
            forwards = [Action("F", chunk * p + r, k) for chunk, k in order]
            backwards = [((v - 1 - chunk) * p + r, k) for chunk, k in order]
            ahead = min(len(order), warmup(r, p, m, v, n))
            late = lag(r) if lag else 0
            actions = forwards[:ahead]
            for i in range(len(order) + late):  # slices are empty once forwards or backwards run out
                actions += forwards[ahead + i:ahead + i + 1]
                actions += [Action("I" if lag else "B", *backward) for backward in backwards[i:i + 1]]
                if lag and i >= late:
                    actions.append(Action("W", *backwards[i - late]))
            ranks.append(actions)
        return Plan(ranks, [[stage % p for stage in range(v * p)]], m)
    return build


class TwoChunks:
    """Builds the list of a rank with two stages from words such as "F0" or "I1": op, and which of the two stages. "W0"
    belongs to the oldest I of that stage that has no W yet, "W" to the oldest of both. Micro-batches from m on are left
    out."""

    def __init__(self, stages: tuple[int, int], m: int, first: tuple[int, int] = (0, 0)):
        """m: micro-batches per stage. first: the first one's number, for each stage."""
        self.stages, self.m, self.first = stages, m, first
        self.count: Counter[tuple[str, int]] = Counter()  # ("F" or "B", which) -> forwards or backwards so far
        self.without_w: list[tuple[int, int]] = []  # (which, micro-batch) of every I that no W has followed
        self.actions: list[Action] = []

    def add(self, words: str, times: int = 1) -> None:
        for word in words.split() * max(0, times):
            op = word[0]
            if op == "W":
                which, k = next(pair for pair in self.without_w if word in ("W", f"W{pair[0]}"))
                self.without_w.remove((which, k))
            else:
                which = int(word[1])
                key = "F" if op == "F" else "B", which
                k = self.count[key]
                self.count[key] += 1
                if op == "I":
                    self.without_w.append((which, k))
            if k < self.m:
                self.actions.append(Action(op, self.stages[which], self.first[which] + k))


def v_shape(p: int) -> list[list[int]]:
    return [[min(stage, 2 * p - 1 - stage) for stage in range(2 * p)]]


def zb_v(p: int, m: int, v: int, n: int) -> Plan:
    """Qi et al. 2024. For enough micro-batches to fill the pipeline; `TwoChunks` leaves out those from m on."""
    ranks = []
    full = max(2 * p - 1, m)
    for r in range(p):
        order = TwoChunks((r, 2 * p - 1 - r), m)
        order.add("F0", 2 * (p - r) - 1)  # warm-up
        order.add("F1 F0", r)
        order.add("F1 I1 W", p - r)
        while order.count["F", 1] < full:  # steady
            order.add("F0", order.count["F", 0] < full)
            order.add("I0 W F1 I1 W")
        order.add("I0 I1", r)  # drain
        order.add("I0 W0", p - r)
        order.add("W1", sum(which for which, _ in order.without_w))
        order.add("W", len(order.without_w))
        ranks.append(order.actions)
    return Plan(ranks, v_shape(p), m)


def dual(order: TwoChunks) -> list[Action]:
    """The eight steps of DualPipe for a rank with the stages `near` and 2 half - 1 - near, of 2 half stages."""
    near, half = order.stages[0], sum(order.stages) // 2 + 1
    order.add("F0", 2 * (half - near - 1))  # warm-up
    order.add("F0 F1", near + 1)
    order.add("I1 W F1", half - near - 1)
    # Steady: a forward and the backward after it may run at the same time.
    order.add("F0 B1 F1 B0", order.m - 2 * half + near + 1)
    order.add("B1 F1 B0", half - near - 1)  # drain
    for i in range(near + 1):
        order.add(f"{'I' if i > near // 2 else 'B'}1 {'I' if i >= (near + 1) // 2 else 'B'}0")
    order.add("W I0", half - near - 1)
    order.add("W", near + 1)
    return order.actions


def dual_pipe_v(p: int, m: int, v: int, n: int) -> Plan:
    return Plan([dual(TwoChunks((r, 2 * p - 1 - r), m)) for r in range(p)], v_shape(p), m)


def dual_pipe(p: int, m: int, v: int, n: int) -> Plan:
    """Half of the micro-batches enter at the first rank, half at the last."""
    ranks = []
    entering = m // 2  # in each direction
    for r in range(p):
        near = min(r, p - 1 - r)
        first = (0, entering) if r < p // 2 else (entering, 0)
        ranks.append(dual(TwoChunks((near, p - 1 - near), entering, first)))
    return Plan(ranks, [list(range(p)), list(reversed(range(p)))], m)


class Schedule(NamedTuple):
    """A schedule and what it needs."""
    build: Callable[[int, int, int, int], Plan]  # (p, m, v, n) -> its plan
    chunks: int = 1  # model chunks per rank; 0: any number, 2 by default
    grouped: bool = False  # whether it goes through them in groups of n micro-batches
    least: Callable[[int], int] = lambda p: 1  # p -> the fewest micro-batches
    even: bool = False  # whether p and m must be even
    v_shaped: bool = False  # whether the last stage is on the rank of the first
    runs: bool = True  # whether the engine of pp.py runs it; otherwise it is only drawn

    def default_chunks(self) -> int:
        return self.chunks or 2


SCHEDULES = {
    "afab": Schedule(alternating(lambda r, p, m, v, n: v * m)),
    "1f1b": Schedule(alternating(lambda r, p, m, v, n: p - 1 - r)),
    "interleaved": Schedule(alternating(lambda r, p, m, v, n: p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * n),
                            chunks=0, grouped=True),
    "zb-h1": Schedule(alternating(lambda r, p, m, v, n: p - 1 - r, lag=lambda r: r)),
    "zb-h2": Schedule(alternating(lambda r, p, m, v, n: 2 * (p - 1 - r), lag=lambda r: 2 * r), runs=False),
    "zb1p": Schedule(alternating(lambda r, p, m, v, n: p - 1 - r + (v - 1) * n, lag=lambda r: r), chunks=0,
                     grouped=True),
    "zb-v": Schedule(zb_v, chunks=2, v_shaped=True),
    "dualpipev": Schedule(dual_pipe_v, chunks=2, least=lambda p: 2 * p, v_shaped=True),
    "dualpipe": Schedule(dual_pipe, chunks=2, least=lambda p: 2 * p, even=True, runs=False),
}


def make_plan(schedule: str, p: int, m: int, v: int = 0, n: int = 0) -> Plan:
    """The plan of a schedule for p ranks and m micro-batches. v: model chunks per rank, by default as many as the
    schedule chosen. n: micro-batches per group, by default as few as possible.

    Raises ValueError, with what would work, for an unknown schedule or numbers with which it does not work.
    """
    if min(p, m) < 1 or min(v, n) < 0:
        raise ValueError(f"{p} ranks, {m} micro-batches, {v} model chunks per rank, groups of {n}: must be above 0")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule}: unknown, use one of {', '.join(SCHEDULES)}")
    chosen = SCHEDULES[schedule]
    v = v or chosen.default_chunks()
    if chosen.chunks and v != chosen.chunks:
        any_number = " and ".join(name for name, needed in SCHEDULES.items() if not needed.chunks)
        raise ValueError(f"{v} model chunks per rank: schedule {schedule} has {chosen.chunks}, {any_number} any")

    def possible(size: int) -> bool:
        return size == m or (size >= p and (m % size == 0 or m % size >= p))

    n = min(n, m) or next(size for size in range(1, m + 1) if possible(size))
    if v > 1 and chosen.grouped and not possible(n):
        raise ValueError(f"groups of {n} of {m} micro-batches on {p} ranks would wait for each other for ever: groups "
                         f"must hold at least {p}, the last one, too, or all {m}")
    if m < chosen.least(p):
        raise ValueError(f"{m} micro-batches: schedule {schedule} needs at least {chosen.least(p)} on {p} ranks")
    if chosen.even and (p % 2 or m % 2):
        raise ValueError(f"{m} micro-batches on {p} ranks: schedule {schedule} needs even numbers of both")
    return chosen.build(p, m, v, n)


def plan_of(grid, micro_batches: int) -> Plan:
    """The plan of a config.Grid. Raises ValueError as `make_plan` does."""
    return make_plan(grid.schedule if grid.pp > 1 else "1f1b", grid.pp, micro_batches, grid.chunks, grid.pp_group)


def backwards(actions: list[Action]) -> dict[int, int]:
    """Stage -> how many backward passes a rank's list has for it."""
    return dict(Counter(action.stage for action in actions if action.op in "BI"))


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
    if op == "F":
        return {Action("F", stage - 1, k)} if stage else set()
    if op == "W":
        return {Action("B", stage, k)}
    own_forward = Action("F", stage, k)
    return {own_forward, Action("B", stage + 1, k)} if stage < stages - 1 else {own_forward}


def execute_in_turns(plan: Plan) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action), each action after all that it needs: in turns, each rank's next one if it can start. Raises
    ValueError, naming ranks and actions, if none can."""
    waiting, done = [deque(actions) for actions in plan.ranks], set()
    while any(waiting):
        started = False
        for r, actions in enumerate(waiting):
            if actions and required_results(actions[0], plan.stages) <= done:
                started = True
                done.add(actions[0].result)
                yield r, actions.popleft()
        if not started:
            raise deadlock_error(waiting)


def deadlock_error(waiting: list[deque]) -> ValueError:
    return ValueError("ranks wait for each other: " + ", ".join(
        f"rank {r} cannot start {items[0]}" for r, items in enumerate(waiting) if items))


def send_of(plan: Plan, r: int, action: Action) -> Transfer | None:
    """What rank r sends after an action; None if nobody needs the result, or this rank itself."""
    what, stage, k = action.result
    to = {"F": stage + 1, "B": stage - 1, "W": -1}[what]  # nobody needs the result of a W
    if not 0 <= to < plan.stages or plan.owner(to, k) == r:
        return None
    return Transfer("send", what, to, k, plan.owner(to, k))


def lower(plan: Plan) -> list[list[Action | Transfer]]:
    """The lists with sends and receives, each entered on both ranks right after the action that it sends the result of.

    So any two ranks have their transfers in the same order, as NCCL needs: it matches them by order, and one may block
    the next. Raises ValueError if ranks wait for each other for ever.
    """
    lists = [[] for _ in plan.ranks]
    for r, action in execute_in_turns(plan):
        lists[r].append(action)
        if send := send_of(plan, r, action):
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


class Turn(NamedTuple):
    """An action of a rank, the results that it waits for, and what is sent after it."""
    rank: int
    action: Action
    needs: set[Action]
    send: Transfer | None


def turns_of(plan: Plan) -> list[Turn]:
    """All actions of a plan, each after all that it needs. Raises ValueError as `lower`."""
    return [Turn(r, action, required_results(action, plan.stages), send_of(plan, r, action))
            for r, action in execute_in_turns(plan)]


def simulate(plan: Plan, costs: Costs | Sequence[Costs] | None = None, one_stream: bool = False,
             turns: list[Turn] | None = None) -> list[list[Span]]:
    """When each rank does what, if each action, in order, starts as soon as it can. costs: of every stage, if they are
    not all alike. turns: turns_of(plan), if it is known. Raises ValueError as `lower`.

    one_stream: a transfer waits for the earlier transfers and actions of both of its ranks, in the order of `lower`, as
    in one process group with NCCL.
    """
    costs = [costs or Costs()] * plan.stages if costs is None or isinstance(costs, Costs) else costs
    seconds = [{op: cost.of(op) for op in "FBIW"} for cost in costs]
    spans = [[] for _ in plan.ranks]
    acted = [0.0] * len(plan.ranks)  # when each rank's latest action ended
    sent = [0.0] * len(plan.ranks)  # when each rank's latest transfer ended, sent or received
    known = {}  # (rank, result) -> when this rank has it
    for r, action, needs, send in turns_of(plan) if turns is None else turns:
        start = acted[r]
        for result in needs:
            start = max(start, known[r, result])
        acted[r] = known[r, action.result] = start + seconds[action.stage][action.op]
        spans[r].append(Span(action, start, acted[r]))
        if send:
            peer = send.peer
            began = max(acted[r], acted[peer], sent[r], sent[peer]) if one_stream else acted[r]
            known[peer, action.result] = sent[r] = sent[peer] = began + costs[action.stage].hop
    return spans


def bubble(spans: list[list[Span]]) -> float:
    """The longest time that a rank is idle, from time 0 to the last stop of all ranks."""
    end = max(row[-1].stop for row in spans)
    return end - min(sum(span.stop - span.start for span in row) for row in spans)


def activations_held(actions: list[Action]) -> list[int]:
    """Activations after each action, in those of one stage and micro-batch. The first half of a backward, I, frees
    none."""
    return list(accumulate(dict(F=1, B=-1, I=0, W=-1)[action.op] for action in actions))
