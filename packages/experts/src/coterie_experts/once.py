"""Gradients that are written by hand and have no gradient of their own."""

import torch
from torch import Tensor

__all__ = ["refuse_second_derivative"]


def refuse_second_derivative(*tensors: Tensor | None) -> None:
    """Raise where a graph of the gradient is asked for, in which one of these tensors would be taken for a constant.

    To be called first in the backward pass of a function, with the gradients it gets and what it saved. torch's
    ``once_differentiable`` leaves the error to the second pass, which does not come by it where ``autograd.grad``
    finds another path to what it is asked for.

    Raises:
        RuntimeError: the backward pass runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            "this back-end of the experts can be differentiated once, and create_graph=True is not supported; "
            "the back-end 'reference' can be differentiated twice, without main_grad"
        )
