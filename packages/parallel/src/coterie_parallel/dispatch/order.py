"""The row order that every dispatcher shares: local expert, then source rank, then token, then choice."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Segments", "SortedPairs", "pad_rows", "segments", "sort_pairs", "sum_choices"]


@dataclass(frozen=True, kw_only=True)
class SortedPairs:
    """The routed (token, choice) pairs of one rank in the order expert, token, choice.

    Shapes and dtypes, P routed pairs:
        pair_P: int64, ``token * K + choice`` of each.
        token_P: int64.
        slot_TK: int64, the place of each pair in this order, -1 for a pair that is not routed.
        counts_E: int64, routed pairs of each global expert.
    """

    pair_P: Tensor
    token_P: Tensor
    slot_TK: Tensor
    counts_E: Tensor


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where rows that arrive by (source, local expert) go in the expert-major buffer.

    Shapes and dtypes:
        row_P: int64, the row of each arriving one.
        offsets_e: int32, inclusive end of each expert's segment, padding included.
        num_rows: rows of the buffer, R.
    """

    row_P: Tensor
    offsets_e: Tensor
    num_rows: int


def sort_pairs(ids_TK: Tensor, num_experts: int) -> SortedPairs:
    """Drop the pairs with id -1 and sort the rest by expert; the sort is stable, so token, then choice follow."""
    ids_N = ids_TK.flatten()
    routed_P = torch.nonzero(ids_N >= 0).flatten()
    # A smaller integer type sorts faster; the order is the same.
    keys_P = ids_N[routed_P].to(torch.int16 if num_experts <= 2**15 else torch.int64)
    pair_P = routed_P[torch.argsort(keys_P, stable=True)]
    slot_N = torch.full_like(ids_N, -1)
    slot_N[pair_P] = torch.arange(pair_P.numel(), device=ids_N.device)
    return SortedPairs(
        pair_P=pair_P,
        token_P=pair_P // max(1, ids_TK.shape[1]),
        slot_TK=slot_N.view(ids_TK.shape),
        counts_E=torch.bincount(ids_N[routed_P], minlength=num_experts),
    )


def segments(counts_se: Tensor, alignment: int) -> Segments:
    """Return the place of every row that arrives in the order source, local expert.

    Args:
        counts_se: int64 (sources, local experts), rows of each.
        alignment: each segment's length is rounded up to a multiple of it.
    """
    padded_e = (counts_se.sum(0) + alignment - 1) // alignment * alignment
    ends_e = padded_e.cumsum(0)
    before_se = counts_se.cumsum(0) - counts_se
    arrival_se = (counts_se.flatten().cumsum(0) - counts_se.flatten()).view_as(counts_se)
    shift_se = (ends_e - padded_e) + before_se - arrival_se
    shift_P = torch.repeat_interleave(shift_se.flatten(), counts_se.flatten())
    return Segments(
        row_P=shift_P + torch.arange(shift_P.numel(), device=shift_P.device),
        offsets_e=ends_e.to(torch.int32),
        num_rows=int(ends_e[-1]),
    )


def pad_rows(arrived_P: Tensor, placed: Segments) -> Tensor:
    """Put arriving rows (P, ...) at their place in a buffer (R, ...) whose padding rows are zero."""
    rows_R = arrived_P.new_empty((placed.num_rows, *arrived_P.shape[1:]))
    if placed.num_rows > arrived_P.shape[0]:
        rows_R.zero_()
    return rows_R.index_copy_(0, placed.row_P, arrived_P)


def sum_choices(rows_PD: Tensor, slot_TK: Tensor) -> Tensor:
    """Return for each token the sum of its rows, from +0 in fp32 in k order, in the dtype of the rows.

    Args:
        rows_PD: rows in any order.
        slot_TK: int64, the row of each pair, -1 for none.
    """
    num_tokens, num_choices = slot_TK.shape
    y_TD = rows_PD.new_zeros((num_tokens, rows_PD.shape[1]), dtype=torch.promote_types(rows_PD.dtype, torch.float32))
    if rows_PD.shape[0] == 0:
        return y_TD.to(rows_PD.dtype)
    # An explicit loop over k: the order of torch.sum may depend on the shape, and with it the last bit.
    for choice in range(num_choices):
        slot_T = slot_TK[:, choice]
        part_TD = rows_PD.index_select(0, slot_T.clamp(min=0))
        y_TD += part_TD.masked_fill_((slot_T < 0).unsqueeze(1), 0)
    return y_TD.to(rows_PD.dtype)
