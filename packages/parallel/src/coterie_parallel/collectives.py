"""Collectives that take an axis, never a default group, and name it when they fail.

None of them has a backward: a tensor that requires a gradient is refused, so that no gradient is lost in silence.
An axis of one rank returns at once. On a GPU a fault may be raised by torch's watchdog instead of by the call; the
name of the group then stands in its message.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coterie_parallel.axis import Axis

__all__ = [
    "CollectiveError",
    "Pending",
    "all_gather",
    "all_gather_objects",
    "all_reduce_max",
    "all_reduce_sum",
    "all_reduce_sum_",
    "barrier",
    "broadcast_",
    "end_waits",
    "exchange_rows",
    "start_all_gather",
    "start_all_to_all",
    "start_receive",
    "start_reduce_scatter",
    "start_send",
]

# Messages of `start_send` have tag 0.
_TAG_OF_NO_MESSAGE = 1

# torch 2.13 renamed these two and warns at the old names, which are the only ones before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveError(RuntimeError):
    """A collective failed: a peer died, stopped or was later than the time-out."""


@contextmanager
def _named(what: str, axis: Axis) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ranks = ", ".join(map(str, axis.ranks))
        raise CollectiveError(
            f"{what} on the {axis.name!r} axis (ranks {ranks}) failed on rank {axis.ranks[axis.index]}: "
            f"a peer stopped, died or was later than the time-out. {error}"
        ) from error


def _refuse_gradient(what: str, tensor: Tensor) -> None:
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(f"{what} has no backward, and its input requires a gradient; detach the input first")


def all_reduce_sum_(tensor: Tensor, axis: Axis) -> Tensor:
    """Replace ``tensor`` by its sum over ``axis`` and return it; the result is equal on all ranks of the axis."""
    _refuse_gradient("all_reduce_sum", tensor)
    if axis.group is not None:
        with _named("all_reduce_sum", axis):
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=axis.group)
    return tensor


def all_reduce_sum(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum of ``tensor`` over ``axis`` as a new tensor; the result is equal on all ranks of the axis."""
    _refuse_gradient("all_reduce_sum", tensor)
    return all_reduce_sum_(tensor.clone(memory_format=torch.contiguous_format), axis)


def all_reduce_max(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise largest value of ``tensor`` over ``axis`` as a new tensor."""
    _refuse_gradient("all_reduce_max", tensor)
    result = tensor.clone(memory_format=torch.contiguous_format)
    if axis.group is not None:
        with _named("all_reduce_max", axis):
            dist.all_reduce(result, dist.ReduceOp.MAX, group=axis.group)
    return result


def broadcast_(tensor: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Replace ``tensor`` by the one of axis index ``source`` and return it; it must be contiguous."""
    _refuse_gradient("broadcast", tensor)
    if axis.group is not None:
        with _named("broadcast", axis):
            dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def all_gather(tensor: Tensor, axis: Axis) -> list[Tensor]:
    """Return the tensors of all ranks in the order of the axis index; shape and dtype must be the same on all."""
    _refuse_gradient("all_gather", tensor)
    if axis.group is None:
        return [tensor.clone()]
    results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in axis.ranks]
    with _named("all_gather", axis):
        dist.all_gather(results, tensor.contiguous(), group=axis.group)
    return results


def all_gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return the picklable values of all ranks in the order of the axis index; for small things on the host."""
    if axis.group is None:
        return [value]
    results: list[Any] = [None] * axis.size
    with _named("all_gather_objects", axis):
        dist.all_gather_object(results, value, group=axis.group)
    return results


def barrier(axis: Axis) -> None:
    """Wait until every rank of ``axis`` is here."""
    all_gather_objects(None, axis)


def exchange_rows(rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: Axis) -> Tensor:
    """Send consecutive rows to each rank of ``axis`` and return what came, in the order of the axis index.

    Args:
        rows: (sum of send_counts, ...), the rows for index 0 first.
        send_counts: number of rows for each axis index, may be zero.
        receive_counts: number of rows that come from each axis index, may be zero.
        axis: every rank of it must call, also one that sends and receives nothing.
    """
    _refuse_gradient("exchange_rows", rows)
    if axis.group is None:
        return rows
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    with _named("exchange_rows", axis):
        dist.all_to_all_single(received, rows.contiguous(), list(receive_counts), list(send_counts), group=axis.group)
    return received


class Pending:
    """A collective, a send or a receive under way.

    Its tensors must live, and its result is not there, until `wait` has returned. On a GPU ``wait`` makes the current
    stream wait, not the host.
    """

    def __init__(self, what: str, axis: Axis, work: dist.Work | None) -> None:
        self._what, self._axis, self._work = what, axis, work

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait for the result; a second call does nothing."""
        if self._work is not None:
            with _named(self._what, self._axis):
                self._work.wait()
            self._work = None


def start_all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Start to fill ``whole`` with the ``part`` of every rank, in the order of the axis index.

    Args:
        whole: (size of the axis * N), contiguous.
        part: (N), contiguous, of the same dtype on all ranks.
        axis: every rank of it must call; it must have more than one.
    """
    _refuse_gradient("all_gather", part)
    with _named("all_gather", axis):
        work = _all_gather_single(whole, part, group=axis.group, async_op=True)
    return Pending("all_gather", axis, work)


def start_all_to_all(received: Tensor, sent: Tensor, axis: Axis) -> Pending:
    """Start to exchange equal parts: part ``i`` of ``sent`` goes to index ``i``, part ``i`` of ``received`` is from it.

    Args:
        received: (size of the axis * N), contiguous.
        sent: (size of the axis * N), contiguous.
        axis: every rank of it must call; it must have more than one.
    """
    _refuse_gradient("all_to_all", sent)
    with _named("all_to_all", axis):
        work = dist.all_to_all_single(received, sent, group=axis.group, async_op=True)
    return Pending("all_to_all", axis, work)


def start_reduce_scatter(part: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Start to fill ``part`` with this rank's part of the sum of ``whole`` over the axis; the back-end orders the sum.

    Args:
        part: (N), contiguous.
        whole: (size of the axis * N), contiguous.
        axis: every rank of it must call; it must have more than one.
    """
    _refuse_gradient("reduce_scatter", whole)
    with _named("reduce_scatter", axis):
        work = _reduce_scatter_single(part, whole, op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    return Pending("reduce_scatter", axis, work)


def start_send(tensor: Tensor, axis: Axis, *, to: int) -> Pending:
    """Start to send a contiguous tensor to axis index ``to``, which must call `start_receive` for it."""
    _refuse_gradient("send", tensor)
    with _named("send", axis):
        work = dist.isend(tensor, axis.ranks[to], group=axis.group)
    return Pending("send", axis, work)


def start_receive(tensor: Tensor, axis: Axis, *, source: int) -> Pending:
    """Start to fill a contiguous tensor with what axis index ``source`` sends; what it sends comes in its order."""
    with _named("receive", axis):
        work = dist.irecv(tensor, axis.ranks[source], group=axis.group)
    return Pending("receive", axis, work)


def end_waits(axis: Axis) -> None:
    """Close this rank's gloo connections of ``axis``: what a peer sends to it or receives from it fails at once.

    For a rank that has failed: a group of gloo can not be aborted, but a receive that is later than its time-out closes
    all connections of its group, so this lets one be late. NCCL's communicators stay as they are. Raises nothing.
    """
    for rank in axis.ranks:
        # One whose connection is gone fails without closing the others, so every peer is asked.
        if rank != axis.ranks[axis.index]:
            with suppress(RuntimeError):
                receive = dist.irecv(torch.empty(1), rank, group=axis.group, tag=_TAG_OF_NO_MESSAGE)
                assert receive is not None
                receive.wait(timedelta(milliseconds=1))
