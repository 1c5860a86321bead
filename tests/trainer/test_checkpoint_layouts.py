"""Optimizer state does not depend on the layout: written in one, read in another, bit for bit, and the run goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_parallel import Mesh, ParallelConfig, make_plan
from coterie_trainer.checkpoint import CheckpointError, Checkpoints, global_tensors, read_tensors
from parallel.optimizer_cases import CASES, NUM_STEPS, PLACEMENTS, Runner, assemble, one_process
from support.ranks import run_ranks

USED = {case.name: case for case in CASES if case.name in ("overlap", "muon sharded bf16")}
WRITTEN = (4, 2)
READ = {1: 1, 2: 1, 4: 4}
"""Expert degree by number of ranks; the layout that wrote reads too."""
HALF = 1
"""The checkpoint is written after this many of the three steps."""


def _tensors(runner: Runner) -> dict[str, Any]:
    local = {f"model/{name}": parameter.detach() for name, parameter in runner.named.items()}
    expert = runner.mesh.axis("expert")
    return global_tensors(local, PLACEMENTS, expert) | runner.optimizer.global_state()


def _write(mesh: Mesh, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, case in USED.items():
        runner = Runner(case, mesh)
        for step in range(HALF):
            runner.step(step)
        runner.optimizer.wait_for_weights()
        Checkpoints(Path(folder) / name, mesh.axis("world")).save(HALF, _tensors(runner))
        found[name] = {"saved": runner.result()}
        for step in range(HALF, NUM_STEPS):
            runner.step(step)
        found[name]["end"] = runner.result()
    return found


def _read(mesh: Mesh, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, case in USED.items():
        runner = Runner(case, mesh)
        with torch.no_grad():
            for parameter in runner.named.values():
                parameter.fill_(7.0)
        tensors = _tensors(runner)
        Checkpoints(Path(folder) / name, mesh.axis("world")).load(HALF, tensors)
        runner.optimizer.load_state_dict(runner.optimizer.state_dict())
        found[name] = {"loaded": runner.result()}
        for step in range(HALF, NUM_STEPS):
            runner.step(step)
        found[name]["end"] = runner.result()
    return found


def _on_ranks(rank: int, world: int, expert: int, folder: str) -> dict[str, dict[str, dict[str, Any]]]:
    found = {}
    with Mesh(make_plan(ParallelConfig(expert=expert), world), rank, timeout_s=30) as mesh:
        if (world, expert) == WRITTEN:
            found["written"] = _write(mesh, folder)
        found["read"] = _read(mesh, folder)
    return found


def _states(results: list[dict[str, Any]], run: str, name: str, moment: str, *, expert: int) -> Any:
    return assemble([result[run][name][moment] for result in results], expert)


def test_state_of_four_ranks_is_read_bit_for_bit_in_every_layout_and_the_run_goes_on(tmp_path: Path) -> None:
    world, expert = WRITTEN
    written = run_ranks(_on_ranks, world, expert, str(tmp_path))
    others = {
        size: run_ranks(_on_ranks, size, degree, str(tmp_path))
        if size > 1
        else [{"read": _read(one_process(), str(tmp_path))}]
        for size, degree in READ.items()
    }
    for name, case in USED.items():
        saved = _states(written, "written", name, "saved", expert=expert)
        ended = _states(written, "written", name, "end", expert=expert)
        # The same layout: all bits of the run that was never broken.
        again = _states(written, "read", name, "end", expert=expert)
        for kind, tensors in ended.items():
            for one, tensor in tensors.items():
                assert torch.equal(again[kind][one], tensor), (name, kind, one)
        # A plain reader finds the state of all experts under the global name.
        moment = "momentum" if case.config.muon else "exp_avg"
        whole = read_tensors(Checkpoints(tmp_path / name).path(HALF), f"{moment}/")["block.experts.up"]
        assert torch.equal(whole, saved["state"][f"{moment}/block.experts.up"])
        assert float(whole.view(8, -1).abs().amax(dim=1).min()) > 0
        for size, degree in READ.items():
            loaded = _states(others[size], "read", name, "loaded", expert=degree)
            end = _states(others[size], "read", name, "end", expert=degree)
            for kind, tensors in ended.items():
                for one, tensor in tensors.items():
                    what = (size, degree, name, one)
                    assert kind == "gradients" or torch.equal(loaded[kind][one], saved[kind][one]), what
                    limit = 2.0**-8 if tensor.dtype == torch.bfloat16 else 1e-4 if case.config.muon else 1e-6
                    difference = float((end[kind][one].double() - tensor.double()).abs().max())
                    assert difference <= limit * float(tensor.abs().max()), what


def test_state_of_another_size_or_name_is_refused(tmp_path: Path) -> None:
    runner = Runner(USED["overlap"], one_process())
    tensors = _tensors(runner)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {name: tensor for name, tensor in tensors.items() if name != "exp_avg/norm.weight"})
    with pytest.raises(CheckpointError, match=r"exp_avg/norm\.weight is not in the checkpoint"):
        checkpoints.load(1, tensors)
    other = Runner(USED["muon sharded bf16"], one_process()).optimizer.global_state()
    with pytest.raises(CheckpointError, match=r"momentum/.* is not in the checkpoint"):
        checkpoints.load(1, other)
