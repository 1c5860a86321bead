"""The row map in plain torch: one stable sort. The ground truth, and the default on a CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowMap", "map_rows"]


@dataclass(frozen=True, eq=False)
class RowMap:
    """Say which row each choice of each token gets when the rows of all experts stand one after the other.

    Rows are ordered by expert, then token, then choice. N = T*K rows are set aside whatever the number of choices that
    are routed; those past the last end stand for nothing.

    Attributes:
        counts_E: Rows of each expert, int64.
        offsets_E: Inclusive ends of the experts' segments, int32, as grouped matrix products want them.
        row_TK: Row of each choice, int64; -1 where the id is -1.
        slot_N: For each row the choice that it holds, as t*K + k, int64; -1 for rows past the last end.
    """

    counts_E: Tensor
    offsets_E: Tensor
    row_TK: Tensor
    slot_N: Tensor


def map_rows(ids_TK: Tensor, num_experts: int) -> RowMap:
    """Return the row map of some ids; see `coterie_routing.row_map.map_rows` for the contract."""
    ids_N = ids_TK.reshape(-1).to(torch.int64)
    is_routed_N = (ids_N >= 0) & (ids_N < num_experts)
    # What is not routed sorts behind the last expert.
    sorted_N, slot_N = torch.sort(ids_N.masked_fill(~is_routed_N, num_experts), stable=True)
    ends_E = torch.searchsorted(sorted_N, torch.arange(num_experts, device=ids_N.device), right=True)
    row_N = torch.empty_like(slot_N).scatter_(0, slot_N, torch.arange(ids_N.numel(), device=ids_N.device))
    return RowMap(
        counts_E=ends_E.diff(prepend=ends_E.new_zeros(1)),
        offsets_E=ends_E.to(torch.int32),
        row_TK=row_N.masked_fill_(~is_routed_N, -1).view(ids_TK.shape),
        slot_N=slot_N.masked_fill_(sorted_N == num_experts, -1),
    )
