"""The router: from tokens to expert ids, weights and load sums."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from coterie_routing.assignment import assigned_ids
from coterie_routing.config import RouterConfig
from coterie_routing.fused_router import fused_route, is_faster, reason_against
from coterie_routing.selection import count_choices, expert_choice_ids, limit_to_groups, top_k_ids, within_capacity
from coterie_routing.sums import LoadSums

__all__ = ["CausalityWarning", "ChoiceMemo", "Router", "Routing", "normalize_scores", "route"]

# DeepSeek-V3 and the Hugging Face models add the same number; it changes no sum above 1e-12 in fp32.
_DENOMINATOR_FLOOR = 1e-20


class CausalityWarning(UserWarning):
    """A router's choice for a token depends on later tokens.

    With expert choice, and with a capacity, a token competes with all others of the batch for its experts, later ones
    of its own sequence included. A language model trained so has seen a trace of what it shall predict, and generating
    one token at a time routes by other rules than training did.
    """


@dataclass(frozen=True, eq=False)
class Routing:
    """Say where each token goes, and with which weight.

    A masked token has ids of -1, and weights, scores and probabilities of 0. With expert choice there are E choices
    instead of K, -1 for each expert that did not choose the token.

    Attributes:
        ids_TK: Experts that get the token, int64, by falling score (bias included), equal scores by rising id; in no
            order where an `Assignment` chose them. -1: none, with weight 0.
        weights_TK: Weight of each choice, fp32, differentiable.
        scores_TE: Score of every expert before any bias, fp32, differentiable.
        probabilities_TE: What the losses price, fp32, differentiable: the scores, or sigmoids divided by their sum.
        counts_E: Number of choices in `ids_TK` for each expert, int64: the rows that it will get.
        sums: Statistics of these tokens, to be added over micro-batches and ranks.
        chosen_TK: Choices before any was dropped for lack of capacity, int64; `ids_TK` itself where none can be.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    probabilities_TE: Tensor
    counts_E: Tensor
    sums: LoadSums
    chosen_TK: Tensor


class ChoiceMemo:
    """Hold the choice of a router's first pass, for the second one under activation recompute.

    A recomputed forward can differ in the last bit, and a tie in the second pass could then send a token elsewhere
    than its saved activations went. Make one memo for each call of the part that is recomputed, outside of it:

        memo = ChoiceMemo()
        y = torch.utils.checkpoint.checkpoint(lambda x: block(x, memo), x, use_reentrant=False)

    where the block calls `router(x, memo=memo)`. The first pass fills the memo and each later one reuses it. Statistics
    cannot be counted twice: they are values, and only those of the first pass leave the recomputed part.
    """

    def __init__(self) -> None:
        self.chosen_TK: Tensor | None = None
        self.ids_TK: Tensor | None = None


class Router(nn.Module):
    """Choose experts for each token.

    The mathematics is fp32 whatever the dtype of the tokens and of the module, also under autocast. `forward` changes
    no state: what it counted comes back in `Routing.sums`.

    Attributes:
        weight: Parameter (E, D), one row for each expert.
        selection_bias: Buffer (E), always fp32, zeros at the start; None unless the config asks for it. Nothing here
            trains it: `updated_bias` gives the next one, and a bias that came with a model stays as it is.

    Raises:
        ValueError: If the config has problems; the message lists all of them.
    """

    weight: nn.Parameter
    selection_bias: Tensor | None

    def __init__(self, config: RouterConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        _refuse_problems(config)
        if config.selection == "expert_choice" or config.capacity_factor is not None:
            cause = "expert choice" if config.selection == "expert_choice" else "a capacity"
            warnings.warn(
                f"{cause} looks at all tokens of the batch, later ones included: not causal. Train a language model "
                "with it only where that is wanted",
                CausalityWarning,
                stacklevel=2,
            )
        self.config = config
        shape = (config.num_experts, config.d_model)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
        bias_E = torch.empty(config.num_experts, dtype=torch.float32, device=device) if config.selection_bias else None
        self.register_buffer("selection_bias", bias_E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution of deviation 0.02 and set the bias to zero."""
        nn.init.normal_(self.weight, std=0.02)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, x_TD: Tensor, is_real_T: Tensor | None = None, *, memo: ChoiceMemo | None = None) -> Routing:
        """Route T tokens.

        Args:
            x_TD: Tokens, (T, D), any floating dtype; T may be 0.
            is_real_T: Bool (T); False marks padding, which goes to no expert and into no statistic, whatever stands
                in its row of `x_TD`. None means that every token is real.
            memo: Of this call, if it may be recomputed.

        Raises:
            ValueError: If a shape, the mask's dtype or the mask's device does not fit, or if the config names the
                back-end "triton" and it cannot run here.
        """
        if x_TD.dim() != 2 or x_TD.shape[1] != self.config.d_model:
            raise ValueError(f"expected tokens of shape (T, {self.config.d_model}), got {tuple(x_TD.shape)}")
        if not x_TD.is_floating_point():
            raise ValueError(f"expected tokens of a real floating dtype, got {x_TD.dtype}")
        if is_real_T is not None:
            _check_mask(is_real_T, x_TD)
        if self.training and self.config.jitter > 0:
            # In bf16 a jitter of 0.01 would have four values, none above 1.
            noise_TD = torch.empty_like(x_TD, dtype=torch.float32)
            x_TD = x_TD.float() * noise_TD.uniform_(1 - self.config.jitter, 1 + self.config.jitter)
        if torch.amp.is_autocast_available(x_TD.device.type):
            with torch.autocast(x_TD.device.type, enabled=False):
                return self._route(x_TD, is_real_T, memo)
        return self._route(x_TD, is_real_T, memo)

    def _route(self, x_TD: Tensor, is_real_T: Tensor | None, memo: ChoiceMemo | None) -> Routing:
        if self._is_fused(x_TD, memo):
            return self._route_fused(x_TD, is_real_T, memo)
        if is_real_T is not None:
            # Attention over nothing leaves NaN in padding rows, and 0 * NaN would reach the weight's gradient.
            x_TD = x_TD.masked_fill(~is_real_T[:, None], 0)
        logits_TE = nn.functional.linear(x_TD.float(), self.weight.float())
        return route(logits_TE, self.config, selection_bias_E=self.selection_bias, is_real_T=is_real_T, memo=memo)

    def _is_fused(self, x_TD: Tensor, memo: ChoiceMemo | None) -> bool:
        if self.config.backend == "reference":
            return False
        reason = reason_against(x_TD, self.weight, self.config)
        if self.config.backend == "auto":
            if reason is not None or not is_faster(x_TD, self.config):
                return False
        elif reason is not None:
            raise ValueError(f'backend "triton" cannot run this router: {reason}; "auto" would take the reference')
        return memo is None or memo.ids_TK is None

    def _route_fused(self, x_TD: Tensor, is_real_T: Tensor | None, memo: ChoiceMemo | None) -> Routing:
        fused = fused_route(
            x_TD,
            self.weight,
            top_k=self.config.top_k,
            score_function=self.config.score_function,
            renormalize=self.config.renormalize,
            weight_scale=self.config.weight_scale,
            selection_bias_E=self.selection_bias,
            is_real_T=is_real_T,
        )
        if memo is not None:
            memo.chosen_TK = memo.ids_TK = fused.ids_TK
        sums = LoadSums(
            counts_E=fused.counts_E.clone(),
            probability_sums_E=fused.probability_sums_E,
            z_sum=fused.z_sum,
            num_tokens=fused.num_tokens,
            num_dropped=torch.zeros_like(fused.num_tokens),
            num_bad=fused.num_bad,
        )
        return Routing(
            ids_TK=fused.ids_TK,
            weights_TK=fused.weights_TK,
            scores_TE=fused.scores_TE,
            probabilities_TE=(
                fused.scores_TE if self.config.score_function != "sigmoid" else _shares(fused.scores_TE, is_real_T)
            ),
            counts_E=fused.counts_E,
            sums=sums,
            chosen_TK=fused.ids_TK,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias_E = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A bias step of 0.001 is lost in bf16, so a change of the module's dtype leaves the bias alone.
        if bias_E is not None and self.selection_bias is not None and self.selection_bias.dtype != torch.float32:
            self.selection_bias = bias_E.to(self.selection_bias.device)
        return self

    def extra_repr(self) -> str:
        """Return the config, for the printed form of the module."""
        return str(self.config)


def route(
    logits_TE: Tensor,
    config: RouterConfig,
    *,
    selection_bias_E: Tensor | None = None,
    is_real_T: Tensor | None = None,
    memo: ChoiceMemo | None = None,
) -> Routing:
    """Route tokens whose logits are known; `Router` is this after one linear layer, or the same in one kernel.

    The dtype of the logits is the dtype of the mathematics: fp32 in a model, fp64 to check gradients.

    Experts are ranked by logit, or by score plus bias where there is a bias. Logits rank as the scores do, and keep
    the order of experts whose scores round to the same number (a sigmoid above 17 is 1.0 in fp32).

    A token with a NaN or an infinite logit still gets valid ids and is counted in `LoadSums.num_bad`. Its weights are
    what the arithmetic gives: NaN in most cases, but not where the logit is of an expert that weighs nothing, or a
    sigmoid of infinity. So watch `num_bad`, not the weights. An expert with a NaN in the bias ranks last, and then
    every real token is counted as bad: its choice is not the one that the bias was to make. Infinity there is no fault.

    Args:
        logits_TE: (T, E), fp32 or fp64.
        config: Its `d_model`, `jitter` and `backend` are not used here.
        selection_bias_E: (E), added to the scores for the selection only; given if and only if the config asks for it.
        is_real_T: Bool (T), as in `Router.forward`.
        memo: As in `Router.forward`.

    Raises:
        ValueError: If the config has problems, or a shape or dtype does not fit.
    """
    _refuse_problems(config)
    _check_logits(logits_TE, config, selection_bias_E)
    if is_real_T is not None:
        _check_mask(is_real_T, logits_TE)
        logits_TE = logits_TE.masked_fill(~is_real_T[:, None], 0)

    scores_TE = logits_TE.sigmoid() if config.score_function == "sigmoid" else logits_TE.softmax(-1)
    if memo is not None and memo.chosen_TK is not None:
        num_choices = config.num_experts if config.selection == "expert_choice" else config.top_k
        if memo.chosen_TK.shape != (logits_TE.shape[0], num_choices):
            raise ValueError(
                f"the memo holds choices of shape {tuple(memo.chosen_TK.shape)}, of another call: "
                f"this one has ({logits_TE.shape[0]}, {num_choices})"
            )
        chosen_TK = memo.chosen_TK
    else:
        chosen_TK = _choose(logits_TE.detach(), scores_TE.detach(), config, selection_bias_E, is_real_T)
    if is_real_T is not None:
        scores_TE = scores_TE.masked_fill(~is_real_T[:, None], 0)
        chosen_TK = chosen_TK.masked_fill(~is_real_T[:, None], -1)
    weights_TK = _weights(logits_TE, scores_TE, chosen_TK, config)
    if config.capacity_factor is None:
        ids_TK = chosen_TK
    elif memo is not None and memo.ids_TK is not None:
        ids_TK = memo.ids_TK
    else:
        ids_TK = _drop(chosen_TK, weights_TK, config, is_real_T)
    if config.capacity_factor is not None:
        weights_TK = weights_TK.masked_fill(ids_TK < 0, 0)
    if memo is not None:
        memo.chosen_TK, memo.ids_TK = chosen_TK, ids_TK

    counts_E = count_choices(ids_TK.reshape(1, -1), config.num_experts)[0]
    wanted_E = counts_E if ids_TK is chosen_TK else count_choices(chosen_TK.reshape(1, -1), config.num_experts)[0]
    # Not scores / sum: a floor under the sum would let a router of vanishing sigmoids shrink its balance loss.
    probabilities_TE = scores_TE if config.score_function != "sigmoid" else _normalized(logits_TE, is_real_T)
    sums = LoadSums(
        # Apart from `Routing.counts_E`: whoever reduces that one in place must not change the sums.
        counts_E=wanted_E.clone(),
        probability_sums_E=probabilities_TE.sum(0, dtype=torch.float64),
        z_sum=_z_sum(logits_TE, is_real_T),
        num_tokens=_num_real(logits_TE, is_real_T),
        num_dropped=(wanted_E - counts_E).sum(),
        num_bad=_num_bad(logits_TE, selection_bias_E, is_real_T),
    )
    return Routing(
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        scores_TE=scores_TE,
        probabilities_TE=probabilities_TE,
        counts_E=counts_E,
        sums=sums,
        chosen_TK=chosen_TK,
    )


def _choose(
    logits_TE: Tensor, scores_TE: Tensor, config: RouterConfig, bias_E: Tensor | None, is_real_T: Tensor | None
) -> Tensor:
    """Return the choices, int64 (T, K), or (T, E) with expert choice."""
    if config.assignment is not None:
        return assigned_ids(config.assignment, logits_TE.shape[0], config.num_experts, config.top_k, logits_TE.device)
    if config.selection == "expert_choice":
        return expert_choice_ids(scores_TE, config.top_k, is_real_T)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    ranking_TE = logits_TE if bias_E is None else biased_TE
    if config.num_groups > 1:
        ranking_TE = limit_to_groups(ranking_TE, biased_TE, config.num_groups, config.chosen_groups)
    return top_k_ids(ranking_TE, config.top_k)


def _weights(logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, config: RouterConfig) -> Tensor:
    if config.score_function == "softmax_of_chosen":
        weights_TK = logits_TE.gather(1, chosen_TK.clamp_min(0)).softmax(-1)
    else:
        weights_TK = scores_TE.gather(1, chosen_TK.clamp_min(0))
        if config.renormalize:
            weights_TK = normalize_scores(weights_TK)
    if config.weight_scale != 1.0:
        weights_TK = weights_TK * config.weight_scale
    return weights_TK.masked_fill(chosen_TK < 0, 0)


def _drop(chosen_TK: Tensor, weights_TK: Tensor, config: RouterConfig, is_real_T: Tensor | None) -> Tensor:
    """Return the choices with -1 in place of those that their expert has no room for."""
    assert config.capacity_factor is not None
    share = config.capacity_factor * config.top_k / config.num_experts
    # A count times a share is exact in fp64 up to the last bit; 1e-9 keeps 8.000000000001 from asking for a ninth row.
    # Beyond 2^53 there is room for all, and a conversion to int64 could overflow.
    capacity = (_num_real(chosen_TK, is_real_T).double() * share - 1e-9).ceil().clamp(1, 2.0**53).to(torch.int64)
    is_kept_TK = within_capacity(chosen_TK, weights_TK, capacity, config.num_experts)
    return chosen_TK.masked_fill(~is_kept_TK, -1)


def normalize_scores(scores: Tensor) -> Tensor:
    """Divide the scores by their sum over the last dimension; scores that are all 0 stay 0."""
    return scores / (scores.sum(-1, keepdim=True) + _DENOMINATOR_FLOOR)


def _normalized(logits_TE: Tensor, is_real_T: Tensor | None) -> Tensor:
    """Return sigmoids divided by their sum, by way of logarithms: right where all of them are below 1e-20 too."""
    probabilities_TE = nn.functional.logsigmoid(logits_TE).softmax(-1)
    return probabilities_TE if is_real_T is None else probabilities_TE.masked_fill(~is_real_T[:, None], 0)


def _shares(sigmoids_TE: Tensor, is_real_T: Tensor | None) -> Tensor:
    """Return sigmoids divided by their sum where no logits are at hand; even shares where all of them underflowed."""
    sum_T1 = sigmoids_TE.sum(-1, keepdim=True)
    is_lost_T1 = sum_T1 < torch.finfo(sum_T1.dtype).tiny
    shares_TE = torch.where(is_lost_T1, 1 / sigmoids_TE.shape[1], sigmoids_TE / sum_T1.masked_fill(is_lost_T1, 1))
    return shares_TE if is_real_T is None else shares_TE.masked_fill(~is_real_T[:, None], 0)


def _z_sum(logits_TE: Tensor, is_real_T: Tensor | None) -> Tensor:
    z_T = logits_TE.logsumexp(-1).to(torch.float64).square()
    return z_T.sum() if is_real_T is None else z_T.masked_fill(~is_real_T, 0).sum()


def _num_real(rows: Tensor, is_real_T: Tensor | None) -> Tensor:
    if is_real_T is None:
        return torch.full((), rows.shape[0], dtype=torch.int64, device=rows.device)
    return is_real_T.sum()


def _num_bad(logits_TE: Tensor, bias_E: Tensor | None, is_real_T: Tensor | None) -> Tensor:
    is_bad_T = (~logits_TE.isfinite()).any(-1)  # never padding, whose logits are 0 here
    if bias_E is not None:
        has_bad_bias = bias_E.isnan().any()
        is_bad_T = is_bad_T | (has_bad_bias if is_real_T is None else has_bad_bias & is_real_T)
    return is_bad_T.sum()


def _check_mask(is_real_T: Tensor, rows: Tensor) -> None:
    if is_real_T.dtype != torch.bool or is_real_T.shape != rows.shape[:1] or is_real_T.device != rows.device:
        raise ValueError(
            f"is_real_T must be a bool tensor of shape ({rows.shape[0]},) on {rows.device}, "
            f"got {is_real_T.dtype} of shape {tuple(is_real_T.shape)} on {is_real_T.device}"
        )


def _check_logits(logits_TE: Tensor, config: RouterConfig, selection_bias_E: Tensor | None) -> None:
    if logits_TE.dim() != 2 or logits_TE.shape[1] != config.num_experts:
        raise ValueError(f"expected logits of shape (T, {config.num_experts}), got {tuple(logits_TE.shape)}")
    if (selection_bias_E is not None) != config.selection_bias:
        given = "none was" if selection_bias_E is None else "one was"
        raise ValueError(f"the config says selection_bias = {config.selection_bias}, but {given} given")
    if selection_bias_E is not None and selection_bias_E.shape != (config.num_experts,):
        raise ValueError(
            f"expected a selection bias of shape ({config.num_experts},), got {tuple(selection_bias_E.shape)}"
        )
    if logits_TE.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"router mathematics needs fp32 or fp64 logits, not {logits_TE.dtype}; cast before")


def _refuse_problems(config: RouterConfig) -> None:
    problems = config.problems()
    if problems:
        raise ValueError("\n".join(problems))
