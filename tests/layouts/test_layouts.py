"""The same loss, gradients, norm and weights in every layout: 3 steps against one process, fp32, relative 1e-5."""

import pytest
import torch
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
    has_bias = variant in ("bias", "groups")
    biases = {f"layers.{index}.moe.router.selection_bias" for index in (1, 2)} if has_bias else set()
    assert steps[0].state.keys() - names == biases


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process_agrees_with_plain_torch(proof: Proof, variant: str) -> None:
    # All layouts share code with the one process that they are compared with.
    comparison = proof.compare("data=1 dispatcher=local", variant, run_plain)
    assert comparison.agrees, "\n".join(comparison.problems())
    assert comparison.largest["gradients"] > 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_are_those_of_one_process(proof: Proof, layout: str) -> None:
    comparison = proof.compare(layout)
    assert comparison.agrees, "\n".join([layout, *comparison.problems()])


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_64_experts_are_spread_over_all_ranks(proof: Proof, degree: int) -> None:
    comparison = proof.compare(f"data={degree} expert={degree}", "no_auxiliary_loss")
    assert comparison.agrees, "\n".join(comparison.problems())


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Draw a layout of the matrix, with any of the options that must not change a number."""
    data = draw(st.sampled_from([2, 4, 8, 1]), label="data")
    expert = draw(st.sampled_from([degree for degree in (1, 2, 4) if degree <= data]), label="expert")
    dispatcher = draw(st.sampled_from(["all_to_all", "rowwise"]), label="dispatcher")
    recompute = draw(st.sampled_from(["none", "block", "attention", "experts", "attention+experts+dispatch"]))
    parts = [
        f"data={data} expert={expert} accumulation={draw(st.sampled_from([2, 1, 4]))}",
        f"dispatcher={dispatcher} recompute={recompute} overlap={draw(st.sampled_from(['false', 'true']))}",
    ]
    if dispatcher == "rowwise" and "dispatch" not in recompute:
        parts.append(f"saved_rows={draw(st.sampled_from(['copy', 'lease', 'fetch']))}")
    return " ".join(parts)


@settings(
    max_examples=10,
    derandomize=True,  # the same ten every time
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(layout=layouts(), variant=st.sampled_from(sorted(VARIANTS)))
def test_layouts_and_models_that_chance_has_chosen(proof: Proof, layout: str, variant: str) -> None:
    comparison = proof.compare(layout, variant)
    assert comparison.agrees, "\n".join([f"{layout} of the model {variant!r}", *comparison.problems()])
