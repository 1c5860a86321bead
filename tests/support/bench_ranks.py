"""Both sides of a comparison on several gloo ranks that stay, for benchmarks whose steps exchange data."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["sides_on_ranks"]


@contextmanager
def sides_on_ranks(
    make: Callable[..., dict[str, Callable[[], object]]], world: int, *args: Any
) -> Iterator[Callable[[str], None]]:
    """Start ranks, each with what ``make(rank, world, *args)`` returns, and give a function that runs a side by name.

    It runs the side on all ranks and returns when the last one is done; a fault of any rank is an AssertionError.

    Args:
        make: defined at module level; its ranks share a gloo group.
        world: number of ranks, each with one thread.
        args: for every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "coterie_parallel", "coterie_trainer.training"])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(world)]
        processes = [
            context.Process(
                target=_serve, args=(rank, world, str(Path(folder) / "store"), make, args, ends[rank][1]), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()

        def run(name: str) -> None:
            for end, _ in ends:
                end.send(name)
            for process, (end, _) in zip(processes, ends, strict=True):
                while not end.poll(1.0):
                    assert process.is_alive(), f"a rank ended with exit code {process.exitcode}"
                fault = end.recv()
                assert fault is None, fault

        try:
            yield run
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(rank: int, world: int, store: str, make: Callable[..., Any], args: tuple[Any, ...], end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    sides = make(rank, world, *args)
    while True:
        name = end.recv()
        try:
            sides[name]()
            end.send(None)
        except Exception as error:
            end.send(f"rank {rank}: {type(error).__name__}: {error}")
