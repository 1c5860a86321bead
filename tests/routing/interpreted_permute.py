"""Tests of the Triton kernels of permute and un-permute, for a process with TRITON_INTERPRET=1: see test_permute.py."""

import ast
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from coterie_routing.permutation import permute, triton_kernels, unpermute
from coterie_routing.row_map import map_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from routing.row_cases import KINDS, filled_with_garbage, ids_of_kind

# Where a GPU gives NaN in silence, numpy, which the interpreter runs on, also warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
POINTERS_TO_ROWS = ("x_ptr", "rows_ptr", "y_ptr", "grad_ptr", "grad_rows_ptr")


@pytest.fixture(autouse=True)
def garbage_in_new_memory(monkeypatch):
    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled_with_garbage(getattr(owner, name)))


def results(ids_TK, num_experts, width, backend):
    """Return every output and every gradient; NaN stands wherever nothing may look."""
    generator = torch.Generator().manual_seed(0)
    (tokens, top_k), row_map = ids_TK.shape, map_rows(ids_TK, num_experts)
    x_TD = torch.randn(tokens, width, generator=generator, requires_grad=True)
    rows_ND = torch.randn(tokens * top_k, width, generator=generator)
    rows_ND[row_map.slot_N < 0] = torch.nan
    weights_TK = torch.randn(tokens, top_k, generator=generator)
    weights_TK[ids_TK < 0] = torch.nan
    grad_TD = torch.randn(tokens, width, generator=generator)
    grad_TD[(ids_TK < 0).all(1)] = torch.inf
    rows_ND.requires_grad_()
    weights_TK.requires_grad_()
    permuted_ND = permute(x_TD, row_map, backend=backend)
    sum_TD = unpermute(rows_ND, row_map, backend=backend)
    weighted_TD = unpermute(rows_ND, row_map, weights_TK, backend=backend)
    frozen_TD = unpermute(rows_ND, row_map, weights_TK.detach(), backend=backend)
    return {
        "permute": permuted_ND,
        "permute backward": torch.autograd.grad(permuted_ND, x_TD, rows_ND.detach())[0],
        "unpermute": sum_TD,
        "unpermute backward": torch.autograd.grad(sum_TD, rows_ND, grad_TD)[0],
        "weighted unpermute": weighted_TD,
        "rows": torch.autograd.grad(weighted_TD, rows_ND, grad_TD, retain_graph=True)[0],
        "rows, weights fixed": torch.autograd.grad(frozen_TD, rows_ND, grad_TD)[0],
        "weights": torch.autograd.grad(weighted_TD, weights_TK, grad_TD)[0],
    }


def assert_equals_reference(ids_TK, num_experts, width):
    found, expected = (results(ids_TK, num_experts, width, backend) for backend in ("triton", "reference"))
    for name, value in expected.items():
        assert not value.isnan().any(), name
        if name == "weights":
            # Two orders of the same fp32 sum.
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6 * width**0.5)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_with_ids_of_every_kind(kind):
    assert_equals_reference(ids_of_kind(kind, 6, 2, 3), 3, 5)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "width"),
    [
        (0, 2, 3, 4),
        (3, 0, 2, 4),
        (1, 1, 1, 1),
        (5, 3, 257, 64),
        # Two groups of choices, the second not full, and two blocks of columns, likewise.
        (3, 10, 8, 1100),
        (2, 2, 3, 2048),
    ],
)
def test_kernels_at_the_edges_of_their_blocks(tokens, top_k, num_experts, width):
    assert_equals_reference(ids_of_kind("some not routed", tokens, top_k, num_experts), num_experts, width)


def test_one_token_whose_choices_are_all_not_routed_between_others():
    assert_equals_reference(torch.tensor([[0, 1], [-1, -1], [1, 0]]), 2, 3)


@triton.jit
def _write_address(row_ptr, column_ptr, out_ptr, width):
    row, column = tl.load(row_ptr), tl.load(column_ptr)
    tl.store(out_ptr, triton_kernels._address(row, width, column))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31 - 1), st.integers(1, 2**20), st.data(), st.sampled_from([torch.int32, torch.int64]))
@example(2**20, 2**11, None, torch.int32)
@example(2**31 - 1, 2**20, None, torch.int32)
def test_addresses_are_exact_beyond_2_to_the_31(row, width, data, dtype):
    # Rows reach the kernels as int64 from the map, and as int32 where a row's number is that of the program.
    column = width - 1 if data is None else data.draw(st.integers(0, width - 1))
    out = torch.empty((), dtype=torch.int64)
    _write_address[(1,)](torch.tensor(row, dtype=dtype), torch.tensor(column, dtype=torch.int32), out, width)
    assert out.item() == row * width + column


def test_every_address_of_a_row_is_made_by_that_function():
    sums = 0
    for function in ast.walk(ast.parse(Path(triton_kernels.__file__).read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        named = {
            assignment.targets[0].id: assignment.value
            for assignment in ast.walk(function)
            if isinstance(assignment, ast.Assign) and isinstance(assignment.targets[0], ast.Name)
        }
        for one in ast.walk(function):
            if isinstance(one, ast.BinOp) and isinstance(one.left, ast.Name) and one.left.id in POINTERS_TO_ROWS:
                address = named[one.right.id] if isinstance(one.right, ast.Name) else one.right
                assert isinstance(address, ast.Call), ast.unparse(one)
                assert address.func.id == "_address", ast.unparse(one)
                sums += 1
    assert sums == 8
