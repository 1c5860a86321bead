"""What a user may ask of a dispatcher, besides its name."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from coterie_parallel.dispatch.deep_ep_options import DeepEPOptions

__all__ = [
    "OVERFLOW_POLICIES",
    "SAVED_ROWS",
    "DispatchOptions",
    "OverflowPolicy",
    "SavedRows",
    "misplaced_problems",
    "unused_problems",
]

OverflowPolicy = Literal["grow", "exact", "drop"]
SavedRows = Literal["copy", "lease", "fetch"]

OVERFLOW_POLICIES: tuple[str, ...] = ("grow", "exact", "drop")
SAVED_ROWS: tuple[str, ...] = ("copy", "lease", "fetch")


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How a back-end with buffers of a fixed size uses them; a back-end that has none takes `overlap` only.

    `deep_ep` is of the dispatcher "deep_ep" alone.

    Attributes:
        overflow: what happens when more rows come to a rank than its buffer holds. "grow": the step is thrown away,
            the buffers grow and the step is run again, so nothing is lost and no layer waits for the host. "exact": the
            host reads the need of every layer, and the buffers grow before the rows are sent. "drop": the rows with the
            lowest routing weights are left out and counted.
        capacity_factor: rows of a buffer over T * K, T the largest number of tokens of a rank in the first batch; 1.0
            is what an even load needs.
        saved_rows: how the experts' input is kept for the backward pass. "copy": each layer keeps a copy. "lease": each
            layer keeps the buffer itself, from a pool, until its backward. "fetch": nothing is kept, and the rows are
            sent once more in the backward pass.
        overlap: issue the shared expert between sending the rows and waiting for them.
        deep_ep: what can be chosen about DeepEP; None for all of it as it is by default.
    """

    overflow: OverflowPolicy = "grow"
    capacity_factor: float = 2.0
    saved_rows: SavedRows = "copy"
    overlap: bool = False
    deep_ep: DeepEPOptions | None = None

    def problems(self, top_k: int | None = None) -> list[str]:
        """Return every fault of these options; ``top_k`` is the number of choices of a token, where it is known."""
        found = []
        if self.overflow not in OVERFLOW_POLICIES:
            found.append(f"overflow ({self.overflow!r}) must be one of: {', '.join(OVERFLOW_POLICIES)}")
        if self.saved_rows not in SAVED_ROWS:
            found.append(f"saved_rows ({self.saved_rows!r}) must be one of: {', '.join(SAVED_ROWS)}")
        if not 0 < self.capacity_factor < math.inf:
            found.append(f"capacity_factor ({self.capacity_factor}) must be a positive number, for example 2.0")
        elif top_k is not None and top_k >= 1 and self.capacity_factor * top_k < 1:
            found.append(
                f"capacity_factor ({self.capacity_factor}) must be at least {math.ceil(1000 / top_k) / 1000:g} with "
                f"top_k ({top_k}): a buffer holds at least one row for each token of a rank; usual: 2.0"
            )
        if self.deep_ep is not None:
            found += [f"deep_ep.{problem}" for problem in self.deep_ep.problems()]
        return found


def unused_problems(options: DispatchOptions, name: str) -> list[str]:
    """Return a sentence for each option that would do nothing in the back-end ``name``, which has no fixed buffers."""
    defaults = DispatchOptions()
    return [
        f'{field.name} ({getattr(options, field.name)!r}) does nothing with dispatcher "{name}", whose buffers always '
        'fit; leave it out, or use dispatcher "rowwise"'
        for field in fields(options)
        if field.name not in ("overlap", "deep_ep") and getattr(options, field.name) != getattr(defaults, field.name)
    ] + misplaced_problems(options)


def misplaced_problems(options: DispatchOptions) -> list[str]:
    """Return a sentence if ``options``, which are those of another back-end, have settings of DeepEP."""
    if options.deep_ep is None:
        return []
    return ['deep_ep belongs to dispatcher "deep_ep" and does nothing with another; leave it out, or use that one']
