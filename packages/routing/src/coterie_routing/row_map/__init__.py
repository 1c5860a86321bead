"""From expert ids to rows: counts, offsets, the row of each choice, and the choice in each row.

`reference.py` is plain torch and the ground truth; `triton_kernels.py` needs three launches and never waits for the
host. This file checks the arguments and picks.
"""

import importlib.util

import torch
from torch import Tensor

from coterie_routing.config import BACKENDS
from coterie_routing.row_map import reference
from coterie_routing.row_map.reference import RowMap

__all__ = ["RowMap", "map_rows", "takes_triton"]

# The ends of the segments are int32.
_MOST_ROWS = 2**31 - 1


def map_rows(ids_TK: Tensor, num_experts: int, *, backend: str = "auto") -> RowMap:
    """Give each routed choice of each token its row, with the rows of an expert in the order of token, then choice.

    The result is the same in every run and for every back-end. On a GPU nothing waits for the host, and a captured CUDA
    graph may be replayed with other ids.

    Args:
        ids_TK: Expert ids, int64 or int32; -1 means not routed. T*K below 2^31; T or K may be 0. One token may
            choose an expert twice.
        num_experts: E, at least 1.
        backend: "reference", "triton", or "auto": the Triton kernels where they can run, else the reference.

    Raises:
        ValueError: If an argument does not fit, or the named back-end cannot run, with the reason. On a CPU also if an
            id is not in [-1, E); on a GPU that check would make the host wait, and such an id counts as not routed.
    """
    if ids_TK.dim() != 2 or ids_TK.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"expected ids of shape (T, K), int64 or int32, got {ids_TK.dtype} of shape {tuple(ids_TK.shape)}"
        )
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}) must be at least 1")
    if ids_TK.numel() > _MOST_ROWS:
        raise ValueError(f"T*K ({ids_TK.numel()}) must be at most {_MOST_ROWS}: offsets_E is int32; split the batch")
    if ids_TK.device.type == "cpu" and ids_TK.numel() > 0:
        lowest, highest = (bound.item() for bound in ids_TK.aminmax())
        if lowest < -1 or highest >= num_experts:
            raise ValueError(f"ids must lie from -1 to {num_experts - 1}, but lie from {lowest} to {highest}")
    if takes_triton(backend, ids_TK.device, ids_TK.dtype):
        from coterie_routing.row_map import triton_kernels

        with torch.cuda.device_of(ids_TK):  # type: ignore[no-untyped-call]  # where Triton launches
            return triton_kernels.map_rows(ids_TK, num_experts)
    return reference.map_rows(ids_TK, num_experts)


def takes_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels for rows are to run on tensors of this device and dtype.

    Raises:
        ValueError: If the name is unknown, or "triton" is named and cannot run; the text says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend ({backend!r}) must be one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return False
    obstacle = _triton_obstacle(device, dtype)
    if backend == "auto":
        # Asking the kernels whether they run on a CPU would import triton; only one who names them has a reason to.
        return obstacle is None and device.type == "cuda"
    if obstacle is None and device.type == "cpu":
        from coterie_routing.row_map import triton_kernels

        if triton_kernels.COMPILED:
            obstacle = "the tensors are on a CPU, where it runs only under TRITON_INTERPRET=1"
    if obstacle is not None:
        raise ValueError(f"backend 'triton' cannot run: {obstacle}; choose backend 'auto' or 'reference'")
    return True


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type not in ("cuda", "cpu"):
        return f"the tensors are on {device}, not on a CUDA device"
    if dtype == torch.float64:
        return "its sums are fp32, too coarse for rows in fp64"
    return None
