"""DiLoCo: sites that are far apart train by themselves, and exchange only now and then what they have learned.

Two sites, H = 4. s: a step of a site on its own samples. Time runs to the right.

    every step    compute   s  s  s  s  s  s  s  s        gradients cross the slow link after each step: sites wait
    (dp.py)       link       ▒▒ ▒▒ ▒▒ ▒▒ ▒▒ ▒▒ ▒▒ ▒▒      for it every time

    plain         compute   s s s s      s s s s          changes of all weights cross it after every H steps
                  link             ▒▒▒▒▒        ▒▒▒▒▒

    fragments     compute   s s    s s    s s    s s      each time those of another half of the layers: the same
                  link         ▒▒▒    ▒▒▒    ▒▒▒    ▒▒    bytes, and half of the peak

    overlap       compute   s s s s s s s s s s s s       while the site goes on: it waits only if an exchange takes
                  link          ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒       longer than the next tau steps

The idea: after an exchange all sites have the same weights. Each takes H steps from there, and ends elsewhere, because
its samples differ. The change, old weights minus new ones, is treated like a gradient. Its mean over the sites is the
*outer gradient*. An *outer optimizer* applies it to the old weights:

    inner, H times    w = w - update of AdamW, Muon, SGD    each site, by the gradient of its own samples
    outer, once       D = mean over sites of (w_old - w)    the outer gradient
                      m = mu m + D                          Nesterov's momentum, as in torch.optim.SGD
                      w_old = w_old - nu (D + mu m)         the same on every site
                      w = w_old                             the next H steps begin here

With H = 1, SGD inside, nu = 1 and mu = 0 this is data parallelism: the mean of the sites' new weights is what a step by
the mean of their gradients gives.

Symbols: n sites. H steps between two exchanges of a weight (--sync-every). F fragments (--sync-fragments). tau steps
under an exchange (--sync-overlap). nu, mu: --outer-lr and --outer-momentum. P parameters.

Inside a site any grid runs. Its groups (core/groups.py) have ranks of one site only, so the other files do not know of
sites. A group of the axis "sites" has the ranks with the same coordinates in all sites. They have the same shards of
the same weights, and nobody else talks across sites.

    all sites have the same    the weights after the last exchange and their momentum. They are state of the buckets
                               like the moments of AdamW, so they are sharded, saved and resharded like them.
    each site has its own      weights, between exchanges; the state of its inner optimizer: moments, the number of
                               updates, the loss scale of fp16; the biases of routers, which balance the loads of the
                               site's own experts. A site whose gradient is not finite skips the step alone.

Where to read: PlainDiLoCo is the whole idea. Outer is the same over shards, and refines it:

    fragments         An exchange takes some of the layers, so the peak of the link falls.     fragment_of, Fragment
    16 and 8 bits     Outer gradients are sent in bf16, or in 8 bits with a scale per block.   Mean
    overlap           An exchange runs under the next tau steps.                               events, Outer

Saves: all but 1/H of the bytes between sites, and with them the wait for the slow link.
Costs: A site sends 2 (n-1)/n P elements per exchange of all weights, so 2 (n-1)/(n H) P per step. (Without ZeRO each
       data parallel rank sends its copy, and so does each replica of --dp-replicate. Level 1 sends one copy.)
       Memory: two tensors in fp32 like the optimizer's moments, and one as large as the fragment that is being sent.
       ZeRO levels 1 and 2 gather a fragment's weights inside the site once more, after its exchange.
       The result is not that of data parallelism: with larger H or more sites, a step may learn less.
Stops helping when: the link is idle for most of H steps already; or the sites' weights have drifted so far apart that
       their mean is no better than each of them.

Easily got wrong:
- The sign. D is old weights minus new ones, so that the outer optimizer may subtract it like a gradient.
- Resetting AdamW's moments after an exchange. They stay: the paper's inner optimizers keep their state.
- Who joins the all-gather. A rank may have nothing of a fragment in its shard. It gathers the others' weights all the
  same.

Douillard et al. 2023 (DiLoCo); Douillard et al. 2025 (Streaming DiLoCo: fragments, overlap, few bits).
"""
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from core.collectives import ALONE, Group, all_gather, all_reduce, run_demo, sent
from core.config import OUTER_STATE, SYNC_DTYPES, need
from core.param import Spec

KEPT = 0.5  # how much of a site's own weights stays, if it has trained on while they were exchanged
BLOCK = 128  # elements that share a scale, in 8 bits


# ---- the plain version: everything at once, after H steps -----------------------------------------------------------

class PlainDiLoCo:
    """The outer optimizer of a model of which this rank has all weights. A rank is a site.

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
            grad = old - param  # as a gradient points: against the way that this site has gone
            all_reduce(grad, self.group)
            nesterov(old, m, grad / self.group.size, self.lr, self.momentum)
            param.copy_(old)


def nesterov(weight: Tensor, m: Tensor, grad: Tensor, lr: float, momentum: float) -> None:
    """Update weights and momentum in place, as torch.optim.SGD(nesterov=True) does."""
    m.mul_(momentum).add_(grad)
    weight.sub_(lr * (grad + momentum * m))


# ---- fragments: some of the layers at a time ------------------------------------------------------------------------

def fragment_of(spec: Spec, fragments: int) -> int:
    """Return the number of the fragment that a parameter is in. It does not depend on the grid.

    Layers take turns, so that each pipeline stage has layers of every fragment. The embedding is in the first fragment,
    the head and the last norm are in the last one. So fragments have about equal sizes if F divides the number of
    layers and the vocabulary is small.
    """
    kind, *rest = spec.name.split(".")
    if kind == "layers":
        return int(rest[0]) % fragments
    return 0 if kind == "embedding" else fragments - 1


class Fragment:
    """What this rank has of one fragment: slices of its shards.

    buckets: those with a parameter of the fragment, also where the shard of this rank has nothing of it.
    slices: (bucket, start, stop) of the flat tensors of its shard. One slice may span neighbouring parameters.
    """

    def __init__(self, number: int, fragments: int, buckets: Sequence):
        self.buckets, self.slices = [], []
        for bucket in buckets:
            params = [param for param in bucket.params if fragment_of(param.spec, fragments) == number]
            if params:
                self.buckets.append(bucket)
            for param in params:
                self.add(bucket, bucket.offset[param], bucket.offset[param] + param.numel())

    def add(self, bucket, start: int, stop: int) -> None:
        """Add elements start..stop of a bucket, as far as they are in the shard."""
        length = len(bucket.master)
        start, stop = (min(max(place - bucket.shard.start, 0), length) for place in (start, stop))
        if start == stop:
            return
        if self.slices and self.slices[-1][0] is bucket and self.slices[-1][2] == start:
            start = self.slices.pop()[1]
        self.slices.append((bucket, start, stop))

    def views(self, what: str) -> list[Tensor]:
        """Return the slices of one tensor of the optimizer state."""
        return [bucket.state[what][start:stop] for bucket, start, stop in self.slices]


# ---- 16 and 8 bits: what is sent ------------------------------------------------------------------------------------

class Mean:
    """The mean of a flat tensor over the sites, while it is computed. The constructor starts, `wait` returns it.

    dtype: "fp32": as it is, in fp32 or fp64. "bf16": sent and summed in bf16, as gradients with --reduce-dtype.
        "int8": each site sends to every other one 8 bits per element and a scale in fp32 per BLOCK elements, and sums
        what it receives in fp32. Sums of 8 bits would not fit into 8 bits. So a site sends (n-1) P (1 + 4 / BLOCK)
        bytes: fewer than in bf16 with less than 4 sites, and fewer than in fp32 with less than 8.
    """

    def __init__(self, x: Tensor, group: Group, dtype: str):
        self.group, self.dtype, self.like = group, dtype, x.new_empty(0)
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
        return result.to(self.like) / self.group.size


def to_bytes(x: Tensor) -> Tensor:
    """Return fp32 numbers [N] as uint8: one byte per element of the padded blocks, then the bytes of their scales."""
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    divisors = scales.clamp(min=torch.finfo(x.dtype).tiny)  # in a block of zeros 0 is divided by it
    numbers = (blocks / divisors).round().to(torch.int8)
    return torch.cat((numbers.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)))


def from_bytes(data: Tensor, numel: int) -> Tensor:
    """Return the numbers [numel] that to_bytes has rounded, in fp32."""
    blocks = -(-numel // BLOCK)
    numbers, scales = data.split((blocks * BLOCK, blocks * 4))
    return (numbers.view(torch.int8).view(-1, BLOCK) * scales.view(torch.float32)[:, None]).flatten()[:numel]


# ---- overlap: when an exchange starts, and when its result is applied -----------------------------------------------

def events(done: int, every: int, fragments: int, overlap: int) -> tuple[int | None, int | None]:
    """Return (fragment whose exchange starts, fragment whose exchange is finished) after `done` inner steps.

    An exchange is finished every H / F steps, and starts tau steps before. tau < H / F, so at most one is under way,
    and none after the last one that a multiple of H / F finishes: runs are saved there.
    """
    period = every // fragments
    starting, finished = (done + overlap) // period - 1, done // period - 1  # numbers, from 0 on, since the beginning
    return (starting % fragments if (done + overlap) % period == 0 else None,
            finished % fragments if done % period == 0 else None)


class Outer:
    """The outer optimizer of zero.py's buckets: PlainDiLoCo over shards, in fragments, overlapped, in few bits.

        outer = Outer(optimizer.buckets, groups["sites"], every=100)
        optimizer.load(source), optimizer.load(source, "outer")     # the first weights are also those of an exchange
        ... step number `done` of the inner optimizer ...
        outer.step(done)

    It adds two tensors to the state of each bucket: "outer", the weights after the last exchange, and "outer_m", their
    momentum. So zero.py shards them, and checkpoints save and reshard them.

    If a site has trained on while a fragment was exchanged (overlap > 0), it has weights w that the others have not
    seen. It takes KEPT w + (1 - KEPT) w_old. The next outer gradient contains what is left of these steps.
    """

    def __init__(self, buckets: Sequence, group: Group, *, every: int, lr: float = 0.7, momentum: float = 0.9,
                 fragments: int = 1, overlap: int = 0, dtype: str = "fp32"):
        need(every % fragments == 0, f"every {every}: must be a multiple of fragments {fragments}")
        need(overlap < every // fragments, f"overlap {overlap}: must be below every {every} / fragments {fragments}, "
                                           "so that one exchange ends before the next begins")
        need(dtype in SYNC_DTYPES, f"dtype {dtype}: must be one of {', '.join(SYNC_DTYPES)}")
        for bucket in buckets:
            for what in OUTER_STATE:
                bucket.state[what] = torch.zeros_like(bucket.master)
        self.fragments = [Fragment(number, fragments, buckets) for number in range(fragments)]
        self.group, self.lr, self.momentum, self.dtype = group, lr, momentum, dtype
        self.every, self.overlap = every, overlap
        self.under_way: Mean | None = None

    def step(self, done: int) -> None:
        """Start or finish exchanges, if it is time to. done: inner steps since the beginning, this one included."""
        starts, finishes = events(done, self.every, len(self.fragments), self.overlap)
        if starts is not None:
            self.start(self.fragments[starts])
        if finishes is not None:
            self.finish(self.fragments[finishes])

    def start(self, fragment: Fragment) -> None:
        """Start to send the outer gradient of a fragment. A rank that has nothing of it has no peer that has."""
        if fragment.slices:
            pairs = zip(fragment.views("outer"), fragment.views("master"))
            self.under_way = Mean(torch.cat([old - new for old, new in pairs]), self.group, self.dtype)

    def finish(self, fragment: Fragment) -> None:
        """Wait for the outer gradient, and let the outer optimizer apply it."""
        for bucket in fragment.buckets:
            bucket.unsharding.wait()  # an all-gather of the inner step's weights may still read them
        if fragment.slices:
            weights, old, m = (fragment.views(what) for what in ("master", *OUTER_STATE))
            grads = self.under_way.wait().split([len(view) for view in old])
            self.under_way = None
            for w, w_old, its_m, grad in zip(weights, old, m, grads):
                nesterov(w_old, its_m, grad, self.lr, self.momentum)
                w.lerp_(w_old, 1 - KEPT) if self.overlap else w.copy_(w_old)
        for bucket in fragment.buckets:
            bucket.update_weights()


# ---- demo: python diloco.py -----------------------------------------------------------------------------------------

SITES, WIDTH, STEPS = 4, 64, 64


def batch(site: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a linear function. Each site sees other directions of the inputs more often."""
    generator = torch.Generator().manual_seed(1000 * step + site)
    x = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
    x[:, site::SITES] *= 2
    return x, x.sum(1, keepdim=True) + torch.randn(16, 1, generator=generator, dtype=torch.float64)


def train(group: Group, every: int | None) -> tuple[int, float]:
    """Return (bytes that this site has sent, error of the weights, which should all be 1). None: data parallelism."""
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
        error = (Mean(x.clone(), ALONE, dtype).wait() - x).norm() / x.norm()
        print(f"    {dtype}    {nbytes / len(x):.2f} bytes per element, relative error {error:.4f}")


if __name__ == "__main__":
    run_demo(demo, ranks=SITES)
