"""Tests of the Triton kernels that move rows, for a process with TRITON_INTERPRET=1: see test_rows.py.

Sums only in fp32 and fp64: the interpreter rounds fp32 to bf16 by cutting off. Copies in every dtype.
"""

from dataclasses import replace

import pytest
import torch
from coterie_parallel.dispatch.rowwise.rows import clear_padding, get_rows, put_rows, triton_kernels

from parallel.rowwise_cases import (
    ROUTINGS,
    Routing,
    assert_same_bits,
    capacity_of,
    exchange,
    expected,
    garbage_in_new_memory,
    tokens_and_weights,
)
from parallel.test_rows import arguments, one_rank

SMALL = Routing(name="two ranks", tokens=(4, 3), top_k=2, alignment=4, capacity=0.8)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under the interpreter the number of programs is what takes time; one that has several rows is a case of its own.
    monkeypatch.setattr(triton_kernels, "_CLEARERS", 2)


def check(routing: Routing, dtype: torch.dtype = torch.float32) -> None:
    ids, sent = routing.ids(), tokens_and_weights(routing, dtype)
    capacity = capacity_of(routing, ids)
    with garbage_in_new_memory():
        found = exchange(routing, ids, sent, capacity, backend="triton")
    wanted = expected(routing, ids, sent, capacity)
    if dtype in (torch.bfloat16, torch.float16):
        found, wanted = replace(found, y=[]), replace(wanted, y=[])
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.name)
def test_the_table(routing: Routing) -> None:
    check(routing)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.bfloat16, 1),
        (torch.bfloat16, 6),
        (torch.bfloat16, 8),
        (torch.float64, 3),
        (torch.float8_e4m3fn, 5),
        (torch.int64, 2),
    ],
)
def test_every_size_of_elements_and_words(dtype: torch.dtype, width: int) -> None:
    check(replace(SMALL, width=width), dtype)


def test_rows_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_PUT_BYTES", 16)
    monkeypatch.setattr(triton_kernels, "_GET_BYTES", 16)
    check(replace(SMALL, width=13))
    check(replace(SMALL, width=8))


def test_more_programs_than_padding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_CLEARERS", 16)
    check(replace(SMALL, alignment=4, capacity=0.7))


def test_the_sum_is_taken_in_the_order_of_the_choices_from_plus_zero() -> None:
    plan, (rows,) = one_rank([[0, 1, 2], [2, 1, 0], [2, 0, 1]], [[1e8], [1.0], [-1e8]])
    assert get_rows(rows, plan, backend="triton").tolist() == [[0.0], [0.0], [1.0]]
    plan, (rows,) = one_rank([[0, 0], [-1, 0], [-1, -1]], [[-0.0]])
    assert not get_rows(rows, plan, backend="triton").signbit().any()


def test_addresses_alone_are_enough() -> None:
    x_TD, weights_TK, plan, rows, row_weights = arguments()
    put_rows(2 * x_TD, weights_TK, plan, replace(rows, views=None), replace(row_weights, views=None), backend="triton")
    assert (rows.local == 2).all()
    assert (row_weights.local == 1).all()
    assert (get_rows(replace(rows, views=None), plan, backend="triton") == 4).all()


def test_no_weights_and_a_strided_input() -> None:
    plan, (rows,) = one_rank([[0], [2], [-1]], [[0.0, 0.0]] * 3)
    put_rows(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T, None, plan, rows, None, backend="triton")
    assert rows.local.tolist() == [[1.0, 4.0], [0.0, 0.0], [2.0, 5.0]]
    offsets_e = torch.tensor([2, 4], dtype=torch.int32)
    clear_padding(rows.local, None, offsets_e, torch.tensor([2, 0]), backend="triton")
    assert rows.local.tolist() == [[1.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
