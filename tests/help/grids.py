"""Run a grid: the function that its ranks run, and functions that combine their results.

A grid is a command line. Its ranks train two steps with the functions of train.py, from the seed's
weights, on fixed global batches with ragged masks. They compute in fp64 unless the grid names
another dtype. They return every piece of every tensor that they hold.
"""
import copy
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pairs
import torch
import torch.distributed as dist
import watch

import train
from core import collectives, config, param, rules
from core.collectives import ALONE
from core.groups import AXES, build_groups
from run import device, job
from run.data import MicroBatch, Samples

# Whole runs use a TINY model, runs in FP8 use pairs.WIDE, and exact comparisons use BASE.
TINY = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 24"
# All dimensions differ, so that no two can be mistaken for each other. Clipping and weight decay are active.
BASE = ("--layers 3 --hidden 40 --heads 8 --kv-heads 4 --head-dim 6 --ffn 56 --vocab 97 --seq-len 24 --global-batch 48 "
        "--dtype fp64 --steps 2 --warmup 0 --lr-schedule constant --lr 0.003 --grad-clip 0.2 --weight-decay 0.3 "
        "--data " + __file__)
MIXTRAL, DEEPSEEK = pairs.MIXTRAL.format(20), pairs.DEEPSEEK.format(12)  # these flags make it a model with experts
LATENT = pairs.LATENT  # these make it a model with latent attention
STEPS = 2
SEPARATORS = 9  # tokens below this begin documents
NO_GROUPS = {axis: collectives.Group(axis) for axis in AXES}  # the groups of a single process


def everyone() -> collectives.Group:
    """Return the group of all ranks of a pool's job, or of one process."""
    return collectives.Group("", dist.group.WORLD if dist.is_initialized() else None)


def settings_of(grid: str, world: int = 1) -> config.Config:
    return rules.parse(f"{BASE} {grid}".split(), world)


def batches(settings: config.Config) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tokens, labels) of the global batch of each step.

    Many labels are ignored. Some sequences have only ignored labels.
    """
    generator, out, seen = torch.Generator().manual_seed(11), [], 0
    for _ in range(STEPS):
        sequences = settings.batch.global_batch
        for size, first in settings.batch.ramp():
            sequences = size if seen >= first else sequences
        window = torch.randint(settings.model.vocab, (sequences, settings.batch.seq_len + 1), generator=generator)
        labels = window[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < torch.rand(sequences, 1, generator=generator)] = -100
        labels[:min(6, 3 * sequences // 8)] = -100  # a micro-batch of 6 sequences or fewer can have nothing to learn
        out.append((window[:, :-1], labels))
        seen += labels.numel()
    return out


def begins(tokens: torch.Tensor, settings: config.Config) -> torch.Tensor:
    """Return which tokens begin a document that attention keeps apart, [B, S]; none without
    --mask-documents."""
    return (tokens < SEPARATORS) & settings.data.mask_documents


class GivenSamples(Samples):
    """Sample number i is row i of a given global batch. The code under test decides which rank
    reads which number."""

    def __init__(self, tokens: torch.Tensor, labels: torch.Tensor, mask_documents: bool = False):
        self.tokens, self.labels, self.mask_documents, self.spans = tokens, labels, mask_documents, len(tokens)
        self.corpus, self.seq, self.seed = self, tokens.shape[1], None

    def start(self, number: int) -> int:
        return number * self.seq

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read as Corpus.read does.

        Return the tokens of a sample and one more, which of them begin a document, and that all are
        targets.
        """
        tokens = self.tokens[start // self.seq].numpy()
        tokens = np.append(tokens, 0)
        return tokens, tokens < SEPARATORS, np.ones(count, bool)

    def micro_batch(self, numbers: list[int]) -> MicroBatch:
        return super().micro_batch(numbers)._replace(labels=self.labels[numbers])


class Call(NamedTuple):
    """One collective that this rank called."""
    group: str
    name: str
    shapes: list[torch.Size]
    dtype: torch.dtype


def recorded() -> AbstractContextManager[list[Call]]:
    """Record the calls of collectives in the body, and of transfers around a ring.

    tests/test_pp.py checks the transfers of a pipeline. A Meter would also see all other
    operations, but a grid would take twice the time.
    """
    def call(name: str, group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> Call:
        return Call(group.group_name, name, [x.shape for x in tensors], tensors[0].dtype)

    def collective(name: str) -> Callable[..., Call]:
        return lambda *args, group, **how: call(name, group, [x for x in args if isinstance(x, torch.Tensor)])

    def transfers(given: list[dist.P2POp]) -> Call:
        return call(" ".join(t.op.__name__ for t in given), given[0].group, [t.tensor for t in given])

    owners = dict(all_reduce=dist, all_to_all_single=dist, _all_gather=collectives, _reduce_scatter=collectives)
    return watch.in_order(*((owner, name, collective(name)) for name, owner in owners.items()),
                          (dist, "batch_isend_irecv", transfers))


def for_each(pool, ranks: int, function: Callable, cases: list[dict]) -> list[tuple]:
    """Call a function with each of these arguments on every rank, and return its results by case.

    All calls share one world, because many worlds would cost more.
    """
    return list(zip(*pool.run(ranks, results_of, of=function, cases=cases), strict=True))


def results_of(of: Callable, cases: list[dict]) -> list:
    return [of(**case) for case in cases]


def build(settings: config.Config, dtype: str = "", groups=None, device: str = "cpu", filled: bool = True) -> tuple:
    """Return (groups, model, pipeline, optimizer) of this rank, filled with the seed's weights.

    This also works without any process group. dtype: instead of the dtype of the settings. groups:
    if they exist already.
    """
    if dtype:
        settings = copy.copy(settings)
        settings.precision = replace(settings.precision, dtype=dtype)
    groups = groups or build_groups(settings.grid, settings.model)
    model, pipeline = train.build_model(settings, groups, device), train.build_pipeline(settings, groups, device)
    optimizer = train.build_optimizer(settings, model, groups)
    if filled:
        optimizer.load(param.draw(settings.optim.seed))
    return groups, model, pipeline, optimizer


def ready(flags: str, dtype: str = "", base: str = BASE, fp8: str = "") -> tuple:
    """Return (groups, model, pipeline, optimizer, this rank's micro-batches of the first global
    batch).

    fp8: a recipe, which the command line would refuse for fp64.
    """
    settings = rules.parse(f"{base} {flags}".split(), everyone().size)
    settings.precision.fp8 = fp8 or settings.precision.fp8
    groups, model, pipeline, optimizer = build(settings, dtype)
    return groups, model, pipeline, optimizer, micro_batches(settings, groups, *batches(settings)[0])


def memory_of_rank(settings: config.Config, groups, fused: bool = False) -> dict[str, int]:
    return device.memory_of_rank(settings, groups.get("pp", ALONE).rank, fused)


def micro_batches(settings: config.Config, groups, tokens: torch.Tensor, labels: torch.Tensor) -> list[MicroBatch]:
    """Return this rank's part of a global batch."""
    samples = GivenSamples(tokens, labels, settings.data.mask_documents)
    return train.local_micro_batches(samples, 0, len(tokens), settings, groups)


def forward_backward(settings: config.Config, groups, model, pipeline, optimizer, tokens: torch.Tensor,
                     labels: torch.Tensor) -> torch.Tensor:
    """Return the losses of a global batch. Its gradients are then in the optimizer's buckets."""
    return train.forward_backward(model, pipeline, optimizer, micro_batches(settings, groups, tokens, labels), groups)


def run(grid: str, last: int = STEPS) -> dict:
    """Run one rank of a grid for `last` steps. This also works without any process group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = settings_of(grid, world)
    groups, model, pipeline, optimizer = build(settings)
    seen, out = 0, dict(loss=[], norm=[], grads=[], square=[])
    with recorded() as calls:
        for tokens, labels in batches(settings)[:last]:
            sequences = job.sequences_at(seen, settings.batch.ramp())
            assert sequences == len(tokens)
            seen += tokens.numel()
            losses = forward_backward(settings, groups, model, pipeline, optimizer, tokens, labels)
            out["loss"].append(losses.sum().item())  # the sum of both losses with multi-token prediction
            out["grads"].append(pieces(optimizer, "grad"))
            out["square"].append(sum(values.square().sum().item() for *_, owned, values in out["grads"][-1] if owned))
            out["norm"].append(optimizer.step(settings.optim.lr).item())
            if settings.model.experts:
                train.update_balance(model, groups, torch.tensor(True), sequences)
    for bucket in optimizer.buckets:
        bucket.unshard()
    out["rounded"] = all(torch.equal(bucket.weights[bucket.shard], bucket.master.to(bucket.weights.dtype))
                         for bucket in optimizer.buckets)
    out["visible"] = {(p.spec.name, str(p.box)): digest(p.detach().clone()) for p in model.parameters()}
    for bucket in optimizer.buckets:
        bucket.reshard()
    out |= {name: pieces(optimizer, what) for name, what in (("params", "master"), ("m", "m"), ("v", "v"))}
    out["extra_state"] = optimizer.extra_state() | {router.name: router.bias for router in model.routers}
    uneven = {groups[axis].process_group.group_name for axis in ("ep", "muon") if groups[axis].size > 1}
    out["collectives"] = [call._replace(shapes=[]) if call.name == "all_to_all_single" and call.group in uneven
                          else call for call in calls]  # shapes that depend on routing, or on owners
    return out


def pieces(optimizer, what: str) -> list[tuple]:
    """Return (name, shape, box, whether this rank owns it, values) of every piece of one kind that
    a rank holds."""
    return [(p.spec.name, p.spec.shape, box, bucket.owns(p.spec), flat[place].clone().reshape(param.box_shape(box)))
            for bucket in optimizer.buckets if what in ("grad", *bucket.state)
            for flat in [bucket.grad_shard if what == "grad" else bucket.state[what]]
            for p, box, place in bucket.pieces()]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def whole(ranks: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """Return full tensors by name, from the pieces of all ranks. Every element must be owned by
    exactly one rank."""
    full, owners = {}, {}
    for name, shape, box, owned, values in (piece for rank in ranks for piece in rank):
        if owned:
            full.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))[box] = values
            owners.setdefault(name, torch.zeros(shape, dtype=torch.int))[box] += 1
    wrong = {name: count.unique().tolist() for name, count in owners.items() if not (count == 1).all()}
    assert not wrong, f"elements owned by another number of ranks than one: {wrong}"
    return full


def initial(settings: config.Config) -> dict[str, torch.Tensor]:
    """Return the initial weights of the whole model by name."""
    model = train.Llama(settings.model, {})
    return {p.spec.name: param.draw(settings.optim.seed)(p.spec, p.box).double() for p in model.parameters()}
