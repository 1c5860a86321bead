"""One optimizer step and one evaluation: what is summed over tokens, micro-batches and ranks, and divided once."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from coterie_parallel import Mesh, Optimizer, all_reduce_sum
from coterie_routing import (
    LoadSums,
    Routing,
    balance_loss,
    load_imbalance,
    pack,
    scoped_balance_term,
    unpack,
    z_loss,
    z_term,
)
from torch import Tensor

from coterie_trainer.config import TrainConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.model import Decoder

__all__ = ["StepResult", "Stepper", "cross_entropy_sum", "evaluate"]

_IGNORED = -1
_BATCHES_BETWEEN_STOPS = 8


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Numbers of one optimizer step, equal on all ranks.

    Attributes:
        loss: cross-entropy in nats per target token of the whole step.
        balance_loss: mean over MoE layers of E/k * sum_i f_i P_i over the whole step; 1.0 is even.
        z_loss: mean over MoE layers of the mean squared log-sum-exp of the router logits.
        load_imbalance: largest load over mean load, of the worst layer; 1.0 is even.
        gradient_norm: L2 norm of the whole gradient before clipping.
        num_tokens: real tokens of the step.
        stop_requested: whether any rank was asked to stop.
    """

    loss: float
    balance_loss: float
    z_loss: float
    load_imbalance: float
    gradient_norm: float
    num_tokens: int
    stop_requested: bool


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
    """

    def __init__(self, model: Decoder, optimizer: Optimizer, mesh: Mesh, config: TrainConfig) -> None:
        self.model, self.optimizer, self.mesh, self.config = model, optimizer, mesh, config
        spec = model.spec
        self.device = model.embed.weight.device
        num_moe_layers = spec.num_layers - spec.num_dense_layers
        self.load_LE = torch.zeros(num_moe_layers, spec.num_experts, dtype=torch.int64, device=self.device)

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

        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        layer_sums: list[LoadSums] | None = None
        for batch in batches:
            output = self.model(batch.tokens_BS, batch.document_ids_BS)
            batch_loss = cross_entropy_sum(self.model, output.hidden_BSD, batch.targets_BS)
            auxiliary = self._auxiliary(output.routings, step_tokens, num_sequences=len(batch.tokens_BS))
            objective = batch_loss / step_targets + auxiliary
            torch.autograd.backward(objective)
            loss_sum += batch_loss.detach()
            seen = [routing.sums.detach() for routing in output.routings]
            layer_sums = seen if layer_sums is None else [a + b for a, b in zip(layer_sums, seen, strict=True)]
        assert layer_sums is not None, "a step needs at least one micro-batch"

        gradient_norm = self.optimizer.step(learning_rate)
        return self._result(loss_sum, layer_sums, totals, gradient_norm, stop_requested)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.device)

    def _auxiliary(self, routings: list[Routing], step_tokens: Tensor, *, num_sequences: int) -> Tensor:
        """Return this micro-batch's share of the balance and z losses, summed over layers."""
        config, spec = self.config, self.model.spec
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for layer, routing in enumerate(routings):
            balance = scoped_balance_term(
                config.balance_scope,
                routing,
                top_k=spec.top_k,
                step_tokens=step_tokens,
                num_sequences=num_sequences,
                load_fraction_E=self.load_LE[layer],
            )
            z = z_term(routing.sums, step_tokens)
            total = total + config.balance_coefficient * balance + config.z_coefficient * z
        return total

    def _result(
        self, loss_sum: Tensor, layer_sums: list[LoadSums], totals: Tensor, gradient_norm: Tensor, stop: bool
    ) -> StepResult:
        """Sum what every rank saw in one collective, and read it in one copy to the host."""
        own = torch.stack([loss_sum, torch.full_like(loss_sum, float(stop))])
        packed = all_reduce_sum(torch.cat([own, pack(layer_sums)]), self.mesh.axis("data"))
        layer_sums = unpack(packed[own.numel() :], layer_sums)
        self.load_LE = torch.stack([sums.counts_E for sums in layer_sums])
        layers = [
            torch.stack([balance_loss(sums, top_k=self.model.spec.top_k), z_loss(sums), load_imbalance(sums.counts_E)])
            for sums in layer_sums
        ]
        balance_L, z_L, imbalance_L = torch.stack(layers).unbind(1)
        of_layers = torch.stack([balance_L.mean(), z_L.mean(), imbalance_L.max(), gradient_norm.double()])
        numbers = torch.cat([packed[: own.numel()], totals.double(), of_layers]).tolist()
        loss, stops, num_targets, num_tokens, balance, z, imbalance, norm = numbers
        return StepResult(
            loss=loss / max(1.0, num_targets),
            balance_loss=balance,
            z_loss=z,
            load_imbalance=imbalance,
            gradient_norm=norm,
            num_tokens=int(num_tokens),
            stop_requested=stops > 0,
        )


def cross_entropy_sum(model: Decoder, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the sum of the cross-entropy in nats over positions that have a target (``targets_BS`` not -1)."""
    logits = model.logits(hidden_BSD).flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BS.flatten(), ignore_index=_IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(
    model: Decoder, batches: Iterable[Batch], mesh: Mesh, stop_requested: Callable[[], bool] = lambda: False
) -> float | None:
    """Return the mean cross-entropy in nats per target token over all ranks' batches, None if it was cut short.

    Every rank must bring the same number of batches, padded with empty ones: the experts of a rank serve all ranks.
    Every few batches the ranks agree whether ``stop_requested`` is true on any of them.
    """
    device = model.embed.weight.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for number, batch in enumerate(batches):
        if number % _BATCHES_BETWEEN_STOPS == 0:
            stop = torch.tensor(float(stop_requested()), device=device)
            if float(all_reduce_sum(stop, mesh.axis("data"))) > 0:
                return None
        batch = batch.to(device)
        output = model(batch.tokens_BS, batch.document_ids_BS)
        sums[0] += cross_entropy_sum(model, output.hidden_BSD, batch.targets_BS)
        sums[1] += (batch.targets_BS != _IGNORED).sum()
    loss_sum, num_targets = all_reduce_sum(sums, mesh.axis("data")).tolist()
    return loss_sum / num_targets if num_targets else math.nan
