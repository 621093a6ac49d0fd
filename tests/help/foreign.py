"""Trainers of other frameworks, recorded for learn/judge.py. `pytest -m foreign` runs them:

    torchrun --nproc_per_node=2 tests/help/foreign.py WAY FOLDER [FAULT]
"""
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from judged import BALANCE, SEQ, SEQUENCES, STEPS, VOCAB, Net, data, loss_of, scale, summed, train_steps
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from learn.judge import Piece, Record

LR = 0.01


def make() -> nn.Module:
    """Make a model whose vocabulary is divisible by two."""
    torch.manual_seed(0)
    return Net(VOCAB + 1)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)


def one(folder: str, fault: str) -> None:
    net = make()

    def backward(step: int) -> None:
        tokens, labels = data(step)
        loss_of(net, tokens, labels, (labels >= 0).sum()).backward()

    train_steps(Record(folder), net, adamw(net), backward)


def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield two micro-batches of this rank, with the number of labels of the global batch that
    count."""
    tokens, labels = data(step)
    for part in torch.arange(SEQUENCES)[dist.get_rank()::dist.get_world_size()].chunk(2):
        yield tokens[part], labels[part], (labels >= 0).sum()


def by_accelerate(folder: str, fault: str) -> None:
    """Accelerate divides a loss by the number of micro-batches, and gradients by the number of
    ranks."""
    from accelerate import Accelerator
    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), make()
    model, optimizer = accelerator.prepare(net, adamw(net))
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
    """DeepSpeed divides like accelerate. Its functions find a parameter's gradient and fp32 weight
    in the flat partitions."""
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


def megatron(tp: int, **options) -> Any:
    """Return Megatron-Core's configuration. Megatron-Core asks CUDA for the device on which it
    allocates."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    torch.cuda.current_device = lambda: "cpu"
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, tensor_model_parallel_size=tp,
                             use_cpu_initialization=True, perform_initialization=False, **options)


def by_megatron_layers(folder: str, fault: str, sequence: bool) -> None:
    """Train Net with Megatron-Core's layers and loss.

    With sequence parallelism, a rank has half of the positions from the embedding to the second
    sum. Parameters that are whole on each rank there have only a term of their gradient.
    """
    from megatron.core import tensor_parallel as mpu
    config, inner = megatron(2), megatron(2, sequence_parallel=sequence)
    net, rank, world, common = make(), dist.get_rank(), dist.get_world_size(), dict(init_method=None)
    layers = dict(
        embed=mpu.VocabParallelEmbedding(VOCAB + 1, 16, reduce_scatter_embeddings=sequence, config=config, **common),
        up=mpu.ColumnParallelLinear(16, 40, config=inner, **common),
        down=mpu.RowParallelLinear(40, 16, bias=True, input_is_parallel=True, skip_bias_add=False, config=inner,
                                   **common),
        head=mpu.ColumnParallelLinear(16, VOCAB + 1, config=config, **common))
    boxes = {}  # of divided parameters
    for module, layer in layers.items():
        for name, whole in getattr(net, module).named_parameters():
            ours = getattr(layer, name)
            box = tuple(slice(rank * n, rank * n + n) if n < size else slice(0, n)
                        for n, size in zip(ours.shape, whole.shape))
            ours.data.copy_(whole.data[box])
            if ours.shape != whole.shape:
                boxes[f"{module}.{name}"] = box
        setattr(net, module, layer)
    if fault == "reduced twice":
        net.up.register_forward_pre_hook(lambda up, x: mpu.copy_to_tensor_model_parallel_region(x[0]))
    terms = [*net.positions.parameters(), *net.norm.parameters(), net.down.bias]
    if fault == "not reduced" or not sequence and fault != "reduced":
        terms = []

    def backward(step: int) -> None:
        tokens, labels = data(step)
        positions = net.positions(torch.arange(SEQ))
        x = net.embed(tokens) + (positions.chunk(world)[rank][:, None] if sequence else positions)  # positions first
        x = x + net.down(F.gelu(net.up(net.norm(x))[0]))[0]
        if sequence:
            x = mpu.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=fault == "summed")
            x = x.transpose(0, 1)
        scores = net.gate(x).softmax(-1)
        losses = mpu.vocab_parallel_cross_entropy(net.head(x * (1 + scores[..., :1]))[0], labels.clamp(min=0))
        loss = losses[labels >= 0].sum() / (labels >= 0).sum()
        (loss + BALANCE * scores.mean(1).square().sum() / SEQUENCES).backward()
        for p in terms:
            dist.all_reduce(p.grad)

    def clip(net: nn.Module) -> None:
        squares = torch.zeros(2)  # of whole and of divided parameters
        for name, p in net.named_parameters():
            squares[int(name in boxes)] += p.grad.square().sum()
        dist.all_reduce(squares[1])
        scale(net, squares.sum().sqrt())

    record = Record(folder, dict(tp=world), lambda name, x: (name, boxes.get(name)))
    train_steps(record, net, adamw(net), backward, clip)


def by_megatron_ddp(folder: str, fault: str) -> None:
    """Megatron-Core's DDP divides gradients by the number of ranks, and keeps them in main_grad."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    config, net, world = megatron(1), make(), dist.get_world_size()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), net)

    def backward(step: int) -> None:
        model.zero_grad_buffer()
        for i, (tokens, labels, valid) in enumerate(micro_batches(step)):
            with model.no_sync() if i == 0 else nullcontext():
                scale = 1 if fault == "divided by ranks" else world
                (scale * loss_of(model, tokens, labels, valid)).backward()
        model.finish_grad_sync()
        for p in net.parameters():
            p.grad = p.main_grad

    train_steps(Record(folder, dict(dp=world, accumulation=2)), net, adamw(net), backward)


def by_transformers(folder: str, fault: str, architecture: str, several: bool) -> None:
    """Train transformers' model from random weights, on several ranks with tp_plan="auto".

    Each rank then has the whole loss.
    """
    import transformers
    from transformers.distributed import DistributedConfig
    torch.manual_seed(0)
    weights, options = Path(folder).parent / architecture, dict(distributed_config=DistributedConfig(tp_plan="auto"))
    if not several:
        options = {}
        config = getattr(transformers, f"{architecture}Config")(
            vocab_size=VOCAB + 1, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4)
        getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(weights)
    model = getattr(transformers, f"{architecture}ForCausalLM").from_pretrained(weights, **options)

    def backward(step: int) -> None:
        tokens, labels = data(step)
        for part in torch.arange(SEQUENCES).chunk(2 if fault == "accumulated" else 1):
            (summed(model(tokens[part]).logits, labels[part]) / (labels >= 0).sum()).backward()
        if fault == "reduced":
            for p in model.parameters():
                if not isinstance(p, DTensor):
                    dist.all_reduce(p.grad)

    record = Record(folder, dict(accumulation=2) if fault == "accumulated" else {})
    train_steps(record, model, adamw(model), backward, clip=lambda model: None)


def by_torchtitan(folder: str, fault: str, backend: str, tp: int, sequence: bool = False) -> None:
    """Train torchtitan's Llama with its parallelize_llama, loss and clip_grad_norm_. tp = 0: one
    process.

    Attention is torch's, because torchtitan's is compiled for GPUs.
    """
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, fsdp, full_dtensor, parallel_dims, utils
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
    parallel_dims.device_type = "cpu"  # for its meshes
    vocabulary, rope = VOCAB + 1, llama3.ComplexRoPE.Config(dim=4, max_seq_len=SEQ, theta=10000.0)
    config = llama3.Llama3Model.Config(
        dim=16, vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(num_embeddings=vocabulary, embedding_dim=16,
                                               param_init=llama3._EMBEDDING_INIT),
        norm=llama3.RMSNorm.Config(normalized_shape=16, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=16, out_features=vocabulary,
                                     param_init=llama3._output_linear_init(16)),
        layers=llama3._build_llama3_layers(n_layers=2, dim=16, n_heads=4, n_kv_heads=2, hidden_dim=40, rope=rope,
                                           attn_backend="flex"))
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    mine, context = slice(None), nullcontext
    if tp:
        dist.init_process_group("gloo")
        if fault == "averaged by FSDP":
            fsdp.disable_fsdp_gradient_division = lambda model: None
        degrees = ParallelismConfig(tensor_parallel_degree=tp, enable_sequence_parallel=sequence, spmd_backend=backend)
        dims = ParallelDims.from_config(degrees, dist.get_world_size())
        utils.set_spmd_backend(backend)
        set_llama3_sharding_config(config, enable_sp=sequence)
        model = llama3.parallelize_llama(
            config.build(), parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=degrees, compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="")
        mine = slice(dist.get_rank() // tp, None, dist.get_world_size() // tp)
        context = utils.get_spmd_context(parallel_dims=dims)
    else:
        model = config.build()
    model.init_weights(buffer_device=None)
    if tp:
        Record.load(Path(folder).parent / "torchtitan-one", model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    def backward(step: int) -> None:
        tokens, labels = data(step)
        valid, inputs, targets = (labels >= 0).sum(), tokens[mine], labels[mine]
        more = dict(positions=torch.arange(SEQ).expand(inputs.shape))
        if backend == "full_dtensor":
            inputs, targets, more = full_dtensor.parallelize_inputs(dims, inputs, targets, more)
        with context():
            divisor = 2 * valid if fault == "divided by ranks" else valid
            (cross_entropy_loss(model(inputs, **more), targets) / divisor).backward()

    train_steps(Record(folder), model, adamw(model), backward,
                lambda model: utils.clip_grad_norm_(model.parameters(), 0.1))


WAYS = dict(
    one=one, accelerate=by_accelerate,
    **{f"deepspeed-{level}": partial(by_deepspeed, level=level) for level in (1, 2, 3)},
    **{"megatron-ddp": by_megatron_ddp, "megatron-tensor": partial(by_megatron_layers, sequence=False),
       "megatron-sequence": partial(by_megatron_layers, sequence=True)},
    **{f"transformers-{architecture}{end}": partial(by_transformers, architecture=architecture, several=not end)
       for architecture in ("Llama", "Qwen3") for end in ("", "-one")},
    **{"torchtitan-one": partial(by_torchtitan, backend="partial_dtensor", tp=0)},
    **{f"torchtitan-{backend}-{name}": partial(by_torchtitan, backend=backend, tp=tp, sequence=name == "sequence")
       for backend in ("spmd_types", "full_dtensor", "partial_dtensor")
       for name, tp in (("fsdp", 1), ("tensor", 2), ("sequence", 2))})

if __name__ == "__main__":
    way, folder, *fault = sys.argv[1:]
    WAYS[way](folder, "".join(fault))
    if dist.is_initialized():
        dist.destroy_process_group()
