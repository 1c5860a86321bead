"""The same loss, gradients, norm and weights in every layout: 3 steps against one process, fp32, relative 1e-5."""

from dataclasses import replace

import pytest
import torch
from coterie_trainer.config import Config
from coterie_trainer.verify.comparison import compare
from coterie_trainer.verify.layout import layout_config, parse_layout
from coterie_trainer.verify.running import Outcome, run_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layouts.conftest import Proof
from layouts.models import VARIANTS
from layouts.plain import run_plain

LAYOUTS = [
    "data=1 accumulation=4 dispatcher=rowwise",
    "data=1 recompute=block",
    "data=2",
    "data=2 accumulation=4 dispatcher=local recompute=block",
    "data=2 expert=2",
    "data=2 expert=2 accumulation=4 recompute=block",
    "data=2 expert=2 dispatcher=rowwise",
    "data=2 expert=2 accumulation=4 dispatcher=rowwise recompute=block",
    "data=4 accumulation=4",
    "data=4 expert=2",
    "data=4 expert=2 accumulation=4 dispatcher=rowwise",
    "data=4 expert=4 recompute=block",
    "data=4 expert=4 dispatcher=rowwise recompute=block",
    "data=8",
    "data=8 expert=2 accumulation=4 recompute=block",
    "data=8 expert=2 dispatcher=rowwise",
    "data=8 expert=4 accumulation=4",
    "data=8 expert=4 dispatcher=rowwise recompute=block",
    # Parts that are computed again, buffers that are leased or filled again, and the exchange behind the shared expert.
    "data=2 expert=2 recompute=attention+experts overlap=true",
    "data=2 expert=2 accumulation=4 dispatcher=rowwise saved_rows=lease overlap=true",
    "data=4 expert=2 dispatcher=rowwise saved_rows=fetch recompute=experts",
    "data=4 expert=4 accumulation=4 recompute=dispatch",
    # Gradients that are never whole, or summed late; and weights that are gathered.
    "data=4 expert=2 accumulation=4 gradient_sharding=true",
    "data=2 accumulation=2 gradient_overlap=false",
    "data=2 accumulation=4 data_parallel=fsdp",
    "data=4 data_parallel=fsdp recompute=block",
    "data=8 data_parallel=fsdp",
]

# As many layers as give each stage one, 3 at least, the first dense. Each schedule; layers that do not divide; stages
# without an expert, or with nothing but the embedding or the head; parts that are computed again.
PIPELINES = [
    "pipeline=2 data=1 accumulation=4",
    "pipeline=2 data=1 schedule=gpipe recompute=block",
    "pipeline=2 data=1 accumulation=4 schedule=dualpipev dispatcher=rowwise",
    "pipeline=2 data=1 accumulation=4 schedule=interleaved_1f1b stages_per_rank=3 recompute=block",
    "pipeline=2 data=2 schedule=interleaved_1f1b recompute=block",
    "pipeline=2 data=2 accumulation=4 schedule=gpipe layers_per_stage=0+3",
    "pipeline=2 data=2 expert=2 accumulation=4 layers_per_stage=1+2",
    "pipeline=2 data=2 expert=2 accumulation=4 dispatcher=rowwise layers_per_stage=3+0 recompute=block",
    "pipeline=2 data=2 expert=2 schedule=zbv dispatcher=rowwise",
    "pipeline=2 data=2 expert=2 accumulation=4 schedule=zbv recompute=attention+experts gradient_overlap=false",
    "pipeline=2 data=4 accumulation=4 schedule=interleaved_1f1b dispatcher=rowwise recompute=block",
    "pipeline=2 data=4 expert=2 schedule=zbv recompute=block",
    "pipeline=2 data=4 expert=4 accumulation=4 dispatcher=rowwise",
    "pipeline=2 data=4 expert=4 accumulation=4 schedule=dualpipev",
    "pipeline=4 data=1 accumulation=4",
    "pipeline=4 data=1 schedule=gpipe dispatcher=rowwise recompute=block",
    "pipeline=4 data=1 accumulation=8 schedule=dualpipev layers_per_stage=0+1+1+2+1+1+1+0",
    "pipeline=4 data=2 accumulation=4 schedule=zbv recompute=block",
    "pipeline=4 data=2 expert=2 schedule=gpipe",
    "pipeline=4 data=2 expert=2 accumulation=4 dispatcher=rowwise recompute=block",
    "pipeline=4 data=2 expert=2 accumulation=4 schedule=interleaved_1f1b",
    # Rows that wait for their backward in buffers of their own, or are fetched again.
    "pipeline=2 data=2 expert=2 accumulation=4 dispatcher=rowwise saved_rows=lease overlap=true",
    "pipeline=2 data=2 expert=2 accumulation=4 schedule=zbv dispatcher=rowwise saved_rows=fetch recompute=experts",
    "pipeline=2 data=2 expert=2 accumulation=4 dispatcher=rowwise recompute=dispatch",
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_computes_something(proof: Proof, variant: str) -> None:
    steps = proof.expected(variant).steps
    assert len(steps) == 3
    for step in steps:
        assert step.loss > 1.0
        assert step.balance_loss > 0.5
        assert step.gradient_norm > 1.0  # so that it is clipped
        for name, gradient in step.gradients.items():
            assert float(gradient.norm()) > 0, f"{name}: a zero would equal what no rank computes"
    names = steps[0].gradients.keys()
    for name in steps[0].state:
        assert not torch.equal(steps[0].state[name], steps[2].state[name]), f"{name} is not trained"
    has_bias = variant in ("bias", "groups", "quantile")
    biases = {f"layers.{index}.moe.router.selection_bias" for index in (1, 2)} if has_bias else set()
    assert steps[0].state.keys() - names == biases


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_agrees_with_plain_torch(proof: Proof, variant: str) -> None:
    # All layouts share code with the one process that they are compared with.
    comparison = proof.compare("data=1 dispatcher=local", variant, run_plain)
    assert comparison.agrees, "\n".join(comparison.problems())
    assert comparison.largest["gradients"] > 0.0


@pytest.mark.parametrize("layout", [*LAYOUTS, *PIPELINES])
def test_three_steps_are_those_of_one_process(proof: Proof, layout: str) -> None:
    comparison = proof.compare(layout)
    assert comparison.agrees, "\n".join([layout, *comparison.problems()])


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_64_experts_are_spread_over_all_ranks(proof: Proof, degree: int) -> None:
    comparison = proof.compare(f"data={degree} expert={degree}", "no_auxiliary_loss")
    assert comparison.agrees, "\n".join(comparison.problems())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_model_runs_in_a_pipeline(proof: Proof, variant: str) -> None:
    comparison = proof.compare("pipeline=2 data=2 expert=2 accumulation=4 schedule=zbv", variant)
    assert comparison.agrees, "\n".join([variant, *comparison.problems()])


@pytest.mark.parametrize("scope", ["micro_batch", "data_parallel"])
def test_a_balance_loss_of_a_micro_batch_is_that_of_the_same_micro_batch_without_a_pipeline(
    proof: Proof, scope: str
) -> None:
    def outcome(text: str) -> Outcome:
        layout, problems = parse_layout(text)
        assert layout is not None, problems
        config = layout_config(layout, proof.config())
        config = replace(config, train=replace(config.train, balance_scope=scope))
        return proof.pool.run(run_layout, layout.world, config)[0]

    plain = outcome("data=2 expert=2 accumulation=4")
    comparison = compare(plain, outcome("pipeline=2 data=2 expert=2 accumulation=4"))
    assert comparison.agrees, "\n".join(comparison.problems())
    # The scope makes a difference, so that it could be lost.
    assert not compare(proof.expected(), plain).agrees


def twenty_steps(rank: int, world: int, config: Config) -> Outcome | None:
    return run_layout(rank, world, config, num_steps=20)


def test_twenty_steps_of_pipeline_and_experts_end(proof: Proof) -> None:
    """P23: the traffic of the pipeline and that of the experts in one run."""
    layout = "pipeline=2 data=2 expert=2 accumulation=4"
    expected = proof.run("data=1", "no_auxiliary_loss", twenty_steps)
    found = proof.run(layout, "no_auxiliary_loss", twenty_steps)
    losses = [[step.loss for step in outcome.steps] for outcome in (expected, found)]
    assert len(losses[0]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Draw a layout of the matrix, with any of the options that must not change a number."""
    pipeline = draw(st.sampled_from([2, 1, 4]), label="pipeline")
    data = draw(st.sampled_from([degree for degree in (2, 4, 8, 1) if pipeline * degree <= 8]), label="data")
    expert = draw(st.sampled_from([degree for degree in (1, 2, 4) if degree <= data]), label="expert")
    accumulation = draw(st.sampled_from([2, 1, 4]), label="accumulation")
    dispatcher = draw(st.sampled_from(["all_to_all", "rowwise"]), label="dispatcher")
    recompute = draw(st.sampled_from(["none", "block", "attention", "experts", "attention+experts+dispatch"]))
    parts = [
        f"pipeline={pipeline} data={data} expert={expert} accumulation={accumulation}",
        f"dispatcher={dispatcher} recompute={recompute} overlap={draw(st.sampled_from(['false', 'true']))}",
    ]
    if dispatcher == "rowwise" and "dispatch" not in recompute:
        parts.append(f"saved_rows={draw(st.sampled_from(['copy', 'lease', 'fetch']))}")
    if pipeline > 1:
        fits = {"zbv": 1, "1f1b": pipeline, "interleaved_1f1b": 1, "gpipe": 1, "dualpipev": 2 * pipeline}
        parts.append(f"schedule={draw(st.sampled_from([name for name in fits if accumulation >= fits[name]]))}")
    return " ".join(parts)


@settings(
    max_examples=12,
    derandomize=True,  # the same ones every time
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(layout=layouts(), variant=st.sampled_from(sorted(VARIANTS)))
def test_layouts_and_models_that_chance_has_chosen(proof: Proof, layout: str, variant: str) -> None:
    comparison = proof.compare(layout, variant)
    assert comparison.agrees, "\n".join([f"{layout} of the model {variant!r}", *comparison.problems()])
