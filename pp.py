"""Pipeline parallelism: layers are split into stages; micro-batches flow through them, forward, then backward.

Saves: all but 1/p of weights, gradients, optimizer state and work; little is sent: one activation per stage boundary.
Costs: ranks wait while the pipeline fills and drains (the bubble), and hold activations of several micro-batches.
Stops helping when: there are not many more micro-batches than ranks, or layers cannot be split into equal work.

The order of a rank's forwards and backwards decides when it waits. schedules.py gives that order as data, a list of
(op, stage, micro-batch) for each rank; one engine runs every schedule. On three ranks with four micro-batches, forwards
numbered and backwards in brackets:

    afab    1  2  3  4             (1)(2)(3)(4)        1f1b    1  2  3       (1) 4 (2)   (3)   (4)
               1  2  3  4       (1)(2)(3)(4)                      1  2    (1) 3 (2) 4 (3)   (4)
                  1  2  3  4 (1)(2)(3)(4)                            1 (1) 2 (2) 3 (3) 4 (4)

In both, ranks wait equally long, but 1f1b holds the activations of three micro-batches at most, not of all.

What is easily got wrong:
- The loss is divided once, in the last stage, by the number of tokens of the global batch; no stage scales gradients.
- Two ranks must issue their transfers in the same order, or both wait for ever: `lower` enters both ends at once.
- A receive holds up all later work of its process group until its sender comes: each directed pair of ranks that
  exchanges has a group of its own. With one for all, an interleaved step of 8 ranks, two model chunks per
  rank and 16 micro-batches takes 44% longer, by simulation.
- Only the next stage needs a stage's output: the engine saves its edge in the graph alone and frees the output.
- I is a backward in which param.py queues the weight gradients; W computes those in the queue.
- A tied embedding's gradients in the first and in the last stage are added after their data parallel reductions.

Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (halves of a backward).
Shapes: p ranks, m micro-batches.

    python pp.py [--pp 4] [--micro-batches 8] [--svg plans.svg]                       all schedules, as simulated
    torchrun --nproc_per_node=4 pp.py --schedule zb-v [--trace plan.json]             one of them, as measured
"""
import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

import schedules
from collectives import Group, process_group, rank, receive, send, size, world
from param import accumulate_grad, backward_input, backward_weight, queued_keys
from schedules import Costs, Plan, Span, Transfer, activations_held, backwards, lower, make_plan, simulate

# ---- the engine -----------------------------------------------------------------------------------------------------

def named(name: str) -> AbstractContextManager:
    """Within this context operations have this name in a trace. Without a running profiler it adds no operation."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def seconds_between(start: "float | torch.cuda.Event", stop: "float | torch.cuda.Event") -> float:
    if isinstance(start, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


class Engine:
    """Runs one rank's part of any plan; a plan of one stage, without a group, is gradient accumulation.

    timed: keep what `now` returned before and after each action of the latest step, for `timeline`.
    """

    def __init__(self, plan: Plan, group: Group = None, device: torch.device | str = "cpu", timed: bool = False):
        me, lists = rank(group), lower(plan)
        self.items, self.backwards = lists[me], backwards(plan.ranks[me])
        self.last_stage, self.group, self.device = plan.stages - 1, group, torch.device(device)
        self.timed = timed
        self.began, self.moments = None, list[tuple]()  # moments: (action, when it began, when it ended)
        pairs = {(r, item.peer) for r, items in enumerate(lists) for item in items
                 if isinstance(item, Transfer) and item.op == "send"}
        for source, target in sorted(pairs):  # connect now, in one order: NCCL connects at the first transfer
            word = torch.zeros(1, device=device)
            if me == source:
                send(word, target, group).wait()
            elif me == target:
                receive(word, source, group).wait()

    def now(self) -> "float | torch.cuda.Event | None":
        """In seconds, or on a GPU as an event of its stream, which the host does not wait for; None if not `timed`."""
        if not self.timed:
            return None
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, forward: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Run the forwards and backwards of a step.

        forward(stage, micro-batch, x) -> y: x is None in the first stage; y is the loss in the last stage. shape,
        dtype: those of x and y between stages.
        """
        self.began, self.moments = self.now(), []
        alive = {}  # (stage, micro-batch) -> (input, the output's edge in the graph), between forward and backward
        local = {}  # ("F" or "B", the stage that needs it, micro-batch) -> a result, to be sent or used on this rank
        receiving, sending = {}, []  # the same key -> (a tensor, the pending receive that fills it); pending sends

        def take(*key):
            if key in local:
                return local.pop(key)
            x, pending = receiving.pop(key)
            pending.wait()
            return x

        for item in self.items:
            sending = [pending for pending in sending if not pending.completed()]  # frees what was sent
            if isinstance(item, Transfer):
                key = item.what, item.stage, item.micro_batch
                if item.op == "send":
                    sending.append(send(local.pop(key).contiguous(), item.peer, self.group))
                else:
                    x = torch.empty(shape, dtype=dtype, device=self.device)
                    receiving[key] = x, receive(x, item.peer, self.group)
                continue
            op, stage, k = item
            x = take("F", stage, k).requires_grad_(torch.is_grad_enabled()) if op == "F" and stage else None
            grad = take("B", stage, k) if op in "BI" and stage < self.last_stage else None
            began = self.now()  # what it waits for is there
            with named(str(item)):
                if op == "F":
                    y = forward(stage, k, x)
                    if y.requires_grad:
                        alive[stage, k] = x, torch.autograd.graph.get_gradient_edge(y)
                    if stage < self.last_stage:
                        local["F", stage + 1, k] = y.detach()
                elif op == "W":
                    backward_weight((stage, k))
                else:
                    x, edge = alive.pop((stage, k))
                    if op == "I":
                        backward_input((stage, k), edge, grad)
                    else:
                        torch.autograd.backward(edge, grad)
                    if stage:
                        local["B", stage - 1, k] = x.grad
            x = y = edge = grad = None  # otherwise they would be held until the next action
            if self.timed:
                self.moments.append((item, began, self.now()))
        for pending in sending:
            pending.wait()
        assert not (alive or local or receiving or queued_keys()), "something was computed that nobody used"

    def timeline(self, unit_s: float) -> list[list[Span]]:
        """Each rank's spans of the latest step, in units of time since the step began on that rank. All ranks of the
        group must call it, and must have begun the step together: after the reduction of a norm, or a barrier."""
        mine = [Span(item, *(seconds_between(self.began, when) / unit_s for when in moments))
                for item, *moments in self.moments]
        spans = [None] * size(self.group)
        dist.all_gather_object(spans, mine, group=process_group(self.group))
        return spans


class Pipeline:
    """A rank's stages, and an engine per number of micro-batches.

    plan_of: number of micro-batches -> plan. layers_of: the layers of every stage. max_micro_batches: of any step.
    stages: this rank's stages -> their layers. actions: this rank's, of a step with most micro-batches. in_flight: the
    most (stage, micro-batch) activations that it holds at once.
    """

    def __init__(self, plan_of: Callable[[int], Plan], layers_of: list[range], max_micro_batches: int = 1,
                 group: Group = None, device: torch.device | str = "cpu"):
        self.plan_of, self.group, self.device, self.engines = plan_of, group, device, {}
        self.timed = False  # of engines to be made
        self.latest: int | None = None  # micro-batches of the latest training step
        largest, me = plan_of(max_micro_batches), rank(group)
        self.owners, = largest.owners  # no schedule that runs has two directions
        self.stages = {stage: layers for stage, layers in enumerate(layers_of) if self.owners[stage] == me}
        self.last = len(layers_of) - 1
        self.actions = largest.ranks[me]
        self.in_flight = max(activations_held(self.actions))

    @classmethod
    def one_stage(cls, layers: int, **options) -> "Pipeline":
        """No pipeline: a forward and a backward in turns. options: as of Pipeline."""
        return cls(lambda micro_batches: make_plan("1f1b", 1, micro_batches), [range(layers)], **options)

    def engine(self, micro_batches: int, evaluating: bool = False) -> Engine:
        """The engine of a step. evaluating: it runs forwards only."""
        if not evaluating:
            self.latest = micro_batches
        key = micro_batches, evaluating
        if key not in self.engines:
            plan = self.plan_of(micro_batches)
            if evaluating:
                forwards = [[action for action in actions if action.op == "F"] for actions in plan.ranks]
                plan = plan._replace(ranks=forwards)
            self.engines[key] = Engine(plan, self.group, self.device, self.timed)
        return self.engines[key]

    def draw_timeline(self, path: Path) -> None:
        """Draw the latest training step, in milliseconds, as SVG. All ranks must call it; the first one writes."""
        if self.latest:
            spans = self.engine(self.latest).timeline(1e-3)
            if dist.get_rank() == 0:
                path.write_text(schedules.svg({f"{self.latest} micro-batches, in ms": spans}))


# ---- the demo: a drawing --------------------------------------------------------------------------------------------

UNIT_S = 0.01  # what a rank sleeps for an F, I or W of all its stages


def measure(plan: Plan, group: Group) -> list[list[Span]]:
    """Run a plan on the ranks that torchrun started, with stages that sleep, so that even two processors show how eight
    ranks wait. Returns each rank's spans, in units of UNIT_S since all began together."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.sink = None  # accumulate_grad reads it
    seconds = UNIT_S * len(plan.ranks) / plan.stages

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(seconds)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            time.sleep(seconds)
            accumulate_grad(weight, lambda out: time.sleep(seconds))
            return grad

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        return Sleep.apply(torch.zeros(1, requires_grad=True) if x is None else x)

    engine = Engine(plan, group, timed=True)
    engine.run(forward, (1,), torch.float32)  # the first backward of a process takes longer than a whole step
    dist.barrier()
    engine.run(forward, (1,), torch.float32)
    return engine.timeline(UNIT_S)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Draw pipeline schedules; under torchrun, as measured.")
    parser.add_argument("--schedule", default="all", choices=(*schedules.SCHEDULES, "all"))
    ranks = int(os.environ.get("WORLD_SIZE", 4))
    parser.add_argument("--pp", type=int, default=ranks, metavar="P", help="ranks; under torchrun as many as there are")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument("--chunks", type=int, default=0, metavar="V", help="model chunks per rank; 0: as it needs")
    parser.add_argument("--group", type=int, default=0, metavar="N",
                        help="micro-batches per interleaved group; 0: as few as possible")
    parser.add_argument("--costs", type=float, nargs=3, default=(1.0, 1.0, 1.0), metavar=("F", "I", "W"),
                        help="times of a rank, for all its model chunks together")
    parser.add_argument("--svg", metavar="FILE", help="write the picture here")
    parser.add_argument("--trace", metavar="FILE", help="write it for chrome://tracing here")
    return parser


def chosen_plans(args: argparse.Namespace, measuring: bool) -> dict[str, Plan]:
    """The plan of each schedule to draw. Raises ValueError for what cannot be drawn."""
    for name, file in (("--svg", args.svg), ("--trace", args.trace)):
        if file and not os.path.isdir(os.path.dirname(file) or "."):
            raise ValueError(f"{name} {file}: there is no folder {os.path.dirname(file)}")
    if not all(0 < cost < 1e6 for cost in args.costs):
        raise ValueError(f"--costs {args.costs}: must be above 0 and below a million")
    if measuring and args.pp != int(os.environ["WORLD_SIZE"]):
        raise ValueError(f"--pp {args.pp}: torchrun started {os.environ['WORLD_SIZE']} ranks")
    if args.schedule != "all":
        if measuring and not schedules.SCHEDULES[args.schedule].runs:
            raise ValueError(f"schedule {args.schedule} is drawn and does not run")
        return {args.schedule: make_plan(args.schedule, args.pp, args.micro_batches, args.chunks, args.group)}
    if args.trace or args.chunks or args.group:
        raise ValueError("--trace, --chunks and --group are for one schedule: name it with --schedule")
    return {name: make_plan(name, args.pp, args.micro_batches) for name, schedule in schedules.SCHEDULES.items()
            if schedule.runs or not measuring}


def main(arguments: list[str]) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    measuring, me = "WORLD_SIZE" in os.environ, int(os.environ.get("RANK", 0))
    try:
        plans = chosen_plans(args, measuring)
    except ValueError as error:
        parser.exit(2, "" if me else f"pp.py: {error}\n")
    simulated = {name: simulate(chosen, Costs(*(cost * args.pp / chosen.stages for cost in args.costs)))
                 for name, chosen in plans.items()}
    panels = simulated
    if measuring:
        with world() as group:
            panels = {name: measure(chosen, group) for name, chosen in plans.items()}
    if me:
        return
    color, longest = sys.stdout.isatty(), max(row[-1].stop for spans in panels.values() for row in spans)
    columns = shutil.get_terminal_size((120, 24)).columns - 9
    print("F forward, B backward, I its half for the input, W that for the weights; later model chunks of a rank are "
          + ("underlined" if color else "in lower case") + "\n")
    for name, spans in panels.items():
        share = max(row[-1].stop for row in spans) / longest
        print(schedules.draw(spans, color, columns=share * min(columns, 3 * longest)))
        print(f"{name}: {schedules.summary(spans)}" + (f"\n    stages sleep {UNIT_S * 1e3:g} ms per unit; simulated: "
              f"{schedules.summary(simulated[name])}" if measuring else "") + "\n")
    if len(panels) > 1:
        order = sorted(panels, key=lambda name: schedules.bubble(panels[name]))
        print(f"Ranks are idle least with {order[0]}, for {schedules.bubble(panels[order[0]]):.3g} units, and longest "
              f"with {order[-1]}, for {schedules.bubble(panels[order[-1]]):.3g}.")
    if args.svg:
        Path(args.svg).write_text(schedules.svg(panels))
    if args.trace:
        unit_us = UNIT_S * 1e6 if measuring else 1e3
        Path(args.trace).write_text(schedules.chrome_trace(panels[args.schedule], unit_us))


if __name__ == "__main__":
    main(sys.argv[1:])
