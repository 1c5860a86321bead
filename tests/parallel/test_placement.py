"""The arithmetic of the addresses against the loops of the contract."""

from pathlib import Path

import pytest
import torch
from coterie_parallel.dispatch.rowwise.placement import count_pairs, place_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreted import needs_triton, run_interpreted
from torch import Tensor

from parallel.cases import LAYOUTS, LayoutCase
from parallel.rowwise_cases import ROUTINGS, Routing, assert_plans, plans


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    """Draw the ids of 1 to 8 sources, some of them empty, that favour few experts, and the experts of a rank."""
    size = draw(st.integers(1, 8))
    num_local = draw(st.integers(1, 4))
    top_k = draw(st.integers(1, 4))
    last = size * num_local - 1
    favourites = st.sampled_from(draw(st.lists(st.integers(-1, last), min_size=1, max_size=3)))
    ids_K = st.lists(st.one_of(favourites, st.integers(-1, last)), min_size=top_k, max_size=top_k)
    sources = draw(st.lists(st.lists(ids_K, max_size=6), min_size=size, max_size=size))
    return [torch.tensor(ids, dtype=torch.int64).view(-1, top_k) for ids in sources], num_local


@settings(deadline=None, max_examples=150)
@given(routings(), st.sampled_from([1, 2, 16, 128]))
def test_addresses_are_those_of_the_loops(case: tuple[list[Tensor], int], alignment: int) -> None:
    ids, num_local = case
    assert_plans(plans(ids, num_local=num_local, alignment=alignment), ids, num_local=num_local, alignment=alignment)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.name)
def test_addresses_of_the_table(routing: Routing) -> None:
    ids = routing.ids()
    options = {"num_local": routing.num_local, "alignment": routing.alignment}
    assert_plans(plans(ids, **options), ids, **options)


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_addresses_written_down(case: LayoutCase) -> None:
    size = len(case.rows_by_rank)
    top_k = len(case.ids_by_source[0][0])
    ids = [torch.tensor(source, dtype=torch.int64).view(-1, top_k) for source in case.ids_by_source]
    placed = plans(ids, num_local=case.num_experts // size, alignment=case.alignment)
    for owner, pairs in enumerate(case.rows_by_rank):
        assert placed[owner].offsets_e.tolist() == case.offsets_by_rank[owner]
        for row, pair in enumerate(pairs):
            if pair is not None:
                source, token, choice = pair
                assert placed[source].rank_TK[token, choice] == owner, pair
                assert placed[source].row_TK[token, choice] == row, pair


def test_counts_and_positions_written_down() -> None:
    counts_E, position_TK = count_pairs(torch.tensor([[2, 0], [-1, 2], [2, 2], [0, 1]]), 4)
    assert counts_E.tolist() == [2, 1, 4, 0]
    assert position_TK.tolist() == [[0, 0], [-1, 1], [2, 3], [1, 0]]
    assert (counts_E.dtype, position_TK.dtype) == (torch.int64, torch.int32)


def test_an_id_of_no_expert_counts_as_not_routed() -> None:
    ids_TK = torch.tensor([[0, 4], [-7, 1], [2**40, 1]])
    cleaned_TK = torch.tensor([[0, -1], [-1, 1], [-1, 1]])
    counts_E, position_TK = count_pairs(ids_TK, 4)
    assert counts_E.tolist() == [1, 2, 0, 0]
    found = place_rows(counts_E[None], ids_TK, position_TK, index=0, num_local=4, alignment=1)
    assert_plans([found], [cleaned_TK], num_local=4, alignment=1)


def test_more_experts_than_fit_in_two_bytes() -> None:
    ids_TK = torch.tensor([[40000, 3], [40000, 32768]])
    counts_E, position_TK = count_pairs(ids_TK, 40001)
    assert counts_E.nonzero().flatten().tolist() == [3, 32768, 40000]
    assert position_TK.tolist() == [[0, 0], [1, 0]]


def test_arguments_stay_as_they_are() -> None:
    ids_TK = torch.tensor([[0, 7], [-5, 1]])
    before = ids_TK.clone()
    counts_E, position_TK = count_pairs(ids_TK, 2)
    counts, position = counts_E.clone(), position_TK.clone()
    place_rows(counts_E[None], ids_TK, position_TK, index=0, num_local=2, alignment=16)
    assert torch.equal(ids_TK, before)
    assert torch.equal(counts_E, counts)
    assert torch.equal(position_TK, position)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"counts_SE": torch.zeros(2, 4)}, "counts_SE must be int64"),
        ({"counts_SE": torch.zeros(2, 5, dtype=torch.int64)}, r"num_local \(2\)"),
        ({"index": 2}, r"index \(2\)"),
        ({"alignment": 0}, r"alignment \(0\)"),
        ({"ids_TK": torch.zeros(3, 2, dtype=torch.int32)}, "ids_TK must be int64"),
        ({"position_TK": torch.zeros(2, 2, dtype=torch.int32)}, "position_TK must be int32"),
        ({"backend": "cuda"}, "auto, reference, triton"),
        ({"backend": "triton"}, "TRITON_INTERPRET=1"),
    ],
)
def test_place_rows_refuses(changed: dict[str, object], words: str) -> None:
    arguments = {
        "counts_SE": torch.zeros(2, 4, dtype=torch.int64),
        "ids_TK": torch.full((3, 2), -1),
        "position_TK": torch.full((3, 2), -1, dtype=torch.int32),
        "index": 1,
        "num_local": 2,
        "alignment": 1,
    }
    place_rows(**arguments)
    if changed.get("backend") == "triton":
        pytest.importorskip("triton")
    with pytest.raises(ValueError, match=words):
        place_rows(**{**arguments, **changed})


def test_count_pairs_refuses() -> None:
    with pytest.raises(ValueError, match="ids_TK must be int64"):
        count_pairs(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"num_experts \(0\)"):
        count_pairs(torch.zeros(3, 1, dtype=torch.int64), 0)


@needs_triton
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_rowwise_placement.py"))
