"""Published models, in and out: folders with config.json and safetensors, as Hugging Face's transformers writes them.

    read_config       config.json -> fields of config.Model
    source_of         *.safetensors -> a function that returns any part of any parameter. So a rank reads only the
                      parts that it holds. core/param.py calls such a function a source
    export            a model of ours -> a folder that AutoModelForCausalLM.from_pretrained opens
    copy_tokenizer    the files of a tokenizer -> another folder

Each class of transformers that we read and write, such as LlamaForCausalLM, has an entry in
ARCHITECTURES. "The class" always means one of them. A config.json that asks for something that our
model does not implement is refused. So is the export of a model that no class implements.

On disk, weights have other names, and experts are stored differently. Our experts are stacked in
one parameter. On disk, each expert has matrices of its own. The example is a parameter of layer 7,
for E experts, F = ffn and H = hidden. To the right of its rows are the ends of the names of its
tensors on disk:

    layers.7.experts.w_gate_up [E, 2F, H]     expert 0             expert 1             ...
                               rows 0 .. F    0.gate_proj.weight   1.gate_proj.weight
                               rows F .. 2F   0.up_proj.weight     1.up_proj.weight

The full name of the last one is model.layers.7.mlp.experts.1.up_proj.weight.

A box is a rectangular part of a parameter: a tuple of slices, one per dimension (core/param.py).
`boxes_on_disk` returns the tensors on disk that make up a parameter, and the box that each of them
is. An export names them as the class does (`names_on_disk`). A folder that we read may use other
names, because versions of transformers differ (`names_stored`).

run/cli.py reads config.json before torch is imported, so only functions import torch here.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from core.config import FAST_TURNS, flag, is_of_kind, need, problem_of, yarn_factor

if TYPE_CHECKING:
    import torch

    from core.param import Box, Source, Spec

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SINGLE = "model.safetensors"  # the file of weights, if there is only one
INDEX = "model.safetensors.index.json"  # the list of the tensors in several files
COMPARED_BYTES = 2**24  # of two tensors at a time
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the special tokens in config.json
GENERATION = "generation_config.json"
# What transformers reads for a tokenizer, besides tokenizer.json: files, and a folder of chat templates.
BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                    "tokenizer.model", "chat_template.jinja", "chat_template.json")
MORE_TEMPLATES = "additional_chat_templates"


# ---- names of weights -----------------------------------------------------------------------------------------------

# Our name of a weight: the class's name. Names in layer 7 also begin with "layers.7." here, and
# with "model.layers.7." in the class.
NAMES = {
    "embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight",
    "attention.wq": "self_attn.q_proj.weight", "attention.bq": "self_attn.q_proj.bias",
    "attention.wk": "self_attn.k_proj.weight", "attention.bk": "self_attn.k_proj.bias",
    "attention.wv": "self_attn.v_proj.weight", "attention.bv": "self_attn.v_proj.bias",
    "attention.wo": "self_attn.o_proj.weight", "attention.bo": "self_attn.o_proj.bias",
    "attention.q_norm": "self_attn.q_norm.weight", "attention.k_norm": "self_attn.k_norm.weight",
    "ffn.w_gate": "mlp.gate_proj.weight", "ffn.w_up": "mlp.up_proj.weight", "ffn.w_down": "mlp.down_proj.weight",
    "ffn.b_gate": "mlp.gate_proj.bias", "ffn.b_up": "mlp.up_proj.bias", "ffn.b_down": "mlp.down_proj.bias",
}
# {e} stands for the number of an expert: each expert has a tensor of its own. If there are two
# names, with a space between them, the first tensor has the first half of our rows, and the second
# tensor has the second half.
MIXTRAL_NAMES = NAMES | {
    "router": "block_sparse_moe.gate.weight",
    "experts.w_gate_up": "block_sparse_moe.experts.{e}.w1.weight block_sparse_moe.experts.{e}.w3.weight",
    "experts.w_down": "block_sparse_moe.experts.{e}.w2.weight",
}
QWEN_MOE_NAMES = NAMES | {
    "router": "mlp.gate.weight",
    "experts.w_gate_up": "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
    "experts.w_down": "mlp.experts.{e}.down_proj.weight",
}
DEEPSEEK_NAMES = QWEN_MOE_NAMES | {
    "router.bias": "mlp.gate.e_score_correction_bias",  # not a parameter, but a tensor that ep.Router holds
    "attention.w_q_down": "self_attn.q_a_proj.weight", "attention.q_norm": "self_attn.q_a_layernorm.weight",
    "attention.w_q_up": "self_attn.q_b_proj.weight", "attention.w_kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm": "self_attn.kv_a_layernorm.weight", "attention.w_kv_up": "self_attn.kv_b_proj.weight",
    "shared.w_gate": "mlp.shared_experts.gate_proj.weight", "shared.w_up": "mlp.shared_experts.up_proj.weight",
    "shared.w_down": "mlp.shared_experts.down_proj.weight",
}
# Names of experts that transformers 5 has fused: one stacked tensor per layer, like ours.
FUSED_NAMES = {
    "router": "mlp.gate.weight", "experts.w_gate_up": "mlp.experts.gate_up_proj",
    "experts.w_down": "mlp.experts.down_proj",
}
# Parts that wrappers, such as FSDP and torch.compile, add to the names of weights.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


# ---- what the classes of transformers implement ---------------------------------------------------------------------

class Architecture(NamedTuple):
    """A class of transformers: which fields of config.json it reads, and its names of weights."""
    model_type: str
    # Each field that the class reads -> its value if it is absent. None means null, which is refused unless the field
    # may be null: such a field must be present.
    defaults: dict[str, Any]
    names: dict[str, str] = NAMES
    fixed: dict[str, Any] = {}  # fields of config.Model that config.json does not name, and their values in this class
    limits: dict[str, tuple] = {}  # field of config.json -> the only values that are allowed; the first is the default

    @property
    def has_experts(self) -> bool:
        return "router" in self.names

    @property
    def is_latent(self) -> bool:
        """Whether it has multi-head latent attention (mla.py)."""
        return "attention.w_kv_down" in self.names


class JsonField(NamedTuple):
    """A field of config.json, and its allowed values. A number must be above 0, also in a list."""
    kind: Any  # bool, int, float, str, dict, list[int] or list[str]
    ours: str = ""  # the field of config.Model that has this value; "": model_fields says what follows from it
    zero: bool = False  # whether numbers may also be 0
    null: bool = False  # whether the field may be null
    # If the class does not read the field: the only values allowed; the first is the default. (): all are allowed.
    if_unread: tuple = ()


# The fields of config.json that we know. The first rule that applies to a field says which values
# are allowed:
#
# 1. If the class has `limits` for the field, only the values in `limits` are allowed.
# 2. If the class reads the field, which is then in the class's `defaults`, all values of its kind are
#    allowed.
# 3. If the field has `if_unread`, it must be absent, or have a value in `if_unread`.
#
# All other fields are ignored. For example:
#
#     attention_bias   Llama's class reads it, so it may be true or false, and is false if it is absent (rule 2).
#                      Mixtral's class does not, so it must be false or absent (rule 3).
#     rms_norm_eps     DeepSeek-V3's class reads it, but has a limit: it must be 1e-6 or absent (rule 1).
#
# read_rope and read_quantization read the fields for the scaling of rotary embeddings and for
# quantization, for every class. There too, a field with `if_unread` must have one of these values,
# and a field without it may have all values of its kind.
FIELDS = {
    "vocab_size": JsonField(int, "vocab"),
    "hidden_size": JsonField(int, "hidden"),
    "intermediate_size": JsonField(int, "ffn"),
    "num_hidden_layers": JsonField(int, "layers"),
    "num_attention_heads": JsonField(int, "heads"),
    "num_key_value_heads": JsonField(int, "kv_heads", null=True),
    "head_dim": JsonField(int, "head_dim", null=True),
    "tie_word_embeddings": JsonField(bool, "tied"),
    "rms_norm_eps": JsonField(float, "norm_eps"),
    "hidden_act": JsonField(str, if_unread=("silu", "swish")),
    "attention_bias": JsonField(bool, "out_bias", if_unread=(False,)),  # from it, model_fields also sets qkv_bias
    "mlp_bias": JsonField(bool, "ffn_bias", if_unread=(False,)),
    "attention_dropout": JsonField(float, zero=True, if_unread=(0,)),
    "quantization_config": JsonField(dict, null=True),
    # Rotary embedding. model_fields also reads these inside rope_parameters or rope_scaling.
    "rope_theta": JsonField(float, "rope_theta"),
    "rope_type": JsonField(str, if_unread=("default", "llama3", "linear", "dynamic", "yarn")),
    "factor": JsonField(float, "rope_scaling"),
    "partial_rotary_factor": JsonField(float, null=True, if_unread=(None, 1)),
    "low_freq_factor": JsonField(float, if_unread=(1.0,)),
    "high_freq_factor": JsonField(float, "rope_fast_turns"),
    "original_max_position_embeddings": JsonField(int, "original_seq_len"),
    "max_position_embeddings": JsonField(int, "original_seq_len"),  # for rope_type dynamic, or if the former is absent
    "beta_slow": JsonField(float, null=True, if_unread=(None, 1)),
    "beta_fast": JsonField(float, "rope_fast_turns", null=True),
    "attention_factor": JsonField(float, "rope_attention_factor", null=True),
    "mscale": JsonField(float, zero=True, null=True),
    "mscale_all_dim": JsonField(float, zero=True, null=True),
    "truncate": JsonField(bool, if_unread=(True,)),
    "no_rope_layers": JsonField(list[int], zero=True, null=True),
    "no_rope_layer_interval": JsonField(int),
    "full_attention": JsonField(dict, null=True, if_unread=(None,)),  # rotary embeddings that differ by layer
    "sliding_attention": JsonField(dict, null=True, if_unread=(None,)),
    "rope_interleave": JsonField(bool, if_unread=(True,)),
    # The sliding window.
    "sliding_window": JsonField(int, "window", null=True),
    "use_sliding_window": JsonField(bool),
    "max_window_layers": JsonField(int, zero=True),
    "layer_types": JsonField(list[str], null=True, if_unread=(None,)),
    # Latent attention.
    "kv_lora_rank": JsonField(int, "kv_lora_rank"),
    "q_lora_rank": JsonField(int, "q_lora_rank", null=True),
    "qk_nope_head_dim": JsonField(int, "head_dim"),
    "qk_rope_head_dim": JsonField(int, "rope_head_dim"),
    "v_head_dim": JsonField(int, "v_head_dim"),
    # Experts.
    "num_experts": JsonField(int, "experts"),
    "num_local_experts": JsonField(int, "experts"),
    "n_routed_experts": JsonField(int, "experts"),
    "num_experts_per_tok": JsonField(int, "top_k"),
    "moe_intermediate_size": JsonField(int, "expert_ffn"),
    "n_shared_experts": JsonField(int, "shared_experts", zero=True),
    "first_k_dense_replace": JsonField(int, "dense_layers", zero=True),
    "mlp_only_layers": JsonField(list[int], zero=True, null=True),
    "decoder_sparse_step": JsonField(int, if_unread=(1,)),
    "moe_layer_freq": JsonField(int, if_unread=(1,)),
    "norm_topk_prob": JsonField(bool, "router_norm"),
    "routed_scaling_factor": JsonField(float, "router_scale"),
    "n_group": JsonField(int, "expert_groups"),
    "topk_group": JsonField(int, "top_groups"),
    "scoring_func": JsonField(str, if_unread=("sigmoid",)),
    "topk_method": JsonField(str, if_unread=("noaux_tc",)),
    "router_jitter_noise": JsonField(float, zero=True, if_unread=(0,)),
    "model_type": JsonField(str),  # must be the class's model_type, or in its limits
}
KINDS = {  # kind of a field: (a value of this kind, the kind in words)
    bool: (True, "true or false"), int: (1, "a whole number"), float: (1.0, "a number"), str: ("", "text"),
    dict: ({}, "an object"), list[int]: ([1], "a list of whole numbers"), list[str]: ([""], "a list of texts")}
ROPE = {  # rope_type: the fields that may be in rope_parameters or rope_scaling, besides rope_type and rope_theta
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_slow", "beta_fast", "original_max_position_embeddings", "attention_factor", "mscale",
             "mscale_all_dim", "truncate"),
}


def llama_defaults(**changes: Any) -> dict[str, Any]:
    """Return Llama's defaults with changes, for a class that reads Llama's fields and others."""
    no_default = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "head_dim", "num_key_value_heads")
    return dict.fromkeys(no_default) | dict(rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False) | changes


QWEN = dict(use_sliding_window=False, sliding_window=4096)
BY_LAYER = dict(max_window_layers=28, layer_types=None)  # which layers have the window
LATENT = llama_defaults(
    num_key_value_heads=128, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, n_routed_experts=256, n_shared_experts=1, n_group=8, topk_group=4, num_experts_per_tok=8,
    moe_intermediate_size=2048, first_k_dense_replace=3, routed_scaling_factor=2.5, norm_topk_prob=True)
# transformers saves a head_dim, which is the width of the rotated part of a key. DeepSeek's own files have none.
del LATENT["head_dim"]
ARCHITECTURES = {  # with the defaults of transformers 5.23
    "LlamaForCausalLM": Architecture("llama", llama_defaults(attention_bias=False, mlp_bias=False)),
    "MistralForCausalLM": Architecture("mistral", llama_defaults(num_key_value_heads=8, sliding_window=4096)),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", llama_defaults(num_key_value_heads=32, **QWEN, **BY_LAYER), fixed=dict(qkv_bias=True)),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", llama_defaults(num_key_value_heads=32, **QWEN, **BY_LAYER, head_dim=128, attention_bias=False),
        fixed=dict(qk_norm=True)),
    "SmolLM3ForCausalLM": Architecture("smollm3", llama_defaults(
        num_key_value_heads=4, rope_theta=2000000.0, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
        no_rope_layers=None, no_rope_layer_interval=4, use_sliding_window=False, sliding_window=None,
        layer_types=None)),
    "MixtralForCausalLM": Architecture(
        "mixtral", llama_defaults(num_key_value_heads=8, sliding_window=None, rms_norm_eps=1e-5, rope_theta=1000000.0,
                                  num_local_experts=8, num_experts_per_tok=2),
        names=MIXTRAL_NAMES),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", llama_defaults(num_key_value_heads=4, **QWEN, num_experts=128, num_experts_per_tok=8,
                                    moe_intermediate_size=768, norm_topk_prob=False, mlp_only_layers=None,
                                    attention_bias=False),
        names=QWEN_MOE_NAMES, fixed=dict(qk_norm=True)),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3", LATENT, names=DEEPSEEK_NAMES, fixed=dict(router="sigmoid"),
        limits=dict(model_type=("deepseek_v3", "kimi_k2"), rms_norm_eps=(1e-6,))),  # norms of latents always use 1e-6
}


# ---- which tensors on disk a parameter is ---------------------------------------------------------------------------

def names_on_disk(name: str, architecture: str, names: dict[str, str] | None = None) -> list[str]:
    """Return a weight's names in a class.

    "layers.7.attention.wq" -> ["model.layers.7.self_attn.q_proj.weight"]

    {e} in a name stands for the number of an expert. The list is empty for the bias of a router if
    the class has none: such a bias is 0.

    names: a table to use instead of the class's own
    """
    layer, ours = re.fullmatch(r"(layers\.\d+\.)?(.+)", name).groups(default="")
    names = names or ARCHITECTURES[architecture].names
    if ours == "router.bias" and ours not in names:
        return []
    need(ours in names, f"{name}: {architecture} has no such weight, leave out the flag that asks for it")
    return [("model." + layer if layer else "") + theirs for theirs in names[ours].split()]


def tensors_on_disk(spec: Spec, architecture: str) -> list[tuple[str, Box]]:
    """Return the tensors on disk that make up a parameter: each one's name, and which box of the parameter it is."""
    return boxes_on_disk(spec, names_on_disk(spec.name, architecture))


def boxes_on_disk(spec: Spec, names: list[str]) -> list[tuple[str, Box]]:
    """Return `tensors_on_disk` for tensors with these names. {e} is the number of an expert."""
    if len(spec.shape) < 3 or "{e}" not in names[0]:  # one tensor holds the whole parameter, or none: a router's bias
        return [(name, tuple(slice(0, n) for n in spec.shape)) for name in names]
    experts, rows, columns = spec.shape
    rows //= len(names)  # the rows of one tensor
    boxes = []
    for e in range(experts):
        for i, name in enumerate(names):
            box = (slice(e, e + 1), slice(i * rows, (i + 1) * rows), slice(0, columns))
            boxes.append((name.format(e=e), box))
    return boxes


def weights_of(model: Any) -> Iterator[str]:
    """Yield our names of a model's weights and routers' biases, without multi-token prediction."""
    names = dict.fromkeys(ours for architecture in ARCHITECTURES.values() for ours in architecture.names)
    whole = ("embedding", "norm", "head")  # of the whole model; all others are in each layer
    yield from whole[:2] if model.tied else whole
    for layer in range(model.layers):
        yield from (f"layers.{layer}.{name}" for name in names if name not in whole and has_weight(model, layer, name))


def has_weight(model: Any, layer: int, name: str) -> bool:
    """Return whether a layer of a config.Model has a weight.

    name: a name in the tables of names, such as "attention.bq". Its parts are "attention" and "bq".
        The layer has the weight unless it lacks one of the parts.
    """
    experts, latents = model.has_experts(layer), model.kv_lora_rank
    # Part of a name -> whether the layer has it. A part that is not here is in every layer.
    has = {"ffn": not experts, "router": experts, "experts": experts, "shared": experts and model.shared_experts,
           "wq": not model.q_lora_rank, "wk": not latents, "wv": not latents,
           "bq": model.qkv_bias, "bk": model.qkv_bias, "bv": model.qkv_bias, "bo": model.out_bias,
           "b_gate": model.ffn_bias, "b_up": model.ffn_bias, "b_down": model.ffn_bias,
           "q_norm": model.qk_norm or model.q_lora_rank, "k_norm": model.qk_norm,
           "w_q_down": model.q_lora_rank, "w_q_up": model.q_lora_rank,
           "w_kv_down": latents, "kv_norm": latents, "w_kv_up": latents}
    return all(has.get(part, True) for part in name.split("."))


# ---- config.json ----------------------------------------------------------------------------------------------------

def read_config(folder: str) -> dict[str, Any]:
    """Return the fields of config.Model that make it the model in `folder`. Raises ValueError if
    config.Model cannot describe it.

    config.json may tie embedding and head. If the folder nevertheless has both, and they differ,
    they are not tied. transformers does the same.
    """
    where = os.path.join(folder, "config.json")
    model = model_fields(read_json(where), where)
    if model["tied"]:
        with contextlib.suppress(ValueError):  # check_weights reports bad weights; a dry run needs none
            model["tied"] = not has_own_head(weights_in(folder))
    return model


def read_json(path: str) -> dict[str, Any]:
    need(os.path.isfile(path), f"{path}: there is no such file")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON: {error}") from None
    need(isinstance(content, dict), f"{path}: must be a JSON object")
    return content


def read_architecture(config: dict[str, Any], where: str) -> str:
    """Return the name of the class that config.json names. Raises ValueError if we do not know it."""
    names = config.get("architectures")
    one = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    if one.endswith("Model"):  # saved without its head
        one = one.removesuffix("Model") + "ForCausalLM"
    need(one in ARCHITECTURES, f"{where}: architectures {names}: use one of {', '.join(ARCHITECTURES)}")
    return one


def read_field(config: dict[str, Any], name: str, default: Any, where: str, allowed: tuple | None = None) -> Any:
    """Return the value of a field of config.json, or the default if it is absent. Raises ValueError
    if the value is not allowed.

    where: the path of config.json, for messages
    allowed: the allowed values, or () for all values of the field's kind. None stands for the
        field's `if_unread`.
    """
    field, value = FIELDS[name], config.get(name, default)
    allowed = field.if_unread if allowed is None else allowed
    example, words = KINDS[field.kind]
    fits = is_of_kind(value, example)
    if field.kind in (int, float, list[int]):
        words += ", 0 or more" if field.zero else " above 0"
        entries = value if isinstance(value, list) else [value]
        fits = fits and all(entry > 0 or (field.zero and entry == 0) for entry in entries)
    if value is None and field.null:
        fits = True
    if allowed:
        words = " or ".join(map(json.dumps, allowed))
        fits = fits and value in allowed
    need(fits, f"{where}: {name} {json.dumps(value)}: must be {words}")
    problem = problem_of(field.ours, value) if field.ours and value is not None else ""
    need(not problem, f"{where}: {name} {json.dumps(value)}: {problem}")
    return value


def read_fields(config: dict[str, Any], architecture: Architecture, where: str) -> dict[str, Any]:
    """Return the fields that the class reads, with their values. Raises ValueError if any field has
    a value that is not allowed (see FIELDS)."""
    allowed = {name: field.if_unread for name, field in FIELDS.items()
               if field.if_unread and name not in architecture.defaults}
    allowed |= {"model_type": (architecture.model_type,)} | architecture.limits
    for name, values in allowed.items():
        read_field(config, name, values[0], where, values)
    return {name: read_field(config, name, default, where, architecture.limits.get(name, ()))
            for name, default in architecture.defaults.items()}


def model_fields(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of config.Model that config.json asks for.

    config: the content of config.json
    where: its path, for messages
    """
    architecture = ARCHITECTURES[read_architecture(config, where)]
    # The object for rotary embeddings. transformers 4 names it rope_scaling, and 5 rope_parameters.
    # In older files, rope_type is "type".
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    need(isinstance(rope, dict), f"{where}: {name} {json.dumps(rope)}: must be an object or null")
    # Its entries join the others. If a name is in both, such as rope_theta, the object's entry wins.
    config = config | {"rope_type": rope.get("type", "default")} | rope
    if "num_local_experts" in config and "num_experts" in architecture.defaults:  # transformers 5 writes Mixtral's name
        config["num_experts"] = config["num_local_experts"]
    settings = read_fields(config, architecture, where)
    read_quantization(config, where)
    model = {FIELDS[name].ours: value for name, value in settings.items() if FIELDS[name].ours and value is not None}
    model.setdefault("kv_heads", model["heads"])
    model.setdefault("head_dim", model["hidden"] // model["heads"])
    model["head_dim"] += model.get("rope_head_dim", 0)  # ours is the width of both parts of a head
    if "experts" in model:
        model.setdefault("expert_ffn", model["ffn"])
        dense = settings.get("mlp_only_layers") or []
        need(dense == [*range(len(dense))], f"{where}: mlp_only_layers {dense}: only the first layers can be dense")
        model["dense_layers"] = model.get("dense_layers", len(dense))
    if "attention_bias" in settings:
        model["qkv_bias"] = settings["attention_bias"]
    if architecture.model_type == "smollm3":
        model["no_rope_every"], settings["layer_types"] = read_layers_without_rope(settings, where)
    model |= read_rope(config, rope, architecture.is_latent, where)
    return model | read_window(settings, where) | architecture.fixed


def read_rope(config: dict[str, Any], rope: dict[str, Any], latent: bool, where: str) -> dict[str, Any]:
    """Return the fields of config.Model that scale rotary frequencies. Raises ValueError for a
    field that is missing, not allowed, or of another rope_type.

    config: the content of config.json, with the entries of `rope` at its top level
    rope: the object rope_parameters or rope_scaling
    latent: whether the class also multiplies attention scores by a factor from mscale_all_dim
    """
    rope_type = config["rope_type"]
    for name in sorted(rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE[rope_type]}):
        need(rope[name] is None, f"{where}: {name} {json.dumps(rope[name])}: must be absent with rope_type {rope_type}")
    if rope_type == "default":
        return dict(rope_scaling=1.0)

    def read(name: str) -> Any:
        return read_field(config, name, None, where)  # None is refused unless the field may be null

    factor = read("factor")
    model = dict(rope_type=rope_type, rope_scaling=factor)
    if rope_type == "dynamic":
        return model | dict(original_seq_len=read("max_position_embeddings"))
    if rope_type == "llama3":
        read("low_freq_factor")
    if rope_type in FAST_TURNS:  # rope_type -> the value of --rope-fast-turns auto
        fast = read("high_freq_factor" if rope_type == "llama3" else "beta_fast")
        if fast is None or fast == FAST_TURNS[rope_type]:  # for YaRN, transformers has the same default
            fast = 0.0  # auto
        model["rope_fast_turns"] = fast
        original = "original_max_position_embeddings"
        model["original_seq_len"] = read(original if original in config else "max_position_embeddings")
    if rope_type == "yarn":
        attention, mscale, mscale_all_dim = read("attention_factor"), read("mscale"), read("mscale_all_dim")
        if attention is None and mscale and mscale_all_dim:
            attention = yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all_dim)
        model["rope_attention_factor"] = attention or 0.0  # 0: auto
        model["rope_mscale"] = (mscale_all_dim or 0.0) if latent else 0.0
    if factor == 1 and model.get("rope_attention_factor", 0) in (0, 1):  # nothing is scaled
        return dict(rope_scaling=1.0)
    return model


def rope_of(model: Any) -> dict[str, Any] | None:
    """Return the object rope_scaling of config.json: the inverse of read_rope. None without scaling.

    YaRN with a factor of 1 scales nothing, but may have an attention factor. It is left out here, and
    class_for_export refuses the model.
    """
    rope_type, factor, mscale = model.rope_type, model.rope_scaling, model.rope_mscale
    if factor == 1 and rope_type != "dynamic":
        return None
    rope = {"rope_type": rope_type, "factor": factor}
    if rope_type in FAST_TURNS:
        rope["original_max_position_embeddings"] = model.original_seq_len
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": model.fast_turns}
    if rope_type == "yarn":
        rope |= {"beta_slow": 1.0, "beta_fast": model.fast_turns}
        if mscale:
            rope["mscale_all_dim"] = mscale
        if mscale and model.rope_attention_factor == 1:
            rope["mscale"] = mscale  # as DeepSeek-V3's config.json writes it
        elif model.rope_attention_factor:
            rope["attention_factor"] = model.rope_attention_factor
    return rope


def read_layers_without_rope(settings: dict[str, Any], where: str) -> tuple[int, list[str]]:
    """Return no_rope_every of config.Model, and layer_types, for a SmolLM3.

    Its list no_rope_layers has a 0 for each layer without rotary embedding, and a 1 for each other
    layer. If there is no list, every no_rope_layer_interval-th layer has no rotary embedding.
    """
    layers, rotated, every = settings["num_hidden_layers"], settings["no_rope_layers"], 0
    if rotated is None:
        rotated = [int((layer + 1) % settings["no_rope_layer_interval"] > 0) for layer in range(layers)]
    need(len(rotated) >= layers, f"{where}: no_rope_layers {rotated}: must be a list of 0 or 1, one per layer")
    without = [layer for layer in range(layers) if not rotated[layer]]
    if without:
        every = without[0] + 1
        need(without == list(range(every - 1, layers, every)),
             f"{where}: no_rope_layers {rotated}: must have 0 for every N-th layer, and 1 for the others")
    layer_types = settings["layer_types"]
    if layer_types is None:  # SmolLM3 has its window in the layers without rotary embedding
        layer_types = ["sliding_attention" if layer in without else "full_attention" for layer in range(layers)]
    return every, layer_types


def read_quantization(config: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Return how many rows and columns of an FP8 weight share one scale; None without FP8."""
    asked = read_field(config, "quantization_config", None, where)
    if asked is None:
        return None
    block = asked.get("weight_block_size")
    need(asked.get("quant_method") == "fp8" and asked.get("fmt", "e4m3") == "e4m3" and is_of_kind(block, [1])
         and len(block) == 2 and min(block) > 0,
         f"{where}: quantization_config {json.dumps(asked)}: must be null, or FP8 with a weight_block_size, as in "
         "DeepSeek-V3")
    return tuple(block)


def read_window(settings: dict[str, Any], where: str) -> dict[str, int]:
    """Return window and full_attention_every of config.Model.

    If layer_types is absent, the first max_window_layers layers have full attention, and the others
    the window.
    """
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    layers, layer_types = settings["num_hidden_layers"], settings.get("layer_types")
    if layer_types is None:
        first = settings.get("max_window_layers", 0)
        layer_types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    need(len(layer_types) == layers and all(entry in ("full_attention", "sliding_attention") for entry in layer_types),
         f"{where}: layer_types {layer_types}: must be full_attention or sliding_attention, one per layer")
    full = [layer for layer in range(layers) if not window or layer_types[layer] == "full_attention"]
    if len(full) == layers:
        return dict(window=0, full_attention_every=0)
    every = full[0] + 1 if full else 0
    need(not full or full == list(range(every - 1, layers, every)),
         f"{where}: sliding_window {window}, but not in layers {full}: must be in all layers, or in all but every K-th")
    return dict(window=window, full_attention_every=every)


def config_of(model: Any, architecture: str) -> dict[str, Any]:
    """Return the content of config.json for a config.Model: the inverse of model_fields.

    What the class cannot express is left out, or replaced by the only value that it has.
    class_for_export notices, because it reads the result again.
    """
    theirs = ARCHITECTURES[architecture]
    values = {name: getattr(model, field.ours) for name, field in FIELDS.items() if field.ours}
    values |= {name: allowed[0] for name, allowed in theirs.limits.items()}
    values |= {
        "sliding_window": model.window or None,
        "use_sliding_window": model.window > 0,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention" if model.window_of(layer) else "full_attention"
                        for layer in range(model.layers)],
        "mlp_only_layers": list(range(model.dense_layers)),
        "q_lora_rank": model.q_lora_rank or None,
        "qk_nope_head_dim": model.head_dim - model.rope_head_dim,
        "v_head_dim": model.value_dim,
        "no_rope_layers": [int(model.has_rope(layer)) for layer in range(model.layers)],
        "no_rope_layer_interval": model.no_rope_every or model.layers + 1,
    }
    if "num_local_experts" in theirs.defaults:  # Mixtral has no moe_intermediate_size
        values["intermediate_size"] = model.expert_ffn
    config = {"architectures": [architecture], "model_type": theirs.model_type}
    config |= {field: values[field] for field in theirs.defaults}
    if rope := rope_of(model):
        config["rope_scaling"] = rope
    if model.rope_type == "dynamic":
        config["max_position_embeddings"] = model.original_seq_len
    return config


def class_for_export(model: Any) -> str:
    """Return the name of the class that implements this config.Model.

    For each class in turn, we write the config.json that is nearest to the model, and read it
    again. The first class for which that gives the same model is the one. Raises ValueError if
    there is none, and names the settings that each class lacks.
    """
    unused = {"preset", "mtp"}  # fields that an export leaves out
    if model.experts and not model.dense_layers:
        unused.add("ffn")
    ours = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in unused}
    ours["v_head_dim"] = model.value_dim if model.kv_lora_rank else 0
    if model.rope_fast_turns == FAST_TURNS.get(model.rope_type):
        ours["rope_fast_turns"] = 0.0  # 0: auto
    default = {f.name: f.default for f in fields(model)}
    refusals = []
    for name, architecture in ARCHITECTURES.items():
        if (architecture.has_experts, architecture.is_latent) != (model.experts > 0, model.kv_lora_rank > 0):
            continue
        theirs = default | model_fields(config_of(model, name), name)
        missing = [f"{flag(field)} {value} (only {theirs[field]})" for field, value in ours.items()
                   if value != theirs[field]]
        if name == "LlamaForCausalLM" and model.hidden % model.heads:  # Mistral's class has no such rule
            missing.append(f"--heads {model.heads} (only divisors of --hidden {model.hidden})")
        if not missing:
            return name
        refusals.append(f"{name} has no {', '.join(missing)}")
    raise ValueError(f"no class of transformers computes this model: {'; '.join(refusals)}")


def check_export(settings: Any) -> None:
    """Raise ValueError before training if --export-hf could not write the model after it."""
    target = settings.run.export_hf
    rate = settings.optim.router_bias_rate
    init_from = settings.run.init_from
    if not target:
        return
    need(settings.run.checkpoint_dir,
         f"--export-hf {target}: needs --checkpoint-dir, whose last checkpoint is exported")
    try:
        names = ARCHITECTURES[class_for_export(settings.model)].names
    except ValueError as error:
        raise ValueError(f"--export-hf {target}: {error}") from None
    need(rate == 0 or "router.bias" in names,
         f"--export-hf with --router-bias-rate {rate}: this model's class of transformers has no biases of routers")
    need(not init_from or os.path.realpath(target) != os.path.realpath(init_from),
         f"--export-hf {target}: is the folder of --init-from")


# ---- reading --------------------------------------------------------------------------------------------------------

class Stored(NamedTuple):
    """Where the weights of a published model are."""
    folder: str
    architecture: str
    tied: bool  # whether config.json ties the embedding and the head
    files: dict[str, tuple[str, str]]  # name in the class -> (file, name in this file)
    fp8_block: tuple[int, int] | None  # rows and columns of an FP8 weight that share a scale; None: there is no FP8


SCALES = "_scale_inv"  # the scales of an FP8 weight are a tensor with the weight's name and this at the end


def check_weights(folder: str, model: Any, allow_mismatch: bool) -> list[str]:
    """Compare the names of the weights in `folder` with the names of a config.Model's weights.
    Returns lines to show to the user.

    Raises ValueError if weights are missing. Unless allow_mismatch, also raises it if the folder
    has weights that the model does not use, such as biases or more layers.
    """
    # 1. Missing: the model has the weight, the folder does not.
    stored = weights_in(folder)
    wanted = []
    for weight in weights_of(model):
        for name in names_stored(weight, stored):
            if "{e}" in name:
                wanted += [name.format(e=e) for e in range(model.experts)]
            else:
                wanted.append(name)
    missing = [name for name in wanted if name not in stored.files]

    # 2. Multi-token prediction: the folder's block and the block of --mtp compute different things.
    mtp_names = prediction_block(stored)
    both_predict = mtp_names and model.mtp
    need(not both_predict or allow_mismatch,
         f"{folder}: has {some(mtp_names)} of a block for multi-token prediction that reads the last layer's result "
         "after the final norm; the block of --mtp reads it before this norm: leave --mtp out, or give "
         "--allow-mismatch to initialise the block at random")

    # 3. The head. If config.json ties it to the embedding, the folder may still have both. If they
    #    are equal, the head is a copy that a tied model does not need. If they differ, it is a weight
    #    of its own.
    own_head = stored.tied and has_own_head(stored)
    known = {*wanted, *mtp_names}
    if model.tied and stored.tied and not own_head:
        known.add(NAMES["head"])

    # 4. Unused: the folder has the weight, the model does not.
    unused = []
    for name, (_, key) in stored.files.items():
        is_known = name in known or name.removesuffix(SCALES) in known
        if not is_known and not name.endswith(".rotary_emb.inv_freq"):  # old folders have these frequencies
            unused.append(key)
    unused.sort()
    extra = f"has {some(unused)}, which the model does not use" if unused else ""
    need(not missing, f"{folder}: has no tensor {some(missing)}, which the model asks for{extra and '; ' + extra}")
    need(not unused or allow_mismatch, f"{folder}: {extra}: give --allow-mismatch to leave out what it does not")
    lines = [f"{folder}: {extra}"] if unused else []
    if own_head and not model.tied:
        lines.append(f"{folder}: config.json ties embedding and head, but there are weights of both, which differ: "
                     "they are not tied")
    return lines


def prediction_block(stored: Stored) -> list[str]:
    """Return the names of DeepSeek-V3's weights for multi-token prediction.

    transformers ignores these weights. They are stored as one more layer, and this layer is the only
    one with an eh_proj: the matrix that joins the next token's embedding and the last layer's result.
    """
    prefixes = tuple(name.removesuffix("eh_proj.weight") for name in stored.files if name.endswith(".eh_proj.weight"))
    return sorted(name for name in stored.files if name.startswith(prefixes))


def some(names: list[str]) -> str:
    """Return the first name, and how many more there are, for a message."""
    return "".join(names[:1]) + (f" and {len(names) - 1} more tensors" if names[1:] else "")


def names_stored(name: str, stored: Stored) -> list[str]:
    """Return a weight's names in a folder: `names_on_disk`, unless the folder uses other names.

    transformers 5 fuses experts into one tensor, and then also renames Mixtral's router. If
    embedding and head are tied, the folder may have only one of them, by either name.
    """
    names = names_on_disk(name, stored.architecture)
    if ".experts." in name or name.endswith(".router"):
        fused = names_on_disk(name, stored.architecture, FUSED_NAMES)
        return fused if fused[0] in stored.files else names
    if stored.tied and name in ("embedding", "head") and names[0] not in stored.files:
        other = NAMES["head" if name == "embedding" else "embedding"]
        return [other] if other in stored.files else names
    return names


def has_own_head(stored: Stored) -> bool:
    """Return whether the folder has both embedding and head, and their bytes differ."""
    embedding, head = NAMES["embedding"], NAMES["head"]
    if embedding not in stored.files or head not in stored.files:
        return False
    with contextlib.ExitStack() as files:
        one, size = open_bytes(stored, embedding, files)
        other, other_size = open_bytes(stored, head, files)
        if size != other_size:
            return True
        for start in range(0, size, COMPARED_BYTES):
            count = min(size - start, COMPARED_BYTES)
            if one.read(count) != other.read(count):
                return True
    return False


def source_of(folder: str) -> Source:
    """Return the source of the weights in `folder`. Its tensors are on the CPU, in the dtype of the
    folder, or in fp32 if that is FP8.

    The source reads only the elements of the box, and their scales. It raises ValueError, naming
    file and tensor, if a tensor is missing or damaged, or has another shape.
    """
    import torch

    from core.param import box_shape
    stored, opened = weights_in(folder), {}

    def read_box(spec: Spec, box: Box) -> torch.Tensor:
        out = None
        for name, tensor_box in boxes_on_disk(spec, names_stored(spec.name, stored)):
            common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, tensor_box))
            if any(s.start >= s.stop for s in common):
                continue  # the box has nothing of this tensor
            values = read_tensor(stored, opened, name, box_shape(tensor_box), relative(common, tensor_box))
            if common == box:  # the box has nothing of another tensor
                return values.reshape(box_shape(box))
            if out is None:
                out = values.new_empty(box_shape(box))
            out[relative(common, box)] = values.reshape(box_shape(common))
        if out is None:  # a router's bias, for which there is no tensor
            out = torch.zeros(box_shape(box))
        return out
    return read_box


def read_tensor(stored: Stored, opened: dict[str, Any], name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Return a box of a tensor on disk.

    shape: the shape that the whole tensor must have. For one expert's matrix, `shape` is [1, rows,
        columns] and `box` has three slices. The tensor on disk is [rows, columns], so the first
        entry of both is dropped.
    opened: the open files, by path, to which this function adds the tensor's file
    """
    place, tensor = find_tensor(stored, opened, name)
    got, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if len(shape) == 3 and shape[0] == 1 and len(got) < 3:
        shape, box = shape[1:], box[1:]
    need(got == shape, f"{place} has the shape {got}, the model asks for {shape}")
    if dtype == "F8_E4M3" and stored.fp8_block and name + SCALES in stored.files:
        values = tensor[box].float() * read_scales(stored, opened, name, shape, box)
    else:
        need(dtype in ("F64", "F32", "F16", "BF16"), f"{place} is {dtype}: use a model that is not quantised")
        values = tensor[box]
    need(values.isfinite().all(), f"{place} has values that are not finite: no step could train it")
    return values


def read_scales(stored: Stored, opened: dict[str, Any], name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Return the scale of each element in a box of an FP8 weight.

    The tensor of scales has one element for each block of stored.fp8_block rows and columns.

    shape: the shape of the whole weight
    """
    import torch
    place, tensor = find_tensor(stored, opened, name + SCALES)
    got, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    rows, columns = (math.ceil(n / size) for n, size in zip(shape[-2:], stored.fp8_block))
    scales_shape = (*shape[:-2], rows, columns)
    need(got == scales_shape, f"{place} has the shape {got}, a scale for each block would be {scales_shape}")
    need(dtype in ("F32", "BF16"), f"{place} is {dtype}: scales must be F32 or BF16")
    blocks = [slice(s.start // size, math.ceil(s.stop / size)) for s, size in zip(box[-2:], stored.fp8_block)]
    scales = tensor[(*box[:-2], *blocks)].float()
    for dim, s, size in zip((-2, -1), box[-2:], stored.fp8_block):  # repeat each scale for the elements of its block
        scales = scales.index_select(dim, (torch.arange(s.start, s.stop) // size) - (s.start // size))
    return scales


def find_tensor(stored: Stored, opened: dict[str, Any], name: str) -> tuple[str, Any]:
    """Return a tensor's file and name, for messages, and the tensor, which is not read yet."""
    from safetensors import SafetensorError
    need(name in stored.files, f"{stored.folder}: has no tensor {name}, which the model asks for")
    file, key = stored.files[name]
    path = os.path.join(stored.folder, file)
    opened[path] = opened.get(path) or open_safetensors(path, "pt")
    try:
        return f"{path}: {key}", opened[path].get_slice(key)
    except SafetensorError as error:  # the index describes other files
        raise ValueError(f"{path}: cannot read {key}: {error}") from None


def relative(box: Box, origin: Box) -> Box:
    """Return a box in coordinates whose zero is the beginning of `origin`."""
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(box, origin))


def weights_in(folder: str) -> Stored:
    """Find the weights in a folder. If it has both a single file and an index, use the single file,
    as transformers does. Raises ValueError if files are missing, or are of another format."""
    where, path = os.path.join(folder, "config.json"), os.path.join(folder, INDEX)
    config = read_json(where)
    architecture, tied = read_architecture(config, where), config.get("tie_word_embeddings", False)
    if os.path.isfile(os.path.join(folder, SINGLE)):
        files = dict.fromkeys(open_safetensors(os.path.join(folder, SINGLE), "np").keys(), SINGLE)
    else:
        need(os.path.isfile(path), f"{folder}: has no {SINGLE} and no {INDEX}: weights in another format, such as .bin "
                                   "or .pth, must be converted to safetensors")
        files = read_json(path).get("weight_map")
        need(isinstance(files, dict) and all(isinstance(file, str) for file in files.values()),
             f"{path}: weight_map must be an object of tensors and files")
    for file in sorted(set(files.values())):
        need(is_inside(file), f"{path} names {file}, which is outside of its folder")
        need(os.path.isfile(os.path.join(folder, file)), f"{folder}/{file}: is missing, {INDEX} names it")
    found = {}
    for key, file in files.items():
        name = plain_name(key)
        if name in found:
            raise ValueError(f"{folder}: has {found[name][1]} and {key}, which are names of one weight")
        found[name] = file, key
    return Stored(folder, architecture, tied is True, found, read_quantization(config, where))


def plain_name(key: str) -> str:
    """Return the name that a tensor has in the class: without the parts that wrappers add, and with
    the "model." that is missing if a model was saved without its head."""
    name = ".".join(part for part in key.split(".") if part not in WRAPPERS)
    return name if name.startswith(("model.", "lm_head.")) else "model." + name


def open_safetensors(path: str, framework: str) -> Any:
    from safetensors import SafetensorError, safe_open
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def open_bytes(stored: Stored, name: str, files: contextlib.ExitStack) -> tuple[BinaryIO, int]:
    """Return a stream of the bytes of a tensor, and how many there are. `files` closes the stream."""
    file, key = stored.files[name]
    path = os.path.join(stored.folder, file)
    open_safetensors(path, "np")  # raises ValueError for a damaged file
    stream = files.enter_context(open(path, "rb"))
    header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    need(key in header, f"{path}: cannot read {key}: it is not there")
    first, last = header[key]["data_offsets"]
    stream.seek(first, os.SEEK_CUR)
    return stream, last - first


def is_inside(path: str) -> bool:
    """Return whether a relative path stays inside its folder."""
    return not os.path.isabs(path) and os.pardir not in path.split(os.sep)


# ---- tokenizers ---------------------------------------------------------------------------------------------------

def owns_folder(tokenizer: Path) -> bool:
    """Return whether the files beside a tokenizer, such as chat templates, belong to it.

    They do unless the folder also has a different tokenizer.json, which then owns them.
    """
    other = tokenizer.with_name("tokenizer.json")
    return tokenizer == other or not other.is_file() or other.read_bytes() == tokenizer.read_bytes()


def tokenizer_files(tokenizer: Path) -> list[Path]:
    """Return the files that transformers reads for a tokenizer; the tokenizer itself is the last.

    tokenizer: the path of a tokenizer.json, or of a file of this format with another name. If there
        is no such file, the others are returned: older models have only a tokenizer.model.
    """
    files = []
    if owns_folder(tokenizer):
        files = [tokenizer.with_name(name) for name in BESIDE_TOKENIZER]
        files += sorted(tokenizer.with_name(MORE_TEMPLATES).glob("*.jinja"))
    return [file for file in (*files, tokenizer) if file.is_file()]


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the files of a tokenizer into another folder, where its name is tokenizer.json.

    Files there are replaced, one by one. No file is ever half a copy. tokenizer.json is copied last.
    So in a folder that had none, it appears only when the other files are there, even if the copy is
    killed. If the folder had one, a killed copy may leave files of both tokenizers.
    """
    for file in tokenizer_files(tokenizer):
        name = "tokenizer.json" if file == tokenizer else file.relative_to(tokenizer.parent)
        target = folder / name
        if not (target.exists() and target.samefile(file)):
            target.parent.mkdir(exist_ok=True)
            unfinished = target.with_name(target.name + ".tmp")
            shutil.copyfile(file, unfinished)
            unfinished.rename(target)


# ---- writing --------------------------------------------------------------------------------------------------------

def export(folder: str, model: Any, specs: list[Spec], source: Source, dtype: str, *, rank: int = 0, world: int = 1,
           published: str = "", tokens: dict[str, Any] | None = None, shard_bytes: int = 5 * 10**9, seq: int = 2048,
           write_tokenizer: Callable[[], Any] = lambda: None,
           together: Callable[[Callable], Any] = lambda work: work()) -> None:
    """Write a config.Model and its parameters as transformers opens them. All ranks call it, and
    the export is complete when all of them have returned.

    An earlier export in the folder is replaced. While files are written, the folder has no
    config.json. So nobody opens a mixture of two exports, even if this one is killed.

    specs: all parameters, in the same order on each rank. Multi-token prediction is left out: transformers lacks it.
    source: a function that returns any box of these parameters
    dtype: "bf16", "fp16" or "fp32"
    rank, world: this rank, and the number of ranks. A rank writes every world-th shard, and holds
        one at a time. Rank 0 also writes the other files.
    published: the folder of the model that training began with, or "". Its generation_config.json is
        kept. It is `folder` itself if a checkpoint is exported over that model.
    tokens: the ids of special tokens, by the names in TOKENS
    shard_bytes: the largest size of a shard, unless the shard has only one tensor
    seq: the longest sample in training, in tokens, for max_position_embeddings
    write_tokenizer: writes the tokenizer's files into the folder; rank 0 calls it
    together: calls a function on all ranks, and returns its result when all have finished

    Raises ValueError if no class implements the model, or if the folder cannot be written to.
    """
    import torch
    architecture = class_for_export(model)
    torch_dtype = getattr(torch, DTYPES[dtype])
    specs = [spec for spec in specs if not spec.name.startswith(f"layers.{model.layers}.")]  # the block of --mtp
    shards = plan_shards(specs, architecture, torch_dtype, shard_bytes)

    # Three phases follow. Each ends on all ranks before the next begins.
    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        os.makedirs(folder, exist_ok=True)
        if rank > 0:
            return {}, {}
        contents = json_of_export(model, architecture, dtype, published, tokens or {}, seq)
        Path(folder, "config.json").unlink(missing_ok=True)  # after reading: `published` may be the same folder
        return contents

    config, generation = together(prepare)

    def write_shards() -> None:
        for file in list(shards)[rank::world]:
            write_shard(os.path.join(folder, file), shards[file], source, torch_dtype)

    together(write_shards)

    def write_others() -> None:
        if rank == 0:
            write_index(folder, shards, torch_dtype)
            Path(folder, GENERATION).unlink(missing_ok=True)  # an earlier export may have left one
            if generation:
                Path(folder, GENERATION).write_text(json.dumps(generation, indent=2))
            write_tokenizer()
            unfinished = Path(folder, "config.json.tmp")
            unfinished.write_text(json.dumps(config, indent=2))
            unfinished.rename(Path(folder, "config.json"))

    together(write_others)


def json_of_export(model: Any, architecture: str, dtype: str, published: str, tokens: dict[str, Any],
                   seq: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and generation_config.json, for arguments of `export`."""
    theirs, generation = published_json(published)
    longest = theirs.get("max_position_embeddings", 0)
    longest = max(seq, longest) if is_of_kind(longest, 1) else seq
    # With dynamic rotary scaling, max_position_embeddings is where the scaling begins. config_of
    # sets it, and wins.
    config = {"max_position_embeddings": longest} | config_of(model, architecture) | {"torch_dtype": DTYPES[dtype]}
    # Write all TOKENS, even as null: if one is absent, transformers uses Llama 2's.
    config |= dict.fromkeys(TOKENS) | tokens
    generation |= {name: config[name] for name in TOKENS if config[name] is not None}
    return config, generation


def write_index(folder: str, shards: dict[str, dict[str, tuple[Spec, Box]]], dtype: torch.dtype) -> None:
    """Write the index of several shards, and remove the weights of an earlier export."""
    for old in os.listdir(folder):  # transformers would prefer an old model.safetensors to a new index
        if old == INDEX or (re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", old) and old not in shards):
            os.remove(os.path.join(folder, old))
    if len(shards) > 1:
        size = sum(bytes_on_disk(spec, box, dtype) for shard in shards.values() for spec, box in shard.values())
        files = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": size}, "weight_map": files}
        Path(folder, INDEX).write_text(json.dumps(index, indent=2))


def published_json(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json of a published model's folder; {} for each that is absent."""
    need(not folder or os.path.isdir(folder), f"{folder}: there is no such folder")

    def read(name: str) -> dict[str, Any]:
        path = os.path.join(folder, name)
        return read_json(path) if folder and os.path.isfile(path) else {}

    return read("config.json"), read(GENERATION)


def published_tokens(folder: str) -> dict[str, list[int]]:
    """Return the special tokens of a published model: name in TOKENS -> the tokens, [] if there are none."""
    config, generation = published_json(folder)
    found = {}
    for name in TOKENS:
        found[name] = []
        for content in (generation, config):  # in this order, because transformers generates by the first
            value = content.get(name)
            listed = value if isinstance(value, list) else [value]
            for token in listed:
                if type(token) is int and token >= 0 and token not in found[name]:
                    found[name].append(token)
    return found


def dtype_on_disk(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """Return a parameter's dtype in an export: fp32 for routers' biases, as in transformers."""
    import torch
    return torch.float32 if spec.name.endswith(".router.bias") else dtype


def bytes_on_disk(spec: Spec, box: Box, dtype: torch.dtype) -> int:
    from core.param import box_shape
    return math.prod(box_shape(box)) * dtype_on_disk(spec, dtype).itemsize


def plan_shards(specs: list[Spec], architecture: str, dtype: torch.dtype,
                shard_bytes: int) -> dict[str, dict[str, tuple[Spec, Box]]]:
    """Return the shards: file -> name of a tensor -> (its parameter, its box of the parameter)."""
    shards, room = [{}], shard_bytes
    for spec in specs:
        for name, box in tensors_on_disk(spec, architecture):
            size = bytes_on_disk(spec, box, dtype)
            if size > room and shards[-1]:
                shards.append({})
                room = shard_bytes
            shards[-1][name] = spec, box
            room -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}


def write_shard(path: str, shard: dict[str, tuple[Spec, Box]], source: Source, dtype: torch.dtype) -> None:
    """Write a file of weights. shard: as in plan_shards. Raises ValueError if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from core.param import box_shape
    tensors = {}
    for name, (spec, box) in shard.items():
        values = source(spec, box).to("cpu", dtype_on_disk(spec, dtype))
        tensors[name] = values.reshape(box_shape(box)[-2:]).contiguous()  # an expert's box begins with a 1
    try:
        save_file(tensors, path + ".tmp", metadata={"format": "pt"})
        mask = os.umask(0)  # os.umask returns the mask only when it sets another
        os.umask(mask)
        os.chmod(path + ".tmp", 0o666 & ~mask)  # safetensors 0.8 lets nobody else read its files
        os.replace(path + ".tmp", path)
    except (OSError, SafetensorError) as error:
        Path(path + ".tmp").unlink(missing_ok=True)
        raise ValueError(f"{path}: cannot be written: {error}") from None
