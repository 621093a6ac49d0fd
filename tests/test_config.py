"""A wrong command line is answered with one line that names the flag, its value and what would work."""
import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from program import ROOT, python
from torch.distributed.run import get_args_parser

from core import config, rules
from plan import costs
from run import cli

LATENT = "--kv-lora-rank 8 --rope-head-dim 4 --kv-heads 4"
# Ranks, command line, part of its error. Errors of rules, choices and ranges have tests of their own below.
WRONG = [
    (8, "16", "16: unknown flag"),
    (8, "--dp", "--dp: expected one argument"),
    (8, "--cp 2 --pp 2 --dp 4",
     "--dp 4 x --cp 2 x --tp 1 x --pp 2 = 16 ranks, and there are 8: use --dp 2, or start 16"),
    (2, "--tp 2 --seq-len 255 --micro-batch 1", "--tp 2 cannot share --micro-batch 1 x --seq-len 255 = 255 tokens"),
    (1, "--help-me", "--help-me: unknown flag, --help lists all"),
    (1, "--preset llama-9b", "--preset llama-9b: unknown, use one of tiny, smollm-135m"),
    (8, "--sites 2 --tp 2 --dp 4",
     "--sites 2 x --dp 4 x --cp 1 x --tp 2 x --pp 1 = 16 ranks, and there are 8: use --dp 2, or start 16"),
    (8, "--sites 2 --pp 3", "--pp 3 does not divide the ranks of a site (4): use one of 1, 2, 4, or start more ranks"),
    (8, "--sites 2 --global-batch 20", "--global-batch 20 is not a multiple of --sites 2 x --dp 4: use 16 or 24"),
    (8, "--global-batch 20", "--global-batch 20 is not a multiple of --dp 8: use 16 or 24"),
    (8, "--micro-batch 3", "--micro-batch 3 does not divide a rank's share of --global-batch 16 (2): use one of 1, 2"),
    (1, "--batch-ramp 16", '--batch-ramp "16": write sequences@tokens'),
    (1, "--batch-ramp 16@100", "from 0 tokens on"),
    (1, "--batch-ramp 16@0,32@9,64@5", "in order, such as"),
    (8, "--batch-ramp 16@0,20@9", "--batch-ramp 20 is not a multiple of --dp 8"),
    (1, "--betas 0.9", "--betas 0.9: write two numbers from 0 to below 1, such as 0.9,0.95"),
    (1, "--betas 0.9,1", "--betas 0.9,1.0: write two numbers from 0 to below 1"),
    (1, "--betas 0.9,x", "--betas 0.9,x: write numbers with commas between them, such as 0.9,0.95"),
    (1, "--lr -1e-3", "--lr: expected one argument; one that begins with - is written as --lr=VALUE"),
    (1, "--preset deepseek-v3 --layers 2",
     "--dense-layers 3 needs more --layers than these (--dense-layers is of --preset deepseek-v3: give another)"),
    (2, "--pp 2 --schedule dualpipev --global-batch 3",
     "--schedule dualpipev --pp 2 --global-batch 3: 3 micro-batches: schedule dualpipev needs at least 4 on 2 ranks: "
     "use 4 or more sequences per step"),
    (4, "--pp 2 --schedule dualpipev --micro-batch 3 --global-batch 18",
     "--schedule dualpipev --pp 2 --micro-batch 3 --global-batch 18: 3 micro-batches: schedule dualpipev needs at "
     "least 4 on 2 ranks: use 24 or more sequences per step"),
    (1, "--data no/such/file", "--data no/such/file: no such file or folder"),
    *((1, f"--data {__file__} {__file__} --data-weights {weights}", f'--data-weights "{weights}": write a whole ')
      for weights in ("3", "3,1,1", "3,0", "0.7,0.3", "3,-1", "3,", "9999,2")),
    (1, "--data-weights 1", "above 0 for each of the 0 paths of --data, together at most 10,000"),
    (1, "--metrics /tmp", "--metrics /tmp: is a folder, name a file"),
    (1, "--global-batch 9999999999 --micro-batch 1",
     "9,999,999,999 micro-batches per step of --global-batch 9999999999: must be at most 100,000"),
    (1, "@no-such-file", "@no-such-file: there is no file no-such-file"),
    (1, "--resume auto", "--resume auto needs --checkpoint-dir"),
    (1, "--resume nowhere", "--resume nowhere: is no checkpoint, and no folder that has any"),
    (1, f"--checkpoint-dir {__file__}", f"--checkpoint-dir {__file__}: is a file"),
    (1, "--init_frm=a/folder/of/weights", "--init-frm=a/folder/of/weights: unknown flag, did you mean --init-from?"),
    (2, "--cp 2 --cp-zigzag document", "--cp-zigzag document needs --mask-documents"),
    (2, "--cp 2 --cp-zigzag document --mask-documents --window 8", "--cp-zigzag document needs --mask-documents, no "
                                                                   "--window"),
    (2, "--dry-run 0/8", "--dry-run on 2 ranks: one process pretends to be one of them, leave out torchrun"),
    *((1, f"--dry-run {asked}", f"--dry-run {asked}: write RANK/GPUS, such as 0/64 for the first of 64")
      for asked in ("8", "8/8", "0/0", "1/", "/8", "a/8", "0/-8", "0/8/8")),
    (1, "--dry-run 0/8 --tp 3", "--tp 3 does not divide the ranks that --pp leaves (8): use one of 1, 2, 4, 8"),
    (1, "--batch-ramp 16@0,0@9", '--batch-ramp "16@0,0@9": write sequences@tokens'),
    (1, f"--export-hf {__file__}", f"--export-hf {__file__}: is a file, name a folder"),
    (1, "--export-hf /proc/hf --checkpoint-dir run", "--export-hf /proc/hf: /proc cannot be written to: No such file"),
    (1, "--metrics a --checkpoint-dir a", "--metrics a: is the folder of --checkpoint-dir or --export-hf, name a file"),
    (1, "--profile /proc/a/b", "/proc/a/b: /proc cannot be written to: No such file or directory"),
    (4, "--pp 4 --layers 8 --schedule dualpipev --micro-batch 1 --batch-ramp 8@0,7@9",
     "--schedule dualpipev --pp 4 --micro-batch 1 --batch-ramp 8@0,7@9: 7 micro-batches: "),
    *((8, line, "") for line in (  # rules that require several things, of which REFUSED breaks another one
        f"{LATENT} --rope-head-dim 32", f"{LATENT} --cp 2 --cp-style ulysses", f"{LATENT} --qkv-bias",
        "--experts 8 --tp 2 --ffn 55 --expert-ffn 8 --dense-layers 1", "--no-fp8-ends --layers 3", "--virtual-stages 2",
        "--attention triton --dtype fp64", "--moments-dtype bf16 --dtype fp64", "--fp8 tensorwise --dtype fp16",
        "--experts 8 --expert-groups 4 --top-groups 5", "--rewind 1 --save-every 2 --checkpoint-dir a --max-skipped 0",
        "--offload activations --recompute selective")),
]


def what_is_said(line: str, ranks: int = 0) -> str:
    """Why a command line is refused, by default on 8 ranks or for a dry run; "" if it is not."""
    try:
        cli.parse(line.split(), ranks or (1 if "--dry-run" in line else 8))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks, line, says", WRONG, ids=[line for _, line, _ in WRONG])
def test_a_wrong_command_line_is_one_clear_line(ranks, line, says):
    said = what_is_said(line, ranks)
    assert says in said and said.startswith(("--", "@", "16: ")) and "\n" not in said


def changed(field) -> str:
    """The flag of a field with a value other than its default."""
    flag = config.flag(field.name)
    if field.type is bool:
        return f"--no-{flag[2:]}" if field.default else flag
    if choices := field.metadata["choices"]:
        return f"{flag} {next(value for value in choices if value != field.default)}"
    return f"{flag} {field.default + 1 if field.type is int else field.default + 0.25}"


# For every rule, in the order of its table: a command line on 8 ranks that it refuses, and why, after the first flag
# and its value. The first rules are in config.py: a setting without the one that it needs.
REFUSED = [(changed(field), f"needs {config.flag(field.metadata['needs'])}")
           for field in config.FIELDS.values() if field.metadata["needs"]] + [
    ("--heads 5", "does not divide --hidden (128): use one of 1, 2, 4, 8, 16, 32, 64, 128, or set --head-dim"),
    ("--kv-heads 3", "does not divide --heads (4): use one of 1, 2, 4"),
    ("--head-dim 15", "needs to be even: rotary embedding rotates pairs of channels"),

    ("--rope-type yarn", "needs a --rope-scaling other than 1"),
    ("--rope-type yarn --rope-scaling 4 --rope-theta 1", "needs a --rope-theta above 1"),
    ("--rope-type dynamic --head-dim 2", "needs heads in which at least 4 channels are rotated"),
    ("--original-seq-len 4096", "needs --rope-scaling other than 1 by --rope-type llama3 or yarn, or --rope-type dyn"),
    ("--rope-fast-turns 2.0 --rope-type dynamic", "needs --rope-scaling other than 1 by --rope-type llama3 or yarn"),
    ("--rope-fast-turns 1.0 --rope-scaling 4", "needs to be above 1, or 1 with --rope-type yarn"),
    ("--rope-attention-factor 1.5 --rope-scaling 4", "needs --rope-type yarn"),
    (f"--rope-mscale 1.0 {LATENT}", "needs --rope-type yarn"),
    (f"--no-rope-every 4 {LATENT}", "needs attention without latents, --kv-lora-rank 0"),

    ("--ffn-bias --experts 8", "needs a dense model: experts have no biases"),
    ("--expert-groups 3 --experts 8", "does not divide --experts (8): use one of 1, 2, 4, 8"),
    ("--top-k 1 --experts 8", "needs --no-router-norm: otherwise the expert's weight is always 1"),
    ("--experts 8 --top-k 9", "needs a --top-k of at most as many"),
    ("--top-groups 2 --experts 8", "needs at least as many --expert-groups"),
    ("--expert-groups 4 --experts 8 --top-k 3", "needs a --top-k of at most the number of experts in --top-groups"),
    ("--dense-layers 4 --experts 8", "needs more --layers"),

    ("--kv-lora-rank 8", "needs an even --rope-head-dim, above 0 and below --head-dim"),
    (f"{LATENT} --v-head-dim 33", "needs a --v-head-dim of at most --head-dim"),
    ("--kv-lora-rank 8 --rope-head-dim 4", "needs as many --kv-heads as --heads"),
    (f"{LATENT} --qk-norm", "needs neither --qk-norm nor --qkv-bias"),
    (f"--out-bias {LATENT}", "needs attention without latents, --kv-lora-rank 0"),

    ("--sites 3", "does not divide the number of ranks (8): use one of 1, 2, 4, 8, or start more ranks (torchrun"),
    ("--pp 3", "does not divide the number of ranks (8): use one of 1, 2, 4, 8, or start more ranks (torchrun"),
    ("--tp 3", "does not divide the ranks that --pp leaves (8): use one of 1, 2, 4, 8, or start more ranks (torchrun"),
    ("--cp 3", "does not divide the ranks that --pp and --tp leave (8): use one of 1, 2, 4, 8, or start more ranks"),

    ("--tp 8", "does not divide --heads (4): use one of 1, 2, 4"),
    ("--tp 2 --ffn 55", "does not divide --ffn (55): use one of 1, 5, 11, 55"),
    ("--tp 2 --experts 8 --expert-ffn 7 --shared-experts 1",
     "does not divide --shared-experts x --expert-ffn (7): use one of 1, 7"),
    ("--tp 4 --kv-heads 6 --heads 12 --head-dim 8", "needs --kv-heads that it divides, or that divide it"),
    ("--tp 8 --heads 8 --kv-heads 8 --vocab 7", "needs a --vocab of at least its size"),
    ("--sp async", "needs --tp 2 or more"),

    ("--cp 8 --cp-style ulysses", "does not divide the heads of a tensor-parallel rank (4): use one of 1, 2, 4, or "
                                  "another --cp-style"),
    ("--cp-ulysses 3 --cp 4", "does not divide --cp (4): use one of 1, 2, 4"),
    ("--cp-ulysses 4 --cp 4 --tp 2 --kv-heads 4",
     "does not divide the --kv-heads of a tensor-parallel rank (2): use one of 1, 2"),
    ("--cp-ulysses 2 --cp 2", "needs a larger --cp, and --cp-style "),
    ("--cp-zigzag document --cp 2 --mask-documents --cp-style ulysses",
     "needs --mask-documents, no --window, and --cp ranks that exchange keys"),
    (f"{LATENT} --cp 2 --cp-style ring", "needs --cp-style allgather only"),

    ("--rope-type dynamic --mask-documents", "needs sequences of one document"),
    ("--rope-type dynamic --cp 2 --tp 2 --seq-len 12", "needs a --seq-len that --cp ranks divide without padding"),

    ("--schedule afab", "needs --pp 2 or more"),
    ("--virtual-stages 2 --pp 2", "needs --pp 2 or more and another --schedule: "),
    ("--pp 8", "needs --layers of at least --pp x --virtual-stages"),

    ("--dp-replicate 3 --zero 1", "does not divide --dp (8): use one of 1, 2, 4, 8"),
    ("--dp-replicate 8 --zero 3", "needs a larger --dp x --cp: a replica on one rank shards nothing"),
    ("--ep 4 --experts 6", "does not divide --experts (6): use one of 1, 2, 3, 6"),
    ("--ep 8 --experts 8 --zero 1 --dp-replicate 2",
     "does not divide the ranks of --dp, --cp and --tp in a replica (4): use one of 1, 2, 4"),

    ("--fp8 tensorwise --dtype fp64", "needs --dtype bf16, or fp32 where a CPU emulates FP8"),
    ("--fp8 tensorwise --sp async --tp 2", "needs --sp on or off"),
    ("--no-fp8-ends --fp8 tensorwise --layers 2", "needs --fp8, and --layers 3 or more"),
    ("--moments-dtype bf16 --optimizer sgd", "needs --optimizer adamw, and another --dtype than fp64"),
    ("--moments-dtype bf16 --betas 0.9,0.991", "needs --betas whose second is at most 0.99"),
    ("--reduce-dtype bf16 --dtype fp64", "needs another --dtype than fp64"),
    ("--attention triton --head-dim 258", "needs --head-dim 256 or less, and another --dtype than fp64"),
    ("--kernels torch --attention triton", "needs another --attention than triton"),
    ("--offload activations", "needs --recompute full"),

    ("--min-lr 0.0021", "needs an --lr of at least as much"),
    ("--warmup 201", "needs at least as many --steps"),
    ("--separator 257", "needs a larger --vocab: the largest token is --vocab - 1"),
    ("--rewind 1", "needs --max-skipped, and --save-every, for a checkpoint to go back to"),

    ("--offload optimizer --dry-run 0/8", "needs a real run: "),
    ("--grid auto --dry-run 0/8", "needs a real run: "),
    ("--mask-documents --dry-run 0/8", "needs a real run: "),

    ("--sync-fragments 3 --sites 2", "does not divide --sync-every (50): use one of 1, 2, 5, 10, 25, 50"),
    ("--sync-fragments 5 --sites 2", "needs at least as many --layers"),
    ("--sync-overlap 25 --sites 2 --sync-fragments 2", "needs a --sync-every / --sync-fragments above it"),
    ("--outer-momentum 1.0 --sites 2", "needs a value below 1"),
    ("--sync-dtype bf16 --sites 2 --dtype fp64", "needs another --dtype than fp64"),
    ("--sync-every 30 --sites 2", "does not divide --steps (200): use one of 1, 2, 4, 5, 8, 10, 20, 25, 40, 50, "),
    ("--sync-every 50 --sites 2 --save-every 25 --checkpoint-dir a", "does not divide --save-every (25): use one of "),
    (f"--sync-every 50 --sites 2 --eval-every 20 --val-data {__file__}", "does not divide --eval-every (20): use one "),
    ("--sync-every 50 --sites 2 --check-replicas 10", "does not divide --check-replicas (10): use one of 1, 2, 5, 10"),
    ("--offload optimizer --sites 2", "needs --sites 1: the outer optimizer's state stays on the device"),
    ("--rewind 1 --sites 2 --save-every 50 --checkpoint-dir a", "needs --sites 1: sites skip different steps"),
    ("--grid auto --sites 2", "needs --sites 1: the planner knows no sites"),
    ("--sites 2 --dry-run 0/8", "needs a real run: --dry-run shows one step")]


def what_refuses(line: str) -> int | None:
    """The number of the rule that refuses a command line, in the order of `rules.every_rule`; None: no rule does."""
    every_rule, refused_by = rules.every_rule, []

    def check(number, rule, c):
        try:
            rule.check(c)
        except ValueError:
            refused_by.append(number)
            raise

    def watched(c):
        return [SimpleNamespace(setting=rule.setting, check=partial(check, number, rule))
                for number, rule in enumerate(every_rule(c))]

    with patch.object(rules, "every_rule", watched):
        what_is_said(line)
    return refused_by[0] if refused_by else None


def test_every_rule_refuses_a_command_line():
    refused_by = [what_refuses(line) for line, _ in REFUSED]
    assert refused_by == list(range(len(rules.every_rule(rules.parse([])))))


@pytest.mark.parametrize("refused, why", REFUSED, ids=[line for line, _ in REFUSED])
def test_a_rule_names_flag_and_value_and_what_would_work(refused, why, monkeypatch):
    """The divisors that it proposes it accepts, and no other rule says the same."""
    every_rule, number = rules.every_rule, what_refuses(refused)
    line, rule = what_is_said(refused), every_rule(rules.parse([]))[number]
    asked, _, others = refused.partition(" --")
    name, _, value = asked.partition(" ")
    assert line.startswith(f"{asked} {why}") and "\n" not in line
    if isinstance(rule, rules.Divides):
        proposed = re.search(r"use (?:one of )?([\d, ]+\d)", line)[1].split(", ")
        assert value not in proposed
        for works in proposed:
            said = what_is_said(f"{name} {works} --{others}" if others else f"{name} {works}")
            assert f"divide {rule.what} " not in said
    else:
        assert line == f"{asked} needs {rule.missing}"
    monkeypatch.setattr(rules, "every_rule", lambda c: [rule for i, rule in enumerate(every_rule(c)) if i != number])
    assert what_is_said(refused) != line


def test_help_names_the_setting_that_a_setting_needs():
    """Last, before the default."""
    helps = {action.dest: action.help for action in config.make_parser()._actions}
    for name, field in config.FIELDS.items():
        found = re.search(r"Needs (--[\w-]+)\.(?: \[[^][]*\])?$", helps[name])
        needed = field.metadata["needs"]
        assert (found and found[1]) == (config.flag(needed) if needed else None), name


POSITIVE = {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "rope_theta", "rope_scaling", "norm_eps", "top_k",
            "router_scale", "expert_groups", "top_groups", "dp", "cp", "cp_ulysses", "tp", "pp", "ep", "dp_replicate",
            "seq_len", "global_batch", "mtp_weight", "eval_steps", "timeout", "head_dim", "v_head_dim", "expert_ffn",
            "virtual_stages", "micro_batch", "lr", "sample_tokens", "sample_top_p", "sites", "sync_every", "outer_lr",
            "sync_fragments", "original_seq_len", "rope_fast_turns", "rope_attention_factor"}


@pytest.mark.parametrize("field", [field for field in config.FIELDS.values() if field.type in (int, float)
                                   and not field.metadata["choices"]], ids=lambda field: field.name)
def test_a_number_outside_its_range_is_refused_by_its_flag(field):
    """And 0 where it has no meaning. What is no number is no value of it."""
    others, ranks = f"--experts 8 --mtp --val-data {__file__} --checkpoint-dir no/such/folder --save-every 1", 1
    if field.name == "virtual_stages":
        others, ranks = "--pp 2 --schedule interleaved", 2
    if field.metadata["needs"] == "sites":
        others, ranks = "--sites 2", 2
    flag, wrong = config.flag(field.name), "1.5" if field.type is int else "soon"
    outside = ["-7"] + ["0"] * (field.name in POSITIVE) + ["inf", "nan"] * (field.type is float)
    refused = {value: f"^{flag} ({field.type(value)}|{value})\\b" for value in outside}
    refused[wrong] = f"^{flag} {wrong}: write a {'whole ' * (field.type is int)}number( or auto)?$"
    refused[str(field.metadata["most"] + 1)] = f"^{flag} .*: must be at most "
    for value, says in refused.items():
        assert re.search(says, what_is_said(f"{others} {flag} {value}", ranks))
    assert field.name in POSITIVE or not what_is_said(f"{others} {flag} 0", ranks)


AUTO = {"dp", "lr", "min_lr", "warmup", "head_dim", "v_head_dim", "expert_ffn", "virtual_stages", "micro_batch",
        "separator", "rope_fast_turns", "rope_attention_factor"}  # besides settings with auto among their choices


@pytest.mark.parametrize("name", sorted(AUTO))
def test_a_number_that_follows_from_other_settings_is_auto(name):
    """The number that stands for it in this program is no value of the flag."""
    field = config.FIELDS[name]
    assert config.read([config.flag(name), "auto"]) == {name: field.default}
    assert config.written(name, field.default) == "auto" and config.written(name, 3) == "3"
    action, = (action for action in config.make_parser()._actions if action.dest == name)
    assert action.help.endswith(" [auto]")
    with pytest.raises(ValueError, match=rf"^{config.flag(name)} {field.default}: must be .*, or auto$"):
        config.read([config.flag(name), str(field.default)])


def test_no_other_number_is_auto():
    assert AUTO == {name for name, field in config.FIELDS.items() if field.metadata["auto"]}
    for name, field in config.FIELDS.items():
        if name not in AUTO and field.type in (int, float) and not field.metadata["choices"]:
            with pytest.raises(ValueError, match=f"^{config.flag(name)} auto: write a (whole )?number$"):
                config.read([config.flag(name), "auto"])


@pytest.mark.parametrize("old", config.RENAMED)
def test_an_old_flag_is_refused_by_the_name_that_it_has_now(old):
    new = config.RENAMED[old]
    assert old not in config.FIELDS and new in config.FIELDS
    for words in [config.flag(old), "1"], [f"{config.flag(old)}=1"]:
        assert what_is_said(" ".join(words)).endswith(f": this flag is called {config.flag(new)} now")
    if config.FIELDS[new].type is bool:
        assert what_is_said(f"--no-{config.flag(old)[2:]}").endswith(f" is called --no-{config.flag(new)[2:]} now")


@pytest.mark.parametrize("theirs", config.IN_OTHER_TRAINERS)
def test_a_flag_of_another_trainer_is_refused_by_the_name_of_ours(theirs):
    ours = config.IN_OTHER_TRAINERS[theirs]
    assert theirs not in config.FIELDS and theirs not in config.RENAMED and ours in config.FIELDS
    assert what_is_said(f"{config.flag(theirs)} 1") == (
        f"{config.flag(theirs)}: unknown flag, see {config.flag(ours)} in --help")


@pytest.mark.parametrize("line, says", [
    ("--num-gpus 8", "--num-gpus: unknown flag: torchrun --nproc_per_node "), ("--fsdp", "give --zero 3"),
    ("--epochs 3", "give --steps; samples are read again "), ("--deepspeed x.json", "give --zero, "),
    ("--model llama", "give --preset NAME, or --init-from FOLDER "),
    ("--recompute-activations", "--recompute selective"),
    ("--tokenizer t.json", "python -m run.data tokenize "), ("--wandb-project a", "see --wandb in --help"),
    ("--train-data a", "see --data in --help"), ("--norm-ep 1", "did you mean --norm-eps?"),
    ("--gpus 8", "unknown flag, --help lists all"),
    ("--preset meta-llama/Llama-3.1-8B", "--preset meta-llama/Llama-3.1-8B: unknown, did you mean llama-3.1-8b?"),
    ("--init-from meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B --local-dir FOLDER "),
    ("--init-from no/such/folder", "no/such/folder/config.json: there is no such file")])
def test_a_name_from_elsewhere_is_answered_with_what_to_give(line, says):
    assert says in what_is_said(line) and set(config.ANSWERS).isdisjoint((*config.FIELDS, *config.IN_OTHER_TRAINERS))


def no_values(field) -> list[tuple[list[str], str]]:
    """Words that give a flag what is no value of it, and how the error begins."""
    name = config.flag(field.name)
    if field.type is bool:
        return [([f"{switch}=yes"], f"{switch}=yes: ") for switch in (name, f"--no-{name[2:]}")]
    if field.type is list:
        return [([name, "no/such/path"], f"{name} no/such/path: ")]
    if field.type is str and not field.metadata["choices"]:  # but for this every text may be one
        return [([f"{name}=a\0b"], f"{name}: has a NUL byte")]
    out = [([name, "a value"], f"{name} a value: "), ([f"{name}=@x"], f"{name} @x: "), ([name, "@x"], f"{name} @x: "),
           ([f"{name}="], f"{name} '': "), ([name.replace("-", "_").replace("__", "--"), "1x"], f"{name} 1x: ")]
    return [*out, ([name], f"{name}: ")]


@pytest.mark.parametrize("field", config.FIELDS.values(), ids=lambda field: field.name)
def test_what_is_no_value_is_one_line_that_begins_with_the_flag_and_the_value(field, monkeypatch, capsys):
    """And exit code 2, and no name that nobody can type."""
    for words, begin in no_values(field):
        with patch.object(os, "_exit", side_effect=SystemExit) as ended, pytest.raises(SystemExit):
            command_line(monkeypatch, 1, words)
        ended.assert_called_once_with(2)
        said = capsys.readouterr().err
        assert said.startswith(f"train.py: {begin}") and said.count("\n") == 1
        assert not re.search(r"\w_\w|\bint\b|\bfloat\b|\btuple\b|<|Error", said.removeprefix(f"train.py: {begin}"))
        choices = map(str, field.metadata["choices"] or [])
        assert all(re.search(rf"[ {{]{re.escape(choice)}(,|$)", said, re.MULTILINE) for choice in choices) or words == [
            config.flag(field.name)]


COMMANDS = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(ROOT.glob("*/*.py"))
            if re.search("^class Flags:", path.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_value_of_another_commands_flag_is_one_line_too(command):
    """These declare their flags as train.py does its own."""
    flags = importlib.import_module(command).Flags
    for field in fields(flags):
        for words, begin in no_values(field) if field.type not in (bool, list) else ():
            if "_" not in words[0] and "\0" not in words[0]:  # what only train.py takes, or refuses
                with pytest.raises(ValueError, match=f"^{re.escape(begin)}[^\n]+$"):
                    config.read_known(flags, words, "usage")
    wrong = [field for field in fields(flags) if field.metadata["choices"] or field.type in (int, float)]
    if wrong and not command.startswith("bench."):  # which python -m bench starts, on GPUs
        program, name = command.removesuffix(".__main__"), config.flag(wrong[0].name)
        done = python("-m", program, name, "a value")
        assert done.returncode == 2 and re.fullmatch(rf"{program}: {name} a value: [^\n]+\n", done.stderr)


def test_the_value_of_a_flag_may_begin_with_an_at_sign(tmp_path):
    """As decorators do. Elsewhere it begins the name of a file of flags, also after the paths of a list."""
    file = tmp_path / "flags"
    file.write_text("--seq-len 8 --sample-prompt\n@property")
    for words in ["--sample-prompt", "@dataclass"], ["--sample-prompt=@dataclass"]:
        assert rules.parse(words).run.sample_prompt == "@dataclass"
    parsed = rules.parse(["--tied", f"@{file}", "--data", __file__, f"@{file}"])
    assert (parsed.batch.seq_len, parsed.run.sample_prompt, parsed.data.data) == (8, "@property", [__file__])


@pytest.mark.parametrize("preset", [name for name, values in config.PRESETS.items() if values.get("experts")])
def test_without_experts_a_preset_is_its_dense_model(preset):
    """Whatever else it says of them. So it is without latent attention."""
    dense = rules.parse(["--preset", preset, "--experts", "0"])
    assert costs.parameters(dense.model).experts == dense.model.shared_experts == dense.optim.router_bias_rate == 0
    assert dense.model.ffn == config.PRESETS[preset]["ffn"]
    if dense.model.kv_lora_rank:
        heads = rules.parse(["--preset", preset, "--kv-lora-rank", "0"]).model
        assert costs.attention_elements(heads) == heads.hidden * 4 * heads.heads * heads.head_dim


@pytest.mark.parametrize("ranks, line", [  # what is just outside is in REFUSED
    (1, "--moments-dtype bf16 --betas 0,0.99"), (1, "--attention triton --head-dim 256"), (1, "--separator 256"),
    (1, "--timeout 1e7"), (1, "--layers 10000"), (1, "--lr 1e-3 --min-lr 1e-3"), (1, "--warmup 200"),
    (1, "--steps 0 --warmup 1"), (1, "--experts 8 --dense-layers 3"), (1, "--experts 8 --top-k 8"),
    (1, "--experts 8 --expert-groups 4 --top-k 2"), (1, "--experts 8 --expert-groups 4 --top-groups 4"),
    (1, LATENT), (1, f"{LATENT} --v-head-dim 32"), (1, f"{LATENT} --rope-head-dim 30"), (2, f"{LATENT} --cp 2"),
    (1, "--experts 1 --top-k 1"), (1, "--router sigmoid --experts 2"), (2, "--pp 2 --layers 2"),
    (1, "--virtual-stages 1"),
    (2, "--experts 8 --tp 2 --ffn 55 --expert-ffn 8"), (8, "--tp 8 --heads 8 --kv-heads 8 --vocab 8"),
    (2, "--tp 2 --seq-len 255 --micro-batch 1 --sp off"), (4, "--tp 2 --seq-len 255 --micro-batch 1 --cp 2 --dp 1"),
    (1, "--no-fp8-ends --fp8 tensorwise --layers 3"), (1, "--rewind 1 --save-every 2 --checkpoint-dir a"),
    (8, "--zero 3 --dp-replicate 4"), (4, "--dp 2 --cp 2 --zero 1 --dp-replicate 2"),
    (1, "--offload activations --recompute full")])
def test_what_is_just_within_a_limit_is_accepted(ranks, line):
    rules.parse(line.split(), ranks)


@pytest.mark.parametrize("flags, ranks, micro_batch", [
    ("--global-batch 16", 2, 8), ("--pp 4", 4, 2), ("--pp 2", 2, 4), ("--pp 2", 8, 1), ("--tp 4", 4, 16),
    ("--pp 2 --global-batch 12", 2, 3), ("--pp 4 --global-batch 4", 4, 1), ("--pp 2 --global-batch 30", 2, 6),
    ("--pp 4 --layers 8 --schedule dualpipev", 4, 2), ("--pp 2 --global-batch 7", 2, 1),
    ("--pp 2 --tp 2 --seq-len 5", 4, 4), ("--pp 2 --tp 2 --seq-len 5 --global-batch 4", 4, 2)])
def test_without_a_micro_batch_a_pipeline_is_filled(flags, ranks, micro_batch):
    """With 2 pp micro-batches, or as near to it as the batch and tensor parallelism allow."""
    assert rules.parse(f"{flags} --data {__file__}".split(), ranks).batch.micro_batch == micro_batch


def test_a_wrong_file_of_flags_is_one_line(tmp_path):
    file, other = tmp_path / "first", tmp_path / "second"
    other.write_text(f"@{file}")
    for content, says in ((b"--seed \xff", f"@{file}: cannot be read: 'utf-8' codec can't decode byte 0xff in"),
                          (b"--seed '1", f"@{file}: cannot be read: No closing quot"),
                          (f"--seq-len 8 @{other}".encode(), f"@{file}: the file reads itself"),
                          (b"--checkpoint-dir a\0b", "--checkpoint-dir: has a NUL byte$")):
        file.write_bytes(content)
        assert re.match(says, what_is_said(f"@{file}"))


@pytest.mark.parametrize("flags, says", [
    ("--metrics {0}/m", "--metrics {0}/m: {0} cannot be written to"),
    ("--metrics {0}/out/latest --checkpoint-dir {0}/out",
     "--metrics {0}/out/latest: is the folder of --checkpoint-dir or --export-hf, name a file that checkpoints do not "
     "have"),
    ("--export-hf {0}/hf --checkpoint-dir {0}/out",
     "--export-hf {0}/hf: has config.json, which is no file, name another folder"),
    ("--metrics {0}/loop", "{0}/loop: Too many levels of symbolic links")], ids=["access", "latest", "export", "loop"])
def test_a_path_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (str(tmp_path), os.W_OK))
    (tmp_path / "out").mkdir()
    (tmp_path / "hf" / "config.json").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    with patch.object(os, "_exit", side_effect=SystemExit) as ended, pytest.raises(SystemExit):
        command_line(monkeypatch, 1, flags.format(tmp_path))
    ended.assert_called_once_with(2)
    assert capsys.readouterr().err == f"train.py: {says.format(tmp_path)}\n"


def test_a_file_without_a_metric_is_not_taken_for_metrics(tmp_path):
    """A resumed run cuts it. A pipe that nobody reads would be waited for."""
    pipe, file, link = (str(tmp_path / name) for name in ("pipe", "file", "link"))
    os.mkfifo(pipe)
    os.symlink(file, link)
    assert what_is_said(f"--metrics {pipe}").startswith(f"--metrics {pipe}: is a pipe, name a file")
    assert not what_is_said(f"--metrics {file}")  # which is not there
    resumes = f"--resume auto --checkpoint-dir {tmp_path}/none --metrics {file}"
    for content, refused in ((b"", False), (b'a line\n{"step": 0}\n', True), (b'{"step": 0, "lo', True)):
        Path(file).write_bytes(content)
        assert not what_is_said(resumes) and not what_is_said(f"--metrics {file} --dry-run 0/1")
        says = f"--metrics {file}: has steps of another run: give --resume auto to continue it, or another file"
        assert what_is_said(f"--metrics {file}") == (says if refused else "")
    for content in b"some notes\n", b'{"rank": 0}\n', b"\x93NUMPY\xff\n":
        Path(file).write_bytes(content)
        for name in file, link:
            assert f"--metrics {name}: has lines, but none of metrics" in what_is_said(f"--metrics {name}")
        assert not what_is_said(f"--metrics {file} --dry-run 0/1")


def test_a_real_run_answers_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-X", "importtime", "train.py", "--ep", "2"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == ["train.py: --ep 2 needs --experts"]
    assert "torch" not in done.stderr.replace(lines[0], "")


def test_under_torchrun_rank_0_says_it_once_and_torchrun_repeats_it():
    done = python(*"-m torch.distributed.run --nproc_per_node=4 train.py --ep 2".split())
    said = "train.py: --ep 2 needs --experts"
    assert done.returncode and done.stderr.count(said) == 2 and done.stderr.splitlines().count(said) == 1
    assert f"traceback : {said}" in done.stderr.split("Root Cause")[1]


def test_flags_can_be_written_in_every_way(tmp_path):
    file = tmp_path / "run.args"
    file.write_text("\ufeff--seq-len 64   # tokens\n--mask_documents\n\n# more\n--betas 0.8,0.9")
    for line in ("--global-batch 32 --seq-len 64", "--global_batch 32 --seq-len=64", "--global_batch=32 @" + str(file)):
        parsed = rules.parse(line.split(), 2)
        assert (parsed.batch.global_batch, parsed.batch.seq_len, parsed.batch.micro_batch) == (32, 64, 16)
    assert parsed.data.mask_documents and parsed.optim.betas == (0.8, 0.9)
    assert rules.parse(["--metrics=my_run.jsonl"]).run.metrics == "my_run.jsonl"


def test_a_preset_fills_the_model_and_a_flag_overrides_any_of_its_fields():
    """Experts are balanced as in DeepSeek-V3's report, section 4.2: update speed 0.001, balance factor 0.0001."""
    model = rules.parse("--preset llama-3.1-8b --layers 3 --tied".split()).model
    assert (model.layers, model.hidden, model.kv_heads, model.head_dim, model.tied) == (3, 4096, 8, 128, True)
    for preset in "llama-3.1-8b", "mixtral-8x7b":
        for name, value in config.PRESETS[preset].items():
            choices = config.FIELDS[name].metadata["choices"]
            other = next(choice for choice in choices if choice != value) if choices else 2 * value
            line = f"--preset {preset} {config.flag(name)} {other}".split()
            assert (rules.parse(line[:2]).value(name), rules.parse(line).value(name)) == (value, other), name
    for flags, router_bias_rate in ("", 0.001), (" --router-bias-rate 0", 0):
        optim = rules.parse(f"--preset deepseek-v3{flags}".split()).optim
        assert (optim.router_bias_rate, optim.aux_loss, optim.aux_over) == (router_bias_rate, 0.0001, "sequence")


def test_choices_left_open_are_made():
    parsed = rules.parse([], 8)
    assert (parsed.grid.dp, parsed.batch.micro_batch, parsed.model.head_dim) == (8, 2, 32)
    assert (parsed.optim.lr, parsed.optim.min_lr) == (2e-3, 2e-4)
    assert rules.parse(["--preset", "llama-3.1-8b"]).optim.lr == pytest.approx(3e-4, rel=0.03)
    assert rules.parse(["--batch-ramp", "16@0,24@9"]).batch.micro_batch == 8  # which divides both
    assert [rules.parse(["--steps", steps]).optim.warmup for steps in ("9", "50", "200", "9999")] == [0, 5, 20, 20]
    assert rules.parse("--experts 4 --ffn 40".split()).model.expert_ffn == 40
    for vocab, dtype in (2**16, "uint16"), (2**16 + 1, "uint32"):  # the largest token is vocab - 1
        assert rules.parse(["--vocab", str(vocab)]).data.data_dtype == dtype


def test_torchrun_lets_every_flag_through_and_help_shows_it_with_its_default():
    """Torchrun's parser reads ours first, and refuses those that are the beginning of several of its flags."""
    text = config.make_parser().format_help()
    for name in config.FIELDS:
        arguments = ["train.py", config.flag(name), "1"]
        assert get_args_parser().parse_args(arguments).training_script_args == arguments[1:]
        assert re.search(config.flag(name) + "[ ,]", text)
    helps = {action.dest: action.help for action in config.make_parser()._actions}
    for name, end in dict(layers=" [4]", sp=" [on]", tied=" [off]", betas=" [0.9,0.95]").items():
        assert helps[name].endswith(end), name
    for name, field in config.FIELDS.items():
        shown = re.search(r" \[([^][]+)\]$", helps[name])
        if field.type is bool:
            assert shown[1] == ("on" if field.default else "off"), name
        elif field.type is list or field.default == "":
            assert shown is None, name
        else:  # typed after the flag, it is the default
            assert config.read([config.flag(name), shown[1]]) == {name: field.default}


LAUNCHED = dict(WORLD_SIZE="2", RANK="0", MASTER_PORT="29500", MASTER_ADDR="localhost")


@pytest.mark.parametrize("wrong", ["WORLD_SIZE=two", "RANK=2", "RANK=-1", "MASTER_PORT=", "MASTER_PORT=65536",
                                   "MASTER_ADDR=", "LOCAL_RANK=abc", "LOCAL_WORLD_SIZE=0"])
def test_what_a_launcher_sets_wrongly_is_one_clear_line(monkeypatch, wrong):
    monkeypatch.setattr(os, "environ", LAUNCHED | dict([wrong.split("=")]))
    with pytest.raises(ValueError, match=f"(^| ){wrong}[ :].*start ranks with torchrun, which sets (it|them)$"):
        cli.ranks_started()


def test_without_a_standard_output_and_a_current_folder_a_mistake_is_one_line(tmp_path):
    shell = f"cd {tmp_path} && rmdir {tmp_path} && {sys.executable} {ROOT}/train.py >&-"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "train.py: the current folder: No such file or directory\n")


def command_line(monkeypatch, ranks: int, line: str | list[str], **environment: str) -> config.Config:
    monkeypatch.setattr(os, "environ", LAUNCHED | dict(WORLD_SIZE=str(ranks)) | environment)
    monkeypatch.setattr("sys.argv", ["train.py", *(line.split() if isinstance(line, str) else line)])
    return cli.from_command_line()


@pytest.mark.parametrize("ranks, line, axes", [
    (8, "", (2, 2, 2)), (4, "", (2, 2, 1)), (2, "", (2, 1, 1)), (6, "--global-batch 12", (6, 1, 1)),
    (8, "--steps 3", (2, 2, 2)),
    (8, "--dp 8", (8, 1, 1)), (8, "--tp 4", (2, 4, 1)), (8, "--zero 3", (8, 1, 1)), (8, "--layers 3", (8, 1, 1)),
    (8, "--preset smollm-135m", (8, 1, 1)), (4, "--seq-len 255 --micro-batch 1", (4, 1, 1)),
    (8, "--resume auto --checkpoint-dir no/such/folder", (8, 1, 1)), (8, "--init-from folder", (8, 1, 1))])
def test_a_command_line_that_names_no_grid_shows_one(monkeypatch, ranks, line, axes):
    monkeypatch.setattr(cli.huggingface, "read_config", lambda folder: dict(layers=4))
    monkeypatch.setattr(cli.huggingface, "check_weights", lambda *_: [])
    grid = (settings := command_line(monkeypatch, ranks, line)).grid
    assert (grid.dp, grid.tp, grid.pp) == axes
    assert settings.grid_is_example == (axes in ((2, 2, 2), (2, 2, 1)))


@pytest.mark.parametrize("line, visible, hidden", [
    ("", {}, 1024), ("--steps 3", dict(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"), 1024),
    ("", dict(CUDA_VISIBLE_DEVICES="0,1"), 128), ("", dict(CUDA_VISIBLE_DEVICES=""), 128),
    ("--device cpu", {}, 128), ("--preset tiny", {}, 128)])
def test_with_a_gpu_for_each_rank_the_model_is_not_a_toy(monkeypatch, tmp_path, line, visible, hidden):
    for number in range(8):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(cli, "GPUS", str(tmp_path))
    settings = command_line(monkeypatch, 8, line, LOCAL_WORLD_SIZE="8", **visible)
    assert settings.model.hidden == hidden and (settings.batch.seq_len == 2048) == (hidden == 1024)


@pytest.mark.parametrize("local_rank, said", [("0", "train.py: wrong\n"), ("1", "")])
def test_of_every_node_the_first_rank_says_what_is_wrong(local_rank, said, monkeypatch, capsys):
    """Rank 8 is the first of the second node. Its torchrun cannot be told."""
    monkeypatch.setattr(os, "environ", dict(RANK="8", LOCAL_RANK=local_rank, TORCHELASTIC_ERROR_FILE="/no/folder/e"))
    with patch.object(os, "_exit") as ended, patch.object(cli.time, "sleep"):
        cli.refuse(ValueError("wrong"))
    ended.assert_called_once_with(2)
    assert capsys.readouterr().err == said
