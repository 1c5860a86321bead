"""Dry runs of the scripts that measure the training step on a GPU, in a tiny case on the CPU."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function that imports a script of this folder as it is when it runs by itself."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def imported(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield imported
    for name in ("step_cases", "gpu_step", "gpu_parts"):
        sys.modules.pop(name, None)


def _run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, "--tiny", "--device", "cpu", *arguments])
    module.main()


def _rows(file: Path) -> list[dict[str, object]]:
    return json.loads(file.read_text(encoding="utf-8"))["rows"]


def test_the_step(script, monkeypatch, tmp_path: Path, capsys) -> None:
    module, file, parts = script("gpu_step"), tmp_path / "step.json", tmp_path / "parts.json"
    arguments = ("--profile", "--steps", "1", "--documents", "packed", "--recompute", "attention", "--json", str(file))
    _run(module, monkeypatch, *arguments, "--cross-entropy", "chunked", "--sync-check")
    (row,) = _rows(file)
    assert row["tokens_per_step"] == 128
    assert row["tokens_per_s"] == pytest.approx(128e3 / row["step_ms"])
    found = row["profile_ms"]
    for part in ("experts", "router", "attention projections", "cross-entropy", "norms and residual sums"):
        assert found[part] > 0
        assert found[part + ", backward"] > 0
    assert found["optimizer"] > 0
    # Nearly nothing is left over: parts are found through the whole backward.
    assert found["rest"] + found["rest, backward"] < 0.2 * sum(found.values())
    assert "experts, backward" in capsys.readouterr().out

    parts.write_text(json.dumps({"rows": [{"name": "step of tiny", "sum_of_parts_ms": row["step_ms"] / 1.1}]}))
    options = module.parse(["--tiny", "--parts", str(parts)])
    assert module.faults(row, options) == ["1.100 of the sum of the parts is above 1.05"]
    parts.write_text(json.dumps({"rows": [{"name": "step of tiny", "sum_of_parts_ms": row["step_ms"] / 1.04}]}))
    assert module.faults(row, options) == []
    waiting = row | {"host_waits": ["step.py:1 in run: x.item()"]}
    assert module.faults(waiting, module.parse(["--tiny"])) == ["the host waits at step.py:1 in run: x.item()"]


def test_the_parts(script, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    _run(script("gpu_parts"), monkeypatch, "--json", str(file))
    rows = {row["name"]: row for row in _rows(file)}
    layers = (
        "layer: norm, attention, residual sum",
        "layer: norm and residual sum around the MoE block",
        "layer: MoE block",
    )
    ends = ("final norm and cross-entropy", "embedding")
    total = 2 * (2 * sum(rows[name]["ms"] for name in layers) + sum(rows[name]["ms"] for name in ends))
    total += rows["optimizer: zero, norm, clip, update"]["ms"]
    assert rows["step of tiny"]["sum_of_parts_ms"] == pytest.approx(total)
    assert {"attention, causal, whole", "cross-entropy, torch", "cross-entropy, chunks of 4096"} <= rows.keys()
    assert not [row for row in rows.values() if "cannot" in row]


def test_flops_are_those_that_the_figures_of_olmo_core_were_computed_with(script) -> None:
    cases = script("step_cases").CASES
    # Its tokens/s and model TFLOP/s, to the digits that are given.
    for name, tflops in (("olmo8", 244.5), ("sweep-e8", 446.6), ("sweep-e128", 340.0)):
        case = cases[name]
        assert case.olmo_core * case.model_flops_per_token() / 1e12 == pytest.approx(tflops, abs=0.3)
        assert case.tokens * case.micro_batches == (524_288 if name.startswith("sweep") else 32_768)


def test_a_part_that_does_not_end_is_stopped(script) -> None:
    def loop() -> None:
        with script("step_cases").limited(1, "looping"):
            while True:
                torch.ones(1).add_(1)

    with pytest.raises(TimeoutError, match="looping took more than 1 s"):
        loop()
