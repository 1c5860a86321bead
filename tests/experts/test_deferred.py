"""Weight gradients that are computed when the caller asks: the same bits, once, and nothing kept after that."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, grouped_experts
from torch import Tensor

from experts.test_values import BACKENDS

# Expert 1 has no rows, and there is one row past the end.
OFFSETS = torch.tensor([4, 4, 9], dtype=torch.int32)
IDS = torch.tensor([[0, 2], [2, -1], [0, 2], [2, 0], [-1, -1]])
WITH_TOKENS = pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])


def build(backend: str, **changes: object) -> GroupedExperts:
    sizes = {"d_model": 12, "d_hidden": 20, "num_experts": 3}
    experts = GroupedExperts(ExpertsConfig(**sizes, backend=backend, **changes))
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return experts


def inputs(seed: int, *, tokens: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows or tokens, their weights, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    count = len(IDS) if tokens else 10
    x, grad_y = (torch.randn(count, 12, generator=generator) for _ in range(2))
    weights = torch.rand(*(IDS.shape if tokens else (count,)), generator=generator) + 0.1
    return x.requires_grad_(), weights.requires_grad_(), grad_y


def forward(experts: GroupedExperts, x: Tensor, weights: Tensor, *, tokens: bool) -> Tensor:
    return experts.forward_tokens(x, IDS, weights) if tokens else experts(x, weights, OFFSETS)


def backward(y: Tensor, grad_y: Tensor) -> None:
    (y * grad_y).sum().backward()


def gradients_of(experts: GroupedExperts) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in experts.named_parameters()}


@WITH_TOKENS
@pytest.mark.parametrize("accumulator", ["grad", "main_grad"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_micro_batches_in_flight(backend: str, accumulator: str, tokens: bool) -> None:
    """Forward 1, forward 2, backward 1, backward 2, then the weights of 1 and of 2."""
    plain, late = (build(backend, activation="swiglu_clamped", swiglu_limit=0.8, bias=True) for _ in range(2))
    if accumulator == "main_grad":
        for parameter in (*plain.parameters(), *late.parameters()):
            parameter.main_grad = torch.full_like(parameter, 0.5)
    kept: list[Callable[[], None]] = []
    late.defer_weight_gradients = kept.append
    found = []
    for experts in (plain, late):
        batches = [inputs(seed, tokens=tokens) for seed in (1, 2)]
        outputs = [forward(experts, x, weights, tokens=tokens) for x, weights, _ in batches]
        for y, (_, _, grad_y) in zip(outputs, batches, strict=True):
            backward(y, grad_y)
        found.append([one for x, weights, _ in batches for one in (x.grad, weights.grad)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert len(kept) == 2
    assert set(gradients_of(late).values()) == {None}
    for add in kept:
        add()
    for (name, one), other in zip(plain.named_parameters(), late.parameters(), strict=True):
        got, expected = getattr(other, accumulator), getattr(one, accumulator)
        assert torch.equal(got, expected), name
        assert torch.equal(got[1], torch.full_like(got[1], 0.5 if accumulator == "main_grad" else 0.0)), name
        assert (other.grad is None) == (accumulator == "main_grad")


@WITH_TOKENS
@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_is_an_error_and_nothing_is_kept(backend: str, tokens: bool) -> None:
    experts = build(backend)
    kept: list[Callable[[], None]] = []
    experts.defer_weight_gradients = kept.append
    x, weights, grad_y = inputs(1, tokens=tokens)
    rows = x.detach().clone().requires_grad_()
    seen = weakref.ref(rows)
    backward(forward(experts, rows, weights, tokens=tokens), grad_y)
    kept[0]()
    del rows
    assert seen() is None
    first = experts.down.grad.clone()
    with pytest.raises(RuntimeError, match="have been added already"):
        kept[0]()
    assert torch.equal(experts.down.grad, first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_called_at_once(backend: str) -> None:
    """Inside the backward pass, as a schedule that defers nothing may do."""
    plain, late = build(backend), build(backend)
    late.defer_weight_gradients = lambda add: add()
    for experts in (plain, late):
        x, weights, grad_y = inputs(1, tokens=False)
        backward(experts(x, weights, OFFSETS), grad_y)
    for one, other in zip(plain.parameters(), late.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_parameters_and_rows(backend: str) -> None:
    """Only what wants a gradient has one: one parameter alone, then rows alone, where nothing is handed over."""
    plain, late = build(backend), build(backend)
    kept: list[Callable[[], None]] = []
    late.defer_weight_gradients = kept.append
    for experts in (plain, late):
        experts.down.requires_grad_(False)
        x, weights, grad_y = (one.detach() for one in inputs(1, tokens=False))
        backward(experts(x, weights, OFFSETS), grad_y)
    kept.pop()()
    assert torch.equal(late.gate_up.grad, plain.gate_up.grad)
    assert late.down.grad is None
    late.gate_up.requires_grad_(False)
    x, weights, grad_y = inputs(1, tokens=False)
    backward(late(x, weights, OFFSETS), grad_y)
    assert kept == []
    assert x.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_rows_at_all(backend: str, num_rows: int) -> None:
    """All counts are zero: gradients of exactly zero, and not None."""
    experts = build(backend, activation="relu_squared", bias=True)
    kept: list[Callable[[], None]] = []
    experts.defer_weight_gradients = kept.append
    x = torch.randn(num_rows, 12, requires_grad=True)
    experts(x, torch.ones(num_rows), torch.zeros(3, dtype=torch.int32)).sum().backward()
    kept.pop()()
    for parameter in experts.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changed", [0, 2], ids=["rows", "grad_y"])
def test_inputs_changed_in_between(backend: str, changed: int) -> None:
    experts = build(backend)
    kept: list[Callable[[], None]] = []
    experts.defer_weight_gradients = kept.append
    x, weights, grad_y = inputs(1, tokens=False)
    y = experts(x, weights, OFFSETS)
    y.register_hook(lambda _: grad_y)
    y.sum().backward()
    with torch.no_grad():
        (x, weights, grad_y)[changed].add_(1)
    with pytest.raises(RuntimeError, match="changed in place before the deferred weight gradients"):
        kept[0]()
    assert experts.down.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_functional_form_needs_leaves_or_main_grad(backend: str) -> None:
    x, weights, grad_y = inputs(1, tokens=False)
    experts = build(backend)
    gate_up = experts.gate_up * 1

    def run(up: Tensor) -> Tensor:
        return grouped_experts(
            x, weights, OFFSETS, up, experts.down, backend=backend, defer_weight_gradients=lambda add: add()
        )

    with pytest.raises(ValueError, match="up is not a leaf and has no main_grad"):
        run(gate_up)
    gate_up.main_grad = torch.zeros_like(gate_up)
    backward(run(gate_up), grad_y)
    sums, down = gate_up.main_grad, experts.down.grad
    experts.down.grad = None
    backward(run(experts.gate_up), grad_y)
    assert torch.equal(sums, experts.gate_up.grad)
    assert torch.equal(down, experts.down.grad)


def test_a_parameter_whose_memory_has_been_freed_is_no_place_for_a_gradient() -> None:
    """What FSDP leaves of the tensors of the forward pass."""
    x, weights, grad_y = inputs(1, tokens=False)
    experts, later = build("torch"), []
    experts.defer_weight_gradients = later.append
    backward(experts(x, weights, OFFSETS), grad_y)
    experts.down.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its memory has been freed since the forward pass, as FSDP does"):
        later.pop()()


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_graph_hands_over_each_time(backend: str) -> None:
    plain, late = build(backend), build(backend)
    kept: list[Callable[[], None]] = []
    late.defer_weight_gradients = kept.append
    for experts in (plain, late):
        x, weights, grad_y = inputs(1, tokens=False)
        total = (experts(x, weights, OFFSETS) * grad_y).sum()
        total.backward(retain_graph=True)
        total.backward()
    for add in kept:
        add()
    assert len(kept) == 2
    for one, other in zip(plain.parameters(), late.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend: str) -> None:
    experts = build(backend)
    experts.defer_weight_gradients = lambda add: add()
    x, weights, grad_y = inputs(1, tokens=False)
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad((experts(x, weights, OFFSETS) * grad_y).sum(), x, create_graph=True)


@pytest.fixture(autouse=True)
def _no_cycles() -> Iterator[None]:
    """Collect by hand only: what is freed is freed because nobody holds it."""
    gc.disable()
    yield
    gc.enable()
