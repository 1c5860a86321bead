"""Tests of the Triton kernels of the row map, for a process with TRITON_INTERPRET=1: see test_row_map.py."""

import pytest
import torch
from coterie_routing.row_map import map_rows, triton_kernels

from routing.row_cases import KINDS, SIZES, filled_with_garbage, ids_of_kind


@pytest.fixture(autouse=True)
def garbage_in_new_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", filled_with_garbage(torch.empty))


def assert_equals_reference(ids_TK, num_experts):
    found, expected = map_rows(ids_TK, num_experts, backend="triton"), map_rows(ids_TK, num_experts)
    for name in ("counts_E", "offsets_E", "row_TK", "slot_N"):
        value = getattr(found, name)
        assert value.dtype == getattr(expected, name).dtype, name
        assert torch.equal(value, getattr(expected, name)), name


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), SIZES)
def test_kernels_at_the_sizes_of_the_table(tokens, top_k, num_experts):
    assert_equals_reference(ids_of_kind("some not routed", tokens, top_k, num_experts), num_experts)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_with_ids_of_every_kind(kind):
    assert_equals_reference(ids_of_kind(kind, 65, 2, 3), 3)
    assert_equals_reference(ids_of_kind(kind, 65, 2, 3).int(), 3)


def test_several_rounds_of_the_sum_over_blocks(monkeypatch):
    monkeypatch.setattr(triton_kernels, "_SCANNED", 2)
    assert_equals_reference(ids_of_kind("some not routed", 300, 2, 3), 3)


def test_ids_of_any_strides():
    assert_equals_reference(ids_of_kind("some not routed", 3, 50, 5).T, 5)


def test_ids_of_no_expert_count_as_not_routed():
    # On a CPU the reference refuses such ids; on a GPU nobody looks, and they must not reach foreign memory.
    ids_TK = torch.tensor([[0, 7], [-5, 1], [2**40, 1]])
    found = triton_kernels.map_rows(ids_TK, 3)
    expected = map_rows(torch.tensor([[0, -1], [-1, 1], [-1, 1]]), 3)
    assert torch.equal(found.row_TK, expected.row_TK)
    assert torch.equal(found.slot_N, expected.slot_N)
    assert torch.equal(found.counts_E, expected.counts_E)
