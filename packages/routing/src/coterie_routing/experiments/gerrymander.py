"""Show where the balance score and the load part ways: `python -m coterie_routing.experiments.gerrymander`.

Two parts. In the first a balance loss is descended alone, from starts that leave the score room to lie. In the second a
small byte model is trained on real text of several domains under each loss, scope and bias rule. Everything is
seeded: on one machine the same arguments give the same table.
"""

import argparse
import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from coterie_routing.bias import BiasRule
from coterie_routing.experiments.corpus import Domain, folder_corpus, machine_corpus
from coterie_routing.experiments.descent import (
    Descent,
    Loss,
    Start,
    byte_start,
    crowded_start,
    descend,
    second_choice_start,
)
from coterie_routing.experiments.tables import descent_table, draw_plot, findings, training_table
from coterie_routing.experiments.training import Recipe, Settings, Trained, train

__all__ = ["GROUPS", "main", "starts"]

_LOSSES: tuple[Loss, ...] = ("dot_product", "squared_load")
_USUAL, _STRONG = 0.02, 1.0


def _with_loss(loss: Loss, scope: Literal["sequence", "micro_batch", "step"], coefficient: float = _USUAL) -> Recipe:
    times = "" if coefficient == _USUAL else f", x {coefficient / _USUAL:g}"
    return Recipe(name=f"{loss}, {scope}{times}", loss=loss, scope=scope, coefficient=coefficient)


_NONE = Recipe(name="none")
# Five times the usual rate, for a training that is so short.
_SIGN = Recipe(name="bias, sign", bias=BiasRule(kind="sign", rate=0.005))
_PROPORTIONAL = Recipe(name="bias, proportional", bias=BiasRule(kind="proportional", rate=0.01))
_QUANTILE = Recipe(name="bias, quantile", bias=BiasRule(kind="quantile", rate=1.0))
# A Switch-like router under everything, and one with many small experts under the main losses.
GROUPS: tuple[tuple[Settings, tuple[Recipe, ...]], ...] = (
    (
        Settings(num_experts=16, expert_width=32, top_k=1, score_function="softmax"),
        (
            _NONE,
            _with_loss("dot_product", "sequence"),
            _with_loss("dot_product", "micro_batch"),
            _with_loss("dot_product", "step"),
            _with_loss("dot_product", "sequence", _STRONG),
            _with_loss("dot_product", "step", _STRONG),
            _with_loss("squared_load", "sequence"),
            _with_loss("squared_load", "micro_batch"),
            _with_loss("squared_load", "step"),
            _with_loss("squared_load", "step", _STRONG),
            _SIGN,
            _PROPORTIONAL,
            _QUANTILE,
        ),
    ),
    (
        Settings(num_experts=64, expert_width=8, top_k=4, score_function="sigmoid"),
        (
            _NONE,
            _with_loss("dot_product", "sequence"),
            _with_loss("dot_product", "step"),
            _with_loss("squared_load", "sequence"),
            _with_loss("squared_load", "step"),
            _SIGN,
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, print it, write it to a folder if one is given, and return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot write to {options.out}: {error.strerror}")
    started = time.perf_counter()
    amounts = {"most_bytes": 600_000, "fewest_bytes": 50_000, "seed": options.seed}
    changes: dict[str, int] = {"steps": options.steps, "seed": options.seed}
    if options.quick:
        amounts |= {"most_bytes": 200_000, "fewest_bytes": 1000}
        changes |= {"steps": 3, "width": 16, "sequences": 2, "length": 32, "held_out_sequences": 2}
    try:
        domains = machine_corpus(**amounts) if options.corpus is None else folder_corpus(options.corpus, **amounts)
    except ValueError as error:
        parser.error(str(error))
    # With keyword arguments from a dictionary mypy cannot see that each number goes to a field of type int.
    groups = [(replace(settings, **changes), recipes) for settings, recipes in GROUPS]  # type: ignore[arg-type]
    processes = 1 if options.quick else options.processes
    begun = starts(domains, options.seed, options.quick)
    descents, results = _run(groups, domains, begun, processes)
    lines = _lines(domains, descents, results)
    if options.quick:
        lines = ["--quick: a few tiny steps, to see that it runs; the numbers mean nothing", "", *lines]
    else:
        lines += ["", "What came out:", *(f"- {line}." for line in findings(descents, results))]
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        (options.out / "gerrymandering.txt").write_text(text + "\n", encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is None:
            print('no plot: it needs matplotlib; pip install "coterie-routing[plot]"', file=sys.stderr)
        else:
            draw_plot(descents, results, options.out / "gerrymandering.svg")
    print(f"{time.perf_counter() - started:.0f} s with {processes} processes of one thread", file=sys.stderr)
    return 0


def starts(domains: Sequence[Domain], seed: int, quick: bool) -> list[Start]:
    """Return the starts of the descents."""
    few = 8
    num_tokens = 256 if quick else 4096
    on_bytes = partial(byte_start, domains, num_tokens=num_tokens, steps=few if quick else 200, seed=seed)
    return [
        crowded_start(noise=0.0, steps=few if quick else 60, seed=seed),
        crowded_start(noise=0.01, steps=few if quick else 60, seed=seed),
        second_choice_start(steps=few if quick else 400, seed=seed),
        on_bytes(num_experts=16, top_k=1),
        on_bytes(num_experts=32, top_k=4),
    ]


def _run(
    groups: Sequence[tuple[Settings, Sequence[Recipe]]],
    domains: Sequence[Domain],
    begun: Sequence[Start],
    processes: int,
) -> tuple[list[Descent], list[Trained]]:
    """Return the results in the order of the starts and recipes, whatever the number of processes."""
    pairs = [(start, loss) for start in begun for loss in _LOSSES]
    jobs = [partial(descend, start, loss) for start, loss in pairs]
    trainings = [partial(train, recipe, settings, domains) for settings, recipes in groups for recipe in recipes]
    if processes == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [job() for job in jobs], [training() for training in trainings]
        finally:
            torch.set_num_threads(threads)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        trained = [pool.submit(training) for training in trainings]
        descended = [pool.submit(job) for job in jobs]
        return [one.result() for one in descended], [one.result() for one in trained]


def _lines(domains: Sequence[Domain], descents: Sequence[Descent], results: Sequence[Trained]) -> list[str]:
    lines = ["Text:"]
    lines += [
        f"  {one.name}: {one.train.numel()} bytes to train on, {one.held_out.numel()} held out, {one.num_files} "
        f"documents ({one.source})"
        for one in domains
    ]
    lines += ["", "1. A balance loss descended alone", *descent_table(descents)]
    one_of = results[0].settings
    lines += [
        "",
        f"2. A byte model trained: {one_of.steps} steps of {one_of.micro_batches} micro-batches of {one_of.sequences} "
        f"sequences of {one_of.length} bytes, each micro-batch of one domain; coefficient {_USUAL} or, where it says "
        f"x {_STRONG / _USUAL:g}, {_STRONG}; seed {one_of.seed}",
    ]
    for settings in dict.fromkeys(one.settings for one in results):
        lines += [
            "",
            f"{settings.num_experts} experts, top-{settings.top_k}, {settings.score_function}",
            *training_table([one for one in results if one.settings == settings]),
        ]
    return lines


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coterie_routing.experiments.gerrymander",
        description="Compare balance losses, scopes and bias rules: what the score says and what the load is.",
    )
    parser.add_argument("--steps", type=_at_least_one, default=240, help="training steps of each model (240)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, text and noise (0)")
    parser.add_argument("--out", type=Path, help="folder for gerrymandering.txt and gerrymandering.svg")
    parser.add_argument("--corpus", type=Path, help="folder with one folder of text files for each domain")
    parser.add_argument("--processes", type=_at_least_one, default=2, help="processes of one thread each (2)")
    parser.add_argument("--quick", action="store_true", help="a few tiny steps, to see that it runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
