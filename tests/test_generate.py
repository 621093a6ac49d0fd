"""Sampling: which tokens are drawn how often, with a cache and on ranks; where a text ends, how a chat begins.

transformers judges probabilities and chats. Sampling without a cache, in one process, judges the rest.
"""
import itertools
import json
import os

import grids
import numpy as np
import pytest
import torch
from runs import run
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import test_data_chat as chats
from core import rules
from core.collectives import Group
from run import cli, generate, tokenizing
from run.chat import CHATML_MARKERS
from run.data import Corpus
from run.generate import KVCache, end_in, next_token_probabilities, sample
from run.tokenizing import BYTES_SEPARATOR, Codec
from test_model import LATENT, SMALL, architecture, filled
from test_tp import SHAPE

folder = chats.folder  # a fixture


def by_transformers(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """As its `generate` draws with these arguments."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    return LogitsProcessorList(warpers)(None, logits).softmax(-1)


@pytest.mark.parametrize("temperature, top_k, top_p", [*itertools.product(
    (0.3, 0.8, 2.0), (0, 1, 5, 99), (1.0, 0.95, 0.5, 1e-9))])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    logits = 3 * torch.randn(20, 61, dtype=torch.float64)
    found = next_token_probabilities(logits, temperature, top_k, top_p)
    want = by_transformers(logits, temperature, top_k, top_p)
    assert torch.equal(found > 0, want > 0) and (found - want).abs().max() < 1e-12


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    llama, prompt = filled(architecture(SMALL)), torch.zeros(2000, 1, dtype=torch.long)
    with torch.no_grad():
        want = by_transformers(llama(prompt[:1])[:, -1].float(), 0.7, 12, 0.8)[0]
    drawn = sample(llama, prompt, 1, 0.7, 0, 12, 0.8)[:, 1]
    counts = torch.bincount(drawn, minlength=61)
    assert not counts[want == 0].any() and 3 < (want > 0).sum() < 12
    assert ((counts - 2000 * want).abs() <= 5 * (2000 * want * (1 - want)).sqrt()).all()  # five standard deviations


def test_a_text_is_over_when_every_row_has_had_an_end():
    llama = filled(architecture(SMALL))
    prompt = torch.arange(6).view(2, 3)
    whole = sample(llama, prompt, 20)
    one, other = whole[0, 3:].tolist(), whole[1, 3:].tolist()
    ends = [one[4:6], [other[11]]]

    def first(row: list[int]) -> int:
        """How many tokens there are up to the first end."""
        return next(n for n in range(1, 21) if any(row[:n][-len(end):] == end for end in ends))
    last = max(first(one), first(other))
    assert 6 <= last < 20
    assert torch.equal(sample(llama, prompt, 20, ends=ends), whole[:, :3 + last])
    assert end_in([1, 2, 3], [[3], [2, 3], [2]]) == 2 and end_in([1], [[2], [1, 1]]) == 0 == end_in([], [[1], []])
    alone = sample(llama, prompt[:1], 5)
    across = alone[0, 2:4].tolist()  # a prompt's last token and the first that is drawn are no end
    assert torch.equal(sample(llama, prompt[:1], 5, ends=[across]), alone)


def test_samples_follow_the_temperature_and_the_seed():
    llama, prompt = filled(architecture(SMALL)), torch.zeros(400, 1, dtype=torch.long)
    drawn = sample(llama, prompt, 1, temperature=0.5)[:, 1]
    assert torch.equal(drawn, sample(llama, prompt, 1, temperature=0.5)[:, 1])
    assert not torch.equal(drawn, sample(llama, prompt, 1, temperature=0.5, seed=1)[:, 1])
    with torch.no_grad():
        want = (llama(prompt[:1])[0, -1] / 0.5).softmax(-1)
    got = torch.bincount(drawn, minlength=61) / 400
    assert (got - want).abs().max() < 0.1
    longer = sample(llama, prompt[:3], 4)  # by default at 0.8, with one generator for all tokens
    generator, again = torch.Generator().manual_seed(0), prompt[:3]
    with torch.no_grad():
        for _ in range(4):
            shares = (llama(again)[:, -1].float() / 0.8).softmax(-1)
            again = torch.cat((again, torch.multinomial(shares, 1, generator=generator)), 1)
    assert torch.equal(longer, again)


@pytest.mark.parametrize("flags", [SMALL, SMALL + " --qk-norm --qkv-bias --tied", SMALL + " --window 1",
                                   SMALL + " --layers 3 --window 5 --full-attention-every 2 --no-rope-every 3",
                                   SMALL + LATENT, SMALL + LATENT + " --q-lora-rank 0 --window 5"])
def test_sampling_with_the_cache_equals_sampling_without(flags):
    llama = filled(architecture(flags))
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full, cache = llama(tokens), KVCache()
        parts = [llama(part, cache=cache) for part in tokens.split([9, 1, 1, 5, 4], 1)]
        assert (torch.cat(parts, 1) - full).abs().max() < 1e-12
        greedy = tokens
        for _ in range(10):
            greedy = torch.cat((greedy, llama(greedy)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(sample(llama, tokens, 10, temperature=0), greedy)
    windows = [llama.config.window_of(layer) for layer in range(llama.config.layers)]
    assert [len(k[0]) for k, _ in cache.layers.values()] == [window - 1 if window else 20 for window in windows]
    if llama.config.kv_lora_rank:  # what a token has is a latent and one key
        assert all(k.shape[2:] == (1, 14) and v.shape[2:] == (1, 4) for k, v in cache.layers.values())


def sampled(flags: str) -> tuple[torch.Tensor, int]:
    """Text of a model, continued by the likeliest tokens and by drawn ones, and how many tokens its routers counted.

    Weights are four times as large as at first. Then the likeliest first token has a probability of 0.2 to 0.9 at the
    temperature 0.8. With ten times as large ones nearly every draw is the likeliest token.
    """
    settings = rules.parse(f"{SHAPE} --vocab 61 --data {__file__} {flags}".split(), grids.everyone().size)
    _, model, _, optimizer = grids.build(settings)
    for bucket in optimizer.buckets:
        bucket.master.mul_(4)
        bucket.update_weights()
    tokens = torch.stack([sample(model, torch.arange(10).view(2, 5), 4, temperature) for temperature in (0, 0.8)])
    return tokens, sum(router.load.sum().item() for router in model.routers)


def test_stages_of_tensor_parallel_ranks_sample_what_one_rank_does(pool):
    """Then each has all tokens, which are too few to share, whatever it has in training; and experts count none."""
    for more in "", grids.LATENT:
        flags = f"--experts 4 --expert-ffn 24 --shared-experts 1 --dense-layers 1 {more}"
        want, counted = sampled(flags)
        assert len(want[0, :, 5:].unique()) > 2 and not torch.equal(*want) and counted == 0
        for tokens, counted in pool.run(4, sampled, flags=f"{flags} --tp 2 --pp 2 --micro-batch 1"):
            assert torch.equal(tokens, want) and counted == 0


def drawn_by(group_of: str) -> list[int]:
    """A rank whose dice are its own, as after rounding."""
    everyone = grids.everyone()
    together = Group("data", everyone.process_group) if group_of == "all" else generate.ALONE
    llama = filled(architecture(SMALL))
    return sample(llama, torch.zeros(1, 1, dtype=torch.long), 12, seed=everyone.rank, together=together)[0].tolist()


def test_ranks_that_sample_together_have_the_first_ones_tokens(pool):
    alone, other = pool.run(2, drawn_by, group_of="one")
    assert alone != other and pool.run(2, drawn_by, group_of="all") == [alone, alone]


# ---- a chat ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_a_chat_asks_as_transformers_does_and_ends_where_training_taught_it(folder, name):
    template, _ = chats.TEMPLATES[name]
    judge, path = chats.publish(folder, template), str(folder / "tokenizer.json")
    conversation = [dict(role="user", content="2 + 2?"), dict(role="assistant", content="It is 4.")] * 2
    codec = Codec(tokenizing.marks_of(tokenizing.read_tokenizer(path), path).begin,
                  tokenizing.read_tokenizer(path), path)
    want = judge.apply_chat_template(conversation[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    prompt = codec.prompt("2 + 2?", chat=True)
    begins = want[0] == judge.bos_token_id  # as in training: a conversation has one beginning
    assert prompt == (want if begins else [codec.separator, *want])

    (folder / "a.jsonl").write_text(json.dumps(conversation))
    tokenizing.tokenize([str(folder / "a.jsonl")], path, str(folder / "a.bin"))
    corpus = Corpus([str(folder / "a.bin")], 50_000)
    tokens, _, targets = corpus.read(0, len(corpus))
    runs = np.flatnonzero(np.diff(targets, prepend=False, append=False)).reshape(-1, 2)  # the two answers
    assert len(runs) == 2
    for start, stop in runs:
        learned, seen = tokens[start:stop].tolist(), 1
        while seen < len(learned) and not end_in(learned[:seen], codec.ends(chat=True)):
            seen += 1
        length = end_in(learned[:seen], codec.ends(chat=True))
        assert length > 0 and judge.decode(learned[:seen - length]).strip().endswith("It is 4.")


def test_a_chat_whose_template_writes_the_separator_begins_once(folder):
    judge, path = chats.publish(folder, chats.TEMPLATES["llama 2"][0]), str(folder / "tokenizer.json")
    codec = Codec(judge.convert_tokens_to_ids("<s>"), tokenizing.read_tokenizer(path), path)
    want = judge.apply_chat_template([dict(role="user", content="a?")], tokenize=True, add_generation_prompt=True,
                                     return_dict=False)
    assert codec.prompt("a?", chat=True) == want and want[0] == codec.separator != want[1]


def test_a_chat_in_bytes_is_chatml():
    codec, (begin, end) = Codec(BYTES_SEPARATOR), CHATML_MARKERS
    assert codec.prompt("a?", chat=True) == [256, *f"{begin}user\na?{end}\n{begin}assistant\n".encode()]
    assert end_in([*b"4.", *end.encode()], codec.ends(chat=True)) == len(end)
    assert codec.ends(chat=False) == [[256]]


def test_an_answer_is_printed_without_its_question_and_its_end(monkeypatch, capsys):
    monkeypatch.setattr(generate, "sample", lambda model, prompt, *_: torch.cat(
        (prompt, torch.tensor([[*b"It is 4.<|im_end|>"]])), 1))
    settings = cli.parse(["--sample-prompt", "2 + 2?", "--sample-chat"])
    generate.continue_prompt(None, Codec(256), settings, grids.NO_GROUPS, torch.device("cpu"))
    assert capsys.readouterr().out == "It is 4.\n"


# ---- the command, and the sample after training ---------------------------------------------------------------------

def test_flags_become_settings_of_train(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: called.append(arguments[2:]))
    (tmp_path / "more.args").write_text("--temperature 0.5")
    run(f"{SMALL} --vocab 257 --data {cli.__file__} --seq-len 16 --steps 1 --checkpoint-dir {tmp_path}/out "
        "--sample-prompt= --device cpu")
    monkeypatch.chdir(tmp_path)
    generate.main(["out", "--prompt", "--a b", "--chat", "--max-tokens", "7", "--top-k", "3", "--top-p=0.5",
                   "--seed", "4", "@more.args", "--attention", "math"])
    generate.main(["out", "--prompt", "a", "--temperature", "0"])
    given, default = (cli.parse(flags) for flags in called)
    kept = [name for name in vars(given.run) if name.startswith("sample_")]
    assert {name: given.value(name) for name in kept} == dict(
        sample_prompt="--a b", sample_chat=True, sample_tokens=7, sample_temperature=0.5, sample_top_k=3,
        sample_top_p=0.5, sample_seed=4)
    usual = {name: cli.parse([]).value(name) for name in kept}
    assert {name: default.value(name) for name in kept} == usual | dict(sample_prompt="a", sample_temperature=0)
    assert given.precision.attention == "math" and given.optim.seed == default.optim.seed == 0


@pytest.mark.parametrize("flags, says", [
    ("--top-p 2", "--top-p 2.0: must be at most 1"), ("--top-p 0", "--top-p 0.0: must be above 0"),
    ("--top-k -1", "--top-k -1: must be 0 or more"), ("--max-tokens 0", "--max-tokens 0: must be above 0"),
    ("--temperature hot", "--temperature hot: write a number"),
    ("@none.args", "@none.args: there is no file none.args")])
def test_a_wrong_flag_is_one_line(flags, says, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        generate.main(["out", "--prompt", "a", *flags.split()])
    assert capsys.readouterr().err == f"run.generate: {says}\n"


def test_noise_is_not_sampled(tmp_path):
    """Of a model near the loss of guessing, a line says so. Whoever asks for a sample without training gets it."""
    flags = f"{SMALL} --vocab 257 --data {cli.__file__} --seq-len 16 --device cpu --sample-prompt def --dtype fp32"
    begun = run(f"{flags} --steps 1 --checkpoint-dir {tmp_path}/out", samples_noise=False)
    assert "\nno sample: at a loss of 5." in begun and "(guessing has 5.55)" in begun and "\ndef" not in begun
    assert "\ndef" in run(f"{flags} --resume {tmp_path}/out", samples_noise=False)
    (tmp_path / "text").write_text("def f(): " * 50)
    learned = run(f"{flags} --steps 60 --lr 0.01 --warmup 0 --data {tmp_path}/text", samples_noise=False)
    assert "\ndef" in learned
