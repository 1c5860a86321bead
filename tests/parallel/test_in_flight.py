"""Several micro-batches in flight through layers that share a dispatcher, as the schedules of a pipeline run them.

Forward passes run ahead of backward passes, evaluation comes in between, and every gradient has the bits that one
micro-batch at a time gives.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from coterie_parallel import Axis, Dispatcher, DispatchOptions, Mesh, ParallelConfig, make_dispatcher, make_plan
from coterie_parallel.dispatch.options import OVERFLOW_POLICIES
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NUM_LAYERS, NUM_EXPERTS, TOP_K, WIDTH, NUM_MICRO_BATCHES = 2, 8, 2, 6, 4
# F: forward of a micro-batch, B: its backward, E: a forward for evaluation.
GPIPE = "F0 F1 E F2 F3 E B0 B1 E B2 B3"
ONE_AT_A_TIME = "F0 B0 F1 B1 F2 B2 F3 B3"
# Name, the most micro-batches in flight, schedule, and whether the backward computes the forward again.
RUNS = [
    ("GPipe", 4, GPIPE, False),
    ("1F1B, 2 in flight", 2, "F0 F1 B0 E F2 B1 F3 E B2 B3", False),
    ("1F1B, 3 in flight", 3, "F0 F1 F2 E B0 F3 B1 E B2 B3 E", False),
    ("1F1B, 3 in flight, recomputed", 3, "F0 F1 F2 E B0 F3 B1 E B2 B3 E", True),
]
SAVED = ["copy", "lease", "fetch"]
AMPLE, SCANT = 8.0, 0.5


class Layers:
    """Two layers of experts of this rank behind one dispatcher, and the tokens of each micro-batch."""

    def __init__(self, axis: Axis) -> None:
        generator = torch.Generator().manual_seed(0)
        experts = torch.randn(NUM_LAYERS, NUM_EXPERTS, WIDTH, WIDTH, generator=generator)
        self.experts = experts.chunk(axis.size, dim=1)[axis.index].clone().requires_grad_()
        self.router = torch.randn(NUM_LAYERS, WIDTH, NUM_EXPERTS, generator=generator).requires_grad_()
        own = torch.Generator().manual_seed(1 + axis.index)
        # Each micro-batch is larger than the last, so that buffers of the "exact" policy grow on the way; the last rank
        # has no tokens in one of them.
        counts = [3 + 4 * number + axis.index for number in range(NUM_MICRO_BATCHES)]
        if axis.size > 1 and axis.index == axis.size - 1:
            counts[1] = 0
        self.tokens = [torch.randn(count, WIDTH, generator=own).requires_grad_() for count in counts]
        self.ids = [[self._ids(count, own) for _ in range(NUM_LAYERS)] for count in counts]
        self.grads = [torch.randn(count, WIDTH, generator=own) for count in counts]

    @staticmethod
    def _ids(count: int, generator: torch.Generator) -> Tensor:
        ids_TK = torch.rand(count, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
        return ids_TK.masked_fill(torch.rand(count, TOP_K, generator=generator) < 0.2, -1)

    def forward(self, dispatcher: Dispatcher, number: int, *, recompute: bool = False) -> Tensor:
        x_TD = self.tokens[number]
        for layer in range(NUM_LAYERS):
            arguments = dispatcher, layer, x_TD, self.ids[number][layer]
            if recompute:
                x_TD = checkpoint(
                    self._layer,
                    *arguments,
                    use_reentrant=False,
                    context_fn=lambda: (dispatcher.unsaved_rows(), dispatcher.unsaved_rows()),
                )
            else:
                x_TD = self._layer(*arguments)
        return x_TD

    def _layer(self, dispatcher: Dispatcher, layer: int, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        h_TD = x_TD.sin()
        weights_TK = (h_TD @ self.router[layer]).softmax(1).gather(1, ids_TK.clamp(min=0))
        sent = dispatcher.dispatch(h_TD, ids_TK, weights_TK)
        ends = [0, *sent.offsets_e.tolist()]
        with dispatcher.saved_rows(sent.handle):
            parts = [
                (sent.rows_RD[start:end] @ weight_DD).tanh() * sent.row_weights_R[start:end].unsqueeze(1)
                for start, end, weight_DD in zip(ends, ends[1:], self.experts[layer], strict=False)
            ]
        rest_RD = torch.full((len(sent.rows_RD) - ends[-1], WIDTH), torch.nan)
        return x_TD + dispatcher.combine(torch.cat([*parts, rest_RD]), sent.handle)

    def run(self, dispatcher: Dispatcher, schedule: str, *, recompute: bool = False) -> list[Tensor]:
        """Run a schedule and return the outputs and all gradients."""
        outputs: dict[int, Tensor] = {}
        found: list[Tensor] = []
        for one in (*self.tokens, self.experts, self.router):
            one.grad = None
        for what, *number in schedule.split():
            if what == "F":
                outputs[int(number[0])] = self.forward(dispatcher, int(number[0]), recompute=recompute)
            elif what == "B":
                output = outputs.pop(int(number[0]))
                found.append(output.detach().clone())
                output.backward(self.grads[int(number[0])])
            else:
                with torch.no_grad():
                    self.forward(dispatcher, 0)
        assert not outputs
        grads = [one.grad for one in (*self.tokens, self.experts, self.router)]
        return found + [grad for grad in grads if grad is not None]


def _in_flight(axis: Axis, name: str, options: DispatchOptions) -> Iterator[str]:
    """Yield every difference to a run with one micro-batch at a time."""
    layers = Layers(axis)
    is_dropping = options.overflow == "drop"
    plain = _make(name if is_dropping else "all_to_all", axis, options, layers)
    expected = layers.run(plain, ONE_AT_A_TIME)
    assert len(expected) == 2 * NUM_MICRO_BATCHES + 2
    assert all(float(one.abs().sum()) > 0 for one in expected if one.numel())
    dropped = [_dropped(plain)]
    layers.run(plain, "E")
    dropped.append(_dropped(plain))
    plain.close()
    for title, depth, schedule, recompute in RUNS:
        what = f"{name}, {options}, {title}"
        dispatcher = _make(name, axis, options, layers)
        found = layers.run(dispatcher, schedule, recompute=recompute)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(one, other):
                yield f"{what}: tensor {number} differs"
        counted, wanted = _dropped(dispatcher), dropped[0] + schedule.count("E") * (dropped[1] - dropped[0])
        if is_dropping and not recompute and not 0 < counted == wanted:
            yield f"{what}: {counted} rows were dropped, and {wanted} one at a time"
        if isinstance(dispatcher, RowwiseDispatcher):
            yield from _buffer_problems(dispatcher, what, 0 if recompute else depth * NUM_LAYERS)
        if dispatcher.grow() is not None:
            yield f"{what}: rows found no room"
        dispatcher.close()


def _dropped(dispatcher: Dispatcher) -> int:
    return int(dispatcher.counters().get("rows_dropped", 0))


def _buffer_problems(dispatcher: RowwiseDispatcher, what: str, num_leases: int) -> Iterator[str]:
    assert dispatcher._exchange is not None
    buffers = dispatcher._exchange.buffers
    if buffers.held():
        yield f"{what}: leases are held after all backward passes: {buffers.held()}"
    made = sum(len(pool) for pool in buffers._pool.values())
    # What is dispatched in evaluation or computed again borrows a buffer until it has arrived.
    if dispatcher.options.saved_rows == "lease" and made > num_leases + 1:
        yield f"{what}: {made} leased buffers for {num_leases} dispatches in flight"


def _make(name: str, axis: Axis, options: DispatchOptions, layers: Layers, *, is_small: bool = False) -> Dispatcher:
    wanted = options if name == "rowwise" else DispatchOptions()
    dispatcher = make_dispatcher(name, num_experts=NUM_EXPERTS, axis=axis, alignment=2, options=wanted)
    dispatcher.grow()
    if wanted.overflow != "exact" and name == "rowwise" and not is_small:
        # Buffers have room for the first batch and little more; with "exact" they grow on the way.
        with torch.no_grad():
            layers.forward(dispatcher, NUM_MICRO_BATCHES - 1)
    return dispatcher


def _options(overflows: Sequence[str]) -> Iterator[tuple[str, DispatchOptions]]:
    yield "all_to_all", DispatchOptions()
    for saved_rows in SAVED:
        for overflow in overflows:
            factor = AMPLE if overflow == "grow" else SCANT
            yield "rowwise", DispatchOptions(saved_rows=saved_rows, overflow=overflow, capacity_factor=factor)  # type: ignore[arg-type]


def _on_ranks(rank: int, world: int) -> list[str]:
    with Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=30) as mesh:
        axis = mesh.axis("expert")
        cases = _options(OVERFLOW_POLICIES if world == 2 else ["exact"])
        problems = [problem for name, options in cases for problem in _in_flight(axis, name, options)]
        return problems + list(_step_again(axis))


def _step_again(axis: Axis) -> Iterator[str]:
    """Yield what is wrong with a step that overflows with micro-batches in flight, and is run again."""
    layers = Layers(axis)
    expected = layers.run(_make("all_to_all", axis, DispatchOptions(), layers), GPIPE)
    for saved_rows in SAVED:
        options = DispatchOptions(saved_rows=saved_rows, capacity_factor=SCANT)  # type: ignore[arg-type]
        dispatcher = _make("rowwise", axis, options, layers, is_small=True)
        said = []
        while len(said) < 5:
            found = layers.run(dispatcher, GPIPE)
            said.append(dispatcher.grow())
            if said[-1] is None:
                break
        if len(said) < 2:
            yield f"{saved_rows}: nothing overflowed"
        if not all(map(torch.equal, found, expected)):
            yield f"{saved_rows}: the step that was run again differs"
        if dispatcher.counters()["overflowed"]:
            yield f"{saved_rows}: still counted as an overflow"
        dispatcher.close()


@pytest.mark.parametrize("world", [2, 4])
def test_micro_batches_in_flight_on_several_ranks(world: int) -> None:
    for rank, problems in enumerate(run_ranks(_on_ranks, world)):
        assert problems == [], rank


def test_micro_batches_in_flight_on_one_rank() -> None:
    axis = Axis.single("expert")
    cases: list[tuple[str, Any]] = [("local", DispatchOptions()), *_options(OVERFLOW_POLICIES)]
    assert [problem for name, options in cases for problem in _in_flight(axis, name, options)] == []
    assert list(_step_again(axis)) == []
