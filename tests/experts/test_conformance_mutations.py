"""A back-end that is broken on purpose, in one way after another: the conformance suite names each of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coterie_experts import deferred, main_grad
from coterie_experts.conformance import CASES, conformance_problems
from coterie_experts.grouped_swiglu import reference, torch_native
from torch import Tensor

FUNCTION = torch_native._GroupedExperts
FORWARD, BACKWARD = FUNCTION.forward, FUNCTION.backward
USES = tuple(case for case in CASES if case.name == "uses")
Break = Callable[[pytest.MonkeyPatch], None]
# What forward takes and backward gives.
ROWS, ROW_WEIGHTS, UP, DOWN = 0, 1, 3, 4


def setting(owner: object, name: str, value: object) -> Break:
    return lambda patch: patch.setattr(owner, name, value)


def forward(broken: Callable[..., Tensor]) -> Break:
    return setting(FUNCTION, "forward", staticmethod(broken))


def backward(broken: Callable[..., object]) -> Break:
    return setting(FUNCTION, "backward", staticmethod(broken))


def argument(number: int, change: Callable[[Tensor], Tensor]) -> Break:
    """Let the forward pass see another argument."""
    return forward(lambda ctx, *given: FORWARD(ctx, *given[:number], change(given[number]), *given[number + 1 :]))


def gradient(number: int, change: Callable[[Tensor], Tensor]) -> Break:
    def broken(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        found = BACKWARD(ctx, grad_y)
        one = found[number]
        return (*found[:number], one if one is None else change(one), *found[number + 1 :])

    return backward(broken)


def doubled_gradients(where: Callable[[Any], bool]) -> Break:
    def broken(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        factor = 2 if where(ctx) else 1
        return tuple(one if one is None else one * factor for one in BACKWARD(ctx, grad_y))

    return backward(broken)


def forward_that_writes(ctx: Any, rows: Tensor, *rest: Any) -> Tensor:
    y: Tensor = FORWARD(ctx, rows, *rest)
    rows.data.mul_(1.0001)
    return y


def backward_that_writes(ctx: Any, grad_y: Tensor) -> object:
    found = BACKWARD(ctx, grad_y)
    grad_y.data.mul_(1.01)
    return found


def backward_that_empties(ctx: Any, grad_y: Tensor) -> object:
    found = BACKWARD(ctx, grad_y)
    ctx.saved_tensors[7].data.zero_()
    return found


def without_weights_of_zero(ctx: Any, grad_y: Tensor) -> object:
    grad_rows, grad_weights, *rest = BACKWARD(ctx, grad_y)
    if grad_weights is not None:
        grad_weights = grad_weights.masked_fill(ctx.saved_tensors[1] == 0, 0)
    return grad_rows, grad_weights, *rest


def other_inference(ctx: Any, *given: Any) -> Tensor:
    y: Tensor = FORWARD(ctx, *given)
    return y if given[UP].requires_grad else 2 * y


def unwritten(value: float) -> Break:
    """Let rows past the end of a grouped product, memory that nobody writes, hold a value instead of what was there."""
    product = F.grouped_mm

    def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left, right, offs=offs)
        if out.dim() == 2:
            out[int(offs[-1]) :] = value
        return out

    return setting(F, "grouped_mm", grouped_mm)


def clear_nan_alone(patch: pytest.MonkeyPatch) -> None:
    def clear_rows(tensor: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            tensor.masked_fill_(mask.view(-1, *[1] * (tensor.dim() - 1)) & ~tensor.isinf(), 0)

    patch.setattr(torch_native, "_clear_rows", clear_rows)
    unwritten(math.inf)(patch)


def overwrite_main_grad(ctx: Any, grad: Tensor) -> tuple[None, None]:
    ctx.main_grad.copy_(grad + 0.5)
    return None, None


def overwrite_deferred(parameter: Tensor, gradient: Tensor) -> None:
    """Right for the first pass, and no other."""
    if deferred.check_main_grad(parameter) is None:
        parameter.grad = gradient.contiguous()
    else:
        parameter.main_grad.copy_(gradient + 0.5)


def never(ctx: Any) -> tuple[bool, ...]:
    return (False,) * len(ctx.needs_input_grad)


# By name: what is broken, and the beginning of a sentence that says so.
BROKEN: dict[str, tuple[Break, str]] = {
    "gradient of the rows": (gradient(ROWS, lambda one: one * (1 + 1e-3)), "uneven: values: rows is off"),
    "gradient of up": (gradient(UP, lambda one: one * (1 + 3e-6)), "uneven: values: up is off"),
    "gradient of the row weights": (
        gradient(ROW_WEIGHTS, lambda one: one * (1 + 3e-5)),
        "uneven: values: row_weights is off",
    ),
    "gradient in float16": (gradient(DOWN, lambda one: one.half().float()), "uneven: values: down is off"),
    "gradient in bfloat16": (gradient(DOWN, lambda one: one.bfloat16().float()), "uneven: values: down is off"),
    "all is deferred when some is asked for": (
        setting(torch_native, "needed_inputs", lambda ctx: tuple(ctx.needs_input_grad)),
        "uses: deferred for some inputs: a pass for rows alone hands 1 functions over",
    ),
    "asked gradients are added": (
        setting(main_grad, "captured_inputs", never),
        "uses: autograd.grad for up: the main_grad of up has other bits",
    ),
    "create_graph is allowed": (
        setting(torch_native, "refuse_create_graph", lambda: None),
        "uses: create_graph=True for rows",
    ),
    "what is kept is overwritten": (
        backward(backward_that_empties),
        "uses: pass 2 through a kept graph: row_weights has other bits",
    ),
    "rows are overwritten": (forward(forward_that_writes), "uneven: repeated: y has other bits"),
    "the gradient of y is overwritten": (backward(backward_that_writes), "uneven: repeated: rows has other bits"),
    "weights without gaps alone": (
        argument(UP, lambda up: up if up.is_contiguous() else 2 * up),
        "uses: transposed: y is off",
    ),
    "expanded gradients": (
        backward(lambda ctx, grad_y: BACKWARD(ctx, grad_y * (2 if 0 in grad_y.stride() else 1))),
        "uses: y.sum(): rows is off",
    ),
    "weights below zero": (argument(ROW_WEIGHTS, torch.abs), "signed: values: y is off"),
    "large rows": (argument(ROWS, lambda rows: rows.clamp(-6, 6)), "large: values: y is off"),
    "a frozen weight": (
        doubled_gradients(lambda ctx: not all(ctx.needs_input_grad[UP : DOWN + 1])),
        "uses: up frozen: rows is off",
    ),
    "rows that want no gradient": (
        doubled_gradients(lambda ctx: not ctx.needs_input_grad[ROWS]),
        "uses: rows frozen: row_weights is off",
    ),
    "no gradients": (forward(other_inference), "uses: all frozen: y is off"),
    "infinities in memory that nobody wrote": (clear_nan_alone, "past_the_end: values: y is off"),
    "a weight of zero": (backward(without_weights_of_zero), "signed: values: row_weights is off"),
    "a second micro-batch": (
        setting(main_grad._IntoMainGrad, "backward", staticmethod(overwrite_main_grad)),
        "uses: two passes into main_grad: the sum of up is off",
    ),
    "a second deferred one": (
        setting(deferred, "add_gradient", overwrite_deferred),
        "uses: two deferred passes: up has other bits",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_suite_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sentence = BROKEN[name]
    broken(monkeypatch)
    found = conformance_problems("torch", repeats=1)
    assert any(one.startswith(sentence) for one in found), "\n".join(found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_memory_that_nobody_wrote_does_not_matter(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten(value)(monkeypatch)
    assert conformance_problems("torch", repeats=1) == []


class Detached(torch.autograd.Function):
    """The identity, whose gradient has no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.detach()


def refusing(grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True is not supported")


def test_the_suite_finds_wrong_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(change: Callable[[Tensor], Tensor]) -> list[str]:
        monkeypatch.setattr(reference, "grouped_experts", lambda *given, **more: change(sound(*given, **more)))
        return conformance_problems("reference", repeats=0, cases=USES, token_cases=())

    def with_hook(y: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(refusing)
        return y

    sound = reference.grouped_experts
    names = ("rows", "row_weights", "up", "down")
    assert found(with_hook) == [f"uses: create_graph=True for {name} is refused" for name in names]
    assert any(
        one.startswith("uses: create_graph=True for up is not refused, and then: ") for one in found(Detached.apply)
    )
