"""Router, dispatcher and experts of three packages together, with every back-end, against plain loops."""

import pytest
import torch
import torch.nn.functional as F
from coterie_export import ModelSpec
from coterie_parallel import DispatchOptions, Mesh, ParallelConfig, make_dispatcher, make_plan
from coterie_trainer.initialization import initialize
from coterie_trainer.model import MoE, build_model
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SPEC = ModelSpec(
    vocab_size=8,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=8,
    top_k=3,
    expert_hidden=12,
    shared_hidden=8,
    route_scale=1.5,
    max_sequence_length=16,
)
TOKENS = (5, 0, 9, 2)  # of each of four ranks; one has none


def block(mesh: Mesh, dispatcher: str, expert_backend: str, options: DispatchOptions | None = None) -> MoE:
    model = build_model(
        SPEC,
        expert_axis=mesh.axis("expert"),
        dispatcher=dispatcher,
        options=options,
        expert_backend=expert_backend,
    )
    initialize(model, seed=4, std=0.3)
    return model.layers[0].moe


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(sum(TOKENS), SPEC.d_model, generator=generator)
    upstream_TD = torch.randn(sum(TOKENS), SPEC.d_model, generator=generator)
    return x_TD, upstream_TD, torch.arange(sum(TOKENS)) % 7 != 6  # the rest is padding


def plain_loops(moe: MoE, x_TD: Tensor, is_real_T: Tensor) -> Tensor:
    """One token and one choice at a time."""
    rows = []
    for x_D, is_real in zip(x_TD, is_real_T, strict=True):
        gate, up = (moe.shared.gate_up.weight @ x_D).chunk(2)
        y_D = moe.shared.down.weight @ (F.silu(gate) * up)
        if is_real:
            scores_E = torch.softmax(moe.router.weight @ x_D, dim=0)
            chosen = scores_E.argsort(descending=True, stable=True)[: SPEC.top_k]
            for expert in chosen.tolist():
                gate, up = (moe.experts.gate_up[expert] @ x_D).chunk(2)
                weight = SPEC.route_scale * scores_E[expert] / scores_E[chosen].sum()
                y_D = y_D + moe.experts.down[expert] @ (F.silu(gate) * up * weight)
        rows.append(y_D)
    return torch.stack(rows)


def outcome(moe: MoE, y_TD: Tensor, x_TD: Tensor, upstream_TD: Tensor) -> dict[str, Tensor]:
    (y_TD * upstream_TD).sum().backward()
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return {"output": y_TD.detach(), "tokens": x_TD.grad, **gradients}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    moe = block(_single(), "local", "reference").double()
    x_TD, upstream_TD, is_real_T = inputs()
    x_TD = x_TD.double().requires_grad_()
    return outcome(moe, plain_loops(moe, x_TD, is_real_T), x_TD, upstream_TD.double())


def _single() -> Mesh:
    return Mesh(make_plan(ParallelConfig(expert=1), 1), 0, timeout_s=30.0)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor).abs().max() / tensor.abs().max())
        assert error <= 2e-6, (name, error)  # sums of up to 16 products in fp32


@pytest.mark.parametrize("dispatcher", ["local", "all_to_all", "rowwise"])
@pytest.mark.parametrize("expert_backend", ["reference", "torch"])
def test_one_rank(dispatcher: str, expert_backend: str, expected: dict[str, Tensor]) -> None:
    moe = block(_single(), dispatcher, expert_backend)
    x_TD, upstream_TD, is_real_T = inputs()
    y_TD, routing = moe(x_TD.requires_grad_(), is_real_T)
    assert int(routing.counts_E.sum()) == SPEC.top_k * int(is_real_T.sum())
    assert_close(outcome(moe, y_TD, x_TD, upstream_TD), expected)


VARIANTS = {
    "all_to_all": ("all_to_all", DispatchOptions(), False),
    "all_to_all, overlap": ("all_to_all", DispatchOptions(overlap=True), False),
    "rowwise": ("rowwise", DispatchOptions(capacity_factor=4.0), False),
    "rowwise, overlap": ("rowwise", DispatchOptions(capacity_factor=4.0, overlap=True), False),
    "rowwise, lease": ("rowwise", DispatchOptions(capacity_factor=4.0, saved_rows="lease"), False),
    "rowwise, fetch": ("rowwise", DispatchOptions(capacity_factor=4.0, saved_rows="fetch"), False),
    "rowwise, exact": ("rowwise", DispatchOptions(overflow="exact"), False),
    "rowwise, recomputed": ("rowwise", DispatchOptions(capacity_factor=4.0, overlap=True), True),
}
"""Dispatcher, its options, and whether the block is computed again in the backward pass."""


def on_rank(rank: int, world: int, expert_backends: list[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    found = {}
    start, stop = sum(TOKENS[:rank]), sum(TOKENS[: rank + 1])
    with Mesh(make_plan(ParallelConfig(data=world, expert=world), world), rank, timeout_s=30.0) as mesh:
        for expert_backend in expert_backends:
            for name, (dispatcher, options, is_recomputed) in VARIANTS.items():
                moe = block(mesh, dispatcher, expert_backend, options)
                x_TD, upstream_TD, is_real_T = (part[start:stop] for part in inputs())
                x_TD = x_TD.clone().requires_grad_()
                if is_recomputed:
                    y_TD, _ = checkpoint(moe, x_TD, is_real_T, use_reentrant=False)
                else:
                    y_TD, _ = moe(x_TD, is_real_T)
                result = outcome(moe, y_TD, x_TD, upstream_TD)
                assert moe.dispatcher.grow() is None
                moe.dispatcher.close()
                found[name, expert_backend] = {key: tensor.numpy() for key, tensor in result.items()}
    return found


def test_four_ranks_that_hold_two_experts_each(expected: dict[str, Tensor]) -> None:
    backends = ["reference", "torch"]
    parts = run_ranks(on_rank, 4, backends)
    for expert_backend in backends:
        for name in VARIANTS:
            joined = {}
            for key in expected:
                tensors = [torch.from_numpy(part[name, expert_backend][key]) for part in parts]
                is_cut = key in ("output", "tokens") or key.startswith("experts.")
                joined[key] = torch.cat(tensors) if is_cut else sum(tensors)
            assert_close(joined, expected)
            for part in parts:
                for key, values in part["all_to_all", expert_backend].items():
                    assert (part[name, expert_backend][key] == values).all(), (name, expert_backend, key)


def test_the_dispatcher_is_the_one_that_was_asked_for() -> None:
    axis = _single().axis("expert")
    for name in ("local", "all_to_all", "rowwise"):
        own = type(make_dispatcher(name, num_experts=SPEC.num_experts, axis=axis))
        assert type(block(_single(), name, "reference").dispatcher) is own
