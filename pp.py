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
"""
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.profiler import record_function

from collectives import Group, process_group, rank, receive, run_demo, send, size
from param import backward_input, backward_weight, queued_keys
from schedules import Plan, Span, Transfer, activations_held, backwards, bubble, lower, make_plan, simulate

# ---- the engine -----------------------------------------------------------------------------------------------------

def profile_range(name: str) -> AbstractContextManager:
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
            with profile_range(str(item)):
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


# ---- demo: python pp.py ---------------------------------------------------------------------------------------------

def demo() -> None:
    """Three schedules to one scale, as simulated. python -m run.timeline draws all of them, and measures."""
    for name in "afab", "1f1b", "zb-h1":
        plan = make_plan(name, 4, 6)
        spans = simulate(plan)
        print(f"{name}: a rank is idle for {bubble(spans):g} of {max(row[-1].stop for row in spans):g} units of time")
        for row in spans:
            line = ""
            for action, start, _ in row:
                line = line.ljust(3 * round(start)) + f"{action.op}{action.micro_batch}"
            print("    " + line)


if __name__ == "__main__":
    run_demo(lambda group: demo())
