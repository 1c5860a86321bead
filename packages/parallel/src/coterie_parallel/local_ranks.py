"""Run a function on several CPU ranks of this machine: for the commands of this package, not for training."""

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from coterie_parallel.axis import Axis
from coterie_parallel.mesh import Mesh
from coterie_parallel.plan import ParallelConfig, make_plan

__all__ = ["run_on_local_ranks"]


def run_on_local_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``function(axis, *args)`` on an expert axis of ``num_ranks`` gloo processes; return the results by rank.

    Args:
        function: importable by name, as are the types of what it takes and returns.
        num_ranks: processes; one runs in this process.
        args: passed on to every rank.
        timeout_s: time-out of every exchange between them, in seconds.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; holds its traceback.
        torch.multiprocessing.ProcessExitedException: a rank died.
    """
    if num_ranks == 1:
        return [function(Axis.single("expert"), *args)]
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_one, (function, num_ranks, folder, timeout_s, args), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_ranks)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}"


def _run_one(
    rank: int, function: Callable[..., Any], num_ranks: int, folder: str, timeout_s: float, args: tuple[Any, ...]
) -> None:
    # The ranks share the cores of this machine, and talk over its loop-back interface.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    with Mesh(make_plan(ParallelConfig(expert=num_ranks), num_ranks), rank, timeout_s=timeout_s) as mesh:
        value = function(mesh.axis("expert"), *args)
    _result(folder, rank).write_bytes(pickle.dumps(value))
    dist.destroy_process_group()
