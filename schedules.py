"""Pipeline schedules as data: who does what in which order; what travels when; how long it takes and what it holds.

A schedule is data: for each rank a list of (op, stage, micro-batch), op one of

    F  forward     B  backward     I  the half of it that gives the gradient of the input     W  that of the weights

Nothing waits for a W but the end of the step, so W can fill bubbles: that is the whole idea of "zero bubble". Most
schedules differ by two numbers only: how many forwards a rank does before its first backward, `warmup`, and how many
backwards later a W follows its I, `lag`. With p ranks, rank r, m micro-batches, v stages a rank and groups of n:

                    warmup                   lag    bubble a rank              activations held, at most
    afab            all                      -      (p-1)(F+B)                 m
    1f1b            p-1-r                    -      (p-1)(F+B)                 p
    interleaved     2(p-1-r) + (v-1)n        -      (p-1)(F+B)/v               p + (p-1)/v, for n = p
    zb-h1           p-1-r                    r      (p-1)(F+I-W)               p
    zb-h2           2(p-1-r)                 2r     (p-1)(F+I-2W)              2p-1
    zb1p            (p-1-r) + (v-1)n         r      (p-1)(F+I-W)/v             p
    zb-v            two stages a rank, r and 2p-1-r: the last is beside the first, and backward starts early
    dualpipev       the same places, filled so that a forward and a backward can run at the same time
    dualpipe        two pipelines through the same ranks in opposite directions, two copies of the weights

F, B, I, W in the table: a rank's time for all its stages; activations in units of all its layers, for one micro-batch;
the bubble of zb-h2 is between a rank's first F and last W, the others are of the whole step.
Interleaving goes through its stages in groups of n micro-batches: n = p is depth first, n = m breadth first, what lies
between Llama 3's. With H2 no rank pauses between its first F and last W, yet the step takes as long as with H1 if at
its end everybody waits for the norm of the gradient: so it is drawn here and not run, as is dualpipe.

Huang et al. 2019 (GPipe: afab); Narayanan et al. 2021 (1F1B, interleaved); Llama Team 2024, section 3.3.2 (any n); Qi
et al. 2023 and 2024 (zero bubble: H1, H2; V); DeepSeek-AI 2024, section 3.2.1, and the repository DualPipe.
Letters: p ranks, m micro-batches, v stages a rank, s stages in all.
"""
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple


class Action(NamedTuple):
    op: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.micro_batch}"


class Plan(NamedTuple):
    """What each rank does, in order. owners: the rank of every stage; for DualPipe, whose micro-batches flow in two
    directions, two such lists."""
    ranks: list[list[Action]]
    owners: list[list[int]]
    micro_batches: int

    @property
    def stages(self) -> int:
        return len(self.owners[0])

    def owner(self, stage: int, micro_batch: int) -> int:
        """The first micro-batches go in the first direction."""
        return self.owners[micro_batch * len(self.owners) // self.micro_batches][stage]


# ---- schedules ------------------------------------------------------------------------------------------------------

def in_turns(p: int, m: int, v: int, n: int, warmup: Callable[[int], int], lag: Callable[[int], int] | None) -> Plan:
    """Forwards until `warmup`, then one forward and one backward in turns, then the backwards that are left.

    Rank r has the stages r, p + r, 2p + r … and goes through them in groups of n micro-batches. lag: how many backwards
    after its I a W comes; None: backwards are not split.
    """
    table = [(chunk, k) for first in range(0, m, n) for chunk in range(v) for k in range(first, min(first + n, m))]
    ranks = []
    for r in range(p):
        forwards = [Action("F", chunk * p + r, k) for chunk, k in table]
        backwards = [((v - 1 - chunk) * p + r, k) for chunk, k in table]
        before = min(len(table), warmup(r))
        order = forwards[:before]
        for i, backward in enumerate(backwards):
            order += forwards[before + i:before + i + 1]
            order.append(Action("I" if lag else "B", *backward))
            if lag and i >= lag(r):
                order.append(Action("W", *backwards[i - lag(r)]))
        if lag:
            order += [Action("W", *backward) for backward in backwards[max(0, len(table) - lag(r)):]]
        ranks.append(order)
    return Plan(ranks, [[stage % p for stage in range(v * p)]], m)


class Order:
    """The list of a rank that has two stages, written as "F0 F1" or "I1 W": op and which one; W takes the oldest I."""

    def __init__(self, stages: tuple[int, int], m: int, numbers: tuple[int, int] = (0, 0)):
        self.stages, self.m, self.numbers = stages, m, numbers  # numbers: where the micro-batches of each stage begin
        self.count, self.left, self.actions = Counter(), deque(), []

    def add(self, words: str, times: int = 1) -> None:
        for word in words.split() * max(0, times):
            if word == "W":
                which, k = self.left.popleft()
            else:
                which = int(word[1])
                k = self.count["F" if word[0] == "F" else "B", which]
                self.count["F" if word[0] == "F" else "B", which] += 1
                if word[0] == "I":
                    self.left.append((which, k))
            if k < self.m:
                self.actions.append(Action(word[0], self.stages[which], self.numbers[which] + k))


def v_shape(p: int) -> list[list[int]]:
    return [[min(stage, 2 * p - 1 - stage) for stage in range(2 * p)]]


def zb_v(p: int, m: int) -> Plan:
    """Written for as many micro-batches as fill the pipeline; `Order` leaves out those that do not exist."""
    ranks, n = [], max(2 * p - 1, m)
    for r in range(p):
        order = Order((r, 2 * p - 1 - r), m)
        order.add("F0", 2 * (p - r) - 1)
        order.add("F1 F0", r)
        order.add("F1 I1 W", p - r)
        while order.count["F", 1] < n:
            order.add("F0", order.count["F", 0] < n)
            order.add("I0 W F1 I1 W")
        order.add("I0 I1", r)
        rest = order.left  # from here on the weights of the one stage, then of the other
        order.left = deque(pair for pair in rest if pair[0] == 0)
        for _ in range(p - r):
            order.add("I0 W")
        order.left = deque([pair for pair in rest if pair[0] == 1] + list(order.left))
        order.add("W", len(order.left))
        ranks.append(order.actions)
    return Plan(ranks, v_shape(p), m)


def dual(order: Order, r: int, n: int, m: int) -> list[Action]:
    """The eight steps of DualPipe for a rank that is r ranks away from where stage 0 of its order begins."""
    order.add("F0", 2 * (n - r - 1))
    order.add("F0 F1", r + 1)
    order.add("I1 W F1", n - r - 1)
    order.add("F0 B1 F1 B0", m - 2 * n + r + 1)  # a forward and the backward after it may run at the same time
    order.add("B1 F1 B0", n - r - 1)
    for i in range(r + 1):
        order.add(f"{'I' if i > r // 2 else 'B'}1 {'I' if i >= (r + 1) // 2 else 'B'}0")
    order.add("W I0", n - r - 1)
    order.add("W", r + 1)
    return order.actions


def dual_pipe_v(p: int, m: int) -> Plan:
    return Plan([dual(Order((r, 2 * p - 1 - r), m), r, p, m) for r in range(p)], v_shape(p), m)


def dual_pipe(p: int, m: int) -> Plan:
    """Half of the micro-batches enter at the first rank, half at the last."""
    ranks, half = [], m // 2
    for r in range(p):
        near = min(r, p - 1 - r)
        numbers = (0, half) if r < p // 2 else (half, 0)
        ranks.append(dual(Order((near, p - 1 - near), half, numbers), near, p // 2, half))
    return Plan(ranks, [list(range(p)), list(reversed(range(p)))], m)


SCHEDULES = ("afab", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb1p", "zb-v", "dualpipev", "dualpipe")


def plan(schedule: str, p: int, m: int, v: int = 0, n: int = 0) -> Plan:
    """p ranks, m micro-batches; v: stages a rank, by default those the schedule needs; n: micro-batches a group, by
    default p, or all m where groups of p would not do.

    Raises ValueError for what does not exist or would never end, with what would do.
    """
    if min(p, m) < 1 or min(v, n) < 0:
        raise ValueError(f"{p} ranks, {m} micro-batches, {v} stages a rank, groups of {n}: must be above 0")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule}: unknown, use one of {', '.join(SCHEDULES)}")
    many, two = schedule in ("interleaved", "zb1p"), schedule in ("zb-v", "dualpipev")
    v = v or (2 if many or two else 1)
    if not many and v != (2 if two else 1):
        raise ValueError(f"{v} stages a rank: schedule {schedule} has {2 if two else 1}, interleaved and zb1p any")
    n = min(n, m) or (p if m >= p and m % p == 0 else m)
    if v > 1 and many and not (n == m or (n >= p and (m % n == 0 or m % n >= p))):
        raise ValueError(f"groups of {n} of {m} micro-batches on {p} ranks would wait for each other for ever: groups "
                         f"must hold at least {p}, the last one, too, or all {m}")
    if schedule in ("dualpipev", "dualpipe") and m < 2 * p:
        raise ValueError(f"{m} micro-batches: schedule {schedule} needs at least {2 * p} on {p} ranks")
    if schedule == "dualpipe" and (p % 2 or m % 2):
        raise ValueError(f"{m} micro-batches on {p} ranks: schedule dualpipe needs even numbers of both")
    if schedule == "zb-v":
        return zb_v(p, m)
    if schedule == "dualpipev":
        return dual_pipe_v(p, m)
    if schedule == "dualpipe":
        return dual_pipe(p, m)
    warmup, lag = {
        "afab": (lambda r: v * m, None),
        "1f1b": (lambda r: p - 1 - r, None),
        "interleaved": (lambda r: p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * n, None),
        "zb-h1": (lambda r: p - 1 - r, lambda r: r),
        "zb-h2": (lambda r: 2 * (p - 1 - r), lambda r: 2 * r),
        "zb1p": (lambda r: p - 1 - r + (v - 1) * n, lambda r: r),
    }[schedule]
    return in_turns(p, m, v, n, warmup, lag)


def backwards(actions: list[Action]) -> dict[int, int]:
    """Stage -> how many backward passes a rank's list has for it."""
    return dict(Counter(action.stage for action in actions if action.op in "BI"))


# ---- sends and receives ---------------------------------------------------------------------------------------------

class Transfer(NamedTuple):
    """An activation on its way to `stage`, or a gradient. op: "send" or "receive"; peer: to or from which rank."""
    op: str
    what: str  # "F": an activation; "B": a gradient
    stage: int  # which takes it
    micro_batch: int
    peer: int


def depends_on(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What an action takes from a neighbour: ("F" or "B", the stage that makes it, micro-batch)."""
    op, stage, k = action
    if op == "F":
        return ("F", stage - 1, k) if stage else None
    return ("B", stage + 1, k) if op in "BI" and stage < stages - 1 else None


def lower(plan: Plan) -> list[list[Action | Transfer]]:
    """The lists with sends and receives, each written down on both ranks at the moment its sender is ready.

    So any two ranks have their transfers in the same order, which is what NCCL needs: it matches them by order, and one
    may block the next. Raises ValueError if ranks wait for each other for ever.
    """
    lists, position, done = [[] for _ in plan.ranks], [0] * len(plan.ranks), set()
    left = sum(len(actions) for actions in plan.ranks)
    while left:
        before = left
        for r, actions in enumerate(plan.ranks):
            if position[r] == len(actions):
                continue
            action = actions[position[r]]
            needs = depends_on(action, plan.stages)
            own = ("F", action.stage, action.micro_batch)
            if (needs and needs not in done) or (action.op in "BI" and own not in done):
                continue
            position[r], left = position[r] + 1, left - 1
            lists[r].append(action)
            if action.op == "W":
                continue
            what = "F" if action.op == "F" else "B"
            done.add((what, action.stage, action.micro_batch))
            to = action.stage + (1 if what == "F" else -1)
            if 0 <= to < plan.stages and (peer := plan.owner(to, action.micro_batch)) != r:
                lists[r].append(Transfer("send", what, to, action.micro_batch, peer))
                lists[peer].append(Transfer("receive", what, to, action.micro_batch, r))
        if left == before:
            raise ValueError("ranks wait for each other: " + ", ".join(
                f"rank {r} before {actions[position[r]]}" for r, actions in enumerate(plan.ranks)
                if position[r] < len(actions)))
    return lists


def check(lists: list[list[Action | Transfer]]) -> None:
    """Run through lowered lists where a send waits for its receive and a receive for its send, as NCCL may do it.

    Raises ValueError if that never ends, or if what meets is not the same transfer.
    """
    position = [0] * len(lists)
    while any(at < len(items) for at, items in zip(position, lists)):
        moved = False
        for r, items in enumerate(lists):
            while position[r] < len(items) and isinstance(items[position[r]], Action):
                position[r], moved = position[r] + 1, True
        for r, items in enumerate(lists):
            mine = items[position[r]] if position[r] < len(items) else None
            if not isinstance(mine, Transfer) or mine.op != "send":
                continue
            peer = mine.peer
            other = lists[peer][position[peer]] if position[peer] < len(lists[peer]) else None
            if isinstance(other, Transfer) and other.op == "receive" and other.peer == r:
                if other[1:4] != mine[1:4]:
                    raise ValueError(f"rank {r} sends {mine} and rank {peer} receives {other}")
                position[r], position[peer], moved = position[r] + 1, position[peer] + 1, True
        if not moved:
            raise ValueError(f"ranks wait for each other at {[items[at] for at, items in zip(position, lists)]}")


# ---- time and memory ------------------------------------------------------------------------------------------------

class Costs(NamedTuple):
    """Time of a stage's forward and of the halves of its backward, and of sending what they give."""
    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    hop: float = 0.0

    def of(self, op: str) -> float:
        return {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}[op]


class Span(NamedTuple):
    action: Action
    start: float
    stop: float


UNIT = Costs()


def simulate(plan: Plan, costs: Costs = UNIT) -> list[list[Span]]:
    """When each rank does what, if it starts everything as soon as it has what it needs, in its order."""
    spans, position, ready = [[] for _ in plan.ranks], [0] * len(plan.ranks), {}
    left = sum(len(actions) for actions in plan.ranks)
    while left:
        for r, actions in enumerate(plan.ranks):
            while position[r] < len(actions):
                action = actions[position[r]]
                needs = depends_on(action, plan.stages)
                if needs and needs not in ready:
                    break
                free = spans[r][-1].stop if spans[r] else 0.0
                arrived = 0.0
                if needs:
                    there = plan.owner(needs[1], action.micro_batch) == r
                    arrived = ready[needs] + (0.0 if there else costs.hop)
                start = max(free, arrived)
                spans[r].append(Span(action, start, start + costs.of(action.op)))
                if action.op != "W":
                    ready["F" if action.op == "F" else "B", action.stage, action.micro_batch] = spans[r][-1].stop
                position[r], left = position[r] + 1, left - 1
    return spans


def bubble(spans: list[list[Span]]) -> float:
    """Time that the rank which waits longest waits, from the first start of all to the last end of all."""
    end = max(rank[-1].stop for rank in spans)
    return end - min(sum(span.stop - span.start for span in rank) for rank in spans)


def held(actions: list[Action], after_input: float = 1.0) -> list[float]:
    """Activations after each action, in units of a stage's of one micro-batch. after_input: what is left after an I."""
    change = {"F": 1.0, "B": -1.0, "I": after_input - 1.0, "W": -after_input}
    out, now = [], 0.0
    for action in actions:
        now += change[action.op]
        out.append(now)
    return out
