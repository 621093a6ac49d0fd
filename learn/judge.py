"""Does a distributed trainer match one process? Record a run of each, and compare the records.

It works for any trainer. This file needs only torch and safetensors, not numpy, so copy it beside
your trainer. Both runs start from the same weights and see the same global batches, in fp64 or
fp32, for two or three steps.

    record = judge.Record("one/")            # and "grid/" on every rank of the other run
    record.step(loss=loss, model=model)      # each step, on all ranks: after backward, before clipping and update
    record.close()                           # after the last update

`python judge.py one grid [--noise other] [--json]` prints a line for each difference. The exit code is 1 if there is
one, and 0 otherwise. For example:
    step 0: gradient of layers.3.mlp.up: is 2.000 times one process's: tp = 2 is counted once too often
    step 1: weight of norm: rank 0 and rank 1 hold different bits of a replicated tensor, by 9.9e-10 of the largest …
    step 1: weight of head: the gradient agreed, the update differs by -1.0e-03 times the weight: weight decay

No tensor is gathered. A rank writes the tensors that it has, each with its place in the global
tensor. A DTensor (FSDP2, tensor parallel modules) knows its place, and a plain tensor is taken as a
whole one. In all other cases `place` gives the name and the place, for example:

    Record("grid/", place=lambda name, x: (f"layers.{first + int(name[0])}{name[1:]}", None))      # a stage's own names
    Record("grid/", place=lambda name, x: (name, (slice(8 * rank, 8 * rank + 8), slice(None))))    # 8 rows on each rank

If tensors are not parameters with a `.grad` (flat partitions, master weights), pass a list of Piece
instead of the model. If several ranks have the same piece, one of them writes it and the others
write its hash, because replicas must hold the same bits.

Record(folder, axes=dict(dp=2, tp=2, micro=4)) gives the sizes of the grid and the number of
micro-batches. They are used to explain wrong factors.

Tolerances are relative to the tensor's largest element, or to a hundredth of the largest element of
all tensors if that is larger. In fp64 the tolerance is 1e-10. A sum of n rounded terms errs by
about sqrt(n) eps, so in fp32 the tolerance is 1024 eps = 1.2e-4 (for n of a million). In 16 bits it
is 16 eps, which finds only large errors. --noise names a second correct run with another order of
sums. Ten times its differences are then tolerated.
"""
import argparse
import ctypes
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Box = tuple[slice, ...]  # a block of a global tensor; a single slice means a range of the flattened tensor
TOLERANCE = {"float64": 1e-10, "float32": 1024 * 2.0**-23, "bfloat16": 16 * 2.0**-7, "float16": 16 * 2.0**-10}
FORMATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # of safetensors
WRAPPERS = "module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"  # parts of names


# ---- recording ------------------------------------------------------------------------------------------------------

class Piece(NamedTuple):
    """A part of a global parameter. term: if the gradient is one term of a sum over ranks, the
    number of the term."""
    name: str
    weight: Tensor
    grad: Tensor | None
    box: Box
    term: int | None = None


Place = Callable[[str, Tensor], tuple[str, Box | None]]  # (name, local tensor) -> (global name, box or None)


def pieces_of(model: nn.Module, place: Place | None) -> Iterator[Piece]:
    """Yield the parameters of a module. A tied parameter comes once, as in named_parameters."""
    for name, param in model.named_parameters():
        name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        weight, grad, box, term = param.detach(), param.grad, None, None
        if isinstance(weight, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            box = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes))
            if isinstance(grad, DTensor):
                summed = [dim for dim, placement in enumerate(grad.placements) if placement.is_partial("sum")]
                grad = grad.redistribute(placements=[grad.placements[dim] if dim in summed else placement for
                                                     dim, placement in enumerate(weight.placements)]).to_local()
                for dim in summed:  # ranks that differ only in other dimensions have the same term
                    term = (term or 0) * weight.device_mesh.size(dim) + weight.device_mesh.get_local_rank(dim)
            weight = weight.to_local()
        if place:
            name, given = place(name, weight)
            box = given or box
        box = box or (slice(None),) * weight.dim()
        box = tuple(slice(0, n) if s == slice(None) else s for s, n in zip(box, weight.shape))
        yield Piece(name, weight, grad, box, term)


def bytes_of(x: Tensor) -> ctypes.Array:
    """Return the memory of a contiguous tensor on the CPU as a buffer. x must stay alive while it
    is in use."""
    return (ctypes.c_char * x.nbytes).from_address(x.data_ptr())


def save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file: the length of the header, the header in JSON, then the tensors.

    The package's own save_file needs numpy.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each at a multiple of its size
    header, end = {}, 0
    for name in names:
        x, begin = tensors[name], end
        end += x.nbytes
        header[name] = dict(dtype=FORMATS[x.dtype], shape=list(x.shape), data_offsets=[begin, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(bytes_of(tensors[name]))


def gather_lines(mine: list[str]) -> list[list[str]]:
    """Return the lines of every rank. Torch's all_gather_object needs numpy."""
    backends = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    device = "cpu" if "cpu:" in backends else backends.split(":")[0]
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device))
    sizes = [int(size) for size in sizes]
    padded = text.new_zeros(max(sizes))
    padded[:len(text)] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    texts = [text.cpu() for text in texts]
    return [json.loads(bytes_of(text)[:size]) for text, size in zip(texts, sizes)]


class Record:
    """The record that one rank writes of a run. folder: the same for all ranks, new or empty."""

    def __init__(self, folder: str, axes: dict[str, int] | None = None, place: Place | None = None):
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.folder, self.axes, self.place, self.steps = Path(folder), dict(axes or {}), place, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.glob(f"rank{self.rank}.*")):
            raise ValueError(f"{folder}: has a record already, name a new folder")

    def step(self, *, model: nn.Module | Iterable[Piece], loss: Any = None, norm: Any = None, **_) -> None:
        """Record a step. loss: as you log it, the same on all ranks, or None. norm: of the whole
        gradient, before clipping."""
        self.model = model if isinstance(model, nn.Module) else list(model)
        self.write(("weight", "gradient"), loss=loss, norm=norm)

    def close(self, model: nn.Module | Iterable[Piece] | None = None) -> None:
        """Record the weights after the last update. model: new pieces, needed if the pieces of the
        last step were copies."""
        self.model = model or self.model
        self.write(("weight",))

    def write(self, kinds: tuple[str, ...], **numbers: Any) -> None:
        rows, tensors, pieces = [], {}, self.model
        if isinstance(self.model, nn.Module):
            meshes = [param.device_mesh for param in self.model.parameters() if isinstance(param, DTensor)]
            self.axes = {name: size for mesh in meshes for name, size in zip(mesh.mesh_dim_names or (), mesh.shape)
                         } | self.axes
            pieces = pieces_of(self.model, self.place)
        for piece in pieces:
            for kind, x in zip(kinds, (piece.weight, piece.grad)):
                if x is not None:
                    x = x.detach().to("cpu", copy=True).contiguous()  # views of one buffer cannot be saved together
                    digest = hashlib.blake2b(bytes_of(x), digest_size=16).hexdigest()
                    rows.append(dict(kind=kind, name=piece.name, dtype=str(x.dtype)[6:], hash=digest,
                                     box=[[s.start, s.stop] for s in piece.box],
                                     term=piece.term if kind == "gradient" else None))
                    tensors[len(rows) - 1] = x
        mine = [json.dumps([row["kind"], row["name"], row["box"], row["hash"], row["term"]]) for row in rows]
        everyone = gather_lines(mine) if self.ranks > 1 else [mine]
        before = {key for keys in everyone[:self.rank] for key in keys}  # pieces that a lower rank writes
        kept = {str(i): tensors[i] for i, key in enumerate(mine) if key not in before}
        file = f"rank{self.rank}.step{self.steps}.safetensors"
        save(kept, self.folder / file)
        line = dict(step=self.steps, rank=self.rank, ranks=self.ranks, axes=self.axes, file=file, pieces=rows)
        for name, x in numbers.items():
            if x is not None:
                line[name] = float(x.detach() if isinstance(x, Tensor) else x)  # the loss comes with its graph
        with open(self.folder / f"rank{self.rank}.jsonl", "a") as index:
            index.write(json.dumps(line) + "\n")
        self.steps += 1

    @staticmethod
    def load(folder: str, model: nn.Module, place: Place | None = None) -> None:
        """Fill this rank's parameters from the first weights of another record, so that two runs
        begin alike.

        Raise ValueError for a parameter that the record does not have.
        """
        other = Run(folder)
        with torch.no_grad():
            for piece in pieces_of(model, place):
                whole = other.whole(0, "weight", piece.name)
                if whole is None or not fits(piece.box, whole.shape):
                    raise ValueError(f"{folder}: has no weight {piece.name} with {piece.box}")
                piece.weight.copy_(part_of(whole, piece.box).view(piece.weight.shape))


# ---- reading --------------------------------------------------------------------------------------------------------

def part_of(whole: Tensor, box: Box) -> Tensor:
    return whole.view(-1)[box[0]] if len(box) == 1 < whole.dim() else whole[box]


def fits(box: Box, shape: torch.Size) -> bool:
    ends = (shape.numel(),) if len(box) == 1 < len(shape) else shape
    return len(box) == len(ends) and all(s.stop <= end for s, end in zip(box, ends))


class Part(NamedTuple):
    ranks: list[int]  # the ranks that have this piece, with equal bits
    box: Box
    dtype: str
    term: int | None
    file: Path
    key: str

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.key).double()


class Run:
    """A record that was written. Tensors are read on demand."""

    def __init__(self, folder: str):
        self.folder, files = Path(folder), sorted(Path(folder).glob("rank*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        if not lines:
            raise ValueError(f"{folder}: has no record, which Record(folder) writes")
        self.ranks, self.steps = lines[0]["ranks"], 1 + max(line["step"] for line in lines)
        if len(lines) != self.ranks * self.steps:
            raise ValueError(f"{folder}: is incomplete: {len(lines)} lines, {self.ranks} ranks, {self.steps} steps")
        self.axes = {axis: size for line in lines for axis, size in line["axes"].items() if size > 1}
        self.maxima, self.numbers = {}, {(line["step"], name): [] for line in lines for name in ("loss", "norm")}
        self.parts: dict[tuple[int, str, str], dict[tuple, dict[Any, Part]]] = {}  # -> box -> hash -> part
        for line in sorted(lines, key=lambda line: line["rank"]):
            for name in "loss", "norm":
                if line.get(name) is not None:
                    self.numbers[line["step"], name].append(line[name])
            for i, row in enumerate(line["pieces"]):
                boxes = self.parts.setdefault((line["step"], row["kind"], row["name"]), {})
                same = boxes.setdefault(tuple(map(tuple, row["box"])), {})
                key = row["hash"] if row["term"] is None else row["term"]
                if key not in same:
                    box = tuple(slice(*ends) for ends in row["box"])
                    same[key] = Part([], box, row["dtype"], row["term"], self.folder / line["file"], str(i))
                same[key].ranks.append(line["rank"])
        self.dtypes = {part.dtype for boxes in self.parts.values() for same in boxes.values() for part in same.values()}

    def names(self, step: int, kind: str) -> list[str]:
        return [name for at, what, name in self.parts if (at, what) == (step, kind)]

    def boxes(self, step: int, kind: str, name: str) -> list[list[Part]]:
        """Return the parts of each box: one part, unless they are terms of a sum or replicas that
        differ."""
        return [list(same.values()) for same in self.parts.get((step, kind, name), {}).values()]

    def largest(self, step: int, kind: str) -> float:
        if (step, kind) not in self.maxima:
            self.maxima[step, kind] = max(largest(self.whole(step, kind, name)) for name in self.names(step, kind))
        return self.maxima[step, kind]

    def whole(self, step: int, kind: str, name: str, shape: torch.Size | None = None) -> Tensor | None:
        """Return the global tensor in fp64, or None if no rank has a part of it.

        If replicas differ, the first rank's is taken.
        """
        boxes = self.boxes(step, kind, name)
        if not boxes:
            return None
        if shape is None:
            shape = torch.Size(max(part.box[dim].stop for (part, *_) in boxes) for dim in range(len(boxes[0][0].box)))
        whole = torch.full(shape, math.nan, dtype=torch.float64)
        for parts in boxes:
            target = part_of(whole, parts[0].box)
            terms = parts[:1] if parts[0].term is None else parts
            target.copy_(sum(part.read() for part in terms).view_as(target))
        return whole


# ---- comparing ------------------------------------------------------------------------------------------------------

class Finding(NamedTuple):
    step: int
    kind: str  # weight, gradient, loss or norm
    name: str  # of the parameter
    says: str
    off: float | None = None  # the largest difference, relative to the largest element
    factor: float | None = None  # times the tensor of one process
    axes: tuple[str, ...] = ()  # the axes whose sizes explain the factor


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def off(got: Tensor, truth: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    difference = largest(got - truth)
    return difference / largest(truth) if truth.any() else math.inf if difference else 0.0


def explain_factor(factor: float, axes: dict[str, int]) -> tuple[str, float, tuple[str, ...]]:
    """Return (a sentence, the factor, the axes whose size, or product of sizes, is the factor or
    its inverse)."""
    for count in range(1, len(axes) + 1):  # the fewest axes that explain it
        sets = [names for names in combinations(axes, count)
                if math.isclose(math.prod(axes[name] for name in names), max(factor, 1 / factor), rel_tol=1e-3)]
        named = " or ".join(" x ".join(f"{name} = {axes[name]}" for name in names) for names in sets)
        how = "counted once too often" if factor > 1 else "divided by once too often, or not summed over"
        if sets:
            return f"{named} is {how}", factor, tuple(dict.fromkeys(name for names in sets for name in names))
    return "no axis has this size", factor, ()


def one_factor(got: Tensor, truth: Tensor, tolerance: float) -> float | None:
    """Return f if got = f truth and f is not 1; otherwise None."""
    factor = ((got * truth).sum() / (truth * truth).sum()).item()
    found = 0 < factor < math.inf and abs(factor - 1) > 4 * tolerance and off(got, factor * truth) <= 4 * tolerance
    return factor if found else None


def row_order(got: Tensor, truth: Tensor, tolerance: float) -> str:
    """Describe how the rows of `truth` are permuted in `got`, by equal blocks; "" if they are not."""
    rows, theirs = (x.reshape(len(x) if x.dim() else 1, -1) for x in (got, truth))
    projection = torch.randn(rows.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    place = torch.empty(len(rows), dtype=torch.long)  # row of got -> row of truth
    place[(rows @ projection).argsort()] = (theirs @ projection).argsort()
    if torch.equal(place, place.sort().values) or off(rows, theirs[place]) > tolerance:
        return ""
    size = math.gcd(len(place), *(i for i in range(1, len(place)) if place[i] != place[i - 1] + 1))
    blocks = " ".join(str(int(place[i]) // size) for i in range(0, len(place), size)[:16])
    return f"rows are permuted: blocks {blocks}{' …' * (len(place) > 16 * size)} of {len(place) // size}"


class Judge:
    """Compare a run with a run of one process. Only the earliest differences are reported, because
    later ones follow from them."""

    def __init__(self, one: Run, grid: Run, noise: Run | None = None):
        if one.steps != grid.steps:
            raise ValueError(f"{one.folder} has {one.steps - 1} steps, {grid.folder} {grid.steps - 1}: record as many")
        self.one, self.grid, self.noise = one, grid, noise
        self.tolerance = max(TOLERANCE[dtype] for dtype in one.dtypes | grid.dtypes)

    def findings(self) -> list[Finding]:
        for step in range(self.one.steps):
            for found in (self.compare(step, "weight"), self.compare(step, "gradient") + self.compare_numbers(step)):
                if found:
                    return found
        return []

    def compare(self, step: int, kind: str) -> list[Finding]:
        names = dict.fromkeys(self.one.names(step, kind) + self.grid.names(step, kind))
        return [Finding(step, kind, name, *says) for name in names if (says := self.explain(step, kind, name))]

    def explain(self, step: int, kind: str, name: str) -> tuple:
        """Return what is wrong with a tensor, as the rest of a Finding; () if it is correct."""
        truth, boxes = self.one.whole(step, kind, name), self.grid.boxes(step, kind, name)
        if truth is None:
            return "one process has none",
        if not boxes:
            return "missing on every rank",
        for parts in boxes:
            if not fits(parts[0].box, truth.shape):
                return f"rank {parts[0].ranks[0]} has {list(parts[0].box)}, one process {list(truth.shape)}",
            if len(parts) > 1 and parts[0].term is None:
                return self.explain_replicas(part_of(truth, parts[0].box), parts)
        covered = torch.zeros(truth.shape, dtype=torch.int8)
        for parts in boxes:
            part_of(covered, parts[0].box).add_(1)
        counts = {"missing on every rank": (covered == 0).sum(), "covered twice": (covered > 1).sum()}
        if any(counts.values()):
            return f"of {covered.numel():,} elements " + ", ".join(f"{n:,} {how}" for how, n in counts.items() if n),
        got = self.grid.whole(step, kind, name, truth.shape)
        if not got.isfinite().all():
            return f"{int((~got.isfinite()).sum()):,} of {got.numel():,} elements are not finite",
        if kind == "weight" and step:
            return self.explain_update(step, name, got, truth)
        allowed = self.tolerance * max(largest(truth), self.one.largest(step, kind) / 100)
        if self.noise and kind == "gradient":
            allowed = 10 * largest(self.noise.whole(step, kind, name) - truth) + 1e-16 * largest(truth)
        if largest(got - truth) <= allowed:
            return ()
        if factor := one_factor(got, truth, self.tolerance):
            says, *rest = explain_factor(factor, self.grid.axes)
            return f"is {factor:.3f} times one process's: {says}", None, *rest
        order = row_order(got, truth, self.tolerance)
        return (order,) if order else (f"differs{self.where(truth, boxes)}", off(got, truth))

    def explain_replicas(self, target: Tensor, parts: list[Part]) -> tuple[str, float]:
        values = [part.read().view_as(target) for part in parts]
        says = f"rank {parts[0].ranks[0]} and rank {parts[1].ranks[0]} hold different bits of a replicated tensor"
        for together, how in (sum(values), "summed"), (sum(values) / len(values), "averaged"):
            if off(together, target) <= 4 * self.tolerance:
                says += f"; {how} over these {len(values)} they are one process's: it has not been reduced"
                break
        return says, off(values[1], values[0])

    def where(self, truth: Tensor, boxes: list[list[Part]]) -> str:
        """Name the ranks whose boxes are wrong, unless all are wrong in the same way."""
        says = []
        for part, *_ in boxes:
            target = part_of(truth, part.box)
            value = part.read().view_as(target)
            if largest(value - target) > self.tolerance * largest(truth):
                factor = one_factor(value, target, self.tolerance)
                says.append(f"rank {part.ranks[0]}" + (f" has {factor:.3f} times it" if factor else ""))
        partly = len(says) < len(boxes) or any("times" in text for text in says)
        return f": {', '.join(says[:8])}" if partly and len(boxes) > 1 else ""

    def explain_update(self, step: int, name: str, got: Tensor, truth: Tensor) -> tuple:
        """Explain a wrong update, after a step in which everything agreed.

        Adam's update depends on the sign of a gradient. If a gradient is small compared with its
        own error, the update is uncertain to the same extent.
        """
        before, grad = self.one.whole(step - 1, "weight", name), self.one.whole(step - 1, "gradient", name)
        moved, right = got - self.grid.whole(step - 1, "weight", name, truth.shape), truth - before
        extra, size = moved - right, largest(right)
        doubt = torch.zeros_like(right)
        if grad is not None:
            doubt = (8 * self.tolerance * largest(grad) / grad.abs()).nan_to_num(0).clamp(max=2)
        if (extra.abs() <= size * (4 * self.tolerance + doubt) + 1e-3 * self.tolerance * largest(truth)).all():
            return ()
        sure = doubt < 0.01
        factor = one_factor(moved[sure], right[sure], max(1e-3, self.tolerance)) if sure.any() else None
        if factor and abs(factor - 1) > 1e-3:
            says, *rest = explain_factor(factor, self.grid.axes)
            return f"the gradient agreed, the update is {factor:.3f} times one process's: {says}", None, *rest
        for earlier in range(step):
            stale = self.one.whole(earlier, "weight", name)
            if largest(got - stale) <= 1e-3 * largest(truth - stale):
                return f"is still that of step {earlier}",
        if order := row_order(got, truth, self.tolerance):
            return order,
        share = ((extra * before).sum() / (before * before).sum()).item()
        if largest(extra - share * before) <= 0.05 * largest(extra):
            return f"the gradient agreed, the update differs by {share:.1e} times the weight: weight decay",
        return "the gradient agreed, the update differs", off(moved, right)

    def compare_numbers(self, step: int) -> list[Finding]:
        found = []
        for name in "loss", "norm":
            truth, values = self.one.numbers[step, name][:1], sorted(set(self.grid.numbers[step, name]))
            if truth and values and not all(abs(x - truth[0]) <= self.tolerance * abs(truth[0]) for x in values):
                counted = self.what_a_norm_counts(step, values) if name == "norm" else ""
                factor = values[0] / truth[0] if truth[0] else math.nan
                if len(values) > 1:
                    says = (f"ranks have {values[0]:.6g} to {values[-1]:.6g}, one process {truth[0]:.6g}{counted}",)
                else:
                    why, *rest = explain_factor(factor, self.grid.axes) if factor > 0 else ("", factor, ())
                    says = f"is {factor:.4f} times one process's{counted or f': {why}'}", None, *rest
                found.append(Finding(step, name, "", *says))
        return found

    def what_a_norm_counts(self, step: int, values: list[float]) -> str:
        """Explain in words how a wrong norm arises from gradients that agree."""
        local = [0.0] * self.grid.ranks  # squares of each rank
        for name in self.grid.names(step, "gradient"):
            for part in (part for parts in self.grid.boxes(step, "gradient", name) for part in parts):
                square = part.read().square().sum().item()
                for rank in part.ranks:
                    local[rank] += square
        if all(math.isclose(value, math.sqrt(sum(local)), rel_tol=1e-5) for value in values):
            return ": every replica is counted"
        if all(any(math.isclose(value, math.sqrt(own), rel_tol=1e-5) for own in local) for value in values):
            return ": each rank counts its own gradients alone"
        return ""


# ---- python judge.py ------------------------------------------------------------------------------------------------

def lines_of(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each finding. Tensors with the same finding share a line."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.step, finding.kind, finding.says), []).append(finding)
    for (step, kind, says), found in groups.items():
        names, offs = [f.name for f in found if f.name], sorted(f.off for f in found if f.off is not None)
        of = f" of {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else ""
        size = " to ".join(dict.fromkeys(f"{off:.1e}" for off in (*offs[:1], *offs[-1:])))
        yield f"step {step}: {kind}{of}: {says}" + (f", by {size} of the largest element" if offs else "")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def main(arguments: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", help="the record of one process")
    parser.add_argument("grid", help="the record of many ranks")
    parser.add_argument("--noise", metavar="OTHER", help="the record of a second right run, see Tolerance above")
    parser.add_argument("--json", action="store_true", help="print what differs as JSON")
    asked = parser.parse_args(arguments)
    found = Judge(Run(asked.one), Run(asked.grid), Run(asked.noise) if asked.noise else None).findings()
    lines = [json.dumps([f._asdict() for f in found], indent=1)] if asked.json else lines_of(found)
    sys.stdout.writelines(line + "\n" for line in lines)
    return int(bool(found))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"judge: {error}", file=sys.stderr)
        sys.exit(2)
