"""The conformance suite finds what it is there to find."""

from typing import Any

import pytest
import torch
from coterie_parallel import Axis, Dispatched, DispatchOptions
from coterie_parallel.conformance import CASES, conformance_problems
from coterie_parallel.dispatch.local import LocalDispatcher
from torch import Tensor


class _OtherOrder(LocalDispatcher):
    """Rows of one expert in the order of the tokens from the last to the first."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        return super().dispatch(x_TD.flip(0), ids_TK.flip(0), weights_TK.flip(0))

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD, handle).flip(0)


class _Average(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD, handle) / 2


class _NoWeightGradient(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        return sent._replace(row_weights_R=sent.row_weights_R.detach() + 0 * weights_TK.sum())


class _DirtyPadding(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        padding_R = (sent.row_weights_R == 0).unsqueeze(1)
        return sent._replace(rows_RD=sent.rows_RD.masked_fill(padding_R, 1))


class _LongOffsets(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        return sent._replace(offsets_e=sent.offsets_e.long())


class _ReadsPadding(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD + 0 * rows_RD.sum(), handle)


class _LowPrecisionSum(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        y_TD = torch.zeros(handle.row_TK.shape[0], rows_RD.shape[1], dtype=rows_RD.dtype)
        for row_T in handle.row_TK.unbind(1):
            y_TD = y_TD + rows_RD[row_T].nan_to_num() * (row_T >= 0).unsqueeze(1)
        return y_TD


class _LatestMaps:
    def __init__(self, dispatcher: "_SharedMaps") -> None:
        self.dispatcher = dispatcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher.latest, name)


class _SharedMaps(LocalDispatcher):
    """Has one set of maps for all layers: right going forward, wrong in the backward of all but the last."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        self.latest = sent.handle
        return sent

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD, _LatestMaps(self))


class _SharedBuffer(LocalDispatcher):
    """Uses one buffer for the rows of all layers, so that rows which autograd saved change behind its back."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        if hasattr(self, "rows_RD"):
            self._write_over(self.rows_RD)
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        self.rows_RD = sent.rows_RD
        return sent

    def _write_over(self, rows_RD: Tensor) -> None:
        rows_RD.data.fill_(torch.nan)


class _SharedBufferThatTells(_SharedBuffer):
    def _write_over(self, rows_RD: Tensor) -> None:
        rows_RD.detach().fill_(torch.nan)


class _NoPartialGradients(LocalDispatcher):
    """Is right as a whole and wrong in two parts."""

    def combine_finish(self, pending: Any) -> Tensor:
        return 2 * super().combine_finish(pending)


class _Drops(LocalDispatcher):
    def counters(self) -> dict[str, Tensor]:
        return {"rows_dropped": torch.tensor(3)}


class _NeverEnough(LocalDispatcher):
    def grow(self) -> str | None:
        return "more room is needed"


class _OnlyUnaligned(LocalDispatcher):
    @classmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        return None if alignment == 1 else f"alignment {alignment} is not there"


class _ChangesTokens(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD.clone(), ids_TK, weights_TK.clone())
        for changed in (x_TD.data, ids_TK, weights_TK.data):
            changed.zero_()
        return sent


class _Raises(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        raise KeyError("lost")


class _OneWidth(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        self.width = getattr(self, "width", x_TD.shape[1])
        assert x_TD.shape[1] == self.width, "another width"
        return super().dispatch(x_TD, ids_TK, weights_TK)


class _EightTimes(LocalDispatcher):
    num_dispatches = 0

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        self.num_dispatches += 1
        return super().dispatch(x_TD if self.num_dispatches <= 8 else 2 * x_TD, ids_TK, weights_TK)


class _WantsContiguousRows(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD.as_strided(rows_RD.shape, (rows_RD.shape[1], 1)), handle)


class _WrongWhenRecomputed(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        is_recomputed = torch._C._current_graph_task_id() != -1
        return super().dispatch(2 * x_TD if is_recomputed else x_TD, ids_TK, weights_TK)


class _LendsTheRows(LocalDispatcher):
    """Lends memory for the outputs where the rows lie that experts save."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        sent = super().dispatch(x_TD, ids_TK, weights_TK)
        self.rows_RD = sent.rows_RD
        return sent

    def memory_for_combine(self, handle: Any) -> Tensor | None:
        return self.rows_RD.data


class _TakesDetachedRows(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return super().combine(rows_RD if rows_RD.requires_grad else rows_RD.clone().requires_grad_(), handle)


class _TakesAnyHandle(LocalDispatcher):
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        return handle.owner.__class__.__base__.combine(handle.owner, rows_RD, handle)


class _OtherErrors(LocalDispatcher):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        if ids_TK.dtype != torch.int64:
            raise TypeError("int64, please")
        return super().dispatch(x_TD, ids_TK, weights_TK)


@pytest.mark.parametrize(
    ("broken", "case", "problem"),
    [
        (_OtherOrder, "uneven", "rows_RD is wrong first at (0, 0)"),
        (_Average, "uneven", "y_TD is wrong"),
        (_Average, "uneven", "gradient of the rows is wrong"),
        (_NoWeightGradient, "uneven", "gradient of the weights is wrong"),
        (_DirtyPadding, "aligned_16", "rows_RD is wrong"),
        (_LongOffsets, "uneven", "offsets_e is torch.int64 of shape (4,), expected torch.int32"),
        (_ReadsPadding, "aligned_128", "y_TD is wrong"),
        (_LowPrecisionSum, "bfloat16", "y_TD is wrong"),
        (_SharedMaps, "uneven", "gradient of the rows is wrong"),
        (_OnlyUnaligned, "aligned_16", "not supported: alignment 16 is not there"),
        (_SharedBuffer, "uneven", "layer 0: gradient of the tokens through saved rows is wrong"),
        (_SharedBufferThatTells, "uneven", "rows that the experts saved for the backward pass were written over"),
        (_NoPartialGradients, "uneven", "uneven, layer 1, rank 0: y_TD is wrong"),
        (_ChangesTokens, "uneven", "x_TD after the dispatch is wrong"),
        (_ChangesTokens, "uneven", "ids_TK after the dispatch is wrong"),
        (_ChangesTokens, "uneven", "weights_TK after the dispatch is wrong"),
        (_Raises, "uneven", "uneven, rank 0: raises KeyError: 'lost'"),
        (_OneWidth, "reuse", "reuse, rank 0: raises AssertionError: another width"),
        (_EightTimes, "reuse", "reuse, batch 'long', layer 0, rank 0: rows_RD is wrong"),
        (_WantsContiguousRows, "reuse", "rank 0: y_TD without gradients is wrong"),
        (_WrongWhenRecomputed, "reuse", "layer 1: gradient of the tokens through recomputed rows is wrong"),
        (_LendsTheRows, "reuse", "gradient of the tokens through saved rows, outputs written in place is wrong"),
        (_TakesDetachedRows, "refusals", "rows cut off from the graph: not refused with a ValueError"),
        (_TakesAnyHandle, "refusals", "the handle of another dispatcher: not refused with a ValueError"),
        (_OtherErrors, "refusals", "ids in int32: raises TypeError instead of ValueError: int64, please"),
        (_Drops, "uneven", "uneven: the options leave no room for all rows, 3 were dropped"),
        (_NeverEnough, "uneven", "uneven: still without room for all rows after 5 attempts: more room is needed"),
    ],
)
def test_a_broken_dispatcher_is_found(broken: type[LocalDispatcher], case: str, problem: str) -> None:
    found = conformance_problems(broken, Axis.single("expert"), cases=[one for one in CASES if one.name == case])
    assert any(problem in one for one in found), found


def test_options_reach_the_dispatcher() -> None:
    options = DispatchOptions(saved_rows="lease")
    seen = []

    class Seen(LocalDispatcher):
        @classmethod
        def option_problems(cls, options: DispatchOptions, *, top_k: int | None = None) -> list[str]:
            return options.problems(top_k)

        def close(self) -> None:
            seen.append(self.options)

    assert conformance_problems(Seen, Axis.single("expert"), cases=CASES[:2], options=options) == []
    assert seen == [options, options]


def test_a_case_that_raises_does_not_keep_the_next_one_from_running() -> None:
    found = conformance_problems(_Raises, Axis.single("expert"), cases=CASES[:2])
    assert found == [f"{case.name}, rank 0: raises KeyError: 'lost'" for case in CASES[:2]]


def test_no_case_has_the_name_of_another() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
