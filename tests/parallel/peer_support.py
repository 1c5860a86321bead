"""Ranks with peer memory, and ranks that may be killed, for the tests of peer memory."""

import pickle
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from coterie_parallel import Axis, CollectiveError
from coterie_parallel.dispatch.rowwise.peers import PeerMemory, make_peers
from coterie_parallel.dispatch.rowwise.peers.segments import FOLDER
from support import ranks

__all__ = ["Said", "axis_of", "names_of", "peers_of", "run_with_deaths", "said"]

Said = tuple[float, str]


def axis_of(rank: int, world: int) -> Axis:
    """Return the axis of all ranks of `run_ranks`; without a mesh, whose many groups take most of a short test."""
    return Axis(name="expert", size=world, index=rank, group=dist.group.WORLD, ranks=tuple(range(world)))


def peers_of(rank: int, world: int, timeout_s: float = 20.0) -> PeerMemory:
    return make_peers(axis_of(rank, world), "cpu", timeout_s)


def names_of(*pids: int) -> list[str]:
    """Return the names in the folder of shared memory that these processes made."""
    return [path.name for path in FOLDER.glob("coterie-*") if path.name.split("-")[3] in map(str, pids)]


def said(call: Callable[[], object]) -> Said:
    """Return how long a call took, in seconds, and what it raised."""
    start = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, "no error"


def run_with_deaths(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Do as `run_ranks`, but a rank may be killed: its result is None, and the others go on."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [ranks._CONTEXT.Pipe(duplex=False) for _ in range(world)]
        arguments = [(function, rank, world, f"{folder}/store", 60.0, args, ends[rank][1]) for rank in range(world)]
        processes = [ranks._CONTEXT.Process(target=ranks._run_one, args=one, daemon=True) for one in arguments]
        for process in processes:
            process.start()
        # Only then does the end of a rank close its pipe.
        for _, theirs in ends:
            theirs.close()
        try:
            results: list[Any] = []
            for rank, (mine, _) in enumerate(ends):
                assert mine.poll(50.0), f"rank {rank} did not end"
                try:
                    failed, value = pickle.loads(mine.recv_bytes())
                except EOFError:
                    failed, value = False, None
                assert not failed, value
                results.append(value)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()
