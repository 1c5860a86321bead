"""Three steps in every layout and every way of summing, against one process: weights, gradients, moments, norms."""

from typing import Any

import pytest
import torch
from coterie_parallel import DENSE, AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan, replica_problems
from support.ranks import run_ranks
from torch import Tensor

from parallel.optimizer_cases import CASES, LAYOUTS, NUM_STEPS, PLACEMENTS, Case, Part, Runner, assemble, one_process

SAME_BITS = ("overlap", "no overlap", "into the forward")
"""Cases that differ from the first one in nothing but when collectives start and end."""


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
            if case.name in SAME_BITS:
                plain = assemble([result[expert, "plain"] for result in results], expert)
                for kind, tensors in plain.items():
                    for name, tensor in tensors.items():
                        assert torch.equal(found[kind][name], tensor), (case.name, expert, name)
            for result in of_ranks:
                assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6)
                assert result["norms"] == of_ranks[0]["norms"]
                assert result["step"] == NUM_STEPS


def _weights_seen(rank: int, world: int) -> list[list[Tensor]]:
    """Return the weight before a step, after it, in the next forward, and what a step without overlap gives."""
    found = []
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=30) as mesh:
        for covers_all in (True, False):
            parts = [Part({"a": torch.ones(200)}), Part({"b": torch.ones(200)})]
            named = dict(named for part in parts for named in part.named())
            placements = dict.fromkeys(named, DENSE)
            optimizer = Optimizer(named.items(), placements, mesh, AdamWConfig())  # both share one bucket
            optimizer.overlap_with_forward(parts if covers_all else parts[:1])
            for parameter in named.values():
                parameter.grad = torch.ones(200)
            optimizer.step(0.5)
            after = named["a"].detach().clone()
            parts[0](dict.fromkeys(named))
            found.append([after, named["a"].detach().clone(), named["b"].detach().clone()])
    return found


def test_weights_that_are_still_on_their_way_are_there_in_the_forward() -> None:
    new = torch.full((200,), 0.5)
    for rank, (deferred, awaited) in enumerate(run_ranks(_weights_seen, 2)):
        after, in_forward, other = deferred
        # "b" is the shard of rank 0 and "a" that of rank 1, so the step gave rank 1 alone the new "a".
        torch.testing.assert_close(after, torch.ones(200) if rank == 0 else new)
        torch.testing.assert_close(in_forward, new)
        torch.testing.assert_close(other, new)
        for one in awaited:
            torch.testing.assert_close(one, new)
