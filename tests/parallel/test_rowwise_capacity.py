"""Room for rows: how much there is, what overflows, what is dropped; one process."""

import pytest
import torch
from coterie_parallel import Axis, DispatchOptions, make_dispatcher
from coterie_parallel.dispatch.options import OVERFLOW_POLICIES
from coterie_parallel.dispatch.rowwise import exchange as exchange_module
from coterie_parallel.dispatch.rowwise import shipment as shipment_module
from coterie_parallel.dispatch.rowwise.capacity import (
    Counters,
    expert_counts,
    first_capacity,
    grown_capacity,
    heaviest_pairs,
    rows_needed,
)
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from coterie_parallel.dispatch.rowwise.exchange import RowExchange
from coterie_parallel.dispatch.rowwise.peers import virtual_peers
from coterie_parallel.dispatch.rowwise.placement import place_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize(
    ("factor", "num_tokens", "size", "alignment", "expected"),
    [
        (2.0, 10, 4, 1, 60),  # 2 * 10 * 3
        (1.01, 10, 4, 1, 31),
        (2.0, 10, 4, 16, 144),  # 60 and 5 * 15 of padding, in steps of 16
        (9.0, 10, 4, 1, 120),  # all pairs of all ranks
        (2.0, 10, 1, 1, 30),
        (2.0, 0, 4, 1, 1),
        (2.0, 0, 4, 16, 80),
    ],
)
def test_the_first_capacity(factor: float, num_tokens: int, size: int, alignment: int, expected: int) -> None:
    sizes = dict(num_tokens=num_tokens, top_k=3, size=size, num_local=5, alignment=alignment)
    assert first_capacity(factor, **sizes) == expected


def test_a_grown_capacity_has_a_quarter_to_spare() -> None:
    assert grown_capacity(100, 1) == 125
    assert grown_capacity(101, 16) == 128


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_heaviest_pairs_are_taken_on_every_rank(data: st.DataObject) -> None:
    size, num_local, num_pairs = (data.draw(st.integers(1, most)) for most in (3, 3, 6))
    num_experts = size * num_local
    ids = data.draw(st.lists(st.integers(-1, num_experts), min_size=size * num_pairs, max_size=size * num_pairs))
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=len(ids), max_size=len(ids)))
    limit = data.draw(st.integers(1, size * num_pairs))
    ids_SN = torch.tensor(ids).view(size, num_pairs)
    taken_SN = heaviest_pairs(ids_SN, torch.tensor(weights).view(size, num_pairs), num_local=num_local, limit=limit)

    expected = [False] * len(ids)
    for rank in range(size):
        own = [pair for pair in range(len(ids)) if rank * num_local <= ids[pair] < (rank + 1) * num_local]
        for pair in sorted(own, key=lambda pair: (-weights[pair], pair))[:limit]:
            expected[pair] = True
    assert taken_SN.flatten().tolist() == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_need_and_counts_are_those_of_the_placement(data: st.DataObject) -> None:
    size, num_local, num_pairs = (data.draw(st.integers(1, most)) for most in (3, 3, 6))
    alignment = data.draw(st.sampled_from([1, 4]))
    num_experts = size * num_local
    ids = data.draw(st.lists(st.integers(-2, num_experts), min_size=size * num_pairs, max_size=size * num_pairs))
    ids_SN = torch.tensor(ids).view(size, num_pairs)
    counts_SE = expert_counts(ids_SN, num_experts)
    assert counts_SE.tolist() == [[row.count(expert) for expert in range(num_experts)] for row in ids_SN.tolist()]
    none = torch.empty(0, 1, dtype=torch.int64)
    plan = place_rows(counts_SE, none, none.int(), index=0, num_local=num_local, alignment=alignment)
    assert rows_needed(ids_SN, num_local=num_local, alignment=alignment).tolist() == plan.need_S.tolist()


def test_what_follows_an_overflow_does_not_count_as_need() -> None:
    counters = Counters(torch.device("cpu"))
    for need in ([3, 7], [2, 1]):
        counters.add_need(torch.tensor(need), 8)
    assert (int(counters.rows_needed_max), int(counters.overflowed)) == (7, 0)
    for need in ([9, 2], [40, 50]):
        counters.add_need(torch.tensor(need), 8)
    assert (int(counters.rows_needed_max), int(counters.overflowed)) == (9, 1)
    counters.overflowed.zero_()
    counters.add_need(torch.tensor([10, 11]), None)
    assert (int(counters.rows_needed_max), int(counters.overflowed)) == (11, 0)


def _rowwise(**options: object) -> RowwiseDispatcher:
    made = make_dispatcher(
        "rowwise", num_experts=4, axis=Axis.single("expert"), options=DispatchOptions(**options), alignment=2
    )
    assert isinstance(made, RowwiseDispatcher)
    return made


def _sums(dispatcher: RowwiseDispatcher, num_tokens: int) -> list[float]:
    x_TD = torch.arange(num_tokens, dtype=torch.float32).unsqueeze(1) + 1
    ids_TK = torch.tensor([[0, 3]]).repeat(num_tokens, 1)
    sent = dispatcher.dispatch(x_TD, ids_TK, torch.ones(num_tokens, 2))
    return dispatcher.combine(sent.rows_RD, sent.handle).flatten().tolist()


def test_a_larger_batch_grows_the_buffers_once_and_says_so() -> None:
    dispatcher = _rowwise()
    assert dispatcher.grow() is None
    assert dispatcher.counters() == {}
    assert _sums(dispatcher, 3) == [2, 4, 6]
    assert dispatcher.grow() is None
    # 10 rows for each of two experts; there is room for 6 and for padding of 4, which the first expert takes.
    assert _sums(dispatcher, 10) == [token + 1 for token in range(10)]
    # The experts may run on what came: no segment goes past the buffer.
    sent = dispatcher.dispatch(torch.ones(10, 1), torch.tensor([[0, 3]] * 10), torch.ones(10, 2))
    assert (sent.rows_RD.shape[0], sent.offsets_e.tolist()) == (10, [10, 10, 10, 10])
    assert {name: int(value) for name, value in dispatcher.counters().items()} == {
        "rows_needed_max": 20,
        "overflowed": 1,
        "rows_dropped": 0,
        "ids_outside": 0,
    }
    # No factor is named: that of a first batch of 3 tokens never makes room for more than their 6 rows.
    said = dispatcher.grow()
    assert said == "row-wise buffers of 10 rows had no room for 20 rows on a rank and now hold 26"
    assert int(dispatcher.counters()["overflowed"]) == 0
    assert _sums(dispatcher, 10) == [2.0 * (token + 1) for token in range(10)]
    assert dispatcher.grow() is None


def test_exact_has_the_rows_that_came_and_nothing_to_replay() -> None:
    dispatcher = _rowwise(overflow="exact")
    for num_tokens in (3, 10, 0, 4):
        assert _sums(dispatcher, num_tokens) == [2.0 * (token + 1) for token in range(num_tokens)]
        sent = dispatcher.dispatch(torch.ones(num_tokens, 1), torch.full((num_tokens, 1), 2), torch.ones(num_tokens, 1))
        assert sent.rows_RD.shape[0] == (num_tokens + 1) // 2 * 2
        assert dispatcher.grow() is None
    assert int(dispatcher.counters()["rows_needed_max"]) == 20


def test_drop_leaves_out_the_lightest_and_counts_them() -> None:
    dispatcher = _rowwise(overflow="drop", capacity_factor=0.5)
    weights_TK = torch.tensor([[0.9, 0.1], [0.2, 0.2], [0.3, 0.8], [0.2, 0.7]])
    ids_TK = torch.tensor([[0, 3], [1, 3], [0, 2], [-1, 3]])
    x_TD = torch.tensor([[1.0], [10.0], [100.0], [1000.0]]).requires_grad_()
    weights_TK.requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    # Room for 0.5 * 4 * 2 = 4 of the 7 pairs: 0.9, 0.8, 0.7, 0.3.
    assert sent.rows_RD.flatten().tolist()[:6] == [1, 100, 100, 0, 1000, 0]
    assert [round(weight, 1) for weight in sent.row_weights_R.tolist()[:6]] == [0.9, 0.3, 0.8, 0, 0.7, 0]
    assert sent.offsets_e.tolist() == [2, 2, 4, 6]
    y_TD = dispatcher.combine(sent.rows_RD * sent.row_weights_R.unsqueeze(1), sent.handle)
    y_TD.sum().backward()
    torch.testing.assert_close(y_TD.flatten(), torch.tensor([0.9, 0.0, 110.0, 700.0]))
    assert x_TD.grad.flatten().tolist() == pytest.approx([0.9, 0, 1.1, 0.7])
    assert weights_TK.grad.tolist() == [[1, 0], [0, 0], [100, 100], [0, 1000]]
    assert dispatcher.grow() is None
    assert int(dispatcher.counters()["rows_dropped"]) == 3
    assert int(dispatcher.counters()["rows_needed_max"]) == 10  # 2, 2, 2 and 4 rows, what was dropped included
    assert sent.rows_RD.shape[0] == 4 + 4


def test_equal_weights_are_dropped_from_the_end() -> None:
    dispatcher = _rowwise(overflow="drop", capacity_factor=0.5)
    sent = dispatcher.dispatch(torch.arange(1.0, 5).unsqueeze(1), torch.tensor([[3, 2]] * 4), torch.ones(4, 2))
    assert dispatcher.combine(sent.rows_RD, sent.handle).flatten().tolist() == [2, 4, 0, 0]


def test_drop_makes_room_for_a_longer_batch() -> None:
    dispatcher = _rowwise(overflow="drop", capacity_factor=1.0)
    assert _sums(dispatcher, 3) == [2, 4, 6]
    _sums(dispatcher, 5)
    text = dispatcher.grow()
    assert text is not None
    assert text.startswith("row-wise buffers of 10 rows had no room for 5 tokens on a rank and now hold 14;")
    assert _sums(dispatcher, 5) == [2, 4, 6, 8, 10]
    assert dispatcher.grow() is None
    with pytest.raises(ValueError, match="choices must stay the same; it was 2 and is 1"):
        dispatcher.dispatch(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_ids_that_the_host_has_not_seen_are_not_routed_and_raise_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowwiseDispatcher, "check_arguments", lambda *arguments, **how: None)
    for overflow in OVERFLOW_POLICIES:
        dispatcher = _rowwise(overflow=overflow)
        ids_TK = torch.tensor([[4, 0], [-1, 1], [-2, 2**40]])
        sent = dispatcher.dispatch(torch.ones(3, 1), ids_TK, torch.ones(3, 2))
        assert dispatcher.combine(sent.rows_RD, sent.handle).flatten().tolist() == [1, 1, 0]
        assert int(dispatcher.counters()["rows_dropped"]) == 0
        with pytest.raises(ValueError, match=r"3 expert ids that are not in \[-1, 4\)"):
            dispatcher.grow()


def test_a_capacity_below_one_row_a_token_is_refused_at_the_first_dispatch() -> None:
    """P21, where nobody knew the number of choices before."""
    dispatcher = _rowwise(capacity_factor=0.4)
    with pytest.raises(ValueError, match=r"capacity_factor \(0.4\) must be at least 0.5 with top_k \(2\)"):
        _sums(dispatcher, 3)


def test_options_with_faults_are_refused_with_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"overflow \('wait'\).*\nsaved_rows \('none'\).*\ncapacity_factor \(-1\)"):
        _rowwise(overflow="wait", saved_rows="none", capacity_factor=-1)


def test_starts_and_finishes_alternate() -> None:
    dispatcher = _rowwise()
    arguments = (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    pending = dispatcher.dispatch_start(*arguments)
    with pytest.raises(ValueError, match="finish the dispatch that was started before the next dispatch"):
        dispatcher.dispatch_start(*arguments)
    sent = dispatcher.dispatch_finish(pending)
    with pytest.raises(ValueError, match="no dispatch to finish: nothing was started"):
        dispatcher.dispatch_finish(pending)
    returning = dispatcher.combine_start(sent.rows_RD, sent.handle)
    with pytest.raises(ValueError, match="finish the combine that was started"):
        dispatcher.dispatch(*arguments)
    assert dispatcher.combine_finish(returning).tolist() == [[1], [1]]


def test_a_closed_dispatcher_says_so() -> None:
    dispatcher = _rowwise()
    _sums(dispatcher, 3)
    dispatcher.close()
    dispatcher.close()
    with pytest.raises(ValueError, match="this dispatcher is closed; make a new one"):
        _sums(dispatcher, 3)


class _NoLook(TorchDispatchMode):
    """Fails where the host would have to wait for a value of a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "item"), name
        assert not (name.startswith("index") and any(_is_mask(index) for index in args[1:])), name
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    if isinstance(index, (list, tuple)):
        return any(_is_mask(one) for one in index)
    return isinstance(index, Tensor) and index.dtype == torch.bool


@pytest.mark.parametrize("overflow", ["grow", "drop"])
@pytest.mark.parametrize("saved_rows", ["copy", "lease", "fetch"])
def test_the_host_reads_nothing(overflow: str, saved_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, but for the kernels of rows, whose plain torch form does read, and the CPU's short cuts."""
    moved = []
    for name in ("put_rows", "get_rows", "get_values", "clear_padding"):
        plain = getattr(exchange_module, name)

        def unseen(*arguments, _plain=plain, _name=name, **how):
            moved.append(_name)
            with torch.utils._python_dispatch._disable_current_modes():
                return _plain(*arguments, **how)

        monkeypatch.setattr(exchange_module, name, unseen)
    for module in (exchange_module, shipment_module):
        monkeypatch.setattr(module, "copy_used", lambda source, target, ends, **how: target.copy_(source))
    monkeypatch.setattr(RowwiseDispatcher, "check_arguments", lambda *arguments, **how: None)
    dispatcher = _rowwise(overflow=overflow, saved_rows=saved_rows)
    assert dispatcher.grow() is None  # somebody asks, so no dispatch looks for an overflow
    _sums(dispatcher, 6)  # makes the buffers
    x_TD = torch.randn(6, 1, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids_TK = torch.tensor([[0, 3], [1, 1], [-1, 2]] * 2)
    moved.clear()
    with _NoLook():
        sent = dispatcher.dispatch(x_TD, ids_TK, torch.ones(6, 2))
        with dispatcher.saved_rows(sent.handle):
            rows_RD = sent.rows_RD * sent.rows_RD
        y_TD = dispatcher.combine(rows_RD, sent.handle)
        y_TD.sum().backward()
        counters = dispatcher.counters()
    routed_TK = (ids_TK >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(x_TD.grad, 2 * x_TD.detach() * routed_TK)
    assert {"put_rows", "get_rows", "get_values", "clear_padding"} == set(moved)
    assert int(counters["rows_needed_max"]) == 12


def test_virtual_ranks_are_driven_phase_by_phase() -> None:
    """Four ranks in one process, as a benchmark on one GPU has them."""
    size, top_k, width = 4, 2, 3
    generator = torch.Generator().manual_seed(0)
    peers = virtual_peers(size, "cpu")
    options = DispatchOptions(capacity_factor=4.0)
    ranks = [RowExchange(one, num_experts=8, alignment=4, options=options, num_tokens=5, top_k=top_k) for one in peers]
    x = [torch.randn(5, width, generator=generator) for _ in ranks]
    ids = [torch.rand(5, 8, generator=generator).argsort(1)[:, :top_k] for _ in ranks]
    weights = [torch.rand(5, top_k, generator=generator) for _ in ranks]
    announced = [rank.announce(*routing) for rank, *routing in zip(ranks, ids, weights, strict=True)]
    plans = [rank.place(one)[0] for rank, one in zip(ranks, announced, strict=True)]
    buffers = [rank.buffers.rows("rows", width, torch.float32) for rank in ranks]
    for rank, plan, rows, *sent in zip(ranks, plans, buffers, x, weights, strict=True):
        rank.put(*sent, plan, rows, is_first=True)
    for rank, plan, rows in zip(ranks, plans, buffers, strict=True):
        rank.receive(plan, rows, with_weights=True)
    results = []
    for rank, plan, rows in zip(ranks, plans, buffers, strict=True):
        results.append(rank.offer(rows.local * 2, None, plan.offsets_e))
    for rank, plan, outputs, x_TD in zip(ranks, plans, results, x, strict=True):
        assert torch.equal(rank.collect(plan, outputs), x_TD * 2 * top_k)
        assert int(rank.counters.overflowed) == 0
