"""Pipeline schedules as data: who does what in which order, what is sent when, how long it takes, what it holds.

A schedule gives each rank a list of actions (op, stage, micro-batch), op one of

    F  forward     B  backward     I  the half of it that gives the gradient of the input     W  that of the weights

Nothing waits for a W but the end of the step, so W can fill bubbles: that is the whole idea of "zero bubble". Most
schedules differ by two numbers only: how many forwards a rank does before its first backward, `warmup`, and how many
backwards later the W of an I follows, `lag`. With p ranks, rank r, m micro-batches, v model chunks a rank (a chunk is
the layers of one pipeline stage) and groups of n micro-batches:

                    warmup                   lag    bubble a rank              activations held, at most
    afab            all                      -      (p-1)(F+B)                 m
    1f1b            p-1-r                    -      (p-1)(F+B)                 p
    interleaved     2(p-1-r) + (v-1)n        -      (p-1)(F+B)/v               p + (p-1)/v, for n = p
    zb-h1           p-1-r                    r      (p-1)(F+I-W)               p
    zb-h2           2(p-1-r)                 2r     (p-1)(F+I-2W)              2p-1
    zb1p            (p-1-r) + (v-1)n         r      (p-1)(F+I-W)/v             p
    zb-v            two chunks a rank, stages r and 2p-1-r: the last is on the first rank, and backward starts early
    dualpipev       the same stages, ordered so that a forward and a backward can run at the same time
    dualpipe        two pipelines through the same ranks in opposite directions, two copies of the weights

F, B, I, W in the table: a rank's time for all its chunks; activations in units of all its layers, for one micro-batch;
formulas hold for m >= 2p - 1; the bubble of zb-h2 is between a rank's first F and last W, the others are of the whole
step. Interleaving goes through its chunks in groups of n micro-batches: n = p is depth first, n = m breadth first, what
lies between is Llama 3's. With H2 no rank pauses between its first F and its last W, yet the step takes as long as with
H1 if at its end everybody waits for the norm of the gradient: so it is drawn here and does not run; nor does dualpipe.

To add a schedule, write a function that makes its Plan and enter it in SCHEDULES: flags, checks, the engine and the
pictures read that table. Nothing here needs torch.

Huang et al. 2019 (GPipe: afab); Narayanan et al. 2021 (1F1B, interleaved); Llama Team 2024, section 3.3.2 (any n); Qi
et al. 2023 and 2024 (zero bubble: H1, H2; V); DeepSeek-AI 2024, section 3.2.1, and the repository DualPipe.
Shapes: p ranks, m micro-batches, v model chunks a rank, v p stages in all.
"""
import json
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

def alternating(warmup: Callable[..., int], lag: Callable[[int], int] | None = None) -> Callable[..., Plan]:
    """The schedules that do forwards until `warmup`, then one forward and one backward in turns, then the backwards
    that are left. warmup(r, p, m, v, n): number of forwards. lag(r): how many backwards after its I a W comes; None:
    backwards are not split.

    Rank r has the stages r, p + r, 2p + r … and goes through them in groups of n micro-batches.
    """
    def build(p: int, m: int, v: int, n: int) -> Plan:
        table = [(chunk, k) for first in range(0, m, n) for chunk in range(v) for k in range(first, min(first + n, m))]
        ranks = []
        for r in range(p):
            forwards = [Action("F", chunk * p + r, k) for chunk, k in table]
            backwards = [((v - 1 - chunk) * p + r, k) for chunk, k in table]
            first = min(len(table), warmup(r, p, m, v, n))
            order = forwards[:first]
            for i, backward in enumerate(backwards):
                order += forwards[first + i:first + i + 1]
                order.append(Action("I" if lag else "B", *backward))
                if lag and i >= lag(r):
                    order.append(Action("W", *backwards[i - lag(r)]))
            if lag:
                order += [Action("W", *backward) for backward in backwards[max(0, len(table) - lag(r)):]]
            ranks.append(order)
        return Plan(ranks, [[stage % p for stage in range(v * p)]], m)
    return build


class TwoChunks:
    """Writes the list of a rank that has two stages, from words such as "F0 F1" or "I1 W": op and which of the two. W
    takes the oldest I."""

    def __init__(self, stages: tuple[int, int], m: int, first: tuple[int, int] = (0, 0)):
        """first: the number of the first micro-batch of each stage."""
        self.stages, self.m, self.first = stages, m, first
        self.count, self.split, self.actions = Counter(), deque(), []

    def add(self, words: str, times: int = 1) -> None:
        for word in words.split() * max(0, times):
            if word == "W":
                which, k = self.split.popleft()
            else:
                which = int(word[1])
                k = self.count["F" if word[0] == "F" else "B", which]
                self.count["F" if word[0] == "F" else "B", which] += 1
                if word[0] == "I":
                    self.split.append((which, k))
            if k < self.m:
                self.actions.append(Action(word[0], self.stages[which], self.first[which] + k))


def v_shape(p: int) -> list[list[int]]:
    return [[min(stage, 2 * p - 1 - stage) for stage in range(2 * p)]]


def zb_v(p: int, m: int, v: int, n: int) -> Plan:
    """Written for as many micro-batches as fill the pipeline; `TwoChunks` leaves out those that do not exist."""
    ranks, full = [], max(2 * p - 1, m)
    for r in range(p):
        order = TwoChunks((r, 2 * p - 1 - r), m)
        order.add("F0", 2 * (p - r) - 1)
        order.add("F1 F0", r)
        order.add("F1 I1 W", p - r)
        while order.count["F", 1] < full:
            order.add("F0", order.count["F", 0] < full)
            order.add("I0 W F1 I1 W")
        order.add("I0 I1", r)
        rest = order.split  # from here on the weights of the one stage, then of the other
        order.split = deque(pair for pair in rest if pair[0] == 0)
        for _ in range(p - r):
            order.add("I0 W")
        order.split = deque([pair for pair in rest if pair[0] == 1] + list(order.split))
        order.add("W", len(order.split))
        ranks.append(order.actions)
    return Plan(ranks, v_shape(p), m)


def dual(order: TwoChunks, r: int, n: int, m: int) -> list[Action]:
    """The eight steps of DualPipe, of n ranks, for the rank that is r ranks away from where stage 0 of its list is."""
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


def dual_pipe_v(p: int, m: int, v: int, n: int) -> Plan:
    return Plan([dual(TwoChunks((r, 2 * p - 1 - r), m), r, p, m) for r in range(p)], v_shape(p), m)


def dual_pipe(p: int, m: int, v: int, n: int) -> Plan:
    """Half of the micro-batches enter at the first rank, half at the last."""
    ranks, half = [], m // 2
    for r in range(p):
        near = min(r, p - 1 - r)
        first = (0, half) if r < p // 2 else (half, 0)
        ranks.append(dual(TwoChunks((near, p - 1 - near), half, first), near, p // 2, half))
    return Plan(ranks, [list(range(p)), list(reversed(range(p)))], m)


class Schedule(NamedTuple):
    """A schedule and what it needs.

    build(p, m, v, n) -> Plan. chunks: model chunks a rank; 0: any number, 2 by default. grouped: it goes through them
    in groups of n micro-batches. least(p): the fewest micro-batches. even: ranks and micro-batches must be. v_shaped:
    the last stage is on the rank of the first. runs: whether the engine of pp.py runs it, or it is drawn only.
    """
    build: Callable[[int, int, int, int], Plan]
    chunks: int = 1
    grouped: bool = False
    least: Callable[[int], int] = lambda p: 1
    even: bool = False
    v_shaped: bool = False
    runs: bool = True

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


def plan(schedule: str, p: int, m: int, v: int = 0, n: int = 0) -> Plan:
    """p ranks, m micro-batches; v: model chunks a rank, by default those that the schedule needs; n: micro-batches a
    group, by default p, or all m where groups of p would not do.

    Raises ValueError for what does not exist or would never end, with what would do.
    """
    if min(p, m) < 1 or min(v, n) < 0:
        raise ValueError(f"{p} ranks, {m} micro-batches, {v} model chunks a rank, groups of {n}: must be above 0")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule}: unknown, use one of {', '.join(SCHEDULES)}")
    needs = SCHEDULES[schedule]
    v = v or needs.default_chunks()
    if needs.chunks and v != needs.chunks:
        any_number = " and ".join(name for name, other in SCHEDULES.items() if not other.chunks)
        raise ValueError(f"{v} model chunks a rank: schedule {schedule} has {needs.chunks}, {any_number} any")
    n = min(n, m) or (p if m >= p and m % p == 0 else m)
    if v > 1 and needs.grouped and not (n == m or (n >= p and (m % n == 0 or m % n >= p))):
        raise ValueError(f"groups of {n} of {m} micro-batches on {p} ranks would wait for each other for ever: groups "
                         f"must hold at least {p}, the last one, too, or all {m}")
    if m < needs.least(p):
        raise ValueError(f"{m} micro-batches: schedule {schedule} needs at least {needs.least(p)} on {p} ranks")
    if needs.even and (p % 2 or m % 2):
        raise ValueError(f"{m} micro-batches on {p} ranks: schedule {schedule} needs even numbers of both")
    return needs.build(p, m, v, n)


def plan_of(grid, micro_batches: int) -> Plan:
    """The plan of a config.Grid. Raises ValueError as `plan` does."""
    return plan(grid.schedule if grid.pp > 1 else "1f1b", grid.pp, micro_batches, grid.chunks, grid.pp_group)


def backwards(actions: list[Action]) -> dict[int, int]:
    """Stage -> how many backward passes a rank's list has for it."""
    return dict(Counter(action.stage for action in actions if action.op in "BI"))


# ---- sends and receives ---------------------------------------------------------------------------------------------

class Transfer(NamedTuple):
    """A send or receive of what `stage` needs next. op: "send" or "receive"; peer: to or from which rank."""
    op: str
    what: str  # "F": an activation; "B": a gradient
    stage: int  # that needs it
    micro_batch: int
    peer: int


def depends_on(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What an action needs of a neighbouring stage: ("F" or "B", the stage that makes it, micro-batch)."""
    op, stage, k = action
    if op == "F":
        return ("F", stage - 1, k) if stage else None
    return ("B", stage + 1, k) if op in "BI" and stage < stages - 1 else None


def lower(plan: Plan) -> list[list[Action | Transfer]]:
    """The lists with sends and receives, each entered on both ranks at the moment its sender is ready.

    So any two ranks have their transfers in the same order, which is what NCCL needs: it matches them by order, and one
    may block the next. Raises ValueError if ranks wait for each other for ever.
    """
    lists, position, done = [[] for _ in plan.ranks], [0] * len(plan.ranks), set()
    left = sum(len(actions) for actions in plan.ranks)
    while left:
        left_before = left
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
        if left == left_before:
            raise ValueError("ranks wait for each other: " + ", ".join(
                f"rank {r} before {actions[position[r]]}" for r, actions in enumerate(plan.ranks)
                if position[r] < len(actions)))
    return lists


def check_rendezvous(lists: list[list[Action | Transfer]]) -> None:
    """Replay lowered lists where a send waits for its receive and a receive for its send, as NCCL may do it.

    Raises ValueError if that never ends, or if a send meets the receive of another transfer.
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
    """Time of a stage's forward, of the halves of its backward, and of sending what they make to another rank."""
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
                received = 0.0
                if needs:
                    same_rank = plan.owner(needs[1], action.micro_batch) == r
                    received = ready[needs] + (0.0 if same_rank else costs.hop)
                start = max(free, received)
                spans[r].append(Span(action, start, start + costs.of(action.op)))
                if action.op != "W":
                    ready["F" if action.op == "F" else "B", action.stage, action.micro_batch] = spans[r][-1].stop
                position[r], left = position[r] + 1, left - 1
    return spans


def bubble(spans: list[list[Span]]) -> float:
    """Time that the rank which waits longest waits, from the first start of all to the last end of all."""
    end = max(rank[-1].stop for rank in spans)
    return end - min(sum(span.stop - span.start for span in rank) for rank in spans)


def activations_held(actions: list[Action], after_input: float = 1.0) -> list[float]:
    """Activations after each action, in units of a stage's of one micro-batch. after_input: what is left after an I."""
    change = {"F": 1.0, "B": -1.0, "I": after_input - 1.0, "W": -after_input}
    out, now = [], 0.0
    for action in actions:
        now += change[action.op]
        out.append(now)
    return out


# ---- pictures -------------------------------------------------------------------------------------------------------

COLORS = {"F": ("#7aa6da", 110), "B": ("#8cc98c", 114), "I": ("#5fb7b0", 73), "W": ("#c9b458", 179)}


def draw(spans: list[list[Span]], width: float = 3, color: bool = True) -> str:
    """In the terminal: a row a rank, `width` characters a unit of time, a box an action with the number of its
    micro-batch; a rank's later stages are underlined."""
    lines = []
    for r, rank in enumerate(spans):
        line, at, first = f"rank {r:2d} ", 0, min(span.action.stage for span in rank)
        for action, start, stop in rank:
            begin, end = round(start * width), round(stop * width)
            text = f"{'' if color else action.op}{action.micro_batch}".center(end - begin - 1)[:max(0, end - begin - 1)]
            line += " " * (begin - at)
            if color:
                underline = "4;" if action.stage != first else ""
                line += f"\033[{underline}48;5;{COLORS[action.op][1]};30m{text}\033[0m "
            else:
                line += text + " "
            at = end
        lines.append(line.rstrip())
    return "\n".join(lines)


def svg(spans: list[list[Span]], unit: float = 24.0) -> str:
    """The same as a picture. Lighter: a rank's later stages."""
    end = max(rank[-1].stop for rank in spans)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{end * unit + 70:.0f}" height="{len(spans) * 26 + 44}" '
           'font-family="sans-serif" font-size="11">']
    for r, rank in enumerate(spans):
        first = min(span.action.stage for span in rank)
        out.append(f'<text x="4" y="{r * 26 + 21}">rank {r}</text>')
        for (op, stage, k), start, stop in rank:
            x, width, opacity = 56 + start * unit, (stop - start) * unit, 1 if stage == first else 0.6
            out.append(f'<rect x="{x:.1f}" y="{r * 26 + 6}" width="{width:.1f}" height="22" fill="{COLORS[op][0]}" '
                       f'fill-opacity="{opacity}" stroke="white"/><text x="{x + width / 2:.1f}" y="{r * 26 + 21}" '
                       f'text-anchor="middle">{k}</text>')
    words = {"F": "forward", "B": "backward", "I": "of the input", "W": "of the weights"}
    for i, (op, word) in enumerate(words.items()):
        y = len(spans) * 26 + 14
        out.append(f'<rect x="{56 + i * 120}" y="{y}" width="14" height="14" fill="{COLORS[op][0]}"/>'
                   f'<text x="{76 + i * 120}" y="{y + 11}">{word}</text>')
    return "\n".join([*out, "</svg>"])


def chrome_trace(spans: list[list[Span]], unit_us: float = 1000.0) -> str:
    """For chrome://tracing or Perfetto: a thread a rank."""
    return json.dumps([dict(name=str(action), cat=action.op, ph="X", pid=0, tid=r, ts=start * unit_us,
                            dur=(stop - start) * unit_us)
                       for r, rank in enumerate(spans) for action, start, stop in rank])
