"""Pipeline parallelism: layers are cut into stages; micro-batches flow through them, forward, then backward.

Saves: all but 1/p of weights, gradients, optimizer state and work, with little traffic: one activation a boundary.
Costs: ranks wait while the pipeline fills and drains (the bubble), and hold activations of several micro-batches.
Stops helping when: there are not many more micro-batches than ranks, or layers cannot be cut into equal work.

When ranks wait is decided by the order in which each does its forwards and backwards: the schedule, which is data, a
list of (op, stage, micro-batch) for each rank, and whose kinds schedules.py has. One engine runs any of them. On three
ranks, four micro-batches, forwards numbered and backwards in brackets:

    afab    1  2  3  4             (1)(2)(3)(4)        1f1b    1  2  3       (1) 4 (2)   (3)   (4)
               1  2  3  4       (1)(2)(3)(4)                      1  2    (1) 3 (2) 4 (3)   (4)
                  1  2  3  4 (1)(2)(3)(4)                            1 (1) 2 (2) 3 (3) 4 (4)

Both wait equally long, but 1f1b holds the activations of three micro-batches at most, not of all.

What makes it right, and is easily got wrong:
- The loss is divided once, by the tokens of the whole batch, where it is computed; no stage knows of the others.
- Two ranks must issue what they exchange in one order, or each waits for the other: `lower` writes both ends down.
- What a stage gave is needed by the next one alone: only its edge into the graph stays, and the memory is freed.
- Half a backward is the door's doing (param.py): weight gradients that come through it wait in a queue until W.
- A tied table is in the first stage and in the last: two terms of one gradient, summed after the data ranks' sum.

Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (halves of a backward).
Letters: p ranks, m micro-batches.

    python pp.py --schedule zb-v --pp 4 --micro-batches 8 [--svg plan.svg] [--trace plan.json]     as simulated
    torchrun --nproc_per_node=4 pp.py --schedule zb-v                                              as measured
"""
import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import timeline
from collectives import Group, receive, send, world
from param import accumulate_grad, backward_input, backward_weight, rank, size, waiting
from schedules import (
    SCHEDULES,
    Action,
    Costs,
    Plan,
    Span,
    Transfer,
    backwards,
    bubble,
    check,
    held,
    lower,
    plan,
    simulate,
)

# ---- the engine -----------------------------------------------------------------------------------------------------

class Engine:
    """Runs a rank's part of any plan; one stage and no group are the plan of gradient accumulation.

    An output is needed by the next stage alone: what stays here is its edge into the graph, so its memory is freed
    once it is sent. Receives are issued in the plan's order, into memory of their own, and waited for where used.
    """

    def __init__(self, plan: Plan, group: Group = None, device: torch.device | str = "cpu"):
        lists = lower(plan)
        self.items, self.last, self.group, self.device = lists[rank(group)], plan.stages - 1, group, device
        self.backwards = backwards(plan.ranks[rank(group)])
        self.spans: list[Span] | None = None  # a list, to be told when each action began and ended
        pairs = {tuple(sorted((r, item.peer))) for r, items in enumerate(lists) for item in items
                 if isinstance(item, Transfer)}
        for pair in sorted(pairs):  # NCCL makes a communicator a pair at its first use: all ranks in one order
            if rank(group) in pair:
                first, second = pair if rank(group) == pair[0] else reversed(pair)
                word = torch.zeros(1, device=device)
                (send if first < second else receive)(word, second, group).wait()

    def run(self, forward: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """forward(stage, micro-batch, x) -> y. shape, dtype: of what goes from stage to stage; x is None at the first
        stage, and at the last y is the loss, on which backward begins."""
        alive, made, arriving, leaving = {}, {}, {}, []

        def take(*key):
            if key in made:
                return made.pop(key)
            x, pending = arriving.pop(key)
            pending.wait()
            return x

        for item in self.items:
            leaving = [pending for pending in leaving if not pending.completed()]
            if isinstance(item, Transfer):
                key = item.what, item.stage, item.micro_batch
                if item.op == "send":
                    leaving.append(send(made.pop(key).contiguous(), item.peer, self.group))
                else:
                    x = torch.empty(shape, dtype=dtype, device=self.device)
                    arriving[key] = x, receive(x, item.peer, self.group)
                continue
            (op, stage, k), began = item, time.perf_counter()
            if op == "F":
                x = take("F", stage, k).requires_grad_(torch.is_grad_enabled()) if stage else None
                y = forward(stage, k, x)
                if y.requires_grad:
                    alive[stage, k] = x, torch.autograd.graph.get_gradient_edge(y)
                if stage < self.last:
                    made["F", stage + 1, k] = y.detach()
                x = y = None  # or they would live until the next action
            elif op == "W":
                backward_weight((stage, k))
            else:
                x, edge = alive.pop((stage, k))
                grad = take("B", stage, k) if stage < self.last else None
                if op == "I":
                    backward_input((stage, k), edge, grad)
                else:
                    torch.autograd.backward(edge, grad)
                if stage:
                    made["B", stage - 1, k] = x.grad
                x = edge = grad = None
            if self.spans is not None:
                self.spans.append(Span(item, began, time.perf_counter()))
        for pending in leaving:
            pending.wait()
        assert not (alive or made or arriving or waiting()), "something was computed that nobody used"


class Pipeline:
    """A rank's stages, and engines for every number of micro-batches.

    plan_of: micro-batches -> plan. cuts: the layers of every stage. most: micro-batches that a step has at most.
    """

    def __init__(self, plan_of: Callable[[int], Plan], cuts: list[range], most: int = 1, group: Group = None,
                 device: torch.device | str = "cpu"):
        self.plan_of, self.group, self.device, self.engines = plan_of, group, device, {}
        largest, me = plan_of(most), rank(group)
        self.owners, = largest.owners  # one direction
        self.stages = {stage: cut for stage, cut in enumerate(cuts) if self.owners[stage] == me}
        self.last, self.in_flight = len(cuts) - 1, int(max(held(largest.ranks[me])))

    def engine(self, micro_batches: int, evaluating: bool = False) -> Engine:
        key = micro_batches, evaluating
        if key not in self.engines:
            whole = self.plan_of(micro_batches)
            self.engines[key] = Engine(forwards(whole) if evaluating else whole, self.group, self.device)
        return self.engines[key]


def one_stage(layers: int, **others) -> Pipeline:
    """No pipeline: a forward and a backward in turns."""
    return Pipeline(lambda micro_batches: plan("1f1b", 1, micro_batches), [range(layers)], **others)


def forwards(plan: Plan) -> Plan:
    """What is left of a plan for an evaluation."""
    return plan._replace(ranks=[[action for action in actions if action.op == "F"] for actions in plan.ranks])


def partition(work: list[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Which layers each stage has, at least one: the largest work of a stage as small as possible.

    work: of each layer. first, last: of the embedding and of the head. Of equally good cuts the one that gives early
    stages fewer, since they hold the activations of more micro-batches.
    """
    layers = len(work)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages: use 1 to {layers}")
    before = [sum(work[:i]) for i in range(layers + 1)]

    def load(stage: int, start: int, stop: int) -> float:
        return before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)

    def filled(limit: float) -> list[int] | None:
        """Where stages begin if late ones take what they can; more than the limit only where a stage has one layer."""
        starts, stop = [], layers
        for stage in reversed(range(stages)):
            start = stop - 1 if stage else 0
            while start > stage and load(stage, start - 1, stop) <= limit + 1e-9:
                start -= 1
            if stop - start > 1 and load(stage, start, stop) > limit + 1e-9:
                return None
            starts.insert(0, start)
            stop = start
        return starts

    limits = {round(before[j] - before[i] + more, 9) for i in range(layers) for j in range(i + 1, layers + 1)
              for more in {0, first, last, first + last}}
    starts = next(starts for limit in sorted(limits) if (starts := filled(limit)))
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], layers])]


# ---- the demo: a drawing --------------------------------------------------------------------------------------------

def measured(plan: Plan) -> list[list[Span]]:
    """What the ranks that torchrun started did when, in stages that sleep 10 ms for an F, an I and a W: so even two
    processors show how eight ranks wait for each other. In units of 10 ms from the first start, on every rank."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.sink = None

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.01)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.01)
            accumulate_grad(weight, lambda out: time.sleep(0.01))
            return grad

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        return Sleep.apply(torch.zeros(1, requires_grad=True) if x is None else x)

    with world() as group:
        engine = Engine(plan, group)
        engine.run(forward, (1,), torch.float32)  # what the first backward of a process makes takes longer than a step
        dist.barrier()
        engine.spans = []
        engine.run(forward, (1,), torch.float32)
        all_spans = [None] * size(group)
        dist.all_gather_object(all_spans, engine.spans)
    first = min(spans[0].start for spans in all_spans)
    return [[Span(Action(*action), (start - first) * 100, (stop - first) * 100) for action, start, stop in spans]
            for spans in all_spans]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Draw a pipeline schedule.")
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES)
    ranks = int(os.environ.get("WORLD_SIZE", 4))
    parser.add_argument("--pp", type=int, default=ranks, metavar="P", help="ranks; under torchrun as many as there are")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument("--chunks", type=int, default=0, metavar="V", help="stages a rank; 0: what the schedule needs")
    parser.add_argument("--group", type=int, default=0, metavar="N", help="micro-batches a group of interleaving; 0: P")
    parser.add_argument("--costs", type=float, nargs=3, default=(1.0, 1.0, 1.0), metavar=("F", "I", "W"))
    parser.add_argument("--svg", metavar="FILE", help="write the picture here")
    parser.add_argument("--trace", metavar="FILE", help="write it for chrome://tracing here")
    args = parser.parse_args(arguments)
    measuring, me = "WORLD_SIZE" in os.environ, int(os.environ.get("RANK", 0))
    try:
        for name, file in (("--svg", args.svg), ("--trace", args.trace)):
            if file and not os.path.isdir(os.path.dirname(file) or "."):
                raise ValueError(f"{name} {file}: there is no folder {os.path.dirname(file)}")
        if not all(0 < cost < 1e6 for cost in args.costs):
            raise ValueError(f"--costs {args.costs}: must be above 0 and below a million")
        if measuring and args.pp != ranks:
            raise ValueError(f"--pp {args.pp}: torchrun started {ranks} ranks")
        if measuring and args.schedule in ("zb-h2", "dualpipe"):
            raise ValueError(f"schedule {args.schedule} is drawn and not run")
        chosen = plan(args.schedule, args.pp, args.micro_batches, args.chunks, args.group)
    except ValueError as error:
        parser.exit(2, "" if me else f"pp.py: {error}\n")
    check(lower(chosen))
    spans = measured(chosen) if measuring else simulate(chosen, Costs(*args.costs))
    if me:
        return
    end, v = max(rank[-1].stop for rank in spans), chosen.stages // args.pp
    print(timeline.draw(spans, width=min(3, 600 / end), color=sys.stdout.isatty()))
    print(f"\n{args.schedule}: {end:g} units of time, the worst rank idle for {bubble(spans):g} of them "
          f"({bubble(spans) / end:.1%}), holding up to {max(max(held(r)) for r in chosen.ranks) / v:g} micro-batches")
    for file, text in ((args.svg, timeline.svg), (args.trace, timeline.chrome_trace)):
        if file:
            with open(file, "w") as out:
                out.write(text(spans))


if __name__ == "__main__":
    main(sys.argv[1:])
