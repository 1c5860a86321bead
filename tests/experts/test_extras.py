"""The back-ends of other packages: what they say where they cannot run, and `te` on a stand-in for its package."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, choose_backend
from coterie_experts.conformance import CASES, TOKEN_CASES, Case, TokenCase, case_problems, token_case_problems
from coterie_experts.grouped_swiglu import quack_native, te_native
from torch import Tensor, nn

from experts import fake_transformer_engine

CUDA = torch.device("cuda")
WITHOUT_BIAS = tuple(case for case in CASES if not case.bias)
TOKENS_WITHOUT_BIAS = tuple(case for case in TOKEN_CASES if not case.bias)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    fake_transformer_engine.install()
    monkeypatch.setattr(te_native, "obstacle", lambda **sizes: None)
    te_native._grouped_linear.cache_clear()
    yield
    te_native._grouped_linear.cache_clear()


@pytest.mark.parametrize("case", WITHOUT_BIAS, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_scratch", "stand_in")
def test_rows(case: Case) -> None:
    assert case_problems("te", case, repeats=2) == []


@pytest.mark.parametrize("case", TOKENS_WITHOUT_BIAS, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_scratch", "stand_in")
def test_tokens(case: TokenCase) -> None:
    assert token_case_problems("te", case) == []


@pytest.mark.usefixtures("stand_in")
def test_weight_of_zero_still_learns() -> None:
    experts = GroupedExperts(ExpertsConfig(d_model=8, d_hidden=4, num_experts=2, backend="te"))
    reference = GroupedExperts(ExpertsConfig(d_model=8, d_hidden=4, num_experts=2, backend="reference"))
    grads = []
    for layer in (experts, reference):
        weights = torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
        rows = torch.arange(24.0).view(3, 8) / 10
        layer(rows, weights, torch.tensor([1, 3], dtype=torch.int32)).sum().backward()
        grads.append(weights.grad)
    assert grads[0].abs().min() > 0
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("stand_in")
def test_te_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one size run in one module of Transformer Engine, which takes their weights in turn."""
    forward = fake_transformer_engine.GroupedLinear.forward

    def slow(layer: nn.Module, *arguments: object) -> Tensor:
        time.sleep(0.02)
        return forward(layer, *arguments)

    monkeypatch.setattr(fake_transformer_engine.GroupedLinear, "forward", slow)
    config = ExpertsConfig(d_model=8, d_hidden=4, num_experts=2, backend="te")
    layers = [GroupedExperts(config) for _ in range(2)]
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(-3)
    rows, offsets = torch.arange(24.0).view(3, 8) / 10, torch.tensor([1, 3], dtype=torch.int32)

    def run(layer: GroupedExperts) -> Tensor:
        return layer(rows, torch.ones(3), offsets).detach()

    expected = [run(layer) for layer in layers]
    assert not torch.equal(*expected)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, layers * 3))
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 3, strict=True))


@pytest.mark.usefixtures("stand_in")
def test_te_goes_twice_through_a_kept_graph() -> None:
    experts, x, weights, y = te_layer()
    leaves = (x, weights, *experts.parameters())
    first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    for one, again in zip(first, torch.autograd.grad(y.square().sum(), leaves), strict=True):
        assert one.any()
        assert torch.equal(one, again)


@pytest.mark.parametrize("wanted", ["x", "weights", "gate_up", "down"])
@pytest.mark.usefixtures("stand_in")
def test_te_refuses_second_derivatives(wanted: str) -> None:
    """Also where the gradient of the output is a constant, and only what was kept depends on what is asked for."""
    experts, x, weights, y = te_layer()
    leaf = {"x": x, "weights": weights, **dict(experts.named_parameters())}[wanted]
    with pytest.raises(RuntimeError, match="can be differentiated once, and create_graph=True is not supported"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)


def te_layer() -> tuple[GroupedExperts, Tensor, Tensor, Tensor]:
    """Return a layer, rows, their weights, and what the layer gives for them."""
    experts = GroupedExperts(ExpertsConfig(d_model=8, d_hidden=4, num_experts=3, backend="te"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator).requires_grad_()
    weights = (torch.rand(5, generator=generator) + 0.1).requires_grad_()
    return experts, x, weights, experts(x, weights, torch.tensor([2, 2, 5], dtype=torch.int32))


def obstacles(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "This GPU")


def test_quack_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def obstacle(**changes: object) -> str:
        sizes = {"d_model": 16, "d_hidden": 24, "dtype": torch.bfloat16, "device": CUDA}
        return str(quack_native.obstacle(**{**sizes, **changes}))

    obstacles(monkeypatch)
    assert obstacle().startswith("quack and triton are not installed; pip install 'coterie-experts[quack]'; it needs")
    obstacles(monkeypatch, "triton")
    assert obstacle().startswith("quack is not installed; pip install 'coterie-experts[quack]'; it needs")
    with pytest.raises(ValueError, match="backend 'quack' cannot run: quack is not installed; pip install"):
        choose_backend("quack", d_model=16, d_hidden=24, dtype=torch.bfloat16, device=CUDA)
    obstacles(monkeypatch, "triton", "quack")
    capability = "it needs compute capability 9, which This GPU has not"
    assert obstacle() == capability
    assert obstacle(device=torch.device("cpu")) == "device cpu is not cuda"
    assert obstacle(activation="relu_squared", bias=True, dtype=torch.float32, d_model=18) == (
        "it has the activation swiglu, not relu_squared; it has no biases; it runs torch.bfloat16, not torch.float32; "
        f"{capability}; d_model (18) must be a multiple of 4 for torch.float32 (rows of 16 bytes)"
    )
    assert obstacle(device=torch.device("meta"), d_model=12).startswith("d_model (12) must be a multiple of 8")
    assert obstacle(device=torch.device("meta")) == "None"


def test_te_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def obstacle(**changes: object) -> str:
        sizes = {"d_model": 16, "d_hidden": 24, "dtype": torch.bfloat16, "device": CUDA}
        return str(te_native.obstacle(**{**sizes, **changes}))

    obstacles(monkeypatch)
    assert obstacle() == "transformer_engine is not installed; pip install 'coterie-experts[te]'"
    obstacles(monkeypatch, "transformer_engine")
    assert obstacle() == "None"
    assert obstacle(device=torch.device("cpu")) == "device cpu is not cuda"
    assert obstacle(dtype=torch.float64) == "it runs torch.bfloat16 and torch.float16, not torch.float64"
    assert obstacle(dtype=torch.float32).endswith("Transformer Engine multiplies torch.float32 in TF32")
    assert obstacle(bias=True) == "it has no biases"
    assert obstacle(d_hidden=20).startswith("d_hidden (20) must be a multiple of 8")


@pytest.mark.parametrize("backend", ["quack", "te"])
def test_named_and_missing_is_an_error_at_build(backend: str) -> None:
    if importlib.util.find_spec({"quack": "quack", "te": "transformer_engine"}[backend]) is not None:
        pytest.skip("it is installed")
    with pytest.raises(ValueError, match=rf"backend '{backend}' cannot run: .* not installed; pip install"):
        GroupedExperts(ExpertsConfig(d_model=16, d_hidden=24, num_experts=2, backend=backend), device="meta")
