"""The usual plain-torch row map, permute and un-permute, against which ours are timed; every choice is routed."""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["one_hot_map", "plain_gather", "plain_weighted_index_add", "plain_weighted_sum"]


def one_hot_map(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts, ends, the row of each choice and the choice of each row, from the running sum of one-hot masks."""
    ids_N = ids_TK.reshape(-1)
    one_hot_NE = functional.one_hot(ids_N, num_experts)
    running_NE = one_hot_NE.cumsum(0)
    counts_E = one_hot_NE.sum(0)
    ends_E = counts_E.cumsum(0)
    row_N = running_NE.gather(1, ids_N[:, None])[:, 0] - 1 + (ends_E - counts_E)[ids_N]
    slot_N = torch.empty_like(row_N).scatter_(0, row_N, torch.arange(row_N.numel(), device=row_N.device))
    return counts_E, ends_E.to(torch.int32), row_N.view(ids_TK.shape), slot_N


def plain_gather(x_TD: Tensor, token_N: Tensor) -> Tensor:
    """Copy tokens to rows by an index."""
    return x_TD[token_N]


def plain_weighted_sum(rows_ND: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """Gather the K rows of each token and sum them in fp32."""
    return (rows_ND[row_TK].float() * weights_TK[..., None]).sum(1).to(rows_ND.dtype)


def plain_weighted_index_add(rows_ND: Tensor, weights_TK: Tensor, slot_N: Tensor) -> Tensor:
    """Add the weighted rows to their tokens in fp32; on a GPU by atomic additions in no fixed order."""
    num_tokens, num_choices = weights_TK.shape
    weighted_ND = rows_ND.float() * weights_TK.reshape(-1)[slot_N][:, None]
    y_TD = torch.zeros(num_tokens, rows_ND.shape[1], dtype=torch.float32, device=rows_ND.device)
    return y_TD.index_add(0, slot_N // num_choices, weighted_ND).to(rows_ND.dtype)
