"""Context parallelism: every rank has 1/c of the tokens of each sequence, and only attention needs those of all ranks.

Saves: all but 1/c of the activations, so sequences can be c times as long; and time: each rank does 1/c of the work.
Costs: in each layer, keys and values are sent (with Ulysses, queries and results as well); see the table.
Stops helping when: sending keys and values takes longer than attention to them, or another axis would do.

Everything but attention treats tokens one by one; the axis "dp", over which gradients are summed, includes these ranks.
Under a causal mask late tokens have more work than early ones, so a sequence is split into 2c chunks and rank i has
chunks i and 2c-1-i ("zig-zag"). For 4 ranks, who computes which scores:

    keys       0 1 2 3 4 5 6 7
    queries 0  0
            1  1 1
            2  2 2 2
            3  3 3 3 3
            4  3 3 3 3 3
            5  2 2 2 2 2 2
            6  1 1 1 1 1 1 1
            7  0 0 0 0 0 0 0 0

Every rank computes (i + 1) + (2c - i) = 2c + 1 blocks. With contiguous shards rank 3 would compute 15 blocks, 5 times
as many as rank 0. In a ring, work is equal at every step, too: all queries see the first chunk of an earlier rank's
keys, and the second chunk of queries sees all keys of a later rank.

Three styles, per sequence, with q = N D and k = K D elements per token (k after copying, for Ulysses) of e bytes, or of
a bytes in the accumulation dtype (fp32):

                 bytes sent per rank and layer, forward  backward                              more in memory at a time
    ring         (c-1) 2 s k e                           (c-1) 2 s k (e + a)                   two shards of K and V
    allgather    (c-1) 2 s k e                           (c-1) 2 s k (e + a)                   all of K and V
    ulysses      (c-1)/c s (2 q + 2 k) e                 the same                              all tokens, 1/c of heads

Ring. While a rank computes attention to one shard of keys, it receives the next. Results for different keys are merged
by their logsumexp: for a row with result o and logsumexp l, and a new result (o', l'),
    o += sigmoid(l' - l) (o' - o),      l -= logsigmoid(l - l'),
which cannot overflow. The rank's own keys come first, where every token sees itself, so l is finite from then on; a row
that sees no key of a block has l' = -inf there and does not change. In backward K and V go round again. Given the final
l and o, no block needs another: its probabilities are exp(scores - l), and the derivative of softmax needs
rowsum(dO * O). dK and dV of a shard follow it one step behind; after c-1 hops its owner adds its own term.

All-gather. All of K and V are gathered (again in backward, so that only 1/c is saved). Meanwhile the rank attends to
its own keys; then the first chunk of queries to the chunks before it, and the second to the same and to those between
the two: at most four blocks. In both styles, blocks that documents or a window hide entirely are not computed, but
their keys are sent.

Ulysses. An all-to-all from sequence shards to head shards: each rank gets all tokens for 1/c of the heads and computes
attention as one process does; a second all-to-all sends the result back. Where c does not divide K, key and value heads
are copied until it does.

Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention, and zhuzilin's ring-flash-attention (zig-zag);
Llama Team 2024, section 3.3.2 (all-gather); Jacobs et al. 2023, DeepSpeed Ulysses; Dao 2023, FlashAttention-2 (l is all
that backward needs). Shapes: B batch, S tokens per sequence, c ranks, s = S/c tokens per rank, m = s/2 per chunk, N
query heads, K key and value heads, D head dimension, L keys that a rank has at one step.
"""
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import Function

from collectives import (
    AllToAll__AllToAll,
    Group,
    all_gather,
    rank,
    reduce_scatter,
    run_demo,
    shift,
    size,
    to_device,
)
from config import padded_length
from operations import CAUSAL, MATH, SDPA, AttentionKernel, Mask
from param import IGNORED, acc_dtype
from recompute import cheap

# ---- which tokens a rank has ----------------------------------------------------------------------------------------

def own_chunks(c: int, i: int | Tensor) -> tuple:
    """The two chunks of rank i, of the 2c chunks of a sequence."""
    return i, 2 * c - 1 - i


def own_positions(seq: int, c: int, i: int) -> Tensor:
    """The positions of rank i's tokens in a sequence of `seq` tokens. [s]"""
    return torch.arange(seq).view(2 * c, -1)[[*own_chunks(c, i)]].flatten()


def shard_sequences(tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, c: int, i: int,
                    tp: int = 1) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rank i's shard of sequences: tokens and (already shifted) labels, [B, S] -> [B, s].

    positions and documents [B, S]: both, or neither. Returned are positions [B, s], or [s] where none were given, and
    documents [B, S], as a rank compares its queries' documents with those of all keys. With c > 1 a sequence that c
    (and tp) ranks cannot share equally is padded at its end with tokens -1, which no other token sees and which have no
    label.
    """
    assert (positions is None) == (documents is None), "positions are counted from the beginning of documents"
    if c == 1:
        return tokens, labels, positions, documents
    padding = padded_length(tokens.shape[1], c, tp) - tokens.shape[1]
    own = own_positions(tokens.shape[1] + padding, c, i).to(tokens.device)
    tokens = F.pad(tokens, (0, padding), value=-1)[:, own]
    labels = F.pad(labels, (0, padding), value=IGNORED)[:, own]
    if documents is None:
        return tokens, labels, own, None
    positions = F.pad(positions, (0, padding))[:, own]
    return tokens, labels, positions, torch.cat((documents, documents[:, -1:].expand(-1, padding) + 1), 1)


# ---- attention, block by block --------------------------------------------------------------------------------------

ALL = Mask(causal=False)


class ScoreBlock(NamedTuple):
    """Scores of a slice of the rank's queries with a slice of the keys that it has at one step. The mask is causal if
    these are the queries' own keys: the first block, in which each token sees itself."""
    queries: slice
    keys: slice
    mask: Mask = ALL


def attend_to_blocks(ctx, q: Tensor, k: Tensor, v: Tensor, keys_and_values: Iterable[Tensor],
                     steps: list[list[ScoreBlock]], attention: AttentionKernel, group: Group) -> Tensor:
    """The forward of ring and all-gather. keys_and_values: for each step, [2, B, K, L, D]."""
    B, N, s, D = q.shape
    acc = dict(dtype=acc_dtype(q.dtype), device=q.device)
    o = torch.empty(B, s, N, D, **acc).transpose(1, 2)  # the heads of a token are contiguous
    lse = torch.empty(B, N, s, **acc)
    for blocks, (step_k, step_v) in zip(steps, keys_and_values):
        for block in blocks:
            attend_to_block(o, lse, q, step_k, step_v, block, attention)
    o = o.to(q.dtype)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.steps, ctx.attention, ctx.group = steps, attention, group
    return o


def attend_to_block(o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: ScoreBlock,
                    attention: AttentionKernel) -> None:
    """Merge a block's result into o [B, N, s, D] and lse [B, N, s], both in the accumulation dtype."""
    rows, keys = block.queries, block.keys
    new_o, new_lse = attention.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], block.mask)
    old_o, old_lse = o[:, :, rows], lse[:, :, rows]  # views
    if block.mask.causal:
        old_o.copy_(new_o)
        old_lse.copy_(new_lse)
    else:
        old_o.lerp_(new_o.to(o.dtype), torch.sigmoid(new_lse - old_lse)[..., None])
        old_lse.sub_(F.logsigmoid(old_lse - new_lse))


def add_gradients(dq: Tensor, dkv: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  block: ScoreBlock, attention: AttentionKernel) -> None:
    """Add to dq [B, N, s, D] and dkv [2, B, K, L, D], in the accumulation dtype. o, lse: merged over all blocks."""
    rows, keys = block.queries, block.keys
    block_dq, block_dk, block_dv = attention.backward(
        do[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], lse[:, :, rows].contiguous(),
        block.mask)
    dq[:, :, rows] += block_dq
    dkv[0, :, :, keys] += block_dk
    dkv[1, :, :, keys] += block_dv


def window_blocks(queries: dict[int, slice], keys: dict[int, slice], m: int, window: int) -> list[ScoreBlock]:
    """The blocks with scores in a window, each of two chunks; those in which tokens see themselves come first. queries,
    keys: number of a chunk -> its slice of the rank's queries, or of a step's keys."""
    pairs = [(a, b) for a in queries for b in keys if b <= a and (a - b - 1) * m + 1 < window]
    pairs.sort(key=lambda pair: pair[0] != pair[1])
    return [ScoreBlock(queries[a], keys[b], Mask(causal=a == b, window=window, offset=(a - b) * m)) for a, b in pairs]


def clip_to_documents(block: ScoreBlock, queries: Tensor, keys: Tensor,
                      host: tuple[Tensor, Tensor]) -> ScoreBlock | None:
    """Limit a block's keys to the documents of its queries; None if nothing is visible. queries [B, s] and keys [B, L]:
    document numbers, which ascend along a sequence; host: the same two in the host's memory, where they are read."""
    documents = queries[:, block.queries], keys[:, block.keys]
    if block.mask.causal:
        return block._replace(mask=block.mask._replace(documents=documents))
    # All keys precede all queries: those that any query sees, the first query sees.
    first_query, host_keys = host[0][:, block.queries][:, :1], host[1][:, block.keys]
    mask = block.mask._replace(documents=(first_query, host_keys))
    visible = mask.visible(1, host_keys.shape[1], host_keys.device).flatten(0, 2).any(0)
    if not visible.any():
        return None
    start, stop = visible.int().argmax().item(), len(visible) - visible.flip(0).int().argmax().item()
    mask = mask._replace(documents=(documents[0], documents[1][:, start:stop]), offset=mask.offset - start)
    return ScoreBlock(block.queries, slice(block.keys.start + start, block.keys.start + stop), mask)


# ---- ring -----------------------------------------------------------------------------------------------------------

def ring_blocks(s: int, c: int, i: int, window: int = 0) -> list[list[ScoreBlock]]:
    """What rank i computes at each step; at step t it has the keys of rank i - t, modulo c."""
    first, second, both = slice(0, s // 2), slice(s // 2, s), slice(0, s)
    if window:
        chunks = [dict(zip(own_chunks(c, (i - t) % c), (first, second))) for t in range(c)]
        return [window_blocks(chunks[0], keys, s // 2, window) for keys in chunks]
    from_earlier, from_later = ScoreBlock(both, first), ScoreBlock(second, both)
    return [[ScoreBlock(both, both, CAUSAL)], *([from_earlier if t <= i else from_later] for t in range(1, c))]


def ring_positions(seq: int, c: int, i: int) -> list[Tensor]:
    """The positions of each step's keys in the sequence."""
    return [own_positions(seq, c, (i - t) % c) for t in range(c)]


class RingAttention(Function):
    """Queries stay; keys and values go round the ring."""

    @staticmethod
    def forward(ctx, q, k, v, steps, attention, group):
        return attend_to_blocks(ctx, q, k, v, ring_exchange(torch.stack((k, v)), group), steps, attention, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, kv = torch.zeros_like(q, dtype=lse.dtype), torch.stack((k, v))
        own_dkv = torch.zeros_like(kv, dtype=lse.dtype)
        pending = None
        for step, (blocks, (step_k, step_v)) in enumerate(zip(ctx.steps, ring_exchange(kv, ctx.group))):
            dkv = own_dkv if step == 0 else torch.zeros_like(own_dkv)
            for block in blocks:
                add_gradients(dq, dkv, do, q, step_k, step_v, o, lse, block, ctx.attention)
            if step > 1:
                dkv += pending.wait()  # the sum over the ranks that had these keys before
            if step:
                pending = shift(torch.empty_like(dkv), dkv, ctx.group)
        own_dkv += pending.wait()
        return dq.to(q.dtype), *own_dkv.to(k.dtype), None, None, None


def ring_exchange(kv: Tensor, group: Group) -> Iterable[Tensor]:
    """Yield this rank's keys and values, then the previous rank's, and so on; the next shard is received meanwhile."""
    incoming = torch.empty_like(kv)
    for step in range(size(group)):
        pending = shift(incoming, kv, group) if step < size(group) - 1 else None
        yield kv
        if pending:
            pending.wait()
            kv, incoming = incoming, kv  # two buffers in turns


# ---- all-gather -----------------------------------------------------------------------------------------------------

def gathered_chunks(c: int) -> list[int]:
    """The order 2c-1 … c, 0 … c-1: two all-gathers write it without a copy (if tokens are the first dimension), and all
    chunks that precede any chunk are contiguous."""
    return [*reversed(range(c, 2 * c)), *range(c)]


def gathered_blocks(s: int, c: int, i: int, window: int = 0) -> list[list[ScoreBlock]]:
    """What rank i computes with its own keys, and then with those of other ranks, in gathered order."""
    m, first, second, both = s // 2, slice(0, s // 2), slice(s // 2, s), slice(0, s)
    if window:
        own = dict(zip(own_chunks(c, i), (first, second)))
        others = {chunk: slice(at * m, (at + 1) * m) for at, chunk in enumerate(gathered_chunks(c)) if chunk not in own}
        return [window_blocks(own, own, m, window), window_blocks(own, others, m, window)]
    # The first chunk of queries sees chunks 0 to i-1; the second sees 2c-2-i down to c and 0 to i-1, then i+1 to c-1.
    blocks = [ScoreBlock(first, slice(c * m, (c + i) * m)), ScoreBlock(second, slice((i + 1) * m, (c + i) * m)),
              ScoreBlock(second, slice((c + i + 1) * m, 2 * c * m))]
    return [[ScoreBlock(both, both, CAUSAL)], [block for block in blocks if block.keys.start < block.keys.stop]]


def gathered_positions(seq: int, c: int, i: int) -> list[Tensor]:
    """The positions of each step's keys in the sequence."""
    return [own_positions(seq, c, i), torch.arange(seq).view(2 * c, -1)[gathered_chunks(c)].flatten()]


def gather_chunks(kv: Tensor, group: Group) -> Iterable[Tensor]:
    """Yield this rank's keys and values, [2, B, K, s, D], and meanwhile receive those of all: [2, B, K, S, D], in
    gathered order."""
    kv = rearrange(kv, "two b n s d -> s two b n d").contiguous()
    gathered = kv.new_empty(size(group) * len(kv), *kv.shape[1:])
    pending = [all_gather(out, chunk, group, async_op=True)
               for out, chunk in zip(gathered.chunk(2), reversed(kv.chunk(2)))]
    yield rearrange(kv, "s two b n d -> two b n s d")
    for gather in pending:
        gather.wait()
    yield rearrange(gathered, "s two b n d -> two b n s d")


def reduce_scatter_chunks(dkv: Tensor, group: Group) -> Tensor:
    """[2, B, K, S, D] in gathered order -> [2, B, K, s, D], summed over the ranks."""
    gathered = rearrange(dkv, "two b n s d -> s two b n d")
    own = gathered.new_empty(len(gathered) // size(group), *gathered.shape[1:])
    for out, chunk in zip(reversed(own.chunk(2)), gathered.chunk(2)):
        reduce_scatter(out, chunk, group)
    return rearrange(own, "s two b n d -> two b n s d")


class AllGatherAttention(Function):
    """Keys and values are all-gathered; their gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx, q, k, v, steps, attention, group):
        return attend_to_blocks(ctx, q, k, v, gather_chunks(torch.stack((k, v)), group), steps, attention, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), []
        for blocks, kv in zip(ctx.steps, gather_chunks(torch.stack((k, v)), ctx.group)):
            dkv.append(torch.zeros_like(kv, dtype=lse.dtype))
            for block in blocks:
                add_gradients(dq, dkv[-1], do, q, *kv, o, lse, block, ctx.attention)
        own, gathered = dkv
        dk, dv = own.add_(reduce_scatter_chunks(gathered, ctx.group))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# ---- Ulysses --------------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, N, s, D], k and v [B, K, s, D] -> [B, N, s, D]


def ulysses(q: Tensor, k: Tensor, v: Tensor, attend: Attend, order: tuple[Tensor, Tensor], group: Group) -> Tensor:
    """Exchange sequence shards for head shards, `attend` to all tokens with 1/c of the heads, and exchange back.

    order: the indices that bring chunks from the ranks' order into the sequence's, and back. [2c] each
    """
    c = size(group)
    copies = c // math.gcd(c, k.shape[1])  # of each key and value head, so that c divides them
    heads = [q, *(x.repeat_interleave(copies, 1) for x in (k, v))]
    by_head = torch.cat([rearrange(x, "b (c n) s d -> c b n s d", c=c) for x in heads], 2)
    chunks = AllToAll__AllToAll.apply(by_head, [1] * c, [1] * c, group)
    chunks = rearrange(chunks, "c b n (half m) d -> b n (c half) m d", half=2)
    tokens = rearrange(Reorder.apply(chunks, order), "b n chunk m d -> b n (chunk m) d")
    counts = [x.shape[1] // c for x in heads]
    del heads, by_head, chunks  # else they would exist during attention
    o = attend(*tokens.split(counts, 1))
    chunks = Reorder.apply(rearrange(o, "b n (chunk m) d -> b n chunk m d", chunk=2 * c), order[::-1])
    by_token = rearrange(chunks, "b n (c half) m d -> c b n (half m) d", c=c)
    received = AllToAll__AllToAll.apply(by_token, [1] * c, [1] * c, group)
    return rearrange(received, "c b n s d -> b s (c n) d").transpose(1, 2)


class Reorder(Function):
    """Chunks [B, N, 2c, m, D] in a new order, order: (indices, their inverse). autograd's own backward would first fill
    a tensor with zeros and then add to it."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.order = order
        return x.index_select(2, order[0])

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(2, ctx.order[1]), None


# ---- attention for a model's layers ---------------------------------------------------------------------------------

class BlockStyle(NamedTuple):
    """A style that attends block by block."""
    blocks: Callable[..., list[list[ScoreBlock]]]  # (s, c, i, window) -> the blocks of each step
    positions: Callable[[int, int, int], list[Tensor]]  # (seq, c, i) -> the positions of each step's keys
    function: type[Function]


STYLES = {"allgather": BlockStyle(gathered_blocks, gathered_positions, AllGatherAttention),
          "ring": BlockStyle(ring_blocks, ring_positions, RingAttention),
          "ulysses": ulysses}  # the names are those of config.CP_STYLES


def attention_by_window(windows: Iterable[int], tokens: Tensor, documents: Tensor | None, *, kernel: str, head_dim: int,
                        dtype: torch.dtype, group: Group = None, style: str = "allgather",
                        earlier: int = 0) -> dict[int, Attend]:
    """Attention of this rank's tokens [B, s] for the layers of each window (0: none), made once per forward.

    documents: [B, S], of whole sequences, in the host's memory if `group` has several ranks. kernel: "auto", "sdpa",
    "triton" or "math". dtype: of q, k and v. earlier: tokens before these, whose keys and values are cached as far as
    the window reaches.
    """
    out = {}
    for window in set(windows):
        cached = min(earlier, window - 1) if window else earlier
        mask = Mask(True, window, None if documents is None else (documents, documents), offset=cached)
        attention = choose_attention(kernel, mask, head_dim, tokens, dtype)
        out[window] = context_parallel(group, style, tokens.shape[1] * size(group), mask, attention, tokens.device)
    return out


def choose_attention(kernel: str, mask: Mask, head_dim: int, like: Tensor, dtype: torch.dtype) -> AttentionKernel:
    """The implementation that --attention names. like: a tensor on the device in question; dtype: of q, k and v."""
    slow_in_torch = (mask.documents is not None or mask.window > 0) and like.is_cuda and dtype != torch.float64
    if kernel == "triton" or (kernel == "auto" and slow_in_torch and head_dim <= 128):
        import flash  # needs Triton, which a CPU does without

        return AttentionKernel(flash.flash_attention, flash.flash_forward, flash.flash_backward)
    return MATH if kernel == "math" else SDPA


def context_parallel(group: Group, style: str, seq: int, mask: Mask, attention: AttentionKernel,
                     device: torch.device | str = "cpu") -> Attend:
    """Attention of this rank's tokens. seq, mask: length and mask of whole sequences. style: a name in STYLES."""
    c, chosen = size(group), STYLES[style]
    if c > 1 and isinstance(chosen, BlockStyle):
        steps = visible_blocks(chosen, seq, c, rank(group), mask, device)
        return lambda q, k, v: chosen.function.apply(q, k, v, steps, attention, group)
    if mask.documents is not None:
        mask = mask._replace(documents=tuple(to_device(documents, device) for documents in mask.documents))
    attend = partial(attention.attend, mask=attention.prepare_mask(mask, seq, seq + mask.offset, device))
    if attention.saves_scores:
        attend = partial(cheap, attend)
    if c == 1:
        return attend
    ranks = torch.arange(c, device=device)
    chunks = torch.stack(own_chunks(c, ranks), 1).flatten()  # of the first rank, then of the second
    return partial(chosen, attend=attend, order=(chunks.argsort(), chunks), group=group)


def visible_blocks(style: BlockStyle, seq: int, c: int, i: int, mask: Mask,
                   device: torch.device | str = "cpu") -> list[list[ScoreBlock]]:
    """The blocks that rank i computes at each step, clipped to documents. The mask's documents are in the host's
    memory, where they are read; those of the blocks' masks are on `device`."""
    steps = style.blocks(seq // c, c, i, mask.window)
    if mask.documents is None:
        return steps
    own = mask.documents[0][:, own_positions(seq, c, i)]
    own_there, clipped = to_device(own, device), []
    for blocks, positions in zip(steps, style.positions(seq, c, i)):
        keys = mask.documents[0][:, positions]
        keys_there = to_device(keys, device)
        visible = [clip_to_documents(block, own_there, keys_there, (own, keys)) for block in blocks]
        clipped.append([block for block in visible if block])
    return clipped


# ---- demo: python cp.py ---------------------------------------------------------------------------------------------

def demo(c: int) -> None:
    print(f"Who computes which blocks of scores, 0 to {c - 1}. Queries from top to bottom, keys from left to right.")
    zigzag = [min(own_chunks(c, chunk)) for chunk in range(2 * c)]
    for name, owner in (("contiguous", [chunk // 2 for chunk in range(2 * c)]), ("zig-zag", zigzag)):
        print(f"\n    {name}: {[sum(j + 1 for j in range(2 * c) if owner[j] == i) for i in range(c)]} blocks per rank")
        for j in range(2 * c):
            print("    " + f"{owner[j]} " * (j + 1))
    print("\nThe ring, step by step: whose keys a rank has, and which of its queries | see which of the keys.\n")
    for step in range(c):
        blocks = [ring_blocks(4, c, i)[step][0] for i in range(c)]
        seen = ["own" if step == 0 else "all|1st" if block.queries.start == 0 else "2nd|all" for block in blocks]
        print(f"    step {step}   " + "  ".join(f"{(i - step) % c} {seen[i]:8s}" for i in range(c)))
    print("\nWith zig-zag shards work is equal on all ranks, in the ring at every step.")


if __name__ == "__main__":
    run_demo(lambda group: demo(c=4))
