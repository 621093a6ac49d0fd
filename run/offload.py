"""--offload: what waits in the host's memory. train.py hands OffloadedState to zero.py, HostRows to recompute.py.

A copy begins when the kernels launched before it, and the copies before it in its direction, are done. So gradients
leave bucket by bucket while the CPU updates the bucket before, and a block's input comes back while the backward of the
block after it runs: two are on the GPU at once. docs/NOTES.md says what this saves and costs.

    optimizer     GPU     ... backward │ norm, clip │                                       │ next forward
                  to host              │        g0 ↓  g1 ↓  g2 ↓                            │
                  CPU                  │              AdamW 0   AdamW 1   AdamW 2           │
                  to GPU               │                        w0 ↑      w1 ↑      w2 ↑    │

    activations   GPU     forward 1   forward 2   forward 3           backward 3   backward 2   backward 1
                  to host x1 ↓        x2 ↓        x3 ↓
                  to GPU                                      x3 ↑    x2 ↑         x1 ↑
"""
from collections.abc import Sequence
from functools import cache

import torch

from core.collectives import Pending


class Copied:
    """A copy that was made at once, on a CPU; on GPUs a torch.cuda.Event is in its place."""

    def wait(self) -> None:
        """Let kernels that are launched from now on wait for it."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


@cache
def stream_of(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    """The one of all copies in this direction: the link carries both directions at once."""
    return torch.cuda.Stream(device)


def host_zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host for copies to and from a device; for a GPU it is pinned, because only from there the copy
    engine reads while the CPU goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def start_copy(target: torch.Tensor, source: torch.Tensor,
               after: "Copied | torch.cuda.Event | None" = None) -> "Copied | torch.cuda.Event":
    """Start to copy to or from the host, after the kernels that have been launched so far and the copy `after`."""
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
    """A matrix [slots, width] in the host's memory, whose rows are written and read as those of a tensor on the device
    of `like`. Reading a row starts to fetch the one that was written before it, which is to be read next."""

    def __init__(self, slots: int, width: int, like: torch.Tensor):
        self.rows = host_zeros((slots, width), like.dtype, like.device)
        self.on_device = list(like.new_empty(2, width))  # one is used while the next one is fetched
        self.saved: dict[int, Copied] = {}  # slot -> the copy to the host
        self.fetched: dict[int, tuple[torch.Tensor, Copied]] = {}
        self.before: dict[int, int | None] = {}  # slot -> the one written before it, None for the first of a forward
        self.last: int | None = None  # written

    def __len__(self) -> int:
        return len(self.rows)

    def start_forward(self) -> None:
        """The rows of one forward are read in reverse order: where it begins, so does a list."""
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
        if slot is not None and slot not in self.fetched:
            target = self.on_device.pop(0)
            self.on_device.append(target)  # they take turns
            self.fetched[slot] = target, start_copy(target, self.rows[slot], after=self.saved[slot])


class CopyToHost(Pending):
    """A copy that the host may read when `wait` returns it."""

    def __init__(self, copied: "Copied | torch.cuda.Event", result: torch.Tensor):
        super().__init__(None, result)
        self.copied = copied

    def wait(self) -> torch.Tensor:
        self.copied.synchronize()
        return super().wait()


class OffloadedState:
    """Keeps the optimizer state of a zero.ShardedBucket in the host's memory, where the host updates it.

    It has the methods of zero.StateOnDevice: `zeros` allocates master weights and moments, `copy_grad` comes before
    their update, and `copy_weights` after it.
    """

    def __init__(self, bucket):
        self.device, length = bucket.device, len(bucket.weight_shard)
        self.grad, self.weights = self.zeros(length, bucket.acc_dtype), self.zeros(length, bucket.weights.dtype)
        self.weights_copied = Copied()

    def zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return host_zeros(length, dtype, self.device)

    def copy_grad(self, grad: torch.Tensor) -> Pending:
        """Start to copy the gradient to the host. `wait` returns the copy."""
        return CopyToHost(start_copy(self.grad, grad), self.grad)

    def copy_weights(self, master: torch.Tensor, weight_shard: torch.Tensor) -> None:
        """Round the master weights and start to copy them to the device; kernels launched from now on wait for it."""
        self.weights_copied.synchronize()  # the last step's copy, which reads what is overwritten here
        self.weights.copy_(master)
        self.weights_copied = start_copy(weight_shard, self.weights)
        self.weights_copied.wait()
