"""Peer memory of processes on one GPU or on several GPUs of one host, over torch's symmetric memory."""

import importlib.util
import os
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import CollectiveError, all_gather_objects
from coterie_parallel.dispatch.rowwise.peers.base import (
    PeerMemory,
    PeerTensor,
    block_bytes,
    check_name,
    check_request,
    tensor_at,
)
from coterie_parallel.dispatch.rowwise.peers.processes import this_process
from coterie_parallel.dispatch.rowwise.peers.watch import Watch

__all__ = ["SymmetricPeers", "reason_against"]

# A switch of torch, which asks for it when memory is shared; it is read here to refuse in words, and never set.
_SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_INSTEAD = 'use dispatcher = "all_to_all" instead'
# Slots of signals.py, which only who has triton can import.
_MAX_PHASES = 256


def reason_against() -> str | None:
    """Return why GPUs of this machine cannot share memory this way, with what to do, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"peer memory between GPUs needs a torch built for CUDA and an NVIDIA GPU; {_INSTEAD}"
    if importlib.util.find_spec("triton") is None:
        return f"peer memory between GPUs needs triton (pip install triton); {_INSTEAD} where it cannot be installed"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"peer memory between GPUs needs the symmetric memory of torch 2.10 or newer; {_INSTEAD}"
    return None


class SymmetricPeers(PeerMemory):
    """The peer memory of one process of an axis whose GPUs reach one another, or whose processes share one GPU.

    Collective. Phases are numbered in the order in which a rank first uses them, which must be the same on all ranks; a
    wait that meets another phase ends, and `check` says so. After a CollectiveError every further call raises it again.

    Raises:
        ValueError: on every rank, when the ranks cannot share memory.
        CollectiveError: when a peer died or did not come in time.
    """

    def __init__(self, axis: Axis, device: torch.device | str, timeout_s: float) -> None:
        super().__init__(axis, device, timeout_s)
        reason = reason_against()
        if reason is not None:
            raise ValueError(reason)
        # With its number, also where "cuda" was asked for.
        self.device = torch.empty(0, device=device).device
        self._axis = axis
        self._error = ""
        self._is_closed = False
        self._slots: dict[str, int] = {}
        self._processes = all_gather_objects(this_process(), axis)
        self._refuse_device()
        self._pad = self.allocate("signals", (_MAX_PHASES, self.size), torch.int64)
        self._sent = torch.zeros_like(self._pad.local)
        self._waited = torch.zeros_like(self._pad.local)
        self._faults_S = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        # Whatever stream signals first must find the zeros.
        torch.cuda.synchronize(self.device)
        # Pinned, so that the kernels read what the host writes while it may be blocked by them.
        self._abort = abort = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        own = self._processes[self.index]
        near = {
            peer: process
            for peer, process in enumerate(self._processes)
            if peer != self.index and (process.host, process.namespace) == (own.host, own.namespace)
        }
        self._watch = Watch(near, lambda: abort.fill_(1))
        # The thread also ends where nobody calls close.
        self._end_watch = weakref.finalize(self, self._watch.stop)

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> PeerTensor:
        """Return a zero-filled tensor of this shape on every rank; waits for the device; see `PeerMemory.allocate`."""
        self._refuse_unusable()
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{name!r} cannot be allocated while a CUDA graph is captured; allocate it before")
        problem = ""
        try:
            shape = check_request(name, shape, dtype)
        except ValueError as error:
            problem = str(error)
        # No kernel of any rank may still write to memory that is about to be given out again.
        torch.cuda.synchronize(self.device)
        replies = all_gather_objects((f"{name!r} {tuple(shape)} {dtype}", problem), self._axis)
        self.refuse_problems([reply[1] for reply in replies])
        self.refuse_difference([reply[0] for reply in replies])
        num_bytes = block_bytes(shape, dtype)
        handle: Any = None
        offset = 0
        try:
            whole, handle = self._symmetric(num_bytes)
            offset = whole.data_ptr() - handle.buffer_ptrs[self.index]
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            problem = (
                f"torch's symmetric memory refused {num_bytes:,} bytes for {name!r}: {str(error).splitlines()[0]}; "
                f"the GPUs of an axis must reach one another's memory (NVLink, or PCIe peer access); {_INSTEAD}"
            )
        offsets = all_gather_objects((problem, offset), self._axis)
        self.refuse_problems([one for one, _ in offsets])
        # An allocation may begin before the tensor, and by another distance on another rank.
        addresses = [base + one for base, (_, one) in zip(handle.buffer_ptrs, offsets, strict=True)]
        views = tuple(
            tensor_at(self._mapped(handle, peer, address, num_bytes), 0, shape, dtype)
            for peer, address in enumerate(addresses)
        )
        return PeerTensor(
            local=tensor_at(whole, 0, shape, dtype),
            addresses_S=torch.tensor(addresses, dtype=torch.int64, device=self.device),
            views=views,
            mapping=handle,
        )

    def signal(self, phase: str) -> None:
        """Tell every peer, in stream order, that this rank has done ``phase``."""
        from coterie_parallel.dispatch.rowwise.peers.signals import send_signals

        slot, mark = self._place(phase)
        with torch.cuda.device(self.device):
            send_signals[(self.size - 1,)](
                self._pad.addresses_S, self._sent, slot, mark, self.index, SIZE=self.size, num_warps=1
            )

    def wait(self, phase: str) -> None:
        """Make the current stream wait until every peer has signalled ``phase``; see `PeerMemory.wait`."""
        from coterie_parallel.dispatch.rowwise.peers.signals import wait_for_signals

        slot, mark = self._place(phase)
        with torch.cuda.device(self.device):
            wait_for_signals[(self.size - 1,)](
                self._pad.local,
                self._waited,
                self._faults_S,
                self._abort.data_ptr(),
                slot,
                mark,
                self.index,
                int(self.timeout_s * 1e9),
                SIZE=self.size,
                TIMED=True,
                num_warps=1,
            )

    def check(self) -> None:
        """Raise a CollectiveError when a wait on the device ended without its peers; waits for the current stream."""
        from coterie_parallel.dispatch.rowwise.peers.signals import read_fault

        self._refuse_unusable()
        faults = {peer: read_fault(fault) for peer, fault in enumerate(self._faults_S.tolist()) if fault}
        if faults:
            phase = list(self._slots)[next(iter(faults.values()))[0]]
            # Who waits for the dead is late too, and not worth a word.
            dead = [peer for peer in self._watch.dead() if peer in faults]
            reasons = [self._reason(peer, faults[peer][1], peer in dead) for peer in dead or faults]
            error = self.failure(phase, reasons)
            self._error = str(error)
            raise error

    def close(self) -> None:
        """Stop watching the peers; see `PeerMemory.close`."""
        self._is_closed = True
        self._end_watch()

    def _refuse_unusable(self) -> None:
        if self._error:
            raise CollectiveError(self._error)
        if self._is_closed:
            raise ValueError("this peer memory is closed; make a new one with make_peers, on every rank")

    def _refuse_device(self) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        problem = ""
        backend = _SymmetricMemory.get_backend(self.device)
        if backend != "CUDA":
            problem = (
                f'torch\'s symmetric memory uses {backend} here, and peer memory needs "CUDA"; unset TORCH_SYMMMEM, or '
                'call torch.distributed._symmetric_memory.set_backend("CUDA") before anything is allocated'
            )
        own = str(torch.cuda.get_device_properties(self.device).uuid)
        replies = all_gather_objects((problem, own, os.environ.get(_SHARED_GPU) == "1"), self._axis)
        places = [(process.host, reply[1]) for process, reply in zip(self._processes, replies, strict=True)]
        shared = (
            f"this rank shares its GPU with another; give each rank a GPU of its own, or set {_SHARED_GPU}=1 in the "
            "environment of every rank to try several on one GPU"
        )
        refused = [places.count(place) > 1 and not reply[2] for place, reply in zip(places, replies, strict=True)]
        self.refuse_problems([reply[0] or shared * no for reply, no in zip(replies, refused, strict=True)])

    def _symmetric(self, num_bytes: int) -> tuple[Tensor, Any]:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        assert self._axis.group is not None

        with torch.cuda.device(self.device):
            # The function `empty` beside `rendezvous` may give out memory from a pool, and what a pool has left depends
            # on when a rank gave up its tensors: ranks that differ there would meet in no rendezvous.
            whole = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)
            handle = rendezvous(whole, self._axis.group)
            whole.zero_()
        return whole, handle

    def _mapped(self, handle: Any, peer: int, address: int, num_bytes: int) -> Tensor:
        first: Tensor = handle.get_buffer(peer, (1,), torch.uint8)
        mapped: Tensor = handle.get_buffer(peer, (num_bytes,), torch.uint8, address - first.data_ptr())
        assert mapped.data_ptr() == address
        return mapped

    def _place(self, phase: str) -> tuple[int, int]:
        from coterie_parallel.dispatch.rowwise.peers.signals import MAX_MARK

        self._refuse_unusable()
        check_name(phase)
        slot = self._slots.setdefault(phase, len(self._slots))
        if slot >= _MAX_PHASES:
            raise ValueError(f"phase {phase!r} is one more than the {_MAX_PHASES} that peer memory can tell apart")
        return slot, zlib.crc32(phase.encode()) % MAX_MARK + 1

    def _reason(self, peer: int, why: int, is_dead: bool) -> str:
        from coterie_parallel.dispatch.rowwise.peers.signals import ABORTED, OTHER_PHASE

        rank = self.ranks[peer]
        who = f"rank {rank} (process {self._processes[peer].pid})"
        if is_dead:
            return f"{who} has died without this phase; the output of rank {rank} says why"
        if why == ABORTED:
            return f"{who} had not come when another rank died"
        if why == OTHER_PHASE:
            used = ", ".join(map(repr, self._slots))
            return f"{who} uses the phases in another order; every rank must use them first in this order: {used}"
        return (
            f"{who} was not there after {self.timeout_s:g} s; if it loads or compiles for so long raise timeout_s, "
            "else see where it hangs"
        )
