"""Dense building blocks of the decoder: RMSNorm, rotary attention inside documents, and the SwiGLU feed-forward."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from coterie_export import ModelSpec
from torch import Tensor, nn

from coterie_trainer.attention import AttentionContext, attend, attention_context
from coterie_trainer.recompute import again

__all__ = ["Attention", "AttentionContext", "FeedForward", "RMSNorm", "attention_context", "compile_dense"]

_Model = TypeVar("_Model", bound=nn.Module)


def compile_dense(model: _Model, *, backend: str | Callable[..., Any] = "inductor") -> _Model:
    """Let the dense layers of a model run what lies between their matrix products as compiled functions.

    Norms, residual sums, rotations and SwiGLU then read and write each tensor once. They are functions of tensors and
    not of modules, so each is compiled once for all layers; names and parameters do not change. Shapes are those of the
    batch alone: neither another micro-batch nor other documents compile anything again; of a function with more than
    eight shapes the later ones run as they are, and torch warns. The results are those of the plain functions up to
    rounding.

    Args:
        model: changed in place and returned.
        backend: of `torch.compile`.
    """
    # Fixed shapes: a graph for any shape would serve queries too once it was made for keys, and what is computed again
    # in a backward would then keep other tensors than the first time.
    fused = functools.cache(functools.partial(torch.compile, dynamic=False, backend=backend))
    for module in model.modules():
        if isinstance(module, _Dense):
            module.fused = fused
    return model


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Dense(nn.Module):
    """A layer whose functions between matrix products can be exchanged for compiled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is


class RMSNorm(_Dense):
    """Root-mean-square normalisation over the last dimension, computed in fp32 (Zhang and Sennrich, 2019).

    Takes and returns ``(..., width)`` in any floating dtype.
    """

    def __init__(self, width: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., width)."""
        out: Tensor = self.fused(_normalise)(x, self.weight, self.eps)
        return out

    def after_sum(self, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x + change`` and its normalisation; the next step of a residual stream with the norm before."""
        total, normalised = self.fused(_sum_and_normalise)(x, change, self.weight, self.eps)
        return total, normalised

    def added_to(self, x: Tensor, change: Tensor) -> Tensor:
        """Return ``x`` plus the normalised ``change``; the next step of a residual stream with the norm after."""
        out: Tensor = self.fused(_normalise_and_add)(x, change, self.weight, self.eps)
        return out


class Attention(_Dense):
    """Grouped-query attention with rotary positions and optional QK-norm (per head, or over the whole width).

    With ``recompute`` the backward computes all between the projections in and the projection out a second time.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | str | None = None, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qk_norm = spec.qk_norm
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.d_model, q_width, bias=False, device=device)
        self.k = nn.Linear(spec.d_model, kv_width, bias=False, device=device)
        self.v = nn.Linear(spec.d_model, kv_width, bias=False, device=device)
        self.o = nn.Linear(q_width, spec.d_model, bias=False, device=device)
        if spec.qk_norm is not None:
            per_head = spec.qk_norm == "head"
            self.q_norm = RMSNorm(spec.head_dim if per_head else q_width, spec.norm_eps, device)
            self.k_norm = RMSNorm(spec.head_dim if per_head else kv_width, spec.norm_eps, device)

    def forward(self, x_BSD: Tensor, context: AttentionContext) -> Tensor:
        """Mix positions of the same document; ``(B, S, D)`` in and out."""
        q, k, v = self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)
        mixed = again(self._mix, q, k, v, context) if self.recompute else self._mix(q, k, v, context)
        out: Tensor = self.o(mixed)
        return out

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """Return the mixed values (B, S, width of all heads) of projections (B, S, width)."""
        turned = self.fused(_normalise_and_rotate)
        q_BSHd = turned(q, context.cos_SH, context.sin_SH, self.head_dim, *self._norm("q_norm"))
        k_BSGd = turned(k, context.cos_SH, context.sin_SH, self.head_dim, *self._norm("k_norm"))
        v_BSGd = v.view(*v.shape[:2], self.num_kv_heads, self.head_dim)
        return attend(q_BSHd, k_BSGd, v_BSGd, context)

    def _norm(self, name: str) -> tuple[Tensor | None, float]:
        norm: RMSNorm | None = getattr(self, name, None)
        return (None, 0.0) if norm is None else (norm.weight, norm.eps)


class FeedForward(_Dense):
    """SwiGLU feed-forward (Shazeer, 2020): ``down(silu(gate x) * up x)``; gate rows come first in ``gate_up``."""

    def __init__(self, d_model: int, d_hidden: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_hidden, bias=False, device=device)
        self.down = nn.Linear(d_hidden, d_model, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position alone; ``(..., D)`` in and out."""
        out: Tensor = self.down(self.fused(_swiglu)(self.gate_up(x)))
        return out


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def _sum_and_normalise(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + change
    return total, _normalise(total, weight, eps)


def _normalise_and_add(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x + _normalise(change, weight, eps)


def _normalise_and_rotate(
    x_BSQ: Tensor, cos_SH: Tensor, sin_SH: Tensor, head_dim: int, weight: Tensor | None, eps: float
) -> Tensor:
    """Return projected heads (B, S, heads, head_dim), normalised where there is a weight, and turned by position."""
    over_width = weight is not None and weight.shape[0] == x_BSQ.shape[-1]
    if weight is not None and over_width:
        x_BSQ = _normalise(x_BSQ, weight, eps)
    heads = x_BSQ.view(*x_BSQ.shape[:2], -1, head_dim)
    if weight is not None and not over_width:
        heads = _normalise(heads, weight, eps)
    x = heads.float()
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos_SH[:, None] + torch.cat([-second, first], dim=-1) * sin_SH[:, None]
    return rotated.to(heads.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out: Tensor = F.silu(gate) * up
    return out
