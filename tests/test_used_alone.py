"""Files that are used without the command line refuse by themselves what it refuses, if values would be wrong."""
import re
from functools import partial

import grids
import pytest
import torch
from sharding import Unit

import ep
import mla
import sdpa
import train
from core import config, rules
from core.collectives import ALONE
from core.groups import members_of_axes
from core.param import Spec, parameter
from diloco import Outer
from operations import CAUSAL
from run import dryrun
from zero import Optimizer


def optimizer(**settings) -> Optimizer:
    """On two ranks, which are replicas."""
    with dryrun.fake_world(2, 0):
        groups = grids.NO_GROUPS | {"replicate": grids.everyone()}
        return Optimizer({0: [Unit(Spec("w", (4, 4)))]}, groups, **dict(level=1) | settings)


def axes(kv_heads: int = 8, **grid) -> dict:
    """Of 8 ranks."""
    model = config.Model(heads=24, kv_heads=kv_heads, experts=6)
    return members_of_axes(config.Grid(**dict(dp=1) | grid), model, 8)


def router(over: str = "sequence", **model) -> ep.Router:
    return ep.Router("router", torch.zeros(8, 4), config.Model(experts=8, **model), ep.Balance(over=over))


def latents(**model) -> mla.LatentAttention:
    settings = config.Model(**dict(head_dim=10, kv_heads=4, kv_lora_rank=8, rope_head_dim=4) | model)
    return mla.LatentAttention(0, settings, partial(parameter, groups={}, dtype=torch.float32), {}, 0.02, 0.02)


def attention(kv_heads: int, back: bool = False) -> tuple:
    q, kv = torch.zeros(1, 4, 6, 8), torch.zeros(1, kv_heads, 6, 8)
    if back:
        return sdpa.sdpa_backward(q, q, kv, kv, q, q[..., 0], CAUSAL)
    return sdpa.sdpa_forward(q, kv, kv, CAUSAL)


def outer(**settings) -> Outer:
    return Outer([], ALONE, **dict(every=6) | settings)


def rate(lr_schedule: str) -> float:
    return train.learning_rate(5, config.Optim(lr=1.0, min_lr=0.1, warmup=0, lr_schedule=lr_schedule))


HEADS = "--heads 24 --head-dim 4 --kv-heads"
EXPERTS = "--experts 8 --expert-groups 4 --top-groups 2"
LATENT = "--kv-lora-rank 8 --kv-heads 4 --head-dim 10 --rope-head-dim"
CASES = [  # ranks and flags, which the command line refuses; what is called in the same way; it says; what it takes
    (4, "--dp-replicate 2", optimizer, dict(level=0), "ZeRO level 0 has no shards to replicate", dict(level=1)),
    (1, "--zero 4", optimizer, dict(level=4), "ZeRO level 4: must be 0, 1, 2 or 3", dict(level=3)),
    (1, "--betas 0.9,1", optimizer, dict(betas=(0.9, 1.0)), "betas (0.9, 1.0): must be ", dict(betas=(0.0, 0.99))),
    (1, "--moments-dtype bf16 --betas 0.9,0.999", optimizer, dict(moments_dtype=torch.bfloat16, betas=(0.9, 0.999)),
     "betas (0.9, 0.999): with moments in bf16 ", dict(moments_dtype=torch.bfloat16, betas=(0.9, 0.99))),
    (1, "--grad-clip -1", optimizer, dict(clip=-1.0), "clip -1.0, weight_decay 0.1: must be 0 (none)", dict(clip=0.0)),
    (1, "--weight-decay -1", optimizer, dict(weight_decay=-1.0), "clip 1.0, weight_decay -1.0: ", dict(weight_decay=0)),
    *((2, f"--sites 2 --steps 6 --sync-every 6 {flags}", outer, wrong, says, right) for flags, wrong, says, right in (
        ("--sync-fragments 4", dict(fragments=4), "every 6: must be a multiple of fragments 4", dict(fragments=3)),
        ("--sync-fragments 2 --sync-overlap 3", dict(fragments=2, overlap=3),
         "overlap 3: must be below every 6 / fragments 2, ", dict(fragments=2, overlap=2)),
        ("--sync-dtype fp8", dict(dtype="fp8"), "dtype fp8: must be one of fp32, bf16, int8", dict(dtype="int8")))),
    (8, f"{HEADS} 8 --dp 2 --tp 2", axes, dict(dp=2, tp=2),
     "the array [pp, replicate, shard, cp, tp] numbers 4 ranks, and there are 8: ", dict(dp=4, tp=2)),
    (8, f"{HEADS} 8 --dp 4 --tp 4", axes, dict(dp=4, tp=4),
     "the array [pp, replicate, shard, cp, tp] numbers 16 ranks", dict(dp=2, tp=4)),
    (8, "--zero 1 --dp-replicate 3", axes, dict(dp=8, dp_replicate=3),
     "the array [pp, replicate, shard, cp, tp] numbers 6 ranks", dict(dp=8, dp_replicate=2)),
    (8, f"{HEADS} 8 --cp 8 --cp-ulysses 3", axes, dict(cp=8, cp_ulysses=3),
     "the array [others, cp_keys, cp_heads, tp] numbers 6 ranks", dict(cp=8, cp_ulysses=4)),
    (8, f"{HEADS} 3 --tp 8", axes, dict(tp=8, kv_heads=3), "the array [others, kv, kv_copy] numbers 6 ranks",
     dict(tp=8, kv_heads=4)),
    (8, "--experts 6 --ep 3", axes, dict(dp=8, ep=3), "the array [others, edp, ep] numbers 6 ranks",
     dict(dp=8, ep=2)),
    *((1, "--heads 4 --kv-heads 3", attention, dict(kv_heads=3, back=back), "3 key heads do not divide 4 query heads",
       dict(kv_heads=2, back=back)) for back in (False, True)),
    (1, f"{EXPERTS} --top-k 5", router, dict(expert_groups=4, top_groups=2, top_k=5),
     "top_k 5: top_groups have only 4 experts", dict(expert_groups=4, top_groups=2, top_k=4)),
    (1, "--experts 8 --router relu", router, dict(router="relu"), "router relu: must be ", dict(router="sigmoid")),
    (1, "--experts 8 --aux-over step", router, dict(over="step"), "over step: must be ", dict(over="micro-batch")),
    *((1, f"{LATENT} {r}", latents, dict(rope_head_dim=r), f"rope_head_dim {r}: must be even", dict(rope_head_dim=8))
      for r in (0, 3, 10)),
    *((1, f"{LATENT} 4 --{name.replace('_', '-')}", latents, {name: True}, "qk_norm and qkv_bias: ", {})
      for name in ("qk_norm", "qkv_bias")),
    (1, "--lr-schedule linear", rate, dict(lr_schedule="linear"), "--lr-schedule linear: ", dict(lr_schedule="wsd"))]


@pytest.mark.parametrize("ranks, flags, call, refused, says, taken", CASES, ids=[f"{case[1]}" for case in CASES])
def test_what_the_command_line_refuses_is_refused_without_it(ranks, flags, call, refused, says, taken):
    with pytest.raises(ValueError):
        rules.parse(flags.split(), ranks)
    with pytest.raises(ValueError, match="^" + re.escape(says)) as caught:
        call(**refused)
    assert "\n" not in str(caught.value)
    call(**taken)


def two_replicas(level: int) -> list[float]:
    """What gradients of 1 and 2 on two replicas make on this rank."""
    group = grids.everyone()
    unit = Unit(Spec("w", (4, 4)))
    optimizer = Optimizer({0: [unit]}, grids.NO_GROUPS | {"world": group, "replicate": group}, level=level)
    optimizer.begin_step(1)
    (unit.weights[0] * (group.rank + 1.0)).sum().backward()
    optimizer.finish_step()
    return optimizer.buckets[0].grad_shard.unique().tolist()


def test_replicas_have_the_sum_of_their_gradients(pool):
    assert pool.run(2, two_replicas, level=1) == [[3.0], [3.0]]
