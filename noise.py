"""The gradient noise scale: how large a batch is worth its tokens, measured while training.

The gradient of a batch of b tokens is the true gradient G plus noise of covariance S/b. In expectation its squared norm
is |G|^2 + tr(S)/b. Data parallel training has such a norm at two sizes in every step, for nothing: that of each rank's
own gradient before the reduction (b = B/n) and that of the reduced one (b = B). Two equations give both unknowns:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

each without bias, and noisy: average them over steps before dividing. tr(S) / |G|^2, in tokens, is the batch at which a
step makes half of the progress that an endless batch would; much smaller batches waste steps, much larger ones tokens.

The norms cost a pass over the gradients, and no collective: they are summed with the clipping norm. They are those of
all parameters but experts and those whose gradient is a sum over tensor parallel ranks (norms). At ZeRO levels 2 and 3
each micro-batch is reduced, so b is that of a rank's micro-batch. Not with context parallelism, where ranks share
sequences, whose tokens are not independent.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1.
Shapes: n ranks, B tokens per step, b tokens per local gradient.
"""
from functools import partial

import torch

from param import Spec, is_first_replica


def solve(b: float, small: float, B: float, large: float) -> tuple[float, float]:
    """(|G|^2, tr(S)) from the squared norms `small` and `large` of gradients of b and of B tokens."""
    return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


class GradientNoise:
    """Measures the noise of an Optimizer's gradients (zero.py) over so many data parallel ranks."""

    def __init__(self, optimizer, ranks: int):
        self.buckets, self.ranks = optimizer.buckets, ranks
        self.reductions = 0  # of the first bucket, in this step
        self.local = torch.zeros((), dtype=self.buckets[0].acc_dtype, device=self.buckets[0].device)
        self.sums = self.local.new_zeros(2)  # of the last step: |g_B|^2, and the sum of all |b/B g_b|^2
        optimizer.noise = self
        for bucket in self.buckets:
            bucket.before_reduction = partial(self.add_local, bucket)

    def counts(self, bucket, spec: Spec) -> bool:
        """Whether this rank, of those with the same shard and the same tokens, counts such a parameter."""
        return not spec.partial_axes and spec.data_axis == "dp" and is_first_replica(spec, bucket.groups)

    def add_local(self, bucket) -> None:
        """Just before a bucket is reduced."""
        self.reductions += bucket is self.buckets[0]
        for start, stop, spec in bucket.spans:
            if self.counts(bucket, spec):
                self.local += torch.linalg.vector_norm(bucket.grad[start:stop]).square()

    def squares(self) -> list[torch.Tensor]:
        """This rank's terms of `sums`, after the reductions of a step."""
        large = torch.zeros_like(self.local)
        for bucket in self.buckets:
            for start, stop, spec in bucket.spans:
                if self.counts(bucket, spec) and bucket.owns(spec):
                    large += torch.linalg.vector_norm(bucket.within_shard(bucket.grad_shard, start, stop)).square()
        return [large, self.local]

    def receive(self, sums: torch.Tensor, unscale: torch.Tensor | float) -> torch.Tensor:
        """sums: over all ranks, of the squared norm and of `squares`. unscale: 1 / loss scale. Returns the first."""
        self.sums = sums[1:] * unscale ** 2
        self.count, self.reductions = self.ranks * self.reductions, 0
        self.local = torch.zeros_like(self.local)
        return sums[0]

    def estimate(self, tokens: int) -> dict[str, float]:
        """noise_gradient2 and noise_trace of the last step, which had so many tokens."""
        large, small = self.sums.tolist()
        gradient2, trace = solve(tokens / self.count, small * self.count, tokens, large)
        return dict(noise_gradient2=gradient2, noise_trace=trace)
