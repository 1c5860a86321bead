"""One dispatch with its combine and their backward passes: what each autograd function does, and what is kept."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from coterie_parallel.dispatch.eager import runs_eagerly
from coterie_parallel.dispatch.options import SavedRows
from coterie_parallel.dispatch.rowwise.buffers import Lease, alias
from coterie_parallel.dispatch.rowwise.exchange import RowExchange
from coterie_parallel.dispatch.rowwise.placement import RowPlan
from coterie_parallel.dispatch.rowwise.used import copy_used
from coterie_parallel.once import differentiated_once

__all__ = ["Shipment", "is_in_backward"]


def is_in_backward() -> bool:
    """Return whether a backward pass is under way in this thread, so that a forward pass is a recomputed one."""
    return torch._C._current_graph_task_id() != -1


class Shipment:
    """The rows of one dispatch, until the end of their backward pass; the handle of the row-wise back-end.

    Forward: `send`, `arrive`, then `offer`, `collect`. Each is an autograd function whose backward is the mirror: that
    of `collect` sends gradients, that of `offer` waits for them, that of `arrive` offers the gradients of the rows, and
    that of `send` collects them. So work that was issued between two of them falls between their backward passes too.

    Args:
        exchange: moves the rows.
        plan: where they go.
        num_rows: R, rows that the experts get.
        has_backward: whether the dispatch takes part in a backward pass.
        saved_rows: how the rows are kept for it; None without gradients.
    """

    def __init__(
        self, exchange: RowExchange, plan: RowPlan, *, num_rows: int, has_backward: bool, saved_rows: SavedRows | None
    ) -> None:
        self.exchange = exchange
        self.plan = plan
        self.num_rows = num_rows
        self.has_backward = has_backward
        self.saved_rows = saved_rows
        # Rows past the end of the buffer were not written, and the step will be thrown away; the experts may still run.
        self.offsets_e = plan.offsets_e.clamp(max=num_rows)
        self._lease: Lease | None = None
        self._x_TD: Tensor | None = None
        self._version = 0
        self._fetched = False
        self._is_combined = False

    def send(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and weights that have not arrived yet; differentiable in both inputs."""
        rows_RD, row_weights_R = _Send.apply(x_TD, weights_TK, self)
        return rows_RD, row_weights_R

    def arrive(self, rows_RD: Tensor, row_weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for what `send` returned, and return it in a form that lasts as long as autograd needs it."""
        rows_RD, row_weights_R = _Arrive.apply(rows_RD, row_weights_R, self)
        return rows_RD, row_weights_R

    def offer(self, rows_RD: Tensor) -> Tensor:
        """Lay out the rows for their sources; what returns stands for them until `collect`.

        Raises:
            ValueError: for a second time under gradients; a recomputed forward pass does not count. For rows in
                memory that was lent and used since.
        """
        is_combined = self._is_combined
        if torch.is_grad_enabled() and rows_RD.requires_grad and not is_in_backward():
            # The gradients of the first would lie where those of the second come, while autograd still needs them.
            if self._is_combined:
                raise ValueError("a handle is combined once under gradients; dispatch again, or add the rows up before")
            is_combined = True
        token_RD: Tensor = _Offer.apply(rows_RD, self)
        self._is_combined = is_combined
        return token_RD

    def collect(self, token_RD: Tensor) -> Tensor:
        """Wait for the rows of all peers and return y_TD."""
        y_TD: Tensor = _Collect.apply(token_RD, self)
        return y_TD

    def keeping_rows(self) -> AbstractContextManager[object]:
        """Return the context in which the experts run; with "fetch" autograd gets the rows again and keeps none."""
        if self.saved_rows != "fetch":
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def lend(self) -> Tensor | None:
        """Return memory for the rows that are offered next, outputs or gradients, if there is any."""
        rows_CD = self._rows.local
        return self.exchange.lend(self, self.num_rows, rows_CD.shape[1], rows_CD.dtype)

    def _send(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        buffers = self.exchange.buffers
        if self.exchange.options.saved_rows == "lease":
            self._lease = buffers.lease(x_TD.shape[1], x_TD.dtype)
            self._rows = self._lease.rows
        else:
            self._rows = buffers.rows("rows", x_TD.shape[1], x_TD.dtype)
        if self.saved_rows == "fetch":
            self._x_TD, self._version = x_TD.detach(), x_TD._version
        self.exchange.put(x_TD, weights_TK, self.plan, self._rows, is_first=True)
        return alias(self._rows, self.num_rows), alias(buffers.values("row weights"), self.num_rows)

    def _arrive(self) -> tuple[Tensor, Tensor]:
        self.exchange.receive(self.plan, self._rows, with_weights=True)
        weights_R = self.exchange.buffers.values("row weights").local[: self.num_rows].clone()
        rows_RD = alias(self._rows, self.num_rows)
        if self.saved_rows == "copy":
            copy_RD = torch.empty_like(rows_RD)
            copy_used(rows_RD, copy_RD, self.offsets_e, backend=self.exchange.backend)
            rows_RD = copy_RD
        if self.saved_rows != "lease":
            self._end_lease()
        return rows_RD, weights_R

    def _send_gradients(self, grad_y_TD: Tensor) -> Tensor:
        buffers = self.exchange.buffers
        self._gradients = buffers.rows("gradients", grad_y_TD.shape[1], grad_y_TD.dtype)
        again = None
        if self._x_TD is not None:
            if self._x_TD._version != self._version:
                raise RuntimeError(
                    "the dispatched tokens were changed in place, and saved_rows = fetch sends them again"
                )
            self._fetched_rows = buffers.rows("fetched", self._x_TD.shape[1], self._x_TD.dtype)
            again = (self._x_TD, self._fetched_rows)
        self.exchange.put(grad_y_TD, None, self.plan, self._gradients, again=again)
        return alias(self._gradients, self.num_rows)

    def _receive_gradients(self) -> Tensor:
        self.exchange.receive(self.plan, self._gradients, with_weights=False)
        self._fetched = self._x_TD is not None
        return alias(self._gradients, self.num_rows)

    def _offer_gradients(self, grad_rows_RD: Tensor, grad_weights_R: Tensor) -> tuple[Tensor, Tensor]:
        self._outputs = self.exchange.offer(grad_rows_RD, grad_weights_R, self.offsets_e, self)
        weights = self.exchange.buffers.values("offered weights")
        return alias(self._outputs, self.num_rows), alias(weights, self.num_rows)

    def _collect_gradients(self) -> tuple[Tensor, Tensor]:
        grad_x_TD = self.exchange.collect(self.plan, self._outputs)
        grad_weights_TK = self.exchange.collect_values(self.plan)
        self._end_lease()
        self._fetched = False
        return grad_x_TD, grad_weights_TK

    def _end_lease(self) -> None:
        if self._lease is not None:
            self.exchange.buffers.give_back(self._lease)
            self._lease = None

    @runs_eagerly
    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        """Replace what is a view of the received rows by a way to have it again."""
        rows_CD = self._rows.local
        offset = saved.data_ptr() - rows_CD.data_ptr()
        if not 0 <= offset < rows_CD.nbytes or saved.device != rows_CD.device:
            return saved
        if saved.dtype != rows_CD.dtype:
            return saved.clone()
        shape, strides, first = saved.shape, saved.stride(), offset // saved.element_size()

        def fetched() -> Tensor:
            if not self._fetched:
                raise RuntimeError("saved_rows = fetch has rows only in the backward pass of their combine")
            rows_CD = self._fetched_rows.local
            return rows_CD.as_strided(shape, strides, rows_CD.storage_offset() + first)

        return fetched


@runs_eagerly
def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, shipment: Shipment) -> tuple[Tensor, Tensor]:
        ctx.shipment = shipment
        return shipment._send(x_TD, weights_TK)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.shipment._collect_gradients(), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, row_weights_R: Tensor, shipment: Shipment) -> tuple[Tensor, Tensor]:
        ctx.shipment = shipment
        return shipment._arrive()

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # Both always travel, whatever this rank needs: peers may need them, and an exchange takes all ranks.
        return *ctx.shipment._offer_gradients(*grads), None


class _Offer(Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, shipment: Shipment) -> Tensor:
        ctx.shipment = shipment
        shipment._outputs = shipment.exchange.offer(rows_RD, None, shipment.offsets_e, shipment)
        return alias(shipment._outputs, shipment.num_rows)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.shipment._receive_gradients(), None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, token_RD: Tensor, shipment: Shipment) -> Tensor:
        ctx.shipment = shipment
        return shipment.exchange.collect(shipment.plan, shipment._outputs)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.shipment._send_gradients(*grads), None
