"""Write a model as a Hugging Face folder, read one back, and check one without reading its weights."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie_export.conversion import check_file_shapes, from_hf, to_hf
from coterie_export.families import family_problems, get_family
from coterie_export.family import Family
from coterie_export.spec import ModelSpec, Shape

__all__ = ["export_model", "import_model", "verify"]

_CONFIG, _GENERATION, _INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Bytes of one element, by the names that safetensors gives the dtypes
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def export_model(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    family: str,
    dtype: torch.dtype | None = None,
    tokenizer_files: Mapping[str, bytes | Path] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a model as a folder that transformers loads, and return the folder.

    Everything is checked before anything is written. The files go to a folder beside the target that is renamed when
    it is complete, so the target is whole or absent. At most one shard's worth of converted weights is in memory.

    Args:
        spec: The model.
        tensors: Exactly those of ``spec.tensor_shapes()``, on any device; a tied model's ``head.weight`` may be there
            if it is the memory of ``embed.weight``.
        folder: Where to; must not exist, or be empty.
        family: Name of a family in ``coterie_export.FAMILIES``.
        dtype: Floating-point type of the weights in the files; by default that of the tensors, which then must have
            one. A selection bias is float32 always: its steps are finer than bfloat16.
        tokenizer_files: File name to content, or to a file that is copied byte for byte.
        max_shard_bytes: Tensor bytes of one file, unless one tensor alone is larger.

    Raises:
        ValueError: The family cannot hold the model, a tensor is missing, not known, of a wrong shape, without data or
            sharing memory with another, a file name is taken.
        FileExistsError: The target is there and not empty.
        FileNotFoundError: A tokenizer file is not there.
    """
    if found := family_problems(spec, family):
        raise ValueError("\n".join(found))
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes ({max_shard_bytes}) must be at least 1")
    target, table = Path(folder).resolve(), get_family(family)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder; choose another or remove it")
    tokenizer_files = tokenizer_files or {}
    _check_tokenizer_files(tokenizer_files)
    tensors = _without_tied_head(spec, tensors)
    dtype = _check_values(tensors, dtype)
    views = to_hf(spec, tensors, family=table)
    dtypes = {name: torch.float32 if name.endswith(table.float32) else dtype for name in views}
    sizes = {name: view.numel() * dtypes[name].itemsize for name, view in views.items()}
    shards = _shards(sizes, max_shard_bytes)

    with _complete_or_absent(target) as work:
        _write_json(work / _CONFIG, table.config(spec, dtype))
        ids = {"bos_token_id": spec.bos_id, "eos_token_id": spec.eos_id, "pad_token_id": spec.pad_id}
        _write_json(work / _GENERATION, ids)
        for name, content in tokenizer_files.items():
            (work / name).write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
        files = [_SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
        for file, names in zip(files, shards, strict=True):
            part = {name: views[name].detach().to("cpu", dtypes[name]).contiguous() for name in names}
            save_file(part, work / file, metadata={"format": "pt"})
            # safetensors makes files that only their owner can read; give them the mode of every other new file
            (work / file).chmod((work / _CONFIG).stat().st_mode & 0o777)
        if len(shards) > 1:
            weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            total = {"total_size": sum(sizes.values())}
            _write_json(work / _INDEX, {"metadata": total, "weight_map": weight_map})
        verify(work)
    return target


def import_model(folder: str | os.PathLike[str]) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Return the model in a Hugging Face folder: its spec, and its tensors by canonical name, on the CPU.

    Experts may be stacked or one by one; one file or shards.

    Raises:
        ValueError: The folder fails ``verify``, or holds something that a ModelSpec cannot express.
        FileNotFoundError: There is no such folder, or no ``config.json`` in it.
    """
    inspected = _inspect(Path(folder))
    tensors: dict[str, Tensor] = {}
    for file in inspected.files:
        tensors |= load_file(file)  # mapped, not read: from_hf copies each tensor once
    return inspected.spec, from_hf(inspected.spec, tensors, family=inspected.family)


def verify(folder: str | os.PathLike[str]) -> None:
    """Check that a Hugging Face folder is complete: files, index, sizes, and every tensor's name and shape.

    Reads the headers only, so it takes milliseconds for any size.

    Raises:
        ValueError: Something is missing, left over or of a wrong size; the message names it.
        FileNotFoundError: There is no such folder, or no ``config.json`` in it.
    """
    _inspect(Path(folder))


@dataclass(frozen=True)
class _Inspected:
    spec: ModelSpec
    family: Family
    files: list[Path]


def _inspect(folder: Path) -> _Inspected:
    config = _read_json(folder / _CONFIG)
    if "model_type" not in config:
        raise ValueError(f"{folder / _CONFIG} lacks model_type")
    family = get_family(config["model_type"])
    spec = family.spec(config)
    files, index = _weight_files(folder)
    shapes: dict[str, Shape] = {}
    found = []
    total = 0
    for file in files:
        header = _read_header(file)
        found += [f"{name} is in {file.name} and in an earlier file" for name in shapes if name in header]
        shapes |= {name: shape for name, (shape, _) in header.items()}
        total += sum(size for _, size in header.values())
        if index:
            listed = {name for name, where in index["weight_map"].items() if where == file.name}
            found += [f"the index puts {name} in {file.name}, but it is not there" for name in listed - header.keys()]
            found += [f"{name} is in {file.name}, but the index does not say so" for name in header.keys() - listed]
    if index and index.get("metadata", {}).get("total_size", total) != total:
        found.append(f"the index says total_size = {index['metadata']['total_size']}; the tensors have {total} bytes")
    if found:
        raise ValueError("\n".join([f"{folder} is not complete:", *sorted(found)]))
    check_file_shapes(spec, shapes, family=family)
    return _Inspected(spec, family, files)


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """Return the files that hold the weights and the index, if there is one; every file is there."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if not (folder / _INDEX).exists():
        if present != [_SINGLE]:
            raise ValueError(f"{folder} has no {_INDEX}, so it should hold {_SINGLE} alone; it holds {present}")
        return [folder / _SINGLE], None
    index = _read_json(folder / _INDEX)
    if not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{folder / _INDEX} lacks weight_map")
    named = sorted(set(index["weight_map"].values()))
    found = [f"{name} is named in the index and is not there" for name in named if name not in present]
    found += [f"{name} is there and not named in the index" for name in present if name not in named]
    if found:
        raise ValueError("\n".join([f"{folder} is not complete:", *found]))
    return [folder / name for name in named], index


def _read_header(file: Path) -> dict[str, tuple[Shape, int]]:
    """Return shape and bytes of every tensor in a file; the file is as long as its header says."""
    header = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                view = opened.get_slice(name)
                shape = tuple(view.get_shape())
                if view.get_dtype() not in _ITEM_BYTES:
                    raise ValueError(f"{name} in {file} is {view.get_dtype()}; known: {', '.join(_ITEM_BYTES)}")
                header[name] = (shape, torch.Size(shape).numel() * _ITEM_BYTES[view.get_dtype()])
    except SafetensorError as error:
        raise ValueError(f"{file} is cut or is no safetensors file: {error}") from error
    return header


def _without_tied_head(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not spec.tied_embeddings or "head.weight" not in tensors:
        return tensors
    embed, head = tensors.get("embed.weight"), tensors["head.weight"]
    if embed is None or head.data_ptr() != embed.data_ptr() or head.shape != embed.shape:
        raise ValueError(
            "the model is tied, but head.weight is not the memory of embed.weight: "
            "leave head.weight out, tie it again, or set tied_embeddings = false"
        )
    return {name: tensor for name, tensor in tensors.items() if name != "head.weight"}


def _check_values(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the files; every tensor has data of its own."""
    found = [f"{name} has no data (device meta)" for name, tensor in tensors.items() if tensor.is_meta]
    owner: dict[tuple[str, int], str] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta and tensor.numel():
            first = owner.setdefault((str(tensor.device), tensor.data_ptr()), name)
            if first != name:
                found.append(f"{first} and {name} share memory, but the files would hold two tensors; clone one")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if not name.endswith("selection_bias")}
    if dtype is None and len(dtypes) > 1:
        found.append(f"the tensors have several dtypes ({', '.join(sorted(map(str, dtypes)))}); choose one with dtype=")
    dtype = dtype or next(iter(dtypes), torch.float32)
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        found.append(f"dtype ({dtype}) must be torch.float32, bfloat16, float16 or float64")
    if found:
        raise ValueError("\n".join(found))
    return dtype


def _check_tokenizer_files(files: Mapping[str, bytes | Path]) -> None:
    for name, content in files.items():
        plain = Path(name).name == name and name not in ("", "..")
        if not plain or name in (_CONFIG, _GENERATION, _INDEX) or name.endswith(".safetensors"):
            raise ValueError(f"tokenizer file {name!r} must be a plain file name that the export does not write itself")
        if not isinstance(content, bytes) and not Path(content).is_file():
            raise FileNotFoundError(f"tokenizer file {content} is not there")


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Return the names of each file: in order, each file as full as it gets."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_name(i: int, count: int) -> str:
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


@contextmanager
def _complete_or_absent(target: Path) -> Iterator[Path]:
    """Give a folder beside the target to write to; afterwards it is the target, or after an error it is gone."""
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    work.mkdir(parents=True)
    try:
        yield work
        if target.exists():
            target.rmdir()  # it was empty when we looked; if it no longer is, this says so
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
