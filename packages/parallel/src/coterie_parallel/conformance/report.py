"""The command ``python -m coterie_parallel.conformance NAME --ranks 4``: does a dispatcher keep the contract?"""

import argparse
import time
from collections.abc import Sequence

from coterie_parallel.axis import Axis
from coterie_parallel.conformance.cases import CASES
from coterie_parallel.conformance.checks import case_problems
from coterie_parallel.dispatch import dispatcher_class, known_dispatchers
from coterie_parallel.local_ranks import run_on_local_ranks

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite on CPU ranks, print a line for each case, and return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m coterie_parallel.conformance",
        description="Check a dispatcher on batches with known answers: rows, order, sums and every gradient.",
        epilog=f"known dispatchers: {', '.join(known_dispatchers())}; packages register more by entry point",
    )
    parser.add_argument("name", metavar="NAME", help="name of the dispatcher")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes to start (default: 2)")
    parser.add_argument(
        "--case",
        action="append",
        choices=[case.name for case in CASES],
        metavar="CASE",
        help="run this case only; may be repeated",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S", help="time-out of an exchange (default: 120)"
    )
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks ({options.ranks}) must be at least 1")
    try:
        dispatcher = dispatcher_class(options.name)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    reason = dispatcher.supports(num_experts=options.ranks, expert_degree=options.ranks, alignment=1)
    if reason is not None:
        parser.error(reason)
    names = options.case or [case.name for case in CASES]
    print(f"dispatcher {options.name!r} on {options.ranks} ranks, {len(names)} cases", flush=True)
    start_s = time.perf_counter()
    by_rank = run_on_local_ranks(_problems, options.ranks, options.name, names, timeout_s=options.timeout_s)
    failed = 0
    for case in CASES:
        if case.name not in names:
            continue
        problems = [problem for found in by_rank for problem in found[case.name]]
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '} {case.name:18} {case.why}")
        # The first few say what is wrong; the rest is the same fault on other ranks.
        for problem in problems[:4]:
            print(f"       {problem}")
        if len(problems) > 4:
            print(f"       and {len(problems) - 4} more")
    took_s = time.perf_counter() - start_s
    print(f"{len(names) - failed} of {len(names)} cases right, in {took_s:.1f} s")
    return 1 if failed else 0


def _problems(axis: Axis, name: str, names: list[str]) -> dict[str, list[str]]:
    """Return the problems of each case on this rank."""
    dispatcher = dispatcher_class(name)
    return {case.name: case_problems(dispatcher, case, axis) for case in CASES if case.name in names}
