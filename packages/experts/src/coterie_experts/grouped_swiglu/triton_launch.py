"""Launches of the Triton kernels: allocation, tensor descriptors and grids, with nothing read from the device."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-call"

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    up_with_swiglu,
)
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet

__all__ = [
    "clear_chosen_rows",
    "clear_past_the_end",
    "hidden_gradients",
    "pre_and_activation",
    "row_weight_gradients",
    "rows_to_rows",
    "rows_to_tokens",
    "sum_rows",
    "weight_gradient",
]


def pre_and_activation(x_SD: Tensor, layout: PaddedLayout, gate_up: Tensor, tiles: TileSet) -> tuple[Tensor, Tensor]:
    """Return the pre-activation (P, 2H) and the activation times the row weight (P, H) of the rows of x."""
    num_experts, d_hidden, d_model = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    tile = tiles.up
    pre_P2H = x_SD.new_empty(layout.num_padded, 2 * d_hidden)
    activation_PH = x_SD.new_empty(layout.num_padded, d_hidden)
    block = [tile.rows, tile.columns]
    up_with_swiglu[_persistent(tile, layout, d_hidden)](
        x_SD,
        x_SD.stride(0),
        TensorDescriptor.from_tensor(gate_up.view(num_experts, 2, d_hidden, d_model), [1, 2, tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(pre_P2H[:, :d_hidden], block),
        TensorDescriptor.from_tensor(pre_P2H[:, d_hidden:], block),
        TensorDescriptor.from_tensor(activation_PH, block),
        layout.source_P,
        layout.weight_P,
        layout.expert_M,
        layout.has_zero_M,
        layout.num_tiles_1,
        d_model,
        d_hidden,
        ROWS=tile.rows,
        HIDDEN=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        EVEN=d_model % tile.depth == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return pre_P2H, activation_PH


def rows_to_tokens(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    num_choices: int,
) -> Tensor:
    """Return, for each token, the sum over its choices of rows times weights, (T, columns).

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
        _multiply(rows_PK, weights, layout, tile, transposed=transposed, first=first, width=width, products=rows_Pd)
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
    rows_PK: Tensor, weights: Tensor, layout: PaddedLayout, tile: Tile, offsets_e: Tensor, *, transposed: bool
) -> Tensor:
    """Return rows times weights, each padded row in the place of its source; rows that belong to no expert are zero."""
    num_columns = weights.shape[1] if transposed else weights.shape[2]
    out_RD = rows_PK.new_empty(layout.position_N.shape[0], num_columns)
    _multiply(rows_PK, weights, layout, tile, transposed=transposed, first=0, width=num_columns, targets=out_RD)
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
    products: Tensor | None = None,
    targets: Tensor | None = None,
) -> None:
    block = [1, tile.columns, tile.depth] if transposed else [1, tile.depth, tile.columns]
    # A kernel takes a pointer and a descriptor and uses one of the two.
    any_PK = rows_PK if products is None else products
    rows_times_weights[_persistent(tile, layout, width)](
        TensorDescriptor.from_tensor(rows_PK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weights, block),
        TensorDescriptor.from_tensor(any_PK, [tile.rows, tile.columns]),
        rows_PK if targets is None else targets,
        0 if targets is None else targets.stride(0),
        layout.source_P,
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
        num_warps=tile.num_warps,
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
    grad_y_SD: Tensor, pre_P2H: Tensor, layout: PaddedLayout, down: Tensor, tiles: TileSet, *, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the pre-activation (P, 2H), the weighted activation (P, H) and dots (P, column tiles).

    With ``overwrite`` the gradient takes the memory of the pre-activation. The dots of a row add up to the gradient of
    its weight.
    """
    tile = tiles.grad_hidden
    d_model, d_hidden = down.shape[1], down.shape[2]
    grad_pre_P2H = pre_P2H if overwrite else torch.empty_like(pre_P2H)
    activation_PH = pre_P2H.new_empty(layout.num_padded, d_hidden)
    dots_P = torch.empty(
        layout.num_padded, triton.cdiv(d_hidden, tile.columns), dtype=torch.float32, device=pre_P2H.device
    )
    grad_of_hidden[_persistent(tile, layout, d_hidden)](
        grad_y_SD,
        grad_y_SD.stride(0),
        TensorDescriptor.from_tensor(down, [1, tile.depth, tile.columns]),
        pre_P2H,
        grad_pre_P2H,
        activation_PH,
        dots_P,
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
        PARTS=tile.parts,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return grad_pre_P2H, activation_PH, dots_P


def row_weight_gradients(dots_P: Tensor, layout: PaddedLayout, block: int) -> Tensor:
    """Return the gradients of the row weights by slot, (N); zero for slots that are not routed."""
    grad_N = torch.zeros(layout.position_N.shape, dtype=torch.float32, device=dots_P.device)
    grad_of_row_weights[(layout.num_padded // block,)](
        dots_P,
        layout.weight_P,
        layout.slot_P,
        layout.num_tiles_1,
        grad_N,
        dots_P.shape[1],
        ROWS=block,
        COLUMNS=triton.next_power_of_2(dots_P.shape[1]),
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
    shape = (rows_width, gathered_width) if transposed else (gathered_width, rows_width)
    block = [1, tile.columns, tile.rows] if transposed else [1, tile.rows, tile.columns]
    if main_grad is not None:
        block[2] //= 4
    out = rows_PV.new_empty(num_experts, *shape) if main_grad is None else main_grad
    num_tiles = num_experts * triton.cdiv(gathered_width, tile.rows) * triton.cdiv(rows_width, tile.columns)
    num_programs = min(num_tiles, _num_programs(tile, out.device))
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
        "num_warps": tile.num_warps,
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


def _persistent(tile: Tile, layout: PaddedLayout, num_columns: int) -> tuple[int]:
    most = layout.expert_M.shape[0] * triton.cdiv(num_columns, tile.columns)
    return (min(most, _num_programs(tile, layout.expert_M.device)),)


def _num_programs(tile: Tile, device: torch.device) -> int:
    # Under the interpreter a few, which take turns.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    return processors * tile.programs_per_processor
