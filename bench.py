"""Ours beside what one would use instead: the same work in one process, taking turns, so that both see the same machine.

    python bench.py train            a training step of the tiny preset against transformers' Llama and torch's fused AdamW

Every comparison prints medians, their spread and the ratio ours / theirs of the times: below 1 we are faster.
"""
import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import config
import train
from data import MicroBatch


def take_turns(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` for each contender in turn, after three that do not count."""
    seconds = {name: [] for name in contenders}
    for turn in range(rounds + 3):
        for name, work in contenders.items():
            began = time.perf_counter()
            work()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    """One line a contender; ratios are of the first one's median to each other's."""
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        median = statistics.median(times)
        low, high = (sorted(times)[int(len(times) * q)] for q in (0.1, 0.9))
        print(f"{name:28s} {median * 1e3:8.1f} ms  (10-90%: {low * 1e3:.1f}-{high * 1e3:.1f})  "
              f"{tokens / median:10,.0f} tokens/s   ratio {first / median:.2f}")


def bench_train(flags: list[str]) -> None:
    """A whole optimizer step: forward, backward, norm, clip, AdamW with fp32 weights, 1 process, the same tokens."""
    import transformers

    settings = config.parse(flags)
    shape, batch, optim, groups = settings.model, settings.batch, settings.optim, {"world": None, "dp": None}
    model, optimizer = train.build(settings, groups, torch.device("cpu"), torch.float32)
    window = torch.randint(shape.vocab, (batch.global_batch, batch.seq + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()

    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied, attn_implementation="sdpa", use_cache=False)).train()
    matrices, vectors = ([p for p in theirs.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False))
    adamw = torch.optim.AdamW([dict(params=matrices, weight_decay=optim.weight_decay),
                               dict(params=vectors, weight_decay=0.0)], lr=optim.lr, betas=optim.betas, fused=True)

    def our_step() -> None:
        train.gradients(model, optimizer, [MicroBatch(tokens, labels)], groups)
        optimizer.step(optim.lr)

    def their_step() -> None:
        logits = theirs(input_ids=tokens).logits
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip)
        adamw.step()
        adamw.zero_grad()

    print(f"{shape.preset}, {batch.global_batch} x {batch.seq} tokens, fp32, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, transformers {transformers.__version__}")
    report(take_turns({"penteract": our_step, "transformers + fused AdamW": their_step}, rounds=60), tokens.numel())


if __name__ == "__main__":
    benches = {"train": bench_train}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=benches)
    chosen, flags = parser.parse_known_args()
    benches[chosen.what](flags)
