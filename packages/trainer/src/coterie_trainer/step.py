"""One optimizer step and one evaluation: what is summed over tokens, micro-batches and ranks, and divided once."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from coterie_parallel import Mesh, Stages, all_reduce_sum
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
from coterie_trainer.cross_entropy import cross_entropy_sum
from coterie_trainer.data.dataset import Batch
from coterie_trainer.model import Decoder, dispatchers
from coterie_trainer.pipeline import StageRunner

__all__ = ["PendingResult", "StepOptimizer", "StepResult", "Stepper", "evaluate"]


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


class PendingResult:
    """The numbers of a step on their way to the host, which need not wait for them.

    Args:
        numbers: fp64, on the device: summed loss, number of stop requests, target tokens, real tokens, and what
            `StepResult` names balance_loss, z_loss, load_imbalance, gradient_norm and bad_router_rows.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._numbers = numbers

    def read(self) -> StepResult:
        """Return the numbers; waits until the step has ended on the device."""
        if self._event is not None:
            self._event.synchronize()
        loss, stops, num_targets, num_tokens, balance, z, imbalance, norm, bad_router_rows = self._numbers.tolist()
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


class _StepSums:
    """Sums over the micro-batches of one rank.

    Attributes:
        loss: fp64 scalar; zero on a rank without the last stage of a pipeline.
        layers: the load by MoE layer of the whole model; that of no tokens for a layer of another rank.
        required: what the quantile rule needs, by MoE layer of this rank.
    """

    def __init__(self, num_moe_layers: int, num_experts: int, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.layers = [LoadSums.zero(num_experts, device) for _ in range(num_moe_layers)]
        self.required: dict[int, RequiredBias] = {}

    def add_load(self, rows: Sequence[int], routings: Sequence[Routing]) -> None:
        """Add the load of one micro-batch in the MoE layers ``rows``."""
        for row, routing in zip(rows, routings, strict=True):
            self.layers[row] = self.layers[row] + routing.sums.detach()

    def add_required(self, row: int, required: RequiredBias) -> None:
        """Add what the tokens of one micro-batch asked of the bias of the MoE layer ``row``."""
        self.required[row] = self.required[row] + required if row in self.required else required


class Stepper:
    """Runs optimizer steps; holds the one thing that a step hands to the next: the load of the whole step.

    Args:
        model: the decoder of this rank.
        optimizer: sums gradients over ranks, clips them and updates the parameters.
        mesh: the named axes of ranks.
        config: loss coefficients and the scope of the balance loss.
        stages: all of a pipeline; None for none.

    Attributes:
        load_LE: int64, expert counts of the previous step by MoE layer, over all ranks and micro-batches; zero before
            the first step. The balance loss of scope "step" prices the probabilities of this step with it, so its
            gradient does not depend on how the step is split into ranks and micro-batches.
        routers: those of this rank, by their row in ``load_LE``.
        capacity: runs the gradients of a step again when rows found no room, and counts the load of the buffers.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: StepOptimizer,
        mesh: Mesh,
        config: TrainConfig,
        stages: Stages | None = None,
    ) -> None:
        self.model, self.optimizer, self.mesh, self.config = model, optimizer, mesh, config
        self.device = mesh.device
        self.runner = None if stages is None else StageRunner(model, stages, mesh)
        layers = range(model.spec.num_layers) if self.runner is None else self.runner.layers
        routers = (module for module in model.modules() if isinstance(module, Router))
        self.routers = dict(zip(self._rows(layers), routers, strict=False))
        self.bias_rule = bias_rule(config)
        num_moe_layers = model.spec.num_layers - model.spec.num_dense_layers
        self.load_LE = torch.zeros(num_moe_layers, model.spec.num_experts, dtype=torch.int64, device=self.device)
        self.capacity = CapacityWatch(dispatchers(model), mesh, self.device)

    def run(self, batches: Sequence[Batch], *, learning_rate: float, stop_requested: bool = False) -> StepResult:
        """Make a step and wait for its numbers; the arguments are those of `start`."""
        return self.start(batches, learning_rate=learning_rate, stop_requested=stop_requested).read()

    def start(self, batches: Sequence[Batch], *, learning_rate: float, stop_requested: bool = False) -> PendingResult:
        """Accumulate the gradient over this rank's micro-batches, reduce it, and update the parameters.

        The host waits for a GPU only where the dispatcher says so.

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

    def _accumulate(self, batches: Sequence[Batch], step_targets: Tensor, step_tokens: Tensor) -> _StepSums:
        """Compute the gradient of all micro-batches from nothing; changes nothing but the gradients."""
        assert batches, "a step needs at least one micro-batch"
        self.optimizer.zero_grad()
        sums = _StepSums(len(self.load_LE), self.model.spec.num_experts, self.device)

        def share_of_loss(hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
            batch_loss = cross_entropy_sum(self.model, hidden_BSD, targets_BS)
            sums.loss += batch_loss.detach()
            return batch_loss / step_targets

        def auxiliary(layers: Iterable[int], routings: Sequence[Routing], num_sequences: int) -> Tensor | None:
            rows = self._rows(layers)
            sums.add_load(rows, routings)
            if self.bias_rule is not None and self.bias_rule.kind == "quantile":
                for row, routing in zip(rows, routings, strict=True):
                    sums.add_required(row, required_bias(routing, _bias(self.routers[row])))
            return self._auxiliary(rows, routings, step_tokens, num_sequences=num_sequences) if rows else None

        if self.runner is not None:
            self.runner.train(
                batches, share_of_loss, auxiliary, around_last=lambda: self.optimizer.micro_batch(is_last=True)
            )
            return sums
        for number, batch in enumerate(batches, start=1):
            output = self.model(batch.tokens_BS, batch.document_ids_BS, batch.num_documents)
            objective = share_of_loss(output.hidden_BSD, batch.targets_BS)
            extra = auxiliary(range(self.model.spec.num_layers), output.routings, len(batch.tokens_BS))
            with self.optimizer.micro_batch(is_last=number == len(batches)):
                torch.autograd.backward(objective if extra is None else objective + extra)
        return sums

    def _rows(self, layers: Iterable[int]) -> list[int]:
        """Return which rows of ``load_LE`` the MoE layers among these have."""
        num_dense = self.model.spec.num_dense_layers
        return [layer - num_dense for layer in layers if layer >= num_dense]

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.device)

    def _auxiliary(
        self, rows: Sequence[int], routings: Sequence[Routing], step_tokens: Tensor, *, num_sequences: int
    ) -> Tensor:
        """Return this micro-batch's share of the balance and z losses, summed over the MoE layers ``rows``."""
        config = self.config
        balance_L = balance_terms(
            routings,
            loss=config.balance_loss,
            scope=config.balance_scope,
            top_k=self.model.spec.top_k,
            step_tokens=step_tokens,
            num_sequences=num_sequences,
            load_LE=self.load_LE[rows[0] : rows[-1] + 1],
            sum_over_ranks=lambda counts: all_reduce_sum(counts, self.mesh.axis("data")),
        )
        z_L = torch.stack([z_term(routing.sums, step_tokens) for routing in routings])
        return config.balance_coefficient * balance_L.sum() + config.z_coefficient * z_L.sum()

    @torch.no_grad()
    def _train_selection_bias(self, required: Mapping[int, RequiredBias]) -> None:
        """Replace the selection bias of every layer by what the rule makes of the load of the whole step."""
        rule, rows = self.bias_rule, list(self.routers)
        if rule is None or not rows:
            return
        biases_LE = torch.stack([_bias(router) for router in self.routers.values()])
        if not required:
            next_LE = updated_bias(biases_LE, torch.stack([self.load_LE[row] for row in rows]), rule)
        else:
            counts_LEB = all_reduce_sum(torch.stack([required[row].counts_EB for row in rows]), self.mesh.axis("data"))
            next_LE = torch.stack(
                [
                    quantile_bias(
                        bias_E, replace(required[row], counts_EB=counts_EB), rule, top_k=self.model.spec.top_k
                    )
                    for row, bias_E, counts_EB in zip(rows, biases_LE, counts_LEB, strict=True)
                ]
            )
        for router, next_E in zip(self.routers.values(), next_LE, strict=True):
            _bias(router).copy_(next_E)

    def _result(
        self, loss_sum: Tensor, layer_sums: list[LoadSums], totals: Tensor, gradient_norm: Tensor, stop: bool
    ) -> PendingResult:
        """Sum what every rank saw in one collective."""
        own = torch.stack([loss_sum, torch.full_like(loss_sum, float(stop))])
        packed = all_reduce_sum(torch.cat([own, pack(layer_sums)]), self.mesh.axis("world"))
        layer_sums = unpack(packed[own.numel() :], layer_sums)
        self.load_LE = torch.stack([sums.counts_E for sums in layer_sums])
        balance_L = torch.stack([self._balance(sums) for sums in layer_sums])
        z_L = torch.stack([z_loss(sums) for sums in layer_sums])
        imbalance_L = torch.stack([load_imbalance(sums.counts_E) for sums in layer_sums])
        bad_rows = torch.stack([sums.num_bad for sums in layer_sums]).sum().double()
        of_layers = torch.stack([balance_L.mean(), z_L.mean(), imbalance_L.max(), gradient_norm.double(), bad_rows])
        return PendingResult(torch.cat([packed[: own.numel()], totals.double(), of_layers]))

    def _balance(self, sums: LoadSums) -> Tensor:
        if self.config.balance_loss == "squared_load":
            return squared_load_loss(sums.counts_E)
        return balance_loss(sums, top_k=self.model.spec.top_k)


def _bias(router: Router) -> Tensor:
    assert router.selection_bias is not None, "config_problems lets no rule pass without a bias"
    return router.selection_bias


@torch.no_grad()
def evaluate(
    model: Decoder,
    batches: Iterable[Batch],
    mesh: Mesh,
    stop_requested: Callable[[], bool] = lambda: False,
    capacity: CapacityWatch | None = None,
    runner: StageRunner | None = None,
    num_micro_batches: int = 1,
) -> float | None:
    """Return the mean cross-entropy in nats per target token over all ranks' batches, None if it was cut short.

    Every rank must bring the same number of batches, padded with empty ones: the experts of a rank serve all ranks.
    Every few batches the ranks agree whether ``stop_requested`` is true on any of them. Batches whose rows found no
    room are run again; ``capacity`` counts that, where it is given. In a pipeline, whose stages ``runner`` has,
    ``num_micro_batches`` flow through together.
    """
    device = mesh.device
    capacity = CapacityWatch(dispatchers(model), mesh, device) if capacity is None else capacity
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    seen, seen_at_stop = 0, -_BATCHES_BETWEEN_STOPS
    for group in _groups(batches, 1 if runner is None else num_micro_batches):
        if seen - seen_at_stop >= _BATCHES_BETWEEN_STOPS:
            seen_at_stop = seen
            stop = torch.tensor(float(stop_requested()), device=device)
            if float(all_reduce_sum(stop, mesh.axis("world"))) > 0:
                return None
        seen += len(group)
        sums += capacity.fit(partial(_loss_and_targets, model, [batch.to(device) for batch in group], runner))
    loss_sum, num_targets = all_reduce_sum(sums, mesh.axis("world")).tolist()
    return loss_sum / num_targets if num_targets else math.nan


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield ``size`` batches at a time, the last ones filled up with nothing but padding."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group + [group[0].padding()] * (size - len(group))


def _loss_and_targets(model: Decoder, batches: Sequence[Batch], runner: StageRunner | None) -> Tensor:
    """Return the summed cross-entropy of some batches and their number of targets, fp64; zeros on earlier stages."""
    sums = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens_BS.device)

    def add(hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        loss = cross_entropy_sum(model, hidden_BSD, targets_BS)
        sums.add_(torch.stack([loss.double(), (targets_BS != _IGNORED).sum().double()]))
        return loss

    if runner is not None:
        runner.evaluate(batches, add)
        return sums
    for batch in batches:
        add(model(batch.tokens_BS, batch.document_ids_BS, batch.num_documents).hidden_BSD, batch.targets_BS)
    return sums
