"""Sampling: continue a text token by token, on whatever grid the model was trained on.

Keys and values of earlier tokens are kept, so a step computes one token. Every rank has all tokens: those of a tensor
parallel group compute their shards of each layer, pipeline ranks run their stages one after the other, and context and
data parallel ranks do what the others do, or nothing.
"""
import torch

from collectives import all_reduce, rank, receive, send
from model import Llama
from tp import gather_logits


class KVCache:
    """Keys and values of earlier tokens, by layer. A layer with a window forgets those that no later token sees."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[int, int] = {}  # tokens so far, forgotten ones too

    def length(self, layer: int) -> int:
        return self.lengths.get(layer, 0)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, B S K D, and return all that the layer has. window: of the layer, 0: none."""
        self.lengths[layer] = self.length(layer) + k.shape[1]
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v)))
        forget = max(0, k.shape[1] - (window - 1)) if window else 0
        self.layers[layer] = k[:, forget:], v[:, forget:]
        return k, v


@torch.no_grad()
def sample(model: Llama, tokens: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
    """Continue tokens B S by `count` tokens, each drawn from softmax(logits / temperature); 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    cache, new = KVCache(), tokens
    for _ in range(count):
        logits = next_logits(model, new, cache)
        new = torch.zeros_like(tokens[:, :1])
        if logits is not None:
            logits = gather_logits(logits[:, -1], model.model.vocab, model.tp.group).float().cpu()
            if temperature == 0:
                new.copy_(logits.argmax(-1, keepdim=True))
            else:
                new.copy_(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        all_reduce(new, model.pipeline.group)  # one pipeline rank has it, the others zeros
        tokens = torch.cat((tokens, new), 1)
    return tokens


def next_logits(model: Llama, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor | None:
    """Logits of tokens that follow those in the cache, on the pipeline rank that has the last stage."""
    group, owners, x = model.pipeline.group, model.pipeline.owners, None
    for stage in model.stages:
        if stage and owners[stage - 1] != rank(group):
            x = torch.empty(model.boundary_shape(tokens, sequence=False), dtype=model.execution.dtype,
                            device=tokens.device)
            receive(x, owners[stage - 1], group).wait()
        x = model(tokens, cache=cache, stage=stage, x=x)
        if stage < model.last_stage and owners[stage + 1] != rank(group):
            send(x, owners[stage + 1], group).wait()
    return x if model.last_stage in model.stages else None
