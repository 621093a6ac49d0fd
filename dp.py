"""Data parallelism: every rank has the whole model and its own sequences, and gradients are summed over the ranks.

Saves: time. n ranks compute n times as many sequences a step.
Costs: 2 (n-1)/n P elements sent by each rank in each step, for P parameters, whatever the batch.
Stops helping when: the sum takes longer than the backward it hides under, or a larger batch no longer learns faster.

The sum can begin as soon as a gradient is final. Written as what a rank does over time, for a model of 6 layers (g:
backward of a layer, R: all-reduce of its gradients, which the network does while the processor goes on):

    naive           g6 g5 g4 g3 g2 g1 R6 R5 R4 R3 R2 R1       nothing overlaps
    per parameter   g6 g5 g4 g3 g2 g1                         overlaps, but a small message costs as much as a large one
                       R6 R5 R4 R3 R2 R1
    bucketed        g6 g5 g4 g3 g2 g1                         whole layers in one flat buffer, sent when it is complete
                             R654     R321

Buckets. All parameters of one or more neighbouring layers share one flat gradient buffer, so a reduction is one call on
one contiguous tensor. Which ones share it follows from their order in the model, never from when gradients arrive: all
ranks must reduce the same thing. Inside, parameters that need the same treatment lie together (see `order`), and in the
order of the model otherwise, so that wq, wk, wv are one matrix to a matmul.

When. A bucket is told how many gradients to expect: with m micro-batches, m for each of its parameters. When the last
one arrives it is sent. So there is one reduction a step, and no flag that says which micro-batch is the last. All ranks
of a data group run their layers in the same order, so their buckets complete in the same order too.

One loss, one scale. Every rank divides the *sum* of its token losses by the number of valid tokens in the *global*
batch, and every reduction is a plain sum. Averaging averages instead weights the tokens of short sequences more: the
demo shows by how much.

Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (sections 3.2 and 4.2).
Letters: n ranks, P parameters, m micro-batches.
"""
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from collectives import Pending, all_reduce, name, sent, world
from param import Groups, Spec, at_least_fp32, draw, main_grad, parameter, rank, size, watch

# This rank's pipeline stages by number, each as its units in forward order: embedding, blocks, head.
Chunks = dict[int, list[nn.Module]]


def naive(params: Iterable[nn.Parameter], group) -> None:
    """All there is to it: after backward, sum every gradient over the ranks."""
    for param in params:
        all_reduce(param.grad, group)


# ---- buckets --------------------------------------------------------------------------------------------------------

def order(spec: Spec) -> tuple:
    """The key by which a bucket sorts its parameters: those that are treated alike become one contiguous span."""
    return spec.sums, spec.copies, not spec.decay


class Bucket:
    """Parameters that are reduced together, and the flat buffer of their gradients (at least fp32).

    params: of one data axis and dtype. arrivals: for each parameter, the stages whose backward brings it a gradient.
    """

    def __init__(self, params: list[nn.Parameter], arrivals: dict[nn.Parameter, list[int]], groups: Groups):
        self.params = sorted(params, key=lambda param: order(param.spec))
        self.arrivals, self.groups, self.group = arrivals, groups, groups[params[0].spec.data]
        self.name, self.device = self.params[0].spec.name, self.params[0].device
        self.wide = at_least_fp32(self.params[0].dtype)
        self.start: dict[nn.Parameter, int] = {}
        self.spans: list[tuple[int, int, Spec]] = []  # (start, stop, a spec whose treatment the whole span shares)
        end = 0
        for param in self.params:
            begin = end
            self.start[param], end = begin, begin + param.numel()
            if self.spans and order(self.spans[-1][2]) == order(param.spec):
                begin = self.spans.pop()[0]
            self.spans.append((begin, end, param.spec))
            watch(param, self)
        self.numel = end
        self.grad: torch.Tensor | None = None
        self.expected, self.pending = 0, Pending(None)

    def view(self, flat: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """The part of a flat tensor that belongs to one parameter, in its shape."""
        return flat[self.start[param]:self.start[param] + param.numel()].view(param.shape)

    def begin(self, backwards: dict[int, int]) -> None:
        """Start a step. backwards: stage -> number of backward passes."""
        self.expected = sum(backwards[stage] for param in self.params for stage in self.arrivals[param])
        assert self.expected > 0, f"{self.name}: a step without a gradient would leave the other ranks waiting"
        if self.grad is None:
            self.grad = torch.zeros(self.numel, dtype=self.wide, device=self.device)
        else:
            self.grad.zero_()

    def main_grad(self, param: nn.Parameter) -> torch.Tensor:
        assert self.grad is not None, "a backward before the first step was begun"
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        self.expected -= 1
        assert self.expected >= 0, f"{param.spec.name}: more backward passes than the step was begun with"
        if self.expected == 0:
            self.launch()

    def launch(self) -> None:
        self.pending = all_reduce(self.grad, self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum over the data axis, then add up what other axes hold only terms of."""
        assert self.expected == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.expected} gradients"
        self.pending.wait()
        for start, stop, spec in self.spans:
            for axis in spec.sums:
                all_reduce(self.grad[start:stop], self.groups[axis])


class DataParallel:
    """The buckets of a model: `begin` before the first backward of a step, `finish` after the last.

    chunks: this rank's stages. bucket_mb: whole units share a bucket until it holds at least so many MB; 0: one a unit.
    Afterwards the gradients, summed over all ranks and micro-batches, are in `bucket.grad`.
    """

    def __init__(self, chunks: Chunks, groups: Groups, bucket_mb: float = 25.0, make=Bucket):
        stages: dict[nn.Parameter, list[int]] = {}
        for stage, units in chunks.items():
            for param in dict.fromkeys(param for unit in units for param in unit.parameters()):
                stages.setdefault(param, []).append(stage)
        self.buckets = [make(params, {param: stages[param] for param in params}, groups)
                        for params in composition(chunks, bucket_mb)]

    def begin(self, backwards: dict[int, int]) -> None:
        """backwards: stage -> how many backward passes this step runs through it."""
        for bucket in self.buckets:
            bucket.begin(backwards)

    def finish(self) -> None:
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.name):  # ranks may hold stages in another order
            bucket.finish()


def composition(chunks: Chunks, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: whole units of one stage, until it holds at least bucket_mb of gradients.

    A parameter of several units or ranks (a tied table) is alone, so that its bucket is the same wherever it exists.
    """
    units = [unit for chunk in chunks.values() for unit in chunk]
    owners = Counter(param for unit in units for param in unit.parameters())
    buckets, placed = [], set()
    for chunk in chunks.values():
        filling: dict[tuple, list[nn.Parameter]] = {}  # (data axis, dtype) -> the bucket that still takes units
        for unit in chunk:
            for param in unit.parameters():
                if param in placed:
                    continue
                placed.add(param)
                if owners[param] > 1 or "tie" in param.spec.along:
                    buckets.append([param])
                    continue
                kind = param.spec.data, param.dtype
                if kind not in filling:
                    buckets.append(filling.setdefault(kind, []))
                filling[kind].append(param)
            for kind, params in list(filling.items()):
                if sum(param.numel() * at_least_fp32(param.dtype).itemsize for param in params) >= bucket_mb * 1e6:
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

    class Told(Bucket):
        def ready(self, param):
            events.append(f"g{param.spec.name}")
            super().ready(param)

        def launch(self):
            events.append("R" + "".join(param.spec.name for param in reversed(self.params)))
            super().launch()

    if way == "naive":
        for param in params:
            param.register_post_accumulate_grad_hook(lambda param: events.append(f"g{param.spec.name}"))
        nn.Sequential(*layers)(x).square().sum().backward()
        for param in reversed(params):
            events.append(f"R{param.spec.name}")
            naive([param], groups["dp"])
    else:
        megabytes = layers_a_bucket * params[0].nbytes / 1e6
        replicas = DataParallel({0: layers}, groups, megabytes, Told)
        replicas.begin({0: 1})
        nn.Sequential(*layers)(x).square().sum().backward()
        replicas.finish()
    return events, torch.stack([main_grad(param) for param in params])


def of_averages(x: torch.Tensor, group) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the mean loss of all valid tokens, and that of the mean over tokens, micro-batches, then ranks.

    Rank r has r + 1 valid tokens in its first micro-batch and 8 in its second.
    """
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


def demo(group) -> None:
    groups: Groups = {"dp": group}
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank(groups["dp"])))
    lines, sums = ["What a rank does in a step (g: a layer's gradient is there, R: its reduction starts):", ""], []
    for way, layers_a_bucket in ("naive", 0), ("per parameter", 0), ("bucketed", 3):
        sent.clear()
        events, grads = order_of_events(way, layers_a_bucket, x, groups)
        sums.append(grads)
        lines.append(f"    {way:15s} {' '.join(events):42s} sends {sent[name(group)]:,} bytes")
    assert torch.allclose(sums[0], sums[1]) and torch.allclose(sums[0], sums[2])
    exact, averaged = of_averages(x, group)
    off = (averaged - exact).norm() / exact.norm()
    lines += ["", f"Averaging averages, with 1 to 8 valid tokens a micro-batch, puts the gradient {off:.0%} off."]
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    with world() as group:
        demo(group)
