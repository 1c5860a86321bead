"""Packing by hand, a plain packer to compare with, and a writer of small folders of token files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from coterie_trainer.data.shards import TokenWriter
from numpy.typing import ArrayLike

Rows = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class PackingCase:
    """Documents, a sequence length, and the rows that must come out (`reason` says what the case is for)."""

    reason: str
    documents: Rows
    sequence_length: int
    tokens: Rows
    targets: Rows
    document_ids: Rows


FIVE_ZERO_THREE = [[1, 2, 3, 4, 9], [], [5, 6, 9]]

PACKING_CASES = [
    PackingCase(
        reason="a document goes on in the next sequence, its target is one token past the end",
        documents=FIVE_ZERO_THREE,
        sequence_length=4,
        tokens=[[1, 2, 3, 4], [9, 5, 6, 9]],
        targets=[[2, 3, 4, 9], [-1, 6, 9, -1]],
        document_ids=[[0, 0, 0, 0], [0, 1, 1, 1]],
    ),
    PackingCase(
        reason="the last sequence is padded",
        documents=FIVE_ZERO_THREE,
        sequence_length=3,
        tokens=[[1, 2, 3], [4, 9, 5], [6, 9, 0]],
        targets=[[2, 3, 4], [9, -1, 6], [9, -1, -1]],
        document_ids=[[0, 0, 0], [0, 0, 1], [0, 0, -1]],
    ),
    PackingCase(
        reason="a document ends where the sequence ends",
        documents=FIVE_ZERO_THREE,
        sequence_length=5,
        tokens=[[1, 2, 3, 4, 9], [5, 6, 9, 0, 0]],
        targets=[[2, 3, 4, 9, -1], [6, 9, -1, -1, -1]],
        document_ids=[[0, 0, 0, 0, 0], [0, 0, 0, -1, -1]],
    ),
    PackingCase(
        reason="everything fits exactly",
        documents=FIVE_ZERO_THREE,
        sequence_length=8,
        tokens=[[1, 2, 3, 4, 9, 5, 6, 9]],
        targets=[[2, 3, 4, 9, -1, 6, 9, -1]],
        document_ids=[[0, 0, 0, 0, 0, 1, 1, 1]],
    ),
    PackingCase(
        reason="one sequence longer than all there is",
        documents=FIVE_ZERO_THREE,
        sequence_length=10,
        tokens=[[1, 2, 3, 4, 9, 5, 6, 9, 0, 0]],
        targets=[[2, 3, 4, 9, -1, 6, 9, -1, -1, -1]],
        document_ids=[[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]],
    ),
    PackingCase(
        reason="sequences of one token, documents of one token",
        documents=[[9], [9], [3, 9]],
        sequence_length=1,
        tokens=[[9], [9], [3], [9]],
        targets=[[-1], [-1], [9], [-1]],
        document_ids=[[0], [0], [0], [0]],
    ),
]


def write_folder(
    folder: Path,
    documents: Sequence[ArrayLike],
    *,
    held_out: Sequence[ArrayLike] = (),
    vocab_size: int = 10,
    eos_id: int = 9,
    dtype: str | None = None,
    shard_bytes: int = 2**20,
) -> Path:
    with TokenWriter(folder, vocab_size=vocab_size, eos_id=eos_id, dtype=dtype, shard_bytes=shard_bytes) as writer:
        for split, rows in (("train", documents), ("held_out", held_out)):
            for row in rows:
                writer.add(split, row, text_bytes=3 * np.size(row))
    return folder


def pack_plainly(documents: Sequence[Sequence[int]], sequence_length: int) -> tuple[Rows, Rows, Rows]:
    """Return tokens, targets and document ids of all sequences, one token at a time."""
    tokens: Rows = []
    targets: Rows = []
    ids: Rows = []
    for number, document in enumerate(document for document in documents if document):
        for place, token in enumerate(document):
            if not tokens or len(tokens[-1]) == sequence_length:
                tokens.append([])
                targets.append([])
                ids.append([])
                first = number
            tokens[-1].append(token)
            targets[-1].append(document[place + 1] if place + 1 < len(document) else -1)
            ids[-1].append(number - first)
    missing = sequence_length - len(tokens[-1])
    tokens[-1] += [0] * missing
    targets[-1] += [-1] * missing
    ids[-1] += [-1] * missing
    return tokens, targets, ids
