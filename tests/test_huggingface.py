"""Published models: transformers' folders are read as the same model, and transformers opens what is exported."""
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import grids
import numpy as np
import pytest
import runs
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from grids import NO_GROUPS
from program import ROOT
from transformers import modeling_rope_utils
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
from watch import is_killed, noted

from core import config, rules
from core.param import Box, Source, Spec, box_shape
from model import Execution, Llama
from run import cli, huggingface, job
from run.generate import sample
from run.huggingface import INDEX
from zero import Optimizer

SMALL = dict(vocab_size=61, hidden_size=48, intermediate_size=56, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=3, head_dim=10)
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama")
LLAMA3 = dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
WINDOW = dict(use_sliding_window=True, sliding_window=7)
LATENT = dict(num_key_value_heads=6, head_dim=4, q_lora_rank=20, kv_lora_rank=14, qk_nope_head_dim=8,
              qk_rope_head_dim=4, v_head_dim=7, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3,
              moe_intermediate_size=20, first_k_dense_replace=1,
              rope_parameters=dict(rope_type="default", rope_theta=500.0))
LINEAR, DYNAMIC, YARN, YARN_2 = (dict(rope_theta=5000.0, **rest) for rest in (
    dict(rope_type="linear", factor=3.0), dict(rope_type="dynamic", factor=3.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, attention_factor=1.25),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.5, mscale_all_dim=0.5)))
BIASES = dict(attention_bias=True, mlp_bias=True)
CASES = {
    "llama": ("Llama", dict(rope_parameters=LLAMA3, max_position_embeddings=16384)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=1e-3)),
    "mistral": ("Mistral", dict(sliding_window=7)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=3e5))),
    "qwen2 window": ("Qwen2", dict(WINDOW, max_window_layers=0)),
    "qwen3": ("Qwen3", {}),
    "qwen3 every second": ("Qwen3", dict(WINDOW, layer_types=["sliding_attention", "full_attention",
                                                              "sliding_attention"])),
    "mixtral": ("Mixtral", dict(num_local_experts=5, sliding_window=7)),
    "qwen3 moe": ("Qwen3Moe", dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)),
    "qwen3 moe, first layer dense": ("Qwen3Moe", dict(WINDOW, num_experts=4, moe_intermediate_size=20,
                                                      num_experts_per_tok=2, norm_topk_prob=True,
                                                      mlp_only_layers=[0])),
    "deepseek": ("DeepseekV3", LATENT),
    "deepseek, queries of the hidden state": ("DeepseekV3", LATENT | dict(
        q_lora_rank=None, v_head_dim=12, n_group=1, topk_group=1, first_k_dense_replace=0)),
    "llama, biases and linear": ("Llama", dict(BIASES, rope_parameters=LINEAR)),
    "llama, dynamic, beyond its first length": ("Llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=16)),
    "qwen3, biases and yarn": ("Qwen3", dict(attention_bias=True, rope_parameters=YARN)),
    "qwen3 moe, biases": ("Qwen3Moe", dict(num_experts=4, moe_intermediate_size=20, num_experts_per_tok=2,
                                           attention_bias=True, rope_parameters=YARN_2)),
    "smollm3": ("SmolLM3", dict(BIASES, no_rope_layer_interval=2)),
    "smollm3 every second": ("SmolLM3", dict(WINDOW, no_rope_layer_interval=3, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])),
    "deepseek, yarn": ("DeepseekV3", LATENT | dict(rope_parameters=YARN_2 | dict(mscale=1.0, mscale_all_dim=1.0))),
}
TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))


@cache
def of_transformers(case: str) -> transformers.PreTrainedModel:
    return made(case, {})


def made(case: str, changed: dict) -> transformers.PreTrainedModel:
    """A model with random weights that give logits of order one. changed: settings besides those of the case."""
    kind, settings = CASES[case]
    settings = getattr(transformers, kind + "Config")(
        **SMALL | settings | changed, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    theirs = getattr(transformers, kind + "ForCausalLM")(settings).eval()
    with torch.no_grad():
        for name, weight in theirs.state_dict().items():
            if "e_score_correction_bias" in name:
                weight.uniform_(-0.3, 0.3)
            elif weight.ndim == 1:
                weight.normal_(0.0 if "bias" in name else 1.0, 0.2)
    return theirs


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(case, size of a shard) -> the folder in which transformers has saved the model, once."""
    @cache
    def save(case: str, shard: str = "1GB") -> str:
        folder = str(tmp_path_factory.mktemp("published"))
        of_transformers(case).save_pretrained(folder, max_shard_size=shard)
        return folder
    return save


def read(folder: Path, settings) -> dict:
    """What is read of a folder whose config.json has these settings."""
    (folder / "config.json").write_text(json.dumps(settings))
    return huggingface.read_config(str(folder))


def filled(model: config.Model, source: Source) -> Llama:
    llama = Llama(model, NO_GROUPS, Execution(torch.float32))
    optimizer = Optimizer(llama.units(), NO_GROUPS)
    job.load_first(SimpleNamespace(model=llama, optimizer=optimizer), source)
    optimizer.begin_step(1)
    return llama


def loaded(folder: str) -> Llama:
    return filled(config.Model(**huggingface.read_config(folder)), huggingface.source_of(folder))


def specs_of(llama: Llama) -> list:
    return [param.spec for param in llama.parameters()] + [Spec(router.name, tuple(router.bias.shape))
                                                           for router in llama.routers]


def weights_of(llama: Llama) -> Source:
    weights = {param.spec.name: param.detach() for param in llama.parameters()}
    weights |= {router.name: router.bias for router in llama.routers}
    return lambda spec, box: weights[spec.name][box]


def export(llama: Llama, folder, **rest) -> None:
    huggingface.export(str(folder), llama.config, specs_of(llama), weights_of(llama), "fp32", **rest)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


# ---- in -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", CASES)
def test_a_published_model_gives_the_same_logits_here(case, published):
    want = logits(of_transformers(case))
    assert want.std() > 0.3
    for shard in ("1GB", "20KB"):
        got = logits(loaded(published(case, shard)))
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), shard


def tied_with_its_own_head(weights: dict) -> dict:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].flip(0).contiguous()}


def tied_with_a_copy(weights: dict) -> dict:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


def only_the_head(weights: dict) -> dict:
    return {name.replace("model.embed_tokens", "lm_head"): weight for name, weight in weights.items()}


def without_model(weights: dict) -> dict:
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def compiled(weights: dict) -> dict:
    return {"_orig_mod." + name: weight for name, weight in weights.items()}


def wrapped_by_layer(weights: dict) -> dict:
    return {name.replace(".self_attn.", "._orig_mod.self_attn."): weight for name, weight in weights.items()}


@pytest.mark.parametrize("case, changed, tied", [
    ("llama tied", tied_with_its_own_head, False), ("llama tied", tied_with_a_copy, True),
    ("llama tied", only_the_head, True), ("llama tied", without_model, True), ("mixtral", without_model, False),
    ("deepseek", compiled, False), ("qwen2", compiled, True), ("qwen3", wrapped_by_layer, False)])
def test_other_names_of_the_same_weights_are_known(case, changed, tied, published, tmp_path, capsys):
    """Those that transformers knows, too, give the logits of what it opens; it does not know names of wrappers."""
    shutil.copytree(published(case), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(changed(safetensors.torch.load_file(path)), path)
    wrapper = changed in (compiled, wrapped_by_layer)
    theirs = of_transformers(case) if wrapper else transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = cli.parse(f"--data {__file__} --vocab 257 --init-from {tmp_path}".split())
    assert settings.model.tied == tied
    said = f"train.py: warning: {tmp_path}: config.json ties embedding and head, but there are weights of both"
    assert (said in capsys.readouterr().err) == (changed is tied_with_its_own_head)
    want = logits(theirs)
    assert (logits(loaded(str(tmp_path))) - want).abs().max() < 1e-5 * want.abs().max()


def test_a_class_without_a_head_is_read_if_embedding_and_head_are_tied(published, tmp_path):
    for case in ("qwen2", "llama"):
        of_transformers(case).model.save_pretrained(tmp_path)
        model = config.Model(**huggingface.read_config(str(tmp_path)))
        if model.tied:
            assert torch.equal(logits(loaded(str(tmp_path))), logits(loaded(published(case))))
    with refused(f"{tmp_path}: has no tensor lm_head.weight, which the model asks for"):
        huggingface.check_weights(str(tmp_path), model, allow_mismatch=True)


@pytest.mark.parametrize("case, flag, name", [("llama tied", "--no-tied", "head"), ("llama", "--tied", "embedding")])
def test_embedding_and_head_begin_alike_if_a_flag_changes_whether_they_are_tied(case, flag, name, published):
    """If a flag ties those that are not, the head is a weight that the model does not use."""
    folder = published(case)
    line = f"--data {__file__} --vocab 61 --data-dtype uint16 --init-from {folder} {flag}".split()
    if flag == "--tied":
        with refused(f"{folder}: has lm_head.weight, which the model does not use: give --allow-mismatch"):
            cli.parse(line)
        line.append("--allow-mismatch")
    llama = filled(cli.parse(line).model, huggingface.source_of(folder))
    table = next(param for param in llama.parameters() if param.spec.name == name)
    assert torch.equal(table, of_transformers(case).model.embed_tokens.weight)


@pytest.mark.parametrize("case", [case for case in CASES if "experts" in str(CASES[case])])
def test_experts_that_transformers_has_saved_as_one_tensor_are_read(case, tmp_path):
    of_transformers(case).save_pretrained(tmp_path, save_original_format=False, max_shard_size="20KB")
    assert any(name.endswith("experts.gate_up_proj") for name in huggingface.weights_in(str(tmp_path)).files)
    model = cli.parse(f"--data {__file__} --vocab 257 --init-from {tmp_path}".split()).model
    assert model.experts == CASES[case][1].get("num_local_experts") or 8
    want = logits(of_transformers(case))
    assert (logits(loaded(str(tmp_path))) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("flags", ["--preset llama-3.2-1b", "--preset qwen2.5-0.5b", "--preset qwen3-8b", "--mtp",
                                   "--preset mixtral-8x7b", "--preset tiny-moe --dense-layers 2 --shared-experts 1",
                                   "--preset deepseek-v3 --layers 4 --experts 8 --top-k 2 --expert-groups 1 "
                                   "--top-groups 1", "--preset kimi-k2 --q-lora-rank 0 --layers 3 --experts 8"])
def test_the_names_of_a_model_are_those_that_it_builds(flags):
    """Without those of the block of multi-token prediction, which no published model of these classes names so."""
    model = rules.parse(f"--data {__file__} --layers 3 {flags}".split()).model
    with torch.device("meta"):
        llama = Llama(model, NO_GROUPS, Execution(device="meta"))
    built = {spec.name for spec in specs_of(llama) if not spec.name.startswith(f"layers.{model.layers}.")}
    assert set(huggingface.weights_of(model)) == built


@pytest.mark.parametrize("flags", ["--tp 2 --ep 2 --dtype bf16", "--pp 2"])
def test_latents_and_routers_biases_pass_through_a_grid_to_the_bit(pool, published, tmp_path, flags):
    """Biases in fp32, as transformers' are, although weights are in bf16: rounded, they would choose other experts."""
    np.save(tmp_path / "tokens.npy", np.arange(999, dtype=np.uint16) % 61)
    pool.run(2, runs.run, flags=f"--init-from {published('deepseek')} --data {tmp_path}/tokens.npy --steps 0 "
             f"--seq-len 24 --global-batch 4 --micro-batch 1 --sample-prompt= --checkpoint-dir {tmp_path}/run "
             f"--export-hf {tmp_path}/hf "
             f"{flags}")
    want, got = (safetensors.torch.load_file(Path(folder) / "model.safetensors")
                 for folder in (published("deepseek"), tmp_path / "hf"))
    assert want.keys() == got.keys()
    for name, tensor in got.items():
        dtype = torch.bfloat16 if "bf16" in flags and not name.endswith("e_score_correction_bias") else torch.float32
        assert tensor.dtype == dtype and torch.equal(tensor, want[name].to(dtype))


# Whose training is compared with transformers', and changes of its sizes, for grids of four ranks to divide.
TRAINED = ["llama, biases and linear", "llama, dynamic, beyond its first length", "qwen3, biases and yarn", "smollm3",
           "deepseek, yarn", "deepseek, queries of the hidden state"]
DIVISIBLE = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, first_k_dense_replace=1)
STEPS = 6


def by_transformers(case: str, folder: Path, monkeypatch) -> list[tuple[float, float]]:
    """Train by torch's AdamW in fp64, also norms, softmax, router and angles, which transformers computes in fp32.
    Returns loss and norm of each step; the folder has the first weights, and in "trained" the last."""
    theirs = made(case, DIVISIBLE | dict(num_key_value_heads=4) if "deepseek" in case else DIVISIBLE).double()
    theirs.set_experts_implementation("eager")  # the others have no fp64
    doubles = SimpleNamespace(**vars(torch) | dict(float32=torch.float64, float=torch.float64))
    monkeypatch.setattr(sys.modules[type(theirs).__module__], "torch", doubles)
    monkeypatch.setattr(modeling_rope_utils, "torch", doubles)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    theirs.save_pretrained(folder)
    matrices, vectors = ([p for p in theirs.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    other = torch.optim.AdamW([dict(params=matrices, weight_decay=0.3), dict(params=vectors, weight_decay=0.0)],
                              lr=2e-3, betas=(0.9, 0.95))
    out = []
    for step in range(STEPS):
        tokens = tokens_of_step(step)
        other.zero_grad()
        with monkeypatch.context() as patches:
            patches.setattr(torch.Tensor, "float", torch.Tensor.double)
            loss = F.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        out.append((loss.item(), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item()))
        other.step()
    theirs.save_pretrained(folder / "trained")
    return out


def tokens_of_step(step: int) -> torch.Tensor:
    return torch.randint(61, (4, 25), generator=torch.Generator().manual_seed(step))


def on_a_grid(folder: str, flags: str) -> tuple[list[tuple[float, float]], list[tuple]]:
    """Train the model in `folder` on this grid. Returns loss and norm of each step, and what a rank has of weights."""
    flags = (f"--data {__file__} --dtype fp64 --seq-len 24 --global-batch 4 --lr 0.002 --lr-schedule constant "
             f"--warmup 0 --grad-clip 0.5 --weight-decay 0.3 {flags}")
    settings = rules.parse(flags.split(), grids.everyone().size, huggingface.read_config(folder))
    groups, model, pipeline, optimizer = grids.build(settings, filled=False)
    job.load_first(SimpleNamespace(model=model, optimizer=optimizer), huggingface.source_of(folder))
    out = []
    for step in range(STEPS):
        tokens = tokens_of_step(step)
        loss = grids.forward_backward(settings, groups, model, pipeline, optimizer, tokens[:, :-1], tokens[:, 1:])
        out.append((loss.item(), optimizer.step(2e-3).item()))
    return out, grids.pieces(optimizer, "master")


def test_training_on_four_grids_is_that_of_transformers(pool, tmp_path, monkeypatch):
    """Losses and norms of six steps, and weights after the last: these to 1e-7 of a tensor's largest element, as AdamW
    divides small gradients by their own size."""
    want, cases = {}, []
    for number, case in enumerate(TRAINED):
        folder, moe = tmp_path / str(number), "deepseek" in case
        want[case] = by_transformers(case, folder, monkeypatch)
        for grid in ("--tp 4 --recompute full --ep 4", "--tp 2 --sp off --pp 2 --micro-batch 1 --schedule zb-h1 --ep 2",
                     "--cp 2 --zero 3 --ep 2", "--cp 2 --tp 2 --zero 1 --ep 4"):
            grid = f"{grid} --aux-loss 0" if moe else grid.partition(" --ep")[0]
            cases.append(dict(folder=str(folder), flags=grid))
    for number, ranks in enumerate(grids.for_each(pool, 4, on_a_grid, cases)):
        case, flags = TRAINED[number // 4], cases[number]["flags"]
        for steps, _ in ranks:
            for (loss, norm), (its_loss, its_norm) in zip(steps, want[case], strict=True):
                assert loss == pytest.approx(its_loss, rel=1e-9), (case, flags)
                assert norm == pytest.approx(its_norm, rel=1e-9), (case, flags)
        first, trained = (huggingface.source_of(cases[number]["folder"] + end) for end in ("", "/trained"))
        for name, weight in grids.whole([pieces for _, pieces in ranks]).items():
            spec, box = Spec(name, tuple(weight.shape)), tuple(slice(0, n) for n in weight.shape)
            its = trained(spec, box)
            # Without rotary embedding, a bias of keys adds the same to all scores of a query, and gets no gradient.
            moves = (case, name) != ("smollm3", "layers.1.attention.bk")
            assert its.dtype == torch.float64 and (not moves or (its - first(spec, box)).abs().max() > 1e-3), name
            assert (weight - its).abs().max() < 1e-7 * its.abs().max(), (case, flags, name)


@pytest.mark.parametrize("case", ["llama tied", "mixtral", "qwen3 moe, first layer dense", "deepseek"])
def test_a_box_reads_its_elements_and_no_others(case, published, monkeypatch):
    """Boxes over several experts, and over the boundary between w_gate and w_up in w_gate_up."""
    specs = [spec for spec in specs_of(loaded(published(case)))
             if huggingface.tensors_on_disk(spec, CASES[case][0] + "ForCausalLM")]
    reads, source = watched(published(case, "20KB"), monkeypatch)
    whole = {spec.name: source(spec, tuple(slice(0, n) for n in spec.shape)) for spec in specs}
    for spec, box in boxes_at_random(specs):
        reads.clear()
        got = source(spec, box)
        assert got.shape == box_shape(box) and torch.equal(got, whole[spec.name][box])
        assert sum(reads) == got.numel()


def watched(folder: str, monkeypatch) -> tuple[list[int], Source]:
    """The source of a folder, and a list to which the elements of each read are appended."""
    reads, opens = [], safetensors.safe_open

    class Slice:
        def __init__(self, stored):
            self.get_shape, self.get_dtype, self.stored = stored.get_shape, stored.get_dtype, stored

        def __getitem__(self, box):
            reads.append(self.stored[box].numel())
            return self.stored[box]

    source = huggingface.source_of(folder)
    monkeypatch.setattr(safetensors, "safe_open", lambda *args, **kwargs: SimpleNamespace(
        get_slice=lambda name: Slice(opens(*args, **kwargs).get_slice(name))))
    return reads, source


def boxes_at_random(specs: list[Spec]) -> Iterator[tuple[Spec, Box]]:
    generator = torch.Generator().manual_seed(0)
    for spec in specs:
        for _ in range(8):
            yield spec, tuple(slice(*sorted(torch.randint(n + 1, (2,), generator=generator).tolist()))
                              for n in spec.shape)


HUB = json.loads((ROOT / "tests" / "data" / "published.json").read_text())  # fields of config.json that are read here


@pytest.mark.parametrize("preset", HUB)
def test_published_settings_are_those_of_the_preset(preset, tmp_path):
    got = config.Model(**read(tmp_path, HUB[preset]))
    want = rules.parse(["--preset", preset, "--data", __file__]).model
    want.preset = got.preset
    assert got == want


@pytest.mark.parametrize("architecture", huggingface.ARCHITECTURES)
def test_settings_that_config_json_leaves_out_are_transformers_defaults(architecture, tmp_path):
    sizes = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    sizes |= dict(hidden_size=256, num_attention_heads=32)
    got = read(tmp_path, sizes | dict(architectures=[architecture]))
    theirs = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")(**sizes)
    assert got["head_dim"] == (getattr(theirs, "qk_head_dim", None) or getattr(theirs, "head_dim", None) or 8)
    assert got["rope_theta"] == theirs.rope_parameters["rope_theta"] and got["rope_scaling"] == 1
    assert got["window"] == (getattr(theirs, "sliding_window", None) or 0)
    assert got.get("expert_ffn") in (None, getattr(theirs, "moe_intermediate_size", theirs.intermediate_size))
    compared = [(name, field.ours) for name, field in huggingface.FIELDS.items()
                if field.ours in got.keys() - {"head_dim", "window", "expert_ffn"} and hasattr(theirs, name)]
    assert len(compared) >= 8
    for name, ours in compared:
        assert got[ours] == getattr(theirs, name), name


@pytest.mark.parametrize("architecture, layers, settings", [
    ("Qwen2", 28, WINDOW),  # by default the first 28 layers have none
    ("Qwen3", 4, dict(WINDOW, max_window_layers=4)),
    ("Qwen3", 4, dict(WINDOW, max_window_layers=0)),
    ("Qwen2", 4, dict(use_sliding_window=False, sliding_window=7, max_window_layers=0)),
    ("Qwen2", 4, dict(use_sliding_window=False, sliding_window=7, layer_types=["sliding_attention"] * 4)),
    *(("Qwen3", 5, dict(WINDOW, layer_types=[
        "full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(5)]))
      for every in (1, 2, 3, 5, 6)),
    ("Mistral", 3, dict(sliding_window=None)), ("Mistral", 3, dict(sliding_window=9)),
    ("Qwen3Moe", 3, dict(use_sliding_window=True, sliding_window=9)),
    ("Qwen3Moe", 3, dict(use_sliding_window=False, sliding_window=9))])
def test_the_layers_with_a_window_are_those_of_transformers(architecture, layers, settings, tmp_path):
    """And those of what is exported."""
    settings = SMALL | settings | dict(num_hidden_layers=layers)
    theirs = getattr(transformers, architecture + "Config")(**settings)
    model = config.Model(**read(tmp_path, settings | dict(architectures=[architecture + "ForCausalLM"])))
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * layers
    assert [model.window_of(layer) for layer in range(layers)] == [
        theirs.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in kinds]
    again = huggingface.model_fields(huggingface.config_of(model, architecture + "ForCausalLM"), "")
    assert config.Model(**again) == model


@pytest.mark.parametrize("changed", [dict(hidden_act="swish"), dict(partial_rotary_factor=1.0), dict(mlp_bias=False),
                                     dict(rope_scaling=dict(type="default")), dict(quantization_config=None),
                                     dict(rope_scaling=dict(type="yarn", factor=1.0), max_position_embeddings=64)])
def test_settings_that_change_nothing_are_accepted(changed, tmp_path):
    assert read(tmp_path, SMALL | LLAMA | changed) == read(tmp_path, SMALL | LLAMA)


FP8 = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
DEEPSEEK_V3 = dict(  # as published
    architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0, ep_size=1,
    first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, intermediate_size=18432, kv_lora_rank=512,
    max_position_embeddings=163840, model_type="deepseek_v3", moe_intermediate_size=2048, moe_layer_freq=1, n_group=8,
    n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8,
    num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128,
    qk_rope_head_dim=64, quantization_config=FP8, rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=2.5,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096, type="yarn"),
    scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", v_head_dim=128,
    vocab_size=129280)


def test_deepseek_v3_is_read_as_published(tmp_path):
    flags = ("--preset deepseek-v3 --rope-type yarn --rope-scaling 40 --original-seq-len 4096 --rope-mscale 1 "
             "--rope-attention-factor 1")
    want = rules.parse(flags.split()).model
    assert config.Model(**read(tmp_path, DEEPSEEK_V3) | dict(preset="deepseek-v3")) == want
    asked, written = DEEPSEEK_V3["rope_scaling"], huggingface.config_of(want, "DeepseekV3ForCausalLM")["rope_scaling"]
    assert written == asked | dict(rope_type="yarn") if "type" in written else written == {
        "rope_type" if name == "type" else name: value for name, value in asked.items()}


@pytest.mark.parametrize("layers, settings", [
    (9, {}), (3, {}), (8, dict(no_rope_layer_interval=3)), (3, dict(no_rope_layer_interval=1)),
    (4, dict(no_rope_layers=[1, 0, 1, 0])), (4, dict(no_rope_layers=[1, 1, 1, 1])),
    (4, dict(WINDOW, no_rope_layer_interval=1)),
    (4, dict(WINDOW, no_rope_layer_interval=2, layer_types=["sliding_attention", "full_attention"] * 2))])
def test_the_layers_without_rotary_embedding_are_those_of_transformers(layers, settings, tmp_path):
    settings = SMALL | settings | dict(num_hidden_layers=layers)
    theirs = transformers.SmolLM3Config(**settings)
    model = config.Model(**read(tmp_path, settings | SMOLLM3))
    assert [model.has_rope(layer) for layer in range(layers)] == list(map(bool, theirs.no_rope_layers))
    assert [model.window_of(layer) > 0 for layer in range(layers)] == [
        kind == "sliding_attention" for kind in theirs.layer_types]
    again = huggingface.model_fields(huggingface.config_of(model, "SmolLM3ForCausalLM"), "")
    assert config.Model(**again) == model


@pytest.mark.parametrize("settings, ours", [
    (dict(rope_scaling=dict(type="linear", factor=2)), dict(rope_type="linear", rope_scaling=2)),
    (dict(rope_parameters=dict(rope_type="linear", factor=2, rope_theta=7.0)),
     dict(rope_type="linear", rope_scaling=2, rope_theta=7.0)),
    (dict(rope_scaling=dict(type="yarn", factor=4.0), max_position_embeddings=99),
     dict(rope_type="yarn", rope_scaling=4.0, original_seq_len=99)),
    (dict(rope_scaling=dict(type="dynamic", factor=1.0), max_position_embeddings=99),
     dict(rope_type="dynamic", original_seq_len=99)),
    (dict(rope_scaling=LLAMA3 | dict(high_freq_factor=3.0)),
     dict(rope_scaling=8.0, rope_fast_turns=3.0, rope_theta=5000.0))])
def test_rotary_scaling_is_read_in_the_words_of_transformers_4_and_5(settings, ours, tmp_path):
    plain = config.Model(**read(tmp_path, SMALL | LLAMA))
    assert config.Model(**read(tmp_path, SMALL | LLAMA | settings)) == replace(plain, **ours)


def test_config_json_is_read_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB["qwen3-30b-a3b"]))
    code = (f"import sys; from run import huggingface; huggingface.read_config({str(tmp_path)!r}); "
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- what is refused ------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def refused(begins: str, says: str = ""):
    """The body is, with one line."""
    with pytest.raises(ValueError) as error:
        yield
    line = str(error.value)
    assert line.startswith(begins) and says in line and "\n" not in line


SMOLLM3 = dict(architectures=["SmolLM3ForCausalLM"], model_type="smollm3")
MOE = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=8, num_experts_per_tok=3)


@pytest.mark.parametrize("changed, message", [
    (dict(architectures=["GPT2LMHeadModel"]), "architectures ['GPT2LMHeadModel']: use one of LlamaForCausalLM"),
    (dict(architectures=None), "architectures None"),
    (dict(architectures=[["x"]]), "architectures [['x']]: use one of"),
    (dict(architectures=["Qwen2ForCausalLM", "Qwen3ForCausalLM"]), "architectures ['Qwen2ForCausalLM', 'Qwen3"),
    *((dict(rope_scaling=dict(type=kind, factor=2.0)), f'rope_type "{kind}": must be "default" or "llama3" or "linear"')
      for kind in ("longrope", "su", "mrope", "proportional")),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "max_position_embeddings null: must be a whole number ab"),
    (dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)), "max_position_embeddings null: must be a whole number"),
    (dict(rope_scaling=[1]), "rope_scaling [1]: must be an object or null"),
    (dict(rope_parameters=[1]), "rope_parameters [1]: must be an object or null"),
    (dict(rope_scaling=dict(rope_type="linear")), "factor null: must be a number above 0"),
    (dict(rope_scaling=LINEAR | dict(long_factor=[1.0])), "long_factor [1.0]: must be absent with rope_type linear"),
    (dict(rope_scaling=LINEAR | dict(mscale_all_dim=1.0)), "mscale_all_dim 1.0: must be absent with rope_type linear"),
    (dict(rope_scaling=YARN | dict(beta_slow=2.0)), "beta_slow 2.0: must be null or 1"),
    (dict(rope_scaling=YARN | dict(truncate=False)), "truncate false: must be true"),
    (dict(rope_scaling=YARN | dict(attention_factor=0.0)), "attention_factor 0.0: must be a number above 0"),
    (dict(rope_parameters=LLAMA3 | dict(low_freq_factor=2.0)), "low_freq_factor 2.0: must be 1.0"),
    (dict(SMOLLM3, no_rope_layers=[1, 0, 0]), "no_rope_layers [1, 0, 0]: must have 0 for every N-th layer, and 1 for"),
    (dict(SMOLLM3, no_rope_layers=[1, 0]), "no_rope_layers [1, 0]: must be a list of 0 or 1, one per layer"),
    *((dict(quantization_config=how), f"quantization_config {json.dumps(how)}: must be null, or FP8 with a weight_")
      for how in (dict(quant_method="gptq", weight_block_size=[128, 128]), dict(FP8, weight_block_size=None),
                  dict(FP8, fmt="e5m2"))),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor null: must be 1.0"),
    (dict(rope_parameters=LLAMA3 | dict(factor="8")), 'factor "8": must be a number above 0'),
    (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention"),
    (dict(rope_parameters=dict(sliding_attention=dict(rope_type="default"))), "sliding_attention"),
    (dict(WINDOW, max_window_layers=2), "sliding_window 7, but not in layers [0, 1]: must be in all"),
    (dict(WINDOW, num_hidden_layers=4, layer_types=["sliding_attention", *["full_attention"] * 2, "sliding_attention"]),
     "sliding_window 7, but not in layers [1, 2]: must be in all"),  # as many as every second
    (dict(WINDOW, layer_types=["sliding_attention"] * 2), "one per layer"),
    (dict(WINDOW, layer_types=["chunked_attention"] * 3), "must be full_attention or sliding_attention"),
    (dict(WINDOW, layer_types=[{}] * 3), "layer_types [{}, {}, {}]: must be "),
    (dict(MOE, mlp_only_layers=5), "mlp_only_layers 5: "),
    (dict(MOE, mlp_only_layers=[1]), "mlp_only_layers [1]: only the first layers can be dense"),
    *((changed, "") for changed in (
        dict(model_type="qwen3"), dict(num_hidden_layers=10**10), dict(hidden_act="gelu"), dict(attention_dropout=0.1),
        dict(router_jitter_noise=0.1), dict(attention_bias=True), dict(MOE, mlp_bias=True),
        dict(LLAMA, layer_types=["full_attention"] * 3), dict(quantization_config=dict(quant_method="fp8")),
        dict(partial_rotary_factor=0.5), dict(WINDOW, max_window_layers="x"), dict(hidden_size=None),
        dict(vocab_size="61"), dict(tie_word_embeddings=1), dict(rms_norm_eps=-1e-6), dict(rms_norm_eps=0),
        dict(rms_norm_eps=True), dict(MOE, decoder_sparse_step=2), dict(MOE, num_experts_per_tok=0),
        dict(vocab_size=2 * config.LARGEST), dict(rope_theta=math.inf)))])
def test_settings_that_are_not_implemented_are_refused_in_one_line(changed, message, tmp_path):
    """Without a message: by name and value of the last of them."""
    field, value = [*changed.items()][-1]
    message = message or f"{field} {json.dumps(value)}: must be "
    with refused(f"{tmp_path}/config.json: ", message):
        read(tmp_path, SMALL | dict(architectures=["Qwen2ForCausalLM"]) | changed)


@pytest.mark.parametrize("architecture", huggingface.ARCHITECTURES)
def test_values_that_transformers_refuses_are_refused(architecture):
    """Values of another kind. Unlike transformers, a number may be written as a whole number."""
    kind = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    reads = {name for name, field in huggingface.FIELDS.items() if field.if_unread} | set(
        huggingface.ARCHITECTURES[architecture].defaults)
    tried = 0
    for name in reads & set(vars(kind(**SMALL))):
        for value in (True, -1, 1.5, "1", [True], {}):
            try:
                kind(**SMALL | {name: value})
            except Exception:  # of several classes
                tried += 1
                with refused(f": {name} {json.dumps(value)}: "):
                    huggingface.model_fields(SMALL | dict(architectures=[architecture]) | {name: value}, "")
    assert tried >= 50


@pytest.mark.parametrize("content, message", [
    (None, "there is no such file"), ("{", "is not valid JSON"), ("[1]", "must be a JSON object"),
    ("[" * 100_000, "is not valid JSON: maximum recursion")])
def test_a_folder_without_a_sound_config_json_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for reads in (huggingface.read_config, huggingface.source_of):
        with refused(f"{tmp_path}/config.json: {message}"):
            reads(str(tmp_path))


def change(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


FIRST, SECOND = (f"model-0000{number}-of-00005.safetensors" for number in (1, 2))
EMBEDDINGS = "model.embed_tokens.weight"


def with_embeddings(folder, changed):
    weights = safetensors.torch.load_file(folder / FIRST)
    safetensors.torch.save_file(weights | {EMBEDDINGS: changed(weights[EMBEDDINGS])}, folder / FIRST)


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / INDEX).unlink(), f": has no model.safetensors and no {INDEX}: weights in another format"),
    (lambda folder: (folder / SECOND).unlink(), f"/{SECOND}: is missing"),
    (lambda folder: change(folder / INDEX, weight_map={"a": "../b"}), "names ../b, which is outside of its folder"),
    (lambda folder: change(folder / INDEX, weight_map={"a": 3}), "weight_map must be an object of tensors and files"),
    (lambda folder: change(folder / INDEX, weight_map={"a": "/b"}), "names /b, which is outside of its folder"),
    (lambda folder: os.truncate(folder / SECOND, 5000), f"/{SECOND}: cannot be read: "),
    (lambda folder: change(folder / INDEX, weight_map={EMBEDDINGS: SECOND}), f"/{SECOND}: cannot read {EMBEDDINGS}"),
    (lambda folder: change(folder / INDEX, weight_map={"norm.weight": SECOND, "model.norm.weight": SECOND}),
     ": has norm.weight and model.norm.weight, which are names of one weight"),
    (lambda folder: os.truncate(folder / INDEX, 100), "/model.safetensors.index.json: is not valid JSON"),
    (lambda folder: change(folder / "config.json", num_key_value_heads=6),
     "model.layers.0.self_attn.k_proj.weight has the shape (30, 48), the model asks for (60, 48)"),
    (lambda folder: with_embeddings(folder, lambda weight: weight.to(torch.float8_e4m3fn)),
     f"/{FIRST}: {EMBEDDINGS} is F8_E4M3: use a model that is not"),
    (lambda folder: with_embeddings(folder, lambda weight: weight.index_fill(0, torch.tensor(60), -math.inf)),
     f"/{FIRST}: {EMBEDDINGS} has values that are not"),
    (lambda folder: change(folder / "config.json", num_hidden_layers=4), ": has no tensor model.layers.3."),
    (lambda folder: (folder / "model.safetensors").touch(), "/model.safetensors: cannot be read: ")])  # it comes first
def test_damaged_weights_are_refused_in_one_line(damage, message, published, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(published("mistral", "50KB"), folder)
    damage(folder)
    with refused(str(folder), message):
        loaded(str(folder))


def quantised(folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Write the matrices of the layers in `folder`, but for the routers', as DeepSeek-V3's are. Returns all weights by
    transformers' own dequantisation."""
    path, rows, columns = folder / "model.safetensors", *block
    weights, whole = safetensors.torch.load_file(path), {}
    for name, weight in [*weights.items()]:
        whole[name] = weight
        if weight.ndim == 2 and ".layers." in name and "mlp.gate." not in name:
            grid = -(-len(weight) // rows), -(-weight.shape[1] // columns)
            padded = F.pad(weight, (0, grid[1] * columns - weight.shape[1], 0, grid[0] * rows - len(weight)))
            blocks = padded.view(grid[0], rows, grid[1], columns)
            scales = blocks.abs().amax((1, 3)) / 448
            stored = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
            weights[name] = stored[:len(weight), :weight.shape[1]].contiguous()
            weights[name + "_scale_inv"] = scales
            restored = Fp8Dequantize(None)._dequantize_one(stored, scales)
            whole[name] = restored[:len(weight), :weight.shape[1]].contiguous()
    safetensors.torch.save_file(weights, path, metadata=dict(format="pt"))
    change(folder / "config.json", quantization_config=FP8 | dict(weight_block_size=[*block]))
    return whole


@pytest.mark.parametrize("block", [(4, 4), (5, 128)])
def test_weights_in_fp8_are_read_with_their_scales(block, published, tmp_path, monkeypatch):
    """Into the model that transformers makes of them; and of any box, whose edges need not be those of blocks, no more
    than its elements and the scales of its blocks."""
    folder, whole = tmp_path / "fp8", tmp_path / "whole"
    for copy in (folder, whole):
        shutil.copytree(published("deepseek"), copy)
    weights = quantised(folder, block)
    safetensors.torch.save_file(weights, whole / "model.safetensors", metadata=dict(format="pt"))
    llama = loaded(str(folder))
    assert huggingface.check_weights(str(folder), llama.config, allow_mismatch=False) == []
    want, got = logits(transformers.AutoModelForCausalLM.from_pretrained(whole)), logits(llama)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    assert (got - logits(of_transformers("deepseek"))).abs().max() > 1e-2  # FP8 is coarse
    plain = huggingface.source_of(str(whole))
    reads, source = watched(str(folder), monkeypatch)
    for spec, box in boxes_at_random(specs_of(llama)):
        want, blocks = plain(spec, box), 2 * math.prod(s.stop - s.start for s in box[:-2])  # 2: of gate and up
        for s, size in zip(box[-2:], block):
            blocks *= (s.stop - s.start + size - 2) // size + 1
        reads.clear()
        assert torch.equal(source(spec, box), want) and sum(reads) <= want.numel() + blocks, spec.name


def test_scales_of_another_shape_are_refused(published, tmp_path):
    folder, name = tmp_path / "fp8", "model.layers.0.mlp.down_proj.weight"
    shutil.copytree(published("deepseek"), folder)
    quantised(folder, (4, 4))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(weights | {name + "_scale_inv": torch.ones(12, 13)}, folder / "model.safetensors")
    with refused(f"{folder}/model.safetensors: {name}_scale_inv", "has the shape (12, 13), a scale for each block"):
        loaded(str(folder))
    weights.pop(name + "_scale_inv")
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    with refused(f"{folder}/model.safetensors: {name} is F8_E4M3: use a model that is not quantised"):
        loaded(str(folder))


def test_deepseeks_block_for_multi_token_prediction_is_left_out_and_not_taken_for_ours(published, tmp_path):
    """transformers leaves it out, too, or reads it behind the last norm, where ours is before it."""
    folder = tmp_path / "ahead"
    shutil.copytree(published("deepseek"), folder)
    path, ahead = folder / "model.safetensors", "model.layers.3."
    weights = safetensors.torch.load_file(path)
    block = {name.replace("model.layers.2.", ahead): weight.clone() for name, weight in weights.items()
             if ".layers.2." in name}
    block |= {ahead + name: torch.ones(4) for name in (
        "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
        "shared_head.head.weight")}
    safetensors.torch.save_file(weights | block, path, metadata=dict(format="pt"))
    model = config.Model(**huggingface.read_config(str(folder)))
    assert huggingface.check_weights(str(folder), model, allow_mismatch=False) == []
    assert torch.equal(logits(loaded(str(folder))), logits(loaded(published("deepseek"))))
    model.mtp = True
    with refused(str(folder), f"has {ahead}eh_proj.weight and {len(block) - 1} more tensors of a block for multi-"):
        huggingface.check_weights(str(folder), model, allow_mismatch=False)
    huggingface.check_weights(str(folder), model, allow_mismatch=True)


@pytest.mark.parametrize("case", CASES)
def test_weights_that_the_model_would_not_use_are_refused_unless_insisted_on(case, published, tmp_path):
    """Of whole folders all are used; of a folder with one more none of those that transformers computes is missed."""
    model = config.Model(**huggingface.read_config(published(case)))
    for shard in ("1GB", "20KB"):
        huggingface.check_weights(published(case, shard), model, allow_mismatch=False)
    folder, path = tmp_path / "more", tmp_path / "more" / "model.safetensors"
    shutil.copytree(published(case), folder)
    weights = safetensors.torch.load_file(path)
    weights |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # which nobody uses
    unknown = "self_attn.g_proj.weight" if model.out_bias else "self_attn.o_proj.bias"
    for layer, name in [(0, unknown), (0, "mlp.extra.weight"), (3, "input_layernorm.weight")]:
        more = {f"model.layers.{layer}.{name}": torch.ones(4), f"model.layers.{layer + 1}.zero.weight": torch.ones(4)}
        safetensors.torch.save_file(weights | more, path)
        says = (f"^{folder}: has {sorted(more)[0]} and 1 more tensors, which the model does not use: "
                "give --allow-mismatch")
        with pytest.raises(ValueError, match=says):
            cli.parse(["--data", __file__, "--vocab", "257", "--init-from", str(folder)])
        cli.parse(["--data", __file__, "--vocab", "257", "--init-from", str(folder), "--allow-mismatch"])
    with pytest.raises(ValueError, match=r"has model\.layers\.2\.\S+ and \d+ more tensors"):
        cli.parse(["--data", __file__, "--layers", "2", "--init-from", published(case)])


def test_what_is_missing_is_said_first_and_no_flag_is_advised_that_could_not_help(published, tmp_path):
    """Before torch is imported. What is left out by --allow-mismatch is named, too."""
    shutil.copytree(published("qwen3"), tmp_path, dirs_exist_ok=True)
    path, line = tmp_path / "model.safetensors", f"--data {__file__} --vocab 257 --init-from {tmp_path}".split()
    weights = safetensors.torch.load_file(path)
    more = weights | {"optimizer": torch.ones(4)}
    safetensors.torch.save_file(more, path)
    assert huggingface.check_weights(str(tmp_path), cli.parse([*line, "--allow-mismatch"]).model, True) == [
        f"{tmp_path}: has optimizer, which the model does not use"]
    first, last = "model.layers.0.self_attn.k_norm.weight", "model.layers.2.mlp.up_proj.weight"
    safetensors.torch.save_file({name: weight for name, weight in more.items() if name not in (first, last)}, path)
    code = ("import sys; from run import cli\ntry: cli.parse(sys.argv[1:])\nexcept ValueError as error: print(error)\n"
            "assert 'torch' not in sys.modules")
    for flags in ([], ["--allow-mismatch"]):
        done = subprocess.run([sys.executable, "-c", code, *line, *flags], cwd=ROOT, check=True, capture_output=True,
                              text=True)
        assert done.stdout == (f"{tmp_path}: has no tensor {first} and 1 more tensors, which the model asks for; has "
                               "optimizer, which the model does not use\n")


def test_a_weight_that_the_published_model_has_not_is_refused(published):
    model = config.Model(**huggingface.read_config(published("mixtral")) | dict(shared_experts=1))
    with pytest.raises(ValueError, match=r"layers\.0\.shared\.w_gate: MixtralForCausalLM has no such weight"):
        filled(model, huggingface.source_of(published("mixtral")))


# ---- out ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", CASES)
def test_transformers_opens_what_is_exported(case, published, tmp_path):
    llama, folder, stored = loaded(published(case)), tmp_path / "exported", {}
    for rank in (1, 0, 2):
        export(llama, folder, rank=rank, world=3, shard_bytes=30000)
    assert not [*folder.glob("*.tmp")]
    for path in folder.glob("*.safetensors"):
        assert safetensors.safe_open(path, framework="pt").metadata() == {"format": "pt"}
        stored |= safetensors.torch.load_file(path)
    total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    assert ("lm_head.weight" in stored) != llama.config.tied and total == sum(each.nbytes for each in stored.values())
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = of_transformers(case)
    assert type(again) is type(theirs) and again.dtype == torch.float32
    want, got = theirs.state_dict(), again.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(logits(again), logits(theirs))
    continued = again.generate(TOKENS, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert torch.equal(sample(llama, TOKENS, 20, temperature=0), continued)
    assert huggingface.read_config(str(folder)) == huggingface.read_config(published(case))


@pytest.mark.parametrize("dtype", huggingface.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_index_says_how_many_bytes_the_files_have(case, dtype, published, tmp_path):
    """As the headers of the files say it, in which each tensor has its dtype, its shape and its place; no file has more
    than it may have."""
    llama = loaded(published(case))
    huggingface.export(str(tmp_path), llama.config, specs_of(llama), weights_of(llama), dtype, shard_bytes=24000)
    sizes = []
    for path in tmp_path.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__")
            sizes.append(sum(stop - start for start, stop in (tensor["data_offsets"] for tensor in header.values())))
            assert sizes[-1] == path.stat().st_size - file.tell()
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == sum(sizes)
    assert len(sizes) > 1 and max(sizes) <= 24000


def test_each_rank_reads_and_writes_its_own_shards(published, tmp_path):
    llama, reads = loaded(published("mixtral")), [[], [], []]
    total = sum(param.numel() for param in llama.parameters())
    for rank, read in enumerate(reads):
        source = noted(read, weights_of(llama), lambda spec, box: math.prod(box_shape(box)))
        huggingface.export(str(tmp_path), llama.config, specs_of(llama), source, "bf16", rank=rank, world=3,
                           shard_bytes=20000)
    assert sum(map(sum, reads)) == total and min(map(sum, reads)) > 0.2 * total
    sizes = [sum(weight.nbytes for weight in safetensors.torch.load_file(file).values())
             for file in tmp_path.glob("*.safetensors")]
    assert sum(sizes) == 2 * total and max(sizes) <= 20000


def test_an_export_replaces_an_earlier_one_with_other_shards(published, tmp_path):
    folder = str(tmp_path)
    for case, shard_bytes in [("llama", 30000), ("llama tied", 10**9), ("qwen2", 50000), ("mistral", 30000)]:
        llama = loaded(published(case))
        export(llama, folder, shard_bytes=shard_bytes)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(logits(again), logits(of_transformers(case)))
        assert os.path.exists(f"{folder}/model.safetensors.index.json") == (shard_bytes < 10**9)


def test_a_killed_export_leaves_the_earlier_weights_or_none(published, tmp_path):
    """And not files of both, which have the same names."""
    llama = loaded(published("llama"))
    specs, first = specs_of(llama), weights_of(llama)
    sources = [first, lambda spec, box: 2 * first(spec, box)]
    for after in count():
        folder = str(tmp_path / str(after))
        write, rewrite = (partial(huggingface.export, folder, llama.config, specs, source, "fp32", shard_bytes=30000)
                          for source in sources)
        write()
        killed, found = is_killed(rewrite, folder, after), None
        with contextlib.suppress(ValueError):
            found = weights_of(loaded(folder))
        if not killed:
            break
        assert found is None or all(torch.equal(found(spec, ...), first(spec, ...)) for spec in specs)
    assert all(torch.equal(found(spec, ...), 2 * first(spec, ...)) for spec in specs)
    assert after > len(os.listdir(folder))


def test_a_file_is_as_full_as_it_may_be(published):
    """The first tensor of the next file would be too much for it."""
    shards = huggingface.plan_shards(specs_of(loaded(published("llama"))), "LlamaForCausalLM", torch.float32, 30000)
    sizes = [[4 * math.prod(box_shape(box)) for _, box in shard.values()] for shard in shards.values()]
    assert len(sizes) > 3 and all(sum(size) <= 30000 for size in sizes)
    assert all(sum(size) + first > 30000 for size, (first, *_) in pairwise(sizes))


def test_special_tokens_are_those_that_are_given_and_settings_of_generation_the_published_ones(published, tmp_path):
    """The longest sequence is the longer one of the published and the trained."""
    llama, given, folder = loaded(published("llama")), tmp_path / "given", tmp_path / "out"
    given.mkdir()
    for name, content in (("config", dict(bos_token_id=1, eos_token_id=9, max_position_embeddings=777)),
                          ("generation_config", dict(eos_token_id=[9, 8], temperature=0.25, do_sample=True))):
        (given / f"{name}.json").write_text(json.dumps(content))
    assert huggingface.published_tokens(str(given)) == dict(bos_token_id=[1], eos_token_id=[9, 8], pad_token_id=[])
    tokens = dict(bos_token_id=0, eos_token_id=[2, 3])
    for from_folder, seq, longest, temperature in [(str(given), 99, 777, 0.25), (str(given), 999, 999, 0.25),
                                                   ("", 99, 99, 1.0)]:
        export(llama, folder, seq=seq, published=from_folder, tokens=tokens)
        settings = transformers.AutoConfig.from_pretrained(folder)
        assert settings.max_position_embeddings == longest
        for each in (settings, transformers.GenerationConfig.from_pretrained(folder)):
            assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (0, [2, 3], None)
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert (generation.temperature or 1.0) == temperature
    export(llama, folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    settings = transformers.AutoConfig.from_pretrained(folder)
    assert (settings.bos_token_id, settings.eos_token_id) == (None, None)
    with pytest.raises(ValueError, match=f"{tmp_path}/none: there is no such folder"):
        export(llama, folder, published=str(tmp_path / "none"))


def tokenizer_in(folder: Path) -> dict[str, str]:
    """Write every file that transformers reads for a tokenizer, with its name as its content, and other files; return
    the contents of the former."""
    from transformers import tokenization_utils_base as base
    names = [base.SPECIAL_TOKENS_MAP_FILE, base.ADDED_TOKENS_FILE, base.TOKENIZER_CONFIG_FILE, base.FULL_TOKENIZER_FILE,
             base.CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, "tokenizer.model", "vocab.json",
             "merges.txt", f"{base.CHAT_TEMPLATE_DIR}/tool_use.jinja"]
    (folder / base.CHAT_TEMPLATE_DIR).mkdir(parents=True)
    for name in (*names, "model-00001-of-00002.safetensors", "README.md", "mine.json", "chat_template.jinja.tmp"):
        (folder / name).write_text(name)
    return {name: name for name in names}


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_tokenizer_is_copied_with_every_file_that_transformers_reads_and_nothing_else(tmp_path):
    """Over other files, and to where it is. Files beside tokenizer.json belong to it, not to a file of another name."""
    given, copied, alone = (tmp_path / name for name in ("given", "copied", "alone"))
    published = tokenizer_in(given)
    for folder in (copied, alone):
        folder.mkdir()
    (copied / "vocab.json").write_text("of another tokenizer")
    before = contents(given)
    huggingface.copy_tokenizer(given / "tokenizer.json", given)
    assert contents(given) == before
    huggingface.copy_tokenizer(given / "tokenizer.json", copied)
    assert contents(copied) == published
    huggingface.copy_tokenizer(given / "mine.json", alone)
    assert contents(alone) == {"tokenizer.json": "mine.json"}
    (given / "tokenizer.json").unlink()
    huggingface.copy_tokenizer(given / "mine.json", copied)
    assert contents(copied) == published | {"tokenizer.json": "mine.json"}
    huggingface.copy_tokenizer(given / "mine.json", given)  # tokenizer.json is then a copy of it
    huggingface.copy_tokenizer(given / "mine.json", alone)
    assert contents(alone) == contents(copied)
    for file in (given, alone):
        (file / "tokenizer.json").unlink()
    huggingface.copy_tokenizer(given / "tokenizer.json", alone)  # as of older models, which have only a tokenizer.model
    assert contents(alone) == {name: name for name in published if name != "tokenizer.json"}


def test_a_killed_copy_of_a_tokenizer_has_no_half_file_and_no_tokenizer_json_without_the_others(tmp_path):
    published = tokenizer_in(tmp_path / "given")
    for after in count():
        folder = tmp_path / str(after)
        folder.mkdir()
        killed = is_killed(partial(huggingface.copy_tokenizer, tmp_path / "given" / "tokenizer.json", folder), folder,
                           after)
        found = {name: content for name, content in contents(folder).items() if not name.endswith(".tmp")}
        assert found == published if "tokenizer.json" in found else found.items() <= published.items()
        if not killed:
            break
    assert after >= len(published)


@pytest.mark.parametrize("flags, says", [
    ("--export-hf model --checkpoint-dir run --init-from model", "--export-hf model: is the folder of --init-from"),
    ("--export-hf hf", "--export-hf hf: needs --checkpoint-dir, whose last checkpoint is exported"),
    ("--export-hf hf --checkpoint-dir run --preset tiny-moe --router-bias-rate 0.01",
     "--export-hf with --router-bias-rate 0.01: this model's class of transformers has no biases"),
    ("--export-hf hf --checkpoint-dir run --preset tiny-moe --shared-experts 1",
     r"--export-hf hf: no class of transformers computes this model: MixtralForCausalLM has no --shared-experts 1 \(")])
def test_an_export_that_could_not_be_written_is_refused_before_the_run(flags, says, published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(published("llama"), "model")
    cli.parse(f"--data {__file__} --export-hf out --checkpoint-dir run --init-from model".split())
    with pytest.raises(ValueError, match=f"^{says}"):
        cli.parse(f"--data {__file__} {flags}".split())


@pytest.mark.parametrize("flags, architecture", [
    ("--preset llama-3.1-8b", "LlamaForCausalLM"), ("--preset tiny", "LlamaForCausalLM"),
    ("--heads 6 --head-dim 10", "MistralForCausalLM"),  # transformers' Llama wants heads that divide hidden
    ("--window 128", "MistralForCausalLM"), ("--window 128 --full-attention-every 4", "SmolLM3ForCausalLM"),
    ("--no-rope-every 4 --ffn-bias", "SmolLM3ForCausalLM"), ("--qkv-bias --out-bias", "LlamaForCausalLM"),
    ("--rope-type yarn --rope-scaling 4 --rope-fast-turns 32", "LlamaForCausalLM"),
    ("--qk-norm --qkv-bias --out-bias", "Qwen3ForCausalLM"), ("--preset qwen2.5-0.5b", "Qwen2ForCausalLM"),
    ("--preset qwen3-8b --window 128 --full-attention-every 4", "Qwen3ForCausalLM"),
    ("--preset mixtral-8x7b", "MixtralForCausalLM"), ("--preset tiny-moe", "MixtralForCausalLM"),
    ("--preset qwen3-30b-a3b --dense-layers 2", "Qwen3MoeForCausalLM"),
    ("--preset deepseek-v3", "DeepseekV3ForCausalLM"), ("--preset kimi-k2 --q-lora-rank 0", "DeepseekV3ForCausalLM")])
def test_the_class_of_an_export_has_what_the_model_uses(flags, architecture, tmp_path):
    model = rules.parse(f"--data {__file__} {flags}".split()).model
    assert huggingface.class_for_export(model) == architecture


@pytest.mark.parametrize("flags, named", [
    ("--preset tiny-moe --window 128 --full-attention-every 4", "--full-attention-every 4 (only 0)"),
    ("--qk-norm --qkv-bias", "--qkv-bias True"),
    ("--preset tiny-moe --shared-experts 1", "--shared-experts 1 (only 0)"),
    ("--preset tiny-moe --dense-layers 1", "--dense-layers 1 (only 0)"),
    ("--preset tiny-moe --router sigmoid", "--router sigmoid (only softmax)"),
    ("--preset tiny-moe --no-router-norm", "--router-norm False (only True)"),
    ("--preset tiny-moe --router-scale 2", "--router-scale 2.0 (only 1.0)"),
    ("--preset deepseek-v3 --norm-eps 1e-5", "--norm-eps 1e-05 (only 1e-06)"),
    ("--preset deepseek-v3 --window 8", "--window 8 (only 0)"),
    ("--heads 6 --head-dim 10 --qk-norm --qkv-bias", "--heads 6 (only divisors of --hidden 128)"),
    ("--out-bias", "--qkv-bias False (only True)"), ("--qk-norm --ffn-bias", "--ffn-bias True (only False)"),
    ("--qk-norm --no-rope-every 4", "--no-rope-every 4 (only 0)")])
def test_what_no_class_of_transformers_computes_is_not_exported(flags, named, tmp_path):
    model = rules.parse(f"--data {__file__} {flags}".split()).model
    with refused("", named):
        huggingface.export(str(tmp_path / "out"), model, [], None, "fp32")
    assert not os.path.exists(tmp_path / "out")
