"""The conformance suite on the Triton back-end, for a process with TRITON_INTERPRET=1."""

import pytest
import torch
from coterie_experts.conformance import CASES, TOKEN_CASES, Case, TokenCase, case_problems, refusal, token_case_problems

# Where a GPU gives NaN in silence, numpy, which the interpreter runs on, also warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_scratch"),
]
SWIGLU = tuple(case for case in CASES if case.activation.name == "swiglu" and not case.bias)
# interpreted_experts.py has the edges of tiles and the widths; the interpreter needs half a second for each run.
SMALL = tuple(case for case in SWIGLU if case.name not in ("edges", "long_edges", "wide_hidden", "wide_model"))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_rows(case: Case) -> None:
    # The interpreter runs one program after another: what could differ is memory that nobody wrote.
    repeats = 20 if case.name == "one_expert" else 1 if case.name == "past_the_end" else 0
    assert case_problems("triton", case, repeats=repeats) == []


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
def test_tokens(case: TokenCase) -> None:
    assert token_case_problems("triton", case) == []


def test_what_it_refuses() -> None:
    refused = {case.name for case in CASES if refusal("triton", case, device="cpu", dtype=torch.float32) is not None}
    assert refused == {case.name for case in CASES} - {case.name for case in SWIGLU}
