import dataclasses
import math

import pytest
import torch
from coterie_export import ModelSpec
from coterie_trainer.layers import Attention, FeedForward, RMSNorm, attention_context, compile_dense
from coterie_trainer.model import build_model
from torch import nn

from trainer.specs import SPECS


def _random(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module.double()


def _reference_attention(layer: Attention, x_SD: torch.Tensor, theta: float, eps: float) -> torch.Tensor:
    """One document, one head and one query at a time."""
    num_positions, head_dim = x_SD.shape[0], layer.head_dim
    q, k, v = x_SD @ layer.q.weight.T, x_SD @ layer.k.weight.T, x_SD @ layer.v.weight.T

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def rotate(x_d: torch.Tensor, position: int) -> torch.Tensor:
        half = head_dim // 2
        turned = torch.empty_like(x_d)
        for i in range(half):
            angle = position * theta ** (-2 * i / head_dim)
            turned[i] = x_d[i] * math.cos(angle) - x_d[i + half] * math.sin(angle)
            turned[i + half] = x_d[i + half] * math.cos(angle) + x_d[i] * math.sin(angle)
        return turned

    if layer.qk_norm == "width":
        q, k = norm(q, layer.q_norm.weight), norm(k, layer.k_norm.weight)
    heads = []
    group = layer.num_heads // layer.num_kv_heads
    for head in range(layer.num_heads):
        q_Sd = q[:, head * head_dim : (head + 1) * head_dim]
        shared = head // group
        k_Sd = k[:, shared * head_dim : (shared + 1) * head_dim]
        v_Sd = v[:, shared * head_dim : (shared + 1) * head_dim]
        if layer.qk_norm == "head":
            q_Sd, k_Sd = norm(q_Sd, layer.q_norm.weight), norm(k_Sd, layer.k_norm.weight)
        rows = []
        for position in range(num_positions):
            query = rotate(q_Sd[position], position)
            keys = torch.stack([rotate(k_Sd[other], other) for other in range(position + 1)])
            weights = torch.softmax(keys @ query / math.sqrt(head_dim), dim=0)
            rows.append(weights @ v_Sd[: position + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ layer.o.weight.T


@pytest.mark.parametrize("name", ["qk_norm_head", "qk_norm_width", "shared_expert"])
def test_attention_equals_a_loop_and_stays_inside_documents(name: str) -> None:
    spec: ModelSpec = SPECS[name]
    layer = _random(Attention(spec))
    x_BSD = torch.randn(1, 12, spec.d_model, generator=torch.Generator().manual_seed(2)).double()
    documents_BS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3], dtype=torch.int32)
    out = layer(x_BSD, attention_context(documents_BS, spec.head_dim, spec.rope_theta))[0]
    for start, stop in ((0, 5), (5, 9)):
        expected = _reference_attention(layer, x_BSD[0, start:stop], spec.rope_theta, spec.norm_eps)
        # Rotation and norm are fp32 by contract, whatever the model's dtype.
        torch.testing.assert_close(out[start:stop], expected, rtol=2e-5, atol=2e-6)
    assert out.isfinite().all()


def test_a_later_token_or_another_document_changes_nothing() -> None:
    spec = SPECS["qk_norm_head"]
    layer = _random(Attention(spec))
    context = attention_context(torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32), spec.head_dim, 10000.0)
    x_BSD = torch.randn(1, 6, spec.d_model, dtype=torch.float64)
    changed = x_BSD.clone()
    changed[0, 2] += 1.0
    before, after = layer(x_BSD, context)[0], layer(changed, context)[0]
    assert torch.equal(before[:2], after[:2])
    assert torch.equal(before[3:], after[3:])
    assert not torch.equal(before[2], after[2])


def test_rms_norm_of_a_hand_written_row() -> None:
    norm = RMSNorm(2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 10.0])
    # mean square of (3, 4) is 12.5
    expected = torch.tensor([3.0, 40.0]) / math.sqrt(12.5)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), expected)


def test_feed_forward_uses_the_first_rows_as_the_gate() -> None:
    layer = FeedForward(1, 1)
    layer.gate_up.weight.data = torch.tensor([[2.0], [5.0]])
    layer.down.weight.data = torch.tensor([[3.0]])
    gate = 2.0 / (1.0 + math.exp(-2.0))
    assert layer(torch.tensor([1.0])).item() == pytest.approx(3.0 * gate * 5.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_joined_with_a_residual_sum_is_both_in_turn(dtype: torch.dtype) -> None:
    norm = RMSNorm(8, eps=1e-6)
    nn.init.normal_(norm.weight)
    norm.to(dtype)
    x, change = (torch.randn(3, 5, 8).to(dtype) for _ in range(2))
    total, normalised = norm.after_sum(x, change)
    assert torch.equal(total, x + change)
    assert torch.equal(normalised, norm(x + change))
    assert torch.equal(norm.added_to(x, change), x + norm(change))


class _Counting:
    """A back-end of `torch.compile` that counts graphs and runs them as they are, with their gradients traced."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        self.num_graphs += 1
        return aot_eager(graph, inputs)


def _run(model: nn.Module, seed: int, documents_BS: torch.Tensor) -> list[torch.Tensor]:
    tokens_BS = torch.randint(64, documents_BS.shape, generator=torch.Generator().manual_seed(seed))
    hidden_BSD = model(tokens_BS, documents_BS).hidden_BSD
    return [
        hidden_BSD.detach(),
        *torch.autograd.grad(hidden_BSD.square().sum(), list(model.parameters()), allow_unused=True),
    ]


# The compiler looks at the gradients of what is given to it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("name", "recompute"), [("qk_norm_head", ("attention",)), ("post_norm", ())])
def test_compiled_layers_are_the_plain_ones_and_compiled_once(name: str, recompute: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    spec = dataclasses.replace(SPECS[name], num_layers=3)
    plain, compiled = (_random(build_model(spec, recompute=recompute)).float() for _ in range(2))
    counting = _Counting()
    assert compile_dense(compiled, backend=counting) is compiled
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    first_BS = torch.tensor([[0] * 9 + [1] * 3, [0] * 5 + [-1] * 7], dtype=torch.int32)
    graphs = []
    for seed, documents_BS in enumerate([first_BS, first_BS * 0]):
        for ours, expected in zip(_run(compiled, seed, documents_BS), _run(plain, seed, documents_BS), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        graphs.append(counting.num_graphs)
    # Norm, rotation of queries and of keys, SwiGLU: not one for each layer, and none for another batch.
    assert 2 <= graphs[0] <= 5
    assert graphs[1] == graphs[0]


def test_nothing_is_compiled_unless_asked() -> None:
    model = build_model(SPECS["qk_norm_head"])
    for module in model.modules():
        if hasattr(module, "fused"):
            assert module.fused(len) is len
