"""Run a dispatcher on the cases and compare every output and every gradient with the reference, as it declares."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import all_gather_objects
from coterie_parallel.conformance.cases import CASES, Case, Tokens, make_tokens
from coterie_parallel.conformance.comparing import (
    difference,
    largest_value,
    row_places,
    rows_difference,
    sums_difference,
)
from coterie_parallel.conformance.fitting import fit_case
from coterie_parallel.conformance.reference import Layout, reference_layout, reference_rows
from coterie_parallel.dispatch import (
    Dispatched,
    Dispatcher,
    DispatchOptions,
    Guarantees,
    dispatcher_class,
    guarantees_of,
)

__all__ = ["case_problems", "conformance_problems", "guarded_case_problems"]

NUM_LAYERS = 2
# An overflow in a later layer may show only once the earlier ones have room.
NUM_ATTEMPTS = 2 * NUM_LAYERS + 1
# Beginnings of problems that are of all layers and ranks.
_WHOLE = ("still without", "the options leave")


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One dispatch and combine with what the reference says about it; ``places`` has the row of each of its rows."""

    batch: list[Tokens]
    layout: Layout
    places: Tensor
    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    dispatched: Dispatched
    sent: tuple[Tensor, Tensor, Tensor]
    rows_RD: Tensor
    y_TD: Tensor


def conformance_problems(
    dispatcher: str | type[Dispatcher],
    axis: Axis,
    device: torch.device | str = "cpu",
    cases: Iterable[Case] = CASES,
    options: DispatchOptions | None = None,
) -> list[str]:
    """Return a sentence for every way in which ``dispatcher`` breaks the contract on this rank.

    What it declares in `Dispatcher.guarantees` to be weaker is checked to what it declares.

    Args:
        dispatcher: a registered name or a class.
        axis: all its ranks must call together.
        device: where the tokens are.
        cases: the batches to run.
        options: handed to the dispatcher; None for the default ones. Nothing may be dropped with them.
    """
    chosen = dispatcher_class(dispatcher) if isinstance(dispatcher, str) else dispatcher
    problems: list[str] = []
    for case in cases:
        found, goes_on = guarded_case_problems(chosen, case, axis, device, options)
        problems += found
        if not goes_on:
            break
    return problems


def guarded_case_problems(
    dispatcher: type[Dispatcher],
    case: Case,
    axis: Axis,
    device: torch.device | str = "cpu",
    options: DispatchOptions | None = None,
) -> tuple[list[str], bool]:
    """Return the problems of `case_problems`, an error among them, and whether the ranks can go on to the next case."""
    rank = axis.ranks[axis.index]
    try:
        problems = case_problems(dispatcher, case, axis, device, options)
    except Exception as error:
        problems = [f"{case.name}, rank {rank}: raises {type(error).__name__}: {error}"]
    if axis.size == 1:
        return problems, True
    try:
        # Where a rank left an exchange, its peers are still in it and this does not match.
        names = all_gather_objects(case.name, axis)
    except Exception as error:
        names = [str(error)]
    if names == [case.name] * axis.size:
        return problems, True
    return [*problems, f"{case.name}, rank {rank}: the ranks do not meet any more, so no further case is run"], False


def case_problems(
    dispatcher: type[Dispatcher],
    case: Case,
    axis: Axis,
    device: torch.device | str = "cpu",
    options: DispatchOptions | None = None,
) -> list[str]:
    """Return a sentence for every way in which ``dispatcher`` breaks the contract on one case.

    Two layers run forward, then backward in reverse order, as in a model, so that buffers a back-end uses again show;
    the second one in two parts. Two more have experts that save their rows. After an overflow all is run again, as in
    training. Nothing is compared before all communication is over: a fault on one rank does not leave others waiting.

    With ``kind = "reuse"`` one instance does that for several batches, each also without gradients, recomputed, and
    with experts that write to the memory which the dispatcher lends. With ``kind = "refusals"`` the instance is given
    wrong arguments first.

    Tokens have another width and dtype than the case where the back-end refuses those of the case.
    """
    try:
        guarantees = guarantees_of(dispatcher, DispatchOptions() if options is None else options)
    except ValueError as error:
        return [f"{case.name}: what it guarantees: {error}"]
    unsound = guarantees.problems()
    if unsound:
        return [f"{case.name}: what it guarantees: {problem}" for problem in unsound]
    num_experts = case.experts_per_rank * axis.size
    reason = dispatcher.supports(num_experts=num_experts, expert_degree=axis.size, alignment=case.alignment)
    if reason is not None:
        return [f"{case.name}: not supported: {reason}"]
    batches = []
    for one in _batches(case, options, guarantees):
        fit = fit_case(dispatcher, one, device, options)
        if fit is None:
            return [f"{case.name}: not supported: no tokens on {device} with {one.top_k} choices can be sent"]
        batches.append(fit.case)
    given = {} if options is None else {"options": options}

    def make() -> Dispatcher:
        return dispatcher(num_experts=num_experts, axis=axis, alignment=case.alignment, **given)

    instance = make()
    problems = []
    try:
        # Says that an overflow is asked for.
        instance.grow()
        if case.kind == "refusals":
            other = make()
            try:
                problems += _refusal_problems(instance, other, batches[0], axis, device, guarantees)
            finally:
                other.close()
        for one in batches:
            problems += _batch_problems(instance, one, axis, device, guarantees, more=case.kind == "reuse")
        dropped = instance.counters().get("rows_dropped", torch.zeros(())).item()
    finally:
        instance.close()
    if dropped:
        problems = [f"the options leave no room for all rows, {dropped} were dropped"]
    return [f"{case.name}{':' if problem.startswith(_WHOLE) else ','} {problem}" for problem in problems]


def _batches(case: Case, options: DispatchOptions | None, guarantees: Guarantees) -> list[Case]:
    """Return the batches of a case, whose numbers come from their names."""
    if case.kind != "reuse":
        return [case]
    longest = replace(case, name="long", num_tokens=(33, 8, 0, 20))
    nobody = replace(case, name="nobody", num_tokens=(0,))
    if guarantees.sizes == "first":
        return [longest, replace(case, name="short", num_tokens=(0, 7)), nobody, replace(longest, name="long again")]
    others = [replace(case, name="wide", width=12), replace(case, name="half", dtype=torch.bfloat16)]
    if options is not None and options.overflow == "drop":
        # K must stay, and the first batch decides for how many rows there is room.
        return [longest, *others]
    fewer = replace(case, name="fewer choices", top_k=1, num_tokens=(0, 7))
    return [fewer, longest, *others, nobody, replace(longest, top_k=2)]


def _batch_problems(
    instance: Dispatcher, case: Case, axis: Axis, device: Any, guarantees: Guarantees, *, more: bool
) -> list[str]:
    for _ in range(NUM_ATTEMPTS):
        layers = [_forward(instance, case, axis, number, device, guarantees) for number in range(NUM_LAYERS)]
        gradients = [_backward(layer, axis) for layer in reversed(layers)][::-1]
        others = _square_experts(instance, case, axis, device, guarantees)
        if more:
            others += _square_experts(instance, case, axis, device, guarantees, in_place=True)
            if guarantees.row_order == "contract":
                for in_place in (False, True):
                    ways = {"recomputes": True, "in_place": in_place}
                    others += _square_experts(instance, case, axis, device, guarantees, **ways)
            others += _without_gradients(instance, case, axis, device, guarantees)
        instance.check()
        grown = instance.grow()
        if grown is None:
            break
    else:
        return [f"still without room for all rows after {NUM_ATTEMPTS} attempts: {grown}"]
    rank, where = axis.ranks[axis.index], f"batch {case.name!r}, " if more else ""
    problems = [
        f"layer {number}, rank {rank}: {problem}"
        for number, (layer, gradient) in enumerate(zip(layers, gradients, strict=True))
        for problem in _layer_problems(layer, gradient, axis, guarantees)
    ]
    return [where + problem for problem in problems + [f"rank {rank}: {problem}" for problem in others]]


def _refusal_problems(
    instance: Dispatcher, other: Dispatcher, case: Case, axis: Axis, device: Any, guarantees: Guarantees
) -> list[str]:
    """Return what is not refused; every rank gives the same wrong arguments, so none waits for another."""
    # As many tokens as the case has, for which this batch makes room. Spread evenly, so that the least room does.
    num_tokens = max(case.num_tokens)
    ids_N = torch.arange(2 * num_tokens, device=device) * instance.num_experts // (2 * num_tokens)
    ids_TK = ids_N.view(2, num_tokens).t().contiguous()
    weights_TK = torch.ones(num_tokens, 2, device=device)
    x_TD = torch.ones(num_tokens, case.width, dtype=case.dtype, device=device, requires_grad=True)
    good = (x_TD, ids_TK, weights_TK)
    sent = instance.dispatch(*good)
    foreign = other.dispatch(*good)
    rows_RD = sent.rows_RD
    wrong: dict[str, Callable[[], object]] = {
        "tokens that are no matrix": lambda: instance.dispatch(x_TD[0], ids_TK, weights_TK),
        "integer tokens": lambda: instance.dispatch(x_TD.long(), ids_TK, weights_TK),
        "ids in int32": lambda: instance.dispatch(x_TD, ids_TK.int(), weights_TK),
        "ids of fewer tokens": lambda: instance.dispatch(x_TD, ids_TK[:3], weights_TK[:3]),
        "weights in float64": lambda: instance.dispatch(x_TD, ids_TK, weights_TK.double()),
        "weights of fewer choices": lambda: instance.dispatch(x_TD, ids_TK, weights_TK[:, :1]),
        "rows cut off from the graph": lambda: instance.combine(rows_RD.detach().clone(), sent.handle),
        "one row too many": lambda: instance.combine(
            torch.cat([rows_RD, rows_RD.new_zeros(1, case.width)]), sent.handle
        ),
        "the handle of another dispatcher": lambda: instance.combine(foreign.rows_RD, foreign.handle),
    }
    problems = [problem for what, call in wrong.items() for problem in _refusal(what, call)]
    # Refused calls do no harm: the first dispatch can still be combined.
    y_TD = instance.combine(rows_RD, sent.handle)
    (grad_x_TD,) = torch.autograd.grad(y_TD.sum(), x_TD)
    instance.grow()
    ones_TKD = torch.ones(num_tokens, 2, case.width, dtype=case.dtype)
    name = "after refused calls: gradient of the tokens"
    problems += sums_difference(name, grad_x_TD, ones_TKD, ids_TK.cpu(), guarantees)
    other.combine(foreign.rows_RD, foreign.handle)
    other.grow()

    def outside() -> None:
        # Where the host reads no ids, `grow` tells.
        other.dispatch(x_TD, ids_TK + instance.num_experts, weights_TK)
        other.grow()

    problems += _refusal("an id that is no expert, in the dispatch or else in grow", outside)
    return [f"rank {axis.ranks[axis.index]}: {problem}" for problem in problems]


def _refusal(what: str, call: Callable[[], object]) -> list[str]:
    """Return what is wrong with how ``call`` is refused, which has ``what`` as an argument."""
    try:
        call()
    except ValueError:
        return []
    except Exception as error:
        return [f"{what}: raises {type(error).__name__} instead of ValueError: {error}"]
    return [f"{what}: not refused with a ValueError"]


def _forward(instance: Dispatcher, case: Case, axis: Axis, number: int, device: Any, guarantees: Guarantees) -> _Layer:
    batch = [make_tokens(case, degree=axis.size, source=source, layer=number) for source in range(axis.size)]
    layout = reference_layout(
        [tokens.ids_TK.tolist() for tokens in batch],
        num_experts=instance.num_experts,
        degree=axis.size,
        index=axis.index,
        alignment=case.alignment,
    )
    own = batch[axis.index]
    # Copies: a back-end that changes what it is given must not change what it is compared with.
    x_TD = own.x_TD.to(device, copy=True).requires_grad_()
    weights_TK = own.weights_TK.to(device, copy=True).requires_grad_()
    ids_TK = own.ids_TK.to(device, copy=True)
    arguments = (x_TD, ids_TK, weights_TK)
    in_parts = number % 2 == 1
    if in_parts:
        dispatched = instance.dispatch_finish(instance.dispatch_start(*arguments))
    else:
        dispatched = instance.dispatch(*arguments)
    # Copied at once: a back-end may use its buffers again for the next layer.
    sent = (
        dispatched.rows_RD.detach().clone(),
        dispatched.row_weights_R.detach().clone(),
        dispatched.offsets_e.clone(),
    )
    places = row_places(layout, [tokens.weights_TK for tokens in batch], sent[1].cpu(), guarantees)
    pair_rows = [tokens.pair_rows_TKD for tokens in batch]
    rows_RD = _fill(dispatched.rows_RD, layout, places, pair_rows).requires_grad_()
    if in_parts:
        y_TD = instance.combine_finish(instance.combine_start(rows_RD, dispatched.handle))
    else:
        y_TD = instance.combine(rows_RD, dispatched.handle)
    return _Layer(
        batch=batch,
        layout=layout,
        places=places,
        x_TD=x_TD,
        weights_TK=weights_TK,
        ids_TK=ids_TK,
        dispatched=dispatched,
        sent=sent,
        rows_RD=rows_RD,
        y_TD=y_TD,
    )


def _backward(layer: _Layer, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    grad_y_TD = layer.batch[axis.index].grad_y_TD.to(layer.y_TD.device)
    # Products, because torch imports sympy (seconds in every process) to check explicit output gradients.
    (grad_rows_RD,) = torch.autograd.grad((layer.y_TD * grad_y_TD).sum(), layer.rows_RD)
    # It may lie in a buffer that the next exchange uses again.
    grad_rows_RD = grad_rows_RD.clone()
    rows_RD, row_weights_R = layer.dispatched.rows_RD, layer.dispatched.row_weights_R
    where = layer.layout, layer.places
    given_RD = _fill(rows_RD, *where, [tokens.pair_rows_TKD for tokens in layer.batch])
    given_R = _fill(row_weights_R, *where, [tokens.pair_weights_TK for tokens in layer.batch])
    loss = (rows_RD * given_RD).sum() + (row_weights_R * given_R).sum()
    grad_x_TD, grad_weights_TK = torch.autograd.grad(loss, (layer.x_TD, layer.weights_TK))
    return grad_rows_RD, grad_x_TD, grad_weights_TK


class _SquareInPlace(Function):
    """Squares rows, and writes them and their gradient to the memory that the dispatcher lends, where it does."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, instance: Dispatcher, handle: Any) -> Tensor:
        ctx.save_for_backward(rows_RD)
        ctx.ask = partial(instance.memory_for_gradients, handle)
        return _written(rows_RD * rows_RD, instance.memory_for_combine(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows_RD,) = ctx.saved_tensors
        return _written(grads[0] * rows_RD * 2, ctx.ask()), None, None


def _written(rows_RD: Tensor, memory_RD: Tensor | None) -> Tensor:
    return rows_RD if memory_RD is None else memory_RD.copy_(rows_RD)


def _square_experts(
    instance: Dispatcher,
    case: Case,
    axis: Axis,
    device: Any,
    guarantees: Guarantees,
    *,
    recomputes: bool = False,
    in_place: bool = False,
) -> list[str]:
    """Run two layers whose experts square their rows, and return what is wrong with the gradients of the tokens."""

    def layer(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        dispatched = instance.dispatch(x_TD, ids_TK, weights_TK)
        with instance.saved_rows(dispatched.handle):
            if in_place:
                rows_RD = _SquareInPlace.apply(dispatched.rows_RD, instance, dispatched.handle)
            else:
                rows_RD = dispatched.rows_RD * dispatched.rows_RD
        return instance.combine(rows_RD, dispatched.handle)

    passed = []
    for number in range(NUM_LAYERS):
        own = make_tokens(case, degree=axis.size, source=axis.index, layer=number)
        x_TD = own.x_TD.to(device).requires_grad_()
        given = (x_TD, own.ids_TK.to(device), own.weights_TK.to(device))
        # torch gives checkpoint no types.
        run: Callable[..., Tensor] = partial(checkpoint, layer, use_reentrant=False) if recomputes else layer
        y_TD = run(*given)
        passed.append((own, x_TD, y_TD))
    loss = torch.stack([(y_TD * own.grad_y_TD.to(device)).sum() for own, _, y_TD in passed]).sum()
    try:
        found = torch.autograd.grad(loss, [x_TD for _, x_TD, _ in passed])
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return [f"rows that the experts saved for the backward pass were written over: {error}"]
    problems = []
    for number, ((own, _, _), grad_x_TD) in enumerate(zip(passed, found, strict=True)):
        x_TKD = own.x_TD.unsqueeze(1).repeat(1, own.ids_TK.shape[1], 1).requires_grad_()
        upstream_TKD = own.grad_y_TD.unsqueeze(1).expand_as(x_TKD)
        (expected_TKD,) = torch.autograd.grad(((x_TKD * x_TKD) * upstream_TKD).sum(), x_TKD)
        name = f"layer {number}: gradient of the tokens through {'recomputed' if recomputes else 'saved'} rows"
        name += ", outputs written in place" if in_place else ""
        error_TKD = None
        if guarantees.row_error:
            off_TK1 = 2 * guarantees.row_error * largest_value(own.x_TD).unsqueeze(1)
            # Each of two products is rounded to the dtype of the rows, and so is that of the rows as they came.
            twice = 4 * torch.finfo(case.dtype).eps
            error_TKD = (off_TK1 * upstream_TKD.double().abs()) * (1 + twice) + expected_TKD.double().abs() * twice
        problems += sums_difference(name, grad_x_TD, expected_TKD, own.ids_TK, guarantees, error_TKD)
    return problems


def _without_gradients(instance: Dispatcher, case: Case, axis: Axis, device: Any, guarantees: Guarantees) -> list[str]:
    """Run one layer without gradients, whose experts give their rows column by column in memory."""
    own = make_tokens(case, degree=axis.size, source=axis.index)
    weights_TK = own.weights_TK.to(device).requires_grad_()
    with torch.no_grad():
        dispatched = instance.dispatch(own.x_TD.to(device), own.ids_TK.to(device), weights_TK)
        rows_RD = dispatched.rows_RD.t().contiguous().t()
        y_TD = instance.combine(rows_RD, dispatched.handle)
    x_TKD = own.x_TD.unsqueeze(1).expand(-1, own.ids_TK.shape[1], -1)
    error_TKD = None
    if guarantees.row_error:
        error_TKD = (guarantees.row_error * largest_value(own.x_TD)).unsqueeze(1).expand(x_TKD.shape)
    return sums_difference("y_TD without gradients", y_TD, x_TKD, own.ids_TK, guarantees, error_TKD)


def _fill(like_R: Tensor, layout: Layout, places: Tensor, values: list[Tensor]) -> Tensor:
    # Padding and rows past the end hold NaN: a back-end that reads them shows it.
    filled = torch.full_like(like_R, torch.nan, requires_grad=False)
    rows = reference_rows(layout, values, padding=torch.nan)[: len(places)]
    filled[places.to(filled.device)] = rows.to(filled)
    return filled


def _layer_problems(
    layer: _Layer, gradients: tuple[Tensor, Tensor, Tensor], axis: Axis, guarantees: Guarantees
) -> list[str]:
    own, layout = layer.batch[axis.index], layer.layout
    rows_RD, row_weights_R, offsets_e = layer.sent
    grad_rows_RD, grad_x_TD, grad_weights_TK = gradients
    choices = own.ids_TK.shape[1]

    def by_pair(name: str) -> list[Tensor]:
        return [getattr(tokens, name).unsqueeze(1).expand(-1, choices, -1) for tokens in layer.batch]

    def in_order(rows_R: Tensor) -> Tensor:
        return rows_R.detach().cpu()[layer.places]

    routed_TK = own.ids_TK >= 0
    exact = {
        "x_TD after the dispatch": (layer.x_TD, own.x_TD),
        "ids_TK after the dispatch": (layer.ids_TK, own.ids_TK),
        "weights_TK after the dispatch": (layer.weights_TK, own.weights_TK),
        "offsets_e": (offsets_e, torch.tensor(layout.offsets_e, dtype=torch.int32)),
        "row_weights_R": (
            in_order(row_weights_R),
            reference_rows(layout, [tokens.weights_TK for tokens in layer.batch]),
        ),
        "gradient of the rows": (in_order(grad_rows_RD), reference_rows(layout, by_pair("grad_y_TD"))),
        "gradient of the weights": (grad_weights_TK, own.pair_weights_TK.where(routed_TK, torch.zeros(()))),
    }
    found = [problem for name, pair in exact.items() for problem in difference(name, *pair)]
    expected_RD = reference_rows(layout, by_pair("x_TD"))
    found += rows_difference("rows_RD", in_order(rows_RD), expected_RD, guarantees.row_error)
    for name, got_TD in (("y_TD", layer.y_TD), ("gradient of the tokens", grad_x_TD)):
        found += sums_difference(name, got_TD, own.pair_rows_TKD, own.ids_TK, guarantees)
    return found
