"""Activation recomputation: save fewer activations in forward, and compute the others again in backward.

Saves: full: all activations of a block but its input, of which n ranks that hold the same input save 1/n each.
       selective: what a matmul did not make (norms, SwiGLU, scores that attention's kernel would keep).
Costs: full: one more forward, a third more FLOPs, and one all-gather of the input a block where it is sharded.
       selective: no matmul, but the memory traffic of norms and SwiGLU once more.
Stops helping when: the blocks' inputs themselves, the logits or the model state are what fills the memory.

    full       forward    x ──► [ block 1 ] ──► y ──► [ block 2 ] ──► z     saved: x, y, and of what is in [ ] nothing
               backward   y ──► [ block 2 ] once more, with autograd, then its backward;  x ──► [ block 1 ] ...

    selective  forward    x ──► norm ──► h ──► linear ──► ...               saved: x; instead of h, how to make it
               backward   the linear's backward asks for h: x ──► norm ──► h; norm's own backward uses the same run

Selective. A model writes `cheap(f, x)` for `f(x)` where f costs little. While `selective()` is on, the result of f is
marked. A layer that reads it saves its inputs as always, only inside `dropping_cheap()`: there hooks replace whatever
is marked, or is a view of it, by a note from which it is recomputed.

Full. `Recompute("full")(block, x)` keeps x alone. The block runs a second time with `is_recomputing()` true: then
decisions are taken from the first run (`once`), inputs that were gathered are kept, since the backward that uses them
follows at once, and the last matmul is left out, since nobody reads its result.

Sharded checkpoints. Tensor parallel ranks (without sequence parallelism) hold the same x between layers. ZeRO-R lets
each of n ranks save 1/n of it, flat, and all-gathers it just before it is needed:

    bytes saved of a block, x being |x| bytes    all activations  ►  |x|  ►  |x| / n
    sent a rank and block                        (n-1)/n |x|, a twelfth on top of what tensor parallelism with
                                                 recomputation sends: six all-reduces, 2 (n-1)/n |x| each

Long-lived checkpoints between short-lived activations fragment memory, so they live in an arena that is allocated once:
after the first step nothing that is saved makes a storage of its own.

What to recompute. Korthikanti et al. 2022 drop attention's scores alone. `python recompute.py` prints, for each thing
that a layer saves, its bytes a token and the share of a step's FLOPs that recomputing it takes. Do their numbers hold?

1. For their own layer, yes: GPT-3 saves 1,401 kB a token, 70% of it scores, which 0.9% more FLOPs bring back (the paper
   says 2.7%, counting three times the core's forward, as if its backward ran twice, too; Megatron runs the forward).
2. With fused attention, no: scores are never saved, and of a Llama 8B layer's 139 kB, norms and SwiGLU, which cost no
   matmul at all, are the 32% that selective recomputation drops.
3. Mixtral is like Llama, only wider: two experts' gate, up and SwiGLU are 67% of 258 kB, and it drops 29%.
4. DeepSeek-V3 is not: its experts are narrow and many, so 40% of 572 kB are tokens dispatched to experts and their
   results, which only another exchange would bring back, and selective recomputation drops 12%.
5. What scores were to GPT-3, queries, keys and values are to DeepSeek-V3: 23% of the bytes, made from narrow vectors
   with 2.4% of the FLOPs; so what is worth recomputing is a question to each architecture, answered by such a table.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Rajbhandari et al. 2020, ZeRO, sections 6 and 8 (P_a:
sharded checkpoints, M_D: the arena); Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models, sections 4 and 5. Shapes: n ranks.
"""
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from collectives import Group, all_gather, rank, size

# ---- selective ------------------------------------------------------------------------------------------------------

class Recipe:
    """How to make a tensor again. What it makes is shared by all who ask, until the backward of `function` is over."""

    def __init__(self, function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]):
        self.function, self.inputs, self.output = function, inputs, None

    def run(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """(inputs, output), and the graph between them."""
        if self.output is None:
            self.inputs = tuple(x.detach().requires_grad_() for x in self.inputs)
            with torch.enable_grad():
                self.output = self.function(*self.inputs)
        return self.inputs, self.output


# While `selective` is on: storages that need not be saved, each with the recipe for what it holds. Weak references: a
# table that kept them alive would save what it is meant to drop.
_recipes: WeakIdKeyDictionary | None = None


@contextmanager
def selective(on: bool = True) -> Iterator[None]:
    """In here, `cheap` marks what it computes."""
    global _recipes
    _recipes = WeakIdKeyDictionary() if on and torch.is_grad_enabled() else None
    try:
        yield
    finally:
        _recipes = None


def cheap(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """function(*inputs); while `selective` is on, the inputs are saved for backward instead of the result."""
    if _recipes is None:
        return function(*inputs)
    recipe = Recipe(function, inputs)
    output = Cheap.apply(recipe, *inputs)
    _recipes[output.untyped_storage()] = recipe
    return output


def dropping_cheap() -> AbstractContextManager[None]:
    """In here, functions of autograd do not save what is marked as cheap."""
    return nullcontext() if _recipes is None else saved_tensors_hooks(note_recipe, follow_recipe)


def is_selective() -> bool:
    return _recipes is not None


def is_cheap(x: torch.Tensor) -> bool:
    """Whether saving x, or a view of it, costs no memory."""
    return _recipes is not None and x.untyped_storage() in _recipes


def note_recipe(saved: torch.Tensor) -> torch.Tensor | tuple:
    """What autograd keeps in place of a tensor that it wants to save."""
    recipe = _recipes.get(saved.untyped_storage())
    if recipe is not None:
        return recipe, saved.shape, saved.stride(), saved.storage_offset()
    return saved.detach() if saved.requires_grad else saved  # what its own function saves would else be a cycle


def follow_recipe(noted: torch.Tensor | tuple) -> torch.Tensor:
    """The saved tensor again; autograd detaches it."""
    if isinstance(noted, torch.Tensor):
        return noted
    recipe, *geometry = noted
    _, whole = recipe.run()
    return whole if [whole.shape, whole.stride(), whole.storage_offset()] == geometry else whole.as_strided(*geometry)


class Cheap(Function):
    """recipe.function(*inputs), of which autograd itself keeps nothing: the recipe has the inputs."""

    @staticmethod
    def forward(ctx, recipe: Recipe, *inputs: torch.Tensor):
        ctx.recipe = recipe
        return recipe.function(*inputs)  # autograd is off in here

    @staticmethod
    def backward(ctx, grad):
        inputs, output = ctx.recipe.run()
        ctx.recipe.output = ctx.recipe.inputs = None
        torch.autograd.backward(output, grad)
        return None, *(x.grad for x in inputs)


# ---- full -----------------------------------------------------------------------------------------------------------

class CheckpointArena:
    """Memory for `slots` checkpoints, allocated once and never returned, so that nothing can fragment it."""

    def __init__(self, slots: int, x: torch.Tensor, group: Group = None):
        """x: anything with the shape and dtype of a whole checkpoint, which the ranks of the group share equally.

        Raises ValueError where they do not divide it.
        """
        if x.numel() % size(group):
            raise ValueError(f"{size(group)} ranks cannot share a checkpoint of {x.numel()} elements in equal parts")
        self.group, self.shape = group, x.shape
        self.shards = x.new_empty(slots, x.numel() // size(group))
        self.whole = x.new_empty(x.numel() if size(group) > 1 else 0)
        self.free_slots = list(reversed(range(slots)))

    def save(self, x: torch.Tensor) -> int:
        """Store this rank's shard of x; returns the slot."""
        slot = self.free_slots.pop()
        self.shards[slot].copy_(x.reshape(size(self.group), -1)[rank(self.group)])
        return slot

    def restore(self, slot: int) -> torch.Tensor:
        """The whole checkpoint, valid until the next one is saved or restored."""
        self.free_slots.append(slot)
        if size(self.group) == 1:
            return self.shards[slot].view(self.shape)
        all_gather(self.whole, self.shards[slot], self.group)
        return self.whole.view(self.shape)


_recomputing = False
_decisions: list | None = None  # of the block that runs: made in its first run, used up in its second


def is_recomputing() -> bool:
    """Whether a block runs for the second time, for a backward that follows at once."""
    return _recomputing


def once(decide: Callable[[], Any]) -> Any:
    """decide(), or in the second run of a block what it returned in the first."""
    if _decisions is None:
        return decide()
    if not _recomputing:
        _decisions.append(decide())
        return _decisions[-1]
    return _decisions.pop(0)


@contextmanager
def deciding(decisions: list, recomputing: bool) -> Iterator[None]:
    global _decisions, _recomputing
    _decisions, _recomputing = decisions, recomputing
    try:
        yield
    finally:
        _decisions, _recomputing = None, False


class Checkpoint(Function):
    """block(x), of which x alone is kept, in an arena."""

    @staticmethod
    def forward(ctx, block: Callable[[torch.Tensor], torch.Tensor], arena: CheckpointArena, x: torch.Tensor):
        ctx.block, ctx.arena, ctx.slot, ctx.decisions = block, arena, arena.save(x), []
        with deciding(ctx.decisions, recomputing=False):
            return block(x)  # autograd is off in here

    @staticmethod
    def backward(ctx, grad):
        x = ctx.arena.restore(ctx.slot).detach().requires_grad_()
        with deciding(ctx.decisions, recomputing=True), torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


# ---- what a model uses ----------------------------------------------------------------------------------------------

class Recompute:
    """--recompute. mode: "none", "selective" or "full". slots: blocks whose inputs are kept at once; group: ranks that
    hold the same inputs."""

    def __init__(self, mode: str, slots: int = 1, group: Group = None):
        self.mode, self.slots, self.group = mode, slots, group
        self.arena: CheckpointArena | None = None

    def scope(self) -> AbstractContextManager[None]:
        """For a forward pass."""
        return selective(self.mode == "selective")

    def __call__(self, block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """block(x)."""
        if self.mode != "full" or not x.requires_grad:
            return block(x)
        if self.arena is None or self.arena.shape != x.shape:
            self.arena = CheckpointArena(self.slots, x.detach(), self.group)
        return Checkpoint.apply(block, self.arena, x)


# ---- demo: python recompute.py --------------------------------------------------------------------------------------

def examples() -> dict[str, dict]:
    import config
    import costs

    llama, mixtral, deepseek = (config.parse(["--preset", name]).model
                                for name in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3-gqa"))
    return {"GPT-3, 2048 tokens": costs.gpt_layer(12288, 96, 2048),
            "Llama 8B, 4096": costs.llama_layer(llama, 4096),
            "Mixtral 8x7B, 4096": costs.llama_layer(mixtral, 4096),
            "DeepSeek-V3, 4096": costs.latent_attention_half(7168, 128, 4096, 2, 1536, 512, 128, 64)
            | costs.experts_half(deepseek, costs.BF16)}


def demo() -> None:
    import costs
    from meter import Meter

    x = torch.randn(4, 64, 128, requires_grad=True)
    weights = [torch.randn(128, 128, requires_grad=True) for _ in range(8)]

    def layer(weight):
        return lambda x: x + torch.tanh(torch.sigmoid(x @ weight) * x).square()

    print("Eight layers. Saved between forward and backward, and FLOPs of both:\n")
    for title, mode in ("everything", "none"), ("inputs alone", "full"):
        meter, recompute = Meter(), Recompute(mode, len(weights))
        meter.label("before", x, *weights)
        with meter:
            y = x
            for weight in weights:
                y = recompute(layer(weight), y)
            nbytes = meter.live()["other"]
            y.sum().backward()
        bar = "█" * round(nbytes / x.nbytes)
        print(f"    {title:14s} {nbytes / 1e6:5.2f} MB  {meter.flops / 1e6:5.0f} MFLOP   {bar}  (█ = an input)")
    print("\nBytes a token that a layer saves, and the FLOPs that recomputation adds to a step (16 bits):")
    for title, layer in examples().items():
        everything, total = costs.saved_bytes(layer, "none"), 3 * costs.forward_flops(layer)  # backward: two forwards
        print(f"\n    {title:22s}" + "".join(f"   {mode} {costs.saved_bytes(layer, mode) / 1e3:.0f} kB" + (
            f" +{costs.recomputed_flops(layer, mode) / total:.1%}" if mode != "none" else "")
            for mode in costs.RECOMPUTE))
        for mode, dropped_by in zip(costs.RECOMPUTE, costs.RECOMPUTE[1:]):
            dropped = {name: made for name, made in layer.items()
                       if made.saved_under == mode and made.nbytes > 0.005 * everything}
            text = f"{dropped_by} drops " + ", ".join(
                f"{name} {made.nbytes / 1e3:.0f} kB" + (f" +{made.flops / total:.1%}" if made.flops else "")
                for name, made in dropped.items())
            print(textwrap.fill(text, 112, initial_indent=6 * " ", subsequent_indent=8 * " "))


if __name__ == "__main__":
    demo()
