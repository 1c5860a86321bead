"""Counts of pairs and addresses of rows in plain torch: the ground truth, and the default on a CPU.

Nothing here reads a value on the host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowPlan", "count_pairs", "place_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlan:
    """Where the row of each (token, choice) pair of this rank goes, and what this rank's own buffer will hold.

    Everything is on the device. Rows are numbered as if buffers had no end; one with C rows holds those below C.

    Attributes:
        rank_TK: int32, axis index of the rank that owns the pair's expert; -1 where the pair is not routed.
        row_TK: int64, row in that rank's buffer; -1 where the pair is not routed.
        offsets_e: int32, inclusive ends of the segments of this rank's experts; multiples of the alignment.
        total_e: int64, rows of this rank's experts, padding not counted.
        need_S: int64, rows that each rank needs, padding counted; the same on all ranks.
    """

    rank_TK: Tensor
    row_TK: Tensor
    offsets_e: Tensor
    total_e: Tensor
    need_S: Tensor


def count_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Count the pairs of each expert; see `coterie_parallel.dispatch.rowwise.placement.count_pairs`."""
    ids_N = ids_TK.flatten()
    # What is not routed sorts behind the last expert. A smaller integer type sorts faster; the order is the same.
    ids_N = ids_N.where((ids_N >= 0) & (ids_N < num_experts), num_experts)
    sorted_N, pair_N = ids_N.to(torch.int16 if num_experts < 2**15 else torch.int64).sort(stable=True)
    counts_E1 = ids_N.new_zeros(num_experts + 1).scatter_add_(0, ids_N, torch.ones_like(ids_N))
    start_E1 = counts_E1.cumsum(0) - counts_E1
    sorted_N = sorted_N.to(torch.int64)
    position_N = torch.arange(ids_N.numel(), device=ids_N.device) - start_E1[sorted_N]
    position_N = position_N.masked_fill_(sorted_N == num_experts, -1).to(torch.int32)
    position_TK = torch.empty_like(position_N).scatter_(0, pair_N, position_N).view(ids_TK.shape)
    return counts_E1[:num_experts], position_TK


def place_rows(
    counts_SE: Tensor, ids_TK: Tensor, position_TK: Tensor, *, index: int, num_local: int, alignment: int
) -> RowPlan:
    """Return the address of each row; see `coterie_parallel.dispatch.rowwise.placement.place_rows`."""
    # The owner of an expert is the rank d of (S, d, e): experts are numbered owner by owner.
    counts_Sde = counts_SE.view(counts_SE.shape[0], -1, num_local)
    total_de = counts_Sde.sum(0)
    before_de = counts_Sde[:index].sum(0)
    padded_de = (total_de + alignment - 1) // alignment * alignment
    ends_de = padded_de.cumsum(1)
    start_E = (ends_de - padded_de + before_de).flatten()
    # Not routed is what has no position: an id that names no expert among them.
    is_routed_TK = position_TK >= 0
    ids_TK = ids_TK.where(is_routed_TK, 0)
    return RowPlan(
        rank_TK=(ids_TK // num_local).to(torch.int32).masked_fill_(~is_routed_TK, -1),
        row_TK=(start_E[ids_TK] + position_TK).masked_fill_(~is_routed_TK, -1),
        offsets_e=ends_de[index].to(torch.int32),
        total_e=total_de[index].clone(),
        need_S=ends_de[:, -1].clone(),
    )
