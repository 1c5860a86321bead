"""The peer tensors of one rank: made at first use, used again by every layer.

Peak bytes of rows on a rank, C rows of a buffer, r = D * itemsize bytes of a row, T tokens of this rank, and L
dispatches whose backward is to come, which are the layers of the rank times the micro-batches that a pipeline has in
flight there:

    saved_rows   peer memory        other memory
    copy         3 * C * r          L * C * r       a copy of the rows of each layer
    lease        (L + 2) * C * r    0               the rows of each layer stay where they came
    fetch        4 * C * r          L * T * r       the tokens of each layer, where nothing else keeps them

The pool of leases grows to L by itself, and stays. All have one buffer for what a rank lays out for others to read
("offered": outputs, and gradients of rows in the backward pass) and one for gradients that come; "copy" one for the
rows that come, "lease" one for each layer, and "fetch" one for rows that come and one for rows that come again.
Besides, each layer keeps the weights of its rows (4 * C bytes) and the places of its pairs (12 * T * K bytes), and
buffers of a weight for each row take 8 * C. Gradients have a buffer of their own because a recomputed forward pass may
send rows while gradients are in use.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_parallel.dispatch.rowwise.peers import PeerMemory, PeerTensor

__all__ = ["Buffers", "Lease", "alias", "peak_row_bytes"]

_Kind = tuple[int, torch.dtype]


def peak_row_bytes(
    saved_rows: str, *, num_layers: int, capacity: int, num_tokens: int, width: int, itemsize: int
) -> int:
    """Return the peak bytes of rows on a rank, peer memory and other memory, by the table of this module."""
    buffers, copies, tokens = {
        "copy": (3, num_layers, 0),
        "lease": (num_layers + 2, 0, 0),
        "fetch": (4, 0, num_layers),
    }[saved_rows]
    return ((buffers + copies) * capacity + tokens * num_tokens) * width * itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Lease:
    """A buffer of rows that belongs to one dispatch until it is given back.

    ``rows`` is its tensor; ``kind`` and ``number`` say which one it is, ``generation`` of which capacity.
    """

    rows: PeerTensor
    kind: _Kind
    number: int
    generation: int


class Buffers:
    """Peer tensors of C rows by purpose, width and dtype, and a pool of buffers that can be leased.

    Every method that may allocate is collective: all ranks call the same ones in the same order. So a lease gets the
    same number everywhere.

    Args:
        peers: where the tensors lie.
        capacity: C.
    """

    def __init__(self, peers: PeerMemory, capacity: int) -> None:
        self._peers = peers
        self._generation = 0
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Forget all tensors of C rows; who still holds one keeps its memory."""
        self.capacity = capacity
        self._generation += 1
        self._tensors: dict[tuple[str, int, torch.dtype], PeerTensor] = {}
        self._pool: dict[_Kind, list[PeerTensor]] = {}
        self._holders: dict[_Kind, list[weakref.ref[Lease] | None]] = {}

    def rows(self, purpose: str, width: int, dtype: torch.dtype) -> PeerTensor:
        """Return the (C, D) tensor for a purpose."""
        return self._tensor(purpose, width, (self.capacity, width), dtype)

    def existing_rows(self, purpose: str, width: int, dtype: torch.dtype) -> PeerTensor | None:
        """Return the tensor of `rows` if it has been made; not collective."""
        return self._tensors.get((purpose, width, dtype))

    def values(self, purpose: str) -> PeerTensor:
        """Return the fp32 (C) tensor for a purpose."""
        return self._tensor(purpose, 0, (self.capacity,), torch.float32)

    def lease(self, width: int, dtype: torch.dtype) -> Lease:
        """Return a (C, D) buffer that no other dispatch has; a new one if all are taken."""
        kind = (width, dtype)
        pool, holders = self._pool.setdefault(kind, []), self._holders.setdefault(kind, [])
        if None not in holders:
            pool.append(self._allocate("rows", (self.capacity, width), dtype))
            holders.append(None)
        number = holders.index(None)
        lease = Lease(rows=pool[number], kind=kind, number=number, generation=self._generation)
        holders[number] = weakref.ref(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        """Let others have a leased buffer; one of an earlier capacity is not used again."""
        if lease.generation == self._generation:
            self._holders[lease.kind][lease.number] = None

    def held(self) -> list[bool]:
        """Return for each leased buffer whether somebody still has the lease; a forward pass may have no backward."""
        return [one() is not None for holders in self._holders.values() for one in holders if one is not None]

    def take_back(self, held: list[bool]) -> None:
        """End the leases of which ``held``, in the order of `held`, says that no rank has them any more."""
        wanted = iter(held)
        for holders in self._holders.values():
            holders[:] = [one if one is None or next(wanted) else None for one in holders]

    def local_bytes(self) -> int:
        """Return the bytes of this rank's blocks of all tensors."""
        pooled = [tensor for pool in self._pool.values() for tensor in pool]
        return sum(tensor.local.nbytes for tensor in [*self._tensors.values(), *pooled])

    def _tensor(self, purpose: str, width: int, shape: tuple[int, ...], dtype: torch.dtype) -> PeerTensor:
        key = (purpose, width, dtype)
        if key not in self._tensors:
            self._tensors[key] = self._allocate(purpose, shape, dtype)
        return self._tensors[key]

    def _allocate(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> PeerTensor:
        # What is made under inference mode could not be used in a training step that follows.
        with torch.inference_mode(False), torch.no_grad():
            return self._peers.allocate(purpose, shape, dtype)


def alias(tensor: PeerTensor, num_rows: int) -> Tensor:
    """Return the first rows of this rank's block as a tensor of its own for autograd.

    It shares the block's version, so that autograd refuses to use a saved one after the buffer was used again.
    """
    return tensor.local[:num_rows].detach()
