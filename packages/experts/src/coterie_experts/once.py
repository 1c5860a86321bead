"""Gradients that are written by hand and have no gradient of their own."""

import torch
from torch import Tensor

__all__ = ["graph_is_kept", "refuse_second_derivative"]


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


def graph_is_kept() -> bool:
    """Say whether the caller may go through this graph again (``retain_graph``), so that nothing may be overwritten."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else bool(keeps())
