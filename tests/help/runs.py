"""Run train.py in this process or on the ranks of the pool, and read the files of a run."""
import contextlib
import io
import json
from pathlib import Path
from unittest.mock import patch

import grids
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import train
from run import cli, faults, generate, job
from run.data import open_samples
from run.generate import sample


def run(flags: str | list[str], state: job.RunState | None = None, samples_noise: bool = True) -> str:
    """Train, and return what the run prints on both streams. A sample has 16 tokens.

    state: updated as the run goes on. samples_noise: whether to sample even if the run has hardly
    learned.

    A mistake of the user raises ValueError. A faults.Failure carries the printed text as a note.
    """
    flags = flags.split() if isinstance(flags, str) else flags
    settings = cli.parse(flags, dist.get_world_size() if dist.is_initialized() else 1)
    if settings.precision.dtype == "auto":
        settings.precision.dtype = "fp32"
    samples = open_samples(settings, settings.data.data, settings.optim.seed)
    unseen = open_samples(settings, settings.data.val_data, None) if settings.data.val_data else None
    stop, printed = faults.Stop(settings.run.time_limit), io.StringIO()
    shorter = patch.object(generate, "sample", lambda model, prompt, count, *rest: sample(model, prompt, 16, *rest))
    always = patch.object(job, "is_worth_reading", lambda *_: True) if samples_noise else contextlib.nullcontext()
    with shorter, always, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            train.train(job.Run(settings, samples, unseen, torch.device("cpu"), "as asked", state or job.RunState(),
                                stop))
        except faults.Failure as error:
            error.add_note(printed.getvalue())
            raise
    return printed.getvalue()


def first_step(flags: str) -> tuple:
    """Return (settings, groups, model, pipeline, optimizer, this rank's micro-batches) at the
    beginning of a run."""
    settings = cli.parse(flags.split(), grids.everyone().size)
    groups, model, pipeline, optimizer = grids.build(settings)
    samples = open_samples(settings, settings.data.data, settings.optim.seed)
    share = train.local_micro_batches(samples, 0, settings.batch.global_batch, settings, groups)
    return settings, groups, model, pipeline, optimizer, share


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name, whole, read by torch."""
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    whole = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in found.items()}
    dcp.load(whole, checkpoint_id=path, no_dist=True)
    return whole
