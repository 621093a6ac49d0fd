"""Context parallelism: every rank has 1/c of each sequence, and only attention needs the rest of it.

Saves: all but 1/c of the activations, so sequences c times as long fit; and time, as each rank does 1/c of the work.
Costs: in each layer, keys and values (or, with Ulysses, all that attention reads and writes) are sent; see the table.
Stops helping when: s tokens a rank take less time to compute than their keys and values to send, or another axis would
       do.

Everything but attention treats tokens one by one. Under a causal mask late tokens have more work than early ones, so a
sequence is split into 2c chunks and rank i has chunks i and 2c-1-i ("zig-zag"). For 4 ranks, who computes which scores:

    keys       0 1 2 3 4 5 6 7        c = 4 ranks, chunks of m tokens. A row of chunk j has j + 1 chunks of keys, so
    queries 0  0                      rank i has (i + 1) + (2c - i) = 2c + 1 of them, whichever i: all work alike.
            1  1 1                    In the ring, it is alike at every step, too: half of all pairs of own queries and
            2  2 2 2                  keys at hand, and which half is a slice. If the keys are an earlier rank's, their
            3  3 3 3 3                first half is seen by all queries and their second by none; if a later rank's,
            4  3 3 3 3 3              all of them are seen by the second half of the queries.
            5  2 2 2 2 2 2
            6  1 1 1 1 1 1 1          (plain shards: 0 0 1 1 2 2 3 3 from the top; rank 3 has 7 times the work of 0)
            7  0 0 0 0 0 0 0 0

Three styles; s tokens a rank, widths q = heads x D and k = kv heads x D, elements of e bytes, a in the accumulation
dtype (fp32):

                 sent by a rank and layer, forward       backward                              in memory at a time
    ring         (c-1) 2 s k e                           (c-1) 2 s k (e + a)                   two shards of K and V
    allgather    (c-1) 2 s k e                           (c-1) 2 s k (e + a)                   all of K and V
    ulysses      (c-1)/c s (2 q + 2 k) e                 the same                              all tokens, 1/c of heads

Ring. While attention to one shard of keys is computed, the next shard is received. Results of different keys are merged
by their logsumexp: for a row with result o and logsumexp l, and a new result (o', l'),
    o += sigmoid(l' - l) (o' - o),      l -= logsigmoid(l - l'),
which overflows nowhere. It starts with the rank's own keys, where every token sees itself, so l is finite from then on,
and keys of which a row sees none have l' = -inf and change nothing. Backward goes round once more. Probabilities follow
from the *final* l, and their sum from the final o, so blocks need nothing from each other; dK and dV of a shard follow
it round, one hop behind, and are complete after c-1 hops, when their owner adds its own share.

All-gather. All of K and V are gathered (again in backward, so that 1/c is saved), and each of the two chunks attends to
itself and to what precedes it: two results to merge instead of c.

Ulysses. An all-to-all from sequence shards to head shards: each rank gets all tokens for 1/c of the heads, computes
attention as if alone, and the result is sent back. Where kv heads are fewer than c, ranks share one.

Documents and windows. A token sees its own document only, and at most a window of tokens before it. Blocks of scores of
which nothing is visible are skipped.

Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention, and zhuzilin's ring-flash-attention (zig-zag);
Llama Team 2024, section 3.3.2 (all-gather); Jacobs et al. 2023, DeepSpeed Ulysses; Dao 2023, FlashAttention-2 (why l
is enough). Shapes: B batch, S sequence, c ranks, s = S/c tokens a rank, m = s/2, N heads, K kv heads, D head width.
"""
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.autograd import Function

from collectives import AllToAll__AllToAll, Group, Pending, all_gather, rank, reduce_scatter, shift, size
from config import padded_length
from operations import CAUSAL, MATH, SDPA, Attention, Mask
from param import IGNORED, acc_dtype
from recompute import cheap

Tensor = torch.Tensor


# ---- which tokens a rank has ----------------------------------------------------------------------------------------

def own_chunks(c: int, i: int) -> tuple[int, int]:
    """The chunks of rank i, of 2c."""
    return i, 2 * c - 1 - i


def own_positions(seq: int, c: int, i: int) -> Tensor:
    """The positions in the sequence of rank i's tokens. [seq / c]"""
    return rearrange(torch.arange(seq), "(chunk m) -> chunk m", chunk=2 * c)[[*own_chunks(c, i)]].flatten()


def shard_sequences(tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, c: int, i: int,
                    tp: int = 1) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rank i's shard of sequences B S whose labels are already shifted; documents stay whole, as they mask all keys.

    Sequences are padded to what c ranks, and tp once more, can share, by tokens -1 at the end, which no token sees and
    which have no label.
    """
    if c == 1:
        return tokens, labels, positions, documents
    seq = tokens.shape[1]
    more = padded_length(seq, c, tp) - seq
    mine = own_positions(seq + more, c, i).to(tokens.device)
    if documents is not None:
        positions = F.pad(positions, (0, more))[:, mine]
        documents = torch.cat((documents, documents[:, -1:].expand(-1, more) + 1), 1)
    return (F.pad(tokens, (0, more), value=-1)[:, mine], F.pad(labels, (0, more), value=IGNORED)[:, mine],
            mine if positions is None else positions, documents)


# ---- attention, block by block --------------------------------------------------------------------------------------

ALL = Mask(causal=False)


class ScoreBlock(NamedTuple):
    """Some of this rank's queries x some of the keys at hand."""
    queries: slice
    keys: slice
    mask: Mask = ALL

    @property
    def is_first(self) -> bool:
        """Whether it is the first block of its queries: the one in which each token sees itself."""
        return self.mask.causal

    @property
    def scores(self) -> int:
        """How many scores are visible, but for documents."""
        (causal, window, _, offset, _), columns = self.mask, self.keys.stop - self.keys.start
        return sum(max(0, (min(columns, row + 1) if causal else columns) - (max(0, row + 1 - window) if window else 0))
                   for row in range(offset, offset + self.queries.stop - self.queries.start))


def attend_to_blocks(ctx, q: Tensor, k: Tensor, v: Tensor, at_hand: Iterable[Tensor], steps: list[list[ScoreBlock]],
                     attention: Attention, group: Group) -> Tensor:
    """The forward of ring and all-gather. at_hand: for each step the keys and values, 2 B K columns D."""
    B, N, s, D = q.shape
    acc = dict(dtype=acc_dtype(q.dtype), device=q.device)
    o, lse = torch.empty(B, s, N, D, **acc).transpose(1, 2), torch.empty(B, N, s, **acc)  # heads of a token together
    for blocks, (k_here, v_here) in zip(steps, at_hand):
        for block in blocks:
            attend_to_block(o, lse, q, k_here, v_here, block, attention)
    o = o.to(q.dtype)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.steps, ctx.attention, ctx.group = steps, attention, group
    return o


def attend_to_block(o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: ScoreBlock,
                    attention: Attention) -> None:
    """Merge a block's result into o and lse, both in the accumulation dtype."""
    rows, keys = block.queries, block.keys
    new, new_lse = attention.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], block.mask)
    if block.is_first:
        o[:, :, rows], lse[:, :, rows] = new, new_lse
        return
    old, old_lse = o[:, :, rows], lse[:, :, rows]
    old.lerp_(new.to(o.dtype), torch.sigmoid(new_lse - old_lse)[..., None])
    old_lse.sub_(F.logsigmoid(old_lse - new_lse))


def add_gradients(dq: Tensor, dkv: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  block: ScoreBlock, attention: Attention) -> None:
    """Add a block's share to dq and to dK and dV (2 B K columns D), in the accumulation dtype. o, lse: final ones."""
    rows, keys = block.queries, block.keys
    shares = attention.backward(do[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows],
                                lse[:, :, rows].contiguous(), block.mask)
    dq[:, :, rows] += shares[0]
    dkv[0, :, :, keys] += shares[1]
    dkv[1, :, :, keys] += shares[2]


def window_blocks(own: dict[int, slice], keys: dict[int, slice], m: int, window: int) -> list[ScoreBlock]:
    """The blocks of scores in a window, by chunks: first those in which tokens see themselves. own, keys: number of a
    chunk -> where it lies among this rank's queries, and among the keys at hand."""
    pairs = [(a, b) for a in own for b in keys if b <= a and (a - b - 1) * m + 1 < window]
    return [ScoreBlock(own[a], keys[b], Mask(causal=a == b, window=window, offset=(a - b) * m))
            for a, b in sorted(pairs, key=lambda pair: pair[0] != pair[1])]


def clip_to_documents(block: ScoreBlock, queries: Tensor, keys: Tensor) -> ScoreBlock | None:
    """What is left of a block if tokens see their own document only. queries B s, keys B columns: document numbers."""
    queries, keys = queries[:, block.queries], keys[:, block.keys]
    masked = block.mask._replace(documents=(queries, keys))
    seen = masked.visible(queries.shape[1], keys.shape[1], keys.device).flatten(0, 2).any(0).nonzero()
    if len(seen) == 0:
        return None
    first, stop = seen[0].item(), seen[-1].item() + 1
    documents, start = (queries, keys[:, first:stop]), block.keys.start
    return block._replace(keys=slice(start + first, start + stop),
                          mask=masked._replace(documents=documents, offset=masked.offset - first))


# ---- ring -----------------------------------------------------------------------------------------------------------

def ring_blocks(s: int, c: int, i: int, window: int = 0) -> list[list[ScoreBlock]]:
    """What rank i computes at each step; at step t it has the keys of rank i - t."""
    m, whole, first, second = s // 2, slice(0, s), slice(0, s // 2), slice(s // 2, s)
    if window:
        chunks = [dict(zip(own_chunks(c, (i - t) % c), (first, second))) for t in range(c)]
        return [window_blocks(chunks[0], here, m, window) for here in chunks]
    return [[ScoreBlock(whole, whole, CAUSAL)]] + [
        [ScoreBlock(whole, first) if (i - t) % c < i else ScoreBlock(second, whole)] for t in range(1, c)]


def ring_positions(seq: int, c: int, i: int) -> list[Tensor]:
    """Where in the sequence the keys of each step are."""
    return [own_positions(seq, c, (i - t) % c) for t in range(c)]


class RingAttention(Function):
    """Queries stay; keys and values go round."""

    @staticmethod
    def forward(ctx, q, k, v, steps, attention, group):
        return attend_to_blocks(ctx, q, k, v, ring_exchange(torch.stack((k, v)), group), steps, attention, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, kv = torch.zeros_like(q, dtype=lse.dtype), torch.stack((k, v))
        own, pending, received = torch.zeros_like(kv, dtype=lse.dtype), Pending(None), 0
        for step, (blocks, (k_here, v_here)) in enumerate(zip(ctx.steps, ring_exchange(kv, ctx.group))):
            dkv = own if step == 0 else torch.zeros_like(own)
            for block in blocks:
                add_gradients(dq, dkv, do, q, k_here, v_here, o, lse, block, ctx.attention)
            pending.wait()
            dkv += received  # the sum of those ranks that had these keys before
            if step:
                received = torch.empty_like(dkv)
                pending = shift(received, dkv, ctx.group)
        pending.wait()
        own += received
        return dq.to(q.dtype), *own.to(k.dtype), None, None, None


def ring_exchange(kv: Tensor, group: Group) -> Iterable[Tensor]:
    """This rank's shard, then the previous rank's, and so on; the next one is received while one is used."""
    following = torch.empty_like(kv)
    for step in range(size(group)):
        pending = shift(following, kv, group) if step < size(group) - 1 else None
        yield kv
        if pending:
            pending.wait()
            kv, following = following, kv


# ---- all-gather -----------------------------------------------------------------------------------------------------
# Gathered second chunks lie before gathered first ones: then the chunks that precede any chunk lie together, and each
# rank's shard is received where it belongs. That order is 2c-1 … c, 0 … c-1, and tokens are the first dimension.

def gathered_chunks(c: int) -> list[int]:
    return [*reversed(range(c, 2 * c)), *range(c)]


def gathered_blocks(s: int, c: int, i: int, window: int = 0) -> list[list[ScoreBlock]]:
    """In one step, the two own chunks: first themselves, then all that precedes them."""
    m, first, second = s // 2, slice(0, s // 2), slice(s // 2, s)
    if window:
        places = {chunk: slice(at * m, (at + 1) * m) for at, chunk in enumerate(gathered_chunks(c))}
        return [window_blocks(dict(zip(own_chunks(c, i), (first, second))), places, m, window)]
    blocks = [ScoreBlock(first, slice((c + i) * m, (c + i + 1) * m), CAUSAL),
              ScoreBlock(second, slice(i * m, (i + 1) * m), CAUSAL),
              ScoreBlock(first, slice(c * m, (c + i) * m)), ScoreBlock(second, slice((i + 1) * m, 2 * c * m))]
    return [[block for block in blocks if block.scores]]


def gathered_positions(seq: int, c: int, i: int) -> list[Tensor]:
    """Where in the sequence gathered keys are from."""
    return [rearrange(torch.arange(seq), "(chunk m) -> chunk m", chunk=2 * c)[gathered_chunks(c)].flatten()]


def gather_chunks(kv: Tensor, group: Group) -> Tensor:
    """2 B K s D of every rank -> 2 B K S D, in gathered order."""
    tokens = rearrange(kv, "two b n s d -> s two b n d").contiguous()
    whole = tokens.new_empty(size(group) * len(tokens), *tokens.shape[1:])
    for out, chunk in zip(whole.chunk(2), reversed(tokens.chunk(2))):
        all_gather(out, chunk, group)
    return rearrange(whole, "s two b n d -> two b n s d")


def reduce_scatter_chunks(dkv: Tensor, group: Group) -> Tensor:
    """2 B K S D in gathered order -> 2 B K s D, summed over the ranks."""
    whole = rearrange(dkv, "two b n s d -> s two b n d")
    own = whole.new_empty(len(whole) // size(group), *whole.shape[1:])
    for out, chunk in zip(reversed(own.chunk(2)), whole.chunk(2)):
        reduce_scatter(out, chunk, group)
    return rearrange(own, "s two b n d -> two b n s d")


class AllGatherAttention(Function):
    """Keys and values are gathered; their gradients are reduced and scattered."""

    @staticmethod
    def forward(ctx, q, k, v, steps, attention, group):
        whole = gather_chunks(torch.stack((k, v)), group)
        return attend_to_blocks(ctx, q, k, v, repeat(whole), steps, attention, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, whole = torch.zeros_like(q, dtype=lse.dtype), gather_chunks(torch.stack((k, v)), ctx.group)
        dkv = torch.zeros_like(whole, dtype=lse.dtype)
        for block in ctx.steps[0]:
            add_gradients(dq, dkv, do, q, *whole, o, lse, block, ctx.attention)
        dk, dv = reduce_scatter_chunks(dkv, ctx.group)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# ---- Ulysses --------------------------------------------------------------------------------------------------------

def ulysses(q: Tensor, k: Tensor, v: Tensor, whole: Callable[[Tensor, Tensor, Tensor], Tensor], group: Group) -> Tensor:
    """Attention `whole` of all tokens for 1/c of the heads, exchanged before and after."""
    c, (_, N, _, _) = size(group), q.shape
    order = torch.tensor([chunk for i in range(c) for chunk in own_chunks(c, i)]).argsort().to(q.device)

    def exchange(x: Tensor) -> Tensor:
        return AllToAll__AllToAll.apply(x.contiguous(), [1] * c, [1] * c, group)

    copies = c // math.gcd(c, k.shape[1])  # of each kv head, so that c divides them
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    by_head = torch.cat([rearrange(x, "b (c n) s d -> c b n s d", c=c) for x in (q, k, v)], 2)
    chunks = rearrange(exchange(by_head), "c b n (half m) d -> b n (c half) m d", half=2)
    tokens = rearrange(chunks[:, :, order], "b n chunk m d -> b n (chunk m) d")
    o = whole(*tokens.split([N // c, k.shape[1] // c, k.shape[1] // c], 1))
    chunks = rearrange(o, "b n (chunk m) d -> b n chunk m d", chunk=2 * c)[:, :, order.argsort()]
    by_token = exchange(rearrange(chunks, "b n (c half) m d -> c b n (half m) d", c=c))
    return rearrange(by_token, "c b n s d -> b s (c n) d").transpose(1, 2)


# ---- one entry for all ----------------------------------------------------------------------------------------------

class BlockStyle(NamedTuple):
    """A style that attends block by block. blocks(s, c, i, window) -> the blocks of each step; positions(seq, c, i) ->
    where its keys are in the sequence; function: the autograd Function."""
    blocks: Callable[..., list[list[ScoreBlock]]]
    positions: Callable[[int, int, int], list[Tensor]]
    function: type[Function]


# The names of config.CP_STYLES. Those that see whole sequences, of some heads, are functions like `ulysses`.
STYLES = {"allgather": BlockStyle(gathered_blocks, gathered_positions, AllGatherAttention),
          "ring": BlockStyle(ring_blocks, ring_positions, RingAttention),
          "ulysses": ulysses}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q B N s D, k and v B K s D -> B N s D


def attention_by_window(windows: Iterable[int], tokens: Tensor, documents: Tensor | None, *, kernel: str, head_dim: int,
                        dtype: torch.dtype, group: Group = None, style: str = "allgather",
                        earlier: int = 0) -> dict[int, Attend]:
    """Attention of this rank's tokens B s, as a function of q, k and v, for layers of each window (0: none). Made once
    a micro-batch.

    documents: B S of the whole sequences, or None. kernel: "auto", "sdpa", "triton" or "math". earlier: tokens before
    these, whose keys are cached as far as the window reaches.
    """
    out = {}
    for window in set(windows):
        cached = min(earlier, window - 1) if window else earlier
        mask = Mask(True, window, None if documents is None else (documents, documents), offset=cached)
        attention = choose_attention(kernel, mask, head_dim, tokens, dtype)
        out[window] = context_parallel(group, style, tokens.shape[1] * size(group), mask, attention, tokens.device)
    return out


def choose_attention(kernel: str, mask: Mask, head_dim: int, like: Tensor, dtype: torch.dtype) -> Attention:
    """--attention. like: a tensor on the device in question; dtype: of queries, keys and values."""
    hard_for_torch = (mask.documents is not None or mask.window > 0) and like.is_cuda and dtype != torch.float64
    if kernel == "triton" or (kernel == "auto" and hard_for_torch and head_dim <= 128):
        import flash  # needs Triton, which a CPU does without

        return Attention(flash.flash_attention, flash.flash_forward, flash.flash_backward)
    return MATH if kernel == "math" else SDPA


def context_parallel(group: Group, style: str, seq: int, mask: Mask, attention: Attention,
                     device: torch.device | str = "cpu") -> Attend:
    """Attention of this rank's tokens of sequences of `seq` tokens, to which the mask belongs."""
    c, i, chosen = size(group), rank(group), STYLES[style]
    if c > 1 and isinstance(chosen, BlockStyle):
        steps = visible_blocks(chosen, seq, c, i, mask)
        return lambda q, k, v: chosen.function.apply(q, k, v, steps, attention, group)
    whole = partial(attention.whole, mask=attention.prepared(mask, seq, seq + mask.offset, device))
    if attention.saves_scores:
        whole = partial(cheap, whole)
    return whole if c == 1 else partial(chosen, whole=whole, group=group)


def visible_blocks(style: BlockStyle, seq: int, c: int, i: int, mask: Mask) -> list[list[ScoreBlock]]:
    """The blocks that rank i computes at each step, without those of which no document is seen."""
    steps = style.blocks(seq // c, c, i, mask.window)
    if mask.documents is None:
        return steps
    documents, _ = mask.documents
    own, keys = documents[:, own_positions(seq, c, i)], [documents[:, at] for at in style.positions(seq, c, i)]
    return [[clipped for block in blocks if (clipped := clip_to_documents(block, own, here))]
            for blocks, here in zip(steps, keys)]


# ---- demo: python cp.py ---------------------------------------------------------------------------------------------

def demo(c: int) -> None:
    print(f"Who computes which scores, 0 to {c - 1}. Queries from top to bottom, keys from left to right.\n")
    plain = [chunk // 2 for chunk in range(2 * c)]
    zigzag = [min(own_chunks(c, chunk)) for chunk in range(2 * c)]
    print("    plain shards" + " " * (4 * c - 8) + "zig-zag")
    for row in range(2 * c):
        print("".join("    " + " ".join(str(owner[row]) if row >= column else "·" for column in range(2 * c))
                      for owner in (plain, zigzag)))
    for name, owner in (("plain", plain), ("zig-zag", zigzag)):
        work = [sum(row + 1 for row in range(2 * c) if owner[row] == rank) for rank in range(c)]
        print(f"\n    {name:8s} blocks a rank: {work}", end="")
    print("\n\nThe ring, step by step: whose keys a rank has, and which half of its queries | of the keys it uses.\n")
    for step in range(c):
        cells = []
        for me in range(c):
            block, = ring_blocks(4, c, me)[step]
            halves = "own" if block.is_first else "all|1st" if block.queries.start == 0 else "2nd|all"
            cells.append(f"{(me - step) % c} {halves:8s}")
        print(f"    step {step}   " + "  ".join(cells))


if __name__ == "__main__":
    demo(c=4)
