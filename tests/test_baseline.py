"""What the program did on a day that can be named, to compare with while it is rebuilt.

    pytest -m baseline                 names each difference from data/baseline.json
    pytest -m baseline --record        writes that file anew, for this CPU; the commit says why a difference was wanted

Of each command line: bytes sent by axis, calls of collectives, bytes alive between two steps and at most, FLOPs and
dispatched operations of the third step on rank 0, and losses and gradient norms of three steps, to all digits. And the
flags with their kinds, choices and defaults, and which pairs of features are refused by a line that names which flags.

The words of help texts and errors are not recorded, so that they can be reworded. A commit that renames a flag or moves
a file maps data/baseline.json by help/renames.py and does not record it. Other CPUs have other last digits: each kind
has a record of its own.
"""
import argparse
import gc
import json
import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from unittest.mock import patch

import grids
import pairs
import pytest
import torch
import torch.distributed as dist
from sharding import wait_and_settle

import train
from core import collectives, config
from core.collectives import Pending
from run import job
from run.meter import Meter

FILE = Path(__file__).parent / "data" / "baseline.json"
STEPS = 3
LINES = [
    (1, "--micro-batch 8 --optimizer sgd --grad-clip 0 --z-loss 0.01"),
    (1, "--micro-batch 8 --recompute selective --attention math --window 5 --full-attention-every 2"),
    (1, "--micro-batch 8 --offload both --recompute full"),
    (2, "--micro-batch 6 --zero 1 --reduce-dtype bf16 --dtype bf16 --bucket-mb 0.05"),
    *(pairs.grid_of(choice) for choice in pairs.all_pairs()[::3])]


@patch.object(Pending, "wait", wait_and_settle)
def run(flags: str) -> dict:
    """One rank of a command line."""
    settings = grids.settings_of(flags, dist.get_world_size() if dist.is_initialized() else 1)
    groups, model, pipeline, optimizer = grids.build(settings)
    generator, out, seen = torch.Generator().manual_seed(11), dict(loss=[], norm=[]), 0
    for _ in range(STEPS):
        sequences = job.sequences_at(seen, settings.batch.ramp())
        window = torch.randint(settings.model.vocab, (sequences, settings.batch.seq_len + 1), generator=generator)
        seen += sequences * settings.batch.seq_len
        gc.collect()
        collectives.sent.clear()
        with Meter() as meter:
            for bucket in optimizer.buckets:
                meter.label("state", *bucket.state.values(), bucket.weights, bucket.weight_shard)
            loss = grids.forward_backward(settings, groups, model, pipeline, optimizer,
                                          window[:, :-1], window[:, 1:].clone())  # no name would keep the clone alive
            norm = optimizer.step(settings.optim.lr)
            train.update_balance(model, groups, norm.isfinite(), sequences)
            gc.collect()
            at_rest = meter.settled()["all"]
        out["loss"].append(loss.tolist())  # of both, with multi-token prediction
        out["norm"].append(norm.item())
    calls = Counter(call.name for call in meter.collectives)
    return out | dict(bytes_sent=dict(sorted(collectives.sent.items())), calls=dict(sorted(calls.items())),
                      bytes_at_rest=at_rest, bytes_at_peak=meter.peak["all"], flops=meter.flops,
                      operations=meter.operations)


def flags_of(text: str) -> str:
    return " ".join(sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))))


def settings() -> dict[str, str]:
    """Every flag: what kind of value it takes, its choices, and its default as --help shows it."""
    found = {}
    for action in config.make_parser()._actions:
        kind = action.metavar or ("BOOL" if isinstance(action, argparse.BooleanOptionalAction) else "")
        if kind.startswith("{"):  # choices
            kind = " " + kind[1:-1].replace(",", " ")
        default = re.findall(r"\[([^][]*)\]$", action.help or "")
        for option in action.option_strings:
            found[option] = " ".join([kind, *(f"[{value}]" for value in default)])
    return found


def refusals() -> dict[str, str]:
    """Every two features that the command line does not take together: the flags that its error names."""
    out = {}
    for a, b in combinations(pairs.FEATURES, 2):
        for x, y in product(pairs.FEATURES[a], pairs.FEATURES[b]):
            choice = pairs.PLAIN | {a: x, b: y}
            if choice["fp8"] != "none" and "dtype" not in (a, b):
                choice["dtype"] = "bf16"
            ranks, flags = pairs.grid_of(choice)
            try:
                grids.settings_of(flags, ranks)
            except ValueError as error:
                out[f"{a} {x}, {b} {y}"] = flags_of(str(error))
    return out


def flat(value, path: tuple = ()) -> dict[tuple, object]:
    """Every leaf of what JSON holds, by the way to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {place: leaf for key, inner in items for place, leaf in flat(inner, (*path, str(key))).items()}


def differ(place: tuple, old, new) -> bool:
    """Peaks may differ by 2%: when a transfer in the background lets go of its tensors is a matter of time."""
    if place[-1] == "bytes_at_peak" and None not in (old, new):
        return abs(new - old) > 0.02 * old
    return old != new


def described(place: tuple, old, new) -> str:
    by = f", by {abs(new - old) / abs(old):.1e}" if all(isinstance(x, float) and x for x in (old, new)) else ""
    return f"{' · '.join(place)}: {old} -> {new}{by}"


def instructions() -> str:
    """What of this CPU decides about the last digits: its vectors, and whether it multiplies 16-bit numbers itself."""
    extra = [name for name, has in (("bf16", torch.cpu._is_avx512_bf16_supported()),
                                    ("amx", torch.cpu._is_amx_tile_supported())) if has]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *extra])


@pytest.mark.baseline
def test_nothing_has_changed(pool, request):
    cpu = instructions()
    lines = {f"{ranks} ranks, {flags}": pool.run(ranks, run, flags=flags)[0] for ranks, flags in LINES}
    found = dict(lines={cpu: lines}, settings=settings(), refused=refusals())
    recorded = json.loads(FILE.read_text())
    if request.config.option.record:
        recorded = found | dict(lines=recorded["lines"] | {cpu: lines})
        FILE.write_text(json.dumps(recorded, indent=1) + "\n")
    assert cpu in recorded["lines"], f"recorded on {', '.join(recorded['lines'])}: go to the commit you started from, "\
                                     f"record it there for {cpu} with --record, and compare with that"
    recorded["lines"] = {cpu: recorded["lines"][cpu]}
    old, new = flat(recorded), flat(json.loads(json.dumps(found)))
    different = [described(place, old.get(place), new.get(place)) for place in sorted(old.keys() | new.keys())
                 if differ(place, old.get(place), new.get(place))]
    assert not different, f"{len(different)} differences\n" + "\n".join(different)
