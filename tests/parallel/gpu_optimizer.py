"""The optimizer on one GPU: `python3 tests/parallel/gpu_optimizer.py [--json FILE] [--commit HASH]`, torch and triton.

First the checks of `optimizer_checks.py`, then at full size its numbers against AdamW of torch on fp32 weights with
clip_grad_norm_, equal bits of two runs, and its memory against the formula of the plan: of one rank, and of one rank of
eight with sharded gradients, where what its peers would send is what it sends itself (`echo_mesh.py`), late enough for
the host to be far ahead. Two processes that share the GPU sum sharded gradients through gloo. Then the time of a step
beside torch's, and beside the time in which the same bytes can be copied. `--parts` runs some of these.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "parallel" / "src")]

import torch  # noqa: E402
from coterie_parallel import (  # noqa: E402
    DENSE,
    AdamWConfig,
    Mesh,
    MuonConfig,
    Optimizer,
    ParallelConfig,
    ReductionConfig,
    make_plan,
    optimizer_memory,
)
from support.bounds import broken_bounds  # noqa: E402
from support.device_timing import about, copy_bandwidth_gbps, median_us, write_json  # noqa: E402
from support.ranks import run_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from parallel.echo_mesh import EchoMesh, backward, echoing  # noqa: E402
from parallel.optimizer_checks import all_checks, faults_of, placements_of, without_host_waits  # noqa: E402
from parallel.sharded_ranks import check_sharded_ranks  # noqa: E402

PARTS = ("checks", "ranks", "numbers", "memory", "times")
# As many, in more layers of fewer experts: two buckets at a time are then little.
MANY_SHAPES = {
    "embed.weight": (25_088, 2048),
    **{
        f"layers.{number}.{name}": shape
        for number in range(10)
        for name, shape in {
            "attention.q.weight": (2048, 2048),
            "norm.weight": (2048,),
            "moe.experts.gate_up": (16, 2048, 2048),
            "moe.experts.down": (16, 2048, 1024),
        }.items()
    },
}
# Enough for our kernels to run over many blocks, little enough for fp64.
CHECKED_SHAPES = {
    "layer.experts.gate_up": (5, 700, 300),
    "layer.q.weight": (1000, 1001),
    "norm.weight": (2049,),
    "embed.weight": (3001, 77),
}
# 10 ms at the clock of an H200: an exchange takes longer than the backward between two buckets.
DELAY_CYCLES = 20_000_000
Row = dict[str, object]
RATE, STEPS = 1e-3, 4
# Two layers with 64 experts of hidden width 1024, an embedding, and what is small: 1.0 billion parameters.
SHAPES = {
    **{f"layers.{number}.moe.experts.gate_up": (64, 2048, 2048) for number in range(2)},
    **{f"layers.{number}.moe.experts.down": (64, 2048, 1024) for number in range(2)},
    **{f"layers.{number}.attention.q.weight": (2048, 2048) for number in range(2)},
    **{f"layers.{number}.norm.weight": (2048,) for number in range(2)},
    "odd.weight": (1001, 77),
    "embed.weight": (100_352, 2048),
}


def mesh_of_one() -> Mesh:
    return Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=60, device=torch.device("cuda"))


def weights(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: nn.Parameter((0.02 * torch.randn(shape, device="cuda")).bfloat16()) for name, shape in shapes.items()}


def ours(moments: str = "float32") -> tuple[dict[str, Tensor], Optimizer]:
    named = weights()
    config = AdamWConfig(moments_dtype=moments)
    return named, Optimizer(named.items(), dict.fromkeys(named, DENSE), mesh_of_one(), config)


def give_gradients(tensors: list[Tensor], step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1 + step)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, device="cuda", generator=generator) * 1e-3)


def run_ours(moments: str = "float32") -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    named, optimizer = ours(moments)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        give_gradients([parameter.main_grad for parameter in named.values()], step)
        norms.append(optimizer.step(RATE))
    return named, optimizer.state_dict(), norms


def torch_optimizer(named: dict[str, Tensor]) -> tuple[list[Tensor], torch.optim.AdamW]:
    """Return fp32 copies of the weights and AdamW over them, with the decays that ours has."""
    main = [nn.Parameter(parameter.detach().float()) for parameter in named.values()]
    config = AdamWConfig()
    groups = [
        {"params": [one for one in main if (one.ndim >= 2) is decayed], "weight_decay": config.weight_decay * decayed}
        for decayed in (True, False)
    ]
    return main, torch.optim.AdamW(groups, lr=RATE, betas=config.betas, eps=config.eps, fused=True)


def check_numbers() -> list[str]:
    named, state, norms = run_ours()
    main, optimizer = torch_optimizer(weights())
    found = []
    for step in range(STEPS):
        for one in main:
            one.grad = torch.empty_like(one)
        give_gradients([one.grad for one in main], step)
        norm = nn.utils.clip_grad_norm_(main, AdamWConfig().gradient_clip)
        optimizer.step()
        if abs(float(norms[step]) / float(norm) - 1) > 1e-5:
            found.append(f"gradient norm {float(norms[step])}, of torch {float(norm)}")
    for (name, parameter), theirs in zip(named.items(), main, strict=True):
        mine = state[f"main/{name}"].view(theirs.shape)
        # Near the end of a warm-up of Adam an update is about the rate; fp32 leaves 1e-5 of it.
        difference = (mine - theirs).abs().max().item()
        print(f"{name}: largest difference to torch {difference:.1e}", flush=True)
        if not difference < 1e-5 * RATE * STEPS + 1e-7:
            found.append(f"{name} differs by {difference}")
        if not torch.equal(parameter.detach(), mine.bfloat16()):
            found.append(f"{name} is not its rounded main weight")
    del main, optimizer
    again, again_state, again_norms = run_ours()
    same = all(torch.equal(one, again_state[name]) for name, one in state.items())
    same = same and all(torch.equal(one, again[name]) for name, one in named.items())
    if not same or not all(torch.equal(one, other) for one, other in zip(norms, again_norms, strict=True)):
        found.append("two runs differ")
    return found


def allocated() -> int:
    """Return the bytes of tensors in use, after what only refers to itself has been collected."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def check_memory(moments: str) -> Row:
    before = allocated()
    named, optimizer = ours(moments)
    held = torch.cuda.memory_allocated() - before
    give_gradients([parameter.main_grad for parameter in named.values()], 0)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(RATE)
    peak = torch.cuda.max_memory_allocated() - before
    sizes = {name: (tuple(one.shape), one.dtype) for name, one in named.items()}
    config = AdamWConfig(moments_dtype=moments)
    formula = optimizer_memory(sizes, dict.fromkeys(named, DENSE), make_plan(ParallelConfig(), 1), config)
    expected = formula.parameters + formula.allocated_by_optimizer
    row: Row = {
        "name": f"memory, moments {moments}",
        "formula_bytes": expected,
        "held_over_formula": held / expected,
        "peak_of_step_over_formula": peak / formula.total,
    }
    print(row, flush=True)
    return row


def check_sharded_memory() -> Row:
    """Measure a rank of 8, experts over 2: local shapes are MANY_SHAPES, shards an eighth and a quarter."""
    plan = make_plan(ParallelConfig(expert=2), 8)
    config = AdamWConfig(reduction=ReductionConfig(sharded=True))
    before = allocated()
    named, placements = weights(MANY_SHAPES), placements_of(MANY_SHAPES)
    optimizer = Optimizer(named.items(), placements, EchoMesh(plan, torch.device("cuda")), config)
    sizes = {name: (tuple(one.shape), one.dtype) for name, one in named.items()}
    formula = optimizer_memory(sizes, placements, plan, config)
    whole = optimizer_memory(sizes, placements, plan, replace(config, reduction=ReductionConfig()))
    held = torch.cuda.memory_allocated() - before
    peaks, ahead_ms = [], 0.0
    with echoing(DELAY_CYCLES):
        for number in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with without_host_waits(torch.device("cuda")), optimizer.micro_batch(is_last=number == 2):
                backward(list(named.values()), number)
            started = time.perf_counter()
            torch.cuda.synchronize()
            ahead_ms = max(ahead_ms, 1e3 * (time.perf_counter() - started))
            peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
        optimizer.step(RATE)
        torch.cuda.synchronize()
        step_peak = torch.cuda.max_memory_allocated() - before
    expected = formula.parameters + formula.allocated_by_optimizer
    row: Row = {
        "name": "memory, sharded gradients, one rank of 8",
        "formula_bytes": formula.total,
        "formula_without_sharding_bytes": whole.total,
        "held_over_formula": held / expected,
        "peak_of_backward_over_formula": max(peaks) / formula.total,
        "peak_of_step_over_formula": step_peak / formula.total,
        "host_ahead_ms": ahead_ms,
    }
    print(row, flush=True)
    return row


def memory_faults(rows: list[Row]) -> list[str]:
    """Return a sentence for every row that is off the formula by more than 2 %."""
    found = []
    for row in rows:
        for key, value in row.items():
            # A step needs less than the backward before it where gradients are sharded.
            low = 0.0 if key == "peak_of_step_over_formula" else 0.98
            if key.endswith("_over_formula") and not low <= float(str(value)) <= 1.02:
                found.append(f"{row['name']}: {key} {value}")
        if "host_ahead_ms" in row and float(str(row["host_ahead_ms"])) < 10:
            found.append(f"{row['name']}: the host was not ahead, so nothing was shown")
    return found


def fp32_step() -> Callable[[], object]:
    """Return a step of fp32 parameters, whose gradients stay where autograd has left them."""
    named = {name: nn.Parameter(one.detach().float()) for name, one in weights().items()}
    gradients = [1e-3 * torch.randn_like(one) for one in named.values()]
    optimizer = Optimizer(named.items(), dict.fromkeys(named, DENSE), mesh_of_one(), AdamWConfig())

    def step() -> None:
        optimizer.zero_grad()
        for parameter, gradient in zip(named.values(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step(RATE)

    return step


def time_steps(copy_gbps: float) -> list[Row]:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    rows: list[Row] = []

    def add(name: str, function: Callable[[], object], bytes_of_element: int | None) -> None:
        us = median_us(function, graph=False, repeats=8, cold=False)
        row: Row = {"name": name, "ms": us / 1e3}
        if bytes_of_element is not None:
            row["bytes_of_element"] = bytes_of_element
            row["share_of_copy"] = bytes_of_element * numel / us / 1e3 / copy_gbps
        rows.append(row)
        print(row, flush=True)

    for moments, size in (("float32", 4), ("bfloat16", 2)):
        _, optimizer = ours(moments)

        def step(optimizer: Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            optimizer.step(RATE)

        # Zero 4; norm 4; gradient, weight and moments read, weight, moments and rounded weight written.
        add(f"zero, norm, clip and AdamW, moments {moments}", step, 4 + 4 + 4 + 8 + 4 * size + 2)
        del optimizer, step
    # Norm 4; gradient, weight and moments read, weight and moments written.
    add("norm, clip and AdamW, fp32 parameters", fp32_step(), 4 + 4 + 8 + 16)
    named = weights()
    main, reference = torch_optimizer(named)
    for one in main:
        one.grad = torch.zeros_like(one)

    def torch_step() -> None:
        torch._foreach_zero_([one.grad for one in main])
        nn.utils.clip_grad_norm_(main, 1.0)
        reference.step()
        torch._foreach_copy_([one.detach() for one in named.values()], [one.detach() for one in main])

    add("torch: zero, clip_grad_norm_, fused AdamW, copy to bf16", torch_step, None)
    rows[-1]["over_ours"] = float(str(rows[-1]["ms"])) / float(str(rows[0]["ms"]))
    return rows


def time_muon() -> list[Row]:
    """Time Muon of two layers, most of it experts, and torch's over the same matrices, both in bf16."""
    named = {name: one for name, one in weights().items() if name.startswith("layers.") and one.ndim > 1}
    optimizer = Optimizer(named.items(), dict.fromkeys(named, DENSE), mesh_of_one(), AdamWConfig(muon=MuonConfig()))
    give_gradients([parameter.main_grad for parameter in named.values()], 0)
    gradients = {name: parameter.main_grad.clone() for name, parameter in named.items()}

    def ours_step() -> None:
        optimizer.zero_grad()
        for name, parameter in named.items():
            parameter.main_grad.copy_(gradients[name])
        optimizer.step(RATE)

    ours_ms = median_us(ours_step, graph=False, repeats=5, cold=False, warmups=2) / 1e3
    rows: list[Row] = [{"name": "Muon: copy of gradients, norm, clip, update, bf16", "ms": ours_ms}]
    print(rows[-1], flush=True)
    if not hasattr(torch.optim, "Muon"):
        return rows
    matrices = [
        (matrix.float(), gradient)
        for name, one in named.items()
        for matrix, gradient in zip(
            one.detach().view(-1, *one.shape[-2:]), gradients[name].view(-1, *one.shape[-2:]), strict=True
        )
    ]
    parameters = [nn.Parameter(matrix) for matrix, _ in matrices]
    for parameter, (_, gradient) in zip(parameters, matrices, strict=True):
        parameter.grad = gradient
    theirs = torch.optim.Muon(parameters, lr=RATE, adjust_lr_fn="match_rms_adamw")
    torch_ms = median_us(theirs.step, graph=False, repeats=5, cold=False, warmups=2) / 1e3
    rows.append({"name": "Muon of torch: update of fp32 weights", "ms": torch_ms, "over_ours": torch_ms / ours_ms})
    print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="", metavar="HASH")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    where = about(options.commit)
    print(where, flush=True)
    device = torch.device("cuda", torch.cuda.current_device())
    started = time.perf_counter()

    def done(part: str) -> None:
        allocated()
        print(f"--- {part}: {time.perf_counter() - started:.1f} s since the start", flush=True)

    faults: list[str] = []
    rows: list[Row] = []
    if "checks" in options.parts:
        faults += faults_of(all_checks(CHECKED_SHAPES, device, delay_cycles=DELAY_CYCLES))
        done("checks")
    if "ranks" in options.parts:
        faults += faults_of({"two processes on one GPU": lambda: check_sharded_ranks("cuda", run_ranks)})
        done("ranks")
    if "numbers" in options.parts:
        faults += faults_of({"numbers at full size": check_numbers})
        done("numbers")
    if "memory" in options.parts:
        for check in (lambda: check_memory("float32"), lambda: check_memory("bfloat16"), check_sharded_memory):
            rows.append(check())
        faults += memory_faults(rows)
        done("memory")
    if faults:
        raise SystemExit("\n".join(faults))
    if "times" in options.parts:
        where["copy_gbps"] = copy_bandwidth_gbps()
        rows += time_steps(float(str(where["copy_gbps"])))
        rows += time_muon()
        done("times")
    if options.json:
        write_json(options.json, where, rows)
    if broken := broken_bounds(rows, Path(__file__).with_name("speed-1xh200.toml")):
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
