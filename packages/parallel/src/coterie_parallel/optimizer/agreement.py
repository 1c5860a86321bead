"""What an optimizer asks of all ranks together: patterns that match something, and replicas of equal weights."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from coterie_parallel.collectives import all_gather_objects
from coterie_parallel.mesh import Mesh
from coterie_parallel.optimizer.config import AdamWConfig
from coterie_parallel.placement import Placement

__all__ = ["refuse_unequal_replicas", "refuse_unused_patterns"]

_PART_NUMEL = 2**18
_MOST_NAMES = 8


def refuse_unused_patterns(config: AdamWConfig, names: Iterable[str], mesh: Mesh) -> None:
    """Raise ValueError for patterns that match no name on any rank, on all ranks alike; all must call."""
    everywhere = all_gather_objects(config.unused_patterns(names), mesh.axis("world"))
    if unused := [text for text in everywhere[0] if all(text in other for other in everywhere)]:
        raise ValueError("\n".join(unused))


def refuse_unequal_replicas(parameters: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> None:
    """Compare the weights of replicas by the sums of their bits, read once; all ranks must call.

    Initial weights of another seed are seen, rows that have changed places are not: that takes `replica_problems`.

    Raises:
        ValueError: on all ranks, naming parameters and axes.
    """
    by_axis: dict[str, list[str]] = {}
    for name in sorted(parameters):
        for axis_name in placements[name].replicated_over:
            if mesh.axis(axis_name).size > 1:
                by_axis.setdefault(axis_name, []).append(name)
    found = []
    for axis_name, names in sorted(by_axis.items()):
        sums = torch.stack([_sum_of_bits(parameters[name]) for name in names]).tolist()
        everywhere = all_gather_objects(sums, mesh.axis(axis_name))
        differing = [name for name, *values in zip(names, *everywhere, strict=True) if len(set(values)) > 1]
        if differing:
            shown = ", ".join(differing[:_MOST_NAMES])
            more = f" and {len(differing) - _MOST_NAMES} more" if len(differing) > _MOST_NAMES else ""
            found.append(f"weights differ between the ranks that replicate them over {axis_name!r}: {shown}{more}")
    # Other ranks of the world have equal ones, and would wait for these in the first step.
    everyone = {text for texts in all_gather_objects(found, mesh.axis("world")) for text in texts}
    if everyone:
        raise ValueError("\n".join([*sorted(everyone), "start all ranks from the same weights"]))


def _sum_of_bits(parameter: Tensor) -> Tensor:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    bits = parameter.detach().view(-1).view(integer)
    # On a CPU torch copies what it is given to int64 first; the copy of a part stays in the cache.
    parts = [bits] if bits.is_cuda else torch.split(bits, _PART_NUMEL)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()
