"""The models that are compared: small ones in which everything is switched on that a layout could get wrong."""

from pathlib import Path

from coterie_trainer.config import Config, config_from_dict
from coterie_trainer.verify.layout import parse_layout
from coterie_trainer.verify.scaling import scaled

# Dense and MoE layers, shared expert, tied embeddings, balance loss over the step, bias without a loss, clipping.
_TABLES: dict[str, dict[str, object]] = {
    "model": dict(
        num_layers=3,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        qk_norm="head",
        num_dense_layers=1,
        dense_hidden=24,
        num_experts=16,
        top_k=2,
        expert_hidden=16,
        shared_hidden=16,
        score_function="sigmoid",
        route_scale=1.5,
        selection_bias=True,
        tied_embeddings=True,
        init_std=0.15,
    ),
    "data": dict(path="tokens", sequence_length=12),
    "train": dict(
        steps=3,
        sequences_per_step=8,
        sequences_per_micro_batch=8,
        balance_coefficient=0.1,
        bias_rule="sign",
        bias_rate=0.01,
    ),
    "optimizer": dict(learning_rate=3e-3),
}
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "bias": {},
    "groups": {
        "model": dict(num_groups=4, chosen_groups=2, norm_placement="post", qk_norm="width"),
        "train": dict(balance_loss="squared_load", bias_rule="proportional"),
    },
    "quantile": {
        "model": dict(score_function="softmax"),
        "train": dict(bias_rule="quantile", bias_rate="none"),
    },
    # The router learns from the weights of the experts alone.
    "no_auxiliary_loss": {
        "model": dict(score_function="softmax", selection_bias=False, num_experts=64, top_k=4, shared_hidden=0),
        "train": dict(balance_coefficient=0.0, z_coefficient=0.0, bias_rule="none", bias_rate="none"),
    },
    "softmax": {
        "model": dict(score_function="softmax", selection_bias=False, top_k=3, num_experts=8, tied_embeddings=False),
        "train": dict(balance_scope="sequence", bias_rule="none", bias_rate="none"),
        "optimizer": dict(muon=True),
    },
}


def config_of(variant: str = "bias") -> Config:
    changes = VARIANTS[variant]
    tables = {name: {**table, **changes.get(name, {})} for name, table in _TABLES.items()}
    return config_from_dict({"run_folder": "run", "seed": 1, **tables})


def small_config(folder: Path, layouts: list[str], variant: str = "bias") -> Config:
    """Return a config that every one of the layouts can split; its tokens are in ``folder / "tokens"``."""
    parsed = [layout for layout, _ in map(parse_layout, layouts) if layout is not None]
    assert len(parsed) == len(layouts), layouts
    return scaled(config_of(variant), folder, parsed)
