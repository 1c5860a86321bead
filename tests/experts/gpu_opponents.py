"""The experts beside their opponents on one GPU: `python3 tests/experts/gpu_opponents.py --packages DIR`.

For each size forward and backward of all contenders, one call of each in turn, round after round: medians, and medians
of the ratio of two calls of one round. Before that the outputs and gradients of each are held to ours up to rounding.
DIR is a folder (it may be given several times) with SonicMoE and what it needs, or Liger; quack-kernels 0.6 wants it to
be called `site-packages`. Contenders that are not there are left out, and the file says why. Then ours alone with 8, 32
and 128 experts, one call of each in turn. Floors are in `speed-1xh200.toml`; `--json FILE` writes the measurement.

- `plain`: sort, gather, two `F.grouped_mm`, `index_add`; `compiled`: `torch.compile` of it, static shapes.
- `sonic`: SonicMoE with its default tiles (`tuned=False`), for given ids; its sum over choices tunes among 9 of its
  configurations, and weights are ours, seen through `permute`.
- `liger`: `LigerFusedMoEFunction` without its autotuning (`LIGER_FUSED_MOE_AUTOTUNE=0`); it reads a number on the host.
- `quack`: our back-end of that name. `dense`: six plain products of the same FLOPs.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import site
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from gpu_cases import DEVICE, SIZES, Size, make

# isort: split
import torch
import torch.nn.functional as F
from coterie_experts.grouped_swiglu import experts_of_tokens
from coterie_experts.tables import TileTable, load_table
from support.device_timing import about, write_json
from torch import Tensor

Contender = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

NAMES = ("y", "grad x", "grad weights", "grad gate_up", "grad down")
BOUNDS = Path(__file__).with_name("speed-1xh200.toml")
PACKAGES = {
    "sonic": ("sonicmoe", ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")),
    "quack": ("quack", ("quack-kernels", "nvidia-cutlass-dsl")),
    "liger": ("liger_kernel", ("liger-kernel",)),
}
SWEEP = ("sweep-e8", "sweep-e32", "sweep-e128")
# Two chains of bfloat16 roundings, of 3 or 4 steps each, differ by less than this by norm.
ROUNDING = 2.0**-6


def plain_torch(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    slots = ids.flatten().argsort(stable=True)
    tokens = slots // ids.shape[1]
    offsets = torch.searchsorted(ids.flatten()[slots], torch.arange(1, len(down) + 1, device=x.device)).int()
    gate, up = F.grouped_mm(x[tokens], gate_up.mT, offs=offsets).chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
    return torch.zeros_like(x).index_add_(0, tokens, rows * weights.flatten()[slots, None].to(rows.dtype))


def sonic_moe() -> Contender:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection, backward, forward
    from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel

    for module, names in ((forward, ("gemm", "gemm_gated")), (backward, ("gemm", "gemm_dgated"))):
        for name in names:
            function = getattr(module, name)
            if not isinstance(function, partial):
                setattr(module, name, partial(function, tuned=False))
    token_gather_sum_kernel.configs = [
        config
        for config in token_gather_sum_kernel.configs
        if config.kwargs["BLOCK_H"] in (512, 1024, 2048) and config.kwargs["BLOCK_K"] in (1, 4, 8)
        if config.num_warps == 4
    ]

    def run(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        (T, K), E = ids.shape, len(down)

        def new(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=x.device)

        gather, scatter, reverse, counts, offsets = new(T * K), new(T * K), new(T * K), new(E), new(E + 1)
        TC_topk_router_metadata_triton(ids, E, counts, offsets, gather, scatter, reverse)
        swiglu = ActivationType.SWIGLU
        act, pre = _UpProjection.apply(
            x, gate_up.permute(1, 2, 0), None, offsets, T * K, K, gather, scatter, reverse, None, False, swiglu,
            False, True,
        )  # fmt: skip
        return _DownProjection.apply(
            act, pre, down.permute(1, 2, 0), None, weights, offsets, T, K, gather, scatter, reverse, None, False, swiglu
        )  # fmt: skip

    return run


def liger() -> Contender:
    # Read when its kernels are defined.
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def run(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, gate_up, down, ids, weights)

    return run


def contender(name: str, table: TileTable | None) -> Contender:
    """Return a function of x, ids, weights, gate_up and down; ids are int32 for those that take no other."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        raise ImportError(f"{PACKAGES[name][0]} is not installed")
    if name in ("triton", "quack"):
        return partial(experts_of_tokens, backend=name, table=table)
    if name == "plain":
        return plain_torch
    if name == "compiled":
        torch.compiler.reset()
        return torch.compile(plain_torch, dynamic=False)
    function = {"sonic": sonic_moe, "liger": liger}[name]()
    return lambda x, ids, *rest: function(x, ids.int(), *rest)


def leaves_of(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().requires_grad_() for value in (values[0], values[2], values[3], values[4])]


def both(function: Contender, values: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    y = function(leaves[0], values[1], leaves[1], leaves[2], leaves[3])
    return y, *torch.autograd.grad(y, leaves, values[5])


def forward_alone(function: Contender, values: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*values[:5])


def extra_gib(function: Contender, values: list[Tensor], leaves: list[Tensor]) -> float:
    """Return the most memory that one call takes, beyond inputs, output and gradients."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = both(function, values, leaves)
    results = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return (torch.cuda.max_memory_allocated() - before - results) / 2**30


def dense_products(size: Size) -> Callable[[], object]:
    rows, D, H = size.T * size.K, size.D, size.H
    x, pre, act, y = (torch.randn(rows, n, device=DEVICE, dtype=torch.bfloat16) for n in (D, 2 * H, H, D))
    gate_up, down = (torch.randn(n, m, device=DEVICE, dtype=torch.bfloat16) for n, m in ((2 * H, D), (D, H)))

    def products() -> None:
        x @ gate_up.T, act @ down.T, y @ down, y.T @ act, pre @ gate_up, pre.T @ x

    return products


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of each call, one of each in every round, every second round the other way round."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    # The first call after a pause finds a chip that has to wake up; from here on the device does not pause.
    next(reversed(calls.values()))()
    for number in range(rounds):
        for name in reversed(calls) if number % 2 else calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Work enough that the host is ahead of the device when the call begins.
            torch.cuda._sleep(2_000_000)
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in events.items()}


def differences(name: str, one: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> list[str]:
    """Return what of a contender is not what we have, up to rounding."""
    found = []
    for label, got, expected in zip(NAMES, (t.detach().float() for t in one), ours, strict=True):
        right = expected.detach().float()
        error = float((got - right).norm() / right.norm())
        if not error <= ROUNDING:
            found.append(f"{name}: {label} differs from ours by {error:.2e}, where {ROUNDING:.2e} is rounding")
    return found


def measure(size: Size, kind: str, names: list[str], table: TileTable | None, rounds: int) -> dict[str, object]:
    values = make(size, kind)
    leaves = leaves_of(values)
    row: dict[str, object] = {"name": size.name if kind == "balanced" else f"{size.name}, {kind}", "kind": kind}
    functions: dict[str, Contender] = {}
    ours: tuple[Tensor, ...] = ()
    for name in names:
        try:
            function = contender(name, table)
            results = both(function, values, leaves)
            wrong = differences(name, results, ours) if name != "triton" else []
            if wrong:
                raise AssertionError("; ".join(wrong))
            ours = results if name == "triton" else ours
            del results
            forward_alone(function, values)
            row[f"{name}_extra_gib"] = extra_gib(function, values, leaves)
            functions[name] = function
        except Exception as error:
            row[f"{name}_why_not"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"  {row[f'{name}_why_not']}", flush=True)
    del ours
    torch.cuda.empty_cache()
    calls = {name: partial(both, function, values, leaves) for name, function in functions.items()}
    if kind == "balanced":
        calls["dense"] = dense_products(size)
    times = in_turn(calls, rounds)
    forward = in_turn({name: partial(forward_alone, f, values) for name, f in functions.items()}, rounds)
    for name, one in times.items():
        row[f"{name}_both"] = 3 * size.flops / median(one) / 1e6
        row[f"{name}_over_ours"] = median(theirs / mine for theirs, mine in zip(one, times["triton"], strict=True))
    for name, one in forward.items():
        row[f"{name}_forward"] = size.flops / median(one) / 1e6
        row[f"{name}_backward"] = 2 * size.flops / (median(times[name]) - median(one)) / 1e6
    if kind != "balanced":
        even = make(size)
        even_leaves = leaves_of(even)
        ours_alone = functions["triton"]
        pair = {
            "balanced": partial(both, ours_alone, even, even_leaves),
            "skewed": partial(both, ours_alone, values, leaves),
        }
        found = in_turn(pair, rounds)
        row["skew"] = median(one / other for one, other in zip(found["skewed"], found["balanced"], strict=True))
    return row


def measure_sweep(rounds: int) -> dict[str, object]:
    """Time ours with more and more experts at the same FLOPs, one call of each in turn; the most evenly loaded too."""
    values = {name.removeprefix("sweep-"): make(SIZES[name]) for name in SWEEP}
    values["e128_even"] = make(SIZES["sweep-e128"], "even")
    function = contender("triton", None)
    times = in_turn({name: partial(both, function, these, leaves_of(these)) for name, these in values.items()}, rounds)
    row: dict[str, object] = {"name": "sweep", "kind": "in turn"}
    for name, one in times.items():
        row[name] = 3 * SIZES["sweep-e8"].flops / median(one) / 1e6
        if name != "e8":
            row[f"{name}_over_e8"] = median(mine / first for mine, first in zip(one, times["e8"], strict=True))
    return row


def faults(rows: list[dict[str, object]]) -> list[str]:
    """Return a sentence for every bound that a row breaks."""
    bounds = tomllib.loads(BOUNDS.read_text(encoding="utf-8"))
    found = []
    for row in rows:
        for name, floor in bounds["floors"].items():
            ratio = row.get(f"{name}_over_ours", floor)
            if ratio < floor:
                found.append(f"{row['name']}: {name} over ours is {ratio:.3f}, below {floor:g}")
        limits = bounds["limits"]
        if row.get("skew", 0) > limits["skew"]:
            found.append(f"{row['name']}: skewed over balanced is {row['skew']:.3f}, above {limits['skew']:g}")
        theirs = row.get("sonic_extra_gib", float("inf")) * limits["memory"]
        if row.get("triton_extra_gib", 0) > theirs:
            found.append(f"{row['name']}: memory is {row['triton_extra_gib']:.2f} GiB, above {theirs:.2f}")
    return found


def profile(name: str, size: Size, table: TileTable | None) -> None:
    """Print the time of each kernel of one forward and backward pass."""
    values = make(size)
    leaves, function = leaves_of(values), contender(name, table)
    both(function, values, leaves)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            both(function, values, leaves)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    parts = [f"{event.key[:90]} {event.device_time_total / 2:.0f}us/{event.count / 2:.0f}" for event in events[:9]]
    print(f"  {name}", *parts, sep="\n    ", flush=True)


def add_packages(folders: list[str]) -> None:
    for folder in folders:
        site.addsitedir(folder)


def compile_ahead(job: tuple[str, str]) -> str:
    """Run a contender once in a process of its own, so that what it compiles is on the disk; return what went wrong."""
    name, size_name = job
    size = SIZES[size_name]
    start = time.monotonic()
    try:
        # The shapes of torch.compile are static; the kernels of the others do not know the number of tokens, but for
        # the class of shapes, which our tiles depend on.
        few = min(size.T, max(512, 1024 * size.E // size.K))
        values = make(size if name == "compiled" else replace(size, T=few))
        function = contender(name, None)
        both(function, values, leaves_of(values))
        forward_alone(function, values)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {size_name}: {type(error).__name__} {str(error)[:300]}"
    finally:
        values = function = None
        torch.cuda.empty_cache()
    return f"{name} {size_name}: {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="append", default=[], metavar="DIR")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--contenders", default="triton,sonic,quack,plain,compiled,liger")
    parser.add_argument("--skewed", default="olmoe", help="sizes that are also measured with skewed routing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--profile", default="", help="sizes whose kernels are listed")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no size after this time")
    parser.add_argument("--tiles", type=Path, help="a file of python -m coterie_experts.tune")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    start = time.monotonic()
    add_packages(arguments.packages)
    sizes, names = arguments.sizes.split(","), arguments.contenders.split(",")
    table = load_table(arguments.tiles) if arguments.tiles else None
    if arguments.workers:
        # The longest first.
        jobs = [(name, size) for name in sorted(names, key=("compiled", "sonic", "liger").__contains__, reverse=True)
                for size in sizes]  # fmt: skip
        context = get_context("spawn")
        with ProcessPoolExecutor(
            arguments.workers, mp_context=context, initializer=add_packages, initargs=(arguments.packages,)
        ) as pool:
            for done in as_completed([pool.submit(compile_ahead, job) for job in jobs]):
                print(f"{time.monotonic() - start:.0f} s  {done.result()}", flush=True)
    rows: list[dict[str, object]] = []
    installed = {p for name in names for p in PACKAGES.get(name, ("", ()))[1]}
    versions = {}
    for package in sorted(installed):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    skewed = [name for name in arguments.skewed.split(",") if name]
    plan = [(name, "balanced") for name in sizes] + [(name, kind) for name in skewed for kind in ("zipf", "one")]
    if set(SWEEP) <= set(sizes):
        plan.append(("sweep", "in turn"))
    for name, kind in plan:
        if time.monotonic() - start > arguments.limit_s:
            print(f"the limit of {arguments.limit_s:g} s is over before {name}, {kind}", flush=True)
            break
        if kind == "in turn":
            row = measure_sweep(2 * arguments.rounds)
        else:
            contenders = names if kind == "balanced" else [one for one in names if one in ("triton", "sonic", "plain")]
            row = measure(SIZES[name], kind, contenders, table, arguments.rounds)
        rows.append(row)
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(f"{time.monotonic() - start:.0f} s  {shown}", flush=True)
        torch.cuda.empty_cache()
        if arguments.json:
            write_json(arguments.json, {**about(arguments.commit), "packages": versions}, rows)
    for name in filter(None, arguments.profile.split(",")):
        print(f"{name}: kernels")
        for one in names:
            if one in ("triton", "sonic") and name in SIZES:
                profile(one, SIZES[name], table)
    broken = faults(rows)
    print(*broken, f"{len(rows)} rows, {len(broken)} faults", sep="\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
