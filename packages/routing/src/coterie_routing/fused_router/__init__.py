"""The top-k router in one kernel that reads the tokens once, and its backward pass: Triton, for Hopper GPUs.

`coterie_routing.router.route` is the reference. This differs in the order of its sums only, so that two experts whose
logits agree to the last bits of fp32 may change places. Every result, the gradient of the weight included, is the same
in each run.
"""

import functools
import importlib.util
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_routing.config import SCORE_FUNCTIONS, RouterConfig

__all__ = ["FusedRouting", "fused_route", "is_faster", "reason_against"]

_MOST_EXPERTS = 512
_MOST_CHOICES = 64
# With more, a row of logits spills from the registers.
_MOST_EXPERTS_TIMED = 256


@dataclass(frozen=True, eq=False)
class FusedRouting:
    """Hold what the fused router says about T tokens; a masked token is as in `coterie_routing.Routing`.

    Attributes:
        ids_TK: Chosen experts by falling rank, int64.
        weights_TK: Weight of each choice, fp32, differentiable.
        scores_TE: Score of every expert before any bias, fp32, differentiable.
        counts_E: Number of choices for each expert, int64.
        probability_sums_E: Sum over tokens of each expert's probability, fp64, differentiable.
        z_sum: Sum over tokens of logsumexp(logits)^2, fp64 scalar, differentiable.
        num_tokens: Number of real tokens, int64 scalar.
        num_bad: Number of real tokens with a NaN or an infinite logit, all if the bias has a NaN; int64 scalar.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    counts_E: Tensor
    probability_sums_E: Tensor
    z_sum: Tensor
    num_tokens: Tensor
    num_bad: Tensor


def reason_against(x_TD: Tensor, weight_ED: Tensor, config: RouterConfig) -> str | None:
    """Return why these tokens cannot be routed by the fused kernels, or None if they can."""
    if x_TD.device.type != "cuda":
        return f"it needs tokens on a CUDA device, not on {x_TD.device}"
    if not _has_triton():
        return "the library triton is not installed"
    capability = torch.cuda.get_device_capability(x_TD.device)
    if capability[0] != 9:
        return f"it is made for GPUs of compute capability 9 (Hopper); this one has {capability[0]}.{capability[1]}"
    reason = _dtype_reason(x_TD, weight_ED)
    if reason is not None:
        return reason
    if config.num_experts > _MOST_EXPERTS:
        return f"num_experts ({config.num_experts}) is above {_MOST_EXPERTS}, the most that a row in registers can have"
    if config.top_k > _MOST_CHOICES:
        return f"top_k ({config.top_k}) is above {_MOST_CHOICES}"
    given = {
        "num_groups": config.num_groups != 1,
        "selection": config.selection != "top_k",
        "capacity_factor": config.capacity_factor is not None,
        "assignment": config.assignment is not None,
    }
    return next((f"it has no {name}" for name, is_given in given.items() if is_given), None)


def is_faster(x_TD: Tensor, config: RouterConfig) -> bool:
    """Return whether the kernels were measured to be faster than plain torch for this dtype and number of experts."""
    return x_TD.dtype == torch.bfloat16 and config.num_experts <= _MOST_EXPERTS_TIMED


def fused_route(
    x_TD: Tensor,
    weight_ED: Tensor,
    *,
    top_k: int,
    score_function: str,
    renormalize: bool,
    weight_scale: float,
    selection_bias_E: Tensor | None = None,
    is_real_T: Tensor | None = None,
) -> FusedRouting:
    """Route T tokens by the logits `x_TD @ weight_ED.T`, with the rules of `coterie_routing.route`.

    Logits are fp32. From bf16 tokens they are sums of exact products: with a bf16 weight, or with an fp32 weight as a
    sum of three bf16 numbers. For the backward pass sigmoids keep T * E logits; else only T numbers are kept besides
    what is returned.

    Args:
        x_TD: Tokens, bf16 or fp32; T may be 0. Rows that are masked may hold anything, NaN too.
        weight_ED: fp32 or the dtype of the tokens. The gradients of both come in their dtypes.
        top_k: Number of experts K of a token, from 1 to min(E, 64).
        score_function: One of `SCORE_FUNCTIONS`.
        renormalize: Divide the K chosen scores of a token by their sum.
        weight_scale: Factor on every weight.
        selection_bias_E: fp32, added to the scores for the selection only.
        is_real_T: Bool; False marks padding.

    Raises:
        ValueError: If an argument does not fit.
    """
    problems = _problems(x_TD, weight_ED, top_k, score_function, weight_scale, selection_bias_E, is_real_T)
    if problems:
        raise ValueError("\n".join(problems))
    from coterie_routing.fused_router.launch import FusedRoute, Options

    options = Options(top_k=top_k, score_function=score_function, renormalize=renormalize, weight_scale=weight_scale)
    bias_E = None if selection_bias_E is None else selection_bias_E.detach().contiguous()
    mask_T = None if is_real_T is None else is_real_T.contiguous()
    with torch.cuda.device_of(x_TD):  # type: ignore[no-untyped-call]  # where Triton launches
        return FusedRouting(*FusedRoute.apply(x_TD, weight_ED, bias_E, mask_T, options))


def _problems(
    x_TD: Tensor,
    weight_ED: Tensor,
    top_k: int,
    score_function: str,
    weight_scale: float,
    bias_E: Tensor | None,
    is_real_T: Tensor | None,
) -> list[str]:
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        return [
            f"expected tokens (T, D) and a weight (E, D), got {tuple(x_TD.shape)} and {tuple(weight_ED.shape)}",
        ]
    num_experts = weight_ED.shape[0]
    found = []
    reason = _dtype_reason(x_TD, weight_ED)
    if reason is not None:
        found.append(reason)
    if not 1 <= num_experts <= _MOST_EXPERTS:
        found.append(f"the number of experts ({num_experts}) must be from 1 to {_MOST_EXPERTS}")
    most = min(num_experts, _MOST_CHOICES)
    if not 1 <= top_k <= most:
        found.append(f"top_k ({top_k}) must be from 1 to {most}")
    if score_function not in SCORE_FUNCTIONS:
        found.append(f"score_function ({score_function!r}) must be one of: {', '.join(SCORE_FUNCTIONS)}")
    if not (math.isfinite(weight_scale) and weight_scale > 0):
        found.append(f"weight_scale ({weight_scale}) must be a finite number above 0; 1.0 changes nothing")
    for name, tensor, dtype, shape in (
        ("selection_bias_E", bias_E, torch.float32, (num_experts,)),
        ("is_real_T", is_real_T, torch.bool, (x_TD.shape[0],)),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape or tensor.device != x_TD.device):
            found.append(
                f"{name} must be {dtype} of shape {shape} on {x_TD.device}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
    return found


def _dtype_reason(x_TD: Tensor, weight_ED: Tensor) -> str | None:
    if x_TD.dtype not in (torch.bfloat16, torch.float32):
        return f"tokens must be torch.bfloat16 or torch.float32, not {x_TD.dtype}"
    allowed = dict.fromkeys((x_TD.dtype, torch.float32))
    if weight_ED.dtype not in allowed:
        return f"the weight must be {' or '.join(map(str, allowed))} for {x_TD.dtype} tokens, not {weight_ED.dtype}"
    if weight_ED.device != x_TD.device:
        return f"tokens on {x_TD.device} and the weight on {weight_ED.device} must be on one device"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
