"""Context parallelism: who has which tokens, attention by blocks against attention at once, what is sent and saved."""
import math
import weakref
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import grids
import pytest
import torch
import torch.distributed as dist
from exact import dense_attention, gpu
from grids import everyone, for_each
from pool import slow
from torch._subclasses import FakeTensorMode
from watch import Watch, in_order, noted, waits

import cp
import sdpa
import train
from core import collectives, config, rules
from core.collectives import ALONE
from core.config import CP_STYLES, padded_length
from core.groups import build_groups
from core.param import acc_dtype
from cp import STYLES, context_parallel
from operations import CAUSAL, MATH, AttentionKernel, Mask
from run import device
from run.data import MicroBatch
from run.meter import Meter
from sdpa import SDPA, gpu_backward, gpu_forward
from test_tp import normal

B, N, K, S, D = 2, 24, 6, 48, 10  # 6 kv heads: fewer than 8 ranks, and no multiple of 4
BLOCK_STYLES = [style for style in CP_STYLES if style in STYLES]
# What these styles promise besides right results. Of any other one only results are tested.
MOST_BLOCKS = {"ring": 2, "allgather": 3, "latents": 4}  # of a step, in which all ranks have equal work
IN_THE_TABLE = "allgather", "ring", "ulysses"  # at the top of cp.py: bytes sent, and memory


def mask_of(documents: torch.Tensor | None = None, window: int = 0) -> Mask:
    return Mask(window=window, documents=None if documents is None else (documents, documents))


def positions_of(seq: int, c: int, chunks) -> torch.Tensor:
    """The positions in the sequence of the tokens of these of its 2c chunks."""
    return torch.cat([torch.arange(chunk * seq // (2 * c), (chunk + 1) * seq // (2 * c)) for chunk in chunks])


def own_positions(seq: int, c: int, i: int) -> torch.Tensor:
    return positions_of(seq, c, (i, 2 * c - 1 - i))


def attention_of(style: str, mask: Mask, kernel: AttentionKernel):
    """Attention of a job's ranks, which are all context parallel. style: "ring", or with --cp-ulysses 2 "ring 2"."""
    name, _, near = style.partition(" ")
    grid = config.Grid(dp=1, cp=dist.get_world_size(), cp_style=name, cp_ulysses=int(near or 1))
    return context_parallel(build_groups(grid, config.Model()), name, S, mask, kernel)


# ---- who has which tokens -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seq", [48, 41])
@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("c", [2, 3, 4, 8])
def test_every_token_is_at_one_place(c, t, seq):
    """Token -> (context rank, tensor rank, index) is one to one; labels stay with the tokens before theirs."""
    window = torch.arange(1, 2 * (seq + 1) + 1).view(2, seq + 1)
    tokens, labels = window[:, :-1], window[:, 1:].clone()
    labels[0, 5] = cp.IGNORED
    found = {}
    for i in range(c):
        mine, next_ones, positions, documents = cp.shard_sequences(tokens, labels, None, None, c, i, t)
        assert positions is documents is None and mine.shape[1] == padded_length(seq, c, t) / c
        positions = cp.own_positions(mine.shape[1], c, i, mine.device)
        for rank, part in enumerate(mine.flatten().view(t, -1)):
            found |= {token.item(): (i, rank, index) for index, token in enumerate(part) if token > 0}
        for place, column, following in zip(positions, mine.t(), next_ones.t()):
            real = place < seq
            assert torch.equal(column, tokens[:, place] if real else torch.full_like(column, -1))
            assert torch.equal(following, labels[:, place] if real else torch.full_like(following, cp.IGNORED))
    assert found.keys() == set(tokens.flatten().tolist()) and len(set(found.values())) == len(found)


def test_padding_is_a_document_of_its_own():
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 3, 3]])
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 0, 0, 1]])
    for i, mine in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        _, labels, where, whole = cp.shard_sequences(documents, documents, positions, documents, 2, i)
        assert whole.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 3, 3, 4, 4, 4]]
        assert where.tolist() == [[0 if place > 4 else row[place] for place in mine] for row in positions.tolist()]
    with pytest.raises(AssertionError, match="positions are counted from the beginning of documents"):
        cp.shard_sequences(documents, documents, positions, None, 2, 0)


def packed(rows: int, seq: int, mean: int, seed: int) -> torch.Tensor:
    """[rows, seq], numbers of documents, of which most are short and few long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(rows, seq).log_normal_(math.log(mean), 1.2, generator=generator).long() + 1
    return torch.stack([torch.arange(seq).repeat_interleave(row)[:seq] for row in lengths])


def places_in_documents(documents: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row.unique(return_counts=True)[1]]) for row in documents])


def sharded_by_document(documents: torch.Tensor, c: int, ranks: int, i: int) -> tuple[torch.Tensor, ...]:
    """The positions that rank i has, those in their documents, and all documents."""
    where = torch.arange(documents.shape[1]).expand_as(documents)
    return cp.shard_sequences(where, where + 1, places_in_documents(documents), documents, c, i, 1, ranks)


@pytest.mark.parametrize("c, ranks", [(2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (8, 2)])
def test_pieces_of_a_document_are_dealt_zig_zag(c, ranks):
    """Of `ranks` neighbourhoods of c / ranks ranks one has, in order, pieces i and 2 ranks - 1 - i of every document. A
    document that 2 ranks divides is in equal pieces; of others these differ by a token; all tokens are at one place."""
    seq, documents = 240, packed(3, 240, 20, seed=c)
    documents[0] = torch.arange(seq) // (240 // 5)  # pieces of equal length, for 2, 3, 4 and 8 ranks
    shards = [sharded_by_document(documents, c, ranks, i) for i in range(c)]
    assert torch.equal(torch.cat([shard[0] for shard in shards], 1).sort(1).values,
                       torch.arange(seq).expand_as(documents))
    for n, row in enumerate(documents):
        for tokens, labels, places, whole in shards:
            assert torch.equal(labels, tokens + 1)
            assert torch.equal(places[n], places_in_documents(documents)[n][tokens[n]])
            assert torch.equal(whole[n].unique(return_counts=True)[1], row.unique(return_counts=True)[1])
        early, late = zip(*(shard[0][n].chunk(2) for shard in shards))
        chunks = torch.cat(early + late[::-1]).chunk(2 * ranks)
        assert all(torch.equal(chunk, chunk.sort().values) for chunk in chunks)
        for document in row.unique():
            pieces = [chunk[row[chunk] == document] for chunk in chunks]
            assert torch.equal(torch.cat(pieces), (row == document).nonzero().flatten())
            sizes = {len(piece) for piece in pieces}
            assert max(sizes) - min(sizes) <= (1 if n else 0)


def test_a_run_splits_the_documents_that_it_reads():
    """Among 2 neighbourhoods of 2 ranks."""
    settings = rules.parse("--cp 4 --cp-style ring --cp-ulysses 2 --cp-zigzag document --mask-documents".split(), 4)
    documents = packed(2, 64, 10, seed=0)
    batch = MicroBatch(documents * 100, documents * 100 + 1, places_in_documents(documents), documents)
    samples = SimpleNamespace(step=lambda *arguments: [batch])
    for i in range(4):
        alike = SimpleNamespace(size=4, rank=i)
        got, = train.local_micro_batches(samples, 0, 2, settings, {"cp": alike, "data": alike, "sites": ALONE})
        wants = cp.shard_sequences(*batch[:4], 4, i, 1, 2)
        assert all(torch.equal(one, want) for one, want in zip(got, wants))
        assert not torch.equal(got.positions, cp.shard_sequences(*batch[:4], 4, i)[2])


@pytest.mark.parametrize("c, mean", [(2, 700), (4, 256), (8, 64)])
def test_packed_documents_are_equal_work(c, mean):
    """Visible scores of 20 sequences of 2,048 tokens each: the rank with most has at most 1.05 times the mean of all
    ranks; with sequences split zig-zag at least 1.15 times it on average, and in one of them 1.4 times."""
    ratios = {1: [], c: []}
    for seed in range(20):
        documents = packed(1, 2048, mean, seed)
        for ranks, found in ratios.items():
            work = [(sharded_by_document(documents, c, ranks, i)[2] + 1).sum().item() for i in range(c)]
            found.append(max(work) * c / sum(work))
            assert sum(work) == (places_in_documents(documents) + 1).sum()
    assert max(ratios[c]) < 1.05 and 1.15 < sum(ratios[1]) / 20 and 1.4 < max(ratios[1])


@pytest.mark.parametrize("style", BLOCK_STYLES)
@pytest.mark.parametrize("c", [2, 4])
def test_blocks_of_dealt_documents_cover_every_visible_score_once(c, style):
    documents = packed(4, S, 9, seed=c)
    documents[1, :2], documents[1, 2:-2], documents[1, -2:] = 0, 1, 2  # first and last: too short for most pieces
    for row in documents:
        shards, total = [sharded_by_document(row[None], c, c, i) for i in range(c)], 0
        whole = shards[0][3]
        for i in range(c):
            scores, _ = covered(style, c, i, mask_of(whole))
            assert scores.sum() == (shards[i][2] + 1).sum()
            total += scores
        assert torch.equal(total, (whole[:, :, None] == whole[:, None]).int().tril())


def cells_of_tiles(block: cp.ScoreBlock, size: int = 32) -> int:
    """Scores in tiles that flash.py computes: from the first to the last key of the documents of a tile's queries."""
    (queries,), (keys,) = block.mask.documents
    count = 0
    for start in range(0, len(queries), size):
        own = queries[start:start + size]
        meets = ((keys >= own.min()) & (keys <= own.max())).nonzero().flatten()
        if len(meets):
            stop = min(meets[-1].item() + 1, start + size if block.mask.causal else len(keys))
            count += size * max(0, stop - meets[0].item() // size * size)
    return count


@pytest.mark.parametrize("style", BLOCK_STYLES)
def test_kernels_skip_other_documents_of_dealt_ones(style):
    """4 ranks, documents of about 512 tokens: in their tiles the rank with most computes at most 1.25 times the mean of
    visible scores, and with sequences split zig-zag more than 1.5 times."""
    documents, found = packed(1, 4096, 512, seed=0), {}
    for ranks in (1, 4):
        whole = sharded_by_document(documents, 4, ranks, 0)[3]
        found[ranks] = max(sum(map(cells_of_tiles, sum(cp.visible_blocks(
            STYLES[style], 4096, 4, i, mask_of(whole)), []))) for i in range(4))
    visible = (places_in_documents(documents) + 1).sum() / 4
    assert found[4] < 1.25 * visible and found[1] > 1.5 * visible


def seen_in(block: cp.ScoreBlock) -> torch.Tensor:
    """Which scores of a block are visible, [sequences, queries, keys]."""
    rows, columns = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
    return block.mask.visible(rows, columns, "cpu").view(-1, rows, columns)


def covered(style: str, c: int, i: int, mask: Mask) -> tuple[torch.Tensor, list[list[cp.ScoreBlock]]]:
    """How often rank i computes each score of whole sequences, and its blocks."""
    out = torch.zeros(1 if mask.documents is None else len(mask.documents[0]), S, S, dtype=torch.int)
    queries, steps = own_positions(S, c, i), cp.visible_blocks(STYLES[style], S, c, i, mask)
    for blocks, chunks in zip(steps, STYLES[style].chunks(c, i)):
        keys = positions_of(S, c, chunks)
        for block in blocks:
            out[:, queries[block.queries][:, None], keys[block.keys]] += seen_in(block).int()
    return out, steps


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
def test_blocks_cover_every_visible_score_once(c, style):
    total = sum(covered(style, c, i, CAUSAL)[0] for i in range(c))
    assert torch.equal(total, torch.ones(1, S, S, dtype=torch.int).tril())


@pytest.mark.parametrize("style", MOST_BLOCKS)
@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
def test_ranks_have_equal_work_in_the_few_blocks_of_a_step(c, style):
    """Few, because chunks that lie side by side where a step reads them are one block."""
    work = []
    for i in range(c):
        _, steps = covered(style, c, i, CAUSAL)
        work.append([sum(seen_in(block).sum().item() for block in blocks) for blocks in steps])
        own_first = len(STYLES[style].chunks(c, i)[0]) == 2
        assert (len(steps[0]) == 1 or not own_first) and max(map(len, steps)) <= MOST_BLOCKS[style]
    assert all(of_rank == work[0] for of_rank in work)
    if style == "ring":
        s = S // c
        assert work[0] == [s * (s + 1) // 2] + [s * s // 2] * (c - 1)


def documents_of(seq: int) -> torch.Tensor:
    """Two sequences: documents that end beside the borders of chunks; and a new one every few tokens."""
    first = torch.where(torch.arange(seq) < seq // 2 - 5, 0, torch.where(torch.arange(seq) < seq - 4, 1, 2))
    return torch.stack((first, torch.arange(seq) // 5))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
def test_blocks_of_windows_and_documents_cover_every_visible_score_once(c, style):
    """Of a window, a block is computed for each pair of chunks of which something is visible; with documents no block
    has a first or last key that nobody sees, and where a new one begins every few tokens next to nothing is left."""
    every = [(window, None) for window in (1, 2, 5, 6, 7, 12, 23, 47, 48, 60)]
    some = torch.rand(1, S, generator=torch.Generator().manual_seed(c)).lt(0.1).cumsum(-1)
    for window, documents in (*every, *product((0, 1, 7, 40), (some, documents_of(S)))):
        wanted, total, blocks = torch.ones(1, S, S, dtype=torch.int).tril().triu(1 - (window or S)), 0, []
        if documents is not None:
            wanted = wanted * (documents[:, :, None] == documents[:, None])
        for i in range(c):
            scores, steps = covered(style, c, i, mask_of(documents, window))
            total, blocks = total + scores, blocks + sum(steps, [])
        assert torch.equal(total, wanted)
        if documents is None:
            m = S // c // 2
            assert len(blocks) == (wanted.view(2 * c, m, 2 * c, m).sum((1, 3)) > 0).sum()
        else:
            assert all(seen_in(block).flatten(0, 1).any(0)[[0, -1]].all() for block in blocks)
    short = torch.arange(S)[None] // 3
    for i, window in product(range(c) if c in (2, 4) else (), (0, 7)):
        _, steps = covered(style, c, i, mask_of(short, window))
        own_first = len(STYLES[style].chunks(c, i)[0]) == 2
        assert sum(map(len, steps)) <= (1 if own_first and not window else 2)


@pytest.mark.parametrize("style", STYLES)
def test_documents_are_read_on_the_host_alone_and_no_mask_of_rows_x_columns_is_computed(style):
    """They stay there, and no copy of them is asked for what it holds."""
    seq, documents = 2048, torch.arange(2048)[None] // 700
    batch = MicroBatch(documents, documents, documents, documents).to(torch.device("meta"), documents=False)
    assert batch.tokens.is_meta and batch.positions.is_meta and torch.equal(batch.documents, documents)
    steps = cp.visible_blocks(STYLES[style], seq, 2, 1, mask_of(documents), "meta")
    assert all(x.is_meta for blocks in steps for block in blocks for x in block.mask.documents)
    with Meter() as meter:
        cp.visible_blocks(STYLES[style], seq, 2, 1, mask_of(documents))
    assert seq * 8 <= meter.peak["other"] < 10 * seq * 8 < (seq // 2) ** 2 / 4  # at least copies of the documents


# ---- attention ------------------------------------------------------------------------------------------------------

def inputs(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """q, k, v and a gradient of what comes out; logits are `scale` times as large as random ones."""
    q, k, v, do = (normal(B, heads, S, D, seed=seed) for seed, heads in enumerate((N, K, K, N)))
    return [x.to(dtype) for x in (q * scale, k, v, do)]


def own_inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple:
    """Those of this rank's tokens, and where they are."""
    mine = own_positions(S, dist.get_world_size(), dist.get_rank())
    q, k, v, do = (x[:, :, mine].contiguous() for x in inputs(dtype, scale))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do, mine


def unrounded(function):
    """Of bf16 it makes fp32."""
    return lambda *given: tuple(x.float() for x in function(*(
        x.double() if isinstance(x, torch.Tensor) else x for x in given)))


KERNELS = {"sdpa": SDPA, "math": MATH,
           "unrounded": AttentionKernel(None, unrounded(MATH.forward), unrounded(MATH.backward))}


def attended(style: str, kernel: str, dtype=torch.float64, scale=1.0, mask: Mask = CAUSAL) -> list[tuple]:
    """o, dq, dk, dv of this rank's tokens, as pieces that grids.whole puts together."""
    q, k, v, do, mine = own_inputs(dtype, scale)
    o = attention_of(style, mask, KERNELS[kernel])(q, k, v)
    o.backward(do)
    return [(name, (*part.shape[:2], S, D), (slice(None), slice(None), mine), True, part)
            for name, part in (("o", o.detach()), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad))]


def by_pieces(style: str, attention: AttentionKernel, c: int, q, k, v, do, mask: Mask = CAUSAL) -> list[torch.Tensor]:
    """o, dq, dk, dv by the blocks of all c ranks, one after the other on one device, where nothing need be sent."""
    seq, whole = q.shape[2], cp.join_by_token(k, v)
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dkv = torch.zeros_like(whole, dtype=acc_dtype(q.dtype))

    def exchange(kv, group):
        for at in places:
            yield whole[at]

    def send_back(grads, pending, group):
        dkv[later.pop(0)] += grads
        return collectives.done(grads.new_zeros(()))

    here = STYLES[style]._replace(exchange=exchange, send_back=send_back)
    for i in range(c):
        own, *later = places = [positions_of(seq, c, chunks) for chunks in STYLES[style].chunks(c, i)]
        leaves = [x[:, :, own].requires_grad_() for x in (q, k, v)]
        steps = cp.visible_blocks(STYLES[style], seq, c, i, mask, q.device)
        result = cp.BlockAttention.apply(*leaves, here, steps, attention, collectives.ALONE)
        o[:, :, own] = result.detach()
        dq[:, :, own], *own_dkv = torch.autograd.grad(result, leaves, do[:, :, own])
        dkv[own] += cp.join_by_token(*own_dkv)
    return [o, dq, *cp.by_head(dkv, k.shape[3])]


def at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, mask: Mask) -> list[torch.Tensor]:
    """o, dq, dk, dv in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, _ = dense_attention(*leaves, mask)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.double())]


# ---- the plain version, and training with every style ---------------------------------------------------------------

H, V = 20, 7  # values narrower than keys, as latents have them


def train_layer(attend, places: torch.Tensor, group: collectives.Group, steps: int = 3) -> list[torch.Tensor]:
    """Train one attention layer by some steps of SGD on the tokens at these places; return its weights."""
    x, target = (normal(B, S, H, seed=seed)[:, places] for seed in (10, 11))
    shapes = [(H, N * D), (H, K * D), (H, K * V), (N * V, H)]
    weights = [(normal(*shape, seed=20 + i) / 4).requires_grad_() for i, shape in enumerate(shapes)]
    wq, wk, wv, wo = weights
    for _ in range(steps):
        q, k, v = ((x @ w).unflatten(-1, (-1, d)).transpose(1, 2) for w, d in ((wq, D), (wk, D), (wv, V)))
        y = attend(q, k, v).transpose(1, 2).flatten(2) @ wo
        ((y - target).square().sum() / (B * S)).backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 0.1 * collectives.sum_over_ranks(weight.grad, group)
                weight.grad = None
    return [weight.detach() for weight in weights]


def train_on_ranks(style: str) -> list[torch.Tensor]:
    group = everyone()
    c, i = group.size, group.rank
    mine = own_positions(S, c, i)
    if style == "plain, contiguous":
        mine = torch.arange(S).chunk(c)[i]
    if style.startswith("plain"):
        return train_layer(lambda q, k, v: cp.plain_attention(q, k, v, mine, group), mine, group)
    return train_layer(attention_of(style, CAUSAL, SDPA), mine, group)


@pytest.mark.parametrize("c, styles", [(3, ("plain, contiguous", "plain, zig-zag", *CP_STYLES)),
                                       (4, ("plain, zig-zag", "ring 2"))])
def test_the_plain_version_and_every_style_train_as_one_process(pool, c, styles):
    start, wanted = (train_layer(lambda q, k, v: dense_attention(q, k, v, CAUSAL)[0], torch.arange(S), ALONE, steps)
                     for steps in (0, 3))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(wanted, start))
    results = for_each(pool, c, train_on_ranks, [dict(style=style) for style in styles])
    for style, ranks in zip(styles, results):
        for found in ranks:
            for ours, want in zip(found, wanted, strict=True):
                assert (ours - want).abs().max() < 1e-10 * want.abs().max(), style


# ---- blocks of scores, on one device and on ranks -------------------------------------------------------------------

CUDNN = AttentionKernel(None, gpu_forward, gpu_backward)


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=gpu)])
@pytest.mark.parametrize("style", BLOCK_STYLES)
def test_the_pieces_of_all_ranks_on_one_device_equal_attention_at_once(style, device, dtype, request):
    """With grouped heads, which no kernel needs expanded. By torch's kernel for the device; by cuDNN's, for which there
    is a stand-in on the CPU; on a GPU by flash.py, too."""
    kernels = [SDPA, CUDNN]
    if device == "cpu":
        request.getfixturevalue("cudnn")
    if device == "cuda":
        import flash
        kernels.append(AttentionKernel(flash.flash_attention, flash.flash_forward, flash.flash_backward))
    q, k, v, do = (normal(2, heads, 256, 64, seed=seed).to(dtype) for seed, heads in enumerate((8, 2, 2, 8)))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for kernel in kernels:
        found = by_pieces(style, kernel, 4, *(x.to(device) for x in (q, k, v, do)))
        for ours, want in zip(found, at_once(q, k, v, do, CAUSAL)):
            assert (ours.double().cpu() - want).abs().max() < bound * want.abs().max()


@pytest.mark.parametrize("flags, line", [
    ("--cp 2 --head-dim 12", "--cp 2 with heads 12 wide: torch's FlashAttention takes multiples of 8 up to 256, use"),
    ("--cp 2 --head-dim 264", "--cp 2 with heads 264 wide"), ("--cp 2 --head-dim 12 --dtype fp32", ""),
    ("--cp 2 --head-dim 12 --attention math", ""), ("--cp 2 --head-dim 12 --cp-style ulysses", ""),
    ("--head-dim 12", ""), ("--cp 2 --head-dim 256", "")])
def test_heads_that_torchs_kernel_for_gpus_does_not_take_are_refused(flags, line):
    settings = rules.parse(flags.split(), 2)
    with pytest.raises(ValueError, match=f"^{line}") if line else nullcontext():
        device.check_device(settings, torch.device("cuda"))


@pytest.mark.parametrize("kernel, mask, D, dtype, chosen", [
    ("auto", CAUSAL, 64, torch.bfloat16, "sdpa"), ("auto", Mask(window=5), 128, torch.bfloat16, "flash"),
    ("auto", Mask(documents=(1, 1)), 128, torch.float32, "flash"), ("auto", Mask(window=5), 264, torch.half, "sdpa"),
    ("auto", Mask(window=5), 64, torch.float64, "sdpa"), ("triton", CAUSAL, 256, torch.bfloat16, "flash"),
    ("math", Mask(window=5), 64, torch.bfloat16, "math"), ("sdpa", Mask(window=5), 64, torch.bfloat16, "sdpa")])
def test_auto_takes_our_kernel_where_torchs_would_read_a_mask(kernel, mask, D, dtype, chosen):
    """On a GPU, for documents and windows; not for what it does not compute: heads wider than 256, or fp64."""
    import flash
    attends = {"sdpa": SDPA.attend, "math": MATH.attend, "flash": flash.flash_attention}
    on_gpu = cp.choose_attention(kernel, mask, D, SimpleNamespace(is_cuda=True, dtype=torch.long), dtype)
    assert on_gpu.attend is attends[chosen]
    on_cpu = cp.choose_attention(kernel, mask, D, SimpleNamespace(is_cuda=False, dtype=torch.long), dtype)
    assert on_cpu.attend is attends[chosen if kernel != "auto" else "sdpa"]


@cache
def exact(scale=1.0, documents=False, window=0) -> list[torch.Tensor]:
    return at_once(*inputs(torch.float64, scale), mask_of(documents_of(S) if documents else None, window))


CASES = [(kernel, scale, documents, window) for documents in (False, True) for kernel, scale, window in (
    ("sdpa", 1.0, 0), ("sdpa", 1000.0, 0),  # exp of a difference overflows
    ("sdpa", 1.0, 1), ("sdpa", 1.0, 9), ("sdpa", 1.0, 20), ("math", 1.0, 0), ("math", 1.0, 9))]
NEAR = [f"{style} {near}" for style in BLOCK_STYLES for near in (2, 4)]


@pytest.mark.parametrize("style, c", [*product(CP_STYLES, (3, 4)), ("ring 2", 4), *slow(
    *product(CP_STYLES, (2,)), ("allgather 2", 4), *product((*CP_STYLES, *NEAR), (8,)))])
def test_attention_by_blocks_equals_attention_at_once(pool, style, c):
    """Result and each gradient to 1e-10. With documents, some blocks show some rows nothing."""
    results = for_each(pool, c, attended, [
        dict(style=style, kernel=kernel, scale=scale, mask=mask_of(documents_of(S) if documents else None, window))
        for kernel, scale, documents, window in CASES])
    for case, ranks in zip(CASES, results):
        for (name, have), want in zip(grids.whole(ranks).items(), exact(*case[1:]), strict=True):
            error = (have - want).abs().max() / max(want.abs().max(), 1e-3)  # in a window of 1 scores have no slope
            assert error < 1e-10, f"{name} of {case} is {error:.1e} off"


@pytest.mark.parametrize("D, kernel", [(64, "cudnn"), (128, "cudnn"), (192, "flash")])
def test_the_width_of_heads_chooses_the_kernel_of_blocks_on_gpus(monkeypatch, D, kernel):
    """On fake tensors of a GPU: torch's own rules for them check the layout of what both operators are given."""
    called = []

    def see(function, args, kwargs, out):
        if "attention" in function.__name__:
            called.append(function.overloadpacket.__name__)

    with FakeTensorMode(), Watch(see):
        q, k, v, do = (torch.empty(2, 16, heads, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                       for heads in (8, 2, 2, 8))
        for mask in (CAUSAL, Mask(False)):
            o, lse = SDPA.forward(q, k, v, mask)
            assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and o.stride() == q.stride()
            grads = SDPA.backward(do, q, k, v, o, lse, mask)
            assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
        assert called == 2 * [f"_scaled_dot_product_{kernel}_attention",
                              f"_scaled_dot_product_{kernel}_attention_backward"]
        for direction in ("forward", "backward"):
            monkeypatch.setattr(sdpa, f"math_{direction}", lambda *args: called.append("math"))
        SDPA.forward(q, k, v, Mask(window=3))
        SDPA.backward(do, q.float(), k.float(), v.float(), o, lse, CAUSAL)
    assert called[4:] == ["math", "math"]  # what neither operator takes


@pytest.mark.parametrize("style", BLOCK_STYLES)
def test_what_blocks_add_up_to_is_rounded_to_bf16_once(pool, style):
    """So each number is half a unit in the last place off, given that backward reads the rounded result."""
    found = grids.whole(pool.run(3, attended, style=style, kernel="unrounded", dtype=torch.bfloat16))
    q, k, v, do = (x.double() for x in inputs(torch.bfloat16))
    o, lse = MATH.forward(q, k, v, CAUSAL)
    wants = o, *MATH.backward(do, q, k, v, found["o"].double(), lse, CAUSAL)
    for (name, have), want in zip(found.items(), wants, strict=True):
        assert ((have.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all(), name


# ---- what is sent, what is saved, and when --------------------------------------------------------------------------

def metered(style: str, dtype: torch.dtype) -> dict:
    q, k, v, do, _ = own_inputs(dtype)
    meter, out = Meter(), {}

    def attend_at_once(q, k, v, mask):
        out["before attention"] = meter.settled()["other"]
        return SDPA.attend(q, k, v, mask)

    attend = attention_of(style, CAUSAL, SDPA._replace(attend=attend_at_once))
    meter.label("given", q, k, v, do)
    collectives.sent.clear()
    with meter:
        o = attend(q, k, v)
        out["saved"], out["peak forward"] = meter.settled()["other"], meter.peak["other"]
        out["sent forward"] = dict(collectives.sent)
        collectives.sent.clear()
        o.backward(do)
        out["sent backward"] = dict(collectives.sent)
    return out


@pytest.mark.parametrize("style, c, dtype", [
    *((style, *case) for case in ((2, torch.bfloat16), (4, torch.float32)) for style in IN_THE_TABLE),
    ("ring 2", 4, torch.float32), ("allgather 2", 4, torch.float32),
    *slow(*((*case, torch.float32) for case in (*product(IN_THE_TABLE, (2, 8)), ("ring 2", 8), ("ring 4", 8))))])
def test_bytes_sent_and_saved_are_those_of_the_table(pool, style, c, dtype):
    """Heads among `near` neighbours, and then keys of 1/near of the heads among the c / near that have these heads.
    Block by block, gradients of keys and values are summed, and so sent, in fp32. Saved: o and lse of the own tokens,
    besides q, k and v. Besides them: two shards of K and V, or all of them."""
    near = c if style == "ulysses" else int(style.partition(" ")[2] or 1)
    s, e, q, k = B * S // c, dtype.itemsize, N * D, K * (near // math.gcd(near, K)) * D
    of_heads, of_keys = (near - 1) * s * (2 * q + 2 * k) * e // near, (c // near - 1) * 2 * s * k
    axes = ("cp_heads", "cp_keys") if 1 < near < c else ("cp", "cp")
    for seen in pool.run(c, metered, style=style, dtype=dtype):
        for way, width in ("sent forward", e), ("sent backward", e + 4):
            assert seen[way] == {axis: sent for axis, sent in zip(axes, (of_heads, of_keys * width)) if sent}
        if style == "ulysses":  # all tokens with 1/c of the heads, once: exchanged ones are gone
            assert seen["before attention"] == s * e * (q + 2 * k)
        elif near == 1 and dtype == torch.float32:
            assert seen["saved"] == s * 4 * (q + N)
            shards = dict(ring=2, allgather=1 + c)[style]  # the own one as it is sent, and one at a time or all
            # Besides, the result of a block and its lse. What merges two of these is less than another shard.
            least = shards * 2 * s * 4 * k + s * 4 * (q + N)
            assert least <= seen["peak forward"] - seen["saved"] <= least + 2 * s * 4 * N


@pytest.mark.parametrize("style", ["ring", "allgather"])
def test_what_a_block_returns_is_gone_before_the_next_block(style):
    """Once it has been merged, or added."""
    returned = {"forward": [], "backward": []}

    def tracked(way: str, *given) -> tuple[torch.Tensor, ...]:
        assert [x() for x in returned[way]] == len(returned[way]) * [None]
        results = getattr(SDPA, way)(*given)
        returned[way] += map(weakref.ref, results)
        return results

    kernel = SDPA._replace(**{way: partial(tracked, way) for way in returned})
    by_pieces(style, kernel, 3, *inputs(torch.float32))
    assert len(returned["forward"]) > 2 * 3 and len(returned["backward"]) > 3 * 3  # several blocks on a rank


def gathered_latents(whole: torch.Tensor, grads: list[torch.Tensor]) -> tuple:
    """Latents of all tokens, as this rank has gathered them; gradients of its own ones, given those of what each rank
    has gathered; where they are, and what it sent each way."""
    group, sent = everyone(), []
    mine = own_positions(S, group.size, group.rank)
    latents = whole[:, mine].requires_grad_()
    collectives.sent.clear()
    gathered = cp.gather_tokens(latents, group)
    sent.append(collectives.sent.pop(group.axis))
    gathered.backward(grads[group.rank])
    return gathered.detach(), latents.grad, mine, [*sent, collectives.sent.pop(group.axis, 0)]


@pytest.mark.parametrize("c", [2, 3])
def test_ranks_gather_latents_and_no_heads(pool, c):
    """(c-1) s R e bytes each way; gradients of all ranks are summed. tests/test_grids.py attends to them."""
    whole, *grads = (normal(B, S, 1, 7, seed=seed) for seed in range(1 + c))
    for gathered, grad, mine, sent in pool.run(c, gathered_latents, whole=whole, grads=grads):
        assert torch.equal(gathered, whole) and (grad - sum(grads)[:, mine]).abs().max() < 1e-12
        assert sent == 2 * [(c - 1) * B * S // c * 7 * 8]


def test_keys_and_values_made_of_latents_are_not_copied():
    """Kernels read them where the layer has written them, side by side, in forward and backward."""
    q, *_, do = inputs(torch.float64)
    mine, both, read = own_positions(S, 4, 1), torch.randn(B, N, S, 2 * D, dtype=torch.float64), []
    k, v = (x.requires_grad_() for x in both.chunk(2, -1))
    kernel = AttentionKernel(None, lambda *given: read.extend(given[1:3]) or SDPA.forward(*given),
                             lambda *given: read.extend(given[2:4]) or SDPA.backward(*given))
    steps = cp.visible_blocks(STYLES["latents"], S, 4, 1, CAUSAL)
    cp.BlockAttention.apply(q[:, :, mine], k, v, STYLES["latents"], steps, kernel, ALONE).backward(do[:, :, mine])
    assert len(read) == 2 * 2 * len(steps[0])
    assert {x.untyped_storage().data_ptr() for x in read} == {both.untyped_storage().data_ptr()}


def order_of_events(style: str) -> list[str]:
    q, k, v, do, _ = own_inputs(torch.float64)
    with in_order((cp, "shift", "send"), (cp, "all_gather", "send"), waits("wait")) as events:
        kernel = SDPA._replace(forward=noted(events, SDPA.forward, "forward"),
                               backward=noted(events, SDPA.backward, "backward"))
        attention_of(style, CAUSAL, kernel)(q, k, v).backward(do)
    return events


def test_keys_are_sent_while_those_before_them_are_used(pool):
    """Keys of an earlier rank are one block, for both chunks of queries; those of a later one, too, for one of them."""
    for seen in pool.run(3, order_of_events, style="ring"):
        forward = ["send", "forward", "wait", "send", "forward", "wait", "forward"]
        backward = ["send", "backward", "wait", "send", "backward", "send", "wait", "backward", "wait", "send", "wait"]
        assert seen == forward + backward
    for seen, rest in zip(pool.run(3, order_of_events, style="allgather"), (1, 2, 1)):  # blocks of others
        assert seen == [event for kind in ("forward", "backward")
                        for event in ("send", "send", kind, "wait", "wait", *[kind] * rest)]
