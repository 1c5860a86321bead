"""Schedules of a pipeline over the ranks: tokens a second and peak memory of each."""

from functools import partial

from coterie_parallel import ParallelConfig
from trainer.step_cases import Case

from multi_gpu_parts.bench import Bench
from multi_gpu_parts.steps import build, spec_of, time_steps, tiny_case

__all__ = ["run"]

_SCHEDULES = ("1f1b", "zbv", "dualpipev")


def run(bench: Bench) -> None:
    """Time steps of each schedule, whose first loss and norm are those of one rank within rounding."""
    case = _case(bench)
    for pipeline in dict.fromkeys((bench.world, 2)):
        data = bench.world // pipeline
        expected: tuple[float, float] | None = None
        for schedule in _SCHEDULES:
            parallel = ParallelConfig(
                pipeline=pipeline,
                pipeline_schedule=schedule,
                data=data,
                expert=data,
                dispatcher="local" if data == 1 else "rowwise",
                capacity_factor=2.0 if data == 1 else 1.25,
            )
            expected = expected or _alone(bench, case, parallel)
            bench.attempt(schedule, partial(_measure, bench, case, parallel, expected))


def _alone(bench: Bench, case: Case, parallel: ParallelConfig) -> tuple[float, float]:
    """Return loss and norm of the step on one rank, which all ranks compute."""
    built = build(bench, case, parallel, alone=True)
    result = built.step()
    built.close(bench)
    del built
    bench.free()
    return result.loss, result.gradient_norm


def _measure(bench: Bench, case: Case, parallel: ParallelConfig, expected: tuple[float, float]) -> None:
    name = f"{parallel.pipeline_schedule}, pipeline {parallel.pipeline} x data {parallel.data}"
    built = build(bench, case, parallel)
    first = built.step()
    found = first.loss, first.gradient_norm
    for what, a, b in zip(("loss", "norm"), expected, found, strict=True):
        # The norm is of many sums, each rounded by itself.
        allowed = bench.tolerance * (1 if what == "loss" else 4)
        if not abs(a - b) <= allowed * abs(a):
            bench.fault(f"{name}: first {what} {b}, and {a} on one rank")
    row = time_steps(bench, built, warmups=1, num_data=parallel.data)
    bench.row(
        name=name,
        micro_batches=case.micro_batches,
        layers=case.spec.num_layers,
        first_loss=first.loss,
        **row,
    )
    built.close(bench)
    del built
    bench.free()


def _case(bench: Bench) -> Case:
    """Return a model with as many layers as give each rank four at least, and two micro-batches for each stage."""
    layers, micro_batches = max(8, 2 * bench.world), 4 * bench.world
    if bench.tiny:
        return tiny_case(num_layers=2 * bench.world, micro_batches=2 * bench.world)
    spec = spec_of(
        d_model=2048,
        num_layers=layers,
        max_sequence_length=4096,
        num_experts=16,
        top_k=4,
        expert_hidden=1024,
        shared_hidden=1024,
    )
    return Case(spec=spec, sequences=1, micro_batches=micro_batches)
