"""--offload: keep the optimizer state or the inputs of blocks in the host's memory.

    optimizer     GPU     ... backward │ norm, clip │                                       │ next forward
                  to host              │        g0 ↓  g1 ↓  g2 ↓                            │
                  CPU                  │              AdamW 0   AdamW 1   AdamW 2           │
                  to GPU               │                        w0 ↑      w1 ↑      w2 ↑    │

    activations   GPU     forward 1   forward 2   forward 3           backward 3   backward 2   backward 1
                  to host x1 ↓        x2 ↓        x3 ↓
                  to GPU                                      x3 ↑    x2 ↑         x1 ↑

g, w: the gradients and weights of a bucket (zero.py). x: the input of a block (recompute.py, full).

optimizer: gradients leave bucket by bucket, and while one bucket is copied, the CPU updates the
bucket before it. activations: the input of a block comes back while the backward of the block after
it runs, so two inputs are on the GPU at a time. A copy begins when the kernels launched before it
are done, and the copies before it in its direction. docs/NOTES.md says what both save and cost.

train.py passes OffloadedState to zero.py, and HostRows to recompute.py.
"""
import os
from collections.abc import Sequence
from functools import cache

import torch

from core.collectives import Pending


class Copied:
    """A copy that is already done, as every copy on a CPU. On GPUs a torch.cuda.Event takes its place."""

    def wait(self) -> None:
        """Let kernels that are launched from now on wait for the copy."""

    def synchronize(self) -> None:
        """Let the host wait for the copy."""


@cache
def stream_of(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    """Return the stream of all copies in one direction. The link carries both directions at once."""
    return torch.cuda.Stream(device)


def host_zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory of the host for copies to and from a device, filled with zeros.

    For a GPU the memory is pinned: the copy engine can use only pinned memory while the CPU goes on.
    """
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def start_copy(target: torch.Tensor, source: torch.Tensor,
               after: "Copied | torch.cuda.Event | None" = None) -> "Copied | torch.cuda.Event":
    """Start a copy to or from the host. It waits for the kernels launched so far and for the copy `after`."""
    on_device = source if source.is_cuda else target
    if not on_device.is_cuda:
        target.copy_(source)
        return Copied()
    stream = stream_of(on_device.device, to_host=source.is_cuda)
    stream.wait_stream(torch.cuda.current_stream(on_device.device))
    with torch.cuda.stream(stream):
        if after:
            after.wait()
        target.copy_(source, non_blocking=True)
        on_device.record_stream(stream)  # or the allocator may reuse its memory before the copy has ended
        return stream.record_event()


class HostRows:
    """A matrix [slots, width] in the host's memory, used like a tensor on the device of `like`.

    `rows[slot] = row` starts to copy a row to the host. `rows[slot]` returns the row on the device, and
    starts to fetch the row that was written before it, because rows are read in reverse order.
    """

    def __init__(self, slots: int, width: int, like: torch.Tensor):
        self.rows = host_zeros((slots, width), like.dtype, like.device)
        self.on_device = list(like.new_empty(2, width))  # one is in use while the other is fetched
        self.saved: dict[int, Copied] = {}  # slot -> the copy to the host
        self.fetched: dict[int, tuple[torch.Tensor, Copied]] = {}  # slot -> a row on the device, the copy to it
        self.before: dict[int, int | None] = {}  # slot -> the slot written before it, None for a forward's first
        self.last: int | None = None  # the slot written last in this forward

    def __len__(self) -> int:
        return len(self.rows)

    def start_forward(self) -> None:
        """Begin a new order: the rows of one forward are read in the reverse of their order in it."""
        self.last = None

    def __setitem__(self, slot: int, row: torch.Tensor) -> None:
        self.saved[slot] = start_copy(self.rows[slot], row)
        self.before[slot], self.last = self.last, slot

    def __getitem__(self, slot: int) -> torch.Tensor:
        self.fetch(slot)
        row, copied = self.fetched.pop(slot)
        copied.wait()
        self.fetch(self.before[slot])
        return row

    def fetch(self, slot: int | None) -> None:
        """Start to copy a row to the device, unless that has been done or there is none."""
        if slot is not None and slot not in self.fetched:
            target = self.on_device.pop(0)
            self.on_device.append(target)  # the two take turns
            self.fetched[slot] = target, start_copy(target, self.rows[slot], after=self.saved[slot])


class CopyToHost(Pending):
    """A copy to the host. `wait` returns it when the host may read it."""

    def __init__(self, copied: "Copied | torch.cuda.Event", result: torch.Tensor):
        super().__init__(None, result)
        self.copied = copied

    def wait(self) -> torch.Tensor:
        self.copied.synchronize()
        return super().wait()


def use_share_of_cores() -> None:
    """Let torch compute with this rank's share of the host's cores: all that it may use, divided by this host's ranks.

    torchrun gives each rank one thread (OMP_NUM_THREADS=1). That suits ranks that only launch kernels, but the update
    of offloaded state would take as many times longer as the rank could use cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(torch.get_num_threads(), share))


class OffloadedState:
    """The optimizer state of a zero.ShardedBucket in the host's memory, where the CPU updates it.

    It has the methods of zero.StateOnDevice. `zeros` allocates master weights and moments. `copy_grad`
    is called before their update, and `copy_weights` after it.
    """

    def __init__(self, bucket):
        self.device, length = bucket.device, len(bucket.weight_shard)
        self.grad, self.weights = self.zeros(length, bucket.acc_dtype), self.zeros(length, bucket.weights.dtype)
        self.weights_copied = Copied()
        if self.device.type == "cuda":  # ranks on CPUs compute all else there, too, and keep their threads
            use_share_of_cores()

    def zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return host_zeros(length, dtype, self.device)

    def copy_grad(self, grad: torch.Tensor) -> Pending:
        """Start to copy the gradient to the host. The result's `wait` returns the copy."""
        return CopyToHost(start_copy(self.grad, grad), self.grad)

    def copy_weights(self, master: torch.Tensor, weight_shard: torch.Tensor) -> None:
        """Round the master weights, and start to copy them to the device.

        Kernels that are launched from now on wait for the copy.
        """
        self.weights_copied.synchronize()  # the last copy reads self.weights, which the next line overwrites
        self.weights.copy_(master)
        self.weights_copied = start_copy(weight_shard, self.weights)
        self.weights_copied.wait()
