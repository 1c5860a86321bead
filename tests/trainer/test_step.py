import math
from collections.abc import Iterator
from contextlib import contextmanager
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
        self.spec = SimpleNamespace(num_layers=1, num_dense_layers=0, num_experts=2, top_k=2, vocab_size=2)
        self.embed = nn.Embedding(2, 2)
        self.embed.weight.data = torch.tensor([[0.0, math.log(math.e - 1)], [0.0, math.log(math.e**3 - 1)]])

    def forward(self, tokens_BS: Tensor, document_ids_BS: Tensor, num_documents: None = None) -> ModelOutput:
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


def _run_split(
    tokens: Path, micro: int, *, steps: int = 3, mesh: Mesh | None = None, **options: object
) -> tuple[list[StepResult], dict[str, Tensor], list[Tensor]]:
    """Return the results of some steps of 8 sequences, the last gradients and the selection biases."""
    spec = SPECS["shared_expert"]
    mesh = _single() if mesh is None else mesh
    model = build_model(spec)
    initialize(model, seed=0, std=0.1)
    train = TrainConfig(
        steps=steps,
        sequences_per_step=8,
        sequences_per_micro_batch=micro,
        balance_coefficient=0.5,
        z_coefficient=0.1,
        **options,
    )
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig())
    stepper = Stepper(model, optimizer, mesh, train)
    batches = TrainBatches(
        open_split(tokens, "train"), 16, sequences_per_step=8, sequences_per_micro_batch=micro,
        data_index=mesh.axis("data").index, data_size=mesh.axis("data").size, seed=5,
    )  # fmt: skip
    results = [stepper.run(batches.step(step), learning_rate=1e-3) for step in range(steps)]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return results, gradients, [router.selection_bias for router in stepper.routers.values()]


def _assert_same(expected: list[StepResult], found: list[StepResult]) -> None:
    for a, b in zip(expected, found, strict=True):
        for name in ("loss", "balance_loss", "z_loss", "load_imbalance", "gradient_norm"):
            assert getattr(a, name) > 1e-3, f"{name} of zero would equal anything that is not computed"
            assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-5), name


@pytest.mark.parametrize("loss", ["dot_product", "squared_load"])
@pytest.mark.parametrize("scope", ["step", "sequence"])
def test_accumulation_changes_no_number(tmp_path: Path, scope: str, loss: str) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    options = dict(balance_scope=scope, balance_loss=loss)
    expected, gradients, _ = _run_split(tokens, 8, **options)
    assert expected[0].balance_loss != pytest.approx(1.0, abs=1e-3)
    for micro in (4, 1):
        results, others, _ = _run_split(tokens, micro, **options)
        _assert_same(expected, results)
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            assert scale > 0, name
            assert float((others[name] - gradient).abs().max()) <= 1e-5 * scale, name


def _split_over_ranks(rank: int, world: int, tokens: Path, micro: int, options: dict[str, object]) -> object:
    with Mesh(make_plan(ParallelConfig(data=world), world), rank, timeout_s=30.0) as mesh:
        results, _, biases = _run_split(tokens, micro, mesh=mesh, **options)
        return results, biases


@pytest.mark.parametrize("loss", ["dot_product", "squared_load"])
def test_the_data_parallel_scope_sees_all_ranks(tmp_path: Path, loss: str) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    options = dict(balance_scope="data_parallel", balance_loss=loss)
    expected, _, _ = _run_split(tokens, 8, **options)
    # Two micro-batches of 4 are not those of one rank with 8; one micro-batch on each of two ranks is.
    assert _run_split(tokens, 4, **options)[0][0].gradient_norm != pytest.approx(expected[0].gradient_norm, rel=1e-4)
    for results, _ in run_ranks(_split_over_ranks, 2, tokens, 4, options):
        _assert_same(expected, results)


@pytest.mark.parametrize(("rule", "rate"), [("sign", 0.01), ("proportional", 0.1), ("quantile", 1.0)])
def test_a_bias_rule_gives_the_same_bias_for_any_split(tmp_path: Path, rule: str, rate: float) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    options = dict(bias_rule=rule, bias_rate=rate)
    expected, _, (bias_E,) = _run_split(tokens, 8, **options)
    assert float(bias_E.abs().max()) > 1e-3
    assert float(bias_E.mean()) == pytest.approx(0.0, abs=1e-7)
    for results, biases in [
        _run_split(tokens, 2, **options)[::2],
        *run_ranks(_split_over_ranks, 2, tokens, 2, options),
    ]:
        _assert_same(expected, results)
        torch.testing.assert_close(biases[0], bias_E, rtol=1e-5, atol=1e-7)


def test_rows_with_a_nan_are_counted_and_reported(tmp_path: Path) -> None:
    mesh, spec = _single(), SPECS["shared_expert"]
    model = build_model(spec)
    initialize(model, seed=0, std=0.1)
    with torch.no_grad():
        model.embed.weight[3] = torch.nan
    stepper = Stepper(
        model,
        Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig()),
        mesh,
        TrainConfig(steps=1, sequences_per_step=1, sequences_per_micro_batch=1),
    )
    tokens = torch.tensor([[1, 2, 3, 4]])  # token 3 is bad, and in attention 0 * NaN is NaN for the ones before it too
    batch = Batch(tokens_BS=tokens, targets_BS=tokens, document_ids_BS=torch.zeros(1, 4, dtype=torch.int32))
    result = stepper.run([batch], learning_rate=0.0)
    assert result.bad_router_rows == 4
    assert math.isnan(result.loss)


def test_evaluation_weighs_by_targets_and_changes_nothing() -> None:
    model = TableModel()
    before = model.embed.weight.detach().clone()
    assert evaluate(model, [_table_batch(0, 6), _table_batch(1, 2)], _single()) == pytest.approx(1.5, rel=1e-6)
    assert torch.equal(model.embed.weight, before)
    assert model.embed.weight.grad is None
    assert evaluate(model, [_table_batch(0, 6)] * 20, _single(), iter([False, True]).__next__) is None


def test_the_optimizer_learns_which_micro_batch_is_the_last_and_the_share_of_the_loss() -> None:
    seen: list[object] = []

    class Noted:
        def zero_grad(self) -> None:
            seen.append("zero")

        @contextmanager
        def micro_batch(self, *, is_last: bool) -> Iterator[None]:
            seen.append(is_last)
            yield
            seen.append("done")

        def step(self, learning_rate: float | None = None, *, loss: Tensor | None = None) -> Tensor:
            seen.append((learning_rate, pytest.approx(float(loss), rel=1e-6)))
            return torch.zeros((), dtype=torch.float64)

    train = TrainConfig(steps=1, sequences_per_step=2, sequences_per_micro_batch=1)
    stepper = Stepper(TableModel(), Noted(), _single(), train)
    stepper.run([_table_batch(0, 6), _table_batch(1, 2)], learning_rate=0.5)
    assert seen == ["zero", False, "done", True, "done", (0.5, 1.5)]
