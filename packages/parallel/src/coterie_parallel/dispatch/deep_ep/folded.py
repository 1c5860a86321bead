"""Buffer of V1 and ElasticBuffer of V2.0: DeepEP delivers a token once a rank, and its rows are made here.

V2.0 has an expanded layout too, but none for a cached dispatch, which the backward pass needs.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie_parallel.dispatch.deep_ep.expand import Expansion, expansion
from coterie_parallel.dispatch.deep_ep.transport import Arrived, Flight, Payload, Transport, unpacked

__all__ = ["ElasticFoldedTransport", "LegacyTransport"]


@dataclass(frozen=True, kw_only=True)
class _Way:
    handle: Any
    expansion: Expansion


class _FoldedTransport(Transport):
    """Expands what arrives, and adds the rows of a token before they go back; both on the device."""

    def __init__(self, buffer: Any, *, num_local: int, alignment: int) -> None:
        self._buffer = buffer
        self._num_local = num_local
        self._alignment = alignment

    @abstractmethod
    def _combine(self, x_nD: Tensor, weights_nK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Start DeepEP's combine; return tokens, weights and event."""

    def _arrived(self, payload: Payload, ids_nK: Tensor, weights_nK: Tensor, handle: Any) -> Arrived:
        places = expansion(ids_nK, num_local=self._num_local, alignment=self._alignment)
        return Arrived(
            rows_RD=places.rows(unpacked(payload)),
            row_weights_R=places.values(weights_nK),
            offsets_e=places.offsets_e,
            way=_Way(handle=handle, expansion=places),
        )

    def collect(self, rows_RD: Tensor, row_weights_R: Tensor | None, way: Any) -> Flight[tuple[Tensor, Tensor | None]]:
        """See `Transport.collect`."""
        sums_nD = way.expansion.sums(rows_RD)
        weights_nK = None if row_weights_R is None else way.expansion.pair_values(row_weights_R)
        y_TD, weights_TK, event = self._combine(sums_nD, weights_nK, way.handle)
        return Flight(event=event, result=lambda: (y_TD, weights_TK))

    def close(self) -> None:
        """See `Transport.close`."""
        self._buffer.destroy()


class LegacyTransport(_FoldedTransport):
    """V1. Unless ``read_counts`` asks for exact sizes, ``ranks * max_tokens`` tokens have room on every rank."""

    def __init__(
        self,
        buffer: Any,
        *,
        num_experts: int,
        num_ranks: int,
        max_tokens: int,
        alignment: int,
        read_counts: bool,
    ) -> None:
        super().__init__(buffer, num_local=num_experts // num_ranks, alignment=alignment)
        self._num_experts = num_experts
        self._worst_tokens = 0 if read_counts else num_ranks * max_tokens

    def send(self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor) -> Flight[Arrived]:
        """See `Transport.send`."""
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(ids_TK, self._num_experts)
        arrived, ids_nK, weights_nK, _, handle, event = self._buffer.dispatch(
            payload,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_worst_tokens=self._worst_tokens,
            async_finish=True,
        )
        return Flight(event=event, result=lambda: self._arrived(arrived, ids_nK, weights_nK, handle))

    def send_again(self, x_TD: Tensor, way: Any) -> Flight[Tensor]:
        """See `Transport.send_again`."""
        x_nD, _, _, _, _, event = self._buffer.dispatch(x_TD, handle=way.handle, async_finish=True)
        return Flight(event=event, result=lambda: way.expansion.rows(x_nD))

    def _combine(self, x_nD: Tensor, weights_nK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Any]:
        y_TD, weights_TK, event = self._buffer.combine(x_nD, handle, topk_weights=weights_nK, async_finish=True)
        return y_TD, weights_TK, event


class ElasticFoldedTransport(_FoldedTransport):
    """V2.0. Unless ``read_counts`` asks for exact sizes, ``ranks * max_tokens`` tokens have room on every rank."""

    def __init__(
        self,
        buffer: Any,
        *,
        num_experts: int,
        num_ranks: int,
        max_tokens: int,
        alignment: int,
        num_sms: int,
        read_counts: bool,
    ) -> None:
        super().__init__(buffer, num_local=num_experts // num_ranks, alignment=alignment)
        self._settings = {
            "num_experts": num_experts,
            "num_max_tokens_per_rank": max_tokens,
            "num_sms": num_sms,
            "do_cpu_sync": read_counts,
        }

    def send(self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor) -> Flight[Arrived]:
        """See `Transport.send`."""
        arrived, ids_nK, weights_nK, handle, event = self._buffer.dispatch(
            payload, topk_idx=ids_TK, topk_weights=weights_TK, async_with_compute_stream=True, **self._settings
        )

        def result() -> Arrived:
            # Without a read of the host the tail of the buffer is not written, its ids included.
            arrived_n = torch.arange(ids_nK.shape[0], device=ids_nK.device)
            unwritten_n1 = (arrived_n >= handle.psum_num_recv_tokens_per_scaleup_rank[-1]).unsqueeze(1)
            return self._arrived(arrived, ids_nK.masked_fill(unwritten_n1, -1), weights_nK, handle)

        return Flight(event=event, result=result)

    def send_again(self, x_TD: Tensor, way: Any) -> Flight[Tensor]:
        """See `Transport.send_again`."""
        # DeepEP works the number of multiprocessors out from num_experts, which a cached dispatch does not take.
        x_nD, _, _, _, event = self._buffer.dispatch(
            x_TD, handle=way.handle, num_sms=way.handle.num_sms, async_with_compute_stream=True
        )
        return Flight(event=event, result=lambda: way.expansion.rows(x_nD))

    def _combine(self, x_nD: Tensor, weights_nK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None, Any]:
        y_TD, weights_TK, event = self._buffer.combine(
            x_nD, handle, topk_weights=weights_nK, async_with_compute_stream=True
        )
        return y_TD, weights_TK, event
