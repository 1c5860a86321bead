"""A dry run of `tests/multi_gpu.py --parts link`: without kernels, and with those that Triton's interpreter runs."""

import json
from pathlib import Path

import multi_gpu
from support.interpreted import needs_triton, run_interpreted


def test_a_cpu_has_copies_only(tmp_path: Path) -> None:
    assert multi_gpu.main(["--tiny", "--device", "cpu", "--json", str(tmp_path), "--parts", "link"]) == 0
    rows = json.loads((tmp_path / "multi-gpu-link-2xcpu.json").read_text())["rows"]
    ways = [f"copy engine, {way} a peer, {ways}" for way in ("to", "from") for ways in ("one way", "both ways")]
    assert [row["name"] for row in rows] == [*ways, "kernels"]
    for row in rows[:-1]:
        assert row["gbps"] * row["us"] * 1e3 > 0
        assert "expected_us" not in row
    assert "skipped" in rows[-1]


def test_it_is_not_run_unless_asked_for() -> None:
    assert "link" not in multi_gpu.DEFAULT_PARTS
    assert {"link", *multi_gpu.DEFAULT_PARTS} == set(multi_gpu.LIMITS_S)


@needs_triton
def test_the_kernels() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_multi_gpu_link.py"))
