"""Rules of optimizers: the formula written out and the fused kernels, compared with torch's plain optimizers."""
import pytest
import torch

from optimizers import UPDATE_RULES, adamw_one

LR, BETAS, EPS, DECAY = 0.03, (0.8, 0.95), 1e-6, 0.1


def gradient(step: int) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def by_torch(rule: str, steps: int) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
    how = dict(lr=LR, weight_decay=DECAY, foreach=False, fused=False)
    optimizer = torch.optim.SGD([weight], **how) if rule == "sgd" else torch.optim.AdamW([weight], betas=BETAS,
                                                                                        eps=EPS, **how)
    for step in range(steps):
        weight.grad = gradient(step)
        optimizer.step()
    return weight.detach()


def test_the_formula_of_adamw_is_that_of_torch():
    weight, m, v = torch.ones(7, dtype=torch.float64), *torch.zeros(2, 7, dtype=torch.float64)
    for step in range(5):
        adamw_one(weight, gradient(step), m, v, steps=step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    torch.testing.assert_close(weight, by_torch("adamw", 5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_a_rule_divides_by_the_scale_and_skips_what_is_not_finite(rule):
    """A step of which a gradient is not finite is as none, in weights and moments."""
    update, weight = UPDATE_RULES[rule], torch.ones(7, dtype=torch.float64)
    moments = [torch.zeros_like(weight) for _ in update.state]
    settings = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(5):
        for found_inf in (1.0, 0.0):
            update.apply([weight], [4 * gradient(step + 100 * int(found_inf))], *([moment] for moment in moments),
                         steps=torch.tensor(float(step)), found_inf=torch.tensor(found_inf),
                         grad_scale=torch.tensor(4.0), **settings)
    torch.testing.assert_close(weight, by_torch(rule, 5), rtol=0, atol=1e-14)
