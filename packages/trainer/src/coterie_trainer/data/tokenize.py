"""Turn text into a folder of token files: the built-in corpus, or files that the user names."""

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coterie_trainer.data.corpus import Source, find_sources, is_held_out, read_documents, stdlib_sources
from coterie_trainer.data.shards import SPLITS, Index, TokenWriter, check_sizes, read_index
from coterie_trainer.data.tokenizer import (
    copy_tokenizer,
    encode_batch,
    find_eos_id,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

__all__ = ["TokenizeSummary", "prepare_stdlib", "tokenize_files"]

Progress = Callable[[str], None]

_STDLIB_HELD_OUT = 0.05
# Characters that a tokenizer is trained on: more of the same kind of text hardly moves the merges, but costs time.
_STDLIB_SAMPLE = 8 * 2**20
_FILES_SAMPLE = 32 * 2**20
_BATCH_CHARACTERS = 4 * 2**20
_BATCH_DOCUMENTS = 4096
_REPORT_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TokenizeSummary:
    """What a folder of token files holds; the three dictionaries go by split ("train", "held_out").

    ``reused`` tells that the folder was there already. ``skipped_files`` could not be read as text (built-in corpus
    only).
    """

    output: Path
    reused: bool
    vocab_size: int
    dtype: str
    documents: dict[str, int]
    tokens: dict[str, int]
    text_bytes: dict[str, int]
    empty_documents: int
    skipped_files: int


def tokenize_files(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32768,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
    dtype: str | None = None,
    progress: Progress | None = None,
) -> TokenizeSummary:
    """Tokenize text files, folders of them and patterns into a folder of token files.

    Reads ``.txt``, ``.jsonl``, ``.jsonl.gz`` and ``.parquet``. ``tokenizer`` is a ``tokenizer.json`` or a folder with
    one; None trains one of ``vocab_size`` on the training part of the input (``vocab_size`` is not used otherwise). A
    document is held out by a hash of its name (file name and row). Where that would leave a few ``.txt`` files all on
    one side, the end of each is held out instead. ``text_field`` names the JSON field or the Parquet column. ``dtype``
    is "uint16", "uint32" or None for the narrowest. ``progress`` gets lines of text.

    Safe to call again: a complete folder made with the same settings is reused, an incomplete one is replaced, and one
    made with other settings raises ValueError, as do inputs that cannot be read. An interrupt leaves nothing under
    ``output``.
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"held_out_fraction ({held_out_fraction}) must be at least 0 and below 1, for instance 0.05")
    sources = find_sources(inputs)
    stamps = [(source.name, source.path.stat().st_size, source.path.stat().st_mtime_ns) for source in sources]
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    settings = {
        "source": "files",
        "input_files": f"{len(sources)} files, sha256 {hashlib.sha256(json.dumps(stamps).encode()).hexdigest()}",
        "tokenizer": None if given is None else hashlib.sha256(given.to_str().encode()).hexdigest(),
        "vocab_size": vocab_size if given is None else None,
        "held_out_fraction": held_out_fraction,
        "text_field": text_field,
        "dtype": dtype,
    }
    return _make(
        _Corpus(sources=sources, text_field=text_field, held_out_fraction=held_out_fraction),
        Path(output),
        settings=settings,
        origin=", ".join(map(str, inputs)),
        tokenizer=None if given is None else (given, Path(str(tokenizer))),
        vocab_size=vocab_size,
        sample_characters=_FILES_SAMPLE,
        skipped_files=0,
        progress=progress or _silent,
    )


def prepare_stdlib(output: str | Path, vocab_size: int = 4096, progress: Progress | None = None) -> TokenizeSummary:
    """Make the built-in corpus: the standard library's source text, with a tokenizer of its own.

    About 5 % of the files are held out, by a hash of the file name. Safe to call again, like ``tokenize_files``; a
    folder made by another Python version is kept, so that a run goes on with the tokens it began with.
    """
    settings = {"source": "stdlib", "vocab_size": vocab_size, "held_out_fraction": _STDLIB_HELD_OUT}
    progress = progress or _silent
    index = _existing(Path(output), settings, progress)
    if index is not None:
        return _summary(Path(output), index, reused=True, skipped_files=0)
    sources, skipped_files = stdlib_sources()
    return _make(
        _Corpus(sources=sources, text_field="", held_out_fraction=_STDLIB_HELD_OUT),
        Path(output),
        settings=settings,
        origin=f"standard library of Python {platform.python_version()}",
        tokenizer=None,
        vocab_size=vocab_size,
        sample_characters=_STDLIB_SAMPLE,
        skipped_files=skipped_files,
        progress=progress,
    )


@dataclass(frozen=True, kw_only=True)
class _Corpus:
    """Files, how to read them, and how to choose the held-out part."""

    sources: list[Source]
    text_field: str
    held_out_fraction: float

    def documents(self, sources: Sequence[Source] | None = None) -> Iterator[tuple[str, str]]:
        """Yield split and text of each document."""
        cut_tails = self._cuts_tails()
        for source in self.sources if sources is None else sources:
            for document in read_documents(source, self.text_field):
                if cut_tails:
                    head, tail = _cut_tail(document.text, self.held_out_fraction)
                    yield "train", head
                    if tail:
                        yield "held_out", tail
                else:
                    held_out = is_held_out(document.name, self.held_out_fraction)
                    yield "held_out" if held_out else "train", document.text

    def sample(self, characters: int) -> Iterator[str]:
        """Yield training texts from files spread over the corpus, up to a number of characters."""
        share = characters // min(len(self.sources), 64)
        left = characters
        for source in sorted(self.sources, key=lambda source: hashlib.sha256(source.name.encode()).digest()):
            left_here = share
            for split, text in self.documents([source]):
                if split == "train":
                    part = text[: min(left, left_here)]
                    left, left_here = left - len(part), left_here - len(part)
                    yield part
                if not left_here:
                    break
            if not left:
                return

    def _cuts_tails(self) -> bool:
        if not self.held_out_fraction or any(source.path.suffix.lower() != ".txt" for source in self.sources):
            return False
        return len({is_held_out(source.name, self.held_out_fraction) for source in self.sources}) == 1


def _make(
    corpus: _Corpus,
    output: Path,
    *,
    settings: dict[str, Any],
    origin: str,
    tokenizer: tuple[Tokenizer, Path] | None,
    vocab_size: int,
    sample_characters: int,
    skipped_files: int,
    progress: Progress,
) -> TokenizeSummary:
    index = _existing(output, settings, progress)
    if index is not None:
        return _summary(output, index, reused=True, skipped_files=skipped_files)
    progress(f"reading {len(corpus.sources)} files")
    if skipped_files:
        progress(f"{skipped_files} files are no UTF-8 text and left out")
    if tokenizer is None:
        progress(f"training a tokenizer of {vocab_size} tokens")
        encoder = train_tokenizer(corpus.sample(sample_characters), vocab_size)
        eos_id = find_eos_id(encoder)
    else:
        encoder = tokenizer[0]
        eos_id = find_eos_id(*tokenizer)
    size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
    with TokenWriter(
        output, vocab_size=size, eos_id=eos_id, dtype=settings.get("dtype"), settings=settings, origin=origin
    ) as writer:
        if tokenizer is None:
            save_tokenizer(encoder, writer.folder)
        else:
            copy_tokenizer(tokenizer[1], writer.folder, encoder.id_to_token(eos_id) or "")
        counts = _write(writer, corpus, encoder, progress)
        if not counts["train"]:
            raise ValueError(f"no training text in {origin}: all documents are empty or held out")
    summary = _summary(output, read_index(output), reused=False, skipped_files=skipped_files)
    if summary.empty_documents:
        progress(f"empty documents left out: {summary.empty_documents}")
    if corpus.held_out_fraction and not counts["held_out"]:
        progress("no document fell into the held-out part; raise the held-out fraction to evaluate")
    return summary


def _write(writer: TokenWriter, corpus: _Corpus, encoder: Tokenizer, progress: Progress) -> dict[str, int]:
    counts = dict.fromkeys(SPLITS, 0)
    text_bytes = 0
    reported = time.monotonic()
    for batch in _batches(corpus.documents()):
        ids = encode_batch(encoder, [text for _, text in batch], writer.eos_id)
        for (split, text), tokens in zip(batch, ids, strict=True):
            num_bytes = len(text.encode())
            writer.add(split, tokens, num_bytes)
            counts[split] += len(tokens)
            text_bytes += num_bytes
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            progress(f"tokenized {text_bytes / 1e6:.1f} MB into {sum(counts.values()) / 1e6:.1f} million tokens")
    return counts


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Group documents so that a batch keeps all cores busy and still is small in memory."""
    batch: list[tuple[str, str]] = []
    characters = 0
    for split, text in documents:
        batch.append((split, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _existing(output: Path, settings: dict[str, Any], progress: Progress) -> Index | None:
    """Return the index of a complete folder with these settings; remove a damaged one that holds only our files.

    Raises:
        ValueError: the folder is not ours, holds other files as well, or was made with other settings.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / "index.json").is_file():
        # Our own folders get their name when they are complete, so this one is somebody else's.
        held = sorted(path.name for path in output.iterdir())[:3] if output.is_dir() else [output.name]
        raise ValueError(f"{output} holds other things ({', '.join(held)}); choose another folder for the tokens")
    index = read_index(output)
    keys = sorted(settings.keys() | index.settings.keys())
    differences = [
        f"{key} is {index.settings.get(key)!r} there, {settings.get(key)!r} is asked for"
        for key in keys
        if index.settings.get(key) != settings.get(key)
    ]
    if differences:
        raise ValueError(
            f"{output} was made with other settings: {'; '.join(differences)}; "
            "choose another folder, or remove this one"
        )
    try:
        check_sizes(output, index)
    except ValueError as error:
        progress(f"making {output} again: {error}")
    else:
        if (output / "tokenizer.json").exists():
            return index
    ours = {shard.file for split in index.splits.values() for shard in split.shards}
    ours |= {"index.json", "tokenizer.json", "tokenizer_config.json"}
    files = sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir())
    if strangers := [name for name in files if name not in ours]:
        raise ValueError(
            f"{output} is damaged and must be made again, but holds other things ({', '.join(strangers[:3])}); "
            "move them away, or choose another folder"
        )
    shutil.rmtree(output)
    return None


def _summary(output: Path, index: Index, *, reused: bool, skipped_files: int) -> TokenizeSummary:
    splits = index.splits.items()
    return TokenizeSummary(
        output=output,
        reused=reused,
        vocab_size=index.vocab_size,
        dtype=index.dtype,
        documents={name: sum(len(shard.document_lengths) for shard in split.shards) for name, split in splits},
        tokens={name: sum(shard.num_tokens for shard in split.shards) for name, split in splits},
        text_bytes={name: split.text_bytes for name, split in splits},
        empty_documents=sum(split.empty_documents for _, split in splits),
        skipped_files=skipped_files,
    )


def _cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """Cut a text near its end, behind a line end where there is one."""
    place = int(len(text) * (1 - fraction))
    line_end = text.rfind("\n", 0, place) + 1
    return text[: line_end or place], text[line_end or place :]


def _silent(_line: str) -> None:
    pass
