import dataclasses
import itertools

import pytest
import torch
from coterie_routing import Assignment, Router, RouterConfig, balance_loss, route, z_loss

from routing.cases import make_router


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (7, 7), (32, 4)])
def test_softmax_of_the_chosen_is_the_renormalised_softmax_and_the_form_of_gpt_oss(
    make_logits, num_experts, top_k, renormalize
):
    ours_logits, their_logits, plain_logits = (make_logits(33, num_experts) for _ in range(3))
    options = {"d_model": 1, "num_experts": num_experts, "top_k": top_k}
    ours = route(ours_logits, RouterConfig(**options, score_function="softmax_of_chosen", renormalize=renormalize))
    # gpt-oss in Hugging Face transformers: top-k of the logits, softmax of what was chosen.
    chosen_TK, ids_TK = torch.topk(their_logits, top_k, dim=-1)
    weights_TK = chosen_TK.softmax(-1)
    plain = route(plain_logits, RouterConfig(**options))
    assert torch.equal(ours.ids_TK, ids_TK)
    assert torch.equal(ours.weights_TK, weights_TK)
    torch.testing.assert_close(ours.weights_TK, plain.weights_TK, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours.scores_TE, plain.scores_TE), "what the losses price is the softmax over all experts"
    factor_TK = torch.randn(33, top_k, generator=torch.Generator().manual_seed(1))
    for routing_weights_TK in (ours.weights_TK, weights_TK, plain.weights_TK):
        (routing_weights_TK * factor_TK).sum().backward()
    torch.testing.assert_close(ours_logits.grad, their_logits.grad, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours_logits.grad, plain_logits.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("top_k", "trained_top_k"), [(2, 2), (2, 6), (6, 2), (3, 1)])
def test_another_k_than_the_trained_one_scales_by_the_square_root(
    make_logits, score_function, renormalize, top_k, trained_top_k
):
    options = dict(score_function=score_function, renormalize=renormalize, route_scale=1.7)
    config = RouterConfig(d_model=1, num_experts=8, top_k=top_k, **options)
    plain = route(make_logits(20, 8), config)
    scaled = route(make_logits(20, 8), dataclasses.replace(config, trained_top_k=trained_top_k))
    factor = (trained_top_k / top_k) ** (-0.5 if renormalize or score_function == "softmax_of_chosen" else 0.5)
    torch.testing.assert_close(scaled.weights_TK, plain.weights_TK * factor, rtol=1e-6, atol=0)
    assert torch.equal(scaled.ids_TK, plain.ids_TK)
    assert torch.equal(scaled.scores_TE, plain.scores_TE)
    assert torch.equal(scaled.sums.probability_sums_E, plain.sums.probability_sums_E)


def test_the_square_root_keeps_the_size_of_a_sum_of_independent_outputs():
    """The reason of the formula: K outputs of variance 1 with the same weight sum to a variance of K."""
    outputs_NK = torch.randn(20000, 8, generator=torch.Generator().manual_seed(0))
    trained = (outputs_NK / 8).sum(1).std().item()
    for top_k, renormalize in itertools.product((2, 4), (False, True)):
        config = RouterConfig(d_model=1, num_experts=8, top_k=top_k, trained_top_k=8, renormalize=renormalize)
        weights_K = route(torch.zeros(1, 8), config).weights_TK[0]
        assert (outputs_NK[:, :top_k] @ weights_K).std().item() == pytest.approx(trained, rel=0.03)


def jittered_logits(router, x_TD):
    """The logits of a router with the identity as its weight are its tokens."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(x_TD.shape[1]))
    return router(x_TD).scores_TE.log()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_multiplies_each_input_number_by_one_from_its_range_in_training_only(dtype):
    torch.manual_seed(0)
    router = Router(RouterConfig(d_model=16, num_experts=16, top_k=2, score_function="sigmoid", jitter=0.01))
    x_TD = torch.full((2000, 16), 0.5, dtype=dtype)
    factor_TD = torch.logit(jittered_logits(router, x_TD).exp().double()) / 0.5
    rounding = 2e-6
    assert factor_TD.min().item() >= 0.99 - rounding
    assert factor_TD.max().item() <= 1.01 + rounding
    # The whole range is used, evenly: mean 1, deviation 0.02 / sqrt(12) = 0.00577.
    assert factor_TD.min().item() < 0.9901
    assert factor_TD.max().item() > 1.0099
    assert factor_TD.mean().item() == pytest.approx(1.0, abs=2e-4)
    assert factor_TD.std().item() == pytest.approx(0.02 / 12**0.5, rel=0.02)
    router.eval()
    assert torch.equal(router(x_TD).scores_TE, x_TD.float().sigmoid())


def test_jitter_has_its_gradient_and_does_not_touch_the_tokens():
    router = make_router(num_experts=4, d_model=6, top_k=2, jitter=0.3)
    x_TD = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    before_TD = x_TD.detach().clone()
    torch.manual_seed(7)
    routing = router(x_TD)
    torch.manual_seed(7)
    noise_TD = torch.empty(5, 6).uniform_(0.7, 1.3)
    plain = route((x_TD * noise_TD) @ router.weight.T, router.config)
    assert torch.equal(x_TD.detach(), before_TD)
    torch.testing.assert_close(routing.scores_TE, plain.scores_TE, rtol=1e-6, atol=1e-7)
    for gradient, expected in zip(
        torch.autograd.grad(routing.weights_TK[:, 0].sum(), (x_TD, router.weight)),
        torch.autograd.grad(plain.weights_TK[:, 0].sum(), (x_TD, router.weight)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert not torch.equal(router(x_TD).scores_TE, router(x_TD).scores_TE)
        router.eval()
        assert torch.equal(router(x_TD).scores_TE, router(x_TD).scores_TE)


BAD_ROWS = [
    [float("nan")] * 6,
    [float("nan"), 1.0, 2.0, 3.0, 4.0, 5.0],
    [1.0, 2.0, float("inf"), 3.0, float("inf"), 0.0],
    [1.0, 2.0, -float("inf"), 3.0, 0.0, -float("inf")],
    [-float("inf")] * 6,
    [float("inf"), -float("inf"), float("nan"), 0.0, 0.0, 0.0],
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_function": "sigmoid"},
        {"score_function": "softmax_of_chosen"},
        {"selection_bias": True},
        {"score_function": "sigmoid", "selection_bias": True},
        {"num_groups": 3, "chosen_groups": 1},
        {"num_groups": 3, "chosen_groups": 2, "selection_bias": True, "score_function": "sigmoid"},
        {"capacity_factor": 0.5},
        {"capacity_factor": 4.0, "renormalize": False},
        {"selection": "expert_choice", "renormalize": False},
        {"assignment": Assignment(kind="random")},
    ],
    ids=str,
)
def test_bad_logits_give_valid_ids_a_count_and_no_harm_to_other_tokens(make_logits, options):
    good_TE = make_logits(7, 6).detach()
    logits_TE = torch.cat([good_TE[:3], torch.tensor(BAD_ROWS), good_TE[3:]])
    is_good_T = logits_TE.isfinite().all(1)
    config = RouterConfig(d_model=1, num_experts=6, top_k=2, **options)
    bias_E = torch.zeros(6) if config.selection_bias else None
    routing = route(logits_TE, config, selection_bias_E=bias_E)
    assert routing.sums.num_bad.item() == len(BAD_ROWS)
    assert routing.sums.num_tokens.item() == 13
    assert routing.ids_TK.min().item() >= -1
    assert routing.ids_TK.max().item() <= 5
    assert routing.counts_E.sum().item() == routing.ids_TK.ge(0).sum().item()
    for ids in routing.ids_TK.tolist():
        chosen = [expert for expert in ids if expert >= 0]
        assert len(chosen) == len(set(chosen))
    if config.capacity_factor is None and config.selection == "top_k":
        assert routing.ids_TK.min().item() >= 0
        # A fault upstream is not hidden: the first row of NaN gives weights of NaN.
        assert routing.weights_TK[3].isnan().all()
    assert routing.scores_TE[3].isnan().all()
    if config.assignment is None and config.capacity_factor is None and config.selection == "top_k":
        alone = route(good_TE, config, selection_bias_E=bias_E)
        assert torch.equal(routing.ids_TK[is_good_T], alone.ids_TK)
        assert torch.equal(routing.weights_TK[is_good_T], alone.weights_TK)
        assert alone.sums.num_bad.item() == 0
    masked = route(logits_TE, config, selection_bias_E=bias_E, is_real_T=is_good_T)
    assert masked.sums.num_bad.item() == 0, "padding is in no statistic"
    assert masked.sums.z_sum.isfinite()
    assert masked.scores_TE.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"score_function": "sigmoid"}, {"num_groups": 3, "chosen_groups": 3}], ids=str)
def test_a_bias_that_is_nan_ranks_its_expert_last_and_makes_every_token_bad(make_logits, options):
    logits_TE, is_real_T = make_logits(7, 6).detach(), torch.arange(7) != 2
    config = RouterConfig(d_model=1, num_experts=6, top_k=5, selection_bias=True, **options)
    for value, num_bad in ((float("nan"), 7), (-float("inf"), 0)):
        bias_E = torch.zeros(6)
        bias_E[4] = value
        routing = route(logits_TE, config, selection_bias_E=bias_E)
        assert routing.counts_E.tolist() == [7, 7, 7, 7, 0, 7]
        assert routing.sums.num_bad.item() == num_bad
        masked = route(logits_TE, config, selection_bias_E=bias_E, is_real_T=is_real_T)
        assert masked.sums.num_bad.item() == max(0, num_bad - 1)
    # A token that is bad by itself as well counts once.
    logits_TE[1, 3] = bias_E[4] = float("nan")
    assert route(logits_TE, config, selection_bias_E=bias_E).sums.num_bad.item() == 7


def test_a_bad_weight_or_token_is_counted_by_the_module_too():
    router = make_router()
    x_TD = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    x_TD[1, 2] = float("nan")
    x_TD[3, 0] = float("inf")
    assert router(x_TD).sums.num_bad.item() == 2
    assert router(x_TD, torch.tensor([True, False, True, True, True])).sums.num_bad.item() == 1


def test_minus_infinity_ranks_last_and_infinity_first():
    inf = float("inf")
    config = RouterConfig(d_model=1, num_experts=4, top_k=3, renormalize=False)
    logits_TE = torch.tensor([[-inf, 0.0, -1.0, -2.0], [0.0, inf, 1.0, float("nan")]])
    assert route(logits_TE, config).ids_TK.tolist() == [[1, 2, 3], [1, 2, 0]]


@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "softmax_of_chosen"},
        {"num_groups": 2, "chosen_groups": 1},
        {"capacity_factor": 1.0},
        {"selection": "expert_choice", "renormalize": False},
        {"assignment": Assignment(kind="zipf")},
        {"trained_top_k": 4, "jitter": 0.1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::coterie_routing.CausalityWarning")
def test_every_option_takes_no_tokens_all_padding_and_the_meta_device(options):
    router = make_router(**options)
    for x_TD, is_real_T in [
        (torch.zeros(0, 6), None),
        (torch.zeros(0, 6), torch.zeros(0, dtype=torch.bool)),
        (torch.full((3, 6), float("nan")), torch.zeros(3, dtype=torch.bool)),
    ]:
        router.weight.grad = None
        routing = router(x_TD, is_real_T)
        assert routing.ids_TK.eq(-1).all()
        assert routing.counts_E.tolist() == routing.sums.counts_E.tolist() == [0, 0, 0, 0]
        assert routing.sums.num_dropped.item() == routing.sums.num_tokens.item() == routing.sums.num_bad.item() == 0
        loss = routing.weights_TK.sum() + balance_loss(routing.sums, top_k=2) + z_loss(routing.sums)
        assert loss.item() == 0
        loss.backward()
        assert router.weight.grad.eq(0).all()
    on_meta = Router(router.config, device="meta")(torch.empty(4, 6, device="meta"))
    assert on_meta.weights_TK.device.type == on_meta.sums.z_sum.device.type == "meta"


@pytest.mark.parametrize("low", [0.0, -30.0, -90.0, -120.0, -1000.0])
def test_probabilities_of_sigmoids_are_right_where_the_sigmoids_underflow(low):
    logits_TE = (low + torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)).requires_grad_()
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function="sigmoid")
    ours_TE = logits_TE.detach().float().requires_grad_()
    routing = route(ours_TE, config)
    expected_TE = torch.nn.functional.logsigmoid(logits_TE).softmax(1)
    torch.testing.assert_close(
        routing.probabilities_TE.double(), expected_TE, rtol=1e-4 if low < -500 else 1e-6, atol=0
    )
    factor_E = torch.tensor([1.0, -2.0, 3.0, 0.5])
    (gradient,) = torch.autograd.grad((routing.probabilities_TE * factor_E).sum(), ours_TE)
    (expected,) = torch.autograd.grad((expected_TE * factor_E).sum(), logits_TE)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-3 if low < -500 else 1e-5, atol=1e-6)
