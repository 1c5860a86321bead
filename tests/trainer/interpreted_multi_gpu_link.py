"""Tests of `tests/multi_gpu.py --parts link`, for a process with TRITON_INTERPRET=1: see test_multi_gpu_link.py."""

import json
from pathlib import Path
from typing import Any

import multi_gpu
import pytest
from multi_gpu_parts import link, link_rows
from multi_gpu_parts.bench import Bench

ARGUMENTS = ["--tiny", "--device", "cpu", "--limit", "200", "--json"]


def test_everything_is_right_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multi_gpu.LIMITS_S, "link", 180)
    assert multi_gpu.main([*ARGUMENTS, str(tmp_path), "--parts", "link"]) == 0
    file = json.loads((tmp_path / "multi-gpu-link-2xcpu.json").read_text())
    assert file["faults"] == []
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in file["rows"]}
    assert len(rows) == len(file["rows"])
    wholes = [name for name in rows if name.startswith("combine by")]
    assert len(wholes) == 6
    # All of these bring the same rows over the link: 4 tokens of 256 bytes with 2 choices, of which some stay.
    moved = {name: row["gbps"] * row["us"] * 1e3 for name, row in rows.items()}
    for name in (*wholes, "part: get, random, T 4 D 64", "part: push, random, T 4 D 64", "get: 4 KiB, 8 warps"):
        assert moved[name] == pytest.approx(moved[wholes[0]])
    num_rows = moved[wholes[0]] / 256
    assert num_rows == pytest.approx(round(num_rows))
    assert 0 < moved[wholes[0]] <= 4 * 2 * 256
    assert moved["get, remote share 0, both ways"] == 0
    assert moved["get, remote share 1, both ways"] == pytest.approx(4 * 2 * 256)
    assert {f"get: {how}" for how in link._TRIES} <= rows.keys()
    engine = max(rows[f"copy engine, {way} a peer, both ways"]["gbps"] for way in ("to", "from"))
    assert rows[wholes[0]]["gbps"] / rows[wholes[0]]["share_of_link"] == pytest.approx(engine)
    assert sum(name.startswith("kernel of") for name in rows) == 4 * 4


def is_wrong(bench: Bench) -> None:
    """Lose the last row that is pushed, add a little to what is pulled, and copy all but the last word."""
    made, get = link_rows.Rows._made_entries, link_rows.Rows.get

    def entries(rows: link_rows.Rows, plans: Any) -> Any:
        found = made(rows, plans)
        for by_peer in found.values():
            row_N, slot_N = by_peer[1 - bench.rank]
            # With no row of a peer there is none to lose.
            slot_N[((row_N >= 0) & (slot_N >= 0)).nonzero()[-1:]] = -1
        return found

    def pulled(rows: link_rows.Rows, how: link_rows.GetTry) -> None:
        get(rows, how)
        rows.y_TD[-1, -1] += 2**-10

    def words(copies: Any, pushes: bool, **how: int) -> None:
        copies.num_bytes -= 8
        copied(copies, pushes, **how)
        copies.num_bytes += 8

    copied = link._Copies._words
    link_rows.Rows._made_entries, link_rows.Rows.get, link._Copies._words = entries, pulled, words
    # Nothing is timed here.
    link._Meter.show = lambda *_, **__: 1.0
    link.run(bench)


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    assert multi_gpu.main([*ARGUMENTS, str(tmp_path), "--parts", "is_wrong"], {"is_wrong": is_wrong}) == 1
    faults = json.loads((tmp_path / "multi-gpu-is_wrong-2xcpu.json").read_text())["faults"]
    for rank in (0, 1):
        found = [fault.removeprefix(f"rank {rank}: ").split(": the sums")[0] for fault in faults]
        for kind in ("pull", "pull, nothing copied", *(f"push, order of {one}" for one in ("experts", "tokens"))):
            assert f"combine by {kind}, random, T 4 D 64" in found
        assert {f"get: {how}" for how in link._TRIES} <= set(found)
        assert {f"combine by push, {groups} groups, random, T 4 D 64" for groups in (4, 8)} <= set(found)
        for way in ("pull", "push"):
            assert f"kernel of words, 2 KiB, 4 warps, {way}: what came is not what was there" in found
        assert not any("descriptors" in fault or "engine" in fault for fault in found)
