"""Every setting of a run on one screen.

The dataclasses below are the only place where a setting is named: flags (`--global-batch 32`), attributes
(`config.batch.global_batch`), logs and checkpoints all use the field's name, and `--help` prints the text beside it.

    python train.py --preset smollm-135m --layers 12 --global-batch=64 @more.args

A preset fills the model section and any field can be overridden. `@file` reads flags from a file, where `#` begins a
comment. `parse` returns settings that are complete (every 0 or -1 that means "choose for me" is replaced by the choice)
and checked against the number of ranks (checks.py), or raises ValueError with one line: the flag, its value, what would
work.

This file needs nothing but the standard library, so that a typing error is answered at once, not after torch's import.
"""
import argparse
import difflib
import os
import shlex
import sys
import time
from dataclasses import dataclass, field, fields

import checks
from checks import flag, need

TEXT_VOCAB = 257  # 256 byte values and the token that begins a document


def llama(layers, hidden, heads, kv_heads, ffn, vocab, **rest):
    return dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, **rest)


def mixture(experts, top_k, expert_ffn, **rest):
    return dict(experts=experts, top_k=top_k, expert_ffn=expert_ffn, **rest)


LLAMA3 = dict(vocab=128256, rope_theta=500000.0)
QWEN = dict(vocab=151936, rope_theta=1000000.0, norm_eps=1e-6)
DEEPSEEK = dict(router="sigmoid", router_scale=2.5, expert_groups=8, top_groups=4, shared_experts=1, dense_layers=3,
                bias_rate=1e-3, aux_loss=1e-4)
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
    "tiny-moe":       llama(4,    128,   4,   2,   352, TEXT_VOCAB, **mixture(8, 2,   128)),
    "mixtral-8x7b":   llama(32,  4096,  32,   8, 14336, 32000, **mixture(     8, 2, 14336), rope_theta=1000000.0),
    "qwen3-30b-a3b":  llama(48,  2048,  32,   4,  6144, **QWEN, **mixture(  128, 8,   768), qk_norm=True, head_dim=128),
    # DeepSeek-V3 but for its attention (MLA), in whose place are 128 heads with keys and values of 8
    "deepseek-v3-gqa": llama(61, 7168, 128,   8, 18432, 129280, **mixture(  256, 8,  2048, **DEEPSEEK), head_dim=128),
}


def setting(default, help, choices=None):
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**factory, metadata={"help": help, "choices": choices})


@dataclass
class Model:
    preset: str = setting("tiny", "an architecture, whose fields the flags below override: " + ", ".join(PRESETS))
    layers: int = setting(4, "transformer blocks")
    hidden: int = setting(128, "width of the residual stream")
    heads: int = setting(4, "query heads")
    kv_heads: int = setting(2, "key and value heads, each shared by heads / kv-heads query heads")
    head_dim: int = setting(0, "width of a head; 0: hidden / heads")
    ffn: int = setting(352, "width of the SwiGLU layer")
    vocab: int = setting(TEXT_VOCAB, "tokens in the vocabulary; text needs 257: the bytes and the document separator")
    tied: bool = setting(False, "one table for the embedding and the head")
    rope_theta: float = setting(10000.0, "base of the rotary angles")
    rope_scaling: float = setting(1.0, "Llama 3.1's stretch of the slow rotary angles (8 in 3.1, 32 in 3.2); 1: none")
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm")
    qk_norm: bool = setting(False, "RMSNorm on every query and key head (Qwen 3)")
    qkv_bias: bool = setting(False, "biases on queries, keys and values (Qwen 2)")
    experts: int = setting(0, "experts of a layer, in place of one feed-forward layer; 0: none, the model is dense")
    top_k: int = setting(2, "experts that a token is sent to")
    expert_ffn: int = setting(0, "width of an expert; 0: ffn")
    shared_experts: int = setting(0, "experts that all tokens go through besides")
    dense_layers: int = setting(0, "first layers without experts")
    router: str = setting("softmax", "what makes scores of the router's logits", ("softmax", "sigmoid"))
    router_norm: bool = setting(True, "the scores of the chosen experts, their weights, are made to sum to 1")
    router_scale: float = setting(1.0, "times these weights")
    expert_groups: int = setting(1, "groups of experts, of which a token's best top-groups are open to it")
    top_groups: int = setting(1, "groups that are open to a token")


@dataclass
class Grid:
    dp: int = setting(-1, "data parallel ranks; -1: all there are")
    cp: int = setting(1, "context parallel ranks: each has 1/cp of every sequence")
    cp_style: str = setting("allgather", "keys and values come all at once, or round a ring; or tokens go for heads",
                            ("allgather", "ring", "ulysses"))
    tp: int = setting(1, "tensor parallel ranks")
    pp: int = setting(1, "pipeline ranks: each has the layers of one stage, or of several")
    schedule: str = setting("1f1b", "in which order pipeline ranks do what; python pp.py draws them",
                            ("afab", "1f1b", "interleaved", "zb-h1", "zb1p", "zb-v", "dualpipev"))
    chunks: int = setting(0, "pipeline stages a rank; 0: as many as the schedule needs")
    pp_group: int = setting(0, "micro-batches that go through a rank's stages together; 0: one for each pipeline rank")
    ep: int = setting(1, "expert parallel ranks, among those of dp, cp and tp: each has 1/ep of the experts")
    zero: int = setting(0, "what data parallel ranks share out: 1 optimizer state, 2 and gradients, 3 and weights",
                        (0, 1, 2, 3))
    dp_replicate: int = setting(1, "hybrid sharding: groups of dp / dp-replicate ranks share out, and are replicas")
    sp: bool = setting(True, "sequence parallelism: between layers each tensor parallel rank has 1/tp of the tokens")
    sp_keep: bool = setting(False, "keep inputs gathered for matmuls instead of gathering them again in backward")
    async_tp: bool = setting(False, "tensor parallel ranks multiply in pieces while others travel round a ring")
    bucket_mb: float = setting(25.0, "layers whose gradients are reduced together: as many as reach so many MB; 0: one")


@dataclass
class Precision:
    dtype: str = setting("auto", "weights and activations; auto: bf16 on GPU, fp32 on CPU; fp16 scales the loss",
                         ("auto", "bf16", "fp16", "fp32", "fp64"))
    fp8: str = setting("none", "linear layers of blocks multiply in FP8; tensorwise: one scale a tensor, gradients in "
                       "E5M2; blockwise: one a 1x128 or 128x128 block", ("none", "tensorwise", "blockwise"))
    fp8_ends: bool = setting(True, "also those of the first and the last block")
    fp8_pow2: bool = setting(False, "FP8 scales are powers of two")
    moments: str = setting("auto", "AdamW's averages; auto: fp32, or fp64 in fp64 runs", ("auto", "bf16"))
    attention: str = setting("auto", "sdpa: torch's fused kernels; triton: ours; auto: torch's, but on a GPU ours for "
                                     "documents; math: written out, keeps scores",
                             ("auto", "triton", "sdpa", "math"))
    recompute: str = setting("none", "in backward; selective: norms, SwiGLU, scores; full: whole layers",
                             ("none", "selective", "full"))


@dataclass
class Batch:
    seq: int = setting(256, "tokens a sequence")
    micro_batch: int = setting(0, "sequences a rank computes at once; 0: its whole share of the step")
    global_batch: int = setting(16, "sequences a step, over all ranks and micro-batches")
    batch_ramp: str = setting("", 'replaces global-batch: "16@0,32@1e6" is 16 sequences, from 1e6 tokens seen on 32')

    def ramp(self) -> list[tuple[int, float]]:
        """(sequences a step, from so many tokens seen on), in order."""
        return [(int(size), float(start)) for size, start in
                (stage.split("@") for stage in (self.batch_ramp or f"{self.global_batch}@0").split(","))]


@dataclass
class Optim:
    optimizer: str = setting("adamw", "the update rule", ("adamw", "sgd"))
    lr: float = setting(0.0, "peak learning rate; 0: 1.2 / hidden, as Llama 3 from 8B to 405B, but at most 2e-3")
    lr_schedule: str = setting("cosine", "after the warmup; wsd: constant, then linear over the last fifth",
                               ("cosine", "wsd", "constant"))
    min_lr: float = setting(-1.0, "learning rate of the last step, but for a constant one; -1: lr / 10")
    warmup: int = setting(-1, "steps of linear warmup; -1: 20, or a tenth of a shorter run")
    weight_decay: float = setting(0.1, "decoupled decay of matrices; norms and biases are not decayed")
    betas: tuple = setting((0.9, 0.95), "AdamW's averages of the gradient and of its square")
    z_loss: float = setting(0.0, "times the squared logarithm of the softmax's denominator, added to the loss")
    aux_loss: float = setting(0.01, "times what unequal use of experts costs (Switch Transformer's loss)")
    aux_over: str = setting("sequence", "tokens over which their use shall be equal", ("sequence", "micro-batch"))
    router_z_loss: float = setting(0.0, "times the squared logarithm of the router's softmax denominator")
    bias_rate: float = setting(0.0, "what a step adds to the bias of an expert used too little (DeepSeek-V3: 0.001)")
    clip: float = setting(1.0, "largest norm of the whole gradient; 0: no clipping")
    steps: int = setting(300, "optimizer steps")
    seed: int = setting(0, "initial weights and order of the samples")


@dataclass
class Data:
    data: list = setting([], "text (files, folders) or tokens (.bin, .npy); none given: Python's own library")
    data_dtype: str = setting("uint16", "tokens of .bin files without a header", ("uint16", "uint32"))
    separator: int = setting(-1, "token that begins a document in token files; -1: the format's, or one a file")
    doc_mask: bool = setting(False, "no attention across documents, and positions start anew in each")
    val_data: list = setting([], "evaluate the loss on this text or these tokens")
    eval_every: int = setting(0, "steps between evaluations; 0: at the end only")
    eval_steps: int = setting(8, "an evaluation reads so many global batches, or all there is if that is less")


@dataclass
class Run:
    metrics: str = setting("", "write the metrics of every step here, one JSON object a line")
    sample: str = setting("def ", "after training on text, continue this prompt; '' for none")
    device: str = setting("auto", "auto: GPUs when there is one per rank", ("auto", "cpu", "cuda"))
    graph: bool = setting(False, "record the third step and play it from then on (CUDA graphs): one GPU, no experts")
    timeout: float = setting(600.0, "seconds a collective may wait for a rank before the run fails")


@dataclass
class Config:
    model: Model
    grid: Grid
    precision: Precision
    batch: Batch
    optim: Optim
    data: Data
    run: Run


SECTIONS = {f.name: f.type for f in fields(Config)}


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
            with open(path) as file:
                out += expand(shlex.split(file.read(), comments=True), (*inside, path))
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            out.append(name.replace("_", "-") + equals + value)
        else:
            out.append(argument)
    return out


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message.removeprefix("argument "))


def make_parser() -> Parser:
    """One flag a field. What is not given stays absent, so that a preset knows what it may fill."""
    parser = Parser(usage="torchrun --nproc_per_node=8 train.py [flags] [@file of flags]", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS, description="Train a Llama-style model.")
    for section, settings in SECTIONS.items():
        group = parser.add_argument_group(section)
        for f in fields(settings):
            if f.type is bool:
                how = dict(action=argparse.BooleanOptionalAction)
            elif f.type is list:
                how = dict(nargs="+", metavar="PATH")
            elif f.metadata["choices"]:
                how = dict(choices=f.metadata["choices"], type=f.type)
            else:
                how = dict(type=two_numbers if f.type is tuple else f.type, metavar=f.type.__name__.upper())
            default = "" if f.type in (bool, list) or f.default == "" else f" [{f.default}]"
            group.add_argument(flag(f.name), help=f.metadata["help"] + default, **how)
    return parser


def parse(arguments: list[str], world: int = 1) -> Config:
    """The complete and checked settings of a run on `world` ranks.

    Raises ValueError, one line, for whatever cannot run.
    """
    given, unknown = make_parser().parse_known_args(expand(arguments))
    if unknown:
        known = [flag(f.name) for settings in SECTIONS.values() for f in fields(settings)]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        raise ValueError(f"{unknown[0]}: unknown flag, {f'did you mean {close[0]}?' if close else '--help lists all'}")
    given = vars(given)
    preset = given.get("preset", "tiny")
    need(preset in PRESETS, f"--preset {preset}: unknown, use one of {', '.join(PRESETS)}")
    given = PRESETS[preset] | given
    config = Config(**{
        section: settings(**{f.name: given[f.name] for f in fields(settings) if f.name in given})
        for section, settings in SECTIONS.items()
    })
    checks.check(config, world)
    return config


def from_command_line() -> Config:
    """`parse` for the command line of this process, which may be one of many ranks.

    A mistake is the same on every rank. Rank 0 says it, the others keep silent and wait a moment, because torchrun
    kills everybody as soon as one rank has ended.
    """
    try:
        return parse(sys.argv[1:], int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        refuse(error)


def refuse(error: ValueError) -> None:
    """End this rank with exit code 2 because of something the user can mend; every rank must come here."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"train.py: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)
    os._exit(2)  # at once: process groups may exist, and other ranks be gone
