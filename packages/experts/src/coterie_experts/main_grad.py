"""Accumulation of a weight gradient in float32, outside of ``Parameter.grad``."""

from typing import Any

import torch
from torch import Tensor

from coterie_experts.once import captured_inputs, refuse_second_derivative

__all__ = [
    "add_gradient",
    "check_main_grad",
    "into_main_grad",
    "kernel_main_grad",
    "main_grad_problem",
    "split_main_grad",
]


def into_main_grad(parameter: Tensor) -> Tensor:
    """Return the parameter such that its gradient is added to ``parameter.main_grad`` if it has one.

    Then ``parameter.grad`` stays None. Without a ``main_grad`` the parameter itself comes back.

    Raises:
        ValueError: ``main_grad`` has not the shape and the device of the parameter, is not float32, or is expanded.
    """
    main_grad = check_main_grad(parameter)
    if main_grad is None:
        return parameter
    same: Tensor = _IntoMainGrad.apply(parameter, main_grad)
    return same


def split_main_grad(parameter: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the parameter and the float32 tensor that a kernel adds its gradient to, or None where there is none.

    What a kernel cannot add to (see ``kernel_main_grad``) is left to ``into_main_grad``.

    Raises:
        ValueError: as ``into_main_grad``.
    """
    main_grad = kernel_main_grad(parameter)
    return (into_main_grad(parameter), None) if main_grad is None else (parameter, main_grad)


def kernel_main_grad(parameter: Tensor) -> Tensor | None:
    """Return the ``main_grad`` that a kernel can add to, or None: float32, contiguous, at a multiple of 16 bytes.

    Raises:
        ValueError: as ``into_main_grad``.
    """
    main_grad = check_main_grad(parameter)
    if main_grad is None or main_grad.dtype != torch.float32 or not main_grad.is_contiguous():
        return None
    return main_grad if main_grad.data_ptr() % 16 == 0 else None


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``main_grad`` where the parameter has one, else to ``grad``, as a backward pass would.

    Raises:
        RuntimeError: there is no ``main_grad``, and the memory of the parameter has been freed.
        ValueError: as ``into_main_grad``.
    """
    main_grad = check_main_grad(parameter)
    if main_grad is None and parameter.untyped_storage().nbytes() == 0 < parameter.numel():
        raise RuntimeError(
            "a deferred gradient has no parameter to go to: its memory has been freed since the forward pass, as FSDP "
            "does; give the parameters a main_grad, or do not defer"
        )
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        # That of a bias may be a column of something larger.
        parameter.grad = gradient.contiguous()


def check_main_grad(parameter: Tensor) -> Tensor | None:
    """Return the ``main_grad`` of a parameter, or None where it has none.

    Raises:
        ValueError: as ``into_main_grad``.
    """
    problem = main_grad_problem(parameter)
    if problem is not None:
        raise ValueError(problem)
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return main_grad


def main_grad_problem(parameter: Tensor) -> str | None:
    """Return why nothing can be added to the ``main_grad`` of a parameter, or None if it can or there is none."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return None
    if main_grad.shape != parameter.shape or main_grad.dtype not in (torch.float32, torch.float64):
        return (
            f"main_grad must be float32 of shape {tuple(parameter.shape)}, "
            f"but is {main_grad.dtype} of shape {tuple(main_grad.shape)}"
        )
    if main_grad.device != parameter.device:
        return f"main_grad is on {main_grad.device} but its parameter is on {parameter.device}; move it there"
    if any(stride == 0 and size > 1 for stride, size in zip(main_grad.stride(), main_grad.shape, strict=True)):
        return f"main_grad is expanded, strides {main_grad.stride()}: give it memory for each number"
    return None


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        refuse_second_derivative(grad)
        if captured_inputs(ctx)[0]:
            return grad, None
        ctx.main_grad.add_(grad)
        return None, None
