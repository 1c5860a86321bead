"""Second derivatives: right for the reference, an error for what is written by hand, never silently wrong."""

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, grouped_experts, order_by_expert, rows_from_tokens
from torch import Tensor


def layer_and_tokens(backend: str) -> tuple[GroupedExperts, Tensor, Tensor, Tensor]:
    config = ExpertsConfig(d_model=8, d_hidden=4, num_experts=3, backend=backend)
    experts = GroupedExperts(config, dtype=torch.float64 if backend == "reference" else torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator).to(experts.down.dtype).requires_grad_()
    ids = torch.tensor([[0, 2], [2, 1], [-1, 2], [0, 1], [2, 0]])
    weights = (torch.rand(5, 2, generator=generator) + 0.1).to(x.dtype).requires_grad_()
    return experts, x, ids, weights


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "another path"])
def test_torch_back_end_refuses(inside: bool) -> None:
    """Also where the second pass would find another way to what it is asked for, and leave this one out in silence."""
    experts, x, ids, weights = layer_and_tokens("torch")
    y = experts.forward_tokens(x, ids, weights)
    loss = y.square().sum() + (x.pow(3).sum() if inside else 0)
    with pytest.raises(RuntimeError, match="can be differentiated once, and create_graph=True is not supported"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_rows_in_order_refuse_too() -> None:
    experts, x, _, _ = layer_and_tokens("torch")
    row_weights = torch.ones(5, requires_grad=True)
    y = experts(x, row_weights, torch.tensor([2, 2, 5], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(y.sum(), row_weights, create_graph=True)


def test_main_grad_refuses() -> None:
    experts, x, ids, weights = layer_and_tokens("reference")
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    y = experts.forward_tokens(x, ids, weights)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        y.square().sum().backward(create_graph=True)


def test_reference_can_be_differentiated_twice() -> None:
    experts, x, ids, weights = layer_and_tokens("reference")

    def function(x: Tensor, weights: Tensor) -> Tensor:
        return experts.forward_tokens(x, ids, weights)

    assert torch.autograd.gradgradcheck(function, (x, weights))


def test_first_derivatives_are_left_alone() -> None:
    experts, x, ids, weights = layer_and_tokens("torch")
    experts.forward_tokens(x, ids, weights).square().sum().backward()
    assert x.grad is not None
    assert not x.grad.requires_grad
    frozen, weights = x.detach(), weights.detach()
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
    assert not experts.forward_tokens(frozen, ids, weights).requires_grad


@pytest.mark.parametrize("place", ["x", "gate_up", "down"])
def test_inputs_that_are_copied_refuse_too(place: str) -> None:
    check_copied_inputs("torch", place)


def check_copied_inputs(backend: str, place: str) -> None:
    """What is saved of an input in another order of memory is a copy, which wants no gradient."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "x": torch.randn(5, 8, generator=generator),
        "gate_up": torch.randn(2, 8, 8, generator=generator),
        "down": torch.randn(2, 8, 4, generator=generator),
    }
    tensors[place] = tensors[place].mT.contiguous().mT.requires_grad_()
    assert not tensors[place].is_contiguous()
    x, gate_up, down = tensors.values()
    y = grouped_experts(x, torch.ones(5), torch.tensor([2, 5], dtype=torch.int32), gate_up, down, backend=backend)
    leaf = tensors[place]
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(y.square().sum() + leaf.square().sum(), leaf, create_graph=True)


@pytest.mark.parametrize("wanted", ["x", "weights", "down"])
def test_reference_refuses_mixed_derivatives_of_rows_of_weight_zero(wanted: str) -> None:
    """The gradient of such a row is zero, and that of this zero by the weight is not."""
    experts, x, ids, weights = layer_and_tokens("reference")
    with torch.no_grad():
        weights[1, 0] = 0
    leaf = {"x": x, "weights": weights, "down": experts.down}[wanted]
    y = experts.forward_tokens(x, ids, weights)
    with pytest.raises(RuntimeError, match="rows of weight zero can be differentiated once"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    # Where no weight wants a gradient, all that is left out is zero.
    assert torch.autograd.gradgradcheck(lambda x: experts.forward_tokens(x, ids, weights.detach()), x)


# Of torch itself, which loads formulas of forward mode with it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_of_a_weight_of_zero_is_that_of_the_backward_pass() -> None:
    experts, x, ids, weights = layer_and_tokens("reference")
    with torch.no_grad():
        weights[1, 0] = 0
    (grad,) = torch.autograd.grad(experts.forward_tokens(x, ids, weights).sum(), weights)

    def function(weights: Tensor) -> Tensor:
        return grouped_experts(rows, weights, order.offsets_e, experts.gate_up, experts.down, backend="reference").sum()

    order = order_by_expert(ids, 3)
    rows = rows_from_tokens(x.detach(), order)
    row_weights = weights.detach().flatten()[order.slot_of_row_N]
    jacobian = torch.func.jacfwd(function)(row_weights)
    expected = grad.flatten()[order.slot_of_row_N]
    torch.testing.assert_close(jacobian[:9], expected[:9])
    assert (row_weights[:9] == 0).sum() == 1
    assert expected[:9].all()
