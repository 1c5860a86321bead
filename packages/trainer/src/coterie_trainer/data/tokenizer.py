"""Byte-level BPE tokenizers: train, save so that transformers loads them too, load, encode."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = [
    "END_OF_TEXT",
    "copy_tokenizer",
    "encode_batch",
    "find_eos_id",
    "load_tokenizer",
    "save_tokenizer",
    "train_tokenizer",
]

END_OF_TEXT = "<|endoftext|>"
_MIN_VOCAB = 257  # 256 bytes and end-of-text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts give the same tokenizer.

    Id 0 is end-of-text, then come the 256 bytes, then merges (Sennrich et al. 2016; bytes as in GPT-2). Text that
    holds few different words can give a vocabulary smaller than ``vocab_size``. Raises ValueError below 257.
    """
    if vocab_size < _MIN_VOCAB:
        raise ValueError(f"vocab_size ({vocab_size}) must be at least {_MIN_VOCAB}: 256 bytes and {END_OF_TEXT}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, from which transformers' ``AutoTokenizer`` loads it."""
    folder = Path(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, END_OF_TEXT)


def copy_tokenizer(path: str | Path, folder: Path, eos_token: str) -> None:
    """Copy a tokenizer's files into a folder; a missing ``tokenizer_config.json`` is made."""
    source = _tokenizer_file(path)
    shutil.copyfile(source, folder / "tokenizer.json")
    config = source.with_name("tokenizer_config.json")
    if config.is_file():
        shutil.copyfile(config, folder / "tokenizer_config.json")
    else:
        _write_config(folder, eos_token)


def _write_config(folder: Path, eos_token: str) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a ``tokenizer.json``, or from a folder that holds one; ValueError if that fails."""
    file = _tokenizer_file(path)
    if not file.is_file():
        raise ValueError(f"{path}: no tokenizer.json here")
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is no tokenizer of the Hugging Face `tokenizers` library: {error}") from error


def find_eos_id(tokenizer: Tokenizer, path: str | Path | None = None) -> int:
    """Return the id of end-of-text: ``eos_token`` of the tokenizer_config.json at ``path``, else ``<|endoftext|>``."""
    config = None if path is None else _tokenizer_file(path).with_name("tokenizer_config.json")
    name = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config and config.is_file() else None
    name = name["content"] if isinstance(name, dict) else name or END_OF_TEXT
    number = tokenizer.token_to_id(name)
    if number is None:
        raise ValueError(f"{path}: the tokenizer has no {name!r}; set eos_token in a tokenizer_config.json beside it")
    return number


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str], eos_id: int) -> list[NDArray[np.int64]]:
    """Return the ids of each text with end-of-text behind it; an empty text gives no ids at all.

    Works on all cores. What looks like a special token in a text is plain text, so that end-of-text stands at ends
    only.
    """
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([*encoding.ids, eos_id] if encoding.ids else [], np.int64) for encoding in encodings]


def _tokenizer_file(path: str | Path) -> Path:
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path
