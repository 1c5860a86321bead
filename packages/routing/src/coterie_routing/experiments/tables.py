"""The tables, the findings in words and the plot of the gerrymandering experiment."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie_routing.experiments.descent import Descent
from coterie_routing.experiments.training import Trained

__all__ = ["descent_table", "draw_plot", "findings", "training_table"]

# A difference of means of a tenth of a course below this is no difference: some starts never come to rest.
_NO_CHANGE = 0.002
_SAID_EVEN = 1.005
_NOT_EVEN = 1.05


def descent_table(descents: Sequence[Descent]) -> list[str]:
    """Return the lines of the table of descents; "end" is the mean of the last tenth, for some never come to rest."""
    lines = [
        f"{'start':40}{'loss descended':16}{'score: start':>13}{'lowest':>9}{'end':>8}"
        f"{'1+CV^2: start':>15}{'best':>8}{'end':>8}  verdict on the end"
    ]
    lines += [
        f"{one.start:40}{one.loss:16}{one.scores[0]:13.3f}{min(one.scores):9.3f}{_end(one.scores):8.3f}"
        f"{one.load_scores[0]:15.3f}{min(one.load_scores):8.3f}{_end(one.load_scores):8.3f}  {one.report.verdict}"
        for one in descents
    ]
    return lines


def training_table(results: Sequence[Trained]) -> list[str]:
    """Return the lines of the table of trained models; all numbers are of held-out text."""
    lines = [
        f"{'balancing':32}{'bits/byte':>10}{'score':>8}{'(whole)':>9}{'1+CV^2':>8}{'max/mean':>10}{'dead':>6}"
        f"{'wasted':>8}{'margin':>8}{'domains':>9}  verdict"
    ]
    for one in results:
        report = one.report
        assert report.wins is not None
        lines.append(
            f"{one.recipe.name:32}{one.bits_per_byte:10.3f}{report.score:8.3f}{report.step.score:9.3f}"
            f"{report.load_score:8.3f}{report.step.max_over_mean:10.2f}{report.step.dead_experts:6.0f}"
            f"{100 * report.wins.wasted:7.1f}%{report.wins.margin:8.4f}{report.specialisation or 0.0:9.3f}"
            f"  {report.verdict}"
        )
    return lines


def findings(descents: Sequence[Descent], results: Sequence[Trained]) -> list[str]:
    """Return what the numbers say, in sentences that are made from them."""
    courses = [(f"{one.start}, {one.loss}", one.scores, one.load_scores) for one in descents]
    praised = [
        f"{name} (score {_end(scores):.3f}, 1 + CV^2 {_end(loads):.3f})"
        for name, scores, loads in courses
        if _end(scores) <= _SAID_EVEN and _end(loads) > _NOT_EVEN
    ]
    courses += [(one.label, one.scores, one.load_scores) for one in results]
    halves = [(name, _middle(scores), _end(scores), _middle(loads), _end(loads)) for name, scores, loads in courses]
    opposite = [
        f"{name} (score {score:.3f} to {last_score:.3f}, 1 + CV^2 {load:.3f} to {last_load:.3f})"
        for name, score, last_score, load, last_load in halves
        if last_score < score - _NO_CHANGE and last_load > load + _NO_CHANGE
    ]
    hidden = [
        f"{one.label} (score {one.report.score:.3f}, 1 + CV^2 {one.report.load_score:.3f})"
        for one in results
        if one.report.verdict == "gerrymandered"
    ]
    return [
        f"Descents that ended with a score of {_SAID_EVEN} or less and 1 + CV^2 above {_NOT_EVEN}: {_listed(praised)}",
        f"Score down and load worse, from the middle of a descent or a training to its end: {_listed(opposite)}",
        f"Trained models with the verdict gerrymandered on held-out text: {_listed(hidden)}",
        *_scope_findings(results),
    ]


def draw_plot(descents: Sequence[Descent], results: Sequence[Trained], path: Path) -> None:
    """Draw score and load into a file: the course of each descent, and a row for each trained model.

    Raises:
        ModuleNotFoundError: If matplotlib is not there.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    # The same numbers give the same file.
    with pyplot.rc_context({"svg.hashsalt": "gerrymandering", "svg.fonttype": "none", "font.size": 9}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
        _draw_courses(left, descents)
        _draw_models(right, results)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)
        pyplot.close(figure)


def _draw_courses(axes: Any, descents: Sequence[Descent]) -> None:
    colours: dict[str, str] = {}
    for one in descents:
        colour = colours.setdefault(one.start, f"C{len(colours)}")
        is_dot = one.loss == "dot_product"
        scores, loads = _smooth(one.scores), _smooth(one.load_scores)
        axes.plot(scores, loads, color=colour, lw=1.2, ls="-" if is_dot else ":", label=one.start if is_dot else None)
        axes.plot(scores[0], loads[0], marker="o", mfc="white", color=colour, ls="")
        axes.plot(scores[-1], loads[-1], marker="o" if is_dot else "s", color=colour, ls="")
    low, high = axes.get_xlim()
    axes.axvline(1, color="grey", lw=0.6)
    axes.axhline(1, color="grey", lw=0.6)
    axes.plot([1, high], [1, high], color="grey", lw=0.6, ls="--", label="score = 1 + CV$^2$")
    axes.set_xlim(low, high)
    axes.set_xlabel("dot-product score; left of 1: said to be better than even")
    axes.set_ylabel("1 + CV$^2$ of the load; 1: even")
    axes.set_title("A loss descended alone (solid: dot product, dotted: squared load)")
    axes.legend(fontsize=7)


def _draw_models(axes: Any, results: Sequence[Trained]) -> None:
    """Draw one row for each model: its score and its load, joined by a line."""
    low, high = 0.97, 1.45
    for row, one in enumerate(results):
        score, load = one.report.score, one.report.load_score
        axes.plot([min(score, high), min(load, high)], [row, row], color="lightgrey", zorder=1)
        first = row == 0
        axes.plot(min(score, high), row, "o", mfc="white", color="C0", label="score in its scope" if first else None)
        axes.plot(min(load, high), row, "s", ms=4, color="C3", label="1 + CV$^2$ of the load" if first else None)
        if max(score, load) > high:
            axes.annotate(f"outside: {score:.2f}, {load:.2f}  ", (high, row), ha="right", va="bottom", fontsize=7)
    axes.axvline(1, color="grey", lw=0.6)
    axes.set_xlim(low, high + 0.01)
    axes.set_yticks(range(len(results)), [one.label for one in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("1: even")
    axes.set_title("Trained models, held-out text")
    axes.legend(fontsize=7, loc="lower right")


def _scope_findings(results: Sequence[Trained]) -> list[str]:
    lines = []
    for key in sorted({_key(one) for one in results if one.recipe.loss is not None}):
        by_scope = [
            f"{one.recipe.scope} {one.report.specialisation:.3f}"
            for one in results
            if _key(one) == key and one.report.specialisation is not None
        ]
        if len(by_scope) > 1:
            top_k, loss, coefficient = key
            what = f"top-{top_k} with {loss}, coefficient {coefficient:g}"
            lines.append(f"Distance of the domains from the whole by scope, {what}: {', '.join(by_scope)}")
    return lines


def _key(one: Trained) -> tuple[int, str, float]:
    return one.settings.top_k, str(one.recipe.loss), one.recipe.coefficient


def _end(course: Sequence[float]) -> float:
    count = max(1, len(course) // 10)
    return sum(course[-count:]) / count


def _middle(course: Sequence[float]) -> float:
    """Return the mean of the tenth before the middle."""
    return _end(course[: max(1, len(course) // 2)])


def _smooth(course: Sequence[float]) -> list[float]:
    """Return the start, then means of twentieths: a course that jumps at every step would be a blot."""
    count = max(1, len(course) // 20)
    return [course[0]] + [
        sum(course[at : at + count]) / len(course[at : at + count]) for at in range(0, len(course), count)
    ]


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names) if names else "none"
