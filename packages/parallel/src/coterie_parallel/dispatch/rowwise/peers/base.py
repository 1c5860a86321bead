"""What the row-wise back-end asks of memory that every rank of an axis can write to and read from."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import CollectiveError

__all__ = ["ALIGNMENT", "PeerMemory", "PeerTensor", "block_bytes", "check_name", "check_request", "tensor_at"]

# Bytes; no kernel wants more for its widest access, and no cache has longer lines.
ALIGNMENT = 256
# A name travels in records of a fixed size.
_NAME_BYTES = 80


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerTensor:
    """One tensor on every rank of an axis: this rank's own block, and the way to the blocks of its peers.

    Attributes:
        local: this rank's block.
        addresses_S: (S) int64 on the device, the base address of each rank's block as this process sees it; multiples
            of 256. What a kernel needs, and all that it needs.
        views: every rank's block mapped here, in the order of the axis index, or None where only kernels reach peers.
            On a GPU they and the addresses are good for as long as this object lives.
        mapping: what keeps the blocks of the peers mapped, where the views do not.
    """

    local: Tensor
    addresses_S: Tensor
    views: tuple[Tensor, ...] | None
    mapping: object = field(default=None, repr=False)


class PeerMemory(ABC):
    """Memory of the S ranks of an axis that each of them can address, and a way to hand over what was written.

    A hand-over is ``signal(phase)`` on the writer and ``wait(phase)`` on the reader. Both are counted for each phase:
    the n-th wait for a phase ends once every peer has signalled that phase n times. Nothing is numbered by the host, so
    a captured CUDA graph that holds them can be replayed.

    Args:
        axis: the ranks that share the memory; its name and global ranks stand in every error.
        device: where the blocks lie.
        timeout_s: the longest that a wait may take.
    """

    def __init__(self, axis: Axis, device: torch.device | str, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s ({timeout_s}) must be above 0, in seconds")
        self.size = axis.size
        self.index = axis.index
        self.device = torch.device(device)
        self.axis_name = axis.name
        self.ranks = axis.ranks
        self.timeout_s = timeout_s

    @abstractmethod
    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> PeerTensor:
        """Return a zero-filled tensor of this shape on every rank.

        Collective: every rank calls with the same arguments, in the same order. ``name`` stands in errors and may be
        used again. There is no call to free it: a block goes once no rank holds the tensor any more.

        Raises:
            ValueError: on every rank, when the arguments differ between ranks or there is no room.
            CollectiveError: when a peer died or did not come in time.
        """

    @abstractmethod
    def signal(self, phase: str) -> None:
        """Tell every peer that this rank has done ``phase``: what it wrote before is visible to who waits for it.

        A release at system scope. On a GPU it takes its place in the current stream and returns at once.
        """

    @abstractmethod
    def wait(self, phase: str) -> None:
        """Go on once every peer has signalled ``phase`` as often as this rank has waited for it.

        An acquire at system scope. On a GPU the current stream waits, not the host; where a peer is late there, the
        stream goes on after ``timeout_s`` and `check` raises.

        Raises:
            CollectiveError: on a CPU, when a peer died or is later than ``timeout_s``.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise a CollectiveError when a wait on the device ended without its peers; reads the device.

        Called once at the end of a step. On a CPU a wait raises by itself.
        """

    @abstractmethod
    def close(self) -> None:
        """End signals, waits and allocation; not collective, and safe to call twice and after an error."""

    def failure(self, phase: str, reasons: Sequence[str]) -> CollectiveError:
        """Return the error of a wait for ``phase``, which says where it happened and, for each peer, why."""
        ranks = ", ".join(map(str, self.ranks))
        return CollectiveError(
            f"the wait for {phase!r} on the {self.axis_name!r} axis (ranks {ranks}) failed on rank "
            f"{self.ranks[self.index]}: {'; '.join(reasons)}"
        )

    def refuse_problems(self, problems: Sequence[str]) -> None:
        """Raise a ValueError when any rank has a problem; the problems by index, "" where there is none."""
        found = [f"rank {rank}: {problem}" for rank, problem in zip(self.ranks, problems, strict=True) if problem]
        if found:
            raise ValueError(f"no peer memory on the {self.axis_name!r} axis. {'; '.join(found)}")

    def refuse_difference(self, asked: Sequence[str]) -> None:
        """Raise a ValueError unless all ranks asked for the same tensor; what they asked for by index."""
        if len(set(asked)) > 1:
            each = ", ".join(f"rank {rank} {one}" for rank, one in zip(self.ranks, asked, strict=True))
            raise ValueError(
                f"every rank of the {self.axis_name!r} axis must allocate the same tensors in the same order, but they "
                f"asked for: {each}"
            )

    def __enter__(self) -> "PeerMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_request(name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape as a tuple, or raise a ValueError that says what is wrong with it."""
    check_name(name)
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {tuple(shape)} of {name!r} has a negative size")
    if dtype.is_complex or dtype.itemsize not in (1, 2, 4, 8):
        raise ValueError(f"the dtype ({dtype}) of {name!r} must have elements of 1, 2, 4 or 8 bytes and be real")
    return tuple(int(size) for size in shape)


def check_name(name: str) -> None:
    """Raise a ValueError unless the name of a tensor or phase fits into a record."""
    if not name or len(name.encode()) > _NAME_BYTES:
        raise ValueError(f"the name {name!r} must have 1 to {_NAME_BYTES} bytes in UTF-8")


def block_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of one rank's block: those of the tensor, rounded up to the alignment, never zero."""
    size = math.prod(shape) * dtype.itemsize
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


def tensor_at(bytes_B: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor of this shape and dtype that lies ``offset`` bytes into a flat uint8 tensor, as a view."""
    size = math.prod(shape) * dtype.itemsize
    return bytes_B[offset : offset + size].view(dtype).view(tuple(shape))
