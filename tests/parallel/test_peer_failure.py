"""A peer that dies, stops, leaves or is late ends a wait in time, with its rank and the phase that it misses."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from coterie_parallel import CollectiveError, all_gather_objects
from coterie_parallel.dispatch.rowwise.peers import segments, shared_memory
from coterie_parallel.dispatch.rowwise.peers.processes import Process, this_process
from support.ranks import run_ranks

from parallel.peer_support import Said, axis_of, names_of, peers_of, run_with_deaths, said


def pids_of(rank: int, world: int) -> list[int]:
    return all_gather_objects(os.getpid(), axis_of(rank, world))


def _killed(rank: int, world: int) -> tuple[list[int], Said, Said]:
    pids = pids_of(rank, world)
    peers = peers_of(rank, world, timeout_s=40.0)
    box = peers.allocate("box", (1000,), torch.float32)
    for _ in range(3):
        peers.signal("put rows")
        peers.wait("put rows")
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    peers.signal("get rows")
    first = said(lambda: peers.wait("get rows"))
    # What it wrote is still there.
    assert box.local.sum() == 0
    again = said(lambda: peers.signal("put rows"))
    peers.close()
    return pids, first, again


def test_a_killed_peer_is_an_error_within_seconds_and_leaves_nothing() -> None:
    results = run_with_deaths(_killed, 4)
    assert results[2] is None
    for rank in (0, 1, 3):
        pids, (seconds, message), again = results[rank]
        assert 0.2 < seconds < 10
        assert message == (
            f"the wait for 'get rows' on the 'expert' axis (ranks 0, 1, 2, 3) failed on rank {rank}: rank 2 (process "
            f"{pids[2]}) has died without this phase (its last: 'put rows'); the output of rank 2 says why"
        )
        assert again[1] == message
        assert names_of(*pids) == []


def _killed_while_it_has_a_name(rank: int, world: int, victim: int, function: str) -> tuple[list[int], Said, list[str]]:
    pids = pids_of(rank, world)
    peers = peers_of(rank, world, timeout_s=40.0)
    if rank == victim:
        before = getattr(segments, function)

        def kill(*args: Any, **options: Any) -> None:
            before(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(segments, function, kill)
    found = said(lambda: peers.allocate("box", (1000,), torch.float32))
    return pids, found, names_of(*pids)


@pytest.mark.parametrize(("victim", "function"), [(0, "create"), (1, "map_segment")])
def test_a_peer_killed_between_making_and_unlinking_a_segment_leaves_nothing(victim: int, function: str) -> None:
    results = run_with_deaths(_killed_while_it_has_a_name, 3, victim, function)
    assert results[victim] is None
    pids = next(one[0] for one in results if one)
    for _, (seconds, message), _ in (one for one in results if one):
        assert seconds < 10
        assert "the wait for 'allocate'" in message
        assert f"rank {victim} (process {pids[victim]}) has died without this phase" in message
    assert names_of(*pids) == []


def _late(rank: int, world: int) -> Said:
    with peers_of(rank, world, timeout_s=1.0) as peers:
        peers.signal("counts")
        peers.wait("counts")
        found = (0.0, "")
        if rank != 1:
            peers.signal("put rows")
            found = said(lambda: peers.wait("put rows"))
        # Rank 1 is busy for as long as the others wait for it.
        pids_of(rank, world)
        return found


def test_a_late_peer_is_named_with_the_phase_that_it_is_missing_from() -> None:
    """P10: one rank still compiles."""
    results = run_ranks(_late, 3)
    for rank in (0, 2):
        seconds, message = results[rank]
        assert 0.9 < seconds < 10
        assert message.startswith(
            f"the wait for 'put rows' on the 'expert' axis (ranks 0, 1, 2) failed on rank {rank}: rank 1 (process "
        )
        assert message.endswith(
            ") lives but was not there after 1 s (its last: 'counts'); if it loads or compiles for so long raise "
            "timeout_s, else see where it hangs"
        )


def _late_but_in_time(rank: int, world: int) -> Said:
    with peers_of(rank, world, timeout_s=30.0) as peers:
        if rank == 1:
            time.sleep(1.5)
        peers.signal("put rows")
        return said(lambda: peers.wait("put rows"))


def test_a_peer_that_is_late_but_in_time_is_no_error() -> None:
    (seconds, message), _ = run_ranks(_late_but_in_time, 2)
    assert message == "no error"
    assert 1 < seconds < 30


def _stopped(rank: int, world: int) -> Said:
    pids = pids_of(rank, world)
    peers = peers_of(rank, world, timeout_s=3.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0, ""
    peers.signal("put rows")
    try:
        return said(lambda: peers.wait("put rows"))
    finally:
        os.kill(pids[1], signal.SIGCONT)


def test_a_stopped_peer_is_an_error_after_the_time_out() -> None:
    """P9: a stopped process lives, so that only the time-out finds it."""
    seconds, message = run_ranks(_stopped, 2)[0]
    assert 2.5 < seconds < 10
    assert "rank 1 (process" in message
    assert "lives but was not there after 3 s (no phase yet)" in message


def _leaves(rank: int, world: int) -> tuple[Said, Said]:
    with peers_of(rank, world, timeout_s=40.0) as peers:
        peers.signal("put rows")
        if rank == 1:
            # As when this rank raises for a reason of its own.
            return (0.0, ""), (0.0, "")
        first = said(lambda: peers.wait("put rows"))
        return first, said(lambda: peers.wait("get rows"))


def test_a_peer_that_closes_is_an_error_at_once_but_what_it_signalled_before_counts() -> None:
    first, second = run_ranks(_leaves, 2)[0]
    assert first[1] == "no error"
    assert second[0] < 10
    assert "has closed its peer memory without this phase (its last: 'put rows')" in second[1]


def _never_waits(rank: int, world: int) -> Said:
    pids_of(rank, world)
    peers = peers_of(rank, world, timeout_s=40.0)

    def many() -> None:
        for _ in range(1000):
            peers.signal("put rows")

    found = said(many) if rank == 0 else (0.0, "")
    pids_of(rank, world)
    peers.close()
    with pytest.raises(CollectiveError if rank == 0 else ValueError, match="put rows" if rank == 0 else "is closed"):
        peers.wait("put rows")
    return found


def test_signals_that_nobody_waits_for_are_an_error_before_they_are_lost() -> None:
    seconds, message = run_ranks(_never_waits, 2)[0]
    assert seconds < 10
    assert message == (
        "the wait for 'put rows' on the 'expert' axis (ranks 0, 1) failed on rank 0: rank 1 took none of the signals "
        "before it; each needs a wait there"
    )


def _one_host(rank: int, world: int) -> str:
    own = this_process()
    other = Process(host="elsewhere", namespace=own.namespace, pid=own.pid, started=own.started)
    shared_memory.this_process = lambda: other if rank == 1 else own  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no peer memory") as caught:
        peers_of(rank, world, timeout_s=5.0)
    return str(caught.value)


def test_ranks_on_two_hosts_are_refused_with_what_to_do() -> None:
    first, second = run_ranks(_one_host, 2)
    assert first == second
    assert "on elsewhere) is not visible from here" in first
    assert 'on one host and in one container; use dispatcher = "all_to_all" across hosts' in first
