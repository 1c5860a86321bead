"""Seeded assignments that replace the router's choice, so that a benchmark of a system decides its own load."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ASSIGNMENTS", "Assignment", "assigned_ids"]

ASSIGNMENTS: tuple[str, ...] = ("uniform", "random", "zipf", "hot")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Say which experts the tokens go to, whatever their logits are.

    The choice is a pure function of the seed and of the token's place in the batch, masked ones included, the same on
    every device. The weights still come from the router's scores, so its gradients flow as in training.

    Attributes:
        kind: "uniform" gives each expert the same number of choices, to within one; "random" draws K experts for each
            token, all with the same chance; "zipf" draws the expert of popularity rank r with a chance in proportion
            to 1 / r^exponent; "hot" gives one expert the share `hot_share` of all choices, to within one token, and
            draws the others evenly.
        seed: Layers that shall not load the same experts need different seeds.
        exponent: Of "zipf"; 0 is "random". The K experts of a token are drawn without replacement, so no expert gets
            more than 1 / K of all choices.
        hot_share: Of "hot"; at most 1 / K, for a token chooses an expert once.
    """

    kind: Literal["uniform", "random", "zipf", "hot"]
    seed: int = 0
    exponent: float = 1.0
    hot_share: float = 0.1

    def problems(self, *, num_experts: int, top_k: int) -> list[str]:
        """Return one sentence for each fault, for a router of these sizes."""
        found = []
        if self.kind not in ASSIGNMENTS:
            found.append(f"assignment kind ({self.kind!r}) must be one of: {', '.join(ASSIGNMENTS)}")
        if not -(2**63) <= self.seed < 2**63:
            found.append(f"assignment seed ({self.seed}) must fit into 64 bits; 0 to 2^63 - 1 works")
        if not (math.isfinite(self.exponent) and self.exponent >= 0):
            found.append(f"assignment exponent ({self.exponent}) must be a finite number of at least 0; usual: 1.0")
        if self.kind == "hot" and not 0 <= self.hot_share <= 1 / top_k:
            found.append(
                f"assignment hot_share ({self.hot_share}) must be from 0 to 1 / top_k ({1 / top_k:.4g}), "
                f"as a token chooses an expert at most once"
            )
        elif self.kind == "hot" and top_k == num_experts and self.hot_share < 1 / top_k:
            found.append(
                f"assignment hot_share ({self.hot_share}) must be 1 / top_k ({1 / top_k:.4g}) "
                f"when top_k ({top_k}) takes all experts"
            )
        return found


def assigned_ids(assignment: Assignment, num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Return the K different experts of each token, int64 (T, K)."""
    if assignment.kind == "uniform":
        return _round_robin(assignment.seed, num_tokens, num_experts, top_k, device)
    uniform_TE = _uniform(assignment.seed, num_tokens, num_experts, device)
    # The K largest of log p + Gumbel noise are K draws without replacement (Kool et al. 2019, arXiv:1903.06059).
    keys_TE = -torch.log(-torch.log(uniform_TE))
    if assignment.kind == "zipf":
        rank_E = _popularity(assignment.seed, num_experts, device)
        keys_TE = keys_TE - assignment.exponent * torch.log(rank_E + 1.0)
    elif assignment.kind == "hot":
        hot = _popularity(assignment.seed, num_experts, device) == 0
        token_T = torch.arange(num_tokens + 1, dtype=torch.float64, device=device)
        is_hot_T = (token_T * (assignment.hot_share * top_k)).floor().diff() > 0
        # With no chance or with certainty; the noise stays between -4 and 38.
        keys_TE = torch.where(hot, torch.where(is_hot_T, 100.0, -100.0)[:, None], keys_TE)
    return torch.topk(keys_TE, top_k, dim=-1).indices


def _round_robin(seed: int, num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Deal the choices like cards, with the experts of one token spread over the whole range of ids."""
    step = max(1, num_experts // top_k)
    while math.gcd(step, num_experts) != 1:
        step += 1
    slot_N = torch.arange(num_tokens * top_k, device=device)
    return ((slot_N % num_experts * step + seed) % num_experts).view(num_tokens, top_k)


def _popularity(seed: int, num_experts: int, device: torch.device) -> Tensor:
    """Return the popularity rank of each expert, 0 for the most popular, in an order that depends on the seed."""
    return _uniform(seed, -1, num_experts, device)[0].argsort().argsort()


def _uniform(seed: int, num_tokens: int, num_experts: int, device: torch.device) -> Tensor:
    """Return fp64 numbers strictly between 0 and 1 by hashing (seed, token, expert); one row for token -1.

    Counters instead of a generator: nothing to carry along, capture in a graph or keep equal over devices.
    """
    token_T = (
        torch.arange(max(0, num_tokens), device=device) if num_tokens >= 0 else torch.full((1,), -1, device=device)
    )
    counter_TE = token_T[:, None] * num_experts + torch.arange(num_experts, device=device)
    bits_TE = _hash(_hash(counter_TE) ^ _hash(torch.full((), seed, dtype=torch.int64, device=device)))
    return (_shift_right(bits_TE, 12).double() + 0.5) / 2.0**52


def _hash(x: Tensor) -> Tensor:
    """Mix 64 bits (the finalizer of SplitMix64, Steele et al. 2014, doi:10.1145/2660193.2660195); int64 wraps."""
    x = x + -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Shift in zeros; the shift of a signed integer would repeat its sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)
