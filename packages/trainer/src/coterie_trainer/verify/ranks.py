"""Processes of this machine that stay, and run one function after another as the ranks of a gloo group."""

import multiprocessing
import multiprocessing.connection
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from coterie_trainer.launch import Process, distributed

__all__ = ["RankError", "RankPool"]


class RankError(RuntimeError):
    """A rank raised, died or was not done in time; holds its number and its traceback."""


class RankPool:
    """CPU processes, started when they are first needed, for calls on any number of ranks.

    To import torch takes a process seconds; these are forked from one that has imported it. Use it in a ``with`` block:
    then no process is left.

    Args:
        timeout_s: longest time for one call.
    """

    def __init__(self, *, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        # A thread of torch that holds a lock would be lost in a plain fork; the server of this kind has no threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["coterie_trainer.verify.running"])
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """Call ``function(rank, num_ranks, *args)`` on every rank; return the results in the order of the ranks.

        The ranks have one thread each and, if there are several, torch.distributed with gloo.

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
            for rank in range(num_ranks):
                process = Process(rank=rank, world=num_ranks, local_rank=rank, store=Path(folder) / "store")
                self._ends[rank].send_bytes(pickle.dumps((function, process, self._timeout_s, args)))
            try:
                return self._collect(num_ranks)
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
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._ends.append(ours)

    def _collect(self, num_ranks: int) -> list[Any]:
        deadline_s = time.monotonic() + self._timeout_s
        results: dict[int, Any] = {}
        while len(results) < num_ranks:
            waiting = {self._ends[rank]: rank for rank in range(num_ranks) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, sorted(waiting.values())))
                raise RankError(f"not done within {self._timeout_s:g} s: rank {late}")
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


def _serve(end: Connection) -> None:
    """Run what the parent sends, until it closes its end or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends us
    torch.set_num_threads(1)
    while True:
        try:
            function, process, timeout_s, args = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        failure, value = "", None
        try:
            with distributed(process, timeout_s=timeout_s, device=torch.device("cpu")):
                value = function(process.rank, process.world, *args)
        except BaseException:
            failure = traceback.format_exc()
        # Plain pickle: Connection.send would hand tensors over in shared memory.
        end.send_bytes(pickle.dumps((failure, value)))
