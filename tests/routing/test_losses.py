import math

import pytest
import torch
from coterie_routing import (
    LoadSums,
    RouterConfig,
    balance_loss,
    entropy_term,
    load_imbalance,
    orthogonality_loss,
    route,
    squared_load_loss,
    z_loss,
    z_term,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import reference
from routing.cases import LOAD_CASES, make_sums

few = settings(deadline=None, max_examples=40)


@pytest.mark.parametrize("case", LOAD_CASES, ids=lambda case: case.name)
def test_hand_written_losses(case):
    sums = make_sums(case.counts, case.probability_sums, case.num_tokens)
    load_E = None if case.load is None else torch.tensor(case.load)
    loss = balance_loss(sums, top_k=case.top_k, load_E=load_E)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(case.loss, rel=1e-15 * len(case.counts))


@few
@given(st.integers(1, 12), st.data())
def test_uniform_routing_gives_exactly_one_for_every_k(num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    rounds = data.draw(st.integers(1, 4))
    # Token t chooses experts t, t+1, ... t+k-1 (mod E): each expert is chosen equally often.
    tokens = num_experts * rounds
    sums = make_sums([top_k * rounds] * num_experts, [rounds] * num_experts, tokens)
    loss = balance_loss(sums, top_k=top_k).item()
    assert loss == pytest.approx(1.0, abs=num_experts * 2.0**-52)
    if num_experts & (num_experts - 1) == 0 and top_k & (top_k - 1) == 0:
        assert loss == 1.0


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [2, 3, 5, 8])
def test_uniform_routing_through_the_router_gives_exactly_one(score_function, top_k):
    config = RouterConfig(d_model=1, num_experts=8, top_k=top_k, score_function=score_function)
    # All scores are equal, and ties put every token on the first k experts: P is even, whatever the load.
    assert balance_loss(route(torch.zeros(5, 8), config).sums, top_k=top_k).item() == 1.0


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(2, 6), st.integers(0, 2**16), st.sampled_from(["softmax", "sigmoid"]), st.data())
def test_balance_loss_equals_a_loop_over_tokens(tokens, num_experts, seed, score_function, data):
    top_k = data.draw(st.integers(2, num_experts))
    is_real_T = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    is_real_T[0] = True
    logits_TE = torch.randn(
        tokens, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()
    config = RouterConfig(d_model=1, num_experts=num_experts, top_k=top_k, score_function=score_function)
    routing = route(logits_TE, config, is_real_T=is_real_T)
    loss = balance_loss(routing.sums, top_k=top_k)
    expected = reference.loop_balance_loss(routing.scores_TE, routing.ids_TK)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    (gradient,) = torch.autograd.grad(loss, logits_TE, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, logits_TE)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("top_k", [2, 3])
def test_k_times_ours_is_the_loss_of_hugging_face(make_logits, top_k):
    config = RouterConfig(d_model=1, num_experts=6, top_k=top_k)
    is_real_T = torch.arange(30) % 7 != 3
    ours_logits, their_logits = make_logits(30, 6), make_logits(30, 6)
    ours = top_k * balance_loss(route(ours_logits, config, is_real_T=is_real_T).sums, top_k=top_k)
    theirs = reference.one_hot_balance_loss(their_logits, is_real_T, top_k)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours_logits.grad, their_logits.grad, rtol=1e-5, atol=1e-7)


def test_z_loss_and_its_gradient_by_formula(make_logits):
    logits_TE = make_logits(6, 4, dtype=torch.float64)
    is_real_T = torch.tensor([True, True, False, True, True, True])
    loss = z_loss(route(logits_TE, RouterConfig(d_model=1, num_experts=4, top_k=2), is_real_T=is_real_T).sums)
    z_T = logits_TE.detach().exp().sum(1).log()
    assert loss.item() == pytest.approx((z_T[is_real_T] ** 2).mean().item(), rel=1e-13)
    (gradient,) = torch.autograd.grad(loss, logits_TE)
    expected = 2 / 5 * z_T[:, None] * logits_TE.detach().softmax(1) * is_real_T[:, None]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_the_load_that_prices_gets_no_gradient(make_logits):
    sums = route(make_logits(6, 4), RouterConfig(d_model=1, num_experts=4, top_k=2)).sums
    load_E = torch.tensor([0.4, 0.3, 0.2, 0.1]).requires_grad_()
    balance_loss(sums, top_k=2, load_E=load_E).backward()
    assert load_E.grad is None


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_of_every_loss_in_fp64(make_logits, score_function, masked):
    config = RouterConfig(d_model=1, num_experts=5, top_k=2, score_function=score_function)
    is_real_T = torch.tensor([True, False, True, True, True, True]) if masked else None

    def losses(logits_TE):
        routing = route(logits_TE, config, is_real_T=is_real_T)
        return (
            balance_loss(routing.sums, top_k=2),
            balance_loss(routing.sums, top_k=2, load_E=torch.tensor([4, 0, 1, 2, 3])),
            z_loss(routing.sums),
            z_term(routing.sums, 9),
            entropy_term(routing, 5),
        )

    assert torch.autograd.gradcheck(losses, make_logits(6, 5, dtype=torch.float64))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_entropy_and_its_gradient_by_formula(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=5, top_k=2, score_function=score_function)
    logits_TE = make_logits(7, 5, dtype=torch.float64)
    is_real_T = torch.tensor([True, True, False, True, True, False, True])
    term = entropy_term(route(logits_TE, config, is_real_T=is_real_T), 12)
    expected = logits_TE.new_zeros(())
    for token in is_real_T.nonzero().flatten().tolist():
        scores_E = logits_TE[token].sigmoid() if score_function == "sigmoid" else logits_TE[token].exp()
        probabilities_E = scores_E / scores_E.sum()
        expected = expected - (probabilities_E * probabilities_E.log()).sum() / 12
    assert term.item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(term, logits_TE)[0], torch.autograd.grad(expected, logits_TE)[0], rtol=1e-11, atol=1e-15
    )


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("logits", "expected"),
    # In the second all scores but one underflow to 0 in fp32, and 0 * log 0 is 0.
    [([-7.0] * 8, math.log(8)), ([-600.0, -600.0, 0.0] + [-600.0] * 5, 0.0)],
    ids=["even", "one"],
)
def test_entropy_runs_from_0_to_log_e_with_gradients_that_stay_finite(score_function, logits, expected):
    logits_TE = torch.tensor([logits] * 3).requires_grad_()
    config = RouterConfig(d_model=1, num_experts=8, top_k=2, score_function=score_function)
    term = entropy_term(route(logits_TE, config), 3)
    assert term.item() == pytest.approx(expected, abs=1e-6)
    assert torch.autograd.grad(term, logits_TE)[0].isfinite().all()


@pytest.mark.parametrize("low", [-60.0, -90.0, -120.0, -1000.0])
def test_entropy_of_sigmoids_that_underflow_is_that_of_their_shares(low):
    config = RouterConfig(d_model=1, num_experts=3, top_k=2, score_function="sigmoid")
    logits_TE = (low + torch.tensor([[math.log(4), math.log(2), math.log(2)]])).requires_grad_()
    term = entropy_term(route(logits_TE, config), 1)
    # Shares 1/2, 1/4, 1/4: 1.5 bits.
    assert term.item() == pytest.approx(1.5 * math.log(2), rel=1e-4)
    (gradient,) = torch.autograd.grad(term, logits_TE)
    # -p_i (log p_i + H)
    assert gradient[0].tolist() == pytest.approx([-math.log(2) / 4, math.log(2) / 8, math.log(2) / 8], abs=1e-4)


def test_entropy_adds_up_over_any_split(make_logits):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    logits_TE = make_logits(10, 4, dtype=torch.float64)
    whole = entropy_term(route(logits_TE, config), 10)
    split = sum(entropy_term(route(part_TE, config), 10) for part_TE in logits_TE.split([3, 0, 6, 1]))
    assert split.item() == pytest.approx(whole.item(), rel=1e-14)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 0, 0], [0, 2, 0], [0, 0, 0.5]], 0.0),
        ([[1, 1], [2, 2], [-3, -3]], 1.0),
        ([[1, 0], [1, 1]], 0.5),  # one pair at 45 degrees
        ([[1, 0, 0], [1, 1, 0], [0, 0, 1]], 1 / 6),  # two of the six ordered pairs have 1/2
        ([[3, 4]], 0.0),
        ([[0, 0], [1, 1]], 0.0),
    ],
    ids=["orthogonal", "parallel", "45 degrees", "one pair of three", "one expert", "a row of zeros"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonality_by_hand(rows, expected, dtype):
    weight_ED = torch.tensor(rows, dtype=dtype).requires_grad_()
    loss = orthogonality_loss(weight_ED)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, weight_ED)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


def test_orthogonality_equals_a_loop_over_pairs_with_its_gradient():
    weight_ED = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    cosines = [
        torch.nn.functional.cosine_similarity(weight_ED[i], weight_ED[j], dim=0) ** 2
        for i in range(5)
        for j in range(5)
        if i != j
    ]
    expected = torch.stack(cosines).mean()
    loss = orthogonality_loss(weight_ED)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(loss, weight_ED)[0], torch.autograd.grad(expected, weight_ED)[0], rtol=1e-10, atol=1e-14
    )
    assert torch.autograd.gradcheck(orthogonality_loss, weight_ED)


def test_orthogonality_does_not_see_the_length_of_a_row():
    weight_ED = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled_ED = weight_ED * torch.tensor([1e-3, 2.0, 50.0, 1.0, 7.0, 0.1], dtype=torch.float64)[:, None]
    assert orthogonality_loss(scaled_ED).item() == pytest.approx(orthogonality_loss(weight_ED).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5], 1.0),
        ([700, 100, 100, 100], 2.08),  # 4 * (0.7^2 + 3 * 0.1^2)
        ([9, 0, 0], 3.0),
        ([3, 1], 1.25),
        ([0, 0, 0], 0.0),
        ([7], 1.0),
        ([2**40, 2**40], 1.0),
        ([[1, 1], [2, 0], [0, 0]], [1.0, 2.0, 0.0]),
        ([0.25, 0.25], 1.0),  # fractions that do not sum to 1 are a load too
        ([0.05, 0.0], 2.0),
    ],
    ids=str,
)
def test_squared_load_by_hand(counts, expected):
    loss = squared_load_loss(torch.tensor(counts))
    assert loss.dtype == torch.float64
    assert loss.tolist() == pytest.approx(expected, rel=1e-14)


@few
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12))
def test_squared_load_is_lowest_only_where_the_load_is_even(counts):
    loss = squared_load_loss(torch.tensor(counts, dtype=torch.int64)).item()
    if sum(counts) == 0:
        assert loss == 0
        return
    assert loss == pytest.approx(reference.squared_load(counts), rel=1e-12)
    if len(set(counts)) == 1:
        assert loss == pytest.approx(1.0, rel=1e-15 * len(counts))
    # Exactly, in integers: E * sum c^2 is above (sum c)^2 unless all are equal; fp64 sees a difference of 1 in 10^9.
    squares, square = len(counts) * sum(count**2 for count in counts), sum(counts) ** 2
    assert (squares > square) == (len(set(counts)) > 1)
    assert loss == pytest.approx(squares / square, rel=1e-14)
    assert loss <= len(counts) * (1 + 1e-14)


def test_a_load_that_is_off_by_one_choice_costs_more_than_an_even_one():
    even, off = squared_load_loss(torch.tensor([[10**6] * 4, [10**6 + 1, 10**6 - 1, 10**6, 10**6]])).tolist()
    assert even == 1.0
    assert off > 1.0


def test_gerrymandering_lowers_the_dot_product_loss_and_not_the_squared_load():
    """700 tokens won by a hair and 300 clear ones: the score improves below 1 while the load is far from even."""
    hair = torch.tensor([[0.26, 0.2475, 0.2475, 0.245]]).expand(700, 4)
    clear = torch.full((300, 4), 0.001).scatter(1, (torch.arange(300) % 3 + 1)[:, None], 0.997)
    config = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False)
    sums = route(torch.cat([hair, clear]).log(), config).sums
    assert sums.counts_E.tolist() == [700, 100, 100, 100]
    assert balance_loss(sums, top_k=1).item() == pytest.approx(0.83752, abs=1e-6)
    assert squared_load_loss(sums.counts_E).item() == pytest.approx(2.08, rel=1e-14)
    assert load_imbalance(sums.counts_E).item() == pytest.approx(2.8, rel=1e-14)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_tokens_in_the_step_give_zero_and_a_gradient_of_zero(score_function, tokens):
    config = RouterConfig(d_model=1, num_experts=3, top_k=2, score_function=score_function)
    logits_TE = torch.full((tokens, 3), float("nan")).requires_grad_()
    routing = route(logits_TE, config, is_real_T=torch.zeros(tokens, dtype=torch.bool))
    for nothing in (0, torch.tensor(0)):
        for loss in (
            balance_loss(routing.sums, top_k=2),
            z_loss(routing.sums),
            z_term(routing.sums, nothing),
            entropy_term(routing, nothing),
        ):
            assert loss.item() == 0
            (gradient,) = torch.autograd.grad(loss, logits_TE, retain_graph=True)
            assert gradient.eq(0).all()
    assert balance_loss(LoadSums.zero(3), top_k=1).item() == 0


def test_a_load_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected a load of shape \(4,\), got \(1,\)"):
        balance_loss(LoadSums.zero(4), top_k=2, load_E=torch.ones(1))
