"""Balance losses, z-loss and two further terms, as whole values and as terms that add up over micro-batches and ranks.

A term is the contribution of some tokens to the loss of the whole optimizer step: it is divided by the real tokens of
the step, so the terms of all micro-batches and ranks are simply added, as are their gradients. Whether the gradient
depends on how the step was split is a matter of the scope, which says whose load f_i prices expert i:

    scope          load f_i comes from                       same gradient for every split of the step into
                                                             ranks              micro-batches
    sequence       the token's own sequence                  yes                yes, as long as no sequence is cut
    micro_batch    the token's own micro-batch, on one rank  no                 no
    data_parallel  the micro-batches of all ranks            yes                no
    step           the whole previous step                   yes                yes

There are two balance losses. "dot_product" is E/k * sum_i f_i P_i, with the mean probability P_i. It can fall below
the 1.0 of an even load while the load is uneven, for an expert may win many tokens by a hair while the probability
mass lies on others. "squared_load" is E/k^2 * sum_i f_i^2 = 1 + (coefficient of variation)^2 of the load itself, which
is 1 for an even load and more for every other.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from coterie_routing.router import Routing
from coterie_routing.selection import count_choices
from coterie_routing.sums import LoadSums

__all__ = [
    "BALANCE_LOSSES",
    "BALANCE_SCOPES",
    "balance_loss",
    "balance_terms",
    "entropy_term",
    "orthogonality_loss",
    "smooth_choices",
    "squared_load_loss",
    "z_loss",
    "z_term",
]

BALANCE_SCOPES: tuple[str, ...] = ("sequence", "micro_batch", "data_parallel", "step")
BALANCE_LOSSES: tuple[str, ...] = ("dot_product", "squared_load")
_SMALLEST = torch.finfo(torch.float32).tiny


def balance_loss(sums: LoadSums, *, top_k: int, load_E: Tensor | None = None) -> Tensor:
    """Return E/k * sum_i f_i P_i of the tokens in `sums` (Switch Transformer, arXiv:2101.03961, eq. 4, for any k).

    f_i is the fraction of tokens that chose expert i (the f_i sum to k) and P_i the mean probability of expert i.
    Even routing gives 1 for every k. No tokens give 0 with a gradient of 0.

    Args:
        sums: Statistics of the tokens whose probabilities are priced.
        top_k: Choices for each token.
        load_E: Load that gives f, if it is not that of the same tokens. Only its proportions count, so counts serve
            as well as fractions; no load at all stands for an even one.

    Returns:
        An fp64 scalar; the gradient flows through the probabilities only.

    Raises:
        ValueError: If `load_E` is not of shape (E).
    """
    load_E = sums.counts_E if load_E is None else load_E
    _check_load(load_E, sums.counts_E.shape)
    return _priced(load_E, sums.probability_sums_E, top_k) / _at_least_one(sums.num_tokens)


def squared_load_loss(counts_E: Tensor) -> Tensor:
    """Return E * sum_i c_i^2 / (sum_i c_i)^2 = 1 + CV^2 of a load (Shazeer et al. 2017, arXiv:1701.06538, eq. 11).

    It is 1 where the load is even, more everywhere else, and E where one expert has all. No load gives 0.

    Args:
        counts_E: Choices won, (..., E), any integer or floating dtype.

    Returns:
        fp64 of shape (...), without gradient; `balance_terms` has one.
    """
    load_E = counts_E.detach().to(torch.float64)
    total = load_E.sum(-1)
    squares = load_E.square().sum(-1)
    # Asked so that a load of NaN gives NaN.
    return torch.where(total == 0, 0.0, load_E.shape[-1] * squares / total.square())


def balance_terms(
    routings: Sequence[Routing],
    *,
    top_k: int,
    step_tokens: int | Tensor,
    scope: str = "step",
    loss: str = "dot_product",
    num_sequences: int = 1,
    load_LE: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return what one micro-batch adds to the balance loss of the step, for each of the L layers.

    "dot_product": E/k * sum_i f_i * (sum over tokens of the probability of expert i) / step_tokens.
    "squared_load": E/k^2 * sum_i f_i * (choices that expert i won) / step_tokens, with the gradient of
    `smooth_choices`, less their mean over the experts, in place of that of the counts. Under the scopes "sequence",
    "micro_batch" and "data_parallel" its terms add up to the mean of 1 + CV^2 over the units of that scope, weighted by
    their tokens; under "step", where f is the load of the step before, the value of a term means little and
    `squared_load_loss` of the step's counts is what to watch. Its gradient is half that of the square, so that a
    coefficient does the same for both losses.

    Args:
        routings: Of one micro-batch on this rank, one for each layer.
        top_k: Choices for each token.
        step_tokens: Real tokens of the whole step, over all micro-batches and ranks.
        scope: "sequence", "micro_batch", "data_parallel" or "step"; the table at the top says what each promises.
        loss: "dot_product" or "squared_load".
        num_sequences: For "sequence": the tokens are so many sequences of equal length, one after the other.
        load_LE: For "step": int64 (L, E), counts of the whole previous step. None, or a layer of zeros, stands for an
            even load, under which neither loss has a gradient: so begins the first step.
        sum_over_ranks: For "data_parallel": returns the sum of a tensor over the data-parallel ranks. It is called
            once, with the counts of all layers.
        temperature: For "squared_load", as in `smooth_choices`.

    Returns:
        fp64 (L), differentiable. A micro-batch without real tokens gives 0 with a gradient of 0.

    Raises:
        ValueError: If the scope or the loss is unknown, or a shape does not fit.
    """
    if loss not in BALANCE_LOSSES:
        raise ValueError(f"balance loss ({loss!r}) must be one of: {', '.join(BALANCE_LOSSES)}")
    if scope not in BALANCE_SCOPES:
        raise ValueError(f"balance scope ({scope!r}) must be one of: {', '.join(BALANCE_SCOPES)}")
    if not routings:
        return torch.zeros(0, dtype=torch.float64)
    widths = sorted({routing.scores_TE.shape[1] for routing in routings})
    if len(widths) > 1:
        raise ValueError(f"the layers must have the same number of experts, got {widths}; call once for each number")
    units = num_sequences if scope == "sequence" else 1
    counts_LBE = torch.stack([_counts_by_unit(routing, units) for routing in routings])
    shape_LE = (counts_LBE.shape[0], counts_LBE.shape[2])
    if scope == "data_parallel":
        if sum_over_ranks is None:
            raise ValueError('balance scope "data_parallel" needs sum_over_ranks, which adds a tensor over the ranks')
        # A copy, for the callable may add in place.
        load_LBE = sum_over_ranks(counts_LBE.clone())
        if not isinstance(load_LBE, Tensor) or load_LBE.shape != counts_LBE.shape:
            raise ValueError(f"sum_over_ranks must return the sum of shape {tuple(counts_LBE.shape)}, not {load_LBE!r}")
    elif scope == "step":
        load_LE = torch.zeros_like(counts_LBE[:, 0]) if load_LE is None else load_LE
        _check_load(load_LE, shape_LE)
        load_LBE = load_LE[:, None]
    else:
        load_LBE = counts_LBE
    if loss == "dot_product":
        priced_LBE = torch.stack([_probability_sums_by_unit(routing, units) for routing in routings])
        terms_LB = _priced(load_LBE, priced_LBE, top_k)
    else:
        smooth_LBE = torch.stack([smooth_choices(routing, temperature, num_units=units) for routing in routings])
        # Real choices add up to k for each token, smooth ones do not: without their mean, a load that is even already
        # would go on to press the scores of a token together or apart.
        smooth_LBE = smooth_LBE - smooth_LBE.mean(-1, keepdim=True)
        terms_LB = _priced(load_LBE, counts_LBE + (smooth_LBE - smooth_LBE.detach()), top_k) / top_k
    return terms_LB.sum(1) / _at_least_one(step_tokens)


def smooth_choices(routing: Routing, temperature: float = 1.0, *, num_units: int = 1) -> Tensor:
    """Return how many tokens choose each expert, as a smooth function of their scores: fp64 (B, E).

    A token counts for expert i with sigmoid(m / temperature), where the margin m is the logarithm of its score over
    that at the boundary: the best score that was not chosen for a chosen expert, the last chosen one for the others.
    So the gradient acts where a small change of the scores moves a token, and not where the choice is clear. This is
    the smooth load of Shazeer et al. 2017 (arXiv:1701.06538, eq. 8 to 10) with a logistic distribution in place of the
    normal one. A selection bias takes no part in the margin.

    Args:
        routing: Of T tokens, made by top-k; masked ones do not count.
        temperature: Width of the boundary, in units of the logits; above 0.
        num_units: The tokens are so many sequences of equal length B, each summed for itself.

    Raises:
        ValueError: If the tokens cannot be `num_units` sequences of one length, or the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature ({temperature}) must be above 0; usual: 1.0")
    # Shares of sigmoids have the ratios of the sigmoids, and are there where the sigmoids underflow.
    chosen_TK, probabilities_TE = routing.chosen_TK, routing.probabilities_TE
    num_tokens, num_experts = probabilities_TE.shape
    length = _length(num_tokens, num_units)
    is_real_T1 = chosen_TK[:, :1] >= 0
    is_chosen_TE = torch.zeros_like(probabilities_TE, dtype=torch.bool).scatter_(1, chosen_TK.clamp_min(0), True)
    logs_TE = probabilities_TE.clamp_min(_SMALLEST).log()
    best_left_T1 = logs_TE.masked_fill(is_chosen_TE, -torch.inf).amax(-1, keepdim=True)
    last_chosen_T1 = logs_TE.masked_fill(~is_chosen_TE, torch.inf).amin(-1, keepdim=True)
    margin_TE = logs_TE - torch.where(is_chosen_TE, best_left_T1, last_chosen_T1)
    smooth_TE = torch.where(is_real_T1, (margin_TE / temperature).sigmoid(), 0.0)
    return smooth_TE.reshape(num_units, length, num_experts).sum(1, dtype=torch.float64)


def z_loss(sums: LoadSums) -> Tensor:
    """Return the mean over real tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5), an fp64 scalar."""
    return z_term(sums, sums.num_tokens)


def z_term(sums: LoadSums, step_tokens: int | Tensor) -> Tensor:
    """Return what these tokens add to the z-loss of a step of `step_tokens` real tokens, for any split alike."""
    return sums.z_sum / _at_least_one(step_tokens)


def entropy_term(routing: Routing, step_tokens: int | Tensor) -> Tensor:
    """Return what these tokens add to the router's mean entropy in nats over a step, for any split alike.

    The entropy of a token is -sum_i p_i log p_i, from 0 (all on one expert) to log E. Added to a loss with a positive
    coefficient it makes choices clearer, with a negative one softer.

    Args:
        routing: Of some tokens; masked ones add 0.
        step_tokens: Real tokens of the whole step.

    Returns:
        An fp64 scalar, differentiable.
    """
    probabilities_TE = routing.probabilities_TE
    entropies_TE = -probabilities_TE * probabilities_TE.clamp_min(_SMALLEST).log()
    return entropies_TE.sum(dtype=torch.float64) / _at_least_one(step_tokens)


def orthogonality_loss(weight_ED: Tensor) -> Tensor:
    """Return the mean squared cosine between the rows of two experts of a router, over all ordered pairs.

    0 where all rows are orthogonal, 1 where they are parallel. Experts that answer to the same direction compete for
    the same tokens; ERNIE 4.5 is trained with such a term (its technical report calls it router orthogonalization). It
    depends on the weight alone and not on tokens: add it once in a step, not once for each micro-batch and rank.

    Args:
        weight_ED: (E, D), any floating dtype.

    Returns:
        An fp32 scalar (fp64 for fp64), differentiable; 0 for a single expert.
    """
    weight_ED = weight_ED if weight_ED.dtype == torch.float64 else weight_ED.float()
    unit_ED = nn.functional.normalize(weight_ED, dim=1)
    with torch.autocast(weight_ED.device.type, enabled=False):
        cosines_EE = unit_ED @ unit_ED.t()
    num_experts = weight_ED.shape[0]
    pairs = cosines_EE.square().sum() - cosines_EE.diagonal().square().sum()
    return pairs / max(1, num_experts * (num_experts - 1))


def _priced(load: Tensor, priced: Tensor, top_k: int) -> Tensor:
    """Return E/k * sum_i f_i * priced_i over the last dimension, f being the load scaled to sum to k."""
    load = load.detach().to(torch.float64)
    total = load.sum(-1, keepdim=True)
    even = torch.full_like(load, 1 / load.shape[-1])
    fraction = top_k * torch.where(total == 0, even, load / total)
    return load.shape[-1] / top_k * (fraction * priced).sum(-1)


def _counts_by_unit(routing: Routing, num_units: int) -> Tensor:
    if num_units == 1:
        return routing.sums.counts_E[None]
    num_tokens, num_choices = routing.chosen_TK.shape
    length = _length(num_tokens, num_units)
    ids_BN = routing.chosen_TK.reshape(num_units, length * num_choices)
    return count_choices(ids_BN, routing.sums.counts_E.numel())


def _probability_sums_by_unit(routing: Routing, num_units: int) -> Tensor:
    if num_units == 1:
        return routing.sums.probability_sums_E[None]
    num_tokens, num_experts = routing.probabilities_TE.shape
    length = _length(num_tokens, num_units)
    return routing.probabilities_TE.reshape(num_units, length, num_experts).sum(1, dtype=torch.float64)


def _length(num_tokens: int, num_sequences: int) -> int:
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(f"{num_tokens} tokens cannot be {num_sequences} sequences of one length")
    return num_tokens // num_sequences


def _check_load(load: Tensor, shape: Sequence[int]) -> None:
    if load.shape != tuple(shape):
        raise ValueError(f"expected a load of shape {tuple(shape)}, got {tuple(load.shape)}")


def _at_least_one(num_tokens: int | Tensor) -> int | Tensor:
    """Keep a division by no tokens at 0 / 1."""
    return num_tokens.clamp_min(1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)
