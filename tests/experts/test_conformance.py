"""The conformance suite: every back-end of the CPU passes it, and it finds every fault that it is meant to find."""

import sys
from dataclasses import replace

import pytest
import torch
from coterie_experts import deferred, module
from coterie_experts.conformance import (
    CASES,
    TOKEN_CASES,
    Case,
    TokenCase,
    case_problems,
    conformance_problems,
    plain_experts,
    refusal,
    token_case_problems,
)
from coterie_experts.grouped_swiglu import torch_native
from coterie_experts.token_rows import TokenOrder
from torch import Tensor

BACKENDS = ("reference", "torch")
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_scratch")
def test_rows(case: Case, backend: str) -> None:
    assert refusal(backend, case, device="cpu", dtype=torch.float32) is None
    assert case_problems(backend, case) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_scratch")
def test_tokens(case: TokenCase, backend: str) -> None:
    assert token_case_problems(backend, case) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_reference_in_other_dtypes(dtype: torch.dtype) -> None:
    assert conformance_problems("reference", dtype=dtype, repeats=1) == []


def test_arithmetic_of_the_torch_back_end_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for GPUs, but its casts are the same on the CPU."""
    monkeypatch.setattr(torch_native, "obstacle", lambda **sizes: None)
    assert conformance_problems("torch", dtype=torch.bfloat16, repeats=1) == []


def test_a_back_end_that_cannot_run_swiglu_is_a_problem() -> None:
    found = conformance_problems("torch", dtype=torch.bfloat16, cases=CASES[:1], token_cases=())
    assert found == [
        "uneven: backend 'torch' cannot run: it runs torch.float32 on cpu, not torch.bfloat16; "
        "or choose backend 'auto' or 'reference'"
    ]


SOUND = torch_native.grouped_experts


def problems_with(function: object, name: str, monkeypatch: pytest.MonkeyPatch, repeats: int = 1) -> str:
    monkeypatch.setattr(torch_native, "grouped_experts", function)
    return "\n".join(case_problems("torch", BY_NAME[name], repeats=repeats))


def test_finds_wrong_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems_with(lambda rows, *rest, **more: SOUND(rows * 1.00001, *rest, **more), "uneven", monkeypatch)
    assert "uneven: values: y is off by" in found
    assert "uneven: values: rows is off by" in found
    assert "uneven: strides: y is off by" in found
    assert "repeated" not in found


def test_finds_a_wrong_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(rows: Tensor, weights: Tensor, *rest: object, **more: object) -> Tensor:
        weights = weights * 0.999 + weights.detach() * 0.001
        return SOUND(rows, weights, *rest, **more)

    found = problems_with(scaled, "uneven", monkeypatch)
    assert "values: row_weights is off by" in found
    assert "values: y" not in found


def test_finds_padding_that_is_multiplied_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiplied(rows: Tensor, weights: Tensor, offsets: Tensor, up: Tensor, down: Tensor, **more: object) -> Tensor:
        del more["deferral"]
        return plain_experts(rows, weights, offsets.diff(prepend=offsets.new_zeros(1)).tolist(), up, down, **more)

    found = problems_with(multiplied, "uneven", monkeypatch)
    assert "NaN in padding: y has other bits" in found
    assert "NaN in padding: up has other bits" in found
    assert "values" not in found


def test_finds_rows_past_the_end_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_the_end(rows: Tensor, weights: Tensor, offsets: Tensor, *rest: object, **more: object) -> Tensor:
        offsets = torch.cat((offsets[:-1], offsets.new_tensor([len(rows)])))
        return SOUND(rows, weights, offsets, *rest, **more)

    assert "values: y is off by" in problems_with(to_the_end, "past_the_end", monkeypatch)


def test_finds_bits_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def drifting(*arguments: object, **more: object) -> Tensor:
        calls.append(1)
        # One unit in the last place, in the last of many runs.
        return SOUND(*arguments, **more) * (1 + 2**-23 * (len(calls) == 20))

    found = problems_with(drifting, "uneven", monkeypatch, repeats=20)
    assert "repeated: y has other bits in" in found
    assert "values" not in found


def test_finds_idle_experts_with_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leak(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weights: Tensor) -> Tensor:
            return weights.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return torch.where(grad == 0, 1e-30, grad)

    def leaking(rows: Tensor, weights: Tensor, offsets: Tensor, up: Tensor, *rest: object, **more: object) -> Tensor:
        return SOUND(rows, weights, offsets, Leak.apply(up), *rest, **more)

    found = problems_with(leaking, "idle", monkeypatch)
    assert "the gradient of up is not zero for an expert without rows" in found


def test_finds_main_grad_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of the name of its module.
    operation = sys.modules["coterie_experts.grouped_swiglu"]
    monkeypatch.setattr(operation, "into_main_grad", lambda parameter: parameter)
    found = case_problems("torch", BY_NAME["bias"], repeats=1)
    names = ("up", "down", "up_bias", "down_bias")
    assert [p for p in found if "went to grad" in p] == [
        f"bias: main_grad: the gradient of {name} went to grad" for name in names
    ]


def test_finds_gradients_that_are_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*arguments: object, deferral: object, **more: object) -> Tensor:
        return SOUND(*arguments, deferral=None, **more)

    assert "uneven: deferred: 0 functions were handed over, not 1" in problems_with(at_once, "uneven", monkeypatch)


def test_finds_deferred_gradients_with_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = deferred.add_gradient
    monkeypatch.setattr(deferred, "add_gradient", lambda parameter, gradient: plain(parameter, gradient * (1 + 2**-23)))
    found = problems_with(SOUND, "uneven", monkeypatch)
    assert "uneven: deferred: up has other bits in" in found
    assert "uneven: deferred: down has other bits in" in found


def test_finds_a_wrong_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    def unclamped(*arguments: object, activation: object, **more: object) -> Tensor:
        return SOUND(*arguments, activation=replace(activation, limit=1e3), **more)

    assert "clamped: values: y is off by" in problems_with(unclamped, "clamped", monkeypatch)


def test_finds_another_order_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module.sum_over_choices

    def reversed_sum(rows: Tensor, order: TokenOrder) -> Tensor:
        return plain(rows, replace(order, row_of_slot_TK=order.row_of_slot_TK.flip(1)))

    monkeypatch.setattr(module, "sum_over_choices", reversed_sum)
    found = token_case_problems("torch", next(case for case in TOKEN_CASES if case.name == "tokens"))
    assert len(found) == 1
    assert found[0].startswith("tokens: in steps: y has other bits in")
