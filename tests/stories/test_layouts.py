"""The loop, evaluations included, in two layouts: 20 steps of the demo's model on real text, against one process.

`tests/layouts` compares every gradient in many more layouts; here are the data, the schedule and what is reported.
"""

import json
from pathlib import Path

import pytest
import torch
from coterie_parallel import Mesh, make_plan
from coterie_trainer.config import load_config
from coterie_trainer.launch import StopRequest
from coterie_trainer.training import Run
from support.ranks import run_ranks

from stories.conftest import CONFIG

LAYOUTS = {
    "data 2": (2, []),
    "data 4, expert 2": (4, ["parallel.expert=2"]),
    # The first stage has the layer without experts alone; expert traffic and that between stages run side by side.
    "pipeline 2, expert 2": (4, ["parallel.pipeline=2", "parallel.expert=2", "parallel.layers_per_stage=[1,3]"]),
    "pipeline 2, zbv": (2, ["parallel.pipeline=2", 'parallel.pipeline_schedule="zbv"']),
    # Buffers of some stage are too small at first: all stages run the step again.
    "pipeline 2, rowwise": (
        4,
        ["parallel.pipeline=2", "parallel.expert=2", 'parallel.dispatcher="rowwise"', "parallel.capacity_factor=0.6"],
    ),
}
NUMBERS = ("loss", "balance_loss", "z_loss", "gradient_norm", "load_imbalance", "tokens")


class StopAfter:
    """Asks for the end of a run after one of its steps."""

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step = run, step

    @property
    def requested(self) -> bool:
        return self._run.step + 1 >= self._step


def train_rank(
    rank: int, world: int, overrides: list[str], folder: str, last: int | None = None, steps_ahead: int = 0
) -> None:
    config = load_config(CONFIG, [*overrides, f"run_folder={folder!r}"], world)
    with Mesh(make_plan(config.parallel, world), rank, timeout_s=60.0) as mesh:
        run = Run(config, mesh, torch.device("cpu"))
        run.steps_ahead = steps_ahead
        run.loop(StopRequest() if last is None else StopAfter(run, last))


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, small_demo: list[str]) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("one")
    run_ranks(train_rank, 1, [*small_demo, "parallel.data=1", "parallel.expert=1"], str(folder), timeout_s=120.0)
    found = records(folder)
    steps = [record for record in found if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_twenty_steps_are_those_of_one_process(
    tmp_path: Path, small_demo: list[str], one_process: list[dict[str, float]], name: str
) -> None:
    world, layout = LAYOUTS[name]
    overrides = [*small_demo, "parallel.data=-1", "parallel.expert=1", *layout]
    run_ranks(train_rank, world, overrides, str(tmp_path), timeout_s=120.0)
    assert_same(one_process, records(tmp_path))
    replays = [record.get("replays", 0) for record in records(tmp_path)]
    assert max(replays) > 0 if "rowwise" in name else max(replays) == 0


def test_numbers_that_are_read_a_step_later_are_the_same_also_in_a_run_that_is_stopped(
    tmp_path: Path, small_demo: list[str], one_process: list[dict[str, float]]
) -> None:
    overrides = [*small_demo, "parallel.data=1", "parallel.expert=1"]
    # Asked in step 7, which is known when step 8 is under way: that one ends too.
    run_ranks(train_rank, 1, overrides, str(tmp_path), 7, 1, timeout_s=120.0)
    assert [record["step"] for record in records(tmp_path) if record["kind"] == "step"] == list(range(1, 9))
    run_ranks(train_rank, 1, overrides, str(tmp_path), None, 1, timeout_s=120.0)
    assert_same(one_process, records(tmp_path))


def test_a_checkpoint_of_a_pipeline_goes_on_in_other_pipelines_and_without_one(
    tmp_path: Path, small_demo: list[str], one_process: list[dict[str, float]]
) -> None:
    for name, last in (("pipeline 2, expert 2", 7), ("pipeline 2, zbv", 13), ("one process", None)):
        world, layout = LAYOUTS.get(name, (1, []))
        overrides = [*small_demo, "parallel.data=-1", "parallel.expert=1", *layout]
        run_ranks(train_rank, world, overrides, str(tmp_path), last, timeout_s=120.0)
    assert_same(one_process, records(tmp_path))


def assert_same(expected_records: list[dict[str, float]], found: list[dict[str, float]]) -> None:
    assert len(found) == len(expected_records)
    for expected, record in zip(expected_records, found, strict=True):
        assert record["kind"] == expected["kind"]
        for name in NUMBERS if record["kind"] == "step" else ("loss", "bits_per_byte"):
            assert record[name] == pytest.approx(expected[name], rel=1e-5), (record["step"], name)


def test_the_local_dispatcher_gives_the_same_bits(
    tmp_path: Path, small_demo: list[str], one_process: list[dict[str, float]]
) -> None:
    layout = ["parallel.data=1", "parallel.expert=1", 'parallel.dispatcher="local"']
    run_ranks(train_rank, 1, [*small_demo, *layout], str(tmp_path), timeout_s=120.0)
    for expected, record in zip(one_process, records(tmp_path), strict=True):
        assert record["loss"] == expected["loss"]
