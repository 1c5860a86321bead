"""Compare what a back-end gives with the reference: bit for bit, or to the bound of what it declares."""

import torch
from torch import Tensor

from coterie_parallel.conformance.reference import Layout, reference_combine, reference_rows
from coterie_parallel.dispatch import Guarantees

__all__ = ["difference", "largest_value", "row_places", "rows_difference", "sums_difference"]


def difference(name: str, got: Tensor, expected: Tensor) -> list[str]:
    """Return a sentence unless both are equal bit for bit."""
    got = got.detach().cpu()
    found = _kind_problems(name, got, expected)
    if found or torch.equal(got, expected):
        return found
    first = tuple((~(got == expected)).nonzero()[0].tolist())
    return [f"{name} is wrong first at {first}: {got[first].item()}, expected {expected[first].item()}"]


def rows_difference(name: str, got_RD: Tensor, expected_RD: Tensor, row_error: float) -> list[str]:
    """Return a sentence unless rows are those expected; each value may be off by a share of the largest of its row."""
    if row_error == 0:
        return difference(name, got_RD, expected_RD)
    return _excess(name, got_RD, expected_RD, largest_value(expected_RD) * row_error)


def sums_difference(
    name: str,
    got_TD: Tensor,
    values_TKD: Tensor,
    ids_TK: Tensor,
    guarantees: Guarantees,
    error_TKD: Tensor | None = None,
) -> list[str]:
    """Return a sentence unless ``got_TD`` is for each token the sum of its routed values, as exact as is declared.

    Args:
        name: of the sum.
        got_TD: what the back-end gave.
        values_TKD: what was to be added.
        ids_TK: -1 for a pair that is not routed.
        guarantees: those of the back-end.
        error_TKD: by how much each value may be off before it is added; None for not at all.
    """
    if guarantees.sum_roundings == 1 and error_TKD is None:
        return difference(name, got_TD, reference_combine(values_TKD, ids_TK))
    info = torch.finfo(values_TKD.dtype)
    routed_TK1 = (ids_TK >= 0).unsqueeze(2)
    exact_TKD = values_TKD.double().where(routed_TK1, 0.0)
    error_TD = torch.zeros(()) if error_TKD is None else error_TKD.double().where(routed_TK1, 0.0).sum(1)
    relative = guarantees.relative_sum_error(info.eps / 2, max(1, ids_TK.shape[1]))
    # Below the smallest normal number a rounding is off by an absolute amount.
    subnormal = guarantees.sum_roundings * info.smallest_normal * info.eps
    bound_TD = error_TD + (exact_TKD.abs().sum(1) + error_TD) * relative + subnormal
    return _excess(name, got_TD, exact_TKD.sum(1).to(values_TKD.dtype), bound_TD, exact=exact_TKD.sum(1))


def largest_value(rows_RD: Tensor) -> Tensor:
    """Return the largest absolute value of each row, in fp64 and with a last dimension of one."""
    return rows_RD.double().abs().amax(-1, keepdim=True) if rows_RD.numel() else rows_RD.double()[..., :1]


def row_places(
    layout: Layout, weights_by_source: list[Tensor], row_weights_R: Tensor, guarantees: Guarantees
) -> Tensor:
    """Return where each row of ``layout`` is among those that came: at its own place, or where its weight is.

    Where weights came that are not those of the layout, some place of the same expert stands for the right one, so that
    all goes on; the comparison of the weights tells.

    Args:
        layout: rows in the order of the contract.
        weights_by_source: (T, K) of each source; no two in one expert are equal.
        row_weights_R: fp32 on the CPU, what came.
        guarantees: those of the back-end.
    """
    num_rows = min(len(layout.pairs_R), row_weights_R.shape[0])
    places = torch.arange(num_rows)
    if guarantees.row_order == "contract":
        return places
    expected_R = reference_rows(layout, weights_by_source)
    start = 0
    for end in layout.offsets_e:
        stop = start + sum(pair is not None for pair in layout.pairs_R[start:end])
        if stop <= num_rows:
            places[start + expected_R[start:stop].argsort()] = start + row_weights_R[start:stop].argsort()
        start = end
    return places


def _kind_problems(name: str, got: Tensor, expected: Tensor) -> list[str]:
    if got.shape == expected.shape and got.dtype == expected.dtype:
        return []
    return [f"{name} is {got.dtype} of shape {tuple(got.shape)}, expected {expected.dtype} of {tuple(expected.shape)}"]


def _excess(name: str, got: Tensor, expected: Tensor, bound: Tensor, exact: Tensor | None = None) -> list[str]:
    """Return a sentence if ``got`` is further from ``exact`` (or ``expected``) than ``bound`` anywhere, or is NaN."""
    got = got.detach().cpu()
    found = _kind_problems(name, got, expected)
    if found:
        return found
    exact = expected.double() if exact is None else exact
    off = (got.double() - exact).abs()
    # Negated, so that NaN counts.
    wrong = ~(off <= bound.expand_as(off))
    if not wrong.any():
        return []
    first = tuple(wrong.nonzero()[0].tolist())
    return [
        f"{name} is off by {off[first].item():.3g} first at {first}, and what is declared allows "
        f"{bound.expand_as(off)[first].item():.3g}: {got[first].item()}, expected {exact[first].item()}"
    ]
