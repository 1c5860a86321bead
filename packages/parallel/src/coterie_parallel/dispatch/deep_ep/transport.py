"""What the dispatcher asks of any surface of DeepEP."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from coterie_parallel.dispatch.deep_ep.payload import from_fp8

__all__ = ["Arrived", "Flight", "Payload", "Transport", "unpacked"]

Payload = Tensor | tuple[Tensor, Tensor]
"""Rows in bf16, or in FP8 with their scales."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Flight(Generic[Result]):
    """Communication under way: nothing that DeepEP returned may be read before `land`."""

    event: Any
    result: Callable[[], Result]

    def land(self) -> Result:
        """Make the current stream wait, not the host, and return what arrived."""
        self.event.current_stream_wait()
        return self.result()


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What came to this rank: rows_RD, row_weights_R, offsets_e, and the way, to send more rows along it and back."""

    rows_RD: Tensor
    row_weights_R: Tensor
    offsets_e: Tensor
    way: Any


class Transport(ABC):
    """Moves rows with one buffer of DeepEP; all ranks of the axis call each method in the same order."""

    @abstractmethod
    def send(self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor) -> Flight[Arrived]:
        """Start the dispatch of tokens with their weights."""

    @abstractmethod
    def send_again(self, x_TD: Tensor, way: Any) -> Flight[Tensor]:
        """Start the cached dispatch of other tokens along ``way``; gives their rows_RD, padding zero."""

    @abstractmethod
    def collect(self, rows_RD: Tensor, row_weights_R: Tensor | None, way: Any) -> Flight[tuple[Tensor, Tensor | None]]:
        """Start the way back; gives for each token the sum of its rows, and the weight of each pair if asked."""

    @abstractmethod
    def close(self) -> None:
        """Free the buffer."""


def unpacked(payload: Payload) -> Tensor:
    """Return rows that arrived as bf16; FP8 rows are multiplied by their scales."""
    return from_fp8(*payload, torch.bfloat16) if isinstance(payload, tuple) else payload
