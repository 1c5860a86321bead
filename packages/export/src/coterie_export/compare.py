"""Compare an exported model with the logits of the model it came from, through transformers."""

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["compare_logits", "load_with_transformers"]


def load_with_transformers(folder: str | os.PathLike[str]) -> Any:
    """Return the folder's model as transformers loads it, in float32 and evaluation mode.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers found a tensor missing, left over or of a wrong shape.
    """
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # it is there, but something that it needs is not
        raise ImportError('this needs transformers: pip install "coterie-export[transformers]"') from error
    loader, logging = transformers.AutoModelForCausalLM, transformers.utils.logging
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # "eager": the grouped matrix product that transformers would take needs expert widths that are multiples of 4
        model, info = loader.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
        )
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    faults = {kind: names for kind, names in info.items() if names}
    if faults:
        raise ValueError(f"transformers did not load {folder} cleanly: {faults}")
    return model.eval()


def compare_logits(folder: str | os.PathLike[str], tokens_BS: Tensor, logits_BSV: Tensor) -> float:
    """Return the largest absolute difference between an exported model's logits and the given ones.

    The weights are those of the files, the arithmetic is float32.

    Args:
        folder: An export.
        tokens_BS: int64 token ids; each row is one text.
        logits_BSV: What the model that was exported says for them.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers did not load every tensor, or the shapes differ.
    """
    model = load_with_transformers(folder)
    with torch.no_grad():
        found_BSV = model(tokens_BS, use_cache=False).logits
    if found_BSV.shape != logits_BSV.shape:
        raise ValueError(f"logits are {list(logits_BSV.shape)}, the exported model gives {list(found_BSV.shape)}")
    return float((found_BSV - logits_BSV.float()).abs().max())
