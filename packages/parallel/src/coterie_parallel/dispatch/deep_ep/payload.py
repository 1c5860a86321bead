"""Tokens in 8 bits: float8_e4m3fn with one scale for each block of 128 columns, the form that DeepEP sends."""

import torch
from torch import Tensor

__all__ = ["BLOCK", "from_fp8", "to_fp8"]

BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# The smallest scale keeps the division finite for a block of zeros and out of the subnormal numbers of fp32.
_SMALLEST_SCALE = 1e-30


def to_fp8(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens as float8_e4m3fn (T, D) and the fp32 scales (T, D / 128), so that x = value * scale."""
    blocks = x_TD.float().view(x_TD.shape[0], -1, BLOCK)
    scales = (blocks.abs().amax(2) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    values = (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    return values.view(x_TD.shape), scales


def from_fp8(values_RD: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values * scale`` of each block in ``dtype``."""
    blocks = values_RD.float().view(values_RD.shape[0], scales.shape[1], BLOCK)
    return blocks.mul_(scales.unsqueeze(2)).view(values_RD.shape).to(dtype)
