"""How the ranks of a run fold into named axes, decided and checked before any process group exists."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from coterie_parallel.dispatch.deep_ep_options import DeepEPOptions
from coterie_parallel.dispatch.options import DispatchOptions, OverflowPolicy, SavedRows, misplaced_problems
from coterie_parallel.dispatch.registry import dispatcher_class, known_dispatchers
from coterie_parallel.pipeline.stages import ScheduleName, stage_problems

__all__ = ["AXES", "Coordinates", "ParallelConfig", "Plan", "make_plan", "plan_problems"]

AXES = ("world", "pipeline", "data", "expert", "expert_data", "embedding")
"""The axes of a mesh. ``data`` folds into ``expert_data x expert`` with ``expert`` fastest. ``embedding`` has the first
and the last ranks of the pipeline axis, where a tied embedding is, and no others."""

REST = -1


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout that a user asks for.

    ``pipeline`` ranks share the layers. Each has ``stages_per_rank`` stages, 0 for the least that the schedule takes,
    and ``layers_per_stage`` says how many layers each stage has, in the order of the model; empty for the same number.
    ``data = -1`` takes all ranks that are left by the pipeline; ``expert = -1`` spreads the experts over the whole
    data axis. With ``data_parallel = "resident"`` a rank computes with the weights that it holds; "fsdp" leaves it to
    PyTorch's FSDP2 to shard them and to gather every layer for each micro-batch, experts included. ``timeout_s`` is the
    time-out of every process group. The settings after it are explained in `DispatchOptions`.
    """

    pipeline: int = 1
    pipeline_schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 0
    layers_per_stage: tuple[int, ...] = ()
    data: int = REST
    expert: int = 1
    data_parallel: Literal["resident", "fsdp"] = "resident"
    dispatcher: str = "all_to_all"
    timeout_s: float = 600.0
    overflow: OverflowPolicy = "grow"
    capacity_factor: float = 2.0
    saved_rows: SavedRows = "copy"
    overlap: bool = False
    deep_ep: DeepEPOptions | None = None

    def dispatch_options(self) -> DispatchOptions:
        """Return the settings that belong to the dispatcher."""
        return DispatchOptions(
            overflow=self.overflow,
            capacity_factor=self.capacity_factor,
            saved_rows=self.saved_rows,
            overlap=self.overlap,
            deep_ep=self.deep_ep,
        )

    def problems(self) -> list[str]:
        """Return every fault that shows without knowing the number of ranks."""
        found = stage_problems(self)
        for name, degree in (("data", self.data), ("expert", self.expert)):
            if degree < 1 and degree != REST:
                found.append(f"{name} ({degree}) must be at least 1, or -1 for the rest")
        if self.data_parallel not in ("resident", "fsdp"):
            found.append(f'data_parallel ("{self.data_parallel}") must be one of: resident, fsdp')
        if self.data_parallel == "fsdp" and self.pipeline > 1:
            found.append(
                f'pipeline ({self.pipeline}) must be 1 with data_parallel ("fsdp"), which would gather the layers of a '
                'stage for every micro-batch; or set data_parallel to "resident"'
            )
        if self.dispatcher not in known_dispatchers():
            found.append(f"dispatcher ({self.dispatcher!r}) is unknown; known: {', '.join(known_dispatchers())}")
        if not (0 < self.timeout_s < math.inf):
            found.append(f"timeout_s ({self.timeout_s}) must be a positive number of seconds, for example 600")
        options = self.dispatch_options()
        found += options.problems()
        return found if self.dispatcher == "deep_ep" else found + misplaced_problems(options)


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The index of one rank on each axis."""

    pipeline: int
    data: int
    expert: int
    expert_data: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with every degree settled.

    ``rank = pipeline_index * data + data_index`` and ``data_index = expert_data_index * expert + expert_index``.
    Expert index j owns the global experts ``[j * E / expert, (j + 1) * E / expert)``.
    """

    world: int
    pipeline: int
    data: int
    expert: int
    expert_data: int

    def __post_init__(self) -> None:
        assert self.world == self.pipeline * self.data, self
        assert self.data == self.expert * self.expert_data, self

    def coordinates(self, rank: int) -> Coordinates:
        """Return where ``rank`` sits on each axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank ({rank}) must be at least 0 and below the world size ({self.world})")
        pipeline, data = divmod(rank, self.data)
        expert_data, expert = divmod(data, self.expert)
        return Coordinates(pipeline=pipeline, data=data, expert=expert, expert_data=expert_data)

    def axis_ranks(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that ``axis`` splits the world into, each in the order of the axis index."""
        if axis not in AXES:
            raise ValueError(f"axis ({axis!r}) is unknown; known: {', '.join(AXES)}")
        if axis == "embedding":
            # With a schedule whose last stage is on the first rank too, nothing is placed on this axis.
            return [tuple(dict.fromkeys([*range(self.data), *range(self.world - self.data, self.world)]))]
        together: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            # Ranks that agree in every coordinate but the axis's own belong to one group.
            fixed = {
                "world": (),
                "pipeline": (at.data,),
                "data": (at.pipeline,),
                "expert": (at.pipeline, at.expert_data),
                "expert_data": (at.pipeline, at.expert),
            }[axis]
            together.setdefault(fixed, []).append(rank)
        return [tuple(ranks) for ranks in together.values()]

    def describe(self) -> str:
        """Return the layout as text: every factor and every product, none hidden."""
        return (
            f"world size ({self.world}) = pipeline ({self.pipeline}) x data ({self.data})\n"
            f"data ({self.data}) = expert_data ({self.expert_data}) x expert ({self.expert})"
        )


def plan_problems(
    config: ParallelConfig, world: int, *, num_experts: int | None = None, top_k: int | None = None
) -> list[str]:
    """Return every fault of ``config`` on ``world`` ranks, each with values that would work."""
    if world < 1:
        return [*config.problems(), f"world size ({world}) must be at least 1"]
    found = config.problems()
    if config.pipeline < 1 or any(degree < 1 and degree != REST for degree in (config.data, config.expert)):
        return found
    data = config.data
    if config.data == REST:
        data = world // config.pipeline
        if world % config.pipeline:
            found.append(
                f"world size ({world}) must be a multiple of pipeline ({config.pipeline}); "
                f"nearest pipeline: {_nearest_divisors(world, config.pipeline)}"
            )
            return found
    elif config.pipeline * config.data != world:
        product = config.pipeline * config.data
        found.append(
            f"pipeline ({config.pipeline}) x data ({config.data}) = {product} must equal the world size ({world}); "
            f"start {product} ranks, or set data to -1 for the rest"
        )
    expert = data if config.expert == REST else config.expert
    if config.data_parallel == "fsdp":
        found += _fsdp_problems(config, data)
    if data % expert:
        found.append(
            f"expert ({expert}) must divide data ({data}), where world size ({world}), pipeline ({config.pipeline}); "
            f"nearest: {_nearest_divisors(data, expert)}"
        )
    fits = num_experts is not None and num_experts >= 1 and num_experts % expert == 0
    if num_experts is not None and not fits:
        found.append(
            f"num_experts ({num_experts}) must be a multiple of the expert degree ({expert}); "
            f"nearest: {_nearest_multiples(num_experts, expert)}"
        )
    if config.dispatcher in known_dispatchers():
        reason = dispatcher_class(config.dispatcher).supports(
            num_experts=num_experts if num_experts is not None and fits else expert, expert_degree=expert, alignment=1
        )
        if reason is not None:
            found.append(reason)
        options = config.dispatch_options()
        if replace(options, deep_ep=None).problems():  # which were found above; the settings of DeepEP are left
            options = DispatchOptions(deep_ep=options.deep_ep)
        own = dispatcher_class(config.dispatcher).option_problems(options, top_k=top_k)
        found += [problem for problem in own if problem not in found]
    return found


def make_plan(config: ParallelConfig, world: int, num_experts: int | None = None, top_k: int | None = None) -> Plan:
    """Settle every degree of ``config`` on ``world`` ranks.

    Raises:
        ValueError: with all the sentences of `plan_problems`, if there are any.
    """
    problems = plan_problems(config, world, num_experts=num_experts, top_k=top_k)
    if problems:
        raise ValueError("\n".join(problems))
    data = world // config.pipeline
    expert = data if config.expert == REST else config.expert
    return Plan(world=world, pipeline=config.pipeline, data=data, expert=expert, expert_data=data // expert)


def _fsdp_problems(config: ParallelConfig, data: int) -> list[str]:
    found = []
    if config.expert != 1:
        found.append(
            f'expert ({config.expert}) must be 1 with data_parallel ("fsdp"), which gathers all experts on every rank; '
            'or set data_parallel to "resident"'
        )
    if data == 1:
        found.append('data (1) must be at least 2 with data_parallel ("fsdp"): one rank has nothing to shard')
    return found


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor < wanted][-1:]
    above = [divisor for divisor in divisors if divisor > wanted][:1]
    return " or ".join(str(divisor) for divisor in below + above)


def _nearest_multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below > 0 else str(of)
