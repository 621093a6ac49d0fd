"""Context parallelism: every rank has 1/c of the tokens of each sequence, and only attention needs those of all ranks.

Saves: all but 1/c of the activations, so sequences can be c times as long; and time: each rank does 1/c of the work.
Costs: in each layer keys and values are sent (with Ulysses, queries and results as well), see the table, even those
       that a window or documents hide; in backward again. Gradients of weights are summed over dp x cp (zero.py).
Stops helping when: sending keys and values takes longer than attention to them. Ulysses: c must divide the heads.

    chunk of keys        0 1 2 3     A sequence is split into 2c chunks. Rank i has chunks i and
    chunk of queries 0 | 0           2c-1-i ("zig-zag"). The picture shows which of 2 ranks computes
                     1 | 1 1         which block of scores, under a causal mask: 2c+1 = 5 blocks each.
                     2 | 1 1 1       With contiguous shards rank 0 would compute 3 blocks and rank 1
                     3 | 0 0 0 0     7; of 4 ranks, the first 3 and the last 15 (python cp.py).

Attention to some of the keys gives o' and, per row, a logsumexp l' of scores. They are merged into o and l of other
keys, without overflow, by o += sigmoid(l' - l) (o' - o) and l = logaddexp(l, l'). In backward the final o and l
make blocks independent: probabilities are exp(scores - l), and softmax's derivative needs only rowsum(dO * O).

Shapes: B batch, S tokens per sequence, c ranks, s = S/c tokens per rank, m = s/2 per chunk, N query heads, K key and
value heads, D head width; q = N D and k = K D elements per token (Ulysses: after copying heads) of e bytes, of a bytes
in gradients of keys and values (accumulation dtype); W width of a latent and its key (mla.py: R + r).

                 sent per rank, layer and sequence           memory at a time, besides this rank's K and V
                 forward                 backward            forward               backward
    ring         (c-1) 2 s k e           (c-1) 2 s k (e+a)   2 shards of K and V   the same, and 4 of gradients
    allgather    (c-1) 2 s k e           (c-1) 2 s k (e+a)   1.5 x all, and own    all, and all gradients
    ulysses      (c-1)/c s (2 q + 2 k) e the same            all tokens of 1/c of the heads
    latents      (c-1) s W e             the same            all of K and V, saved the same, and all gradients

In forward Ulysses sends less than a ring with more than N/K + 1 ranks, but copies key and value heads if c does not
divide their number. --cp-ulysses U therefore nests both: U neighbours exchange tokens for heads, and inside, the c/U
ranks with the same heads attend in another style. --mask-documents --cp-zigzag document splits each document zig-zag,
not the sequence, as documents do not see each other.
Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention; zhuzilin's ring-flash-attention (zig-zag);
Llama Team 2024 (all-gather); Jacobs et al. 2023, Ulysses; Fang and Zhao 2024, USP (both); Dao 2023, FlashAttention-2.
"""
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import Function

from core.collectives import (
    ALONE,
    AllToAll__AllToAll,
    Group,
    Pending,
    all_gather,
    done,
    reduce_scatter,
    shift,
    to_device,
)
from core.config import padded_length
from core.param import IGNORED, acc_dtype
from operations import CAUSAL, MATH, AttentionKernel, Mask, uses_kernels
from recompute import Checkpoint
from sdpa import SDPA

# ---- which tokens a rank has ----------------------------------------------------------------------------------------

def own_chunks(c: int, i: int) -> tuple[int, int]:
    """The two chunks of rank i, of the 2c chunks of a sequence."""
    return i, 2 * c - 1 - i


def take_chunks(x: Tensor, c: int, chunks: Sequence[int]) -> Tensor:
    """Of x [..., S] the tokens of these chunks, in their order."""
    return x.unflatten(-1, (2 * c, -1))[..., list(chunks), :].flatten(-2)


def order_by_piece(documents: Tensor, ranks: int) -> Tensor:
    """Numbers of documents [B, S], ascending -> places [B, S] in an order in which the n-th of 2 ranks equal chunks has
    the n-th of as many pieces of every document: zig-zag shards then are equal work though documents do not see each
    other. A token's place modulo 2 ranks, sorted within its document, is its piece: so pieces are runs of tokens, and
    those of a document differ by a token at most. For one rank and documents 0 0 0 1 1 1 1 1 places are 0 1 0 1 0 1 0 1
    (modulo 2), pieces 0 0 1 0 0 1 1 1, and the order is 0 1 3 4 | 2 5 6 7."""
    numbers = torch.arange(documents.shape[1], device=documents.device) % (2 * ranks)
    pieces = (documents.long() * (2 * ranks) + numbers).sort(1).values % (2 * ranks)  # sorted by (document, number)
    return pieces.argsort(dim=1, stable=True)


def own_positions(s: int, c: int, i: int, device: torch.device) -> Tensor:
    """Where in the sequence of c s tokens rank i's s tokens are."""
    everywhere = torch.arange(c * s, device=device)
    return everywhere if c == 1 else take_chunks(everywhere, c, own_chunks(c, i))  # s may be odd if c is 1


def shard_sequences(tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, c: int, i: int,
                    tp: int = 1, document_ranks: int = 1) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rank i's shard of sequences: tokens and (already shifted) labels, [B, S] -> [B, s]. positions and documents
    [B, S]: both, or neither. Returned are positions [B, s] (None: `own_positions`), and documents of whole (padded)
    sequences, since queries' are compared with those of all keys. Sequences that c (and tp) ranks cannot share equally
    are padded with tokens -1, which no real token sees and which have no label. c = 1 changes nothing.
    document_ranks: between how many ranks each document is split; 1: none is, sequences are."""
    assert (positions is None) == (documents is None), "positions are counted from the beginning of documents"
    if c == 1:
        return tokens, labels, positions, documents
    seq = padded_length(tokens.shape[1], c, tp)
    padding, own = seq - tokens.shape[1], partial(take_chunks, c=c, chunks=own_chunks(c, i))
    tokens, labels = F.pad(tokens, (0, padding), value=-1), F.pad(labels, (0, padding), value=IGNORED)
    if documents is None:
        return own(tokens), own(labels), None, None
    documents = torch.cat((documents, documents[:, -1:].expand(-1, padding) + 1), 1)
    positions = F.pad(positions, (0, padding))
    if document_ranks > 1:
        order = order_by_piece(documents, document_ranks)
        tokens, labels, positions, documents = (x.gather(1, order) for x in (tokens, labels, positions, documents))
    return own(tokens), own(labels), own(positions), documents


# ---- attention, block by block --------------------------------------------------------------------------------------
# Attention runs in steps, as keys arrive: first to the rank's own, then to another rank's (ring) or those of whole
# sequences (all-gather). A style says which keys a step has and how they arrive; `visible_blocks` says which of the
# step's scores are computed: a few blocks, each one call of a kernel (operations.AttentionKernel). Its forward makes o
# and logsumexp of the block alone; its backward is given those of all blocks, and makes a share of dq, dk and dv.

class ScoreBlock(NamedTuple):
    """Scores of a slice of the rank's queries with a slice of a step's keys. The first block of each query, and no
    other, is causal: it has the same tokens' keys. In all others keys are earlier (with a window by Mask.offset)."""
    queries: slice
    keys: slice
    mask: Mask


class Style(NamedTuple):
    """A style that attends block by block: where the keys and values of each step, kv [tokens, 2, B, K, D], come from.

    chunks(c, i): for each step the chunks of the sequence whose keys rank i then has, in the order of kv.
    exchange(own kv, group): kv of each step. None: there is one step, with k and v as the layer has made them.
    send_back(dkv, pending, group): called after each step but the first, with gradients of its keys and values, and the
        Pending of the step before, or None. The last Pending: of all other ranks' gradients of own keys and values.
    """
    chunks: Callable[[int, int], list[Sequence[int]]]
    exchange: Callable[[Tensor, Group], Iterator[Tensor]] | None = None
    send_back: Callable[[Tensor, Pending | None, Group], Pending] | None = None

    def keys_and_values(self, k: Tensor, v: Tensor, group: Group) -> Iterator[Sequence[Tensor]]:
        """Both of each step, [B, K, tokens, D]."""
        return iter([(k, v)]) if self.exchange is None else map(by_head, self.exchange(stack_by_token(k, v), group))


class BlockAttention(Function):
    """Attention of q [B, N, s, D] to all ranks' keys. k, v: this rank's, [B, K, s, D]; with "latents" of all tokens,
    [B, K, S, D], and gather_tokens sums their gradients over ranks. steps: visible_blocks'."""

    @staticmethod
    def forward(ctx, q, k, v, style, steps, attention, group):
        (B, N, s, D), acc = q.shape, dict(dtype=acc_dtype(q.dtype), device=q.device)
        o = torch.empty(B, s, N, D, **acc).transpose(1, 2)  # the heads of a token are contiguous
        lse = torch.empty(B, N, s, **acc)
        for kv, blocks in zip(style.keys_and_values(k, v, group), steps):
            for rows, keys, mask in blocks:
                merge(o[:, :, rows], lse[:, :, rows],
                      *attention.forward(q[:, :, rows], *(x[:, :, keys] for x in kv), mask), is_first=mask.causal)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.style, ctx.steps, ctx.attention, ctx.group = style, steps, attention, group
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, own_dkv, pending = torch.zeros_like(q, dtype=lse.dtype), None, None
        for kv, blocks in zip(ctx.style.keys_and_values(k, v, ctx.group), ctx.steps):
            dkv = lse.new_zeros(kv[0].shape[2], 2, *k.shape[:2], k.shape[3])  # [tokens, 2, B, K, D]
            for rows, keys, mask in blocks:
                row_lse = lse[:, :, rows].contiguous()  # kernels take any strides of the others
                grads = ctx.attention.backward(
                    do[:, :, rows], q[:, :, rows], *(x[:, :, keys] for x in kv), o[:, :, rows], row_lse, mask)
                for total, grad in zip((dq[:, :, rows], *by_head(dkv[keys])), grads):
                    total += grad
            if own_dkv is None:
                own_dkv = dkv
            else:
                pending = ctx.style.send_back(dkv, pending, ctx.group)
        if pending:
            own_dkv += pending.wait()
        return dq.to(q.dtype), *by_head(own_dkv.to(k.dtype)), None, None, None, None


def stack_by_token(k: Tensor, v: Tensor) -> Tensor:
    """[B, K, s, D] of both -> [s, 2, B, K, D], whose chunks are contiguous, so gathering them needs no copy."""
    return torch.stack([rearrange(x, "b n s d -> s b n d") for x in (k, v)], 1)


def by_head(kv: Tensor) -> Tensor:
    """A view of keys and values: [s, 2, B, K, D] -> [2, B, K, s, D]."""
    return rearrange(kv, "s two b n d -> two b n s d")


def merge(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor, *, is_first: bool) -> None:
    """Merge a block's result into o [B, N, rows, D] and lse [B, N, rows], which are in the accumulation dtype."""
    if is_first:
        o.copy_(new_o)
        lse.copy_(new_lse)
    else:  # a row that sees no key of the block has new_lse = -inf and does not change
        o.lerp_(new_o.to(o.dtype), torch.sigmoid(new_lse - lse)[..., None])
        torch.logaddexp(lse, new_lse, out=lse)


# ---- ring and all-gather --------------------------------------------------------------------------------------------

def ring(kv: Tensor, group: Group) -> Iterator[Tensor]:
    """This rank's keys and values, then the previous rank's, and so on; meanwhile the next shard is received."""
    incoming = torch.empty_like(kv)
    for _ in range(group.size - 1):
        receiving = shift(incoming, kv, group)
        yield kv
        kv, incoming = receiving.wait(), kv  # two buffers in turns: NCCL waits for the kernels that have read this one
    yield kv


def ring_back(dkv: Tensor, pending: Pending | None, group: Group) -> Pending:
    """Gradients follow their keys one step behind: those of rank j's keys go from j+1, where they begin, round to j;
    each rank adds its own."""
    if pending:
        dkv += pending.wait()
    return shift(torch.empty_like(dkv), dkv, group)


def gather(kv: Tensor, group: Group) -> Iterator[Tensor]:
    """This rank's keys and values, then those of whole sequences, which are gathered meanwhile."""
    whole = kv.new_empty(group.size * len(kv), *kv.shape[1:])
    gathers = [all_gather(half, chunk, group, async_op=True) for half, chunk in zip(whole.chunk(2), kv.chunk(2))]
    yield kv
    del kv  # else it would exist until the kernels of the last step are done
    _, late = [gathering.wait() for gathering in gathers]
    late.copy_(torch.cat(late.chunk(group.size)[::-1]))  # the ranks from first to last have chunks 2c-1 … c
    yield whole


def gather_back(dkv: Tensor, pending: None, group: Group) -> Pending:
    """Gradients of whole sequences are summed over the ranks, and each gets those of its own keys; nothing hides it."""
    own = dkv.new_empty(len(dkv) // group.size, *dkv.shape[1:])
    (early, late), (own_early, own_late) = dkv.chunk(2), own.chunk(2)
    reduce_scatter(own_early, early, group)
    reduce_scatter(own_late, torch.cat(late.chunk(group.size)[::-1], out=early), group)  # early has been sent
    return done(own)


class GatherTokens(Function):
    """See gather_tokens. Backward sums the gradients of all ranks, as each uses the tokens differently."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        *_, whole = gather(x.transpose(0, 1).contiguous(), group)
        return whole.transpose(0, 1).contiguous()  # else the linear layer that saves it copies it

    @staticmethod
    def backward(ctx, grad):
        by_token = grad.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # gather_back writes to it
        return gather_back(by_token, None, ctx.group).wait().transpose(0, 1), None


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """[B, s, ...] of this rank's tokens to [B, S, ...] of all: for latents, of which each rank then makes the keys and
    values of all tokens, c times its share of that work."""
    return x if group.size == 1 else GatherTokens.apply(x, group)


STYLES = {  # --cp-style, but "ulysses", which has no blocks; and "latents", of models with --kv-lora-rank
    "allgather": Style(lambda c, i: [own_chunks(c, i), range(2 * c)], gather, gather_back),
    "ring": Style(lambda c, i: [own_chunks(c, (i - step) % c) for step in range(c)], ring, ring_back),
    "latents": Style(lambda c, i: [range(2 * c)])}  # keys and values of all tokens, made of gather_tokens' latents


# ---- which blocks have visible scores -------------------------------------------------------------------------------
# Blocks of rank 1 of 4, as chunks of queries x chunks of keys, if neither documents nor a window hide more:
#
#                  step 0                    step 1                    step 2       step 3
#     ring         1 6 x 1 6 (causal)        1 6 x 0                   6 x 3 4      6 x 2 5
#     allgather    1 6 x 1 6 (causal)        1 6 x 0,  6 x 2 3 4 5
#     latents      1 x 1 (causal),  1 x 0,  6 x 6 (causal),  6 x 0 1 2 3 4 5

def find_first_key(mask: Mask, query: int) -> int:
    """No key before this one is seen by this query or a later one of its chunk, in any of the sequences."""
    first = max(query - mask.window + 1, 0) if mask.window else 0
    if mask.documents is None:
        return first
    documents = mask.documents[0]
    not_before = documents >= documents[:, query, None]  # documents ascend along the chunk
    return max(first, not_before.int().argmax(1).min().item())  # argmax: the first


def visible_blocks(style: Style, seq: int, c: int, i: int, mask: Mask,
                   device: torch.device | str = "cpu") -> list[list[ScoreBlock]]:
    """The blocks that rank i computes at each step, without those that documents or a window hide entirely. seq, mask:
    length and mask of whole sequences. Numbers of documents [B, S] ascend along the sequence or, after order_by_piece,
    along each chunk; they are read in the host's memory, and those of the blocks' masks are on `device`."""
    own, m, window, steps = own_chunks(c, i), seq // (2 * c), mask.window, []
    first_keys = [find_first_key(mask, a * m) for a in own]
    documents = None if mask.documents is None else mask.documents[0]
    ascending = documents is None or bool((documents.diff() >= 0).all())
    assert ascending or not window, "a window counts positions of the sequence"
    # Each pair of chunks, a of queries and b of keys, that has visible scores is a block. Joined are (1) chunks of keys
    # that are neighbours in the step's buffer; (2) in the first step both chunks with themselves, which in order are
    # causal; (3) both chunks of queries, with keys that both see. Nothing is if there is a window, as a mask has one
    # distance, or if documents do not ascend, as kernels then skip no others.
    joins, both = ascending and not window, slice(0, 2 * m)
    for chunks in style.chunks(c, i):
        new = [b for b in chunks if not (steps and b in own)]  # attention to the rank's own keys was the first step
        blocks = []
        for n, (a, first_key) in enumerate(zip(own, first_keys)):
            rows = slice(n * m, (n + 1) * m)
            visible = [b for b in new if b <= a and (b + 1) * m > first_key]
            for b in sorted(visible, key=lambda b: b != a):  # its own first: `merge`
                at = chunks.index(b) * m  # where this step's keys have chunk b
                hidden = max(first_key - b * m, 0)  # its first keys, which none of these queries sees, are left out
                start, stop = at + hidden, at + m
                if joins and blocks and blocks[-1].queries == rows and blocks[-1].keys.stop == start:
                    start = blocks.pop().keys.start  # (1)
                offset = (a - b) * m - hidden if window else 0
                blocks.append(ScoreBlock(rows, slice(start, stop), Mask(b == a, window, offset=offset)))
        if joins and new == [*own]:
            blocks = [ScoreBlock(both, both, CAUSAL)]  # (2)
        elif joins and len(blocks) > 1 and blocks[0][1:] == blocks[1][1:]:  # the same keys and mask
            blocks[:2] = [blocks[0]._replace(queries=both)]  # (3)
        steps.append(blocks)
    if documents is None:
        return steps
    of_own, *of_steps = [to_device(take_chunks(documents, c, x), device) for x in (own, *style.chunks(c, i))]
    return [[block._replace(mask=block.mask._replace(documents=(of_own[:, block.queries], of_step[:, block.keys])))
             for block in blocks] for blocks, of_step in zip(steps, of_steps)]


# ---- Ulysses --------------------------------------------------------------------------------------------------------

def ulysses(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor], group: Group) -> Tensor:
    """All-to-all among the group's U ranks: each gets their tokens, for 1/U of the heads, attends, and sends results
    back. If the group has all ranks, these tokens are the sequence. If it is one of n = c/U groups of neighbours, these
    are chunks r and 2n-1-r of 2n, in order: the zig-zag shard of the r-th of n ranks, for which `attend` is made. With
    c = 4, U = 2 ranks 0 and 1 have chunks 0 7 and 1 6 of 8, together 0 1 6 7, which are chunks 0 and 3 of 4."""
    u = group.size
    copies = u // math.gcd(u, k.shape[1])  # of each key and value head, so that u divides them
    heads = [q, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))]
    by_rank = torch.cat([rearrange(x, "b (u n) s d -> u b n s d", u=u) for x in heads], 2)
    shards = AllToAll__AllToAll.apply(by_rank, [1] * u, [1] * u, group)  # one row to and from each rank
    early, late = rearrange(shards, "u b n (two m) d -> two b n u m d", two=2)
    tokens = torch.cat((early, late.flip(2)), 2).flatten(2, 3)  # early chunks ascend, late ones descend
    counts = [x.shape[1] // u for x in heads]
    del heads, by_rank, shards, early, late  # else they would exist during attention
    o = attend(*tokens.split(counts, 1))  # and back, with the inverse of each step
    early, late = rearrange(o, "b n (two u m) d -> two u b n m d", two=2, u=u)
    shards = AllToAll__AllToAll.apply(torch.cat((early, late.flip(0)), 3), [1] * u, [1] * u, group)
    return rearrange(shards, "u b n s d -> b s (u n) d").transpose(1, 2)


# ---- attention for a model's layers ---------------------------------------------------------------------------------

def attention_by_window(windows: Iterable[int], tokens: Tensor, documents: Tensor | None, *, kernel: str, head_dim: int,
                        dtype: torch.dtype, groups: dict[str, Group], style: str = "allgather",
                        earlier: int = 0, recompute: bool = False) -> dict[int, Callable[..., Tensor]]:
    """Window (0: none) -> attention of this rank's tokens [B, s], made once per forward: a function of q [B, N, s, D],
    and k and v [B, K, s, D] (latents: [B, K, S, D]), of that dtype.

    documents: [B, S], of whole sequences, in the host's memory if "cp" has several ranks. kernel: of --attention.
    earlier: tokens before these, whose keys and values are cached as far as the window reaches. recompute: scores are
    not saved, but computed again in backward.
    """
    out, seq = {}, tokens.shape[1] * groups.get("cp", ALONE).size
    for window in set(windows):
        cached = min(earlier, window - 1) if window else earlier
        mask = Mask(True, window, None if documents is None else (documents, documents), offset=cached)
        attention = choose_attention(kernel, mask, head_dim, tokens, dtype)
        out[window] = context_parallel(groups, style, seq, mask, attention, tokens.device, recompute)
    return out


def choose_attention(kernel: str, mask: Mask, head_dim: int, like: Tensor, dtype: torch.dtype) -> AttentionKernel:
    """The implementation that --attention names. like: a tensor on the device in question; dtype: of q, k and v."""
    slow_in_torch = (mask.documents is not None or mask.window > 0) and uses_kernels(like) and dtype != torch.float64
    if kernel == "triton" or (kernel == "auto" and slow_in_torch and head_dim <= 256):
        import flash  # needs Triton, which a CPU does without
        return AttentionKernel(flash.flash_attention, flash.flash_forward, flash.flash_backward)
    return MATH if kernel == "math" else SDPA


def context_parallel(groups: dict[str, Group], style: str, seq: int, mask: Mask, attention: AttentionKernel,
                     device: torch.device | str = "cpu", recompute: bool = False) -> Callable[..., Tensor]:
    """Attention of this rank's tokens. Outside, the head group trades tokens for heads (Ulysses); inside, the key group
    attends block by block; either may be one rank. groups: "cp", all ranks; with --cp-ulysses "cp_heads" and "cp_keys".
    style: of config.CP_STYLES, or "latents": k and v of all tokens. seq (of new tokens), mask: of whole sequences."""
    cp, key_group, head_group = (groups.get(axis, ALONE) for axis in ("cp", "cp_keys", "cp_heads"))
    if head_group.size == 1:  # no --cp-ulysses
        head_group, key_group = (cp, ALONE) if style == "ulysses" else (ALONE, cp)
    if key_group.size > 1:
        assert mask.causal and mask.offset == 0, "blocks are those of a causal mask without cached tokens"
        steps = visible_blocks(STYLES[style], seq, key_group.size, key_group.rank, mask, device)

        def attend(q, k, v):
            return BlockAttention.apply(q, k, v, STYLES[style], steps, attention, key_group)
    else:
        if mask.documents is not None:
            mask = mask._replace(documents=tuple(to_device(documents, device) for documents in mask.documents))
        attend = partial(attention.attend, mask=attention.prepare_mask(mask, seq, seq + mask.offset, device))
        if recompute and attention.saves_scores:
            attend = partial(Checkpoint.apply, attend, None)  # autograd saves its inputs
    return attend if head_group.size == 1 else partial(ulysses, attend=attend, group=head_group)


# ---- demo: python cp.py ---------------------------------------------------------------------------------------------

def demo(c: int) -> None:
    print(f"Who computes which blocks of scores, 0 to {c - 1}. Queries from top to bottom, keys from left to right.")
    chunks = range(2 * c)
    for name, owner in ("contiguous", [j // 2 for j in chunks]), ("zig-zag", [min(j, 2 * c - 1 - j) for j in chunks]):
        print(f"\n    {name}: {[sum(j + 1 for j in chunks if owner[j] == i) for i in range(c)]} blocks per rank")
        print(*("    " + f"{owner[j]} " * (j + 1) for j in chunks), sep="\n")


if __name__ == "__main__":
    from core.collectives import run_demo
    run_demo(lambda group: demo(c=4))
