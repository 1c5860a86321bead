"""Peer memory of processes on one Linux host, over POSIX shared memory."""

import errno
import json
import sys
import time
from collections.abc import Sequence

import torch

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import CollectiveError, all_gather_objects
from coterie_parallel.dispatch.rowwise.peers import segments, semaphores
from coterie_parallel.dispatch.rowwise.peers.base import (
    PeerMemory,
    PeerTensor,
    block_bytes,
    check_name,
    check_request,
    tensor_at,
)
from coterie_parallel.dispatch.rowwise.peers.board import Board, board_bytes, set_up_board
from coterie_parallel.dispatch.rowwise.peers.processes import is_alive, this_process

__all__ = ["SharedMemoryPeers", "reason_against"]

# How soon a dead peer is noticed.
_LOOK_EVERY_S = 0.05
_ALLOCATE = "allocate"


def reason_against() -> str | None:
    """Return why processes of this machine cannot share memory this way, with what to do, or None."""
    if sys.platform != "linux" or not segments.FOLDER.is_dir() or not semaphores.has_semaphores():
        return (
            f"peer memory between CPU processes needs Linux with POSIX semaphores and {segments.FOLDER}; "
            'use dispatcher = "all_to_all" here'
        )
    return None


class SharedMemoryPeers(PeerMemory):
    """The peer memory of one CPU process of an axis whose processes all run on one host.

    Collective. Each tensor is a segment that holds the blocks of all ranks; its name is gone before `allocate` returns.
    After a CollectiveError every further call raises it again.

    Raises:
        ValueError: on every rank, when the ranks cannot share memory.
        CollectiveError: when a peer died or did not come in time.
    """

    def __init__(self, axis: Axis, timeout_s: float) -> None:
        super().__init__(axis, "cpu", timeout_s)
        reason = reason_against()
        if reason is not None:
            raise ValueError(reason)
        segments.remove_leftovers()
        self._error = ""
        self._peers = [peer for peer in range(self.size) if peer != self.index]
        self._processes = all_gather_objects(this_process(), axis)
        self._board: Board | None = self._shared_board(axis)

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> PeerTensor:
        """Return a zero-filled tensor of this shape on every rank; see `PeerMemory.allocate`."""
        board = self._usable()
        problem = segment = ""
        num_bytes = 0
        try:
            shape = check_request(name, shape, dtype)
            num_bytes = block_bytes(shape, dtype)
            if self.index == 0:
                segment = segments.create(self.size * num_bytes)
        except OSError as error:
            problem = _no_room(error, name, self.size * num_bytes)
        except ValueError as error:
            problem = str(error)
        # Whatever happens, a KeyboardInterrupt too, the name must go; afterwards every rank has mapped it or none will.
        try:
            replies = self._exchange(board, [f"{name!r} {tuple(shape)} {dtype}", problem, segment])
            self.refuse_problems([reply[1] for reply in replies])
            self.refuse_difference([reply[0] for reply in replies])
            segment = replies[0][2]
            mapping = None
            try:
                mapping = segments.map_segment(segment, start=self.index * num_bytes, num_bytes=num_bytes)
            except OSError as error:
                problem = _no_room(error, name, self.size * num_bytes)
            self.refuse_problems([reply[0] for reply in self._exchange(board, [problem])])
        finally:
            if segment:
                segments.unlink(segment)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        views = tuple(tensor_at(whole, index * num_bytes, shape, dtype) for index in range(self.size))
        addresses = [whole.data_ptr() + index * num_bytes for index in range(self.size)]
        return PeerTensor(local=views[self.index], addresses_S=torch.tensor(addresses), views=views)

    def signal(self, phase: str) -> None:
        """Tell every peer that this rank has done ``phase``; returns at once."""
        check_name(phase)
        self._signal(self._usable(), phase)

    def wait(self, phase: str) -> None:
        """Return once every peer has signalled ``phase``; see `PeerMemory.wait`."""
        check_name(phase)
        self._wait(self._usable(), phase)

    def check(self) -> None:
        """Do nothing but raise again what a wait has raised."""
        self._usable()

    def close(self) -> None:
        """Tell the peers that nothing more comes from this rank; see `PeerMemory.close`."""
        if self._board is not None:
            self._board.say_closed()
            self._board = None

    def _usable(self) -> Board:
        if self._error:
            raise CollectiveError(self._error)
        if self._board is None:
            raise ValueError("this peer memory is closed; make a new one with make_peers, on every rank")
        return self._board

    def _shared_board(self, axis: Axis) -> Board:
        problem = segment = ""
        own = self._processes[self.index]
        for rank, process in zip(self.ranks, self._processes, strict=True):
            if (process.host, process.namespace) != (own.host, own.namespace) or not is_alive(process):
                problem = (
                    f"rank {rank} (process {process.pid} on {process.host}) is not visible from here (process "
                    f"{own.pid} on {own.host}); peer memory on CPUs needs all ranks of the axis on one host and in "
                    'one container; use dispatcher = "all_to_all" across hosts'
                )
        num_bytes = board_bytes(self.size)
        mapping = None
        try:
            if self.index == 0 and not problem:
                try:
                    segment = segments.create(num_bytes)
                    mapping = segments.map_segment(segment, start=0, num_bytes=num_bytes)
                    # Before any other rank has the segment.
                    set_up_board(mapping, self.size)
                except OSError as error:
                    problem = _no_room(error, "signals", num_bytes)
            replies = all_gather_objects((problem, segment), axis)
            self.refuse_problems([reply[0] for reply in replies])
            segment = replies[0][1]
            try:
                mapping = segments.map_segment(segment, start=0, num_bytes=num_bytes)
            except OSError as error:
                problem = _no_room(error, "signals", num_bytes)
            self.refuse_problems(all_gather_objects(problem, axis))
        finally:
            if segment:
                segments.unlink(segment)
        assert mapping is not None
        return Board(mapping, self.size, self.index)

    def _exchange(self, board: Board, texts: list[str]) -> list[list[str]]:
        board.write_text(json.dumps([text[:1000] for text in texts], ensure_ascii=False))
        self._signal(board, _ALLOCATE)
        self._wait(board, _ALLOCATE)
        return [json.loads(text) for text in board.texts()]

    def _signal(self, board: Board, phase: str) -> None:
        full = board.signal(phase)
        if full:
            ranks = ", ".join(str(self.ranks[peer]) for peer in full)
            raise self._failed(phase, [f"rank {ranks} took none of the signals before it; each needs a wait there"])

    def _wait(self, board: Board, phase: str) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        missing = [peer for peer in self._peers if not board.take(peer, phase, 0.0)]
        while missing:
            left_s = deadline_s - time.monotonic()
            if board.take(missing[0], phase, min(_LOOK_EVERY_S, max(0.0, left_s))):
                del missing[0]
                continue
            gone = [peer for peer in missing if not is_alive(self._processes[peer])]
            # Asked once more after that look, since a peer may signal and then end.
            missing = [peer for peer in missing if not board.take(peer, phase, 0.0)]
            reasons = [self._ended(board, peer) for peer in missing if peer in gone or board.has_closed(peer)]
            # Who allocates goes no further without this rank, so what this rank waits for will not come.
            reasons += [
                self._late(board, peer)
                for peer in missing
                if phase != _ALLOCATE and _ALLOCATE in board.unused(peer) and peer not in gone
            ]
            if not reasons and left_s <= 0.0:
                reasons = [self._late(board, peer) for peer in missing]
            if reasons:
                raise self._failed(phase, reasons)

    def _ended(self, board: Board, peer: int) -> str:
        rank = self.ranks[peer]
        what = "has closed its peer memory" if board.has_closed(peer) else "has died"
        return (
            f"rank {rank} (process {self._processes[peer].pid}) {what} without this phase ({_reached(board, peer)}); "
            f"the output of rank {rank} says why"
        )

    def _late(self, board: Board, peer: int) -> str:
        elsewhere = board.unused(peer)
        if elsewhere:
            phases = ", ".join(map(repr, elsewhere))
            return (
                f"rank {self.ranks[peer]} (process {self._processes[peer].pid}) is at another place (it signalled "
                f"{phases}, for which this rank did not wait); every rank must make the same calls in the same order, "
                "with tokens of one width and dtype"
            )
        return (
            f"rank {self.ranks[peer]} (process {self._processes[peer].pid}) lives but was not there after "
            f"{self.timeout_s:g} s ({_reached(board, peer)}); if it loads or compiles for so long raise timeout_s, "
            "else see where it hangs"
        )

    def _failed(self, phase: str, reasons: Sequence[str]) -> CollectiveError:
        # The dead may have left a name behind, between making a segment and handing it out.
        segments.remove_leftovers()
        error = self.failure(phase, reasons)
        self._error = str(error)
        return error


def _reached(board: Board, peer: int) -> str:
    return f"its last: {board.last[peer]!r}" if board.last[peer] else "no phase yet"


def _no_room(error: OSError, name: str, num_bytes: int) -> str:
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return (
            f"{error.strerror} for {name!r}: this user must be able to make files in {segments.FOLDER}; mount it "
            'writable, or use dispatcher = "all_to_all" here'
        )
    return (
        f"{error.strerror} for {name!r}, which takes {num_bytes:,} bytes of {segments.FOLDER} on all ranks together, "
        f"with {segments.free_bytes():,} free there; enlarge it (in a container by --shm-size) or allocate "
        "less: a lower capacity_factor or sequences_per_micro_batch, or saved_rows other than lease"
    )
