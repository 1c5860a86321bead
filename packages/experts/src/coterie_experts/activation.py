"""What happens between the two projections of an expert, forward and backward, in float32 at least."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation", "ActivationName"]

ActivationName = Literal["swiglu", "swiglu_clamped", "relu_squared"]
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The function from the pre-activation (R, 2H), or (R, H) where there is no gate, to the hidden units (R, H).

    - ``swiglu``: silu(gate) * up (Shazeer 2020, arXiv:2002.05202).
    - ``swiglu_clamped``: g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and u = up held to
      [-limit, limit]; the experts of gpt-oss, as ``GptOssExperts`` of transformers has them. A clamped value has no
      gradient, one at the limit has.
    - ``relu_squared``: relu(up)^2 with no gate (So et al. 2021, arXiv:2109.08668); the experts of Nemotron-H.

    Args:
        name: one of the above.
        alpha: of ``swiglu_clamped``.
        limit: of ``swiglu_clamped``, above 0.
    """

    name: ActivationName = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def is_gated(self) -> bool:
        """Say whether the pre-activation holds H gate columns before the H up columns."""
        return self.name != "relu_squared"

    def problems(self) -> list[str]:
        """Return every fault as one sentence."""
        found = []
        if self.name not in ACTIVATIONS:
            found.append(f"activation ({self.name!r}) must be one of {', '.join(ACTIVATIONS)}")
        for name, value, usual in (("swiglu_limit", self.limit, "7"), ("swiglu_alpha", self.alpha, "1.702")):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                shown = f"{value:g}" if is_number else repr(value)
                found.append(f"{name} ({shown}) must be a finite number above 0; gpt-oss has {usual}")
        return found

    def forward(self, pre_RP: Tensor) -> Tensor:
        """Return the hidden units (R, H), in a way that autograd can differentiate."""
        if self.name == "relu_squared":
            return F.relu(pre_RP).square()
        gate_RH, up_RH = pre_RP.chunk(2, dim=1)
        if self.name == "swiglu":
            return F.silu(gate_RH) * up_RH
        # Selected, because the gradient of torch's clamp at the limit itself depends on the version of torch, and in
        # bfloat16 a value at the limit is not rare.
        gate_RH = torch.where(gate_RH > self.limit, self.limit, gate_RH)
        up_RH = torch.where(up_RH.abs() > self.limit, self.limit * up_RH.detach().sign(), up_RH)
        return gate_RH * torch.sigmoid(self.alpha * gate_RH) * (up_RH + 1)

    def forward_and_kept(self, pre_RP: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden units (R, H), in memory of their own, and a factor of them that ``backward`` wants."""
        if self.name == "relu_squared":
            relu_RH = F.relu(pre_RP)
            return relu_RH.square(), relu_RH
        gate_RH, up_RH = pre_RP.chunk(2, dim=1)
        if self.name == "swiglu":
            silu_RH = F.silu(gate_RH)
            return silu_RH * up_RH, silu_RH
        gate_RH = gate_RH.clamp(max=self.limit)
        glu_RH = torch.sigmoid(self.alpha * gate_RH).mul_(gate_RH)
        return up_RH.clamp(-self.limit, self.limit).add_(1).mul_(glu_RH), glu_RH

    def backward(self, grad_RH: Tensor, pre_RP: Tensor, kept_RH: Tensor) -> Tensor:
        """Return the gradient of the pre-activation, for the gradient of the hidden units and what was kept."""
        if self.name == "relu_squared":
            return (2 * grad_RH).mul_(kept_RH)
        gate_RH, up_RH = pre_RP.chunk(2, dim=1)
        grad_pre_RP = torch.empty_like(pre_RP)
        grad_gate_RH, grad_up_RH = grad_pre_RP.chunk(2, dim=1)
        if self.name == "swiglu":
            torch.mul(grad_RH, up_RH, out=grad_gate_RH)
            torch.ops.aten.silu_backward(grad_gate_RH, gate_RH, grad_input=grad_gate_RH)
            torch.mul(grad_RH, kept_RH, out=grad_up_RH)
            return grad_pre_RP
        clamped_RH = gate_RH.clamp(max=self.limit)
        sigmoid_RH = torch.sigmoid(self.alpha * clamped_RH)
        slope_RH = (1 - sigmoid_RH).mul_(clamped_RH).mul_(self.alpha).add_(1).mul_(sigmoid_RH)
        torch.mul(grad_RH, up_RH.clamp(-self.limit, self.limit).add_(1), out=grad_gate_RH)
        grad_gate_RH.mul_(slope_RH).masked_fill_(gate_RH > self.limit, 0)
        torch.mul(grad_RH, kept_RH, out=grad_up_RH)
        grad_up_RH.masked_fill_(up_RH.abs() > self.limit, 0)
        return grad_pre_RP
