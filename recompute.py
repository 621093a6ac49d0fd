"""Recomputation: forward keeps the input of a layer instead of all its activations, and backward runs the layer again.

Saves: all activations of a layer but its input; 1/n of that where n ranks hold the same input and share it.
Costs: one more forward, a third more FLOPs; shared among ranks, one all-gather of the input a layer.
Stops helping when: the layers' inputs themselves, the logits or the model state are what fills the memory.

    forward    x ──► [ layer 1 ] ──► y ──► [ layer 2 ] ──► z        kept: x, y, and of what is in [ ] nothing
    backward   y ──► [ layer 2 ] again, with autograd, then back through it;  x ──► [ layer 1 ] again, ...

Shared. Tensor parallel ranks (without sequence parallelism) hold the same x between layers, n times. ZeRO-R lets each
keep 1/n of it, flat, and gathers it again just before it is needed:

    bytes kept of a layer, x being |x| bytes     all activations  ►  |x|  ►  |x| / n
    sent a rank and layer                        (n-1)/n |x|, a twelfth on top of what tensor parallelism with
                                                 recomputation sends: six all-reduces, 2 (n-1)/n |x| each

In one piece. Long-lived checkpoints between short-lived activations fragment memory, so they live in an arena that is
allocated once: after the first step nothing that is kept makes a storage of its own.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Rajbhandari et al. 2020, ZeRO, sections 6 and 8 (P_a:
shared checkpoints, M_D: the arena). Letters: n ranks.
"""
from collections.abc import Callable

import torch
from torch.autograd import Function

from collectives import Group, all_gather
from param import rank, size


class Arena:
    """Memory for `slots` checkpoints, taken once and never returned, so nothing can fragment it."""

    def __init__(self, slots: int, x: torch.Tensor, group: Group = None):
        """x: anything with the shape and dtype of a whole checkpoint, which the ranks of the group share equally.

        Raises ValueError where they do not divide it.
        """
        if x.numel() % size(group):
            raise ValueError(f"{size(group)} ranks cannot share a checkpoint of {x.numel()} elements in equal parts")
        self.group, self.shape = group, x.shape
        self.parts, self.whole = x.new_empty(slots, x.numel() // size(group)), x.new_empty(x.numel())
        self.unused = list(reversed(range(slots)))

    def keep(self, x: torch.Tensor) -> int:
        """Store this rank's part of x; returns the slot."""
        slot = self.unused.pop()
        self.parts[slot].copy_(x.reshape(size(self.group), -1)[rank(self.group)])
        return slot

    def restore(self, slot: int) -> torch.Tensor:
        """The whole again, valid until the next one is restored."""
        all_gather(self.whole, self.parts[slot], self.group)
        self.unused.append(slot)
        return self.whole.view(self.shape)


class Recomputed(Function):
    """y = run(x), of which x alone is kept, in an arena."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], arena: Arena):
        ctx.run, ctx.arena, ctx.slot = run, arena, arena.keep(x)
        return run(x)  # autograd is off in here

    @staticmethod
    def backward(ctx, grad):
        x = ctx.arena.restore(ctx.slot).detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None, None


# ---- demo: python recompute.py --------------------------------------------------------------------------------------

def demo() -> None:
    from meter import Meter

    x = torch.randn(4, 64, 128, requires_grad=True)
    weights = [torch.randn(128, 128, requires_grad=True) for _ in range(8)]

    def layer(weight):
        return lambda x: x + torch.tanh(torch.sigmoid(x @ weight) * x).square()

    print("Eight layers. Kept between forward and backward, and FLOPs of both:\n")
    for name in ("everything", "inputs alone"):
        meter = Meter()
        meter.label("before", x, *weights)
        with meter:
            arena, y = Arena(len(weights), x), x
            for weight in weights:
                y = layer(weight)(y) if name == "everything" else Recomputed.apply(y, layer(weight), arena)
            kept = meter.live()["other"]
            y.sum().backward()
        bar = "█" * round(kept / x.nbytes)
        print(f"    {name:14s} {kept / 1e6:5.2f} MB  {meter.flops / 1e6:5.0f} MFLOP   {bar}  (█ = an input)")


if __name__ == "__main__":
    demo()
