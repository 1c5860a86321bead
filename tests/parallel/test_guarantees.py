"""A back-end that declares less than the contract is held to what it declares, and one that declares too much fails."""

from typing import Any

import pytest
import torch
from coterie_parallel import Axis, Dispatched, DispatchOptions, Guarantees
from coterie_parallel.conformance import CASES, claims, conformance_problems, make_tokens
from coterie_parallel.dispatch.local import LocalDispatcher
from torch import Tensor


class _Declares(LocalDispatcher):
    """Says that it keeps less than the contract, which it keeps."""

    declared = Guarantees(row_order="any", sum_roundings=2, row_error=2**-4, sizes="first")

    @classmethod
    def guarantees(cls, options: DispatchOptions) -> Guarantees:
        return cls.declared


class _AnyOrder(_Declares):
    """Rows of one expert in an order of their own at each dispatch."""

    declared = Guarantees(row_order="any")

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        self.number = getattr(self, "number", 0) + 1
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        place_R = torch.arange(sent.rows_RD.shape[0])
        start = 0
        for end, count in zip(sent.offsets_e.tolist(), self._counts(ids_TK), strict=True):
            place_R[start : start + count] = place_R[start : start + count].roll(self.number)
            start = end
        # An index is differentiable, and so each is still the backward of the other.
        return sent._replace(
            rows_RD=sent.rows_RD[place_R], row_weights_R=sent.row_weights_R[place_R], handle=(sent.handle, place_R)
        )

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        own, place_R = handle
        too_many_R = torch.arange(len(place_R), max(len(place_R), len(rows_RD)))
        return super().combine(rows_RD[torch.cat([place_R.argsort(), too_many_R])], own)

    def _counts(self, ids_TK: Tensor) -> list[int]:
        return [int((ids_TK == expert).sum()) for expert in range(self.num_experts)]


class _OrderAndSaysNothing(_AnyOrder):
    declared = Guarantees()


class _OtherExperts(_AnyOrder):
    """Shuffles the rows of all experts, not of each."""

    def _counts(self, ids_TK: Tensor) -> list[int]:
        return [int((ids_TK >= 0).sum()), *[0] * (self.num_experts - 1)]


class _RowTwice(_AnyOrder):
    """Brings one row of an expert in the place of another, with the right weight."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        rows_RD = sent.rows_RD.clone()
        rows_RD[:1] = rows_RD[1:2].detach()
        return sent._replace(rows_RD=rows_RD)


class _WrongWayBack(_AnyOrder):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD.flip(0), handle)


class _TwoRoundings(_Declares):
    """Adds the even and the odd choices apart and rounds both sums, then their sum."""

    declared = Guarantees(sum_roundings=2)

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        y_TD = super().combine(rows_RD, handle)  # refuses what must be refused
        if rows_RD.shape[0] == 0:
            return y_TD
        row_TK = handle.row_TK
        parts = []
        for start in (0, 1):
            rows = row_TK[:, start::2]
            part_TkD = rows_RD[rows.clamp(min=0)].float().masked_fill((rows < 0).unsqueeze(2), 0)
            parts.append(part_TkD.sum(1).to(rows_RD.dtype))
        return (parts[0].float() + parts[1].float()).to(rows_RD.dtype)


class _TwoRoundingsAndSaysNothing(_TwoRoundings):
    declared = Guarantees()


class _TooCoarse(_TwoRoundings):
    """Keeps three bits of each partial sum in place of the eight of bf16."""

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        y_TD = super().combine(rows_RD, handle)
        return y_TD + ((8 * y_TD).round() / 8 - y_TD).detach()


class _LosesAChoice(_TwoRoundings):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        y_TD = super().combine(rows_RD, handle)
        row_T = handle.row_TK[:, 0]
        return y_TD - (rows_RD[row_T.clamp(min=0)] * (row_T >= 0).unsqueeze(1)).nan_to_num()


class _Rounds(_Declares):
    """Brings rows with three bits behind the point."""

    declared = Guarantees(row_error=2**-4)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        rounded_TD = x_TD.detach().to(self.kept).to(x_TD.dtype)
        return super().dispatch(x_TD + (rounded_TD - x_TD.detach()), ids_TK, weights_TK)

    kept = torch.float8_e4m3fn


class _RoundsAndSaysNothing(_Rounds):
    declared = Guarantees()


class _RoundsMore(_Rounds):
    kept = torch.float8_e5m2


class _OneSize(_Declares):
    """Takes tokens of the width and number of its first batch at most."""

    declared = Guarantees(sizes="first")

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        self.first = getattr(self, "first", x_TD.shape)
        assert x_TD.shape[0] <= self.first[0], "no room"
        assert x_TD.shape[1] == self.first[1], "another width"
        return sent


class _OneSizeAndSaysNothing(_OneSize):
    declared = Guarantees()


class _Nonsense(_Declares):
    declared = Guarantees(row_order="sorted", row_error=1.0, sum_roundings=0, sizes="all")  # type: ignore[arg-type]


class _DeclaresNothing(_Declares):
    declared = None  # type: ignore[assignment]


class _HalfOnly(_Declares):
    """Takes bf16 of widths that are multiples of 64."""

    declared = Guarantees()

    @classmethod
    def token_problems(cls, options: DispatchOptions, *, width: int, dtype: torch.dtype, **given: Any) -> list[str]:
        return [f"width {width} and {dtype}"] if width % 64 or dtype != torch.bfloat16 else []

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        assert x_TD.dtype == torch.bfloat16 or not x_TD.is_floating_point()
        assert x_TD.shape[-1] % 64 == 0
        return super().dispatch(x_TD, ids_TK, weights_TK)


class _TakesNothing(_HalfOnly):
    @classmethod
    def token_problems(cls, options: DispatchOptions, *, width: int, dtype: torch.dtype, **given: Any) -> list[str]:
        return ["never"]


class _ForgetsIds(_Declares):
    declared = Guarantees()

    outside = 0

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        outside_TK = ids_TK >= self.num_experts
        sent = super().dispatch(x_TD, ids_TK.masked_fill(outside_TK, -1), weights_TK)
        self.outside += int(outside_TK.sum())
        return sent


class _TellsLater(_ForgetsIds):
    def grow(self) -> str | None:
        if self.outside:
            raise ValueError(f"{self.outside} ids")
        return None


def _problems(dispatcher: type[LocalDispatcher], *names: str) -> list[str]:
    cases = [one for one in CASES if not names or one.name in names]
    return conformance_problems(dispatcher, Axis.single("expert"), cases=cases)


@pytest.mark.parametrize("weaker", [_Declares, _AnyOrder, _TwoRoundings, _Rounds, _OneSize, _HalfOnly, _TellsLater])
def test_what_declares_less_is_held_to_that(weaker: type[LocalDispatcher]) -> None:
    assert _problems(weaker) == []


@pytest.mark.parametrize(
    ("broken", "case", "problem"),
    [
        (_OrderAndSaysNothing, "uneven", "rows_RD is wrong first at (0, 0)"),
        (_OtherExperts, "uneven", "row_weights_R is wrong"),
        (_RowTwice, "uneven", "rows_RD is wrong"),
        (_WrongWayBack, "uneven", "y_TD is wrong"),
        (_TwoRoundingsAndSaysNothing, "bfloat16", "y_TD is wrong"),
        (_TooCoarse, "bfloat16", "y_TD is off by"),
        (_LosesAChoice, "bfloat16", "gradient of the rows is wrong"),
        (_LosesAChoice, "some_unrouted", "y_TD is off by"),
        (_RoundsAndSaysNothing, "uneven", "rows_RD is wrong"),
        (_RoundsMore, "uneven", "rows_RD is off by"),
        (_RoundsMore, "reuse", "y_TD without gradients is off by"),
        (_OneSizeAndSaysNothing, "reuse", "raises AssertionError: no room"),
        (_Nonsense, "uneven", "what it guarantees: row_order ('sorted') must be one of: contract, any"),
        (_Nonsense, "uneven", "what it guarantees: row_error (1.0) must be at least 0 and below 1"),
        (_Nonsense, "uneven", "what it guarantees: sum_roundings (0) must be an integer from 1"),
        (_Nonsense, "uneven", "what it guarantees: sizes ('all') must be one of: any, first"),
        (
            _DeclaresNothing,
            "uneven",
            "what it guarantees: guarantees of parallel.test_guarantees._DeclaresNothing must return "
            "coterie_parallel.Guarantees, got None; a back-end that keeps all of the contract returns Guarantees()",
        ),
        (_TakesNothing, "uneven", "not supported: no tokens on cpu with 2 choices can be sent"),
        (_ForgetsIds, "refusals", "an id that is no expert, in the dispatch or else in grow: not refused"),
    ],
)
def test_what_declares_more_than_it_keeps_is_found(broken: type[LocalDispatcher], case: str, problem: str) -> None:
    found = _problems(broken, case)
    assert any(problem in one for one in found), found


def test_the_claims_say_what_is_checked_and_how() -> None:
    exact = claims(LocalDispatcher)
    assert [text.partition(":")[0] for text in exact] == [
        "segments, padding, row weights, gradients of rows and of weights",
        "order of rows",
        "values of rows",
        "sums over the rows of a token",
        "sizes",
    ]
    assert claims(_Declares)[1:] == [
        "order of rows: any inside an expert, another at each dispatch (checked as sets: each row is found by its "
        "weight and held to its token; recomputed forward passes are not run, as they would meet another order)",
        "values of rows: off by at most 0.0625 of the largest value of the token (checked to that bound, as is what is "
        "computed from them)",
        "sums over the rows of a token: rounded 2 times, in any order (checked to the bound of that many roundings: of "
        "the sum of absolute values, with 8 choices, 0.0078 in bf16, 6e-07 in fp32)",
        "sizes: the first batch of a dispatcher decides (checked by the case reuse, on no larger ones)",
    ]
    assert claims(_HalfOnly)[5:] == [
        "tokens: torch.bfloat16 of width 64 in most cases, as others are refused: width 8 and torch.float32"
    ]
    assert claims(_DeclaresNothing)[0].startswith("the declaration is wrong: guarantees of ")
    assert claims(_Nonsense)[0] == "the declaration is wrong: row_order ('sorted') must be one of: contract, any"


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_no_two_rows_of_an_expert_have_the_same_weight(degree: int) -> None:
    for case in CASES:
        for layer in range(2):
            batch = [make_tokens(case, degree=degree, source=source, layer=layer) for source in range(degree)]
            ids_N, weights_N = (torch.cat([getattr(one, name).flatten() for one in batch]) for name in _PAIRS)
            pairs = list(zip(ids_N.tolist(), weights_N.tolist(), strict=True))
            routed = [pair for pair in pairs if pair[0] >= 0]
            assert len(set(routed)) == len(routed), case.name


_PAIRS = ("ids_TK", "weights_TK")
