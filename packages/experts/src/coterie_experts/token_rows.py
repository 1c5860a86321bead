"""From tokens to rows in expert order and back, for one rank that holds all experts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TokenOrder", "id_problems", "order_by_expert", "rows_from_tokens", "sort_slots", "sum_over_choices"]


@dataclass(frozen=True, kw_only=True)
class TokenOrder:
    """Where the rows of a batch lie: sorted by expert, then token, then choice; what is not routed lies past the end.

    Attributes:
        slot_of_row_N: int64, the slot token * K + choice that row n holds; N = T*K.
        row_of_slot_TK: int64, its inverse.
        offsets_e: int32, inclusive ends of the experts' segments.
    """

    slot_of_row_N: Tensor
    row_of_slot_TK: Tensor
    offsets_e: Tensor


def sort_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the slots sorted by (expert, token, choice), int64, and the inclusive ends of the segments, int32.

    Slots that are not routed (id -1) come last, and so do ids that no expert has. The keys are as narrow as the number
    of experts allows: a radix sort takes one pass for each byte of a key.
    """
    dtype = next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if num_experts <= torch.iinfo(dtype).max)
    keys_N = torch.where(ids_TK < 0, num_experts, ids_TK).clamp_(max=num_experts).to(dtype).flatten()
    sorted_N, slot_of_row_N = torch.sort(keys_N, stable=True)
    experts_e = torch.arange(num_experts, dtype=dtype, device=keys_N.device)
    return slot_of_row_N, torch.searchsorted(sorted_N, experts_e, right=True, out_int32=True)


def id_problems(ids_TK: Tensor, num_experts: int) -> list[str]:
    """Return what is wrong with ids; their values are read on the CPU alone, where that costs no synchronisation."""
    if not 1 <= num_experts < 2**31:
        return [f"num_experts ({num_experts}) must be from 1 to {2**31 - 1}"]
    if ids_TK.dtype != torch.int64:
        return [f"ids must be torch.int64, but are {ids_TK.dtype}"]
    if ids_TK.dim() != 2:
        return [f"ids must have shape (T, K), but have {tuple(ids_TK.shape)}"]
    if ids_TK.device.type == "cpu" and ids_TK.numel() > 0:
        lowest, highest = ids_TK.min().item(), ids_TK.max().item()
        if lowest < -1 or highest >= num_experts:
            return [f"ids must be -1 to {num_experts - 1}, but go from {lowest} to {highest}"]
    return []


def order_by_expert(ids_TK: Tensor, num_experts: int) -> TokenOrder:
    """Sort the slots of a batch by expert id (int64, -1 = not routed), stable and with no host synchronisation.

    Raises:
        ValueError: ids are not (T, K) of int64, or, on the CPU, not -1 to E-1; elsewhere such a slot is not routed.
    """
    problems = id_problems(ids_TK, num_experts)
    if problems:
        raise ValueError("\n".join(problems))
    slot_of_row_N, offsets_e = sort_slots(ids_TK, num_experts)
    row_of_slot_N = torch.empty_like(slot_of_row_N)
    row_of_slot_N[slot_of_row_N] = torch.arange(slot_of_row_N.numel(), device=slot_of_row_N.device)
    return TokenOrder(slot_of_row_N=slot_of_row_N, row_of_slot_TK=row_of_slot_N.view(ids_TK.shape), offsets_e=offsets_e)


def rows_from_tokens(x_TD: Tensor, order: TokenOrder) -> Tensor:
    """Copy each token to the rows of its K choices; the gradient of a token is their sum in the order of k.

    Raises:
        ValueError: there are not as many tokens as the order has.
    """
    _check_number("tokens", x_TD, order.row_of_slot_TK.shape[0])
    rows_ND: Tensor = _RowsFromTokens.apply(x_TD, order.slot_of_row_N, order.row_of_slot_TK)
    return rows_ND


def sum_over_choices(rows_ND: Tensor, order: TokenOrder) -> Tensor:
    """Add the K rows of each token in the order of k, in float32 at least, and round once.

    A slot that is not routed adds its row too, which lies past the end: it has to be zero, as the experts leave it.

    Raises:
        ValueError: there are not as many rows as the order has.
    """
    _check_number("rows", rows_ND, order.slot_of_row_N.shape[0])
    y_TD: Tensor = _SumOverChoices.apply(rows_ND, order.slot_of_row_N, order.row_of_slot_TK)
    return y_TD


# Both are linear and each is the other's gradient, so that they can be differentiated any number of times.
class _RowsFromTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_row_N, row_of_slot_TK)
        return _gather(x_TD, slot_of_row_N, row_of_slot_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_rows_ND: Tensor) -> tuple[Tensor, None, None]:
        return _SumOverChoices.apply(grad_rows_ND, *ctx.saved_tensors), None, None


class _SumOverChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_row_N, row_of_slot_TK)
        return _sum(rows_ND, row_of_slot_TK)

    @staticmethod
    def backward(ctx: Any, grad_y_TD: Tensor) -> tuple[Tensor, None, None]:
        return _RowsFromTokens.apply(grad_y_TD, *ctx.saved_tensors), None, None


def _check_number(name: str, tensor: Tensor, number: int) -> None:
    if tensor.dim() != 2 or tensor.shape[0] != number:
        raise ValueError(
            f"{name} must have shape ({number}, D), as their order has {number}, not {tuple(tensor.shape)}"
        )


def _gather(x_TD: Tensor, slot_of_row_N: Tensor, num_choices: int) -> Tensor:
    return x_TD.index_select(0, slot_of_row_N // num_choices)


def _sum(rows_ND: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    # A loop, because the order in which `sum` or `index_add` adds is not promised.
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    total_TD = torch.zeros(row_of_slot_TK.shape[0], rows_ND.shape[1], dtype=dtype, device=rows_ND.device)
    for row_of_slot_T in row_of_slot_TK.unbind(dim=1):
        total_TD += rows_ND.index_select(0, row_of_slot_T)
    return total_TD.to(rows_ND.dtype)
