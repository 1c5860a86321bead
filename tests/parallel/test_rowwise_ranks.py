"""The row-wise dispatcher on several processes: options, growth and drops alike on all ranks, recompute, overlap."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_parallel import Axis, CollectiveError, DispatchOptions, Mesh, ParallelConfig, make_dispatcher, make_plan
from coterie_parallel.conformance import CASES, conformance_problems
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from support.interpreted import needs_triton, run_interpreted
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OPTIONS = [
    DispatchOptions(saved_rows="lease", capacity_factor=1.0),
    DispatchOptions(saved_rows="fetch", overflow="exact", capacity_factor=1.0),
    DispatchOptions(saved_rows="copy", overflow="drop", capacity_factor=4.0),
]
HARD = ("uneven", "empty_rank", "first_rank", "some_unrouted", "aligned_16", "bfloat16", "longer")


@dataclass(frozen=True, kw_only=True)
class Found:
    problems: list[str]
    dropped: list[int]
    drop_result: list[float]
    grown: list[str | None]
    order: list[str]
    errors: list[str]
    other_width: str


def _checks(rank: int, world: int) -> Found:
    with Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=30) as mesh:
        axis = mesh.axis("expert")
        cases = [case for case in CASES if case.name in HARD]
        problems = [
            f"{options}: {problem}"
            for options in OPTIONS
            for problem in conformance_problems("rowwise", axis, cases=cases, options=options)
        ]
        problems += _two_in_one_process(axis) + _recomputed(axis)
        dropped, drop_result = _dropped(axis)
        return Found(
            problems=problems,
            dropped=dropped,
            drop_result=drop_result,
            grown=_grown(axis),
            order=_order(axis),
            errors=_errors(axis),
            other_width=_other_width(axis),
        )


def _rowwise(axis: Axis, num_experts: int = 8, **options: Any) -> RowwiseDispatcher:
    made = make_dispatcher("rowwise", num_experts=num_experts, axis=axis, options=DispatchOptions(**options))
    assert isinstance(made, RowwiseDispatcher)
    return made


def _batch(axis: Axis, num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + axis.index)
    ids_TK = torch.rand(num_tokens, 8, generator=generator).argsort(1)[:, :2]
    return torch.randn(num_tokens, 4, generator=generator), ids_TK, torch.rand(num_tokens, 2, generator=generator)


def _squared(dispatcher: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    with dispatcher.saved_rows(sent.handle):
        rows_RD = sent.rows_RD * sent.rows_RD * sent.row_weights_R.unsqueeze(1)
    return dispatcher.combine(rows_RD, sent.handle)


def _gradient(dispatcher: Any, axis: Axis, seed: int) -> Tensor:
    x_TD, *routing = _batch(axis, 6, seed)
    x_TD.requires_grad_()
    _squared(dispatcher, _squared(dispatcher, x_TD, *routing), *routing).sum().backward()
    return x_TD.grad


def _two_in_one_process(axis: Axis) -> list[str]:
    """Two models, each with its own buffers, take turns; closing one leaves the other alone."""
    local = make_dispatcher("all_to_all", num_experts=8, axis=axis)
    first, second = _rowwise(axis, capacity_factor=4.0), _rowwise(axis, capacity_factor=4.0, saved_rows="lease")
    problems = []
    for seed, dispatcher in enumerate((first, second, first)):
        if not torch.equal(_gradient(dispatcher, axis, seed), _gradient(local, axis, seed)):
            problems.append(f"two dispatchers: number {seed} differs")
    first.close()
    if not torch.equal(_gradient(second, axis, 4), _gradient(local, axis, 4)):
        problems.append("two dispatchers: the second one differs after the first was closed")
    second.close()
    return problems


def _recomputed(axis: Axis) -> list[str]:
    exchange = make_dispatcher("all_to_all", num_experts=8, axis=axis)
    expected = _gradient(exchange, axis, 7)
    problems = []
    for saved_rows in ("copy", "lease", "fetch"):
        dispatcher = _rowwise(axis, capacity_factor=4.0, saved_rows=saved_rows)
        x_TD, *routing = _batch(axis, 6, 7)
        x_TD.requires_grad_()

        def block(x: Tensor, dispatcher: Any = dispatcher, routing: Any = routing) -> Tensor:
            return _squared(dispatcher, x, *routing)

        # One after another: each recomputed dispatch comes while gradients of its own block are in use.
        checkpoint(block, checkpoint(block, x_TD, use_reentrant=False), use_reentrant=False).sum().backward()
        if not torch.equal(x_TD.grad, expected):
            problems.append(f"recompute with {saved_rows} differs")
        dispatcher.close()
    return problems


def _dropped(axis: Axis) -> tuple[list[int], list[float]]:
    """All pairs go to the experts of index 1; heavier ones come from the last rank."""
    dispatcher = _rowwise(axis, num_experts=2 * axis.size, overflow="drop", capacity_factor=1.0)
    ids_TK = torch.tensor([[2, 3]] * 3)
    weights_TK = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]) + axis.index
    sent = dispatcher.dispatch(torch.ones(3, 1), ids_TK, weights_TK)
    y_TD = dispatcher.combine(sent.rows_RD, sent.handle)
    counters = dispatcher.counters()
    assert dispatcher.grow() is None
    dispatcher.close()
    return [int(counters["rows_dropped"]), int(counters["rows_needed_max"])], y_TD.flatten().tolist()


def _grown(axis: Axis) -> list[str | None]:
    """Rank 0 alone has a long batch; every rank says the same, and after that the rows are right."""
    dispatcher = _rowwise(axis, capacity_factor=1.0)
    exchange = make_dispatcher("all_to_all", num_experts=8, axis=axis)
    said, batch = [], None
    for num_tokens in (4, 40 if axis.index == 0 else 4, 4):
        batch = _batch(axis, num_tokens, num_tokens)
        _squared(dispatcher, *batch)
        said.append(dispatcher.grow())
    batch = _batch(axis, 40 if axis.index == 0 else 4, 0)
    if not torch.equal(_squared(dispatcher, *batch), _squared(exchange, *batch)):
        said.append("wrong")
    dispatcher.close()
    return said


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, order):
        ctx.name, ctx.order = name, order
        order.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.order.append(ctx.name)
        return grad.clone(), None, None


def _order(axis: Axis) -> list[str]:
    """What is issued between start and finish falls between the mirrored exchange in the backward pass too."""
    dispatcher = _rowwise(axis, capacity_factor=4.0)
    x_TD, *routing = _batch(axis, 5, 1)
    _squared(dispatcher, x_TD, *routing)
    order: list[str] = []
    peers = dispatcher._exchange.peers
    signal, wait = peers.signal, peers.wait
    peers.signal = lambda phase: (order.append(f"signal {phase}"), signal(phase))[1]
    peers.wait = lambda phase: (order.append(f"wait {phase}"), wait(phase))[1]
    x_TD.requires_grad_()
    pending = dispatcher.dispatch_start(x_TD, *routing)
    shared_TD = _Mark.apply(x_TD, "shared", order)
    sent = dispatcher.dispatch_finish(pending)
    rows_RD = _Mark.apply(sent.rows_RD, "experts", order)
    returning = dispatcher.combine_start(rows_RD, sent.handle)
    y_TD = dispatcher.combine_finish(returning) + shared_TD
    y_TD.sum().backward()
    dispatcher.close()
    return order


def _errors(axis: Axis) -> list[str]:
    """What must be the same on all ranks and is not is named on all of them, before anybody waits for a peer."""
    found = []
    for changes in (dict(width=axis.index + 2), dict(top_k=2 - axis.index % 2), dict(factor=1.0 + axis.index)):
        dispatcher = _rowwise(axis, capacity_factor=changes.get("factor", 2.0))
        x_TD, top_k = torch.ones(3, changes.get("width", 2)), changes.get("top_k", 1)
        try:
            dispatcher.dispatch(x_TD, torch.zeros(3, top_k, dtype=torch.int64), torch.ones(3, top_k))
        except ValueError as error:
            found.append(str(error))
        dispatcher.close()
    return found


def _other_width(axis: Axis) -> str:
    """Rank 1 alone comes with another width after the first dispatch."""
    dispatcher = _rowwise(replace(axis, timeout_s=4.0))
    ids_TK = torch.zeros(3, 1, dtype=torch.int64)
    dispatcher.dispatch(torch.ones(3, 2), ids_TK, torch.ones(3, 1))
    try:
        dispatcher.dispatch(torch.ones(3, 2 + axis.index), ids_TK, torch.ones(3, 1))
    except CollectiveError as error:
        return str(error)
    finally:
        dispatcher.close()
    return "nothing"


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return run_ranks(_checks, 2, timeout_s=100)


def test_every_option_conforms_and_recompute_and_two_dispatchers_work(found: list[Found]) -> None:
    for rank, one in enumerate(found):
        assert one.problems == [], f"rank {rank}"


def test_rows_are_dropped_by_weight_whoever_sent_them(found: list[Found]) -> None:
    # 12 pairs for 6 places on rank 1: all of rank 1, whose weights are above 1, and none of rank 0.
    assert [one.dropped for one in found] == [[6, 12], [0, 12]]
    assert [one.drop_result for one in found] == [[0, 0, 0], [2, 2, 2]]


def test_growth_is_said_alike_on_all_ranks(found: list[Found]) -> None:
    first, second = (one.grown for one in found)
    assert first == second
    assert len(first) == 3
    assert first[2] is None
    assert [text for text in first if text is not None][-1].startswith("row-wise buffers of ")


def test_shared_work_falls_between_the_exchanges_in_both_passes(found: list[Found]) -> None:
    forward = ["signal counts", "wait counts", "signal rows", "shared", "wait rows", "experts"]
    forward += ["signal outputs", "wait outputs"]
    backward = ["signal rows", "wait rows", "experts", "signal outputs", "shared", "wait outputs"]
    for one in found:
        assert one.order == forward + backward


def test_what_differs_between_ranks_is_named_on_all(found: list[Found]) -> None:
    for one in found:
        width, top_k, options = one.errors
        assert width == "the width of the tokens must be the same on all ranks of the 'expert' axis: rank 0 2, rank 1 3"
        assert top_k == "the top_k must be the same on all ranks of the 'expert' axis: rank 0 2, rank 1 1"
        assert options.startswith("the options must be the same on all ranks")
        assert "capacity_factor=2.0" in options


def test_a_width_that_differs_later_is_said_to_be_a_difference(found: list[Found]) -> None:
    # Rank 0 sees at once that rank 1 allocates; rank 1 then sees that rank 0 has closed.
    assert "is at another place (it signalled 'allocate', for which this rank did not wait)" in found[0].other_width
    assert "with tokens of one width and dtype" in found[0].other_width
    assert "has closed its peer memory" in found[1].other_width


@needs_triton
def test_the_triton_kernels_conform_in_two_processes() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_rowwise_dispatcher.py"))
