"""Backward passes that are no operations of autograd themselves."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["differentiated_once"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def differentiated_once(backward: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Wrap the backward of an autograd function so that it refuses to become part of a graph.

    ``once_differentiable`` of torch leaves the error to the second pass, which does not meet it where
    ``autograd.grad`` finds another path to its inputs: the second derivative is then wrong without a word.
    """

    @functools.wraps(backward)
    def refusing(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.is_grad_enabled():
            raise RuntimeError("dispatch and combine can be differentiated once; create_graph=True is not supported")
        return backward(*args, **kwargs)

    return refusing
