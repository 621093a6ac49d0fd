"""Every setting of a run, and the presets.

Each setting is a field of one of the dataclasses below. Its type, default and help text are declared there and nowhere
else. For example, the field `global_batch` of the dataclass Batch is

    --global-batch 32              a flag of train.py
    config.batch.global_batch      a value in the code
    "global_batch": 32             an entry in a checkpoint's run.json

A preset, such as `--preset llama-3.1-8b`, is an architecture. It sets the fields of the section
Model and, for models with experts, also how their load is balanced. Every flag that is given
overrides the preset. Flags can be put in a file:

    python train.py --preset smollm-135m --layers 12 --global-batch=64 @more.args

The settings come first, section by section. The presets follow, then the names that other programs use for these
settings, then the functions that read the command line. core/rules.py takes their result, fills in
the defaults that depend on other settings, and checks that the settings are consistent. The last
two functions of this file compute how sequences and buckets are padded.

A mistake raises ValueError with one line: the flag, its value and what would work. This file imports only the standard
library and schedules.py, which imports nothing of the project. So a mistyped flag is reported at once, and not after
torch has been imported.
"""
import argparse
import difflib
import math
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from schedules import SCHEDULES

# ---- how a setting is declared --------------------------------------------------------------------------------------

# Upper limits. Beyond these, checking a configuration would take minutes.
LARGEST = 2**40  # of any number without a limit of its own
MOST_LAYERS = 10_000
MOST_MICRO_BATCHES = 100_000
MOST_WEIGHT = 10_000  # the sum of --data-weights


def setting(default, help, choices=None, most=LARGEST, positive=False, needs="", auto=False):
    """Declare a setting: a dataclass field that is also a flag.

    help      the text in --help; make_parser adds `needs` and the default
    choices   the values that are allowed; None: every value of the field's type
    most      the largest number allowed
    positive  whether a number must be above 0; otherwise it must be 0 or more
    needs     another setting, without which this one has no effect: any value except the default is then an error
    auto      whether the default follows from other settings. The user writes it as `auto`. If true, `default` is a
              sentinel (an invalid number, such as -1) that means auto until rules.complete replaces it

    Some cases of `auto` are resolved elsewhere: --v-head-dim and two settings of the rotary embedding by properties of
    Model, --separator by the data files (run/data.py), and what --grid auto leaves open by plan/search.py. A text
    setting that may be auto, such as --dtype, has "auto" among its choices instead.
    """
    initial = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    about = {"help": help, "choices": choices, "most": most, "positive": positive, "needs": needs, "auto": auto}
    return field(**initial, metadata=about)


def positive(default, help, most=LARGEST, needs="", auto=False):
    """Declare a number that must be above 0."""
    return setting(default, help, most=most, positive=True, needs=needs, auto=auto)


def flag(name: str) -> str:
    """Return the flag of a setting: "--sp" for "sp", "--global-batch" for "global_batch"."""
    return "--" + name.replace("_", "-")


def need(condition: bool, line: str) -> None:
    """Raise ValueError(line) unless the condition holds."""
    if not condition:
        raise ValueError(line)


# ---- choices of settings, which other files implement ---------------------------------------------------------------

TEXT_VOCAB = 257  # text is read as bytes: 256 byte values, and one token that begins a document
# --cp-style, implemented in cp.py. "ulysses" exchanges heads; every other style exchanges keys and values.
CP_STYLES = ("allgather", "ring", "ulysses")
# What diloco.py adds to the state of a bucket: weights after the last exchange, and their momentum. All sites have the
# same.
OUTER_STATE = "outer", "outer_m"
SYNC_DTYPES = "fp32", "bf16", "int8"  # of what sites send each other; implemented in diloco.py
FAST_TURNS = {"llama3": 4.0, "yarn": 32.0}  # --rope-type -> what --rope-fast-turns auto is
OFFLOADS = "none", "optimizer", "activations", "both"
# --optimizer -> the moments that it keeps between steps: tensors as large as the weights. optimizers.py has the update
# rules; plan/ counts the moments' bytes. "muon" is for matrices only: all other weights are updated by "adamw".
OPTIMIZERS = {
    "adamw": ("m", "v"),
    "muon": ("m",),
    "sgd": (),
}


class Fp8Recipe(NamedTuple):
    """How --fp8 quantises. Weights and activations are always in the format E4M3."""
    grad: str  # the format of gradients, "e4m3" or "e5m2"
    blocks: bool  # whether each block of a tensor has a scale, in place of one scale for the whole tensor


FP8_RECIPES = {
    "tensorwise": Fp8Recipe("e5m2", blocks=False),
    "blockwise": Fp8Recipe("e4m3", blocks=True),
}


# ---- the settings ---------------------------------------------------------------------------------------------------

@dataclass
class Model:
    """The architecture: a Llama, dense or with experts."""
    preset: str = setting("tiny", help=(
        "The architecture that the other flags of this section start from, such as llama-3.1-8b or tiny-moe. "
        "PRESETS in core/config.py lists all. Flags override the preset."))
    layers: int = positive(4, "Number of transformer blocks.", most=MOST_LAYERS)
    hidden: int = positive(128, "Width of the residual stream.")
    heads: int = positive(4, "Number of query heads.")
    kv_heads: int = positive(2, "Number of key and value heads. heads / kv-heads query heads share each of them.")
    head_dim: int = positive(0, auto=True, help=(
        "Width of a query or key head, including the channels of --rope-head-dim. auto: hidden / heads."))
    ffn: int = positive(352, "Inner width of the feed-forward layer (SwiGLU).")
    vocab: int = positive(TEXT_VOCAB, help=(
        "Number of tokens in the vocabulary. Training on text files needs at least 257: the 256 byte values and a "
        "separator of documents."))
    tied: bool = setting(False, "Tie the embeddings: input embedding and output head share one table.")
    rope_theta: float = positive(10000.0, "Base of the rotary position embedding.")
    rope_scaling: float = positive(1.0, help=(
        "Factor by which the context is longer than --original-seq-len. Rotary frequencies are scaled for it, by the "
        "rule of --rope-type. The factor is 8 in Llama 3.1 and 32 in Llama 3.2. 1: no scaling."))
    rope_type: str = setting("llama3", choices=("llama3", "linear", "dynamic", "yarn"), help=(
        "Which rotary frequencies are scaled. llama3: the low ones, as in Llama 3.1. yarn: the low ones, as in "
        "DeepSeek-V3 and in Qwen's long contexts. linear: all, equally. dynamic: those of longer sequences than "
        "--original-seq-len, the more the longer they are."))
    original_seq_len: int = positive(8192, "Tokens of a sequence in the training before the context was extended.")
    rope_fast_turns: float = positive(0.0, auto=True, help=(
        "llama3, yarn: frequencies that turn at least this often in --original-seq-len tokens are not scaled, and "
        "those that turn at most once are divided by --rope-scaling. auto: 4 for llama3, 32 for yarn."))
    rope_attention_factor: float = positive(0.0, auto=True, help=(
        "yarn: factor on rotated queries and on rotated keys. auto: 0.1 ln(rope-scaling) + 1."))
    rope_mscale: float = setting(0.0, needs="kv_lora_rank", help=(
        "yarn: multiply attention scores by the square of 0.1 x this x ln(rope-scaling) + 1. DeepSeek-V3 has 1, and "
        "calls it mscale_all_dim. 0: no factor."))
    no_rope_every: int = setting(0, help=(
        "Leave the rotary embedding out in every N-th layer, as SmolLM3 does with 4. 0: every layer has it."))
    norm_eps: float = positive(1e-5, "Epsilon of RMSNorm, added to the mean square.")
    qk_norm: bool = setting(False, "Apply RMSNorm to every query and key head, as Qwen 3 does.")
    qkv_bias: bool = setting(False, "Add biases to queries, keys and values, as Qwen 2 does.")
    out_bias: bool = setting(False, "Add a bias to the output projection of attention.")
    ffn_bias: bool = setting(False, "Add biases to the three matrices of the feed-forward layer.")

    kv_lora_rank: int = setting(0, help=(
        "Use multi-head latent attention (MLA), as DeepSeek does: the width of the latent from which keys and values "
        "are computed. 0: ordinary attention."))
    q_lora_rank: int = setting(0, needs="kv_lora_rank", help=(
        "Width of the latent from which queries are computed. 0: queries are computed from the hidden state."))
    rope_head_dim: int = setting(0, needs="kv_lora_rank", help=(
        "How many channels of each query and key head are rotated: an even number above 0. All heads share this part "
        "of the key."))
    v_head_dim: int = positive(0, "Width of a value head. auto: --head-dim.", needs="kv_lora_rank", auto=True)

    window: int = setting(0, help=(
        "Sliding-window attention: a token attends to itself and to the window - 1 tokens before it. 0: to all tokens "
        "before it."))
    full_attention_every: int = setting(0, needs="window", help=(
        "Give every N-th layer full attention in place of the sliding window. 0: every layer has the window."))

    experts: int = setting(0, help=(
        "Number of experts in each layer. They replace the feed-forward layer. 0: a dense model."))
    top_k: int = positive(2, "Number of experts that the router chooses for each token.", needs="experts")
    expert_ffn: int = positive(0, "Inner width of an expert. auto: --ffn.", needs="experts", auto=True)
    shared_experts: int = setting(0, "Number of experts that process every token, besides its top-k.", needs="experts")
    dense_layers: int = setting(0, needs="experts", help=(
        "How many layers at the start of the model have a dense feed-forward layer in place of experts."))
    router: str = setting("softmax", choices=("softmax", "sigmoid"), needs="experts", help=(
        "The function that turns the router's logits into scores."))
    router_norm: bool = setting(True, needs="experts", help=(
        "Normalise the weights of a token's top-k experts, so that they sum to 1."))
    router_scale: float = positive(1.0, "Factor on the weights of a token's top-k experts.", needs="experts")
    expert_groups: int = positive(1, needs="experts", help=(
        "Group-limited routing: divide the experts into this many groups. A token goes to experts of the --top-groups "
        "best groups only."))
    top_groups: int = positive(1, needs="experts", help=(
        "Group-limited routing: how many groups a token's experts may come from."))

    mtp: bool = setting(False, help=(
        "Multi-token prediction, as in DeepSeek-V3: train one more block, which predicts the token after the next. "
        "Evaluation, sampling and export leave it out."))

    @property
    def blocks(self) -> int:
        """The number of blocks: the layers, and the block of multi-token prediction, which is the last one."""
        return self.layers + self.mtp

    @property
    def rotated_dim(self) -> int:
        """How many channels of a query or key head are rotated."""
        return self.rope_head_dim or self.head_dim

    @property
    def fast_turns(self) -> float:
        return self.rope_fast_turns or FAST_TURNS.get(self.rope_type, 0.0)

    @property
    def rotary_factor(self) -> float:
        """The factor on rotated queries and on rotated keys: not 1 only with YaRN."""
        if self.rope_type != "yarn":
            return 1.0
        return self.rope_attention_factor or yarn_factor(self.rope_scaling, 1.0)

    @property
    def score_factor(self) -> float:
        """The factor on attention scores besides 1 / sqrt(head_dim): not 1 only with --rope-mscale."""
        return yarn_factor(self.rope_scaling, self.rope_mscale) ** 2

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    def has_rope(self, layer: int) -> bool:
        return self.no_rope_every == 0 or (layer + 1) % self.no_rope_every != 0

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    def window_of(self, layer: int) -> int:
        """The sliding window of a layer, in tokens; 0: the layer has full attention."""
        return 0 if self.full_attention_every and (layer + 1) % self.full_attention_every == 0 else self.window


def yarn_factor(rope_scaling: float, mscale: float) -> float:
    """Return 0.1 m ln(s) + 1: YaRN's factor on queries and on keys, for a context that is s times as long."""
    return 0.1 * mscale * math.log(max(rope_scaling, 1.0)) + 1.0


@dataclass
class Grid:
    """How the ranks divide the work: sites x dp x cp x tp x pp = the number of ranks."""
    # Who chooses the grid: the flags, or the planner. `config.grid.grid == "given"` means that the flags do.
    grid: str = setting("given", choices=("given", "auto"), help=(
        "given: the grid is what the flags below say. auto: the planner (plan/search.py) chooses the grid that it "
        "predicts to be the fastest on this machine. It chooses axes, ZeRO level, micro-batch, schedule and "
        "recomputation, and keeps those that a flag gives."))
    sites: int = positive(1, help=(
        "Groups of ranks that are far apart, such as data centres. Each has the grid of the flags below, and trains by "
        "itself on its part of the batch. Every --sync-every steps sites average what they have learned (DiLoCo)."))
    dp: int = positive(-1, "Data-parallel ranks of a site. auto: all ranks that pp, cp and tp leave.", auto=True)
    cp: int = positive(1, "Context-parallel ranks. Each holds 1/cp of every sequence.")
    cp_style: str = setting("allgather", choices=CP_STYLES, help=(
        "How context-parallel ranks attend to the whole sequence. allgather: they gather all keys and values. ring: "
        "they pass keys and values around a ring. ulysses: an all-to-all gives each rank the whole sequence of 1/cp of "
        "the heads."))
    cp_zigzag: str = setting("sequence", choices=("sequence", "document"), help=(
        "What is divided into zig-zag chunks, so that context-parallel ranks have equal work: each sequence, or each "
        "document. document needs --mask-documents, and pays off if the attention kernel skips masked tiles."))
    cp_ulysses: int = positive(1, help=(
        "Combine two styles of context parallelism: this many neighbouring ranks exchange heads as in ulysses, and "
        "such groups exchange keys and values by --cp-style. 1: one style only."))
    tp: int = positive(1, "Tensor-parallel ranks. Each holds 1/tp of the weights of every layer.")
    pp: int = positive(1, help=(
        "Pipeline-parallel ranks. Each holds one pipeline stage, a range of layers, or several (--virtual-stages)."))
    # `runs` is False for schedules that can only be drawn.
    schedule: str = setting("1f1b", choices=tuple(name for name, schedule in SCHEDULES.items() if schedule.runs), help=(
        "Pipeline schedule: the order of forward and backward passes on each rank. "
        "python -m run.timeline --schedule NAME draws it."))
    virtual_stages: int = positive(0, auto=True, help=(
        "Pipeline stages (model chunks) per rank. auto: as many as the schedule needs."))
    ep: int = positive(1, needs="experts", help=(
        "Expert-parallel ranks, taken from the ranks of dp, cp and tp. Each holds 1/ep of the experts."))
    zero: int = setting(0, choices=(0, 1, 2, 3), help=(
        "ZeRO level: what the dp x cp ranks shard instead of replicating it. 0: nothing. 1: the optimizer state. 2: "
        "also gradients. 3: also weights, as FSDP does."))
    dp_replicate: int = positive(1, needs="zero", help=(
        "Hybrid sharding: the number of replicas. ZeRO shards each of them over dp x cp / dp-replicate ranks."))
    sp: str = setting("on", choices=("off", "on", "async"), help=(
        "Sequence parallelism. on: between layers, each tensor-parallel rank holds 1/tp of the tokens. off: each holds "
        "all tokens. async: like on, and communication overlaps with matmuls, shard by shard; on GPUs this needs "
        "NVLink."))
    bucket_mb: float = setting(25.0, help=(
        "Size in MB (10^6 bytes) at which a gradient bucket is full. A bucket consists of whole layers. 0: one layer "
        "per bucket."))

    @property
    def ranks(self) -> int:
        return self.sites * self.dp * self.cp * self.tp * self.pp

    @property
    def batch_shares(self) -> int:
        """How many ranks, or groups of ranks, have different sequences of a global batch."""
        return self.sites * self.dp

    @property
    def head_ranks(self) -> int:
        """How many neighbouring context-parallel ranks form a group that exchanges heads. Ranks in the same place of
        different groups exchange keys and values."""
        return self.cp if self.cp_style == "ulysses" else self.cp_ulysses

    @property
    def document_ranks(self) -> int:
        """The number of ranks that share each document under --cp-zigzag document; 1: documents are not divided.

        2 x this is the number of pieces that each document is cut into (`order_by_piece` in cp.py).
        """
        return self.cp // self.head_ranks if self.cp_zigzag == "document" else 1

    @property
    def sequence_parallel(self) -> bool:
        return self.sp != "off"

    @property
    def sequence_shards(self) -> int:
        """How many tensor-parallel ranks share the tokens between layers."""
        return self.tp if self.sequence_parallel else 1

    @property
    def v_shaped(self) -> bool:
        """Whether the stages run down the ranks and back up, so that the first and the last are on the same rank."""
        return SCHEDULES[self.schedule].v_shaped


@dataclass
class Precision:
    """Data types, kernels, recomputation and offloading."""
    dtype: str = setting("auto", choices=("auto", "bf16", "fp16", "fp32", "fp64"), help=(
        "Data type of weights and activations. auto: bf16 on GPUs, fp32 on CPUs. With bf16 and fp16 the optimizer "
        "keeps master weights in fp32. fp16 comes with a dynamic loss scale."))
    fp8: str = setting("none", choices=("none", *FP8_RECIPES), help=(
        "Multiply in FP8 in the linear layers of blocks. tensorwise: one scale per tensor, on which ranks have to "
        "agree, and gradients in E5M2. blockwise: one scale per block of 1x128 or 128x128 elements."))
    fp8_ends: bool = setting(True, "Use --fp8 in the first and the last layer, too.")
    moments_dtype: str = setting("auto", choices=("auto", "bf16"), help=(
        "Data type of AdamW's moments. auto: fp32, or fp64 in fp64 runs."))
    reduce_dtype: str = setting("fp32", choices=("fp32", "bf16"), help=(
        "Data type in which gradients are summed over ranks. Over micro-batches they are always summed in fp32. "
        "fp64 runs use fp64 for both."))
    sync_dtype: str = setting("fp32", choices=SYNC_DTYPES, needs="sites", help=(
        "DiLoCo: data type in which sites send changes of weights. int8: with a scale per block, summed in fp32. fp64 "
        "runs use fp64."))
    attention: str = setting("auto", choices=("auto", "triton", "sdpa", "math"), help=(
        "Attention kernel. sdpa: torch's fused kernels. triton: the kernel in flash.py. math: plain torch, which "
        "stores all scores. auto: sdpa; on GPUs, triton if documents are masked or there is a window."))
    kernels: str = setting("auto", choices=("auto", "torch"), help=(
        "Kernels of norms, SwiGLU, rotary embedding, loss and FP8. auto: on GPUs the Triton kernels of this project, "
        "and torch in place of one that does not run. torch: only torch, including attention."))
    recompute: str = setting("none", choices=("none", "selective", "full"), help=(
        "What backward recomputes, so that it need not be stored. selective: norms, SwiGLU, attention scores, and keys "
        "and values made from latents. full: whole layers."))
    offload: str = setting("none", choices=OFFLOADS, help=(
        "What is kept in the host's memory. optimizer: master weights and moments, which the CPU then updates. "
        "activations: the layer inputs that --recompute full stores."))

    def fp8_recipe(self) -> Fp8Recipe | None:
        return FP8_RECIPES.get(self.fp8)

    def offloads(self, what: str) -> bool:
        return self.offload in (what, "both")


@dataclass
class Batch:
    """How many tokens a step has, and how many of them a rank computes at once."""
    seq_len: int = positive(256, "Tokens per sequence.")
    micro_batch: int = positive(0, auto=True, help=(
        "Sequences that a rank computes at once. auto: all of its sequences of a step; with a pipeline, 1/(2 pp) of "
        "them, so that the pipeline is filled."))
    global_batch: int = positive(16, "Sequences per step, over all ranks and micro-batches.")
    batch_ramp: str = setting("", help=(
        'Let the batch grow: "16@0,32@1e6" is 16 sequences per step at first, and 32 once the run has seen 1e6 tokens. '
        "Replaces --global-batch."))

    def ramp(self) -> list[tuple[int, float]]:
        """Return [(sequences per step, number of tokens seen from which on it holds), ...] in order.

        Raises ValueError if --batch-ramp is malformed.
        """
        if not self.batch_ramp:
            return [(self.global_batch, 0.0)]
        malformed = (f'--batch-ramp "{self.batch_ramp}": write sequences@tokens, from 0 tokens on and in order, '
                     'such as "16@0,32@1e6"')
        ramp = []
        try:
            for stage in self.batch_ramp.split(","):
                size, start = stage.split("@")
                ramp.append((int(size), float(start)))
        except ValueError:  # from split, int or float
            raise ValueError(malformed) from None
        sizes, starts = zip(*ramp)
        in_order = starts[0] == 0 and all(a < b for a, b in zip(starts, starts[1:]))
        need(in_order and min(sizes) > 0 and max(sizes) <= LARGEST, malformed)
        return ramp


@dataclass
class Optim:
    """The optimizer, the learning rate, and the terms of the loss."""
    optimizer: str = setting("adamw", choices=tuple(OPTIMIZERS), help=(
        "Update rule. muon: Muon for matrices, AdamW for all other weights."))
    lr: float = positive(0.0, auto=True, help=(
        "Peak learning rate. auto: 1.2 / hidden, which fits Llama 3 from 8B to 405B, but at most 2e-3."))
    lr_schedule: str = setting("cosine", choices=("cosine", "wsd", "constant"), help=(
        "Learning rate after the warmup. cosine: a cosine down to --min-lr. wsd (warmup, stable, decay): constant, "
        "then linear down to --min-lr over the last fifth of the steps. constant: --lr."))
    min_lr: float = setting(-1.0, "Final learning rate of cosine and wsd. auto: lr / 10.", auto=True)
    warmup: int = setting(-1, "Steps of linear warmup. auto: 20, but at most a tenth of the run.", auto=True)
    weight_decay: float = setting(0.1, "Decoupled weight decay of matrices. Norms and biases are not decayed.")
    betas: tuple = setting((0.9, 0.95), help=(
        "Decay rates of AdamW's running averages of the gradient and of its square. With muon, they apply to the "
        "weights that AdamW updates."))
    z_loss: float = setting(0.0, help=(
        "Coefficient of the z-loss, the squared log-sum-exp of each token's logits, which keeps logits small. 0: off."))
    mtp_weight: float = positive(0.3, needs="mtp", help=(
        "Coefficient of the loss of multi-token prediction. DeepSeek-V3 used 0.3, later 0.1."))
    aux_loss: float = setting(0.01, needs="experts", help=(
        "Coefficient of the auxiliary loss that balances the load of experts (Switch Transformer). 0: off."))
    aux_over: str = setting("sequence", choices=("sequence", "micro-batch"), needs="experts", help=(
        "Over which tokens --aux-loss balances the load: those of each sequence, or of each micro-batch."))
    router_z_loss: float = setting(0.0, "Coefficient of the z-loss of the routers' logits. 0: off.", needs="experts")
    router_bias_rate: float = setting(0.0, needs="experts", help=(
        "Balance the load of experts without a loss, as DeepSeek-V3 does (with 0.001): after each step, a bias in the "
        "router goes up by this much for an expert with too few tokens, and down for one with too many. 0: off."))
    grad_clip: float = setting(1.0, "Clip the norm of the whole gradient to this value. 0: no clipping.")
    sync_every: int = positive(50, needs="sites", help=(
        "DiLoCo: steps after which sites exchange what they have learned. --steps, --save-every, --eval-every and "
        "--check-replicas must be multiples of it."))
    outer_lr: float = positive(0.7, needs="sites", help=(
        "DiLoCo: learning rate of the outer optimizer, which applies the mean change of the sites' weights."))
    outer_momentum: float = setting(0.9, "DiLoCo: Nesterov momentum of the outer optimizer.", needs="sites")
    sync_fragments: int = positive(1, needs="sites", help=(
        "Streaming DiLoCo: exchange the layers in this many fragments, one every sync-every / sync-fragments steps."))
    sync_overlap: int = setting(0, needs="sites", help=(
        "Streaming DiLoCo: steps that an exchange overlaps with. 0: ranks wait for it."))
    steps: int = setting(200, "Number of optimizer steps.")
    seed: int = setting(0, "Seed of the initial weights and of the order of the samples.")


@dataclass
class Data:
    """What the model is trained and evaluated on."""
    data: list = setting([], help=(
        "Training data: text and records (files or folders), or token files (.bin, .npy). Without this flag, the "
        "sources of Python's standard library. With --init-from, text is tokenized by the model's tokenizer.json, "
        "else read as bytes."))
    data_weights: str = setting("", help=(
        "Mix the paths of --data by weights: with 3,1, of every 4 samples 3 are from the first path and 1 is from the "
        "second. Without weights, the paths are read as one stream, one after the other."))
    data_dtype: str = setting("auto", choices=("auto", "uint16", "uint32"), help=(
        "Data type of the tokens in .bin files without a header. auto: the 4 or 8 bytes per token that the file itself "
        "shows, otherwise uint16 if --vocab allows it, else uint32."))
    separator: int = setting(-1, auto=True, help=(
        "The token that begins each document in token files. auto: documents begin where the file, or an index beside "
        "it, says so; if neither does, each file is one document."))
    mask_documents: bool = setting(False, help=(
        "Let a token attend to its own document only, and count positions anew in each document."))
    val_data: list = setting([], "Validation data: text or token files, on which the loss is evaluated.")
    eval_every: int = setting(0, "Steps between evaluations. 0: evaluate only after the last step.", needs="val_data")
    eval_steps: int = positive(8, "Global batches per evaluation; fewer if the validation data has fewer.")

    def weights(self) -> tuple[int, ...]:
        """Return the weight of each path of --data, divided by their greatest common divisor; () without weights.

        Raises ValueError if --data-weights is malformed.
        """
        words = self.data_weights.split(",") if self.data_weights else []
        if all(word.isdecimal() for word in words) and len(words) in (0, len(self.data)):
            weights = tuple(map(int, words))
            if 0 not in weights and sum(weights) <= MOST_WEIGHT:
                return tuple(weight // math.gcd(*weights) for weight in weights)
        raise ValueError(f'--data-weights "{self.data_weights}": write a whole number above 0 for each of the '
                         f'{len(self.data)} paths of --data, together at most {MOST_WEIGHT:,}, such as "3,1"')


@dataclass
class Run:
    """Checkpoints, output, the machine, and what happens when something fails."""
    checkpoint_dir: str = setting("", "Save checkpoints in this folder, on a file system that all ranks share.")
    save_every: int = setting(0, "Steps between checkpoints. 0: save only after the last step.", needs="checkpoint_dir")
    keep_checkpoints: int = setting(2, "Number of checkpoints to keep; older ones are deleted. 0: keep all.")
    resume: str = setting("", help=(
        "Resume from this checkpoint, or from the newest complete one in this folder. auto: from the newest complete "
        "one in --checkpoint-dir; if there is none, start from scratch. Settings that no flag gives are the "
        "checkpoint's."))
    allow_mismatch: bool = setting(False, help=(
        "With --resume, accept data or settings that differ from the checkpoint's. With --init-from, accept weights "
        "that the model does not use."))
    init_from: str = setting("", help=(
        "Start from the published model in this folder: config.json and weights in Hugging Face's format."))
    export_hf: str = setting("", help=(
        "After training, write the model into this folder, in the format that transformers reads. The model is that of "
        "the last checkpoint, so --checkpoint-dir has to be given, too."))
    metrics: str = setting("", (
        "Append the metrics of each step to this file, or to /dev/stdout, as one line of JSON. A file that has steps "
        "is continued by --resume, and refused without."))
    tensorboard: str = setting("", help=(
        "Write the metrics of each step into this folder, for TensorBoard. Needs the package tensorboard."))
    wandb: str = setting("", help=(
        "Log the metrics of each step to this project of Weights & Biases. Needs the package wandb."))
    profile: str = setting("", help=(
        "Write a trace of steps 3 to 5, counted from 0, into this folder, for Perfetto, and print the operations that "
        "take longest."))
    memory_snapshot: str = setting("", help=(
        "Write torch's snapshot of rank 0's GPU memory in the first six steps to this file."))
    sample_prompt: str = setting("def ", help=(
        "After training on text, let the model continue this prompt. An empty prompt ('') turns this off."))
    sample_chat: bool = setting(False, help=(
        "Take the prompt as a user's message and let the model answer it, by the tokenizer's chat template or ChatML."))
    sample_tokens: int = positive(240, "The largest number of tokens of a sample. It ends earlier where the text ends.")
    sample_temperature: float = setting(0.8, help=(
        "What the logits of a sample are divided by before the softmax. 0: take the likeliest token."))
    sample_top_k: int = setting(0, "Draw each token of a sample from this many likeliest ones. 0: from all.")
    sample_top_p: float = positive(1.0, most=1, help=(
        "Draw each token of a sample from the fewest likeliest ones whose probabilities sum to at least this."))
    sample_seed: int = setting(0, "Seed of a sample.")
    device: str = setting("auto", "auto: GPUs if there is one for each rank, else CPUs.", ("auto", "cpu", "cuda"))
    dry_run: str = setting("", help=(
        "RANK/GPUS, such as 0/64 for the first of 64: run one step of that rank on fake tensors, without GPUs, and "
        "print what it would need, compute and send."))
    timeout: float = positive(600.0, "Seconds that a collective may wait for a rank before the run fails.", most=1e7)
    time_limit: float = setting(0.0, help=(
        "Minutes after which the run saves a checkpoint and ends, as after SIGTERM or Ctrl-C. 0: no limit."))
    max_skipped: int = setting(25, help=(
        "A step whose gradient is not finite is skipped. Fail after this many skipped steps in a row. 0: never fail."))
    rewind: int = setting(0, help=(
        "Instead of failing by --max-skipped, go back to the checkpoint before the skipped steps, and leave out their "
        "samples. At most this many times in a run."))
    check_replicas: int = setting(0, help=(
        "Steps between checks that replicas, values that several ranks hold, are bitwise identical. 0: never check."))

    def dry_run_as(self) -> tuple[int, int]:
        """Return (rank, number of ranks) of --dry-run. Raises ValueError if it is malformed."""
        rank, _, ranks = self.dry_run.partition("/")
        need(rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks),
             f"--dry-run {self.dry_run}: write RANK/GPUS, such as 0/64 for the first of 64")
        return int(rank), int(ranks)


@dataclass
class Config:
    """All settings of a run, complete and checked. rules.parse makes it."""
    model: Model
    grid: Grid
    precision: Precision
    batch: Batch
    optim: Optim
    data: Data
    run: Run
    # All settings before rules.complete. A resumed run gets these, so that e.g. --dp auto follows the new number of
    # ranks.
    before_defaults: dict = field(default_factory=dict)
    grid_is_example: bool = False  # whether run/cli.py chose the grid, because the command line names none
    arguments: list = field(default_factory=list)  # the command line
    ranks: int = 1  # the world size

    def value(self, name: str) -> Any:
        """Return the value of a setting of any section."""
        return getattr(getattr(self, SECTION_OF[name]), name)

    def sites_meet(self, done: int) -> bool:
        """Whether all sites have finished an exchange, and none is under way, after so many steps."""
        return self.grid.sites == 1 or done % (self.optim.sync_every // self.optim.sync_fragments) == 0

    def fp8_layers(self) -> range:
        """The layers whose linear layers multiply in FP8. The block of multi-token prediction never does."""
        skipped = 0 if self.precision.fp8_ends else 1
        return range(skipped, self.model.layers - skipped) if self.precision.fp8 != "none" else range(0)


SECTIONS = dict(model=Model, grid=Grid, precision=Precision, batch=Batch, optim=Optim, data=Data, run=Run)
SECTION_OF = {f.name: name for name, section in SECTIONS.items() for f in fields(section)}
FIELDS: dict[str, Field] = {f.name: f for section in SECTIONS.values() for f in fields(section)}


# ---- presets --------------------------------------------------------------------------------------------------------

# A preset holds the settings whose values differ from the defaults above.

def sizes(layers, hidden, heads, kv_heads, ffn, vocab, **rest):
    return dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, **rest)


LLAMA3 = dict(vocab=128256, rope_theta=500000.0)
QWEN = dict(vocab=151936, rope_theta=1000000.0, norm_eps=1e-6)
QWEN3 = dict(QWEN, qk_norm=True, head_dim=128)
LATENT = dict(kv_lora_rank=512, q_lora_rank=1536, head_dim=192, rope_head_dim=64, v_head_dim=128)
DEEPSEEK = dict(LATENT, top_k=8, expert_ffn=2048, router="sigmoid", shared_experts=1, norm_eps=1e-6,
                router_bias_rate=1e-3)
PRESETS = {  #             layers hidden heads kv  ffn  vocab
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
    # Without the block for multi-token prediction (--mtp adds it), and before the context is extended (YaRN).
    "deepseek-v3":    sizes(61,  7168, 128, 128, 18432, 129280, **DEEPSEEK, experts=256, dense_layers=3,
                            expert_groups=8, top_groups=4, router_scale=2.5, aux_loss=1e-4),
    "kimi-k2":        sizes(61,  7168,  64,  64, 18432, 163840, **DEEPSEEK, experts=384, dense_layers=1,
                            router_scale=2.827, rope_theta=50000.0, aux_loss=1e-3),
}


# ---- other names of these settings ----------------------------------------------------------------------------------

# Old name -> present name. The error for an old flag gives the present one; checkpoints with old names are still read.
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
ALIKE = 0.75  # from which on a flag is taken for another one; --num-gpus and --norm-eps have 0.7
ANSWERS = {  # to flags of other trainers whose place no single flag takes
    "num_gpus": "torchrun --nproc_per_node starts a rank on each GPU", "fsdp": "give --zero 3",
    "deepspeed": "give --zero, and other settings by flags of their own, see --help",
    "recompute_activations": "give --recompute selective",
    "epochs": "give --steps; samples are read again when all have been read",
    "num_train_epochs": "give --steps; samples are read again when all have been read",
    "model": "give --preset NAME, or --init-from FOLDER for published weights",
    "tokenizer": "python -m run.data tokenize makes files of tokens with it; with --init-from, the model's own is used",
}
# The name in Megatron-LM, torchtitan, transformers or nanoGPT -> ours, which the error for such a flag gives.
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
    "rotary_seq_len_interpolation_factor": "rope_scaling", "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "rope_fast_turns", "attention_factor": "rope_attention_factor", "mscale_all_dim": "rope_mscale",
    "no_rope_layer_interval": "no_rope_every", "no_rope_freq": "no_rope_every", "add_qkv_bias": "qkv_bias",
    "attention_bias": "out_bias", "mlp_bias": "ffn_bias",
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
    "data_path": "data", "dataset_path": "data", "train_data": "data", "wandb_project": "wandb",
    "eval_interval": "eval_every", "eval_iters": "eval_steps",
    "save": "checkpoint_dir", "output_dir": "checkpoint_dir", "out_dir": "checkpoint_dir", "load": "resume",
    "resume_from_checkpoint": "resume", "save_interval": "save_every", "save_total_limit": "keep_checkpoints",
    "model_name_or_path": "init_from", "distributed_timeout_minutes": "timeout", "exit_duration_in_mins": "time_limit",
}


# ---- values of settings ---------------------------------------------------------------------------------------------

def name_of(typed: str) -> str:
    """Return the setting that "--sp async" or "--sp" is about: "sp". The inverse of `flag`."""
    return typed.split()[0].removeprefix("--").replace("-", "_")


def default_of(name: str) -> Any:
    """Return a setting's declared default. A list is declared by a function that makes it."""
    declared = FIELDS[name]
    return declared.default_factory() if declared.type is list else declared.default


def written(name: str, value: Any) -> str:
    """Return a setting's value as a user writes it after the flag."""
    declared = FIELDS[name]
    return "auto" if declared.metadata["auto"] and value == declared.default else str(value)


def is_of_kind(value: Any, example: Any) -> bool:
    """Whether a value from a JSON file has the type of the example.

    A float may be written as a whole number. Entries of a list must be like the example's first entry; if the example
    is empty, they must be text. Types must be equal: isinstance would accept True as a whole number.
    """
    if isinstance(example, (list, tuple)):
        first = example[0] if example else ""
        return isinstance(value, (list, tuple)) and all(is_of_kind(entry, first) for entry in value)
    return type(value) in ((int, float) if isinstance(example, float) else (type(example),))


def problem_of(name: str, value: Any) -> str:
    """Return why a setting cannot have this value, such as "must be above 0"; "" if it can.

    The value has the setting's type.
    """
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

def read(arguments: list[str], others: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings that a command line gives: name -> value. Presets and defaults come later, in core/rules.py.

    others: flags that a program other than train.py has besides, such as --gpus. Raises ValueError for an unknown flag,
    and for a value of the wrong type.
    """
    given, unknown = read_flags(make_parser(), FIELDS, expand(arguments))
    if unknown:
        raise ValueError(f"{unknown[0]}: {what_is_meant(unknown[0].partition('=')[0], others)}")
    return given


def expand(arguments: list[str], inside: tuple[str, ...] = ()) -> list[str]:
    """Replace each `@file` by the flags in that file, where # begins a comment, and spell flags with dashes.

    After a flag that takes one value, "@..." is that value: `--sample-prompt @dataclass`. `--global_batch=8` becomes
    `--global-batch=8`. inside: the files that are being read, from which a file that reads itself is recognised.
    """
    out: list[str] = []
    for argument in arguments:
        if argument.startswith("@") and not (out and takes_one_value(out[-1])):
            path = argument[1:]
            need(os.path.isfile(path), f"{argument}: there is no file {path}")
            need(path not in inside, f"{argument}: the file reads itself")
            try:
                text = Path(path).read_text(encoding="utf-8-sig")  # "-sig": without the byte order mark
                words = shlex.split(text, comments=True)
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


EXIT_CODES = ("Exit codes: 0: done, or saved and ended on request (SIGTERM, Ctrl-C, --time-limit). 1: a rank failed; "
              "the last line that train.py prints says why. 2: these flags, this data or this checkpoint cannot run. "
              "128 + the signal's number: a second signal came. Under torchrun every code except 0 becomes 1.")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError for a mistake, with one line."""

    def error(self, message):
        message = message.removeprefix("argument ")
        if message.endswith("expected one argument"):
            name = message.partition(":")[0]
            message += f"; one that begins with - is written as {name}=VALUE"
        raise ValueError(message)


def make_parser(sections: dict[str, type] = SECTIONS, description: str | None = "Train a Llama-style model.",
                usage: str = "torchrun --nproc_per_node=8 train.py [flags] [@file of flags]") -> Parser:
    """Make a parser with one flag for each field of the sections.

    It leaves values as they were typed, for `read_value`. A flag that is not given is absent from the result, so that
    a preset can fill it. Only the text of train.py's --help is wrapped: other descriptions are docstrings, which have
    line breaks of their own.
    """
    is_train = sections is SECTIONS
    parser = Parser(usage=usage, allow_abbrev=False, argument_default=argparse.SUPPRESS, description=description,
                    epilog=EXIT_CODES if is_train else None,
                    formatter_class=argparse.HelpFormatter if is_train else argparse.RawDescriptionHelpFormatter)
    for name, section in sections.items():
        group = parser.add_argument_group(name)
        for f in fields(section):
            choices = f.metadata["choices"]
            if f.type is bool:
                kwargs = dict(action=argparse.BooleanOptionalAction)
            elif f.type is list:
                kwargs = dict(nargs="*", metavar="PATH")
            elif choices:
                kwargs = dict(metavar=f"{{{','.join(map(str, choices))}}}")
            else:
                kwargs = dict(metavar=f.type.__name__.upper())
            text = f.metadata["help"]
            if f.metadata["needs"]:
                text += f" Needs {flag(f.metadata['needs'])}."
            if shown := default_in_help(f):
                text += f" [{shown}]"
            group.add_argument(flag(f.name), help=text, **kwargs)
    return parser


def default_in_help(declared: Field) -> str:
    """Return a setting's default as a user would type it; "" for an empty text or list."""
    if declared.metadata["auto"]:
        return "auto"
    if declared.type is bool:
        return "on" if declared.default else "off"
    if declared.type is list:
        return ""  # every list is empty by default
    if declared.type is tuple:
        return ",".join(map(str, declared.default))
    return str(declared.default)


def read_flags(parser: Parser, declared: dict[str, Field], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return (name -> value of each flag that is given, the other words). Raises ValueError for a wrong value."""
    # For --tied=yes argparse would say "ignored explicit argument", and not what to write.
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        field = declared.get(name_of(name).removeprefix("no_")) if equals and name.startswith("--") else None
        if field and field.type is bool:
            raise ValueError(f"{argument}: takes no value: write {flag(field.name)} or --no-{flag(field.name)[2:]}")
    given, rest = parser.parse_known_args(arguments)
    values = {}
    for name, typed in vars(given).items():
        is_read = not isinstance(typed, str)  # argparse returns a bool or a list as it is
        values[name] = typed if is_read else read_value(declared[name], typed)
    return values, rest


def read_value(field: Field, typed: str) -> Any:
    """Return the value that was typed for a flag, in the field's type. Raises ValueError, which says what to write."""
    shown = f"{flag(field.name)} {typed or repr(typed)}"  # how the error begins; an empty value is shown as ''
    choices = field.metadata["choices"]
    if choices:
        by_name = {str(choice): choice for choice in choices}
        need(typed in by_name, f"{shown}: use one of {', '.join(by_name)}")
        return by_name[typed]
    may_be_auto = field.metadata["auto"]
    if may_be_auto and typed == "auto":
        return field.default
    try:
        value = tuple(map(float, typed.split(","))) if field.type is tuple else field.type(typed)
    except ValueError:
        what = {int: "a whole number", float: "a number", tuple: "numbers with commas between them"}[field.type]
        such = f", such as {','.join(map(str, field.default))}" if field.type is tuple else ""
        raise ValueError(f"{shown}: write {what}{such}{' or auto' if may_be_auto else ''}") from None
    if may_be_auto:  # its default, such as -1, stands for auto in the code only: nobody may type it
        above = "above 0" if field.metadata["positive"] else "0 or more"
        need(value != field.default, f"{shown}: must be {above}, or auto")
    return value


def what_is_meant(unknown: str, others: Iterable[str] = ()) -> str:
    """Say what to write in place of an unknown flag. others: flags that the program has besides train.py's."""
    name = name_of(unknown) if unknown.startswith("--") else ""
    without_no = name.removeprefix("no_")
    if without_no in RENAMED:
        new = RENAMED[without_no]
        is_off = name != without_no and FIELDS[new].type is bool
        return f"this flag is called {flag(f'no_{new}' if is_off else new)} now"
    if name in IN_OTHER_TRAINERS:
        return f"unknown flag, see {flag(IN_OTHER_TRAINERS[name])} in --help"
    close = difflib.get_close_matches(unknown, others, 1, ALIKE)
    if name in ANSWERS and not close:
        return f"unknown flag: {ANSWERS[name]}"
    close = close or difflib.get_close_matches(unknown, map(flag, FIELDS), 1, ALIKE)
    return f"unknown flag, did you mean {close[0]}?" if close else "unknown flag, --help lists all"


def read_known(section: type, arguments: list[str], usage: str) -> tuple[Any, list[str]]:
    """Read the flags of a program other than train.py, such as run/generate.py, which declares them in a dataclass.

    Returns an instance of the dataclass, and the other words of the command line. With --help it prints the usage, the
    flags, and the docstring of the file in which the dataclass is declared. Raises ValueError for a wrong value.
    """
    about = sys.modules[section.__module__].__doc__
    declared = {f.name: f for f in fields(section)}
    given, rest = read_flags(make_parser({"flags": section}, about, usage), declared, arguments)
    return section(**given), rest


# ---- padding --------------------------------------------------------------------------------------------------------
# cp.py and zero.py pad; plan/, which runs without torch, predicts how much.

def padded_length(seq: int, cp: int, tp: int = 1) -> int:
    """Round a sequence length up, so that each of cp ranks gets two chunks of equal length, whose tokens tp ranks can
    share equally. Without context parallelism nothing is padded."""
    if cp == 1:
        return seq
    unit = 2 * cp * tp
    return -(-seq // unit) * unit


def padded_elements(count: int, shards: int) -> int:
    """Round a number of elements up to equal shards of a multiple of 16 elements, which kernels and NCCL like to have.
    One shard is not padded."""
    if shards == 1:
        return count
    unit = 16 * shards
    return -(-count // unit) * unit
