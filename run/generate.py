"""Sampling: continue a text token by token, on any grid of parallel ranks.

A cache holds the keys and values of earlier tokens, so a step computes one token. Every rank holds all tokens. Tensor
parallel ranks compute their shards of each layer, and pipeline ranks run their stages one after the other. Context
parallel ranks all compute the same; so do data parallel ranks, or they do not take part.

    python -m run.generate CKPT --prompt TEXT          CKPT: a checkpoint, or a folder with a published model
    torchrun --nproc_per_node=2 -m run.generate CKPT --prompt TEXT --tp 2          and any other flags of train.py
"""
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn import Module

from core import config
from core.collectives import ALONE, Group, Groups, all_reduce, receive, send
from core.config import need, setting
from core.param import shard_slice
from run.tokenizing import Codec


class KVCache:
    """Keys and values of earlier tokens, by layer. With a window, keys and values that no later token will see are
    dropped."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[int, int] = {}  # tokens so far, including dropped ones

    def length(self, layer: int) -> int:
        return self.lengths.get(layer, 0)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, both [B, S, K, D] with K key and value heads. Return all that these tokens may see.

        window: the layer's window; 0: none.
        """
        self.lengths[layer] = self.length(layer) + k.shape[1]
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v)))
        dropped = max(0, k.shape[1] - (window - 1)) if window else 0
        self.layers[layer] = k[:, dropped:], v[:, dropped:]
        return k, v


def next_token_probabilities(logits: torch.Tensor, temperature: float, top_k: int = 0,
                             top_p: float = 1.0) -> torch.Tensor:
    """Return the probabilities [B, V] of the next token, from its logits [B, V].

    They are softmax(logits / temperature) over the likeliest tokens, and 0 for all other tokens.

    top_k: keep the top_k likeliest tokens, and tokens that are as likely as the last of them; 0: keep all
    top_p: of the kept tokens, keep the fewest whose probabilities sum to at least top_p (Holtzman et al. 2020)
    """
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p < 1:
        descending, order = probabilities.sort(descending=True)
        before = descending.cumsum(-1) - descending  # the sum of all that are likelier
        probabilities.scatter_(-1, order, descending.masked_fill(before >= top_p, 0))
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities


@torch.no_grad()
def sample(model: Module, tokens: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0, top_k: int = 0,
           top_p: float = 1.0, ends: Sequence[Sequence[int]] = (), together: Group = ALONE) -> torch.Tensor:
    """Continue tokens [B, S] by at most `count` tokens, each drawn from `next_token_probabilities`.

    model: a model.Llama.

    temperature: 0 takes the likeliest token.
    ends: sequences of tokens that end a text. Rows that have ended go on until all rows have; then sampling stops.
    together: the group of ranks that sample the same text, besides the ranks of tp and pp. They pass the same
    arguments, and all get the token that the group's first rank draws, because rounding might lead another rank to
    another token.

    Side effect: FP8 is switched off in `model` for good, because its scales need a collective over all ranks.
    """
    for module in model.modules():
        vars(module).pop("mm", None)  # remove the FP8 multiplier; the class attribute is the plain one
    generator = torch.Generator().manual_seed(seed)
    cache, new = KVCache(), tokens
    vocab, tp, pp = model.config.vocab, model.tp.group, model.groups.get("pp", ALONE)
    prompt, ended = tokens.shape[1], [False] * len(tokens)
    for _ in range(count):
        logits = torch.zeros(len(tokens), vocab, device=tokens.device)
        own = next_logits(model, new, cache)
        if own is not None:
            logits[:, shard_slice(vocab, tp.size, tp.rank)] = own[:, -1].float()
        all_reduce(logits, tp)  # each rank has filled in its part, the rest is zeros
        all_reduce(logits, pp)  # one pipeline rank holds the logits, the others hold zeros
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            probabilities = next_token_probabilities(logits, temperature, top_k, top_p).cpu()
            new = torch.multinomial(probabilities, 1, generator=generator).to(tokens)
        if together.size > 1:
            new = new if together.rank == 0 else torch.zeros_like(new)
            all_reduce(new, together)
        tokens = torch.cat((tokens, new), 1)
        if ends:
            ended = [was or end_in(row, ends) > 0 for was, row in zip(ended, tokens[:, prompt:].tolist())]
            if all(ended):
                break
    return tokens


def end_in(tokens: list[int], ends: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest sequence in `ends` that these tokens end with; 0 if they end with none."""
    return max((len(end) for end in ends if end and tokens[-len(end):] == list(end)), default=0)


def next_logits(model: Module, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor | None:
    """Return the logits [B, S, V/t] after tokens that follow those in the cache; None without the last stage.

    owners[i] is the pp rank of stage i. `x` stays here if that is this rank.
    """
    group, owners = model.groups.get("pp", ALONE), model.owners
    x = None
    for stage in model.layers_of_stage:
        if stage and owners[stage - 1] != group.rank:
            x = torch.empty(model.boundary_shape(tokens, sequence=False), dtype=model.execution.dtype,
                            device=tokens.device)
            receive(x, owners[stage - 1], group).wait()
        x = model(tokens, cache=cache, stage=stage, x=x)
        if stage < model.last_stage and owners[stage + 1] != group.rank:
            send(x, owners[stage + 1], group).wait()
    return x if model.last_stage in model.layers_of_stage else None


def continue_prompt(model: Module, codec: Codec, settings: config.Config, groups: Groups, device: torch.device) -> None:
    """Print how the model continues --sample-prompt, or with --sample-chat, how it answers.

    The first rank of the axis "data", with its tp and pp partners, can do this alone, unless ZeRO-3 or expert
    parallelism shards weights over data parallel ranks: then all ranks take part.
    """
    asked = settings.run
    if groups["data"].rank == 0 or settings.grid.zero == 3 or settings.grid.ep > 1:
        prompt = codec.prompt(asked.sample_prompt, asked.sample_chat)
        ends = codec.ends(asked.sample_chat)
        together = groups["data"] if settings.grid.zero == 3 or settings.grid.ep > 1 else ALONE
        tokens = sample(model, torch.tensor([prompt], device=device), asked.sample_tokens, asked.sample_temperature,
                        asked.sample_seed, asked.sample_top_k, asked.sample_top_p, ends, together)[0].tolist()
        if groups["world"].rank == 0:
            if asked.sample_chat:
                begin = len(prompt)
            else:
                begin = 0 if codec.separator is None else 1  # leave out the separator that prompt() puts first
            stop = len(tokens) - end_in(tokens[len(prompt):], ends)
            text = codec.decode(tokens[begin:stop])
            # Control characters would ring the terminal's bell or erase text: print U+FFFD instead.
            print("".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text))


USAGE = ("python -m run.generate CKPT --prompt TEXT [--chat] [--max-tokens N] [--temperature T] [--top-k K] "
         "[--top-p P] [--seed N] [flags of train.py]")


@dataclass
class Flags:
    prompt: str = setting("", "the text to continue")
    chat: bool = setting(False, "answer the prompt, a user's message, by the tokenizer's chat template or ChatML")
    max_tokens: int = setting(240, "the largest number of tokens; it ends earlier where the text or the answer ends")
    temperature: float = setting(0.8, "what logits are divided by; 0: take the likeliest token")
    top_k: int = setting(0, "draw from this many likeliest tokens; 0: from all")
    top_p: float = setting(1.0, "draw from the fewest likeliest tokens whose probabilities sum to at least this")
    seed: int = setting(0, "another seed draws another text")


def flags_of_train(arguments: list[str]) -> tuple[str, list[str]]:
    """Return (CKPT, flags of train.py) for this program's command line. Raises ValueError."""
    if "--prompt" in arguments[:-1]:  # in one word: a prompt may begin with @, which is not @FILE here, or with -
        at = arguments.index("--prompt")
        arguments = [*arguments[:at], f"--prompt={arguments[at + 1]}", *arguments[at + 2:]]
    flags, words = config.read_known(Flags, config.expand(arguments), USAGE)
    need(words != [] and not words[0].startswith("-") and flags.prompt, f"usage: {USAGE}")
    path, *others = words
    found = []
    for name, value in asdict(flags).items():
        ours = "sample_tokens" if name == "max_tokens" else f"sample_{name}"
        problem = config.problem_of(ours, value)
        need(not problem, f"{config.flag(name)} {value}: {problem}")
        if name == "chat":
            found.append("--sample-chat" if value else "--no-sample-chat")
        elif name != "prompt":
            found += [config.flag(ours), str(value)]
    return path, [*found, *others, f"--sample-prompt={flags.prompt}"]


def main(arguments: list[str]) -> None:
    """Replace this process by train.py with --steps 0: it has the grid, the checkpoints and the data."""
    try:
        path, flags = flags_of_train(arguments)
    except ValueError as error:
        print(f"run.generate: {error}", file=sys.stderr)
        sys.exit(2)
    published = os.path.isfile(os.path.join(path, "config.json"))
    # Not the grid that the checkpoint was trained on. The user's flags come later and win.
    default_grid = ("--sites 1 --dp auto --dp-replicate 1 --cp 1 --cp-zigzag sequence --cp-ulysses 1 --tp 1 --sp on "
                    "--pp 1 --schedule 1f1b --virtual-stages auto --ep 1 --zero 0 --recompute none "
                    "--offload none").split()
    batch = ["--batch-ramp", "", "--micro-batch", "1", "--global-batch", os.environ.get("WORLD_SIZE", "1")]
    no_training = ["--steps", "0", "--checkpoint-dir", "", "--save-every", "0", "--rewind", "0",
                   "--metrics", "", "--tensorboard", "", "--wandb", "",
                   "--val-data", "--eval-every", "0",  # --val-data with an empty list
                   "--optimizer", "sgd", "--moments-dtype", "auto"]  # SGD has no moments to load
    train = os.path.join(os.path.dirname(os.path.dirname(__file__)), "train.py")
    os.execv(sys.executable, [sys.executable, train, "--init-from" if published else "--resume", path, *default_grid,
                              *batch, *no_training, *flags])


if __name__ == "__main__":
    main(sys.argv[1:])
