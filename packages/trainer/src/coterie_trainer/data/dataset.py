"""Batches from token files: documents packed into sequences, in an order that is a pure function of the step number.

A split is one long row of tokens in which every document ends with the end-of-text token. Sequence ``i`` of length
``S`` covers the tokens ``[i * S, (i + 1) * S)``; the target of a position is the next token if that token belongs to
the same document, else -1. So every token is in exactly one sequence, and nothing is predicted across documents.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from coterie_trainer.attention import count_documents
from coterie_trainer.data.shards import Index, check_sizes, map_tokens, read_index

__all__ = [
    "Batch",
    "EvaluationBatches",
    "Prefetch",
    "Sequences",
    "TrainBatches",
    "has_tokens",
    "open_split",
    "prefetch",
]

# Shards kept mapped at a time: enough for locality, and far below the usual limits on open files (256 to 1,024).
_MAPPED_SHARDS = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences that go through the model together.

    ``tokens_BS`` int64; 0 where padded.
    ``targets_BS`` int64, -1 where nothing is to be predicted: at the last token of a document, and where padded.
    ``document_ids_BS`` int32, the number of the document inside its sequence (from 0), -1 where padded. A position
    may attend only to positions of its own row with the same id.
    ``num_documents`` is `count_documents` of them, None where it is not known: a device is not asked.
    """

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    document_ids_BS: torch.Tensor
    num_documents: int | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device; from pinned memory the host does not wait for the copy."""
        return Batch(
            tokens_BS=self.tokens_BS.to(device, non_blocking=True),
            targets_BS=self.targets_BS.to(device, non_blocking=True),
            document_ids_BS=self.document_ids_BS.to(device, non_blocking=True),
            num_documents=self.num_documents,
        )

    def pin_memory(self) -> "Batch":
        """Return the batch in memory that a GPU copies from by itself."""
        return Batch(
            tokens_BS=self.tokens_BS.pin_memory(),
            targets_BS=self.targets_BS.pin_memory(),
            document_ids_BS=self.document_ids_BS.pin_memory(),
            num_documents=self.num_documents,
        )

    def padding(self) -> "Batch":
        """Return a batch of the same shape with nothing but padding."""
        return Batch(
            tokens_BS=torch.zeros_like(self.tokens_BS),
            targets_BS=torch.full_like(self.targets_BS, -1),
            document_ids_BS=torch.full_like(self.document_ids_BS, -1),
            num_documents=len(self.document_ids_BS),
        )


class Sequences:
    """Read sequences of any length from one split of a folder of token files.

    ``num_tokens`` counts end-of-text tokens, ``num_bytes`` is the UTF-8 size of the text, ``num_documents`` leaves
    out empty documents. Files are memory-mapped; at most 64 are mapped at a time. Safe to use from several threads.
    """

    def __init__(self, folder: Path, index: Index, split: str) -> None:
        shards = index.splits[split].shards
        self.folder = folder
        self.split = split
        self.vocab_size = index.vocab_size
        self.eos_id = index.eos_id
        self.num_tokens = sum(shard.num_tokens for shard in shards)
        self.num_bytes = index.splits[split].text_bytes
        self._files = [shard.file for shard in shards]
        self._starts = np.cumsum([0] + [shard.num_tokens for shard in shards])
        self._ends = np.cumsum(np.concatenate([shard.document_lengths for shard in shards]))
        self.num_documents = len(self._ends)
        self._map = lru_cache(_MAPPED_SHARDS)(partial(map_tokens, folder, index.dtype))

    def num_sequences(self, sequence_length: int) -> int:
        """Return how many sequences there are; the last one may be partly padding."""
        return -(-self.num_tokens // sequence_length)

    def batch(self, ids: Sequence[int] | NDArray[np.int64], sequence_length: int) -> Batch:
        """Return the sequences with these numbers as one batch; number -1 gives a row of padding.

        Raises ValueError for a token id outside the vocabulary, with its file and place.
        """
        shape = (len(ids), sequence_length)
        tokens = np.zeros(shape, np.int64)
        targets = np.full(shape, -1, np.int64)
        document_ids = np.full(shape, -1, np.int32)
        for row, number in enumerate(ids):
            if number >= 0:
                self._fill(int(number), tokens[row], targets[row], document_ids[row])
        document_ids_BS = torch.from_numpy(document_ids)
        return Batch(
            tokens_BS=torch.from_numpy(tokens),
            targets_BS=torch.from_numpy(targets),
            document_ids_BS=document_ids_BS,
            num_documents=count_documents(document_ids_BS),
        )

    def get(self, index: int, sequence_length: int) -> Batch:
        """Return one sequence as a batch of one row."""
        if not 0 <= index < self.num_sequences(sequence_length):
            raise IndexError(f"sequence {index} of {self.num_sequences(sequence_length)}")
        return self.batch([index], sequence_length)

    def _fill(
        self, number: int, tokens: NDArray[np.int64], targets: NDArray[np.int64], document_ids: NDArray[np.int32]
    ) -> None:
        start = number * len(tokens)
        count = min(len(tokens), self.num_tokens - start)
        assert count > 0, (number, len(tokens), self.num_tokens)
        # One token past the end, the target of the last position. The very last token of a split ends a document.
        row = self._read(start, min(start + count + 1, self.num_tokens))
        tokens[:count] = row[:count]
        targets[: len(row) - 1] = row[1:]
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(self._ends, start + count, side="right")
        ends = self._ends[first:last] - start
        targets[ends - 1] = -1
        starts_here = np.zeros(count, np.int32)
        starts_here[ends[ends < count]] = 1
        np.cumsum(starts_here, out=document_ids[:count])

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        row = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        place = start
        while place < stop:
            offset = place - int(self._starts[shard])
            until = min(stop, int(self._starts[shard + 1]))
            part = row[place - start : until - start]
            part[:] = self._map(self._files[shard])[offset : offset + len(part)]
            if part.max() >= self.vocab_size:
                at = int(np.argmax(part >= self.vocab_size))
                raise ValueError(
                    f"{self.folder / self._files[shard]}: token {offset + at} is {part[at]}, outside the vocabulary "
                    f"(0 to {self.vocab_size - 1}); the file is damaged, make the folder again"
                )
            place = until
            shard += 1
        return row


def open_split(folder: str | Path, split: str) -> Sequences:
    """Open one split ("train" or "held_out") of a folder of token files.

    Compares the size of every file of the split with the index; token ids are compared with the vocabulary size when
    they are read. Raises ValueError for a folder without an index, an unknown or empty split, a missing file, and a
    file that is shorter or longer than the index says.
    """
    folder = Path(folder)
    index = read_index(folder)
    known = [name for name, entry in index.splits.items() if entry.shards]
    if split not in known:
        raise ValueError(f"{folder} has no tokens in split {split!r}; splits with tokens: {', '.join(known) or 'none'}")
    check_sizes(folder, index, [split])
    return Sequences(folder, index, split)


def has_tokens(folder: str | Path, split: str) -> bool:
    """Return whether a folder of token files has any token in a split."""
    entry = read_index(folder).splits.get(split)
    return entry is not None and bool(entry.shards)


class TrainBatches:
    """Give the batches of any optimizer step to one data rank, as a pure function of the step number.

    Each epoch is a permutation of all sequences made from (seed, epoch); epoch follows epoch. Step ``n`` takes the
    numbers ``[n * sequences_per_step, (n + 1) * sequences_per_step)`` of that endless order, rank ``data_index`` the
    ``data_index``-th contiguous part of them, cut into micro-batches. So a resumed run needs no state, and the
    sequences of a step are the same for every ``data_size`` and every micro-batch size.
    """

    def __init__(
        self,
        sequences: Sequences,
        sequence_length: int,
        sequences_per_step: int,
        sequences_per_micro_batch: int,
        data_index: int,
        data_size: int,
        seed: int,
    ) -> None:
        unit = data_size * sequences_per_micro_batch
        if sequences_per_step < 1 or unit < 1 or sequences_per_step % unit:
            raise ValueError(
                f"sequences_per_step ({sequences_per_step}) must be a multiple of the data degree ({data_size}) times "
                f"sequences_per_micro_batch ({sequences_per_micro_batch}), so of {unit}"
            )
        assert 0 <= data_index < data_size, (data_index, data_size)
        self.sequences = sequences
        self.sequence_length = sequence_length
        self.sequences_per_step = sequences_per_step
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.data_index = data_index
        self.data_size = data_size
        self.seed = seed
        self.num_sequences = sequences.num_sequences(sequence_length)

    def sequence_ids(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of the sequences that this rank reads in a step, in order."""
        share = self.sequences_per_step // self.data_size
        first = step * self.sequences_per_step + self.data_index * share
        places = np.arange(first, first + share, dtype=np.int64)
        epochs = places // self.num_sequences
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = permute(places[here] % self.num_sequences, self.num_sequences, self.seed, int(epoch))
        return ids

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of this rank in optimizer step ``step`` (from 0)."""
        ids = self.sequence_ids(step).reshape(-1, self.sequences_per_micro_batch)
        return [self.sequences.batch(row, self.sequence_length) for row in ids]


class EvaluationBatches:
    """Give every sequence once, dealt to the data ranks so that all have the same number of micro-batches.

    Ranks take turns, one micro-batch each; where a rank has nothing left it gets padding, up to a micro-batch of
    nothing else, because the collectives of expert parallelism need every rank in every forward pass. Iterate as
    often as you like; ``limit`` takes only so many sequences, spread evenly over the split (0 = all).
    """

    def __init__(
        self,
        sequences: Sequences,
        sequence_length: int,
        sequences_per_micro_batch: int,
        data_index: int,
        data_size: int,
        limit: int = 0,
    ) -> None:
        assert 0 <= data_index < data_size, (data_index, data_size)
        self.sequences = sequences
        self.sequence_length = sequence_length
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.data_index = data_index
        self.data_size = data_size
        available = sequences.num_sequences(sequence_length)
        self.num_sequences = min(limit, available) if limit else available
        self._available = available

    def __len__(self) -> int:
        return -(-self.num_sequences // (self.sequences_per_micro_batch * self.data_size))

    def __iter__(self) -> Iterator[Batch]:
        for turn in range(len(self)):
            first = (turn * self.data_size + self.data_index) * self.sequences_per_micro_batch
            places = np.arange(first, first + self.sequences_per_micro_batch, dtype=np.int64)
            ids = np.where(places < self.num_sequences, places * self._available // self.num_sequences, -1)
            yield self.sequences.batch(ids, self.sequence_length)


class Prefetch:
    """Iterate over the batches of steps ``start`` to ``stop - 1`` while a thread reads one step ahead.

    ``waited_s`` is the time the caller has spent waiting so far. An error in the thread is raised where its step is
    asked for. Use it in a ``with`` block, or call ``close()``: then the thread has ended.
    """

    def __init__(self, batches: TrainBatches, start: int, stop: int, pin_memory: bool) -> None:
        self.waited_s = 0.0
        self._batches = batches
        self._pin_memory = pin_memory
        self._next = start
        self._stop = stop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="coterie-data")
        self._ahead: Future[list[Batch]] | None = None
        self._submit()

    def _submit(self) -> None:
        self._ahead = self._pool.submit(self._read, self._next) if self._next < self._stop else None
        self._next += 1

    def _read(self, step: int) -> list[Batch]:
        batches = self._batches.step(step)
        return [batch.pin_memory() for batch in batches] if self._pin_memory else batches

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._ahead is None:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            batches = self._ahead.result()
        except BaseException:
            self.close()
            raise
        self.waited_s += time.perf_counter() - began
        self._submit()
        return batches

    def close(self) -> None:
        """End the thread; waits for a read under way."""
        self._ahead = None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetch(batches: TrainBatches, start: int, stop: int, *, pin_memory: bool = False) -> Prefetch:
    """Return an iterator over the batches of steps ``start`` to ``stop - 1`` that reads one step ahead in a thread.

    With ``pin_memory`` the thread also puts them where a GPU copies from by itself.
    """
    return Prefetch(batches, start, stop, pin_memory)


def permute(places: NDArray[np.int64], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return where a permutation of ``range(count)``, chosen by seed and epoch, sends each of ``places``.

    A Feistel network over the next even number of bits, walked until the value is below ``count`` (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002): no table of all sequences, and no numpy version can change it.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds: NDArray[np.uint64] = np.arange(6, dtype=np.uint64)
    keys = _mix(rounds + _mix(np.uint64(epoch) + _mix(np.full(6, seed % 2**64, np.uint64))))
    values = places.astype(np.uint64)
    todo = np.ones(len(values), bool)
    while todo.any():
        left, right = values[todo] >> np.uint64(half), values[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[todo] = (left << np.uint64(half)) | right
        todo = values >= count
    return values.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
