"""Plain-torch routers and losses as other code bases write them, against which ours are compared."""

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
