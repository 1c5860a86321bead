import math
import warnings

import pytest
import torch
from coterie_routing import CausalityWarning, Router, RouterConfig, route
from coterie_routing.selection import count_choices, expert_choice_ids, limit_to_groups, top_k_ids, within_capacity
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import reference

few = settings(deadline=None, max_examples=60)
# Few values, so that ties abound, and the ones that a comparison of bits could put in the wrong place.
AWKWARD = [-math.inf, -3.4e38, -1.5, -1e-40, -0.0, 0.0, 1e-45, 0.5, 0.5000001, 2.0, 3.4e38, math.inf, math.nan]


def sorted_ids(row, top_k):
    """What the promise says, in Python: by falling rank, NaN as -inf, equal ones by rising id."""
    rank = [-math.inf if math.isnan(value) else value for value in row]
    return sorted(range(len(row)), key=lambda expert: (-rank[expert], expert))[:top_k]


@few
@given(st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=9), st.sampled_from(["float32", "float64"]), st.data())
def test_top_k_is_the_order_of_the_numbers_with_ties_to_the_lowest_id(row, dtype, data):
    top_k = data.draw(st.integers(1, len(row)))
    ranking_TE = torch.tensor([row, row[::-1]], dtype=getattr(torch, dtype))
    expected = [sorted_ids(values, top_k) for values in ranking_TE.tolist()]
    ids_TK = top_k_ids(ranking_TE, top_k)
    assert ids_TK.dtype == torch.int64
    assert ids_TK.tolist() == expected
    # A transposed layout has the same numbers.
    assert torch.equal(top_k_ids(ranking_TE.t().contiguous().t(), top_k), ids_TK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_of_many_random_numbers_is_that_of_a_stable_sort(dtype):
    generator = torch.Generator().manual_seed(0)
    ranking_TE = (torch.randn(300, 160, generator=generator, dtype=dtype) * 4).round()  # about 20 values: many ties
    expected = torch.argsort(ranking_TE, dim=1, descending=True, stable=True)[:, :9]
    assert torch.equal(top_k_ids(ranking_TE, 9), expected)


def grouped_config(num_experts, top_k, num_groups, chosen_groups, score_function, **options):
    return RouterConfig(
        d_model=1,
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        chosen_groups=chosen_groups,
        score_function=score_function,
        renormalize=False,
        **options,
    )


@few
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["softmax", "sigmoid", "softmax_of_chosen"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
    st.data(),
)
def test_groups_equal_the_loop_of_deepseek_v3(num_groups, size, score_function, with_bias, ties, seed, data):
    chosen_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, chosen_groups * size))
    if top_k == 1 and score_function == "softmax_of_chosen":
        score_function = "softmax"
    num_experts = num_groups * size
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(7, num_experts, generator=generator, dtype=torch.float64)
    bias_E = torch.randn(num_experts, generator=generator).double() / 4 if with_bias else None
    if ties:
        logits_TE = logits_TE.round()
        bias_E = None if bias_E is None else (2 * bias_E).round() / 2
    config = grouped_config(num_experts, top_k, num_groups, chosen_groups, score_function, selection_bias=with_bias)
    routing = route(logits_TE, config, selection_bias_E=bias_E)
    score_TE = routing.scores_TE if bias_E is None else routing.scores_TE + bias_E
    ranking_TE = logits_TE if bias_E is None else score_TE
    expected = reference.grouped_ids(ranking_TE, score_TE, top_k, num_groups, chosen_groups)
    assert routing.ids_TK.tolist() == expected
    if score_function != "softmax_of_chosen":
        assert torch.equal(routing.weights_TK, routing.scores_TE.gather(1, torch.tensor(expected)))


def test_one_group_is_no_limit_and_all_groups_are_none_either(make_logits):
    logits_TE = make_logits(40, 12)
    plain = route(logits_TE, grouped_config(12, 4, 1, 1, "softmax")).ids_TK
    assert torch.equal(route(logits_TE, grouped_config(12, 4, 3, 3, "softmax")).ids_TK, plain)
    limited = route(logits_TE, grouped_config(12, 4, 3, 1, "softmax")).ids_TK
    assert not torch.equal(limited, plain)
    assert (limited // 4 == limited[:, :1] // 4).all(), "one group of four experts is all a token may use"


def test_exactly_as_many_reachable_experts_as_choices_take_all_of_them(make_logits):
    ids_TK = route(make_logits(20, 12), grouped_config(12, 6, 4, 2, "sigmoid")).ids_TK
    groups_T2 = (ids_TK // 3).sort(dim=1).values[:, ::3]
    assert torch.equal(ids_TK.sort(dim=1).values, (groups_T2[:, :, None] * 3 + torch.arange(3)).reshape(20, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_open_expert_of_minus_infinity_still_comes_before_a_closed_one(dtype):
    inf, nan = math.inf, math.nan
    # Group (2, 3) wins by 9 alone; its expert 3 has nothing, and that must not let in expert 0 of the closed group.
    for worst in (-inf, nan):
        ranking_TE = torch.tensor([[4.0, 4.0, 9.0, worst]], dtype=dtype)
        score_TE = torch.tensor([[4.0, 4.0, 9.0, 0.5]], dtype=dtype)
        limited_TE = limit_to_groups(ranking_TE, score_TE, num_groups=2, chosen_groups=1)
        assert limited_TE[0, :2].tolist() == [-inf, -inf]
        assert top_k_ids(limited_TE, 2).tolist() == [[2, 3]]


def test_a_bias_of_minus_infinity_closes_an_expert(make_logits):
    bias_E = torch.tensor([0.0, -math.inf, 0.0, 0.0, -math.inf, 0.0])
    config = RouterConfig(d_model=1, num_experts=6, top_k=4, selection_bias=True)
    assert torch.equal(
        route(make_logits(30, 6), config, selection_bias_E=bias_E).counts_E, torch.tensor([30, 0, 30, 30, 0, 30])
    )


@few
@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.integers(0, 2**16),
    st.data(),
)
def test_expert_choice_equals_a_loop_over_experts(tokens, num_experts, score_function, ties, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    is_real = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float64)
    logits_TE = logits_TE.round() if ties else logits_TE
    config = RouterConfig(
        d_model=1,
        num_experts=num_experts,
        top_k=top_k,
        renormalize=False,
        score_function=score_function,
        selection="expert_choice",
    )
    mask_T = None if is_real is None else torch.tensor(is_real, dtype=torch.bool)
    routing = route(logits_TE, config, is_real_T=mask_T)
    real = [True] * tokens if is_real is None else is_real
    scores_TE = torch.softmax(logits_TE, 1) if score_function == "softmax" else logits_TE.sigmoid()
    expected = reference.expert_choices(scores_TE, top_k, real)
    assert routing.ids_TK.tolist() == expected
    room = min(max(1, sum(real) * top_k // num_experts), sum(real))
    assert routing.counts_E.tolist() == [room] * num_experts
    for row, weights in zip(expected, routing.weights_TK.tolist(), strict=True):
        assert [weight > 0 for weight in weights] == [expert >= 0 for expert in row]


def test_expert_choice_fills_places_in_the_order_of_the_batch_where_scores_tie():
    scores_TE = torch.full((6, 2), 0.5)
    is_real_T = torch.tensor([False, True, True, True, True, True])
    ids_TE = expert_choice_ids(scores_TE, 1, is_real_T)  # five real tokens: two places each
    assert ids_TE.tolist() == [[-1, -1], [0, 1], [0, 1], [-1, -1], [-1, -1], [-1, -1]]
    assert expert_choice_ids(scores_TE, 1, torch.zeros(6, dtype=torch.bool)).eq(-1).all()


def test_expert_choice_takes_a_token_without_a_number_last():
    scores_TE = torch.tensor([[math.nan, math.nan], [0.1, 0.1], [0.3, 0.2], [0.2, 0.3]])
    assert expert_choice_ids(scores_TE, 1, None).tolist() == [[-1, -1], [-1, -1], [0, 1], [1, 0]]
    # Before padding, though, and before the experts that did not choose it.
    is_real_T = torch.tensor([True, False, False, True])
    assert expert_choice_ids(scores_TE, 2, is_real_T).tolist() == [[0, 1], [-1, -1], [-1, -1], [1, 0]]
    only_last_TE = torch.tensor([[0.1, 0.2, math.nan], [0.4, 0.3, math.nan]])
    assert expert_choice_ids(only_last_TE, 2, None).tolist() == [[2, -1, -1], [0, 1, -1]]


def test_expert_choice_sends_gradients_through_the_weights(make_logits):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, renormalize=False, selection="expert_choice")
    logits_TE = make_logits(8, 4, dtype=torch.float64)
    is_real_T = torch.arange(8) != 3
    factor_TE = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def weighted(logits_TE):
        return (route(logits_TE, config, is_real_T=is_real_T).weights_TK * factor_TE).sum()

    assert torch.autograd.gradcheck(weighted, logits_TE)
    (gradient,) = torch.autograd.grad(weighted(logits_TE), logits_TE)
    assert gradient[3].eq(0).all()
    assert gradient.ne(0).any()


def test_expert_choice_warns_when_a_router_is_built_and_only_then():
    config = RouterConfig(d_model=3, num_experts=2, top_k=1, renormalize=False, selection="expert_choice")
    with pytest.warns(CausalityWarning, match="later ones included: not causal") as caught:
        router = Router(config)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning must point at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router(torch.zeros(4, 3))
        Router(RouterConfig(d_model=3, num_experts=2, top_k=2))


def test_expert_choice_does_look_at_later_tokens_and_top_k_does_not(make_logits):
    """What the warning says, shown: another last token changes what the first ones get."""
    logits_TE = make_logits(6, 3).detach()
    other_TE = logits_TE.clone()
    other_TE[5] = torch.tensor([9.0, -9.0, -9.0])
    choice = RouterConfig(d_model=1, num_experts=3, top_k=1, renormalize=False, selection="expert_choice")
    causal = RouterConfig(d_model=1, num_experts=3, top_k=1, renormalize=False)
    assert not torch.equal(route(logits_TE, choice).ids_TK[:5], route(other_TE, choice).ids_TK[:5])
    assert torch.equal(route(logits_TE, causal).ids_TK[:5], route(other_TE, causal).ids_TK[:5])


@few
@given(
    st.integers(0, 12),
    st.integers(1, 5),
    st.floats(0.05, 3.0),
    st.booleans(),
    st.integers(0, 2**16),
    st.data(),
)
def test_capacity_equals_a_loop_over_choices(tokens, num_experts, factor, ties, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    is_real_T = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float64)
    logits_TE = (2 * logits_TE).round() if ties else logits_TE
    options = {"d_model": 1, "num_experts": num_experts, "top_k": top_k, "renormalize": False, "route_scale": 2.5}
    free = route(logits_TE, RouterConfig(**options), is_real_T=is_real_T)
    capped = route(logits_TE, RouterConfig(**options, capacity_factor=factor), is_real_T=is_real_T)
    capacity = max(1, math.ceil(factor * top_k * int(is_real_T.sum()) / num_experts - 1e-9))
    expected = reference.keep_heaviest(free.ids_TK.tolist(), free.weights_TK.tolist(), capacity)
    assert capped.ids_TK.tolist() == expected
    assert torch.equal(capped.chosen_TK, free.ids_TK)
    assert torch.equal(capped.weights_TK, free.weights_TK.masked_fill(capped.ids_TK < 0, 0))
    kept = [sum(row.count(expert) for row in expected) for expert in range(num_experts)]
    assert capped.counts_E.tolist() == kept
    assert max(kept) <= capacity
    # The statistics are those of the choice: a loss must see the load that was asked for, not what was left of it.
    assert torch.equal(capped.sums.counts_E, free.counts_E)
    assert capped.sums.num_dropped.item() == free.counts_E.sum().item() - sum(kept)
    assert free.sums.num_dropped.item() == 0


def test_nothing_but_the_kept_choices_gets_a_gradient_from_the_weights(make_logits):
    logits_TE = make_logits(12, 3, dtype=torch.float64)
    config = RouterConfig(d_model=1, num_experts=3, top_k=1, renormalize=False, capacity_factor=0.5)
    routing = route(logits_TE, config)
    assert routing.counts_E.tolist() == [2, 2, 2], "2 of 4 on average"
    (gradient,) = torch.autograd.grad(routing.weights_TK.sum(), logits_TE)
    assert torch.equal(gradient.ne(0).any(1), routing.ids_TK[:, 0] >= 0)


@pytest.mark.parametrize(
    ("num_experts", "tokens", "factor", "capacity"),
    # T * factor / E, rounded up, at least 1. In fp64 20 * (1.05 / 3) is a little more than 7.
    [
        (2, 8, 1.0, 4),
        (2, 9, 1.0, 5),
        (2, 8, 1.1, 5),
        (2, 10, 1.2, 6),
        (2, 10, 0.6, 3),
        (2, 3, 0.01, 1),
        (2, 8, 1e300, 8),
        (3, 20, 1.05, 7),
    ],
)
def test_capacity_is_the_mean_load_times_the_factor_rounded_up(num_experts, tokens, factor, capacity):
    config = RouterConfig(d_model=1, num_experts=num_experts, top_k=1, renormalize=False, capacity_factor=factor)
    logits_TE = torch.zeros(tokens, num_experts)
    logits_TE[:, 0] = torch.linspace(3, 1, tokens)
    routing = route(logits_TE, config)
    assert routing.ids_TK[:, 0].tolist() == [0] * capacity + [-1] * (tokens - capacity)
    assert routing.sums.num_dropped.item() == tokens - capacity


def test_a_weight_without_a_number_is_dropped_first_and_a_tie_keeps_the_first():
    ids_TK = torch.tensor([[0], [0], [0], [0], [-1], [1]])
    weights_TK = torch.tensor([[math.nan], [0.2], [0.1], [0.2], [9.0], [0.0]])
    for room, kept in [(1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])]:
        is_kept_TK = within_capacity(ids_TK, weights_TK, torch.tensor(room), 2)
        assert is_kept_TK.flatten().nonzero().flatten().tolist() == [*kept, 5]


def test_counting_by_row_leaves_out_what_is_not_routed():
    ids_BN = torch.tensor([[0, 2, 2, -1], [-1, -1, -1, -1], [1, 1, 1, 1]])
    assert count_choices(ids_BN, 4).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [0, 4, 0, 0]]
    assert count_choices(torch.zeros(2, 0, dtype=torch.int64), 3).tolist() == [[0, 0, 0]] * 2
    assert count_choices(ids_BN, 4).dtype == torch.int64
