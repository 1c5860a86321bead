"""The named axes of a run, each with its process group."""

from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from coterie_parallel.axis import Axis
from coterie_parallel.plan import AXES, Plan

__all__ = ["Mesh"]


class Mesh:
    """Every axis of a plan, with process groups that carry the user's time-out and a name.

    All ranks must construct their mesh at the same time. More than one rank needs an initialised torch.distributed.

    Args:
        plan: the layout.
        rank: the global rank of this process.
        timeout_s: time-out of every group, in seconds.
        device: where this rank computes.

    Raises:
        ValueError: when torch.distributed is not initialised or has another world size or rank than the plan.
    """

    def __init__(self, plan: Plan, rank: int, *, timeout_s: float, device: torch.device | str = "cpu") -> None:
        plan.coordinates(rank)
        if plan.world > 1:
            _check_runtime(plan, rank)
        self.plan = plan
        self.rank = rank
        self.device = torch.device(device)
        self._axes: dict[str, Axis] = {}
        for name in AXES:
            if name == "embedding" and plan.pipeline == 1:
                continue
            for ranks in plan.axis_ranks(name):
                group: dist.ProcessGroup | None = None
                if len(ranks) > 1:
                    described = f"{name} axis, ranks {', '.join(map(str, ranks))}"
                    # Every rank creates every group, also those it is no part of: torch counts them in step.
                    created = dist.new_group(
                        list(ranks), timeout=timedelta(seconds=timeout_s), group_desc=f"coterie {described}"
                    )
                    group = created if isinstance(created, dist.ProcessGroup) else None
                if rank in ranks:
                    index = ranks.index(rank)
                    self._axes[name] = Axis(
                        name=name, size=len(ranks), index=index, group=group, ranks=ranks, timeout_s=timeout_s
                    )

    def axis(self, name: str) -> Axis:
        """Return the axis ``name``, one of `AXES`; "embedding" only on its ranks, and with more than one stage."""
        if name not in self._axes:
            raise ValueError(f"axis ({name!r}) is unknown; known: {', '.join(AXES)}")
        return self._axes[name]

    def close(self) -> None:
        """Destroy the process groups of this mesh; the axes can not be used after it."""
        for axis in self._axes.values():
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._axes = {}

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_runtime(plan: Plan, rank: int) -> None:
    if not dist.is_initialized():
        raise ValueError(f"a mesh of {plan.world} ranks needs torch.distributed.init_process_group first")
    if (dist.get_world_size(), dist.get_rank()) != (plan.world, rank):
        raise ValueError(
            f"the plan is for rank {rank} of {plan.world}, torch.distributed runs rank {dist.get_rank()} "
            f"of {dist.get_world_size()}"
        )
