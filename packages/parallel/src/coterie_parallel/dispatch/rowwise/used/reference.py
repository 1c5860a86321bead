"""Copy what is used of a buffer, in plain torch; reads the end on the host."""

from torch import Tensor

__all__ = ["copy_used"]


def copy_used(source_R: Tensor, target_C: Tensor, offsets_e: Tensor) -> None:
    """Copy the rows before the last end; see `coterie_parallel.dispatch.rowwise.used.copy_used`."""
    end = int(offsets_e[-1])
    target_C[:end].copy_(source_R[:end])
