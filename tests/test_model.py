"""The model: published totals, and the equalities that masks and formulas promise."""
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import transformers
from grids import NO_GROUPS
from reference import Rounding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from watch import Watch

import train
from core import config, rules
from core.param import draw
from mla import latent_attention
from model import Execution, Llama
from operations import Mask, rotary_angles
from plan.costs import flops_by_convention, flops_per_token, fp8_elements, parameters, visible_keys
from plan.machines import peak_flops
from run.generate import KVCache
from run.huggingface import config_of
from run.meter import Meter
from zero import Optimizer


def architecture(flags: str) -> config.Model:
    return rules.parse(f"--data {__file__} {flags}".split()).model


def filled(model: config.Model, dtype=torch.float64, **execution) -> Llama:
    llama = Llama(model, NO_GROUPS, Execution(dtype, **execution))
    optimizer = Optimizer(llama.units(), NO_GROUPS)
    optimizer.load(wide)
    optimizer.begin_step(1)
    return llama


def wide(spec, box):
    """First values with ten times the usual spread: outputs of order one, so that small differences are seen."""
    values = draw(0)(spec, box)
    return values * 10 if spec.mean == 0 else values


LATENT = " --kv-heads 6 --kv-lora-rank 14 --q-lora-rank 20 --rope-head-dim 4 --v-head-dim 7"
SMALL = "--layers 2 --hidden 48 --heads 6 --kv-heads 3 --head-dim 10 --ffn 56 --vocab 61"


def test_first_weights_are_those_of_gpt_2():
    """0.02, and less where layers write to the residual stream: by the root of twice the layers of all stages."""
    flags, seen = "--layers 8 --hidden 64 --heads 6 --head-dim 16 --ffn 96 --pp 2 --schedule 1f1b", set()
    for more in "--qkv-bias --qk-norm --out-bias --ffn-bias", "--experts 4 --expert-ffn 24 --shared-experts 1", LATENT:
        settings = rules.parse(f"--data {__file__} {flags} {more}".split(), 2)
        for stage in range(2):
            group = SimpleNamespace(size=2, rank=stage)
            for p in Llama(settings.model, {}, stages=train.own_stages(settings, group)).parameters():
                kind, values = p.spec.name.rsplit(".")[-1], draw(0)(p.spec, p.box)
                seen.add(kind)
                if p.ndim == 1:
                    assert (values == (1 if "norm" in kind else 0)).all()
                else:
                    std = 0.02 / 16 ** 0.5 if kind in ("wo", "w_down") else 0.02
                    assert values.std().item() == pytest.approx(std, rel=0.05 if kind != "router" else 0.2), kind
    assert {"embedding", "head", "norm", "wq", "wo", "bq", "bo", "w_down", "b_down"} <= seen


# Exact totals, each found in the model's repository or index file (and equal to a formula over its configuration).
TOTALS = {  # preset, and other flags
    "llama-2-7b": 6738415616, "llama-2-13b": 13015864320, "llama-2-70b": 68976648192,
    "llama-3.1-8b": 8030261248, "llama-3.1-70b": 70553706496, "llama-3.1-405b": 405853388800,
    "llama-3.1-405b --kv-heads 16": 410081247232,  # as first uploaded
    "llama-3.2-1b": 1235814400, "llama-3.2-3b": 3212749824,
    "smollm-135m": 134515008, "smollm-360m": 361821120, "smollm-1.7b": 1711376384,
    "smollm-1.7b --layers 36 --heads 16 --kv-heads 4 --ffn 11008 --vocab 128256": 3075098624,  # SmolLM3-3B
    "qwen2.5-0.5b": 494032768, "qwen3-0.6b": 596049920, "qwen3-8b": 8190735360, "qwen3-32b": 32762123264,
    "mixtral-8x7b": 46702792704, "qwen3-30b-a3b": 30532122624,
    "deepseek-v3": 671026419200 - 58 * 256, "kimi-k2": 1026408232448 - 60 * 384,  # less routers' biases
}
ACTIVE = {"mixtral-8x7b": 12879925248, "qwen3-30b-a3b": 3353032704,  # "13B", "A3B"
          "deepseek-v3": 37552282624, "kimi-k2": 32861477888}  # "37B", "32B"


@pytest.mark.parametrize("flags", TOTALS)
def test_parameter_totals_are_the_published_ones(flags):
    """Active ones are those of the chosen experts."""
    found = parameters(architecture(f"--preset {flags}"))
    assert (found.total, found.active) == (TOTALS[flags], ACTIVE.get(flags, TOTALS[flags]))


@pytest.mark.parametrize("preset", ["llama-2-7b", "llama-3.1-8b", "llama-3.2-1b"])
def test_rotary_angles_of_20000_places_are_those_of_transformers(preset):
    """In fp32, also in runs in bf16, in which the last ones would be off by 2. (Of norms and losses
    tests/test_operations.py says it.)"""
    model = architecture(f"--preset {preset}")
    places = torch.arange(20000)
    cos, sin = rotary_angles(places, model, torch.bfloat16)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**config_of(model, "LlamaForCausalLM")))
    for ours, want in zip((cos, sin), theirs(torch.zeros(1), places[None])):
        assert ours.dtype == torch.float32
        assert (ours[:, 0] - want[0, :, :model.head_dim // 2]).abs().max() < 2e-3  # fp32 at angles of 20000 radians


@pytest.mark.parametrize("length", [8, 500, 131072, 10**7])
@pytest.mark.parametrize("kind, theta", [("llama3", 500.0), ("yarn", 500.0), ("yarn", 1e6), ("linear", 500.0)])
def test_scaled_angles_of_any_first_length_are_those_of_transformers(kind, theta, length):
    """The bounds of the pairs that are divided lie below the first pair, between pairs, and above the last one."""
    model = architecture(f"--head-dim 32 --rope-type {kind} --rope-scaling 4 --rope-theta {theta}" +
                         f" --original-seq-len {length}" * (kind != "linear"))
    places = torch.arange(50)
    config = transformers.LlamaConfig(**config_of(model, "LlamaForCausalLM"))
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), places[None])
    for ours, want in zip(rotary_angles(places, model, torch.float32), theirs):
        torch.testing.assert_close(ours[:, 0], want[0, :, :16], atol=1e-5, rtol=0)


# ---- masks ----------------------------------------------------------------------------------------------------------

def test_a_mask_is_of_the_kind_that_its_scores_show():
    sizes = [(rows, columns) for rows in range(1, 6) for columns in range(1, 6)]
    for (rows, columns), offset, window in product(sizes, range(4), range(10)):
        mask = Mask(window=window, offset=offset)
        seen, square = mask.visible(rows, columns, "cpu"), torch.ones(rows, columns, dtype=torch.bool)
        causal = rows == columns and torch.equal(seen, square.tril())
        want = "unmasked" if torch.equal(seen, square) else "causal" if causal else "general"
        assert mask.kind(rows, columns) == want, (rows, columns, mask)


@pytest.mark.parametrize("attention, flags, packed, count", [
    ("math", "", False, 1), ("math", " --window 5 --full-attention-every 2", False, 2), ("sdpa", "", False, 0),
    ("sdpa", "", True, 1), ("sdpa", " --window 5 --full-attention-every 2", False, 1)])
def test_a_mask_is_made_once_for_all_layers(attention, flags, packed, count):
    """For each window, if attention reads it; a mask for each layer would be saved until backward."""
    made, tokens = [], torch.arange(24).view(2, 12)
    llama = filled(architecture(SMALL + " --layers 4" + flags), attention=attention)
    with Watch(lambda function, *rest: "tril" in str(function) and made.append(function)):
        llama(tokens, documents=tokens // 5 if packed else None).sum().backward()
    assert len(made) == count


# ---- documents ------------------------------------------------------------------------------------------------------

def test_a_packed_batch_equals_separate_documents():
    llama, lengths = filled(architecture(SMALL)), (7, 1, 12, 4)
    documents = [torch.randint(61, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    packed = torch.cat(documents, 1)
    numbers = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    together = llama(packed, positions, numbers)
    apart = torch.cat([llama(document) for document in documents], 1)
    assert (together - apart).abs().max() < 1e-12
    assert (llama(packed) - apart).abs().max() > 0.1  # without the mask documents do see each other


def latents_of_a_layer(flags: str, dtype: torch.dtype) -> tuple:
    """(inputs, results and cached numbers of a layer of latent attention in a model; its weights, its settings)"""
    llama, seen, cache = filled(architecture(f"{SMALL}{LATENT} {flags}"), dtype), [], KVCache()
    attention = llama.blocks["1"].attention
    attention.register_forward_hook(lambda module, given, y: seen.append((given[0], y)))
    weights = {p.spec.name.removeprefix("layers.1.attention."): p.detach() for p in attention.parameters()}
    weights["kv_norm"].uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        llama(torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(0)), cache=cache)
    (x, y), = seen
    return x, y, torch.cat(cache.layers[1], -1)[0, :, 0], weights, llama.config


@pytest.mark.parametrize("more", [" --q-lora-rank 20", " --q-lora-rank 0",
                                  " --rope-type yarn --rope-scaling 4 --original-seq-len 50 --rope-mscale 0.7"])
def test_plain_latent_attention_computes_and_caches_what_the_layer_does(more):
    x, y, cached, weights, model = latents_of_a_layer(more, torch.float64)
    plain, plain_cached = latent_attention(x, weights, model)
    assert y.abs().max() > 0.1 and (plain - y).abs().max() < 1e-12
    assert (plain_cached - cached).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_in_16_bits_are_rounded_where_they_are_stored(dtype):
    """Cached is the plain version's in fp64, rounded after each matmul, and once more after norm and rotation, but for
    ties that fp32 sums decide. Results err as much as the plain version's so rounded, to a tenth and 3 / sqrt(n)."""
    x, y, cached, weights, model = latents_of_a_layer("", dtype)
    given = x.double(), {name: weight.double() for name, weight in weights.items()}, model
    exact, _ = latent_attention(*given)
    with Rounding(dtype):
        rounded, latents = latent_attention(*given)
    assert (cached == latents.to(dtype)).double().mean() > 0.97
    limit = 1.1 * (1 + 3 / y.numel()**0.5)
    assert (y - exact).norm() < limit * (rounded - exact).norm()


@pytest.mark.parametrize("window", [0, 1, 5, 12, 13, 40])
def test_visible_keys_are_those_of_a_drawn_mask(window):
    """But for the half key of the diagonal, as in 6 L q S; a window may be longer than the sequence."""
    i = torch.arange(12)
    seen = (i[:, None] >= i) & (not window or (i[:, None] - i < window))
    excess = visible_keys(architecture(f"{SMALL} --window {window}"), 0, 12) - seen.sum(-1).double().mean().item()
    assert excess == pytest.approx(-min(window or 12, 12) / 24)


# ---- costs ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("more", ["", " --tied", " --mtp", " --mtp --tied",
                                  " --experts 8 --top-k 3 --expert-ffn 72 --shared-experts 1 --dense-layers 1", LATENT,
                                  LATENT + " --q-lora-rank 0 --v-head-dim 16"])
def test_flops_equal_those_of_a_real_step(more):
    model = architecture("--layers 3 --hidden 96 --heads 6 --kv-heads 2 --ffn 200 --vocab 120" + more)
    llama = filled(model, dtype=torch.float32, attention="math")
    tokens = torch.randint(120, (4, 64))
    ahead = tokens if model.mtp else None
    with Meter() as meter:
        llama(tokens, labels=tokens, next_tokens=ahead, next_labels=ahead).sum().backward()
    assert meter.flops == pytest.approx(flops_per_token(model, 64) * tokens.numel(), rel=0.01)
    scores = 6 * model.blocks * 6 * (16 + model.value_dim) * 64  # L N (D + v) S; the causal convention counts half
    assert flops_per_token(model, 64) - flops_per_token(model, 64, causal=True) == scores / 2


def test_matrices_of_blocks_in_fp8_are_counted():
    """Not routers, norms and biases; of the middle one of three layers, or the first two, of which one is dense."""
    settings = rules.parse(f"{SMALL} --layers 3 --qk-norm --qkv-bias --out-bias --experts 4 --expert-ffn 20 "
                           "--shared-experts 2 --dense-layers 1".split())
    attention, dense, experts = 48 * 10 * (6 + 3 + 3 + 6), 3 * 48 * 56, (4 + 2) * 3 * 48 * 20
    assert fp8_elements(settings, range(3)) == 0
    settings.precision.fp8 = "tensorwise"
    assert fp8_elements(settings, range(2)) == 2 * attention + dense + experts
    settings.precision.fp8_ends = False
    assert fp8_elements(settings, range(3)) == attention + experts


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500),
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA L40S", 362),
    ("NVIDIA B300", 2250), ("NVIDIA GB300", 2500), ("AMD Instinct MI325X", 1307.4),
    ("AMD Instinct MI300X", 1307.4), ("NVIDIA L4", 121), ("NVIDIA A10", 125), ("NVIDIA GeForce RTX 5090", 209.5),
    ("Tesla V100-SXM2-16GB", None)])
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(name, peak):
    """Dense, in 16 bits; of a GPU that is not in the table none is assumed."""
    assert peak_flops(name) == (peak and peak * 1e12)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("more", ["", " --mtp", LATENT + " --mtp",
                                  " --experts 4 --expert-ffn 72 --shared-experts 1 --dense-layers 1 --mtp"])
def test_hfu_counts_what_a_real_step_recomputes(mode, more):
    """Exactly, in every block, also in that of multi-token prediction."""
    flags = "--layers 3 --hidden 96 --heads 6 --kv-heads 2 --ffn 200 --vocab 120 --seq-len 64 --attention math" + more
    settings = rules.parse(f"--data {__file__} --recompute {mode} {flags}".split())
    tokens = torch.randint(120, (4, 64))
    ahead, counted = tokens if settings.model.mtp else None, {}
    for recompute in ("none", mode):
        llama = filled(settings.model, dtype=torch.float32, attention="math", recompute=recompute)
        with Meter(memory=False) as meter:
            llama(tokens, labels=tokens, next_tokens=ahead, next_labels=ahead).sum().backward()
        counted[recompute] = meter.flops
    flops = flops_by_convention(settings)
    assert flops["hfu"] - flops["mfu"] == (counted[mode] - counted["none"]) / tokens.numel() > 0


@pytest.mark.parametrize("window", ["", " --window 128"])
def test_full_recomputation_repeats_at_most_the_forward(window):
    flops = flops_by_convention(rules.parse(f"--seq-len 4096 --recompute full{window}".split(), 1))
    assert 1.2 * flops["mfu"] < flops["hfu"] <= 4 / 3 * flops["mfu"]


def test_scores_that_are_in_memory_are_recomputed():
    """Selective recomputation repeats no matmul but those of the scores, if they are saved: a third of 12 L h S."""
    flags = "--preset llama-2-7b --seq-len 2048 --recompute selective --attention"
    flops = {way: flops_by_convention(rules.parse(f"{flags} {way}".split(), 1)) for way in ("auto", "math")}
    assert flops["auto"]["hfu"] == flops["auto"]["mfu"] == flops["math"]["mfu"]
    assert flops["math"]["hfu"] - flops["math"]["mfu"] == 4 * 32 * 4096 * 2048
