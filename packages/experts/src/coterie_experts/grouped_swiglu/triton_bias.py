"""Gradients of the biases, kernels and launches: sums of columns over the rows of an expert, in two fixed steps.

First the rows of each row tile, which has one expert, then the row tiles of each expert; all in float32, with no
atomics, so that the same rows give the same bits. Shapes are in padded rows P, see ``triton_layout.py``.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie_experts.grouped_swiglu.triton_forward import bias_of_columns, gathered_rows
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout

__all__ = ["bias_gradient", "bias_sums_and_dots", "column_sums", "sums_of_experts", "sums_of_tiles"]


def bias_sums_and_dots(grad_y_SD: Tensor, bias: Tensor, layout: PaddedLayout, block: int) -> tuple[Tensor, Tensor]:
    """Return, for the bias of ``down`` (e, D), its gradient by row tile (M, D) and what it adds to the row weights'.

    The latter are the dot products of the output's gradient and the bias, (P, column tiles), to be added up by row.
    """
    num_column_tiles = triton.cdiv(grad_y_SD.shape[1], _columns_of_tile(grad_y_SD))
    dots_P = torch.empty(layout.num_padded, num_column_tiles, dtype=torch.float32, device=grad_y_SD.device)
    return _sums_of_tiles(grad_y_SD, layout, block, bias, dots_P), dots_P


def column_sums(rows_PU: Tensor, layout: PaddedLayout, block: int) -> Tensor:
    """Return the sums of the columns of each row tile, (M, U), float32."""
    return _sums_of_tiles(rows_PU, layout, block, None, None)


def _columns_of_tile(rows: Tensor) -> int:
    # Under the interpreter so few that a test has several tiles, with a remainder.
    return 128 if rows.device.type != "cpu" else 32


def _sums_of_tiles(
    rows: Tensor, layout: PaddedLayout, block: int, bias: Tensor | None, dots_P: Tensor | None
) -> Tensor:
    width, num_tiles = rows.shape[1], layout.expert_M.shape[0]
    columns = _columns_of_tile(rows)
    sums_MU = torch.empty(num_tiles, width, dtype=torch.float32, device=rows.device)
    source, weight, expert = (None,) * 3 if bias is None else (layout.source_P, layout.weight_P, layout.expert_M)
    sums_of_tiles[(num_tiles, triton.cdiv(width, columns))](
        rows,
        rows.stride(0),
        source,
        weight,
        expert,
        layout.num_tiles_1,
        bias,
        sums_MU,
        dots_P,
        width,
        ROWS=block,
        COLUMNS=columns,
        EVEN=width % columns == 0,
        enable_fp_fusion=True,
    )
    return sums_MU


def bias_gradient(
    sums_MU: Tensor, layout: PaddedLayout, block: int, *, dtype: torch.dtype, main_grad: Tensor | None
) -> Tensor | None:
    """Return the sums over the row tiles of each expert (e, U) in this dtype, or add them to ``main_grad``."""
    num_experts, width = layout.segments_e3.shape[0], sums_MU.shape[1]
    out = sums_MU.new_empty(num_experts, width, dtype=dtype) if main_grad is None else main_grad
    columns = min(128, triton.next_power_of_2(width))
    sums_of_experts[(num_experts, triton.cdiv(width, columns))](
        sums_MU,
        layout.segments_e3,
        out,
        width,
        ROWS=block,
        TILES=16 if sums_MU.device.type != "cpu" else 2,
        COLUMNS=columns,
        ACCUMULATE=main_grad is not None,
    )
    return out if main_grad is None else None


@triton.jit
def sums_of_tiles(
    rows_ptr,
    stride,
    source_ptr,
    weight_ptr,
    expert_ptr,
    num_tiles_ptr,
    bias_ptr,
    sums_ptr,
    dots_ptr,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store the column sums of the padded rows of each row tile, (row tiles, width).

    With a ``source`` the rows are those it takes, each times its row weight (one of weight zero counts for nothing,
    whatever it holds), and the dot product of each with the bias (e, width) of its expert, column tile by column tile,
    goes to ``dots`` (P, column tiles). Without one (None, as the weights, the bias and the dots are then) the rows lie
    in padded rows, and padding holds zeros.
    """
    row_tile = tl.program_id(0)
    column_tile = tl.program_id(1)
    if row_tile < tl.load(num_tiles_ptr):
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        if source_ptr is None:
            values = gathered_rows(rows_ptr, stride, rows, columns, width, EVEN).to(tl.float32)
        else:
            source = tl.load(source_ptr + rows)
            values = gathered_rows(rows_ptr, stride, source, columns, width, EVEN).to(tl.float32)
            expert = tl.load(expert_ptr + row_tile)
            bias = bias_of_columns(bias_ptr + expert.to(tl.int64) * width, columns, width)
            dots = tl.sum(values * bias, 1)
            tl.store(dots_ptr + rows.to(tl.int64) * tl.num_programs(1) + column_tile, dots)
            weight = tl.load(weight_ptr + rows)[:, None]
            # Selected, not multiplied: zero times NaN is NaN.
            values = tl.where(weight != 0, values * weight, 0.0)
        places = tl.cast(row_tile, tl.int64) * width + columns
        tl.store(sums_ptr + places, tl.sum(values, 0), mask=columns < width)


@triton.jit
def sums_of_experts(
    sums_ptr,
    segments_ptr,
    out_ptr,
    width,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Store the sums of the row tiles of each expert (e, width), or add them to what ``out`` holds.

    ``sums`` is (row tiles, width); ``TILES`` row tiles are added at a time. An expert without rows has zeros.
    """
    place = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    expert = tl.load(segments_ptr + 3 * place)
    first = tl.load(segments_ptr + 3 * place + 1) // ROWS
    end = first + tl.cdiv(tl.load(segments_ptr + 3 * place + 2), ROWS)
    total = tl.zeros((TILES, COLUMNS), dtype=tl.float32)
    for tile in range(first, end, TILES):
        tiles = tile + tl.arange(0, TILES)
        places = tiles.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(sums_ptr + places, mask=(tiles < end)[:, None] & inside[None, :], other=0.0)
    out_ptrs = out_ptr + expert.to(tl.int64) * width + columns
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=inside, other=0.0)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)
