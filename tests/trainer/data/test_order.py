import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from coterie_trainer.data.dataset import TrainBatches, open_split, permute
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.cases import write_folder


def batches_of(folder: Path, rank: int, world: int, *, per_step: int, micro: int = 1, seed: int = 3) -> TrainBatches:
    return TrainBatches(open_split(folder, "train"), 1, per_step, micro, rank, world, seed)


@pytest.fixture
def folder_of_64(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tokens", [[*range(1, 64), 99]], vocab_size=100, eos_id=99)


def test_resume_in_the_second_epoch_goes_on_in_its_own_order(folder_of_64: Path) -> None:
    # 64 samples, 4 a step on 2 ranks: 16 steps an epoch; stop after 3 steps of the second.
    unbroken = [batches_of(folder_of_64, rank, 2, per_step=4) for rank in range(2)]
    history = [[ids.tolist() for ids in map(batches.sequence_ids, range(48))] for batches in unbroken]
    for rank in range(2):
        resumed = batches_of(folder_of_64, rank, 2, per_step=4)
        assert [resumed.sequence_ids(step).tolist() for step in range(19, 48)] == history[rank][19:]
    epochs = [
        [number for step in range(16 * epoch, 16 * epoch + 16) for rank in range(2) for number in history[rank][step]]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1][:12] != epochs[0][:12]


def test_ranks_that_have_read_223_and_220_documents_go_on_from_their_own_place(tmp_path: Path) -> None:
    length, ids = 1000, permute(np.arange(4), 4, 0, 0).tolist()
    numbers = dict(zip(ids, [223, 220, 7, 11], strict=True))  # documents in each sequence; the first two are step 0
    documents = []
    for sequence in range(4):
        sizes = [4] * (numbers[sequence] - 1)
        sizes.append(length - sum(sizes))
        documents += [[1] * (size - 1) + [9] for size in sizes]
    folder = write_folder(tmp_path / "tokens", documents)
    ranks = [TrainBatches(open_split(folder, "train"), length, 2, 1, rank, 2, 0) for rank in range(2)]
    assert [int(batches.step(0)[0].document_ids_BS.max()) + 1 for batches in ranks] == [223, 220]
    assert [int(batches.step(1)[0].document_ids_BS.max()) + 1 for batches in ranks] == [7, 11]
    again = [TrainBatches(open_split(folder, "train"), length, 2, 1, rank, 2, 0) for rank in range(2)]
    assert [int(batches.step(1)[0].document_ids_BS.max()) + 1 for batches in again] == [7, 11]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 50),
    micro=st.integers(1, 3),
    world=st.integers(1, 4),
    rounds=st.integers(1, 3),
    step=st.integers(0, 40),
    seed=st.integers(0, 2**63),
)
def test_a_step_is_the_same_for_every_number_of_ranks(
    count: int, micro: int, world: int, rounds: int, step: int, seed: int
) -> None:
    per_step = micro * world * rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / "t", [[*range(1, count), 99]], vocab_size=100, eos_id=99)
        (whole,) = batches_of(folder, 0, 1, per_step=per_step, micro=per_step, seed=seed).step(step)
        parts = [
            batch
            for rank in range(world)
            for batch in batches_of(folder, rank, world, per_step=per_step, micro=micro, seed=seed).step(step)
        ]
        assert len(parts) == world * rounds
        assert all(part.tokens_BS.shape == (micro, 1) for part in parts)
        assert torch.equal(torch.cat([part.tokens_BS for part in parts]), whole.tokens_BS)
        assert torch.equal(torch.cat([part.targets_BS for part in parts]), whole.targets_BS)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(-5, 2**64), epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation_that_seed_and_epoch_choose(count: int, seed: int, epoch: int) -> None:
    places = np.arange(count)
    order = permute(places, count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(permute(places[::-1], count, seed, epoch), order[::-1])
    if count > 50:
        assert not np.array_equal(order, permute(places, count, seed, epoch + 1))
        assert not np.array_equal(order, permute(places, count, seed + 1, epoch))


def test_the_order_never_changes_between_releases() -> None:
    # A run that is resumed after an update must go on in the order it began with.
    assert permute(np.arange(8), 8, 0, 0).tolist() == [1, 0, 7, 2, 6, 3, 4, 5]
    assert permute(np.arange(8), 8, 0, 1).tolist() == [1, 6, 4, 3, 2, 5, 7, 0]
    assert permute(np.array([10**9, 5]), 2 * 10**9, 0, 3).tolist() == [1299677369, 217578165]


def test_every_place_is_equally_likely() -> None:
    counts = np.zeros((5, 5), np.int64)
    for epoch in range(500):
        counts[np.arange(5), permute(np.arange(5), 5, 1, epoch)] += 1
    # 100 expected, standard deviation 9; the bound is five of them.
    assert np.abs(counts - 100).max() < 45


def test_a_step_that_cannot_be_cut_evenly_is_refused(folder_of_64: Path) -> None:
    with pytest.raises(ValueError, match=r"sequences_per_step \(6\) must be a multiple of .*\(2\).*\(2\), so of 4"):
        batches_of(folder_of_64, 0, 2, per_step=6, micro=2)
