import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from coterie_parallel import DENSE, AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from coterie_routing import RouterConfig, route
from coterie_trainer.config import TrainConfig
from coterie_trainer.data.dataset import Batch, TrainBatches, open_split
from coterie_trainer.initialization import initialize
from coterie_trainer.model import ModelOutput, build_model, placements
from coterie_trainer.step import Stepper, StepResult, evaluate
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.specs import SPECS
from trainer.tiny import write_tokens


class TableModel(nn.Module):
    """Two tokens with known losses: target 0 costs 1.0 nat after token 0, and 3.0 nats after token 1."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = SimpleNamespace(num_layers=1, num_dense_layers=0, num_experts=2, top_k=2)
        self.embed = nn.Embedding(2, 2)
        self.embed.weight.data = torch.tensor([[0.0, math.log(math.e - 1)], [0.0, math.log(math.e**3 - 1)]])

    def forward(self, tokens_BS: Tensor, document_ids_BS: Tensor) -> ModelOutput:
        config = RouterConfig(d_model=2, num_experts=2, top_k=2)
        even = route(torch.zeros(tokens_BS.numel(), 2), config, is_real_T=document_ids_BS.flatten() >= 0)
        return ModelOutput(self.embed(tokens_BS), [even])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def _table_stepper(mesh: Mesh) -> Stepper:
    model = TableModel()
    optimizer = Optimizer(model.named_parameters(), {"embed.weight": DENSE}, mesh, AdamWConfig())
    train = TrainConfig(steps=1, sequences_per_step=2, sequences_per_micro_batch=1)
    return Stepper(model, optimizer, mesh, train)


def _table_batch(token: int, num_targets: int) -> Batch:
    targets = torch.full((1, 8), -1)
    targets[0, :num_targets] = 0
    return Batch(
        tokens_BS=torch.full((1, 8), token), targets_BS=targets, document_ids_BS=torch.zeros(1, 8, dtype=torch.int32)
    )


def _single() -> Mesh:
    return Mesh(make_plan(ParallelConfig(data=1), 1), 0, timeout_s=30.0)


def test_micro_batches_of_6_and_2_targets_weigh_by_targets() -> None:
    # Mean losses 1.0 and 3.0: (6 * 1.0 + 2 * 3.0) / 8 = 1.5; the mean of the two means would be 2.0.
    stepper = _table_stepper(_single())
    result = stepper.run([_table_batch(0, 6), _table_batch(1, 2)], learning_rate=0.0)
    assert result.loss == pytest.approx(1.5, rel=1e-6)
    assert result.num_tokens == 16


def _loss_of_rank_batches(rank: int, world: int, targets: list[int]) -> tuple[StepResult, Tensor]:
    with Mesh(make_plan(ParallelConfig(data=world), world), rank, timeout_s=30.0) as mesh:
        stepper = _table_stepper(mesh)
        result = stepper.run([_table_batch(rank, targets[rank])], learning_rate=0.0, stop_requested=rank == 1)
        return result, stepper.model.embed.weight.grad


def test_ranks_of_6_and_2_targets_weigh_by_targets() -> None:
    whole = _table_stepper(_single())
    whole.run([_table_batch(0, 6), _table_batch(1, 2)], learning_rate=0.0)
    outcomes = run_ranks(_loss_of_rank_batches, 2, [6, 2])
    for result, _ in outcomes:
        assert result.loss == pytest.approx(1.5, rel=1e-6)
        assert result.stop_requested
    summed = sum(gradient for _, gradient in outcomes)
    torch.testing.assert_close(summed, whole.model.embed.weight.grad, rtol=1e-6, atol=0.0)


def test_a_rank_with_only_ignored_labels_counts_for_nothing() -> None:
    (result, own), (other_result, ignored) = run_ranks(_loss_of_rank_batches, 2, [6, 0])
    assert result.loss == pytest.approx(1.0, rel=1e-6)
    assert other_result.loss == result.loss
    assert result.gradient_norm == pytest.approx(float(own.norm()), rel=1e-6)
    assert float(ignored.abs().max()) == 0.0


def test_a_step_without_any_target_is_zero_and_finite() -> None:
    stepper = _table_stepper(_single())
    result = stepper.run([_table_batch(0, 0)], learning_rate=0.1)
    assert (result.loss, result.gradient_norm) == (0.0, 0.0)
    assert stepper.model.embed.weight.isfinite().all()


def _run_split(tokens: Path, micro: int, scope: str, steps: int = 3) -> tuple[list[StepResult], dict[str, Tensor]]:
    spec = SPECS["shared_expert"]
    mesh = _single()
    model = build_model(spec)
    initialize(model, seed=0, std=0.1)
    train = TrainConfig(
        steps=steps,
        sequences_per_step=8,
        sequences_per_micro_batch=micro,
        balance_coefficient=0.5,
        balance_scope=scope,
        z_coefficient=0.1,
    )
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig())
    stepper = Stepper(model, optimizer, mesh, train)
    batches = TrainBatches(
        open_split(tokens, "train"), 16, sequences_per_step=8, sequences_per_micro_batch=micro,
        data_index=0, data_size=1, seed=5,
    )  # fmt: skip
    results = [stepper.run(batches.step(step), learning_rate=1e-3) for step in range(steps)]
    return results, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scope", ["step", "sequence"])
def test_accumulation_changes_no_number(tmp_path: Path, scope: str) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    expected, gradients = _run_split(tokens, 8, scope)
    assert expected[0].balance_loss != pytest.approx(1.0, abs=1e-3)
    for micro in (4, 1):
        results, others = _run_split(tokens, micro, scope)
        for a, b in zip(expected, results, strict=True):
            for name in ("loss", "balance_loss", "z_loss", "load_imbalance", "gradient_norm"):
                assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-5), name
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            assert float((others[name] - gradient).abs().max()) <= 1e-5 * scale, name


def test_evaluation_weighs_by_targets_and_changes_nothing() -> None:
    model = TableModel()
    before = model.embed.weight.detach().clone()
    assert evaluate(model, [_table_batch(0, 6), _table_batch(1, 2)], _single()) == pytest.approx(1.5, rel=1e-6)
    assert torch.equal(model.embed.weight, before)
    assert model.embed.weight.grad is None
    assert evaluate(model, [_table_batch(0, 6)] * 20, _single(), iter([False, True]).__next__) is None
