"""Buffers that were too small: the step is thrown away and computed again, and nothing tells it from one with room."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_parallel import (
    AdamWConfig,
    Dispatcher,
    DispatchOptions,
    Mesh,
    Optimizer,
    ParallelConfig,
    accumulate_in_fp32,
    make_plan,
)
from coterie_trainer.capacity import CapacityWatch
from coterie_trainer.config import TrainConfig, config_problems
from coterie_trainer.data.dataset import EvaluationBatches, TrainBatches, open_split
from coterie_trainer.initialization import initialize
from coterie_trainer.launch import StopRequest
from coterie_trainer.model import build_model, dispatchers, placements
from coterie_trainer.step import Stepper, evaluate
from coterie_trainer.training import Run
from support.ranks import run_ranks
from torch import Tensor

from trainer.specs import SPECS
from trainer.tiny import tiny_config, write_tokens

SPEC = replace(SPECS["shared_expert"], num_layers=3)
SMALL, ROOM = 0.5, 4.0  # with two choices and two ranks: the least that is allowed, and room for everything
NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    dispatcher: str = "rowwise"
    options: DispatchOptions = field(default_factory=DispatchOptions)
    dtype: torch.dtype = torch.float32
    bias_rule: str = "sign"
    scope: str = "step"
    evaluate_first: bool = False


def _rowwise(factor: float, **options: Any) -> Variant:
    own = {name: options.pop(name) for name in list(options) if name in ("overflow", "saved_rows", "overlap")}
    return Variant(options=DispatchOptions(capacity_factor=factor, **own), **options)


VARIANTS = {
    "all_to_all": Variant(dispatcher="all_to_all"),
    "room": _rowwise(ROOM),
    "small": _rowwise(SMALL),
    "small, lease": _rowwise(SMALL, saved_rows="lease"),
    "small, fetch": _rowwise(SMALL, saved_rows="fetch"),
    "exact": _rowwise(SMALL, overflow="exact"),
    "drop, with room": _rowwise(ROOM, overflow="drop"),
    "overlap": _rowwise(ROOM, overlap=True),
    "drop": _rowwise(SMALL, overflow="drop"),
    "room, evaluated first": _rowwise(ROOM, evaluate_first=True),
    "small, evaluated first": _rowwise(SMALL, evaluate_first=True),
    "room, bf16": _rowwise(ROOM, dtype=torch.bfloat16, bias_rule="quantile", scope="data_parallel"),
    "small, bf16": _rowwise(SMALL, dtype=torch.bfloat16, bias_rule="quantile", scope="data_parallel"),
}


def _train(variant: Variant, mesh: Mesh, tokens: Path) -> dict[str, Any]:
    torch.manual_seed(17 + mesh.rank)  # the routers' jitter draws from it
    model = build_model(
        SPEC,
        expert_axis=mesh.axis("expert"),
        dispatcher=variant.dispatcher,
        options=variant.options,
        dtype=variant.dtype,
    )
    initialize(model, seed=0, std=0.1)
    accumulate_in_fp32(model.parameters())
    train = TrainConfig(
        steps=NUM_STEPS,
        sequences_per_step=8,
        sequences_per_micro_batch=2,
        balance_coefficient=0.5,
        z_coefficient=0.1,
        bias_rule=variant.bias_rule,
        bias_rate=0.01,
        balance_scope=variant.scope,
    )
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig())
    stepper = Stepper(model, optimizer, mesh, train)
    for router in stepper.routers.values():
        router.config = replace(router.config, jitter=0.2)
    data = mesh.axis("data")
    where = dict(sequences_per_micro_batch=2, data_index=data.index, data_size=data.size)
    batches = TrainBatches(open_split(tokens, "train"), 16, sequences_per_step=8, seed=5, **where)
    held_out = EvaluationBatches(open_split(tokens, "held_out"), 16, limit=8, **where)

    def held_out_loss() -> float | None:
        return evaluate(model, held_out, mesh, capacity=stepper.capacity)

    losses = [held_out_loss()] if variant.evaluate_first else []
    in_evaluation = stepper.capacity.num_replays
    results = [stepper.run(batches.step(step), learning_rate=1e-2) for step in range(NUM_STEPS)]
    losses.append(held_out_loss())
    model.close()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state |= {f"optimizer {name}": tensor.clone() for name, tensor in optimizer.state_dict().items()}
    state |= {"load": stepper.load_LE, "random numbers": torch.get_rng_state()}
    watch = stepper.capacity
    return {
        "results": results,
        "held out": losses,
        "state": {name: tensor.view(torch.uint8).numpy() for name, tensor in state.items() if tensor.dim()},
        "notes": watch.take_notes(),
        "numbers": (watch.rows_needed_max, watch.rows_dropped, watch.num_replays),
        "replays in evaluation": in_evaluation,
    }


def _train_all(rank: int, world: int, tokens: Path, expert: int, names: list[str]) -> dict[str, dict[str, Any]]:
    with Mesh(make_plan(ParallelConfig(data=world, expert=expert), world), rank, timeout_s=30.0) as mesh:
        return {name: _train(VARIANTS[name], mesh, tokens) for name in names}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    tokens = write_tokens(tmp_path_factory.mktemp("tokens") / "tokens")
    return run_ranks(_train_all, 2, tokens, 2, list(VARIANTS), timeout_s=100.0)


def assert_same_bits(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["results"] == expected["results"]
    assert found["held out"] == expected["held out"]
    assert found["state"].keys() == expected["state"].keys()
    assert len(expected["state"]) > 30
    for name, values in expected["state"].items():
        assert (found["state"][name] == values).all(), name


@pytest.mark.parametrize("name", ["small", "small, lease", "small, fetch", "exact", "drop, with room", "overlap"])
def test_every_bit_is_that_of_a_run_with_room_and_of_all_to_all(trained: Any, name: str) -> None:
    for rank in trained:
        assert_same_bits(rank["all_to_all"], rank["room"])
        assert_same_bits(rank["room"], rank[name])


@pytest.mark.parametrize("name", ["bf16", "evaluated first"])
def test_main_gradients_quantiles_and_evaluations_are_not_disturbed(trained: Any, name: str) -> None:
    for rank in trained:
        assert rank[f"small, {name}"]["numbers"][2] >= 1
        assert_same_bits(rank[f"room, {name}"], rank[f"small, {name}"])
        assert (rank[f"small, {name}"]["replays in evaluation"] >= 1) == (name == "evaluated first")


def test_training_moves_and_jitter_is_drawn(trained: Any) -> None:
    results = trained[0]["room"]["results"]
    assert len({result.loss for result in results}) == NUM_STEPS
    start = torch.Generator().manual_seed(17).get_state()
    assert (trained[0]["room"]["state"]["random numbers"] != start.numpy()).any()


def test_growth_is_said_once_and_counted(trained: Any) -> None:
    for rank in trained:
        assert rank["room"]["notes"] == rank["exact"]["notes"] == rank["all_to_all"]["notes"] == []
        needed = rank["room"]["numbers"][0]
        assert needed > 32  # two choices of 2 * 16 tokens of each of two ranks, were they spread evenly, are 64
        assert rank["room"]["numbers"][1:] == (0, 0)
        assert rank["exact"]["numbers"] == (needed, 0, 0)
        assert rank["all_to_all"]["numbers"] == (0, 0, 0)
        for name in ("small", "small, lease", "small, fetch"):
            # Each step that found no room says so once, however many attempts it took; there are two layers.
            notes, replays = rank[name]["notes"], rank[name]["numbers"][2]
            assert len(notes) == len(set(notes))
            assert 1 <= len(notes) <= replays <= 2 * len(notes)
            assert all(note.startswith("row-wise buffers of") for note in notes)
            assert all(note.endswith("what did not fit was computed again") for note in notes)
            assert rank[name]["numbers"][:2] == (needed, 0)


def test_dropped_rows_are_counted_over_all_ranks(trained: Any) -> None:
    first, second = (rank["drop"] for rank in trained)
    assert first["numbers"] == second["numbers"]
    assert first["results"] == second["results"]
    assert first["results"] != trained[0]["room"]["results"]
    needed, dropped, replays = first["numbers"]
    assert replays == 0
    assert dropped > 0
    assert needed > 32


def test_an_overflow_in_one_of_two_expert_groups_is_replayed_by_all(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    names = ["room", "small"]
    for rank in run_ranks(_train_all, 4, tokens, 2, names, timeout_s=100.0):
        assert rank["small"]["numbers"][2] >= 1
        assert_same_bits(rank["room"], rank["small"])


class _Scripted(Dispatcher):
    """Reports the counters of a script, one entry for each attempt."""

    def __init__(self, script: list[dict[str, int]]) -> None:
        self.script = script
        self.calls: list[str] = []

    @classmethod
    def supports(cls, **sizes: int) -> str | None:
        return None

    def dispatch(self, *arguments: Tensor) -> Any:
        raise AssertionError

    def combine(self, *arguments: Any) -> Any:
        raise AssertionError

    def counters(self) -> dict[str, Tensor]:
        none = dict(rows_needed_max=0, overflowed=0, rows_dropped=0, ids_outside=0)
        return {name: torch.tensor(value) for name, value in (none | self.script.pop(0)).items()}

    def check(self) -> None:
        self.calls.append("check")

    def grow(self) -> str | None:
        self.calls.append("grow")
        return "grown"


def _watch(dispatcher: Dispatcher) -> CapacityWatch:
    mesh = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=5.0)
    return CapacityWatch([dispatcher], mesh, torch.device("cpu"))


def test_what_an_attempt_drew_and_dropped_is_forgotten_when_it_is_thrown_away() -> None:
    scripted = _Scripted(
        [
            dict(rows_needed_max=40, rows_dropped=5),
            dict(rows_needed_max=90, rows_dropped=7, overflowed=1),
            dict(rows_needed_max=60, rows_dropped=9),
        ]
    )
    watch = _watch(scripted)
    drawn = [watch.fit(lambda: (torch.rand(1).item(), torch.rand(1).item())) for _ in range(1)]
    assert (watch.rows_needed_max, watch.rows_dropped, watch.num_replays) == (40, 5, 0)
    state, attempts = torch.get_rng_state(), []
    watch.fit(lambda: attempts.append(torch.rand(1).item()))
    torch.set_rng_state(state)
    assert attempts == [torch.rand(1).item()] * 2
    assert attempts[0] not in drawn[0]
    assert (watch.rows_needed_max, watch.rows_dropped, watch.num_replays) == (60, 7, 1)
    assert scripted.calls == ["grow", "check", "check", "grow", "check"]  # the first says that somebody asks
    assert watch.take_notes() == ["grown; what did not fit was computed again"]
    assert watch.take_notes() == []


def test_ids_that_do_not_exist_stop_the_run() -> None:
    with pytest.raises(ValueError, match="do not exist were given to the dispatcher: rank 0 3"):
        _watch(_Scripted([dict(ids_outside=3)])).fit(lambda: None)


def _run_all(rank: int, world: int, folder: Path, tokens: Path, variants: dict[str, dict[str, Any]]) -> list[str]:
    shown = []
    for name, changes in variants.items():
        parallel = dict(parallel__data=world, parallel__expert=world, parallel__dispatcher="rowwise")
        config = tiny_config(folder / name, tokens, **parallel, **changes)
        assert config_problems(config, world) == []
        output = io.StringIO()
        with Mesh(make_plan(config.parallel, world), rank, timeout_s=30.0) as mesh, redirect_stdout(output):
            run = Run(config, mesh, torch.device("cpu"))
            run.loop(StopRequest())
            run.close()
        assert all(one.counters() == {} for one in dispatchers(run.model))
        shown.append(output.getvalue())
    return shown


def test_a_run_shows_its_growth_once_and_records_the_load(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    variants: dict[str, dict[str, Any]] = {
        "room": dict(parallel__capacity_factor=ROOM),
        "small": dict(parallel__capacity_factor=SMALL),
        "drop": dict(parallel__capacity_factor=SMALL, parallel__overflow="drop"),
    }
    for changes in variants.values():
        changes |= dict(train__steps=3, train__evaluate_every=2, train__evaluate_sequences=4)
    shown = dict(zip(variants, run_ranks(_run_all, 2, tmp_path, tokens, variants)[0], strict=True))
    records = {}
    for name in variants:
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records[name] = [json.loads(line) for line in lines]
    assert shown["small"].count("row-wise buffers of") == 1
    assert shown["room"].count("row-wise buffers of") == 0
    assert "rows dropped" not in shown["small"] + shown["room"]
    assert [one["loss"] for one in records["small"]] == [one["loss"] for one in records["room"]]
    last = {name: [one for one in found if one["kind"] == "step"][-1] for name, found in records.items()}
    assert last["small"]["rows_needed_max"] == last["room"]["rows_needed_max"] > 64
    assert (last["small"]["rows_dropped"], last["room"]["replays"]) == (0, 0)
    assert last["small"]["replays"] >= 1
    assert last["drop"]["rows_dropped"] > 0
    assert f"rows dropped so far {last['drop']['rows_dropped']:,}" in shown["drop"]
