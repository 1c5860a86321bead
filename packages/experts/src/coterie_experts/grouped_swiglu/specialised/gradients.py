"""Weight gradients with warps that have roles, in Gluon, for compute capability 9.

Four warps gather rows and ask for the other rows by TMA, a ring of stages ahead of two warpgroups that multiply. Each
of the two has 64 of the 128 columns of the gathered rows, and all 256 of the others.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
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
from coterie_experts.grouped_swiglu.triton_backward import segment
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile

__all__ = ["fits", "grad_of_weights", "weight_gradient"]

_place_of_tile = gluon.jit(place_of_tile.fn)
_segment_of = gluon.jit(segment.fn)
# One number, which every thread holds.
_ALONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _draw_tile(counter_ptr, drawn, turn):
    """Return the tile after this one, drawn from the counter, and tell it to those that multiply."""
    numbers, told, taken = drawn
    place, phase = turn
    number = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
    mbarrier.wait(taken.index(place), phase ^ 1)
    numbers.index(place).store(gl.full([1], number, gl.int32, _ALONE))
    mbarrier.arrive(told.index(place), count=1)
    return number


@gluon.jit
def _told_tile(drawn, turn):
    """Return the tile after this one, as those that load have it."""
    numbers, told, taken = drawn
    place, phase = turn
    mbarrier.wait(told.index(place), phase)
    number = gl.sum(numbers.index(place).load(_ALONE), 0)
    mbarrier.arrive(taken.index(place), count=1)
    return number


@gluon.jit
def _gather_operands(
    rows_desc,
    buffers,
    barriers,
    drawn,
    gathered_ptr,
    gathered_stride,
    counted_ptr,
    segments_ptr,
    counter_ptr,
    sizes,
    HALF: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
):
    gathered_buffer, rows_buffer, _ = buffers
    ready, empty, _, trace_ptr = barriers
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
    place = gl.to_tensor(0)
    place_phase = gl.to_tensor(0)
    tile = gl.program_id(0)
    _, start, count = _segment_of(segments_ptr, tile // tiles_of_expert, num_experts)
    next_source = gl.load(counted_ptr + start + steps, mask=count > 0, other=-1)
    while tile < num_experts * tiles_of_expert:
        # Long before the tile is needed: the ring of stages is full, and hides how long a draw takes.
        next_tile = _draw_tile(counter_ptr, drawn, (place, place_phase))
        place, place_phase = next_stage(place, place_phase, STAGES)
        row_tile, column_tile = _place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        # No rows take one step of zeros, past the last row.
        row = gl.where(count > 0, start, num_padded)
        num_steps = gl.maximum(gl.cdiv(count, DEPTH), 1)
        _, start, count = _segment_of(segments_ptr, next_tile // tiles_of_expert, num_experts)
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
            load_block(rows_desc, [row, column_tile * COLUMNS], bar, rows_buffer.index(stage))
            taken = gathered_ptr + first_column + source.to(gl.int64)[:, None] * stride + columns
            mask = (source >= 0)[:, None]
            # What the mask leaves out becomes zeros.
            load_elements(gathered_buffer.index(2 * stage), taken, mask)
            load_elements(gathered_buffer.index(2 * stage + 1), taken + HALF, mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            row += DEPTH
            stage, phase = next_stage(stage, phase, STAGES)
        tile = next_tile
    mark(trace_ptr, 2, 0, ENDED)


@gluon.jit
def _in_parts(total, PARTS: gl.constexpr):
    if PARTS == 1:
        return (total,)
    else:
        left, right = total.reshape(total.shape[0], 2, total.shape[1] // 2).permute(0, 2, 1).split()
        return _in_parts(left, PARTS // 2) + _in_parts(right, PARTS // 2)


@gluon.jit
def _as_rows(part, WIDTH: gl.constexpr, HALF: gl.constexpr, TRANSPOSED: gl.constexpr):
    """See a part of a tile in shared memory as (HALF, WIDTH), however it lies there."""
    if TRANSPOSED:
        return part.reshape([WIDTH, HALF]).permute((1, 0))
    else:
        return part.reshape([HALF, WIDTH])


@gluon.jit
def _present(out_desc, out_ptr, place, part, width, TRANSPOSED: gl.constexpr, layout: gl.constexpr):
    """Return what there is at a part of a tile, (HALF, WIDTH); zeros past the last column."""
    expert, row, first_column = place
    HALF: gl.constexpr = out_desc.block_type.shape[2] if TRANSPOSED else out_desc.block_type.shape[1]
    WIDTH: gl.constexpr = out_desc.block_type.shape[1] if TRANSPOSED else out_desc.block_type.shape[2]
    first_column += part * WIDTH
    rows = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    # Two numbers at a time, and rows of whole 16 bytes, which the compiler sees only where both are divided.
    mask = columns // 2 < (width - first_column) // 2
    stride = out_desc.strides[1] // 4 * 4
    start = out_ptr + expert.to(gl.int64) * (out_desc.strides[0] // 4 * 4)
    # Places within a tile that are the same for all tiles would be kept in registers from one to the next.
    if TRANSPOSED:
        from_row = (first_column + columns).to(gl.int64) * stride
        return gl.load(start + row + from_row + rows, mask=mask, other=0.0)
    else:
        from_row = (row + rows).to(gl.int64) * stride
        return gl.load(start + first_column + from_row + columns, mask=mask, other=0.0)


@gluon.jit
def _multiply_half(
    out_desc,
    out_ptr,
    width,
    buffers,
    barriers,
    drawn,
    segments_ptr,
    sizes,
    SIDE: gl.constexpr,
    HALF: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    gathered_buffer, rows_buffer, out_buffer = buffers
    ready, empty, present, trace_ptr = barriers
    num_experts, _, row_tiles, column_tiles = sizes
    tiles_of_expert = row_tiles * column_tiles
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    WIDTH: gl.constexpr = out_desc.block_type.shape[1] if TRANSPOSED else out_desc.block_type.shape[2]
    PARTS: gl.constexpr = COLUMNS // WIDTH
    # Of a part: the same threads hold the same numbers.
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    ADDS: gl.constexpr = out_ptr is not None
    # Parts of what is there that come to the slots; the next two come to registers.
    IN_SLOTS: gl.constexpr = SLOTS if ADDS else 0
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    place = gl.to_tensor(0)
    place_phase = gl.to_tensor(0)
    present_phase = gl.to_tensor(0)
    tile = gl.program_id(0)
    expert, _, count = _segment_of(segments_ptr, tile // tiles_of_expert, num_experts)
    while tile < num_experts * tiles_of_expert:
        row_tile, column_tile = _place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        row = row_tile * 2 * HALF + SIDE * HALF
        column = column_tile * COLUMNS
        total = gl.zeros((HALF, COLUMNS), gl.float32, accumulators)
        for step in range(gl.maximum(gl.cdiv(count, DEPTH), 1)):
            mark(trace_ptr, SIDE, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            # The rows were copied by threads, and are read as the copy engine reads.
            fence_async_shared()
            left = gathered_buffer.index(2 * stage + SIDE).permute((1, 0))
            total = warpgroup_mma(left, rows_buffer.index(stage), total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            if IN_SLOTS > 0:
                # Beside the first product: the stores of the tile before this one have read the slots.
                tma.store_wait(pendings=0)
                for part in gl.static_range(IN_SLOTS):
                    slot = SIDE * SLOTS + part
                    bar = present.index(slot)
                    mbarrier.expect(bar, out_desc.block_type.nbytes, pred=step == 0)
                    from_column = column + part * WIDTH
                    where = [expert, from_column, row] if TRANSPOSED else [expert, row, from_column]
                    load_block(out_desc, where, bar, out_buffer.index(slot), pred=step == 0)
            stage, phase = next_stage(stage, phase, STAGES)
        if ADDS:
            # Beside the last product.
            this = _present(out_desc, out_ptr, (expert, row, column), IN_SLOTS, width, TRANSPOSED, layout)
            following = _present(out_desc, out_ptr, (expert, row, column), IN_SLOTS + 1, width, TRANSPOSED, layout)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        next_tile = _told_tile(drawn, (place, place_phase))
        place, place_phase = next_stage(place, place_phase, STAGES)
        next_expert, _, next_count = _segment_of(segments_ptr, next_tile // tiles_of_expert, num_experts)
        parts = _in_parts(total, PARTS)
        for part in gl.static_range(PARTS):
            value = gl.convert_layout(parts[part], layout, assert_trivial=True)
            slot = SIDE * SLOTS + part % SLOTS
            out = out_buffer.index(slot)
            as_rows = _as_rows(out, WIDTH, HALF, TRANSPOSED)
            if part < IN_SLOTS:
                mbarrier.wait(present.index(slot), present_phase)
                value += as_rows.load(layout)
            elif ADDS:
                value += this
                this = following
                if part + 2 < PARTS:
                    following = _present(out_desc, out_ptr, (expert, row, column), part + 2, width, TRANSPOSED, layout)
            if part >= IN_SLOTS:
                # The last store from this slot has read it.
                tma.store_wait(pendings=SLOTS - 1)
            as_rows.store(value.to(out_desc.dtype))
            fence_async_shared()
            to_column = column + part * WIDTH
            where = [expert, to_column, row] if TRANSPOSED else [expert, row, to_column]
            store_block(out_desc, where, out)
        present_phase ^= 1
        tile = next_tile
        expert = next_expert
        count = next_count
    tma.store_wait(pendings=0)
    mark(trace_ptr, SIDE, 0, ENDED)


@gluon.jit(do_not_specialize=["gathered_stride"])
def grad_of_weights(
    gathered_ptr,
    gathered_stride,
    rows_desc,
    out_desc,
    out_ptr,
    counted_ptr,
    segments_ptr,
    counter_ptr,
    trace_ptr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Store gathered^T @ rows for each expert, or its transpose; zero for no rows. Add it to what is at ``out_ptr``.

    Blocks of the descriptors: rows (DEPTH, COLUMNS); gradients (1, 64, a part of COLUMNS), or (1, a part of COLUMNS,
    64) if ``TRANSPOSED``. The width of the gathered rows is a multiple of 128. To be launched with 4 warps.

    Programs draw their tiles from a counter, those of experts with many rows first, so that none ends long after the
    others; who computes a tile does not change its bits. A warpgroup's half of a tile leaves in parts through ``SLOTS``
    slots. With ``out_ptr``, which is not None where gradients are added, as many parts of what is there come to the
    slots by TMA while the tile is multiplied, and the next two to registers beside the last product.
    """
    DEPTH: gl.constexpr = rows_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = rows_desc.block_type.shape[1]
    HALF: gl.constexpr = 64
    dtype: gl.constexpr = rows_desc.dtype
    BLOCK: gl.constexpr = out_desc.block_type.shape
    # One layout serves both: their rows are cut in 128 bytes alike.
    gathered_buffer = gl.allocate_shared_memory(dtype, [2 * STAGES, DEPTH, HALF], rows_desc.layout)
    rows_buffer = gl.allocate_shared_memory(dtype, [STAGES, DEPTH, COLUMNS], rows_desc.layout)
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, [2 * SLOTS, BLOCK[0], BLOCK[1], BLOCK[2]], out_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    present = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the rows that come by TMA, and one of each thread that copies.
        mbarrier.init(ready.index(stage), count=1 + 128)
        mbarrier.init(empty.index(stage), count=2)
        mbarrier.init(told.index(stage), count=1)
        mbarrier.init(taken.index(stage), count=2)
    for slot in gl.static_range(2 * SLOTS):
        mbarrier.init(present.index(slot), count=1)
    fence_async_shared()
    buffers = (gathered_buffer, rows_buffer, out_buffer)
    barriers = (ready, empty, present, trace_ptr)
    drawn = (numbers, told, taken)
    width = rows_desc.shape[1]
    gathered_width = out_desc.shape[2] if TRANSPOSED else out_desc.shape[1]
    sizes = (out_desc.shape[0], rows_desc.shape[0], gathered_width // (2 * HALF), gl.cdiv(width, COLUMNS))
    gl.warp_specialize(
        [
            (
                _multiply_half,
                (
                    out_desc, out_ptr, width, buffers, barriers, drawn, segments_ptr, sizes,
                    0, HALF, COLUMNS, DEPTH, BAND, TRANSPOSED, STAGES, SLOTS,
                ),
            ),
            (
                _multiply_half,
                (
                    out_desc, out_ptr, width, buffers, barriers, drawn, segments_ptr, sizes,
                    1, HALF, COLUMNS, DEPTH, BAND, TRANSPOSED, STAGES, SLOTS,
                ),
            ),
            (
                _gather_operands,
                (
                    rows_desc, buffers, barriers, drawn, gathered_ptr, gathered_stride, counted_ptr, segments_ptr,
                    counter_ptr, sizes, HALF, COLUMNS, DEPTH, BAND, STAGES,
                ),
            ),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


def fits(*, gathered_width: int, rows_width: int, tile: Tile) -> bool:
    """Say whether `weight_gradient` can do a case; the width of the rows need not be a multiple of the tile's."""
    is_whole = gathered_width % 128 == 0 and rows_width % 8 == 0
    return is_whole and (tile.rows, tile.columns, tile.depth) == (128, 256, 64) and tile.ring in (3, 4)


def weight_gradient(
    gathered_SW: Tensor,
    rows_PV: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    main_grad: Tensor | None,
    num_programs: int,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> Tensor | None:
    """Do what ``weight_gradient`` of ``triton_launch.py`` does, bit for bit; ``main_grad`` is contiguous.

    ``trace`` (num_programs, 3), int32, takes how far the two warpgroups that multiply and the warps that load are;
    ``warmup`` compiles and does not run.
    """
    num_experts, gathered_width, rows_width = layout.segments_e3.shape[0], gathered_SW.shape[1], rows_PV.shape[1]
    assert fits(gathered_width=gathered_width, rows_width=rows_width, tile=tile)
    # What the ring leaves room for.
    slots = 2 if tile.ring == 3 else 1
    shape = (rows_width, gathered_width) if transposed else (gathered_width, rows_width)
    out = rows_PV.new_empty(num_experts, *shape) if main_grad is None else main_grad
    # 16 KiB.
    part = tile.columns // 2 if main_grad is None else tile.columns // 4
    grad_of_weights.run(
        gathered_SW,
        gathered_SW.stride(0),
        descriptor(rows_PV, [tile.depth, tile.columns]),
        descriptor(out, [1, part, 64] if transposed else [1, 64, part]),
        main_grad,
        layout.counted_P,
        layout.segments_e3,
        torch.zeros(1, dtype=torch.int32, device=out.device),
        trace,
        BAND=tile.band,
        TRANSPOSED=transposed,
        STAGES=tile.ring,
        SLOTS=slots,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=True,
    )
    return out if main_grad is None else None
