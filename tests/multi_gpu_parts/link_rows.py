"""The rows of one combine between the GPUs of a host, and ways to bring them back to their tokens."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from coterie_parallel.comparison import DispatchSizes
from coterie_parallel.dispatch.rowwise.peers import PeerMemory, PeerTensor, make_peers
from coterie_parallel.dispatch.rowwise.placement import RowPlan, count_pairs, place_rows
from coterie_parallel.dispatch.rowwise.rows import get_rows
from coterie_parallel.dispatch.rowwise.used import copy_used
from torch import Tensor

from multi_gpu_parts.bench import Bench

__all__ = ["GetTry", "Rows"]

_BACKEND = "triton"
# As in put of the dispatcher.
_PUSH_BYTES = 16384
_PUSH_BYTES_OF_WARP = 8192


@dataclass(frozen=True, kw_only=True)
class GetTry:
    """One way to add the rows of a token; the defaults are those of the dispatcher.

    Attributes:
        kib: KiB of a row that one program takes.
        warps: of a program.
        cache: modifier of the loads.
        evict: eviction policy of the loads.
        remote_first: load the rows of peers before the others.
        shifted: each rank begins with another token.
        unallocated: loads leave no line in L1; for bf16 on a GPU.
    """

    kib: int = 2
    warps: int = 4
    cache: str = ""
    evict: str = ""
    remote_first: bool = False
    shifted: bool = False
    unallocated: bool = False

    def __str__(self) -> str:
        special = [
            self.cache,
            self.evict,
            "remote first" * self.remote_first,
            "begun elsewhere" * self.shifted,
            "no line in L1" * self.unallocated,
        ]
        return ", ".join([f"{self.kib} KiB", f"{self.warps} warps", *filter(None, special)])


class Rows:
    """The outputs of the experts of this rank, where those of its tokens lie, and memory to move them through.

    Shapes: outputs_RD are the rows of this rank's experts, with room at the end; ``offered`` (C, D) is the buffer that
    peers read, ``received`` (T * K, D) the one that they push to, with a slot for each pair of this rank.

    Args:
        bench: all ranks make the same rows together.
        sizes: of the load.
        ids_TK: experts of the tokens of this rank.
    """

    def __init__(self, bench: Bench, sizes: DispatchSizes, ids_TK: Tensor) -> None:
        num_local = sizes.num_experts // bench.world
        self.bench, self.ids_TK = bench, ids_TK.to(bench.device)
        counts_E, position_TK = count_pairs(self.ids_TK, sizes.num_experts, backend=_BACKEND)
        counts_SE = torch.stack(bench.gather(counts_E.cpu()))
        self.plan = place_rows(
            counts_SE.to(bench.device),
            self.ids_TK,
            position_TK,
            index=bench.rank,
            num_local=num_local,
            alignment=1,
            backend=_BACKEND,
        )
        need = self.plan.need_S.tolist()
        self.num_tokens, self.num_choices = ids_TK.shape
        self.row_bytes = sizes.width * bench.dtype.itemsize
        self.rows_max = max(need)
        # Source, owner: what stays needs no link.
        sent_SS = counts_SE.view(bench.world, bench.world, num_local).sum(2).fill_diagonal_(0)
        self.busiest_bytes = int(max(sent_SS.sum(0).max(), sent_SS.sum(1).max())) * self.row_bytes

        num_pairs = ids_TK.numel()
        generator = torch.Generator(bench.device).manual_seed(bench.rank)
        shape = max(self.rows_max, num_pairs), sizes.width
        self.outputs_RD = torch.randn(shape, generator=generator, device=bench.device).to(bench.dtype)
        self.peers: PeerMemory = make_peers(bench.axis, bench.device, bench.settings.timeout_s)
        self.offered = self.peers.allocate("offered", (self.rows_max, sizes.width), bench.dtype)
        self.received = self.peers.allocate("received", (num_pairs, sizes.width), bench.dtype)
        self.offered.local.copy_(self.outputs_RD[: self.rows_max])
        self.y_TD = torch.empty((self.num_tokens, sizes.width), dtype=bench.dtype, device=bench.device)
        self._entries = self._made_entries(bench.gather((self.plan.rank_TK.cpu(), self.plan.row_TK.cpu())))
        self._near, self._near_plan = self._after_a_push()
        self._side = torch.cuda.Stream(priority=-1) if bench.is_gpu else None
        bench.barrier()
        self.expected_TD = get_rows(self.offered, self.plan, backend="reference")
        bench.barrier()

    def check(self, name: str, *, to_all: bool = True) -> None:
        """Report a fault unless y_TD has the bits of the reference, then spoil it and what was received.

        All ranks call it together. ``to_all``: every rank did what is checked; else only rank 0.
        """
        self.bench.barrier()
        if (to_all or self.bench.rank == 0) and not torch.equal(self.y_TD, self.expected_TD):
            self.bench.fault(f"{name}: the sums differ from those of the reference")
        self.spoil()

    def spoil(self, *, also_offered: bool = False) -> None:
        """Fill the sums, what was received, and on demand what was laid out with NaN; all ranks together."""
        self.y_TD.fill_(torch.nan)
        self.received.local.fill_(torch.nan)
        if also_offered:
            self.offered.local.fill_(torch.nan)
        self.bench.barrier()

    def copy(self) -> None:
        """Lay out the outputs for the peers, as the dispatcher does first."""
        copy_used(self.outputs_RD, self.offered.local, self.plan.offsets_e, backend=_BACKEND)

    def hand_over(self) -> None:
        """Tell the peers, and wait until they have told."""
        self.peers.signal("rows")
        self.peers.wait("rows")

    def get(self, how: GetTry) -> None:
        """Pull the rows of the tokens of this rank from where they were laid out, and add them."""
        self._add(how, self.offered, self.plan, self.bench.rank, 0, self.num_tokens)

    def dispatcher_get(self) -> None:
        """Do as `get` does, by the kernel of the dispatcher and into new memory."""
        get_rows(self.offered, self.plan, backend=_BACKEND)

    def push(self, order: str, group: int = 0, num_groups: int = 1) -> None:
        """Write the outputs that are of tokens of peers into their slots there.

        Args:
            order: "tokens", that of the pairs of each peer; or "experts", that of the outputs.
            group: which of the groups of tokens, in the order of tokens.
            num_groups: that each peer's tokens are cut into.
        """
        from multi_gpu_parts import link_kernels

        words_RD = self.outputs_RD.view(torch.int64)
        width = words_RD.shape[1]
        block = min(_PUSH_BYTES // 8, 1 << (width - 1).bit_length())
        pieces = -(-width // block)
        for step in range(1, self.bench.world):
            peer = (self.bench.rank + step) % self.bench.world
            row_N, slot_N = self._entries[order][peer]
            first, end = (row_N.numel() * one // num_groups for one in (group, group + 1))
            link_kernels.push[((end - first) * pieces,)](
                words_RD,
                row_N,
                slot_N,
                self.received.addresses_S,
                peer,
                first,
                end,
                WIDTH=width,
                PIECES=pieces,
                BLOCK=block,
                num_warps=max(1, block * 8 // _PUSH_BYTES_OF_WARP),
            )

    def add_received(self, how: GetTry, group: int = 0, num_groups: int = 1) -> None:
        """Add for each token of a group the rows that were pushed here and those of this rank's experts."""
        first, end = (self.num_tokens * one // num_groups for one in (group, group + 1))
        self._add(how, self._near, self._near_plan, 0, first, end - first)

    def pull_combine(self, how: GetTry, *, copied: bool) -> None:
        """Combine as the dispatcher does; without ``copied`` as if the experts wrote to where peers read."""
        if copied:
            self.copy()
        self.hand_over()
        self.get(how)

    def push_combine(self, how: GetTry, order: str) -> None:
        """Combine by pushing all rows, one hand-over, and the sums."""
        self.push(order)
        self.hand_over()
        self.add_received(how)

    def grouped_combine(self, how: GetTry, num_groups: int) -> None:
        """Combine by groups of tokens: the sums of one run beside the pushes of the next, on a stream of their own."""
        main = torch.cuda.current_stream() if self._side is not None else None
        if self._side is not None:
            self._side.wait_stream(main)
        for group in range(num_groups):
            self.push("tokens", group, num_groups)
            self.peers.signal(f"group {group}")
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            for group in range(num_groups):
                self.peers.wait(f"group {group}")
                self.add_received(how, group, num_groups)
        if main is not None:
            main.wait_stream(self._side)

    def close(self) -> None:
        """Raise where a wait ended without its peer, and let go of the memory; all ranks together."""
        self.bench.barrier()
        self.peers.check()
        self.bench.barrier()
        self.peers.close()

    def _add(self, how: GetTry, rows: PeerTensor, plan: RowPlan, own: int, first: int, num_tokens: int) -> None:
        from multi_gpu_parts import link_kernels

        width, itemsize = self.y_TD.shape[1], self.y_TD.element_size()
        block = min(how.kib * 1024 // itemsize, 1 << (width - 1).bit_length())
        pieces = -(-width // block)
        common: tuple[Any, ...] = (self.y_TD, plan.rank_TK, plan.row_TK, rows.addresses_S, rows.local.shape[0])
        constants = {"K": self.num_choices, "WIDTH": width, "PIECES": pieces, "BLOCK": block, "num_warps": how.warps}
        grid = (num_tokens * pieces,)
        if how.unallocated:
            link_kernels.get_unallocated[grid](*common, **constants)
            return
        # Ranks far apart from one another in the order of tokens.
        first += how.shifted * self.num_tokens * self.bench.rank // self.bench.world
        link_kernels.get[grid](
            *common,
            self.num_tokens,
            first,
            own,
            **constants,
            CACHE=how.cache,
            EVICT=how.evict,
            REMOTE_FIRST=how.remote_first,
        )

    def _made_entries(self, plans: Sequence[tuple[Tensor, Tensor]]) -> dict[str, dict[int, tuple[Tensor, Tensor]]]:
        """Return by order and peer the row and the slot of each entry, -1 where there is none."""
        entries: dict[str, dict[int, tuple[Tensor, Tensor]]] = {"tokens": {}, "experts": {}}
        for peer, (rank_TK, row_TK) in enumerate(plans):
            rank_N, row_N = rank_TK.flatten(), row_TK.flatten()
            row_N = row_N.where(rank_N == self.bench.rank, -1)
            slot_N = torch.arange(row_N.numel())
            slot_R = torch.full((self.outputs_RD.shape[0],), -1)
            slot_R[row_N[row_N >= 0]] = slot_N[row_N >= 0]
            found = {"tokens": (row_N, slot_N), "experts": (torch.arange(slot_R.numel()), slot_R)}
            for order, (rows, slots) in found.items():
                entries[order][peer] = rows.to(self.bench.device), slots.to(self.bench.device)
        return entries

    def _after_a_push(self) -> tuple[PeerTensor, RowPlan]:
        """Return this rank's outputs and what was pushed to it as if they were two peers, and the plan for them."""
        addresses = [self.outputs_RD.data_ptr(), self.received.local.data_ptr()]
        addresses_S = torch.tensor(addresses, dtype=torch.int64, device=self.bench.device)
        slot_TK = torch.arange(self.ids_TK.numel(), device=self.bench.device).view(self.ids_TK.shape)
        rank_TK, row_TK = self.plan.rank_TK, self.plan.row_TK
        is_own_TK = rank_TK == self.bench.rank
        plan = replace(
            self.plan,
            rank_TK=(~is_own_TK).to(torch.int32).masked_fill_(rank_TK < 0, -1),
            row_TK=row_TK.where(is_own_TK | (rank_TK < 0), slot_TK),
        )
        return PeerTensor(local=self.outputs_RD, addresses_S=addresses_S, views=None), plan
