"""Data parallelism: every rank has the whole model and its own tokens; gradients are summed over the ranks.

Saves: time. n ranks compute n times as many sequences per step.
Costs: 2 (n-1)/n P elements sent per rank and step, for P parameters, independent of the batch size.
Stops helping when: the reduction takes longer than the backward it is hidden under, or larger batches save no steps.

The reduction of a gradient can start as soon as the gradient is complete. One step of a model of six layers over time
(g: backward of a layer; R: all-reduce of its gradients, which runs on the network while backward continues):

    naive           g6 g5 g4 g3 g2 g1 R6 R5 R4 R3 R2 R1
    per parameter   g6 g5 g4 g3 g2 g1
                       R6 R5 R4 R3 R2 R1
    bucketed        g6 g5 g4 g3 g2 g1
                             R654     R321

Naive reductions overlap with nothing. One reduction per parameter overlaps, but each small message pays full latency.

Buckets. Consecutive layers share one flat gradient buffer, which is reduced by one call. Which parameters share it
follows from their order in the model, never from the order in which gradients are computed: all ranks must reduce the
same buffers. Inside a bucket, parameters that are reduced and decayed alike are contiguous (see `sort_key`), in the
order of the model, so that one matmul can add the gradients of wq, wk and wv.

When. A bucket knows how many gradients to expect: with m micro-batches, m per parameter. The last one starts the
reduction. So there is one reduction per step, and no flag that marks the last micro-batch. All ranks of a data parallel
group run their layers in the same order, so they also reduce their buckets in the same order.

One loss, one scale. Every rank divides the *sum* of its token losses by the number of valid tokens in the *global*
batch, and every reduction is a plain sum. A mean of means would give tokens of ranks that have few a larger weight.

Source: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, sections 3.2 and 4.2.
Shapes: n ranks of the axis "dp", which includes context parallel ranks; P parameters, m micro-batches.
"""
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from collectives import Group, Groups, Pending, all_reduce, name, rank, run_demo, sent
from param import Spec, acc_dtype, attach_sink, draw, main_grad, parameter

Units = dict[int, list[nn.Module]]  # this rank's pipeline stages -> units (embedding, blocks, head) in forward order


def reduce_naively(params: Iterable[nn.Parameter], group: Group) -> None:
    """Data parallelism without overlap: after backward, sum every `param.grad` over the ranks."""
    for param in params:
        all_reduce(param.grad, group)


# ---- buckets --------------------------------------------------------------------------------------------------------

def sort_key(spec: Spec) -> tuple:
    """The order of parameters in a bucket: those that are reduced and decayed alike become one contiguous span."""
    return spec.partial_axes, spec.replicated_axes, not spec.decay


class Bucket:
    """Parameters that are reduced together, and the flat buffer of their gradients, in at least fp32: their sink.

    params: all with the same data axis and dtype.
    stages_of: parameter -> the pipeline stages of this rank that use it; a tied embedding may have two.
    """

    def __init__(self, params: list[nn.Parameter], stages_of: dict[nn.Parameter, list[int]], groups: Groups):
        self.params = sorted(params, key=lambda param: sort_key(param.spec))
        self.stages_of, self.groups = stages_of, groups
        self.group = groups[params[0].spec.data_axis]
        self.name, self.device = self.params[0].spec.name, self.params[0].device
        self.acc_dtype = acc_dtype(self.params[0].dtype)
        self.offset: dict[nn.Parameter, int] = {}
        self.spans: list[tuple[int, int, Spec]] = []  # (start, stop, the spec of one of the span's parameters)
        self.numel = 0
        for param in self.params:
            self.offset[param] = start = self.numel
            self.numel += param.numel()
            if self.spans and sort_key(self.spans[-1][2]) == sort_key(param.spec):
                start = self.spans.pop()[0]  # the parameter extends the last span
            self.spans.append((start, self.numel, param.spec))
            attach_sink(param, self)
        self.grad: torch.Tensor | None = None
        self.expected = 0  # gradients that this step has still to accumulate
        self.reduction: Pending | None = None

    def view(self, flat: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """The slice of a flat tensor that belongs to one parameter, in the parameter's shape."""
        return flat[self.offset[param]:self.offset[param] + param.numel()].view(param.shape)

    def begin_step(self, backwards: dict[int, int]) -> None:
        """Zero the gradients. backwards: stage -> number of backward passes through it in this step."""
        self.expected = sum(backwards[stage] for param in self.params for stage in self.stages_of[param])
        assert self.expected > 0, f"{self.name}: a step without a gradient would leave the other ranks waiting"
        self.zero_grad()

    def zero_grad(self) -> None:
        if self.grad is None:
            self.grad = torch.zeros(self.numel, dtype=self.acc_dtype, device=self.device)
        else:
            self.grad.zero_()

    def main_grad(self, param: nn.Parameter) -> torch.Tensor:
        assert self.grad is not None, "a backward before the first begin_step"
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        """Called when a backward pass has accumulated its gradient of `param`; the last call starts the reduction."""
        self.expected -= 1
        assert self.expected >= 0, f"{param.spec.name}: more backward passes than the step was begun with"
        if self.expected == 0:
            self.start_reduction()

    def start_reduction(self) -> None:
        self.reduction = all_reduce(self.grad, self.group, async_op=True)

    def finish_step(self) -> None:
        """Wait for the sum over the data axis, then sum partial gradients over their other axes."""
        assert self.expected == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.expected} gradients"
        self.reduction.wait()
        for start, stop, spec in self.spans:
            for axis in spec.partial_axes:
                all_reduce(self.grad[start:stop], self.groups[axis])


class DataParallel:
    """The buckets of a model: `begin_step` before the first backward of a step, `finish_step` after the last.

    After `finish_step` the gradients, summed over all ranks and micro-batches, are in `bucket.grad`.
    bucket_mb: units are added to a bucket until it has at least so many MB of gradients; 0: one bucket per unit.
    """

    def __init__(self, units: Units, groups: Groups, bucket_mb: float = 25.0, make_bucket=Bucket):
        stages_of: dict[nn.Parameter, list[int]] = {}
        for stage, modules in units.items():
            for param in dict.fromkeys(param for module in modules for param in module.parameters()):
                stages_of.setdefault(param, []).append(stage)
        self.buckets = [make_bucket(params, {param: stages_of[param] for param in params}, groups)
                        for params in assign_to_buckets(units, bucket_mb)]

    def begin_step(self, backwards: dict[int, int]) -> None:
        """backwards: stage -> number of backward passes through it in this step."""
        for bucket in self.buckets:
            bucket.begin_step(backwards)

    def finish_step(self) -> None:
        """Finish all buckets in an order that all ranks share: pipeline ranks may list their stages differently."""
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.name):
            bucket.finish_step()


def assign_to_buckets(units: Units, bucket_mb: float) -> list[list[nn.Parameter]]:
    """The parameters of each bucket: consecutive units of one stage, until it has at least bucket_mb of gradients.

    A parameter that several units or pipeline ranks use (a tied embedding) is alone: its bucket is the same on all.
    """
    uses = Counter(param for stage in units.values() for module in stage for param in module.parameters())
    buckets: list[list[nn.Parameter]] = []
    assigned: set[nn.Parameter] = set()
    for stage in units.values():
        filling: dict[tuple, list[nn.Parameter]] = {}  # (data axis, dtype) -> the bucket to which units are added
        for module in stage:
            for param in module.parameters():
                if param in assigned:
                    continue
                assigned.add(param)
                if uses[param] > 1 or "tie" in param.spec.along:
                    buckets.append([param])
                    continue
                key = param.spec.data_axis, param.dtype
                if key not in filling:
                    buckets.append(filling.setdefault(key, []))
                filling[key].append(param)
            for key, params in list(filling.items()):
                if sum(param.numel() * acc_dtype(param.dtype).itemsize for param in params) >= bucket_mb * 1e6:
                    del filling[key]
    return buckets


# ---- demo: python dp.py ---------------------------------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, number: int, groups: Groups, hidden: int = 64):
        super().__init__()
        self.weight = parameter(Spec(str(number), (hidden, hidden), std=hidden ** -0.5), groups, torch.float64)
        self.weight.data = draw(0)(self.weight.spec, self.weight.box).double()

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def run_step(way: str, layers_per_bucket: int, x: torch.Tensor, groups: Groups) -> tuple[list[str], torch.Tensor]:
    """What this rank does in one step of a model of six layers, in order, and the summed gradients."""
    layers = [Layer(number, groups) for number in range(1, 7)]
    params = [layer.weight for layer in layers]
    events = []

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
            reduce_naively([param], groups["dp"])
    else:
        replicas = DataParallel({0: layers}, groups, layers_per_bucket * params[0].nbytes / 1e6, LoggedBucket)
        replicas.begin_step({0: 1})
        nn.Sequential(*layers)(x).square().sum().backward()
        replicas.finish_step()
    return events, torch.stack([main_grad(param) for param in params])


def demo(group: Group) -> None:
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank(group)))
    lines = ["One step of each rank (g: the gradient of a layer is complete, R: its reduction starts):", ""]
    gradients = []
    for way, layers_per_bucket in ("naive", 0), ("per parameter", 0), ("bucketed", 3):
        sent.clear()
        events, grads = run_step(way, layers_per_bucket, x, {"dp": group})
        gradients.append(grads)
        lines.append(f"    {way:15s} {' '.join(events):42s} sends {sent[name(group)]:,} bytes")
    assert torch.allclose(gradients[0], gradients[1]) and torch.allclose(gradients[0], gradients[2])
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    run_demo(demo, ranks=4)
