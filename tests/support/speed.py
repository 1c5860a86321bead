"""Measure how fast ours is against a named reference, in one process, in a way that a noisy machine cannot turn around.

The two are called in turn, the order changes each round, and the result is the median of the ratios of the rounds: a
machine that slows down for a second slows both. Nothing is timed before its check has passed. A function that starts
work on a device must wait for it before it returns.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch

__all__ = ["Measurement", "Pair", "Scaling", "measure", "one_torch_thread"]


@dataclass(frozen=True)
class Pair:
    """Ours and the reference that it is measured against; `check` raises unless both give the same result.

    The floor of a pair stands under its name in the `[floors]` table of the folder's speed.toml.
    """

    name: str
    ours: Callable[[], object]
    reference: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True)
class Scaling:
    """The same work at sizes N and 2N; time(2N) / time(N) must not be above `limit`.

    With no limit here, it stands under the name in the `[limits]` table of the folder's speed.toml.
    """

    name: str
    small: Callable[[], object]
    large: Callable[[], object]
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Median times and the median ratio of the rounds, with its lower and upper quartile.

    For a Pair, `ours_ms` and `reference_ms` are what they say and a ratio above 1 means that ours is faster. For a
    Scaling they are the times of the small and of the large size.
    """

    name: str
    ours_ms: float
    reference_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def measure(
    subject: Pair | Scaling,
    *,
    budget_s: float = 3.0,
    min_rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Time a pair by turns for `budget_s` seconds, and for at least `min_rounds` rounds.

    Raises what the pair's check raises, and then times nothing. Torch runs on one thread meanwhile.
    """
    with one_torch_thread():
        if isinstance(subject, Pair):
            subject.check()
            first, second = subject.ours, subject.reference
        else:
            first, second = subject.small, subject.large
        rounds = _rounds_by_turns(first, second, budget_s=budget_s, min_rounds=min_rounds, clock=clock)
    ratios = [second_s / first_s for first_s, second_s in rounds]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Measurement(
        name=subject.name,
        ours_ms=median(first_s for first_s, _ in rounds) * 1e3,
        reference_ms=median(second_s for _, second_s in rounds) * 1e3,
        ratio=median(ratios),
        ratio_low=low,
        ratio_high=high,
        rounds=len(rounds),
    )


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Hold torch to one thread inside the block: on a shared machine a second one comes and goes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rounds_by_turns(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    budget_s: float,
    min_rounds: int,
    clock: Callable[[], float],
) -> list[tuple[float, float]]:
    first()  # One call of each that does not count: caches and lazy set-up.
    second()
    rounds: list[tuple[float, float]] = []
    start = clock()
    while len(rounds) < min_rounds or clock() - start < budget_s:
        if len(rounds) % 2 == 0:
            first_s = _seconds(first, clock)
            second_s = _seconds(second, clock)
        else:
            second_s = _seconds(second, clock)
            first_s = _seconds(first, clock)
        rounds.append((first_s, second_s))
    return rounds


def _seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    # A clock may not tick during a very short call; a ratio needs a positive time.
    return max(clock() - start, 1e-9)
