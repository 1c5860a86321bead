"""Other activations, biases and deferred gradients on the Triton back-end, for a process with TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
from coterie_experts import Activation
from coterie_experts.conformance import CASES, TOKEN_CASES, Case, TokenCase, case_problems, token_case_problems

from experts import test_activations, test_deferred

# Where a GPU gives NaN in silence, numpy, which the interpreter runs on, also warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_scratch"),
]
OTHERS, OTHER_TOKENS = (
    tuple(case for case in cases if case.activation.name != "swiglu" or case.bias) for cases in (CASES, TOKEN_CASES)
)
# More rows than a tile in one expert, column tiles with a remainder, and an expert without rows.
WIDE = replace(OTHERS[0], counts=(0, 35), d_model=40, d_hidden=40, bias=True, rows_past_the_end=0)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_rows(case: Case) -> None:
    assert case_problems("triton", case, repeats=0) == []


@pytest.mark.parametrize("activation", [Activation(name="swiglu_clamped", limit=0.8), Activation(name="relu_squared")])
def test_several_tiles(activation: Activation) -> None:
    assert case_problems("triton", replace(WIDE, activation=activation), repeats=1) == []


@pytest.mark.parametrize("case", OTHER_TOKENS, ids=lambda case: case.name)
def test_tokens(case: TokenCase) -> None:
    assert token_case_problems("triton", case) == []


def test_clamped_swiglu_by_hand() -> None:
    test_activations.test_clamped_swiglu_by_hand("triton")


def test_module_with_biases() -> None:
    test_activations.test_module_with_biases("triton")


@pytest.mark.parametrize("accumulator", ["grad", "main_grad"])
@pytest.mark.parametrize("tokens", [False, True])
def test_two_micro_batches_in_flight(accumulator: str, tokens: bool) -> None:
    test_deferred.test_two_micro_batches_in_flight("triton", accumulator, tokens)


def test_what_is_kept_and_what_is_refused() -> None:
    test_deferred.test_twice_is_an_error_and_nothing_is_kept("triton", tokens=True)
    test_deferred.test_inputs_changed_in_between("triton", 0)


def test_kept_graph_hands_over_each_time() -> None:
    test_deferred.test_kept_graph_hands_over_each_time("triton")


def test_no_rows_at_all() -> None:
    test_deferred.test_no_rows_at_all("triton", 3)
