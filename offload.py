"""Offload: what a GPU does not need now waits in the host's memory. --offload optimizer, activations or both.

Saves: optimizer: the master weights and the moments, 12 of the 18 bytes per parameter in bf16. activations: the inputs
       of blocks, which are all that full recomputation saves; two of them stay on the GPU.
Costs: optimizer: per step and parameter 4 bytes to the host, 2 back, and an update by the CPU, which moves 34 bytes of
       the host's memory; 18 bytes of it are needed (12 of state, 4 of gradient, 2 of weights). activations: 2 H bytes
       per token and block to the host, and back.
Stops helping when: the GPU waits too long for the CPU's update, during which it computes nothing; or copying a block's
       input takes longer than the forward or backward of a block, beside which it is copied.

This file has the copies. Buckets (zero.py, `start_offload` and `update_weights`) and checkpoints (recompute.py,
`CheckpointArena`) start them, beside kernels. Each direction has a stream: the link carries both at once.

    optimizer     GPU     ... backward │ norm, clip │                                       │ next forward
                  to host              │        g0 ↓  g1 ↓  g2 ↓                            │
                  CPU                  │              AdamW 0   AdamW 1   AdamW 2           │
                  to GPU               │                        w0 ↑      w1 ↑      w2 ↑    │

    activations   GPU     forward 1   forward 2   forward 3           backward 3   backward 2   backward 1
                  to host x1 ↓        x2 ↓        x3 ↓
                  to GPU                                      x3 ↑    x2 ↑         x1 ↑

A copy begins when the kernels launched before it, and the copies before it in its direction, are done; a block's input
comes back after it has been saved. It does so while the backward of the block after it runs, one block ahead: so two
are on the GPU at once. Gradients leave bucket by bucket, while the CPU updates the bucket before.

The host's memory is pinned, because only from there the copy engine reads while the CPU goes on. `record_stream` keeps
the allocator from reusing a tensor's memory before its copy has ended.

Ren et al. 2021 (ZeRO-Offload: the optimizer on the CPU); Rajbhandari et al. 2020 (ZeRO, section 6: P_a+cpu, the inputs
of blocks).
"""
from collections.abc import Sequence
from functools import cache

import torch

from collectives import run_demo


class Copied:
    """A copy that was made at once, on a CPU; on GPUs a torch.cuda.Event is in its place."""

    def wait(self) -> None:
        """Let kernels that are launched from now on wait for it."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


@cache
def stream_of(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    """The one that all copies in this direction share."""
    return torch.cuda.Stream(device)


class CopyStreams:
    """Copies between a device and the memory of the host, which is the same on a CPU; a stream for each direction."""

    def __init__(self, device: torch.device):
        self.device = device

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host, filled with zeros."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def start(self, target: torch.Tensor, source: torch.Tensor,
              after: "Copied | torch.cuda.Event | None" = None) -> "Copied | torch.cuda.Event":
        """Start to copy to or from the host, after the kernels that have been launched so far and the copy `after`."""
        if self.device.type != "cuda":
            target.copy_(source)
            return Copied()
        stream = stream_of(self.device, to_host=source.is_cuda)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if after:
                after.wait()
            target.copy_(source, non_blocking=True)
            (source if source.is_cuda else target).record_stream(stream)
            return stream.record_event()


# ---- demo: python offload.py ----------------------------------------------------------------------------------------

def largest_model(offload: str, room: float) -> tuple[int, dict[str, int]]:
    """(layers of 8B's shape, GPU memory by kind) of the largest model that trains in `room` bytes, by formula."""
    import config
    from plan import machines, stagetime
    from plan import time as estimate

    flags = f"--preset llama-3.1-8b --seq 4096 --global-batch 1 --dtype bf16 --recompute full --offload {offload}"
    layers, kinds = 0, {}
    while True:
        settings = config.parse(f"{flags} --layers {layers + 1}".split())
        found = estimate.memory(stagetime.Run(settings, machines.MACHINES["h200"]))
        if sum(found.values()) > room:
            return layers, kinds
        layers, kinds = layers + 1, found


def demo() -> None:
    from config import OFFLOADS
    from plan.machines import MACHINES
    from plan.stagetime import CONSTANTS

    room = MACHINES["h200"].memory_bytes * CONSTANTS.usable - CONSTANTS.reserved
    print("The largest model of 8B's layers (8B has 32) that trains on one H200 on a sequence of 4096 tokens with\n"
          f"--recompute full, in {room / 1e9:.0f} GB, by the formulas of plan/; GB on the GPU:\n")
    layers_of = {}
    for offload in OFFLOADS:
        layers_of[offload], kinds = largest_model(offload, room)
        print(f"    --offload {offload:12s}{layers_of[offload]:4d} layers: " +
              ", ".join(f"{kind} {nbytes / 1e9:.1f}" for kind, nbytes in kinds.items() if nbytes))
    times = layers_of["optimizer"] / layers_of["none"]
    print(f"\nWith the optimizer's state on the host {times:.1f} times as many layers fit.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
