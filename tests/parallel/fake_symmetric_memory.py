"""Symmetric memory of torch, played by shared memory between CPU processes, for kernels under Triton's interpreter.

The blocks begin by another distance into their allocation on each rank, as torch allows. There is no device, so nothing
here says anything about streams, graphs or the order of memory on a GPU.
"""

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed._symmetric_memory
import triton.language as tl
from coterie_parallel import Axis
from coterie_parallel.dispatch.rowwise.peers import PeerTensor, signals, symmetric
from coterie_parallel.dispatch.rowwise.peers.shared_memory import SharedMemoryPeers
from torch._C import _distributed_c10d

__all__ = ["install"]

SLACK = 4096


class Handle:
    def __init__(self, memory: PeerTensor) -> None:
        self.memory = memory
        self.buffer_ptrs = memory.addresses_S.tolist()

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        assert self.memory.views is not None
        assert dtype == torch.uint8
        return self.memory.views[rank][storage_offset : storage_offset + sizes[0]]


class Allocator:
    """What takes the place of torch's class of symmetric memory."""

    def __init__(self, axis: Axis, backend: str) -> None:
        self.shared = SharedMemoryPeers(axis, 30.0)
        self.backend = backend
        self.made: dict[int, PeerTensor] = {}

    def get_backend(self, device: torch.device) -> str:
        return self.backend

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert (stride, dtype) == ((1,), torch.uint8)
        memory = self.shared.allocate("symmetric", (size[0] + SLACK,), dtype)
        start = 256 * (self.shared.index + 1)
        # Garbage, as in memory that was in use before.
        block = memory.local[start : start + size[0]].fill_(0xEE)
        self.made[block.data_ptr()] = memory
        return block

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Handle:
        return Handle(self.made.pop(tensor.data_ptr()))


def install(axis: Axis, *, backend: str = "CUDA", gpu: str = "one") -> None:
    """Let this process of ``axis`` take shared memory for symmetric memory; it cannot be taken back."""
    allocator = Allocator(axis, backend)
    zeros = torch.zeros
    torch.zeros = lambda *size, pin_memory=False, **options: zeros(*size, **options)
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpu)
    torch.distributed._symmetric_memory.rendezvous = allocator.rendezvous
    _distributed_c10d._SymmetricMemory = allocator
    symmetric.reason_against = lambda: None
    # The clock of the GPU is read by an instruction that the interpreter does not know.
    signals._now = lambda spins, TIMED: tl.full((), time.monotonic_ns(), tl.int64)
