"""Flat token files with a JSON index: write, check, merge.

A folder of token files looks like this:

    index.json  tokenizer.json  tokenizer_config.json  train/part-00000.npy  ...  held_out/part-00000.npy  ...

A part holds token ids as raw little-endian uint16 or uint32, back to back and with **no header**, in spite of its
suffix: the OLMo tool chain writes and reads such files under the name ``.npy``, and ``numpy.memmap`` opens them,
``numpy.load`` does not. Every document ends with the end-of-text token. The index states the type, the vocabulary and,
for every part, its size, checksum and the lengths of its documents; a document never lies in two parts.
"""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "DTYPES",
    "SPLITS",
    "Index",
    "Shard",
    "Split",
    "TokenWriter",
    "check_sizes",
    "map_tokens",
    "merge_token_folders",
    "read_index",
    "smallest_dtype",
    "verify",
]

DTYPES = ("uint16", "uint32")
SPLITS = ("train", "held_out")
_FORMAT = "coterie-tokens"
_VERSION = 1
_INDEX = "index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHARD_BYTES = 256 * 2**20
_CHUNK_TOKENS = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One token file: ``file`` is relative to the folder, ``document_lengths`` are in tokens, end-of-text included."""

    file: str
    num_tokens: int
    num_bytes: int
    sha256: str
    text_bytes: int
    document_lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The files of one split, and how many documents had no text and were left out."""

    shards: tuple[Shard, ...] = ()
    empty_documents: int = 0


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a folder of token files holds; ``settings`` and ``origin`` are free-form and say how it was made."""

    dtype: str
    vocab_size: int
    eos_id: int
    splits: dict[str, Split]
    tokenizer_sha256: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    origin: str = ""


def smallest_dtype(vocab_size: int) -> str:
    """Return the narrowest type of a token file that holds every id of a vocabulary."""
    for dtype in DTYPES:
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"vocab_size ({vocab_size}) is above {2**32}, the most that uint32 token files can hold")


def read_index(folder: str | Path) -> Index:
    """Read ``index.json``; raises ValueError if it is missing, no index of ours, or of a version not known here."""
    path = Path(folder) / _INDEX
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a folder of token files: it has no {_INDEX}; make one with `coterie tokenize`"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != _FORMAT or raw["version"] != _VERSION:
            raise ValueError(
                f"format {raw['format']!r} version {raw['version']}, known: {_FORMAT!r} version {_VERSION}"
            )
        splits = {
            name: Split(
                shards=tuple(
                    Shard(**{**shard, "document_lengths": np.array(shard["document_lengths"], np.int64)})
                    for shard in split["shards"]
                ),
                empty_documents=split["empty_documents"],
            )
            for name, split in raw["splits"].items()
        }
        index = Index(splits=splits, **{key: raw[key] for key in raw.keys() - {"format", "version", "splits"}})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be used: {error or type(error).__name__}") from error
    problems = _index_problems(index)
    if problems:
        raise ValueError(f"{path} contradicts itself: " + "; ".join(problems))
    return index


def _index_problems(index: Index) -> list[str]:
    if index.dtype not in DTYPES:
        return [f"dtype {index.dtype!r} is unknown, known: {', '.join(DTYPES)}"]
    width = np.dtype(index.dtype).itemsize
    problems = []
    for shard in (shard for split in index.splits.values() for shard in split.shards):
        total = int(shard.document_lengths.sum())
        if total != shard.num_tokens or (shard.document_lengths < 1).any():
            problems.append(f"{shard.file} has {shard.num_tokens} tokens, its documents {total}")
        if shard.num_bytes != shard.num_tokens * width:
            problems.append(f"{shard.file} has {shard.num_tokens} {index.dtype} tokens in {shard.num_bytes} bytes")
    return problems


def check_sizes(folder: str | Path, index: Index, splits: Iterable[str] | None = None) -> None:
    """Compare the size of every token file with the index; ValueError names each file with expected and real size."""
    problems = []
    for name in index.splits if splits is None else splits:
        for shard in index.splits[name].shards:
            path = Path(folder) / shard.file
            if not path.is_file():
                problems.append(f"{path} is missing ({shard.num_bytes} bytes expected)")
            elif path.stat().st_size != shard.num_bytes:
                problems.append(f"{path} has {path.stat().st_size} bytes, the index says {shard.num_bytes}")
    if problems:
        raise ValueError("\n".join(problems))


def map_tokens(folder: Path, dtype: str, file: str) -> NDArray[Any]:
    """Map one token file into memory, read-only."""
    return np.memmap(folder / file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def verify(folder: str | Path) -> None:
    """Read every byte of a folder: sizes, checksums, and ids inside the vocabulary; ValueError lists every fault."""
    folder = Path(folder)
    index = read_index(folder)
    check_sizes(folder, index)
    problems = []
    for shard in (shard for split in index.splits.values() for shard in split.shards):
        tokens = map_tokens(folder, index.dtype, shard.file)
        digest = hashlib.sha256()
        largest = 0
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            chunk = tokens[start : start + _CHUNK_TOKENS]
            digest.update(chunk.tobytes())
            largest = max(largest, int(chunk.max()))
        if digest.hexdigest() != shard.sha256:
            problems.append(f"{folder / shard.file} has another checksum than the index says: its content has changed")
        if largest >= index.vocab_size:
            problems.append(f"{folder / shard.file} holds id {largest}, outside vocab_size {index.vocab_size}")
    if problems:
        raise ValueError("\n".join(problems))


class TokenWriter:
    """Write a folder of token files, document by document; use it in a ``with`` block.

    Everything goes to a hidden folder beside ``output``, which gets its final name when the block ends well and is
    removed when it does not. A part ends at the first document boundary at or past ``shard_bytes``. ``dtype`` is the
    narrowest that holds the vocabulary, unless given. Raises ValueError for a type too narrow for ``vocab_size``, an
    ``eos_id`` outside it, and an ``output`` that already has something in it.
    """

    def __init__(
        self,
        output: str | Path,
        *,
        vocab_size: int,
        eos_id: int,
        dtype: str | None = None,
        shard_bytes: int = _SHARD_BYTES,
        settings: dict[str, Any] | None = None,
        origin: str = "",
    ) -> None:
        self.output = Path(output)
        self.dtype = dtype or smallest_dtype(vocab_size)
        problems = []
        if self.dtype not in DTYPES:
            problems.append(f"dtype {self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        elif vocab_size - 1 > np.iinfo(self.dtype).max:
            problems.append(
                f"vocab_size ({vocab_size}) does not fit in {self.dtype}; use dtype {smallest_dtype(vocab_size)!r}"
            )
        if not 0 <= eos_id < vocab_size:
            problems.append(f"eos_id ({eos_id}) must be from 0 to {vocab_size - 1}, the largest id of the vocabulary")
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            problems.append(f"{self.output} exists already; choose another output, or remove it")
        if problems:
            raise ValueError("\n".join(problems))
        self.vocab_size = vocab_size
        self.eos_id = eos_id
        self._shard_bytes = shard_bytes
        self._settings = settings or {}
        self._origin = origin
        self._parts: dict[str, _Part] = {}
        self._splits = dict.fromkeys(SPLITS, Split())
        self.folder = _working_folder(self.output)

    def add(self, split: str, tokens: ArrayLike, text_bytes: int) -> None:
        """Append one document (its ids end with end-of-text); one without tokens is only counted.

        Raises ValueError for an id that the type or the vocabulary does not have.
        """
        ids = np.asarray(tokens, np.int64)
        entry = self._splits[split]
        if not len(ids):
            self._splits[split] = Split(shards=entry.shards, empty_documents=entry.empty_documents + 1)
            return
        for value in (int(ids.max()), int(ids.min())):
            self._check_id(value)
        if split not in self._parts:
            self._parts[split] = _Part(self.folder, f"{split}/part-{len(entry.shards):05d}.npy")
        part = self._parts[split]
        part.write(ids.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes())
        part.document_lengths.append(len(ids))
        part.text_bytes += text_bytes
        if part.num_bytes >= self._shard_bytes:
            self._end_part(split)

    def add_shard(self, split: str, tokens: NDArray[Any], shard: Shard) -> None:
        """Append the documents of a shard from another folder as one part of its own."""
        self._end_part(split)
        part = self._parts[split] = _Part(self.folder, f"{split}/part-{len(self._splits[split].shards):05d}.npy")
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            chunk = tokens[start : start + _CHUNK_TOKENS]
            self._check_id(int(chunk.max()))
            part.write(chunk.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes())
        part.document_lengths.extend(shard.document_lengths.tolist())
        part.text_bytes = shard.text_bytes
        self._end_part(split)

    def count_empty(self, split: str, count: int) -> None:
        """Count documents without text that were left out elsewhere."""
        entry = self._splits[split]
        self._splits[split] = Split(shards=entry.shards, empty_documents=entry.empty_documents + count)

    def _check_id(self, value: int) -> None:
        limit = int(np.iinfo(self.dtype).max)
        if value > limit:
            wider = smallest_dtype(value + 1)
            raise ValueError(f"token id {value} does not fit in {self.dtype} (0 to {limit}); use dtype {wider!r}")
        if not 0 <= value < self.vocab_size:
            raise ValueError(
                f"token id {value} is outside the vocabulary (0 to {self.vocab_size - 1}); is it the right tokenizer?"
            )

    def _end_part(self, split: str) -> None:
        part = self._parts.pop(split, None)
        if part is not None:
            shard = part.end(np.dtype(self.dtype).itemsize)
            entry = self._splits[split]
            self._splits[split] = Split(shards=(*entry.shards, shard), empty_documents=entry.empty_documents)

    def close(self) -> Index:
        """Write the index and give the folder its final name."""
        for split in SPLITS:
            self._end_part(split)
        tokenizer = self.folder / _TOKENIZER_FILES[0]
        index = Index(
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            splits=self._splits,
            tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else None,
            settings=self._settings,
            origin=self._origin,
        )
        _write_index(self.folder / _INDEX, index)
        if self.output.exists():
            self.output.rmdir()
        self.folder.rename(self.output)
        return index

    def abandon(self) -> None:
        """Remove what has been written."""
        for part in self._parts.values():
            part.file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.abandon()


class _Part:
    """A token file that is being written."""

    def __init__(self, folder: Path, name: str) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        self.name = name
        self.file: BinaryIO = (folder / name).open("wb")
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.text_bytes = 0
        self.document_lengths: list[int] = []

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.num_bytes += len(data)

    def end(self, token_bytes: int) -> Shard:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return Shard(
            file=self.name,
            num_tokens=self.num_bytes // token_bytes,
            num_bytes=self.num_bytes,
            sha256=self.digest.hexdigest(),
            text_bytes=self.text_bytes,
            document_lengths=np.array(self.document_lengths, np.int64),
        )


def merge_token_folders(inputs: Sequence[str | Path], output: str | Path) -> Index:
    """Put the documents of several folders into a new one, split by split, in the order given.

    The result has the widest type of the inputs. Raises ValueError if the inputs differ in vocabulary, end-of-text id
    or tokenizer, or if a file does not have the size or the checksum its index says.
    """
    folders = [Path(folder) for folder in inputs]
    if not folders:
        raise ValueError("no folder of token files to merge")
    indexes = [read_index(folder) for folder in folders]
    first = indexes[0]
    problems = [
        f"{folder} has {name} {getattr(index, name)}, but {folders[0]} has {getattr(first, name)}"
        for folder, index in zip(folders, indexes, strict=True)
        for name in ("vocab_size", "eos_id", "tokenizer_sha256")
        if getattr(index, name) != getattr(first, name)
    ]
    if problems:
        raise ValueError("\n".join(problems))
    for folder in folders:
        verify(folder)
    dtype = max((index.dtype for index in indexes), key=DTYPES.index)
    origin = "merged from " + ", ".join(folder.name for folder in folders)
    with TokenWriter(output, vocab_size=first.vocab_size, eos_id=first.eos_id, dtype=dtype, origin=origin) as writer:
        for name in _TOKENIZER_FILES:
            if (folders[0] / name).exists():
                shutil.copyfile(folders[0] / name, writer.folder / name)
        for folder, index in zip(folders, indexes, strict=True):
            for split, entry in index.splits.items():
                writer.count_empty(split, entry.empty_documents)
                for shard in entry.shards:
                    writer.add_shard(split, map_tokens(folder, index.dtype, shard.file), shard)
    return read_index(output)


def _working_folder(output: Path) -> Path:
    """Make a new hidden folder beside ``output``, and remove those that killed processes of this machine left there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.partial-{socket.gethostname()}-"
    for old in output.parent.iterdir():
        if old.name.startswith(prefix) and not _is_running(old.name.removeprefix(prefix)):
            shutil.rmtree(old, ignore_errors=True)
    folder = output.parent / f"{prefix}{os.getpid()}"
    folder.mkdir()
    return folder


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()


def _write_index(path: Path, index: Index) -> None:
    raw = {"format": _FORMAT, "version": _VERSION, **vars(index)}
    raw["splits"] = {
        name: {
            "empty_documents": split.empty_documents,
            "shards": [{**vars(shard), "document_lengths": shard.document_lengths.tolist()} for shard in split.shards],
        }
        for name, split in index.splits.items()
    }
    with path.open("w", encoding="utf-8") as file:
        json.dump(raw, file)
        file.flush()
        os.fsync(file.fileno())
