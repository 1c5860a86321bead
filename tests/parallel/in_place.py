"""Experts on any device that write outputs and gradients to memory that they ask for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_gradient_in", "written_to"]

Ask = Callable[[], Tensor | None] | None


def written_to(rows_RD: Tensor, ask: Ask) -> Tensor:
    """Return the rows in the memory that ``ask`` gives, or as they are where it gives none."""
    found: Tensor = _WrittenTo.apply(rows_RD, ask)
    return found


def with_gradient_in(rows_RD: Tensor, ask: Ask) -> Tensor:
    """Return the rows; their gradient is put into the memory that ``ask`` gives in the backward pass."""
    found: Tensor = _WithGradientIn.apply(rows_RD, ask)
    return found


def _moved(rows_RD: Tensor, ask: Ask) -> Tensor:
    memory = None if ask is None else ask()
    if memory is None:
        return rows_RD.view_as(rows_RD)
    assert (memory.shape, memory.dtype) == (rows_RD.shape, rows_RD.dtype)
    # A kernel writes what autograd does not see.
    memory.data.copy_(rows_RD)
    return memory


class _WrittenTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, ask: Ask) -> Tensor:
        return _moved(rows_RD, ask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _WithGradientIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, ask: Ask) -> Tensor:
        ctx.ask = ask
        return rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _moved(grads[0], ctx.ask), None
