"""Accumulation of a weight gradient in float32, outside of ``Parameter.grad``."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["into_main_grad"]


def into_main_grad(parameter: Tensor) -> Tensor:
    """Return the parameter such that its gradient is added to ``parameter.main_grad`` if it has one.

    Then ``parameter.grad`` stays None. Without a ``main_grad`` the parameter itself comes back.

    Raises:
        ValueError: ``main_grad`` is not float32 (or wider) of the parameter's shape.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return parameter
    if main_grad.shape != parameter.shape or main_grad.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"main_grad must be float32 of shape {tuple(parameter.shape)}, "
            f"but is {main_grad.dtype} of shape {tuple(main_grad.shape)}"
        )
    same: Tensor = _IntoMainGrad.apply(parameter, main_grad)
    return same


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grad)
        return None, None
