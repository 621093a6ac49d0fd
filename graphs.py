"""CUDA graphs: a step is captured once and then replayed, without Python.

Saves: the time in which a GPU waits for a CPU, for Python, autograd and the launch of every kernel. A layer is some 30
       launches, forward and backward; a replayed step is one.
Costs: the memory of a step's activations stays allocated; two steps are run, and one captured, for each shape of batch.
Stops helping when: kernels take longer than their launches. A layer of Llama 1B, at 600 TFLOP/s, is 10 ms of kernels
       for 16,000 tokens, its launches half a millisecond if each takes 15 us. For 500 tokens it is 0.3 ms of kernels.

What is captured is kernels, and the addresses and numbers that they were given:

    Python        zero gradients  forward  backward  forward  backward        update, which lr changes
                  │││││││││││││││││││││││││││││││││││││││││││││││││││         ││
    captured      ▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼
    replayed      ───────────────────────────────────────────────────►

So what changes from step to step must be in memory, at the same place every time: tokens are copied to where the
captured ones were, weights and main gradients stay where they are (zero.py), FP8 weights are quantised again in every
step, the loss scale of fp16 is a tensor. What Python does in between happens once: a value that it looked at
(`.item()`), or a shape that depends on one, would be that of the captured step for ever. Hence no experts, who get as
many tokens as the router says. And hence one process: some of what several send each other is waited for where Python
says so.

On a CPU a capture is the list of operations that torch dispatched, replayed by calling each again with the very same
tensors. Nothing is gained, and no activation is freed, but the rules are those of a GPU and so are tested without one.
(`.tolist()` and `.numpy()` are no operations: a GPU refuses to capture them, a CPU does not notice.)

The other way to launch less, torch.compile of a block, would see no gradient that goes through param.accumulate_grad;
what it would fuse, kernels.py does.

Gray 2019 (Getting started with CUDA graphs); Nguyen et al. 2021 (Accelerating PyTorch with CUDA graphs).
"""
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Tensor = torch.Tensor
LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # operations that return values, or a count


class Captured:
    """run(batches) -> tensor, replayed from the call after `warmups` with batches of the same shapes on.

    batches: tensors in lists and tuples. Warming up compiles kernels and allocates what stays. The result of a call is
    overwritten by the next one. On a GPU everything since parameters were made has to be in one stream that is not the
    default one, see `leave_default_stream`.
    """

    def __init__(self, run: Callable[[Any], Tensor], warmups: int = 2):
        self.run, self.warmups = run, warmups
        self.shapes, self.calls, self.captured = None, 0, None

    def __call__(self, batches: Any) -> Tensor:
        tensors = tensors_of(batches)
        shapes = [x.shape for x in tensors]
        if shapes != self.shapes:  # larger batches from now on: what was captured goes, and its memory
            self.shapes, self.calls, self.captured = shapes, 0, None
        self.calls += 1
        if self.calls <= self.warmups:
            return self.run(batches)
        if self.captured is None:
            self.captured = self.capture(batches)
            return self.captured[2]
        places, graph, result = self.captured
        for place, x in zip(places, tensors):
            place.copy_(x)
        graph.replay()
        return result

    def capture(self, batches: Any) -> tuple[list[Tensor], "torch.cuda.CUDAGraph | Operations", Tensor]:
        """(where batches go, what is replayed, where its result is), after one replay with these."""
        batches = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batches)
        places = tensors_of(batches)
        if not places[0].is_cuda:
            with Operations() as graph:
                return places, graph, self.run(batches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):  # kernels are captured here, and none runs
            result = self.run(batches)
        graph.replay()
        return places, graph, result


def tensors_of(batches: Any) -> list[Tensor]:
    return [x for x in tree_leaves(batches) if isinstance(x, Tensor)]


def leave_default_stream(device: torch.device) -> None:
    """Before parameters are made: gradients are accumulated in the stream that their parameters were made in, and the
    default one cannot be captured."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


class Operations(TorchDispatchMode):
    """What a CUDA graph would hold, for CPUs: operations, and the tensors that they were given and that they made."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        plain_index = function is torch.ops.aten.index.Tensor and not any(is_mask(x) for x in tree_leaves(args))
        if LOOKS & set(function.tags) and not plain_index:
            raise RuntimeError(f"{function} looks at a value: it cannot be captured")
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, out))
        return out

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, out in self.calls:
                for place, x in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs))):
                    if isinstance(x, Tensor) and x.untyped_storage()._cdata != place.untyped_storage()._cdata:
                        place.copy_(x)  # else it is a view, or was changed in place


def is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


# ---- demo: python graphs.py -----------------------------------------------------------------------------------------

def demo() -> None:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leave_default_stream(torch.device(device))
    layers = [torch.nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device)

    def run(x: Tensor) -> Tensor:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.zero_()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured, x = Captured(run), torch.randn(1, 16, 64, device=device)
    for _ in range(3):
        captured(x)
    seconds = {run: [], captured: []}
    for _ in range(30):
        for way, times in seconds.items():
            began = time.perf_counter()
            way(x)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    plain, replayed = (sorted(times)[len(times) // 2] * 1e3 for times in seconds.values())
    print(f"Forward and backward of 8 transformer layers and 16 tokens: {plain:.1f} ms run by Python and autograd, "
          f"{replayed:.1f} ms replayed.")
    if device == "cpu":
        print(f"A CPU calls each of {len(captured.captured[1].calls)} operations; a GPU launches all in one call.")


if __name__ == "__main__":
    demo()
