"""Processes for one part: a GPU each, or gloo on the CPU; what they say arrives as they say it."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from multi_gpu_parts.bench import Bench, Settings

__all__ = ["run_part"]

_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, before the ranks are forked. None of it may touch a GPU, which a forked process could not use then;
# what is not installed is passed over.
_PRELOAD = {
    "cuda": ["torch", "torch.distributed", "numpy"],
    "cpu": ["torch.distributed.pipelining", "coterie_trainer.training", "coterie_trainer.fsdp"],
}
Part = Callable[[Bench], None]
Listener = Callable[[str, Any], None]


def run_part(part: Part, settings: Settings, limit_s: float, listen: Listener) -> list[str]:
    """Run a part on new processes and return its faults; all processes are gone at the end.

    Args:
        part: importable by name.
        settings: of all ranks.
        limit_s: after it the processes are killed, which is a fault.
        listen: called with "say" and a text, "row" and a dictionary, or "about" and a dictionary, as they come.
    """
    faults: list[str] = []
    _CONTEXT.set_forkserver_preload(_PRELOAD[settings.device])
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        ends = [_CONTEXT.Pipe(duplex=False) for _ in range(settings.world)]
        processes = [
            _CONTEXT.Process(target=_serve, args=(part, settings, rank, Path(folder) / "store", end))
            for rank, (_, end) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, end in ends:
            end.close()
        try:
            _collect([end for end, _ in ends], time.monotonic() + limit_s, limit_s, listen, faults)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return faults


def _collect(ends: list[Connection], deadline_s: float, limit_s: float, listen: Listener, faults: list[str]) -> None:
    """Hear the ranks until all have ended, one has failed, or time is up."""
    running = {end: rank for rank, end in enumerate(ends)}
    while running:
        ready = multiprocessing.connection.wait(list(running), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, sorted(running.values())))
            faults.append(f"not done within {limit_s:.0f} s: rank {late}")
            return
        for end in ready:
            assert isinstance(end, Connection)
            rank = running[end]
            try:
                kind, value = pickle.loads(end.recv_bytes())
            except EOFError:
                faults.append(f"rank {rank} died")
                return
            if kind == "fault":
                faults.append(value)
            elif kind == "failed":
                faults.append(f"rank {rank} raised:\n{value}")
                return
            elif kind == "end":
                del running[end]
            else:
                listen(kind, value)


def _serve(part: Part, settings: Settings, rank: int, store: Path, end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends us
    try:
        _run(part, settings, rank, store, end)
        last = "end", None
    except BaseException:
        last = "failed", traceback.format_exc()
    end.send_bytes(pickle.dumps(last))
    end.close()
    # Destructors of what a failed part has left may wait for peers.
    os._exit(0)


def _run(part: Part, settings: Settings, rank: int, store: Path, end: Connection) -> None:
    from coterie_trainer.launch import Process, distributed
    from trainer.step_cases import about

    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    # No TF32: fp32 is compared between layouts to 1e-5.
    torch.set_float32_matmul_precision("highest")
    process = Process(rank=rank, world=settings.world, local_rank=rank, store=store)
    with distributed(process, timeout_s=settings.timeout_s, device=device):
        bench = Bench(settings, rank, end)
        if rank == 0:
            bench.send("about", {**about(settings.device, settings.commit), "ranks": settings.world})
        part(bench)
        bench.close()
