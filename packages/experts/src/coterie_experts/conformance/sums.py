"""Checks of where weight gradients are added: ``main_grad``, and ``grad`` or ``main_grad`` when they are deferred."""

from collections.abc import Callable

import torch

from coterie_experts.conformance.runs import PER_ROW, Tensors, Trial, differences, largest, leaves_of, loss_of

__all__ = ["deferral_problems", "main_grad_problems", "new_main_grads", "sum_problems", "wrong_sums"]

_START = 0.5


def new_main_grads(values: Tensors) -> Tensors:
    """Return an accumulator for each parameter, which holds a number already."""
    return {
        name: torch.full(
            value.shape, _START, dtype=torch.promote_types(value.dtype, torch.float32), device=value.device
        )
        for name, value in values.items()
        if name not in PER_ROW
    }


def wrong_sums(main_grads: Tensors, first: Tensors, *, num_added: int = 1) -> list[str]:
    """Return a sentence for each accumulator that does not hold its gradient ``num_added`` times."""
    found = []
    for name, main_grad in main_grads.items():
        gradient = num_added * first[name].to(main_grad.dtype)
        # Each sum, and taking the start off, costs half a unit; what it is compared with was rounded to the dtype.
        size = largest(gradient)
        unit = torch.finfo(main_grad.dtype).eps
        allowed = unit * (num_added + 1) / 2 * (_START + size) + torch.finfo(first[name].dtype).eps * size
        error = largest(main_grad - _START - gradient)
        if not error <= allowed:
            found.append(f"the sum of {name} is off by {error:.3g}, where {allowed:.3g} is rounding")
    return found


def main_grad_problems(trial: Trial) -> list[str]:
    """The gradient of a parameter with a ``main_grad`` is added there, and not to ``grad``."""
    return [f"main_grad: {problem}" for problem in _added(trial, new_main_grads(trial.values), num_passes=1)]


def deferral_problems(trial: Trial) -> list[str]:
    """Weight gradients come when they are asked for, once, with the bits that they have otherwise."""
    kept: list[Callable[[], None]] = []
    leaves = leaves_of(trial.values)
    y = trial.ours(kept.append)(leaves)
    loss_of(y, trial.values).backward()  # type: ignore[no-untyped-call]
    found = [
        f"{name} came with the backward pass"
        for name, leaf in leaves.items()
        if name not in PER_ROW and leaf.grad is not None
    ]
    if len(kept) != 1:
        return [f"deferred: {len(kept)} functions were handed over, not 1"]
    kept[0]()
    after = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    found += differences({**after, "y": y.detach()}, trial.first)
    try:
        kept[0]()
        found.append("the function can be called twice")
    except RuntimeError:
        pass
    return [f"deferred: {problem}" for problem in found]


def sum_problems(trial: Trial) -> list[str]:
    """Two micro-batches add up, deferred or not; what a backward pass was not asked for is not deferred."""
    at_once, deferred = new_main_grads(trial.values), new_main_grads(trial.values)
    found = [f"two passes into main_grad: {problem}" for problem in _added(trial, at_once, num_passes=2)]
    _defer_two(trial, deferred)
    found += [f"two deferred passes into main_grad: {problem}" for problem in differences(deferred, at_once)]
    # Twice a number is exact.
    twice = {name: 2 * one for name, one in trial.first.items() if name != "y"}
    found += [f"two deferred passes: {problem}" for problem in differences(_defer_two(trial, None), twice)]
    return found + [f"deferred for some inputs: {problem}" for problem in _deferred_for_some(trial)]


def _added(trial: Trial, main_grads: Tensors, *, num_passes: int) -> list[str]:
    leaves = leaves_of(trial.values, main_grads=main_grads)
    for _ in range(num_passes):
        loss_of(trial.ours(None)(leaves), trial.values).backward()  # type: ignore[no-untyped-call]
    found = [f"the gradient of {name} went to grad" for name in main_grads if leaves[name].grad is not None]
    return found + wrong_sums(main_grads, trial.first, num_added=num_passes)


def _defer_two(trial: Trial, main_grads: Tensors | None) -> Tensors:
    """Return the gradients after two passes and then the weights of both."""
    kept: list[Callable[[], None]] = []
    leaves = leaves_of(trial.values, main_grads=main_grads)
    for _ in range(2):
        loss_of(trial.ours(kept.append)(leaves), trial.values).backward()  # type: ignore[no-untyped-call]
    for add in kept:
        add()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _deferred_for_some(trial: Trial) -> list[str]:
    found = []
    kept: list[Callable[[], None]] = []
    leaves = leaves_of(trial.values)
    loss = loss_of(trial.ours(kept.append)(leaves), trial.values)
    for name in (name for name in leaves if name in PER_ROW):
        torch.autograd.grad(loss, leaves[name], retain_graph=True)
        if kept:
            found.append(f"a pass for {name} alone hands {len(kept)} functions over")
            kept.clear()
    loss.backward(inputs=[leaves["down"]])  # type: ignore[no-untyped-call]
    for add in kept:
        add()
    got = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    found += [f"a pass for down alone adds to {name}" for name in got if name != "down"]
    return found + differences(got, {"down": trial.first["down"]})
