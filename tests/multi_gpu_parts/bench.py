"""What a rank of a part has: its place among the ranks, ways to report, and clocks that all ranks agree on."""

import gc
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, TypeVar

import torch
from coterie_parallel import (
    Mesh,
    ParallelConfig,
    all_gather_objects,
    all_reduce_sum_,
    barrier,
    make_plan,
)

__all__ = ["Bench", "Settings", "Spans"]

_Value = TypeVar("_Value")
_AHEAD_CYCLES = 2_000_000  # about a millisecond, in which the host queues what is timed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same on all ranks and in all parts.

    Attributes:
        world: number of ranks.
        device: "cuda", with a GPU for each rank, or "cpu".
        tiny: sizes of a dry run.
        compiled: whether dense layers are compiled.
        commit: of the sources, for the files.
        timeout_s: of every exchange between the ranks.
    """

    world: int
    device: str = "cuda"
    tiny: bool = False
    compiled: bool = True
    commit: str = ""
    timeout_s: float = 60.0


class Bench:
    """One rank of a part; all ranks call a method together unless it says otherwise.

    Attributes:
        axis: an expert axis of all ranks.
        tolerance: relative difference of a loss that rounding explains: 1e-5 in fp32, which a CPU computes in; half a
            unit of bf16's last place on a GPU.
    """

    def __init__(self, settings: Settings, rank: int, end: Connection) -> None:
        self.settings, self.rank, self.world, self.tiny = settings, rank, settings.world, settings.tiny
        self.device = torch.device(settings.device, rank) if settings.device == "cuda" else torch.device("cpu")
        self.is_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.tolerance = 2.0**-8 if self.is_gpu else 1e-5
        self._end = end
        self._mesh = self.mesh(ParallelConfig(data=self.world, expert=self.world))
        self.axis = self._mesh.axis("expert")
        self._one = torch.ones(1, device=self.device)

    def mesh(self, parallel: ParallelConfig) -> Mesh:
        """Return the mesh of a layout of all ranks."""
        plan = make_plan(parallel, self.world)
        return Mesh(plan, self.rank, timeout_s=self.settings.timeout_s, device=self.device)

    def send(self, kind: str, value: object) -> None:
        """Tell the parent something; for one rank."""
        self._end.send_bytes(pickle.dumps((kind, value)))

    def say(self, text: str) -> None:
        """Print a line; rank 0 does, and others do nothing."""
        if self.rank == 0:
            self.send("say", text)

    def row(self, **values: object) -> None:
        """Print a row and keep it for the file; rank 0 does, and others do nothing."""
        if self.rank == 0:
            self.send("row", values)

    def fault(self, text: str) -> None:
        """Report what is wrong, for one rank; the part goes on and has failed."""
        self.send("fault", f"rank {self.rank}: {text}")

    def target(self, name: str, found: float, limit: float, *, at_least: bool = True) -> None:
        """State a goal of speed and whether it was met, on GPUs only; a missed goal is no fault."""
        if self.is_gpu and not self.tiny:
            met = found >= limit if at_least else found <= limit
            word = "at least" if at_least else "at most"
            self.row(name=f"goal: {name}", found=found, goal=f"{word} {limit:g}", met="yes" if met else "NO")

    def attempt(self, name: str, function: Callable[[], _Value]) -> _Value | None:
        """Return what a step of the part returns, or None if it raised on all ranks alike: the part goes on then."""
        value, failed = None, False
        try:
            value = function()
        except Exception:
            failed = True
            self.fault(f"{name} raised:\n{traceback.format_exc()}")
        everywhere = self.gather(failed)
        if any(everywhere) and not all(everywhere):
            raise AssertionError(f"{name} raised on some ranks only, and the others do not meet them any more")
        if failed:
            self.free()
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return all_gather_objects(value, self.axis)

    def barrier(self) -> None:
        """Wait for all ranks and their devices."""
        if self.is_gpu:
            torch.cuda.synchronize()
        barrier(self.axis)

    def align(self) -> None:
        """Let what follows begin on all devices at the same time, with the host ahead of them."""
        if self.is_gpu:
            torch.cuda._sleep(_AHEAD_CYCLES)
            all_reduce_sum_(self._one, self.axis)
            self._one.fill_(1)
        else:
            barrier(self.axis)

    def mark(self) -> Any:
        """Return this moment of the stream of a GPU, or of a CPU; for one rank."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks that the device has reached; for one rank."""
        return float(start.elapsed_time(end) if self.is_gpu else (end - start) * 1e3)

    def free(self) -> None:
        """Give back memory that nobody holds any more, and start to watch the peak anew."""
        gc.collect()
        self.barrier()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Return the most that torch's allocator gave out on any rank, without peer memory; None on a CPU."""
        return max(self.gather(torch.cuda.max_memory_allocated())) / 2**30 if self.is_gpu else None

    def close(self) -> None:
        """Destroy the groups, after a good end."""
        self.barrier()
        self._mesh.close()


class Spans:
    """Times of named spans of work on this rank, between events of a GPU or by the clock of a CPU."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._found: dict[str, list[Any]] = {}

    @contextmanager
    def span(self, name: str, *, aligned: bool = True) -> Iterator[None]:
        """Time what is inside; ``aligned`` lets it begin on all ranks together."""
        if aligned:
            self._bench.align()
        start = self._bench.mark()
        yield
        self._found.setdefault(name, []).append((start, self._bench.mark()))

    def ms(self) -> dict[str, float]:
        """Return by name the median in milliseconds of the slowest rank."""
        if self._bench.is_gpu:
            torch.cuda.synchronize()
        between = self._bench.between_ms
        own = {name: median(between(*pair) for pair in pairs) for name, pairs in self._found.items()}
        everywhere = self._bench.gather(own)
        return {name: max(one[name] for one in everywhere) for name in own}

    @classmethod
    def of(cls, bench: Bench, function: Callable[[], object], *, repeats: int, warmups: int = 2) -> float:
        """Return the time of one call in milliseconds."""
        for _ in range(warmups):
            function()
        spans = cls(bench)
        for _ in range(repeats):
            with spans.span("call"):
                function()
        return spans.ms()["call"]
