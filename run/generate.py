"""Sampling: continue a text token by token, on any grid.

A cache has the keys and values of earlier tokens, so a step computes one token. Every rank has all tokens. Tensor
parallel ranks compute their shards of each layer, and pipeline ranks run their stages one after the other. Context
parallel ranks all compute the same; so do data parallel ranks, or they do not take part.

    python -m run.generate CKPT --prompt TEXT          CKPT: a checkpoint, or a folder with a published model
    torchrun --nproc_per_node=2 -m run.generate CKPT --prompt TEXT --tp 2          and any other flags of train.py
"""
import os
import sys

import torch
from torch.nn import Module

from core import config
from core.collectives import ALONE, Groups, all_reduce, receive, send
from core.param import shard_slice
from run.tokenizing import Codec


class KVCache:
    """Keys and values of earlier tokens, by layer. With a window, those that no later token will see are dropped."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[int, int] = {}  # tokens so far, including dropped ones

    def length(self, layer: int) -> int:
        return self.lengths.get(layer, 0)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, both [B, S, K, D]; return all that these tokens may see. window: of the layer, 0: none."""
        self.lengths[layer] = self.length(layer) + k.shape[1]
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v)))
        dropped = max(0, k.shape[1] - (window - 1)) if window else 0
        self.layers[layer] = k[:, dropped:], v[:, dropped:]
        return k, v


@torch.no_grad()
def sample(model: Module, tokens: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
    """Tokens [B, S] continued by `count` tokens, [B, S + count], each drawn from softmax(logits / temperature). model:
    a model.Llama.

    temperature 0 takes the likeliest token. All ranks of the grid must call it, with the same arguments. From then on
    the model multiplies in 16 bits, as ranks that take no part could not agree on FP8 scales.
    """
    for module in model.modules():
        vars(module).pop("mm", None)  # the class has the plain one
    generator, cache, new = torch.Generator().manual_seed(seed), KVCache(), tokens
    vocab, tp, pp = model.config.vocab, model.tp.group, model.groups.get("pp", ALONE)
    for _ in range(count):
        logits, own = torch.zeros(len(tokens), vocab, device=tokens.device), next_logits(model, new, cache)
        if own is not None:
            logits[:, shard_slice(vocab, tp.size, tp.rank)] = own[:, -1].float()
        all_reduce(logits, tp)  # every rank has its part, and zeros
        all_reduce(logits, pp)  # one pipeline rank has them, the others zeros
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator).to(tokens)
        tokens = torch.cat((tokens, new), 1)
    return tokens


def next_logits(model: Module, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor | None:
    """Logits [B, S, V/t] of tokens that follow those in the cache; None on pipeline ranks without the last stage."""
    group, owners, x = model.groups.get("pp", ALONE), model.owners, None
    for stage in model.layers_of_stage:
        if stage and owners[stage - 1] != group.rank:
            x = torch.empty(model.boundary_shape(tokens, sequence=False), dtype=model.execution.dtype,
                            device=tokens.device)
            receive(x, owners[stage - 1], group).wait()
        x = model(tokens, cache=cache, stage=stage, x=x)
        if stage < model.last_stage and owners[stage + 1] != group.rank:
            send(x, owners[stage + 1], group).wait()
    return x if model.last_stage in model.layers_of_stage else None


def continue_prompt(model: Module, codec: Codec, settings: config.Config, groups: Groups, device: torch.device,
                    length: int = 240) -> None:
    """Print how the model continues --sample-prompt by `length` tokens.

    The first rank of the data axis, with its tp and pp partners, can do this alone, unless ZeRO-3 or expert parallelism
    shards weights over the data axis: then all ranks take part.
    """
    if groups["data"].rank == 0 or settings.grid.zero == 3 or settings.grid.ep > 1:
        prompt = torch.tensor([codec.prompt(settings.run.sample_prompt)], device=device)
        begin = 0 if codec.separator is None else 1
        tokens = sample(model, prompt, length)[0, begin:].tolist()
        if groups["world"].rank == 0:
            text = codec.decode(tokens)  # whose control characters would ring and erase
            print("".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text))


def main(arguments: list[str]) -> None:
    """Replace this process by train.py with --steps 0: it has the grid, the checkpoints and the data."""
    if "--prompt" not in arguments and {"-h", "--help"} & set(arguments):  # train.py's own help lists its flags
        print(__doc__)
        return
    where = arguments.index("--prompt") if "--prompt" in arguments[1:-1] else 0
    if not where or arguments[0].startswith("-") or not arguments[where + 1]:
        print("run.generate: usage: python -m run.generate CKPT --prompt TEXT [flags of train.py]", file=sys.stderr)
        sys.exit(2)
    path, *flags = arguments
    # In one word, so that a prompt may begin with @ or -.
    flags[where - 1:where + 1] = ["--sample-prompt=" + flags[where]]
    published = os.path.isfile(os.path.join(path, "config.json"))
    default_grid = ("--dp auto --dp-replicate 1 --cp 1 --cp-zigzag sequence --cp-ulysses 1 --tp 1 --sp on --pp 1 "
                    "--schedule 1f1b --virtual-stages auto --ep 1 --zero 0 --recompute none --offload none").split()
    batch = ["--batch-ramp", "", "--micro-batch", "1", "--global-batch", os.environ.get("WORLD_SIZE", "1")]
    no_training = ["--steps", "0", "--checkpoint-dir", "", "--save-every", "0", "--rewind", "0",
                   "--metrics", "", "--tensorboard", "", "--wandb", "",
                   "--val-data", "--eval-every", "0",
                   "--optimizer", "sgd", "--moments-dtype", "auto"]  # SGD has no moments to load
    train = os.path.join(os.path.dirname(os.path.dirname(__file__)), "train.py")
    os.execv(sys.executable, [sys.executable, train, "--init-from" if published else "--resume", path, *default_grid,
                              *batch, *no_training, *flags])


if __name__ == "__main__":
    main(sys.argv[1:])
