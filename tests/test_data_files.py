"""Files of data that users have: what each is read as, what is left out and named, what is refused."""
import codecs
import gzip
import json
import os
import re
import resource
import struct
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers

from core import rules
from run import data, texts, token_files, tokenizing
from run.data import Corpus, Samples

RECORDS = [dict(text="Grüße 你好"), dict(text="two\r\nlines\u2028and more"), dict(text="an <|endoftext|> inside")]


def by_bytes(path: Path, *more: str) -> str:
    """A tokenizer whose tokens are <|endoftext|>, more control tokens and all bytes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(
        special_tokens=["<|endoftext|>", *more], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(path))
    return str(path)


def texts_of(corpus: Corpus) -> list[str]:
    """The texts of a corpus of bytes."""
    tokens, begins, targets = corpus.read(0, len(corpus))
    assert targets.all()
    edges = [*np.flatnonzero(begins), len(corpus)]
    return [bytes(tokens[a + 1:b].astype(np.uint8)).decode() for a, b in zip(edges, edges[1:])]


# ---- records --------------------------------------------------------------------------------------------------------

def as_lines(records) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def zstd(content: bytes) -> bytes:
    """In two frames."""
    compress, half = pytest.importorskip("zstandard").ZstdCompressor().compress, len(content) // 2
    return compress(content[:half]) + compress(content[half:])


FILES = {
    "a.jsonl": as_lines(RECORDS), "a.JSONL": as_lines(RECORDS), "a.ndjson": as_lines(RECORDS),
    "a.json": as_lines(RECORDS), "array.json": json.dumps(RECORDS, indent=1).encode(),
    "one line.json": json.dumps(RECORDS).encode(),
    "a.jsonl.gz": gzip.compress(as_lines(RECORDS)), "a.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
    "two members.jsonl.gz": gzip.compress(as_lines(RECORDS[:1])) + gzip.compress(as_lines(RECORDS[1:])),
    "joined.jsonl": as_lines(RECORDS[:2]) + codecs.BOM_UTF8 + as_lines(RECORDS[2:]),
    "a.jsonl.zst": as_lines(RECORDS), "no suffix": as_lines(RECORDS), "a.txt": as_lines(RECORDS),
    "bom.jsonl": codecs.BOM_UTF8 + as_lines(RECORDS), "crlf.jsonl": as_lines(RECORDS).replace(b"\n", b"\r\n"),
    "blank.jsonl": b"\n" + as_lines(RECORDS).replace(b"\n", b"\n \n\n"), "cut.jsonl": as_lines(RECORDS)[:-1],
    "utf16.jsonl": as_lines(RECORDS).decode().encode("utf-16"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_records_are_read_by_what_a_file_holds_and_not_by_one_spelling_of_its_name(tmp_path, capsys, name, in_folder):
    """As bytes and by a tokenizer; each text is one document, the separator's spelling inside or not."""
    content = zstd(FILES[name]) if name.endswith(".zst") else FILES[name]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    given = str(folder if in_folder else folder / name)
    wanted = [record["text"] for record in RECORDS]
    assert texts_of(Corpus([given], 257)) == wanted
    kind = "records in JSON" if name in ("array.json", "one line.json", "a.json.gz") else "records, one a line"
    assert f"data: read as {kind}: {folder / name}" in capsys.readouterr().err
    tokenizing.tokenize([given], by_bytes(tmp_path / "tokenizer.json"), str(tmp_path / "out" / "t.bin"))
    corpus = Corpus([str(tmp_path / "out" / "t.bin")], 300)
    tokens, begins, _ = corpus.read(0, len(corpus))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    edges = [*np.flatnonzero(begins), len(corpus)]
    assert [tokens[a:b].tolist() for a, b in zip(edges, edges[1:])] == [
        [0, *tokenizer.encode(text, add_special_tokens=False).ids] for text in wanted]


@pytest.mark.parametrize("name, content", [
    ("package.json", b'{"name": "x", "text": 1}'), ("list.json", b"[1, 2]"), ("code.py", b"[1, 2]\n"),
    ("open.txt", b'{"a": 1}\n'), ("broken.json", b'{"text": "a"')])
def test_json_of_a_folder_that_holds_no_records_is_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.replace(b'"text": 1', b'"main": 1'))
    assert texts_of(Corpus([str(tmp_path)], 257)) == [content.replace(b'"text": 1', b'"main": 1').decode()]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_of_a_packed_file_that_is_cut_or_damaged_nothing_is_read(tmp_path, name, suffix):
    """Wherever it is cut: the last line may be whole, and of a text nobody knows where it ends."""
    letters = np.random.default_rng(0).choice(list("abcdefgh"), (300, 1000))
    rows = ["".join(row) for row in letters]
    whole = as_lines(dict(text=row) for row in rows) if name == "a.jsonl" else "".join(rows).encode()
    packed, path = gzip.compress(whole) if suffix == "gz" else zstd(whole), tmp_path / f"{name}.{suffix}"
    path.write_bytes(packed)
    assert sum(map(len, texts_of(Corpus([str(path)], 257)))) == 300_000
    broken = [packed[:length] for length in (3, 8, 9, 1000, len(packed) // 4, len(packed) // 2 - 1, len(packed) - 1)]
    broken += [packed[:place] + b"\xff\xff\xff\xff" + packed[place + 4:] for place in (0, 5000)]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{path}: cannot be (read|unpacked): [^\n]+$"):
            Corpus([str(path)], 257)


@pytest.mark.parametrize("record", [
    '{"text": "a", "text": "b"}', '{"messages": [], "text": "a", "messages": []}',
    '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}'])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_object_with_a_key_twice_is_refused(tmp_path, record, name):
    """Python keeps the last value, and says nothing."""
    (tmp_path / name).write_text('{"text": "good"}\n' + record if name == "a.jsonl" else f"[{record}]")
    says = r"is not valid JSON: an object has the key \w+ twice"
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{name}:[^\n]* {says}$"):
        Corpus([str(tmp_path / name)], 257)


@pytest.mark.parametrize("empty", ["", None])
@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_an_empty_text_is_no_document_and_is_counted(tmp_path, capsys, kind, empty):
    records, path = [dict(text="a"), dict(text=empty), dict(text="b"), dict(text=empty)], tmp_path / f"a.{kind}"
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), path)
    else:
        path.write_bytes(as_lines(records))
    assert everything(Corpus([str(path)], 257)) == [256, *b"a", 256, *b"b"]
    assert f"{path}: 2 records left out: the text is empty\n" in capsys.readouterr().err
    tokenizing.tokenize([str(path)], by_bytes(tmp_path / "tokenizer.json"), str(tmp_path / "out" / "t.bin"))
    tokens = everything(Corpus([str(tmp_path / "out" / "t.bin")], 300))
    assert len(tokens) == 4 and tokens[::2] == [0, 0]


def everything(corpus: Corpus) -> list[int]:
    return corpus.read(0, len(corpus))[0].tolist()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.bin", "a.npy"])
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path, name, in_folder):
    """As a clone has it where git lfs is not installed. It is UTF-8, and as uint16 its tokens are in a vocabulary."""
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 123456\n")
    given = tmp_path if in_folder else tmp_path / name
    with pytest.raises(ValueError, match=f"^{tmp_path / name}: is a pointer of Git LFS in place of the file: fetch it"):
        Corpus([str(given)], 2**16)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_parquet_and_what_the_datasets_library_saves(tmp_path, kind):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table, path = arrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        path = tmp_path / "saved"
        path.mkdir()
        with arrow.OSFile(str(path / "data-0.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
        (path / "dataset_info.json").write_text("{}")
    for given in (path, tmp_path):
        assert texts_of(Corpus([str(given)], 257)) == [record["text"] for record in RECORDS]
    if kind == "datasets":  # a selection: old versions of the library write it as indices beside all rows
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}],
                                                     "_indices_data_files": [{"filename": "indices.arrow"}]}))
        with pytest.raises(ValueError, match=f"^{path}: is a selection of rows"):
            Corpus([str(path)], 257)


@pytest.mark.parametrize("name, package", [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_package_that_is_missing_is_named(tmp_path, name, package):
    (tmp_path / name).write_bytes(b"x" * 9)
    line = f"{name}: needs `pip install {package}"
    with patch.dict(sys.modules, {package: None}), pytest.raises(ValueError, match=line):
        Corpus([str(tmp_path / name)], 257)


def test_conversations_without_a_tokenizer_are_chatml_in_bytes(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "ü!"}]}\n')
    corpus = Corpus([str(path)], 257)
    tokens, _, targets = corpus.read(0, len(corpus))
    text = "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\nü!<|im_end|>\n"
    assert tokens.tolist() == [256, *text.encode()] and bytes(tokens[targets].astype(np.uint8)).decode() == (
        "ü!<|im_end|>\n")


def test_the_separator_behind_an_answer_of_bytes_is_learned_and_behind_a_question_it_is_not(tmp_path):
    asked, answered = dict(role="user", content="a"), dict(role="assistant", content="b")
    records = [[asked, answered], [asked, answered, asked], [asked, answered], [asked, answered | dict(weight=0)],
               [asked, answered]]
    (tmp_path / "chat.jsonl").write_bytes(as_lines([dict(messages=each) for each in records]))
    corpus = Corpus([str(tmp_path / "chat.jsonl")], 257)
    tokens, begins, targets = corpus.read(0, len(corpus))
    assert begins.sum() == 5 and targets[begins].tolist() == [False, True, False, True, False]
    assert bytes(tokens[targets & ~begins].astype(np.uint8)).decode() == "b<|im_end|>\n" * 4


# ---- folders --------------------------------------------------------------------------------------------------------

def test_of_a_folder_links_and_other_encodings_are_read_and_all_else_is_named(tmp_path, capsys):
    folder, other = tmp_path / "data", tmp_path / "other"
    for place in folder / "sub", folder / ".git", other:
        place.mkdir(parents=True)
    (folder / "a.txt").write_text("plain")
    (folder / "b.txt").write_bytes("sechzehn ü".encode("utf-16"))
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "d.txt").write_bytes(b"stray \xff byte")
    (other / "e.txt").write_text("behind a link")
    (folder / "f").symlink_to(other)
    (folder / "sub" / "g").symlink_to(folder)  # a circle
    (folder / "h").symlink_to(tmp_path / "none")
    (folder / "i.png").write_bytes(b"\x89PNG\0\0")
    (folder / "j.txt").touch()
    (folder / ".git" / "k").write_text("hidden")
    os.mkfifo(folder / "l")
    corpus = Corpus([str(folder)], 257)
    texts_inside = [b"plain", "sechzehn ü".encode(), b"packed", b"stray \xff byte", b"behind a link"]
    assert corpus.read(0, len(corpus))[0].tolist() == [token for text in texts_inside for token in (256, *text)]
    said = capsys.readouterr().err
    for reason, name in (("hidden", ".git"), ("links to nowhere", "h"), ("not files", "l"), ("empty", "j.txt"),
                         ("links to folders that are read anyway", "sub/g"),
                         ("zero bytes inside, so they are no text", "i.png")):
        assert f"data: {folder}: not read, {reason}: {name}\n" in said
    assert texts.named([Path(str(i)) for i in range(9)]) == "0, 1, 2, 3, 4 and 4 more"
    with pytest.raises(ValueError, match=re.escape(f"{folder}/d.txt: is no UTF-8 text (invalid start byte at byte 6)")):
        tokenizing.tokenize([str(folder)], by_bytes(tmp_path / "tokenizer.json"), str(tmp_path / "t.bin"))


def test_a_file_with_several_names_is_read_once(tmp_path, capsys):
    """As in the cache of a hub, whose snapshots are links to blobs without a suffix. The name that says what it is
    counts."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for blob, name, content in (("5e1", "a.txt", "plain"), ("77f", "b.jsonl", '{"text": "1"}\n{"text": "2"}\n')):
        (blobs / blob).write_text(content)
        (snapshot / name).symlink_to(blobs / blob)
    (snapshot / "also.txt").symlink_to(snapshot / "a.txt")
    assert texts_of(Corpus([str(tmp_path)], 257)) == ["plain", "1", "2"]
    said = capsys.readouterr().err
    assert "other names of files that are read anyway: blobs/5e1, blobs/77f, snapshots/main/also.txt\n" in said
    assert f"read as records, one a line: {snapshot}/b.jsonl\n" in said


def test_beside_token_files_texts_are_named_and_companions_are_not(tmp_path, capsys):
    np.ones(9, np.uint16).tofile(tmp_path / "a.bin")
    np.ones(9, np.uint8).tofile(tmp_path / "a.mask")
    for name in "tokenizer.json", "tokenizer_config.json", "notes.txt":
        (tmp_path / name).write_text("{}")
    Corpus([str(tmp_path)], 257)
    assert capsys.readouterr().err.splitlines() == [
        f"data: {tmp_path}: not read, not token files, which the folder has: notes.txt",
        f"data: read as uint16 without a header: {tmp_path}/a.bin"]


# ---- token files ----------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0).integers(0, 300, 5000)


@pytest.mark.parametrize("dtype", ["u2", "u4", "i4", "i8", "u8"])
@pytest.mark.parametrize("vocab", [300, 100_000])
def test_the_width_of_tokens_without_a_header_is_that_of_their_bytes(tmp_path, dtype, vocab):
    if (dtype, vocab) == ("u2", 100_000):
        pytest.skip("the default of a large vocabulary is uint32; what is outside of it is refused")
    RANDOM.astype(dtype).tofile(tmp_path / "a.bin")
    corpus = Corpus([str(tmp_path / "a.bin")], vocab)
    assert corpus.outside() == -1 and corpus.read(0, len(corpus))[0].tolist() == RANDOM.tolist()


ZEROS = {
    "no others": np.zeros(4096), "padded": np.concatenate((RANDOM[:2000], np.zeros(20000))),
    "most": np.where(np.random.default_rng(1).random(8192) < 0.99, 0, 7),
    "few others, all at even places": np.concatenate(([5, 0, 6, 0], np.zeros(4000))),
    "at even places": np.stack((np.zeros(2048), RANDOM[:2048] + 1), 1).ravel(),
}


@pytest.mark.parametrize("tokens", ZEROS.values(), ids=ZEROS)
def test_16_bit_tokens_with_many_zeros_stay_16_bit_tokens(tmp_path, tokens):
    tokens.astype(np.uint16).tofile(tmp_path / "a.bin")
    corpus = Corpus([str(tmp_path / "a.bin")], 300 + 2)
    assert corpus.read(0, len(corpus))[0].tolist() == tokens.tolist()


def test_a_dtype_that_is_given_holds_and_a_doubt_is_said(tmp_path, capsys):
    RANDOM.astype("u4").tofile(tmp_path / "a.bin")
    flags = f"--vocab 300 --seq-len 8 --data {tmp_path}/a.bin".split()
    assert len(data.open_samples(rules.parse(flags), [f"{tmp_path}/a.bin"], 0).corpus) == 5000
    given = rules.parse([*flags, "--data-dtype", "uint16"])
    assert len(data.open_samples(given, [f"{tmp_path}/a.bin"], 0).corpus) == 10_000
    assert "looks like tokens of 4 bytes, and is read as uint16, as --data-dtype says" in capsys.readouterr().err


def megatron(folder: Path, documents: list[list[int]], code: int, dtype: str, name: str = "a") -> Path:
    """Files as Megatron-LM's IndexedDatasetBuilder writes them: each document is one sequence here."""
    lengths = [len(document) for document in documents]
    width = np.dtype(dtype).itemsize
    np.concatenate(documents).astype(dtype).tofile(folder / f"{name}.bin")
    places = np.cumsum([0, *lengths[:-1]]) * width
    (folder / f"{name}.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
        + np.array(lengths, "<i4").tobytes() + np.array(places, "<i8").tobytes()
        + np.arange(len(documents) + 1, dtype="<i8").tobytes())
    return folder / f"{name}.bin"


@pytest.mark.parametrize("code, dtype", [(8, "u2"), (4, "i4"), (5, "i8"), (3, "i2"), (1, "u1")])
def test_megatrons_index_says_the_type_and_where_documents_begin(tmp_path, code, dtype):
    documents = [[1, 2, 3], [4], [5, 6, 7, 8]]
    corpus = Corpus([str(megatron(tmp_path, documents, code, dtype))], 300)
    tokens, begins, _ = corpus.read(0, len(corpus))
    assert tokens.tolist() == sum(documents, []) and np.flatnonzero(begins).tolist() == [0, 3, 4]
    index = (tmp_path / "a.idx").read_bytes()
    other_lengths, other_places = np.array([5, -1, 4], "<i4"), np.array([0, 3, 3]) * np.dtype(dtype).itemsize
    damaged = (index[:34] + other_lengths.tobytes() + index[46:], index[:46] + other_places.tobytes() + index[70:])
    for content, says in (*((content, "a.idx: is damaged: sequences must follow") for content in damaged),
                          (index[:-1], "a.idx: is truncated"), (b"MMID" + index[4:20], "a.idx: is truncated"),
                          (b"TNTIDX\0\0" + index, "a.idx: is of Megatron's old format"), (b"xyz", "is no index of Meg"),
                          (index.replace(struct.pack("<QB", 1, code), struct.pack("<QB", 1, 7)), "names the type 7"),
                          (index.replace(struct.pack("<QB", 1, code), struct.pack("<QB", 2, code)), "version 2: know")):
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(ValueError, match=says):
            Corpus([str(tmp_path / "a.bin")], 300)


def test_documents_of_several_files_begin_where_each_file_says(tmp_path):
    """Also in a piece that begins inside the second file, or that reaches over several files."""
    tokenizer = by_bytes(tmp_path / "tokenizer.json")
    encode = tokenizers.Tokenizer.from_file(tokenizer).encode
    megatrons = {"a": [[1, 2, 3], [4], [5, 6]], "b": [[7], [8, 9, 9, 9]], "c": [[1, 0], [2, 0, 5]]}
    with_indices = {megatron(tmp_path, documents, 8, "u2", name): documents for name, documents in megatrons.items()}
    with_starts = {}
    for name, texts_of in ("d", ["a<|endoftext|>b", "c"]), ("e", ["xyz", "z<|endoftext|>", "zz"]):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts_of))
        tokenizing.tokenize([str(tmp_path / f"{name}.jsonl")], tokenizer, str(tmp_path / f"{name}.bin"))
        assert (tmp_path / f"{name}.starts").exists()
        with_starts[tmp_path / f"{name}.bin"] = [encode("<|endoftext|>" + text).ids for text in texts_of]
    for files in with_indices, with_starts:
        documents = sum(files.values(), [])
        tokens, first = sum(documents, []), np.cumsum([0, *map(len, documents)])
        corpus = Corpus([str(file) for file in files], 300)
        for start, stop in combinations(range(len(tokens) + 1), 2):
            found, begins, _ = corpus.read(start, stop - start)
            assert found.tolist() == tokens[start:stop]
            assert (start + np.flatnonzero(begins)).tolist() == [place for place in first if start <= place < stop]


def test_starts_lie_beside_tokens_where_a_document_has_the_separator_inside(tmp_path):
    tokenizer, out = by_bytes(tmp_path / "tokenizer.json"), tmp_path / "out" / "t.bin"
    for text, has_starts in (("a<|endoftext|>b", True), ("ab", False)):
        (tmp_path / "a.txt").write_text(text)
        tokenizing.tokenize([str(tmp_path / "a.txt")], tokenizer, str(out))
        assert out.with_suffix(".starts").exists() == has_starts
        corpus = Corpus([str(out)], 300)
        assert np.flatnonzero(corpus.read(0, len(corpus))[1]).tolist() == [0]
        assert np.flatnonzero(Corpus([str(out)], 300, separator=0).read(0, len(corpus))[1]).tolist() == (
            [0, 2] if has_starts else [0])  # as asked
    (tmp_path / "a.txt").write_text("a<|endoftext|>b")
    tokenizing.tokenize([str(tmp_path / "a.txt")], tokenizer, str(out))
    for content, says in ((b"", "has 0 bytes"), (b"1234567", "has 7 bytes"),
                          (struct.pack("<q", 99), "of another file")):
        out.with_suffix(".starts").write_bytes(content)
        with pytest.raises(ValueError, match=rf"t\.starts: [^\n]*{says}"):
            Corpus([str(out)], 300)
    out.with_suffix(".starts").unlink()
    with pytest.raises(ValueError, match=r"t\.starts: is missing: [^\n]* was written with the starts"):
        Corpus([str(out)], 300)


def test_more_files_than_a_process_may_open(tmp_path):
    """300 shards, each with a mask, under a limit of 100; all are read, in any order."""
    for i in range(300):
        np.full(11, i, np.uint16).tofile(tmp_path / f"{i:03d}.bin")
        np.ones(11, np.uint8).tofile(tmp_path / f"{i:03d}.mask")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        samples = Samples(Corpus([str(tmp_path)], 300), 10, seed=0)
        assert samples.corpus.outside() == -1
        read = [samples.micro_batch([number]).tokens[0, 0].item() for number in range(samples.spans)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(read) > set(range(1, 299))


def test_a_file_that_cannot_be_opened_is_named_with_a_way_on(tmp_path):
    np.ones(20, np.uint16).tofile(tmp_path / "a.bin")
    corpus = Corpus([str(tmp_path / "a.bin")], 300)
    for number, says in ((24, "Too many open files: raise the limit, such as by `ulimit -n 4096`"),
                         (13, "Permission denied")):
        corpus.arrays[0].open.cache_clear()
        error = OSError(number, os.strerror(number))
        with patch.object(np, "memmap", side_effect=error), pytest.raises(ValueError, match=re.escape(
                f"{tmp_path}/a.bin: cannot be read: {says}")):
            corpus.read(0, 5)


# ---- tokenizers -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids", [[0, 1, 2, 70_000], [0, 1, 2, 65_535], [5, 9, 100, 65_536]])
def test_the_width_of_tokens_is_that_of_the_largest_number(tmp_path, ids):
    words = dict(zip(("<|endoftext|>", "a", "b", "c"), ids))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("c b a c")
    tokenizing.tokenize([str(tmp_path / "a.txt")], str(tmp_path / "tokenizer.json"), str(tmp_path / "out" / "t.bin"))
    corpus = Corpus([str(tmp_path / "out" / "t.bin")], 80_000)
    assert corpus.read(0, 5)[0].tolist() == [ids[0], ids[3], ids[2], ids[1], ids[3]]
    assert corpus.arrays[0].dtype.itemsize == (4 if max(ids) >= 2**16 else 2)


def beside(folder: Path, *more: str) -> Path:
    folder.mkdir()
    np.ones(99, np.uint16).tofile(folder / "t.bin")
    by_bytes(folder / "tokenizer.json", *more)
    return folder


@pytest.mark.parametrize("one, other", [("--data", "--data"), ("--data", "--val-data"), ("--init-from", "--data"),
                                        ("--init-from", "--val-data")])
def test_two_tokenizers_are_compared(tmp_path, one, other):
    """By what makes ids of a text: batches' truncation and the way the file is written do not matter."""
    a, b, c = beside(tmp_path / "a"), beside(tmp_path / "b"), beside(tmp_path / "c", "<other>")
    content = json.loads((b / "tokenizer.json").read_text())
    content["truncation"] = dict(direction="Right", max_length=8, strategy="LongestFirst", stride=0)
    (b / "tokenizer.json").write_text(json.dumps(content, indent=3))

    def opened(first: Path, second: Path, allowed: bool = False):
        settings = rules.parse(["--vocab", "300", "--seq-len", "8"])
        settings.run.allow_mismatch = allowed
        for flag, path in ((one, first), (other, second)):
            if flag == "--init-from":
                settings.run.init_from = str(path)
            else:
                (settings.data.data if flag == "--data" else settings.data.val_data).append(str(path))
        return data.open_samples(settings, settings.data.data or settings.data.val_data, 0)
    opened(a, b)
    line = rf"^{c}/tokenizer.json: is another tokenizer than {a}/tokenizer.json, so the same number is another token"
    with pytest.raises(ValueError, match=line):
        opened(a, c)
    opened(a, c, allowed=True)


@pytest.mark.parametrize("text", ["C", "POSIX"])
def test_a_locale_that_is_not_utf_8(tmp_path, text):
    by_bytes(tmp_path / "tokenizer.json", "<|im_start|>", "<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}«{{ m.role }}» {{ m.content }}·{% endfor %}",
                                                  encoding="utf-8")
    lines = tmp_path / "größe.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "你"}]}\n',
                     encoding="utf-8")
    environment = os.environ | dict(LC_ALL=text, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONPATH=os.getcwd())
    done = subprocess.run([sys.executable, "-m", "run.data", "tokenize", lines, "--tokenizer",
                           tmp_path / "tokenizer.json", "--out", tmp_path / "out" / "tökens.bin"],
                          env=environment, capture_output=True, cwd=Path(data.__file__).parent.parent)
    assert done.returncode == 0, done.stderr.decode()
    corpus = Corpus([str(tmp_path / "out" / "tökens.bin")], 300)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(corpus.read(1, len(corpus) - 1)[0].tolist()) == "«user» é·«assistant» 你·"
    assert token_files.MAGIC_MASKED == (tmp_path / "out" / "tökens.bin").read_bytes()[:8]
