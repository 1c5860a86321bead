"""Sizes, ids and plain Python loops that the tests of the row map and of permute share, on a CPU and on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KINDS", "SIZES", "PlainMap", "filled_with_garbage", "ids_of_kind", "plain_map"]

# (T, K, E): T*K around the powers of two, one expert, and numbers of experts that are no power of two.
SIZES = [
    (0, 2, 3),
    (1, 1, 1),
    (9, 7, 3),
    (32, 2, 8),
    (13, 5, 64),
    (127, 1, 3),
    (16, 8, 128),
    (43, 3, 257),
    (6, 10, 8),
]
KINDS = ["uneven", "some not routed", "none routed", "all to one"]


@dataclass(frozen=True, kw_only=True)
class PlainMap:
    """The row map in lists."""

    counts: list[int]
    offsets: list[int]
    row: list[list[int]]
    slot: list[int]


def plain_map(ids: list[list[int]], num_experts: int) -> PlainMap:
    """Return the row map by loops: one expert after the other takes its choices in the order of the slots."""
    row = [[-1] * len(choices) for choices in ids]
    slot, counts, offsets = [], [], []
    for expert in range(num_experts):
        start = len(slot)
        for t, choices in enumerate(ids):
            for k, chosen in enumerate(choices):
                if chosen == expert:
                    row[t][k] = len(slot)
                    slot.append(t * len(choices) + k)
        counts.append(len(slot) - start)
        offsets.append(len(slot))
    num_slots = sum(len(choices) for choices in ids)
    return PlainMap(counts=counts, offsets=offsets, row=row, slot=slot + [-1] * (num_slots - len(slot)))


def ids_of_kind(kind: str, tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    """Return int64 ids on the CPU; the uneven kinds favour low experts and leave about half of them empty."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "none routed":
        return torch.full((tokens, top_k), -1)
    if kind == "all to one":
        return torch.full((tokens, top_k), num_experts - 1)
    share_TK = torch.rand(tokens, top_k, generator=generator) ** 3
    ids_TK = (share_TK * (num_experts + 1) / 2).long()
    if kind == "some not routed":
        ids_TK[torch.rand(tokens, top_k, generator=generator) < 0.3] = -1
    return ids_TK


def filled_with_garbage(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `make`, as torch.empty, with NaN or the largest integer in the memory, to show what nobody writes."""

    def make_garbage(*arguments: object, **options: object) -> Tensor:
        tensor = make(*arguments, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    return make_garbage
