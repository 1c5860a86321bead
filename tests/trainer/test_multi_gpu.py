"""A dry run of `tests/multi_gpu.py` on two CPU ranks; and what it does with parts that fail, die, or do not end."""

import json
import math
import os
import sys
import time
from pathlib import Path
from subprocess import run
from typing import Any

import multi_gpu
import pytest
from coterie_trainer.verify import running
from multi_gpu_parts import dispatch, layouts, steps
from multi_gpu_parts.bench import Bench

from trainer.step_cases import CASES

SCRIPT = Path(multi_gpu.__file__)
PARTS = tuple(multi_gpu.DEFAULT_PARTS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run every part once, as a user does, and return what was written, by part."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--json", str(folder), "--commit", "abc"]
    # Sources are found by the script itself.
    found = run([*command, "--limit", "200"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "7 of 7 parts right" in found.stdout
    return {part: json.loads((folder / f"multi-gpu-{part}-2xcpu.json").read_text()) for part in PARTS}


def rows(file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    by_name = {row["name"]: row for row in file["rows"]}
    assert len(by_name) == len(file["rows"])
    return by_name


def test_every_file_says_where_and_when(files: dict[str, dict[str, Any]]) -> None:
    for part, file in files.items():
        assert file["part"] == part
        assert (file["commit"], file["ranks"], file["device"], file["faults"]) == ("abc", 2, "cpu", [])
        assert {"date", "torch", "python", "seconds"} <= file.keys()


def test_layouts_and_the_suite(files: dict[str, dict[str, Any]]) -> None:
    found = rows(files["layouts"])
    assert found["layouts, float32"]["layouts"] == 2
    assert found["layouts, float32"]["wrong"] == found["layouts, bfloat16"]["wrong"] == 0
    row = found["float32, data=2 expert=2 dispatcher=rowwise"]
    assert 0 < row["largest_differences"]["gradients"] < 1e-5
    row = found["bfloat16, data=2 expert=2 dispatcher=rowwise"]
    assert 1e-6 < row["loss_difference"] < 2**-8
    suite = rows(files["conformance"])
    assert "DeepEP" in suite.pop("deep_ep")["skipped"]
    assert {(row["cases"], row["wrong"]) for row in suite.values()} == {(2, 0)}
    assert {"all_to_all", "rowwise", "rowwise, lease", "rowwise, fetch"} <= suite.keys()


def test_dispatch_counts_the_bytes_of_the_busiest_rank(files: dict[str, dict[str, Any]]) -> None:
    found = rows(files["dispatch"])
    link = found["link: copy to and from a peer"]
    shape = "T 64 D 32 K 2 E 8"
    for dispatcher in ("all_to_all", "rowwise"):
        row = found[f"{dispatcher}, balanced, {shape}"]
        # Half of all pairs go to the other rank.
        assert row["busiest_bytes"] == 64 * 2 // 2 * 32 * 4
        assert row["dispatch_gbps"] == pytest.approx(row["busiest_bytes"] / row["dispatch_us"] / 1e3)
        share = row["dispatch_gbps"] / max(link["gbps_to"], link["gbps_from"])
        assert row["dispatch_share_of_link"] == pytest.approx(share)
        assert row["pass_gbps"] == pytest.approx(4 * row["busiest_bytes"] / row["pass_us"] / 1e3)
        assert ("combine_in_place_us" in row) == ("pass_in_place_us" in row) == (dispatcher == "rowwise")
        assert found[f"{dispatcher}, Zipf, {shape}"]["busiest_bytes"] > row["busiest_bytes"]
    ratio = found[f"rowwise, Zipf, {shape}"]["combine_us"] / found[f"all_to_all, Zipf, {shape}"]["combine_us"]
    assert found[f"rowwise, Zipf, {shape}"]["combine_over_all_to_all"] == pytest.approx(ratio)


def test_steps(files: dict[str, dict[str, Any]]) -> None:
    sweep = rows(files["sweep"])
    few, many = sweep["E 8"], sweep["E 16"]
    for row in (few, many):
        # Two sequences of 32 tokens in each of two micro-batches of each rank.
        assert row["tokens_per_s_per_gpu"] == pytest.approx(128 / row["step_ms"] * 1e3)
        assert 0 < row["optimizer_ms"] < row["step_ms"]
        assert row["rows_needed_max"] > 128 * 2 / 4
    fall = sweep["fall from 8 to 16 experts, whole steps"]["fall"]
    assert fall == pytest.approx(1 - few["step_ms"] / many["step_ms"])
    fsdp = rows(files["fsdp"])
    assert fsdp["fsdp"]["first_loss"] == pytest.approx(fsdp["resident"]["first_loss"], rel=1e-6)
    ratio = fsdp["fsdp"]["step_ms"] / fsdp["resident"]["step_ms"]
    assert fsdp["resident over fsdp"]["ratio"] == pytest.approx(ratio)
    overlap = list(rows(files["overlap"]).values())
    assert len({row["first_loss"] for row in overlap}) == 1
    copied, leased = overlap[0], overlap[1]
    assert leased["peer_gib"] > copied["peer_gib"] > 0
    pipeline = rows(files["pipeline"])
    assert {name.split(",")[0] for name in pipeline} == {"1f1b", "zbv", "dualpipev"}
    for row in pipeline.values():
        # All tokens go through both ranks.
        assert row["tokens_per_s_per_gpu"] == pytest.approx(4 * 32 / 2 / row["step_ms"] * 1e3)
        assert row["losses"][-1] < row["first_loss"]


def fails_on_one_rank(bench: Bench) -> None:
    bench.row(name="before the fault", value=os.getpid())
    bench.barrier()
    if bench.rank == 1:
        raise ValueError("the planted fault")
    bench.barrier()


def attempts(bench: Bench) -> None:
    def fail() -> None:
        raise ValueError("the planted fault")

    assert bench.attempt("the first try", fail) is None
    assert bench.attempt("the second try", lambda: bench.rank) == bench.rank
    bench.row(name="still together", value=len(bench.gather(1)))
    bench.attempt("the third try", fail if bench.rank == 1 else lambda: None)
    bench.row(name="never reached")


def finds_faults(bench: Bench) -> None:
    bench.fault(f"fault of {bench.rank}")
    bench.say("said to the end")


def dies(bench: Bench) -> None:
    bench.barrier()
    if bench.rank == 1:
        os._exit(3)
    bench.barrier()


def does_not_end(bench: Bench) -> None:
    time.sleep(100)


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path, capfd, monkeypatch) -> None:
    parts = {one.__name__: one for one in (fails_on_one_rank, attempts, finds_faults, dies, does_not_end)}
    monkeypatch.setitem(multi_gpu.LIMITS_S, "does_not_end", 3)
    arguments = ["--tiny", "--device", "cpu", "--json", str(tmp_path), "--parts"]
    assert multi_gpu.main([*arguments, ",".join(parts)], parts) == 1
    said = capfd.readouterr().out
    found = {part: json.loads((tmp_path / f"multi-gpu-{part}-2xcpu.json").read_text()) for part in parts}
    # What came before is kept, and the rank that waited for the other one is gone.
    (row,) = found["fails_on_one_rank"]["rows"]
    with pytest.raises(ProcessLookupError):
        os.kill(row["value"], 0)
    (fault,) = found["fails_on_one_rank"]["faults"]
    assert fault.startswith("rank 1 raised:")
    assert "ValueError: the planted fault" in fault
    assert found["attempts"]["rows"] == [{"name": "still together", "value": 2}]
    tries = [fault.split(" raised")[0] for fault in found["attempts"]["faults"]]
    assert sorted(tries[:2]) == ["rank 0: the first try", "rank 1: the first try"]
    assert tries[2] == "rank 1: the third try"
    assert "raised on some ranks only" in found["attempts"]["faults"][3]
    assert sorted(found["finds_faults"]["faults"]) == ["rank 0: fault of 0", "rank 1: fault of 1"]
    assert "said to the end" in said
    assert found["dies"]["faults"][0].startswith("rank 1 died")
    assert found["does_not_end"]["faults"] == ["not done within 3 s: rank 0, 1"]
    assert "0 of 5 parts right" in said
    assert multi_gpu.main([*arguments, "finds_faults", "--limit", "0"], parts) == 1
    assert "not run: the time of --limit is over" in capfd.readouterr().out


def differs(bench: Bench) -> None:
    """Run the layouts with a gradient that is not summed over the ranks of one layout."""
    kept = running._kept_reductions

    def doubled(trained: Any) -> Any:
        found = kept(trained)
        reduce = trained.optimizer.reducer.reduce

        def wrong() -> Any:
            pieces = reduce()
            for part in found[-1].values() if trained.mesh.plan.world > 1 else ():
                getattr(part, "tensor", part).mul_(1.001)
            return pieces

        trained.optimizer.reducer.reduce = wrong
        return found

    running._kept_reductions = doubled
    layouts.run(bench)


def test_a_layout_with_another_gradient_is_found(tmp_path: Path) -> None:
    arguments = ["--tiny", "--device", "cpu", "--json", str(tmp_path), "--parts", "differs"]
    assert multi_gpu.main(arguments, {"differs": differs}) == 1
    file = json.loads((tmp_path / "multi-gpu-differs-2xcpu.json").read_text())
    assert rows(file)["layouts, float32"]["wrong"] == 2
    assert "gradient of" in file["faults"][0]


def adds_wrong(bench: Bench) -> None:
    """Compare dispatchers of which one adds up a little too much."""
    make = dispatch.make_dispatcher

    def made(name: str, **how: Any) -> Any:
        found = make(name, **how)
        if name == "rowwise":
            combine = found.combine
            found.combine = lambda *arguments: combine(*arguments) * 1.0001
        return found

    dispatch.make_dispatcher = made
    dispatch.run(bench)


def test_a_dispatcher_with_other_sums_is_found(tmp_path: Path) -> None:
    arguments = ["--tiny", "--device", "cpu", "--json", str(tmp_path), "--parts", "adds_wrong"]
    assert multi_gpu.main(arguments, {"adds_wrong": adds_wrong}) == 1
    faults = json.loads((tmp_path / "multi-gpu-adds_wrong-2xcpu.json").read_text())["faults"]
    assert len(faults) == 2 * 2 * 3 * 3  # ranks, rows copied and written in place, loads, outputs and both gradients
    assert "outputs differ from those of all_to_all, relative 1.0e-04" in faults[0]


def test_an_unknown_part_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        multi_gpu.main(["--parts", "layouts,speed"])
    assert "--parts (speed) must be of layouts, conformance" in capsys.readouterr().err


def test_the_memory_formula() -> None:
    case = CASES["olmo8"]
    text, gib = steps.memory_formula(case, 8, capacity_factor=1.0, moment_bytes=4)
    routed = 8 * 64 * 3 * 2048 * 1024
    dense = sum(math.prod(shape) for name, shape in case.spec.tensor_shapes().items() if ".experts." not in name)
    rows_of_a_buffer = 4 * 4096 * 8
    kept = 2 * 8 * (rows_of_a_buffer * (2048 + 3 * 1024) + 4 * 4096 * 14 * 2048) + 6 * rows_of_a_buffer * 2048
    # Norms are not counted.
    assert gib == pytest.approx((routed / 8 * 18 + dense * (6 + 12 / 8) + kept) / 2**30, rel=1e-3)
    assert text.startswith("bytes of a rank = 18 R / N + (6 + 12 / N) W")
