"""How weight gradients reach their sinks: at once or deferred, and when a sink hears that they are ready."""
import weakref
from functools import partial

import pytest
import torch

from core import gradients
from core.collectives import done
from core.param import Spec, parameter


class Layer(torch.autograd.Function):
    """x times a weight; `backward` is given the result's gradient, and returns that of x."""

    @staticmethod
    def forward(ctx, x, weight, backward):
        ctx.run = backward
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return ctx.run(grad), None, None


class Bucket:
    def __init__(self, *weights: torch.nn.Parameter):
        self.grads, self.heard = {}, []
        for weight in weights:
            gradients.attach_sink(weight, self)

    def main_grad(self, weight):
        return self.grads.setdefault(weight, torch.zeros(weight.shape))

    def ready(self, weight):
        self.heard.append(weight)


@pytest.fixture
def weights():
    made = [parameter(Spec(f"w{i}", (1,)), {}, torch.float32) for i in range(2)]
    for i, weight in enumerate(made):
        weight.data = torch.tensor([2.0 + i])
    yield made
    assert gradients.queued_keys() == []


def loss(x, weights, defer=True):
    """x w0 w0 w1, of which the last factor is used by plain autograd. The closure of w0's gradient holds a tensor that
    requires gradients, as a careless layer's would."""
    kept = torch.ones(3, requires_grad=True)

    def times(x, weight):
        def backward(grad):
            gradients.accumulate_grad(weight, lambda out: out.add_((grad * x).sum() + 0 * kept.sum()), defer)
            return grad * weight
        return Layer.apply(x, weight, backward)

    return (times(times(x, weights[0]), weights[0]) * weights[1]).sum()


def test_a_sink_hears_of_every_parameter_once_a_backward(weights):
    bucket = Bucket(*weights)
    for passes in (1, 2):
        loss(torch.tensor([5.0], requires_grad=True), weights).backward()
        assert len(bucket.heard) == 2 * passes and set(map(id, bucket.heard)) == set(map(id, weights))
        assert bucket.grads[weights[0]].item() == passes * 60 and bucket.grads[weights[1]].item() == passes * 20
        assert weights[0].grad is None and weights[1].grad is None
    with pytest.raises(AssertionError, match="w0 has a sink already"):
        gradients.attach_sink(weights[0], bucket)


def test_weight_gradients_wait_until_they_are_asked_for(weights):
    bucket = Bucket(*weights)
    x = torch.tensor([5.0], requires_grad=True)
    gradients.backward_input((0, 7), loss(x, weights), None)
    assert x.grad.item() == 12
    assert bucket.heard == [weights[1]] and weights[0] not in bucket.grads  # only what came by plain autograd is there
    assert gradients.queued_keys() == [(0, 7)] and not gradients.is_deferring()
    gradients.backward_weight((0, 7))
    assert bucket.heard == [weights[1], weights[0]]
    assert bucket.grads[weights[0]].item() == 60
    assert not bucket.grads[weights[0]].requires_grad, "a graph would grow from every deferred gradient"
    gradients.backward_input((0, 7), loss(x, weights, defer=False), None)
    assert bucket.grads[weights[0]].item() == 2 * 60 and len(bucket.heard) == 4, "what must not be deferred is not"
    gradients.backward_weight((0, 7))


def test_what_deferred_gradients_read_is_freed_one_by_one(weights):
    alive, seen = [], []

    def backward(weight, grad):
        activation = grad.clone()
        alive.append(weakref.ref(activation))

        def add(out):
            seen.append(sum(reference() is not None for reference in alive))
            out.add_(activation.sum())
        gradients.accumulate_grad(weight, add)
        return grad

    y = torch.tensor([5.0], requires_grad=True)
    for weight in (*weights, weights[0]):
        y = Layer.apply(y, weight, partial(backward, weight))
    gradients.backward_input((0, 0), y, None)
    gradients.backward_weight((0, 0))
    assert seen == [3, 2, 1]


def test_a_weight_gradient_in_two_steps_is_between_them_while_its_caller_computes(weights):
    """In a split backward the caller's two calls do nothing, each first step comes before the last one's second, and a
    bucket hears once that its weights are ready, as soon as their last gradients are there, alone or with others'."""
    seen, buckets = [], [Bucket(weight) for weight in weights]
    for bucket in buckets:
        bucket.ready = lambda weight: seen.append(f"ready {weight.spec.name}")

    def backward(name, params, grad):
        def gather():
            seen.append(f"start {name}")
            return done(torch.ones(1))

        def add(out, gathered):
            seen.append(f"add {name}")
            out.add_(gathered)

        finish = gradients.start_weight_grad(params, gather, add)
        seen.append(f"input {name}")
        finish()
        return grad

    def loss():
        x = torch.ones(1, requires_grad=True)
        for name, params in zip("abc", (weights[:1], weights, weights[:1])):
            x = Layer.apply(x, params[-1], partial(backward, name, tuple(params)))
        return x

    loss().backward()
    assert [event for event in seen if "ready" not in event] == [
        f"{step} {name}" for name in "cba" for step in ("start", "input", "add")]
    seen.clear()
    gradients.backward_input((0, 0), loss(), None)
    assert seen == ["input c", "input b", "input a"]
    gradients.backward_weight((0, 0))
    assert seen[3:] == ["start c", "start b", "add c", "start a", "add b", "ready w1", "add a", "ready w0"]
    assert [bucket.grads[weight].item() for bucket, weight in zip(buckets, weights)] == [6.0, 2.0]


def test_weight_gradients_of_a_failed_step_are_not_computed_in_the_next(weights):
    def fail(grad):
        raise FloatingPointError("in the middle of a backward")

    x = torch.tensor([5.0], requires_grad=True)
    gradients.backward_input((0, 0), loss(x, weights), None)
    with pytest.raises(FloatingPointError):
        gradients.backward_input((0, 1), loss(Layer.apply(x, 1, fail), weights), None)
    assert gradients.queued_keys() == [] and not gradients.is_deferring() and weights[0].grad is None
    gradients.backward_input((0, 1), loss(x, weights), None)
    gradients.backward_weight((0, 1))
    assert weights[0].grad.item() == 2 * 5 * 2 * 3, "of one backward, and without a sink in .grad"


def test_parameters_side_by_side_get_one_gradient():
    flat, outs = torch.zeros(5 * 4), []
    first, second = (parameter(Spec("w", (rows, 4)), {}, torch.float32) for rows in (3, 2))
    bucket = Bucket()
    bucket.grads = {first: flat[:12].view(3, 4), second: flat[12:].view(2, 4)}
    for sink in (bucket, None, None):
        first.sink = second.sink = sink
        gradients.accumulate_grad((first, second), lambda out: outs.append(out) or out.add_(
            torch.arange(20.0).view(5, 4)))
    assert outs[0].data_ptr() == flat.data_ptr() and torch.equal(flat, torch.arange(20.0))
    assert torch.equal(torch.cat([first.grad, second.grad]), 2 * torch.arange(20.0).view(5, 4))
    assert gradients.stacked_view([flat[:12].view(3, 4), flat[8:].view(3, 4)]) is None
    assert gradients.stacked_view([flat[:12].view(3, 4), torch.zeros(2, 4)]) is None
    assert gradients.stacked_view([flat[:16].view(4, 4).t(), flat[16:].view(1, 4)]) is None  # not in order
    assert gradients.stacked_view([flat]) is flat
    assert gradients.stacked_view([flat.view(5, 4).t()]) is None  # a kernel that adds to it may need rows
