"""How many rows a buffer holds, what overflowed, and which rows are dropped; decided alike on every rank.

Nothing here reads a value on the host.
"""

import math

import torch
from torch import Tensor

__all__ = ["Counters", "first_capacity", "grown_capacity", "heaviest_pairs", "rows_needed"]

# Room beyond the need that was seen, so that a load that goes on drifting does not make every step run twice.
_HEADROOM = 1.25

_NEEDED, _OVERFLOWED, _DROPPED, _OUTSIDE, _TOKENS = range(5)


def first_capacity(
    capacity_factor: float, *, num_tokens: int, top_k: int, size: int, num_local: int, alignment: int
) -> int:
    """Return C for batches of at most ``num_tokens`` tokens on a rank: factor * T * K rows, and room for padding.

    More than all pairs of all ranks are never needed. The result is a multiple of the alignment.
    """
    # The least of both factors first: a huge one has a product that is no number.
    rows = min(math.ceil(min(capacity_factor, size) * num_tokens * top_k), size * num_tokens * top_k)
    return _round_up(max(1, rows) + num_local * (alignment - 1), alignment)


def grown_capacity(rows_needed: int, alignment: int) -> int:
    """Return C after a rank has needed this many rows, padding counted."""
    return _round_up(math.ceil(rows_needed * _HEADROOM), alignment)


def rows_needed(ids_SN: Tensor, *, num_local: int, alignment: int) -> Tensor:
    """Return the rows that each rank needs, padding counted, when source s routes ``ids_SN[s]``; int64 (S)."""
    counts_E = expert_counts(ids_SN, ids_SN.shape[0] * num_local).sum(0)
    padded_E = (counts_E + alignment - 1) // alignment * alignment
    return padded_E.view(-1, num_local).sum(1)


def expert_counts(ids_SN: Tensor, num_experts: int) -> Tensor:
    """Return the number of pairs of each source for each expert, int64 (S, E); ids outside [0, E) do not count."""
    num_sources = ids_SN.shape[0]
    ids_SN = ids_SN.where((ids_SN >= 0) & (ids_SN < num_experts), num_experts)
    first_S1 = torch.arange(num_sources, device=ids_SN.device).unsqueeze(1) * (num_experts + 1)
    counts = ids_SN.new_zeros(num_sources * (num_experts + 1))
    counts.scatter_add_(0, (first_S1 + ids_SN).flatten(), torch.ones_like(ids_SN).flatten())
    return counts.view(num_sources, num_experts + 1)[:, :num_experts].contiguous()


def heaviest_pairs(ids_SN: Tensor, weights_SN: Tensor, *, num_local: int, limit: int) -> Tensor:
    """Return which pairs each rank takes when it takes ``limit`` at most: those of the highest weights.

    Of equal weights those of the lower source go first, then of the lower place in it.

    Args:
        ids_SN: int64 expert ids of the pairs of all sources; outside [0, S * num_local) is not routed.
        weights_SN: fp32.
        num_local: experts of a rank.
        limit: pairs that a rank has room for.

    Returns:
        Bool (S, N), False also where not routed.
    """
    size = ids_SN.shape[0]
    ids_P = ids_SN.flatten()
    is_routed_P = (ids_P >= 0) & (ids_P < size * num_local)
    owner_P = torch.where(is_routed_P, ids_P // num_local, size)
    by_weight_P = weights_SN.flatten().sort(descending=True, stable=True).indices
    # Stable again, so that the pairs of one owner stay in the order of their weights.
    owner_P, order_P = owner_P[by_weight_P].sort(stable=True)
    pair_P = by_weight_P[order_P]
    counts = owner_P.new_zeros(size + 1).scatter_add_(0, owner_P, torch.ones_like(owner_P))
    place_P = torch.arange(owner_P.numel(), device=owner_P.device) - (counts.cumsum(0) - counts)[owner_P]
    is_taken_P = (place_P < limit) & (owner_P < size)
    return torch.empty_like(is_routed_P).scatter_(0, pair_P, is_taken_P).view(ids_SN.shape)


class Counters:
    """What happened in the dispatches of one rank so far, on the device.

    The need of a dispatch counts only while nothing has overflowed: what comes after that is computed from wrong rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(5, dtype=torch.int64, device=device)
        self.rows_needed_max = self.values[_NEEDED]
        self.overflowed = self.values[_OVERFLOWED]
        self.rows_dropped = self.values[_DROPPED]
        self.ids_outside = self.values[_OUTSIDE]
        self.num_tokens_max = self.values[_TOKENS]

    def add_need(self, need_S: Tensor, capacity: int | None) -> None:
        """Count the rows that each rank needs; more than ``capacity`` is an overflow, None is never one."""
        most = need_S.max()
        torch.maximum(self.rows_needed_max, most * (1 - self.overflowed), out=self.rows_needed_max)
        if capacity is not None:
            self.overflowed.logical_or_(most > capacity)

    def add_tokens(self, tokens_S: Tensor, room: int) -> None:
        """Count the tokens of the largest rank; more than there is ``room`` for is an overflow."""
        most = tokens_S.max()
        torch.maximum(self.num_tokens_max, most, out=self.num_tokens_max)
        self.overflowed.logical_or_(most > room)

    def add_dropped(self, num_dropped: Tensor) -> None:
        """Count pairs of this rank that were left out."""
        self.rows_dropped.add_(num_dropped)

    def add_ids(self, ids_TK: Tensor, num_experts: int) -> None:
        """Count the ids of this rank that are no expert and not -1."""
        self.ids_outside.add_(((ids_TK < -1) | (ids_TK >= num_experts)).sum())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
