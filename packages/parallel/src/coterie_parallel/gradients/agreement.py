"""What all ranks must agree on before the first exchange, as ranks that do not would wait for one another in it."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from coterie_parallel.collectives import all_gather_objects
from coterie_parallel.mesh import Mesh
from coterie_parallel.placement import Placement

__all__ = ["check_same_parameters", "check_same_settings", "refuse_unknown_placements"]

_MOST_RANKS = 8


def check_same_settings(settings: Any, mesh: Mesh) -> None:
    """Compare settings over the whole world; all ranks must call.

    Args:
        settings: a dataclass whose fields are plain values or such dataclasses.
        mesh: of this rank.

    Raises:
        ValueError: on all ranks, naming the ranks and the fields that differ from those of rank 0.
    """
    first, *others = all_gather_objects(_flat(settings), mesh.axis("world"))
    ranks_of: dict[str, list[int]] = {}
    for rank, other in enumerate(others, start=1):
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if keys:
            text = ", ".join(f"{key} ({other.get(key)!r} instead of {first.get(key)!r})" for key in keys)
            ranks_of.setdefault(text, []).append(rank)
    if ranks_of:
        name = type(settings).__name__
        lines = [f"rank {_shown(ranks)} has another {name} than rank 0: {text}" for text, ranks in ranks_of.items()]
        raise ValueError("\n".join(lines))


def refuse_unknown_placements(names: Iterable[str], placements: Mapping[str, Placement]) -> None:
    """Raise ValueError that names the placements of no parameter, which are most likely those of a wrong name."""
    if unknown := sorted(placements.keys() - set(names)):
        raise ValueError(f"there is no parameter of this name, but a placement: {', '.join(unknown)}")


def check_same_parameters(
    parameters: Mapping[str, Tensor], placements: Mapping[str, Placement], kinds: Mapping[str, Hashable], mesh: Mesh
) -> list[str]:
    """Compare the parameters over the axes that replicate them, and return the names of the first rank of "data".

    Raises:
        ValueError: naming those whose placement or kind differs on the data axis, or whose name, shape or dtype differs
            on the axis that replicates it.
    """
    mine: dict[str, object] = {name: (placements[name], kinds.get(name)) for name in parameters}
    of_data = all_gather_objects(mine, mesh.axis("data"))
    # First of all: ranks of different placements would meet on different axes below.
    shared = {name for name in parameters if all(name in one for one in of_data)}
    if differing := _differing(shared, of_data):
        raise ValueError(f"placement and kind must be the same on all ranks of 'data'; different: {differing}")
    for axis in sorted({axis for name in parameters for axis in placements[name].replicated_over}):
        mine = {
            name: (tuple(parameter.shape), parameter.dtype)
            for name, parameter in parameters.items()
            if axis in placements[name].replicated_over
        }
        everywhere = all_gather_objects(mine, mesh.axis(axis))
        if differing := _differing({name for one in everywhere for name in one}, everywhere):
            raise ValueError(
                f"parameters replicated over {axis!r} must have the same names, shapes and dtypes on all its ranks; "
                f"different: {differing}"
            )
    return list(of_data[0])


def _differing(names: Iterable[str], everywhere: list[dict[str, object]]) -> str:
    return ", ".join(name for name in sorted(names) if len({one.get(name) for one in everywhere}) > 1)


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        key = prefix + field.name
        found.update(_flat(value, f"{key}.") if is_dataclass(value) else {key: value})
    return found


def _shown(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return shown if len(ranks) <= _MOST_RANKS else f"{shown} and {len(ranks) - _MOST_RANKS} more"
