"""Rows to and from the buffers of peers: put, clear the padding, get.

A buffer has C rows on every rank. `put_rows` reads each token once and writes it to all its places; `get_rows` is its
transpose. Nothing here signals or waits: the caller makes sure that peers have written before it reads.

`reference.py` is plain torch over views of the peers' memory, `triton_kernels.py` needs only a table of their
addresses; both give the same bits. This file checks the arguments and picks.
"""

import torch
from torch import Tensor

from coterie_parallel.dispatch.rowwise.backends import takes_triton
from coterie_parallel.dispatch.rowwise.peers.base import PeerTensor
from coterie_parallel.dispatch.rowwise.placement.reference import RowPlan
from coterie_parallel.dispatch.rowwise.rows import reference

__all__ = ["clear_padding", "get_rows", "get_values", "put_rows"]

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def put_rows(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: RowPlan,
    rows: PeerTensor,
    row_weights: PeerTensor | None,
    *,
    backend: str = "auto",
) -> None:
    """Write the row of each routed pair to its place in the buffer of the rank that owns its expert.

    Pairs that are not routed, and rows at or past the end of the buffer, are left out. Bits are copied.

    Args:
        x_TD: rows of this rank's tokens, any dtype of 1, 2, 4 or 8 bytes.
        weights_TK: fp32, or None.
        plan: where the rows go.
        rows: (C, D) on every rank, dtype of the tokens.
        row_weights: fp32 (C) on every rank, None if and only if ``weights_TK`` is.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: If an argument does not fit or the back-end cannot run.
    """
    num_tokens = plan.row_TK.shape[0]
    local_CD = rows.local
    if x_TD.ndim != 2 or local_CD.ndim != 2 or x_TD.shape != (num_tokens, local_CD.shape[1]):
        raise ValueError(
            f"x_TD of shape {tuple(x_TD.shape)} does not fit a plan for {num_tokens} tokens and a buffer of shape "
            f"{tuple(local_CD.shape)}"
        )
    _check_contiguous("rows", rows)
    if x_TD.dtype != local_CD.dtype or x_TD.element_size() not in (1, 2, 4, 8):
        raise ValueError(
            f"x_TD must have the dtype of the buffer, {local_CD.dtype}, and elements of 1, 2, 4 or 8 bytes; "
            f"got {x_TD.dtype}"
        )
    if (weights_TK is None) != (row_weights is None):
        raise ValueError("weights_TK and row_weights must be given together, or neither")
    if weights_TK is not None and row_weights is not None:
        if weights_TK.shape != plan.row_TK.shape or weights_TK.dtype != torch.float32:
            raise ValueError(
                f"weights_TK must be float32 of shape {tuple(plan.row_TK.shape)}, got {weights_TK.dtype} of shape "
                f"{tuple(weights_TK.shape)}"
            )
        _check_values("row_weights", row_weights)
        if row_weights.local.shape[0] != local_CD.shape[0]:
            raise ValueError(f"row_weights ({row_weights.local.shape[0]}) and rows ({local_CD.shape[0]}) must agree")
        _check_device(plan, weights_TK, row_weights.local)
    _check_device(plan, x_TD, local_CD)
    triton = takes_triton(backend, x_TD.device)
    x_TD = x_TD.contiguous()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    if triton:
        from coterie_parallel.dispatch.rowwise.rows import triton_kernels

        with torch.cuda.device_of(x_TD):  # type: ignore[no-untyped-call]  # where Triton launches
            triton_kernels.put_rows(x_TD, weights_TK, plan, rows, row_weights)
    else:
        reference.put_rows(x_TD, weights_TK, plan, rows, row_weights)


def clear_padding(
    rows_CD: Tensor, row_weights_C: Tensor | None, offsets_e: Tensor, total_e: Tensor, *, backend: str = "auto"
) -> None:
    """Zero the padding rows inside the segments of this rank's own buffer, and their weights.

    Rows past the last end, and rows that hold a pair, are not written. With an alignment of 1 there is no padding.

    Args:
        rows_CD: contiguous, any dtype of 1, 2, 4 or 8 bytes.
        row_weights_C: fp32, or None.
        offsets_e: int32, inclusive ends of the segments; they may lie past C.
        total_e: int64, rows of each segment that hold a pair.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: If an argument does not fit or the back-end cannot run.
    """
    if rows_CD.ndim != 2 or not rows_CD.is_contiguous() or rows_CD.element_size() not in (1, 2, 4, 8):
        raise ValueError(
            f"rows_CD must be a contiguous matrix with elements of 1, 2, 4 or 8 bytes, got {rows_CD.dtype} of shape "
            f"{tuple(rows_CD.shape)} and strides {rows_CD.stride()}"
        )
    if row_weights_C is not None and (
        row_weights_C.shape != rows_CD.shape[:1]
        or row_weights_C.dtype != torch.float32
        or not row_weights_C.is_contiguous()
    ):
        raise ValueError(
            f"row_weights_C must be contiguous float32 of shape ({rows_CD.shape[0]},), got {row_weights_C.dtype} of "
            f"shape {tuple(row_weights_C.shape)}"
        )
    if offsets_e.ndim != 1 or offsets_e.dtype != torch.int32 or offsets_e.shape != total_e.shape:
        raise ValueError(f"offsets_e must be int32 with one value for each expert, got {offsets_e.dtype}")
    if total_e.dtype != torch.int64:
        raise ValueError(f"total_e must be int64, got {total_e.dtype}")
    if takes_triton(backend, rows_CD.device):
        from coterie_parallel.dispatch.rowwise.rows import triton_kernels

        with torch.cuda.device_of(rows_CD):  # type: ignore[no-untyped-call]  # where Triton launches
            triton_kernels.clear_padding(rows_CD, row_weights_C, offsets_e, total_e)
    else:
        reference.clear_padding(rows_CD, row_weights_C, offsets_e, total_e)


def get_rows(rows: PeerTensor, plan: RowPlan, *, backend: str = "auto") -> Tensor:
    """Return y_TD: for each token the sum, from +0 in fp32 in k order, of its rows in the buffers of the peers.

    Pairs that are not routed, and rows at or past the end of the buffer, add nothing. Rows in fp64 are summed in fp64.
    The result has the dtype of the rows.

    Args:
        rows: (C, D) on every rank; fp16, bf16, fp32 or fp64.
        plan: where the rows are.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: If an argument does not fit or the back-end cannot run.
    """
    if rows.local.ndim != 2 or rows.local.dtype not in _SUMMED:
        raise ValueError(
            f"rows must be a matrix of {', '.join(map(str, _SUMMED))}, got {rows.local.dtype} of shape "
            f"{tuple(rows.local.shape)}"
        )
    _check_contiguous("rows", rows)
    _check_device(plan, rows.local)
    if takes_triton(backend, rows.local.device):
        from coterie_parallel.dispatch.rowwise.rows import triton_kernels

        with torch.cuda.device_of(rows.local):  # type: ignore[no-untyped-call]  # where Triton launches
            return triton_kernels.get_rows(rows, plan)
    return reference.get_rows(rows, plan)


def get_values(values: PeerTensor, plan: RowPlan, *, backend: str = "auto") -> Tensor:
    """Return the value (T, K) fp32 of each pair's row, 0 where the pair is not routed or its row is past the end.

    Args:
        values: fp32 (C) on every rank.
        plan: where the rows are.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: If an argument does not fit or the back-end cannot run.
    """
    _check_values("values", values)
    _check_device(plan, values.local)
    if takes_triton(backend, values.local.device):
        from coterie_parallel.dispatch.rowwise.rows import triton_kernels

        with torch.cuda.device_of(values.local):  # type: ignore[no-untyped-call]  # where Triton launches
            return triton_kernels.get_values(values, plan)
    return reference.get_values(values, plan)


def _check_values(name: str, values: PeerTensor) -> None:
    if values.local.ndim != 1 or values.local.dtype != torch.float32:
        raise ValueError(
            f"{name} must be float32 with one value for each row, got {values.local.dtype} of shape "
            f"{tuple(values.local.shape)}"
        )
    _check_contiguous(name, values)


def _check_contiguous(name: str, tensor: PeerTensor) -> None:
    # Peers know the base address and nothing about strides.
    if not tensor.local.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.local.stride()}")


def _check_device(plan: RowPlan, *tensors: Tensor) -> None:
    devices = {plan.row_TK.device, *(tensor.device for tensor in tensors)}
    if len(devices) > 1:
        raise ValueError(f"the plan and all tensors must be on one device, got {', '.join(map(str, devices))}")
