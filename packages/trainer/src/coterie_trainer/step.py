"""One optimizer step and one evaluation: what is summed over tokens, micro-batches and ranks, and divided once."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from coterie_parallel import Mesh, all_reduce_sum
from coterie_routing import (
    LoadSums,
    RequiredBias,
    Router,
    Routing,
    balance_loss,
    balance_terms,
    load_imbalance,
    pack,
    quantile_bias,
    required_bias,
    squared_load_loss,
    unpack,
    updated_bias,
    z_loss,
    z_term,
)
from torch import Tensor

from coterie_trainer.capacity import CapacityWatch
from coterie_trainer.config import TrainConfig, bias_rule
from coterie_trainer.data.dataset import Batch
from coterie_trainer.model import Decoder, dispatchers

__all__ = ["StepOptimizer", "StepResult", "Stepper", "cross_entropy_sum", "evaluate"]


class StepOptimizer(Protocol):
    """What a step needs of `coterie_parallel.Optimizer`, or of another in its place."""

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Say which micro-batch the one backward inside belongs to."""

    def step(self, learning_rate: float | None = None, *, loss: Tensor | None = None) -> Tensor:
        """Update every parameter and return the global gradient norm before clipping."""


_IGNORED = -1
_BATCHES_BETWEEN_STOPS = 8
_Sums = TypeVar("_Sums", LoadSums, RequiredBias)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Numbers of one optimizer step, equal on all ranks.

    Attributes:
        loss: cross-entropy in nats per target token of the whole step.
        balance_loss: mean over MoE layers of the balance loss over the whole step, before its coefficient: E/k * sum_i
            f_i P_i or, for "squared_load", 1 + CV^2 of the load; 1.0 is even.
        z_loss: mean over MoE layers of the mean squared log-sum-exp of the router logits.
        load_imbalance: largest load over mean load, of the worst layer; 1.0 is even.
        gradient_norm: L2 norm of the whole gradient before clipping.
        num_tokens: real tokens of the step.
        bad_router_rows: rows of router logits, over all layers, that held a NaN or an infinity.
        stop_requested: whether any rank was asked to stop.
    """

    loss: float
    balance_loss: float
    z_loss: float
    load_imbalance: float
    gradient_norm: float
    num_tokens: int
    bad_router_rows: int
    stop_requested: bool


@dataclass(frozen=True, kw_only=True)
class _StepSums:
    """Sums over the micro-batches of one rank: the loss, the load of each layer, and what the quantile rule needs."""

    loss: Tensor
    layers: list[LoadSums]
    required: list[RequiredBias] | None


class Stepper:
    """Runs optimizer steps; holds the one thing that a step hands to the next: the load of the whole step.

    Args:
        model: the decoder of this rank.
        optimizer: sums gradients over ranks, clips them and updates the parameters.
        mesh: the named axes of ranks.
        config: loss coefficients and the scope of the balance loss.

    Attributes:
        load_LE: int64, expert counts of the previous step by MoE layer, over all ranks and micro-batches; zero before
            the first step. The balance loss of scope "step" prices the probabilities of this step with it, so its
            gradient does not depend on how the step is split into ranks and micro-batches.
        capacity: runs the gradients of a step again when rows found no room, and counts the load of the buffers.
    """

    def __init__(self, model: Decoder, optimizer: StepOptimizer, mesh: Mesh, config: TrainConfig) -> None:
        self.model, self.optimizer, self.mesh, self.config = model, optimizer, mesh, config
        spec = model.spec
        self.device = model.embed.weight.device
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.bias_rule = bias_rule(config)
        num_moe_layers = spec.num_layers - spec.num_dense_layers
        self.load_LE = torch.zeros(num_moe_layers, spec.num_experts, dtype=torch.int64, device=self.device)
        self.capacity = CapacityWatch(dispatchers(model), mesh, self.device)

    def run(self, batches: Sequence[Batch], *, learning_rate: float, stop_requested: bool = False) -> StepResult:
        """Accumulate the gradient over this rank's micro-batches, reduce it, and update the parameters.

        Args:
            batches: micro-batches of this rank; every rank has the same number.
            learning_rate: of this step.
            stop_requested: whether this rank was asked to stop; the result tells whether any was.
        """
        data = self.mesh.axis("data")
        batches = [batch.to(self.device) for batch in batches]
        num_targets = sum(((batch.targets_BS != _IGNORED).sum() for batch in batches), start=self._zero())
        num_tokens = sum(((batch.document_ids_BS >= 0).sum() for batch in batches), start=self._zero())
        totals = all_reduce_sum(torch.stack([num_targets, num_tokens]), data)
        step_targets, step_tokens = totals.clamp(min=1).unbind()

        sums = self.capacity.fit(lambda: self._accumulate(batches, step_targets, step_tokens))
        gradient_norm = self.optimizer.step(learning_rate, loss=sums.loss / step_targets)
        result = self._result(sums.loss, sums.layers, totals, gradient_norm, stop_requested)
        self._train_selection_bias(sums.required)
        return result

    def _accumulate(self, batches: Sequence[Batch], step_targets: Tensor, step_tokens: Tensor) -> "_StepSums":
        """Compute the gradient of all micro-batches from nothing; changes nothing but the gradients."""
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        layer_sums: list[LoadSums] | None = None
        required: list[RequiredBias] | None = None
        for number, batch in enumerate(batches, start=1):
            output = self.model(batch.tokens_BS, batch.document_ids_BS)
            batch_loss = cross_entropy_sum(self.model, output.hidden_BSD, batch.targets_BS)
            auxiliary = self._auxiliary(output.routings, step_tokens, num_sequences=len(batch.tokens_BS))
            objective = batch_loss / step_targets + auxiliary
            with self.optimizer.micro_batch(is_last=number == len(batches)):
                torch.autograd.backward(objective)
            loss_sum += batch_loss.detach()
            seen = [routing.sums.detach() for routing in output.routings]
            layer_sums = _added(layer_sums, seen)
            if self.bias_rule is not None and self.bias_rule.kind == "quantile":
                required = _added(required, self._required_bias(output.routings))
        assert layer_sums is not None, "a step needs at least one micro-batch"
        return _StepSums(loss=loss_sum, layers=layer_sums, required=required)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.device)

    def _auxiliary(self, routings: list[Routing], step_tokens: Tensor, *, num_sequences: int) -> Tensor:
        """Return this micro-batch's share of the balance and z losses, summed over layers."""
        config = self.config
        balance_L = balance_terms(
            routings,
            loss=config.balance_loss,
            scope=config.balance_scope,
            top_k=self.model.spec.top_k,
            step_tokens=step_tokens,
            num_sequences=num_sequences,
            load_LE=self.load_LE,
            sum_over_ranks=lambda counts: all_reduce_sum(counts, self.mesh.axis("data")),
        )
        z_L = torch.stack([z_term(routing.sums, step_tokens) for routing in routings])
        return config.balance_coefficient * balance_L.sum() + config.z_coefficient * z_L.sum()

    def _required_bias(self, routings: list[Routing]) -> list[RequiredBias]:
        """Return, for each layer, which selection bias the tokens of one micro-batch asked of the experts."""
        return [required_bias(routing, _bias(router)) for router, routing in zip(self.routers, routings, strict=True)]

    @torch.no_grad()
    def _train_selection_bias(self, required: list[RequiredBias] | None) -> None:
        """Replace the selection bias of every layer by what the rule makes of the load of the whole step."""
        rule = self.bias_rule
        if rule is None:
            return
        biases_LE = torch.stack([_bias(router) for router in self.routers])
        if required is None:
            next_LE = updated_bias(biases_LE, self.load_LE, rule)
        else:
            counts_LEB = all_reduce_sum(torch.stack([one.counts_EB for one in required]), self.mesh.axis("data"))
            next_LE = torch.stack(
                [
                    quantile_bias(bias_E, replace(one, counts_EB=counts_EB), rule, top_k=self.model.spec.top_k)
                    for bias_E, one, counts_EB in zip(biases_LE, required, counts_LEB, strict=True)
                ]
            )
        for router, next_E in zip(self.routers, next_LE, strict=True):
            _bias(router).copy_(next_E)

    def _result(
        self, loss_sum: Tensor, layer_sums: list[LoadSums], totals: Tensor, gradient_norm: Tensor, stop: bool
    ) -> StepResult:
        """Sum what every rank saw in one collective, and read it in one copy to the host."""
        own = torch.stack([loss_sum, torch.full_like(loss_sum, float(stop))])
        packed = all_reduce_sum(torch.cat([own, pack(layer_sums)]), self.mesh.axis("data"))
        layer_sums = unpack(packed[own.numel() :], layer_sums)
        self.load_LE = torch.stack([sums.counts_E for sums in layer_sums])
        balance_L = torch.stack([self._balance(sums) for sums in layer_sums])
        z_L = torch.stack([z_loss(sums) for sums in layer_sums])
        imbalance_L = torch.stack([load_imbalance(sums.counts_E) for sums in layer_sums])
        bad_rows = torch.stack([sums.num_bad for sums in layer_sums]).sum().double()
        of_layers = torch.stack([balance_L.mean(), z_L.mean(), imbalance_L.max(), gradient_norm.double(), bad_rows])
        numbers = torch.cat([packed[: own.numel()], totals.double(), of_layers]).tolist()
        loss, stops, num_targets, num_tokens, balance, z, imbalance, norm, bad_router_rows = numbers
        return StepResult(
            loss=loss / max(1.0, num_targets),
            balance_loss=balance,
            z_loss=z,
            load_imbalance=imbalance,
            gradient_norm=norm,
            num_tokens=int(num_tokens),
            bad_router_rows=int(bad_router_rows),
            stop_requested=stops > 0,
        )

    def _balance(self, sums: LoadSums) -> Tensor:
        if self.config.balance_loss == "squared_load":
            return squared_load_loss(sums.counts_E)
        return balance_loss(sums, top_k=self.model.spec.top_k)


def _bias(router: Router) -> Tensor:
    assert router.selection_bias is not None, "config_problems lets no rule pass without a bias"
    return router.selection_bias


def _added(total: list[_Sums] | None, more: list[_Sums]) -> list[_Sums]:
    """Add the sums of one micro-batch to those of the ones before, layer by layer."""
    return more if total is None else [a + b for a, b in zip(total, more, strict=True)]


def cross_entropy_sum(model: Decoder, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the sum of the cross-entropy in nats over positions that have a target (``targets_BS`` not -1)."""
    logits = model.logits(hidden_BSD).flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BS.flatten(), ignore_index=_IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(
    model: Decoder,
    batches: Iterable[Batch],
    mesh: Mesh,
    stop_requested: Callable[[], bool] = lambda: False,
    capacity: CapacityWatch | None = None,
) -> float | None:
    """Return the mean cross-entropy in nats per target token over all ranks' batches, None if it was cut short.

    Every rank must bring the same number of batches, padded with empty ones: the experts of a rank serve all ranks.
    Every few batches the ranks agree whether ``stop_requested`` is true on any of them. A batch whose rows found no
    room is run again; ``capacity`` counts that, where it is given.
    """
    device = model.embed.weight.device
    capacity = CapacityWatch(dispatchers(model), mesh, device) if capacity is None else capacity
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for number, batch in enumerate(batches):
        if number % _BATCHES_BETWEEN_STOPS == 0:
            stop = torch.tensor(float(stop_requested()), device=device)
            if float(all_reduce_sum(stop, mesh.axis("data"))) > 0:
                return None
        sums += capacity.fit(partial(_loss_and_targets, model, batch.to(device)))
    loss_sum, num_targets = all_reduce_sum(sums, mesh.axis("data")).tolist()
    return loss_sum / num_targets if num_targets else math.nan


def _loss_and_targets(model: Decoder, batch: Batch) -> Tensor:
    """Return the summed cross-entropy of a batch and its number of targets, fp64."""
    output = model(batch.tokens_BS, batch.document_ids_BS)
    loss = cross_entropy_sum(model, output.hidden_BSD, batch.targets_BS)
    return torch.stack([loss.double(), (batch.targets_BS != _IGNORED).sum().double()])
