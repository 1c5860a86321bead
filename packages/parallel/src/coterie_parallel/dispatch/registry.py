"""Find a dispatcher by its name: the built-in ones, and those that installed packages register."""

import functools
import inspect
import sys
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
        ImportError: if the module of the dispatcher can not be imported; names the package that registers it.
    """
    registered = _registered()
    if name not in registered:
        raise ValueError(f"dispatcher ({name!r}) is unknown; known: {', '.join(sorted(registered))}")
    targets = registered[name]
    if len(targets) > 1:
        raise ValueError(f"dispatcher ({name!r}) is registered more than once: {', '.join(targets)}; uninstall one")
    ((target, package),) = targets.items()
    module, _, attribute = target.partition(":")
    try:
        imported = import_module(module)
    except ImportError as error:
        raise ImportError(
            f"dispatcher ({name!r}) is registered by the package {package!r} as {target}, which can not be imported: "
            f"{error}; repair or uninstall that package"
        ) from error
    found = getattr(imported, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Dispatcher)):
        raise ValueError(
            f"dispatcher ({name!r}) of the package {package!r} must be a subclass of coterie_parallel.Dispatcher, got "
            f"{target}"
        )
    return found


def make_dispatcher(
    name: str, *, num_experts: int, axis: Axis, alignment: int = 1, options: DispatchOptions | None = None
) -> Dispatcher:
    """Return the dispatcher ``name`` for ``num_experts`` experts over ``axis``.

    Raises:
        ValueError: for a name that is not known or a back-end that can not run here; there is no fallback.
    """
    made_by = dispatcher_class(name)
    # A class that was written without options is not handed the default ones.
    given = {} if options is None or options == DispatchOptions() else {"options": options}
    parameters = inspect.signature(made_by).parameters
    if given and "options" not in parameters and all(one.kind != one.VAR_KEYWORD for one in parameters.values()):
        raise ValueError(f"dispatcher ({name!r}) takes no options, got {options}; leave them out")
    return made_by(num_experts=num_experts, axis=axis, alignment=alignment, **given)


def _registered() -> dict[str, dict[str, str]]:
    """Return by name the targets that claim it, each with the package that registers it."""
    targets = {name: {target: "coterie-parallel"} for name, target in _BUILT_IN.items()}
    for entry in _entries(tuple(sys.path)):
        # An editable install next to a wheel can list the same entry twice; that is no conflict.
        targets.setdefault(entry.name, {}).setdefault(entry.value, entry.dist.name if entry.dist else "unknown")
    return targets


@functools.cache
def _entries(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return what the packages found along ``sys.path`` register; to read their files again takes milliseconds."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
