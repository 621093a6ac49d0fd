"""CUDA graphs: a step is captured once and then replayed, without Python.

Saves: the time in which a GPU waits for a CPU: for Python, autograd and the launch of every kernel. A layer has some 30
       launches, forward and backward; a replayed step has one.
Costs: the activations of a step stay allocated. For each shape of batches two steps are executed, then one is captured.
Stops helping when: kernels take longer than their launches. A layer of Llama 1B, at 600 TFLOP/s, is 10 ms of kernels
       for 16,000 tokens; its launches are half a millisecond, at 15 us each. For 500 tokens it is 0.3 ms of kernels.

Kernels are captured, with the addresses and the numbers that they were given:

    Python        zero gradients  forward  backward  forward  backward        update, which lr changes
                  │││││││││││││││││││││││││││││││││││││││││││││││││││         ││
    captured      ▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼
    replayed      ───────────────────────────────────────────────────►

So whatever changes from step to step must be in memory, at the same address in every step: a batch is copied to the one
that was captured, weights and main gradients stay where they are (zero.py), FP8 weights are quantised in every step,
the loss scale of fp16 is a tensor. Python runs only once: a value that it reads (`.item()`), or a shape that depends on
values, would be that of the captured step in every replay. Experts can be captured only where no size depends on how
many tokens the router gives them: on one rank, in bf16 (ep.py). Several processes are ruled out because Python waits
for some of their communication.

On a CPU, `Operations` captures the list of operations that torch dispatches, and a replay calls each of them with the
same tensors. This saves no time and frees no activation, but tests the rules of a GPU without one, except that a GPU
also refuses to capture `.tolist()` and `.numpy()`, which dispatch no operation. (torch.compile would save launches,
too, but it would see no gradient that goes through param.accumulate_grad.)

Gray 2019 (Getting started with CUDA graphs); Nguyen et al. 2021 (Accelerating PyTorch with CUDA graphs).
"""
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from collectives import run_demo

READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operations
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Captured:
    """run(batches) -> tensor, which is executed `warmups` times, then captured, then replayed.

    batches: tensors and None in lists and tuples; if structure or shapes change, warm-up and capture begin anew. Raises
    ValueError if dtypes change, or for batches without a tensor or with other things. The next call overwrites the
    result. On a GPU, parameters and all that follows belong to one stream, not the default one: `leave_default_stream`.
    """

    def __init__(self, run: Callable[[Any], Tensor], warmups: int = 2):
        self.run, self.warmups = run, warmups
        self.layout, self.dtypes, self.calls, self.captured = None, None, 0, None

    def __call__(self, batches: Any) -> Tensor:
        leaves, structure = tree_flatten(batches)
        tensors = [x for x in leaves if x is not None]
        if not tensors or not all(isinstance(x, Tensor) for x in tensors):
            raise ValueError(f"cannot replay batches of {[type(x).__name__ for x in leaves]}: need tensors (and None)")
        layout, dtypes = (structure, [None if x is None else x.shape for x in leaves]), [x.dtype for x in tensors]
        if layout != self.layout:  # such as larger batches from now on: the captured step is freed
            self.layout, self.dtypes, self.calls, self.captured = layout, dtypes, 0, None
        if dtypes != self.dtypes:
            raise ValueError(f"cannot replay batches of {dtypes}: the captured ones have {self.dtypes}")
        self.calls += 1
        if self.calls <= self.warmups:
            return self.run(batches)
        if self.captured is None:
            self.captured = self.capture(tree_map(lambda x: None if x is None else x.clone(), batches))
            return self.captured[2]
        places, graph, result = self.captured
        for place, x in zip(places, tensors):
            place.copy_(x)
        graph.replay()
        return result

    def capture(self, batches: Any) -> tuple[list[Tensor], "torch.cuda.CUDAGraph | Operations", Tensor]:
        """(the tensors of `batches`, which replays read, what is replayed, the result), after a step with `batches`."""
        places = [x for x in tree_leaves(batches) if x is not None]
        if not places[0].is_cuda:
            with Operations() as graph:
                return places, graph, self.run(batches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):  # captures kernels, and executes none
            result = self.run(batches)
        graph.replay()
        return places, graph, result


def leave_default_stream(device: torch.device) -> None:
    """Call it first: gradients use the stream in which parameters were made, and the default one cannot be captured."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


class Operations(TorchDispatchMode):
    """The counterpart of a CUDA graph on CPUs: operations, with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if reads_values(function, args):
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


def reads_values(function: Any, args: tuple) -> bool:
    """Whether a GPU would wait for values, to count them or to return one."""
    if function not in INDEXING:
        return bool(READS_VALUES & set(function.tags))
    is_fill = len(args) == 3 and args[2].numel() == 1  # x[mask] = a number, for which torch counts nothing
    return not is_fill and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


# ---- demo: python graphs.py -----------------------------------------------------------------------------------------

def demo() -> None:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leave_default_stream(torch.device(device))
    layers = [torch.nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device)

    def run(x: Tensor) -> Tensor:
        model.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured = Captured(run)
    x = torch.randn(1, 16, 64, device=device)
    for _ in range(3):
        captured(x)
    seconds = {run: [], captured: []}
    for _ in range(30):
        for step, times in seconds.items():
            began = time.perf_counter()
            step(x)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    executed, replayed = (statistics.median(times) * 1e3 for times in seconds.values())
    print(f"Forward and backward of 8 layers and 16 tokens: {executed:.1f} ms executed, {replayed:.1f} ms replayed.")
    if device == "cpu":
        print(f"A CPU calls each of {len(captured.captured[1].calls)} operations; a GPU launches all in one call.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
