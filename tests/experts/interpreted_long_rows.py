"""E8: rows times width beyond 2^31 and 2^32 in the kernels, for a process with TRITON_INTERPRET=1.

Rows of one byte in memory of which only the pages of a few rows are ever touched. An index that wraps around reads or
writes elsewhere: wrong numbers, or the end of the process.
"""

import pytest
import torch
import triton
import triton.language as tl
from coterie_experts.grouped_swiglu import triton_launch, triton_layout
from coterie_experts.grouped_swiglu.triton_forward import gathered_rows, sum_rows_of_tokens
from coterie_experts.grouped_swiglu.triton_tiles import choose_tiles
from coterie_experts.token_rows import TokenOrder, rows_from_tokens
from torch import Tensor

# Rows x width in bytes: the last row begins at 2^31; the last row begins just under 2^32 and ends past it.
SIZES = ((32_769, 65_536), (1_525_202, 2_816))


def long_rows(num_rows: int, width: int) -> tuple[Tensor, list[int]]:
    """Return rows of which the first, the middle and the last hold numbers of their own, and which those are."""
    rows = torch.empty(num_rows, width, dtype=torch.uint8)
    places = [0, num_rows // 2, num_rows - 1]
    for number, place in enumerate(places):
        rows[place] = (torch.arange(width) % 50 + 60 * number).to(torch.uint8)
    return rows, places


@triton.jit
def _copy_rows(rows_ptr, stride, source_ptr, out_ptr, first_column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    inside = tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    values = gathered_rows(rows_ptr, stride, tl.load(source_ptr + inside), columns, width, False)
    tl.store(out_ptr + inside[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], values)


@pytest.mark.parametrize("size", SIZES)
def test_gather_of_the_products(size: tuple[int, int]) -> None:
    rows, places = long_rows(*size)
    source = torch.tensor([*places, -1], dtype=torch.int32)
    for first_column in (0, size[1] - 64):
        out = torch.full((4, 64), 9, dtype=torch.uint8)
        _copy_rows[(1,)](rows, rows.stride(0), source, out, first_column, size[1], ROWS=4, COLUMNS=64)
        assert torch.equal(out[:3], rows[places, first_column : first_column + 64])
        assert not out[3].any()


@pytest.mark.parametrize("size", SIZES)
def test_sum_over_choices(size: tuple[int, int]) -> None:
    rows, places = long_rows(*size)
    position = torch.tensor([places[0], places[2], places[1], -1], dtype=torch.int32)
    out = torch.empty(2, size[1], dtype=torch.uint8)
    sum_rows_of_tokens[(2, triton.cdiv(size[1], 1024))](rows, position, out, size[1], size[1], CHOICES=2, COLUMNS=1024)
    assert torch.equal(out[0], rows[places[0]] + rows[places[2]])
    assert torch.equal(out[1], rows[places[1]])


@pytest.mark.parametrize("size", SIZES)
def test_scatter_of_the_products(size: tuple[int, int]) -> None:
    """Three padded rows of one expert, each of a single 1, pick rows of weights of small whole numbers."""
    out, places = long_rows(*size)
    tiles = choose_tiles(interpreted=True, d_model=16, d_hidden=16, num_rows=3, num_experts=1)
    layout = triton_layout.pad_rows(
        torch.tensor([3], dtype=torch.int32), torch.ones(3), slot_of_row_N=None, num_choices=1, block=tiles.block_rows
    )
    layout.source_P[:3] = torch.tensor(places)
    rows = torch.zeros(layout.num_padded, 16)
    rows[:3] = torch.eye(16)[:3]
    weights = torch.arange(256.0).view(1, 16, 16)
    triton_launch._multiply(rows, weights, layout, tiles.down, transposed=True, first=0, width=16, targets=out[:, -16:])
    for number, place in enumerate(places):
        assert out[place, -16:].tolist() == weights[0, :, number].to(torch.uint8).tolist()
        assert out[place, 0] == 60 * number


def test_clearing_past_the_end() -> None:
    rows, places = long_rows(*SIZES[0])
    kept = rows[places[:2]].clone()
    triton_launch.clear_past_the_end(rows, torch.tensor([SIZES[0][0] - 2], dtype=torch.int32))
    assert torch.equal(rows[places[:2]], kept)
    assert not rows[-2:].any()


@pytest.mark.parametrize("size", SIZES)
def test_gather_in_torch(size: tuple[int, int]) -> None:
    rows, places = long_rows(*size)
    slots = torch.tensor(places)
    order = TokenOrder(
        slot_of_row_N=slots, row_of_slot_TK=torch.zeros(len(rows), 1, dtype=torch.int64), offsets_e=slots
    )
    assert torch.equal(rows_from_tokens(rows, order), rows[places])
