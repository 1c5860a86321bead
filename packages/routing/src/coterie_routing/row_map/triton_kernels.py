"""The row map in three Triton launches: count in blocks of choices, sum over the blocks, place.

The N choices are cut into B blocks. The first kernel counts the choices of each block for each expert. The second, one
program for each expert, turns these counts into the number of choices in earlier blocks. The third adds to that where
the expert's segment begins and the number of equal ids before the choice in its own block. All sums are of integers and
no two programs write to one place, so the result is the same in every run; nothing waits for the host.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie_routing.row_map.reference import RowMap

__all__ = ["COMPILED", "map_rows"]

# Choices in a block: the placing kernel compares each with each.
_BLOCK = 128
# Blocks that one program sums at a time.
_SCANNED = 2048


def map_rows(ids_TK: Tensor, num_experts: int) -> RowMap:
    """Return the row map of some ids; see `coterie_routing.row_map.map_rows` for the contract."""
    device = ids_TK.device
    num_slots = ids_TK.numel()
    if num_slots == 0:
        return RowMap(
            counts_E=torch.zeros(num_experts, dtype=torch.int64, device=device),
            offsets_E=torch.zeros(num_experts, dtype=torch.int32, device=device),
            row_TK=torch.empty(ids_TK.shape, dtype=torch.int64, device=device),
            slot_N=torch.empty(0, dtype=torch.int64, device=device),
        )
    ids_N = ids_TK.contiguous()
    num_blocks = triton.cdiv(num_slots, _BLOCK)
    # By expert first: the program that sums an expert reads and writes one run of memory.
    counts_EB = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=device)
    counts_E = torch.empty(num_experts, dtype=torch.int64, device=device)
    offsets_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    row_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=device)
    slot_N = torch.empty(num_slots, dtype=torch.int64, device=device)
    num_bins = max(16, triton.next_power_of_2(num_experts))
    _count_in_blocks[(num_blocks,)](
        ids_N, counts_EB, num_slots, num_blocks, num_experts, BLOCK=_BLOCK, BINS=num_bins, num_warps=4
    )
    scanned = min(_SCANNED, triton.next_power_of_2(num_blocks))
    _sum_over_blocks[(num_experts,)](counts_EB, counts_E, num_blocks, BLOCK=scanned, num_warps=4)
    _place[(num_blocks,)](
        ids_N,
        counts_EB,
        counts_E,
        offsets_E,
        row_TK,
        slot_N,
        num_slots,
        num_blocks,
        num_experts,
        BLOCK=_BLOCK,
        BINS=num_bins,
        num_warps=4,
    )
    return RowMap(counts_E=counts_E, offsets_E=offsets_E, row_TK=row_TK, slot_N=slot_N)


@triton.jit
def _load_ids(ids_ptr, slots, num_slots, num_experts):
    """Load ids as int32; slots past the end, and ids of no expert, get the id -1."""
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_experts"])
def _count_in_blocks(
    ids_ptr, counts_EB_ptr, num_slots, num_blocks, num_experts, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    ids = _load_ids(ids_ptr, slots, num_slots, num_experts)
    counts = tl.histogram(ids, BINS, mask=ids >= 0)
    experts = tl.arange(0, BINS)
    # Experts times blocks may pass 2^31.
    places = experts.to(tl.int64) * num_blocks + block
    tl.store(counts_EB_ptr + places, counts, mask=experts < num_experts)


@triton.jit
def _sum_over_blocks(counts_EB_ptr, counts_E_ptr, num_blocks, BLOCK: tl.constexpr):
    """Replace in place each count of this program's expert by the sum of the counts of earlier blocks."""
    expert = tl.program_id(0)
    counts_B_ptr = counts_EB_ptr + expert.to(tl.int64) * num_blocks
    total = tl.zeros((), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_B_ptr + blocks, mask=blocks < num_blocks, other=0)
        tl.store(counts_B_ptr + blocks, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(counts_E_ptr + expert, total.to(tl.int64))


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "num_experts"])
def _place(
    ids_ptr,
    earlier_EB_ptr,
    counts_E_ptr,
    offsets_E_ptr,
    row_N_ptr,
    slot_N_ptr,
    num_slots,
    num_blocks,
    num_experts,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, BINS)
    counts = tl.load(counts_E_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
    ends = tl.cumsum(counts, 0)
    if block == 0:
        tl.store(offsets_E_ptr + experts, ends, mask=experts < num_experts)

    ids = _load_ids(ids_ptr, slots, num_slots, num_experts)
    is_routed = ids >= 0
    earlier = tl.load(earlier_EB_ptr + ids.to(tl.int64) * num_blocks + block, mask=is_routed, other=0)
    others = tl.arange(0, BLOCK)
    other_ids = _load_ids(ids_ptr, block * BLOCK + others, num_slots, num_experts)
    is_earlier_equal = (other_ids[:, None] == ids[None, :]) & (others[:, None] < tl.arange(0, BLOCK)[None, :])
    starts = tl.gather(ends - counts, tl.maximum(ids, 0), 0)
    rows = starts + earlier + tl.sum(is_earlier_equal.to(tl.int32), 0)

    tl.store(row_N_ptr + slots, tl.where(is_routed, rows, -1).to(tl.int64), mask=slots < num_slots)
    tl.store(slot_N_ptr + rows, slots.to(tl.int64), mask=is_routed)
    # Rows past the last end belong to no choice; the program of the same numbers writes them.
    num_rows = tl.sum(counts, 0)
    tl.store(slot_N_ptr + slots, tl.full((BLOCK,), -1, tl.int64), mask=(slots >= num_rows) & (slots < num_slots))


# Under TRITON_INTERPRET=1 the kernels run in Python, on tensors of a CPU.
COMPILED: bool = isinstance(_place, triton.JITFunction)
