"""DiLoCo: sites that are far apart train by themselves, and only now and then exchange what they have learned.

Two sites, H = 4, F = 2, tau = 1. Time runs to the right. [1] is the first step of each site, on its own samples. A and
B are the two halves of the layers. AABB on the link is an exchange for all layers, AA for half of them: equal widths
are equal bytes.

    every step    compute   [1]    [2]    [3]    [4]    [5]    [6]    [7]    [8]
    (dp.py)       link         AABB   AABB   AABB   AABB   AABB   AABB   AABB   AABB

        Gradients cross the slow link after each step, and the sites wait for them each time.

    plain         compute   [1][2][3][4]    [5][6][7][8]
                  link                  AABB            AABB

        Sites exchange the changes of all weights after every H steps.

    fragments     compute   [1][2]  [3][4]  [5][6]  [7][8]
                  link            AA      BB      AA      BB

        After every H / F steps, sites exchange the changes of one of F fragments. The bytes per H steps are the same.

    overlap       compute   [1][2][3][4][5][6][7][8]
                  link         AA    BB    AA    BB

        An exchange starts tau steps before its result is applied, and overlaps with these steps. The sites wait only if
        the exchange takes longer than these steps.

The idea: in the plain version, all sites have the same weights after an exchange. Each takes H steps from there, and
ends at different weights, because its samples differ. The change, old weights minus new ones, is treated like a
gradient. Its mean over the sites is the *outer gradient*. An *outer optimizer* applies it to the old weights:

    inner, H times    w = w - update of AdamW, Muon, SGD    each site, with the gradient of its own samples
    outer, once       D = mean over sites of (w_old - w)    the outer gradient
                      m = mu m + D                          Nesterov's momentum, as in torch.optim.SGD
                      w_old = w_old - nu (D + mu m)         the same on every site
                      w = w_old                             the next H steps begin here

With H = 1, SGD inside, nu = 1 and mu = 0 this is data parallelism: the mean of the sites' new weights equals the result
of one step with the mean gradient.

Symbols: n sites. P parameters. H: each weight is exchanged every H steps (--sync-every). F fragments
(--sync-fragments): some fragment is exchanged every H / F steps. tau: the steps with which an exchange overlaps
(--sync-overlap). nu, mu: --outer-lr and --outer-momentum.

A site may use any grid, and all sites use the same one. All groups of ranks (core/groups.py) except "world" and "sites"
lie within a site, so the other techniques need not know that there are several. Each group of the axis "sites" consists
of the ranks with the same coordinates in every site. They hold the same shard, and only these groups communicate
weights between sites.

    all sites have the same    the weights after the last exchange, and the outer momentum. Both are state of zero.py's
                               buckets, like AdamW's moments: ZeRO shards them, checkpoints save and reshard them.
    each site has its own      weights, between exchanges; the state of its inner optimizer: moments, the number of
                               updates, the loss scale of fp16; the biases of routers, which balance the loads of the
                               site's own experts. A checkpoint holds all of this for every site. (Exports and samples
                               use the first site's.) If a site's gradient is not finite, only this site skips the step.

Where to read: PlainDiLoCo is the whole idea. Outer is the same over shards, and refines it:

    fragments    An exchange covers only some of the layers, so it takes less time, more often. With      fragment_of,
                 the same tau, a slower link is enough for it to finish behind the steps.                 Fragment
    quantised    Outer gradients are sent in bf16, or in 8 bits with a scale per block.                   PendingMean
    overlap      The sites take tau steps while an exchange is in flight.                                 events, Outer

Saves: all but 1/H of the bytes between sites, and most of the time that sites wait for the slow link.
Costs: Bytes. A site sends 2 (n-1)/n P elements per exchange of all weights, so 2 (n-1)/(n H) P per step. This
       formula holds with ZeRO levels 1 to 3. Without ZeRO, each data-parallel rank sends a copy, and with
       --dp-replicate, each replica does. If tensor or pipeline parallel ranks hold copies of a weight, each of them
       sends it. The bytes of int8 are in PendingMean.
       Memory. The optimizer state grows by two tensors in fp32, as large as the master weights. While a fragment is in
       flight, a rank holds a further tensor, as large as its part of the fragment, in fp32 or bf16. With int8 it holds
       the bytes of all n sites. When an exchange starts, the differences and their concatenation exist together for a
       moment, both in fp32.
       Gathering. At ZeRO levels 1 and 2, ranks of a site gather weights once more after an exchange: whole buckets,
       each of which contains a parameter of the fragment. Layers of all fragments may share a bucket, because they are
       dealt round-robin. So an exchange of one fragment may gather nearly all weights again.
       Learning. The result is not that of data parallelism: with larger H or more sites, each step may make less
       progress.
Stops helping when: the link is idle for most of H steps already; or the sites' weights have drifted so far apart that
       their mean is no better than any one of them.

Easily got wrong:
- The sign. D is old weights minus new ones, so that the outer optimizer may subtract it like a gradient.
- Resetting AdamW's moments after an exchange. They stay: the paper's inner optimizers keep their state.
- ZeRO's all-gather inside the site, after an exchange. A rank whose shard holds nothing of the fragment must join it,
  too.

Douillard et al. 2023 (DiLoCo); Douillard et al. 2025 (Streaming DiLoCo: fragments, overlap, few bits).
"""
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from core.collectives import ALONE, Group, all_gather, all_reduce, run_demo, sent
from core.config import SYNC_DTYPES, need
from core.param import Spec

KEPT = 0.5  # Streaming DiLoCo's alpha: the share of a site's own weights in the mix, when overlap > 0
BLOCK = 128  # elements that share a scale, in 8 bits


# ---- the plain version: everything at once, after H steps -----------------------------------------------------------

class PlainDiLoCo:
    """The outer optimizer for an unsharded model: each rank is a site and holds all weights.

        outer = PlainDiLoCo(model.parameters(), group, lr=0.7, momentum=0.9)
        for step in range(1, steps + 1):
            ...                         # a step of any optimizer, on samples of this site
            if step % H == 0:
                outer.step()            # all sites have the same new weights

    All sites must begin with the same weights.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Group, lr: float, momentum: float):
        self.params, self.group, self.lr, self.momentum = list(params), group, lr, momentum
        self.old = [param.detach().clone() for param in self.params]
        self.m = [torch.zeros_like(old) for old in self.old]

    @torch.no_grad()
    def step(self) -> None:
        for param, old, m in zip(self.params, self.old, self.m):
            grad = old - param  # old minus new, so that subtracting it moves the way this site moved
            all_reduce(grad, self.group)
            nesterov(old, m, grad / self.group.size, self.lr, self.momentum)
            param.copy_(old)


def nesterov(weight: Tensor, m: Tensor, grad: Tensor, lr: float, momentum: float) -> None:
    """Update weights and momentum in place, as torch.optim.SGD(nesterov=True) does."""
    m.mul_(momentum).add_(grad)
    weight.sub_(lr * (grad + momentum * m))


# ---- fragments: some of the layers at a time ------------------------------------------------------------------------

def fragment_of(spec: Spec, fragments: int) -> int:
    """Return the index of the parameter's fragment. It does not depend on the grid.

    Layers are dealt round-robin, so a pipeline stage with at least F consecutive layers has layers of every fragment.
    The embedding is in the first fragment. The head and the last norm are in the last one. So fragments have about
    equal sizes if F divides the number of layers and the vocabulary is small.
    """
    kind, *rest = spec.name.split(".")
    if kind == "layers":
        return int(rest[0]) % fragments
    return 0 if kind == "embedding" else fragments - 1


# A bucket (ShardedBucket in zero.py) is a flat concatenation of parameters. `offset` counts in the whole bucket, and
# `shard` is this rank's range of it. Every tensor of `state`, of which `master` is one, covers that range only.
# update_weights() copies `master` into this rank's shard of the weights, unless weights are in fp32: then both are one
# tensor. At levels 1 and 2 it also starts an all-gather of the whole weights, `unsharding`. At levels 0 and 3 there is
# none, and waiting for `unsharding` returns at once.

class Fragment:
    """What this rank holds of one fragment: slices of its shards.

    buckets: every bucket with a parameter of the fragment, even if this rank's shard holds none of it.
    slices: (bucket, start, stop), places in the flat tensors of the shard. One slice may span neighbouring parameters.
    """

    def __init__(self, index: int, fragments: int, buckets: Sequence):
        self.buckets, self.slices = [], []
        for bucket in buckets:
            params = [param for param in bucket.params if fragment_of(param.spec, fragments) == index]
            if params:
                self.buckets.append(bucket)
            for param in params:
                self.add(bucket, bucket.offset[param], bucket.offset[param] + param.numel())

    def add(self, bucket, start: int, stop: int) -> None:
        """Add elements start..stop of the bucket, as far as they lie in this rank's shard."""
        length = len(bucket.master)
        # From places in the bucket to places in the shard.
        start, stop = (min(max(place - bucket.shard.start, 0), length) for place in (start, stop))
        if start == stop:
            return
        if self.slices and self.slices[-1][0] is bucket and self.slices[-1][2] == start:
            start = self.slices.pop()[1]  # adjoins the previous slice: merge
        self.slices.append((bucket, start, stop))

    def views(self, what: str) -> list[Tensor]:
        """Return the slices of one tensor of the buckets' state, such as "master", as views."""
        return [bucket.state[what][start:stop] for bucket, start, stop in self.slices]


# ---- quantised outer gradients --------------------------------------------------------------------------------------

class PendingMean:
    """The mean of a flat tensor x over the sites, in flight: a handle, like Pending (core/collectives.py).

    The constructor starts the exchange. `wait` returns the mean, in the dtype of x.

    dtype: how x is sent.
        "fp32": in the dtype of x, which is fp32, or fp64 in runs of that dtype. x is overwritten.
        "bf16": sent and summed in bf16, like gradients with --reduce-dtype bf16.
        "int8": each site sends every other site 8 bits per element and a scale in fp32 per BLOCK elements, and sums
            what it receives in fp32, because sums of 8-bit numbers would not fit into 8 bits. For N elements of x it
            sends (n-1) N (1 + 4 / BLOCK) bytes, apart from padding. That is fewer bytes than in bf16 with fewer than
            4 sites, and fewer than in fp32 with fewer than 8. x must be in fp32.
    """

    def __init__(self, x: Tensor, group: Group, dtype: str):
        self.group, self.dtype, self.out_dtype = group, dtype, x.dtype
        self.numel = len(x)
        if dtype == "int8":
            own = to_bytes(x)
            self.pending = all_gather(own.new_empty(group.size * len(own)), own, group, async_op=True)
        else:
            self.pending = all_reduce(x.bfloat16() if dtype == "bf16" else x, group, async_op=True)

    def wait(self) -> Tensor:
        result = self.pending.wait()
        if self.dtype == "int8":
            result = sum(from_bytes(own, self.numel) for own in result.chunk(self.group.size))
        return result.to(self.out_dtype) / self.group.size


def to_bytes(x: Tensor) -> Tensor:
    """Return fp32 numbers [N] as uint8: one byte per element of the padded blocks, then the bytes of their scales."""
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    divisors = scales.clamp(min=torch.finfo(x.dtype).tiny)  # avoids 0 / 0 in a block of zeros
    numbers = (blocks / divisors).round().to(torch.int8)
    return torch.cat((numbers.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)))


def from_bytes(data: Tensor, numel: int) -> Tensor:
    """Return the numbers [numel], in fp32, from what to_bytes returned for them."""
    blocks = -(-numel // BLOCK)
    numbers, scales = data.split((blocks * BLOCK, blocks * 4))
    return (numbers.view(torch.int8).view(-1, BLOCK) * scales.view(torch.float32)[:, None]).flatten()[:numel]


# ---- overlap: when an exchange starts, and when its result is applied -----------------------------------------------

def events(done: int, every: int, fragments: int, overlap: int) -> tuple[int | None, int | None]:
    """Return (fragment whose exchange starts, fragment whose exchange is finished) after `done` inner steps.

    An exchange finishes every H / F steps, and starts tau steps earlier. tau < H / F, so at most one is in flight. No
    exchange is in flight when `done` is a multiple of H / F; checkpoints are saved only at such steps.
    """
    period = every // fragments
    # The ordinals of the latest exchange started, and of the latest finished; the first of the run is number 0.
    starting, finished = (done + overlap) // period - 1, done // period - 1
    return (starting % fragments if (done + overlap) % period == 0 else None,
            finished % fragments if done % period == 0 else None)


class Outer:
    """The outer optimizer for zero.py's buckets: PlainDiLoCo over shards, with fragments, overlap and quantisation.

        optimizer.load(source)      # optimizer: a zero.Optimizer. source: initial weights (core/param.py)
        outer = Outer(optimizer.buckets, groups["sites"], every=100)    # begins with a copy of the weights
        ... step number `done` of the inner optimizer ...
        outer.step(done)

    Outer adds two tensors to the state of each bucket: "outer", the weights after the last exchange, and "outer_m", the
    outer momentum. So zero.py shards both tensors, and checkpoints save and reshard both. If weights are loaded later,
    also call optimizer.load(source, "outer"). Otherwise the first outer gradient is measured from the weights that the
    buckets had when Outer was built.

    With overlap > 0, a site takes tau more steps while the exchange of a fragment is in flight. To set its weights w to
    the new w_old would lose these steps. So when the exchange finishes, the site sets them to

        w' = KEPT w + (1 - KEPT) w_old

    w' still deviates from w_old, by KEPT (w - w_old). This deviation is part of the site's next outer gradient of the
    fragment. It contains a share of the tau steps, and a share of changes that were exchanged already.
    """

    def __init__(self, buckets: Sequence, group: Group, *, every: int, lr: float = 0.7, momentum: float = 0.9,
                 fragments: int = 1, overlap: int = 0, dtype: str = "fp32"):
        need(every % fragments == 0, f"every {every}: must be a multiple of fragments {fragments}")
        need(overlap < every // fragments, f"overlap {overlap}: must be below every {every} / fragments {fragments}, "
                                           "so that one exchange ends before the next begins")
        need(dtype in SYNC_DTYPES, f"dtype {dtype}: must be one of {', '.join(SYNC_DTYPES)}")
        for bucket in buckets:
            bucket.state["outer"] = bucket.master.clone()
            bucket.state["outer_m"] = torch.zeros_like(bucket.master)
        self.fragments = [Fragment(index, fragments, buckets) for index in range(fragments)]
        self.group, self.lr, self.momentum, self.dtype = group, lr, momentum, dtype
        self.every, self.overlap = every, overlap
        self.in_flight: PendingMean | None = None

    def step(self, done: int) -> None:
        """Start or finish an exchange if one is due. done: inner steps since the start of training, with this one."""
        starts, finishes = events(done, self.every, len(self.fragments), self.overlap)
        if starts is not None:
            self.start(self.fragments[starts])
        if finishes is not None:
            self.finish(self.fragments[finishes])

    def start(self, fragment: Fragment) -> None:
        """Start to send the outer gradient of a fragment.

        A rank holding nothing of the fragment skips the exchange; so do its peers in the other sites, which hold the
        same shard.
        """
        if fragment.slices:
            pairs = zip(fragment.views("outer"), fragment.views("master"))
            self.in_flight = PendingMean(torch.cat([old - new for old, new in pairs]), self.group, self.dtype)

    def finish(self, fragment: Fragment) -> None:
        """Wait for the outer gradient, and apply it. All ranks call this: update_weights starts collectives."""
        for bucket in fragment.buckets:
            bucket.unsharding.wait()  # the inner step's all-gather may still be reading master, overwritten below
        if fragment.slices:
            weights, old, m = (fragment.views(what) for what in ("master", "outer", "outer_m"))
            grads = self.in_flight.wait().split([len(view) for view in old])
            self.in_flight = None
            for w, w_old, its_m, grad in zip(weights, old, m, grads):
                nesterov(w_old, its_m, grad, self.lr, self.momentum)
                w.lerp_(w_old, 1 - KEPT) if self.overlap else w.copy_(w_old)
        for bucket in fragment.buckets:
            bucket.update_weights()


# ---- demo: python diloco.py -----------------------------------------------------------------------------------------

SITES, WIDTH, STEPS = 4, 64, 64


def batch(site: int, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a linear function.

    Each site doubles every SITES-th component of its inputs, beginning with a different one.
    """
    generator = torch.Generator().manual_seed(1000 * step + site)
    x = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
    x[:, site::SITES] *= 2
    return x, x.sum(1, keepdim=True) + torch.randn(16, 1, generator=generator, dtype=torch.float64)


def train(group: Group, every: int | None) -> tuple[int, float]:
    """Return (bytes that this site has sent, mean error of the weights; the true weights are all 1).

    every: H of DiLoCo; None: data parallelism.
    """
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    outer = PlainDiLoCo(model.parameters(), group, lr=0.7, momentum=0.5)
    sent.clear()
    for step in range(1, STEPS + 1):
        x, y = batch(group.rank, step)
        model.zero_grad()
        ((model(x) - y).square().mean() / (1 if every else group.size)).backward()
        if every is None:
            all_reduce(model.weight.grad, group)
        inner.step()
        if every and step % every == 0:
            outer.step()
    return sent[group.axis], (model.weight - 1).abs().mean().item()


def demo(group: Group) -> None:
    results = {every: train(group, every) for every in (None, 1, 4, 16)}
    if group.rank > 0:
        return
    print(f"{group.size} sites learn {WIDTH} weights in {STEPS} steps of AdamW, each from its own samples, in fp64\n")
    print("                     bytes sent per site   mean error of the weights")
    for every, (nbytes, error) in results.items():
        print(f"{f'DiLoCo, H = {every}' if every else 'data parallelism':20s}{nbytes:20,d}{error:28.3f}")

    every, fragments, overlap = 12, 3, 2
    print(f"\nH = {every}, {fragments} fragments, tau = {overlap}. An exchange begins after step b and ends after e:")
    for number in range(fragments):
        found = [events(done, every, fragments, overlap) for done in range(1, 2 * every + 1)]
        marks = ["b" if starts == number else "e" if ends == number else "." for starts, ends in found]
        print(f"    fragment {number}    {' '.join(marks)}")

    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    print(f"\n{len(x):,} normal numbers, sent and received:")
    for dtype, nbytes in ("fp32", x.nbytes), ("bf16", x.nbytes // 2), ("int8", len(to_bytes(x))):
        error = (PendingMean(x.clone(), ALONE, dtype).wait() - x).norm() / x.norm()
        print(f"    {dtype}    {nbytes / len(x):.2f} bytes per element, relative error {error:.4f}")


if __name__ == "__main__":
    run_demo(demo, ranks=SITES)
