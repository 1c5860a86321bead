"""Triton kernels of the backward pass: gradient through the activation, weight gradients, row weights.

Shapes are in padded rows P, see ``triton_layout.py``.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from coterie_experts.grouped_swiglu.triton_activation import fast_sigmoid, held_below, held_within
from coterie_experts.grouped_swiglu.triton_forward import bias_of_columns, expert_and_sources, gathered_rows
from coterie_experts.grouped_swiglu.triton_layout import mask_of_all
from coterie_experts.grouped_swiglu.triton_tiles import place_of_tile

__all__ = ["grad_of_hidden", "grad_of_row_weights", "grad_of_weights_by_load", "grad_of_weights_in_turn", "segment"]


@triton.jit
def grad_of_hidden(
    grad_y_ptr,
    grad_y_stride,
    down_desc,
    pre_ptr,
    grad_pre_ptr,
    activation_ptr,
    dots_ptr,
    bias_ptr,
    source_ptr,
    weight_ptr,
    expert_ptr,
    has_zero_ptr,
    num_tiles_ptr,
    d_model,
    d_hidden,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Multiply gathered rows of the output's gradient with down (e, D, H) and go back through the activation.

    The pre-activation is what ``up_with_activation`` stored plus its bias, which may be None. Stores the gradient of
    the pre-activation (it may overwrite what was stored: an element is read before it is written and by nobody else),
    the weighted activation for the weight gradient, and for each row and column tile the dot product of activation and
    gradient, (P, column tiles), whose sum is the gradient of the row's weight. A tile ends in ``PARTS`` (a power of
    two) parts of its columns, so that the registers hold one part at a time.
    """
    num_row_tiles = tl.load(num_tiles_ptr)
    num_column_tiles = tl.cdiv(d_hidden, COLUMNS)
    num_steps = tl.cdiv(d_model, DEPTH)
    num_tiles = num_row_tiles * num_column_tiles
    inside = tl.arange(0, ROWS)
    row_tile, column_tile = place_of_tile(tl.program_id(0), num_row_tiles, num_column_tiles, BAND)
    expert, source = expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        hidden = column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(num_steps):
            depth = step * DEPTH
            grad_y = gathered_rows(grad_y_ptr, grad_y_stride, source, depth + tl.arange(0, DEPTH), d_model, EVEN)
            weights = down_desc.load([expert, depth, hidden]).reshape(DEPTH, COLUMNS)
            total = tl.dot(grad_y, weights, total, input_precision="ieee")

        this_expert = expert
        next_row_tile, next_column_tile = place_of_tile(
            tile + tl.num_programs(0), num_row_tiles, num_column_tiles, BAND
        )
        expert, source = expert_and_sources(expert_ptr, source_ptr, next_row_tile, num_row_tiles, inside)
        rows = row_tile * ROWS + inside
        weight = tl.load(weight_ptr + rows)
        # A multiple of 16 bytes, which the compiler sees only where it divides and multiplies.
        unit: tl.constexpr = 128 // pre_ptr.dtype.element_ty.primitive_bitwidth
        width = d_hidden // unit * unit
        # 64 bits for the place of the tile, 32 for places within it.
        pre_width = width if ACTIVATION == "relu_squared" else 2 * width
        pre_place = tl.cast(row_tile * ROWS, tl.int64) * pre_width + hidden
        place = tl.cast(row_tile * ROWS, tl.int64) * width + hidden
        pointers = (pre_ptr + pre_place, grad_pre_ptr + pre_place, activation_ptr + place)
        num_left = width - hidden
        bias_row_ptr = None if bias_ptr is None else bias_ptr + this_expert.to(tl.int64) * pre_width + hidden
        # Most tiles have no row of weight zero and need no selection.
        if tl.load(has_zero_ptr + row_tile):
            dots = _back_through_activation(
                total, weight, pointers, bias_row_ptr, width, num_left, PARTS, EVEN_HIDDEN, ACTIVATION, ALPHA, LIMIT,
                SELECT=True,
            )  # fmt: skip
        else:
            dots = _back_through_activation(
                total, weight, pointers, bias_row_ptr, width, num_left, PARTS, EVEN_HIDDEN, ACTIVATION, ALPHA, LIMIT,
                SELECT=False,
            )  # fmt: skip
        tl.store(dots_ptr + rows.to(tl.int64) * num_column_tiles + column_tile, dots)
        row_tile, column_tile = next_row_tile, next_column_tile


@triton.jit
def _back_through_activation(
    total,
    weight,
    pointers,
    bias_ptr,
    width,
    num_left,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SELECT: tl.constexpr,
):
    """Store the gradient of the pre-activation and the weighted activation of a tile; return its dots, one a row."""
    pre_ptr, grad_pre_ptr, activation_ptr = pointers
    ROWS: tl.constexpr = total.shape[0]
    WIDTH: tl.constexpr = total.shape[1] // PARTS
    dtype: tl.constexpr = activation_ptr.dtype.element_ty
    parts = _columns_in_parts(total, PARTS)
    inside = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    if ACTIVATION == "relu_squared":
        sides = inside[:, None] * width + columns[None, :]
    else:
        # Gate and up together, (ROWS, 2, WIDTH): one exchange between threads in place of two.
        sides = inside[:, None, None] * (2 * width) + tl.arange(0, 2)[None, :, None] * width + columns[None, None, :]
    counts = (weight != 0)[:, None]
    dots = tl.zeros((ROWS,), dtype=tl.float32)
    pre = _load_columns(pre_ptr + sides, _is_left(columns, num_left, pre_ptr, len(sides.shape)), EVEN)
    for part in tl.static_range(PARTS):
        if ACTIVATION == "relu_squared":
            gate = pre.to(tl.float32)
        else:
            gate, up = pre.to(tl.float32).permute(0, 2, 1).split()
        if part + 1 < PARTS:
            # On its way while this part is worked on.
            next_columns = (part + 1) * WIDTH + columns
            pre = _load_columns(
                pre_ptr + (part + 1) * WIDTH + sides,
                _is_left(next_columns, num_left, pre_ptr, len(sides.shape)),
                EVEN,
            )
        if bias_ptr is not None:
            gate += bias_of_columns(bias_ptr, part * WIDTH + columns, num_left)
            if ACTIVATION != "relu_squared":
                up += bias_of_columns(bias_ptr + width, part * WIDTH + columns, num_left)
        grad = parts[part]
        if ACTIVATION == "swiglu":
            sigmoid = fast_sigmoid(gate)
            silu = gate * sigmoid
            activation = silu * up
        elif ACTIVATION == "swiglu_clamped":
            # A value beyond the limit has no gradient, one at the limit has.
            gate_counts = (gate <= LIMIT) | (gate != gate)
            up_counts = (tl.abs(up) <= LIMIT) | (up != up)
            gate = held_below(gate, LIMIT)
            up = held_within(up, LIMIT) + 1.0
            sigmoid = fast_sigmoid(ALPHA * gate)
            silu = gate * sigmoid
            activation = silu * up
        else:
            tl.static_assert(ACTIVATION == "relu_squared")
            relu = tl.where(gate < 0.0, 0.0, gate)
            activation = relu * relu
        dots += tl.sum(grad * activation, 1)
        weighted = activation * weight[:, None]
        grad = grad * weight[:, None]
        if ACTIVATION == "relu_squared":
            grad_gate = 2.0 * grad * relu
        elif ACTIVATION == "swiglu_clamped":
            grad_up = tl.where(up_counts, grad * silu, 0.0)
            grad_gate = tl.where(gate_counts, grad * up * (sigmoid + ALPHA * silu * (1 - sigmoid)), 0.0)
        else:
            grad_up = grad * silu
            grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        if SELECT:
            # Selected, not multiplied: rows of weight zero may hold NaN.
            weighted = tl.where(counts, weighted, 0.0)
            if ACTIVATION != "relu_squared":
                grad_up = tl.where(counts, grad_up, 0.0)
            grad_gate = tl.where(counts, grad_gate, 0.0)
        if ACTIVATION == "relu_squared":
            grad_pre = grad_gate.to(dtype)
        else:
            grad_pre = tl.join(grad_gate.to(dtype), grad_up.to(dtype)).permute(0, 2, 1)
        left = _is_left(part * WIDTH + columns, num_left, pre_ptr, len(sides.shape))
        _store_columns(grad_pre_ptr + part * WIDTH + sides, grad_pre, left, EVEN)
        places = inside[:, None] * width + columns[None, :]
        left = _is_left(part * WIDTH + columns, num_left, pre_ptr, 2)
        _store_columns(activation_ptr + part * WIDTH + places, weighted.to(dtype), left, EVEN)
    return dots


@triton.jit
def _columns_in_parts(tile, PARTS: tl.constexpr):
    if PARTS == 1:
        return (tile,)
    else:
        left, right = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
        return _columns_in_parts(left, PARTS // 2) + _columns_in_parts(right, PARTS // 2)


@triton.jit
def _is_left(columns, num_left, pointer, RANK: tl.constexpr):
    unit: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    is_left = columns // unit < num_left // unit
    if RANK == 2:
        return is_left[None, :]
    else:
        return is_left[None, None, :]


@triton.jit
def _load_columns(pointers, is_inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def _store_columns(pointers, values, is_inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=is_inside)


@triton.jit
def grad_of_row_weights(
    dots_ptr,
    bias_dots_ptr,
    weight_ptr,
    slot_ptr,
    num_tiles_ptr,
    grad_ptr,
    num_columns,
    num_bias_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS_COLUMNS: tl.constexpr,
):
    """Sum the dots (P, num_columns) of each padded row and store them by slot; at weight 0 only what is finite.

    Those of the bias (P, num_bias_columns), which may be None, are added.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles_ptr):
        rows = tile * ROWS + tl.arange(0, ROWS)
        grad = _sums_of_rows(dots_ptr, rows, num_columns, COLUMNS)
        if bias_dots_ptr is not None:
            grad += _sums_of_rows(bias_dots_ptr, rows, num_bias_columns, BIAS_COLUMNS)
        weight = tl.load(weight_ptr + rows)
        # A difference with itself is zero for finite numbers alone.
        grad = tl.where((weight == 0) & (grad - grad != 0), 0.0, grad)
        slot = tl.load(slot_ptr + rows)
        tl.store(grad_ptr + slot, grad, mask=slot >= 0)


@triton.jit
def _sums_of_rows(values_ptr, rows, width, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.sum(tl.load(values_ptr + places, mask=(columns < width)[None, :], other=0.0), 1)


@triton.jit
def grad_of_weights_in_turn(
    gathered_ptr,
    gathered_stride,
    rows_desc,
    out_desc,
    counted_ptr,
    segments_ptr,
    num_experts,
    num_padded,
    num_gathered_columns,
    num_rows_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store gathered^T @ rows for each expert, (e, columns of gathered, columns of rows); zero for no rows.

    ``gathered`` are rows of tokens taken by ``counted``, ``rows`` lie in padded rows; rows of padding are zeros on both
    sides. ``TRANSPOSED`` stores rows^T @ gathered: the gather is cheaper along the short side of a tile, whichever side
    of the output that is. ``ACCUMULATE`` adds to what is there.

    Each program takes every num_programs-th tile, and the loops over tiles and rows are one, so that the loads of a
    tile begin before the one before it ends. Only where the load of the experts is even: see ``_is_even``.
    """
    row_tiles = tl.cdiv(num_gathered_columns, ROWS)
    column_tiles = tl.cdiv(num_rows_columns, COLUMNS)
    tiles_of_expert = row_tiles * column_tiles
    num_tiles = num_experts * tiles_of_expert
    if not _is_even(segments_ptr, num_experts, num_tiles):
        num_tiles = 0
    steps = tl.arange(0, DEPTH)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        expert, start, count = segment(segments_ptr, tile // tiles_of_expert, num_experts)
        row_tile, column_tile = place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        first_row = row_tile * ROWS
        first_column = column_tile * COLUMNS
        columns = first_row + tl.arange(0, ROWS)
        # No rows take one step of zeros, past the last row.
        start = tl.where(count > 0, start, num_padded)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(tl.maximum(tl.cdiv(count, DEPTH), 1)):
            row = start + step * DEPTH
            is_row = mask_of_all(step * DEPTH < count, steps)
            source = tl.load(counted_ptr + row + steps, mask=is_row, other=-1)
            left = gathered_rows(gathered_ptr, gathered_stride, source, columns, num_gathered_columns, EVEN)
            right = rows_desc.load([row, first_column])
            total = tl.dot(left.T, right, total, input_precision="ieee")
        if TRANSPOSED:
            _store_gradient(out_desc, expert, first_column, first_row, total.T, ACCUMULATE)
        else:
            _store_gradient(out_desc, expert, first_row, first_column, total, ACCUMULATE)


@triton.jit
def grad_of_weights_by_load(
    gathered_ptr,
    gathered_stride,
    rows_desc,
    out_desc,
    counted_ptr,
    segments_ptr,
    counter_ptr,
    num_experts,
    num_gathered_columns,
    num_rows_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Do the work of ``grad_of_weights_in_turn`` where the load is not even, bit for bit the same.

    Programs draw their tiles from a counter, those of experts with many rows first, so that no program ends long after
    the others. Who computes a tile does not change its bits.
    """
    row_tiles = tl.cdiv(num_gathered_columns, ROWS)
    column_tiles = tl.cdiv(num_rows_columns, COLUMNS)
    tiles_of_expert = row_tiles * column_tiles
    num_tiles = num_experts * tiles_of_expert
    if _is_even(segments_ptr, num_experts, num_tiles):
        num_tiles = 0
    steps = tl.arange(0, DEPTH)
    tile = tl.program_id(0)
    expert, start, count = segment(segments_ptr, tile // tiles_of_expert, num_experts)
    next_source = tl.load(counted_ptr + start + steps, mask=mask_of_all(count > 0, steps), other=-1)
    while tile < num_tiles:
        # What the next tile needs to begin with is asked for long before this one ends.
        next_tile = tl.atomic_add(counter_ptr, 1) + tl.num_programs(0)
        next_expert, next_start, next_count = segment(segments_ptr, next_tile // tiles_of_expert, num_experts)
        row_tile, column_tile = place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        first_row = row_tile * ROWS
        first_column = column_tile * COLUMNS
        columns = first_row + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        end = start + count
        for row in range(start, end, DEPTH):
            # One step ahead, so that the gather does not wait for its own indices.
            source = next_source
            next_row = tl.where(row + DEPTH < end, row + DEPTH, next_start)
            is_row = mask_of_all((row + DEPTH < end) | (next_count > 0), steps)
            next_source = tl.load(counted_ptr + next_row + steps, mask=is_row, other=-1)
            left = gathered_rows(gathered_ptr, gathered_stride, source, columns, num_gathered_columns, EVEN)
            right = rows_desc.load([row, first_column])
            total = tl.dot(left.T, right, total, input_precision="ieee")
        if TRANSPOSED:
            _store_gradient(out_desc, expert, first_column, first_row, total.T, ACCUMULATE)
        else:
            _store_gradient(out_desc, expert, first_row, first_column, total, ACCUMULATE)
        tile = next_tile
        expert = next_expert
        start = next_start
        count = next_count


@triton.jit
def _is_even(segments_ptr, num_experts, num_tiles):
    """Say whether tiles taken in turn, by falling load, would leave programs idle for at most a 32nd of the time.

    One program may end later than another by the difference of one tile of the largest and one of the smallest expert.
    """
    most = tl.load(segments_ptr + 2)
    least = tl.load(segments_ptr + 3 * (num_experts - 1) + 2)
    turns = tl.cdiv(num_tiles, tl.num_programs(0))
    return (most - least) * 64 <= (most + least) * turns


@triton.jit
def segment(segments_ptr, place, num_experts):
    """Return id, first padded row and number of rows of the ``place``-th expert by load; zeros past the last."""
    known = place < num_experts
    expert = tl.load(segments_ptr + 3 * place, mask=known, other=0)
    start = tl.load(segments_ptr + 3 * place + 1, mask=known, other=0)
    count = tl.load(segments_ptr + 3 * place + 2, mask=known, other=0)
    return expert, start, count


@triton.jit
def _store_gradient(out_desc, expert, row, column, total, ACCUMULATE: tl.constexpr):
    # In the parts of columns that the descriptor has: a float32 tile does not fit beside the loads of the next tile.
    ROWS: tl.constexpr = out_desc.block_shape[1]
    WIDTH: tl.constexpr = out_desc.block_shape[2]
    PARTS: tl.constexpr = total.shape[1] // WIDTH
    parts = _columns_in_parts(total, PARTS)
    for part in tl.static_range(PARTS):
        place = [expert, row, column + part * WIDTH]
        out = parts[part]
        if ACCUMULATE:
            out += out_desc.load(place).reshape(ROWS, WIDTH)
        out_desc.store(place, out.to(out_desc.dtype).reshape(1, ROWS, WIDTH))
