"""Plain torch loop over the experts: the ground truth, for any floating dtype, differentiated by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_swiglu"]


def grouped_swiglu(rows_RD: Tensor, row_weights_R: Tensor, offsets_e: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run the experts one after another; see ``coterie_experts.grouped_swiglu`` for the contract.

    Reads the offsets on the host. Element-wise mathematics is in the dtype of the row weights, at least float32.
    """
    outputs = []
    start = 0
    # Every expert takes part, with zero rows too, so that its gradient is zero and not None.
    for end, gate_up_one, down_one in zip(offsets_e.tolist(), gate_up.unbind(), down.unbind(), strict=True):
        outputs.append(_one_expert(rows_RD[start:end], row_weights_R[start:end], gate_up_one, down_one))
        start = end
    outputs.append(rows_RD.new_zeros(rows_RD.shape[0] - start, rows_RD.shape[1]))
    return torch.cat(outputs)


def _one_expert(rows_RD: Tensor, weights_R: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    is_zero_R1 = (weights_R == 0)[:, None]
    # Selected, not multiplied: zero times NaN is NaN. The second selection keeps a NaN gradient out of `down`.
    activation_RH = _activation(rows_RD.masked_fill(is_zero_R1, 0), gate_up) * weights_R[:, None]
    y_RD = (activation_RH.to(down.dtype) @ down.T).masked_fill(is_zero_R1, 0)
    if not is_zero_R1.any():
        return y_RD
    # A weight of zero still has a gradient: what the row would have given with weight one.
    with torch.no_grad():
        unit_RD = _activation(rows_RD, gate_up).to(down.dtype) @ down.T
        is_used_R1 = is_zero_R1 & unit_RD.isfinite().all(dim=1, keepdim=True)
        unit_RD = unit_RD.masked_fill(~is_used_R1, 0)
    return y_RD + (weights_R[:, None] * unit_RD).to(y_RD.dtype)


def _activation(rows_RD: Tensor, gate_up: Tensor) -> Tensor:
    pre_R2H = rows_RD @ gate_up.T
    gate_RH, up_RH = pre_R2H.to(torch.promote_types(pre_R2H.dtype, torch.float32)).chunk(2, dim=1)
    return F.silu(gate_RH) * up_RH
