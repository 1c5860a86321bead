"""Tests of peer memory between GPUs on CPU processes, with TRITON_INTERPRET=1: see test_peers.py."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from coterie_parallel import Axis, barrier
from coterie_parallel.dispatch.rowwise.peers.symmetric import SymmetricPeers
from support.ranks import run_ranks

from parallel.fake_symmetric_memory import install
from parallel.peer_support import Said, axis_of, run_with_deaths, said

WORLD = 3
ROUNDS = 5


def _all(rank: int, world: int) -> dict[str, Any]:
    """Every case that needs no death, in one set of processes: each has triton to import."""
    axis = axis_of(rank, world)
    refusals = [
        _refusal(rank, axis, backend="CUDA", gpus="abc", allowed="0"),
        _refusal(rank, axis, backend="CUDA", gpus="aba", allowed="1"),
        _refusal(rank, axis, backend="CUDA", gpus="aba", allowed="0"),
        _refusal(rank, axis, backend="NVSHMEM", gpus="abc", allowed="0"),
    ]
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    install(axis)
    return {
        "refusals": refusals,
        "rounds": _rounds(rank, axis),
        "late": _unequal(axis, 1.0, ["put rows", "", "put rows"][rank]),
        "other order": _unequal(axis, 300.0, ["put rows", "get rows", "put rows"][rank]),
    }


def _refusal(rank: int, axis: Axis, *, backend: str, gpus: str, allowed: str) -> str:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = allowed
    install(axis, backend=backend, gpu=gpus[rank])
    try:
        SymmetricPeers(axis, "cpu", 5.0).close()
    except ValueError as error:
        return str(error)
    return ""


def _rounds(rank: int, axis: Axis) -> tuple[int, list[str]]:
    wrong = 0
    messages = []
    with SymmetricPeers(axis, "cpu", 30.0) as peers:
        box = peers.allocate("box", (axis.size, 100), torch.int64)
        other = peers.allocate("other", (3,), torch.bfloat16)
        assert box.views is not None
        assert [view.data_ptr() for view in box.views] == box.addresses_S.tolist()
        assert box.views[rank].data_ptr() == box.local.data_ptr()
        assert box.local.count_nonzero() == other.local.count_nonzero() == 0
        barrier(axis)
        for count in range(ROUNDS):
            for view in box.views:
                view[rank] = 10 * count + rank
            peers.signal("written")
            peers.wait("written")
            wrong += int((box.local != torch.arange(axis.size)[:, None] + 10 * count).sum())
            peers.signal("read")
            peers.wait("read")
        peers.check()
        for request in (("rows", (4 + rank,), torch.float32), ("rows", (4,), torch.complex64)):
            with pytest.raises(ValueError, match=r"torch\.") as caught:
                peers.allocate(*request)
            messages.append(str(caught.value))
    with pytest.raises(ValueError, match="is closed"):
        peers.signal("written")
    return wrong, messages


def _unequal(axis: Axis, timeout_s: float, phase: str) -> tuple[Said, Said]:
    peers = SymmetricPeers(axis, "cpu", timeout_s)
    peers.signal("counts")
    barrier(axis)
    peers.wait("counts")
    if phase:
        peers.signal(phase)
        peers.wait(phase)
    first = said(peers.check)
    again = said(lambda: peers.signal("counts"))
    barrier(axis)
    peers.close()
    peers.close()
    return first, again


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_all, WORLD)


def test_hand_overs_and_allocation(found):
    assert [one["rounds"][0] for one in found] == [0] * WORLD
    messages = found[0]["rounds"][1]
    assert [one["rounds"][1] for one in found] == [messages] * WORLD
    assert "must allocate the same tensors in the same order, but they asked for: rank 0 'rows' (4,)" in messages[0]
    assert messages[1].startswith("no peer memory on the 'expert' axis. rank 0: the dtype (torch.complex64)")


def test_a_late_peer_is_named_with_the_phase_that_it_is_missing_from(found):
    for rank in (0, 2):
        first, again = found[rank]["late"]
        assert first[1].startswith(
            f"the wait for 'put rows' on the 'expert' axis (ranks 0, 1, 2) failed on rank {rank}: rank 1 (process "
        )
        assert first[1].endswith(
            ") was not there after 1 s; if it loads or compiles for so long raise timeout_s, else see where it hangs"
        )
        assert again[1] == first[1]
    assert found[1]["late"][0][1] == "no error"


def test_phases_in_another_order_are_found_at_once(found):
    expected = "uses the phases in another order; every rank must use them first in this order: 'counts', 'put rows'"
    assert "rank 1 (process" in found[0]["other order"][0][1]
    assert expected in found[0]["other order"][0][1]


def test_what_torch_cannot_share_is_refused_on_all_ranks(found):
    first = found[0]["refusals"]
    assert [one["refusals"] for one in found] == [first] * WORLD
    assert first[:2] == ["", ""]
    shared = "this rank shares its GPU with another; give each rank a GPU of its own, or set"
    assert first[2].startswith(f"no peer memory on the 'expert' axis. rank 0: {shared}")
    assert f"; rank 2: {shared}" in first[2]
    assert "rank 1" not in first[2]
    assert first[3].startswith(
        "no peer memory on the 'expert' axis. rank 0: torch's symmetric memory uses NVSHMEM here, and peer memory needs"
    )


def _dies(rank: int, world: int) -> Said:
    axis = axis_of(rank, world)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    install(axis)
    peers = SymmetricPeers(axis, "cpu", 300.0)
    peers.signal("counts")
    peers.wait("counts")
    barrier(axis)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    peers.signal("put rows")
    peers.wait("put rows")
    return said(peers.check)


def test_a_dead_peer_ends_the_wait_of_the_others_at_once():
    start = time.monotonic()
    results = run_with_deaths(_dies, WORLD)
    assert time.monotonic() - start < 50
    assert results[1] is None
    for rank in (0, 2):
        _, message = results[rank]
        assert "rank 1 (process" in message
        assert message.endswith(") has died without this phase; the output of rank 1 says why")


def test_more_phases_than_slots_are_refused():
    peers = SymmetricPeers.__new__(SymmetricPeers)
    peers._error, peers._is_closed, peers._slots = "", False, {f"phase {count}": count for count in range(256)}
    assert peers._place("phase 3")[0] == 3
    with pytest.raises(ValueError, match="phase 'one more' is one more than the 256"):
        peers.signal("one more")
