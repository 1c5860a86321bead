"""The activations and the biases: values by hand, every gradient against float64, and what refuses them."""

import math
from dataclasses import replace

import pytest
import torch
from coterie_experts import (
    ACTIVATIONS,
    Activation,
    ExpertsConfig,
    GroupedExperts,
    choose_backend,
    grouped_experts,
    init_experts,
)
from coterie_experts.grouped_swiglu import quack_native
from support.interpreted import needs_triton
from torch import Tensor

from experts.cases import gradients

BACKENDS = ("reference", "torch")
CLAMPED, RELU = Activation(name="swiglu_clamped"), Activation(name="relu_squared")
# A limit that the values of the tests cross on every side.
TIGHT = replace(CLAMPED, limit=0.8)
VARIANTS = [(activation, bias) for activation in (Activation(), TIGHT, RELU) for bias in (False, True)]
COUNTS, PAST_THE_END = (9, 0, 5, 1, 33), 3
NAMES = ("y", "rows", "row_weights", "up", "down", "up_bias", "down_bias")


def make(activation: Activation, bias: bool, dtype: torch.dtype = torch.float32, d: int = 12, h: int = 20):
    generator = torch.Generator().manual_seed(0)
    e, r, p = len(COUNTS), sum(COUNTS) + PAST_THE_END, 2 * h if activation.is_gated else h

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    leaves = [normal(r, d), normal(r).abs() + 0.1, normal(e, p, d, std=d**-0.5), normal(e, d, h, std=h**-0.5)]
    leaves += [normal(e, p), normal(e, d)] if bias else []
    grad_y = normal(r, d).to(dtype)
    return [leaf.to(dtype).requires_grad_() for leaf in leaves], grad_y


def ours(activation: Activation, leaves: list[Tensor], grad_y: Tensor, backend: str) -> tuple[Tensor, ...]:
    biases = dict(zip(("up_bias", "down_bias"), leaves[4:], strict=False))
    offsets = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    y = grouped_experts(*leaves[:2], offsets, *leaves[2:4], activation=activation, backend=backend, **biases)
    return (y.detach(), *gradients(y, tuple(leaves), grad_y))


def one_row(activation: Activation, pre_P: Tensor) -> Tensor:
    """The activation of one row as its paper or model has it, element by element."""
    if activation.name == "relu_squared":
        return torch.stack([one * one if one > 0 else 0 * one for one in pre_P])
    half = len(pre_P) // 2
    found = []
    for gate, up in zip(pre_P[:half], pre_P[half:], strict=True):
        if activation.name == "swiglu":
            found.append(gate / (1 + torch.exp(-gate)) * up)
            continue
        limit = torch.tensor(activation.limit, dtype=gate.dtype)
        gate = gate if gate <= limit else limit
        up = up if abs(up) <= limit else limit * up.detach().sign()
        found.append(gate / (1 + torch.exp(-activation.alpha * gate)) * (up + 1))
    return torch.stack(found)


def row_by_row(activation: Activation, leaves: list[Tensor], grad_y: Tensor) -> tuple[Tensor, ...]:
    rows, weights, up, down, *biases = leaves
    outputs = []
    for row, expert in enumerate(e for e, count in enumerate(COUNTS) for _ in range(count)):
        pre = up[expert] @ rows[row] + (biases[0][expert] if biases else 0)
        out = down[expert] @ one_row(activation, pre) + (biases[1][expert] if biases else 0)
        outputs.append(weights[row] * out)
    y = torch.cat((torch.stack(outputs), torch.zeros_like(rows[-PAST_THE_END:])))
    return (y.detach(), *gradients(y, tuple(leaves), grad_y))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("activation", "bias"), VARIANTS, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.usefixtures("nan_scratch")
def test_values_and_gradients(activation: Activation, bias: bool, backend: str) -> None:
    exact = row_by_row(activation, *make(activation, bias, torch.float64))
    plain = row_by_row(activation, *make(activation, bias))
    found = ours(activation, *make(activation, bias), backend)
    for name, one, baseline, truth in zip(NAMES, found, plain, exact, strict=False):
        error, allowed = ((got.double() - truth).abs().max().item() for got in (one, baseline))
        # The weight's gradient is a sum over H and D here and over D there, each with its own rounding.
        units = 16 if name == "row_weights" else 4
        assert error <= 2 * allowed + units * torch.finfo(torch.float32).eps * truth.abs().max().item(), name
        if name not in ("y", "rows", "row_weights"):
            assert torch.equal(one[1], torch.zeros_like(one[1])), name


@pytest.mark.parametrize(("activation", "bias"), VARIANTS, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.parametrize("weight_is_zero", [False, True])
def test_gradcheck_of_the_reference(activation: Activation, bias: bool, weight_is_zero: bool) -> None:
    leaves, _ = make(activation, bias, torch.float64, d=3, h=2)
    if weight_is_zero:
        leaves[1] = torch.zeros_like(leaves[1]).requires_grad_()
    offsets = torch.tensor(COUNTS).cumsum(0).to(torch.int32)

    def function(*given: Tensor) -> Tensor:
        biases = dict(zip(("up_bias", "down_bias"), given[4:], strict=False))
        return grouped_experts(*given[:2], offsets, *given[2:4], activation=activation, backend="reference", **biases)

    assert torch.autograd.gradcheck(function, tuple(leaves), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clamped_swiglu_by_hand(backend: str) -> None:
    """One live unit, alpha 1.702, limit 7, output 10 times the unit; the formula of `GptOssExperts` on paper.

    (9, 3): gate held to 7, 7 / (1 + e^-11.914) * 4 = 27.99981251, no gradient for the gate, 69.9995313 for up.
    (2, -8): up held to -7, 2 / (1 + e^-3.404) * -6 = -11.61395174; no gradient for up.
    (-9, 0.5): the gate has no lower limit: -9 / (1 + e^15.318) * 1.5 = -3.0048e-06.
    (7, 7) and (7, -7): at the limit the gradient passes.
    """
    pre = torch.tensor([[9.0, 3.0], [2.0, -8.0], [-9.0, 0.5], [7.0, 7.0], [7.0, -7.0]])
    rows = torch.nn.functional.pad(pre, (0, 2)).requires_grad_()
    gate_up, down = torch.zeros(1, 8, 4), torch.zeros(1, 4, 4)
    gate_up[0, 0, 0] = gate_up[0, 4, 1] = 1.0
    down[0, 0, 0] = 10.0
    offsets = torch.tensor([5], dtype=torch.int32)
    y = grouped_experts(rows, torch.ones(5), offsets, gate_up, down, activation=CLAMPED, backend=backend)
    y[:, 0].sum().backward()

    def glu(gate: float) -> float:
        return gate / (1 + math.exp(-1.702 * gate))

    expected = [10 * glu(7) * 4, 10 * glu(2) * -6, 10 * glu(-9) * 1.5, 10 * glu(7) * 8, 10 * glu(7) * -6]
    torch.testing.assert_close(y[:, 0], torch.tensor(expected), rtol=1e-6, atol=1e-9)
    assert expected[:2] == pytest.approx([279.9981251, -116.1395174], rel=1e-6)
    up_slopes = [10 * glu(7), 0.0, 10 * glu(-9), 10 * glu(7), 10 * glu(7)]
    torch.testing.assert_close(rows.grad[:, 1], torch.tensor(up_slopes), rtol=1e-6, atol=1e-9)
    assert [bool(one != 0) for one in rows.grad[:, 0]] == [False, True, True, True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_squared_relu_and_biases_by_hand(backend: str) -> None:
    """pre = x + 1: (2, -3) gives 3 and -2, so 9 and 0; y = weight * (10 * unit + 5) = 0.5 * 95 and 2 * 5."""
    rows = torch.tensor([[2.0, 0, 0, 0], [-3.0, 0, 0, 0]]).requires_grad_()
    up, down, up_bias, down_bias = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), torch.zeros(1, 4), torch.zeros(1, 4)
    up[0, 0, 0], up_bias[0, 0], down[0, 0, 0], down_bias[0, 0] = 1.0, 1.0, 10.0, 5.0
    weights = torch.tensor([0.5, 2.0]).requires_grad_()
    biases = {"up_bias": up_bias.requires_grad_(), "down_bias": down_bias.requires_grad_()}
    offsets = torch.tensor([2], dtype=torch.int32)
    y = grouped_experts(rows, weights, offsets, up, down, activation=RELU, backend=backend, **biases)
    y[:, 0].sum().backward()
    assert y[:, 0].tolist() == [47.5, 10.0]
    assert weights.grad.tolist() == [95.0, 5.0]
    assert rows.grad[:, 0].tolist() == [0.5 * 10 * 2 * 3, 0.0]
    assert up_bias.grad[0].tolist() == [30.0, 0.0, 0.0, 0.0]
    assert down_bias.grad[0].tolist() == [2.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [TIGHT, RELU], ids=lambda activation: activation.name)
@pytest.mark.usefixtures("nan_scratch")
def test_padding_does_not_leak_into_biases(activation: Activation, backend: str) -> None:
    """Rows of weight zero, and rows past the end, hold NaN: bias gradients and outputs are those without them."""
    nan = float("nan")
    leaves, grad_y = make(activation, True)
    clean, dirty = [leaf.detach().clone() for leaf in leaves], [leaf.detach().clone() for leaf in leaves]
    used = sum(COUNTS)
    clean[1][:4] = dirty[1][:4] = 0.0
    dirty_grad = grad_y.clone()
    for tensor in (dirty[0], dirty_grad):
        tensor[:4], tensor[used:] = nan, nan
    dirty[1][used:] = nan
    expected = ours(activation, [leaf.requires_grad_() for leaf in clean], grad_y, backend)
    found = ours(activation, [leaf.requires_grad_() for leaf in dirty], dirty_grad, backend)
    for name, one, other in zip(NAMES, found, expected, strict=True):
        if name == "row_weights":
            assert torch.equal(one[:4], torch.zeros(4))
            assert (other[:4] != 0).all()
            one, other = one[4:], other[4:]
        assert torch.equal(one, other), name
        if name in ("y", "rows"):
            assert torch.equal(one[:4], torch.zeros_like(one[:4])), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_module_with_biases(backend: str) -> None:
    """`forward_tokens`, `main_grad` of the biases, and start values that any split shares."""
    config = ExpertsConfig(
        d_model=12,
        d_hidden=20,
        num_experts=4,
        activation="swiglu_clamped",
        swiglu_limit=0.8,
        bias=True,
        backend=backend,
    )
    experts = GroupedExperts(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
    assert shapes == {"gate_up": (4, 40, 12), "down": (4, 12, 20), "gate_up_bias": (4, 40), "down_bias": (4, 12)}
    assert not experts.gate_up_bias.any()
    assert not experts.down_bias.any()
    generator = torch.Generator().manual_seed(0)
    for bias in (experts.gate_up_bias, experts.down_bias):
        torch.nn.init.normal_(bias, generator=generator)
    x = torch.randn(7, 12, generator=generator)
    ids = torch.tensor([[0, 3], [3, -1], [1, 0], [-1, -1], [3, 1], [0, 1], [1, 3]])
    weights = torch.rand(7, 2, generator=generator)
    experts.forward_tokens(x, ids, weights).square().sum().backward()
    expected = torch.zeros(7, 12)
    for token, choice in (ids >= 0).nonzero().tolist():
        expert = ids[token, choice]
        hidden = one_row(TIGHT, experts.gate_up[expert] @ x[token] + experts.gate_up_bias[expert])
        expected[token] += weights[token, choice] * (experts.down[expert] @ hidden + experts.down_bias[expert]).detach()
    torch.testing.assert_close(experts.forward_tokens(x, ids, weights).detach(), expected, rtol=1e-5, atol=1e-5)
    kept = {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}
    experts.zero_grad()
    for parameter in experts.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    experts.forward_tokens(x, ids, weights).square().sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad - 1, kept[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(kept[name][2], torch.zeros_like(kept[name][2]))


def test_module_without_a_gate() -> None:
    config = ExpertsConfig(d_model=12, d_hidden=20, num_experts=4, activation="relu_squared", bias=True)
    whole = GroupedExperts(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    assert shapes == {"up": (4, 20, 12), "down": (4, 12, 20), "up_bias": (4, 20), "down_bias": (4, 12)}
    share = GroupedExperts(config, first_expert=2, num_local_experts=2)
    for module in (whole, share):
        torch.nn.init.ones_(module.down_bias)
        init_experts(module, seed=3, name="layers.1", std=0.5, down_std=0.1)
        assert not module.down_bias.any()
    assert torch.equal(share.up, whole.up[2:])
    assert torch.equal(share.down, whole.down[2:])
    assert whole.up.std().item() == pytest.approx(0.5, rel=0.1)
    assert whole.down.std().item() == pytest.approx(0.1, rel=0.1)
    assert "activation=relu_squared, bias=True" in repr(whole)


def test_config_names_what_is_wrong_with_an_activation() -> None:
    bad = ExpertsConfig(
        d_model=4, d_hidden=4, num_experts=1, activation="gelu", swiglu_alpha=0.0, swiglu_limit=float("nan")
    )
    assert bad.problems() == [
        "activation ('gelu') must be one of swiglu, swiglu_clamped, relu_squared",
        "swiglu_limit (nan) must be a finite number above 0; gpt-oss has 7",
        "swiglu_alpha (0) must be a finite number above 0; gpt-oss has 1.702",
    ]
    with pytest.raises(ValueError, match="activation"):
        GroupedExperts(bad)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("up_bias", torch.zeros(3, 20), r"up_bias \(e, 2H\).* but are .*up_bias \(3, 20\)"),
        ("down_bias", torch.zeros(2, 12), r"down_bias \(e, D\).* but are .*down_bias \(2, 12\)"),
        ("down_bias", torch.zeros(3, 12).double(), "down_bias must be torch.float32 .* but is torch.float64"),
        ("up_bias", torch.zeros(3, 40, device="meta"), "up_bias is on meta but the rows are on cpu"),
        ("activation", RELU, r"up \(e, H, D\).* but are .*up \(3, 40, 12\)"),
        ("activation", Activation(name="gelu"), "activation .'gelu'. must be one of"),
    ],
)
def test_wrong_biases_and_activations_are_refused(name: str, value: object, text: str) -> None:
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    tensors = (torch.zeros(6, 12), torch.zeros(6), offsets, torch.zeros(3, 40, 12), torch.zeros(3, 12, 20))
    grouped_experts(*tensors)
    with pytest.raises(ValueError, match=text):
        grouped_experts(*tensors, **{name: value})


def test_quack_says_that_it_has_swiglu_alone() -> None:
    sizes = {"d_model": 16, "d_hidden": 16, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    reason = str(quack_native.obstacle(**sizes, activation="relu_squared"))
    assert reason.startswith("it has the activation swiglu, not relu_squared")
    with pytest.raises(ValueError, match=r"'quack' cannot run: it has no biases; .*or choose backend 'auto'"):
        choose_backend("quack", bias=True, **sizes)
    with pytest.raises(ValueError, match="it has the activation swiglu, not relu_squared"):
        GroupedExperts(
            ExpertsConfig(d_model=16, d_hidden=16, num_experts=2, activation="relu_squared", backend="quack"),
            device="meta",
        )


@needs_triton
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_triton_has_all_of_them(activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = {"d_model": 4096, "d_hidden": 1024, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    choice = choose_backend("auto", activation=activation, bias=bias, **sizes)
    assert choice.name == "triton"
    assert "measured with swiglu for wide-medium widths on compute capability 9.0, fastest first" in choice.reason
