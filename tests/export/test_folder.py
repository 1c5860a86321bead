"""Folders on disk: whole or absent, byte for byte as promised, and refused when something is missing."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import coterie_export.folder
import pytest
import torch
from coterie_export import ModelSpec, export_model, get_family, import_model, to_hf, verify
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from export.cases import CASES, bits_equal, random_tensors

SHARDED = 4000  # bytes; the small models then take several files


def export_case(case: str, folder: Path, **options: Any) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    family, spec = CASES[case]
    tensors = random_tensors(spec)
    assert export_model(spec, tensors, folder, family=family, **options) == folder
    return spec, tensors


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> None:
    config = read_config(folder) | changes
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("max_shard_bytes", [SHARDED, 5_000_000_000])
@pytest.mark.parametrize("case", CASES)
def test_import_gives_back_what_was_exported(case: str, max_shard_bytes: int, tmp_path: Path) -> None:
    """X7 (case custom_sizes), X14 (the untied cases): spec and every bit."""
    spec, tensors = export_case(case, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    found_spec, found = import_model(tmp_path / "out")
    assert found_spec == spec
    assert bits_equal(found, tensors)
    assert os.listdir(tmp_path) == ["out"]


def test_one_file_or_shards_with_an_index(tmp_path: Path) -> None:
    export_case("qwen3_moe", tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "generation_config.json", "model.safetensors"]
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}

    _, tensors = export_case("qwen3_moe", tmp_path / "many", max_shard_bytes=SHARDED)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    held = {file: load_file(tmp_path / "many" / file) for file in files}
    assert {name: file for file, part in held.items() for name in part} == index["weight_map"]
    assert all(sum(t.nbytes for t in part.values()) <= SHARDED for part in held.values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_tensor_larger_than_a_shard_has_its_own_file(tmp_path: Path) -> None:
    spec, _ = export_case("olmoe", tmp_path / "out", max_shard_bytes=1)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert [len(load_file(file)) for file in files] == [1] * 39
    assert import_model(tmp_path / "out")[0] == spec


def test_equal_input_gives_equal_bytes_with_the_mode_of_new_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        export_case("glm4_moe", tmp_path / name, max_shard_bytes=SHARDED)
    (tmp_path / "plain").touch()
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, path.name


def test_config_of_grouped_heads_and_bfloat16(tmp_path: Path) -> None:
    """X19: 8 heads over 2, tokenizer files byte for byte, two bytes a parameter, dtype as in the files."""
    _, spec = CASES["custom_sizes"]
    spec = replace(spec, vocab_size=20_000)
    tokenizer = b'{"version": "1.0",\r\n "added_tokens": [], "x": "\xc3\xa9"}\n\n'
    (tmp_path / "given.json").write_bytes(tokenizer)
    files = {"tokenizer.json": tmp_path / "given.json", "tokenizer_config.json": b"{ }"}
    folder = tmp_path / "a folder [with] (signs)" / "out"
    export_model(spec, random_tensors(spec), folder, family="qwen3_moe", dtype=torch.bfloat16, tokenizer_files=files)
    config = read_config(folder)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 2, 6)
    assert config["dtype"] == "bfloat16"
    assert (folder / "tokenizer.json").read_bytes() == tokenizer
    assert (folder / "tokenizer_config.json").read_bytes() == b"{ }"
    parameters = sum(torch.Size(shape).numel() for shape in spec.tensor_shapes().values())
    size = (folder / "model.safetensors").stat().st_size
    assert size == pytest.approx(2 * parameters, rel=0.01)
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}  # noqa: SIM118
    rounded = {name: tensor.bfloat16() for name, tensor in random_tensors(spec).items()}
    assert bits_equal(import_model(folder)[1], rounded)


def test_bfloat16_keeps_the_selection_bias_in_float32(tmp_path: Path) -> None:
    _, tensors = export_case("glm4_moe", tmp_path / "out", dtype=torch.bfloat16)
    found = import_model(tmp_path / "out")[1]
    kept = {name: tensor.dtype for name, tensor in found.items() if tensor.dtype != torch.bfloat16}
    name = "layers.1.moe.router.selection_bias"
    assert kept == {name: torch.float32}
    assert torch.equal(found[name], tensors[name])


def test_config_is_written_in_full(tmp_path: Path) -> None:
    export_case("qwen3_moe", tmp_path / "out")
    assert read_config(tmp_path / "out") == {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "eos_token_id": 3,
        "head_dim": 10,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 14,
        "max_position_embeddings": 64,
        "mlp_only_layers": [0],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 0.001,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 40,
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}


@pytest.mark.parametrize("case", CASES)
def test_flags_that_readers_guess_are_always_written(case: str) -> None:
    """X11, X14, X19."""
    family, spec = CASES[case]
    config = get_family(family).config(spec)
    assert config["norm_topk_prob"] is spec.renormalize
    assert config["tie_word_embeddings"] is spec.tied_embeddings
    assert config["num_key_value_heads"] == spec.num_kv_heads


def test_the_flag_decides_about_the_head(tmp_path: Path) -> None:
    """X14: an untied model without a head, and a tied one with a head, are refused."""
    export_case("olmoe", tmp_path / "untied")
    # Copies, for the file that they would be mapped from is written again.
    weights = {name: one.clone() for name, one in load_file(tmp_path / "untied" / "model.safetensors").items()}
    head = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "untied" / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing tensors .*: lm_head.weight"):
        import_model(tmp_path / "untied")
    export_case("olmoe_renormalized", tmp_path / "tied")
    save_file(weights | {"lm_head.weight": head.clone()}, tmp_path / "tied" / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected tensors .*: lm_head.weight"):
        import_model(tmp_path / "tied")


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    """X13: built on the meta device and materialised apart, the two names no longer share memory."""
    family, spec = CASES["qwen3_moe_tied"]
    tensors = random_tensors(spec)
    embed = tensors["embed.weight"]
    export_model(spec, tensors | {"head.weight": embed}, tmp_path / "shared", family=family)
    assert bits_equal(import_model(tmp_path / "shared")[1], tensors)
    with pytest.raises(ValueError, match=r"head.weight is not the memory of embed.weight"):
        export_model(spec, tensors | {"head.weight": embed.clone()}, tmp_path / "apart", family=family)
    assert os.listdir(tmp_path) == ["shared"]


def _meta(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].to("meta")


def _alias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head.weight"] = tensors["embed.weight"]


def _mixed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()


def _renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("head.weight")


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (_meta, {}, r"norm.weight has no data \(device meta\)"),
        (_alias, {}, r"embed.weight and head.weight share memory"),
        (_mixed, {}, r"several dtypes \(torch.bfloat16, torch.float32\); choose one with dtype="),
        (_renamed, {}, r"(?s)1 missing tensors for model: head.weight.*1 unexpected.*: lm_head.weight"),
        (dict, {"dtype": torch.int8}, r"dtype \(torch.int8\) must be"),
        (dict, {"max_shard_bytes": 0}, r"max_shard_bytes \(0\) must be at least 1"),
        (dict, {"family": "flex_olmo"}, r"(?s)norm_placement = 'pre'; it needs 'post'.*families that can: qwen3_moe"),
        (dict, {"tokenizer_files": {"config.json": b""}}, r"'config.json' must be a plain file name"),
        (dict, {"tokenizer_files": {"../vocab.json": b""}}, r"'../vocab.json' must be a plain file name"),
        (dict, {"tokenizer_files": {"..": b""}}, r"'..' must be a plain file name"),
    ],
)
def test_faults_are_found_before_a_file_is_written(
    spoil: Callable[..., Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """X15: in under a second, and no file is left."""
    family, spec = CASES["qwen3_moe"]
    tensors = random_tensors(spec)
    spoil(tensors)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        export_model(spec, tensors, tmp_path / "new" / "out", **{"family": family, **options})
    assert time.perf_counter() - start < 1
    assert os.listdir(tmp_path) == []


def test_missing_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent.json is not there"):
        export_case("olmoe", tmp_path / "out", tokenizer_files={"tokenizer.json": tmp_path / "absent.json"})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_broken_write_leaves_nothing(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_fails(tensors: Any, path: Path, **options: Any) -> None:
        if "00002" in path.name:
            raise error
        save_file(tensors, path, **options)

    monkeypatch.setattr(coterie_export.folder, "save_file", second_fails)
    with pytest.raises(type(error)):
        export_case("olmoe", tmp_path / "out", max_shard_bytes=SHARDED)
    assert os.listdir(tmp_path) == []


def test_target_must_be_absent_or_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_case("olmoe", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(FileExistsError, match=r"exists and is not an empty folder"):
        export_case("olmoe_renormalized", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(FileExistsError, match=r"exists and is not an empty folder"):
        export_case("olmoe", tmp_path / "out" / "config.json")


def _edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def _cut(folder: Path) -> None:
    path = folder / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "model-00002-of-00006.safetensors").unlink(), r"model-00002-of-00006.safetensors is named in"),
        (lambda f: (f / "extra.safetensors").touch(), r"extra.safetensors is there and not named in the index"),
        (_cut, r"model-00002-of-00006.safetensors is cut or is no safetensors file"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), r"has no model.safetensors.index.json"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), r"index.json is not valid JSON"),
        (
            lambda f: _edit_index(f, lambda i: i["metadata"].update(total_size=1)),
            r"total_size = 1; the tensors have \d",
        ),
        (
            lambda f: _edit_index(f, lambda i: i["weight_map"].pop("model.norm.weight")),
            r"model.norm.weight is in model-0000\d-of-00006.safetensors, but the index does not say so",
        ),
        (
            lambda f: _edit_index(f, lambda i: i["weight_map"].update(x=i["weight_map"]["model.norm.weight"])),
            r"the index puts x in model-0000\d-of-00006.safetensors, but it is not there",
        ),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json must hold a JSON object, not list"),
        (lambda f: change_config(f, model_type=...), r"lacks model_type"),
        (lambda f: change_config(f, model_type="mixtral"), r"no family 'mixtral'; known: "),
        (lambda f: change_config(f, num_experts=4), r"6 missing tensors for olmoe .*experts.3.gate_proj.weight"),
        (lambda f: change_config(f, vocab_size=41), r"lm_head.weight is \[40, 16\], not \[41, 16\]"),
        (lambda f: change_config(f, norm_topk_prob=..., vocab_size=...), r"lacks vocab_size\n.*lacks norm_topk_prob"),
        (lambda f: change_config(f, clip_qkv=8.0), r"config.json says clip_qkv = 8.0; only None can be read"),
        (lambda f: change_config(f, hidden_act="gelu"), r"says hidden_act = 'gelu'; only 'silu' can be read"),
        (
            lambda f: change_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}),
            r"says rope_type = 'yarn'; only 'default' can be read",
        ),
        (lambda f: change_config(f, num_key_value_heads=3), r"num_kv_heads \(3\) must divide num_heads \(4\)"),
    ],
)
def test_verify_names_what_is_wrong(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    """X17: and import_model refuses the same folders."""
    folder = tmp_path / "out"
    export_case("olmoe", folder, max_shard_bytes=SHARDED)
    verify(folder)
    spoil(folder)
    for check in (verify, import_model):
        with pytest.raises(ValueError, match=message):
            check(folder)


def test_verify_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        verify(tmp_path / "absent")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "qwen3_moe",
            {"mlp_only_layers": [1]},
            r"mlp_only_layers \[1\] can be read only if they are the leading layers",
        ),
        ("qwen3_moe", {"use_sliding_window": True}, r"use_sliding_window = True; only False can be read"),
        ("glm4_moe", {"partial_rotary_factor": ...}, r"partial_rotary_factor is 0.5; only 1.0"),
        ("glm4_moe", {"n_group": 2}, r"num_groups \(2\) must divide num_experts \(3\): \[1, 3\]"),
        ("glm4_moe", {"topk_group": 2}, r"chosen_groups \(2\) must be from 1 to num_groups \(1\)"),
        ("glm4_moe", {"use_qk_norm": ...}, r"config.json lacks 'use_qk_norm'"),
    ],
)
def test_configs_that_a_spec_cannot_express(case: str, changes: dict, message: str, tmp_path: Path) -> None:
    export_case(case, tmp_path / "out")
    change_config(tmp_path / "out", **changes)
    with pytest.raises(ValueError, match=message):
        import_model(tmp_path / "out")


def test_older_spellings_of_a_config_are_read(tmp_path: Path) -> None:
    spec, tensors = export_case("qwen3_moe", tmp_path / "new")
    change_config(tmp_path / "new", rope_theta=...)
    assert import_model(tmp_path / "new")[0] == spec
    export_case("qwen3_moe", tmp_path / "old")
    change_config(tmp_path / "old", rope_parameters=..., num_experts=..., num_local_experts=3, bos_token_id=...)
    found_spec, found = import_model(tmp_path / "old")
    assert found_spec == spec
    assert bits_equal(found, tensors)


def test_stacked_files_import_to_the_same_state(tmp_path: Path) -> None:
    """X3, from disk."""
    spec, tensors = export_case("glm4_moe", tmp_path / "out")
    stacked = to_hf(spec, tensors, family=get_family("glm4_moe"), layout="stacked")
    save_file(stacked, tmp_path / "out" / "model.safetensors")
    assert bits_equal(import_model(tmp_path / "out")[1], tensors)
