"""Copy what is used of a buffer in a Triton kernel that reads the end on the device."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["copy_used"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words of one program.
_BLOCK = 2048


def copy_used(source_R: Tensor, target_C: Tensor, offsets_e: Tensor) -> None:
    """Copy the rows before the last end; see `coterie_parallel.dispatch.rowwise.used.copy_used`."""
    if source_R.numel() == 0:
        return
    row_bytes = source_R[0].numel() * source_R.element_size()
    word = _WORDS[math.gcd(row_bytes, source_R.data_ptr(), target_C.data_ptr(), 8)]
    source_W, target_W = (tensor.flatten().view(word) for tensor in (source_R, target_C))
    _copy_kernel[(triton.cdiv(source_W.numel(), _BLOCK),)](
        source_W,
        target_W,
        offsets_e[-1:],
        WIDTH=row_bytes // word.itemsize,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _copy_kernel(source_ptr, target_ptr, end_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    end = tl.load(end_ptr).to(tl.int64) * WIDTH
    words = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + words, tl.load(source_ptr + words, mask=words < end), mask=words < end)
