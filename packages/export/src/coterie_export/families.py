"""The Hugging Face model families that Coterie can write and read, as tables.

To add one: copy the table that is nearest, say in ``needs`` what the family can express, correct ``fields``, ``fixed``
and ``names`` after what ``save_pretrained`` writes, and add it to ``FAMILIES``. A case in ``tests/export/cases.py``
then compares its logits with the reference model's.
"""

from collections.abc import Mapping
from typing import Any

from coterie_export.family import Computed, Family
from coterie_export.spec import ModelSpec

__all__ = ["FAMILIES", "family_problems", "fitting_families", "get_family"]

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "norm_eps",
    "num_experts_per_tok": "top_k",
    "norm_topk_prob": "renormalize",
    "tie_word_embeddings": "tied_embeddings",
    "bos_token_id": "bos_id",
    "eos_token_id": "eos_id",
    "pad_token_id": "pad_id",
}
_FIXED = {"hidden_act": "silu", "attention_bias": False}
_NAMES: dict[str, tuple[str, ...]] = {
    "embed.weight": ("model.embed_tokens.weight",),
    "layers.{i}.attention_norm.weight": ("model.layers.{i}.input_layernorm.weight",),
    "layers.{i}.attention.q.weight": ("model.layers.{i}.self_attn.q_proj.weight",),
    "layers.{i}.attention.k.weight": ("model.layers.{i}.self_attn.k_proj.weight",),
    "layers.{i}.attention.v.weight": ("model.layers.{i}.self_attn.v_proj.weight",),
    "layers.{i}.attention.o.weight": ("model.layers.{i}.self_attn.o_proj.weight",),
    "layers.{i}.attention.q_norm.weight": ("model.layers.{i}.self_attn.q_norm.weight",),
    "layers.{i}.attention.k_norm.weight": ("model.layers.{i}.self_attn.k_norm.weight",),
    "layers.{i}.mlp_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.mlp.gate_up.weight": (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    ),
    "layers.{i}.mlp.down.weight": ("model.layers.{i}.mlp.down_proj.weight",),
    "layers.{i}.moe.router.weight": ("model.layers.{i}.mlp.gate.weight",),
    "layers.{i}.moe.experts.gate_up": (
        "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
        "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    ),
    "layers.{i}.moe.experts.down": ("model.layers.{i}.mlp.experts.{e}.down_proj.weight",),
    "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
_STACKED_NAMES: dict[str, tuple[str, ...]] = {
    "layers.{i}.moe.experts.gate_up": ("model.layers.{i}.mlp.experts.gate_up_proj",),
    "layers.{i}.moe.experts.down": ("model.layers.{i}.mlp.experts.down_proj",),
}
_PLAIN_ROUTING: dict[str, tuple[Any, ...]] = {
    "score_function": ("softmax",),
    "route_scale": (1.0,),
    "selection_bias": (False,),
    "shared_hidden": (0,),
    "num_groups": (1,),
}


# Qwen3-30B-A3B and its like.
def _read_mlp_only_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    dense = list(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers {dense} can be read only if they are the leading layers, such as [0, 1]")
    return {"num_dense_layers": len(dense)}


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    needs={"norm_placement": ("pre",), "qk_norm": ("head",), **_PLAIN_ROUTING},
    fields={
        **_FIELDS,
        "intermediate_size": "dense_hidden",
        "moe_intermediate_size": "expert_hidden",
        "num_experts": "num_experts",
    },
    computed={
        "mlp_only_layers": Computed(
            write=lambda spec: list(range(spec.num_dense_layers)),
            read=_read_mlp_only_layers,
        )
    },
    fixed={**_FIXED, "decoder_sparse_step": 1, "use_sliding_window": False},
    aliases={"num_local_experts": "num_experts"},
    names=_NAMES,
    stacked_names=_STACKED_NAMES,
)


# OLMoE-1B-7B.
def _olmoe_limits(spec: ModelSpec) -> list[str]:
    if spec.num_heads * spec.head_dim == spec.d_model:
        return []
    # its q_norm is as wide as the model, whatever the heads are
    return [
        f"olmoe needs num_heads x head_dim ({spec.num_heads} x {spec.head_dim}) equal to d_model ({spec.d_model}),"
        f" such as head_dim = {spec.d_model / spec.num_heads:g}"
    ]


OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    needs={"norm_placement": ("pre",), "qk_norm": ("width",), "num_dense_layers": (0,), **_PLAIN_ROUTING},
    fields={**_FIELDS, "intermediate_size": "expert_hidden", "num_experts": "num_experts"},
    fixed={**_FIXED, "clip_qkv": None},
    names=_NAMES,
    stacked_names=_STACKED_NAMES,
    limits=_olmoe_limits,
)


# FlexOlmo-7x7B: the reordered norm of OLMo 2.
FLEX_OLMO = Family(
    name="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    needs={"norm_placement": ("post",), "qk_norm": ("width",), "num_dense_layers": (0,), **_PLAIN_ROUTING},
    fields={**_FIELDS, "intermediate_size": "expert_hidden", "num_experts": "num_experts"},
    fixed=_FIXED,
    names={
        **_NAMES,
        "layers.{i}.attention_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight",),
        "layers.{i}.mlp_norm.weight": ("model.layers.{i}.post_feedforward_layernorm.weight",),
    },
    stacked_names=_STACKED_NAMES,
)


# GLM-4.5, but with every pair of a head rotated.
def _read_shared_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared_hidden": (config["n_shared_experts"] or 0) * config["moe_intermediate_size"]}


def _read_partial_rotary_factor(config: Mapping[str, Any]) -> dict[str, Any]:
    factor = config.get("partial_rotary_factor", 0.5)  # 0.5 is what transformers takes an absent one for
    if factor != 1.0:
        raise ValueError(f"partial_rotary_factor is {factor}; only 1.0 (the whole head is rotated) can be read")
    return {}


def _glm4_moe_limits(spec: ModelSpec) -> list[str]:
    found = []
    shared, expert = spec.shared_hidden, spec.expert_hidden
    if shared == 0 or shared % expert:
        below = shared // expert * expert
        nearest = f"{below} or {below + expert}" if below else f"{expert}"
        found.append(
            f"glm4_moe needs shared_hidden ({shared}) to be a positive multiple of expert_hidden ({expert});"
            f" nearest: {nearest}"
        )
    if spec.num_experts // spec.num_groups < 2:  # its group score is the sum of the best two
        found.append(
            f"glm4_moe needs num_experts ({spec.num_experts}) / num_groups ({spec.num_groups}) to be at least 2"
        )
    return found


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    needs={"norm_placement": ("pre",), "qk_norm": ("head", None), "score_function": ("sigmoid",)},
    fields={
        **_FIELDS,
        "intermediate_size": "dense_hidden",
        "moe_intermediate_size": "expert_hidden",
        "n_routed_experts": "num_experts",
        "first_k_dense_replace": "num_dense_layers",
        "routed_scaling_factor": "route_scale",
        "n_group": "num_groups",
        "topk_group": "chosen_groups",
    },
    computed={
        "n_shared_experts": Computed(
            write=lambda spec: spec.shared_hidden // spec.expert_hidden,
            read=_read_shared_experts,
        ),
        "use_qk_norm": Computed(
            write=lambda spec: spec.qk_norm == "head",
            read=lambda config: {"qk_norm": "head" if config["use_qk_norm"] else None},
        ),
        "partial_rotary_factor": Computed(write=lambda spec: 1.0, read=_read_partial_rotary_factor),
        # our own field, which other programs pass over: the zeros in the files of a model without a bias are no state
        "selection_bias": Computed(
            write=lambda spec: spec.selection_bias,
            read=lambda config: {"selection_bias": config.get("selection_bias", True)},
        ),
    },
    fixed={**_FIXED, "num_nextn_predict_layers": 0},
    aliases={"num_local_experts": "n_routed_experts"},
    names={
        **_NAMES,
        "layers.{i}.moe.router.selection_bias": ("model.layers.{i}.mlp.gate.e_score_correction_bias",),
        "layers.{i}.moe.shared.gate_up.weight": (
            "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
            "model.layers.{i}.mlp.shared_experts.up_proj.weight",
        ),
        "layers.{i}.moe.shared.down.weight": ("model.layers.{i}.mlp.shared_experts.down_proj.weight",),
    },
    stacked_names=_STACKED_NAMES,
    float32=("e_score_correction_bias",),
    keeps_selection_bias=True,
    limits=_glm4_moe_limits,
)

FAMILIES = {family.name: family for family in (QWEN3_MOE, OLMOE, FLEX_OLMO, GLM4_MOE)}


def get_family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        ValueError: There is none; the message lists those that exist.
    """
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def fitting_families(spec: ModelSpec) -> list[str]:
    """Return the names of the families that can hold the model exactly."""
    return [name for name, family in FAMILIES.items() if not family.problems(spec)]


def family_problems(spec: ModelSpec, name: str) -> list[str]:
    """Return why the named family cannot hold the model, and which family could; an empty list means it can.

    Raises:
        ValueError: There is no such family.
    """
    found = get_family(name).problems(spec)
    if found and not spec.problems():
        fitting = fitting_families(spec)
        found.append(f"families that can: {', '.join(fitting)}" if fitting else "no known family can hold this model")
    return found
