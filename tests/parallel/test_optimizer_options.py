"""Skipped steps, moments in bf16, settings by name, and the memory of a rank to the byte."""

import gc
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    Mesh,
    MuonConfig,
    Optimizer,
    OutlierConfig,
    ParallelConfig,
    Plan,
    ReductionConfig,
    accumulate_in_fp32,
    make_plan,
    optimizer_memory,
)
from coterie_parallel.optimizer.outliers import OutlierGuard
from support.ranks import run_ranks
from torch import Tensor, nn

from parallel.optimizer_cases import one_process


def _optimizer(config: AdamWConfig, dtype: torch.dtype = torch.float32) -> tuple[dict[str, nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (6, 5), "b.weight": (4, 3), "bias": (5,)}
    named = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}
    return named, Optimizer(named.items(), dict.fromkeys(named, DENSE), one_process(), config)


def _set_gradients(named: dict[str, nn.Parameter], step: int, factor: float = 1.0) -> None:
    for number, parameter in enumerate(named.values()):
        generator = torch.Generator().manual_seed(31 * step + number)
        parameter.grad = (factor * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def _copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("muon", [None, MuonConfig(exclude=("b.*",))])
def test_a_step_with_a_norm_that_is_not_finite_changes_nothing_and_is_counted(
    bad: float, muon: MuonConfig | None
) -> None:
    config = AdamWConfig(muon=muon)
    named, optimizer = _optimizer(config)
    others, reference = _optimizer(config)
    _set_gradients(named, 7)
    named["bias"].grad[2] = bad  # type: ignore[index]
    before = _copies(optimizer.state_dict()) | {name: parameter.detach().clone() for name, parameter in named.items()}
    norm = optimizer.step(0.1)
    assert not norm.isfinite()
    after = optimizer.state_dict() | {name: parameter.detach() for name, parameter in named.items()}
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor + (name == "num_skipped")), name
    optimizer.zero_grad()
    # The steps after it are those of a run that never had it.
    for step in range(3):
        for parameters, one in ((named, optimizer), (others, reference)):
            _set_gradients(parameters, step)
            one.step(0.1)
            one.zero_grad()
    assert int(optimizer.num_skipped) == 1
    for name, tensor in reference.state_dict().items():
        assert name == "num_skipped" or torch.equal(optimizer.state_dict()[name], tensor), name
    assert all(torch.equal(named[name], others[name]) for name in named)


def _plain_judgement(values: list[float], window: int, deviations: float, min_steps: int) -> list[bool]:
    """Return for each value whether it is far above the finite ones before it, by the statistics module's formulas."""
    kept: list[float] = []
    found = []
    for value in values:
        last = kept[-window:]
        is_far = False
        if len(kept) >= min_steps:
            mean = sum(last) / len(last)
            deviation = math.sqrt(sum((one - mean) ** 2 for one in last) / (len(last) - 1))
            is_far = value > mean + deviations * deviation
        found.append(is_far or not math.isfinite(value))
        if math.isfinite(value):
            kept.append(value)
    return found


def test_outliers_are_judged_as_by_plain_loops() -> None:
    generator = torch.Generator().manual_seed(4)
    values = (2 + 0.1 * torch.randn(60, generator=generator, dtype=torch.float64)).tolist()
    for place, value in {5: 9.0, 30: 2.6, 31: -5.0, 40: math.nan, 41: math.inf, 50: 2.9}.items():
        values[place] = value
    for as_loss in (True, False):
        guard = OutlierGuard(OutlierConfig(window=8, num_deviations=3.0, min_steps=4), torch.device("cpu"))
        found = []
        for value in values:
            pair = torch.tensor([value, 1.0] if as_loss else [1.0, value], dtype=torch.float64)
            found.append(bool(guard.judge(pair[0], pair[1])))
        expected = _plain_judgement(values, 8, 3.0, 4)
        assert found == expected
        assert sum(expected) >= 4
        assert int(guard.num_seen) == 58


def _steps_with_an_outlier(rank: int, world: int) -> tuple[list[int], int, Tensor]:
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        parameter = nn.Parameter(torch.ones(3))
        config = AdamWConfig(outliers=OutlierConfig(window=8, min_steps=4), reduction=ReductionConfig(bucket_bytes=4))
        optimizer = Optimizer([("a", parameter)], {"a": DENSE}, mesh, config)
        with pytest.raises(ValueError, match="needs its loss"):
            optimizer.step(0.1)
        skipped = []
        for step in range(12):
            parameter.grad = torch.full((3,), 1.0 + 0.01 * (step % 3))
            # Each rank knows only its share of the loss; the sum is far off in step 9.
            share = torch.tensor(1.0 + 0.01 * (step % 2) + (5.0 if step == 9 and rank == 1 else 0.0))
            optimizer.step(0.1, loss=share)
            optimizer.zero_grad()
            skipped.append(int(optimizer.num_skipped))
        return skipped, int(optimizer.state_dict()["step"]), parameter.detach()


def test_a_loss_far_above_the_last_ones_is_skipped_on_all_ranks() -> None:
    first, second = run_ranks(_steps_with_an_outlier, 2)
    for skipped, steps, weights in (first, second):
        assert skipped == [0] * 9 + [1] * 3
        assert steps == 11
        assert torch.equal(weights, first[2])


def test_moments_in_bf16_are_the_rounded_ones_of_fp32() -> None:
    config = AdamWConfig(gradient_clip=None)
    named, optimizer = _optimizer(replace(config, moments_dtype="bfloat16"))
    others, reference = _optimizer(config)
    for step in range(3):
        for parameters, one in ((named, optimizer), (others, reference)):
            _set_gradients(parameters, step)
            one.step(0.1)
            one.zero_grad()
        for name, rounded in optimizer.state_dict().items():
            if name.startswith("exp_avg"):
                exact = reference.state_dict()[name]
                assert rounded.dtype == torch.bfloat16
                assert torch.equal(rounded, exact.bfloat16())
                exact.copy_(rounded.float())  # so that the next step starts from the same
        assert all(torch.equal(named[name], others[name]) for name in named)


def test_decay_and_rate_follow_the_first_pattern_that_matches() -> None:
    config = AdamWConfig(
        weight_decay=0.5,
        weight_decays=(("bias", 0.25), ("*.weight", 0.0), ("a.*", 9.0)),
        learning_rate_factors=(("b.*", 0.5), ("b.weight", 7.0)),
    )
    named, optimizer = _optimizer(config)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer.step(0.1)  # without gradients only the decay is left
    assert torch.equal(named["a.weight"], before["a.weight"])
    torch.testing.assert_close(named["bias"].detach(), before["bias"] * (1 - 0.1 * 0.25))
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    named_2, optimizer_2 = _optimizer(replace(config, weight_decays=(("*", 0.0),), gradient_clip=None))
    for parameter in named_2.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer_2.step(0.1)
    # The first step of AdamW is the learning rate times the sign.
    torch.testing.assert_close(named_2["a.weight"].detach(), before["a.weight"] - 0.1)
    torch.testing.assert_close(named_2["b.weight"].detach(), before["b.weight"] - 0.05)


def test_all_faults_of_the_new_settings_at_once() -> None:
    config = AdamWConfig(
        betas=(0.9, 0.999),
        moments_dtype="bfloat16",
        weight_decays=(("x", -1.0),),
        learning_rate_factors=(("y", math.inf),),
        muon=MuonConfig(momentum=1.0, num_iterations=0, learning_rate_factor=-1.0),
        outliers=OutlierConfig(window=30, num_deviations=0.0, min_steps=31),
        reduction=ReductionConfig(bucket_bytes=0),
    )
    assert [problem.split(" (")[0] for problem in config.problems()] == [
        "weight_decays: value",
        "learning_rate_factors: value",
        "betas",
        "muon learning_rate_factor",
        "muon momentum",
        "muon num_iterations",
        "outlier num_deviations",
        "outlier min_steps",
        "bucket_bytes",
    ]
    assert OutlierConfig().problems() == []
    assert OutlierConfig(window=10).problems() == ["outlier min_steps (20) must be from 2 to the window (10)"]


SIZES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((50, 12), torch.bfloat16),
    "norm": ((12,), torch.float32),
    "q": ((12, 12), torch.bfloat16),
    "experts": ((4, 24, 12), torch.bfloat16),
}
PLACEMENTS = {name: EXPERTS if name == "experts" else DENSE for name in SIZES}
CONFIGS = {
    "plain": AdamWConfig(reduction=ReductionConfig(bucket_bytes=2000)),
    "sharded": AdamWConfig(reduction=ReductionConfig(sharded=True)),
    "all": AdamWConfig(
        moments_dtype="bfloat16", muon=MuonConfig(), outliers=OutlierConfig(), reduction=ReductionConfig(sharded=True)
    ),
}


def _tensors() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def _bytes_by_address(tensors: list[Tensor]) -> dict[int, int]:
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def _allocated(rank: int, world: int, expert: int) -> dict[str, Any]:
    found = {}
    with Mesh(make_plan(ParallelConfig(expert=expert), world), rank, timeout_s=30) as mesh:
        for name, config in CONFIGS.items():
            # The tensors themselves: one that went away would leave its address to a new one.
            before = _tensors()
            sizes = _local_sizes(expert)
            named = {one: nn.Parameter(torch.zeros(shape, dtype=dtype)) for one, (shape, dtype) in sizes.items()}
            accumulate_in_fp32(named.values())
            optimizer = Optimizer(named.items(), PLACEMENTS, mesh, config)
            for _ in range(2):
                optimizer.zero_grad()
                with optimizer.micro_batch(is_last=True):
                    torch.stack([one.float().sum() for one in named.values()]).sum().backward()
                optimizer.step(0.1, loss=torch.tensor(1.0))
            known = _bytes_by_address(before)
            planned = _planned(mesh.plan, config)
            # A thread of gloo lets go of the tensors of a collective a moment after the collective has ended.
            for _ in range(50):
                found[name] = sum(size for place, size in _bytes_by_address(_tensors()).items() if place not in known)
                if found[name] <= planned:
                    break
                time.sleep(0.1)
    return found


def _local_sizes(expert: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    number, *others = SIZES["experts"][0]
    return {**SIZES, "experts": ((number // expert, *others), torch.bfloat16)}


def _planned(plan: Plan, config: AdamWConfig) -> int:
    memory = optimizer_memory(_local_sizes(plan.expert), PLACEMENTS, plan, config)
    return memory.parameters + memory.autograd_gradients + memory.allocated_by_optimizer


def test_a_rank_holds_as_many_bytes_as_the_plan_says() -> None:
    for world, expert in ((1, 1), (2, 1), (2, 2)):
        # Also one rank in a process of its own: other tests leave tensors in this one.
        for held in run_ranks(_allocated, world, expert):
            for name, config in CONFIGS.items():
                plan = make_plan(ParallelConfig(expert=expert), world)
                assert held[name] == _planned(plan, config), (world, expert, name)


def test_memory_by_hand() -> None:
    plan = make_plan(ParallelConfig(expert=2), 4)
    sizes = {"dense": ((100,), torch.bfloat16), "experts": ((2, 8, 8), torch.bfloat16)}
    memory = optimizer_memory(sizes, {"dense": DENSE, "experts": EXPERTS}, plan, CONFIGS["plain"])
    # The dense bucket is 4 shards of 64 elements, that of the experts 2 of 64.
    assert memory.parameters == 2 * (100 + 128)
    assert memory.main_gradients == 4 * (256 + 128)
    assert memory.main_weights == 4 * (64 + 64)
    assert memory.moments == 2 * 4 * (64 + 64)
    assert memory.autograd_gradients == 0
    assert memory.transient == 4 * 256
    assert memory.gradient_bytes_sent == 4 * (192 + 64)
    assert memory.weight_bytes_sent == 2 * (192 + 64)
    assert memory.num_messages == 5  # two buckets there and back, and the norm
    assert memory.total == 456 + 1536 + 512 + 1024 + 16 + 1024

    sharded = optimizer_memory(sizes, {"dense": DENSE, "experts": EXPERTS}, plan, CONFIGS["sharded"])
    # A shard of each bucket, and a buffer for each to be sent from.
    assert sharded.main_gradients == 4 * (64 + 64) + 4 * (256 + 128)
    # What comes in for the dense bucket, and its gradient of 100 elements, which autograd still holds.
    assert sharded.transient == 4 * 256 + 2 * 100
