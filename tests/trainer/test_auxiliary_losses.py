"""What reaches the router through the training step, on one rank and on several: cases from public bug reports."""

import gc
from types import SimpleNamespace

import pytest
import torch
from coterie_parallel import DENSE, AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from coterie_routing import Router, RouterConfig
from coterie_trainer.config import TrainConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.model import ModelOutput
from coterie_trainer.step import Stepper, StepResult
from support.ranks import run_ranks
from torch import Tensor, nn

WIDTH, VOCABULARY = 6, 12


class TwoRouters(nn.Module):
    """Tokens, two routers side by side, and a head: no mixing over positions, so sequences may be cut anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = SimpleNamespace(num_layers=2, num_dense_layers=0, num_experts=4, top_k=2, vocab_size=2)
        generator = torch.Generator().manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.routers = nn.ModuleList([Router(RouterConfig(d_model=WIDTH, num_experts=4, top_k=2)) for _ in range(2)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens_BS: Tensor, document_ids_BS: Tensor, num_documents: None = None) -> ModelOutput:
        hidden_BSD = self.embed(tokens_BS)
        is_real_T = document_ids_BS.flatten() >= 0
        routings = [router(hidden_BSD.flatten(0, 1), is_real_T) for router in self.routers]
        weight_BS1 = routings[0].weights_TK[:, :1].reshape(*tokens_BS.shape, 1)
        return ModelOutput(hidden_BSD * (1 + weight_BS1), routings)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed.weight.T


def batch_of(tokens: list[int], *, is_real: list[bool] | None = None, has_target: bool = True) -> Batch:
    tokens_BS = torch.tensor([tokens])
    real_BS = torch.ones_like(tokens_BS, dtype=torch.bool) if is_real is None else torch.tensor([is_real])
    return Batch(
        tokens_BS=tokens_BS,
        targets_BS=torch.where(real_BS & has_target, (tokens_BS + 1) % VOCABULARY, -1),
        document_ids_BS=torch.where(real_BS, 0, -1).to(torch.int32),
    )


def run(mesh: Mesh, steps: list[list[Batch]], **options: object) -> tuple[list[StepResult], dict[str, Tensor], Stepper]:
    """Run steps at learning rate 0, so that each sees the same weights; return this rank's gradients of the last."""
    model = TwoRouters()
    placements = {name: DENSE for name, _ in model.named_parameters()}
    optimizer = Optimizer(model.named_parameters(), placements, mesh, AdamWConfig(gradient_clip=None))
    train = TrainConfig(steps=1, sequences_per_step=1, sequences_per_micro_batch=1, **options)
    stepper = Stepper(model, optimizer, mesh, train)
    results = [stepper.run(batches, learning_rate=0.0) for batches in steps]
    return results, {name: parameter.grad for name, parameter in model.named_parameters()}, stepper


def one_rank() -> Mesh:
    return Mesh(make_plan(ParallelConfig(data=1), 1), 0, timeout_s=30.0)


def run_on_rank(rank: int, world: int, steps: list[list[list[Batch]]], options: dict[str, object]) -> object:
    with Mesh(make_plan(ParallelConfig(data=world), world), rank, timeout_s=30.0) as mesh:
        results, gradients, _ = run(mesh, [by_rank[rank] for by_rank in steps], **options)
        return results, gradients


TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 1, 1, 2]
BALANCE_ALONE = dict(balance_coefficient=1.0, z_coefficient=0.0)


@pytest.mark.parametrize("scope", ["data_parallel", "step"])
@pytest.mark.parametrize("loss", ["dot_product", "squared_load"])
def test_r5_r6_with_the_main_loss_off_the_router_gradient_is_that_of_one_rank(scope: str, loss: str) -> None:
    options = dict(balance_scope=scope, balance_loss=loss, **BALANCE_ALONE)
    whole = [[batch_of(TOKENS, has_target=False)]] * 2
    results, expected, _ = run(one_rank(), whole, **options)
    assert results[1].loss == 0.0
    for name in ("routers.0.weight", "routers.1.weight"):
        assert float(expected[name].abs().max()) > 1e-4, name
    for world in (2, 4):
        size = len(TOKENS) // world
        by_rank = [[batch_of(TOKENS[r * size : (r + 1) * size], has_target=False)] for r in range(world)]
        outcomes = run_ranks(run_on_rank, world, [by_rank] * 2, options)
        for found, _ in outcomes:
            assert found[1].balance_loss == pytest.approx(results[1].balance_loss, rel=1e-6)
            assert found[1].gradient_norm == pytest.approx(results[1].gradient_norm, rel=1e-6)
        for name, gradient in expected.items():
            summed = sum(gradients[name] for _, gradients in outcomes)
            torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_r9_a_sequence_cut_over_two_ranks_with_10_valid_tokens_equals_the_uncut_one() -> None:
    is_real = [True] * 7 + [False] + [True] * 3 + [False] * 5
    options = dict(balance_coefficient=0.5, z_coefficient=0.1)
    results, expected, _ = run(one_rank(), [[batch_of(TOKENS, is_real=is_real)]] * 2, **options)
    assert results[1].num_tokens == 10
    assert all(float(gradient.abs().max()) > 1e-3 for gradient in expected.values())
    by_rank = [[batch_of(TOKENS[:8], is_real=is_real[:8])], [batch_of(TOKENS[8:], is_real=is_real[8:])]]
    outcomes = run_ranks(run_on_rank, 2, [by_rank] * 2, options)
    for found, _ in outcomes:
        for name in ("loss", "balance_loss", "z_loss", "gradient_norm"):
            assert getattr(found[1], name) == pytest.approx(getattr(results[1], name), rel=1e-6), name
    for name, gradient in expected.items():
        summed = sum(gradients[name] for _, gradients in outcomes)
        torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "data_parallel", "step"])
def test_r21_r22_each_part_of_the_objective_counts_once_by_its_coefficient(scope: str) -> None:
    def gradients(has_target: bool, balance: float, z: float) -> dict[str, Tensor]:
        steps = [[batch_of(TOKENS[:8], has_target=has_target), batch_of(TOKENS[8:], has_target=has_target)]] * 2
        options = dict(balance_coefficient=balance, z_coefficient=z, balance_scope=scope)
        results, found, _ = run(one_rank(), steps, **options)
        assert results[1].balance_loss > 1e-3, "both parts are shown before their coefficient, whatever that is"
        assert results[1].z_loss > 1e-3
        return found

    main, balance, z = gradients(True, 0.0, 0.0), gradients(False, 1.0, 0.0), gradients(False, 0.0, 1.0)
    together = gradients(True, 0.5, 0.25)
    for name, gradient in together.items():
        expected = main[name] + 0.5 * balance[name] + 0.25 * z[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert float(balance["routers.1.weight"].abs().max()) > 1e-4
    assert float(z["routers.1.weight"].abs().max()) > 1e-4
    assert float(main["routers.1.weight"].abs().max()) == 0.0, "the second router feeds no output"


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("scope", ["sequence", "data_parallel", "step"])
def test_r28_nothing_is_left_of_a_step_but_its_load(scope: str) -> None:
    step = [batch_of(TOKENS * 4)]
    _, _, stepper = run(one_rank(), [step] * 20, balance_scope=scope)
    at_20 = live_tensors()
    for _ in range(180):
        stepper.run(step, learning_rate=1e-3)
    assert live_tensors() == at_20
    assert not stepper.load_LE.requires_grad
