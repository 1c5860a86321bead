"""Experts without rows, and rows that count for nothing: zeros in, zeros out, whatever the memory holds."""

import time

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, grouped_swiglu

from experts.cases import CASES, Case, Tensors, make_tensors
from experts.test_values import BACKENDS, NAMES, run

NAN = float("nan")


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_experts_have_zero_gradients(nan_scratch: None, backend: str) -> None:
    """E1, and E2: all of 8 experts busy first, so that freed memory holds numbers, then 3 of them idle."""
    for counts in ((16, 0, 25, 4, 0, 8), (9, 9, 9, 9, 9, 9, 9, 9), (9, 0, 9, 0, 9, 0, 9, 9)):
        tensors = make_tensors(Case(name="", counts=counts)).differentiable()
        for gradient in run(tensors, backend)[3:]:
            assert gradient.isfinite().all()
            assert [bool((one != 0).any()) for one in gradient] == [count > 0 for count in counts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_no_expert_has_rows(nan_scratch: None, num_rows: int, backend: str) -> None:
    """E7: the gradient is zero and never None, so that weight decay reaches every expert."""
    experts = GroupedExperts(ExpertsConfig(d_model=12, d_hidden=20, num_experts=4, backend=backend))
    before = [parameter.detach().clone() for parameter in experts.parameters()]
    rows = torch.full((num_rows, 12), NAN, requires_grad=True)
    y = experts(rows, torch.full((num_rows,), NAN), torch.zeros(4, dtype=torch.int32))
    assert torch.equal(y, torch.zeros(num_rows, 12))
    y.sum().backward()
    assert torch.equal(rows.grad, torch.zeros(num_rows, 12))
    for parameter in experts.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    torch.optim.AdamW(experts.parameters(), lr=0.01, weight_decay=0.1).step()
    for parameter, old in zip(experts.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * 0.999, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (0, 7, 0, 1), (8, 0, 0, 0)])
def test_ends_within_a_second(counts: tuple[int, ...], backend: str) -> None:
    """E5; the values are those of the case table."""
    start = time.monotonic()
    run(make_tensors(Case(name="", counts=counts)).differentiable(), backend)
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), 3e38])
def test_rows_past_the_end_do_not_leak(nan_scratch: None, garbage: float, backend: str) -> None:
    case = next(case for case in CASES if case.rows_past_the_end and any(case.counts))
    used = sum(case.counts)
    plain = make_tensors(case).differentiable()
    dirty = make_tensors(case)
    for tensor in (dirty.rows, dirty.row_weights, dirty.grad_y):
        tensor[used:] = garbage
    expected, got = run(plain, backend), run(dirty.differentiable(), backend)
    for name, one, other in zip(NAMES, got, expected, strict=True):
        assert torch.equal(one, other), name
    for one in got[:3]:
        assert torch.equal(one[used:], torch.zeros_like(one[used:]))


def with_padding(tensors: Tensors, garbage: float) -> tuple[Tensors, torch.Tensor]:
    """Put 8 rows of weight zero among 8 real ones: each of two segments of 4 rows becomes one of 8."""
    real = torch.tensor([0, 2, 5, 7, 8, 9, 10, 15])
    rows, grad_y = (torch.full((16, tensors.rows.shape[1]), garbage) for _ in range(2))
    row_weights = torch.zeros(16)
    rows[real], row_weights[real], grad_y[real] = tensors.rows, tensors.row_weights, tensors.grad_y
    padded = Tensors(
        rows=rows,
        row_weights=row_weights,
        offsets=tensors.offsets * 2,
        gate_up=tensors.gate_up,
        down=tensors.down,
        grad_y=grad_y,
    )
    return padded, real


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), 3e38])
def test_rows_of_weight_zero_do_not_leak(nan_scratch: None, garbage: float, backend: str) -> None:
    """E4: 16 slots of which 8 are dropped equal the run with 8 slots; selected, not multiplied."""
    tensors = make_tensors(Case(name="", counts=(4, 4)))
    padded, real = with_padding(tensors, garbage)
    expected, got = run(tensors.differentiable(), backend), run(padded.differentiable(), backend)
    dropped = torch.ones(16, dtype=torch.bool)
    dropped[real] = False
    for name, one, other in zip(NAMES, got, expected, strict=True):
        per_row = not name.endswith(("gate_up", "down"))
        # Zeros between the terms of a sum may change how it is blocked, so equal to rounding and not to the bit.
        torch.testing.assert_close(one[real] if per_row else one, other, rtol=1e-6, atol=1e-6, msg=name)
        if per_row and name != "grad row_weights":
            assert torch.equal(one[dropped], torch.zeros_like(one[dropped])), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient", [1.0, NAN])
def test_weight_of_a_garbage_row_has_gradient_zero(gradient: float, backend: str) -> None:
    padded, real = with_padding(make_tensors(Case(name="", counts=(4, 4))), NAN)
    padded.grad_y.nan_to_num_(nan=gradient)
    grad_weights = run(padded.differentiable(), backend)[2]
    dropped = torch.ones(16, dtype=torch.bool)
    dropped[real] = False
    assert torch.equal(grad_weights[dropped], torch.zeros(8))
    assert (grad_weights[real] != 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_of_zero_still_learns(backend: str) -> None:
    """The output is linear in the weight, so its gradient at zero is the one at any other value."""
    tensors = make_tensors(Case(name="", counts=(4, 0, 4)))
    at_one, at_zero = tensors.differentiable(), tensors.differentiable()
    at_one.row_weights = torch.ones(8).requires_grad_()
    at_zero.row_weights = torch.zeros(8).requires_grad_()
    y, grad_rows, grad_weights, grad_gate_up, grad_down = run(at_zero, backend)
    torch.testing.assert_close(grad_weights, run(at_one, backend)[2], rtol=1e-6, atol=1e-6)
    for zero in (y, grad_rows, grad_gate_up, grad_down):
        assert torch.equal(zero, torch.zeros_like(zero))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_real_nan_is_not_hidden(backend: str) -> None:
    tensors = make_tensors(Case(name="", counts=(2, 2)))
    tensors.rows[1, 3] = NAN
    t = tensors
    y = grouped_swiglu(t.rows, t.row_weights, t.offsets, t.gate_up, t.down, backend=backend)
    assert y.isnan().any(dim=1).tolist() == [False, True, False, False]
