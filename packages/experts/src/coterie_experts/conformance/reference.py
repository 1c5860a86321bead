"""The contract of the experts as a loop over experts in plain torch, written without the package's own back-ends."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie_experts.activation import Activation

__all__ = ["plain_experts"]


def plain_experts(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    counts: Sequence[int],
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return weight * expert(row) for rows in expert order, zero for rows past the last; differentiable.

    In float64 it is the ground truth; in the working dtype its error is the measure of what rounding costs.
    """
    outputs = []
    start = 0
    for expert, count in enumerate(counts):
        x_RD, weights_R1 = rows_RD[start : start + count], row_weights_R[start : start + count, None]
        pre_RP = x_RD @ up[expert].T
        pre_RP = pre_RP.to(torch.promote_types(pre_RP.dtype, torch.float32))
        if up_bias is not None:
            pre_RP = pre_RP + up_bias[expert]
        hidden_RH = _hidden(pre_RP, activation) * weights_R1
        y_RD = hidden_RH.to(rows_RD.dtype) @ down[expert].T
        if down_bias is not None:
            y_RD = (y_RD + weights_R1 * down_bias[expert]).to(rows_RD.dtype)
        outputs.append(y_RD)
        start += count
    outputs.append(torch.zeros_like(rows_RD[start:]))
    return torch.cat(outputs)


def _hidden(pre_RP: Tensor, activation: Activation) -> Tensor:
    if activation.name == "relu_squared":
        return torch.where(pre_RP > 0, pre_RP * pre_RP, 0)
    half = pre_RP.shape[1] // 2
    gate_RH, up_RH = pre_RP[:, :half], pre_RP[:, half:]
    if activation.name == "swiglu":
        return gate_RH * torch.sigmoid(gate_RH) * up_RH
    gate_RH = torch.where(gate_RH > activation.limit, activation.limit, gate_RH)
    up_RH = torch.where(up_RH > activation.limit, activation.limit, up_RH)
    up_RH = torch.where(up_RH < -activation.limit, -activation.limit, up_RH)
    return gate_RH * torch.sigmoid(activation.alpha * gate_RH) * (up_RH + 1)
