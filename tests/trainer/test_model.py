import pytest
import torch
from coterie_export import ModelSpec
from coterie_parallel import Axis
from coterie_trainer.initialization import initialize
from coterie_trainer.model import build_model, placements

from trainer.specs import SPECS


def _build(spec: ModelSpec, **options: object) -> torch.nn.Module:
    model = build_model(spec, **options)
    initialize(model, seed=3, std=0.02)
    return model


@pytest.mark.parametrize("name", SPECS)
def test_state_dict_is_that_of_the_spec(name: str) -> None:
    spec = SPECS[name]
    shapes = {key: tuple(tensor.shape) for key, tensor in build_model(spec).state_dict().items()}
    assert shapes == {key: tuple(shape) for key, shape in spec.tensor_shapes().items()}


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_is_trained_and_none_is_uninitialised(name: str) -> None:
    spec = SPECS[name]
    model = _build(spec)
    tokens_BS = torch.randint(spec.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    output = model(tokens_BS, torch.zeros(2, 16, dtype=torch.int32))
    model.logits(output.hidden_BSD).logsumexp(-1).sum().backward()
    assert len(output.routings) == spec.num_layers - spec.num_dense_layers
    assert all(int(routing.counts_E.sum()) == 32 * spec.top_k for routing in output.routings)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


def test_padding_reaches_neither_outputs_nor_statistics() -> None:
    spec = SPECS["shared_expert"]
    model = _build(spec)
    tokens_BS = torch.randint(spec.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    padded_BS = torch.cat([tokens_BS, torch.full((1, 4), 7)], dim=1)
    short = model(tokens_BS, torch.zeros(1, 8, dtype=torch.int32))
    long = model(padded_BS, torch.tensor([[0] * 8 + [-1] * 4], dtype=torch.int32))
    torch.testing.assert_close(long.hidden_BSD[:, :8], short.hidden_BSD, rtol=1e-5, atol=1e-6)
    for a, b in zip(short.routings, long.routings, strict=True):
        assert torch.equal(a.counts_E, b.counts_E)
        assert int(a.sums.num_tokens) == int(b.sums.num_tokens) == 8


def test_experts_that_gather_and_sum_by_themselves_give_the_bits_of_the_local_dispatcher() -> None:
    moe = _build(SPECS["shared_expert"]).layers[-1].moe
    assert moe.fuses_dispatch
    x_TD = torch.randn(24, SPECS["shared_expert"].d_model, generator=torch.Generator().manual_seed(1))
    is_real_T = torch.arange(24) % 5 > 0
    y_TD, routing = moe(x_TD, is_real_T)
    assert y_TD.detach()[1:5].abs().amin().item() > 0
    assert torch.equal(moe._run_tokens(x_TD, routing) + moe._run_shared(x_TD), y_TD)
    assert not _build(SPECS["shared_expert"], dispatcher="all_to_all").layers[-1].moe.fuses_dispatch
    assert not _build(SPECS["shared_expert"], recompute=["dispatch"]).layers[-1].moe.fuses_dispatch


def test_initialisation_does_not_depend_on_the_split_of_experts() -> None:
    spec = SPECS["qk_norm_head"]
    whole = _build(spec).state_dict()
    for size in (2, 4):
        parts = [
            _build(
                spec,
                expert_axis=Axis(name="expert", size=size, index=index, group=None, ranks=tuple(range(size))),
                dispatcher="all_to_all",
            ).state_dict()
            for index in range(size)
        ]
        for key, tensor in whole.items():
            joined = torch.cat([part[key] for part in parts]) if ".experts." in key else parts[-1][key]
            assert torch.equal(joined, tensor), key
    experts_E = whole["layers.1.moe.experts.down"].flatten(1)
    assert len({tuple(row.tolist()) for row in experts_E}) == spec.num_experts
    assert whole["layers.1.moe.experts.gate_up"].std().item() == pytest.approx(0.02, rel=0.05)
    assert whole["layers.1.moe.experts.down"].std().item() == pytest.approx(0.02 / 2.0, rel=0.05)


def test_every_parameter_has_a_placement() -> None:
    model = build_model(SPECS["shared_expert"])
    table = placements(model)
    assert set(table) == {name for name, _ in model.named_parameters()}
    sharded = {name for name, placement in table.items() if placement.sharded_over}
    assert sharded == {"layers.1.moe.experts.gate_up", "layers.1.moe.experts.down"}


def test_a_model_in_bf16_keeps_its_selection_bias_in_fp32() -> None:
    model = build_model(SPECS["shared_expert"], dtype=torch.bfloat16)
    assert model.embed.weight.dtype == torch.bfloat16
    assert model.layers[1].moe.router.selection_bias.dtype == torch.float32
