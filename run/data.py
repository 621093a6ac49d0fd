"""Text and token files as one endless stream of samples, each a pure function of (seed, its number).

    files     [ doc ][ doc    ][ doc ][ doc  ]        a separator token begins every document
    stream    ........................................  the files end to end
    spans     |   0   |   1   |   2   |   3   |   4      seq + 1 tokens each, the last one shared with the next span
    samples   3, 0, 4, 1, 2,   2, 4, 0, 3, 1,   ...      all spans, in a different order every epoch

A step takes samples first .. first + global_batch, and each data parallel rank picks its own of them: one integer is
all that is needed to resume, on any number of ranks. A sample's labels are its tokens shifted by one. They are made
here, before context parallelism shards a sequence, since a shard's last label is the first token of another shard.

Beside tokens.bin may lie tokens.mask, uint8: tokens with a 1, such as answers, are targets; those with a 0, such as
questions, are read and not predicted: the label IGNORED takes them out of the count of targets, too (see dp.py).

Sources may be mixed by weights. Which of them sample n is from depends on n alone, not on ranks or steps:

    weights 3, 1      A A B A   A A B A   ...           of the first n samples, the share of each is exact to one sample
    number in each    0 1 0 2   3 4 1 5   ...           and each source has its own epochs and orders

Documents are packed: a span may hold the end of one document and the beginning of others. `--mask-documents` keeps
attention
from crossing from one to the next; without it the model has to learn to ignore what precedes a separator. It matters
when documents are short against the sequence. flash.py skips the tiles that a document hides, while torch's attention
takes a dense mask of S x S and then skips nothing.

Formats: text (bytes as tokens 0..255, separator 256); .bin, raw uint16 or uint32, or with llm.c's header of 256 int32
(magic, version, count), or with ours; .npy, one dimension, integers. Token files are memory-mapped, so their size does
not matter; text is read by every rank and takes two bytes of memory per byte. Text becomes a token file by

    python -m run.data tokenize --tokenizer tokenizer.json --out corpus/tokens.bin PATH...

which puts the tokenizer beside it, so that whoever trains on the file can sample text. A line of a PATH.jsonl is a
conversation, {"messages": [{"role": …, "content": …}, …]} or {"prompt": …, "completion": …}, of which the chat template
beside the tokenizer, else ChatML, makes text. What an assistant says, and its end, are the targets.
"""
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from core import config
from core.collectives import to_device
from core.config import need, setting
from core.param import IGNORED
from run.cli import refuse

BLOCK = 2**22  # tokens that are read at a time to find those outside of the vocabulary
BYTES_SEPARATOR = config.TEXT_VOCAB - 1  # 256, behind the 256 bytes
LLM_C = {20240520: (1, 2, 50256), 20240801: (7, 4, 128000)}  # magic: version, bytes per token, separator
LLM_C_HEADER = 256 * 4  # bytes
OUR_HEADER = np.dtype([("magic", "S8"), ("count", "<i8"), ("itemsize", "<i4"), ("separator", "<i4")])
MAGIC, MAGIC_MASKED = b"penterac", b"pentmask"  # the second: of a file that was written with a mask beside it
SEPARATORS = ("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<s>", "</s>", "[SEP]")
CHATML = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHATML_MARKERS = "<|im_start|>", "<|im_end|>"


# ---- files ----------------------------------------------------------------------------------------------------------

class Corpus:
    """The files of `paths` end to end, as one read-only array of tokens.

    paths: files and folders, of text or of tokens; none: the Python standard library's sources.
    vocab: every token must be below it. dtype: of .bin files without a header. separator: the token that begins a
    document in token files; -1: the one that the format names, else every file is one document. weights: a whole number
    for each path, which then is a source of its own; none: all files are one source.
    Raises ValueError naming the file that is missing, empty, truncated or in another format.
    """

    def __init__(self, paths: list[str], vocab: int, dtype: str = "uint16", separator: int = -1, *,
                 weights: tuple[int, ...] = ()):
        files_of = [files_in(Path(path)) for path in paths] if paths else [standard_library()]
        files = sum(files_of, [])
        kinds = {file.suffix in (".bin", ".npy") for file in files}
        need(len(kinds) == 1, f"{' '.join(paths)}: text and token files (.bin, .npy) are mixed: give one kind")
        self.is_text = kinds == {False}
        if self.is_text:
            need(vocab >= config.TEXT_VOCAB, f"--vocab {vocab} is too small for text: use at least {config.TEXT_VOCAB},"
                                             " bytes and document separator")
            need(separator == -1, f"--separator {separator} is for token files: in text, {BYTES_SEPARATOR} separates "
                                  "files")
        opened = [read_text(file) if self.is_text else open_tokens(file, dtype) for file in files]
        self.files, self.vocab = files, vocab
        self.arrays = [array for array, _ in opened]
        separators = {of_format for _, of_format in opened} if separator == -1 else {separator}
        need(len(separators) == 1, "the data's files separate documents by different tokens: give --separator")
        self.separator, = separators
        need(self.separator is None or 0 <= self.separator < vocab,
             f"{files[0]}: separates documents by token {self.separator}, outside of 0..{vocab - 1}: raise --vocab, or "
             "give --separator")
        self.masks = [all_targets(array) if self.is_text else open_mask(file, array)
                      for file, array in zip(files, self.arrays)]
        self.starts = np.cumsum([0] + [len(array) for array in self.arrays])
        self.sources, first = [], 0
        mixed = zip(paths, map(len, files_of), weights) if weights else [("the data", len(files), 1)]
        for name, count, weight in mixed:
            last = first + count
            need(any(mask.view(bool).any() for mask in self.masks[first:last]),
                 f"{files[first].with_suffix('.mask')}: makes none of the tokens of {name} a target: nothing to learn")
            self.sources.append(Source(name, int(self.starts[first]), int(self.starts[last]), weight))
            first = last

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens start .. start + count (int64), which of them begin a document, and which are targets (bool)."""
        tokens, begins, targets = np.empty(count, np.int64), np.zeros(count, bool), np.empty(count, bool)
        file = int(np.searchsorted(self.starts, start, "right")) - 1
        filled = 0
        while filled < count:
            skip = start + filled - int(self.starts[file])
            part = self.arrays[file][skip:skip + count - filled]
            here = slice(filled, filled + len(part))
            tokens[here], targets[here] = part, self.masks[file][skip:skip + len(part)]
            begins[filled] |= self.separator is None and skip == 0
            filled += len(part)
            file += 1
        return tokens, begins if self.separator is None else tokens == self.separator, targets

    def outside(self, part: int = 0, parts: int = 1) -> int:
        """Where in the stream a token outside of the vocabulary is, or -1. Of blocks of BLOCK tokens it reads those
        number part, part + parts, …; none if their dtype has nothing larger, as text has not."""
        blocks = [(int(begin) + start, array[start:start + BLOCK]) for begin, array in zip(self.starts, self.arrays)
                  if array.dtype.kind == "i" or np.iinfo(array.dtype).max >= self.vocab
                  for start in range(0, len(array), BLOCK)]
        for start, found in tqdm(blocks[part::parts], desc="reading tokens", delay=2, leave=False, disable=part > 0):
            if found.min() < 0 or found.max() >= self.vocab:
                return start + int(np.argmax((found < 0) | (found >= self.vocab)))
        return -1

    def refuse(self, position: int) -> None:
        """Raises ValueError for the token at this position of the stream, which `outside` has found."""
        file = int(np.searchsorted(self.starts, position, "right")) - 1
        place = position - int(self.starts[file])
        raise ValueError(f"{self.files[file]}: token {place:,} is {self.arrays[file][place]}, outside of 0.."
                         f"{self.vocab - 1}: raise --vocab, or give the file's --data-dtype")


class Source(NamedTuple):
    """Tokens start .. stop of the stream, of whose samples a run reads a share in proportion to the weight."""
    name: str
    start: int
    stop: int
    weight: int


def files_in(path: Path) -> list[Path]:
    """The file; of a folder its token files if it has any, else all its text files."""
    need(path.exists(), f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    for folder in (path, *path.rglob("*")):  # which passes over those that it cannot read
        need(not folder.is_dir() or os.access(folder, os.R_OK | os.X_OK),
             f"{folder}: cannot be read: Permission denied")
    inside = sorted(file for file in path.rglob("*") if file.is_file()
                    and not any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts))
    tokens = [file for file in inside if file.suffix in (".bin", ".npy")]
    chosen = tokens or [file for file in inside if file.stat().st_size and 0 not in file.read_bytes()]
    need(chosen != [], f"{path}: holds no text and no .bin or .npy files")
    return chosen


def standard_library() -> list[Path]:
    """Text that every machine has: the sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(file for file in root.rglob("*.py") if file.stat().st_size)
    return [file for file in files if not left_out & set(file.relative_to(root).parts)]


def read_text(file: Path) -> tuple[np.ndarray, int]:
    """(a separator and then the file's bytes, uint16; the separator)."""
    content = np.fromfile(file, np.uint8)
    need(len(content) > 0, f"{file}: is empty")
    need(content.all(), f"{file}: holds zero bytes, so it is not text; token files end in .bin or .npy")
    tokens = np.empty(len(content) + 1, np.uint16)
    tokens[0], tokens[1:] = BYTES_SEPARATOR, content
    return tokens, BYTES_SEPARATOR


def open_tokens(file: Path, dtype: str) -> tuple[np.ndarray, int | None]:
    """(the tokens of a .bin or .npy file, memory-mapped; the separator, if the format has one)."""
    if file.suffix == ".npy":
        try:
            tokens = np.lib.format.open_memmap(file, "r")
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{file}: cannot be read as .npy, truncated or of another format ({error})") from None
        need(tokens.ndim == 1 and tokens.dtype.kind in "iu",
             f"{file}: holds {tokens.ndim} dimensions of {tokens.dtype}: need one, of integers")
        need(len(tokens) > 0, f"{file}: is empty")
        return tokens, None

    nbytes, ours, llm_c = file.stat().st_size, np.fromfile(file, OUR_HEADER, 1), np.fromfile(file, np.int32, 3).tolist()
    if len(ours) and ours[0]["magic"] in (MAGIC, MAGIC_MASKED):
        _, count, itemsize, separator = ours[0].tolist()
        need(itemsize in (2, 4), f"{file}: its header is damaged")
        start = OUR_HEADER.itemsize
    elif len(llm_c) == 3 and llm_c[0] in LLM_C:
        magic, version, count = llm_c
        (known, itemsize, separator), start = LLM_C[magic], LLM_C_HEADER
        need(version == known, f"{file}: version {version} of llm.c's format {magic} is unknown: know {known}")
    else:
        itemsize, separator, start = np.dtype(dtype).itemsize, None, 0
        count = nbytes // itemsize
        need(nbytes % itemsize == 0, f"{file}: {nbytes:,} bytes are not a whole number of {dtype} tokens: truncated, "
                                     "or of another --data-dtype")
    present = (nbytes - start) / itemsize
    need(present == count, f"{file}: its header promises {count:,} tokens and {max(present, 0):,.10g} follow: "
                           f"{'truncated' if present < count else 'not this format'}")
    need(count > 0, f"{file}: is empty")
    return np.memmap(file, f"u{itemsize}", "r", start), separator


def all_targets(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.uint8(1), tokens.shape)


def open_mask(file: Path, tokens: np.ndarray) -> np.ndarray:
    """Which tokens of a file are targets, memory-mapped. All are, if no mask is beside it."""
    path = file.with_suffix(".mask")
    if not path.exists():
        with open(file, "rb") as stream:
            need(stream.read(8) != MAGIC_MASKED, f"{path}: is missing: {file} was written with a mask beside it")
        return all_targets(tokens)
    nbytes = path.stat().st_size
    need(nbytes == len(tokens), f"{path}: has {nbytes:,} bytes for the {len(tokens):,} tokens of {file.name}: need "
                                "uint8, one for each")
    return np.memmap(path, np.uint8, "r")


# ---- samples --------------------------------------------------------------------------------------------------------

class MicroBatch(NamedTuple):
    """B sequences that a rank computes at once; all fields are int64, [B, S]."""
    tokens: torch.Tensor
    labels: torch.Tensor  # the tokens shifted by one
    positions: torch.Tensor | None = None  # of a token in its document; None: in its sequence
    documents: torch.Tensor | None = None  # number of a token's document in its sequence; None: attention crosses them
    next_tokens: torch.Tensor | None = None  # what multi-token prediction reads besides, and its labels: `one_ahead`
    next_labels: torch.Tensor | None = None

    def one_ahead(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and the labels shifted by one, of whole sequences. The last token of a sequence has none (-1,
        IGNORED), nor has the last one of a document a label: it would be a guess at what another document begins with.
        """
        tokens = torch.nn.functional.pad(self.tokens[:, 1:], (0, 1), value=-1)
        labels = torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED)
        if self.documents is not None:
            labels[:, :-1].masked_fill_(self.documents[:, 1:] != self.documents[:, :-1], IGNORED)
        return tokens, labels

    def count_labels(self) -> torch.Tensor:
        """How many tokens have a label: [1], with multi-token prediction [2]."""
        labels = (self.labels,) if self.next_labels is None else (self.labels, self.next_labels)
        return torch.stack([(each != IGNORED).sum() for each in labels])

    def to(self, device: torch.device, documents: bool = True) -> "MicroBatch":
        """A copy on the device, for which the host does not wait. documents: whether they are copied, too."""
        return self._replace(**{name: to_device(x, device) for name, x in self._asdict().items()
                                if x is not None and (documents or name != "documents")})


class Samples:
    """The samples of a corpus: number 0, 1, 2 … without end.

    seed: of the order, which differs from epoch to epoch; None: the order of the stream. mask_documents: give positions
    and documents in each micro-batch. Raises ValueError for a corpus shorter than one sample.
    """

    def __init__(self, corpus: Corpus, seq: int, seed: int | None, mask_documents: bool = False):
        self.corpus, self.seq, self.seed, self.mask_documents = corpus, seq, seed, mask_documents
        self.spans_of = [(source.stop - source.start - 1) // seq for source in corpus.sources]
        for spans, (name, start, stop, _) in zip(self.spans_of, corpus.sources):
            need(spans > 0, f"{name} holds {stop - start:,} tokens: fewer than one sample of --seq-len {seq} + 1")
        self.spans, self.order = sum(self.spans_of), in_turn([source.weight for source in corpus.sources])

    def identity(self) -> dict[str, int | str | None]:
        """What the samples depend on. The hash covers the files' lengths and 64 evenly spaced blocks only.
        sources: of a mixture, the tokens and the weight of each."""
        digest = hashlib.blake2b(np.diff(self.corpus.starts).astype(np.int64).tobytes(), digest_size=16)
        block = min(1024, len(self.corpus))
        for start in np.linspace(0, len(self.corpus) - block, 64, dtype=np.int64):
            tokens, _, targets = self.corpus.read(int(start), block)
            digest.update(tokens.tobytes() + (b"" if targets.all() else targets.tobytes()))
        sources = [[stop - start, weight] for _, start, stop, weight in self.corpus.sources]
        return dict(files=len(self.corpus.files), tokens=len(self.corpus), hash=digest.hexdigest(), seq=self.seq,
                    seed=self.seed, separator=self.corpus.separator, sources=sources if len(sources) > 1 else [])

    def start(self, number: int) -> int:
        """The position in the stream at which sample `number` starts."""
        turn, place = divmod(number, len(self.order))
        source, before = self.order[place]
        spans, (_, start, _, weight) = self.spans_of[source], self.corpus.sources[source]
        epoch, span = divmod(turn * weight + before, spans)
        if self.seed is not None:
            span = shuffled(span, spans, f"{self.seed} {epoch}" + f" of {source}" * (source > 0))
        return start + span * self.seq

    def micro_batch(self, numbers: list[int]) -> MicroBatch:
        tokens, begins, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(
            *(self.corpus.read(self.start(number), self.seq + 1) for number in numbers)))
        batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].where(targets[:, 1:], IGNORED))
        if self.mask_documents:
            begins = begins[:, :-1]
            places = torch.arange(self.seq).expand_as(begins)
            document_start = torch.where(begins, places, 0).cummax(1).values  # of each token's document
            batch = batch._replace(documents=begins.cumsum(1, dtype=torch.int32), positions=places - document_start)
        return batch

    def step(self, first: int, global_batch: int, micro_batch: int, dp_rank: int, dp: int,
             end: int | None = None) -> list[MicroBatch]:
        """The micro-batches of one of dp ranks, for samples first .. first + global_batch.

        Samples from number `end` on only fill up a micro-batch: their labels are IGNORED.
        """
        numbers_of = [range(start + dp_rank * micro_batch, start + (dp_rank + 1) * micro_batch)
                 for start in range(first, first + global_batch, micro_batch * dp)]
        batches = [self.micro_batch(list(numbers)) for numbers in numbers_of]
        for batch, numbers in zip(batches, numbers_of):
            if end is not None and numbers.stop > end:
                batch.labels[max(0, end - numbers.start):] = IGNORED
        return batches


def in_turn(weights: list[int]) -> list[tuple[int, int]]:
    """For each of sum(weights) numbers, its source, and how many of the numbers before it are of that source.

    Of the first n numbers, n w / sum(weights), rounded up or down, are of a source of weight w. So its number k has a
    time from which on it may come and one by which it must have; the source that must come first is next, which keeps
    all of these times (Baruah et al. 1996, Proportionate Progress, for one processor).
    """
    counts, order, total = [0] * len(weights), [], sum(weights)
    for n in range(total):
        _, source = min((-(-(count + 1) * total // weight), i) for i, (count, weight) in enumerate(zip(counts, weights))
                        if count * total < (n + 1) * weight)
        order.append((source, counts[source]))
        counts[source] += 1
    return order


def shuffled(index: int, n: int, key: str) -> int:
    """The image of `index` under a pseudo-random permutation of range(n) chosen by `key`, without a table of n entries.

    A Feistel network of four rounds permutes the numbers below a power of 4, the least that is not below n. A result of
    n or above goes through the network again until it is below n, which is a permutation, too (cycle walking, Black &
    Rogaway 2002).
    """
    half = ((n - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half | right
        if index < n:
            return index


def open_samples(settings: config.Config, paths: list[str], seed: int | None) -> Samples:
    """The samples of the files at `paths`, mixed by --data-weights and shuffled by a seed; None: end to end, in order.
    Raises ValueError naming a bad file."""
    data, weights = settings.data, () if seed is None else settings.data.weights()
    try:
        corpus = Corpus(paths, settings.model.vocab, data.data_dtype, data.separator, weights=weights)
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from None
    for folder in (Path(path).resolve() for path in paths if corpus.is_text and os.path.isdir(path)):
        for name in ("checkpoint_dir", "export_hf", "profile", "metrics", "memory_snapshot"):
            written = Path(getattr(settings.run, name) or os.devnull).resolve()
            parts = written.relative_to(folder).parts if written.is_relative_to(folder) else (".",)
            need(any(part.startswith(".") for part in parts),  # hidden, which is not read
                 f"{config.flag(name)} {written}: is in {folder}, whose text it would change: use another folder")
    return Samples(corpus, settings.batch.seq_len, seed, data.mask_documents)


# ---- text to tokens and back ----------------------------------------------------------------------------------------

class Codec(NamedTuple):
    """Text to tokens and back: by a tokenizer of the tokenizers library, or as bytes if that is None."""
    separator: int | None  # the token that begins a document
    tokenizer: Any = None

    def encode(self, text: str) -> list[int]:
        content = text.encode(errors="surrogateescape")  # of a command line: its bytes, which may be no UTF-8
        if self.tokenizer:
            return self.tokenizer.encode(content.decode(errors="replace"), add_special_tokens=False).ids
        return list(content)

    def prompt(self, text: str) -> list[int]:
        """The tokens of --sample-prompt, which begins a document. Raises ValueError if the tokenizer has none."""
        try:
            tokens = [*([] if self.separator is None else [self.separator]), *self.encode(text)]
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"--sample-prompt {text!r}: the tokenizer cannot read it: {error}") from None
        need(tokens != [], f"--sample-prompt {text!r}: the tokenizer has no token for it")
        return tokens

    def decode(self, tokens: list[int]) -> str:
        if self.tokenizer:
            return self.tokenizer.decode(tokens)
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def codec_of(corpus: Corpus, folder: str) -> Codec | None:
    """By the tokenizer.json in the folder, "" for none; without it as bytes if the data is text; else None. Raises
    ValueError for a tokenizer that is damaged, or has tokens that the corpus's vocabulary has not."""
    if folder:
        path = os.path.join(folder, "tokenizer.json")
        tokenizer = read_tokenizer(path)
        most = max(tokenizer.get_vocab().values(), default=0)
        need(most < corpus.vocab, f"{path}: has the token {most}, outside of 0..{corpus.vocab - 1}: raise --vocab, or "
                                  "give --sample-prompt=, which needs no tokenizer")
        return Codec(None if corpus.is_text else corpus.separator, tokenizer)
    return Codec(BYTES_SEPARATOR) if corpus.is_text else None


def read_tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: is no tokenizer.json: {error}") from None


def separator_of(tokenizer: Any, path: str, name: str) -> int:
    """The number of the token that begins a document: of this name; "": of the names that published tokenizers use."""
    names = (name,) if name else SEPARATORS
    found = [tokenizer.token_to_id(name) for name in names if tokenizer.token_to_id(name) is not None]
    need(found != [], f"{path}: has none of {', '.join(names)}: name the token between documents with --separator")
    return found[0]


def tokenize(paths: list[str], tokenizer_path: str, out: str, separator: str = "") -> tuple[int, int]:
    """Write the tokens of text files and conversations, a separator before each; beside them the tokenizer, and a mask
    if not all tokens are targets. Returns how many tokens and targets there are.

    The tokenizers library uses all cores. Raises ValueError naming a file that is missing or no text.
    """
    tokenizer, target = read_tokenizer(tokenizer_path), Path(out)
    mark = separator_of(tokenizer, tokenizer_path, separator)
    need(target.suffix == ".bin", f"--out {out}: its name must end in .bin")
    files = [file for path in paths for file in files_in(Path(path))]
    kind = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    render = renderer(tokenizer_path) if any(file.suffix == ".jsonl" for file in files) else None
    documents = (document for file in files for document in (
        conversations(file, render) if file.suffix == ".jsonl" else [(text_of(file), [(-1, math.inf)])]))
    target.parent.mkdir(parents=True, exist_ok=True)
    beside, mask, count, targets = target.parent / "tokenizer.json", target.with_suffix(".mask"), 0, 0
    need(not beside.exists() or beside.read_bytes() == Path(tokenizer_path).read_bytes(),
         f"{beside}: is another tokenizer: use another folder for --out")
    try:
        with TemporaryDirectory(dir=target.parent) as folder:
            temporary, temporary_mask = Path(folder, "tokens"), Path(folder, "mask")
            with open(temporary, "wb") as stream, open(temporary_mask, "wb") as mask_stream:
                stream.write(np.zeros(1, OUR_HEADER).tobytes())
                batches = iter(lambda: list(islice(documents, 64)), [])
                for some in tqdm(batches, desc="tokenizing", unit=" x 64", delay=2):
                    texts, spans_of = zip(*some)
                    for encoded, spans in zip(tokenizer.encode_batch(texts, add_special_tokens=False), spans_of):
                        marks = [mark] * (encoded.ids[:1] != [mark])  # a chat template may begin with it
                        at = np.array([-1] * len(marks) + [start for start, _ in encoded.offsets])
                        is_target = sum(((start <= at) & (at < stop) for start, stop in spans), np.zeros(len(at), bool))
                        stream.write(np.array(marks + encoded.ids, kind).tobytes())
                        mask_stream.write(is_target.tobytes())
                        count, targets = count + len(at), targets + int(is_target.sum())
                need(targets > 0, f"{' '.join(paths)}: no conversation has a message of the role assistant")
                stream.seek(0)
                magic = MAGIC_MASKED if targets < count else MAGIC
                stream.write(np.array([(magic, count, kind.itemsize, mark)], OUR_HEADER).tobytes())
                for written in stream, mask_stream:
                    written.flush()
                    os.fsync(written.fileno())
            if not beside.exists():
                shutil.copy(tokenizer_path, beside)
            mask.unlink(missing_ok=True)  # of a file that is replaced
            if targets < count:
                temporary_mask.rename(mask)
            temporary.rename(target)
    except OSError as error:
        raise ValueError(f"{error.filename or target}: {error.strerror}") from None
    return count, targets


def renderer(tokenizer_path: str) -> Callable[..., str]:
    """Return a function that makes text of messages, by the chat template beside the tokenizer or else ChatML. Raises
    ValueError if the tokenizer lacks ChatML's markers: pieces of a marker would be learned as text."""
    from transformers import PreTrainedTokenizerFast
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(Path(tokenizer_path).parent, local_files_only=True)
    except Exception as error:  # of damaged files the library raises anything
        raise ValueError(f"{tokenizer_path}: its chat template cannot be read: {error}".splitlines()[0]) from None
    if tokenizer.chat_template:
        return partial(tokenizer.apply_chat_template, tokenize=False)
    missing = [marker for marker in CHATML_MARKERS if marker not in tokenizer.get_vocab()]
    need(not missing, f"{tokenizer_path}: has no token {' and no token '.join(missing)}, and no chat template lies "
         "beside it: put the model's chat_template.jinja or tokenizer_config.json there, or use a tokenizer with these "
         "tokens")
    return partial(tokenizer.apply_chat_template, tokenize=False, chat_template=CHATML)


def conversations(file: Path, render: Callable[..., str]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Of each conversation in a .jsonl file the text, and from which to which character an assistant speaks."""
    for number, line in enumerate(text_of(file).rstrip().split("\n"), 1):
        try:
            record, spans = json.loads(line), []
            messages = record["messages"] if "messages" in record else [
                dict(role="user", content=record["prompt"]), dict(role="assistant", content=record["completion"])]
            need(all(isinstance(message[name], str) for message in messages for name in ("role", "content")),
                 "a role and a content must be text")
            text = render(messages)
            text.encode()  # JSON can hold surrogates, which are no text
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    before, after = render(messages[:i], add_generation_prompt=True), render(messages[:i + 1])
                    need(after.startswith(before) and text.startswith(after), "the chat template writes an answer in "
                         "another way when no message follows, so that nobody can tell where it begins and ends")
                    spans.append((len(before), len(after)))
        except Exception as error:  # what strangers' JSON and templates lead to
            raise ValueError(f"{file}: line {number:,} is no conversation: {type(error).__name__}: "
                             f"{error}".splitlines()[0]) from None
        yield text, spans


def text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is no UTF-8 text ({error.reason} at byte {error.start:,})") from None


USAGE = "python -m run.data tokenize PATH … --tokenizer tokenizer.json --out FILE.bin [--separator TOKEN]"


@dataclass
class Flags:
    tokenizer: str = setting("", "tokenizer.json, as published with a model")
    out: str = setting("", "the file to write, .bin")
    separator: str = setting("", "the token that begins a document; by default the tokenizer's")


def main() -> None:
    try:
        flags, words = config.read_known(Flags, sys.argv[1:], USAGE)
        need(words[:1] == ["tokenize"] and words[1:] and flags.tokenizer and flags.out, f"usage: {USAGE}")
        count, targets = tokenize(words[1:], flags.tokenizer, flags.out, flags.separator)
    except (ValueError, OSError, ImportError) as error:  # transformers may not be installed
        refuse(error, "run.data")
    print(f"{flags.out}: {count:,} tokens" + (f", of which {targets:,} are targets" if targets < count else ""))


if __name__ == "__main__":
    main()
