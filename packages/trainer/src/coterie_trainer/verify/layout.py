"""One way to run the same optimizer step: how it is split over ranks and micro-batches, and by which back-ends."""

import dataclasses
import itertools
from dataclasses import dataclass

from coterie_parallel import ParallelConfig
from coterie_parallel.pipeline.stages import SCHEDULES, micro_batch_problems, spread_layers

from coterie_trainer.config import Config, ConfigError, config_from_dict, config_to_dict
from coterie_trainer.reading import apply_override

__all__ = ["Layout", "default_layouts", "layout_config", "layout_problems", "parse_layout", "reference_config"]

MOST_RANKS = 32
_COUNTS = ("pipeline", "data", "expert", "accumulation")
_BUFFERS = ("overflow", "capacity_factor", "saved_rows", "deep_ep")
# What a layout may say besides: settings that must not change a number. Of time-outs there is one for all, and DeepEP
# runs on no layout that is compared here.
_PARALLEL = tuple(
    item.name
    for item in dataclasses.fields(ParallelConfig)
    if item.name not in (*_COUNTS, "pipeline_schedule", "timeout_s", "deep_ep")
)
_SHORT = {"pipeline_schedule": "schedule"}
_LONG = {short: name for name, short in _SHORT.items()}
_OPTIMIZER = ("gradient_sharding", "gradient_overlap")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is split, and settings besides; what is not named stays as in the config.

    Attributes:
        pipeline: ranks that share the layers.
        data: ranks that share the sequences.
        expert: ranks that share the experts; divides ``data``.
        accumulation: micro-batches of a rank in one step.
        settings: names and values, as text: keys of the ``[parallel]`` table, of which ``pipeline_schedule`` is called
            "schedule" and ``layers_per_stage`` has numbers joined by "+"; "gradient_sharding", "gradient_overlap"; or
            "recompute" with names joined by "+", or "none". One that names another dispatcher than the config has
            default buffers, but for what it names of them.
    """

    pipeline: int = 1
    data: int = 1
    expert: int = 1
    accumulation: int = 1
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data

    def schedule(self, config: Config) -> str:
        """Return the name of the pipeline's schedule in this layout of ``config``."""
        return dict(self.settings).get("schedule", config.parallel.pipeline_schedule)

    def num_stages(self, config: Config) -> int:
        """Return how many stages this layout of ``config`` has; 0 if its settings tell no number."""
        schedule, per_rank = self.schedule(config), dict(self.settings).get("stages_per_rank")
        if schedule not in SCHEDULES or not (per_rank or "0").isdecimal():
            return 0
        if self.pipeline == 1:
            return 1
        return self.pipeline * (int(per_rank or 0) or SCHEDULES[schedule].stages_per_rank or 2)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """The numbers of the setting of this name; none where it is not there."""
        stated = dict(self.settings).get("layers_per_stage")
        return () if stated is None else tuple(map(int, stated.split("+")))

    def __str__(self) -> str:
        counts = [(name, getattr(self, name)) for name in _COUNTS]
        named = [f"{name}={value}" for name, value in counts if value != 1 or name == "data"]
        return " ".join([*named, *(f"{name}={value}" for name, value in self.settings)])


def parse_layout(text: str) -> tuple[Layout | None, list[str]]:
    """Read a layout such as "data=4 expert=2 dispatcher=rowwise"; return it, or None and all that is wrong with it."""
    counts: dict[str, int] = {}
    settings: dict[str, str] = {}
    problems = []
    known = [*_COUNTS, *_SHORT.values(), *_PARALLEL, *_OPTIMIZER, "recompute"]
    for part in text.split():
        name, equals, value = part.partition("=")
        name = _SHORT.get(name, name)
        if not equals or not value:
            problems.append(f"{part!r} must be NAME=VALUE, as in data=4")
        elif name not in known:
            problems.append(f"{name!r} is unknown; known: {', '.join(known)}")
        elif name in counts or name in settings:
            problems.append(f"{name} is given twice")
        elif name == "layers_per_stage" and not all(size.isdecimal() for size in value.split("+")):
            problems.append(f"{name} ({value}) must be whole numbers joined by +, as in 1+2")
        elif name not in _COUNTS:
            settings[name] = value
        elif not value.isdecimal() or int(value) < 1:
            problems.append(f"{name} ({value}) must be a whole number of at least 1")
        else:
            counts[name] = int(value)
    if not text.split():
        problems.append("it names nothing; write for example data=4 expert=2")
    return (None if problems else Layout(**counts, settings=tuple(settings.items()))), problems


def layout_config(layout: Layout, config: Config) -> Config:
    """Return the config of one layout; the sequences of a step are those of ``config``, in other micro-batches.

    Where nothing says how many layers a stage has, their numbers differ by one at most.

    Raises:
        ConfigError: with all that keeps this layout from running.
    """
    table = config_to_dict(config)
    count = config.train.sequences_per_step // (layout.data * layout.accumulation)
    table["train"]["sequences_per_micro_batch"] = max(1, count)
    table["parallel"].update(pipeline=layout.pipeline, data=layout.data, expert=layout.expert)
    if dict(layout.settings).get("dispatcher", config.parallel.dispatcher) != config.parallel.dispatcher:
        table["parallel"].update({name: getattr(ParallelConfig(), name) for name in _BUFFERS})
    for name, value in layout.settings:
        if name == "recompute":
            table["train"]["recompute"] = [] if value == "none" else value.split("+")
        elif name == "layers_per_stage":
            table["parallel"][name] = list(layout.layers_per_stage)
        else:
            table_name = "optimizer" if name in _OPTIMIZER else "parallel"
            malformed = apply_override(table, f"{table_name}.{_LONG.get(name, name)}={value}")
            assert malformed is None, malformed
    num_stages, num_layers = layout.num_stages(config), config.model.num_layers
    if layout.pipeline > 1 and 0 < num_stages <= num_layers and not table["parallel"]["layers_per_stage"]:
        table["parallel"]["layers_per_stage"] = list(spread_layers(num_layers, num_stages))
    return config_from_dict(table, world=layout.world, source=str(layout))


def layout_problems(layout: Layout, config: Config) -> list[str]:
    """Return all that keeps a layout of ``config`` from running on CPU ranks of this machine."""
    if layout.world > MOST_RANKS:
        product = f"pipeline ({layout.pipeline}) x " if layout.pipeline > 1 else ""
        return [f"{product}data ({layout.data}) means as many processes on this machine; at most {MOST_RANKS} work"]
    if dict(layout.settings).get("dispatcher", config.parallel.dispatcher) == "deep_ep":
        return ["parallel: dispatcher (deep_ep) needs GPUs, and layouts are compared on the CPU; name another one"]
    try:
        full = layout_config(layout, config)
    except ConfigError as error:
        return [_in_words_of_layouts(problem, layout, config) for problem in error.problems]
    if full.parallel.overflow == "drop":
        return [
            "parallel: overflow (drop) leaves out other rows in every layout, so none can agree; compare with "
            "overflow=grow or overflow=exact"
        ]
    return []


def _in_words_of_layouts(problem: str, layout: Layout, config: Config) -> str:
    """Return a problem of a layout's config; what it says of micro-batches as a layout says it, in ``accumulation``."""
    if not problem.startswith("train: micro-batches of a rank in a step"):
        return problem

    def faults(number: int) -> list[str]:
        return micro_batch_problems(layout.schedule(config), layout.pipeline, layout.num_stages(config), number)

    (text,) = faults(layout.accumulation)
    works = next(number for number in itertools.count(layout.accumulation) if not faults(number))
    said = text.replace("micro-batches of a rank in a step", "accumulation")
    return f"{said}; write accumulation={works}, the next that works"


def reference_config(config: Config) -> Config:
    """Return the config of one process with one micro-batch and nothing clever: what every layout is compared with."""
    plain = dataclasses.replace(ParallelConfig(), dispatcher="local", timeout_s=config.parallel.timeout_s)
    train = dataclasses.replace(config.train, recompute=())
    optimizer = dataclasses.replace(config.optimizer, gradient_sharding=False)
    return layout_config(Layout(), dataclasses.replace(config, parallel=plain, train=train, optimizer=optimizer))


def default_layouts(config: Config) -> list[Layout]:
    """Return the layouts that are compared when the user names none: those that the experts of ``config`` fit."""
    own, other = config.parallel.dispatcher, "rowwise"
    if own in ("local", "deep_ep"):  # neither exchanges rows between CPU ranks
        own = "all_to_all"
    elif own == "rowwise":
        other = "all_to_all"
    texts = [
        f"data=1 accumulation=4 dispatcher={own}",
        f"data=2 dispatcher={own}",
        f"data=2 expert=2 accumulation=4 dispatcher={own}",
        f"data=2 expert=2 dispatcher={own} recompute=block",
        f"data=4 expert=2 dispatcher={own}",
        f"data=4 expert=2 dispatcher={other}",
        f"data=4 expert=4 accumulation=2 dispatcher={other} recompute=block",
        f"data=8 expert=4 dispatcher={own}",
        f"pipeline=2 data=1 accumulation=4 schedule=1f1b dispatcher={own}",
        f"pipeline=2 data=2 expert=2 accumulation=4 schedule=zbv dispatcher={own} recompute=block",
        f"pipeline=2 data=2 expert=2 accumulation=2 schedule=interleaved_1f1b dispatcher={other}",
        f"pipeline=4 data=2 expert=2 accumulation=4 schedule=gpipe dispatcher={own}",
    ]
    if config.parallel.data_parallel == "fsdp":  # which has all experts on every rank, and at least two ranks
        texts = ["data=2", "data=2 accumulation=4", "data=4 recompute=block", "data=8"]
    layouts = [layout for layout, _ in map(parse_layout, texts) if layout is not None]
    if config.optimizer.gradient_sharding:  # which no pipeline has
        layouts = [layout for layout in layouts if layout.pipeline == 1]
    return [layout for layout in layouts if config.model.num_experts % layout.expert == 0]
