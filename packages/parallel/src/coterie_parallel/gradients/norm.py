"""Norms and counts over the whole model, each element once, and clipping."""

import importlib.util
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from coterie_parallel.collectives import all_gather
from coterie_parallel.mesh import Mesh

__all__ = ["clip_gradients_", "count_elements", "global_gradient_norm", "global_sums"]

_PART_NUMEL = 2**16


def global_gradient_norm(gradients: Iterable[Tensor], mesh: Mesh, *, order: float = 2.0) -> Tensor:
    """Return the norm over all elements of the model, the same fp64 scalar on all ranks.

    NaN where any element is NaN; infinite where one is infinite and none is NaN.

    Args:
        gradients: the parts of this rank, as `GradientReducer.reduce` returns them: no element is on two ranks.
        mesh: all its ranks must call together.
        order: 2.0, or ``math.inf`` for the largest absolute value.
    """
    if order not in (2.0, math.inf):
        raise ValueError(f"order ({order}) must be 2.0 or math.inf")
    present = [grad.detach() for grad in gradients if grad.numel()]
    none = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if order == 2.0:
        squares = [square for grad in present for square in _squares(grad)]
        return global_sums([torch.stack(squares).sum() if squares else none[0]], mesh)[0].sqrt()
    largest = [torch.linalg.vector_norm(grad, math.inf).double() for grad in present]
    own = torch.stack(largest) if largest else none
    return torch.stack(all_gather(own.amax(), mesh.axis("world"))).amax()


def _squares(grad: Tensor) -> list[Tensor]:
    """Return sums of squares in fp64, as the squares of fp32 numbers do not all fit into fp32."""
    if grad.is_cuda:
        if grad.dtype == torch.float32 and grad.is_contiguous() and importlib.util.find_spec("triton") is not None:
            from coterie_parallel.gradients.triton_norm import sum_of_squares

            with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]  # where Triton launches
                return [sum_of_squares(grad)]
        return [torch.linalg.vector_norm(grad, dtype=torch.float64).square()]
    # On a CPU torch would copy all of it to fp64 first, into fresh memory. One small copy stays in the cache.
    parts = torch.split(grad.reshape(-1), _PART_NUMEL)
    copy = torch.empty(parts[0].numel(), dtype=torch.float64)
    found = []
    for part in parts:
        same = copy[: part.numel()].copy_(part)
        found.append(torch.dot(same, same))
    return found


def global_sums(values: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """Return the sums over all ranks of some fp64 scalars, in one exchange, added in the order of the ranks."""
    everywhere = all_gather(torch.stack(list(values)), mesh.axis("world"))
    total = everywhere[0]
    for one in everywhere[1:]:
        total = total + one
    return total


def count_elements(gradients: Iterable[Tensor], mesh: Mesh) -> int:
    """Return how many elements `global_gradient_norm` counts: the size of the whole model; all ranks must call."""
    own = sum(grad.numel() for grad in gradients)
    return int(global_sums([torch.tensor(own, dtype=torch.float64, device=mesh.device)], mesh)[0])


def clip_gradients_(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale every gradient in place by ``max_norm / max(norm, max_norm)``; the host does not read the norm.

    A norm that is infinite or NaN makes the gradients useless; do not apply them.
    """
    gradients = list(gradients)
    if gradients:
        scale = (max_norm / norm.clamp(min=max_norm)).to(torch.float32)
        torch._foreach_mul_(gradients, scale)
