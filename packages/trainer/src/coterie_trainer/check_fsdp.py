"""What `coterie check` shows of a run with FSDP2: what a rank holds, and the bytes that it sends."""

import math
from collections.abc import Mapping

__all__ = ["FsdpSizes"]


class FsdpSizes:
    """Sizes of a model that FSDP2 cuts along the first dimension of every parameter.

    Args:
        shapes: of every parameter, by name.
        num_ranks: of the data axis.
        dtype_bytes: of a weight that was gathered.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype_bytes: int) -> None:
        self._num_ranks, self._dtype_bytes = num_ranks, dtype_bytes
        # The first ranks have a row more where rows do not divide; the exchange fills up the others.
        self._shards = {name: math.ceil(one[0] / num_ranks) * math.prod(one[1:]) for name, one in shapes.items()}
        self._wholes: dict[str, int] = {}
        for name, shape in shapes.items():
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
            self._wholes[unit] = self._wholes.get(unit, 0) + math.prod(shape)

    def memory(self) -> dict[str, int]:
        """Return the bytes of a rank that holds the most, by what they are."""
        shard, largest = sum(self._shards.values()), max(self._wholes.values())
        return {
            "weights, float32": 4 * shard,
            "gradients, float32": 4 * shard,
            "moments, float32": 8 * shard,
            "outside of layers, gathered": self._wholes.get("", 0) * self._dtype_bytes,
            "in passing, two layers gathered": 2 * largest * self._dtype_bytes,
            "in passing, gradients of a layer before and in their sum": largest * (self._dtype_bytes + 4),
        }

    def messages(self, num_micro_batches: int) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, by what they are."""
        peers = self._num_ranks - 1
        layers = sum(numel for name, numel in self._shards.items() if name.startswith("layers."))
        outside = sum(self._shards.values()) - layers
        return {
            "weights of layers, for every forward and backward": (
                num_micro_batches * peers * 2 * layers * self._dtype_bytes
            ),
            "weights outside of layers": num_micro_batches * peers * outside * self._dtype_bytes,
            "gradients, in each micro-batch": num_micro_batches * peers * (layers + outside) * 4,
        }
