"""What the parts of a specialised kernel have in common: the turn of the stages, descriptors, a trace."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "ENDED",
    "descriptor",
    "load_block",
    "load_elements",
    "mark",
    "next_stage",
    "stage_before",
    "store_block",
]

# What `mark` stores for a part that has done all.
ENDED = gl.constexpr(-2)
# Triton 3.9 has them by the first names only (the others are there, and raise), 3.6 by the second.
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after this one, and the phase of its barriers."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """Return the stage before this one.

    Not a variable of the loop that is given ``stage`` there and had the same value before the loop: the compiler takes
    such a variable for one that the loop does not change.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def mark(trace_ptr, part: gl.constexpr, tile, step):
    """Store before a wait how far a part of this program is, for those who look at a kernel that does not end."""
    if trace_ptr is not None:
        gl.store(trace_ptr + 3 * gl.program_id(0) + part, tile * 1000 + step)


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a tensor for TMA in blocks of these sizes, swizzled as far as the block's width allows."""
    return TensorDescriptor.from_tensor(
        tensor, block, gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    )
