"""Activation recomputation: save fewer activations in forward, and compute the others a second time in backward.

Saves: full: all activations of a block but its input, of which n ranks that hold the same input save 1/n each.
       selective: the results of norms and SwiGLU; with --attention math also attention, whose scores would be saved.
Costs: full: a forward without each layer's last matmul, 23% (GPT-3) to 27% (DeepSeek-V3) more FLOPs in the layers, and
       per block one all-gather of the input where it is sharded.
       selective: the memory traffic of norms and SwiGLU once more; no matmul but those of --attention math.
Stops helping when: the blocks' inputs themselves, the logits or the model state are what fills the memory.

    full       forward    x ──► [ block 1 ] ──► y ──► [ block 2 ] ──► z     saved: x and y; nothing inside [ ]
               backward   y ──► [ block 2 ] with autograd, then its backward;  x ──► [ block 1 ] ...

    selective  forward    x ──► norm ──► h ──► linear ──► ...               saved: x; instead of h, how to compute it
               backward   the linear's backward needs h: x ──► norm ──► h; the norm's backward uses the same run

Full. `Recompute("full")(block, x)` saves x alone: the block runs with autograd off. Backward runs it a second time
with autograd on. That second run takes over the first one's decisions, such as which experts a token goes to
(`decide_once`). It saves the inputs that it gathers, since backward uses them at once. It leaves out the last matmul of
a feed-forward, whose result no backward reads, and sends no results of experts back.

Sharded checkpoints. Tensor parallel ranks (without sequence parallelism) hold the same x between layers. ZeRO-R lets
each of n ranks save 1/n of it, flat, and all-gathers it just before it is needed. Per block that sends (n-1)/n |x|
bytes more, a tenth of what tensor parallelism sends with recomputation: five all-reduces of 2 (n-1)/n |x| each, two in
forward, two in backward, one in the second run, which leaves out the last (the paper's has two: a twelfth). In this
file a checkpoint is a block's saved input. Checkpoints outlive other activations; scattered among them they would
fragment memory, so all lie in one arena.

Selective. A model writes `cheap(f, x)` for `f(x)` where f costs little. While `selective()` is on, this runs f with
autograd off and registers the storage of the result, with f and x. A layer that reads the result saves it as always,
but inside `dropping_cheap()`: there saved-tensor hooks find the tensor, or a view of it, by its storage, and save
(f, x) instead. When backward unpacks it, f runs again, once for all layers that read the result.

What to recompute depends on the architecture: `python -m plan.costs` prints what four of them save.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Rajbhandari et al. 2020, ZeRO, sections 6 and 8 (P_a:
sharded checkpoints, M_D: the arena); Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models, sections 4 and 5. Shapes: n ranks.
"""
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from collectives import Copied, CopyStreams, Group, all_gather, rank, run_demo, size

# ---- full -----------------------------------------------------------------------------------------------------------

class CheckpointArena:
    """Memory for `slots` checkpoints in one allocation, which every step uses again.

    With `copies` it is the host's; then restoring a checkpoint starts to fetch the one that was saved before it in the
    same forward, whose block will be next.
    """

    def __init__(self, slots: int, x: torch.Tensor, group: Group = None, copies: CopyStreams | None = None):
        """x: any tensor with the shape and dtype of a checkpoint, of which the ranks of the group save equal parts."""
        if x.numel() % size(group):
            raise ValueError(f"{size(group)} ranks cannot share a checkpoint of {x.numel()} elements in equal parts")
        self.group, self.shape, self.copies = group, x.shape, copies
        shape = slots, x.numel() // size(group)
        self.shards = copies.zeros(shape, x.dtype) if copies else x.new_empty(shape)
        self.on_device = list(x.new_empty(2 if copies else 0, shape[1]))  # one is used while the next one is fetched
        self.saved: dict[int, Copied] = {}  # slot -> the copy to the host
        self.fetched: dict[int, tuple[torch.Tensor, Copied]] = {}
        self.saved_before: dict[int, int | None] = {}  # slot -> the slot saved before it in the same forward
        self.last_saved: int | None = None
        self.whole = x.new_empty(x.numel() if size(group) > 1 else 0)
        self.free_slots = list(reversed(range(slots)))

    def save(self, x: torch.Tensor) -> int:
        """Save this rank's shard of x; returns its slot."""
        assert self.free_slots, f"all {len(self.shards)} slots of the arena hold checkpoints that wait for a backward"
        slot = self.free_slots.pop()
        shard = x.reshape(size(self.group), -1)[rank(self.group)]
        if self.copies:
            self.saved[slot] = self.copies.start(self.shards[slot], shard)
        else:
            self.shards[slot].copy_(shard)
        self.saved_before[slot], self.last_saved = self.last_saved, slot
        return slot

    def fetch(self, slot: int) -> None:
        """Start to copy a checkpoint from the host."""
        if slot not in self.fetched:
            target = self.on_device.pop(0)
            self.on_device.append(target)  # they take turns
            self.fetched[slot] = target, self.copies.start(target, self.shards[slot], after=self.saved[slot])

    def shard(self, slot: int) -> torch.Tensor:
        """This rank's shard of a checkpoint, on the device."""
        if not self.copies:
            return self.shards[slot]
        self.fetch(slot)
        shard, copied = self.fetched.pop(slot)
        copied.wait()
        if self.saved_before[slot] is not None:
            self.fetch(self.saved_before[slot])
        return shard

    def restore(self, slot: int) -> torch.Tensor:
        """The whole checkpoint, valid until the next one is saved or restored. Frees the slot."""
        shard = self.shard(slot)
        self.free_slots.append(slot)
        if size(self.group) == 1:
            return shard.view(self.shape)
        all_gather(self.whole, shard, self.group)
        return self.whole.view(self.shape)


_recomputing = False
_decisions: list | None = None  # of the running block: its first run appends each, its second takes them out in order


def is_recomputing() -> bool:
    """Whether a block runs for the second time, for a backward that follows at once."""
    return _recomputing


def decide_once(decide: Callable[[], Any]) -> Any:
    """decide(), or in the second run of a block what it returned in the first."""
    if _recomputing:
        return _decisions.pop(0)
    decision = decide()
    if _decisions is not None:
        _decisions.append(decision)
    return decision


@contextmanager
def track_decisions(decisions: list, recomputing: bool) -> Iterator[None]:
    global _decisions, _recomputing
    _decisions, _recomputing = decisions, recomputing
    try:
        yield
    finally:
        _decisions, _recomputing = None, False


class Checkpoint(Function):
    """block(x), of which x alone is saved, in an arena."""

    @staticmethod
    def forward(ctx, block: Callable[[torch.Tensor], torch.Tensor], arena: CheckpointArena, x: torch.Tensor):
        ctx.block, ctx.decisions = block, []
        ctx.arena, ctx.slot = arena, arena.save(x)
        with track_decisions(ctx.decisions, recomputing=False):
            return block(x)  # in a Function's forward autograd is off

    @staticmethod
    def backward(ctx, grad):
        x = ctx.arena.restore(ctx.slot).detach().requires_grad_()
        with track_decisions(ctx.decisions, recomputing=True), torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


# ---- selective ------------------------------------------------------------------------------------------------------

class CheapCall:
    """A call of `cheap`, which can run again. All readers share the second result, until its own backward is over."""

    def __init__(self, function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]):
        self.function, self.inputs, self.output = function, inputs, None

    def run(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """(inputs, output) with the graph between them."""
        if self.output is None:
            self.inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in self.inputs)
            with torch.enable_grad():
                self.output = self.function(*self.inputs)
        return self.inputs, self.output


# While `selective` is on: storage of a cheap tensor -> its CheapCall. Weak, or it would keep that memory alive.
_cheap_calls: WeakIdKeyDictionary | None = None


@contextmanager
def selective(on: bool = True) -> Iterator[None]:
    """For a forward pass: `cheap` registers its calls."""
    global _cheap_calls
    _cheap_calls = WeakIdKeyDictionary() if on and torch.is_grad_enabled() else None
    try:
        yield
    finally:
        _cheap_calls = None


def cheap(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """function(*inputs); while `selective` is on, its inputs are saved for backward instead of its result."""
    if _cheap_calls is None or not any(x.requires_grad for x in inputs):  # else no backward would free a second result
        return function(*inputs)
    call = CheapCall(function, inputs)
    output = Cheap.apply(call, *inputs)
    _cheap_calls[output.untyped_storage()] = call
    return output


class Cheap(Function):
    """call.function(*inputs), for which autograd itself saves nothing."""

    @staticmethod
    def forward(ctx, call: CheapCall, *inputs: torch.Tensor):
        ctx.call = call
        return call.function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs, output = ctx.call.run()
        ctx.call.output = ctx.call.inputs = None
        torch.autograd.backward(output, grad)
        return None, *(x.grad for x in inputs)


def dropping_cheap() -> AbstractContextManager[None]:
    """Inside this, layers save (f, x) in place of a cheap tensor, which takes no memory."""
    return nullcontext() if _cheap_calls is None else saved_tensors_hooks(pack, unpack)


def pack(saved: torch.Tensor) -> torch.Tensor | tuple:
    """What autograd saves in place of a tensor: for a cheap one, its CheapCall and its place in the result."""
    call = _cheap_calls.get(saved.untyped_storage())
    if call is not None:
        return call, saved.shape, saved.stride(), saved.storage_offset()
    return saved.detach() if saved.requires_grad else saved  # a function that saved its own output would form a cycle


def unpack(packed: torch.Tensor | tuple) -> torch.Tensor:
    """The tensor that `pack` was given; autograd detaches it."""
    if isinstance(packed, torch.Tensor):
        return packed
    call, *geometry = packed
    _, output = call.run()
    same = [output.shape, output.stride(), output.storage_offset()] == geometry
    return output if same else output.as_strided(*geometry)


def is_selective() -> bool:
    """Whether the result of cheap(f, x) is recomputed."""
    return _cheap_calls is not None


def is_cheap(x: torch.Tensor) -> bool:
    """Whether saving x inside `dropping_cheap` takes no memory."""
    return _cheap_calls is not None and x.untyped_storage() in _cheap_calls


# ---- what a model uses ----------------------------------------------------------------------------------------------

class Recompute:
    """--recompute. mode: "none", "selective" or "full". For "full": slots: the most block inputs saved at once; group:
    ranks that hold the same inputs; offload: save them in the host's memory (collectives.py). The first call raises
    ValueError if they cannot share one equally."""

    def __init__(self, mode: str, slots: int = 1, group: Group = None, offload: bool = False):
        self.mode, self.slots, self.group, self.offload = mode, slots, group, offload
        self.arena: CheckpointArena | None = None

    def scope(self) -> AbstractContextManager[None]:
        """Wrap every forward pass in this."""
        if self.arena:
            self.arena.last_saved = None
        return selective(self.mode == "selective")

    def __call__(self, block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """block(x), of which "full" saves x alone."""
        if self.mode != "full" or not x.requires_grad:
            return block(x)
        if self.arena is None or self.arena.shape != x.shape:
            copies = CopyStreams(x.device) if self.offload else None
            self.arena = CheckpointArena(self.slots, x.detach(), self.group, copies)
        return Checkpoint.apply(block, self.arena, x)


# ---- demo: python recompute.py --------------------------------------------------------------------------------------

def measure(mode: str) -> tuple[int, int, int]:
    """(bytes of an input, bytes that eight layers save besides the first input and weights, FLOPs of both passes)."""
    x, *weights = (torch.randn(shape, requires_grad=True) for shape in ((256, 128), *8 * ((128, 128),)))
    known, saved, recompute = {tensor.data_ptr() for tensor in (x, *weights)}, {}, Recompute(mode, len(weights))
    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor):
            y = x
            for weight in weights:
                y = recompute(lambda x, weight=weight: x + torch.tanh(torch.sigmoid(x @ weight) * x), y)
        nbytes = sum(tensor.nbytes for place, tensor in saved.items() if place not in known)
        y.sum().backward()
    arena = recompute.arena.shards.nbytes if recompute.arena else 0
    return x.nbytes, nbytes + arena, counter.get_total_flops()


def demo() -> None:
    print("Eight layers. Saved between forward and backward, and FLOPs of both:\n")
    for title, mode in ("everything", "none"), ("inputs alone", "full"):
        one, nbytes, flops = measure(mode)
        bar = "█" * (nbytes // one)
        print(f"    {title:14s} {nbytes / 1e6:5.2f} MB  {flops / 1e6:5.0f} MFLOP   {bar}  (█ = an input)")


if __name__ == "__main__":
    run_demo(lambda group: demo())
