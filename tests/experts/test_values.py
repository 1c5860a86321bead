"""Values and every gradient of every back-end against float64, and the reference against loops and paper."""

import math
from collections.abc import Callable

import pytest
import torch
from coterie_experts import Activation, grouped_experts, grouped_swiglu
from coterie_experts.grouped_swiglu import reference, torch_native
from torch import Tensor

from experts.cases import CASES, Case, Tensors, gradients, loop_of_matmuls, make_tensors

BACKENDS = ("reference", "torch")
NAMES = ("y", "grad rows", "grad row_weights", "grad gate_up", "grad down")
BY_NAME = {case.name: case for case in CASES}


def run(t: Tensors, backend: str) -> tuple[Tensor, ...]:
    y = grouped_swiglu(t.rows, t.row_weights, t.offsets, t.gate_up, t.down, backend=backend)
    return (y.detach(), *gradients(y, (t.rows, t.row_weights, t.gate_up, t.down), t.grad_y))


def run_loop(t: Tensors, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    used = sum(counts)
    y = loop_of_matmuls(t.rows[:used], t.row_weights[:used], list(counts), t.gate_up, t.down)
    y = torch.cat((y, torch.zeros_like(t.rows[used:])))
    return (y.detach(), *gradients(y, (t.rows, t.row_weights, t.gate_up, t.down), t.grad_y))


def assert_within_rounding(got: tuple[Tensor, ...], plain: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """Allow twice the largest error of the plain float32 loop, and one unit in the last place of the largest value."""
    for name, one, baseline, truth in zip(NAMES, got, plain, exact, strict=True):
        assert one.shape == truth.shape, name
        if truth.numel() == 0:
            continue
        error = (one.double() - truth).abs().max().item()
        baseline_error = (baseline.double() - truth).abs().max().item()
        assert error <= 2 * baseline_error + torch.finfo(torch.float32).eps * truth.abs().max().item(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_scratch")
def test_values_and_gradients(case: Case, backend: str) -> None:
    tensors = make_tensors(case)
    exact = run_loop(tensors.differentiable(torch.float64), case.counts)
    plain = run_loop(tensors.differentiable(), case.counts)
    assert_within_rounding(run(tensors.differentiable(), backend), plain, exact)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_in_float64_equals_the_loop(case: Case) -> None:
    tensors = make_tensors(case).differentiable(torch.float64)
    for name, one, other in zip(NAMES, run(tensors, "reference"), run_loop(tensors, case.counts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14, msg=name)


def test_the_scratch_fixture_poisons(nan_scratch: None) -> None:
    x, weights = torch.ones(3, 4), torch.ones(1, 4, 4)
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(x).isnan().all()
    assert x.new_empty(2).isnan().all()
    tail = torch.nn.functional.grouped_mm(x, weights, offs=torch.tensor([2], dtype=torch.int32))[2:]
    assert tail.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend: str) -> None:
    """Two experts, width 4 with one live input and output, numbers worked out on paper.

    silu(2) = 2 / (1 + e^-2) = 1.76159416, silu(-1) = -1 / (1 + e) = -0.26894142.
    Row 0 (expert 0, x = 1, weight 0.5): gate 2, up 3, activation 5.28478247, y = 0.5 * 5.28478247 * 10 = 26.42391236.
    Row 1 (expert 1, x = 1, weight 2): gate -1, up 4, activation -1.07576569, y = 2 * -1.07576569 * 1 = -2.15153137.
    silu'(2) = s + 2 s (1 - s) with s = 0.88079708, = 1.09078425; silu'(-1) = 0.07232949 (s = 0.26894142).
    """
    gate_up = torch.zeros(2, 8, 4)
    gate_up[0, 0, 0], gate_up[0, 4, 0] = 2.0, 3.0
    gate_up[1, 0, 0], gate_up[1, 4, 0] = -1.0, 4.0
    down = torch.zeros(2, 4, 4)
    down[0, 0, 0], down[1, 0, 0] = 10.0, 1.0
    rows = torch.zeros(2, 4)
    rows[:, 0] = 1.0
    grad_y = torch.zeros(2, 4)
    grad_y[:, 0] = 1.0
    t = Tensors(
        rows=rows,
        row_weights=torch.tensor([0.5, 2.0]),
        offsets=torch.tensor([1, 2], dtype=torch.int32),
        gate_up=gate_up,
        down=down,
        grad_y=grad_y,
    ).differentiable()
    y, grad_rows, grad_weights, grad_gate_up, grad_down = run(t, backend)
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(y[:, 0], torch.tensor([26.42391236, -2.15153137]), **close)
    torch.testing.assert_close(grad_weights, torch.tensor([52.84782473, -1.07576569]), **close)
    torch.testing.assert_close(grad_down[:, 0, 0], torch.tensor([2.64239124, -2.15153137]), **close)
    # d y / d gate = weight * down * up * silu'(gate); d y / d up = weight * down * silu(gate).
    gate_slope = torch.tensor([0.5 * 10 * 3 * 1.09078425, 2 * 1 * 4 * 0.07232949])
    up_slope = torch.tensor([0.5 * 10 * 1.76159416, 2 * 1 * -0.26894142])
    torch.testing.assert_close(grad_gate_up[:, 0, 0], gate_slope, **close)
    torch.testing.assert_close(grad_gate_up[:, 4, 0], up_slope, **close)
    expected = gate_slope * torch.tensor([2.0, -1.0]) + up_slope * torch.tensor([3.0, 4.0])
    torch.testing.assert_close(grad_rows[:, 0], expected, **close)
    assert math.isclose(torch.nn.functional.silu(torch.tensor(2.0)).item(), 1.76159416, rel_tol=1e-6)


@pytest.mark.parametrize("weights_are_zero", [False, True])
def test_gradcheck_of_the_reference(weights_are_zero: bool) -> None:
    t = make_tensors(Case(name="", counts=(2, 0, 3), d_model=3, d_hidden=2, rows_past_the_end=2))
    t = t.differentiable(torch.float64)
    if weights_are_zero:
        t.row_weights = torch.zeros_like(t.row_weights).requires_grad_()

    def function(rows: Tensor, row_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return grouped_swiglu(rows, row_weights, t.offsets, gate_up, down, backend="reference")

    assert torch.autograd.gradcheck(function, (t.rows, t.row_weights, t.gate_up, t.down))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bitwise_repeatable(backend: str) -> None:
    tensors = make_tensors(BY_NAME["idle experts (E1)"])
    first = run(tensors.differentiable(), backend)
    for _ in range(20):
        for one, other in zip(first, run(tensors.differentiable(), backend), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["idle experts (E1)", "capacity rows past the end"])
def test_strides_do_not_matter(name: str, backend: str) -> None:
    tensors = make_tensors(BY_NAME[name])
    plain = run(tensors.differentiable(), backend)
    strided = tensors.differentiable()
    strided.rows = tensors.rows.T.contiguous().T.requires_grad_()
    strided.row_weights = torch.stack((tensors.row_weights, tensors.row_weights), dim=1)[:, 0].requires_grad_()
    strided.grad_y = tensors.grad_y.repeat(1, 2)[:, ::2].copy_(tensors.grad_y)
    assert not strided.rows.is_contiguous()
    assert not strided.grad_y.is_contiguous()
    for one, other in zip(plain, run(strided, backend), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def odd_address(tensor: Tensor) -> Tensor:
    # The first element of a flat buffer belongs to somebody else.
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def every_second(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, torch.full_like(tensor, math.nan)), dim=-1)[..., 0]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


PLACES = (odd_address, every_second, transposed)


@pytest.mark.parametrize("place", PLACES)
def test_rows_weights_and_main_grads_anywhere(place: Callable[[Tensor], Tensor]) -> None:
    check_places("torch", place)


def check_places(backend: str, place: Callable[[Tensor], Tensor]) -> None:
    """The same bits wherever rows, parameters, a main_grad and the gradient of the output lie in memory."""

    def found(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((9, 16), (9, 16), (2, 48, 16), (2, 16, 24))
        x, grad, up, down = (torch.randn(*shape, generator=generator) for shape in shapes)
        leaves = [place(one).requires_grad_() for one in (x, up, down)]
        leaves[1].main_grad = place(torch.zeros(2, 48, 16))
        offsets = torch.tensor([4, 9], dtype=torch.int32)
        y = grouped_experts(leaves[0], torch.ones(9), offsets, leaves[1], leaves[2], backend=backend)
        y.backward(place(grad))
        return [y.detach(), leaves[0].grad, leaves[1].main_grad, leaves[2].grad]

    assert odd_address(torch.zeros(4)).data_ptr() % 16 != 0
    for one, other in zip(found(place), found(torch.clone), strict=True):
        assert (other != 0).any()
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["idle experts (E1)", "one row", "all idle (E5)"])
def test_expanded_gradient(name: str, backend: str) -> None:
    """The gradient of a sum has strides of zero, which grouped_mm refuses; with one row `contiguous` lets it pass."""
    tensors = make_tensors(BY_NAME[name])
    t = tensors.differentiable()
    grouped_swiglu(t.rows, t.row_weights, t.offsets, t.gate_up, t.down, backend=backend).sum().backward()
    ones = tensors.differentiable()
    ones.grad_y = torch.ones_like(ones.grad_y)
    _, *expected = run(ones, backend)
    for leaf, gradient in zip((t.rows, t.row_weights, t.gate_up, t.down), expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["rows", "row_weights", "gate_up", "down"])
def test_one_gradient_alone_is_the_same(wanted: str, backend: str) -> None:
    tensors = make_tensors(BY_NAME["capacity rows past the end"])
    _, *all_of_them = run(tensors.differentiable(), backend)
    expected = dict(zip(("rows", "row_weights", "gate_up", "down"), all_of_them, strict=True))[wanted]
    getattr(tensors, wanted).requires_grad_()
    t = tensors
    y = grouped_swiglu(t.rows, t.row_weights, t.offsets, t.gate_up, t.down, backend=backend)
    (gradient,) = gradients(y, (getattr(t, wanted),), t.grad_y)
    assert torch.equal(gradient, expected)


def test_bfloat16_arithmetic_of_the_torch_back_end() -> None:
    """It is for GPUs, but its casts are the same on the CPU: no worse than the reference in bfloat16."""
    counts = (16, 0, 25, 4)
    tensors = make_tensors(Case(name="", counts=counts, d_model=16, d_hidden=24, rows_past_the_end=3))
    for name in ("rows", "gate_up", "down", "grad_y"):
        setattr(tensors, name, getattr(tensors, name).bfloat16())
    exact = run_loop(tensors.differentiable(torch.float64), counts)

    def in_bfloat16(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [
            getattr(tensors, name).clone().requires_grad_() for name in ("rows", "row_weights", "gate_up", "down")
        ]
        plain = {"activation": Activation(), "up_bias": None, "down_bias": None}
        y = function(leaves[0], leaves[1], tensors.offsets, *leaves[2:], **plain)
        return (y.detach(), *gradients(y, tuple(leaves), tensors.grad_y))

    ours, plain = in_bfloat16(torch_native.grouped_experts), in_bfloat16(reference.grouped_experts)
    for name, one, baseline, truth in zip(NAMES, ours, plain, exact, strict=True):
        assert one.dtype == (torch.float32 if name == "grad row_weights" else torch.bfloat16), name
        error, allowed = ((got.double() - truth).abs().max() for got in (one, baseline))
        assert error <= 2 * allowed, name


def test_reference_runs_in_bfloat16() -> None:
    tensors = make_tensors(BY_NAME["idle experts (E1)"])
    t = tensors.differentiable()
    rounded = [getattr(t, name).detach().bfloat16() for name in ("rows", "gate_up", "down")]
    y = grouped_swiglu(rounded[0], t.row_weights.detach(), t.offsets, *rounded[1:], backend="reference")
    exact = loop_of_matmuls(
        rounded[0].double(), t.row_weights.detach().double(), [16, 0, 25, 4, 0, 8], *(w.double() for w in rounded[1:])
    )
    assert y.dtype == torch.bfloat16
    # Three roundings to 8 bits (pre-activation, activation, output) through sums of 12 and 20 terms.
    assert (y.double() - exact).abs().max() <= 3 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
