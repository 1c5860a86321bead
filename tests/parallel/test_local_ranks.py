"""A pool of ranks: processes that stay, and faults that are named."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from coterie_parallel import Axis, all_gather_objects
from coterie_parallel.local_ranks import RankError, RankPool, run_on_local_ranks


def process_ids(rank: int, world: int) -> int:
    return os.getpid()


def rank_one_dies(rank: int, world: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def rank_one_raises(rank: int, world: int) -> int:
    if rank == 1:
        raise ValueError("bad news from rank 1")
    return rank


def rank_one_sleeps(rank: int, world: int) -> int:
    if rank == 1:
        time.sleep(30)
    return rank


def group_size(rank: int, world: int) -> int:
    return dist.get_world_size() if dist.is_initialized() else 0


def last_to_come(rank: int, world: int, folder: str) -> float:
    """Note when this rank leaves its group, and return when it was done; rank 1 is half a second late."""
    leave = dist.destroy_process_group

    def note_and_leave() -> None:
        (Path(folder) / str(rank)).write_text(str(time.monotonic()))
        leave()

    dist.destroy_process_group = note_and_leave
    time.sleep(0.5 * rank)
    return time.monotonic()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def place(axis: Axis, factor: int) -> tuple[str, list[int]]:
    return axis.name, all_gather_objects(factor * axis.index, axis)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Have torch imported in the server that ranks are forked from, which no time limit should include."""
    with RankPool() as pool:
        pool.run(process_ids, 1)


def test_several_ranks_have_a_group_and_one_needs_none() -> None:
    with RankPool() as pool:
        assert pool.run(group_size, 1) == [0]
        assert pool.run(group_size, 3) == [3, 3, 3]
    assert run_on_local_ranks(place, 3, 10) == [("expert", [0, 10, 20])] * 3
    assert run_on_local_ranks(place, 1, 10) == [("expert", [0])]


def test_processes_are_used_again_and_ended() -> None:
    with RankPool(limit_s=60.0) as pool:
        two = pool.run(process_ids, 2)
        three = pool.run(process_ids, 3)
        assert three[:2] == two
        assert len(set(three)) == 3
        assert os.getpid() not in three
    assert not any(map(is_running, three))


def test_no_rank_leaves_the_group_before_the_last_is_done(tmp_path: Path) -> None:
    with RankPool(limit_s=60.0) as pool:
        last_s = max(pool.run(last_to_come, 2, str(tmp_path)))
        assert all(float((tmp_path / str(rank)).read_text()) >= last_s for rank in range(2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (rank_one_dies, "rank 1 died with exit code 3"),
        (rank_one_raises, "rank 1 raised:(.|\n)*bad news from rank 1"),
        (rank_one_sleeps, "not done within 6 s: rank 1"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_call_works(function: object, message: str) -> None:
    with RankPool(limit_s=6.0) as pool:
        with pytest.raises(RankError, match=message):
            pool.run(function, 2)
        assert len(set(pool.run(process_ids, 2))) == 2
