"""Every setting of a run, in one place.

A setting is declared once, in the dataclasses below: its name, default and help. The name is also the flag
(`--global-batch 32`), the attribute (`config.batch.global_batch`) and what metrics call it.

    python train.py --preset smollm-135m --layers 12 --global-batch=64 @more.args

A preset fills the model section, and flags override any field. `@file` reads flags from a file, where `#` begins a
comment. `parse` returns settings in which defaults that follow from other settings are filled in, and which checks.py
has accepted for the number of ranks; or it raises ValueError with one line: the flag, its value, what would work.

This file needs the standard library alone, so that a typo in a flag is answered at once, not after torch's import.
"""
import argparse
import difflib
import os
import shlex
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import checks
from checks import flag, need
from schedules import SCHEDULES

TEXT_VOCAB = 257  # 256 byte values and the token that begins a document


class CpStyle(NamedTuple):
    """whole_sequences: a rank attends over whole sequences with 1/cp of the heads; else over blocks with all heads."""
    whole_sequences: bool


CP_STYLES = {"allgather": CpStyle(whole_sequences=False), "ring": CpStyle(whole_sequences=False),
             "ulysses": CpStyle(whole_sequences=True)}  # implemented in cp.py, under the same names


class Fp8Recipe(NamedTuple):
    """grad: the gradients' format; activations and weights are in E4M3. blocks: a scale per block, else per tensor."""
    grad: str
    blocks: bool


FP8_RECIPES = {"tensorwise": Fp8Recipe("e5m2", blocks=False), "blockwise": Fp8Recipe("e4m3", blocks=True)}
OFFLOADS = "none", "optimizer", "activations", "both"


def padded_length(seq: int, cp: int, tp: int = 1) -> int:
    """seq rounded up so that each of cp ranks has two chunks of equal length, and tp ranks can share these tokens."""
    return -(-seq // (2 * cp * tp)) * 2 * cp * tp if cp > 1 else seq


def padded_elements(count: int, shards: int) -> int:
    """count rounded up to equal shards of 16 elements or a multiple, for kernels and NCCL. One shard is not padded."""
    return -(-count // (16 * shards)) * 16 * shards if shards > 1 else count


# ---- the settings ---------------------------------------------------------------------------------------------------

def setting(default, help, choices=None):
    initial = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**initial, metadata={"help": help, "choices": choices})


@dataclass
class Model:
    preset: str = setting("tiny", "an architecture; the flags below override its fields: see PRESETS in config.py")
    layers: int = setting(4, "transformer blocks")
    hidden: int = setting(128, "width of the residual stream")
    heads: int = setting(4, "query heads")
    kv_heads: int = setting(2, "key and value heads, each shared by heads / kv-heads query heads")
    head_dim: int = setting(0, "width of a head; 0: hidden / heads")
    ffn: int = setting(352, "width of the SwiGLU layer")
    vocab: int = setting(TEXT_VOCAB, "tokens in the vocabulary; text needs 257: the bytes and the document separator")
    tied: bool = setting(False, "tied embeddings: one table for the input and the output")
    rope_theta: float = setting(10000.0, "base of rotary embedding")
    rope_scaling: float = setting(1.0, "rotary scaling by the rule of Llama 3.1: 8 in Llama 3.1, 32 in 3.2; 1: off")
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm")
    qk_norm: bool = setting(False, "RMSNorm on every query and key head (Qwen 3)")
    qkv_bias: bool = setting(False, "biases on queries, keys and values (Qwen 2)")
    window: int = setting(0, "sliding window: a token sees itself and the window - 1 before it; 0: all before it")
    window_every: int = setting(0, "with --window W, every K-th layer has full attention; 0: none has")
    experts: int = setting(0, "experts in each layer, in place of its feed-forward; 0: none, a dense model")
    top_k: int = setting(2, "experts that a token is sent to")
    expert_ffn: int = setting(0, "width of an expert; 0: ffn")
    shared_experts: int = setting(0, "experts that every token is sent to, besides its top-k")
    dense_layers: int = setting(0, "how many of the first layers have a dense feed-forward instead of experts")
    router: str = setting("softmax", "function from the router's logits to scores", ("softmax", "sigmoid"))
    router_norm: bool = setting(True, "normalise the weights of a token's top-k experts to sum to 1")
    router_scale: float = setting(1.0, "factor of these weights")
    expert_groups: int = setting(1, "group-limited routing: how many groups the experts form")
    top_groups: int = setting(1, "groups, those with the best scores, whose experts a token may be sent to")

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    def window_of(self, layer: int) -> int:
        """How many tokens a token of this layer sees; 0: all before it."""
        return 0 if self.window_every and (layer + 1) % self.window_every == 0 else self.window


@dataclass
class Grid:
    grid: str = setting("given", "auto: axes, ZeRO level, micro-batch, schedule and recomputation that no flag gives "
                                 "become what plan/search.py predicts to be the fastest here", ("given", "auto"))
    dp: int = setting(-1, "data parallel ranks; -1: all that pp, cp and tp leave")
    cp: int = setting(1, "context parallel ranks: each has 1/cp of every sequence")
    cp_style: str = setting("allgather", "allgather: gather keys and values; ring: send them round a ring; ulysses: "
                                         "all-to-all from sequence to head shards", tuple(CP_STYLES))
    tp: int = setting(1, "tensor parallel ranks")
    pp: int = setting(1, "pipeline ranks: each has the layers of one pipeline stage, or of several")
    schedule: str = setting("1f1b", "pipeline schedule; python pp.py --schedule NAME draws it",
                            tuple(name for name, schedule in SCHEDULES.items() if schedule.runs))
    chunks: int = setting(0, "model chunks (pipeline stages) per rank; 0: as many as the schedule needs")
    pp_group: int = setting(0, "interleaved: micro-batches in a group; 0: as few as possible, pp if it divides them")
    ep: int = setting(1, "expert parallel ranks, among those of dp, cp and tp: each has 1/ep of the experts")
    zero: int = setting(0, "ZeRO level: data parallel ranks shard 1 optimizer state, 2 also gradients, 3 also "
                           "weights", (0, 1, 2, 3))
    dp_replicate: int = setting(1, "hybrid sharding: dp-replicate replicas, each sharded over dp / dp-replicate ranks")
    sp: str = setting("on", "sequence parallelism: between layers each tensor parallel rank has 1/tp of the tokens; "
                            "async: its communication overlaps matmuls, shard by shard round a ring",
                      ("off", "on", "async"))
    bucket_mb: float = setting(25.0, "a gradient bucket: whole layers, until it has so many MB (10^6); 0: one layer")

    @property
    def sequence_parallel(self) -> bool:
        return self.sp != "off"

    @property
    def sequence_shards(self) -> int:
        """How many tensor parallel ranks share the tokens between layers."""
        return self.tp if self.sequence_parallel else 1

    @property
    def async_tp(self) -> bool:
        return self.sp == "async"

    def style(self) -> CpStyle:
        return CP_STYLES[self.cp_style]


@dataclass
class Precision:
    dtype: str = setting("auto", "of weights and activations; auto: bf16 on GPU, fp32 on CPU; fp16 scales the loss",
                         ("auto", "bf16", "fp16", "fp32", "fp64"))
    fp8: str = setting("none", "linear layers of blocks multiply in FP8; tensorwise: one scale per tensor, gradients "
                       "in E5M2; blockwise: one per 1x128 or 128x128 block", ("none", *FP8_RECIPES))
    fp8_ends: bool = setting(True, "FP8 in the first and the last block, too")
    fp8_pow2: bool = setting(False, "FP8 scales are powers of two")
    moments: str = setting("auto", "dtype of AdamW's moments; auto: fp32, or fp64 in fp64 runs", ("auto", "bf16"))
    reduce_dtype: str = setting("fp32", "of gradients that are summed over ranks; micro-batches are summed in fp32",
                                ("fp32", "bf16"))
    attention: str = setting("auto", "sdpa: torch's fused kernels; triton: ours; auto: torch's, but on a GPU ours for "
                                     "documents and windows; math: plain torch, which saves scores",
                             ("auto", "triton", "sdpa", "math"))
    recompute: str = setting("none", "what backward recomputes; selective: norms, SwiGLU, scores; full: whole blocks",
                             ("none", "selective", "full"))
    offload: str = setting("none", "what is in the host's memory: optimizer: master weights and moments, which the CPU "
                                   "updates; activations: the inputs of blocks that --recompute full saves", OFFLOADS)

    def fp8_recipe(self) -> Fp8Recipe | None:
        return FP8_RECIPES.get(self.fp8)

    def offloads(self, what: str) -> bool:
        return self.offload in (what, "both")


@dataclass
class Batch:
    seq: int = setting(256, "tokens per sequence")
    micro_batch: int = setting(0, "sequences that a rank computes at once; 0: all that it has in a step, or what "
                                  "makes 2 pp micro-batches")
    global_batch: int = setting(16, "sequences per step, over all ranks and micro-batches")
    batch_ramp: str = setting("", 'replaces global-batch: "16@0,32@1e6" is 16 sequences, from 1e6 tokens seen on 32')

    def ramp(self) -> list[tuple[int, float]]:
        """(sequences per step, tokens seen from which on that holds), in order. Raises ValueError if malformed."""
        return [(int(size), float(start)) for size, start in
                (stage.split("@") for stage in (self.batch_ramp or f"{self.global_batch}@0").split(","))]


@dataclass
class Optim:
    optimizer: str = setting("adamw", "the update rule", ("adamw", "sgd"))
    lr: float = setting(0.0, "peak learning rate; 0: 1.2 / hidden, as Llama 3 from 8B to 405B, but at most 2e-3")
    lr_schedule: str = setting("cosine", "after the warmup; wsd: constant, then linear over the last fifth",
                               ("cosine", "wsd", "constant"))
    min_lr: float = setting(-1.0, "final learning rate of cosine and wsd; -1: lr / 10")
    warmup: int = setting(-1, "steps of linear warmup; -1: 20, but at most a tenth of the run")
    weight_decay: float = setting(0.1, "decoupled decay of matrices; norms and biases are not decayed")
    betas: tuple = setting((0.9, 0.95), "decay rates of AdamW's averages of the gradient and of its square")
    z_loss: float = setting(0.0, "coefficient of the z-loss, the square of each token's log-sum-exp of logits")
    aux_loss: float = setting(0.01, "coefficient of the auxiliary loss that balances experts (Switch Transformer)")
    aux_over: str = setting("sequence", "what --aux-loss balances: the tokens of each sequence, or of a micro-batch",
                            ("sequence", "micro-batch"))
    router_z_loss: float = setting(0.0, "coefficient of the routers' z-loss")
    bias_rate: float = setting(0.0, "per step, up or down, of the biases that balance experts (DeepSeek-V3: 0.001)")
    clip: float = setting(1.0, "largest norm of the whole gradient; 0: no clipping")
    steps: int = setting(200, "optimizer steps")
    seed: int = setting(0, "initial weights and order of the samples")


@dataclass
class Data:
    data: list = setting([], "text (files, folders) or tokens (.bin, .npy); none given: Python's own library")
    data_dtype: str = setting("auto", "tokens of .bin files without a header; auto: uint16 if the vocabulary fits",
                              ("auto", "uint16", "uint32"))
    separator: int = setting(-1, "token that begins a document in token files; -1: the format's, or one a file")
    doc_mask: bool = setting(False, "no attention across documents, and positions start anew in each")
    val_data: list = setting([], "evaluate the loss on this text or these tokens")
    eval_every: int = setting(0, "steps between evaluations; 0: at the end only")
    eval_steps: int = setting(8, "global batches per evaluation, at most all there are")


@dataclass
class Run:
    out: str = setting("", "save checkpoints in this folder, on a file system that all ranks share")
    save_every: int = setting(0, "steps between checkpoints; 0: after the last step only")
    keep: int = setting(2, "how many checkpoints stay in --out; 0: all")
    resume: str = setting("", "a checkpoint, or a folder of them; auto: the newest whole one in --out, if any; "
                              "settings that no flag gives are the checkpoint's")
    insist: bool = setting(False, "resume although the data changed, or settings of the model that change no shape")
    init_from: str = setting("", "start from weights and config.json as published on Hugging Face, in this folder")
    export_hf: str = setting("", "after training, write the weights here as transformers reads them")
    metrics: str = setting("", "append the metrics of every step to this file or pipe, as lines of JSON; of a dry "
                               "run, write one object")
    profile: str = setting("", "write a trace of steps 3 to 5 in this folder, and print what takes longest")
    memory_snapshot: str = setting("", "write who allocated the GPU's memory in the first six steps, of rank 0")
    sample: str = setting("def ", "after training on text, continue this prompt; '' for none")
    device: str = setting("auto", "auto: GPUs when there is one per rank", ("auto", "cpu", "cuda"))
    dry_run: bool = setting(False, "run one step on fake tensors as --rank of --gpus ranks, and print what it needs")
    gpus: int = setting(0, "ranks of a dry run")
    rank: int = setting(0, "which of them to be")
    timeout: float = setting(600.0, "seconds a collective may wait for a rank before the run fails")
    time_limit: float = setting(0.0, "minutes after which the run saves and ends, as after SIGTERM or Ctrl-C; 0: none")
    max_skipped: int = setting(25, "steps in a row without an update (not finite, or spikes) that are a failure; 0: "
                                   "any number is none")
    rewind: int = setting(0, "instead of failing so, go back to the checkpoint before these steps and leave out their "
                             "samples, this many times in a run")
    skip_spikes: float = setting(0.0, "skip a gradient norm this many standard deviations above its mean; 0: none")
    check_replicas: int = setting(0, "steps between comparisons of what ranks must hold alike, to the bit; 0: never")


@dataclass
class Config:
    model: Model
    grid: Grid
    precision: Precision
    batch: Batch
    optim: Optim
    data: Data
    run: Run
    given: dict = field(default_factory=dict)  # the sections' values before defaults were filled in
    shown: bool = False  # whether the grid is that of SHOWN, because the command line names none
    arguments: list = field(default_factory=list)  # the command line

    def fp8_layers(self) -> range:
        """The blocks whose linear layers multiply in FP8."""
        skipped = 0 if self.precision.fp8_ends else 1
        return range(skipped, self.model.layers - skipped) if self.precision.fp8 != "none" else range(0)


# ---- presets --------------------------------------------------------------------------------------------------------

def llama(layers, hidden, heads, kv_heads, ffn, vocab, **rest):
    return dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, **rest)


def moe(experts, top_k, expert_ffn, **rest):
    return dict(experts=experts, top_k=top_k, expert_ffn=expert_ffn, **rest)


LLAMA3 = dict(vocab=128256, rope_theta=500000.0)
QWEN = dict(vocab=151936, rope_theta=1000000.0, norm_eps=1e-6)
DEEPSEEK = dict(router="sigmoid", router_scale=2.5, expert_groups=8, top_groups=4, shared_experts=1, dense_layers=3,
                bias_rate=1e-3, aux_loss=1e-4, norm_eps=1e-6)
PRESETS = {  #             layers hidden heads kv    ffn
    "tiny": {},
    "smollm-135m":    llama(30,   576,   9,   3,  1536, 49152, tied=True),
    "smollm-360m":    llama(32,   960,  15,   5,  2560, 49152, tied=True),
    "smollm-1.7b":    llama(24,  2048,  32,  32,  8192, 49152, tied=True),
    "llama-2-7b":     llama(32,  4096,  32,  32, 11008, 32000),
    "llama-2-13b":    llama(40,  5120,  40,  40, 13824, 32000),
    "llama-2-70b":    llama(80,  8192,  64,   8, 28672, 32000),
    "llama-3.2-1b":   llama(16,  2048,  32,   8,  8192, **LLAMA3, tied=True, rope_scaling=32.0),
    "llama-3.2-3b":   llama(28,  3072,  24,   8,  8192, **LLAMA3, tied=True, rope_scaling=32.0),
    "llama-3.1-8b":   llama(32,  4096,  32,   8, 14336, **LLAMA3, rope_scaling=8.0),
    "llama-3.1-70b":  llama(80,  8192,  64,   8, 28672, **LLAMA3, rope_scaling=8.0),
    "llama-3.1-405b": llama(126, 16384, 128,  8, 53248, **LLAMA3, rope_scaling=8.0),
    "qwen2.5-0.5b":   llama(24,   896,  14,   2,  4864, **QWEN, tied=True, qkv_bias=True),
    "qwen3-0.6b":     llama(28,  1024,  16,   8,  3072, **QWEN, tied=True, qk_norm=True, head_dim=128),
    "qwen3-8b":       llama(36,  4096,  32,   8, 12288, **QWEN, qk_norm=True, head_dim=128),
    "qwen3-32b":      llama(64,  5120,  64,   8, 25600, **QWEN, qk_norm=True, head_dim=128),
    #                                                                  experts top_k expert_ffn
    "tiny-moe":       llama(4,    128,   4,   2,   352, TEXT_VOCAB, **moe(8, 2,   128)),
    "mixtral-8x7b":   llama(32,  4096,  32,   8, 14336, 32000, **moe(     8, 2, 14336), rope_theta=1000000.0),
    "qwen3-30b-a3b":  llama(48,  2048,  32,   4,  6144, **QWEN, **moe(  128, 8,   768), qk_norm=True, head_dim=128),
    # DeepSeek-V3 with grouped-query attention in place of its latent attention (MLA)
    "deepseek-v3-gqa": llama(61, 7168, 128,   8, 18432, 129280, **moe(  256, 8,  2048, **DEEPSEEK), head_dim=128),
}

SECTIONS = {"model": Model, "grid": Grid, "precision": Precision, "batch": Batch, "optim": Optim, "data": Data,
            "run": Run}


# ---- reading the command line ---------------------------------------------------------------------------------------

def two_numbers(text: str) -> tuple:
    try:
        first, second = text.split(",")
        return float(first), float(second)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write two numbers, such as 0.9,0.95") from None


def expand(arguments: list[str], inside: tuple[str, ...] = ()) -> list[str]:
    """`@file` becomes the flags in it, `--global_batch=8` becomes `--global-batch=8`. inside: the files being read."""
    out = []
    for argument in arguments:
        if argument.startswith("@"):
            path = argument[1:]
            need(os.path.isfile(path), f"{argument}: there is no file {path}")
            need(path not in inside, f"{argument}: the file reads itself")
            out += expand(shlex.split(Path(path).read_text(), comments=True), (*inside, path))
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            out.append(name.replace("_", "-") + equals + value)
        else:
            out.append(argument)
    return out


EXIT_CODES = ("Exit codes: 0: done, or saved and ended as asked (SIGTERM, Ctrl-C, --time-limit); 1: a rank failed, and "
              "the last line of train.py says why; 2: these flags, this data or this checkpoint cannot run; 128 + the "
              "signal's number: a second signal. Under torchrun every code but 0 becomes 1.")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message.removeprefix("argument "))


def make_parser() -> Parser:
    """One flag a field. What is not given stays absent, so that a preset knows what it may fill."""
    parser = Parser(usage="torchrun --nproc_per_node=8 train.py [flags] [@file of flags]", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS, description="Train a Llama-style model.", epilog=EXIT_CODES)
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(name)
        for f in fields(section):
            default = "" if f.type is list or f.default == "" else f" [{f.default}]"
            if f.type is bool:
                kwargs, default = dict(action=argparse.BooleanOptionalAction), " [on]" if f.default else " [off]"
            elif f.type is list:
                kwargs = dict(nargs="*", metavar="PATH")
            elif f.metadata["choices"]:
                kwargs = dict(choices=f.metadata["choices"], type=f.type)
            else:
                kwargs = dict(type=two_numbers if f.type is tuple else f.type, metavar=f.type.__name__.upper())
            group.add_argument(flag(f.name), help=f.metadata["help"] + default, **kwargs)
    return parser


def read(arguments: list[str]) -> dict[str, Any]:
    """The settings that a command line gives: name -> value. Raises ValueError for what is no setting or no value."""
    given, unknown = make_parser().parse_known_args(expand(arguments))
    if unknown:
        known = [flag(f.name) for section in SECTIONS.values() for f in fields(section)]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, 0.7)
        raise ValueError(f"{unknown[0]}: unknown flag, {f'did you mean {close[0]}?' if close else '--help lists all'}")
    return vars(given)


def parse(arguments: list[str], world: int = 1, inherited: dict[str, Any] | None = None) -> Config:
    """The complete and checked settings of a run on `world` ranks; with --grid auto, what the grid decides is neither.
    inherited: what flags override, in place of the preset. Raises ValueError, one line, for whatever cannot run."""
    flags = read(arguments)
    assert inherited or not (flags.get("resume") or flags.get("init_from")), "run/start.py reads what these inherit"
    preset = flags.get("preset", "tiny")
    need(preset in PRESETS, f"--preset {preset}: unknown, use one of {', '.join(PRESETS)}")
    values = (PRESETS[preset] if inherited is None else inherited) | flags
    config = Config(**{name: section(**{f.name: values[f.name] for f in fields(section) if f.name in values})
                       for name, section in SECTIONS.items()})
    config.arguments = list(arguments)
    config.given = {name: value for section in SECTIONS for name, value in asdict(getattr(config, section)).items()}
    checks.complete(config, world)
    return config
