"""The layouts of Hugging Face: views where memory allows, and a way back."""

import pytest
import torch
from coterie_experts import (
    MIXTRAL_NAMES,
    ExpertsConfig,
    GroupedExperts,
    fused_views,
    init_experts,
    interleaved_tensors,
    load_interleaved,
    load_views,
    per_expert_views,
)
from torch import Tensor


def build(first: int, count: int, *, seed: int = 5, **changes: object) -> GroupedExperts:
    config = ExpertsConfig(**{"d_model": 12, "d_hidden": 20, "num_experts": 8, **changes})
    share = GroupedExperts(config, first_expert=first, num_local_experts=count)
    init_experts(share, seed=seed, name="layers.0", std=0.02, down_std=0.01)
    return share


def share_memory(view: Tensor, whole: Tensor) -> bool:
    """The view begins where it should within the same storage."""
    same = view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same and view.data_ptr() == whole.data_ptr() + view.storage_offset() * view.itemsize


def test_layouts_are_views_and_compute_the_same() -> None:
    experts = build(0, 8)
    fused = fused_views(experts.gate_up, experts.down)
    single = per_expert_views(experts.gate_up, experts.down)
    assert {name: tuple(view.shape) for name, view in fused.items()} == {
        "gate_up_proj": (8, 40, 12),
        "down_proj": (8, 12, 20),
    }
    assert len(single) == 24
    memory = {experts.gate_up.untyped_storage().data_ptr(), experts.down.untyped_storage().data_ptr()}
    assert {view.untyped_storage().data_ptr() for view in (*fused.values(), *single.values())} == memory
    x = torch.randn(5, 12)
    gate, up, down = (single[f"3.{part}_proj.weight"] for part in ("gate", "up", "down"))
    by_hand = torch.nn.functional.linear(
        torch.nn.functional.silu(torch.nn.functional.linear(x, gate)) * torch.nn.functional.linear(x, up), down
    )
    ours = experts(x, torch.ones(5), torch.tensor([0, 0, 0, 5, 5, 5, 5, 5], dtype=torch.int32))
    torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-8)


def test_per_expert_tensors_load_into_the_share_of_a_rank() -> None:
    whole, share = build(0, 8), build(6, 2, seed=9)
    source = per_expert_views(whole.gate_up, whole.down)
    target = per_expert_views(share.gate_up, share.down, first_expert=6)
    load_views(target, {name: source[name] for name in target})
    assert torch.equal(share.gate_up, whole.gate_up[6:])
    assert torch.equal(share.down, whole.down[6:])


def test_loading_names_every_difference_and_copies_nothing() -> None:
    experts = build(0, 8)
    before = experts.gate_up.detach().clone()
    target = per_expert_views(experts.gate_up, experts.down)
    tensors = {name: torch.zeros_like(view) for name, view in target.items()}
    del tensors["2.up_proj.weight"]
    tensors["8.up_proj.weight"] = torch.zeros(1)
    tensors["0.gate_proj.weight"] = torch.zeros(12, 20)
    text = (
        r"2\.up_proj\.weight is missing\n8\.up_proj\.weight is not known\n"
        r"0\.gate_proj\.weight must have shape \(20, 12\) but has \(12, 20\)"
    )
    with pytest.raises(ValueError, match=text):
        load_views(target, tensors)
    assert torch.equal(experts.gate_up, before)


def test_each_view_begins_at_its_own_numbers() -> None:
    """By data_ptr: fused is the parameter itself, an expert's parts begin at its rows."""
    experts = build(0, 8)
    fused = fused_views(experts.gate_up, experts.down)
    assert fused["gate_up_proj"].data_ptr() == experts.gate_up.data_ptr()
    assert fused["down_proj"].data_ptr() == experts.down.data_ptr()
    single = per_expert_views(experts.gate_up, experts.down, first_expert=40)
    assert single["43.gate_proj.weight"].data_ptr() == experts.gate_up[3].data_ptr()
    assert single["43.up_proj.weight"].data_ptr() == experts.gate_up[3, 20].data_ptr()
    assert single["43.down_proj.weight"].data_ptr() == experts.down[3].data_ptr()
    single["43.up_proj.weight"].fill_(7.0)
    assert (experts.gate_up[3, 20:] == 7).all()
    assert (experts.gate_up[3, :20] != 7).all()


def test_names_of_mixtral() -> None:
    """w1 is the gate, w3 up and w2 down."""
    experts = build(0, 8)
    usual = per_expert_views(experts.gate_up, experts.down)
    mixtral = per_expert_views(experts.gate_up, experts.down, names=MIXTRAL_NAMES)
    renamed = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    assert len(mixtral) == 24
    for name, view in mixtral.items():
        expert, part, _ = name.split(".")
        assert view.data_ptr() == usual[f"{expert}.{renamed[part]}.weight"].data_ptr()


def test_layouts_without_a_gate() -> None:
    experts = build(0, 8, activation="relu_squared")
    fused = fused_views(experts.up, experts.down, gated=False)
    assert {name: view.data_ptr() for name, view in fused.items()} == {
        "up_proj": experts.up.data_ptr(),
        "down_proj": experts.down.data_ptr(),
    }
    single = per_expert_views(experts.up, experts.down, gated=False)
    assert len(single) == 16
    assert single["2.up_proj.weight"].shape == (20, 12)
    assert single["2.up_proj.weight"].data_ptr() == experts.up[2].data_ptr()
    assert single["2.down_proj.weight"].data_ptr() == experts.down[2].data_ptr()


def test_layouts_with_the_wrong_gate_are_refused() -> None:
    plain, gated = build(0, 8, activation="relu_squared"), build(0, 8)
    for layout in (per_expert_views, fused_views):
        with pytest.raises(ValueError, match=r"up \(8, 20, 12\) has no gate rows beside .*: pass gated=False"):
            layout(plain.up, plain.down)
        with pytest.raises(ValueError, match=r"up \(8, 40, 12\) has gate rows beside .*: pass gated=True"):
            layout(gated.gate_up, gated.down, gated=False)
        for up, down in ((gated.gate_up, gated.down[1:]), (gated.gate_up.mT, gated.down), (gated.gate_up[0],) * 2):
            with pytest.raises(ValueError, match=r"up must be \(e, 2H, D\), or \(e, H, D\) with gated=False"):
                layout(up, down)


def gpt_oss(seed: int = 5) -> GroupedExperts:
    experts = build(0, 8, seed=seed, activation="swiglu_clamped", bias=True)
    for bias in (experts.gate_up_bias, experts.down_bias):
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(seed))
    return experts


def parameters(experts: GroupedExperts) -> tuple[Tensor, ...]:
    return experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias


def test_interleaved_layout_of_gpt_oss() -> None:
    """Columns gate 0, up 0, gate 1, ...; what is not interleaved is a view."""
    experts = gpt_oss()
    tensors = interleaved_tensors(*parameters(experts))
    assert {name: tuple(one.shape) for name, one in tensors.items()} == {
        "gate_up_proj": (8, 12, 40),
        "gate_up_proj_bias": (8, 40),
        "down_proj": (8, 20, 12),
        "down_proj_bias": (8, 12),
    }
    assert torch.equal(tensors["gate_up_proj"][3, :, 8], experts.gate_up[3, 4])
    assert torch.equal(tensors["gate_up_proj"][3, :, 9], experts.gate_up[3, 24])
    assert torch.equal(tensors["gate_up_proj_bias"][:, ::2], experts.gate_up_bias[:, :20])
    assert torch.equal(tensors["gate_up_proj_bias"][:, 1::2], experts.gate_up_bias[:, 20:])
    assert torch.equal(tensors["down_proj"], experts.down.mT)
    assert share_memory(tensors["down_proj"], experts.down)
    assert tensors["down_proj_bias"].data_ptr() == experts.down_bias.data_ptr()
    other = gpt_oss(seed=6)
    load_interleaved(*parameters(other), {name: one.clone() for name, one in tensors.items()})
    for one, same in zip(parameters(other), parameters(experts), strict=True):
        assert torch.equal(one, same)


def test_loading_the_interleaved_layout_names_every_difference_and_copies_nothing() -> None:
    experts = gpt_oss()
    before = [one.detach().clone() for one in parameters(experts)]
    tensors = interleaved_tensors(*parameters(gpt_oss(seed=6)))
    tensors["gate_up_proj"] = tensors["gate_up_proj"].mT
    tensors["down"] = tensors.pop("down_proj")
    text = r"down_proj is missing\ndown is not known\ngate_up_proj must have shape \(8, 12, 40\) but has \(8, 40, 12\)"
    with pytest.raises(ValueError, match=text):
        load_interleaved(*parameters(experts), tensors)
    for one, same in zip(parameters(experts), before, strict=True):
        assert torch.equal(one, same)


def test_nothing_is_loaded_into_a_module_without_memory() -> None:
    experts = GroupedExperts(ExpertsConfig(d_model=8, d_hidden=4, num_experts=2), device="meta")
    tensors = {"gate_up_proj": torch.ones(2, 8, 8), "down_proj": torch.ones(2, 8, 4)}
    with pytest.raises(ValueError, match=r"^gate_up_proj is on meta: .*\ndown_proj is on meta: "):
        load_views(fused_views(experts.gate_up, experts.down), tensors)


def test_interleaved_shapes_that_do_not_fit_are_refused() -> None:
    up, down = torch.zeros(2, 8, 16), torch.zeros(2, 16, 4)
    with pytest.raises(ValueError, match=r"up must be \(e, 2H, D\)"):
        interleaved_tensors(up[:, :7], down, torch.zeros(2, 8), torch.zeros(2, 16))
    with pytest.raises(ValueError, match=r"down_bias \(2, 16\), but they are \(2, 8\) and \(7, 16\)"):
        interleaved_tensors(up, down, torch.zeros(2, 8), torch.zeros(7, 16))


def test_what_holds_no_numbers_is_not_loaded_and_nothing_is() -> None:
    experts = GroupedExperts(ExpertsConfig(d_model=8, d_hidden=4, num_experts=2))
    before = experts.gate_up.detach().clone()
    views = fused_views(experts.gate_up, experts.down)
    for down in (torch.ones(2, 8, 4, device="meta"), torch.ones(2, 8, 4, dtype=torch.complex64)):
        with pytest.raises(ValueError, match=r"down_proj is .*: it has no real numbers to load"):
            load_views(views, {"gate_up_proj": torch.ones(2, 8, 8), "down_proj": down})
        assert torch.equal(experts.gate_up, before)


@pytest.mark.parametrize("names", [("w", "w", "v"), ("w", "v")])
def test_names_that_hide_a_tensor_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must be three different ones"):
        per_expert_views(torch.zeros(2, 8, 8), torch.zeros(2, 8, 4), names=names)
