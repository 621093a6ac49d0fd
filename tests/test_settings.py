"""Every setting reaches the code: for each field of the configuration a run that it changes, or another test."""
from functools import cache
from pathlib import Path
from unittest.mock import patch

import grids
import numpy as np
import pytest
import runs
import torch

import train
from core import config
from run import job
from run.meter import Meter

MODEL = (grids.TINY + " --vocab 61 --seq-len 12 --dtype fp64 --steps 3 --warmup 1 --lr 0.02 --global-batch 8 "
                      "--sample-prompt= "
         "--device cpu")
MOE = "--experts 4 --expert-ffn 8"
LATENT = "--kv-heads 4 --kv-lora-rank 6 --rope-head-dim 2"
YARN = "--rope-type yarn --rope-scaling 8 --original-seq-len 40 --rope-theta 10"
FP8 = "--dtype fp32 --head-dim 16 --ffn 32 --fp8 tensorwise --layers 3"
UNSEEN = "--val-data {folder}/unseen.npy"
# Field -> (what else the run has, what is changed); the metrics of its three steps differ.
CHANGES = {
    "layers": ("", "--layers 3"), "hidden": ("", "--hidden 40"), "heads": ("", "--heads 2"),
    "kv_heads": ("", "--kv-heads 1"), "head_dim": ("", "--head-dim 6"), "ffn": ("", "--ffn 33"),
    "vocab": ("", "--vocab 62"), "tied": ("", "--tied"), "rope_theta": ("", "--rope-theta 100"),
    "rope_scaling": ("--rope-theta 1e9", "--rope-scaling 8"), "norm_eps": ("", "--norm-eps 0.1"),
    "rope_type": ("--rope-scaling 8", "--rope-type linear"),
    "original_seq_len": (YARN, "--original-seq-len 11"), "rope_fast_turns": (YARN, "--rope-fast-turns 1"),
    "rope_attention_factor": (YARN, "--rope-attention-factor 1.5"), "no_rope_every": ("", "--no-rope-every 2"),
    "rope_mscale": (f"{LATENT} {YARN}", "--rope-mscale 1"),
    "qk_norm": ("", "--qk-norm"), "qkv_bias": ("", "--qkv-bias"), "out_bias": ("", "--out-bias"),
    "ffn_bias": ("", "--ffn-bias"),
    "kv_lora_rank": (LATENT, "--kv-lora-rank 8"), "q_lora_rank": (LATENT, "--q-lora-rank 6"),
    "rope_head_dim": (LATENT, "--rope-head-dim 4"), "v_head_dim": (LATENT, "--v-head-dim 4"),
    "window": ("", "--window 3"), "full_attention_every": ("--window 3", "--full-attention-every 2"),
    "mtp": ("", "--mtp"),
    "mtp_weight": ("--mtp", "--mtp-weight 0.1"), "experts": (MOE, "--experts 5"), "top_k": (MOE, "--top-k 3"),
    "expert_ffn": (MOE, "--expert-ffn 9"), "shared_experts": (MOE, "--shared-experts 1"),
    "dense_layers": (MOE, "--dense-layers 1"), "router": (MOE, "--router sigmoid"),
    "router_norm": (MOE, "--no-router-norm"), "router_scale": (MOE, "--router-scale 2"),
    "expert_groups": (MOE, "--expert-groups 2"),
    "top_groups": (f"{MOE} --expert-groups 2", "--top-groups 2"),
    "dtype": ("", "--dtype fp32"), "fp8": (FP8, "--fp8 none"), "fp8_ends": (FP8, "--no-fp8-ends"),
    "moments_dtype": ("--dtype fp32", "--moments-dtype bf16"),
    "seq_len": ("", "--seq-len 13"), "global_batch": ("", "--global-batch 12"), "batch_ramp": ("", "--batch-ramp "
                                                                                                   "8@0,12@1"),
    "optimizer": ("", "--optimizer sgd"), "lr": ("", "--lr 0.03"), "lr_schedule": ("", "--lr-schedule constant"),
    "min_lr": ("", "--min-lr 0.01"), "warmup": ("", "--warmup 2"), "weight_decay": ("", "--weight-decay 0.5"),
    "betas": ("--betas 0.8,0.9", "--betas 0.8,0.7"), "betas, first": ("--betas 0.8,0.9", "--betas 0.7,0.9"),
    "z_loss": ("", "--z-loss 0.1"), "aux_loss": (MOE, "--aux-loss 1"),
    "aux_over": (f"{MOE} --aux-loss 1", "--aux-over micro-batch"), "router_z_loss": (MOE, "--router-z-loss 1"),
    "router_bias_rate": (f"{MOE} --router sigmoid", "--router-bias-rate 0.5"), "grad_clip": ("", "--grad-clip 0.01"),
    "steps": ("", "--steps 4"), "seed": ("", "--seed 1"), "data": ("", "--data {folder}/unseen.npy"),
    "data_weights": ("--data {folder}/train.npy {folder}/unseen.npy --data-weights 3,1", "--data-weights 1,1"),
    "data_dtype": ("--data {folder}/tokens.bin --data-dtype uint16", "--data-dtype uint32"),
    "separator": ("--mask-documents --separator 0", "--separator 5"),
    "mask_documents": ("--separator 0", "--mask-documents"),
    "val_data": ("", UNSEEN), "eval_every": (UNSEEN, "--eval-every 2"), "eval_steps": (UNSEEN, "--eval-steps 1"),
}
# Field -> (what else, what is changed); the losses are the same, and something that is counted differs.
COUNTED = {
    "micro_batch": ("", "--micro-batch 2"), "attention": ("", "--attention math"),
    "recompute": (f"{MOE} --aux-loss 1", "--recompute full")}
# Field -> (what else a grid of four ranks has, what is changed); what its ranks communicate differs.
COMMUNICATED = {
    "cp": ("", "--cp 2"), "cp_style": ("--cp 2", "--cp-style ring"),
    "cp_ulysses": ("--cp 4 --cp-style ring", "--cp-ulysses 2"), "tp": ("", "--tp 2"), "pp": ("", "--pp 2"),
    "schedule": ("--pp 2 --micro-batch 1", "--schedule afab"),
    "virtual_stages": ("--pp 2 --micro-batch 1 --layers 4 --schedule interleaved", "--virtual-stages 1"),
    "ep": (MOE, "--ep 2"), "zero": ("", "--zero 2"), "dp_replicate": ("--zero 1", "--dp-replicate 2"),
    "sp,": ("--tp 2", "--sp off"), "sp": ("--tp 2", "--sp async"),
    "bucket_mb": ("", "--bucket-mb 0")}
ELSEWHERE = {  # test -> its fields
    "test_cp.py::test_a_run_splits_the_documents_that_it_reads": "cp_zigzag",
    "test_offload.py::test_what_is_offloaded_is_on_the_host": "offload",
    "test_config.py::test_a_preset_fills_the_model_and_a_flag_overrides_any_of_its_fields": "preset",
    "test_config.py::test_choices_left_open_are_made": "dp",
    "test_zero.py::test_gradients_sent_in_bf16_take_half_the_bytes_and_are_rounded": "reduce_dtype",
    "test_checkpoint.py::test_a_resumed_run_is_the_uninterrupted_one_to_the_bit": "checkpoint_dir save_every resume",
    "test_checkpoint.py::test_a_change_of_model_or_data_is_refused_unless_insisted_on": "allow_mismatch",
    "test_checkpoint.py::test_a_downloaded_model_is_tuned_in_two_commands": "init_from export_hf",
    "test_train.py::test_a_run_says_what_it_does_learns_and_saves_when_it_is_asked_to_end": "metrics",
    "test_train.py::test_grids_train_evaluate_and_sample_as_one_process": "sample_prompt",
    "test_generate.py::test_flags_become_settings_of_train":
        "sample_chat sample_tokens sample_temperature sample_top_k sample_top_p sample_seed",
    "test_train.py::test_fewer_gpus_than_ranks_is_an_error_and_none_is_not": "device",
    "test_faults.py::test_a_time_limit_ends_a_run_which_without_out_saves_nothing": "time_limit",
    "test_kernels.py::test_a_run_in_which_no_kernel_works_is_one_with_kernels_torch": "kernels",
    "test_faults.py::test_too_many_skipped_steps_in_a_row_end_the_run": "max_skipped",
    "test_faults.py::test_a_rewind_leaves_out_the_samples_and_nothing_else": "rewind keep_checkpoints",
    "test_faults.py::test_replicas_are_compared_every_so_many_steps_and_before_a_checkpoint_is_saved": "check_replicas",
    "test_dryrun.py::test_the_command_prints_a_page": "dry_run",
    "test_plan.py::test_the_grid_that_is_chosen_is_the_best_one_that_was_found": "grid",
    "test_curves.py::test_both_get_the_numbers_of_the_metrics_and_a_resumed_run_continues": "tensorboard wandb",
    "test_profiling.py::test_a_trace_names_phases_and_actions": "profile",
    "test_profiling.py::test_what_cannot_be_written_is_refused_before_the_run": "memory_snapshot",
    "test_diloco.py::test_sites_train_as_several_models_in_plain_torch":
        "sites sync_every outer_lr outer_momentum sync_fragments sync_overlap",
    "test_diloco.py::test_a_resumed_run_is_the_uninterrupted_one_to_the_bit": "sync_dtype",
    "test_settings.py::test_collectives_wait_as_long_as_the_timeout_says": "timeout"}


def test_every_field_has_a_case():
    elsewhere = " ".join(ELSEWHERE.values()).split()
    cases = {name.split(",")[0] for name in (*CHANGES, *COUNTED, *COMMUNICATED, *elsewhere)}
    assert cases == config.FIELDS.keys()
    for place in ELSEWHERE:
        file, name = place.split("::")
        assert f"def {name}(" in Path(__file__).with_name(file).read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    for name, seed in ("train", 0), ("unseen", 1):
        np.save(folder / f"{name}.npy", np.random.default_rng(seed).integers(61, size=400).astype(np.uint16))
    np.random.default_rng(2).integers(61, size=400).astype(np.uint32).tofile(folder / "tokens.bin")
    return folder


@cache
def run(folder, flags: str) -> tuple[list[dict], Meter]:
    """The metrics of every step that do not depend on time, and what was counted."""
    (folder / "metrics").unlink(missing_ok=True)
    with Meter(memory=False) as meter:
        runs.run(f"{MODEL} --data {folder}/train.npy --metrics {folder}/metrics {flags}".format(folder=folder))
    kept = "step", "tokens", "loss", "grad_norm", "lr", "val_loss", "aux_loss", "load_max_over_mean"
    records = runs.metrics(folder / "metrics")
    return [{name: record[name] for name in kept if name in record} for record in records], meter


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_what_is_computed(folder, name):
    others, change = CHANGES[name]
    (before, _), (after, _) = run(folder, others), run(folder, f"{others} {change}")
    assert before != after


@pytest.mark.parametrize("name", COUNTED)
def test_a_setting_changes_how_it_is_computed(folder, name):
    others, change = COUNTED[name]
    (before, plain), (after, other) = run(folder, others), run(folder, f"{others} {change}")
    assert (plain.operations, plain.flops) != (other.operations, other.flops)
    for record, same in zip(before, after, strict=True):
        assert record == pytest.approx(same, rel=1e-10)


def communicated(lines: list[str]) -> list[list[tuple]]:
    """Name, group and shape of every collective of this rank in a step of each of these runs."""
    out = []
    for line in lines:
        _, groups, model, pipeline, optimizer, share = runs.first_step(f"{MODEL} --data {__file__} --vocab 257 {line}")
        axes = {group.process_group.group_name: axis for axis, group in groups.items() if group.size > 1}
        with Meter(memory=False) as meter:
            train.forward_backward(model, pipeline, optimizer, share, groups)
            optimizer.step(0.01)
        out.append([(axes.get(call.group), call.name, call.shape) for call in meter.collectives])
    return out


def test_a_setting_changes_what_is_communicated(pool):
    lines = {line for others, change in COMMUNICATED.values() for line in (others, f"{others} {change}")}
    found = dict(zip(lines, pool.run(4, communicated, lines=[*lines])[0]))
    for name, (others, change) in COMMUNICATED.items():
        assert found[others] != found[f"{others} {change}"], name


def waits(seconds: float) -> set[float]:
    """How long the groups of a run wait."""
    ended = []
    with patch.object(job, "finish", ended.append):
        runs.run(f"{MODEL} --data {__file__} --vocab 257 --steps 1 --tp 2 --timeout {seconds}")
    backends = [ended[0].groups[axis].process_group._get_backend(torch.device("cpu")) for axis in ("tp", "dp")]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_collectives_wait_as_long_as_the_timeout_says(pool):
    assert pool.run(4, waits, seconds=77.0) == [{77.0}] * 4
