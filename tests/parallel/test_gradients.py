"""Reduction, norm and clipping follow from the placements; sums of small whole numbers make every comparison exact."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    GradientReducer,
    Mesh,
    Optimizer,
    ParallelConfig,
    Placement,
    accumulate_in_fp32,
    clip_gradients_,
    count_elements,
    global_gradient_norm,
    make_plan,
    replica_problems,
)
from coterie_parallel.gradients import _Bucket
from support.ranks import run_ranks
from torch import Tensor, nn

SHAPES = {"embed.weight": (1017, 9), "norm.weight": (16,), "router.weight": (8, 4), "experts.down": (8, 28, 14)}
PLACEMENTS = {name: EXPERTS if name.startswith("experts") else DENSE for name in SHAPES}
TOTAL = 12_345  # 9153 + 16 + 32 + 3136 + 8


def _local_shape(name: str, expert_degree: int) -> tuple[int, ...]:
    first, *rest = SHAPES[name]
    return (first // expert_degree, *rest) if name.startswith("experts") else (first, *rest)


def _parameters(expert_degree: int) -> dict[str, nn.Parameter]:
    named = {name: nn.Parameter(torch.zeros(_local_shape(name, expert_degree))) for name in SHAPES}
    named["bias"] = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    return named


def _gradient_of_rank(name: str, shape: tuple[int, ...], rank: int) -> Tensor:
    """Return small whole numbers that depend on the rank and on the place."""
    return ((torch.arange(math.prod(shape)) * 7 + rank * 5) % 11 - 5).float().view(shape)


PLACEMENTS["bias"] = DENSE


def _reduce_on(rank: int, world: int, expert: int, bucket_bytes: int) -> dict[str, Any]:
    with Mesh(make_plan(ParallelConfig(expert=expert), world), rank, timeout_s=30) as mesh:
        parameters = _parameters(expert)
        shuffled = sorted(parameters.items(), key=lambda item: (hash((item[0], rank)), item[0]))
        reducer = GradientReducer(shuffled, PLACEMENTS, mesh, bucket_bytes)
        for name, parameter in parameters.items():
            # One rank has no gradient for the router, and nobody has one for the norm.
            if name != "norm.weight" and not (name == "router.weight" and rank == 1):
                parameter.grad = _gradient_of_rank(name, tuple(parameter.shape), rank).to(parameter.dtype)
        summed = reducer.reduce()
        if rank == 0:
            assert list(summed) == sorted(parameters)
        again = {name: grad.clone() for name, grad in summed.items()}
        assert all(torch.equal(again[name], grad) for name, grad in reducer.reduce().items())
        norm = global_gradient_norm(summed, PLACEMENTS, mesh)
        count = count_elements(summed, PLACEMENTS, mesh)
        clip_gradients_(summed, norm, float(norm) / 2)
        return {
            "summed": {name: grad.flatten().tolist() for name, grad in again.items()},
            "clipped": {name: grad.flatten().tolist() for name, grad in summed.items()},
            "norm": float(norm),
            "count": count,
        }


def _expected(world: int, expert: int, rank: int) -> dict[str, Tensor]:
    """Return the sums that one process would have for the part of the model that ``rank`` holds."""
    expected = {}
    for name in PLACEMENTS:
        shape = (8,) if name == "bias" else _local_shape(name, expert)
        peers = [peer for peer in range(world) if not name.startswith("experts") or peer % expert == rank % expert]
        if name == "norm.weight":
            peers = []
        if name == "router.weight":
            peers = [peer for peer in peers if peer != 1]
        expected[name] = sum((_gradient_of_rank(name, shape, peer) for peer in peers), torch.zeros(shape))
    return expected


def _all_layouts(rank: int, world: int) -> dict[tuple[int, int], dict[str, Any]]:
    layouts = [(1, 64), (world, 64), (2, 64), (2, 2**20), (2, 16_000)]
    return {layout: _reduce_on(rank, world, *layout) for layout in layouts}


@pytest.mark.parametrize("world", [2, 4])
def test_sums_norm_and_count_equal_one_process_in_every_layout(world: int) -> None:
    results = run_ranks(_all_layouts, world, timeout_s=150)
    for expert, bucket_bytes in results[0]:
        squares = 0.0
        for rank in range(world):
            result, expected = results[rank][expert, bucket_bytes], _expected(world, expert, rank)
            for name, grad in expected.items():
                assert result["summed"][name] == grad.flatten().tolist(), (expert, bucket_bytes, rank, name)
            if rank < expert:  # One rank for every shard of the experts, and the rest of the model once.
                once = {name: grad for name, grad in expected.items() if name.startswith("experts") or rank == 0}
                squares += sum(float((grad.double() ** 2).sum()) for grad in once.values())
        for rank in range(world):
            result = results[rank][expert, bucket_bytes]
            assert result["count"] == TOTAL
            assert result["norm"] == pytest.approx(math.sqrt(squares), rel=1e-12)
            assert result["norm"] == results[0][expert, bucket_bytes]["norm"]
            for name, values in result["summed"].items():
                assert result["clipped"][name] == [value / 2 for value in values]


def _one_rank() -> Mesh:
    return Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=5)


def _reducer_for(named: list[tuple[str, Tensor]], placements: dict[str, Placement]) -> Callable[[], object]:
    return lambda: GradientReducer(named, placements, _one_rank())


def test_wrong_placements_are_named() -> None:
    weight = nn.Parameter(torch.zeros(2))
    other = nn.Parameter(torch.zeros(2))
    cases = [
        ([("a", weight)], {}, "parameter 'a' has no placement"),
        ([("a", weight), ("a", other)], {"a": DENSE}, "two parameters have the name 'a'"),
        ([("a", weight), ("b", weight)], {"a": DENSE, "b": DENSE}, "two names, 'a' and 'b'"),
        (
            [("a", weight)],
            {"a": Placement(replicated_over=("tensor",))},
            "'a': axis ('tensor') is unknown; known: world",
        ),
    ]
    for named, placements, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            _reducer_for(named, placements)()
    with pytest.raises(ValueError, match="'a' has no placement") as raised:
        _reducer_for([("a", weight), ("b", other)], {})()
    assert "'b' has no placement" in str(raised.value)


def test_a_placement_accounts_for_every_rank_once() -> None:
    plan = make_plan(ParallelConfig(expert=2), 8)
    assert DENSE.problems(plan) == []
    assert EXPERTS.problems(plan) == []
    assert Placement(sharded_over=("world",)).problems(plan) == []
    assert Placement(replicated_over=("expert_data",)).problems(plan) == [
        "expert_data (4) = 4 ranks must be the whole world (8)"
    ]
    assert Placement(replicated_over=("data",), sharded_over=("expert",)).problems(plan) == [
        "data (8) x expert (2) = 16 ranks must be the whole world (8)"
    ]
    assert Placement().problems(plan) == ["no axis (1) = 1 ranks must be the whole world (8)"]


def test_buckets_take_the_parameters_in_the_order_of_their_names_up_to_their_size() -> None:
    named = [(name, nn.Parameter(torch.zeros(size))) for name, size in [("c", 4), ("a", 4), ("b", 4), ("d", 9)]]
    reducer = GradientReducer(named, {name: DENSE for name, _ in named}, _one_rank(), bucket_bytes=32)
    buckets: list[_Bucket] = reducer._buckets
    assert [list(bucket.views) for bucket in buckets] == [["a", "b"], ["c"], ["d"]]
    assert [bucket.flat.numel() for bucket in buckets] == [8, 4, 9]


def test_norm_and_clipping_by_hand() -> None:
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    placements = {"a": DENSE, "b": EXPERTS}
    mesh = _one_rank()
    norm = global_gradient_norm(gradients, placements, mesh)
    assert (norm.dtype, float(norm)) == (torch.float64, 5.0)
    clip_gradients_(gradients, norm, 10.0)
    assert gradients["a"].tolist() == [3.0, 0.0]
    clip_gradients_(gradients, norm, 2.5)
    assert (gradients["a"].tolist(), gradients["b"].tolist()) == ([1.5, 0.0], [[2.0]])
    # Squares of such gradients do not fit into fp32.
    assert float(global_gradient_norm({"a": torch.tensor([3e30, 4e30])}, placements, mesh)) == pytest.approx(5e30)
    assert float(global_gradient_norm({}, placements, mesh)) == 0.0


def _different_names(rank: int, world: int) -> list[str]:
    messages = []
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        sizes = [{"a": 2, "only_here": 2}, {"a": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 3}]
        for named in (sizes[rank], {"a": 2, "b": 3 + rank}):
            parameters = [(name, nn.Parameter(torch.zeros(size))) for name, size in named.items()]
            try:
                GradientReducer(parameters, dict.fromkeys(named, DENSE), mesh)
                messages.append("no error")
            except ValueError as error:
                messages.append(str(error))
        tensors = [("same", torch.ones(3)), ("other", torch.full((3,), float(rank)))]
        messages += replica_problems(tensors, {"same": DENSE, "other": DENSE}, mesh)
    return messages


def test_replicas_that_differ_are_an_error_on_all_ranks() -> None:
    for rank, messages in enumerate(run_ranks(_different_names, 2)):
        assert messages[0].endswith("different: only_here")
        assert messages[1].endswith("different: b")
        assert messages[2:] == [f"'other' differs between rank {rank} and [{1 - rank}] along the 'data' axis"]


def test_small_gradients_are_not_rounded_away_by_the_sum_of_earlier_ones() -> None:
    # 1 + 256 * 2^-9 = 1.5; in bf16, whose next number above 1 is 1 + 2^-7, the sum would stay 1.
    mesh = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=30.0)
    parameter = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    other = torch.zeros(2, requires_grad=True)
    accumulate_in_fp32([parameter, other])
    assert not hasattr(other, "main_grad")
    optimizer = Optimizer([("p", parameter), ("other", other)], {"p": DENSE, "other": DENSE}, mesh, AdamWConfig())
    for _ in range(2):
        optimizer.zero_grad()
        for value in [1.0] + [2.0**-9] * 256:
            (parameter.sum() * value).backward()
        assert parameter.grad is None
        reduced = GradientReducer([("p", parameter)], {"p": DENSE}, mesh).reduce()
        assert reduced["p"].tolist() == [1.5, 1.5, 1.5]
    assert float(optimizer.step(0.0)) == pytest.approx(math.sqrt(3 * 1.5**2))
