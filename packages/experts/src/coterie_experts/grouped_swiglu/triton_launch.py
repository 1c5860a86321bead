"""Launches of the Triton kernels: allocation, tensor descriptors and grids, with nothing read from the device.

A matrix product whose tile has a ring goes to the specialised kernel where that runs on the device and fits the case,
else to the plain one; both give the same bits.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-call"

import threading
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from coterie_experts.activation import Activation
from coterie_experts.grouped_swiglu import specialised
from coterie_experts.grouped_swiglu.triton_backward import (
    grad_of_hidden,
    grad_of_row_weights,
    grad_of_weights_by_load,
    grad_of_weights_in_turn,
)
from coterie_experts.grouped_swiglu.triton_forward import (
    clear_rows,
    clear_rows_past_the_end,
    rows_times_weights,
    sum_rows_of_tokens,
    up_with_activation,
)
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet

__all__ = [
    "clear_chosen_rows",
    "clear_past_the_end",
    "hidden_gradients",
    "ensure_context",
    "pre_and_activation",
    "row_weight_gradients",
    "rows_to_rows",
    "rows_to_tokens",
    "sum_rows",
    "weight_gradient",
]

# Of a plain matrix kernel. Products and sums are fused, which is part of the bits and no default as of Triton 3.10.
_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": True}
# Of each thread, the devices whose context it has.
_threads = threading.local()


def ensure_context(device: torch.device) -> None:
    """Let this thread have the context of the device, which a TMA descriptor needs and does not ask for.

    PyTorch gives it to a thread with the first work that the thread launches. A thread of autograd whose first work is
    a kernel with descriptors, which another thread has loaded, would have none: "invalid device context" (PyTorch's
    issue 124565).
    """
    known = _threads.__dict__.setdefault("devices", set())
    if device.type == "cuda" and device.index not in known:
        torch.zeros(1, device=device)
        known.add(device.index)


def pre_and_activation(
    x_SD: Tensor, layout: PaddedLayout, up: Tensor, tiles: TileSet, *, activation: Activation, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the product with ``up`` (P, 2H), or (P, H) without a gate, and the activation times the row weight (P, H).

    The bias (e, columns of the product) is part of the activation, not of the product.
    """
    num_experts, d_pre, d_model = up.shape
    sides = 2 if activation.is_gated else 1
    d_hidden = d_pre // sides
    tile = tiles.up
    # As many columns of the product in a tile, with a gate and without.
    hidden = tile.columns * 2 // sides
    grid = _persistent(layout, d_hidden, hidden)
    if _may_be_specialised(tile, x_SD.device):
        from coterie_experts.grouped_swiglu.specialised import up as specialised_up

        if specialised_up.fits(d_model=d_model, tile=tile):
            return specialised_up.pre_and_activation(
                x_SD, layout, up, tile, activation=activation, bias=bias, num_programs=grid[0]
            )
    product_PU = x_SD.new_empty(layout.num_padded, d_pre)
    activation_PH = x_SD.new_empty(layout.num_padded, d_hidden)
    block = [tile.rows, hidden]
    up_with_activation[grid](
        x_SD,
        x_SD.stride(0),
        TensorDescriptor.from_tensor(up.view(num_experts, sides, d_hidden, d_model), [1, sides, hidden, tile.depth]),
        TensorDescriptor.from_tensor(product_PU[:, :d_hidden], block),
        TensorDescriptor.from_tensor(product_PU[:, d_hidden:], block) if activation.is_gated else None,
        TensorDescriptor.from_tensor(activation_PH, block),
        bias,
        layout.source_P,
        layout.weight_P,
        layout.expert_M,
        layout.has_zero_M,
        layout.num_tiles_1,
        d_model,
        d_hidden,
        ROWS=tile.rows,
        HIDDEN=hidden,
        DEPTH=tile.depth,
        BAND=tile.band,
        EVEN=d_model % tile.depth == 0,
        **_constants(activation),
        **_OPTIONS,
        num_stages=tile.num_stages,
    )
    return product_PU, activation_PH


def rows_to_tokens(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    num_choices: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Return, for each token, the sum over its choices of rows times weights, (T, columns).

    A bias (e, columns) is added to each product, times the row weight.

    The products of the rows are kept for some of the columns at a time: as many as they have numbers each, or 1024 (of
    a forward pass) or 2048.
    """
    most_columns = max(1024 if transposed else 2048, rows_PK.shape[1])
    num_columns = weights.shape[1] if transposed else weights.shape[2]
    num_tokens = layout.position_N.shape[0] // num_choices
    out_TD = rows_PK.new_empty(num_tokens, num_columns)
    part = triton.cdiv(num_columns, triton.cdiv(num_columns, most_columns))
    part = triton.cdiv(part, tile.columns) * tile.columns
    products = rows_PK.new_empty(layout.num_padded * min(part, num_columns))
    for first in range(0, num_columns, part):
        width = min(part, num_columns - first)
        rows_Pd = products[: layout.num_padded * width].view(layout.num_padded, width)
        _multiply(
            rows_PK, weights, layout, tile, transposed=transposed, first=first, width=width, bias=bias, products=rows_Pd
        )
        sum_rows(rows_Pd, layout.position_N.view(num_tokens, num_choices), out_TD[:, first : first + width])
    return out_TD


def sum_rows(rows_Pd: Tensor, position_TK: Tensor, out_Td: Tensor) -> None:
    """Write, for each token, the sum of its K rows in the order of k; position -1 adds nothing."""
    num_tokens, num_choices = position_TK.shape
    width = rows_Pd.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    if num_tokens > 0:
        sum_rows_of_tokens[(num_tokens, triton.cdiv(width, block))](
            rows_Pd,
            position_TK,
            out_Td,
            out_Td.stride(0),
            width,
            CHOICES=num_choices,
            COLUMNS=block,
            num_warps=max(1, block // 256),
        )


def rows_to_rows(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    offsets_e: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    out_RD: Tensor | None = None,
) -> Tensor:
    """Return rows times weights, each padded row in the place of its source; rows that belong to no expert are zero.

    A bias (e, columns) is added to each product, times the row weight. They are written to ``out_RD`` if it is given.
    """
    num_columns = weights.shape[1] if transposed else weights.shape[2]
    if out_RD is None:
        out_RD = rows_PK.new_empty(layout.position_N.shape[0], num_columns)
    _multiply(
        rows_PK, weights, layout, tile, transposed=transposed, first=0, width=num_columns, bias=bias, targets=out_RD
    )
    clear_past_the_end(out_RD, offsets_e)
    return out_RD


def _multiply(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    first: int,
    width: int,
    bias: Tensor | None = None,
    products: Tensor | None = None,
    targets: Tensor | None = None,
) -> None:
    grid = _persistent(layout, width, tile.columns)
    if _may_be_specialised(tile, rows_PK.device):
        from coterie_experts.grouped_swiglu.specialised import products as specialised_products

        if specialised_products.fits(tile=tile):
            specialised_products.multiply(
                rows_PK,
                weights,
                layout,
                tile,
                transposed=transposed,
                first=first,
                width=width,
                bias=bias,
                products=products,
                targets=targets,
                num_programs=grid[0],
            )
            return
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    # A kernel takes a pointer and a descriptor and uses one of the two.
    any_PK = rows_PK if products is None else products
    rows_times_weights[grid](
        TensorDescriptor.from_tensor(rows_PK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weights, block),
        TensorDescriptor.from_tensor(any_PK, [tile.rows, tile.columns]),
        rows_PK if targets is None else targets,
        0 if targets is None else targets.stride(0),
        None if bias is None else bias[:, first:],
        None if bias is None else bias.stride(0),
        layout.source_P,
        None if bias is None else layout.weight_P,
        layout.expert_M,
        layout.num_tiles_1,
        rows_PK.shape[1],
        first,
        width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        TRANSPOSED=transposed,
        SCATTER=targets is not None,
        FLATTEN=tile.flatten,
        **_OPTIONS,
        num_stages=tile.num_stages,
    )


def clear_past_the_end(out_RD: Tensor, offsets_e: Tensor) -> None:
    """Write zeros to the rows past the last offset; (R, D), contiguous."""
    num_rows, width = out_RD.shape
    if num_rows > 0:
        clear_rows_past_the_end[(triton.cdiv(num_rows, 16),)](
            out_RD,
            offsets_e,
            offsets_e.shape[0],
            num_rows,
            width,
            ROWS=16,
            COLUMNS=min(512, triton.next_power_of_2(width)),
        )


def clear_chosen_rows(out_RN: Tensor, is_chosen_R: Tensor) -> None:
    """Write zeros to the rows that a mask chooses; (R, N), contiguous, and bool."""
    num_rows, width = out_RN.shape
    block_rows, block_columns = (16, 512) if num_rows > 4096 else (1, 4096)
    blocks_of_program = min(8, triton.cdiv(width, block_columns))
    if num_rows > 0:
        clear_rows[(triton.cdiv(num_rows, block_rows), triton.cdiv(width, block_columns * blocks_of_program))](
            out_RN,
            is_chosen_R,
            num_rows,
            width,
            ROWS=block_rows,
            COLUMNS=block_columns,
            BLOCKS=blocks_of_program,
        )


def hidden_gradients(
    grad_y_SD: Tensor,
    product_PU: Tensor,
    layout: PaddedLayout,
    down: Tensor,
    tiles: TileSet,
    *,
    activation: Activation,
    bias: Tensor | None,
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the pre-activation (P, 2H or H), the weighted activation (P, H) and dots.

    ``product_PU`` is what ``pre_and_activation`` gave; with ``overwrite`` the gradient takes its memory. The dots
    (P, column tiles) of a row add up to the gradient of its weight, without what the bias of ``down`` adds to it.
    """
    tile = tiles.grad_hidden
    d_model, d_hidden = down.shape[1], down.shape[2]
    grad_pre_PU = product_PU if overwrite else torch.empty_like(product_PU)
    activation_PH = product_PU.new_empty(layout.num_padded, d_hidden)
    dots_P = torch.empty(
        layout.num_padded, triton.cdiv(d_hidden, tile.columns), dtype=torch.float32, device=product_PU.device
    )
    grad_of_hidden[_persistent(layout, d_hidden, tile.columns)](
        grad_y_SD,
        grad_y_SD.stride(0),
        TensorDescriptor.from_tensor(down, [1, tile.depth, tile.columns]),
        product_PU,
        grad_pre_PU,
        activation_PH,
        dots_P,
        bias,
        layout.source_P,
        layout.weight_P,
        layout.expert_M,
        layout.has_zero_M,
        layout.num_tiles_1,
        d_model,
        d_hidden,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        EVEN=d_model % tile.depth == 0,
        EVEN_HIDDEN=d_hidden % tile.columns == 0,
        PARTS=_parts(tile, activation, bias),
        **_constants(activation),
        **_OPTIONS,
        num_stages=tile.num_stages,
    )
    return grad_pre_PU, activation_PH, dots_P


def row_weight_gradients(
    dots_P: Tensor, layout: PaddedLayout, block: int, *, bias_dots_P: Tensor | None = None
) -> Tensor:
    """Return the gradients of the row weights by slot, (N); zero for slots that are not routed."""
    grad_N = torch.zeros(layout.position_N.shape, dtype=torch.float32, device=dots_P.device)
    num_bias_columns = None if bias_dots_P is None else bias_dots_P.shape[1]
    grad_of_row_weights[(layout.num_padded // block,)](
        dots_P,
        bias_dots_P,
        layout.weight_P,
        layout.slot_P,
        layout.num_tiles_1,
        grad_N,
        dots_P.shape[1],
        num_bias_columns,
        ROWS=block,
        COLUMNS=triton.next_power_of_2(dots_P.shape[1]),
        BIAS_COLUMNS=None if num_bias_columns is None else triton.next_power_of_2(num_bias_columns),
    )
    return grad_N


def weight_gradient(
    gathered_SW: Tensor,
    rows_PV: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    main_grad: Tensor | None,
) -> Tensor | None:
    """Return gathered^T @ rows for each expert, (e, W, V), or its transpose; or add it to ``main_grad``.

    ``tile.rows`` cut W, ``tile.columns`` V.
    """
    num_experts, gathered_width, rows_width = layout.segments_e3.shape[0], gathered_SW.shape[1], rows_PV.shape[1]
    num_tiles = num_experts * triton.cdiv(gathered_width, tile.rows) * triton.cdiv(rows_width, tile.columns)
    num_programs = min(num_tiles, _num_programs(rows_PV.device))
    if _may_be_specialised(tile, rows_PV.device):
        from coterie_experts.grouped_swiglu.specialised import gradients as specialised_gradients

        if specialised_gradients.fits(gathered_width=gathered_width, rows_width=rows_width, tile=tile):
            return specialised_gradients.weight_gradient(
                gathered_SW,
                rows_PV,
                layout,
                tile,
                transposed=transposed,
                main_grad=main_grad,
                num_programs=num_programs,
            )
    shape = (rows_width, gathered_width) if transposed else (gathered_width, rows_width)
    block = [1, tile.columns, tile.rows] if transposed else [1, tile.rows, tile.columns]
    if main_grad is not None:
        block[2] //= tile.parts
    out = rows_PV.new_empty(num_experts, *shape) if main_grad is None else main_grad
    tensors = (
        gathered_SW,
        gathered_SW.stride(0),
        TensorDescriptor.from_tensor(rows_PV, [tile.depth, tile.columns]),
        TensorDescriptor.from_tensor(out, block),
        layout.counted_P,
        layout.segments_e3,
    )
    widths = (gathered_width, rows_width)
    constants = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "BAND": tile.band,
        "TRANSPOSED": transposed,
        "ACCUMULATE": main_grad is not None,
        "EVEN": gathered_width % tile.rows == 0,
        **_OPTIONS,
    }
    # The device decides by the load which of the two does the work; the other ends at once.
    grad_of_weights_in_turn[(num_programs,)](
        *tensors, num_experts, layout.num_padded, *widths, **constants, num_stages=tile.num_stages + 2
    )
    counter_1 = torch.zeros(1, dtype=torch.int32, device=out.device)
    grad_of_weights_by_load[(num_programs,)](
        *tensors, counter_1, num_experts, *widths, **constants, num_stages=tile.num_stages
    )
    return out if main_grad is None else None


def _may_be_specialised(tile: Tile, device: torch.device) -> bool:
    # Modules of specialised kernels are imported where they are used: Triton may not have what they are written in.
    return tile.ring > 0 and specialised.obstacle(device) is None


def _persistent(layout: PaddedLayout, num_columns: int, columns_of_tile: int) -> tuple[int]:
    most = layout.expert_M.shape[0] * triton.cdiv(num_columns, columns_of_tile)
    return (min(most, _num_programs(layout.expert_M.device)),)


def _parts(tile: Tile, activation: Activation, bias: Tensor | None) -> int:
    # What SwiGLU alone fits in, the clamps, their masks and the bias do not: NOTES.md has the registers.
    is_longer = bias is not None or activation.name == "swiglu_clamped"
    return tile.parts * 2 if is_longer else tile.parts


def _constants(activation: Activation) -> dict[str, str | float | None]:
    # What an activation does not use is left out, so that it compiles nothing again.
    is_clamped = activation.name == "swiglu_clamped"
    return {
        "ACTIVATION": activation.name,
        "ALPHA": activation.alpha if is_clamped else None,
        "LIMIT": activation.limit if is_clamped else None,
    }


def _num_programs(device: torch.device) -> int:
    # Under the interpreter a few, which take turns.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
