"""Resident experts against FSDP2, which gathers all experts of a layer: the same model of 128 experts."""

from dataclasses import replace
from functools import partial

from coterie_parallel import ParallelConfig
from trainer.step_cases import Case

from multi_gpu_parts.bench import Bench
from multi_gpu_parts.steps import build, memory_formula, spec_of, time_steps, tiny_case

__all__ = ["run"]

_GOAL = 3.0


def run(bench: Bench) -> None:
    """Time steps of both ways, whose first losses are the same within rounding."""
    case, world = _case(bench), bench.world
    bench.say(f"resident: {memory_formula(case, world, moment_bytes=4)[0]}")
    spec = case.spec
    weights = 3 * spec.num_experts * spec.d_model * spec.expert_hidden
    shards = 16 * spec.num_layers * weights / world
    gib = (shards + 14 * weights) / 2**30
    bench.say(
        f"fsdp: 16 L M / N for shards, and 14 M for two layers gathered, gradients of one in bf16 and of two in fp32 = "
        f"{gib:.1f} GiB, and activations; M = {weights / 1e9:.2f}e9 routed weights of a layer"
    )
    ways = {
        "resident": ParallelConfig(data=world, expert=world, dispatcher="rowwise", capacity_factor=1.25),
        "fsdp": ParallelConfig(data=world, expert=1, dispatcher="local", data_parallel="fsdp"),
    }
    seen = {name: bench.attempt(name, partial(_measure, bench, case, name, way)) for name, way in ways.items()}
    resident, fsdp = seen["resident"], seen["fsdp"]
    if resident is None or fsdp is None:
        return
    for what, a, b in zip(("loss", "norm"), resident, fsdp, strict=False):
        if not abs(a - b) <= bench.tolerance * a:
            bench.fault(f"first {what} of fsdp {b}, resident {a}")
    ratio = resident[2] / fsdp[2]
    bench.row(name="resident over fsdp", ratio=ratio)
    bench.target("resident over fsdp", ratio, _GOAL)


def _measure(bench: Bench, case: Case, name: str, parallel: ParallelConfig) -> tuple[float, float, float]:
    """Return first loss and norm, and tokens/s/GPU."""
    built = build(bench, case, parallel, compiled=bench.settings.compiled)
    first = built.step()
    row = time_steps(bench, built, warmups=1, num_data=bench.world)
    sizes = {"micro_batches": case.micro_batches, "layers": case.spec.num_layers}
    bench.row(name=name, first_loss=first.loss, **sizes, **row)
    built.close(bench)
    del built
    bench.free()
    return first.loss, first.gradient_norm, row["tokens_per_s_per_gpu"]


def _case(bench: Bench) -> Case:
    """Return width 4096, 128 experts of half the hidden width of the sweep, so that gathered layers have room."""
    if bench.tiny:
        return replace(tiny_case(num_experts=8), sequences=1)
    spec = spec_of(
        d_model=4096,
        num_layers=min(4, bench.world),
        num_heads=32,
        num_kv_heads=8,
        max_sequence_length=8192,
        num_experts=128,
        top_k=4,
        expert_hidden=2048,
        shared_hidden=0,
    )
    return Case(spec=spec, sequences=1, micro_batches=2)
