"""DeepEP as a dispatcher; the module deep_ep is imported when a dispatcher is made or asked, never before."""

from coterie_parallel.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from coterie_parallel.dispatch.deep_ep_options import DeepEPOptions

__all__ = ["DeepEPDispatcher", "DeepEPOptions"]
