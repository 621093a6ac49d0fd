"""Trainers by frameworks that `pytest -m foreign` needs, recorded for learn/judge.py:

    torchrun --nproc_per_node=2 tests/help/foreign.py WAY FOLDER [FAULT]
"""
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]

import torch
import torch.distributed as dist
from judged import BALANCE, SEQUENCES, STEPS, Net, clip, data, summed
from torch import Tensor, nn

from learn.judge import Piece, Record

LR = 0.01


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def one(folder: str, fault: str) -> None:
    net, record = make(), Record(folder)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        tokens, labels = data(step)
        loss_of(net, tokens, labels, (labels >= 0).sum()).backward()
        record.step(model=net)
        clip(net)
        optimizer.step()
        optimizer.zero_grad()
    record.close()


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """This part's terms of the global batch's loss."""
    logits, balancing = model(tokens)
    return summed(logits, labels) / valid + BALANCE * balancing / SEQUENCES


def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Two of this rank, and how many labels of the global batch count."""
    tokens, labels = data(step)
    for part in torch.arange(SEQUENCES)[dist.get_rank()::dist.get_world_size()].chunk(2):
        yield tokens[part], labels[part], (labels >= 0).sum()


def by_accelerate(folder: str, fault: str) -> None:
    """It divides a loss by the number of micro-batches, and gradients by the number of ranks."""
    from accelerate import Accelerator
    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), make()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0))
    world = accelerator.num_processes
    record = Record(folder, axes=dict(dp=world, accumulation=2))
    for step in range(STEPS):
        for tokens, labels, valid in micro_batches(step):
            with accelerator.accumulate(model):
                scale = world if fault == "divided by accumulation" else 2 * world
                accelerator.backward(scale * loss_of(model, tokens, labels, valid))
                if accelerator.sync_gradients:
                    record.step(model=model)
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    record.close()


def by_deepspeed(folder: str, fault: str, level: int) -> None:
    """As accelerate. Its own functions find a parameter's gradient and fp32 weight in the flat partitions."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
    deepspeed.init_distributed("gloo")
    net, world = make(), dist.get_world_size()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=dict(
        train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, gradient_clipping=0.1,
        optimizer=dict(type="AdamW", params=dict(lr=LR, weight_decay=0.0, torch_adam=True)),
        zero_optimization=dict(stage=level), zero_force_ds_cpu_optimizer=False))

    def pieces(with_gradients: bool) -> list[Piece]:
        return [Piece(name, safe_get_full_fp32_param(p), safe_get_full_grad(p) if with_gradients else None,
                      tuple(slice(0, n) for n in getattr(p, "ds_shape", p.shape)))
                for name, p in net.named_parameters()]

    record = Record(folder, axes=dict(dp=world, accumulation=2))
    for step in range(STEPS):
        for i, (tokens, labels, valid) in enumerate(micro_batches(step)):
            scale = 2 if fault == "divided by ranks" else 2 * world
            engine.backward(scale * loss_of(engine, tokens, labels, valid))
            if i == 1:
                record.step(model=pieces(True))
            engine.step()
    record.close(pieces(False))


def by_megatron(folder: str, fault: str) -> None:
    """Megatron-Core's f and g around plain shards of two matrices, which `place` locates."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group, rank, net = parallel_state.get_tensor_model_parallel_group(), dist.get_rank(), make()
    cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # name -> the dimension that is sharded
    for name, dim in cut.items():
        param = net.get_parameter(name)
        param.data = param.data.chunk(2, dim)[rank].clone()
    f = mappings.copy_to_tensor_model_parallel_region
    net.up.register_forward_pre_hook(
        lambda _, x: f(f(x[0], group=group), group=group) if fault == "reduced twice" else f(x[0], group=group))
    net.down.register_forward_hook(lambda down, x, y: down.bias + mappings.reduce_from_tensor_model_parallel_region(
        y - down.bias, group=group))

    def place(name: str, x: Tensor) -> tuple[str, tuple[slice, ...] | None]:
        box = [slice(0, n) for n in x.shape]
        if name in cut:
            size = x.shape[cut[name]]
            box[cut[name]] = slice(rank * size, (rank + 1) * size)
        return name, tuple(box)

    record, optimizer = Record(folder, axes=dict(tp=2), place=place), torch.optim.AdamW(
        net.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        tokens, labels = data(step)
        loss_of(net, tokens, labels, (labels >= 0).sum()).backward()
        record.step(model=net)
        squares = torch.zeros(2)
        for name, param in net.named_parameters():
            squares[int(name in cut)] += param.grad.square().sum()
        dist.all_reduce(squares[1])
        for param in net.parameters():
            param.grad.mul_((0.1 / (squares.sum().sqrt() + 1e-6)).clamp(max=1))
        optimizer.step()
        optimizer.zero_grad()
    record.close()


WAYS = dict(one=one, accelerate=by_accelerate, megatron=by_megatron) | {
    f"deepspeed-{level}": lambda folder, fault, level=level: by_deepspeed(folder, fault, level) for level in (1, 2, 3)}

if __name__ == "__main__":
    way, folder, *fault = sys.argv[1:]
    WAYS[way](folder, "".join(fault))
