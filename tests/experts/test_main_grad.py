"""Gradients in `main_grad`, the float32 accumulator beside the parameter."""

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, SharedExpert
from torch import nn

from experts.test_values import BACKENDS

OFFSETS = torch.tensor([4, 4, 9], dtype=torch.int32)


def build(backend: str, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    return GroupedExperts(ExpertsConfig(d_model=12, d_hidden=20, num_experts=3, backend=backend), dtype=dtype)


def run(experts: GroupedExperts, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, grad_y = (torch.randn(9, 12, generator=generator).to(experts.gate_up.dtype) for _ in range(2))
    weights = torch.rand(9, generator=generator)
    (experts(rows, weights, OFFSETS) * grad_y).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulates_in_main_grad_and_leaves_grad_alone(backend: str) -> None:
    plain, with_main = build(backend), build(backend)
    for parameter in with_main.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.5)
    for seed in (1, 2):
        run(plain, seed)
        run(with_main, seed)
    for one, other in zip(plain.parameters(), with_main.parameters(), strict=True):
        assert other.grad is None
        torch.testing.assert_close(other.main_grad, one.grad + 0.5, rtol=1e-6, atol=1e-6)
        assert torch.equal(other.main_grad[1], torch.full_like(other[1], 0.5))


def test_sum_is_in_float32_when_the_parameter_is_bfloat16() -> None:
    experts = build("reference", torch.bfloat16)
    singles = []
    for seed in (1, 2, 3):
        experts.zero_grad()
        run(experts, seed)
        singles.append(experts.down.grad.float())
    experts.zero_grad()
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    for seed in (1, 2, 3):
        run(experts, seed)
    assert torch.equal(experts.down.main_grad, singles[0] + singles[1] + singles[2])
    # The sum has bits that bfloat16 would have lost.
    assert not torch.equal(experts.down.main_grad, experts.down.main_grad.bfloat16().float())


def test_one_parameter_with_and_one_without() -> None:
    experts = build("torch")
    experts.down.main_grad = torch.zeros_like(experts.down)
    run(experts, 1)
    assert experts.down.grad is None
    assert experts.gate_up.grad is not None
    assert experts.down.main_grad.abs().sum() > 0


@pytest.mark.parametrize("wrong", [torch.zeros(3, 12, 20, dtype=torch.bfloat16), torch.zeros(12, 20)])
def test_wrong_main_grad_is_refused(wrong: torch.Tensor) -> None:
    experts = build("torch")
    experts.down.main_grad = wrong
    with pytest.raises(ValueError, match=r"main_grad must be float32 of shape \(3, 12, 20\), but is"):
        run(experts, 1)


def test_all_wrong_main_grads_in_one_report() -> None:
    experts = build("torch")
    experts.gate_up.main_grad = torch.zeros(())
    experts.down.main_grad = torch.zeros(()).expand(experts.down.shape)
    text = r"(?s)^gate_up: main_grad must be float32 of shape .*\ndown: main_grad is expanded, strides \(0, 0, 0\)"
    with pytest.raises(ValueError, match=text):
        run(experts, 1)


def test_main_grad_on_another_device_is_refused() -> None:
    experts = build("torch")
    experts.down.main_grad = torch.zeros(experts.down.shape, device="meta")
    with pytest.raises(ValueError, match="main_grad is on meta but its parameter is on cpu"):
        run(experts, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_autograd_grad_is_asked_for_is_returned(backend: str) -> None:
    check_asked_gradients(backend)


def check_asked_gradients(backend: str) -> None:
    """And added nowhere: also of a shared expert, whose kernels see a view of the parameter."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator)
    ids, weights = torch.tensor([[0], [1], [1], [0], [-1]]), torch.rand(5, 1, generator=generator)

    def layer(shared: bool) -> tuple[nn.Module, torch.Tensor]:
        if shared:
            expert = SharedExpert(d_model=16, d_hidden=8, backend=backend)
            return expert, expert(x).square().sum()
        experts = GroupedExperts(ExpertsConfig(d_model=16, d_hidden=8, num_experts=2, backend=backend))
        return experts, experts.forward_tokens(x, ids, weights).square().sum()

    for shared in (False, True):
        module, loss = layer(shared)
        expected = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        assert all(one.any() for one in expected)
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        loss = module(x).square().sum() if shared else module.forward_tokens(x, ids, weights).square().sum()
        found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        # One of them alone: the other is neither returned nor added.
        (down,) = torch.autograd.grad(loss, module.down, retain_graph=True)
        assert torch.equal(down, found[1])
        assert not any(parameter.main_grad.any() for parameter in module.parameters())
        loss.backward()
        sums = [parameter.main_grad for parameter in module.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(sums, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_for_the_rows_alone_leaves_it_alone(backend: str) -> None:
    check_passes_for_some_inputs(backend)


def check_passes_for_some_inputs(backend: str) -> None:
    """Rows first and weights later, from one graph, as schedules without bubbles do: each gradient is added once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator).requires_grad_()
    ids = torch.tensor([[0, 1], [1, 1], [0, -1], [1, 0], [0, 0]])
    weights = torch.rand(5, 2, generator=generator)

    def layer() -> tuple[GroupedExperts, torch.Tensor]:
        experts = GroupedExperts(ExpertsConfig(d_model=16, d_hidden=8, num_experts=2, backend=backend))
        for parameter in experts.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        return experts, experts.forward_tokens(x, ids, weights).square().sum()

    whole, loss = layer()
    loss.backward()
    expected = x.grad.clone()
    assert all(one.any() for one in (expected, whole.gate_up.main_grad, whole.down.main_grad))
    experts, loss = layer()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    x.grad = None
    loss.backward(inputs=[x], retain_graph=True)
    assert torch.equal(grad, expected)
    assert torch.equal(x.grad, expected)
    assert not experts.gate_up.main_grad.any()
    assert not experts.down.main_grad.any()
    loss.backward(inputs=[experts.down], retain_graph=True)
    assert torch.equal(experts.down.main_grad, whole.down.main_grad)
    assert not experts.gate_up.main_grad.any()
    loss.backward(inputs=[experts.gate_up])
    assert torch.equal(experts.gate_up.main_grad, whole.gate_up.main_grad)
    assert torch.equal(experts.down.main_grad, whole.down.main_grad)
    assert torch.equal(x.grad, expected)
    experts, _ = layer()
    later: list[object] = []
    experts.defer_weight_gradients = later.append
    loss = experts.forward_tokens(x, ids, weights).square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert later == []
    loss.backward(inputs=[experts.down])
    later.pop()()
    assert torch.equal(experts.down.main_grad, whole.down.main_grad)
    assert not experts.gate_up.main_grad.any()
