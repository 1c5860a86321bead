"""Shared experts and latent experts: values and gradients against plain products, main_grad, start values."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from coterie_experts import (
    ExpertsConfig,
    GroupedExperts,
    LatentExperts,
    SharedExpert,
    TileTable,
    init_latent_experts,
    init_shared_expert,
    order_by_expert,
    rows_from_tokens,
    sum_over_choices,
)
from coterie_experts import shared as shared_module
from torch import Tensor, nn

BACKENDS = ("reference", "torch")
D, L, H, E = 16, 8, 12, 4


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(x: Tensor, shared: SharedExpert) -> Tensor:
    if shared.config.activation == "relu_squared":
        hidden = F.relu(F.linear(x, shared.up, shared.up_bias if shared.config.bias else None)).square()
    else:
        pre = F.linear(x, shared.gate_up, shared.gate_up_bias if shared.config.bias else None)
        gate, up = pre[..., :H], pre[..., H:]
        if shared.config.activation == "swiglu":
            hidden = F.silu(gate) * up
        else:
            gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return F.linear(hidden, shared.down, shared.down_bias if shared.config.bias else None)


def assert_same_gradients(module: nn.Module, ours: Tensor, plain: Tensor, x: Tensor) -> None:
    """Values, and gradients of the input and of every parameter; then the same in main_grad."""
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    grad_y = noise(*ours.shape, seed=9)
    leaves = (x, *module.parameters())
    expected = torch.autograd.grad((plain * grad_y).sum(), leaves)
    found = torch.autograd.grad((ours * grad_y).sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "relu_squared"])
def test_shared_expert(activation: str, bias: bool, backend: str, nan_scratch: None) -> None:
    shared = SharedExpert(d_model=D, d_hidden=H, activation=activation, swiglu_limit=0.8, bias=bias, backend=backend)
    if bias:
        for name, parameter in shared.named_parameters():
            if name.endswith("_bias"):
                assert not parameter.any()
                parameter.data.copy_(noise(*parameter.shape))
    x = noise(2, 9, D).requires_grad_()
    assert_same_gradients(shared, shared(x), by_hand(x, shared), x)
    shared(x).square().sum().backward()
    kept = {name: parameter.grad.clone() for name, parameter in shared.named_parameters()}
    shared.zero_grad()
    for parameter in shared.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    shared(x).square().sum().backward()
    for name, parameter in shared.named_parameters():
        assert parameter.grad is None, name
        torch.testing.assert_close(parameter.main_grad - 1, kept[name], rtol=1e-5, atol=1e-5)


def test_shapes_of_the_shared_expert_are_those_of_linear_layers() -> None:
    plain = SharedExpert(d_model=D, d_hidden=H)
    assert {name: tuple(one.shape) for name, one in plain.named_parameters()} == {
        "gate_up": (2 * H, D),
        "down": (D, H),
    }
    no_gate = SharedExpert(d_model=D, d_hidden=H, activation="relu_squared", bias=True)
    assert {name: tuple(one.shape) for name, one in no_gate.named_parameters()} == {
        "up": (H, D),
        "down": (D, H),
        "up_bias": (H,),
        "down_bias": (D,),
    }
    assert "activation=relu_squared" in repr(no_gate)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_shared_expert_of_few_tokens(num_tokens: int) -> None:
    shared = SharedExpert(d_model=D, d_hidden=H, backend="torch")
    y = shared(noise(num_tokens, D))
    torch.testing.assert_close(y, by_hand(noise(num_tokens, D), shared), rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert bool(shared.down.grad.any()) == (num_tokens > 0)
    assert torch.equal(shared(noise(3, D)[1]), shared(noise(3, D)[1:2])[0])


def test_shared_expert_reads_a_file_of_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiles.json"
    table = TileTable(capability="9.0", dtype="bfloat16", tiles={"narrow-small-few": {"up": {"band": 4}}})
    table.write(file)
    seen = []
    plain = shared_module.grouped_experts
    monkeypatch.setattr(
        shared_module, "grouped_experts", lambda *a, table, **o: (seen.append(table), plain(*a, **o))[1]
    )
    SharedExpert(d_model=D, d_hidden=H, tiles=str(file))(noise(3, D))
    SharedExpert(d_model=D, d_hidden=H)(noise(3, D))
    assert seen == [table, None]
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tiles\.json"):
        SharedExpert(d_model=D, d_hidden=H, tiles=str(file))


def test_shared_expert_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"d_model \(0\) must be at least 1\nactivation \('gelu'\) must be one of"):
        SharedExpert(d_model=0, d_hidden=H, activation="gelu")
    with pytest.raises(ValueError, match=r"'torch' cannot run: d_hidden \(10\) must be a multiple of 4"):
        SharedExpert(d_model=D, d_hidden=10, backend="torch")
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 16\), but has \(3, 12\)"):
        SharedExpert(d_model=D, d_hidden=H)(torch.zeros(3, 12))
    with pytest.raises(ValueError, match=r"gate_up must be torch\.bfloat16 when the rows are torch\.bfloat16"):
        SharedExpert(d_model=D, d_hidden=H)(torch.zeros(3, D).bfloat16())


def test_start_values_of_the_shared_expert() -> None:
    def started(seed: int, name: str) -> SharedExpert:
        shared = SharedExpert(d_model=64, d_hidden=64, device="meta").to_empty(device="cpu")
        init_shared_expert(shared, seed=seed, name=name, std=0.02, down_std=0.01)
        return shared

    first = started(1, "a")
    assert torch.equal(first.gate_up, started(1, "a").gate_up)
    assert first.gate_up.std().item() == pytest.approx(0.02, rel=0.06)
    assert first.down.std().item() == pytest.approx(0.01, rel=0.08)
    for other in (started(2, "a"), started(1, "b")):
        assert (first.down != other.down).float().mean() > 0.99
    with pytest.raises(ValueError, match="call to_empty"):
        init_shared_expert(SharedExpert(d_model=4, d_hidden=4, device="meta"), seed=0, name="", std=1.0)


def latent(backend: str = "torch", **changes: object) -> LatentExperts:
    config = ExpertsConfig(d_model=D, d_hidden=H, num_experts=E, activation="relu_squared", backend=backend)
    return LatentExperts(config, **{"d_latent": L, **changes})


IDS = torch.tensor([[0, 3], [3, -1], [1, 0], [-1, -1], [3, 1]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_experts(backend: str, nan_scratch: None) -> None:
    module = latent(backend)
    assert {name: tuple(one.shape) for name, one in module.named_parameters()} == {
        "latent_in": (L, D),
        "latent_out": (D, L),
        "experts.up": (E, H, L),
        "experts.down": (E, L, H),
    }
    x, weights = noise(5, D).requires_grad_(), noise(5, 2, seed=1).abs()
    rows = []
    for token in range(5):
        z = module.latent_in @ x[token]
        out = torch.zeros(L)
        for expert, weight in zip(IDS[token].tolist(), weights[token], strict=True):
            if expert >= 0:
                out = out + weight * (module.experts.down[expert] @ F.relu(module.experts.up[expert] @ z).square())
        rows.append(module.latent_out @ out)
    assert_same_gradients(module, module.forward_tokens(x, IDS, weights), torch.stack(rows), x)


def test_latent_experts_behind_a_dispatcher() -> None:
    """Projections outside of dispatch and combine: the rows that travel are narrow, and the result is the same."""
    module = latent()
    x, weights = noise(5, D), noise(5, 2, seed=1).abs()
    order = order_by_expert(IDS, E)
    rows = rows_from_tokens(module.to_latent(x), order)
    assert rows.shape == (10, L)
    row_weights = weights.flatten()[order.slot_of_row_N]
    y = module.from_latent(sum_over_choices(module(rows, row_weights, order.offsets_e), order))
    assert torch.equal(y, module.forward_tokens(x, IDS, weights))


def test_latent_experts_of_several_ranks() -> None:
    whole = latent()
    shares = [latent(first_expert=first, num_local_experts=2) for first in (0, 2)]
    for module in (whole, *shares):
        init_latent_experts(module, seed=3, name="layers.2", std=0.02, latent_std=0.03, down_std=0.01)
    assert torch.equal(torch.cat([share.experts.up for share in shares]), whole.experts.up)
    for name in ("latent_in", "latent_out"):
        assert all(torch.equal(getattr(share, name), getattr(whole, name)) for share in shares)
    stds = (whole.latent_in, 0.02), (whole.latent_out, 0.03), (whole.experts.up, 0.03), (whole.experts.down, 0.01)
    for weights, std in stds:
        assert weights.std().item() == pytest.approx(std, rel=0.3)
    flat = [whole.latent_in.flatten(), whole.latent_out.flatten(), whole.experts.up.flatten()[: L * D]]
    for one, other in pairwise(flat):
        assert abs(torch.corrcoef(torch.stack((one, other)).detach())[0, 1]) < 0.5
    bare = GroupedExperts(whole.experts.config)
    assert bare.up.shape == whole.experts.up.shape


def test_main_grad_of_the_projections() -> None:
    module = latent()
    x, weights = noise(5, D), noise(5, 2, seed=1).abs()
    module.forward_tokens(x, IDS, weights).square().sum().backward()
    kept = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    module.forward_tokens(x, IDS, weights).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, kept[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("d_latent", [0, 17])
def test_latent_width_outside_of_the_model_is_refused(d_latent: int) -> None:
    with pytest.raises(ValueError, match=rf"d_latent \({d_latent}\) must be 1 to d_model \(16\)"):
        latent(d_latent=d_latent)


def test_latent_width_that_a_kernel_cannot_take_is_named() -> None:
    with pytest.raises(ValueError, match=r"'torch' cannot run: d_latent \(6\) must be a multiple of 4"):
        latent(d_latent=6)
    with pytest.raises(ValueError, match=r"first_expert \(3\) and num_local_experts \(2\)"):
        latent(first_expert=3, num_local_experts=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_can_be_deferred(backend: str) -> None:
    """Those of a shared expert with a `main_grad`, and those of the experts between two projections."""
    config = ExpertsConfig(d_model=D, d_hidden=H, num_experts=E, backend=backend)
    ids, weights = torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.rand(3, 2)

    def shared_gradients(defer: bool) -> list[Tensor]:
        shared = SharedExpert(d_model=D, d_hidden=H, backend=backend)
        for parameter in shared.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        return gradients(shared, lambda: shared(noise(3, D)), defer)

    def latent_gradients(defer: bool) -> list[Tensor]:
        latent = LatentExperts(config, d_latent=L)
        return gradients(latent, lambda: latent.forward_tokens(noise(3, D), ids, weights), defer)

    def gradients(module: nn.Module, forward: Callable[[], Tensor], defer: bool) -> list[Tensor]:
        later: list[Callable[[], None]] = []
        if defer:
            module.defer_weight_gradients = later.append
            assert module.defer_weight_gradients is not None
        forward().square().sum().backward()
        assert len(later) == defer
        for add in later:
            add()
        return [getattr(one, "main_grad", one.grad) for one in module.parameters()]

    for found in (shared_gradients, latent_gradients):
        for one, other in zip(found(True), found(False), strict=True):
            assert one.any()
            assert torch.equal(one, other)


def test_a_shared_expert_defers_to_main_grad_alone() -> None:
    shared = SharedExpert(d_model=D, d_hidden=H, backend="torch")
    shared.defer_weight_gradients = [].append
    with pytest.raises(ValueError, match="a shared expert needs a main_grad of gate_up, down"):
        shared(noise(3, D))
    with torch.no_grad():
        assert shared(noise(3, D)).any(), "an evaluation defers nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_comes_out_may_be_changed_in_place(backend: str) -> None:
    """With deferral and without; the gradients are those of a sum that is not in place."""
    config = ExpertsConfig(d_model=D, d_hidden=H, num_experts=2, backend=backend)
    rows, offsets = noise(5, D).requires_grad_(), torch.tensor([2, 5], dtype=torch.int32)

    def gradients(in_place: bool, defer: bool) -> list[Tensor]:
        experts, later = GroupedExperts(config), []
        experts.defer_weight_gradients = later.append if defer else None
        y = experts(rows, torch.ones(5), offsets)
        y = y.add_(1) if in_place else y + 1
        rows.grad = None
        y.square().sum().backward()
        for add in later:
            add()
        return [rows.grad, experts.gate_up.grad, experts.down.grad]

    plain = gradients(False, False)
    assert all(one.any() for one in plain)
    for defer in (False, True):
        assert all(torch.equal(one, other) for one, other in zip(plain, gradients(True, defer), strict=True))


def test_latent_experts_refuse_what_does_not_fit() -> None:
    for width in ("8", 2.5, None, True):
        with pytest.raises(ValueError, match=r"d_latent \(.*\) must be a whole number"):
            LatentExperts(ExpertsConfig(d_model=D, d_hidden=H, num_experts=E), d_latent=width)
    latent = LatentExperts(ExpertsConfig(d_model=D, d_hidden=H, num_experts=E), d_latent=L)
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    text = r"x must have shape \(\.\.\., 16\), but has \(3, 12\)\nx must be torch\.float32, .* but is torch\.float64"
    with pytest.raises(ValueError, match=text):
        latent.forward_tokens(torch.zeros(3, 12, dtype=torch.float64), ids, weights)
    with pytest.raises(ValueError, match=r"y must have shape \(\.\.\., 8\), but has \(3, 16\)"):
        latent.from_latent(torch.zeros(3, D))
    empty = LatentExperts(latent.config, d_latent=L, device="meta")
    with pytest.raises(ValueError, match=r"x is on cpu but the parameters are on meta; give the module memory"):
        empty.forward_tokens(torch.zeros(3, D), ids, weights)


def test_autocast_changes_no_forward_pass() -> None:
    config = ExpertsConfig(d_model=D, d_hidden=H, num_experts=E, backend="reference")
    latent, shared = LatentExperts(config, d_latent=L), SharedExpert(d_model=D, d_hidden=H, backend="reference")
    x, ids, weights = noise(5, D), torch.arange(5)[:, None] % E, torch.ones(5, 1)
    plain = latent.forward_tokens(x, ids, weights), shared(x)
    assert all(one.any() for one in plain)
    with torch.autocast("cpu", torch.bfloat16):
        cast = latent.forward_tokens(x, ids, weights), shared(x)
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))
