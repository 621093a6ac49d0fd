"""Samples are a pure function of (seed, number); files that are not what they seem are named."""
import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from runs import run

from core import rules
from run import chat, data, log, texts, token_files, tokenizing
from run.data import Corpus, MicroBatch, Samples, shuffled
from run.token_files import MAGIC, OUR_HEADER
from run.tokenizing import BYTES_SEPARATOR, Codec, codec_of


def llm_c(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], np.int32).tobytes()


def token_file(path, tokens, kind="raw", dtype=np.uint16):
    tokens = np.asarray(tokens, dtype)
    if kind == "npy":
        np.save(path, tokens)
    else:
        header = {"raw": b"", "gpt2": llm_c(20240520, 1, len(tokens)), "llama3": llm_c(20240801, 7, len(tokens)),
                  "ours": ours(len(tokens), tokens.itemsize, separator=7)}[kind]
        path.write_bytes(header + tokens.tobytes())
    return str(path)


def everything(corpus: Corpus) -> tuple[list[int], list[int]]:
    """All tokens, and the places where documents begin."""
    tokens, begins, _ = corpus.read(0, len(corpus))
    return tokens.tolist(), np.flatnonzero(begins).tolist()


# ---- files ----------------------------------------------------------------------------------------------------------

def test_of_a_folder_text_is_read_as_bytes_or_else_token_files_and_nothing_hidden_inside_it(tmp_path):
    """A separator is before every file. The folder itself may be in a hidden one, such as ~/.cache."""
    folder = tmp_path / ".cache" / "corpus"
    for name, text in {"a.txt": "hé", "b/c.py": "x", "b/image": "\0\1", "b/empty": "", ".hidden/d.txt": "x",
                       "__pycache__/e.txt": "x", "b/.f.txt": "x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert everything(Corpus([str(folder)], 257)) == ([256, 104, 195, 169, 256, 120], [0, 4])
    (folder / "tokenizer.json").write_text("{}")
    token_file(folder / "b" / "tokens.bin", [1, 2])
    token_file(folder / ".hidden" / "tokens.npy", [3], "npy")
    corpus = Corpus([str(folder)], 257)
    assert [file.name for file in corpus.files] == ["tokens.bin"] and not corpus.is_text


def test_the_default_text_is_the_standard_library_without_its_tests():
    root = Path(os.__file__).parent
    files = {file.path.relative_to(root) for file in texts.standard_library()}
    assert {Path("os.py"), Path("json/decoder.py")} <= files and all(file.suffix == ".py" for file in files)
    assert not {"test", "tests", "idle_test", "site-packages"} & {part for file in files for part in file.parts}


@pytest.mark.parametrize("kind, dtype, separator", [
    ("raw", np.uint16, None), ("raw", np.uint32, None), ("gpt2", np.uint16, 50256), ("llama3", np.uint32, 128000),
    ("npy", np.uint16, None), ("npy", np.int64, None), ("ours", np.uint16, 7), ("ours", np.uint32, 7)])
def test_token_files_are_mapped_and_not_read(tmp_path, kind, dtype, separator):
    mark = separator or 7
    files = [token_file(tmp_path / f"{i}.{'npy' if kind == 'npy' else 'bin'}", part, kind, dtype)
             for i, part in enumerate(([mark, 1, 2, 3], [4, mark, 5]))]
    corpus = Corpus(files, 128256, dtype.__name__)
    assert everything(corpus) == ([mark, 1, 2, 3, 4, mark, 5], [0, 5] if separator else [0, 4])
    assert everything(Corpus(files, 128256, dtype.__name__, separator=3))[1] == [3]
    assert everything(Corpus([str(tmp_path)], 128256, dtype.__name__)) == everything(corpus)
    assert corpus.read(2, 4)[0].tolist() == [2, 3, 4, mark]  # across files
    assert all(isinstance(array[:1], np.memmap) for array in corpus.arrays)


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def ours(count: int, itemsize: int, magic: bytes = MAGIC, separator: int = 0) -> bytes:
    return np.array([(magic, count, itemsize, separator)], OUR_HEADER).tobytes()


def one_line(begins: str) -> str:
    """A pattern of a line that begins so."""
    return f"^{re.escape(begins)}[^\n]*$"


NO_NPY = "cannot be read as .npy, truncated or of another format"
WRONG = [  # name, content, what must be said of it
    ("empty.txt", b"", "is empty"), ("binary.txt", b"text\0text", "holds zero bytes, so it is not text"),
    ("empty.bin", b"", "is empty"), ("odd.bin", b"abc", "3 bytes are not a whole number of uint16 tokens: truncated"),
    ("empty.npy", b"", NO_NPY), ("cut.npy", npy(np.zeros(400, int))[:200], NO_NPY),
    ("object.npy", npy(np.array([{}] * 400)), NO_NPY), ("none.npy", npy(np.zeros(0, int)), "is empty"),
    ("float.npy", npy(np.zeros(400)), "holds 1 dimensions of float64: need one, of integers"),
    ("square.npy", npy(np.zeros((20, 20), int)), "holds 2 dimensions of int64"),
    ("llm_c_odd.bin", llm_c(20240520, 1, 100) + bytes(199), "its header promises 100 tokens and 99.5 follow: trunc"),
    ("llm_c_long.bin", llm_c(20240520, 1, 4) + bytes(12), "its header promises 4 tokens and 6 follow: not this format"),
    ("llm_c_9.bin", llm_c(20240520, 9, 4) + bytes(8), "version 9 of llm.c's format 20240520 is unknown"),
    ("llm_c_none.bin", llm_c(20240520, 1, 0), "is empty"),
    ("llm_c_header.bin", llm_c(20240520, 1, 400)[:99], "its header promises 400 tokens and 0 follow: truncated"),
    ("ours_header.bin", MAGIC + bytes(16), "its header is damaged"),
    ("ours_cut.bin", ours(400, 2) + bytes(10), "its header promises 400 tokens and 5 follow: truncated")]


@pytest.mark.parametrize("name, content, says", WRONG, ids=[name for name, _, _ in WRONG])
def test_a_wrong_file_is_named_in_one_line(tmp_path, name, content, says):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=one_line(f"{file}: {says}")):
        Corpus([str(file)], 257)


@pytest.mark.parametrize("value, dtype", [(512, np.uint16), (512, np.int16), (-1, np.int16)])
def test_a_token_outside_the_vocabulary_is_found_wherever_it_is(tmp_path, monkeypatch, value, dtype):
    """By one of the ranks that share the corpus, block by block."""
    monkeypatch.setattr(data, "BLOCK", 8)
    good = token_file(tmp_path / "a.npy", [1] * 10, "npy")
    for position in range(20):
        tokens = [511] * position + [value] + [511] * (19 - position)
        corpus = Corpus([good, token_file(tmp_path / "b.npy", tokens, "npy", dtype)], 512)
        for parts in (1, 2, 7):
            assert sorted({corpus.outside(part, parts) for part in range(parts)} | {-1}) == [-1, position + 10]
    with pytest.raises(ValueError, match=rf"b\.npy: token 19 is {value}, outside of 0\.\.511: raise"):
        corpus.refuse(29)


@pytest.mark.parametrize("size, says", [(600, "its tokenizer has 600: --vocab 600, or"), (512, "raise --vocab, or")])
def test_a_token_outside_of_the_vocabulary_is_answered_with_the_size_of_the_tokenizer_beside_it(tmp_path, size, says):
    tokenizer_of(tmp_path / "tokenizer.json", *map(str, range(size)))
    corpus = Corpus([token_file(tmp_path / "a.npy", [1, 512], "npy")], 512)
    with pytest.raises(ValueError, match=f"token 1 is 512, outside of 0..511: {says}"):
        corpus.refuse(1)


def test_what_cannot_be_one_corpus_is_refused(tmp_path, monkeypatch):
    text, tokens, none = tmp_path / "a.txt", token_file(tmp_path / "b.bin", [1, 2]), tmp_path / "none"
    text.write_text("hello")
    none.mkdir()
    other = token_file(tmp_path / "c.bin", [1, 2], "gpt2")
    for paths, vocab, rest, says in (
            ([text, tokens], 300, {}, "text and token files"), ([none], 300, {}, "holds no text"),
            ([text], 256, {}, "--vocab 256 is too small for text: use at least 257"),
            ([text], 300, dict(separator=3), "--separator 3 is for token files"),
            ([tokens, other], 60000, {}, "different tokens: give --separator"),
            ([other], 300, {}, f"^{other}: separates documents by token 50256, outside of 0..299")):
        with pytest.raises(ValueError, match=says):
            Corpus([*map(str, paths)], vocab, **rest)
    with pytest.raises(ValueError, match="holds 6 tokens: fewer than one sample of --seq-len 6"):
        Samples(Corpus([str(text)], 300), 6, 0)
    assert Samples(Corpus([str(text)], 300), 5, 0).micro_batch([0, 1]).labels.tolist() == [[*b"hello"]] * 2
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != none)
    with pytest.raises(ValueError, match=f"^{none}: cannot be read: Permission denied"):
        Corpus([str(tmp_path)], 257)


# ---- samples --------------------------------------------------------------------------------------------------------

def test_another_seed_is_another_order_and_none_that_of_the_files(tmp_path):
    corpus = Corpus([token_file(tmp_path / "a.bin", range(1000))], 1000)
    assert [Samples(corpus, 9, seed=None).start(i) for i in (0, 1, 110, 111)] == [0, 9, 990, 0]
    of_seeds = [[Samples(corpus, 9, seed).start(i) for i in range(111)] for seed in (5, 6)]
    assert of_seeds[0] != of_seeds[1] and sorted(of_seeds[0]) == sorted(of_seeds[1]) == list(range(0, 999, 9))


def test_orders_are_as_random_as_their_keys():
    """Over 2,000 keys each of 16 numbers goes everywhere about equally often, and so do the differences of neighbours:
    125 times, 11 being the standard deviation."""
    keys = [f"{key} 0" for key in range(2000)]
    images = np.array([[shuffled(i, 16, key) for i in range(16)] for key in keys])
    differences = (images[:, 1:] - images[:, :-1]) % 16
    for column in images.T:
        assert (abs(np.bincount(column, minlength=16) - 125) < 6 * 11).all()
    for column in differences.T:
        assert (abs(np.bincount(column, minlength=16)[1:] - 2000 / 15) < 6 * 11).all()


def test_data_are_known_by_lengths_of_files_and_by_tokens_from_the_first_to_the_last(tmp_path):
    """And by what else the samples depend on."""
    tokens, at, seen = np.zeros(200_000), np.arange(200_000), set()
    splits = [[tokens], [tokens[:7], tokens[7:]], [tokens[:8], tokens[8:]]]
    splits += [[abs(at - place) < 2500] for place in (0, 100_000, 199_999)]  # 64 blocks of 1,024 are spread over them
    for i, parts in enumerate(splits):
        files = [token_file(tmp_path / f"{i}-{j}.bin", part) for j, part in enumerate(parts)]
        known = Samples(Corpus(files, 9), 8, 0).identity()
        seen.add(known["hash"])
    assert len(seen) == len(splits) and known == Samples(Corpus(files, 10), 8, 0).identity()
    for changed in dict(seq=9), dict(seed=1), dict(seed=None), {}:
        samples = Samples(Corpus(files, 9, separator=3), **dict(seq=8, seed=0) | changed)
        assert samples.identity() == known | dict(separator=3) | changed


def test_what_stays_on_the_host_are_documents_for_context_parallel_ranks():
    for copied, place in (True, "meta"), (False, "cpu"):
        there = MicroBatch(*[torch.zeros(1, 2)] * 6).to(torch.device("meta"), documents=copied)
        assert [x.device.type for x in there] == ["meta" if x is not there.documents else place for x in there]


def test_ranks_share_a_step_and_the_stream_does_not_know_how_many_there_are(tmp_path):
    """The same samples in the same step for any dp and micro-batch, also through a batch ramp."""
    files = [token_file(tmp_path / f"{first}.bin", range(first, last)) for first, last in ((0, 700), (700, 1000))]
    samples = Samples(Corpus(files, 1000, weights=(3, 1)), 9, seed=5)
    for first, sequences in ((0, 24), (24, 24), (48, 48)):
        want = [samples.start(number) for number in range(first, first + sequences)]
        for dp, micro in ((1, 24), (1, 4), (2, 12), (2, 3), (3, 4), (4, 2), (8, 3), (8, 1)):
            read = [samples.step(first, sequences, micro, rank, dp) for rank in range(dp)]
            assert len({len(micro_batches) for micro_batches in read}) == 1
            in_turn = [batch.tokens[:, 0].tolist() for micro_batches in zip(*read) for batch in micro_batches]
            assert sum(in_turn, []) == want


def test_documents_and_positions_begin_anew_at_every_separator(tmp_path):
    file = token_file(tmp_path / "a.bin", [9, 1, 2, 9, 3, 9, 9, 4, 5, 6, 7])
    for separator, documents, positions in (
            (9, [[1, 1, 1, 2, 2], [1, 2, 2, 2, 2]], [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]),
            (3, [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]])):
        batch = Samples(Corpus([file], 10, separator=separator), 5, None, mask_documents=True).micro_batch([0, 1])
        assert batch.documents.tolist() == documents and batch.positions.tolist() == positions
    assert batch.documents.dtype == torch.int32  # as flash.py reads them: no layer converts them


def test_validation_data_are_of_the_kind_of_the_training_data_and_read_end_to_end_whatever_its_weights(tmp_path):
    low, high = (token_file(tmp_path / f"{first}.bin", range(first, first + 40)) for first in (0, 100))
    flags = "--vocab 300 --seq-len 8 --global-batch 2 --data"
    for given, validated in (__file__, low), (low, __file__):
        with pytest.raises(ValueError, match="^--val-data: is text and --data token files, or the other way round"):
            run(f"{flags} {given} --val-data {validated}")
    settings = rules.parse(f"{flags} {low} {high} --data-weights 3,1 --val-data {high} {low}".split())
    samples = data.open_samples(settings, settings.data.val_data, None)
    assert samples.micro_batch([*range(9)]).tokens.flatten().tolist() == [*range(100, 140), *range(40)][:9 * 8]


@pytest.mark.parametrize("trained, validated, shared", [
    ("train", "train", ["train/a.txt", "train/b.txt"]), ("train", "train/b.txt", ["train/b.txt"]),
    ("train/a.txt", "linked", ["train/a.txt"]), ("train/a.txt", "train/b.txt", []), ("train", "unseen", [])])
def test_files_that_are_for_training_and_for_validation_are_named(tmp_path, trained, validated, shared):
    (tmp_path / "train").mkdir()
    for name in "train/a.txt", "train/b.txt", "unseen":
        (tmp_path / name).write_text("text" * 9)
    (tmp_path / "linked").symlink_to(tmp_path / "train" / "a.txt")
    printed = run(f"--layers 1 --hidden 32 --ffn 32 --seq-len 8 --global-batch 1 --steps 1 --sample-prompt= "
                  f"--data {tmp_path / trained} --val-data {tmp_path / validated}")
    said = [line for line in printed.splitlines() if "both read" in line]
    names = ", ".join(str(tmp_path / name) for name in shared)
    assert said == ([f"data: --val-data and --data both read {names}: the validation loss is not of unseen text"]
                    if shared else [])


@pytest.mark.parametrize("flags, steps, says", [
    ("", 5, ""), ("", 6, ", read 1.2 times"), ("", 50, ", read 10 times"),
    ("--data-weights 3,1", 10, ", read 2.5 and 1.25 times"), ("--data-weights 1,9", 1, "")])
def test_a_run_says_how_often_it_reads_its_samples_if_more_than_once(tmp_path, flags, steps, says):
    """As often as their numbers occur in all steps."""
    files = [token_file(tmp_path / f"{i}.bin", [0] * (8 * size + 1)) for i, size in enumerate((6, 4))]
    asked = f"--vocab 300 --seq-len 8 --global-batch 2 --steps {steps} {flags} --dtype fp32 --data".split()
    settings = rules.parse(asked + files)
    samples = data.open_samples(settings, files, 0)
    read = Counter(samples.start(number) for number in range(2 * steps))
    assert says == log.first_lines(settings, {}, "cpu", samples=samples).partition("samples of 8")[2]
    sources = samples.corpus.sources
    times = [sum(read[start] for start in range(source.start, source.stop)) / ((source.stop - source.start) // 8)
             for source in sources]
    if says:
        said = [float(number) for number in re.findall(r"[\d.]+", says)]
        assert said == pytest.approx(times, abs=0.26 if flags else 1e-9)  # of a mixture to one sample
    else:
        assert max(times) <= 1


# ---- masks and mixtures ---------------------------------------------------------------------------------------------

def masked_file(path, tokens, mask, *args) -> str:
    np.asarray(mask, np.uint8).tofile(path.with_suffix(".mask"))
    return token_file(path, tokens, *args)


def test_a_token_with_a_mask_of_0_is_read_and_is_no_label(tmp_path):
    """Of the token that is predicted, not of the one that it is predicted from; also across files."""
    files = [masked_file(tmp_path / "a.bin", range(10, 17), [1, 0, 0, 1, 1, 0, 0]),
             masked_file(tmp_path / "b.npy", range(17, 23), [1, 1, 0, 1, 0, 0], "npy")]
    for mask_documents in (False, True):
        samples = Samples(Corpus(files, 30), 4, None, mask_documents)
        batch = samples.micro_batch([0, 1, 2])
        assert batch.tokens.flatten().tolist() == list(range(10, 22))
        assert batch.labels.tolist() == [[-100, -100, 13, 14], [-100, -100, 17, 18], [-100, 20, -100, -100]]
    assert all(isinstance(mask[:1], np.memmap) for mask in samples.corpus.masks)
    assert samples.step(0, 4, 2, 0, 2, end=1)[0].labels.tolist() == [[-100, -100, 13, 14], [-100] * 4]


@pytest.mark.parametrize("mask, says", [
    (np.ones(9, np.uint8), "a.mask: has 9 bytes for the 10 tokens of a.bin: need uint8, one for each"),
    (np.ones(10, np.int64), "a.mask: has 80 bytes for the 10 tokens"), (np.ones(0), "a.mask: has 0 bytes for the 10"),
    (None, "a.mask: is missing: {folder}/a.bin was written with a mask beside it")])
def test_a_mask_of_another_length_or_kind_or_none_is_named_in_one_line(tmp_path, mask, says):
    (tmp_path / "a.bin").write_bytes(ours(10, 2, token_files.MAGIC_MASKED) + bytes(20))
    if mask is not None:
        mask.tofile(tmp_path / "a.mask")
    with pytest.raises(ValueError, match=one_line(f"{tmp_path}/{says.format(folder=tmp_path)}")):
        Corpus([str(tmp_path / "a.bin")], 30)


def test_a_source_without_a_target_is_refused(tmp_path):
    files = [masked_file(tmp_path / f"{name}.bin", range(9), [name == "b"] * 9) for name in "abc"]
    cases = (files[:1], (), "the data"), (files[:2], (1, 1), files[0]), (files[1:], (1, 1), files[2])
    for paths, weights, says in cases:
        with pytest.raises(ValueError, match=rf"^[^\n]+/[ac].mask: makes none of the tokens of {says} a target: noth"):
            Corpus(paths, 30, weights=weights)
    bare = token_file(tmp_path / "bare.bin", range(5))
    assert Corpus([*files, bare], 30).read(0, 32)[2].sum() == 9 + 5  # four files of one source


@pytest.mark.parametrize("weights", [(1,), (3, 1), (1, 3), (1, 1, 1), (5, 3, 2), (7, 2, 2, 1), (97, 1, 1, 1),
                                     (6, 10, 15), tuple(range(1, 14)), (999, 1), (334, 333, 333)], ids=str)
def test_each_prefix_has_the_weights_to_one_sample_and_each_source_epochs_of_its_own(tmp_path, weights):
    """Also of two sources of one size the orders differ; the first has that which it has alone."""
    sizes = [7, *range(7, 6 + len(weights))]  # samples of each source
    files = [token_file(tmp_path / f"{i}.bin", [0] * (3 * size + 2)) for i, size in enumerate(sizes)]
    samples, total = Samples(Corpus(files, 30, weights=weights), 3, seed=5), sum(weights)
    read, places = [[] for _ in weights], samples.corpus.starts
    for n in range(1, 2 * total + 25):
        start = samples.start(n - 1)
        source = int(np.searchsorted(places, start, "right")) - 1
        read[source].append((start - places[source]) / 3)
        assert all(abs(len(of_source) * total - n * weight) < total for of_source, weight in zip(read, weights))
    for size, of_source in zip(sizes, read):
        epochs = [of_source[first:first + size] for first in range(0, len(of_source) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({*map(tuple, epochs[:3])}) == len(epochs[:3])
    alone = Samples(Corpus(files[:1], 30), 3, seed=5)
    assert read[0] == [alone.start(i) / 3 for i in range(len(read[0]))]
    assert len(read) == 1 or read[0][:7] != read[1][:7]


def test_masks_and_weights_are_part_of_what_data_are_known_by(tmp_path):
    paths, mask = [str(tmp_path / name) for name in ("ab", "c")], [1, 0] * 10
    files = [f"{paths[0]}/a.bin", f"{paths[0]}/b.bin", f"{paths[1]}/c.bin"]
    for file in map(Path, files):
        file.parent.mkdir(exist_ok=True)
        masked_file(file, range(20), mask)
    kinds = [(files, ()), (paths, (3, 1)), (paths, (1, 3)), ([files[0], paths[0]], (3, 1)), (files, (3, 1, 1))]
    known = [Samples(Corpus(given, 30, weights=weights), 4, 0).identity() for given, weights in kinds]
    assert [identity["sources"] for identity in known] == [[], [[40, 3], [20, 1]], [[40, 1], [20, 3]],
                                                           [[20, 3], [40, 1]], [[20, 3], [20, 1], [20, 1]]]
    assert Samples(Corpus(paths, 30), 4, 0).identity() == known[0]
    np.array([*mask[:-1], 1], np.uint8).tofile(tmp_path / "c" / "c.mask")
    assert Samples(Corpus(paths, 30), 4, 0).identity()["hash"] != known[0]["hash"]
    with pytest.raises(ValueError, match=rf"^{files[2]} holds 20 tokens: fewer than one sample of --seq-len 30 \+ 1"):
        Samples(Corpus([paths[0], files[2]], 30, weights=(1, 1)), 30, 0)


# ---- text to tokens and back ----------------------------------------------------------------------------------------

def tokenizer_of(path, *words: str) -> str:
    """A tokenizer whose tokens are these words, from 0 on, which puts [CLS] before a text if it is allowed to."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, words[-1]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("count, dtype", [(140, np.uint16), (2**16 + 1, np.uint32)])
def test_text_of_many_files_becomes_tokens_of_two_or_four_bytes(tmp_path, count, dtype):
    """130 files, a separator of number 0 before each, and nothing else that the texts have not."""
    words = ["<s>", "[CLS]", *(f"w{i}" for i in range(2, count))]
    path, out = tokenizer_of(tmp_path / "tokenizer.json", *words), tmp_path / "corpus" / "tokens.bin"
    (tmp_path / "texts").mkdir()
    for i in range(130):
        (tmp_path / "texts" / f"{i:03d}").write_text(f"w{count - 1 - i} w{i + 2}\n")
    wanted = [token for i in range(130) for token in (0, count - 1 - i, i + 2)]
    assert tokenizing.tokenize([str(tmp_path / "texts")], path, str(out)) == (3 * 130, 3 * 130)
    corpus = Corpus([str(out)], count)
    assert everything(corpus) == (wanted, list(range(0, 390, 3))) and corpus.arrays[0].dtype == dtype
    beside = sorted(path.name for path in out.parent.iterdir())
    assert beside == ["tokenizer.json", "tokenizer_config.json", "tokens.bin"]
    assert json.loads((out.parent / "tokenizer_config.json").read_text()) == dict(bos_token="<s>", eos_token="<s>")
    codec = codec_of(corpus, str(out.parent))
    assert codec.separator == 0 and codec.encode("w9 w7") == [9, 7] and codec.decode([9, 7]) == "w9 w7"


@pytest.mark.parametrize("name, other, is_read", [
    ("tokenizer.json", "mine.json", True), ("mine.json", "", True), ("mine.json", "tokenizer.json", False)])
def test_what_is_published_with_a_tokenizer_is_read_and_copied_and_else_says_how_documents_begin_and_end(
        tmp_path, capsys, name, other, is_read):
    """Files beside tokenizer.json belong to it, and not to a tokenizer of another name."""
    given, text = tmp_path / "given", tmp_path / "text"
    text.write_text("w4")
    published = {"tokenizer_config.json": '{"bos_token": "[CLS]", "eos_token": "w3"}', "chat_template.jinja": "x",
                 "additional_chat_templates/tool_use.jinja": "y", "README.md": "not read"}
    for beside in ({}, published):
        (given / "additional_chat_templates").mkdir(parents=True, exist_ok=True)
        path, out = tokenizer_of(given / name, "<s>", "[CLS]", "</s>", "w3", "w4"), tmp_path / f"out-{len(beside)}"
        for file, content in beside.items():
            (given / file).write_text(content)
        if other:
            tokenizer_of(given / other, "w4", "w3")
        for _ in range(2):
            tokenizing.tokenize([str(text)], path, str(out / "tokens.bin"))
            there = {str(file.relative_to(out)): file.read_text() for file in out.rglob("*")
                     if file.is_file() and file.suffix not in (".bin", ".about")}
            assert there.pop("tokenizer.json") == Path(path).read_text()
            if is_read and beside:
                assert there == {file: content for file, content in published.items() if file != "README.md"}
            else:
                assert list(there) == ["tokenizer_config.json"]
                assert json.loads(there["tokenizer_config.json"]) == dict(bos_token="<s>", eos_token="</s>")
            assert everything(Corpus([str(out)], 9))[0] == ([1, 4, 3] if is_read and beside else [0, 4, 2])
        said = f"data: {path}: is read without the files beside it, which belong to {given}/tokenizer.json"
        assert (said in capsys.readouterr().err) == (not is_read)
    if is_read:  # a copy beside it is the same tokenizer
        tokenizing.tokenize([str(text)], path, str(given / "tokens.bin"))
        tokenizing.tokenize([str(text)], path, str(given / "tokens.bin"))
        assert everything(Corpus([str(given)], 9))[0] == [1, 4, 3]


@pytest.mark.parametrize("names, begin, end", [
    (["[SEP]", "</s>", "<s>"], "<s>", "</s>"), (["<|end_of_text|>", "<|begin_of_text|>"], "<|begin_of_text|>",
                                                "<|end_of_text|>"),
    (["<|endoftext|>", "<s>"], "<|endoftext|>", ""), (["[PAD]", "[SEP]"], "[SEP]", ""), (["</s>"], "</s>", ""),
    (["<s>", "a"], "<s>", ""), (["<eos>", "<bos>"], "<bos>", "<eos>"), (["x", "<bos>"], "<bos>", "")])
def test_a_document_begins_and_ends_as_published_tokenizers_have_it(tmp_path, names, begin, end):
    """As Llama 2, Llama 3, GPT-2, BERT, T5 and Gemma do, of the tokens that they have. An end of its own is learned."""
    path, text, out = tokenizer_of(tmp_path / "tokenizer.json", *names, "?"), tmp_path / "text", tmp_path / "out.bin"
    settings = dict(bos_token="<bos>", eos_token=dict(content="<eos>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text.write_text("a!")
    tokenizing.tokenize([str(text)], path, str(out))
    tokens, _, targets = Corpus([str(out)], 9).read(0, len(Corpus([str(out)], 9)))
    assert tokens.tolist() == [names.index(begin), len(names), *([names.index(end)] if end else [])] and targets.all()
    tokenizing.tokenize([str(text)], path, str(out), separator="?")  # a second time, by name
    assert Corpus([str(out)], 9).separator == len(names)


@pytest.mark.parametrize("names, published, first", [
    (["<pad>", "<eos>", "<bos>", "<s>", "</s>"], ("<bos>", "<eos>"), "<bos>"),
    (["<|begin_of_text|>", "<|end_of_text|>", "<bos>", "<eos>"], ("<bos>", "<eos>"), "<bos>"),
    (["<s>", "</s>", "<|endoftext|>"], ("<s>", "</s>"), "<s>"),
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ("<|im_start|>", "<|im_end|>"), "")])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_document_begins_with_what_the_tokenizer_puts_before_texts(tmp_path, names, published, first, file):
    """As Gemma's, whose <s> is HTML's, DeepSeek's distilled Llama, Phi, and SmolLM, which puts nothing before it. The
    judge is the tokenizers library; the published end follows."""
    words = {name: i for i, name in enumerate([*names, "a"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if first:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            f"{first} $A", special_tokens=[(first, names.index(first))])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(json.dumps(dict(zip(("bos_token", "eos_token"), published))))
    (tmp_path / "text").write_text("a a")
    tokenizing.tokenize([str(tmp_path / "text")], str(tmp_path / "tokenizer.json"), str(tmp_path / "out.bin"))
    wanted = tokenizer.encode("a a").ids
    wanted = [*wanted, names.index(published[1])] if first else [names.index("<|endoftext|>"), *wanted]
    assert everything(Corpus([str(tmp_path / "out.bin")], 9)) == (wanted, [0])


def test_what_a_tokenizer_cannot_read_is_counted_or_refused(tmp_path, capsys):
    path, text = tokenizer_of(tmp_path / "tokenizer.json", "<s>", "?", "a"), tmp_path / "text"
    text.write_text("a b c a d")
    for unknown, says in (("?", f"data: 3 of 6 tokens are ?: {path} has no tokens for what is written there\n"),
                          (None, "the tokenizer cannot read the text: WordLevel error: Missing [UNK]")):
        tokenizer = tokenizers.Tokenizer.from_file(path)
        tokenizer.model = tokenizers.models.WordLevel({"<s>": 0, "?": 1, "a": 2}, *([unknown] if unknown else []))
        tokenizer.save(path)
        if unknown:
            tokenizing.tokenize([str(text)], path, str(tmp_path / "out.bin"))
            assert says in capsys.readouterr().err
        else:
            with pytest.raises(ValueError, match=one_line(says)):
                tokenizing.tokenize([str(text)], path, str(tmp_path / "out.bin"))


@pytest.mark.parametrize("model, is_named", [
    (tokenizers.models.BPE({"<s>": 0, "a": 1}, []), True), (tokenizers.models.BPE({"<s>": 0, "?": 1, "a": 2}, [],
                                                                                  unk_token="?"), False),
    (tokenizers.models.WordLevel({"<s>": 0, "a": 1}), False)])
def test_a_tokenizer_that_leaves_characters_out_is_named(tmp_path, capsys, model, is_named):
    """The tokenizers library says nothing of it: the judge are its tokens of a letter that is not in the vocabulary."""
    path, tokenizer = tmp_path / "tokenizer.json", tokenizers.Tokenizer(model)
    tokenizer.save(str(path))
    if is_named:
        assert tokenizer.encode("aüa").ids == [1, 1]
    (tmp_path / "text").write_text("a")
    tokenizing.tokenize([str(tmp_path / "text")], str(tmp_path), str(tmp_path / "out.bin"))  # by its folder
    said = f"data: {path}: has no token for characters outside of its alphabet, so they are left out of all texts\n"
    assert (said in capsys.readouterr().err) == is_named


def test_what_cannot_be_tokenized_is_refused_and_leaves_nothing(tmp_path):
    path, other = (tokenizer_of(tmp_path / name, *words) for name, words in (
        ("tokenizer.json", ["<s>", "?", *chat.CHATML_MARKERS]), ("other.json", ["a", "?"])))
    good, bad, asked, out = (tmp_path / name for name in ("good.txt", "bad.txt", "asked.jsonl", "out/tokens.bin"))
    good.write_text("a")
    bad.write_bytes(b"ab\xff\xfe")
    pointer, model, none = tmp_path / "pointer.json", tmp_path / "tokenizer.model", tmp_path / "none.jsonl"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    model.write_bytes(b"\n\x0e\n\x05<unk>")  # of sentencepiece
    none.write_text('{"text": ""}\n')
    asked.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    (empty := tmp_path / "empty").mkdir()
    for arguments, says in (
            (([str(good), str(bad)], path, str(out)), f"{bad}: is no UTF-8 text (invalid start byte at byte 2)"),
            (([str(asked)], path, str(out)), f"{asked}: no conversation has a message of the role assistant"),
            (([str(good)], str(good), str(out)), f"{good}: is no tokenizer.json: "),
            (([str(good)], str(empty), str(out)), f"{empty}/tokenizer.json: there is no such file"),
            (([str(good)], str(pointer), str(out)), f"{pointer}: is a pointer of Git LFS"),
            (([str(good)], str(model), str(out)), f"{model}: is no tokenizer.json: expected value at line 2 column "
                                                    "1; AutoTokenizer.from_pretrained("),
            (([str(none)], path, str(out)), f"{none}: holds no text"),
            (([str(good)], other, str(out)), f"{other}: has none of <|endoftext|>, "),
            (([str(good)], path, str(out), "<sep>"), f"{path}: has none of <sep>: "),
            (([str(good)], path, str(out.with_suffix(".npy"))), f"--out {out.with_suffix('.npy')}: its name must end "),
            (([str(good)], other, str(tmp_path / "t.bin"), "a"), f"{path}: is another tokenizer: use another folder")):
        with pytest.raises(ValueError, match=one_line(says)):
            tokenizing.tokenize(*arguments)
    assert not list(out.parent.glob("*")) and not (tmp_path / "t.bin").exists()
    (tmp_path / "t.bin").touch()
    with (patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")),
          pytest.raises(ValueError, match=f"^{tmp_path}/t.bin: No space left on device$")):
        tokenizing.tokenize([str(good)], path, str(tmp_path / "t.bin"))
    assert (tmp_path / "t.bin").read_bytes() == b"" and not [*tmp_path.glob("tmp*")]


def test_a_prompt_of_which_nothing_stays_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_of(tmp_path / "tokenizer.json", "b", "a", "?"))
    assert Codec(7, tokenizer).prompt("a") == [7, 1] and Codec(None, tokenizer).prompt("a") == [1]
    with pytest.raises(ValueError, match="^--sample-prompt ' ': the tokenizer has no token for it$"):
        Codec(None, tokenizer).prompt(" ")
    tokenizer.model = tokenizers.models.WordLevel({"a": 1})  # which has no token for other words
    with pytest.raises(ValueError, match="^--sample-prompt 'b': the tokenizer cannot read it: .* Missing .UNK."):
        Codec(None, tokenizer).prompt("b")


@pytest.mark.parametrize("name", ["checkpoint-dir", "metrics", "export-hf", "tensorboard", "profile",
                                  "memory-snapshot"])
def test_what_a_run_writes_is_not_in_its_folder_of_text(tmp_path, name):
    """It would be text of the resumed run. Of folders with token files these alone are read, hidden files never."""
    (tmp_path / "a.txt").write_text("text" * 99)

    def opened(where: str) -> Samples:
        settings = rules.parse([f"--{name}", f"{tmp_path}/{where}", "--seq-len", "8"])
        return data.open_samples(settings, [str(tmp_path)], 0)
    for where in "sub/x", "":
        with pytest.raises(ValueError, match=f"^--{name} {tmp_path / where}: is in {tmp_path}, whose text it would ch"):
            opened(where)
    assert opened(".x").spans
    token_file(tmp_path / "tokens.bin", [1] * 99)
    assert opened("sub/x").spans


TURNS = [dict(role="system", content="Be brief."), dict(role="user", content="2 + 2?"),
         dict(role="assistant", content="It is 4."), dict(role="user", content="naïve — 你?"),
         dict(role="assistant", content="Café 你好.\nYes.")]
# As published models have them, with the keyword by which transformers finds what an assistant writes.
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[assistant]{% generation %}"
            "{{ m.content }}[end]{% endgeneration %}{% else %}[{{ m.role }}]{{ m.content }}[end]{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


@pytest.fixture
def tokenized(tmp_path):
    """A function that tokenizes lines and returns tokens and mask, by bytes; number 0 is the separator."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(["It is 4. Yes. assistant user"], tokenizers.trainers.BpeTrainer(
        vocab_size=282, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    path, lines, out = (str(tmp_path / name) for name in ("tokenizer.json", "chat.jsonl", "tokens.bin"))
    tokenizer.save(path)

    def tokenized(*records) -> tuple[list[int], list[bool]]:
        Path(lines).write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
        count, _ = tokenizing.tokenize([lines], path, out)
        tokens, _, targets = Corpus([out], 300).read(0, count)
        return tokens.tolist(), targets.tolist()
    return tokenized


def test_of_conversations_what_an_assistant_says_are_the_targets(tokenized, tmp_path):
    """A prompt and its completion are two messages. Without a template beside the tokenizer the text is ChatML."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    answer = "It\u2028is 4."  # what Unicode calls a line's end, within a line of JSON
    tokens, targets = tokenized(dict(messages=TURNS), json.dumps(dict(prompt="2 + 2?", completion=answer),
                                                                 ensure_ascii=False))
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TURNS)
    question = f"<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"<|endoftext|>{turns}<|endoftext|>{question}"
    learned = tokenizer.decode([token for token, is_target in zip(tokens, targets) if is_target],
                               skip_special_tokens=False)
    assert learned == f"It is 4.<|im_end|>\nCafé 你好.\nYes.<|im_end|>\n{answer}<|im_end|>\n"
    assert sum(one != other for one, other in zip(targets, targets[1:])) == 5  # three runs of them, up to the end


@pytest.mark.parametrize("lacking", [["<|im_start|>"], ["<|im_end|>"], ["<|im_start|>", "<|im_end|>"]])
def test_without_a_template_a_tokenizer_that_lacks_chatmls_markers_is_refused(tokenized, tmp_path, lacking):
    """It would make text of them, in pieces. A template needs none."""
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in lacking]
    for marker in lacking:
        content["model"]["vocab"][f"<{marker}>"] = content["model"]["vocab"].pop(marker)
    path.write_text(json.dumps(content))
    assert all(len(tokenizers.Tokenizer.from_file(str(path)).encode(marker).ids) > 4 for marker in lacking)
    line = f"{path}: has no token {' and no token '.join(lacking)}, and no chat template lies beside it: put"
    with pytest.raises(ValueError, match=one_line(line)):
        tokenized(dict(messages=TURNS))
    assert not list(tmp_path.glob("tokens*"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
                                                  "{% if add_generation_prompt %}assistant {% endif %}")
    tokens, targets = tokenized(dict(messages=TURNS))
    assert 0 < sum(targets) < len(tokens)


def test_a_published_chat_template_is_used_and_its_targets_are_those_of_transformers(tokenized, tmp_path):
    """And the token that begins a text is not written twice."""
    settings = dict(chat_template=TEMPLATE, bos_token="<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    want = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenized(dict(messages=TURNS)) == (want["input_ids"], [value == 1 for value in want["assistant_masks"]])
    assert want["input_ids"][0] == 0 and sum(want["assistant_masks"]) > 20


KEYS = "its keys are {}: want text; messages; conversations; prompt and completion; or instruction and output"


@pytest.mark.parametrize("record, says", [
    ("{", "is not valid JSON: Expecting property name"), ("[1]", "is no record: want a JSON object"),
    ("7", "is no record: "),
    ("[" * 99_999, "is not valid JSON: "), (dict(question="a", answer="b"), KEYS.format("question, answer")),
    (dict(prompt="a", chosen="b", rejected="c"), KEYS.format("prompt, chosen, rejected")), ({}, KEYS.format("none")),
    (dict(messages=[]), "messages must be a list of messages"), (dict(messages="hello"), "Expecting value"),
    (dict(messages=[dict(role="user")]), "a message of the role user must have a content, which must be text"),
    (dict(messages=[dict(role="user", content=3)]), "a message of the role user must have a content"),
    (dict(messages=[dict(role=3, content="a")]), "a role must be text"), (dict(text=3), "text must be text"),
    (dict(messages=[dict(role="alien", content="a")]), "the role alien is unknown: want one of system, "),
    (dict(messages=[dict(role="user", content=[dict(type="image")])]), "a part of a content is no text: images"),
    (dict(prompt="a", completion=["b"]), "a part of a content is no text"),
    (dict(text="\ud800"), "'utf-8' codec can't encode"),
    (dict(prompt="\ud800", completion="b"), "'utf-8' codec can't encode")])
def test_what_is_no_record_is_named_by_its_line_and_nothing_is_written(tokenized, tmp_path, record, says):
    tokenized(dict(messages=TURNS))
    before = {file: file.read_bytes() for file in tmp_path.glob("tok*")}
    with pytest.raises(ValueError, match=one_line(f"{tmp_path}/chat.jsonl: line 2: {says}")):
        tokenized(dict(messages=TURNS), record)
    assert {file: file.read_bytes() for file in tmp_path.glob("t*")} == before


def test_a_damaged_template_is_named(tokenized, tmp_path):
    for content, says in (("{", "tokenizer_config.json: is not valid JSON"),
                          ('{"added_tokens_decoder": 3}', "tokenizer.json: its chat template cannot be read")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=f"^{tmp_path}/{says}: [^\n]+$"):
            tokenized(dict(messages=TURNS))


def test_text_that_replaces_conversations_takes_their_mask_away_and_may_stand_beside_them(tokenized, tmp_path):
    chat, text, path, out = (str(tmp_path / name) for name in ("chat.jsonl", "text", "tokenizer.json", "tokens.bin"))
    tokens, targets = tokenized(dict(messages=TURNS))
    Path(text).write_text("Yes.")
    before = [0, *tokenizers.Tokenizer.from_file(path).encode("Yes.").ids]
    tokenizing.tokenize([text, chat], path, out)
    both = Corpus([out], 300).read(0, len(before + tokens))
    assert both[0].tolist() == before + tokens and both[2].tolist() == [True] * len(before) + targets
    assert tokenizing.tokenize([text], path, out) == (len(before), len(before))
    assert not (tmp_path / "tokens.mask").exists() and Corpus([out], 300).read(0, len(before))[2].all()


def test_without_a_tokenizer_text_is_bytes_and_tokens_are_not_sampled(tmp_path):
    codec = codec_of(Corpus([__file__], 257), "")
    assert codec == Codec(BYTES_SEPARATOR)
    assert codec.encode("hé") == [104, 195, 169] and codec.encode("h\udcff") == [104, 255]
    assert codec.decode([256, 104, 195, 169, 300, 195]) == "hé\ufffd"  # what is no text is marked
    assert codec_of(Corpus([token_file(tmp_path / "a.bin", [1])], 9), "") is None
