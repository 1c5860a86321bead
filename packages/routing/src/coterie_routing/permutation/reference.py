"""Rows to experts and back in plain torch: the ground truth, and the default on a CPU.

Sums over the rows of a token run in the order of the choices, in fp32 (fp64 for fp64 rows), and are rounded once.
"""

import torch
from torch import Tensor

from coterie_routing.row_map import RowMap

__all__ = ["permute", "unpermute", "unpermute_backward"]


def permute(x_TD: Tensor, row_map: RowMap, weights_TK: Tensor | None = None) -> Tensor:
    """Copy each token to its rows, times the weight of the choice where there are weights; other rows are zero."""
    num_slots, num_choices = row_map.slot_N.numel(), row_map.row_TK.shape[1]
    if num_slots == 0:
        return x_TD.new_empty(0, x_TD.shape[1])
    slot_N = row_map.slot_N.clamp_min(0)
    rows_ND = x_TD.index_select(0, slot_N.div(num_choices, rounding_mode="floor"))
    if weights_TK is not None:
        weights_N = weights_TK.reshape(-1).index_select(0, slot_N)
        rows_ND = _for_sums(rows_ND).mul_(weights_N[:, None]).to(x_TD.dtype)
    _clear(rows_ND, row_map.slot_N < 0)
    return rows_ND


def unpermute(rows_ND: Tensor, row_map: RowMap, weights_TK: Tensor | None = None) -> Tensor:
    """Sum the rows of each token, each times its weight where there are weights."""
    num_tokens, num_choices = row_map.row_TK.shape
    sum_TD = torch.zeros(num_tokens, rows_ND.shape[1], dtype=_sum_dtype(rows_ND), device=rows_ND.device)
    for choice in range(num_choices):
        row_T = row_map.row_TK[:, choice]
        term_TD = _for_sums(rows_ND.index_select(0, row_T.clamp_min(0)))
        if weights_TK is not None:
            term_TD.mul_(weights_TK[:, choice, None])
        _clear(term_TD, row_T < 0)
        sum_TD += term_TD
    return sum_TD.to(rows_ND.dtype)


def unpermute_backward(grad_TD: Tensor, rows_ND: Tensor, row_map: RowMap, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weights of a weighted `unpermute`."""
    grad_weights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    grad_wide_TD = _for_sums(grad_TD)
    for choice in range(weights_TK.shape[1]):
        row_T = row_map.row_TK[:, choice]
        rows_TD = _for_sums(rows_ND.index_select(0, row_T.clamp_min(0)))
        grad_T = torch.linalg.vecdot(rows_TD, grad_wide_TD)
        _clear(grad_T, row_T < 0)
        grad_weights_TK[:, choice] = grad_T
    return permute(grad_TD, row_map, weights_TK), grad_weights_TK


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _for_sums(rows: Tensor) -> Tensor:
    return rows.to(_sum_dtype(rows))


def _clear(rows: Tensor, is_unwanted: Tensor) -> None:
    """Write zeros in place; on a CPU, where looking costs no synchronisation, only if there is anything to clear."""
    if is_unwanted.device.type != "cpu" or bool(is_unwanted.any()):
        rows.masked_fill_(is_unwanted.view(-1, *[1] * (rows.dim() - 1)), 0)
