"""Rows to and from the buffers of peers in plain torch, through the views of a `PeerTensor`.

The ground truth, and the default on a CPU. On a GPU it waits for the host: which rows go where is read there.
"""

import torch
from torch import Tensor

from coterie_parallel.dispatch.order import sum_choices
from coterie_parallel.dispatch.rowwise.peers.base import PeerTensor
from coterie_parallel.dispatch.rowwise.placement.reference import RowPlan

__all__ = ["clear_padding", "get_rows", "get_values", "put_rows"]

# Bytes of rows that get picks at a time.
_PICKED_BYTES = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_rows(
    x_TD: Tensor, weights_TK: Tensor | None, plan: RowPlan, rows: PeerTensor, row_weights: PeerTensor | None
) -> None:
    """Write each pair's row, and its weight, to its place; see `coterie_parallel.dispatch.rowwise.rows.put_rows`."""
    # As integers of the same size: bits are copied, and also types that torch cannot index are.
    x_TD = x_TD.view(_INTEGERS[x_TD.element_size()])
    num_choices = plan.row_TK.shape[1]
    for peer, (view_CD, pair_P, row_P) in enumerate(_by_peer(plan.rank_TK, plan.row_TK, rows)):
        view_CD.view(x_TD.dtype).index_copy_(0, row_P, x_TD.index_select(0, pair_P // num_choices))
        if weights_TK is not None and row_weights is not None:
            _views(row_weights)[peer].index_copy_(0, row_P, weights_TK.flatten().index_select(0, pair_P))


def clear_padding(rows_CD: Tensor, row_weights_C: Tensor | None, offsets_e: Tensor, total_e: Tensor) -> None:
    """Zero the padding rows; see `coterie_parallel.dispatch.rowwise.rows.clear_padding`."""
    row_C = torch.arange(rows_CD.shape[0], device=rows_CD.device)
    expert_C = torch.searchsorted(offsets_e, row_C.to(torch.int32), right=True)
    # Where the rows of each expert end and its padding begins; past the last segment nothing is padding.
    real_e = offsets_e - offsets_e.diff(prepend=offsets_e.new_zeros(1)) + total_e
    real_e1 = torch.cat((real_e, real_e.new_tensor([rows_CD.shape[0]])))
    padding_P = (row_C >= real_e1[expert_C]).nonzero().flatten()
    rows_CD.view(_INTEGERS[rows_CD.element_size()]).index_fill_(0, padding_P, 0)
    if row_weights_C is not None:
        row_weights_C.index_fill_(0, padding_P, 0)


def get_rows(rows: PeerTensor, plan: RowPlan) -> Tensor:
    """Return each token's sum of its rows; see `coterie_parallel.dispatch.rowwise.rows.get_rows`."""
    num_tokens, num_choices = plan.row_TK.shape
    y_TD = rows.local.new_empty((num_tokens, rows.local.shape[1]))
    token_bytes = num_choices * rows.local.shape[1] * rows.local.element_size()
    # A few tokens at a time: what was picked is still in the cache when it is added.
    step = max(1, _PICKED_BYTES // max(1, token_bytes))
    for start in range(0, num_tokens, step):
        some = slice(start, start + step)
        y_TD[some] = _sum_picked(rows, plan.rank_TK[some], plan.row_TK[some])
    return y_TD


def get_values(values: PeerTensor, plan: RowPlan) -> Tensor:
    """Return the value of each pair; see `coterie_parallel.dispatch.rowwise.rows.get_values`."""
    values_N = values.local.new_zeros(plan.row_TK.numel())
    for view_C, pair_P, row_P in _by_peer(plan.rank_TK, plan.row_TK, values):
        values_N[pair_P] = view_C.index_select(0, row_P)
    return values_N.view(plan.row_TK.shape)


def _sum_picked(rows: PeerTensor, rank_TK: Tensor, row_TK: Tensor) -> Tensor:
    parts = _by_peer(rank_TK, row_TK, rows)
    num_rows = sum(row_P.numel() for _, _, row_P in parts)
    rows_PD = rows.local.new_empty((num_rows, rows.local.shape[1]))
    slot_N = torch.full((row_TK.numel(),), -1, dtype=torch.int64, device=rows_PD.device)
    start = 0
    for view_CD, pair_P, row_P in parts:
        end = start + row_P.numel()
        torch.index_select(view_CD, 0, row_P, out=rows_PD[start:end])
        slot_N[pair_P] = torch.arange(start, end, device=rows_PD.device)
        start = end
    return sum_choices(rows_PD, slot_N.view(row_TK.shape))


def _views(tensor: PeerTensor) -> tuple[Tensor, ...]:
    if tensor.views is None:
        raise ValueError(
            "backend 'reference' reaches peers through views of their memory, and there are none here; choose 'triton'"
        )
    return tensor.views


def _by_peer(rank_TK: Tensor, row_TK: Tensor, tensor: PeerTensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each peer its view, and the pairs (token * K + choice) and rows that lie within it."""
    rank_N, row_N = rank_TK.flatten(), row_TK.flatten()
    is_held_N = row_N < tensor.local.shape[0]
    found = []
    for peer, view in enumerate(_views(tensor)):
        pair_P = ((rank_N == peer) & is_held_N).nonzero().flatten()
        found.append((view, pair_P, row_N.index_select(0, pair_P)))
    return found
