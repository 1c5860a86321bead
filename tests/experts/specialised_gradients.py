"""Weight gradients with specialised warps, in Gluon: a try beside `grad_of_weights_in_turn`, for Hopper.

As in `specialised_up.py`: four warps gather rows and ask for the other rows by TMA, two warpgroups multiply. Each of
the two has 64 of the 128 columns of the gathered rows, and all 256 of the others.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
from coterie_experts.grouped_swiglu.triton_backward import _segment
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

__all__ = ["grad_of_weights_specialised", "weight_gradient_specialised"]

_place_of_tile = gluon.jit(place_of_tile.fn)
_segment_of = gluon.jit(_segment.fn)


@gluon.jit
def _gather_operands(
    rows_desc,
    buffers,
    barriers,
    gathered_ptr,
    gathered_stride,
    counted_ptr,
    segments_ptr,
    sizes,
    HALF: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
):
    gathered_buffer, rows_buffer, _ = buffers
    ready, empty, trace_ptr = barriers
    num_experts, num_padded, row_tiles, column_tiles = sizes
    tiles_of_expert = row_tiles * column_tiles
    # Eight threads copy 128 bytes of a row.
    places: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    steps = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, places))
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, places))[None, :]
    # A multiple of 16 bytes, which the compiler sees only where it divides and multiplies.
    unit: gl.constexpr = 128 // gathered_ptr.dtype.element_ty.primitive_bitwidth
    stride = (gathered_stride // unit * unit).to(gl.int64)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    first = gl.program_id(0)
    _, start, count = _segment_of(segments_ptr, first // tiles_of_expert, num_experts)
    next_source = gl.load(counted_ptr + start + steps, mask=count > 0, other=-1)
    for tile in range(first, num_experts * tiles_of_expert, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        # No rows take one step of zeros, past the last row.
        row = gl.where(count > 0, start, num_padded)
        num_steps = gl.maximum(gl.cdiv(count, DEPTH), 1)
        _, start, count = _segment_of(segments_ptr, (tile + gl.num_programs(0)) // tiles_of_expert, num_experts)
        first_column = row_tile * 2 * HALF
        for step in range(num_steps):
            # One step ahead, so that the gather does not wait for its own indices.
            source = next_source
            is_last = step + 1 == num_steps
            next_row = gl.where(is_last, start, row + DEPTH)
            next_source = gl.load(counted_ptr + next_row + steps, mask=(count > 0) | (step + 1 < num_steps), other=-1)
            mark(trace_ptr, 2, tile, step)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, rows_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(rows_desc, [row, column_tile * COLUMNS], bar, rows_buffer.index(stage))
            taken = gathered_ptr + first_column + source.to(gl.int64)[:, None] * stride + columns
            mask = (source >= 0)[:, None]
            # What the mask leaves out becomes zeros.
            async_copy.async_copy_global_to_shared(gathered_buffer.index(2 * stage), taken, mask)
            async_copy.async_copy_global_to_shared(gathered_buffer.index(2 * stage + 1), taken + HALF, mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            row += DEPTH
            stage, phase = next_stage(stage, phase, STAGES)
    mark(trace_ptr, 2, 0, ENDED)


@gluon.jit
def _multiply_half(
    out_desc,
    buffers,
    barriers,
    segments_ptr,
    sizes,
    SIDE: gl.constexpr,
    HALF: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
    FENCED: gl.constexpr,
):
    gathered_buffer, rows_buffer, out_buffer = buffers
    ready, empty, trace_ptr = barriers
    num_experts, _, row_tiles, column_tiles = sizes
    tiles_of_expert = row_tiles * column_tiles
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    WIDTH: gl.constexpr = out_desc.block_type.shape[1] if TRANSPOSED else out_desc.block_type.shape[2]
    gl.static_assert(2 * WIDTH == COLUMNS)
    out = out_buffer.index(SIDE)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_experts * tiles_of_expert, gl.num_programs(0)):
        expert, _, count = _segment_of(segments_ptr, tile // tiles_of_expert, num_experts)
        row_tile, column_tile = _place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        total = gl.zeros((HALF, COLUMNS), gl.float32, accumulators)
        for step in range(gl.maximum(gl.cdiv(count, DEPTH), 1)):
            mark(trace_ptr, SIDE, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            if FENCED:
                # The rows were copied by threads, and are read as the copy engine reads.
                fence_async_shared()
            left = gathered_buffer.index(2 * stage + SIDE).permute((1, 0))
            total = warpgroup_mma(left, rows_buffer.index(stage), total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        row = row_tile * 2 * HALF + SIDE * HALF
        parts = total.reshape(HALF, 2, WIDTH).permute(0, 2, 1).split()
        for part in gl.static_range(2):
            column = column_tile * COLUMNS + part * WIDTH
            value = parts[part].to(out_desc.dtype)
            # The store before this one has read the buffer.
            tma.store_wait(pendings=0)
            if TRANSPOSED:
                out.reshape([WIDTH, HALF]).permute((1, 0)).store(value)
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [expert, column, row], out)
            else:
                out.reshape([HALF, WIDTH]).store(value)
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [expert, row, column], out)
    tma.store_wait(pendings=0)
    mark(trace_ptr, SIDE, 0, ENDED)


@gluon.jit(do_not_specialize=["gathered_stride", "num_experts", "num_padded", "row_tiles", "column_tiles"])
def grad_of_weights_specialised(
    gathered_ptr,
    gathered_stride,
    rows_desc,
    out_desc,
    counted_ptr,
    segments_ptr,
    num_experts,
    num_padded,
    row_tiles,
    column_tiles,
    trace_ptr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
    FENCED: gl.constexpr,
):
    """Store gathered^T @ rows for each expert, or its transpose; zero for no rows.

    Blocks of the descriptors: rows (DEPTH, COLUMNS); gradients (1, 64, half of COLUMNS), or (1, half of COLUMNS, 64) if
    ``TRANSPOSED``. The width of the gathered rows is a multiple of 128. To be launched with 4 warps.
    """
    DEPTH: gl.constexpr = rows_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = rows_desc.block_type.shape[1]
    HALF: gl.constexpr = 64
    dtype: gl.constexpr = rows_desc.dtype
    BLOCK: gl.constexpr = [2, 1, COLUMNS // 2, HALF] if TRANSPOSED else [2, 1, HALF, COLUMNS // 2]
    # One layout serves both: their rows are cut in 128 bytes alike.
    gathered_buffer = gl.allocate_shared_memory(dtype, [2 * STAGES, DEPTH, HALF], rows_desc.layout)
    rows_buffer = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, COLUMNS], rows_desc.layout)
    out_buffer = gl.allocate_shared_memory(dtype, BLOCK, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the rows that come by TMA, and one of each thread that copies.
        mbarrier.init(ready.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    buffers = (gathered_buffer, rows_buffer, out_buffer)
    barriers = (ready, empty, trace_ptr)
    sizes = (num_experts, num_padded, row_tiles, column_tiles)
    gl.warp_specialize(
        [
            (
                _multiply_half,
                (
                    out_desc, buffers, barriers, segments_ptr, sizes,
                    0, HALF, COLUMNS, DEPTH, BAND, TRANSPOSED, STAGES, FENCED,
                ),
            ),
            (
                _multiply_half,
                (
                    out_desc, buffers, barriers, segments_ptr, sizes,
                    1, HALF, COLUMNS, DEPTH, BAND, TRANSPOSED, STAGES, FENCED,
                ),
            ),
            (
                _gather_operands,
                (
                    rows_desc, buffers, barriers, gathered_ptr, gathered_stride, counted_ptr, segments_ptr, sizes,
                    HALF, COLUMNS, DEPTH, BAND, STAGES,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


def weight_gradient_specialised(
    gathered_SW: Tensor,
    rows_PV: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    num_programs: int,
    stages: int,
    fenced: bool,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> Tensor:
    """Return what `launch.weight_gradient` does, with tiles taken in turn whatever the load of the experts."""
    num_experts, width, rows_width = layout.segments_e3.shape[0], gathered_SW.shape[1], rows_PV.shape[1]
    assert tile.rows == 128
    assert width % tile.rows == 0
    out = rows_PV.new_empty(num_experts, *((rows_width, width) if transposed else (width, rows_width)))
    grad_of_weights_specialised.run(
        gathered_SW,
        gathered_SW.stride(0),
        descriptor(rows_PV, [tile.depth, tile.columns]),
        descriptor(out, [1, tile.columns // 2, 64] if transposed else [1, 64, tile.columns // 2]),
        layout.counted_P,
        layout.segments_e3,
        num_experts,
        layout.num_padded,
        width // tile.rows,
        triton.cdiv(rows_width, tile.columns),
        trace,
        BAND=tile.band,
        TRANSPOSED=transposed,
        STAGES=stages,
        FENCED=fenced,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=4,
        maxnreg=168,
    )
    return out
