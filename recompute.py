"""Activation recomputation: save fewer activations in forward, and compute the others a second time in backward.

Saves: full: all activations of a block but its input, of which n ranks that hold the same input save 1/n each.
       selective: the results of norms and SwiGLU, keys and values of latents; with --attention math also the scores.
Costs: full: a forward without each layer's last matmul, 23% (GPT-3) to 28% (DeepSeek-V3) more FLOPs in the layers, and
       per block one all-gather of the input where it is sharded.
       selective: the memory traffic of norms and SwiGLU, and a copy; matmuls only of latents, or with --attention math.
Stops helping when: the blocks' inputs themselves, the logits or the model state are what fills the memory.

    full       forward    x ──► [ block 1 ] ──► y ──► [ block 2 ] ──► z     saved: x and y; nothing inside [ ]
               backward   y ──► [ block 2 ] with autograd, then its backward;  x ──► [ block 1 ] ...

    selective  forward    x ──► norm ──► h ──► linear ──► y     saved: x and h, until drop(h, y, norm, x) frees h
               backward   x ──► norm ──► h, in the same storage, then the backward of linear, which reads h, and of norm

Full. A block runs with autograd off; in backward, just before its own, again with autograd on (`is_recomputing`):
- The second run takes over the first one's decisions, such as a token's experts. Blocks must draw no random numbers.
- With sequence parallelism it keeps the gathered inputs of column parallel layers. Their weight
  gradients otherwise gather them again, and still do in a split backward, which would queue them.
- It leaves out a feed-forward's last matmul, and the exchanges that combine experts' results and
  merge them over tensor parallel ranks. No backward reads these results.
- Tensor parallel ranks without sequence parallelism have equal inputs: each saves 1/n.
- Saved inputs outlive other activations and would fragment memory, so all are in one arena.

Selective. No layer knows of it: what layers have saved is freed and refilled from outside. What pays depends on the
architecture: `python -m plan memory --preset NAME` prints what each mode saves of it.
Chen et al. 2016; Rajbhandari et al. 2020 (ZeRO, sections 6 and 8: sharded checkpoints, the arena); Korthikanti et al.
2022, Reducing Activation Recomputation in Large Transformer Models, sections 4 and 5. Shapes: n ranks.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from core.collectives import ALONE, Group, all_gather, run_demo


class Recompute:
    """--recompute. mode: "none", "selective" or "full". For "full": slots: the most block inputs saved at once; group:
    ranks with equal inputs (ValueError if they cannot share one equally); rows: run/offload.py's HostRows, or None: the
    arena is on the device."""

    def __init__(self, mode: str = "none", slots: int = 1, group: Group = ALONE, rows: Callable | None = None):
        self.mode, self.slots, self.group, self.rows = mode, slots, group, rows
        self.arena: CheckpointArena | None = None

    def start_forward(self) -> None:
        """Call this before every forward: offloaded inputs return in the reverse order of one forward."""
        if self.arena and self.rows:
            self.arena.shards.start_forward()

    def __call__(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """block(x), of which "full" saves x alone."""
        if self.mode != "full" or not x.requires_grad:
            return block(x)
        if self.arena is None or self.arena.shape != x.shape:
            self.arena = CheckpointArena(self.slots, x.detach(), self.group, self.rows)
        return Checkpoint.apply(block, self.arena, x)

    def drop(self, out: Tensor, until: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """"selective": free the memory of out = function(*inputs), a whole storage, which layers have saved. When the
        backward of `until` begins, function runs again and refills the storage, so that saved views are valid, too.

        h = norm(x); y = attention(h); drop(h, y, norm, x): call it after the last use of h in forward, asynchronous
        collectives included. Whatever saves h must lead to y, so that its backward runs after that of y has begun.
        Where autograd is off, no backward will come: nothing is freed.
        """
        if self.mode != "selective" or not until.requires_grad:
            return
        storage = out.untyped_storage()
        assert storage.nbytes() == out.nbytes, "drop frees a whole storage, and this is a view of it"
        nbytes, out, inputs = storage.nbytes(), out.data, [x.detach() for x in inputs]  # without autograd's graph
        storage.resize_(0)

        @torch.no_grad()
        def refill(_) -> None:
            storage.resize_(nbytes)
            out.copy_(function(*inputs))  # .data has a version counter of its own: autograd takes this for no change
            hook.remove()  # and with it `out` and `inputs`, which would live until all of backward is over

        hook = until.register_hook(refill)


# ---- full -----------------------------------------------------------------------------------------------------------

class CheckpointArena:
    """Memory for `slots` checkpoints in one allocation, which every step uses again."""

    def __init__(self, slots: int, x: Tensor, group: Group = ALONE, rows: Callable | None = None):
        """x: any tensor with the shape and dtype of a checkpoint, of which the ranks of the group save equal parts."""
        if x.numel() % group.size:
            raise ValueError(f"{group.size} ranks cannot share a checkpoint of {x.numel()} elements in equal parts")
        self.group, self.shape, each = group, x.shape, x.numel() // group.size
        self.shards = rows(slots, each, x) if rows else x.new_empty(slots, each)
        self.whole = x.new_empty(x.numel() if group.size > 1 else 0)  # shards are gathered into it
        self.free_slots = list(reversed(range(slots)))

    def save(self, x: Tensor) -> int:
        """Save this rank's shard of x; returns its slot."""
        assert self.free_slots, f"all {len(self.shards)} slots of the arena hold checkpoints that wait for a backward"
        slot = self.free_slots.pop()
        self.shards[slot] = x.reshape(self.group.size, -1)[self.group.rank]
        return slot

    def restore(self, slot: int) -> Tensor:
        """The whole checkpoint, valid until the next one is saved or restored. Frees the slot."""
        shard = self.shards[slot]
        self.free_slots.append(slot)  # nothing is saved before this block's backward is over
        if self.group.size > 1:
            shard = all_gather(self.whole, shard, self.group).wait()
        return shard.view(self.shape)


class Checkpoint(Function):
    """function(*inputs), which saves its inputs alone and runs again in backward, like torch's reentrant checkpoint.
    arena: where the only input is saved; None: by autograd."""

    @staticmethod
    def forward(ctx, function: Callable[..., Tensor], arena: CheckpointArena | None, *inputs: Tensor):
        ctx.function, ctx.arena, ctx.decisions = function, arena, []
        if arena:
            ctx.slot = arena.save(*inputs)
        else:
            ctx.save_for_backward(*inputs)
        return run_block(function, inputs, ctx.decisions, recomputing=False)  # in a Function's forward autograd is off

    @staticmethod
    def backward(ctx, grad):
        saved = [ctx.arena.restore(ctx.slot)] if ctx.arena else ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in saved]
        with torch.enable_grad():
            y = run_block(ctx.function, inputs, ctx.decisions, recomputing=True)
        torch.autograd.backward(y, grad)
        return None, None, *(x.grad for x in inputs)


_recomputing = False
_decisions: list | None = None  # of the running block: Checkpoint.forward fills the list, its backward empties it


def is_recomputing() -> bool:
    """Whether a block runs for the second time, just before its own backward."""
    return _recomputing


def decide_once(decide: Callable):
    """decide(), or in the second run of a block what it returned in the first."""
    if _recomputing:
        return _decisions.pop(0)
    decision = decide()
    if _decisions is not None:
        _decisions.append(decision)
    return decision


def run_block(block: Callable[..., Tensor], inputs: Sequence[Tensor], decisions: list, recomputing: bool) -> Tensor:
    """block(*inputs), with the state that the two functions above read."""
    global _decisions, _recomputing
    before = _decisions, _recomputing
    _decisions, _recomputing = decisions, recomputing
    try:
        return block(*inputs)
    finally:
        _decisions, _recomputing = before


# ---- demo: python recompute.py --------------------------------------------------------------------------------------

def demo() -> None:
    print("Eight layers. Saved between forward and backward, and FLOPs of both:\n")
    x, *weights = (torch.randn(rows, 128, requires_grad=True) for rows in [256] + 8 * [128])
    for title, mode in ("everything", "none"), ("inputs alone", "full"):
        saved, recompute, y = {}, Recompute(mode, len(weights)), x
        with FlopCounterMode(display=False) as flops:
            with saved_tensors_hooks(lambda x, saved=saved: saved.setdefault(x.data_ptr(), x), lambda x: x):
                for weight in weights:
                    y = recompute(lambda x, weight=weight: x + torch.tanh(torch.sigmoid(x @ weight) * x), y)
            y.sum().backward()
        nbytes = sum(tensor.nbytes for tensor in saved.values() if not tensor.is_leaf)
        nbytes += recompute.arena.shards.nbytes if recompute.arena else 0
        print(f"    {title:14s} {nbytes / 1e6:5.2f} MB  {flops.get_total_flops() / 1e6:5.0f} MFLOP   "
              f"{'█' * (nbytes // x.nbytes)}  (█ = an input)")


if __name__ == "__main__":
    run_demo(lambda group: demo())
