"""Names and tensors in both directions: bit-equal, in both expert layouts, and nothing left over."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coterie_export import FAMILIES, ModelSpec, from_hf, get_family, to_hf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from export.cases import CASES, bits_equal, random_tensors

KEYS = Path(__file__).parent / "keys"
PINNED = sorted(path.stem for path in KEYS.glob("*.txt"))


@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_equal(case: str, layout: str) -> None:
    name, spec = CASES[case]
    tensors = random_tensors(spec)
    converted = to_hf(spec, tensors, family=get_family(name), layout=layout)
    back = from_hf(spec, converted, family=get_family(name))
    assert list(back) == list(tensors)
    assert bits_equal(tensors, back)


def test_both_layouts_import_to_equal_states() -> None:
    """X3: the same weights, one by one and stacked as transformers holds them."""
    name, spec = CASES["qwen3_moe"]
    family, tensors = get_family(name), random_tensors(spec)
    one_by_one = to_hf(spec, tensors, family=family)
    stacked = {key: tensor for key, tensor in one_by_one.items() if ".experts." not in key}
    experts = "model.layers.1.mlp.experts."
    stacked[experts + "gate_up_proj"] = torch.stack(
        [
            torch.cat([one_by_one[f"{experts}{e}.gate_proj.weight"], one_by_one[f"{experts}{e}.up_proj.weight"]])
            for e in range(3)
        ]
    )
    stacked[experts + "down_proj"] = torch.stack([one_by_one[f"{experts}{e}.down_proj.weight"] for e in range(3)])
    assert bits_equal(from_hf(spec, stacked, family=family), from_hf(spec, one_by_one, family=family))


@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
@pytest.mark.parametrize("case", PINNED)
def test_each_expert_keeps_its_own_weights(case: str, layout: str) -> None:
    """X1: expert i is filled with i + 1, gate and up are told apart by their sign."""
    name, spec = CASES[case]
    spec = replace(spec, num_experts=4)
    tensors = random_tensors(spec)
    last = spec.num_layers - 1
    values = torch.arange(1.0, 5.0)[:, None, None]
    gate_up, down = tensors[f"layers.{last}.moe.experts.gate_up"], tensors[f"layers.{last}.moe.experts.down"]
    gate_up[:, :6], gate_up[:, 6:], down[:] = values, -values, 10 * values

    converted = to_hf(spec, tensors, family=get_family(name), layout=layout)
    prefix = f"model.layers.{last}.mlp.experts."
    for e in range(4):
        if layout == "per_expert":
            gate, up = (converted[f"{prefix}{e}.{part}_proj.weight"] for part in ("gate", "up"))
            out = converted[f"{prefix}{e}.down_proj.weight"]
        else:
            gate, up = converted[prefix + "gate_up_proj"][e].split(6)
            out = converted[prefix + "down_proj"][e]
        assert gate.shape == up.shape == (6, 16)
        assert gate.unique().tolist() == [e + 1]
        assert up.unique().tolist() == [-e - 1]
        assert out.unique().tolist() == [10 * (e + 1)]
    back = from_hf(spec, converted, family=get_family(name))
    assert bits_equal(back, tensors)


@pytest.mark.parametrize("case", PINNED)
def test_names_and_shapes_are_the_pinned_ones(case: str) -> None:
    """X4, X16: the lists were written by transformers' own save_pretrained for the same sizes."""
    name, spec = CASES[case]
    converted = to_hf(spec, random_tensors(spec), family=get_family(name))
    found = sorted(f"{key} {list(tensor.shape)}" for key, tensor in converted.items())
    assert found == (KEYS / f"{case}.txt").read_text().splitlines()


def test_every_family_has_a_pinned_list() -> None:
    assert sorted(FAMILIES) == PINNED


def test_tied_model_has_no_head() -> None:
    name, spec = CASES["qwen3_moe_tied"]
    assert "lm_head.weight" not in to_hf(spec, random_tensors(spec), family=get_family(name))


def test_a_renamed_tensor_is_named_on_both_sides() -> None:
    """X2."""
    name, spec = CASES["olmoe"]
    converted = to_hf(spec, random_tensors(spec), family=get_family(name))
    converted["model.layers.1.mlp.gates.weight"] = converted.pop("model.layers.1.mlp.gate.weight")
    with pytest.raises(ValueError, match="missing tensors") as caught:
        from_hf(spec, converted, family=get_family(name))
    assert str(caught.value) == (
        "1 missing tensors for olmoe (per_expert layout): model.layers.1.mlp.gate.weight\n"
        "1 unexpected tensors for olmoe (per_expert layout): model.layers.1.mlp.gates.weight"
    )


def test_long_reports_show_the_first_ten() -> None:
    name, spec = CASES["olmoe"]
    tensors = random_tensors(spec)
    some = dict(list(tensors.items())[:3])
    with pytest.raises(ValueError, match="missing tensors") as caught:
        to_hf(spec, some, family=get_family(name))
    missing = list(tensors)[3:]
    assert str(caught.value) == f"{len(missing)} missing tensors for model: {', '.join(missing[:10])}, ..."


@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        ("model.", "transformer.", "the nearest known prefix is 'model'; these names begin with 'transformer'"),
        ("model.", "language_model.model.", "is 'model'; these names begin with 'language_model.model'"),
        ("model.", "", "the nearest known prefix is 'model'; these names lack it"),
    ],
)
def test_a_wrong_prefix_is_named(right: str, wrong: str, hint: str) -> None:
    """X6."""
    name, spec = CASES["qwen3_moe_tied"]
    converted = to_hf(spec, random_tensors(spec), family=get_family(name))
    renamed = {wrong + key.removeprefix(right): tensor for key, tensor in converted.items()}
    with pytest.raises(ValueError, match="missing tensors") as caught:
        from_hf(spec, renamed, family=get_family(name))
    assert hint in str(caught.value)


def test_a_file_that_mixes_expert_layouts_is_refused() -> None:
    """X4: one block stacked, the others one by one."""
    name, spec = CASES["custom_sizes"]
    family, tensors = get_family(name), random_tensors(spec)
    mixed = to_hf(spec, tensors, family=family)
    mixed = {key: tensor for key, tensor in mixed.items() if "layers.2.mlp.experts" not in key}
    stacked = to_hf(spec, tensors, family=family, layout="stacked")
    mixed |= {key: tensor for key, tensor in stacked.items() if "layers.2.mlp.experts" in key}
    with pytest.raises(ValueError, match="one file must use one layout"):
        from_hf(spec, mixed, family=family)


def test_shapes_and_dtypes_are_checked() -> None:
    name, spec = CASES["qwen3_moe"]
    family, tensors = get_family(name), random_tensors(spec)
    converted = to_hf(spec, tensors, family=family)
    turned = converted | {"model.layers.0.mlp.down_proj.weight": torch.zeros(14, 16)}
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj.weight is \[14, 16\], not \[16, 14\]"):
        from_hf(spec, turned, family=family)
    with pytest.raises(ValueError, match=r"norm.weight is \[17\], not \[16\]"):
        to_hf(spec, tensors | {"norm.weight": torch.zeros(17)}, family=family)
    up = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(
        ValueError, match=rf"{up} is torch.float16, but model.layers.0.mlp.gate_proj.weight is torch.float32"
    ):
        from_hf(spec, converted | {up: converted[up].half()}, family=family)


def test_absent_selection_bias_is_written_as_zeros_and_must_be_zero() -> None:
    name, spec = CASES["glm4_moe_plain"]
    family, tensors = get_family(name), random_tensors(spec)
    converted = to_hf(spec, tensors, family=family)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(converted[key], torch.zeros(3))
    converted[key] = torch.tensor([0.0, 0.5, 0.0])
    with pytest.raises(ValueError, match=rf"{key} is not zero, but config.json says selection_bias = false"):
        from_hf(spec, converted, family=family)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FAMILIES)), layout=st.sampled_from(["per_expert", "stacked"]))
def test_any_model_that_fits_survives_the_round_trip(data: st.DataObject, name: str, layout: str) -> None:
    size = st.integers(1, 5)
    num_kv_heads, head_dim, num_experts, expert_hidden = (data.draw(size) for _ in range(4))
    num_heads, num_layers = num_kv_heads * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    family = get_family(name)
    values = {field: allowed[0] for field, allowed in family.needs.items()}
    values["num_dense_layers"] = values.get("num_dense_layers", data.draw(st.integers(0, num_layers - 1)))
    if name == "glm4_moe":
        values["shared_hidden"] = expert_hidden * data.draw(st.integers(1, 2))
        values["selection_bias"] = data.draw(st.booleans())
    spec = ModelSpec(
        vocab_size=data.draw(size),
        d_model=num_heads * 2 * head_dim if name == "olmoe" else data.draw(size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=2 * head_dim,
        num_experts=num_experts,
        top_k=data.draw(st.integers(1, num_experts)),
        expert_hidden=expert_hidden,
        max_sequence_length=8,
        dense_hidden=data.draw(size),
        renormalize=data.draw(st.booleans()),
        tied_embeddings=data.draw(st.booleans()),
        **values,
    )
    assume(num_experts > 1 or name != "glm4_moe")
    tensors = random_tensors(spec)
    assert bits_equal(from_hf(spec, to_hf(spec, tensors, family=family, layout=layout), family=family), tensors)
    read = family.spec(family.config(spec))
    assert read == replace(spec, dense_hidden=spec.dense_hidden if "intermediate_size" in _dense_fields(name) else 0)


def _dense_fields(name: str) -> set[str]:
    return {field for field, source in get_family(name).fields.items() if source == "dense_hidden"}
