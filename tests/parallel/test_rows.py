"""Put, clear padding and get between virtual ranks against the loops of the contract."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coterie_parallel.dispatch.rowwise.peers.base import PeerTensor
from coterie_parallel.dispatch.rowwise.peers.virtual import virtual_peers
from coterie_parallel.dispatch.rowwise.placement import RowPlan
from coterie_parallel.dispatch.rowwise.rows import clear_padding, get_rows, get_values, put_rows, reference
from support.interpreted import needs_triton, run_interpreted
from torch import Tensor

from parallel.rowwise_cases import (
    ROUTINGS,
    Routing,
    assert_same_bits,
    capacity_of,
    exchange,
    expected,
    plans,
    tokens_and_weights,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int64]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.name)
def test_the_table(routing: Routing) -> None:
    ids, sent = routing.ids(), tokens_and_weights(routing, torch.float32)
    capacity = capacity_of(routing, ids)
    assert_same_bits(exchange(routing, ids, sent, capacity), expected(routing, ids, sent, capacity))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    routing = Routing(name="three ranks", tokens=(6, 5, 4), top_k=3, alignment=4, capacity=0.8, width=6)
    ids, sent = routing.ids(), tokens_and_weights(routing, dtype)
    capacity = capacity_of(routing, ids)
    assert_same_bits(exchange(routing, ids, sent, capacity), expected(routing, ids, sent, capacity))


def test_the_sum_is_taken_in_fp32_in_the_order_of_the_choices() -> None:
    # (1e8 + 1) - 1e8 is 0 in fp32 and 1 in another order; in bf16 the last step would round at every addition.
    plan, (rows,) = one_rank([[0, 1, 2], [2, 1, 0], [2, 0, 1]], [[1e8], [1.0], [-1e8]])
    assert get_rows(rows, plan).tolist() == [[0.0], [0.0], [1.0]]
    plan, (rows,) = one_rank([[0, 1, 2]], [[256.0], [1.0], [1.0]], torch.bfloat16)
    assert get_rows(rows, plan).tolist() == [[258.0]]


def test_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_PICKED_BYTES", 100)
    routing = ROUTINGS[2]
    ids, sent = routing.ids(), tokens_and_weights(routing, torch.float32)
    capacity = capacity_of(routing, ids)
    assert_same_bits(exchange(routing, ids, sent, capacity), expected(routing, ids, sent, capacity))


def test_the_sum_begins_at_plus_zero() -> None:
    plan, (rows,) = one_rank([[0, 0], [-1, 0], [-1, -1]], [[-0.0]])
    assert not get_rows(rows, plan).signbit().any()


def test_a_strided_input_and_no_weights() -> None:
    plan, (rows,) = one_rank([[0], [2], [-1]], [[0.0, 0.0]] * 3)
    put_rows(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T, None, plan, rows, None)
    assert rows.local.tolist() == [[1.0, 4.0], [0.0, 0.0], [2.0, 5.0]]


def test_padding_is_cleared_within_segments_only() -> None:
    rows_CD = torch.full((9, 2), torch.nan)
    row_weights_C = torch.full((9,), torch.nan)
    offsets_e = torch.tensor([4, 4, 8, 12], dtype=torch.int32)
    clear_padding(rows_CD, row_weights_C, offsets_e, torch.tensor([1, 0, 3, 0]))
    zero = [False, True, True, True, False, False, False, True, True]
    assert (rows_CD == 0).all(1).tolist() == zero
    assert (row_weights_C == 0).tolist() == zero
    assert rows_CD.isnan().all(1).tolist() == [not cleared for cleared in zero]
    clear_padding(rows_CD, None, offsets_e, torch.tensor([0, 0, 3, 0]))
    assert (rows_CD[0] == 0).all()


def one_rank(
    row_TK: list[list[int]], rows: list[list[float]], dtype: torch.dtype = torch.float32
) -> tuple[RowPlan, list[PeerTensor]]:
    """Return a plan of these rows on one rank, -1 for not routed, and a buffer that holds these values."""
    rows_CD = torch.tensor(rows, dtype=dtype)
    (peer,) = virtual_peers(1, "cpu")
    buffer = peer.allocate("rows", rows_CD.shape, dtype)
    buffer.local.copy_(rows_CD)
    row = torch.tensor(row_TK)
    rank = torch.where(row < 0, -1, 0).to(torch.int32)
    unused = torch.zeros(1, dtype=torch.int64)
    return RowPlan(rank_TK=rank, row_TK=row, offsets_e=unused.int(), total_e=unused, need_S=unused), [buffer]


def arguments() -> tuple[Tensor, Tensor, RowPlan, PeerTensor, PeerTensor]:
    (plan,) = plans([torch.tensor([[0, 1], [1, 0]])], num_local=2, alignment=1)
    (peer,) = virtual_peers(1, "cpu")
    rows, row_weights = peer.allocate("rows", (4, 3), torch.float32), peer.allocate("weights", (4,), torch.float32)
    return torch.ones(2, 3), torch.ones(2, 2), plan, rows, row_weights


def test_put_refuses() -> None:
    x_TD, weights_TK, plan, rows, row_weights = arguments()
    put_rows(x_TD, weights_TK, plan, rows, row_weights)
    for changed, words in [
        ((x_TD[:1], weights_TK, plan, rows, row_weights), "2 tokens"),
        ((x_TD[:, :2], weights_TK, plan, rows, row_weights), "2 tokens"),
        ((x_TD.double(), weights_TK, plan, rows, row_weights), "dtype of the buffer"),
        ((x_TD, None, plan, rows, row_weights), "together"),
        ((x_TD, weights_TK, plan, rows, None), "together"),
        ((x_TD, weights_TK.double(), plan, rows, row_weights), "weights_TK must be float32"),
        ((x_TD, weights_TK, plan, rows, rows), "one value for each row"),
        ((x_TD, weights_TK, plan, rows, replace(row_weights, local=row_weights.local[:3])), "must agree"),
        ((x_TD, weights_TK, plan, replace(rows, views=None), row_weights), "choose 'triton'"),
        ((x_TD, weights_TK, plan, replace(rows, local=torch.ones(3, 4).T), row_weights), "rows must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=words):
            put_rows(*changed)


def test_get_and_clear_refuse() -> None:
    _, _, plan, rows, row_weights = arguments()
    get_rows(rows, plan), get_values(row_weights, plan)
    with pytest.raises(ValueError, match="rows must be a matrix"):
        get_rows(row_weights, plan)
    with pytest.raises(ValueError, match="rows must be a matrix of"):
        get_rows(replace(rows, local=rows.local.int()), plan)
    with pytest.raises(ValueError, match="one value for each row"):
        get_values(rows, plan)
    with pytest.raises(ValueError, match="one of auto, reference, triton"):
        get_rows(rows, plan, backend="numpy")
    with pytest.raises(ValueError, match="contiguous matrix"):
        clear_padding(rows.local.T, None, plan.offsets_e, plan.total_e)
    with pytest.raises(ValueError, match="row_weights_C"):
        clear_padding(rows.local, row_weights.local[:2], plan.offsets_e, plan.total_e)
    with pytest.raises(ValueError, match="offsets_e"):
        clear_padding(rows.local, None, plan.offsets_e.long(), plan.total_e)
    with pytest.raises(ValueError, match="total_e"):
        clear_padding(rows.local, None, plan.offsets_e, plan.total_e.int())


@needs_triton
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_rowwise_rows.py"))
