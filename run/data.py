"""Text and token files as one endless stream of samples, each a pure function of (seed, its number).

    files     [ doc ][ doc    ][ doc ][ doc  ]        a separator token begins every document
    stream    ........................................  the files end to end
    spans     |   0   |   1   |   2   |   3   |   4      seq + 1 tokens each, the last one shared with the next span
    samples   3, 0, 4, 1, 2,   2, 4, 0, 3, 1,   ...      all spans, in a different order every epoch

A step takes samples first .. first + global_batch, and each data parallel rank picks its own of them: one integer is
all that is needed to resume, on any number of ranks. A sample's labels are its tokens shifted by one. They are made
here, before context parallelism shards a sequence, since a shard's last label is the first token of another shard.

A file tokens.mask (uint8) may lie beside tokens.bin. Tokens with a 1, such as answers, are targets. Tokens with a 0,
such as questions, are read and not predicted. Their label is IGNORED, so they do not count among the targets (see
dp.py).

Sources may be mixed by weights. The source of sample n depends only on n, not on ranks or steps:

    weights 3, 1      A A B A   A A B A   ...           in the first n samples, each share is exact to one sample
    number in each    0 1 0 2   3 4 1 5   ...           and each source has its own epochs and orders

Documents are packed: a span may hold the end of one document and the beginning of others. With `--mask-documents`,
attention does not cross from one document to the next. Without it the model has to learn to ignore the tokens before a
separator. It matters if documents are short compared with the sequence. flash.py skips the tiles that documents hide.
Torch's attention takes a dense mask of S x S and skips nothing.

A corpus consists of text or of token files (run/token_files.py). A model without a tokenizer reads text as bytes,
0..255, with the separator 256 before each document. This command makes a token file of text:

    python -m run.data tokenize --tokenizer tokenizer.json --out corpus/tokens.bin PATH...

It puts the tokenizer beside the file, so that whoever trains on the file can sample text. PATHs are files and folders
of text, and of records with texts or conversations (see run/texts.py). Conversations become text by the chat template
beside the tokenizer, or by ChatML if there is none (run/chat.py). A run that begins with a published model does this
itself.
"""
import contextlib
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from core import config
from core.collectives import to_device
from core.config import need, setting
from core.param import IGNORED
from run import cli
from run.chat import Rendered
from run.cli import note, told_if_slow
from run.texts import (
    KINDS,
    PACKED,
    TOKEN_SUFFIXES,
    Found,
    documents,
    encoding_of,
    files_in,
    head_of,
    named,
    note_kinds,
    standard_library,
)
from run.token_files import TokenFile, all_targets, cannot_be_read, open_token_file, opener
from run.tokenizing import (
    BYTES_SEPARATOR,
    HOW_TO_CONVERT,
    largest_id,
    read_tokenizer,
    same_tokenizer,
    tokenize,
    tokens_of,
    with_template,
)

BLOCK = 2**22  # tokens that are read at a time to find those outside of the vocabulary
OTHER_TOKENIZERS = "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"  # files of older forms
SOME_FILES = 20  # of the standard library, for a run without steps that only continues a prompt


# ---- files ----------------------------------------------------------------------------------------------------------

class Corpus:
    """The files of `paths` end to end, as one read-only array of tokens.

    paths: files and folders, of text or of tokens. [] is the Python standard library's sources.
    vocab: every token must be below it
    dtype: the dtype of .bin files without a header. auto recognises it from their bytes.
    separator: the token that begins a document in token files. With -1, documents begin where the
        file's format says so. If the format says nothing, a file is one document.
    weights: a whole number for each path, which is then a source of its own. Without weights, all
        files are one source.

    Raises ValueError naming the file that is missing, empty, truncated or in another format.
    """

    def __init__(self, paths: list[str], vocab: int, dtype: str = "auto", separator: int = -1, *,
                 weights: tuple[int, ...] = (), found: list[list[Found]] | None = None):
        """found: the files of each path, if the caller has looked already."""
        found_of = found or find(paths)
        files = sum(found_of, [])
        self.is_text = kind_of(found_of, paths) == "text"
        if self.is_text:
            need(vocab >= config.TEXT_VOCAB, f"--vocab {vocab} is too small for text: use at least {config.TEXT_VOCAB},"
                                             " bytes and document separator")
            need(separator == -1, f"--separator {separator} is for token files: in text, {BYTES_SEPARATOR} separates "
                                  "files")
            opened = [read_text(file) for file in files]
        else:
            open_array = opener()
            opened = [open_token_file(file.path, dtype, vocab, open_array) for file in files]
        if paths:
            note_kinds([file.read_as or KINDS[found.kind] for file, found in zip(opened, files)], files)
        self.files, self.vocab, self.opened = [file.path for file in files], vocab, opened
        self.arrays, self.masks = [file.tokens for file in opened], [file.targets for file in opened]
        separators = {file.separator for file in opened} if separator == -1 else {separator}
        need(len(separators) == 1, "the data's files separate documents by different tokens: give --separator")
        self.separator, = separators
        need(self.separator is None or 0 <= self.separator < vocab,
             f"{self.files[0]}: separates documents by token {self.separator}, outside of 0..{vocab - 1}: raise "
             "--vocab, or give --separator")
        self.by_separator = separator != -1  # asked for: it overrides the format
        self.starts = np.cumsum([0] + [len(array) for array in self.arrays])
        self.sources, first = [], 0
        mixed = zip(paths, map(len, found_of), weights) if weights else [("the data", len(files), 1)]
        for name, count, weight in mixed:
            last = first + count
            need(any(mask[:].view(bool).any() for mask in self.masks[first:last]),
                 f"{self.files[first].with_suffix('.mask')}: makes none of the tokens of {name} a target: nothing to "
                 "learn")
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
            begins[here] = part == self.separator if self.by_separator else self.opened[file].begins(skip, part)
            filled += len(part)
            file += 1
        return tokens, begins, targets

    def outside(self, part: int = 0, parts: int = 1) -> int:
        """Return the place in the stream of a token outside the vocabulary, or -1.

        Reads every parts-th block of BLOCK tokens, from block `part` on. Reads nothing if the dtype of the tokens can
        hold no id outside the vocabulary, as with text.
        """
        blocks = [(int(begin), array, start) for begin, array in zip(self.starts, self.arrays)
                  if array.dtype.kind == "i" or np.iinfo(array.dtype).max >= self.vocab
                  for start in range(0, len(array), BLOCK)]
        for begin, array, start in tqdm(blocks[part::parts], desc="reading tokens", delay=2, leave=False,
                                        disable=part > 0):
            found = array[start:start + BLOCK]
            if found.min() < 0 or found.max() >= self.vocab:
                return begin + start + int(np.argmax((found < 0) | (found >= self.vocab)))
        return -1

    def refuse(self, position: int) -> None:
        """Raises ValueError for the token at this position of the stream, which `outside` has found."""
        file = int(np.searchsorted(self.starts, position, "right")) - 1
        place = position - int(self.starts[file])
        token, meant = int(self.arrays[file][place]), "raise --vocab"
        with contextlib.suppress(ValueError):  # for a tokenizer that is missing or damaged
            size = largest_id(read_tokenizer(str(self.files[file].with_name("tokenizer.json")))) + 1
            if 0 <= token < size:
                meant = f"its tokenizer has {size:,}: --vocab {size}"
        raise ValueError(f"{self.files[file]}: token {place:,} is {token}, outside of 0..{self.vocab - 1}: {meant}, or "
                         "give the file's --data-dtype")

    def targets(self) -> int:
        """How many tokens are targets. Reads the masks, but none of a file whose tokens all are."""
        masks = [mask[:] for mask in self.masks]
        return sum(len(mask) if mask.strides == (0,) else int(np.count_nonzero(mask)) for mask in masks)


class Source(NamedTuple):
    """Tokens start .. stop of the stream. A run reads samples of sources in proportion to their weights."""
    name: str
    start: int
    stop: int
    weight: int


def find(paths: list[str]) -> list[list[Found]]:
    """The files of each path; without paths the standard library's."""
    return [files_in(Path(path)) for path in paths] if paths else [standard_library()]


def kind_of(found_of: list[list[Found]], paths: list[str]) -> str:
    """Return "text" or "tokens". All files must be of one kind; files of records count as text."""
    kinds = {"tokens" if file.kind == "tokens" else "text" for found in found_of for file in found}
    need(len(kinds) == 1, f"{' '.join(paths)}: text and token files (.bin, .npy) are mixed: give one kind")
    return kinds.pop()


def read_text(file: Found) -> TokenFile:
    """Read a file of text or records as bytes, uint16, with a separator before each document. The bytes of a text are
    taken as they are, so they need not be UTF-8.

    Markers of a conversation are bytes, too, so no token says that an answer has ended. The separator after it does,
    and is a target.
    """
    is_plain = file.kind == "text" and file.path.suffix.lower() not in PACKED
    if is_plain and encoding_of(head_of(file.path, 4)) in ("utf-8", "utf-8-sig"):
        content = np.fromfile(file.path, np.uint8)
        need(len(content) > 0, f"{file.path}: is empty")
        need(content.all(), f"{file.path}: holds zero bytes, so it is not text; token files end in .bin or .npy")
        tokens = np.empty(len(content) + 1, np.uint16)
        tokens[0], tokens[1:] = BYTES_SEPARATOR, content
        return TokenFile(file.path, tokens, all_targets(tokens), BYTES_SEPARATOR)

    parts, targets, after_answer = [], [], False
    for document in with_template(documents(file), ""):
        text = document.text if isinstance(document, Rendered) else "".join(document.pieces)
        content = np.frombuffer(text.encode(), np.uint8)
        is_target = np.ones(len(content) + 1, np.uint8)
        if isinstance(document, Rendered):
            is_target[:] = 0
            is_target[0] = after_answer
            for start, stop, _ in document.spans:
                first, last = (1 + len(text[:place].encode()) for place in (start, stop))
                is_target[first:last] = 1
        after_answer = is_target[-1] == 1
        parts += [np.array([BYTES_SEPARATOR], np.uint16), content]
        targets.append(is_target)
    need(parts != [], f"{file.path}: is empty")
    tokens, mask = np.concatenate(parts, dtype=np.uint16), np.concatenate(targets)
    return TokenFile(file.path, tokens, all_targets(tokens) if mask.all() else mask, BYTES_SEPARATOR)


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

    seed: the seed of the order, which differs from epoch to epoch. None keeps the stream's order.
    mask_documents: give positions and documents in each micro-batch

    Raises ValueError for a corpus shorter than one sample.
    """

    def __init__(self, corpus: Corpus, seq: int, seed: int | None, mask_documents: bool = False):
        self.corpus, self.seq, self.seed, self.mask_documents = corpus, seq, seed, mask_documents
        self.spans_of = [(source.stop - source.start - 1) // seq for source in corpus.sources]
        for spans, (name, start, stop, _) in zip(self.spans_of, corpus.sources):
            need(spans > 0, f"{name} holds {stop - start:,} tokens: fewer than one sample of --seq-len {seq} + 1")
        self.origins: set[str] = set()  # the files that were read, before they were tokenized
        self.spans, self.order = sum(self.spans_of), in_turn([source.weight for source in corpus.sources])

    def identity(self) -> dict[str, int | str | None]:
        """What the samples depend on. The hash covers the files' lengths and 64 evenly spaced blocks only.
        sources: of a mixture, the tokens and the weight of each."""
        digest = hashlib.blake2b(np.diff(self.corpus.starts).astype(np.int64).tobytes(), digest_size=16)
        block = min(1024, len(self.corpus))
        for start in np.linspace(0, len(self.corpus) - block, 64, dtype=np.int64):
            tokens, begins, targets = self.corpus.read(int(start), block)
            digest.update(tokens.tobytes() + (b"" if targets.all() else targets.tobytes()))
            if any(file.starts is not None for file in self.corpus.opened):
                digest.update(begins.tobytes())
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

    Among the first n numbers, a source of weight w has n w / sum(weights), rounded up or down. So its k-th number has
    an earliest and a latest place. The next number is always given to the source whose latest place comes first,
    among those whose earliest place has come. This keeps all places within their limits (Baruah et al. 1996,
    Proportionate Progress, for one processor).
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


# ---- the data of a run ----------------------------------------------------------------------------------------------

def open_samples(settings: config.Config, paths: list[str], seed: int | None) -> Samples:
    """The samples of the files at `paths`, mixed by --data-weights and shuffled by a seed; None: end to end, in order.
    Text for a pretrained model is tokenized first. Raises ValueError naming a bad file."""
    data, weights = settings.data, () if seed is None else settings.data.weights()
    dtype, separator = settings.before_defaults.get("data_dtype", data.data_dtype), data.separator
    try:
        with told_if_slow("looking for files of data"):
            found = find(paths)
        origins = {os.path.realpath(file.path) for files in found for file in files}
        if kind_of(found, paths) == "text":
            check_apart(settings, paths)
            if folder := tokenizer_of(settings):
                found, separator = tokenized(settings, found, bool(weights), folder), -1
        if not settings.run.allow_mismatch:
            check_tokenizers(settings)
        with told_if_slow("reading the data"):
            corpus = Corpus(paths, settings.model.vocab, dtype, separator, weights=weights, found=found)
    except OSError as error:
        raise ValueError(cannot_be_read(error.filename or " ".join(paths), error)) from None
    samples = Samples(corpus, settings.batch.seq_len, seed, data.mask_documents)
    samples.origins = origins
    return samples


def note_shared(training: Samples, validation: Samples) -> None:
    """Say which files are read for training and for validation."""
    if shared := sorted(training.origins & validation.origins):
        note(f"--val-data and --data both read {named(shared)}: the validation loss is not of unseen text")


def check_apart(settings: config.Config, paths: list[str]) -> None:
    """Raise ValueError if the run writes into a folder whose text it reads."""
    for folder in (Path(path).resolve() for path in paths if os.path.isdir(path)):
        for name in ("checkpoint_dir", "export_hf", "tensorboard", "profile", "metrics", "memory_snapshot"):
            written = Path(getattr(settings.run, name) or os.devnull).resolve()
            parts = written.relative_to(folder).parts if written.is_relative_to(folder) else (".",)
            need(any(part.startswith(".") for part in parts),  # hidden, which is not read
                 f"{config.flag(name)} {written}: is in {folder}, whose text it would change: use another folder")


def tokenizer_of(settings: config.Config) -> str:
    """Return the folder with the tokenizer.json of the weights that the run begins with, "" if there is none. A resumed
    run keeps the tokenizer of the run before."""
    run = settings.run
    folder = run.init_from
    if run.resume:
        folder = (cli.resumed_run(run.resume, run.checkpoint_dir) or {}).get("tokenizer", "")
    has_one = folder != "" and os.path.isfile(os.path.join(folder, "tokenizer.json"))
    need(has_one or not (run.resume and folder), f"--resume {run.resume}: {folder} has no tokenizer.json any more, by "
                                                 "which the run before read its text")
    if run.init_from and not has_one:
        others = [name for name in OTHER_TOKENIZERS if os.path.isfile(os.path.join(folder, name))]
        need(not others, f"{folder}: has no tokenizer.json, by which text is read, but {' and '.join(others)}: "
                         f"{HOW_TO_CONVERT}")
        note(f"{run.init_from} has no tokenizer.json, so text is read as bytes, which its model may never have seen")
    return folder if has_one else ""


def tokenized(settings: config.Config, found: list[list[Found]], each: bool, folder: str) -> list[list[Found]]:
    """The token files of texts, made by the tokenizer of a folder: one for each path, or one for all of them."""
    run, path = settings.run, os.path.join(folder, "tokenizer.json")
    beside = run.checkpoint_dir
    if run.resume and not beside:
        beside = str(cli.candidates(run.resume, run.checkpoint_dir)[0].parent)
    if not (settings.data.data or settings.optim.steps or run.resume):
        found = [found[0][:SOME_FILES]]
    separator = settings.data.separator
    name = "" if separator == -1 else read_tokenizer(path).id_to_token(separator)
    need(name is not None, f"--separator {separator}: {path} has no such token")
    made = [tokens_of(files, path, beside, name) for files in (found if each else [sum(found, [])])]
    return [[Found(file, "tokens", given=False)] for file in made]


def check_tokenizers(settings: config.Config) -> None:
    """Raise ValueError if two of the tokenizers at hand differ: those beside the weights and beside the token files."""
    folders = [Path(settings.run.init_from)] if settings.run.init_from else []
    for path in map(Path, settings.data.data + settings.data.val_data):
        is_file = path.is_file() and path.suffix.lower() in TOKEN_SUFFIXES
        inside = [path] if is_file else path.rglob("*") if path.is_dir() else []
        folders += sorted({file.parent for file in inside if file.suffix.lower() in TOKEN_SUFFIXES})
    files = [folder / "tokenizer.json" for folder in dict.fromkeys(folders)]
    files = [file for file in files if file.is_file()]
    for file in files[1:]:
        need(same_tokenizer(files[0], file), f"{file}: is another tokenizer than {files[0]}, so the same number is "
                                             "another token: tokenize with one; --allow-mismatch accepts both")


USAGE = ("python -m run.data tokenize PATH … --tokenizer tokenizer.json --out FILE.bin [--separator TOKEN] "
         "[--ignore KEY,KEY]")


@dataclass
class Flags:
    tokenizer: str = setting("", "tokenizer.json, as published with a model, or its folder")
    out: str = setting("", "the file to write, .bin")
    separator: str = setting("", "the token that begins a document; by default the tokenizer's")
    ignore: str = setting("", "keys of records and messages that are left out, with commas between them")


def main() -> None:
    try:
        flags, words = config.read_known(Flags, sys.argv[1:], USAGE)
        need(words[:1] == ["tokenize"] and words[1:] and flags.tokenizer and flags.out, f"usage: {USAGE}")
        ignored = flags.ignore.split(",") if flags.ignore else []
        count, targets = tokenize(words[1:], flags.tokenizer, flags.out, flags.separator, ignored)
    except (ValueError, OSError, ImportError) as error:  # transformers may not be installed
        cli.refuse(error, "run.data")
    vocab = largest_id(read_tokenizer(os.path.join(os.path.dirname(flags.out), "tokenizer.json"))) + 1
    print(f"{flags.out}: {count:,} tokens" + (f", of which {targets:,} are targets" if targets < count else "")
          + f"; train on them with --vocab {vocab}, or more")


if __name__ == "__main__":
    main()
