"""A report on load: how uneven it is at each scope, how experts win, and whether the balance score tells the truth.

With the load f (fractions that sum to 1), the mean probability P and the even distribution u, the dot-product score is

    E * sum_i f_i P_i  =  1 + E * (f - u) . (P - u)        and        1 + CV^2  =  1 + E * |f - u|^2

(`balance_loss` has f_i that sum to k, and divides by k). So the score equals 1 + CV^2 where probability and load are
the same thing, and falls below 1 where the probability mass lies on the experts that win little.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_routing.losses import balance_loss, squared_load_loss
from coterie_routing.router import Routing
from coterie_routing.selection import count_choices
from coterie_routing.sums import LoadSums, load_imbalance
from coterie_routing.wins import WinSums

__all__ = [
    "VERDICTS",
    "DomainLoad",
    "LoadReport",
    "ScopeLoad",
    "load_report",
    "split_sums",
]

EVEN = "even"
SHUFFLED = "shuffled"
UNEVEN = "uneven, and the score shows it"
GERRYMANDERED = "gerrymandered"
UNKNOWN = "unknown"
VERDICTS: tuple[str, ...] = (EVEN, SHUFFLED, UNEVEN, GERRYMANDERED, UNKNOWN)

# 1 + CV^2 may be so far above 1 and the load still counts as even: a coefficient of variation of 14 %.
_EVEN_BELOW = 0.02
# Share of the unevenness of the load that the score must show, to be said to show it.
_SHOWN_ABOVE = 0.1
# Rows of the table of experts; of more experts the busiest are shown.
_MOST_ROWS = 16
# Mean distance between the load of a domain and that of the whole, below which experts do not tell domains apart.
_SPECIALISED_ABOVE = 0.05


@dataclass(frozen=True, kw_only=True)
class ScopeLoad:
    """Describe the load at one scope: each number is the mean over the units of the scope that hold tokens.

    Attributes:
        name: Name of the scope.
        num_units: Units that hold tokens.
        num_tokens: Real tokens of all units together.
        max_over_mean: Load of the busiest expert over the mean load; 1 is even.
        coefficient_of_variation: Standard deviation of the load over the experts, over its mean; 0 is even.
        entropy: Entropy of the load over log E; 1 is even.
        gini: Gini coefficient of the load; 0 is even, (E - 1) / E is all on one.
        dead_experts: Number of experts without a token.
        score: Balance score E/k sum f_i P_i; what the dot-product loss minimises at this scope.
        load_score: 1 + CV^2 of the load: the score if probability and load were the same thing.
    """

    name: str
    num_units: int
    num_tokens: int
    max_over_mean: float
    coefficient_of_variation: float
    entropy: float
    gini: float
    dead_experts: float
    score: float
    load_score: float


@dataclass(frozen=True, kw_only=True)
class DomainLoad:
    """Describe how the documents of one domain use the experts.

    Attributes:
        load: Its tokens taken together; `load.name` is the domain.
        distance: Total variation distance between its load and that of the whole step: the fraction of its choices
            that would have to move to make both alike. 0: the experts do not tell the domain from the rest.
    """

    load: ScopeLoad
    distance: float


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Say how even the load of one layer is, and what the balance score makes of it; `str` gives a readable table.

    Attributes:
        num_experts: Number of experts E.
        top_k: Choices for each token.
        scopes: One entry for each scope, in the order given.
        step: All tokens taken together.
        domains: One entry for each document domain; empty if none were given.
        specialisation: Mean distance of the domains from the whole; None without domains.
        optimized_scope: Scope whose score counts as the one that training minimises.
        score: Mean score in that scope.
        load_score: 1 + CV^2 of the load of the step.
        gap: load_score - score: what the score hides of the unevenness; negative where it demands more than evenness
            of the step, as a small scope does of experts that specialise.
        wins: How experts win; None if not given.
        verdict: One of `VERDICTS`; `load_report` has the criteria.
        reason: The verdict with its numbers, in a sentence.
    """

    num_experts: int
    top_k: int
    scopes: tuple[ScopeLoad, ...]
    step: ScopeLoad
    domains: tuple[DomainLoad, ...]
    specialisation: float | None
    optimized_scope: str
    score: float
    load_score: float
    gap: float
    wins: WinSums | None
    verdict: str
    reason: str

    def __str__(self) -> str:
        num_tokens = self.step.num_tokens
        lines = [
            f"load of {num_tokens} tokens over {self.num_experts} experts, top-{self.top_k}: {self.verdict}",
            *textwrap.wrap(self.reason, width=110, initial_indent="  ", subsequent_indent="  "),
            "",
            f"{'scope':22}{'units':>7}{'tokens':>10}{'max/mean':>10}{'CV':>7}{'entropy':>9}{'Gini':>7}{'dead':>6}"
            f"{'score':>8}{'1+CV^2':>8}{'distance':>10}",
        ]
        lines += [_row(scope) for scope in (*self.scopes, self.step)]
        lines += [f"{_row(one.load)}{one.distance:10.3f}" for one in self.domains]
        if self.wins is not None:
            lines += ["", *_win_lines(self.wins)]
        return "\n".join(lines)


@torch.no_grad()
def split_sums(routing: Routing, part_T: Tensor, num_parts: int) -> list[LoadSums]:
    """Return the load sums of parts of one routing: of its sequences, or of its document domains.

    A routing holds no logits and no mask of bad rows, so `z_sum` of a part is NaN; its other sums are exact. A token
    with a NaN probability counts as bad.

    Args:
        routing: Of T tokens.
        part_T: int64 (T), the part that each token belongs to, from 0 to `num_parts` - 1.
        num_parts: Number of parts.

    Raises:
        ValueError: If the shape, the dtype or the device of `part_T` does not fit.
    """
    probabilities_TE, chosen_TK = routing.probabilities_TE.to(torch.float64), routing.chosen_TK
    num_tokens, num_experts = probabilities_TE.shape
    if part_T.shape != (num_tokens,) or part_T.dtype != torch.int64 or part_T.device != chosen_TK.device:
        raise ValueError(
            f"part_T must be int64 of shape ({num_tokens},) on {chosen_TK.device}, "
            f"got {part_T.dtype} of shape {tuple(part_T.shape)} on {part_T.device}"
        )
    is_bad_T = probabilities_TE.isnan().any(-1)
    # A real token has a probability or a choice; a masked one has neither.
    is_real_T = (chosen_TK >= 0).any(-1) | (probabilities_TE != 0).any(-1)
    is_dropped_T = ((chosen_TK >= 0) & (routing.ids_TK < 0)).sum(-1)
    zeros_P = torch.zeros(num_parts, dtype=torch.int64, device=part_T.device)
    ids_TK = torch.where(chosen_TK >= 0, part_T[:, None] * num_experts + chosen_TK, -1)
    counts_PE = count_choices(ids_TK.reshape(1, -1), num_parts * num_experts).reshape(num_parts, num_experts)
    sums_PE = torch.zeros(num_parts, num_experts, dtype=torch.float64, device=part_T.device)
    sums_PE.index_add_(0, part_T, probabilities_TE)
    tokens_P = zeros_P.index_add(0, part_T, is_real_T.to(torch.int64))
    dropped_P = zeros_P.index_add(0, part_T, is_dropped_T)
    bad_P = zeros_P.index_add(0, part_T, is_bad_T.to(torch.int64))
    unknown = torch.full((), torch.nan, dtype=torch.float64, device=part_T.device)
    return [
        LoadSums(
            counts_E=counts_PE[part],
            probability_sums_E=sums_PE[part],
            z_sum=unknown,
            num_tokens=tokens_P[part],
            num_dropped=dropped_P[part],
            num_bad=bad_P[part],
        )
        for part in range(num_parts)
    ]


def load_report(
    sums_by_scope: Mapping[str, Sequence[LoadSums]],
    *,
    top_k: int,
    wins: WinSums | None = None,
    sums_by_domain: Mapping[str, LoadSums] | None = None,
    optimized_scope: str | None = None,
) -> LoadReport:
    """Report on the load of one layer in one optimizer step, or in any set of tokens.

    The verdict, in this order, with noise(N) = (E - 1) / N, the value of CV^2 that N random choices from an even
    distribution would give:

    - "unknown": there are no tokens, or a probability is NaN.
    - "gerrymandered": 1 + CV^2 of the whole load is above 1.02 + noise, but the score shows a tenth of that or less:
      score - 1 <= 0.1 * CV^2. Such a score says "even", or "better than even", of a load that is not. A router whose
      probabilities are still all alike gets this verdict too: its score is blind.
    - "uneven, and the score shows it": uneven as above, and the score shows more than a tenth of it.
    - "shuffled": the whole load is even, and so is the mean unit of the first scope, with the noise of its size; and
      the loads of the domains, at least two, lie on average less than 0.05 from the whole. Tokens are spread evenly
      inside each unit, whatever they are about. Needs `sums_by_domain` and more than one unit.
    - "even": everything else.

    Args:
        sums_by_scope: The same tokens, cut into units in several ways: for each scope ("sequence", "micro_batch",
            "data_parallel", "step" or any other name) the sums of its units. The units of the first scope, together,
            are the whole step. Only counts, probability sums and token numbers are read.
        top_k: Choices for each token.
        wins: How the experts won the same tokens, from `win_sums`.
        sums_by_domain: Sums of the tokens of each document domain.
        optimized_scope: Name of the scope in which training computes its balance loss; the first one by default.

    Raises:
        ValueError: If there is no scope, if the scopes do not hold the same choices, if numbers of experts differ, or
            if `optimized_scope` is not among the scopes.
    """
    sums_by_domain = sums_by_domain or {}
    optimized_scope = next(iter(sums_by_scope), "") if optimized_scope is None else optimized_scope
    totals = _checked_totals(sums_by_scope, sums_by_domain, optimized_scope)
    whole = next(iter(totals.values()))
    scopes = tuple(_scope_load(name, units, top_k) for name, units in sums_by_scope.items())
    step = _scope_load("whole", [whole], top_k)
    domains = tuple(
        DomainLoad(load=_scope_load(name, [sums], top_k), distance=_distance(sums, whole))
        for name, sums in sums_by_domain.items()
    )
    specialisation = sum(one.distance for one in domains) / len(domains) if domains else None
    score = next(one.score for one in scopes if one.name == optimized_scope)
    verdict, reason = _verdict(scopes[0], step, whole, score, optimized_scope, len(domains), specialisation)
    return LoadReport(
        num_experts=whole.counts_E.numel(),
        top_k=top_k,
        scopes=scopes,
        step=step,
        domains=domains,
        specialisation=specialisation,
        optimized_scope=optimized_scope,
        score=score,
        load_score=step.load_score,
        gap=step.load_score - score,
        wins=wins,
        verdict=verdict,
        reason=reason,
    )


def _verdict(
    units: ScopeLoad,
    step: ScopeLoad,
    whole: LoadSums,
    score: float,
    optimized_scope: str,
    num_domains: int,
    specialisation: float | None,
) -> tuple[str, str]:
    num_experts, num_choices = whole.counts_E.numel(), int(whole.counts_E.sum())
    if num_choices == 0:
        return UNKNOWN, "there is no real token"
    if not math.isfinite(score):
        return UNKNOWN, f"the probabilities are not finite; bad tokens: {int(whole.num_bad)}"
    excess, shown = step.load_score - 1, score - 1
    limit = _EVEN_BELOW + (num_experts - 1) / num_choices
    load = f"1 + CV^2 of the whole load is {step.load_score:.3f} (even: up to {1 + limit:.3f})"
    load += f" and the busiest expert has {step.max_over_mean:.2f} x the mean"
    says = f"the score per {optimized_scope} is {score:.3f}"
    if excess > limit:
        shows = f"which shows {100 * shown / excess:.0f} % of the unevenness"
        if shown > _SHOWN_ABOVE * excess:
            return UNEVEN, f"{load}; {says}, {shows}"
        return GERRYMANDERED, f"{load}, yet {says}, {'better than the 1 of an even load' if shown < 0 else shows}"
    unit_limit = _EVEN_BELOW + (num_experts - 1) * units.num_units / num_choices
    if specialisation is not None and num_domains > 1 and units.num_units > 1:
        domain = f"the domains lie {specialisation:.3f} from it on average"
        if units.load_score - 1 <= unit_limit and specialisation < _SPECIALISED_ABOVE:
            inside = f"1 + CV^2 inside each {units.name} is {units.load_score:.3f} (even: up to {1 + unit_limit:.3f})"
            return SHUFFLED, f"{load}, but {inside} too, and {domain} (specialised: from {_SPECIALISED_ABOVE})"
        return EVEN, f"{load}; {domain}; {says}"
    return EVEN, f"{load}; {says}"


def _checked_totals(
    sums_by_scope: Mapping[str, Sequence[LoadSums]], sums_by_domain: Mapping[str, LoadSums], optimized_scope: str
) -> dict[str, LoadSums]:
    """Return the sum over the units of each scope, on the CPU, once it is clear that they can be compared."""
    if not sums_by_scope:
        raise ValueError('there is no scope; give at least {"step": [sums]}')
    if optimized_scope not in sums_by_scope:
        raise ValueError(f"optimized_scope ({optimized_scope!r}) must be one of: {', '.join(sums_by_scope)}")
    empty = [name for name, units in sums_by_scope.items() if not units]
    if empty:
        raise ValueError(f"these scopes have no units: {', '.join(empty)}")
    every = [one for units in sums_by_scope.values() for one in units] + list(sums_by_domain.values())
    sizes = sorted({one.counts_E.numel() for one in every})
    if len(sizes) > 1:
        raise ValueError(f"the sums must be of one layer or of layers of one size, got numbers of experts {sizes}")
    totals = {}
    for name, units in sums_by_scope.items():
        total = LoadSums.zero(sizes[0], units[0].counts_E.device)
        for one in units:
            total = total + one
        totals[name] = total
    choices = {name: total.counts_E.tolist() for name, total in totals.items()}
    first = next(iter(choices))
    other = [name for name, counts in choices.items() if counts != choices[first]]
    if other:
        raise ValueError(
            f"the scopes must cut up the same tokens, but {first} has {sum(choices[first])} choices and "
            + ", ".join(f"{name} {sum(choices[name])}" for name in other)
            + " or other experts"
        )
    return totals


def _scope_load(name: str, units: Sequence[LoadSums], top_k: int) -> ScopeLoad:
    rows = [_unit_numbers(one, top_k) for one in units if int(one.counts_E.sum()) > 0]
    # No tokens: even, as `load_imbalance` has it.
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else [1.0, 0.0, 1.0, 0.0, 0, 0, 1]
    return ScopeLoad(
        name=name,
        num_units=len(rows),
        num_tokens=sum(int(one.num_tokens) for one in units),
        max_over_mean=means[0],
        coefficient_of_variation=means[1],
        entropy=means[2],
        gini=means[3],
        dead_experts=means[4],
        score=means[5],
        load_score=means[6],
    )


def _unit_numbers(sums: LoadSums, top_k: int) -> list[float]:
    counts_E = sums.counts_E
    num_experts = counts_E.numel()
    fractions_E = counts_E.to(torch.float64) / counts_E.sum()
    entropy = torch.special.entr(fractions_E).sum() / math.log(num_experts) if num_experts > 1 else torch.ones(())
    ranks_E = torch.arange(1, num_experts + 1, dtype=torch.float64, device=counts_E.device)
    gini = (2 * ranks_E * fractions_E.sort().values).sum() / num_experts - (num_experts + 1) / num_experts
    load_score = float(squared_load_loss(counts_E))
    return [
        float(load_imbalance(counts_E)),
        # Rounding can leave an even load a little below 1.
        math.sqrt(max(load_score - 1, 0.0)),
        float(entropy),
        float(gini),
        float((counts_E == 0).sum()),
        float(balance_loss(sums.detach(), top_k=top_k)),
        load_score,
    ]


def _distance(one: LoadSums, whole: LoadSums) -> float:
    """Return the total variation distance between two loads; a domain without tokens is at distance 0."""
    if int(one.counts_E.sum()) == 0:
        return 0.0
    fractions = [sums.counts_E.to(torch.float64) / sums.counts_E.sum() for sums in (one, whole)]
    return 0.5 * float((fractions[0] - fractions[1]).abs().sum())


def _row(load: ScopeLoad) -> str:
    return (
        f"{load.name:22}{load.num_units:7}{load.num_tokens:10}{load.max_over_mean:10.2f}"
        f"{load.coefficient_of_variation:7.3f}{load.entropy:9.3f}{load.gini:7.3f}{load.dead_experts:6.1f}"
        f"{load.score:8.3f}{load.load_score:8.3f}"
    )


def _win_lines(wins: WinSums) -> list[str]:
    lines = [
        f"wasted probability {100 * wins.wasted:.1f} %, mean margin of a win {wins.margin:.4f}, "
        f"wins by less than {100 * wins.narrow:g} % of the winner's probability {100 * wins.narrow_share:.1f} %",
        f"{'expert':>6}{'load':>9}{'probability':>13}{'packing':>9}{'cracking':>10}{'margin':>9}{'narrow':>9}",
    ]
    won, total = wins.won_E.tolist(), max(1, int(wins.won_E.sum()))
    probability, all_probability = wins.probability_sums_E.tolist(), float(wins.probability_sums_E.sum()) or 1.0
    columns = [column.tolist() for column in (wins.packing_E, wins.cracking_E, wins.margin_E, wins.narrow_E)]
    busiest = sorted(range(len(won)), key=lambda expert: (-won[expert], expert))[:_MOST_ROWS]
    for expert in sorted(busiest):
        packing, cracking, margin, narrow = (column[expert] for column in columns)
        lines.append(
            f"{expert:6}{won[expert] / total:9.4f}{probability[expert] / all_probability:13.4f}{packing:9.4f}"
            f"{cracking:10.4f}{margin:9.4f}{narrow:9}"
        )
    if len(won) > _MOST_ROWS:
        lines.append(f"the {_MOST_ROWS} busiest of {len(won)} experts")
    return lines
