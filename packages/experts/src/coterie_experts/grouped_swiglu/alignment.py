"""What the widths of an expert must be for kernels that load 16 bytes at a time."""

import torch

__all__ = ["width_obstacle"]


def width_obstacle(*, d_model: int, d_hidden: int, dtype: torch.dtype) -> str | None:
    """Return which widths are not whole multiples of 16 bytes, with the multiple that works, or None if all are."""
    multiple = 16 // dtype.itemsize
    wrong = [f"{name} ({size})" for name, size in (("d_model", d_model), ("d_hidden", d_hidden)) if size % multiple]
    if wrong:
        return f"{' and '.join(wrong)} must be a multiple of {multiple} for {dtype} (rows of 16 bytes)"
    return None
