"""ElasticBuffer of V2.1 and EPBuffer of V2.5: DeepEP itself delivers one row a (token, choice), by expert."""

from typing import Any

import torch
from torch import Tensor

from coterie_parallel.dispatch.deep_ep.expand import aligned_up
from coterie_parallel.dispatch.deep_ep.transport import Arrived, Flight, Payload, Transport, unpacked

__all__ = ["ExpandedTransport"]


class ExpandedTransport(Transport):
    """The expanded layout, without a read of the host unless ``read_counts`` asks for exact sizes.

    Without it a rank's buffer has room for the worst case, ``ranks * max_tokens * min(K, e)`` rows and the padding.
    """

    def __init__(
        self, buffer: Any, *, num_experts: int, max_tokens: int, alignment: int, num_sms: int, read_counts: bool
    ) -> None:
        self._buffer = buffer
        self._alignment = alignment
        self._settings = {
            "num_experts": num_experts,
            "num_max_tokens_per_rank": max_tokens,
            "expert_alignment": alignment,
            "num_sms": num_sms,
            "do_cpu_sync": read_counts,
        }

    def send(self, payload: Payload, ids_TK: Tensor, weights_TK: Tensor) -> Flight[Arrived]:
        """See `Transport.send`."""
        arrived, _, row_weights_R, handle, event = self._buffer.dispatch(
            payload,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            async_with_compute_stream=True,
            do_expand=True,
            do_zero_padding=True,
            **self._settings,
        )

        def result() -> Arrived:
            # In this layout an entry is the end of the expert's real rows; the next expert starts at the next multiple.
            ends_e = aligned_up(handle.psum_num_recv_tokens_per_expert, self._alignment).to(torch.int32)
            return Arrived(rows_RD=unpacked(arrived), row_weights_R=row_weights_R, offsets_e=ends_e, way=handle)

        return Flight(event=event, result=result)

    def send_again(self, x_TD: Tensor, way: Any) -> Flight[Tensor]:
        """See `Transport.send_again`."""
        # DeepEP works the number of multiprocessors out from num_experts, which a cached dispatch does not take.
        rows_RD, _, _, _, event = self._buffer.dispatch(
            x_TD,
            handle=way,
            num_sms=way.num_sms,
            async_with_compute_stream=True,
            do_expand=True,
            do_zero_padding=True,
        )
        return Flight(event=event, result=lambda: rows_RD)

    def collect(self, rows_RD: Tensor, row_weights_R: Tensor | None, way: Any) -> Flight[tuple[Tensor, Tensor | None]]:
        """See `Transport.collect`."""
        y_TD, weights_TK, event = self._buffer.combine(
            rows_RD, way, topk_weights=row_weights_R, async_with_compute_stream=True
        )
        return Flight(event=event, result=lambda: (y_TD, weights_TK))

    def close(self) -> None:
        """See `Transport.close`."""
        self._buffer.destroy()
