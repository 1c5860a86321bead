"""The matrix kernels with specialised warps, in Gluon, for compute capability 9.

A program is three parts: warps that fill a ring of stages in shared memory with the operands of the steps to come, by
TMA and by copies of rows that are gathered, and two warpgroups that multiply, each one half of a tile. So loads go on
while a tile ends, and one half ends while the other multiplies, which the plain kernels cannot have. The gradient of
the hidden units has no such kernel: two that were tried were slower than the plain one (NOTES.md).

Each module has a launch and ``fits``, which says whether its kernel can do a case; ``triton_launch.py`` asks it and
leaves the rest to the plain kernels. Nothing of Triton is imported here, for Gluon is experimental: ``obstacle`` says
why the kernels cannot run, and ``choose_backend`` repeats it in its reason.
"""

import functools
import importlib

import torch

__all__ = ["obstacle"]

_MODULES = ("gradients", "products", "up")
# Those that they have been compiled with.
_TRITON = ("3.6", "3.7", "3.8", "3.9")


def obstacle(device: torch.device) -> str | None:
    """Return why these kernels cannot run on this device, or None if they can; ``meta`` can do anything."""
    if device.type == "meta":
        return None
    if device.type != "cuda":
        return f"they do not run on {device.type}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "they need compute capability 9"
    return _obstacle_of_triton()


@functools.cache
def _obstacle_of_triton() -> str | None:
    try:
        version = importlib.import_module("triton").__version__
        if not version.startswith(tuple(f"{one}." for one in _TRITON)):
            return f"they are known to work with Triton {_TRITON[0]} to {_TRITON[-1]}, and this is {version}"
        # Asked of a kernel, for Triton decides when it defines them.
        if not importlib.import_module("coterie_experts.grouped_swiglu.triton_layout").COMPILED:
            return "they do not run in Triton's interpreter"
        for name in _MODULES:
            importlib.import_module(f"{__name__}.{name}")
    except (ImportError, AttributeError) as error:
        return f"this Triton has not the Gluon that they are written in ({type(error).__name__}: {error})"
    return None
