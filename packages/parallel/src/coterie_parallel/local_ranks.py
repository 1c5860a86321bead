"""CPU processes of this machine that run functions as the ranks of a gloo group: for commands and checks."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from coterie_parallel.axis import Axis
from coterie_parallel.mesh import Mesh
from coterie_parallel.plan import ParallelConfig, make_plan

__all__ = ["RankError", "RankPool", "loop_back", "run_on_local_ranks"]


class RankError(RuntimeError):
    """A rank raised, died or was not done in time; holds its number and its traceback."""


class RankPool:
    """Processes that stay, started when they are first needed, for calls on any number of ranks.

    To import torch takes a process seconds; these are forked from one that has imported it. Use it in a ``with`` block:
    then no process is left.

    Args:
        timeout_s: time-out of every exchange between ranks.
        limit_s: longest time for one call; None for no limit.
        num_threads: threads of each rank.
        preload: modules that the processes have imported when they start.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 120.0,
        limit_s: float | None = None,
        num_threads: int = 1,
        preload: Sequence[str] = ("coterie_parallel",),
    ) -> None:
        self._timeout_s, self._limit_s, self._num_threads = timeout_s, limit_s, num_threads
        # A thread of torch that holds a lock would be lost in a plain fork; the server of this kind has no threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """Call ``function(rank, num_ranks, *args)`` on every rank; return the results in the order of the ranks.

        If there are several ranks they have torch.distributed with gloo.

        Args:
            function: importable by name, as are the types of what it takes and returns.
            num_ranks: number of processes that take part.
            args: for every rank.

        Raises:
            RankError: on the first failure; all processes are ended then, and the next call starts new ones.
        """
        while len(self._processes) < num_ranks:
            self._start()
        with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
            store = str(Path(folder) / "store")
            for rank in range(num_ranks):
                call = function, rank, num_ranks, store, self._timeout_s, args
                self._ends[rank].send_bytes(pickle.dumps(call))
            try:
                results = self._collect(num_ranks)
                self._collect(num_ranks)  # they have left their group
                return results
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join()
            end.close()
        self._processes, self._ends = [], []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._num_threads), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._ends.append(ours)

    def _collect(self, num_ranks: int) -> list[Any]:
        deadline_s = None if self._limit_s is None else time.monotonic() + self._limit_s
        results: dict[int, Any] = {}
        while len(results) < num_ranks:
            waiting = {self._ends[rank]: rank for rank in range(num_ranks) if rank not in results}
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), timeout=left_s)
            if not ready:
                late = ", ".join(map(str, sorted(waiting.values())))
                raise RankError(f"not done within {self._limit_s:g} s: rank {late}")
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting[end]
                try:
                    failure, value = pickle.loads(end.recv_bytes())
                except EOFError:
                    self._processes[rank].join()
                    code = self._processes[rank].exitcode
                    raise RankError(f"rank {rank} died with exit code {code}") from None
                if failure:
                    raise RankError(f"rank {rank} raised:\n{failure}")
                results[rank] = value
        return [results[rank] for rank in range(num_ranks)]


def run_on_local_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``function(axis, *args)`` on an expert axis of ``num_ranks`` processes; return the results by rank.

    Args:
        function: importable by name, as are the types of what it takes and returns.
        num_ranks: processes; one runs in this process.
        args: passed on to every rank.
        timeout_s: time-out of every exchange between them, in seconds.

    Raises:
        RankError: a rank failed or died.
    """
    if num_ranks == 1:
        return [function(Axis.single("expert"), *args)]
    # The ranks share the cores of this machine.
    with RankPool(timeout_s=timeout_s, num_threads=max(1, (os.cpu_count() or 1) // num_ranks)) as pool:
        return pool.run(_on_axis, num_ranks, function, timeout_s, args)


@contextlib.contextmanager
def loop_back() -> Iterator[None]:
    """Keep gloo off outer network interfaces; an environment variable is the only way it can be told."""
    name = "GLOO_SOCKET_IFNAME"
    loops = [interface for _, interface in socket.if_nameindex() if interface in ("lo", "lo0")]
    if name in os.environ or not loops:
        yield
        return
    os.environ[name] = loops[0]
    try:
        yield
    finally:
        del os.environ[name]


def _on_axis(rank: int, num_ranks: int, function: Callable[..., Any], timeout_s: float, args: tuple[Any, ...]) -> Any:
    with Mesh(make_plan(ParallelConfig(expert=num_ranks), num_ranks), rank, timeout_s=timeout_s) as mesh:
        return function(mesh.axis("expert"), *args)


def _serve(end: Connection, num_threads: int) -> None:
    """Run what the parent sends, until it closes its end or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends us
    torch.set_num_threads(num_threads)
    while True:
        try:
            function, rank, num_ranks, store, timeout_s, args = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        # Plain pickle: Connection.send would hand tensors over in shared memory. The result goes before the farewell,
        # in which a rank may wait for one that is late: only that one is named then.
        failure = ""
        try:
            with _group(rank, num_ranks, store, timeout_s):
                end.send_bytes(pickle.dumps(("", function(rank, num_ranks, *args))))
        except BaseException:
            failure = traceback.format_exc()
        end.send_bytes(pickle.dumps((failure, None)))


@contextlib.contextmanager
def _group(rank: int, num_ranks: int, store: str, timeout_s: float) -> Iterator[None]:
    """Hold the default process group, which one rank does not need. The ranks meet through a file, and leave together.

    A rank that left earlier would close connections that others are still making.
    """
    if num_ranks == 1:
        yield
        return
    with loop_back():
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()
