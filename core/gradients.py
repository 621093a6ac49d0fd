"""How a weight gradient reaches the buffer in which it is summed: at once or later, if possible without a temporary.

The life of the gradient dW of a weight w, in one backward pass:

    a layer's backward calls
    accumulate_grad(w, add)
      │
      ├── at once ───────────────────────────────►  add(out)
      │                                               ▲
      └── deferred ──► queue ──► backward_weight ─────┘

    after all uses of w, autograd calls
    on_grad_accumulated(w)
      │
      ├── nothing of w is queued ────────────────►  ready(w)
      │                                               ▲
      └── dW is queued ────────► backward_weight ─────┘

add(out) does out += dW, where `out` is main_grad(w), the buffer of w's sink. on_grad_accumulated is a hook of w, which
runs after w's AccumulateGrad node. ready(w) is a method of w's sink, which counts the calls. The last one starts the
reduction over the ranks.

Autograd would compute dW at once, into a new tensor, and then add it to `.grad`. Our layers return None for their
weights instead, and pass a function `add` to accumulate_grad, which adds the gradient to a buffer. So a matmul can add
to the buffer directly, and a pipeline can compute the gradient later.

Words:

accumulate   Add a gradient to the sum over the micro-batches of a step.
sink         The object that collects the gradients of a parameter, in practice its bucket (dp.py, zero.py). It has two
             methods:
                 main_grad(param)   returns the parameter's part of the buffer, Megatron's `param.main_grad`. ZeRO
                                    levels 2 and 3 replace the buffer, so ask for it at every use.
                 ready(param)       is called once per backward pass, when all of that pass's gradients of `param`
                                    have been added.
             core/param.py gives every parameter an attribute `sink`. While it is None, `.grad` is the buffer.
ready        A bucket counts the calls of ready. The last one of a step (at ZeRO levels 2 and 3, of a micro-batch)
             starts the reduction over the data parallel ranks. Megatron calls this register_grad_ready.
deferred     Left for the second half of a split backward. Zero-bubble pipelines (pp.py) split backward into two
             halves. The first, I (B in the paper), computes input gradients, for which the stage before is waiting.
             The second, W, computes weight gradients, for which nobody is waiting, so it can fill a bubble.

How the backward of a layer Y = X W^T uses this file (x and dy are detached):

    accumulate_grad(w, lambda out: accumulate_product(out, dy.t(), x))          # out += dY^T X

or, if X has to be gathered from other ranks first:

    add_dw = start_weight_grad((w,), gather=lambda: gather_rows(x, group, async_op=True),
                               add=lambda out, x: accumulate_product(out, dy.t(), x))
    dx = dy @ w                                                                 # hides the gather of X
    add_dw()                                                                    # waits for X, then out += dY^T X
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from core.collectives import Group, Pending, done, run_demo

Params = tuple[nn.Parameter, ...]
Key = tuple[int, int]  # (pipeline stage, micro-batch): one backward pass

# Split backwards (see "deferred"): the weight gradients that the first half has queued for the second half, in the
# order of backward.
_queue: dict[Key, "list[WeightGrad]"] = {}
# The backward whose first half is running, or None. It is a plain global, not thread-local, because on CUDA autograd
# runs backward functions in its own threads.
_deferring: Key | None = None


# ---- the plain version: add a gradient at once ----------------------------------------------------------------------

def add_to(params: Params, add: Callable[[Tensor], None]) -> None:
    """Call add(out), which adds a gradient to the buffers of the parameters.

    params: one parameter, or several with rows of equal length, such as wq, wk and wv, whose gradients are computed by
    one matmul. Then `out` has the rows of all parameters, stacked. It is a view of the buffers if they are neighbours
    in memory. If they are not, `out` is a temporary tensor.
    """
    grads = [main_grad(param) for param in params]
    view = stacked_view(grads)
    if view is not None:
        add(view)
        return
    rows = [len(grad) for grad in grads]
    out = grads[0].new_zeros(sum(rows), *grads[0].shape[1:])
    add(out)
    for grad, part in zip(grads, out.split(rows)):
        grad.add_(part)


def main_grad(param: nn.Parameter) -> Tensor:
    """Return the buffer in which the gradient is summed: the sink's or, without a sink, `.grad`."""
    if param.sink is not None:
        return param.sink.main_grad(param)
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def accumulate_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, where out may be fp32 if a and b have 16 bits.

    On GPUs the matmul then adds in fp32. On CPUs a @ b is rounded to 16 bits first.
    """
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)  # torch.addmm takes no out_dtype with out
    else:
        out.add_(a @ b)


# ---- sinks: who collects a gradient, and is told when it is ready ---------------------------------------------------

def attach_sink(param: nn.Parameter, sink: Any) -> None:
    """From now on `sink` collects the gradient of `param`, from accumulate_grad and from autograd."""
    assert param.sink is None, f"{param.spec.name} has a sink already"  # a second hook would call ready twice
    param.sink = sink
    # A module-level function, not a bound method: the garbage collector cannot free a reference cycle that goes
    # through a hook.
    param.register_post_accumulate_grad_hook(on_grad_accumulated)


def on_grad_accumulated(param: nn.Parameter) -> None:
    """Tell the sink that `param` is ready, unless gradients of it are queued: then backward_weight does.

    Autograd calls this once per backward pass, after the backward of the last use of `param`. It does so even if all
    uses returned None: then it adds nothing to `.grad`, but still calls the hook (tested with torch 2.11 and 2.13 by
    test_a_sink_hears_of_every_parameter_once_a_backward). So a layer's autograd Function takes its weights as inputs,
    although it returns None for them.
    """
    if param.grad is not None:  # computed by autograd, for example a bias's gradient
        param.sink.main_grad(param).add_(param.grad)
        param.grad = None
    if not is_queued(param):
        param.sink.ready(param)


def is_queued(param: nn.Parameter) -> bool:
    """Return whether the running backward has queued a gradient of `param`. False unless the backward is split."""
    if not is_deferring():
        return False
    for weight_grad in _queue[_deferring]:
        if any(param is other for other in weight_grad.params):
            return True
    return False


# ---- overlapped or deferred: what a layer's backward calls ----------------------------------------------------------

def accumulate_grad(params: nn.Parameter | Params, add: Callable[[Tensor], None], defer: bool = True) -> None:
    """Add a weight gradient that needs no gather: call add(out) now, or in backward_weight if it is deferred.

    params, add: see add_to. defer: see start_weight_grad.
    """
    params = params if isinstance(params, tuple) else (params,)
    # done(None): a gather that has finished already, with no result
    finish = start_weight_grad(params, lambda: done(None), lambda out, _: add(out), defer)
    finish()


def start_weight_grad(params: Params, gather: Callable[[], Pending], add: Callable[[Tensor, Any], None],
                      defer: bool = True) -> Callable[[], None]:
    """Start a WeightGrad and return its `finish`, so that the caller can compute something while the gather runs.

    In the first half of a split backward this starts nothing. It queues the WeightGrad for backward_weight, and returns
    a function that does nothing.

    params, gather, add: see WeightGrad.
    defer: False if the gradient must not be queued: because it reads tensors too large to be kept until
        backward_weight, such as the head's logits, or because it has too little work to fill a bubble.
    """
    weight_grad = WeightGrad(params, gather, add)
    if defer and is_deferring():
        _queue[_deferring].append(weight_grad)
        return lambda: None
    weight_grad.start()
    return weight_grad.finish


class WeightGrad:
    """A weight gradient that has not been computed yet, in two steps: start, which gathers, and finish, which adds.

    params: see add_to.
    gather: () -> a Pending. It starts to gather the tensor that the gradient is computed from.
    add: add(out, gathered) adds the gradients of all params, stacked, to `out`.

    gather and add must not hold tensors that require gradients. In the queue they would keep a graph alive.
    """

    def __init__(self, params: Params, gather: Callable[[], Pending], add: Callable[[Tensor, Any], None]):
        self.params, self.gather, self.add = params, gather, add
        self.gathering: Pending | None = None

    def start(self) -> None:
        """Start to gather."""
        self.gathering = self.gather()

    def finish(self) -> None:
        """Wait for the gathered tensor, and add the gradient."""
        gathered = self.gathering.wait()
        add_to(self.params, lambda out: self.add(out, gathered))
        self.gather = self.add = self.gathering = None  # frees their tensors, even if this object is still referenced


# ---- a backward in two halves ---------------------------------------------------------------------------------------

def is_deferring() -> bool:
    """Return whether the first half of a split backward is running, which leaves weight gradients to the second."""
    return _deferring is not None


def backward_input(key: Key, output: GradientEdge | Tensor, grad: Tensor | None) -> None:
    """The first half: compute input gradients, and queue the weight gradients that may be deferred.

    output, grad: the output of the stage, or its edge in the graph, and its gradient. A loss has the gradient None.
    """
    global _deferring
    assert key not in _queue, f"(stage, micro-batch) {key} already waits for its backward_weight"
    _deferring, _queue[key] = key, []
    try:
        torch.autograd.backward(output, grad)
    except BaseException:
        _queue.clear()  # the step has failed: the next one must not compute its weight gradients
        raise
    finally:
        _deferring = None


@torch.no_grad()  # autograd is not running here: without this each gradient would build a graph that is never freed
def backward_weight(key: Key) -> None:
    """The second half: compute the weight gradients that backward_input has queued.

    The matmul of each hides the gather of the next, so at most two gathered tensors are alive.

    A parameter is ready when the last queued gradient of its *sink* has been added, even if its own came earlier. If
    `ready` were called after the parameter's own gradient, it could start the reduction at ZeRO levels 2 and 3. That
    takes the buffer away while other gradients of the sink are still to come. They would need a new buffer, which would
    stay until the next reduction. The sums would be right either way. If `ready` were called later, less would be
    hidden, because the reduction runs under the weight gradients of other sinks.
    """
    queued = _queue.pop(key)
    params = dict.fromkeys(param for weight_grad in queued for param in weight_grad.params)  # each once, in this order
    last = {}  # sink -> the place of its last gradient in the queue
    for i, weight_grad in enumerate(queued):
        for param in weight_grad.params:
            last[param.sink] = i

    if queued:
        queued[0].start()
    for i, weight_grad in enumerate(queued):
        if i + 1 < len(queued):
            queued[i + 1].start()
        weight_grad.finish()
        for param in params:
            if param.sink is not None and last[param.sink] == i:
                param.sink.ready(param)


def queued_keys() -> list[Key]:
    """Return the (stage, micro-batch) pairs whose weight gradients have not been computed: none after a step."""
    return list(_queue)


# ---- neighbours in memory as one matrix -----------------------------------------------------------------------------

def stacked_view(tensors: list[Tensor]) -> Tensor | None:
    """[R1, ...], [R2, ...] -> [R1 + R2, ...] as a view; None unless the tensors follow each other in one storage."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0]  # the usual case, which needs no operation
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        # Not by data_ptr(), because fake tensors (run/dryrun.py) have no addresses. torch keeps one Python object per
        # storage.
        same_storage = tensor.untyped_storage() is first.untyped_storage()
        if not (same_storage and tensor.storage_offset() == end and tensor.is_contiguous()):
            return None
        end += tensor.numel()
    return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())


def stacked_weight(weights: Params) -> Tensor:
    """Return the weights, stacked and detached: a view if they are neighbours in memory, or else a copy."""
    parts = [weight.detach() for weight in weights]
    view = parts[0] if len(parts) == 1 else stacked_view(parts)
    return torch.cat(parts) if view is None else view


# ---- demo: python -m core.gradients ---------------------------------------------------------------------------------

WIDTH, TOKENS, LAYERS = 64, 1024, 3


class Multiply(torch.autograd.Function):
    """Y = X W^T, the smallest layer that uses this file. layer: its number. events: what happens, in order."""

    @staticmethod
    def forward(ctx, x, weight, layer, events):
        ctx.save_for_backward(x)  # not the weight: saved-tensor hooks may return a copy, which has no sink
        ctx.weight, ctx.layer, ctx.events = weight, layer, events
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        weight, layer, events = ctx.weight, ctx.layer, ctx.events
        x = ctx.saved_tensors[0].detach()

        def add(out: Tensor) -> None:
            events.append(f"dW{layer}")
            accumulate_product(out, dy.t(), x)

        events.append(f"dX{layer}")
        dx = dy @ weight
        accumulate_grad(weight, add)
        return dx, None, None, None


class Sink:
    """Sums the gradient of one weight, and notes when it is ready."""

    def __init__(self, weight: nn.Parameter, layer: int, events: list[str]):
        self.buffer, self.layer, self.events = torch.zeros_like(weight), layer, events
        weight.sink = None
        attach_sink(weight, self)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        return self.buffer

    def ready(self, param: nn.Parameter) -> None:
        self.events.append(f"ready{self.layer}")


def demo(group: Group) -> None:
    torch.manual_seed(0)
    values = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    sums, shown = [], []
    for is_split in (False, True):
        events: list[str] = []
        weights = [nn.Parameter(value) for value in values]
        sinks = [Sink(weight, layer, events) for layer, weight in enumerate(weights, 1)]
        y = x
        for layer, weight in enumerate(weights, 1):
            y = Multiply.apply(y, weight, layer, events)
        if is_split:
            key = (0, 0)  # stage 0, micro-batch 0
            backward_input(key, y.sum(), None)
            shown.append(f"backward_input    {' '.join(events)}")
            events.clear()
            backward_weight(key)
            shown.append(f"backward_weight   {' '.join(events)}")
        else:
            y.sum().backward()
            shown.append(f"backward          {' '.join(events)}")
        sums.append(torch.stack([sink.buffer for sink in sinks]))
    assert torch.equal(*sums)
    if group.rank == 0:
        print(f"{LAYERS} layers of {WIDTH} x {WIDTH} weights, {TOKENS:,} tokens. dX3: layer 3 computes its input "
              "gradient.\ndW3: its weight gradient is added to the buffer. ready3: its sink may reduce it.\n")
        print(*shown, sep="\n")
        kept = LAYERS * 2 * TOKENS * WIDTH * 4 / 1e6
        print("\nThe gradients are bitwise equal either way. In halves, dX1 is there after 3 matmuls, not after 5, "
              "so the stage\nbefore can go on. The price: between the halves the queue keeps X and dY of each "
              f"layer, {kept:.2f} MB.")


if __name__ == "__main__":
    run_demo(demo)
