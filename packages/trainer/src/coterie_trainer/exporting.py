"""From a run's checkpoint to a Hugging Face folder, in one process, whatever layout the run had."""

from pathlib import Path

import torch
from coterie_export import ModelSpec, compare_logits, export_model
from torch import Tensor

from coterie_trainer.checkpoint import Checkpoints, read_tensors
from coterie_trainer.model import Decoder, build_model
from coterie_trainer.run_folder import read_spec, tokenizer_files

__all__ = ["ExportMismatchError", "check_export", "decoder_from_tensors", "export_run", "read_run"]


class ExportMismatchError(RuntimeError):
    """An exported folder computes something else than the run that it was exported from."""


def read_run(run: str | Path, step: int | None = None) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Return the spec and the model tensors of a run.

    Args:
        run: a run folder.
        step: step of the checkpoint; None takes the newest.

    Raises:
        ValueError: no run folder, or no checkpoint of that step; the message lists the steps there are.
    """
    spec = read_spec(run)
    checkpoints = Checkpoints(run)
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"{run} has no complete checkpoint yet")
    if step is not None and step not in steps:
        raise ValueError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    tensors = read_tensors(checkpoints.path(steps[-1] if step is None else step), "model/")
    return spec, tensors


def decoder_from_tensors(spec: ModelSpec, tensors: dict[str, Tensor]) -> Decoder:
    """Return a decoder on the CPU, on one process, that holds ``tensors``."""
    dtype = tensors["embed.weight"].dtype
    model = build_model(spec, dtype=dtype)
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    family: str,
    step: int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a run's model as a Hugging Face folder of the named family, with its tokenizer.

    Args:
        run: a run folder.
        out: the folder to write; it must not exist or be empty.
        family: name of a family of coterie-export.
        step: step of the checkpoint; None takes the newest.
        dtype: dtype of the files; None keeps the checkpoint's.

    Raises:
        ValueError: the family cannot hold this model (every reason is listed), or the target is not empty.
    """
    spec, tensors = read_run(run, step)
    export_model(spec, tensors, out, family=family, dtype=dtype, tokenizer_files=tokenizer_files(run))


@torch.no_grad()
def check_export(run: str | Path, out: str | Path, *, step: int | None = None, num_tokens: int = 256) -> float:
    """Load an export with transformers and compare its logits with Coterie's on the same tokens.

    Args:
        run: the run folder that was exported.
        out: the exported folder.
        step: step of the exported checkpoint; None is the newest.
        num_tokens: length of the compared sequence of seeded random ids, cut to the model's maximum.

    Returns:
        The largest absolute difference of a logit, relative to the largest absolute logit.

    Raises:
        ExportMismatchError: the difference is above 1e-4.
    """
    spec, tensors = read_run(run, step)
    model = decoder_from_tensors(spec, tensors).float()  # the arithmetic of both sides is fp32
    length = min(num_tokens, spec.max_sequence_length)
    tokens_BS = torch.randint(spec.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    hidden_BSD = model(tokens_BS, torch.zeros(1, length, dtype=torch.int32)).hidden_BSD
    logits_BSV = model.logits(hidden_BSD)
    difference = compare_logits(out, tokens_BS, logits_BSV) / float(logits_BSV.abs().max())
    if difference > 1e-4:
        raise ExportMismatchError(f"{out} gives other logits than {run}: relative difference {difference:.1e}")
    return difference
