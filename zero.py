"""ZeRO: data parallel ranks stop holding the same things n times. Stage 0, nothing sharded, is the plain optimizer.

Saves: all but 1/n of the bytes below: of optimizer state (stage 1), of gradients too (2), of weights too (3).
Costs: elements sent by a rank in a step of A micro-batches, times (n-1)/n: 2P, 2P, (A+1)P and 3AP for stages 0 to 3.
       (Stage 3 spares two gathers: the embedding's backward reads no weights, the head's follows its forward at once.)
Stops helping when: activations are what fills the memory, or A is so large that stages 2 and 3 only communicate.

What each rank holds of one bucket of dp.py over n = 4 ranks (a step: | forward | backward | update |):

    stage   weights    gradients    master, m, v     what travels, and when
    0       ████       ████         ████             all-reduce gradients, once a step
    1       ████       ████         █                reduce-scatter gradients, once a step; all-gather weights after
                                                     the update, waited for where the next forward first uses them
    2       ████       █            █                as 1, but reduce-scatter gradients after every micro-batch
    3       █          █            █                as 2, but all-gather weights just before a layer runs, forward
                                                     and backward, the next layer's meanwhile; free them just after

Bytes a parameter at stage 0 (divide what is sharded by n; padding adds less than n elements a bucket):

    recipe                  weights   gradients   master   moments   together
    fp32                       4          4          -       4 + 4       16     --dtype fp32
    bf16 or fp16, mixed        2          4          4       4 + 4       18     --dtype bf16
    the same, bf16 moments     2          4          4       2 + 2       14     --dtype bf16 --moments bf16
    --fp8 with bf16          2 + 2        4          4       4 + 4       20     fp8 copies of what blocks multiply;
    fp8 and bf16 moments     2 + 2        4          4       2 + 2       16     none at stage 3: see fp8.py
    playbook's mixed           2        2 + 4        4       4 + 4       20     bf16 gradients beside their fp32 sum
    Transformer Engine         4          4          -       4 + 4       16     fp8 copies made for each matmul
    DeepSeek-V3                1        2 + 4        4       2 + 2       15     fp8 weights
    nanotron fp8               1        1 + 4        2       1 + 1       10     fp8 weights, gradients, moments
    FP8-LM                     1        1 + 2        2       1 + 2        9     fp8 weights, gradients, first moments

Formats: why gradients are summed and weights kept in fp32, and why fp16 alone needs its loss scaled.

              bits: sign exponent mantissa    largest    smallest normal      step at 1
    fp32                 1     8        23    3.4e38          1.2e-38          1.2e-07
    bf16                 1     8         7    3.4e38          1.2e-38          7.8e-03
    fp16                 1     5        10     65504          6.1e-05          9.8e-04
    fp8 e4m3             1     4         3       448          1.6e-02          1.2e-01
    fp8 e5m2             1     5         2     57344          6.1e-05          2.5e-01

A step of 1e-3 on a bf16 weight of 1 is rounded away: hence master weights. Gradients of fp16 runs fall below 6e-5:
hence the loss is multiplied by a scale, which halves when a gradient overflows (every rank skips that step) and doubles
after 2000 good steps. bf16 moments need beta2 well below 1 - 2^-8, or averages would stop moving.

The norm is taken over the whole model: every element counts on one rank, its owner, and squares are summed over the
world. So all ranks clip by the same number and skip the same steps.

ZeRO-R, the other half of the paper, is about what is left: buffers of constant size, which the buckets are (two whole
gradients and two layers' weights exist at once, however deep the model; a tied table's gradient is one more, which the
head begins and the embedding ends), and activations, for which see recompute.py.

Rajbhandari et al. 2020 (ZeRO: section 5 the stages, 7 what they send); Zhao et al. 2023 (FSDP: prefetching);
Micikevicius et al. 2018 (master weights, loss scaling); Loshchilov & Hutter 2019 (AdamW).
Letters: n ranks of the data axis, P parameters, A micro-batches a step.
"""
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd import Function
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from collectives import Pending, all_gather, all_reduce, reduce_scatter, world
from dp import Bucket, Chunks, DataParallel
from param import Box, Groups, Source, Spec, at_least_fp32, boxes, draw, is_first_copy, parameter, rank, size

# ---- a bucket and this rank's share of it ---------------------------------------------------------------------------

class Shard(Bucket):
    """Weights, gradients and optimizer state of a bucket; what the stage shards is held for `mine` only.

    In flat tensors of the bucket's order: `weights` and `grad` are whole, `shard` (weights), `master`, `m`, `v` and
    `owned_grad` are this rank's slice, which is everything at stage 0. A rank alone on its data axis is at stage 0.
    """

    def __init__(self, params: list[nn.Parameter], arrivals: dict[nn.Parameter, list[int]], groups: Groups, stage: int,
                 moments: torch.dtype | None, in_flight: list["Shard"]):
        super().__init__(params, arrivals, groups)
        n = size(self.group)
        self.stage = stage if n > 1 else 0
        self.padded = -(-self.numel // n) * n if self.stage else self.numel
        share = self.padded // n if self.stage else self.padded
        first = rank(self.group) * share if self.stage else 0
        self.mine = slice(first, first + share)
        self.round = sum(len(arrivals[param]) for param in params)  # gradients of one micro-batch
        self.in_flight = in_flight  # shared by all buckets: whose gradients are travelling

        dtype = params[0].dtype
        self.weights = self.zeros(self.padded, dtype)
        for param in self.params:
            # Through .data, which leaves the parameter its own version counter: to autograd, refilling is no change.
            param.data = self.view(self.weights, param)
        self.shard, self.gathering, self.users = self.weights[self.mine], Pending(None), 0
        if self.stage == 3:
            self.shard, self.nbytes = self.zeros(share, dtype), self.weights.untyped_storage().nbytes()
            self.weights.untyped_storage().resize_(0)
        self.master = self.shard if dtype == self.wide else self.zeros(share, self.wide)
        self.m, self.v = (self.zeros(share if moments else 0, moments or self.wide) for _ in range(2))
        self.owned_grad, self.arriving = None, None

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def owned(self, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """What a slice-long tensor holds of the places start..stop of the whole."""
        start, stop = (min(max(place, self.mine.start), self.mine.stop) - self.mine.start for place in (start, stop))
        return flat[start:stop]

    def owns(self, spec: Spec) -> bool:
        """Of all ranks that hold the same elements, the first counts and saves them."""
        first_replica = rank(self.groups["replicate"]) == 0 and (self.stage > 0 or rank(self.group) == 0)
        return first_replica and is_first_copy(spec, self.groups)

    def pieces(self) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """(parameter, box of the global tensor, where it lies in the slice), every element of the slice once."""
        for param in self.params:
            start = self.start[param]
            first, last = max(self.mine.start, start), min(self.mine.stop, start + param.numel())
            place = first - self.mine.start
            for local in boxes(tuple(param.shape), first - start, last - start) if first < last else ():
                count = math.prod(part.stop - part.start for part in local)
                box = tuple(slice(part.start + at.start, part.stop + at.start) for part, at in zip(local, param.box))
                yield param, box, slice(place, place + count)
                place += count

    def load(self, source: Source, what: str = "master") -> None:
        """Fill the master weights, or "m" or "v", from a source."""
        self.gathering.wait()  # or the weights still travelling would arrive on top of these
        for param, box, place in self.pieces():
            getattr(self, what)[place] = source(param.spec, box).flatten().to(self.device, self.wide)
        if what == "master":
            self.publish()

    # Gradients.

    def begin(self, backwards: dict[int, int]) -> None:
        self.expected = sum(backwards[stage] for param in self.params for stage in self.arrivals[param])
        self.arrived = 0
        for param in self.params:
            param.generation += 1  # what a step makes of weights it makes itself, and so again when it is played
        if self.stage < 2:
            self.grad = self.zeros(self.padded, self.wide) if self.grad is None else self.grad.zero_()
            self.owned_grad = self.grad[self.mine]
        elif self.owned_grad is None:
            self.owned_grad = self.zeros(self.mine.stop - self.mine.start, self.wide)

    def main_grad(self, param: nn.Parameter) -> torch.Tensor:
        if self.grad is None:  # stages 2 and 3, where the last one is travelling or gone
            self.grad = self.zeros(self.padded, self.wide)
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        self.arrived += 1
        if self.stage >= 2 and self.arrived % self.round == 0 and self.expected > 1:
            self.launch()  # of this micro-batch; the last one's is the step's last
        super().ready(param)

    def launch(self) -> None:
        if self.stage == 0:
            super().launch()
        elif self.stage == 1:
            self.pending = reduce_scatter(self.owned_grad, self.grad, self.group, async_op=True)
        else:
            for bucket in self.in_flight:  # one whole gradient travels while the next is filled: two exist, not more
                bucket.receive()
            first_round = self.arrived <= self.round
            self.arriving = self.owned_grad if first_round else torch.empty_like(self.owned_grad)
            self.pending = reduce_scatter(self.arriving, self.grad, self.group, async_op=True)
            self.grad, self.in_flight[:] = None, [self]

    def receive(self) -> None:
        """Wait for the sum under way and add it to those of earlier micro-batches."""
        self.pending.wait()
        if self.arriving is not None and self.arriving is not self.owned_grad:
            self.owned_grad.add_(self.arriving)
        self.arriving = None

    def finish(self) -> None:
        assert self.expected == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.expected} gradients"
        self.receive()
        all_reduce(self.owned_grad, self.groups["replicate"])
        for start, stop, spec in self.spans:  # after the data axis: what is owned lies alike on all ranks of other axes
            for axis in spec.sums:
                all_reduce(self.owned(self.owned_grad, start, stop), self.groups[axis])

    def square(self) -> torch.Tensor:
        """The sum of the squared gradients this rank owns."""
        total = torch.zeros((), dtype=self.wide, device=self.device)
        for start, stop, spec in self.spans:
            if self.owns(spec):
                total += torch.linalg.vector_norm(self.owned(self.owned_grad, start, stop)).square()
        return total

    # Weights.

    def publish(self) -> None:
        """Let the weights that the model sees be the master weights, from their next `gather` on."""
        for param in self.params:
            param.generation += 1
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if self.stage == 3:  # a forward whose backward never came has left weights here, which are old now
            self.users = 0
            self.weights.untyped_storage().resize_(0)
        elif self.stage:
            self.gathering = all_gather(self.weights, self.shard, self.group, async_op=True)

    def fetch(self) -> None:
        """Let the weights be on their way."""
        if self.stage == 3 and self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.nbytes)
            self.gathering = all_gather(self.weights, self.shard, self.group, async_op=True)

    def gather(self) -> None:
        """The weights are there until as many `free` as `gather` were called."""
        self.fetch()
        self.gathering.wait()
        self.users += 1

    def free(self) -> None:
        self.users -= 1
        assert self.users >= 0
        if self.stage == 3 and self.users == 0:
            self.weights.untyped_storage().resize_(0)

    def update(self, rule: str, steps: torch.Tensor, lr: float, betas: tuple[float, float], eps: float,
               weight_decay: float, found_inf: torch.Tensor) -> None:
        """torch's fused AdamW or SGD on the slice; it does nothing where found_inf is 1, and nobody waits to know."""
        m, v = self.m.to(self.wide), self.v.to(self.wide)  # themselves, unless they are kept in bf16
        for decays in (True, False):
            spans = [(start, stop) for start, stop, spec in self.spans if spec.decay == decays]
            flats = (self.master, self.owned_grad, m, v) if rule == "adamw" else (self.master, self.owned_grad)
            parts = [[self.owned(flat, start, stop) for start, stop in spans] for flat in flats]
            decay = weight_decay if decays else 0.0
            if spans and rule == "adamw":
                adamw(*parts, [], [steps.clone() for _ in spans], fused=True, found_inf=found_inf, amsgrad=False,
                      beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=decay, eps=eps, maximize=False)
            elif spans:
                sgd(*parts, [None] * len(spans), fused=True, found_inf=found_inf, weight_decay=decay, momentum=0.0,
                    lr=lr, dampening=0.0, nesterov=False, maximize=False)
        if self.m.dtype != self.wide:
            self.m.copy_(m)
            self.v.copy_(v)
        self.publish()


# ---- weights that come and go ---------------------------------------------------------------------------------------

class Enter(Function):
    """Behind a unit: where its backward begins, so its weights are gathered."""

    @staticmethod
    def forward(ctx, y, optimizer, unit):
        ctx.optimizer, ctx.unit = optimizer, unit
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.optimizer.gather(ctx.unit, ctx.optimizer.before.get(ctx.unit))
        return grad, None, None


class Leave(Function):
    """Before a unit: where its backward ends, so its weights are freed. Weight gradients still to come need none."""

    @staticmethod
    def forward(ctx, x, optimizer, unit):
        ctx.optimizer, ctx.unit = optimizer, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.optimizer.free(ctx.unit)
        return grad, None, None


# ---- the optimizer --------------------------------------------------------------------------------------------------

class LossScale:
    """The factor of fp16 losses: halved by a gradient that overflows, doubled after `interval` steps without."""

    def __init__(self, device: torch.device, start: float = 2.0**16, interval: int = 2000):
        self.value, self.interval = torch.tensor(start, device=device), interval
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, found_inf: torch.Tensor) -> None:
        # GradScaler's own rule, which it does not offer without its own way of finding what is not finite.
        torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, self.interval)


class Optimizer(DataParallel):
    """Gradients as in dp.py, sharding, the update. load(source) once; then each step: begin, backwards, finish, step.

    stage: of ZeRO. rule: "adamw" or "sgd". clip: largest norm of the whole gradient, 0 for none. weight_decay: of
    matrices only. moments: dtype of AdamW's averages. last: the unit whose backward follows its forward at once, so
    its weights stay in between.
    """

    def __init__(self, chunks: Chunks, groups: Groups, bucket_mb: float = 25.0, stage: int = 0, rule: str = "adamw",
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 clip: float = 1.0, moments: torch.dtype = torch.float32, last: nn.Module | None = None):
        in_flight: list[Shard] = []

        def shard(params, arrivals, groups):
            return Shard(params, arrivals, groups, stage, moments if rule == "adamw" else None, in_flight)

        super().__init__(chunks, groups, 0 if stage == 3 else bucket_mb, shard)
        self.world, self.rule, self.betas, self.eps = groups["world"], rule, betas, eps
        self.weight_decay, self.clip, self.last = weight_decay, clip, last
        fp16 = any(bucket.weights.dtype == torch.float16 for bucket in self.buckets)
        self.steps = torch.zeros((), device=self.buckets[0].device)  # updates so far, which AdamW corrects for
        self.loss_scale = LossScale(self.buckets[0].device) if fp16 else None

        home = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.buckets_of, self.after, self.before = {}, {}, {}
        for units in chunks.values():
            for unit, following in zip(units, [*units[1:], None]):
                self.buckets_of[unit] = list(dict.fromkeys(home[param] for param in unit.parameters()))
                self.after[unit] = following
                unit.register_forward_pre_hook(self.enter_forward)
                unit.register_forward_hook(self.leave_forward)

    def load(self, source: Source, what: str = "master") -> None:
        """Fill the master weights, or "m" or "v", of every bucket from a source."""
        for bucket in self.buckets:
            bucket.load(source, what)

    def numbers(self) -> dict[str, torch.Tensor]:
        """The state that is not a tensor of every parameter, by name; to restore it, copy into these."""
        scale = self.loss_scale
        return {"steps": self.steps} | ({"scale": scale.value, "good_steps": scale.good_steps} if scale else {})

    def gather(self, unit: nn.Module, then: nn.Module | None) -> None:
        """Have a unit's weights, and let those of the unit that runs `then` be on their way."""
        for bucket in self.buckets_of[unit]:
            bucket.gather()
        for bucket in self.buckets_of.get(then, ()):
            bucket.fetch()

    def free(self, unit: nn.Module) -> None:
        for bucket in self.buckets_of[unit]:
            bucket.free()

    def enter_forward(self, unit: nn.Module, inputs: tuple) -> tuple:
        self.gather(unit, self.after[unit])
        x, *others = inputs
        if not x.requires_grad:  # evaluation, or tokens, behind which no backward goes
            return inputs
        return Leave.apply(x, self, unit), *others

    def leave_forward(self, unit: nn.Module, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        goes_back = inputs[0].requires_grad
        if goes_back and self.after[unit] is not None:
            self.before[self.after[unit]] = unit  # whose weights to fetch while the following unit goes back
        if goes_back and unit is self.last:
            for bucket in self.buckets_of.get(self.before.get(unit), ()):
                bucket.fetch()
            return y
        self.free(unit)
        return Enter.apply(y, self, unit) if goes_back else y

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on: the loss, times the loss scale in fp16 runs."""
        return loss * self.loss_scale.value if self.loss_scale else loss

    def norm(self) -> torch.Tensor:
        """The norm of the whole gradient, the same on every rank."""
        square = torch.stack([bucket.square() for bucket in self.buckets]).sum()
        all_reduce(square, self.world)
        return square.sqrt()

    def step(self, lr: float) -> torch.Tensor:
        """Clip and update; returns the norm before clipping. A norm that is not finite leaves everything as it was."""
        unscale = 1 / self.loss_scale.value if self.loss_scale else 1.0
        norm = self.norm() * unscale
        found_inf = (~norm.isfinite()).float()
        clip = (self.clip / (norm + 1e-6)).clamp(max=1) if self.clip else 1.0
        for bucket in self.buckets:
            bucket.owned_grad.mul_(clip * unscale)
            bucket.update(self.rule, self.steps, lr, self.betas, self.eps, self.weight_decay, found_inf)
        self.steps += 1 - found_inf
        if self.loss_scale:
            self.loss_scale.update(found_inf)
        return norm


def bytes_held(buckets: list[int], stage: int, n: int, dtype: torch.dtype,
               moments: torch.dtype | None) -> dict[str, int]:
    """The most that a rank holds at once of weights, gradients and optimizer state, in bytes.

    buckets: elements of each. At stage 3 two neighbours' weights are there at once, at stages 2 and 3 two neighbours'
    gradients; their largest possible sum is taken. moments: None if the rule has none. Left out, at stages 2 and 3: a
    tied table's gradient besides those two, one arriving shard; with bf16 moments, one bucket's in fp32 at its update.
    """
    stage = stage if n > 1 else 0
    padded = [-(-count // n) * n for count in buckets] if stage else buckets
    wide = at_least_fp32(dtype)
    whole, share, two = sum(padded), sum(padded) // n, sum(sorted(padded if len(padded) > 1 else 2 * padded)[-2:])
    state = (0 if wide == dtype else wide.itemsize) + (2 * moments.itemsize if moments else 0)
    return dict(weights=(share + two if stage == 3 else whole) * dtype.itemsize,
                gradients=(share + two if stage >= 2 else whole) * wide.itemsize,
                optimizer=(share if stage else whole) * state)


# ---- demo: torchrun --nproc_per_node=8 zero.py ----------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, number: int, groups: Groups):
        super().__init__()
        self.weight = parameter(Spec(str(number), (256, 256), std=1 / 16), groups, torch.bfloat16)

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def measured(stage: int, groups: Groups) -> tuple[dict[str, int], dict[str, float]]:
    """The most bytes that live storages of each kind had in two steps of a model of 12 layers, and the formula."""
    from meter import Meter

    layers = [Layer(number, groups) for number in range(12)]
    optimizer = Optimizer({0: layers}, groups, 0, stage)
    optimizer.load(draw(0))
    meter, kinds = Meter(), ("weights", "gradients", "optimizer")
    for bucket in optimizer.buckets:
        meter.label("optimizer", bucket.master, bucket.m, bucket.v)
        meter.label("weights", bucket.weights, bucket.shard)
        meter.label_size("gradients", 4 * bucket.padded, 4 * bucket.master.numel())
    x = torch.ones(1, 256, dtype=torch.bfloat16, requires_grad=True)
    with meter:
        for _ in range(2):
            optimizer.begin({0: 1})
            nn.Sequential(*layers)(x).sum().backward()
            optimizer.finish()
            optimizer.step(1e-3)
    formula = bytes_held([bucket.numel for bucket in optimizer.buckets], stage, size(groups["dp"]), torch.bfloat16,
                         torch.float32)
    return {kind: meter.peak[kind] for kind in kinds}, formula


def demo(group) -> None:
    groups: Groups = {"world": group, "replicate": None, "dp": group}
    lines = [f"Megabytes on each of {size(group)} ranks: 12 layers in bf16, AdamW. Measured, as the most that",
             "lived at once, and by formula. █ weights  ▓ gradients  ▒ optimizer state", ""]
    for stage in range(4):
        held, formula = measured(stage, groups)
        bar = "".join(sign * round(held[kind] / 3e5) for sign, kind in zip("█▓▒", held))
        lines.append(f"    stage {stage}  {sum(held.values()) / 1e6:6.2f}  {sum(formula.values()) / 1e6:6.2f}   {bar}")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    with world() as group:
        demo(group)
