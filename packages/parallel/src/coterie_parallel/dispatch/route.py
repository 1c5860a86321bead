"""The autograd functions that dispatch and combine are, over any way to move rows."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from coterie_parallel.once import differentiated_once

__all__ = ["Route", "check_handle", "check_rows", "combine", "dispatch", "takes_backward"]


class Route(Protocol):
    """Moves rows for one fixed assignment of pairs; all ranks of the axis call each method in the same order.

    ``has_backward`` says that `dispatch` takes part in a backward pass, ``num_rows`` is R.
    """

    @property
    def has_backward(self) -> bool: ...  # noqa: D102

    @property
    def num_rows(self) -> int: ...  # noqa: D102

    def send_rows(self, x_TD: Tensor) -> Tensor:
        """Return the rows_RD of this rank's experts, padding rows zero."""

    def send_weights(self, weights_TK: Tensor) -> Tensor:
        """Return the row_weights_R of this rank's experts, padding zero."""

    def return_rows(self, rows_RD: Tensor) -> Tensor:
        """Return y_TD, for each token the sum of its rows; the transpose of `send_rows`."""

    def return_weights(self, row_weights_R: Tensor) -> Tensor:
        """Return a value for each pair, zero where not routed; the transpose of `send_weights`."""


def takes_backward(x_TD: Tensor, weights_TK: Tensor) -> bool:
    """Return whether a dispatch of these tensors takes part in a backward pass."""
    return torch.is_grad_enabled() and (x_TD.requires_grad or weights_TK.requires_grad)


def dispatch(x_TD: Tensor, weights_TK: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """Return rows_RD and row_weights_R; differentiable in both inputs."""
    rows_RD, row_weights_R = _Dispatch.apply(x_TD, weights_TK, route)
    return rows_RD, row_weights_R


def combine(rows_RD: Tensor, route: Route) -> Tensor:
    """Return y_TD; differentiable.

    Raises:
        ValueError: as `check_rows`.
    """
    check_rows(rows_RD, num_rows=route.num_rows, has_backward=route.has_backward)
    y_TD: Tensor = _Combine.apply(rows_RD, route)
    return y_TD


def check_handle(is_own: bool, handle: object) -> None:
    """Raise ValueError unless the handle ``is_own``: of a dispatch of the dispatcher that combines."""
    if not is_own:
        raise ValueError(
            "the handle must be the one that a dispatch of this dispatcher returned, but it is of another: "
            f"{type(handle).__name__}"
        )


def check_rows(rows_RD: Tensor, *, num_rows: int, has_backward: bool) -> None:
    """Raise ValueError for another number of rows than were dispatched, or rows that are cut off from the graph."""
    if rows_RD.ndim != 2 or rows_RD.shape[0] != num_rows:
        raise ValueError(f"rows_RD must be a matrix of {num_rows} rows, got shape {tuple(rows_RD.shape)}")
    # A rank that had no rows and made fresh ones would skip its backward exchange, and all its peers would wait.
    if has_backward and torch.is_grad_enabled() and not rows_RD.requires_grad:
        raise ValueError("rows_RD must depend on the dispatched rows also when there are none, but it has no gradient")


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        ctx.route = route
        return route.send_rows(x_TD), route.send_weights(weights_TK)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # Both always travel, whatever this rank needs: peers may need them, and an exchange takes all ranks.
        return ctx.route.return_rows(grads[0]), ctx.route.return_weights(grads[1]), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, route: Route) -> Tensor:
        ctx.route = route  # type: ignore[attr-defined]
        return route.return_rows(rows_RD)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.route.send_rows(grads[0]), None
