"""What a rank of the DeepEP tests does: layers through the adapter, compared with the loops of the reference."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from coterie_parallel import Axis, DeepEPOptions, DispatchOptions, Guarantees
from coterie_parallel.conformance import CASES as ALL_CASES
from coterie_parallel.conformance import (
    Case,
    Layout,
    Tokens,
    conformance_problems,
    make_tokens,
    reference_layout,
    reference_rows,
)
from coterie_parallel.dispatch.deep_ep import DeepEPDispatcher
from torch import Tensor

from parallel.fake_deep_ep import FakeDeepEP, make_fake
from parallel.fake_deep_ep_syncs import HostReads

NUM_LAYERS = 2
BASE = Case(name="uneven", why="token counts differ between ranks", width=256, dtype=torch.bfloat16)
CASES = (
    BASE,
    replace(BASE, name="empty_rank", why="much padding", num_tokens=(0, 6, 3), top_k=4, alignment=128, routed=0.8),
    replace(BASE, name="eight", why="eight choices, on the same rank too", experts_per_rank=8, top_k=8, alignment=128),
    replace(BASE, name="one_choice", why="all rows to one expert", top_k=1, routing="last", width=512),
    replace(BASE, name="none_routed", why="every id is -1", routed=0.0),
    replace(BASE, name="no_tokens", why="nobody has a token", num_tokens=(0,), alignment=128),
)


class OnCPU(DeepEPDispatcher):
    """The adapter over the stand-in, which lives on the CPU."""

    device_type = "cpu"


class StandIn(OnCPU):
    """The same for ranks that nobody prepares: the stand-in of V2.1 is there as soon as it is asked for."""

    too_much: ClassVar[dict[str, Any]] = {}

    @classmethod
    def supports(cls, **sizes: int) -> str | None:
        """Put the stand-in in its place first."""
        sys.modules.setdefault("deep_ep", make_fake("2.1.0"))
        return super().supports(**sizes)

    @classmethod
    def guarantees(cls, options: DispatchOptions) -> Guarantees:
        """Declare what DeepEP keeps, and what a test lets it claim besides."""
        return replace(super().guarantees(options), **cls.too_much)


class ClaimsOrder(StandIn):
    too_much: ClassVar[dict[str, Any]] = {"row_order": "contract"}


class ClaimsSums(StandIn):
    too_much: ClassVar[dict[str, Any]] = {"sum_roundings": 1}


class ClaimsValues(StandIn):
    too_much: ClassVar[dict[str, Any]] = {"row_error": 0.0}


class ClaimsSizes(StandIn):
    too_much: ClassVar[dict[str, Any]] = {"sizes": "any"}


_SORTED = DispatchOptions(deep_ep=DeepEPOptions(deterministic=True))
_FP8 = DispatchOptions(deep_ep=DeepEPOptions(payload="fp8"))
CLAIMS: tuple[tuple[type[StandIn], DispatchOptions, str, str | None], ...] = (
    (ClaimsOrder, DispatchOptions(), "uneven", "row_weights_R is wrong"),
    (ClaimsOrder, DispatchOptions(), "reuse", "layer 0: gradient of the tokens through recomputed rows is"),
    (ClaimsOrder, _SORTED, "uneven", None),
    (ClaimsSums, DispatchOptions(), "bfloat16", "y_TD is wrong"),
    (ClaimsValues, _FP8, "uneven", "rows_RD is wrong"),
    (ClaimsValues, DispatchOptions(), "uneven", None),
    (ClaimsSizes, DispatchOptions(), "reuse", "the buffers of DeepEP were made for tokens of width"),
)
"""Who claims what with which options, a case, and what the suite says; None where the claim is true."""


def claim_problems(rank: int, world: int) -> list[list[str]]:
    """Return what the suite says of each of `CLAIMS`."""
    axis, found = whole_axis(rank, world), []
    for one, options, name, _ in CLAIMS:
        cases = [case for case in ALL_CASES if case.name == name]
        found.append(conformance_problems(one, axis, cases=cases, options=options))
    return found


def suite_problems(
    rank: int, world: int, settings: list[tuple["Setting", tuple[str, ...]]]
) -> dict[str, tuple[int, list[str]]]:
    """Return the number of cases and what the suite says of each setting, on the cases named, or all without names."""
    found = {}
    for setting, names in settings:
        cases = [case for case in ALL_CASES if not names or case.name in names]
        with installed(setting.version):
            problems = conformance_problems(OnCPU, whole_axis(rank, world), cases=cases, options=setting.options())
        found[str(setting)] = len(cases), problems
    return found


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One version of DeepEP, the surface to use and how."""

    version: str
    surface: Any
    overflow: Any = "grow"
    payload: Any = "bf16"
    deterministic: bool = False

    def __str__(self) -> str:
        extra = [value for value, usual in ((self.overflow, "grow"), (self.payload, "bf16")) if value != usual]
        return "-".join([self.version, self.surface, *extra, *["deterministic"] * self.deterministic])

    def options(self, max_tokens: int | None = None) -> DispatchOptions:
        """Return these settings as a user gives them."""
        return DispatchOptions(
            overflow=self.overflow,
            deep_ep=DeepEPOptions(
                surface=self.surface, payload=self.payload, deterministic=self.deterministic, max_tokens=max_tokens
            ),
        )


SETTINGS = (
    Setting(version="1.2.1", surface="Buffer"),
    Setting(version="2.0.0", surface="ElasticBuffer"),
    Setting(version="2.1.0", surface="ElasticBuffer"),
    Setting(version="2.5.0", surface="EPBuffer"),
    Setting(version="2.1.0", surface="Buffer", overflow="exact"),
    Setting(version="2.0.0", surface="ElasticBuffer", overflow="exact"),
    Setting(version="2.1.0", surface="ElasticBuffer", overflow="exact"),
    Setting(version="2.1.0", surface="ElasticBuffer", deterministic=True),
    Setting(version="2.5.0", surface="EPBuffer", payload="fp8"),
    Setting(version="1.2.1", surface="Buffer", payload="fp8"),
)


def whole_axis(rank: int, world: int) -> Axis:
    """Return an axis over all ranks, with a group also for one."""
    return Axis(name="expert", size=world, index=rank, group=dist.group.WORLD, ranks=tuple(range(world)), timeout_s=30)


@contextmanager
def installed(version: str) -> Iterator[FakeDeepEP]:
    """Put the stand-in where `import deep_ep` finds it."""
    sys.modules["deep_ep"] = module = make_fake(version)
    try:
        yield module
    finally:
        del sys.modules["deep_ep"]


def make(setting: Setting, axis: Axis, *, num_experts: int, alignment: int = 1, max_tokens: int | None = None) -> OnCPU:
    """Return the dispatcher of ``setting``."""
    return OnCPU(
        num_experts=num_experts,
        axis=axis,
        alignment=alignment,
        options=setting.options(max_tokens),
    )


def setting_problems(setting: Setting, rank: int, world: int) -> list[str]:
    """Return what is wrong with the layers of the cases, all of them for the surfaces in their usual setting."""
    found = []
    for case in CASES if setting in SETTINGS[:4] else CASES[1:4]:
        with installed(setting.version) as module:
            dispatcher = make(
                setting, whole_axis(rank, world), num_experts=case.experts_per_rank * world, alignment=case.alignment
            )
            layers = [Layer(dispatcher, case, rank, world, number) for number in range(NUM_LAYERS)]
            for layer in reversed(layers):
                layer.backward()
            problems = [problem for layer in layers for problem in layer.problems()]
            problems += _call_problems(module, setting)
            if dispatcher.grow() is not None:
                problems.append("grow has something to say")
            dispatcher.close()
            dispatcher.close()
            if module.calls[-2:].count("destroy") != 1:
                problems.append("the buffer was not destroyed once")
        found += [f"{case.name}: {problem}" for problem in problems]
    return found


def _call_problems(module: FakeDeepEP, setting: Setting) -> list[str]:
    found = []
    forward = ["dispatch", "combine"] * NUM_LAYERS
    backward = ["cached dispatch", "combine with weights"] * NUM_LAYERS
    if module.calls != ["make", *forward, *backward]:
        found.append(f"calls {module.calls}")
    reads = NUM_LAYERS * (setting.overflow == "exact" or setting.deterministic)
    if module.host_reads != reads:
        found.append(f"{module.host_reads} reads of the host by DeepEP, expected {reads}")
    if module.events_waited != module.events_started:
        found.append(f"{module.events_started} events, {module.events_waited} waited for")
    return found


class Layer:
    """One dispatch and combine with its backward, and what the reference says about it."""

    def __init__(
        self, dispatcher: DeepEPDispatcher, case: Case, rank: int, world: int, number: int, device: str = "cpu"
    ) -> None:
        self.dispatcher = dispatcher
        self.number = number
        self.batch = [make_tokens(case, degree=world, source=source, layer=number) for source in range(world)]
        self.own = self.batch[rank]
        self.layout = reference_layout(
            [tokens.ids_TK.tolist() for tokens in self.batch],
            num_experts=dispatcher.num_experts,
            degree=world,
            index=rank,
            alignment=case.alignment,
        )
        self.x_TD = self.own.x_TD.to(device, copy=True).requires_grad_()
        self.weights_TK = self.own.weights_TK.to(device, copy=True).requires_grad_()
        ids_TK = self.own.ids_TK.to(device)
        with HostReads() as reads:
            self.sent = dispatcher.dispatch(self.x_TD, ids_TK, self.weights_TK)
        # The first dispatch makes the buffers, which reads the host once; the others are watched.
        self.host_reads = reads.found if number else []
        self.rows = [tensor.detach().cpu().clone() for tensor in self.sent[:3]]
        order = dispatcher.guarantees(dispatcher.options).row_order
        self.row_of = _row_order(self.layout, self.batch, self.rows[1], order)
        self.rows_RD = self.filled("pair_rows_TKD", self.sent.rows_RD).requires_grad_()
        with HostReads() as reads:
            self.y_TD = dispatcher.combine(self.rows_RD, self.sent.handle)
        self.host_reads += reads.found

    def filled(self, name: str, like: Tensor) -> Tensor:
        """Return rows that hold each pair's value; padding and rows past the end hold NaN."""
        values = reference_rows(self.layout, [getattr(tokens, name) for tokens in self.batch], padding=torch.nan)
        filled = torch.full(like.shape, torch.nan, dtype=like.dtype)
        filled[self.row_of] = values[: len(self.row_of)]
        return filled.to(like.device)

    def backward(self) -> None:
        """Run both backward passes and keep the gradients."""
        given_RD = self.filled("pair_rows_TKD", self.sent.rows_RD)
        given_R = self.filled("pair_weights_TK", self.sent.row_weights_R)
        grad_y_TD = self.own.grad_y_TD.to(given_R.device)
        with HostReads() as reads:
            (self.grad_rows_RD,) = torch.autograd.grad((self.y_TD * grad_y_TD).sum(), self.rows_RD)
            loss = (self.sent.rows_RD.float() * given_RD.float()).sum() + (self.sent.row_weights_R * given_R).sum()
            self.grad_x_TD, self.grad_weights_TK = torch.autograd.grad(loss, (self.x_TD, self.weights_TK))
        self.host_reads += reads.found

    def problems(self) -> list[str]:
        """Return what differs from the reference."""
        found = [f"layer {self.number}: {problem}" for problem in self._values()]
        # To agree on the size of the batch is the one read of "exact".
        expected = ["__int__"] if self.number and self.dispatcher.options.overflow == "exact" else []
        if self.host_reads != expected:
            found.append(f"layer {self.number}: the host reads {self.host_reads}, expected {expected}")
        return found

    def _values(self) -> list[str]:
        rows_RD, row_weights_R, offsets_e = self.rows
        choices = self.own.ids_TK.shape[1]
        used = len(self.layout.pairs_R)
        x_rows_RD = reference_rows(self.layout, [t.x_TD.unsqueeze(1).expand(-1, choices, -1) for t in self.batch])
        y_rows_RD = reference_rows(self.layout, [t.grad_y_TD.unsqueeze(1).expand(-1, choices, -1) for t in self.batch])
        weights_R = reference_rows(self.layout, [tokens.weights_TK for tokens in self.batch])
        routed_TK = self.own.ids_TK >= 0
        found = []
        if offsets_e.dtype != torch.int32 or offsets_e.tolist() != list(self.layout.offsets_e):
            found.append(f"offsets_e {offsets_e}, expected {self.layout.offsets_e}")
        if rows_RD.shape[0] < used or rows_RD.dtype != torch.bfloat16 or row_weights_R.dtype != torch.float32:
            return [*found, f"rows of {rows_RD.dtype} {tuple(rows_RD.shape)}, weights of {row_weights_R.dtype}"]
        if self.dispatcher.deep_ep.payload == "fp8":
            got_RD, largest = rows_RD[self.row_of], float(x_rows_RD.abs().max()) if used else 0.0
            # Three bits behind the point, a scale that wastes none of them, and the rounding of bf16.
            far = (got_RD - x_rows_RD).abs() > x_rows_RD.abs() * 2.0**-4 + largest * 2.0**-9
            if far.any() or (torch.equal(got_RD, x_rows_RD) and largest > 0):
                found.append("rows_RD is not the rounded tokens")
        elif not torch.equal(rows_RD[self.row_of], x_rows_RD):
            found.append("rows_RD is wrong")
        exact = {
            "row_weights_R": (row_weights_R[self.row_of], weights_R),
            "gradient of the rows": (self.grad_rows_RD.cpu()[self.row_of], y_rows_RD),
            "gradient of the weights": (
                self.grad_weights_TK.cpu(),
                self.own.pair_weights_TK.where(routed_TK, torch.zeros(())),
            ),
        }
        found += [f"{name} is wrong" for name, (got, expected) in exact.items() if not torch.equal(got, expected)]
        routed_rows_TKD = self.own.pair_rows_TKD.float() * routed_TK.unsqueeze(2)
        for name, got in (("y_TD", self.y_TD), ("gradient of the tokens", self.grad_x_TD)):
            bound_TD = routed_rows_TKD.abs().sum(1) * 2.0**-7 * 1.01
            close_TD = (got.cpu().float() - routed_rows_TKD.sum(1)).abs() <= bound_TD
            if got.dtype != torch.bfloat16 or not bool(close_TD.all()):
                found.append(f"{name} is wrong")
        return found


def _row_order(layout: Layout, batch: list[Tokens], row_weights_R: Tensor, row_order: str) -> Tensor:
    """Return the row of each entry of the reference: the same one, or with any order the one with its weight."""
    if row_order == "contract":
        return torch.arange(len(layout.pairs_R))
    expected_R = reference_rows(layout, [tokens.weights_TK for tokens in batch])
    row_of, start = [], 0
    for end in layout.offsets_e:
        real = sum(pair is not None for pair in layout.pairs_R[start:end])
        got = row_weights_R[start : start + real].argsort()
        place = torch.empty_like(got)
        place[expected_R[start : start + real].argsort()] = got
        row_of += [*(start + place).tolist(), *range(start + real, end)]
        start = end
    return torch.tensor(row_of, dtype=torch.int64)


def large_batch_problems(rank: int, world: int) -> dict[str, list[str]]:
    """Return what each rank is told about batches that do not fit and other faults of one rank alone."""
    axis = whole_axis(rank, world)
    told: dict[str, list[str]] = {}
    grow = Setting(version="2.1.0", surface="ElasticBuffer")
    exact = replace(grow, overflow="exact")
    tokens = make_tokens(replace(BASE, num_tokens=(4, 7, 2)), degree=world, source=rank)
    ids_TK = torch.arange(tokens.ids_TK.shape[0]).unsqueeze(1) % (4 * world)

    def layer(dispatcher: OnCPU, x_TD: Tensor, ids_TK: Tensor = ids_TK) -> Tensor:
        x_TD = x_TD.clone().requires_grad_()
        sent = dispatcher.dispatch(x_TD, ids_TK[: x_TD.shape[0]], torch.ones(x_TD.shape[0], 1))
        y_TD = dispatcher.combine(sent.rows_RD, sent.handle)
        y_TD.sum().backward()
        assert x_TD.grad is not None
        assert bool(y_TD.isnan().all()) == bool(x_TD.grad.isnan().all())
        return y_TD

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            told[name] = []
        except ValueError as error:
            told[name] = str(error).splitlines()

    with installed("2.1.0"):
        dispatcher = make(grow, axis, num_experts=4 * world)
        layer(dispatcher, tokens.x_TD[:4])
        attempt("fits", dispatcher.grow)
        y_TD = layer(dispatcher, tokens.x_TD)
        told["is NaN"] = [str(bool(y_TD.isnan().all())), str(int(dispatcher.counters()["overflowed"]))]
        attempt("later", dispatcher.grow)
        dispatcher = make(exact, axis, num_experts=4 * world)
        layer(dispatcher, tokens.x_TD[:4])
        attempt("exact", lambda: layer(dispatcher, tokens.x_TD))
        # Nobody is left waiting: the same ranks go on with a batch that fits.
        layer(dispatcher, tokens.x_TD[:4])
        attempt("first", lambda: layer(make(grow, axis, num_experts=4 * world, max_tokens=5), tokens.x_TD))
        wrong_TD = tokens.x_TD[:2].float() if rank == 1 else tokens.x_TD[:2]
        attempt("dtype of one", lambda: layer(make(grow, axis, num_experts=4 * world), wrong_TD))
        narrow_TD = tokens.x_TD[:2, : 256 if rank else 128].contiguous()
        attempt("width of one", lambda: layer(make(grow, axis, num_experts=4 * world), narrow_TD))
        dispatcher = make(grow, axis, num_experts=4 * world)
        outside_TK = ids_TK.clone()
        outside_TK[0] = 4 * world if rank == 0 else -1
        told["outside is zero"] = [str(bool((layer(dispatcher, tokens.x_TD[:2], outside_TK)[0] == 0).all()))]
        attempt("outside", dispatcher.grow)
    return told


def calls_after_a_fault(rank: int, world: int) -> list[str]:
    """Return what is called when a dispatcher is closed because of an exception, which peers may not have."""
    tokens = make_tokens(BASE, degree=world, source=rank)
    with installed("2.1.0") as module:
        setting = Setting(version="2.1.0", surface="ElasticBuffer")
        dispatcher = make(setting, whole_axis(rank, world), num_experts=BASE.experts_per_rank * world)
        try:
            sent = dispatcher.dispatch(tokens.x_TD, tokens.ids_TK, tokens.weights_TK)
            dispatcher.combine(tokens.x_TD[:0], sent.handle)
        except ValueError:
            dispatcher.close()
        dispatcher.close()
    return module.calls


def overlap_order(rank: int, world: int) -> list[str]:
    """Return the order of calls when other work stands between start and finish, forward and backward."""
    order: list[str] = []

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_TD: Tensor) -> Tensor:
            order.append(f"work after {calls[-1]}, {module.events_started - module.events_waited} under way")
            return x_TD * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            order.append(f"its backward after {calls[-1]}, {module.events_started - module.events_waited} under way")
            return grads[0] * 2

    tokens = make_tokens(BASE, degree=world, source=rank)
    with installed("2.1.0") as module:
        calls = module.calls
        setting = Setting(version="2.1.0", surface="ElasticBuffer")
        dispatcher = make(setting, whole_axis(rank, world), num_experts=BASE.experts_per_rank * world)
        x_TD = tokens.x_TD.clone().requires_grad_()
        pending = dispatcher.dispatch_start(x_TD, tokens.ids_TK, tokens.weights_TK)
        shared_TD = Work.apply(x_TD)
        sent = dispatcher.dispatch_finish(pending)
        back = dispatcher.combine_start(sent.rows_RD, sent.handle)
        shared_TD = Work.apply(shared_TD)
        (dispatcher.combine_finish(back) + shared_TD).sum().backward()
    return order
