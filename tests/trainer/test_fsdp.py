"""FSDP2 in place of resident weights: the same numbers, the same checkpoints, and what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_parallel import AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan, plan_problems
from coterie_trainer.check_fsdp import FsdpSizes
from coterie_trainer.checkpoint import read_tensors
from coterie_trainer.config import ConfigError, TrainConfig, smallest_world
from coterie_trainer.data.dataset import Batch
from coterie_trainer.fsdp import FsdpOptimizer, shard_model
from coterie_trainer.initialization import initialize
from coterie_trainer.model import build_model, placements
from coterie_trainer.step import Stepper, evaluate
from coterie_trainer.step_watch import StepWatch
from coterie_trainer.training import Run
from support.ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.specs import SPECS
from trainer.tiny import tiny_config, write_tokens

SPEC = dataclasses.replace(SPECS["shared_expert"], num_layers=3, num_experts=6)
"""Six experts are no multiple of four ranks, so that some have more of them than others."""


def _batches(rank: int) -> list[Batch]:
    """Three micro-batches of one rank, with other numbers of targets on each."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(3):
        tokens_BS = torch.randint(64, (2, 12), generator=generator)
        documents_BS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3], dtype=torch.int32)
        targets_BS = tokens_BS.roll(-1, 1)
        targets_BS[0, : 3 * rank + number] = -1
        targets_BS[documents_BS < 0] = -1
        found.append(Batch(tokens_BS=tokens_BS, targets_BS=targets_BS, document_ids_BS=documents_BS))
    return found


SETTINGS = AdamWConfig(
    weight_decays=(("embed.*", 0.0),), learning_rate_factors=(("layers.1.*", 0.5),), gradient_clip=0.8, weight_decay=0.5
)


def _train(
    mesh: Mesh,
    *,
    is_fsdp: bool,
    recompute: tuple[str, ...] = (),
    reduce_each: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the numbers of three steps, an evaluation after them, and every parameter."""
    model = build_model(SPEC, expert_axis=mesh.axis("expert"), dispatcher="all_to_all", recompute=recompute)
    initialize(model, seed=0, std=0.1)
    optimizer: Optimizer | FsdpOptimizer
    if is_fsdp:
        shard_model(model, mesh, dtype=dtype)
        optimizer = FsdpOptimizer(model, mesh, SETTINGS, dtype=dtype, reduce_each=reduce_each)
    else:
        optimizer = Optimizer(model.named_parameters(), placements(model), mesh, SETTINGS)
    train = TrainConfig(
        steps=3, sequences_per_step=6, sequences_per_micro_batch=2, balance_coefficient=0.5, z_coefficient=0.1,
        bias_rule="sign", bias_rate=0.01,
    )  # fmt: skip
    stepper = Stepper(model, optimizer, mesh, train)
    batches = _batches(mesh.axis("data").index)
    names = ("loss", "balance_loss", "z_loss", "gradient_norm")
    found = {}
    for step in range(3):
        result = stepper.run(batches, learning_rate=1e-2)
        found.update({f"{step}/{name}": torch.tensor(getattr(result, name)) for name in names})
    found["evaluation"] = torch.tensor(evaluate(model, batches, mesh))
    for name, tensor in model.state_dict().items():
        found[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return found


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference by name, relative to the largest value."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max())
        for name, tensor in expected.items()
    }


def _mesh(rank: int, world: int) -> Mesh:
    return Mesh(make_plan(ParallelConfig(data=world), world), rank, timeout_s=30.0)


def _compare(rank: int, world: int, variants: dict[str, dict[str, object]]) -> dict[str, dict[str, float]]:
    with _mesh(rank, world) as mesh:
        expected = _train(mesh, is_fsdp=False)
        assert float(expected["0/gradient_norm"]) > SETTINGS.gradient_clip, "the case must clip"
        plain = _train(mesh, is_fsdp=True)
        found = {"fsdp": _differences(plain, expected)}
        for name, options in variants.items():
            found[name] = _differences(_train(mesh, is_fsdp=True, **options), plain)
    return found


VARIANTS = {
    "recompute block": dict(recompute=("block",)),
    "recompute parts": dict(recompute=("attention", "experts", "dispatch")),
    "reduced once": dict(reduce_each=False),
}


@pytest.mark.parametrize("world", [2, 4])
def test_the_numbers_are_those_of_resident_weights(world: int) -> None:
    variants = VARIANTS if world == 2 else {}
    for outcome in run_ranks(_compare, world, variants):
        for name, difference in outcome["fsdp"].items():
            assert difference <= 1e-5, name
        for variant in variants:
            limit = 1e-5 if variant == "reduced once" else 0.0
            assert max(outcome[variant].values()) <= limit, variant


def _go_on(run: Run, last: int) -> list[float]:
    losses = []
    while run.step < last:
        losses.append(run.stepper.run(run.batches.step(run.step), learning_rate=3e-3).loss)
        run.step += 1
    return losses


def _save_and_load(rank: int, world: int, folder: Path, dtype: str) -> dict[str, list[float]]:
    found = {}
    with _mesh(rank, world) as mesh:
        for name, data_parallel in (("whole", "fsdp"), ("fsdp", "fsdp"), ("resident", "resident")):
            config = tiny_config(
                folder / dtype, folder / "tokens", dtype=dtype, model__expert_backend="reference", model__num_experts=5,
                parallel__data=world, parallel__data_parallel=data_parallel,
            )  # fmt: skip
            run = Run(config, mesh, torch.device("cpu"))
            if name == "whole":
                _go_on(run, 2)
                run.save()
            else:
                run.load(2)
            found[name] = _go_on(run, 4)
            run.close()
    return found


class _Collectives(StepWatch):
    """Notes the collectives of a rank, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def _send(self, name: str, args: tuple[Any, ...]) -> None:
        super()._send(name, args)
        self.names.append(name)


def _gathered_before_a_reduction(rank: int, world: int) -> int:
    """Return how many all-gathers the one micro-batch of a model of six layers begins with."""
    with _mesh(rank, world) as mesh:
        model = build_model(dataclasses.replace(SPEC, num_layers=6))
        initialize(model, seed=0, std=0.1)
        sizes = FsdpSizes({name: tuple(one.shape) for name, one in model.named_parameters()}, world, 4)
        shard_model(model, mesh)
        batch = _batches(rank)[0]
        with _Collectives() as seen:
            output = model(batch.tokens_BS, batch.document_ids_BS)
            losses = [routing.sums.z_sum for routing in output.routings]
            (output.hidden_BSD.sum() + torch.stack(losses).sum()).backward()
    assert seen.names.count("_reduce_scatter_base_") == 7
    assert seen.sent_bytes.total() == sum(sizes.messages(1).values())
    return seen.names.index("_reduce_scatter_base_")


def _on_two_ranks(rank: int, world: int, folder: Path) -> dict[str, object]:
    found = {dtype: _save_and_load(rank, world, folder, dtype) for dtype in DTYPES}
    skipped = _learn_nothing_from_a_nan(rank, world)
    return {**found, "skipped": skipped, "gathered": _gathered_before_a_reduction(rank, world)}


DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder and the results of what two ranks did; five experts are three on one and two on the other."""
    folder = tmp_path_factory.mktemp("fsdp")
    write_tokens(folder / "tokens")
    found, other = run_ranks(_on_two_ranks, 2, folder)
    assert other == found
    return folder, found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_is_read_by_fsdp_and_by_resident_weights(two_ranks: tuple[Path, dict], dtype: str) -> None:
    folder, found = two_ranks[0], two_ranks[1][dtype]
    assert found["fsdp"] == found["whole"]
    assert found["resident"] == pytest.approx(found["whole"], rel=1e-5 if dtype == "float32" else 1e-2)
    state = read_tensors(folder / dtype / "checkpoints" / "step-00000002", "")
    experts = state["model/layers.1.moe.experts.down"]
    assert experts.dtype == getattr(torch, dtype)
    assert experts.shape == (5, 16, 8)
    assert state["exp_avg/layers.1.moe.experts.down"].shape == (5 * 16 * 8,)
    assert int(state["step"]) == 2
    if dtype == "bfloat16":
        main = state["main/layers.1.moe.experts.down"].view(5, 16, 8)
        assert main.dtype == torch.float32
        assert torch.equal(main.bfloat16(), experts)


def _learn_nothing_from_a_nan(rank: int, world: int) -> tuple[int, bool, bool]:
    with _mesh(rank, world) as mesh:
        model = build_model(SPEC)
        initialize(model, seed=0, std=0.1)
        shard_model(model, mesh)
        optimizer = FsdpOptimizer(model, mesh, AdamWConfig())
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        batch = _batches(rank)[0]
        for factor in (torch.nan, 1.0):
            optimizer.zero_grad()
            with optimizer.micro_batch(is_last=True):
                (model(batch.tokens_BS, batch.document_ids_BS).hidden_BSD * factor).sum().backward()
            optimizer.step(1e-3)
            after = [parameter.to_local() for parameter in model.parameters()]
            is_same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            if factor != 1.0:
                kept = is_same
    return int(optimizer.num_skipped), kept, is_same


def test_a_gradient_that_is_not_finite_changes_nothing(two_ranks: tuple[Path, dict[str, object]]) -> None:
    assert two_ranks[1]["skipped"] == (1, True, False)


def test_a_loss_on_the_routing_gathers_no_layer_early(two_ranks: tuple[Path, dict[str, object]]) -> None:
    # The rest of the model and six layers; in the backward the last one, and the one before that by prefetch.
    assert two_ranks[1]["gathered"] == 1 + 6 + 2


def test_layouts_that_cannot_be() -> None:
    assert plan_problems(ParallelConfig(expert=4, data_parallel="fsdp"), 4, num_experts=8) == [
        'expert (4) must be 1 with data_parallel ("fsdp"), which gathers all experts on every rank; '
        'or set data_parallel to "resident"'
    ]
    assert plan_problems(ParallelConfig(data_parallel="fsdp"), 1) == [
        'data (1) must be at least 2 with data_parallel ("fsdp"): one rank has nothing to shard'
    ]
    assert plan_problems(ParallelConfig(data_parallel="fsdp"), 2) == []
    assert 'data_parallel ("zero") must be one of: resident, fsdp' in ParallelConfig(data_parallel="zero").problems()


def test_what_fsdp_does_not_have_is_refused_in_one_report(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    with pytest.raises(ConfigError) as caught:
        tiny_config(
            tmp_path / "run", tokens, parallel__data=2, parallel__data_parallel="fsdp", optimizer__muon=True,
            optimizer__gradient_dtype="bfloat16", optimizer__skip_outliers=True, train__recompute=["dispatch", "all"],
            parallel__dispatcher="rowwise", parallel__saved_rows="fetch",
        )  # fmt: skip
    needs = 'needs parallel.data_parallel = "resident"; with "fsdp" only'
    assert sorted(caught.value.problems) == [
        f"optimizer: gradient_dtype (bfloat16) {needs} float32 works",
        f"optimizer: muon (True) {needs} False works",
        f"optimizer: skip_outliers (True) {needs} False works",
        'train: recompute ("all") must be a list of any of: block, attention, experts, dispatch; [] for none',
        'train: recompute ("dispatch") and parallel.saved_rows ("fetch") both send rows again; leave one of them out',
    ]
    config = tiny_config(tmp_path / "run", tokens, parallel__data=2, parallel__data_parallel="fsdp")
    assert smallest_world(dataclasses.replace(config, parallel=ParallelConfig(data_parallel="fsdp"))) == 2
