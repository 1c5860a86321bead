"""Rows to experts and back: each token copied to its rows, and the rows of each token summed, with weights or without.

`reference.py` is plain torch and the ground truth; `triton_kernels.py` reads each input once and writes each output
once. This file checks the arguments, picks, and holds what autograd needs.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from coterie_routing.permutation import reference
from coterie_routing.row_map import RowMap, takes_triton

__all__ = ["permute", "unpermute"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def permute(x_TD: Tensor, row_map: RowMap, *, backend: str = "auto") -> Tensor:
    """Copy each token to the rows of its choices; rows past the last end are zero.

    The gradient of a token is the sum of the gradients of its rows in the order of its choices, in fp32 (fp64 for fp64
    tokens), rounded once. Both directions give the same bits in every run and for every back-end, and wait for no host.
    Can be differentiated once.

    Args:
        x_TD: Tokens, (T, D), bf16, fp16, fp32 or fp64 (fp64: reference only); D may be any width.
        row_map: Of the same T tokens, on the same device.
        backend: "reference", "triton", or "auto": the Triton kernels where they can run, else the reference.

    Returns:
        Rows of shape (N, D) and the dtype of the tokens, N = T*K.

    Raises:
        ValueError: If an argument does not fit, or the named back-end cannot run, with the reason.
    """
    _check_rows("tokens", "T", x_TD, row_map.row_TK.shape[0], row_map)
    with torch.cuda.device_of(x_TD):  # type: ignore[no-untyped-call]  # where Triton launches
        rows_ND: Tensor = _Permute.apply(x_TD, row_map, _operations(backend, x_TD))
    return rows_ND


def unpermute(rows_ND: Tensor, row_map: RowMap, weights_TK: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Sum the rows of each token, each times the weight of its choice.

    The sum runs in the order of the choices, in fp32 (fp64 for fp64 rows), each product and each sum rounded for
    itself, and the result is rounded to the dtype of the rows once: the same bits in every run and for every back-end.
    So are the gradients of the rows. The gradient of a weight, <row, gradient of its token>, is one fp32 sum over D
    (fp64 for fp64 rows), the same in every run; its order belongs to the back-end. A choice of id -1 adds nothing,
    whatever its weight, and gets a gradient of 0. Rows past the last end are not read, and have gradient 0. Waits for
    no host. Can be differentiated once.

    Args:
        rows_ND: Rows, (N, D), bf16, fp16, fp32 or fp64 (fp64: reference only); D may be any width.
        row_map: The map that made the rows, on the same device.
        weights_TK: fp32 (fp64 for fp64 rows); None for a plain sum.
        backend: As in `permute`.

    Returns:
        Tokens of shape (T, D) and the dtype of the rows.

    Raises:
        ValueError: If an argument does not fit, or the named back-end cannot run, with the reason.
    """
    _check_rows("rows", "N", rows_ND, row_map.slot_N.shape[0], row_map)
    if weights_TK is not None:
        dtype = torch.float64 if rows_ND.dtype == torch.float64 else torch.float32
        found = (weights_TK.shape, weights_TK.dtype, weights_TK.device)
        if found != (row_map.row_TK.shape, dtype, rows_ND.device):
            raise ValueError(
                f"expected weights of shape {tuple(row_map.row_TK.shape)}, {dtype} on {rows_ND.device}, "
                f"got {weights_TK.dtype} of shape {tuple(weights_TK.shape)} on {weights_TK.device}"
            )
    with torch.cuda.device_of(rows_ND):  # type: ignore[no-untyped-call]  # where Triton launches
        y_TD: Tensor = _Unpermute.apply(rows_ND, weights_TK, row_map, _operations(backend, rows_ND))
    return y_TD


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_map: RowMap, operations: ModuleType) -> Tensor:
        _save(ctx, row_map, operations)
        rows_ND: Tensor = operations.permute(x_TD, row_map)
        return rows_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative(grad_ND)
        return ctx.operations.unpermute(grad_ND, RowMap(*ctx.saved_tensors)), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, weights_TK: Tensor | None, row_map: RowMap, operations: ModuleType
    ) -> Tensor:
        # The rows are needed for the gradient of the weights alone.
        keeps_rows = ctx.needs_input_grad[1]
        _save(ctx, row_map, operations, weights_TK, rows_ND if keeps_rows else None)
        y_TD: Tensor = operations.unpermute(rows_ND, row_map, weights_TK)
        return y_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, weights_TK, rows_ND = ctx.saved_tensors
        _refuse_second_derivative(grad_TD, weights_TK, rows_ND)
        row_map = RowMap(*tensors)
        needs_rows, needs_weights, _, _ = ctx.needs_input_grad
        if needs_weights:
            grad_ND, grad_weights_TK = ctx.operations.unpermute_backward(grad_TD, rows_ND, row_map, weights_TK)
            return grad_ND if needs_rows else None, grad_weights_TK, None, None
        return ctx.operations.permute(grad_TD, row_map, weights_TK), None, None, None


def _refuse_second_derivative(*tensors: Tensor | None) -> None:
    """Raise where a graph of the gradient is asked for, in which these tensors would be constants.

    (`once_differentiable` of torch does not raise where `autograd.grad` finds another path to what it is asked for.)
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError("permute and unpermute can be differentiated once; create_graph=True is not supported")


def _save(ctx: Any, row_map: RowMap, operations: ModuleType, *others: Tensor | None) -> None:
    ctx.save_for_backward(row_map.counts_E, row_map.offsets_E, row_map.row_TK, row_map.slot_N, *others)
    ctx.operations = operations


def _operations(backend: str, rows: Tensor) -> ModuleType:
    if takes_triton(backend, rows.device, rows.dtype):
        from coterie_routing.permutation import triton_kernels

        return triton_kernels
    return reference


def _check_rows(name: str, letter: str, rows: Tensor, num_rows: int, row_map: RowMap) -> None:
    if rows.dim() != 2 or rows.shape[0] != num_rows or rows.dtype not in _DTYPES:
        raise ValueError(
            f"expected {name} of shape ({letter}, D) with {letter} = {num_rows} as in the row map, in bf16, fp16, fp32 "
            f"or fp64, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if rows.device != row_map.row_TK.device:
        raise ValueError(f"the {name} are on {rows.device} but the row map is on {row_map.row_TK.device}; move one")
