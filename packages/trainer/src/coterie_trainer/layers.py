"""Dense building blocks of the decoder: RMSNorm, rotary attention inside documents, and the SwiGLU feed-forward."""

import torch
import torch.nn.functional as F
from coterie_export import ModelSpec
from torch import Tensor, nn

from coterie_trainer.recompute import again

__all__ = ["Attention", "AttentionContext", "FeedForward", "RMSNorm", "attention_context"]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in fp32 (Zhang and Sennrich, 2019).

    Takes and returns ``(..., width)`` in any floating dtype.
    """

    def __init__(self, width: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., width)."""
        normalised = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normalised.to(x.dtype)


class AttentionContext:
    """What all attention layers of one forward share: the rotary angles and the mask of one batch.

    Attributes:
        cos_SH: fp32 ``(S, head_dim)``; ``sin_SH`` likewise.
        mask_B1SS: bool, True where a query (first S) may see a key (second S): not later, and in the same document.
    """

    def __init__(self, cos_SH: Tensor, sin_SH: Tensor, mask_B1SS: Tensor) -> None:
        self.cos_SH = cos_SH
        self.sin_SH = sin_SH
        self.mask_B1SS = mask_B1SS


def attention_context(document_ids_BS: Tensor, head_dim: int, rope_theta: float) -> AttentionContext:
    """Build the rotary angles (Su et al., 2021, in the half-split pairing) and the causal document mask of one batch.

    Args:
        document_ids_BS: int32; positions with equal ids see each other. Padding has its own id, so no row is empty.
        head_dim: even width of one head.
        rope_theta: base of the rotary frequencies.
    """
    num_positions = document_ids_BS.shape[1]
    device = document_ids_BS.device
    frequencies = rope_theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(num_positions, device=device, dtype=torch.float32)[:, None] * frequencies
    angles_SH = torch.cat([angles, angles], dim=-1)
    same_document = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    mask_B1SS = same_document.tril()[:, None]
    return AttentionContext(angles_SH.cos(), angles_SH.sin(), mask_B1SS)


def _rotate(x_BHSd: Tensor, context: AttentionContext) -> Tensor:
    x = x_BHSd.float()
    first, second = x.chunk(2, dim=-1)
    rotated = x * context.cos_SH + torch.cat([-second, first], dim=-1) * context.sin_SH
    return rotated.to(x_BHSd.dtype)


class Attention(nn.Module):
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
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(*q.shape[:2], self.num_heads, self.head_dim)
        k = k.view(*k.shape[:2], self.num_kv_heads, self.head_dim)
        v = v.view(*v.shape[:2], self.num_kv_heads, self.head_dim)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = _rotate(q, context), _rotate(k, context)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=context.mask_B1SS, enable_gqa=self.num_kv_heads != self.num_heads
        )
        return mixed.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """SwiGLU feed-forward (Shazeer, 2020): ``down(silu(gate x) * up x)``; gate rows come first in ``gate_up``."""

    def __init__(self, d_model: int, d_hidden: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_hidden, bias=False, device=device)
        self.down = nn.Linear(d_hidden, d_model, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position alone; ``(..., D)`` in and out."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out
