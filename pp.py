"""Pipeline parallelism: layers are split into stages; micro-batches flow through them, forward, then backward.

Saves: all but 1/p of weights, gradients, optimizer state and work, with little communication: one activation a
       boundary.
Costs: ranks wait while the pipeline fills and drains (the bubble), and hold activations of several micro-batches.
Stops helping when: there are not many more micro-batches than ranks, or layers cannot be split into equal work.

When ranks wait is decided by the order in which each does its forwards and backwards: the schedule, which is data, a
list of (op, stage, micro-batch) for each rank; schedules.py has them. One engine runs any of them. On three ranks with
four micro-batches, forwards numbered and backwards in brackets:

    afab    1  2  3  4             (1)(2)(3)(4)        1f1b    1  2  3       (1) 4 (2)   (3)   (4)
               1  2  3  4       (1)(2)(3)(4)                      1  2    (1) 3 (2) 4 (3)   (4)
                  1  2  3  4 (1)(2)(3)(4)                            1 (1) 2 (2) 3 (3) 4 (4)

Both wait equally long, but 1f1b holds the activations of three micro-batches at most, not of all.

What makes it right, and is easily got wrong:
- The loss is divided once, by the tokens of the whole batch, where it is computed; no stage knows of the others.
- Two ranks must issue what they exchange in one order, or each waits for the other: `lower` enters both ends at once.
- A stage's output is needed by the next stage alone: only its edge into the graph stays, and the memory is freed.
- Half a backward is the work of param.py: weight gradients wait in a queue until W.
- A tied embedding is in the first stage and in the last: two terms of one gradient, summed after the data ranks' sum.

Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (halves of a backward).
Shapes: p ranks, m micro-batches.

    python pp.py --schedule zb-v --pp 4 --micro-batches 8 [--svg plan.svg] [--trace plan.json]     as simulated
    torchrun --nproc_per_node=4 pp.py --schedule zb-v                                              as measured
"""
import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist

import schedules
from collectives import Group, rank, receive, send, size, world
from param import accumulate_grad, backward_input, backward_weight, queued_keys
from schedules import Action, Costs, Plan, Span, Transfer, activations_held, backwards, lower, plan, simulate

# ---- the engine -----------------------------------------------------------------------------------------------------

class Engine:
    """Runs one rank's part of any plan; one stage and no group are the plan of gradient accumulation.

    Receives are issued in the plan's order, into memory of their own, and waited for where they are used.
    """

    def __init__(self, plan: Plan, group: Group = None, device: torch.device | str = "cpu"):
        lists = lower(plan)
        self.items, self.last_stage, self.group, self.device = lists[rank(group)], plan.stages - 1, group, device
        self.backwards = backwards(plan.ranks[rank(group)])
        self.spans: list[Span] | None = None  # set to a list to have it filled with when each action began and ended
        pairs = {tuple(sorted((r, item.peer))) for r, items in enumerate(lists) for item in items
                 if isinstance(item, Transfer)}
        for pair in sorted(pairs):  # NCCL connects two ranks at their first transfer: do it in one order on all ranks
            if rank(group) in pair:
                first, second = pair if rank(group) == pair[0] else reversed(pair)
                word = torch.zeros(1, device=device)
                (send if first < second else receive)(word, second, group).wait()

    def run(self, forward: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Run forwards and backwards of a step.

        forward(stage, micro-batch, x) -> y: x is None at the first stage; y of the last stage is the loss, on which
        backward begins. shape, dtype: of what one stage sends to the next.
        """
        alive = {}  # (stage, micro-batch) -> (input, the output's edge into the graph), between forward and backward
        local = {}  # what this rank has made for another stage: its own next one, or one that it will be sent to
        receiving, sending = {}, []

        def take(*key):
            if key in local:
                return local.pop(key)
            x, pending = receiving.pop(key)
            pending.wait()
            return x

        for item in self.items:
            sending = [pending for pending in sending if not pending.completed()]
            if isinstance(item, Transfer):
                key = item.what, item.stage, item.micro_batch
                if item.op == "send":
                    sending.append(send(local.pop(key).contiguous(), item.peer, self.group))
                else:
                    x = torch.empty(shape, dtype=dtype, device=self.device)
                    receiving[key] = x, receive(x, item.peer, self.group)
                continue
            (op, stage, k), began = item, time.perf_counter()
            if op == "F":
                x = take("F", stage, k).requires_grad_(torch.is_grad_enabled()) if stage else None
                y = forward(stage, k, x)
                if y.requires_grad:
                    alive[stage, k] = x, torch.autograd.graph.get_gradient_edge(y)
                if stage < self.last_stage:
                    local["F", stage + 1, k] = y.detach()
                x = y = None  # or they would live until the next action
            elif op == "W":
                backward_weight((stage, k))
            else:
                x, edge = alive.pop((stage, k))
                grad = take("B", stage, k) if stage < self.last_stage else None
                if op == "I":
                    backward_input((stage, k), edge, grad)
                else:
                    torch.autograd.backward(edge, grad)
                if stage:
                    local["B", stage - 1, k] = x.grad
                x = edge = grad = None
            if self.spans is not None:
                self.spans.append(Span(item, began, time.perf_counter()))
        for pending in sending:
            pending.wait()
        assert not (alive or local or receiving or queued_keys()), "something was computed that nobody used"


class Pipeline:
    """A rank's stages, and engines for every number of micro-batches.

    plan_of: number of micro-batches -> plan. layers_of: the layers of every stage. max_micro_batches: of a step.
    """

    def __init__(self, plan_of: Callable[[int], Plan], layers_of: list[range], max_micro_batches: int = 1,
                 group: Group = None, device: torch.device | str = "cpu"):
        self.plan_of, self.group, self.device, self.engines = plan_of, group, device, {}
        largest, me = plan_of(max_micro_batches), rank(group)
        self.owners, = largest.owners  # one direction
        self.stages = {stage: layers for stage, layers in enumerate(layers_of) if self.owners[stage] == me}
        self.last, self.in_flight = len(layers_of) - 1, int(max(activations_held(largest.ranks[me])))

    @classmethod
    def one_stage(cls, layers: int, **others) -> "Pipeline":
        """No pipeline: a forward and a backward in turns."""
        return cls(lambda micro_batches: plan("1f1b", 1, micro_batches), [range(layers)], **others)

    def engine(self, micro_batches: int, evaluating: bool = False) -> Engine:
        key = micro_batches, evaluating
        if key not in self.engines:
            whole = self.plan_of(micro_batches)
            self.engines[key] = Engine(forwards_only(whole) if evaluating else whole, self.group, self.device)
        return self.engines[key]


def forwards_only(plan: Plan) -> Plan:
    """What is left of a plan for an evaluation."""
    return plan._replace(ranks=[[action for action in actions if action.op == "F"] for actions in plan.ranks])


def partition(work: list[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Which layers each stage has, at least one: the largest work of a stage as small as possible.

    work: of each layer. first, last: of the embedding and of the head. Of equally good partitions, the one that gives
    early stages fewer layers, since they hold the activations of more micro-batches.
    """
    layers = len(work)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split into {stages} stages: use 1 to {layers}")
    sums = [0.0, *accumulate(work)]

    def load(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

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

    limits = {round(sums[j] - sums[i] + more, 9) for i in range(layers) for j in range(i + 1, layers + 1)
              for more in {0, first, last, first + last}}
    starts = next(starts for limit in sorted(limits) if (starts := filled(limit)))
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], layers])]


# ---- the demo: a drawing --------------------------------------------------------------------------------------------

def measured(plan: Plan) -> list[list[Span]]:
    """When the ranks that torchrun started did what, in stages that sleep 10 ms for each F, I and W: so even two
    processors show how eight ranks wait for each other. In units of 10 ms since the first start."""
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
        engine.run(forward, (1,), torch.float32)  # the first backward of a process takes longer than a whole step
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
    parser.add_argument("--schedule", default="1f1b", choices=schedules.SCHEDULES)
    ranks = int(os.environ.get("WORLD_SIZE", 4))
    parser.add_argument("--pp", type=int, default=ranks, metavar="P", help="ranks; under torchrun as many as there are")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument("--chunks", type=int, default=0, metavar="V", help="model chunks a rank; 0: as it needs")
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
        if measuring and not schedules.SCHEDULES[args.schedule].runs:
            raise ValueError(f"schedule {args.schedule} is drawn and does not run")
        chosen = plan(args.schedule, args.pp, args.micro_batches, args.chunks, args.group)
    except ValueError as error:
        parser.exit(2, "" if me else f"pp.py: {error}\n")
    schedules.check_rendezvous(lower(chosen))
    spans = measured(chosen) if measuring else simulate(chosen, Costs(*args.costs))
    if me:
        return
    end, v, idle = max(rank[-1].stop for rank in spans), chosen.stages // args.pp, schedules.bubble(spans)
    most = max(max(activations_held(actions)) for actions in chosen.ranks)
    print(schedules.draw(spans, width=min(3, 600 / end), color=sys.stdout.isatty()))
    print(f"\n{args.schedule}: {end:g} units of time, the worst rank idle for {idle:g} of them "
          f"({idle / end:.1%}), holding up to {most / v:g} micro-batches")
    for file, text in ((args.svg, schedules.svg), (args.trace, schedules.chrome_trace)):
        if file:
            with open(file, "w") as out:
                out.write(text(spans))


if __name__ == "__main__":
    main(sys.argv[1:])
