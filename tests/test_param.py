"""Specs and boxes, and initial values."""
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from core import param
from core.param import Spec, boxes, draw, is_first_replica, local_box, parameter

# One example of each kind of axis: (Spec, axes of the grid, how many ranks have each element).
EXAMPLES = {
    "replicated": (Spec("a", (7, 5), {"tp": "replicate"}, std=1.0), dict(tp=3), 3),
    "rows": (Spec("a", (12, 5), {"tp": 0}, std=1.0), dict(tp=4), 1),
    "columns": (Spec("a", (5, 12), {"tp": 1}, std=1.0), dict(tp=4), 1),
    "a vocabulary of 97": (Spec("a", (97, 4), {"tp": 0}, std=1.0), dict(tp=4), 1),
    "fewer rows than ranks": (Spec("a", (3, 4), {"tp": 0}, std=1.0), dict(tp=8), 1),
    "a norm under sequence parallelism": (Spec("a", (9,), {"tp": "partial"}, mean=1.0, std=0.1), dict(tp=4), 4),
    "2 kv heads on tp 4": (Spec("a", (2 * 6, 5), {"kv": 0, "kv_copy": "partial"}, std=1.0), dict(kv=2, kv_copy=2), 2),
    "a tied table": (Spec("a", (11, 5), {"tp": 0, "tie": "partial"}, std=1.0), dict(tie=2, tp=2), 2),
    "experts": (Spec("a", (8, 3, 5), {"ep": 0}, "edp", std=1.0), dict(ep=4), 1),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_first_values_do_not_depend_on_the_grid(name, monkeypatch):
    """Nor how many elements there are: of the ranks that have one, as many as said, one counts it."""
    monkeypatch.setattr(param, "DRAW_BLOCK", 40)  # several blocks; from 16 numbers on a part of one ends otherwise
    spec, axes, copies = EXAMPLES[name]
    full = draw(3)(spec, local_box(spec, {}))
    held, counted = (torch.zeros(spec.shape, dtype=torch.int) for _ in range(2))
    for ranks in product(*map(range, axes.values())):
        groups = {axis: SimpleNamespace(size=axes[axis], rank=rank) for axis, rank in zip(axes, ranks)}
        box = local_box(spec, groups)
        assert torch.equal(draw(3)(spec, box), full[box])
        made = parameter(spec, groups, torch.float32)
        assert made.shape == full[box].shape and made.untyped_storage().nbytes() == 4, "no memory of its own"
        held[box] += 1
        counted[box] += is_first_replica(spec, groups)
    assert (held == copies).all() and (counted == 1).all()


def test_values_are_drawn_as_asked_for_in_blocks_of_rows():
    def drawn(name="layers.0.ffn.w_up", mean=0.0, seed=0):
        return draw(seed)(Spec(name, (4000, 600), mean=mean, std=0.02), (slice(0, 4000), slice(0, 600)))

    values = drawn()
    assert values.std().item() == pytest.approx(0.02, rel=0.01) and abs(values.mean().item()) < 1e-4
    assert not torch.equal(values[:1747], values[1747:2 * 1747])  # two blocks
    assert not torch.equal(values, drawn("layers.1.ffn.w_up")) and not torch.equal(values, drawn(seed=1))
    assert torch.equal(draw(0)(Spec("norm", (4,), mean=1.0), (slice(1, 3),)), torch.ones(2))
    torch.testing.assert_close(drawn(mean=3.0), values + 3, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 4, 5), (2, 3, 2, 3), (1, 1, 4), (4, 1)])
def test_a_flat_range_is_a_few_boxes_in_order(shape):
    whole = torch.arange(torch.Size(n + 3 for n in shape).numel()).view([n + 3 for n in shape])
    box = tuple(slice(2, n + 2) for n in shape)
    numbers = whole[box]
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = list(boxes(box, start, stop))
            assert len(found) <= 2 * len(shape) - 1
            parts = [whole[part].flatten() for part in found]
            assert torch.equal(torch.cat(parts) if parts else torch.empty(0), numbers.flatten()[start:stop])
