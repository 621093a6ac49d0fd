"""Compare kernels with references in fp64. On CPUs kernels are interpreted, and on a GPU they are
compiled."""
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def leaves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    out = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]
    for x in out:
        x.sink = None  # like a parameter of the model whose gradient autograd collects
    return out


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that results differ by only a few roundings of fp32.

    The bound is 1e-5 of the value. Where terms cancel, it is 2^-20 of the largest value, or of 1 if
    that is larger.
    """
    assert ours.dtype == torch.float32 and ours.shape == exact.shape
    largest = max([1.0, *exact[exact.isfinite()].abs().tolist()])
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=largest * 2 ** -20)


def compare(ours, exact, inputs: list[torch.Tensor]) -> None:
    """Compare results and gradients of two functions of tensors, for the same derivative of every
    result."""
    single, double = leaves(*inputs), leaves(*inputs, dtype=torch.float64)
    results, wanted = ours(*single), exact(*double)
    results, wanted = (x if isinstance(x, tuple) else (x,) for x in (results, wanted))
    derivatives = [numbers(*x.shape, seed=7) for x in results]
    torch.autograd.backward(results, derivatives)
    torch.autograd.backward(wanted, [x.double() for x in derivatives])
    for one, other in zip((*results, *(x.grad for x in single)), (*wanted, *(x.grad for x in double))):
        close(one, other)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, logsumexp of each row), with all scores at once. It is differentiable even where a
    row sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = mask.visible(q.shape[2], k.shape[2], q.device)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).masked_fill(~seen, 0) @ v, scores.logsumexp(-1)


def is_refused(launch, message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        launch(numbers)
    assert "\n" not in str(caught.value)


class Broken:
    """A kernel that this compiler or GPU refuses."""

    def __init__(self, name: str):
        self.__name__, self.tries = name, 0

    def __getitem__(self, grid):
        self.tries += 1
        raise RuntimeError("no such\ninstruction")
