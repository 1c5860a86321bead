"""All ranks of an axis in one process: for one rank, for tests, and to time kernels on one GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie_parallel.axis import Axis
from coterie_parallel.dispatch.rowwise.peers.base import (
    ALIGNMENT,
    PeerMemory,
    PeerTensor,
    block_bytes,
    check_request,
    tensor_at,
)

__all__ = ["VirtualPeers", "virtual_peers"]

_Request = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(kw_only=True)
class _Made:
    request: _Request
    tensors: list[PeerTensor]
    num_left: int


class VirtualPeers(PeerMemory):
    """One of several ranks that live in this process; made by `virtual_peers`.

    ``signal`` and ``wait`` do nothing: whoever drives the ranks runs each phase on all of them before the next begins.
    """

    def __init__(self, axis: Axis, device: torch.device | str, made: dict[int, _Made]) -> None:
        # No wait takes any time here.
        super().__init__(axis, device, timeout_s=1.0)
        self._made = made
        self._num_allocated = 0

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> PeerTensor:
        """Return the next tensor: the first rank that asks makes the blocks of all."""
        request = (name, check_request(name, shape, dtype), dtype)
        made = self._made.get(self._num_allocated)
        if made is None:
            made = _Made(request=request, tensors=self._blocks(*request[1:]), num_left=self.size)
        if request != made.request:
            raise ValueError(
                f"every rank of the {self.axis_name!r} axis must allocate the same tensors in the same order, but rank "
                f"{self.ranks[self.index]} asks for {request} and another rank asked for {made.request}"
            )
        made.num_left -= 1
        # Once every rank has its tensor nothing here may keep the memory.
        if made.num_left:
            self._made[self._num_allocated] = made
        else:
            self._made.pop(self._num_allocated, None)
        self._num_allocated += 1
        return made.tensors[self.index]

    def signal(self, phase: str) -> None:
        """Do nothing."""

    def wait(self, phase: str) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def _blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[PeerTensor]:
        step = block_bytes(shape, dtype)
        # torch aligns what it allocates on a CPU to 64 bytes only.
        whole = torch.zeros(self.size * step + ALIGNMENT, dtype=torch.uint8, device=self.device)
        start = -whole.data_ptr() % ALIGNMENT
        views = tuple(tensor_at(whole, start + index * step, shape, dtype) for index in range(self.size))
        bases = [whole.data_ptr() + start + index * step for index in range(self.size)]
        addresses_S = torch.tensor(bases, dtype=torch.int64, device=self.device)
        return [PeerTensor(local=view, addresses_S=addresses_S, views=views) for view in views]


def virtual_peers(size: int, device: torch.device | str, *, axis_name: str = "expert") -> list[PeerMemory]:
    """Return the peer memory of each of ``size`` ranks that all live in this process, in the order of the index."""
    made: dict[int, _Made] = {}
    ranks = tuple(range(size))
    return [
        VirtualPeers(Axis(name=axis_name, size=size, index=index, group=None, ranks=ranks), device, made)
        for index in ranks
    ]
