"""Compute again what did not fit into the dispatcher's buffers, and keep count of their load."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from coterie_parallel import Dispatcher, Mesh, all_gather, all_gather_objects
from torch import Tensor

__all__ = ["CapacityWatch"]

_Value = TypeVar("_Value")
_COUNTERS = ("rows_needed_max", "overflowed", "rows_dropped", "ids_outside")


class CapacityWatch:
    """Runs a computation until its rows have found room on all ranks, and counts what the buffers held.

    Args:
        dispatchers: of the model; a rank without a MoE layer has none.
        mesh: the named axes of ranks.
        device: whose random numbers an attempt may draw.

    Attributes:
        rows_needed_max: the most rows that a rank needed, as far as known; 0 for a back-end without buffers.
        rows_dropped: pairs that were left out so far, on all ranks together; attempts thrown away do not count.
        num_replays: attempts that were thrown away so far.
    """

    def __init__(self, dispatchers: Sequence[Dispatcher], mesh: Mesh, device: torch.device) -> None:
        self._dispatchers, self._mesh, self._device = list(dispatchers), mesh, device
        for dispatcher in self._dispatchers:
            # Before the first dispatch this says only that somebody will ask for an overflow.
            dispatcher.grow()
        self._is_counted: bool | None = None
        self._dropped_before = 0
        self._notes: list[str] = []
        self.rows_needed_max = 0
        self.rows_dropped = 0
        self.num_replays = 0

    def fit(self, attempt: Callable[[], _Value]) -> _Value:
        """Return what ``attempt`` computes; all ranks call together.

        An attempt whose rows found no room on some rank is thrown away: the random generators are set back, the buffers
        grow, and it runs again. It must start by clearing what an earlier attempt has left, gradients for example.

        Raises:
            ValueError: on all ranks, when one of them routed to experts that do not exist.
            CollectiveError: when a peer was late.
        """
        said = ""
        while True:
            states = self._random_states()
            value = attempt()
            if not self._has_overflowed():
                if said:
                    self._notes.append(said)
                return value
            self._set_random_states(states)
            grown = [text for text in [dispatcher.grow() for dispatcher in self._dispatchers] if text is not None]
            # Without a text another group of ranks has overflowed; the last text says how large buffers are now.
            said = f"{'; '.join(grown)}; what did not fit was computed again" if grown else said
            self.num_replays += 1

    def take_notes(self) -> list[str]:
        """Return what is to be shown since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _has_overflowed(self) -> bool:
        """Read the counters of all ranks, with one look at the device."""
        counters = [counted for dispatcher in self._dispatchers if (counted := dispatcher.counters())]
        if self._is_counted is None:
            # Asked once, as counters begin with the first dispatch, and on all ranks: one may have no MoE layer.
            self._is_counted = any(all_gather_objects(bool(counters), self._mesh.axis("world")))
        if not self._is_counted:
            return False
        for dispatcher in self._dispatchers:
            dispatcher.check()
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        own = torch.stack([_sum_or_max(counters, name) if counters else none for name in _COUNTERS])
        needed, overflowed, dropped, outside = torch.stack(all_gather(own, self._mesh.axis("world"))).T.tolist()
        if any(outside):
            ranks = ", ".join(
                f"rank {rank} {count}"
                for rank, count in zip(self._mesh.axis("world").ranks, outside, strict=True)
                if count
            )
            raise ValueError(f"expert ids that do not exist were given to the dispatcher: {ranks}")
        total = sum(dropped)
        if not any(overflowed):
            self.rows_needed_max = max(self.rows_needed_max, *needed)
            self.rows_dropped += total - self._dropped_before
        self._dropped_before = total
        return any(overflowed)

    def _random_states(self) -> tuple[Tensor, Tensor | None]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set_random_states(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)


def _sum_or_max(counters: list[dict[str, Tensor]], name: str) -> Tensor:
    values = torch.stack([counted[name] for counted in counters])
    return values.max() if name == "rows_needed_max" else values.sum()
