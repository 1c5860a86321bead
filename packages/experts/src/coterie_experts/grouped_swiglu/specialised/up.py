"""The up projection with its activation, by specialised warps; see ``up_with_activation`` for what is computed.

Four warps gather rows, 16 bytes a thread and copy, and ask for the weights by TMA; a stage is ready when the copies of
every thread and the weights have come. Each of the two warpgroups that multiply has 64 of the 128 rows of a tile and
all of its columns.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from coterie_experts.activation import Activation
from coterie_experts.grouped_swiglu.specialised.ring import (
    ENDED,
    descriptor,
    load_block,
    load_elements,
    mark,
    next_stage,
    stage_before,
    store_block,
)
from coterie_experts.grouped_swiglu.triton_activation import fast_sigmoid, held_below, held_within
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile

__all__ = ["fits", "pre_and_activation", "up_with_activation_specialised"]

_place_of_tile = gluon.jit(place_of_tile.fn)
_fast_sigmoid = gluon.jit(fast_sigmoid.fn)
_held_below = gluon.jit(held_below.fn)
_held_within = gluon.jit(held_within.fn)


@gluon.jit
def _expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside, HALF: gl.constexpr):
    """Load the expert of a row tile and the sources of its two halves; of a tile past the last one nothing."""
    known = row_tile < num_row_tiles
    expert = gl.load(expert_ptr + row_tile, mask=known, other=0)
    places = source_ptr + row_tile * 2 * HALF + inside
    return expert, gl.load(places, mask=known, other=-1), gl.load(places + HALF, mask=known, other=-1)


@gluon.jit
def _gather_operands(
    weights_desc,
    buffers,
    barriers,
    x_ptr,
    x_stride,
    expert_ptr,
    source_ptr,
    sizes,
    HIDDEN: gl.constexpr,
    HALF: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the stages of all tiles of this program: rows gathered from x, and weights of their expert."""
    rows_buffer, weights_buffer = buffers
    ready, empty, trace_ptr = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    # Eight threads copy 128 bytes of a row.
    places: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    inside = gl.arange(0, HALF, layout=gl.SliceLayout(1, places))
    columns = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, places))[None, :]
    # A multiple of 16 bytes, which the compiler sees only where it divides and multiplies.
    unit: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    stride = (x_stride // unit * unit).to(gl.int64)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    first = gl.program_id(0)
    row_tile, column_tile = _place_of_tile(first, num_row_tiles, num_column_tiles, BAND)
    expert, upper, lower = _expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside, HALF)
    for tile in range(first, num_row_tiles * num_column_tiles, gl.num_programs(0)):
        hidden = column_tile * HIDDEN
        this_expert = expert
        upper_rows = x_ptr + upper.to(gl.int64)[:, None] * stride + columns
        lower_rows = x_ptr + lower.to(gl.int64)[:, None] * stride + columns
        upper_mask = (upper >= 0)[:, None]
        lower_mask = (lower >= 0)[:, None]
        # The next tile's sources are on their way while this tile is filled.
        row_tile, column_tile = _place_of_tile(tile + gl.num_programs(0), num_row_tiles, num_column_tiles, BAND)
        expert, upper, lower = _expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside, HALF)
        for step in range(num_steps):
            depth = step * DEPTH
            mark(trace_ptr, 2, tile, step)
            # A barrier begins as if a phase had ended: the first wait for each stage is for that.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, weights_desc.block_type.nbytes)
            weights = weights_buffer.index(stage)
            load_block(weights_desc, [this_expert, 0, hidden, depth], bar, weights)
            # What the mask leaves out becomes zeros.
            load_elements(rows_buffer.index(2 * stage), upper_rows + depth, upper_mask)
            load_elements(rows_buffer.index(2 * stage + 1), lower_rows + depth, lower_mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)
    mark(trace_ptr, 2, 0, ENDED)


@gluon.jit
def _bias_of_part(bias_row_ptr, first, width, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Load ``WIDTH`` columns of a row of a bias as float32, (1, WIDTH), zero past its width."""
    columns = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    return gl.load(bias_row_ptr + columns, mask=columns < width, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _activation(gate, up, weight, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    if ACTIVATION == "swiglu":
        activation = gate * _fast_sigmoid(gate) * up * weight
    elif ACTIVATION == "swiglu_clamped":
        gate = _held_below(gate, LIMIT)
        activation = gate * _fast_sigmoid(ALPHA * gate) * (_held_within(up, LIMIT) + 1.0) * weight
    else:
        gl.static_assert(ACTIVATION == "relu_squared")
        relu = gl.where(gate < 0.0, 0.0, gate)
        activation = relu * relu * weight
    # Selected, not multiplied: zero times NaN is NaN.
    return gl.where(weight != 0, activation, 0.0)


@gluon.jit
def _send(desc, out_buffer, row, column, value, SIDE: gl.constexpr, NUMBER: gl.constexpr, BUFFERS: gl.constexpr):
    """Store a block by way of the buffer whose turn it is."""
    # The store that had this buffer has read it; of the tile before this one, all have.
    tma.store_wait(pendings=0 if NUMBER == 0 else BUFFERS - 1)
    out = out_buffer.index(SIDE * BUFFERS + NUMBER % BUFFERS)
    out.store(value.to(desc.dtype))
    fence_async_shared()
    store_block(desc, [row, column], out)


@gluon.jit
def _multiply_and_activate(
    descs,
    buffers,
    barriers,
    pointers,
    sizes,
    d_hidden,
    SIDE: gl.constexpr,
    HALF: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    gate_desc, up_desc, activation_desc = descs
    rows_buffer, weights_buffer, out_buffer = buffers
    ready, empty, trace_ptr = barriers
    bias_ptr, weight_ptr, expert_ptr = pointers
    num_row_tiles, num_column_tiles, num_steps = sizes
    WIDTH: gl.constexpr = gate_desc.block_type.shape[1]
    # Hidden units of a tile.
    HIDDEN: gl.constexpr = 2 * WIDTH if up_desc is None else WIDTH
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * WIDTH, 16]
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        row = row_tile * 2 * HALF + SIDE * HALF
        hidden = column_tile * HIDDEN
        total = gl.zeros((HALF, 2 * WIDTH), gl.float32, accumulators)
        for step in range(num_steps):
            mark(trace_ptr, SIDE, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            # The rows were copied by threads, and are read as the copy engine reads.
            fence_async_shared()
            weights = weights_buffer.index(stage).reshape([2 * WIDTH, DEPTH]).permute((1, 0))
            total = warpgroup_mma(rows_buffer.index(2 * stage + SIDE), weights, total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        # Gate and up, or of an activation without a gate two halves of the hidden units.
        left, right = total.reshape(HALF, 2, WIDTH).permute(0, 2, 1).split()
        layout: gl.constexpr = left.type.layout
        weight = gl.load(weight_ptr + row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)))[:, None]
        bias_row_ptr = None
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + gl.load(expert_ptr + row_tile).to(gl.int64) * (d_hidden * 2 * WIDTH // HIDDEN)
        if up_desc is None:
            for part in gl.static_range(2):
                column = hidden + part * WIDTH
                gate = (left, right)[part]
                _send(gate_desc, out_buffer, row, column, gate, SIDE, 2 * part, BUFFERS)
                if bias_ptr is not None:
                    gate += _bias_of_part(bias_row_ptr, column, d_hidden, WIDTH, layout)
                activation = _activation(gate, None, weight, ACTIVATION, ALPHA, LIMIT)
                _send(activation_desc, out_buffer, row, column, activation, SIDE, 2 * part + 1, BUFFERS)
        else:
            _send(gate_desc, out_buffer, row, hidden, left, SIDE, 0, BUFFERS)
            _send(up_desc, out_buffer, row, hidden, right, SIDE, 1, BUFFERS)
            if bias_ptr is not None:
                left += _bias_of_part(bias_row_ptr, hidden, d_hidden, WIDTH, layout)
                right += _bias_of_part(bias_row_ptr + d_hidden, hidden, d_hidden, WIDTH, layout)
            activation = _activation(left, right, weight, ACTIVATION, ALPHA, LIMIT)
            _send(activation_desc, out_buffer, row, hidden, activation, SIDE, 2, BUFFERS)
    tma.store_wait(pendings=0)
    mark(trace_ptr, SIDE, 0, ENDED)


@gluon.jit(do_not_specialize=["x_stride", "num_steps", "d_hidden"])
def up_with_activation_specialised(
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
    num_tiles_ptr,
    num_steps,
    d_hidden,
    trace_ptr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Store the products of rows gathered from x, and act(product + bias) * weight.

    Blocks of the descriptors: weights (1, 2, WIDTH, DEPTH), or without a gate (1, 1, 2 WIDTH, DEPTH) and no
    ``up_desc``; the others (64, WIDTH). ``BUFFERS`` of these can be on their way out of each half of a tile. The width
    of x is a multiple of DEPTH. The bias (e, columns of the products) may be None. To be launched with 4 warps.
    """
    HALF: gl.constexpr = gate_desc.block_type.shape[0]
    WIDTH: gl.constexpr = gate_desc.block_type.shape[1]
    BLOCK: gl.constexpr = weights_desc.block_type.shape
    HIDDEN: gl.constexpr = BLOCK[2]
    DEPTH: gl.constexpr = BLOCK[3]
    dtype: gl.constexpr = gate_desc.dtype
    # One layout serves all: rows of DEPTH and of WIDTH numbers are cut in 128 bytes alike.
    rows_buffer = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, DEPTH], gate_desc.layout)
    weights_buffer = gl.allocate_shared_memory(
        dtype, [STAGES, 1, 2 * WIDTH // HIDDEN, HIDDEN, DEPTH], weights_desc.layout
    )
    out_buffer = gl.allocate_shared_memory(dtype, [2 * BUFFERS, HALF, WIDTH], gate_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the weights, and one of each thread that copies.
        mbarrier.init(ready.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=2)
    # The copy engine sees the barriers too.
    fence_async_shared()
    descs = (gate_desc, up_desc, activation_desc)
    buffers = (rows_buffer, weights_buffer, out_buffer)
    barriers = (ready, empty, trace_ptr)
    pointers = (bias_ptr, weight_ptr, expert_ptr)
    sizes = (gl.load(num_tiles_ptr), gl.cdiv(d_hidden, HIDDEN), num_steps)
    gl.warp_specialize(
        [
            (
                _multiply_and_activate,
                (
                    descs, buffers, barriers, pointers, sizes, d_hidden,
                    0, HALF, DEPTH, BAND, STAGES, BUFFERS, ACTIVATION, ALPHA, LIMIT,
                ),
            ),
            (
                _multiply_and_activate,
                (
                    descs, buffers, barriers, pointers, sizes, d_hidden,
                    1, HALF, DEPTH, BAND, STAGES, BUFFERS, ACTIVATION, ALPHA, LIMIT,
                ),
            ),
            (
                _gather_operands,
                (
                    weights_desc, (rows_buffer, weights_buffer), barriers, x_ptr, x_stride, expert_ptr, source_ptr,
                    sizes, HIDDEN, HALF, DEPTH, BAND, STAGES,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


def fits(*, d_model: int, tile: Tile) -> bool:
    """Say whether the kernel can do this: any hidden width (of whole 16 bytes), activation and bias."""
    return (tile.rows, tile.columns, tile.depth) == (128, 128, 64) and tile.ring in (3, 4) and d_model % tile.depth == 0


def pre_and_activation(
    x_SD: Tensor,
    layout: PaddedLayout,
    up: Tensor,
    tile: Tile,
    *,
    activation: Activation,
    bias: Tensor | None,
    num_programs: int,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what ``pre_and_activation`` of ``triton_launch.py`` does.

    ``trace`` (num_programs, 3), int32, takes how far the two warpgroups that multiply and the warps that load are;
    ``warmup`` compiles and does not run.
    """
    num_experts, d_pre, d_model = up.shape
    assert fits(d_model=d_model, tile=tile)
    sides = 2 if activation.is_gated else 1
    d_hidden, width = d_pre // sides, tile.columns
    is_clamped = activation.name == "swiglu_clamped"
    product_PU = x_SD.new_empty(layout.num_padded, d_pre)
    activation_PH = x_SD.new_empty(layout.num_padded, d_hidden)
    block = [1, sides, 2 * width // sides, tile.depth]
    up_with_activation_specialised.run(
        x_SD,
        x_SD.stride(0),
        descriptor(up.view(num_experts, sides, d_hidden, d_model), block),
        descriptor(product_PU[:, :d_hidden], [64, width]),
        descriptor(product_PU[:, d_hidden:], [64, width]) if activation.is_gated else None,
        descriptor(activation_PH, [64, width]),
        bias,
        layout.source_P,
        layout.weight_P,
        layout.expert_M,
        layout.num_tiles_1,
        triton.cdiv(d_model, tile.depth),
        d_hidden,
        trace,
        BAND=tile.band,
        STAGES=tile.ring,
        # What four stages leave room for.
        BUFFERS=1 if tile.ring > 3 else 2,
        ACTIVATION=activation.name,
        ALPHA=activation.alpha if is_clamped else None,
        LIMIT=activation.limit if is_clamped else None,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=True,
    )
    return product_PU, activation_PH
