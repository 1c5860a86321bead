"""Load statistics as values: they add up over micro-batches and ranks, and a loss is computed from the sum once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

__all__ = ["LoadSums", "pack", "unpack", "reduce_sums", "load_imbalance"]


@dataclass(frozen=True, eq=False)
class LoadSums:
    """Hold what one router saw of some tokens, as sums over the real ones.

    Attributes:
        counts_E: Number of choices that each expert won, int64.
        probability_sums_E: Sum over tokens of each expert's probability, fp64, differentiable.
        z_sum: Sum over tokens of logsumexp(logits)^2, fp64 scalar, differentiable.
        num_tokens: Number of real tokens, int64 scalar.
        num_dropped: Number of choices beyond the capacity of their expert, int64 scalar; they are in the counts.
        num_bad: Number of real tokens with a NaN or an infinite logit, all if the bias has a NaN; int64 scalar.

    Raises:
        ValueError: If a field has another dtype: counts kept in a float of 8 or 24 bits stop counting in silence.
    """

    counts_E: Tensor
    probability_sums_E: Tensor
    z_sum: Tensor
    num_tokens: Tensor
    num_dropped: Tensor
    num_bad: Tensor

    def __post_init__(self) -> None:
        expected = {
            "counts_E": torch.int64,
            "probability_sums_E": torch.float64,
            "z_sum": torch.float64,
            "num_tokens": torch.int64,
            "num_dropped": torch.int64,
            "num_bad": torch.int64,
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
            num_dropped=torch.zeros((), dtype=torch.int64, device=device),
            num_bad=torch.zeros((), dtype=torch.int64, device=device),
        )

    def __add__(self, other: Self) -> Self:
        if self.counts_E.shape != other.counts_E.shape:
            raise ValueError(
                f"cannot add the sums of {self.counts_E.numel()} experts and of {other.counts_E.numel()} experts"
            )
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __radd__(self, other: object) -> Self:
        # What the built-in sum() begins with.
        if other != 0:
            return NotImplemented
        return self

    def detach(self) -> Self:
        """Return the same numbers without their graph, to be kept or logged after backward."""
        return type(self)(**{f.name: getattr(self, f.name).detach() for f in fields(self)})


def pack(sums: Sequence[LoadSums]) -> Tensor:
    """Lay the sums of all layers into one flat fp64 tensor, so that one reduction serves them all.

    Shape: sum over layers of 2 * E + 4. The tensor carries no graph. Integers stay exact up to 2^53.
    """
    parts = [getattr(one, f.name).detach().reshape(-1).to(torch.float64) for one in sums for f in fields(one)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def unpack(flat: Tensor, like: Sequence[LoadSums]) -> list[LoadSums]:
    """Take a packed tensor apart again; `like` gives the number of experts of each layer.

    Raises:
        ValueError: If the length or the dtype of `flat` is not that of `pack(like)`.
    """
    sizes = [getattr(one, f.name).numel() for one in like for f in fields(one)]
    if flat.shape != (sum(sizes),) or flat.dtype != torch.float64:
        raise ValueError(
            f"expected a packed fp64 tensor of {sum(sizes)} numbers, got shape {tuple(flat.shape)} of {flat.dtype}"
        )
    parts = iter(torch.split(flat, sizes))
    # A copy of each: a later reduction into `flat` must not change what was taken from it.
    return [
        LoadSums(
            **{
                f.name: next(parts).to(getattr(one, f.name).dtype, copy=True).reshape(getattr(one, f.name).shape)
                for f in fields(one)
            }
        )
        for one in like
    ]


def reduce_sums(sums: Sequence[LoadSums], sum_over_ranks: Callable[[Tensor], Tensor]) -> list[LoadSums]:
    """Add the sums of all layers over the ranks in one reduction.

    Args:
        sums: The sums of this rank, one for each layer.
        sum_over_ranks: Takes a tensor and returns its sum over the ranks: an all-reduce that returns its result.

    Raises:
        ValueError: If the callable returns something else.
    """
    summed = sum_over_ranks(pack(sums))
    if not isinstance(summed, Tensor):
        raise ValueError(f"sum_over_ranks must return the sum as a tensor, but returned {summed!r}")
    return unpack(summed, sums)


def load_imbalance(counts_E: Tensor) -> Tensor:
    """Return the load of the busiest expert over the mean load: 1 is even, E is all on one expert.

    The result is an fp64 scalar on the device of the counts; no load at all counts as even.
    """
    load_E = counts_E.to(torch.float64)
    total = load_E.sum()
    # Asked so that a load of NaN gives NaN, not an even load.
    return torch.where(total == 0, 1.0, load_E.max() * load_E.numel() / total)
