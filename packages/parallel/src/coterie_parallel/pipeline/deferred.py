"""Weight gradients that a backward leaves for later, so that a schedule can fill idle time with them."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WeightGradients"]


class WeightGradients:
    """Collects, while a backward runs, the computations of weight gradients that it leaves out."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def of_linear_layers(self, module: nn.Module) -> None:
        """Let every plain `nn.Linear` inside ``module`` leave its weight gradient to this, not that of its bias.

        Left alone, with all gradients in the backward, are layers with a forward of their own, those whose weight is
        computed from other parameters, and every call under autocast. A hook on a weight does not see a gradient that
        is computed later.
        """
        for one in module.modules():
            # What is no parameter (weight norm, parametrizations) has no gradient to add to.
            if isinstance(one, nn.Linear) and one._parameters.get("weight") is not None and _is_plain(one):
                one.forward = partial(_linear, one, self.put)  # type: ignore[method-assign]

    def put(self, job: Callable[[], None]) -> None:
        """Keep a computation for later; it adds to ``main_grad`` of its weight, or to ``grad`` where there is none."""
        self._jobs.append(job)

    def take(self) -> Callable[[], None]:
        """Return a function that does, once and in order, all that was left out since the last call of this."""
        jobs, self._jobs = self._jobs, []

        def run() -> None:
            with torch.no_grad():
                while jobs:
                    jobs.pop(0)()  # what it holds is freed before the next one needs memory

        return run


def _is_plain(layer: nn.Linear) -> bool:
    return type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def _linear(layer: nn.Linear, put: Callable[[Callable[[], None]], None], x: Tensor) -> Tensor:
    bias = cast("Tensor | None", layer.bias)
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, layer.weight, bias)
    out: Tensor = _Linear.apply(x, layer.weight, put)
    return out if bias is None else out + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, put: Callable[[Callable[[], None]], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.put = weight, put
        return F.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.put(partial(_add_weight_gradient, ctx.weight, x, grad))
        return (grad @ ctx.weight if ctx.needs_input_grad[0] else None), None, None


def _add_weight_gradient(weight: Tensor, x: Tensor, grad: Tensor) -> None:
    gradient = grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
