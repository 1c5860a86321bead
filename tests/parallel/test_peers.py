"""Peer memory: every rank sees what its peers wrote before they signalled, and nothing is left behind."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from coterie_parallel import Axis
from coterie_parallel.dispatch.rowwise.peers import make_peers, reason_against, virtual_peers
from coterie_parallel.dispatch.rowwise.peers.processes import Process, is_alive, this_process
from coterie_parallel.dispatch.rowwise.peers.segments import FOLDER, create, remove_leftovers, unlink
from support.interpreted import needs_triton, run_interpreted
from support.ranks import run_ranks

from parallel.peer_support import names_of, peers_of

DTYPES = (torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn)


def _rounds(rank: int, world: int, num_rounds: int) -> int:
    draw = random.Random(rank)
    wrong = 0
    with peers_of(rank, world) as peers:
        # 4 KiB for each source, so that a hand-over before the last store is seen.
        box = peers.allocate("box", (world, 512), torch.int64)
        assert box.views is not None
        for count in range(num_rounds):
            if draw.random() < 0.2:
                time.sleep(draw.random() * 2e-3)
            for view in box.views:
                view[rank] = 10 * count + rank
            peers.signal("written")
            peers.wait("written")
            expected = torch.arange(world)[:, None] + 10 * count
            wrong += int((box.local != expected).sum())
            if draw.random() < 0.2:
                time.sleep(draw.random() * 2e-3)
            peers.signal("read")
            peers.wait("read")
    return wrong


def test_each_of_1000_hand_overs_between_4_processes_brings_all_that_was_written() -> None:
    assert run_ranks(_rounds, 4, 1000) == [0, 0, 0, 0]


def _tensors(rank: int, world: int) -> list[object]:
    with peers_of(rank, world) as peers:
        found: list[object] = []
        for dtype in DTYPES:
            for shape in ((3, 5), (7,), (), (0, 4), (300, 2)):
                tensor = peers.allocate("x", shape, dtype)
                assert tensor.views is not None
                assert tensor.local.shape == shape
                assert tensor.local.dtype == dtype
                assert tensor.local.view(torch.uint8).count_nonzero() == 0 if shape else True
                assert tensor.addresses_S.dtype == torch.int64
                assert (tensor.addresses_S % 256).tolist() == [0] * world
                if tensor.local.numel():
                    assert [view.data_ptr() for view in tensor.views] == tensor.addresses_S.tolist()
                assert tensor.local.data_ptr() == tensor.views[rank].data_ptr()
                peers.signal("seen zero")
                peers.wait("seen zero")
                # To the next rank, so that a block that a rank takes for its own by mistake is found.
                tensor.views[(rank + 1) % world].copy_(torch.full(shape, float(rank % 2)).to(dtype))
                peers.signal("x")
                peers.wait("x")
                before = float((rank - 1) % world % 2)
                found.append(torch.equal(tensor.local.float(), torch.full(shape, before)))
                found.append(names_of(os.getpid()))
        return found


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_of_every_dtype_and_shape_reach_the_peer_that_they_are_for(world: int) -> None:
    for found in run_ranks(_tensors, world):
        assert found == [True, []] * (len(DTYPES) * 5)


def _refusals(rank: int, world: int) -> list[str]:
    messages = []
    with peers_of(rank, world) as peers:
        asked = [
            ("rows", (4 + rank, 2), torch.float32),
            ("rows" if rank else "weights", (4, 2), torch.float32),
            ("rows", (4, 2), torch.bfloat16 if rank else torch.float16),
            ("rows", (4, -rank), torch.float32),
            ("rows", (4, 2), torch.complex64),
            ("r" * 81, (4, 2), torch.float32),
            ("rows", (1 << 40, 1 << 10), torch.float32),
        ]
        for request in asked:
            with pytest.raises(ValueError, match=r"peer memory|every rank") as caught:
                peers.allocate(*request)
            messages.append(str(caught.value))
        # The memory is as good as before.
        tensor = peers.allocate("rows", (4, 2), torch.float32)
        assert tensor.views is not None
        tensor.views[1 - rank].fill_(rank + 1.0)
        peers.signal("filled")
        peers.wait("filled")
        assert tensor.local.sum().item() == 8 * (2 - rank)
        assert names_of(os.getpid()) == []
    return messages


def test_what_differs_between_ranks_or_cannot_be_is_refused_alike_on_all() -> None:
    first, second = run_ranks(_refusals, 2)
    assert first == second
    start = "every rank of the 'expert' axis must allocate the same tensors in the same order, but they asked for: "
    assert first[:3] == [
        start + "rank 0 'rows' (4, 2) torch.float32, rank 1 'rows' (5, 2) torch.float32",
        start + "rank 0 'weights' (4, 2) torch.float32, rank 1 'rows' (4, 2) torch.float32",
        start + "rank 0 'rows' (4, 2) torch.float16, rank 1 'rows' (4, 2) torch.bfloat16",
    ]
    start = "no peer memory on the 'expert' axis. "
    assert first[3] == start + "rank 1: the shape (4, -1) of 'rows' has a negative size"
    assert first[4].startswith(
        start + "rank 0: the dtype (torch.complex64) of 'rows' must have elements of 1, 2, 4 or 8"
    )
    assert "must have 1 to 80 bytes in UTF-8" in first[5]
    assert re.search(
        r"for 'rows', which takes [\d,]+ bytes of /dev/shm .* with [\d,]+ free there; enlarge it", first[6]
    )


def _order(rank: int, world: int) -> list[str]:
    with peers_of(rank, world) as peers:
        box = peers.allocate("box", (1,), torch.int64)
        assert box.views is not None
        if rank == 0:
            peers.signal("early")
            time.sleep(0.3)
            box.views[1].fill_(1)
            peers.signal("box")
        else:
            peers.wait("box")
            assert box.local.item() == 1
            peers.wait("early")
        for phase in ("a", "b", "a", "c"):
            peers.signal(phase)
        for phase in ("c", "a", "b", "a") if rank else ("b", "a", "c", "a"):
            peers.wait(phase)
        # A rank may be far ahead, and the records of the log are used again.
        for _ in range(8):
            for count in range(50):
                peers.signal(f"phase {count}")
            for count in reversed(range(50)):
                peers.wait(f"phase {count}")
        return ["ok"]


def test_signals_of_other_phases_count_for_later_waits() -> None:
    assert run_ranks(_order, 2) == [["ok"], ["ok"]]


def _patience(rank: int, world: int) -> tuple[float, float]:
    with peers_of(rank, world) as peers:
        peers.signal("start")
        peers.wait("start")
        if rank == 1:
            time.sleep(1.0)
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        peers.signal("slept")
        peers.wait("slept")
        return time.monotonic() - start_s, time.process_time() - start_cpu_s


def test_a_wait_takes_no_core_from_the_peers() -> None:
    seconds, cpu_seconds = run_ranks(_patience, 2)[0]
    assert seconds > 0.9
    assert cpu_seconds < 0.1


@pytest.mark.parametrize("size", [1, 3])
def test_virtual_ranks_share_their_blocks_and_keep_none(size: int) -> None:
    ranks = virtual_peers(size, "cpu")
    assert [(one.size, one.index, one.ranks) for one in ranks] == [
        (size, index, tuple(range(size))) for index in range(size)
    ]
    for shape in ((4, 3), (5,), (0, 2)):
        tensors = [one.allocate("x", shape, torch.bfloat16) for one in ranks]
        for index, tensor in enumerate(tensors):
            assert tensor.views is not None
            assert (tensor.addresses_S % 256).tolist() == [0] * size
            tensor.views[(index + 1) % size].fill_(index + 1)
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor.local, torch.full(shape, (index - 1) % size + 1, dtype=torch.bfloat16))
            if 0 not in shape:
                assert tensor.local.data_ptr() == tensor.addresses_S[index]
    for one in ranks:
        one.signal("x")
        one.wait("x")
        one.check()
        one.close()


def test_virtual_ranks_that_ask_for_different_tensors_are_refused() -> None:
    first, second = virtual_peers(2, "cpu")
    first.allocate("x", (2, 3), torch.float32)
    with pytest.raises(
        ValueError, match=r"rank 1 asks for \('x', \(2, 4\), torch.float32\) and another rank asked for"
    ):
        second.allocate("x", (2, 4), torch.float32)
    second.allocate("x", (2, 3), torch.float32)


def test_one_rank_needs_no_shared_memory() -> None:
    with make_peers(Axis.single("expert", rank=5), "cpu", 1.0) as peers:
        assert (peers.size, peers.ranks) == (1, (0,))
        assert peers.allocate("x", (2,), torch.int32).local.tolist() == [0, 0]


def test_a_device_without_peer_memory_is_refused_with_what_to_do() -> None:
    assert reason_against(1, "meta") is None
    assert reason_against(2, "cpu") is None
    axis = Axis(name="expert", size=2, index=0, group=None, ranks=(0, 1))
    with pytest.raises(ValueError, match='cpu or cuda, not meta; use dispatcher = "all_to_all" there'):
        make_peers(axis, "meta", 1.0)
    if not torch.cuda.is_available():
        with pytest.raises(
            ValueError, match='needs a torch built for CUDA and an NVIDIA GPU; use dispatcher = "all_to'
        ):
            make_peers(axis, "cuda", 1.0)
    with pytest.raises(ValueError, match=r"timeout_s \(0\) must be above 0"):
        make_peers(axis, "cpu", 0)


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_uses_is_not() -> None:
    own = this_process()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.Popen(["true"])
    try:
        started = int(Path(f"/proc/{living.pid}/stat").read_text().rpartition(")")[2].split()[19])
        assert is_alive(Process(host=own.host, namespace=own.namespace, pid=living.pid, started=started))
        # Not reaped yet: a zombie is dead.
        while Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        ended_at = int(Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[19])
        user = os.getuid()
        dead = [
            f"coterie-{user}-{own.namespace}-{ended.pid}-{ended_at}-aa",
            # The number of a living process that was another's before.
            f"coterie-{user}-{own.namespace}-{living.pid}-{started - 1}-aa",
            f"coterie-{user}-{own.namespace}-4194304-1-aa",
        ]
        kept = [
            f"coterie-{user}-{own.namespace}-{living.pid}-{started}-aa",
            f"coterie-{user}-{own.namespace + 1}-{ended.pid}-{ended_at}-aa",
            f"coterie-{user + 1}-{own.namespace}-{ended.pid}-{ended_at}-aa",
            f"coterie-{user}-{own.namespace}-of somebody else",
            create(4096),
        ]
        for name in dead + kept[:-1]:
            (FOLDER / name).touch()
        removed = remove_leftovers()
        assert set(dead) <= set(removed)
        assert not set(kept) & set(removed)
        assert [(FOLDER / name).exists() for name in dead + kept] == [False] * len(dead) + [True] * len(kept)
    finally:
        for name in dead + kept:
            unlink(name)
        living.communicate(b"\n")
        ended.wait()


def _start(rank: int, world: int, leftover: str) -> bool:
    with peers_of(rank, world):
        return (FOLDER / leftover).exists()


def test_the_next_start_removes_what_dead_processes_left() -> None:
    leftover = f"coterie-{os.getuid()}-{this_process().namespace}-4194304-1-bb"
    (FOLDER / leftover).touch()
    assert run_ranks(_start, 2, leftover) == [False, False]


@needs_triton
@pytest.mark.parametrize("file", ["interpreted_signals.py", "interpreted_symmetric.py"])
def test_what_gpus_need_under_the_interpreter(file: str) -> None:
    run_interpreted(Path(__file__).with_name(file))
