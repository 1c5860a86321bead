"""Grouped experts for mixture-of-experts models, one API over several kernel back-ends."""

from coterie_experts.activation import ACTIVATIONS, Activation
from coterie_experts.config import BACKENDS, ExpertsConfig
from coterie_experts.grouped_swiglu import BackendChoice, choose_backend, grouped_experts, grouped_swiglu
from coterie_experts.initialisation import init_experts, init_latent_experts, init_shared_expert
from coterie_experts.latent import LatentExperts
from coterie_experts.layouts import (
    MIXTRAL_NAMES,
    fused_views,
    interleaved_tensors,
    load_interleaved,
    load_views,
    per_expert_views,
)
from coterie_experts.module import GroupedExperts
from coterie_experts.shared import SharedExpert
from coterie_experts.tables import TileTable, load_table
from coterie_experts.token_rows import TokenOrder, order_by_expert, rows_from_tokens, sum_over_choices

__all__ = [
    "ExpertsConfig",
    "GroupedExperts",
    "SharedExpert",
    "LatentExperts",
    "init_experts",
    "init_shared_expert",
    "init_latent_experts",
    "grouped_experts",
    "grouped_swiglu",
    "ACTIVATIONS",
    "Activation",
    "BACKENDS",
    "BackendChoice",
    "choose_backend",
    "TileTable",
    "load_table",
    "TokenOrder",
    "order_by_expert",
    "rows_from_tokens",
    "sum_over_choices",
    "fused_views",
    "per_expert_views",
    "MIXTRAL_NAMES",
    "load_views",
    "interleaved_tensors",
    "load_interleaved",
]
