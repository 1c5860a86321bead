import importlib.util
from pathlib import Path

import pytest
import torch
from coterie_routing.permutation import permute, unpermute
from coterie_routing.row_map import map_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interpreted import needs_triton, run_interpreted
from torch import Tensor

from routing.row_cases import KINDS, SIZES, ids_of_kind

NAN, INF = float("nan"), float("inf")
# Token 1 has one choice, token 3 none; the rows are those of choices 1, 4 | 0, 3 and three that stand for nothing.
IDS = torch.tensor([[2, 0], [-1, 2], [0, -1], [-1, -1]])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_permute(x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return the rows by a loop over the slots of the plain map."""
    rows_ND = torch.zeros(ids_TK.numel(), x_TD.shape[1], dtype=x_TD.dtype)
    for row, slot in enumerate(map_rows(ids_TK, num_experts).slot_N.tolist()):
        if slot >= 0:
            rows_ND[row] = x_TD[slot // ids_TK.shape[1]]
    return rows_ND


def plain_unpermute(rows_ND: Tensor, ids_TK: Tensor, num_experts: int, weights_TK: Tensor | None = None) -> Tensor:
    """Return the sums by loops over tokens and choices, in fp32."""
    row_TK = map_rows(ids_TK, num_experts).row_TK.tolist()
    y_TD = torch.zeros(ids_TK.shape[0], rows_ND.shape[1])
    for t, rows in enumerate(row_TK):
        for k, row in enumerate(rows):
            if row >= 0:
                weighted_D = rows_ND[row].float() if weights_TK is None else rows_ND[row].float() * weights_TK[t, k]
                y_TD[t] = y_TD[t] + weighted_D
    return y_TD.to(rows_ND.dtype)


@st.composite
def cases(draw):
    num_experts, top_k, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    kind = draw(st.sampled_from(KINDS))
    ids_TK = ids_of_kind(kind, tokens, top_k, num_experts, seed=draw(st.integers(0, 99)))
    return ids_TK, num_experts, draw(st.integers(1, 7))


def test_written_out():
    row_map = map_rows(IDS, 3)
    x_TD = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]], requires_grad=True)
    rows_ND = permute(x_TD, row_map)
    assert rows_ND.tolist() == [[1, 2], [5, 6], [1, 2], [3, 4], [0, 0], [0, 0], [0, 0], [0, 0]]
    grad_ND = torch.tensor([[1.0, 1], [2, 3], [10, 20], [4, 5], [NAN, NAN], [NAN, NAN], [NAN, NAN], [NAN, NAN]])
    (grad_TD,) = torch.autograd.grad(rows_ND, x_TD, grad_ND)
    assert grad_TD.tolist() == [[11, 21], [4, 5], [2, 3], [0, 0]]


def test_weighted_sum_written_out():
    row_map = map_rows(IDS, 3)
    rows_ND = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8], *[[NAN, NAN]] * 4], requires_grad=True)
    weights_TK = torch.tensor([[0.5, 2], [NAN, 3], [0.25, INF], [NAN, NAN]], requires_grad=True)
    y_TD = unpermute(rows_ND, row_map, weights_TK)
    assert y_TD.tolist() == [[4.5, 7], [21, 24], [0.75, 1], [0, 0]]
    grad_TD = torch.tensor([[1.0, 10], [2, 20], [4, 40], [NAN, INF]])
    grad_ND, grad_weights_TK = torch.autograd.grad(y_TD, (rows_ND, weights_TK), grad_TD)
    assert grad_ND.tolist() == [[2, 20], [1, 10], [0.5, 5], [6, 60], *[[0, 0]] * 4]
    assert grad_weights_TK.tolist() == [[65, 21], [0, 174], [172, 0], [0, 0]]


@settings(deadline=None, max_examples=100)
@given(cases())
def test_reference_is_the_plain_loop(case):
    ids_TK, num_experts, width = case
    (tokens, top_k), row_map = ids_TK.shape, map_rows(ids_TK, num_experts)
    x_TD = random(tokens, width, seed=1).requires_grad_()
    rows_ND = random(tokens * top_k, width, seed=2).requires_grad_()
    weights_TK = random(tokens, top_k, seed=3).requires_grad_()
    permuted_ND, y_TD = permute(x_TD, row_map), unpermute(rows_ND, row_map)
    weighted_TD = unpermute(rows_ND, row_map, weights_TK)
    frozen_TD = unpermute(rows_ND, row_map, weights_TK.detach())
    assert torch.equal(permuted_ND, plain_permute(x_TD, ids_TK, num_experts))
    assert torch.equal(y_TD, plain_unpermute(rows_ND, ids_TK, num_experts))
    assert torch.equal(weighted_TD, plain_unpermute(rows_ND, ids_TK, num_experts, weights_TK))

    grad_TD, grad_ND = random(tokens, width, seed=4), random(tokens * top_k, width, seed=5)
    assert torch.equal(
        torch.autograd.grad(permuted_ND, x_TD, grad_ND)[0], plain_unpermute(grad_ND, ids_TK, num_experts)
    )
    assert torch.equal(torch.autograd.grad(y_TD, rows_ND, grad_TD)[0], plain_permute(grad_TD, ids_TK, num_experts))
    grad_rows_ND, grad_weights_TK = torch.autograd.grad(weighted_TD, (rows_ND, weights_TK), grad_TD)
    weight_N = plain_permute(weights_TK.detach().reshape(-1, 1), ids_TK.reshape(-1, 1), num_experts)
    assert torch.equal(grad_rows_ND, plain_permute(grad_TD, ids_TK, num_experts) * weight_N)
    assert torch.equal(torch.autograd.grad(frozen_TD, rows_ND, grad_TD)[0], grad_rows_ND)
    for t, rows in enumerate(row_map.row_TK.tolist()):
        for k, row in enumerate(rows):
            terms_D = rows_ND[row].double() * grad_TD[t].double() if row >= 0 else torch.zeros(1)
            tolerance = 1e-6 * terms_D.abs().sum().item()
            assert grad_weights_TK[t, k].item() == pytest.approx(terms_D.sum().item(), rel=0, abs=tolerance)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (5, 3)])
def test_gradcheck_in_fp64(tokens, top_k, kind, weighted):
    row_map = map_rows(ids_of_kind(kind, tokens, top_k, 4), 4)
    double = {"dtype": torch.float64}
    x_TD = random(tokens, 3, seed=1, **double).requires_grad_()
    rows_ND = random(tokens * top_k, 3, seed=2, **double).requires_grad_()
    weights_TK = random(tokens, top_k, seed=3, **double).requires_grad_() if weighted else None
    assert torch.autograd.gradcheck(lambda x_TD: permute(x_TD, row_map), x_TD)
    assert torch.autograd.gradcheck(lambda *inputs: unpermute(inputs[0], row_map, *inputs[1:]), (rows_ND, weights_TK))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_the_fp32_result_rounded_once(dtype):
    row_map = map_rows(ids_of_kind("some not routed", 65, 6, 8), 8)
    weights_TK = random(65, 6, seed=3)
    found, expected = [], []
    for results, wide in ((found, False), (expected, True)):
        x_TD, rows_ND = random(65, 16, seed=1).to(dtype), random(390, 16, seed=2).to(dtype)
        grad_TD, grad_ND = random(65, 16, seed=4).to(dtype), random(390, 16, seed=5).to(dtype)
        if wide:
            x_TD, rows_ND, grad_TD, grad_ND = (tensor.float() for tensor in (x_TD, rows_ND, grad_TD, grad_ND))
        leaves = [tensor.clone().requires_grad_() for tensor in (x_TD, rows_ND, weights_TK)]
        permuted_ND, y_TD = permute(leaves[0], row_map), unpermute(leaves[1], row_map, leaves[2])
        results += [permuted_ND, y_TD, *torch.autograd.grad((permuted_ND, y_TD), leaves, (grad_ND, grad_TD))]
    assert not torch.equal(expected[1], expected[1].to(dtype).float()), "the case must need rounding"
    for value, wide in zip(found[:4], expected[:4], strict=True):
        assert value.dtype == dtype
        assert torch.equal(value, wide.to(dtype))
    assert found[4].dtype == torch.float32
    assert torch.equal(found[4], expected[4])


def test_the_sum_runs_in_the_order_of_the_choices():
    # 1 is lost beside 2^24, so each order of three terms has its own sum.
    row_map = map_rows(torch.tensor([[2, 0, 1], [1, 2, 0]]), 3)
    value = {0: [0.0, 0.0, 2.0**24], 1: [1.0, 2.0**24, 1.0]}
    rows_ND = torch.zeros(6, 1)
    for t, k in ((t, k) for t in range(2) for k in range(3)):
        rows_ND[row_map.row_TK[t, k]] = value[t][k]
    assert unpermute(rows_ND, row_map).tolist() == [[2.0**24], [2.0**24]]
    for k, term in enumerate([2.0**24, 1.0, -(2.0**24)]):
        rows_ND[row_map.row_TK[0, k]] = term
    assert unpermute(rows_ND, row_map)[0].item() == 0.0


def test_gradients_of_any_strides():
    row_map = map_rows(ids_of_kind("uneven", 7, 2, 3), 3)
    x_DT = random(4, 7, seed=1).requires_grad_()
    permute(x_DT.T, row_map).sum().backward()
    assert torch.equal(x_DT.grad, torch.full((4, 7), 2.0))


def test_rows_are_kept_for_backward_only_if_the_weights_need_a_gradient():
    row_map = map_rows(ids_of_kind("uneven", 7, 2, 3), 3)
    rows_ND, weights_TK = random(14, 5, seed=2).requires_grad_(), random(7, 2, seed=3)
    for needs_gradient in (False, True):
        kept = []

        def keep(tensor: Tensor, kept: list[tuple[int, ...]] = kept) -> Tensor:
            kept.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            unpermute(rows_ND, row_map, weights_TK.clone().requires_grad_(needs_gradient))
        assert ((14, 5) in kept) is needs_gradient


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: permute(torch.zeros(3, 5), m), r"shape \(T, D\) with T = 4 .* got torch.float32 of shape \(3, 5\)"),
        (lambda m: permute(torch.zeros(4), m), r"got torch.float32 of shape \(4,\)"),
        (lambda m: permute(torch.zeros(4, 5).int(), m), r"in bf16, fp16, fp32 or fp64, got torch.int32"),
        (lambda m: permute(torch.zeros(4, 5, device="meta"), m), "tokens are on meta but the row map is on cpu"),
        (lambda m: unpermute(torch.zeros(4, 5), m), r"shape \(N, D\) with N = 8 .* of shape \(4, 5\)"),
        (lambda m: unpermute(torch.zeros(8, 5), m, torch.zeros(2, 4)), r"weights of shape \(4, 2\), .*\(2, 4\)"),
        (lambda m: unpermute(torch.zeros(8, 5), m, torch.zeros(4, 2).bfloat16()), "torch.float32 on cpu, got torch.bf"),
        (lambda m: unpermute(torch.zeros(8, 5).double(), m, torch.zeros(4, 2)), "torch.float64 on cpu, got torch.fl"),
        (lambda m: unpermute(torch.zeros(8, 5), m, torch.zeros(4, 2, device="meta")), "on cpu, got .* on meta"),
        (lambda m: permute(torch.zeros(4, 5), m, backend="tilelang"), "must be one of auto, reference, triton"),
        (lambda m: unpermute(torch.zeros(8, 5).double(), m, backend="triton"), "sums are fp32, too coarse"),
    ],
)
def test_bad_input_is_refused(call, message):
    if "fp32, too coarse" in message and importlib.util.find_spec("triton") is None:
        message = "triton is not installed"
    with pytest.raises(ValueError, match=message):
        call(map_rows(IDS, 3))


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), SIZES)
def test_each_is_the_backward_pass_of_the_other(tokens, top_k, num_experts):
    row_map = map_rows(ids_of_kind("some not routed", tokens, top_k, num_experts), num_experts)
    x_TD = random(tokens, 3, seed=1).requires_grad_()
    rows_ND = random(tokens * top_k, 3, seed=2).requires_grad_()
    (grad_TD,) = torch.autograd.grad(permute(x_TD, row_map), x_TD, rows_ND.detach())
    (grad_ND,) = torch.autograd.grad(unpermute(rows_ND, row_map), rows_ND, x_TD.detach())
    assert torch.equal(grad_TD, unpermute(rows_ND, row_map))
    assert torch.equal(grad_ND, permute(x_TD, row_map))


@needs_triton
def test_kernels_under_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_permute.py"))


def test_a_second_derivative_is_refused_and_not_silently_wrong():
    x_TD = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    row_map = map_rows(torch.tensor([[0]]), 1)
    y = (permute(x_TD * 1, row_map) ** 3).sum() + x_TD.sum() ** 2
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(y, x_TD, create_graph=True)
    weights_TK = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(unpermute(x_TD * 1, row_map, weights_TK).sum(), x_TD, create_graph=True)
