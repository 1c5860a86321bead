"""Tests of the kernels that signal and wait, for a process with TRITON_INTERPRET=1: see test_peers.py."""

import ctypes

import pytest
import torch
from coterie_parallel.dispatch.rowwise.peers.signals import (
    ABORTED,
    LATE,
    MAX_MARK,
    OTHER_PHASE,
    read_fault,
    send_signals,
    wait_for_signals,
)

SLOTS = 4


class Rank:
    """What one rank has on its device."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.pad = torch.zeros(SLOTS, size, dtype=torch.int64)
        self.sent = torch.zeros_like(self.pad)
        self.waited = torch.zeros_like(self.pad)
        self.faults = torch.zeros(size, dtype=torch.int64)
        self.abort = torch.zeros(1, dtype=torch.int64)

    def wait(self, slot: int, mark: int, limit: int = 128) -> list[tuple[int, int] | None]:
        """Wait, and return the slot and reason of each peer's fault."""
        wait_for_signals[(self.size - 1,)](
            self.pad,
            self.waited,
            self.faults,
            self.abort.data_ptr(),
            slot,
            mark,
            self.index,
            limit,
            SIZE=self.size,
            TIMED=False,
        )
        return [read_fault(fault) if fault else None for fault in self.faults.tolist()]


def make(size: int) -> list[Rank]:
    return [Rank(index, size) for index in range(size)]


def signal(ranks: list[Rank], index: int, slot: int, mark: int) -> None:
    pads = torch.tensor([rank.pad.data_ptr() for rank in ranks])
    send_signals[(len(ranks) - 1,)](pads, ranks[index].sent, slot, mark, index, SIZE=len(ranks))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_wait_is_for_the_next_signal_of_each_peer(size):
    ranks = make(size)
    for count in (1, 2, 3):
        for rank in ranks:
            signal(ranks, rank.index, 2, MAX_MARK)
        for rank in ranks:
            assert rank.wait(2, MAX_MARK) == [None] * size
        for rank in ranks:
            expected = [0 if peer == rank.index else (MAX_MARK << 48) + count for peer in range(size)]
            assert rank.pad.tolist() == [[0] * size, [0] * size, expected, [0] * size]
            assert rank.waited[2].tolist() == [0 if peer == rank.index else count for peer in range(size)]


def test_a_signal_ahead_of_its_wait_counts_for_the_next_one():
    ranks = make(2)
    for _ in range(3):
        signal(ranks, 1, 0, 7)
    assert [ranks[0].wait(0, 7) for _ in range(3)] == [[None, None]] * 3
    assert ranks[0].wait(0, 7) == [None, (0, LATE)]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_wait_that_is_over_names_each_late_peer_and_its_phase(index):
    ranks = make(4)
    for rank in (0, 1):
        signal(ranks, rank, 3, 5)
    expected = [None, None, (3, LATE), (3, LATE)]
    expected[index] = None
    assert ranks[index].wait(3, 5) == expected


def test_no_wait_spins_or_blames_anybody_after_the_first_that_was_over():
    ranks = make(3)
    signal(ranks, 2, 1, 5)
    assert ranks[0].wait(1, 5) == [None, (1, LATE), None]
    # With this limit a wait that spins never ends. Rank 2 may wait for rank 1 as well.
    assert ranks[0].wait(1, 5, limit=1 << 60) == [None, (1, LATE), None]
    assert ranks[0].wait(2, 6, limit=1 << 60) == [None, (1, LATE), None]


def test_a_wait_that_the_host_ends_says_so():
    ranks = make(3)
    ranks[0].abort.fill_(1)
    signal(ranks, 1, 0, 5)
    assert ranks[0].wait(0, 5, limit=1 << 60) == [None, None, (0, ABORTED)]


def test_a_peer_with_the_phases_in_another_order_is_found_at_once():
    ranks = make(2)
    signal(ranks, 1, 0, 8)
    assert ranks[0].wait(0, 9, limit=1 << 60) == [None, (0, OTHER_PHASE)]


def test_counts_go_on_past_32_bits():
    ranks = make(2)
    ranks[1].sent[0, 0] = ranks[0].waited[0, 1] = 2**40
    signal(ranks, 1, 0, 9)
    assert ranks[0].wait(0, 9) == [None, None]
    assert ranks[0].wait(0, 9) == [None, (0, LATE)]


def test_the_pads_are_found_by_address_alone():
    # Two words far apart, as the pads of two processes are.
    memory = (ctypes.c_int64 * 4096)()
    pads = torch.tensor([ctypes.addressof(memory) + 8 * 1024, ctypes.addressof(memory) + 8 * 3072])
    sent = torch.zeros(SLOTS, 2, dtype=torch.int64)
    send_signals[(1,)](pads, sent, 1, 3, 0, SIZE=2)
    assert [place for place in range(4096) if memory[place]] == [3072 + 2]
    assert memory[3074] == (3 << 48) + 1
