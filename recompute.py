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

What to recompute. Korthikanti et al. 2022 drop attention's scores alone. `python recompute.py` prints, for each thing
that a layer keeps, its bytes a token and what share of a step's FLOPs it takes to make it again. Do their numbers hold?

1. For their own layer, yes: GPT-3 keeps 1,401 kB a token, 70% of it scores, which 0.9% more FLOPs bring back (the paper
   says 2.7%, counting three times the core's forward, as if its backward ran again too; Megatron runs the forward).
2. With fused attention, no: scores are never kept, and of a Llama 8B layer's 139 kB norms and SwiGLU, which cost no
   matmul at all, are the 32% that selective recomputation drops.
3. Mixtral is like Llama, only wider: two experts' gate, up and SwiGLU are 67% of 258 kB, and it drops 29%.
4. DeepSeek-V3 is not: its experts are narrow and many, so 40% of 572 kB are tokens sent to experts and their results,
   which only another exchange would bring back, and selective recomputation drops 12%.
5. What scores were to GPT-3, queries, keys and values are to DeepSeek-V3: 23% of the bytes, made from narrow vectors
   with 2.4% of the FLOPs; so what is worth recomputing is a question to each architecture, answered by such a table.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Rajbhandari et al. 2020, ZeRO, sections 6 and 8 (P_a:
shared checkpoints, M_D: the arena); Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models, sections 4 and 5. Letters: n ranks.
"""
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
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


def forgetting(x: torch.Tensor, again: Callable[[], torch.Tensor]) -> AbstractContextManager:
    """What is saved for a backward in this context, and is x or a view of it, is not kept: `again` computes x anew."""
    place = x.untyped_storage()._cdata  # the object itself: where its data is will not do, as all that is empty is at 0

    def pack(saved: torch.Tensor):
        same = saved.untyped_storage()._cdata == place
        return (saved.shape, saved.stride(), saved.storage_offset()) if same else saved

    return torch.autograd.graph.saved_tensors_hooks(
        pack, lambda packed: again().as_strided(*packed) if isinstance(packed, tuple) else packed)


# ---- what is kept, and what is computed twice -----------------------------------------------------------------------

MODES = ("none", "selective", "full")


class Part(NamedTuple):
    """Something that a layer makes: bytes a token, if a rank shares nothing; the last of MODES in which it is kept;
    whether tensor parallelism cuts it ("tp"), or sequence parallelism alone ("sp"), or nothing (""); FLOPs a token."""
    what: str
    nbytes: float
    kept: str
    cut: str
    flops: float = 0


def kept(layer: list[Part], mode: str, t: int = 1, sequence: bool = True) -> float:
    """Bytes a token that a layer keeps on each of t ranks. Without sequence parallelism "sp" parts are whole there."""
    return sum(part.nbytes / (t if part.cut in (("tp", "sp") if sequence else ("tp",)) else 1) for part in layer
               if MODES.index(part.kept) >= MODES.index(mode))


def extra_flops(layer: list[Part], mode: str) -> float:
    """What a token costs a second time: whatever is not kept. The last matmul's result is the next layer's input."""
    return sum(part.flops for part in layer if MODES.index(part.kept) < MODES.index(mode))


def gpt_layer(hidden: int, heads: int, seq: int) -> list[Part]:
    """The layer of Korthikanti et al. 2022, section 4: 16 bits, GELU, dropout, scores kept. s b h (34 + 5 a s / h).

    FLOPs of attention are those of all scores, visible or not, as the paper and torch count them.
    """
    h, scores = hidden, heads * seq
    return [Part("input", 2 * h, "full", "sp"), Part("first norm's result", 2 * h, "selective", "sp"),
            Part("q, k, v", 6 * h, "selective", "tp", 6 * h * h),
            Part("softmax", 2 * scores, "none", "tp", 4 * h * seq),  # q k^T, and softmax v, which runs again with it
            Part("dropout of it", 2 * scores, "none", "tp"), Part("its mask", scores, "none", "tp"),
            Part("attention's result", 2 * h, "selective", "tp"), Part("dropout mask", h, "selective", "sp", 2 * h * h),
            Part("second norm's input", 2 * h, "selective", "sp"), Part("its result", 2 * h, "selective", "sp"),
            Part("GELU's input", 8 * h, "selective", "tp", 8 * h * h), Part("its result", 8 * h, "selective", "tp"),
            Part("dropout mask", h, "selective", "sp"), Part("next layer's input", 0, "full", "sp", 8 * h * h)]


def llama_layer(model, seq: int, dtype: torch.dtype, attention: str = "auto", t: int = 1, keep: bool = False,
                number: int = -1, fp8: float = 0.0, **routing: bool) -> list[Part]:
    """Block `number` of model.py. model: a config.Model. t: above kv_heads, keys and values exist t / kv_heads times.

    attention: "math" keeps scores, and copies of what it multiplied. keep: what norms give is kept as gathered.
    fp8: bytes of an element, with its scale, in which linear layers keep inputs; 0: in `dtype`. routing: see
    experts_layer.
    """
    half = llama_attention(model, seq, dtype, attention, t, keep)
    experts = model.experts and number % model.layers >= model.dense_layers
    other = (experts_layer(model, dtype, keep, **routing) if experts else
             swiglu(model.hidden, model.ffn, dtype, "" if keep else "sp"))
    return inputs_in_fp8(half, fp8 / dtype.itemsize) + inputs_in_fp8(other, fp8 / dtype.itemsize) if fp8 else (
        half + other)


def inputs_in_fp8(half: list[Part], smaller: float) -> list[Part]:
    """Half a block whose linear layers keep inputs in FP8, `smaller` times the bytes: in place of what nobody else
    keeps, beside what attention and the router do."""
    routed = any(part.what == "tokens sent" for part in half)
    out = []
    for part in half:
        form = part._replace(what=part.what + ", in FP8", nbytes=part.nbytes * smaller, flops=0)
        if part.what in ("SwiGLU's result", "shared SwiGLU", "tokens sent") or (
                part.what == "norm's result" and not routed):
            out.append(form._replace(flops=part.flops))
        elif part.what == "experts' SwiGLU":  # its FP8 form is kept where it would be made again
            out.append(form._replace(kept="selective"))
        elif part.what == "attention's result" or (
                part.what == "norm's result" and any(other.what == "shared SwiGLU" for other in half)):
            out += [part, form]
        else:
            out.append(part)
    return out


def llama_attention(model, seq: int, dtype: torch.dtype, attention: str = "auto", t: int = 1,
                    keep: bool = False) -> list[Part]:
    H, N, K = model.hidden, model.heads * model.head_dim, max(model.kv_heads, t) * model.head_dim
    one, wide = dtype.itemsize, at_least_fp32(dtype).itemsize
    qkv, taken = (N + 2 * K) * one, (N + 2 * K) * one  # what the matmul gives; what attention takes, turned in place
    if model.qk_norm:
        taken = (N + K) * one
        qkv += taken + (model.heads + max(model.kv_heads, t)) * wide
    core, written_out = 4 * N * seq, attention == "math"
    layer = [
        Part("input", H * one, "full", "sp"), Part("norm's result", H * one, "none", "" if keep else "sp"),
        Part("norm's statistic", wide, "none", "sp"), Part("q, k, v", qkv, "selective", "tp", 2 * H * (N + 2 * K)),
        Part("attention's result", N * one, "selective", "tp", 0 if written_out else core),
        Part("sum with the input", H * one, "selective", "sp", 2 * N * H)]
    if written_out:
        scores = model.heads * seq * (wide if one == wide else wide + one)  # softmax, and its result rounded
        copies = (2 * wide + one) * N - taken  # made of what it takes, which is not kept, then
        return [*layer, Part("scores", scores, "none", "tp", core), Part("copies", copies, "none", "tp")]
    return [*layer, Part("softmax's denominators", model.heads * wide, "selective", "tp")]


def swiglu(hidden: int, ffn: int, dtype: torch.dtype, cut: str = "sp") -> list[Part]:
    """The feed-forward half of a block. cut: what cuts the result of its norm."""
    H, F, one, wide = hidden, ffn, dtype.itemsize, at_least_fp32(dtype).itemsize
    return [
        Part("norm's result", H * one, "none", cut), Part("norm's statistic", wide, "none", "sp"),
        Part("gate and up", 2 * F * one, "selective", "tp", 4 * H * F), Part("SwiGLU's result", F * one, "none", "tp"),
        Part("next layer's input", 0, "full", "sp", 2 * F * H)]


def latent_attention(hidden: int, heads: int, seq: int, dtype: torch.dtype, q_rank: int, kv_rank: int, width: int,
                     turned: int) -> list[Part]:
    """Attention of DeepSeek-V3 (MLA) with fused scores: queries, keys and values made from two narrow vectors.

    width: of a head, besides `turned` channels of it that carry rotary angles, one set of keys for all heads.
    """
    H, one, wide, wider = hidden, dtype.itemsize, at_least_fp32(dtype).itemsize, heads * (width + turned)
    narrow = q_rank + kv_rank + turned
    return [
        Part("input", H * one, "full", "sp"), Part("norm's result", H * one, "none", "sp"),
        Part("norm's statistic", wide, "none", "sp"), Part("narrow", narrow * one, "selective", "sp", 2 * H * narrow),
        Part("their norms' results", (q_rank + kv_rank) * one + 2 * wide, "none", "sp"),
        Part("q, k, v", (2 * wider + heads * width) * one, "selective", "tp",
             2 * q_rank * wider + 4 * kv_rank * heads * width),
        Part("attention's result", heads * width * one, "selective", "tp", 2 * seq * heads * (2 * width + turned)),
        Part("softmax's denominators", heads * wide, "selective", "tp"),
        Part("sum with the input", H * one, "selective", "sp", 2 * heads * width * H)]


def experts_layer(model, dtype: torch.dtype, keep: bool = False, aux: bool = True, z: bool = False,
                  travels: bool = False) -> list[Part]:
    """The feed-forward half of a block with experts (ep.py), which get equally many tokens. model: a config.Model.

    aux, z: whether these losses are there. travels: to other ranks. What was sent to an expert is kept in every mode
    but full, since to have it again is to send it again; what routing chose is kept always, see ep.py.
    """
    H, F, E, k, one, wide = (model.hidden, model.expert_ffn, model.experts, model.top_k, dtype.itemsize,
                             at_least_fp32(dtype).itemsize)
    scores = 1 + aux + z  # times E: scores, prices, logits
    numbers = k + model.router_norm * (k + 1) + aux * (model.router == "sigmoid") + 2 * z
    parts = [
        Part("norm's result", H * one, "none", "sp"), Part("norm's statistic", wide, "selective", "sp"),
        Part("router's scores", scores * E * wide, "selective", "tp", 2 * H * E),
        Part("weights", numbers * wide, "selective", "tp"),
        Part("choices and places", (40 if travels else 24) * k, "full", "tp"),
        Part("tokens sent", k * H * one, "selective", "tp"),
        Part("experts' gate and up", 2 * k * F * one, "selective", "tp", 4 * H * k * F),
        Part("experts' SwiGLU", k * F * one, "none", "tp"),
        Part("experts' results", k * H * one, "selective", "tp", 2 * k * F * H)]  # for the gradient of their weights
    if model.shared_experts:
        width = model.shared_experts * F
        parts += [Part("shared gate and up", 2 * width * one, "selective", "tp", 4 * H * width),
                  Part("shared SwiGLU", width * one, "none", "tp")]
        parts += [Part("norm's result, gathered", H * one, "none", "")] if keep else []
    return [*parts, Part("next layer's input", 0, "full", "sp", 2 * model.shared_experts * F * H)]


# ---- demo: python recompute.py --------------------------------------------------------------------------------------

def examples() -> dict[str, list[Part]]:
    import config

    bf16 = torch.bfloat16
    llama, mixtral, deepseek = (config.parse(["--preset", name]).model
                                for name in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3-gqa"))
    return {"GPT-3, 2048 tokens": gpt_layer(12288, 96, 2048), "Llama 8B, 4096": llama_layer(llama, 4096, bf16),
            "Mixtral 8x7B, 4096": llama_layer(mixtral, 4096, bf16),
            "DeepSeek-V3, 4096": latent_attention(7168, 128, 4096, bf16, 1536, 512, 128, 64)
            + experts_layer(deepseek, bf16)}


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
            nbytes = meter.live()["other"]
            y.sum().backward()
        bar = "█" * round(nbytes / x.nbytes)
        print(f"    {name:14s} {nbytes / 1e6:5.2f} MB  {meter.flops / 1e6:5.0f} MFLOP   {bar}  (█ = an input)")
    print("\nBytes a token that a layer keeps, and the FLOPs that making it again adds to a step (16 bits):")
    for title, layer in examples().items():
        total = 3 * sum(part.flops for part in layer)  # a backward costs two forwards
        print(f"\n    {title:22s}" + "".join(f"   {mode} {kept(layer, mode) / 1e3:.0f} kB" + (
            f" +{extra_flops(layer, mode) / total:.1%}" if mode != "none" else "") for mode in MODES))
        for mode, dropped_by in zip(MODES, MODES[1:]):
            parts = [part for part in layer if part.kept == mode and part.nbytes > 0.005 * kept(layer, "none")]
            text = f"{dropped_by} drops " + ", ".join(
                f"{part.what} {part.nbytes / 1e3:.0f} kB" + (f" +{part.flops / total:.1%}" if part.flops else "")
                for part in parts)
            print(textwrap.fill(text, 112, initial_indent=6 * " ", subsequent_indent=8 * " "))


if __name__ == "__main__":
    demo()
