"""The conformance suite on the DeepEP adapter over the stand-in: it keeps what it declares, and may not claim more."""

import sys
from functools import cache

import pytest
from coterie_parallel.conformance.report import main
from support.ranks import run_ranks

from parallel.deep_ep_checks import CLAIMS, SETTINGS, Setting, claim_problems, suite_problems
from parallel.fake_deep_ep import make_fake

# All cases in the usual setting of the newest layout; of the others those in which they differ.
_FEW = ("uneven", "empty_rank", "aligned_16", "bfloat16", "refusals")
_V1, _V20, _V21, _V25, _, _, _, _SORTED, _FP8, _ = SETTINGS
RUNS: dict[int, list[tuple[Setting, tuple[str, ...]]]] = {
    2: [(_V21, ()), (_V1, _FEW), (_V20, _FEW), (_SORTED, ("uneven", "reuse")), (_FP8, (*_FEW, "reuse"))],
    4: [(_V25, ("uneven", "same_rank", "aligned_128"))],
}


@cache
def _results(world: int) -> list[dict[str, tuple[int, list[str]]]]:
    return run_ranks(suite_problems, world, RUNS[world], timeout_s=60)


@pytest.mark.parametrize(
    ("world", "setting", "num_cases"),
    [(world, str(setting), len(names) or 19) for world, runs in RUNS.items() for setting, names in runs],
)
def test_the_adapter_keeps_what_it_declares(world: int, setting: str, num_cases: int) -> None:
    for found in _results(world):
        assert found[setting] == (num_cases, [])


@cache
def _claimed() -> list[list[list[str]]]:
    return run_ranks(claim_problems, 2, timeout_s=60)


@pytest.mark.parametrize("number", range(len(CLAIMS)), ids=lambda number: f"{CLAIMS[number][0].__name__}-{number}")
def test_a_claim_beyond_that_is_found(number: int) -> None:
    expected = CLAIMS[number][3]
    found = [problem for rank in _claimed() for problem in rank[number]]
    assert (found == []) == (expected is None), found
    assert expected is None or any(expected in problem for problem in found), found


def test_the_command_says_what_was_claimed_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake("2.1.0"))
    cases = ["--case", "uneven", "--case", "aligned_16"]
    assert main(["parallel.deep_ep_checks:StandIn", "--option", "deep_ep.payload=fp8", *cases]) == 0
    text = capsys.readouterr().out
    for part in (
        "order of rows: any inside an expert, another at each dispatch (checked as sets",
        "values of rows: off by at most 0.0625 of the largest value of the token",
        "sums over the rows of a token: rounded 3 times",
        "tokens: torch.bfloat16 of width 256 in most cases, as others are refused: dtype of x_TD (torch.float32)",
        "2 of 2 cases right by these claims",
    ):
        assert part in text
    assert main(["parallel.deep_ep_checks:ClaimsOrder", "--case", "uneven"]) == 1
    text = capsys.readouterr().out
    assert "order of rows: the contract (checked row by row)" in text
    assert "FAIL uneven" in text
    settings = ["--option", "deep_ep.deterministic=true", "--option", "deep_ep.max_tokens=64"]
    assert main(["parallel.deep_ep_checks:ClaimsOrder", "--case", "uneven", *settings]) == 0


def test_the_command_says_where_the_adapter_itself_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake("2.1.0"))
    with pytest.raises(SystemExit):
        main(["deep_ep"])
    assert "dispatcher 'deep_ep' takes no tokens on a CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["parallel.deep_ep_checks:StandIn", "--option", "deep_ep.num_sms=3"])
    assert "deep_ep.num_sms (3) must be even" in capsys.readouterr().err
