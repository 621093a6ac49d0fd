"""The behaviour of other people's code, for the published runs that it made.

A field of `Other` is a fact about a code, as its authors describe it, unless a table says that it was read off the
measured times or memory of runs (see runs.py). Codes: nanotron (the playbook's runs), Megatron-LM of 2021 and 2022,
Megatron-DeepSpeed (BLOOM), llm-foundry, Megatron-Core with NeMo and Megatron-Bridge.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from core.config import Config, Model
from plan import costs, memory
from plan.step_time import Code, Run, Seconds

# Fractions of the peak that attention reaches, forward and backward together, on Ampere and on later GPUs: Dao 2022;
# Dao 2023, figures 4 to 7; Shah et al. 2024, figures 5 and 6.
ATTENTION_FRACTION = {"flash1": (0.35, 0.20), "flash2": (0.60, 0.33), "flash3": (0.60, 0.60)}
CHOICES = {"attention_kernel": ("standard", *ATTENTION_FRACTION), "tp_overlap": ("none", "backward", "all"),
           "launch": ("fitted", "free"), "division": ("balanced", "any", "cumulative")}


class Constants(NamedTuple):
    """Speeds of other codes, which fit.py fits together with plan.step_time.Constants; `unfused` was chosen by hand."""
    unfused_passes: float = 15.5  # as plan.step_time.Constants.passes, in code that is not `fused`
    launch_s: float = 4.37e-3  # host time of a layer, forward and backward
    unfused: float = 1.4  # activations that a layer saves in code that is not `fused`, relative to plan/memory.py


@dataclass(frozen=True)
class Other(Code):
    attention_kernel: str = "flash2"  # or standard, flash1, flash3 (cuDNN's attention is as fast)
    overlaps: bool = True  # see Code. DeepSpeed's _bf16_reduce_grads and nanotron's trainer.py do not
    tp_overlap: str = "backward"  # the tensor parallel exchanges under matmuls: none, those of backward, or all
    fused: bool = True  # one kernel for a norm or an activation function; no gradients in bf16 beside those in fp32
    launch: str = "fitted"  # the host time that a layer takes at least; free: none, as with CUDA graphs
    gathered: int = 0  # how many of a layer's two inputs that tensor parallel ranks gather are saved
    division: str = "balanced"  # of layers into stages; any: the head may be alone; cumulative: see below
    constants: Constants = Constants()

    @property
    def attention_fraction(self) -> tuple[float, float]:
        return ATTENTION_FRACTION[self.attention_kernel]

    def stages(self, settings: Config) -> list[range]:
        if self.division == "balanced":
            return super().stages(settings)
        grid, fields = settings.grid, tuple(vars(settings.model).values())
        return divide(fields, costs.layer_kinds(settings), settings.batch.seq_len, grid.pp * grid.virtual_stages,
                      self.division)

    def attention(self, run: Run, scores: float) -> Seconds:
        if self.attention_kernel != "standard":
            return super().attention(run, scores)
        model, seq = run.settings.model, run.settings.batch.seq_len
        nbytes = standard_attention_bytes(model.heads, seq, model.head_dim) / seq * run.tokens / run.settings.grid.tp
        # An A100 multiplies heads whose width is no multiple of 8 without tensor cores, 16 times as slowly.
        seconds = run.matmul(2 * scores) * (16 if model.head_dim % 8 else 1)
        return Seconds(seconds + run.memory(nbytes / 3), 2 * seconds + run.memory(nbytes * 2 / 3))

    def passes(self, run: Run) -> float:
        return run.constants.passes if self.fused else self.constants.unfused_passes

    def exchanges(self, run: Run, one: float, count: int, columns: list[float]) -> Seconds:
        """Inputs of column parallel layers that are not saved are gathered again: under matmuls, if anything is."""
        if self.tp_overlap == "all":
            return Seconds()
        if self.tp_overlap == "backward":
            return super().exchanges(run, one, count, columns)
        again = len(columns[self.gathered:]) if run.settings.grid.sequence_parallel else 0
        return Seconds(count * one, (count + again) * one)

    def host_seconds(self, run: Run, layer: int) -> float:
        return self.constants.launch_s if self.launch == "fitted" else 0.0

    def activations(self, run: Run, stages: Mapping[int, range], in_flight: int) -> int:
        """Code that is not `fused` saves more of a layer, and logits in 16 bits and in fp32, twice: as they are, and
        less their maximum, which becomes the softmax in place."""
        if self.fused:
            return super().activations(run, stages, in_flight)
        own = memory.activation_bytes(run.settings, 2, stages.values(), in_flight, has_head=False)
        logits = run.tokens * run.settings.model.vocab / run.settings.grid.tp * (run.last_stage in stages)
        return round(self.constants.unfused * own + (2 + 4 + 4) * logits)

    def more_memory(self, run: Run, rank: int, stages: Mapping[int, range]) -> dict[str, int]:
        """Gradients in 16 bits beside those in fp32; gathered inputs, in 16 bits, of all tokens."""
        more, grid = {}, run.settings.grid
        if not self.fused:
            more["gradients"] = 2 * sum(map(sum, costs.bucket_elements(run.settings, stages, 2).values()))
        if self.gathered and grid.tp > 1:
            in_flight, _ = memory.plan_in_memory(run.settings, rank)
            inputs = self.gathered * max(map(len, stages.values())) * in_flight
            more["gathered"] = round(inputs * run.tokens * 2 * run.settings.model.hidden * (1 - 1 / grid.tp))
        return more


@lru_cache(1024)
def divide(fields: tuple, kinds: tuple[tuple, ...], seq: int, stages: int, division: str) -> list[range]:
    """As costs.divide, for "any" and "cumulative"."""
    work, head = costs.relative_work(Model(*fields), kinds, seq, scores=division == "any")
    return costs.partition(work, stages, head, 0) if division == "any" else cumulative_partition(work, stages, head)


def cumulative_partition(work: Sequence[float], stages: int, last: float = 0.0) -> list[range]:
    """The layers of each stage as nanotron divides them: a stage takes blocks until the sum of all so far reaches its
    share of the total, so that early stages have more, and the last ones may have none. After the layers come four
    blocks: norm, head (last), cast and loss. Raises ValueError if the last stage gets no block, which crashes."""
    blocks = [*work, 0.0, last, 0.0, 0.0]
    total, stage, starts, so_far = sum(blocks), 0, [0], 0.0
    for block, flops in enumerate(blocks):
        so_far += flops
        if so_far >= total * (stage + 1) / stages - 1e-9 and block + 1 < len(blocks) and stage + 1 < stages:
            stage += 1
            starts.append(min(block + 1, len(work)))
    if stage + 1 < stages:
        raise ValueError(f"--pp {stages}: the last of these stages gets no block of {len(work)} layers and a head")
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(work)])]


def standard_attention_bytes(heads: int, seq: int, width: int, itemsize: int = 2) -> float:
    """Bytes that attention with its scores in memory, mask and dropout reads and writes for one sequence, forward and
    backward. Passes over the scores (one for a read or a write) in forward: 1 writes s, 2 add the mask, 2 softmax, 2.5
    dropout (its mask is a byte), 1 for p v; in backward 1 dv, 1 dp, 2.5 dropout, 3 softmax, 2 dq and dk."""
    passes = (1 + 2 + 2 + 2.5 + 1) + (1 + 1 + 2.5 + 3 + 2)
    return (passes * heads * seq * seq + (4 + 8) * heads * seq * width) * itemsize


def with_constants(run: Run, values: Mapping[str, float]) -> Run:
    """The run with these constants, by name: of plan.step_time.Constants or, if its code is another, those above."""
    ours = {name: value for name, value in values.items() if name in run.constants._fields}
    theirs = {name: value for name, value in values.items() if name in Constants._fields}
    run = run._replace(constants=run.constants._replace(**ours))
    if isinstance(run.code, Other):
        run = run._replace(code=replace(run.code, constants=run.code.constants._replace(**theirs)))
    return run
