"""`forward_tokens`: the order of rows, the order of the sum, and choices that are not routed."""

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, order_by_expert
from coterie_experts.token_rows import rows_from_tokens, sort_slots, sum_over_choices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experts.cases import gradients, loop_over_tokens
from experts.test_values import BACKENDS


def build(num_experts: int, backend: str, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    config = ExpertsConfig(d_model=12, d_hidden=20, num_experts=num_experts, backend=backend)
    return GroupedExperts(config, dtype=dtype)


def make_batch(num_tokens: int, num_choices: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, grad_y = (torch.randn(num_tokens, 12, generator=generator) for _ in range(2))
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :num_choices].contiguous()
    weights = torch.rand(num_tokens, num_choices, generator=generator) + 0.1
    return x.requires_grad_(), ids, weights.requires_grad_(), grad_y


def by_hand(experts: GroupedExperts, x: Tensor, ids: Tensor, weights: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """Dispatch in the order (expert, token, choice), `forward`, sum in the order of k, one row at a time."""
    slots = [(t, k) for e in range(experts.num_local_experts) for t, k in (ids == e).nonzero().tolist()]
    counts = [(ids == e).sum().item() for e in range(experts.num_local_experts)]
    place = {slot: row for row, slot in enumerate(slots)}
    rows = x.detach()[[t for t, _ in slots]].requires_grad_()
    row_weights = torch.stack([weights.detach()[slot] for slot in slots]).requires_grad_()
    out = experts(rows, row_weights, torch.tensor(counts).cumsum(0).to(torch.int32))
    grad_rows, grad_row_weights = gradients(out, (rows, row_weights), grad_y[[t for t, _ in slots]])
    y, grad_x, grad_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            if (t, k) in place:
                y[t] = y[t] + out[place[t, k]]
                grad_x[t] = grad_x[t] + grad_rows[place[t, k]]
                grad_weights[t, k] = grad_row_weights[place[t, k]]
    return y.detach(), grad_x.detach(), grad_weights.detach()


def run(experts: GroupedExperts, x: Tensor, ids: Tensor, weights: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    y = experts.forward_tokens(x, ids, weights)
    return (y.detach(), *gradients(y, (x, weights), grad_y))


SHAPES = ((10, 2, 4), (1, 1, 1), (1, 3, 3), (7, 5, 5), (33, 3, 8), (12, 1, 6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_dropped", [0, 3])
@pytest.mark.parametrize(("num_tokens", "num_choices", "num_experts"), SHAPES)
@pytest.mark.usefixtures("nan_scratch")
def test_equals_dispatch_forward_sum_bit_for_bit(
    num_tokens: int, num_choices: int, num_experts: int, num_dropped: int, backend: str
) -> None:
    """Covers K = E, E = 1, one row; with 3 choices of 20 set to -1 it is E9."""
    experts = build(num_experts, backend)
    x, ids, weights, grad_y = make_batch(num_tokens, num_choices, num_experts)
    if num_dropped < ids.numel():
        ids.view(-1)[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(1))[:num_dropped]] = -1
    expected = by_hand(experts, x, ids, weights, grad_y)
    for one, other in zip(run(experts, x, ids, weights, grad_y), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_loop_that_skips(backend: str) -> None:
    """E9: 10 tokens, top-2, 3 of 20 ids are -1; also against a loop that shares no code."""
    experts = build(4, backend)
    x, ids, weights, grad_y = make_batch(10, 2, 4)
    ids[0, 1] = ids[3, 0] = ids[9, 1] = -1
    got = run(experts, x, ids, weights, grad_y)
    loop = loop_over_tokens(x, ids, weights, experts.gate_up, experts.down)
    expected = (loop.detach(), *gradients(loop, (x, weights), grad_y))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert got[2][ids == -1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unrouted_tokens_may_hold_nan(nan_scratch: None, backend: str) -> None:
    experts = build(4, backend)
    x, ids, weights, grad_y = make_batch(6, 2, 4)
    ids[4] = -1
    ids[2, 0] = -1
    clean = run(experts, x, ids, weights, grad_y)
    with torch.no_grad():
        x[4] = float("nan")
        weights[ids == -1] = float("nan")
    for one, other in zip(run(experts, x, ids, weights, grad_y), clean, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(clean[0][4], torch.zeros(12))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_tokens", "drop_all"), [(0, False), (5, True)])
def test_nothing_is_routed(nan_scratch: None, num_tokens: int, drop_all: bool, backend: str) -> None:
    experts = build(4, backend)
    x, ids, weights, grad_y = make_batch(num_tokens, 2, 4)
    if drop_all:
        ids.fill_(-1)
    y = experts.forward_tokens(x, ids, weights)
    (y * grad_y).sum().backward()
    for zero in (y, x.grad, weights.grad, experts.gate_up.grad, experts.down.grad):
        assert torch.equal(zero, torch.zeros_like(zero))


def test_small_order_by_hand() -> None:
    """Tokens choose (2, 0), (0, -1), (2, 1): expert 0 gets slots 1, 2; expert 1 slot 5; expert 2 slots 0, 4; 3 none."""
    order = order_by_expert(torch.tensor([[2, 0], [0, -1], [2, 1]]), 4)
    assert order.slot_of_row_N.tolist() == [1, 2, 5, 0, 4, 3]
    assert order.row_of_slot_TK.tolist() == [[3, 0], [1, 5], [4, 2]]
    assert order.offsets_e.tolist() == [2, 3, 5, 5]
    assert order.offsets_e.dtype == torch.int32


@given(st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), min_size=0, max_size=12))
@settings(max_examples=50, deadline=None)
def test_order_is_the_sorted_list(ids: list[list[int]]) -> None:
    order = order_by_expert(torch.tensor(ids, dtype=torch.int64).view(-1, 3), 5)
    flat = [one for row in ids for one in row]
    expected = sorted(range(len(flat)), key=lambda slot: (flat[slot] if flat[slot] >= 0 else 5, slot))
    assert order.slot_of_row_N.tolist() == expected
    assert order.slot_of_row_N[order.row_of_slot_TK.flatten()].tolist() == list(range(len(flat)))
    assert order.offsets_e.tolist() == [sum(0 <= one <= e for one in flat) for e in range(5)]


def test_sum_rounds_once_in_bfloat16() -> None:
    """Three choices of one token: the sum is taken in float32 and rounded at the end."""
    experts = build(3, "reference", torch.bfloat16)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[2, 0, 1]] * 8)
    weights = torch.rand(8, 3, generator=torch.Generator().manual_seed(1))
    singles = []
    for k in range(3):
        expert = ids[0, k].item()
        offsets = torch.tensor([8 if e >= expert else 0 for e in range(3)], dtype=torch.int32)
        singles.append(experts(x, weights[:, k], offsets).float())
    expected = (singles[0] + singles[1] + singles[2]).bfloat16()
    assert torch.equal(experts.forward_tokens(x, ids, weights), expected)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([[256], [1]]), "ids must be -1 to 3, but go from 1 to 256"),
        (torch.tensor([[4]]), "ids must be -1 to 3, but go from 4 to 4"),
        (torch.tensor([[-2]]), "ids must be -1 to 3, but go from -2 to -2"),
        (torch.tensor([[1.0]]), "ids must be torch.int64, but are torch.float32"),
        (torch.tensor([1, 2]), r"ids must have shape \(T, K\), but have \(2,\)"),
    ],
)
def test_wrong_ids_are_refused(ids: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        order_by_expert(ids, 4)


@pytest.mark.parametrize("num_experts", [3, 255, 256, 40_000])
def test_ids_that_no_expert_has_are_not_routed_where_nobody_looks(num_experts: int) -> None:
    """A key of 8 bits would take 256 for 0."""
    ids = torch.tensor([[num_experts], [0], [256 + num_experts], [num_experts - 1], [-1], [2**40]])
    slots, offsets = sort_slots(ids, num_experts)
    assert slots.tolist() == [1, 3, 0, 2, 4, 5]
    assert offsets.tolist() == [1] * (num_experts - 1) + [2]


def test_an_order_of_other_tokens_is_refused() -> None:
    order = order_by_expert(torch.tensor([[0], [1]]), 3)
    for number in (1, 3):
        with pytest.raises(ValueError, match=rf"tokens must have shape \(2, D\), .* not \({number}, 4\)"):
            rows_from_tokens(torch.ones(number, 4), order)
        with pytest.raises(ValueError, match=rf"rows must have shape \(2, D\), .* not \({number}, 4\)"):
            sum_over_choices(torch.ones(number, 4), order)
    with pytest.raises(ValueError, match=r"num_experts \(0\) must be from 1 to 2147483647"):
        order_by_expert(torch.tensor([[0]]), 0)
