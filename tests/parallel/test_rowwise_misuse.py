"""What callers do wrong or by halves: overflows that nobody asks about, handles, refused calls, closed dispatchers."""

import errno
import os
import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
from coterie_parallel import Axis, Dispatcher, DispatchOptions, make_dispatcher
from coterie_parallel.dispatch.rowwise.capacity import first_capacity
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from coterie_parallel.dispatch.rowwise.peers import PeerMemory, segments, shared_memory
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IDS_TK = torch.tensor([[0, 3], [1, 2], [3, 1]])
NO_ROOM = "rows found no room in an earlier dispatch"


def _made(name: str = "rowwise", **options: Any) -> Dispatcher:
    return make_dispatcher(name, num_experts=4, axis=Axis.single("expert"), options=DispatchOptions(**options))


def _tokens(num_tokens: int = 3) -> Tensor:
    return torch.randn(num_tokens, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _layer(dispatcher: Dispatcher, x_TD: Tensor) -> Tensor:
    num_tokens = x_TD.shape[0]
    sent = dispatcher.dispatch(x_TD, IDS_TK.repeat(num_tokens // 3, 1), torch.ones(num_tokens, 2))
    return dispatcher.combine(sent.rows_RD * sent.rows_RD, sent.handle)


def test_an_overflow_that_nobody_asks_about_is_a_warning_in_the_next_dispatch_and_at_the_end() -> None:
    dispatcher = _made()
    _layer(dispatcher, _tokens())
    _layer(dispatcher, _tokens(6))
    with pytest.warns(UserWarning, match=NO_ROOM):
        _layer(dispatcher, _tokens())
    _layer(dispatcher, _tokens())  # said once
    with pytest.warns(UserWarning, match="call grow.. at the end of each step"):
        dispatcher.close()


def test_who_asks_gets_no_warning() -> None:
    dispatcher = _made()
    assert dispatcher.grow() is None
    for _ in range(3):
        _layer(dispatcher, _tokens())
        _layer(dispatcher, _tokens(6))
    assert dispatcher.grow() is not None
    dispatcher.close()


def test_an_error_is_not_followed_by_a_warning() -> None:
    dispatcher = _made()
    _layer(dispatcher, _tokens())
    _layer(dispatcher, _tokens(6))
    with pytest.raises(RuntimeError, match="something else"), closing(dispatcher):
        raise RuntimeError("something else")


def test_a_handle_is_combined_once_under_gradients() -> None:
    dispatcher = _made()
    sent = dispatcher.dispatch(_tokens(), IDS_TK, torch.ones(3, 2))
    first_TD = dispatcher.combine(sent.rows_RD * 2, sent.handle)
    with pytest.raises(ValueError, match="a handle is combined once under gradients"):
        dispatcher.combine(sent.rows_RD * 3, sent.handle)
    with torch.no_grad():
        assert torch.equal(dispatcher.combine(sent.rows_RD * 2, sent.handle), first_TD)
    first_TD.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputed_combine_is_no_second_one(early_stop: bool) -> None:
    dispatcher = _made()
    x_TD = _tokens()
    sent = dispatcher.dispatch(x_TD, IDS_TK, torch.ones(3, 2))

    def back(rows_RD: Tensor) -> Tensor:
        return dispatcher.combine(rows_RD.sin(), sent.handle)

    checkpoint(back, sent.rows_RD, use_reentrant=False, early_stop=early_stop).sum().backward()
    torch.testing.assert_close(x_TD.grad, 2 * x_TD.detach().cos())


@pytest.mark.parametrize("name", ["local", "all_to_all", "rowwise"])
@pytest.mark.parametrize("other", ["local", "all_to_all", "rowwise"])
def test_a_handle_of_another_dispatcher_is_refused(name: str, other: str) -> None:
    dispatcher, foreign = _made(name), _made(other)
    sent = foreign.dispatch(_tokens(), IDS_TK, torch.ones(3, 2))
    for _ in range(2):  # before and after the first dispatch
        with pytest.raises(ValueError, match="the handle must be the one that a dispatch of this dispatcher returned"):
            dispatcher.combine(sent.rows_RD, sent.handle)
        own = dispatcher.dispatch(_tokens(), IDS_TK, torch.ones(3, 2))
        dispatcher.combine(own.rows_RD, own.handle)


@pytest.mark.parametrize("name", ["local", "all_to_all"])
def test_options_that_do_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"overflow \('exact'\) does nothing"):
        _made(name, overflow="exact")


def test_a_refused_call_leaves_the_dispatcher_as_it_was() -> None:
    dispatcher = _made(overflow="drop")
    sent = dispatcher.dispatch(_tokens(), IDS_TK, torch.ones(3, 2))
    with pytest.raises(ValueError, match="choices must stay the same"):
        dispatcher.dispatch(_tokens(), IDS_TK[:, :1], torch.ones(3, 1))
    with pytest.raises(ValueError, match="depend on the dispatched rows"):
        dispatcher.combine(sent.rows_RD.detach(), sent.handle)
    with pytest.raises(ValueError, match="matrix of"):
        dispatcher.combine(sent.rows_RD[1:], sent.handle)
    dispatcher.combine(sent.rows_RD, sent.handle).sum().backward()
    _layer(dispatcher, _tokens())


def test_every_call_of_a_closed_dispatcher_says_so() -> None:
    dispatcher = _made()
    sent = dispatcher.dispatch(_tokens(), IDS_TK, torch.ones(3, 2))
    pending = dispatcher.combine_start(sent.rows_RD, sent.handle)
    dispatcher.close()
    for call in (
        lambda: dispatcher.dispatch(_tokens(), IDS_TK, torch.ones(3, 2)),
        lambda: dispatcher.combine(sent.rows_RD, sent.handle),
        lambda: dispatcher.combine_finish(pending),
    ):
        with pytest.raises(ValueError, match="this dispatcher is closed"):
            call()


@pytest.mark.parametrize("saved_rows", ["copy", "lease", "fetch"])
def test_a_recomputation_may_stop_between_start_and_finish(saved_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are counted: each one that was sent is waited for, also where nobody needs what comes with it."""

    def block(dispatcher: Dispatcher, x_TD: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD, IDS_TK, torch.ones(3, 2))
        with dispatcher.saved_rows(sent.handle):
            rows_RD = sent.rows_RD.sin()
        pending = dispatcher.combine_start(rows_RD, sent.handle)
        shared_TD = x_TD.cos()  # the last that is saved, so that the recomputation stops here
        return dispatcher.combine_finish(pending) + shared_TD

    local, dispatcher = _made("local"), _made(saved_rows=saved_rows)
    found = []
    for one in (local, dispatcher, dispatcher):
        x_TD = _tokens()
        block(one, x_TD.sin())
        if one is dispatcher and len(found) == 1:
            peers, open_phases = one._exchange.peers, dict.fromkeys(("counts", "rows", "outputs", "free"), 0)

            def signal(phase: str, open_phases: dict[str, int] = open_phases) -> None:
                assert open_phases[phase] == 0, phase
                open_phases[phase] += 1

            def wait(phase: str, open_phases: dict[str, int] = open_phases) -> None:
                assert open_phases[phase] == 1, phase
                open_phases[phase] -= 1

            monkeypatch.setattr(peers, "signal", signal)
            monkeypatch.setattr(peers, "wait", wait)
        y_TD = checkpoint(block, one, checkpoint(block, one, x_TD, use_reentrant=False), use_reentrant=False)
        y_TD.sum().backward()
        found.append(x_TD.grad)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("saved_rows", ["copy", "lease", "fetch"])
def test_the_first_dispatch_may_be_under_inference_mode(saved_rows: str) -> None:
    dispatcher, local = _made(saved_rows=saved_rows), _made("local")
    with torch.inference_mode():
        found = _layer(dispatcher, _tokens().detach())
        assert torch.equal(found, _layer(local, _tokens().detach()))
        dispatcher.grow()
    gradients = []
    for one in (dispatcher, local):
        x_TD = _tokens()
        _layer(one, x_TD).sum().backward()
        gradients.append(x_TD.grad)
    assert torch.equal(*gradients)
    with torch.inference_mode():
        _layer(dispatcher, _tokens(6).detach())
        assert dispatcher.grow() is not None
        _layer(dispatcher, _tokens(6).detach())
        assert dispatcher.grow() is None
    _layer(dispatcher, _tokens(6)).sum().backward()


def test_a_huge_capacity_factor_gives_room_for_all_pairs() -> None:
    assert first_capacity(1e308, num_tokens=10, top_k=3, size=4, num_local=5, alignment=1) == 120
    dispatcher = _made(capacity_factor=1e308)
    _layer(dispatcher, _tokens())
    assert dispatcher.grow() is None


def test_a_factor_is_named_where_it_would_do() -> None:
    dispatcher = _made(capacity_factor=0.5)
    assert isinstance(dispatcher, RowwiseDispatcher)
    dispatcher.grow()
    _layer(dispatcher, _tokens())
    said = dispatcher.grow()
    # 6 pairs are all that a first batch of 3 tokens has, and 8 rows are what 6 need with a quarter to spare.
    assert said == "row-wise buffers of 3 rows had no room for 6 rows on a rank and now hold 8"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatcher.close()


@pytest.mark.parametrize(
    ("number", "advice", "other"),
    [
        (errno.EROFS, "mount it writable", "--shm-size"),
        (errno.EACCES, "mount it writable", "--shm-size"),
        (
            errno.ENOSPC,
            "enlarge it .in a container by --shm-size. or allocate less: a lower capacity_factor",
            "writable",
        ),
    ],
)
def test_shared_memory_that_is_refused_says_what_to_do(
    number: int, advice: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(num_bytes: int) -> str:
        raise OSError(number, os.strerror(number))

    peers = object.__new__(shared_memory.SharedMemoryPeers)
    PeerMemory.__init__(peers, Axis.single("expert"), "cpu", 1.0)
    monkeypatch.setattr(segments, "create", create)
    monkeypatch.setattr(peers, "_usable", lambda: None)
    monkeypatch.setattr(peers, "_exchange", lambda board, texts: [texts])
    with pytest.raises(ValueError, match=advice) as refused:
        peers.allocate("rows", (4, 2), torch.float32)
    assert other not in str(refused.value)
