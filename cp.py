"""Context parallelism: every rank has 1/c of each sequence, and attention alone needs the rest of it.

Saves: all but 1/c of the activations, so sequences c times as long fit; and time, as each rank has 1/c of the work.
Costs: in each layer, keys and values (or, with Ulysses, all that attention takes and gives) travel; see the table.
Stops helping when: s tokens a rank compute shorter than their keys and values travel, or another axis would do.

Everything but attention treats tokens one by one. Under a causal mask late tokens have more work than early ones, so a
sequence is cut in 2c chunks and rank i takes chunks i and 2c-1-i ("zig-zag"). For 4 ranks, who computes which scores:

    keys       0 1 2 3 4 5 6 7        c = 4 ranks, chunks of m tokens. A row of chunk j has j + 1 chunks of keys, so
    queries 0  0                      rank i has (i + 1) + (2c - i) = 2c + 1 of them, whichever i: all work alike.
            1  1 1                    In the ring, it is alike at every step, too: half of all pairs of own queries and
            2  2 2 2                  arriving keys, and which half is a slice. If the keys come from an earlier rank,
            3  3 3 3 3                their first half is seen by all queries and their second by none; if from a later
            4  3 3 3 3 3              rank, all of them are seen by the second half of the queries.
            5  2 2 2 2 2 2
            6  1 1 1 1 1 1 1          (plain cuts: 0 0 1 1 2 2 3 3 from the top; rank 3 has seven times the work of 0)
            7  0 0 0 0 0 0 0 0

Three styles, s tokens a rank, widths q = heads x D and k = kv heads x D in elements of e bytes, w bytes if wide (fp32):

                 sent by a rank and layer, forward       backward                              held meanwhile
    ring         (c-1) 2 s k e                           (c-1) 2 s k (e + w)                   two parts of K and V
    allgather    (c-1) 2 s k e                           (c-1) 2 s k (e + w)                   all of K and V
    ulysses      (c-1)/c s (2 q + 2 k) e                 the same                              all tokens, 1/c of heads

Ring. While a part is computed, the next one travels. The parts' results are merged by their logsumexp: for a row with
result o and logsumexp l, and a new part (o', l'),      o += sigmoid(l' - l) (o' - o),      l -= logsigmoid(l - l'),
which overflows nowhere. It starts with the own part, where every token sees itself, so l is finite from then on, and a
part of which a row sees nothing has l' = -inf and changes nothing. Backward goes round once more. Probabilities follow
from the *final* l, and their sum with the final o, so parts need nothing from each other; dK and dV of a part follow it
round, one hop behind, and are home after c-1 hops, where the owner's own share is added.

All-gather. All of K and V are gathered (again in backward, so that 1/c is kept), and each of the two chunks attends to
itself and to what precedes it: two results to merge instead of c.

Ulysses. Tokens are exchanged for heads: each rank gets all tokens for 1/c of the heads, computes attention as if alone,
and the result is exchanged back. Where kv heads are fewer than c, ranks share one.

Documents. A token sees its own document only. A pair of blocks none of whose documents meet is skipped.

Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention, and zhuzilin's ring-flash-attention (zig-zag);
Llama Team 2024, section 3.3.2 (all-gather); Jacobs et al. 2023, DeepSpeed Ulysses; Dao 2023, FlashAttention-2 (why l
is enough). Letters: B batch, S sequence, c ranks, s = S/c tokens a rank, m = s/2, N heads, K kv heads, D head width.
"""
import math
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Function

from collectives import AllToAll__AllToAll, Group, Pending, all_gather, reduce_scatter, shift
from param import IGNORED, at_least_fp32, rank, size

Tensor = torch.Tensor


# ---- who has which tokens -------------------------------------------------------------------------------------------

def places(seq: int, c: int, i: int) -> Tensor:
    """Where in the sequence the tokens of rank i are: those of chunks i and 2c-1-i. [seq / c]"""
    chunks = torch.arange(seq).view(2 * c, -1)
    return chunks[[i, 2 * c - 1 - i]].flatten()


def in_order(c: int) -> Tensor:
    """Where each chunk of the sequence is, among the chunks of all ranks one after the other."""
    return torch.tensor([chunk for i in range(c) for chunk in (i, 2 * c - 1 - i)]).argsort()


def padded(seq: int, c: int, t: int = 1) -> int:
    """The length that c ranks can cut, and t ranks once more."""
    return -(-seq // (2 * c * t)) * 2 * c * t if c > 1 else seq


def cut(tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, c: int, i: int,
        t: int = 1) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rank i's part of sequences B S whose labels are already shifted; documents stay whole, as all keys have them.

    Sequences are lengthened to what c and t can cut, by tokens -1, which come last, are seen by none and have no label.
    """
    if c == 1:
        return tokens, labels, positions, documents
    seq = tokens.shape[1]
    more = padded(seq, c, t) - seq
    mine = places(seq + more, c, i).to(tokens.device)
    if documents is not None:
        positions = F.pad(positions, (0, more))[:, mine]
        documents = torch.cat((documents, documents[:, -1:].expand(-1, more) + 1), 1)
    return (F.pad(tokens, (0, more), value=-1)[:, mine], F.pad(labels, (0, more), value=IGNORED)[:, mine],
            mine if positions is None else positions, documents)


# ---- attention of a block -------------------------------------------------------------------------------------------

class Piece(NamedTuple):
    """Some of the own queries against some of the keys at hand."""
    rows: slice
    columns: slice
    causal: bool = False  # both are the same tokens: each sees itself and what precedes it
    documents: tuple[Tensor, Tensor] | None = None  # numbers, of queries B rows and of keys B columns

    @property
    def cells(self) -> int:
        """Scores computed."""
        rows, columns = (part.stop - part.start for part in (self.rows, self.columns))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


class Block(NamedTuple):
    """An implementation of attention that gives and takes logsumexp.

    forward(q, k, v, causal, documents) -> o, l;     backward(do, q, k, v, o, l, causal, documents) -> dq, dk, dv
    q B N rows D, k and v B K columns D, l B N rows (at least fp32), -inf where a row sees nothing. causal, documents:
    as in Piece. o and l in backward may be those of a larger whole.
    """
    forward: Callable
    backward: Callable


def same_document(documents: tuple[Tensor, Tensor], causal: bool) -> Tensor:
    """Who sees whom: B 1 rows columns."""
    same = documents[0][:, None, :, None] == documents[1][:, None, None, :]
    return same.tril() if causal else same


def flash_cpu_forward(q, k, v, causal, documents):
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if documents is None:
        return forward(q, k, v, 0.0, causal)
    same = same_document(documents, causal)
    o, lse = forward(q, k, v, 0.0, attn_mask=as_term(same, q.dtype))
    return o, lse.masked_fill(~same.any(-1), -torch.inf)  # as the kernel does not say, whose o there is finite


def flash_cpu_backward(do, q, k, v, o, lse, causal, documents):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if documents is None:
        return backward(do, q, k, v, o, lse, 0.0, causal)
    mask = as_term(same_document(documents, causal), q.dtype)
    return backward(do, q, k, v, o, lse, 0.0, False, attn_mask=mask)


def as_term(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 or -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def scores_of(q, k, causal, documents):
    """Of grouped queries: B K N/K rows columns."""
    wide = at_least_fp32(q.dtype)
    q = q.to(wide).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = q @ k.to(wide).transpose(-1, -2)[:, :, None]
    if documents is not None:
        return scores + as_term(same_document(documents, causal), wide)[:, :, None]
    return scores + torch.full(scores.shape[-2:], -torch.inf, dtype=wide, device=q.device).triu(1) if causal else scores


def written_out_forward(q, k, v, causal, documents):
    scores = scores_of(q, k, causal, documents)
    lse = scores.logsumexp(-1, keepdim=True)
    o = (scores - lse).exp().nan_to_num() @ v.to(scores.dtype)[:, :, None]  # nan: a row that sees nothing
    return o.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)[..., 0]


def written_out_backward(do, q, k, v, o, lse, causal, documents):
    wide, groups = at_least_fp32(q.dtype), (k.shape[1], -1)
    do, o, lse = (x.to(wide).unflatten(1, groups) for x in (do, o, lse))
    p = (scores_of(q, k, causal, documents) - lse[..., None]).exp()
    ds = p * (do @ v.to(wide).transpose(-1, -2)[:, :, None] - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq, dk = ds @ k.to(wide)[:, :, None], ds.transpose(-1, -2) @ q.to(wide).unflatten(1, groups)
    dv = p.transpose(-1, -2) @ do
    return dq.flatten(1, 2).to(q.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype)


def flash_gpu_forward(q, k, v, causal, documents):
    if documents is not None or q.dtype not in FLASH_DTYPES:
        return written_out_forward(q, k, v, causal, documents)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return o, lse


def flash_gpu_backward(do, q, k, v, o, lse, causal, documents):
    if documents is not None or q.dtype not in FLASH_DTYPES:
        return written_out_backward(do, q, k, v, o, lse, causal, documents)
    groups, unused = (k.shape[1], -1), torch.empty(0, dtype=torch.int64, device=q.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)
    return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


FLASH_DTYPES = torch.bfloat16, torch.float16
FLASH_GPU = Block(flash_gpu_forward, flash_gpu_backward)  # torch's; flash.py has one that takes documents, too
FLASH_CPU = Block(flash_cpu_forward, flash_cpu_backward)
WRITTEN_OUT = Block(written_out_forward, written_out_backward)  # any device; holds the scores of a block


def add_piece(o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, piece: Piece, block: Block) -> None:
    """Attend to what the piece covers and merge that into o (wide) and lse. A row's first piece is a causal one."""
    rows, columns = piece.rows, piece.columns
    new, new_lse = block.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], piece.causal, piece.documents)
    if piece.causal:
        o[:, :, rows], lse[:, :, rows] = new, new_lse
        return
    old, old_lse = o[:, :, rows], lse[:, :, rows]
    old.lerp_(new.to(o.dtype), torch.sigmoid(new_lse - old_lse)[..., None])
    old_lse.sub_(F.logsigmoid(old_lse - new_lse))


def add_gradients(dq: Tensor, dkv: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  piece: Piece, block: Block) -> None:
    """Add a piece's share to dq and to dK and dV (2 B K columns D), both wide. o, lse: the final ones."""
    rows, columns = piece.rows, piece.columns
    shares = block.backward(do[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], o[:, :, rows],
                            lse[:, :, rows].contiguous(), piece.causal, piece.documents)
    dq[:, :, rows] += shares[0]
    dkv[0, :, :, columns] += shares[1]
    dkv[1, :, :, columns] += shares[2]


def results_for(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for o and lse, at least fp32; heads of a token side by side, as what follows attention wants them."""
    B, N, s, D = q.shape
    wide = dict(dtype=at_least_fp32(q.dtype), device=q.device)
    return torch.empty(B, s, N, D, **wide).transpose(1, 2), torch.empty(B, N, s, **wide)


def attend_to_pieces(ctx, q: Tensor, k: Tensor, v: Tensor, at_hand: Iterable[Tensor], pieces: list[Piece | None],
                     block: Block, group: Group) -> Tensor:
    """The forward of ring and all-gather. at_hand: for each piece, keys and values (2 B K columns D) it is about."""
    o, lse = results_for(q)
    for piece, (k_here, v_here) in zip(pieces, at_hand):
        if piece:
            add_piece(o, lse, q, k_here, v_here, piece, block)
    o = o.to(q.dtype)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.pieces, ctx.block, ctx.group = pieces, block, group
    return o


def narrowed(piece: Piece, queries: Tensor, keys: Tensor) -> Piece | None:
    """What is left of a piece if tokens see their own document only. queries B s, keys B columns: document numbers."""
    queries, keys = queries[:, piece.rows], keys[:, piece.columns]
    columns = same_document((queries, keys), piece.causal).flatten(0, 2).any(0).nonzero()
    if len(columns) == 0:
        return None
    first, stop = columns[0].item(), columns[-1].item() + 1  # all, if causal: each token sees itself
    start = piece.columns.start
    return piece._replace(columns=slice(start + first, start + stop), documents=(queries, keys[:, first:stop]))


# ---- ring -----------------------------------------------------------------------------------------------------------

def ring_pieces(s: int, c: int, i: int) -> list[Piece]:
    """What rank i computes at each step; at step t it has the keys of rank i - t."""
    own, first, second = slice(0, s), slice(0, s // 2), slice(s // 2, s)
    return [Piece(own, own, causal=True)] + [
        Piece(own, first) if (i - t) % c < i else Piece(second, own) for t in range(1, c)]


class Ring(Function):
    """Queries stay; keys and values go round."""

    @staticmethod
    def forward(ctx, q, k, v, pieces, block, group):
        return attend_to_pieces(ctx, q, k, v, going_round(torch.stack((k, v)), group), pieces, block, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, kv = torch.zeros_like(q, dtype=lse.dtype), torch.stack((k, v))
        home, travelling, arrived = torch.zeros_like(kv, dtype=lse.dtype), Pending(None), 0
        for step, (piece, (k_here, v_here)) in enumerate(zip(ctx.pieces, going_round(kv, ctx.group))):
            dkv = home if step == 0 else torch.zeros_like(home)
            if piece:
                add_gradients(dq, dkv, do, q, k_here, v_here, o, lse, piece, ctx.block)
            travelling.wait()
            dkv += arrived  # what the ranks that had this part earlier have added up for it
            if step:
                arrived = torch.empty_like(dkv)
                travelling = shift(arrived, dkv, ctx.group)
        travelling.wait()
        home += arrived
        return dq.to(q.dtype), *home.to(k.dtype), None, None, None


def going_round(kv: Tensor, group: Group) -> Iterable[Tensor]:
    """The own part, then that of the rank before, and so on; the next one travels while one is used."""
    following = torch.empty_like(kv)
    for step in range(size(group)):
        travelling = shift(following, kv, group) if step < size(group) - 1 else None
        yield kv
        if travelling:
            travelling.wait()
            kv, following = following, kv


# ---- all-gather -----------------------------------------------------------------------------------------------------
# Gathered second chunks lie before gathered first ones: then the chunks that precede any chunk lie together, and each
# rank's part arrives where it belongs. That order is 2c-1 … c, 0 … c-1, and tokens are the first dimension.

def gathered_order(seq: int, c: int) -> Tensor:
    """Where in the sequence gathered keys come from."""
    chunks = torch.arange(seq).view(2 * c, -1)
    return torch.cat((chunks[c:].flip(0), chunks[:c])).flatten()


def gathered_pieces(s: int, c: int, i: int) -> list[Piece]:
    """The two own chunks: first themselves, then all that precedes them."""
    m, first, second = s // 2, slice(0, s // 2), slice(s // 2, s)
    pieces = [Piece(first, slice((c + i) * m, (c + i + 1) * m), causal=True),
              Piece(second, slice(i * m, (i + 1) * m), causal=True),
              Piece(first, slice(c * m, (c + i) * m)), Piece(second, slice((i + 1) * m, 2 * c * m))]
    return [piece for piece in pieces if piece.cells]


def gather_chunks(kv: Tensor, group: Group) -> Tensor:
    """2 B K s D of every rank -> 2 B K S D, in gathered order."""
    tokens = kv.permute(3, 0, 1, 2, 4).contiguous()
    whole = tokens.new_empty(size(group) * len(tokens), *tokens.shape[1:])
    for out, part in zip(whole.chunk(2), reversed(tokens.chunk(2))):
        all_gather(out, part, group)
    return whole.permute(1, 2, 3, 0, 4)


def scatter_chunks(dkv: Tensor, group: Group) -> Tensor:
    """2 B K S D in gathered order -> 2 B K s D, summed over the ranks."""
    whole = dkv.permute(3, 0, 1, 2, 4)
    own = whole.new_empty(len(whole) // size(group), *whole.shape[1:])
    for out, part in zip(reversed(own.chunk(2)), whole.chunk(2)):
        reduce_scatter(out, part, group)
    return own.permute(1, 2, 3, 0, 4)


class Gathered(Function):
    """Keys and values come, and their gradients go back."""

    @staticmethod
    def forward(ctx, q, k, v, pieces, block, group):
        whole = gather_chunks(torch.stack((k, v)), group)
        return attend_to_pieces(ctx, q, k, v, repeat(whole), pieces, block, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, whole = torch.zeros_like(q, dtype=lse.dtype), gather_chunks(torch.stack((k, v)), ctx.group)
        dkv = torch.zeros_like(whole, dtype=lse.dtype)
        for piece in ctx.pieces:
            add_gradients(dq, dkv, do, q, *whole, o, lse, piece, ctx.block)
        dk, dv = scatter_chunks(dkv, ctx.group)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# ---- Ulysses --------------------------------------------------------------------------------------------------------

def ulysses(q: Tensor, k: Tensor, v: Tensor, core: Callable, group: Group) -> Tensor:
    """Attention `core` of all tokens for 1/c of the heads, which the ranks exchange before and after."""
    c, (B, N, s, D) = size(group), q.shape
    order = in_order(c).to(q.device)

    def exchange(x: Tensor) -> Tensor:
        return AllToAll__AllToAll.apply(x.contiguous(), [1] * c, [1] * c, group)

    copies = c // math.gcd(c, k.shape[1])  # of each kv head, so that c divides them
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    by_rank = torch.cat([x.reshape(B, c, -1, s, D) for x in (q, k, v)], 2).transpose(0, 1)  # c B heads s D
    chunks = exchange(by_rank).unflatten(3, (2, -1)).permute(1, 2, 0, 3, 4, 5).flatten(2, 3)  # B heads 2c m D
    whole = chunks[:, :, order].flatten(2, 3)
    o = core(*whole.split([N // c, k.shape[1] // c, k.shape[1] // c], 1))
    chunks = o.unflatten(2, (2 * c, -1))[:, :, order.argsort()].unflatten(2, (c, 2))  # B heads c 2 m D
    by_head = exchange(chunks.permute(2, 0, 1, 3, 4, 5).flatten(3, 4))  # c B heads s D
    return by_head.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


# ---- the three behind one name --------------------------------------------------------------------------------------

STYLES = ("allgather", "ring", "ulysses")


class ContextParallel:
    """attend(q, k, v) -> o for the tokens of `places`, causal. q B N s D, k and v B K s D, their gradients, too.

    documents: B S, numbers of all tokens' documents, or None. block: how ring and all-gather compute. core: how Ulysses
    does, (q, k, v) -> o of whole sequences. Made once a micro-batch: all layers use the same pieces.
    """

    def __init__(self, group: Group, style: str, seq: int, documents: Tensor | None, block: Block, core: Callable):
        self.group, self.style, self.block, self.core = group, style, block, core
        self.pieces = pieces_of(style, seq, size(group), rank(group), documents) if style != "ulysses" else []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.style == "ulysses":
            return ulysses(q, k, v, self.core, self.group)
        return (Ring if self.style == "ring" else Gathered).apply(q, k, v, self.pieces, self.block, self.group)


def pieces_of(style: str, seq: int, c: int, i: int, documents: Tensor | None) -> list[Piece | None]:
    """What rank i computes, in order, what is causal first; for the ring one a step, None where nothing is seen."""
    if style == "ring":
        pieces = ring_pieces(seq // c, c, i)
        keys = [places(seq, c, (i - t) % c) for t in range(c)]
    else:
        pieces = gathered_pieces(seq // c, c, i)
        keys = [gathered_order(seq, c)] * len(pieces)
    if documents is None:
        return pieces
    own = documents[:, places(seq, c, i)]
    pieces = [narrowed(piece, own, documents[:, where]) for piece, where in zip(pieces, keys)]
    return pieces if style == "ring" else [piece for piece in pieces if piece]


# ---- demo: python cp.py ---------------------------------------------------------------------------------------------

def demo(c: int) -> None:
    print(f"Who computes which scores, 0 to {c - 1}. Queries from top to bottom, keys from left to right.\n")
    plain = torch.arange(2 * c) // 2
    zigzag = torch.tensor([min(chunk, 2 * c - 1 - chunk) for chunk in range(2 * c)])
    print("    plain cuts" + " " * (4 * c - 6) + "zig-zag")
    for row in range(2 * c):
        print("".join("    " + " ".join(str(owner[row].item()) if row >= column else "·" for column in range(2 * c))
                      for owner in (plain, zigzag)))
    for name, owner in (("plain", plain), ("zig-zag", zigzag)):
        work = [sum(row + 1 for row in range(2 * c) if owner[row] == rank) for rank in range(c)]
        print(f"\n    {name:8s} blocks a rank: {work}", end="")
    print("\n\nThe ring, step by step: whose keys a rank has, and which half of its queries | of the keys it uses.\n")
    for step in range(c):
        cells = []
        for me in range(c):
            piece = ring_pieces(4, c, me)[step]
            halves = "own" if piece.causal else "all|1st" if piece.rows.start == 0 else "2nd|all"
            cells.append(f"{(me - step) % c} {halves:8s}")
        print(f"    step {step}   " + "  ".join(cells))


if __name__ == "__main__":
    demo(c=4)
