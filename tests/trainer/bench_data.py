"""Reading a step's batches from token files, against a loop that does all of it and mapped slices that do a part."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from coterie_trainer.data.dataset import Batch, TrainBatches, open_split
from support.speed import Pair

from trainer.data.cases import pack_plainly, write_folder

_LENGTH = 1024
_SEQUENCES = 16


def _documents() -> list[list[int]]:
    """Return documents of 1 to 700 tokens that fill the sequences exactly; a step reads each sequence once."""
    generator = np.random.default_rng(0)
    ends = np.cumsum(generator.integers(1, 700, 1000))
    ends = [0, *ends[ends < _LENGTH * _SEQUENCES].tolist(), _LENGTH * _SEQUENCES]
    return [[*generator.integers(0, 4095, size - 1).tolist(), 4095] for size in np.diff(ends)]


def bench_step() -> Iterator[Pair]:
    documents = _documents()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "tokens", documents, vocab_size=4096, eos_id=4095)
        batches = TrainBatches(open_split(folder, "train"), _LENGTH, _SEQUENCES, _SEQUENCES, 0, 1, 0)
        order = torch.from_numpy(batches.sequence_ids(0))
        mapped = np.memmap(folder / "train/part-00000.npy", "<u2", "r")

        def ours() -> Batch:
            return batches.step(0)[0]

        def token_loop() -> list[torch.Tensor]:
            return [torch.tensor(rows)[order] for rows in pack_plainly(documents, _LENGTH)]

        def mapped_slices() -> torch.Tensor:
            rows = [mapped[number * _LENGTH : (number + 1) * _LENGTH] for number in order.tolist()]
            return torch.from_numpy(np.stack(rows).astype(np.int64))

        def check_all() -> None:
            tokens, targets, document_ids = token_loop()
            assert torch.equal(ours().tokens_BS, tokens)
            assert torch.equal(ours().targets_BS, targets)
            assert torch.equal(ours().document_ids_BS, document_ids.int())

        def check_tokens() -> None:
            assert torch.equal(ours().tokens_BS, mapped_slices())

        yield Pair("16 sequences of 1024: a loop over tokens", ours, token_loop, check_all)
        yield Pair("16 sequences of 1024: mapped slices, tokens only", ours, mapped_slices, check_tokens)
