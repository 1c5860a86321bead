"""Rows times weights with specialised warps, in Gluon: a try beside `rows_times_weights`, for Hopper.

One warp asks for the operands by TMA, a ring of stages ahead of two warpgroups that multiply. Each of the two has 64 of
the 128 rows of a tile and all 256 columns; they share the weights of a stage and nothing else, so that one may store
its half of a tile while the other multiplies, and the operands of the next tile are on their way meanwhile.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["ENDED", "descriptor", "mark", "multiply_specialised", "next_stage", "products_specialised", "stage_before"]

_place_of_tile = gluon.jit(place_of_tile.fn)
# What `mark` stores for a part that has done all.
ENDED = gl.constexpr(-2)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after this one, and the phase of its barriers."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """Return the stage before this one.

    Not a variable of the loop that is given ``stage`` there and had the same value before the loop: the compiler takes
    such a variable for one that the loop does not change.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def mark(trace_ptr, part: gl.constexpr, tile, step):
    """Store before a wait how far a part of this program is, for those who look at a kernel that does not end."""
    if trace_ptr is not None:
        gl.store(trace_ptr + 3 * gl.program_id(0) + part, tile * 1000 + step)


@gluon.jit
def _ask_for_operands(
    descs,
    buffers,
    barriers,
    expert_ptr,
    sizes,
    first_column,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
):
    rows_desc, weights_desc, _ = descs
    rows_buffer, weights_buffer, _ = buffers
    ready, empty, trace_ptr = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    ROWS: gl.constexpr = rows_desc.block_type.shape[0]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = gl.load(expert_ptr + row_tile)
        row = row_tile * 2 * ROWS
        column = first_column + column_tile * COLUMNS
        for step in range(num_steps):
            mark(trace_ptr, 2, tile, step)
            # A barrier begins as if a phase had ended: the first wait for each stage is for that.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, 2 * rows_desc.block_type.nbytes + weights_desc.block_type.nbytes)
            depth = step * DEPTH
            tma.async_copy_global_to_shared(rows_desc, [row, depth], bar, rows_buffer.index(2 * stage))
            tma.async_copy_global_to_shared(rows_desc, [row + ROWS, depth], bar, rows_buffer.index(2 * stage + 1))
            if TRANSPOSED:
                tma.async_copy_global_to_shared(weights_desc, [expert, column, depth], bar, weights_buffer.index(stage))
            else:
                tma.async_copy_global_to_shared(weights_desc, [expert, depth, column], bar, weights_buffer.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
    mark(trace_ptr, 2, 0, ENDED)


@gluon.jit
def _multiply_half(
    descs,
    buffers,
    barriers,
    sizes,
    SIDE: gl.constexpr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
):
    _, _, out_desc = descs
    rows_buffer, weights_buffer, out_buffer = buffers
    ready, empty, trace_ptr = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    WIDTH: gl.constexpr = out_desc.block_type.shape[1]
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    out_buffer = out_buffer.index(SIDE)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        total = gl.zeros((ROWS, COLUMNS), gl.float32, accumulators)
        for step in range(num_steps):
            mark(trace_ptr, SIDE, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            rows = rows_buffer.index(2 * stage + SIDE)
            if TRANSPOSED:
                weights = weights_buffer.index(stage).reshape([COLUMNS, DEPTH]).permute((1, 0))
            else:
                weights = weights_buffer.index(stage).reshape([DEPTH, COLUMNS])
            total = warpgroup_mma(rows, weights, total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        row = row_tile * 2 * ROWS + SIDE * ROWS
        column = column_tile * COLUMNS
        if WIDTH == COLUMNS:
            parts = (total,)
        else:
            gl.static_assert(2 * WIDTH == COLUMNS)
            parts = total.reshape(ROWS, 2, WIDTH).permute(0, 2, 1).split()
        for part in gl.static_range(COLUMNS // WIDTH):
            # The store before this one has read the buffer.
            tma.store_wait(pendings=0)
            out_buffer.store(parts[part].to(out_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, column + part * WIDTH], out_buffer)
    tma.store_wait(pendings=0)
    mark(trace_ptr, SIDE, 0, ENDED)


@gluon.jit(do_not_specialize=["num_steps", "first_column", "num_columns"])
def products_specialised(
    rows_desc,
    weights_desc,
    out_desc,
    expert_ptr,
    num_tiles_ptr,
    num_steps,
    first_column,
    num_columns,
    trace_ptr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Store columns first_column to first_column + num_columns of rows (P, depth) times the weights of their expert.

    Blocks of the descriptors: rows (64, DEPTH); weights (1, COLUMNS, DEPTH) if ``TRANSPOSED``, else (1, DEPTH,
    COLUMNS); products (64, COLUMNS or half of them). To be launched with 4 warps, which are one of the two warpgroups.
    """
    HALF: gl.constexpr = rows_desc.block_type.shape[0]
    rows_buffer = gl.allocate_shared_memory(rows_desc.dtype, [2 * STAGES, HALF, DEPTH], rows_desc.layout)
    WEIGHTS: gl.constexpr = [STAGES, 1, COLUMNS, DEPTH] if TRANSPOSED else [STAGES, 1, DEPTH, COLUMNS]
    weights_buffer = gl.allocate_shared_memory(weights_desc.dtype, WEIGHTS, weights_desc.layout)
    WIDTH: gl.constexpr = out_desc.block_type.shape[1]
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, [2, HALF, WIDTH], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # The copy engine sees the barriers too.
    fence_async_shared()
    descs = (rows_desc, weights_desc, out_desc)
    buffers = (rows_buffer, weights_buffer, out_buffer)
    barriers = (ready, empty, trace_ptr)
    sizes = (gl.load(num_tiles_ptr), gl.cdiv(num_columns, COLUMNS), num_steps)
    gl.warp_specialize(
        [
            (_multiply_half, (descs, buffers, barriers, sizes, 0, DEPTH, COLUMNS, BAND, TRANSPOSED, STAGES)),
            (_multiply_half, (descs, buffers, barriers, sizes, 1, DEPTH, COLUMNS, BAND, TRANSPOSED, STAGES)),
            (
                _ask_for_operands,
                (
                    descs, buffers, barriers, expert_ptr, sizes, first_column,
                    DEPTH, COLUMNS, BAND, TRANSPOSED, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def multiply_specialised(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    first: int,
    width: int,
    products: Tensor,
    num_programs: int,
    stages: int,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """Write what `launch._multiply` does to ``products``; 4 stages leave room for half a tile on its way out.

    ``trace`` (num_programs, 3) takes how far the two warpgroups that multiply and the one that loads are. ``warmup``
    compiles and does not run.
    """
    assert tile.rows == 128
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    products_specialised.run(
        descriptor(rows_PK, [64, tile.depth]),
        descriptor(weights, block),
        descriptor(products, [64, tile.columns // 2 if stages > 3 else tile.columns]),
        layout.expert_M,
        layout.num_tiles_1,
        -(-rows_PK.shape[1] // tile.depth),
        first,
        width,
        trace,
        DEPTH=tile.depth,
        COLUMNS=tile.columns,
        BAND=tile.band,
        TRANSPOSED=transposed,
        STAGES=stages,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=4,
        maxnreg=168,
    )
