"""Rows and gradients that experts write where peers read them: the bits of copied ones, and no copy."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from coterie_parallel import (
    Axis,
    Dispatched,
    Dispatcher,
    DispatchOptions,
    Mesh,
    ParallelConfig,
    make_dispatcher,
    make_plan,
)
from coterie_parallel.dispatch.rowwise import exchange
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel.in_place import with_gradient_in, written_to

SAVED = ["copy", "lease", "fetch"]
RECOMPUTED = ["nothing", "experts", "layer", "layer to its end"]
NUM_TOKENS, WIDTH, TOP_K, NUM_EXPERTS, NUM_LAYERS = 12, 6, 3, 4, 3


def _rowwise(axis: Axis | None = None, **options: Any) -> RowwiseDispatcher:
    axis = Axis.single("expert") if axis is None else axis
    return RowwiseDispatcher(num_experts=NUM_EXPERTS, axis=axis, alignment=4, options=DispatchOptions(**options))


def _tokens(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    weights_TK = torch.rand(NUM_TOKENS, TOP_K, generator=generator)
    return torch.randn(NUM_TOKENS, WIDTH, generator=generator).requires_grad_(), ids_TK, weights_TK.requires_grad_()


def _experts(dispatcher: Dispatcher, sent: Dispatched, *, in_place: bool) -> Tensor:
    """Return the weighed squares of the rows."""
    asks = [partial(ask, sent.handle) for ask in (dispatcher.memory_for_gradients, dispatcher.memory_for_combine)]
    rows_RD = with_gradient_in(sent.rows_RD, asks[0] if in_place else None)
    squares_RD = rows_RD * rows_RD * sent.row_weights_R.unsqueeze(1)
    return written_to(squares_RD, asks[1] if in_place else None)


def _layer(dispatcher: Dispatcher, recompute: str, in_place: bool, *tokens: Tensor) -> Tensor:
    with dispatcher.unsaved_rows() if recompute.startswith("layer") else nullcontext():
        sent = dispatcher.dispatch(*tokens)
    run = partial(_experts, dispatcher, in_place=in_place)
    with nullcontext() if recompute.startswith("layer") else dispatcher.saved_rows(sent.handle):
        rows_RD = checkpoint(run, sent, use_reentrant=False) if recompute == "experts" else run(sent)
    return dispatcher.combine(rows_RD, sent.handle)


def _forward(dispatcher: Dispatcher, recompute: str, in_place: bool, *tokens: Tensor) -> Tensor:
    x_TD = tokens[0]
    run = partial(_layer, dispatcher, recompute, in_place)
    for _ in range(NUM_LAYERS):
        given = (x_TD, *tokens[1:])
        if recompute.startswith("layer"):
            y_TD = checkpoint(run, *given, use_reentrant=False, early_stop=recompute == "layer")
        else:
            y_TD = run(*given)
        x_TD = (x_TD + y_TD).tanh()
    return x_TD


def _trained(dispatcher: Dispatcher, recompute: str, *, in_place: bool, seed: int = 0) -> list[Tensor]:
    """Return outputs and gradients: two micro-batches in turn, then two of which both are forward first, then none."""
    batches = [_tokens(seed + number) for number in range(4)]
    run = partial(_forward, dispatcher, recompute, in_place)
    outputs = []
    for one in batches[:2]:
        outputs.append(run(*one))
        outputs[-1].square().sum().backward()
    outputs += [run(*one) for one in batches[2:]]
    for y_TD in outputs[2:]:
        y_TD.square().sum().backward()
    with torch.no_grad():
        outputs.append(run(*batches[0]))
    assert dispatcher.grow() is None
    grads = [one.grad for x_TD, _, weights_TK in batches for one in (x_TD, weights_TK)]
    assert all(one is not None and one.any() for one in grads)
    return [*(one.detach() for one in outputs), *grads]


@contextmanager
def _counted_copies() -> Iterator[list[int]]:
    """Count the copies of rows into offered memory."""
    plain, copies = exchange.copy_used, [0]

    def counted(source_R: Tensor, *args: Any, **kwargs: Any) -> None:
        copies[0] += source_R.ndim == 2
        plain(source_R, *args, **kwargs)

    exchange.copy_used = counted
    try:
        yield copies
    finally:
        exchange.copy_used = plain


def _differences(axis: Axis | None, saved_rows: str, recompute: str, overflow: str = "grow") -> list[str]:
    """Return where rows in place differ from copied ones, and copies that were made in spite of it."""
    results = []
    for in_place in (False, True):
        dispatcher = _rowwise(axis, saved_rows=saved_rows, overflow=overflow, capacity_factor=4.0)
        _trained(dispatcher, "nothing", in_place=False, seed=9)
        with _counted_copies() as copies:
            results.append(_trained(dispatcher, recompute, in_place=in_place))
        dispatcher.close()
    where = f"{saved_rows}, {recompute}, {overflow}"
    equal = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    problems = [] if all(equal) else [f"{where}: equal {equal}"]
    # A combine that is computed again copies, and peers may still read that when the gradients come.
    allowed = 2 * 4 * NUM_LAYERS if recompute == "layer to its end" else 0
    return problems if copies[0] == allowed else [*problems, f"{where}: {copies[0]} copies"]


@pytest.mark.parametrize("saved_rows", SAVED)
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_one_rank_computes_the_same_bits_and_copies_nothing(saved_rows: str, recompute: str) -> None:
    assert _differences(None, saved_rows, recompute) == []


def _on_ranks(rank: int, world: int) -> list[str]:
    with Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=30) as mesh:
        axis = mesh.axis("expert")
        ways = ("copy", "nothing"), ("lease", "experts"), ("copy", "layer"), ("copy", "experts", "exact")
        problems = [problem for way in ways for problem in _differences(axis, *way)]
        return problems + _slow_reader(axis) + _one_asks(axis)


def _slow_reader(axis: Axis) -> list[str]:
    """One rank reads late, while the other goes as far as it can and writes wherever it may."""
    dispatcher = _rowwise(axis, capacity_factor=4.0)
    x_TD, *chosen = _tokens(axis.index)
    problems = []
    for number in range(4):
        with torch.no_grad():
            sent = dispatcher.dispatch(x_TD, *chosen)
            memory = dispatcher.memory_for_combine(sent.handle)
            if (memory is None) != (number == 0):
                problems.append(f"dispatch {number}: memory is {memory is not None}")
            rows_RD = sent.rows_RD * (number + 1)
            pending = dispatcher.combine_start(
                rows_RD if memory is None else written_to(rows_RD, lambda memory=memory: memory), sent.handle
            )
            if axis.index == number % 2:
                time.sleep(0.1)
            y_TD = dispatcher.combine_finish(pending)
            # Peers may still read: nothing is lent, and nothing waits.
            if dispatcher.memory_for_combine(sent.handle) is not None:
                problems.append(f"dispatch {number}: lent while peers may read")
        if not torch.allclose(y_TD, x_TD * TOP_K * (number + 1)):
            problems.append(f"dispatch {number}: wrong sums")
    dispatcher.close()
    return problems


def _one_asks(axis: Axis) -> list[str]:
    """Whether a rank asks is its own affair."""
    results = []
    for asks in (False, axis.index == 0):
        dispatcher = _rowwise(axis, capacity_factor=4.0)
        results.append([_trained(dispatcher, "experts", in_place=asks, seed=seed) for seed in (axis.index, 7)])
        dispatcher.close()
    same = all(torch.equal(a, b) for old, new in zip(*results, strict=True) for a, b in zip(old, new, strict=True))
    return [] if same else ["one rank asks, and the bits differ"]


def test_two_ranks_compute_the_same_bits_and_copy_nothing() -> None:
    assert run_ranks(_on_ranks, 2) == [[], []]


def _ready(**options: Any) -> RowwiseDispatcher:
    """Return a dispatcher that has made all its buffers."""
    dispatcher = _rowwise(**options)
    _forward(dispatcher, "nothing", False, *_tokens(5)).sum().backward()
    assert dispatcher.grow() is None
    return dispatcher


def _cubed(dispatcher: Dispatcher, sent: Dispatched, ask: Callable[[], Tensor | None] | None) -> Tensor:
    return written_to(sent.rows_RD * sent.rows_RD * sent.rows_RD, ask)


def test_memory_is_lent_to_one_handle_at_a_time() -> None:
    dispatcher = _ready()
    first, second = (dispatcher.dispatch(*_tokens(seed)) for seed in (0, 1))
    expected = [dispatcher.combine(one.rows_RD.detach() ** 3 + 0 * one.rows_RD, one.handle) for one in (first, second)]
    first, second = (dispatcher.dispatch(*_tokens(seed)) for seed in (0, 1))
    asks = [partial(dispatcher.memory_for_combine, one.handle) for one in (first, second)]
    a_RD = _cubed(dispatcher, first, asks[0])
    assert asks[0]() is None
    assert asks[1]() is None
    b_RD = _cubed(dispatcher, second, asks[1])
    for got, (rows_RD, sent) in zip(expected, ((a_RD, first), (b_RD, second)), strict=True):
        torch.testing.assert_close(dispatcher.combine(rows_RD, sent.handle), got)


def test_who_gives_the_handle_up_gives_the_memory_back() -> None:
    dispatcher = _ready()
    given_up = dispatcher.dispatch(*_tokens(0))
    assert dispatcher.memory_for_combine(given_up.handle) is not None
    sent = dispatcher.dispatch(*_tokens(1))
    assert dispatcher.memory_for_combine(sent.handle) is None
    del given_up
    assert dispatcher.memory_for_combine(sent.handle) is not None


def test_rows_that_were_written_over_are_refused_and_do_no_harm() -> None:
    dispatcher = _ready()
    first, second = (dispatcher.dispatch(*_tokens(seed)) for seed in (0, 1))
    lost_RD = _cubed(dispatcher, first, partial(dispatcher.memory_for_combine, first.handle))
    dispatcher.combine(second.rows_RD * 2, second.handle)
    with pytest.raises(ValueError, match="lent, and that has been used since"):
        dispatcher.combine(lost_RD, first.handle)
    x_TD = _tokens(0)[0]
    torch.testing.assert_close(dispatcher.combine(first.rows_RD * 2, first.handle), 2 * TOP_K * x_TD)


def test_rows_in_another_form_are_copied() -> None:
    dispatcher = _ready()
    sent = dispatcher.dispatch(*_tokens(0))
    rows_RD = _cubed(dispatcher, sent, partial(dispatcher.memory_for_combine, sent.handle))
    with _counted_copies() as copies:
        y_TD = dispatcher.combine(rows_RD + 1, sent.handle)
    assert copies == [1]
    torch.testing.assert_close(y_TD, TOP_K * (_tokens(0)[0] ** 3 + 1))


@pytest.mark.parametrize("used_before", [True, False])
def test_outputs_that_somebody_saved_are_not_used_after_they_were_written_over(
    used_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a kernel does, which autograd does not see.
    monkeypatch.setattr(exchange, "copy_used", lambda rows, target, *_, **__: target.data[: len(rows)].copy_(rows))
    dispatcher = _ready()

    def layer(x_TD: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD, *_tokens(0)[1:])
        rows_RD = with_gradient_in(sent.rows_RD, partial(dispatcher.memory_for_gradients, sent.handle))
        rows_RD = written_to(rows_RD * 2, partial(dispatcher.memory_for_combine, sent.handle))
        if used_before:
            return dispatcher.combine(rows_RD * rows_RD, sent.handle)
        return dispatcher.combine(rows_RD, sent.handle) + (rows_RD * rows_RD).sum()

    y_TD = layer(_tokens(0)[0])
    if not used_before:
        # Written over by those of the next layer.
        y_TD = layer(y_TD)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_TD.sum().backward()


@pytest.mark.parametrize("recompute", ["nothing", "experts"])
def test_gradients_of_rows_that_are_used_twice_are_summed(recompute: str) -> None:
    dispatcher = _ready()
    results = []
    for in_place in (False, True):
        x_TD, *chosen = _tokens(0)
        sent = dispatcher.dispatch(x_TD, *chosen)

        def experts(sent: Dispatched, in_place: bool = in_place) -> Tensor:
            return _experts(dispatcher, sent, in_place=in_place)

        run = partial(checkpoint, experts, use_reentrant=False) if recompute == "experts" else experts
        dispatcher.combine(run(sent) + 2 * run(sent), sent.handle).square().sum().backward()
        results.append((x_TD.grad, chosen[1].grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_kept_graph_gives_the_same_gradients_twice() -> None:
    dispatcher = _ready()
    tokens = _tokens(0)
    loss = _layer(dispatcher, "nothing", True, *tokens).square().sum()
    inputs = tokens[0], tokens[2]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    with _counted_copies() as copies:
        second = torch.autograd.grad(loss, inputs)
    assert copies == [0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_after_growth_the_first_rows_are_copied_and_the_next_are_not() -> None:
    dispatcher = _ready(capacity_factor=1.0)
    longer = [torch.cat([one.detach(), one.detach()]) for one in _tokens(0)]
    longer[0].requires_grad_()

    def step(copied: int) -> Tensor:
        with _counted_copies() as copies:
            y_TD = _layer(dispatcher, "nothing", True, *longer)
            y_TD.sum().backward()
        assert copies == [copied]
        return y_TD.detach()

    step(0)
    assert dispatcher.grow() is not None
    copied_TD = step(1)
    assert torch.equal(step(0), copied_TD)
    assert dispatcher.grow() is None


def test_other_dispatchers_lend_nothing() -> None:
    for name in ("local", "all_to_all"):
        dispatcher = make_dispatcher(name, num_experts=NUM_EXPERTS, axis=Axis.single("expert"))
        sent = dispatcher.dispatch(*_tokens(0))
        assert dispatcher.memory_for_combine(sent.handle) is None
        assert dispatcher.memory_for_gradients(sent.handle) is None
