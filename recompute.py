"""Activation recomputation: keep fewer activations in forward, and compute the others again in backward.

    a layer            x ──► norm ──► h ──► linear ──► u ──► SwiGLU ──► z ──► linear ──► y

    kept: none         x              h                u                z
          selective    x                               u
          full         x

    full         forward    x ──► [ block ] ──► y           nothing inside the brackets is kept
                 backward   x ──► [ block ] once more, now with autograd, and then its backward

    selective    forward    x ──► norm ──► h ──► linear ──► u        then h is freed
                 backward   x ──► norm ──► h, in the same memory; then the backward of linear, which reads h

Backward needs the activations of forward, and until then they fill the memory. Full recomputation
keeps only the input of each block, and runs the whole block again. Selective recomputation repeats
only functions that are cheap to compute and have large results. In this file a block is a layer of
the model, attention and feed-forward. (In cp.py and sdpa.py it is a block of attention scores.)

    mode         Saves                                            Costs
    full         all activations of a block except its input,     a second forward, without each layer's
                 of which each of n ranks with equal inputs       last matmul: it adds 23% (GPT-3) to 27%
                 keeps 1/n                                        (DeepSeek-V3) to the layers' FLOPs; one
                                                                  all-gather per block where ranks
                                                                  keep 1/n each
    selective    the results of norms and of SwiGLU; keys and     their memory traffic, and a copy of each
                 values computed from latents (mla.py);           result into its old storage; matmuls
                 with --attention math also the scores            are repeated only for latents, and with
                                                                  --attention math

Stops helping when: the memory is filled by something else: by the inputs of the blocks themselves,
       the logits or the model state. `python -m plan memory --preset NAME` prints the bytes that
       each mode keeps of a model.

Easily got wrong:
- The second run of a block must decide as the first did. So a block draws no random numbers, and
  the second run takes over decisions such as the experts of a token (`decide_once`).
- The second run only prepares a backward. Its output may have wrong values, and only serves to call
  torch.autograd.backward(output, grad). So layers skip what no backward reads: the last matmul of a
  feed-forward layer, and the exchanges that combine the results of experts and merge them over
  tensor parallel ranks. Layers ask `is_recomputing` for that (tp.py, ep.py, model.py).
- `drop` has a contract: a dropped result must not be read too early. An example breaks it below.

Chen et al. 2016; Rajbhandari et al. 2020 (ZeRO, sections 6 and 8: sharded checkpoints, the arena);
Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (sections 4 and 5).
"""
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from core.collectives import ALONE, Group, all_gather, run_demo

# ---- the plain version: full recomputation of one block -------------------------------------------------------------

class PlainCheckpoint(Function):
    """Compute block(x) and save only x.

    Inside the forward of a Function autograd is off, so nothing else is saved. The block runs again,
    with autograd on, just before its own backward.
    """

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()  # a leaf: the new graph has only this block
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)  # adds to the gradients of the block's weights, and sets x.grad
        return None, x.grad


def checkpoint(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a block and save only its input, as torch.utils.checkpoint does with use_reentrant=True.

    x must require a gradient: otherwise autograd never calls backward, and the block's weights get
    no gradient. Call loss.backward(), not torch.autograd.grad, which does not see the block's
    weights.
    """
    return PlainCheckpoint.apply(block, x)


# ---- full recomputation ---------------------------------------------------------------------------------------------
# What `Checkpoint` changes in the plain version:
#
#     save_for_backward(x)    becomes arena.save(x). Saved inputs outlive all other activations, and
#                             would fragment memory, so one allocation holds them all.
#     block(x)                becomes run_block(...): the second run takes over decisions of the first.
#     x                       may be several inputs. Without an arena autograd saves them.

class Checkpoint(Function):
    """Compute function(*inputs) and save only the inputs.

    arena: holds the input. With an arena, pass exactly one input. None: autograd saves the inputs.
    """

    @staticmethod
    def forward(ctx, function: Callable[..., Tensor], arena: "CheckpointArena | None", *inputs: Tensor):
        ctx.function, ctx.arena, ctx.decisions = function, arena, []
        if arena:
            ctx.slot = arena.save(*inputs)
        else:
            ctx.save_for_backward(*inputs)
        return run_block(function, inputs, ctx.decisions, recomputing=False)

    @staticmethod
    def backward(ctx, grad):
        saved = [ctx.arena.restore(ctx.slot)] if ctx.arena else ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in saved]
        with torch.enable_grad():
            y = run_block(ctx.function, inputs, ctx.decisions, recomputing=True)
        torch.autograd.backward(y, grad)
        return None, None, *(x.grad for x in inputs)


_recomputing = False  # whether a block runs for the second time
_decisions: list | None = None  # the decisions of the block that runs: its first run adds them, its second takes them


def is_recomputing() -> bool:
    """Whether a block runs for the second time, just before its own backward.

    A layer may then skip results that no backward reads, and keep results that its backward is
    about to read. For example, with sequence parallelism the second run keeps the gathered inputs
    of column parallel layers (tp.py), so that weight gradients need not gather them again. With a
    split backward (zero bubble, schedules.py) it does not keep them: they would wait in a queue
    until the weight gradients are computed.
    """
    return _recomputing


def decide_once(decide: Callable):
    """Return decide() in the first run of a block, and the same result in its second run."""
    if _recomputing:
        return _decisions.pop(0)
    decision = decide()
    if _decisions is not None:
        _decisions.append(decision)
    return decision


def run_block(block: Callable[..., Tensor], inputs: Sequence[Tensor], decisions: list, recomputing: bool) -> Tensor:
    """Run block(*inputs), with the state that `is_recomputing` and `decide_once` read."""
    global _decisions, _recomputing
    before = _decisions, _recomputing
    _decisions, _recomputing = decisions, recomputing
    try:
        return block(*inputs)
    finally:
        _decisions, _recomputing = before


class CheckpointArena:
    """Memory for the saved inputs of `slots` blocks, in one allocation that every step uses again.

    group: n ranks with equal inputs (tensor parallel ranks without sequence parallelism). Each
        saves 1/n of an input, and backward all-gathers the parts.
    """

    def __init__(self, slots: int, x: Tensor, group: Group = ALONE, rows: Callable | None = None):
        """x: any tensor with the shape and dtype of an input. rows: makes the buffer that holds the
        inputs, in the host's memory (see Recompute). None: it is on the device of x."""
        if x.numel() % group.size:
            raise ValueError(f"{group.size} ranks cannot share a checkpoint of {x.numel()} elements in equal parts")
        self.group, self.shape, each = group, x.shape, x.numel() // group.size
        self.shards = rows(slots, each, x) if rows else x.new_empty(slots, each)
        self.whole = x.new_empty(x.numel() if group.size > 1 else 0)  # shards are gathered into it
        self.free_slots = list(reversed(range(slots)))

    def save(self, x: Tensor) -> int:
        """Save this rank's shard of x; return its slot."""
        assert self.free_slots, f"all {len(self.shards)} slots of the arena hold checkpoints that wait for a backward"
        slot = self.free_slots.pop()
        self.shards[slot] = x.reshape(self.group.size, -1)[self.group.rank]
        return slot

    def restore(self, slot: int) -> Tensor:
        """Return the whole input and free its slot.

        The tensor is valid until the next input is saved or restored. That is long enough, because
        nothing is saved or restored before the backward of this block is over. A split backward
        queues weight gradients for later, but these do not read the input: a block begins with a
        norm, whose own weight gradient is never queued, and the layers after it save other tensors.
        """
        shard = self.shards[slot]
        self.free_slots.append(slot)
        if self.group.size > 1:
            shard = all_gather(self.whole, shard, self.group).wait()
        return shard.view(self.shape)


# ---- selective recomputation ----------------------------------------------------------------------------------------
# `drop` frees the memory of one activation from outside. The layers that have saved it need no
# change: autograd keeps their tensor, whose storage is empty until backward fills it again.
#
#     h = norm(x)
#     y = linear(h)               linear saves h for its backward
#     drop(h, y, norm, x)         frees h's memory; when the backward of y begins, h = norm(x) again
#
# The contract has two parts:
#
# - After the drop, nothing in forward reads h, asynchronous collectives included.
# - Every backward that reads h runs after the backward of y has begun. This holds if y is computed
#   from every result that is computed from h.
#
# Here is an example that breaks the second part:
#
#     h = norm(x)
#     y = linear(h)
#     z = gate(h)                 computed from h, but y is not computed from z
#     drop(h, y, norm, x)
#     (y + z).sum().backward()
#
# Autograd begins with the operation that forward ran last. So the backward of gate runs before the
# backward of y, and reads h while its storage is empty. This does not make gradients silently wrong:
# torch raises "storage of size 0", or the process crashes at a null pointer. The same happens if
# forward reads h after the drop. To mend the example, name a result that is computed from both:
#
#     out = y + z
#     drop(h, out, norm, x)

def drop(out: Tensor, until: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Free the memory of `out`, and compute it again when the backward of `until` begins.

    out: function(*inputs), a tensor that fills its storage: not a view of a part. Saved views of it
        are refilled, too.
    until: every operation that saved `out` must be an ancestor of `until` in autograd's graph. Its
        backward then runs after the hook of `until`, which refills `out`. If `until` requires no
        gradient, no backward will come, and nothing is freed.
    function: must return the same values in its second run. Nobody checks this.
    """
    if not until.requires_grad:
        return
    storage = out.untyped_storage()
    assert storage.nbytes() == out.nbytes, "drop frees a whole storage, and this is a view of it"
    # `refill` must hold no autograd graph, so keep detached tensors. out.data, unlike out.detach(), has a version
    # counter of its own, so autograd does not take the refill for a change of a saved tensor, which it would refuse.
    nbytes, out, inputs = storage.nbytes(), out.data, [x.detach() for x in inputs]
    storage.resize_(0)

    @torch.no_grad()
    def refill(_) -> None:
        storage.resize_(nbytes)
        out.copy_(function(*inputs))
        hook.remove()  # and with it `out` and `inputs`, which would live until all of backward is over

    hook = until.register_hook(refill)


# ---- what a model calls: --recompute --------------------------------------------------------------------------------

class Recompute:
    """The recomputation of a model. Its layers call it the same way in every mode:

        y = recompute(block, x)               "full" saves only x; other modes just call block(x)
        recompute.drop(h, y, norm, x)         "selective" drops h; other modes do nothing

    mode: "none", "selective" or "full". The other arguments are for "full":
    slots: the largest number of inputs that are saved at once.
    group: ranks with equal inputs, each of which saves an equal part. Raises ValueError if the
        input does not divide equally.
    rows: makes the buffer [slots, elements] that holds the inputs. None: it is on the device. With
        --offload activations `rows` is HostRows of run/offload.py: the buffer is in the host's
        memory, and an input is fetched while the backward of the block after it runs.
    """

    def __init__(self, mode: str = "none", slots: int = 1, group: Group = ALONE, rows: Callable | None = None):
        self.mode, self.slots, self.group, self.rows = mode, slots, group, rows
        self.arena: CheckpointArena | None = None

    def start_forward(self) -> None:
        """Call this before every forward, because offloaded inputs are prefetched in the reverse
        order of one forward.

        Without the call, reading the first input of this forward would prefetch the last input of
        the forward before it. If that input had been used already, the prefetched copy would then
        be stale when the slot is reused.
        """
        if self.arena and self.rows:
            self.arena.shards.start_forward()

    def __call__(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return block(x); "full" saves only x."""
        if self.mode != "full" or not x.requires_grad:
            return block(x)
        if self.arena is None or self.arena.shape != x.shape:
            self.arena = CheckpointArena(self.slots, x.detach(), self.group, self.rows)
        return Checkpoint.apply(block, self.arena, x)

    def drop(self, out: Tensor, until: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Call the function `drop` if the mode is "selective"."""
        if self.mode == "selective":
            drop(out, until, function, *inputs)


# ---- demo: python recompute.py --------------------------------------------------------------------------------------

def layer(x: Tensor, w_up: Tensor, w_down: Tensor, recompute: Recompute) -> Tensor:
    """Compute the layer of the figure, with SiLU in place of SwiGLU, and a residual connection."""
    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    h = norm(x)
    u = h @ w_up
    recompute.drop(h, u, norm, x)
    z = F.silu(u)
    y = z @ w_down
    recompute.drop(z, y, F.silu, u)
    return x + y


def kept_bytes(saved: list[Tensor], weights: list[Tensor], recompute: Recompute) -> int:
    """Add up the memory behind saved tensors, without the weights. Each storage counts once, and a
    dropped storage is empty."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    for weight in weights:
        storages.pop(weight.untyped_storage().data_ptr(), None)
    in_arena = recompute.arena.shards.nbytes if recompute.arena else 0
    return sum(storages.values()) + in_arena


def demo() -> None:
    """Count what eight layers keep between forward and backward, and the FLOPs of both, in every
    mode."""
    torch.manual_seed(0)
    x = torch.randn(256, 128, requires_grad=True)  # an activation has 256 rows, each weight 128
    weights = [torch.randn(128, 128).div(11).requires_grad_() for _ in range(16)]
    print("Eight layers as in the figure. Kept between forward and backward, and FLOPs of both (█: 2 activations):\n")
    grads = {}
    for mode in ("none", "selective", "full"):
        recompute, saved, y = Recompute(mode, slots=8), [], x

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with FlopCounterMode(display=False) as flops:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                for w_up, w_down in zip(weights[0::2], weights[1::2]):
                    y = recompute(partial(layer, w_up=w_up, w_down=w_down, recompute=recompute), y)
            nbytes = kept_bytes(saved, weights, recompute)
            y.square().sum().backward()
        grads[mode] = [leaf.grad for leaf in (x, *weights)]
        for leaf in (x, *weights):
            leaf.grad = None
        print(f"    {mode:10s} {nbytes / 1e6:5.2f} MB   {flops.get_total_flops() / 1e6:4.0f} MFLOP   "
              f"{'█' * (nbytes // x.nbytes // 2)}")
    equal = all(torch.equal(one, other) for mode in grads for one, other in zip(grads["none"], grads[mode]))
    print(f"\nAll gradients are {'equal to the bit' if equal else 'different'}. Selective keeps half, and repeats no "
          "matmul.\nFull keeps a quarter, and repeats the forward: a third more FLOPs.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
