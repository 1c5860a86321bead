"""Methods that torch.compile calls as they are, without looking inside."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["runs_eagerly"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def runs_eagerly(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Wrap a function that exchanges rows, so that compiled code breaks its graph there and calls it.

    What is inside waits for peers, writes their memory and reads sizes on the host: traced, it would become a hundred
    small graphs, or one that moves these things around. This is ``torch.compiler.disable``, except that it imports
    torch._dynamo, which takes longer than all of this package, only if something has imported it before.
    """
    disabled: Callable[_Arguments, _Result] | None = None

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            # The frame of `call`, one code for all that is wrapped, is of no use to the compiler either.
            torch._dynamo.eval_frame.skip_code(call.__code__)  # type: ignore[attr-defined]
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    # What torch.compiler.disable sets, and all that the compiler looks for.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "rows are exchanged between ranks"  # type: ignore[attr-defined]
    return call
