"""What went wrong for others, as far as a router package can get it right; each id is a row of the list of cases."""

import gc
import math
import weakref

import pytest
import torch
from coterie_routing import (
    BALANCE_LOSSES,
    BALANCE_SCOPES,
    SCORE_FUNCTIONS,
    SELECTIONS,
    BiasRule,
    LoadSums,
    Router,
    RouterConfig,
    balance_loss,
    balance_terms,
    entropy_term,
    pack,
    route,
    unpack,
    updated_bias,
    z_loss,
    z_term,
)
from coterie_routing.router import normalize_scores

from routing.cases import make_router, make_sums

both_losses = pytest.mark.parametrize("loss", BALANCE_LOSSES)


def plain(num_experts, top_k, **options):
    return RouterConfig(d_model=1, num_experts=num_experts, top_k=top_k, **{"renormalize": top_k > 1} | options)


def one_hot_logits(experts, num_experts, high=50.0):
    return high * torch.nn.functional.one_hot(torch.tensor(experts), num_experts).float()


def over_ranks(parts, **options):
    """The terms of ranks that make one micro-batch together, added."""
    counts_LBE = torch.stack([routing.sums.counts_E for routing in parts]).sum(0)[None, None]
    return sum(balance_terms([routing], **options, sum_over_ranks=lambda _: counts_LBE).sum() for routing in parts)


def test_r1_padding_is_in_no_loss():
    logits_TE = one_hot_logits([0, 1, 2, 3, 0, 0, 0, 0], 4)
    is_real_T = torch.arange(8) < 4
    with_mask = balance_loss(route(logits_TE, plain(4, 1), is_real_T=is_real_T).sums, top_k=1)
    without = balance_loss(route(logits_TE, plain(4, 1)).sums, top_k=1)
    assert with_mask.item() == pytest.approx(1.0, abs=1e-12)
    assert without.item() == pytest.approx(1.75, abs=1e-12), "the case must see padding when there is no mask"
    nothing = route(logits_TE, plain(4, 1), is_real_T=torch.zeros(8, dtype=torch.bool)).sums
    assert balance_loss(nothing, top_k=1).item() == 0
    assert z_loss(nothing).item() == 0


def test_r2_padded_sequences_equal_unpadded_ones(make_logits):
    real_BSE = make_logits(8, 4).detach().reshape(2, 4, 4)
    padding_BSE = torch.tensor([20.0, 0.0, 0.0, 20.0]).expand(2, 4, 4)
    padded_TE = torch.cat([real_BSE, padding_BSE], dim=1).reshape(16, 4)
    is_real_T = (torch.arange(16) % 8) < 4
    short = route(real_BSE.reshape(8, 4), plain(4, 2))
    long = route(padded_TE, plain(4, 2), is_real_T=is_real_T)

    def losses(routing):
        terms = [
            balance_terms(
                [routing],
                scope=scope,
                loss=loss,
                top_k=2,
                step_tokens=8,
                num_sequences=2,
                load_LE=torch.tensor([[3, 1, 0, 4]]),
                sum_over_ranks=lambda counts: counts,
            ).item()
            for scope in BALANCE_SCOPES
            for loss in BALANCE_LOSSES
        ]
        return [
            *terms,
            balance_loss(routing.sums, top_k=2).item(),
            z_loss(routing.sums).item(),
            entropy_term(routing, 8).item(),
        ]

    assert losses(long) == pytest.approx(losses(short), rel=1e-6)
    assert abs(z_loss(route(padded_TE, plain(4, 2)).sums).item() - z_loss(short.sums).item()) > 100


@both_losses
@pytest.mark.parametrize("scope", ["sequence", "data_parallel", "step"])
def test_r5_r6_the_balance_gradient_is_there_and_equal_for_1_2_and_4_ranks(scope, loss):
    router = make_router(num_experts=4, d_model=5, top_k=2)
    x_TD = torch.randn(16, 5, generator=torch.Generator().manual_seed(3))  # four sequences of four tokens

    def gradient(ranks):
        term = over_ranks(
            [router(part_TD) for part_TD in x_TD.chunk(ranks)],
            scope=scope,
            loss=loss,
            top_k=2,
            step_tokens=16,
            num_sequences=4 // ranks,
            load_LE=torch.tensor([[9, 3, 2, 2]]),
        )
        return torch.autograd.grad(term, router.weight)[0]

    whole = gradient(1)
    assert whole.abs().max().item() > 1e-3
    for ranks in (2, 4):
        torch.testing.assert_close(gradient(ranks), whole, rtol=1e-6, atol=1e-7)


@both_losses
@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_r8_a_larger_micro_batch_does_not_weaken_balancing(scope, loss):
    router = make_router(num_experts=4, d_model=5, top_k=2)
    x_TD = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))  # four sequences of six tokens

    def value_and_gradient(micro_batches):
        terms_L = sum(
            balance_terms(
                [router(part_TD)],
                scope=scope,
                loss=loss,
                top_k=2,
                step_tokens=24,
                num_sequences=4 // micro_batches,
                load_LE=torch.tensor([[9, 3, 2, 2]]),
            )
            for part_TD in x_TD.chunk(micro_batches)
        )
        return terms_L.item(), torch.autograd.grad(terms_L.sum(), router.weight)[0]

    value, gradient = value_and_gradient(4)
    other_value, other_gradient = value_and_gradient(1)
    assert other_value == pytest.approx(value, rel=1e-6)
    assert gradient.abs().max().item() > 1e-3
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-6, atol=1e-7)


@both_losses
@pytest.mark.parametrize("scope", ["data_parallel", "step"])
def test_r9_a_sequence_cut_over_two_ranks_equals_the_uncut_one(scope, loss):
    router = make_router(num_experts=4, d_model=5, top_k=2)
    x_TD = torch.randn(16, 5, generator=torch.Generator().manual_seed(3))
    is_real_T = torch.arange(16) < 10  # 8 valid tokens on the first rank, 2 on the second

    def value_and_gradient(ranks):
        parts = [router(*part) for part in zip(x_TD.chunk(ranks), is_real_T.chunk(ranks), strict=True)]
        term = over_ranks(parts, scope=scope, loss=loss, top_k=2, step_tokens=10, load_LE=torch.tensor([[9, 3, 2, 2]]))
        total = term + sum(z_term(routing.sums, 10) for routing in parts)
        return total.item(), torch.autograd.grad(total, router.weight)[0]

    value, gradient = value_and_gradient(1)
    cut_value, cut_gradient = value_and_gradient(2)
    assert cut_value == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-6, atol=1e-6)
    whole = router(x_TD[:10])
    assert z_loss(whole.sums).item() == pytest.approx(
        sum(z_term(router(*part).sums, 10).item() for part in zip(x_TD.chunk(2), is_real_T.chunk(2), strict=True)),
        rel=1e-6,
    )


def test_r10_softmax_before_or_after_top_k_is_an_explicit_option():
    logits_TE = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    for options, expected in [
        ({"renormalize": False}, [0.5, 0.25]),
        ({"renormalize": True}, [2 / 3, 1 / 3]),
        ({"score_function": "softmax_of_chosen"}, [2 / 3, 1 / 3]),
    ]:
        routing = route(logits_TE, plain(4, 2, **options))
        assert routing.ids_TK.tolist() == [[0, 1]]
        assert routing.weights_TK[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 257])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_function": "sigmoid"},
        {"score_function": "softmax_of_chosen"},
        {"selection_bias": True},
        {"score_function": "sigmoid", "selection_bias": True},
        {"num_groups": 4, "chosen_groups": 2},
        {"num_groups": 4, "chosen_groups": 1, "selection_bias": True, "score_function": "sigmoid"},
        {"num_groups": 8, "chosen_groups": 3},
    ],
    ids=str,
)
def test_r11_ties_go_to_the_lowest_id_and_to_the_lowest_group(tokens, options):
    router = Router(RouterConfig(d_model=3, num_experts=8, top_k=2, **options))
    expected = torch.tensor([[0, 1]]).expand(tokens, 2)
    x_TD = torch.zeros(tokens, 3)
    for _ in range(200):
        routing = router(x_TD)
        assert torch.equal(routing.ids_TK, expected)
    assert (routing.weights_TK.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_r11_ties_between_some_come_in_falling_order(tokens):
    logits_TE = torch.tensor([[0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0]]).repeat(tokens, 1)
    routing = route(logits_TE, plain(8, 5))
    assert torch.equal(routing.ids_TK, torch.tensor([[1, 3, 6, 2, 5]]).expand(tokens, 5))
    assert (routing.weights_TK.diff(dim=1) <= 0).all()
    # Of the groups (0, 1), (2, 3), (4, 5), (6, 7) all but the third score alike or better; the first two win.
    logits_TE = torch.tensor([[1.0, 2.0, 2.0, 1.0, 0.0, 0.0, 1.0, 2.0]]).repeat(tokens, 1)
    grouped = route(logits_TE, plain(8, 3, num_groups=4, chosen_groups=2))
    assert torch.equal(grouped.ids_TK, torch.tensor([[1, 2, 0]]).expand(tokens, 3))


def test_r13_bf16_tokens_do_not_make_ties():
    router = Router(RouterConfig(d_model=2, num_experts=2, top_k=1, renormalize=False))
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    x_TD = torch.tensor([[1.0, 0.003]], dtype=torch.bfloat16)
    weight_bf16 = router.weight.to(torch.bfloat16)
    assert (x_TD @ weight_bf16.T).unique().numel() == 1, "the case must be a tie in bf16"
    assert router(x_TD).ids_TK.tolist() == [[1]]
    assert router.to(torch.bfloat16)(x_TD).ids_TK.tolist() == [[1]]


def test_r14_capacity_ranks_only_the_choices_of_an_expert():
    # Every chosen logit is -1, and a token that did not choose an expert must not stand in the way of one that did.
    logits_TE = torch.full((6, 2), -2.0)
    logits_TE[[0, 2, 4], 0] = -1.0
    logits_TE[[1, 3, 5], 1] = -1.0
    chosen = [0, 1, 0, 1, 0, 1]
    at_three = route(logits_TE, plain(2, 1, capacity_factor=1.0))
    assert at_three.ids_TK[:, 0].tolist() == chosen
    assert at_three.sums.num_dropped.item() == 0
    masked_TE = torch.zeros(6, 2).scatter(1, torch.tensor(chosen)[:, None], -1.0)
    kept = masked_TE[:, 0].topk(3).indices.tolist()
    assert not {0, 2, 4} & set(kept), "the fault: zeros of those that did not choose beat -1"
    at_two = route(logits_TE, plain(2, 1, capacity_factor=0.6))
    assert at_two.ids_TK[:, 0].tolist() == [0, 1, 0, 1, -1, -1]
    assert at_two.sums.num_dropped.item() == 2
    # The lightest goes, not the last.
    logits_TE[0, 0] = -1.5
    assert route(logits_TE, plain(2, 1, capacity_factor=0.6)).ids_TK[:, 0].tolist() == [-1, 1, 0, 1, 0, -1]


def test_r16_z_loss_of_zero_logits_is_that_of_logits():
    router = Router(RouterConfig(d_model=2, num_experts=8, top_k=2))
    loss = z_loss(router(torch.zeros(5, 2)).sums).item()
    assert loss == pytest.approx(math.log(8) ** 2, rel=1e-6)
    assert loss == pytest.approx(4.324, abs=5e-4)
    of_probabilities = torch.full((8,), 1 / 8).logsumexp(0).item() ** 2
    assert of_probabilities == pytest.approx(4.860, abs=5e-4), "the fault"


def test_r18_300_batches_of_one_token_count_300():
    one = route(torch.tensor([[5.0, 0.0]]), plain(2, 1)).sums
    total = LoadSums.zero(2)
    for _ in range(300):
        total = total + one
    assert total.counts_E.tolist() == [300, 0]
    assert total.num_tokens.item() == 300
    bf16 = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(300):
        bf16 += 1
    assert bf16.item() == 256, "the fault that integers avoid"


def test_r18_the_sum_over_64_ranks_is_exact_and_the_bias_step_has_the_right_sign():
    ranks = [make_sums([608 + rank, 676 - rank, 642], [1.0, 2.0, 3.0], 1926) for rank in range(69)]
    flat = torch.stack([pack([one]) for one in ranks[:64]]).sum(0)
    (total,) = unpack(flat, ranks[:1])
    assert total.counts_E.tolist() == [64 * 608 + 2016, 64 * 676 - 2016, 64 * 642]
    assert total.num_tokens.item() == 64 * 1926
    # 40928 and 41248 around a mean of 41088: the first expert has too little.
    step_E = updated_bias(torch.zeros(3), total.counts_E, BiasRule(kind="sign", rate=0.5))
    assert step_E.tolist() == [0.5, -0.5, 0.0]


def test_r19_more_capacity_than_tokens_runs_and_drops_nothing(make_logits):
    routing = route(make_logits(4, 2), plain(2, 2, capacity_factor=2.0))
    assert routing.sums.num_dropped.item() == 0
    assert routing.counts_E.tolist() == [4, 4]
    for factor in (100.0, 1e300):
        assert route(make_logits(4, 2), plain(2, 2, capacity_factor=factor)).sums.num_dropped.item() == 0


@pytest.mark.filterwarnings("ignore::coterie_routing.CausalityWarning")
def test_r20_every_named_option_runs_and_a_wrong_name_lists_the_allowed_ones():
    Router(RouterConfig(d_model=3, num_experts=4, top_k=2))(torch.zeros(4, 3))
    for score_function in SCORE_FUNCTIONS:
        Router(RouterConfig(d_model=3, num_experts=4, top_k=2, score_function=score_function))(torch.zeros(4, 3))
    for selection in SELECTIONS:
        config = RouterConfig(d_model=3, num_experts=4, top_k=2, selection=selection, renormalize=False)
        routing = Router(config)(torch.zeros(4, 3))
        for scope in BALANCE_SCOPES:
            balance_terms([routing], top_k=2, step_tokens=4, scope=scope, sum_over_ranks=lambda counts: counts)
    balance_terms([routing], top_k=2, step_tokens=4)
    for name, allowed in [("score_function", SCORE_FUNCTIONS), ("selection", SELECTIONS)]:
        with pytest.raises(ValueError, match=f"must be one of: {', '.join(allowed)}"):
            Router(RouterConfig(d_model=3, num_experts=4, top_k=2, **{name: "probs"}))
    for name, allowed in [("scope", BALANCE_SCOPES), ("loss", BALANCE_LOSSES)]:
        with pytest.raises(ValueError, match=f"must be one of: {', '.join(allowed)}"):
            balance_terms([routing], top_k=2, step_tokens=4, **{name: "probs"})


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_r26_top_1_with_a_weight_that_is_always_1_is_refused(score_function):
    with pytest.raises(ValueError, match="so the router gets no gradient"):
        Router(RouterConfig(d_model=8, num_experts=4, top_k=1, score_function=score_function))
    # The gradient that would be missing, and that is there without renormalisation.
    logits_TE = torch.tensor([[1.0, 0.5, -1.0]]).requires_grad_()
    weight = logits_TE.softmax(1)[:, :1]
    assert torch.autograd.grad((weight / weight.sum(1, keepdim=True)).sum(), logits_TE)[0].eq(0).all()
    routing = route(logits_TE, plain(3, 1, renormalize=False))
    assert torch.autograd.grad(routing.weights_TK.sum(), logits_TE)[0].abs().min().item() > 0.01


def test_r27_top_1_keeps_its_choice_dimension_and_normalises_within_a_token(make_logits):
    routing = route(make_logits(5, 4), plain(4, 1))
    assert routing.ids_TK.shape == routing.weights_TK.shape == (5, 1)
    assert torch.equal(routing.weights_TK[:, 0], routing.scores_TE.amax(1))
    assert normalize_scores(routing.weights_TK).tolist() == [[1.0]] * 5
    renormalised = route(make_logits(5, 4), plain(4, 2))
    torch.testing.assert_close(renormalised.weights_TK.sum(1), torch.ones(5), rtol=1e-6, atol=0)


def live_tensor_bytes():
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_r28_memory_does_not_grow_with_the_steps_and_no_graph_outlives_its_backward():
    router = make_router(num_experts=4, d_model=8, top_k=2, score_function="sigmoid", selection_bias=True)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.01)
    total = LoadSums.zero(4)
    seen = {}
    for step in range(1, 201):
        routing = router(torch.randn(64, 8))
        terms_L = balance_terms([routing], loss="squared_load", scope="micro_batch", top_k=2, step_tokens=64)
        loss = (
            routing.weights_TK.square().sum()
            + terms_L.sum()
            + balance_loss(routing.sums, top_k=2)
            + z_loss(routing.sums)
            + entropy_term(routing, 64)
        )
        total = total + routing.sums.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        router.selection_bias.copy_(updated_bias(router.selection_bias, total.counts_E, BiasRule(kind="sign")))
        if step in (20, 200):
            seen[step] = live_tensor_bytes()
    assert seen[200] == seen[20]
    assert total.num_tokens.item() == 200 * 64
    assert router.weight.grad_fn is None
    assert not router.selection_bias.requires_grad
    assert not total.probability_sums_E.requires_grad
    # Nothing but the caller's own names holds what a step made, not even until the garbage collector comes.
    gc.disable()
    try:
        held = [weakref.ref(tensor) for tensor in (routing.scores_TE, routing.sums.z_sum, terms_L, loss)]
        del routing, terms_L, loss
        assert [reference() for reference in held] == [None] * 4
    finally:
        gc.enable()
