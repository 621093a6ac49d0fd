"""The optimizer: AdamW in mixed precision on the flat buckets of dp.py. Every rank holds all its state (ZeRO stage 0).

Saves: nothing; it makes bf16 runs possible. A step moves weights by less than bf16 resolves, so fp32 ones are kept too.
Costs: bytes a parameter, which every data parallel rank holds again:

              weights   gradients   master weights   moments   together
    fp32         4          4        (the weights)     4 + 4       16
    bf16         2          4              4           4 + 4       18

Stops helping when: 16 bytes times the parameters no longer fit beside the activations.

Flat. A bucket's weights, master weights, moments and gradients are five flat tensors with the same places, so an update
is one call per span of equal decay. A parameter's `.data` points into the flat weights. What a place is, as a box of a
global tensor, is recovered by `pieces`, in which every element appears once; values come in by it and leave by it.

Once. The gradient's norm is taken over the whole model: every element counts on exactly one rank, its owner, and the
squares are summed over the world. All ranks clip by the same number, and skip the step together when it is not finite.

Loshchilov & Hutter 2019 (AdamW); Micikevicius et al. 2018 (master weights); Rajbhandari et al. 2020 (bytes, 3.1).
"""
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from collectives import all_reduce
from dp import Bucket, Chunks, DataParallel
from param import Box, Groups, Source, boxes, rank


class State(Bucket):
    """A bucket with the weights its gradients belong to and everything the update rule remembers."""

    def __init__(self, params: list[nn.Parameter], arrivals: dict[nn.Parameter, list[int]], groups: Groups):
        super().__init__(params, arrivals, groups)
        self.weights = torch.zeros(self.numel, dtype=params[0].dtype, device=self.device)
        for param in self.params:
            # Through .data, which leaves the parameter its own version counter: a view's would move with every other's.
            param.data = self.view(self.weights, param)
        same = self.weights.dtype == self.exact
        self.master = self.weights if same else torch.zeros_like(self.weights, dtype=self.exact)
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = torch.zeros(len(self.spans), device=self.device)  # one a span: the update rule advances each

    def pieces(self) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """(parameter, box of the global tensor, where it lies in the flat tensors), every local element once."""
        for param in self.params:
            start = self.start[param]
            for local in boxes(tuple(param.shape), 0, param.numel()):
                stop = start + math.prod(part.stop - part.start for part in local)
                box = tuple(slice(part.start + at.start, part.stop + at.start) for part, at in zip(local, param.box))
                yield param, box, slice(start, stop)
                start = stop

    def owns(self, spec) -> bool:
        """Of all ranks that hold the same elements, the first counts and saves them."""
        return rank(self.group) == 0 and not any(rank(self.groups[axis]) for axis in spec.copies)

    def load(self, source: Source, what: str = "master") -> None:
        """Fill the master weights, or "m" or "v", from a source."""
        for param, box, place in self.pieces():
            getattr(self, what)[place] = source(param.spec, box).flatten().to(self.device, self.exact)
        if what == "master":
            self.publish()

    def publish(self) -> None:
        """Let the weights that the model sees be the master weights."""
        if self.master is not self.weights:
            self.weights.copy_(self.master)

    def square(self) -> torch.Tensor:
        """The sum of the squared gradients this rank owns."""
        owned = [torch.linalg.vector_norm(self.grad[start:stop]) for start, stop, spec in self.spans if self.owns(spec)]
        return torch.stack(owned).square().sum() if owned else torch.zeros((), dtype=self.exact, device=self.device)


class Optimizer(DataParallel):
    """Gradients as in dp.py, and the update. First load(source); then each step: begin, backward passes, finish, step.

    rule: "adamw" or "sgd". clip: largest norm of the whole gradient, 0 for none. weight_decay: of matrices only.
    """

    def __init__(self, chunks: Chunks, groups: Groups, bucket_mb: float = 25.0, rule: str = "adamw",
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 clip: float = 1.0):
        super().__init__(chunks, groups, bucket_mb, State)
        self.world, self.rule, self.betas, self.eps = groups["world"], rule, betas, eps
        self.weight_decay, self.clip = weight_decay, clip

    def load(self, source: Source, what: str = "master") -> None:
        for bucket in self.buckets:
            bucket.load(source, what)

    def norm(self) -> torch.Tensor:
        """The norm of the whole gradient, the same on every rank."""
        square = torch.stack([bucket.square() for bucket in self.buckets]).sum()
        all_reduce(square, self.world)
        return square.sqrt()

    def step(self, lr: float) -> torch.Tensor:
        """Clip and update; returns the norm before clipping. A norm that is not finite leaves everything as it was."""
        norm = self.norm()
        found_inf = (~norm.isfinite()).float()
        if self.clip:
            for bucket in self.buckets:
                bucket.grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
        for decays in (True, False):
            spans = [(bucket, index, slice(start, stop)) for bucket in self.buckets
                     for index, (start, stop, spec) in enumerate(bucket.spans) if spec.decay == decays]
            if spans:
                self.update(spans, lr, self.weight_decay if decays else 0.0, found_inf)
        for bucket in self.buckets:
            bucket.publish()
        return norm

    def update(self, spans: list[tuple[State, int, slice]], lr: float, weight_decay: float,
               found_inf: torch.Tensor) -> None:
        """torch's fused update rules, which do nothing if `found_inf` is 1, without asking the device for its value."""
        weights, grads, m, v = ([getattr(bucket, what)[place] for bucket, _, place in spans]
                                for what in ("master", "grad", "m", "v"))
        if self.rule == "adamw":
            adamw(weights, grads, m, v, [], [bucket.steps[index] for bucket, index, _ in spans], fused=True,
                  found_inf=found_inf, amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=lr,
                  weight_decay=weight_decay, eps=self.eps, maximize=False)
        else:
            sgd(weights, grads, [None] * len(weights), fused=True, found_inf=found_inf, lr=lr,
                weight_decay=weight_decay, momentum=0.0, dampening=0.0, nesterov=False, maximize=False)
