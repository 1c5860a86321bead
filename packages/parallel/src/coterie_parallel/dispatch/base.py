"""The contract of a dispatcher."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.dispatch.guarantees import Guarantees
from coterie_parallel.dispatch.options import DispatchOptions, misplaced_problems

__all__ = ["Dispatched", "Dispatcher"]


class Dispatched(NamedTuple):
    """The rows that one rank received for its experts.

    Shapes and dtypes:
        rows_RD: dtype of the tokens; ordered by local expert, then source rank, then token, then choice.
        row_weights_R: fp32, the routing weight of each row.
        offsets_e: int32, the inclusive end of each local expert's segment. Ends are multiples of the alignment; the
            padding rows inside a segment are zero with weight zero. Rows past the last end are never read.
        handle: what `Dispatcher.combine` needs to bring the rows back; opaque.
    """

    rows_RD: Tensor
    row_weights_R: Tensor
    offsets_e: Tensor
    handle: Any


class Dispatcher(ABC):
    """Moves rows between the ranks of an expert axis; a communication back-end subclasses it.

    `dispatch` and `combine` are differentiable, each is the other's backward, and every rank of the axis must take part
    in both and in their backward, also one without tokens or without rows. One dispatcher serves all layers of a model.
    A back-end may use its buffers again: without gradients rows last until the next dispatch, and a gradient that a
    backward pass hands to rows lasts until the next exchange.

    A handle goes to `combine` of the dispatcher that gave it. Under gradients it is combined once: a back-end may have
    one place for the gradients of its rows. A call that is refused leaves the dispatcher as it was.

    Both can be called in two parts, start and finish, with other work between them; a back-end that has no use for that
    inherits parts that do everything in the first. A start is finished before the next one, unless what it returned is
    given up, as by a recomputed forward pass that stops early, on all ranks alike.

    Args:
        num_experts: E, all experts of the layer.
        axis: the expert axis; its index j owns the experts ``[j * E / size, (j + 1) * E / size)``.
        alignment: every segment of rows ends at a multiple of it.
        options: the wishes of the user; each back-end says which of them it has a use for.

    Raises:
        ValueError: with the reason given by `supports`, or what `option_problems` says of the options.
    """

    reads_host_on_gpu = True
    """Whether the host reads tensors on a GPU as on a CPU; False where it does so on a CPU only, as that is free."""

    reuses_buffers = True
    """Whether rows or their gradients may lie in memory that a later exchange writes over."""

    def __init__(
        self, *, num_experts: int, axis: Axis, alignment: int = 1, options: DispatchOptions | None = None
    ) -> None:
        reason = self.supports(num_experts=num_experts, expert_degree=axis.size, alignment=alignment)
        if reason is not None:
            raise ValueError(reason)
        if num_experts < 1 or num_experts % axis.size:
            raise ValueError(
                f"num_experts ({num_experts}) must be a positive multiple of the expert degree ({axis.size})"
            )
        if alignment < 1:
            raise ValueError(f"alignment ({alignment}) must be at least 1; 1, 16 and 128 are usual")
        options = DispatchOptions() if options is None else options
        problems = self.option_problems(options)
        if problems:
            raise ValueError("\n".join(problems))
        self.num_experts = num_experts
        self.axis = axis
        self.alignment = alignment
        self.options = options

    @classmethod
    @abstractmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        """Return None if this back-end can run so here, else the reason and what to do about it."""

    @classmethod
    def option_problems(cls, options: DispatchOptions, *, top_k: int | None = None) -> list[str]:
        """Return what keeps this back-end from doing what ``options`` ask for; ``top_k`` where it is known."""
        return options.problems(top_k) + misplaced_problems(options)

    @classmethod
    def guarantees(cls, options: DispatchOptions) -> Guarantees:
        """Return what this back-end promises with ``options``; one that keeps all of the contract inherits this.

        The conformance suite holds a back-end to what it declares here.
        """
        return Guarantees()

    @classmethod
    def token_problems(
        cls, options: DispatchOptions, *, width: int, num_choices: int, dtype: torch.dtype, device: str | None = None
    ) -> list[str]:
        """Return why tokens of this kind can not be sent, to ask before any is there; ``device`` None where not known.

        Args:
            options: of the dispatcher; without faults.
            width: columns of the tokens.
            num_choices: K.
            dtype: of the tokens.
            device: type of the device where the tokens would be.
        """
        return []

    @abstractmethod
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Send the row of each (token, choice) pair to the owner of its expert.

        Args:
            x_TD: tokens of this rank; T may be zero and may differ between ranks, D may not.
            ids_TK: int64 global expert ids; -1 means that the pair is not routed.
            weights_TK: fp32 routing weights.

        Raises:
            ValueError: for a wrong shape, dtype or device, or an id outside [-1, E).
        """

    @abstractmethod
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Bring the rows back and return y_TD in their dtype: the plain fp32 sum, in k order, of a token's K rows.

        Raises:
            ValueError: for another number of rows, rows that are cut off from the graph, or a handle that is not one of
                this dispatcher.
        """

    def dispatch_start(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Any:
        """Begin a `dispatch` and return what `dispatch_finish` needs."""
        return self.dispatch(x_TD, ids_TK, weights_TK)

    def dispatch_finish(self, pending: Any) -> Dispatched:
        """Wait for the rows of a `dispatch_start` and return them."""
        found: Dispatched = pending
        return found

    def combine_start(self, rows_RD: Tensor, handle: Any) -> Any:
        """Begin a `combine` and return what `combine_finish` needs."""
        return self.combine(rows_RD, handle)

    def combine_finish(self, pending: Any) -> Tensor:
        """Wait for the rows of a `combine_start` and return y_TD."""
        y_TD: Tensor = pending
        return y_TD

    def memory_for_combine(self, handle: Any) -> Tensor | None:
        """Return memory for the experts' outputs, which `combine` of ``handle`` then brings back without a copy.

        Ask when they are about to be written, on the stream that writes them. Whether a rank asks, and what it does
        with the memory, is its own affair: `combine` takes other rows as well. Rows in this memory are combined before
        those of another handle are, and are not used after that.

        Returns:
            Shape and dtype of the rows that came, any values; or None, where the back-end copies or sends in any case,
            has lent that memory to a handle that is still to be combined, or would have to wait for peers.
        """
        return None

    def memory_for_gradients(self, handle: Any) -> Tensor | None:
        """Return memory for the gradient of the rows, which the backward pass of `dispatch` then need not copy.

        As `memory_for_combine`, for the backward pass of the experts. Only one gradient is written to it: where rows
        are used twice, the second one who asks gets None.
        """
        return None

    def saved_rows(self, handle: Any) -> AbstractContextManager[object]:
        """Return a context for the forward pass of the experts on the rows of ``handle``: how autograd saves them."""
        return nullcontext()

    def unsaved_rows(self) -> AbstractContextManager[object]:
        """Return a context for dispatches whose rows nobody keeps for the backward pass, as it computes them again.

        The rows last until the next dispatch, as without gradients.
        """
        return nullcontext()

    def counters(self) -> dict[str, Tensor]:
        """Return int64 scalars on the device; a back-end without buffers of a fixed size has none.

        ``rows_needed_max``: the most rows that a rank needed so far. ``overflowed``: 1 after rows found no room, until
        `grow`; what was computed since is wrong. ``rows_dropped``: pairs of this rank that were left out so far.
        ``ids_outside``: ids of this rank so far that were not in [-1, E). The first two are the same on all ranks of
        the axis.
        """
        return {}

    def check(self) -> None:  # noqa: B027 (a back-end without waits on a device has nothing to do)
        """Raise if a wait on the device ended without its peers; called once at the end of a step."""

    def grow(self) -> str | None:
        """Make room after an overflow; all ranks of the axis call together, at the end of a step.

        A call before the first dispatch, which does nothing else, says that the caller will ask; to one that never
        has, a back-end may give a warning where rows found no room.

        Returns:
            None if nothing overflowed. Else a sentence to be shown, and the caller throws away what it computed since
            the last call and computes it again.

        Raises:
            ValueError: on all ranks, for ids outside [-1, E) that no dispatch has refused.
        """
        return None

    def close(self) -> None:  # noqa: B027 (nor has one without memory of its own)
        """Give up all memory; may be called twice and after an error, and peers need not take part."""

    def check_arguments(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, reads_ids: bool = True) -> None:
        """Raise ValueError if the arguments of `dispatch` break its contract; the values of ids if ``reads_ids``."""
        if x_TD.ndim != 2 or not x_TD.is_floating_point():
            raise ValueError(f"x_TD must be a floating-point matrix, got {_describe(x_TD)}")
        expected = f"({x_TD.shape[0]}, K) on {x_TD.device}"
        if ids_TK.ndim != 2 or ids_TK.shape[0] != x_TD.shape[0] or ids_TK.dtype != torch.int64:
            raise ValueError(f"ids_TK must be int64 of shape {expected}, got {_describe(ids_TK)}")
        if weights_TK.shape != ids_TK.shape or weights_TK.dtype != torch.float32:
            raise ValueError(f"weights_TK must be float32 of shape {tuple(ids_TK.shape)}, got {_describe(weights_TK)}")
        if not (x_TD.device == ids_TK.device == weights_TK.device):
            raise ValueError(
                f"x_TD, ids_TK and weights_TK must be on one device, got {x_TD.device}, {ids_TK.device}, "
                f"{weights_TK.device}"
            )
        if reads_ids and ids_TK.numel():
            lowest, highest = torch.stack(ids_TK.aminmax()).tolist()
            if lowest < -1 or highest >= self.num_experts:
                raise ValueError(f"ids_TK must lie in [-1, {self.num_experts}), got values from {lowest} to {highest}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
