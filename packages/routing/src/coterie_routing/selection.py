"""Which experts a token goes to: top-k with a fixed order of ties, groups, capacity, and the choice by experts."""

import torch
from torch import Tensor

__all__ = ["top_k_ids", "limit_to_groups", "expert_choice_ids", "within_capacity", "count_choices"]


def top_k_ids(ranking_TE: Tensor, top_k: int) -> Tensor:
    """Return the K best experts of each token by falling rank, int64 (T, K).

    Equal ones stand by rising id, and NaN ranks as -inf.

    Args:
        ranking_TE: fp32 or fp64 (T, E), K <= E.
        top_k: Number of experts K.
    """
    ranking_TE = ranking_TE.masked_fill(ranking_TE.isnan(), -torch.inf)
    if ranking_TE.dtype == torch.float64:
        return torch.argsort(ranking_TE, dim=-1, descending=True, stable=True)[:, :top_k]
    # topk leaves the order of ties open, and then one input has several right answers. No two of these keys are equal:
    # the bits of the number, in an order that integers share, above the id. Half the time of a stable sort.
    bits_TE = (ranking_TE + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE)
    num_experts = ranking_TE.shape[1]
    last_first_E = torch.arange(num_experts - 1, -1, -1, device=ranking_TE.device)
    return torch.topk((bits_TE.to(torch.int64) << 32) + last_first_E, top_k, dim=-1).indices


def limit_to_groups(ranking_TE: Tensor, score_TE: Tensor, num_groups: int, chosen_groups: int) -> Tensor:
    """Return the ranking with -inf outside the best groups of each token (DeepSeek-V3, arXiv:2412.19437).

    The score of a group is the sum of its two best scores, or its only one; of equal groups the first is taken.

    Args:
        ranking_TE: (T, E); its numbers inside the groups are made finite, so that all of them rank above the rest.
        score_TE: (T, E), with the bias where there is one.
        num_groups: Number of groups of E / num_groups neighbouring experts.
        chosen_groups: Number of groups that a token may use.
    """
    num_tokens, num_experts = score_TE.shape
    score_TGe = score_TE.reshape(num_tokens, num_groups, num_experts // num_groups)
    score_TG = score_TGe.topk(min(2, score_TGe.shape[2]), dim=-1).values.sum(-1)
    is_open_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, top_k_ids(score_TG, chosen_groups), True)
    is_open_TE = is_open_TG.repeat_interleave(score_TGe.shape[2], dim=1)
    lowest = torch.finfo(ranking_TE.dtype).min
    return ranking_TE.nan_to_num(lowest, None, lowest).masked_fill(~is_open_TE, -torch.inf)


def expert_choice_ids(scores_TE: Tensor, top_k: int, is_real_T: Tensor | None) -> Tensor:
    """Let each expert choose its T * K / E best real tokens (arXiv:2202.09368): int64 (T, E) with -1 where not chosen.

    T * K / E is rounded down, to at least 1. The experts of a token stand by falling score; of tokens with equal
    scores an expert takes the first, and one whose score is NaN it takes last.

    Args:
        scores_TE: From 0 to 1, fp32 or fp64 (T, E).
        top_k: Mean number K of experts for each token.
        is_real_T: Bool (T), or None.
    """
    num_tokens, num_experts = scores_TE.shape
    scores_TE = scores_TE.masked_fill(scores_TE.isnan(), -1)
    if is_real_T is None:
        num_real = torch.full((), num_tokens, dtype=torch.int64, device=scores_TE.device)
    else:
        num_real = is_real_T.sum()
        scores_TE = scores_TE.masked_fill(~is_real_T[:, None], -torch.inf)
    capacity = torch.minimum((num_real * top_k // num_experts).clamp_min(1), num_real)
    # The host knows the capacity without padding only; the device cuts the rest off.
    largest_capacity = min(max(1, num_tokens * top_k // num_experts), num_tokens)
    best_CE = top_k_ids(scores_TE.t(), largest_capacity).t()
    has_room_C1 = torch.arange(largest_capacity, device=scores_TE.device)[:, None] < capacity
    is_chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, best_CE, has_room_C1.expand_as(best_CE))
    ids_TE = top_k_ids(scores_TE.masked_fill(~is_chosen_TE, -torch.inf), num_experts)
    return torch.where(is_chosen_TE.gather(1, ids_TE), ids_TE, -1)


def within_capacity(ids_TK: Tensor, weights_TK: Tensor, capacity: Tensor, num_experts: int) -> Tensor:
    """Return which choices an expert keeps: the `capacity` heaviest ones, bool (T, K).

    Only the choices of an expert compete for it, by weight and, where weights are equal, by their place in the batch.

    Args:
        ids_TK: int64; -1 is never kept.
        weights_TK: Any floating dtype; NaN counts as the lightest.
        capacity: int64 scalar on the same device.
        num_experts: Number of experts E.
    """
    expert_N = torch.where(ids_TK < 0, num_experts, ids_TK).flatten()
    weight_N = weights_TK.detach().flatten()
    by_weight_N = torch.argsort(weight_N.masked_fill(weight_N.isnan(), -torch.inf), descending=True, stable=True)
    sorted_N, by_expert_N = torch.sort(expert_N[by_weight_N], stable=True)
    first_E = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    place_N = torch.arange(sorted_N.numel(), device=sorted_N.device) - first_E[sorted_N]
    is_kept_N = (place_N < capacity) & (sorted_N < num_experts)
    slot_N = by_weight_N[by_expert_N]
    return torch.empty_like(is_kept_N).scatter_(0, slot_N, is_kept_N).view(ids_TK.shape)


def count_choices(ids_BN: Tensor, num_experts: int) -> Tensor:
    """Count in each row how often each expert id occurs, -1 not counted: int64 (B, N) to int64 (B, E)."""
    counts_BE = torch.zeros(ids_BN.shape[0], num_experts, dtype=torch.int64, device=ids_BN.device)
    # Not bincount: on a GPU it makes the host wait for the size of its result.
    return counts_BE.scatter_add_(1, ids_BN.clamp_min(0), (ids_BN >= 0).to(torch.int64))
