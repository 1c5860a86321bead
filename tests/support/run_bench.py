"""Run the benchmarks of one tests folder against its floors: `python -m support.run_bench tests/routing`.

Collects the functions `bench_*` of the files `bench_*.py`; each yields `Pair`s or `Scaling`s. Exits with 1 when a ratio
is below its floor (or above its limit), when a check fails, when a pair has no floor, or when a floor names no pair.
"""

import argparse
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from support.speed import Measurement, Pair, Scaling, measure

__all__ = ["main", "run_folder"]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of the table; `faults` is empty when the line passes."""

    name: str
    measurement: Measurement | None
    bound: str
    faults: tuple[str, ...]


def main(arguments: list[str] | None = None) -> int:
    """Run the folder named on the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m support.run_bench", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder with bench_*.py and speed.toml, as tests/routing")
    parser.add_argument("--only", default="", metavar="TEXT", help="only pairs whose name contains TEXT")
    parser.add_argument("--budget", type=float, default=3.0, metavar="SECONDS", help="time for each pair (default 3)")
    options = parser.parse_args(arguments)
    return run_folder(options.folder, only=options.only, measure_one=lambda one: measure(one, budget_s=options.budget))


def run_folder(folder: Path, *, only: str = "", measure_one: Callable[[Pair | Scaling], Measurement] = measure) -> int:
    """Measure every pair of a folder, print the table and return 0, or 1 if there is any fault."""
    bounds = tomllib.loads((folder / "speed.toml").read_text(encoding="utf-8"))
    floors: dict[str, float] = bounds.pop("floors", {})
    limits: dict[str, float] = bounds.pop("limits", {})
    faults = [f"speed.toml: unknown table [{name}]; known: [floors], [limits]" for name in bounds]
    lines: list[_Line] = []
    names: list[str] = []
    for subject in _collect(folder):
        if subject.name in names:
            faults.append(f"two pairs are named {subject.name!r}")
        names.append(subject.name)
        if only in subject.name:
            line = _judge(subject, floors, limits, measure_one)
            if line.measurement is not None and line.faults:
                # A burst of other work can spoil one measurement; what is slow fails twice.
                line = _judge(subject, floors, limits, measure_one)
            lines.append(line)
    for table, bounds_of_table in (("floors", floors), ("limits", limits)):
        faults += [f"speed.toml: [{table}] names no pair: {name!r}" for name in bounds_of_table if name not in names]
    if not lines:
        faults.append(f"nothing to measure in {folder}" + (f" with {only!r} in its name" if only else ""))
    print(_table(lines))
    faults += [f"{line.name}: {fault}" for line in lines for fault in line.faults]
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{len(lines)} measured, {len(faults)} faults")
    return 1 if faults else 0


def _collect(folder: Path) -> Iterator[Pair | Scaling]:
    # The benchmarks import their case tables by the name of the folder, as the tests do.
    sys.path.insert(0, str(folder.resolve().parent))
    for file in sorted(folder.glob("bench_*.py")):
        module = _load(folder, file)
        for name, function in list(vars(module).items()):
            if name.startswith("bench_") and callable(function):
                yield from function()


def _load(folder: Path, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder.name}.{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _judge(
    subject: Pair | Scaling,
    floors: dict[str, float],
    limits: dict[str, float],
    measure_one: Callable[[Pair | Scaling], Measurement],
) -> _Line:
    try:
        result = measure_one(subject)
    except Exception as error:
        fault = f"check failed, nothing timed: {type(error).__name__}: {error}"
        return _Line(name=subject.name, measurement=None, bound="", faults=(fault,))
    if isinstance(subject, Pair):
        if subject.name not in floors:
            fault = f"no floor; add a line under [floors] in speed.toml (measured {result.ratio:.2f})"
            return _Line(name=subject.name, measurement=result, bound="none", faults=(fault,))
        floor = floors[subject.name]
        faults = () if result.ratio >= floor else (f"ratio {result.ratio:.2f} is below the floor {floor:g}",)
        return _Line(name=subject.name, measurement=result, bound=f">= {floor:g}", faults=faults)
    if subject.limit is not None and subject.name in limits:
        fault = f"two limits: {subject.limit:g} in the code and {limits[subject.name]:g} in speed.toml; keep one"
        return _Line(name=subject.name, measurement=result, bound="", faults=(fault,))
    limit = limits.get(subject.name) if subject.limit is None else subject.limit
    if limit is None:
        fault = f"no limit; add a line under [limits] in speed.toml (measured {result.ratio:.2f})"
        return _Line(name=subject.name, measurement=result, bound="none", faults=(fault,))
    faults = () if result.ratio <= limit else (f"ratio {result.ratio:.2f} is above the limit {limit:g}",)
    return _Line(name=subject.name, measurement=result, bound=f"<= {limit:g}", faults=faults)


def _table(lines: list[_Line]) -> str:
    rows = [("name", "ours ms", "reference ms", "ratio", "quartiles", "rounds", "bound", "verdict")]
    for line in lines:
        verdict = "FAIL" if line.faults else "ok"
        if line.measurement is None:
            rows.append((line.name, "-", "-", "-", "-", "-", line.bound, verdict))
            continue
        one = line.measurement
        rows.append(
            (
                line.name,
                f"{one.ours_ms:.3f}",
                f"{one.reference_ms:.3f}",
                f"{one.ratio:.2f}",
                f"{one.ratio_low:.2f}-{one.ratio_high:.2f}",
                str(one.rounds),
                line.bound,
                verdict,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, len(widths) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
