"""The memory from which sharded gradients are sent: two buffers in turn, so no third sum is ever under way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie_parallel.background import Ticket
from coterie_parallel.gradients.layout import BucketLayout

__all__ = ["SendBuffers", "buffer_numels"]

_NUM_BUFFERS = 2


def buffer_numels(layouts: Sequence[BucketLayout]) -> list[int]:
    """Return the elements of each buffer for buckets that are sent in this order: as many as its largest one has."""
    turns = [layouts[turn::_NUM_BUFFERS] for turn in range(_NUM_BUFFERS)]
    return [max(layout.numel for layout in turn) for turn in turns if turn]


class SendBuffers:
    """fp32 buffers, held from the first step to the last; bucket ``number`` is sent from buffer ``number % 2``.

    So what is under way is bounded, whatever the allocator does and however far the host is ahead of a GPU.

    Args:
        layouts: the sharded buckets, in the order in which they are sent.
        device: of the gradients.
    """

    def __init__(self, layouts: Sequence[BucketLayout], device: torch.device) -> None:
        self._numels = [layout.numel for layout in layouts]
        self._buffers = [torch.empty(numel, dtype=torch.float32, device=device) for numel in buffer_numels(layouts)]
        self._readers: list[Ticket | None] = [None] * len(self._buffers)

    def stops_host(self, number: int) -> bool:
        """Return whether `borrow` would make the host wait; never on a GPU, where a stream does."""
        turn = number % _NUM_BUFFERS
        reader = self._readers[turn]
        return reader is not None and not self._buffers[turn].is_cuda and not reader.is_done()

    def borrow(self, number: int) -> Tensor:
        """Return memory for a bucket, fp32, (numel), of any content; waits until what it had before is summed."""
        turn = number % _NUM_BUFFERS
        reader, self._readers[turn] = self._readers[turn], None
        if reader is not None:
            reader.wait()
        return self._buffers[turn][: self._numels[number]]

    def lend_to(self, number: int, reader: Ticket) -> None:
        """Note the sum that reads a bucket's memory: the next one to borrow it waits for its end."""
        self._readers[number % _NUM_BUFFERS] = reader
