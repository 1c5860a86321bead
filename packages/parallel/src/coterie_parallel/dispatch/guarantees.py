"""What a back-end promises about the rows it moves: the contract, or less, and then how much less."""

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Guarantees", "RowOrder", "Sizes", "guarantees_of"]

RowOrder = Literal["contract", "any"]
Sizes = Literal["any", "first"]
_MOST_ROUNDINGS = 64


@dataclass(frozen=True, kw_only=True)
class Guarantees:
    """What `Dispatcher.guarantees` declares; by default all of the contract, and weaker only where a field says so.

    Whatever is declared, segments, padding, row weights with their gradient, and the gradient of the rows are those of
    the contract, bit for bit.

    Attributes:
        row_order: "contract": local expert, source rank, token, choice. "any": the rows of one expert come before its
            padding, but among them in any order, and in another one at each dispatch. Then nothing that sends rows a
            second time may be joined with what was kept of the first, as a recomputed forward pass does.
        row_error: largest error of a value of rows_RD over the largest absolute value of its token; 0 for none, 2^-4
            for three bits behind the point. It adds to what is computed from the rows.
        sum_roundings: how often a sum over the rows of a token (y_TD and the gradient of the tokens) is rounded to the
            dtype of the rows. 1: the contract, from zero, in fp32, in k order, rounded once at the end. n of at least
            2: sums of some rows are rounded on the way, one rounding after another n - 1 times, and added in any order.
        sizes: "any": one dispatcher takes batches of any size, width, number of choices and dtype. "first": those of
            its first batch decide, and no later one has more tokens on any rank.
    """

    row_order: RowOrder = "contract"
    row_error: float = 0.0
    sum_roundings: int = 1
    sizes: Sizes = "any"

    def problems(self) -> list[str]:
        """Return every fault of this declaration."""
        found = []
        if self.row_order not in ("contract", "any"):
            found.append(f"row_order ({self.row_order!r}) must be one of: contract, any")
        if not 0 <= self.row_error < 1:
            found.append(f"row_error ({self.row_error}) must be at least 0 and below 1, where nothing would be left")
        if not isinstance(self.sum_roundings, int) or not 1 <= self.sum_roundings <= _MOST_ROUNDINGS:
            found.append(
                f"sum_roundings ({self.sum_roundings}) must be an integer from 1, which is the contract, "
                f"to {_MOST_ROUNDINGS}"
            )
        if self.sizes not in ("any", "first"):
            found.append(f"sizes ({self.sizes!r}) must be one of: any, first")
        return found

    def relative_sum_error(self, unit: float, num_rows: int) -> float:
        """Return the largest error of a sum of ``num_rows`` rows over the sum of their absolute values.

        The standard bound of rounding error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 3.1):
        each rounding is a factor of at most 1 + its unit, and ``num_rows`` fp32 additions are the most between them.

        Args:
            unit: half the distance from 1 to the next number of the dtype of the rows, 2^-8 for bf16.
            num_rows: rows of a token.
        """
        return float((1 + unit) ** self.sum_roundings * (1 + 2**-24) ** num_rows - 1)


def guarantees_of(dispatcher: type[Any], options: Any) -> Guarantees:
    """Return what a back-end declares, `Dispatcher.guarantees`, for some `DispatchOptions`.

    Raises:
        ValueError: if it returns no `Guarantees`; names the back-end.
    """
    declared = dispatcher.guarantees(options)
    if not isinstance(declared, Guarantees):
        raise ValueError(
            f"guarantees of {dispatcher.__module__}.{dispatcher.__qualname__} must return coterie_parallel.Guarantees, "
            f"got {declared!r}; a back-end that keeps all of the contract returns Guarantees() or does not define it"
        )
    return declared
