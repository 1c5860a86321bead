"""The comparison can fail: faults put into one layout are found, and the first tensor is named with its place."""

import re

import pytest
from coterie_trainer.verify.comparison import Comparison

from layouts import broken
from layouts.conftest import Proof


def first(comparison: Comparison) -> str:
    assert not comparison.agrees
    return comparison.problems()[0]


def test_a_wrong_divisor_of_experts_is_named(proof: Proof) -> None:
    comparison = proof.compare("data=4 expert=2", function=broken.divided_experts)
    text = first(comparison)
    # The last layer's gradients come first; nothing but experts is off in the first step.
    assert re.match(
        r"first difference: step 1, gradient of layers\.2\.moe\.experts\.\w+: relative difference 7\.5e-01", text
    )
    names = {one.name for one in comparison.wrong if one.step == 1 and one.kind == "gradients"}
    assert names == {f"gradient of layers.{i}.moe.experts.{part}" for i in (1, 2) for part in ("gate_up", "down")}
    assert comparison.largest["gradients"] == pytest.approx(0.75, abs=0.05)


def test_one_wrong_element_is_found_with_its_expert_and_its_ranks(proof: Proof) -> None:
    comparison = proof.compare("data=4 expert=2", function=broken.one_element)
    expected = proof.expected().steps[0].gradients[broken.EXPERTS]
    num_experts, rows, columns = expected.shape
    (wrong,) = [one for one in comparison.wrong if one.step == 1 and one.kind == "gradients"]
    assert wrong.name == f"gradient of {broken.EXPERTS}"
    assert wrong.largest == pytest.approx(0.5, rel=1e-5)
    assert wrong.relative == pytest.approx(0.5 / float(expected.norm()), rel=1e-4)
    # Rank 3 of 4 has the second half of the experts and, of these, the second half of the elements.
    last = f"[{num_experts - 1}, {rows - 1}, {columns - 1}]"
    found, right = re.search(r": (\S+) instead of (\S+);", wrong.where).groups()
    assert wrong.where.startswith(f"most at {last} by 5.0e-01: ")
    assert float(right) == pytest.approx(float(expected[-1, -1, -1]), rel=1e-6)
    assert float(found) == pytest.approx(float(right) + 0.5, rel=1e-5)
    assert wrong.where.endswith(f"expert {num_experts - 1}, held by ranks 1, 3, summed by rank 3")


def test_a_loss_divided_by_the_targets_of_a_rank(proof: Proof) -> None:
    comparison = proof.compare("data=2", function=broken.lost_targets)
    assert first(comparison).startswith("first difference: step 1, loss: relative difference ")


def test_a_gradient_that_stays_partial_in_the_second_step(proof: Proof) -> None:
    comparison = proof.compare("data=2", function=broken.partial_router)
    text = first(comparison)
    assert text.startswith("first difference: step 2, gradient of layers.2.moe.router.weight: relative difference ")
    assert re.search(r"summed by rank [01]$", text)


def test_a_replica_that_misses_one_bit(proof: Proof) -> None:
    comparison = proof.compare("data=4 expert=2", function=broken.diverging_replica)
    assert comparison.replica_problems[0] == "step 1: norm.weight of rank 3 has other bits than that of rank 0"
    assert not comparison.agrees


def test_a_count_that_is_off_by_one(proof: Proof) -> None:
    comparison = proof.compare("data=2 accumulation=2", function=broken.padding_counted)
    text = first(comparison)
    assert "step 1, load of experts" in text
    assert re.search(r"expert 5 of MoE layer 0 got (\d+) tokens instead of (\d+); rounding can do that", text)


def test_a_gradient_that_is_not_clipped(proof: Proof) -> None:
    comparison = proof.compare("data=2", function=broken.nothing_clipped)
    assert (comparison.wrong[0].step, comparison.wrong[0].kind) == (1, "parameters")


TIED = "pipeline=2 data=2 expert=2 accumulation=4"


def test_a_tied_embedding_without_the_gradient_of_its_head(proof: Proof) -> None:
    comparison = proof.compare(TIED, function=broken.head_without_gradient)
    text = first(comparison)
    assert text.startswith("first difference: step 1, gradient of embed.weight: relative difference ")
    assert re.search(r"; summed by rank [0-3]$", text)
    names = {one.name for one in comparison.wrong if one.step == 1 and one.kind == "gradients"}
    assert names == {"gradient of embed.weight"}
    assert not comparison.replica_problems


def test_the_two_ends_of_a_tied_embedding_that_drift_apart(proof: Proof) -> None:
    comparison = proof.compare(TIED, function=broken.embedding_apart)
    assert comparison.replica_problems[0] == "step 1: embed.weight of rank 3 has other bits than that of rank 0"


def test_a_norm_of_one_stage(proof: Proof) -> None:
    """P18: every stage clips by its own norm."""
    comparison = proof.compare(TIED, function=broken.norm_of_a_stage)
    assert first(comparison).startswith("first difference: step 1, gradient norm: relative difference ")
    assert re.match(r"step 1: gradient norm of rank 2 is \S+, and that of rank 0 is ", comparison.replica_problems[0])


def test_a_bias_that_another_layer_has_trained(proof: Proof) -> None:
    comparison = proof.compare(TIED, function=broken.bias_of_another_layer)
    text = first(comparison)
    assert text.startswith("first difference: step 1, layers.2.moe.router.selection_bias: relative difference ")
    assert text.endswith("; held by ranks 2, 3")
