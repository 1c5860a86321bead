"""Tests of the kernels of the fused router, for a process with TRITON_INTERPRET=1: see test_fused_router.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from coterie_routing import RouterConfig, route
from coterie_routing.fused_router import fused_route, launch
from triton.runtime import interpreter

from routing.fused_cases import CASES, FusedCase, assert_right, fused, inputs, outputs
from routing.row_cases import filled_with_garbage

NAN, INF = float("nan"), float("inf")

# numpy warns about numbers in places past the end, which nobody stores.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def garbage_in_new_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", filled_with_garbage(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled_with_garbage(torch.empty_like))


@pytest.fixture(autouse=True)
def quick_reductions(monkeypatch):
    # The interpreter reduces with a function of ours number by number; these functions take whole arrays as well, here
    # one half of what is left with the other: blocks have powers of two.
    def reduce(self, tensors):
        tensors, axis = self.unravel(tensors, self.axis)
        found = tensors
        while (size := found[0].handle.data.shape[axis]) > 1:
            halves = [np.split(one.handle.data, [size // 2], axis) for one in found]
            left, right = (
                [self.to_tensor(half, one.dtype) for half, one in zip(side, tensors, strict=True)]
                for side in zip(*halves, strict=True)
            )
            found = self.combine_fn.fn(*left, *right)
        return [
            self.to_tensor(one.handle.data.squeeze(axis), tensor.dtype)
            for one, tensor in zip(found, tensors, strict=True)
        ]

    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_output_and_gradient(case):
    assert_right(case)


@pytest.mark.parametrize("only", range(4))
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_gradients_of_one_output_alone(score, only):
    assert_right(FusedCase(tokens=33, width=20, experts=9, top_k=3, score=score), only=only)


def test_sums_in_several_steps(monkeypatch):
    monkeypatch.setattr(launch, "_FP32_TILE", replace(launch._FP32_TILE, promote=2))
    monkeypatch.setattr(launch, "_ADDED_BLOCKS", 2)
    assert_right(FusedCase(tokens=200, width=80, experts=9, top_k=2))


def test_no_gradient_where_none_is_asked_for():
    case = FusedCase(tokens=9, width=20, experts=9, top_k=3)
    x_TD, weight_ED, *_ = inputs(case)
    both = torch.autograd.grad(outputs(fused(case, x_TD, weight_ED, None, None))[1].square().sum(), [x_TD, weight_ED])
    for place, frozen in ((0, (x_TD, weight_ED.detach())), (1, (x_TD.detach(), weight_ED))):
        scores_TE = fused(case, *frozen, None, None).scores_TE
        (alone,) = torch.autograd.grad(scores_TE.square().sum(), [one for one in frozen if one.requires_grad])
        assert torch.equal(alone, both[place])
    with torch.no_grad():
        assert not fused(case, x_TD, weight_ED, None, None).scores_TE.requires_grad


def test_a_second_derivative_is_refused():
    case = FusedCase(tokens=3, width=4, experts=3, top_k=1, renormalize=False)
    x_TD, weight_ED, *_ = inputs(case)
    routing = fused(case, x_TD, weight_ED, None, None)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(routing.weights_TK.square().sum(), x_TD, create_graph=True)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_bad_rows_are_as_in_the_reference(score, renormalize, biased):
    # Times 1 each weight is a logit; times 0 the infinite ones are NaN.
    weight_ED = torch.tensor([[1.0], [-INF], [2.0], [0.5], [-INF], [3.0]])
    x_TD = torch.tensor([[1.0], [0.0], [2.0], [NAN], [INF], [-1.0]])
    is_real_T = torch.tensor([True, True, False, True, True, True])
    bias_E = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.0]) if biased else None
    for top_k in (2, 5):
        ours = fused_route(
            x_TD,
            weight_ED,
            top_k=top_k,
            score_function=score,
            renormalize=renormalize,
            weight_scale=1.0,
            selection_bias_E=bias_E,
            is_real_T=is_real_T,
        )
        config = RouterConfig(
            d_model=1,
            num_experts=6,
            top_k=top_k,
            score_function=score,
            renormalize=renormalize,
            selection_bias=biased,
        )
        expected = route(x_TD @ weight_ED.T, config, selection_bias_E=bias_E, is_real_T=is_real_T)
        assert torch.equal(ours.ids_TK, expected.ids_TK)
        assert torch.equal(ours.counts_E, expected.counts_E)
        assert ours.num_bad.item() == expected.sums.num_bad.item() == 5
        torch.testing.assert_close(ours.weights_TK, expected.weights_TK, equal_nan=True)
        torch.testing.assert_close(ours.scores_TE, expected.scores_TE, equal_nan=True)


@pytest.mark.parametrize(("value", "num_bad"), [(NAN, 6), (-INF, 0)])
def test_a_bias_that_is_nan_ranks_its_expert_last_and_makes_every_token_bad(value, num_bad):
    case = FusedCase(tokens=9, width=20, experts=9, top_k=8, score="sigmoid")
    x_TD, weight_ED, *_ = inputs(case)
    is_real_T = torch.arange(9) % 3 > 0
    bias_E = torch.zeros(9)
    bias_E[4] = value
    routing = fused(case, x_TD, weight_ED, bias_E, is_real_T)
    assert routing.counts_E.tolist() == [6, 6, 6, 6, 0, 6, 6, 6, 6]
    assert routing.num_bad.item() == num_bad


def test_sigmoids_that_underflow():
    # All sigmoids are below 1e-30, their probabilities are not.
    x_TD, weight_ED = torch.tensor([[1.0], [2.0]]), torch.tensor([[-100.0], [-101.0], [-103.0]])
    ours = fused_route(x_TD, weight_ED, top_k=2, score_function="sigmoid", renormalize=True, weight_scale=1.0)
    expected = (x_TD @ weight_ED.T).double().softmax(-1).sum(0)
    torch.testing.assert_close(ours.probability_sums_E, expected, rtol=1e-5, atol=1e-8)
    assert ours.weights_TK.isfinite().all()


def test_strides_of_inputs_and_gradients_do_not_matter():
    case = FusedCase(tokens=20, width=12, experts=8, top_k=2)
    x_TD, weight_ED, *_ = inputs(case)
    results = []
    for x, weight in ((x_TD, weight_ED), (x_TD.detach().T.contiguous().T, weight_ED.detach().T.contiguous().T)):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        routing = fused(case, x, weight, None, None)
        grad_TE = torch.arange(8.0)[None, :].expand(20, 8)
        results.append([routing.ids_TK, *torch.autograd.grad(routing.scores_TE, [x, weight], grad_TE)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_same_result_in_each_run():
    case = FusedCase(tokens=129, width=20, experts=24, top_k=4, masked=True)
    results = []
    for _ in range(2):
        x_TD, weight_ED, bias_E, is_real_T = inputs(case)
        routing = fused(case, x_TD, weight_ED, bias_E, is_real_T)
        results.append([*outputs(routing), *torch.autograd.grad(outputs(routing)[0].sum(), [x_TD, weight_ED])])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_descriptors_are_built_once_the_thread_has_a_context(monkeypatch):
    events = []
    build = launch.TensorDescriptor.from_tensor

    def from_tensor(*values):
        events.append("descriptor")
        return build(*values)

    monkeypatch.setattr(launch.TensorDescriptor, "from_tensor", from_tensor)
    monkeypatch.setattr(launch, "_ensure_context", lambda device: events.append("context"))
    case = FusedCase(tokens=64, width=64, experts=8, top_k=2)
    fused(case, *inputs(case))
    assert events == ["context", "descriptor", "descriptor"]
