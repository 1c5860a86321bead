"""What a run leaves on disk beside its checkpoints: its config, its model spec and its tokenizer."""

import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie_export import ModelSpec

from coterie_trainer.config import Config, config_to_dict
from coterie_trainer.data.shards import read_index

__all__ = ["TOKENIZER_FILES", "check_same_run", "locked", "read_spec", "tokenizer_files", "write_run"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_RECORD = "run.json"
# What may not change between the start of a run and its continuation: it would be another run. The rest may: more
# steps, another layout, other evaluations.
_FIXED = (
    "seed",
    "dtype",
    "model.",
    "data.sequence_length",
    "train.sequences_per_step",
    "train.assignment",
    "train.balance_",
    "train.bias_",
    "train.z_coefficient",
    "tokens",
)
_FREE = ("model.expert_backend",)


@contextmanager
def locked(run_folder: str | Path) -> Iterator[None]:
    """Hold the run folder for this process; the lock ends with the process, however it ends.

    Raises:
        ValueError: another run holds it.
    """
    folder = Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is in use by a run that has not ended; wait for it, or set run_folder to another folder"
            ) from None
        yield


def write_run(config: Config, spec: ModelSpec) -> None:
    """Write ``run.json`` (config and model spec) and copy the tokenizer into the run folder."""
    folder = Path(config.run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"config": config_to_dict(config), "spec": dataclasses.asdict(spec), "tokens": _token_digest(config)}
    temporary = folder / f"{_RECORD}.incomplete"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / _RECORD)
    for name in TOKENIZER_FILES:
        source = Path(config.data.path) / name
        if source.is_file():
            shutil.copyfile(source, folder / name)


def check_same_run(config: Config) -> None:
    """Refuse to continue a run folder with another model, other tokens, another objective or another seed.

    Raises:
        ValueError: names every setting that differs, with both values; or the token folder has no index.
    """
    read_index(config.data.path)
    path = Path(config.run_folder) / _RECORD
    if not path.is_file():
        return
    record = _read_record(path)
    before = _flatten(record["config"]) | {"tokens": record["tokens"]}
    now = _flatten(json.loads(json.dumps(config_to_dict(config)))) | {"tokens": _token_digest(config)}
    differences = [
        f"{key} was {before[key]!r} and is now {now[key]!r}"
        for key in sorted(before.keys() & now.keys())
        if key.startswith(_FIXED) and key not in _FREE and before[key] != now[key]
    ]
    if differences:
        raise ValueError(
            f"{config.run_folder} holds a run with other settings: {'; '.join(differences)}. "
            "Set run_folder to a new folder, or restore the old values to go on with this run."
        )


def read_spec(run: str | Path) -> ModelSpec:
    """Return the model spec of a run.

    Raises:
        ValueError: the folder is no run, or its record is damaged.
    """
    path = Path(run) / _RECORD
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: it has no {_RECORD}")
    return ModelSpec(**_read_record(path)["spec"])


def tokenizer_files(folder: str | Path) -> dict[str, Path]:
    """Return the tokenizer files of a run or token folder by name."""
    paths = {name: Path(folder) / name for name in TOKENIZER_FILES}
    return {name: path for name, path in paths.items() if path.is_file()}


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not {"config", "spec", "tokens"} <= record.keys():
            raise ValueError("it lacks a part")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}; set run_folder to another folder") from error
    return dict(record)


def _token_digest(config: Config) -> str:
    """Return a short digest of the token folder's index, which holds the checksums of all token files."""
    return hashlib.sha256((Path(config.data.path) / "index.json").read_bytes()).hexdigest()[:16]


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
