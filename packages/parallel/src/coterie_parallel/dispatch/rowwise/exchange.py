"""How rows move between the ranks of an axis, phase by phase, without a word about gradients.

A dispatch is `announce`, `place`, `put`, `receive`; a combine is `offer`, `collect`. Between two phases every rank has
signalled the end of the first, so several ranks in one process can be driven phase by phase.

Why one set of buffers is enough: a rank sends rows only after it has waited for the counts, or for the outputs, of all
peers; each gave that signal when its reads of earlier rows were behind it in its stream. Likewise outputs are written
only after rows of all peers came, so after all have read earlier outputs. Where two exchanges of one kind follow each
other, as in a recomputed forward pass that ends before its combine, a signal of its own separates them.

An exchange may be given up between its signal and its wait, by a recomputed forward pass that stops there. Signals are
counted, so the next exchange of that kind first waits for those of the one that was given up.

The memory that `offer` copies to can be lent before, to be written in place. That is no exchange and waits for nothing:
it is lent only where rows of all peers have come since the last outputs, and where it has been made.
"""

import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie_parallel.dispatch.options import DispatchOptions
from coterie_parallel.dispatch.rowwise.buffers import Buffers, alias
from coterie_parallel.dispatch.rowwise.capacity import (
    Counters,
    expert_counts,
    first_capacity,
    grown_capacity,
    heaviest_pairs,
    rows_needed,
)
from coterie_parallel.dispatch.rowwise.peers import PeerMemory, PeerTensor
from coterie_parallel.dispatch.rowwise.placement import RowPlan, count_pairs, place_rows
from coterie_parallel.dispatch.rowwise.rows import clear_padding, get_rows, get_values, put_rows
from coterie_parallel.dispatch.rowwise.used import copy_used

__all__ = ["Announced", "RowExchange"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Announced:
    """What a rank has told its peers of one dispatch; ``position_TK`` as `count_pairs` gives it, None for "drop"."""

    ids_TK: Tensor
    position_TK: Tensor | None


class RowExchange:
    """One rank's part in the exchanges of an axis, with its buffers and counters.

    Args:
        peers: memory that the ranks share.
        num_experts: E.
        alignment: segments end at multiples of it.
        options: overflow policy and capacity factor.
        num_tokens: the largest number of tokens of a rank that there is room for at first.
        top_k: K.
        backend: of the kernels; see `put_rows`.
    """

    def __init__(
        self,
        peers: PeerMemory,
        *,
        num_experts: int,
        alignment: int,
        options: DispatchOptions,
        num_tokens: int,
        top_k: int,
        backend: str = "auto",
    ) -> None:
        self.peers = peers
        self.num_experts = num_experts
        self.num_local = num_experts // peers.size
        self.alignment = alignment
        self.options = options
        self.top_k = top_k
        self.counters = Counters(peers.device)
        self.backend = backend
        self._last = ""
        self._unwaited: set[str] = set()
        # Whether all peers have read what was offered last; and to whom that memory is lent.
        self._is_read = True
        self._borrower: weakref.ref[object] | None = None
        self.num_tokens = max(1, num_tokens)
        self.buffers = Buffers(peers, self.first_capacity(options.capacity_factor))
        self._make_boards()

    def announce(self, ids_TK: Tensor, weights_TK: Tensor) -> Announced:
        """Tell all peers what this rank routes: its counts, or for "drop" its ids and weights."""
        self.counters.add_ids(ids_TK, self.num_experts)
        if self.options.overflow == "drop":
            return self._announce_choices(ids_TK, weights_TK)
        counts_E, position_TK = count_pairs(ids_TK, self.num_experts, backend=self.backend)
        self._tell(counts_E.unsqueeze(0), self._counts)
        self.peers.signal("counts")
        return Announced(ids_TK=ids_TK, position_TK=position_TK)

    def place(self, announced: Announced) -> tuple[RowPlan, int]:
        """Wait for what all peers told, and return where the rows of this rank go, and R; makes room for "exact"."""
        self.peers.wait("counts")
        if announced.position_TK is None:
            return self._place_heaviest(announced.ids_TK), self.buffers.capacity
        plan = self._plan(self._counts.local, announced.ids_TK, announced.position_TK)
        if self.options.overflow != "exact":
            self.counters.add_need(plan.need_S, self.buffers.capacity)
            return plan, self.buffers.capacity
        self.counters.add_need(plan.need_S, None)
        need = plan.need_S.tolist()
        if max(need) > self.buffers.capacity:
            # All peers have told their counts, so nobody reads the old buffers any more.
            self.buffers.resize(grown_capacity(max(need), self.alignment))
        return plan, need[self.peers.index]

    def put(
        self,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        plan: RowPlan,
        rows: PeerTensor,
        *,
        again: tuple[Tensor, PeerTensor] | None = None,
        is_first: bool = False,
    ) -> None:
        """Send rows to the buffers ``rows`` of their owners, and say so.

        Args:
            x_TD: rows of this rank's tokens.
            weights_TK: fp32, or None to send none.
            plan: where they go.
            rows: the buffer.
            again: other rows, and a buffer for them, that go to the same places.
            is_first: this follows `place`, so peers are known to be done with earlier rows.
        """
        self._wait_once("rows")
        if not is_first:
            self._separate("put")
        self._last = "put"
        row_weights = None if weights_TK is None else self.buffers.values("row weights")
        self._write(x_TD, weights_TK, plan, rows, row_weights)
        if again is not None:
            self._write(again[0], None, plan, again[1], None)
        self._signal("rows")

    def receive(self, plan: RowPlan, rows: PeerTensor, *, with_weights: bool) -> None:
        """Wait until the rows of all peers are here, and clear the padding between them."""
        self._wait_once("rows")
        if self._last == "put":
            self._is_read = True
        if self.alignment > 1:
            weights_C = self.buffers.values("row weights").local if with_weights else None
            clear_padding(rows.local, weights_C, plan.offsets_e, plan.total_e, backend=self.backend)

    def lend(self, borrower: object, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for rows that ``borrower`` is to offer, if it is free and peers have read what was there."""
        outputs = self.buffers.existing_rows("offered rows", width, dtype)
        is_lent = self._borrower is not None and self._borrower() is not None
        if outputs is None or is_lent or not self._is_read:
            return None
        # Whoever saved what is there now must not use it any more.
        torch.autograd.graph.increment_version(outputs.local)
        self._borrower = weakref.ref(borrower)
        return alias(outputs, num_rows)

    def offer(
        self, rows_RD: Tensor, row_weights_R: Tensor | None, offsets_e: Tensor, borrower: object = None
    ) -> PeerTensor:
        """Lay out rows, and a value for each row, for their sources to read, and say so; returns where the rows lie.

        Raises:
            ValueError: for rows in memory that was lent, but not to ``borrower``, or offered since.
        """
        is_laid_out = self._is_laid_out(rows_RD, borrower)
        self._wait_once("outputs")
        self._separate("get")
        self._last, self._is_read, self._borrower = "get", False, None
        outputs = self.buffers.rows("offered rows", rows_RD.shape[1], rows_RD.dtype)
        if not is_laid_out:
            torch.autograd.graph.increment_version(outputs.local)
            copy_used(rows_RD, outputs.local, offsets_e, backend=self.backend)
        if row_weights_R is not None:
            weights_C = self.buffers.values("offered weights").local
            copy_used(row_weights_R, weights_C, offsets_e, backend=self.backend)
        self._signal("outputs")
        return outputs

    def collect(self, plan: RowPlan, outputs: PeerTensor) -> Tensor:
        """Wait until the rows of all peers are laid out, and return for each token the sum of its own."""
        self._wait_once("outputs")
        return get_rows(outputs, plan, backend=self.backend)

    def collect_values(self, plan: RowPlan) -> Tensor:
        """Return the value of each pair's row; call it after `collect`."""
        return get_values(self.buffers.values("offered weights"), plan, backend=self.backend)

    def grow(self, rows_needed_max: int, num_tokens_max: int) -> None:
        """Make room for these; all ranks call alike, when no exchange is under way on any."""
        capacity = self.buffers.capacity
        if rows_needed_max > capacity and self.options.overflow != "drop":
            capacity = grown_capacity(rows_needed_max, self.alignment)
        if num_tokens_max > self.num_tokens:
            self.num_tokens = num_tokens_max
            capacity = max(capacity, self.first_capacity(self.options.capacity_factor))
            self._make_boards()
        self.buffers.resize(capacity)
        self.counters.overflowed.zero_()

    def local_bytes(self) -> int:
        """Return the bytes of peer memory of this rank that hold rows, outputs or gradients, and their weights."""
        return self.buffers.local_bytes()

    def first_capacity(self, capacity_factor: float) -> int:
        """Return the capacity that buffers for the largest batch so far begin with."""
        return first_capacity(
            capacity_factor,
            num_tokens=self.num_tokens,
            top_k=self.top_k,
            size=self.peers.size,
            num_local=self.num_local,
            alignment=self.alignment,
        )

    def _make_boards(self) -> None:
        size, num_tokens, top_k = self.peers.size, self.num_tokens, self.top_k
        if self.options.overflow == "drop":
            self._ids = self.peers.allocate("choices", (size * num_tokens, top_k), torch.int64)
            self._weights = self.peers.allocate("choice weights", (size * num_tokens, top_k), torch.float32)
            self._tokens = self.peers.allocate("tokens", (size, 1), torch.int64)
        else:
            self._counts = self.peers.allocate("counts", (size, self.num_experts), torch.int64)
        empty = torch.empty(0, dtype=torch.int64, device=self.peers.device)
        rows = 1 if self.options.overflow != "drop" else num_tokens
        self._to_all = {}
        for num_rows in {1, rows}:
            row_T = torch.arange(num_rows, device=self.peers.device) + self.peers.index * num_rows
            self._to_all[num_rows] = RowPlan(
                rank_TK=torch.arange(size, dtype=torch.int32, device=self.peers.device).repeat(num_rows, 1),
                row_TK=row_T.unsqueeze(1).repeat(1, size),
                offsets_e=empty.to(torch.int32),
                total_e=empty,
                need_S=empty,
            )

    def _tell(self, values_TD: Tensor, board: PeerTensor) -> None:
        """Write this rank's rows to its place on the board of every rank, its own included."""
        put_rows(values_TD, None, self._to_all[values_TD.shape[0]], board, None, backend=self.backend)

    def _announce_choices(self, ids_TK: Tensor, weights_TK: Tensor) -> Announced:
        num_tokens = ids_TK.shape[0]
        # A batch that is longer than the board is cut off here and counts as an overflow everywhere.
        missing = (0, 0, 0, max(0, self.num_tokens - num_tokens))
        self._tell(F.pad(ids_TK[: self.num_tokens], missing, value=-1), self._ids)
        self._tell(F.pad(weights_TK[: self.num_tokens], missing), self._weights)
        self._tell(torch.full((1, 1), num_tokens, dtype=torch.int64, device=ids_TK.device), self._tokens)
        self.peers.signal("counts")
        return Announced(ids_TK=ids_TK, position_TK=None)

    def _place_heaviest(self, ids_TK: Tensor) -> RowPlan:
        size, index, alignment = self.peers.size, self.peers.index, self.alignment
        ids_SN, weights_SN = self._ids.local.view(size, -1), self._weights.local.view(size, -1)
        self.counters.add_tokens(self._tokens.local, self.num_tokens)
        self.counters.add_need(rows_needed(ids_SN, num_local=self.num_local, alignment=alignment), None)
        limit = self.buffers.capacity - self.num_local * (alignment - 1)
        is_taken_SN = heaviest_pairs(ids_SN, weights_SN, num_local=self.num_local, limit=limit)
        taken_SN = ids_SN.where(is_taken_SN, -1)
        own_TK = taken_SN[index].view(self.num_tokens, -1)[: ids_TK.shape[0]]
        own_TK = F.pad(own_TK, (0, 0, 0, ids_TK.shape[0] - own_TK.shape[0]), value=-1).contiguous()
        is_routed_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        self.counters.add_dropped((is_routed_TK & (own_TK < 0)).sum())
        _, position_TK = count_pairs(own_TK, self.num_experts, backend=self.backend)
        return self._plan(expert_counts(taken_SN, self.num_experts), own_TK, position_TK)

    def _plan(self, counts_SE: Tensor, ids_TK: Tensor, position_TK: Tensor) -> RowPlan:
        return place_rows(
            counts_SE,
            ids_TK,
            position_TK,
            index=self.peers.index,
            num_local=self.num_local,
            alignment=self.alignment,
            backend=self.backend,
        )

    def _write(
        self, x_TD: Tensor, weights_TK: Tensor | None, plan: RowPlan, rows: PeerTensor, row_weights: PeerTensor | None
    ) -> None:
        # Peers write here too, unseen by autograd: whoever saved these rows must not use them any more.
        torch.autograd.graph.increment_version(rows.local)
        put_rows(x_TD, weights_TK, plan, rows, row_weights, backend=self.backend)

    def _is_laid_out(self, rows_RD: Tensor, borrower: object) -> bool:
        outputs = self.buffers.existing_rows("offered rows", rows_RD.shape[1], rows_RD.dtype)
        if outputs is None or rows_RD.numel() == 0 or rows_RD.data_ptr() != outputs.local.data_ptr():
            return False
        if self._borrower is None or self._borrower() is not borrower or rows_RD.stride() != outputs.local.stride():
            raise ValueError(
                "these rows lie in memory that the dispatcher lent, and that has been used since; combine what is "
                "written there, as it is, before the rows of another handle"
            )
        return True

    def _signal(self, phase: str) -> None:
        self.peers.signal(phase)
        self._unwaited.add(phase)

    def _wait_once(self, phase: str) -> None:
        if phase in self._unwaited:
            self._unwaited.remove(phase)
            self.peers.wait(phase)

    def _separate(self, kind: str) -> None:
        if self._last == kind:
            self.peers.signal("free")
            self.peers.wait("free")
