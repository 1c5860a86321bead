"""The up projection with SwiGLU and specialised warps, in Gluon: a try beside `up_with_activation`, for Hopper.

As in `specialised_products.py`, but rows are gathered: four warps copy them, 16 bytes a thread and copy, and ask for
the weights by TMA. A stage is ready when the copies of every thread and the weights have come.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

from coterie_experts.grouped_swiglu.triton_activation import fast_sigmoid
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile
from specialised_products import ENDED, descriptor, mark, next_stage, stage_before
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

__all__ = ["up_specialised", "up_with_activation_specialised"]

_place_of_tile = gluon.jit(place_of_tile.fn)
_fast_sigmoid = gluon.jit(fast_sigmoid.fn)


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
    rows_buffer, weights_buffer, _ = buffers
    ready, empty, trace_ptr = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    # Eight threads copy the 128 bytes of a row.
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
        row_tile, column_tile = _place_of_tile(tile + gl.num_programs(0), num_row_tiles, num_column_tiles, BAND)
        expert, upper, lower = _expert_and_sources(expert_ptr, source_ptr, row_tile, num_row_tiles, inside, HALF)
        for step in range(num_steps):
            depth = step * DEPTH
            mark(trace_ptr, 2, tile, step)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, weights_desc.block_type.nbytes)
            weights = weights_buffer.index(stage)
            tma.async_copy_global_to_shared(weights_desc, [this_expert, 0, hidden, depth], bar, weights)
            # What the mask leaves out becomes zeros.
            async_copy.async_copy_global_to_shared(rows_buffer.index(2 * stage), upper_rows + depth, upper_mask)
            async_copy.async_copy_global_to_shared(rows_buffer.index(2 * stage + 1), lower_rows + depth, lower_mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)
    mark(trace_ptr, 2, 0, ENDED)


@gluon.jit
def _multiply_and_activate(
    descs,
    buffers,
    barriers,
    weight_ptr,
    sizes,
    SIDE: gl.constexpr,
    HIDDEN: gl.constexpr,
    HALF: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    FENCED: gl.constexpr,
):
    rows_buffer, weights_buffer, out_buffer = buffers
    ready, empty, trace_ptr = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    dtype: gl.constexpr = descs[0].dtype
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * HIDDEN, 16]
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        row = row_tile * 2 * HALF + SIDE * HALF
        hidden = column_tile * HIDDEN
        total = gl.zeros((HALF, 2 * HIDDEN), gl.float32, accumulators)
        for step in range(num_steps):
            mark(trace_ptr, SIDE, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            if FENCED:
                # The rows were copied by threads, and are read as the copy engine reads.
                fence_async_shared()
            weights = weights_buffer.index(stage).reshape([2 * HIDDEN, DEPTH]).permute((1, 0))
            total = warpgroup_mma(rows_buffer.index(2 * stage + SIDE), weights, total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        gate, up = total.reshape(HALF, 2, HIDDEN).permute(0, 2, 1).split()
        inside = gl.arange(0, HALF, layout=gl.SliceLayout(1, gate.type.layout))
        weight = gl.load(weight_ptr + row + inside)[:, None]
        activation = gate * _fast_sigmoid(gate) * up * weight
        # Selected, not multiplied: zero times NaN is NaN.
        activation = gl.where(weight != 0, activation, 0.0)
        parts = (gate.to(dtype), up.to(dtype), activation.to(dtype))
        for part in gl.static_range(3):
            # The store that had this buffer has read it; of the tile before this one, all have.
            tma.store_wait(pendings=0 if part == 0 else BUFFERS - 1)
            out = out_buffer.index(SIDE * BUFFERS + part % BUFFERS)
            out.store(parts[part])
            fence_async_shared()
            tma.async_copy_shared_to_global(descs[part], [row, hidden], out)
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
    FENCED: gl.constexpr,
):
    """Store the products of rows gathered from x, and silu(gate) * up * weight.

    Blocks of the descriptors: weights (1, 2, HIDDEN, DEPTH), the others (64, HIDDEN). The widths are multiples of
    HIDDEN and DEPTH. To be launched with 4 warps.
    """
    HALF: gl.constexpr = gate_desc.block_type.shape[0]
    HIDDEN: gl.constexpr = gate_desc.block_type.shape[1]
    DEPTH: gl.constexpr = weights_desc.block_type.shape[3]
    dtype: gl.constexpr = gate_desc.dtype
    # One layout serves all: rows of DEPTH and of HIDDEN numbers are cut in 128 bytes alike.
    rows_buffer = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, DEPTH], gate_desc.layout)
    weights_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, HIDDEN, DEPTH], weights_desc.layout)
    out_buffer = gl.allocate_shared_memory(dtype, [2 * BUFFERS, HALF, HIDDEN], gate_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the weights, and one of each thread that copies.
        mbarrier.init(ready.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    descs = (gate_desc, up_desc, activation_desc)
    buffers = (rows_buffer, weights_buffer, out_buffer)
    barriers = (ready, empty, trace_ptr)
    sizes = (gl.load(num_tiles_ptr), gl.cdiv(d_hidden, HIDDEN), num_steps)
    gl.warp_specialize(
        [
            (
                _multiply_and_activate,
                (
                    descs, buffers, barriers, weight_ptr, sizes,
                    0, HIDDEN, HALF, DEPTH, BAND, STAGES, BUFFERS, FENCED,
                ),
            ),
            (
                _multiply_and_activate,
                (
                    descs, buffers, barriers, weight_ptr, sizes,
                    1, HIDDEN, HALF, DEPTH, BAND, STAGES, BUFFERS, FENCED,
                ),
            ),
            (
                _gather_operands,
                (
                    weights_desc, buffers, barriers, x_ptr, x_stride, expert_ptr, source_ptr, sizes,
                    HIDDEN, HALF, DEPTH, BAND, STAGES,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


def up_specialised(
    x_SD: Tensor,
    layout: PaddedLayout,
    up: Tensor,
    tile: Tile,
    *,
    num_programs: int,
    stages: int,
    fenced: bool,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `launch.pre_and_activation` does for SwiGLU; 4 stages leave one buffer for results, 3 leave two.

    Without the fence it is what Triton itself makes of a gather: nothing orders the copies of threads and `wgmma`.
    """
    num_experts, d_pre, d_model = up.shape
    d_hidden, hidden = d_pre // 2, tile.columns
    assert tile.rows == 128
    assert d_model % tile.depth == 0
    assert d_hidden % hidden == 0
    product_PU = x_SD.new_empty(layout.num_padded, d_pre)
    activation_PH = x_SD.new_empty(layout.num_padded, d_hidden)
    up_with_activation_specialised.run(
        x_SD,
        x_SD.stride(0),
        descriptor(up.view(num_experts, 2, d_hidden, d_model), [1, 2, hidden, tile.depth]),
        descriptor(product_PU[:, :d_hidden], [64, hidden]),
        descriptor(product_PU[:, d_hidden:], [64, hidden]),
        descriptor(activation_PH, [64, hidden]),
        layout.source_P,
        layout.weight_P,
        layout.expert_M,
        layout.num_tiles_1,
        d_model // tile.depth,
        d_hidden,
        trace,
        BAND=tile.band,
        STAGES=stages,
        BUFFERS=1 if stages > 3 else 2,
        FENCED=fenced,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=4,
        maxnreg=168,
    )
    return product_PU, activation_PH
