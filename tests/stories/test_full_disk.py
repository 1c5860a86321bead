"""A disk that is too small for a checkpoint: the older one stays, all ranks end, and the message tells the bytes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coterie_trainer.checkpoint import CheckpointError, Checkpoints

from stories.conftest import CONFIG

MEBIBYTE = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_the_older_checkpoint_survives(small_disk: Path) -> None:
    def tensors(value: float) -> dict[str, torch.Tensor]:
        return {"model/weight": torch.full((2 * MEBIBYTE,), value)}  # 8 MiB

    checkpoints = Checkpoints(small_disk, keep=2)
    checkpoints.save(1, tensors(1.0))
    (small_disk / "something else").write_bytes(bytes(5 * MEBIBYTE))
    with pytest.raises(CheckpointError, match=r"needs 8,388,608 bytes and 7,\d{3},\d{3} are free; .* step 1 is intact"):
        checkpoints.save(2, tensors(2.0))
    assert os.listdir(small_disk / "checkpoints") == ["step-00000001"]
    loaded = tensors(0.0)
    checkpoints.load(1, loaded)
    assert torch.equal(loaded["model/weight"], tensors(1.0)["model/weight"])


def test_a_run_of_two_ranks_ends_with_one_message(small_disk: Path, small_demo: list[str]) -> None:
    # 16 experts x 3 layers x 3 x 256 x 48 weights with two moments: 20.25 MiB, and the rest.
    overrides = [*small_demo, "train.steps=2", "model.expert_hidden=256", f"run_folder={str(small_disk)!r}"]
    sets = [f"--set={text}" for text in overrides]
    done = subprocess.run(
        [sys.executable, "-m", "coterie_trainer", "train", str(CONFIG), *sets],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    (message,) = done.stderr.splitlines()
    assert re.search(r"not enough disk space for .*step-00000002: it needs [\d,]+ bytes and [\d,]+ are free", message)
    assert not list((small_disk / "checkpoints").iterdir())
