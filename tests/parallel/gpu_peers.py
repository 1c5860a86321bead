"""Peer memory between processes on GPUs: right first, then the time of a hand-over. Needs torch and triton.

    python3 tests/parallel/gpu_peers.py [--worlds 2 4] [--json FILE] [--commit HASH]

With fewer GPUs than ranks several processes share one, which takes turns between them: a hand-over then waits for the
turn of the other process, and only says that the result is right.
"""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "parallel" / "src")]
# Read by torch when a process first shares memory; it changes nothing where each rank has its own GPU.
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from coterie_parallel import CollectiveError, all_gather_objects, barrier  # noqa: E402
from coterie_parallel.dispatch.rowwise.peers import PeerMemory, make_peers  # noqa: E402
from support.device_timing import about, write_json  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

from parallel.peer_support import axis_of, run_with_deaths  # noqa: E402

WIDTH = 8192
Row = dict[str, object]


@triton.jit
def put_row(addresses_ptr, count_ptr, rank, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Write 10 * count + rank into row `rank` of every rank's box of (SIZE, WIDTH) int64."""
    peer = tl.program_id(0)
    box_ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int64))
    value = tl.load(count_ptr) * 10 + rank
    place = tl.arange(0, WIDTH)
    tl.store(box_ptr + rank * WIDTH + place, tl.zeros((WIDTH,), tl.int64) + value)


class Rounds:
    """Rounds of put, hand-over, compare, hand-over on one rank; all counts lie on the device."""

    def __init__(self, rank: int, world: int, peers: PeerMemory) -> None:
        self.rank, self.world, self.peers = rank, world, peers
        self.box = peers.allocate("box", (world, WIDTH), torch.int64)
        self.count = torch.ones((), dtype=torch.int64, device=peers.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=peers.device)
        self.ranks = torch.arange(world, device=peers.device)[:, None]

    def one(self) -> None:
        put_row[(self.world,)](self.box.addresses_S, self.count, self.rank, SIZE=self.world, WIDTH=WIDTH)
        self.peers.signal("written")
        self.peers.wait("written")
        self.wrong += (self.box.local != self.count * 10 + self.ranks).sum()
        self.peers.signal("read")
        self.peers.wait("read")
        self.count += 1

    def result(self) -> tuple[int, int]:
        self.peers.check()
        return int(self.count.item()) - 1, int(self.wrong.item())


def axis_and_device(rank: int, world: int):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return axis_of(rank, world), torch.device("cuda", torch.cuda.current_device())


def right(rank: int, world: int, num_rounds: int) -> dict[str, float]:
    axis, device = axis_and_device(rank, world)
    draw = random.Random(rank)
    with make_peers(axis, device, 20.0) as peers:
        rounds = Rounds(rank, world, peers)
        barrier(axis)
        for _ in range(num_rounds):
            if draw.random() < 0.2:
                time.sleep(draw.random() * 2e-3)
            rounds.one()
        assert rounds.result() == (num_rounds, 0), rounds.result()

        # The views are the same memory as the addresses.
        assert rounds.box.views is not None
        expected = rounds.count * 10 - 10 + rounds.ranks
        wrong = [int((view != expected).sum()) for view in rounds.box.views]
        assert wrong == [0] * world, wrong
        barrier(axis)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            rounds.one()
        barrier(axis)
        for _ in range(num_rounds // 4):
            graph.replay()
        torch.cuda.synchronize()
        found = rounds.result()
        assert found == (num_rounds + num_rounds // 4, 0), found

        refused = ""
        try:
            peers.allocate("rows", (4 + rank,), torch.float32)
        except ValueError as error:
            refused = str(error)
        assert "must allocate the same tensors in the same order" in refused, refused
        rounds.box = None
        again = peers.allocate("rows", (1000, 1000), torch.bfloat16)
        assert again.local.count_nonzero().item() == 0

        times = {"eager": hand_over_us(peers, axis, lambda: hand_over(peers), 40)}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(20):
                hand_over(peers)
        times["graph"] = hand_over_us(peers, axis, graph.replay, 2) / 20
        barrier(axis)
        return times


def hand_over(peers: PeerMemory) -> None:
    peers.signal("written")
    peers.wait("written")


def hand_over_us(peers: PeerMemory, axis, run, repeats: int) -> float:
    """Return the time of one call, the mean of many that follow one another, as each waits for the peers."""
    run()
    torch.cuda.synchronize()
    barrier(axis)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    peers.check()
    return (time.perf_counter() - start) / repeats * 1e6


def late(rank: int, world: int) -> tuple[float, str]:
    axis, device = axis_and_device(rank, world)
    with make_peers(axis, device, 1.5) as peers:
        hand_over(peers)
        peers.check()
        barrier(axis)
        found = (0.0, "")
        if rank != 1:
            found = checked(peers, "put rows")
        # Rank 1 is late for as long as the others wait for it.
        barrier(axis)
        return found


def checked(peers: PeerMemory, phase: str) -> tuple[float, str]:
    start = time.monotonic()
    peers.signal(phase)
    # Every wait after the first must end at once, as a stream full of them does.
    for _ in range(20):
        peers.wait(phase)
    try:
        peers.check()
    except CollectiveError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, "no error"


def other_order(rank: int, world: int) -> tuple[float, str]:
    axis, device = axis_and_device(rank, world)
    with make_peers(axis, device, 20.0) as peers:
        peers.signal("a" if rank else "b")
        torch.cuda.synchronize()
        barrier(axis)
        found = checked(peers, "a" if rank else "b")
        barrier(axis)
        return found


def killed(rank: int, world: int) -> tuple[float, str]:
    axis, device = axis_and_device(rank, world)
    peers = make_peers(axis, device, 40.0)
    hand_over(peers)
    peers.check()
    all_gather_objects(None, axis)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return checked(peers, "put rows")


def check(worlds: list[int], num_rounds: int) -> list[Row]:
    faults: list[str] = []
    rows: list[Row] = []

    def part(name: str, run) -> None:
        start = time.monotonic()
        try:
            found = run()
            print(f"right: {name} ({time.monotonic() - start:.1f} s) {found}", flush=True)
        except AssertionError as fault:
            faults.append(f"{name}: {fault}")
            print(f"WRONG: {name} ({time.monotonic() - start:.1f} s) {fault}", flush=True)

    def hand_overs(world: int) -> object:
        found = run_ranks(right, world, num_rounds, timeout_s=50.0)
        for kind in ("eager", "graph"):
            rows.append({"ranks": world, "kind": kind, "hand_over_us": round(max(one[kind] for one in found), 1)})
        return rows[-2:]

    def late_peer() -> object:
        found = run_ranks(late, worlds[0], timeout_s=40.0)[0]
        assert 1.3 < found[0] < 6, found
        assert "the wait for 'put rows' on the 'expert' axis" in found[1], found
        assert "rank 1 (process" in found[1], found
        assert "was not there after 1.5 s; if it loads or compiles" in found[1], found
        return found

    def order() -> object:
        found = run_ranks(other_order, worlds[0], timeout_s=40.0)
        assert "uses the phases in another order" in found[0][1], found
        assert found[0][0] < 10, found
        return found

    def dead_peer() -> object:
        found = run_with_deaths(killed, worlds[0])[0]
        assert found[0] < 10, found
        assert "rank 1 (process" in found[1], found
        assert "has died without this phase" in found[1], found
        return found

    part("late peer", late_peer)
    part("killed peer", dead_peer)
    part("other order of phases", order)
    for world in worlds:
        part(f"{world} ranks", lambda world=world: hand_overs(world))
    if faults:
        raise AssertionError("\n".join(faults))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    rows = check(arguments.worlds, arguments.rounds)
    for row in rows:
        print(row)
    if arguments.json:
        write_json(arguments.json, {**about(arguments.commit), "gpus": torch.cuda.device_count()}, rows)


if __name__ == "__main__":
    main()
