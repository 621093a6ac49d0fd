"""Trainers in other people's code, with optional errors, and our own trainer. Each records itself.

The run of one process is the truth. The others divide the same global batch over two ranks by
DistributedDataParallel, FSDP2, DTensor's tensor parallelism, pipelining, or along the sequence.
"""
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grids
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from learn.judge import Piece, Record

STEPS, SEQUENCES, SEQ, VOCAB, BALANCE = 2, 8, 12, 31, 0.5


class Net(nn.Module):
    def __init__(self, vocabulary: int = VOCAB):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, 16), nn.Embedding(SEQ, 16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.gate, self.head = nn.Linear(16, 4), nn.Linear(16, vocabulary)

    def body(self, tokens: Tensor, first: int = 0) -> Tensor:
        x = self.embed(tokens) + self.positions(first + torch.arange(tokens.shape[1]))
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def top(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, a balance loss summed over sequences)."""
        scores = self.gate(x).softmax(-1)
        return self.head(x * (1 + scores[..., :1])), scores.mean(1).square().sum()

    def forward(self, tokens: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        return self.top(self.body(tokens, first))


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data(step: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, labels). A different number of labels counts in each sequence."""
    window = torch.randint(VOCAB, (SEQUENCES, SEQ + 1), generator=torch.Generator().manual_seed(step))
    labels = window[:, 1:].clone()
    for i in range(SEQUENCES):
        labels[i, :i] = -100
    return window[:, :-1], labels


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, divisor: Tensor, balance: float = BALANCE) -> Tensor:
    """Return the terms of these sequences in the global batch's loss."""
    logits, balancing = model(tokens)
    return summed(logits, labels) / divisor + balance * balancing / SEQUENCES


def adamw(model: nn.Module, fault: str = "") -> torch.optim.Optimizer:
    decays = lambda name: name.endswith("weight") and ("norm" not in name or fault == "decay")  # noqa: E731
    named = dict(model.named_parameters())
    return torch.optim.AdamW([dict(params=[p for n, p in named.items() if decays(n)], weight_decay=0.1),
                              dict(params=[p for n, p in named.items() if not decays(n)], weight_decay=0.0)], lr=0.01)


def clip(model: nn.Module) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale(model: nn.Module, norm: Tensor) -> None:
    """Clip as `clip` does, with a norm that has been computed already."""
    for p in model.parameters():
        p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1))


def train_steps(record: Record, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], Any],
                clip: Callable[[nn.Module], Any] = clip) -> None:
    """Train and record. backward: computes a step's gradients, and returns other values to record,
    as a dict, or None."""
    for step in range(STEPS):
        record.step(model=model, **backward(step) or {})
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    record.close()


def one(folder: str, balance: float = BALANCE) -> None:
    model = make()

    def backward(step: int) -> dict[str, Tensor]:
        tokens, labels = data(step)
        loss = loss_of(model, tokens, labels, (labels >= 0).sum(), balance)
        loss.backward()
        return dict(loss=loss.detach(), norm=torch.cat([p.grad.flatten() for p in model.parameters()]).norm())

    train_steps(Record(folder), model, adamw(model), backward)


def ddp(folder: str, fault: str) -> None:
    rank, world, net = dist.get_rank(), dist.get_world_size(), make()
    model, optimizer = DistributedDataParallel(net), adamw(net, fault)

    def backward(step: int) -> None:
        tokens, labels = (x[rank::world] for x in data(step))
        valid, own = (data(step)[1] >= 0).sum(), (labels >= 0).sum()
        for i in range(2):
            part, targets = tokens[2 * i:2 * i + 2], labels[2 * i:2 * i + 2]
            here = (targets >= 0).sum()
            divisor = {"mean of ranks": own, "mean of micro-batches": 2 * here}.get(fault, valid / world)
            with model.no_sync() if i == 0 or fault == "not reduced" else nullcontext():
                balance = world * BALANCE * (world if fault == "balance" else 1)
                loss_of(model, part, targets, divisor, balance).backward()
            if fault == "last micro-batch" and i == 0:
                optimizer.zero_grad()
        if fault == "reduced twice":
            for p in net.parameters():
                dist.all_reduce(p.grad)

    if fault == "drift" and rank == 1:
        optimizer.register_step_post_hook(lambda *_: net.norm.weight.data.add_(1e-9))
    train_steps(Record(folder, axes=dict(dp=world, micro=4)), model, optimizer, backward)


def sequence(folder: str, fault: str) -> None:
    """Train with half of the tokens of every sequence on each rank."""
    rank, world, net = dist.get_rank(), dist.get_world_size(), make()
    model = DistributedDataParallel(net)

    def backward(step: int) -> None:
        tokens, labels = data(step)
        mine, first = slice(rank * SEQ // world, (rank + 1) * SEQ // world), rank * SEQ // world
        logits, _ = model(tokens[:, mine], 0 if fault == "positions" else first)
        (world * summed(logits, labels[:, mine]) / (labels >= 0).sum()).backward()

    train_steps(Record(folder, axes=dict(cp=world)), model, adamw(net), backward)


def fsdp(folder: str, fault: str) -> None:
    rank, world, model = dist.get_rank(), dist.get_world_size(), make()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    Record.load(Path(folder).parent / "one", model)
    first, optimizer = model.head.weight.to_local().clone(), adamw(model)

    def backward(step: int) -> dict[str, Tensor]:
        tokens, labels = data(step)
        loss = loss_of(model, tokens[rank::world], labels[rank::world], (labels >= 0).sum())
        (world * loss).backward()  # FSDP averages
        total = loss.detach().clone()
        dist.all_reduce(total)
        return dict(loss=total)

    def clip_locally(model: nn.Module) -> None:
        own = torch.cat([p.grad.to_local().flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(0.1 / own.item())

    def permute(*_) -> None:
        shards = model.up.weight.data.full_tensor().chunk(world)
        model.up.weight.to_local().data.copy_(shards[rank - 1])

    if fault == "stale":
        optimizer.register_step_post_hook(lambda *_: model.head.weight.to_local().data.copy_(first))
    if fault == "permuted":
        optimizer.register_step_post_hook(permute)
    train_steps(Record(folder), model, optimizer, backward, clip_locally if fault == "local clip" else clip)


def dtensor(folder: str, fault: str) -> None:
    world, model = dist.get_world_size(), make()
    parallelize_module(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)),
                       {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def norm() -> Tensor:
        grads = [p.grad for p in model.parameters()]
        if fault == "norm per tp rank":
            mine = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            squares = sum(grad.square().sum() for grad in mine)
            dist.all_reduce(squares)
            return squares.sqrt()
        wholes = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        return torch.cat([whole.flatten() for whole in wholes]).norm()

    def backward(step: int) -> dict[str, Tensor]:
        tokens, labels = data(step)
        loss_of(model, tokens, labels, (labels >= 0).sum()).backward()
        return dict(norm=norm())

    train_steps(Record(folder), model, adamw(model), backward, lambda model: scale(model, norm()))


class Half(nn.Module):
    """A stage: the half of the net that it computes."""

    def __init__(self, net: Net, stage: int):
        super().__init__()
        self.net, self.stage = net, stage
        for name in (("gate", "head"), ("embed", "positions", "norm", "up", "down"))[stage]:
            delattr(net, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.net.top(x)[0] if self.stage else self.net.body(x)


def pipeline(folder: str, fault: str) -> None:
    rank, model = dist.get_rank(), Half(make(), dist.get_rank())
    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))

    def backward(step: int) -> None:
        tokens, labels = data(step)
        valid = (labels >= 0).sum() * (2 if fault == "loss over pp" else 1)
        engine = pipelining.ScheduleGPipe(stage, 4, lambda y, labels: summed(y, labels) / valid,
                                          scale_grads=fault == "loss over micro-batches")
        engine.step(*[tokens] * (rank == 0), target=labels if rank else None)

    def clip_halves(model: nn.Module) -> None:
        squares = sum(p.grad.square().sum() for p in model.parameters())
        dist.all_reduce(squares)
        scale(model, squares.sqrt())

    record = Record(folder, axes=dict(pp=2, micro=4), place=lambda name, x: (name.removeprefix("net."), None))
    train_steps(record, model, adamw(model), backward, clip_halves)


def run(way: str, folder: str, faults: list[str]) -> None:
    """Record a run with each fault, in a folder named by the way and the fault."""
    for fault in faults:
        globals()[way](f"{folder}/{way} {fault}", fault)


def ours(folder: str, grid: str) -> None:
    """Train with train.py's functions. Every piece of every bucket has a box already."""
    settings = grids.settings_of(grid, dist.get_world_size() if dist.is_initialized() else 1)
    groups, model, pipeline, optimizer = grids.build(settings)
    record = Record(folder)
    for tokens, labels in grids.batches(settings):
        grids.forward_backward(settings, groups, model, pipeline, optimizer, tokens, labels)
        record.step(model=[Piece(param.spec.name, bucket.master[place], bucket.grad_shard[place], box)
                           for bucket in optimizer.buckets for param, box, place in bucket.pieces()])
        optimizer.step(settings.optim.lr)
    record.close()


def large(folder: str) -> None:
    """Record one step of 16 matrices, 100M elements in fp32, whose rows are divided equally over
    the ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    record, pieces, mine = Record(folder), [], slice(2048 * rank // ranks, 2048 * (rank + 1) // ranks)
    for i in range(16):
        whole = torch.randn(2048, 3072, generator=torch.Generator().manual_seed(i))
        pieces.append(Piece(f"layers.{i}", whole[mine].clone(), whole[mine] + 1, (mine, slice(0, 3072))))
    record.step(model=pieces)


def terms(folder: str) -> None:
    """Record a gradient of two terms with the same bits. On four ranks, two ranks have each term."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.ones(3, dtype=torch.float64)
    Record(folder).step(model=[Piece("x", x, x / min(ranks, 2), (slice(0, 3),), rank % 2 if ranks > 1 else None)])
