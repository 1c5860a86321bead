"""The command `coterie verify`: the same numbers in every layout, for a user's own config scaled down."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie_trainer.arguments import loading

if TYPE_CHECKING:
    from coterie_parallel.local_ranks import RankPool

    from coterie_trainer.config import Config
    from coterie_trainer.verify.layout import Layout
    from coterie_trainer.verify.running import Outcome

__all__ = ["DETAILS", "add_verify"]

_LIMIT_S = 120.0

DETAILS = """\
Runs 3 steps of the config, scaled down, in each layout on CPU processes, and compares with one process: the load of
every expert, loss, balance loss, gradient norm, every gradient and every parameter after each step. Relative
differences (norm of the difference over norm of the expected) above 1e-5 fail, and so do replicas of a tensor that
are not bit-equal. Printed are the largest, and the first tensor that differs: where, and by how much.

Kept are the kinds of layers, the number of experts, all options of routing, attention, norms, tying, losses and bias
rule, the optimizer, and the [parallel] table but its degrees. Scaled are widths, heads, the number of layers, the
vocabulary, the sequence length and the sequences of a step; all is fp32, the learning rate is at its highest, and eps
of AdamW is at least 1e-4, as with less the rounding of a gradient near zero would be an update of any size. Documents
are made up, of many lengths, with padding, sequences of ignored labels, and ranks without a token. No data is read.

A layout is written as "pipeline=2 data=4 expert=2 accumulation=2 schedule=gpipe dispatcher=rowwise"; it can also set
the other keys of the [parallel] table (layers_per_stage=1+2), gradient_sharding, gradient_overlap, and recompute=block,
attention+experts or none. What it leaves out is 1 for the four numbers, else as in the config; layers are dealt as
evenly as can be, and another dispatcher than the config's has default buffers."""


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie verify`, but the config, to its parser."""
    parser.add_argument(
        "--layouts",
        action="extend",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help='what to compare, each as "data=4 expert=2" in quotes (default: several, on up to 8 processes)',
    )
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    with loading():
        from coterie_trainer.verify.layout import reference_config
        from coterie_trainer.verify.running import run_layout
        from coterie_trainer.verify.scaling import scaled, scaled_values, write_vocabulary

    config, layouts = _checked(options)
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder, _pool(layouts) as pool:
        small = scaled(config, Path(folder), layouts)
        write_vocabulary(Path(small.data.path))
        print("scaled: " + ", ".join(scaled_values(config, small)), flush=True)
        (expected,) = pool.run(run_layout, 1, reference_config(small))
        width = max(len(str(layout)) for layout in layouts)
        print("\nlargest differences: relative by tensor; last column: of one element", flush=True)
        print(f"{'layout':<{width}}" + _header(), flush=True)
        num_wrong = sum(not _compare(layout, small, expected, pool, width) for layout in layouts)
    what = "1 layout" if len(layouts) == 1 else f"{len(layouts)} layouts"
    print(f"\n{what}, {num_wrong} not as one process" if num_wrong else f"\n{what}, all as one process")
    return 1 if num_wrong else 0


def _pool(layouts: "Sequence[Layout]") -> "RankPool":
    from coterie_parallel.local_ranks import RankPool

    preload = ["coterie_trainer.verify.running"]
    if any(layout.pipeline > 1 for layout in layouts):
        preload.append("torch.distributed.pipelining")  # seconds, and once for all processes
    return RankPool(timeout_s=_LIMIT_S, limit_s=_LIMIT_S, preload=preload)


def _checked(options: argparse.Namespace) -> "tuple[Config, list[Layout]]":
    """Read config and layouts; raise one report of all that is wrong with either."""
    from coterie_trainer.config import ConfigError, load_config
    from coterie_trainer.verify.layout import default_layouts, parse_layout
    from coterie_trainer.verify.scaling import verify_problems

    layouts, problems = [], []
    for text in options.layouts:
        layout, faults = parse_layout(text)
        layouts += [] if layout is None else [layout]
        problems += [f'layout "{text}": {fault}' for fault in faults]
    try:
        config = load_config(options.config, options.set)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems], options.config) from None
    layouts = layouts if options.layouts else default_layouts(config)
    problems += verify_problems(config, layouts)
    if problems:
        raise ConfigError(problems, options.config)
    return config, layouts


def _header() -> str:
    from coterie_trainer.verify.comparison import KINDS

    return "".join(f"  {kind:>12}" for kind in (*KINDS, "element"))


def _compare(layout: "Layout", config: "Config", expected: "Outcome", pool: "RankPool", width: int) -> bool:
    """Run one layout, print its line and what is wrong, and return whether it agrees."""
    from coterie_parallel.local_ranks import RankError

    from coterie_trainer.verify.comparison import KINDS, compare
    from coterie_trainer.verify.layout import layout_config
    from coterie_trainer.verify.running import run_layout

    begins_line = sys.stdout.isatty()  # a layout may take a minute
    if begins_line:
        print(f"{layout!s:<{width}}", end="", flush=True)
    name = "" if begins_line else f"{layout!s:<{width}}"
    try:
        found = pool.run(run_layout, layout.world, layout_config(layout, config))[0]
    except RankError as error:
        print(f"{name}  failed: {error}", flush=True)
        return False
    comparison = compare(expected, found)
    figures = [*(comparison.largest[kind] for kind in KINDS), max(comparison.largest_element.values())]
    verdict = "same" if comparison.agrees else "DIFFERS"
    print(name + "".join(f"  {figure:>12.1e}" for figure in figures) + f"  {verdict}", flush=True)
    for text in comparison.problems():
        print(f"    {text}", flush=True)
    return comparison.agrees
