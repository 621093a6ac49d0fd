"""Data parallelism: every rank has the whole model and its own tokens; gradients are summed over the ranks.

Saves: time. n ranks compute n times as many sequences per step.
Costs: 2 (n-1)/n P elements sent per rank and step, for P parameters, independent of the batch size.
Stops helping when: the reduction takes longer than the backward it is hidden under, or larger batches save no steps.

The reduction of a gradient can start as soon as the gradient is complete. One step of a model of six layers over time
(g: backward of a layer; R: all-reduce of its gradients, which runs on the network while backward continues):

    naive           g6 g5 g4 g3 g2 g1 R6 R5 R4 R3 R2 R1        no overlap
    per parameter   g6 g5 g4 g3 g2 g1
                       R6 R5 R4 R3 R2 R1                       each small message pays full latency
    bucketed        g6 g5 g4 g3 g2 g1
                             R654     R321                     layers share a flat buffer, and its reduction

Which parameters share a bucket follows from their order in the model, never from the order in which gradients are
computed: all ranks must reduce the same buffers, in the same order. A bucket knows how many gradients it gets per step;
the last one starts its reduction. So there is one per step, and no flag (`no_sync`) on all other micro-batches.

One loss, one scale. Every rank divides the *sum* of its token losses by the number of valid tokens in the *global*
batch, and every reduction is a plain sum. A mean of means would give tokens of ranks that have few a larger weight.

Source: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, sections 3.2 and 4.2.
Shapes: n ranks of the data axis ("dp", which includes context parallel ranks; of experts "edp"), P parameters.
"""
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from core.collectives import Group, Groups, Pending, all_reduce, run_demo, sent
from core.gradients import attach_sink
from core.param import Spec, acc_dtype, most_elements, parameter

Units = dict[int, list[nn.Module]]  # this rank's pipeline stages -> units (embedding, blocks, head) in forward order


class Bucket:
    """Parameters that are reduced together, and the flat buffer of their gradients, in at least fp32.

    A backward adds a gradient to main_grad(param), then calls ready(param): core/gradients.py calls such an object a
    sink. The last gradient of a step starts the reduction, and finish_step waits for it.
    params: parameter -> gradients per micro-batch, in the order of the buffer; all share one data axis.
    """

    def __init__(self, params: dict[nn.Parameter, int], groups: Groups):
        self.params, self.grads_per_micro_batch = list(params), sum(params.values())
        first = self.params[0]
        self.groups, self.group = groups, groups[first.spec.data_axis]
        self.name, self.device, self.acc_dtype = first.spec.name, first.device, acc_dtype(first.dtype)
        self.numel, self.offset = 0, {}
        for param in self.params:
            self.offset[param] = self.numel
            # Not param.numel(): tp ranks sum parts of this buffer (norms'), but may have unequal parts of a vocabulary.
            self.numel += most_elements(param.spec, groups)
            attach_sink(param, self)
        self.grad: Tensor | None = None
        self.missing = 0  # gradients that are still to come in this step
        self.reducing: Pending | None = None  # the reduction, while it is running

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """The slice of a flat tensor that belongs to one parameter, in the parameter's shape."""
        return flat[self.offset[param]:self.offset[param] + param.numel()].view(param.shape)

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def begin_step(self, micro_batches: int) -> None:
        self.missing = self.grads_per_micro_batch * micro_batches
        assert self.missing > 0, f"{self.name}: a step without a gradient would leave the other ranks waiting"
        if self.grad is not None:
            self.grad.zero_()

    def main_grad(self, param: nn.Parameter) -> Tensor:
        if self.grad is None:
            self.grad = self.zeros(self.numel, self.acc_dtype)
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        self.missing -= 1
        assert self.missing >= 0, f"{param.spec.name}: more backward passes than the step was begun with"
        if self.missing == 0:
            self.start_reduction()

    def start_reduction(self) -> None:
        """Start to sum the gradient over the ranks. Backward goes on meanwhile."""
        self.reducing = all_reduce(self.grad, self.group, async_op=True)

    def finish_step(self) -> None:
        """Wait until `grad` is the sum over all ranks and micro-batches. Call this after the last backward."""
        self.check_complete()
        if self.reducing:
            self.reducing.wait()

    def check_complete(self) -> None:
        assert self.missing == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.missing} gradients"


def assign_to_buckets(units: Units, bucket_mb: float, groups: Groups,
                      kind: Callable[[Spec], Hashable] = lambda spec: None) -> list[dict[nn.Parameter, int]]:
    """The parameters of each bucket -> gradients per micro-batch. A bucket is filled with parameters of consecutive
    units of one stage, of one kind and data axis, and closed when it has bucket_mb of gradients (0: after each unit).
    Sizes are those of the tp rank that has most, so that all have the same buckets. A parameter of several units, or of
    several pipeline ranks (by "tie": of the first and the last), is alone: its bucket is the same on all."""
    units_with = Counter(param for modules in units.values() for unit in modules for param in unit.parameters())
    # One gradient per stage: autograd adds up those of its units, and parameters() of all of them lists it once.
    stages_with = Counter(param for modules in units.values() for param in nn.ModuleList(modules).parameters())
    shared = {param for param in units_with if units_with[param] > 1 or "tie" in param.spec.along}
    buckets = [[param] for param in units_with if param in shared]
    for modules in units.values():
        filling: dict[Hashable, list[nn.Parameter]] = {}  # data axis, kind -> the bucket to which units are added
        for unit in modules:
            for param in unit.parameters():
                if param not in shared:
                    filling.setdefault((param.spec.data_axis, kind(param.spec)), []).append(param)
            for alike, params in list(filling.items()):
                size = sum(most_elements(param.spec, groups) * acc_dtype(param.dtype).itemsize for param in params)
                if size >= bucket_mb * 1e6:
                    buckets.append(filling.pop(alike))
        buckets += filling.values()
    return [{param: stages_with[param] for param in params} for params in buckets]


# ---- demo: python dp.py ---------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    for way, bucket_mb in ("per parameter", 0), ("bucketed", 0.09):
        sent.clear()
        layers, events = [parameter(Spec(f"{i}", (64, 64)), {}, torch.float64) for i in range(1, 7)], []
        units = {0: [nn.ParameterList([weight]) for weight in layers]}
        buckets = [Bucket(params, {"dp": group}) for params in assign_to_buckets(units, bucket_mb, {})]
        for weight in layers:  # this hook runs after the bucket's
            weight.register_post_accumulate_grad_hook(
                lambda weight, events=events: events.append(f"g{weight.spec.name} {sent[group.axis]:7,}"))
        for bucket in buckets:
            bucket.begin_step(micro_batches=1)
        x = torch.ones(1, 64, dtype=torch.float64)
        for weight in layers:
            x = x @ weight
        x.sum().backward()
        for bucket in buckets:
            bucket.finish_step()
        if group.rank == 0:
            print(f"{way:13s}", *events, "bytes sent, or being sent", sep="  ")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
