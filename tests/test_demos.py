"""Demos end, and print what their files claim of it, by arithmetic."""
import contextlib
import importlib
import io
import re

import grids
import pytest

import train
from core import rules
from core.groups import build_groups

LINEAR, INPUT = 2 * 256 * 128 * 128, 256 * 128 * 4  # recompute.py: FLOPs of a matmul, bytes of an activation
STATISTICS = 2 * 256 * 4  # mean and deviation of each token, which a norm saves
SHARD = 2 * 128 * 4 * 16 * 8  # cp.py: bytes of the keys and values of 128 tokens with 4 heads of 16, in fp64
ULYSSES = 3 * 128 * (2 * 16 + 2 * 4) * 16 * 8 // 4  # of q, k, v and results, three quarters go to other ranks
P = 12 * 256**2  # zero.py: weights of 2 bytes, gradients of 4, optimizer state of 12
SHOWN = [  # file, ranks, what some line has
    ("cp", 4, ["contiguous: [3, 7, 11, 15] blocks", "zig-zag: [9, 9, 9, 9] blocks", "Relative difference: ",  # of 36
               *(f"{style:22s}{3 * SHARD / 1e3:9.0f}{6 * SHARD / 1e3:11.0f}{9 * SHARD / 1e3:11.0f}"
                 for style in ("allgather", "ring")),
               f"{'ulysses':22s}{ULYSSES / 1e3:9.0f}{ULYSSES / 1e3:11.0f}{2 * ULYSSES / 1e3:11.0f}"]),
    ("cp", 1, ["zig-zag: [9, 9, 9, 9] blocks", "Relative difference: "]),
    ("tp", 2, ["64 tokens between pairs   sent: 4 x", "32 tokens between pairs   sent: 5 x",
               "Relative difference: "]),  # 5: backward gathers X again
    ("tp", 1, ["sent: 0 x", "Relative difference: "]),
    ("pp", 1, ["4 stages, one layer each, on 2 ranks; 4 micro-batches.",
               "rank 0  sent  8 activations,  4 gradients",  # of 4 micro-batches, from stages 0 and 2, and from stage 2
               "rank 1  sent  4 activations,  8 gradients", "Relative difference: "]),
    ("schedules", 1, ["afab        0  F0F1F2", "idle 9 of 33\n", "27% of the step\n",
                      "38% of the computation\n",  # 9 / (33 - 9)
                      "idle 4.5 of 28.5\n", "idle 3 of 27\n"]),  # half of 9 with two chunks; (p - 1)(F + I - W)
    ("ep", 2, ["rank 0 has tokens a b c    copies that it sends to each rank: [2, 2]",  # the figure of ep.py
               "rank 1 has tokens d e      copies that it sends to each rank: [1, 2]",
               "expert 0, on rank 0, reads a c\n", "expert 1, on rank 0, reads c d\n",
               "expert 2, on rank 1, reads a b d e\n", "expert 3, on rank 1, reads b e\n",
               "Relative difference: ", "after 30 updates of the biases"]),
    ("ep", 1, ["rank 0 has tokens a b c    copies that it sends to each rank: [3]",
               "expert 2, on rank 0, reads a b\n"]),
    ("zero", 4, [f"{z}: {held * P / 1e6:5.2f} MB held, {sent * P * 3 / 4 / 1e6:5.2f} sent" for z, held, sent in (
        (0, 2 + 4 + 12, 8), (1, 2 + 4 + 12 / 4, 6), (2, 2 + (4 + 12) / 4, 6), (3, (2 + 4 + 12) / 4, 8))]),
    ("core.gradients", 1, ["backward          dX3 dW3 ready3 dX2 dW2 ready2 dX1 dW1 ready1\n",
                           "backward_input    dX3 dX2 dX1\n",
                           "backward_weight   dW3 ready3 dW2 ready2 dW1 ready1\n",
                           f"{3 * 2 * 1024 * 64 * 4 / 1e6:.2f} MB"]),  # of 3 layers, inputs and output gradients
    ("recompute", 1, [f"none       {(4 * INPUT + STATISTICS) * 8 / 1e6:5.2f} MB   {8 * 6 * LINEAR / 1e6:4.0f} MFLOP",
                      f"selective  {(2 * INPUT + STATISTICS) * 8 / 1e6:5.2f} MB   {8 * 6 * LINEAR / 1e6:4.0f} MFLOP",
                      f"full       {INPUT * 8 / 1e6:5.2f} MB   {8 * 8 * LINEAR / 1e6:4.0f} MFLOP",
                      "All gradients are equal to the bit."]),
    ("fp8", 1, ["E4M3 for all, one scale", "Both recipes avoid this"]),
    ("fp8_kernels", 1, ["scales of tiles: [[1.0, 2.0, 4.0], [0.5, 1.0, 2.0]]",  # of 256 x 384: 2 x 3 tiles
                        "scales []          data x scales is x\n", "scales []          data x scales is x^T\n",
                        "scales [256, 3]    data x scales is x\n", "scales [384, 2]    data x scales is x^T\n",
                        "scales [2, 3]      data x scales is x\n", "scales [3, 2]      data x scales is x^T\n"]),
    ("operations", 1, [f"RMSNorm{4 / 256:17.2f}{2 * 4 + 4 / 256:27.2f}",  # 4 / 256: 1 / r of each row, in fp32
                       f"SwiGLU{0:18.2f}{2:27.2f}"]),
    ("kernels", 1, [f"{8 * (512 + 512 + 512) * 4 / 1e3:16.1f}"  # SwiGLU reads gate and up, and writes the result;
                    f"{8 * 5 * 512 * 4 / 1e3:16.1f}\n"]),  # torch also writes and reads silu(gate)
    ("flash", 1, ["■ · · · · · · ·        ■ · · · · · · ·        ■ · · · · · · ·",
                  "■ ■ ■ ■ ■ ■ ■ ■        · · · · ■ ■ ■ ■        · · · · · ■ ■ ■",
                  "Of 64 tiles 36, 20 and 21 are computed"]),
    ("sdpa", 1, [*(f"{dtype:10s}128  causal      flash_for_cpu     flash_for_cpu" for dtype in ("float32", "float64")),
                 "Relative difference: ", "With its own o and lse in place of the merged ones, dk"]),
    ("model", 1, [f"The tiny Llama, {2 * 257 * 128 + 4 * (128 * (2 * 128 + 2 * 64 + 3 * 352) + 2 * 128) + 128:,} ",
                  "guessing ln 257 = 5.549"]),
    ("mla", 1, ["128 heads     576 numbers", " 32 heads   8,192 numbers"]),  # 512 + 64; 2 x 32 x 128
    ("muon", 1, ["each shard of 2 ranks orthogonalised alone: 71% off",  # and the figure of muon.py
                 "w2: rows 0 to 3 on rank 0. Rank 0 owns it; 0 elements are sent",
                 "w3: rows 0 to 1 on rank 0 and rows 2 to 3 on rank 1. Rank 1 owns it; 16 elements are sent"]),
    ("diloco", 4, [*(f"{name:20s}{2 * 3 * 64 * 8 // 4 * times:20,d}" for name, times in (  # 64 weights in fp64
        ("data parallelism", 64), ("DiLoCo, H = 1", 64), ("DiLoCo, H = 4", 16), ("DiLoCo, H = 16", 4))),
        "fragment 0    . b . e . . . . . . . . . b . e .", "fragment 2    . . . . . . . . . b . e . .",  # after 12 more
        "fp32    4.00 bytes per element, relative error 0.0000", "bf16    2.00", f"int8    {1 + 4 / 128:.2f}"]),
    ("optimizers", 1, ["adamw   2 moments", "sgd     0 moments", "changes x by 0.0", "less than 1e-14: True",
                       "32,768, 16,384, 16,384, 32,768, 32,768, 65,536"]),
    ("core.param", 1, ["tp rank 1 has the box [3:6, 0:4]", "wq[4:5, 2:4], which are elements 6:8\n",  # its figure
                       "wq[5:6, 0:4], which are elements 8:12\n", "equal to the tensor of one process: True"]),
    ("core.groups", 1, ["pp         5, 13  ", "dp         1, 3, 5, 7  ", "tp         4, 5  ", "ep         4, 5, 6, 7  ",
                        "edp        1, 5  ", "data, dp            gradients\n", "2 links: one per direction"]),
    ("core.collectives", 2, [  # x is 1 2 on rank 0, and 10 20 on rank 1
        f"{name:26s}{first:20s}{second:20s}{nbytes:3d}\n" for name, first, second, nbytes in (
            ("all_reduce", "[11, 22]", "[11, 22]", 8), ("reduce_scatter", "[11]", "[22]", 4),
            ("all_gather", "[1, 2, 10, 20]", "[1, 2, 10, 20]", 8), ("all_to_all", "[1, 10]", "[2, 20]", 4),
            ("shift", "[10, 20]", "[1, 2]", 8), ("Identity__AllReduce", "[11, 11]", "[11, 11]", 8),
            ("AllReduce__Identity", "[1, 1]", "[1, 1]", 0), ("AllGather__ReduceScatter", "[11, 11]", "[11, 11]", 8),
            ("AllToAll__AllToAll", "[1, 10]", "[1, 10]", 4))]),
]


def printed(file: str) -> str:
    demo = importlib.import_module(file).demo
    arguments = [grids.everyone()] * demo.__code__.co_argcount
    with contextlib.redirect_stdout(io.StringIO()) as text:
        demo(*arguments)
    return text.getvalue()


@pytest.mark.parametrize("file, ranks, shown", SHOWN)
def test_a_demo_shows_what_its_file_claims(pool, file, ranks, shown):
    first, *others = pool.run(ranks, printed, file=file) if ranks > 1 else [printed(file)]
    assert all(words in first for words in shown), first
    assert not any(others)
    assert all(float(error) < 1e-14 for error in re.findall("Relative difference: (.*)", first)), first


def parameters_at_tp_2() -> dict[str, tuple[str, str, str]]:
    """What train.py builds on this rank with its defaults: name -> (global shape, how tp shards it, local shape)."""
    settings = rules.parse("--tp 2 --device cpu --dtype fp32".split(), 2)
    model = train.build_model(settings, build_groups(settings.grid, settings.model), "cpu")
    return {p.spec.name: (str(p.spec.shape), str(p.spec.along["tp"]), str(tuple(p.shape))) for p in model.parameters()}


def test_the_demo_of_the_model_shows_what_two_ranks_build(pool):
    """One process says what two real ranks have. Norms see other tokens on each rank, so their gradients are terms."""
    rows = re.findall(r"^ {8}(\S+) +(\(.*?\)) +tp: (\w+) +rank 0 has (\(.*\))$", printed("model"), re.MULTILINE)
    built, _ = pool.run(2, parameters_at_tp_2)
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: found for name, found in built.items() if re.match(r"(?!layers\.)|layers\.0\.", name)}
    norms = [how for name, _, how, _ in rows if "norm" in name]
    assert norms == ["partial"] * 3 and len(rows) == 12
