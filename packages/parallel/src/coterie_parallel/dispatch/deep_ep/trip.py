"""The autograd functions of one dispatch and its combine: each is started, and ends when its rows are needed.

A start returns an empty tensor, the ticket, that carries the graph to its finish. So the backward of a finish starts
the mirrored communication and the backward of the start ends it, and what the graph has between the two runs meanwhile.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from coterie_parallel.dispatch.deep_ep.payload import to_fp8
from coterie_parallel.dispatch.deep_ep.transport import Arrived, Flight, Transport
from coterie_parallel.once import differentiated_once

__all__ = ["Trip", "collect_finish", "collect_start", "send_finish", "send_start"]


class Trip:
    """One assignment of pairs: the way out, the way back, and both ways of the backward pass.

    A rank without tokens sends one token that is routed nowhere, so that it takes part; so does a rank whose batch does
    not fit, and what comes back to that one is NaN.

    Args:
        transport: moves the rows.
        ids_TK: ids as DeepEP wants them, owned by this trip: V2.5 keeps a reference.
        fits: whether the buffers hold this batch.
        fp8: send the tokens in 8 bits.
        has_backward: whether the dispatch takes part in a backward pass.
    """

    def __init__(self, transport: Transport, ids_TK: Tensor, *, fits: bool, fp8: bool, has_backward: bool) -> None:
        self.transport = transport
        self._num_tokens = ids_TK.shape[0]
        self._fits = fits
        self._fp8 = fp8
        self._ids_TK = ids_TK if self._is_sent else ids_TK.new_full((1, ids_TK.shape[1]), -1)
        self._flight: Flight[Any] | None = None
        self._way: Any = None
        self.num_rows = 0
        self.has_backward = has_backward

    @property
    def _is_sent(self) -> bool:
        return self._fits and self._num_tokens > 0

    def start_send(self, x_TD: Tensor, weights_TK: Tensor) -> None:
        """Start the dispatch."""
        x_TD, weights_TK = self._sent(x_TD), self._sent(weights_TK)
        self._start(self.transport.send(to_fp8(x_TD) if self._fp8 else x_TD, self._ids_TK, weights_TK))

    def finish_send(self) -> Arrived:
        """Wait for the dispatch."""
        arrived: Arrived = self._land()
        self._way = arrived.way
        self.num_rows = arrived.rows_RD.shape[0]
        return arrived

    def start_send_again(self, x_TD: Tensor) -> None:
        """Start the cached dispatch of other tokens."""
        self._start(self.transport.send_again(self._sent(x_TD), self._way))

    def finish_send_again(self) -> Tensor:
        """Wait for the cached dispatch; rows_RD."""
        rows_RD: Tensor = self._land()
        return rows_RD

    def start_collect(self, rows_RD: Tensor, row_weights_R: Tensor | None) -> None:
        """Start the way back."""
        weights_R = None if row_weights_R is None else row_weights_R.contiguous()
        self._start(self.transport.collect(rows_RD.contiguous(), weights_R, self._way))

    def finish_collect(self) -> tuple[Tensor, Tensor | None]:
        """Wait for the way back; y_TD, and the values of the pairs if weights were given."""
        y_TD, weights_TK = self._land()
        return self._returned(y_TD), None if weights_TK is None else self._returned(weights_TK)

    def _start(self, flight: Flight[Any]) -> None:
        assert self._flight is None, "one communication of a trip at a time"
        self._flight = flight

    def _land(self) -> Any:
        assert self._flight is not None, "a finish follows its start"
        flight, self._flight = self._flight, None
        return flight.land()

    def _sent(self, values_T: Tensor) -> Tensor:
        return values_T.contiguous() if self._is_sent else values_T.new_zeros((1, *values_T.shape[1:]))

    def _returned(self, values_T: Tensor) -> Tensor:
        if self._is_sent:
            return values_T
        return values_T.new_full((self._num_tokens, *values_T.shape[1:]), torch.nan)


def send_start(x_TD: Tensor, weights_TK: Tensor, trip: Trip) -> Tensor:
    """Start the dispatch and return its ticket; differentiable in both tensors."""
    ticket: Tensor = _SendStart.apply(x_TD, weights_TK, trip)
    return ticket


def send_finish(ticket: Tensor, trip: Trip) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows_RD, row_weights_R and offsets_e."""
    rows_RD, row_weights_R, offsets_e = _SendFinish.apply(ticket, trip)
    return rows_RD, row_weights_R, offsets_e


def collect_start(rows_RD: Tensor, trip: Trip) -> Tensor:
    """Start the combine and return its ticket; differentiable."""
    ticket: Tensor = _CollectStart.apply(rows_RD, trip)
    return ticket


def collect_finish(ticket: Tensor, trip: Trip) -> Tensor:
    """Return y_TD."""
    y_TD: Tensor = _CollectFinish.apply(ticket, trip)
    return y_TD


class _SendStart(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.start_send(x_TD, weights_TK)
        return x_TD.new_empty(0)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return *ctx.trip.finish_collect(), None


class _SendFinish(Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, trip: Trip) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        arrived = trip.finish_send()
        ctx.mark_non_differentiable(arrived.offsets_e)
        return arrived.rows_RD, arrived.row_weights_R, arrived.offsets_e

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Both always travel, whatever this rank needs: peers may need them, and the way back takes all ranks.
        ctx.trip.start_collect(grads[0], grads[1])
        return grads[0].new_zeros(0), None


class _CollectStart(Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.start_collect(rows_RD, None)
        return rows_RD.new_empty(0)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.finish_send_again(), None


class _CollectFinish(Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.finish_collect()[0]

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start_send_again(grads[0])
        return grads[0].new_zeros(0), None
