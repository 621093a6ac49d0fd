"""Train in one process with plain torch. Every grid is compared with this reference.

It shares only weights and tokens with the project. It consists of a Llama of matmuls, the
cross-entropy of the whole global batch in one sum, torch.optim and clip_grad_norm_.
"""
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

SCORES = "bqkgd,bpkd->bkgqp"  # einsum of queries and keys


def frequency(pair: int, d: int, model, length: int) -> float:
    """Return the angle per token of a pair of d channels, in a sequence of this length."""
    s, L, theta = model.rope_scaling, model.original_seq_len, model.rope_theta
    if model.rope_type == "dynamic":
        theta *= (s * max(length, L) / L - s + 1) ** (d / (d - 2)) if length > L else 1
        return theta ** (-2 * pair / d)
    plain = theta ** (-2 * pair / d)
    if model.rope_type == "linear" or s == 1:
        return plain / s
    if model.rope_type == "llama3":  # by wavelengths, in tokens
        wave, shortest = 2 * math.pi / plain, L / (model.rope_fast_turns or 4)
        divided = min(max((1 / shortest - 1 / wave) / (1 / shortest - 1 / L), 0), 1)
    else:  # the indices of the pairs that turn `fast` times and once, rounded outward
        fast, slow = (d / 2 * math.log(L / (turns * 2 * math.pi), theta) for turns in (model.rope_fast_turns or 32, 1))
        fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
        divided = min(max((pair - fast) / (slow - fast), 0), 1)
    return plain * (1 - divided) + plain / s * divided


def turns(d: int, model, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return exp(j angle) of every token and pair, [B, S, d/2], times YaRN's factor.

    positions: [B, S].
    """
    each = torch.tensor([frequency(pair, d, model, positions.shape[1]) for pair in range(d // 2)], dtype=dtype)
    factor = 1
    if model.rope_type == "yarn":
        factor = model.rope_attention_factor or 1 + math.log(model.rope_scaling) / 10
    return torch.polar(torch.ones((), dtype=dtype), positions[..., None] * each) * factor


def rotary(x: torch.Tensor, model, positions: torch.Tensor) -> torch.Tensor:
    """Multiply (x[i] + j x[i + D/2]) by exp(j angle), as complex numbers. x: [B, S, heads, D];
    positions: [B, S]."""
    z = torch.complex(*x.chunk(2, -1)) * turns(x.shape[-1], model, positions, x.dtype)[:, :, None]
    return torch.cat((z.real, z.imag), -1)


def find_documents(begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the document of each token, its position in it), [B, S]. begins: [B, S], whether a
    token begins a document."""
    is_first = begins.index_fill(1, torch.tensor([0]), True)
    place = torch.arange(begins.shape[1]).expand(begins.shape)
    return is_first.cumsum(1) - 1, place - place.where(is_first, 0).cummax(1).values


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def open_experts(scores: list[float], model) -> list[int]:
    """Return the experts of the best groups, from which a token with these scores may choose."""
    n = model.experts // model.expert_groups
    groups = [range(first, first + n) for first in range(0, model.experts, n)]
    merit = [sum(sorted((scores[e] for e in group), reverse=True)[:2]) for group in groups]
    ranked = sorted(range(len(groups)), key=lambda g: -merit[g])[:model.top_groups]
    return [e for g in ranked for e in groups[g]]


def mixture(h: torch.Tensor, w: dict[str, torch.Tensor], layer: str, bias: torch.Tensor, model) -> tuple:
    """Compute every token by every expert. The weights of experts that were not chosen are 0.

    h: [B, S, H]. Return the result [B, S, H], the number of tokens of a sequence that chose each
    expert [B, E], probabilities [B, S, E], and the router's logits [B, S, E].
    """
    router = h @ w[layer + "router"].T
    scores = router.softmax(-1) if model.router == "softmax" else torch.sigmoid(router)
    best = [[sorted(open_experts(biased, model), key=lambda e: -biased[e])[:model.top_k] for biased in tokens]
            for tokens in (scores.detach() + bias).tolist()]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, torch.tensor(best), True)
    weights = scores * chosen
    if model.router_norm:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(h)
    for e in range(model.experts):
        y = swiglu(h, *w[layer + "experts.w_gate_up"][e].chunk(2), w[layer + "experts.w_down"][e])
        out = out + model.router_scale * weights[..., e:e + 1] * y
    if model.shared_experts:
        out = out + swiglu(h, *(w[layer + "shared.w_" + part] for part in ("gate", "up", "down")))
    return out, chosen.sum(1), scores / scores.sum(-1, keepdim=True), router


def balance_losses(mixtures: list[tuple], model, optim, micro_batch: int) -> torch.Tensor:
    """Return the sum of the losses that balance experts, over all layers. They are means over
    sequences (or micro-batches)."""
    total = 0
    for _, loads, probabilities, router in mixtures:
        size = 1 if optim.aux_over == "sequence" else micro_batch
        parts = list(zip(loads.split(size), probabilities.split(size)))
        for load, p in parts:
            tokens = p[..., 0].numel()
            fraction = load.sum(0).to(p.dtype) / (model.top_k * tokens)
            total = total + optim.aux_loss * model.experts * (fraction * p.mean((0, 1))).sum() / len(parts)
        total = total + optim.router_z_loss * router.logsumexp(-1).pow(2).mean()
    return total


def swiglu(h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
           biases: tuple[torch.Tensor, ...] = (0, 0, 0)) -> torch.Tensor:
    gate = h @ gate.T + biases[0]
    return (gate * torch.sigmoid(gate) * (h @ up.T + biases[1])) @ down.T + biases[2]


def grouped_qkv(h: torch.Tensor, a: Callable, model, positions: torch.Tensor,
                rotated: bool) -> tuple[torch.Tensor, ...]:
    """Return queries [B, S, N, D], and keys and values [B, S, K, D]. h: [B, S, H]. a: name ->
    weight."""
    q, k, v = (torch.einsum("bsh,oh->bso", h, a("w" + name)) for name in "qkv")
    if model.qkv_bias:
        q, k, v = q + a("bq"), k + a("bk"), v + a("bv")
    q, k, v = (part.reshape(*part.shape[:2], -1, model.head_dim) for part in (q, k, v))
    if model.qk_norm:
        q, k = rms_norm(q, a("q_norm"), model.norm_eps), rms_norm(k, a("k_norm"), model.norm_eps)
    return *((rotary(q, model, positions), rotary(k, model, positions)) if rotated else (q, k)), v


def latent_qkv(h: torch.Tensor, a: Callable, model, positions: torch.Tensor,
               rotated: bool) -> tuple[torch.Tensor, ...]:
    """Return queries and keys [B, S, N, D] and values [B, S, N, v]: equations 37 to 47 of
    DeepSeek-V2's report, head by head."""
    r, R, plain = model.rope_head_dim, model.kv_lora_rank, model.head_dim - model.rope_head_dim
    values = model.v_head_dim or model.head_dim
    turn = turns(r, model, positions, h.dtype)

    def rope(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.view_as_real(z).flatten(-2)

    down = h @ a("w_kv_down").T
    latent, shared_key = rms_norm(down[..., :R], a("kv_norm"), model.norm_eps), rope(down[..., R:])
    queries = rms_norm(h @ a("w_q_down").T, a("q_norm"), model.norm_eps) if model.q_lora_rank else h
    w_q, w_kv = a("w_q_up" if model.q_lora_rank else "wq"), a("w_kv_up")
    heads = []
    for head_q, head_kv in zip(w_q.split(model.head_dim), w_kv.split(plain + values)):
        q, kv = queries @ head_q.T, latent @ head_kv.T
        heads.append((torch.cat((q[..., :plain], rope(q[..., plain:])), -1),
                      torch.cat((kv[..., :plain], shared_key), -1), kv[..., plain:]))
    return tuple(torch.stack(parts, 2) for parts in zip(*heads))


def logits(w: dict[str, torch.Tensor], tokens: torch.Tensor, model, biases: dict[str, torch.Tensor],
           mixtures: list, begins: torch.Tensor) -> torch.Tensor:
    """Return the logits.

    w: weights by name. model: an object with the fields of the architecture. mixtures: a list to
    which the results of `mixture` are appended. begins: [B, S], whether a token begins a document.
    A document sees no other document, and its positions count from 0.
    """
    S = tokens.shape[1]
    documents, positions = find_documents(begins)
    foreign = (documents[:, :, None] != documents[:, None, :])[:, None, None]  # [B, 1, 1, S, S]
    above = torch.ones(S, S, dtype=torch.bool).triu(1)
    x = w["embedding"][tokens]
    for i in range(model.layers + model.mtp):
        if i == model.layers:
            last, x = x, ahead(x, w, tokens, model)
        def a(name, i=i):
            return w[f"layers.{i}.attention.{name}"]
        h = rms_norm(x, w[f"layers.{i}.attention_norm"], model.norm_eps)
        rotated = not model.no_rope_every or i % model.no_rope_every < model.no_rope_every - 1
        q, k, v = (latent_qkv if model.kv_lora_rank else grouped_qkv)(h, a, model, positions, rotated)
        shared = model.heads // model.kv_heads
        q = q.unflatten(2, (model.kv_heads, shared))  # query head n reads kv head n // shared
        scores = torch.einsum(SCORES, q, k) / model.head_dim ** 0.5
        if model.rope_mscale:
            scores = scores * (1 + model.rope_mscale * math.log(model.rope_scaling) / 10) ** 2
        every = model.full_attention_every
        full = model.window == 0 or (every > 0 and i % every == every - 1)
        hidden = above if full else above | above.T.tril(-model.window)  # keys at least W back
        attended = torch.einsum("bkgqp,bpkd->bqkgd", scores.masked_fill(hidden | foreign, -torch.inf).softmax(-1), v)
        x = x + attended.flatten(2) @ a("wo").T + (a("bo") if model.out_bias else 0)
        h = rms_norm(x, w[f"layers.{i}.ffn_norm"], model.norm_eps)
        if model.experts and i >= model.dense_layers:
            mixtures.append(mixture(h, w, f"layers.{i}.", biases[f"layers.{i}.router.bias"], model))
            x = x + mixtures[-1][0]
        else:
            parts = "gate", "up", "down"
            added = [w[f"layers.{i}.ffn.b_{part}"] for part in parts] if model.ffn_bias else (0, 0, 0)
            x = x + swiglu(h, *(w[f"layers.{i}.ffn.w_{part}"] for part in parts), added)
    table = w["embedding" if model.tied else "head"]
    if model.mtp:
        x = rms_norm(x, w[f"layers.{model.layers}.shared_head.norm"], model.norm_eps)
        return torch.stack((rms_norm(last, w["norm"], model.norm_eps) @ table.T, x @ table.T))
    return rms_norm(x, w["norm"], model.norm_eps) @ table.T


def ahead(h: torch.Tensor, w: dict[str, torch.Tensor], tokens: torch.Tensor, model) -> torch.Tensor:
    """Return the input of the block of multi-token prediction.

    It combines every token's h with the embedding of the next token. After the last token the
    embedding is zeros.
    """
    e = F.pad(w["embedding"][tokens[:, 1:]], (0, 0, 0, 1))
    e, h = (rms_norm(x, w[f"layers.{model.layers}.{name}norm"], model.norm_eps) for name, x in (("e", e), ("h", h)))
    return torch.cat((e, h), -1) @ w[f"layers.{model.layers}.eh_proj"].T


def labels_ahead(labels: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return the label of the token after each token, [B, S]; -100 unless both are in one document."""
    same = documents[:, :-1] == documents[:, 1:]
    return F.pad(labels[:, 1:].masked_fill(~same, -100), (0, 1), value=-100)


class Muon(torch.optim.Optimizer):
    """Muon of Liu et al. 2025. Newton-Schulz applies a polynomial to the matrix, which equals
    applying it to the singular values."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                m.mul_(0.95).add_(p.grad, alpha=0.05)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                for whole, g in zip(p.view(-1, *group["shape"]), (0.05 * p.grad + 0.95 * m).view(-1, *group["shape"])):
                    u, s, v = torch.linalg.svd(g / g.norm(), full_matrices=False)
                    for _ in range(5):
                        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                    whole.sub_(u * s @ v, alpha=group["lr"] * 0.2 * max(g.shape) ** 0.5)


def make_optimizers(w: dict[str, torch.Tensor], optim) -> list[torch.optim.Optimizer]:
    matrices = {name: p for name, p in w.items() if optim.optimizer == "muon" and p.ndim >= 2
                and name not in ("embedding", "head")}
    # The gate and up projections of an expert are two matrices in one tensor.
    muon = [Muon([dict(params=[p], shape=(p.shape[-2] // (1 + name.endswith("gate_up")), p.shape[-1]))], dict(
        lr=optim.lr, weight_decay=optim.weight_decay)) for name, p in matrices.items()]
    return [*muon, make_optimizer({name: p for name, p in w.items() if name not in matrices}, optim)]


def make_optimizer(w: dict[str, torch.Tensor], optim) -> torch.optim.Optimizer:
    groups = [dict(params=[p for p in w.values() if p.ndim >= 2], weight_decay=optim.weight_decay),
              dict(params=[p for p in w.values() if p.ndim < 2], weight_decay=0.0)]
    if optim.optimizer in ("adamw", "muon"):
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=1e-8)
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    raise ValueError(f"--optimizer {optim.optimizer}: the reference has no such rule: write it here, in plain torch")


def mean_loss(scores: torch.Tensor, labels: torch.Tensor, optim) -> torch.Tensor:
    valid = labels >= 0
    rows = scores[valid]
    loss = F.cross_entropy(rows, labels[valid], reduction="sum") + optim.z_loss * rows.logsumexp(-1).pow(2).sum()
    return loss / valid.sum()


def train(weights: dict[str, torch.Tensor], batches: list[tuple[torch.Tensor, ...]], model, optim,
          micro_batch: int) -> dict:
    """Train a step on each global batch of (tokens, labels, which tokens begin a document),
    ignoring labels below 0.

    Return everything worth comparing:

    - loss: of each step. It includes the loss of multi-token prediction, without its weight. The
      losses that balance experts are only in the gradient.
    - norm: of each step.
    - grads: by name, of each step, before clipping.
    - params, m, v, biases: by name, after the last step.
    """
    moe_layers = range(model.dense_layers, model.layers + model.mtp) if model.experts else ()
    biases = {f"layers.{i}.router.bias": torch.zeros(model.experts, dtype=torch.float64) for i in moe_layers}
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimizers = make_optimizers(w, optim)
    out = dict(loss=[], norm=[], grads=[])
    for tokens, labels, begins in batches:
        for p in w.values():
            p.grad = None
        mixtures = []
        scores = logits(w, tokens, model, biases, mixtures, begins)
        if model.mtp:
            labels = torch.stack((labels, labels_ahead(labels, find_documents(begins)[0])))
        losses = [mean_loss(*pair, optim) for pair in (zip(scores, labels) if model.mtp else [(scores, labels)])]
        weighted = losses[0] + optim.mtp_weight * sum(losses[1:])
        (weighted + balance_losses(mixtures, model, optim, micro_batch)).backward()
        out["loss"].append(sum(losses).item())
        out["grads"].append({name: p.grad.clone() for name, p in w.items()})
        limit = optim.grad_clip or float("inf")
        out["norm"].append(torch.nn.utils.clip_grad_norm_(list(w.values()), limit).item())
        for optimizer in optimizers:
            optimizer.step()
        for bias, (_, loads, *_) in zip(biases.values(), mixtures):
            load = loads.sum(0).double()
            bias += optim.router_bias_rate * torch.sign(load.mean() - load)
    out["biases"] = biases
    out["params"] = {name: p.detach() for name, p in w.items()}
    state = {p: values for optimizer in optimizers for p, values in optimizer.state.items()}
    for what, theirs in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        out[what] = {name: state[p][theirs] for name, p in w.items() if theirs in state.get(p, ())}
    return out


# ---- what 16 bits do to it ------------------------------------------------------------------------------------------

class Rounded(torch.autograd.Function):
    """Round x to `dtype`, and round its gradient times `scale` to `dtype`."""

    @staticmethod
    def forward(ctx, x, dtype, scale):
        ctx.dtype, ctx.scale = dtype, scale
        return x.to(dtype).to(x)

    @staticmethod
    def backward(ctx, grad):
        return (ctx.scale * grad).to(ctx.dtype).to(grad) / ctx.scale, None, None


class Rounding(TorchFunctionMode):
    """Give the fp64 computations of this file the rounding errors of a run in 16 bits.

    Numbers that such a run stores are rounded: factors and results of matmuls, the residual stream,
    and the gradients of all these. Numbers that it computes in fp32 in between are not rounded:
    norms, rotations, scores, SwiGLU, losses.

    scale: the loss scale. Gradients are rounded after multiplication by it.
    """

    def __init__(self, dtype: torch.dtype, scale: float = 1.0):
        super().__init__()
        self.dtype, self.scale = dtype, scale

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def rounded(x):
            is_real = isinstance(x, torch.Tensor) and x.is_floating_point()
            return Rounded.apply(x, self.dtype, self.scale) if is_real else x

        name = function.__name__.strip("_")
        if name not in ("matmul", "einsum"):
            out = function(*args, **kwargs or {})
            is_stream = name == "add" and out.ndim == 3
            return rounded(out) if is_stream else out
        out = function(*map(rounded, args), **kwargs or {})
        return out if args[0] in (SCORES, "ind,jnd->nij") else rounded(out)  # of mla.latent_attention, too
