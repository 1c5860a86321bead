"""What an optimizer refuses at construction, alike on all ranks; and gradients that are used twice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    GradientReducer,
    Mesh,
    MuonConfig,
    Optimizer,
    OutlierConfig,
    ParallelConfig,
    Placement,
    ReductionConfig,
    make_plan,
)
from support.ranks import run_ranks
from torch import Tensor, nn

from parallel.optimizer_cases import one_process

CONFIG = AdamWConfig()


def _refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return "no error"


def _make(mesh: Mesh, config: AdamWConfig = CONFIG, **weights: Tensor) -> str:
    named = [(name, nn.Parameter(weight)) for name, weight in weights.items()]
    placements = {name: EXPERTS if name == "experts" else DENSE for name in weights}
    return _refusal(lambda: Optimizer(named, placements, mesh, config))


def _disagreements(rank: int, world: int) -> dict[str, str]:
    found = {}
    with Mesh(make_plan(ParallelConfig(expert=2), world), rank, timeout_s=30) as mesh:
        reduction = ReductionConfig(bucket_bytes=64 if rank == 1 else 2**20)
        several = AdamWConfig(
            eps=1e-8 if rank == 0 else 1e-6,
            muon=MuonConfig() if rank < 3 else None,
            reduction=ReductionConfig(send_dtype="float32" if rank < 3 else "bfloat16"),
        )
        ones = torch.ones(3, 2)
        found["bucket_bytes"] = _make(mesh, AdamWConfig(reduction=reduction), a=ones)
        found["reducer"] = _refusal(lambda: GradientReducer([("a", nn.Parameter(ones))], {"a": DENSE}, mesh, reduction))
        found["several"] = _make(mesh, several, a=ones)
        # One rank's settings are faulty by themselves: the others must not wait for it.
        found["faulty"] = _make(mesh, replace(CONFIG, eps=-1.0 if rank == 2 else 1e-8), a=ones)
        found["same"] = _make(mesh, replace(several, eps=1e-8, muon=MuonConfig(), reduction=ReductionConfig()), a=ones)
        placement = DENSE if rank == 0 else EXPERTS
        found["placement"] = _refusal(lambda: Optimizer([("a", nn.Parameter(ones))], {"a": placement}, mesh, CONFIG))

        dense = torch.randn(7, 3, generator=torch.Generator().manual_seed(rank // 3)).bfloat16()
        experts = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(rank % 2))
        found["dense"] = _make(mesh, b=ones, a=dense, experts=experts)
        # Expert index 0 has equal experts; index 1 has not.
        found["experts"] = _make(mesh, b=ones, experts=experts + (1e-6 if rank == 3 else 0.0))
        found["equal"] = _make(mesh, b=ones, experts=experts)
        named = [("a", nn.Parameter(dense))]
        found["not asked"] = _refusal(lambda: Optimizer(named, {"a": DENSE}, mesh, CONFIG, check_replicas=False))
    return found


def test_ranks_that_do_not_agree_are_refused_on_all_of_them() -> None:
    results = run_ranks(_disagreements, 4)
    assert all(result == results[0] for result in results)
    bucket_bytes = "than rank 0: {}bucket_bytes (64 instead of 1048576)"
    assert results[0] == {
        "bucket_bytes": "rank 1 has another AdamWConfig " + bucket_bytes.format("reduction."),
        "reducer": "rank 1 has another ReductionConfig " + bucket_bytes.format(""),
        "several": results[0]["several"],
        "faulty": "rank 2 has another AdamWConfig than rank 0: eps (-1.0 instead of 1e-08)",
        "same": "no error",
        "placement": "placement and kind must be the same on all ranks of 'data'; different: a",
        "dense": "weights differ between the ranks that replicate them over 'data': a\n"
        "start all ranks from the same weights",
        "experts": "weights differ between the ranks that replicate them over 'expert_data': experts\n"
        "start all ranks from the same weights",
        "equal": "no error",
        "not asked": "no error",
    }
    first, second = results[0]["several"].splitlines()
    assert first == "rank 1, 2 has another AdamWConfig than rank 0: eps (1e-06 instead of 1e-08)"
    assert second.startswith(
        "rank 3 has another AdamWConfig than rank 0: eps (1e-06 instead of 1e-08), muon.exclude (None"
    )
    assert second.endswith("reduction.send_dtype ('bfloat16' instead of 'float32')")


def _patterns_of_stages(rank: int, world: int) -> list[str]:
    with Mesh(make_plan(ParallelConfig(pipeline=2), world), rank, timeout_s=30) as mesh:
        weights = {f"layers.{rank}.weight": torch.ones(2, 2)}
        other_stage = AdamWConfig(weight_decays=(("layers.0.*", 0.0),), learning_rate_factors=(("layers.1.*", 2.0),))
        return [_make(mesh, config, **weights) for config in (other_stage, UNUSED)]


UNUSED = AdamWConfig(
    weight_decays=(("layers.1.weight", 0.0), ("layers.0", 0.0)),
    learning_rate_factors=(("*.router.*", 2.0),),
    muon=MuonConfig(exclude=(*MuonConfig().exclude, "layers.1.*", "nobody")),
)


def test_a_pattern_that_matches_no_parameter_of_any_stage_is_refused() -> None:
    for other_stage, unused in run_ranks(_patterns_of_stages, 2):
        assert other_stage == "no error"
        assert unused.splitlines() == [
            "weight_decays: 'layers.0' matches the whole name of no parameter",
            "learning_rate_factors: '*.router.*' matches the whole name of no parameter",
            "muon exclude: 'nobody' matches the whole name of no parameter",
        ]
    assert AdamWConfig(muon=MuonConfig(), outliers=OutlierConfig()).unused_patterns(["a"]) == []


def test_a_placement_of_no_parameter_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    placements: dict[str, Placement] = {"a": DENSE, "frozen": DENSE, "module.a": DENSE, "b": EXPERTS}
    named = [("a", nn.Parameter(torch.ones(2))), ("frozen", weight)]
    message = "there is no parameter of this name, but a placement: b, module.a"
    assert _refusal(lambda: Optimizer(named, placements, one_process(), CONFIG)) == message


def _steps_without_zero(rank: int, world: int) -> dict[str, list[float | str]]:
    found = {}
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        for dtype in (torch.float32, torch.bfloat16):
            for reduction in (ReductionConfig(), ReductionConfig(sharded=True), ReductionConfig(overlap=False)):
                parameter = nn.Parameter(torch.ones(100, 3, dtype=dtype))
                config = AdamWConfig(gradient_clip=1.0, reduction=reduction)
                optimizer = Optimizer([("a", parameter)], {"a": DENSE}, mesh, config)

                def backward(optimizer: Optimizer = optimizer, parameter: nn.Parameter = parameter) -> None:
                    with optimizer.micro_batch(is_last=True):
                        parameter.float().sum().backward()

                seen: list[float | str] = []
                backward()
                seen.append(float(optimizer.step(0.1)))
                before = parameter.detach().clone()
                seen.append(_refusal(backward))
                seen.append(_refusal(optimizer.step))
                assert torch.equal(parameter, before)
                optimizer.zero_grad()
                backward()
                seen.append(float(optimizer.step(0.1)))
                found[f"{dtype} {reduction}"] = seen
    return found


def test_gradients_that_a_step_has_used_are_refused_in_every_mode() -> None:
    message = "the gradients of the step before are still there; call zero_grad() after every step"
    for found in (_steps_without_zero(0, 1), *run_ranks(_steps_without_zero, 2)):
        assert len(found) == 6
        norm = next(iter(found.values()))[0]
        assert all(seen == [norm, message, message, norm] for seen in found.values())


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_many_micro_batches_are_added_in_fp32(sharded: bool) -> None:
    # 1 + 63 * 2^-9; in bf16, whose next number above 1 is 1 + 2^-7, the sum would stay 1.
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    config = AdamWConfig(reduction=ReductionConfig(sharded=sharded))
    optimizer = Optimizer([("w", parameter)], {"w": DENSE}, one_process(), config)
    for _ in range(2):
        for number in range(64):
            with optimizer.micro_batch(is_last=number == 63):
                (parameter.float() * (1.0 if number == 0 else 2.0**-9)).sum().backward()
        assert parameter.grad is None
        assert float(optimizer.step(0.0)) == pytest.approx((1 + 63 * 2.0**-9) * 1000**0.5, rel=1e-12)
        optimizer.zero_grad()
