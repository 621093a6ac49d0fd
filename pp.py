"""Pipeline parallelism: layers are split into stages, and micro-batches flow through them, forward, then backward.

    rank 0, stage 0    F0 F1 F2 F3                   B0    B1    B2    B3            time ──►
    rank 1, stage 1       F0 F1 F2 F3          B0    B1    B2    B3
    rank 2, stage 2          F0 F1 F2 F3 B0    B1    B2    B3

    F2: the forward of micro-batch 2, which receives an activation from the previous stage, and sends one to the next
    B2: its backward, which receives the activation's gradient from the next stage, and sends one to the previous;
        it takes twice as long as F2

A rank computes its own layers only. The batch is split into micro-batches so that all ranks can compute at the same
time, each on a different micro-batch. The blanks are the bubble: ranks wait while the pipeline fills and drains.

`all_forward_all_backward` is this figure in code. The order of a rank's forwards and backwards decides how long it
waits and how many activations it holds. schedules.py has better orders. They are data: a Plan has a list of actions for
each rank. The `Engine` below runs any plan in which each stage is on one rank.

    p    pipeline ranks
    m    micro-batches per step

Saves: each rank has 1/p of the weights, gradients, optimizer state and work. It sends little: one activation and one
    gradient per micro-batch and stage boundary.
Costs: the bubble, and activations of several micro-batches at once (schedules.py has formulas for both).
Stops helping when: m is not much larger than p, or the layers cannot be split into stages of equal work.

What is easily got wrong:
- The loss is divided once, in the last stage, by the number of tokens of the global batch. No stage scales gradients.
- Two ranks must issue their transfers in the same order, or both wait forever. schedules.with_transfers puts a send
  and its receive into both lists in the same step.
- With NCCL, a process group whose communicator is made at init (`device_id=`, as here) runs its sends and receives one
  after the other, whoever the peers are. A receive then blocks all later transfers of the group until the sender
  arrives. So each directed pair of ranks that exchanges has a group of its own (core/collectives.py: Group.links). With
  one group for all, a step takes much longer: 44% in a replay of an interleaved step of 8 ranks, two model chunks per
  rank and 16 micro-batches, where F takes one unit of time, B two and a transfer none (tests/test_pp.py).
- Only the next stage needs a stage's output. Backward needs only the output's edge in autograd's graph, so the engine
  keeps the edge and frees the output.
- A tied embedding has a gradient in the first stage and one in the last. They are added after each has been summed over
  data parallel ranks (zero.py).

Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (halves of a backward).
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from core.collectives import ALONE, Group, Pending, done, receive, run_demo, send
from core.gradients import backward_input, backward_weight, queued_keys
from schedules import Action, Plan, Transfer, in_turns, make_plan, with_transfers

# A stage's forward: (stage, micro-batch, x) -> y.
# x: the activation from the previous stage; None in the first stage.
# y: the activation for the next stage; in the last stage the loss.
Forward = Callable[[int, int, torch.Tensor | None], torch.Tensor]


# ---- plain: all forward, all backward -------------------------------------------------------------------------------

def all_forward_all_backward(forward: Forward, micro_batches: int, shape: tuple[int, ...], dtype: torch.dtype,
                             group: Group) -> None:
    """Run the forwards and backwards of a step on CPUs, with one stage per rank. shape, dtype: of an activation."""
    me = group.rank
    last = group.size - 1
    saved = []  # from forward to backward: x and y of each micro-batch
    for k in range(micro_batches):
        x = None
        if me > 0:
            x = receive(torch.empty(shape, dtype=dtype), me - 1, group).wait().requires_grad_()
        y = forward(me, k, x)
        if me < last:
            send(y.detach(), me + 1, group).wait()
        saved.append((x, y))
    for x, y in saved:
        grad = None
        if me < last:
            grad = receive(torch.empty(shape, dtype=dtype), me + 1, group).wait()
        y.backward(grad)
        if me > 0:
            send(x.grad, me - 1, group).wait()


# ---- an action ------------------------------------------------------------------------------------------------------

def profile_range(name: str | Action) -> AbstractContextManager:
    """Give the operations within this context a name in a trace. Without a running profiler this adds no operation."""
    return record_function(str(name)) if torch.autograd._profiler_enabled() else nullcontext()


class ActionRunner:
    """Runs single actions of a rank, which may have several stages, and keeps tensors until the action that uses them.

    Compared with the plain version's loop bodies: a backward may be split into its halves I and W, and a stage's output
    is freed, except for its edge in the graph. A runner sends nothing. A result becomes an entry of `inputs`, under the
    stage that needs it. If that stage is on another rank, the engine takes the entry and sends it. Otherwise the action
    of that stage, on this rank, takes it later.

    around: around(action) is a context manager that is entered when the inputs have arrived, so it does not measure
        the waiting. run/dryrun.py measures with it.
    """

    def __init__(self, last_stage: int, around: Callable[[Action], AbstractContextManager] = profile_range):
        self.last_stage, self.around = last_stage, around
        self.begin_step()

    def begin_step(self) -> None:
        # From forward to backward: (stage, micro-batch) -> (input, the output's edge in the graph).
        self.graphs = {}
        # A mailbox, also for outputs that wait to be sent: ("F" or "B", the stage that needs it, micro-batch) -> a
        # Pending of an activation or of a gradient. It was computed here, for this rank or another one, or it is being
        # received.
        self.inputs = {}

    def take(self, what: str, stage: int, k: int) -> torch.Tensor:
        """Remove an activation ("F") or a gradient ("B") from `inputs`. Waits for it if it is being received."""
        return self.inputs.pop((what, stage, k)).wait()

    def compute(self, action: Action, forward: Forward) -> None:
        """Run an action: F, B, I or W of one stage and one micro-batch k."""
        op, stage, k = action
        x = grad = None  # the inputs that the action waits for
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
            elif op == "W":  # computes the weight gradients that I has queued (core/gradients.py)
                backward_weight((stage, k))
            else:
                saved_x, edge = self.graphs.pop((stage, k))
                # Both fill saved_x.grad. I also queues the weight gradients, with the tensors that W needs (a queue of
                # core/gradients.py, whose key is (stage, k)).
                if op == "I":
                    backward_input((stage, k), edge, grad)
                else:
                    torch.autograd.backward(edge, grad)
                if stage > 0:
                    self.inputs["B", stage - 1, k] = done(saved_x.grad)


# ---- the engine -----------------------------------------------------------------------------------------------------

class Engine(ActionRunner):
    """Runs one rank's part of any plan. A plan of one stage, without a group, is gradient accumulation.

    Two things differ from the plain version: the order of the actions, which is the plan's list instead of two loops,
    and the transfers, which are asynchronous. A rank issues a receive where `with_transfers` has put it into its list,
    and waits only before the action that needs the tensor.
    """

    def __init__(self, plan: Plan, group: Group = ALONE, device: torch.device | str = "cpu",
                 around: Callable[[Action], AbstractContextManager] = profile_range):
        super().__init__(plan.stages - 1, around)
        self.group, self.device = group, device
        lists = with_transfers(plan)
        self.items = lists[group.rank]  # actions and transfers, in order
        self.connect(lists)

    def connect(self, lists: list[list[Action | Transfer]]) -> None:
        """Connect every pair of ranks that will exchange, by sending one number, in the same order on all ranks.

        Each pair's number goes through the link of this pair. Otherwise the pair's first transfer would connect it, and
        both ranks would have to meet there: NCCL then sets up the connection, and PyTorch creates the communicator if
        the group has none. In a schedule's order, ranks could wait in a circle.
        """
        pairs = set()
        for source, items in enumerate(lists):
            for item in items:
                if isinstance(item, Transfer) and item.op == "send":
                    pairs.add((source, item.peer))
        for source, target in sorted(pairs):
            word = torch.zeros(1, device=self.device)
            if self.group.rank == source:
                send(word, target, self.group).wait()
            elif self.group.rank == target:
                receive(word, source, self.group).wait()

    def run(self, forward: Forward, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Run the forwards and backwards of a step.

        The engine keeps no result of `forward`, not even the loss. shape, dtype: of an activation.
        """
        self.begin_step()
        sending = []
        for item in self.items:
            if isinstance(item, Action):
                sending = [pending for pending in sending if not pending.completed()]  # frees tensors that have left
                self.compute(item, forward)
            elif item.op == "send":
                sending.append(self.start_send(item))
            else:
                self.start_receive(item, shape, dtype)
        for pending in sending:
            pending.wait()
        assert not (self.graphs or self.inputs or queued_keys()), "something was computed that nobody used"

    def start_send(self, item: Transfer) -> Pending:
        result = self.take(item.what, item.stage, item.micro_batch)
        return send(result.contiguous(), item.peer, self.group)

    def start_receive(self, item: Transfer, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        self.inputs[item.what, item.stage, item.micro_batch] = receive(x, item.peer, self.group)


class Pipeline:
    """The engines of a run, each made when it is first needed.

    There is one for each number of micro-batches that a step has had so far, because a batch ramp changes it. An
    evaluation, which runs forwards only, has its own engines.

    plan_of: number of micro-batches -> the schedule's plan.
    """

    def __init__(self, plan_of: Callable[[int], Plan], group: Group, device: torch.device | str):
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
    """Run two ranks with two stages each in one process: their actions one by one, in an order that the plan allows.

    python schedules.py draws such plans over time.
    """
    p, m = 2, 4
    plan = make_plan("interleaved", p, m)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(plan.stages)]
    batch = torch.randn(m, 16, 8, dtype=torch.float64)

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        y = torch.tanh(layers[stage](batch[k] if x is None else x))
        return y.square().sum() / batch.numel() if stage == plan.stages - 1 else y

    ranks = [ActionRunner(plan.stages - 1) for _ in range(p)]
    sends = []
    for r, action, transfer in in_turns(plan):
        ranks[r].compute(action, forward)
        if transfer:
            _, what, stage, k, peer = transfer
            ranks[peer].inputs[what, stage, k] = done(ranks[r].take(what, stage, k))
            sends.append((r, what))
    in_pipeline = torch.stack([layer.weight.grad for layer in layers])

    for layer in layers:
        layer.weight.grad = None
    loss = torch.tanh(layers[3](torch.tanh(layers[2](torch.tanh(layers[1](torch.tanh(layers[0](batch))))))))
    (loss.square().sum() / batch.numel()).backward()
    plain = torch.stack([layer.weight.grad for layer in layers])

    print(f"{plan.stages} stages, one layer each, on {p} ranks; {m} micro-batches. F2.1 is the forward of stage 2 for "
          "micro-batch 1.\n")
    for r, actions in enumerate(plan.ranks):
        print(f"    rank {r}  {' '.join(map(str, actions))}")
    print()
    for r in range(p):
        print(f"    rank {r}  sent {sends.count((r, 'F')):2d} activations, {sends.count((r, 'B')):2d} gradients")
    difference = (in_pipeline - plain).abs().max() / plain.abs().max()
    print("\nGradients of the four layers, beside those of the whole batch in one model.\n"
          f"Relative difference: {difference:.0e}")


if __name__ == "__main__":
    run_demo(lambda group: demo())
