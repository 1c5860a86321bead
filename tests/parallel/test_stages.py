"""Which rank has which layers, what is refused, and what a schedule costs at best."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coterie_parallel import ParallelConfig, Stages, make_stages, stage_problems
from coterie_parallel.pipeline import stages as stages_module
from coterie_parallel.pipeline.ideal import ideal_bubble, most_in_flight
from coterie_parallel.pipeline.stages import SCHEDULES, micro_batch_problems, num_stages_per_rank, spread_layers
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping


def stages_of(schedule: str, pipeline: int, num_layers: int, **settings: Any) -> Stages:
    return make_stages(ParallelConfig(pipeline=pipeline, pipeline_schedule=schedule, **settings), num_layers)


def layers_by_rank(stages: Stages) -> list[list[list[int]]]:
    return [[list(stage.layers) for stage in stages.on_rank(rank)] for rank in range(stages.num_ranks)]


@pytest.mark.parametrize(
    ("schedule", "settings", "expected"),
    [
        ("gpipe", {}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        ("1f1b", {"layers_per_stage": (3, 5)}, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
        ("1f1b", {"layers_per_stage": (0, 8)}, [[[]], [[0, 1, 2, 3, 4, 5, 6, 7]]]),
        ("interleaved_1f1b", {}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("interleaved_1f1b", {"stages_per_rank": 4}, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
        ("zbv", {}, [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]),
        ("zbv", {"layers_per_stage": (1, 2, 4, 1)}, [[[0], [7]], [[1, 2], [3, 4, 5, 6]]]),
        ("dualpipev", {"layers_per_stage": (1, 4, 3, 0)}, [[[0], []], [[1, 2, 3, 4], [5, 6, 7]]]),
    ],
)
def test_layers_are_dealt(schedule: str, settings: dict[str, Any], expected: list[list[list[int]]]) -> None:
    stages = stages_of(schedule, 2, 8, **settings)
    assert layers_by_rank(stages) == expected
    # In the shape of a V the first rank has both ends of the model.
    assert stages.ends_apart == (schedule not in ("zbv", "dualpipev"))


def test_a_v_of_four_ranks() -> None:
    stages = stages_of("zbv", 4, 8)
    assert layers_by_rank(stages) == [[[0], [7]], [[1], [6]], [[2], [5]], [[3], [4]]]
    first, last = stages.on_rank(0)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert stages.describe() == (
        "stages (8) = pipeline (4) x 2 on each rank; schedule zbv; layers (8) = 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1"
    )


def test_one_rank_has_one_stage() -> None:
    (stage,) = make_stages(ParallelConfig(), 3).stages
    assert (stage.rank, stage.layers, stage.is_first, stage.is_last) == (0, range(3), True, True)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[ParallelConfig, int]:
    """Draw a config that has no problems, and its number of layers."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    per_rank = SCHEDULES[schedule].stages_per_rank or draw(st.integers(2, 4))
    pipeline = draw(st.integers(2, 6))
    count = pipeline * per_rank
    sizes: tuple[int, ...] = ()
    if draw(st.booleans()):
        ends = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        inner = draw(st.lists(st.integers(1, 4), min_size=count - 2, max_size=count - 2))
        sizes = (ends[0], *inner, ends[1])
    num_layers = sum(sizes) if sizes else count * draw(st.integers(1, 4))
    config = ParallelConfig(
        pipeline=pipeline, pipeline_schedule=schedule, stages_per_rank=per_rank, layers_per_stage=sizes
    )
    return config, num_layers


@given(dealt())
def test_every_layer_is_in_one_stage_and_every_rank_has_its_number_of_stages(case: tuple[ParallelConfig, int]) -> None:
    config, num_layers = case
    stages = make_stages(config, num_layers)
    assert [layer for stage in stages.stages for layer in stage.layers] == list(range(num_layers))
    assert [stage.index for stage in stages.stages] == list(range(len(stages.stages)))
    assert [stage.is_first for stage in stages.stages] == [stage.index == 0 for stage in stages.stages]
    assert [stage.is_last for stage in stages.stages] == [
        stage.index + 1 == len(stages.stages) for stage in stages.stages
    ]
    by_rank = [stages.on_rank(rank) for rank in range(config.pipeline)]
    assert {len(own) for own in by_rank} == {num_stages_per_rank(config)} == {stages.per_rank}
    assert sorted(stage.index for own in by_rank for stage in own) == list(range(len(stages.stages)))
    assert stages.num_ranks == config.pipeline
    if config.layers_per_stage:
        assert tuple(len(stage.layers) for stage in stages.stages) == config.layers_per_stage


@given(dealt())
def test_ranks_are_those_of_torch(case: tuple[ParallelConfig, int]) -> None:
    config, num_layers = case
    stages = make_stages(config, num_layers)
    style = "v" if SCHEDULES[config.pipeline_schedule].is_v else "loop"
    expected = generate_stage_to_rank_mapping(config.pipeline, len(stages.stages), style=style)
    assert {stage.index: stage.rank for stage in stages.stages} == expected


@given(st.integers(1, 40), st.integers(1, 40))
def test_uneven_layers_are_spread(num_layers: int, num_stages: int) -> None:
    sizes = spread_layers(num_layers, num_stages)
    assert sum(sizes) == num_layers
    assert len(sizes) == num_stages
    assert max(sizes) - min(sizes) <= 1
    half = num_stages // 2
    assert list(sizes[:half]) == sorted(sizes[:half])
    assert list(sizes[num_stages - half :]) == sorted(sizes[num_stages - half :], reverse=True)


PIPELINE_OF_2 = "stages (2) = pipeline (2) x stages_per_rank (1)"
REFUSED = [
    (dict(pipeline=0), 4, 4, ["pipeline (0) must be at least 1"]),
    (
        dict(pipeline=2, pipeline_schedule="fast"),
        4,
        4,
        ["pipeline_schedule ('fast') must be one of: gpipe, 1f1b, interleaved_1f1b, zbv, dualpipev"],
    ),
    (
        dict(stages_per_rank=2, layers_per_stage=(4,)),
        4,
        4,
        [
            "layers_per_stage does nothing with pipeline (1), which has one stage; leave it out",
            "stages_per_rank does nothing with pipeline (1), which has one stage; leave it out",
        ],
    ),
    (
        dict(pipeline=2, stages_per_rank=2),
        4,
        4,
        [
            'stages_per_rank (2) must be 1 with pipeline_schedule ("1f1b"); leave it out, or for more stages on a rank '
            'use "interleaved_1f1b"'
        ],
    ),
    (
        dict(pipeline=2, pipeline_schedule="interleaved_1f1b", stages_per_rank=1),
        4,
        4,
        [
            'stages_per_rank (1) must be at least 2 with pipeline_schedule ("interleaved_1f1b"); leave it out, or for '
            'one stage on a rank use "1f1b"'
        ],
    ),
    (
        dict(pipeline=2),
        7,
        4,
        [
            f"num_layers (7) must be a multiple of the {PIPELINE_OF_2}; nearest: 6 or 8; or set layers_per_stage, for "
            "example to [4, 3]"
        ],
    ),
    (
        dict(pipeline=8),
        6,
        8,
        [
            "num_layers (6) must be at least the number of stages (8) = pipeline (8) x stages_per_rank (1); largest "
            "pipeline: 6; or set layers_per_stage, for example to [0, 1, 1, 1, 1, 1, 1, 0]"
        ],
    ),
    (
        dict(pipeline=4, pipeline_schedule="zbv"),
        6,
        8,
        [
            "num_layers (6) must be at least the number of stages (8) = pipeline (4) x stages_per_rank (2); largest "
            "pipeline: 3; or set layers_per_stage, for example to [0, 1, 1, 1, 1, 1, 1, 0]"
        ],
    ),
    (
        dict(pipeline=2, layers_per_stage=(1, 2, 3)),
        7,
        4,
        [
            f"layers_per_stage (1, 2, 3) must have 2 numbers, one for each of the {PIPELINE_OF_2}",
            "layers_per_stage (1, 2, 3) adds up to 6, and num_layers is 7",
        ],
    ),
    (
        dict(pipeline=4, layers_per_stage=(0, 0, 4, 0)),
        4,
        4,
        [
            "layers_per_stage (0, 0, 4, 0) leaves stage 1 empty; each needs at least 1 layer, but for the first, which "
            "has the embedding, and the last, which has the head: 0 works for them"
        ],
    ),
    (
        dict(pipeline=2, layers_per_stage=(5, -1)),
        4,
        4,
        ["layers_per_stage (5, -1) must have numbers of at least 0"],
    ),
    (
        dict(pipeline=4),
        8,
        3,
        [
            "micro-batches of a rank in a step (3) must be at least 4, the number of stages, with pipeline_schedule "
            '("1f1b"); or use "gpipe", which takes any number'
        ],
    ),
    (
        dict(pipeline=2, pipeline_schedule="dualpipev"),
        8,
        3,
        [
            "micro-batches of a rank in a step (3) must be at least 4, the number of stages, with pipeline_schedule "
            '("dualpipev"); or use "zbv", which takes any number'
        ],
    ),
    (
        dict(pipeline=4, pipeline_schedule="interleaved_1f1b"),
        8,
        9,
        [
            "micro-batches of a rank in a step (9) must be so many that 2 rounds of at least pipeline (4) are equal "
            'with pipeline_schedule ("interleaved_1f1b"); nearest: 8 or 10'
        ],
    ),
    (
        dict(pipeline=2),
        3,
        1,
        [
            f"num_layers (3) must be a multiple of the {PIPELINE_OF_2}; nearest: 2 or 4; or set layers_per_stage, for "
            "example to [2, 1]",
            "micro-batches of a rank in a step (1) must be at least 2, the number of stages, with pipeline_schedule "
            '("1f1b"); or use "gpipe", which takes any number',
        ],
    ),
]


@pytest.mark.parametrize(("settings", "num_layers", "num_micro_batches", "expected"), REFUSED)
def test_what_can_not_run_is_refused_with_what_would(
    settings: dict[str, Any],
    num_layers: int,
    num_micro_batches: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages_module, "_GPIPE_TAKES_FEW", True)
    config = ParallelConfig(**settings)
    assert stage_problems(config, num_layers=num_layers, num_micro_batches=num_micro_batches) == expected
    of_layers = stage_problems(config, num_layers=num_layers)
    if of_layers:
        with pytest.raises(ValueError, match=r".") as raised:
            make_stages(config, num_layers)
        assert str(raised.value).splitlines() == of_layers


def test_gpipe_of_torch_2_10_wants_as_many_micro_batches_as_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "_GPIPE_TAKES_FEW", False)
    text = "micro-batches of a rank in a step (1) must be at least 2, the number of stages, with pipeline_schedule "
    for name, other in (("gpipe", "torch 2.11"), ("1f1b", '"gpipe" of torch 2.11'), ("dualpipev", '"zbv"')):
        assert micro_batch_problems(name, 2, 2, 2) == []
        assert micro_batch_problems(name, 2, 2, 1) == [f'{text}("{name}"); or use {other}, which takes any number']
    assert micro_batch_problems("zbv", 2, 4, 1) == []


# Older ones have other names for the passes.
reads_torch = pytest.mark.skipif(torch.__version__ < (2, 14), reason="reads the tables of torch 2.14")


@reads_torch
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_numbers_of_micro_batches_are_refused_where_torch_refuses_them(name: str, pipeline: int) -> None:
    config = ParallelConfig(pipeline=pipeline, pipeline_schedule=name)
    for number in range(1, 20):
        problems = stage_problems(config, num_micro_batches=number)
        try:
            make_schedule(name, pipeline, num_stages_per_rank(config), number)
        except ValueError:
            assert problems, (name, pipeline, number)
        else:
            assert not problems, (name, pipeline, number)


def make_schedule(name: str, pipeline: int, per_rank: int, num_micro_batches: int) -> Any:
    """Return torch's schedule, over stages without a module."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=pipeline * per_rank,
            group_size=pipeline,
            group_rank=0,
            is_first=index == 0,
            is_last=False,
            submod=None,
            has_backward=True,
            device="cpu",
        )
        for index in range(per_rank)
    ]
    make = getattr(schedules, SCHEDULES[name].class_name)
    return make(stages[0] if SCHEDULES[name].stages_per_rank == 1 else stages, num_micro_batches)


@dataclass
class Clock:
    """When the passes of each rank end, and how many wait for their backward."""

    end: int
    most_in_flight: list[int]


def passes(name: str, pipeline: int, per_rank: int, num_micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Return, by rank, the passes in torch's order: F, I, W, or B for both gradients, the stage, the micro-batch."""
    if name == "1f1b":  # of which torch has no list
        return [list(one_forward_one_backward(rank, pipeline, num_micro_batches)) for rank in range(pipeline)]
    schedule = make_schedule(name, pipeline, per_rank, num_micro_batches)
    order = schedule._get_pipeline_order() if name == "gpipe" else schedule.pipeline_order
    found = []
    for rank in range(pipeline):
        flat = [part for action in order[rank] if action is not None for part in action.sub_actions or (action,)]
        kinds = [(one.computation_type.value, one.stage_index, one.microbatch_index) for one in flat]
        found.append([one for one in kinds if one[0] in "FIWB"])
    return found


def one_forward_one_backward(rank: int, pipeline: int, number: int) -> Iterator[tuple[str, int, int]]:
    before = min(number, pipeline - rank)
    yield from (("F", rank, index) for index in range(before))
    for index in range(number):
        yield "B", rank, index
        if index + before < number:
            yield "F", rank, index + before


def timed(orders: list[list[tuple[str, int, int]]], num_stages: int) -> Clock:
    """Let every rank work as early as it can: one unit of time for a forward, and for either kind of gradient."""
    ends: dict[tuple[str, int, int], int] = {}
    now, places, waiting, most = [[0] * len(orders) for _ in range(4)]
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, number = order[places[rank]]
                needs = [("F", stage, number)] if kind in "BI" else [("I", stage, number)] if kind == "W" else []
                if kind == "F" and stage > 0:
                    needs.append(("F", stage - 1, number))
                if kind in "BI" and stage + 1 < num_stages:
                    needs.append(("I", stage + 1, number))
                if any(need not in ends for need in needs):
                    break
                start = max([now[rank], *(ends[need] for need in needs)])
                now[rank] = start + (2 if kind == "B" else 1)
                ends["I" if kind == "B" else kind, stage, number] = now[rank]
                waiting[rank] += 1 if kind == "F" else -1 if kind in "BW" else 0
                most[rank] = max(most[rank], waiting[rank])
                places[rank] += 1
        assert sum(places) > before, "ranks wait for one another"
    return Clock(end=max(now), most_in_flight=most)


@reads_torch
@pytest.mark.parametrize(
    ("name", "per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2), ("dualpipev", 2)],
)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 5])
def test_idle_time_and_passes_in_flight_are_those_of_the_order_of_torch(
    name: str, per_rank: int, pipeline: int
) -> None:
    count = pipeline * per_rank
    stages = stages_of(name, pipeline, count, stages_per_rank=per_rank)
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16):
        config = ParallelConfig(pipeline=pipeline, pipeline_schedule=name, stages_per_rank=per_rank)
        if stage_problems(config, num_micro_batches=number):
            continue
        clock = timed(passes(name, pipeline, per_rank, number), count)
        bubble = ideal_bubble(stages, number)
        assert bubble.share == pytest.approx(1 - 3 * per_rank * number / clock.end), number
        assert [most_in_flight(stages, rank, number) for rank in range(pipeline)] == clock.most_in_flight, number
        values = {"p": pipeline, "v": per_rank, "m": number}
        assert bubble.share == pytest.approx(evaluated(bubble.formula, values)), bubble.formula


def evaluated(formula: str, values: dict[str, int]) -> float:
    """Work out a formula such as "b / (6 m + b), b = max(p - 1, 2)"."""
    whole, *parts = formula.replace("6 m", "6 * m").replace("v m", "v * m").split(", b = ")
    for part in parts:
        product = part.replace("4 (", "4 * (").replace("2 (", "2 * (").replace(") (", ") * (")
        values = {**values, "b": eval(product, {"max": max}, values)}
    return float(eval(whole, {}, values))
