"""Files of text and of records, read as documents: texts and conversations.

    a.txt, b.py, c.txt.gz             one text each, in UTF-8, or in UTF-16 or UTF-32 with a byte order mark
    d.jsonl, e.ndjson.zst, f.json     records: one a line, or a JSON array of them
    g.parquet, folder/                records: Parquet, and what save_to_disk of the datasets library writes

    record                                                         document
    {"text": "…"}                                                  a text
    {"messages": [{"role": "user", "content": "…"}, …]}            a conversation; "tools" and a message's other keys
    [{"role": "user", "content": "…"}, …]                          go to the chat template (run/chat.py)
    {"conversations": [{"from": "human", "value": "…"}, …]}        the same as ShareGPT writes it
    {"prompt": "…", "completion": "…"}                             two messages, or two lists of messages
    {"instruction": "…", "input": "…", "output": "…"}              as Alpaca has it: instruction, newline, input; output

Large texts are read in pieces. Files of a folder that are not read are named, with the reason.
"""
import codecs
import contextlib
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from core.config import need
from run.cli import counted, note
from run.token_files import cannot_be_read, check_fetched

BLOCK = 2**18  # bytes of a text that are read at a time
PACKED_BLOCK = 2**14  # bytes of a .zst file, which may become a thousand times as many
HEAD = 2**20  # bytes at the beginning of a file, whose first line shows the kind of the file
TOKEN_SUFFIXES = ".bin", ".npy"
COMPANIONS = (".mask", ".starts", ".idx", ".about")  # files beside token files that are read with them
TOKENIZER_NAMES = ("tokenizer", "vocab.json", "merges.txt", "special_tokens_map", "added_tokens", "chat_template")
LINES, PACKED = (".jsonl", ".ndjson"), (".gz", ".zst")
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
        codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
         "model": "assistant", "function": "tool", "function_response": "tool", "observation": "tool"}  # of ShareGPT
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
WEIGHTS = "weight", "train", "training", "loss"  # keys of a message: 0 or false takes an answer out of the targets
KINDS = dict(text="text", lines="records, one a line", json="records in JSON", parquet="records in Parquet",
             datasets="records of the datasets library")
WANTED = ("text; messages; conversations; prompt and completion; or instruction and output")
NOWHERE, NO_FILE, TWICE = "links to nowhere", "not files", "links to folders that are read anyway"
OTHER_NAMES = "other names of files that are read anyway"
VARIABLES = "tools", "documents"  # keys of a record that go to the chat template
# Keys of a record that say where it is from. They are no part of a conversation, and are named once for each file.
BOOKKEEPING = {"id", "idx", "index", "uuid", "conversation_id", "prompt_id", "source", "dataset", "url", "date",
               "timestamp", "lang", "language", "license", "meta", "metadata"}


# ---- documents ------------------------------------------------------------------------------------------------------

@dataclass
class Text:
    """A text in pieces, of any lengths."""
    pieces: Iterable[str]


@dataclass
class Conversation:
    messages: list[dict[str, Any]]  # as the chat template gets them: role, content and what else they have
    weights: list[int | None]  # of each message: 1 or 0; None: it has none
    variables: dict[str, Any] = field(default_factory=dict)  # of the template
    where: str = ""  # file and line, for errors


Document = Text | Conversation
Progress = Callable[[int], Any]  # is told how many more bytes of the files have been read


class Found(NamedTuple):
    """A file or a folder to read, and how."""
    path: Path
    kind: str  # tokens, text, lines, json, parquet, datasets
    given: bool  # named by the user, not found in a folder


def documents(found: Found, progress: Progress = lambda count: None, ignored: Iterable[str] = ()) -> Iterator[Document]:
    """The documents of a file. ignored: keys of records that the user leaves out. Raises ValueError naming the file,
    and the line, that cannot be read."""
    try:
        if found.kind == "text":
            yield Text(decoded(found.path, progress))
            return
        unread: dict[str, int] = {}
        for where, record in records(found, progress):
            try:
                document = document_of(record, where, set(ignored), unread)
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{where}: {error}".splitlines()[0]) from None
            if document:
                yield document
        if empty := unread.pop("empty text", 0):
            note(f"{found.path}: {counted(empty, 'record')} left out: the text is empty")
        if unread:
            keys = ", ".join(f"{key} ({counted(n, 'record')})" for key, n in unread.items())
            note(f"{found.path}: keys not used: {keys}")
    except OSError as error:
        raise ValueError(cannot_be_read(found.path, error)) from None


def document_of(record: Any, where: str = "", ignored: set[str] = frozenset(),
                unread: dict[str, int] | None = None) -> Document | None:
    """Turn a record into a document; None: its text is empty. unread: counts the keys that are no part of it.

    Raises ValueError for a record of an unknown shape, and for a key that nothing reads.
    """
    if is_messages(record):
        record = {"messages": record}
    need(isinstance(record, dict), f"is no record: want a JSON object with {WANTED}")
    given = record
    record = {key: value for key, value in record.items() if value is not None and key not in ignored}
    shape, keys = shape_of(record)
    if shape in ("", "text") and "text" in given and given["text"] in (None, ""):
        if unread is not None:
            unread["empty text"] = unread.get("empty text", 0) + 1
        return None
    need(shape != "", f"its keys are {', '.join(map(str, record)) or 'none'}: want {WANTED}")
    if shape == "text":
        need(isinstance(record["text"], str), "text must be text")
        record["text"].encode()  # JSON can hold surrogates, which are no text
        for key in record.keys() - {"text"}:
            if unread is not None:
                unread[key] = unread.get(key, 0) + 1
        return Text([record["text"]])
    messages = messages_in(record, shape)
    if record.get("system"):
        messages = [dict(role="system", content=record["system"]), *messages]
        keys = {*keys, "system"}
    variables = {key: record[key] for key in VARIABLES if record.get(key)}
    if isinstance(variables.get("tools"), str):  # some data sets store them as text
        variables["tools"] = json.loads(variables["tools"])
        if not variables["tools"]:
            variables.pop("tools")
    arguments = record.get("chat_template_kwargs") or {}
    need(isinstance(arguments, dict), "chat_template_kwargs must be an object")
    for key in record.keys() - {*keys, *VARIABLES, "chat_template_kwargs"}:
        need(key in BOOKKEEPING or record[key] in ("", [], {}),
             f"nothing uses its key {key}: take it out, or leave it out by `tokenize --ignore {key}`")
        if unread is not None:
            unread[key] = unread.get(key, 0) + 1
    weights = [weight_of(message) for message in messages]
    messages = [{key: value for key, value in message.items() if key not in WEIGHTS and key not in ignored}
                for message in messages]
    return Conversation(messages, weights, variables | arguments, where)


def shape_of(record: dict[str, Any]) -> tuple[str, set[str]]:
    """The name of a record's shape, "" if it is unknown, and the keys that belong to it."""
    for name, needed, more in (("messages", {"messages"}, set()), ("conversations", {"conversations"}, set()),
                               ("prompt", {"prompt", "completion"}, set()),
                               ("alpaca", {"instruction", "output"}, {"input", "history"}), ("text", {"text"}, set())):
        if needed <= record.keys():
            return name, needed | more
    return "", set()


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in value)


def messages_in(record: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    """The messages of a record, with the keys role and content."""
    if shape in ("messages", "conversations"):
        messages = record[shape]
        if isinstance(messages, str):
            messages = json.loads(messages)
    elif shape == "prompt":
        asked, answered = (value if is_messages(value) else [dict(role=role, content=value)] for role, value in (
            ("user", record["prompt"]), ("assistant", record["completion"])))
        messages = [message | dict(weight=0) if message.get("role") == "assistant" else message for message in asked]
        messages += answered
    else:
        turns = [*record.get("history", []), ["\n".join(filter(None, (record["instruction"], record.get("input")))),
                                              record["output"]]]
        messages = [dict(role=role, content=content) for turn in turns
                    for role, content in zip(("user", "assistant"), turn, strict=True)]
    need(is_messages(messages), f"{shape if shape in record else 'its messages'} must be a list of messages, each with "
                                "role and content, or from and value")
    return [checked(message) for message in messages]


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the keys role and content, and without keys that are null.

    The content is text. It may be missing if the message has another key, such as tool_calls.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message:
        asked = message.pop("from", None)
        message = {"role": ROLES.get(asked, asked) if isinstance(asked, str) else asked, **message}
    if "content" not in message and "value" in message:
        message = {"content" if key == "value" else key: value for key, value in message.items()}
    role, content = message.get("role"), message.get("content")
    need(isinstance(role, str), "a role must be text")
    role = message["role"] = ROLES.get(role, role)
    need(role in KNOWN_ROLES, f"the role {role} is unknown: want one of {', '.join((*KNOWN_ROLES, *ROLES))}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
                 for part in content]
        need(all(isinstance(part, str) for part in parts), "a part of a content is no text: images, audio and the like "
                                                           "cannot be read")
        content = message["content"] = "".join(parts)
    need(isinstance(content, str) or (content is None and len(message) > 1),
         f"a message of the role {role} must have a content, which must be text")
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = json.loads(message["tool_calls"] or "[]")
    json.dumps(message, ensure_ascii=False).encode()  # JSON can hold surrogates, which are no text
    return message


def weight_of(message: dict[str, Any]) -> int | None:
    """The weight that a message gives itself: 1 or 0; None if it gives none."""
    found = [(key, message[key]) for key in WEIGHTS if key in message]
    for key, value in found:
        need(isinstance(value, bool | int | float) and value in (0, 1),
             f"{key} {value} of a message: must be 0 or 1, which is whether its tokens are targets")
        need(not value or message["role"] == "assistant",
             f"{key} {value} of a message of the role {message['role']}: only what an assistant says can be a target")
    return min((int(value) for _, value in found), default=None)


# ---- files ----------------------------------------------------------------------------------------------------------

def files_in(path: Path) -> list[Found]:
    """Return the files to read at a path: the file, or the files of a folder.

    If a folder has token files, only they are read; if it has none, all its files of text and records are. Files that
    are not read are named on stderr, with the reason.
    """
    need(path.exists(), f"{path}: no such file or folder")
    if path.is_file():
        check_fetched(path)
        return [Found(path, kind_of(path, given=True), given=True)]
    if kind := kind_of_folder(path):
        return [Found(path, kind, given=True)]
    inside, left_out = walk(path)
    tokens = [file for file in inside if file.suffix.lower() in TOKEN_SUFFIXES]
    if tokens:
        companions = {file.with_suffix(suffix) for file in tokens for suffix in COMPANIONS}
        others = [file for file in inside if file not in companions and file not in tokens
                  and not file.name.startswith(TOKENIZER_NAMES)]
        left_out["not token files, which the folder has"] = others
        chosen = [Found(file, "tokens", given=False) for file in tokens]
    else:
        chosen = []
        for file in inside:
            if reason := unreadable(file):
                left_out.setdefault(reason, []).append(file)
            else:
                chosen.append(Found(file, kind_of_folder(file) or kind_of(file, given=False), given=False))
    for reason, files in left_out.items():
        if files:
            note(f"{path}: not read, {reason}: {named([file.relative_to(path) for file in files])}")
    need(chosen != [], f"{path}: holds no text and no .bin or .npy files")
    for each in chosen:
        if each.kind != "datasets":
            check_fetched(each.path)
    return chosen


def walk(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """Return all files in a folder, sorted, and the files that are left out, by the reason. Links are followed; of the
    names of one file, one with a suffix is taken, which says what it is: the cache of a hub has another without."""
    inside, seen = [], set()
    left_out: dict[str, list[Path]] = {"hidden": [], NOWHERE: [], NO_FILE: [], TWICE: []}
    for here, folders, names in os.walk(folder, followlinks=True):
        for place in (folder, *(Path(here, name) for name in folders)):  # os.walk skips unreadable folders silently
            need(os.access(place, os.R_OK | os.X_OK), f"{place}: cannot be read: Permission denied")
        seen.add(os.path.realpath(here))
        for name in sorted(folders):
            place = Path(here, name)
            if name.startswith((".", "__pycache__")):
                left_out["hidden"].append(place)
                folders.remove(name)
            elif os.path.realpath(place) in seen:
                left_out[TWICE].append(place)
                folders.remove(name)
            elif kind_of_folder(place):
                inside.append(place)
                folders.remove(name)
        for name in names:
            file = Path(here, name)
            if name.startswith((".", "__pycache__")):
                left_out["hidden"].append(file)
            elif file.is_symlink() and not file.exists():
                left_out[NOWHERE].append(file)
            elif not file.is_file():
                left_out[NO_FILE].append(file)
            else:
                inside.append(file)
    names_of: dict[str, list[Path]] = {}
    for file in sorted(inside, key=lambda file: (file.suffix == "", file)):
        names_of.setdefault(os.path.realpath(file), []).append(file)
    left_out[OTHER_NAMES] = sorted(file for names in names_of.values() for file in names[1:])
    return sorted(names[0] for names in names_of.values()), left_out


def unreadable(file: Path) -> str:
    """Why a file of a folder is no text; "" if it is."""
    if file.is_dir() or file.suffix.lower() == ".parquet":
        return ""
    if not file.stat().st_size:
        return "empty"
    try:
        if encoding_of(head_of(file, 4)) in ("utf-16", "utf-32"):
            return ""
        if any(0 in block for block in blocks(file)):
            return "zero bytes inside, so they are no text"
    except OSError as error:
        raise ValueError(cannot_be_read(file, error)) from None
    return ""


def named(files: list[Path | str], most: int = 5) -> str:
    """The first files of a list, and how many more it has."""
    return ", ".join(map(str, files[:most])) + (f" and {len(files) - most:,} more" if len(files) > most else "")


def kind_of_folder(folder: Path) -> str:
    """Return "datasets" for a folder that save_to_disk has written, and "" for any other folder."""
    is_set = (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file())
    return "datasets" if is_set else ""


def kind_of(file: Path, given: bool) -> str:
    """Return the kind of a file: by its name, or by its first line if the name says nothing."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in TOKEN_SUFFIXES:
        return "tokens"
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in LINES:
        return "lines"
    if last == ".parquet":
        return "parquet"
    try:
        head = head_of(file, HEAD)
    except OSError as error:
        raise ValueError(cannot_be_read(file, error)) from None
    text = head.decode(encoding_of(head), errors="replace").lstrip()
    if not text.startswith(("{", "[")):
        need(last != ".json" or not given or text != "", f"{file}: is empty")
        return "text"
    line, _, more = text.partition("\n")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None  # an object or an array of several lines, or no JSON
    if is_messages(first) and more.strip() == "" and last == ".json":
        return "json"
    if is_messages(first) or (isinstance(first, dict) and shape_of(first)[0]):
        return "lines"
    if last == ".json" and (given or holds_records(file)):
        return "json"
    return "text"


def holds_records(file: Path) -> bool:
    """Whether a .json file in a folder is a record, or an array of records. Other JSON is text, such as code has."""
    try:
        content = load_json(file)
    except ValueError:
        return False
    first = content[0] if isinstance(content, list) and content else content
    return is_messages(content) or is_messages(first) or (isinstance(first, dict) and shape_of(first)[0] != "")


def standard_library() -> list[Found]:
    """Text that every machine has: the sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(file for file in root.rglob("*.py") if file.stat().st_size)
    return [Found(file, "text", given=False) for file in files if not left_out & set(file.relative_to(root).parts)]


def note_kinds(kinds: list[str], found: list[Found]) -> None:
    """Say how each file is read. kinds: the kind of each file, in words."""
    by_kind: dict[str, list[Path]] = {}
    for kind, each in zip(kinds, found):
        by_kind.setdefault(kind, []).append(each.path)
    for kind, paths in by_kind.items():
        note(f"read as {kind}: {named(paths)}")


# ---- bytes and text -------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def opened(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the content, unpacked; the file that is read, for its position)."""
    with open(file, "rb") as raw:
        if file.suffix.lower() == ".gz":
            try:
                with gzip.open(raw) as stream:
                    yield stream, raw
            except (EOFError, zlib.error) as error:  # it is cut, or damaged
                raise ValueError(cannot_be_read(file, error)) from None
        elif file.suffix.lower() == ".zst":
            yield io.BufferedReader(Unpacked(raw, file), BLOCK), raw
        else:
            yield raw, raw


class Unpacked(io.RawIOBase):
    """The content of a .zst file, frame by frame. Raises ValueError if it is damaged or cut.

    We look for the end of each frame, because the library's own reader takes a file that is cut for a shorter one.
    """

    def __init__(self, packed: BinaryIO, file: Path):
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{file}: needs `pip install zstandard`, or unpack it") from None
        self.packed, self.file, self.library = packed, file, zstandard
        self.frame: Any = None  # the one that is being unpacked
        self.rest = b""  # packed bytes behind it that have been read
        self.content = memoryview(b"")  # unpacked bytes that nobody has asked for yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.content:
            block = self.rest or self.packed.read(PACKED_BLOCK)
            if not block:
                need(self.frame is None, f"{self.file}: cannot be unpacked: it is cut")
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
            try:
                self.content, self.rest = memoryview(self.frame.decompress(block)), b""
            except self.library.ZstdError as error:
                raise ValueError(f"{self.file}: cannot be unpacked: {error}") from None
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.content))
        buffer[:count], self.content = self.content[:count], self.content[count:]
        return count


def head_of(file: Path, count: int) -> bytes:
    with opened(file) as (stream, _):
        return stream.read(count)


def blocks(file: Path, progress: Progress = lambda count: None) -> Iterator[bytes]:
    with opened(file) as (stream, raw):
        before = 0
        while block := stream.read(BLOCK):
            yield block
            progress(raw.tell() - before)
            before = raw.tell()


def encoding_of(head: bytes) -> str:
    return next((encoding for mark, encoding in BOMS.items() if head.startswith(mark)), "utf-8")


def decoded(file: Path, progress: Progress = lambda count: None) -> Iterator[str]:
    """The text of a file in pieces, without a byte order mark. Raises ValueError for bytes that are no text."""
    decoder, before, some = None, 0, False
    for block in blocks(file, progress):
        decoder = decoder or codecs.getincrementaldecoder(encoding_of(block))()
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as error:
            place = before - pending + error.start
            raise ValueError(f"{file}: is no UTF-8 text ({error.reason} at byte {place:,})") from None
        need("\0" not in text, f"{file}: holds zero bytes, so it is not text; token files end in .bin or .npy")
        before, some = before + len(block), True
        yield text
    need(some, f"{file}: is empty")
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is no UTF-8 text ({error.reason} at byte {before - len(error.object):,})") from None


def lines_of(file: Path, progress: Progress) -> Iterator[str]:
    """The lines of a text, without their ends; of all that Unicode calls a line's end only \\n and \\r\\n are one."""
    rest: list[str] = []
    for text in decoded(file, progress):
        first, *others = text.split("\n")
        rest.append(first)
        for line in others:
            yield "".join(rest).removesuffix("\r")
            rest = [line]
    yield "".join(rest)


# ---- records --------------------------------------------------------------------------------------------------------

def records(found: Found, progress: Progress) -> Iterator[tuple[str, Any]]:
    """(where it is, the record) for all records of a file."""
    file = found.path
    if found.kind == "lines":
        for number, line in enumerate(lines_of(file, progress), 1):
            if line.strip():
                where = f"{file}: line {number:,}"
                try:
                    record = parse_json(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where}: is not valid JSON: {error}".splitlines()[0]) from None
                yield where, record
        return
    if found.kind == "json":
        content = load_json(file, parse_json)
        rows = content if isinstance(content, list) and not is_messages(content) else [content]
        need(rows != [], f"{file}: is empty")
    else:
        rows = parquet_rows(file) if found.kind == "parquet" else dataset_rows(file)
    for number, row in enumerate(rows, 1):
        yield f"{file}: record {number:,}", row
    progress(size_of(file))


def load_json(file: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    text = "".join(decoded(file))
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON: {error}") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text, which may begin with a byte order mark, as lines of joined files do. Raises ValueError
    for an object that has a key twice: Python would keep the last one only."""
    return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=dict_of)


def dict_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)} twice")
    return found


def import_arrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ValueError(f"{file}: needs `pip install pyarrow`") from None
    return pyarrow


def parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    arrow = import_arrow(file)
    try:
        with arrow.parquet.ParquetFile(file) as stream:
            for batch in stream.iter_batches(1024):
                yield from map(row_of, batch.to_pylist())
    except arrow.ArrowException as error:
        raise ValueError(f"{file}: cannot be read as Parquet: {error}".splitlines()[0]) from None


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what Arrow adds: it gives every object in a column the keys of all of them, and null for a value.
    In a conversation a template would write these, for example as arguments of a call that never had them."""
    return {key: without_nulls(value) for key, value in row.items()}


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def dataset_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder that save_to_disk has written: state.json names its files, Arrow streams."""
    arrow = import_arrow(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        raise ValueError(f"{folder}: has several splits: give one of {', '.join(str(folder / s) for s in splits)}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        need(not state.get("_indices_data_files"), f"{folder}: is a selection of rows, which only the datasets library "
                                                   "reads: save it again, after flatten_indices()")
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]  # none outside the folder
        for file in files:
            with arrow.memory_map(str(file)) as source, arrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    for first in range(0, batch.num_rows, 1024):
                        yield from map(row_of, batch.slice(first, 1024).to_pylist())
    except (arrow.ArrowException, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: cannot be read as data of the datasets library: {error}".splitlines()[0]) from None


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
