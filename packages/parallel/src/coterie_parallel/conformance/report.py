"""The command ``python -m coterie_parallel.conformance NAME --ranks 4``: does a dispatcher keep what it declares?"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

from coterie_parallel.axis import Axis
from coterie_parallel.conformance.cases import CASES
from coterie_parallel.conformance.checks import guarded_case_problems
from coterie_parallel.conformance.fitting import claims, fit_case
from coterie_parallel.dispatch import DeepEPOptions, Dispatcher, DispatchOptions, dispatcher_class, known_dispatchers
from coterie_parallel.local_ranks import run_on_local_ranks

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite on CPU ranks, print what is claimed and a line for each case, and return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m coterie_parallel.conformance",
        description="Check a dispatcher on batches with known answers: rows, order, sums and every gradient. What it "
        "declares to be weaker than the contract is held to what it declares.",
        epilog=f"known dispatchers: {', '.join(known_dispatchers())}; packages register more by entry point",
    )
    parser.add_argument("name", metavar="NAME", help="name of the dispatcher, or module:Class")
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
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of DispatchOptions, for example overflow=exact or deep_ep.payload=fp8; may be repeated",
    )
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks ({options.ranks}) must be at least 1")
    if not options.timeout_s > 0:
        parser.error(f"--timeout-s ({options.timeout_s:g}) must be above 0")
    try:
        dispatcher = _dispatcher(options.name)
        wishes = _wishes(options.option)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    problems = [] if wishes is None else dispatcher.option_problems(wishes)
    if problems:
        parser.error("; ".join(problems))
    reason = dispatcher.supports(num_experts=options.ranks, expert_degree=options.ranks, alignment=1)
    if reason is not None:
        parser.error(reason)
    names = options.case or [case.name for case in CASES]
    if all(fit_case(dispatcher, case, "cpu", wishes) is None for case in CASES if case.name in names):
        parser.error(
            f"dispatcher {options.name!r} takes no tokens on a CPU, and these ranks have no other device; on every GPU "
            "rank of an expert axis call coterie_parallel.conformance.conformance_problems(NAME, axis, device)"
        )
    print(f"dispatcher {options.name!r} on {options.ranks} ranks, {len(names)} cases; it claims", flush=True)
    for claim in claims(dispatcher, "cpu", wishes):
        print(f"  - {claim}", flush=True)
    start_s = time.perf_counter()
    by_rank = run_on_local_ranks(_problems, options.ranks, options.name, names, wishes, timeout_s=options.timeout_s)
    failed = 0
    for case in CASES:
        if case.name not in names:
            continue
        if not all(case.name in found for found in by_rank):
            print(f"not run {case.name}")
            failed += 1
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
    print(f"{len(names) - failed} of {len(names)} cases right by these claims, in {took_s:.1f} s")
    return 1 if failed else 0


def _dispatcher(name: str) -> type[Dispatcher]:
    """Return the class of a registered name, or of module:Class."""
    module, colon, attribute = name.partition(":")
    if not colon:
        return dispatcher_class(name)
    found = getattr(import_module(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Dispatcher)):
        raise ValueError(f"NAME ({name!r}) must be a subclass of coterie_parallel.Dispatcher")
    return found


def _wishes(settings: Sequence[str]) -> DispatchOptions | None:
    """Return the options of all KEY=VALUE, or None without any."""
    known = {field.name: getattr(DispatchOptions(), field.name) for field in fields(DispatchOptions)}
    del known["deep_ep"]
    known |= {f"deep_ep.{field.name}": getattr(DeepEPOptions(), field.name) for field in fields(DeepEPOptions)}
    known["deep_ep.max_tokens"] = 0  # None by default, and a number for who gives it
    chosen: dict[str, Any] = {}
    of_deep_ep: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            raise ValueError(f"--option ({setting!r}) must be KEY=VALUE with one of the keys {', '.join(known)}")
        table, name = (of_deep_ep, key.partition(".")[2]) if "." in key else (chosen, key)
        if name in table:
            raise ValueError(f"--option ({setting!r}) is given twice")
        if isinstance(known[key], bool):
            if value not in ("true", "false"):
                raise ValueError(f"--option ({setting!r}) must have the value true or false")
            table[name] = value == "true"
        else:
            try:
                table[name] = type(known[key])(value)
            except ValueError:
                kind = "an integer" if isinstance(known[key], int) else "a number"
                raise ValueError(f"--option ({setting!r}) must have {kind} as its value") from None
    if of_deep_ep:
        chosen["deep_ep"] = DeepEPOptions(**of_deep_ep)
    return DispatchOptions(**chosen) if chosen else None


def _problems(axis: Axis, name: str, names: list[str], options: DispatchOptions | None) -> dict[str, list[str]]:
    """Return the problems of each case that was run on this rank."""
    dispatcher = _dispatcher(name)
    found = {}
    for case in CASES:
        if case.name in names:
            found[case.name], goes_on = guarded_case_problems(dispatcher, case, axis, options=options)
            if not goes_on:
                break
    return found
