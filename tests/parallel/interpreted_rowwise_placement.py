"""Tests of the Triton kernels of the placement, for a process with TRITON_INTERPRET=1: see test_placement.py."""

import pytest
import torch
from coterie_parallel.dispatch.rowwise.placement import count_pairs, place_rows, triton_kernels
from hypothesis import given, settings

from parallel.rowwise_cases import ROUTINGS, Routing, assert_plans, garbage_in_new_memory, plans
from parallel.test_placement import routings


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.name)
def test_addresses_of_the_table(routing: Routing) -> None:
    ids = routing.ids()
    options = {"num_local": routing.num_local, "alignment": routing.alignment}
    with garbage_in_new_memory():
        found = plans(ids, **options, backend="triton")
    assert_plans(found, ids, **options)


@settings(deadline=None, max_examples=4)
@given(routings())
def test_addresses_are_those_of_the_loops(case: tuple[list[torch.Tensor], int]) -> None:
    ids, num_local = case
    assert_plans(
        plans(ids, num_local=num_local, alignment=16, backend="triton"), ids, num_local=num_local, alignment=16
    )


@pytest.mark.parametrize("num_pairs", [127, 128, 129, 257, 600])
def test_several_blocks(num_pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_SUMMED", 2)
    (ids_TK,) = Routing(name="", tokens=(num_pairs,), top_k=1, num_local=5).ids()
    found, expected = (count_pairs(ids_TK, 5, backend=backend) for backend in ("triton", "reference"))
    for got, value in zip(found, expected, strict=True):
        assert got.dtype == value.dtype
        assert torch.equal(got, value)
    assert_plans(plans([ids_TK], num_local=5, alignment=16, backend="triton"), [ids_TK], num_local=5, alignment=16)


def test_more_sources_than_are_added_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_SOURCES", 2)
    ids = Routing(name="", tokens=(3, 4, 0, 5, 2), num_local=2, kind="uneven").ids()
    assert_plans(plans(ids, num_local=2, alignment=2, backend="triton"), ids, num_local=2, alignment=2)


def test_ids_of_no_expert_and_of_any_strides() -> None:
    ids_TK = torch.tensor([[0, -7, 2**40], [4, 1, 1]]).T
    cleaned_TK = torch.tensor([[0, -1], [-1, 1], [-1, 1]])
    counts_E, position_TK = count_pairs(ids_TK, 4, backend="triton")
    assert counts_E.tolist() == [1, 2, 0, 0]
    found = place_rows(counts_E[None], ids_TK, position_TK, index=0, num_local=4, alignment=1, backend="triton")
    assert_plans([found], [cleaned_TK], num_local=4, alignment=1)
