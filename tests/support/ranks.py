"""Run a function on several gloo ranks of this machine, with a time-out, and collect what each returns."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# Ranks are forked from a server that has imported these already; one that is not installed is passed over. Pipelining
# brings the compiler, which torch imports with the first checkpoint or optimizer of a process, seconds in each rank.
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch.distributed.pipelining", "coterie_parallel.conformance", "coterie_trainer.training"]
)


class RankFailedError(AssertionError):
    """One or more ranks raised, died or did not end in time."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``function(rank, world, *args)`` on ``world`` processes that share a gloo group; return the results by rank.

    ``function`` must be importable (defined at module level). The ranks meet through a file store in a temporary
    folder, so no port is used. The first failure ends all ranks and is raised with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _CONTEXT.Process(
                target=_run_one,
                args=(function, rank, world, str(Path(folder) / "store"), timeout_s, args, ends[rank][1]),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, [end[0] for end in ends], timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(processes: list[Any], ends: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {ends[rank]: rank for rank in range(len(processes)) if rank not in results}
        left_s = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left_s))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} did not end within {timeout_s} s")
        for end in ready:
            rank = waiting[end]
            try:
                failed, value = pickle.loads(end.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise RankFailedError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if failed:
                raise RankFailedError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _run_one(
    function: Callable[..., Any], rank: int, world: int, store: str, timeout_s: float, args: tuple[Any, ...], end: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, world, *args)
        # Plain pickle: Connection.send would hand tensors over in shared memory that ends with this process.
        end.send_bytes(pickle.dumps((False, value)))
        dist.destroy_process_group()
    except BaseException:
        end.send_bytes(pickle.dumps((True, traceback.format_exc())))
    finally:
        end.close()
