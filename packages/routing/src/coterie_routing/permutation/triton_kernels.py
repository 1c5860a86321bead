"""Rows to experts and back in Triton: one program for each token, each input read once, each output written once.

Products and sums are rounded for themselves (no fused multiply-add) and sums run in the order of the choices, so these
kernels give the bits of the reference; only the sum over D in the gradient of a weight runs in another order. No two
programs write to one place.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie_routing.row_map import RowMap

__all__ = ["permute", "unpermute", "unpermute_backward"]

# Bytes of a row that a thread moves at a time: two accesses of 16 bytes.
_THREAD_BYTES = 32
# Elements of the tile (choices times columns) that a thread of the backward kernel holds.
_THREAD_ELEMENTS = 64
# Choices whose loads are in flight together.
_GROUP = 8
# Warps of a program: the fastest of those tried on an H200 (2, 4 and 8).
_PERMUTE_WARPS, _UNPERMUTE_WARPS, _BACKWARD_WARPS = 8, 4, 2


def permute(x_TD: Tensor, row_map: RowMap, weights_TK: Tensor | None = None) -> Tensor:
    """Copy each token to its rows, times the weight of the choice where there are weights; other rows are zero."""
    num_tokens, num_choices = row_map.row_TK.shape
    width = x_TD.shape[1]
    rows_ND = x_TD.new_empty(row_map.slot_N.numel(), width)
    if rows_ND.numel() > 0:
        _permute[(num_tokens,)](
            x_TD.contiguous(),
            None if weights_TK is None else weights_TK.contiguous(),
            row_map.row_TK.contiguous(),
            row_map.offsets_E,
            rows_ND,
            width,
            row_map.offsets_E.numel(),
            K=num_choices,
            GROUP=min(num_choices, _GROUP),
            BLOCK=_block(width, 32 * _PERMUTE_WARPS * _THREAD_BYTES // x_TD.element_size()),
            num_warps=_PERMUTE_WARPS,
            enable_fp_fusion=False,
        )
    return rows_ND


def unpermute(rows_ND: Tensor, row_map: RowMap, weights_TK: Tensor | None = None) -> Tensor:
    """Sum the rows of each token, each times its weight where there are weights."""
    num_tokens, num_choices = row_map.row_TK.shape
    width = rows_ND.shape[1]
    if rows_ND.numel() == 0:
        return rows_ND.new_zeros(num_tokens, width)
    y_TD = rows_ND.new_empty(num_tokens, width)
    _unpermute[(num_tokens,)](
        rows_ND.contiguous(),
        None if weights_TK is None else weights_TK.contiguous(),
        row_map.row_TK.contiguous(),
        y_TD,
        width,
        K=num_choices,
        GROUP=min(num_choices, _GROUP),
        BLOCK=_block(width, 32 * _UNPERMUTE_WARPS * _THREAD_BYTES // rows_ND.element_size()),
        num_warps=_UNPERMUTE_WARPS,
        enable_fp_fusion=False,
    )
    return y_TD


def unpermute_backward(grad_TD: Tensor, rows_ND: Tensor, row_map: RowMap, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weights of a weighted `unpermute`."""
    num_tokens, num_choices = row_map.row_TK.shape
    width = rows_ND.shape[1]
    grad_rows_ND = torch.empty_like(rows_ND, memory_format=torch.contiguous_format)
    if rows_ND.numel() == 0:
        return grad_rows_ND, torch.zeros_like(weights_TK)
    grad_weights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    padded = triton.next_power_of_2(num_choices)
    _unpermute_backward[(num_tokens,)](
        grad_TD.contiguous(),
        rows_ND.contiguous(),
        weights_TK.contiguous(),
        row_map.row_TK.contiguous(),
        row_map.offsets_E,
        grad_rows_ND,
        grad_weights_TK,
        width,
        row_map.offsets_E.numel(),
        K=num_choices,
        PADDED=padded,
        BLOCK=_block(width, max(32 * _BACKWARD_WARPS * _THREAD_ELEMENTS // padded, 16)),
        num_warps=_BACKWARD_WARPS,
        enable_fp_fusion=False,
    )
    return grad_rows_ND, grad_weights_TK


def _block(width: int, most: int) -> int:
    """Return the power of two, `most` or half of it, that covers the width with less waste; less for a small width."""
    wasted = {block: -width % block for block in (most, most // 2)}
    return min(int(triton.next_power_of_2(width)), min(wasted, key=wasted.__getitem__))


@triton.jit
def _address(row, width, column):
    """Return the offset of an element as int64: rows times width passes 2^31 in models of today."""
    return row.to(tl.int64) * width + column


@triton.jit
def _mask_of_all(is_true, like):
    """Return a mask in the shape of `like`, all of it `is_true`, which is a number.

    For the compiler the number would do. In Triton's interpreter it becomes integers, also when it is combined with a
    tensor, and as of Triton 3.9 these are refused as a mask.
    """
    return tl.where(is_true, tl.full(like.shape, True, tl.int1), False)


@triton.jit
def _clear_rows_past_the_end(token, offsets_ptr, rows_ptr, width, num_experts, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to those of the token's K rows [token*K, token*K + K) that no choice is in."""
    num_rows = tl.load(offsets_ptr + num_experts - 1)
    if token * K + K > num_rows:
        for choice in range(0, K):
            row = token * K + choice
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), rows_ptr.dtype.element_ty)
                mask = (columns < width) & _mask_of_all(row >= num_rows, columns)
                tl.store(rows_ptr + _address(row, width, columns), zeros, mask=mask)


@triton.jit(do_not_specialize=["num_experts"])
def _permute(
    x_ptr,
    weights_ptr,
    row_ptr,
    offsets_ptr,
    rows_ptr,
    width,
    num_experts,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(x_ptr + _address(token, width, columns), mask=inside)
        for first in range(0, K, GROUP):
            for offset in tl.static_range(GROUP):
                choice = first + offset
                row = tl.load(row_ptr + token * K + choice, mask=choice < K, other=-1)
                value = x
                if weights_ptr is not None:
                    weight = tl.load(weights_ptr + token * K + choice, mask=choice < K)
                    value = (x.to(tl.float32) * weight).to(x.dtype)
                # The rows do not fit in the cache: written out early, they leave it to the tokens (1.5 % faster).
                tl.store(
                    rows_ptr + _address(row, width, columns),
                    value,
                    mask=inside & _mask_of_all(row >= 0, inside),
                    eviction_policy="evict_first",
                )
    _clear_rows_past_the_end(token, offsets_ptr, rows_ptr, width, num_experts, K, BLOCK)


@triton.jit
def _unpermute(rows_ptr, weights_ptr, row_ptr, y_ptr, width, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, K, GROUP):
            for offset in tl.static_range(GROUP):
                choice = first + offset
                row = tl.load(row_ptr + token * K + choice, mask=choice < K, other=-1)
                is_here = inside & _mask_of_all(row >= 0, inside)
                value = tl.load(rows_ptr + _address(row, width, columns), mask=is_here, other=0)
                term = value.to(tl.float32)
                if weights_ptr is not None:
                    # Masked, since the weight of a choice that is not routed may be NaN.
                    term *= tl.load(weights_ptr + token * K + choice, mask=row >= 0, other=0)
                total += term
        tl.store(y_ptr + _address(token, width, columns), total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def _unpermute_backward(
    grad_ptr,
    rows_ptr,
    weights_ptr,
    row_ptr,
    offsets_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    width,
    num_experts,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    choices = tl.arange(0, PADDED)
    row = tl.load(row_ptr + token * K + choices, mask=choices < K, other=-1)
    is_routed = row >= 0
    weights = tl.load(weights_ptr + token * K + choices, mask=is_routed, other=0)
    products = tl.zeros((PADDED,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        grad = tl.load(grad_ptr + _address(token, width, columns), mask=inside, other=0).to(tl.float32)
        places = _address(row[:, None], width, columns[None, :])
        mask = is_routed[:, None] & inside[None, :]
        values = tl.load(rows_ptr + places, mask=mask, other=0).to(tl.float32)
        products += tl.sum(values * grad[None, :], 1)
        grad_rows = grad[None, :] * weights[:, None]
        tl.store(grad_rows_ptr + places, grad_rows.to(grad_rows_ptr.dtype.element_ty), mask=mask)
    # Not the product for a choice that is not routed: 0 times a gradient that is infinite would be NaN.
    tl.store(grad_weights_ptr + token * K + choices, tl.where(is_routed, products, 0.0), mask=choices < K)
    _clear_rows_past_the_end(token, offsets_ptr, grad_rows_ptr, width, num_experts, K, BLOCK)
