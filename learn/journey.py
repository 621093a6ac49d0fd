"""The playbook's journey in numbers: four models from 8 GPUs to 512, each step with what plan/ says of it.

    python -m learn.journey            writes docs/JOURNEY.md

A leg is (title, preset, settings of all its steps, steps). A step is a grid and the reason for it; {names} in a reason
are from `numbers_of` that grid; {faster} compares it with the previous one.
"""
from pathlib import Path
from typing import Any

from collectives import run_demo
from plan import costs, machines, predict, published, search, time

FILE = Path(__file__).parent.parent / "docs" / "JOURNEY.md"
MACHINE = "h100-efa"  # the cluster of the playbook: H100s, 8 per node, EFA between nodes
MEMORY = machines.MACHINES[MACHINE].memory_bytes / 1e9
USABLE = time.CONSTANTS.usable * MEMORY

LEGS: list[tuple[str, str, dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    ("Llama 3.2 1B: data parallelism is enough, up to some hundred GPUs",
     "llama-3.2-1b", dict(seq=4096, global_batch=512), [
        (dict(dp=1, micro_batch=4),
         "Why not one GPU? It fits: {state:.0f} GB of state and {activations:.0f} GB of activations. But a step of "
         "2M tokens takes {step:.0f} s."),
        (dict(dp=8, micro_batch=4),
         "Data parallelism in a node: {faster:.1f} times as fast. Every rank still holds all {state:.0f} GB of state."),
        (dict(dp=8, zero=1, micro_batch=4), "ZeRO-1 sends as many bytes and leaves {state:.0f} GB of it."),
        (dict(dp=64, zero=1, micro_batch=4),
         "Eight nodes: gradients cross the network, and are reduced under the backward; {exposed:.0%} of the step is "
         "communication that nothing hides."),
        (dict(dp=256, zero=1, micro_batch=2),
         "Here plain data parallelism ends: every hop of a ring of 256 has its latency, and with two sequences per "
         "rank there is one backward to hide it under: {exposed:.0%} is exposed."),
        (dict(dp=128, tp=2, zero=1, micro_batch=4),
         "tp 2 halves the ring and what a rank sends in it: {exposed:.0%} exposed, MFU {mfu:.0%}. More GPUs need a "
         "larger batch, and that has its limit, the critical one.")]),
    ("Llama 3.1 8B: when to shard", "llama-3.1-8b", dict(seq=4096, global_batch=1024), [
        (dict(dp=1, micro_batch=1),
         "Why not one GPU? State alone is {state:.0f} GB, an H100 has 80. No recomputation helps with that."),
        (dict(dp=8, zero=1, micro_batch=2),
         "ZeRO-1 on a node shards the optimizer: {state:.0f} GB of state are left, weights and gradients. With "
         "{activations:.0f} GB of activations that is too much."),
        (dict(dp=8, zero=3, micro_batch=2),
         "ZeRO-3 shards all of it, to {state:.0f} GB, and fits. Activations do not become fewer."),
        (dict(dp=8, zero=3, micro_batch=2, recompute="selective"),
         "Selective recomputation brings them to {activations:.0f} GB for little time: MFU {mfu:.0%}."),
        (dict(dp=4, tp=2, zero=1, micro_batch=2, recompute="selective"),
         "Or tp 2 and ZeRO-1: activations {activations:.0f} GB, {exposed:.0%} of the step exposed communication, MFU "
         "{mfu:.0%}."),
        (dict(dp=64, zero=3, micro_batch=2, recompute="selective"),
         "On eight nodes ZeRO-3 gathers weights over the network, for each of 8 micro-batches: {exposed:.0%} stays "
         "exposed."),
        (dict(dp=64, zero=1, micro_batch=2, recompute="selective"),
         "There the optimizer's shard is so small that ZeRO-1 just fits, and sends once per step: MFU {mfu:.0%}."),
        (dict(dp=512, zero=1, micro_batch=2, recompute="selective"),
         "On 512 GPUs one micro-batch is left to hide the gradients under: {exposed:.0%} exposed."),
        (dict(dp=256, tp=2, zero=1, micro_batch=4),
         "tp 2 again: {exposed:.0%}, and room to save all activations: MFU {mfu:.0%}.")]),
    ("The same at 131,072 tokens: when to use context parallelism",
     "llama-3.1-8b", dict(seq=131072, global_batch=32, micro_batch=1), [
        (dict(dp=8, zero=3, recompute="full"),
         "Even with full recomputation one sequence is {activations:.0f} GB of activations, and dp shards none of "
         "them."),
        (dict(dp=1, tp=8, zero=1, recompute="selective"),
         "tp 8 shards each layer's tokens in the node: {activations:.0f} GB. It can go no further without leaving "
         "the node."),
        (dict(dp=4, cp=4, tp=4, zero=1, recompute="selective", cp_style="ring"),
         "cp 4 x tp 4 on 64 GPUs shards every sequence: {activations:.0f} GB. Scores are {attention:.0%} of the "
         "step, so that the keys and values of a ring are sent under them."),
        (dict(dp=32, cp=4, tp=4, zero=1, recompute="selective", cp_style="ring"),
         "On 512 GPUs dp takes the rest, one sequence each: MFU {mfu:.0%}.")]),
    ("Llama 3.1 70B: when to use tensor and pipeline parallelism",
     "llama-3.1-70b", dict(seq=8192, global_batch=512, micro_batch=1), [
        (dict(dp=8, zero=3, recompute="full"),
         "Why not a node? ZeRO-3 leaves {state:.0f} GB of state on each of 8 GPUs."),
        (dict(dp=64, zero=3, recompute="full"),
         "On 64 it fits, if everything is recomputed. Every micro-batch gathers all weights over the network: "
         "{exposed:.0%} is exposed, MFU {mfu:.0%}."),
        (dict(dp=8, tp=8, zero=1, recompute="selective"),
         "tp 8 inside the node shards activations, too, but {exposed:.0%} is exposed, and {state:.0f} GB of state "
         "are too much beside them."),
        (dict(dp=4, tp=4, pp=4, zero=1, recompute="selective"),
         "pp 4 and only tp 4: {memory:.0f} GB, {exposed:.0%} exposed, and {bubble:.1%} of bubble with 128 "
         "micro-batches."),
        (dict(dp=32, tp=4, pp=4, zero=1, recompute="selective"),
         "On 512 GPUs a pipeline has 16 micro-batches left, and the bubble is {bubble:.0%}."),
        (dict(dp=32, tp=4, pp=4, zero=1, recompute="selective", schedule="interleaved", chunks=2),
         "Two model chunks per rank make it {bubble:.0%}: MFU {mfu:.0%}.")]),
    ("Mixtral 8x7B: when to use expert parallelism", "mixtral-8x7b", dict(seq=4096, global_batch=512, micro_batch=1), [
        (dict(dp=64, zero=3, recompute="selective"),
         "Each token uses {active:.0f}B of {total:.0f}B parameters, but ZeRO-3 gathers all of them: {exposed:.0%} of "
         "the step is exposed."),
        (dict(dp=64, ep=8, zero=1, recompute="selective"),
         "ep 8 keeps experts where they are and sends tokens to them in the node: {exposed:.0%} exposed, "
         "{memory:.0f} GB."),
        (dict(dp=512, ep=8, zero=1, recompute="selective"),
         "On 512 GPUs tokens stay in the node, but gradients of experts are reduced over 64 nodes under one "
         "micro-batch: {exposed:.0%} exposed."),
        (dict(dp=512, ep=8, zero=1, recompute="selective", reduce_dtype="bf16"),
         "Reducing in bf16 halves these bytes: {exposed:.0%} exposed, MFU {mfu:.0%}."),
        (dict(dp=32, cp=2, pp=8, ep=8, zero=1, schedule="interleaved", chunks=4),
         "A pipeline of 8 divides each rank's experts by 8, and so their gradients: {exposed:.0%} exposed, "
         "{bubble:.0%} bubble, MFU {mfu:.0%}.")]),
]


def numbers_of(request: dict[str, Any]) -> dict[str, Any]:
    """What plan/ predicts for a grid: GB on the rank that needs most, seconds per step, fractions of a step."""
    run = predict.run_of(dict(machine=MACHINE) | request)
    step, found, memory = time.step_seconds(run), predict.predict(run), time.needed_memory(run)
    count = costs.parameters(run.settings.model)
    part = {name: seconds / step.seconds for name, seconds in step.parts.items()}
    return dict(step=step.seconds, mfu=found.mfu, memory=found.memory_gb, fits=found.memory_gb < USABLE,
                activations=memory["activations"] / 1e9,
                state=sum(memory[kind] for kind in ("weights", "gradients", "optimizer")) / 1e9,
                exposed=sum(part.get(axis, 0.0) for axis in ("dp", "cp", "tp", "ep")), bubble=part["bubble"],
                attention=part["attention"], active=count.active / 1e9, total=count.total / 1e9,
                gpus=request["dp"] * request.get("cp", 1) * request.get("tp", 1) * request.get("pp", 1),
                flags=search.describe(run.settings) + "".join(
                    f" --{name.replace('_', '-')} {request[name]}" for name in ("cp_style", "chunks", "reduce_dtype")
                    if name in request))


def text() -> str:
    lines = ["# The journey", "",
             "How four models are trained on 1 to 512 H100s of the Ultra-Scale Playbook's cluster "
             "(`--machine h100-efa`), the way of the playbook: fit a step in "
             "memory, reach the global batch, then make it fast. Every number is what `plan/` predicts, and `python -m "
             "plan check` prints how far such predictions are off. A grid fits if it needs less than "
             f"{USABLE:.0f} of {MEMORY:.0f} GB (80 GiB); the time of one that does not fit is what it would take. "
             "`python -m learn.journey` writes this page; flags are those of `train.py`, and of `python -m plan "
             "step --machine h100-efa --preset MODEL --gpus N`."]
    for title, preset, common, steps in LEGS:
        lines += ["", f"## {title}", "", f"`--preset {preset} --seq {common['seq']} --global-batch "
                  f"{common['global_batch']}`", "", "| GPUs | flags | GB per GPU | fits | s per step | MFU | why |",
                  "|---|---|---|---|---|---|---|"]
        before = None
        for grid, why in steps:
            now = numbers_of(dict(preset=preset) | common | grid)
            now["faster"] = before["step"] / now["step"] if before else 1.0
            fits = "yes" if now["fits"] else "no"
            lines.append(f"| {now['gpus']} | `{now['flags']}` | {now['memory']:,.0f} | {fits} "
                         f"| {now['step']:.2f} | {now['mfu']:.0%} | {why.format(**now)} |")
            before = now
    return "\n".join([*lines, *measured()]) + "\n"


def measured() -> list[str]:
    """The best runs of the playbook's sweep, by model and number of nodes, beside what is predicted of them."""
    lines = ["", "## What was measured", "",
             "The playbook's authors ran thousands of grids on that cluster. Of each model (hidden size) and number of "
             "nodes the fastest with 256 sequences of 4,096 tokens, and what `plan/` predicts of the same run:", "",
             "| hidden | nodes | fastest grid | MFU | predicted |", "|---|---|---|---|---|"]
    best: dict[tuple[int, int], published.Row] = {}
    for row in published.rows():
        if row.table == "playbook_runs" and row.step_s and row.request["global_batch"] == 256:
            key = row.request["hidden"], row.request["gpus"] // 8
            best[key] = min(best.get(key, row), row, key=lambda row: row.step_s)
    for (hidden, nodes), row in sorted(best.items()):
        found = predict.predict(predict.run_of(row.request))
        grid = " ".join(f"--{name.replace('_', '-')} {row.request[name]}" for name in ("dp", "tp", "pp", "zero",
                                                                                      "micro_batch"))
        reached = found.mfu * found.step_s / row.step_s
        lines.append(f"| {hidden} | {nodes} | `{grid}` | {reached:.0%} | {found.mfu:.0%} |")
    return lines + ["", FINDINGS, "", others()]


FINDINGS = (
    "The two smaller models were fastest with data parallelism, or a pipeline of two stages, on up to 8 nodes; the "
    "third had two to four ranks of tensor or pipeline parallelism from the start. From 16 nodes on, where 256 "
    "sequences leave two or fewer per GPU, all three had tensor parallelism, mostly of 4 ranks, as above; from 2 "
    "nodes on their utilisation never rises, as the batch does not grow with the nodes. The largest did well on 16 "
    "and 32 nodes, with tp 4 and a long pipeline, and badly where tp leaves the node; on 4 nodes it took more than "
    "twice the predicted time.")


def others() -> str:
    common = dict(preset="llama-3.1-8b", machine="h200", seq=4096, global_batch=128, micro_batch=4, zero=3,
                  recompute="full", kernels=dict(launch="fitted"))
    fsdp, tp = (predict.predict(predict.run_of(common | grid)).tokens_per_s_per_gpu
                for grid in (dict(dp=32), dict(dp=8, tp=4)))
    return ("Others have measured what tensor parallelism costs where data parallelism is still possible: Llama 3 8B "
            "on 32 H200s at 9,293 tokens/s per GPU with FSDP alone, at 4,872 with tp 4 x FSDP 8 (KempnerForge; "
            f"predicted with `--machine h200 --recompute full --micro-batch 4`: {fsdp:,.0f} and {tp:,.0f}).")


def write() -> None:
    FILE.write_text(text())
    print(f"written: {FILE}")


if __name__ == "__main__":
    run_demo(lambda group: write())
