"""Experts on Triton kernels: gather in the matrix products, activation in their epilogues, no host synchronisation.

What is kept for the backward pass: x as it came, the product with the first weights (P, 2H, or H where the activation
has no gate) and index tensors. Rows are padded by
expert to whole tiles, P in all; nothing is permuted. No sum is made by atomics: results are bitwise repeatable. Triton
is imported when a kernel is first asked for. The matrix products have plain kernels, in the files beside this, and
specialised ones, in ``specialised``; ``triton_launch.py`` chooses.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.deferred import Deferral, Gradients
from coterie_experts.grouped_swiglu.requirements import capability_obstacle, in_one_sentence, whole, width_obstacle
from coterie_experts.main_grad import kernel_main_grad
from coterie_experts.once import captured_inputs, graph_is_kept, needed_inputs, refuse_create_graph
from coterie_experts.tables import TileTable
from coterie_experts.token_rows import sort_slots

if TYPE_CHECKING:
    from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
    from coterie_experts.grouped_swiglu.triton_tiles import TileSet

__all__ = ["experts_of_tokens", "grouped_experts", "obstacle"]

MainGrads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Where the kernels add the gradients of up, down, up_bias and down_bias; None where they return them."""

Ask = Callable[[], Tensor | None] | None
"""Called for memory to write rows to; None, or None returned, for new memory."""


def obstacle(*, d_model: int, d_hidden: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why this back-end cannot run, with what would work, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    found = []
    if device.type == "cpu":
        # Asked of the kernels themselves, for Triton decides when it defines them.
        from coterie_experts.grouped_swiglu import triton_layout

        if triton_layout.COMPILED:
            found.append("on cpu it runs in Triton's interpreter alone, for tests (TRITON_INTERPRET=1)")
        elif dtype != torch.float32:
            found.append(f"Triton's interpreter runs torch.float32, not {dtype}")
    elif device.type not in ("cuda", "meta"):
        found.append(f"device {device.type} is not cuda")
    elif device.type == "cuda" and dtype != torch.bfloat16:
        found.append(f"it runs torch.bfloat16 on cuda, not {dtype}")
    return in_one_sentence(
        *found,
        capability_obstacle(device, 9) if device.type == "cuda" else None,
        width_obstacle(d_model=d_model, d_hidden=d_hidden, dtype=dtype),
    )


def grouped_experts(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    main_grads: MainGrads = (None, None, None, None),
    deferral: Deferral | None = None,
    table: TileTable | None = None,
    ask_out: Ask = None,
    ask_grad_rows: Ask = None,
) -> Tensor:
    """Run rows in expert order; see ``coterie_experts.grouped_experts`` for the contract.

    The weight gradients are added to ``main_grads`` (float32) where there are any, or handed over where they are
    deferred. Can be differentiated once.
    """
    inputs = rows_RD, row_weights_R, up, down, up_bias, down_bias, offsets_e, None
    with torch.cuda.device_of(rows_RD):  # type: ignore[no-untyped-call]  # where Triton launches
        y_RD: Tensor = _TritonExperts.apply(*inputs, activation, main_grads, deferral, table, ask_out, ask_grad_rows)
    return y_RD


def experts_of_tokens(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    main_grads: MainGrads = (None, None, None, None),
    deferral: Deferral | None = None,
    table: TileTable | None = None,
) -> Tensor:
    """Send tokens through the experts they chose and sum; equals rows in expert order and a sum by k, bit for bit."""
    slots_N, offsets_e = sort_slots(ids_TK, up.shape[0])
    inputs = x_TD, weights_TK, up, down, up_bias, down_bias, offsets_e, slots_N
    with torch.cuda.device_of(x_TD):  # type: ignore[no-untyped-call]  # where Triton launches
        y_TD: Tensor = _TritonExperts.apply(*inputs, activation, main_grads, deferral, table, None, None)
    return y_TD


class _TritonExperts(torch.autograd.Function):
    """Both entries: S rows of x, each in K slots; K = 1, and no sum, where rows come in expert order."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        offsets_e: Tensor,
        slot_of_row_N: Tensor | None,
        activation: Activation,
        main_grads: MainGrads,
        deferral: Deferral | None,
        table: TileTable | None,
        ask_out: Ask,
        ask_grad_rows: Ask,
    ) -> Tensor:
        from coterie_experts.grouped_swiglu import triton_launch as launch
        from coterie_experts.grouped_swiglu.triton_layout import pad_rows
        from coterie_experts.grouped_swiglu.triton_tiles import choose_tiles

        x_SD, up, down = _row_major(x_SD), whole(up), whole(down)
        up_bias = None if up_bias is None else up_bias.contiguous()
        down_bias = None if down_bias is None else down_bias.contiguous()
        tiles = choose_tiles(
            interpreted=x_SD.device.type == "cpu",
            d_model=down.shape[1],
            d_hidden=down.shape[2],
            num_rows=weights.numel(),
            num_experts=down.shape[0],
            table=table,
        )
        num_choices = 1 if slot_of_row_N is None else weights.shape[1]
        launch.ensure_context(x_SD.device)
        layout = pad_rows(
            offsets_e,
            weights.flatten(),
            slot_of_row_N=slot_of_row_N,
            num_choices=num_choices,
            block=tiles.block_rows,
        )
        product_PU, activation_PH = launch.pre_and_activation(
            x_SD, layout, up, tiles, activation=activation, bias=up_bias
        )
        if slot_of_row_N is None:
            y_SD = launch.rows_to_rows(
                activation_PH,
                down,
                layout,
                tiles.down,
                offsets_e,
                transposed=True,
                bias=down_bias,
                out_RD=_memory(ask_out, x_SD),
            )
        else:
            y_SD = launch.rows_to_tokens(
                activation_PH,
                down,
                layout,
                tiles.down,
                transposed=True,
                num_choices=num_choices,
                bias=down_bias,
            )
        ctx.save_for_backward(x_SD, up, down, up_bias, down_bias, offsets_e, product_PU, *layout.tensors())
        ctx.main_grads, ctx.deferral, ctx.ask_grad_rows = main_grads, deferral, ask_grad_rows
        ctx.in_tokens = slot_of_row_N is not None
        ctx.weights_shape = weights.shape
        ctx.activation, ctx.tiles = activation, tiles
        return y_SD

    @staticmethod
    def backward(ctx: Any, grad_y_SD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        from coterie_experts.grouped_swiglu import triton_bias
        from coterie_experts.grouped_swiglu import triton_launch as launch
        from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout

        x_SD, up, down, up_bias, down_bias, offsets_e, product_PU, *rest = ctx.saved_tensors
        layout = PaddedLayout.of(tuple(rest))
        needs_x, needs_weights, *needs = needed_inputs(ctx)[:6]
        is_returned = captured_inputs(ctx)[2:6]
        main_grads = [None if here else one for here, one in zip(is_returned, ctx.main_grads, strict=True)]
        tiles, deferral = ctx.tiles, ctx.deferral
        grad_y_SD = _row_major(grad_y_SD)
        launch.ensure_context(grad_y_SD.device)

        grad_x_SD = grad_weights = None
        grad_pre_PU, activation_PH, dots_P = launch.hidden_gradients(
            grad_y_SD,
            product_PU,
            layout,
            down,
            tiles,
            activation=ctx.activation,
            bias=up_bias,
            overwrite=not graph_is_kept(),
        )
        bias_sums_MD = bias_dots_P = None
        if down_bias is not None and (needs_weights or needs[3]):
            bias_sums_MD, bias_dots_P = triton_bias.bias_sums_and_dots(grad_y_SD, down_bias, layout, tiles.block_rows)
        if needs_weights:
            grad_weights = launch.row_weight_gradients(dots_P, layout, tiles.block_rows, bias_dots_P=bias_dots_P).view(
                ctx.weights_shape
            )
        grad_up = grad_down = grad_up_bias = grad_down_bias = None
        if deferral is not None:
            deferral.hand_over(
                partial(
                    _deferred_gradients,
                    (grad_y_SD, activation_PH, bias_sums_MD),
                    (x_SD, grad_pre_PU),
                    layout,
                    tiles,
                    needs,
                    deferral.parameters,
                ),
                (x_SD, grad_y_SD),
                needs,
            )
        else:
            grad_down, grad_down_bias = _gradients_of_down(
                grad_y_SD, activation_PH, bias_sums_MD, layout, tiles, needs[1::2], main_grads[1::2]
            )
        # Released before the next large tensor is asked for.
        del activation_PH
        if needs_x and ctx.in_tokens:
            grad_x_SD = launch.rows_to_tokens(
                grad_pre_PU,
                up,
                layout,
                tiles.grad_rows,
                transposed=False,
                num_choices=ctx.weights_shape[1],
            )
        elif needs_x:
            grad_x_SD = launch.rows_to_rows(
                grad_pre_PU,
                up,
                layout,
                tiles.grad_rows,
                offsets_e,
                transposed=False,
                out_RD=_memory(ctx.ask_grad_rows, x_SD),
            )
        if deferral is None:
            grad_up, grad_up_bias = _gradients_of_up(x_SD, grad_pre_PU, layout, tiles, needs[::2], main_grads[::2])
        return (grad_x_SD, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias, *[None] * 8)


def _gradients_of_down(
    grad_y_SD: Tensor,
    activation_PH: Tensor,
    bias_sums_MD: Tensor | None,
    layout: "PaddedLayout",
    tiles: "TileSet",
    needs: Sequence[bool],
    main_grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of down and its bias, None for what is not needed or was added to its ``main_grad``."""
    from coterie_experts.grouped_swiglu import triton_bias
    from coterie_experts.grouped_swiglu import triton_launch as launch

    weight = bias = None
    if needs[0]:
        weight = launch.weight_gradient(
            grad_y_SD, activation_PH, layout, tiles.grad_down, transposed=False, main_grad=main_grads[0]
        )
    if needs[1]:
        assert bias_sums_MD is not None
        bias = triton_bias.bias_gradient(
            bias_sums_MD, layout, tiles.block_rows, dtype=grad_y_SD.dtype, main_grad=main_grads[1]
        )
    return weight, bias


def _gradients_of_up(
    x_SD: Tensor,
    grad_pre_PU: Tensor,
    layout: "PaddedLayout",
    tiles: "TileSet",
    needs: Sequence[bool],
    main_grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of up and its bias, likewise."""
    from coterie_experts.grouped_swiglu import triton_bias
    from coterie_experts.grouped_swiglu import triton_launch as launch

    weight = bias = None
    if needs[0]:
        weight = launch.weight_gradient(
            x_SD, grad_pre_PU, layout, tiles.grad_gate_up, transposed=True, main_grad=main_grads[0]
        )
    if needs[1]:
        sums_MU = triton_bias.column_sums(grad_pre_PU, layout, tiles.block_rows)
        bias = triton_bias.bias_gradient(sums_MU, layout, tiles.block_rows, dtype=x_SD.dtype, main_grad=main_grads[1])
    return weight, bias


def _deferred_gradients(
    of_down: tuple[Tensor, Tensor, Tensor | None],
    of_up: tuple[Tensor, Tensor],
    layout: "PaddedLayout",
    tiles: "TileSet",
    needs: Sequence[bool],
    parameters: Sequence[Tensor | None],
) -> Gradients:
    from coterie_experts.grouped_swiglu import triton_launch as launch

    launch.ensure_context(of_up[0].device)
    main_grads = [None if one is None else kernel_main_grad(one) for one in parameters]
    down, down_bias = _gradients_of_down(*of_down, layout, tiles, needs[1::2], main_grads[1::2])
    up, up_bias = _gradients_of_up(*of_up, layout, tiles, needs[::2], main_grads[::2])
    return up, down, up_bias, down_bias


def _memory(ask: Ask, like_RD: Tensor) -> Tensor | None:
    memory = None if ask is None else ask()
    if memory is not None and not (
        memory.shape == like_RD.shape
        and (memory.dtype, memory.device) == (like_RD.dtype, like_RD.device)
        and memory.is_contiguous()
        and memory.data_ptr() % 16 == 0
    ):
        raise ValueError(
            f"memory to write rows to must be contiguous {like_RD.dtype} of shape {tuple(like_RD.shape)} on "
            f"{like_RD.device} and begin at a multiple of 16 bytes, but is {memory.dtype} of shape "
            f"{tuple(memory.shape)} and strides {memory.stride()} on {memory.device}"
        )
    # Another object each time: the graph of a call hangs on the tensor that it returns.
    return None if memory is None else memory.detach()


def _row_major(tensor: Tensor) -> Tensor:
    # Rows of 16 bytes that begin at a multiple of 16 bytes: what wide loads need.
    is_wide = tensor.stride(0) * tensor.itemsize % 16 == 0 and tensor.data_ptr() % 16 == 0
    if tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] and is_wide:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
