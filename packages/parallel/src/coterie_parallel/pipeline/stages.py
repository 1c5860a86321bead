"""Which layers a stage has, which rank has which stages, and what a schedule asks for: numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch.torch_version import TorchVersion
from torch.version import __version__ as torch_version

if TYPE_CHECKING:
    from coterie_parallel.plan import ParallelConfig

__all__ = [
    "SCHEDULES",
    "ScheduleName",
    "Schedule",
    "Stage",
    "Stages",
    "make_stages",
    "micro_batch_problems",
    "num_stages_per_rank",
    "spread_layers",
    "stage_problems",
]

# Torch 2.10 refuses fewer micro-batches than stages.
_GPIPE_TAKES_FEW = TorchVersion(torch_version) >= "2.11"

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one schedule of `torch.distributed.pipelining` asks for.

    Attributes:
        class_name: of the schedule in torch.
        stages_per_rank: 1, 2 for exactly two, or 0 for any number from two on.
        is_v: ranks meet the stages there and back, so the first and the last stage share a rank; else round and round.
        defers_weights: computes the gradients of weights apart from those of activations, to fill idle time.
    """

    class_name: str
    stages_per_rank: int
    is_v: bool = False
    defers_weights: bool = False


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(class_name="ScheduleGPipe", stages_per_rank=1),
    "1f1b": Schedule(class_name="Schedule1F1B", stages_per_rank=1),
    "interleaved_1f1b": Schedule(class_name="ScheduleInterleaved1F1B", stages_per_rank=0),
    "zbv": Schedule(class_name="ScheduleZBVZeroBubble", stages_per_rank=2, is_v=True, defers_weights=True),
    "dualpipev": Schedule(class_name="ScheduleDualPipeV", stages_per_rank=2, is_v=True, defers_weights=True),
}
"""GPipe (Huang et al., 2019), 1F1B and its interleaved form (Narayanan et al., 2021), the zero-bubble V schedule (Qi et
al., 2024), and DualPipeV (a half of DualPipe of DeepSeek-V3, 2024)."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: consecutive layers on one rank of the pipeline axis.

    Attributes:
        index: place in the model.
        rank: index on the pipeline axis of the rank that has it.
        layers: numbers of its layers; may be none for the first and the last.
        is_first: has the embedding.
        is_last: has the final norm and the head.
    """

    index: int
    rank: int
    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Stages:
    """All stages in the order of the model, and the schedule that runs them."""

    schedule: str
    stages: tuple[Stage, ...]

    @property
    def num_ranks(self) -> int:
        """The size of the pipeline axis."""
        return 1 + max(stage.rank for stage in self.stages)

    @property
    def per_rank(self) -> int:
        """How many stages each rank has."""
        return len(self.stages) // self.num_ranks

    def on_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of one rank of the pipeline axis, in the order of the model."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last stage are on different ranks, so that tied embeddings are there twice."""
        return self.stages[0].rank != self.stages[-1].rank

    def describe(self) -> str:
        """Return the schedule and the number of layers of each stage, as text."""
        sizes = " + ".join(str(len(stage.layers)) for stage in self.stages)
        count = f"stages ({len(self.stages)}) = pipeline ({self.num_ranks}) x {self.per_rank} on each rank"
        return f"{count}; schedule {self.schedule}; layers ({sum(len(s.layers) for s in self.stages)}) = {sizes}"


def make_stages(config: "ParallelConfig", num_layers: int) -> Stages:
    """Deal ``num_layers`` to the stages of a config: what it says for each stage, else the same number to all.

    Raises:
        ValueError: with all the sentences of `stage_problems`, if there are any.
    """
    problems = stage_problems(config, num_layers=num_layers)
    if problems:
        raise ValueError("\n".join(problems))
    count = config.pipeline * num_stages_per_rank(config)
    sizes = config.layers_per_stage or spread_layers(num_layers, count)
    is_v = SCHEDULES[config.pipeline_schedule].is_v
    stages, start = [], 0
    for index, size in enumerate(sizes):
        lap, place = divmod(index, config.pipeline)
        stage = Stage(
            index=index,
            rank=config.pipeline - 1 - place if is_v and lap % 2 else place,
            layers=range(start, start + size),
            is_first=index == 0,
            is_last=index == count - 1,
        )
        stages.append(stage)
        start += size
    return Stages(schedule=config.pipeline_schedule, stages=tuple(stages))


def num_stages_per_rank(config: "ParallelConfig") -> int:
    """Return how many stages each rank has: what the config says, or the least that the schedule takes."""
    if config.pipeline == 1:
        return 1
    return config.stages_per_rank or SCHEDULES[config.pipeline_schedule].stages_per_rank or 2


def spread_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return sizes that differ by one at most, the smaller ones at both ends, where embedding and head are."""
    sizes = [num_layers // num_stages] * num_stages
    inwards = sorted(range(num_stages), key=lambda index: abs(2 * index - (num_stages - 1)))
    for index in inwards[: num_layers % num_stages]:
        sizes[index] += 1
    return tuple(sizes)


def stage_problems(
    config: "ParallelConfig", *, num_layers: int | None = None, num_micro_batches: int | None = None
) -> list[str]:
    """Return all that keeps a pipeline from running, each with values that would work.

    Args:
        config: the layout.
        num_layers: of the whole model, if known.
        num_micro_batches: of one rank in a step, if known.
    """
    if config.pipeline < 1:
        return [f"pipeline ({config.pipeline}) must be at least 1"]
    if config.pipeline_schedule not in SCHEDULES:
        return [f"pipeline_schedule ({config.pipeline_schedule!r}) must be one of: {', '.join(SCHEDULES)}"]
    if config.pipeline == 1:
        given = [name for name in ("layers_per_stage", "stages_per_rank") if getattr(config, name)]
        return [f"{name} does nothing with pipeline (1), which has one stage; leave it out" for name in given]
    found = _degree_problems(config)
    if found:
        return found
    count = config.pipeline * num_stages_per_rank(config)
    found += _size_problems(config, count)
    if num_layers is not None:
        found += _layer_problems(config, num_layers, count)
    if num_micro_batches is not None:
        found += micro_batch_problems(config.pipeline_schedule, config.pipeline, count, num_micro_batches)
    return found


def _degree_problems(config: "ParallelConfig") -> list[str]:
    name, given = config.pipeline_schedule, config.stages_per_rank
    wanted = SCHEDULES[name].stages_per_rank
    text = f'stages_per_rank ({given}) must be {{}} with pipeline_schedule ("{name}"); leave it out{{}}'
    if wanted and given not in (0, wanted):
        return [text.format(wanted, ', or for more stages on a rank use "interleaved_1f1b"')]
    if not wanted and given != 0 and given < 2:
        return [text.format("at least 2", ', or for one stage on a rank use "1f1b"')]
    return []


def _size_problems(config: "ParallelConfig", count: int) -> list[str]:
    """Judge ``layers_per_stage`` by itself."""
    sizes, found = config.layers_per_stage, []
    if sizes and len(sizes) != count:
        found.append(
            f"layers_per_stage ({_numbers(sizes)}) must have {count} numbers, one for each of the {_stages(config)}"
        )
    if any(size < 0 for size in sizes):
        return [*found, f"layers_per_stage ({_numbers(sizes)}) must have numbers of at least 0"]
    empty = [index for index, size in enumerate(sizes) if size == 0 and 0 < index < len(sizes) - 1]
    if empty:
        found.append(
            f"layers_per_stage ({_numbers(sizes)}) leaves stage {_numbers(empty)} empty; each needs at least 1 layer, "
            "but for the first, which has the embedding, and the last, which has the head: 0 works for them"
        )
    return found


def _layer_problems(config: "ParallelConfig", num_layers: int, count: int) -> list[str]:
    sizes = config.layers_per_stage
    if sizes:
        if sum(sizes) == num_layers:
            return []
        return [f"layers_per_stage ({_numbers(sizes)}) adds up to {sum(sizes)}, and num_layers is {num_layers}"]
    if num_layers < count:
        spread = (
            [0, *spread_layers(num_layers, count - 2), 0]
            if num_layers == count - 2
            else spread_layers(num_layers, count)
        )
        others = f"; or set layers_per_stage, for example to [{_numbers(spread)}]" if num_layers >= count - 2 else ""
        return [
            f"num_layers ({num_layers}) must be at least the number of {_stages(config)}; "
            f"largest pipeline: {max(1, num_layers * config.pipeline // count)}{others}"
        ]
    if num_layers % count:
        below = num_layers // count * count
        return [
            f"num_layers ({num_layers}) must be a multiple of the {_stages(config)}; nearest: {below} or "
            f"{below + count}; or set layers_per_stage, for example to [{_numbers(spread_layers(num_layers, count))}]"
        ]
    return []


def micro_batch_problems(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int) -> list[str]:
    """Return what keeps a schedule from running so many micro-batches, with numbers that would work."""
    text = (
        f"micro-batches of a rank in a step ({num_micro_batches}) must be {{}} with pipeline_schedule "
        f'("{schedule}"); {{}}'
    )
    if num_micro_batches < 1:
        return [text.format("at least 1", "the least that would work")]
    others = {"1f1b": '"gpipe"', "dualpipev": '"zbv"'}
    if not _GPIPE_TAKES_FEW:
        others |= {"1f1b": '"gpipe" of torch 2.11', "gpipe": "torch 2.11"}
    if schedule in others and num_micro_batches < num_stages:
        fits = f"at least {num_stages}, the number of stages,"
        return [text.format(fits, f"or use {others[schedule]}, which takes any number")]
    if schedule == "interleaved_1f1b" and not _goes_round(num_micro_batches, num_ranks):
        below = next(number for number in range(num_micro_batches, 0, -1) if _goes_round(number, num_ranks))
        above = next(
            number for number in range(num_micro_batches, 2 * num_micro_batches) if _goes_round(number, num_ranks)
        )
        fits = f"so many that {num_micro_batches // num_ranks} rounds of at least pipeline ({num_ranks}) are equal"
        return [text.format(fits, f"nearest: {below} or {above}")]
    return []


def _goes_round(num_micro_batches: int, num_ranks: int) -> bool:
    """Return whether rounds of about ``num_ranks`` micro-batches are equally large, as torch wants it."""
    return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0


def _stages(config: "ParallelConfig") -> str:
    per_rank = num_stages_per_rank(config)
    return f"stages ({config.pipeline * per_rank}) = pipeline ({config.pipeline}) x stages_per_rank ({per_rank})"


def _numbers(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
