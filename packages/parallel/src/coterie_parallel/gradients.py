"""Sum gradients over the ranks that replicate a parameter, take their global norm, clip.

Every rank's loss is (the local sum over its target tokens) / (the target tokens of the whole step), so the reduction
is a plain sum and nothing else divides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_parallel.collectives import all_gather_objects, all_reduce_sum, all_reduce_sum_
from coterie_parallel.mesh import Mesh
from coterie_parallel.placement import Placement, placed_parameters

__all__ = ["GradientReducer", "accumulate_in_fp32", "clip_gradients_", "count_elements", "global_gradient_norm"]

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    flat: Tensor
    views: dict[str, Tensor]
    replicated_over: tuple[str, ...]


class GradientReducer:
    """Sums gradients over their ``replicated_over`` axes in flat fp32 buckets.

    Buckets are filled in the order of the names, which is the same on all ranks, so no rank can meet another in a
    different collective, whichever gradients it has.

    Args:
        named_parameters: local parameters by global name.
        placements: a placement for every name.
        mesh: all its ranks must construct and use the reducer together.
        bucket_bytes: a bucket takes parameters until it holds this many; a larger parameter has one of its own.

    Raises:
        ValueError: for a parameter without a valid placement, two of one name, or replicas that differ between ranks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._mesh = mesh
        self._parameters = placed_parameters(named_parameters, placements, mesh.plan)
        _check_replicas(self._parameters, placements, mesh)
        self._buckets: list[_Bucket] = []
        by_axes: dict[tuple[str, ...], list[str]] = {}
        for name in self._parameters:
            by_axes.setdefault(placements[name].replicated_over, []).append(name)
        for axes in sorted(by_axes):
            waiting: list[str] = []
            for name in by_axes[axes]:
                size_bytes = 4 * sum(self._parameters[one].numel() for one in [*waiting, name])
                if waiting and size_bytes > bucket_bytes:
                    self._add_bucket(waiting, axes)
                    waiting = []
                waiting.append(name)
            self._add_bucket(waiting, axes)

    def reduce(self) -> dict[str, Tensor]:
        """Return the summed gradient of every parameter, fp32, in its local shape.

        The gradient of a parameter is its ``grad`` plus its ``main_grad``, where it has them; none counts as zero. Both
        are only read. The result is owned by the reducer and written over by the next call.
        """
        summed: dict[str, Tensor] = {}
        for bucket in self._buckets:
            for name, view in bucket.views.items():
                parameter = self._parameters[name]
                view.zero_()
                for grad in (getattr(parameter, "main_grad", None), parameter.grad):
                    if grad is not None:
                        view.add_(grad)
            for axis in bucket.replicated_over:
                all_reduce_sum_(bucket.flat, self._mesh.axis(axis))
            summed.update(bucket.views)
        return {name: summed[name] for name in self._parameters}

    def _add_bucket(self, names: list[str], axes: tuple[str, ...]) -> None:
        parameters = [self._parameters[name] for name in names]
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        pieces = zip(names, parameters, torch.split(flat, sizes), strict=True)
        views = {name: piece.view(parameter.shape) for name, parameter, piece in pieces}
        self._buckets.append(_Bucket(flat=flat, views=views, replicated_over=axes))


def accumulate_in_fp32(parameters: Iterable[Tensor]) -> None:
    """Give each parameter that is not fp32 an fp32 ``main_grad`` that collects its gradients over micro-batches.

    Each backward adds to ``main_grad`` and leaves ``grad`` None, so that small gradients are not rounded away by the
    sum of earlier ones. `Optimizer.zero_grad` sets it to zero.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_fold)  # type: ignore[no-untyped-call]


def _fold(parameter: Tensor) -> None:
    if parameter.grad is not None:  # None: the backward has added to main_grad itself
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def global_gradient_norm(gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> Tensor:
    """Return the 2-norm over every distinct element of the model, each counted once, the same fp64 scalar on all ranks.

    Args:
        gradients: reduced gradients by name, as `GradientReducer.reduce` returns them.
        placements: a placement for every name.
        mesh: all its ranks must call together.
    """
    squares = {name: torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for name, grad in gradients.items()}
    return _sum_once(squares, placements, mesh).sqrt()


def count_elements(gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> int:
    """Return how many elements `global_gradient_norm` counts: the size of the whole model; all ranks must call."""
    sizes = {
        name: torch.tensor(grad.numel(), dtype=torch.float64, device=mesh.device) for name, grad in gradients.items()
    }
    return int(_sum_once(sizes, placements, mesh))


def clip_gradients_(gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale every gradient in place by ``max_norm / max(norm, max_norm)``; the host does not read the norm."""
    if gradients:
        scale = (max_norm / norm.clamp(min=max_norm)).to(torch.float32)
        torch._foreach_mul_(list(gradients.values()), scale)


def _sum_once(values: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> Tensor:
    # Replicas hold the same value, so it is summed over the axes that shard the parameter, and over no other.
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for name in sorted(values):
        by_axes.setdefault(placements[name].sharded_over, []).append(values[name])
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes in sorted(by_axes):
        part = torch.stack(by_axes[axes]).sum()
        for axis in axes:
            part = all_reduce_sum(part, mesh.axis(axis))
        total = total + part
    return total


def _check_replicas(parameters: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> None:
    # Checked up front: ranks with different lists would wait for one another in the first reduction.
    for axis in sorted({axis for name in parameters for axis in placements[name].replicated_over}):
        mine = {
            name: tuple(parameter.shape)
            for name, parameter in parameters.items()
            if axis in placements[name].replicated_over
        }
        everywhere = all_gather_objects(mine, mesh.axis(axis))
        names = sorted({name for one in everywhere for name in one})
        differing = [name for name in names if len({one.get(name) for one in everywhere}) > 1]
        if differing:
            raise ValueError(
                f"parameters replicated over {axis!r} must have the same names and shapes on all its ranks; "
                f"different: {', '.join(differing)}"
            )
