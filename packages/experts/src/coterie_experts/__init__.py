"""Grouped SwiGLU experts for mixture-of-experts models, one API over several kernel back-ends."""

from coterie_experts.config import BACKENDS, ExpertsConfig
from coterie_experts.grouped_swiglu import BackendChoice, choose_backend, grouped_swiglu
from coterie_experts.initialisation import init_experts
from coterie_experts.layouts import fused_views, load_views, per_expert_views
from coterie_experts.module import GroupedExperts
from coterie_experts.token_rows import TokenOrder, order_by_expert, rows_from_tokens, sum_over_choices

__all__ = [
    "ExpertsConfig",
    "GroupedExperts",
    "init_experts",
    "grouped_swiglu",
    "BACKENDS",
    "BackendChoice",
    "choose_backend",
    "TokenOrder",
    "order_by_expert",
    "rows_from_tokens",
    "sum_over_choices",
    "fused_views",
    "per_expert_views",
    "load_views",
]
