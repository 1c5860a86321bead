import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coterie_trainer.data.dataset import Batch, TrainBatches, open_split, prefetch

from trainer.data.cases import write_folder


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("coterie-data")]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class RecordedBatches(TrainBatches):
    """Train batches that note which steps were read, may be slow, and may fail at one step."""

    def __init__(self, folder: Path, *, sleep_s: float = 0.0, fails_at: int = -1) -> None:
        super().__init__(open_split(folder, "train"), 1, 2, 1, 0, 1, 0)
        self.read: list[int] = []
        self.sleep_s = sleep_s
        self.fails_at = fails_at

    def step(self, step: int) -> list[Batch]:
        time.sleep(self.sleep_s)
        if step == self.fails_at:
            raise ValueError(f"step {step} cannot be read")
        batches = super().step(step)
        self.read.append(step)
        return batches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tokens", [[1, 2, 3, 4, 5, 6, 7, 9]])


def test_gives_the_batches_of_each_step_in_order(folder: Path) -> None:
    batches = RecordedBatches(folder)
    with prefetch(batches, 3, 8) as steps:
        got = list(steps)
    assert batches.read == [3, 4, 5, 6, 7]
    for step, rows in zip(range(3, 8), got, strict=True):
        for ours, expected in zip(rows, batches.step(step), strict=True):
            assert torch.equal(ours.tokens_BS, expected.tokens_BS)
    assert data_threads() == []
    assert list(prefetch(batches, 4, 4)) == []


def test_reads_one_step_ahead_and_no_more(folder: Path) -> None:
    batches = RecordedBatches(folder)
    with prefetch(batches, 0, 10) as steps:
        next(steps)
        wait_until(lambda: batches.read == [0, 1])
        time.sleep(0.02)
        assert batches.read == [0, 1]


def test_counts_the_seconds_waited(folder: Path) -> None:
    batches = RecordedBatches(folder, sleep_s=0.4)
    with prefetch(batches, 0, 2) as steps:
        next(steps)
        first_s = steps.waited_s
        assert 0.2 < first_s < 10
        wait_until(lambda: batches.read == [0, 1])  # the caller computes meanwhile
        next(steps)
        assert steps.waited_s - first_s < 0.1


def test_an_error_arrives_where_its_step_is_asked_for(folder: Path) -> None:
    with prefetch(RecordedBatches(folder, fails_at=2), 0, 5) as steps:
        next(steps)
        next(steps)
        with pytest.raises(ValueError, match="step 2 cannot be read"):
            next(steps)
        assert data_threads() == []
        with pytest.raises(StopIteration):
            next(steps)


def test_leaves_no_thread_when_the_loop_is_left_early(folder: Path) -> None:
    steps = prefetch(RecordedBatches(folder, sleep_s=0.05), 0, 100)

    def stop_after_one() -> None:
        with steps:
            next(steps)
            assert data_threads() != []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_after_one()
    assert data_threads() == []
    steps.close()
