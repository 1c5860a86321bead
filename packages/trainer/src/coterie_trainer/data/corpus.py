"""Where text comes from: files that the user names, and the built-in corpus.

The built-in corpus is the source of the Python standard library of the interpreter that runs: real text of tens of
megabytes that is on every machine that can run this package.
"""

import glob
import gzip
import hashlib
import itertools
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

__all__ = ["READERS", "Document", "Source", "find_sources", "is_held_out", "read_documents", "stdlib_sources"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to read, and a name for it that does not depend on where the corpus lies."""

    path: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text; ``name`` is that of its file, with the row number where a file holds many."""

    name: str
    text: str


def is_held_out(name: str, fraction: float) -> bool:
    """Tell whether a document is in the held-out part, by a hash of its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < fraction * 2**64


def stdlib_sources(root: Path | None = None) -> tuple[list[Source], int]:
    """Return the ``.py`` files of the standard library in the order of their names, and how many are no UTF-8 text.

    Installed packages are left out. Test data of the library holds a few files in other encodings on purpose.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    sources, skipped = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if {"site-packages", "dist-packages"} & set(relative.parts) or not path.is_file():
            continue
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            skipped += 1
        else:
            sources.append(Source(path=path, name=relative.as_posix()))
    if not sources:
        raise ValueError(
            f"no readable Python source in {root}: this interpreter comes without its standard library's text"
        )
    return sources, skipped


def find_sources(inputs: Sequence[str | Path]) -> list[Source]:
    """Return the files that paths, folders and patterns stand for, in the order given and by name within each.

    A path that exists is taken as it is, brackets and all; else it is a pattern with ``*``, ``?``, ``[...]`` and
    ``**``. A folder stands for all files in it that can be read. Raises ValueError with every input that leads to
    nothing.
    """
    sources: list[Source] = []
    problems = []
    for given in map(str, inputs):
        path = Path(given)
        if path.is_dir():
            found = [
                Source(path=file, name=file.relative_to(path).as_posix()) for file in path.rglob("*") if file.is_file()
            ]
            found = [source for source in found if _suffix(source.path)]
            if not found:
                problems.append(f"{given}: no file with a known suffix in this folder; known: {', '.join(READERS)}")
        elif path.is_file():
            found = [Source(path=path, name=path.name)]
        else:
            base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
            matches = (Path(match) for match in glob.glob(given, recursive=True))
            found = [Source(path=file, name=file.relative_to(base).as_posix()) for file in matches if file.is_file()]
            if not found:
                problems.append(
                    f"{given}: no such file or folder" + (", and no match" if glob.has_magic(given) else "")
                )
        problems += [
            f"{source.path}: unknown suffix; known: {', '.join(READERS)}"
            for source in found
            if not _suffix(source.path)
        ]
        sources += sorted(found, key=lambda source: source.name)
    if not inputs:
        problems.append("no input given")
    if problems:
        raise ValueError("\n".join(problems))
    return sources


def read_documents(source: Source, text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of a file, one at a time; ``text_field`` names the JSON field or Parquet column.

    Raises ValueError with the file, and the line or row where there is one, for text that is not UTF-8, broken JSON, a
    missing field, a value that is no text, and a damaged file. A null counts as an empty text.
    """
    try:
        yield from READERS[_suffix(source.path) or ".txt"](source, text_field)
    except EOFError as error:
        raise ValueError(f"{source.path}: the gzip data ends early, the file has been cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{source.path}: damaged gzip data: {error}") from error
    except pa.ArrowInvalid as error:
        raise ValueError(f"{source.path}: damaged Parquet file: {error}") from error


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in READERS if path.name.lower().endswith(suffix)), None)


def _read_text(source: Source, _text_field: str) -> Iterator[Document]:
    try:
        yield Document(name=source.name, text=source.path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source.path}: not UTF-8 text, byte {error.object[error.start]:#04x} at {error.start}"
        ) from error


def _read_json_lines(source: Source, text_field: str) -> Iterator[Document]:
    is_gzip = source.path.name.lower().endswith(".gz")
    with gzip.open(source.path) if is_gzip else source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where = f"{source.path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: no valid JSON: {error}") from error
            if not isinstance(row, dict) or text_field not in row:
                fields = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
                raise ValueError(f"{where}: no field {text_field!r}; it has: {fields}")
            yield Document(name=f"{source.name}#{number}", text=_text(row[text_field], where, text_field))


def _read_parquet(source: Source, text_field: str) -> Iterator[Document]:
    with pq.ParquetFile(source.path) as file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise ValueError(f"{source.path}: no column {text_field!r}; it has: {', '.join(columns)}")
        number = 0
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(1024, row_groups=[group], columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = _text(value, f"{source.path}, row {number}", text_field)
                    yield Document(name=f"{source.name}#{number}", text=text)


def _text(value: Any, where: str, text_field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: {text_field!r} is {type(value).__name__}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {text_field!r} holds half of a surrogate pair at character {error.start}"
        ) from error
    return value


READERS: dict[str, Callable[[Source, str], Iterator[Document]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".parquet": _read_parquet,
}
