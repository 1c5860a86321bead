"""Other activations, biases and deferred gradients on the Triton back-end, for a process with TRITON_INTERPRET=1."""

import pytest
import torch
from coterie_experts.conformance import CASES, TOKEN_CASES, Case, TokenCase, case_problems, token_case_problems

from experts import test_activations, test_deferred
from experts.test_activations import TIGHT

# Where a GPU gives NaN in silence, numpy, which the interpreter runs on, also warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_scratch"),
]
# What the activations do without biases is what SwiGLU does; the interpreter needs half a second for each run.
BIASED, BIASED_TOKENS = (tuple(case for case in cases if case.bias) for cases in (CASES, TOKEN_CASES))


@pytest.mark.parametrize("case", BIASED, ids=lambda case: case.name)
def test_rows(case: Case) -> None:
    assert case_problems("triton", case, repeats=0) == []


def test_several_tiles() -> None:
    """More rows than a row tile in one expert, and column tiles with a remainder, against the other back-end."""
    expected, found = (
        test_activations.ours(TIGHT, *test_activations.make(TIGHT, True, d=40, h=40), backend)
        for backend in ("torch", "triton")
    )
    for name, one, other in zip(test_activations.NAMES, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", BIASED_TOKENS, ids=lambda case: case.name)
def test_tokens(case: TokenCase) -> None:
    assert token_case_problems("triton", case) == []


@pytest.mark.parametrize("accumulator", ["grad", "main_grad"])
def test_two_micro_batches_in_flight(accumulator: str) -> None:
    test_deferred.test_two_micro_batches_in_flight("triton", accumulator, tokens=accumulator == "grad")


def test_what_is_kept_and_what_is_refused() -> None:
    test_deferred.test_twice_is_an_error_and_nothing_is_kept("triton", tokens=True)
    test_deferred.test_inputs_changed_in_between("triton", 0)


def test_no_rows_at_all() -> None:
    test_deferred.test_no_rows_at_all("triton", 3)
