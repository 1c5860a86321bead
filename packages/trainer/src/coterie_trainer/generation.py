"""Sample text from a run or from an exported folder, with Coterie's own model."""

import math
from pathlib import Path

import torch
from coterie_export import import_model
from tokenizers import Tokenizer

from coterie_trainer.exporting import decoder_from_tensors, read_run
from coterie_trainer.model import Decoder
from coterie_trainer.run_folder import tokenizer_files

__all__ = ["generate"]


def generate(
    path: str | Path, prompt: str, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0
) -> str:
    """Return ``prompt`` continued by the model at ``path``.

    Args:
        path: a run folder (its newest checkpoint is read) or a folder written by ``coterie export``.
        prompt: text to continue; may be empty when the tokenizer has an end-of-text token to start from.
        max_new_tokens: most tokens to add; the end-of-text token ends earlier.
        temperature: 0 takes the likeliest token each time; above 0 samples from softmax(logits / temperature).
        seed: of the sampling.

    Raises:
        ValueError: the folder is neither a run nor an export, has no tokenizer, or an argument is out of range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) must be at least 1")
    if not (temperature == 0 or 1e-3 <= temperature < math.inf):
        raise ValueError(f"temperature ({temperature}) must be 0, for the likeliest token, or at least 0.001")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed ({seed}) must be from 0 to 2^63 - 1")
    if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt is not UTF-8 text")
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give a run folder or an exported folder")
    spec, tensors = import_model(path) if (path / "config.json").is_file() else read_run(path)
    files = tokenizer_files(path)
    if "tokenizer.json" not in files:
        raise ValueError(f"{path} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    ids = tokenizer.encode(prompt).ids
    if not ids:
        if spec.eos_id is None:
            raise ValueError("the prompt is empty and the model has no end-of-text token to start from")
        ids = [spec.eos_id]
    ids = continue_ids(
        decoder_from_tensors(spec, tensors),
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


@torch.no_grad()
def continue_ids(
    model: Decoder, ids: list[int], *, max_new_tokens: int, temperature: float, generator: torch.Generator
) -> list[int]:
    """Return ``ids`` and up to ``max_new_tokens`` more; the model sees at most its maximum sequence length."""
    spec = model.spec
    ids = list(ids)
    for _ in range(max_new_tokens):
        context = ids[-spec.max_sequence_length :]
        tokens_BS = torch.tensor([context])
        hidden_BSD = model(tokens_BS, torch.zeros_like(tokens_BS, dtype=torch.int32)).hidden_BSD
        logits_V = model.logits(hidden_BSD[0, -1]).float()
        if temperature == 0.0:
            chosen = int(logits_V.argmax())
        else:
            probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
            chosen = int(torch.multinomial(probabilities_V, 1, generator=generator))
        if chosen == spec.eos_id:
            break
        ids.append(chosen)
    return ids
