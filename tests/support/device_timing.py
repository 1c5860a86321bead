"""Times on a CUDA device: replays of a graph between events, the bandwidth of a copy, the time to read a tensor once.

Each repeat begins with cold caches unless told otherwise: 256 MiB are read before it, so that no input of the function
lies in the L2 cache and no line waits to be written back. To time a backward pass run its forward pass, and the call of
`median_us`, inside one `with torch.cuda.stream(...)` of a stream that is not the default one: autograd runs a backward
pass on the stream of its forward pass, and a graph can capture only that stream.
"""

import datetime
import functools
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

__all__ = ["about", "copy_bandwidth_gbps", "flush_l2", "median_us", "read_us", "write_json"]

# Several times the largest L2 cache (60 MB on an H200).
_FLUSHED_BYTES = 1 << 28


def about(commit: str = "") -> dict[str, object]:
    """Return where and when: date, device, and versions; `commit` is the commit of the sources, if known."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "commit": commit,
    }


def median_us(
    function: Callable[[], object], *, graph: bool = True, repeats: int = 50, cold: bool = True, warmups: int = 3
) -> float:
    """Return the median time of one call in microseconds, between two events on the device.

    Args:
        function: starts work on the current stream; with `graph` it must not wait for the device.
        graph: capture one call in a CUDA graph and time its replays; else time plain calls, which a short function
            spends on the host.
        repeats: number of timed calls, all queued before the first result is read.
        cold: begin each repeat with cold caches.
        warmups: calls before the capture, for compilation and lazy set-up.
    """
    outer = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if outer == torch.cuda.default_stream() else outer
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            function()
        stream.synchronize()
        run = _captured(function, stream) if graph else function
        run()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        for start, end in zip(starts, ends, strict=True):
            # The read is also work enough to keep the device behind the host, which then never makes it wait.
            flush_l2() if cold else torch.cuda._sleep(100_000)
            start.record()
            run()
            end.record()
        stream.synchronize()
    outer.wait_stream(stream)
    return median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)) * 1e3


def flush_l2() -> None:
    """Fill the L2 cache with clean lines that no function wants: a read, since written lines cost their write-back."""
    torch.sum(_unwanted(), 0, dtype=torch.int64, out=_unwanted_sum())


@functools.cache
def copy_bandwidth_gbps() -> float:
    """Return the best rate of a device copy of 1 and of 4 GiB, in GB/s, bytes read plus bytes written.

    Without a graph: there a copy may become a node that is slower than the kernel.
    """
    rates = []
    for size in (1 << 30, 1 << 32):
        source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        rates.append(2 * size / median_us(lambda target=target, source=source: target.copy_(source), graph=False) / 1e3)
    torch.cuda.empty_cache()
    return max(rates)


def read_us(tensor: Tensor) -> float:
    """Return the time to read this contiguous tensor once, in microseconds, at the best rate of several readers.

    The readers are the sum of torch and, where the tensor's bytes are a multiple of 4, a Triton kernel in four block
    sizes that loads every word once and writes one word for each block.
    """
    words = tensor.detach().reshape(-1)
    times = [median_us(lambda: torch.sum(words, 0, dtype=torch.float32), repeats=30)]
    if words.numel() * words.element_size() % 4 == 0:
        words = words.view(torch.int32)
        read = _read_kernel()
        for block, num_warps in ((2048, 4), (4096, 4), (8192, 8), (16384, 8)):
            num_blocks = -(-words.numel() // block)
            found = torch.empty(num_blocks, dtype=torch.int32, device=words.device)
            run = functools.partial(read[(num_blocks,)], words, found, words.numel(), BLOCK=block, num_warps=num_warps)
            times.append(median_us(run, repeats=30))
    return min(times)


def write_json(path: Path, about: dict[str, object], rows: list[dict[str, object]]) -> None:
    """Write what `about` says and the rows under "rows", as the results folders keep them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _captured(function: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = function()

    def run() -> None:
        graph.replay()

    # The outputs belong to the graph's memory: they live as long as it does.
    run.outputs = kept  # type: ignore[attr-defined]
    return run


@functools.cache
def _unwanted() -> Tensor:
    return torch.ones(_FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")


@functools.cache
def _unwanted_sum() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cuda")


@functools.cache
def _read_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def read(words_ptr, found_ptr, num_words, BLOCK: tl.constexpr):
        block = tl.program_id(0)
        index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(words_ptr + index, mask=index < num_words, other=0)
        tl.store(found_ptr + block, tl.xor_sum(words, 0))

    return read
