"""The update of weights, element by element: the rules of optimizers, and the loss scale of fp16 runs.

    A rank's shard of one bucket, in flat tensors (zero.py):

                 part that decays        part that does not (norms, biases)
    weights      w w w w w w w w w w     w w w w      master weights, in fp32 (fp64 in fp64 runs)
    gradient     g g g g g g g g g g     g g g g      summed over all ranks
    moment m     m m m m m m m m m m     m m m m      what the rule remembers between steps: one tensor as large as the
    moment v     v v v v v v v v v v     v v v v      weights for each of its moments
                 └─ first call ────┘     └─ second call, with weight_decay = 0

    A part has all neighbouring parameters that zero.py treats the same (a Span there). A shard may have several parts
    of each kind, so each call gets lists: all the parts that decay, or all the others. A call without parts is left
    out, as under --optimizer muon, where the two kinds are in different buckets (muon.kind_of).

A rule is a function that changes weights and moments in place. For gradient G and weights W:

    sgd          W = W - lr (G + decay W)

    adamw        m = beta1 m + (1 - beta1) G                 mean of gradients
                 v = beta2 v + (1 - beta2) G^2               mean of their squares
                 m_hat = m / (1 - beta1^t)                   in step t, from 1: both means start at zero, which makes
                 v_hat = v / (1 - beta2^t)                   the first ones too small
                 W = W - lr (m_hat / (sqrt(v_hat) + eps) + decay W)

The contract of a rule:

- It is elementwise, because a shard may begin and end anywhere in a parameter. Muon needs whole matrices, so it is not
  a rule in this sense: see muon.py. Under --optimizer muon, AdamW updates everything except matrices.
- Its arguments are lists of flat tensors: weights, grads, then one list per moment. Moments start as zeros. zero.py
  allocates, shards, offloads and saves them.
- It divides gradients by `grad_scale`, which clips them and undoes the loss scale. So neither needs an extra pass over
  the gradients.
- It changes nothing if `found_inf` is 1. The host must not read this tensor, because it would have to wait for the GPU.

To add a rule, name its moments in OPTIMIZERS of core/config.py, write a function like apply_sgd, and add an
UpdateRule(moments, function) to UPDATE_RULES. README.md has Lion as an example. The rule then works at every level of
ZeRO and on every grid.

Loshchilov & Hutter 2019 (AdamW); Micikevicius et al. 2018 (mixed precision: master weights, loss scale).
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from core.collectives import Group, run_demo
from core.config import OPTIMIZERS
from core.param import Spec

# ---- the rules ------------------------------------------------------------------------------------------------------


def adamw_one(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, steps: int, lr: float,
              betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Update one tensor by the formula of AdamW, without grad_scale and found_inf.

    This is the plain version, for reading and for comparison. Training calls apply_adamw, which computes the same with
    torch's fused kernel. steps: updates before this one.
    """
    beta1, beta2 = betas
    t = steps + 1
    m.mul_(beta1).add_((1 - beta1) * grad)
    v.mul_(beta2).add_((1 - beta2) * grad**2)
    m_unbiased = m / (1 - beta1**t)  # m_hat
    v_unbiased = v / (1 - beta2**t)  # v_hat
    weight.sub_(lr * (m_unbiased / (v_unbiased.sqrt() + eps) + weight_decay * weight))


def apply_adamw(weights: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], *, steps: Tensor,
                betas: tuple[float, float], **settings) -> None:
    """Update flat tensors by AdamW. settings: lr, eps, weight_decay, found_inf and grad_scale."""
    steps_of = [steps.clone() for _ in weights]  # one per tensor, because the kernel increments them in place
    adamw(weights, grads, m, v, max_exp_avg_sqs=[], state_steps=steps_of, beta1=betas[0], beta2=betas[1], fused=True,
          amsgrad=False, maximize=False, **settings)  # max_exp_avg_sqs: one more moment, which only AMSGrad has


def apply_sgd(weights: list[Tensor], grads: list[Tensor], *, lr: float, weight_decay: float, found_inf: Tensor,
              grad_scale: Tensor, **settings_of_other_rules) -> None:
    """Update flat tensors by plain SGD, which has no moments."""
    sgd(weights, grads, [None] * len(weights), lr=lr, weight_decay=weight_decay, found_inf=found_inf,
        grad_scale=grad_scale, fused=True, momentum=0.0, dampening=0.0, nesterov=False, maximize=False)


# ---- how zero.py calls them -----------------------------------------------------------------------------------------

class StepScalars(NamedTuple):
    """The per-step scalars that update rules and Muon read.

    The tensors are scalars on the device of the optimizer state, which is the CPU with --offload optimizer.
    """
    lr: float
    steps: Tensor  # updates before this one; zero.py counts them, and does not count skipped steps
    found_inf: Tensor  # 1 if a gradient is not finite, and 0 if all are
    grad_scale: Tensor  # the loss scale times max(norm / clip, 1)


Parts = list[tuple[Spec, Tensor]]  # the parts of a flat tensor, each with a Spec that says whether it decays


class UpdateRule(NamedTuple):
    """A rule.

    state: the names of its moments.
    apply: apply(weights, grads, *moments, steps=, lr=, betas=, eps=, weight_decay=, found_inf=, grad_scale=). The first
        arguments are lists of tensors, the others are the settings of the run and the StepScalars.
    """
    state: tuple[str, ...]
    apply: Callable[..., None]

    def update(self, weights: Parts, grads: Parts, *moments: Parts, weight_decay: float, **settings) -> None:
        """Apply the rule to the weights that decay, then to the others. All lists have the same Specs in one order."""
        for decays in (True, False):
            lists = []
            for parts in (weights, grads, *moments):
                lists.append([part for spec, part in parts if spec.decay == decays])
            if lists[0]:
                self.apply(*lists, weight_decay=weight_decay if decays else 0.0, **settings)


# --optimizer -> the rule for all elements that are not in Muon's matrices.
UPDATE_RULES = {"adamw": UpdateRule(OPTIMIZERS["adamw"], apply_adamw), "sgd": UpdateRule(OPTIMIZERS["sgd"], apply_sgd)}
UPDATE_RULES["muon"] = UPDATE_RULES["adamw"]  # OPTIMIZERS["muon"] names the moments of matrices only, for muon.py


# ---- the loss scale -------------------------------------------------------------------------------------------------

class LossScale:
    """The factor of the loss in fp16 runs. It keeps small gradients from becoming zero in fp16.

    If a gradient overflows, the scale is halved (and found_inf skips the step). After `interval` steps in a row without
    overflow it is doubled. torch's GradScaler would search all gradients for infinities. That is not necessary here:
    if a gradient is not finite, the gradient norm is not finite either.
    """

    def __init__(self, device: torch.device, start: float = 2.0**16, interval: int = 2000):
        self.value, self.interval = torch.tensor(start, device=device), interval
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, self.interval)


# ---- demo: python optimizers.py -------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """Minimise a badly scaled loss, sum(c x^2) / 2, by every rule. Skip a step, and change the loss scale."""
    c = torch.logspace(0, -3, 8, dtype=torch.float64)
    spec, ones = Spec("x", c.shape), torch.ones(())
    settings = dict(lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def step(rule: UpdateRule, x: Tensor, moments: list[Tensor], number: int, found_inf: Tensor) -> None:
        scalars = StepScalars(settings["lr"], torch.tensor(float(number)), found_inf, grad_scale=ones)
        parts = [[(spec, flat)] for flat in (x, c * x, *moments)]
        rule.update(*parts, **settings | scalars._asdict())

    print("Loss sum(c x^2) / 2 with c from 1 to 0.001, from x = 1")
    for name, rule in UPDATE_RULES.items():
        if name == "muon":  # AdamW again
            continue
        x, losses = torch.ones_like(c), []
        moments = [torch.zeros_like(c) for _ in rule.state]
        for number in range(101):
            losses.append((c * x**2).sum().item() / 2)
            step(rule, x, moments, number, 0 * ones)
        print(f"    {name:8s}{len(moments)} moments; loss {losses[0]:.3f}, after 20 steps {losses[20]:.3f}, "
              f"after 100 {losses[100]:.6f}")
        before = x.clone()
        step(rule, x, moments, 101, found_inf=ones)
        print(f"            a step with found_inf = 1 changes x by {(x - before).abs().max().item()}")

    fused, plain = [[torch.ones_like(c), torch.zeros_like(c), torch.zeros_like(c)] for _ in range(2)]
    for number in range(100):
        step(UPDATE_RULES["adamw"], fused[0], fused[1:], number, 0 * ones)
        adamw_one(plain[0], c * plain[0], *plain[1:], steps=number, **settings)
    error = (fused[0] - plain[0]).abs().max().item()
    print(f"After 100 steps torch's fused AdamW and adamw_one differ by less than 1e-14: {error < 1e-14}")

    scale, values = LossScale(torch.device("cpu"), interval=2), []
    for overflows in (1, 1, 0, 0, 0, 0):
        scale.update(torch.tensor(float(overflows)))
        values.append(f"{scale.value.item():,.0f}")
    print(f"Loss scale 65,536, after two overflows and four good steps (interval 2): {', '.join(values)}")


if __name__ == "__main__":
    run_demo(demo)
