"""The dispatcher of one rank that holds all experts: a permutation, no communication."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_parallel.dispatch.base import Dispatched, Dispatcher
from coterie_parallel.dispatch.eager import runs_eagerly
from coterie_parallel.dispatch.options import DispatchOptions, unused_problems
from coterie_parallel.dispatch.order import Segments, SortedPairs, pad_rows, segments, sort_pairs, sum_choices
from coterie_parallel.dispatch.route import check_handle, combine, dispatch, takes_backward

__all__ = ["LocalDispatcher"]


@dataclass(frozen=True, kw_only=True)
class _LocalRoute:
    pairs: SortedPairs
    placed: Segments
    row_TK: Tensor
    has_backward: bool
    owner: Dispatcher

    @property
    def num_rows(self) -> int:
        return self.placed.num_rows

    def send_rows(self, x_TD: Tensor) -> Tensor:
        rows_PD = x_TD.index_select(0, self.pairs.token_P)
        return rows_PD if rows_PD.shape[0] == self.placed.num_rows else pad_rows(rows_PD, self.placed)

    def send_weights(self, weights_TK: Tensor) -> Tensor:
        return pad_rows(weights_TK.flatten()[self.pairs.pair_P], self.placed)

    def return_rows(self, rows_RD: Tensor) -> Tensor:
        return sum_choices(rows_RD, self.row_TK)

    def return_weights(self, row_weights_R: Tensor) -> Tensor:
        weights_N = row_weights_R.new_zeros(self.row_TK.numel())
        weights_N[self.pairs.pair_P] = row_weights_R[self.placed.row_P]
        return weights_N.view(self.row_TK.shape)


class LocalDispatcher(Dispatcher):
    """Reorders the rows of one rank by expert."""

    reuses_buffers = False

    @classmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        """Refuse an expert axis of more than one rank."""
        if expert_degree != 1:
            return (
                f'dispatcher "local" needs an expert degree of 1, got {expert_degree}; '
                'use dispatcher "all_to_all", or set expert to 1'
            )
        return None

    @classmethod
    def option_problems(cls, options: DispatchOptions, *, top_k: int | None = None) -> list[str]:
        """Refuse settings of buffers: there are none."""
        return unused_problems(options, "local")

    @runs_eagerly
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        self.check_arguments(x_TD, ids_TK, weights_TK)
        pairs = sort_pairs(ids_TK, self.num_experts)
        placed = segments(pairs.counts_E.unsqueeze(0), self.alignment)
        row_N = torch.full_like(pairs.slot_TK, -1).flatten()
        row_N[pairs.pair_P] = placed.row_P
        route = _LocalRoute(
            pairs=pairs,
            placed=placed,
            row_TK=row_N.view(ids_TK.shape),
            has_backward=takes_backward(x_TD, weights_TK),
            owner=self,
        )
        rows_RD, row_weights_R = dispatch(x_TD, weights_TK, route)
        return Dispatched(rows_RD, row_weights_R, placed.offsets_e, route)

    @runs_eagerly
    def combine(self, rows_RD: Tensor, handle: _LocalRoute) -> Tensor:
        """See `Dispatcher.combine`."""
        check_handle(getattr(handle, "owner", None) is self, handle)
        return combine(rows_RD, handle)
