"""Dispatch and combine alone: bytes a second at the busiest GPU, against what a plain copy to a peer reaches."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from shutil import which
from typing import Any

import torch
from coterie_parallel import Dispatcher, DispatchOptions, dispatcher_class, make_dispatcher
from coterie_parallel.comparison import ROUTINGS, DispatchSizes, routed_ids
from coterie_parallel.dispatch.rowwise.peers import make_peers
from torch import Tensor

from multi_gpu_parts.bench import Bench, Spans

__all__ = ["run"]

_SIZES = (
    DispatchSizes(num_tokens=8192, width=4096, top_k=8, num_experts=128),
    DispatchSizes(num_tokens=4096, width=7168, top_k=8, num_experts=256),
)
_TINY_SIZES = (DispatchSizes(num_tokens=64, width=32, top_k=2, num_experts=8),)
_NAMES = {"balanced": "balanced", "random": "random", "skewed": "Zipf"}
_SAID = {"combine_in_place": "combine of rows written in place"}
_GOAL_OF_LINK = 0.8
# A time that is this much over the other one is the noise of a measurement.
_NOISE = 1.02


def run(bench: Bench) -> None:
    """Measure the link, then each dispatcher on each load, once its results are right."""
    bench.say("goals: row-wise at 80 % of the link or better, and never slower than all_to_all")
    if bench.is_gpu and bench.rank == 0 and which("nvidia-smi"):
        bench.say(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout)
    link_gbps = _link(bench)
    names = ["all_to_all", "rowwise"]
    reason = dispatcher_class("deep_ep").supports(num_experts=8 * bench.world, expert_degree=bench.world, alignment=1)
    if reason is None:
        names.append("deep_ep")
    else:
        bench.row(name="deep_ep", skipped=reason)
    for sizes in _TINY_SIZES if bench.tiny else _SIZES:
        for routing in ROUTINGS:
            _compare(bench, sizes, routing, names, link_gbps)


def _link(bench: Bench) -> float:
    """Return the rate of a copy to the next rank's memory, or from it, in GB/s, while all ranks do the same."""
    num_bytes = 1 << (18 if bench.tiny else 30)
    peers = make_peers(bench.axis, bench.device, bench.settings.timeout_s)
    box = peers.allocate("link", (num_bytes,), torch.uint8)
    assert box.views is not None
    there = box.views[(bench.rank + 1) % bench.world]
    source = torch.full_like(box.local, bench.rank + 1)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Tensor]] = {
        "to": lambda: there.copy_(source),
        "from": lambda: target.copy_(there),
    }
    rates = {}
    for way, call in calls.items():
        call()
        bench.barrier()
        rates[way] = num_bytes / Spans.of(bench, call, repeats=3 if bench.tiny else 20) / 1e6
    bench.barrier()
    came = (bench.rank - 1) % bench.world + 1
    if not bool((box.local == came).all()) or not torch.equal(target, source):
        bench.fault("a plain copy between peers is wrong")
    link_gbps = max(rates.values())
    bench.row(name="link: copy to and from a peer", gbps_to=rates["to"], gbps_from=rates["from"], bytes=num_bytes)
    bench.barrier()
    peers.close()
    return link_gbps


@dataclass(frozen=True, kw_only=True)
class _Load:
    """The tokens of this rank, where they go, and the bytes through the busiest GPU, one way."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_y_TD: Tensor
    busiest_bytes: int

    @classmethod
    def of(cls, bench: Bench, sizes: DispatchSizes, routing: str) -> "_Load":
        num_local = sizes.num_experts // bench.world
        ids = [routed_ids(routing, sizes, source=source) for source in range(bench.world)]
        rows_SS = torch.stack([torch.bincount(one.flatten() // num_local, minlength=bench.world) for one in ids])
        rows_SS.fill_diagonal_(0)  # what stays needs no link
        generator = torch.Generator(bench.device).manual_seed(bench.rank)
        shape = sizes.num_tokens, sizes.width
        x_TD, grad_y_TD = (torch.randn(shape, generator=generator, device=bench.device) for _ in range(2))
        weights_TK = torch.rand(shape[0], sizes.top_k, generator=generator, device=bench.device)
        return cls(
            x_TD=x_TD.to(bench.dtype).requires_grad_(),
            ids_TK=ids[bench.rank].to(bench.device),
            weights_TK=weights_TK.requires_grad_(),
            grad_y_TD=grad_y_TD.to(bench.dtype),
            busiest_bytes=int(max(rows_SS.sum(0).max(), rows_SS.sum(1).max())) * sizes.width * bench.dtype.itemsize,
        )

    def whole(self, dispatcher: Dispatcher, *, in_place: bool = False) -> list[Tensor]:
        """Return outputs and gradients of dispatch, experts that only weigh, and combine.

        ``in_place`` lets the experts write to the memory that the dispatcher lends.
        """
        sent = dispatcher.dispatch(self.x_TD, self.ids_TK, self.weights_TK)
        with dispatcher.saved_rows(sent.handle):
            weights_R1 = sent.row_weights_R[:, None].to(sent.rows_RD.dtype)
            if in_place:
                rows_RD = _WeighInPlace.apply(sent.rows_RD, weights_R1, dispatcher, sent.handle)
            else:
                rows_RD = sent.rows_RD * weights_R1
        y_TD = dispatcher.combine(rows_RD, sent.handle)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, (self.x_TD, self.weights_TK), self.grad_y_TD)]

    @torch.no_grad()
    def laid_out(self, dispatcher: Dispatcher) -> tuple[Tensor, Any] | None:
        """Return rows that were dispatched, in memory of the dispatcher, and their handle; None if it lends none."""
        sent = dispatcher.dispatch(self.x_TD, self.ids_TK, self.weights_TK)
        memory_RD = dispatcher.memory_for_combine(sent.handle)
        return None if memory_RD is None else (memory_RD.copy_(sent.rows_RD), sent.handle)

    @torch.no_grad()
    def there_and_back(self, dispatcher: Dispatcher) -> Tensor:
        """Return each token times the number of its choices."""
        sent = dispatcher.dispatch(self.x_TD, self.ids_TK, self.weights_TK)
        return dispatcher.combine(sent.rows_RD, sent.handle)


class _WeighInPlace(torch.autograd.Function):
    """Experts that only weigh, and write rows and gradients where the dispatcher says."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R1: Tensor, dispatcher: Dispatcher, handle: Any) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_R1)
        ctx.ask = partial(dispatcher.memory_for_gradients, handle)
        return torch.mul(rows_RD, weights_R1, out=dispatcher.memory_for_combine(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_R1 = ctx.saved_tensors
        return torch.mul(grads[0], weights_R1, out=ctx.ask()), (grads[0] * rows_RD).sum(1, keepdim=True), None, None


def _compare(bench: Bench, sizes: DispatchSizes, routing: str, names: list[str], link_gbps: float) -> None:
    shape = f"T {sizes.num_tokens} D {sizes.width} K {sizes.top_k} E {sizes.num_experts}"
    where = f"{_NAMES[routing]}, {shape}"
    load = _Load.of(bench, sizes, routing)
    expected: list[Tensor] = []
    times: dict[str, dict[str, float]] = {}
    for name in names:
        one = partial(_measure, bench, name, where, load, sizes, routing, expected)
        ms = bench.attempt(f"{name}, {where}", one)
        if ms is not None:
            times[name] = ms
            _show(bench, f"{name}, {where}", load, ms, times.get("all_to_all", {}), link_gbps)
    if not {"rowwise", "all_to_all"} <= times.keys():
        return
    ms, other = times["rowwise"], times["all_to_all"]
    for what, opponent in (("dispatch", "dispatch"), ("combine", "combine"), ("combine_in_place", "combine")):
        if what not in ms:
            continue
        said = _SAID.get(what, what)
        if what != "combine":
            # The experts of this project write in place, so that is the combine of a training step.
            share = load.busiest_bytes / ms[what] / 1e6 / link_gbps
            bench.target(f"rowwise {said} over the link, {where}", share, _GOAL_OF_LINK)
        ratio = ms[what] / other[opponent]
        bench.target(f"rowwise {said} over all_to_all, {where}", ratio, _NOISE, at_least=False)


def _measure(
    bench: Bench,
    name: str,
    where: str,
    load: _Load,
    sizes: DispatchSizes,
    routing: str,
    expected: list[Tensor],
) -> dict[str, float]:
    """Return the times of a dispatcher by what was done; ``expected`` is filled by the first one, and judges others."""
    options = DispatchOptions(capacity_factor=1.25) if name == "rowwise" else None
    dispatcher = make_dispatcher(name, num_experts=sizes.num_experts, axis=bench.axis, options=options)
    found = _first(dispatcher, load)
    if not expected:
        expected += found
    _judge(bench, f"{name}, {where}", expected, found, is_exact=name != "deep_ep")
    if name == "rowwise":
        found = load.whole(dispatcher, in_place=True)
        _judge(bench, f"{name}, written in place, {where}", expected, found, is_exact=True)
    ms = _times(bench, dispatcher, load)
    if name == "rowwise" and bench.is_gpu:
        ms["graph"] = _graph(bench, dispatcher, load, routing, sizes)
    said = dispatcher.grow()
    if said is not None:
        bench.fault(f"{name}, {where}: an overflow while it was timed: {said}")
    dispatcher.close()
    del dispatcher, found
    bench.free()
    return ms


def _first(dispatcher: Dispatcher, load: _Load) -> list[Tensor]:
    """Return the results of a pass for which the buffers were large enough."""
    dispatcher.grow()  # says that an overflow is asked for
    while True:
        found = load.whole(dispatcher)
        if dispatcher.grow() is None:
            return found


def _judge(bench: Bench, name: str, expected: list[Tensor], found: list[Tensor], *, is_exact: bool) -> None:
    for what, a, b in zip(("outputs", "gradients of tokens", "gradients of weights"), expected, found, strict=True):
        off = float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))
        right = torch.equal(a, b) if is_exact else off <= 2.0**-7
        if not right:
            bench.fault(f"{name}: {what} differ from those of all_to_all, relative {off:.1e}")


def _times(bench: Bench, dispatcher: Dispatcher, load: _Load) -> dict[str, float]:
    repeats = 2 if bench.tiny else 20
    spans = Spans(bench)
    with torch.no_grad():
        for number in range(repeats + 2):
            timed = spans if number >= 2 else Spans(bench)
            with timed.span("dispatch"):
                sent = dispatcher.dispatch(load.x_TD, load.ids_TK, load.weights_TK)
            with timed.span("combine"):
                dispatcher.combine(sent.rows_RD, sent.handle)
    in_place = Spans(bench)
    for number in range(repeats + 2):
        laid_out = load.laid_out(dispatcher)
        if laid_out is None:
            break
        with (in_place if number >= 2 else Spans(bench)).span("combine_in_place"), torch.no_grad():
            dispatcher.combine(*laid_out)
    ms = spans.ms() | in_place.ms()
    ways = {"pass": False, "pass_in_place": True} if "combine_in_place" in ms else {"pass": False}
    for what, writes in ways.items():
        run = partial(load.whole, dispatcher, in_place=writes)
        ms[what] = Spans.of(bench, run, repeats=repeats // 2, warmups=1)
    return ms


def _graph(bench: Bench, dispatcher: Dispatcher, load: _Load, routing: str, sizes: DispatchSizes) -> float:
    """Return the time of a replayed dispatch and combine, after replays of other tokens gave the right sums."""
    load = replace(load, x_TD=load.x_TD.detach().clone(), ids_TK=load.ids_TK.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        load.there_and_back(dispatcher)
    stream.synchronize()
    bench.barrier()
    graph = torch.cuda.CUDAGraph()
    # Another thread asks whether collectives have ended, which must not break the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y_TD = load.there_and_back(dispatcher)
    bench.barrier()
    for shift in (0, 1):
        # Other tokens for the experts, with the same number of rows on each rank.
        load.ids_TK.copy_(routed_ids(routing, sizes, source=bench.rank).roll(shift, 0))
        load.x_TD.copy_(load.x_TD.roll(1, 1))
        graph.replay()
        torch.cuda.synchronize()
        captured = y_TD.clone()
        bench.barrier()
        if not torch.equal(captured, load.there_and_back(dispatcher)):
            bench.fault(f"a replayed graph differs, {routing}, shift {shift}")
    return Spans.of(bench, graph.replay, repeats=20)


def _show(
    bench: Bench, name: str, load: _Load, ms: dict[str, float], other: dict[str, float], link_gbps: float
) -> None:
    row: dict[str, object] = {"name": name, "busiest_bytes": load.busiest_bytes}
    for what, taken_ms in ms.items():
        row[f"{what}_us"] = taken_ms * 1e3
        # Rows go there, or there and back, or that in both passes.
        trips = {"pass": 4, "pass_in_place": 4, "graph": 2}.get(what, 1)
        gbps = trips * load.busiest_bytes / taken_ms / 1e6
        row |= {f"{what}_gbps": gbps, f"{what}_share_of_link": gbps / link_gbps}
        if what in other:
            row[f"{what}_over_all_to_all"] = taken_ms / other[what]
    bench.row(**row)
