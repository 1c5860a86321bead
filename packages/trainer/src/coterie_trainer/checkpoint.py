"""Checkpoints by `torch.distributed.checkpoint`, under global tensor names, complete or not there at all.

A checkpoint is written to ``checkpoints/step-00000100.incomplete`` and renamed to ``checkpoints/step-00000100`` when
every rank has written its part; older ones are removed after that. So a run that is killed at any moment finds its
last good checkpoint, and what a killed save left behind is swept away by the next save.
"""

import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from coterie_parallel import Axis, Chunk, Placement, all_gather_objects
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from coterie_trainer.chunks import ChunkLoadPlanner, ChunkSavePlanner

__all__ = ["CheckpointError", "Checkpoints", "global_tensors", "read_tensors"]

_NAME = re.compile(r"step-(\d{8})")
_RESERVE_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the folder and what to do."""


class Checkpoints:
    """The checkpoint folder of one run.

    Args:
        run_folder: folder of the run; checkpoints go to its ``checkpoints`` subfolder.
        world: axis of all ranks, each of which makes every call; None for one process.
        pipeline: axis of the ranks that hold different layers; None where every rank has some of each.
        keep: number of newest checkpoints that stay.
    """

    def __init__(
        self, run_folder: str | Path, world: Axis | None = None, pipeline: Axis | None = None, *, keep: int = 1
    ) -> None:
        self.folder = Path(run_folder) / "checkpoints"
        self.world = world if world is not None else Axis.single("world")
        self.pipeline = pipeline if pipeline is not None else Axis.single("pipeline")
        self.keep = keep

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, None when there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of one step."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Mapping[str, Tensor | Chunk]) -> Path:
        """Write ``tensors`` as the checkpoint of ``step``, then remove the ones that are no longer kept.

        Args:
            step: number of optimizer steps done.
            tensors: global names to plain tensors, which are equal on all ranks and written once, or chunks, of which
                each rank writes its own.

        Raises:
            CheckpointError: on every rank, when any rank could not write; earlier checkpoints are untouched.
        """
        target = self.path(step)
        incomplete = target.with_name(target.name + ".incomplete")
        needed_bytes = sum(all_gather_objects(_stored_bytes(tensors), self.pipeline))
        self._agree(self._prepare(incomplete, needed_bytes) if self.world.index == 0 else "")
        failure = ""
        try:
            with _single_process_allowed():
                planner = ChunkSavePlanner(_chunks(tensors))
                save(_plain(tensors), checkpoint_id=incomplete, planner=planner, **self._process_group())
        except (Exception, CheckpointException) as error:
            failure = f"the checkpoint {target} could not be written: {_cause(error)}{self._kept_text()}"
        try:
            self._agree(failure)
        except CheckpointError:
            if self.world.index == 0:
                shutil.rmtree(incomplete, ignore_errors=True)
            raise
        self._agree(self._publish(incomplete, target) if self.world.index == 0 else "")
        return target

    def load(self, step: int, tensors: Mapping[str, Tensor | Chunk]) -> None:
        """Read the checkpoint of ``step`` into ``tensors``, in place, whatever layout it was written in.

        Of what is given as a chunk, a rank reads no more than its chunk.

        Raises:
            CheckpointError: a file or a tensor is missing, or a shape differs.
        """
        _check_files(self.path(step))
        try:
            with _single_process_allowed():
                planner = ChunkLoadPlanner(_chunks(tensors))
                load(_plain(tensors), checkpoint_id=self.path(step), planner=planner, **self._process_group())
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"the checkpoint {self.path(step)} could not be read: {_cause(error)}") from error

    def _process_group(self) -> dict[str, object]:
        return {"no_dist": True} if self.world.group is None else {"process_group": self.world.group}

    def _prepare(self, incomplete: Path, needed_bytes: int) -> str:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.incomplete"):
                shutil.rmtree(leftover)
            incomplete.mkdir()
            free_bytes = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"cannot write to {self.folder}: {error.strerror}{self._kept_text()}"
        if free_bytes < needed_bytes + _RESERVE_BYTES:
            incomplete.rmdir()
            return (
                f"not enough disk space for {incomplete.with_suffix('')}: it needs {needed_bytes:,} bytes and "
                f"{free_bytes:,} are free{self._kept_text()}"
            )
        return ""

    def _publish(self, incomplete: Path, target: Path) -> str:
        try:
            if target.exists():
                shutil.rmtree(target)
            incomplete.rename(target)
            _sync_folder(self.folder)
        except OSError as error:
            return f"the checkpoint {target} could not be put in its place: {error}{self._kept_text()}"
        try:
            for step in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(step))
        except OSError as error:
            return f"an older checkpoint could not be removed: {error}{self._kept_text()}"
        return ""

    def _kept_text(self) -> str:
        step = self.latest_step()
        return "" if step is None else f"; the checkpoint of step {step} is intact"

    def _agree(self, failure: str) -> None:
        """Raise on every rank when any rank names a failure; also a barrier."""
        failures = [text for text in all_gather_objects(failure, self.world) if text]
        if failures:
            raise CheckpointError(failures[0])


def global_tensors(
    tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], expert_axis: Axis
) -> dict[str, Tensor | Chunk]:
    """Return ``tensors`` with each one that is split over the expert axis as a chunk of the tensor of all experts.

    Args:
        tensors: local tensors; a name is a prefix and a parameter name ("model/" + name).
        placements: placement of each parameter name.
        expert_axis: the axis over which experts are split, on dimension 0.
    """
    found: dict[str, Tensor | Chunk] = {}
    for name, tensor in tensors.items():
        placement = placements.get(name.rpartition("/")[2])
        if placement is None or expert_axis.name not in placement.sharded_over:
            found[name] = tensor
            continue
        num_local, *others = tensor.shape
        found[name] = Chunk(
            tensor=tensor,
            offsets=(expert_axis.index * num_local, *(0 for _ in others)),
            global_shape=(expert_axis.size * num_local, *others),
        )
    return found


def read_tensors(path: str | Path, prefix: str) -> dict[str, Tensor]:
    """Read, in one process, every tensor of a checkpoint whose name starts with ``prefix``; names come without it.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or a file of it is damaged.
    """
    path = Path(path)
    _check_files(path)
    metadata = FileSystemReader(path).read_metadata()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    try:
        with _single_process_allowed():
            load(tensors, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"the checkpoint {path} could not be read: {_cause(error)}") from error
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items()}


def _check_files(path: Path) -> None:
    """Raise if a file that the checkpoint's own metadata names is not there, with how many are."""
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no complete checkpoint: its .metadata file is missing")
    metadata = FileSystemReader(path).read_metadata()
    named = sorted({entry.relative_path for entry in (metadata.storage_data or {}).values()})
    missing = [name for name in named if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"the checkpoint {path} is not whole: {len(named) - len(missing)} of {len(named)} files are there, "
            f"missing {', '.join(missing[:5])}"
        )


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    """Silence the warning that DCP gives for a run of one process, which is a normal run here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _stored_bytes(tensors: Mapping[str, Tensor | Chunk]) -> int:
    """Return the bytes of all ranks of a stage together: a chunk counts as the whole tensor that it belongs to."""
    found = 0
    for value in tensors.values():
        shape, one = (value.global_shape, value.tensor) if isinstance(value, Chunk) else (value.shape, value)
        found += math.prod(shape) * one.element_size()
    return found


def _plain(tensors: Mapping[str, Tensor | Chunk]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


def _chunks(tensors: Mapping[str, Tensor | Chunk]) -> dict[str, Chunk]:
    return {name: value for name, value in tensors.items() if isinstance(value, Chunk)}


def _cause(error: BaseException) -> str:
    """Return the innermost reason of a failed save or load in one line, without the traceback DCP adds."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {_cause(inner)}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
