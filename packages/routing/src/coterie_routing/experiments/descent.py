"""Descend a balance loss alone, without a model around it, and see whether its score and the load agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie_routing.config import RouterConfig
from coterie_routing.experiments.corpus import Domain
from coterie_routing.losses import balance_loss, balance_terms, squared_load_loss
from coterie_routing.report import LoadReport, load_report
from coterie_routing.router import route
from coterie_routing.wins import win_sums

__all__ = ["Descent", "Loss", "Start", "byte_start", "crowded_start", "descend", "second_choice_start"]

Loss = Literal["dot_product", "squared_load"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Start:
    """Hold the logits from which a descent begins.

    Attributes:
        name: As the table shows it.
        logits_RE: fp64 (R, E), the numbers that are descended.
        row_T: int64 (T), the row of `logits_RE` that each token has; tokens that share a row cannot be told apart.
        top_k: Choices for each token.
        rate: Learning rate of plain gradient descent, for the loss summed over tokens; it falls to 0 on a line, for
            tokens that cross a boundary together would jump back and forth for ever.
        steps: Number of steps.
    """

    name: str
    logits_RE: Tensor
    row_T: Tensor
    top_k: int
    rate: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Hold the course of one descent.

    Attributes:
        start: Name of the start.
        loss: The loss that was descended.
        scores: Dot-product score at each step, the one after the last step included.
        load_scores: 1 + CV^2 of the load at each step.
        report: On the last step.
    """

    start: str
    loss: str
    scores: list[float]
    load_scores: list[float]
    report: LoadReport


def crowded_start(*, noise: float, steps: int, seed: int = 0) -> Start:
    """Return 700 tokens that expert 0 wins by a hair and 300 that the other three win by far, top-1.

    Args:
        noise: Standard deviation of a normal number added to each logit. Without it the 700 tokens are all alike.
        steps: Number of steps.
        seed: Of the noise.
    """
    probabilities_TE = torch.full((1000, 4), 0.001, dtype=torch.float64)
    probabilities_TE[:700] = torch.tensor([0.26, 0.2475, 0.2475, 0.245], dtype=torch.float64)
    probabilities_TE[torch.arange(700, 1000), 1 + torch.arange(300) % 3] = 0.997
    generator = torch.Generator().manual_seed(seed)
    noise_TE = noise * torch.randn(1000, 4, generator=generator, dtype=torch.float64)
    name = "700 crowded tokens, " + ("all alike" if noise == 0 else f"noise {noise:g}")
    return Start(
        name=name,
        logits_RE=probabilities_TE.log() + noise_TE,
        row_T=torch.arange(1000),
        top_k=1,
        rate=0.02,
        steps=steps,
    )


def second_choice_start(*, steps: int, seed: int = 0) -> Start:
    """Return 2000 tokens with a sure first choice, spread evenly over 7 experts, and expert 0 as everyone's second.

    The second choice has little probability, so the dot-product loss has next to no gradient there.
    """
    generator = torch.Generator().manual_seed(seed)
    logits_TE = 0.1 * torch.randn(2000, 8, generator=generator, dtype=torch.float64)
    logits_TE[:, 0] += 1
    logits_TE[torch.arange(2000), 1 + torch.arange(2000) % 7] = 8
    return Start(
        name="one second choice for all, top-2",
        logits_RE=logits_TE,
        row_T=torch.arange(2000),
        top_k=2,
        rate=0.5,
        steps=steps,
    )


def byte_start(
    domains: Sequence[Domain], *, num_tokens: int, num_experts: int, top_k: int, steps: int, seed: int = 0
) -> Start:
    """Return tokens of real text whose logits depend on their byte alone, as in a first layer.

    A frequent byte moves between experts as one, so an even load may be out of reach; the score can still reach 1.
    """
    generator = torch.Generator().manual_seed(seed)
    each = num_tokens // len(domains)
    parts = [one.train[torch.randint(one.train.numel(), (each,), generator=generator)] for one in domains]
    return Start(
        name=f"router on bytes, {num_experts} experts, top-{top_k}",
        logits_RE=torch.randn(256, num_experts, generator=generator, dtype=torch.float64),
        row_T=torch.cat(parts).to(torch.int64),
        top_k=top_k,
        rate=0.01,
        steps=steps,
    )


def descend(start: Start, loss: Loss) -> Descent:
    """Descend one loss in the scope of all tokens by plain gradient descent."""
    logits_RE = start.logits_RE.clone().requires_grad_()
    num_tokens, num_experts = start.row_T.numel(), logits_RE.shape[1]
    config = RouterConfig(d_model=1, num_experts=num_experts, top_k=start.top_k, renormalize=False)
    scores, load_scores = [], []
    for step in range(start.steps + 1):
        routing = route(logits_RE[start.row_T], config)
        sums = routing.sums.detach()
        scores.append(float(balance_loss(sums, top_k=start.top_k)))
        load_scores.append(float(squared_load_loss(sums.counts_E)))
        if step < start.steps:
            terms_L = balance_terms(
                [routing], top_k=start.top_k, step_tokens=num_tokens, scope="micro_batch", loss=loss
            )
            (gradient_RE,) = torch.autograd.grad(terms_L.sum(), logits_RE)
            with torch.no_grad():
                logits_RE -= start.rate * (1 - step / start.steps) * num_tokens * gradient_RE
    report = load_report({"step": [sums]}, top_k=start.top_k, wins=win_sums(routing))
    return Descent(start=start.name, loss=loss, scores=scores, load_scores=load_scores, report=report)
