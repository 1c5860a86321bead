"""The dispatcher over torch.distributed: exact counts, one exchange for the rows and one for the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import exchange_rows
from coterie_parallel.dispatch.base import Dispatched, Dispatcher
from coterie_parallel.dispatch.eager import runs_eagerly
from coterie_parallel.dispatch.options import DispatchOptions, unused_problems
from coterie_parallel.dispatch.order import Segments, SortedPairs, pad_rows, segments, sort_pairs, sum_choices
from coterie_parallel.dispatch.route import check_handle, combine, dispatch, takes_backward

__all__ = ["AllToAllDispatcher"]


@dataclass(frozen=True, kw_only=True)
class _ExchangeRoute:
    pairs: SortedPairs
    placed: Segments
    sent: Sequence[int]
    received: Sequence[int]
    axis: Axis
    has_backward: bool
    owner: Dispatcher

    @property
    def num_rows(self) -> int:
        return self.placed.num_rows

    def send_rows(self, x_TD: Tensor) -> Tensor:
        return self._send(x_TD.index_select(0, self.pairs.token_P))

    def send_weights(self, weights_TK: Tensor) -> Tensor:
        return self._send(weights_TK.flatten()[self.pairs.pair_P])

    def return_rows(self, rows_RD: Tensor) -> Tensor:
        return sum_choices(self._return(rows_RD), self.pairs.slot_TK)

    def return_weights(self, row_weights_R: Tensor) -> Tensor:
        weights_N = row_weights_R.new_zeros(self.pairs.slot_TK.numel())
        weights_N[self.pairs.pair_P] = self._return(row_weights_R)
        return weights_N.view(self.pairs.slot_TK.shape)

    def _send(self, rows_P: Tensor) -> Tensor:
        return pad_rows(exchange_rows(rows_P, self.sent, self.received, self.axis), self.placed)

    def _return(self, rows_R: Tensor) -> Tensor:
        return exchange_rows(rows_R.index_select(0, self.placed.row_P), self.received, self.sent, self.axis)


class AllToAllDispatcher(Dispatcher):
    """Exchanges exactly the rows that are routed; the host reads the counts once a dispatch."""

    reuses_buffers = False

    @classmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        """Accept every size."""
        return None

    @classmethod
    def option_problems(cls, options: DispatchOptions, *, top_k: int | None = None) -> list[str]:
        """Refuse settings of buffers: there are none."""
        return unused_problems(options, "all_to_all")

    @runs_eagerly
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        self.check_arguments(x_TD, ids_TK, weights_TK)
        pairs = sort_pairs(ids_TK, self.num_experts)
        # Pairs are sorted by global expert, hence by the rank that owns it, then by its local expert.
        sent_se = pairs.counts_E.view(self.axis.size, -1)
        ones = [1] * self.axis.size
        received_se = exchange_rows(sent_se, ones, ones, self.axis)
        route = _ExchangeRoute(
            pairs=pairs,
            placed=segments(received_se, self.alignment),
            sent=sent_se.sum(1).tolist(),
            received=received_se.sum(1).tolist(),
            axis=self.axis,
            has_backward=takes_backward(x_TD, weights_TK),
            owner=self,
        )
        rows_RD, row_weights_R = dispatch(x_TD, weights_TK, route)
        return Dispatched(rows_RD, row_weights_R, route.placed.offsets_e, route)

    @runs_eagerly
    def combine(self, rows_RD: Tensor, handle: _ExchangeRoute) -> Tensor:
        """See `Dispatcher.combine`."""
        check_handle(getattr(handle, "owner", None) is self, handle)
        return combine(rows_RD, handle)
