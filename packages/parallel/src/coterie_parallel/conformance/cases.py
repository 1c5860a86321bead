"""The batches on which a dispatcher is checked."""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

__all__ = ["CASES", "Case", "Tokens", "make_tokens"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch; ``why`` says which fault it finds.

    ``num_tokens`` is repeated over the ranks. ``routing`` names the experts that may be chosen: any, not_second (never
    expert 1), first_rank, same_rank (all choices of a token on one rank) or last (one expert). ``routed`` is the share
    of pairs that are routed. ``kind`` names what is done with it: batch (an instance of its own), reuse (one instance
    for batches of several sizes, without gradients and in recomputed forward passes) or refusals (wrong arguments, then
    the batch).
    """

    name: str
    why: str
    num_tokens: tuple[int, ...] = (5, 3, 8, 1)
    experts_per_rank: int = 4
    top_k: int = 2
    width: int = 8
    alignment: int = 1
    dtype: torch.dtype = torch.float32
    routing: str = "any"
    routed: float = 1.0
    kind: str = "batch"


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What one rank gives to dispatch, and values for every pair to give to combine and to both backward passes."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    pair_rows_TKD: Tensor
    pair_weights_TK: Tensor
    grad_y_TD: Tensor


CASES = (
    Case(name="uneven", why="token counts differ between ranks"),
    Case(name="empty_rank", why="a rank without tokens still takes part", num_tokens=(0, 6)),
    Case(name="empty_last_rank", why="the same, where other ranks wait for it", num_tokens=(6, 0)),
    Case(name="no_tokens", why="nobody has a token", num_tokens=(0,)),
    Case(name="idle_expert", why="a segment without rows", routing="not_second", top_k=3),
    Case(name="first_rank", why="all ranks but one receive nothing", routing="first_rank"),
    Case(name="one_expert", why="one segment takes everything", routing="last", top_k=1),
    Case(name="same_rank", why="two experts of a token on one rank are two rows", routing="same_rank"),
    Case(name="some_unrouted", why="pairs with id -1 are dropped", routed=0.6, top_k=3),
    Case(name="none_routed", why="every id is -1", routed=0.0),
    Case(name="one_choice", why="K = 1", top_k=1),
    Case(name="all_experts", why="K = the experts of a rank, one expert a choice", experts_per_rank=5, top_k=5),
    Case(name="one_expert_a_rank", why="e = 1", experts_per_rank=1, top_k=1),
    Case(name="aligned_16", why="segments end at multiples of 16", alignment=16, routed=0.8, routing="not_second"),
    Case(name="aligned_128", why="padding longer than the rows", alignment=128, top_k=3),
    Case(name="bfloat16", why="sums in fp32, rows in bf16", dtype=torch.bfloat16, top_k=4),
    Case(name="longer", why="more rows than a block of threads", num_tokens=(129, 64, 0, 65), top_k=4, routed=0.9),
    Case(name="reuse", why="one instance for batches that differ in T, K and D", top_k=4, kind="reuse"),
    Case(name="refusals", why="what is wrong is a ValueError, and does no harm", kind="refusals"),
)


def make_tokens(case: Case, *, degree: int, source: int, layer: int = 0) -> Tokens:
    """Return the part of ``case`` that axis index ``source`` of ``degree`` holds; equal on every machine rank."""
    generator = torch.Generator().manual_seed(crc32(f"{case.name} {source} {layer}".encode()))
    num_tokens = case.num_tokens[source % len(case.num_tokens)]
    num_experts = case.experts_per_rank * degree
    pairs = (num_tokens, case.top_k)

    experts_E = torch.arange(num_experts)
    home_T1 = torch.randint(degree, (num_tokens, 1), generator=generator)
    allowed_TE = {
        "any": experts_E >= 0,
        "not_second": experts_E != 1,
        "first_rank": experts_E < case.experts_per_rank,
        "same_rank": experts_E // case.experts_per_rank == home_T1,
        "last": experts_E == num_experts - 1,
    }[case.routing]
    scores_TE = torch.rand(num_tokens, num_experts, generator=generator)
    ids_TK = scores_TE.masked_fill(~allowed_TE, -1).argsort(1, descending=True)[:, : case.top_k]
    unrouted_TK = torch.rand(pairs, generator=generator) >= case.routed
    return Tokens(
        x_TD=torch.randn(num_tokens, case.width, generator=generator).to(case.dtype),
        ids_TK=ids_TK.masked_fill(unrouted_TK, -1),
        weights_TK=torch.rand(pairs, generator=generator),
        pair_rows_TKD=torch.randn(*pairs, case.width, generator=generator).to(case.dtype),
        pair_weights_TK=torch.randn(pairs, generator=generator),
        grad_y_TD=torch.randn(num_tokens, case.width, generator=generator).to(case.dtype),
    )
