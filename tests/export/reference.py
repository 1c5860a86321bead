"""The forward pass that a ModelSpec means, as plain as it can be written: the ground truth for every family."""

import torch
import torch.nn.functional as F
from coterie_export import ModelSpec
from torch import Tensor

__all__ = ["reference_greedy", "reference_logits"]

Tensors = dict[str, Tensor]


def reference_logits(spec: ModelSpec, tensors: Tensors, tokens_BS: Tensor) -> Tensor:
    """Return logits_BSV, in the dtype of the tensors."""
    x_BSD = tensors["embed.weight"][tokens_BS]
    for i in range(spec.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in tensors.items()}
        feed_forward = _dense if i < spec.num_dense_layers else _moe
        x_BSD = _residual(spec, x_BSD, layer["attention_norm.weight"], lambda h, w=layer: _attention(spec, w, h))
        x_BSD = _residual(spec, x_BSD, layer["mlp_norm.weight"], lambda h, w=layer, f=feed_forward: f(spec, w, h))
    x_BSD = _rms_norm(x_BSD, tensors["norm.weight"], spec.norm_eps)
    return x_BSD @ tensors["embed.weight" if spec.tied_embeddings else "head.weight"].T


def reference_greedy(spec: ModelSpec, tensors: Tensors, tokens_BS: Tensor, num_new: int) -> tuple[Tensor, float]:
    """Return the tokens and the likeliest that follow, and the smallest lead of a likeliest token over the second."""
    lead = float("inf")
    for _ in range(num_new):
        best_B2, next_B2 = reference_logits(spec, tensors, tokens_BS)[:, -1].topk(2)
        lead = min(lead, float((best_B2[:, 0] - best_B2[:, 1]).min()))
        tokens_BS = torch.cat([tokens_BS, next_B2[:, :1]], dim=1)
    return tokens_BS, lead


def _residual(spec, x_BSD, norm_weight, sublayer):
    if spec.norm_placement == "post":
        return x_BSD + _rms_norm(sublayer(x_BSD), norm_weight, spec.norm_eps)
    return x_BSD + sublayer(_rms_norm(x_BSD, norm_weight, spec.norm_eps))


def _rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def _attention(spec, layer, x_BSD):
    heads = []
    for part, num_heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        y = x_BSD @ layer[f"attention.{part}.weight"].T
        if part != "v" and spec.qk_norm == "width":
            y = _rms_norm(y, layer[f"attention.{part}_norm.weight"], spec.norm_eps)
        y = y.unflatten(-1, (num_heads, spec.head_dim)).transpose(1, 2)
        if part != "v" and spec.qk_norm == "head":
            y = _rms_norm(y, layer[f"attention.{part}_norm.weight"], spec.norm_eps)
        if part != "v":
            y = _rotate(y, spec.rope_theta)
        heads.append(y.repeat_interleave(spec.num_heads // num_heads, dim=1))
    q, k, v = heads
    scores = q @ k.transpose(-1, -2) / spec.head_dim**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
    return mixed.transpose(1, 2).flatten(-2) @ layer["attention.o.weight"].T


def _rotate(x, theta):
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def _dense(spec, layer, x_BSD):
    return _swiglu(x_BSD, layer["mlp.gate_up.weight"], layer["mlp.down.weight"])


def _moe(spec, layer, x_BSD):
    logits = x_BSD @ layer["moe.router.weight"].T
    scores = logits.softmax(dim=-1) if spec.score_function == "softmax" else logits.sigmoid()
    ranked = scores + layer["moe.router.selection_bias"] if spec.selection_bias else scores
    if spec.num_groups > 1:
        groups = ranked.unflatten(-1, (spec.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(spec.chosen_groups, dim=-1).indices
        open_groups = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0).bool()
        ranked = groups.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : spec.top_k]
    weights = scores.gather(-1, ids)
    if spec.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    dense_weights = torch.zeros_like(scores).scatter(-1, ids, weights * spec.route_scale)
    y_BSD = torch.zeros_like(x_BSD)
    for e in range(spec.num_experts):
        y_BSD += dense_weights[..., e, None] * _swiglu(
            x_BSD, layer["moe.experts.gate_up"][e], layer["moe.experts.down"][e]
        )
    if spec.shared_hidden:
        y_BSD = y_BSD + _swiglu(x_BSD, layer["moe.shared.gate_up.weight"], layer["moe.shared.down.weight"])
    return y_BSD
