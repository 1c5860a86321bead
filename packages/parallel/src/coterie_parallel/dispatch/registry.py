"""Find a dispatcher by its name: the built-in ones, and those that installed packages register."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from coterie_parallel.axis import Axis
from coterie_parallel.dispatch.base import Dispatcher
from coterie_parallel.dispatch.options import DispatchOptions

__all__ = ["ENTRY_POINT_GROUP", "dispatcher_class", "known_dispatchers", "make_dispatcher"]

ENTRY_POINT_GROUP = "coterie_parallel.dispatchers"

_BUILT_IN = {
    "all_to_all": "coterie_parallel.dispatch.all_to_all:AllToAllDispatcher",
    "deep_ep": "coterie_parallel.dispatch.deep_ep:DeepEPDispatcher",
    "local": "coterie_parallel.dispatch.local:LocalDispatcher",
    "rowwise": "coterie_parallel.dispatch.rowwise.dispatcher:RowwiseDispatcher",
}


def known_dispatchers() -> list[str]:
    """Return the names that `make_dispatcher` takes, sorted."""
    return sorted(_registered())


def dispatcher_class(name: str) -> type[Dispatcher]:
    """Return the class of the dispatcher ``name``.

    Raises:
        ValueError: for an unknown name, a name that two packages claim, or an entry that is no `Dispatcher`.
        ImportError: if the module of the dispatcher can not be imported.
    """
    registered = _registered()
    if name not in registered:
        raise ValueError(f"dispatcher ({name!r}) is unknown; known: {', '.join(sorted(registered))}")
    targets = registered[name]
    if len(targets) > 1:
        raise ValueError(f"dispatcher ({name!r}) is registered more than once: {', '.join(targets)}; uninstall one")
    module, _, attribute = targets[0].partition(":")
    found = getattr(import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, Dispatcher)):
        raise ValueError(f"dispatcher ({name!r}) must be a subclass of coterie_parallel.Dispatcher, got {targets[0]}")
    return found


def make_dispatcher(
    name: str, *, num_experts: int, axis: Axis, alignment: int = 1, options: DispatchOptions | None = None
) -> Dispatcher:
    """Return the dispatcher ``name`` for ``num_experts`` experts over ``axis``.

    Raises:
        ValueError: for a name that is not known or a back-end that can not run here; there is no fallback.
    """
    # A class that was written without options is not handed the default ones.
    given = {} if options is None or options == DispatchOptions() else {"options": options}
    return dispatcher_class(name)(num_experts=num_experts, axis=axis, alignment=alignment, **given)


def _registered() -> dict[str, list[str]]:
    targets = {name: [target] for name, target in _BUILT_IN.items()}
    found: tuple[EntryPoint, ...] = tuple(entry_points(group=ENTRY_POINT_GROUP))
    for entry in found:
        claims = targets.setdefault(entry.name, [])
        # An editable install next to a wheel can list the same entry twice; that is no conflict.
        if entry.value not in claims:
            claims.append(entry.value)
    return targets
