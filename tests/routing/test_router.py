import dataclasses

import pytest
import torch
from coterie_routing import Router, RouterConfig, balance_loss, route, z_loss
from torch.nn.functional import linear

from routing import reference
from routing.cases import ROUTE_CASES, make_router

# A capacity is not causal, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::coterie_routing.CausalityWarning")


@pytest.mark.parametrize("case", ROUTE_CASES, ids=lambda case: case.name)
def test_hand_written_routings(case):
    config = RouterConfig(d_model=1, num_experts=len(case.logits[0]), **case.config)
    routing = route(
        torch.tensor(case.logits),
        config,
        selection_bias_E=None if case.bias is None else torch.tensor(case.bias),
        is_real_T=None if case.is_real is None else torch.tensor(case.is_real),
    )
    assert routing.ids_TK.tolist() == case.ids
    assert routing.ids_TK.dtype == routing.counts_E.dtype == torch.int64
    chosen_counts = case.chosen_counts or case.counts
    assert routing.counts_E.tolist() == case.counts
    assert routing.sums.counts_E.tolist() == chosen_counts
    assert routing.sums.num_tokens.item() == case.num_tokens
    assert routing.sums.num_dropped.item() == sum(chosen_counts) - sum(case.counts)
    assert routing.sums.num_bad.item() == 0
    assert routing.weights_TK.dtype == routing.scores_TE.dtype == routing.probabilities_TE.dtype == torch.float32
    rounding = {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(routing.weights_TK, torch.tensor(case.weights), **rounding)
    expected = torch.tensor(case.probability_sums, dtype=torch.float64)
    torch.testing.assert_close(routing.sums.probability_sums_E, expected, **rounding)
    torch.testing.assert_close(routing.probabilities_TE.sum(0, dtype=torch.float64), expected, **rounding)
    assert routing.sums.z_sum.item() == pytest.approx(case.z_sum, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (7, 7), (64, 6)])
def test_softmax_parity_with_hugging_face(make_logits, num_experts, top_k, renormalize):
    config = RouterConfig(d_model=1, num_experts=num_experts, top_k=top_k, renormalize=renormalize)
    ours_logits, their_logits = make_logits(33, num_experts), make_logits(33, num_experts)
    ours = route(ours_logits, config)
    ids_TK, weights_TK, scores_TE = reference.softmax_router(their_logits, top_k, renormalize)
    assert torch.equal(ours.ids_TK, ids_TK)
    assert torch.equal(ours.weights_TK, weights_TK)
    assert torch.equal(ours.scores_TE, scores_TE)
    assert torch.equal(ours.counts_E, torch.bincount(ids_TK.flatten(), minlength=num_experts))
    ours.weights_TK.square().sum().backward()
    weights_TK.square().sum().backward()
    torch.testing.assert_close(ours_logits.grad, their_logits.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sigmoid_and_bias_parity_with_hugging_face(make_logits, renormalize, scale):
    config = RouterConfig(
        d_model=1,
        num_experts=16,
        top_k=4,
        score_function="sigmoid",
        renormalize=renormalize,
        route_scale=scale,
        selection_bias=True,
    )
    bias_E = make_logits(1, 16, seed=5).detach()[0]
    ours_logits, their_logits = make_logits(33, 16), make_logits(33, 16)
    ours = route(ours_logits, config, selection_bias_E=bias_E)
    ids_TK, weights_TK, scores_TE = reference.sigmoid_router(their_logits, bias_E, 4, renormalize, scale)
    assert torch.equal(ours.ids_TK, ids_TK)
    without = dataclasses.replace(config, selection_bias=False)
    assert not torch.equal(ours.ids_TK, route(ours_logits, without).ids_TK)
    assert torch.equal(ours.weights_TK, weights_TK)
    assert torch.equal(ours.scores_TE, scores_TE)
    ours.weights_TK.square().sum().backward()
    weights_TK.square().sum().backward()
    torch.testing.assert_close(ours_logits.grad, their_logits.grad, rtol=1e-6, atol=1e-7)


def test_bf16_tokens_give_the_fp32_result_of_the_same_numbers():
    router = make_router(num_experts=8, d_model=32)
    x_bf16 = torch.randn(65, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    x_fp32 = x_bf16.detach().float().requires_grad_()
    ours, plain = router(x_bf16), router(x_fp32)
    assert ours.weights_TK.dtype == ours.scores_TE.dtype == torch.float32
    assert torch.equal(ours.weights_TK, plain.weights_TK)
    (gradient,) = torch.autograd.grad(ours.weights_TK.square().sum(), x_bf16)
    (expected,) = torch.autograd.grad(plain.weights_TK.square().sum(), x_fp32)
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, expected.to(torch.bfloat16))


def test_autocast_does_not_reach_the_router():
    router = make_router(num_experts=8, d_model=32)
    x_TD = torch.randn(65, 32, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x_TD, router.weight).dtype == torch.bfloat16
        inside = router(x_TD)
    outside = router(x_TD)
    assert torch.equal(inside.scores_TE, outside.scores_TE)
    assert inside.sums.z_sum.item() == outside.sums.z_sum.item()


def test_router_equals_route_of_one_linear_layer_with_every_gradient():
    router = make_router(num_experts=5, d_model=6, top_k=3)
    x_TD = torch.randn(17, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = router.weight.detach().clone().requires_grad_()
    plain = route(x_TD @ weight.T, router.config)
    ours = router(x_TD)
    assert torch.equal(ours.ids_TK, plain.ids_TK)

    def loss(routing):
        return routing.weights_TK[:, 0].sum() + balance_loss(routing.sums, top_k=3) + z_loss(routing.sums)

    ours_gradients = torch.autograd.grad(loss(ours), (x_TD, router.weight))
    plain_gradients = torch.autograd.grad(loss(plain), (x_TD, weight))
    for gradient, expected in zip(ours_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_in_fp64(make_logits, score_function, renormalize, masked):
    config = RouterConfig(
        d_model=1, num_experts=5, top_k=2, score_function=score_function, renormalize=renormalize, route_scale=1.5
    )
    is_real_T = torch.tensor([True, False, True, True]) if masked else None

    def outputs(logits_TE):
        routing = route(logits_TE, config, is_real_T=is_real_T)
        return routing.weights_TK, routing.scores_TE, routing.sums.probability_sums_E, routing.sums.z_sum

    assert torch.autograd.gradcheck(outputs, make_logits(4, 5, dtype=torch.float64))


def test_a_masked_row_reaches_nothing_whatever_stands_in_it():
    router = make_router()
    x_TD = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    is_real_T = torch.tensor([True, False, True, True, False, True])
    padded = x_TD.clone()
    padded[1] = float("nan")
    padded[4] = float("inf")
    padded.requires_grad_()
    alone = x_TD[is_real_T].requires_grad_()
    with_padding, without = router(padded, is_real_T), router(alone)

    assert with_padding.ids_TK[~is_real_T].eq(-1).all()
    assert with_padding.weights_TK[~is_real_T].eq(0).all()
    assert with_padding.scores_TE[~is_real_T].eq(0).all()
    assert torch.equal(with_padding.ids_TK[is_real_T], without.ids_TK)
    torch.testing.assert_close(with_padding.weights_TK[is_real_T], without.weights_TK, rtol=1e-6, atol=1e-7)
    assert torch.equal(with_padding.counts_E, without.counts_E)
    assert with_padding.sums.num_tokens.item() == 4

    def loss(routing):
        return (
            routing.weights_TK.square().sum()
            + balance_loss(routing.sums, top_k=2)
            + z_loss(routing.sums)
            + routing.scores_TE.square().sum()
        )

    x_gradient, weight_gradient = torch.autograd.grad(loss(with_padding), (padded, router.weight))
    x_expected, weight_expected = torch.autograd.grad(loss(without), (alone, router.weight))
    torch.testing.assert_close(weight_gradient, weight_expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x_gradient[is_real_T], x_expected, rtol=1e-5, atol=1e-6)
    assert x_gradient[~is_real_T].eq(0).all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_masked_logits_that_are_not_finite_leave_no_trace(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function=score_function)
    logits_TE = make_logits(3, 4).detach()
    logits_TE[1] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    logits_TE.requires_grad_()
    routing = route(logits_TE, config, is_real_T=torch.tensor([True, False, True]))
    loss = routing.weights_TK.square().sum() + balance_loss(routing.sums, top_k=2) + z_loss(routing.sums)
    (gradient,) = torch.autograd.grad(loss, logits_TE)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[1].eq(0).all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "mask"), [(0, None), (0, []), (3, [False] * 3)], ids=["T=0", "T=0 mask", "all pad"])
def test_no_tokens_give_zero_loss_and_zero_gradient(tokens, mask, score_function):
    router = make_router(score_function=score_function)
    x_TD = torch.randn(tokens, 6).requires_grad_()
    is_real_T = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    routing = router(x_TD, is_real_T)
    assert routing.ids_TK.shape == routing.weights_TK.shape == (tokens, 2)
    assert routing.counts_E.tolist() == [0, 0, 0, 0]
    loss = balance_loss(routing.sums, top_k=2) + z_loss(routing.sums) + routing.weights_TK.sum()
    assert loss.item() == 0
    loss.backward()
    assert router.weight.grad.eq(0).all()
    assert x_TD.grad.eq(0).all()


def test_the_bias_exists_only_if_asked_for_and_stays_fp32():
    assert list(make_router().state_dict()) == ["weight"]
    router = make_router(selection_bias=True)
    assert router.selection_bias.tolist() == [0, 0, 0, 0]
    router.selection_bias.fill_(1.001)  # bf16 would hold 1.0
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.selection_bias.dtype == torch.float32
    assert router.selection_bias[0].item() == pytest.approx(1.001, abs=1e-7)
    assert router.state_dict()["selection_bias"].dtype == torch.float32


def test_the_bias_changes_the_selection_of_the_module():
    router = make_router(selection_bias=True)
    x_TD = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    assert not router(x_TD).ids_TK[:, 0].eq(3).all()
    router.selection_bias[3] = 2.0
    assert router(x_TD).ids_TK[:, 0].eq(3).all()


def test_meta_device_then_real_values():
    config = RouterConfig(d_model=6, num_experts=4, top_k=2, selection_bias=True)
    router = Router(config, device="meta")
    assert router(torch.empty(3, 6, device="meta")).weights_TK.shape == (3, 2)
    router.to_empty(device="cpu").reset_parameters()
    assert router.selection_bias.tolist() == [0, 0, 0, 0]
    assert router.weight.std().item() == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_route_refuses_logits_of_low_precision(dtype):
    with pytest.raises(ValueError, match="needs fp32 or fp64 logits"):
        route(torch.zeros(3, 4, dtype=dtype), RouterConfig(d_model=1, num_experts=4, top_k=2))


def test_wrong_shapes_are_refused_with_both_numbers():
    router = make_router()
    with pytest.raises(ValueError, match=r"\(T, 6\), got \(2, 3, 6\)"):
        router(torch.zeros(2, 3, 6))
    with pytest.raises(ValueError, match=r"\(T, 6\), got \(3, 5\)"):
        router(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"\(T, 4\), got \(3, 5\)"):
        route(torch.zeros(3, 5), router.config)
    biased = dataclasses.replace(router.config, selection_bias=True)
    with pytest.raises(ValueError, match=r"\(4,\), got \(1,\)"):
        route(torch.zeros(3, 4), biased, selection_bias_E=torch.zeros(1))
    with pytest.raises(ValueError, match="selection_bias = True, but none was given"):
        route(torch.zeros(3, 4), biased)
    with pytest.raises(ValueError, match="selection_bias = False, but one was given"):
        route(torch.zeros(3, 4), router.config, selection_bias_E=torch.zeros(4))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4, dtype=torch.bool),
        torch.ones(3, 1, dtype=torch.bool),
        torch.ones(3),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool, device="meta"),
    ],
    ids=["length", "dimensions", "float", "integer", "device"],
)
def test_a_mask_that_does_not_fit_is_refused(mask):
    with pytest.raises(ValueError, match=r"is_real_T must be a bool tensor of shape \(3,\) on cpu"):
        make_router()(torch.zeros(3, 6), mask)
    with pytest.raises(ValueError, match=r"is_real_T must be a bool tensor of shape \(3,\) on cpu"):
        route(torch.zeros(3, 4), make_router().config, is_real_T=mask)


def test_the_module_has_no_state_but_its_weight_and_bias_and_evaluation_changes_nothing():
    torch.manual_seed(0)
    router = make_router(selection_bias=True, score_function="sigmoid", jitter=0.1, capacity_factor=1.0)
    before = {name: value.clone() for name, value in router.state_dict().items()}
    attributes = set(vars(router))
    x_TD = torch.randn(10, 6)
    router(x_TD)
    router.eval()
    with torch.no_grad():
        first, second = router(x_TD), router(x_TD)
    assert torch.equal(first.ids_TK, second.ids_TK)
    assert torch.equal(first.weights_TK, second.weights_TK)
    assert torch.equal(first.sums.probability_sums_E, second.sums.probability_sums_E)
    assert set(vars(router)) == attributes
    assert before.keys() == router.state_dict().keys() == {"weight", "selection_bias"}
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())


def test_a_bias_that_came_with_a_model_stays_as_it_is_in_training():
    router = make_router(selection_bias=True, score_function="sigmoid")
    bias_E = torch.tensor([0.3, -0.1, 0.0, 0.2])
    router.load_state_dict({"weight": router.weight.detach().clone(), "selection_bias": bias_E})
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    before = router.weight.detach().clone()
    for _ in range(3):
        router(torch.randn(10, 6)).weights_TK[:, 0].sum().backward()
        optimizer.step()
    assert not torch.equal(router.weight, before)
    assert torch.equal(router.selection_bias, bias_E)


def test_weights_come_from_scores_without_the_bias_in_value_and_gradient(make_logits):
    bias_E = torch.tensor([0.9, 0.0, -0.4, 0.2, 0.0])
    config = RouterConfig(d_model=1, num_experts=5, top_k=3, score_function="sigmoid", selection_bias=True)
    logits_TE = make_logits(11, 5)
    routing = route(logits_TE, config, selection_bias_E=bias_E)
    chosen_TK = logits_TE.sigmoid().gather(1, routing.ids_TK)
    expected_TK = chosen_TK / chosen_TK.sum(1, keepdim=True)
    torch.testing.assert_close(routing.weights_TK, expected_TK, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(routing.weights_TK[:, 0].sum(), logits_TE)
    (expected,) = torch.autograd.grad(expected_TK[:, 0].sum(), logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
