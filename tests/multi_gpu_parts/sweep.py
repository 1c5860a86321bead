"""The same model with 8 to 128 experts under a random load: what more experts cost, tokens a second and GPU."""

from dataclasses import replace
from functools import partial

import torch
from coterie_parallel import ParallelConfig
from trainer.step_cases import Case

from multi_gpu_parts.bench import Bench
from multi_gpu_parts.steps import build, memory_formula, spec_of, time_steps, tiny_case

__all__ = ["run"]

_EXPERTS = (8, 32, 64, 128)
_CAPACITY = 1.1  # a random load of many tokens is nearly even
_MOMENTS = "bfloat16"
_ROOM = 0.85
_MICRO_BATCHES = 2
_GOAL = 0.02


def run(bench: Bench) -> None:
    """Time the steps of each number of experts; the first loss is that of the same steps by all_to_all."""
    largest = _case(bench, _EXPERTS[-1])
    text, gib = memory_formula(largest, bench.world, capacity_factor=_CAPACITY)
    bench.say(f"{_EXPERTS[-1]} experts: {text}")
    whole_gib = torch.cuda.get_device_properties(bench.device).total_memory / 2**30 if bench.is_gpu else gib / _ROOM
    # All numbers of experts run alike, also where only the most need it.
    halves = 2 if gib > _ROOM * whole_gib else 1
    if halves == 2:
        bench.say(
            f"that is more than {_ROOM:.0%} of {whole_gib:.0f} GiB: sequences in micro-batches of 1, twice as many"
        )
    found = {}
    for num_experts in (8, 16) if bench.tiny else _EXPERTS:
        case = _case(bench, num_experts)
        case = replace(case, sequences=case.sequences // halves, micro_batches=case.micro_batches * halves)
        seen = bench.attempt(f"E {num_experts}", partial(_measure, bench, case))
        if seen is not None:
            found[num_experts] = seen
    if len(found) < 2:
        return
    least, most = found[min(found)], found[max(found)]
    for name, few, many in zip(("whole steps", "forward and backward"), least, most, strict=True):
        fall = 1 - many / few
        bench.row(name=f"fall from {min(found)} to {max(found)} experts, {name}", fall=fall)
        bench.target(f"fall from {min(found)} to {max(found)} experts, {name}", fall, _GOAL, at_least=False)


def _case(bench: Bench, num_experts: int) -> Case:
    """Return width 4096, expert hidden 4096, top-4, two sequences of 8,192, and a layer for each rank."""
    if bench.tiny:
        return replace(tiny_case(num_experts=num_experts), sequences=2)
    spec = spec_of(
        d_model=4096,
        num_layers=bench.world,
        num_heads=32,
        num_kv_heads=8,
        max_sequence_length=8192,
        num_experts=num_experts,
        top_k=4,
        expert_hidden=4096,
        shared_hidden=0,
    )
    return Case(spec=spec, sequences=2, micro_batches=_MICRO_BATCHES)


def _measure(bench: Bench, case: Case) -> tuple[float, float]:
    """Return tokens/s/GPU of whole steps, and of all but the optimizer."""
    world = bench.world
    parallel = ParallelConfig(data=world, expert=world, dispatcher="rowwise", capacity_factor=_CAPACITY)
    built = build(bench, case, parallel, compiled=bench.settings.compiled, moments=_MOMENTS)
    first = built.step()
    tokens = case.tokens * case.micro_batches * world
    load_LE = built.stepper.load_LE
    if load_LE.sum(1).tolist() != [tokens * case.spec.top_k] * case.spec.num_layers:
        bench.fault(f"{load_LE.sum(1).tolist()} pairs in {case.spec.num_layers} layers for {tokens} tokens")
    row = time_steps(bench, built, warmups=1, num_data=world)
    watch = built.stepper.capacity
    if watch.rows_dropped:
        bench.fault(f"{watch.rows_dropped} rows were dropped")
    row |= {"replays": watch.num_replays, "rows_needed_max": watch.rows_needed_max, "first_loss": first.loss}
    spec, seen = case.spec, row["tokens_per_s_per_gpu"]
    bench.row(
        name=f"E {spec.num_experts}",
        layers=spec.num_layers,
        sequences=case.sequences,
        micro_batches=case.micro_batches,
        model_tflops=seen * case.model_flops_per_token() / 1e12,
        memory_formula_gib=memory_formula(case, world, capacity_factor=_CAPACITY)[1],
        **row,
    )
    built.close(bench)
    del built
    bench.free()
    return seen, seen * row["step_ms"] / (row["step_ms"] - row["optimizer_ms"])
