import math

import pytest
import torch
from coterie_routing import RouterConfig, balance_terms, route, smooth_choices, squared_load_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import reference

few = settings(deadline=None, max_examples=25)


def test_smooth_choices_by_hand():
    # Top-2 of probabilities .5 .25 .15 .1: the best not chosen is .15, the last chosen .25.
    logits_TE = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64).log()
    routing = route(logits_TE, RouterConfig(d_model=1, num_experts=4, top_k=2))
    for temperature in (1.0, 0.5, 2.0):
        odds = [ratio ** (1 / temperature) for ratio in (0.5 / 0.15, 0.25 / 0.15, 0.15 / 0.25, 0.1 / 0.25)]
        expected = [odd / (1 + odd) for odd in odds]
        assert smooth_choices(routing, temperature)[0].tolist() == pytest.approx(expected, rel=1e-12)


@few
@given(
    st.integers(1, 6),
    st.integers(2, 6),
    st.sampled_from(["softmax", "sigmoid", "softmax_of_chosen"]),
    st.booleans(),
    st.floats(0.2, 3.0),
    st.integers(0, 2**16),
    st.data(),
)
def test_smooth_choices_and_their_gradient_equal_a_loop(
    tokens, num_experts, score_function, with_bias, temperature, seed, data
):
    top_k = data.draw(
        st.integers(2 if score_function == "softmax_of_chosen" else 1, num_experts - 1)
        if num_experts > 2
        else st.just(1)
    )
    if top_k == 1 and score_function == "softmax_of_chosen":
        score_function = "softmax"
    is_real_T = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    is_real_T[0] = True
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float64).requires_grad_()
    bias_E = torch.randn(num_experts, generator=generator) if with_bias else None
    config = RouterConfig(
        d_model=1,
        num_experts=num_experts,
        top_k=top_k,
        score_function=score_function,
        renormalize=top_k > 1,
        selection_bias=with_bias,
    )
    routing = route(logits_TE, config, selection_bias_E=bias_E, is_real_T=is_real_T)
    smooth_E = smooth_choices(routing, temperature)[0]
    expected_E = reference.loop_smooth_choices(routing.scores_TE, routing.ids_TK, temperature)
    torch.testing.assert_close(smooth_E, expected_E, rtol=1e-12, atol=1e-14)
    factor_E = torch.randn(num_experts, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((smooth_E * factor_E).sum(), logits_TE, retain_graph=True)
    (expected,) = torch.autograd.grad((expected_E * factor_E).sum(), logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_gradcheck_of_smooth_choices_away_from_ties(score_function, top_k):
    generator = torch.Generator().manual_seed(0)
    # Logits at least 0.2 apart: no step of the check changes a choice or a boundary.
    logits_TE = torch.stack([torch.randperm(5, generator=generator) for _ in range(6)]).double() * 0.5
    logits_TE = (logits_TE + 0.1 * torch.rand(6, 5, generator=generator).double()).requires_grad_()
    config = RouterConfig(d_model=1, num_experts=5, top_k=top_k, score_function=score_function, renormalize=False)
    is_real_T = torch.arange(6) != 2
    assert torch.autograd.gradcheck(
        lambda logits_TE: smooth_choices(route(logits_TE, config, is_real_T=is_real_T), 0.7, num_units=3), logits_TE
    )


def test_a_cold_boundary_counts_the_choices_themselves(make_logits):
    routing = route(make_logits(50, 6, dtype=torch.float64), RouterConfig(d_model=1, num_experts=6, top_k=2))
    torch.testing.assert_close(smooth_choices(routing, 1e-9)[0], routing.counts_E.double(), rtol=0, atol=1e-3)


def test_the_gradient_acts_at_the_boundary_and_not_where_the_choice_is_clear():
    near, far = torch.tensor([[0.0, 0.1, -9.0]]), torch.tensor([[0.0, 9.0, -9.0]])
    config = RouterConfig(d_model=1, num_experts=3, top_k=1, renormalize=False)
    sizes = []
    for logits_TE in (near.requires_grad_(), far.requires_grad_()):
        smooth_BE = smooth_choices(route(logits_TE, config))
        sizes.append(torch.autograd.grad(smooth_BE[0, 1], logits_TE)[0].abs().max().item())
    assert sizes[0] == pytest.approx(0.25, abs=0.01), "half of it won, half lost"
    assert sizes[1] < 2e-4


def test_all_experts_chosen_are_surely_chosen_and_get_no_gradient(make_logits):
    logits_TE = make_logits(3, 4)
    smooth_BE = smooth_choices(route(logits_TE, RouterConfig(d_model=1, num_experts=4, top_k=4)))
    assert smooth_BE.tolist() == [[3.0] * 4]
    assert torch.autograd.grad(smooth_BE.sum(), logits_TE)[0].eq(0).all()


@pytest.mark.parametrize("low", [-60.0, -90.0, -120.0])
def test_margins_of_sigmoids_that_underflow_are_those_of_their_logits(low):
    config = RouterConfig(d_model=1, num_experts=3, top_k=1, renormalize=False, score_function="sigmoid")
    logits_TE = (low + torch.tensor([[math.log(4), 0.0, 0.0]])).requires_grad_()
    smooth_BE = smooth_choices(route(logits_TE, config))
    assert smooth_BE[0].tolist() == pytest.approx([0.8, 0.2, 0.2], abs=1e-5)
    (gradient,) = torch.autograd.grad(smooth_BE[0, 1], logits_TE)
    assert gradient[0].tolist() == pytest.approx([-0.16, 0.16, 0.0], abs=1e-5)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_that_underflow_give_no_nan(score_function):
    logits_TE = torch.tensor([[200.0, 0.0, -0.1, -200.0], [-200.0, 300.0, 0.0, 0.0]]).requires_grad_()
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function=score_function)
    routing = route(logits_TE, config)
    terms_L = balance_terms([routing], loss="squared_load", scope="micro_batch", top_k=2, step_tokens=2)
    assert terms_L.isfinite().all()
    assert torch.autograd.grad(terms_L.sum(), logits_TE)[0].isfinite().all()


def units_of(counts_BE, real_B):
    """Mean of 1 + CV^2 over units, weighted by their tokens."""
    return (squared_load_loss(counts_BE) * real_B).sum().item() / real_B.sum().item()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_value_is_the_mean_of_1_plus_cv_squared_over_the_units_of_the_scope(make_logits, top_k):
    config = RouterConfig(d_model=1, num_experts=5, top_k=top_k, renormalize=top_k > 1)
    logits_TE, is_real_T = make_logits(24, 5), torch.arange(24) % 5 != 1
    parts = [  # two micro-batches of two ranks, each of two sequences of three tokens
        [route(logits_TE[at : at + 6], config, is_real_T=is_real_T[at : at + 6]) for at in (start, start + 6)]
        for start in (0, 12)
    ]
    real = is_real_T.sum()

    def total(scope, **options):
        return sum(
            balance_terms(
                [routing],
                loss="squared_load",
                scope=scope,
                top_k=top_k,
                step_tokens=real,
                num_sequences=2,
                sum_over_ranks=lambda _, ranks=ranks: sum(one.counts_E for one in ranks)[None, None],
            ).item()
            for ranks in parts
            for routing in ranks
        )

    def expected(length):
        ids_TK = route(logits_TE, config, is_real_T=is_real_T).ids_TK
        counts_BE = torch.stack([torch.bincount(ids[ids >= 0], minlength=5) for ids in ids_TK.split(length)])
        return units_of(counts_BE, torch.stack([part.sum() for part in is_real_T.split(length)]))

    assert total("sequence") == pytest.approx(expected(3), rel=1e-12)
    assert total("micro_batch") == pytest.approx(expected(6), rel=1e-12)
    assert total("data_parallel") == pytest.approx(expected(12), rel=1e-12)
    if top_k < 5:
        assert len({round(expected(length), 6) for length in (3, 6, 12)}) == 3, "the case must tell the scopes apart"


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_gradient_is_that_of_the_smooth_load_priced_by_the_load(make_logits, score_function, temperature):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function=score_function)
    logits_TE, is_real_T = make_logits(9, 4, dtype=torch.float64), torch.arange(9) != 4
    routing = route(logits_TE, config, is_real_T=is_real_T)
    load_LE = torch.tensor([[7, 1, 0, 2]])
    terms_L = balance_terms(
        [routing],
        loss="squared_load",
        scope="step",
        top_k=2,
        step_tokens=30,
        load_LE=load_LE,
        temperature=temperature,
    )
    fraction_E = 2 * load_LE[0].double() / 10
    assert terms_L.item() == pytest.approx((fraction_E * routing.counts_E).sum().item() * 4 / 2**2 / 30, rel=1e-13)
    smooth_E = reference.loop_smooth_choices(routing.scores_TE, routing.ids_TK, temperature)
    # An even load must not pull: what an expert costs is what it costs above the mean.
    expected = (4 / 2**2 * (fraction_E - fraction_E.mean()) * smooth_E).sum() / 30
    (gradient,) = torch.autograd.grad(terms_L.sum(), logits_TE, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, logits_TE)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "data_parallel", "step"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_an_even_load_is_a_stationary_point(make_logits, scope, top_k):
    # Each token with all its rotations: every expert is chosen equally often, by margins of every size.
    base_TE = make_logits(5, 6, dtype=torch.float64).detach()
    logits_TE = torch.cat([base_TE.roll(shift, 1) for shift in range(6)]).requires_grad_()
    config = RouterConfig(d_model=1, num_experts=6, top_k=top_k, renormalize=top_k > 1)
    routing = route(logits_TE, config)
    assert routing.counts_E.unique().numel() == 1
    terms_L = balance_terms(
        [routing],
        loss="squared_load",
        scope=scope,
        top_k=top_k,
        step_tokens=30,
        sum_over_ranks=lambda counts: 2 * counts,
    )
    assert terms_L.item() == pytest.approx(1.0, rel=1e-13)
    assert torch.autograd.grad(terms_L.sum(), logits_TE)[0].abs().max().item() < 1e-16


def test_following_the_gradient_evens_the_load_of_gerrymandered_tokens():
    """700 tokens won by a hair and 300 clear ones, with one number for each expert to be learned."""
    hair = torch.tensor([[0.26, 0.2475, 0.2475, 0.245]]).repeat(70, 1)
    hair = hair * torch.exp(0.02 * torch.randn(70, 4, generator=torch.Generator().manual_seed(0)))
    clear = torch.full((30, 4), 0.001).scatter(1, (torch.arange(30) % 3 + 1)[:, None], 0.997)
    log_TE = torch.cat([hair, clear]).log()
    config = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False)
    shift_E = torch.zeros(4, requires_grad=True)
    losses = []
    for _ in range(60):
        routing = route(log_TE + shift_E, config)
        losses.append(squared_load_loss(routing.counts_E).item())
        (term,) = balance_terms([routing], loss="squared_load", scope="micro_batch", top_k=1, step_tokens=100)
        (gradient,) = torch.autograd.grad(term, shift_E)
        with torch.no_grad():
            shift_E -= 0.005 * gradient
    assert losses[0] > 1.5
    assert min(losses) < 1.03
    assert losses[-1] < 1.1


def test_a_temperature_that_is_not_above_zero_is_refused(make_logits):
    routing = route(make_logits(4, 3), RouterConfig(d_model=1, num_experts=3, top_k=2))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"temperature \({temperature}\) must be above 0; usual: 1.0"):
            smooth_choices(routing, temperature)
        with pytest.raises(ValueError, match="temperature"):
            balance_terms([routing], loss="squared_load", top_k=2, step_tokens=4, temperature=temperature)
    with pytest.raises(ValueError, match="4 tokens cannot be 3 sequences of one length"):
        smooth_choices(routing, num_units=3)
