"""Runs of a function of the experts, and the two ways in which results are compared: up to rounding, and bit by bit."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie_experts.deferred import Defer

__all__ = [
    "PER_ROW",
    "Function",
    "Tensors",
    "Trial",
    "beyond_rounding",
    "differences",
    "largest",
    "leaf_names",
    "leaves_of",
    "loss_of",
    "run",
]

Tensors = dict[str, Tensor]
"""The arguments of one run, or its output ("y") and the gradient of each of its leaves."""

Function = Callable[[Tensors], Tensor]
"""From leaves by name to y."""

PER_ROW = ("rows", "row_weights", "x", "weights", "grad_y")
"""The names of what is not a parameter."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A back-end on the numbers of one case, and what it is held to.

    Attributes:
        ours: the function of the back-end, for a callable that takes deferred gradients or None.
        loop: the ground truth, in any dtype.
        values: the arguments, and the gradient of the output ("grad_y").
        first: what the back-end gave.
        plain: what the loop gave in the same dtype.
        exact: what it gave in float64.
    """

    ours: Callable[[Defer | None], Function]
    loop: Function
    values: Tensors
    first: Tensors
    plain: Tensors
    exact: Tensors

    @classmethod
    def of(cls, ours: Callable[[Defer | None], Function], loop: Function, values: Tensors) -> "Trial":
        """Run both."""
        exact = run(loop, {name: value.double() for name, value in values.items()})
        return cls(
            ours=ours, loop=loop, values=values, first=run(ours(None), values), plain=run(loop, values), exact=exact
        )

    def beyond_rounding(self, got: Tensors, names: Collection[str] | None = None) -> list[str]:
        """Compare what another run gave with the ground truth, all of it or these names."""
        names = self.exact if names is None else names
        return beyond_rounding(got, self.plain, {name: self.exact[name] for name in names})


def run(function: Function, values: Tensors, wanted: Collection[str] | None = None) -> Tensors:
    """Return y and the gradient of each value but grad_y, by its name; of those that are ``wanted``, if given."""
    leaves = leaves_of(values, wanted=wanted)
    y = function(leaves)
    loss_of(y, values).backward()  # type: ignore[no-untyped-call]
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return {"y": y.detach(), **{name: one for name, one in gradients.items() if one is not None}}


def leaf_names(values: Tensors) -> list[str]:
    """Return the names of what may want a gradient."""
    return [name for name in values if name != "grad_y"]


def leaves_of(values: Tensors, *, main_grads: Tensors | None = None, wanted: Collection[str] | None = None) -> Tensors:
    """Return fresh leaves with the memory of the values, which want a gradient if they are ``wanted`` (or all do)."""
    leaves: Tensors = {}
    for name in leaf_names(values):
        leaves[name] = nn.Parameter(values[name].detach(), requires_grad=wanted is None or name in wanted)
        if main_grads is not None and name in main_grads:
            leaves[name].main_grad = main_grads[name]  # type: ignore[attr-defined]
    return leaves


def loss_of(y: Tensor, values: Tensors) -> Tensor:
    """Return a scalar whose gradient by y is ``grad_y``, with the strides of that."""
    # A hook, because torch imports sympy (seconds in every process) to check explicit output gradients.
    y.register_hook(lambda _: values["grad_y"])  # type: ignore[no-untyped-call]
    return y.sum()


def largest(value: Tensor) -> float:
    """Return the largest magnitude, 0 where there is none."""
    return float(value.abs().max()) if value.numel() > 0 else 0.0


def beyond_rounding(got: Tensors, plain: Tensors, exact: Tensors) -> list[str]:
    """Allow twice the largest error of the plain loop in the same dtype, and a few units of the largest value.

    The units are for small cases, where the loop's error may be small by luck, and for other orders of summation.
    """
    is_wide = plain["y"].dtype in (torch.float32, torch.float64)
    unit = torch.finfo(torch.float32 if is_wide else plain["y"].dtype).eps
    found = []
    for name, truth in exact.items():
        if name not in got or got[name].shape != truth.shape or got[name].dtype != plain[name].dtype:
            found.append(
                f"{name} is missing, or has another shape or dtype than {tuple(truth.shape)} {plain[name].dtype}"
            )
            continue
        error, allowed = (largest(one[name].double() - truth) for one in (got, plain))
        # The gradient of a row weight is a sum over H here and over D in the loop.
        units = (16 if name in ("row_weights", "weights") else 4) if is_wide else 1
        allowed = 2 * allowed + units * unit * largest(truth)
        if not error <= allowed:
            found.append(f"{name} is off by {error:.3g}, where {allowed:.3g} is rounding")
    return found


def differences(got: Tensors, expected: Tensors) -> list[str]:
    """Return a sentence for each tensor that is missing or not equal bit by bit."""
    found = []
    for name, one in expected.items():
        if name not in got:
            found.append(f"{name} is missing")
        elif not torch.equal(got[name], one):
            found.append(f"{name} has other bits in {int((~(got[name] == one)).sum())} places")
    return found
