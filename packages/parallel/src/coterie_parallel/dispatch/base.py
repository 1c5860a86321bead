"""The contract of a dispatcher."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie_parallel.axis import Axis

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
    in both and in their backward, also one without tokens or without rows.

    Args:
        num_experts: E, all experts of the layer.
        axis: the expert axis; its index j owns the experts ``[j * E / size, (j + 1) * E / size)``.
        alignment: every segment of rows ends at a multiple of it.

    Raises:
        ValueError: with the reason given by `supports`.
    """

    def __init__(self, *, num_experts: int, axis: Axis, alignment: int = 1) -> None:
        reason = self.supports(num_experts=num_experts, expert_degree=axis.size, alignment=alignment)
        if reason is not None:
            raise ValueError(reason)
        if num_experts < 1 or num_experts % axis.size:
            raise ValueError(
                f"num_experts ({num_experts}) must be a positive multiple of the expert degree ({axis.size})"
            )
        if alignment < 1:
            raise ValueError(f"alignment ({alignment}) must be at least 1; 1, 16 and 128 are usual")
        self.num_experts = num_experts
        self.axis = axis
        self.alignment = alignment

    @classmethod
    @abstractmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        """Return None if this back-end can run so here, else the reason and what to do about it."""

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
        """Bring the rows back and return y_TD in their dtype: the plain fp32 sum, in k order, of a token's K rows."""

    def check_arguments(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Raise ValueError if the arguments of `dispatch` break its contract; reads the ids on the host."""
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
        if ids_TK.numel():
            lowest, highest = torch.stack(ids_TK.aminmax()).tolist()
            if lowest < -1 or highest >= self.num_experts:
                raise ValueError(f"ids_TK must lie in [-1, {self.num_experts}), got values from {lowest} to {highest}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
