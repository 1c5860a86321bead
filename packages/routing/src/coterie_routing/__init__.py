"""Mixture-of-experts routers, load statistics and balance losses that hold in every layout."""

from coterie_routing.config import SCORE_FUNCTIONS, RouterConfig
from coterie_routing.losses import (
    BALANCE_SCOPES,
    balance_loss,
    balance_term,
    scoped_balance_term,
    sequence_balance_term,
    z_loss,
    z_term,
)
from coterie_routing.router import Router, Routing, route
from coterie_routing.sums import LoadSums, load_imbalance, pack, unpack

__all__ = [
    "RouterConfig",
    "Router",
    "Routing",
    "route",
    "LoadSums",
    "pack",
    "unpack",
    "load_imbalance",
    "balance_loss",
    "balance_term",
    "sequence_balance_term",
    "scoped_balance_term",
    "z_loss",
    "z_term",
    "BALANCE_SCOPES",
    "SCORE_FUNCTIONS",
]


def __dir__() -> list[str]:
    return __all__
