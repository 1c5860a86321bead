"""Which element of which parameter lies where in which bucket: numbers only, known before anything is allocated."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch

from coterie_parallel.placement import Placement
from coterie_parallel.plan import Plan

__all__ = ["ALIGNMENT", "BucketLayout", "Slot", "bucket_layouts"]

ALIGNMENT = 64
"""Elements; parameters and shards start at multiples of it, which is a line of memory in fp32 and in bf16."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one flattened parameter lies in its bucket: elements ``start`` to ``start + numel``."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Flattened parameters one behind the other, cut into equal shards, one for each rank that replicates them.

    Attributes:
        axis: the axis over which the gradients are summed; None where every rank has parameters of its own.
        num_shards: its size, 1 without an axis.
        shard_numel: elements of one shard; shard ``i`` is elements ``[i * shard_numel, (i + 1) * shard_numel)``.
        dtype: of the parameters.
        kind: what the caller told apart, see `bucket_layouts`.
        slots: the parameters; what lies between and behind them is padding.
    """

    axis: str | None
    num_shards: int
    shard_numel: int
    dtype: torch.dtype
    kind: Hashable
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.num_shards * self.shard_numel

    def piece(self, slot: Slot, shard: int) -> tuple[int, int]:
        """Return the elements of the flattened parameter that a shard holds, first and behind the last; may be none."""
        first = min(max(shard * self.shard_numel - slot.start, 0), slot.numel)
        last = min(max((shard + 1) * self.shard_numel - slot.start, 0), slot.numel)
        return first, last


def bucket_layouts(
    sizes: Iterable[tuple[str, int, torch.dtype]],
    placements: Mapping[str, Placement],
    plan: Plan,
    bucket_bytes: int,
    kinds: Mapping[str, Hashable] | None = None,
) -> list[BucketLayout]:
    """Fill buckets in the order of ``sizes`` and return them in the order in which they become full.

    Args:
        sizes: name, number of local elements and dtype of each parameter, in the order in which gradients come.
        placements: a placement for every name.
        plan: the layout of the ranks.
        bucket_bytes: a bucket takes parameters until it holds this many bytes of fp32; a larger one has its own.
        kinds: parameters of different kinds never share a bucket; neither do those of different axes or dtypes.
    """
    layouts: list[BucketLayout] = []
    waiting: dict[tuple[str | None, torch.dtype, Hashable], list[Slot]] = {}
    for name, numel, dtype in sizes:
        key = placements[name].replication_axis, dtype, None if kinds is None else kinds[name]
        slots = waiting.setdefault(key, [])
        start = _aligned(slots[-1].start + slots[-1].numel) if slots else 0
        if slots and 4 * (start + numel) > bucket_bytes:
            layouts.append(_layout(key, slots, plan))
            slots.clear()
            start = 0
        slots.append(Slot(name=name, start=start, numel=numel))
    return layouts + [_layout(key, slots, plan) for key, slots in waiting.items()]


def _layout(key: tuple[str | None, torch.dtype, Hashable], slots: list[Slot], plan: Plan) -> BucketLayout:
    axis, dtype, kind = key
    num_shards = 1 if axis is None else len(plan.axis_ranks(axis)[0])
    shard_numel = _aligned(math.ceil((slots[-1].start + slots[-1].numel) / num_shards))
    return BucketLayout(
        axis=axis, num_shards=num_shards, shard_numel=shard_numel, dtype=dtype, kind=kind, slots=tuple(slots)
    )


def _aligned(numel: int) -> int:
    return math.ceil(numel / ALIGNMENT) * ALIGNMENT
