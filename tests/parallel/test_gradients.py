"""Reduction, norm and clipping follow from the placements; sums of small whole numbers make every comparison exact."""

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    TIED_EMBEDDING,
    GradientReducer,
    Mesh,
    ParallelConfig,
    Placement,
    ReductionConfig,
    accumulate_in_fp32,
    clip_gradients_,
    count_elements,
    global_gradient_norm,
    make_plan,
    replica_problems,
)
from coterie_parallel.gradients import bucket_layouts
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


def _rounded_gradient(name: str, shape: tuple[int, ...], rank: int) -> Tensor:
    """Return numbers whose sum depends on its order."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * len(name) + rank))


Gradient = Callable[[str, tuple[int, ...], int], Tensor]


def _backward(parameters: dict[str, nn.Parameter], rank: int, gradient: Gradient) -> None:
    # One rank has no gradient for the router, and nobody has one for the norm.
    used = [name for name in parameters if name != "norm.weight" and not (name == "router.weight" and rank == 1)]
    terms = [(parameters[name] * gradient(name, tuple(parameters[name].shape), rank)).sum() for name in used]
    torch.stack([term.float() for term in terms]).sum().backward()


def _reduce_on(mesh: Mesh, gradient: Gradient, config: ReductionConfig, *, in_backward: bool) -> dict[str, Any]:
    rank, parameters = mesh.rank, _parameters(mesh.plan.expert)
    shuffled = sorted(parameters.items(), key=lambda item: (hash((item[0], rank)), item[0]))
    reducer = GradientReducer(shuffled, PLACEMENTS, mesh, config)
    with reducer.micro_batch(is_last=True) if in_backward else nullcontext():
        _backward(parameters, rank, gradient)
    pieces = reducer.reduce()
    assert pieces.keys() == parameters.keys()
    summed = reducer.gathered()
    norm = global_gradient_norm(pieces.values(), mesh)
    largest = global_gradient_norm(pieces.values(), mesh, order=math.inf)
    count = count_elements(pieces.values(), mesh)
    clip_gradients_(pieces.values(), norm, float(norm) / 2)
    clipped = reducer.gathered()
    reducer.zero()
    assert not any(grad.any() for grad in reducer.reduce().values())
    return {"summed": summed, "clipped": clipped, "norm": float(norm), "largest": float(largest), "count": count}


def _expected(world: int, expert: int, rank: int, gradient: Gradient) -> dict[str, Tensor]:
    """Return the sums, in the order of the ranks, for the part of the model that ``rank`` holds."""
    expected = {}
    for name in PLACEMENTS:
        shape = (8,) if name == "bias" else _local_shape(name, expert)
        peers = [peer for peer in range(world) if not name.startswith("experts") or peer % expert == rank % expert]
        if name == "norm.weight":
            peers = []
        if name == "router.weight":
            peers = [peer for peer in peers if peer != 1]
        dtype = torch.bfloat16 if name == "bias" else torch.float32
        expected[name] = sum((gradient(name, shape, peer).to(dtype).float() for peer in peers), torch.zeros(shape))
    return expected


# The two that do not sum in the order of the ranks, in fp32, get whole numbers.
CONFIGS = {
    "small buckets": (ReductionConfig(bucket_bytes=64), _rounded_gradient, True),
    "one bucket": (ReductionConfig(), _rounded_gradient, True),
    "some buckets": (ReductionConfig(bucket_bytes=16_000), _rounded_gradient, True),
    "no overlap": (ReductionConfig(bucket_bytes=16_000, overlap=False), _rounded_gradient, True),
    "by hand": (ReductionConfig(bucket_bytes=16_000), _rounded_gradient, False),
    "sharded": (ReductionConfig(bucket_bytes=16_000, sharded=True), _rounded_gradient, True),
    "bf16": (ReductionConfig(bucket_bytes=16_000, send_dtype="bfloat16"), _gradient_of_rank, True),
    "backend": (ReductionConfig(bucket_bytes=16_000, sum_order="backend"), _gradient_of_rank, True),
}


def _all_layouts(rank: int, world: int) -> dict[tuple[int, str], dict[str, Any]]:
    found = {}
    for expert in sorted({1, 2, world}):
        with Mesh(make_plan(ParallelConfig(expert=expert), world), rank, timeout_s=30) as mesh:
            for name, (config, gradient, in_backward) in CONFIGS.items():
                found[expert, name] = _reduce_on(mesh, gradient, config, in_backward=in_backward)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sums_norm_and_count_equal_one_process_in_every_layout(world: int) -> None:
    results = run_ranks(_all_layouts, world)
    for expert, config in results[0]:
        squares, largest = 0.0, 0.0
        for rank in range(world):
            result = results[rank][expert, config]
            expected = _expected(world, expert, rank, CONFIGS[config][1])
            for name, grad in expected.items():
                # Sums that are rounded have the bits of a sum in the order of the ranks.
                assert torch.equal(result["summed"][name], grad), (expert, config, rank, name)
            if rank < expert:  # One rank for every shard of the experts, and the rest of the model once.
                once = [grad for name, grad in expected.items() if name.startswith("experts") or rank == 0]
                squares += sum(float((grad.double() ** 2).sum()) for grad in once)
                largest = max(largest, *(float(grad.abs().max()) for grad in once))
        for rank in range(world):
            result = results[rank][expert, config]
            assert result["count"] == TOTAL
            assert result["norm"] == pytest.approx(math.sqrt(squares), rel=1e-12)
            assert result["norm"] == results[0][expert, config]["norm"]
            assert result["largest"] == largest
            for name, values in result["summed"].items():
                assert torch.equal(result["clipped"][name], values / 2)


def _sent_in_bf16(rank: int, world: int) -> dict[str, Tensor]:
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        config = ReductionConfig(send_dtype="bfloat16")
        return _reduce_on(mesh, _rounded_gradient, config, in_backward=True)["summed"]


def test_what_is_sent_in_bf16_is_rounded_once_and_summed_in_fp32() -> None:
    for summed in run_ranks(_sent_in_bf16, 2):
        for name in ("embed.weight", "experts.down"):
            shape = SHAPES[name]
            expected = sum(_rounded_gradient(name, shape, rank).bfloat16().float() for rank in range(2))
            assert torch.equal(summed[name], expected)


def _misuse(rank: int, world: int) -> list[str]:
    messages = []
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        for config in (ReductionConfig(), ReductionConfig(sharded=True)):
            parameter = nn.Parameter(torch.ones(3))
            reducer = GradientReducer([("a", parameter)], {"a": DENSE}, mesh, config)
            with reducer.micro_batch(is_last=True):
                parameter.sum().backward()
            try:
                parameter.sum().backward()
            except ValueError as error:
                messages.append(str(error))
            reducer.zero()
            # A step that is given up in the middle leaves no rank behind, and nothing in the next one.
            with reducer.micro_batch(is_last=True):
                (parameter * (rank + 1)).sum().backward()
            reducer.reduce()
            messages.append(str(reducer.gathered()["a"].tolist()))
    return messages


def test_a_gradient_that_comes_too_late_is_an_error_and_a_step_can_be_given_up() -> None:
    for messages in run_ranks(_misuse, 2):
        assert "'a' came after its bucket was sent; run one backward in micro_batch(is_last=True)" in messages[0]
        assert messages[2].startswith("with sharded gradients every backward must run in micro_batch(), and that of ")
        assert messages[1] == messages[3] == "[3.0, 3.0, 3.0]"


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
        "expert_data (4) = 4 ranks must be all that hold it (8)"
    ]
    assert Placement(replicated_over=("data",), sharded_over=("expert",)).problems(plan) == [
        "data (8) x expert (2) = 16 ranks must be all that hold it (8)"
    ]
    assert Placement().problems(plan) == ["no axis (1) = 1 ranks must be all that hold it (8)"]


def test_buckets_take_the_parameters_in_the_reverse_order_up_to_their_size() -> None:
    named = [(name, nn.Parameter(torch.zeros(size))) for name, size in [("c", 4), ("a", 4), ("b", 4), ("d", 200)]]
    named.append(("half", nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))))
    kinds = {"c": "x", "a": "y", "b": "y", "d": "y", "half": "y"}
    config = ReductionConfig(bucket_bytes=600)
    reducer = GradientReducer(named, {name: DENSE for name, _ in named}, _one_rank(), config, kinds)
    # "d" is larger than a bucket; starts and ends are multiples of 64 elements.
    slots = [[(slot.name, slot.start) for slot in bucket.layout.slots] for bucket in reducer.buckets]
    assert slots == [[("d", 0)], [("half", 0)], [("b", 0), ("a", 64)], [("c", 0)]]
    assert [bucket.layout.numel for bucket in reducer.buckets] == [256, 64, 128, 64]


def test_shards_are_equal_and_hold_every_element_once() -> None:
    plan = make_plan(ParallelConfig(expert=2), 8)
    sizes = [("big", 1000, torch.float32), ("one", 1, torch.float32), ("experts", 130, torch.float32)]
    placements = {"big": DENSE, "one": DENSE, "experts": EXPERTS}
    dense, experts = bucket_layouts(sizes, placements, plan, 2**20)
    assert (dense.axis, dense.num_shards, dense.shard_numel) == ("data", 8, 192)  # 1024 + 1 over 8, in steps of 64
    assert (experts.axis, experts.num_shards, experts.shard_numel) == ("expert_data", 4, 64)
    for layout in (dense, experts):
        for slot in layout.slots:
            pieces = [layout.piece(slot, shard) for shard in range(layout.num_shards)]
            held = [element for first, last in pieces for element in range(first, last)]
            assert held == list(range(slot.numel))


def test_norm_and_clipping_by_hand() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    mesh = _one_rank()
    norm = global_gradient_norm(gradients, mesh)
    assert (norm.dtype, float(norm)) == (torch.float64, 5.0)
    assert float(global_gradient_norm(gradients, mesh, order=math.inf)) == 4.0
    clip_gradients_(gradients, norm, 10.0)
    assert gradients[0].tolist() == [3.0, 0.0]
    clip_gradients_(gradients, norm, 2.5)
    assert (gradients[0].tolist(), gradients[1].tolist()) == ([1.5, 0.0], [[2.0]])
    # Squares of such gradients do not fit into fp32.
    assert float(global_gradient_norm([torch.tensor([3e30, 4e30])], mesh)) == pytest.approx(5e30)
    assert float(global_gradient_norm([torch.tensor([3e-30, 4e-30])], mesh)) == pytest.approx(5e-30)
    long = torch.ones(2**16 + 3)
    long[-1] = 2.0
    assert float(global_gradient_norm([long.bfloat16(), long[:0]], mesh)) == math.sqrt(2**16 + 6)
    assert math.isinf(global_gradient_norm([torch.tensor([math.inf, 0.0])], mesh))
    assert math.isnan(global_gradient_norm([torch.tensor([math.inf]), torch.tensor([math.nan])], mesh))
    assert float(global_gradient_norm([], mesh)) == 0.0
    assert math.isnan(global_gradient_norm([torch.tensor([math.nan, math.inf])], mesh, order=math.inf))
    with pytest.raises(ValueError, match=r"order \(1.0\) must be 2.0 or math.inf"):
        global_gradient_norm([], mesh, order=1.0)


def _stage_norms(rank: int, world: int) -> tuple[float, float, list[float]]:
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        stage = [torch.tensor([[3.0, 0.0], [4.0, 0.0]][rank])]
        norm = global_gradient_norm(stage, mesh)
        largest = global_gradient_norm(stage, mesh, order=math.inf)
        clip_gradients_(stage, norm, 1.0)
        return float(norm), float(largest), stage[0].tolist()


def test_stages_with_norms_3_and_4_both_clip_by_5() -> None:
    for rank, (norm, largest, clipped) in enumerate(run_ranks(_stage_norms, 2)):
        assert (norm, largest) == (5.0, 4.0)
        assert clipped == pytest.approx([0.6 if rank == 0 else 0.8, 0.0], rel=1e-7)


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
    with pytest.raises(ValueError, match="at most one axis"):
        GradientReducer([("p", parameter)], {"p": Placement(replicated_over=("data", "world"))}, mesh)
    reducer = GradientReducer([("p", parameter), ("other", other)], {"p": DENSE, "other": DENSE}, mesh)
    for _ in range(2):
        reducer.zero()
        for value in [1.0] + [2.0**-9] * 256:
            (parameter.sum() * value).backward()
        assert parameter.grad is None
        assert reducer.reduce()["p"].tolist() == [1.5, 1.5, 1.5]


def test_a_gradient_that_the_backward_adds_to_main_grad_itself_starts_the_exchange_too() -> None:
    for order in run_ranks(_order_with_main_grad, 2):
        assert order == ["b", "a"]


def test_fp32_gradients_that_no_other_rank_has_stay_where_autograd_left_them() -> None:
    named = {name: nn.Parameter(torch.zeros(5, 3)) for name in ("a", "turned", "none")}
    reducer = GradientReducer(named.items(), dict.fromkeys(named, DENSE), _one_rank())
    for factor in (1.0, 2.0):
        named["a"].grad = torch.full((5, 3), factor)
        named["turned"].grad = factor * torch.arange(15.0).view(3, 5).mT
        pieces = reducer.reduce()
        assert pieces["a"].data_ptr() == named["a"].grad.data_ptr()
        expected = {name: torch.zeros(5, 3) if one.grad is None else one.grad for name, one in named.items()}
        (bucket,) = reducer.buckets
        views = bucket.views(bucket.joined())
        for name, gradient in expected.items():
            assert torch.equal(pieces[name], gradient.flatten()), name
            assert torch.equal(reducer.gathered()[name], gradient), name
            assert torch.equal(views[name], gradient), name
        assert float(bucket.joined().sum()) == factor * (15 + 105)
        reducer.zero()
        assert not bucket.pieces
    # A main_grad is there to be added to, so that one has a bucket.
    named["a"].main_grad = torch.zeros(5, 3)  # type: ignore[attr-defined]
    reducer = GradientReducer(named.items(), dict.fromkeys(named, DENSE), _one_rank())
    named["a"].main_grad += 1.0  # type: ignore[attr-defined]
    named["a"].grad = torch.ones(5, 3)
    assert reducer.reduce()["a"].tolist() == [2.0] * 15


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        ctx.weight.main_grad += grad


def _order_with_main_grad(rank: int, world: int) -> list[str]:
    sent = []
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        named = {name: nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for name in ("a", "b")}
        accumulate_in_fp32(named.values())
        placements = dict.fromkeys(named, DENSE)
        reducer = GradientReducer(named.items(), placements, mesh, ReductionConfig(bucket_bytes=1))
        named["a"].register_hook(lambda grad: sent.extend(name for name in "b" if reducer.buckets[0].is_sent))
        with reducer.micro_batch(is_last=True):
            (named["a"].sum() * 2 + _IntoMainGrad.apply(named["b"])).backward()
        sent += [bucket.layout.slots[0].name for bucket in reducer.buckets[1:] if bucket.is_sent]
        pieces = reducer.reduce()
        assert {name: piece.tolist() for name, piece in pieces.items() if len(piece)} == (
            {"a": [4.0] * 3, "b": [2.0] * 3} if rank == 0 else {}
        )
    return sent


STAGE_SHAPES = {"embed.weight": (65, 3), "first": (7,), "experts": (8, 5), "inner": (130,), "norm": (4,)}


def _shapes_of_stage(stage: int, pipeline: int, expert: int) -> dict[str, tuple[int, ...]]:
    """Return the local shapes of a stage: a tied embedding at both ends, a parameter of its own, experts."""
    names = ["embed.weight", "first"] if stage == 0 else ["inner"]
    names = [*names, "embed.weight", "norm"] if stage == pipeline - 1 else names
    shapes = {f"{stage}.{name}" if name != "embed.weight" else name: STAGE_SHAPES[name] for name in names}
    return shapes | {f"{stage}.experts": (8 // expert, 5)}


def _reduce_stages(rank: int, world: int) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for pipeline, expert in ((2, 1), (2, 2), (4, 1)):
        plan = make_plan(ParallelConfig(pipeline=pipeline, expert=expert), world)
        with Mesh(plan, rank, timeout_s=30) as mesh:
            shapes = _shapes_of_stage(mesh.axis("pipeline").index, pipeline, expert)
            parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
            kinds = {"embed.weight": TIED_EMBEDDING}
            placements = {name: kinds.get(name, EXPERTS if "experts" in name else DENSE) for name in shapes}
            reducer = GradientReducer(parameters.items(), placements, mesh, ReductionConfig(bucket_bytes=600))
            with reducer.micro_batch(is_last=True):
                terms = [(one * _gradient_of_rank(name, shapes[name], rank)).sum() for name, one in parameters.items()]
                torch.stack(terms).sum().backward()
            pieces = reducer.reduce()
            found[pipeline, expert] = {
                "summed": reducer.gathered(),
                "norm": float(global_gradient_norm(pieces.values(), mesh)),
                "largest": float(global_gradient_norm(pieces.values(), mesh, order=math.inf)),
                "count": count_elements(pieces.values(), mesh),
                "ranks of the embedding": len(mesh.axis("embedding").ranks) if "embed.weight" in shapes else 0,
            }
    return found


def test_stages_sum_what_is_theirs_and_the_ends_sum_a_tied_embedding_together() -> None:
    world = 4
    results = run_ranks(_reduce_stages, world)
    for pipeline, expert in results[0]:
        data = world // pipeline
        totals: dict[tuple[str, int], Tensor] = {}
        for rank in range(world):
            stage, index = divmod(rank, data)
            found = results[rank][pipeline, expert]
            shapes = _shapes_of_stage(stage, pipeline, expert)
            assert found["summed"].keys() == shapes.keys()
            for name, shape in shapes.items():
                own_stage = range(stage * data, (stage + 1) * data)
                peers = [peer for peer in own_stage if "experts" not in name or (peer - index) % expert == 0]
                if name == "embed.weight":
                    peers = [*range(data), *range(world - data, world)]
                total = sum((_gradient_of_rank(name, shape, peer) for peer in peers), torch.zeros(shape))
                assert torch.equal(found["summed"][name], total), (pipeline, expert, rank, name)
                totals[name, index % expert if "experts" in name else 0] = total
        squares = sum(float(one.double().square().sum()) for one in totals.values())
        for rank in range(world):
            found = results[rank][pipeline, expert]
            assert found["norm"] == pytest.approx(math.sqrt(squares), rel=1e-12)
            assert found["norm"] == results[0][pipeline, expert]["norm"]
            assert found["largest"] == max(float(one.abs().max()) for one in totals.values())
            assert found["count"] == sum(one.numel() for one in totals.values())


def _three_and_four(rank: int, world: int) -> tuple[float, float, list[float]]:
    """P18: a norm over the local stage only."""
    with Mesh(make_plan(ParallelConfig(pipeline=2), world), rank, timeout_s=30) as mesh:
        name = f"layers.{rank}"
        parameter = nn.Parameter(torch.zeros(2))
        reducer = GradientReducer([(name, parameter)], {name: DENSE}, mesh)
        parameter.grad = torch.tensor([3.0 + rank, 0.0])
        pieces = reducer.reduce()
        norm = global_gradient_norm(pieces.values(), mesh)
        largest = global_gradient_norm(pieces.values(), mesh, order=math.inf)
        clip_gradients_(pieces.values(), norm, 1.0)
        return float(norm), float(largest), pieces[name].tolist()


def test_two_stages_clip_by_the_norm_of_both() -> None:
    for rank, (norm, largest, clipped) in enumerate(run_ranks(_three_and_four, 2)):
        assert (norm, largest) == (5.0, 4.0)
        assert clipped == pytest.approx([(3.0 + rank) / 5, 0.0], rel=1e-7)


def test_an_embedding_of_another_shape_at_the_other_end_is_an_error_at_both() -> None:
    for message in run_ranks(_embedding_of_two_shapes, 2):
        assert message.startswith("parameters replicated over 'embedding' must have the same names")
        assert message.endswith("different: embed.weight")


def _embedding_of_two_shapes(rank: int, world: int) -> str:
    with Mesh(make_plan(ParallelConfig(pipeline=2), world), rank, timeout_s=30) as mesh:
        shape = (4, 2) if rank == 0 else (4, 3)
        parameter = nn.Parameter(torch.zeros(shape))
        try:
            GradientReducer([("embed.weight", parameter)], {"embed.weight": TIED_EMBEDDING}, mesh)
        except ValueError as error:
            return str(error)
    return "no error"
