"""Dispatchers bring the rows of tokens to the ranks that hold their experts, and back."""

from coterie_parallel.dispatch.base import Dispatched, Dispatcher
from coterie_parallel.dispatch.deep_ep_options import DeepEPOptions
from coterie_parallel.dispatch.guarantees import Guarantees, guarantees_of
from coterie_parallel.dispatch.options import DispatchOptions
from coterie_parallel.dispatch.registry import dispatcher_class, known_dispatchers, make_dispatcher

__all__ = [
    "DeepEPOptions",
    "DispatchOptions",
    "Dispatched",
    "Dispatcher",
    "Guarantees",
    "dispatcher_class",
    "guarantees_of",
    "known_dispatchers",
    "make_dispatcher",
]
