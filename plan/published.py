"""Published runs, as requests that plan/ can predict, and how far its predictions are off.

The tables are those of plan/tables/, or of any folder that has files of the same names and fields.

A converter says once per table what its runs were: model, grid, batch, machine, and what the code does (see
stagetime.Kernels), as its authors describe it. Nothing here is fitted. GPT's feed-forward of 4 h, without gate, has the
weights, FLOPs and saved bytes of a SwiGLU of 8/3 h, in whose place it is predicted. Sources: the field `source` of
every row.
"""
from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from checks import need

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tables")
FLAGGED = "playbook_runs, flagged, <= 32 nodes"


class Row(NamedTuple):
    """A published run. groups: under which titles its errors are reported. None where nothing is known."""
    table: str
    number: int
    groups: list[str]
    request: dict[str, Any]
    step_s: float | None = None
    memory_gb: float | None = None
    fits: bool | None = None


Made = tuple[list[str], dict[str, Any], dict[str, Any]]  # groups, request, what was measured


def gpt(row: dict, tp: int, vocab: int) -> dict[str, Any]:
    """GPT's architecture as ours. Where the table has no number of heads, one that divides."""
    hidden = row["hidden"]
    heads = row.get("heads") or next(n for n in (64, 80, 96, 72, 128, 60) if hidden % (2 * n) == 0 and n % tp == 0)
    return dict(layers=row["layers"], hidden=hidden, heads=heads, kv_heads=heads, ffn=round(8 * hidden / 3 / tp) * tp,
                vocab=vocab, tied=True)


def playbook(table: dict, row: dict) -> Made:
    """nanotron: bf16 gradients beside fp32 ones; the data axis overlaps in ZeRO-0 without a pipeline only; stages by
    cumulative cost. Runs are of several versions, which the table does not tell apart. What each saves of a layer's
    gathered inputs is read off the memory of its runs: nothing of those of the 80B model, on 64 nodes, of pipelines
    with tp 32, and of slow pipelines of two stages; one of other pipelines, two without a pipeline. That pipelines hide
    no tensor parallel exchange is read off their times."""
    arch, pp1 = table["arch"][str(row["model_B"])], row["pp"] == 1
    slow = row.get("throughput_flag") == "pp_suspect"
    none = row["model_B"] > 10 or row["nodes"] > 32 or not pp1 and row["tp"] == 32 or slow and row["pp"] == 2
    request = {name: arch[name] for name in ("layers", "hidden", "heads", "ffn", "vocab", "tied")}
    request |= dict(kv_heads=8 if row.get("gqa_variant") else arch["kv_heads"], dp=row["dp"], pp=row["pp"],
                    tp=row["tp"], zero=row["zero"], seq=4096, global_batch=row["gbs_seqs"], micro_batch=row["mbs"],
                    machine="h100-efa", gpus=row["gpus"],
                    kernels=dict(overlap=row["zero"] == 0 and pp1, tp_overlap="backward" if pp1 else "none",
                                 fused=False, gathered=0 if none else 1 + pp1, division="cumulative"))
    ran = row["status"] == "ok"
    groups = ["playbook_runs, all that ran" if ran else "playbook_runs, failed"]
    if ran and row.get("throughput_flag") in ("pp1", "pp_consistent") and row["nodes"] <= 32:
        groups.append(FLAGGED)
        groups.append(f"playbook_runs, of these tp {'<=' if row['tp'] <= 8 else '>'} 8")
    memory = row["mem_gb"] * 2**30 / 1e9 if ran and row.get("mem_gb") else None
    return groups, request, dict(step_s=row.get("step_time_s") if ran else None, memory_gb=memory, fits=ran)


def megatron_2021(row: dict, chunks: int, **rest) -> dict[str, Any]:
    """Megatron-LM: scores in memory, interleaved schedule, gradients reduced in 16 bits after backward, which hides
    exchanges of sequence parallelism (Korthikanti et al. 2022, section 4.2.2)."""
    return gpt(row, row["tp"], row["vocab"]) | dict(
        dp=row["dp"], pp=row["pp"], tp=row["tp"], schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks if row["pp"] > 1 else 0, seq=row["seq"], machine="a100", gpus=row["gpus"], reduce_dtype="bf16",
        kernels=dict(attention="standard", overlap=False, tp_overlap="backward" if rest["sp"] else "none")) | rest


def sc21(table: dict, row: dict) -> Made | None:
    if not row["table"].startswith("T1"):
        return None
    request = megatron_2021(row, row["virtual_stages_per_gpu"], global_batch=row["batch"], recompute="full", sp=False,
                            micro_batch=row["micro_batch"])
    return ["SC21 (Narayanan et al. 2021)"], request, dict(step_s=row["implied_iter_s"])


def korthikanti(table: dict, row: dict) -> Iterator[Made]:
    for recompute, name in ("full", "iter_s_full_recompute"), ("selective", "iter_s_sp_selective"):
        if name in row:
            yield (["Korthikanti et al. 2022"],
                   megatron_2021(row, row["interleave_m"], global_batch=row["global_batch"], recompute=recompute,
                                 micro_batch=row["micro_batch"], sp=recompute != "full"), dict(step_s=row[name]))


def bloom(table: dict, row: dict) -> Made | None:
    """Megatron-DeepSpeed on four 100 Gb/s cards per node."""
    if not row.get("sec_per_iter") or not row.get("gbs"):
        return None
    request = gpt(row, row["TP"], 250680) | dict(
        dp=row.get("DP") or 1, pp=row["PP"], tp=row["TP"], zero=row["zero"], sp=False, seq=2048,
        global_batch=row["gbs"], micro_batch=row["mbs"], recompute="full", machine="a100-opa", gpus=row["gpus"],
        reduce_dtype="fp32" if "fp32" in row["optimizer"] else "bf16",
        kernels=dict(attention="standard", overlap=False, tp_overlap="none"))
    memory = row["mem_gb"] * 2**30 / 1e9 if row.get("mem_gb") else None
    return ["BLOOM"], request, dict(step_s=row["sec_per_iter"], memory_gb=memory, fits=True)


def llmfoundry(table: dict, row: dict) -> Made:
    """FSDP with Triton's first FlashAttention."""
    hidden, fp8 = row["hidden"], "fp8" in row["precision"]
    heads = hidden // (128 if hidden >= 2048 else 64)
    machine = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100-40gb"}[row["gpu"]]
    batch = row["micro_batch"] * row["grad_accum"] * row["gpus"]
    request = gpt(row | dict(heads=heads), 16, 50368) | dict(
        dp=row["gpus"], zero=3 if row["sharding"] == "FULL_SHARD" else 2, seq=row["seq"], global_batch=batch,
        micro_batch=row["micro_batch"], recompute="full" if row["activation_checkpointing"] else "none",
        fp8="tensorwise" if fp8 else "none", machine=machine, gpus=row["gpus"],
        reduce_dtype="bf16" if row["mp_mode"] == "PURE" else "fp32", kernels=dict(attention="flash1"))
    return (["llmfoundry, FP8" if fp8 else "llmfoundry, bf16"], request,
            dict(step_s=batch * row["seq"] / row["gpus"] / row["tok_s_gpu"], fits=True))


def megatron_readme(table: dict, row: dict) -> Made | None:
    """Megatron-Core on H100s. Neither micro-batch nor model chunks are printed: 1."""
    if "implied_iter_s" not in row:
        return None
    request = gpt(row, row["tp"], row["vocab"]) | dict(
        tied=False, dp=row["dp"], pp=row["pp"], tp=row["tp"], zero=1, seq=row["seq"], global_batch=row["batch"],
        micro_batch=1, machine="h100", gpus=row["gpus"],
        kernels=dict(attention="flash3", tp_overlap="all", launch=False))
    return ["Megatron-LM on H100"], request, dict(step_s=row["implied_iter_s"])


NVIDIA_MODELS = {"LLAMA3.1_405B": "llama-3.1-405b", "LLAMA3_70B": "llama-3.1-70b", "LLAMA3_8B": "llama-3.1-8b",
                 "LLAMA2-70B": "llama-2-70b", "LLAMA3-8B": "llama-3.1-8b", "LLAMA2-7B": "llama-2-7b",
                 "Qwen3_30B_a3B": "qwen3-30b-a3b"}
NVIDIA_SYSTEMS = {"DGX-H100": "h100", "H100": "h100", "DGX-B200": "b200", "DGX-B300": "b200", "DGX-GB200": "gb200",
                  "DGX-GB300": "gb300"}


def nvidia(table: dict, row: dict) -> Made | None:
    """NeMo and Megatron-Bridge: keys and values go round a ring. FP8 unless said otherwise; neither NVFP4 nor
    fine-tuning is predicted."""
    precision = row.get("precision") or "FP8"
    known = row["model"] in NVIDIA_MODELS and row["system"] in NVIDIA_SYSTEMS and row.get("tokens_sec_gpu")
    if not known or "NVFP4" in precision or row.get("task", "")[:3] in ("SFT", "LoR"):
        return None
    tp, pp, cp = (row.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    moe, chunks = "qwen" in NVIDIA_MODELS[row["model"]], (row.get("vp") or 1) if pp > 1 else 0
    seq = row.get("sequence_length") or row["seq_k"] * 1024
    attention = "flash2" if "24.03" in row.get("release", "") else "flash3"
    request = dict(preset=NVIDIA_MODELS[row["model"]], dp=row["gpus"] // (tp * pp * cp), tp=tp, pp=pp, cp=cp,
                   ep=(row.get("ep") or 1) if moe else 1, zero=3 if row.get("fsdp") else 1, chunks=chunks,
                   schedule="interleaved" if chunks > 1 else "1f1b", cp_style="ring", seq=seq, global_batch=row["gbs"],
                   micro_batch=row.get("mbs") or 1, fp8="none" if "BF16" in precision else "tensorwise",
                   machine=NVIDIA_SYSTEMS[row["system"]], gpus=row["gpus"],
                   kernels=dict(attention=attention, tp_overlap="all", launch=False, division="any"))
    group = "NVIDIA, experts" if moe else "NVIDIA, dense with CP" if cp > 1 else "NVIDIA, dense without CP"
    return [group], request, dict(step_s=row["gbs"] * seq / row["gpus"] / row["tokens_sec_gpu"], fits=True)


TABLES: dict[str, Callable] = {
    "playbook_runs": playbook, "narayanan2021_sc21": sc21, "korthikanti2022": korthikanti, "bloom_a100": bloom,
    "llmfoundry": llmfoundry, "megatron_lm_readme": megatron_readme, "nvidia_perf": nvidia}
GOALS = {FLAGGED: "step 4 / 20%, memory 5 / 15%",
         "playbook_runs, of these tp <= 8": "step 3 / 10%", "SC21 (Narayanan et al. 2021)": "step 5%",
         "Megatron-LM on H100": "step 8%", "BLOOM": "step 5%", "llmfoundry, bf16": "step 4%",
         "NVIDIA, dense with CP": "step 6%"}


def rows(folder: str = FOLDER) -> Iterator[Row]:
    """The runs of every table that the folder has. Raises ValueError if it has none, or if a file cannot be read."""
    there = [name for name in TABLES if os.path.isfile(os.path.join(folder, name + ".json"))]
    need(bool(there), f"--tables {folder}: has none of {', '.join(name + '.json' for name in TABLES)}")
    for name in there:
        path = os.path.join(folder, name + ".json")
        try:
            with open(path) as file:
                table = json.load(file)
            for number, row in enumerate(table["rows"]):
                if "columns" in table:  # the compact form of plan/tables/
                    row = {column: value for column, value in zip(table["columns"], row) if value is not None}
                made = TABLES[name](table, row)
                for groups, request, measured in [made] if isinstance(made, tuple) else made or ():
                    yield Row(name, number, groups, request, **measured)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {type(error).__name__} {error}") from None


def noise(runs: list[Row]) -> float | None:
    """The median relative difference in step time of two runs with the same request: no prediction does better."""
    times: dict[str, list[float]] = {}
    for row in runs:
        if row.step_s:
            times.setdefault(json.dumps(row.request, sort_keys=True), []).append(row.step_s)
    pairs = [abs(a / b - 1) for seconds in times.values() for i, a in enumerate(seconds) for b in seconds[:i]]
    return median(pairs) if pairs else None


# ---- predictions beside them ----------------------------------------------------------------------------------------

Predict = Callable[[dict], Mapping[str, float]]  # a request -> fields of plan.Prediction; ValueError if refused


def check_rows(rows: list[Row], predict: Predict) -> list[dict]:
    """One object per published run: what was measured and what is predicted; None where nothing is known. A run that
    cannot be predicted is predicted not to run."""
    objects = []
    for row in rows:
        request = row.request
        try:
            found = predict(request)
        except ValueError as error:
            objects.append(dict(table=row.table, row=row.number, groups=row.groups, refused=str(error),
                                measured=dict(fits=row.fits), predicted=dict(fits=0.0)))
            continue
        rate = request["global_batch"] * request["seq"] / row.step_s / request["gpus"] if row.step_s else None
        measured = dict(step_s=row.step_s, tokens_per_s_per_gpu=rate, memory_gb=row.memory_gb, fits=row.fits)
        predicted = {name: found[name] for name in measured}
        objects.append(dict(table=row.table, row=row.number, groups=row.groups, measured=measured, predicted=predicted))
    return objects


def errors(objects: list[dict], name: str) -> list[float]:
    return sorted(abs(row["predicted"][name] / row["measured"][name] - 1) for row in objects
                  if row["measured"].get(name) and name in row["predicted"])


def quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def proposals_close(runs: list[Row], objects: list[dict]) -> dict[str, float]:
    """In what part of the playbook's (model, nodes) groups the best of three proposals is within 5% of the best run:
    proposals by predicted step time, and by the rule "smallest tp x pp, then largest micro-batch"; of those, in both
    cases, that are predicted to fit. A proposal that failed is worth nothing."""
    groups: dict[tuple, list[tuple[Row, dict]]] = {}
    for row, found in zip(runs, objects):
        if any(FLAGGED in group or group.endswith("failed") for group in row.groups):
            if found["predicted"]["fits"] >= 0.5 and row.request["gpus"] <= 256:
                groups.setdefault((row.request["hidden"], row.request["gpus"]), []).append((row, found))
    orders = {"predicted": lambda row, found: found["predicted"]["step_s"],
              "rule": lambda row, found: (row.request["tp"] * row.request["pp"], -row.request["micro_batch"])}
    close = Counter()
    counted = [members for members in groups.values() if any(row.step_s for row, _ in members)]
    for members in counted:
        best = min(row.step_s for row, _ in members if row.step_s)
        for name, order in orders.items():
            first = sorted(members, key=lambda pair, order=order: order(*pair))[:3]
            close[name] += min((row.step_s or math.inf for row, _ in first)) <= 1.05 * best
    return {name: close[name] / len(counted) for name in orders} if counted else {}


def print_check(folder: str, output: str, predict: Predict) -> None:
    """The table of errors, with goals and the noise floor; one object per run in the file `output`, if it is named."""
    runs = list(rows(folder))
    objects = check_rows(runs, predict)
    if output:
        with open(output, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in objects)
    groups: dict[str, list[dict]] = {}
    for row in objects:
        for group in row["groups"]:
            groups.setdefault(group, []).append(row)
    print(f"{'published runs':42s}{'rows':>6s}{'step: median':>14s}{'p90':>8s}{'memory: median':>16s}{'p90':>8s}  goal")
    for group, members in groups.items():
        line = f"{group:42s}{len(members):6d}"
        for name, width in ("step_s", 14), ("memory_gb", 16):
            values = errors(members, name)
            line += f"{quantile(values, .5):{width}.1%}{quantile(values, .9):8.1%}" if values else " " * (width + 8)
        print(line + "  " + GOALS.get(group, "reported"))
    for word, ran in (("P(fit | ran)", True), ("P(no fit | failed)", False)):
        there = [row for row in objects if row["table"] == "playbook_runs" and row["measured"]["fits"] is ran]
        if there:
            right = sum((row["predicted"]["fits"] >= 0.5) is ran for row in there) / len(there)
            print(f"{word:42s}{len(there):6d}{right:14.1%}  goal {'99' if ran else '88'}%")
    if close := proposals_close(runs, objects):
        print(f"search: best of three proposals within 5% of the best run in {close['predicted']:.0%} of (model, "
              f"nodes); by the rule smallest tp x pp, largest micro-batch in {close['rule']:.0%}  goal 90%")
    if floor := noise(runs):
        print(f"noise floor: step times of runs with the same settings differ by {floor:.1%} (median of pairs)")
    refused = Counter(row["refused"].split(":")[0] for row in objects if "refused" in row)
    for why, count in refused.most_common(5):
        print(f"refused, {count} rows: {why}")
