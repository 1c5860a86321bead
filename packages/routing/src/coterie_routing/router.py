"""The top-k router: from tokens to expert ids, weights and load sums."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from coterie_routing.config import RouterConfig
from coterie_routing.sums import LoadSums

__all__ = ["Router", "Routing", "route", "count_choices", "normalize_scores"]

# DeepSeek-V3 and the Hugging Face models add the same number; it changes no sum above 1e-12 in fp32.
_DENOMINATOR_FLOOR = 1e-20


@dataclass(frozen=True, eq=False)
class Routing:
    """Say where each token goes, and with which weight.

    A masked token has ids of -1, and weights and scores of 0.

    Attributes:
        ids_TK: Chosen experts, int64, by falling score; equal scores by rising id.
        weights_TK: Weight of each choice, fp32, differentiable.
        scores_TE: Score of every expert before any bias, fp32, differentiable.
        counts_E: Number of choices that each expert won, int64.
        sums: Statistics of these tokens, to be added over micro-batches and ranks.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    counts_E: Tensor
    sums: LoadSums


class Router(nn.Module):
    """Choose K of E experts for each token.

    The mathematics is fp32 whatever the dtype of the tokens and of the module, also under autocast. `forward` changes
    no state: what it counted comes back in `Routing.sums`.

    Attributes:
        weight: Parameter (E, D), one row for each expert.
        selection_bias: Buffer (E), always fp32, zeros at the start; None unless the config asks for it.

    Raises:
        ValueError: If the config has problems; the message lists all of them.
    """

    weight: nn.Parameter
    selection_bias: Tensor | None

    def __init__(self, config: RouterConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        _refuse_problems(config)
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

    def forward(self, x_TD: Tensor, is_real_T: Tensor | None = None) -> Routing:
        """Route T tokens.

        Args:
            x_TD: Tokens, (T, D), any floating dtype; T may be 0.
            is_real_T: Bool (T); False marks padding, which goes to no expert and into no statistic, whatever stands
                in its row of `x_TD`. None means that every token is real.

        Raises:
            ValueError: If a shape, the mask's dtype or the mask's device does not fit.
        """
        if x_TD.dim() != 2 or x_TD.shape[1] != self.config.d_model:
            raise ValueError(f"expected tokens of shape (T, {self.config.d_model}), got {tuple(x_TD.shape)}")
        if is_real_T is not None:
            _check_mask(is_real_T, x_TD)
            # Attention over nothing leaves NaN in padding rows, and 0 * NaN would reach the weight's gradient.
            x_TD = x_TD.masked_fill(~is_real_T[:, None], 0)
        if torch.amp.is_autocast_available(x_TD.device.type):
            with torch.autocast(x_TD.device.type, enabled=False):
                return self._route(x_TD, is_real_T)
        return self._route(x_TD, is_real_T)

    def _route(self, x_TD: Tensor, is_real_T: Tensor | None) -> Routing:
        logits_TE = nn.functional.linear(x_TD.float(), self.weight.float())
        return route(logits_TE, self.config, selection_bias_E=self.selection_bias, is_real_T=is_real_T)

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
) -> Routing:
    """Route tokens whose logits are known; `Router` is this after one linear layer.

    The dtype of the logits is the dtype of the mathematics: fp32 in a model, fp64 to check gradients.

    Experts are ranked by logit, or by score plus bias where there is a bias. Logits rank as the scores do, and keep
    the order of experts whose scores round to the same number (a sigmoid above 17 is 1.0 in fp32).

    Args:
        logits_TE: (T, E), fp32 or fp64.
        config: Its `d_model` is not used here.
        selection_bias_E: (E), added to the scores for the selection only.
        is_real_T: Bool (T), as in `Router.forward`.

    Raises:
        ValueError: If the config has problems, or a shape or dtype does not fit.
    """
    _refuse_problems(config)
    if logits_TE.dim() != 2 or logits_TE.shape[1] != config.num_experts:
        raise ValueError(f"expected logits of shape (T, {config.num_experts}), got {tuple(logits_TE.shape)}")
    if selection_bias_E is not None and selection_bias_E.shape != (config.num_experts,):
        raise ValueError(
            f"expected a selection bias of shape ({config.num_experts},), got {tuple(selection_bias_E.shape)}"
        )
    if logits_TE.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"router mathematics needs fp32 or fp64 logits, not {logits_TE.dtype}; cast before")
    if is_real_T is not None:
        _check_mask(is_real_T, logits_TE)
        logits_TE = logits_TE.masked_fill(~is_real_T[:, None], 0)

    scores_TE = logits_TE.softmax(-1) if config.score_function == "softmax" else logits_TE.sigmoid()
    ranking_TE = logits_TE.detach() if selection_bias_E is None else scores_TE.detach() + selection_bias_E
    # Not topk: it leaves the order of ties open, and then one input has several right answers.
    ids_TK = torch.argsort(ranking_TE, dim=-1, descending=True, stable=True)[:, : config.top_k]
    if is_real_T is not None:
        scores_TE = scores_TE.masked_fill(~is_real_T[:, None], 0)
    weights_TK = scores_TE.gather(1, ids_TK)
    if config.renormalize:
        weights_TK = normalize_scores(weights_TK)
    if config.route_scale != 1.0:
        weights_TK = weights_TK * config.route_scale
    if is_real_T is not None:
        ids_TK = ids_TK.masked_fill(~is_real_T[:, None], -1)

    counts_E = count_choices(ids_TK.reshape(1, -1), config.num_experts)[0]
    probabilities_TE = scores_TE if config.score_function == "softmax" else normalize_scores(scores_TE)
    sums = LoadSums(
        counts_E=counts_E,
        probability_sums_E=probabilities_TE.sum(0, dtype=torch.float64),
        z_sum=_z_sum(logits_TE, is_real_T),
        num_tokens=_num_real(logits_TE, is_real_T),
    )
    return Routing(ids_TK=ids_TK, weights_TK=weights_TK, scores_TE=scores_TE, counts_E=counts_E, sums=sums)


def count_choices(ids_BN: Tensor, num_experts: int) -> Tensor:
    """Count in each row how often each expert id occurs, -1 not counted: int64 (B, N) to int64 (B, E)."""
    counts_BE = torch.zeros(ids_BN.shape[0], num_experts, dtype=torch.int64, device=ids_BN.device)
    # Not bincount: on a GPU it makes the host wait for the size of its result.
    return counts_BE.scatter_add_(1, ids_BN.clamp_min(0), (ids_BN >= 0).to(torch.int64))


def normalize_scores(scores: Tensor) -> Tensor:
    """Divide the scores by their sum over the last dimension; scores that are all 0 stay 0."""
    return scores / (scores.sum(-1, keepdim=True) + _DENOMINATOR_FLOOR)


def _z_sum(logits_TE: Tensor, is_real_T: Tensor | None) -> Tensor:
    z_T = logits_TE.logsumexp(-1).to(torch.float64).square()
    return z_T.sum() if is_real_T is None else z_T.masked_fill(~is_real_T, 0).sum()


def _num_real(logits_TE: Tensor, is_real_T: Tensor | None) -> Tensor:
    if is_real_T is None:
        return torch.full((), logits_TE.shape[0], dtype=torch.int64, device=logits_TE.device)
    return is_real_T.sum()


def _check_mask(is_real_T: Tensor, rows: Tensor) -> None:
    if is_real_T.dtype != torch.bool or is_real_T.shape != rows.shape[:1] or is_real_T.device != rows.device:
        raise ValueError(
            f"is_real_T must be a bool tensor of shape ({rows.shape[0]},) on {rows.device}, "
            f"got {is_real_T.dtype} of shape {tuple(is_real_T.shape)} on {is_real_T.device}"
        )


def _refuse_problems(config: RouterConfig) -> None:
    problems = config.problems()
    if problems:
        raise ValueError("\n".join(problems))
