"""Texts become the ids that the tokenizers library makes of the whole text, whatever is set for batches."""
import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from runs import metrics, run
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from watch import is_killed

from run import data, tokenizing
from run.chat import CHATML_MARKERS
from run.data import Corpus
from run.tokenizing import codec_of

ROOT = Path(data.__file__).parent.parent
SOURCE = (ROOT / "train.py").read_text() + "naïve — 你好, 世界! \n\n\n  \t\n" * 40
LIKE_LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")


def trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of a published kind, with <s> as token 0."""
    special, vocab = ["<s>", "<unk>", *CHATML_MARKERS], 700
    if kind == "unigram":
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, trainer = pre_tokenizers.Metaspace(), trainers.UnigramTrainer(
            vocab_size=vocab, special_tokens=special, unk_token="<unk>")
    elif kind == "word pieces":
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=vocab, special_tokens=special)
    elif kind == "llama 2":  # no pre-tokenizer: a text is one word, and what is put before it is so once
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, max_token_length=8)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.train_from_iterator(SOURCE.splitlines(), trainer)
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return tokenizer
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        split = [] if kind == "gpt 2" else [pre_tokenizers.Split(tokenizers.Regex(LIKE_LLAMA_3), "isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=kind == "gpt 2")])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SOURCE.splitlines(keepends=True), trainer)
    return tokenizer


def saved(tokenizer: tokenizers.Tokenizer, folder: Path) -> str:
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def ids_of(path: Path) -> list[int]:
    corpus = Corpus([str(path)], 10_000)
    return corpus.read(0, len(corpus))[0].tolist()


# ---- large texts ----------------------------------------------------------------------------------------------------

TEXTS = {
    "source": SOURCE, "one line": SOURCE.replace("\n", " "), "no spaces": re.sub(r"\s", "", SOURCE),
    "empty lines": SOURCE.replace("\n", "\n\n\n"), "runs": ("=" * 700 + "\n" + " " * 300 + "\n" * 90 + "ab") * 9,
    "other scripts": "你好世界，今天天气很好。" * 400 + "ÄÖü\n" * 200, "crlf": SOURCE.replace("\n", "\r\n"),
    "short": "a", "a line's end": "\n",
}


# The second piece begins inside of a run, out of step with the run's tokens in the first piece.
OUT_OF_STEP = "".join("x" * shift + "-" * 1500 + "\n" for shift in range(1, 12))


@pytest.mark.parametrize("kind", ["gpt 2", "llama 3", "llama 2", "unigram", "word pieces"])
def test_a_run_that_is_longer_than_a_piece_has_the_tokens_of_the_whole(tmp_path, monkeypatch, kind):
    test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, kind, OUT_OF_STEP)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", ["gpt 2", "llama 3", "llama 2", "unigram", "word pieces"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, kind, text):
    """Also where a record holds it. Pieces are small here, so that there are many cuts."""
    monkeypatch.setattr(tokenizing, "PIECE", 600)
    monkeypatch.setattr(tokenizing, "OVERLAP", 128)
    tokenizer, seams = trained_once(kind), []
    find_seam = tokenizing.find_seam
    monkeypatch.setattr(tokenizing, "find_seam", lambda *args: seams.append(find_seam(*args)) or seams[-1])
    path = saved(tokenizer, tmp_path)
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text(json.dumps(dict(text=text)))
    # The file is the judge: its scores may differ from those in memory in the last bit, which decides between equals.
    whole = tokenizers.Tokenizer.from_file(path).encode(text, add_special_tokens=False).ids
    tokenizing.tokenize([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], path, str(tmp_path / "out" / "t.bin"))
    assert ids_of(tmp_path / "out" / "t.bin") == [0, *whole] * 2
    if text is SOURCE:
        assert len(seams) > 20 and seams.count(None) < len(seams) / 10


TRAINED: dict[str, tokenizers.Tokenizer] = {}


def trained_once(kind: str) -> tokenizers.Tokenizer:
    if kind not in TRAINED:
        TRAINED[kind] = trained(kind)
    return TRAINED[kind]


def test_memory_does_not_grow_with_a_text(tmp_path):
    """Ten times the text takes less than ten bytes more for each of its bytes: before, it was 145."""
    path, peaks = saved(trained_once("gpt 2"), tmp_path), []
    script = ("import resource, sys; from run.tokenizing import tokenize; tokenize(*sys.argv[1:]); "
              "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    sizes = 2**19, 5 * 2**20
    for size in sizes:
        (tmp_path / "a.txt").write_text((SOURCE * (size // len(SOURCE) + 1))[:size])
        done = subprocess.run([sys.executable, "-c", f"import sys; sys.argv[1] = [sys.argv[1]]; {script}",
                               tmp_path / "a.txt", path, tmp_path / "out" / "t.bin"], capture_output=True, text=True,
                              cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(ROOT)))
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 10 * (sizes[1] - sizes[0])


# ---- settings for batches -------------------------------------------------------------------------------------------

def test_truncation_and_padding_of_a_tokenizer_json_change_no_id(tmp_path):
    """Of a text, of a conversation, of a prompt."""
    tokenizer = trained_once("gpt 2")
    published = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    published.enable_truncation(6)
    published.enable_padding(length=9, pad_id=1)
    path = saved(published, tmp_path)
    assert len(tokenizers.Tokenizer.from_file(path).encode("import torch, math").ids) == 9
    (tmp_path / "a.txt").write_text(SOURCE)
    (tmp_path / "b.txt").write_text("a")
    (tmp_path / "c.jsonl").write_text(json.dumps(dict(prompt=SOURCE[:500], completion=SOURCE[500:900])))
    chat = f"<|im_start|>user\n{SOURCE[:500]}<|im_end|>\n<|im_start|>assistant\n{SOURCE[500:900]}<|im_end|>\n"
    for name, text in (("a.txt", SOURCE), ("b.txt", "a"), ("c.jsonl", chat)):
        tokenizing.tokenize([str(tmp_path / name)], path, str(tmp_path / "out" / "t.bin"))
        assert ids_of(tmp_path / "out" / "t.bin") == [0, *tokenizer.encode(text).ids]
    codec = codec_of(Corpus([str(tmp_path / "out" / "t.bin")], 10_000), str(tmp_path / "out"))
    for prompt in "a", "import torch, math and more of it":
        assert codec.prompt(prompt) == [0, *tokenizer.encode(prompt).ids]


# ---- a pretrained model and texts -----------------------------------------------------------------------------------

@pytest.fixture
def published(tmp_path) -> Path:
    """A small Llama with a tokenizer, as it could have been downloaded."""
    folder = tmp_path / "published"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=trained_once("gpt 2").get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16)).save_pretrained(folder)
    saved(trained_once("gpt 2"), folder)
    return folder


def written(folder: Path, names: list[str]) -> list[str]:
    """Texts of files of these names, by name."""
    folder.mkdir()
    texts = [SOURCE[900 * i:900 * (i + 1)] for i, _ in enumerate(names)]
    for name, text in zip(names, texts):
        (folder / name).write_text(text)
    return texts


@pytest.mark.parametrize("given", ["a folder", "a file", "two paths with weights", "none"])
def test_a_pretrained_model_reads_texts_by_its_own_tokenizer(published, tmp_path, monkeypatch, capfd, given):
    """The first loss is transformers' of these ids. The tokens are kept for the next run; a sample is of the tokenizer,
    too."""
    folder, tokenizer = tmp_path / "texts", trained_once("gpt 2")
    texts = written(folder, ["a.py", "b.py"])
    paths = {"a folder": [folder], "a file": [folder / "a.py"], "none": [],
             "two paths with weights": [folder / "a.py", folder / "b.py"]}[given]
    monkeypatch.setattr(data, "standard_library", lambda: data.files_in(folder))
    texts = texts[:1] if given == "a file" else texts
    of_texts = [[0, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    streams = of_texts if "weights" in given else [sum(of_texts, [])]
    spans = [stream[at:at + 17] for stream in streams for at in range(0, len(stream) - 16, 16)]
    flags = (f"--init-from {published} --seq-len 16 --checkpoint-dir {tmp_path}/run --metrics {tmp_path}/m --warmup 0 "
             f"--lr 1e-9 --sample-prompt import --data {' '.join(map(str, paths))}")
    if "weights" in given:
        flags += " --data-weights 1,1"
        monkeypatch.setattr(data.Samples, "start", in_order)
    said = run(f"{flags} --global-batch {len(spans)} --steps 1")
    batch = torch.tensor(spans)
    model = transformers.AutoModelForCausalLM.from_pretrained(published)
    want = cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert metrics(tmp_path / "m")[0]["loss"] == pytest.approx(want, rel=1e-5)
    assert re.search("^import", said, re.M)
    assert capfd.readouterr().err.count("later runs find the tokens in") == len(streams)
    made = sorted(tmp_path.glob("run.tokens/*/tokens.bin"))
    assert sorted(ids_of(path) for path in made) == sorted(streams)
    run(f"--resume {tmp_path}/run --steps 2")
    assert "later runs find" not in capfd.readouterr().err and len(metrics(tmp_path / "m")) == 2


def in_order(samples: data.Samples, number: int) -> int:
    """The spans of all sources, one after the other."""
    starts = [source.start + span * samples.seq for source, spans in zip(samples.corpus.sources, samples.spans_of)
              for span in range(spans)]
    return starts[number % len(starts)]


def test_texts_that_change_are_tokenized_anew_and_conversations_have_a_mask(published, tmp_path, monkeypatch, capfd):
    """Without --checkpoint-dir in the user's cache. Whichever rank comes first does it, and says so."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = f"--init-from {published} --seq-len 8 --global-batch 1 --steps 1 --sample-prompt="
    chat = tmp_path / "chat.jsonl"
    for completion in "It is 4.", "It is four.":
        chat.write_text(json.dumps(dict(prompt="2 + 2?", completion=completion)))
        run(f"{flags} --data {chat} --val-data {chat}")
        assert capfd.readouterr().err.count("later runs find the tokens in") == 1
        newest = max(tmp_path.glob("cache/penteract/*/tokens.bin"), key=lambda path: path.stat().st_mtime_ns)
        tokens, _, targets = Corpus([str(newest)], 10_000).read(0, len(Corpus([str(newest)], 10_000)))
        answer = trained_once("gpt 2").decode(tokens[targets].tolist(), skip_special_tokens=False)
        assert answer == f"{completion}<|im_end|>\n"


@pytest.mark.parametrize("before", ["a conversation", "a text", "nothing"])
def test_a_kill_leaves_no_tokens_beside_the_mask_or_the_tokenizer_of_others(tmp_path, before):
    """Or beside a description of others; here only conversations have one. Both files have as many tokens. What is
    opened is what was there or what is written, and the next try writes all of it."""
    tokenizer = saved(trained_once("gpt 2"), tmp_path)

    def write(name: str, out: Path, content: str) -> tuple[list, ...]:
        (tmp_path / name).write_text(content)
        tokenizing.tokenize([str(tmp_path / name)], tokenizer, str(out))
        return read(out)

    def read(out: Path) -> tuple[list, ...]:
        corpus = Corpus([str(out)], 10_000)
        tokens, _, targets = corpus.read(0, len(corpus))
        return tokens.tolist(), targets.tolist(), tokenizing.read_description(out)

    record = dict(prompt="~~~", completion="~")  # a character that no tokens are merged of
    new = write("new.jsonl", tmp_path / "new" / "x.bin", json.dumps(record))
    earlier = {"a conversation": ("old.jsonl", json.dumps(dict(prompt="~", completion="~~~"))),
               "a text": ("old.txt", "~" * (len(new[0]) - 1))}
    for after in count():
        out, old = tmp_path / str(after) / "x.bin", None
        if before != "nothing":
            name, content = earlier[before]
            old = write(name, out, content)
            assert len(old[0]) == len(new[0]) and old[1] != new[1] and (old[2] == {}) == (before == "a text")
        rewrite = partial(tokenizing.tokenize, [str(tmp_path / "new.jsonl")], tokenizer, str(out))
        killed = is_killed(rewrite, out.parent, after)
        with contextlib.suppress(ValueError):  # it cannot be read
            assert read(out) in (old, new)
        assert write("new.jsonl", out, json.dumps(record)) == new
        if not killed:
            break
    assert after >= 6


def test_a_pretrained_model_without_a_tokenizer_reads_bytes_and_says_so(published, tmp_path, capfd):
    (published / "tokenizer.json").unlink()
    written(tmp_path / "texts", ["a"])
    run(f"--init-from {published} --data {tmp_path}/texts --seq-len 8 --global-batch 1 --steps 1 --sample-prompt=")
    assert f"data: {published} has no tokenizer.json, so text is read as bytes" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"])
def test_a_pretrained_model_whose_tokenizer_has_another_form_is_not_fed_with_bytes(published, tmp_path, name):
    (published / "tokenizer.json").rename(published / name)
    written(tmp_path / "texts", ["a"])
    line = f"^{published}: has no tokenizer.json, by which text is read, but {name}: AutoTokenizer.from_pretrained"
    with pytest.raises(ValueError, match=line):
        run(f"--init-from {published} --data {tmp_path}/texts --seq-len 8 --global-batch 1 --steps 1 --sample-prompt=")


def test_kept_tokens_depend_on_all_files_of_the_tokenizer_and_of_the_data(published, tmp_path, monkeypatch):
    """And on the version of the format; they are found in a folder that has become read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("import torch")
    path, made = str(published / "tokenizer.json"), set()

    def tokens() -> Path:
        return tokenizing.tokens_of(data.files_in(tmp_path / "a.txt"), path, "")
    (published / "additional_chat_templates").mkdir()
    for name in ("", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
                 "added_tokens.json", "additional_chat_templates/tool_use.jinja"):
        for content in ("{}", "{ }") if name else ("",):
            if name:
                (published / name).write_text(content)
            made.add(tokens())
    assert len(made) == 1 + 2 * 6
    (published / "model.safetensors").touch()
    with patch.object(Path, "mkdir", side_effect=OSError(30, "Read-only file system")):
        assert tokens() in made
        (tmp_path / "a.txt").write_text("import other")
        with pytest.raises(ValueError, match="Read-only file system$"):
            tokens()
    made.add(tokens())
    newest = tokens()
    newest.unlink()
    (newest.parent / "tmpkilled").mkdir()  # as a process leaves it that is killed
    assert tokens() == newest and not [*newest.parent.glob("tmp*")]
    monkeypatch.setattr(tokenizing, "FORMAT", 0)
    assert tokens() not in made
    monkeypatch.delenv("XDG_CACHE_HOME")
    with patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
        with pytest.raises(ValueError, match="^there is no home folder .*: give --checkpoint-dir, or set XDG_"):
            tokens()
        assert tokenizing.tokens_of(data.files_in(tmp_path / "a.txt"), path, str(tmp_path / "run")).is_file()


def test_kept_tokens_are_of_the_separator_that_is_asked_for(published, tmp_path, monkeypatch):
    """The first run's tokens are not those of the second, which asks for another separator."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("import torch")
    path, first = str(published / "tokenizer.json"), []
    tokenizer = tokenizers.Tokenizer.from_file(path)
    for separator in ("", tokenizer.id_to_token(5), tokenizer.id_to_token(6), ""):
        kept = tokenizing.tokens_of(data.files_in(tmp_path / "a.txt"), path, "", separator)
        first.append(int(Corpus([str(kept)], 10_000).read(0, 1)[0][0]))
    assert first[1:3] == [5, 6] and first[0] == first[3] and first[0] not in (5, 6)


def test_where_there_are_no_locks_the_first_kept_tokens_stay(published, tmp_path, monkeypatch):
    """Each rank makes them there, and one that is done may be reading them. Here the second starts and ends while the
    first is at work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("import torch")
    encoded, seen = tokenizing.encoded, []

    def tokens() -> Path:
        return tokenizing.tokens_of(data.files_in(tmp_path / "a.txt"), str(published / "tokenizer.json"), "")

    def after_the_second(*given) -> Iterator:
        if not seen:
            seen.append("the first")
            seen.append(tokens().stat().st_ino)
        return encoded(*given)
    monkeypatch.setattr(tokenizing, "encoded", after_the_second)
    with patch.object(fcntl, "flock", side_effect=OSError(95, "Operation not supported")):
        kept = tokens()
    assert kept.stat().st_ino == seen[1] and len(ids_of(kept)) > 1
    assert not [*kept.parent.glob("tmp*")] and (kept.parent / "tokenizer.json").is_file()


def test_a_prompt_is_continued_without_tokenizing_all_of_the_default_text(published, tmp_path, monkeypatch):
    """By run/generate.py, which starts a run without steps and without data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "SOME_FILES", 2)
    said = run(f"--init-from {published} --seq-len 8 --global-batch 1 --steps 0 --sample-prompt import")
    made, = tmp_path.glob("cache/penteract/*/tokens.bin")
    files = [file.path for file in data.standard_library()[:2]]
    assert ids_of(made) == [token for file in files for token in (0, *trained_once("gpt 2").encode(
        file.read_text(), add_special_tokens=False).ids)] and re.search("^import", said, re.M)


def test_the_width_of_a_block_of_ids(tmp_path):
    """Ids of 16 bits are written as such, one after the other, behind a header of 24 bytes."""
    path = saved(trained_once("gpt 2"), tmp_path)
    (tmp_path / "a.txt").write_text("import torch")
    tokenizing.tokenize([str(tmp_path / "a.txt")], path, str(tmp_path / "out" / "t.bin"))
    assert np.fromfile(tmp_path / "out" / "t.bin", np.uint16, offset=24).tolist() == [
        0, *trained_once("gpt 2").encode("import torch").ids]
