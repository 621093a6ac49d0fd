"""What a step really does, counted at every operation that torch dispatches: live bytes, matmul FLOPs, collectives.

The code that is measured needs no changes. A storage counts from the operation that returned it until nothing refers to
it any more, autograd included, with its size at that moment; its `resize_`, which empties and refills it, is watched as
well. Fake tensors count as if they were real (run/dryrun.py), if the mode that makes them is active where the meter is
entered.

    meter = Meter()
    meter.label("weights", *model.parameters())       storages that exist already, under a label of your choice
    meter.label_size("gradients", 4 * 104729)         every new storage of exactly this many bytes
    with meter:
        step()
    meter.peak["weights"], meter.peak["other"], meter.peak["all"], meter.flops, meter.operations, meter.collectives

Everything else that an operation returns has the label "other", or what `meter.kind` says at that moment: activations,
temporaries, leaks. A storage first seen as an input has the label "outside": it existed before, or a library made it
without dispatching (gloo copies the inputs of its reduce-scatters). "all" is the sum without "outside".
"""
import time
import weakref
from collections import Counter
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# FLOPs that torch's registry lacks, from the shapes of the arguments that are tensors: matmuls that add to a gradient,
# grouped matmuls, and attention on CPUs, q [B, N, S, D]: 2 matmuls over all scores in forward, 5 in backward.
UNREGISTERED = {
    torch.ops.aten._grouped_mm: lambda a, b, ends: 2 * a[0] * a[1] * b[-1],
    torch.ops.aten.addmm_: lambda out, a, b: 2 * a[0] * a[1] * b[1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v: 2 * 2 * prod(q) * k[2],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, q, k, *others: 5 * 2 * prod(q) * k[2]}

COLLECTIVES = "c10d", "_c10d_functional"  # namespaces of operators
MOVE_NOTHING = "wait_tensor", "_wrap_tensor_autograd"  # operators in them that communicate nothing


class Collective(NamedTuple):
    """One collective that this rank called."""
    group: str
    name: str
    shape: tuple[int, ...]  # of the first tensor: the output, or what is reduced in place
    dtype: torch.dtype
    bytes: int  # of the larger of input and output: all that is reduced, scattered or gathered


class Meter(TorchDispatchMode):
    """memory=False does not count live bytes, which takes longer than the operations of a small model."""

    def __init__(self, memory: bool = True):
        super().__init__()
        self.memory = memory
        self.kind = "other"  # the label of what operations bring from now on
        self.sizes: dict[int, str] = {}
        self.alive: dict[int, tuple[weakref.ref, str]] = {}  # id of a storage -> itself, its label
        self.nbytes: Counter[int] = Counter()  # of it, when it was last looked at
        self.bytes_of: Counter[str] = Counter()  # alive now, by label
        self.peak: Counter[str] = Counter()  # the most bytes alive at any moment, by label
        self.at_peak: Counter[str] = Counter()  # the bytes alive at the peak of "all", by label
        self.window_peak = 0  # the most since restart_window
        self.flops = self.operations = 0
        self.collectives: list[Collective] = []
        self.sees_fake = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own question: True would wrap every operation in 28 µs of precautions against torch.compile, which
        nothing here is under."""
        return False

    def __enter__(self):
        self.sees_fake = active_fake_mode() is not None
        resize = self.resize_before = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resize(storage, nbytes)
            if id(storage) in self.alive:
                self.resize(id(storage), nbytes)
            return storage

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize_before
        return super().__exit__(*error)

    def label(self, kind: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) in self.alive:
                self.remove(id(storage))
            self.add(storage, kind)

    def label_size(self, kind: str, *nbytes: int) -> None:
        self.sizes |= dict.fromkeys(nbytes, kind)

    def add(self, storage: torch.UntypedStorage, kind: str) -> None:
        number = id(storage)
        self.alive[number] = weakref.ref(storage, lambda _: self.remove(number)), kind
        self.resize(number, storage.nbytes())

    def remove(self, number: int) -> None:
        self.resize(number, 0)
        del self.alive[number], self.nbytes[number]

    def resize(self, number: int, nbytes: int) -> None:
        more, (_, kind) = nbytes - self.nbytes[number], self.alive[number]
        self.nbytes[number] = nbytes
        self.bytes_of[kind] += more
        if kind != "outside":
            self.bytes_of["all"] += more

    def live(self) -> Counter[str]:
        """Bytes alive now, by label."""
        return self.bytes_of.copy()

    def restart_window(self) -> int:
        """The most bytes alive since the last call; from now on a new window."""
        most, self.window_peak = self.window_peak, self.live()["all"]
        return most

    def settled(self) -> Counter[str]:
        """Bytes alive once they have not changed for 0.1 s: gloo's threads release tensors late."""
        seen, since = self.live(), time.monotonic()
        while time.monotonic() - since < 0.1:
            time.sleep(0.01)
            if (now := self.live()) != seen:
                seen, since = now, time.monotonic()
        return seen

    def saw_new(self, args: tuple, kwargs: dict, out) -> bool:
        """Label the storages that an operation brought; whether there were any. Only then, or when a
        collective's output was refilled just before it, can the peak have risen."""
        before = len(self.alive)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in self.alive:
                self.label("outside", leaf)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and id(storage := leaf.untyped_storage()) not in self.alive:
                self.add(storage, self.sizes.get(storage.nbytes(), self.kind))
        return len(self.alive) > before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operations on local tensors are dispatched here, too
        kwargs = kwargs or {}
        if FakeTensor in types and not self.sees_fake:  # DTensor infers shapes with them
            return function(*args, **kwargs)
        out = function(*args, **kwargs)
        if self.memory and (self.saw_new(args, kwargs, out) or function.namespace in COLLECTIVES):
            live = self.live()
            self.window_peak = max(self.window_peak, live["all"])
            if live["all"] > self.peak["all"]:
                self.at_peak = live
            self.peak |= live  # the larger of the two, by label
        self.operations += 1
        packet = function.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif packet in UNREGISTERED:
            self.flops += UNREGISTERED[packet](*(arg.shape for arg in args if isinstance(arg, torch.Tensor)))
        if function.namespace in COLLECTIVES:
            self.collectives += collectives_of(packet.__name__, args, out)
        return out


def collectives_of(name: str, args: tuple, out) -> list[Collective]:
    """The call as a list of one; an empty list if it communicates nothing."""
    if isinstance(out, torch.Tensor):  # a functional collective, as DTensor's are: the last argument is the group
        moved = max(args[0].nbytes, out.nbytes)
        return [] if name in MOVE_NOTHING else [Collective(args[-1], name, tuple(out.shape), out.dtype, moved)]
    groups = [dist.ProcessGroup.unbox(arg).group_name for arg in args
              if isinstance(arg, torch.ScriptObject) and arg._type().name() == "ProcessGroup"]
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if not groups or not tensors:
        return []
    nbytes = max(tensor.numel() * tensor.element_size() for tensor in tensors)
    return [Collective(groups[0], name, tuple(tensors[0].shape), tensors[0].dtype, nbytes)]
