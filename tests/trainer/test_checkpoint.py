import os
import shutil
from pathlib import Path

import pytest
import torch
from coterie_parallel import DENSE, EXPERTS, Mesh, ParallelConfig, make_plan
from coterie_trainer import checkpoint
from coterie_trainer.checkpoint import CheckpointError, Checkpoints, global_tensors, read_tensors
from support.ranks import run_ranks

PLACEMENTS = {"dense": DENSE, "experts": EXPERTS}


def _tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        "model/dense": torch.arange(6.0).view(2, 3) + value,
        "model/experts": torch.arange(8.0).view(4, 2) + value,
        "exp_avg/experts": torch.arange(8.0).view(4, 2) * 10 + value,
        "trainer/step": torch.tensor(7) + int(value),
    }


def test_what_was_saved_is_loaded_and_the_older_one_goes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step() is None
    for step in (1, 2, 10):
        checkpoints.save(step, _tensors(step))
    assert checkpoints.steps() == [2, 10]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000002", "step-00000010"]
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in _tensors().items()}
    checkpoints.load(10, loaded)
    for name, tensor in _tensors(10).items():
        assert torch.equal(loaded[name], tensor), name


def test_leftovers_of_a_killed_save_are_ignored_and_swept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, _tensors())
    leftover = tmp_path / "checkpoints" / "step-00000002.incomplete"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert checkpoints.latest_step() == 1
    checkpoints.save(2, _tensors(2))
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000002"]


def test_too_little_space_names_needed_and_free_bytes_and_keeps_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, _tensors(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    # 6 + 8 + 8 fp32 values and one int64
    with pytest.raises(
        CheckpointError, match=r"it needs 96 bytes and 100 are free; the checkpoint of step 1 is intact"
    ):
        checkpoints.save(2, _tensors(2))
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_write_that_fails_half_way_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, _tensors(1))

    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", fail)
    with pytest.raises(CheckpointError, match=r"No space left on device; the checkpoint of step 1 is intact"):
        checkpoints.save(2, _tensors(2))
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    loaded = _tensors()
    checkpoints.load(1, loaded)
    assert torch.equal(loaded["model/experts"], _tensors(1)["model/experts"])


def test_reading_names_what_is_missing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, _tensors())
    with pytest.raises(CheckpointError, match=r"model/other"):
        checkpoints.load(1, {"model/other": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"[Ss]ize"):
        checkpoints.load(1, {"model/dense": torch.zeros(2, 4)})
    next(path.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"0 of 1 files are there, missing __0_0\.distcp"):
        checkpoints.load(1, _tensors())
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint"):
        read_tensors(path, "model/")


def _save_or_load(rank: int, world: int, folder: str, expert: int, save: bool) -> dict[str, torch.Tensor]:
    plan = make_plan(ParallelConfig(data=world, expert=expert), world)
    with Mesh(plan, rank, timeout_s=30.0) as mesh:
        axis = mesh.axis("expert")
        share = 4 // axis.size
        local = {
            name: tensor[axis.index * share : (axis.index + 1) * share].clone() if "experts" in name else tensor
            for name, tensor in _tensors(5 if save else 0).items()
        }
        checkpoints = Checkpoints(folder, mesh.axis("world"))
        tensors = global_tensors(local, PLACEMENTS, axis)
        if save:
            checkpoints.save(3, tensors)
        else:
            checkpoints.load(3, tensors)
        return local


def test_a_checkpoint_of_two_experts_parts_loads_in_every_layout(tmp_path: Path) -> None:
    run_ranks(_save_or_load, 2, str(tmp_path), 2, True)
    whole = read_tensors(tmp_path / "checkpoints" / "step-00000003", "model/")
    assert whole.keys() == {"dense", "experts"}
    assert torch.equal(whole["experts"], _tensors(5)["model/experts"])
    for world, expert in ((1, 1), (2, 1), (4, 4)):
        parts = run_ranks(_save_or_load, world, str(tmp_path), expert, False)
        for name, tensor in _tensors(5).items():
            values = [part[name] for part in parts]
            loaded = torch.cat(values[:expert]) if "experts" in name else values[-1]
            assert torch.equal(loaded, tensor), name


def test_every_rank_raises_when_one_cannot_write(tmp_path: Path) -> None:
    errors = run_ranks(_one_rank_fails, 2, str(tmp_path))
    assert all("No space left on device" in error for error in errors), errors
    assert os.listdir(tmp_path / "checkpoints") == []


def _one_rank_fails(rank: int, world: int, folder: str) -> str:
    from torch.distributed.checkpoint import filesystem

    if rank == 1:

        def fail(*args: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        filesystem.FileSystemWriter.write_data = fail
    with Mesh(make_plan(ParallelConfig(data=2), 2), rank, timeout_s=30.0) as mesh:
        with pytest.raises(CheckpointError) as caught:
            Checkpoints(folder, mesh.axis("world")).save(1, _tensors())
        return str(caught.value)
