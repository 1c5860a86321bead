"""Experts on ``torch.nn.functional.grouped_mm``: six grouped products, no host synchronisation on a GPU.

What ``grouped_mm`` needs (torch 2.14.1, CPU): float32, bfloat16 or float16; int32 offsets; the slow stride of each
operand a multiple of 16 bytes; no expanded strides (a gradient of ``sum()`` has them). It gives: a weight gradient of
an empty group that is zero; rows past the last offset are not read, and their output is memory that nobody wrote.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["grouped_swiglu", "obstacle"]


def obstacle(*, d_model: int, d_hidden: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why this back-end cannot run, with what would work, or None if it can."""
    allowed = {"cpu": (torch.float32,), "cuda": (torch.bfloat16,)}
    if device.type != "meta":
        if device.type not in allowed:
            return f"device {device.type} is not one of {', '.join(allowed)}"
        if dtype not in allowed[device.type]:
            return f"it runs {allowed[device.type][0]} on {device.type}, not {dtype}"
        # Other dtypes and other GPUs take a loop inside torch that reads the offsets on the host.
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
            return f"it needs compute capability 9 or 10, which {torch.cuda.get_device_name(device)} has not"
    multiple = 16 // dtype.itemsize
    wrong = [f"{name} ({size})" for name, size in (("d_model", d_model), ("d_hidden", d_hidden)) if size % multiple]
    if wrong:
        return f"{' and '.join(wrong)} must be a multiple of {multiple} for {dtype} (rows of 16 bytes)"
    return None


def grouped_swiglu(rows_RD: Tensor, row_weights_R: Tensor, offsets_e: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run all experts in grouped products; see ``coterie_experts.grouped_swiglu`` for the contract.

    Keeps the rows, the pre-activation (R, 2H) and the row weights for the backward pass, which computes the activation
    again. Can be differentiated once.
    """
    y_RD: Tensor = _GroupedSwiGLU.apply(rows_RD, row_weights_R, offsets_e, gate_up, down)
    return y_RD


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_R: Tensor, offsets_e: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        rows_RD = _row_major(rows_RD)
        pre_R2H = F.grouped_mm(rows_RD, gate_up.mT, offs=offsets_e)
        gate_RH, up_RH = _in_float32(pre_R2H).chunk(2, dim=1)
        activation_RH = F.silu(gate_RH).mul_(up_RH).mul_(weights_R[:, None])
        _clear_rows(activation_RH, _zero_weight_rows(weights_R))
        y_RD = F.grouped_mm(activation_RH.to(rows_RD.dtype), down.mT, offs=offsets_e)
        _clear_rows(y_RD, _rows_past_the_end(rows_RD, offsets_e))
        ctx.save_for_backward(rows_RD, weights_R, offsets_e, gate_up, down, pre_R2H)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_R, offsets_e, gate_up, down, pre_R2H = ctx.saved_tensors
        needs_rows, needs_weights, _, needs_gate_up, needs_down = ctx.needs_input_grad
        zero_weight_R = _zero_weight_rows(weights_R)
        past_end_R = _rows_past_the_end(rows_RD, offsets_e)
        grad_y_RD = _row_major(grad_y_RD)

        gate_RH, up_RH = _in_float32(pre_R2H).chunk(2, dim=1)
        silu_RH = F.silu(gate_RH)
        activation_RH = silu_RH * up_RH
        grad_weighted_RH = _in_float32(F.grouped_mm(grad_y_RD, down, offs=offsets_e))

        grad_weights_R = grad_down = grad_rows_RD = grad_gate_up = None
        if needs_weights:
            grad_weights_R = torch.linalg.vecdot(grad_weighted_RH, activation_RH)
            _clear_rows(grad_weights_R, past_end_R)
            if zero_weight_R is not None:
                grad_weights_R.masked_fill_(zero_weight_R & ~grad_weights_R.isfinite(), 0)
        if needs_down:
            weighted_RH = activation_RH.mul_(weights_R[:, None])
            _clear_rows(weighted_RH, zero_weight_R)
            grad_down = _weight_gradient(
                _without_rows(grad_y_RD, zero_weight_R), weighted_RH.to(rows_RD.dtype), offsets_e
            )
        if needs_rows or needs_gate_up:
            grad_activation_RH = grad_weighted_RH.mul_(weights_R[:, None])
            grad_pre_R2H = torch.empty_like(pre_R2H, dtype=torch.float32)
            grad_gate_RH, grad_up_RH = grad_pre_R2H.chunk(2, dim=1)
            torch.mul(grad_activation_RH, up_RH, out=grad_gate_RH)
            torch.ops.aten.silu_backward(grad_gate_RH, gate_RH, grad_input=grad_gate_RH)
            torch.mul(grad_activation_RH, silu_RH, out=grad_up_RH)
            _clear_rows(grad_pre_R2H, zero_weight_R)
            grad_pre_R2H = grad_pre_R2H.to(pre_R2H.dtype)
            if needs_rows:
                grad_rows_RD = F.grouped_mm(grad_pre_R2H, gate_up, offs=offsets_e)
                _clear_rows(grad_rows_RD, past_end_R)
            if needs_gate_up:
                grad_gate_up = _weight_gradient(grad_pre_R2H, _without_rows(rows_RD, zero_weight_R), offsets_e)
        return grad_rows_RD, grad_weights_R, None, grad_gate_up, grad_down


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


def _row_major(tensor_RD: Tensor) -> Tensor:
    # `contiguous` lets a stride of zero pass where there are no rows or one; grouped_mm does not.
    if tensor_RD.stride() == (tensor_RD.shape[1], 1):
        return tensor_RD
    return tensor_RD.clone(memory_format=torch.contiguous_format)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32)
