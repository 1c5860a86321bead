"""Routers and losses as other code bases write them, or in plain loops, against which ours are compared."""

import math

import torch
from torch import Tensor
from torch.nn import functional


def softmax_router(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mixtral and Qwen 3 MoE in Hugging Face transformers: probabilities, top-k of them, optional renormalisation."""
    scores_TE = functional.softmax(logits_TE, dim=1)
    weights_TK, ids_TK = torch.topk(scores_TE, top_k, dim=-1)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return ids_TK, weights_TK, scores_TE


def sigmoid_router(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V3 in Hugging Face transformers, with one group: the bias decides who, the score decides how much."""
    scores_TE = logits_TE.sigmoid()
    ids_TK = torch.topk(scores_TE + bias_E, top_k, dim=-1)[1]
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * scale, scores_TE


def deepseek_v3_router(
    logits_TE: Tensor, bias_E: Tensor, *, top_k: int, num_groups: int, chosen_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3 in Hugging Face transformers, with groups: masks in place of loops, ties left open."""
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE.detach() + bias_E
    choice_TGe = choice_TE.view(-1, num_groups, choice_TE.shape[1] // num_groups)
    group_TG = torch.topk(choice_TGe, 2, dim=-1)[0].sum(dim=-1)
    open_TG = torch.zeros_like(group_TG).scatter_(1, torch.topk(group_TG, chosen_groups, dim=-1)[1], 1)
    open_TE = open_TG[:, :, None].expand_as(choice_TGe).reshape(choice_TE.shape)
    ids_TK = torch.topk(choice_TE.masked_fill(open_TE == 0, -torch.inf), top_k, dim=-1)[1]
    weights_TK = scores_TE.gather(1, ids_TK)
    return ids_TK, weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20) * scale


def one_hot_balance_loss(logits_TE: Tensor, is_real_T: Tensor, top_k: int) -> Tensor:
    """`load_balancing_loss_func` of Hugging Face transformers for one layer; it is k for even routing, not 1."""
    num_experts = logits_TE.shape[1]
    probabilities_TE = functional.softmax(logits_TE, dim=-1)
    ids_TK = torch.topk(probabilities_TE, top_k, dim=-1)[1]
    one_hot_TKE = functional.one_hot(ids_TK, num_experts)
    mask_T = is_real_T.to(logits_TE.dtype)
    fraction_KE = (one_hot_TKE * mask_T[:, None, None]).sum(0) / mask_T.sum()
    probability_E = (probabilities_TE * mask_T[:, None]).sum(0) / mask_T.sum()
    return (fraction_KE * probability_E).sum() * num_experts


def loop_balance_loss(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """E/k * sum_i f_i P_i token by token; tokens with id -1 do not exist, scores are divided by their sum."""
    num_experts, top_k = scores_TE.shape[1], ids_TK.shape[1]
    real = [token for token in range(ids_TK.shape[0]) if ids_TK[token, 0] >= 0]
    total = scores_TE.new_zeros(())
    for expert in range(num_experts):
        won = sum(int(ids_TK[token, choice] == expert) for token in real for choice in range(top_k))
        mass = sum((scores_TE[token, expert] / scores_TE[token].sum() for token in real), start=scores_TE.new_zeros(()))
        total = total + (won / len(real)) * (mass / len(real))
    return num_experts / top_k * total


def grouped_ids(
    ranking_TE: Tensor, score_TE: Tensor, top_k: int, num_groups: int, chosen_groups: int
) -> list[list[int]]:
    """DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) in loops; of equal groups and of equal experts the lowest wins."""
    num_experts = ranking_TE.shape[1]
    size = num_experts // num_groups
    ids = []
    for ranking, score in zip(ranking_TE.tolist(), score_TE.tolist(), strict=True):
        best_two = [sum(sorted(score[group * size : (group + 1) * size])[-2:]) for group in range(num_groups)]
        groups = sorted(range(num_groups), key=lambda group: (-best_two[group], group))[:chosen_groups]
        reachable = [expert for expert in range(num_experts) if expert // size in groups]
        ids.append(sorted(reachable, key=lambda expert: (-ranking[expert], expert))[:top_k])
    return ids


def expert_choices(scores_TE: Tensor, top_k: int, is_real: list[bool]) -> list[list[int]]:
    """Expert choice (arXiv:2202.09368) in loops: each expert takes its best tokens; -1 fills a token's row."""
    num_tokens, num_experts = scores_TE.shape
    scores = scores_TE.tolist()
    real = [token for token in range(num_tokens) if is_real[token]]
    room = min(max(1, len(real) * top_k // num_experts), len(real))
    takers: list[list[int]] = [[] for _ in range(num_tokens)]
    for expert in range(num_experts):
        for token in sorted(real, key=lambda token: (-scores[token][expert], token))[:room]:
            takers[token].append(expert)
    ids = []
    for token, experts in enumerate(takers):
        ordered = sorted(experts, key=lambda expert: (-scores[token][expert], expert))
        ids.append(ordered + [-1] * (num_experts - len(experts)))
    return ids


def keep_heaviest(ids: list[list[int]], weights: list[list[float]], capacity: int) -> list[list[int]]:
    """Each expert keeps its `capacity` heaviest choices, of equal ones the first; the others become -1."""
    rivals: dict[int, list[tuple[float, int, int]]] = {}
    for token, row in enumerate(ids):
        for choice, expert in enumerate(row):
            if expert >= 0:
                rivals.setdefault(expert, []).append((-weights[token][choice], token, choice))
    kept = {(token, choice) for choices in rivals.values() for _, token, choice in sorted(choices)[:capacity]}
    return [
        [expert if (token, choice) in kept else -1 for choice, expert in enumerate(row)]
        for token, row in enumerate(ids)
    ]


def loop_smooth_choices(scores_TE: Tensor, ids_TK: Tensor, temperature: float) -> Tensor:
    """Sum over tokens of sigmoid(log-margin / temperature) for each expert; tokens with id -1 do not exist."""
    num_experts = scores_TE.shape[1]
    totals = [scores_TE.new_zeros(()) for _ in range(num_experts)]
    for scores_E, ids in zip(scores_TE, ids_TK.tolist(), strict=True):
        if ids[0] < 0:
            continue
        left = [expert for expert in range(num_experts) if expert not in ids]
        best_left = max(left, key=lambda expert: scores_E[expert].item())
        last_chosen = min(ids, key=lambda expert: scores_E[expert].item())
        for expert in range(num_experts):
            boundary = best_left if expert in ids else last_chosen
            margin = scores_E[expert].log() - scores_E[boundary].log()
            totals[expert] = totals[expert] + 1 / (1 + torch.exp(-margin / temperature))
    return torch.stack(totals)


def required_biases(scores_TE: Tensor, bias_E: Tensor, ids_TK: Tensor) -> list[list[float]]:
    """For each expert, by rising size, what its bias would have had to exceed to win each real token."""
    num_experts = scores_TE.shape[1]
    required: list[list[float]] = [[] for _ in range(num_experts)]
    for scores, ids in zip(scores_TE.tolist(), ids_TK.tolist(), strict=True):
        if ids[0] < 0:
            continue
        for expert in range(num_experts):
            others = sorted((scores[i] + bias_E[i].item() for i in range(num_experts) if i != expert), reverse=True)
            required[expert].append(others[len(ids) - 1] - scores[expert])
    return [sorted(values) for values in required]


def squared_load(counts: list[int]) -> float:
    """1 + (coefficient of variation)^2 of a load, from its mean and its variance."""
    mean = math.fsum(counts) / len(counts)
    variance = math.fsum((count - mean) ** 2 for count in counts) / len(counts)
    return 1 + variance / mean**2
