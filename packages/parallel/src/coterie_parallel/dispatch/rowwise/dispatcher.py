"""The row-wise dispatcher: rows go straight from their source to their final place in a peer's buffer."""

import math
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import all_gather_objects, all_reduce_max, barrier
from coterie_parallel.dispatch.base import Dispatched, Dispatcher
from coterie_parallel.dispatch.eager import runs_eagerly
from coterie_parallel.dispatch.options import DispatchOptions, SavedRows
from coterie_parallel.dispatch.route import check_handle, check_rows, takes_backward
from coterie_parallel.dispatch.rowwise.exchange import RowExchange
from coterie_parallel.dispatch.rowwise.peers import make_peers
from coterie_parallel.dispatch.rowwise.shipment import Shipment, is_in_backward

__all__ = ["RowwiseDispatcher"]

_NO_ROOM = (
    "rows found no room in an earlier dispatch, and what was computed since is wrong; call grow() at the end of each "
    "step and repeat the step when it returns a sentence"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """A dispatch or combine between its start and its finish."""

    what: str
    shipment: Shipment
    tensors: tuple[Tensor, ...]


class RowwiseDispatcher(Dispatcher):
    """Writes each row once, to its final place, and reads it back from there; the host waits for nothing.

    Buffers are made at the first dispatch and hold ``capacity_factor * T * K`` rows, T the largest number of tokens of
    a rank in it, and padding. R is that capacity, and with ``overflow = "exact"`` the rows that came. What happens when
    they are full, and how rows are kept for the backward pass, is explained in `DispatchOptions`; memory for it
    in `coterie_parallel.dispatch.rowwise.buffers`. In a recomputed forward pass rows are copied where the option says
    "lease", as nothing tells when they are no longer needed.

    On a GPU ids are not read by the host: ids outside [-1, E) are not routed, and `grow` raises for them.

    Rows that found no room are a warning, as nothing else tells who does not call `grow`: on a CPU in the next dispatch
    until `grow` was called for the first time, and in `close` where no error is being handled.
    """

    kernels = "auto"
    """Back-end of the kernels: "auto", "reference" or "triton"."""

    def __init__(
        self, *, num_experts: int, axis: Axis, alignment: int = 1, options: DispatchOptions | None = None
    ) -> None:
        super().__init__(num_experts=num_experts, axis=axis, alignment=alignment, options=options)
        self.reads_host_on_gpu = self.options.overflow == "exact"
        self._exchange: RowExchange | None = None
        self._is_closed = False
        self._keeps_rows = True
        self._warns = True
        # Weak, so that what was given up between start and finish is not waited for.
        self._started: weakref.ref[_Pending] | None = None

    @classmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        """Accept every size; whether the ranks can share memory shows at the first dispatch."""
        return None

    @runs_eagerly
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """See `Dispatcher.dispatch`; on a GPU without the check of ids.

        Raises:
            ValueError: also when ranks differ in what must be the same on all, or cannot share memory.
        """
        return self.dispatch_finish(self.dispatch_start(x_TD, ids_TK, weights_TK))

    @runs_eagerly
    def combine(self, rows_RD: Tensor, handle: Shipment) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.combine_finish(self.combine_start(rows_RD, handle))

    @runs_eagerly
    def dispatch_start(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Pending:
        """Send the rows of this rank."""
        self.check_arguments(x_TD, ids_TK, weights_TK, reads_ids=x_TD.device.type == "cpu")
        self._check_idle("dispatch")
        exchange = self._ready(x_TD, ids_TK)
        if self._warns and exchange.peers.device.type == "cpu" and exchange.counters.overflowed:
            self._warns = False
            warnings.warn(_NO_ROOM, stacklevel=2)
        with torch.no_grad():
            plan, num_rows = exchange.place(exchange.announce(ids_TK, weights_TK.detach()))
        has_backward = takes_backward(x_TD, weights_TK)
        shipment = Shipment(
            exchange, plan, num_rows=num_rows, has_backward=has_backward, saved_rows=self._saved_rows(has_backward)
        )
        return self._begin("dispatch", shipment, shipment.send(x_TD, weights_TK))

    @runs_eagerly
    def dispatch_finish(self, pending: _Pending) -> Dispatched:
        """Wait for the rows of all peers."""
        self._end("dispatch", pending)
        shipment = pending.shipment
        return Dispatched(*shipment.arrive(*pending.tensors), shipment.offsets_e, shipment)

    @runs_eagerly
    def combine_start(self, rows_RD: Tensor, handle: Shipment) -> _Pending:
        """Lay out the rows of this rank's experts for their sources."""
        self._check_idle("combine")
        check_handle(isinstance(handle, Shipment) and handle.exchange is self._exchange, handle)
        check_rows(rows_RD, num_rows=handle.num_rows, has_backward=handle.has_backward)
        return self._begin("combine", handle, (handle.offer(rows_RD),))

    @runs_eagerly
    def combine_finish(self, pending: _Pending) -> Tensor:
        """Wait for the rows of all peers and sum those of each token."""
        self._end("combine", pending)
        return pending.shipment.collect(*pending.tensors)

    @runs_eagerly
    def memory_for_combine(self, handle: Shipment) -> Tensor | None:
        """See `Dispatcher.memory_for_combine`; None in a recomputed forward pass, whose outputs nobody combines."""
        # It would also stand in the way of the gradients that are written next.
        return None if is_in_backward() else self._lend(handle)

    @runs_eagerly
    def memory_for_gradients(self, handle: Shipment) -> Tensor | None:
        """See `Dispatcher.memory_for_gradients`."""
        return self._lend(handle)

    def saved_rows(self, handle: Shipment) -> AbstractContextManager[object]:
        """Return the context that the experts must run in; only "fetch" needs it."""
        return handle.keeping_rows()

    @contextmanager
    def unsaved_rows(self) -> Iterator[None]:
        """See `Dispatcher.unsaved_rows`: no copy, no lease, and nothing to fetch."""
        before, self._keeps_rows = self._keeps_rows, False
        try:
            yield
        finally:
            self._keeps_rows = before

    def counters(self) -> dict[str, Tensor]:
        """See `Dispatcher.counters`; none before the first dispatch."""
        if self._exchange is None:
            return {}
        counters = self._exchange.counters
        return {
            "rows_needed_max": counters.rows_needed_max,
            "overflowed": counters.overflowed,
            "rows_dropped": counters.rows_dropped,
            "ids_outside": counters.ids_outside,
        }

    def check(self) -> None:
        """See `Dispatcher.check`."""
        if self._exchange is not None:
            self._exchange.peers.check()

    def grow(self) -> str | None:
        """See `Dispatcher.grow`; reads the device once."""
        self._warns = False
        exchange = self._exchange
        if exchange is None:
            return None
        exchange.peers.check()
        counters, buffers = exchange.counters, exchange.buffers
        held = torch.tensor(buffers.held(), dtype=torch.int64, device=counters.values.device)
        numbers = all_reduce_max(torch.cat([counters.values, held]), self.axis).tolist()
        needed, overflowed, _, outside, num_tokens = numbers[:5]
        if outside:
            raise ValueError(
                f"a rank gave the dispatcher {outside} expert ids that are not in [-1, {self.num_experts}); they were "
                "not routed, and what was computed since the last check is wrong"
            )
        buffers.take_back([is_held > 0 for is_held in numbers[5:]])
        if not overflowed:
            return None
        # Every rank has read its counters, so all its work on the buffers is over.
        barrier(self.axis)
        before = buffers.capacity
        room = exchange.num_tokens
        with torch.inference_mode(False), torch.no_grad():
            exchange.grow(needed, num_tokens)
        load = f"{num_tokens:,} tokens on a rank" if num_tokens > room else f"{needed:,} rows on a rank"
        said = f"row-wise buffers of {before:,} rows had no room for {load} and now hold {buffers.capacity:,}"
        factor = math.ceil(100 * buffers.capacity / (exchange.num_tokens * exchange.top_k)) / 100
        # A first batch of this size never has a buffer for more than all its pairs.
        reaches = exchange.first_capacity(factor) >= buffers.capacity
        return f"{said}; capacity_factor = {factor:g} starts with that" if reaches else said

    def close(self) -> None:
        """See `Dispatcher.close`."""
        exchange, self._exchange, self._is_closed = self._exchange, None, True
        if exchange is None:
            return
        is_lost = False
        # After an error nobody needs to be told, and a device that failed has no value to give.
        with suppress(RuntimeError):
            is_lost = sys.exc_info()[0] is None and bool(exchange.counters.overflowed)
        exchange.peers.close()
        if is_lost:
            warnings.warn(_NO_ROOM, stacklevel=2)

    def _lend(self, handle: Shipment) -> Tensor | None:
        check_handle(isinstance(handle, Shipment) and handle.exchange is self._exchange, handle)
        with torch.no_grad():
            return handle.lend()

    def _saved_rows(self, has_backward: bool) -> SavedRows | None:
        if not torch.is_grad_enabled() or not self._keeps_rows:
            return None
        saved_rows = self.options.saved_rows
        # In a backward pass this is a recomputed forward, whose rows another graph will use; without a backward of the
        # dispatch nothing would end the lease.
        return "copy" if saved_rows == "lease" and (is_in_backward() or not has_backward) else saved_rows

    def _check_idle(self, what: str) -> None:
        if self._is_closed:
            raise ValueError("this dispatcher is closed; make a new one")
        started = self._pending()
        if started is not None:
            raise ValueError(f"finish the {started.what} that was started before the next {what}")

    def _begin(self, what: str, shipment: Shipment, tensors: tuple[Tensor, ...]) -> _Pending:
        pending = _Pending(what=what, shipment=shipment, tensors=tensors)
        self._started = weakref.ref(pending)
        return pending

    def _end(self, what: str, pending: _Pending) -> None:
        if self._is_closed:
            raise ValueError("this dispatcher is closed; make a new one")
        started = self._pending()
        if started is None or started is not pending or started.what != what:
            raise ValueError(
                f"there is no {what} to finish: {'nothing' if started is None else started.what} was started"
            )
        self._started = None

    def _pending(self) -> _Pending | None:
        return None if self._started is None else self._started()

    def _ready(self, x_TD: Tensor, ids_TK: Tensor) -> RowExchange:
        if self._exchange is None:
            self._exchange = self._first_exchange(x_TD, ids_TK)
        if self.options.overflow == "drop" and ids_TK.shape[1] != self._exchange.top_k:
            raise ValueError(
                f'with overflow = "drop" the number of choices must stay the same; it was {self._exchange.top_k} '
                f"and is {ids_TK.shape[1]}"
            )
        return self._exchange

    def _first_exchange(self, x_TD: Tensor, ids_TK: Tensor) -> RowExchange:
        own = {
            "top_k": ids_TK.shape[1],
            "width of the tokens": x_TD.shape[1],
            "dtype of the tokens": str(x_TD.dtype),
            "number of experts": self.num_experts,
            "alignment": self.alignment,
            "options": self.options,
        }
        everywhere = all_gather_objects((x_TD.shape[0], own), self.axis)
        for name, value in own.items():
            found = [one[name] for _, one in everywhere]
            if any(one != value for one in found):
                listed = ", ".join(f"rank {rank} {one}" for rank, one in zip(self.axis.ranks, found, strict=True))
                raise ValueError(f"the {name} must be the same on all ranks of the {self.axis.name!r} axis: {listed}")
        problems = self.options.problems(ids_TK.shape[1])
        if problems:
            raise ValueError("\n".join(problems))
        # What is made under inference mode could not be used in a training step that follows.
        with torch.inference_mode(False), torch.no_grad():
            return RowExchange(
                make_peers(self.axis, x_TD.device, self.axis.timeout_s),
                num_experts=self.num_experts,
                alignment=self.alignment,
                options=self.options,
                num_tokens=max(num_tokens for num_tokens, _ in everywhere),
                top_k=ids_TK.shape[1],
                backend=self.kernels,
            )
