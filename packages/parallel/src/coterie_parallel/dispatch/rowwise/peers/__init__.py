"""Peer memory: tensors that every rank of an axis can address, and the hand-over of what was written to them.

Only a table of base addresses leaves this folder for a kernel, so that one set of kernels serves ranks in one process,
processes on a CPU, processes on one GPU, and several GPUs.
"""

import torch

from coterie_parallel.axis import Axis
from coterie_parallel.dispatch.rowwise.peers import shared_memory, symmetric
from coterie_parallel.dispatch.rowwise.peers.base import PeerMemory, PeerTensor
from coterie_parallel.dispatch.rowwise.peers.virtual import virtual_peers

__all__ = ["PeerMemory", "PeerTensor", "make_peers", "reason_against", "virtual_peers"]


def reason_against(size: int, device: torch.device | str) -> str | None:
    """Return why ``size`` ranks cannot have peer memory on ``device``, with what to do, or None; local and cheap."""
    if size == 1:
        return None
    kind = torch.device(device).type
    if kind == "cpu":
        return shared_memory.reason_against()
    if kind == "cuda":
        return symmetric.reason_against()
    return f'peer memory needs the device cpu or cuda, not {kind}; use dispatcher = "all_to_all" there'


def make_peers(axis: Axis, device: torch.device | str, timeout_s: float) -> PeerMemory:
    """Return the peer memory of this rank for ``axis``; collective, every rank of the axis calls it.

    Raises:
        ValueError: when these ranks cannot have peer memory, with what to do.
        CollectiveError: when a peer died or did not come in time.
    """
    reason = reason_against(axis.size, device)
    if reason is not None:
        raise ValueError(reason)
    if axis.size == 1:
        return virtual_peers(1, device, axis_name=axis.name)[0]
    if torch.device(device).type == "cpu":
        return shared_memory.SharedMemoryPeers(axis, timeout_s)
    return symmetric.SymmetricPeers(axis, device, timeout_s)
