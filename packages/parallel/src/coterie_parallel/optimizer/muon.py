"""Muon on shards: the momentum is sharded like any state, and each matrix is made orthogonal by one rank.

A step has three parts. Every rank updates its shard of the momentum. An exchange brings each matrix together on its
owner, which orthogonalises it; a second one brings the result back. Owners are chosen so that all ranks have about the
same work. Both exchanges move a shard in the dtype of the iteration: together 1 / (size of the axis) of what a
reduce-scatter of fp32 gradients moves.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import exchange_rows
from coterie_parallel.gradients import BucketLayout

__all__ = ["MatrixExchange", "orthogonalize"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MAX_BATCH_NUMEL = 2**26

Range = tuple[int, int]


def orthogonalize(matrices_KRC: Tensor, *, num_iterations: int = 5) -> Tensor:
    """Return about ``U V^T`` for each matrix ``U S V^T`` by a quintic Newton-Schulz iteration, in the input's dtype.

    The coefficients are those of Keller Jordan (https://github.com/KellerJordan/Muon): they move every singular value
    that is not tiny to between about 0.7 and 1.2, not to 1. A matrix of zeros stays one.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices_KRC.shape[-2] > matrices_KRC.shape[-1]
    x = matrices_KRC.mT if is_tall else matrices_KRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """One matrix: its shape, and where each rank holds a part of it, as ranges of the rank's shards in a row."""

    shape: tuple[int, int]
    parts: tuple[Range, ...]

    @property
    def cost(self) -> int:
        return math.prod(self.shape) * min(self.shape)


class MatrixExchange:
    """Brings the matrices of some buckets of one axis to their owners and back.

    Args:
        layouts: the buckets, all of the same axis.
        shapes: local shape of each parameter, two or three dimensions.
        axis: the axis; None or of one rank where nothing is exchanged.
    """

    def __init__(self, layouts: Sequence[BucketLayout], shapes: Mapping[str, Sequence[int]], axis: Axis | None) -> None:
        self._axis = axis if axis is not None else Axis.single("none")
        ranks, own = range(self._axis.size), self._axis.index
        matrices = sorted(_matrices(layouts, shapes, self._axis.size), key=lambda matrix: matrix.shape)
        owners = owners_by_cost([matrix.cost for matrix in matrices], self._axis.size)
        owned = [[matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank] for rank in ranks]
        self._shapes = [matrix.shape for matrix in owned[own]]
        # A rank sends to each owner its parts of the owner's matrices, in the order of the matrices.
        self._sent = [matrix.parts[own] for rank in ranks for matrix in owned[rank] if _length(matrix.parts[own])]
        self._send_counts = [sum(_length(matrix.parts[own]) for matrix in owned[rank]) for rank in ranks]
        self._receive_counts = [sum(_length(matrix.parts[rank]) for matrix in owned[own]) for rank in ranks]
        # The owner finds the parts of each rank one behind the other, and puts those of each matrix together.
        received = _consecutive([matrix.parts[rank] for rank in ranks for matrix in owned[own]])
        count = len(owned[own])
        self._to_matrices = [received[rank * count + number] for number in range(count) for rank in ranks]
        whole = _consecutive([matrix.parts[rank] for matrix in owned[own] for rank in ranks])
        self._to_ranks = [whole[number * len(ranks) + rank] for rank in ranks for number in range(count)]

    def orthogonalized(self, shards_N: Tensor, *, num_iterations: int) -> Tensor:
        """Return the orthogonalised matrices in the places of the given ones; padding becomes zero.

        Args:
            shards_N: this rank's shards of the buckets in a row, in the dtype of the iteration.
            num_iterations: of the Newton-Schulz iteration.
        """
        sent = _pick(shards_N, self._sent)
        received = exchange_rows(sent, self._send_counts, self._receive_counts, self._axis)
        done = [part.flatten() for part in self._batches(_pick(received, self._to_matrices), num_iterations)]
        back = _pick(torch.cat(done), self._to_ranks) if done else received
        returned = exchange_rows(back, self._receive_counts, self._send_counts, self._axis)
        result = torch.zeros_like(shards_N)
        if self._sent:
            places = [result[first:last] for first, last in self._sent]
            torch._foreach_copy_(places, list(torch.split(returned, [_length(part) for part in self._sent])))
        return result

    def _batches(self, whole: Tensor, num_iterations: int) -> Iterator[Tensor]:
        start = 0
        for (num_rows, num_columns), group in itertools.groupby(self._shapes):
            numel = num_rows * num_columns
            left = len(list(group))
            while left:
                count = min(left, max(1, _MAX_BATCH_NUMEL // numel))
                matrices_KRC = whole.narrow(0, start, count * numel).view(count, num_rows, num_columns)
                yield orthogonalize(matrices_KRC, num_iterations=num_iterations)
                start += count * numel
                left -= count


def owners_by_cost(costs: Sequence[int], size: int) -> list[int]:
    """Return which of ``size`` ranks owns each matrix: runs of about equal cost, none above the mean by a matrix."""
    total = sum(costs)
    owners = []
    before = 0
    for cost in costs:
        owners.append(min(size - 1, size * (2 * before + cost) // max(1, 2 * total)))
        before += cost
    return owners


def _matrices(layouts: Sequence[BucketLayout], shapes: Mapping[str, Sequence[int]], size: int) -> Iterator[_Matrix]:
    offset = 0  # of the bucket's shard among the shards in a row
    for layout in layouts:
        for slot in layout.slots:
            *many, num_rows, num_columns = shapes[slot.name]
            pieces = [layout.piece(slot, rank) for rank in range(size)]
            for number in range(math.prod(many)):
                begin, end = number * num_rows * num_columns, (number + 1) * num_rows * num_columns
                parts = []
                for rank, (first, last) in enumerate(pieces):
                    low, high = max(begin, first), max(max(begin, first), min(end, last))
                    start = offset + slot.start + low - rank * layout.shard_numel
                    parts.append((start, start + high - low) if high > low else (0, 0))
                yield _Matrix(shape=(num_rows, num_columns), parts=tuple(parts))
        offset += layout.shard_numel


def _consecutive(parts: Sequence[Range]) -> list[Range]:
    """Return where parts lie that were put one behind the other."""
    ends = list(itertools.accumulate((_length(part) for part in parts), initial=0))
    return list(itertools.pairwise(ends))


def _length(part: Range) -> int:
    return part[1] - part[0]


def _pick(source: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the elements of some ranges of a vector, one range behind the other."""
    merged: list[Range] = []
    for first, last in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        elif last > first:
            merged.append((first, last))
    return torch.cat([source[first:last] for first, last in merged]) if merged else source[:0]
