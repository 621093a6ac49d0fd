"""The update of weights, element by element: rules of optimizers, and the loss scale of fp16 runs.

A rule changes lists of flat tensors, a rank's shards, in the dtype of accumulated gradients. (muon.py updates whole
matrices.)

Loshchilov & Hutter 2019 (AdamW); Micikevicius et al. 2018 (mixed precision: master weights, loss scale).
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from core.config import OPTIMIZERS
from core.param import Spec

Parts = list[tuple[Spec, Tensor]]  # the parts of a flat tensor, each with the Spec that says whether it decays


class StepScalars(NamedTuple):
    """What the updates of a step read besides gradients.

    The tensors are where the optimizer state is. On a GPU the host must not read them, because it would have to wait.
    """
    lr: float
    steps: Tensor  # updates so far
    found_inf: Tensor  # 1 if a gradient is not finite, so that nothing may change, else 0
    grad_scale: Tensor  # gradients are to be divided by it: the loss scale times max(norm / clip, 1)


class UpdateRule(NamedTuple):
    """state: names of its moments, declared in config.OPTIMIZERS. apply(weights, grads, *state, steps=, lr=, betas=,
    eps=, weight_decay=, found_inf=, grad_scale=) changes weights and state, lists of tensors: see StepScalars."""
    state: tuple[str, ...]
    apply: Callable[..., None]

    def update(self, weights: Parts, grads: Parts, *moments: Parts, weight_decay: float, **settings) -> None:
        """Apply the rule to the weights that decay, then to the others. All lists have the same Specs in one order."""
        for decays in (True, False):
            columns = []
            for parts in (weights, grads, *moments):
                columns.append([part for spec, part in parts if spec.decay == decays])
            if columns[0]:
                self.apply(*columns, weight_decay=weight_decay if decays else 0.0, **settings)


def apply_adamw(weights, grads, m, v, *, steps, betas, **settings) -> None:
    steps_of = [steps.clone() for _ in weights]  # adamw increments them in place
    adamw(weights, grads, m, v, [], steps_of, beta1=betas[0], beta2=betas[1], fused=True, amsgrad=False,
          maximize=False, **settings)


def apply_sgd(weights, grads, *, lr, weight_decay, found_inf, grad_scale, **_) -> None:
    sgd(weights, grads, [None] * len(weights), lr=lr, weight_decay=weight_decay, found_inf=found_inf,
        grad_scale=grad_scale, fused=True, momentum=0.0, dampening=0.0, nesterov=False, maximize=False)


# By --optimizer; with muon of all but matrices.
UPDATE_RULES = {"adamw": UpdateRule(OPTIMIZERS["adamw"], apply_adamw), "sgd": UpdateRule(OPTIMIZERS["sgd"], apply_sgd)}
UPDATE_RULES["muon"] = UPDATE_RULES["adamw"]


class LossScale:
    """The factor of fp16 losses: halved when a gradient overflows, doubled after `interval` steps in a row without
    overflow. Not GradScaler itself: it would search all gradients for infinities, which the norm has shown already."""

    def __init__(self, device: torch.device, start: float = 2.0**16, interval: int = 2000):
        self.value, self.interval = torch.tensor(start, device=device), interval
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, self.interval)
