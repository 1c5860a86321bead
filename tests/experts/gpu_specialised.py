"""Specialised kernels beside the plain ones: `python3 tests/experts/gpu_specialised.py [--only PARTS] [--json FILE]`.

Each part holds specialised kernels of the package, with rings of several lengths, to the plain ones, bit by bit where
that is promised, and then times them beside those, one call of each in turn.

A fault in a barrier is a kernel that never ends, and it holds up whatever else runs on the device. So all is compiled
first, where no specialised kernel runs; then each variant takes small steps with nothing beside it: one tile a program,
several, all programs. The first step that does not end is named, with where the warps of a program stand, and the
process ends. Only variants that took all steps are timed.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from gpu_cases import SIZES, Size
from gpu_opponents import in_turn

# isort: split
import torch
from specialised_cases import Changes, Kernel, Problem, Results, by_torch, fits, run
from support.device_timing import about, write_json

# Two sums of the same products in another order, rounded once each, differ by less than this by norm.
ROUNDING = 2.0**-8
# Seconds that a small step may take. They take a millisecond.
PATIENCE = 3.0
HOW = "tile * 1000 + step of two halves and loads, -1 not begun, -2 ended, of four programs"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Changes of a tile, its ring among them, and further arguments of the launch."""

    tile: Changes
    more: Changes = field(default_factory=dict)


PLAIN = Variant(tile={"ring": 0})


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some kernels and what is tried with them.

    Attributes:
        timed: what is timed.
        stepped: what else takes small steps.
        variants: those of the specialised kernels, by name.
        expected: their times over the plain kernels' before the run.
    """

    timed: tuple[Kernel, ...]
    stepped: tuple[Kernel, ...] = ()
    variants: dict[str, Variant]
    expected: str


RINGS = {"3 stages": Variant(tile={"ring": 3}), "4 stages": Variant(tile={"ring": 4})}
OTHERS: tuple[dict[str, object], ...] = (
    {"has_bias": True},
    {"activation": "swiglu_clamped", "has_bias": True},
    {"activation": "relu_squared"},
    {"activation": "relu_squared", "has_bias": True},
)
PARTS = {
    "up": Part(
        timed=(Kernel(name="up"),),
        stepped=tuple(Kernel(name="up", **other) for other in OTHERS),
        variants=RINGS,
        expected="0.88 (olmoe), 0.94 (dsv3), 0.90 (sweep-e128, small-t) with 4 stages",
    ),
    "products": Part(
        timed=(Kernel(name="down"), Kernel(name="down", is_scattered=True), Kernel(name="grad_rows")),
        stepped=(
            Kernel(name="down", has_bias=True),
            Kernel(name="down", has_bias=True, is_scattered=True),
            Kernel(name="grad_rows", is_scattered=True),
        ),
        variants=RINGS,
        expected="down and grad_rows 0.96 (olmoe), 0.97 and 0.99 (dsv3) with 3 stages; 0.90 small-t with 4",
    ),
    "gradients": Part(
        timed=(Kernel(name="grad_down"), Kernel(name="grad_gate_up")),
        variants=RINGS,
        expected="0.95 (olmoe), 0.93 and 0.89 (dsv3), 0.90 and 0.87 (sweep-e128), 0.80 (small-t) with 4 stages",
    ),
    "main_grad": Part(
        timed=(Kernel(name="grad_down", has_main_grad=True), Kernel(name="grad_gate_up", has_main_grad=True)),
        variants=RINGS,
        expected="0.90",
    ),
}
# What a step is, its size, the programs that take part (None for all), and the ids.
STEPS: tuple[tuple[str, Size, int | None, str], ...] = (
    ("one tile a program, 2 to 8 steps", Size("first", 128, 256, 256, 1, 1), None, "balanced"),
    ("one tile a program, 16 or 32 steps", Size("deep", 1024, 1024, 1024, 1, 1), None, "balanced"),
    ("three programs, several tiles each", Size("deep", 1024, 1024, 1024, 1, 1), 3, "balanced"),
    ("all programs, several experts", Size("several", 4096, 1024, 512, 8, 2), None, "balanced"),
    ("all programs, gaps, experts without rows", Size("gaps", 1024, 1152, 640, 32, 2), None, "with gaps"),
    ("widths of no tile", Size("narrow", 500, 328, 200, 5, 2), None, "with gaps"),
)


# The step whose results are compared bit by bit too: that of the timed kernels is not enough, for these have more.
COMPARED = STEPS[4][1]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed: a size, the parts it is for, and of what kind ids and kernels are."""

    size: Size
    parts: tuple[str, ...] = ("up", "products", "gradients")
    kind: str = "balanced"
    options: dict[str, object] = field(default_factory=dict)

    def kernels(self, part: str) -> list[Kernel]:
        # Without repeats: options may make two kernels one.
        return list(dict.fromkeys(replace(kernel, **self.options) for kernel in PARTS[part].timed))

    def problem(self, **changes: int) -> Problem:
        return Problem.of(replace(self.size, **changes), tiles_of=self.size, kind=self.kind)


TIMED = {
    **{name: Case(size=SIZES[name]) for name in ("olmoe", "dsv3-local32", "sweep-e128", "small-t")},
    "olmoe zipf": Case(size=SIZES["olmoe"], parts=("gradients",), kind="zipf"),
    "gpt-oss": Case(
        size=Size("gpt-oss", 8192, 2880, 2880, 32, 4),
        parts=("up",),
        options={"activation": "swiglu_clamped", "has_bias": True},
    ),
    "olmoe 16k": Case(size=replace(SIZES["olmoe"], T=16_384), parts=("main_grad",)),
    "sweep-e128 16k": Case(size=replace(SIZES["sweep-e128"], T=16_384), parts=("main_grad",)),
    "sweep-e128 64k": Case(size=replace(SIZES["sweep-e128"], T=65_536), parts=("main_grad",)),
}


@lru_cache(maxsize=1)
def small_problem(name: str) -> Problem:
    """Return a problem for which the same is compiled as for the timed one: few tokens and experts."""
    return TIMED[name].problem(T=64, E=16)


@lru_cache(maxsize=1)
def problems_of_steps() -> list[Problem]:
    return [Problem.of(size, tiles_of=SIZES["olmoe"], kind=kind) for _, size, _, kind in STEPS]


def compile_one(name: str, kernel: Kernel, variant: Variant) -> None:
    """Compile a kernel as it is timed, or as it takes steps, and run none but plain ones."""
    # A trace is another kernel.
    trace = torch.zeros(1, 3, dtype=torch.int32).pin_memory() if name == "steps" else None
    for problem in problems_of_steps() if name == "steps" else [small_problem(name)]:
        if variant == PLAIN and (name != "steps" or problem.size.name == COMPARED.name):
            run(kernel, problem, PLAIN.tile)
        elif variant != PLAIN and fits(kernel, problem, variant.tile):
            run(kernel, problem, variant.tile, warmup=True, trace=trace, **variant.more)
    torch.cuda.synchronize()


def jobs_of(parts: list[str]) -> list[tuple[str, Kernel, Variant]]:
    """Return what is to be compiled; cases of the same tiles and widths of the same kind compile the same."""
    found: dict[str, tuple[str, Kernel, Variant]] = {}
    for part in parts:
        for kernel in (*PARTS[part].timed, *PARTS[part].stepped):
            for variant in (PLAIN, *PARTS[part].variants.values()):
                found[f"steps {kernel} {variant}"] = ("steps", kernel, variant)
    for name, case in TIMED.items():
        tiles = small_tiles(case.size)
        for part in [part for part in case.parts if part in parts]:
            for kernel in case.kernels(part):
                for variant in (PLAIN, *PARTS[part].variants.values()):
                    is_whole = case.size.D % 128 == 0 and case.size.H % 256 == 0
                    found.setdefault(f"{tiles} {is_whole} {kernel} {variant}", (name, kernel, variant))
    # Those that take longest first.
    return sorted(found.values(), key=lambda job: job[0] != "steps")


def small_tiles(size: Size) -> str:
    from coterie_experts.grouped_swiglu.triton_tiles import choose_tiles

    widths = {"d_model": size.D, "d_hidden": size.H}
    return repr(choose_tiles(interpreted=False, **widths, num_rows=size.T * size.K, num_experts=size.E))


def fault_of(kernel: Kernel, problem: Problem, got: Results, expected: Results) -> str:
    """Say how results differ by more than rounding, if they do, and where first."""
    rows = problem.rows_of(kernel)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        mine, theirs = (part.float() if rows is None else part[rows].float() for part in (one, other))
        error = float((mine - theirs).norm() / theirs.norm())
        # Not so for NaN.
        if not error <= ROUNDING:
            wrong = ~((mine - theirs).abs() <= 0.05 * theirs.abs().mean() + 0.05 * theirs.abs())
            first = wrong.nonzero()[:1].tolist()
            return f"result {number} is wrong by {error:.1e}, {float(wrong.float().mean()):.1%} of it, first {first}"
    return ""


def are_same_bits(kernel: Kernel, problem: Problem, got: Results, expected: Results) -> bool:
    """Compare the rows that stand for something."""
    rows = problem.rows_of(kernel)
    return all(
        torch.equal(one, other) if rows is None else torch.equal(one[rows], other[rows])
        for one, other in zip(got, expected, strict=True)
    )


def spoil(results: Results) -> None:
    """Overwrite results, so that what the next one leaves unwritten is not right by chance."""
    for one in results:
        one.fill_(float("nan"))


def has_ended() -> bool:
    """Say whether what is on the device ends in time."""
    event, start = torch.cuda.Event(), time.monotonic()
    event.record()
    while not event.query():
        if time.monotonic() - start > PATIENCE:
            return False
        time.sleep(0.001)
    return True


def first_fault(part: str, variant: Variant, kernel: Kernel, report: Callable[[str], None]) -> str:
    """Return the first step that a kernel does not take right, or nothing; report and end this process if it hangs."""
    for (what, _, programs, _), problem in zip(STEPS, problems_of_steps(), strict=True):
        if not fits(kernel, problem, variant.tile):
            continue
        # Memory of the host, which can be read while the device is busy.
        trace = torch.full((programs or 132, 3), -1, dtype=torch.int32).pin_memory()
        several = {"num_programs": programs} if programs else {}
        try:
            got = run(kernel, problem, variant.tile, trace=trace, **several, **variant.more)
        # Whatever a compiler or a launch raises.
        except Exception as error:
            return f"{kernel}, {what}: {type(error).__name__}: {str(error)[:300]}"
        if not has_ended():
            report(f"{kernel}, {what}: does not end; {HOW}: {trace[:4].tolist()}")
            os._exit(1)
        if fault := fault_of(kernel, problem, got, by_torch(kernel, problem)):
            return f"{kernel}, {what}: {fault}"
        if problem.size.name == COMPARED.name and not are_same_bits(
            kernel, problem, got, run(kernel, problem, PLAIN.tile)
        ):
            print(f"{part}, {kernel}, {what}: other bits than the plain kernel's", flush=True)
        spoil(got)
    return ""


def timed_rows(chosen: dict[str, list[str]], rounds: int) -> Iterator[dict[str, object]]:
    """Hold variants to the plain kernels, bit by bit too, and time them beside those."""
    for name, case in TIMED.items():
        pairs = [(part, kernel) for part in case.parts if chosen.get(part) for kernel in case.kernels(part)]
        problem = case.problem() if pairs else None
        for part, kernel in pairs:
            yield timed_row(name, part, kernel, problem, chosen[part], rounds)
        del problem
        torch.cuda.empty_cache()


def timed_row(
    name: str, part: str, kernel: Kernel, problem: Problem, variants: list[str], rounds: int
) -> dict[str, object]:
    row: dict[str, object] = {"name": f"{name} {kernel}", "part": part}
    into = problem.main_grad_of(kernel)
    calls: dict[str, Callable[[], object]] = {"plain": partial(run, kernel, problem, PLAIN.tile, into=into)}
    expected = run(kernel, problem, PLAIN.tile)
    for variant in variants:
        this = PARTS[part].variants[variant]
        if not fits(kernel, problem, this.tile):
            row[f"{variant} left out"] = "does not fit"
            continue
        got = run(kernel, problem, this.tile, **this.more)
        if fault := fault_of(kernel, problem, got, expected):
            row[f"{variant} fault"] = fault
            continue
        row[f"{variant} same bits"] = are_same_bits(kernel, problem, got, expected)
        calls[variant] = partial(run, kernel, problem, this.tile, into=into, **this.more)
        spoil(got)
        del got
    del expected
    if kernel.name in ("down", "grad_rows"):
        left = (problem.act_PH if kernel.name == "down" else problem.pre_PU)[: problem.size.T * problem.size.K]
        right = problem.down[0].T if kernel.name == "down" else problem.gate_up[0]
        calls["dense"] = partial(torch.mm, left, right[:, : problem.columns_of_product(kernel)])
    times = in_turn(calls, rounds)
    for variant, one in times.items():
        ratio = median(mine / plain for mine, plain in zip(one, times["plain"], strict=True))
        row |= {f"{variant} us": median(one), f"{variant} over plain": ratio}
        row[f"{variant} TFLOP/s"] = problem.flops(kernel) / median(one) / 1e6
    return row


def show(row: dict[str, object]) -> None:
    print(f"{row['part']}, {row['name']}; expected: {PARTS[str(row['part'])].expected}")
    for variant in [key[: -len(" us")] for key in row if key.endswith(" us")]:
        us, ratio, rate = (row[f"{variant} {what}"] for what in ("us", "over plain", "TFLOP/s"))
        bits = {True: ", same bits", False: ", OTHER BITS", None: ""}[row.get(f"{variant} same bits")]
        print(f"  {variant}: {us:.0f} us, {rate:.0f} TFLOP/s, {ratio:.3f} of plain{bits}")
    for key in row:
        if key.endswith((" fault", " left out")):
            print(f"  {key}: {row[key]}")
    sys.stdout.flush()


def in_a_process(*arguments: str, seconds: float) -> tuple[object, str]:
    """Run this script with arguments; return what it wrote as JSON, however it ended, and what went wrong."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        try:
            done = subprocess.run(
                [sys.executable, __file__, *arguments, "--into", file.name], timeout=max(seconds, 1.0), check=False
            )
            wrong = "" if done.returncode == 0 else f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            wrong = f"killed after {seconds:.0f} s"
        text = Path(file.name).read_text(encoding="utf-8")
    return json.loads(text) if text else None, wrong


def child(do: str, chosen: dict[str, list[str]], file: Path, rounds: int) -> int:
    """Take steps, or time; write after each what there is, since this process may be ended."""
    if do == "time":
        rows: list[dict[str, object]] = []
        for row in timed_rows(chosen, rounds):
            rows.append(row)
            file.write_text(json.dumps(rows), encoding="utf-8")
            show(row)
        return 0
    found: dict[str, str] = {}
    for part, variant in [(part, variant) for part, variants in chosen.items() for variant in variants]:

        def report(fault: str, key: str = f"{part}, {variant}") -> None:
            found[key] = fault
            file.write_text(json.dumps(found), encoding="utf-8")
            print(f"{key}: {fault or 'takes all steps'}", flush=True)

        kernels = (*PARTS[part].timed, *PARTS[part].stepped)
        faults = [
            fault for kernel in kernels if (fault := first_fault(part, PARTS[part].variants[variant], kernel, report))
        ]
        report("; ".join(faults))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS")
    parser.add_argument("--no-times", action="store_true", help="take the steps alone")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=145.0, help="begin nothing after, and end what runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--do", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do:
        return child(arguments.do[0], json.loads(arguments.do[1]), arguments.into, arguments.rounds)
    start = time.monotonic()

    def left(most: float) -> float:
        return min(most, arguments.seconds - (time.monotonic() - start))

    def said(what: str) -> None:
        print(f"{time.monotonic() - start:.0f} s: {what}", flush=True)

    parts = arguments.only.split(",")
    jobs = [job for job in jobs_of(parts) if job[0] == "steps" or not arguments.no_times]
    pool = ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"))
    futures = {pool.submit(compile_one, *job): job for job in jobs}
    waited = wait(futures, timeout=left(80))
    faults = {
        f"compile {job[0]}, {job[1]}, {job[2]}": f"{type(error).__name__}: {str(error)[:300]}"
        for future, job in futures.items()
        if future in waited.done and (error := future.exception()) is not None
    }
    for future in waited.not_done:
        future.cancel()
    # What is on the device is of plain kernels, which end.
    pool.shutdown(wait=True, cancel_futures=True)
    said(f"{len(waited.done)} of {len(jobs)} compiled; {faults or 'no faults'}")
    waiting = [(part, variant) for part in parts for variant in PARTS[part].variants]
    good: dict[str, list[str]] = {}
    while waiting and left(45) > 1:
        chosen = {part: [variant for one, variant in waiting if one == part] for part, _ in waiting}
        found, wrong = in_a_process("--do", "steps", json.dumps(chosen), seconds=left(45))
        # Of a process that was ended before it could report, the first variant is to blame.
        told = found if isinstance(found, dict) and found else {", ".join(waiting[0]): wrong or "no report"}
        for part, variant in waiting:
            if told.get(f"{part}, {variant}") == "":
                good.setdefault(part, []).append(variant)
        faults |= {name: fault for name, fault in told.items() if fault}
        waiting = [pair for pair in waiting if ", ".join(pair) not in told]
    said(f"took all steps: {good}")
    rows: list[dict[str, object]] = []
    if good and not arguments.no_times:
        found, wrong = in_a_process(
            "--do", "time", json.dumps(good), "--rounds", str(arguments.rounds), seconds=left(100)
        )
        rows = found if isinstance(found, list) else []
        faults |= {"times": wrong} if wrong else {}
        said(f"timed{': ' + wrong if wrong else ''}")
    faults |= {f"{row['name']}, {key}": str(row[key]) for row in rows for key in row if key.endswith(" fault")}
    if arguments.json:
        write_json(arguments.json, {**about(arguments.commit), "faults": faults}, rows)
    print(*(f"fault: {name}: {text}\n" for name, text in faults.items()), sep="", end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
