"""Experts on ``torch.nn.functional.grouped_mm``: grouped products, no host synchronisation on a GPU.

What ``grouped_mm`` needs (torch 2.14.1): float32, bfloat16 or float16 on a CPU, bfloat16 on a GPU; int32 offsets;
operands that begin at a multiple of 16 bytes, their slow strides such multiples too, without gaps between experts; no
expanded strides (a gradient of ``sum()`` has them). It gives: a weight gradient of an empty group that is zero; rows
past the last offset are not read, and their output is memory that nobody wrote.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.deferred import Deferral, Gradients
from coterie_experts.grouped_swiglu.requirements import capability_obstacle, in_one_sentence, whole, width_obstacle
from coterie_experts.once import needed_inputs, refuse_create_graph

__all__ = ["grouped_experts", "obstacle"]


def obstacle(*, d_model: int, d_hidden: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why this back-end cannot run, with what would work, or None if it can."""
    return in_one_sentence(
        *_device_obstacles(dtype, device), width_obstacle(d_model=d_model, d_hidden=d_hidden, dtype=dtype)
    )


def _device_obstacles(dtype: torch.dtype, device: torch.device) -> list[str | None]:
    if device.type == "meta":
        return []
    allowed = {"cpu": torch.float32, "cuda": torch.bfloat16}
    if device.type not in allowed:
        return [f"device {device.type} is not one of {', '.join(allowed)}"]
    # Other dtypes and other GPUs take a loop inside torch that reads the offsets on the host.
    found = [capability_obstacle(device, 9, 10) if device.type == "cuda" else None]
    if dtype != allowed[device.type]:
        found.append(f"it runs {allowed[device.type]} on {device.type}, not {dtype}")
    return found


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
    deferral: Deferral | None = None,
) -> Tensor:
    """Run all experts in grouped products; see ``coterie_experts.grouped_experts`` for the contract.

    Keeps the rows, the product with ``up`` and the row weights for the backward pass, which computes the activation
    again. Can be differentiated once.
    """
    y_RD: Tensor = _GroupedExperts.apply(
        rows_RD, row_weights_R, offsets_e, up, down, up_bias, down_bias, activation, deferral
    )
    return y_RD


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_R: Tensor,
        offsets_e: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: Activation,
        deferral: Deferral | None,
    ) -> Tensor:
        rows_RD, up, down = whole(rows_RD), whole(up), whole(down)
        product_RP = F.grouped_mm(rows_RD, up.mT, offs=offsets_e)
        activation_RH, _ = activation.forward_and_kept(_add_bias(_in_float32(product_RP), up_bias, offsets_e))
        activation_RH.mul_(weights_R[:, None])
        _clear_rows(activation_RH, _zero_weight_rows(weights_R))
        y_RD = F.grouped_mm(activation_RH.to(rows_RD.dtype), down.mT, offs=offsets_e)
        if down_bias is not None:
            y_RD = _add_bias(_in_float32(y_RD), down_bias, offsets_e, weights_R).to(y_RD.dtype)
        _clear_rows(y_RD, _rows_past_the_end(rows_RD, offsets_e))
        ctx.save_for_backward(rows_RD, weights_R, offsets_e, up, down, up_bias, down_bias, product_RP)
        ctx.activation, ctx.deferral = activation, deferral
        return y_RD

    @staticmethod
    def backward(ctx: Any, grad_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        rows_RD, weights_R, offsets_e, up, down, up_bias, down_bias, product_RP = ctx.saved_tensors
        needs_rows, needs_weights, _, *needs = needed_inputs(ctx)[:7]
        needs_up, needs_down, needs_up_bias, _ = needs
        zero_weight_R = _zero_weight_rows(weights_R)
        past_end_R = _rows_past_the_end(rows_RD, offsets_e)
        grad_y_RD = whole(grad_y_RD)

        pre_RP = _add_bias(_in_float32(product_RP), up_bias, offsets_e)
        activation_RH, kept_RH = ctx.activation.forward_and_kept(pre_RP)
        grad_weighted_RH = _in_float32(F.grouped_mm(grad_y_RD, down, offs=offsets_e))

        grad_weights_R = grad_rows_RD = weighted_RH = grad_pre_RP = None
        if needs_weights:
            grad_weights_R = torch.linalg.vecdot(grad_weighted_RH, activation_RH)
            if down_bias is not None:
                bias_RD = _by_row(down_bias, offsets_e, rows_RD.shape[0]).to(torch.float32)
                grad_weights_R += torch.linalg.vecdot(_in_float32(grad_y_RD), bias_RD)
            _clear_rows(grad_weights_R, past_end_R)
            if zero_weight_R is not None:
                grad_weights_R.masked_fill_(zero_weight_R & ~grad_weights_R.isfinite(), 0)
        if needs_down:
            weighted_RH = activation_RH.mul_(weights_R[:, None])
            _clear_rows(weighted_RH, zero_weight_R)
            weighted_RH = weighted_RH.to(rows_RD.dtype)
        if needs_rows or needs_up or needs_up_bias:
            grad_activation_RH = grad_weighted_RH.mul_(weights_R[:, None])
            grad_pre_RP = ctx.activation.backward(grad_activation_RH, pre_RP, kept_RH)
            _clear_rows(grad_pre_RP, zero_weight_R)
            grad_pre_RP = grad_pre_RP.to(product_RP.dtype)
            if needs_rows:
                grad_rows_RD = F.grouped_mm(grad_pre_RP, up, offs=offsets_e)
                _clear_rows(grad_rows_RD, past_end_R)
        compute = partial(
            _weight_gradients, needs, rows_RD, weights_R, offsets_e, zero_weight_R, grad_y_RD, weighted_RH, grad_pre_RP
        )
        if ctx.deferral is None:
            grads = compute()
        else:
            ctx.deferral.hand_over(compute, (rows_RD, weights_R, offsets_e, grad_y_RD), needs)
            grads = (None,) * 4
        return grad_rows_RD, grad_weights_R, None, *grads, None, None


def _weight_gradients(
    needs: Sequence[bool],
    rows_RD: Tensor,
    weights_R: Tensor,
    offsets_e: Tensor,
    zero_weight_R: Tensor | None,
    grad_y_RD: Tensor,
    weighted_RH: Tensor | None,
    grad_pre_RP: Tensor | None,
) -> Gradients:
    """Return those of up, down, up_bias and down_bias that are needed."""
    needs_up, needs_down, needs_up_bias, needs_down_bias = needs
    grad_up = grad_down = grad_up_bias = grad_down_bias = None
    if needs_down or needs_down_bias:
        counted_RD = _without_rows(grad_y_RD, zero_weight_R)
        if weighted_RH is not None:
            grad_down = _weight_gradient(counted_RD, weighted_RH, offsets_e)
        if needs_down_bias:
            grad_down_bias = _bias_gradient(counted_RD, offsets_e, weights_R)
    if grad_pre_RP is not None:
        if needs_up:
            grad_up = _weight_gradient(grad_pre_RP, _without_rows(rows_RD, zero_weight_R), offsets_e)
        if needs_up_bias:
            grad_up_bias = _bias_gradient(grad_pre_RP, offsets_e, None)
    return grad_up, grad_down, grad_up_bias, grad_down_bias


def _by_row(bias_eN: Tensor, offsets_e: Tensor, num_rows: int) -> Tensor:
    """Return the bias of the expert of each row (R, N); rows past the end take one too, which nobody reads."""
    rows_R = torch.arange(num_rows, dtype=offsets_e.dtype, device=offsets_e.device)
    expert_R = torch.searchsorted(offsets_e, rows_R, right=True).clamp_(max=bias_eN.shape[0] - 1)
    return bias_eN.index_select(0, expert_R)


def _add_bias(rows_RN: Tensor, bias_eN: Tensor | None, offsets_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """Return float32 rows plus the bias of their expert, times the row weight where there is one."""
    if bias_eN is None:
        return rows_RN
    bias_RN = _by_row(bias_eN, offsets_e, rows_RN.shape[0])
    return rows_RN + (bias_RN if weights_R is None else bias_RN * weights_R[:, None])


def _bias_gradient(grad_RN: Tensor, offsets_e: Tensor, weights_R: Tensor | None) -> Tensor:
    """Return the sum of the rows of each expert, each times its row weight where there is one, (e, N).

    A grouped product with columns that are all alike, as many as its operands need to be 16 bytes wide: the only sum by
    segments that is deterministic, exact in float32 and free of a look at the offsets from the host.
    """
    num_columns = 16 // grad_RN.dtype.itemsize
    columns_RC = (
        torch.ones(grad_RN.shape[0], num_columns, dtype=grad_RN.dtype, device=grad_RN.device)
        if weights_R is None
        else weights_R.to(grad_RN.dtype)[:, None].expand(-1, num_columns).clone(memory_format=torch.contiguous_format)
    )
    return _weight_gradient(grad_RN, columns_RC, offsets_e)[:, :, 0]


def _weight_gradient(grad_out_RN: Tensor, in_RK: Tensor, offsets_e: Tensor) -> Tensor:
    grad_eNK = F.grouped_mm(grad_out_RN.T, in_RK, offs=offsets_e)
    # Some GPU kernels leave the gradient of an empty group unwritten (pytorch/pytorch#172439).
    starts_e = F.pad(offsets_e[:-1], (1, 0))
    _clear_rows(grad_eNK, _none_if_empty(offsets_e == starts_e))
    return grad_eNK


def _zero_weight_rows(weights_R: Tensor) -> Tensor | None:
    return _none_if_empty(weights_R == 0)


def _rows_past_the_end(rows_RD: Tensor, offsets_e: Tensor) -> Tensor | None:
    return _none_if_empty(torch.arange(rows_RD.shape[0], device=rows_RD.device) >= offsets_e[-1])


def _none_if_empty(mask: Tensor) -> Tensor | None:
    """Return None for a mask that selects nothing, but only on the CPU, where looking costs no synchronisation."""
    return None if mask.device.type == "cpu" and not mask.any() else mask


def _clear_rows(tensor: Tensor, mask: Tensor | None) -> None:
    """Write zeros in place where the mask over the first dimension is set."""
    if mask is not None:
        tensor.masked_fill_(mask.view(-1, *[1] * (tensor.dim() - 1)), 0)


def _without_rows(tensor_RD: Tensor, mask_R: Tensor | None) -> Tensor:
    return tensor_RD if mask_R is None else tensor_RD.masked_fill(mask_R[:, None], 0)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32)
