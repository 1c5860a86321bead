"""The optimizer state of one bucket: this rank's shard of main weights and moments."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coterie_parallel.background import Job
from coterie_parallel.collectives import start_all_gather
from coterie_parallel.gradients import Bucket
from coterie_parallel.mesh import Mesh
from coterie_parallel.placement import Chunk, Placement

__all__ = ["ShardState"]


class ShardState:
    """Main weights and moments of the parameters of a bucket, as far as they lie in this rank's shard.

    Attributes:
        bucket: the gradients of the same parameters.
        main: 1-D, fp32, by name: views into an own flat tensor, or for an fp32 parameter into the parameter itself.
        moments: 1-D, by name of the moment and of the parameter.
        flat_moments: (shard_numel), by name of the moment: what ``moments`` are views of.
    """

    def __init__(self, bucket: Bucket, moment_names: Sequence[str], moments_dtype: torch.dtype) -> None:
        self.bucket = bucket
        layout, device = bucket.layout, bucket.shard.device
        self.is_fp32 = layout.dtype == torch.float32
        self._parts = {slot.name: layout.piece(slot, bucket.index) for slot in layout.slots}
        self.starts = {name: first for name, (first, _) in self._parts.items()}
        self._flat_main: Tensor | None = None
        if self.is_fp32:
            self.main = self._own()
        else:
            self._flat_main = torch.zeros(layout.shard_numel, dtype=torch.float32, device=device)
            self.main = bucket.cut(self._flat_main)
            torch._foreach_copy_(list(self.main.values()), list(self._own().values()))
        self.flat_moments = {
            moment: torch.zeros(layout.shard_numel, dtype=moments_dtype, device=device) for moment in moment_names
        }
        self.moments = {moment: bucket.cut(flat) for moment, flat in self.flat_moments.items()}

    def rounded(self) -> dict[str, Tensor | None]:
        """Return, by name, where to write the rounded piece for the next `publish`, 1-D; None for an fp32 parameter."""
        return dict.fromkeys(self.main) if self.is_fp32 else dict(self._own())

    def publish(self, *, is_rounded: bool = False) -> Job | None:
        """Write the main weights to the parameters of all ranks: at once, or by the job that is returned.

        ``is_rounded``: where `rounded` told to write them, they are already.
        """
        if self.bucket.axis is not None:
            return self._gather(is_rounded=is_rounded)
        if self._flat_main is not None and not is_rounded:
            self._write(self._flat_main)
        return None

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the kind, the name of the parameter, and the piece of everything that a checkpoint needs."""
        for moment, pieces in self.moments.items():
            for name, piece in pieces.items():
                yield moment, name, piece
        if not self.is_fp32:
            for name, piece in self.main.items():
                yield "main", name, piece

    def chunk(self, name: str, piece: Tensor, placement: Placement, mesh: Mesh) -> Chunk:
        """Return a piece as an interval of the flattened parameter of the whole model."""
        numel = self.bucket.parameters[name].numel()
        index, size = 0, 1
        for axis in (mesh.axis(axis_name) for axis_name in placement.sharded_over):
            index, size = index * axis.size + axis.index, size * axis.size
        return Chunk(
            tensor=piece, offsets=(index * numel + self.starts[name],), global_shape=(math.prod([size, numel]),)
        )

    def _own(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the parameters, as views, 1-D."""
        parameters = self.bucket.parameters
        return {name: parameters[name].detach().view(-1)[first:last] for name, (first, last) in self._parts.items()}

    def _gather(self, *, is_rounded: bool) -> Job:
        layout, axis = self.bucket.layout, self.bucket.axis
        assert axis is not None
        # Made by the job, one bucket after the other: what is sent lives no longer than its exchange.
        sent = self.bucket.shard.new_empty(layout.shard_numel, dtype=layout.dtype)
        if is_rounded or self._flat_main is None:
            torch._foreach_copy_(list(self.bucket.cut(sent).values()), list(self._own().values()))
        else:
            sent.copy_(self._flat_main)
        whole = sent.new_empty(layout.numel)
        yield start_all_gather(whole, sent, axis)
        self._write(whole)

    def _write(self, whole: Tensor) -> None:
        parameters = [parameter.detach() for parameter in self.bucket.parameters.values()]
        torch._foreach_copy_(parameters, list(self.bucket.views(whole).values()))
