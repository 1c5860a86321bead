"""What else could be done to the Triton kernels: `python3 tests/experts/gpu_tries.py [--only PARTS] [--json FILE]`.

Each part holds variants of some kernels, in Gluon in `specialised_*.py`, to the kernels of the package and then times
them beside those, one call of each in turn; what is expected of them is printed beside what is measured.

A fault in a barrier is a kernel that never ends, and it holds up whatever else runs on the device. So all is compiled
first, where no variant runs; then each variant takes small steps with nothing beside it: one tile a program, several,
all programs. The first step that does not end is named, with where the warps of a program stand, and the process ends.
Only variants that took all steps are timed.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from gpu_cases import SIZES, Size, make
from gpu_opponents import in_turn

# isort: split
import torch
import torch.nn.functional as F
import triton
from coterie_experts import Activation
from coterie_experts.grouped_swiglu import triton_launch as launch
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout, pad_rows
from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet, choose_tiles
from coterie_experts.token_rows import sort_slots
from specialised_gradients import weight_gradient_specialised
from specialised_products import ENDED, multiply_specialised
from specialised_up import up_specialised
from support.device_timing import about, write_json
from torch import Tensor

# Two sums of the same products in another order, rounded once each, differ by less than this by norm.
ROUNDING = 2.0**-8
# What is compiled depends on the rows of an expert, not on the number of experts.
EXPERTS = 16
# Seconds that a small step may take. They take a millisecond.
PATIENCE = 3.0
Settings = dict[str, int | bool]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Variants of some kernels.

    Attributes:
        kernels: of the package, as `TileSet` has them.
        variants: settings by name.
        expected: of each variant before the run: its time over today's.
    """

    kernels: tuple[str, ...]
    variants: dict[str, Settings]
    expected: dict[str, str]


GATHERING: dict[str, Settings] = {
    "3 stages": {"stages": 3, "fenced": True},
    "4 stages": {"stages": 4, "fenced": True},
    # What Triton itself makes of a gather: nothing orders the copies of threads and `wgmma`.
    "4 stages unfenced": {"stages": 4, "fenced": False},
}
PARTS = {
    "products": Part(
        kernels=("down", "grad_rows"),
        variants={"3 stages": {"stages": 3}, "4 stages": {"stages": 4}},
        expected={
            "3 stages": "0.98",
            "4 stages": "0.95 to 0.97: 725 TFLOP/s (olmoe), 690 (dsv3), since ends of tiles are hidden",
        },
    ),
    "up": Part(
        kernels=("up",),
        variants=GATHERING,
        expected={
            "3 stages": "0.97",
            "4 stages": "0.94: 680 TFLOP/s (olmoe), 655 (dsv3); half of a tile's end is hidden",
            "4 stages unfenced": "0.99 of that with the fence",
        },
    ),
    "gradients": Part(
        kernels=("grad_down", "grad_gate_up"),
        variants=GATHERING,
        expected={
            "3 stages": "0.96",
            "4 stages": "0.94: 630 TFLOP/s (olmoe, dsv3); 0.88 where a tile has few steps (sweep-e128, small-t)",
            "4 stages unfenced": "0.99 of that with the fence",
        },
    ),
}
TIMED = ("olmoe", "dsv3-local32", "sweep-e128", "small-t")
# What a step is, its size, and the programs that take part; None for all.
STEPS: tuple[tuple[str, Size, int | None], ...] = (
    ("one tile a program, 2 to 8 steps", Size("first", 128, 256, 256, 1, 1), None),
    ("one tile a program, 16 or 32 steps", Size("deep", 1024, 1024, 1024, 1, 1), None),
    ("three programs, several tiles each", Size("deep", 1024, 1024, 1024, 1, 1), 3),
    ("all programs, several experts", Size("several", 4096, 1024, 512, 8, 2), None),
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case: its layout, its tiles, and rows of random numbers."""

    size: Size
    layout: PaddedLayout
    tiles: TileSet
    x: Tensor
    down: Tensor
    gate_up: Tensor
    grad_y: Tensor
    act_PH: Tensor
    pre_PU: Tensor

    @classmethod
    def of(cls, size: Size, *, tiles_of: Size) -> "Problem":
        x, ids, weights, gate_up, down, grad_y = make(size)
        slots, offsets = sort_slots(ids, size.E)
        tiles = choose_tiles(
            interpreted=x.device.type == "cpu",
            d_model=tiles_of.D,
            d_hidden=tiles_of.H,
            num_rows=tiles_of.T * tiles_of.K,
            num_experts=tiles_of.E,
        )
        layout = pad_rows(offsets, weights.flatten(), slot_of_row_N=slots, num_choices=size.K, block=tiles.block_rows)
        pre = torch.randn(layout.num_padded, 2 * size.H, dtype=x.dtype, device=x.device)
        weight_P1 = layout.weight_P[:, None]
        gate, up = pre.chunk(2, 1)
        act = torch.where(weight_P1 != 0, F.silu(gate.float()) * up * weight_P1, 0.0).to(x.dtype)
        return cls(
            size=size,
            layout=layout,
            tiles=tiles,
            x=x,
            down=down,
            gate_up=gate_up,
            grad_y=grad_y,
            act_PH=act,
            pre_PU=pre,
        )

    @property
    def num_programs(self) -> int:
        """Return the programs of a persistent grid."""
        return launch._num_programs(self.tiles.down, self.x.device)

    @property
    def rows_N(self) -> Tensor:
        """Return the padded rows that stand for something."""
        return self.layout.position_N.long()

    def columns_of_product(self, kernel: str) -> int:
        """Return how many columns of a product `rows_to_tokens` has at a time."""
        depth, least = (self.size.H, 1024) if kernel == "down" else (2 * self.size.H, 2048)
        part = triton.cdiv(self.size.D, triton.cdiv(self.size.D, max(least, depth)))
        block = getattr(self.tiles, kernel).columns
        return min(triton.cdiv(part, block) * block, self.size.D)

    def flops(self, kernel: str) -> float:
        if kernel in ("down", "grad_rows"):
            depth = self.size.H * (1 if kernel == "down" else 2)
            return 2.0 * self.size.T * self.size.K * depth * self.columns_of_product(kernel)
        return self.size.flops * (1 if kernel == "grad_down" else 2) / 3


def run(kernel: str, problem: Problem, settings: Settings | None, **more: object) -> tuple[Tensor, ...]:
    """Return what a kernel of the package gives, or with settings what its variant does."""
    layout, tile = problem.layout, getattr(problem.tiles, kernel)
    assert isinstance(tile, Tile)
    arguments = {} if settings is None else {"num_programs": problem.num_programs, **settings, **more}
    if kernel == "up":
        if settings is None:
            return launch.pre_and_activation(
                problem.x, layout, problem.gate_up, problem.tiles, activation=Activation(), bias=None
            )
        return up_specialised(problem.x, layout, problem.gate_up, tile, **arguments)
    if kernel in ("down", "grad_rows"):
        is_down = kernel == "down"
        rows, weights = (problem.act_PH, problem.down) if is_down else (problem.pre_PU, problem.gate_up)
        width = problem.columns_of_product(kernel)
        products = rows.new_empty(layout.num_padded, width)
        arguments |= {"transposed": is_down, "first": 0, "width": width, "products": products}
        (launch._multiply if settings is None else multiply_specialised)(rows, weights, layout, tile, **arguments)
        return (products,)
    is_down = kernel == "grad_down"
    gathered, rows = (problem.grad_y, problem.act_PH) if is_down else (problem.x, problem.pre_PU)
    if settings is None:
        arguments = {"main_grad": None}
    function = launch.weight_gradient if settings is None else weight_gradient_specialised
    return (function(gathered, rows, layout, tile, transposed=not is_down, **arguments),)


def by_torch(kernel: str, problem: Problem) -> tuple[Tensor, ...]:
    """Return what `run` does, in float32 and without a kernel of ours."""
    layout, block = problem.layout, problem.tiles.block_rows

    def gathered(x: Tensor, source_P: Tensor) -> Tensor:
        return torch.where(source_P[:, None] >= 0, x[source_P.clamp(min=0)].float(), 0.0)

    def times_weights(rows_PK: Tensor, weights_ENK: Tensor) -> Tensor:
        out = rows_PK.new_zeros(layout.num_padded, weights_ENK.shape[1])
        for tile, expert in enumerate(layout.expert_M[: int(layout.num_tiles_1)].tolist()):
            these = slice(tile * block, (tile + 1) * block)
            out[these] = rows_PK[these] @ weights_ENK[expert].float().T
        return out

    if kernel == "down":
        return (times_weights(problem.act_PH.float(), problem.down)[:, : problem.columns_of_product(kernel)],)
    if kernel == "grad_rows":
        return (times_weights(problem.pre_PU.float(), problem.gate_up.mT)[:, : problem.columns_of_product(kernel)],)
    if kernel == "up":
        product = times_weights(gathered(problem.x, layout.source_P), problem.gate_up)
        gate, up = product.chunk(2, 1)
        return product, F.silu(gate) * up * layout.weight_P[:, None]
    is_down = kernel == "grad_down"
    left = gathered(problem.grad_y if is_down else problem.x, layout.counted_P)
    right = (problem.act_PH if is_down else problem.pre_PU).float()
    out = left.new_zeros(problem.size.E, left.shape[1], right.shape[1])
    for expert, start, count in layout.segments_e3.tolist():
        out[expert] = left[start : start + count].T @ right[start : start + count]
    return (out if is_down else out.mT,)


def fault_of(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: Tensor | None) -> str:
    """Say how results differ by more than rounding, if they do, and where first."""
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        mine, theirs = (part.float() if rows is None else part[rows].float() for part in (one, other))
        error = float((mine - theirs).norm() / theirs.norm())
        # Not so for NaN.
        if not error <= ROUNDING:
            wrong = ~((mine - theirs).abs() <= 0.05 * theirs.abs().mean() + 0.05 * theirs.abs())
            first = wrong.nonzero()[:1].tolist()
            return f"result {number} is wrong by {error:.1e}, {float(wrong.float().mean()):.1%} of it, first {first}"
    return ""


def spoil(results: tuple[Tensor, ...]) -> None:
    """Overwrite results, so that what the next one leaves unwritten is not right by chance."""
    for one in results:
        one.fill_(float("nan"))


def rows_to_compare(kernel: str, problem: Problem) -> Tensor | None:
    return None if kernel in ("grad_down", "grad_gate_up") else problem.rows_N


def has_ended() -> bool:
    """Say whether what is on the device ends in time."""
    event, start = torch.cuda.Event(), time.monotonic()
    event.record()
    while not event.query():
        if time.monotonic() - start > PATIENCE:
            return False
        time.sleep(0.001)
    return True


def take_steps(part: str, variants: list[str], report: Callable[[str, str], None]) -> None:
    """Report of each variant the first step that it does not take, or nothing; end this process if it hangs."""
    found = dict.fromkeys(variants, "")
    problems = [Problem.of(size, tiles_of=SIZES["olmoe"]) for _, size, _ in STEPS]
    for variant in variants:
        for (what, _, programs), problem in zip(STEPS, problems, strict=True):
            for kernel in PARTS[part].kernels:
                num_programs = programs or problem.num_programs
                # Memory of the host, which can be read while the device is busy.
                trace = torch.full((num_programs, 3), -1, dtype=torch.int32).pin_memory()
                settings = PARTS[part].variants[variant]
                got = run(kernel, problem, settings, num_programs=num_programs, trace=trace)
                if not has_ended():
                    seen = trace[:4].tolist()
                    how = f"tile * 1000 + step of two halves and loads, -1 not begun, {ENDED.value} ended, 4 programs"
                    report(variant, f"{kernel}, {what}: does not end; {how}: {seen}")
                    os._exit(1)
                fault = fault_of(got, by_torch(kernel, problem), rows_to_compare(kernel, problem))
                found[variant] = found[variant] or (fault and f"{kernel}, {what}: {fault}")
                spoil(got)
        report(variant, found[variant])


def compile_all(part: str, size: str) -> None:
    """Compile the variants as they are timed, or as they take steps, and run none of them."""
    if size == "steps":
        problems = [Problem.of(one, tiles_of=SIZES["olmoe"]) for _, one, _ in STEPS]
        more: dict[str, object] = {"trace": torch.zeros(1, 3, dtype=torch.int32).pin_memory()}
    else:
        few = replace(SIZES[size], T=SIZES[size].T * EXPERTS // SIZES[size].E, E=EXPERTS)
        problems, more = [Problem.of(few, tiles_of=SIZES[size])], {}
        for kernel in PARTS[part].kernels:
            run(kernel, problems[0], None)
    for kernel in PARTS[part].kernels:
        for settings in PARTS[part].variants.values():
            run(kernel, problems[0], settings, warmup=True, **more)
    torch.cuda.synchronize()


def timed_rows(part: str, variants: list[str], rounds: int) -> Iterator[dict[str, object]]:
    """Hold variants to today's kernels, bit by bit too, and time them beside those."""
    for name in TIMED:
        problem = Problem.of(SIZES[name], tiles_of=SIZES[name])
        for kernel in PARTS[part].kernels:
            row: dict[str, object] = {"name": f"{name} {kernel}", "part": part}
            rows = rows_to_compare(kernel, problem)
            calls: dict[str, Callable[[], object]] = {"today": partial(run, kernel, problem, None)}
            expected = run(kernel, problem, None)
            for variant in variants:
                call = partial(run, kernel, problem, PARTS[part].variants[variant])
                got = call()
                if fault := fault_of(got, expected, rows):
                    row[f"{variant} fault"] = fault
                    continue
                pairs = zip(got, expected, strict=True)
                row[f"{variant} same bits"] = all(
                    torch.equal(one, other) if rows is None else torch.equal(one[rows], other[rows])
                    for one, other in pairs
                )
                calls[variant] = call
                spoil(got)
                del got
            del expected
            if kernel in ("down", "grad_rows"):
                left = (problem.act_PH if kernel == "down" else problem.pre_PU)[: SIZES[name].T * SIZES[name].K]
                right = problem.down[0].T if kernel == "down" else problem.gate_up[0]
                calls["dense"] = partial(torch.mm, left, right[:, : problem.columns_of_product(kernel)])
            times = in_turn(calls, rounds)
            for variant, one in times.items():
                ratio = median(mine / today for mine, today in zip(one, times["today"], strict=True))
                row |= {f"{variant} us": median(one), f"{variant} over today": ratio}
                row[f"{variant} TFLOP/s"] = problem.flops(kernel) / median(one) / 1e6
            yield row
        del problem
        torch.cuda.empty_cache()


def show(row: dict[str, object]) -> None:
    part = str(row["part"])
    print(f"{part}, {row['name']}:")
    for variant in [key[: -len(" us")] for key in row if key.endswith(" us")]:
        us, ratio, rate = (row[f"{variant} {what}"] for what in ("us", "over today", "TFLOP/s"))
        bits = ", same bits" if row.get(f"{variant} same bits") else ""
        expected = PARTS[part].expected.get(variant)
        more = f"; expected: {expected}" if expected else ""
        print(f"  {variant}: {us:.0f} us, {rate:.0f} TFLOP/s, {ratio:.3f} of today{bits}{more}")
    for key in row:
        if key.endswith(" fault"):
            print(f"  {key}: {row[key]}")
    sys.stdout.flush()


def in_a_process(*arguments: str, seconds: float) -> tuple[object, str]:
    """Run this script with arguments; return what it wrote as JSON, however it ended, and what went wrong."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seconds = max(seconds, 1.0)
        try:
            done = subprocess.run(
                [sys.executable, __file__, *arguments, "--json", file.name], timeout=seconds, check=False
            )
            wrong = "" if done.returncode == 0 else f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            wrong = f"killed after {seconds:.0f} s"
        text = Path(file.name).read_text(encoding="utf-8")
    return json.loads(text) if text else None, wrong


def child(arguments: argparse.Namespace) -> int:
    part, variants = arguments.part, arguments.variants.split(",")

    def write(value: object) -> None:
        # After each, since this process may be ended.
        arguments.json.write_text(json.dumps(value), encoding="utf-8")

    if arguments.do == "compile":
        compile_all(part, arguments.size)
    elif arguments.do == "steps":
        found: dict[str, str] = {}

        def report(variant: str, fault: str) -> None:
            found[variant] = fault
            write(found)
            print(f"{part}, {variant}: {fault or 'takes all steps'}", flush=True)

        take_steps(part, variants, report)
    else:
        rows: list[dict[str, object]] = []
        for row in timed_rows(part, variants, arguments.rounds):
            rows.append(row)
            write(rows)
            show(row)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=145.0, help="begin nothing after, and end what runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    for name in ("--do", "--part", "--size", "--variants"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do:
        return child(arguments)
    start = time.monotonic()

    def left(most: float) -> float:
        return min(most, arguments.seconds - (time.monotonic() - start))

    def said(what: str) -> None:
        print(f"{time.monotonic() - start:.0f} s: {what}", flush=True)

    parts = arguments.only.split(",")
    faults: dict[str, str] = {}
    jobs = [(part, size) for part in parts for size in ("steps", *TIMED)]
    with ThreadPoolExecutor(arguments.workers) as pool:
        compiled = pool.map(
            lambda job: in_a_process("--do", "compile", "--part", job[0], "--size", job[1], seconds=left(60)), jobs
        )
        for (part, size), (_, wrong) in zip(jobs, compiled, strict=True):
            faults |= {f"{part}, compile {size}": wrong} if wrong else {}
    said(f"compiled; {faults or 'no faults'}")
    good: dict[str, list[str]] = {}
    for part in parts:
        waiting = list(PARTS[part].variants)
        while waiting:
            common = ("--do", "steps", "--part", part, "--variants", ",".join(waiting))
            found, wrong = in_a_process(*common, seconds=left(20))
            # Of a process that was ended before it could report, the first variant is to blame.
            told = found if isinstance(found, dict) and found else {waiting[0]: wrong}
            good.setdefault(part, []).extend(variant for variant, fault in told.items() if not fault)
            faults |= {f"{part}, {variant}": fault for variant, fault in told.items() if fault}
            waiting = [variant for variant in waiting if variant not in told]
        said(f"{part}: took all steps: {good[part]}")
    rows: list[dict[str, object]] = []
    for part in [part for part in parts if good[part]]:
        common = ("--do", "time", "--part", part, "--variants", ",".join(good[part]))
        found, wrong = in_a_process(*common, "--rounds", str(arguments.rounds), seconds=left(40))
        rows += found if isinstance(found, list) else []
        faults |= {f"{part}, timed": wrong} if wrong else {}
        said(f"{part} timed{': ' + wrong if wrong else ''}")
    faults |= {f"{row['name']}, {key}": str(row[key]) for row in rows for key in row if key.endswith(" fault")}
    if arguments.json:
        write_json(arguments.json, {**about(arguments.commit), "faults": faults}, rows)
    print(*(f"fault: {name}: {text}\n" for name, text in faults.items()), sep="", end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
