"""From expert ids to addresses: which row of which rank each pair's row goes to, computed on the device.

Each rank counts its pairs (`count_pairs`), the counts go to all ranks, and from all counts each rank places its own
rows (`place_rows`). Let c[s, d, g] be the pairs of source s for local expert g of rank d. In the buffer of rank d the
segment of g begins at the sum over earlier local experts of sum_s c[s, d, g'], each rounded up to the alignment; within
it come the rows of source 0, then source 1, and so on; among those of one source the order is token, then choice.

`reference.py` is plain torch and the ground truth, `triton_kernels.py` does the same in four launches. This file checks
the arguments and picks.
"""

import torch
from torch import Tensor

from coterie_parallel.dispatch.rowwise.backends import takes_triton
from coterie_parallel.dispatch.rowwise.placement import reference
from coterie_parallel.dispatch.rowwise.placement.reference import RowPlan

__all__ = ["RowPlan", "count_pairs", "place_rows"]

# Positions are int32, and so are the numbers of the pairs in the last block of a kernel.
_MOST_PAIRS = 2**31 - 1024


def count_pairs(ids_TK: Tensor, num_experts: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Count this rank's routed pairs of each expert, and number the pairs of an expert by token, then choice.

    No value is read on the host; an id outside [0, E) counts as not routed.

    Args:
        ids_TK: int64 global expert ids. T or K may be 0, and a token may choose an expert twice.
        num_experts: E, at least 1.
        backend: "auto", "reference" or "triton".

    Returns:
        counts_E int64, and position_TK int32: the number of earlier pairs of the same expert on this rank, -1 for a
        pair that is not routed.

    Raises:
        ValueError: If an argument does not fit or the back-end cannot run.
    """
    if ids_TK.ndim != 2 or ids_TK.dtype != torch.int64:
        raise ValueError(f"ids_TK must be int64 of shape (T, K), got {ids_TK.dtype} of shape {tuple(ids_TK.shape)}")
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}) must be at least 1")
    if ids_TK.numel() > _MOST_PAIRS:
        raise ValueError(f"T*K ({ids_TK.numel()}) must be at most {_MOST_PAIRS}: positions are int32; split the batch")
    if takes_triton(backend, ids_TK.device):
        from coterie_parallel.dispatch.rowwise.placement import triton_kernels

        with torch.cuda.device_of(ids_TK):  # type: ignore[no-untyped-call]  # where Triton launches
            return triton_kernels.count_pairs(ids_TK, num_experts)
    return reference.count_pairs(ids_TK, num_experts)


def place_rows(
    counts_SE: Tensor,
    ids_TK: Tensor,
    position_TK: Tensor,
    *,
    index: int,
    num_local: int,
    alignment: int,
    backend: str = "auto",
) -> RowPlan:
    """Return the address of the row of each pair of this rank, from the counts of all ranks.

    No value is read on the host. Every rank computes ``need_S`` alike. A rank's rows must stay below 2^31, since
    ``offsets_e`` is int32.

    Args:
        counts_SE: int64, row s is ``counts_E`` of axis index s; E = S * e.
        ids_TK: int64, the ids that this rank counted.
        position_TK: int32, as `count_pairs` returned it for them.
        index: axis index of this rank.
        num_local: e, experts of each rank; rank d owns experts [d * e, (d + 1) * e).
        alignment: segments end at multiples of it.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: If an argument does not fit or the back-end cannot run.
    """
    if counts_SE.ndim != 2 or counts_SE.dtype != torch.int64:
        raise ValueError(
            f"counts_SE must be int64 of shape (S, E), got {counts_SE.dtype} of shape {tuple(counts_SE.shape)}"
        )
    size, num_experts = counts_SE.shape
    if size < 1 or num_local < 1 or num_experts != size * num_local:
        raise ValueError(
            f"counts_SE of shape ({size}, {num_experts}) does not fit num_local ({num_local}): E must be S * num_local"
        )
    if not 0 <= index < size:
        raise ValueError(f"index ({index}) must lie in [0, {size})")
    if alignment < 1:
        raise ValueError(f"alignment ({alignment}) must be at least 1; 1, 16 and 128 are usual")
    if ids_TK.ndim != 2 or ids_TK.dtype != torch.int64:
        raise ValueError(f"ids_TK must be int64 of shape (T, K), got {ids_TK.dtype} of shape {tuple(ids_TK.shape)}")
    if position_TK.shape != ids_TK.shape or position_TK.dtype != torch.int32:
        raise ValueError(
            f"position_TK must be int32 of shape {tuple(ids_TK.shape)}, got {position_TK.dtype} of shape "
            f"{tuple(position_TK.shape)}"
        )
    if not (counts_SE.device == ids_TK.device == position_TK.device):
        raise ValueError(
            f"counts_SE, ids_TK and position_TK must be on one device, got {counts_SE.device}, {ids_TK.device}, "
            f"{position_TK.device}"
        )
    if takes_triton(backend, ids_TK.device):
        from coterie_parallel.dispatch.rowwise.placement import triton_kernels

        with torch.cuda.device_of(ids_TK):  # type: ignore[no-untyped-call]  # where Triton launches
            return triton_kernels.place_rows(
                counts_SE, ids_TK, position_TK, index=index, num_local=num_local, alignment=alignment
            )
    return reference.place_rows(counts_SE, ids_TK, position_TK, index=index, num_local=num_local, alignment=alignment)
