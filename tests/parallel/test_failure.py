"""A peer that stops or goes away is an error in time, with the name of the axis."""

import os
import signal
import time

import pytest
import torch
from coterie_parallel import (
    Axis,
    CollectiveError,
    Mesh,
    ParallelConfig,
    all_gather,
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    all_reduce_sum_,
    broadcast_,
    exchange_rows,
    make_dispatcher,
    make_plan,
)
from support.ranks import run_ranks


def _stopped_peer(rank: int, world: int) -> tuple[float, str]:
    """P9: rank 1 stops after it has exchanged counts, in the middle of a dispatch."""
    mesh = Mesh(make_plan(ParallelConfig(expert=2), world), rank, timeout_s=5)
    axis = mesh.axis("expert")
    ids = all_gather_objects(os.getpid(), axis)
    if rank == 1:
        exchange_rows(torch.ones(2, 2, dtype=torch.int64), [1, 1], [1, 1], axis)
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0, ""
    dispatcher = make_dispatcher("all_to_all", num_experts=4, axis=axis)
    start = time.monotonic()
    try:
        dispatcher.dispatch(torch.ones(2, 3), torch.tensor([[0, 2], [1, 3]]), torch.ones(2, 2))
        return time.monotonic() - start, "no error"
    except CollectiveError as error:
        return time.monotonic() - start, str(error)
    finally:
        os.kill(ids[1], signal.SIGCONT)


def _peer_goes_away(rank: int, world: int) -> tuple[float, str]:
    mesh = Mesh(make_plan(ParallelConfig(expert=2), world), rank, timeout_s=30)
    axis = mesh.axis("data")
    all_reduce_sum(torch.ones(3), axis)
    start = time.monotonic()
    if rank == 1:
        mesh.close()
        return 0.0, ""
    try:
        all_reduce_sum(torch.ones(3), axis)
        return time.monotonic() - start, "no error"
    except CollectiveError as error:
        return time.monotonic() - start, str(error)


def test_a_stopped_peer_is_an_error_within_ten_seconds_that_names_the_group() -> None:
    seconds, message = run_ranks(_stopped_peer, 2)[0]
    assert 4 < seconds < 10
    assert message.startswith("exchange_rows on the 'expert' axis (ranks 0, 1) failed on rank 0: a peer stopped, died")


def test_a_peer_that_goes_away_is_an_error_at_once() -> None:
    seconds, message = run_ranks(_peer_goes_away, 2)[0]
    assert seconds < 10
    assert message.startswith("all_reduce_sum on the 'data' axis (ranks 0, 1) failed on rank 0")


def test_a_tensor_that_needs_a_gradient_is_refused_as_there_is_no_backward() -> None:
    axis = Axis.single("data")
    tensor = torch.ones(2, requires_grad=True)
    for collective in (all_reduce_sum, all_reduce_sum_, all_reduce_max, broadcast_, all_gather):
        with pytest.raises(ValueError, match=r"has no backward.*detach"):
            collective(tensor, axis)
    with pytest.raises(ValueError, match=r"has no backward.*detach"):
        exchange_rows(tensor, [2], [2], axis)


def _collectives(rank: int, world: int) -> list[object]:
    with Mesh(make_plan(ParallelConfig(expert=2), world), rank, timeout_s=30) as mesh:
        own = torch.tensor([rank, 10 - rank])
        results: list[object] = []
        for name in ("world", "expert", "expert_data"):
            axis = mesh.axis(name)
            results += [
                (axis.index, axis.ranks),
                all_reduce_sum(own, axis).tolist(),
                all_reduce_max(own, axis).tolist(),
                [one.tolist() for one in all_gather(own, axis)],
                broadcast_(own.clone(), axis, source=1).tolist(),
                all_gather_objects({"rank": rank}, axis),
            ]
        # Index 0 sends 2 rows to each and index 1 sends none.
        sent = torch.arange(4) + 10 * rank if mesh.axis("expert").index == 0 else torch.arange(0)
        results.append(exchange_rows(sent, *_counts(mesh.axis("expert").index), mesh.axis("expert")).tolist())
        assert own.tolist() == [rank, 10 - rank]
        return results


def _counts(index: int) -> tuple[list[int], list[int]]:
    return ([2, 2], [2, 0]) if index == 0 else ([0, 0], [2, 0])


def test_collectives_stay_inside_their_axis() -> None:
    results = run_ranks(_collectives, 4)
    assert results[3] == [
        (3, (0, 1, 2, 3)),
        [6, 34],
        [3, 10],
        [[0, 10], [1, 9], [2, 8], [3, 7]],
        [1, 9],
        [{"rank": 0}, {"rank": 1}, {"rank": 2}, {"rank": 3}],
        (1, (2, 3)),
        [5, 15],
        [3, 8],
        [[2, 8], [3, 7]],
        [3, 7],
        [{"rank": 2}, {"rank": 3}],
        (1, (1, 3)),
        [4, 16],
        [3, 9],
        [[1, 9], [3, 7]],
        [3, 7],
        [{"rank": 1}, {"rank": 3}],
        [22, 23],
    ]
    assert results[0][-1] == [0, 1]
