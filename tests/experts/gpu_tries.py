"""What else could be done to the Triton kernels: `python3 tests/experts/gpu_tries.py [--only PARTS] [--json FILE]`.

Each part holds variants of one kernel to the kernel of the package and then times them beside it, one call of each in
turn; what is expected of them is printed beside what is measured. The variants are in `tried_kernels.py` and, in Gluon,
in `specialised_*.py`. They run in processes that end after a time, since a fault in a barrier is a kernel that never
ends: first all parts and sizes at once with a few of the experts, which compiles everything, then one after the other.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
import tried_kernels as tried
import triton
from coterie_experts import Activation
from coterie_experts.grouped_swiglu import triton_launch as launch
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout, pad_rows
from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet, choose_tiles
from coterie_experts.token_rows import sort_slots
from support.device_timing import about, write_json
from torch import Tensor

# Two sums of the same products in another order, rounded once each, differ by less than this by norm.
ROUNDING = 2.0**-8
# What is compiled depends on the rows of an expert, not on the number of experts.
EXPERTS = 16
Calls = dict[str, Callable[[], tuple[Tensor, ...]]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Variants of some kernels.

    Attributes:
        kernels: of the package, as `TileSet` has them.
        sizes: the cases, by name.
        expected: of each variant before the run: its time over today's.
    """

    kernels: tuple[str, ...]
    sizes: tuple[str, ...]
    expected: dict[str, str]

    @property
    def is_specialised(self) -> bool:
        """Say whether it has barriers of its own."""
        return "4 stages" in self.expected


PRODUCTS = ("down", "grad_rows")
FOUR = ("olmoe", "dsv3-local32", "sweep-e128", "small-t")
PARTS = {
    "specialised-products": Part(
        kernels=PRODUCTS,
        sizes=FOUR,
        expected={
            "3 stages": "0.98",
            "4 stages": "0.95 to 0.97: 725 TFLOP/s (olmoe), 690 (dsv3), since ends of tiles are hidden",
        },
    ),
    "specialised-up": Part(
        kernels=("up",),
        sizes=FOUR,
        expected={
            "3 stages": "0.97",
            "4 stages": "0.94: 680 TFLOP/s (olmoe), 655 (dsv3); half of a tile's end is hidden",
            "4 stages, no fence": "0.99 of that with the fence",
        },
    ),
    "specialised-gradients": Part(
        kernels=("grad_down", "grad_gate_up"),
        sizes=FOUR,
        expected={
            "3 stages": "0.96",
            "4 stages": "0.94: 630 TFLOP/s (olmoe, dsv3); 0.88 where a tile has few steps (sweep-e128, small-t)",
        },
    ),
    "automatic": Part(
        kernels=PRODUCTS,
        sizes=("olmoe", "dsv3-local32"),
        expected={"automatic": "0.98 to 1.03: two warpgroups in turn, but each waits for its product in every step"},
    ),
    "split": Part(
        kernels=PRODUCTS,
        sizes=("small-t", "sweep-e128"),
        expected={"split": "small-t 0.98 to 1.02, sweep-e128 1.01: what the last round loses, and 8 us for the sum"},
    ),
    "tails": Part(
        kernels=PRODUCTS,
        sizes=("small-t", "sweep-e128", "qwen3-30b"),
        expected={
            "counter": "1.05 to 1.10 where today's loops are flattened, else 1.00",
            "counter, tails": "small-t 0.96 of counter, sweep-e128 0.98, qwen3 0.99",
        },
    ),
    "recomputed": Part(
        kernels=("grad_down",),
        sizes=("olmoe",),
        expected={"recomputed": "1.8 to 2.2: each activation is computed 16 times, 1,500 cycles a step of 1,024"},
    ),
    "layouts": Part(
        kernels=PRODUCTS,
        sizes=("olmoe", "dsv3-local32"),
        expected={"other layout": "1.00: `wgmma` reads bfloat16 operands of either order from shared memory"},
    ),
}


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
    def of(cls, size: Size) -> "Problem":
        x, ids, weights, gate_up, down, grad_y = make(size)
        slots, offsets = sort_slots(ids, size.E)
        tiles = choose_tiles(
            interpreted=x.device.type == "cpu",
            d_model=size.D,
            d_hidden=size.H,
            num_rows=size.T * size.K,
            num_experts=size.E,
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

    def columns_of_product(self, kernel: str) -> int:
        """Return how many columns of a product `rows_to_tokens` has at a time."""
        depth, least = (self.size.H, 1024) if kernel == "down" else (2 * self.size.H, 2048)
        part = triton.cdiv(self.size.D, triton.cdiv(self.size.D, max(least, depth)))
        block = getattr(self.tiles, kernel).columns
        return min(triton.cdiv(part, block) * block, self.size.D)


def calls_of(part: str, kernel: str, problem: Problem) -> tuple[Calls, float]:
    """Return calls of a kernel, today's first, each of which returns its results, and the FLOPs of one."""
    if kernel == "up":
        return up_calls(problem), problem.size.flops * 2 / 3
    if kernel in ("grad_down", "grad_gate_up"):
        return gradient_calls(part, kernel, problem), problem.size.flops / (3 if kernel == "grad_down" else 1.5)
    return product_calls(part, kernel, problem)


def product_calls(part: str, kernel: str, problem: Problem) -> tuple[Calls, float]:
    layout, width = problem.layout, problem.columns_of_product(kernel)
    transposed = kernel == "down"
    rows, weights = (problem.act_PH, problem.down) if transposed else (problem.pre_PU, problem.gate_up)
    tile: Tile = getattr(problem.tiles, kernel)
    num_rows = problem.size.T * problem.size.K
    products = rows.new_empty(layout.num_padded, width)
    settings = {"rows_PK": rows, "weights": weights, "layout": layout, "tile": tile, "transposed": transposed}
    settings |= {"first": 0, "width": width, "products": products}

    def returning(function: Callable[..., None], **more: object) -> Callable[[], tuple[Tensor]]:
        def call() -> tuple[Tensor]:
            function(**{**settings, **more})
            return (products,)

        return call

    calls: Calls = {"today": returning(launch._multiply)}
    if part == "specialised-products":
        from specialised_products import multiply_specialised

        for stages in (3, 4):
            calls[f"{stages} stages"] = returning(
                multiply_specialised, num_programs=problem.num_programs, stages=stages
            )
        some, one = rows[:num_rows], (weights[0].T if transposed else weights[0])[:, :width]
        calls["dense"] = lambda: (torch.mm(some, one),)
    elif part == "automatic":
        calls[part] = returning(tried.multiply_specialised_by_compiler)
    elif part == "split":
        calls[part] = returning(tried.multiply_split)
    elif part == "tails":
        calls["counter"] = returning(tried.multiply_with_tails, is_half_M=None)
        calls["counter, tails"] = returning(
            tried.multiply_with_tails, is_half_M=tried.half_tiles(layout, problem.tiles.block_rows)
        )
    else:
        assert part == "layouts"
        calls["other layout"] = returning(launch._multiply, weights=weights.mT.contiguous(), transposed=not transposed)
    return calls, 2.0 * num_rows * rows.shape[1] * width


def up_calls(problem: Problem) -> Calls:
    from specialised_up import up_specialised

    x, layout, weights, tiles = problem.x, problem.layout, problem.gate_up, problem.tiles
    specialised = partial(up_specialised, x, layout, weights, tiles.up, num_programs=problem.num_programs)
    return {
        "today": partial(launch.pre_and_activation, x, layout, weights, tiles, activation=Activation(), bias=None),
        "3 stages": partial(specialised, stages=3, fenced=True),
        "4 stages": partial(specialised, stages=4, fenced=True),
        "4 stages, no fence": partial(specialised, stages=4, fenced=False),
    }


def gradient_calls(part: str, kernel: str, problem: Problem) -> Calls:
    transposed = kernel == "grad_gate_up"
    gathered, rows = (problem.x, problem.pre_PU) if transposed else (problem.grad_y, problem.act_PH)
    tile: Tile = getattr(problem.tiles, kernel)
    arguments = (gathered, rows, problem.layout, tile)

    def returning(function: Callable[..., Tensor], *all_of: object, **settings: object) -> Callable[[], tuple[Tensor]]:
        return lambda: (function(*all_of, **settings),)

    calls: Calls = {"today": returning(launch.weight_gradient, *arguments, transposed=transposed, main_grad=None)}
    if part == "recomputed":
        calls[part] = returning(tried.weight_gradient_recomputed, gathered, problem.pre_PU, problem.layout, tile)
        return calls
    from specialised_gradients import weight_gradient_specialised

    for stages in (3, 4):
        calls[f"{stages} stages"] = returning(
            weight_gradient_specialised,
            *arguments,
            transposed=transposed,
            num_programs=problem.num_programs,
            stages=stages,
        )
    return calls


def held_to_today(calls: Calls, used: Tensor | None) -> dict[str, object]:
    """Say which variants have the bits of today's kernel; remove those that fail or differ by more than rounding."""

    def results(name: str) -> list[Tensor]:
        found = calls[name]()
        kept = [one.clone() if used is None else one[used] for one in found]
        for one in found:
            # What the next one leaves unwritten is seen.
            one.fill_(float("nan"))
        return kept

    expected = results("today")
    row: dict[str, object] = {}
    for name in [name for name in calls if name not in ("today", "dense")]:
        try:
            got = results(name)
            pairs = [(one.float(), other.float()) for one, other in zip(got, expected, strict=True)]
            errors = [float((one - other).norm() / other.norm()) for one, other in pairs]
            # Not so for NaN.
            if not all(error <= ROUNDING for error in errors):
                raise AssertionError(f"differs from today's by {errors}")
            row[f"{name} same bits"] = all(map(torch.equal, got, expected))
        except Exception as error:
            row[f"{name} fault"] = f"{type(error).__name__}: {str(error)[:300]}"
            del calls[name]
    return row


def faults(row: dict[str, object]) -> list[str]:
    return [f"{row['name']}, {key[: -len(' fault')]}: {text}" for key, text in row.items() if key.endswith(" fault")]


def rounds_by_count(problem: Problem) -> str:
    """Say how many rounds of tiles each kernel of rows takes, and what part of the last one is idle."""
    size, num_tiles = problem.size, int(problem.layout.num_tiles_1)
    found = [f"padding {num_tiles * problem.tiles.block_rows / (size.T * size.K) - 1:.1%} of the rows"]
    widths = {"up": 2 * size.H, "hidden": size.H} | {name: problem.columns_of_product(name) for name in PRODUCTS}
    for kernel, width in widths.items():
        rounds = num_tiles * triton.cdiv(width, 256) / problem.num_programs
        found.append(f"{kernel} {rounds:.2f} rounds, {1 - rounds / -(-rounds // 1):.1%} idle")
    return f"{size.name}: " + "; ".join(found)


def rows_of(part: str, name: str, *, few: bool, rounds: int) -> Iterator[dict[str, object]]:
    """Hold the variants of a part to today's kernels, with few experts or with all; with all, time them too."""
    size = SIZES[name]
    problem = Problem.of(replace(size, T=size.T * EXPERTS // size.E, E=EXPERTS) if few else size)
    for kernel in PARTS[part].kernels:
        calls, flops = calls_of(part, kernel, problem)
        is_gradient = kernel.startswith("grad_") and kernel != "grad_rows"
        row: dict[str, object] = {"name": f"{name} {kernel}", "part": part}
        row |= held_to_today(calls, None if is_gradient else problem.layout.position_N.long())
        if not few:
            times = in_turn(calls, rounds)
            for variant, one in times.items():
                ratio = median(mine / today for mine, today in zip(one, times["today"], strict=True))
                row |= {f"{variant} us": median(one), f"{variant} over today": ratio}
                row[f"{variant} TFLOP/s"] = flops / median(one) / 1e6
            if part == "split":
                row["rounds"] = rounds_by_count(problem)
        yield row


def in_a_process(
    parts: Sequence[str], size: str | None, *, rounds: int, seconds: int
) -> tuple[list[dict[str, object]], str]:
    """Run parts in a process of their own, with few experts where a size is given.

    Returns rows, as many as there were, and what went wrong.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--part", ",".join(parts), "--json", file.name, "--rounds", str(rounds)]
        command += [] if size is None else ["--size", size]
        wrong = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            if done.returncode != 0:
                wrong = " | ".join(done.stderr.strip().splitlines()[-4:])[-600:] or f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            wrong = f"did not end within {seconds} s"
        return json.loads(Path(file.name).read_text(encoding="utf-8") or "[]"), wrong


def show(row: dict[str, object]) -> None:
    part = str(row["part"])
    print(f"{part}, {row['name']}:")
    for variant in [key[: -len(" us")] for key in row if key.endswith(" us")]:
        us, ratio, rate = (row[f"{variant} {what}"] for what in ("us", "over today", "TFLOP/s"))
        bits = ", same bits" if row.get(f"{variant} same bits") else ""
        expected = PARTS[part].expected.get(variant)
        more = f"; expected: {expected}" if expected else ""
        print(f"  {variant}: {us:.0f} us, {rate:.0f} TFLOP/s, {ratio:.3f} of today{bits}{more}")
    for fault in faults(row):
        print(f"  fault: {fault}")
    if "rounds" in row:
        print(f"  {row['rounds']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--part", metavar="PARTS", help="run these in this process")
    parser.add_argument("--size", help="hold the variants to today's kernels with few experts, and time nothing")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    if arguments.part:
        for part in arguments.part.split(","):
            for size in [arguments.size] if arguments.size else PARTS[part].sizes:
                for row in rows_of(part, size, few=bool(arguments.size), rounds=arguments.rounds):
                    rows.append(row)
                    # After each, since this process may be ended.
                    arguments.json.write_text(json.dumps(rows), encoding="utf-8")
                torch.cuda.empty_cache()
        return 0
    start = time.monotonic()
    parts = arguments.only.split(",")
    broken: dict[str, str] = {}
    jobs = [(part, size) for part in parts for size in PARTS[part].sizes]
    with ThreadPoolExecutor(arguments.workers) as pool:
        all_found = pool.map(lambda job: in_a_process([job[0]], job[1], rounds=0, seconds=90), jobs)
        for (part, size), (found, wrong) in zip(jobs, all_found, strict=True):
            for row in found:
                print(*(f"{part}, {fault}\n" for fault in faults(row)), sep="", end="", flush=True)
            if wrong:
                broken[part] = f"{size}: {wrong}"
                print(f"{part} is left out: {broken[part]}", flush=True)
    print(f"compiled and held to today's with {EXPERTS} experts: {time.monotonic() - start:.0f} s", flush=True)
    for is_specialised in (True, False):
        group = [part for part in parts if part not in broken and PARTS[part].is_specialised == is_specialised]
        if not group:
            continue
        found, wrong = in_a_process(group, None, rounds=arguments.rounds, seconds=60)
        if wrong:
            broken["after " + str(found[-1]["name"] if found else group[0])] = wrong
            print(wrong)
        for row in found:
            show(row)
            broken |= {fault.split(": ")[0]: fault for fault in faults(row)}
        rows += found
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    if arguments.json:
        write_json(arguments.json, {**about(arguments.commit), "left out": broken}, rows)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
