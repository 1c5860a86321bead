import pytest
import torch
from coterie_routing import (
    BALANCE_SCOPES,
    LoadSums,
    Router,
    RouterConfig,
    balance_loss,
    balance_term,
    route,
    scoped_balance_term,
    sequence_balance_term,
    z_loss,
    z_term,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import reference
from routing.cases import LOAD_CASES

few = settings(deadline=None, max_examples=40)


def make_sums(counts, probability_sums, num_tokens):
    return LoadSums(
        counts_E=torch.tensor(counts, dtype=torch.int64),
        probability_sums_E=torch.tensor(probability_sums, dtype=torch.float64),
        z_sum=torch.zeros((), dtype=torch.float64),
        num_tokens=torch.tensor(num_tokens, dtype=torch.int64),
    )


def one_hot_logits(experts, num_experts, high=50.0):
    return high * torch.nn.functional.one_hot(torch.tensor(experts), num_experts).float()


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


def test_r1_padding_is_in_no_loss():
    config = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False)
    logits_TE = one_hot_logits([0, 1, 2, 3, 0, 0, 0, 0], 4)
    is_real_T = torch.arange(8) < 4
    with_mask = balance_loss(route(logits_TE, config, is_real_T=is_real_T).sums, top_k=1)
    without = balance_loss(route(logits_TE, config).sums, top_k=1)
    assert with_mask.item() == pytest.approx(1.0, abs=1e-12)
    assert without.item() == pytest.approx(1.75, abs=1e-12), "the case must see padding when there is no mask"
    nothing = route(logits_TE, config, is_real_T=torch.zeros(8, dtype=torch.bool)).sums
    assert balance_loss(nothing, top_k=1).item() == 0
    assert z_loss(nothing).item() == 0


def test_r2_padded_sequences_equal_unpadded_ones(make_logits):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    real_BSE = make_logits(8, 4).detach().reshape(2, 4, 4)
    padding_BSE = torch.tensor([20.0, 0.0, 0.0, 20.0]).expand(2, 4, 4)
    padded_TE = torch.cat([real_BSE, padding_BSE], dim=1).reshape(16, 4)
    is_real_T = (torch.arange(16) % 8) < 4
    short = route(real_BSE.reshape(8, 4), config)
    long = route(padded_TE, config, is_real_T=is_real_T)
    assert balance_loss(long.sums, top_k=2).item() == pytest.approx(balance_loss(short.sums, top_k=2).item(), rel=1e-6)
    assert z_loss(long.sums).item() == pytest.approx(z_loss(short.sums).item(), rel=1e-6)
    by_sequence = [
        sequence_balance_term(routing, top_k=2, num_sequences=2, step_tokens=8).item() for routing in (short, long)
    ]
    assert by_sequence[1] == pytest.approx(by_sequence[0], rel=1e-6)
    assert abs(z_loss(route(padded_TE, config).sums).item() - z_loss(short.sums).item()) > 100


def test_sequence_term_by_hand():
    config = RouterConfig(d_model=1, num_experts=2, top_k=1, renormalize=False)
    # Sequence 0: both tokens on expert 0, loss 2. Sequence 1: one on each, loss 1. The mean is 1.5; over the whole
    # micro-batch f = P = (3/4, 1/4) and the loss is 2 * (9/16 + 1/16) = 1.25.
    routing = route(one_hot_logits([0, 0, 0, 1], 2), config)
    term = sequence_balance_term(routing, top_k=1, num_sequences=2, step_tokens=4)
    assert term.item() == pytest.approx(1.5, abs=1e-12)
    assert balance_loss(routing.sums, top_k=1).item() == pytest.approx(1.25, abs=1e-12)
    # With the last token masked, sequence 1 has one token and loss 2, and each sequence weighs as many as it has.
    routing = route(one_hot_logits([0, 1, 0, 1], 2), config, is_real_T=torch.tensor([True, True, True, False]))
    term = sequence_balance_term(routing, top_k=1, num_sequences=2, step_tokens=3)
    assert term.item() == pytest.approx((2 * 1 + 1 * 2) / 3, abs=1e-12)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_sequence_term_and_gradient_equal_a_loop_over_sequences(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=5, top_k=2, score_function=score_function)
    logits_TE = make_logits(12, 5, dtype=torch.float64)
    is_real_T = torch.tensor([True] * 5 + [False, True, True] + [True, False, False, False])  # 4, 3 and 1 real
    routing = route(logits_TE, config, is_real_T=is_real_T)
    term = sequence_balance_term(routing, top_k=2, num_sequences=3, step_tokens=20)
    expected = sum(
        reference.loop_balance_loss(routing.scores_TE[start : start + 4], routing.ids_TK[start : start + 4])
        * is_real_T[start : start + 4].sum()
        / 20
        for start in (0, 4, 8)
    )
    assert term.item() == pytest.approx(expected.item(), rel=1e-13)
    (gradient,) = torch.autograd.grad(term, logits_TE, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, logits_TE)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-14)


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
    balance_term(sums, top_k=2, load_fraction_E=load_E, step_tokens=6).backward()
    assert load_E.grad is None


@few
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(2, 7),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(0, 2**16),
    st.data(),
)
def test_step_terms_give_the_same_gradient_for_any_split(sizes, num_experts, score_function, seed, data):
    tokens = sum(sizes)
    top_k = data.draw(st.integers(2, num_experts))
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float64).requires_grad_()
    is_real_T = torch.rand(tokens, generator=generator) < 0.8
    previous_E = torch.randint(0, 50, (num_experts,), generator=generator)
    config = RouterConfig(d_model=1, num_experts=num_experts, top_k=top_k, score_function=score_function)
    step_tokens = is_real_T.sum()

    def terms(logits_TE, is_real_T):
        sums = route(logits_TE, config, is_real_T=is_real_T).sums
        balance = balance_term(sums, top_k=top_k, load_fraction_E=previous_E, step_tokens=step_tokens)
        return balance + 0.1 * z_term(sums, step_tokens)

    whole = terms(logits_TE, is_real_T)
    parts = zip(logits_TE.split(sizes), is_real_T.split(sizes), strict=True)
    split = torch.stack([terms(*part) for part in parts]).sum()
    assert split.item() == pytest.approx(whole.item(), rel=1e-13, abs=1e-300)
    (expected,) = torch.autograd.grad(whole, logits_TE)
    (gradient,) = torch.autograd.grad(split, logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@few
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(0, 2**16),
)
def test_r8_sequence_terms_give_the_same_gradient_for_any_split_into_whole_sequences(
    sequences, length, score_function, seed
):
    tokens = sum(sequences) * length
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, 4, generator=generator, dtype=torch.float64).requires_grad_()
    is_real_T = torch.rand(tokens, generator=generator) < 0.8
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function=score_function)
    step_tokens = is_real_T.sum()

    def term(logits_TE, is_real_T, num_sequences):
        routing = route(logits_TE, config, is_real_T=is_real_T)
        return sequence_balance_term(routing, top_k=2, num_sequences=num_sequences, step_tokens=step_tokens)

    whole = term(logits_TE, is_real_T, sum(sequences))
    sizes = [number * length for number in sequences]
    parts = zip(logits_TE.split(sizes), is_real_T.split(sizes), sequences, strict=True)
    split = torch.stack([term(*part) for part in parts]).sum()
    assert split.item() == pytest.approx(whole.item(), rel=1e-13, abs=1e-300)
    (expected,) = torch.autograd.grad(whole, logits_TE)
    (gradient,) = torch.autograd.grad(split, logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_r5_r6_r8_the_balance_gradient_is_there_and_equal_for_1_2_and_4_parts(scope):
    router = Router(RouterConfig(d_model=5, num_experts=4, top_k=2))
    x_TD = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))  # Four sequences of six tokens.

    def gradient(parts):
        terms = [
            scoped_balance_term(
                scope,
                router(part_TD),
                top_k=2,
                step_tokens=24,
                num_sequences=4 // parts,
                load_fraction_E=torch.tensor([9, 3, 2, 2]),
            )
            for part_TD in x_TD.chunk(parts)
        ]
        return torch.autograd.grad(torch.stack(terms).sum(), router.weight)[0]

    whole = gradient(1)
    assert whole.abs().max().item() > 1e-3
    for parts in (2, 4):
        torch.testing.assert_close(gradient(parts), whole, rtol=1e-6, atol=1e-8)


def test_the_micro_batch_scope_depends_on_the_split_as_its_docstring_says(make_logits):
    config = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False)
    logits_TE = one_hot_logits([0, 0, 1, 1], 4, high=2.0).requires_grad_()

    def gradient(parts):
        terms = [
            scoped_balance_term(
                "micro_batch",
                route(part_TE, config),
                top_k=1,
                step_tokens=4,
                num_sequences=1,
                load_fraction_E=None,
            )
            for part_TE in logits_TE.chunk(parts)
        ]
        return torch.autograd.grad(torch.stack(terms).sum(), logits_TE)[0]

    assert (gradient(1) - gradient(2)).abs().max().item() > 1e-2


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scopes_agree_where_they_must(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function=score_function)
    routing = route(make_logits(12, 4), config)
    one_sequence = [
        scoped_balance_term(
            scope,
            routing,
            top_k=2,
            step_tokens=12,
            num_sequences=1,
            load_fraction_E=routing.counts_E,
        ).item()
        for scope in BALANCE_SCOPES
    ]
    assert one_sequence == pytest.approx([balance_loss(routing.sums, top_k=2).item()] * 3, rel=1e-6)


@pytest.mark.parametrize("load", [None, torch.zeros(4)], ids=["none", "all zero"])
def test_the_first_step_prices_with_an_even_load(make_logits, load):
    logits_TE = make_logits(12, 4, dtype=torch.float64)
    sums = route(logits_TE, RouterConfig(d_model=1, num_experts=4, top_k=2)).sums
    term = balance_term(sums, top_k=2, load_fraction_E=load, step_tokens=48)
    assert term.item() == pytest.approx(12 / 48, rel=1e-14)
    (gradient,) = torch.autograd.grad(term, logits_TE)
    assert gradient.abs().max().item() < 1e-17


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_gradcheck_of_every_loss_in_fp64(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=5, top_k=2, score_function=score_function)
    is_real_T = torch.tensor([True, False, True, True, True, True])

    def losses(logits_TE):
        routing = route(logits_TE, config, is_real_T=is_real_T)
        return (
            balance_loss(routing.sums, top_k=2),
            balance_loss(routing.sums, top_k=2, load_E=torch.tensor([4, 0, 1, 2, 3])),
            sequence_balance_term(routing, top_k=2, num_sequences=2, step_tokens=5),
            z_loss(routing.sums),
        )

    assert torch.autograd.gradcheck(losses, make_logits(6, 5, dtype=torch.float64))


def test_no_tokens_in_the_step_give_zero_not_nan():
    sums = LoadSums.zero(3)
    for nothing in (0, torch.tensor(0)):
        assert balance_term(sums, top_k=1, load_fraction_E=None, step_tokens=nothing).item() == 0
        assert z_term(sums, nothing).item() == 0
    empty = route(torch.zeros(0, 3), RouterConfig(d_model=1, num_experts=3, top_k=2))
    assert sequence_balance_term(empty, top_k=2, num_sequences=4, step_tokens=0).item() == 0


def test_r28_a_loss_leaves_no_graph_behind(make_logits):
    router = Router(RouterConfig(d_model=5, num_experts=4, top_k=2, selection_bias=True))
    routing = router(torch.randn(6, 5))
    (balance_loss(routing.sums, top_k=2) + z_loss(routing.sums)).backward()
    held = [name for name, value in vars(router).items() if isinstance(value, torch.Tensor)]
    assert held == []
    assert not router.selection_bias.requires_grad
    assert router.weight.grad_fn is None


def test_unknown_scope_and_wrong_shapes_are_refused(make_logits):
    routing = route(make_logits(6, 4), RouterConfig(d_model=1, num_experts=4, top_k=2))
    with pytest.raises(ValueError, match=r"balance scope \('batch'\) must be one of: sequence, micro_batch, step"):
        scoped_balance_term("batch", routing, top_k=2, step_tokens=6, num_sequences=1, load_fraction_E=None)
    with pytest.raises(ValueError, match="6 tokens cannot be 4 sequences"):
        sequence_balance_term(routing, top_k=2, num_sequences=4, step_tokens=6)
    with pytest.raises(ValueError, match=r"load of 4 experts, got shape \(1,\)"):
        balance_term(routing.sums, top_k=2, load_fraction_E=torch.ones(1), step_tokens=6)
