"""Real text of several domains, as it lies on any Linux machine: Python, C headers, licences, manual pages."""

import gzip
import hashlib
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Domain", "folder_corpus", "machine_corpus"]

# One long file must not be most of a domain.
_MOST_BYTES_OF_A_FILE = 16 * 1024
_HELD_OUT_OF = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Domain:
    """Hold the text of one domain as bytes, documents one after the other with a zero byte between.

    Attributes:
        name: Name of the domain.
        train: uint8 (N), text to train on.
        held_out: uint8 (M), text of other documents: the first of each eight.
        num_files: Number of documents in both.
        source: Where they were found, in words.
    """

    name: str
    train: Tensor
    held_out: Tensor
    num_files: int
    source: str


def machine_corpus(*, most_bytes: int, fewest_bytes: int, seed: int = 0) -> list[Domain]:
    """Return the domains that this machine has enough text of.

    The choice of files depends on what is installed; on one machine it is the same for one seed.

    Args:
        most_bytes: Bytes of training text to take from each domain; the held-out text is about a seventh of that.
        fewest_bytes: A domain with less training text, or with less than an eighth of it held out, is left out.
        seed: Chooses the documents.

    Raises:
        ValueError: If there are fewer than two domains.
    """
    paths = {name: Path(place) for name, place in sysconfig.get_paths().items()}
    packages = sorted({paths["purelib"], paths["platlib"]})
    licences = [path for place in packages for path in place.glob("*.dist-info/**/LICEN[CS]E*")]
    headers = [path for place in packages for path in place.glob("torch/include/**/*.h")]
    manuals = [path for number in range(1, 9) for path in Path("/usr/share/man").glob(f"man{number}/*.gz")]
    found = {
        "python": ("standard library of Python", paths["stdlib"].glob("*.py")),
        "c": ("headers of /usr/include, Python and torch", [*_headers(paths["include"]), *headers]),
        "licence": ("licences of installed packages", [*licences, *_system_licences()]),
        "manual": ("/usr/share/man", manuals),
    }
    return _domains(found, most_bytes, fewest_bytes, seed, "this machine has")


def folder_corpus(folder: Path, *, most_bytes: int, fewest_bytes: int, seed: int = 0) -> list[Domain]:
    """Return one domain for each folder inside `folder`, with all files below it; otherwise as `machine_corpus`."""
    places = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = {place.name: (str(place), [path for path in place.rglob("*") if path.is_file()]) for place in places}
    return _domains(found, most_bytes, fewest_bytes, seed, f"{folder} has")


def _headers(python: Path) -> Iterator[Path]:
    yield from Path("/usr/include").glob("**/*.h")
    yield from python.glob("**/*.h")


def _system_licences() -> Iterator[Path]:
    yield from Path("/usr/share/common-licenses").glob("*")
    yield from Path("/usr/share/doc").glob("*/copyright")


def _domains(
    found: Mapping[str, tuple[str, Iterable[Path]]], most_bytes: int, fewest_bytes: int, seed: int, whose: str
) -> list[Domain]:
    read = [_read(name, source, paths, most_bytes, seed) for name, (source, paths) in found.items()]
    fewest_held_out = fewest_bytes // _HELD_OUT_OF
    usable = [one for one in read if one.train.numel() >= fewest_bytes and one.held_out.numel() >= fewest_held_out]
    if len(usable) < 2:
        amounts = ", ".join(f"{one.name} {one.train.numel()} and {one.held_out.numel()}" for one in read)
        raise ValueError(
            f"two domains are needed, each with {fewest_bytes} bytes to train on and {fewest_held_out} bytes in each "
            f"{_HELD_OUT_OF}th document to hold out; {whose} {amounts or 'none'}"
        )
    return usable


def _read(name: str, source: str, paths: Iterable[Path], most_bytes: int, seed: int) -> Domain:
    ordered = sorted(paths)
    random.Random(f"{seed} {name}").shuffle(ordered)
    train, held_out = bytearray(), bytearray()
    # Licences and headers are often there many times over: a copy would put training text into the held-out part.
    seen: set[bytes] = set()
    for path in ordered:
        if len(train) >= most_bytes:
            break
        text = _text(path)
        digest = hashlib.sha256(text).digest()
        if text and digest not in seen:
            seen.add(digest)
            part = held_out if len(seen) % _HELD_OUT_OF == 1 else train
            part += text + b"\0"
    return Domain(
        name=name,
        train=torch.frombuffer(train, dtype=torch.uint8) if train else torch.zeros(0, dtype=torch.uint8),
        held_out=torch.frombuffer(held_out, dtype=torch.uint8) if held_out else torch.zeros(0, dtype=torch.uint8),
        num_files=len(seen),
        source=source,
    )


def _text(path: Path) -> bytes:
    """Return the start of a text file, unpacked; nothing for what cannot be read or is no text."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(_MOST_BYTES_OF_A_FILE)
    except (OSError, EOFError, zlib.error):
        return b""
    return b"" if b"\0" in text else text
