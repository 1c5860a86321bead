"""Rows times weights with specialised warps; see ``rows_times_weights`` for what is computed.

One warp asks for the operands by TMA. Each of the two warpgroups that multiply has 64 of the 128 rows of a tile and all
of its columns; they share the weights of a stage and nothing else. A half tile leaves through shared memory, whole or
in two parts of its columns: by TMA, or where rows are scattered by threads that have 16 bytes each.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
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

from coterie_experts.grouped_swiglu.specialised.ring import (
    ENDED,
    descriptor,
    load_block,
    mark,
    next_stage,
    stage_before,
    store_block,
)
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, place_of_tile

__all__ = ["fits", "multiply", "rows_times_weights_specialised"]

_place_of_tile = gluon.jit(place_of_tile.fn)


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
    HALF: gl.constexpr = rows_desc.block_type.shape[0]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        expert = gl.load(expert_ptr + row_tile)
        row = row_tile * 2 * HALF
        column = first_column + column_tile * COLUMNS
        for step in range(num_steps):
            mark(trace_ptr, 2, tile, step)
            # A barrier begins as if a phase had ended: the first wait for each stage is for that.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, 2 * rows_desc.block_type.nbytes + weights_desc.block_type.nbytes)
            depth = step * DEPTH
            load_block(rows_desc, [row, depth], bar, rows_buffer.index(2 * stage))
            load_block(rows_desc, [row + HALF, depth], bar, rows_buffer.index(2 * stage + 1))
            if TRANSPOSED:
                load_block(weights_desc, [expert, column, depth], bar, weights_buffer.index(stage))
            else:
                load_block(weights_desc, [expert, depth, column], bar, weights_buffer.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
    mark(trace_ptr, 2, 0, ENDED)


@gluon.jit
def _multiply_half(
    descs,
    buffers,
    barriers,
    pointers,
    sizes,
    strides,
    num_columns,
    SIDE: gl.constexpr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    rows_desc, _, out_desc = descs
    rows_buffer, weights_buffer, out_buffer = buffers
    ready, empty, trace_ptr = barriers
    expert_ptr, source_ptr, out_ptr, weight_ptr, bias_ptr = pointers
    num_row_tiles, num_column_tiles, num_steps = sizes
    out_stride, bias_stride = strides
    HALF: gl.constexpr = rows_desc.block_type.shape[0]
    WIDTH: gl.constexpr = COLUMNS // PARTS
    accumulators: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    # Neighbouring threads have the whole width of a row, 16 bytes each.
    UNIT: gl.constexpr = 128 // rows_desc.dtype.primitive_bitwidth
    THREADS: gl.constexpr = WIDTH // UNIT
    wide: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 // THREADS, THREADS], [4, 1], [1, 0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of_tile(tile, num_row_tiles, num_column_tiles, BAND)
        total = gl.zeros((HALF, COLUMNS), gl.float32, accumulators)
        for step in range(num_steps):
            mark(trace_ptr, SIDE, tile, step)
            mbarrier.wait(ready.index(stage), phase)
            if TRANSPOSED:
                weights = weights_buffer.index(stage).reshape([COLUMNS, DEPTH]).permute((1, 0))
            else:
                weights = weights_buffer.index(stage).reshape([DEPTH, COLUMNS])
            total = warpgroup_mma(rows_buffer.index(2 * stage + SIDE), weights, total, is_async=True)
            # All but this product have ended, so that the stage before this one may be filled again.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        row = row_tile * 2 * HALF + SIDE * HALF
        if PARTS == 1:
            parts = (total,)
        else:
            gl.static_assert(PARTS == 2)
            parts = total.reshape(HALF, 2, WIDTH).permute(0, 2, 1).split()
        for part in gl.static_range(PARTS):
            column = column_tile * COLUMNS + part * WIDTH
            out = out_buffer.index(SIDE * BUFFERS + part % BUFFERS)
            value = parts[part]
            if bias_ptr is not None:
                inside = gl.arange(0, HALF, layout=gl.SliceLayout(1, value.type.layout))
                weight = gl.load(weight_ptr + row + inside)
                columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, value.type.layout))
                bias_row_ptr = bias_ptr + gl.load(expert_ptr + row_tile).to(gl.int64) * bias_stride
                bias = gl.load(bias_row_ptr + columns, mask=columns < num_columns, other=0.0).to(gl.float32)
                value += weight[:, None] * bias[None, :]
            if out_desc is None:
                out.store(value.to(rows_desc.dtype))
                source = gl.load(source_ptr + row + gl.arange(0, HALF, layout=gl.SliceLayout(1, wide)))
                columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
                # Multiples of 16 bytes, which the compiler sees only where it divides and multiplies.
                places = source.to(gl.int64)[:, None] * (out_stride // UNIT * UNIT) + columns[None, :]
                mask = (source >= 0)[:, None] & (columns // UNIT < num_columns // UNIT)[None, :]
                gl.store(out_ptr + places, out.load(wide), mask=mask)
            else:
                # The store before this one from the same buffer has read it.
                tma.store_wait(pendings=BUFFERS - 1)
                out.store(value.to(rows_desc.dtype))
                fence_async_shared()
                store_block(out_desc, [row, column], out)
    if out_desc is not None:
        tma.store_wait(pendings=0)
    mark(trace_ptr, SIDE, 0, ENDED)


@gluon.jit(do_not_specialize=["out_stride", "bias_stride", "num_steps", "first_column", "num_columns"])
def rows_times_weights_specialised(
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
    num_steps,
    first_column,
    num_columns,
    trace_ptr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    BAND: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Store columns first_column to first_column + num_columns of rows (P, depth) times the weights of their expert.

    Blocks of the descriptors: rows (64, DEPTH); weights (1, COLUMNS, DEPTH) if ``TRANSPOSED``, else (1, DEPTH,
    COLUMNS); products (64, COLUMNS / PARTS). Without a descriptor of the products, padded row p is stored to row
    source[p] of ``out``. A half tile leaves in ``PARTS`` (1 or 2), of which ``BUFFERS`` can be on their way. The bias,
    as in the plain kernel, may be None. To be launched with 4 warps, which are one of the two warpgroups.
    """
    HALF: gl.constexpr = rows_desc.block_type.shape[0]
    rows_buffer = gl.allocate_shared_memory(rows_desc.dtype, [2 * STAGES, HALF, DEPTH], rows_desc.layout)
    WEIGHTS: gl.constexpr = [STAGES, 1, COLUMNS, DEPTH] if TRANSPOSED else [STAGES, 1, DEPTH, COLUMNS]
    weights_buffer = gl.allocate_shared_memory(weights_desc.dtype, WEIGHTS, weights_desc.layout)
    # Rows of products are cut in 128 bytes like the others.
    out_buffer = gl.allocate_shared_memory(rows_desc.dtype, [2 * BUFFERS, HALF, COLUMNS // PARTS], rows_desc.layout)
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
    pointers = (expert_ptr, source_ptr, out_ptr, weight_ptr, bias_ptr)
    sizes = (gl.load(num_tiles_ptr), gl.cdiv(num_columns, COLUMNS), num_steps)
    strides = (out_stride, bias_stride)
    gl.warp_specialize(
        [
            (
                _multiply_half,
                (
                    descs, buffers, barriers, pointers, sizes, strides, num_columns,
                    0, DEPTH, COLUMNS, BAND, TRANSPOSED, STAGES, PARTS, BUFFERS,
                ),
            ),
            (
                _multiply_half,
                (
                    descs, buffers, barriers, pointers, sizes, strides, num_columns,
                    1, DEPTH, COLUMNS, BAND, TRANSPOSED, STAGES, PARTS, BUFFERS,
                ),
            ),
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


def fits(*, tile: Tile) -> bool:
    """Say whether the kernel can do this tile: any widths (of whole 16 bytes), with and without a bias."""
    return (tile.rows, tile.columns, tile.depth) == (128, 256, 64) and tile.ring in (3, 4)


def multiply(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    first: int,
    width: int,
    bias: Tensor | None = None,
    products: Tensor | None = None,
    targets: Tensor | None = None,
    num_programs: int,
    trace: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """Write rows times weights to ``products`` (P, width), or to the rows of ``targets`` that the rows stand for.

    What is between rows of several experts is written to ``products`` too. ``trace`` (num_programs, 3), int32, takes
    how far the two warpgroups that multiply and the warp that loads are; ``warmup`` compiles and does not run.
    """
    assert fits(tile=tile)
    assert (products is None) != (targets is None)
    assert targets is None or first == 0
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    # What four stages leave room for. Threads that scatter have half of the columns at a time.
    parts = 1 if tile.ring < 4 and targets is None else 2
    buffers = 2 if tile.ring < 4 and parts == 2 else 1
    rows_times_weights_specialised.run(
        descriptor(rows_PK, [64, tile.depth]),
        descriptor(weights, block),
        None if products is None else descriptor(products, [64, tile.columns // parts]),
        targets,
        None if targets is None else targets.stride(0),
        None if bias is None else bias[:, first:],
        None if bias is None else bias.stride(0),
        None if targets is None else layout.source_P,
        None if bias is None else layout.weight_P,
        layout.expert_M,
        layout.num_tiles_1,
        triton.cdiv(rows_PK.shape[1], tile.depth),
        first,
        width,
        trace,
        DEPTH=tile.depth,
        COLUMNS=tile.columns,
        BAND=tile.band,
        TRANSPOSED=transposed,
        STAGES=tile.ring,
        PARTS=parts,
        BUFFERS=buffers,
        grid=(num_programs,),
        warmup=warmup,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=True,
    )
