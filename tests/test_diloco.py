"""DiLoCo: sites train as plain torch does for several models, on every grid; what they send is counted; runs resume."""
import re
import shutil
from functools import lru_cache
from unittest.mock import patch

import grids
import pytest
import reference
import runs
import torch
from grids import MIXTRAL
from pool import slow
from program import python
from runs import metrics, tensors
from watch import in_order

import diloco
import train
from core import collectives, rules
from core.config import Config
from core.groups import within_site
from core.param import box_shape
from run import checkpoint, cli, faults, job
from run.ranks import host_group
from test_grids import compare
from zero import Optimizer

# 12 sequences per step. A site reads 6 or, of four sites, 3.
BASE = "--global-batch 12 --steps 8 --sync-every 4"
STREAMING = "--sync-fragments 2 --sync-overlap 1"


# ---- the reference --------------------------------------------------------------------------------------------------

def given(settings: Config) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of the global batch of each step. Each sequence has the same number of targets, so that the mean
    over a global batch is the mean of the sites' means."""
    generator, found = torch.Generator().manual_seed(5), []
    rows, seq = settings.batch.global_batch, settings.batch.seq_len
    for _ in range(settings.optim.steps):
        window = torch.randint(settings.model.vocab, (rows, seq + 1), generator=generator)
        labels = window[:, 1:].clone()
        labels.scatter_(1, torch.rand(rows, seq, generator=generator).argsort(1)[:, :7], -100)
        found.append((window[:, :-1], labels))
    return found


class Site:
    """A model in plain torch with an optimizer of its own."""

    def __init__(self, weights: dict[str, torch.Tensor], settings: Config):
        self.model, self.optim = settings.model, settings.optim
        self.w = {name: value.clone().requires_grad_() for name, value in weights.items()}
        self.optimizers = reference.make_optimizers(self.w, self.optim)
        layers = range(self.model.dense_layers, self.model.layers) if self.model.experts else ()
        self.biases = {f"layers.{i}.router.bias": torch.zeros(self.model.experts).double() for i in layers}

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        for p in self.w.values():
            p.grad = None
        mixtures, no_documents = [], torch.zeros_like(tokens, dtype=torch.bool)
        scores = reference.logits(self.w, tokens, self.model, self.biases, mixtures, no_documents)
        loss = reference.mean_loss(scores, labels, self.optim)
        (loss + reference.balance_losses(mixtures, self.model, self.optim, 1)).backward()
        torch.nn.utils.clip_grad_norm_(list(self.w.values()), self.optim.grad_clip or float("inf"))
        for optimizer in self.optimizers:
            optimizer.step()
        for bias, (_, loads, *_) in zip(self.biases.values(), mixtures):
            load = loads.sum(0).double()
            bias += self.optim.router_bias_rate * torch.sign(load.mean() - load)

    def state(self, what: str) -> dict[str, torch.Tensor]:
        found = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        name_there = dict(m="exp_avg", v="exp_avg_sq")[what]
        return {name: found[p][name_there] for name, p in self.w.items() if name_there in found.get(p, ())}


@lru_cache(maxsize=32)
def truth(flags: str, sites: int) -> tuple[list[Site], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(sites, old weights, momentum of the outer optimizer) after all steps, by torch.optim.SGD as outer optimizer."""
    settings = grids.settings_of(f"{flags} --sites {sites}", sites)
    optim = settings.optim
    period, fragments, overlap = optim.sync_every // optim.sync_fragments, optim.sync_fragments, optim.sync_overlap
    old = grids.initial(settings)
    here = [Site(old, settings) for _ in range(sites)]
    outer = {name: torch.optim.SGD([p], optim.outer_lr, optim.outer_momentum, nesterov=optim.outer_momentum > 0)
             for name, p in old.items()}
    under_way = {}
    for done, (tokens, labels) in enumerate(given(settings), 1):
        for number, site in enumerate(here):
            site.step(tokens.chunk(sites)[number], labels.chunk(sites)[number])
        if (done + overlap) % period == 0:
            turn = ((done + overlap) // period - 1) % fragments
            under_way = {name: torch.stack([old[name] - site.w[name].detach() for site in here]).mean(0)
                         for name in old if fragment(name, fragments) == turn}
        if done % period == 0:
            for name, grad in under_way.items():
                old[name].grad = grad
                outer[name].step()
                for site in here:
                    w = site.w[name].data
                    w.copy_((w + old[name]) / 2 if overlap else old[name])
    momentum = {name: outer[name].state[p]["momentum_buffer"] for name, p in old.items() if optim.outer_momentum}
    return here, old, momentum


def fragment(name: str, fragments: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) % fragments
    return 0 if name == "embedding" else fragments - 1


# ---- the product ----------------------------------------------------------------------------------------------------

def trained(flags: str) -> dict:
    """One rank of a grid of sites: its state after all steps, and what it has sent to other sites."""
    world = grids.everyone().size
    settings = grids.settings_of(flags, world)
    groups, model, pipeline, optimizer = grids.build(settings)
    outer = train.build_outer(settings, optimizer, groups)
    exchanges = []
    for done, (tokens, labels) in enumerate(given(settings), 1):
        before = collectives.sent["sites"]
        grids.forward_backward(settings, groups, model, pipeline, optimizer, tokens, labels)
        optimizer.step(settings.optim.lr)
        train.update_balance(model, groups, torch.tensor(True), len(tokens) // settings.grid.sites)
        if outer:
            outer.step(done)
        exchanges.append(collectives.sent["sites"] - before)
    out = dict(site=groups["sites"].rank, exchanges=exchanges, biases={r.name: r.bias for r in model.routers})
    out |= {what: grids.pieces(optimizer, what) for what in ("master", "m", "v", "outer", "outer_m")}
    for bucket in optimizer.buckets:
        bucket.unshard()
    return out | dict(visible=[(p.spec.name, p.box, p.detach().clone()) for p in model.parameters()])


def is_as_plain_torch(results: list[dict], flags: str, sites: int) -> None:
    here, old, momentum = truth(model_flags(flags), sites)
    for what, want in ("outer", old), *([("outer_m", momentum)] if momentum else []):
        for site in range(sites):
            got = grids.whole([result[what] for result in results if result["site"] == site])
            compare(got, want, f"{what} of site {site}")
    for number, site in enumerate(here):
        ranks = [result for result in results if result["site"] == number]
        masters = grids.whole([result["master"] for result in ranks])
        compare(masters, {name: p.detach() for name, p in site.w.items()}, f"weights of site {number}")
        for what in ("m", "v"):
            if site.state(what):
                compare(grids.whole([result[what] for result in ranks]), site.state(what), f"{what} of site {number}")
        for result in ranks:
            assert all(torch.equal(bias, site.biases[name]) for name, bias in result["biases"].items())
            for name, box, there in result["visible"]:
                assert torch.equal(there, masters[name][box]), f"{name}: forward reads other weights"


def model_flags(flags: str) -> str:
    """Without what only says how ranks divide the work."""
    return re.sub(r"--(sites|dp|tp|cp|pp|ep|zero|micro-batch|bucket-mb|schedule|dp-replicate|cp-style|sp) \S+ ?", "",
                  flags).strip()


# ---- parity ---------------------------------------------------------------------------------------------------------

EXPERTS = f"{MIXTRAL.format(20)} --router-bias-rate 0.01"
# Ranks -> [(sites, flags)]. The cases of one number of ranks run in one world.
GRIDS = {
    2: [(2, "--micro-batch 6"),
        (2, f"--micro-batch 6 {STREAMING}"),
        (2, f"--micro-batch 2 --tied --sync-fragments 2 --optimizer muon {EXPERTS}"),
        (2, "--micro-batch 3 --sync-every 2 --optimizer sgd --outer-lr 1.3 --outer-momentum 0 --grad-clip 0")],
    3: [(3, "--micro-batch 2 --sync-every 8 --sync-fragments 2 --sync-overlap 3")],
    4: [(2, f"--micro-batch 3 {STREAMING}"),
        (2, f"--micro-batch 1 --zero 1 --bucket-mb 0.05 {STREAMING}"),
        (2, f"--micro-batch 3 --zero 2 --optimizer muon {STREAMING}"),
        (2, f"--micro-batch 1 --zero 3 --tied {STREAMING}"),
        (2, f"--micro-batch 6 --tp 2 {STREAMING}"),
        (2, f"--micro-batch 6 --cp 2 --cp-style ring {STREAMING}"),
        (2, f"--micro-batch 2 --pp 2 --tied {STREAMING}"),
        (2, f"--micro-batch 3 --ep 2 --zero 1 {EXPERTS} {STREAMING}"),
        (4, f"--micro-batch 3 {STREAMING}")],
    8: [(2, f"--micro-batch 3 --zero 3 --tp 2 --sync-fragments 4 --layers 4 {EXPERTS}"),
        (2, f"--micro-batch 2 --pp 2 --tp 2 --schedule zb-v --layers 4 {STREAMING}")],
}


@pytest.mark.parametrize("ranks", [2, 3, 4, *slow(8)])
def test_sites_train_as_several_models_in_plain_torch(pool, ranks):
    """Weights, moments and biases of each site, and what all share, after 8 steps, to 1e-10."""
    cases = [dict(flags=f"{BASE} --sites {sites} {flags}") for sites, flags in GRIDS[ranks]]
    for case, (sites, _), results in zip(cases, GRIDS[ranks], grids.for_each(pool, ranks, trained, cases)):
        is_as_plain_torch(results, case["flags"], sites)


@lru_cache(maxsize=8)
def by_data_parallelism(flags: str) -> dict[str, torch.Tensor]:
    """Weights after all steps, if one process computes the gradient of the whole global batch in each."""
    settings = grids.settings_of(re.sub(r"--(sync|outer)-\S+ \S+ ?", "", flags))
    batches = [(tokens, labels, torch.zeros_like(tokens, dtype=torch.bool)) for tokens, labels in given(settings)]
    return reference.train(grids.initial(settings), batches, settings.model, settings.optim, 1)["params"]


# With H = 1, SGD inside, and an outer optimizer that takes the mean, on grids of every dimension.
AS_DATA_PARALLEL = {
    2: ["--micro-batch 6", "--micro-batch 3 --sync-dtype fp32 --tied"],
    4: ["--micro-batch 3", "--micro-batch 3 --zero 1 --bucket-mb 0.05", "--micro-batch 1 --zero 3", "--tp 2",
        "--cp 2 --cp-style ulysses", "--micro-batch 2 --pp 2 --schedule interleaved --layers 4",
        f"--micro-batch 3 --ep 2 --zero 2 {MIXTRAL.format(20)}"],
    8: ["--global-batch 16 --micro-batch 2 --zero 1 --dp-replicate 2",
        "--micro-batch 3 --pp 2 --tp 2 --schedule zb-h1 --tied"]}


@pytest.mark.parametrize("ranks", AS_DATA_PARALLEL)
def test_an_exchange_after_every_step_of_sgd_is_data_parallelism(pool, ranks):
    mean = "--sync-every 1 --outer-lr 1 --outer-momentum 0 --optimizer sgd --lr 0.1 --grad-clip 0 --steps 3"
    cases = [dict(flags=f"{BASE} {mean} --sites 2 {flags}") for flags in AS_DATA_PARALLEL[ranks]]
    for case, results in zip(cases, grids.for_each(pool, ranks, trained, cases)):
        want = by_data_parallelism(model_flags(case["flags"]))
        for site in range(2):
            got = grids.whole([result["master"] for result in results if result["site"] == site])
            compare(got, want, f"{case['flags']}: weights of site {site}")


def test_with_one_site_the_mean_changes_nothing():
    """An outer step that takes the mean of one site leaves plain training as it is; also in fragments."""
    flags, ends = "--micro-batch 6 --global-batch 12", []
    for fragments in 0, 1, 2:
        settings = grids.settings_of(flags)
        groups, model, pipeline, optimizer = grids.build(settings)
        if fragments:
            outer = diloco.Outer(optimizer.buckets, collectives.ALONE, every=2, lr=1.0, momentum=0.0,
                                 fragments=fragments)
        for done, (tokens, labels) in enumerate(2 * given(settings), 1):
            grids.forward_backward(settings, groups, model, pipeline, optimizer, tokens, labels)
            optimizer.step(settings.optim.lr)
            if fragments:
                outer.step(done)
        ends.append(grids.whole([grids.pieces(optimizer, "master")]))
    for end in ends[1:]:
        compare(end, ends[0], "weights")


def plain_sites(every: int) -> list[torch.Tensor]:
    """PlainDiLoCo on this rank, and the same of all sites in this process by torch.optim.SGD."""
    group = grids.everyone()
    models = [torch.nn.Linear(5, 3, dtype=torch.float64) for _ in range(group.size + 1)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    old, *sites = models
    generator = torch.Generator().manual_seed(0)
    for p in (p for model in models for p in model.parameters()):  # ranks have different global seeds
        p.data = torch.ones_like(p)
    mine = torch.nn.Linear(5, 3, dtype=torch.float64)
    mine.load_state_dict(old.state_dict())
    outer = diloco.PlainDiLoCo(mine.parameters(), group, lr=0.7, momentum=0.9)
    reference_outer = torch.optim.SGD(old.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 7):
        xs = [torch.randn(4, 5, dtype=torch.float64, generator=generator) for _ in sites]
        for model, x in [*zip(sites, xs), (mine, xs[group.rank])]:
            model.zero_grad()
            model(x).square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
        if step % every == 0:
            outer.step()
            for p, *of_sites in zip(old.parameters(), *(site.parameters() for site in sites)):
                p.grad = p.detach() - torch.stack([q.detach() for q in of_sites]).mean(0)
            reference_outer.step()
            for site in sites:
                site.load_state_dict(old.state_dict())
    return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (mine, sites[group.rank])]


@pytest.mark.parametrize("every", [1, 3])
def test_the_plain_version_is_sgd_with_nesterov_momentum_on_the_mean_change(pool, every):
    for got, want in pool.run(3, plain_sites, every=every):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


# ---- bytes, order and bits ------------------------------------------------------------------------------------------

def sizes_of_fragments(settings: Config) -> list[int]:
    sizes = [0] * settings.optim.sync_fragments
    for name, values in grids.initial(settings).items():
        sizes[fragment(name, len(sizes))] += values.numel()
    return sizes


@pytest.mark.parametrize("sites, ranks, flags", [
    (2, 2, "--micro-batch 6"), (2, 4, f"--micro-batch 3 --zero 1 --bucket-mb 0 {STREAMING}"),
    (4, 8, "--global-batch 16 --layers 4 --zero 2 --bucket-mb 0 --sync-fragments 4")])
def test_a_site_sends_the_bytes_that_are_said(pool, sites, ranks, flags):
    """2 (n-1)/n of the elements of a fragment, from a site's ranks together, so 2 (n-1)/(n H) P per step."""
    flags = f"{BASE} --sites {sites} {flags}"
    results, settings = pool.run(ranks, trained, flags=flags), grids.settings_of(flags, ranks)
    sizes, every, overlap = sizes_of_fragments(settings), settings.optim.sync_every, settings.optim.sync_overlap
    period = every // len(sizes)
    of_a_step = [sum(sent) for sent in zip(*(result["exchanges"] for result in results if result["site"] == 0))]
    starts = [done for done, sent in enumerate(of_a_step, 1) if sent]
    assert starts == [period * k - overlap for k in range(1, settings.optim.steps // period + 1)]
    turns = [of_a_step[start - 1] for start in starts]
    want = [2 * (sites - 1) / sites * 8 * sizes[k % len(sizes)] for k in range(len(starts))]
    assert turns == want
    assert sum(of_a_step) == 2 * (sites - 1) / (sites * every) * sum(sizes) * 8 * settings.optim.steps


def order_of_events(flags: str) -> list[str]:
    def wait(pending: collectives.Pending) -> str | None:
        return "wait" if pending.works and pending.call.axis == "sites" else None

    with in_order((diloco, "all_reduce", "start"), (collectives.Pending, "wait", wait),
                  (Optimizer, "step", "inner")) as events:
        trained(flags)
    return events


@pytest.mark.parametrize("overlap", [0, 3])
def test_tau_inner_steps_lie_between_the_start_of_an_exchange_and_its_wait(pool, overlap):
    flags = f"{BASE} --sites 2 --micro-batch 6 --sync-overlap {overlap}"
    for events in pool.run(2, order_of_events, flags=flags):
        assert events == 2 * [*(4 - overlap) * ["inner"], "start", *overlap * ["inner"], "wait"]


def means(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
    """dtype -> (mean over the ranks of x times 1 + rank, bytes that this rank has sent)."""
    group, found = collectives.Group("sites", grids.everyone().process_group), {}
    for dtype in "fp32", "bf16", "int8":
        collectives.sent.clear()
        found[dtype] = diloco.PendingMean(x * (1 + group.rank), group, dtype).wait(), collectives.sent["sites"]
    return found


@pytest.mark.parametrize("sites", [2, 4])
def test_a_mean_in_few_bits_errs_by_half_a_step_and_is_the_same_on_all_sites(pool, sites):
    """A block of 128 numbers has the scale of its largest one. One block here is 0, one is large, one is small, one is
    incomplete."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x[128:256], x[256:384], x[384:512] = 0, 1e4 * x[256:384], 1e-30 * x[384:512]
    results = pool.run(sites, means, x=x)
    factor = (1 + sites) / 2  # the mean of 1 + rank
    exact = x.double() * factor
    for dtype in results[0]:
        assert all(torch.equal(result[dtype][0], results[0][dtype][0]) for result in results), dtype
        assert results[0][dtype][0].dtype == torch.float32
    error = {dtype: (mean.double() - exact).abs() for dtype, (mean, _) in results[0].items()}
    assert (error["fp32"] <= 1e-6 * exact.abs() + 1e-12).all()
    assert (error["bf16"] <= sites * 2**-8 * exact.abs()).all() and (error["bf16"] > error["fp32"]).any()
    padded = torch.nn.functional.pad(exact.abs(), (0, 24)).view(-1, 128)
    half_a_step = (padded.amax(1, keepdim=True) / 254).expand(-1, 128).flatten()[:1000]
    assert (error["int8"] <= 1.0001 * half_a_step).all() and (error["int8"] > 0.5 * half_a_step).any()
    nbytes = {dtype: sent for dtype, (_, sent) in results[0].items()}
    assert nbytes == dict(fp32=2 * 4000 * (sites - 1) // sites, bf16=2 * 2000 * (sites - 1) // sites,
                          int8=(sites - 1) * (1024 + 8 * 4))


# ---- whole runs: saved, resharded, resumed, ended -------------------------------------------------------------------

SMALL = (f"{grids.TINY} --global-batch 8 --micro-batch 1 --warmup 1 --steps 8 --save-every 4 --keep-checkpoints 0 "
         f"--lr-schedule constant --sample-prompt= --check-replicas 4 --data {__file__}")
RUN = f"{SMALL} --sites 2 --sync-every 4"
STATES = [  # ranks, flags
    (2, f"--dtype fp32 --fp8 tensorwise {STREAMING}"),
    (4, f"--dtype bf16 --zero 3 --ep 2 --experts 4 --top-k 2 --expert-ffn 24 --router-bias-rate 0.01 --sync-dtype int8 "
        f"--val-data {cli.__file__} --eval-every 4 {STREAMING}"),
    (4, "--dtype fp16 --pp 2 --zero 1 --z-loss 30 --sync-dtype bf16")]


@pytest.mark.parametrize("ranks, flags", STATES, ids=[flags.split("--")[1] for _, flags in STATES])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(pool, tmp_path, ranks, flags):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    pool.run(ranks, runs.run, flags=f"{RUN} {flags} --checkpoint-dir {straight} --metrics {straight}.jsonl")
    shutil.copytree(straight / "step-000004", resumed / "step-000004")
    pool.run(ranks, runs.run, flags=f"--resume auto --checkpoint-dir {resumed} --metrics {resumed}.jsonl")
    want, got = (tensors(folder / "step-000008") for folder in (straight, resumed))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert {name.split("@")[0] for name in want if "@1" in name} == {
        name for name in want if "@" not in name and "/outer" not in name}, "each site has a state of its own"
    assert any(not torch.equal(want[name], want[f"{name}@1"]) for name in want if name.endswith("/m"))
    lines = [metrics(tmp_path / f"{name}.jsonl") for name in ("straight", "resumed")]
    for name in ("step", "tokens", "loss", "grad_norm", "val_loss"):
        assert [line.get(name) for line in lines[0][4:]] == [line.get(name) for line in lines[1]]


def test_the_state_of_all_sites_goes_on_on_other_grids(pool, tmp_path):
    """After 12 steps, of which every four are on another grid, all tensors are those of one grid, to 1e-10."""
    flags = f"{RUN} --dtype fp64 --tied {STREAMING} --steps 12"
    pool.run(2, runs.run, flags=f"{flags} --micro-batch 4 --checkpoint-dir {tmp_path}/straight")
    chain = [(4, 4, "--zero 3 --micro-batch 2"), (8, 4, "--zero 0 --tp 2"), (12, 4, "--tp 1 --pp 2 --micro-batch 2")]
    for steps, ranks, grid in chain:
        pool.run(ranks, runs.run, flags=f"{flags} {grid} --steps {steps} --checkpoint-dir {tmp_path}/chain "
                                        "--resume auto")
    want, got = (tensors(tmp_path / name / "step-000012") for name in ("straight", "chain"))
    compare(got, want, "state")


def restored(path: str, flags: str) -> dict[str, torch.Tensor]:
    """All tensors of this rank's site, as a checkpoint gives them to it."""
    settings = rules.parse(flags.split(), grids.everyone().size)
    groups, model, pipeline, optimizer = grids.build(settings)
    train.build_outer(settings, optimizer, groups)
    optimizer.load(lambda spec, box: torch.full(box_shape(box), 7.0), "outer_m")
    sites = cli.read_run(path)["grid"]["sites"]
    checkpoint.load(path, optimizer, model.routers, groups, host_group(60), sites)
    found = {f"{name}/{what}": values for what in optimizer.buckets[0].state
             for name, values in grids.whole([grids.pieces(optimizer, what)]).items()}
    return found | optimizer.extra_state()


def test_fewer_sites_go_on_with_their_own_states_and_more_with_copies(pool, tmp_path):
    """From 2 sites to 1 and to 4. Runs with one site have no outer optimizer, whose state then follows from weights.
    Two sites that have just exchanged evaluate their parts of the samples, and find the loss of one site on all."""
    evaluated = f"{RUN} --dtype fp64 --val-data {cli.__file__} --eval-every 4 --metrics {tmp_path}/m"
    pool.run(2, runs.run, flags=f"{evaluated} --checkpoint-dir {tmp_path}/out")
    path = tmp_path / "out" / "step-000008"
    saved = tensors(path)
    for ranks in 1, 4:
        flags = f"{RUN} --dtype fp64 --sites {ranks}" if ranks > 1 else f"{SMALL} --dtype fp64"
        for site, state in enumerate(pool.run(ranks, restored, path=str(path), flags=f"{flags} --checkpoint-dir a")):
            assert any("/outer" in name for name in state) == (ranks > 1)
            for name, values in state.items():
                name = f"{name}@1" if site % 2 and "/outer" not in name else name
                assert torch.equal(values, saved[name]), (ranks, site, name)

    said = runs.run(f"--resume auto --checkpoint-dir {tmp_path}/out --sites 1 --metrics=")
    assert f"after 8 steps: validation loss {metrics(tmp_path / 'm')[-1]['val_loss']:.4f}\n" in said
    said = runs.run(f"--resume auto --checkpoint-dir {tmp_path}/out --sites 1 --steps 12 --metrics=")
    alone = path.with_name("step-000012")
    plain = tensors(alone)
    assert "step-000008 after 8 steps" in said and not any("@" in name for name in plain)
    for state in pool.run(2, restored, path=str(alone), flags=f"{RUN} --dtype fp64 --checkpoint-dir a"):
        for name, values in plain.items():
            assert torch.equal(state[name], values)
            if name.endswith("/master"):
                assert torch.equal(state[name.replace("/master", "/outer")], values)


def asked_to_stop(flags: str, evaluating: bool = False) -> str:
    """What a run prints whose last rank is asked to stop in step 1, or in its first evaluation, if results are read as
    late as on a GPU."""
    state, world = job.RunState(), grids.everyone()

    def is_asked(stop: faults.Stop) -> bool:
        asked = state.activity.startswith("evaluating") if evaluating else state.step >= 1
        return asked and world.rank == world.size - 1

    wanted = patch.object(faults.Stop, "wanted", is_asked)
    with patch.object(job, "reads_late", lambda device: True), wanted:
        return runs.run(flags, state)


def test_a_request_to_stop_ends_all_sites_after_their_next_exchange(pool, tmp_path):
    """The first site hears of it when they exchange, after step 3. Results are read late, as on a GPU, but those of
    this step are not: else the run would be saved while the next exchange is under way. It goes on to the bit."""
    flags = (f"{RUN} --dtype fp64 --steps 16 --sync-every 8 --save-every 8 --check-replicas 0 --sync-fragments 2 "
             "--sync-overlap 3")
    there = f"--metrics {tmp_path}/m --checkpoint-dir {tmp_path}/out"
    said = pool.run(2, asked_to_stop, flags=f"{flags} {there}")[0]
    assert "ended after 4 of 16 steps, as asked (on another rank)" in said
    pool.run(2, runs.run, flags=f"--resume auto --checkpoint-dir {tmp_path}/out")
    pool.run(2, runs.run, flags=f"{flags} --save-every 0 --metrics {tmp_path}/straight")
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("m", "straight")]
    assert losses[0] == losses[1] and len(losses[0]) == 16


def test_a_request_to_stop_in_an_evaluation_is_heard_by_all_sites(pool, tmp_path):
    flags = f"{RUN} --dtype fp64 --val-data {cli.__file__} --eval-every 4 --checkpoint-dir {tmp_path}/out"
    said = pool.run(2, asked_to_stop, flags=flags, evaluating=True)[0]
    assert "ended after 4 of 8 steps, as asked (on another rank)" in said
    assert (tmp_path / "out" / "step-000004" / "run.json").exists()


def test_a_site_that_disappears_ends_the_run_which_goes_on_with_those_that_remain(tmp_path):
    """In step 9, when the checkpoint of 4 steps is whole. The other site misses it in the exchange after step 11."""
    flags = f"{RUN} --dtype fp64 --steps 12 --timeout 60 --checkpoint-dir {tmp_path}/out --metrics {tmp_path}/m"
    torchrun = "-m torch.distributed.run --nproc_per_node=2"
    done = python(*f"{torchrun} tests/help/faulty.py kill 1 9 backward {flags}".split())
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    lost = r"train.py: rank 0 failed in step 11: all_reduce, call \d+ on axis sites \(ranks 0, 1\), lost its connection"
    assert done.returncode == 1 and len(said) == 1 and re.match(lost, said[0]), done.stderr
    said = runs.run(f"{SMALL} --dtype fp64 --steps 12 --sites 1 --resume auto --checkpoint-dir {tmp_path}/out "
                    f"--metrics {tmp_path}/m")
    assert re.search("resumed .* after [48] steps", said) and "trained 12 steps" in said
    assert [line["step"] for line in metrics(tmp_path / "m")] == [*range(12)]


def compared(spoiled: str) -> str:
    """What a comparison of replicas says of sites whose weights differ, as they do between exchanges, and of which the
    second one's tensor `spoiled` does, too."""
    settings = grids.settings_of(f"{BASE} --sites 2 --micro-batch 6", 2)
    groups, model, pipeline, optimizer = grids.build(settings)
    train.build_outer(settings, optimizer, groups)
    for what in ("master", *([spoiled] if spoiled else [])):
        optimizer.buckets[0].state[what].add_(groups["sites"].rank)
    optimizer.steps.add_(groups["sites"].rank)  # the first site has skipped a step
    optimizer.buckets[0].update_weights()
    try:
        faults.check_replicas(optimizer, [], within_site(groups))
    except faults.Failure as failure:
        return str(failure)
    return ""


def test_replicas_are_compared_within_a_site_and_the_outer_state_between_sites(pool):
    says = {"": "^$", "outer": r"^embedding/outer .*ranks 0, 1 have different values \(axis sites\)",
            "outer_m": r"^embedding/outer_m .*ranks 0, 1 have different values \(axis sites\)"}
    found = grids.for_each(pool, 2, compared, [dict(spoiled=spoiled) for spoiled in says])
    for pattern, said in zip(says.values(), found):
        assert all(re.search(pattern, line) for line in said), said
