"""Checks of the ways in which a caller differentiates: layouts, frozen inputs, for some, again, twice; and adds up."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from coterie_experts.conformance.runs import (
    PER_ROW,
    Function,
    Tensors,
    Trial,
    beyond_rounding,
    differences,
    leaf_names,
    leaves_of,
    loss_of,
    run,
)
from coterie_experts.conformance.sums import new_main_grads, sum_problems, wrong_sums

__all__ = ["use_problems"]


def use_problems(trial: Trial, *, is_differentiable_twice: bool) -> list[str]:
    """Return a sentence for every way of differentiating and adding up that gives something else, or that raises.

    Args:
        trial: without row weights of zero.
        is_differentiable_twice: ``create_graph=True`` may not be refused.
    """
    checks: dict[str, Callable[[Trial], list[str]]] = {
        "other layouts": _layout_problems,
        "no gradients": _problems_without_gradients,
        "frozen inputs": _frozen_problems,
        "some inputs": _problems_of_some_inputs,
        "kept graphs": _problems_of_kept_graphs,
        "second derivatives": partial(_second_derivative_problems, is_differentiable_twice=is_differentiable_twice),
        "sums": sum_problems,
    }
    found = []
    for what, check in checks.items():
        try:
            found += check(trial)
        except Exception as error:
            # Of a back-end that does not expect such a caller: the other checks go on.
            found.append(f"{what}: {type(error).__name__}: {error}")
    return found


def _layout_problems(trial: Trial) -> list[str]:
    """Matrices that lie transposed in memory, and the gradient that ``y.sum()`` gives, a single number."""
    ours, values = trial.ours(None), trial.values
    transposed = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in values.items()}
    found = [f"transposed: {problem}" for problem in trial.beyond_rounding(run(ours, transposed))]
    grad_y = values["grad_y"]
    summed = {**values, "grad_y": grad_y.new_ones(()).expand(grad_y.shape)}
    exact = run(trial.loop, {name: value.double() for name, value in summed.items()})
    return found + [f"y.sum(): {p}" for p in beyond_rounding(run(ours, summed), run(trial.loop, summed), exact)]


def _problems_without_gradients(trial: Trial) -> list[str]:
    ours = trial.ours(None)
    with torch.no_grad():
        outputs = {"no_grad": ours(leaves_of(trial.values))}
    outputs["all frozen"] = ours(leaves_of(trial.values, wanted=()))
    found = [f"{how}: y wants a gradient" for how, y in outputs.items() if y.requires_grad]
    for how, y in outputs.items():
        found += [f"{how}: {problem}" for problem in trial.beyond_rounding({"y": y.detach()}, ["y"])]
    return found


def _frozen_problems(trial: Trial) -> list[str]:
    """Each input frozen, and all others frozen: what wants a gradient has it, and nothing else has one."""
    names = leaf_names(trial.values)
    choices = {f"{name} frozen": [other for other in names if other != name] for name in names}
    choices |= {f"all but {name} frozen": [name] for name in names}
    found = []
    for how, wanted in choices.items():
        got = run(trial.ours(None), trial.values, wanted)
        found += [f"{how}: {name} has a gradient" for name in got if name not in (*wanted, "y")]
        found += [f"{how}: {problem}" for problem in trial.beyond_rounding(got, ["y", *wanted])]
    return found


def _problems_of_some_inputs(trial: Trial) -> list[str]:
    """``autograd.grad`` returns what it is asked for and adds nothing; ``backward(inputs=...)`` adds that alone."""
    main_grads = new_main_grads(trial.values)
    leaves = leaves_of(trial.values, main_grads=main_grads)
    loss = loss_of(trial.ours(None)(leaves), trial.values)
    found = []
    before = _copies(main_grads)
    for name, leaf in leaves.items():
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
        how = f"autograd.grad for {name}"
        got = {} if gradient is None else {name: gradient}
        found += [f"{how}: {problem}" for problem in trial.beyond_rounding(got, [name])]
        found += [f"{how}: the main_grad of {problem}" for problem in differences(main_grads, before)]
        before = _copies(main_grads)
    for name, leaf in leaves.items():
        before = _copies({other: main_grad for other, main_grad in main_grads.items() if other != name})
        loss.backward(inputs=[leaf], retain_graph=True)  # type: ignore[no-untyped-call]
        how = f"backward for {name}"
        found += [f"{how}: the main_grad of {problem}" for problem in differences(main_grads, before)]
    got = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    found += [f"backward for {name}: it went to grad" for name in main_grads if name in got]
    per_row = [name for name in leaves if name in PER_ROW]
    found += [f"backward for some: {problem}" for problem in trial.beyond_rounding(got, per_row)]
    return found + [f"backward for some: {problem}" for problem in wrong_sums(main_grads, trial.first)]


def _copies(tensors: Tensors) -> Tensors:
    return {name: one.clone() for name, one in tensors.items()}


def _problems_of_kept_graphs(trial: Trial) -> list[str]:
    """Each pass through a kept graph gives the bits of the first."""
    leaves = leaves_of(trial.values)
    loss = loss_of(trial.ours(None)(leaves), trial.values)
    expected = {name: trial.first[name] for name in leaves if name in trial.first}
    found = []
    for number in (1, 2):
        gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=number < 2, allow_unused=True)
        got = {name: one for name, one in zip(leaves, gradients, strict=True) if one is not None}
        found += [f"pass {number} through a kept graph: {problem}" for problem in differences(got, expected)]
    return found


def _second_derivative_problems(trial: Trial, *, is_differentiable_twice: bool) -> list[str]:
    """``create_graph=True`` is refused at once, or the second derivatives are right."""
    found = []
    for wanted in leaf_names(trial.values):
        how = f"create_graph=True for {wanted}"
        try:
            first = _Twice(trial.ours(None), trial.values, wanted)
        except RuntimeError as error:
            if "create_graph" not in str(error):
                found.append(f"{how}: {error}")
            elif is_differentiable_twice:
                found.append(f"{how} is refused")
            continue
        try:
            got = first.second()
        except RuntimeError as error:
            found.append(f"{how} is not refused, and fails later: {error}")
            continue
        plain = _Twice(trial.loop, trial.values, wanted).second()
        exact = _Twice(trial.loop, {name: value.double() for name, value in trial.values.items()}, wanted).second()
        found += [f"{how} is not refused, and then: {problem}" for problem in beyond_rounding(got, plain, exact)]
    return found


class _Twice:
    """The gradient of one input, of a loss that is not linear in y, to be differentiated by all inputs."""

    def __init__(self, function: Function, values: Tensors, wanted: str) -> None:
        self._leaves = leaves_of(values)
        self._y = function(self._leaves)
        loss = (self._y.square() * values["grad_y"]).sum()
        (gradient,) = torch.autograd.grad(loss, self._leaves[wanted], create_graph=True)
        # Another path to all inputs, by which a pass may come through without the first.
        others: list[Tensor] = [leaf.square().sum() for leaf in self._leaves.values()]
        self._loss = (gradient * values[wanted]).sum() + torch.stack([one.to(gradient.dtype) for one in others]).sum()

    def second(self) -> Tensors:
        gradients = torch.autograd.grad(self._loss, list(self._leaves.values()), materialize_grads=True)
        return {"y": self._y.detach(), **dict(zip(self._leaves, gradients, strict=True))}
