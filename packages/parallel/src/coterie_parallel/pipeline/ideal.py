"""What a schedule costs at best, from numbers alone: idle time, and activations that wait for their backward.

Everything here counts passes: one stage with one micro-batch. The orders are those of torch's schedules; stages are
taken to be equally large, and the gradients of activations and those of weights to cost one forward each.
"""

from dataclasses import dataclass

from coterie_parallel.pipeline.stages import Stages

__all__ = ["Bubble", "ideal_bubble", "most_in_flight"]


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """The share of a step in which a rank can not but wait.

    Attributes:
        share: from 0 to below 1.
        formula: what it is worked out by, in p, the size of the pipeline axis, v, the stages of a rank, and m, the
            micro-batches of a rank in a step.
        source: of the formula.
    """

    share: float
    formula: str
    source: str


def ideal_bubble(stages: Stages, num_micro_batches: int) -> Bubble:
    """Return the bubble of a step, from the first forward of the first stage to the last gradient on any rank."""
    p, v, m = stages.num_ranks, stages.per_rank, num_micro_batches
    if stages.schedule in ("zbv", "dualpipev"):
        busy, idle, formula = 6 * m, p - 1, "(p - 1) / (6 m + p - 1)"
        source = "Qi et al., 2024" if stages.schedule == "zbv" else "DeepSeek-V3, 2024, with nothing overlapped"
        if stages.schedule == "zbv" and m < 2 * p - 1:
            idle = max(p - 1, 4 * (p - 1) - 2 * (m - 1))
            formula = "b / (6 m + b), b = max(p - 1, 4 (p - 1) - 2 (m - 1))"
    elif stages.schedule == "interleaved_1f1b":
        busy, idle, formula = v * m, p - 1, "(p - 1) / (v m + p - 1)"
        source = "Narayanan et al., 2021"
        if m < p:
            idle += (v - 1) * (p - m)
            formula = "b / (v m + b), b = p - 1 + (v - 1) (p - m)"
    else:
        busy, idle, formula = m, p - 1, "(p - 1) / (m + p - 1)"
        source = "Huang et al., 2019" if stages.schedule == "gpipe" else "Narayanan et al., 2021"
    return Bubble(share=idle / (busy + idle), formula=formula, source=source)


def most_in_flight(stages: Stages, rank: int, num_micro_batches: int) -> int:
    """Return the most passes of one rank whose backward is not done.

    Args:
        stages: all stages, and the schedule.
        rank: index on the pipeline axis.
        num_micro_batches: of a rank in a step.
    """
    p, v, m = stages.num_ranks, stages.per_rank, num_micro_batches
    if stages.schedule == "1f1b":
        return min(m, p - rank)
    if stages.schedule == "interleaved_1f1b":
        a_round = m // max(1, m // p)
        return min(v * m, (v - 1) * a_round + 2 * (p - 1 - rank) + 1)
    if stages.schedule == "zbv":
        return min(2 * p, 2 * m, m + 1 + rank)
    return 2 * p + 1 if stages.schedule == "dualpipev" else m
