"""The gradient noise scale, measured while training: up to which size a larger batch is worth its tokens.

The gradient of a batch of b tokens is the true gradient G plus noise of covariance S/b. In expectation its squared norm
is |G|^2 + tr(S)/b. Data parallel training has gradients of two batch sizes in every step: each rank's own gradient
before the reduction (b = B/n) and the reduced one (b = B). Two equations give both unknowns:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

Both estimates are unbiased but noisy: average them over steps before dividing. tr(S) / |G|^2, in tokens, is the batch
at which a step makes half of the progress of an infinite batch; smaller ones waste steps, larger ones tokens.

The norms cost one pass over the gradients and no collective: they are summed together with the clipping norm. Excluded
are experts and parameters whose gradient is partial over tensor parallel ranks (norms). At ZeRO levels 2 and 3 every
micro-batch is reduced, so b is the size of a rank's micro-batch. Context parallelism is not supported: its ranks share
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
    """Measures the noise of the gradients of an Optimizer (zero.py). ranks: the number of data parallel ranks."""

    def __init__(self, optimizer, ranks: int):
        self.buckets, self.ranks = optimizer.buckets, ranks
        self.reductions = 0  # of the first bucket in this step: 1, or one per micro-batch
        self.local = torch.zeros((), dtype=self.buckets[0].acc_dtype, device=self.buckets[0].device)
        self.sums = self.local.new_zeros(2)  # of the last step: |g_B|^2, and the sum over ranks of |b/B g_b|^2
        optimizer.noise = self
        for bucket in self.buckets:
            bucket.before_reduction = partial(self.add_local, bucket)

    def counts(self, bucket, spec: Spec) -> bool:
        """Whether this rank counts the parameter: one of the ranks with the same shard and the same tokens does."""
        return not spec.partial_axes and spec.data_axis == "dp" and is_first_replica(spec, bucket.groups)

    def add_local(self, bucket) -> None:
        """Add the bucket's squared local norm. The bucket calls this just before it is reduced."""
        if bucket is self.buckets[0]:
            self.reductions += 1
        for start, stop, spec in bucket.spans:
            if self.counts(bucket, spec):
                self.local += torch.linalg.vector_norm(bucket.grad[start:stop]).square()

    def squares(self) -> list[torch.Tensor]:
        """This rank's terms of `sums`, two scalars; call it after the reductions of a step."""
        large = torch.zeros_like(self.local)
        for bucket in self.buckets:
            for start, stop, spec in bucket.spans:
                if self.counts(bucket, spec) and bucket.owns(spec):
                    large += torch.linalg.vector_norm(bucket.within_shard(bucket.grad_shard, start, stop)).square()
        return [large, self.local]

    def receive(self, sums: torch.Tensor, unscale: torch.Tensor | float) -> torch.Tensor:
        """Store `squares` and return the squared norm. sums [3]: both, summed over ranks. unscale: 1 / loss scale."""
        self.sums = sums[1:] * unscale ** 2
        self.count, self.reductions = self.ranks * self.reductions, 0
        self.local = torch.zeros_like(self.local)
        return sums[0]

    def estimate(self, tokens: int) -> dict[str, torch.Tensor]:
        """Estimates of the last step, scalars: noise_gradient2, |G|^2, and noise_trace, tr(S). tokens: B."""
        large, small = self.sums.double().unbind()
        gradient2, trace = solve(tokens / self.count, small * self.count, tokens, large)
        return dict(noise_gradient2=gradient2, noise_trace=trace)
