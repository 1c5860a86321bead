"""Experts on Triton kernels: gather in the matrix products, SwiGLU in their epilogues, no host synchronisation.

What is kept for the backward pass: x as it came, the pre-activation (P, 2H) and index tensors. Rows are padded by
expert to whole tiles, P in all; nothing is permuted. No atomics: results are bitwise repeatable. Triton is imported
when a kernel is first asked for.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from coterie_experts.grouped_swiglu.alignment import width_obstacle
from coterie_experts.once import refuse_second_derivative
from coterie_experts.tables import TileTable
from coterie_experts.token_rows import sort_slots

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
    if activation != "swiglu":
        return f"its kernels have the activation swiglu, not {activation}"
    if bias:
        return "its kernels have no biases"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        # Asked of the kernels themselves, for Triton decides when it defines them.
        from coterie_experts.grouped_swiglu import triton_layout

        if triton_layout.COMPILED:
            return "on cpu it runs in Triton's interpreter alone, for tests (TRITON_INTERPRET=1)"
        if dtype != torch.float32:
            return f"Triton's interpreter runs torch.float32, not {dtype}"
    elif device.type != "meta":
        if device.type != "cuda":
            return f"device {device.type} is not cuda"
        if dtype != torch.bfloat16:
            return f"it runs torch.bfloat16 on cuda, not {dtype}"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return f"it needs compute capability 9, which {torch.cuda.get_device_name(device)} has not"
    return width_obstacle(d_model=d_model, d_hidden=d_hidden, dtype=dtype)


def grouped_swiglu(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    table: TileTable | None = None,
) -> Tensor:
    """Run rows in expert order; see ``coterie_experts.grouped_swiglu`` for the contract.

    The weight gradients of gate_up and down are added to ``main_grads`` (float32) where there are any. Can be
    differentiated once.
    """
    y_RD: Tensor = _TritonSwiGLU.apply(rows_RD, row_weights_R, gate_up, down, offsets_e, None, *main_grads, table)
    return y_RD


def swiglu_of_tokens(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    table: TileTable | None = None,
) -> Tensor:
    """Send tokens through the experts they chose and sum; equals rows in expert order and a sum by k, bit for bit."""
    slot_of_row_N, offsets_e = sort_slots(ids_TK, gate_up.shape[0])
    y_TD: Tensor = _TritonSwiGLU.apply(x_TD, weights_TK, gate_up, down, offsets_e, slot_of_row_N, *main_grads, table)
    return y_TD


class _TritonSwiGLU(torch.autograd.Function):
    """Both entries: S rows of x, each in K slots; K = 1, and no sum, where rows come in expert order."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        offsets_e: Tensor,
        slot_of_row_N: Tensor | None,
        gate_up_main_grad: Tensor | None,
        down_main_grad: Tensor | None,
        table: TileTable | None,
    ) -> Tensor:
        from coterie_experts.grouped_swiglu import triton_launch as launch
        from coterie_experts.grouped_swiglu.triton_layout import pad_rows
        from coterie_experts.grouped_swiglu.triton_tiles import choose_tiles

        x_SD, gate_up, down = _row_major(x_SD), gate_up.contiguous(), down.contiguous()
        tiles = choose_tiles(
            interpreted=x_SD.device.type == "cpu",
            d_model=down.shape[1],
            d_hidden=down.shape[2],
            num_rows=weights.numel(),
            num_experts=down.shape[0],
            table=table,
        )
        num_choices = 1 if slot_of_row_N is None else weights.shape[1]
        layout = pad_rows(
            offsets_e,
            weights.flatten(),
            slot_of_row_N=slot_of_row_N,
            num_choices=num_choices,
            block=tiles.block_rows,
        )
        pre_P2H, activation_PH = launch.pre_and_activation(x_SD, layout, gate_up, tiles)
        if slot_of_row_N is None:
            y_SD = launch.rows_to_rows(activation_PH, down, layout, tiles.down, offsets_e, transposed=True)
        else:
            y_SD = launch.rows_to_tokens(
                activation_PH,
                down,
                layout,
                tiles.down,
                transposed=True,
                num_choices=num_choices,
            )
        ctx.save_for_backward(x_SD, gate_up, down, offsets_e, pre_P2H, *layout.tensors())
        ctx.main_grads = gate_up_main_grad, down_main_grad
        ctx.in_tokens = slot_of_row_N is not None
        ctx.weights_shape = weights.shape
        ctx.tiles = tiles
        return y_SD

    @staticmethod
    def backward(ctx: Any, grad_y_SD: Tensor) -> tuple[Tensor | None, ...]:
        # Once: a checkpoint hands each saved tensor out a single time.
        saved = ctx.saved_tensors
        refuse_second_derivative(grad_y_SD, *saved)
        from coterie_experts.grouped_swiglu import triton_launch as launch
        from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout

        x_SD, gate_up, down, offsets_e, pre_P2H, *rest = saved
        layout = PaddedLayout.of(tuple(rest))
        needs_x, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        gate_up_main_grad, down_main_grad = ctx.main_grads
        tiles = ctx.tiles
        grad_y_SD = _row_major(grad_y_SD)

        grad_x_SD = grad_weights = grad_gate_up = grad_down = None
        grad_pre_P2H, activation_PH, dots_P = launch.hidden_gradients(
            grad_y_SD, pre_P2H, layout, down, tiles, overwrite=not _graph_is_kept()
        )
        if needs_weights:
            grad_weights = launch.row_weight_gradients(dots_P, layout, tiles.block_rows).view(ctx.weights_shape)
        if needs_down:
            grad_down = launch.weight_gradient(
                grad_y_SD, activation_PH, layout, tiles.grad_down, transposed=False, main_grad=down_main_grad
            )
        # Released before the next large tensor is asked for.
        del activation_PH
        if needs_x and ctx.in_tokens:
            grad_x_SD = launch.rows_to_tokens(
                grad_pre_P2H,
                gate_up,
                layout,
                tiles.grad_rows,
                transposed=False,
                num_choices=ctx.weights_shape[1],
            )
        elif needs_x:
            grad_x_SD = launch.rows_to_rows(grad_pre_P2H, gate_up, layout, tiles.grad_rows, offsets_e, transposed=False)
        if needs_gate_up:
            grad_gate_up = launch.weight_gradient(
                x_SD, grad_pre_P2H, layout, tiles.grad_gate_up, transposed=True, main_grad=gate_up_main_grad
            )
        return grad_x_SD, grad_weights, grad_gate_up, grad_down, None, None, None, None, None


def _graph_is_kept() -> bool:
    """Say whether the caller may go through this graph again (``retain_graph``), so that nothing may be overwritten."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else bool(keeps())


def _row_major(tensor: Tensor) -> Tensor:
    # Rows of 16 bytes that begin at a multiple of 16 bytes: what wide loads need.
    if tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] and tensor.stride(0) * tensor.itemsize % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
