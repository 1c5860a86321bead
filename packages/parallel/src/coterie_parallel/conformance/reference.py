"""The contract of dispatch and combine as plain loops over the batch of all ranks; the ground truth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "Pair", "reference_combine", "reference_layout", "reference_rows"]

Pair = tuple[int, int, int]
"""Source rank, token, choice."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The rows of one rank: the pair of each row, None for padding, and the inclusive ends of the segments."""

    pairs_R: tuple[Pair | None, ...]
    offsets_e: tuple[int, ...]


def reference_layout(
    ids_by_source: Sequence[Sequence[Sequence[int]]], *, num_experts: int, degree: int, index: int, alignment: int = 1
) -> Layout:
    """Return the rows that axis index ``index`` of ``degree`` receives when source s routes ``ids_by_source[s]``."""
    num_local = num_experts // degree
    pairs: list[Pair | None] = []
    offsets = []
    for expert in range(index * num_local, (index + 1) * num_local):
        for source, ids_TK in enumerate(ids_by_source):
            for token, ids_K in enumerate(ids_TK):
                pairs += [(source, token, choice) for choice, chosen in enumerate(ids_K) if chosen == expert]
        pairs += [None] * (-len(pairs) % alignment)
        offsets.append(len(pairs))
    return Layout(pairs_R=tuple(pairs), offsets_e=tuple(offsets))


def reference_rows(layout: Layout, values_by_source: Sequence[Tensor], padding: float = 0.0) -> Tensor:
    """Return the value of the pair of every row of ``layout``, and ``padding`` where there is none.

    Args:
        layout: R rows.
        values_by_source: (T, K, ...), the values of each source.
        padding: value of padding rows.
    """
    first = values_by_source[0]
    rows_R = torch.full((len(layout.pairs_R), *first.shape[2:]), padding, dtype=first.dtype)
    for row, pair in enumerate(layout.pairs_R):
        if pair is not None:
            source, token, choice = pair
            rows_R[row] = values_by_source[source][token, choice]
    return rows_R


def reference_combine(values_TKD: Tensor, ids_TK: Tensor) -> Tensor:
    """Return for each token the sum of its routed values, from +0 in fp32 in k order, in the dtype of the values."""
    num_tokens, num_choices, width = values_TKD.shape
    y_TD = torch.zeros(num_tokens, width)
    for token in range(num_tokens):
        for choice in range(num_choices):
            if ids_TK[token, choice] >= 0:
                y_TD[token] += values_TKD[token, choice].float()
    return y_TD.to(values_TKD.dtype)
