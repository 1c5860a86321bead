"""From one row a token, as V1 and V2.0 deliver it, to one row a (token, choice), on the device and without its host.

Every size here is a bound that the host knows, so no count is read; rows past the last end hold zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_parallel.dispatch.order import sum_choices

__all__ = ["Expansion", "aligned_up", "expansion"]


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Where the pairs of n arrived tokens go in the expert-major buffer of R rows.

    Shapes and dtypes:
        row_nK: int64, the row of each pair, -1 for a pair of another rank's expert.
        pair_R: int64, the pair ``n * K + k`` of each row, -1 for padding and for rows past the last end.
        offsets_e: int32, inclusive end of each expert's segment, padding included.
    """

    row_nK: Tensor
    pair_R: Tensor
    offsets_e: Tensor

    def rows(self, x_nD: Tensor) -> Tensor:
        """Return rows_RD, the token of each row and zeros where there is none."""
        choices = self.row_nK.shape[1]
        rows_RD = x_nD.index_select(0, self.pair_R.clamp(min=0) // choices)
        return rows_RD.masked_fill_((self.pair_R < 0).unsqueeze(1), 0)

    def values(self, values_nK: Tensor) -> Tensor:
        """Return the value of each row's pair, zero where there is none."""
        return values_nK.flatten().index_select(0, self.pair_R.clamp(min=0)).masked_fill_(self.pair_R < 0, 0)

    def sums(self, rows_RD: Tensor) -> Tensor:
        """Return for each arrived token the sum of its rows, in fp32 in k order, in the dtype of the rows."""
        return sum_choices(rows_RD, self.row_nK)

    def pair_values(self, values_R: Tensor) -> Tensor:
        """Return the value of each pair's row, zero where it has none; the transpose of `values`."""
        row_N = self.row_nK.flatten()
        return values_R.index_select(0, row_N.clamp(min=0)).masked_fill_(row_N < 0, 0).view(self.row_nK.shape)


def aligned_up(counts: Tensor, alignment: int) -> Tensor:
    """Return integer ``counts`` rounded up to multiples of ``alignment``."""
    return (counts + alignment - 1) // alignment * alignment


def expansion(ids_nK: Tensor, *, num_local: int, alignment: int) -> Expansion:
    """Return the expert-major places of the pairs of arrived tokens; the order inside an expert is that of arrival.

    Args:
        ids_nK: local expert of each pair, or -1; no token names an expert twice.
        num_local: experts of this rank, e.
        alignment: each segment ends at a multiple of it.
    """
    num_tokens, num_choices = ids_nK.shape
    bound = num_tokens * min(num_choices, num_local) + num_local * (alignment - 1) if num_tokens else 0
    num_rows = -(-bound // alignment) * alignment
    # Pairs of other ranks sort behind all local experts and get the row one past the buffer, which is cut off.
    key_N = torch.where(ids_nK < 0, num_local, ids_nK).flatten().to(torch.int64)
    sorted_N, pair_N = torch.sort(key_N, stable=True)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=ids_nK.device)
    counts.scatter_add_(0, key_N, torch.ones_like(key_N))
    padded = aligned_up(counts, alignment)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    place_N = torch.arange(key_N.numel(), device=key_N.device) + shift.index_select(0, sorted_N)
    place_N = torch.where(sorted_N < num_local, place_N, num_rows)
    pair_R = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=key_N.device).scatter_(0, place_N, pair_N)
    row_N = torch.empty_like(key_N).scatter_(0, pair_N, torch.where(sorted_N < num_local, place_N, -1))
    return Expansion(
        row_nK=row_N.view(ids_nK.shape),
        pair_R=pair_R[:num_rows],
        offsets_e=padded[:num_local].cumsum(0).to(torch.int32),
    )
