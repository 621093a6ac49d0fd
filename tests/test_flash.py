"""FlashAttention against a reference in fp64, and its costs."""
import pytest
import torch
from exact import DEVICE, close, compare, dense_attention, gpu, is_refused, leaves, numbers

import flash
from cp import choose_attention
from flash import Tiles, flash_attention, flash_backward, flash_forward
from operations import CAUSAL, Mask
from sdpa import attention_sdpa
from test_cp import BLOCK_STYLES, by_pieces

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the interpreter at log2(0) = -inf


# ---- attention ------------------------------------------------------------------------------------------------------

@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(flash, "FP32_TILES", Tiles(16, 16, 4, 1))


def heads(rows: int, columns: int, N: int = 2, K: int = 1, D: int = 16, B: int = 2, V: int = 0) -> list[torch.Tensor]:
    keys, values = (numbers(B, K, columns, width, seed=n) for width, n in ((D, 1000), (V or D, 2000)))
    return [numbers(B, N, rows, D), keys, values]  # numbers adds shapes


def documents_of(kind: str, rows: int, columns: int, B: int = 2) -> tuple[torch.Tensor, torch.Tensor] | None:
    generator = torch.Generator().manual_seed(3)
    both = [torch.randint(0, 4, (B, n), generator=generator) for n in (rows, columns)]
    if kind == "packed":  # each contiguous; some have no queries or no keys; the last query and key share one
        both = [x.sort().values.int().repeat(1, 2)[:, :x.shape[1]] for x in both]  # a slice, as a chunk's are
    if kind == "alone":
        both = [torch.arange(n).flip(0).expand(B, n) for n in (rows, columns)]
    if kind == "none meet":
        both = [both[0], both[1] + 4]
    return None if kind == "one" else tuple(x.to(DEVICE) for x in both)


def attention_agrees(inputs, causal, documents, window=0, offset=None):
    """flash_forward and its gradients equal dense attention's. Without an offset, the last query and the last key have
    one position."""
    mask = Mask(causal, window, documents, inputs[1].shape[2] - inputs[0].shape[2] if offset is None else offset)
    compare(lambda q, k, v: flash_attention(q, k, v, mask), lambda q, k, v: dense_attention(q, k, v, mask)[0], inputs)
    close(flash_forward(*inputs, mask)[1], dense_attention(*(x.double() for x in inputs), mask)[1])


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)])
@pytest.mark.parametrize("rows, columns, causal", [(33, 33, True), (33, 33, False), (17, 40, True), (40, 17, True),
                                                   (40, 17, False), (1, 1, True)])
def test_attention_of_any_length(monkeypatch, tiles, rows, columns, causal):
    monkeypatch.setattr(flash, "FP32_TILES", Tiles(*tiles, 4, 1))
    attention_agrees(heads(rows, columns, B=1), causal, None)


@pytest.mark.parametrize("rows, columns", [(16, 16), (8, 32), (32, 8), (5, 7), (100, 100)])
def test_the_plain_loops_are_attention_with_all_scores(rows, columns):
    """Results and gradients in fp64, for tiles that divide 37 tokens and tiles that do not."""
    exact = leaves(*heads(37, 37, K=2), dtype=torch.float64)
    want, want_lse = dense_attention(*exact, CAUSAL)
    q, k, v = (x.detach() for x in exact)
    do = numbers(*q.shape, seed=9).double()
    want.backward(do)
    o, lse = flash.flash_forward_reference(q, k, v, rows, columns)
    found = o, lse, *flash.flash_backward_reference(do, q, k, v, o, lse, rows, columns)
    for one, other in zip(found, (want.detach(), want_lse.detach(), *(x.grad for x in exact)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows, columns, kind, window, causal, offset", [
    *((*case, None) for case in (
        (37, 37, "packed", 0, True), (37, 37, "in any order", 0, True), (37, 37, "alone", 0, True),
        (37, 37, "none meet", 0, False), (21, 50, "packed", 0, False), (21, 50, "in any order", 0, False),
        (37, 37, "one", 2, True), (37, 37, "one", 16, True), (37, 37, "one", 17, True), (37, 37, "packed", 40, True),
        (1, 50, "packed", 17, True), (21, 50, "packed", 1, True), (21, 50, "packed", 17, True))),
    *((33, 35, "one", 20, *case) for case in ((True, 5), (False, 5), (False, 16), (True, 40), (False, 90)))])
def test_attention_of_documents_and_in_a_window(small_tiles, rows, columns, kind, window, causal, offset):
    """With an offset, blocks of scores of context parallelism: some rows, or all, may see nothing."""
    attention_agrees(heads(rows, columns, N=1), causal, documents_of(kind, rows, columns), window, offset)


def test_documents_are_searched_in_chunks_of_1024_tokens():
    """That of the queries ends in the first of two chunks of keys."""
    keys = torch.tensor([0] * 100 + [1] * 600 + [2] * 360, device=DEVICE)[None]
    attention_agrees(heads(9, 1060, N=1, B=1), False, (torch.ones_like(keys[:, :9]), keys))


@pytest.mark.parametrize("N, K, D, V", [
    (6, 6, 16, 16), (6, 2, 16, 16), (2, 1, 2, 2), (2, 1, 10, 10), (2, 1, 96, 96), (2, 1, 192, 192),
    (4, 2, 20, 7), (4, 2, 7, 20), (2, 2, 192, 128)])  # values of another width, as of latents
def test_attention_of_any_heads(N, K, D, V):
    """Some share keys."""
    attention_agrees(heads(40, 40, N, K, D, B=1, V=V), True, None)


@pytest.mark.parametrize("B, rows, columns", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_attention_of_nothing(B, rows, columns):
    q, k, v = leaves(*heads(rows, columns, B=B))
    o, lse = flash_forward(q, k, v, Mask(False))
    assert not o.any() and lse.isneginf().all()
    flash_attention(q, k, v, Mask(False)).sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))


def test_large_scores_do_not_overflow(small_tiles):
    """Scores are some thousands; an absolute rounding error of scores is a relative one of probabilities."""
    q, k, v = heads(37, 37)
    q, k = q * 30, k * 30
    o, lse = flash_forward(q, k, v)
    exact, exact_lse = dense_attention(*(x.double() for x in (q, k, v)), CAUSAL)
    rounding = (q @ k.transpose(2, 3)).abs().max().item() * 16 ** -0.5 * 2 ** -22
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=rounding)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=rounding)
    assert all(x.isfinite().all() for x in flash_backward(numbers(*o.shape, seed=9), q, k, v, o, lse))


def test_strides_do_not_matter(small_tiles):
    """q, k and v are views of one matmul's result, and do is an expanded scalar, with strides of 0."""
    def parts(qkv):
        return [x.transpose(1, 2) for x in qkv.split([4, 1, 1], 2)]

    qkv = numbers(2, 37, 6, 16)
    assert flash_attention(*parts(qkv)).transpose(1, 2).is_contiguous()
    compare(lambda qkv: flash_attention(*parts(qkv)).sum(),
            lambda qkv: dense_attention(*parts(qkv), CAUSAL)[0].sum(), [qkv])


def test_numbers_of_a_head_need_not_be_contiguous():
    """Of any operand; those of lse neither."""
    q, k, v = heads(21, 21, 1, B=1)
    o, lse = flash_forward(q, k, v)
    do, apart = numbers(*o.shape, seed=9), [torch.stack((x, x + 1), -1)[..., 0] for x in (q, k, v, o, lse)]
    found = (*flash_forward(*apart[:3]), *flash_backward(torch.stack((do, do), -1)[..., 0], *apart))
    for one, other in zip((o, lse, *flash_backward(do, q, k, v, o, lse)), found):
        assert torch.equal(one, other)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has no files with holes")
@pytest.mark.parametrize("shape, strides", [
    ((3, 1, 4, 16), (2 ** 30, 2 ** 11, 2 ** 5)), ((1, 3, 4, 16), (2 ** 5, 2 ** 30, 2 ** 7)),
    ((1, 1, 20, 16), (2 ** 5, 2 ** 7, 2 ** 27))], ids=["sequences", "heads", "rows"])
def test_offsets_may_exceed_2_to_the_31(tmp_path, shape, strides):
    """By 32-bit strides of sequences, heads or rows, of any operand. The numbers between, and before, where
    too large an offset of 32 bits would lead, are holes of a file."""
    count = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 16
    assert count > 2 ** 31 > max(strides)
    storage = torch.UntypedStorage.from_file(str(tmp_path / "holes"), shared=True, nbytes=4 * (2 ** 31 + count))
    far = torch.empty(0).set_(storage, 2 ** 31, shape, (*strides, 1))
    B, N, rows, _ = shape
    q, k, v = heads(rows, rows, N=N, K=N, B=B)
    o, lse = flash_forward(q, k, v)
    near = [numbers(*shape, seed=9), q, k, v, o]
    wanted = flash_backward(*near, lse)
    for i, x in enumerate(near):
        given = [*near[:i], far.copy_(x), *near[i + 1:]]
        assert all(map(torch.equal, flash_backward(*given, lse), wanted))
        assert torch.equal(flash_forward(*given[1:4])[0], o)


def test_attention_in_16_bits():
    """Probabilities, results and derivatives of scores are rounded to fp16 before they are used; all else is fp32."""
    half = [x.half() for x in heads(70, 70, D=64, B=1)]
    do, exact = numbers(1, 2, 70, 64, seed=9, dtype=torch.float16), leaves(*half, dtype=torch.float64)
    o, lse = flash_forward(*half)
    want, want_lse = dense_attention(*exact, CAUSAL)
    want.backward(do.double())
    close(lse, want_lse.detach())
    for got, whole in zip((o, *flash_backward(do, *half, o, lse)), (want.detach(), *(x.grad for x in exact))):
        assert got.dtype == torch.float16
        assert (got.double() - whole).norm() <= 2.0 ** -10 * whole.norm()


@pytest.mark.parametrize("window", [0, 16, 17, 18])
def test_tiles_that_nobody_sees_are_not_loaded(small_tiles, window):
    """Documents of 5, 27, 1 and 15 tokens, tiles of 16 x 16: exactly those with a visible pair are loaded."""
    documents = torch.arange(4, device=DEVICE).repeat_interleave(torch.tensor([5, 27, 1, 15], device=DEVICE))[None]
    near = torch.ones(48, 48, dtype=torch.bool, device=DEVICE).tril().triu(1 - (window or 48))
    for pairs, both in (near, None), (near & (documents.mT == documents), (documents, documents)):
        tiles = pairs.unflatten(0, (-1, 16)).unflatten(-1, (-1, 16)).any(-1).any(1)
        assert flash.find_loaded_tiles(Mask(window=window, documents=both), 48, 16, 16) == tiles.tolist()


@pytest.mark.parametrize("window, offset", [(0, -20), (0, 7), (9, 12)])
def test_queries_at_an_offset_load_no_tile_that_they_do_not_see(small_tiles, window, offset):
    """As in blocks of context parallelism. Which tiles forward loads is found by NaN in values. Backward's kernels: the
    one of dk and dv by NaN in do, a tile of queries at a time; the one of dq by NaN in a tile of keys."""
    mask, (q, k, v) = Mask(window=window, offset=offset), heads(48, 48, 1, 1, B=1)
    distance = torch.arange(48)[:, None] + offset - torch.arange(48)
    pairs = (distance >= 0) & (distance < (window or 100))
    tiles = pairs.view(3, 16, 3, 16).any(3).any(1)
    assert flash.find_loaded_tiles(mask, 48, 16, 16) == tiles.tolist()
    o, lse = flash_forward(q, k, v, mask)
    for n in range(3):
        do, keys = torch.ones_like(q), k.clone()
        do[:, :, 16 * n] = torch.nan
        keys[:, :, 16 * n] = torch.nan
        _, dk, dv = flash_backward(do, q, k, v, o, lse, mask)
        dq, *_ = flash_backward(torch.ones_like(q), q, keys, v, o, lse, mask)
        for found, wanted in (dk, tiles[n]), (dv, tiles[n]), (dq, tiles[:, n]):
            assert found[0, 0, ::16].isnan().any(-1).tolist() == wanted.tolist()


@pytest.mark.parametrize("query, window, keys", [(20, 0, range(32)), (44, 0, range(32, 48)), (20, 6, range(32))])
def test_backward_loads_no_tile_that_nobody_sees(small_tiles, query, window, keys):
    """NaN in a query's do reaches keys in the tiles that it is computed with, none after it or of other documents, two
    of 32 tokens; in a window of 6 it sees keys of two tiles of 16."""
    documents, (q, k, v) = torch.arange(2, device=DEVICE).repeat_interleave(32)[None], heads(64, 64, 1, 1, B=1)
    mask, do = Mask(window=window, documents=None if window else (documents, documents)), torch.zeros_like(q)
    do[:, :, query] = torch.nan
    found = flash_backward(do, q, k, v, *flash_forward(q, k, v, mask), mask)
    dq, dk, dv = (x.isnan().any(-1).flatten().tolist() for x in found)
    assert dk == dv == [row in keys for row in range(64)] and dq == [row == query for row in range(64)]


@pytest.mark.parametrize("kind, window", [("one", 0), ("packed", 14)])
@pytest.mark.parametrize("style", BLOCK_STYLES)
def test_attention_by_blocks(small_tiles, style, kind, window):
    """As in context parallelism: the blocks of all ranks, one after the other, merged by logsumexp."""
    c, S, (q, k, v) = 2, 36, heads(36, 36, B=1)
    documents, _ = documents_of(kind, S, S, B=1) or (None, None)
    mask = Mask(window=window, documents=None if documents is None else (documents, documents))
    do, kernel = numbers(*q.shape, seed=9), choose_attention("triton", mask, 16, q, q.dtype)
    o, dq, dk, dv = by_pieces(style, kernel, c, q, k, v, do, mask)
    exact = leaves(q, k, v, dtype=torch.float64)
    wanted = dense_attention(*exact, mask)[0]
    wanted.backward(do.double())
    for ours, expected in zip((o, dq, dk, dv), (wanted.detach(), *(x.grad for x in exact))):
        close(ours, expected)


# ---- what is refused ------------------------------------------------------------------------------------------------

Q, KV = (1, 2, 8, 16), (1, 1, 8, 16)
REFUSED = {  # what is launched -> what the error says
    "keys and values differ": (lambda n: flash_forward(n(*Q), n(*KV), n(1, 1, 9, 16)), "B K columns D"),
    "widths differ": (lambda n: flash_forward(n(*Q), n(1, 1, 8, 8), n(1, 1, 8, 8)), "must be B N rows D"),
    "heads": (lambda n: flash_forward(n(1, 3, 8, 16), *[n(1, 2, 8, 16)] * 2), "3 heads cannot share 2 kv heads"),
    "too wide values": (lambda n: flash_forward(n(*Q), n(*KV), n(1, 1, 8, 257)), "257 wide"),
    "an o of other values": (lambda n: flash_backward(n(*Q), n(*Q), n(*KV), n(1, 1, 8, 8), n(*Q), n(1, 2, 8)),
                             "the width of v"),
    "too wide": (lambda n: flash_forward(*[n(1, 1, 8, 257)] * 3), "257 wide"),
    "two types": (lambda n: flash_forward(n(*Q), *[n(*KV).half()] * 2), "one type"),
    "fp64": (lambda n: flash_forward(*[n(*Q).double()] * 3), "take no torch.float64"),
    "documents of other keys": (lambda n: flash_forward(n(*Q), *[n(*KV)] * 2,
                                                        Mask(documents=documents_of("packed", 8, 9, 1))),
                                r"\[1, 8\] integers"),
    "lse of other rows": (lambda n: flash_backward(n(*Q), n(*Q), *[n(*KV)] * 2, n(*Q), n(1, 2, 9)), "its rows"),
    "other do": (lambda n: flash_backward(n(*KV), n(*Q), *[n(*KV)] * 2, n(*Q), n(1, 2, 8)), "as q"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_launched_is_refused_in_a_line(name):
    is_refused(*REFUSED[name])


# ---- on a GPU only --------------------------------------------------------------------------------------------------

@gpu
@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("kind", ["one", "packed", "window"])
def test_attention_in_bf16(D, kind):
    """No further from the exact result than twice torch's own attention in bf16."""
    S, mask = 1000, Mask(documents=documents_of("one" if kind == "window" else kind, 1000, 1000),
                   window=300 if kind == "window" else 0)
    inputs = [x.bfloat16() for x in heads(S, S, 8, 2, D)]
    exact, ours, torchs = leaves(*inputs, dtype=torch.float64), leaves(*inputs), leaves(*inputs)
    do = numbers(2, 8, S, D, seed=9, dtype=torch.bfloat16)
    results = [dense_attention(*exact, mask)[0], flash_attention(*ours, mask), attention_sdpa(*torchs, mask)]
    for result in results:
        result.backward(do.to(result.dtype))
    for one in zip(*([result, *(x.grad for x in leaves_)] for result, leaves_ in zip(results, (exact, ours, torchs)))):
        wanted, mine, theirs = (x.double() for x in one)
        assert (mine - wanted).norm() <= 2 * (theirs - wanted).norm()
