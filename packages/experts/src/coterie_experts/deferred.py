"""Weight gradients that are computed later than the other gradients, when the caller wants them.

Pipeline schedules without bubbles (Qi et al. 2023, arXiv:2401.10241) send the gradient of the rows on before they
compute that of the weights.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie_experts.main_grad import add_gradient, check_main_grad

__all__ = ["Defer", "Deferral", "Gradients", "deferral_of"]

Defer = Callable[[Callable[[], None]], None]
"""Takes a function, to be called once, that adds the weight gradients of one backward pass."""

Gradients = Sequence[Tensor | None]
"""Of up, down, up_bias and down_bias, in this order; None for what has none, or was added already."""


class Deferral:
    """What a backward pass needs to hand its weight gradients over; see ``GroupedExperts.defer_weight_gradients``.

    Attributes:
        parameters: up, down, up_bias and down_bias; None for a bias that there is not.
    """

    def __init__(self, defer: Defer, parameters: Sequence[Tensor | None]) -> None:
        self._defer = defer
        self.parameters = tuple(parameters)

    def hand_over(self, compute: Callable[[], Gradients], inputs: Sequence[Tensor], needs: Sequence[bool]) -> None:
        """Give the caller a function that adds what ``compute`` returns to the parameters.

        ``inputs`` are the tensors of others that ``compute`` reads: it is an error to change them before. ``needs``
        says of which parameters this backward pass needs the gradient; where it is none, nothing is handed over.
        """
        if any(needs):
            self._defer(_AddWeightGradients(compute, self.parameters, inputs))


class _AddWeightGradients:
    def __init__(
        self, compute: Callable[[], Gradients], parameters: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> None:
        self._work: tuple[Callable[[], Gradients], Sequence[Tensor | None]] | None = compute, parameters
        self._inputs = [(one, one._version) for one in inputs]

    def __call__(self) -> None:
        """Compute the gradients and add them; what was kept for them is released, whatever happens.

        Raises:
            RuntimeError: a second call, or a tensor that the gradients are computed from was changed in place.
        """
        if self._work is None:
            raise RuntimeError("these weight gradients have been added already; each function is to be called once")
        (compute, parameters), inputs = self._work, self._inputs
        self._work, self._inputs = None, []
        if any(one._version != version for one, version in inputs):
            raise RuntimeError(
                "rows, weights or the gradient of the output were changed in place before the deferred weight "
                "gradients had been computed from them"
            )
        del inputs
        with torch.no_grad(), torch.cuda.device_of(parameters[0]):  # type: ignore[no-untyped-call]  # where Triton launches
            gradients = compute()
            # What it kept is free before anything is allocated for the sums.
            del compute
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter is not None and gradient is not None:
                    add_gradient(parameter, gradient)


def deferral_of(defer: Defer | None, **parameters: Tensor | None) -> Deferral | None:
    """Return a deferral for up, down, up_bias and down_bias, or None where nothing is deferred.

    Raises:
        ValueError: a parameter has neither a ``main_grad`` nor, not being a leaf, a ``grad``; or a wrong ``main_grad``.
    """
    if defer is None or not torch.is_grad_enabled():
        return None
    for name, parameter in parameters.items():
        if parameter is None or check_main_grad(parameter) is not None:
            continue
        if parameter.requires_grad and not parameter.is_leaf:
            raise ValueError(
                f"{name} is not a leaf and has no main_grad, so that there is nothing to add its deferred gradient to; "
                "give the parameter itself, or a main_grad, or leave defer_weight_gradients out"
            )
    return Deferral(defer, tuple(parameters.values()))
