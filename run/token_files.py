"""Token files: the tokens of a corpus, where its documents begin, and which of its tokens are targets.

    tokens.bin      [ header | tokens, uint16 or uint32 ]
    tokens.mask     uint8, one for each token: 1, the model learns to predict it; 0, it only reads it
    tokens.starts   int64, the position of each document's first token
    tokens.about    what ends a text or an answer, and the chat template, for exports (run/tokenizing.py)

The last three are written where they are needed. Without a mask all tokens are targets. Without starts, a document
begins at every separator, the token that the header names. Starts are needed where a text, or the template of a
conversation, has that token inside a document: no value of a token says where a document begins.

We also read .npy (one dimension of integers), llm.c's .bin with its header of 256 int32, Megatron's .bin with its .idx,
and .bin without a header. For the last, `width_in` finds out from the bytes how wide a token is.

Files are memory-mapped, so their size does not matter. A corpus keeps few of them open at once, because it may have
more files than a process may open.
"""
import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from core.config import need
from run.cli import note

LLM_C = {20240520: (1, 2, 50256), 20240801: (7, 4, 128000)}  # magic: version, bytes per token, separator
LLM_C_HEADER = 256 * 4  # bytes
OUR_HEADER = np.dtype([("magic", "S8"), ("count", "<i8"), ("itemsize", "<i4"), ("separator", "<i4")])
MAGIC, MAGIC_MASKED = b"penterac", b"pentmask"  # the second: of a file that was written with a mask beside it
MAGIC_STARTS, MAGIC_BOTH = b"pentdocs", b"pentboth"  # with starts; with a mask and starts
MAGICS = {(False, False): MAGIC, (True, False): MAGIC_MASKED, (False, True): MAGIC_STARTS, (True, True): MAGIC_BOTH}
MEGATRON, OLD_MEGATRON = b"MMIDIDX\0\0", b"TNTIDX\0\0"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # by the number in an .idx
OPEN_AT_ONCE = 32  # arrays of a corpus; each keeps a file descriptor
BLOCK_BYTES, BLOCKS = 2**15, 64  # which show the width of a token
POINTER = b"version https://git-lfs"  # how the file begins that Git LFS leaves in place of one that it has not fetched
EVIDENCE = 16  # so many tokens other than 0 would not all be at even places by chance


# ---- arrays in files ------------------------------------------------------------------------------------------------

class ArrayInFile(NamedTuple):
    """An array of one dimension in a file, which is mapped when a part of it is read."""
    open: Callable[[Path, str, int, int], np.ndarray]
    file: Path
    dtype: np.dtype
    offset: int  # of its first element, in bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: slice | int) -> np.ndarray:
        return self.open(self.file, self.dtype.str, self.offset, self.count)[places]


Array = np.ndarray | ArrayInFile


def opener() -> Callable[[Path, str, int, int], np.ndarray]:
    """A function that maps arrays in files and keeps the latest OPEN_AT_ONCE of them."""
    return lru_cache(OPEN_AT_ONCE)(map_array)


def map_array(file: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    try:
        return np.memmap(file, dtype, "r", offset, (count,))
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        raise ValueError(cannot_be_read(file, error)) from None


def cannot_be_read(file: Path, error: Exception) -> str:
    """The line about a file that the system does not let us open or read."""
    why = getattr(error, "strerror", None) or error
    hint = ": raise the limit, such as by `ulimit -n 4096`" if getattr(error, "errno", 0) == errno.EMFILE else ""
    return f"{file}: cannot be read: {why}{hint}"


def check_fetched(file: Path) -> None:
    """Raise ValueError for a pointer of Git LFS: read as text, or as tokens, it would be trained on."""
    try:
        with open(file, "rb") as stream:
            begin = stream.read(len(POINTER))
    except OSError as error:
        raise ValueError(cannot_be_read(file, error)) from None
    need(begin != POINTER, f"{file}: is a pointer of Git LFS in place of the file: fetch it with `git lfs pull`")


# ---- formats --------------------------------------------------------------------------------------------------------

@dataclass
class TokenFile:
    path: Path
    tokens: Array
    targets: Array  # uint8: 1 for a target
    separator: int | None = None  # the token that begins a document; None: the format names none
    starts: Array | None = None  # the position of each document's first token; None: they follow from the separator
    read_as: str = ""

    def begins(self, first: int, tokens: np.ndarray) -> np.ndarray:
        """Return which of these tokens begin a document. first: the number of the first of them. Without starts and
        without a separator, the file is one document."""
        if self.starts is None and self.separator is not None:
            return tokens == self.separator
        begins, starts = np.zeros(len(tokens), bool), np.zeros(1, np.int64) if self.starts is None else self.starts[:]
        inside = slice(*np.searchsorted(starts, [first, first + len(tokens)]))
        begins[starts[inside] - first] = True
        return begins


def open_token_file(file: Path, dtype: str, vocab: int, open_array: Callable) -> TokenFile:
    """Map a .bin or .npy file. dtype: the type of tokens in a .bin without a header. auto: its bytes decide, and if
    they show nothing, the vocabulary. Raises ValueError naming the file that is empty, truncated or in another format.
    """
    if file.suffix.lower() == ".npy":
        found = open_npy(file, open_array)
    else:
        found = open_bin(file, dtype, vocab, open_array)
    found.targets = open_mask(found, open_array)
    return found


def open_npy(file: Path, open_array: Callable) -> TokenFile:
    try:
        tokens = np.lib.format.open_memmap(file, "r")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file}: cannot be read as .npy, truncated or of another format ({error}); if it has tokens "
                         "without a header, as OLMo's, name it .bin") from None
    need(tokens.ndim == 1 and tokens.dtype.kind in "iu",
         f"{file}: holds {tokens.ndim} dimensions of {tokens.dtype}: need one, of integers")
    need(len(tokens) > 0, f"{file}: is empty")
    array = ArrayInFile(open_array, file, tokens.dtype, tokens.offset, len(tokens))
    return TokenFile(file, array, all_targets(array), read_as=f".npy of {tokens.dtype}")


def open_bin(file: Path, dtype: str, vocab: int, open_array: Callable) -> TokenFile:
    index = file.with_suffix(".idx")
    if index.exists():
        return open_megatron(file, index, open_array)
    nbytes, ours, llm_c = file.stat().st_size, np.fromfile(file, OUR_HEADER, 1), np.fromfile(file, np.int32, 3).tolist()
    separator, starts = None, None
    if len(ours) and ours[0]["magic"] in MAGICS.values():
        magic, count, itemsize, separator = ours[0].tolist()
        need(itemsize in (2, 4), f"{file}: its header is damaged")
        start, kind = OUR_HEADER.itemsize, np.dtype(f"u{itemsize}")
        read_as = f"tokens of {kind}"
        if magic in (MAGIC_STARTS, MAGIC_BOTH):
            starts = open_starts(file, count, open_array)
    elif len(llm_c) == 3 and llm_c[0] in LLM_C:
        magic, version, count = llm_c
        (known, itemsize, separator), start = LLM_C[magic], LLM_C_HEADER
        kind = np.dtype(f"u{itemsize}")
        need(version == known, f"{file}: version {version} of llm.c's format {magic} is unknown: know {known}")
        read_as = f"llm.c's tokens of {kind}"
    else:
        kind, start = dtype_of(file, dtype, vocab), 0
        count, rest = divmod(nbytes, kind.itemsize)
        need(rest == 0, f"{file}: {nbytes:,} bytes are not a whole number of {kind} tokens: truncated, or of another "
                        "--data-dtype")
        read_as = f"{kind} without a header"
    present = (nbytes - start) / kind.itemsize
    need(present == count, f"{file}: its header promises {count:,} tokens and {max(present, 0):,.10g} follow: "
                           f"{'truncated' if present < count else 'not this format'}")
    need(count > 0, f"{file}: is empty")
    array = ArrayInFile(open_array, file, kind, start, count)
    return TokenFile(file, array, all_targets(array), separator, starts, read_as)


def dtype_of(file: Path, dtype: str, vocab: int) -> np.dtype:
    """The type of the tokens in a .bin file without a header."""
    default = np.dtype(np.uint16 if vocab <= 2**16 else np.uint32) if dtype == "auto" else np.dtype(dtype)
    width = width_in(file, vocab)
    if width > default.itemsize and dtype == "auto":
        return np.dtype(f"u{width}")
    if width > default.itemsize:
        note(f"{file}: looks like tokens of {width} bytes, and is read as {dtype}, as --data-dtype says")
    return default


def width_in(file: Path, vocab: int) -> int:
    """Return 8 or 4 if the file is tokens of that many bytes, all inside the vocabulary; 0 if neither fits.

    A file of 16-bit tokens fits only if every token at an odd place is 0, which no real text does. It could happen
    where almost all tokens are 0, so at least EVIDENCE tokens must not be 0. Blocks all over the file are read.
    """
    nbytes = file.stat().st_size
    for width in (8, 4):
        if nbytes % width:
            continue
        last = max(0, nbytes - BLOCK_BYTES) // width
        values = [np.fromfile(file, f"u{width}", BLOCK_BYTES // width, offset=int(place) * width)
                  for place in np.unique(np.linspace(0, last, BLOCKS, dtype=np.int64))]
        if all((block < vocab).all() for block in values) and sum(map(np.count_nonzero, values)) >= EVIDENCE:
            return width
    return 0


def open_megatron(file: Path, index: Path, open_array: Callable) -> TokenFile:
    """Map a .bin file of Megatron-LM. Its .idx has the type of the tokens and where documents begin:

        magic, 9 bytes | version, u8 | type, u1 | sequences, u8 | documents + 1, u8
        the length of each sequence, i4 | the place of each sequence in bytes, i8
        the first sequence of each document, i8, and at last the number of sequences
    """
    with open(index, "rb") as stream:
        magic = stream.read(len(MEGATRON))
        need(not magic.startswith(OLD_MEGATRON), f"{index}: is of Megatron's old format (TNTIDX): write the data anew "
                                                 "with its tools/preprocess_data.py")
        need(magic == MEGATRON, f"{index}: is no index of Megatron: remove it if {file.name} needs none")
        version, = np.fromfile(stream, "<u8", 1) if index.stat().st_size >= 34 else [0]
        need(version == 1, f"{index}: is truncated, or of version {version}: know 1")
        code, = np.fromfile(stream, "u1", 1)
        sequences, documents = np.fromfile(stream, "<u8", 2).tolist()
        need(code in MEGATRON_DTYPES, f"{index}: names the type {code}, which is none of integers")
        need(stream.tell() + 12 * sequences + 8 * documents <= index.stat().st_size, f"{index}: is truncated")
        lengths = np.fromfile(stream, "<i4", sequences).astype(np.int64)
        places, first_of = np.fromfile(stream, "<i8", sequences), np.fromfile(stream, "<i8", documents)
    kind = np.dtype(MEGATRON_DTYPES[int(code)])
    count = file.stat().st_size // kind.itemsize
    need(count > 0, f"{file}: is empty")
    need(lengths.sum() == count and count * kind.itemsize == file.stat().st_size,
         f"{file}: has {file.stat().st_size:,} bytes, and {index.name} promises {lengths.sum():,} tokens of {kind}")
    end_to_end = np.cumsum(lengths) - lengths
    need(((first_of >= 0) & (first_of <= sequences)).all() and (lengths >= 0).all()
         and (places == end_to_end * kind.itemsize).all(), f"{index}: is damaged: sequences must follow each other")
    starts = np.unique(places[first_of[first_of < sequences]] // kind.itemsize)  # the last one is the end of the file
    array = ArrayInFile(open_array, file, kind, 0, count)
    return TokenFile(file, array, all_targets(array), None, starts, f"Megatron's tokens of {kind}")


def open_starts(file: Path, count: int, open_array: Callable) -> Array:
    path = file.with_suffix(".starts")
    need(path.exists(), f"{path}: is missing: {file} was written with the starts of its documents beside it")
    nbytes = path.stat().st_size
    need(nbytes % 8 == 0 and 0 < nbytes <= 8 * count, f"{path}: has {nbytes:,} bytes: need int64, one for each "
                                                      "document")
    starts = ArrayInFile(open_array, path, np.dtype(np.int64), 0, nbytes // 8)
    need(0 <= starts[0] and starts[-1] < count, f"{path}: is of another file than {file.name}")
    return starts


def all_targets(tokens: Array) -> np.ndarray:
    return np.broadcast_to(np.uint8(1), (len(tokens),))


def open_mask(found: TokenFile, open_array: Callable) -> Array:
    """Which tokens of a file are targets. All are, if no mask is beside it."""
    file, path = found.path, found.path.with_suffix(".mask")
    if not path.exists():
        with open(file, "rb") as stream:
            need(stream.read(8) not in (MAGIC_MASKED, MAGIC_BOTH),
                 f"{path}: is missing: {file} was written with a mask beside it")
        return all_targets(found.tokens)
    nbytes, count = path.stat().st_size, len(found.tokens)
    need(nbytes == count, f"{path}: has {nbytes:,} bytes for the {count:,} tokens of {file.name}: need uint8, one for "
                          "each")
    return ArrayInFile(open_array, path, np.dtype(np.uint8), 0, nbytes)
