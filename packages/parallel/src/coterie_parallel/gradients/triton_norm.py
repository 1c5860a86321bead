"""The sum of squares as a Triton kernel for GPUs, in fp64 and one pass at the rate of the memory."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sum_of_squares"]

_BLOCK, _STEPS = 4096, 16


@triton.jit
def _squares(values_ptr, sums_ptr, numel, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Write the sum of the squares of BLOCK * STEPS elements, each exact in fp64."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for step in range(STEPS):
        place = start + step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + place, mask=place < numel, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares of an fp32 tensor, an fp64 scalar; contiguous, at least one element."""
    num_sums = triton.cdiv(values.numel(), _BLOCK * _STEPS)
    sums = torch.empty(num_sums, dtype=torch.float64, device=values.device)
    _squares[(num_sums,)](values, sums, values.numel(), BLOCK=_BLOCK, STEPS=_STEPS, num_warps=8, enable_fp_fusion=True)
    return sums.sum()
