"""Gradients that are written by hand and have no gradient of their own."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["captured_inputs", "graph_is_kept", "needed_inputs", "refuse_create_graph", "refuse_second_derivative"]


def refuse_create_graph() -> None:
    """Raise where a graph of the gradient is asked for, whose inputs would be taken for constants.

    To be called first in the backward pass of a function whose gradient depends on its inputs. What it saved does not
    say whether an input wants a gradient: it may have saved a copy. torch's ``once_differentiable`` leaves the error to
    the second pass, which does not come by it where ``autograd.grad`` finds another path to what it is asked for.

    Raises:
        RuntimeError: the backward pass runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this back-end of the experts can be differentiated once, and create_graph=True is not supported; "
            "the back-end 'reference' can be differentiated twice, without main_grad"
        )


def refuse_second_derivative(*tensors: Tensor | None) -> None:
    """Likewise for a function that is linear: only where one of what its gradient depends on wants a gradient.

    Raises:
        RuntimeError: as ``refuse_create_graph``.
    """
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        refuse_create_graph()


def needed_inputs(ctx: Any) -> tuple[bool, ...]:
    """Say of each input of a function whether the backward pass that runs needs its gradient.

    ``ctx.needs_input_grad`` says which inputs want one. A pass for some of them alone, ``backward(inputs=...)`` or
    ``autograd.grad``, is to leave the others as they are, their ``main_grad`` too.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return tuple(wants and (_is_captured(node := next(nodes)) or _is_executed(node)) for wants in ctx.needs_input_grad)


def captured_inputs(ctx: Any) -> tuple[bool, ...]:
    """Say of each input whether it is, or is a view of, a leaf that ``autograd.grad`` was given.

    Its gradient is to be returned, and added nowhere.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    return tuple(wants and _is_captured(next(nodes)) for wants in ctx.needs_input_grad)


def _is_captured(node: Any) -> bool:
    if len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    if node is None or node.next_functions:
        return False
    try:
        _is_executed(node)
    except RuntimeError:
        # What torch says of such a leaf, and of no other node.
        return True
    return False


def _is_executed(node: Any) -> bool:
    return bool(torch._C._will_engine_execute_node(node))


def graph_is_kept() -> bool:
    """Say whether the caller may go through this graph again (``retain_graph``), so that nothing may be overwritten."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else bool(keeps())
