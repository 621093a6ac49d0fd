"""Every setting of a run, in one place.

A setting is declared once, in the dataclasses below: its name, default and help. The name is also the flag
(`--global-batch 32`), the attribute (`config.batch.global_batch`) and what metrics call it.

    python train.py --preset smollm-135m --layers 12 --global-batch=64 @more.args

A preset fills the model section, and how experts are balanced; flags override any field. `@file` reads flags from a
file, where `#` begins a comment; as the value of a flag it is text. `read` reads the command line. core/rules.py
completes and checks what was read. ValueErrors are one line: the flag, its value, what works.

This file needs the standard library only, so that a typo in a flag is answered at once, not after torch's import.
"""
import argparse
import contextlib
import difflib
import math
import os
import shlex
import sys
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from schedules import SCHEDULES

TEXT_VOCAB = 257  # 256 byte values and the token that begins a document
# --cp-style, see cp.py: ulysses exchanges heads, the others attend by blocks of keys.
CP_STYLES = ("allgather", "ring", "ulysses")
OFFLOADS = "none", "optimizer", "activations", "both"
# --optimizer: names of the moments, tensors as large as the weights that it remembers between steps. Of muon, those of
# matrices: the other weights have adamw's. optimizers.py has the rules; plan/ counts the moments' bytes.
OPTIMIZERS = {
    "adamw": ("m", "v"),
    "muon": ("m",),
    "sgd": (),
}


class Fp8Recipe(NamedTuple):
    """grad: the format of gradients; all else is in E4M3. blocks: a scale per block, not tensor."""
    grad: str
    blocks: bool


FP8_RECIPES = {
    "tensorwise": Fp8Recipe("e5m2", blocks=False),
    "blockwise": Fp8Recipe("e4m3", blocks=True),
}


def padded_length(seq: int, cp: int, tp: int = 1) -> int:  # here because plan/ needs both paddings, without torch
    """seq rounded up so that each of cp ranks has two chunks of equal length, and tp ranks can share these tokens."""
    return -(-seq // (2 * cp * tp)) * 2 * cp * tp if cp > 1 else seq


def padded_elements(count: int, shards: int) -> int:
    """count rounded up to equal shards of 16 elements or a multiple, for kernels and NCCL. One shard is not padded."""
    return -(-count // (16 * shards)) * 16 * shards if shards > 1 else count


# ---- the settings ---------------------------------------------------------------------------------------------------

# Beyond these a check would take minutes.
LARGEST, MOST_LAYERS, MOST_MICRO_BATCHES, MOST_WEIGHT = 2**40, 10_000, 100_000, 10_000


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def need(condition: bool, line: str) -> None:
    """Raise ValueError(line) unless the condition holds."""
    if not condition:
        raise ValueError(line)


def setting(default, help, choices=None, most=LARGEST, positive=False, needs="", auto=False):
    """Declare a field and its flag.

    A number must be from 0 (positive: above 0) to `most`. auto: the default is no such number; it stands for a value
    that follows from other settings, and one writes it as `auto`. needs: the setting without which this one changes
    nothing; the command line then refuses it.
    """
    initial = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    about = {"help": help, "choices": choices, "most": most, "positive": positive, "needs": needs, "auto": auto}
    return field(**initial, metadata=about)


def positive(default, help, most=LARGEST, needs="", auto=False):
    return setting(default, help, most=most, positive=True, needs=needs, auto=auto)


@dataclass
class Model:
    preset: str = setting("tiny", "an architecture; the flags below override its fields: see PRESETS in core/config.py")
    layers: int = positive(4, "transformer blocks", most=MOST_LAYERS)
    hidden: int = positive(128, "width of the residual stream")
    heads: int = positive(4, "query heads")
    kv_heads: int = positive(2, "key and value heads, each shared by heads / kv-heads query heads")
    head_dim: int = positive(0, "width of a head; auto: hidden / heads", auto=True)
    ffn: int = positive(352, "width of the SwiGLU layer")
    vocab: int = positive(TEXT_VOCAB, "tokens in the vocabulary; text needs 257: the bytes and the document separator")
    tied: bool = setting(False, "tied embeddings: one table for the input and the output")
    rope_theta: float = positive(10000.0, "base of rotary embedding")
    rope_scaling: float = positive(1.0, "rotary scaling by the rule of Llama 3.1: 8 in Llama 3.1, 32 in 3.2; 1: off")
    norm_eps: float = positive(1e-5, "added to the mean square in RMSNorm")
    qk_norm: bool = setting(False, "RMSNorm on every query and key head (Qwen 3)")
    qkv_bias: bool = setting(False, "biases on queries, keys and values (Qwen 2)")
    kv_lora_rank: int = setting(0, "latent attention (DeepSeek): width of what keys and values are made of; 0: none")
    q_lora_rank: int = setting(0, "width of what queries are made of; 0: the hidden state's",
                               needs="kv_lora_rank")
    rope_head_dim: int = setting(0, "how much of head-dim is rotated, by one key for all heads",
                                 needs="kv_lora_rank")
    v_head_dim: int = positive(0, "width of a value head; auto: head-dim", needs="kv_lora_rank", auto=True)
    window: int = setting(0, "sliding window: a token sees itself and the window - 1 before it; 0: all before it")
    full_attention_every: int = setting(0, "every so many layers one has full attention; 0: none has",
                                needs="window")
    experts: int = setting(0, "experts in each layer, in place of its feed-forward; 0: none, a dense model")
    top_k: int = positive(2, "experts that a token is sent to", needs="experts")
    expert_ffn: int = positive(0, "width of an expert; auto: ffn", needs="experts", auto=True)
    shared_experts: int = setting(0, "experts that every token is sent to, besides its top-k", needs="experts")
    dense_layers: int = setting(0, "how many of the first layers have a dense feed-forward instead of experts",
                                needs="experts")
    router: str = setting("softmax", "function from the router's logits to scores", ("softmax", "sigmoid"),
                          needs="experts")
    router_norm: bool = setting(True, "normalise the weights of a token's top-k experts to sum to 1", needs="experts")
    router_scale: float = positive(1.0, "multiplies the weights of a token's top-k experts", needs="experts")
    expert_groups: int = positive(1, "group-limited routing: how many groups the experts form", needs="experts")
    top_groups: int = positive(1, "groups, those with the best scores, whose experts a token may be sent to",
                               needs="experts")
    mtp: bool = setting(False, "multi-token prediction: one more block, used in training alone, learns to predict the "
                               "token after the next (DeepSeek-V3)")

    @property
    def blocks(self) -> int:
        """The layers, and the block of multi-token prediction, whose number is that of the last layer plus one."""
        return self.layers + self.mtp

    @property
    def rotated_dim(self) -> int:
        """How many channels of a query or key head are rotated."""
        return self.rope_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    def window_of(self, layer: int) -> int:
        """How many tokens a token of this layer sees; 0: all before it."""
        return 0 if self.full_attention_every and (layer + 1) % self.full_attention_every == 0 else self.window


@dataclass
class Grid:
    grid: str = setting("given", "auto: axes, ZeRO level, micro-batch, schedule and recomputation that no flag gives "
                                 "become what plan/search.py predicts to be the fastest here", ("given", "auto"))
    dp: int = positive(-1, "data parallel ranks; auto: all that pp, cp and tp leave", auto=True)
    cp: int = positive(1, "context parallel ranks: each has 1/cp of every sequence")
    cp_style: str = setting("allgather", "allgather: gather keys and values; ring: send them round a ring; ulysses: "
                                         "all-to-all from sequence to head shards", CP_STYLES)
    cp_zigzag: str = setting("sequence", "what is split so that ranks have equal work: each sequence; or, with "
                                         "--mask-documents and best with kernels that skip hidden tiles, each document",
                             ("sequence", "document"))
    cp_ulysses: int = positive(1, "neighbours that exchange heads as in ulysses; and keys, by --cp-style, with others")
    tp: int = positive(1, "tensor parallel ranks")
    pp: int = positive(1, "pipeline ranks: each has the layers of one pipeline stage, or of several")
    schedule: str = setting("1f1b", "pipeline schedule; python -m run.timeline --schedule NAME draws it",
                            tuple(name for name, schedule in SCHEDULES.items() if schedule.runs))
    virtual_stages: int = positive(0, "model chunks (pipeline stages) per rank; auto: as many as the schedule needs",
                                   auto=True)
    ep: int = positive(1, "expert parallel ranks, among those of dp, cp and tp: each has 1/ep of the experts",
                       needs="experts")
    zero: int = setting(0, "ZeRO level: data parallel ranks shard 1 optimizer state, 2 also gradients, 3 also weights",
                        (0, 1, 2, 3))
    dp_replicate: int = positive(1, "hybrid sharding: so many replicas, each sharded over dp x cp / dp-replicate ranks",
                                 needs="zero")
    sp: str = setting("on", "sequence parallelism: between layers each tensor parallel rank has 1/tp of the tokens; "
                            "async: its communication overlaps matmuls, shard by shard; GPUs need NVLink",
                      ("off", "on", "async"))
    bucket_mb: float = setting(25.0, "a gradient bucket: whole layers, until it has so many MB (10^6); 0: one layer")

    @property
    def head_ranks(self) -> int:
        """How many neighbouring context parallel ranks exchange heads; the others exchange keys and values."""
        return self.cp if self.cp_style == "ulysses" else self.cp_ulysses

    @property
    def document_ranks(self) -> int:
        """Between how many ranks that exchange keys a document is split; 1: none is, but whole sequences are."""
        return self.cp // self.head_ranks if self.cp_zigzag == "document" else 1

    @property
    def sequence_parallel(self) -> bool:
        return self.sp != "off"

    @property
    def sequence_shards(self) -> int:
        """How many tensor parallel ranks share the tokens between layers."""
        return self.tp if self.sequence_parallel else 1

    @property
    def v_shaped(self) -> bool:
        """Whether the last pipeline stage is on the rank of the first."""
        return SCHEDULES[self.schedule].v_shaped


@dataclass
class Precision:
    dtype: str = setting("auto", "of weights and activations; auto: bf16 on GPU, fp32 on CPU; fp16 scales the loss",
                         ("auto", "bf16", "fp16", "fp32", "fp64"))
    fp8: str = setting("none", "linear layers of blocks multiply in FP8; tensorwise: one scale per tensor, on which tp "
                       "ranks wait to agree, gradients in E5M2; blockwise: one per 1x128 or 128x128 block",
                       ("none", *FP8_RECIPES))
    fp8_ends: bool = setting(True, "FP8 in the first and the last block, too")
    moments_dtype: str = setting("auto", "dtype of AdamW's moments; auto: fp32, or fp64 in fp64 runs", ("auto", "bf16"))
    reduce_dtype: str = setting("fp32", "of gradients summed over ranks; over micro-batches: fp32", ("fp32", "bf16"))
    attention: str = setting("auto", "sdpa: torch's fused kernels; triton: ours; auto: torch's, but on a GPU ours for "
                                     "documents and windows; math: plain torch, which saves scores",
                             ("auto", "triton", "sdpa", "math"))
    kernels: str = setting("auto", "on GPUs ours, torch where one does not run; torch: none of ours", ("auto", "torch"))
    recompute: str = setting("none", "what backward recomputes; selective: norms, SwiGLU, scores, keys and values of "
                                     "latents; full: layers", ("none", "selective", "full"))
    offload: str = setting("none", "what is in the host's memory: optimizer: master weights and moments, which the CPU "
                                   "updates; activations: the inputs of blocks that --recompute full saves", OFFLOADS)

    def fp8_recipe(self) -> Fp8Recipe | None:
        return FP8_RECIPES.get(self.fp8)

    def offloads(self, what: str) -> bool:
        return self.offload in (what, "both")


@dataclass
class Batch:
    seq_len: int = positive(256, "tokens per sequence")
    micro_batch: int = positive(0, "sequences a rank computes at once; auto: all of a step; with pp 1/(2 pp) of it",
                                auto=True)
    global_batch: int = positive(16, "sequences per step, over all ranks and micro-batches")
    batch_ramp: str = setting("", 'replaces global-batch: "16@0,32@1e6" is 16 sequences, from 1e6 tokens seen on 32')

    def ramp(self) -> list[tuple[int, float]]:
        """(sequences per step, tokens seen from which on that holds), in order. Raises ValueError if malformed."""
        if not self.batch_ramp:
            return [(self.global_batch, 0.0)]
        with contextlib.suppress(ValueError):
            ramp = [(int(size), float(start)) for size, start in
                    (stage.split("@") for stage in self.batch_ramp.split(","))]
            sizes, starts = zip(*ramp)
            in_order = starts[0] == 0 and all(a < b for a, b in zip(starts, starts[1:]))
            if in_order and min(sizes) > 0 and max(sizes) <= LARGEST:
                return ramp
        raise ValueError(f'--batch-ramp "{self.batch_ramp}": write sequences@tokens, from 0 tokens on and in order, '
                         'such as "16@0,32@1e6"')


@dataclass
class Optim:
    optimizer: str = setting("adamw", "the update rule; muon: of matrices, the rest by adamw", tuple(OPTIMIZERS))
    lr: float = positive(0.0, "peak learning rate; auto: 1.2 / hidden, as Llama 3 from 8B to 405B, but at most 2e-3",
                         auto=True)
    lr_schedule: str = setting("cosine", "after the warmup; wsd: constant, then linear over the last fifth",
                               ("cosine", "wsd", "constant"))
    min_lr: float = setting(-1.0, "final learning rate of cosine and wsd; auto: lr / 10", auto=True)
    warmup: int = setting(-1, "steps of linear warmup; auto: 20, but at most a tenth of the run", auto=True)
    weight_decay: float = setting(0.1, "decoupled decay of matrices; norms and biases are not decayed")
    betas: tuple = setting((0.9, 0.95), "decay rates of AdamW's averages of the gradient and of its square")
    z_loss: float = setting(0.0, "coefficient of the z-loss, the square of each token's log-sum-exp of logits")
    mtp_weight: float = positive(0.3, "coefficient of --mtp's loss (DeepSeek-V3: 0.3, later 0.1)", needs="mtp")
    aux_loss: float = setting(0.01, "coefficient of the auxiliary loss that balances experts (Switch Transformer)",
                              needs="experts")
    aux_over: str = setting("sequence", "--aux-loss balances the tokens of each", ("sequence", "micro-batch"),
                            needs="experts")
    router_z_loss: float = setting(0.0, "coefficient of the routers' z-loss", needs="experts")
    router_bias_rate: float = setting(0.0, "how far a step moves the biases that balance experts (DeepSeek-V3: 0.001)",
                               needs="experts")
    grad_clip: float = setting(1.0, "largest norm of the whole gradient; 0: no clipping")
    steps: int = setting(200, "optimizer steps")
    seed: int = setting(0, "initial weights and order of the samples")


@dataclass
class Data:
    data: list = setting([], "text (files, folders) or tokens (.bin, .npy); by default the sources of Python's library")
    data_weights: str = setting("", "3,1 mixes the paths of --data: of 4 samples 3 are from the first, 1 is from the "
                                    "second; by default they are one stream, end to end")
    data_dtype: str = setting("auto", "of headerless .bin; auto: uint16 if --vocab fits", ("auto", "uint16", "uint32"))
    separator: int = setting(-1, "token that begins a document in token files; auto: the format's, or each file is one",
                             auto=True)
    mask_documents: bool = setting(False, "no attention across documents, and positions start anew in each")
    val_data: list = setting([], "evaluate the loss on this text or these tokens")
    eval_every: int = setting(0, "steps between evaluations; 0: at the end only", needs="val_data")
    eval_steps: int = positive(8, "global batches per evaluation, at most all there are")

    def weights(self) -> tuple[int, ...]:
        """Of each path of --data, without a common divisor; () if the data is no mixture. Raises ValueError if
        malformed."""
        words = self.data_weights.split(",") if self.data_weights else []
        if all(word.isdecimal() for word in words) and len(words) in (0, len(self.data)):
            weights = tuple(map(int, words))
            if 0 not in weights and sum(weights) <= MOST_WEIGHT:
                return tuple(weight // math.gcd(*weights) for weight in weights)
        raise ValueError(f'--data-weights "{self.data_weights}": write a whole number above 0 for each of the '
                         f'{len(self.data)} paths of --data, together at most {MOST_WEIGHT:,}, such as "3,1"')


@dataclass
class Run:
    checkpoint_dir: str = setting("", "save checkpoints in this folder, on a file system that all ranks share")
    save_every: int = setting(0, "steps between checkpoints; 0: after the last step only", needs="checkpoint_dir")
    keep_checkpoints: int = setting(2, "how many checkpoints stay in --checkpoint-dir; 0: all")
    resume: str = setting("", "a checkpoint, or a folder of them; auto: the newest whole one in --checkpoint-dir, if "
                              "any; settings that no flag gives are the checkpoint's")
    allow_mismatch: bool = setting(False, "on resume, accept changed data or settings; with --init-from, unused "
                                          "weights")
    init_from: str = setting("", "start from weights and config.json as published on Hugging Face, in this folder")
    export_hf: str = setting("", "after training, write the weights here as transformers reads them; needs "
                                 "--checkpoint-dir")
    metrics: str = setting("", "append each step's metrics to this file, or /dev/stdout, in JSON")
    profile: str = setting("", "write a trace of steps 3 to 5 in this folder, and print what takes longest")
    memory_snapshot: str = setting("", "write torch's snapshot of rank 0's GPU memory in the first six steps")
    sample_prompt: str = setting("def ", "after training on text, continue this prompt; '' for none")
    device: str = setting("auto", "auto: GPUs when there is one per rank", ("auto", "cpu", "cuda"))
    dry_run: str = setting("", "RANK/GPUS: print what a step needs on that rank of so many, run on fake tensors")
    timeout: float = positive(600.0, "seconds a collective may wait for a rank before the run fails", most=1e7)
    time_limit: float = setting(0.0, "minutes after which the run saves and ends, as after SIGTERM or Ctrl-C; 0: none")
    max_skipped: int = setting(25, "fail after so many steps in a row whose gradient is not finite; 0: never")
    rewind: int = setting(0, "instead of ending by --max-skipped, go back to the checkpoint before these steps and "
                             "leave out their samples, this many times in a run")
    check_replicas: int = setting(0, "steps between comparisons of what ranks must hold alike, to the bit; 0: never")

    def dry_run_as(self) -> tuple[int, int]:
        """(rank, how many there are). Raises ValueError if malformed."""
        rank, _, ranks = self.dry_run.partition("/")
        need(rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks),
             f"--dry-run {self.dry_run}: write RANK/GPUS, such as 0/64 for the first of 64")
        return int(rank), int(ranks)


@dataclass
class Config:
    model: Model
    grid: Grid
    precision: Precision
    batch: Batch
    optim: Optim
    data: Data
    run: Run
    before_defaults: dict = field(default_factory=dict)  # all settings before `complete`: what other runs inherit
    grid_is_example: bool = False  # whether run/cli.py chose the grid, because the command line names none
    arguments: list = field(default_factory=list)  # the command line
    ranks: int = 1  # the world size

    def value(self, name: str) -> Any:
        return getattr(getattr(self, SECTION_OF[name]), name)

    def fp8_layers(self) -> range:
        """The blocks whose linear layers multiply in FP8; never that of multi-token prediction."""
        skipped = 0 if self.precision.fp8_ends else 1
        return range(skipped, self.model.layers - skipped) if self.precision.fp8 != "none" else range(0)


# ---- presets --------------------------------------------------------------------------------------------------------

def sizes(layers, hidden, heads, kv_heads, ffn, vocab, **rest):
    return dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, **rest)


LLAMA3 = dict(vocab=128256, rope_theta=500000.0)
QWEN = dict(vocab=151936, rope_theta=1000000.0, norm_eps=1e-6)
QWEN3 = dict(QWEN, qk_norm=True, head_dim=128)
LATENT = dict(kv_lora_rank=512, q_lora_rank=1536, head_dim=192, rope_head_dim=64, v_head_dim=128)
DEEPSEEK = dict(LATENT, top_k=8, expert_ffn=2048, router="sigmoid", shared_experts=1, norm_eps=1e-6,
                router_bias_rate=1e-3)
PRESETS = {  #             layers hidden heads kv    ffn
    "tiny": {},
    "smollm-135m":    sizes(30,   576,   9,   3,  1536, 49152, tied=True),
    "smollm-360m":    sizes(32,   960,  15,   5,  2560, 49152, tied=True),
    "smollm-1.7b":    sizes(24,  2048,  32,  32,  8192, 49152, tied=True),
    "llama-2-7b":     sizes(32,  4096,  32,  32, 11008, 32000),
    "llama-2-13b":    sizes(40,  5120,  40,  40, 13824, 32000),
    "llama-2-70b":    sizes(80,  8192,  64,   8, 28672, 32000),
    "llama-3.2-1b":   sizes(16,  2048,  32,   8,  8192, **LLAMA3, tied=True, rope_scaling=32.0),
    "llama-3.2-3b":   sizes(28,  3072,  24,   8,  8192, **LLAMA3, tied=True, rope_scaling=32.0),
    "llama-3.1-8b":   sizes(32,  4096,  32,   8, 14336, **LLAMA3, rope_scaling=8.0),
    "llama-3.1-70b":  sizes(80,  8192,  64,   8, 28672, **LLAMA3, rope_scaling=8.0),
    "llama-3.1-405b": sizes(126, 16384, 128,  8, 53248, **LLAMA3, rope_scaling=8.0),
    "qwen2.5-0.5b":   sizes(24,   896,  14,   2,  4864, **QWEN, tied=True, qkv_bias=True),
    "qwen3-0.6b":     sizes(28,  1024,  16,   8,  3072, **QWEN3, tied=True),
    "qwen3-8b":       sizes(36,  4096,  32,   8, 12288, **QWEN3),
    "qwen3-32b":      sizes(64,  5120,  64,   8, 25600, **QWEN3),
    "tiny-moe":       sizes(4,    128,   4,   2,   352, TEXT_VOCAB, experts=8, top_k=2, expert_ffn=128),
    "mixtral-8x7b":   sizes(32,  4096,  32,   8, 14336, 32000, rope_theta=1e6, experts=8, top_k=2, expert_ffn=14336),
    "qwen3-30b-a3b":  sizes(48,  2048,  32,   4,  6144, **QWEN3, experts=128, top_k=8, expert_ffn=768),
    # without its block for multi-token prediction, and as it is before its context is extended (YaRN)
    "deepseek-v3":    sizes(61,  7168, 128, 128, 18432, 129280, **DEEPSEEK, experts=256, dense_layers=3,
                            expert_groups=8, top_groups=4, router_scale=2.5, aux_loss=1e-4),
    "kimi-k2":        sizes(61,  7168,  64,  64, 18432, 163840, **DEEPSEEK, experts=384, dense_layers=1,
                            router_scale=2.827, rope_theta=50000.0, aux_loss=1e-3),
}

SECTIONS = dict(model=Model, grid=Grid, precision=Precision, batch=Batch, optim=Optim, data=Data, run=Run)
SECTION_OF = {f.name: name for name, section in SECTIONS.items() for f in fields(section)}
FIELDS: dict[str, Field] = {f.name: f for section in SECTIONS.values() for f in fields(section)}


# Names that settings had: a flag of that name is refused with the new one, and checkpoints are read by this table.
RENAMED = {
    "seq": "seq_len",
    "clip": "grad_clip",
    "insist": "allow_mismatch",
    "doc_mask": "mask_documents",
    "moments": "moments_dtype",
    "bias_rate": "router_bias_rate",
    "window_every": "full_attention_every",
    "chunks": "virtual_stages",
    "out": "checkpoint_dir",
    "keep": "keep_checkpoints",
    "sample": "sample_prompt",
}
# What other trainers call a setting (Megatron-LM, torchtitan, transformers, nanoGPT): the error for a flag names ours.
IN_OTHER_TRAINERS = {
    "data_parallel_size": "dp", "data_parallel_shard_degree": "dp", "world_size": "dp",
    "tensor_model_parallel_size": "tp", "tensor_parallel_size": "tp", "tensor_parallel_degree": "tp",
    "pipeline_model_parallel_size": "pp", "pipeline_parallel_size": "pp", "pipeline_parallel_degree": "pp",
    "context_parallel_size": "cp", "context_parallel_degree": "cp",
    "expert_model_parallel_size": "ep", "expert_parallel_size": "ep", "expert_parallel_degree": "ep",
    "num_virtual_stages_per_pipeline_rank": "virtual_stages", "pipeline_parallel_schedule": "schedule",
    "sequence_parallel": "sp", "data_parallel_replicate_degree": "dp_replicate", "zero_stage": "zero",
    "use_distributed_optimizer": "zero", "num_layers": "layers", "n_layer": "layers", "num_hidden_layers": "layers",
    "hidden_size": "hidden", "n_embd": "hidden", "ffn_hidden_size": "ffn", "intermediate_size": "ffn",
    "num_attention_heads": "heads", "n_head": "heads", "num_query_groups": "kv_heads",
    "num_key_value_heads": "kv_heads", "kv_channels": "head_dim", "vocab_size": "vocab", "rotary_base": "rope_theta",
    "num_experts": "experts", "moe_router_topk": "top_k", "moe_ffn_hidden_size": "expert_ffn",
    "moe_aux_loss_coeff": "aux_loss", "moe_router_bias_update_rate": "router_bias_rate",
    "seq_length": "seq_len", "max_seq_len": "seq_len", "max_seq_length": "seq_len", "block_size": "seq_len",
    "micro_batch_size": "micro_batch", "per_device_train_batch_size": "micro_batch",
    "local_batch_size": "micro_batch", "batch_size": "global_batch", "global_batch_size": "global_batch",
    "gradient_accumulation_steps": "global_batch", "rampup_batch_size": "batch_ramp",
    "train_iters": "steps", "max_steps": "steps", "max_iters": "steps", "learning_rate": "lr",
    "lr_decay_style": "lr_schedule", "lr_scheduler_type": "lr_schedule", "lr_warmup_iters": "warmup",
    "warmup_steps": "warmup", "warmup_iters": "warmup", "clip_grad": "grad_clip", "max_norm": "grad_clip",
    "max_grad_norm": "grad_clip", "wd": "weight_decay", "bf16": "dtype", "fp16": "dtype", "fp8_format": "fp8",
    "recompute_granularity": "recompute", "activation_checkpointing": "recompute",
    "gradient_checkpointing": "recompute", "cpu_offload": "offload", "attention_backend": "attention",
    "data_path": "data", "dataset_path": "data", "eval_interval": "eval_every", "eval_iters": "eval_steps",
    "save": "checkpoint_dir", "output_dir": "checkpoint_dir", "out_dir": "checkpoint_dir", "load": "resume",
    "resume_from_checkpoint": "resume", "save_interval": "save_every", "save_total_limit": "keep_checkpoints",
    "model_name_or_path": "init_from", "distributed_timeout_minutes": "timeout", "exit_duration_in_mins": "time_limit",
}

# ---- names, kinds and ranges of settings ----------------------------------------------------------------------------

def name_of(asked: str) -> str:
    """The setting in "--sp async": the inverse of `flag`."""
    return asked.split()[0].removeprefix("--").replace("-", "_")


def written(name: str, value: Any) -> str:
    """A setting's value as one writes it after its flag."""
    declared = FIELDS[name]
    return "auto" if declared.metadata["auto"] and value == declared.default else str(value)


def is_of_kind(value: Any, example: Any) -> bool:
    """Whether a value of a JSON file is of the example's kind. A float may be written as a whole number. The entries of
    a list must be like the example's first entry, or text if the example is empty."""
    if isinstance(example, (list, tuple)):
        first = example[0] if example else ""
        return isinstance(value, (list, tuple)) and all(is_of_kind(entry, first) for entry in value)
    return type(value) in ((int, float) if isinstance(example, float) else (type(example),))


def problem_of(name: str, value: Any) -> str:
    """What a setting must be, if this value of its kind is not possible; else ""."""
    declared = FIELDS[name]
    choices, most, above = declared.metadata["choices"], declared.metadata["most"], declared.metadata["positive"]
    if choices:
        return "" if value in choices else f"must be one of {', '.join(map(str, choices))}"
    if declared.type not in (int, float) or value == declared.default:
        return ""
    if not (value > 0 if above else value >= 0):
        return f"must be {'above 0' if above else '0 or more'}{', or auto' if declared.metadata['auto'] else ''}"
    return "" if value <= most else f"must be at most {most:,}"


# ---- reading the command line ---------------------------------------------------------------------------------------

def expand(arguments: list[str], inside: tuple[str, ...] = ()) -> list[str]:
    """`@file` becomes the flags in it, but for the value of a flag, as in `--sample-prompt @dataclass`;
    `--global_batch=8` becomes `--global-batch=8`. inside: the files being read."""
    out: list[str] = []
    for argument in arguments:
        if argument.startswith("@") and not (out and takes_one_value(out[-1])):
            path = argument[1:]
            need(os.path.isfile(path), f"{argument}: there is no file {path}")
            need(path not in inside, f"{argument}: the file reads itself")
            try:
                words = shlex.split(Path(path).read_text(encoding="utf-8-sig"), comments=True)  # without a BOM
            except (OSError, ValueError) as error:
                raise ValueError(f"{argument}: cannot be read: {error}") from None
            out += expand(words, (*inside, path))
        else:
            name, equals, value = argument.partition("=")
            out.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return out


def takes_one_value(word: str) -> bool:
    """Whether this is a flag of train.py whose value is the next word."""
    field = FIELDS.get(name_of(word)) if word.startswith("--") else None
    return field is not None and field.type not in (bool, list)


EXIT_CODES = ("Exit codes: 0: done, or saved and ended as asked (SIGTERM, Ctrl-C, --time-limit); 1: a rank failed, and "
              "the last line of train.py says why; 2: these flags, this data or this checkpoint cannot run; 128 + the "
              "signal's number: a second signal. Under torchrun every code but 0 becomes 1.")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        message = message.removeprefix("argument ")
        if message.endswith("expected one argument"):
            name = message.partition(":")[0]
            message += f"; one that begins with - is written as {name}=VALUE"
        raise ValueError(message)


def make_parser(sections: dict[str, type] = SECTIONS, description: str | None = "Train a Llama-style model.",
                usage: str = "torchrun --nproc_per_node=8 train.py [flags] [@file of flags]") -> Parser:
    """One flag a field; values stay as they were typed, for `read_value`. What is not given stays absent, so that a
    preset knows what it may fill. Only train.py's text is wrapped in --help: other descriptions are docstrings, which
    have lines of their own."""
    is_train = sections is SECTIONS
    parser = Parser(usage=usage, allow_abbrev=False, argument_default=argparse.SUPPRESS, description=description,
                    epilog=EXIT_CODES if is_train else None,
                    formatter_class=argparse.HelpFormatter if is_train else argparse.RawDescriptionHelpFormatter)
    for name, section in sections.items():
        group = parser.add_argument_group(name)
        for f in fields(section):
            choices, default = f.metadata["choices"], f.default
            if f.type is bool:
                kwargs, default = dict(action=argparse.BooleanOptionalAction), "on" if default else "off"
            elif f.type is list:
                kwargs, default = dict(nargs="*", metavar="PATH"), ""
            else:
                kwargs = dict(metavar=f"{{{','.join(map(str, choices))}}}" if choices else f.type.__name__.upper())
                if f.type is tuple:
                    default = ",".join(map(str, default))
            if f.metadata["auto"]:
                default = "auto"
            shown = "" if default == "" else f" [{default}]"
            if f.metadata["needs"]:
                shown = f" (with {flag(f.metadata['needs'])}){shown}"
            group.add_argument(flag(f.name), help=f.metadata["help"] + shown, **kwargs)
    return parser


def read_value(field: Field, typed: str) -> Any:
    """The value of a flag. Raises ValueError, with what would work, for what is none."""
    asked, choices = f"{flag(field.name)} {typed or repr(typed)}", field.metadata["choices"]
    if choices:
        by_name = {str(choice): choice for choice in choices}
        need(typed in by_name, f"{asked}: use one of {', '.join(by_name)}")
        return by_name[typed]
    may_be_auto = field.metadata["auto"]
    if may_be_auto and typed == "auto":
        return field.default
    try:
        value = tuple(map(float, typed.split(","))) if field.type is tuple else field.type(typed)
    except ValueError:
        what = {int: "a whole number", float: "a number", tuple: "numbers with commas between them"}[field.type]
        such = f", such as {','.join(map(str, field.default))}" if field.type is tuple else ""
        raise ValueError(f"{asked}: write {what}{such}{' or auto' if may_be_auto else ''}") from None
    if may_be_auto:
        above = "above 0" if field.metadata["positive"] else "0 or more"
        need(value != field.default, f"{asked}: must be {above}, or auto")
    return value


def read_flags(parser: Parser, declared: dict[str, Field], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(name -> value of each flag that is given, the other words). Raises ValueError for what is no value."""
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        field = declared.get(name_of(name).removeprefix("no_")) if equals and name.startswith("--") else None
        if field and field.type is bool:
            raise ValueError(f"{argument}: takes no value: write {flag(field.name)} or --no-{flag(field.name)[2:]}")
    given, rest = parser.parse_known_args(arguments)
    return {name: read_value(declared[name], typed) if isinstance(typed, str) else typed
            for name, typed in vars(given).items()}, rest


def read(arguments: list[str]) -> dict[str, Any]:
    """The settings that a command line gives: name -> value. Raises ValueError for what is no setting or no value."""
    given, unknown = read_flags(make_parser(), FIELDS, expand(arguments))
    if unknown:
        raise ValueError(f"{unknown[0]}: {what_is_meant(unknown[0].partition('=')[0])}")
    return given


def what_is_meant(unknown: str) -> str:
    """What to write in place of a flag that there is not."""
    name = name_of(unknown) if unknown.startswith("--") else ""
    without_no = name.removeprefix("no_")
    if without_no in RENAMED:
        new = RENAMED[without_no]
        is_off = name != without_no and FIELDS[new].type is bool
        return f"this flag is called {flag(f'no_{new}' if is_off else new)} now"
    if name in IN_OTHER_TRAINERS:
        return f"unknown flag, see {flag(IN_OTHER_TRAINERS[name])} in --help"
    close = difflib.get_close_matches(unknown, map(flag, FIELDS), 1, 0.7)
    return f"unknown flag, did you mean {close[0]}?" if close else "unknown flag, --help lists all"


def read_known(section: type, arguments: list[str], usage: str) -> tuple[Any, list[str]]:
    """Flags that a command has besides those of train.py, or in their place, declared in a dataclass as settings are.
    Returns an instance of it, and what else the command line has. Raises ValueError for what is no value. --help prints
    the docstring of the file that declares them, the usage and the flags."""
    about = sys.modules[section.__module__].__doc__
    declared = {f.name: f for f in fields(section)}
    given, rest = read_flags(make_parser({"flags": section}, about, usage), declared, arguments)
    return section(**given), rest
