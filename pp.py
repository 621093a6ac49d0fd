"""Pipeline parallelism: layers are split into stages; micro-batches flow through them, forward, then backward.

Saves: all but 1/p of weights, gradients, optimizer state and work; little is sent: one activation per stage boundary.
Costs: ranks wait while the pipeline fills and drains (the bubble), and hold activations of several micro-batches.
Stops helping when: there are not many more micro-batches than ranks, or layers cannot be split into equal work.

The order of a rank's forwards and backwards decides when it waits. schedules.py gives that order as data, a list of
(op, stage, micro-batch) for each rank; one engine runs all that have one direction. On three ranks with four
micro-batches, forwards numbered and backwards in brackets:

    afab    1  2  3  4             (1)(2)(3)(4)        1f1b    1  2  3       (1) 4 (2)   (3)   (4)
               1  2  3  4       (1)(2)(3)(4)                      1  2    (1) 3 (2) 4 (3)   (4)
                  1  2  3  4 (1)(2)(3)(4)                            1 (1) 2 (2) 3 (3) 4 (4)

In both, ranks wait equally long, but 1f1b holds the activations of three micro-batches at most, not of all.

What is easily got wrong:
- The loss is divided once, in the last stage, by the number of tokens of the global batch; no stage scales gradients.
- Two ranks must issue their transfers in the same order, or both wait for ever: schedules.with_transfers enters both
  at once.
- A receive holds up all later work of its process group until its sender comes: each directed pair of ranks that
  exchanges has a group of its own (core/collectives.py: Group.links). With one group for all an interleaved step of 8
  ranks, two model chunks per rank and 16 micro-batches takes 44% longer (tests/test_pp.py replays it).
- Only the next stage needs a stage's output: the engine saves its edge in the graph alone and drops the output.
- A split backward has two actions. I computes the gradient of the input and queues the weight gradients. W computes
  the queued weight gradients (core/gradients.py).
- A tied embedding's gradients in the first and in the last stage are added after their data parallel ones (zero.py).

Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (halves of a backward).
Shapes: p ranks, m micro-batches.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from core.collectives import ALONE, Group, done, receive, run_demo, send
from core.gradients import backward_input, backward_weight, queued_keys
from schedules import Action, Plan, Transfer, bubble, make_plan, simulate, with_transfers

# ---- the engine -----------------------------------------------------------------------------------------------------

def profile_range(name: str | Action) -> AbstractContextManager:
    """Within this context operations have this name in a trace. Without a running profiler it adds no operation."""
    return record_function(str(name)) if torch.autograd._profiler_enabled() else nullcontext()


class Engine:
    """Runs one rank's part of any plan; a plan of one stage, without a group, is gradient accumulation.

    around: around(action) is a context that an action runs in, once it has what it needs; run/dryrun.py measures so.
    """

    def __init__(self, plan: Plan, group: Group = ALONE, device: torch.device | str = "cpu",
                 around: Callable[[Action], AbstractContextManager] = profile_range):
        me, lists = group.rank, with_transfers(plan)
        self.items, self.last_stage = lists[me], plan.stages - 1
        self.group, self.device, self.around = group, device, around
        # NCCL otherwise builds a pair's communicator at its first transfer, where both ranks must meet: in a schedule's
        # order, ranks could wait in a circle. So every pair sends a word now, in one order on all ranks.
        pairs = {(r, item.peer) for r, items in enumerate(lists) for item in items
                 if isinstance(item, Transfer) and item.op == "send"}
        for source, target in sorted(pairs):
            word = torch.zeros(1, device=device)
            if me == source:
                send(word, target, group).wait()
            elif me == target:
                receive(word, source, group).wait()

    def run(self, forward: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Run the forwards and backwards of a step.

        forward(stage, micro-batch, x) -> y: x is None in the first stage; y is the loss in the last stage, which only
        `forward` may keep. shape, dtype: those of x and y between stages.
        """
        self.graphs = {}  # (stage, micro-batch) -> (input, the output's edge in the graph), from forward to backward
        self.inputs = {}  # ("F" or "B", the stage that needs it, micro-batch) -> Pending: computed here, or received
        self.sending = []
        for item in self.items:
            self.sending = [pending for pending in self.sending if not pending.completed()]  # frees what was sent
            if isinstance(item, Transfer):
                self.transfer(item, shape, dtype)
            else:
                self.compute(item, forward)
        for pending in self.sending:
            pending.wait()
        assert not (self.graphs or self.inputs or queued_keys()), "something was computed that nobody used"

    def take(self, what: str, stage: int, k: int) -> torch.Tensor:
        """The activation "F" or gradient "B" for a stage, to use or to send; waits for it if it is being received."""
        return self.inputs.pop((what, stage, k)).wait()

    def transfer(self, item: Transfer, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        op, what, stage, k, peer = item
        if op == "send":
            self.sending.append(send(self.take(what, stage, k).contiguous(), peer, self.group))
        else:
            x = torch.empty(shape, dtype=dtype, device=self.device)
            self.inputs[what, stage, k] = receive(x, peer, self.group)

    def compute(self, action: Action, forward: Callable) -> None:
        op, stage, k = action
        x = grad = None  # what the action waits for
        if op == "F" and stage > 0:
            x = self.take("F", stage, k).requires_grad_(torch.is_grad_enabled())
        if op in "BI" and stage < self.last_stage:
            grad = self.take("B", stage, k)
        with self.around(action):
            if op == "F":
                y = forward(stage, k, x)
                if y.requires_grad:
                    self.graphs[stage, k] = x, get_gradient_edge(y)
                if stage < self.last_stage:
                    self.inputs["F", stage + 1, k] = done(y.detach())
            elif op == "W":
                backward_weight((stage, k))
            else:
                saved_x, edge = self.graphs.pop((stage, k))
                if op == "I":
                    backward_input((stage, k), edge, grad)
                else:
                    torch.autograd.backward(edge, grad)
                if stage:
                    self.inputs["B", stage - 1, k] = done(saved_x.grad)


ONE_STAGE = partial(make_plan, "1f1b", 1)  # number of micro-batches -> the plan of one rank with all layers


class Pipeline:
    """An engine for each number of micro-batches that a step has had so far. A batch ramp changes this number.

    plan_of: number of micro-batches -> plan.
    """

    def __init__(self, plan_of: Callable[[int], Plan] = ONE_STAGE, group: Group = ALONE,
                 device: torch.device | str = "cpu"):
        self.plan_of, self.group, self.device = plan_of, group, device
        self.engines: dict[tuple[int, bool], Engine] = {}

    def engine(self, micro_batches: int, evaluating: bool = False) -> Engine:
        """Return the engine of a step. evaluating: it runs forwards only."""
        key = micro_batches, evaluating
        if key not in self.engines:
            plan = self.plan_of(micro_batches)
            if evaluating:
                forwards = [[action for action in actions if action.op == "F"] for actions in plan.ranks]
                plan = plan._replace(ranks=forwards)
            self.engines[key] = Engine(plan, self.group, self.device)
        return self.engines[key]


# ---- demo: python pp.py ---------------------------------------------------------------------------------------------

def demo() -> None:
    """Three schedules to one scale, as simulated. python -m run.timeline draws all of them."""
    for name in "afab", "1f1b", "zb-h1":
        plan = make_plan(name, 4, 6)
        spans = simulate(plan)
        end, idle = max(row[-1].stop for row in spans), bubble(spans)
        print(f"{name}: a rank is idle for {idle:g} of {end:g} units of time, {idle / end:.0%} of the step, or "
              f"{idle / (end - idle):.0%} of what it computes")  # 1F1B: (p-1)/(m+p-1) or (p-1)/m
        for row in spans:
            line = ""
            for action, start, _ in row:
                line = line.ljust(3 * round(start)) + f"{action.op}{action.micro_batch}"
            print("    " + line)


if __name__ == "__main__":
    run_demo(lambda group: demo())
