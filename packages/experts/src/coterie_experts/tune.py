"""Record the fastest tiles and back-ends of a GPU: ``python -m coterie_experts.tune``.

For a few sizes of layers, each a class of shapes of its own, every kernel of the Triton back-end is timed with several
tiles in turn, then the whole layer with each back-end that can run. The file is written after each size, so that a run
that is interrupted, or that reaches its time limit, leaves what it has found. A layer reads the file where its config
names it: ``ExpertsConfig(..., tiles="coterie-experts-tiles.json")``.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from coterie_experts.grouped_swiglu.requirements import width_obstacle
from coterie_experts.tables import KERNELS, TileTable, shape_class, width_class

__all__ = ["SIZES", "LayerSize", "Timer", "candidates", "main", "record"]

DEFAULT_FILE = "coterie-experts-tiles.json"
# What a tile, or a back-end, has to win by: less is noise. The same tile in two calls of a round was up to 3.7 % apart.
_MARGIN = 1.04


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """A layer on one GPU: tokens, model width, hidden width, experts, choices."""

    tokens: int
    d_model: int
    d_hidden: int
    num_experts: int
    choices: int

    @classmethod
    def parse(cls, text: str) -> "LayerSize":
        """Read "T,D,H,E,K".

        Raises:
            ValueError: these are not five numbers from 1 on, K is above E, or no Triton kernel has such widths.
        """
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
        if len(numbers) != 5 or min(numbers) < 1 or numbers[4] > numbers[3]:
            raise ValueError(f"a size must be T,D,H,E,K: five numbers from 1 on with K at most E, but is {text!r}")
        obstacle = width_obstacle(d_model=numbers[1], d_hidden=numbers[2], dtype=torch.bfloat16)
        if obstacle is not None:
            raise ValueError(f"size {text!r} cannot be measured: {obstacle}")
        names = ("tokens", "d_model", "d_hidden", "num_experts", "choices")
        return cls(**dict(zip(names, numbers, strict=True)))

    @property
    def shape_class(self) -> str:
        """Return the class that these tiles are recorded for."""
        num_rows = self.tokens * self.choices
        return shape_class(self.d_model, self.d_hidden, num_rows=num_rows, num_experts=self.num_experts)

    @property
    def width_class(self) -> str:
        """Return the class that these back-ends are recorded for."""
        return width_class(self.d_model, self.d_hidden)

    def __str__(self) -> str:
        return f"T {self.tokens}, D {self.d_model}, H {self.d_hidden}, E {self.num_experts}, K {self.choices}"


SIZES = tuple(
    LayerSize.parse(text)
    for text in (
        "32768,2048,1024,64,8",
        "8192,2048,768,128,8",
        "8192,7168,2048,32,8",
        "32768,4096,256,256,16",
        "16384,4096,14336,8,2",
    )
)
"""What is measured unless sizes are given: one for each class of shapes that public models have."""

Changes = dict[str, int | bool]


class Timer(Protocol):
    """What times on the device; a test has one that does not."""

    capability: str
    dtype: str
    device: str
    backends: tuple[str, ...]
    """Those that can run."""

    def prepare(self, size: LayerSize, changes: Mapping[str, Sequence[Changes]], *, within_s: float) -> None:
        """Compile what ``kernel_us`` will be asked for, in this time at most; the rest compiles when it is timed."""
        ...

    def kernel_us(self, size: LayerSize, kernel: str, changes: Sequence[Changes]) -> list[float]:
        """Return the time of a kernel with each change of its tile, timed in turn; infinite where it cannot run."""
        ...

    def layer_us(self, size: LayerSize, table: TileTable) -> dict[str, float]:
        """Return the time of forward and backward with each of ``backends``, with the tiles of the table."""
        ...


def candidates(kernel: str) -> list[Changes]:
    """Return what to try for a kernel, the built-in tile (no change) first."""
    # That of the hidden units has no specialised kernel.
    rings = () if kernel == "grad_hidden" else (0, 3, 4)
    found: list[Changes] = [
        {},
        *({"band": band} for band in (2, 4, 8, 16, 32)),
        *({"ring": ring} for ring in rings),
    ]
    if kernel in ("down", "grad_rows"):
        # What a ring has anyway: loads that run ahead over the end of a tile.
        found += [{"ring": 0, "flatten": True, "band": band} for band in (4, 8, 16)]
        found += [{"ring": 4, "band": band} for band in (4, 16)]
    return found


def record(
    sizes: Sequence[LayerSize],
    timer: Timer,
    *,
    limit_s: float,
    save: Callable[[TileTable], None],
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> TileTable:
    """Measure sizes one after another and return the table, saved after each; stop when the limit is over.

    What the limit cuts off is not recorded: a size counts once all of its kernels have been timed. Nor is a size that
    no back-end could run: ``auto`` would have nothing to choose from.
    """
    start = clock()
    tiles: dict[str, dict[str, Changes]] = {}
    backends: dict[str, tuple[str, ...]] = {}

    def table(more: Mapping[str, dict[str, Changes]] | None = None) -> TileTable:
        return TileTable(
            capability=timer.capability,
            dtype=timer.dtype,
            device=timer.device,
            tiles={**tiles, **(more or {})},
            backends=dict(backends),
        )

    for number, size in enumerate(sizes, 1):
        say(f"[{number}/{len(sizes)}] {size}: {size.shape_class}")
        plan = {kernel: candidates(kernel) for kernel in KERNELS}
        timer.prepare(size, plan, within_s=max(0.0, limit_s - (clock() - start)))
        found: dict[str, Changes] = {}
        for kernel, tried in plan.items():
            if clock() - start >= limit_s:
                say(f"the limit of {limit_s:g} s is over; {len(tiles)} of {len(sizes)} sizes are recorded")
                return table()
            times = timer.kernel_us(size, kernel, tried)
            best = min(range(len(tried)), key=times.__getitem__)
            if times[best] * _MARGIN < times[0]:
                found[kernel] = tried[best]
            else:
                best = 0
            say(f"  {kernel}: {tried[best] or 'built-in'}, {times[best]:.0f} us (built-in: {times[0]:.0f})")
        by_name = timer.layer_us(size, table({size.shape_class: found}))
        order = _fastest_first(by_name)
        if not order:
            say(f"  none of {', '.join(by_name)} could run this layer; nothing is recorded for it")
            continue
        tiles[size.shape_class] = found
        backends[size.width_class] = order
        say("  " + ", ".join(f"{name} {by_name[name]:.0f} us" for name in order))
        save(table())
    return table()


def _fastest_first(times: Mapping[str, float]) -> tuple[str, ...]:
    """Return those that could run; the first stays first where another is ahead by less than counts."""
    found = sorted((name for name in times if times[name] < float("inf")), key=times.__getitem__)
    preferred = next(iter(times))
    if preferred in found and times[preferred] < times[found[0]] * _MARGIN:
        found.insert(0, found.pop(found.index(preferred)))
    return tuple(found)


def _file_to_write(text: str) -> Path:
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file to write, not a folder or nothing")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: folder {str(path.parent)!r} is read-only")
    return path


def _limit(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # The longest time that can be waited for; NaN is in no range.
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of seconds above 0 and at most {threading.TIMEOUT_MAX:.0f}"
        )
    return seconds


def main(arguments: list[str] | None = None, timer: Timer | None = None) -> int:
    """Run the command; return 0 once something is recorded, also when it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m coterie_experts.tune", description=__doc__)
    # argparse checks a default that is a string like what is given.
    parser.add_argument("--out", type=_file_to_write, default=DEFAULT_FILE, help=f"the file to write ({DEFAULT_FILE})")
    parser.add_argument("--limit-s", type=_limit, default=600.0, metavar="SECONDS", help="when to stop (600)")
    parser.add_argument("--size", action="append", metavar="T,D,H,E,K", help="a layer to measure; can be repeated")
    options = parser.parse_args(arguments)
    try:
        sizes = [LayerSize.parse(text) for text in options.size] if options.size else list(SIZES)
        if timer is None:
            from coterie_experts.tune_timing import DeviceTimer

            timer = DeviceTimer()
    except ValueError as error:
        parser.error(str(error))
    saved = 0

    def save(table: TileTable) -> None:
        nonlocal saved
        table.write(options.out)
        saved += 1

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        record(sizes, timer, limit_s=options.limit_s, save=save, say=say)
    except KeyboardInterrupt:
        say("interrupted")
    say(f"{options.out}: {saved} of {len(sizes)} sizes recorded" if saved else "nothing was recorded")
    return 0 if saved else 1


if __name__ == "__main__":
    raise SystemExit(main())
