"""Learning rate as a function of the step."""

import math
from typing import Literal

__all__ = ["learning_rate"]


def learning_rate(
    step: int,
    *,
    steps: int,
    peak: float,
    warmup_steps: int,
    schedule: Literal["cosine", "wsd"],
    decay_steps: int,
    final_fraction: float,
) -> float:
    """Return the learning rate of one optimizer step.

    Linear warm-up, then either a cosine from ``peak`` to ``final_fraction * peak`` (Loshchilov and Hutter, 2017), or
    warm-up, stable, decay (Hu et al., 2024): constant until the last ``decay_steps``, which fall linearly.

    Args:
        step: number of the step, 0 for the first; the last is ``steps - 1``.
        steps: number of steps of the run.
        peak: highest learning rate.
        warmup_steps: steps of the rise; step ``warmup_steps - 1`` is the first at ``peak``.
        schedule: "cosine" or "wsd".
        decay_steps: length of the fall of "wsd"; not used by "cosine".
        final_fraction: last learning rate as a share of ``peak``.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "cosine":
        done = (step - warmup_steps + 1) / max(1, steps - warmup_steps)
        share = final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return peak * share
    into_decay = step + 1 - (steps - decay_steps)
    if into_decay <= 0:
        return peak
    return peak * (1.0 - (1.0 - final_fraction) * min(1.0, into_decay / decay_steps))
