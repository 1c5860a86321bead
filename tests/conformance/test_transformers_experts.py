"""The experts against those of transformers: activations, biases, layouts, values and gradients."""

import pytest
import torch
from coterie_experts import (
    ExpertsConfig,
    GroupedExperts,
    fused_views,
    interleaved_tensors,
    load_interleaved,
    load_views,
)
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

D, H, E, K, T = 16, 12, 4, 2, 40


def fill(module: nn.Module) -> nn.Module:
    """Numbers so large that the clamps of gpt-oss at 7 have work to do."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_TD, grad_TD = (torch.randn(T, D, generator=generator) for _ in range(2))
    ids_TK = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K]
    return x_TD.requires_grad_(), ids_TK, torch.rand(T, K, generator=generator).requires_grad_(), grad_TD


def compare(theirs: nn.Module, ours: GroupedExperts) -> None:
    found = []
    for run in (theirs, ours.forward_tokens):
        x_TD, ids_TK, weights_TK, grad_TD = inputs()
        y_TD = run(x_TD, ids_TK, weights_TK)
        (y_TD * grad_TD).sum().backward()
        found.append((y_TD.detach(), x_TD.grad, weights_TK.grad))
    for one, other in zip(*found, strict=True):
        assert_close(other, one)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def config(backend: str, **changes: object) -> ExpertsConfig:
    return ExpertsConfig(**{"d_model": D, "d_hidden": H, "num_experts": E, "backend": backend, **changes})


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gpt_oss(backend: str) -> None:
    """Interleaved columns, the transpose of ours, biases, and the clamps."""
    settings = GptOssConfig(hidden_size=D, intermediate_size=H, num_local_experts=E, num_experts_per_tok=K)
    settings._experts_implementation = "eager"
    theirs = fill(GptOssExperts(settings))
    ours = GroupedExperts(config(backend, activation="swiglu_clamped", bias=True))
    assert (theirs.alpha, theirs.limit) == (ours.config.swiglu_alpha, ours.config.swiglu_limit)
    parameters = (ours.gate_up, ours.down, ours.gate_up_bias, ours.down_bias)
    load_interleaved(*parameters, theirs.state_dict())
    for name, tensor in interleaved_tensors(*parameters).items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    x_TD = inputs()[0]
    pre_T = (x_TD @ ours.gate_up[0].T + ours.gate_up_bias[0]).abs()
    assert (pre_T > 7).any()
    compare(theirs, ours)
    assert_close(ours.gate_up.grad[:, :H].mT, theirs.gate_up_proj.grad[..., ::2])
    assert_close(ours.gate_up.grad[:, H:].mT, theirs.gate_up_proj.grad[..., 1::2])
    assert_close(ours.gate_up_bias.grad[:, :H], theirs.gate_up_proj_bias.grad[:, ::2])
    assert_close(ours.gate_up_bias.grad[:, H:], theirs.gate_up_proj_bias.grad[:, 1::2])
    assert_close(ours.down.grad.mT, theirs.down_proj.grad)
    assert_close(ours.down_bias.grad, theirs.down_proj_bias.grad)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_swiglu_families(family: str, backend: str) -> None:
    """Their fused parameters are ours under other names."""
    sizes = {"hidden_size": D, "num_experts_per_tok": K}
    if family == "mixtral":
        theirs = MixtralExperts(MixtralConfig(intermediate_size=H, num_local_experts=E, **sizes))
    else:
        theirs = Qwen3MoeExperts(Qwen3MoeConfig(moe_intermediate_size=H, num_experts=E, **sizes))
    theirs.config._experts_implementation = "eager"
    fill(theirs)
    ours = GroupedExperts(config(backend))
    load_views(fused_views(ours.gate_up, ours.down), theirs.state_dict())
    compare(theirs, ours)
    assert_close(ours.gate_up.grad, theirs.gate_up_proj.grad)
    assert_close(ours.down.grad, theirs.down_proj.grad)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_nemotron_h(backend: str) -> None:
    """Squared ReLU, no gate."""
    settings = NemotronHConfig(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, moe_intermediate_size=H, mlp_hidden_act="relu2"
    )
    settings._experts_implementation = "eager"
    theirs = fill(NemotronHExperts(settings))
    ours = GroupedExperts(config(backend, activation="relu_squared"))
    load_views(fused_views(ours.up, ours.down, gated=False), theirs.state_dict())
    compare(theirs, ours)
    assert_close(ours.up.grad, theirs.up_proj.grad)
    assert_close(ours.down.grad, theirs.down_proj.grad)
