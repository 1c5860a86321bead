"""The DeepEP adapter on real ranks over a stand-in of the package."""

import sys
from functools import cache

import pytest
from support.ranks import run_ranks

from parallel.deep_ep_checks import SETTINGS, calls_after_a_fault, large_batch_problems, overlap_order, setting_problems


@cache
def _results(world: int) -> list[dict[str, list[str]]]:
    return run_ranks(_all_settings, world, timeout_s=60)


def _all_settings(rank: int, world: int) -> dict[str, list[str]]:
    return {str(one): setting_problems(one, rank, world) for one in _SETTINGS[world]}


# V1 needs two ranks; four ranks find what two can not, a third source.
_SETTINGS = {1: [one for one in SETTINGS[:4] if one.surface != "Buffer"], 2: SETTINGS, 4: SETTINGS[:4]}


@pytest.mark.parametrize(
    ("world", "setting"), [(world, str(one)) for world, settings in _SETTINGS.items() for one in settings]
)
def test_values_gradients_and_calls(world: int, setting: str) -> None:
    for rank, found in enumerate(_results(world)):
        assert found[setting] == [], f"rank {rank}"


def test_every_rank_is_told_the_same_about_a_large_batch() -> None:
    ranks = run_ranks(large_batch_problems, 2, timeout_s=60)
    own = ("is NaN",)
    assert {name: text for name, text in ranks[0].items() if name not in own} == {
        name: text for name, text in ranks[1].items() if name not in own
    }
    told = ranks[0]
    assert told["fits"] == []
    assert [rank["is NaN"] for rank in ranks] == [["False", "0"], ["True", "1"]]
    for name, limit in (("later", 4), ("exact", 4), ("first", 5)):
        assert told[name] == [
            f"a batch of 7 tokens on rank 1 is larger than the {limit} for which the buffers of DeepEP were sized "
            "once; set deep_ep.max_tokens to 7 or more"
        ]
    assert told["dtype of one"] == [
        "rank 1: dtype of x_TD (torch.float32) must be torch.bfloat16 with DeepEP; cast the tokens"
    ]
    assert told["width of one"] == [
        "rank 0: width of x_TD (128) must be a multiple of 256 with DeepEP; nearest: 256",
        "width and choices must be the same on all ranks of the 'expert' axis, got [(128, 1), (256, 1)]",
    ]
    assert told["outside is zero"] == ["True"]
    assert told["outside"] == ["ids_TK must lie in [-1, 8); 1 ids of a rank did not"]


def test_work_between_start_and_finish_runs_while_rows_travel() -> None:
    assert run_ranks(overlap_order, 1)[0] == [
        "work after dispatch, 1 under way",
        "work after combine, 1 under way",
        "its backward after cached dispatch, 1 under way",
        "its backward after combine with weights, 1 under way",
    ]


def test_after_a_fault_nothing_waits_for_peers() -> None:
    assert run_ranks(calls_after_a_fault, 1)[0] == ["make", "dispatch"]


def test_deep_ep_is_imported_only_when_asked_for() -> None:
    assert "deep_ep" not in sys.modules
