"""Demos end, and print what their files claim of it, by arithmetic."""
import contextlib
import importlib
import io

import grids
import pytest

LINEAR, INPUT = 2 * 256 * 128 * 128, 256 * 128 * 4  # recompute.py: FLOPs of a matmul, bytes of a layer's input
P = 12 * 256**2  # zero.py: weights of 2 bytes, gradients of 4, optimizer state of 12
SHOWN = [  # file, ranks, what some line has
    ("cp", 1, ["contiguous: [3, 7, 11, 15] blocks", "zig-zag: [9, 9, 9, 9] blocks"]),  # of 36
    ("tp", 2, ["64 tokens between pairs   sent: 4 x", "32 tokens between pairs   sent: 5 x"]),  # X is gathered again
    ("tp", 1, ["sent: 0 x"]),
    ("pp", 1, ["afab: a rank is idle for 9 of 27 units", "1f1b: a rank is idle for 9 of 27 units",
               "zb-h1: a rank is idle for 3 of 21 units"]),  # 3 (p - 1) of 3 (m + p - 1), and a third of it
    ("ep", 2, ["rank 0, rows per expert after 5 updates of biases: "]),
    ("zero", 4, [f"{z}: {held * P / 1e6:5.2f} MB held, {sent * P * 3 / 4 / 1e6:5.2f} sent" for z, held, sent in (
        (0, 2 + 4 + 12, 8), (1, 2 + 4 + 12 / 4, 6), (2, 2 + (4 + 12) / 4, 6), (3, (2 + 4 + 12) / 4, 8))]),
    ("recompute", 1, [f"{(3 * 8 - 1) * INPUT / 1e6:.2f} MB    {3 * 8 * LINEAR / 1e6:.0f} MFLOP",
                      f"{8 * INPUT / 1e6:.2f} MB    {4 * 8 * LINEAR / 1e6:.0f} MFLOP"]),
    ("fp8", 1, ["E4M3 for all, one scale"]),
    ("flash", 1, ["■ · · · · · · ·        ■ · · · · · · ·        ■ · · · · · · ·",
                  "■ ■ ■ ■ ■ ■ ■ ■        · · · · ■ ■ ■ ■        · · · · · ■ ■ ■"]),
    ("model", 1, [f"The tiny Llama, {2 * 257 * 128 + 4 * (128 * (2 * 128 + 2 * 64 + 3 * 352) + 2 * 128) + 128:,} ",
                  "guessing ln 257 = 5.549"]),
    ("latent", 1, ["128 heads     576 numbers", " 32 heads   8,192 numbers"]),  # 512 + 64; 2 x 32 x 128
    ("muon", 1, ["each shard of 2 ranks orthogonalised alone: 71% off"]),
]


def printed(file: str) -> str:
    demo = importlib.import_module(file).demo
    arguments = {"cp": [4]}.get(file, [grids.everyone()] * demo.__code__.co_argcount)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        demo(*arguments)
    return text.getvalue()


@pytest.mark.parametrize("file, ranks, shown", SHOWN)
def test_a_demo_shows_what_its_file_claims(pool, file, ranks, shown):
    first, *others = pool.run(ranks, "test_demos:printed", file=file) if ranks > 1 else [printed(file)]
    assert all(words in first for words in shown), first
    assert file == "ep" or not any(others)
