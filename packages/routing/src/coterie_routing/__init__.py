"""Mixture-of-experts routers, load statistics and balance losses that hold in every layout."""

from coterie_routing.assignment import ASSIGNMENTS, Assignment
from coterie_routing.bias import BIAS_RULES, BiasRule, RequiredBias, quantile_bias, required_bias, updated_bias
from coterie_routing.config import BACKENDS, SCORE_FUNCTIONS, SELECTIONS, RouterConfig
from coterie_routing.losses import (
    BALANCE_LOSSES,
    BALANCE_SCOPES,
    balance_loss,
    balance_terms,
    entropy_term,
    orthogonality_loss,
    smooth_choices,
    squared_load_loss,
    z_loss,
    z_term,
)
from coterie_routing.permutation import permute, unpermute
from coterie_routing.report import LoadReport, load_report, split_sums
from coterie_routing.router import CausalityWarning, ChoiceMemo, Router, Routing, route
from coterie_routing.row_map import RowMap, map_rows
from coterie_routing.sums import LoadSums, load_imbalance, pack, reduce_sums, unpack
from coterie_routing.wins import WinSums, win_sums

__all__ = [
    "RouterConfig",
    "Router",
    "Routing",
    "route",
    "ChoiceMemo",
    "CausalityWarning",
    "Assignment",
    "LoadSums",
    "pack",
    "unpack",
    "reduce_sums",
    "load_imbalance",
    "balance_loss",
    "squared_load_loss",
    "balance_terms",
    "smooth_choices",
    "z_loss",
    "z_term",
    "entropy_term",
    "orthogonality_loss",
    "BiasRule",
    "updated_bias",
    "RequiredBias",
    "required_bias",
    "quantile_bias",
    "load_report",
    "LoadReport",
    "split_sums",
    "win_sums",
    "WinSums",
    "map_rows",
    "RowMap",
    "permute",
    "unpermute",
    "ASSIGNMENTS",
    "BACKENDS",
    "BALANCE_LOSSES",
    "BALANCE_SCOPES",
    "BIAS_RULES",
    "SCORE_FUNCTIONS",
    "SELECTIONS",
]


def __dir__() -> list[str]:
    return __all__
