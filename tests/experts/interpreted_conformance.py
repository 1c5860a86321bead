"""The conformance suite of SwiGLU on the Triton back-end, for a process with TRITON_INTERPRET=1."""

import pytest
import torch
from coterie_experts.conformance import CASES, TOKEN_CASES, Case, TokenCase, case_problems, refusal, token_case_problems

# Where a GPU gives NaN in silence, numpy, which the interpreter runs on, also warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_scratch"),
]
# interpreted_activations.py has the others, interpreted_experts.py the edges of tiles and the widths.
SWIGLU, SWIGLU_TOKENS = (
    tuple(case for case in cases if case.activation.name == "swiglu" and not case.bias)
    for cases in (CASES, TOKEN_CASES)
)
ELSEWHERE = ("edges", "long_edges", "wide_hidden", "wide_model", "first_and_third_idle")
SMALL = tuple(case for case in SWIGLU if case.name not in ELSEWHERE)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_rows(case: Case) -> None:
    # The interpreter runs one program after another: what could differ is memory that nobody wrote.
    repeats = 3 if case.name == "one_expert" else 1 if case.name == "past_the_end" else 0
    assert case_problems("triton", case, repeats=repeats) == []


@pytest.mark.parametrize("case", SWIGLU_TOKENS, ids=lambda case: case.name)
def test_tokens(case: TokenCase) -> None:
    assert token_case_problems("triton", case) == []


def test_it_refuses_none() -> None:
    assert [refusal("triton", case, device="cpu", dtype=torch.float32) for case in CASES] == [None] * len(CASES)
