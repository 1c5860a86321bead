"""The checks that gpu_optimizer.py runs on a GPU, here on the CPU: they pass, and they see what is broken."""

from typing import Any

import pytest
import torch
from coterie_parallel import MuonConfig
from coterie_parallel.gradients import Bucket
from coterie_parallel.optimizer import adamw, muon
from coterie_parallel.optimizer.optimizer import Optimizer
from support.ranks import run_ranks
from torch import Tensor

from parallel.optimizer_checks import MUON_SHAPES, all_checks, check_muon, faults_of
from parallel.sharded_ranks import check_sharded_ranks

CPU = torch.device("cpu")
SHAPES = {"layer.experts.up": (3, 40, 30), "norm.weight": (70,), "embed.weight": (90, 7)}


def test_all_checks_pass(capsys: pytest.CaptureFixture[str]) -> None:
    checks = all_checks(SHAPES, CPU)
    assert faults_of(checks) == []
    assert capsys.readouterr().out.count(": right\n") == len(checks)


def test_sharded_ranks_on_a_cpu() -> None:
    assert check_sharded_ranks("cpu", run_ranks) == []


def _weight_off(step: adamw.AdamWStep, state: Any, *rest: Any) -> None:
    UPDATE(step, state, *rest)
    for main in state.main.values():
        main.mul_(1 + 2.0**-21)


def _moment_off(step: adamw.AdamWStep, state: Any, *rest: Any) -> None:
    """Round the moments up where they were rounded down, and down where up."""
    UPDATE(step, state, *rest)
    for moment in state.moments["exp_avg"].values():
        moment.copy_((moment.view(torch.int16) + 1).view(torch.bfloat16))


def _never_skips(step: adamw.AdamWStep, state: Any, *rest: Any) -> None:
    step._is_skipped = torch.zeros_like(step._is_skipped)
    UPDATE(step, state, *rest)


def _never_clips(step: adamw.AdamWStep, state: Any, *rest: Any) -> None:
    step._divisor = torch.ones_like(step._divisor)
    UPDATE(step, state, *rest)


UPDATE = adamw.AdamWStep._update_by_torch
LOAD = Optimizer.load_state_dict
MOVE = Bucket.move_to


def _forgets_the_step(optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    LOAD(optimizer, state | {"step": torch.zeros_like(state["step"])})


def _forgets_a_gradient(bucket: Bucket, flat: Tensor) -> None:
    next(iter(bucket.parameters.values())).grad = None
    MOVE(bucket, flat)


BROKEN = {
    "weights": (adamw.AdamWStep, "_update_by_torch", _weight_off, ["AdamW, bf16", "AdamW, fp32"]),
    "moments": (adamw.AdamWStep, "_update_by_torch", _moment_off, ["AdamW, bf16, bf16 moments"]),
    "skipped": (adamw.AdamWStep, "_update_by_torch", _never_skips, ["skipped, bf16", "skipped, fp32"]),
    "clip": (adamw.AdamWStep, "_update_by_torch", _never_clips, ["AdamW, bf16", "AdamW, fp32"]),
    "state": (Optimizer, "load_state_dict", _forgets_the_step, ["continued, bf16", "continued, fp32"]),
    "Muon": (muon, "_COEFFICIENTS", (3.4445, -4.7750, 2.0310), ["Muon"]),
    "sharded": (Bucket, "move_to", _forgets_a_gradient, ["sharded gradients"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_sees_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, broken, seen_by = BROKEN[name]
    monkeypatch.setattr(target, attribute, broken)
    checks = all_checks(SHAPES, CPU)
    assert all(faults_of({one: checks[one]}) for one in seen_by)


def test_muon_in_bf16_where_fp32_was_asked_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MuonConfig, "iteration_dtype", lambda config, dtype: torch.bfloat16)
    assert any("in fp32 off by" in fault for fault in check_muon(MUON_SHAPES, CPU))
