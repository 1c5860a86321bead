"""Train the byte model under one way of balancing, and judge the result on held-out text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from coterie_routing.bias import BiasRule, RequiredBias, quantile_bias, required_bias, updated_bias
from coterie_routing.config import RouterConfig
from coterie_routing.experiments.corpus import Domain
from coterie_routing.experiments.model import ByteModel
from coterie_routing.losses import balance_loss, balance_terms, squared_load_loss
from coterie_routing.report import LoadReport, load_report, split_sums
from coterie_routing.router import Routing
from coterie_routing.sums import LoadSums
from coterie_routing.wins import WinSums, win_sums

__all__ = ["Recipe", "Settings", "Trained", "train"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Name one way of balancing.

    Attributes:
        name: As the table shows it.
        loss: "dot_product", "squared_load" or None.
        scope: Scope of the loss; the scope whose score is reported where there is no loss.
        coefficient: Factor on the loss.
        bias: Rule that trains the selection bias, or None.
    """

    name: str
    loss: Literal["dot_product", "squared_load"] | None = None
    scope: Literal["sequence", "micro_batch", "step"] = "step"
    coefficient: float = 0.0
    bias: BiasRule | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold the sizes of the experiment; all recipes share them.

    Attributes:
        steps: Optimizer steps.
        seed: Of the weights and of the text drawn.
        micro_batches: Micro-batches in a step, each of one domain, in turn.
        sequences: Sequences in a micro-batch.
        length: Tokens in a sequence.
        width: Width D of the model.
        num_experts: Number of experts E.
        expert_width: Hidden width H of each expert.
        top_k: Choices for each token.
        score_function: Of the router.
        learning_rate: Highest learning rate of AdamW, after 20 steps; it falls to a tenth on a line.
        held_out_sequences: Held-out sequences of each domain.
    """

    steps: int = 240
    seed: int = 0
    micro_batches: int = 4
    sequences: int = 4
    length: int = 64
    width: int = 64
    num_experts: int = 16
    expert_width: int = 32
    top_k: int = 1
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    learning_rate: float = 3e-3
    held_out_sequences: int = 64

    @property
    def step_tokens(self) -> int:
        """Tokens in an optimizer step."""
        return self.micro_batches * self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Hold what came of one recipe.

    Attributes:
        recipe: The recipe.
        settings: The sizes.
        bits_per_byte: On held-out text.
        report: On the routing of held-out text.
        scores: Balance score in the recipe's scope, at each training step.
        load_scores: 1 + CV^2 of the load of each training step.
    """

    recipe: Recipe
    settings: Settings
    bits_per_byte: float
    report: LoadReport
    scores: list[float]
    load_scores: list[float]

    @property
    def label(self) -> str:
        """The recipe and the router in a few words."""
        return f"top-{self.settings.top_k}: {self.recipe.name}"


def train(recipe: Recipe, settings: Settings, domains: Sequence[Domain]) -> Trained:
    """Train one model from the seed and judge it.

    The same arguments give the same numbers on one machine with the same number of threads. The global generator is
    seeded, for torch has no other for the weights of its layers.
    """
    torch.manual_seed(settings.seed)
    config = RouterConfig(
        d_model=settings.width,
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        score_function=settings.score_function,
        renormalize=settings.top_k > 1,
        selection_bias=recipe.bias is not None,
    )
    model = ByteModel(config, settings.expert_width)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    generator = torch.Generator().manual_seed(settings.seed)
    scores, load_scores = [], []
    load_LE: Tensor | None = None
    for step in range(settings.steps):
        warm, done = min(1.0, (step + 1) / 20), step / settings.steps
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm * (1 - 0.9 * done)
        optimizer.zero_grad()
        micro_batches = []
        required: RequiredBias | None = None
        for part in range(settings.micro_batches):
            domain = domains[(step * settings.micro_batches + part) % len(domains)]
            sequences_BS = _draw(domain.train, settings.sequences, settings.length, generator)
            nats, routing = _nats(model, sequences_BS)
            loss = nats / settings.step_tokens
            if recipe.loss is not None:
                loss = (
                    loss
                    + recipe.coefficient
                    * balance_terms(
                        [routing],
                        top_k=settings.top_k,
                        step_tokens=settings.step_tokens,
                        scope=recipe.scope,
                        loss=recipe.loss,
                        num_sequences=settings.sequences,
                        load_LE=load_LE,
                    ).sum()
                )
            loss.backward()  # type: ignore[no-untyped-call]
            micro_batches.append(_by_sequence(recipe.scope, routing, settings))
            if recipe.bias is not None and recipe.bias.kind == "quantile":
                assert model.router.selection_bias is not None
                one = required_bias(routing, model.router.selection_bias)
                required = one if required is None else required + one
        optimizer.step()
        whole = _added([one for units in micro_batches for one in units])
        load_LE = whole.counts_E[None]
        if recipe.bias is not None:
            _move_bias(model, recipe.bias, whole.counts_E, required, settings.top_k)
        units = [whole] if recipe.scope == "step" else [one for part_units in micro_batches for one in part_units]
        scores.append(sum(float(balance_loss(one, top_k=settings.top_k)) for one in units) / len(units))
        load_scores.append(float(squared_load_loss(whole.counts_E)))
    bits_per_byte, report = _judge(model, recipe, settings, domains)
    return Trained(
        recipe=recipe,
        settings=settings,
        bits_per_byte=bits_per_byte,
        report=report,
        scores=scores,
        load_scores=load_scores,
    )


@torch.no_grad()
def _move_bias(model: ByteModel, rule: BiasRule, counts_E: Tensor, required: RequiredBias | None, top_k: int) -> None:
    bias_E = model.router.selection_bias
    assert bias_E is not None
    if rule.kind == "quantile":
        assert required is not None
        bias_E.copy_(quantile_bias(bias_E, required, rule, top_k=top_k))
    else:
        bias_E.copy_(updated_bias(bias_E, counts_E, rule))


@torch.no_grad()
def _judge(model: ByteModel, recipe: Recipe, settings: Settings, domains: Sequence[Domain]) -> tuple[float, LoadReport]:
    """Return the bits per byte of held-out text and the report on its routing."""
    model.eval()
    generator = torch.Generator().manual_seed(settings.seed + 1)
    nats, num_bytes = 0.0, 0
    units: dict[str, list[LoadSums]] = {"sequence": [], "micro_batch": [], "step": []}
    by_domain: dict[str, list[LoadSums]] = {domain.name: [] for domain in domains}
    wins: WinSums | None = None
    rounds = max(1, settings.held_out_sequences // settings.sequences)
    for _ in range(rounds):
        step: list[LoadSums] = []
        for domain in domains:
            sequences_BS = _draw(domain.held_out, settings.sequences, settings.length, generator)
            one, routing = _nats(model, sequences_BS)
            nats, num_bytes = nats + float(one), num_bytes + settings.sequences * settings.length
            units["sequence"] += _sequence_sums(routing, settings)
            step.append(routing.sums.detach())
            by_domain[domain.name].append(routing.sums.detach())
            wins = win_sums(routing) if wins is None else wins + win_sums(routing)
        units["micro_batch"] += step
        units["step"].append(_added(step))
    report = load_report(
        units,
        top_k=settings.top_k,
        wins=wins,
        sums_by_domain={name: _added(parts) for name, parts in by_domain.items()},
        optimized_scope=recipe.scope,
    )
    return nats / num_bytes / math.log(2), report


def _nats(model: ByteModel, sequences_BS: Tensor) -> tuple[Tensor, Routing]:
    """Return the summed cross-entropy of each next byte, and the routing."""
    logits_BSV, routing = model(sequences_BS[:, :-1])
    targets_T = sequences_BS[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits_BSV.flatten(0, 1), targets_T, reduction="sum"), routing


def _draw(text: Tensor, num_sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Return windows of a text at random places, with one byte more than `length`: int64 (B, length + 1)."""
    starts_B1 = torch.randint(text.numel() - length, (num_sequences, 1), generator=generator)
    return text[starts_B1 + torch.arange(length + 1)].to(torch.int64)


def _by_sequence(scope: str, routing: Routing, settings: Settings) -> list[LoadSums]:
    """Return the sums of one micro-batch, cut into sequences if the scope asks for it."""
    return _sequence_sums(routing, settings) if scope == "sequence" else [routing.sums.detach()]


def _sequence_sums(routing: Routing, settings: Settings) -> list[LoadSums]:
    part_T = torch.arange(settings.sequences).repeat_interleave(settings.length)
    return split_sums(routing, part_T, settings.sequences)


def _added(parts: Sequence[LoadSums]) -> LoadSums:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total
