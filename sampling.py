"""Sampling: continue a text token by token, on whatever grid the model was trained on.

Keys and values of earlier tokens are kept, so a step computes one token. Every rank has all tokens: those of a tensor
parallel group compute their parts of each layer, pipeline ranks run their stages one after the other, and context and
data parallel ranks do what the others do, or nothing.
"""
import torch

from collectives import all_reduce, receive, send
from model import Llama
from param import rank
from tp import whole_rows


class Cache:
    """Keys and values of the tokens so far, by layer."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def count(self, layer: int) -> int:
        return self.layers[layer][0].shape[1] if layer in self.layers else 0

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, B S K D, and return all there are."""
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v)))
        self.layers[layer] = k, v
        return k, v


@torch.no_grad()
def sample(model: Llama, tokens: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
    """Continue tokens B S by `count` tokens, each drawn from softmax(logits / temperature); 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    cache, new = Cache(), tokens
    for _ in range(count):
        logits = through_stages(model, new, cache)
        new = torch.zeros_like(tokens[:, :1])
        if logits is not None:
            logits = whole_rows(logits[:, -1], model.model.vocab, model.tp.group).float().cpu()
            if temperature == 0:
                new.copy_(logits.argmax(-1, keepdim=True))
            else:
                new.copy_(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        all_reduce(new, model.pipeline.group)  # one pipeline rank has it, the others zeros
        tokens = torch.cat((tokens, new), 1)
    return tokens


def through_stages(model: Llama, tokens: torch.Tensor, cache: Cache) -> torch.Tensor | None:
    """Logits, on the pipeline rank that has the last stage; each runs its stages when its turn comes."""
    group, owners, x = model.pipeline.group, model.pipeline.owners, None
    for stage in model.stages:
        if stage and owners[stage - 1] != rank(group):
            x = torch.empty(model.between(tokens, sequence=False), dtype=model.dtype, device=tokens.device)
            receive(x, owners[stage - 1], group).wait()
        x = model(tokens, cache=cache, stage=stage, x=x)
        if stage < model.last and owners[stage + 1] != rank(group):
            send(x, owners[stage + 1], group).wait()
    return x if model.last in model.stages else None
