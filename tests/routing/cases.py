"""Hand-written routings and loads with the numbers they must give."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from coterie_routing import LoadSums, Router, RouterConfig

LN4, LN1_5 = math.log(4), math.log(1.5)
# Four probabilities as logits; their logsumexp is 0.
LOG_P = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]


@dataclass(frozen=True, kw_only=True)
class RouteCase:
    """Logits of some tokens and all that the router must say about them."""

    name: str
    config: dict[str, Any]
    logits: list[list[float]]
    is_real: list[bool] | None = None
    bias: list[float] | None = None
    ids: list[list[int]]
    weights: list[list[float]]
    counts: list[int]
    probability_sums: list[float]
    z_sum: float = 0.0
    num_tokens: int = 1
    chosen_counts: list[int] | None = None


ROUTE_CASES = [
    RouteCase(
        name="R10 softmax, plain",
        config={"top_k": 2, "renormalize": False},
        logits=[LOG_P],
        ids=[[0, 1]],
        weights=[[0.5, 0.25]],
        counts=[1, 1, 0, 0],
        probability_sums=[0.5, 0.25, 0.15, 0.1],
    ),
    RouteCase(
        name="R10 softmax, renormalised",
        config={"top_k": 2, "renormalize": True},
        logits=[LOG_P],
        ids=[[0, 1]],
        weights=[[2 / 3, 1 / 3]],
        counts=[1, 1, 0, 0],
        probability_sums=[0.5, 0.25, 0.15, 0.1],
    ),
    RouteCase(
        name="softmax, top-1 and scale, the best expert is the last",
        config={"top_k": 1, "renormalize": False, "route_scale": 3.0},
        logits=[LOG_P[::-1], LOG_P],
        ids=[[3], [0]],
        weights=[[1.5], [1.5]],
        counts=[1, 0, 0, 1],
        probability_sums=[0.6, 0.4, 0.4, 0.6],
        num_tokens=2,
    ),
    RouteCase(
        name="R16 zero logits: z-loss from logits, not from probabilities",
        config={"top_k": 2},
        logits=[[0.0] * 8],
        ids=[[0, 1]],
        weights=[[0.5, 0.5]],
        counts=[1, 1, 0, 0, 0, 0, 0, 0],
        probability_sums=[0.125] * 8,
        z_sum=4.324077125263812,
    ),
    RouteCase(
        name="sigmoid",
        config={"top_k": 2, "score_function": "sigmoid", "renormalize": False},
        logits=[[LN4, LN1_5, -LN1_5, -LN4]],
        ids=[[0, 1]],
        weights=[[0.8, 0.6]],
        counts=[1, 1, 0, 0],
        probability_sums=[0.4, 0.3, 0.2, 0.1],
        z_sum=math.log(4 + 1.5 + 1 / 1.5 + 0.25) ** 2,
    ),
    RouteCase(
        name="sigmoid, the bias selects but does not weigh",
        config={"top_k": 2, "score_function": "sigmoid", "route_scale": 2.5, "selection_bias": True},
        logits=[[LN4, LN1_5, -LN1_5, -LN4]],
        bias=[0.0, 0.0, 0.5, 0.0],
        ids=[[2, 0]],
        weights=[[2.5 / 3, 5 / 3]],
        counts=[1, 0, 1, 0],
        probability_sums=[0.4, 0.3, 0.2, 0.1],
        z_sum=math.log(4 + 1.5 + 1 / 1.5 + 0.25) ** 2,
    ),
    RouteCase(
        name="masked token between two real ones",
        config={"top_k": 2, "renormalize": False},
        logits=[LOG_P, [9.0, 9.0, 7.0, -5.0], LOG_P[::-1]],
        is_real=[True, False, True],
        ids=[[0, 1], [-1, -1], [3, 2]],
        weights=[[0.5, 0.25], [0.0, 0.0], [0.5, 0.25]],
        counts=[1, 1, 1, 1],
        probability_sums=[0.6, 0.4, 0.4, 0.6],
        num_tokens=2,
    ),
    RouteCase(
        name="sigmoids that are all 1.0 in fp32 keep the order of the logits",
        config={"top_k": 2, "score_function": "sigmoid"},
        logits=[[20.0, 30.0, 25.0]],
        ids=[[1, 2]],
        weights=[[0.5, 0.5]],
        counts=[0, 1, 1],
        probability_sums=[1 / 3, 1 / 3, 1 / 3],
        z_sum=(30 + math.log1p(math.exp(-5) + math.exp(-10))) ** 2,
    ),
    RouteCase(
        name="sigmoids that are all 0.0 in fp32 give weight 0, not NaN",
        config={"top_k": 2, "score_function": "sigmoid"},
        logits=[[-120.0, -120.0, -120.0]],
        ids=[[0, 1]],
        weights=[[0.0, 0.0]],
        counts=[1, 1, 0],
        probability_sums=[1 / 3, 1 / 3, 1 / 3],
        z_sum=(-120 + math.log(3)) ** 2,
    ),
    RouteCase(
        # 1 / (1 + e^-ln 2) and the scores .5 and .25: the softmax of two logits is that of all four, renormalised.
        name="R10 softmax of the chosen",
        config={"top_k": 2, "score_function": "softmax_of_chosen"},
        logits=[LOG_P, [math.log(3), 0.0, math.log(3), math.log(9)]],
        ids=[[0, 1], [3, 0]],
        weights=[[2 / 3, 1 / 3], [0.75, 0.25]],
        counts=[2, 1, 0, 1],
        probability_sums=[0.5 + 3 / 16, 0.25 + 1 / 16, 0.15 + 3 / 16, 0.1 + 9 / 16],
        z_sum=math.log(16) ** 2,
        num_tokens=2,
    ),
    RouteCase(
        name="softmax of the chosen, whether renormalised or not, with a scale and a masked token",
        config={"top_k": 2, "score_function": "softmax_of_chosen", "renormalize": False, "route_scale": 3.0},
        logits=[[9.0, 9.0, 9.0, 9.0], LOG_P],
        is_real=[False, True],
        ids=[[-1, -1], [0, 1]],
        weights=[[0.0, 0.0], [2.0, 1.0]],
        counts=[1, 1, 0, 0],
        probability_sums=[0.5, 0.25, 0.15, 0.1],
    ),
    RouteCase(
        # Trained with 8, now 2: the factor is sqrt(8 / 2) = 2, and it comes on top of the scale.
        name="trained with another k",
        config={"top_k": 2, "trained_top_k": 8, "route_scale": 1.5, "renormalize": False},
        logits=[LOG_P],
        ids=[[0, 1]],
        weights=[[1.5, 0.75]],
        counts=[1, 1, 0, 0],
        probability_sums=[0.5, 0.25, 0.15, 0.1],
    ),
    RouteCase(
        # Groups (0, 1), (2, 3), (4, 5) by the sum of their two best: .8 + .2, .75 + .6, .9 + .1. The best expert of
        # all, 4, is in a group that loses.
        name="groups, one of three",
        config={"top_k": 2, "score_function": "sigmoid", "renormalize": False, "num_groups": 3, "chosen_groups": 1},
        logits=[[LN4, -LN4, math.log(3), LN1_5, math.log(9), -math.log(9)]],
        ids=[[2, 3]],
        weights=[[0.75, 0.6]],
        counts=[0, 0, 1, 1, 0, 0],
        probability_sums=[p / 3.35 for p in (0.8, 0.2, 0.75, 0.6, 0.9, 0.1)],
        z_sum=math.log(4 + 0.25 + 3 + 1.5 + 9 + 1 / 9) ** 2,
    ),
    RouteCase(
        # The bias of .5 on expert 1 lifts group (0, 1) to .8 + .7; it does not weigh.
        name="groups, the bias decides between groups too",
        config={
            "top_k": 2,
            "score_function": "sigmoid",
            "renormalize": False,
            "num_groups": 3,
            "chosen_groups": 1,
            "selection_bias": True,
        },
        logits=[[LN4, -LN4, math.log(3), LN1_5, math.log(9), -math.log(9)]],
        bias=[0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
        ids=[[0, 1]],
        weights=[[0.8, 0.2]],
        counts=[1, 1, 0, 0, 0, 0],
        probability_sums=[p / 3.35 for p in (0.8, 0.2, 0.75, 0.6, 0.9, 0.1)],
        z_sum=math.log(4 + 0.25 + 3 + 1.5 + 9 + 1 / 9) ** 2,
    ),
    RouteCase(
        # Room for ceil(1.0 * 3 tokens * 1 / 4) = 1 choice: of .5, .5 and .5 + .1 the heaviest stays.
        name="capacity drops the lightest, and the counts before and after are kept apart",
        config={"top_k": 1, "renormalize": False, "capacity_factor": 1.0},
        logits=[LOG_P, [math.log(p) for p in (0.6, 0.2, 0.1, 0.1)], LOG_P],
        ids=[[-1], [0], [-1]],
        weights=[[0.0], [0.6], [0.0]],
        counts=[1, 0, 0, 0],
        chosen_counts=[3, 0, 0, 0],
        probability_sums=[1.6, 0.7, 0.4, 0.3],
        num_tokens=3,
    ),
    RouteCase(
        name="expert choice: each of two experts takes its two best of four tokens",
        config={"top_k": 1, "renormalize": False, "selection": "expert_choice"},
        # Probabilities of expert 0: .9, .8, .7, .6. Expert 1 takes the two with the least of it.
        logits=[[math.log(9), 0.0], [math.log(4), 0.0], [math.log(7 / 3), 0.0], [math.log(1.5), 0.0]],
        ids=[[0, -1], [0, -1], [1, -1], [1, -1]],
        weights=[[0.9, 0.0], [0.8, 0.0], [0.3, 0.0], [0.4, 0.0]],
        counts=[2, 2],
        probability_sums=[3.0, 1.0],
        z_sum=sum(math.log(1 + odds) ** 2 for odds in (9, 4, 7 / 3, 1.5)),
        num_tokens=4,
    ),
]


@dataclass(frozen=True, kw_only=True)
class LoadCase:
    """Load sums and their balance loss."""

    name: str
    counts: list[int]
    probability_sums: list[float]
    num_tokens: int
    top_k: int
    load: list[float] | None = None
    loss: float


LOAD_CASES = [
    LoadCase(
        name="even, top-1",
        counts=[2, 2, 2, 2],
        probability_sums=[2.0, 2.0, 2.0, 2.0],
        num_tokens=8,
        top_k=1,
        loss=1.0,
    ),
    LoadCase(
        name="even, top-3: still 1",
        counts=[6, 6, 6, 6],
        probability_sums=[2.0, 2.0, 2.0, 2.0],
        num_tokens=8,
        top_k=3,
        loss=1.0,
    ),
    LoadCase(
        name="all on one expert: E",
        counts=[8, 0, 0, 0],
        probability_sums=[8.0, 0.0, 0.0, 0.0],
        num_tokens=8,
        top_k=1,
        loss=4.0,
    ),
    LoadCase(
        # 3/2 * (4/5 * 0.5 + 4/5 * 0.3 + 2/5 * 0.2)
        name="uneven, top-2",
        counts=[4, 4, 2],
        probability_sums=[2.5, 1.5, 1.0],
        num_tokens=5,
        top_k=2,
        loss=1.08,
    ),
    LoadCase(
        # 2/1 * (1/4 * 0.75 + 3/4 * 0.25), not 2 * (0.75^2 + 0.25^2) = 1.25
        name="priced by the load of other tokens, in counts",
        counts=[6, 2],
        probability_sums=[6.0, 2.0],
        num_tokens=8,
        top_k=1,
        load=[100, 300],
        loss=0.75,
    ),
    LoadCase(
        name="priced by the load of other tokens, in fractions",
        counts=[6, 2],
        probability_sums=[6.0, 2.0],
        num_tokens=8,
        top_k=1,
        load=[0.25, 0.75],
        loss=0.75,
    ),
    LoadCase(
        # 4 * (0.7 * 0.1823 + 0.1 * 0.8177): a skewed load below the 1.0 of an even one, a property of the formula.
        name="expert 0 wins 700 of 1000 tokens by a hair",
        counts=[700, 100, 100, 100],
        probability_sums=[182.3, 273.15, 273.15, 271.4],
        num_tokens=1000,
        top_k=1,
        loss=0.83752,
    ),
]


def make_router(num_experts: int = 4, d_model: int = 6, top_k: int = 2, seed: int = 0, **options: Any) -> Router:
    """A router with a random weight of deviation 1."""
    router = Router(RouterConfig(d_model=d_model, num_experts=num_experts, top_k=top_k, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    return router


def make_sums(
    counts: list[int],
    probability_sums: list[float],
    num_tokens: int,
    *,
    z_sum: float = 0.0,
    num_dropped: int = 0,
    num_bad: int = 0,
) -> LoadSums:
    """Sums of these numbers."""
    return LoadSums(
        counts_E=torch.tensor(counts, dtype=torch.int64),
        probability_sums_E=torch.tensor(probability_sums, dtype=torch.float64),
        z_sum=torch.tensor(z_sum, dtype=torch.float64),
        num_tokens=torch.tensor(num_tokens, dtype=torch.int64),
        num_dropped=torch.tensor(num_dropped, dtype=torch.int64),
        num_bad=torch.tensor(num_bad, dtype=torch.int64),
    )
