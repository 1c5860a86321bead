"""The conformance suite of the dispatchers on these ranks: rows, order, sums and gradients, bit for bit."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from coterie_parallel import DispatchOptions, dispatcher_class
from coterie_parallel.conformance import CASES, Case
from coterie_parallel.conformance.checks import guarded_case_problems

from multi_gpu_parts.bench import Bench

__all__ = ["run"]

_WAYS: tuple[tuple[str, str, DispatchOptions | None], ...] = (
    ("all_to_all", "", None),
    ("rowwise", "", DispatchOptions()),
    ("rowwise", "lease", DispatchOptions(saved_rows="lease")),
    ("rowwise", "fetch", DispatchOptions(saved_rows="fetch")),
    ("rowwise", "exact", DispatchOptions(overflow="exact")),
    ("rowwise", "buffers that must grow", DispatchOptions(capacity_factor=1.0)),
)
_TINY = ("aligned_16", "refusals")
_SHOWN = 4


def run(bench: Bench) -> None:
    """Run the suite for each dispatcher, and for DeepEP, where it is installed, layers against the reference."""
    for dispatcher, how, options in _WAYS:
        cases = [case for case in CASES if not bench.tiny or case.name in _TINY]
        _report(bench, ", ".join(filter(None, (dispatcher, how))), _suite(bench, dispatcher, cases, options))
    reason = dispatcher_class("deep_ep").supports(num_experts=8 * bench.world, expert_degree=bench.world, alignment=1)
    if reason is not None:
        bench.row(name="deep_ep", skipped=reason)
        return
    _report(bench, "deep_ep", _deep_ep(bench))


def _suite(
    bench: Bench, name: str, cases: list[Case], options: DispatchOptions | None
) -> Iterator[tuple[str, Callable[[], tuple[list[str], bool]]]]:
    made_by = dispatcher_class(name)
    for case in cases:
        yield case.name, lambda case=case: guarded_case_problems(made_by, case, bench.axis, bench.device, options)


def _report(bench: Bench, name: str, cases: Iterator[tuple[str, Callable[[], tuple[list[str], bool]]]]) -> None:
    begin = time.monotonic()
    num_cases = num_wrong = 0
    for case, problems_of in cases:
        problems, goes_on = problems_of()
        everywhere = bench.gather((problems, goes_on))
        found = [problem for one, _ in everywhere for problem in one]
        num_cases, num_wrong = num_cases + 1, num_wrong + bool(found)
        for problem in found[:_SHOWN] if bench.rank == 0 else ():
            bench.fault(f"{name}: {problem}")
        if not all(one for _, one in everywhere):
            raise AssertionError(f"{name}: the ranks do not meet any more after the case {case}")
    bench.row(name=name, cases=num_cases, wrong=num_wrong, seconds=time.monotonic() - begin)


def _deep_ep(bench: Bench) -> Iterator[tuple[str, Callable[[], tuple[list[str], bool]]]]:
    """Yield cases within what DeepEP can do: bf16, and widths that are multiples of 256."""
    from coterie_parallel.dispatch.deep_ep import DeepEPDispatcher, DeepEPOptions
    from parallel.deep_ep_checks import BASE, Layer

    options = DeepEPOptions(hybrid=False, max_tokens=160)
    uneven = replace(BASE, num_tokens=(65, 129), experts_per_rank=8, top_k=8, alignment=128, routed=0.9)
    for case in (uneven, replace(uneven, name="empty_rank", num_tokens=(0, 33))):

        def problems(case: Case = case) -> tuple[list[str], bool]:
            dispatcher = DeepEPDispatcher(
                num_experts=8 * bench.world, axis=bench.axis, alignment=case.alignment, deep_ep=options
            )
            try:
                layers = [
                    Layer(dispatcher, case, bench.rank, bench.world, number, bench.device.type) for number in range(2)
                ]
                for layer in reversed(layers):
                    layer.backward()
                found = [f"{case.name}: {problem}" for layer in layers for problem in layer.problems()]
                said = dispatcher.grow()
            finally:
                dispatcher.close()
            return found if said is None else [*found, f"{case.name}: {said}"], True

        yield case.name, problems
