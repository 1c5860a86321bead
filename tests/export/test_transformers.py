"""The exported folders in transformers: logits, greedy tokens, and what its own save_pretrained makes of them."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coterie_export import compare_logits, export_model, import_model, load_with_transformers

from export.cases import CASES, bits_equal, random_tensors
from export.reference import reference_greedy, reference_logits

pytest.importorskip("transformers", reason="an extra: the package must also pass its tests alone")

TOKENS_BS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    family, spec = CASES[case]
    tensors = random_tensors(spec)
    export_model(spec, tensors, tmp_path / "out", family=family, max_shard_bytes=4000)

    exact = {name: tensor.double() for name, tensor in tensors.items()}
    exact_BSV = reference_logits(spec, exact, TOKENS_BS)
    rounded_BSV = reference_logits(spec, tensors, TOKENS_BS)
    # Both compute in fp32 in another order, so the error may be twice that of the reference's own rounding.
    allowed = 2 * float((rounded_BSV - exact_BSV).abs().max())
    assert allowed < 5e-6 * float(exact_BSV.abs().max())
    assert compare_logits(tmp_path / "out", TOKENS_BS, exact_BSV) < allowed

    expected, lead = reference_greedy(spec, exact, TOKENS_BS, 6)
    assert lead > 1e-3, "a near tie: choose another seed"
    generated = load_with_transformers(tmp_path / "out").generate(
        TOKENS_BS,
        attention_mask=torch.ones_like(TOKENS_BS),
        max_new_tokens=6,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
    )
    assert generated.tolist() == expected.tolist()


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe", "glm4_moe"])
def test_renormalization_is_seen_in_the_logits(case: str, tmp_path: Path) -> None:
    """X11: right for both values of the flag, which differ by far more than rounding."""
    family, spec = CASES[case]
    tensors = random_tensors(spec)
    logits_BSV = {}
    for flag in (True, False):
        changed = replace(spec, renormalize=flag)
        logits_BSV[flag] = reference_logits(changed, tensors, TOKENS_BS)
        export_model(changed, tensors, tmp_path / str(flag), family=family)
        assert compare_logits(tmp_path / str(flag), TOKENS_BS, logits_BSV[flag]) < 2e-5
    assert float((logits_BSV[True] - logits_BSV[False]).abs().max()) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_what_save_pretrained_writes_is_read_back(case: str, tmp_path: Path) -> None:
    family, spec = CASES[case]
    tensors = random_tensors(spec)
    export_model(spec, tensors, tmp_path / "ours", family=family)
    load_with_transformers(tmp_path / "ours").save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    found_spec, found = import_model(tmp_path / "theirs")
    assert found_spec == spec
    assert bits_equal(found, tensors)


def test_generation_settings_are_those_of_the_spec(tmp_path: Path) -> None:
    family, spec = CASES["flex_olmo"]
    export_model(spec, random_tensors(spec), tmp_path / "out", family=family)
    settings = load_with_transformers(tmp_path / "out").generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (None, 3, 0)


def test_a_load_that_leaves_a_tensor_out_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    family, spec = CASES["olmoe"]
    tensors = random_tensors(spec)
    export_model(spec, tensors, tmp_path / "out", family=family)
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.norm.weight")
    os.remove(file)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys.*model.norm.weight"):
        compare_logits(tmp_path / "out", TOKENS_BS, reference_logits(spec, tensors, TOKENS_BS))


def test_logits_of_another_shape_are_refused(tmp_path: Path) -> None:
    family, spec = CASES["olmoe"]
    tensors = random_tensors(spec)
    export_model(spec, tensors, tmp_path / "out", family=family)
    with pytest.raises(ValueError, match=r"logits are \[2, 9, 39\], the exported model gives \[2, 9, 40\]"):
        compare_logits(tmp_path / "out", TOKENS_BS, reference_logits(spec, tensors, TOKENS_BS)[..., 1:])
