"""Experts on the CuTe DSL kernels of ``quack-kernels`` (extra ``quack``): all six products, no host synchronisation.

quack (github.com/Dao-AILab/quack, 0.4 to 0.6) has grouped products with the gather, SwiGLU and its gradient inside.
Sorting, the sum over the choices of a token and the clearing of rows that do not count are our own Triton kernels. What
is kept for the backward pass: x as it came, the pre-activation (R, 2H) with gate and up columns in turn, and indices.
Both packages are imported when a kernel is first asked for, and quack compiles each kernel on its first call.
"""

# mypy: disable-error-code="import-not-found"

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie_experts.deferred import Deferral, Gradients
from coterie_experts.grouped_swiglu.requirements import capability_obstacle, in_one_sentence, whole, width_obstacle
from coterie_experts.once import needed_inputs, refuse_create_graph
from coterie_experts.token_rows import order_by_expert

__all__ = ["grouped_swiglu", "obstacle", "swiglu_of_tokens"]


def obstacle(
    *,
    d_model: int,
    d_hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    activation: str = "swiglu",
    bias: bool = False,
) -> str | None:
    """Return why this back-end cannot run, with what would work, or None if it can."""
    found = []
    if activation != "swiglu":
        found.append(f"it has the activation swiglu, not {activation}")
    if bias:
        found.append("it has no biases")
    missing = [name for name in ("quack", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        found.append(f"{' and '.join(missing)} {verb} not installed; pip install 'coterie-experts[quack]'")
    if device.type not in ("cuda", "meta"):
        found.append(f"device {device.type} is not cuda")
    if device.type != "meta" and dtype != torch.bfloat16:
        found.append(f"it runs torch.bfloat16, not {dtype}")
    return in_one_sentence(
        *found,
        capability_obstacle(device, 9) if device.type == "cuda" else None,
        width_obstacle(d_model=d_model, d_hidden=d_hidden, dtype=dtype),
    )


def grouped_swiglu(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    deferral: Deferral | None = None,
) -> Tensor:
    """Run rows in expert order; see ``coterie_experts.grouped_swiglu`` for the contract. Can be differentiated once."""
    source_R = torch.arange(rows_RD.shape[0], dtype=torch.int32, device=rows_RD.device)
    inputs = rows_RD, row_weights_R, gate_up, down, offsets_e, source_R, None, None
    with torch.cuda.device_of(rows_RD):  # type: ignore[no-untyped-call]  # where kernels are launched
        y_RD: Tensor = _QuackSwiGLU.apply(*inputs, deferral)
    return y_RD


def swiglu_of_tokens(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    deferral: Deferral | None = None,
) -> Tensor:
    """Send tokens through the experts they chose and sum; equals rows in expert order and a sum by k, bit for bit."""
    order = order_by_expert(ids_TK, down.shape[0])
    source_R = (order.slot_of_row_N // ids_TK.shape[1]).to(torch.int32)
    slots = order.slot_of_row_N, order.row_of_slot_TK.int()
    with torch.cuda.device_of(x_TD):  # type: ignore[no-untyped-call]  # where kernels are launched
        y_TD: Tensor = _QuackSwiGLU.apply(x_TD, weights_TK, gate_up, down, order.offsets_e, source_R, *slots, deferral)
    return y_TD


class _QuackSwiGLU(torch.autograd.Function):
    """Both entries: rows of x taken by ``source``; without slots, rows in expert order that are not added up."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        offsets_e: Tensor,
        source_R: Tensor,
        slot_of_row_N: Tensor | None,
        row_of_slot_TK: Tensor | None,
        deferral: Deferral | None,
    ) -> Tensor:
        from quack.gemm_interface import gemm, gemm_gated

        x_SD, gate_up, down = whole(x_SD), whole(gate_up), whole(down)
        weights_R = (
            weights.flatten().contiguous()
            if slot_of_row_N is None
            else weights.flatten().index_select(0, slot_of_row_N)
        )
        starts_e1 = F.pad(offsets_e, (1, 0))
        num_rows, d_model, d_hidden = source_R.shape[0], down.shape[1], down.shape[2]
        pre_R2H = x_SD.new_empty(num_rows, 2 * d_hidden)
        y_RD = x_SD.new_empty(num_rows, d_model)
        if num_rows > 0:
            activation_RH = x_SD.new_empty(num_rows, d_hidden)
            gemm_gated(
                x_SD,
                gate_up.mT,
                activation="swiglu",
                preact_out=pre_R2H,
                postact_out=activation_RH,
                cu_seqlens_m=starts_e1,
                A_idx=source_R,
                tuned=False,
                concat_layout=("B",),
            )
            activation_RH.mul_(weights_R[:, None])
            _clear_rows(activation_RH, weights_R == 0)
            gemm(activation_RH, down.mT, out=y_RD, cu_seqlens_m=starts_e1, tuned=False)
        ctx.save_for_backward(
            x_SD, weights_R, gate_up, down, starts_e1, source_R, slot_of_row_N, row_of_slot_TK, pre_R2H
        )
        ctx.weights_shape, ctx.deferral = weights.shape, deferral
        return _to_places(y_RD, starts_e1, row_of_slot_TK, x_SD.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_y_SD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        x_SD, weights_R, gate_up, down, starts_e1, source_R, slot_of_row_N, row_of_slot_TK, pre_R2H = ctx.saved_tensors
        needs = needed_inputs(ctx)[2:4]
        if source_R.shape[0] == 0:
            grads = _or_deferred(ctx.deferral, lambda: [torch.zeros_like(gate_up), torch.zeros_like(down)], (), needs)
            zeros = torch.zeros_like(weights_R).view(ctx.weights_shape)
            return torch.zeros_like(x_SD), zeros, *grads, None, None, None, None, None
        from quack.gemm_interface import gemm, gemm_dgated

        grad_y_SD = whole(grad_y_SD)
        is_zero_R = weights_R == 0
        grad_pre_R2H, activation_RH, dots_R = gemm_dgated(
            grad_y_SD,
            down,
            PreAct=pre_R2H,
            activation="swiglu",
            colvec_scale=weights_R,
            colvec_reduce=True,
            cu_seqlens_m=starts_e1,
            A_idx=source_R,
            dynamic_scheduler=False,
            tuned=False,
        )
        grad_weights = _row_weight_gradient(dots_R, is_zero_R, starts_e1, slot_of_row_N).view(ctx.weights_shape)
        # Weight gradients take nothing from rows of weight zero, which may hold NaN on both sides of a product: zeros
        # here, and there the row of zeros past the last one.
        _clear_rows(grad_pre_R2H, is_zero_R)
        _clear_rows(activation_RH, is_zero_R)
        counted_R = torch.where(is_zero_R, x_SD.shape[0], source_R)
        grad_rows_RD = x_SD.new_empty(source_R.shape[0], x_SD.shape[1])
        gemm(grad_pre_R2H, gate_up, out=grad_rows_RD, cu_seqlens_m=starts_e1, tuned=False, concat_layout=("B",))
        grad_x_SD = _to_places(grad_rows_RD, starts_e1, row_of_slot_TK, x_SD.shape[0])
        # Released before the next large tensor is asked for.
        del grad_rows_RD
        compute = partial(
            _weight_gradients, (grad_y_SD, activation_RH), (x_SD, grad_pre_R2H), counted_R, starts_e1, (gate_up, down)
        )
        grads = _or_deferred(ctx.deferral, compute, (x_SD, grad_y_SD), needs)
        return grad_x_SD, grad_weights, *grads, None, None, None, None, None


def _or_deferred(
    deferral: Deferral | None,
    compute: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of gate_up and down, or None for both and hand ``compute`` over."""
    if deferral is None:
        return compute()

    def of_all() -> Gradients:
        found = (one if needed else None for one, needed in zip(compute(), needs, strict=True))
        return (*found, None, None)

    deferral.hand_over(of_all, inputs, needs)
    return None, None


def _weight_gradients(
    of_down: tuple[Tensor, Tensor],
    of_gate_up: tuple[Tensor, Tensor],
    counted_R: Tensor,
    starts_e1: Tensor,
    like: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """Return the gradients of gate_up and down."""
    from quack.gemm_interface import gemm

    is_idle_e = starts_e1[1:] == starts_e1[:-1]
    grads = []
    for (gathered_SD, rows_RN), one, concat_layout in zip((of_gate_up, of_down), like, (("out",), None), strict=True):
        grad = torch.empty_like(one)
        gemm(
            F.pad(gathered_SD, (0, 0, 0, 1)).T,
            rows_RN,
            out=grad if concat_layout is None else grad.mT,
            cu_seqlens_k=starts_e1,
            A_idx=counted_R,
            tuned=False,
            concat_layout=concat_layout,
        )
        _clear_rows(grad.flatten(1), is_idle_e)
        grads.append(grad)
    return grads


def _row_weight_gradient(dots_R: Tensor, is_zero_R: Tensor, starts_e1: Tensor, slot_of_row_N: Tensor | None) -> Tensor:
    """Return the dots by slot; zero past the last row, and at weight zero where the dot is not finite."""
    is_past_R = torch.arange(dots_R.shape[0], device=dots_R.device) >= starts_e1[-1]
    grad_R = dots_R.masked_fill(is_past_R | (is_zero_R & ~dots_R.isfinite()), 0)
    return grad_R if slot_of_row_N is None else torch.empty_like(grad_R).index_copy_(0, slot_of_row_N, grad_R)


def _to_places(rows_RD: Tensor, starts_e1: Tensor, row_of_slot_TK: Tensor | None, num_tokens: int) -> Tensor:
    """Return rows with zeros past the last one, or the sum of the rows of each token in the order of k."""
    from coterie_experts.grouped_swiglu import triton_launch as launch

    launch.clear_past_the_end(rows_RD, starts_e1)
    if row_of_slot_TK is None:
        return rows_RD
    out_TD = rows_RD.new_empty(num_tokens, rows_RD.shape[1])
    launch.sum_rows(rows_RD, row_of_slot_TK, out_TD)
    return out_TD


def _clear_rows(rows_RN: Tensor, is_chosen_R: Tensor) -> None:
    from coterie_experts.grouped_swiglu import triton_launch as launch

    launch.clear_chosen_rows(rows_RN, is_chosen_R)
