"""The bounds of measurements."""

import json
import math
import tomllib
from pathlib import Path

from support.bounds import broken_bounds

TESTS = Path(__file__).resolve().parents[1]


def test_floors_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "speed.toml"
    file.write_text(
        "[floors]\n'put share' = 0.85\n[limits]\n'addresses of us' = 60\n'never made ms' = 1\n", encoding="utf-8"
    )
    good = [{"name": "put, E 128", "share": 0.85}, {"name": "addresses of one", "us": 60}, {"name": "put, other"}]
    assert broken_bounds(good, file) == []
    bad = [{"name": "put, E 128", "share": 0.84}, {"name": "addresses of one", "us": math.nan}]
    assert broken_bounds(bad, file) == [
        "put, E 128: share is 0.84, below 0.85",
        "addresses of one: us is nan, above 60",
    ]
    assert broken_bounds([{"name": "put"}], file) == ["no row of 'put' has share"]


def test_the_results_of_the_parallel_package_keep_their_bounds() -> None:
    file = TESTS / "parallel" / "speed-1xh200.toml"
    seen: list[dict[str, object]] = []
    for name in ("rowwise-1xh200.json", "optimizer-1xh200.json"):
        rows = json.loads((TESTS / "parallel" / "results" / name).read_text(encoding="utf-8"))["rows"]
        assert broken_bounds(rows, file) == []
        seen += rows
    # A bound that no script has a row for would hold nothing.
    for bounds in tomllib.loads(file.read_text(encoding="utf-8")).values():
        for name in bounds:
            prefix, key = name.rsplit(" ", 1)
            assert any(str(row["name"]).startswith(prefix) and key in row for row in seen), name
