"""Text to tokens and back, and files of documents to token files.

    tokenizer.json    what a model's publisher trained: text -> ids
    tokens.about      beside tokens.bin, in JSON: the tokens that end a text or an answer, and the chat template
    Codec             turns a prompt into ids, and the ids that a model generates into text; without a tokenizer, a
                      byte is an id
    tokenize          files of texts and conversations -> tokens.bin, with tokenizer.json beside it
    tokens_of         `tokenize` at the start of a run that trains a pretrained model on texts; later runs find
                      its tokens

A tokenizer.json may set truncation and padding, for batches of requests. They would cut off long documents and pad
short ones, so we ignore them. Its post-processor only tells which token the tokenizer puts before texts
(`separator_of`), and puts no tokens into a document.

A document begins with a separator, a token such as <|endoftext|> or <s>. If the tokenizer also has
a token for the end of a text, as Llama's has, a document ends with this token. Either way, a model
learns to end a text: the token that it learns to predict after the last word is this end, or the
next document's separator.

A large text is encoded in pieces, so that memory holds only a few of them:

    large text        |------------- piece -------------|
                                                 |------------- piece -------------|
                                                 |..c..|   both have these characters; c is after a newline, if any

The tokens before the cut c are taken from the first piece, and the tokens after it from the second.
On 512 characters on each side of c, both pieces must have the same tokens at the same places. If
they do not, the two pieces are encoded again as one. So the text gets the same tokens as if it were
encoded whole, unless a token depends on characters that are further away. That takes a word of more
than 512 characters, or a BPE that does not split a text into words first (pre-tokenization). For
these, the agreement is a good sign, but no proof.

The tokenizers library encodes several pieces at once, on all cores.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from core import config
from core.config import is_of_kind, need
from run import huggingface
from run.chat import CHATML, Rendered, Span, Template
from run.cli import note, speaking, told_if_slow
from run.texts import (
    KINDS,
    Conversation,
    Document,
    Found,
    Text,
    documents,
    files_in,
    note_kinds,
    size_of,
)
from run.token_files import MAGICS, OUR_HEADER, check_fetched

BYTES_SEPARATOR = config.TEXT_VOCAB - 1  # 256, after the 256 bytes
SEPARATORS = ("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<s>", "</s>", "[SEP]")
ENDS = {"<|begin_of_text|>": "<|end_of_text|>", "<s>": "</s>"}  # the end that belongs to a separator
FORMAT = 2  # the version of kept tokens; raise it if a change of the code gives texts other tokens or targets
HOW_TO_CONVERT = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes a tokenizer.json"
RARE_LETTER = "\U00013080"  # a hieroglyph, which small alphabets lack
PIECE = 2**16  # characters of a large text from one cut to the next, at most
OVERLAP = 2**10  # characters on each side of a cut that both pieces have; half of them must have the same tokens
PIECES_AT_ONCE = 2**12  # pieces that are encoded at a time, at most


# ---- tokenizers -----------------------------------------------------------------------------------------------------

class Codec(NamedTuple):
    """Text to tokens and back."""
    separator: int | None  # the token that begins a document
    tokenizer: Any = None  # of the tokenizers library; None: a token is a byte
    path: str = ""  # of the tokenizer.json

    def encode(self, text: str) -> list[int]:
        # The text is an argument of a command. Python keeps bytes that are not UTF-8 as surrogates.
        content = text.encode(errors="surrogateescape")
        if self.tokenizer:
            return self.tokenizer.encode(content.decode(errors="replace"), add_special_tokens=False).ids
        return list(content)

    def prompt(self, text: str, chat: bool = False) -> list[int]:
        """Return the tokens of --sample-prompt, as the beginning of a document.

        chat: the text is a user's message, and the chat template asks for the answer to it
        Raises ValueError if the tokenizer cannot read the text, or has no tokens for it.
        """
        messages = [dict(role="user", content=text)]
        template = Template(self.path) if chat else None
        try:
            tokens = self.encode(template.render(messages, {}, add_generation_prompt=True) if template else text)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"--sample-prompt {text!r}: the tokenizer cannot read it: {error}") from None
        # A template may write the first token of a conversation itself. Then no separator is needed, as in training
        # (Writer.add). Plain text always gets one: what the user writes comes after it.
        openers = {self.separator}
        if chat and self.tokenizer:
            openers.add(self.tokenizer.token_to_id(published_settings(self.path).get("bos_token") or ""))
        is_begun = chat and tokens[:1] != [] and tokens[0] in openers
        if self.separator is not None and not is_begun:
            tokens = [self.separator, *tokens]
        need(tokens != [], f"--sample-prompt {text!r}: the tokenizer has no token for it")
        return tokens

    def ends(self, chat: bool) -> list[list[int]]:
        """Return the sequences of tokens that end a text or, with `chat`, also an answer."""
        found = {self.separator}
        if self.tokenizer:
            with contextlib.suppress(ValueError):  # a tokenizer without a token between documents
                found.update(marks_of(self.tokenizer, self.path))
        found.discard(None)
        sequences = [[token] for token in sorted(found)]
        if chat:
            text, is_end = Template(self.path).end_of_answer()
            tokens = self.encode(text)
            if not is_end:  # a model has learned the first token that is not whitespace, see `targets_of`
                offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
                visible = [number for number, (start, stop) in enumerate(offsets) if text[start:stop].strip()]
                tokens = tokens[:visible[0] + 1] if visible else []
            if tokens:  # there are none if the template refuses a short conversation
                sequences.append(tokens)
        return sequences

    def decode(self, tokens: list[int]) -> str:
        if self.tokenizer:
            return self.tokenizer.decode(tokens)
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def codec_of(corpus: Any, folder: str) -> Codec | None:
    """Return the Codec of a corpus (run.data.Corpus).

    folder: the folder of the run's tokenizer.json. Without one, "", the Codec of text is bytes, and
        token files have none: the function returns None.

    With a tokenizer, the Codec's separator is that of token files. Text has none then: the corpus
    reads it as bytes, and its separator, 256, is another token in the tokenizer.

    Raises ValueError for a tokenizer that is damaged, or that has tokens outside of the corpus's vocabulary.
    """
    if folder:
        path = os.path.join(folder, "tokenizer.json")
        tokenizer = read_tokenizer(path)
        most = largest_id(tokenizer)
        need(most < corpus.vocab, f"{path}: has the token {most}, outside of 0..{corpus.vocab - 1}: raise --vocab to "
                                  f"{most + 1}, or give --sample-prompt=, which needs no tokenizer")
        return Codec(None if corpus.is_text else corpus.separator, tokenizer, path)
    return Codec(BYTES_SEPARATOR) if corpus.is_text else None


def read_tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer
    file = Path(path)
    need(not file.is_dir(), f"{path}: is a folder: name the tokenizer.json in it")
    need(file.exists(), f"{path}: there is no such file")
    if file.is_file():
        check_fetched(file)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises nothing narrower
        hint = f"; {HOW_TO_CONVERT}" if file.is_file() and file.suffix != ".json" else ""
        raise ValueError(f"{path}: is no tokenizer.json: {error}{hint}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def largest_id(tokenizer: Any) -> int:
    """Return the largest id of a token. A published tokenizer may have fewer tokens: some ids are unused."""
    return max(tokenizer.get_vocab().values(), default=0)


def same_tokenizer(one: Path, other: Path) -> bool:
    """Whether two tokenizer.json files turn text into the same ids."""
    if one.read_bytes() == other.read_bytes():
        return True
    contents = [json.loads(read_tokenizer(str(path)).to_str()) for path in (one, other)]
    for content in contents:
        # These change no id of a text, as we encode it: without special tokens, truncation and padding.
        for name in ("post_processor", "decoder", "truncation", "padding"):
            content.pop(name, None)
    return contents[0] == contents[1]


class Marks(NamedTuple):
    """The tokens around a document."""
    begin: int
    end: int | None  # None: there is none, and the next document's `begin` ends this one
    turn_end: int  # ends an answer if the chat template writes nothing after it
    bos: int | None = None  # the published beginning of a text; if a conversation begins with it, `begin` is left out


def marks_of(tokenizer: Any, path: str, name: str = "") -> Marks:
    """Return a tokenizer's Marks. name: the token that begins a document, as for separator_of"""
    published = published_settings(path)
    begin = separator_of(tokenizer, path, name)
    end_text = ENDS.get(tokenizer.id_to_token(begin), "")
    # The published end belongs to the published beginning, not to another token that separates documents. If the user
    # names the separator, only ENDS says what its end is.
    if not end_text and not name and tokenizer.id_to_token(begin) == published.get("bos_token"):
        end_text = published.get("eos_token") or ""
    end = tokenizer.token_to_id(end_text)
    end = None if end == begin else end
    turn_end = tokenizer.token_to_id(published.get("eos_token") or "")
    if turn_end is None:
        turn_end = begin if end is None else end
    return Marks(begin, end, turn_end, tokenizer.token_to_id(published.get("bos_token") or ""))


def published_settings(path: str) -> dict[str, str]:
    """Return the bos_token and the eos_token that are published with a tokenizer, as far as there
    are any. Raises ValueError for a damaged file."""
    found = {}
    files = {file.name: file for file in huggingface.tokenizer_files(Path(path))}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second one wins
        if file_name not in files:
            continue
        check_fetched(files[file_name])
        content = huggingface.read_json(str(files[file_name]))
        for name in ("bos_token", "eos_token"):
            token = content.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found[name] = token
    return found


def separator_of(tokenizer: Any, path: str, name: str) -> int:
    """Return the id of the token that begins a document. Raises ValueError if the tokenizer has no
    such token.

    name: the token. With "", it is the first of these tokens that the tokenizer has:

        1. the published beginning of a text, if the tokenizer itself puts it before texts
        2. a token of SEPARATORS, which published tokenizers use
        3. the published beginning of a text

    The order matters, because a tokenizer may use a token of SEPARATORS for something else: Gemma's
    <s> is an HTML tag.
    """
    published = published_settings(path).get("bos_token")
    names = (name,) if name else (*SEPARATORS, published or SEPARATORS[0])
    if not name and published and tokenizer.encode("", add_special_tokens=True).tokens[:1] == [published]:
        names = (published,)
    found = [tokenizer.token_to_id(token) for token in names if tokenizer.token_to_id(token) is not None]
    need(found != [], f"{path}: has none of {', '.join(dict.fromkeys(names))}: name the token between documents with "
                      "--separator")
    return found[0]


# ---- large texts in pieces ------------------------------------------------------------------------------------------

@dataclass
class Piece:
    """A text to encode at once: a whole document, or a part of a large one."""
    text: str
    at: int = 0  # the place in the document of its first character
    cut: int | None = None  # where in the document the next piece takes over; None: the document ends with this piece
    # The targets of a conversation; None: every token of a text is a target. span.ends says whether the span contains
    # the end of its answer.
    spans: list[Span] | None = None


@dataclass
class Part:
    """Tokens of a document, in order: of a whole one, or of a part of a large one."""
    ids: list[int]
    begins: bool  # a document
    ends: bool
    offsets: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""
    spans: list[Span] | None = None


def pieces_of(document: Text | Rendered) -> Iterator[Piece]:
    """Yield the pieces of a document. Pieces of a large text overlap by OVERLAP characters on each side of a cut.

    The cut is after the last newline in the second half of a piece, or at the end of the piece if there is none.
    """
    if isinstance(document, Rendered):
        yield Piece(document.text, spans=document.spans)
        return
    held, at, last_cut = "", 0, 0  # the text from place `at` on, and the place of the last cut
    for text in in_blocks(document.pieces):
        held += text
        while len(held) > last_cut - at + PIECE + OVERLAP:
            begin = last_cut - at
            after_newline = held.rfind("\n", begin + PIECE // 2, begin + PIECE) + 1  # 0 if there is none
            cut = after_newline or begin + PIECE
            yield Piece(held[:cut + OVERLAP], at, at + cut)
            last_cut = at + cut
            kept = max(0, cut - OVERLAP)
            held, at = held[kept:], at + kept
    yield Piece(held, at)


def in_blocks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), PIECE):
            yield text[start:start + PIECE]


def encoded(pieces: Iterable[Piece], tokenizer: Any) -> Iterator[Part]:
    """Yield the tokens of the pieces of documents, in order. Several pieces are encoded at a time,
    on all cores.

    A cut is a place in the characters of a document. A seam is the same place in the tokens of both
    pieces: in each of them, the number of the first token after the cut. A piece is held back until
    the next one shows whether the two agree. If they do, the tokens up to the seam are yielded, and
    the next piece is held back. If not, both become one piece, which is held back in their place.

    `skip` is how many tokens of the piece that is held back come before its earlier cut. It stays
    valid if the piece grows: the text around that cut does not change, and new text only comes half
    a piece or more after it.
    """
    room = PIECE * max(4, os.cpu_count() or 1)  # characters at a time
    is_unigram = type(tokenizer.model).__name__ == "Unigram"
    held_back: tuple[Piece, Any] | None = None
    skip = 0
    for batch in in_batches(pieces, room):
        try:
            encodings = tokenizer.encode_batch([piece.text for piece in batch], add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the tokenizer cannot read the text: {error}") from None
        for piece, encoding in zip(batch, encodings):
            if held_back is None:
                begins, skip = True, 0
            else:
                before, encoding_before = held_back
                seam = find_seam(before, encoding_before, piece, encoding)
                if is_unigram and seam and not has_whole_words(encoding_before, encoding, *seam):
                    seam = None
                if seam is None:
                    joined = before.text[:piece.at - before.at] + piece.text
                    piece = Piece(joined, before.at, piece.cut)
                    encoding = tokenizer.encode(joined, add_special_tokens=False)
                else:
                    yield Part(encoding_before.ids[skip:seam[0]], begins, False)
                    begins, skip = False, seam[1]
            if piece.cut is None:
                yield Part(encoding.ids[skip:], begins, True, encoding.offsets if piece.spans is not None else [],
                           piece.text, piece.spans)
                held_back = None
            else:
                held_back = piece, encoding


def find_seam(one: Piece, one_encoding: Any, other: Piece, other_encoding: Any) -> tuple[int, int] | None:
    """Return, for each of two pieces, the number of its first token after the cut between them.

    Returns None if the two differ near the cut: half of the overlap on each side must have the same tokens at the same
    places in both.
    """
    near, found = [], []
    for piece, encoding in ((one, one_encoding), (other, other_encoding)):
        starts = np.array([start for start, _ in encoding.offsets]) + piece.at
        inside = np.flatnonzero((starts >= one.cut - OVERLAP // 2) & (starts < one.cut + OVERLAP // 2))
        ids = np.array(encoding.ids)  # a copy: each access of .ids builds a list
        near.append((ids[inside].tolist(), starts[inside].tolist()))
        after = np.flatnonzero(starts >= one.cut)
        found.append(int(after[0]) if len(after) else len(starts))
    return (found[0], found[1]) if near[0] == near[1] and near[0][0] else None


def has_whole_words(one_encoding: Any, other_encoding: Any, one_after: int, other_after: int) -> bool:
    """Return whether neither of two pieces may have cut off a word that touches their seam.

    one_after, other_after: in each piece, the number of the first token after the cut

    A unigram model chooses all tokens of a word together. The first piece may have cut off its last
    word, and the second piece its first word. So neither may touch the seam.
    """
    words, other_words = one_encoding.word_ids, other_encoding.word_ids
    if not 0 < one_after < len(words) or not 0 < other_after < len(other_words):
        return False
    return words[one_after - 1] != words[-1] and other_words[other_after] != other_words[0]


def in_batches(pieces: Iterable[Piece], room: int) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= room or len(batch) == PIECES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def targets_of(part: Part) -> np.ndarray:
    """Return which tokens of a part the model learns to predict: bool [tokens + 1]. The last
    element says whether it learns the end of the document.

    All tokens of a text are targets. In a conversation, the targets are the tokens that start in a
    span. Two exceptions:

    1. A token that starts before a span and reaches into it is a target too, if it holds more of the
       span than whitespace. If a prompt ends with a space, the first token of the answer is such a
       token, for example " Yes". Without this exception, a model would never learn the first word of
       an answer. A marker that takes in whitespace of the answer is not a target.
    2. If a span does not contain the end of its answer (not span.ends), the tokens after the span are
       targets, up to the first token that is not whitespace. It belongs to the next message's marker,
       and ends the answer. If there is none, the end of the document is a target.
    """
    is_target = np.ones(len(part.ids) + 1, bool)
    if part.spans is None:
        return is_target
    is_target[:] = False
    starts = np.array([start for start, _ in part.offsets], np.int64)
    stops = np.array([stop for _, stop in part.offsets], np.int64)
    for span in part.spans:
        is_target[:-1] |= (span.start <= starts) & (starts < span.stop)
        across = (starts < span.start) & (span.start < stops)
        if part.text[span.start:stops[across].max(initial=0)].strip():
            is_target[:-1] |= across
        if not span.ends:
            first = last = int((starts < span.stop).sum())
            while last < len(part.ids) and not part.text[starts[last]:stops[last]].strip():
                last += 1
            is_target[first:last + 1] = True
    return is_target


# ---- token files ----------------------------------------------------------------------------------------------------

def tokenize(paths: list[str], tokenizer_path: str, out: str, separator: str = "",
             ignored: Iterable[str] = ()) -> tuple[int, int]:
    """Write the tokens of files of text and records, with a separator before each document. Returns how many tokens and
    targets there are.

    The tokenizer's files are copied beside the tokens. A mask is written if not all tokens are targets. The starts of
    documents are written if separators do not show them (`Writer.add`).

    paths: files and folders
    tokenizer_path: a tokenizer.json, or its folder
    out: the .bin file
    separator: the token that begins a document; see `separator_of`
    ignored: keys of records to leave out

    Raises ValueError naming a file that is missing or cannot be read.
    """
    need(Path(out).suffix == ".bin", f"--out {out}: its name must end in .bin")
    if Path(tokenizer_path).is_dir():
        tokenizer_path = os.path.join(tokenizer_path, "tokenizer.json")
    marks = marks_of(read_tokenizer(tokenizer_path), tokenizer_path, separator)
    found = [each for path in paths for each in files_in(Path(path))]
    return write_tokens(found, tokenizer_path, Path(out), marks, ignored)


def note_what_it_leaves_out(tokenizer: Any, path: str) -> None:
    """Print a line if a tokenizer silently leaves out characters that it does not know."""
    # The library raises nothing narrower. A tokenizer that raises here does not leave such characters out silently: it
    # also raises for a text that has them.
    with contextlib.suppress(Exception):
        if not tokenizer.encode(RARE_LETTER, add_special_tokens=False).ids:
            note(f"{path}: has no token for characters outside of its alphabet, so they are left out of all texts")


def write_tokens(found: list[Found], tokenizer_path: str, target: Path, marks: Marks,
                 ignored: Iterable[str] = ()) -> tuple[int, int]:
    """Do what `tokenize` does, for files that have been found. target: the .bin file"""
    tokenizer = read_tokenizer(tokenizer_path)
    beside = target.parent / "tokenizer.json"
    note_what_it_leaves_out(tokenizer, tokenizer_path)
    if not huggingface.owns_folder(Path(tokenizer_path)):
        note(f"{tokenizer_path}: is read without the files beside it, which belong to "
             f"{Path(tokenizer_path).with_name('tokenizer.json')}: to use a chat template or settings of its own, give "
             "it a folder of its own")
    # With add_special_tokens=False it adds no id, but it may trim spaces from the offsets of tokens.
    tokenizer.post_processor = None
    unknown = getattr(tokenizer.model, "unk_token", None) or ""
    unread = 0
    for each in found:
        need(each.kind != "tokens", f"{each.path}: has tokens already")
    note_kinds([KINDS[each.kind] for each in found], found)
    target.parent.mkdir(parents=True, exist_ok=True)
    need(not beside.exists() or beside.read_bytes() == Path(tokenizer_path).read_bytes(),
         f"{beside}: is another tokenizer: use another folder for --out")
    dtype = np.dtype(np.uint16 if largest_id(tokenizer) < 2**16 else np.uint32)
    bar = tqdm(desc="tokenizing", unit="B", unit_scale=True, delay=2, total=sum(size_of(each.path) for each in found),
               leave=False, disable=not sys.stderr.isatty())  # in a file, other lines would be glued to it
    slow = told_if_slow("tokenizing", "data") if bar.disable else contextlib.nullcontext()
    try:
        with TemporaryDirectory(dir=target.parent) as folder, Writer(Path(folder), marks, dtype) as writer, bar, slow:
            documents_of_all = chain.from_iterable(documents(each, bar.update, ignored) for each in found)
            templates: list[Template] = []
            rendered = with_template(documents_of_all, tokenizer_path, templates)
            pieces = chain.from_iterable(map(pieces_of, rendered))
            for part in encoded(pieces, tokenizer):
                writer.add(part)
                unread += part.ids.count(tokenizer.token_to_id(unknown))
            names = " ".join(str(each.path) for each in found)
            need(writer.count > 0, f"{names}: holds no text")
            need(writer.targets > 0, f"{names}: no conversation has a message of the role assistant that is to be "
                                     "learned")
            if unread:
                note(f"{unread:,} of {writer.count:,} tokens are {unknown}: {tokenizer_path} has no tokens for what is "
                     "written there")
            made = writer.finish()
            if templates or marks.end is not None:
                made[".about"] = Path(folder, "about")
                made[".about"].write_text(json.dumps(describe(tokenizer, marks, templates), indent=1))
            keep_tokenizer(Path(tokenizer_path), target.parent, tokenizer, marks)
            put_in_place(made, target)
    except OSError as error:
        raise ValueError(f"{error.filename or target}: {error.strerror}") from None
    return writer.count, writer.targets


def put_in_place(made: dict[str, Path], target: Path) -> None:
    """Replace a token file and the files beside it, which have its name and other suffixes.

    made: suffix -> new file. A file with another suffix, which an earlier call has left, is removed.

    The earlier tokens go first, and the new tokens come last. So if this is killed, there may be no
    tokens, but there are never tokens beside the mask, the starts or the description of others.
    """
    mask, starts, about = (target.with_suffix(suffix) for suffix in (".mask", ".starts", ".about"))
    for replaced in target, mask, starts, about:
        replaced.unlink(missing_ok=True)
    for beside in mask, starts, about:
        if beside.suffix in made:
            made[beside.suffix].rename(beside)
    made[target.suffix].rename(target)


def keep_tokenizer(path: Path, folder: Path, tokenizer: Any, marks: Marks) -> None:
    """Copy a tokenizer into the folder of its tokens, unless it is there.

    If no tokenizer_config.json belongs to it, write one that names the tokens at which documents
    begin and end. transformers reads these names when it opens an export.
    """
    if not (folder / "tokenizer.json").exists():
        huggingface.copy_tokenizer(path, folder)
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        end = marks.begin if marks.end is None else marks.end
        names = dict(bos_token=tokenizer.id_to_token(marks.begin), eos_token=tokenizer.id_to_token(end))
        unfinished = settings.with_suffix(".tmp")
        unfinished.write_text(json.dumps(names, indent=2))
        unfinished.rename(settings)


def with_template(given: Iterable[Document], tokenizer_path: str,
                  templates: list[Template] | None = None) -> Iterator[Text | Rendered]:
    """Yield the documents as text. The chat template is read at the first conversation, and
    appended to `templates`."""
    templates = [] if templates is None else templates
    for document in given:
        if isinstance(document, Conversation):
            if not templates:
                templates.append(Template(tokenizer_path))
            yield from templates[0].documents(document)
        else:
            yield document


class Writer:
    """Writes the tokens, the mask and the starts of documents into three files of a folder."""

    def __init__(self, folder: Path, marks: Marks, dtype: np.dtype):
        self.marks, self.dtype = marks, dtype
        self.tokens, self.mask, self.starts = folder / "tokens", folder / "mask", folder / "starts"
        self.count = self.targets = 0
        self.needs_starts = False
        self.first_tokens = array("q")  # of each document
        self.stream, self.mask_stream = open(self.tokens, "wb"), open(self.mask, "wb")
        self.stream.write(np.zeros(1, OUR_HEADER).tobytes())

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stream.close()
        self.mask_stream.close()

    def add(self, part: Part) -> None:
        """Append the tokens of a part, and the marks around the document.

        A document that begins with the separator gets no second one. Nor does a conversation that
        begins with the published beginning of a text. In a conversation the separator is no target.

        Who reads the tokens takes each separator for the beginning of a document. If that is wrong,
        the starts must be written, too.
        """
        marks, ids, targets = self.marks, part.ids, targets_of(part)
        learns_end, targets = targets[-1], targets[:-1]
        if part.begins:
            self.first_tokens.append(self.count)
            if ids[:1] != [marks.begin] and (part.spans is None or ids[:1] != [marks.bos]):
                ids, targets = [marks.begin, *ids], np.concatenate(([part.spans is None], targets))
        if part.ends and part.spans is None and marks.end is not None and ids[-1:] != [marks.end]:
            ids, targets = [*ids, marks.end], np.append(targets, True)
        if part.ends and part.spans is not None and learns_end:
            ids, targets = [*ids, marks.turn_end], np.append(targets, True)
        has_separator_inside = marks.begin in ids[int(part.begins):]
        begins_without_separator = part.begins and ids[:1] != [marks.begin]
        self.needs_starts |= has_separator_inside or begins_without_separator
        self.stream.write(np.array(ids, self.dtype).tobytes())
        self.mask_stream.write(targets.astype(bool).tobytes())
        self.count, self.targets = self.count + len(ids), self.targets + int(targets.sum())

    def finish(self) -> dict[str, Path]:
        """Write the header and the starts, and wait until all files are on the disk. Return those that
        are needed: suffix -> file."""
        magic = MAGICS[self.targets < self.count, self.needs_starts]
        self.stream.seek(0)
        self.stream.write(np.array([(magic, self.count, self.dtype.itemsize, self.marks.begin)], OUR_HEADER).tobytes())
        with open(self.starts, "wb") as starts_stream:
            self.first_tokens.tofile(starts_stream)
            for written in self.stream, self.mask_stream, starts_stream:
                written.flush()
                os.fsync(written.fileno())
        made = {".bin": self.tokens}
        if self.targets < self.count:
            made[".mask"] = self.mask
        if self.needs_starts:
            made[".starts"] = self.starts
        return made


# ---- what an export says of the data ---------------------------------------------------------------------------------

def describe(tokenizer: Any, marks: Marks, templates: list[Template]) -> dict[str, Any]:
    """Return the content of tokens.about: the tokens at which a program that generates should stop,
    and the chat template.

    templates: the template of the data's conversations; [] if it has none

    In training, a document begins with the separator. So the template that is exported also writes
    the separator.
    """
    ends = [marks.begin if marks.end is None else marks.end]
    chat_template = ""
    if templates:
        template, = templates
        chat_template = template.template or template.tokenizer.chat_template
        separator = tokenizer.id_to_token(marks.begin)
        if not isinstance(chat_template, str):  # several, which are in the tokenizer's own files
            chat_template = ""
        elif not template.begins_with(separator):
            chat_template = written(separator) + chat_template
        ends += [token for token in ends_of_answers(template, tokenizer, marks) if token not in ends]
    return dict(eos_token_id=ends, chat_template=chat_template)


def written(text: str) -> str:
    """Return a piece of a chat template that writes this text."""
    return "{{ " + json.dumps(text) + " }}"


def ends_of_answers(template: Template, tokenizer: Any, marks: Marks) -> list[int]:
    """Return the tokens that end an answer, if they are special tokens. Other tokens may also be
    inside an answer."""
    text, is_end = template.end_of_answer()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    visible = [(token, text[start:stop].strip()) for token, (start, stop) in zip(encoding.ids, encoding.offsets)
               if text[start:stop].strip()]
    found = [token for token, _ in visible[:1] if token in tokenizer.get_added_tokens_decoder()]
    if visible and not found:
        note(f"answers end with {visible[0][1]!r}, which is no special token: programs that read an export may not "
             "stop there")
    return found if is_end else [*found, marks.turn_end]


def description_of(corpus: Any) -> dict[str, Any]:
    """Return the description of a run.data.Corpus for run.json: cli.DESCRIBED without the longest
    sample."""
    if corpus.is_text:
        is_chat = not all(mask[:].all() for mask in corpus.masks)
        template = written(SEPARATORS[0]) + CHATML if is_chat else ""
        return dict(is_bytes=True, bos=BYTES_SEPARATOR, eos=[BYTES_SEPARATOR], chat_template=template)
    separator = -1 if corpus.separator is None else corpus.separator
    eos: list[int] = []
    template = ""
    for file in corpus.files:
        described = read_description(file)
        for token in described.get("eos_token_id", [separator] if separator >= 0 else []):
            if token not in eos and 0 <= token < corpus.vocab:
                eos.append(token)
        template = template or described.get("chat_template", "")
    return dict(is_bytes=False, bos=separator, eos=eos, chat_template=template)


def read_description(tokens: Path) -> dict[str, Any]:
    """Return the content of tokens.about beside a token file; {} if there is none, or if `tokenize`
    did not write it."""
    try:
        content = json.loads(tokens.with_suffix(".about").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    known = dict(eos_token_id=[0], chat_template="")
    is_ours = isinstance(content, dict) and all(is_of_kind(content.get(name), example)
                                                for name, example in known.items())
    return content if is_ours else {}


def byte_tokenizer() -> Any:
    """Return the tokenizer of a model that reads text as bytes: token n is the byte n, and
    BYTES_SEPARATOR is <|endoftext|>.

    The tokenizers library writes a byte as a character, like GPT-2. A printable byte is its own character. The other
    bytes are the characters from chr(256) on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in prints]
    vocabulary = {chr(byte if byte in prints else 256 + others.index(byte)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SEPARATORS[0], special=True)])
    return tokenizer


def export_tokenizer(folder: str, tokenizer_folder: str, described: dict[str, Any]) -> None:
    """Write the files of a run's tokenizer into the folder of an export, and the chat template of its data.

    tokenizer_folder: the folder of tokenizer.json; "": there is none
    described: the keys bos, eos, is_bytes and chat_template of cli.DESCRIBED
    """
    target = Path(folder)
    path = target / "tokenizer.json"
    settings, template = target / "tokenizer_config.json", target / "chat_template.jinja"
    if not (tokenizer_folder and os.path.samefile(tokenizer_folder, target)):
        for old in huggingface.tokenizer_files(path):  # of an earlier export
            old.unlink()
    if described["is_bytes"]:
        byte_tokenizer().save(str(path))
    elif tokenizer_folder:
        huggingface.copy_tokenizer(Path(tokenizer_folder, "tokenizer.json"), target)
    if described["chat_template"]:
        template.write_text(described["chat_template"], encoding="utf-8")
    # Without tokenizer_config.json, transformers would choose the class of the tokenizer by the model's type.
    if path.is_file() and not settings.exists():
        tokenizer = read_tokenizer(str(path))
        names = dict(bos_token=described["bos"], eos_token=(described["eos"] or [-1])[0])
        content = {name: tokenizer.id_to_token(token) for name, token in names.items() if token >= 0}
        settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | content, indent=1))


# ---- texts for a pretrained model -----------------------------------------------------------------------------------

def users_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penteract")
    except RuntimeError:  # of a user whom this machine does not know
        raise ValueError("there is no home folder in which to keep the tokens of a text: give --checkpoint-dir, or set "
                         "XDG_CACHE_HOME") from None


def tokens_of(found: list[Found], tokenizer_path: str, beside: str, separator: str = "") -> Path:
    """Return the path of the token file that is made of these texts and conversations.

    The first process that asks for it writes it. The others wait for this process, and later runs find the file. On a
    file system without locks, all processes make the tokens, and those of the first that is done are kept.

    beside: the folder of checkpoints, beside which the file is kept; "": in the user's cache
    separator: the token that begins a document; see `separator_of`
    """
    digest = hashlib.blake2b(f"{FORMAT} {separator}".encode(), digest_size=8)
    for file in sorted(huggingface.tokenizer_files(Path(tokenizer_path))):
        digest.update(file.name.encode() + file.read_bytes())
    for each in found:
        for file in [each.path, *(sorted(each.path.rglob("*")) if each.path.is_dir() else [])]:
            what = file.resolve(), size_of(file), file.stat().st_mtime_ns, each.kind
            digest.update(repr(what).encode(errors="surrogateescape"))
    folder = Path(os.path.abspath(beside) + ".tokens") if beside else users_cache()
    folder /= digest.hexdigest()
    tokens = folder / "tokens.bin"
    if tokens.is_file():  # complete, for it is the last file that is written; the folder may be read-only by now
        return tokens
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            with contextlib.suppress(OSError):  # not every shared file system has locks
                fcntl.flock(lock, fcntl.LOCK_EX)
                for left in folder.glob("tmp*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            if not tokens.is_file():
                speaking.set(True)  # on any rank: while it works, the others wait for the lock and say nothing
                note(f"tokenizing it with {tokenizer_path}; later runs find the tokens in {folder}")
                marks = marks_of(read_tokenizer(tokenizer_path), tokenizer_path, separator)
                with TemporaryDirectory(dir=folder) as own:
                    write_tokens(found, tokenizer_path, Path(own, tokens.name), marks)
                    move_unless_there(Path(own), tokens)
                speaking.set(False)
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: {error.strerror}") from None
    return tokens


def move_unless_there(own: Path, tokens: Path) -> None:
    """Move all files of the folder `own` into the folder of `tokens`, which comes last, unless `tokens`
    is there already. Another process, which has made the same files, may be reading them."""
    if tokens.is_file():
        return
    files = [file.relative_to(own) for file in own.rglob("*") if file.is_file() and file.name != tokens.name]
    for file in (*files, tokens.name):
        kept = tokens.parent / file
        kept.parent.mkdir(exist_ok=True)
        (own / file).replace(kept)
