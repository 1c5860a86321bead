"""Routings, virtual ranks and plain expectations that the tests of the row-wise kernels share, on a CPU and a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from coterie_parallel.conformance import Layout, reference_combine, reference_layout, reference_rows
from coterie_parallel.dispatch.rowwise.peers.base import PeerTensor
from coterie_parallel.dispatch.rowwise.peers.virtual import virtual_peers
from coterie_parallel.dispatch.rowwise.placement import RowPlan, count_pairs, place_rows
from coterie_parallel.dispatch.rowwise.rows import clear_padding, get_rows, get_values, put_rows
from torch import Tensor

__all__ = [
    "ROUTINGS",
    "Exchanged",
    "Routing",
    "allocate",
    "assert_plans",
    "assert_same_bits",
    "capacity_of",
    "exchange",
    "expected",
    "garbage_in_new_memory",
    "layouts",
    "plans",
    "tokens_and_weights",
]

# Rows that lie behind each rank's buffer: nothing may ever write there.
_GUARD = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Tokens of each source, and how the ids are drawn.

    ``kind``: "uneven" (half of the experts stay empty), "some not routed", "none routed", "all to one", "all to the
    last rank". ``capacity`` is the share of the rows a rank needs that its buffer holds.
    """

    name: str
    tokens: tuple[int, ...]
    num_local: int = 3
    top_k: int = 2
    alignment: int = 1
    kind: str = "some not routed"
    width: int = 4
    capacity: float = 1.0

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        return self.size * self.num_local

    def ids(self, seed: int = 0) -> list[Tensor]:
        """Return int64 ids_TK of each source, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        return [self._ids(tokens, generator) for tokens in self.tokens]

    def _ids(self, tokens: int, generator: torch.Generator) -> Tensor:
        shape = (tokens, self.top_k)
        if self.kind == "none routed":
            return torch.full(shape, -1)
        if self.kind == "all to one":
            return torch.full(shape, self.num_experts - 1)
        if self.kind == "all to the last rank":
            return torch.randint(self.num_experts - self.num_local, self.num_experts, shape, generator=generator)
        share_TK = torch.rand(shape, generator=generator) ** 2
        ids_TK = (share_TK * (self.num_experts + 1) / 2).long()
        if self.kind == "some not routed":
            ids_TK[torch.rand(shape, generator=generator) < 0.3] = -1
        return ids_TK


ROUTINGS = [
    Routing(name="one rank", tokens=(7,)),
    Routing(name="one rank, aligned, too small", tokens=(9,), alignment=16, capacity=0.4),
    Routing(name="two ranks", tokens=(5, 9), top_k=3),
    Routing(name="two ranks, aligned to 16", tokens=(5, 9), alignment=16, width=5),
    Routing(name="two ranks, too small", tokens=(20, 9), capacity=0.5, kind="uneven"),
    Routing(name="two ranks, room for nothing", tokens=(3, 2), capacity=0.0),
    Routing(name="three ranks, one without tokens", tokens=(4, 0, 6), alignment=2),
    Routing(name="four ranks", tokens=(6, 7, 3, 5), top_k=4, num_local=2, width=33),
    Routing(name="four ranks, all to one expert", tokens=(6, 7, 3, 5), kind="all to one", alignment=16),
    Routing(name="four ranks, all to the last rank", tokens=(6, 7, 3, 5), kind="all to the last rank", capacity=0.7),
    Routing(name="four ranks, nothing routed", tokens=(2, 1, 0, 2), kind="none routed"),
    Routing(name="eight ranks, aligned to 128", tokens=(3, 4, 0, 2, 1, 2, 5, 1), alignment=128, num_local=1, width=2),
    Routing(name="eight ranks, too small", tokens=(3, 2, 0, 4, 1, 2, 2, 3), top_k=5, capacity=0.6, width=1),
    Routing(name="no tokens at all", tokens=(0, 0)),
]


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What every rank holds after place, put, clear padding and get; an item for each rank, buffers with guard rows."""

    plans: list[RowPlan]
    rows: list[Tensor]
    row_weights: list[Tensor]
    y: list[Tensor]
    values: list[Tensor]


def plans(ids: Sequence[Tensor], *, num_local: int, alignment: int, backend: str = "auto") -> list[RowPlan]:
    """Count on every virtual rank, hand the counts round, and place."""
    size = len(ids)
    counted = [count_pairs(ids_TK, size * num_local, backend=backend) for ids_TK in ids]
    counts_SE = torch.stack([counts_E for counts_E, _ in counted])
    return [
        place_rows(
            counts_SE, ids[index], position_TK, index=index, num_local=num_local, alignment=alignment, backend=backend
        )
        for index, (_, position_TK) in enumerate(counted)
    ]


def layouts(ids: Sequence[Tensor], *, num_local: int, alignment: int) -> list[Layout]:
    """Return the rows of each rank by the loops of the contract."""
    lists = [ids_TK.tolist() for ids_TK in ids]
    size = len(ids)
    return [
        reference_layout(lists, num_experts=size * num_local, degree=size, index=index, alignment=alignment)
        for index in range(size)
    ]


def assert_plans(found: Sequence[RowPlan], ids: Sequence[Tensor], *, num_local: int, alignment: int) -> None:
    """Raise unless the plans of all ranks are those of the contract, with these types."""
    wanted = layouts(ids, num_local=num_local, alignment=alignment)
    rank = [torch.full(ids_TK.shape, -1, dtype=torch.int32) for ids_TK in ids]
    row = [torch.full(ids_TK.shape, -1, dtype=torch.int64) for ids_TK in ids]
    for owner, layout in enumerate(wanted):
        for number, pair in enumerate(layout.pairs_R):
            if pair is not None:
                source, token, choice = pair
                rank[source][token, choice] = owner
                row[source][token, choice] = number
    need_S = torch.tensor([layout.offsets_e[-1] for layout in wanted])
    for index, plan in enumerate(found):
        total_e = torch.tensor(
            [sum(int((ids_TK == index * num_local + local).sum()) for ids_TK in ids) for local in range(num_local)]
        )
        offsets_e = torch.tensor(wanted[index].offsets_e, dtype=torch.int32)
        for name, value in (
            ("rank_TK", rank[index]),
            ("row_TK", row[index]),
            ("offsets_e", offsets_e),
            ("total_e", total_e),
            ("need_S", need_S),
        ):
            got = getattr(plan, name).cpu()
            assert got.dtype == value.dtype, (index, name, got.dtype)
            assert torch.equal(got, value), (index, name, got, value)


def tokens_and_weights(
    routing: Routing, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Return x_TD and weights_TK of each source."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for tokens in routing.tokens:
        x_TD = torch.randn(tokens, routing.width, generator=generator)
        x_TD = (x_TD * 50).to(dtype) if dtype.itemsize == 1 or not dtype.is_floating_point else x_TD.to(dtype)
        made.append((x_TD.to(device), torch.rand(tokens, routing.top_k, generator=generator).to(device)))
    return made


def capacity_of(routing: Routing, ids: Sequence[Tensor]) -> int:
    """Return C: the share of the largest need that the routing asks for."""
    wanted = layouts(ids, num_local=routing.num_local, alignment=routing.alignment)
    return int(routing.capacity * max(layout.offsets_e[-1] for layout in wanted))


def allocate(
    routing: Routing, capacity: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[list[PeerTensor], list[PeerTensor]]:
    """Return the buffers of all ranks for rows and for weights, with guard rows behind the capacity."""
    peers = virtual_peers(routing.size, device)
    rows = [peer.allocate("rows", (capacity + _GUARD, routing.width), dtype) for peer in peers]
    return rows, [peer.allocate("row weights", (capacity + _GUARD,), torch.float32) for peer in peers]


def exchange(
    routing: Routing,
    ids: Sequence[Tensor],
    sent: Sequence[tuple[Tensor, Tensor]],
    capacity: int,
    backend: str = "auto",
    buffers: tuple[list[PeerTensor], list[PeerTensor]] | None = None,
) -> Exchanged:
    """Run place, put, clear padding and get on virtual ranks, phase by phase, over buffers that hold NaN before.

    The sums are taken of twice the rows, so that what was put and what is got differ.
    """
    device, dtype = sent[0][0].device, sent[0][0].dtype
    placed = plans(ids, num_local=routing.num_local, alignment=routing.alignment, backend=backend)
    whole, whole_weights = allocate(routing, capacity, dtype, device) if buffers is None else buffers
    rows = [_without_guard(tensor, capacity) for tensor in whole]
    row_weights = [_without_guard(tensor, capacity) for tensor in whole_weights]
    for tensor in (*whole, *whole_weights):
        _poison(tensor.local)
    for (x_TD, weights_TK), plan, buffer, weights in zip(sent, placed, rows, row_weights, strict=True):
        put_rows(x_TD, weights_TK, plan, buffer, weights, backend=backend)
    for plan, buffer, weights in zip(placed, rows, row_weights, strict=True):
        clear_padding(buffer.local, weights.local, plan.offsets_e, plan.total_e, backend=backend)
    held = [tensor.local.clone() for tensor in whole]
    held_weights = [tensor.local.clone() for tensor in whole_weights]
    y = []
    if dtype.is_floating_point and dtype.itemsize > 1:
        for tensor in whole:
            tensor.local.mul_(2)
        y = [get_rows(buffer, plan, backend=backend) for buffer, plan in zip(rows, placed, strict=True)]
    values = [get_values(weights, plan, backend=backend) for weights, plan in zip(row_weights, placed, strict=True)]
    return Exchanged(plans=placed, rows=held, row_weights=held_weights, y=y, values=values)


def expected(
    routing: Routing, ids: Sequence[Tensor], sent: Sequence[tuple[Tensor, Tensor]], capacity: int
) -> Exchanged:
    """Return by the loops of the contract what `exchange` must give; everything on the CPU, without plans."""
    sent = [(x_TD.cpu(), weights_TK.cpu()) for x_TD, weights_TK in sent]
    dtype = sent[0][0].dtype
    rows, row_weights = [], []
    kept = [torch.full_like(ids_TK, -1) for ids_TK in ids]
    for layout in layouts(ids, num_local=routing.num_local, alignment=routing.alignment):
        held = replace(layout, pairs_R=layout.pairs_R[:capacity])
        for pair in held.pairs_R:
            if pair is not None:
                kept[pair[0]][pair[1:]] = 0
        by_pair = [x_TD.view(_INTEGERS[dtype.itemsize])[:, None].expand(-1, routing.top_k, -1) for x_TD, _ in sent]
        used = len(held.pairs_R)
        buffer = _poison(torch.empty(capacity + _GUARD, routing.width, dtype=dtype))
        buffer.view(_INTEGERS[dtype.itemsize])[:used] = reference_rows(held, by_pair, padding=0)
        weights = _poison(torch.empty(capacity + _GUARD))
        weights[:used] = reference_rows(held, [weights_TK for _, weights_TK in sent])
        rows.append(buffer)
        row_weights.append(weights)
    y = []
    if dtype.is_floating_point and dtype.itemsize > 1:
        y = [
            _combine(2 * x_TD[:, None].expand(-1, routing.top_k, -1), kept_TK)
            for (x_TD, _), kept_TK in zip(sent, kept, strict=True)
        ]
    values = [
        weights_TK.where(kept_TK >= 0, torch.zeros(())) for (_, weights_TK), kept_TK in zip(sent, kept, strict=True)
    ]
    return Exchanged(plans=[], rows=rows, row_weights=row_weights, y=y, values=values)


def assert_same_bits(found: Exchanged, wanted: Exchanged) -> None:
    """Raise unless every buffer, guard rows included, every sum and every value has the same bits."""
    for name in ("rows", "row_weights", "y", "values"):
        for index, (got, value) in enumerate(zip(getattr(found, name), getattr(wanted, name), strict=True)):
            assert (got.dtype, got.shape) == (value.dtype, value.shape), (name, index)
            integers = _INTEGERS[value.dtype.itemsize]
            assert torch.equal(got.to(value.device).view(integers), value.view(integers)), (name, index, got, value)


@contextmanager
def garbage_in_new_memory() -> Iterator[None]:
    """Set all bits of the memory that torch.empty and new_empty give inside the block: what is not written shows."""
    before = torch.empty, Tensor.new_empty

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, **options: _poison(make(*arguments, **options))

    torch.empty, Tensor.new_empty = (poisoned(make) for make in before)
    try:
        yield
    finally:
        torch.empty, Tensor.new_empty = before


def _combine(values_TKD: Tensor, ids_TK: Tensor) -> Tensor:
    if values_TKD.dtype != torch.float64:
        return reference_combine(values_TKD, ids_TK)
    y_TD = torch.zeros_like(values_TKD[:, 0])
    for choice in range(values_TKD.shape[1]):
        y_TD += values_TKD[:, choice] * (ids_TK[:, choice, None] >= 0)
    return y_TD


def _without_guard(tensor: PeerTensor, capacity: int) -> PeerTensor:
    assert tensor.views is not None
    return PeerTensor(
        local=tensor.local[:capacity],
        addresses_S=tensor.addresses_S,
        views=tuple(view[:capacity] for view in tensor.views),
    )


def _poison(tensor: Tensor) -> Tensor:
    # All bits set is a NaN in each floating-point type.
    tensor.detach().view(torch.uint8).fill_(0xFF)
    return tensor
