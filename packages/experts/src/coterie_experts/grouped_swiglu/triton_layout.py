"""Padded rows: where each row of a batch lies while the Triton kernels work on it.

The segment of each expert begins at a multiple of the row tile, so that a row tile belongs to one expert, the kernels
load and store whole tiles, and the reduction of a weight gradient never meets the rows of another expert. P padded rows
are P / block row tiles; P is the worst case over all routings, so that neither shapes nor launches depend on the
routing. The number of row tiles in use is a number on the device. Rows of padding stand for nothing: their source is
-1, their weight 0.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["COMPILED", "PaddedLayout", "mask_of_all", "pad_rows"]


@dataclass(frozen=True, kw_only=True)
class PaddedLayout:
    """Index tensors of one batch, all int32 on the device but for the weights.

    A slot is what a row was before the padding: token * K + choice, or the row itself where rows come in expert order.

    Attributes:
        source_P: the row of x that a padded row takes, -1 for padding.
        counted_P: the same, and -1 too where the weight is zero: what weight gradients take.
        slot_P: the slot of a padded row, -1 for padding.
        position_N: the padded row of a slot, -1 for a slot that is not routed.
        weight_P: float32, 0 for padding.
        expert_M: the expert of a row tile; only the first ``num_tiles`` are set.
        has_zero_M: whether a row tile has a row of weight zero, which padding is too; likewise.
        num_tiles_1: the number of row tiles in use.
        segments_e3: expert, first padded row and number of rows, by falling number, ties to the lowest id.
    """

    source_P: Tensor
    counted_P: Tensor
    slot_P: Tensor
    position_N: Tensor
    weight_P: Tensor
    expert_M: Tensor
    has_zero_M: Tensor
    num_tiles_1: Tensor
    segments_e3: Tensor

    @property
    def num_padded(self) -> int:
        """Return P."""
        return self.source_P.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the fields in order, for ``save_for_backward``; ``PaddedLayout.of`` takes them back."""
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> "PaddedLayout":
        """Rebuild a layout from ``tensors()``."""
        return cls(**dict(zip(cls.__dataclass_fields__, tensors, strict=True)))


def pad_rows(
    offsets_e: Tensor, weights_N: Tensor, *, slot_of_row_N: Tensor | None, num_choices: int, block: int
) -> PaddedLayout:
    """Lay out rows in expert order with each segment padded to a multiple of ``block`` rows.

    Args:
        offsets_e: int32, inclusive ends of the segments in rows that are not padded.
        weights_N: float32 by slot.
        slot_of_row_N: int64; None where row n is slot n.
        num_choices: K; a slot takes row slot // K of x.
        block: rows of a tile, a power of two.
    """
    num_slots, num_experts = weights_N.shape[0], offsets_e.shape[0]
    num_tiles = max(1, (num_slots + num_experts * (block - 1)) // block)
    indices = offsets_e.new_empty(3, num_tiles * block)
    # Each in 16 bytes, as everything else is: Triton compiles a kernel anew for another alignment of a pointer.
    per_tile = offsets_e.new_empty(2, triton.cdiv(num_tiles, 4) * 4)[:, :num_tiles]
    layout = PaddedLayout(
        source_P=indices[0],
        counted_P=indices[1],
        slot_P=indices[2],
        position_N=offsets_e.new_empty(num_slots),
        weight_P=weights_N.new_empty(num_tiles * block),
        expert_M=per_tile[0],
        has_zero_M=per_tile[1],
        num_tiles_1=offsets_e.new_empty(1),
        segments_e3=offsets_e.new_empty(num_experts, 3),
    )
    _pad_rows[(num_tiles,)](
        offsets_e.contiguous(),
        weights_N.contiguous(),
        slot_of_row_N,
        *layout.tensors(),
        num_slots,
        num_experts,
        CHOICES=num_choices,
        BLOCK=block,
        EXPERTS=triton.next_power_of_2(num_experts),
    )
    return layout


@triton.jit
def mask_of_all(is_true, like):
    """Return a mask in the shape of ``like``, all of it ``is_true``, which is a number.

    For the compiler the number would do. In Triton's interpreter it becomes integers, also when it is combined with a
    tensor, and as of Triton 3.9 these are refused as a mask.
    """
    return tl.where(is_true, tl.full(like.shape, True, tl.int1), False)


@triton.jit
def _pad_rows(
    offsets_ptr,
    weights_ptr,
    slot_of_row_ptr,
    source_ptr,
    counted_ptr,
    slot_ptr,
    position_ptr,
    weight_ptr,
    expert_ptr,
    has_zero_ptr,
    num_tiles_ptr,
    segments_ptr,
    num_slots,
    num_experts,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    # Offsets that do not fit give wrong rows; on a GPU nobody looks at them before. They give no other address.
    ends = tl.minimum(tl.load(offsets_ptr + experts, mask=known, other=0), num_slots)
    begins = tl.minimum(tl.load(offsets_ptr + experts - 1, mask=known & (experts > 0), other=0), num_slots)
    begins = tl.maximum(begins, 0)
    counts = tl.where(known, tl.maximum(ends - begins, 0), 0)
    tiles = (counts + BLOCK - 1) // BLOCK
    last_tiles = tl.cumsum(tiles, 0)
    first_tiles = last_tiles - tiles
    total = tl.minimum(tl.sum(tiles, 0), tl.num_programs(0))

    if tile == 0:
        tl.store(num_tiles_ptr, total)
        # The place of an expert is the number of those that come before it; one at a time, to need no square of them.
        place = tl.zeros((EXPERTS,), dtype=tl.int32)
        for other in range(num_experts):
            count = tl.sum(tl.where(experts == other, counts, 0), 0)
            place += ((count > counts) | ((count == counts) & (other < experts))).to(tl.int32)
        tl.store(segments_ptr + 3 * place, experts, mask=known)
        tl.store(segments_ptr + 3 * place + 1, first_tiles * BLOCK, mask=known)
        laid_out = tl.maximum(total - first_tiles, 0) * BLOCK
        tl.store(segments_ptr + 3 * place + 2, tl.minimum(counts, laid_out), mask=known)

    is_mine = (first_tiles <= tile) & (tile < last_tiles)
    begin = tl.sum(tl.where(is_mine, begins, 0), 0)
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    first_tile = tl.sum(tl.where(is_mine, first_tiles, 0), 0)
    tl.store(expert_ptr + tile, tl.sum(tl.where(is_mine, experts, 0), 0), mask=tile < total)

    inside = tl.arange(0, BLOCK)
    padded = tile * BLOCK + inside
    row = begin + (tile - first_tile) * BLOCK + inside
    is_row = (row < end) & mask_of_all(tile < total, row)
    slot = row if slot_of_row_ptr is None else tl.load(slot_of_row_ptr + row, mask=is_row, other=0).to(tl.int32)
    weight = tl.load(weights_ptr + slot, mask=is_row, other=0.0)
    source = tl.where(is_row, slot // CHOICES, -1)
    tl.store(source_ptr + padded, source)
    tl.store(counted_ptr + padded, tl.where(weight != 0, source, -1))
    tl.store(slot_ptr + padded, tl.where(is_row, slot, -1))
    tl.store(weight_ptr + padded, weight)
    tl.store(has_zero_ptr + tile, tl.max((weight == 0).to(tl.int32), 0))
    tl.store(position_ptr + slot, padded, mask=is_row)

    # Rows past the last end are fewer than the tiles have rows, so that the tiles share them out by their own number.
    is_unrouted = (padded >= tl.sum(tl.where(experts == num_experts - 1, ends, 0), 0)) & (padded < num_slots)
    if slot_of_row_ptr is None:
        tl.store(position_ptr + padded, -1, mask=is_unrouted)
    else:
        unrouted = tl.load(slot_of_row_ptr + padded, mask=is_unrouted, other=0)
        tl.store(position_ptr + unrouted, -1, mask=is_unrouted)


# Not so under TRITON_INTERPRET=1, which Triton reads when it defines a kernel.
COMPILED: bool = isinstance(_pad_rows, triton.JITFunction)
