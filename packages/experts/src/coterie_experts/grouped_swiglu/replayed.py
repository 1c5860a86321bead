"""Deferred weight gradients of back-ends that autograd differentiates: the forward pass is run again for them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie_experts.deferred import Deferral, Gradients
from coterie_experts.once import needed_inputs, refuse_second_derivative

__all__ = ["with_deferred_weights"]

Run = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor | None]], Tensor]
"""From rows, row weights, offsets, and up, down, up_bias and down_bias to rows."""


def with_deferred_weights(
    run: Run, rows_RD: Tensor, row_weights_R: Tensor, offsets_e: Tensor, deferral: Deferral
) -> Tensor:
    """Return ``run(...)`` for the parameters of the deferral, differentiable in rows and row weights alone.

    A backward pass hands over a function that runs ``run`` again, on what is kept: rows, row weights, offsets, and the
    gradient of the output.
    """
    constants = [None if one is None else one.detach() for one in deferral.parameters]
    y_RD = run(rows_RD, row_weights_R, offsets_e, constants)
    same_RD: Tensor = _HandOver.apply(
        y_RD, *deferral.parameters, rows_RD.detach(), row_weights_R.detach(), offsets_e, run, deferral
    )
    return same_RD


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_RD: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        rows_RD: Tensor,
        weights_R: Tensor,
        offsets_e: Tensor,
        run: Run,
        deferral: Deferral,
    ) -> Tensor:
        ctx.save_for_backward(up, down, up_bias, down_bias, rows_RD, weights_R, offsets_e)
        ctx.run, ctx.deferral = run, deferral
        # Not a view of it, which could not be changed in place.
        return y_RD.detach()

    @staticmethod
    def backward(ctx: Any, grad_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        # Once: a checkpoint hands each saved tensor out a single time.
        saved = ctx.saved_tensors
        refuse_second_derivative(grad_y_RD, *saved)
        parameters, inputs = saved[:4], saved[4:]
        needs = needed_inputs(ctx)[1:5]
        compute = partial(_gradients, ctx.run, needs, parameters, inputs, grad_y_RD)
        ctx.deferral.hand_over(compute, [one for one in (*saved, grad_y_RD) if one is not None], needs)
        return (grad_y_RD, *[None] * 9)


def _gradients(
    run: Run,
    needs: Sequence[bool],
    parameters: Sequence[Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    grad_y_RD: Tensor,
) -> Gradients:
    leaves = [
        None if one is None else one.detach().requires_grad_(needed)
        for one, needed in zip(parameters, needs, strict=True)
    ]
    with torch.enable_grad():
        y_RD = run(*inputs, leaves)
    wanted = [one for one in leaves if one is not None and one.requires_grad]
    found = iter(torch.autograd.grad(y_RD, wanted, grad_y_RD))
    return [next(found) if one is not None and one.requires_grad else None for one in leaves]
