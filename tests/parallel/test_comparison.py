"""The comparison of dispatchers counts what it says, and the conformance command finds faults."""

import importlib
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from coterie_parallel import Axis, Dispatched
from coterie_parallel.comparison import (
    ROUTINGS,
    DispatchSizes,
    compare_dispatchers,
    comparison_problems,
    comparison_table,
    routed_ids,
)
from coterie_parallel.conformance.report import main
from coterie_parallel.dispatch import registry
from coterie_parallel.dispatch.all_to_all import AllToAllDispatcher
from coterie_parallel.dispatch.local import LocalDispatcher
from coterie_parallel.local_ranks import run_on_local_ranks
from torch import Tensor

_SIZES = DispatchSizes(num_tokens=6, width=8, num_experts=4, top_k=2)


class Doubles(LocalDispatcher):
    """Returns twice the sum."""

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return 2 * super().combine(rows_RD, handle)


class Reads(LocalDispatcher):
    """Reads three more numbers on the host, in three ways."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        ids_TK.sum().item()
        ids_TK.tolist()
        int(torch.nonzero(ids_TK).shape[0])
        return super().dispatch(x_TD, ids_TK, weights_TK)


class Copies(LocalDispatcher):
    """Writes the tokens once more."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        return super().dispatch(x_TD.clone(), ids_TK, weights_TK)


class FailsOnLast(AllToAllDispatcher):
    """Is wrong on one rank, whose peer waits for it."""

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        if self.axis.index == self.axis.size - 1:
            raise RuntimeError("out of luck")
        return super().combine(rows_RD, handle)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (Doubles, Reads, Copies):
        monkeypatch.setitem(registry._BUILT_IN, found.__name__, f"{__name__}:{found.__name__}")
    monkeypatch.setattr(registry, "import_module", lambda name: _modules(name))


def _modules(name: str) -> Any:
    here = types.SimpleNamespace(Doubles=Doubles, Reads=Reads, Copies=Copies)
    return here if name == __name__ else importlib.import_module(name)


@pytest.mark.usefixtures("_registered")
def test_what_is_counted_on_one_rank() -> None:
    rows = compare_dispatchers(Axis.single("expert"), ["local", "Reads", "Copies", "Doubles"], ["random"], _SIZES, 1)
    local, reads, copies, doubles = rows
    assert [row.agrees for row in rows] == [True, True, True, False]
    assert doubles.largest_difference > 0.1
    assert local.sent_bytes == 0
    assert reads.host_reads - local.host_reads == 3
    # The tokens: 6 x 8 numbers of 4 bytes; 12 rows arrive.
    assert copies.written_bytes - local.written_bytes == 192
    assert copies.passes - local.passes == pytest.approx(192 / (12 * 32))
    assert "differs by up to" in comparison_table(rows).splitlines()[-1]


def test_bytes_to_other_ranks() -> None:
    """Two experts a rank, balanced: token t chooses experts 2t and 2t + 1 modulo 4, so every second one is away."""
    for row in run_on_local_ranks(compare_dispatchers, 2, ["all_to_all"], ["balanced"], _SIZES, 1)[0]:
        # 6 of 12 rows of each rank travel, 4 times 32 bytes, and a weight and its gradient of 4 bytes.
        assert row.sent_bytes == 6 * (4 * 32 + 2 * 4)
        assert row.agrees


def test_a_shared_expert_runs_last_and_overlapped() -> None:
    sizes = DispatchSizes(num_tokens=6, width=8, num_experts=4, top_k=2, shared_hidden=16)
    rows = compare_dispatchers(Axis.single("expert"), ["local", "rowwise"], ["random"], sizes, 1)
    (alone,) = compare_dispatchers(Axis.single("expert"), ["local"], ["random"], replace(sizes, shared_hidden=0), 1)
    assert [row.dispatcher for row in rows] == ["local", "local + overlap", "rowwise", "rowwise + overlap"]
    assert all(row.agrees for row in rows)
    last, overlapped = rows[:2]
    assert overlapped.written_bytes == last.written_bytes
    # At least the two products, the two gradients of each and the sum with the experts' output.
    assert last.written_bytes - alone.written_bytes >= 4 * (6 * 16 + 6 * 8 + 6 * 16 + 6 * 8 + 2 * 8 * 16 + 6 * 8)


def test_buffers_grow_before_anything_is_compared() -> None:
    """Rank 0 of 4 has the first 16 of 64 experts, 71 % of 512 pairs; its buffer begins with room for 256."""
    sizes = DispatchSizes(num_tokens=128, width=4, num_experts=64, top_k=1)
    rows = run_on_local_ranks(compare_dispatchers, 4, ["all_to_all", "rowwise"], ["skewed"], sizes, 1)[0]
    assert [row.agrees for row in rows] == [True, True]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing: str) -> None:
    sizes = DispatchSizes(num_tokens=4000, width=1, num_experts=8, top_k=2)
    ids_TK = routed_ids(routing, sizes, source=3)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    share_E = torch.bincount(ids_TK.flatten(), minlength=8) / 8000
    if routing == "balanced":
        assert torch.equal(share_E, torch.full((8,), 0.125))
    elif routing == "random":
        assert (share_E - 0.125).abs().max() < 0.015
    else:
        # Without replacement, the first of weights 1, 1/2, ... 1/8 is in about 6 of 10 pairs.
        assert 0.25 < share_E[0] < 0.35
        assert (share_E[:-1] > share_E[1:]).all()


def test_every_fault_is_in_one_report() -> None:
    sizes = DispatchSizes(num_tokens=0, num_experts=4, top_k=5)
    assert comparison_problems(["local", "nobody"], ["even"], sizes, 3) == [
        "num_tokens (0) must be at least 1",
        "top_k (5) must be at most num_experts (4)",
        "num_experts (4) must be a multiple of the number of ranks (3)",
        "routing ('even') must be one of balanced, random, skewed",
        'dispatcher "local" needs an expert degree of 1, got 3; use dispatcher "all_to_all", or set expert to 1',
        *comparison_problems(["nobody"], [], DispatchSizes(), 1),
    ]


@pytest.mark.usefixtures("_registered")
def test_the_conformance_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "--ranks", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 26
    assert lines[4] == "  - sums over the rows of a token: fp32 in k order, rounded once (checked bit for bit)"
    assert "19 of 19 cases right" in lines[-1]
    assert main(["Doubles", "--ranks", "1", "--case", "uneven", "--case", "no_tokens"]) == 1
    text = capsys.readouterr().out
    assert "FAIL uneven" in text
    assert "y_TD is wrong first at" in text
    assert "ok   no_tokens" in text
    assert "1 of 2 cases right" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nobody"], "is unknown; known:"),
        (["local", "--ranks", "2"], "needs an expert degree of 1"),
        (["local", "--ranks", "0"], "must be at least 1"),
        (["no_module_here:Theirs"], "No module named 'no_module_here'"),
        ([f"{__name__}:DispatchSizes"], "must be a subclass of coterie_parallel.Dispatcher"),
        (["local", "--option", "overflow=exact"], "overflow ('exact') does nothing"),
        (["rowwise", "--option", "overflow=wait"], "overflow ('wait') must be one of"),
        (
            ["rowwise", "--option", "room=2"],
            "--option ('room=2') must be KEY=VALUE with one of the keys overflow, capa",
        ),
        (["rowwise", "--option", "overlap=1"], "must have the value true or false"),
        (["rowwise", "--option", "capacity_factor=much"], "must have a number as its value"),
        (["rowwise", "--option", "saved_rows=copy", "--option", "saved_rows=lease"], "is given twice"),
        (["rowwise", "--option", "overlap=true", "--option", "overlap=false"], "is given twice"),
        (["rowwise", "--timeout-s", "0"], "--timeout-s (0) must be above 0"),
    ],
)
def test_the_conformance_command_refuses(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert text in capsys.readouterr().err


def test_the_conformance_command_takes_a_class_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--option", "overflow=exact", "--option", "saved_rows=lease", "--option", "capacity_factor=1.0"]
    name = "coterie_parallel.dispatch.rowwise.dispatcher:RowwiseDispatcher"
    assert main([name, "--ranks", "1", "--case", "reuse", *options]) == 0
    assert "1 of 1 cases right" in capsys.readouterr().out


def test_ranks_that_do_not_meet_any_more_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"{__name__}:FailsOnLast", "--ranks", "2", "--timeout-s", "5"]
    assert main([*arguments, "--case", "uneven", "--case", "no_tokens"]) == 1
    text = capsys.readouterr().out
    assert "FAIL uneven" in text
    assert "uneven, rank 1: raises RuntimeError: out of luck" in text
    assert "the ranks do not meet any more, so no further case is run" in text
    assert "not run no_tokens" in text
    assert "0 of 2 cases right" in text
