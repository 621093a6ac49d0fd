"""CUDA graphs: a step is recorded once and then played, without Python.

Saves: the time in which a GPU waits for a CPU, which Python, autograd and the launch of a kernel take. A layer is some
       30 launches, forward and backward; a played step is one.
Costs: the memory of a step's activations stays taken; two steps are run, and one recorded, for each shape of a batch.
Stops helping when: kernels take longer than their launches. A layer of Llama 1B, at 600 TFLOP/s, is 10 ms of kernels
       for 16,000 tokens, its launches half a millisecond if each takes 15 us. For 500 tokens it is 0.3 ms of kernels.

What is recorded is kernels, and the addresses and numbers that they were given:

    Python        zero gradients  forward  backward  forward  backward        update, which lr changes
                  │││││││││││││││││││││││││││││││││││││││││││││││││││         ││
    recorded      ▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼▼
    played        ───────────────────────────────────────────────────►

So what changes from step to step must be in memory, at the same place every time: tokens are copied to where the
recorded ones were, weights and their sums of gradients stay where they are (zero.py), FP8 weights are made anew in
every step, the loss scale of fp16 is a tensor. What Python does in between happens once: a value that it looked at
(`.item()`), or a shape that depends on one, would be that of the recorded step for ever. Hence no experts, who get as
many tokens as the router says. And hence one process: of what several send each other, some is waited for where Python
says so.

On a CPU a recording is the list of operations that torch dispatched, played by calling each again with the very same
tensors. Nothing is gained, and no activation is freed, but the rules are those of a GPU and so are tested without one.
(`.tolist()` and `.numpy()` are no operations: a GPU refuses to record them, a CPU does not notice.)

The other way to launch less, torch.compile of a block, would see no gradient that goes through param.py's door; what it
would fuse, kernels.py does.

Gray 2019 (Getting started with CUDA graphs); Nguyen et al. 2021 (Accelerating PyTorch with CUDA graphs).
"""
import copy
import time
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data import MicroBatch

Tensor = torch.Tensor
LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # what gives values, or their number


class Recorded:
    """run(micro-batches) -> tensor, played from the call after `warmups` with micro-batches of the same shapes on.

    Warming up compiles kernels and allocates what stays. The result of a call is overwritten by the next one. On a GPU
    everything from the making of parameters on has to be in one stream that is not the default one, see `prepare`.
    """

    def __init__(self, run: Callable[[list[MicroBatch]], Tensor], warmups: int = 2):
        self.run, self.warmups = run, warmups
        self.shapes, self.calls, self.recording = None, 0, None

    def __call__(self, batches: list[MicroBatch]) -> Tensor:
        tensors = tensors_of(batches)
        shapes = [x.shape for x in tensors]
        if shapes != self.shapes:  # more sequences from now on: the recording goes, and its memory
            self.shapes, self.calls, self.recording = shapes, 0, None
        self.calls += 1
        if self.calls <= self.warmups:
            return self.run(batches)
        if self.recording is None:
            self.recording = self.record(batches)
            return self.recording[2]
        places, graph, result = self.recording
        for place, x in zip(places, tensors):
            place.copy_(x)
        graph.replay()
        return result

    def record(self, batches: list[MicroBatch]) -> tuple[list[Tensor], "torch.cuda.CUDAGraph | Operations", Tensor]:
        """(where micro-batches go, what is played, where its result is), after one play with these."""
        batches = copy.deepcopy(batches)
        places = tensors_of(batches)
        if not places[0].is_cuda:
            with Operations() as graph:
                return places, graph, self.run(batches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):  # kernels are noted here, and none runs
            result = self.run(batches)
        graph.replay()
        return places, graph, result


def tensors_of(batches: list[MicroBatch]) -> list[Tensor]:
    return [x for batch in batches for x in vars(batch).values() if x is not None]


def prepare(device: torch.device) -> None:
    """Before parameters are made: their gradients arrive in the stream they are made in, and the default one cannot be
    recorded."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


class Operations(TorchDispatchMode):
    """What a CUDA graph would hold, for CPUs: operations and the tensors that they were given and that they made."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        plain_index = function is torch.ops.aten.index.Tensor and not any(is_mask(x) for x in tree_leaves(args))
        if LOOKS & set(function.tags) and not plain_index:
            raise RuntimeError(f"{function} looks at a value: it cannot be recorded")
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


def is_mask(x) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


# ---- demo: python graphs.py -----------------------------------------------------------------------------------------

def demo() -> None:
    import config
    import train

    torch.set_num_threads(1)
    settings = config.parse("--layers 8 --seq 32 --global-batch 1".split())
    groups = dict.fromkeys(train.AXES)
    model, optimizer = train.build(settings, groups, torch.device("cpu"), torch.float32)

    def run(batches):
        return train.gradients(model, optimizer, batches, groups)

    recorded, batches = Recorded(run), [MicroBatch(*torch.randint(256, (2, 1, 32)))]
    for _ in range(3):
        recorded(batches)
    times = {run: [] for run in (run, recorded)}
    for _ in range(30):
        for way, spent in times.items():
            began = time.perf_counter()
            way(batches)
            spent.append(time.perf_counter() - began)
    plain, played = (sorted(spent)[len(spent) // 2] * 1e3 for spent in times.values())
    count = len(recorded.recording[1].calls)
    print(f"A step of 8 layers and 32 tokens is {count} operations here, views and norms written out among them. It\n"
          f"takes {plain:.1f} ms run by Python and autograd, and {played:.1f} ms played by a CPU, which calls each of\n"
          "them again. A GPU is told once.")



if __name__ == "__main__":
    demo()
