"""Planners of `torch.distributed.checkpoint` that write and read chunks: any rectangle of a larger tensor.

The files and the metadata are those of the default planners, so any reader of such checkpoints reads them.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from coterie_parallel import Chunk
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

__all__ = ["ChunkLoadPlanner", "ChunkSavePlanner"]


class ChunkSavePlanner(DefaultSavePlanner):
    """Writes chunks beside the plain tensors; of a chunk that several ranks have, one writes it."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        super().__init__()
        self._chunks = _without_empty(chunks)

    def create_local_plan(self) -> SavePlan:
        """Plan the plain tensors as the default planner does, and the chunks after them."""
        plan = super().create_local_plan()
        return replace(plan, items=[*plan.items, *(_write_item(name, chunk) for name, chunk in self._chunks.items())])

    def lookup_object(self, index: MetadataIndex) -> object:
        """Return what a planned item writes."""
        chunk = self._chunks.get(index.fqn)
        return super().lookup_object(index) if chunk is None else chunk.tensor.detach()


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Reads chunks from whatever chunks the checkpoint was written in."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        super().__init__()
        self._chunks = _without_empty(chunks)

    def create_local_plan(self) -> LoadPlan:
        """Plan the plain tensors as the default planner does, and the chunks after them."""
        plan = super().create_local_plan()
        items = list(plan.items)
        for name, chunk in self._chunks.items():
            items += create_read_items_for_chunk_list(name, self._entry(name, chunk), [_place(chunk)])
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what a planned item is read into."""
        chunk = self._chunks.get(index.fqn)
        return super().lookup_tensor(index) if chunk is None else chunk.tensor.detach()

    def _entry(self, name: str, chunk: Chunk) -> TensorStorageMetadata:
        assert self.metadata is not None
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not in the checkpoint")
        if tuple(entry.size) != chunk.global_shape:
            raise ValueError(f"size of {name} is {tuple(entry.size)} in the checkpoint and {chunk.global_shape} here")
        return entry


def _without_empty(chunks: Mapping[str, Chunk]) -> dict[str, Chunk]:
    return {name: chunk for name, chunk in chunks.items() if chunk.tensor.numel()}


def _place(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=chunk.tensor.shape)


def _write_item(name: str, chunk: Chunk) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(chunk.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_place(chunk),
            properties=TensorProperties.create_from_tensor(chunk.tensor),
            size=torch.Size(chunk.global_shape),
        ),
    )
