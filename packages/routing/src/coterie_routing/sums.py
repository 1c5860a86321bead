"""Load statistics as values: they add up over micro-batches and ranks, and a loss is computed from the sum once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["LoadSums", "pack", "unpack", "load_imbalance"]


@dataclass(frozen=True, eq=False)
class LoadSums:
    """Hold what one router saw of some tokens, as sums over the real ones.

    Attributes:
        counts_E: Number of choices that each expert won, int64.
        probability_sums_E: Sum over tokens of each expert's probability, fp64, differentiable.
        z_sum: Sum over tokens of logsumexp(logits)^2, fp64 scalar, differentiable.
        num_tokens: Number of real tokens, int64 scalar.

    Raises:
        ValueError: If a field has another dtype: counts kept in a float of 8 or 24 bits stop counting in silence.
    """

    counts_E: Tensor
    probability_sums_E: Tensor
    z_sum: Tensor
    num_tokens: Tensor

    def __post_init__(self) -> None:
        expected = {
            "counts_E": torch.int64,
            "probability_sums_E": torch.float64,
            "z_sum": torch.float64,
            "num_tokens": torch.int64,
        }
        for name, dtype in expected.items():
            if getattr(self, name).dtype != dtype:
                raise ValueError(f"LoadSums.{name} must be {dtype}, not {getattr(self, name).dtype}")

    @classmethod
    def zero(cls, num_experts: int, device: torch.device | str | None = None) -> Self:
        """Return the sums of no tokens, the start of an accumulation."""
        return cls(
            counts_E=torch.zeros(num_experts, dtype=torch.int64, device=device),
            probability_sums_E=torch.zeros(num_experts, dtype=torch.float64, device=device),
            z_sum=torch.zeros((), dtype=torch.float64, device=device),
            num_tokens=torch.zeros((), dtype=torch.int64, device=device),
        )

    def __add__(self, other: Self) -> Self:
        if self.counts_E.shape != other.counts_E.shape:
            raise ValueError(
                f"cannot add the sums of {self.counts_E.numel()} experts and of {other.counts_E.numel()} experts"
            )
        return type(self)(
            counts_E=self.counts_E + other.counts_E,
            probability_sums_E=self.probability_sums_E + other.probability_sums_E,
            z_sum=self.z_sum + other.z_sum,
            num_tokens=self.num_tokens + other.num_tokens,
        )

    def detach(self) -> Self:
        """Return the same numbers without their graph, to be kept or logged after backward."""
        return type(self)(
            counts_E=self.counts_E,
            probability_sums_E=self.probability_sums_E.detach(),
            z_sum=self.z_sum.detach(),
            num_tokens=self.num_tokens,
        )


def pack(sums: Sequence[LoadSums]) -> Tensor:
    """Lay the sums of all layers into one flat fp64 tensor, so that one reduction serves them all.

    Shape: sum over layers of 2 * E + 2. The tensor carries no graph. Integers stay exact up to 2^53.
    """
    parts = [
        part.detach().reshape(-1).to(torch.float64)
        for one in sums
        for part in (one.counts_E, one.probability_sums_E, one.z_sum, one.num_tokens)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def unpack(flat: Tensor, like: Sequence[LoadSums]) -> list[LoadSums]:
    """Take a packed tensor apart again; `like` gives the number of experts of each layer.

    Raises:
        ValueError: If the length or the dtype of `flat` is not that of `pack(like)`.
    """
    sizes = [size for one in like for size in (one.counts_E.numel(), one.counts_E.numel(), 1, 1)]
    if flat.shape != (sum(sizes),) or flat.dtype != torch.float64:
        raise ValueError(
            f"expected a packed fp64 tensor of {sum(sizes)} numbers, got shape {tuple(flat.shape)} of {flat.dtype}"
        )
    parts = torch.split(flat, sizes)
    return [
        LoadSums(
            counts_E=parts[first].to(torch.int64),
            # A copy: a later reduction into `flat` must not change what was taken from it.
            probability_sums_E=parts[first + 1].clone(),
            z_sum=parts[first + 2].reshape(()).clone(),
            num_tokens=parts[first + 3].reshape(()).to(torch.int64),
        )
        for first in range(0, len(parts), 4)
    ]


def load_imbalance(counts_E: Tensor) -> Tensor:
    """Return the load of the busiest expert over the mean load: 1 is even, E is all on one expert.

    The result is an fp64 scalar on the device of the counts; no load at all counts as even.
    """
    load_E = counts_E.to(torch.float64)
    total = load_E.sum()
    return torch.where(total > 0, load_E.max() * load_E.numel() / total, torch.ones_like(total))
