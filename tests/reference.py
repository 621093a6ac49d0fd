"""What one process computes with plain torch: the truth that every grid is compared with.

It shares weights and tokens with the project and nothing else: a Llama out of matmuls, the cross-entropy of the whole
global batch summed at once, torch.optim and clip_grad_norm_.
"""
import torch
import torch.nn.functional as F


def rotary(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x B S heads D: multiply (x[i] + j x[i + D/2]) by exp(j angle), as complex numbers."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=x.dtype) / half)
    turn = torch.polar(torch.ones(()).to(x), torch.arange(x.shape[1]).to(x)[:, None] * frequency)  # S D/2
    z = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
    return torch.cat((z.real, z.imag), -1)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def logits(w: dict[str, torch.Tensor], tokens: torch.Tensor, model) -> torch.Tensor:
    """w: weights by name. model: anything with the fields of the architecture."""
    S = tokens.shape[1]
    above = torch.ones(S, S, dtype=torch.bool).triu(1)
    x = w["embedding"][tokens]
    for i in range(model.layers):
        def a(name, i=i):
            return w[f"layers.{i}.attention.{name}"]
        h = rms_norm(x, w[f"layers.{i}.attention_norm"], model.norm_eps)
        q, k, v = (torch.einsum("bsh,oh->bso", h, a("w" + name)) for name in "qkv")
        if model.qkv_bias:
            q, k, v = q + a("bq"), k + a("bk"), v + a("bv")
        q, k, v = (part.reshape(*part.shape[:2], -1, model.head_dim) for part in (q, k, v))
        if model.qk_norm:
            q, k = rms_norm(q, a("q_norm"), model.norm_eps), rms_norm(k, a("k_norm"), model.norm_eps)
        q, k = rotary(q, model.rope_theta), rotary(k, model.rope_theta)
        shared = model.heads // model.kv_heads
        q = q.unflatten(2, (model.kv_heads, shared))  # query head n reads kv head n // shared
        scores = torch.einsum("bqkgd,bpkd->bkgqp", q, k) / model.head_dim ** 0.5
        attended = torch.einsum("bkgqp,bpkd->bqkgd", scores.masked_fill(above, -torch.inf).softmax(-1), v)
        x = x + attended.flatten(2) @ a("wo").T
        h = rms_norm(x, w[f"layers.{i}.ffn_norm"], model.norm_eps)
        gate, up = h @ w[f"layers.{i}.ffn.w_gate"].T, h @ w[f"layers.{i}.ffn.w_up"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"layers.{i}.ffn.w_down"].T
    x = rms_norm(x, w["norm"], model.norm_eps)
    return x @ w["embedding" if model.tied else "head"].T


def train(weights: dict[str, torch.Tensor], batches: list[tuple[torch.Tensor, torch.Tensor]], model, optim) -> dict:
    """Steps over global batches of (tokens, labels), labels below 0 ignored. Returns everything worth comparing:

    loss, norm: of each step. grads: by name, of each step, before clipping. params, m, v: by name, after the last.
    """
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    groups = [dict(params=[p for p in w.values() if p.ndim >= 2], weight_decay=optim.weight_decay),
              dict(params=[p for p in w.values() if p.ndim < 2], weight_decay=0.0)]
    if optim.optimizer == "adamw":
        rule = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=1e-8)
    else:
        rule = torch.optim.SGD(groups, lr=optim.lr)
    out = dict(loss=[], norm=[], grads=[])
    for tokens, labels in batches:
        rule.zero_grad()
        valid = labels >= 0
        rows = logits(w, tokens, model)[valid]
        loss = F.cross_entropy(rows, labels[valid], reduction="sum") + optim.z_loss * rows.logsumexp(-1).pow(2).sum()
        loss = loss / valid.sum()
        loss.backward()
        out["loss"].append(loss.item())
        out["grads"].append({name: p.grad.clone() for name, p in w.items()})
        limit = optim.clip or float("inf")
        out["norm"].append(torch.nn.utils.clip_grad_norm_(list(w.values()), limit).item())
        rule.step()
    out["params"] = {name: p.detach() for name, p in w.items()}
    if optim.optimizer == "adamw":
        out["m"] = {name: rule.state[p]["exp_avg"] for name, p in w.items()}
        out["v"] = {name: rule.state[p]["exp_avg_sq"] for name, p in w.items()}
    return out
