"""The Triton experts in memory that they are given, alone and behind a dispatcher, with TRITON_INTERPRET=1."""

from collections.abc import Callable

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts
from coterie_parallel import Axis, DispatchOptions
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from torch import Tensor

from trainer.test_in_place import Ask

OFFSETS_E = torch.tensor([3, 3, 8], dtype=torch.int32)
NUM_ROWS, WIDTH = 10, 16


def _experts(bias: bool = False) -> GroupedExperts:
    config = ExpertsConfig(num_experts=3, d_model=WIDTH, d_hidden=16, backend="triton", bias=bias)
    return GroupedExperts(config)


def _passed(experts: GroupedExperts, *, twice: bool = False, **asks: Ask) -> list[Tensor]:
    """Return the output and all gradients."""
    generator = torch.Generator().manual_seed(0)
    rows_RD = torch.randn(NUM_ROWS, WIDTH, generator=generator).requires_grad_()
    weights_R = torch.rand(NUM_ROWS, generator=generator).requires_grad_()
    y_RD = experts(rows_RD, weights_R, OFFSETS_E, **asks)
    inputs = rows_RD, weights_R, *experts.parameters()
    found = torch.autograd.grad(y_RD.square().sum(), inputs, retain_graph=twice)
    if twice:
        found += torch.autograd.grad(y_RD.square().sum(), inputs)
    return [y_RD, *found]


@pytest.mark.parametrize("bias", [False, True])
def test_rows_and_gradients_lie_where_they_are_asked_to(bias: bool) -> None:
    experts = _experts(bias)
    expected = _passed(experts)
    out_RD, *grads_RD = (torch.full((NUM_ROWS, WIDTH), torch.nan) for _ in range(3))
    given = iter(grads_RD)
    found = _passed(experts, twice=True, ask_out=lambda: out_RD, ask_grad_rows=lambda: next(given))
    assert found[0].data_ptr() == out_RD.data_ptr()
    second = len(expected)
    for place, memory_RD in ((1, grads_RD[0]), (second, grads_RD[1])):
        assert found[place].data_ptr() == memory_RD.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(found, expected + expected[1:], strict=True))
    nothing = _passed(experts, ask_out=lambda: None, ask_grad_rows=lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(nothing, expected, strict=True))


@pytest.mark.parametrize(
    "memory",
    [
        lambda: torch.empty(NUM_ROWS + 1, WIDTH),
        lambda: torch.empty(WIDTH, NUM_ROWS).t(),
        lambda: torch.empty(NUM_ROWS, WIDTH, dtype=torch.bfloat16),
        lambda: torch.empty(NUM_ROWS * WIDTH + 1)[1:].view(NUM_ROWS, WIDTH),
    ],
    ids=["rows", "strides", "dtype", "first byte"],
)
def test_memory_that_does_not_fit_is_refused(memory: Callable[[], Tensor]) -> None:
    with pytest.raises(ValueError, match="memory to write rows to must be contiguous"):
        _passed(_experts(), ask_out=memory)


def test_behind_a_dispatcher() -> None:
    experts, axis = _experts(), Axis.single("expert")
    dispatcher = RowwiseDispatcher(num_experts=3, axis=axis, options=DispatchOptions(capacity_factor=1.0))
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(5, WIDTH, generator=generator).requires_grad_()
    ids_TK, weights_TK = torch.tensor([[0, 1], [2, 0], [-1, 2], [1, 2], [2, 1]]), torch.rand(5, 2, generator=generator)
    weights_TK.requires_grad_()
    results, places = [], []
    for asks in (False, True, True):
        sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)

        def ask_out(sent: object = sent) -> Tensor | None:
            places.append(dispatcher.memory_for_combine(sent.handle))
            return places[-1]

        def ask_grad_rows(sent: object = sent) -> Tensor | None:
            places.append(dispatcher.memory_for_gradients(sent.handle))
            return places[-1]

        given = {"ask_out": ask_out, "ask_grad_rows": ask_grad_rows} if asks else {}
        y_TD = dispatcher.combine(experts(*sent[:3], **given), sent.handle)
        inputs = x_TD, weights_TK, *experts.parameters()
        results.append([y_TD.detach(), *torch.autograd.grad(y_TD.square().sum(), inputs)])
    assert dispatcher.grow() is None
    assert len(places) == 4
    assert all(one is not None for one in places)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
