"""Which kernels run: plain torch or Triton."""

import importlib.util

import torch

__all__ = ["BACKENDS", "takes_triton"]

BACKENDS = ("auto", "reference", "triton")


def takes_triton(backend: str, device: torch.device) -> bool:
    """Return whether the Triton kernels are to run on tensors of this device.

    Args:
        backend: "reference" for plain torch, "triton", or "auto": Triton on a CUDA device and plain torch on a CPU.
        device: of all tensors of the call.

    Raises:
        ValueError: If the name is unknown or Triton is to run and cannot; the text says what to do.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend ({backend!r}) must be one of {', '.join(BACKENDS)}")
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return False
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"the row-wise kernels run on a CUDA device or a CPU, but the tensors are on {device}")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("the row-wise kernels need triton, which is not installed: pip install triton")
    if device.type == "cpu":
        from coterie_parallel.dispatch.rowwise.placement import triton_kernels

        if triton_kernels.COMPILED:
            raise ValueError(
                "backend 'triton' runs on tensors of a CPU only under TRITON_INTERPRET=1; choose 'auto' or 'reference'"
            )
    return True
