import tempfile
from pathlib import Path

import pytest
import torch
from coterie_trainer.data.dataset import Batch, EvaluationBatches, open_split
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.cases import PACKING_CASES, PackingCase, pack_plainly, write_folder


def as_lists(batch: Batch) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    return batch.tokens_BS.tolist(), batch.targets_BS.tolist(), batch.document_ids_BS.tolist()


@pytest.mark.parametrize("case", PACKING_CASES, ids=lambda case: case.reason)
@pytest.mark.parametrize("shard_bytes", [1, 8, 2**20], ids=["a shard each", "small shards", "one shard"])
def test_packs_as_by_hand(tmp_path: Path, case: PackingCase, shard_bytes: int) -> None:
    folder = write_folder(tmp_path / "tokens", case.documents, shard_bytes=shard_bytes)
    sequences = open_split(folder, "train")
    count = sequences.num_sequences(case.sequence_length)
    assert count == len(case.tokens)
    batch = sequences.batch(range(count), case.sequence_length)
    assert as_lists(batch) == (case.tokens, case.targets, case.document_ids)
    assert (batch.tokens_BS.dtype, batch.targets_BS.dtype) == (torch.int64, torch.int64)
    assert batch.document_ids_BS.dtype == torch.int32
    assert as_lists(sequences.get(count - 1, case.sequence_length))[0] == case.tokens[-1:]
    # The plain packer of the property test and the benchmark is held to the same numbers.
    assert pack_plainly(case.documents, case.sequence_length) == (case.tokens, case.targets, case.document_ids)


def test_counts_documents_of_five_zero_and_three_tokens(tmp_path: Path) -> None:
    sequences = open_split(write_folder(tmp_path / "tokens", [[1, 2, 3, 4, 9], [], [5, 6, 9]]), "train")
    assert (sequences.num_tokens, sequences.num_documents, sequences.num_bytes) == (8, 2, 24)
    ids = sequences.get(0, 8).document_ids_BS[0]
    assert torch.unique(ids, return_counts=True)[1].tolist() == [5, 3]  # no span of length 0 in between


documents_strategy = st.lists(
    st.lists(st.integers(0, 8), max_size=12).map(lambda ids: [*ids, 9] if ids else []), min_size=1, max_size=12
).filter(any)


@settings(max_examples=60, deadline=None)
@given(documents=documents_strategy, sequence_length=st.integers(1, 17), shard_bytes=st.integers(1, 60))
def test_every_token_once_and_no_target_across_documents(
    documents: list[list[int]], sequence_length: int, shard_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sequences = open_split(write_folder(Path(folder) / "t", documents, shard_bytes=shard_bytes), "train")
        count = sequences.num_sequences(sequence_length)
        batch = sequences.batch(range(count), sequence_length)
        assert as_lists(batch) == pack_plainly(documents, sequence_length)
        real = batch.document_ids_BS >= 0
        assert batch.tokens_BS[real].tolist() == [token for document in documents for token in document]
        num_targets = sum(len(document) - 1 for document in documents if document)
        assert int((batch.targets_BS >= 0).sum()) == num_targets


def test_row_minus_one_is_padding(tmp_path: Path) -> None:
    sequences = open_split(write_folder(tmp_path / "tokens", [[1, 2, 9]]), "train")
    assert as_lists(sequences.batch([-1, 0], 3)) == (
        [[0, 0, 0], [1, 2, 9]],
        [[-1, -1, -1], [2, 9, -1]],
        [[-1, -1, -1], [0, 0, 0]],
    )
    with pytest.raises(IndexError, match="sequence 1 of 1"):
        sequences.get(1, 3)


def test_evaluation_deals_five_sequences_to_two_ranks(tmp_path: Path) -> None:
    sequences = open_split(write_folder(tmp_path / "tokens", [[1, 2, 3, 4, 9]]), "train")
    dealt = []
    for rank in range(2):
        batches = EvaluationBatches(sequences, 1, 2, rank, 2)
        assert len(batches) == 2
        dealt.append([batch.tokens_BS.flatten().tolist() for batch in batches])
        padding = [(batch.document_ids_BS < 0).flatten().tolist() for batch in batches]
        assert padding == [[[False, False], [False, True]], [[False, False], [True, True]]][rank]
    assert dealt == [[[1, 2], [9, 0]], [[3, 4], [0, 0]]]
    limited = EvaluationBatches(sequences, 1, 2, 0, 1, limit=3)
    assert [batch.tokens_BS.flatten().tolist() for batch in limited] == [[1, 2], [4, 0]]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), micro=st.integers(1, 5), world=st.integers(1, 5), limit=st.integers(0, 45))
def test_evaluation_gives_every_sequence_once(count: int, micro: int, world: int, limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "t", [[*range(1, count), 99]], vocab_size=100, eos_id=99)
        sequences = open_split(path, "train")
        lengths, seen = set(), []
        for rank in range(world):
            batches = list(EvaluationBatches(sequences, 1, micro, rank, world, limit=limit))
            lengths.add(len(batches))
            for batch in batches:
                assert batch.tokens_BS.shape == (micro, 1)
                seen += batch.tokens_BS[batch.document_ids_BS >= 0].tolist()
        assert len(lengths) == 1
        chosen = min(limit or count, count)
        assert sorted(seen) == [[*range(1, count), 99][number * count // chosen] for number in range(chosen)]
