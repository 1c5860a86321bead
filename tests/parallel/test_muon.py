"""Muon against a plain reference, against torch, and shared out over ranks."""

import math

import pytest
import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    Mesh,
    MuonConfig,
    Optimizer,
    ParallelConfig,
    ReductionConfig,
    make_plan,
    orthogonalize,
)
from coterie_parallel.gradients import bucket_layouts
from coterie_parallel.optimizer.muon import MatrixExchange, owners_by_cost
from support.ranks import run_ranks
from torch import Tensor, nn

from parallel.optimizer_cases import one_process

SHAPES = {"wide": (8, 20), "tall": (30, 6), "square": (7, 7), "experts": (4, 10, 6)}
# Large enough that most are cut into several shards, of which there are 64 elements at least.
EXCHANGED = {"wide": (24, 40), "tall": (60, 12), "square": (20, 20), "experts": (4, 30, 18)}
RATES = [0.1, 0.05, 0.02, 0.01]


def _named(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {**SHAPES, "bias": (7,), "embed": (9, 4)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def _gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(17 * step + len(name)))


def _config(muon: MuonConfig, **changes: object) -> AdamWConfig:
    return AdamWConfig(gradient_clip=None, weight_decay=0.2, muon=muon, **changes)  # type: ignore[arg-type]


def _train(named: dict[str, nn.Parameter], config: AdamWConfig) -> Optimizer:
    optimizer = Optimizer(named.items(), dict.fromkeys(named, DENSE), one_process(), config)
    for step, rate in enumerate(RATES):
        for name, parameter in named.items():
            parameter.grad = _gradient(name, tuple(parameter.shape), step).to(parameter.dtype)
        optimizer.step(rate)
        optimizer.zero_grad()
    return optimizer


def _reference(weight_RC: Tensor, gradients: list[Tensor], *, nesterov: bool, scale: float) -> Tensor:
    """Return a matrix after the steps of https://github.com/KellerJordan/Muon, written out in fp64."""
    weight_RC = weight_RC.double()
    average = torch.zeros_like(weight_RC)
    for rate, gradient in zip(RATES, gradients, strict=True):
        average = 0.95 * average + 0.05 * gradient.double()
        update = 0.05 * gradient.double() + 0.95 * average if nesterov else average
        u, s, v = torch.linalg.svd(update, full_matrices=False)
        s = s / (s.square().sum().sqrt() + 1e-7)
        for _ in range(5):  # the iteration acts on each singular value alone
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weight_RC = weight_RC * (1 - rate * 0.2) - rate * scale * (u * s) @ v
    return weight_RC


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms", "spectral"])
def test_four_steps_equal_the_reference(scale: str, nesterov: bool) -> None:
    before = {name: parameter.detach().clone() for name, parameter in _named().items()}
    named = _named()
    _train(named, _config(MuonConfig(scale=scale, nesterov=nesterov, dtype="float32")))  # type: ignore[arg-type]
    for name, shape in SHAPES.items():
        rows, columns = shape[-2:]
        factor = 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms" else math.sqrt(max(1, rows / columns))
        gradients = [_gradient(name, shape, step).view(-1, rows, columns) for step in range(len(RATES))]
        for number, found in enumerate(named[name].detach().view(-1, rows, columns)):
            start = before[name].view(-1, rows, columns)[number]
            expected = _reference(start, [one[number] for one in gradients], nesterov=nesterov, scale=factor)
            # 3.4445^5 = 485 is what the iteration can make of a rounding of 6e-8 in the smallest singular values.
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=485 * 6e-8 * factor)


def test_embeddings_and_vectors_stay_with_adamw() -> None:
    named, plain = _named(), _named()
    optimizer = _train(named, _config(MuonConfig(exclude=("embed", "square"))))
    assert {key.partition("/")[2] for key in optimizer.state_dict() if key.startswith("momentum/")} == {
        "wide",
        "tall",
        "experts",
    }
    _train(plain, AdamWConfig(gradient_clip=None, weight_decay=0.2))
    for name in ("bias", "embed", "square"):
        assert torch.equal(named[name], plain[name])
    assert not torch.equal(named["wide"], plain["wide"])


# Names of Hugging Face Llama, Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral, GPT-2 and GPT-NeoX, of torchtitan, Megatron, and of
# coterie-trainer, some in wrappers.
NOT_HIDDEN = """
model.embed_tokens.weight lm_head.weight module.lm_head.weight module.model.embed_tokens.weight
model.layers.0.mlp.gate.weight model.layers.11.mlp.shared_expert_gate.weight model.layers.0.block_sparse_moe.gate.weight
transformer.wte.weight transformer.wpe.weight wte.weight gpt_neox.embed_in.weight embed_out.weight
tok_embeddings.weight output.weight _orig_mod.output.weight module.output.weight layers.1.moe.router.gate.weight
embedding.word_embeddings.weight embedding.position_embeddings.weight output_layer.weight module.output_layer.weight
decoder.layers.0.mlp.router.weight embed.weight head.weight model.head.weight layers.1.moe.router.weight embed head
"""
HIDDEN = """
model.layers.0.self_attn.q_proj.weight model.layers.0.self_attn.o_proj.weight model.layers.0.mlp.gate_proj.weight
model.layers.0.mlp.up_proj.weight model.layers.0.mlp.gate_up_proj.weight model.layers.0.mlp.experts.0.gate_proj.weight
model.layers.0.mlp.experts.gate_up_proj model.layers.0.mlp.experts.down_proj
model.layers.0.mlp.shared_expert.gate_proj.weight model.layers.0.block_sparse_moe.experts.0.w1.weight
transformer.h.0.attn.c_attn.weight transformer.h.0.mlp.c_proj.weight transformer.h.0.attn.multihead_attn.in_proj_weight
gpt_neox.layers.0.attention.query_key_value.weight gpt_neox.layers.0.attention.dense.weight
layers.0.attention.wq.weight layers.0.attention.wo.weight layers.0.feed_forward.w1.weight
layers.1.moe.experts.w1 layers.1.moe.shared_experts.w3.weight layers.0.attention.output.weight
decoder.layers.0.self_attention.linear_qkv.weight decoder.layers.0.mlp.linear_fc1.weight
layers.0.attention.q.weight layers.0.mlp.gate_up.weight layers.1.moe.experts.gate_up layers.1.moe.shared.gate_up.weight
"""


def test_the_usual_names_of_embeddings_heads_and_routers_stay_with_adamw() -> None:
    config = AdamWConfig(muon=MuonConfig())
    assert [name for name in NOT_HIDDEN.split() if config.kind_of(name, 2) != "adamw"] == []
    assert [name for name in HIDDEN.split() if config.kind_of(name, 2) != "muon"] == []


def test_bf16_equals_the_muon_of_torch_to_its_rounding() -> None:
    named, theirs = _named(), _named()
    _train(named, _config(MuonConfig(dtype="bfloat16")))
    exact = _named()
    _train(exact, _config(MuonConfig()))
    for name in ("wide", "tall", "square"):
        reference = torch.optim.Muon(
            [theirs[name]], weight_decay=0.2, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
        )
        for step, rate in enumerate(RATES):
            theirs[name].grad = _gradient(name, SHAPES[name], step)
            reference.param_groups[0]["lr"] = rate
            reference.step()
        error = float((named[name] - exact[name]).detach().abs().max())
        reference_error = float((theirs[name] - exact[name]).detach().abs().max())
        assert 0 < error <= 2 * reference_error, name


@pytest.mark.parametrize(
    ("dtype", "iterated"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float32")]
)
def test_auto_iterates_in_bf16_only_for_bf16_parameters(dtype: torch.dtype, iterated: str) -> None:
    found = {}
    for setting in ("auto", "float32", "bfloat16"):
        named = _named(dtype)
        optimizer = _train(named, _config(MuonConfig(dtype=setting)))  # type: ignore[arg-type]
        state = optimizer.state_dict()
        found[setting] = {name: state.get(f"main/{name}", named[name].detach().flatten()) for name in SHAPES}
    for name in SHAPES:
        assert torch.equal(found["auto"][name], found[iterated][name])
        assert not torch.equal(found["float32"][name], found["bfloat16"][name])


def test_parameters_of_two_dtypes_iterate_each_in_its_own() -> None:
    named = {**_named(), **{f"half.{name}": parameter for name, parameter in _named(torch.bfloat16).items()}}
    _train(named, _config(MuonConfig()))
    for prefix, dtype in (("", torch.float32), ("half.", torch.bfloat16)):
        alone = {f"{prefix}{name}": parameter for name, parameter in _named(dtype).items()}
        _train(alone, _config(MuonConfig()))
        for name, parameter in alone.items():
            assert torch.equal(named[name], parameter), name


def test_singular_values_end_near_one_and_zeros_stay() -> None:
    matrices = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    torch.testing.assert_close(orthogonalize(matrices.mT), orthogonalize(matrices).mT, rtol=0, atol=1e-5)
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_owners_have_about_the_same_work() -> None:
    assert owners_by_cost([5, 5, 5, 5], 2) == [0, 0, 1, 1]
    assert owners_by_cost([1] * 3, 8) == [1, 4, 6]
    assert owners_by_cost([7], 1) == [0]
    assert owners_by_cost([], 4) == []
    costs = [(3 * number) % 17 + 1 for number in range(100)]
    owners = owners_by_cost(costs, 7)
    assert owners == sorted(owners)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(7)]
    assert max(loads) <= sum(costs) / 7 + max(costs)


def _exchange(rank: int, world: int) -> dict[str, Tensor]:
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        sizes = [(name, math.prod(shape), torch.float32) for name, shape in EXCHANGED.items()]
        layouts = bucket_layouts(sizes, dict.fromkeys(EXCHANGED, DENSE), mesh.plan, 8000)
        assert len(layouts) > 1
        exchange = MatrixExchange(layouts, EXCHANGED, mesh.axis("data"))
        shards = []
        for layout in layouts:
            flat = torch.zeros(layout.numel)
            for slot in layout.slots:
                flat[slot.start : slot.start + slot.numel] = _gradient(slot.name, EXCHANGED[slot.name], 0).flatten()
            shards.append(flat.view(world, -1)[rank])
        result = exchange.orthogonalized(torch.cat(shards), num_iterations=5)
        found: dict[str, Tensor] = {}
        for layout, part in zip(layouts, result.split([layout.shard_numel for layout in layouts]), strict=True):
            start = rank * layout.shard_numel
            for slot in layout.slots:
                first, last = layout.piece(slot, rank)
                found[slot.name] = part[slot.start + first - start :][: last - first]
        return found


def test_matrices_cut_at_any_place_come_back_whole() -> None:
    results = run_ranks(_exchange, 4)
    for name, shape in EXCHANGED.items():
        whole = torch.cat([result[name] for result in results]).view(-1, *shape[-2:])
        expected = orthogonalize(_gradient(name, shape, 0).view(-1, *shape[-2:]))
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)


def test_the_loss_falls() -> None:
    target = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
    named = {"layer.weight": nn.Parameter(torch.zeros(12, 8))}
    config = AdamWConfig(weight_decay=0.0, muon=MuonConfig(), reduction=ReductionConfig())
    optimizer = Optimizer(named.items(), {"layer.weight": EXPERTS}, one_process(), config)
    for step in range(200):
        optimizer.zero_grad()
        ((named["layer.weight"] - target) ** 2).sum().backward()
        optimizer.step(0.1 * (1 - step / 200))
    torch.testing.assert_close(named["layer.weight"].detach(), target, rtol=0, atol=0.02)
