"""Accumulation of a weight gradient in float32, outside of ``Parameter.grad``."""

from typing import Any

import torch
from torch import Tensor

from coterie_experts.once import refuse_second_derivative

__all__ = ["into_main_grad", "split_main_grad"]


def into_main_grad(parameter: Tensor) -> Tensor:
    """Return the parameter such that its gradient is added to ``parameter.main_grad`` if it has one.

    Then ``parameter.grad`` stays None. Without a ``main_grad`` the parameter itself comes back.

    Raises:
        ValueError: ``main_grad`` is not float32 (or wider) of the parameter's shape.
    """
    main_grad = _main_grad_of(parameter)
    if main_grad is None:
        return parameter
    same: Tensor = _IntoMainGrad.apply(parameter, main_grad)
    return same


def split_main_grad(parameter: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the parameter and the float32 tensor that a kernel adds its gradient to, or None where there is none.

    What a kernel cannot add to (float64, or not contiguous) is left to ``into_main_grad``.

    Raises:
        ValueError: as ``into_main_grad``.
    """
    main_grad = _main_grad_of(parameter)
    if main_grad is None or (main_grad.dtype == torch.float32 and main_grad.is_contiguous()):
        return parameter, main_grad
    return into_main_grad(parameter), None


def _main_grad_of(parameter: Tensor) -> Tensor | None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return None
    if main_grad.shape != parameter.shape or main_grad.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"main_grad must be float32 of shape {tuple(parameter.shape)}, "
            f"but is {main_grad.dtype} of shape {tuple(main_grad.shape)}"
        )
    return main_grad


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        refuse_second_derivative(grad)
        ctx.main_grad.add_(grad)
        return None, None
