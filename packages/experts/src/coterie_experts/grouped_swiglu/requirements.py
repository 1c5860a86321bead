"""What kernels ask of a GPU, of widths and of memory; most load 16 bytes at a time."""

import torch
from torch import Tensor

__all__ = ["capability_obstacle", "in_one_sentence", "whole", "width_obstacle"]


def width_obstacle(*, d_model: int, d_hidden: int, dtype: torch.dtype) -> str | None:
    """Return which widths are not whole multiples of 16 bytes, with the multiple that works, or None if all are."""
    multiple = 16 // dtype.itemsize
    wrong = [f"{name} ({size})" for name, size in (("d_model", d_model), ("d_hidden", d_hidden)) if size % multiple]
    if wrong:
        return f"{' and '.join(wrong)} must be a multiple of {multiple} for {dtype} (rows of 16 bytes)"
    return None


def capability_obstacle(device: torch.device, *majors: int) -> str | None:
    """Return why this CUDA device is none of these compute capabilities, or None if it is one."""
    try:
        if torch.cuda.get_device_capability(device)[0] in majors:
            return None
    except (RuntimeError, AssertionError) as error:
        return f"torch finds no such device ({str(error).splitlines()[0]})"
    wanted = " or ".join(map(str, majors))
    return f"it needs compute capability {wanted}, which {torch.cuda.get_device_name(device)} has not"


def in_one_sentence(*obstacles: str | None) -> str | None:
    """Return those that there are, or None if there are none."""
    return "; ".join(one for one in obstacles if one is not None) or None


def whole(tensor: Tensor) -> Tensor:
    """Return it, or a copy, without gaps and beginning at a multiple of 16 bytes.

    Of a size of 1 too the stride is what it would be: ``is_contiguous`` lets any pass, and ``F.grouped_mm`` does not.
    """
    strides, stride = [], 1
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= max(size, 1)
    if tensor.stride() == tuple(reversed(strides)) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
