"""Checkpoints: any grid writes them, any other reads them.

    OUT/step-000300/      __0_0.distcp, __1_0.distcp, ...   one file per rank: boxes of tensors
                          .metadata                         which box is where
                          run.json                          step, data, settings, and a checksum of every file
    OUT/latest            the name of the newest

A checkpoint does not depend on the grid that wrote it. Every tensor has a global name, such as
"layers.7.attention.wq/master" (or /m, /v), and a global shape. A rank has a few boxes of it (`pieces` in zero.py). If
several ranks have the same elements, one of them writes them. To read, a rank asks for the boxes that it needs on
its own grid. So no tensor is gathered. The model's own weights are not saved, because they are the master weights,
rounded.

torch.distributed.checkpoint (DCP) stores boxes, and plans which file has which box. This file decides which boxes there
are: it gives a list of `Piece`s to a planner, DCP's interface for that, both to save and to read.

A save is asynchronous and atomic. The step waits until the previous save is done and the state has been copied
("staged"). On a GPU the copies to pinned memory are queued before the kernels of the next update. A thread writes them,
on a process group of its own. All files are on the disk (fsync) before the folder gets its name, and `latest` changes
last. So every folder with the name of a checkpoint is complete. If a disk or a person damages a file later, its
checksum shows it.

    python -m run.checkpoint export CKPT FOLDER        its weights, as transformers reads them
"""
import errno
import fcntl
import gc
import hashlib
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from tqdm import tqdm

from core import config
from core.collectives import ALONE, Group, Groups
from core.config import is_of_kind, need, setting
from core.param import Box, Source, Spec, box_shape, is_first_replica, shard_slice
from run import cli, huggingface, tokenizing
from run.ranks import SAVING, agree, gather_objects

LOCK_WAIT_S = 5.0
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}  # of a file system without them

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so of every save of one process


# ---- what is saved --------------------------------------------------------------------------------------------------

class Piece(NamedTuple):
    """A box of a global tensor. values: a tensor of the box's shape, read by a save and filled by a load."""
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(part.start for part in self.box), torch.Size(box_shape(self.box)))


def whole(name: str, values: Tensor) -> Piece:
    """The piece that is the whole tensor."""
    return Piece(name, tuple(values.shape), tuple(slice(0, n) for n in values.shape), values)


def pieces_of_run(optimizer, routers: list[torch.nn.Module], groups: Groups, saving: bool,
                  site: int | None = None) -> Iterator[Piece]:
    """Yield all tensors of a run's state on this rank, as views.

    With several sites, each has a state of its own, except that the outer optimizer's is the same on all (diloco.py).
    Site 0's tensors have the same names as in a run with one site.

    optimizer, routers: a zero.Optimizer, and the model's ep.Routers
    saving: yield only the tensors that this rank writes; all ranks together write every element once
    site: the site whose state it is, by default this rank's
    """
    site = groups["sites"].rank if site is None else site
    for bucket in optimizer.buckets:
        part = None
        if saving:  # ranks with the same shard write a part of it each
            part = shard_slice(len(bucket.master), bucket.replicas.size, bucket.replicas.rank)
        for param, box, place in bucket.pieces(part):
            if not saving or is_first_replica(param.spec, bucket.groups):
                for what, flat in bucket.state.items():
                    name = f"{param.spec.name}/{what}"
                    if what not in config.OUTER_STATE:
                        name = of_site(name, site)
                    elif saving and site > 0:
                        continue
                    yield Piece(name, param.spec.shape, box, flat[place].view(box_shape(box)))
    first = not any(groups[axis].rank for axis in ("data", "tp"))
    numbers = {name: (value, first and groups["pp"].rank == 0) for name, value in optimizer.extra_state().items()}
    biases = {router.name: (router.bias, first) for router in routers}
    for name, (value, is_saved_here) in (numbers | biases).items():
        if is_saved_here or not saving:
            yield whole(of_site(name, site), value)


def of_site(name: str, site: int) -> str:
    """The name under which a checkpoint has the tensor of a site."""
    return f"{name}@{site}" if site else name


class Stage:
    """Copies of pieces, in memory that is allocated once. The memory is pinned if the pieces are on a GPU."""

    def __init__(self, pieces: list[Piece]):
        self.pieces = pieces
        on_gpu = any(piece.values.is_cuda for piece in pieces)
        self.copies = [piece._replace(values=torch.empty(piece.values.shape, dtype=piece.values.dtype,
                                                         pin_memory=on_gpu)) for piece in pieces]
        self.copied = torch.cuda.Event() if on_gpu else None

    def copy(self) -> None:
        """Queue the copies. On a GPU they are behind the last update's kernels and before the next one's."""
        for piece, copy in zip(self.pieces, self.copies):
            copy.values.copy_(piece.values, non_blocking=True)
        if self.copied:
            self.copied.record()

    def wait(self) -> None:
        if self.copied:
            self.copied.synchronize()


# ---- planners for DCP -----------------------------------------------------------------------------------------------

class SaveBoxes(DefaultSavePlanner):
    """Writes pieces. DCP checks that the pieces of all ranks together cover each tensor exactly once."""

    def __init__(self, pieces: list[Piece]):
        super().__init__(flatten_state_dict=False)
        self.values = {(piece.name, piece.chunk.offsets): piece.values for piece in pieces}
        self.plan = SavePlan([
            WriteItem(MetadataIndex(piece.name, piece.chunk.offsets), WriteItemType.SHARD,
                      tensor_data=TensorWriteData(piece.chunk, TensorProperties(piece.values.dtype),
                                                  torch.Size(piece.shape)))
            for piece in pieces])

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.values[index.fqn, index.offset]


class LoadBoxes(DefaultLoadPlanner):
    """Fills pieces. Raises ValueError for a tensor that the checkpoint lacks, has in another shape, or only in part."""

    def __init__(self, pieces: Iterable[Piece], metadata: Metadata, path: Path):
        super().__init__()
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.pieces.setdefault(piece.name, []).append(piece)
        stored, items = metadata.state_dict_metadata, []
        here = {name: shown(named[0].shape) for name, named in self.pieces.items()}
        there = {name: shown(stored[name].size) if name in stored else "missing" for name in here}
        differ = [f"{name} is {here[name]} here and {there[name]} there" for name in here if here[name] != there[name]]
        if differ:
            more = f", and {len(differ) - 1} more tensors differ" if differ[1:] else ""
            raise ValueError(f"{path} does not fit the settings (model, --optimizer, --dtype fp16): {differ[0]}{more}")
        for name, named in self.pieces.items():
            found = create_read_items_for_chunk_list(name, stored[name], [piece.chunk for piece in named])
            wanted = sum(piece.values.numel() for piece in named)
            need(sum(math.prod(item.lengths) for item in found) == wanted, f"{path} does not have all of {name}")
            items += found
        self.plan = LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn][index.index].values.detach()


def shown(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


# ---- saving ---------------------------------------------------------------------------------------------------------

class Saver:
    """Writes the checkpoints of a run. All ranks must call its methods, in the same order.

    folder: a folder on a file system that all ranks share
    pieces: the tensors that this rank saves, views of the state
    keep: how many checkpoints are kept; 0: all
    step: the step of the checkpoint in this folder from which the run was resumed; None if it was not

    Raises ValueError if the folder cannot be written to, has too little room for a checkpoint, is in use by another
    run, or has checkpoints of another run.
    """

    def __init__(self, folder: str, pieces: list[Piece], keep: int, group: Group, step: int | None = None):
        self.folder, self.keep, self.group = Path(folder), keep, group
        self.stage, self.thread, self.error = Stage(pieces), None, ""
        self.bytes_per_s = 0.0  # of the last save
        self.newest = step  # the step of this run's newest checkpoint in the folder; None: there is none
        self.nbytes = sum(gather_objects(sum(piece.values.nbytes for piece in pieces), group))
        agree(lambda: self.open_folder(step) if group.rank == 0 else None, group)

    def open_folder(self, step: int | None) -> None:
        """Take the folder for this run, and remove unfinished checkpoints of an earlier run.

        A folder that has the name of a checkpoint and is none is renamed. So are checkpoints of later steps than the
        resumed one, which are damaged or from before a rewind: neither --resume auto nor `keep` may count them."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / "lock", "ab")
            self.take_lock()
            for unfinished in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
                shutil.rmtree(unfinished)
            need(not (self.folder / "latest").is_dir(), f"{self.folder}/latest: is a folder: move it away")
            free = shutil.disk_usage(self.folder).free
            need(free >= self.nbytes, f"{self.folder}: a checkpoint takes {self.nbytes / 1e9:.3g} GB, and "
                                      f"{free / 1e9:.3g} GB are free")
            need(step is not None or not cli.checkpoints_in(self.folder),
                 f"--checkpoint-dir {self.folder}: has checkpoints of another run, or of this one from its beginning: "
                 "give --resume auto to continue it, or another folder")
            for path in self.folder.glob("step-*"):
                if cli.step_of(path) >= 0 and not (path / "run.json").is_file():  # somebody's, or a copy of a part
                    set_aside(path, "is no checkpoint: it has no run.json")
            self.begin_at(step or 0)
            self.newest = step
        except OSError as error:
            raise ValueError(f"--checkpoint-dir {self.folder}: cannot be written to: {error.strerror}") from None

    def take_lock(self) -> None:
        """Wait a moment for the lock, which the kernel frees when a killed run's process is gone. Where the file system
        has no locks, only warn: two runs in one folder are a mistake, and not the rule."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                need(time.monotonic() < deadline, f"--checkpoint-dir {self.folder}: another run writes there: use "
                                                  "another folder")
                time.sleep(0.2)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                return cli.warn(f"--checkpoint-dir {self.folder}: this file system has no locks ({error.strerror}), so "
                                "nothing prevents another run from writing there")

    def begin_at(self, step: int) -> None:
        """Rename the checkpoints of later steps than this one."""
        self.newest = step
        for path in cli.checkpoints_in(self.folder) if self.group.rank == 0 else ():
            if cli.step_of(path) > step:
                set_aside(path, "is of a later step than the one resumed")

    def save(self, step: int, run: dict) -> float:
        """Save in the background, unless this step has been saved. Return the seconds that this call took.

        run: further entries of run.json"""
        began = time.perf_counter()
        self.finish()  # the previous save reads the same copies
        if step == self.newest:  # a run that was resumed and ends before its first step
            return 0.0
        self.stage.copy()
        self.thread = threading.Thread(target=self.write, args=(step, run), name=SAVING)
        self.thread.start()
        return time.perf_counter() - began

    def finish(self) -> str:
        """Wait until the current save is on the disk. Return why it failed, or "". Training goes on after a failure, of
        which rank 0 warns."""
        if self.thread:
            self.thread.join()
        self.thread = None
        error, self.error = self.error, ""
        if error and self.group.rank == 0:
            print(f"train.py: warning: {error}", file=sys.stderr, flush=True)
        return error

    def write(self, step: int, run: dict) -> None:
        """The body of the thread that saves."""
        began, temporary, problem = time.perf_counter(), self.folder / f".writing-step-{step:06d}", ""
        try:
            files = self.together(lambda: self.write_boxes(temporary))
            files = {name: entry for of_rank in gather_objects(files, self.group) for name, entry in of_rank.items()}
            self.together(lambda: self.group.rank == 0 and self.commit(temporary, run | dict(files=files)))
        except ValueError as error:
            problem = str(error)
            if self.group.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
        except Exception as error:  # a rank did not answer within --timeout
            problem = describe(error)
        gc.collect(1)  # DCP leaves two classes per tensor; objects from before the loop are older and not looked at
        self.error = problem and f"the checkpoint of step {step} could not be saved: {problem}"
        self.newest = self.newest if problem else step
        self.bytes_per_s = 0.0 if problem else self.nbytes / (time.perf_counter() - began)

    def together(self, work: Callable[[], Any]) -> Any:
        """Do the work. Raises ValueError if it failed on any rank."""
        def tried() -> Any:
            try:
                return work()
            except (Exception, dcp.api.CheckpointException) as error:  # DCP raises on all ranks what it caught on one
                raise ValueError(self.reason_of(error)) from None
        return agree(tried, self.group)

    def reason_of(self, error: Exception) -> str:
        """Why a save failed. If a file cannot grow, torch only reports a wrong position in it. A trial write shows the
        true reason: a full disk, a quota, or a limit on the size of files."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(2**20))
        except OSError as problem:
            return f"{self.folder} cannot be written to: {problem.strerror}"
        return describe(error)

    def write_boxes(self, temporary: Path) -> dict[str, list]:
        self.stage.wait()
        dcp.save({}, storage_writer=dcp.FileSystemWriter(temporary), planner=SaveBoxes(self.stage.copies),
                 process_group=self.group.process_group, no_dist=self.group.process_group is None)
        return checksums_of(temporary, self.group.rank)

    def commit(self, temporary: Path, run: dict) -> None:
        """Make the written files a checkpoint, then change `latest`, and only then remove old checkpoints. Whenever the
        process is killed, either the previous checkpoint or this one is complete."""
        final = self.folder / temporary.name.removeprefix(".writing-")
        run = run | dict(format=cli.CHECKPOINT_FORMAT)
        write_text(temporary / "run.json", json.dumps(run | {"checksum": cli.checksum_of_json(run)}, indent=1))
        sync(temporary)
        temporary.rename(final)
        sync(self.folder)
        write_text(self.folder / "latest", final.name + "\n")
        for old in cli.checkpoints_in(self.folder)[self.keep:] if self.keep else ():
            self.remove(old)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, first its name: a process killed in between leaves nothing that looks like one."""
        gone = path.with_name(f".removing-{path.name}-{time.time_ns()}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # the next run here removes the rest


def set_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"set-aside-{path.name}-{time.time_ns()}")
    path.rename(aside)
    print(f"{path} {why}, so it was renamed {aside.name}", flush=True)


def describe(error: Exception) -> str:
    """An error in one line. DCP's errors contain the errors of ranks; then this is the first of them."""
    failures = getattr(error, "failures", None)
    reason = next(iter(failures.values()))[0] if failures else error
    return f"{type(reason).__name__}: {reason}".splitlines()[0]


def checksums_of(folder: Path, writer: int) -> dict[str, list]:
    """{name: [bytes, checksum]} of the files that this rank has written."""
    files = [*folder.glob(f"__{writer}_*"), *([folder / ".metadata"] if writer == 0 else [])]
    return {file.name: [file.stat().st_size, checksum(file)] for file in files}


def checksum(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replaces the file as a whole, once the text is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Put a folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- loading --------------------------------------------------------------------------------------------------------

ADMITTED = {("torch", "Size"), ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),  # of the folder; the second by Python 3.13
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(("torch.distributed.checkpoint.metadata", name) for name in (
                "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata",
                "TensorProperties", "_MEM_FORMAT_ENCODING"))}


class MetadataUnpickler(pickle.Unpickler):
    """A pickle may name any function of this machine, to be called: this one makes what DCP writes, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        need(is_dtype or (module, name) in ADMITTED, f"names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def open_checkpoint(path: Path) -> tuple[dcp.FileSystemReader, Metadata]:
    """Raises ValueError if `.metadata` is not what DCP writes, or names files outside of the folder."""
    file = Path(path, ".metadata")
    try:
        with open(file, "rb") as stream:
            metadata = MetadataUnpickler(stream).load()
        need(all(huggingface.is_inside(stored.relative_path) for stored in metadata.storage_data.values()),
             "names files outside of its folder")
    except (ValueError, pickle.UnpicklingError, EOFError, OSError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} cannot be trusted or read: {error}") from None
    reader = dcp.FileSystemReader(path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return reader, metadata


def read(path: Path, pieces: Iterable[Piece], progress: bool = False) -> None:
    """Fill the pieces from a checkpoint. Raises ValueError, see LoadBoxes. At most two stored boxes are in memory."""
    fill(*open_checkpoint(path), pieces, progress)


def fill(reader: dcp.FileSystemReader, metadata: Metadata, pieces: Iterable[Piece], progress: bool = False) -> None:
    planner = LoadBoxes(pieces, metadata, reader.path)
    with tqdm(total=len(planner.plan.items), desc="loading", unit="box", disable=not progress, delay=1,
              leave=False) as bar:
        planner.commit_tensor = lambda *_: bar.update()
        reader.read_data(planner.plan, planner).wait()


def load(path: Path, optimizer, routers: list[torch.nn.Module], groups: Groups, group: Group, sites: int = 1) -> None:
    """Read the state of a run from a checkpoint of any grid.

    sites: how many sites the checkpoint has. If there are fewer now, the state of the others is not read. If there are
        more, several begin with the same state.

    Raises ValueError on all ranks if it raises on one."""
    pieces = list(pieces_of_run(optimizer, routers, groups, saving=False, site=groups["sites"].rank % sites))
    if sites == 1:  # no outer optimizer has run: its state follows from the weights
        pieces = [piece for piece in pieces if piece.name.rpartition("/")[2] not in config.OUTER_STATE]
    asked = set().union(*gather_objects({piece.name for piece in pieces}, group))

    def read_all() -> None:
        read(path, pieces, progress=group.rank == 0)
        lost = [name for name in open_checkpoint(path)[1].state_dict_metadata
                if name.endswith("/master") and name not in asked]
        need(not lost, f"{path} has {', '.join(lost[:1])}, in all {len(lost)} more weights, and this model only the "
                       "others: they would be lost")
        for piece in pieces:
            need(not piece.name.partition("@")[0].endswith("/master") or piece.values.isfinite().all(),
                 f"{path}: {piece.name} has values that are not finite: continue from an earlier checkpoint")
    agree(read_all, group)
    for bucket in optimizer.buckets:
        bucket.unsharding.wait()
        bucket.update_weights()
        if sites == 1 and "outer" in bucket.state:
            bucket.state["outer"].copy_(bucket.master)


def source(path: Path) -> Source:
    """The master weights of a checkpoint, and the biases of routers."""
    reader, metadata = open_checkpoint(path)

    def read_box(spec: Spec, box: Box) -> Tensor:
        name = spec.name if spec.name in metadata.state_dict_metadata else f"{spec.name}/master"
        values = torch.empty(box_shape(box), dtype=metadata.state_dict_metadata[name].properties.dtype)
        fill(reader, metadata, [Piece(name, spec.shape, box, values)])
        return values

    return read_box


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raises ValueError for a damaged checkpoint. Only its files number part, part + parts, … are read."""
    try:
        files = cli.read_json(folder)["files"]
        for name, saved in [*files.items()][part::parts]:
            need(huggingface.is_inside(name), f"{folder}/run.json names {name}, which is outside of its folder")
            file = folder / name
            need(file.exists(), f"{file} is missing")
            found = [file.stat().st_size, checksum(file)]
            need(found == saved, f"{file} is damaged: its bytes and checksum are {found}, and were {saved}")
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from None


# ---- the command line -----------------------------------------------------------------------------------------------

def export(path: Path, folder: str, dtype: str, group: Group = ALONE) -> None:
    """Weights as transformers reads them; every rank writes some files. Raises ValueError, see run/huggingface.py, on
    all ranks if it raises on one."""
    def together(work: Callable[[], Any]) -> Any:
        def tried() -> Any:
            try:
                return work()
            except OSError as error:
                raise ValueError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
        return agree(tried, group)

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        stored, run = open_checkpoint(path)[1].state_dict_metadata, cli.read_run(path)
        for given in filter(None, (run["published"], run["tokenizer"])):
            need(os.path.isdir(given), f"{path}: the run read {given}, and there is no such folder any more")
        return stored, run

    stored, run = together(read)
    model = config.Model(**run["model"])
    names = sorted((name.removesuffix("/master") for name in stored if name.endswith(("/master", ".router.bias"))),
                   key=lambda name: [part.zfill(9) for part in name.split(".")])  # layer 2 before layer 10
    specs = [Spec(name, tuple(stored[name if name in stored else f"{name}/master"].size)) for name in names]
    huggingface.export(folder, model, specs, source(path), dtype, rank=group.rank, world=group.size,
                       published=run["published"], tokens=special_tokens(run),
                       seq=max(run["described"]["longest"], run["settings"]["seq_len"]), together=together,
                       write_tokenizer=lambda: tokenizing.export_tokenizer(
                           folder, run["tokenizer"] or run["published"], run["described"]))


def special_tokens(run: dict[str, Any]) -> dict[str, Any]:
    """The special tokens of an export: the data's, and a published model's if both have the same tokenizer."""
    described, separator = run["described"], run["corpus"].get("separator")
    tokens = {name: [] for name in huggingface.TOKENS}
    if run["published"] and run["tokenizer"] in ("", run["published"]) and not described["is_bytes"]:
        tokens = huggingface.published_tokens(run["published"])
    begins = [token for token in (described["bos"], separator) if is_of_kind(token, 0) and token >= 0]
    begins += tokens["bos_token_id"]
    ends = [*dict.fromkeys([*described["eos"], *tokens["eos_token_id"]])] or begins[:1]
    return dict(bos_token_id=first(begins), eos_token_id=ends if len(ends) > 1 else first(ends),
                pad_token_id=first(tokens["pad_token_id"]))


def first(tokens: list[int]) -> int | None:
    return tokens[0] if tokens else None


def newest_whole(path: str) -> Path:
    """The checkpoint at this path, or the newest undamaged one in this folder; damaged ones are named on stderr. Raises
    ValueError if there is none."""
    found = cli.checkpoints_at(path, path)
    for checkpoint in found:
        try:
            verify(checkpoint)
            return checkpoint
        except ValueError as error:
            if checkpoint is found[-1]:
                raise
            print(f"run.checkpoint: {error}: passed over", file=sys.stderr)


USAGE = ("python -m run.checkpoint export CKPT FOLDER [--dtype bf16|fp16|fp32], where CKPT is a checkpoint or a folder "
         "of them")


@dataclass
class Flags:
    dtype: str = setting("bf16", "of the weights", ("bf16", "fp16", "fp32"))


def main() -> None:
    try:
        flags, words = config.read_known(Flags, sys.argv[1:], USAGE)
        need(words[:1] == ["export"] and len(words) == 3, f"usage: {USAGE}")
        _, path, folder = words
        with cli.told_if_slow("comparing the checkpoint's files with their checksums", "run.checkpoint"):
            checkpoint = newest_whole(path)
        with cli.told_if_slow(f"exporting the model to {folder}", "run.checkpoint"):
            export(checkpoint, folder, flags.dtype)
        print(f"exported {checkpoint} to {folder}")
    except (ValueError, OSError) as error:
        cli.refuse(error, "run.checkpoint")


if __name__ == "__main__":
    main()
