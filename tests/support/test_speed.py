"""The speed harness must fail what is slow, wrong, unnamed or forgotten: each test feeds it one of these."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.run_bench import main, run_folder
from support.speed import Measurement, Pair, Scaling, measure


class FakeTime:
    """A clock that only moves when a fake function of a known duration is called."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def takes(self, name: str, *seconds: float) -> Callable[[], None]:
        """Return a function that takes these durations in turn, over and over."""
        durations = itertools.cycle(seconds)

        def function() -> None:
            self.calls.append(name)
            self.now_s += next(durations)

        return function


def passes() -> None:
    pass


def fails() -> None:
    raise AssertionError("results differ")


def test_ratio_is_reference_over_ours() -> None:
    fake = FakeTime()
    pair = Pair("half", fake.takes("ours", 0.002), fake.takes("reference", 0.001), passes)
    result = measure(pair, budget_s=0.0, clock=fake.clock)
    assert result.ratio == pytest.approx(0.5)
    assert result.ours_ms == pytest.approx(2.0)
    assert result.reference_ms == pytest.approx(1.0)


def test_ratio_is_the_median_of_the_rounds_with_quartiles() -> None:
    fake = FakeTime()
    # Warm-up first (1 s), then seven rounds; the reference always takes 12 s. Ratios: 12, 6, 4, 3, 2, 1, 0.5.
    ours = fake.takes("ours", 1, 1, 2, 3, 4, 6, 12, 24)
    result = measure(Pair("spread", ours, fake.takes("reference", 12), passes), budget_s=0.0, clock=fake.clock)
    assert result.rounds == 7
    assert result.ratio == pytest.approx(3.0)
    assert result.ratio_low == pytest.approx(1.5)
    assert result.ratio_high == pytest.approx(5.0)


def test_slow_spell_that_hits_both_does_not_move_the_ratio() -> None:
    fake = FakeTime()
    slow_spell = (1, 1, 1, 50, 50, 50, 50, 50)
    ours = fake.takes("ours", *slow_spell)
    reference = fake.takes("reference", *(2 * seconds for seconds in slow_spell))
    assert measure(Pair("spell", ours, reference, passes), budget_s=0.0, clock=fake.clock).ratio == pytest.approx(2.0)


def test_calls_alternate_and_the_order_changes_each_round() -> None:
    fake = FakeTime()
    pair = Pair("order", fake.takes("o", 1), fake.takes("r", 1), passes)
    measure(pair, budget_s=0.0, min_rounds=3, clock=fake.clock)
    assert "".join(fake.calls) == "or" + "or" + "ro" + "or"


@pytest.mark.parametrize(("seconds_per_call", "rounds"), [(1.0, 7), (0.125, 12), (0.03125, 48)])
def test_budget_sets_the_rounds_but_never_below_seven(seconds_per_call: float, rounds: int) -> None:
    fake = FakeTime()
    pair = Pair("budget", fake.takes("o", seconds_per_call), fake.takes("r", seconds_per_call), passes)
    assert measure(pair, budget_s=3.0, clock=fake.clock).rounds == rounds


def test_nothing_is_timed_when_the_check_fails() -> None:
    fake = FakeTime()
    pair = Pair("wrong", fake.takes("o", 1), fake.takes("r", 1), fails)
    with pytest.raises(AssertionError, match="results differ"):
        measure(pair, clock=fake.clock)
    assert fake.calls == []


@pytest.mark.parametrize("check", [passes, fails])
def test_torch_runs_on_one_thread_and_gets_its_threads_back(check: Callable[[], None]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: set[int] = set()
    pair = Pair("threads", lambda: seen.add(torch.get_num_threads()), lambda: None, check)
    try:
        if check is fails:
            with pytest.raises(AssertionError):
                measure(pair, budget_s=0.0)
            assert seen == set()
        else:
            measure(pair, budget_s=0.0)
            assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_scaling_is_large_over_small() -> None:
    fake = FakeTime()
    scaling = Scaling("quadratic", fake.takes("s", 1), fake.takes("l", 4), limit=2.5)
    assert measure(scaling, budget_s=0.0, clock=fake.clock).ratio == pytest.approx(4.0)


SLEEPS = """
import time
from support.speed import Pair

def bench_sleep():
    yield Pair("sleep", lambda: time.sleep(0.004), lambda: time.sleep(0.002), lambda: None)
"""


def write(folder: Path, bench: str, toml: str) -> Path:
    folder = folder / "measured"
    folder.mkdir()
    (folder / "bench_it.py").write_text(bench, encoding="utf-8")
    (folder / "speed.toml").write_text(toml, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("floor", "code"), [(0.9, 1), (0.3, 0)])
def test_ours_that_sleeps_twice_as_long_fails_a_floor_near_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], floor: float, code: int
) -> None:
    folder = write(tmp_path, SLEEPS, f'[floors]\n"sleep" = {floor}\n')
    assert main([str(folder), "--budget", "0"]) == code
    assert ("is below the floor 0.9" in capsys.readouterr().out) == (code == 1)


PAIR_AND_SCALING = """
from support.speed import Pair, Scaling

def bench_pair():
    yield Pair("pair", lambda: None, lambda: None, lambda: None)

def bench_scaling():
    yield Scaling("scaling", lambda: None, lambda: None)
"""


def fixed(ratio: float) -> Callable[[Pair | Scaling], Measurement]:
    """Return a measure that gives every subject this ratio."""
    return lambda subject: Measurement(
        name=subject.name, ours_ms=1, reference_ms=ratio, ratio=ratio, ratio_low=ratio, ratio_high=ratio, rounds=7
    )


@pytest.mark.parametrize(
    ("toml", "ratio", "faults"),
    [
        ("[floors]\npair = 2\n[limits]\nscaling = 2", 2.0, []),
        ("[floors]\npair = 2\n[limits]\nscaling = 2", 1.99, ["pair: ratio 1.99 is below the floor 2"]),
        ("[floors]\npair = 2\n[limits]\nscaling = 2", 2.01, ["scaling: ratio 2.01 is above the limit 2"]),
        ("[limits]\nscaling = 2", 2.0, ["pair: no floor; add a line under [floors] in speed.toml (measured 2.00)"]),
        ("[floors]\npair = 2", 2.0, ["scaling: no limit; add a line under [limits] in speed.toml (measured 2.00)"]),
        (
            "[floors]\npair = 2\ngone = 1\n[limits]\nscaling = 2\nlost = 3",
            2.0,
            ["speed.toml: [floors] names no pair: 'gone'", "speed.toml: [limits] names no pair: 'lost'"],
        ),
        (
            "[floor]\npair = 2\n[floors]\npair = 2\n[limits]\nscaling = 2",
            2.0,
            ["speed.toml: unknown table [floor]; known: [floors], [limits]"],
        ),
    ],
)
def test_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str], toml: str, ratio: float, faults: list[str]) -> None:
    folder = write(tmp_path, PAIR_AND_SCALING, toml)
    assert run_folder(folder, measure_one=fixed(ratio)) == (1 if faults else 0)
    printed = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("FAULT ") for line in printed if line.startswith("FAULT")] == faults
    assert printed[-1] == f"2 measured, {len(faults)} faults"


def test_limit_in_the_code_is_used_and_a_second_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = 'from support.speed import Scaling\ndef bench_it():\n    yield Scaling("s", id, id, limit=2.5)\n'
    folder = write(tmp_path, bench, "")
    assert run_folder(folder, measure_one=fixed(2.5)) == 0
    assert run_folder(folder, measure_one=fixed(2.6)) == 1
    (folder / "speed.toml").write_text("[limits]\ns = 3\n", encoding="utf-8")
    assert run_folder(folder, measure_one=fixed(2.5)) == 1
    assert "two limits: 2.5 in the code and 3 in speed.toml" in capsys.readouterr().out


def test_failing_check_is_a_fault_and_the_rest_is_still_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = SLEEPS + "\ndef bench_wrong():\n    yield Pair('wrong', id, id, lambda: 1 / 0)\n"
    folder = write(tmp_path, bench, "[floors]\nsleep = 0.3\nwrong = 1\n")
    assert main([str(folder), "--budget", "0"]) == 1
    printed = capsys.readouterr().out
    assert "FAULT wrong: check failed, nothing timed: ZeroDivisionError: division by zero" in printed
    assert "2 measured, 1 faults" in printed


def test_two_pairs_of_one_name_are_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = "from support.speed import Pair\ndef bench_it():\n    yield from [Pair('p', id, id, lambda: None)] * 2\n"
    assert run_folder(write(tmp_path, bench, "[floors]\np = 1\n"), measure_one=fixed(1.0)) == 1
    assert "two pairs are named 'p'" in capsys.readouterr().out


def test_folder_with_nothing_to_measure_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_folder(write(tmp_path, "", "")) == 1
    assert "nothing to measure" in capsys.readouterr().out


def test_only_picks_by_name_and_keeps_the_check_of_the_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, PAIR_AND_SCALING, "[floors]\npair = 2\n[limits]\nscaling = 2")
    assert run_folder(folder, only="scal", measure_one=fixed(1.0)) == 0
    assert "1 measured, 0 faults" in capsys.readouterr().out
    assert run_folder(folder, only="nowhere", measure_one=fixed(1.0)) == 1


def test_bench_reads_the_case_table_of_its_folder_by_name(tmp_path: Path) -> None:
    bench = (
        "from measured_with_cases.cases import RATIO\nfrom support.speed import Pair\n"
        "def bench_it():\n    yield Pair(f'case {RATIO}', id, id, lambda: None)\n"
    )
    folder = write(tmp_path, bench, '[floors]\n"case 3" = 1\n').rename(tmp_path / "measured_with_cases")
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "cases.py").write_text("RATIO = 3\n", encoding="utf-8")
    assert run_folder(folder, measure_one=fixed(1.0)) == 0
