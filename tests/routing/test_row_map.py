import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from coterie_routing.row_map import RowMap, map_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreted import needs_triton, run_interpreted

from routing.row_cases import KINDS, SIZES, ids_of_kind, plain_map


@st.composite
def ids_and_experts(draw):
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, 4))
    favourites = st.sampled_from(draw(st.lists(st.integers(-1, num_experts - 1), min_size=1, max_size=3)))
    one = st.one_of(favourites, st.integers(-1, num_experts - 1))
    return draw(st.lists(st.lists(one, min_size=top_k, max_size=top_k), min_size=1, max_size=12)), num_experts


def assert_is(row_map: RowMap, ids: list[list[int]], num_experts: int) -> None:
    expected = plain_map(ids, num_experts)
    assert row_map.counts_E.tolist() == expected.counts
    assert row_map.offsets_E.tolist() == expected.offsets
    assert row_map.row_TK.tolist() == expected.row
    assert row_map.slot_N.tolist() == expected.slot
    assert row_map.counts_E.dtype == row_map.row_TK.dtype == row_map.slot_N.dtype == torch.int64
    assert row_map.offsets_E.dtype == torch.int32


def test_written_out():
    row_map = map_rows(torch.tensor([[2, 0], [-1, 2], [0, 2], [2, -1]]), 4)
    assert row_map.counts_E.tolist() == [2, 0, 4, 0]
    assert row_map.offsets_E.tolist() == [2, 2, 6, 6]
    assert row_map.row_TK.tolist() == [[2, 0], [-1, 3], [1, 4], [5, -1]]
    assert row_map.slot_N.tolist() == [1, 4, 0, 3, 5, 6, -1, -1]


@settings(deadline=None, max_examples=200)
@given(ids_and_experts(), st.sampled_from([torch.int64, torch.int32]))
def test_reference_is_the_plain_loop(case, dtype):
    ids, num_experts = case
    assert_is(map_rows(torch.tensor(ids, dtype=dtype), num_experts), ids, num_experts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), SIZES)
def test_reference_at_the_sizes_of_the_table(tokens, top_k, num_experts, kind):
    ids_TK = ids_of_kind(kind, tokens, top_k, num_experts)
    before = ids_TK.clone()
    row_map = map_rows(ids_TK, num_experts)
    assert row_map.row_TK.shape == ids_TK.shape
    assert_is(row_map, ids_TK.tolist(), num_experts)
    assert torch.equal(ids_TK, before)


def test_ids_of_any_strides():
    ids_KT = ids_of_kind("some not routed", 3, 20, 5)
    assert_is(map_rows(ids_KT.T, 5), ids_KT.T.tolist(), 5)


def test_no_choices():
    row_map = map_rows(torch.empty(4, 0, dtype=torch.int64), 3)
    assert row_map.counts_E.tolist() == row_map.offsets_E.tolist() == [0, 0, 0]
    assert row_map.row_TK.shape == (4, 0)
    assert row_map.slot_N.shape == (0,)


@pytest.mark.parametrize(
    ("ids_TK", "num_experts", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 4, r"shape \(T, K\), int64 or int32, got torch.int64 of shape \(3,\)"),
        (torch.zeros(3, 2), 4, r"got torch.float32 of shape \(3, 2\)"),
        (torch.zeros(3, 2, dtype=torch.int16), 4, "got torch.int16"),
        (torch.zeros(3, 2, dtype=torch.int64), 0, r"num_experts \(0\) must be at least 1"),
        (torch.tensor([[0, 4]]), 4, "from -1 to 3, but lie from 0 to 4"),
        (torch.tensor([[0, -2]]), 4, "from -1 to 3, but lie from -2 to 0"),
        (torch.zeros(1, 1, dtype=torch.int32).expand(2**30, 2), 4, r"T\*K \(2147483648\) must be at most 2147483647"),
    ],
    ids=["dimensions", "float", "int16", "no experts", "too high", "too low", "too many"],
)
def test_bad_input_is_refused(ids_TK, num_experts, message):
    with pytest.raises(ValueError, match=message):
        map_rows(ids_TK, num_experts)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"backend \('tritn'\) must be one of auto, reference, triton"):
        map_rows(torch.zeros(3, 2, dtype=torch.int64), 4, backend="tritn")


def test_a_named_backend_that_cannot_run_says_why(monkeypatch):
    ids_TK = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot run: the tensors are on meta, not on a CUDA device"):
        map_rows(ids_TK.to("meta"), 4, backend="triton")
    if importlib.util.find_spec("triton") is not None:
        with pytest.raises(ValueError, match="cannot run: the tensors are on a CPU, where it runs only under TRITON"):
            map_rows(ids_TK, 4, backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="cannot run: triton is not installed; choose backend 'auto' or 'reference'"):
        map_rows(ids_TK, 4, backend="triton")
    assert map_rows(ids_TK, 4).counts_E.tolist() == [6, 0, 0, 0]


def test_auto_and_reference_load_no_triton_on_a_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "coterie_routing.row_map.triton_kernels", None)
    for backend in ("auto", "reference"):
        assert map_rows(torch.tensor([[1, 0]]), 2, backend=backend).row_TK.tolist() == [[1, 0]]


@needs_triton
def test_kernels_under_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_row_map.py"))
