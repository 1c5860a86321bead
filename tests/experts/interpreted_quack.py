"""The `quack` back-end on a stand-in for its package, for a process with TRITON_INTERPRET=1."""

from collections.abc import Iterator

import pytest
import torch
from coterie_experts.conformance import CASES, TOKEN_CASES, Case, TokenCase, case_problems, token_case_problems
from coterie_experts.grouped_swiglu import quack_native, triton_launch

from experts import fake_quack

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_scratch", "stand_in"),
]
SWIGLU = tuple(case for case in CASES if case.activation.name == "swiglu" and not case.bias)
SWIGLU_TOKENS = tuple(case for case in TOKEN_CASES if case.activation.name == "swiglu" and not case.bias)
# The interpreter needs half a second for each run.
SMALL = tuple(case for case in SWIGLU if case.name not in ("edges", "long_edges", "idle", "wide_hidden", "wide_model"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_quack.install()
    monkeypatch.setattr(quack_native, "obstacle", lambda **sizes: None)
    yield
    monkeypatch.delitem(fake_quack.sys.modules, "quack.gemm_interface")
    monkeypatch.delitem(fake_quack.sys.modules, "quack")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_rows(case: Case) -> None:
    assert case_problems("quack", case, repeats=0) == []


@pytest.mark.parametrize("case", SWIGLU_TOKENS, ids=lambda case: case.name)
def test_tokens(case: TokenCase) -> None:
    assert token_case_problems("quack", case) == []


@pytest.mark.parametrize("num_rows", [1, 17, 5000])
def test_chosen_rows_are_cleared_and_no_others(num_rows: int) -> None:
    width = 40_000 if num_rows == 1 else 24
    rows = torch.ones(num_rows + 1, width)
    chosen = torch.arange(num_rows) % 3 == 0
    triton_launch.clear_chosen_rows(rows[:num_rows], chosen)
    assert torch.equal(rows[:num_rows].any(1), ~chosen)
    assert rows[num_rows].all()
