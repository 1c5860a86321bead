"""The stages of a pipeline as the trainer runs them: losses of all layers, in training and in evaluation."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from coterie_parallel import SCHEDULES, Mesh, Pipeline, Stage, Stages, WeightGradients
from coterie_routing import Routing
from torch import Tensor, nn

from coterie_trainer.data.dataset import Batch
from coterie_trainer.model import Decoder, MoE

__all__ = ["StageRunner"]

Loss = Callable[[Tensor, Tensor], Tensor]
Auxiliary = Callable[[Iterable[int], Sequence[Routing], int], Tensor | None]


class StageRunner:
    """Runs micro-batches through all stages of a pipeline; every rank of the pipeline axis calls alike.

    Args:
        model: the decoder with the stages of this rank.
        stages: of the whole model.
        mesh: the named axes of ranks.

    Attributes:
        layers: numbers of the layers of this rank.
    """

    def __init__(self, model: Decoder, stages: Stages, mesh: Mesh) -> None:
        self._model, self._stages, self._mesh = model, stages, mesh
        self._local = stages.on_rank(mesh.axis("pipeline").index)
        self.layers = [layer for stage in self._local for layer in stage.layers]
        self._weights = WeightGradients() if SCHEDULES[stages.schedule].defers_weights else None
        if self._weights is not None:
            self._weights.of_linear_layers(model)
            for module in model.modules():
                # What lies in the buffers of a dispatcher does not last until a gradient is computed from it.
                if isinstance(module, MoE) and not module.dispatcher.reuses_buffers:
                    module.experts.defer_weight_gradients = self._weights.put
        self._pipelines: dict[tuple[int, torch.Size], Pipeline] = {}
        self._loss: Loss | None = None
        self._auxiliary: Auxiliary | None = None

    def train(
        self,
        batches: Sequence[Batch],
        loss: Loss,
        auxiliary: Auxiliary,
        *,
        around_last: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Accumulate the gradients of all micro-batches.

        Args:
            batches: micro-batches, the same on all ranks of the pipeline axis, all of one shape.
            loss: called with last hidden states and targets where the last stage is; returns a share of the loss.
            auxiliary: called with the layers of a stage, the routings of its MoE layers and the number of sequences;
                returns what these layers add to the loss, or None for nothing.
            around_last: entered around the last backward of this rank, see `coterie_parallel.Pipeline.run`.
        """
        self._loss, self._auxiliary = loss, auxiliary
        try:
            self._run(batches, around_last_backward=around_last)
        finally:
            self._loss = self._auxiliary = None

    def evaluate(self, batches: Sequence[Batch], loss: Loss) -> None:
        """Run the forward of all micro-batches; ``loss`` is called as in `train`."""
        self._loss = loss
        try:
            self._run(batches)
        finally:
            self._loss = None

    def run_stage(self, stage: Stage, x: Tensor, document_ids_BS: Tensor, num_documents: Tensor) -> Tensor:
        """Return what one stage makes of one micro-batch, with the gradient of its own part of the loss tied to it."""
        counted = int(num_documents)  # on the host
        output = self._model.run_stage(stage, x, document_ids_BS, counted if counted > 0 else None)
        extra = None
        if self._auxiliary is not None:
            extra = self._auxiliary(stage.layers, output.routings, len(document_ids_BS))
        if extra is None:
            return output.hidden_BSD
        tied: Tensor = _WithLoss.apply(output.hidden_BSD, extra)
        return tied

    def _run(self, batches: Sequence[Batch], **how: Any) -> None:
        self._pipeline(batches).run(
            [batch.tokens_BS for batch in batches],
            [batch.targets_BS for batch in batches],
            document_ids_BS=[batch.document_ids_BS for batch in batches],
            num_documents=[torch.tensor([batch.num_documents or 0]) for batch in batches],
            **how,
        )

    def _pipeline(self, batches: Sequence[Batch]) -> Pipeline:
        tokens_BS = batches[0].tokens_BS
        key = len(batches), tokens_BS.shape
        if key not in self._pipelines:
            weight = next(self._model.parameters())
            self._pipelines[key] = Pipeline(
                self._stages,
                {stage.index: _StageModule(self, stage) for stage in self._local},
                self._mesh,
                num_micro_batches=len(batches),
                input_like=tokens_BS,
                hidden_like=torch.empty(*tokens_BS.shape, self._model.spec.d_model, dtype=weight.dtype, device="meta"),
                loss=self._loss_of,
                weights=self._weights,
            )
        return self._pipelines[key]

    def _loss_of(self, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(hidden_BSD, targets_BS)


class _StageModule(nn.Module):
    """One stage in the form that a schedule wants; its parameters belong to the model."""

    def __init__(self, runner: StageRunner, stage: Stage) -> None:
        super().__init__()
        self._runner, self._stage = runner, stage

    def forward(self, x: Tensor, document_ids_BS: Tensor, num_documents: Tensor) -> Tensor:
        return self._runner.run_stage(self._stage, x, document_ids_BS, num_documents)


class _WithLoss(torch.autograd.Function):
    """Returns a tensor as it is; its backward also starts that of a loss that ends in this stage, with gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.loss)
