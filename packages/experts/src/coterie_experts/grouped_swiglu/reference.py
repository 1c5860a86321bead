"""Plain torch loop over the experts: the ground truth, for any floating dtype, differentiated by autograd."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from coterie_experts.activation import Activation

__all__ = ["grouped_experts", "weighted_rows"]


def grouped_experts(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Run the experts one after another; see ``coterie_experts.grouped_experts`` for the contract.

    Reads the offsets on the host. Element-wise mathematics is in the dtype of the row weights, at least float32.
    """
    outputs = []
    start = 0
    # Every expert takes part, with zero rows too, so that its gradient is zero and not None.
    for expert, (end, up_one, down_one) in enumerate(zip(offsets_e.tolist(), up.unbind(), down.unbind(), strict=True)):
        output = partial(
            _output,
            activation=activation,
            up=up_one,
            down=down_one,
            up_bias=None if up_bias is None else up_bias[expert],
            down_bias=None if down_bias is None else down_bias[expert],
        )
        outputs.append(weighted_rows(output, rows_RD[start:end], row_weights_R[start:end]))
        start = end
    outputs.append(rows_RD.new_zeros(rows_RD.shape[0] - start, rows_RD.shape[1]))
    return torch.cat(outputs)


def weighted_rows(output: Callable[[Tensor, Tensor], Tensor], rows_RD: Tensor, weights_R: Tensor) -> Tensor:
    """Return ``output(rows, weights)``, where rows of weight zero give zero, whatever they hold.

    Args:
        output: linear in the weights; a row of what it returns (R, D) depends on that row alone.
        rows_RD: of any floating dtype.
        weights_R: read on the host.
    """
    is_zero_R1 = (weights_R == 0)[:, None]
    # Selected, not multiplied: zero times NaN is NaN. The second selection keeps a NaN gradient out of `down`.
    y_RD = output(rows_RD.masked_fill(is_zero_R1, 0), weights_R).masked_fill(is_zero_R1, 0)
    if not is_zero_R1.any():
        return y_RD
    # A weight of zero still has a gradient: what the row would have given with weight one.
    with torch.no_grad():
        unit_RD = output(rows_RD, torch.ones_like(weights_R))
        is_used_R1 = is_zero_R1 & unit_RD.isfinite().all(dim=1, keepdim=True)
        unit_RD = unit_RD.masked_fill(~is_used_R1, 0)
    weights_R1 = torch.where(is_zero_R1, weights_R[:, None], 0)
    y_RD = y_RD + (weights_R1 * unit_RD).to(y_RD.dtype)
    if weights_R1.requires_grad:
        weights_R1.register_hook(_finite_or_zero)  # type: ignore[no-untyped-call]
        # All gradients come by here: that of a row depends on its weight too.
        y_RD.register_hook(_refuse_create_graph)  # type: ignore[no-untyped-call]
    return y_RD


def _output(
    rows_RD: Tensor,
    weights_R: Tensor,
    *,
    activation: Activation,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Return the rows of one expert; its weights have no first dimension."""
    pre_RP = rows_RD @ up.T
    pre_RP = pre_RP.to(torch.promote_types(pre_RP.dtype, torch.float32))
    if up_bias is not None:
        pre_RP = pre_RP + up_bias
    # The weight multiplies the activation, and so the product with `down`; the bias of `down` takes it too.
    y_RD = (activation.forward(pre_RP) * weights_R[:, None]).to(rows_RD.dtype) @ down.T
    if down_bias is not None:
        y_RD = (y_RD + weights_R[:, None] * down_bias).to(y_RD.dtype)
    return y_RD


def _finite_or_zero(grad_R1: Tensor | None) -> Tensor | None:
    # None is what autograd hands on where nothing came back.
    return None if grad_R1 is None else grad_R1.masked_fill(~grad_R1.isfinite(), 0)


def _refuse_create_graph(grad_RD: Tensor) -> None:
    # What a row of weight zero would have given with weight one is a constant here.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "rows of weight zero can be differentiated once, and create_graph=True is not supported, where the weights "
            "want a gradient"
        )
