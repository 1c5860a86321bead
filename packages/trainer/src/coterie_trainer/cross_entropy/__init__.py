"""The cross-entropy of a decoder's hidden states, with all logits at once or in chunks of tokens.

Back-ends, by name:

    "torch"     logits of all tokens, in the dtype of the model and in fp32
    "chunked"   logits of one chunk of tokens at a time: see `coterie_trainer.cross_entropy.chunked`
    "auto"      "chunked" where the logits of all tokens do not fit into one chunk, else "torch"
"""

from typing import Literal, Protocol, get_args

import torch.nn.functional as F
from coterie_export import ModelSpec
from torch import Tensor

from coterie_trainer.cross_entropy.chunked import chunked_cross_entropy_sum, tokens_in_chunk

__all__ = ["CrossEntropyBackend", "chunked_cross_entropy_sum", "cross_entropy_sum", "head_weight", "tokens_in_chunk"]

CrossEntropyBackend = Literal["auto", "torch", "chunked"]
_IGNORED = -1


class _HasHead(Protocol):
    """A decoder, as far as its head goes."""

    spec: ModelSpec

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., D)."""


def head_weight(model: _HasHead) -> Tensor:
    """Return the weight (V, D) that makes logits: of the head, or of the embedding where the two are tied."""
    module = getattr(model, "embed" if model.spec.tied_embeddings else "head")
    weight: Tensor = module.weight
    return weight


def cross_entropy_sum(
    model: _HasHead, hidden_BSD: Tensor, targets_BS: Tensor, *, backend: CrossEntropyBackend = "auto"
) -> Tensor:
    """Return the sum of the cross-entropy in nats over positions that have a target (``targets_BS`` not -1).

    Args:
        model: has the head.
        hidden_BSD: last hidden states.
        targets_BS: int64, 0 to V-1, or -1.
        backend: see above. "torch" returns fp32, "chunked" fp32 or wider.

    Raises:
        ValueError: the back-end is unknown.
    """
    if backend not in get_args(CrossEntropyBackend):
        known = ", ".join(get_args(CrossEntropyBackend))
        raise ValueError(f"cross-entropy back-end ({backend!r}) must be one of: {known}")
    if backend == "auto":
        fits = targets_BS.numel() <= tokens_in_chunk(model.spec.vocab_size, hidden_BSD.dtype)
        backend = "torch" if fits else "chunked"
    if backend == "torch":
        logits_TV = model.logits(hidden_BSD).flatten(0, 1).float()
        return F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=_IGNORED, reduction="sum")
    return chunked_cross_entropy_sum(hidden_BSD.flatten(0, 1), head_weight(model), targets_BS.flatten())
