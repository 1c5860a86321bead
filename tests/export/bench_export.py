"""Export and import against the bare safetensors calls that move the same bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from coterie_export import ModelSpec, export_model, get_family, import_model, to_hf
from safetensors.torch import load_file, save_file
from support.speed import Pair

from export.cases import bits_equal, random_tensors

# About 100 MB in 1,600 tensors: the experts of a real model in number, narrow in width.
SPEC = ModelSpec(
    vocab_size=8192,
    d_model=256,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=64,
    top_k=4,
    expert_hidden=56,
    max_sequence_length=1024,
    qk_norm="head",
)


def bench_export() -> Iterator[Pair]:
    """Yield the two directions; each export goes to a folder of its own that is gone before the next."""
    tensors = random_tensors(SPEC)
    named = to_hf(SPEC, tensors, family=get_family("qwen3_moe"))
    with tempfile.TemporaryDirectory() as root:
        ours, bare = Path(root, "ours"), Path(root, "bare.safetensors")

        def export() -> None:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                export_model(SPEC, tensors, Path(folder, "out"), family="qwen3_moe")

        def save() -> None:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                save_file(named, Path(folder, "out.safetensors"))

        def copy() -> dict:
            return {name: tensor.clone() for name, tensor in load_file(bare).items()}

        def check() -> None:
            assert bits_equal(load_file(ours / "model.safetensors"), named)
            assert bits_equal(import_model(ours)[1], tensors)
            assert bits_equal(copy(), named)

        export_model(SPEC, tensors, ours, family="qwen3_moe")
        save_file(named, bare)
        yield Pair("export / save_file", export, save, check)
        yield Pair("import / load_file and clone", lambda: import_model(ours), copy, check)
