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
_SHARD_BYTES = 256 * 2**20
_CHUNK_TOKENS = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One token file: ``file`` is relative to the folder, ``document_lengths`` are in tokens, end-of-text included."""

    file: str
    num_tokens: int
    num_bytes: int
    sha256: str
    document_lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The files of one split, the UTF-8 size of its text, and how many documents had none and were left out."""

    shards: tuple[Shard, ...]
    text_bytes: int
    empty_documents: int


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
                text_bytes=split["text_bytes"],
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
        self.vocab_size = vocab_size
        self.eos_id = eos_id
        self.dtype = dtype or smallest_dtype(vocab_size)
        self._settings = settings or {}
        self._origin = origin
        problems = self._problems()
        if problems:
            raise ValueError("\n".join(problems))
        self.folder = _working_folder(self.output)
        self._splits = {name: _SplitWriter(self.folder, name, self.dtype, shard_bytes) for name in SPLITS}

    def _problems(self) -> list[str]:
        problems = []
        if self.dtype not in DTYPES:
            problems.append(f"dtype {self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        elif self.vocab_size - 1 > np.iinfo(self.dtype).max:
            wider = smallest_dtype(self.vocab_size)
            problems.append(f"vocab_size ({self.vocab_size}) does not fit in {self.dtype}; use dtype {wider!r}")
        if not 0 <= self.eos_id < self.vocab_size:
            problems.append(f"eos_id ({self.eos_id}) must be from 0 to {self.vocab_size - 1}, inside the vocabulary")
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            problems.append(f"{self.output} exists already; choose another output, or remove it")
        return problems

    def add(self, split: str, tokens: ArrayLike, text_bytes: int = 0) -> None:
        """Append one document (its last id is end-of-text) that came from so many bytes of text.

        A document without tokens is counted and leaves no other trace. Raises ValueError for an id that the type or
        the vocabulary does not have.
        """
        ids = np.asarray(tokens, np.int64)
        if len(ids):
            self._check_id(int(ids.max()))
            self._check_id(int(ids.min()))
        self._splits[split].write(ids, text_bytes)

    def _check_id(self, value: int) -> None:
        limit = int(np.iinfo(self.dtype).max)
        if value > limit:
            wider = smallest_dtype(value + 1)
            raise ValueError(f"token id {value} does not fit in {self.dtype} (0 to {limit}); use dtype {wider!r}")
        if not 0 <= value < self.vocab_size:
            raise ValueError(
                f"token id {value} is outside the vocabulary (0 to {self.vocab_size - 1}); is it the right tokenizer?"
            )

    def close(self) -> None:
        """Write the index and give the folder its final name."""
        tokenizer = self.folder / "tokenizer.json"
        index = Index(
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            splits={name: split.end() for name, split in self._splits.items()},
            tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else None,
            settings=self._settings,
            origin=self._origin,
        )
        _write_index(self.folder / _INDEX, index)
        self.folder.rename(self.output)  # replaces an empty folder, and fails on any other

    def abandon(self) -> None:
        """Remove what has been written."""
        for split in self._splits.values():
            if split.file is not None:
                split.file.close()
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


class _SplitWriter:
    """Writes the parts of one split."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_bytes = shard_bytes
        self._shards: list[Shard] = []
        self._lengths: list[int] = []
        self._digest = hashlib.sha256()
        self._text_bytes = 0
        self._empty_documents = 0
        self.file: BinaryIO | None = None

    def write(self, ids: NDArray[np.int64], text_bytes: int) -> None:
        self._text_bytes += text_bytes
        if not len(ids):
            self._empty_documents += 1
            return
        if self.file is None:
            path = self._folder / self._file_name()
            path.parent.mkdir(exist_ok=True)
            self.file = path.open("wb")
        data = ids.astype(self._dtype).tobytes()
        self.file.write(data)
        self._digest.update(data)
        self._lengths.append(len(ids))
        if self.file.tell() >= self._shard_bytes:
            self._end_part()

    def end(self) -> Split:
        self._end_part()
        return Split(shards=tuple(self._shards), text_bytes=self._text_bytes, empty_documents=self._empty_documents)

    def _file_name(self) -> str:
        return f"{self._name}/part-{len(self._shards):05d}.npy"

    def _end_part(self) -> None:
        if self.file is None:
            return
        num_bytes = self.file.tell()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None
        shard = Shard(
            file=self._file_name(),
            num_tokens=num_bytes // self._dtype.itemsize,
            num_bytes=num_bytes,
            sha256=self._digest.hexdigest(),
            document_lengths=np.array(self._lengths, np.int64),
        )
        self._shards.append(shard)
        self._lengths = []
        self._digest = hashlib.sha256()


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
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folders[0] / name).exists():
                shutil.copyfile(folders[0] / name, writer.folder / name)
        for folder, index in zip(folders, indexes, strict=True):
            for name, split in index.splits.items():
                _copy_split(folder, index.dtype, name, split, writer)
    return read_index(output)


def _copy_split(folder: Path, dtype: str, name: str, split: Split, writer: TokenWriter) -> None:
    text_bytes = split.text_bytes  # known for the whole split only: it goes with the first document
    for shard in split.shards:
        tokens = map_tokens(folder, dtype, shard.file)
        for document in np.split(tokens, np.cumsum(shard.document_lengths)[:-1]):
            writer.add(name, document, text_bytes)
            text_bytes = 0
    for _ in range(split.empty_documents):
        writer.add(name, [])


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
            "text_bytes": split.text_bytes,
            "empty_documents": split.empty_documents,
            "shards": [{**vars(shard), "document_lengths": shard.document_lengths.tolist()} for shard in split.shards],
        }
        for name, split in index.splits.items()
    }
    with path.open("w", encoding="utf-8") as file:
        json.dump(raw, file)
        file.flush()
        os.fsync(file.fileno())
