"""What each way to hide or to save something is worth: the exchange, the received rows, the weights that arrive."""

from functools import partial
from typing import Any, NamedTuple

from coterie_parallel import ParallelConfig
from trainer.step_cases import Case

from multi_gpu_parts.bench import Bench
from multi_gpu_parts.steps import build, memory_formula, spec_of, time_steps, tiny_case

__all__ = ["run"]

# Name, settings of the dispatcher, whether new weights arrive under the next forward.
_Way = tuple[str, dict[str, Any], bool]
_WAYS: tuple[_Way, ...] = (
    ("copied rows", {}, False),
    ("copied rows, exchange behind the shared expert", {"overlap": True}, False),
    ("leased rows", {"saved_rows": "lease"}, False),
    ("leased rows, exchange behind the shared expert", {"saved_rows": "lease", "overlap": True}, False),
    ("fetched rows", {"saved_rows": "fetch"}, False),
    ("fetched rows, exchange behind the shared expert", {"saved_rows": "fetch", "overlap": True}, False),
    ("copied rows, weights arrive under the forward", {}, True),
    ("leased rows, both behind other work", {"saved_rows": "lease", "overlap": True}, True),
)


class _Seen(NamedTuple):
    """First loss and norm, and tokens/s/GPU."""

    loss: float
    norm: float
    speed: float


def run(bench: Bench) -> None:
    """Time steps of each way; none of them may change the first loss or the first norm."""
    case, world = _case(bench), bench.world
    bench.say(memory_formula(case, world, moment_bytes=4)[0])
    first: _Seen | None = None
    for way in _WAYS[::3] if bench.tiny else _WAYS:
        seen = bench.attempt(way[0], partial(_measure, bench, case, way, first))
        first = first or seen


def _measure(bench: Bench, case: Case, way: _Way, first: _Seen | None) -> _Seen:
    name, settings, late = way
    world = bench.world
    parallel = ParallelConfig(data=world, expert=world, dispatcher="rowwise", capacity_factor=1.25, **settings)
    built = build(bench, case, parallel, compiled=bench.settings.compiled, weights_arrive_late=late)
    result = built.step()
    row = time_steps(bench, built, warmups=1, num_data=world)
    found = _Seen(loss=result.loss, norm=result.gradient_norm, speed=row["tokens_per_s_per_gpu"])
    first = first or found
    # Sums of gradients may come in another order.
    if found.loss != first.loss or not abs(found.norm - first.norm) <= bench.tolerance * first.norm:
        bench.fault(f"{name}: first loss and norm {found.loss}, {found.norm} instead of {first.loss}, {first.norm}")
    ratio = found.speed / first.speed
    bench.row(name=name, over_the_first=ratio, first_loss=result.loss, layers=case.spec.num_layers, **row)
    built.close(bench)
    del built
    bench.free()
    return found


def _case(bench: Bench) -> Case:
    if bench.tiny:
        return tiny_case(num_experts=8)
    spec = spec_of(
        d_model=4096,
        num_layers=4,
        num_heads=32,
        num_kv_heads=8,
        max_sequence_length=8192,
        num_experts=8 * bench.world,
        top_k=4,
        expert_hidden=2048,
        shared_hidden=4096,
    )
    return Case(spec=spec, sequences=1, micro_batches=2)
