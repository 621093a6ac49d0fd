"""How weight gradients reach their buffers: without a temporary tensor, and either at once or later.

Autograd would compute each weight gradient at once, into a new tensor, and then add it to a buffer. Our layers return
None for their weights instead. They give this file a function that adds the gradient to a buffer:

    accumulate_grad(w, lambda out: accumulate_product(out, dy.t(), x))          # out += dY^T X

    add_dw = start_weight_grad((w,), gather=lambda: gather_rows(x, group, async_op=True),
                               add=lambda out, x: accumulate_product(out, dy.t(), x))
    dx = dy @ w                                                                 # hides the gather of X
    add_dw()                                                                    # waits for X, then out += dY^T X

So a matmul can add to the buffer directly, and a pipeline schedule can split a backward into two halves (pp.py):

    backward_input(key, ...)     computes input gradients and queues weight gradients       action I
    backward_weight(key)         computes the weight gradients that were queued             action W

The buffer belongs to the parameter's sink, which is its bucket (dp.py, zero.py). A sink has two methods:

    main_grad(param)     returns the buffer. ZeRO levels 2 and 3 replace it, so ask for it at every use.
    ready(param)         is called once per backward pass, after that pass has added all its gradients of `param`: by a
                         hook of autograd or, if gradients of `param` were queued, by backward_weight.

A bucket counts the calls of `ready`, and starts its reduction at the last one of a step (at ZeRO levels 2 and 3, of a
micro-batch).
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from core.collectives import Pending, done

Params = tuple[nn.Parameter, ...]


# ---- what a layer's backward calls ----------------------------------------------------------------------------------

class WeightGrad:
    """A weight gradient that has not been computed yet.

    params: one parameter, or matrices with equally long rows that multiply the same input (wq, wk, wv).
    gather: () -> a Pending. It starts to gather the tensor that the gradient is computed from.
    add: add(out, gathered) adds the gradients of all params, one below the other, to `out`.
    gather and add must not hold tensors that require gradients: in the queue they would keep a graph alive.
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
        self.gather = self.add = self.gathering = None  # frees what they read, even if the caller keeps this object


def start_weight_grad(params: Params, gather: Callable[[], Pending], add: Callable[[Tensor, Any], None],
                      defer: bool = True) -> Callable[[], None]:
    """Start a WeightGrad and return its `finish`, so that the caller can compute something while the gather runs.

    In the first half of a split backward this queues the WeightGrad for backward_weight instead, starts nothing, and
    returns a function that does nothing.
    defer: False to never queue it. That is right if it reads tensors too large to be kept until backward_weight, such
    as the head's logits, or has too little work to fill a bubble.
    """
    weight_grad = WeightGrad(params, gather, add)
    if defer and is_deferring():
        _queue[_deferring].append(weight_grad)
        return lambda: None
    weight_grad.start()
    return weight_grad.finish


def accumulate_grad(params: nn.Parameter | Params, add: Callable[[Tensor], None], defer: bool = True) -> None:
    """Add a weight gradient that needs no gather. add(out) is called now or, if it is queued, in backward_weight."""
    params = params if isinstance(params, tuple) else (params,)
    finish = start_weight_grad(params, lambda: done(None), lambda out, _: add(out), defer)
    finish()


def add_to(params: Params, add: Callable[[Tensor], None]) -> None:
    """Call add(out) once for the buffers of all params, one below the other.

    `out` is a view of the buffers if they are neighbours in memory, else a temporary tensor.
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


def stacked_view(tensors: list[Tensor]) -> Tensor | None:
    """[R1, ...], [R2, ...] -> [R1 + R2, ...] as a view; None unless the tensors follow each other in one storage."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same_storage = tensor.untyped_storage() is first.untyped_storage()  # run/dryrun.py's tensors have no addresses
        if not (same_storage and tensor.storage_offset() == end and tensor.is_contiguous()):
            return None
        end += tensor.numel()
    return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())


def stacked_weight(weights: Params) -> Tensor:
    """The weights, one below the other, detached: a view if they are neighbours in memory, else a copy."""
    parts = [weight.detach() for weight in weights]
    view = parts[0] if len(parts) == 1 else stacked_view(parts)
    return torch.cat(parts) if view is None else view


# ---- sinks ----------------------------------------------------------------------------------------------------------

def main_grad(param: nn.Parameter) -> Tensor:
    """The buffer in which the gradient is accumulated: the sink's or, without a sink, `.grad`."""
    if param.sink is not None:
        return param.sink.main_grad(param)
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def attach_sink(param: nn.Parameter, sink: Any) -> None:
    """From now on `sink` collects the gradient of `param`, from accumulate_grad and from autograd."""
    assert param.sink is None, f"{param.spec.name} has a sink already"  # a second hook would call ready twice
    param.sink = sink
    # A function of the module, no closure over the sink: gc cannot break a circle that goes through a hook.
    param.register_post_accumulate_grad_hook(on_grad_accumulated)


def on_grad_accumulated(param: nn.Parameter) -> None:
    """Tell the sink that `param` is ready, unless gradients of it are queued: then backward_weight does.

    Autograd calls this once per backward pass, after the last use of `param`, even if all uses returned None. That is
    why a layer's Function has its weights among its inputs.
    """
    if param.grad is not None:  # computed by autograd, such as a bias's
        param.sink.main_grad(param).add_(param.grad)
        param.grad = None
    queued = _queue.get(_deferring, [])  # empty if this backward is not split
    is_queued = any(param is other for weight_grad in queued for other in weight_grad.params)
    if not is_queued:
        param.sink.ready(param)


# ---- a backward in two halves ---------------------------------------------------------------------------------------

Key = tuple[int, int]  # (pipeline stage, micro-batch)

_queue: dict[Key, list[WeightGrad]] = {}
# The key whose first half is running. A plain global, not thread-local: on CUDA, autograd runs backward functions in
# its own threads.
_deferring: Key | None = None


def is_deferring() -> bool:
    """Whether this backward is the first half of a split one, which leaves weight gradients to backward_weight."""
    return _deferring is not None


def backward_input(key: Key, output: GradientEdge | Tensor, grad: Tensor | None) -> None:
    """The first half: compute input gradients, and queue the weight gradients that may be deferred."""
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

    A parameter is ready when the last queued gradient of its *bucket* has been added. Earlier would be wrong at ZeRO
    levels 2 and 3: there `ready` may start the reduction, which would miss some of this micro-batch's gradients. Later
    would hide less: the reduction runs under the weight gradients of other buckets.
    """
    queued = _queue.pop(key)
    params = dict.fromkeys(param for weight_grad in queued for param in weight_grad.params)  # each once, in this order
    last = {param.sink: i for i, weight_grad in enumerate(queued) for param in weight_grad.params}  # by bucket
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
    """The (stage, micro-batch) pairs whose weight gradients have not been computed: none after a step."""
    return list(_queue)
