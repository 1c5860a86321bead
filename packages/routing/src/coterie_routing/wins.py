"""How experts win tokens: by how much, and how much of their probability lies on tokens that they lost.

Districts are gerrymandered by packing and cracking. Here an expert is packed where it wins tokens with far more
probability than it needs, and cracked where its probability is spread over tokens that others win by a hair.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coterie_routing.router import Routing

__all__ = ["WinSums", "win_sums"]


@dataclass(frozen=True, eq=False)
class WinSums:
    """Hold how experts win tokens, as sums over real tokens without a graph; parts of a batch are added.

    An expert wins a token that chose it, whether or not there was room for it. Probabilities are normalised over the
    experts. The margin of a win is the winner's probability minus that of the best expert that the token did not
    choose (0 if it chose all). It is negative where a selection bias or a limit to groups overrode the probabilities.

    Attributes:
        won_E: Tokens that each expert won, int64.
        won_probability_sums_E: Sum of its probability over the tokens that it won, fp64.
        probability_sums_E: Sum of its probability over all real tokens, fp64.
        margin_sums_E: Sum of its margin over the tokens that it won, fp64.
        narrow_E: Tokens that it won by a margin below `narrow` of its own probability, int64.
        narrow: That fraction.
    """

    won_E: Tensor
    won_probability_sums_E: Tensor
    probability_sums_E: Tensor
    margin_sums_E: Tensor
    narrow_E: Tensor
    narrow: float

    def __add__(self, other: Self) -> Self:
        if self.won_E.shape != other.won_E.shape or self.narrow != other.narrow:
            raise ValueError(
                f"cannot add wins of {self.won_E.numel()} experts (narrow: {self.narrow}) and of "
                f"{other.won_E.numel()} experts (narrow: {other.narrow})"
            )
        return type(self)(
            won_E=self.won_E + other.won_E,
            won_probability_sums_E=self.won_probability_sums_E + other.won_probability_sums_E,
            probability_sums_E=self.probability_sums_E + other.probability_sums_E,
            margin_sums_E=self.margin_sums_E + other.margin_sums_E,
            narrow_E=self.narrow_E + other.narrow_E,
            narrow=self.narrow,
        )

    @property
    def packing_E(self) -> Tensor:
        """Mean probability with which each expert wins, fp64; NaN for an expert that won nothing."""
        return self.won_probability_sums_E / self.won_E

    @property
    def cracking_E(self) -> Tensor:
        """Share of each expert's probability that lies, wasted, on tokens that it lost, fp64."""
        return 1 - self.won_probability_sums_E / self.probability_sums_E

    @property
    def margin_E(self) -> Tensor:
        """Mean margin of each expert's wins, fp64; NaN for an expert that won nothing."""
        return self.margin_sums_E / self.won_E

    @property
    def wasted(self) -> float:
        """Share of all probability that lies on experts that the token did not choose."""
        return 1 - _ratio(self.won_probability_sums_E.sum(), self.probability_sums_E.sum())

    @property
    def margin(self) -> float:
        """Mean margin of all wins."""
        return _ratio(self.margin_sums_E.sum(), self.won_E.sum())

    @property
    def narrow_share(self) -> float:
        """Share of all wins that are narrow."""
        return _ratio(self.narrow_E.sum(), self.won_E.sum())


@torch.no_grad()
def win_sums(routing: Routing, *, narrow: float = 0.1) -> WinSums:
    """Return how the experts won the tokens of one routing; masked tokens are in no sum.

    Nothing waits for a GPU here.

    Args:
        routing: Of T tokens.
        narrow: A win counts as narrow if its margin is below this fraction of the winner's probability, 0 to 1.

    Raises:
        ValueError: If `narrow` is not between 0 and 1.
    """
    if not 0 <= narrow <= 1:
        raise ValueError(f"narrow ({narrow}) must be from 0 to 1; usual: 0.1")
    probabilities_TE = routing.probabilities_TE.to(torch.float64)
    chosen_TK = routing.chosen_TK
    # scatter_add, for the -1 of a masked choice must not overwrite the choice of expert 0.
    hits_TE = torch.zeros_like(probabilities_TE, dtype=torch.int64)
    is_won_TE = hits_TE.scatter_add_(1, chosen_TK.clamp_min(0), (chosen_TK >= 0).to(torch.int64)) > 0
    best_left_T1 = probabilities_TE.masked_fill(is_won_TE, 0).amax(-1, keepdim=True)
    margin_TE = probabilities_TE - best_left_T1
    is_narrow_TE = is_won_TE & (margin_TE < narrow * probabilities_TE)
    return WinSums(
        won_E=is_won_TE.sum(0),
        won_probability_sums_E=probabilities_TE.where(is_won_TE, 0).sum(0),
        probability_sums_E=probabilities_TE.sum(0),
        margin_sums_E=margin_TE.where(is_won_TE, 0).sum(0),
        narrow_E=is_narrow_TE.sum(0),
        narrow=narrow,
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) else 0.0
