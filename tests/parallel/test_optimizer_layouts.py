"""Three steps in every layout and every way of summing, against one process: weights, gradients, moments, norms."""

from typing import Any

import pytest
import torch
from coterie_parallel import Mesh, ParallelConfig, make_plan, replica_problems
from support.ranks import run_ranks
from torch import Tensor

from parallel.optimizer_cases import CASES, LAYOUTS, NUM_STEPS, PLACEMENTS, Case, Runner, assemble, one_process


def _all_cases(rank: int, world: int) -> dict[tuple[int, str], dict[str, Any]]:
    found = {}
    for expert in LAYOUTS[world]:
        with Mesh(make_plan(ParallelConfig(expert=expert), world), rank, timeout_s=30) as mesh:
            for case in CASES:
                runner = Runner(case, mesh)
                for step in range(NUM_STEPS):
                    runner.step(step)
                    runner.optimizer.wait_for_weights()
                    assert replica_problems(runner.named.items(), PLACEMENTS, mesh) == []  # P14
                found[expert, case.name] = runner.result()
    return found


def _expected(case: Case) -> dict[str, Any]:
    runner = Runner(case, one_process())
    for step in range(NUM_STEPS):
        runner.step(step)
    return runner.result()


def _assert_close(found: Tensor, expected: Tensor, tolerance: float, what: tuple[object, ...]) -> None:
    assert found.numel() == expected.numel(), what
    difference = float((found.flatten().double() - expected.flatten().double()).abs().max())
    assert difference <= tolerance * float(expected.abs().max()), (*what, difference)


def _tolerance(case: Case, kind: str, name: str) -> float:
    if kind == "weights" and case.dtype == torch.bfloat16:
        return 2.0**-8  # one step of bf16, where the two sides of a rounding are chosen differently
    # The iteration of Muon multiplies what differs in small singular values by up to 3.4445^5 = 485.
    is_muon = case.config.muon is not None and kind in ("weights", "state") and not name.startswith("exp_avg")
    return 1e-4 if is_muon else 1e-6


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_equals_one_process(world: int) -> None:
    results = run_ranks(_all_cases, world)
    for case in CASES:
        expected = _expected(case)
        whole = assemble([expected], 1)
        assert all(
            float(value.abs().max()) > 1e-3 for name, value in whole["gradients"].items() if "unused" not in name
        )
        for expert in LAYOUTS[world]:
            of_ranks = [result[expert, case.name] for result in results]
            found = assemble(of_ranks, expert)
            for kind, tensors in whole.items():
                assert tensors.keys() == found[kind].keys()
                for name, tensor in tensors.items():
                    _assert_close(found[kind][name], tensor, _tolerance(case, kind, name), (case.name, expert, name))
            for result in of_ranks:
                assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6)
                assert result["norms"] == of_ranks[0]["norms"]
                assert result["step"] == NUM_STEPS


def _gradients_of(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    return {name: result["gradients"] for (expert, name), result in _all_cases(rank, world).items() if expert == 2}
