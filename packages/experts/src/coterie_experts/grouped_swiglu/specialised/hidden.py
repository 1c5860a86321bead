"""The gradient of the hidden units, by specialised warps; see ``grad_of_hidden`` for what is computed.

Four warps gather rows of the output's gradient and ask for weights, of the next tile too while eight warps end the one
before it. These multiply, and end a tile in parts of its columns as the plain kernel does: the products are exchanged
between threads, and all else is read and written in whole lines. The pre-activation of a tile is brought to the cache
of the second level while the tile is multiplied.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from coterie_experts.activation import Activation
from coterie_experts.grouped_swiglu.specialised.ring import ENDED, descriptor, mark, next_stage, stage_before
from coterie_experts.grouped_swiglu.specialised.up import gather_operands
from coterie_experts.grouped_swiglu.triton_activation import fast_sigmoid, held_below, held_within
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile

__all__ = ["fits", "grad_of_hidden_specialised", "hidden_gradients"]

_place_of_tile = gluon.jit(place_of_tile.fn)
_fast_sigmoid = gluon.jit(fast_sigmoid.fn)
_held_below = gluon.jit(held_below.fn)
_held_within = gluon.jit(held_within.fn)


@gluon.jit
def _columns_in_parts(tile, PARTS: gl.constexpr):
    if PARTS == 1:
        return (tile,)
    else:
        left, right = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
        return _columns_in_parts(left, PARTS // 2) + _columns_in_parts(right, PARTS // 2)


@gluon.jit
def _back_through_activation(
    gate, up, grad, weight, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, SELECT: gl.constexpr
):
    """Return the gradients of gate and, where there is one, up; the weighted activation; the dots before weighting."""
    if ACTIVATION == "swiglu":
        sigmoid = _fast_sigmoid(gate)
        silu = gate * sigmoid
        activation = silu * up
    elif ACTIVATION == "swiglu_clamped":
        # A value beyond the limit has no gradient, one at the limit has.
        gate_counts = (gate <= LIMIT) | (gate != gate)
        up_counts = (gl.abs(up) <= LIMIT) | (up != up)
        gate = _held_below(gate, LIMIT)
        up = _held_within(up, LIMIT) + 1.0
        sigmoid = _fast_sigmoid(ALPHA * gate)
        silu = gate * sigmoid
        activation = silu * up
    else:
        gl.static_assert(ACTIVATION == "relu_squared")
        relu = gl.where(gate < 0.0, 0.0, gate)
        activation = relu * relu
    dots = gl.sum(grad * activation, 1)
    counts = weight != 0
    weighted = _selected(activation * weight, counts, SELECT)
    grad = grad * weight
    if ACTIVATION == "relu_squared":
        return (_selected(2.0 * grad * relu, counts, SELECT),), weighted, dots
    else:
        if ACTIVATION == "swiglu_clamped":
            grad_up = gl.where(up_counts, grad * silu, 0.0)
            grad_gate = gl.where(gate_counts, grad * up * (sigmoid + ALPHA * silu * (1 - sigmoid)), 0.0)
        else:
            grad_up = grad * silu
            grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        return (_selected(grad_gate, counts, SELECT), _selected(grad_up, counts, SELECT)), weighted, dots


@gluon.jit
def _selected(value, counts, SELECT: gl.constexpr):
    # Selected, not multiplied: rows of weight zero may hold NaN.
    return gl.where(counts, value, 0.0) if SELECT else value


@gluon.jit
def _ask_for_lines(pre_ptr, num_bytes, left_bytes, ROWS: gl.constexpr, LINES: gl.constexpr):
    """Bring rows of a tile, each so many bytes after the one before and of LINES lines, to the second level's cache."""
    places: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, places))[:, None]
    # Lines past the end of a row are those at its end.
    lines = gl.minimum(128 * gl.arange(0, LINES, layout=gl.SliceLayout(0, places)), left_bytes - 1)[None, :]
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pre_ptr.to(gl.pointer_type(gl.int8)) + rows * num_bytes + lines],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_side(pre_ptr, places, is_left, EVEN: gl.constexpr):
    if EVEN:
        return gl.load(pre_ptr + places)
    else:
        return gl.load(pre_ptr + places, mask=is_left, other=0.0)


@gluon.jit
def _store_side(pointers, value, is_left, EVEN: gl.constexpr):
    if EVEN:
        gl.store(pointers, value)
    else:
        gl.store(pointers, value, mask=is_left)


@gluon.jit
def _load_part(pre_ptr, width, places, is_left, SIDES: gl.constexpr, EVEN: gl.constexpr):
    gate = _load_side(pre_ptr, places, is_left, EVEN)
    if SIDES == 1:
        return (gate,)
    else:
        return (gate, _load_side(pre_ptr + width, places, is_left, EVEN))


@gluon.jit
def _end_tile(
    total,
    pre,
    weight,
    pointers,
    bias_row_ptr,
    width,
    num_left,
    PARTS: gl.constexpr,
    EVEN: gl.constexpr,
    EARLY: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SELECT: gl.constexpr,
):
    """Store the results of a tile, whose first part of the pre-activation is ``pre``; return its dots, one a row."""
    pre_ptr, grad_ptr, activation_ptr = pointers
    ROWS: gl.constexpr = total.shape[0]
    WIDTH: gl.constexpr = total.shape[1] // PARTS
    SIDES: gl.constexpr = len(pre)
    dtype: gl.constexpr = activation_ptr.dtype.element_ty
    unit: gl.constexpr = 128 // dtype.primitive_bitwidth
    layout: gl.constexpr = weight.type.layout
    totals = _columns_in_parts(total, PARTS)
    inside = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    sides = inside * (SIDES * width) + columns
    places = inside * width + columns
    dots = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(PARTS):
        first = part * WIDTH
        # Whole units, so that the compiler sees that 16 bytes are inside or outside together.
        is_left = (first + columns) // unit < num_left // unit
        gate = pre[0].to(gl.float32)
        up = None
        if SIDES == 2:
            up = pre[1].to(gl.float32)
        is_next_left = (first + WIDTH + columns) // unit < num_left // unit
        if EARLY and part + 1 < PARTS:
            # On its way while this part is worked on.
            pre = _load_part(pre_ptr + first + WIDTH, width, sides, is_next_left, SIDES, EVEN)
        if bias_row_ptr is not None:
            gate += _load_side(bias_row_ptr + first, columns, is_left, EVEN).to(gl.float32)
            if SIDES == 2:
                up += _load_side(bias_row_ptr + width + first, columns, is_left, EVEN).to(gl.float32)
        grad = gl.convert_layout(totals[part], layout)
        grads, weighted, more_dots = _back_through_activation(gate, up, grad, weight, ACTIVATION, ALPHA, LIMIT, SELECT)
        dots += more_dots
        if not EARLY and part + 1 < PARTS:
            # On its way while this part is stored and the products of the next one are exchanged.
            pre = _load_part(pre_ptr + first + WIDTH, width, sides, is_next_left, SIDES, EVEN)
        for side in gl.static_range(SIDES):
            _store_side(grad_ptr + side * width + first + sides, grads[side].to(dtype), is_left, EVEN)
        _store_side(activation_ptr + first + places, weighted.to(dtype), is_left, EVEN)
    return dots


@gluon.jit
def _multiply_and_go_back(
    buffers,
    barriers,
    pointers,
    sizes,
    d_hidden,
    SIDES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    PARTS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    rows_buffer, weights_buffer = buffers
    ready, empty, trace_ptr = barriers
    pre_ptr, grad_ptr, activation_ptr, dots_ptr, bias_ptr, weight_ptr, expert_ptr, has_zero_ptr = pointers
    num_row_tiles, num_column_tiles, num_steps = sizes
    dtype: gl.constexpr = pre_ptr.dtype.element_ty
    unit: gl.constexpr = 128 // dtype.primitive_bitwidth
    WIDTH: gl.constexpr = COLUMNS // PARTS
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 16]
    )
    # A thread has 16 bytes of a row, and WIDTH // unit threads a row.
    lines: gl.constexpr = gl.BlockedLayout(
        [1, unit], [32 // (WIDTH // unit), WIDTH // unit], [gl.num_warps(), 1], [1, 0]
    )
    inside = gl.arange(0, ROWS, layout=gl.SliceLayout(1, lines))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, lines))[None, :]
    # A multiple of 16 bytes, which the compiler sees only where it divides and multiplies.
    width = d_hidden // unit * unit
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        hidden = column_tile * COLUMNS
        num_left = width - hidden
        # 64 bits for the place of the tile, 32 for places within it.
        place = (row_tile * ROWS).to(gl.int64) * width + hidden
        pre_place = (row_tile * ROWS).to(gl.int64) * (SIDES * width) + hidden
        if AHEAD:
            num_bytes = SIDES * width * (dtype.primitive_bitwidth // 8)
            left_bytes = num_left * (dtype.primitive_bitwidth // 8)
            for side in gl.static_range(SIDES):
                _ask_for_lines(
                    pre_ptr + pre_place + side * width, num_bytes, left_bytes, ROWS,
                    COLUMNS * dtype.primitive_bitwidth // 1024,
                )  # fmt: skip
        rows = row_tile * ROWS + inside
        weight = gl.load(weight_ptr + rows)
        has_zero = gl.load(has_zero_ptr + row_tile)
        bias_row_ptr = None
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + gl.load(expert_ptr + row_tile).to(gl.int64) * (SIDES * width) + hidden
        total = gl.zeros((ROWS, COLUMNS), gl.float32, accumulators)
        for step in range(num_steps):
            mark(trace_ptr, 0, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            # The rows were copied by threads, and are read as the copy engine reads.
            fence_async_shared()
            weights = weights_buffer.index(stage).reshape([DEPTH, COLUMNS])
            total = warpgroup_mma(rows_buffer.index(stage), weights, total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        # On its way while the last product is computed.
        sides = inside[:, None] * (SIDES * width) + columns
        pre = _load_part(pre_ptr + pre_place, width, sides, columns // unit < num_left // unit, SIDES, EVEN)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        results = (pre_ptr + pre_place, grad_ptr + pre_place, activation_ptr + place)
        # Most tiles have no row of weight zero and need no selection.
        if has_zero != 0:
            dots = _end_tile(
                total, pre, weight[:, None], results, bias_row_ptr, width, num_left, PARTS, EVEN, EARLY,
                ACTIVATION, ALPHA, LIMIT, SELECT=True,
            )  # fmt: skip
        else:
            dots = _end_tile(
                total, pre, weight[:, None], results, bias_row_ptr, width, num_left, PARTS, EVEN, EARLY,
                ACTIVATION, ALPHA, LIMIT, SELECT=False,
            )  # fmt: skip
        gl.store(dots_ptr + rows.to(gl.int64) * num_column_tiles + column_tile, dots)
    mark(trace_ptr, 0, 0, ENDED)
    mark(trace_ptr, 1, 0, ENDED)


@gluon.jit(do_not_specialize=["grad_y_stride", "num_steps", "d_hidden"])
def grad_of_hidden_specialised(
    grad_y_ptr,
    grad_y_stride,
    down_desc,
    pre_ptr,
    grad_ptr,
    activation_ptr,
    dots_ptr,
    bias_ptr,
    source_ptr,
    weight_ptr,
    expert_ptr,
    has_zero_ptr,
    num_tiles_ptr,
    num_steps,
    d_hidden,
    trace_ptr,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiply gathered rows of the output's gradient with down (e, D, H) and go back through the activation.

    A block of down is (1, DEPTH, COLUMNS). The gradient (P, 2H, or H without a gate) may overwrite the pre-activation:
    an element is read before it is written and by nobody else. The width of the output's gradient is a multiple of
    DEPTH, the hidden width one of 16 bytes, and where ``EVEN`` of COLUMNS. ``EARLY`` and ``AHEAD``: see
    ``hidden_gradients``. The bias (e, columns of the pre-activation) may be None. To be launched with 8 warps.
    """
    SIDES: gl.constexpr = 1 if ACTIVATION == "relu_squared" else 2
    HALF: gl.constexpr = ROWS // 2
    DEPTH: gl.constexpr = down_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = down_desc.block_type.shape[2]
    dtype: gl.constexpr = down_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], dtype)
    rows_buffer = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], rows_layout)
    weights_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, DEPTH, COLUMNS], down_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the weights, and one of each thread that copies.
        mbarrier.init(ready.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=1)
    # The copy engine sees the barriers too.
    fence_async_shared()
    # The same bytes in halves, as they are gathered.
    halves_buffer = rows_buffer._reinterpret(dtype, [2 * STAGES, HALF, DEPTH], rows_layout)
    barriers = (ready, empty, trace_ptr)
    pointers = (pre_ptr, grad_ptr, activation_ptr, dots_ptr, bias_ptr, weight_ptr, expert_ptr, has_zero_ptr)
    sizes = (gl.load(num_tiles_ptr), gl.cdiv(d_hidden, COLUMNS), num_steps)
    gl.warp_specialize(
        [
            (
                _multiply_and_go_back,
                (
                    (rows_buffer, weights_buffer), barriers, pointers, sizes, d_hidden, SIDES, ROWS, COLUMNS, DEPTH,
                    PARTS, BAND, STAGES, EVEN, EARLY, AHEAD, ACTIVATION, ALPHA, LIMIT,
                ),
            ),
            (
                gather_operands,
                (
                    down_desc, (halves_buffer, weights_buffer), barriers, grad_y_ptr, grad_y_stride, expert_ptr,
                    source_ptr, sizes, COLUMNS, HALF, DEPTH, BAND, STAGES,
                ),
            ),
        ],
        [4],
        [40],
    )  # fmt: skip


def fits(*, d_model: int, tile: Tile) -> bool:
    """Say whether the kernel can do this: any hidden width (of whole 16 bytes), activation and bias."""
    is_known = (tile.rows, tile.columns, tile.depth, tile.parts) == (128, 256, 64, 8) and tile.ring in (3, 4)
    return is_known and d_model % tile.depth == 0


def hidden_gradients(
    grad_y_SD: Tensor,
    product_PU: Tensor,
    layout: PaddedLayout,
    down: Tensor,
    tile: Tile,
    *,
    activation: Activation,
    bias: Tensor | None,
    overwrite: bool,
    num_programs: int,
    early: bool = False,
    ahead: bool = True,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``hidden_gradients`` of ``triton_launch.py`` does; only the dots are added up in another order.

    ``early`` loads a part of the pre-activation before the part before it is worked on, not after; ``ahead`` brings all
    of a tile to the cache while the tile is multiplied. ``trace`` (num_programs, 3), int32, takes how far the warps
    that multiply (in the first column) and those that load (in the last) are; ``warmup`` compiles and does not run.
    """
    d_model, d_hidden = down.shape[1], down.shape[2]
    assert fits(d_model=d_model, tile=tile)
    is_clamped = activation.name == "swiglu_clamped"
    grad_pre_PU = product_PU if overwrite else torch.empty_like(product_PU)
    activation_PH = product_PU.new_empty(layout.num_padded, d_hidden)
    dots_P = torch.empty(
        layout.num_padded, triton.cdiv(d_hidden, tile.columns), dtype=torch.float32, device=product_PU.device
    )
    grad_of_hidden_specialised.run(
        grad_y_SD,
        grad_y_SD.stride(0),
        descriptor(down, [1, tile.depth, tile.columns]),
        product_PU,
        grad_pre_PU,
        activation_PH,
        dots_P,
        bias,
        layout.source_P,
        layout.weight_P,
        layout.expert_M,
        layout.has_zero_M,
        layout.num_tiles_1,
        d_model // tile.depth,
        d_hidden,
        trace,
        ROWS=tile.rows,
        PARTS=tile.parts,
        BAND=tile.band,
        STAGES=tile.ring,
        EVEN=d_hidden % tile.columns == 0,
        EARLY=early,
        AHEAD=ahead,
        ACTIVATION=activation.name,
        ALPHA=activation.alpha if is_clamped else None,
        LIMIT=activation.limit if is_clamped else None,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=8,
        maxnreg=168,
    )
    return grad_pre_PU, activation_PH, dots_P
