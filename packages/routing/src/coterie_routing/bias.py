"""The selection bias that balances load without a loss: three rules that compute the next bias from a step's counts.

The bias is added to the scores for the selection only, so no gradient comes from it. Whoever runs the training step
adds the counts of all micro-batches and ranks and then replaces the bias, once for each step.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from coterie_routing.router import Routing

__all__ = ["BIAS_RULES", "BiasRule", "RequiredBias", "required_bias", "updated_bias", "quantile_bias"]

BIAS_RULES: tuple[str, ...] = ("sign", "proportional", "quantile")
_NUM_BINS = 1000


@dataclass(frozen=True, kw_only=True)
class BiasRule:
    """Say how the selection bias is trained.

    Attributes:
        kind: "sign" moves each bias by `rate` towards an even load (arXiv:2408.15664, algorithm 1). "proportional"
            moves it by `rate` times its load error, as a fraction of the mean load (the same paper, section 4.3, with
            the error made independent of the size of the batch). "quantile" sets each bias to what would have given
            its expert an even load in this step (Kimi K3 technical report, section 2.3.3), mixed into the old bias
            with weight `rate`.
        rate: Above 0; None takes what is usual: 0.001, and 1.0 for "quantile".
    """

    kind: Literal["sign", "proportional", "quantile"]
    rate: float | None = None

    @property
    def step(self) -> float:
        """The rate, with None resolved."""
        return (1.0 if self.kind == "quantile" else 0.001) if self.rate is None else self.rate

    def problems(self) -> list[str]:
        """Return one sentence for each fault; an empty list means a good rule."""
        found = []
        if self.kind not in BIAS_RULES:
            found.append(f"bias rule ({self.kind!r}) must be one of: {', '.join(BIAS_RULES)}")
        if not (math.isfinite(self.step) and self.step > 0):
            found.append(f"bias rate ({self.rate}) must be a finite number above 0, or None; usual: 0.001")
        if self.kind == "quantile" and self.step > 1:
            found.append(f"bias rate ({self.rate}) must be at most 1 with the rule quantile; 1.0 forgets the old bias")
        return found


def updated_bias(bias_E: Tensor, counts_E: Tensor, rule: BiasRule) -> Tensor:
    """Return the next selection bias by the rule "sign" or "proportional", with a mean of zero.

    A common shift of all biases selects the same experts, so the mean is taken out: otherwise it drifts until the bias
    outgrows the scores. Counts of zero change nothing.

    Args:
        bias_E: fp32, (E) or (L, E) for all layers at once.
        counts_E: int64, of the same shape: choices of the whole step, over all micro-batches and ranks.
        rule: Its kind is not "quantile", which needs more than counts; see `quantile_bias`.

    Raises:
        ValueError: If the rule has problems, or a dtype or shape does not fit.
    """
    _check(bias_E, rule)
    if rule.kind == "quantile":
        raise ValueError('the rule "quantile" needs the scores of the step: use required_bias and quantile_bias')
    if counts_E.dtype != torch.int64 or counts_E.shape != bias_E.shape:
        raise ValueError(
            f"counts must be int64 of shape {tuple(bias_E.shape)}, "
            f"got {counts_E.dtype} of shape {tuple(counts_E.shape)}"
        )
    total = counts_E.sum(-1, keepdim=True)
    # In integers, E times the error: bf16 counts, or a mean rounded to fp32, can turn the sign.
    error_E = total - counts_E * bias_E.shape[-1]
    step_E = error_E.sign().double() if rule.kind == "sign" else error_E.double() / total.clamp_min(1)
    moved_E = bias_E.double() + rule.step * step_E
    return torch.where(total > 0, _centred(moved_E), bias_E.double()).float()


@dataclass(frozen=True, eq=False)
class RequiredBias:
    """Hold, for each expert, a histogram over tokens of the bias that would just have won the token.

    Parts that were made under the same bias add up, over micro-batches and ranks.

    Attributes:
        counts_EB: int64 (E, B): real tokens whose required bias falls into the bin.
        low: fp32 scalar, lower end of the first bin.
        high: fp32 scalar, upper end of the last bin.
    """

    counts_EB: Tensor
    low: Tensor
    high: Tensor

    def __add__(self, other: Self) -> Self:
        return type(self)(counts_EB=self.counts_EB + other.counts_EB, low=self.low, high=self.high)


@torch.no_grad()
def required_bias(routing: Routing, bias_E: Tensor, *, num_bins: int = _NUM_BINS) -> RequiredBias:
    """Count, for each expert, which bias each token would have asked of it.

    Expert i wins token t where its bias is above a_ti - s_ti, with the threshold a_ti, the K-th best score plus bias
    among the other experts: the best one left out for a chosen expert, the last one chosen for the others. Scores lie
    between 0 and 1, so this lies between min(bias) - 1 and max(bias) + 1. (The Kimi K3 report takes the best one left
    out for all experts. That one then asks for just the bias that it has, and under-loaded experts stay behind.)

    Args:
        routing: Made with this bias, by top-k without groups.
        bias_E: fp32 (E).
        num_bins: Number of bins B between those two ends, at least 1.

    Raises:
        ValueError: If each token chose all experts, so that there is no threshold, or if there is no bin.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins ({num_bins}) must be at least 1; usual: {_NUM_BINS}")
    num_experts = bias_E.numel()
    chosen_TK = routing.chosen_TK
    if chosen_TK.shape[1] >= num_experts:
        raise ValueError(f"top_k ({chosen_TK.shape[1]}) takes all {num_experts} experts: there is nothing to balance")
    is_real_T1 = chosen_TK[:, :1] >= 0
    ranking_TE = routing.scores_TE + bias_E
    is_chosen_TE = torch.zeros_like(ranking_TE, dtype=torch.bool).scatter_(1, chosen_TK.clamp_min(0), True)
    best_left_T1 = ranking_TE.masked_fill(is_chosen_TE, -torch.inf).amax(-1, keepdim=True)
    last_chosen_T1 = ranking_TE.masked_fill(~is_chosen_TE, torch.inf).amin(-1, keepdim=True)
    threshold_TE = torch.where(is_chosen_TE, best_left_T1, last_chosen_T1)
    low, high = bias_E.min() - 1, bias_E.max() + 1
    place_TE = (threshold_TE - routing.scores_TE - low) / (high - low) * num_bins
    bin_TE = place_TE.nan_to_num(0).long().clamp(0, num_bins - 1)
    counts_EB = torch.zeros(num_experts, num_bins, dtype=torch.int64, device=bias_E.device)
    counts_EB.scatter_add_(1, bin_TE.t(), is_real_T1.long().expand_as(bin_TE).t())
    return RequiredBias(counts_EB=counts_EB, low=low, high=high)


def quantile_bias(bias_E: Tensor, required: RequiredBias, rule: BiasRule, *, top_k: int) -> Tensor:
    """Return the next selection bias by the rule "quantile", with a mean of zero.

    Each expert asks for the bias that wins it the fraction K / E of the tokens: the quantile of its required biases,
    with a straight line inside the bin. No tokens change nothing.

    Args:
        bias_E: fp32 (E), the bias of this step.
        required: Of the whole step, over all micro-batches and ranks.
        rule: Its kind is "quantile".
        top_k: Choices for each token.

    Raises:
        ValueError: If the rule has problems or is another one.
    """
    _check(bias_E, rule)
    if rule.kind != "quantile":
        raise ValueError(f'quantile_bias serves the rule "quantile", not {rule.kind!r}')
    if not 1 <= top_k < bias_E.numel():
        raise ValueError(f"top_k ({top_k}) must be from 1 to num_experts - 1 ({bias_E.numel() - 1})")
    counts_EB = required.counts_EB.double()
    num_bins = counts_EB.shape[1]
    up_to_EB = counts_EB.cumsum(1)
    num_tokens_E = up_to_EB[:, -1]
    target_E1 = (num_tokens_E * top_k / bias_E.numel())[:, None]
    bin_E1 = torch.searchsorted(up_to_EB, target_E1).clamp_max(num_bins - 1)
    inside_E1 = counts_EB.gather(1, bin_E1)
    before_E1 = up_to_EB.gather(1, bin_E1) - inside_E1
    place_E = (bin_E1 + (target_E1 - before_E1) / inside_E1.clamp_min(1)).squeeze(1)
    low, high = required.low.double(), required.high.double()
    asked_E = _centred(low + (high - low) * place_E / num_bins)
    mixed_E = (1 - rule.step) * bias_E.double() + rule.step * asked_E
    return torch.where(num_tokens_E > 0, _centred(mixed_E), bias_E.double()).float()


def _centred(bias_E: Tensor) -> Tensor:
    return bias_E - bias_E.mean(-1, keepdim=True)


def _check(bias_E: Tensor, rule: BiasRule) -> None:
    problems = rule.problems()
    if bias_E.dtype != torch.float32:
        problems.append(f"the selection bias must be fp32, not {bias_E.dtype}: a step of 0.001 is lost in 8 or 11 bits")
    if problems:
        raise ValueError("\n".join(problems))
