"""Counts of pairs and addresses of rows in four Triton launches; nothing waits for the host.

The N pairs are cut into B blocks. `_count_kernel` counts the pairs of each block for each expert and numbers the pairs
of an expert within the block; `_sum_kernel`, one program for each expert, turns the counts into the number of pairs in
earlier blocks; `_shift_kernel` adds that to the numbers. Once the counts of all ranks are there, each program of
`_place_kernel` does the arithmetic of all segments (S * E counts, that lie in the cache) and places its own pairs. All
sums are of integers, and no two programs write to one place: the result is the same in every run.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie_parallel.dispatch.rowwise.placement.reference import RowPlan

__all__ = ["COMPILED", "count_pairs", "place_rows"]

# Pairs of a block: each is compared with each.
_BLOCK = 128
# Blocks that one program sums at a time.
_SUMMED = 1024
# Pairs that one program shifts, and places.
_SHIFTED = 512
_PLACED = 256
# Sources whose counts one program adds at a time.
_SOURCES = 8


def count_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Count the pairs of each expert; see `coterie_parallel.dispatch.rowwise.placement.count_pairs`."""
    num_pairs, device = ids_TK.numel(), ids_TK.device
    position_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=device)
    if num_pairs == 0:
        return torch.zeros(num_experts, dtype=torch.int64, device=device), position_TK
    ids_TK = ids_TK.contiguous()
    num_blocks = triton.cdiv(num_pairs, _BLOCK)
    counts_E = torch.empty(num_experts, dtype=torch.int64, device=device)
    # By expert first: the program that sums an expert reads and writes one run of memory.
    counts_EB = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=device)
    _count_kernel[(num_blocks,)](
        ids_TK, position_TK, counts_EB, num_pairs, num_blocks, num_experts, BLOCK=_BLOCK, BINS=_bins(num_experts)
    )
    summed = min(_SUMMED, triton.next_power_of_2(num_blocks))
    _sum_kernel[(num_experts,)](counts_EB, counts_E, num_blocks, BLOCK=summed)
    _shift_kernel[(triton.cdiv(num_pairs, _SHIFTED),)](
        ids_TK, counts_EB, position_TK, num_pairs, num_blocks, COUNTED=_BLOCK, BLOCK=_SHIFTED
    )
    return counts_E, position_TK


def place_rows(
    counts_SE: Tensor, ids_TK: Tensor, position_TK: Tensor, *, index: int, num_local: int, alignment: int
) -> RowPlan:
    """Return the address of each row; see `coterie_parallel.dispatch.rowwise.placement.place_rows`."""
    size, num_experts = counts_SE.shape
    num_pairs, device = ids_TK.numel(), ids_TK.device
    plan = RowPlan(
        rank_TK=torch.empty(ids_TK.shape, dtype=torch.int32, device=device),
        row_TK=torch.empty(ids_TK.shape, dtype=torch.int64, device=device),
        offsets_e=torch.empty(num_local, dtype=torch.int32, device=device),
        total_e=torch.empty(num_local, dtype=torch.int64, device=device),
        need_S=torch.empty(size, dtype=torch.int64, device=device),
    )
    # At least one program: a rank without tokens receives rows too.
    _place_kernel[(max(1, triton.cdiv(num_pairs, _PLACED)),)](
        counts_SE.contiguous(),
        ids_TK.contiguous(),
        position_TK.contiguous(),
        plan.rank_TK,
        plan.row_TK,
        plan.offsets_e,
        plan.total_e,
        plan.need_S,
        num_pairs,
        index,
        size,
        num_local,
        alignment,
        BLOCK=_PLACED,
        BINS=_bins(num_experts),
        SOURCES=_SOURCES,
    )
    return plan


def _bins(num_experts: int) -> int:
    return int(max(16, triton.next_power_of_2(num_experts)))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "num_experts"])
def _count_kernel(
    ids_ptr,
    position_ptr,
    counts_EB_ptr,
    num_pairs,
    num_blocks,
    num_experts,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count the pairs of one block for each expert, and number those of an expert within the block from 0."""
    block = tl.program_id(0)
    inside = tl.arange(0, BLOCK)
    pairs = block * BLOCK + inside
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    ids = tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)
    experts = tl.arange(0, BINS)
    counts = tl.histogram(ids, BINS, mask=ids >= 0)
    # Experts times blocks may pass 2^31.
    tl.store(counts_EB_ptr + experts.to(tl.int64) * num_blocks + block, counts, mask=experts < num_experts)
    # The same ids once more, along the other dimension of the comparison.
    other_pairs = block * BLOCK + tl.arange(0, BLOCK)
    other_ids = tl.load(ids_ptr + other_pairs, mask=other_pairs < num_pairs, other=-1)
    is_earlier = (other_ids[:, None] == ids[None, :]) & (other_pairs[:, None] < pairs[None, :])
    position = tl.where(ids >= 0, tl.sum(is_earlier.to(tl.int32), 0), -1)
    tl.store(position_ptr + pairs, position, mask=pairs < num_pairs)


@triton.jit(do_not_specialize=["num_blocks"])
def _sum_kernel(counts_EB_ptr, counts_E_ptr, num_blocks, BLOCK: tl.constexpr):
    """Replace each count of one expert by the sum of the counts of earlier blocks, and write the sum of all."""
    expert = tl.program_id(0)
    counts_B_ptr = counts_EB_ptr + expert.to(tl.int64) * num_blocks
    total = tl.zeros((), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_B_ptr + blocks, mask=blocks < num_blocks, other=0)
        tl.store(counts_B_ptr + blocks, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(counts_E_ptr + expert, total.to(tl.int64))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _shift_kernel(
    ids_ptr, earlier_EB_ptr, position_ptr, num_pairs, num_blocks, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Add to the number of each pair within its block of COUNTED the pairs of its expert in earlier blocks."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(position_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_routed = position >= 0
    ids = tl.load(ids_ptr + pairs, mask=is_routed, other=0)
    earlier = tl.load(earlier_EB_ptr + ids * num_blocks + pairs // COUNTED, mask=is_routed, other=0)
    tl.store(position_ptr + pairs, position + earlier, mask=is_routed)


@triton.jit(do_not_specialize=["num_pairs", "index", "size", "num_local", "alignment"])
def _place_kernel(
    counts_SE_ptr,
    ids_ptr,
    position_ptr,
    rank_ptr,
    row_ptr,
    offsets_e_ptr,
    total_e_ptr,
    need_S_ptr,
    num_pairs,
    index,
    size,
    num_local,
    alignment,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """Place the pairs of one block; the first program also writes what this rank's buffer and all ranks need."""
    num_experts = size * num_local
    experts = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int64)
    before = tl.zeros((BINS,), tl.int64)
    for start in range(0, size, SOURCES):
        sources = start + tl.arange(0, SOURCES)
        counts_SE = tl.load(
            counts_SE_ptr + sources[:, None].to(tl.int64) * num_experts + experts[None, :],
            mask=(sources[:, None] < size) & (experts[None, :] < num_experts),
            other=0,
        )
        total += tl.sum(counts_SE, 0)
        before += tl.sum(tl.where(sources[:, None] < index, counts_SE, 0), 0)
    padded = (total + alignment - 1) // alignment * alignment
    # The sum runs through the experts of all ranks; what it is at the first expert of a rank is taken off again.
    ends_of_all = tl.cumsum(padded, 0)
    owner = experts // num_local
    first = tl.minimum(owner * num_local, BINS - 1)
    ends = ends_of_all - tl.gather(ends_of_all - padded, first, 0)

    if tl.program_id(0) == 0:
        is_own = owner == index
        tl.store(offsets_e_ptr + experts - index * num_local, ends.to(tl.int32), mask=is_own)
        tl.store(total_e_ptr + experts - index * num_local, total, mask=is_own)
        is_last = (experts % num_local == num_local - 1) & (experts < num_experts)
        tl.store(need_S_ptr + owner, ends, mask=is_last)

    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(position_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_routed = position >= 0
    ids = tl.load(ids_ptr + pairs, mask=is_routed, other=0).to(tl.int32)
    rows = tl.gather(ends - padded + before, ids, 0) + position
    tl.store(row_ptr + pairs, tl.where(is_routed, rows, -1), mask=pairs < num_pairs)
    tl.store(rank_ptr + pairs, tl.where(is_routed, ids // num_local, -1), mask=pairs < num_pairs)


# Triton reads TRITON_INTERPRET when a kernel is defined, so ask a kernel and not the environment.
COMPILED: bool = isinstance(_place_kernel, triton.JITFunction)
