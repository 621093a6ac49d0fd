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
from typing import NamedTuple

import torch
from torch.autograd import Function

from collectives import Group, all_gather
from param import at_least_fp32, rank, size


class Arena:
    """Memory for `slots` checkpoints, taken once and never returned, so nothing can fragment it."""

    def __init__(self, slots: int, x: torch.Tensor, group: Group = None):
        """x: anything with the shape and dtype of a whole checkpoint, which the ranks of the group share equally.

        Raises ValueError where they do not divide it.
        """
        if x.numel() % size(group):
            raise ValueError(f"{size(group)} ranks cannot share a checkpoint of {x.numel()} elements in equal parts")
        self.group, self.shape = group, x.shape
        self.parts = x.new_empty(slots, x.numel() // size(group))
        self.whole = x.new_empty(x.numel() if size(group) > 1 else 0)
        self.unused = list(reversed(range(slots)))

    def keep(self, x: torch.Tensor) -> int:
        """Store this rank's part of x; returns the slot."""
        slot = self.unused.pop()
        self.parts[slot].copy_(x.reshape(size(self.group), -1)[rank(self.group)])
        return slot

    def restore(self, slot: int) -> torch.Tensor:
        """The whole again, valid until the next one is restored or kept."""
        self.unused.append(slot)
        if size(self.group) == 1:
            return self.parts[slot].view(self.shape)
        all_gather(self.whole, self.parts[slot], self.group)
        return self.whole.view(self.shape)


class Recomputed(Function):
    """run(*inputs), of which nothing but the inputs is kept.

    run_again: what backward calls. It returns the same, or tensors whose sum would be the same, so that it can leave
    out what only the value needs. arena: where to keep the only input; None leaves inputs to autograd, which costs
    nothing where somebody else keeps them anyway.
    """

    @staticmethod
    def forward(ctx, run: Callable, run_again: Callable, arena: Arena | None, *inputs: torch.Tensor):
        ctx.run_again, ctx.arena = run_again, arena
        if arena is None:
            ctx.save_for_backward(*inputs)
        else:
            ctx.slot = arena.keep(*inputs)
        return run(*inputs)  # autograd is off in here

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.saved_tensors if ctx.arena is None else (ctx.arena.restore(ctx.slot),)
        inputs = [x.detach().requires_grad_() for x in kept]
        with torch.enable_grad():
            terms = ctx.run_again(*inputs)
        terms = terms if isinstance(terms, tuple) else (terms,)
        torch.autograd.backward(terms, [grad] * len(terms))
        return None, None, None, *(x.grad for x in inputs)


# ---- what is kept, and what is computed twice -----------------------------------------------------------------------

MODES = ("none", "selective", "full")


class Part(NamedTuple):
    """Something that a layer keeps: bytes a token, if a rank shares nothing; the last of MODES in which it is kept;
    whether tensor parallelism cuts it ("tp"), or sequence parallelism alone ("sp"), or nothing ("")."""
    what: str
    nbytes: float
    kept: str
    cut: str


def kept(layer: list[Part], mode: str, t: int = 1, sequence: bool = True) -> float:
    """Bytes a token that a layer keeps on each of t ranks. Without sequence parallelism "sp" parts are whole there."""
    return sum(part.nbytes / (t if part.cut in (("tp", "sp") if sequence else ("tp",)) else 1) for part in layer
               if MODES.index(part.kept) >= MODES.index(mode))


def gpt_layer(hidden: int, heads: int, seq: int) -> list[Part]:
    """The layer of Korthikanti et al. 2022, section 4: 16 bits, GELU, dropout, scores kept. s b h (34 + 5 a s / h)."""
    h, scores = hidden, heads * seq
    return [Part("input", 2 * h, "full", "sp"), Part("first norm's result", 2 * h, "selective", "sp"),
            Part("q, k, v", 6 * h, "selective", "tp"), Part("softmax", 2 * scores, "none", "tp"),
            Part("dropout of it", 2 * scores, "none", "tp"), Part("its mask", scores, "none", "tp"),
            Part("attention's result", 2 * h, "selective", "tp"), Part("dropout mask", h, "selective", "sp"),
            Part("second norm's input", 2 * h, "selective", "sp"), Part("its result", 2 * h, "selective", "sp"),
            Part("GELU's input", 8 * h, "selective", "tp"), Part("its result", 8 * h, "selective", "tp"),
            Part("dropout mask", h, "selective", "sp")]


def llama_layer(model, seq: int, dtype: torch.dtype, attention: str = "auto", t: int = 1,
                keep: bool = False) -> list[Part]:
    """A block of model.py. model: a config.Model. t: above kv_heads, keys and values exist t / kv_heads times.

    attention: "math" keeps scores, and copies of what it multiplied. keep: what norms give is kept as gathered.
    """
    H, N, K, F = model.hidden, model.heads * model.head_dim, max(model.kv_heads, t) * model.head_dim, model.ffn
    one, wide = dtype.itemsize, at_least_fp32(dtype).itemsize
    qkv, taken = (N + 2 * K) * one, (N + 2 * K) * one  # what the matmul gives; what attention takes, turned in place
    if model.qk_norm:
        taken = (N + K) * one
        qkv += taken + (model.heads + max(model.kv_heads, t)) * wide
    result = "" if keep else "sp"
    layer = [
        Part("input", H * one, "full", "sp"), Part("first norm's result", H * one, "none", result),
        Part("q, k, v", qkv, "selective", "tp"), Part("attention's result", N * one, "selective", "tp"),
        Part("second norm's input", H * one, "selective", "sp"), Part("its result", H * one, "none", result),
        Part("statistics of both norms", 2 * wide, "none", "sp"),
        Part("gate and up", 2 * F * one, "selective", "tp"), Part("SwiGLU's result", F * one, "none", "tp")]
    if attention == "math":
        scores = model.heads * seq * (wide if one == wide else wide + one)  # softmax, and its result rounded
        copies = (2 * wide + one) * N - taken  # made of what it takes, which is not kept, then
        layer += [Part("scores", scores, "none", "tp"), Part("copies", copies, "none", "tp")]
    else:
        layer.append(Part("softmax's denominators", model.heads * wide, "selective", "tp"))
    return layer


def extra_flops(model, seq: int, mode: str, attention: str = "auto") -> float:
    """What a token costs a second time in a block: in full mode its forward but for the last matmul."""
    H, N, K, F = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim, model.ffn
    scores = 4 * N * seq  # q k^T and softmax v, which torch counts whole though half is masked
    if mode == "full":
        return 2 * H * (N + 2 * K) + scores + 2 * N * H + 2 * H * 2 * F
    return scores if mode == "selective" and attention == "math" else 0


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
                run = layer(weight)
                y = run(y) if name == "everything" else Recomputed.apply(run, run, arena, y)
            kept = meter.live()["other"]
            y.sum().backward()
        bar = "█" * round(kept / x.nbytes)
        print(f"    {name:14s} {kept / 1e6:5.2f} MB  {meter.flops / 1e6:5.0f} MFLOP   {bar}  (█ = an input)")


if __name__ == "__main__":
    demo()
