"""Counted signals and short texts between processes, in one segment of shared memory.

Rank w has a log of the phases that it signalled, and for each reader r a semaphore. To signal, w writes the next record
of its log, then posts its semaphore of every reader. To wait, r takes posts of w's semaphore and reads one record for
each, until it has read the phase it waits for. Records of other phases count for later waits, so the order in which
ranks wait does not matter, and the last record says how far a late rank has come.

Every record has one writer. Why a reader sees it: see semaphores.py.
"""

import mmap
from collections import Counter

import numpy as np

from coterie_parallel.dispatch.rowwise.peers import semaphores

__all__ = ["Board", "board_bytes", "set_up_board"]

# Records of a log: how far a rank can be ahead of the slowest reader. Each phase that is signalled is also waited for,
# so that it is ahead by the few phases that are under way at one time.
_NUM_RECORDS = 128
_RECORD_BYTES = 128
_TEXT_BYTES = 4096
_CLOSED = "\0closed"


def board_bytes(size: int) -> int:
    """Return the bytes of a board for ``size`` ranks."""
    return _semaphore_start(size, size, 0)


def set_up_board(mapping: mmap.mmap, size: int) -> None:
    """Set up a board in a segment that is all zero and `board_bytes` long; once, before it is handed out."""
    base = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    for writer in range(size):
        for reader in range(size):
            semaphores.initialize(base + _semaphore_start(size, writer, reader))


class Board:
    """One rank's access to the board of an axis.

    Args:
        mapping: the segment, after `set_up_board`.
        size: number of ranks.
        index: this rank.

    Attributes:
        last: for each peer the phase that it signalled last, as far as this rank has read; "" before the first.
    """

    def __init__(self, mapping: mmap.mmap, size: int, index: int) -> None:
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)
        self._base = self._bytes.ctypes.data
        self._size = size
        self._index = index
        self._peers = [peer for peer in range(size) if peer != index]
        self._num_posted = 0
        self._num_taken = Counter[int]()
        self._num_exchanges = 0
        # Phases that were read from the log of a peer and not yet waited for.
        self._unused = {peer: Counter[str]() for peer in self._peers}
        self.last = {peer: "" for peer in self._peers}

    def signal(self, phase: str) -> list[int]:
        """Tell every peer that this rank has done ``phase``; return the peers that have not read a whole log.

        Where there are any, nothing was told to anybody.
        """
        # One record less than there are: a reader has taken the post of the record that it is reading.
        full = [
            peer for peer in self._peers if semaphores.value(self._semaphore(self._index, peer)) >= _NUM_RECORDS - 1
        ]
        if not full:
            self._write(self._record(self._index, self._num_posted), _RECORD_BYTES, phase)
            self._num_posted += 1
            for peer in self._peers:
                semaphores.post(self._semaphore(self._index, peer))
        return full

    def take(self, peer: int, phase: str, patience_s: float) -> bool:
        """Use up one signal of ``phase`` by ``peer`` and return whether there was one within ``patience_s``."""
        unused = self._unused[peer]
        while unused[phase] == 0 and not self.has_closed(peer):
            if not semaphores.take(self._semaphore(peer, self._index), patience_s=patience_s):
                return False
            found = self._read(self._record(peer, self._num_taken[peer]), _RECORD_BYTES)
            self._num_taken[peer] += 1
            unused[found] += 1
            if found != _CLOSED:
                self.last[peer] = found
        if unused[phase] == 0:
            return False
        unused[phase] -= 1
        return True

    def unused(self, peer: int) -> list[str]:
        """Return the phases that ``peer`` has signalled, as far as this rank has read, and this rank not waited for."""
        return [phase for phase, count in self._unused[peer].items() if count and phase != _CLOSED]

    def write_text(self, text: str) -> None:
        """Leave a text for the peers, cut to 4 KiB; to be read by `texts` after the hand-over that follows."""
        self._num_exchanges += 1
        self._write(self._text(self._index), _TEXT_BYTES, text)

    def texts(self) -> list[str]:
        """Return the text of each rank, after every rank has left one and the hand-over is done."""
        return [self._read(self._text(rank), _TEXT_BYTES) for rank in range(self._size)]

    def say_closed(self) -> None:
        """Tell the peers that nothing will come from this rank any more."""
        self.signal(_CLOSED)

    def has_closed(self, peer: int) -> bool:
        """Return whether all that ``peer`` signalled was read, and that it has closed."""
        return self._unused[peer][_CLOSED] > 0

    def _semaphore(self, writer: int, reader: int) -> int:
        return self._base + _semaphore_start(self._size, writer, reader)

    def _record(self, rank: int, number: int) -> int:
        return _record_start(rank, number % _NUM_RECORDS)

    def _text(self, rank: int) -> int:
        # Two places in turn: who writes the next but one text has waited for the next, and so for who read this one.
        return _text_start(self._size, rank, self._num_exchanges % 2)

    def _write(self, start: int, num_bytes: int, text: str) -> None:
        encoded = text.encode()[: num_bytes - 2]
        place = self._bytes[start : start + num_bytes]
        place[:2] = np.frombuffer(len(encoded).to_bytes(2, "little"), dtype=np.uint8)
        place[2 : 2 + len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)

    def _read(self, start: int, num_bytes: int) -> str:
        place = self._bytes[start : start + num_bytes]
        length = int.from_bytes(place[:2].tobytes(), "little")
        return place[2 : 2 + length].tobytes().decode(errors="replace")


# In this order: logs, texts, semaphores.
def _record_start(rank: int, record: int) -> int:
    return (rank * _NUM_RECORDS + record) * _RECORD_BYTES


def _text_start(size: int, rank: int, place: int) -> int:
    return _record_start(size, 0) + (rank * 2 + place) * _TEXT_BYTES


def _semaphore_start(size: int, writer: int, reader: int) -> int:
    return _text_start(size, size, 0) + (writer * size + reader) * semaphores.SEMAPHORE_BYTES
