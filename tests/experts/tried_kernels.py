"""Variants of the Triton kernels that `gpu_tries.py` times beside those of the package.

- `multiply_split`: rows times weights whose last, partly filled round of tiles is split along the reduction.
- `multiply_with_tails`: tiles that hold at most 64 rows of an expert multiply 64 rows; tiles drawn from a counter.
- `multiply_specialised_by_compiler`: `tl.range(warp_specialize=True)`, which triton 3.6 follows on Hopper where a
  program has 4 warps, both operands come by TMA and the results leave by pointers; elsewhere it says nothing, or fails.
- `weight_gradient_recomputed`: the weight gradient of down from the pre-activation in place of the stored activation.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from coterie_experts.grouped_swiglu import triton_launch as launch
from coterie_experts.grouped_swiglu.triton_activation import fast_sigmoid
from coterie_experts.grouped_swiglu.triton_backward import _segment, _store_gradient
from coterie_experts.grouped_swiglu.triton_forward import gathered_rows
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "half_tiles",
    "multiply_specialised_by_compiler",
    "multiply_split",
    "multiply_with_tails",
    "weight_gradient_recomputed",
]


@triton.jit
def _product(rows_desc, weights_desc, expert, row, column, first_step, end_step, TRANSPOSED: tl.constexpr):
    """Return a tile of rows times weights, summed over some of the steps, float32."""
    ROWS: tl.constexpr = rows_desc.block_shape[0]
    DEPTH: tl.constexpr = rows_desc.block_shape[1]
    COLUMNS: tl.constexpr = weights_desc.block_shape[1] if TRANSPOSED else weights_desc.block_shape[2]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(first_step, end_step):
        depth = step * DEPTH
        rows = rows_desc.load([row, depth])
        if TRANSPOSED:
            weights = weights_desc.load([expert, column, depth]).reshape(COLUMNS, DEPTH).T
        else:
            weights = weights_desc.load([expert, depth, column]).reshape(DEPTH, COLUMNS)
        total = tl.dot(rows, weights, total, input_precision="ieee")
    return total


@triton.jit
def _split(num_tiles, num_steps, num_programs):
    """Return how many tiles fill whole rounds, and in how many pieces each of the rest is cut: one a program."""
    whole = num_tiles // num_programs * num_programs
    pieces = tl.minimum(num_programs // tl.maximum(num_tiles - whole, 1), num_steps)
    return whole, pieces


@triton.jit
def _rows_times_weights_split(
    rows_desc,
    weights_desc,
    out_desc,
    partial_ptr,
    expert_ptr,
    num_tiles_ptr,
    depth_total,
    first_column,
    num_columns,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    ROWS: tl.constexpr = rows_desc.block_shape[0]
    DEPTH: tl.constexpr = rows_desc.block_shape[1]
    COLUMNS: tl.constexpr = out_desc.block_shape[1]
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_steps = tl.cdiv(depth_total, DEPTH)
    num_tiles = num_row_tiles * num_column_tiles
    whole, pieces = _split(num_tiles, num_steps, num_programs)
    for tile in tl.range(program, whole, num_programs, flatten=FLATTEN):
        row_tile, column_tile = place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = tl.load(expert_ptr + row_tile)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        # Written out here: only loops of one body are flattened.
        for step in range(num_steps):
            depth = step * DEPTH
            column = first_column + column_tile * COLUMNS
            rows = rows_desc.load([row_tile * ROWS, depth])
            if TRANSPOSED:
                weights = weights_desc.load([expert, column, depth]).reshape(COLUMNS, DEPTH).T
            else:
                weights = weights_desc.load([expert, depth, column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(rows, weights, total, input_precision="ieee")
        out_desc.store([row_tile * ROWS, column_tile * COLUMNS], total.to(out_desc.dtype))
    tile = whole + program // pieces
    if tile < num_tiles:
        piece = program % pieces
        row_tile, column_tile = place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = tl.load(expert_ptr + row_tile)
        first_step = num_steps * piece // pieces
        end_step = num_steps * (piece + 1) // pieces
        column = first_column + column_tile * COLUMNS
        total = _product(rows_desc, weights_desc, expert, row_tile * ROWS, column, first_step, end_step, TRANSPOSED)
        if pieces == 1:
            out_desc.store([row_tile * ROWS, column_tile * COLUMNS], total.to(out_desc.dtype))
        else:
            inside = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            tl.store(partial_ptr + program.to(tl.int64) * (ROWS * COLUMNS) + inside, total)


@triton.jit
def _sum_of_pieces(
    partial_ptr,
    out_ptr,
    num_tiles_ptr,
    depth_total,
    num_columns,
    num_programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Add the pieces of a tile in their order; a program has ``SHARE`` of its rows."""
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_tiles = num_row_tiles * num_column_tiles
    whole, pieces = _split(num_tiles, tl.cdiv(depth_total, DEPTH), num_programs)
    tile = whole + tl.program_id(0)
    if (tile < num_tiles) & (pieces > 1):
        row_tile, column_tile = place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        rows = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
        columns = tl.arange(0, COLUMNS)
        inside = rows[:, None] * COLUMNS + columns[None, :]
        first = tl.program_id(0).to(tl.int64) * pieces
        total = tl.zeros((SHARE, COLUMNS), dtype=tl.float32)
        for piece in range(pieces):
            total += tl.load(partial_ptr + (first + piece) * (ROWS * COLUMNS) + inside)
        columns += column_tile * COLUMNS
        targets = out_ptr + (row_tile * ROWS + rows).to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(targets, total.to(out_ptr.dtype.element_ty), mask=(columns < num_columns)[None, :])


@triton.jit
def _rows_times_weights_with_tails(
    rows_desc,
    half_rows_desc,
    weights_desc,
    out_desc,
    half_out_desc,
    counter_ptr,
    is_half_ptr,
    expert_ptr,
    num_tiles_ptr,
    depth_total,
    first_column,
    num_columns,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    ROWS: tl.constexpr = rows_desc.block_shape[0]
    COLUMNS: tl.constexpr = out_desc.block_shape[1]
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_steps = tl.cdiv(depth_total, rows_desc.block_shape[1])
    num_tiles = num_row_tiles * num_column_tiles
    tile = tl.program_id(0)
    while tile < num_tiles:
        # Asked for long before this tile ends.
        next_tile = tl.atomic_add(counter_ptr, 1) + tl.num_programs(0)
        row_tile, column_tile = place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = tl.load(expert_ptr + row_tile)
        row = row_tile * ROWS
        column = column_tile * COLUMNS
        is_half = 0
        if is_half_ptr is not None:
            is_half = tl.load(is_half_ptr + row_tile)
        if is_half != 0:
            half = _product(half_rows_desc, weights_desc, expert, row, first_column + column, 0, num_steps, TRANSPOSED)
            half_out_desc.store([row, column], half.to(out_desc.dtype))
        else:
            total = _product(rows_desc, weights_desc, expert, row, first_column + column, 0, num_steps, TRANSPOSED)
            out_desc.store([row, column], total.to(out_desc.dtype))
        tile = next_tile


@triton.jit
def _rows_times_weights_specialised(
    rows_desc,
    weights_desc,
    out_ptr,
    expert_ptr,
    num_tiles_ptr,
    depth_total,
    first_column,
    num_columns,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    ROWS: tl.constexpr = rows_desc.block_shape[0]
    DEPTH: tl.constexpr = rows_desc.block_shape[1]
    COLUMNS: tl.constexpr = weights_desc.block_shape[1] if TRANSPOSED else weights_desc.block_shape[2]
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_steps = tl.cdiv(depth_total, DEPTH)
    num_tiles = num_row_tiles * num_column_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), warp_specialize=True):
        row_tile, column_tile = place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = tl.load(expert_ptr + row_tile)
        column = first_column + column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(num_steps):
            depth = step * DEPTH
            rows = rows_desc.load([row_tile * ROWS, depth])
            if TRANSPOSED:
                weights = weights_desc.load([expert, column, depth]).reshape(COLUMNS, DEPTH).T
            else:
                weights = weights_desc.load([expert, depth, column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(rows, weights, total, input_precision="ieee")
        inside = row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        unit: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
        targets = out_ptr + inside.to(tl.int64)[:, None] * (num_columns // unit * unit) + columns[None, :]
        tl.store(targets, total.to(out_ptr.dtype.element_ty), mask=(columns < num_columns)[None, :])


@triton.jit
def _grad_of_weights_recomputed(
    gathered_ptr,
    gathered_stride,
    pre_desc,
    out_desc,
    weight_ptr,
    counted_ptr,
    segments_ptr,
    num_experts,
    num_padded,
    num_gathered_columns,
    d_hidden,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
):
    ROWS: tl.constexpr = out_desc.block_shape[1]
    COLUMNS: tl.constexpr = out_desc.block_shape[2]
    row_tiles = tl.cdiv(num_gathered_columns, ROWS)
    column_tiles = tl.cdiv(d_hidden, COLUMNS)
    tiles_of_expert = row_tiles * column_tiles
    steps = tl.arange(0, DEPTH)
    for tile in tl.range(tl.program_id(0), num_experts * tiles_of_expert, tl.num_programs(0), flatten=True):
        expert, start, count = _segment(segments_ptr, tile // tiles_of_expert, num_experts)
        row_tile, column_tile = place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        columns = row_tile * ROWS + tl.arange(0, ROWS)
        hidden = column_tile * COLUMNS
        start = tl.where(count > 0, start, num_padded)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(tl.maximum(tl.cdiv(count, DEPTH), 1)):
            row = start + step * DEPTH
            source = tl.load(counted_ptr + row + steps, mask=step * DEPTH < count, other=-1)
            weight = tl.load(weight_ptr + row + steps, mask=step * DEPTH < count, other=0.0)[:, None]
            left = gathered_rows(gathered_ptr, gathered_stride, source, columns, num_gathered_columns, EVEN)
            gate = pre_desc.load([row, hidden]).to(tl.float32)
            up = pre_desc.load([row, d_hidden + hidden]).to(tl.float32)
            # In the order of ``grad_of_hidden``, to the same bits.
            activation = gate * fast_sigmoid(gate) * up * weight
            activation = tl.where(weight != 0, activation, 0.0).to(pre_desc.dtype)
            total = tl.dot(left.T, activation, total, input_precision="ieee")
        _store_gradient(out_desc, expert, row_tile * ROWS, hidden, total, False)


def multiply_split(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    first: int,
    width: int,
    products: Tensor,
) -> None:
    """Write what `launch._multiply` does, the last round of tiles in pieces of float32 that a second kernel adds."""
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    num_programs = launch._num_programs(tile, rows_PK.device)
    partial = torch.empty(num_programs, tile.rows * tile.columns, device=rows_PK.device)
    _rows_times_weights_split[(num_programs,)](
        TensorDescriptor.from_tensor(rows_PK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weights, block),
        TensorDescriptor.from_tensor(products, [tile.rows, tile.columns]),
        partial,
        layout.expert_M,
        layout.num_tiles_1,
        rows_PK.shape[1],
        first,
        width,
        BAND=tile.band,
        TRANSPOSED=transposed,
        FLATTEN=tile.flatten,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    share = 16
    _sum_of_pieces[(num_programs, tile.rows // share)](
        partial,
        products,
        layout.num_tiles_1,
        rows_PK.shape[1],
        width,
        num_programs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        SHARE=share,
    )


def half_tiles(layout: PaddedLayout, block: int) -> Tensor:
    """Return, for each row tile, whether the second half of its rows is padding, int32."""
    return (layout.source_P.view(-1, block)[:, block // 2 :] < 0).all(1).int()


def multiply_with_tails(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    first: int,
    width: int,
    products: Tensor,
    is_half_M: Tensor | None,
) -> None:
    """Write what `launch._multiply` does but for the padding of half tiles; None: no tile is one."""
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    _rows_times_weights_with_tails[(launch._num_programs(tile, rows_PK.device),)](
        TensorDescriptor.from_tensor(rows_PK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(rows_PK, [tile.rows // 2, tile.depth]),
        TensorDescriptor.from_tensor(weights, block),
        TensorDescriptor.from_tensor(products, [tile.rows, tile.columns]),
        TensorDescriptor.from_tensor(products, [tile.rows // 2, tile.columns]),
        torch.zeros(1, dtype=torch.int32, device=rows_PK.device),
        is_half_M,
        layout.expert_M,
        layout.num_tiles_1,
        rows_PK.shape[1],
        first,
        width,
        BAND=tile.band,
        TRANSPOSED=transposed,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def multiply_specialised_by_compiler(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    first: int,
    width: int,
    products: Tensor,
) -> None:
    """Write what `launch._multiply` does; the compiler adds 8 warps to the 4, and cuts the rows of a tile in two."""
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    _rows_times_weights_specialised[(launch._num_programs(tile, rows_PK.device),)](
        TensorDescriptor.from_tensor(rows_PK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weights, block),
        products,
        layout.expert_M,
        layout.num_tiles_1,
        rows_PK.shape[1],
        first,
        width,
        BAND=tile.band,
        TRANSPOSED=transposed,
        num_warps=4,
        num_stages=tile.num_stages,
    )


def weight_gradient_recomputed(
    gathered_SD: Tensor, product_PU: Tensor, layout: PaddedLayout, tile: Tile, *, num_stages: int = 2
) -> Tensor:
    """Return the weight gradient of down (e, D, H) of SwiGLU from what the up projection stored."""
    num_experts, width, d_hidden = layout.segments_e3.shape[0], gathered_SD.shape[1], product_PU.shape[1] // 2
    assert d_hidden % tile.columns == 0
    out = product_PU.new_empty(num_experts, width, d_hidden)
    num_tiles = num_experts * triton.cdiv(width, tile.rows) * triton.cdiv(d_hidden, tile.columns)
    _grad_of_weights_recomputed[(min(num_tiles, launch._num_programs(tile, out.device)),)](
        gathered_SD,
        gathered_SD.stride(0),
        TensorDescriptor.from_tensor(product_PU, [tile.depth, tile.columns]),
        TensorDescriptor.from_tensor(out, [1, tile.rows, tile.columns]),
        layout.weight_P,
        layout.counted_P,
        layout.segments_e3,
        num_experts,
        layout.num_padded,
        width,
        d_hidden,
        DEPTH=tile.depth,
        BAND=tile.band,
        EVEN=width % tile.rows == 0,
        num_warps=tile.num_warps,
        num_stages=num_stages,
    )
    return out
