"""Triton kernels that produce rows: up projection with activation, rows times weights, sum over the choices of a token.

The matrix kernels are persistent: each program takes every num_programs-th tile. Shapes are in padded rows P, see
``triton_layout.py``; the weights come as tensor descriptors.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from coterie_experts.grouped_swiglu.triton_activation import fast_sigmoid, held_below, held_within
from coterie_experts.grouped_swiglu.triton_layout import mask_of_all
from coterie_experts.grouped_swiglu.triton_tiles import place_of_tile

__all__ = [
    "bias_of_columns",
    "clear_rows",
    "clear_rows_past_the_end",
    "expert_and_sources",
    "gathered_rows",
    "rows_times_weights",
    "sum_rows_of_tokens",
    "up_with_activation",
]


@triton.jit
def gathered_rows(rows_ptr, stride, source, columns, width, EVEN: tl.constexpr):
    """Load a tile of the rows ``source``, those that are -1 as zeros; ``EVEN``: all columns lie within the width."""
    # Widths and strides are multiples of 16 bytes, which the compiler sees only where it divides and multiplies.
    unit: tl.constexpr = 128 // rows_ptr.dtype.element_ty.primitive_bitwidth
    mask = (source >= 0)[:, None]
    if not EVEN:
        mask = mask & (columns // unit < width // unit)[None, :]
    places = source.to(tl.int64)[:, None] * (stride // unit * unit)
    return tl.load(rows_ptr + places + columns[None, :], mask=mask, other=0.0)


@triton.jit
def expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside):
    """Load the expert of a row tile and the sources of its rows; of a tile past the last one nothing (0, and -1)."""
    known = row_tile < num_row_tiles
    expert = tl.load(expert_ptr + row_tile, mask=known, other=0)
    source = tl.load(source_ptr + row_tile * inside.shape[0] + inside, mask=mask_of_all(known, inside), other=-1)
    return expert, source


@triton.jit
def bias_of_columns(bias_row_ptr, columns, width):
    """Load one row of a bias as float32, (1, columns), zero past its width."""
    return tl.load(bias_row_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def up_with_activation(
    x_ptr,
    x_stride,
    weights_desc,
    gate_desc,
    up_desc,
    activation_desc,
    bias_ptr,
    source_ptr,
    weight_ptr,
    expert_ptr,
    has_zero_ptr,
    num_tiles_ptr,
    d_model,
    d_hidden,
    ROWS: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Store the products of rows gathered from x, and act(product + bias) * weight; see ``Activation``.

    Gate and up columns of the same hidden units lie side by side in one tile: the descriptor of the weights
    (e, 2, H, D) loads both. An activation without a gate has weights (e, 1, H, D) and no ``up_desc``. ``HIDDEN`` is
    the number of hidden units of a tile. The bias (e, columns of the products) may be None.
    """
    GATED: tl.constexpr = weights_desc.block_shape[1] == 2
    COLUMNS: tl.constexpr = 2 * HIDDEN if GATED else HIDDEN
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(d_hidden, HIDDEN)
    num_steps = tl.cdiv(d_model, DEPTH)
    inside = tl.arange(0, ROWS)
    row_tile, column_tile = place_of_tile(tl.program_id(0), num_row_tiles, num_column_tiles, BAND)
    expert, source = expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0)):
        hidden = column_tile * HIDDEN
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(num_steps):
            depth = step * DEPTH
            x = gathered_rows(x_ptr, x_stride, source, depth + tl.arange(0, DEPTH), d_model, EVEN)
            weights = weights_desc.load([expert, 0, hidden, depth]).reshape(COLUMNS, DEPTH)
            total = tl.dot(x, weights.T, total, input_precision="ieee")
        this_expert = expert
        # The next tile's sources are on their way while this tile ends.
        next_row_tile, next_column_tile = place_of_tile(
            tile + tl.num_programs(0), num_row_tiles, num_column_tiles, BAND
        )
        expert, source = expert_and_sources(expert_ptr, source_ptr, next_row_tile, num_row_tiles, inside)
        dtype = gate_desc.dtype
        if GATED:
            gate, up = total.reshape(ROWS, 2, HIDDEN).permute(0, 2, 1).split()
            gate_desc.store([row_tile * ROWS, hidden], gate.to(dtype))
            up_desc.store([row_tile * ROWS, hidden], up.to(dtype))
        else:
            gate = total
            gate_desc.store([row_tile * ROWS, hidden], gate.to(dtype))
        weight = tl.load(weight_ptr + row_tile * ROWS + inside)[:, None]
        if bias_ptr is not None:
            units = hidden + tl.arange(0, HIDDEN)
            bias_row_ptr = bias_ptr + this_expert.to(tl.int64) * (2 * d_hidden if GATED else d_hidden)
            gate += bias_of_columns(bias_row_ptr, units, d_hidden)
            if GATED:
                up += bias_of_columns(bias_row_ptr + d_hidden, units, d_hidden)
        if ACTIVATION == "swiglu":
            activation = gate * fast_sigmoid(gate) * up * weight
        elif ACTIVATION == "swiglu_clamped":
            gate = held_below(gate, LIMIT)
            activation = gate * fast_sigmoid(ALPHA * gate) * (held_within(up, LIMIT) + 1.0) * weight
        else:
            tl.static_assert(ACTIVATION == "relu_squared")
            relu = tl.where(gate < 0.0, 0.0, gate)
            activation = relu * relu * weight
        if tl.load(has_zero_ptr + row_tile):
            # Selected, not multiplied: zero times NaN is NaN.
            activation = tl.where(weight != 0, activation, 0.0)
        activation_desc.store([row_tile * ROWS, hidden], activation.to(dtype))
        row_tile, column_tile = next_row_tile, next_column_tile


@triton.jit
def rows_times_weights(
    rows_desc,
    weights_desc,
    out_desc,
    out_ptr,
    out_stride,
    bias_ptr,
    bias_stride,
    source_ptr,
    weight_ptr,
    expert_ptr,
    num_tiles_ptr,
    depth_total,
    first_column,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SCATTER: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Store columns first_column to first_column + num_columns of rows (P, depth) times the weights of their expert.

    Args:
        weights_desc: (e, columns, depth) if ``TRANSPOSED``, else (e, depth, columns).
        out_desc: (P, num_columns); used unless ``SCATTER``.
        out_ptr: rows of x; if ``SCATTER``, padded row p is stored to row source[p] there, and padding nowhere.
        bias_ptr: (e, num_columns) for these columns, added times the row weight; may be None, and then its stride.
    """
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_steps = tl.cdiv(depth_total, DEPTH)
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, column_tile = place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = tl.load(expert_ptr + row_tile)
        column = column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(num_steps):
            depth = step * DEPTH
            rows = rows_desc.load([row_tile * ROWS, depth])
            if TRANSPOSED:
                weights = weights_desc.load([expert, first_column + column, depth]).reshape(COLUMNS, DEPTH).T
            else:
                weights = weights_desc.load([expert, depth, first_column + column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(rows, weights, total, input_precision="ieee")
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + expert.to(tl.int64) * bias_stride
            weight = tl.load(weight_ptr + row_tile * ROWS + tl.arange(0, ROWS))[:, None]
            total += weight * bias_of_columns(bias_row_ptr, column + tl.arange(0, COLUMNS), num_columns)
        out = total.to(rows_desc.dtype)
        if SCATTER:
            source = tl.load(source_ptr + row_tile * ROWS + tl.arange(0, ROWS))
            columns = column + tl.arange(0, COLUMNS)
            targets = out_ptr + source.to(tl.int64)[:, None] * out_stride + (first_column + columns)[None, :]
            tl.store(targets, out, mask=(source >= 0)[:, None] & (columns < num_columns)[None, :])
        else:
            out_desc.store([row_tile * ROWS, column], out)


@triton.jit
def sum_rows_of_tokens(
    rows_ptr, position_ptr, out_ptr, out_stride, num_columns, CHOICES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the K rows of a token in the order of k, in float32 from zero, round once; choices that are not routed add 0.

    ``rows_ptr`` is (P, num_columns), ``out_ptr`` the first of the columns of the tokens that they stand for.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        position = tl.load(position_ptr + token * CHOICES + choice).to(tl.int64)
        is_here = inside & mask_of_all(position >= 0, inside)
        row = tl.load(rows_ptr + position * num_columns + columns, mask=is_here, other=0.0)
        total += row.to(tl.float32)
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def clear_rows_past_the_end(
    out_ptr, offsets_ptr, num_experts, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write zeros to the rows (num_rows, width) that belong to no expert."""
    first_row = tl.program_id(0) * ROWS
    end = tl.load(offsets_ptr + num_experts - 1)
    if first_row + ROWS > end:
        rows = first_row + tl.arange(0, ROWS)
        is_past = ((rows >= end) & (rows < num_rows))[:, None]
        for first_column in range(0, width, COLUMNS):
            columns = first_column + tl.arange(0, COLUMNS)
            zeros = tl.zeros((ROWS, COLUMNS), dtype=out_ptr.dtype.element_ty)
            targets = out_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
            tl.store(targets, zeros, mask=is_past & (columns < width)[None, :])


@triton.jit
def clear_rows(
    out_ptr, is_chosen_ptr, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Write zeros to the chosen rows (num_rows, width); a program has ``ROWS`` rows, ``BLOCKS`` blocks of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_chosen = tl.load(is_chosen_ptr + rows, mask=rows < num_rows, other=0) != 0
    if tl.max(is_chosen.to(tl.int32), 0) > 0:
        for block in range(BLOCKS):
            columns = (tl.program_id(1) * BLOCKS + block) * COLUMNS + tl.arange(0, COLUMNS)
            zeros = tl.zeros((ROWS, COLUMNS), dtype=out_ptr.dtype.element_ty)
            targets = out_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
            tl.store(targets, zeros, mask=is_chosen[:, None] & (columns < width)[None, :])
