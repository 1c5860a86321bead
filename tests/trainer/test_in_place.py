"""Experts that write where peers read: the same bits as with copies, in every recompute and kind of saved rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coterie_experts import GroupedExperts
from coterie_parallel import Mesh, ParallelConfig, make_plan
from coterie_parallel.dispatch.rowwise import exchange
from parallel.in_place import with_gradient_in, written_to
from support.interpreted import needs_triton, run_interpreted
from support.ranks import run_ranks
from torch import Tensor

from trainer.test_recompute import CHOICES, DISPATCHERS, POST_NORM, SPEC, _assert_same_bits, _is_allowed, _train

Ask = Callable[[], Tensor | None]
ROWWISE = [name for name in DISPATCHERS if name.startswith("rowwise")]


@contextmanager
def writing_in_place() -> Iterator[dict[str, int]]:
    """Let experts on a CPU write to the memory that they are given, and count that, and copies of rows to it."""
    plain_forward, plain_copy = GroupedExperts.forward, exchange.copy_used
    counts = {"outputs": 0, "gradients": 0, "copies": 0}

    def counted(ask: Ask, what: str) -> Ask:
        def found() -> Tensor | None:
            memory = ask()
            counts[what] += memory is not None
            return memory

        return found

    def forward(
        self: GroupedExperts, rows_RD: Tensor, weights_R: Tensor, offsets_e: Tensor, *, ask_out: Ask, ask_grad_rows: Ask
    ) -> Tensor:
        rows_RD = with_gradient_in(rows_RD, counted(ask_grad_rows, "gradients"))
        return written_to(plain_forward(self, rows_RD, weights_R, offsets_e), counted(ask_out, "outputs"))

    def copy_used(source_R: Tensor, *args: object, **kwargs: object) -> None:
        counts["copies"] += source_R.ndim == 2
        plain_copy(source_R, *args, **kwargs)

    GroupedExperts.forward, exchange.copy_used = forward, copy_used
    try:
        yield counts
    finally:
        GroupedExperts.forward, exchange.copy_used = plain_forward, plain_copy


def _differences(mesh: Mesh, dispatcher: str, recompute: tuple[str, ...], spec: object = SPEC) -> list[str]:
    where = f"{dispatcher}, {recompute}"
    expected = _train(mesh, recompute, dispatcher, spec=spec)
    with writing_in_place() as counts:
        found = _train(mesh, recompute, dispatcher, spec=spec)
    problems = []
    try:
        _assert_same_bits(found, expected)
    except AssertionError as error:
        problems.append(f"{where}: {error}")
    if not dispatcher.startswith("rowwise"):
        return problems if not any(counts.values()) else [*problems, f"{where}: {counts}"]
    # Two steps and an evaluation, two micro-batches and two layers each, and a step that is computed again.
    num_layers = 4 * (2 + found["replays"])
    # First rows are copied after buffers were made, and so are outputs of a layer that combines a second time: where
    # a shared expert follows, or a norm needs them.
    combines_again = "block" in recompute and (spec is POST_NORM or not DISPATCHERS[dispatcher][1].overlap)
    copies = 1 + found["replays"] + num_layers * combines_again
    wanted = {"outputs": num_layers + 4 - 1 - found["replays"], "gradients": num_layers, "copies": copies}
    return problems if counts == wanted else [*problems, f"{where}: {counts}, expected {wanted}"]


@pytest.mark.parametrize("spec", [SPEC, POST_NORM], ids=["shared expert", "post-norm"])
@pytest.mark.parametrize("dispatcher", ROWWISE)
def test_one_rank_computes_the_same_bits_and_copies_nothing(dispatcher: str, spec: object) -> None:
    with Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=30.0) as mesh:
        for recompute in ((), *CHOICES):
            if _is_allowed(recompute, DISPATCHERS[dispatcher][1]):
                assert _differences(mesh, dispatcher, recompute, spec) == []


def _on_ranks(rank: int, world: int) -> list[str]:
    """Return what differs; two ranks that share the experts."""
    with Mesh(make_plan(ParallelConfig(data=world, expert=world), world), rank, timeout_s=30.0) as mesh:
        return [
            problem
            for dispatcher, recompute in (
                ("rowwise, grows", ("block",)),
                ("rowwise, copy", ("attention", "experts", "dispatch")),
                ("rowwise, lease", ("experts",)),
                ("all_to_all", ("experts",)),
            )
            for problem in _differences(mesh, dispatcher, recompute)
        ]


def test_two_ranks_compute_the_same_bits_and_copy_nothing() -> None:
    assert run_ranks(_on_ranks, 2) == [[], []]


@needs_triton
def test_the_triton_experts_write_in_place() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_in_place.py"))
