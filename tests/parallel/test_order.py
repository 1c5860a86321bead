"""The local arithmetic of the row order, against hand-written rows and against the plain-loop reference."""

from itertools import pairwise

import pytest
import torch
from coterie_parallel import Axis, make_dispatcher
from coterie_parallel.conformance import reference_combine, reference_layout
from coterie_parallel.dispatch.order import pad_rows, segments, sort_pairs, sum_choices
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.cases import LAYOUTS, LayoutCase

Ids = list[list[list[int]]]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_reference_gives_the_rows_written_down(case: LayoutCase) -> None:
    degree = len(case.rows_by_rank)
    for index in range(degree):
        layout = reference_layout(
            case.ids_by_source, num_experts=case.num_experts, degree=degree, index=index, alignment=case.alignment
        )
        assert list(layout.pairs_R) == case.rows_by_rank[index]
        assert list(layout.offsets_e) == case.offsets_by_rank[index]


def test_pairs_are_sorted_by_expert_then_token_then_choice() -> None:
    pairs = sort_pairs(torch.tensor([[2, 0], [0, -1], [2, 2]]), num_experts=4)
    assert pairs.pair_P.tolist() == [1, 2, 0, 4, 5]
    assert pairs.token_P.tolist() == [0, 1, 0, 2, 2]
    assert pairs.slot_TK.tolist() == [[2, 0], [1, -1], [3, 4]]
    assert pairs.counts_E.tolist() == [2, 0, 3, 0]


def test_arriving_rows_are_placed_by_expert_then_source() -> None:
    # Source 0 sends 1, 0 and 2 rows for the three local experts, source 1 sends 2, 1 and 1.
    placed = segments(torch.tensor([[1, 0, 2], [2, 1, 1]]), alignment=1)
    assert placed.row_P.tolist() == [0, 4, 5, 1, 2, 3, 6]
    assert placed.offsets_e.tolist() == [3, 4, 7]
    placed = segments(torch.tensor([[1, 0, 2], [2, 1, 1]]), alignment=4)
    assert placed.row_P.tolist() == [0, 8, 9, 1, 2, 4, 10]
    assert placed.offsets_e.tolist() == [4, 8, 12]
    assert placed.offsets_e.dtype == torch.int32
    assert pad_rows(torch.arange(1, 8), placed).tolist() == [1, 4, 5, 0, 6, 0, 0, 0, 2, 3, 7, 0]


def test_sum_goes_in_the_order_of_the_choices_and_in_fp32() -> None:
    # 1e8 + 1 is 1e8 in fp32: from left to right the sum is 0, in any other order it is 1.
    rows = torch.tensor([[1.0], [-1e8], [1e8]])
    assert sum_choices(rows, torch.tensor([[2, 0, 1], [2, 1, 0], [-1, 0, -1]])).tolist() == [[0.0], [1.0], [1.0]]
    # 256 + 1 is 256 in bf16; in fp32 the three add up to 258, a bf16 number.
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    assert sum_choices(rows, torch.tensor([[0, 1, 1]])).tolist() == [[258.0]]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Ids, int, int, int]:
    """Return ids by source, number of experts, degree and alignment."""
    degree = draw(st.integers(1, 4))
    num_experts = degree * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, 3))
    ids_K = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    ids = [draw(st.lists(ids_K, max_size=6)) for _ in range(degree)]
    return ids, num_experts, degree, draw(st.sampled_from([1, 2, 3, 16]))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(routings())
def test_virtual_ranks_receive_the_rows_of_the_reference(routing: tuple[Ids, int, int, int]) -> None:
    ids, num_experts, degree, alignment = routing
    top_k = next((len(ids_TK[0]) for ids_TK in ids if ids_TK), 1)
    sorted_by_source = [sort_pairs(torch.tensor(one, dtype=torch.int64).view(-1, top_k), num_experts) for one in ids]
    num_local = num_experts // degree
    received = set()
    for index in range(degree):
        mine = slice(index * num_local, (index + 1) * num_local)
        arriving = []
        for source, pairs in enumerate(sorted_by_source):
            start, count = int(pairs.counts_E[: mine.start].sum()), int(pairs.counts_E[mine].sum())
            arriving += [(source, *divmod(int(pair), top_k)) for pair in pairs.pair_P[start : start + count]]
        placed = segments(torch.stack([pairs.counts_E[mine] for pairs in sorted_by_source]), alignment)
        rows: list[tuple[int, int, int] | None] = [None] * placed.num_rows
        for row, pair in zip(placed.row_P.tolist(), arriving, strict=True):
            rows[row] = pair
        layout = reference_layout(ids, num_experts=num_experts, degree=degree, index=index, alignment=alignment)
        assert rows == list(layout.pairs_R)
        assert placed.offsets_e.tolist() == list(layout.offsets_e)
        assert all(end % alignment == 0 for end in layout.offsets_e)
        received |= {pair for pair in rows if pair is not None}
    routed = {
        (source, token, choice)
        for source, ids_TK in enumerate(ids)
        for token, ids_K in enumerate(ids_TK)
        for choice, expert in enumerate(ids_K)
        if expert >= 0
    }
    assert received == routed


@settings(max_examples=60, deadline=None, derandomize=True)
@given(routings(), st.integers(0, 2**31))
def test_sum_equals_the_loop_of_the_reference(routing: tuple[Ids, int, int, int], seed: int) -> None:
    ids, num_experts, _, _ = routing
    if not ids[0]:
        return
    ids_TK = torch.tensor(ids[0])
    values_TKD = torch.randn(*ids_TK.shape, 3, generator=torch.Generator().manual_seed(seed))
    pairs = sort_pairs(ids_TK, num_experts)
    got = sum_choices(values_TKD.flatten(0, 1)[pairs.pair_P], pairs.slot_TK)
    assert torch.equal(got, reference_combine(values_TKD, ids_TK))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_segments_around_a_block(count: int, alignment: int) -> None:
    ids_TK = torch.zeros(count, 1, dtype=torch.int64)
    dispatcher = make_dispatcher("local", num_experts=2, axis=Axis.single("expert"), alignment=alignment)
    x_TD = torch.arange(1.0, count + 1).unsqueeze(1)
    sent = dispatcher.dispatch(x_TD, ids_TK, torch.ones(count, 1))
    padded = -(-count // alignment) * alignment
    assert sent.offsets_e.tolist() == [padded, padded]
    assert sent.rows_RD.flatten().tolist() == [*range(1, count + 1)] + [0] * (padded - count)
    assert sent.row_weights_R.tolist() == [1] * count + [0] * (padded - count)


def test_stable_for_many_equal_experts_and_for_more_than_an_int16_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_experts in (3, 2**15, 2**15 + 1, 100_000):
        ids_TK = torch.randint(num_experts - 3, num_experts, (2000, 4), generator=generator)
        pair_P = sort_pairs(ids_TK, num_experts).pair_P
        keys = [(int(ids_TK.flatten()[pair]), pair) for pair in pair_P.tolist()]
        assert all(before < after for before, after in pairwise(keys))
