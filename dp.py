"""Data parallelism: every rank has the whole model and its own sequences; gradients are summed over the ranks.

Saves: time. n ranks compute n times as many sequences a step.
Costs: 2 (n-1)/n P elements sent by each rank in each step, for P parameters, whatever the batch.
Stops helping when: the reduction takes longer than the backward it hides under, or a larger batch no longer learns
       faster.

The reduction of a gradient can begin as soon as the gradient is final. What a rank does over time, for a model of six
layers (g: backward of a layer; R: all-reduce of its gradients, which the network does while the processor goes on):

    naive           g6 g5 g4 g3 g2 g1 R6 R5 R4 R3 R2 R1       nothing overlaps
    per parameter   g6 g5 g4 g3 g2 g1                         overlaps, but a small message costs as much as a large one
                       R6 R5 R4 R3 R2 R1
    bucketed        g6 g5 g4 g3 g2 g1                         whole layers in one flat buffer, reduced when it is full
                             R654     R321

Buckets. All parameters of one or more neighbouring layers share one flat gradient buffer, so a reduction is one call on
one contiguous tensor. Which parameters share it follows from their order in the model, never from the order in which
gradients are computed: all ranks must reduce the same buffer. Inside a bucket, parameters that are reduced and decayed
alike lie together (see `sort_key`), and otherwise in the order of the model, so that a matmul can read wq, wk and wv as
one matrix.

When. A bucket knows how many gradients to expect: with m micro-batches, m for each of its parameters. The last one
starts the reduction. So there is one reduction a step, and no flag that marks the last micro-batch. All ranks of a data
parallel group run their layers in the same order, so their buckets are complete in the same order, too.

One loss, one scale. Every rank divides the *sum* of its token losses by the number of valid tokens in the *global*
batch, and every reduction is a plain sum. Averaging over ranks instead gives more weight to the tokens of ranks that
have few: the demo shows how much.

Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (sections 3.2 and 4.2).
Shapes: n ranks, P parameters, m micro-batches.
"""
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from collectives import Group, Groups, Pending, all_reduce, name, rank, sent, size, world
from param import Spec, acc_dtype, attach_sink, draw, main_grad, parameter

# What this rank holds of each pipeline stage: its units (embedding, blocks, head) in forward order.
Units = dict[int, list[nn.Module]]


def naive(params: Iterable[nn.Parameter], group: Group) -> None:
    """Data parallelism in one line: after backward, sum every gradient over the ranks."""
    for param in params:
        all_reduce(param.grad, group)


# ---- buckets --------------------------------------------------------------------------------------------------------

def sort_key(spec: Spec) -> tuple:
    """A bucket sorts its parameters by this: those that are reduced and decayed alike become one contiguous span."""
    return spec.partial_axes, spec.replicated_axes, not spec.decay


class Bucket:
    """Parameters that are reduced together, and the flat buffer of their gradients, in at least fp32.

    params: all on the same data axis, in the same dtype.
    stages_of: for each parameter, the pipeline stages that use it; a tied table has two.
    """

    def __init__(self, params: list[nn.Parameter], stages_of: dict[nn.Parameter, list[int]], groups: Groups):
        self.params = sorted(params, key=lambda param: sort_key(param.spec))
        self.stages_of, self.groups, self.group = stages_of, groups, groups[params[0].spec.data_axis]
        self.name, self.device = self.params[0].spec.name, self.params[0].device
        self.acc_dtype = acc_dtype(self.params[0].dtype)
        self.offset: dict[nn.Parameter, int] = {}
        self.spans: list[tuple[int, int, Spec]] = []  # (start, stop, the spec of one of the span's parameters)
        end = 0
        for param in self.params:
            start = end
            self.offset[param], end = start, start + param.numel()
            if self.spans and sort_key(self.spans[-1][2]) == sort_key(param.spec):
                start = self.spans.pop()[0]
            self.spans.append((start, end, param.spec))
            attach_sink(param, self)
        self.numel = end
        self.grad: torch.Tensor | None = None
        self.expected, self.reduction = 0, Pending(None)

    def view(self, flat: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """One parameter's part of a flat tensor, in the parameter's shape."""
        return flat[self.offset[param]:self.offset[param] + param.numel()].view(param.shape)

    def begin_step(self, backwards: dict[int, int]) -> None:
        """backwards: stage -> number of backward passes through it in this step."""
        self.expected = sum(backwards[stage] for param in self.params for stage in self.stages_of[param])
        assert self.expected > 0, f"{self.name}: a step without a gradient would leave the other ranks waiting"
        if self.grad is None:
            self.grad = torch.zeros(self.numel, dtype=self.acc_dtype, device=self.device)
        else:
            self.grad.zero_()

    def main_grad(self, param: nn.Parameter) -> torch.Tensor:
        assert self.grad is not None, "a backward before the first step was begun"
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        """One backward pass has accumulated its gradient of `param`."""
        self.expected -= 1
        assert self.expected >= 0, f"{param.spec.name}: more backward passes than the step was begun with"
        if self.expected == 0:
            self.start_reduction()

    def start_reduction(self) -> None:
        self.reduction = all_reduce(self.grad, self.group, async_op=True)

    def finish_step(self) -> None:
        """Wait for the sum over the data axis, then sum what is partial over other axes."""
        assert self.expected == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.expected} gradients"
        self.reduction.wait()
        for start, stop, spec in self.spans:
            for axis in spec.partial_axes:
                all_reduce(self.grad[start:stop], self.groups[axis])


class DataParallel:
    """The buckets of a model: `begin_step` before the first backward of a step, `finish_step` after the last.

    bucket_mb: whole units share a bucket until it holds at least so many MB of gradients; 0: one bucket a unit.
    After `finish_step` the gradients, summed over all ranks and micro-batches, are in `bucket.grad`.
    """

    def __init__(self, units: Units, groups: Groups, bucket_mb: float = 25.0, make=Bucket):
        stages_of: dict[nn.Parameter, list[int]] = {}
        for stage, modules in units.items():
            for param in dict.fromkeys(param for module in modules for param in module.parameters()):
                stages_of.setdefault(param, []).append(stage)
        self.buckets = [make(params, {param: stages_of[param] for param in params}, groups)
                        for params in assign_to_buckets(units, bucket_mb)]

    def begin_step(self, backwards: dict[int, int]) -> None:
        """backwards: stage -> number of backward passes through it in this step."""
        for bucket in self.buckets:
            bucket.begin_step(backwards)

    def finish_step(self) -> None:
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.name):  # ranks may hold stages in another order
            bucket.finish_step()


def assign_to_buckets(units: Units, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: whole units of one stage, until it holds at least bucket_mb of gradients.

    A parameter that several units or ranks share (a tied table) is alone, so that its bucket is the same everywhere.
    """
    modules = [module for stage in units.values() for module in stage]
    uses = Counter(param for module in modules for param in module.parameters())
    buckets, assigned = [], set()
    for stage in units.values():
        filling: dict[tuple, list[nn.Parameter]] = {}  # (data axis, dtype) -> the bucket that still takes units
        for module in stage:
            for param in module.parameters():
                if param in assigned:
                    continue
                assigned.add(param)
                if uses[param] > 1 or "tie" in param.spec.along:
                    buckets.append([param])
                    continue
                kind = param.spec.data_axis, param.dtype
                if kind not in filling:
                    buckets.append(filling.setdefault(kind, []))
                filling[kind].append(param)
            for kind, params in list(filling.items()):
                if sum(param.numel() * acc_dtype(param.dtype).itemsize for param in params) >= bucket_mb * 1e6:
                    del filling[kind]
    return buckets


# ---- demo: torchrun --nproc_per_node=4 dp.py ------------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, number: int, groups: Groups, width: int = 64):
        super().__init__()
        self.weight = parameter(Spec(str(number), (width, width), std=width ** -0.5), groups, torch.float64)
        self.weight.data = draw(0)(self.weight.spec, self.weight.box).double()

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def order_of_events(way: str, layers_a_bucket: int, x: torch.Tensor, groups: Groups) -> tuple[list[str], torch.Tensor]:
    """What this rank does in one step on a model of six layers, and the summed gradients."""
    layers, events = [Layer(number, groups) for number in range(1, 7)], []
    params = [layer.weight for layer in layers]

    class LoggedBucket(Bucket):
        def ready(self, param):
            events.append(f"g{param.spec.name}")
            super().ready(param)

        def start_reduction(self):
            events.append("R" + "".join(param.spec.name for param in reversed(self.params)))
            super().start_reduction()

    if way == "naive":
        for param in params:
            param.register_post_accumulate_grad_hook(lambda param: events.append(f"g{param.spec.name}"))
        nn.Sequential(*layers)(x).square().sum().backward()
        for param in reversed(params):
            events.append(f"R{param.spec.name}")
            naive([param], groups["dp"])
    else:
        megabytes = layers_a_bucket * params[0].nbytes / 1e6
        replicas = DataParallel({0: layers}, groups, megabytes, LoggedBucket)
        replicas.begin_step({0: 1})
        nn.Sequential(*layers)(x).square().sum().backward()
        replicas.finish_step()
    return events, torch.stack([main_grad(param) for param in params])


def mean_and_mean_of_means(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the mean loss of all valid tokens, and that of the mean over tokens, then micro-batches, then
    ranks. Rank r has r + 1 valid tokens in its first micro-batch and 8 in its second."""
    inputs, target = (x[:rank(group) + 1], x), x.flip(1)
    valid = torch.tensor(float(sum(len(part) for part in inputs)))
    all_reduce(valid, group)
    layers = Layer(1, {}), Layer(1, {})
    for part in inputs:
        losses = [(layer(part) - target[:len(part)]).square().sum(1) for layer in layers]
        (losses[0].sum() / valid).backward()
        (losses[1].mean() / len(inputs) / size(group)).backward()
    for layer in layers:
        naive(layer.parameters(), group)
    return layers[0].weight.grad, layers[1].weight.grad


def demo(group: Group) -> None:
    groups: Groups = {"dp": group}
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank(group)))
    lines = ["What a rank does in a step (g: a layer's gradient is complete, R: its reduction starts):", ""]
    gradients = []
    for way, layers_a_bucket in ("naive", 0), ("per parameter", 0), ("bucketed", 3):
        sent.clear()
        events, grads = order_of_events(way, layers_a_bucket, x, groups)
        gradients.append(grads)
        lines.append(f"    {way:15s} {' '.join(events):42s} sends {sent[name(group)]:,} bytes")
    assert torch.allclose(gradients[0], gradients[1]) and torch.allclose(gradients[0], gradients[2])
    exact, averaged = mean_and_mean_of_means(x, group)
    error = (averaged - exact).norm() / exact.norm()
    lines += ["", f"Averaging averages, with 1 to 8 valid tokens a micro-batch, puts the gradient {error:.0%} off."]
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    with world() as group:
        demo(group)
