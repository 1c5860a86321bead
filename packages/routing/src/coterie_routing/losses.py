"""Balance loss and z-loss, as whole values and as terms that add up over micro-batches and ranks.

A term is the contribution of some tokens to the loss of the whole optimizer step: it is divided by the real tokens of
the step, so the terms of all micro-batches and ranks are simply added, as are their gradients. Whether the gradient
depends on how the step was split is a matter of the scope, which says whose load prices the probabilities:

    scope        load f_i comes from          same gradient for every split of the step
    sequence     the token's own sequence     yes, as long as no sequence is cut
    micro_batch  the token's own micro-batch  no
    step         the whole previous step      yes
"""

import torch
from torch import Tensor

from coterie_routing.router import Routing, count_choices, normalize_scores
from coterie_routing.sums import LoadSums

__all__ = [
    "BALANCE_SCOPES",
    "balance_loss",
    "balance_term",
    "sequence_balance_term",
    "scoped_balance_term",
    "z_loss",
    "z_term",
]

BALANCE_SCOPES: tuple[str, ...] = ("sequence", "micro_batch", "step")


def balance_loss(sums: LoadSums, *, top_k: int, load_E: Tensor | None = None) -> Tensor:
    """Return E/k * sum_i f_i P_i of the tokens in `sums` (Switch Transformer, arXiv:2101.03961, eq. 4, for any k).

    f_i is the fraction of tokens that chose expert i (the f_i sum to k) and P_i the mean probability of expert i.
    Even routing gives 1 for every k. No tokens give 0 with a gradient of 0.

    Args:
        sums: Statistics of the tokens whose probabilities are priced.
        top_k: Choices for each token.
        load_E: Load that gives f, if it is not that of the same tokens, as counts or fractions; see `balance_term`.

    Returns:
        An fp64 scalar; the gradient flows through the probabilities only.
    """
    load_E = sums.counts_E if load_E is None else load_E
    return balance_term(sums, top_k=top_k, load_fraction_E=load_E, step_tokens=sums.num_tokens)


def balance_term(sums: LoadSums, *, top_k: int, load_fraction_E: Tensor | None, step_tokens: int | Tensor) -> Tensor:
    """Return what these tokens add to the balance loss of a step of `step_tokens` real tokens.

    With a load that is the same for every part of the step (that of the previous step, over all micro-batches and
    ranks), the terms of any split of the step add up to the same value and the same gradient: scope "step". With
    `load_fraction_E=sums.counts_E` the scope is "micro_batch" and the split matters.

    Args:
        sums: Statistics of one micro-batch on one rank.
        top_k: Choices for each token.
        load_fraction_E: Load of each expert. Only its proportions count: it is scaled to the f_i of `balance_loss`,
            so counts serve as well as fractions. None, or no load at all, stands for an even load, under which the
            term is a constant without gradient: so begins the first step.
        step_tokens: Real tokens of the whole step, over all micro-batches and ranks.

    Returns:
        An fp64 scalar.

    Raises:
        ValueError: If `load_fraction_E` is not of shape (E).
    """
    num_experts = sums.probability_sums_E.numel()
    if load_fraction_E is None:
        load_fraction_E = torch.ones_like(sums.counts_E)
    if load_fraction_E.shape != (num_experts,):
        raise ValueError(f"expected the load of {num_experts} experts, got shape {tuple(load_fraction_E.shape)}")
    return _priced(load_fraction_E, sums.probability_sums_E, top_k) / _at_least_one(step_tokens)


def sequence_balance_term(routing: Routing, *, top_k: int, num_sequences: int, step_tokens: int | Tensor) -> Tensor:
    """Return what the sequences of one micro-batch add to the sequence-wise balance loss of the step.

    The loss of each sequence is priced by its own load, and the step takes the mean over sequences, each with the
    weight of its real tokens (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20, where all are equally long). No sum over
    micro-batches or ranks is needed before: the gradient is the same for every split that cuts no sequence.

    Args:
        routing: Routing of B sequences of equal length, one after the other; padding is masked.
        top_k: Choices for each token.
        num_sequences: Number of sequences B.
        step_tokens: Real tokens of the whole step, over all micro-batches and ranks.

    Returns:
        An fp64 scalar.

    Raises:
        ValueError: If the tokens cannot be `num_sequences` sequences of one length.
    """
    num_tokens, num_experts = routing.scores_TE.shape
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(f"{num_tokens} tokens cannot be {num_sequences} sequences of one length")
    length = num_tokens // num_sequences
    counts_BE = count_choices(routing.ids_TK.reshape(num_sequences, length * routing.ids_TK.shape[1]), num_experts)
    probabilities_TE = normalize_scores(routing.scores_TE)
    sums_BE = probabilities_TE.reshape(num_sequences, length, num_experts).sum(1, dtype=torch.float64)
    return _priced(counts_BE, sums_BE, top_k).sum() / _at_least_one(step_tokens)


def scoped_balance_term(
    scope: str,
    routing: Routing,
    *,
    top_k: int,
    step_tokens: int | Tensor,
    num_sequences: int,
    load_fraction_E: Tensor | None,
) -> Tensor:
    """Return the balance term of one micro-batch for a scope given by name.

    Args:
        scope: "sequence", "micro_batch" or "step"; the table at the top of this module says what each promises.
        routing: Routing of the micro-batch.
        top_k: Choices for each token.
        step_tokens: Real tokens of the whole step.
        num_sequences: Number of sequences in the micro-batch, read by scope "sequence".
        load_fraction_E: Load of the whole previous step or None, read by scope "step".

    Raises:
        ValueError: If the scope is not one of `BALANCE_SCOPES`.
    """
    if scope == "sequence":
        return sequence_balance_term(routing, top_k=top_k, num_sequences=num_sequences, step_tokens=step_tokens)
    if scope == "micro_batch":
        load_fraction_E = routing.sums.counts_E
    elif scope != "step":
        raise ValueError(f"balance scope ({scope!r}) must be one of: {', '.join(BALANCE_SCOPES)}")
    return balance_term(routing.sums, top_k=top_k, load_fraction_E=load_fraction_E, step_tokens=step_tokens)


def z_loss(sums: LoadSums) -> Tensor:
    """Return the mean over real tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5), an fp64 scalar."""
    return z_term(sums, sums.num_tokens)


def z_term(sums: LoadSums, step_tokens: int | Tensor) -> Tensor:
    """Return what these tokens add to the z-loss of a step of `step_tokens` real tokens, for any split alike."""
    return sums.z_sum / _at_least_one(step_tokens)


def _priced(load: Tensor, probability_sums: Tensor, top_k: int) -> Tensor:
    """Return E/k * sum_i f_i * probability_sums_i over the last dimension, f being the load scaled to sum to k."""
    load = load.detach().to(torch.float64)
    total = load.sum(-1, keepdim=True)
    even = torch.full_like(load, 1 / load.shape[-1])
    fraction = top_k * torch.where(total > 0, load / total, even)
    return load.shape[-1] / top_k * (fraction * probability_sums).sum(-1)


def _at_least_one(num_tokens: int | Tensor) -> int | Tensor:
    """Keep a division by no tokens at 0 / 1."""
    return num_tokens.clamp_min(1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)
