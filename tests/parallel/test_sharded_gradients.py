"""Sharded gradients: sums to the bit, no more than two under way, no rank that waits in its backward, and memory."""

import gc
import weakref
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
    MuonConfig,
    Optimizer,
    ParallelConfig,
    ReductionConfig,
    exchange_rows,
    make_plan,
    optimizer_memory,
)
from coterie_parallel.collectives import Pending
from coterie_parallel.gradients import reducer as reducer_module
from coterie_parallel.gradients.buffers import buffer_numels
from support.live_bytes import LiveBytes
from support.ranks import run_ranks
from torch import Tensor, nn

from parallel.echo_mesh import EchoMesh, backward, echoing, given_gradient

SHAPES = {
    "embed": (90, 8),
    "q": (40, 24),
    "experts.up": (4, 30, 16),
    "k": (24, 24),
    "experts.down": (4, 16, 30),
    "o": (70, 8),
}
PLACEMENTS = {name: EXPERTS if name.startswith("experts") else DENSE for name in SHAPES}
SHARDED = ReductionConfig(bucket_bytes=4000, sharded=True)
NUM_MICRO_BATCHES = 3


def _named(expert: int, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    named = {}
    for name, (first, *rest) in SHAPES.items():
        size = (first // expert if PLACEMENTS[name] is EXPERTS else first, *rest)
        named[name] = nn.Parameter(torch.zeros(size, dtype=dtype))
    return named


class _Counted:
    """Counts the exchanges of gradients that were started and not yet waited for, and from where they are sent."""

    def __init__(self) -> None:
        self.under_way = self.most = self.total = 0
        self.sent_from: set[int] = set()
        self._start = reducer_module.start_all_to_all

    def start(self, received: Tensor, sent: Tensor, axis: Any) -> Pending:
        self.under_way += 1
        self.total += 1
        self.most = max(self.most, self.under_way)
        self.sent_from.add(sent.untyped_storage().data_ptr())
        pending = self._start(received, sent, axis)
        wait = pending.wait

        def counted_wait() -> None:
            wait()
            self.under_way -= 1

        pending.wait = counted_wait  # type: ignore[method-assign]
        return pending


def _summed(rank: int, world: int) -> dict[tuple[int, torch.dtype], dict[str, Any]]:
    found = {}
    for expert in (1, 2):
        with Mesh(make_plan(ParallelConfig(expert=expert), world), rank, timeout_s=30) as mesh:
            for dtype in (torch.float32, torch.bfloat16):
                counted, named = _Counted(), _named(expert, dtype)
                reducer = GradientReducer(named.items(), PLACEMENTS, mesh, SHARDED)
                shared = [bucket for bucket in reducer.buckets if bucket.axis is not None]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(reducer_module, "start_all_to_all", counted.start)
                    for number in range(NUM_MICRO_BATCHES):
                        with reducer.micro_batch(is_last=number == NUM_MICRO_BATCHES - 1):
                            backward(list(named.values()), 10 * rank + number)
                        assert all(one.grad is None for bucket in shared for one in bucket.parameters.values())
                    reducer.reduce()
                found[expert, dtype] = {
                    "gathered": reducer.gathered(),
                    "most": counted.most,
                    "total": counted.total,
                    "buckets": len(shared),
                    "buffers": len(counted.sent_from),
                }
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sums_have_the_bits_of_a_plain_loop_and_no_more_than_two_are_under_way(world: int) -> None:
    results = run_ranks(_summed, world)
    for (expert, dtype), _ in results[0].items():
        for rank in range(world):
            found = results[rank][expert, dtype]
            assert found["buckets"] >= 3
            assert found["total"] == NUM_MICRO_BATCHES * found["buckets"]
            assert found["most"] <= 2
            assert found["buffers"] == 2
            named = _named(expert, dtype)
            for number, (name, parameter) in enumerate(named.items()):
                expected = torch.zeros(parameter.shape)
                peers = [one for one in range(world) if PLACEMENTS[name] is DENSE or one % expert == rank % expert]
                for micro_batch in range(NUM_MICRO_BATCHES):
                    total = torch.zeros(parameter.shape)
                    for peer in peers:
                        total += given_gradient(parameter, 1000 * (10 * peer + micro_batch) + number)
                    expected += total
                assert torch.equal(found["gathered"][name], expected), (expert, dtype, rank, name)


class _Exchanged(torch.autograd.Function):
    """Exchanges a row with the peer in the backward, as a layer of experts does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        counts = [1] * ctx.axis.size
        exchange_rows(torch.ones(sum(counts), 2), counts, counts, ctx.axis)
        return grad, None


def _exchange_behind_a_gap(rank: int, world: int) -> tuple[list[bool], float]:
    """Rank 1 has no gradient in the first bucket, and tokens are exchanged after five buckets are complete."""
    with Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=10) as mesh:
        named = {f"layer{number}": nn.Parameter(torch.ones(100, 2)) for number in range(6)}
        placements = dict.fromkeys(named, DENSE)
        reducer = GradientReducer(named.items(), placements, mesh, ReductionConfig(bucket_bytes=800, sharded=True))
        with reducer.micro_batch(is_last=True):
            x = _Exchanged.apply(torch.zeros((), requires_grad=True), mesh.axis("expert"))
            for name, parameter in named.items():
                if rank == 0 or name != "layer5":
                    x = x + parameter.sum()
            x.backward()
        started = [bucket.is_sent for bucket in reducer.buckets]
        reducer.reduce()
        return started, float(reducer.gathered()["layer5"].sum())


def test_a_rank_without_a_gradient_leaves_no_peer_waiting_in_its_backward() -> None:
    """P1, P5: a rank that waited for a buffer in its backward would keep its peer from coming to the same exchange."""
    for _, total in run_ranks(_exchange_behind_a_gap, 2):
        assert total == 200.0


def test_a_gap_is_named_where_a_wait_would_be_on_the_device() -> None:
    named = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))}
    mesh = EchoMesh(make_plan(ParallelConfig(expert=2), 2), torch.device("cpu"))
    with echoing():
        reducer = GradientReducer(named.items(), dict.fromkeys(named, DENSE), mesh, SHARDED)  # type: ignore[arg-type]
        reducer._needs_all = True
        with (
            pytest.raises(ValueError, match=r"no gradient came for a; with sharded gradients on GPUs"),
            reducer.micro_batch(is_last=True),
        ):
            named["b"].sum().backward()
        reducer = GradientReducer(named.items(), dict.fromkeys(named, DENSE), mesh, SHARDED)  # type: ignore[arg-type]
        reducer._needs_all = True
        with reducer.micro_batch(is_last=True):
            (named["b"].sum() + 0 * named["a"].sum()).backward()
        assert [float(piece.sum()) for piece in reducer.reduce().values()] == [6.0, 0.0]


CONFIGS = {
    "fp32": (AdamWConfig(reduction=SHARDED), torch.float32),
    "bf16": (AdamWConfig(reduction=SHARDED), torch.bfloat16),
    "one bucket of a kind": (AdamWConfig(reduction=ReductionConfig(sharded=True)), torch.bfloat16),
    "sent as bf16": (
        AdamWConfig(reduction=ReductionConfig(bucket_bytes=4000, sharded=True, send_dtype="bfloat16")),
        torch.bfloat16,
    ),
    "two kinds": (AdamWConfig(muon=MuonConfig(exclude=("embed", "k")), reduction=SHARDED), torch.bfloat16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_most_that_is_held_is_what_the_plan_says(name: str) -> None:
    config, dtype = CONFIGS[name]
    plan = make_plan(ParallelConfig(expert=2), 8)
    with echoing(), LiveBytes() as live:
        named = _named(2, dtype)
        optimizer = Optimizer(named.items(), PLACEMENTS, EchoMesh(plan, torch.device("cpu")), config)  # type: ignore[arg-type]
        sizes = {one: (tuple(parameter.shape), dtype) for one, parameter in named.items()}
        memory = optimizer_memory(sizes, PLACEMENTS, plan, config)
        planned = memory.parameters + memory.allocated_by_optimizer
        assert live.now() == planned
        for number in range(2):
            live.most = 0
            with optimizer.micro_batch(is_last=number == 1):
                backward(list(named.values()), number)
            # Beside what is planned there are a few scalars of the backward.
            assert 0 <= live.most - memory.total <= 32
            assert live.now() == planned


def test_buffers_are_as_large_as_the_buckets_that_take_turns_in_them() -> None:
    plan = make_plan(ParallelConfig(expert=2), 8)
    with echoing():
        reducer = GradientReducer(
            _named(2, torch.float32).items(), PLACEMENTS, EchoMesh(plan, torch.device("cpu")), SHARDED
        )  # type: ignore[arg-type]
    layouts = [bucket.layout for bucket in reducer.buckets]
    numels = [layout.numel for layout in layouts]
    assert buffer_numels(layouts) == [max(numels[::2]), max(numels[1::2])]
    assert buffer_numels(layouts[:1]) == numels[:1]
    assert buffer_numels([]) == []


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("in the middle")


LAYERS = 6


def _layers() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{number}": nn.Parameter(torch.randn(8, 8, generator=generator)) for number in range(LAYERS)}


def _loss(named: dict[str, nn.Parameter], seed: int, raise_before: int | None = None) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    for number, weight in enumerate(named.values()):
        if number == raise_before:
            x = _Raising.apply(x)
        x = (x @ weight).tanh()
    return x.square().sum()


def _optimizer(named: dict[str, nn.Parameter], mesh: Any, *, sharded: bool, overlap: bool = True) -> Optimizer:
    reduction = ReductionConfig(bucket_bytes=256, sharded=sharded, overlap=overlap)
    return Optimizer(named.items(), dict.fromkeys(named, DENSE), mesh, AdamWConfig(eps=1e-4, reduction=reduction))


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def _enter(optimizer: Optimizer) -> None:
    with optimizer.micro_batch(is_last=True):
        pass


def _break_off(optimizer: Optimizer, named: dict[str, nn.Parameter], rank: int, *, at: int, is_last: bool) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), optimizer.micro_batch(is_last=is_last):
        _loss(named, rank, at).backward()


def _go_on_after_failures(rank: int, world: int) -> tuple[dict[str, list[str]], dict[str, list[Tensor]]]:
    """Fail in the backward, on all ranks, before one of the layers has its gradient, and go on."""
    refused: dict[str, list[str]] = {}
    weights: dict[str, list[Tensor]] = {}
    for case, sharded, overlap, at, is_last in (
        ("sharded", True, True, 3, True),
        ("sharded, not last", True, True, 3, False),
        ("sharded, nothing sent", True, True, 5, True),
        ("whole, sent", False, True, 3, True),
        ("whole, not last", False, True, 3, False),
        ("whole, no overlap", False, False, 3, True),
        ("none", False, True, None, True),
    ):
        with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=20) as mesh:
            named = _layers()
            optimizer = _optimizer(named, mesh, sharded=sharded, overlap=overlap)
            for step in range(2):
                if step == 1 and at is not None:
                    _break_off(optimizer, named, rank, at=at, is_last=is_last)
                    if sharded or case == "whole, sent":
                        calls = (
                            lambda: _enter(optimizer),  # noqa: B023
                            lambda: optimizer.step(0.01),  # noqa: B023
                            optimizer.reducer.reduce,
                            optimizer.zero_grad,
                        )
                        refused[case] = [_message(call) for call in calls]
                        break
                    optimizer.zero_grad()
                with optimizer.micro_batch(is_last=True):
                    _loss(named, 10 * rank + step).backward()
                optimizer.step(0.01)
                optimizer.zero_grad()
            else:
                weights[case] = [one.detach().clone() for one in named.values()]
    return refused, weights


def test_a_backward_that_failed_in_its_middle_is_final_once_ranks_may_be_out_of_step() -> None:
    for refused, weights in run_ranks(_go_on_after_failures, 2):
        assert refused.keys() == {"sharded", "sharded, not last", "sharded, nothing sent", "whole, sent"}
        for case, messages in refused.items():
            for message in messages:
                assert "ranks may have sent different numbers of buckets; start again from a checkpoint" in message, (
                    case
                )
        assert weights.keys() == {"whole, not last", "whole, no overlap", "none"}
        for case, found in weights.items():
            assert all(map(torch.equal, found, weights["none"])), case


@pytest.mark.parametrize("sharded", [True, False])
def test_an_optimizer_that_nobody_holds_ends_at_once_and_another_takes_its_parameters(sharded: bool) -> None:
    mesh = EchoMesh(make_plan(ParallelConfig(), 2), torch.device("cpu"))
    gc.disable()
    try:
        with echoing():
            named = _layers()
            layers = nn.ParameterDict(named)
            # A graph keeps the nodes, and so the hooks, of the first one alive.
            graph = _loss(named, 0)
            for _ in range(2):
                optimizer = _optimizer(named, mesh, sharded=sharded)
                optimizer.overlap_with_forward([layers])
                with optimizer.micro_batch(is_last=True):
                    _loss(named, 1).backward()
                optimizer.step()
                optimizer.zero_grad()
                ends = [weakref.ref(one) for one in (optimizer, optimizer.reducer, optimizer.reducer.buckets[0])]
                ends.append(weakref.ref(optimizer.reducer.buckets[0].shard))
                optimizer.wait_for_weights()
                del optimizer
                assert [end() for end in ends] == [None] * 4
            assert graph.requires_grad
    finally:
        gc.enable()


def test_two_living_optimizers_with_sharded_gradients_of_one_parameter_are_named() -> None:
    mesh = EchoMesh(make_plan(ParallelConfig(), 2), torch.device("cpu"))
    with echoing():
        named = _layers()
        both = [_optimizer(named, mesh, sharded=True) for _ in range(2)]
        with (
            pytest.raises(
                ValueError, match=r"that of 'layer5' did not; or it did, but in that of another optimizer: then drop"
            ),
            both[1].micro_batch(is_last=True),
        ):
            _loss(named, 0).backward()
