"""The conformance suite of the dispatchers on these ranks: rows, order, sums and gradients, as each declares them."""

import time
from collections.abc import Callable, Iterator

from coterie_parallel import DeepEPOptions, DispatchOptions, dispatcher_class
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
_DEEP_EP = (
    ("", DeepEPOptions(hybrid=False)),
    ("fp8", DeepEPOptions(hybrid=False, payload="fp8")),
    ("deterministic", DeepEPOptions(hybrid=False, deterministic=True)),
)
_TINY = ("aligned_16", "refusals")
_SHOWN = 4


def run(bench: Bench) -> None:
    """Run the suite for each dispatcher, for DeepEP where it is installed, and held to what it declares."""
    cases = [case for case in CASES if not bench.tiny or case.name in _TINY]
    for dispatcher, how, options in _WAYS:
        _report(bench, ", ".join(filter(None, (dispatcher, how))), _suite(bench, dispatcher, cases, options))
    reason = dispatcher_class("deep_ep").supports(num_experts=8 * bench.world, expert_degree=bench.world, alignment=1)
    if reason is not None:
        bench.row(name="deep_ep", skipped=reason)
        return
    for how, settings in _DEEP_EP:
        name, options = ", ".join(filter(None, ("deep_ep", how))), DispatchOptions(deep_ep=settings)
        problems = dispatcher_class("deep_ep").option_problems(options)
        if problems:
            bench.row(name=name, skipped="; ".join(problems))
        else:
            _report(bench, name, _suite(bench, "deep_ep", cases, options))


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
