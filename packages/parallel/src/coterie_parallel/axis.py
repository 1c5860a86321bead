"""One named axis of ranks."""

from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Axis"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis as one rank sees it.

    ``ranks`` are the global ranks along the axis, ``index`` is the place of this rank among them. ``group`` is None
    when the axis has one rank: then every collective is the identity and torch.distributed is not needed.
    ``timeout_s`` is how long a rank waits for the others.
    """

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    timeout_s: float = 600.0

    @classmethod
    def single(cls, name: str, rank: int = 0) -> "Axis":
        """Return an axis that holds one rank only."""
        return cls(name=name, size=1, index=0, group=None, ranks=(rank,))
