"""Fit the cases to the tokens that a back-end takes, and say in words what it claims and how that is checked."""

from dataclasses import dataclass, replace

import torch

from coterie_parallel.conformance.cases import Case
from coterie_parallel.dispatch import Dispatcher, DispatchOptions, Guarantees, guarantees_of

__all__ = ["Fit", "claims", "fit_case"]

# Taken in turn where a back-end refuses those of a case.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A case with tokens that the back-end takes; ``refused`` says why those of the case itself are not taken."""

    case: Case
    refused: tuple[str, ...] = ()


def fit_case(
    dispatcher: type[Dispatcher], case: Case, device: torch.device | str, options: DispatchOptions | None
) -> Fit | None:
    """Return ``case`` in the first width and dtype that ``dispatcher`` takes, its own before others; None for none."""

    def problems(width: int, dtype: torch.dtype) -> list[str]:
        return dispatcher.token_problems(
            DispatchOptions() if options is None else options,
            width=width,
            num_choices=case.top_k,
            dtype=dtype,
            device=torch.device(device).type,
        )

    refused = problems(case.width, case.dtype)
    if not refused:
        return Fit(case=case)
    for dtype in dict.fromkeys((case.dtype, *DTYPES)):
        for width in (case.width, *(width for width in WIDTHS if width > case.width)):
            if not problems(width, dtype):
                return Fit(case=replace(case, width=width, dtype=dtype), refused=tuple(refused))
    return None


def claims(
    dispatcher: type[Dispatcher], device: torch.device | str = "cpu", options: DispatchOptions | None = None
) -> list[str]:
    """Return what ``dispatcher`` claims with ``options``, a sentence for each guarantee with how it is checked."""
    try:
        found = _claims(guarantees_of(dispatcher, DispatchOptions() if options is None else options))
    except ValueError as error:
        return [f"the declaration is wrong: {error}"]
    fit = fit_case(dispatcher, Case(name="usual", why="the tokens of most cases"), device, options)
    if fit is not None and fit.refused:
        found.append(
            f"tokens: {fit.case.dtype} of width {fit.case.width} in most cases, as others are refused: "
            + "; ".join(fit.refused)
        )
    return found


def _claims(guarantees: Guarantees) -> list[str]:
    problems = guarantees.problems()
    if problems:
        return [f"the declaration is wrong: {problem}" for problem in problems]
    found = ["segments, padding, row weights, gradients of rows and of weights: the contract (checked bit for bit)"]
    if guarantees.row_order == "contract":
        found.append("order of rows: the contract (checked row by row)")
    else:
        found.append(
            "order of rows: any inside an expert, another at each dispatch (checked as sets: each row is found by its "
            "weight and held to its token; recomputed forward passes are not run, as they would meet another order)"
        )
    if guarantees.row_error == 0:
        found.append("values of rows: those of the tokens (checked bit for bit)")
    else:
        found.append(
            f"values of rows: off by at most {guarantees.row_error:.3g} of the largest value of the token (checked to "
            "that bound, as is what is computed from them)"
        )
    if guarantees.sum_roundings == 1:
        found.append("sums over the rows of a token: fp32 in k order, rounded once (checked bit for bit)")
    else:
        bounds = ", ".join(
            f"{guarantees.relative_sum_error(torch.finfo(dtype).eps / 2, 8):.2g} in {name}"
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        )
        found.append(
            f"sums over the rows of a token: rounded {guarantees.sum_roundings} times, in any order (checked to the "
            f"bound of that many roundings: of the sum of absolute values, with 8 choices, {bounds})"
        )
    if guarantees.sizes == "any":
        found.append("sizes: one dispatcher takes batches of any size, width and dtype (checked by the case reuse)")
    else:
        found.append("sizes: the first batch of a dispatcher decides (checked by the case reuse, on no larger ones)")
    return found
