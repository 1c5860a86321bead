"""ModelSpec: canonical names and shapes written out by hand, and every problem in one report."""

from dataclasses import replace

import pytest
from coterie_export import ModelSpec, family_problems, fitting_families, get_family

from export.cases import CASES

SPEC = ModelSpec(
    vocab_size=40,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    num_experts=3,
    top_k=2,
    expert_hidden=6,
    max_sequence_length=64,
    num_dense_layers=1,
    dense_hidden=14,
    shared_hidden=12,
    selection_bias=True,
    qk_norm="head",
)


def test_tensor_shapes_in_canonical_order() -> None:
    attention = {
        "attention_norm.weight": (16,),
        "attention.q.weight": (40, 16),
        "attention.k.weight": (20, 16),
        "attention.v.weight": (20, 16),
        "attention.o.weight": (16, 40),
        "attention.q_norm.weight": (10,),
        "attention.k_norm.weight": (10,),
        "mlp_norm.weight": (16,),
    }
    expected = {
        "embed.weight": (40, 16),
        **{f"layers.0.{name}": shape for name, shape in attention.items()},
        "layers.0.mlp.gate_up.weight": (28, 16),
        "layers.0.mlp.down.weight": (16, 14),
        **{f"layers.1.{name}": shape for name, shape in attention.items()},
        "layers.1.moe.router.weight": (3, 16),
        "layers.1.moe.router.selection_bias": (3,),
        "layers.1.moe.experts.gate_up": (3, 12, 16),
        "layers.1.moe.experts.down": (3, 16, 6),
        "layers.1.moe.shared.gate_up.weight": (24, 16),
        "layers.1.moe.shared.down.weight": (16, 12),
        "norm.weight": (16,),
        "head.weight": (40, 16),
    }
    assert list(SPEC.tensor_shapes().items()) == list(expected.items())


def test_optional_tensors_follow_the_spec() -> None:
    plain = replace(SPEC, qk_norm=None, selection_bias=False, shared_hidden=0, tied_embeddings=True)
    gone = set(SPEC.tensor_shapes()) - set(plain.tensor_shapes())
    assert gone == {
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.k_norm.weight",
        "layers.1.attention.q_norm.weight",
        "layers.1.attention.k_norm.weight",
        "layers.1.moe.router.selection_bias",
        "layers.1.moe.shared.gate_up.weight",
        "layers.1.moe.shared.down.weight",
        "head.weight",
    }
    wide = replace(SPEC, qk_norm="width").tensor_shapes()
    assert wide["layers.0.attention.q_norm.weight"] == (40,)
    assert wide["layers.0.attention.k_norm.weight"] == (20,)


def test_every_problem_is_reported_at_once() -> None:
    broken = replace(
        SPEC,
        num_kv_heads=3,
        head_dim=7,
        top_k=9,
        num_dense_layers=2,
        qk_norm="both",
        eos_id=40,
        norm_eps=0.0,
        d_model=0,
    )
    assert broken.problems() == [
        "d_model (0) must be at least 1",
        "norm_eps (0.0) must be a positive finite number",
        "qk_norm ('both') must be one of None, 'head', 'width'",
        "eos_id (40) must be None or from 0 to vocab_size - 1 (39)",
        "num_kv_heads (3) must divide num_heads (4): [1, 2, 4]",
        "head_dim (7) must be even for rotary positions; nearest: 6 or 8",
        "top_k (9) must be from 1 to num_experts (3)",
        "num_dense_layers (2) must be from 0 to num_layers - 1 (1): at least one layer is routed",
    ]
    with pytest.raises(ValueError, match=r"(?s)d_model.*num_dense_layers"):
        broken.tensor_shapes()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"top_k": True}, "top_k must be int, not True"),
        ({"num_experts": 3.0}, "num_experts must be int, not 3.0"),
        ({"eos_id": [1, 2]}, "eos_id must be int or None, not [1, 2]"),
        ({"renormalize": 1}, "renormalize must be bool, not 1"),
        ({"dense_hidden": 0}, "dense_hidden (0) must be at least 1 with num_dense_layers (1)"),
        ({"shared_hidden": -4}, "shared_hidden (-4) must be at least 0"),
    ],
)
def test_one_problem(change: dict, problem: str) -> None:
    assert replace(SPEC, **change).problems() == [problem]


@pytest.mark.parametrize(("family", "spec"), CASES.values(), ids=CASES)
def test_cases_fit_their_family(family: str, spec: ModelSpec) -> None:
    assert family_problems(spec, family) == []
    assert family in fitting_families(spec)


@pytest.mark.parametrize(
    ("family", "change", "problems"),
    [
        (
            "qwen3_moe",
            {"qk_norm": "width"},
            ["qwen3_moe cannot express qk_norm = 'width'; it needs 'head'", "no known family can hold this model"],
        ),
        (
            "qwen3_moe",
            {"qk_norm": "width", "num_dense_layers": 0, "d_model": 40},
            ["qwen3_moe cannot express qk_norm = 'width'; it needs 'head'", "families that can: olmoe"],
        ),
        (
            "olmoe",
            {},
            [
                "olmoe cannot express qk_norm = 'head'; it needs 'width'",
                "olmoe cannot express num_dense_layers = 1; it needs 0",
                "olmoe needs num_heads x head_dim (4 x 10) equal to d_model (16), such as head_dim = 4",
                "families that can: qwen3_moe",
            ],
        ),
        (
            "glm4_moe",
            {"score_function": "sigmoid", "shared_hidden": 8},
            [
                "glm4_moe needs shared_hidden (8) to be a positive multiple of expert_hidden (6); nearest: 6 or 12",
                "no known family can hold this model",
            ],
        ),
        ("glm4_moe", {"top_k": 9}, ["top_k (9) must be from 1 to num_experts (3)"]),
    ],
)
def test_refusals_name_what_would_work(family: str, change: dict, problems: list[str]) -> None:
    spec = replace(SPEC, selection_bias=False, shared_hidden=0)
    assert family_problems(replace(spec, **change), family) == problems


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no family 'mixtral'; known: flex_olmo, glm4_moe, olmoe, qwen3_moe"):
        get_family("mixtral")
