"""The table that says where each parameter lives; reduction, norm and clipping follow from it alone."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from ctypes import string_at
from dataclasses import dataclass

from torch import Tensor

from coterie_parallel.collectives import all_gather_objects
from coterie_parallel.mesh import Mesh
from coterie_parallel.plan import AXES, Plan

__all__ = ["DENSE", "EXPERTS", "TIED_EMBEDDING", "Chunk", "Placement", "placed_parameters", "replica_problems"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The axes over which a parameter is replicated, and those over which its elements are sharded.

    Together they must account for every rank that holds it exactly once: those with the same stages of the pipeline,
    or those of the embedding axis. A sharded parameter is cut along its first dimension into equal parts, in the order
    of the axis index. Gradients are summed, and optimizer state is sharded, over the one axis of ``replicated_over``.
    """

    replicated_over: tuple[str, ...] = ()
    sharded_over: tuple[str, ...] = ()

    def problems(self, plan: Plan) -> list[str]:
        """Return every fault of this placement under ``plan``."""
        axes = self.replicated_over + self.sharded_over
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            return [f"axis ({axis!r}) is unknown; known: {', '.join(AXES)}" for axis in unknown]
        if len(self.replicated_over) > 1:
            return [f"replicated_over ({', '.join(self.replicated_over)}) must name at most one axis"]
        sizes = [len(plan.axis_ranks(axis)[0]) for axis in axes]
        holders = len(plan.axis_ranks("embedding")[0]) if "embedding" in axes else plan.data
        if math.prod(sizes) != holders:
            product = " x ".join(f"{axis} ({size})" for axis, size in zip(axes, sizes, strict=True)) or "no axis (1)"
            return [f"{product} = {math.prod(sizes)} ranks must be all that hold it ({holders})"]
        return []

    @property
    def replication_axis(self) -> str | None:
        """The axis over which gradients are summed; None where every rank has its own part."""
        return self.replicated_over[0] if self.replicated_over else None


DENSE = Placement(replicated_over=("data",))
"""Attention, norms, embeddings, routers, shared experts: the same on all ranks with the same stages."""

TIED_EMBEDDING = Placement(replicated_over=("embedding",))
"""An embedding that is also the head, where these two are on different ranks of a pipeline."""

EXPERTS = Placement(replicated_over=("expert_data",), sharded_over=("expert",))
"""Routed experts: each rank of the expert axis holds its own."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A rectangular part of a tensor that is spread over ranks.

    Attributes:
        tensor: the part of this rank, live.
        offsets: index of its first element in the whole tensor, one number for each dimension.
        global_shape: shape of the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


def placed_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], placements: Mapping[str, Placement], plan: Plan
) -> dict[str, Tensor]:
    """Return the trainable parameters by name, in the given order.

    Raises:
        ValueError: naming each parameter that has no placement or a wrong one, whose name occurs twice, or that occurs
            under two names.
    """
    found: dict[str, Tensor] = {}
    owner: dict[int, str] = {}
    problems = []
    for name, parameter in named_parameters:
        if name in found:
            problems.append(f"two parameters have the name {name!r}")
        elif id(parameter) in owner:
            problems.append(f"one parameter has two names, {owner[id(parameter)]!r} and {name!r}; give it once")
        elif name not in placements:
            problems.append(f"parameter {name!r} has no placement; say over which axes it is replicated or sharded")
        else:
            problems += [f"placement of {name!r}: {problem}" for problem in placements[name].problems(plan)]
        found[name] = parameter
        owner[id(parameter)] = name
    if problems:
        raise ValueError("\n".join(problems))
    return {name: parameter for name, parameter in found.items() if parameter.requires_grad}


def replica_problems(
    named_tensors: Iterable[tuple[str, Tensor]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[str]:
    """Return a sentence for each tensor that is not bit-equal on the ranks that replicate it; all ranks must call."""
    by_axis: dict[str, dict[str, str]] = {}
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        local = tensor.detach().cpu().contiguous()
        # Read by address: numpy would be a further dependency.
        digest = hashlib.sha256(string_at(local.data_ptr(), local.nbytes)).hexdigest()
        for axis_name in placements[name].replicated_over:
            by_axis.setdefault(axis_name, {})[name] = digest
    found = []
    for axis_name in sorted(by_axis):
        axis = mesh.axis(axis_name)
        everywhere = all_gather_objects(by_axis[axis_name], axis)
        for name, digest in by_axis[axis_name].items():
            other = [rank for rank, digests in zip(axis.ranks, everywhere, strict=True) if digests.get(name) != digest]
            if other:
                found.append(f"{name!r} differs between rank {mesh.rank} and {other} along the {axis_name!r} axis")
    return found
