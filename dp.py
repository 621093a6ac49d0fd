"""Data parallelism: every rank has a copy of the model and its own part of the batch; gradients are summed over ranks.

One backward pass through a model of six layers. g6: the backward of layer 6, which computes the gradient of its
weights. R6: the all-reduce of that gradient. R654: one all-reduce of three gradients. Time runs to the right.

    naive            compute    g6 g5 g4 g3 g2 g1
                     network                      R1 R2 R3 R4 R5 R6      backward hides nothing

    per parameter    compute    g6 g5 g4 g3 g2 g1
                     network       R6 R5 R4 R3 R2 R1                     each small message pays the full latency

    in buckets       compute    g6 g5 g4 g3 g2 g1
                     network             R654     R321                   few large messages

The idea: a gradient of the global batch is the sum of the ranks' gradients of their own parts. This sum can start as
soon as a gradient is complete, while backward computes the others. A bucket is a flat buffer with the gradients of many
parameters, which one collective reduces.

Symbols: n ranks of the data axis. For most parameters the data axis is "dp", which includes the context parallel ranks;
for experts it is "edp" (core/groups.py). It is not the axis named "data" of train.py, which spans all replicas. P
parameters. A unit is the embedding, a block, or the head. Every parameter has a `spec` (core/param.py): its name, its
global shape, and the axes of the grid on which it lies.

Saves: time. n ranks process n times as many tokens per step.
Costs: 2 (n-1)/n P elements sent per rank and step. The size of the batch does not matter.
Stops helping when: the reduction takes longer than the backward that hides it, or a larger batch no longer reduces the
number of steps (the critical batch size).

Easily got wrong:
- The scale. Every rank divides the *sum* of the losses of its tokens by the number of tokens of *all* ranks, and every
  reduction is a plain sum. A mean of the ranks' means would give the tokens of ranks with few tokens a larger weight.
- Micro-batches. A gradient is complete after the last micro-batch of a step. An all-reduce of `.grad` after each one
  would send more, and would sum earlier micro-batches over the ranks again. DistributedDataParallel has `no_sync` for
  this. A Bucket counts gradients instead.
- The order. All ranks must reduce the same buffers in the same order. They have the same buffers, because the order of
  the parameters in the model determines which of them share a bucket. They start the reductions in the order in which
  the buckets are complete. This order is the same, because the ranks of a data axis hold the same layers and run the
  same schedule, so autograd computes their gradients in the same order.

Source: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, sections 3.2 and 4.2.
"""
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from core.collectives import Group, Groups, Pending, all_reduce, calls, run_demo, sent
from core.gradients import attach_sink
from core.param import Spec, acc_dtype, most_elements, parameter

MicroBatches = Sequence[tuple[Tensor, Tensor]]  # (inputs, targets) of each micro-batch
LossSum = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> the sum of the losses of their tokens
Units = dict[int, list[nn.Module]]  # number of a pipeline stage of this rank -> its units, in the order of forward


# ---- the plain version: reduce after backward -----------------------------------------------------------------------

def naive_step(model: nn.Module, loss_sum: LossSum, micro_batches: MicroBatches, tokens: int, group: Group) -> None:
    """Compute the gradient of a step, the same on every rank, into `.grad` of the parameters.

    micro_batches: this rank's. tokens: how many tokens the micro-batches of all ranks have together.
    """
    model.zero_grad()
    for inputs, targets in micro_batches:
        loss = loss_sum(model(inputs), targets) / tokens
        loss.backward()  # adds to .grad
    for param in model.parameters():
        all_reduce(param.grad, group)


# ---- per parameter: reduce each gradient as soon as it is complete --------------------------------------------------

def overlapped_step(model: nn.Module, loss_sum: LossSum, micro_batches: MicroBatches, tokens: int,
                    group: Group) -> None:
    """Compute the same as naive_step. Changed: hooks start the all-reduces during the last backward.

    A hook is called when `.grad` of its parameter is complete. The all-reduce is asynchronous, so backward goes on. The
    loop of all-reduces at the end of naive_step becomes a loop of waits.
    """
    reductions: list[Pending] = []

    def start_reduction(param: nn.Parameter) -> None:
        reductions.append(all_reduce(param.grad, group, async_op=True))

    model.zero_grad()
    hooks = []
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        loss = loss_sum(model(inputs), targets) / tokens
        if number == len(micro_batches):
            hooks = [param.register_post_accumulate_grad_hook(start_reduction) for param in model.parameters()]
        loss.backward()
    for reduction in reductions:
        reduction.wait()
    for hook in hooks:
        hook.remove()


# ---- in buckets: reduce many gradients at once ----------------------------------------------------------------------

def bucketed_step(model: nn.Module, loss_sum: LossSum, micro_batches: MicroBatches, tokens: int,
                  buckets: "Sequence[Bucket]") -> None:
    """Compute the same as naive_step, into buckets. Changed: hooks start an all-reduce when a bucket is complete.

    The gradient of a parameter is then `bucket.main_grad(param)`; its `.grad` is None. train.py does not call this
    function. It makes the same three steps (begin_step, all backward passes, finish_step) around a pipeline.
    """
    for bucket in buckets:
        bucket.begin_step(len(micro_batches))
    for inputs, targets in micro_batches:
        loss = loss_sum(model(inputs), targets) / tokens
        loss.backward()  # a hook calls bucket.ready(param) for each parameter
    for bucket in buckets:
        bucket.finish_step()


class Bucket:
    """Parameters that are reduced together, and the flat buffer of their gradients, in fp32 or wider.

    A bucket is the *sink* of its parameters (core/gradients.py): every backward pass adds the gradient of a parameter
    to main_grad(param), then a hook calls ready(param). The bucket counts these calls. The last one of a step starts
    the reduction, and finish_step waits for it.

    params: parameter -> its number of gradients per micro-batch, in the order of the buffer. This number is 1, or more
        if several pipeline stages of this rank use the parameter: each stage has a backward pass of its own. All
        parameters share the same data axis, dtype and device.
    """

    def __init__(self, params: dict[nn.Parameter, int], groups: Groups):
        self.params = list(params)
        self.grads_per_micro_batch = sum(params.values())
        first = self.params[0]
        self.name = first.spec.name
        self.device = first.device
        self.acc_dtype = acc_dtype(first.dtype)
        self.groups = groups  # all axes, because zero.py also sums some gradients over others, such as "tp"
        self.group = groups[first.spec.data_axis]  # the ranks over which this bucket is reduced
        self.numel = 0  # elements of the buffer
        self.offset: dict[nn.Parameter, int] = {}  # where each parameter begins in it
        for param in self.params:
            self.offset[param] = self.numel
            # Vocabulary shards may differ in size between tp ranks. Reserve the size of the largest one on every tp
            # rank, so that the parameters after it have equal offsets: zero.py cuts its shards from the offsets, and
            # sums the gradients of norm weights over tp shard by shard.
            self.numel += most_elements(param.spec, groups)
            attach_sink(param, self)  # registers a hook of param, which calls `ready` (core/gradients.py)
        self.grad: Tensor | None = None  # the buffer, allocated when it is first needed
        self.missing = 0  # gradients that are still to come in this step
        self.reducing: Pending | None = None  # the reduction, while it is running

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """Return the slice of a flat tensor that belongs to one parameter, in the parameter's shape."""
        return flat[self.offset[param]:self.offset[param] + param.numel()].view(param.shape)

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def begin_step(self, micro_batches: int) -> None:
        """Zero the buffer, and expect the gradients of this many micro-batches."""
        self.missing = self.grads_per_micro_batch * micro_batches
        assert self.missing > 0, f"{self.name}: a step without a gradient would leave the other ranks waiting"
        if self.grad is not None:
            self.grad.zero_()

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the part of the buffer to which the gradient of `param` is added."""
        if self.grad is None:
            self.grad = self.zeros(self.numel, self.acc_dtype)
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        """Count a gradient that has been added. After the last one of the step, start the reduction."""
        self.missing -= 1
        assert self.missing >= 0, f"{param.spec.name}: more backward passes than begin_step announced"
        if self.missing == 0:
            self.start_reduction()

    def start_reduction(self) -> None:
        """Start to sum the gradients over the ranks. Backward goes on meanwhile."""
        self.reducing = all_reduce(self.grad, self.group, async_op=True)

    def finish_step(self) -> None:
        """Wait until `grad` is the sum over all ranks and micro-batches. Call this after the last backward."""
        self.check_complete()
        if self.reducing:
            self.reducing.wait()

    def check_complete(self) -> None:
        assert self.missing == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.missing} gradients"


# ---- which parameters share a bucket --------------------------------------------------------------------------------

def assign_to_buckets(units: Units, bucket_mb: float, groups: Groups,
                      kind: Callable[[Spec], Hashable] = lambda spec: None) -> list[dict[nn.Parameter, int]]:
    """Return the `params` of each Bucket: parameter -> its number of gradients per micro-batch.

    A bucket holds the parameters of consecutive units of one pipeline stage that agree in data axis and kind(spec). A
    bucket is closed at the end of the unit in which its gradients reach bucket_mb megabytes. With bucket_mb = 0 every
    unit has its own buckets. kind: separates parameters with different optimizers; zero.py passes Muon's.

    Ranks that sum a gradient must have it at the same offset of the same bucket, because zero.py cuts shards from the
    offsets. Data parallel ranks have the same units, so they have the same buckets. Two other sums need care:
    - Tensor parallel ranks sum the gradients of norm weights. Their vocabulary shards may differ in size. The size of
      the largest one counts on every rank, so that all ranks close a bucket at the end of the same unit.
    - The first and the last pipeline rank sum the gradient of a tied embedding, over the axis "tie" of its spec.along
      (the axes on which a parameter lies, apart from the data axis; core/param.py). Their other parameters differ, so
      the tied embedding has a bucket of its own.

    A parameter that several units use also has a bucket of its own. Its gradient is complete only after the backward of
    all these units, so in a shared bucket it would delay the reduction of the other gradients.
    """
    units_with: Counter[nn.Parameter] = Counter()  # parameter -> how many units use it
    stages_with: Counter[nn.Parameter] = Counter()  # parameter -> how many stages use it
    for modules in units.values():
        for unit in modules:
            units_with.update(unit.parameters())
        # `.parameters()` of one module yields a shared parameter once. So a stage counts it once, even if several of
        # its units use it.
        stages_with.update(nn.ModuleList(modules).parameters())

    shared = {param for param in units_with if units_with[param] > 1 or "tie" in param.spec.along}
    buckets = [[param] for param in units_with if param in shared]
    for modules in units.values():
        open_buckets: dict[Hashable, list[nn.Parameter]] = {}  # (data axis, kind) -> parameters so far
        for unit in modules:
            for param in unit.parameters():
                if param not in shared:
                    key = param.spec.data_axis, kind(param.spec)
                    open_buckets.setdefault(key, []).append(param)
            for key, params in list(open_buckets.items()):
                if gradient_bytes(params, groups) >= bucket_mb * 1e6:
                    buckets.append(open_buckets.pop(key))
        buckets += open_buckets.values()
    # A stage adds one gradient of each parameter per micro-batch: its backward calls ready once, after all uses.
    return [{param: stages_with[param] for param in params} for params in buckets]


def gradient_bytes(params: Iterable[nn.Parameter], groups: Groups) -> int:
    """Return the bytes of these parameters' gradients, on a tensor parallel rank with the largest shard of each."""
    return sum(most_elements(param.spec, groups) * acc_dtype(param.dtype).itemsize for param in params)


# ---- demo: python dp.py ---------------------------------------------------------------------------------------------

WIDTH, LAYERS = 64, 6


def make_model() -> nn.Sequential:
    """Six linear layers, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(LAYERS)])
    for number, layer in enumerate(model, 1):
        layer.weight = parameter(Spec(f"{number}", (WIDTH, WIDTH)), {}, torch.float64)
        layer.weight.data = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    return model


def note_bytes(begun: list[int], axis: str) -> Callable:
    """Return a backward hook of a layer that appends to `begun` the bytes sent over `axis` so far."""
    def hook(layer: nn.Module, grad_output: tuple) -> None:
        begun.append(sent[axis])
    return hook


def demo(group: Group) -> None:
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None] * (group.rank + 1)  # each rank has other inputs
    batch = x.requires_grad_(), x.detach().flip(1)  # without requires_grad_, torch warns
    step = dict(loss_sum=lambda y, targets: (y - targets).square().sum(), micro_batches=[batch], tokens=group.size)
    lines, gradients = [], {}
    for way in ("naive", "per parameter", "in buckets"):
        model = make_model()
        begun: list[int] = []  # bytes, when the backward of a layer begins
        for layer in model:
            layer.register_full_backward_pre_hook(note_bytes(begun, group.axis))
        sent.clear()
        calls.clear()
        if way == "in buckets":
            assigned = assign_to_buckets({0: list(model)}, bucket_mb=3 * WIDTH**2 * 8 / 1e6, groups={})
            buckets = [Bucket(params, {"dp": group}) for params in assigned]
            bucketed_step(model, buckets=buckets, **step)
            gradients[way] = [param.sink.main_grad(param) for param in model.parameters()]
        else:
            train_step = naive_step if way == "naive" else overlapped_step
            train_step(model, group=group, **step)
            gradients[way] = [param.grad for param in model.parameters()]
        columns = [f"{nbytes:9,}" for nbytes in (*begun, sent[group.axis])]
        lines.append(f"{way:13s}{''.join(columns)}{calls[group.axis]:10}")
    for others in gradients.values():
        torch.testing.assert_close(others, gradients["naive"], rtol=1e-12, atol=0)
    if group.rank == 0:
        print(f"{LAYERS} layers of {WIDTH} x {WIDTH} weights in fp64, {group.size} ranks. "
              "Bytes that rank 0 has begun to send\nwhen the backward of a layer begins, and at the end:\n")
        print(" " * 13 + "".join(f"  layer {number}" for number in range(LAYERS, 0, -1)) + "      end  messages")
        print(*lines, sep="\n")
        print("\nAll three compute the same gradients and send the same bytes. A message can be hidden if it begins "
              "before\nthe backward of layer 1: 0 of 6 (naive), 5 of 6 (per parameter), 1 of 2 (in buckets). With 99 "
              "layers in\nbuckets of 3 it would be 32 of 33.")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
