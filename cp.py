"""Context parallelism: each sequence is split over c ranks, and only attention needs the tokens of
other ranks.

    a sequence, cut into 2c = 8 chunks      0    1    2    3    4    5    6    7
    the rank that has the chunk             r0   r1   r2   r3   r3   r2   r1   r0      ("zig-zag")

    embedding, norms, linear layers, loss   each rank computes them for its own tokens
    attention                               each rank has the queries of its own tokens, but these need the keys and
                                            values of all earlier tokens

    There are three ways to bring queries and keys together:

    all-gather   every rank receives the keys and values of the whole sequence        Llama 3
    ring         keys and values are sent round a ring, one shard at a time           ring attention
    Ulysses      ranks trade: for attention each has all tokens, but only 1/c of the heads

A rank has 1/c of the tokens of every sequence. Almost every layer treats a token by itself, so it
runs unchanged on fewer tokens. Attention is different: a query attends to all earlier tokens, which
are on other ranks. `plain_attention` below is context parallelism in six lines. The rest of the
file divides the work equally, sends while it computes, and holds fewer keys at a time.

Shapes: B batch; S tokens per sequence; c ranks; s = S/c tokens per rank; m = s/2 tokens per chunk;
N query heads; K key and value heads; D width of a query or key; V width of a value or result, which
is D except in latent attention (mla.py). The table is for one layer and one sequence, with V = D.
In it, e is the bytes of an element of keys and values, and g the bytes of an element of their
gradients, which are summed in the accumulation dtype (g = 4 in a bf16 run).

               bytes sent by a rank                            peak memory, besides the rank's own K and V
               forward               backward                  forward                 backward
    ring       (c-1) 2 s K D e       (c-1) 2 s K D (e + g)     K and V of 2 ranks      K and V of 2 ranks,
                                                                                       and 4 such gradients
    allgather  (c-1) 2 s K D e       (c-1) 2 s K D (e + g)     1.5 x K and V of all,   K and V of all,
                                                               and a copy of its own   and their gradients
    ulysses    (c-1)/c 2 s (N+K) D e (c-1)/c 2 s (N+K) D e     Q, K, V of all tokens, 1/c of the heads

1.5 x: half of the gathered keys and values are copied once, to reorder them (`gather`).

Saves: memory and time. Each rank keeps 1/c of the activations and does 1/c of the work, so that a
       sequence can be c times as long. Latent attention is the exception: there every rank has the
       keys and values of all tokens (`latents` below).
Costs: the bytes in the table. With a ring or all-gather, backward sends keys and values again,
       because each rank saves only its own. In every style keys and values are sent even where a
       window or documents hide them. The gradients of weights are summed over dp x cp (zero.py).
Stops helping when: sending keys and values takes longer than attending to them.

Which one: all-gather is the default. It sends the same bytes as a ring, in fewer and larger
collectives, and computes in fewer and larger calls of a kernel. A ring needs less memory. Ulysses
needs c to divide the query heads (of a tensor parallel rank). If c does not divide the key and
value heads, it sends copies of them. Otherwise, with more than N/K + 1 ranks, it sends less in
forward than the other two. --cp-ulysses U combines it with one of them (`both at once`). Then U has
to divide the key and value heads, and c may be larger than the number of heads allows Ulysses
alone.

Easily got wrong:
- Labels are shifted before the sequence is cut, because a shard's last label is another rank's token.
- Rotary angles need positions in the sequence, not in the shard (`own_positions`).
- Backward of a block of scores needs the log-sum-exp over all keys, not over the block's.

Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention; zhuzilin's
ring-flash-attention (zig-zag); Llama Team 2024 (all-gather); Jacobs et al. 2023, Ulysses; Fang and
Zhao 2024, USP (both); Dao 2023, FlashAttention-2.
"""
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import Function

from core.collectives import (
    ALONE,
    MAX,
    AllGather__ReduceScatter,  # names are forward__backward: the collective of each direction
    AllToAll__AllToAll,
    Group,
    Pending,
    all_gather,
    all_reduce,
    done,  # a Pending whose result is already there
    gather_rows,
    reduce_scatter,
    run_demo,
    sent,
    shift,
    to_device,
)
from core.config import CP_STYLES, padded_length
from core.param import IGNORED, acc_dtype
from operations import CAUSAL, MATH, AttentionKernel, Mask, repeat_kv_heads, uses_kernels
from recompute import Checkpoint
from sdpa import SDPA

# ---- the plain version: gather keys and values, mask by position ----------------------------------------------------

def plain_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, group: Group) -> Tensor:
    """Attend causally from this rank's queries to the tokens of all ranks.

    q: [B, N, s, D]. k: [B, K, s, D]. v: [B, K, s, V]. Returns o [B, N, s, V].
    positions: [s], the positions of this rank's tokens in the sequence, in any order.

    Backward reduce-scatters the gradients of keys and values: each rank used all of them, so each
    has a term of every gradient.
    """
    all_k = AllGather__ReduceScatter.apply(k.movedim(2, 0), group).movedim(0, 2)  # [B, K, S, D], rank by rank
    all_v = AllGather__ReduceScatter.apply(v.movedim(2, 0), group).movedim(0, 2)
    all_positions = gather_rows(positions, group).wait()  # [S], in the same order
    visible = positions[:, None] >= all_positions[None, :]  # [s, S]: a query sees its own token and earlier ones
    all_k, all_v = repeat_kv_heads(q, all_k, all_v)
    return F.scaled_dot_product_attention(q, all_k, all_v, visible)


# What the rest of this file changes:
#
#     positions    are chosen so that all ranks have equal work (zig-zag)
#     visible      is not a tensor: blocks of scores that are entirely visible need no mask, and
#                  blocks that are entirely hidden are not computed
#     all_k        arrives while the rank attends to other keys (all-gather), or never exists (ring)
#     heads        are divided, in place of queries (Ulysses)

# ---- zig-zag: which tokens a rank has -------------------------------------------------------------------------------
# Under a causal mask a later query sees more keys, so it is more work. If rank i had the i-th part
# of the sequence, the last rank would have the most work, and all others would wait for it.
# Therefore the sequence is cut into 2c chunks, and each rank gets one chunk from the front and one
# from the back:
#
#     contiguous, c = 2                     zig-zag, c = 2
#
#     chunk of keys    0 1 2 3              chunk of keys    0 1 2 3
#     queries of 0     0                    queries of 0     0
#                1     0 0                             1     1 1
#                2     1 1 1                           2     1 1 1
#                3     1 1 1 1                         3     0 0 0 0
#
#     rank 0: 3 blocks, rank 1: 7           rank 0: 5 blocks, rank 1: 5
#
# A number is the rank that computes a block of scores. With 4 contiguous ranks, the first computes 3
# blocks and the last 15 (python cp.py). In zig-zag order every rank computes 2c + 1.

def own_chunks(c: int, i: int) -> tuple[int, int]:
    """Return the indices of rank i's two chunks among the 2c chunks of a sequence."""
    return i, 2 * c - 1 - i


def take_chunks(x: Tensor, c: int, chunks: Sequence[int]) -> Tensor:
    """Return the tokens of some of the 2c chunks of x [..., S], in the order of `chunks`."""
    return x.unflatten(-1, (2 * c, -1))[..., list(chunks), :].flatten(-2)


def own_positions(s: int, c: int, i: int, device: torch.device) -> Tensor:
    """Return the places of rank i's s tokens in the sequence of c s tokens."""
    everywhere = torch.arange(c * s, device=device)
    return everywhere if c == 1 else take_chunks(everywhere, c, own_chunks(c, i))  # s may be odd if c is 1


def shard_sequences(tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, c: int, i: int,
                    tp: int = 1, document_ranks: int = 1) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cut rank i's shard out of sequences; with c = 1 return everything as it is.

    tokens, labels: [B, S] -> [B, s]. A token's label is the next token: they have been shifted.
    positions: [B, S] -> [B, s], counted from the beginning of each document. None: use
        `own_positions`.
    documents: the number of each token's document, [B, S], or None like positions. They are
        returned for the whole sequence, padded, because attention compares the document of a query
        with the documents of all keys.
    tp: tensor parallel ranks that split a shard's tokens again (sequence parallelism).
    document_ranks: 1 if the sequence is split, not its documents. With --cp-zigzag document it is
        the number of ranks over which each document is dealt (`order_by_piece`): c, or c/U with
        --cp-ulysses U.

    A sequence that the ranks cannot share equally is padded with tokens -1, which are a document of
    their own, are seen by no real token and have no label.
    """
    assert (positions is None) == (documents is None), "positions are counted from the beginning of documents"
    if c == 1:
        return tokens, labels, positions, documents
    own = partial(take_chunks, c=c, chunks=own_chunks(c, i))
    padding = padded_length(tokens.shape[1], c, tp) - tokens.shape[1]
    tokens = F.pad(tokens, (0, padding), value=-1)
    labels = F.pad(labels, (0, padding), value=IGNORED)
    if documents is None:
        return own(tokens), own(labels), None, None
    positions = F.pad(positions, (0, padding))
    documents = torch.cat((documents, documents[:, -1:].expand(-1, padding) + 1), 1)
    if document_ranks > 1:
        order = order_by_piece(documents, document_ranks)
        tokens, labels, positions, documents = (x.gather(1, order) for x in (tokens, labels, positions, documents))
    return own(tokens), own(labels), own(positions), documents


# ---- which scores are visible: three cases --------------------------------------------------------------------------
# Take a chunk of queries and a chunk of keys. Under a causal mask there are three cases:
#
#     query_chunk after key_chunk         every query sees every key: a block without a mask          ■
#     query_chunk equal to key_chunk      the same tokens: a block with the ordinary causal mask      ◣
#     query_chunk before key_chunk        no query sees any key: nothing is computed                  ·
#
# A rank attends in steps, as keys arrive. In a step of the ring, rank i has the keys of one rank j.
# Its two chunks of queries and the two chunks of keys make one of three pictures, each of them one
# call of a kernel:
#
#                           j = i, own keys      j before i           j after i
#     keys of chunk         i     2c-1-i         j     2c-1-j         j     2c-1-j
#     queries of i          ◣     ·              ■     ·              ·     ·
#     queries of 2c-1-i     ■     ◣              ■     ·              ■     ■
#
#     one call              all queries,         all queries,         the second half of the queries,
#                           all keys, causal     first half of keys   all keys
#
# Both pictures on the right have two full blocks, so all ranks have equal work at every step, too.
# For example, these are the blocks of rank 1 of 4, which has chunks 1 and 6. They are written as
# chunks of queries x chunks of keys:
#
#                    step 0                   step 1                    step 2       step 3
#     ring           1 6 x 1 6 (causal)       1 6 x 0                   6 x 3 4      6 x 2 5
#     allgather      1 6 x 1 6 (causal)       1 6 x 0,  6 x 2 3 4 5
#     latents        1 x 1 (causal),  1 x 0,  6 x 6 (causal),  6 x 0 1 2 3 4 5

class ScoreBlock(NamedTuple):
    """A block of scores: a slice of the rank's queries, and a slice of the keys of one step.

    The first block of each query is the causal one. Its keys belong to the same tokens as its
    queries, so every query sees at least its own token. In all other blocks every key is earlier
    than every query. By how much they are earlier matters only if there is a window. Mask.offset
    says it then, and is 0 otherwise.

    mask: a Mask of operations.py. Its fields here are
        causal       whether keys after the query are hidden
        window       keys this far before the query, or farther, are hidden; 0: there is no window
        documents    the documents of the queries [B, rows] and of the keys [B, columns]; or None
        offset       the first query's position minus the first key's
    """
    queries: slice
    keys: slice
    mask: Mask


def visible_blocks(style: "Style", seq: int, c: int, i: int, mask: Mask,
                   device: torch.device | str = "cpu") -> list[list[ScoreBlock]]:
    """List the blocks that rank i computes at each step.

    style: says which chunks of keys the rank has at each step.
    seq, mask: the length and the mask of whole sequences. There mask.documents is a pair of equal
        [B, S], because queries and keys are the same tokens. It is read on the host. The documents
        in the masks of the blocks are on `device`.

    For each step and each chunk of queries, the three cases above are applied to the chunks of keys
    that have just arrived. Then neighbouring blocks are joined.

    At first reading, assume that there is neither a window nor documents. Then `hidden` and
    `offset` are 0, and blocks are always joined. See `windows and documents`.
    """
    m = seq // (2 * c)
    window = mask.window
    own = own_chunks(c, i)
    first_keys = [find_first_key(mask, query_chunk * m) for query_chunk in own]
    ascending = documents_ascend(mask)
    assert ascending or not window, "a window counts positions of the sequence"
    can_join = ascending and not window
    both = slice(0, 2 * m)
    attended = set()  # the chunks of keys of earlier steps
    steps = []
    for key_chunks in style.chunks(c, i):
        # With all-gather the second step has all keys, but the rank has attended to its own in the first.
        new_chunks = [key_chunk for key_chunk in key_chunks if key_chunk not in attended]
        attended.update(new_chunks)
        blocks = []
        for place, query_chunk in enumerate(own):
            queries = slice(place * m, (place + 1) * m)
            if query_chunk in new_chunks:  # the causal block comes first: `merge` starts o and lse with it
                start = key_chunks.index(query_chunk) * m
                blocks.append(ScoreBlock(queries, slice(start, start + m), Mask(True, window)))
            for key_chunk in new_chunks:
                hidden = max(first_keys[place] - key_chunk * m, 0)  # the chunk's first keys, hidden from all queries
                if key_chunk < query_chunk and hidden < m:  # the queries are after the keys
                    start = key_chunks.index(key_chunk) * m
                    offset = (query_chunk - key_chunk) * m - hidden if window else 0
                    keys = slice(start + hidden, start + m)
                    blocks.append(ScoreBlock(queries, keys, Mask(False, window, offset=offset)))
        if can_join and new_chunks == [*own]:
            blocks = [ScoreBlock(both, both, CAUSAL)]  # the two own chunks are like one short sequence
        elif can_join:
            blocks = join_blocks(blocks, both)
        steps.append(blocks)
    return steps if mask.documents is None else add_documents(steps, style, mask.documents[0], c, i, device)


def join_blocks(blocks: list[ScoreBlock], both: slice) -> list[ScoreBlock]:
    """Make fewer and larger blocks of the same scores, because each block is a call of a kernel.

    both: the slice of all the rank's queries. Two blocks with equal masks become one if
    - their queries are the same, and their keys are neighbours in the step's buffer: for example,
      6 x 3 and 6 x 4 become 6 x 3 4;
    - their keys are the same, for both chunks of queries: 1 x 0 and 6 x 0 become 1 6 x 0.
    """
    joined = []
    for block in blocks:
        previous = joined[-1] if joined else None
        if (previous and previous.queries == block.queries and previous.mask == block.mask
                and previous.keys.stop == block.keys.start):
            joined[-1] = previous._replace(keys=slice(previous.keys.start, block.keys.stop))
        else:
            joined.append(block)
    # Only the first two blocks can have the same keys: the rank's early chunk of queries comes first,
    # and it sees one run of keys. With latents its first block is causal, and nothing is joined here.
    if len(joined) > 1 and joined[0].keys == joined[1].keys and joined[0].mask == joined[1].mask:
        joined[:2] = [joined[0]._replace(queries=both)]
    return joined


# ---- two partial results, merged by their log-sum-exp ---------------------------------------------------------------
# A rank that attends block by block has to put a softmax together from parts of its row. For
# one query with scores x_j and values v_j, attention to some of the keys returns
#
#     l = log Σ exp(x_j)              the log-sum-exp of the scores
#     o = Σ exp(x_j - l) v_j          the softmax-weighted mean of the values
#
# exp(l) is the weight of these keys as a whole. Let o', l' be the result for other keys. For all of
# them together
#
#     l_new = log(exp(l) + exp(l'))                           = logaddexp(l, l')
#     o_new = exp(l - l_new) o + exp(l' - l_new) o'           = o + sigmoid(l' - l) (o' - o)
#
# because exp(l' - l_new) = 1 / (1 + exp(l - l')) = sigmoid(l' - l). Neither form on the right can
# overflow.
#
# Backward needs no merge. With the final o and l of a row, the blocks are independent of each
# other:
#
#     p = exp(x - l)                  the probabilities of the block, already those of the whole row
#     dv = pᵀ do
#     dx = p (do vᵀ - rowsum(do o))   rowsum(do o) is the part of softmax's derivative that sums over all keys

def merge(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor, *, is_first: bool) -> None:
    """Merge a block's new_o and new_lse into o [B, N, rows, V] and lse [B, N, rows], in place.

    o and lse have the accumulation dtype. is_first: o and lse have no values of these rows yet.

    A row that sees no key of the block does not change. Its new_lse is -inf, so its weight is 0.
    Its new_o must be finite, because 0 x NaN is NaN. Every AttentionKernel returns 0 there.
    """
    if is_first:
        o.copy_(new_o)
        lse.copy_(new_lse)
    else:
        o.lerp_(new_o.to(o.dtype), torch.sigmoid(new_lse - lse)[..., None])
        torch.logaddexp(lse, new_lse, out=lse)


# ---- attention, block by block --------------------------------------------------------------------------------------
# A style (ring, all-gather) brings the keys and values of other ranks here, step by step. For each
# visible block of a step we call a kernel and merge its result. A kernel is an AttentionKernel of
# operations.py: its forward returns o and lse of one block. Its backward takes the merged o and
# lse, and returns the block's terms of dq, dk and dv.

class Style(NamedTuple):
    """How the keys and values of all ranks reach a rank, step by step.

    For example, this is the ring of c = 4 on rank 1. A shard is kv [tokens, B, K, D + V]: keys and
    values, by token.

        step                           0           1           2           3
        chunks(4, 1)                   (1, 6)      (0, 7)      (3, 4)      (2, 5)
        exchange yields the shard of   rank 1      rank 0      rank 3      rank 2
        send_back(dkv of this step)    not called  1st call    2nd call    3rd call

    chunks(c, i): the chunks of keys that rank i has at each step, in the order of kv's tokens. In each
        step of the styles below, all ranks have equal work (tests/test_cp.py).
    exchange(own kv, group): an iterator that yields the kv of each step. It sends before it yields,
        so that the exchange runs while the step is computed. None: there is one step, with the k
        and v that the layer has made (latents).
    send_back(dkv, pending, group): called in backward after each step except the first, whose keys
        are the rank's own. It starts to send the gradients of the step's keys and values towards
        their owner, and returns a Pending. The first call gets None as `pending`, and each later
        call gets the Pending of the call before it. The result of the last one is the sum, over all
        other ranks, of their gradients of this rank's keys and values.
    """
    chunks: Callable[[int, int], list[Sequence[int]]]
    exchange: Callable[[Tensor, Group], Iterator[Tensor]] | None = None
    send_back: Callable[[Tensor, Pending | None, Group], Pending] | None = None

    def keys_and_values(self, k: Tensor, v: Tensor, group: Group) -> Iterable[Sequence[Tensor]]:
        """Return an iterable of (k, v) for each step, [B, K, tokens, D] and [B, K, tokens, V]."""
        if self.exchange is None:
            return [(k, v)]
        return (by_head(kv, k.shape[3]) for kv in self.exchange(join_by_token(k, v), group))


class BlockAttention(Function):
    """Attention of q [B, N, s, D] to the keys of all ranks: o [B, N, s, V].

    k, v: this rank's keys [B, K, s, D] and values [B, K, s, V]. With "latents" they are the keys and
        values of all S tokens, and `gather_tokens` sums their gradients over the ranks.
    steps: the result of `visible_blocks`.
    """

    @staticmethod
    def forward(ctx, q, k, v, style, steps, attention, group):
        B, N, s, _ = q.shape
        options = dict(dtype=acc_dtype(q.dtype), device=q.device)
        o = torch.empty(B, s, N, v.shape[3], **options).transpose(1, 2)  # the heads of a token are contiguous
        lse = torch.empty(B, N, s, **options)
        for (step_k, step_v), blocks in zip(style.keys_and_values(k, v, group), steps):
            for queries, keys, mask in blocks:
                merge(o[:, :, queries], lse[:, :, queries],
                      *attention.forward(q[:, :, queries], step_k[:, :, keys], step_v[:, :, keys], mask),
                      is_first=mask.causal)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.style, ctx.steps, ctx.attention, ctx.group = style, steps, attention, group
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        B, K, _, D = k.shape
        V = v.shape[3]
        dq = torch.zeros_like(q, dtype=lse.dtype)
        own_dkv = pending = None
        for (step_k, step_v), blocks in zip(ctx.style.keys_and_values(k, v, ctx.group), ctx.steps):
            dkv = lse.new_zeros(step_k.shape[2], B, K, D + V)  # gradients of this step's keys and values, by token
            step_dk, step_dv = by_head(dkv, D)  # views: what is added to them is added to dkv
            for queries, keys, mask in blocks:
                row_lse = lse[:, :, queries].contiguous()  # the kernels take other tensors with any strides
                block_dq, block_dk, block_dv = ctx.attention.backward(
                    do[:, :, queries], q[:, :, queries], step_k[:, :, keys], step_v[:, :, keys], o[:, :, queries],
                    row_lse, mask)
                dq[:, :, queries].add_(block_dq)
                step_dk[:, :, keys].add_(block_dk)
                step_dv[:, :, keys].add_(block_dv)
                del block_dq, block_dk, block_dv  # else they live while the next block's are computed
            if own_dkv is None:
                own_dkv = dkv  # the first step's keys are this rank's own: nothing is sent
            else:
                pending = ctx.style.send_back(dkv, pending, ctx.group)
        if pending:
            own_dkv += pending.wait()
        dk, dv = by_head(own_dkv.to(k.dtype), D)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def join_by_token(k: Tensor, v: Tensor) -> Tensor:
    """Join k [B, K, s, D] and v [B, K, s, V] to kv [s, B, K, D + V].

    The chunks of kv are contiguous, so they are sent and gathered without another copy.
    """
    return torch.cat([rearrange(x, "b n s d -> s b n d") for x in (k, v)], -1)


def by_head(kv: Tensor, D: int) -> Sequence[Tensor]:
    """View kv [s, B, K, D + V] as k [B, K, s, D] and v [B, K, s, V]."""
    return rearrange(kv, "s b n d -> b n s d").split([D, kv.shape[-1] - D], -1)


# ---- the ring -------------------------------------------------------------------------------------------------------
# Forward. Each step passes kv to the next rank. Kj stands for the keys and values of rank j:
#
#               rank 0    rank 1    rank 2    rank 3
#     step 0    K0        K1        K2        K3           attend to the own keys, and send them on
#     step 1    K3        K0        K1        K2           attend to the previous rank's keys, send them on
#     step 2    K2        K3        K0        K1
#     step 3    K1        K2        K3        K0           the last step sends nothing
#
# Backward repeats these steps, because a rank has saved only its own keys. Now gradients are sent,
# too. At each step a rank computes its term of dKj, adds it to the terms that the previous rank has
# sent, and passes the sum on. So dKj follows Kj, one step behind. This is the path of dK0; the
# numbers in brackets are the ranks whose terms are in the sum:
#
#               rank 0               rank 1             rank 2               rank 3
#     step 0    dK0 = [0], stays
#     step 1                         dK0 = [1] ──►
#     step 2                                            dK0 = [1+2] ──►
#     step 3                                                                 dK0 = [1+2+3] ──► rank 0
#     end       dK0 = [0+1+2+3]

def ring(kv: Tensor, group: Group) -> Iterator[Tensor]:
    """Yield this rank's keys and values, then the previous rank's, and so on.

    While the caller attends to one shard, the next one is received.
    """
    incoming = torch.empty_like(kv)
    for _ in range(group.size - 1):
        receiving = shift(incoming, kv, group)
        yield kv
        # The old kv becomes the next receive buffer. Kernels may still read it. Torch makes NCCL's stream
        # wait for them before it receives (in the call of batch_isend_irecv in `shift`).
        kv, incoming = receiving.wait(), kv
    yield kv


def ring_back(dkv: Tensor, pending: Pending | None, group: Group) -> Pending:
    """Add this rank's terms to the sum received from the previous rank, and pass it on to the next.

    dkv: this rank's terms of the gradients of one shard. pending: the previous rank's sum, if any.
    """
    if pending:
        dkv += pending.wait()
    return shift(torch.empty_like(dkv), dkv, group)


# ---- all-gather -----------------------------------------------------------------------------------------------------
# The line of `plain_attention` that changes: the gather runs while the rank attends to its own
# keys. So there are two steps, the rank's own keys and the keys of whole sequences. Each rank's
# early and late chunks are gathered apart:
#
#     early chunks, from rank 0 to c-1    0 1 2 3       in the order of the sequence
#     late chunks, from rank 0 to c-1     7 6 5 4       in the opposite order: reversed after the gather

def gather(kv: Tensor, group: Group) -> Iterator[Tensor]:
    """Yield this rank's keys and values, then the keys and values of whole sequences.

    While the caller attends to the rank's own keys, the others are gathered.
    """
    whole = kv.new_empty(group.size * len(kv), *kv.shape[1:])
    gathers = [all_gather(half, chunk, group, async_op=True) for half, chunk in zip(whole.chunk(2), kv.chunk(2))]
    yield kv
    del kv  # else it would exist until the kernels of the last step are done
    _, late = [gathering.wait() for gathering in gathers]
    late.copy_(torch.cat(late.chunk(group.size)[::-1]))
    yield whole


def gather_back(dkv: Tensor, pending: None, group: Group) -> Pending:
    """Sum the gradients of all keys and values over the ranks. Each rank gets the sums for its own
    tokens.

    It is the reverse of `gather`, and does not overlap with computation: no step is left to compute.
    The result is a finished Pending.
    """
    own = dkv.new_empty(len(dkv) // group.size, *dkv.shape[1:])
    early, late = dkv.chunk(2)
    own_early, own_late = own.chunk(2)
    reduce_scatter(own_early, early, group)
    reduce_scatter(own_late, torch.cat(late.chunk(group.size)[::-1], out=early), group)  # early has been sent
    return done(own)


# ---- latents: gather before the keys are made -----------------------------------------------------------------------
# Latent attention (mla.py) makes the keys and values of all heads from one narrow vector per token,
# the latent. The ranks gather latents, and each makes the keys and values of all tokens, which is c
# times its share of that work. Then there is one step, in which all keys are there. W is the width
# of a latent and its rotated key (R + r in mla.py):
#
#               bytes sent by a rank           memory
#               forward        backward        forward                 backward
#     latents   (c-1) s W e    (c-1) s W e     K and V of all tokens   K and V of all tokens, and their gradients
#
# K and V are saved between forward and backward, unless they are recomputed (recompute.py). These
# exchanges do not overlap with computation.

class GatherTokens(Function):
    """The autograd function of `gather_tokens`.

    Backward sums the gradients of all ranks, because each rank uses all tokens.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        *_, whole = gather(x.transpose(0, 1).contiguous(), group)  # the last step of two
        return whole.transpose(0, 1).contiguous()  # else the linear layer that saves it copies it

    @staticmethod
    def backward(ctx, grad):
        by_token = grad.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # gather_back writes to it
        return gather_back(by_token, None, ctx.group).wait().transpose(0, 1), None


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gather latents [B, s, ...] to [B, S, ...], in the order of the sequence."""
    return x if group.size == 1 else GatherTokens.apply(x, group)


# ---- the table of styles: which chunks of keys a rank has at each step ----------------------------------------------

def ring_chunks(c: int, i: int) -> list[Sequence[int]]:
    """At step t of the ring, rank i has the keys of rank i - t."""
    return [own_chunks(c, (i - step) % c) for step in range(c)]


def gathered_chunks(c: int, i: int) -> list[Sequence[int]]:
    """With all-gather, rank i has its own keys, then all keys."""
    return [own_chunks(c, i), range(2 * c)]


def all_chunks(c: int, i: int) -> list[Sequence[int]]:
    """With latents, there is one step, and it has all keys."""
    return [range(2 * c)]


# The values of --cp-style, except "ulysses", which has no blocks. Models with --kv-lora-rank use
# "latents" in place of "allgather".
STYLES = {
    "allgather": Style(gathered_chunks, gather, gather_back),
    "ring": Style(ring_chunks, ring, ring_back),
    "latents": Style(all_chunks)}


# ---- Ulysses --------------------------------------------------------------------------------------------------------
# Heads are independent of each other. So one all-to-all before attention trades tokens for heads,
# any kernel attends to whole sequences, and a second all-to-all trades back. For 2 ranks and 4
# heads a b c d; numbers are chunks:
#
#                    rank 0              rank 1
#     the layer      0 3 x a b c d       1 2 x a b c d       1/c of the tokens, all heads
#     attention      0 1 2 3 x a b       0 1 2 3 x c d       all tokens, 1/c of the heads
#     the layer      0 3 x a b c d       1 2 x a b c d

def ulysses(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor], group: Group) -> Tensor:
    """Trade tokens for heads among the group's U ranks, attend, and trade back.

    attend(q, k, v): attention of the tokens of all U ranks. If these are all c ranks, the tokens
    are the sequence, and any kernel will do. If they are U neighbours of c, `attend` is a ring (or
    all-gather) of c/U ranks: see `both at once`.
    """
    q, k, v = tokens_for_heads(q, k, v, group)
    return heads_for_tokens(attend(q, k, v), group)


def tokens_for_heads(q: Tensor, k: Tensor, v: Tensor, group: Group) -> list[Tensor]:
    """Trade [B, N, s, D] for [B, N/U, U s, D], with the tokens in the order of the sequence.

    q, k and v are sent in one all-to-all.
    """
    u = group.size
    copies = u // math.gcd(u, k.shape[1])  # how often each key and value head is repeated, so that u divides them
    heads = [q, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))]
    by_rank = torch.cat([rearrange(x, "b (u n) s d -> u b s (n d)", u=u) for x in heads], -1)
    # by_rank and shards: [U, B, s, W], where W is the width of all heads of q, k and v that one rank gets. Row r of
    # by_rank goes to rank r, and row r of shards is from rank r.
    shards = AllToAll__AllToAll.apply(by_rank, [1] * u, [1] * u, group)
    early, late = rearrange(shards, "u b (two m) w -> two b u m w", two=2)
    tokens = torch.cat((early, late.flip(1)), 1).flatten(1, 2)  # [B, U s, W]. Early chunks ascend, late ones descend
    widths = [x.shape[1] // u * x.shape[3] for x in heads]
    return [rearrange(part, "b s (n d) -> b n s d", d=x.shape[3]) for part, x in zip(tokens.split(widths, -1), heads)]


def heads_for_tokens(o: Tensor, group: Group) -> Tensor:
    """Trade [B, N/U, U s, D] back for [B, N, s, D]: the steps of `tokens_for_heads`, inverted."""
    u = group.size
    early, late = rearrange(o, "b n (two u m) d -> two u b n m d", two=2, u=u)
    shards = AllToAll__AllToAll.apply(torch.cat((early, late.flip(0)), 3), [1] * u, [1] * u, group)
    return rearrange(shards, "u b n s d -> b s (u n) d").transpose(1, 2)


# ---- both at once ---------------------------------------------------------------------------------------------------
# --cp-ulysses U: U neighbours trade tokens for heads (the head group), and the c/U ranks that then
# have the same heads attend in a ring or with all-gather (the key group). For example, c = 4 and
# U = 2, with heads a and b:
#
#                     rank 0         rank 1         rank 2         rank 3
#     chunks of 8     0 7            1 6            2 5            3 4
#     head groups     └── 0 1 6 7 ───┘              └── 2 3 4 5 ───┘          a neighbourhood has four chunks
#                     x a            x b            x a            x b        of 8, which are two chunks of 4:
#     chunks of 4     0 3            0 3            1 2            1 2        the zig-zag shard of a ring of c/U = 2
#     key groups      ranks 0 and 2 for heads a, ranks 1 and 3 for heads b

def context_parallel(groups: dict[str, Group], style: str, seq: int, mask: Mask, attention: AttentionKernel,
                     device: torch.device | str = "cpu", recompute: bool = False) -> Callable[..., Tensor]:
    """Make the attention of this rank's tokens: a function of q [B, N, s, D], k [B, K, s, D] and v [B, K, s, V].

    groups: "cp", all c ranks; with --cp-ulysses also "cp_heads" and "cp_keys", the head group and
        the key group. Without it, one of the two is all c ranks, as the style says, and the other
        this rank alone.
    style: one of config.CP_STYLES, or "latents". With "latents", k and v are the keys and values of
        all S tokens.
    seq: the number of new tokens of a whole sequence, without cached ones.
    mask: for whole sequences.
    recompute: see `attention_by_window`.
    """
    # `attend` is the attention within the key group. With a head group, `ulysses` calls it between its two all-to-alls.
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
            attend = partial(Checkpoint.apply, attend, None)  # None: no arena, so autograd saves its inputs
    return attend if head_group.size == 1 else partial(ulysses, attend=attend, group=head_group)


# ---- windows and documents ------------------------------------------------------------------------------------------
# Both hide more than the causal mask does. A window hides keys that are too far before the query.
# With documents, a query sees only keys of its own document. Three things change in
# `visible_blocks`:
#
# - It leaves out keys that are hidden from a whole chunk of queries. The mask of a block hides what
#   is hidden from some of the block's queries.
# - With a window, blocks are not joined. A mask has one offset for the whole block, which is the
#   distance from the block's first key to its first query. Joined blocks would need several offsets.
# - Where documents do not ascend along the sequence, blocks are not joined either. For a tile of
#   queries, a kernel skips the keys before the first and after the last key that the tile sees. It
#   cannot skip keys between these two. In a joined block, such hidden keys would be in between.
#
# Documents also break the balance of zig-zag: a rank's chunks may be the end of a long document, or
# many short documents, and all ranks wait for the slowest. --cp-zigzag document cuts each document
# into 2c pieces (2c/U with --cp-ulysses U), in place of the sequence (`order_by_piece`). Then
# documents do not ascend.

def find_first_key(mask: Mask, query: int) -> int:
    """Return the first key that this query, or a later one of its chunk, may see.

    No sequence of the batch has an earlier one.
    """
    first = max(query - mask.window + 1, 0) if mask.window else 0
    if mask.documents is None:
        return first
    documents = mask.documents[0]
    not_before = documents >= documents[:, query, None]  # documents ascend along the chunk
    return max(first, not_before.int().argmax(1).min().item())  # argmax finds the first one


def documents_ascend(mask: Mask) -> bool:
    """Whether the numbers of documents ascend along the whole sequence, not only along each chunk."""
    return mask.documents is None or bool((mask.documents[0].diff() >= 0).all())


def add_documents(steps: list[list[ScoreBlock]], style: Style, documents: Tensor, c: int, i: int,
                  device: torch.device | str) -> list[list[ScoreBlock]]:
    """Add to each block's mask the documents of its queries and keys. documents: [B, S]."""
    own_documents = to_device(take_chunks(documents, c, own_chunks(c, i)), device)
    new_steps = []
    for blocks, key_chunks in zip(steps, style.chunks(c, i)):
        key_documents = to_device(take_chunks(documents, c, key_chunks), device)
        new_blocks = []
        for block in blocks:
            block_documents = own_documents[:, block.queries], key_documents[:, block.keys]
            new_blocks.append(block._replace(mask=block.mask._replace(documents=block_documents)))
        new_steps.append(new_blocks)
    return new_steps


def order_by_piece(documents: Tensor, ranks: int) -> Tensor:
    """Return the order of tokens in which chunk n of P = 2 x ranks has piece n of every document.

    documents: [B, S], ascending; P divides S. Returns token indices, [B, S]. For example, one rank
    has P = 2 chunks:

        token index       0 1 2 3 4 5 6 7
        document          0 0 0 1 1 1 1 1
        index modulo P    0 1 0 1 0 1 0 1
        piece             0 0 1 0 0 1 1 1     the row above, sorted within each document
        returned          0 1 3 4 | 2 5 6 7   indices of the tokens of piece 0 | of piece 1

    The pieces of a document are runs of its tokens. The size of a piece is the count of its residue
    (its "index modulo P") in the document, so sizes differ by at most one token. Therefore zig-zag
    shards of this order are equal work, although documents do not see each other.

    All chunks have the same length, because each residue occurs equally often in a sequence.
    torch.tensor_split of each document would not do: it always gives the remainder to the first
    pieces, so the first chunks would be longer than the last ones.
    """
    P = 2 * ranks
    remainders = torch.arange(documents.shape[1], device=documents.device) % P
    pieces = (documents.long() * P + remainders).sort(1).values % P  # sorted by (document, remainder)
    return pieces.argsort(dim=1, stable=True)


# ---- attention for a model's layers ---------------------------------------------------------------------------------

def attention_by_window(windows: Iterable[int], tokens: Tensor, documents: Tensor | None, *, kernel: str, head_dim: int,
                        dtype: torch.dtype, groups: dict[str, Group], style: str = "allgather",
                        earlier: int = 0, recompute: bool = False) -> dict[int, Callable[..., Tensor]]:
    """Make the attention of this rank's tokens [B, s], once per forward, for each window of a model.

    Returns a dict: window (0: none) -> a function of q [B, N, s, D], k [B, K, s, D] and v [B, K, s, V]
    (latents: k and v of all S tokens).

    documents: the documents of whole sequences, [B, S], on the host if "cp" has several ranks.
    kernel: the value of --attention.
    dtype: the dtype of q, k and v.
    earlier: the number of tokens before these (generation). Their keys and values are cached as far
        as the window reaches.
    recompute: do not save scores, and compute them again in backward.
    """
    seq = tokens.shape[1] * groups.get("cp", ALONE).size
    out = {}
    for window in set(windows):
        cached = min(earlier, window - 1) if window else earlier
        mask = Mask(True, window, None if documents is None else (documents, documents), offset=cached)
        attention = choose_attention(kernel, mask, head_dim, tokens, dtype)
        out[window] = context_parallel(groups, style, seq, mask, attention, tokens.device, recompute)
    return out


def choose_attention(kernel: str, mask: Mask, head_dim: int, like: Tensor, dtype: torch.dtype) -> AttentionKernel:
    """Choose the implementation that --attention names.

    "auto" takes torch's kernels (sdpa.py), except on a GPU where they would read a mask tensor:
    there it takes flash.py. like: any tensor on the device. dtype: the dtype of q, k and v.
    """
    slow_in_torch = (mask.documents is not None or mask.window > 0) and uses_kernels(like) and dtype != torch.float64
    if kernel == "triton" or (kernel == "auto" and slow_in_torch and head_dim <= 256):
        import flash  # needs Triton, which a CPU does without
        return AttentionKernel(flash.flash_attention, flash.flash_forward, flash.flash_backward)
    return MATH if kernel == "math" else SDPA


# ---- demo: python cp.py ---------------------------------------------------------------------------------------------

def print_owners(c: int) -> None:
    """Print which of c ranks computes which block of scores, with contiguous shards and with
    zig-zag shards."""
    chunks = range(2 * c)
    contiguous = [chunk // 2 for chunk in chunks]
    zigzag = [min(chunk, 2 * c - 1 - chunk) for chunk in chunks]
    print(f"Which of {c} ranks computes which scores? Rows are chunks of queries, columns chunks of keys.\n")
    for query_chunk in chunks:
        rows = [f"{owner[query_chunk]} " * (query_chunk + 1) for owner in (contiguous, zigzag)]
        print(f"    {rows[0]:44s}{rows[1]}".rstrip())
    counts = [[sum(chunk + 1 for chunk in chunks if owner[chunk] == i) for i in range(c)]
              for owner in (contiguous, zigzag)]
    print(f"    {f'contiguous: {counts[0]} blocks per rank':44s}zig-zag: {counts[1]} blocks per rank\n")


def neighbourhoods(group: Group, u: int) -> dict[str, Group]:
    """Make this rank's head group, of u neighbours, and its key group, as core/groups.py does for
    --cp-ulysses u."""
    c = group.size
    members = {"cp_heads": [list(range(first, first + u)) for first in range(0, c, u)],
               "cp_keys": [list(range(first, c, u)) for first in range(u)]}
    found = {}
    for axis, lists in members.items():
        for ranks in lists:
            process_group = dist.new_group(ranks)  # every rank has to create every group
            if group.rank in ranks:
                found[axis] = Group(axis, process_group)
    return found


def demo(group: Group) -> None:
    """Attend in every style, count the bytes that each sends, and compare with whole attention in
    one process."""
    if group.rank == 0:
        print_owners(4)
    c, s, N, K, D = group.size, 128, 16, 4, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, heads, c * s, D, dtype=torch.float64, generator=generator) for heads in (N, K, K, N))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    whole_o = MATH.attend(*whole, CAUSAL)
    whole_o.backward(do)
    expected = [whole_o.detach(), *(x.grad for x in whole)]

    positions = own_positions(s, c, group.rank, q.device)
    styles = {"plain_attention": partial(plain_attention, positions=positions, group=group)}
    for style in CP_STYLES:
        styles[style] = context_parallel({"cp": group}, style, c * s, CAUSAL, SDPA)
    if c == 4:
        styles["ring, --cp-ulysses 2"] = context_parallel(
            {"cp": group} | neighbourhoods(group, 2), "ring", c * s, CAUSAL, SDPA)
    if group.rank == 0:
        print(f"Attention of {c} ranks: {s} tokens each, {N} query heads, {K} key and value heads of {D}, fp64\n\n"
              f"    kB sent by a rank       forward   backward   together")
    error = torch.zeros((), dtype=torch.float64)
    for title, attend in styles.items():
        own = [x[:, :, positions].requires_grad_() for x in (q, k, v)]
        sent.clear()
        o = attend(*own)
        forward = sum(sent.values())
        o.backward(do[:, :, positions])
        together = sum(sent.values())
        if group.rank == 0:
            print(f"    {title:22s}{forward / 1e3:9.0f}{(together - forward) / 1e3:11.0f}{together / 1e3:11.0f}")
        for ours, want in zip([o.detach(), *(x.grad for x in own)], expected):
            error = torch.maximum(error, (ours - want[:, :, positions]).abs().max() / want.abs().max())
    all_reduce(error, group, MAX)
    if group.rank == 0:
        print(f"\nResults and gradients are those of whole attention. Relative difference: {error:.0e}\n"
              "plain_attention sends less in backward because it keeps the keys of all ranks until then.\n"
              "A ring sends as much as all-gather, but holds the keys of 2 ranks at a time, not of all.\n"
              "With more ranks on the same sequence Ulysses sends less per rank, and the others do not.")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
