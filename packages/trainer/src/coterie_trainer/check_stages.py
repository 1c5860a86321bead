"""What `coterie check` shows of the stages of a pipeline: who has which layers, what they send, and the idle time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie_export import ModelSpec
from coterie_parallel import Plan, Stage, Stages
from coterie_parallel.pipeline.ideal import ideal_bubble, most_in_flight

__all__ = [
    "RankPart",
    "bubble_lines",
    "in_flight_lines",
    "rank_parts",
    "sent_lines",
    "stage_lines",
]


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The part of the model on one index of the pipeline axis; all of it without a pipeline.

    Attributes:
        index: on the pipeline axis.
        stages: those of its ranks.
        shapes: of its parameters, with the experts of all ranks, by name in the order of the model.
        num_moe_layers: its layers with experts.
        most_moe_layers: those of one of its stages, the one with most.
        in_flight: most passes, of a stage with a micro-batch, that wait for their backward at a time.
    """

    index: int
    stages: tuple[Stage, ...]
    shapes: dict[str, tuple[int, ...]]
    num_moe_layers: int
    most_moe_layers: int
    in_flight: int

    @property
    def kept_moe_layers(self) -> int:
        """What is never less than the layers with experts that wait for their backward, each with a micro-batch."""
        return self.in_flight * self.most_moe_layers


def rank_parts(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], stages: Stages, num_micro_batches: int
) -> list[RankPart]:
    """Return the parts of all indices of the pipeline axis.

    Args:
        spec: of the whole model.
        shapes: of all its parameters.
        stages: that split it; a single one without a pipeline.
        num_micro_batches: of a rank in a step.
    """
    parts = []
    for index in range(stages.num_ranks):
        own = stages.on_rank(index)
        layers = {layer for stage in own for layer in stage.layers}
        has_first, has_last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
        outside = {
            "embed": has_first or (has_last and spec.tied_embeddings),
            "norm": has_last,
            "head": has_last,
        }
        held = {
            name: shape
            for name, shape in shapes.items()
            if (int(name.split(".")[1]) in layers if name.startswith("layers.") else outside[name.split(".")[0]])
        }
        # Without a pipeline the backward of a micro-batch comes right after its forward.
        in_flight = most_in_flight(stages, index, num_micro_batches) if stages.num_ranks > 1 else 1
        moe_layers = [sum(layer >= spec.num_dense_layers for layer in stage.layers) for stage in own]
        parts.append(
            RankPart(
                index=index,
                stages=own,
                shapes=held,
                num_moe_layers=sum(moe_layers),
                most_moe_layers=max(moe_layers),
                in_flight=in_flight,
            )
        )
    return parts


def stage_lines(spec: ModelSpec, plan: Plan, stages: Stages) -> list[str]:
    """Return the split of the layers, and a line for each stage."""
    if plan.pipeline == 1:
        return []
    lines = [stages.describe()]
    for stage in stages.stages:
        names = ["embedding"] if stage.is_first else []
        dense = sum(layer < spec.num_dense_layers for layer in stage.layers)
        kinds = [f"{dense} dense"] if dense else []
        kinds += [f"{len(stage.layers) - dense} with experts"] if len(stage.layers) > dense else []
        if stage.layers:
            names.append(f"{_range('layer', stage.layers)} ({', '.join(kinds)})")
        if stage.is_last:
            names += ["norm", "head"]
            if spec.tied_embeddings:
                names[-1] += ", which is the embedding" + (" once more" if stages.ends_apart else "")
        lines.append(f"stage {stage.index} on {_ranks(stage.rank, plan)}: {', '.join(names)}")
    return lines


def in_flight_lines(parts: Sequence[RankPart], plan: Plan, stages: Stages, num_micro_batches: int) -> list[str]:
    """Return how many activations each rank keeps at most."""
    if plan.pipeline == 1:
        return []
    of = "micro-batches" if stages.per_rank == 1 else "passes of a stage"
    total = num_micro_batches * stages.per_rank
    return [f"{_ranks(part.index, plan)}: activations of at most {part.in_flight} of {total} {of}" for part in parts]


def sent_lines(parts: Sequence[RankPart], plan: Plan, stages: Stages, num_micro_batches: int, one: int) -> list[str]:
    """Return what each rank sends to the ranks of other stages in a step.

    Args:
        parts: of all indices of the pipeline axis.
        plan: the layout.
        stages: all of them.
        num_micro_batches: of a rank in a step.
        one: bytes of the activations between two layers of a micro-batch.
    """
    if plan.pipeline == 1:
        return []
    lines = []
    for part in parts:
        onwards = sum(not stage.is_last and stages.stages[stage.index + 1].rank != part.index for stage in part.stages)
        back = sum(not stage.is_first and stages.stages[stage.index - 1].rank != part.index for stage in part.stages)
        total = num_micro_batches * (onwards + back) * one
        lines.append(
            f"{_ranks(part.index, plan)}: {total:,} bytes = {num_micro_batches} micro-batches x ({onwards} activations "
            f"+ {back} gradients) x {one:,} bytes"
        )
    return lines


def bubble_lines(plan: Plan, stages: Stages, num_micro_batches: int) -> list[str]:
    """Return the share of a step in which a rank waits, at best."""
    if plan.pipeline == 1:
        return []
    bubble = ideal_bubble(stages, num_micro_batches)
    values = f"p = pipeline ({plan.pipeline}), m = micro-batches ({num_micro_batches})"
    values += f", v = stages of a rank ({stages.per_rank})" if "v" in bubble.formula else ""
    return [
        f"ideal bubble: {bubble.share:.1%} of the step = {bubble.formula}, {values}; {bubble.source}",
        "  for stages of equal time, in which either half of a backward takes as long as a forward",
    ]


def _ranks(index: int, plan: Plan) -> str:
    return _range("rank", range(index * plan.data, (index + 1) * plan.data))


def _range(what: str, numbers: range) -> str:
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]} to {numbers[-1]}"
