import dataclasses
import time

import pytest
from coterie_parallel import (
    DENSE,
    EXPERTS,
    TIED_EMBEDDING,
    DispatchOptions,
    Mesh,
    ParallelConfig,
    Placement,
    Plan,
    make_plan,
    plan_problems,
)

from parallel.cases import REFUSED, PlanCase


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_wrong_layout_is_refused_with_every_fault_and_number(case: PlanCase) -> None:
    start = time.process_time()
    found = plan_problems(case.config, case.world, num_experts=case.num_experts)
    with pytest.raises(ValueError, match=r".") as raised:
        make_plan(case.config, case.world, case.num_experts)
    assert time.process_time() - start < 1
    assert str(raised.value).splitlines() == found
    assert len(found) == len(case.sentences), found
    for sentence, words in zip(found, case.sentences, strict=True):
        assert all(word in sentence for word in words), (sentence, words)


@pytest.mark.parametrize(
    ("config", "world", "expected"),
    [
        (ParallelConfig(), 1, (1, 1, 1, 1)),
        (ParallelConfig(), 8, (1, 8, 1, 8)),
        (ParallelConfig(expert=4), 8, (1, 8, 4, 2)),
        (ParallelConfig(expert=-1), 8, (1, 8, 8, 1)),
        (ParallelConfig(data=6, expert=3), 6, (1, 6, 3, 2)),
        (ParallelConfig(dispatcher="local"), 4, (1, 4, 1, 4)),
        (ParallelConfig(pipeline=2), 8, (2, 4, 1, 4)),
        (ParallelConfig(pipeline=2, expert=-1), 8, (2, 4, 4, 1)),
        (ParallelConfig(pipeline=4, data=2, expert=2), 8, (4, 2, 2, 1)),
    ],
)
def test_degrees_are_settled(config: ParallelConfig, world: int, expected: tuple[int, ...]) -> None:
    plan = make_plan(config, world, num_experts=48)
    assert (plan.pipeline, plan.data, plan.expert, plan.expert_data) == expected
    assert plan.world == world


def test_expert_is_the_fastest_axis_and_pipeline_the_slowest() -> None:
    plan = Plan(world=8, pipeline=2, data=4, expert=2, expert_data=2)
    seen = [plan.coordinates(rank) for rank in range(8)]
    assert [(at.pipeline, at.data, at.expert_data, at.expert) for at in seen] == [
        (0, 0, 0, 0),
        (0, 1, 0, 1),
        (0, 2, 1, 0),
        (0, 3, 1, 1),
        (1, 0, 0, 0),
        (1, 1, 0, 1),
        (1, 2, 1, 0),
        (1, 3, 1, 1),
    ]
    assert plan.axis_ranks("world") == [(0, 1, 2, 3, 4, 5, 6, 7)]
    assert plan.axis_ranks("data") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.axis_ranks("expert") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert plan.axis_ranks("expert_data") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    with pytest.raises(ValueError, match=r"rank \(8\).*\(8\)"):
        plan.coordinates(8)
    assert plan.axis_ranks("pipeline") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    with pytest.raises(ValueError, match=r"'model'.*world, pipeline, data, expert, expert_data, embedding"):
        plan.axis_ranks("model")


@pytest.mark.parametrize(
    ("pipeline", "data", "expected"),
    [(2, 1, (0, 1)), (2, 2, (0, 1, 2, 3)), (4, 1, (0, 3)), (4, 2, (0, 1, 6, 7)), (1, 2, (0, 1))],
)
def test_a_tied_embedding_is_on_the_first_and_the_last_ranks_of_the_pipeline(
    pipeline: int, data: int, expected: tuple[int, ...]
) -> None:
    plan = Plan(world=pipeline * data, pipeline=pipeline, data=data, expert=1, expert_data=data)
    assert plan.axis_ranks("embedding") == [expected]
    assert TIED_EMBEDDING.problems(plan) == DENSE.problems(plan) == EXPERTS.problems(plan) == []


def test_a_placement_accounts_for_the_ranks_of_a_stage() -> None:
    plan = Plan(world=8, pipeline=2, data=4, expert=2, expert_data=2)
    assert Placement(replicated_over=("world",)).problems(plan) == ["world (8) = 8 ranks must be all that hold it (4)"]
    assert Placement(replicated_over=("expert",)).problems(plan) == [
        "expert (2) = 2 ranks must be all that hold it (4)"
    ]
    assert Placement(replicated_over=("embedding",), sharded_over=("expert",)).problems(plan) == [
        "embedding (8) x expert (2) = 16 ranks must be all that hold it (8)"
    ]
    assert Placement().problems(plan) == ["no axis (1) = 1 ranks must be all that hold it (4)"]


def test_the_plan_shows_every_factor_and_product() -> None:
    # P25: world 4, pipeline 2, expert 2 is 2 x 2, and nothing hidden multiplies in.
    text = Plan(world=4, pipeline=2, data=2, expert=2, expert_data=1).describe()
    assert text.splitlines() == [
        "world size (4) = pipeline (2) x data (2)",
        "data (2) = expert_data (1) x expert (2)",
    ]


def test_a_mesh_of_one_rank_needs_no_process_group() -> None:
    with Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=5) as mesh:
        for name in ("world", "pipeline", "data", "expert", "expert_data"):
            axis = mesh.axis(name)
            assert (axis.name, axis.size, axis.index, axis.group, axis.ranks) == (name, 1, 0, None, (0,))
        with pytest.raises(ValueError, match=r"'tensor'.*world, pipeline, data"):
            mesh.axis("tensor")


def test_a_mesh_of_more_ranks_asks_for_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"2 ranks needs torch.distributed"):
        Mesh(make_plan(ParallelConfig(), 2), 0, timeout_s=5)


@pytest.mark.parametrize(("top_k", "factor", "least"), [(2, 0.4, "0.5"), (8, 0.1, "0.125"), (3, 0.3333, "0.334")])
def test_a_capacity_below_one_row_a_token_is_refused(top_k: int, factor: float, least: str) -> None:
    """P21: a receive buffer smaller than promised."""
    config = ParallelConfig(dispatcher="rowwise", capacity_factor=factor)
    expected = (
        f"capacity_factor ({factor}) must be at least {least} with top_k ({top_k}): a buffer holds at least one row "
        "for each token of a rank; usual: 2.0"
    )
    assert plan_problems(config, 2, num_experts=8, top_k=top_k) == [expected]
    assert plan_problems(config, 2, num_experts=8) == []
    with pytest.raises(ValueError, match=rf"^capacity_factor \({factor}\) must be at least {least}"):
        make_plan(config, 2, 8, top_k)
    enough = dataclasses.replace(config, capacity_factor=float(least))
    assert plan_problems(enough, 2, num_experts=8, top_k=top_k) == []


def test_options_of_the_dispatcher_are_judged() -> None:
    config = ParallelConfig(dispatcher="rowwise", overflow="wait", saved_rows="all", capacity_factor=0.0)
    assert plan_problems(config, 1, top_k=2) == [
        "overflow ('wait') must be one of: grow, exact, drop",
        "saved_rows ('all') must be one of: copy, lease, fetch",
        "capacity_factor (0.0) must be a positive number, for example 2.0",
    ]
    good = ParallelConfig(dispatcher="rowwise", overflow="drop", capacity_factor=1.5, saved_rows="fetch", overlap=True)
    assert plan_problems(good, 1, top_k=2) == []
    assert good.dispatch_options() == DispatchOptions(
        overflow="drop", capacity_factor=1.5, saved_rows="fetch", overlap=True
    )


@pytest.mark.parametrize("name", ["local", "all_to_all"])
def test_settings_of_buffers_are_refused_where_there_are_none(name: str) -> None:
    config = ParallelConfig(dispatcher=name, overflow="drop", capacity_factor=1.5, overlap=True)
    found = plan_problems(config, 1, top_k=2)
    assert found == [
        f"overflow ('drop') does nothing with dispatcher \"{name}\", whose buffers always fit; leave it out, or use "
        'dispatcher "rowwise"',
        f'capacity_factor (1.5) does nothing with dispatcher "{name}", whose buffers always fit; leave it out, or use '
        'dispatcher "rowwise"',
    ]
