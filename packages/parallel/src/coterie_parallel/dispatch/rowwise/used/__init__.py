"""Copy what is used of a buffer: the rows before the last end, which on a GPU only the device knows.

`reference.py` is plain torch and reads the end on the host, `triton_kernels.py` does not.
"""

import torch
from torch import Tensor

from coterie_parallel.dispatch.rowwise.backends import takes_triton
from coterie_parallel.dispatch.rowwise.used import reference

__all__ = ["copy_used"]


def copy_used(source_R: Tensor, target_C: Tensor, offsets_e: Tensor, *, backend: str = "auto") -> None:
    """Copy the rows before ``offsets_e[-1]`` to the same places of ``target_C``; the others are not written.

    Args:
        source_R: (R, ...), any dtype of 1, 2, 4 or 8 bytes, any strides.
        target_C: contiguous, of the same dtype and width; the last end is at most R and C.
        offsets_e: int32, inclusive ends of the segments.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: if the tensors do not fit or the back-end cannot run.
    """
    if source_R.dtype != target_C.dtype or source_R.shape[1:] != target_C.shape[1:] or not target_C.is_contiguous():
        raise ValueError(
            f"rows of {source_R.dtype} and shape {tuple(source_R.shape)} do not fit a target of {target_C.dtype} and "
            f"shape {tuple(target_C.shape)}, which must be contiguous"
        )
    if takes_triton(backend, source_R.device):
        from coterie_parallel.dispatch.rowwise.used import triton_kernels

        with torch.cuda.device_of(target_C):  # type: ignore[no-untyped-call]  # where Triton launches
            triton_kernels.copy_used(source_R.contiguous(), target_C, offsets_e)
    else:
        reference.copy_used(source_R, target_C, offsets_e)
