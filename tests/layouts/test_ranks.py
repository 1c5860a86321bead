import os

import pytest
from coterie_trainer.verify.ranks import RankError, RankPool

from layouts import broken


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_are_used_again_and_ended() -> None:
    with RankPool(timeout_s=30.0) as pool:
        two = pool.run(broken.process_ids, 2)
        three = pool.run(broken.process_ids, 3)
        assert three[:2] == two
        assert len(set(three)) == 3
        assert os.getpid() not in three
    assert not any(map(is_running, three))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken.rank_one_dies, "rank 1 died with exit code 3"),
        (broken.rank_one_raises, "rank 1 raised:(.|\n)*bad news from rank 1"),
        (broken.rank_one_sleeps, "not done within 3 s: rank 1"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_call_works(function: object, message: str) -> None:
    with RankPool(timeout_s=3.0) as pool:
        with pytest.raises(RankError, match=message):
            pool.run(function, 2)
        assert len(set(pool.run(broken.process_ids, 2))) == 2
