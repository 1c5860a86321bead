"""The models that every test and benchmark of the export runs on: small, with sizes that differ from one another."""

from collections.abc import Mapping

import torch
from coterie_export import ModelSpec
from torch import Tensor

__all__ = ["CASES", "Case", "bits_equal", "random_tensors"]

Case = tuple[str, ModelSpec]

_SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 3,
    "top_k": 2,
    "expert_hidden": 6,
    "max_sequence_length": 64,
    "rope_theta": 5000.0,  # the default of none of the families
    "norm_eps": 1e-3,  # large enough to show in the logits
    "eos_id": 3,
    "pad_id": 0,
}
_QWEN3 = {**_SIZES, "head_dim": 10, "qk_norm": "head"}
_GLM4 = {**_SIZES, "head_dim": 10, "qk_norm": "head", "score_function": "sigmoid", "shared_hidden": 12}
_DENSE = {"num_dense_layers": 1, "dense_hidden": 14}

# Name to family and model. The first of each family has its pinned list of tensors in keys/.
CASES: dict[str, Case] = {
    "qwen3_moe": ("qwen3_moe", ModelSpec(**_QWEN3, **_DENSE)),
    "qwen3_moe_tied": ("qwen3_moe", ModelSpec(**_QWEN3, tied_embeddings=True, renormalize=False)),
    "olmoe": ("olmoe", ModelSpec(**_SIZES, head_dim=4, qk_norm="width", renormalize=False)),
    "olmoe_renormalized": ("olmoe", ModelSpec(**_SIZES, head_dim=4, qk_norm="width", tied_embeddings=True)),
    "flex_olmo": ("flex_olmo", ModelSpec(**_SIZES, head_dim=10, qk_norm="width", norm_placement="post")),
    "flex_olmo_raw": (
        "flex_olmo",
        ModelSpec(**_SIZES, head_dim=10, qk_norm="width", norm_placement="post", renormalize=False),
    ),
    "glm4_moe": ("glm4_moe", ModelSpec(**_GLM4, **_DENSE, selection_bias=True, route_scale=2.5)),
    "glm4_moe_plain": (
        "glm4_moe",
        ModelSpec(**{**_GLM4, "qk_norm": None, "renormalize": False, "tied_embeddings": True}),
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        ModelSpec(**_GLM4 | {"num_experts": 8, "top_k": 3}, selection_bias=True, num_groups=4, chosen_groups=2),
    ),
    # Three layers, width 24, five experts, and 8 heads over 2 key and value heads.
    "custom_sizes": (
        "qwen3_moe",
        ModelSpec(**{**_QWEN3, "d_model": 24, "num_layers": 3, "num_experts": 5, "num_heads": 8, "head_dim": 6}),
    ),
}


def random_tensors(spec: ModelSpec, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights at which every tensor moves the logits: norms around 1, the rest wide enough to decide."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.3 * noise if name.endswith("norm.weight") else 0.4 * noise).to(dtype)
    return tensors


def bits_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Say whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype
        and tensor.shape == second[name].shape
        and torch.equal(tensor.contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8))
        for name, tensor in first.items()
    )
