import itertools
import math

import pytest
import torch
from coterie_routing import ASSIGNMENTS, Assignment, Router, RouterConfig, route
from coterie_routing.assignment import assigned_ids
from hypothesis import given, settings
from hypothesis import strategies as st

few = settings(deadline=None, max_examples=60)
every_kind = pytest.mark.parametrize("kind", ASSIGNMENTS)


def ids_of(assignment, num_tokens, num_experts, top_k):
    return assigned_ids(assignment, num_tokens, num_experts, top_k, torch.device("cpu"))


def counts_of(assignment, num_tokens, num_experts, top_k):
    return torch.bincount(ids_of(assignment, num_tokens, num_experts, top_k).flatten(), minlength=num_experts)


@few
@given(st.sampled_from(ASSIGNMENTS), st.integers(0, 40), st.integers(1, 12), st.integers(-(2**62), 2**62), st.data())
def test_a_token_gets_k_different_experts_from_the_range(kind, num_tokens, num_experts, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    assignment = Assignment(kind=kind, seed=seed, exponent=data.draw(st.floats(0, 5)), hot_share=1 / top_k)
    assert assignment.problems(num_experts=num_experts, top_k=top_k) == []
    ids_TK = ids_of(assignment, num_tokens, num_experts, top_k)
    assert ids_TK.shape == (num_tokens, top_k)
    assert ids_TK.dtype == torch.int64
    for ids in ids_TK.tolist():
        assert len(set(ids)) == top_k
        assert all(0 <= expert < num_experts for expert in ids)


@few
@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 2**40), st.data())
def test_uniform_is_even_to_within_one_choice(num_tokens, num_experts, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    counts_E = counts_of(Assignment(kind="uniform", seed=seed), num_tokens, num_experts, top_k)
    assert counts_E.max().item() - counts_E.min().item() <= 1


def test_uniform_spreads_the_experts_of_a_token_over_all_ids():
    """So that the choices of each token reach several ranks, which hold neighbouring experts."""
    ids_TK = ids_of(Assignment(kind="uniform"), 64, 64, 8)
    ranks_TK = ids_TK // 8
    assert min(len(set(ranks)) for ranks in ranks_TK.tolist()) >= 7


def test_random_gives_every_expert_the_same_chance():
    num_tokens, num_experts, top_k = 20000, 8, 2
    counts_E = counts_of(Assignment(kind="random", seed=3), num_tokens, num_experts, top_k)
    chance = top_k / num_experts
    deviation = math.sqrt(num_tokens * chance * (1 - chance))
    assert (counts_E - num_tokens * chance).abs().max().item() < 4.5 * deviation
    # Independent of one another: pairs of experts come as often as they should.
    pair_TE = ids_of(Assignment(kind="random", seed=3), num_tokens, num_experts, top_k)
    pairs = torch.bincount(pair_TE[:, 0] * num_experts + pair_TE[:, 1], minlength=64).reshape(8, 8)
    off_diagonal = pairs[~torch.eye(8, dtype=torch.bool)]
    assert (off_diagonal - num_tokens / 56).abs().max().item() < 5 * math.sqrt(num_tokens / 56)
    # And from token to token.
    first_T = pair_TE[:, 0]
    follow = torch.bincount(first_T[:-1] * num_experts + first_T[1:], minlength=64)
    assert (follow - num_tokens / 64).abs().max().item() < 5 * math.sqrt(num_tokens / 64)


def inclusion_chances(chances, top_k):
    """Chance of each expert to be among K draws without replacement, by going through all orders of draws."""
    total = [0.0] * len(chances)
    for drawn in itertools.permutations(range(len(chances)), top_k):
        chance, left = 1.0, 1.0
        for expert in drawn:
            chance *= chances[expert] / left
            left -= chances[expert]
        for expert in drawn:
            total[expert] += chance
    return total


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_zipf_follows_its_law_without_replacement(top_k, exponent):
    num_tokens, num_experts = 20000, 6
    assignment = Assignment(kind="zipf", seed=11, exponent=exponent)
    counts_E = counts_of(assignment, num_tokens, num_experts, top_k)
    sizes = [1 / (rank + 1) ** exponent for rank in range(num_experts)]
    expected = inclusion_chances([size / sum(sizes) for size in sizes], top_k)
    by_popularity = counts_E.sort(descending=True).values
    for count, chance in zip(by_popularity.tolist(), expected, strict=True):
        assert abs(count - num_tokens * chance) < 4.5 * math.sqrt(num_tokens * chance * (1 - chance)) + 1
    if top_k == 1:
        assert by_popularity[0].item() / by_popularity[1].item() == pytest.approx(2**exponent, rel=0.1)


def test_zipf_keeps_its_order_of_popularity_for_every_size_of_batch_and_changes_it_with_the_seed():
    orders = [
        counts_of(Assignment(kind="zipf", seed=seed, exponent=2.0), tokens, 6, 1).argsort(descending=True)[:4].tolist()
        for seed, tokens in [(0, 20000), (0, 5000), (1, 20000), (2, 20000)]
    ]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


def test_zipf_with_exponent_0_is_random_and_a_huge_one_takes_the_most_popular():
    random = ids_of(Assignment(kind="random", seed=5), 50, 9, 3)
    assert torch.equal(ids_of(Assignment(kind="zipf", seed=5, exponent=0.0), 50, 9, 3), random)
    ids_TK = ids_of(Assignment(kind="zipf", seed=5, exponent=1000.0), 50, 9, 3)
    assert (ids_TK == ids_TK[0]).all()


@few
@given(st.integers(0, 200), st.integers(2, 10), st.floats(0, 1), st.integers(0, 2**40), st.data())
def test_hot_has_its_share_of_all_choices_to_within_one_token(num_tokens, num_experts, fraction, seed, data):
    top_k = data.draw(st.integers(1, num_experts - 1))
    share = fraction / top_k
    assignment = Assignment(kind="hot", seed=seed, hot_share=share)
    assert assignment.problems(num_experts=num_experts, top_k=top_k) == []
    ids_TK = ids_of(assignment, num_tokens, num_experts, top_k)
    # The same expert for every size of batch: the one that a batch in which it has all tokens shows.
    (hot,) = set(ids_of(Assignment(kind="hot", seed=seed, hot_share=1.0), 3, num_experts, 1).flatten().tolist())
    got = (ids_TK == hot).sum().item()
    assert abs(got - share * num_tokens * top_k) <= 1


def test_hot_draws_the_other_experts_evenly_and_spreads_its_tokens_over_the_batch():
    num_tokens, num_experts, top_k, share = 20000, 8, 2, 0.35
    ids_TK = ids_of(Assignment(kind="hot", seed=4, hot_share=share), num_tokens, num_experts, top_k)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=num_experts)
    assert counts_E.max().item() == pytest.approx(share * num_tokens * top_k, abs=1)
    others = counts_E.sort().values[:-1]
    mean = (1 - share) * num_tokens * top_k / 7
    assert (others - mean).abs().max().item() < 4.5 * math.sqrt(mean)
    is_hot_T = (ids_TK == counts_E.argmax()).any(1)
    for part_T in is_hot_T.split(100):
        assert part_T.sum().item() == pytest.approx(share * top_k * 100, abs=1)


@every_kind
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(kind):
    torch.manual_seed(0)
    first = ids_of(Assignment(kind=kind, seed=7), 100, 16, 2)
    torch.manual_seed(1)  # nothing is drawn from torch's generator
    assert torch.equal(ids_of(Assignment(kind=kind, seed=7), 100, 16, 2), first)
    for seed in (8, -7, 2**40):
        assert not torch.equal(ids_of(Assignment(kind=kind, seed=seed), 100, 16, 2), first)
    state = torch.get_rng_state()
    ids_of(Assignment(kind=kind, seed=7), 100, 16, 2)
    assert torch.equal(torch.get_rng_state(), state)


@every_kind
def test_the_choice_of_a_token_depends_on_its_place_alone(kind):
    assignment = Assignment(kind=kind, seed=7, hot_share=0.3)
    assert torch.equal(ids_of(assignment, 100, 16, 2)[:37], ids_of(assignment, 37, 16, 2))


def mixed(value):
    """The finalizer of SplitMix64 on Python's integers, which do not wrap of themselves."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3, -5])
def test_the_numbers_of_a_seed_are_those_of_a_hash_that_any_machine_computes_alike(seed):
    """A benchmark with a seed is the same benchmark next year and on a GPU."""
    num_experts, top_k = 6, 3

    def noise(token, expert):
        bits = mixed(mixed((token * num_experts + expert) % 2**64) ^ mixed(seed % 2**64)) >> 12
        return -math.log(-math.log((bits + 0.5) / 2**52))

    popularity = sorted(range(num_experts), key=lambda expert: noise(-1, expert))
    for kind, exponent in [("random", 0.0), ("zipf", 1.5)]:
        penalty = [exponent * math.log(popularity.index(expert) + 1) for expert in range(num_experts)]
        expected = [
            sorted(range(num_experts), key=lambda expert: penalty[expert] - noise(token, expert))[:top_k]
            for token in range(40)
        ]
        assert ids_of(Assignment(kind=kind, seed=seed, exponent=exponent), 40, num_experts, top_k).tolist() == expected


@every_kind
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_weights_are_the_scores_of_the_assigned_experts_and_gradients_reach_the_router(kind, score_function):
    torch.manual_seed(0)
    assignment = Assignment(kind=kind, seed=2)
    config = RouterConfig(d_model=6, num_experts=8, top_k=3, score_function=score_function, assignment=assignment)
    router = Router(config)
    torch.nn.init.normal_(router.weight)
    x_TD = torch.randn(20, 6, requires_grad=True)
    routing = router(x_TD)
    ids_TK = ids_of(assignment, 20, 8, 3)
    assert torch.equal(routing.ids_TK, ids_TK)
    assert torch.equal(routing.counts_E, torch.bincount(ids_TK.flatten(), minlength=8))
    assert torch.equal(routing.sums.counts_E, routing.counts_E)
    logits_TE = x_TD @ router.weight.T
    scores_TE = logits_TE.sigmoid() if score_function == "sigmoid" else logits_TE.softmax(1)
    chosen_TK = scores_TE.gather(1, ids_TK)
    expected_TK = chosen_TK / chosen_TK.sum(1, keepdim=True)
    torch.testing.assert_close(routing.weights_TK, expected_TK, rtol=1e-5, atol=1e-6)
    factor_TK = torch.randn(20, 3)
    gradients = torch.autograd.grad((routing.weights_TK * factor_TK).sum(), (x_TD, router.weight))
    expected = torch.autograd.grad((expected_TK * factor_TK).sum(), (x_TD, router.weight))
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert gradient.abs().max().item() > 1e-3
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@every_kind
def test_an_assignment_replaces_bias_and_groups_too_and_leaves_masks_and_capacity_in_force(make_logits, kind):
    options = {"d_model": 1, "num_experts": 6, "top_k": 2, "assignment": Assignment(kind=kind, seed=9, hot_share=0.4)}
    logits_TE, is_real_T = make_logits(30, 6), torch.arange(30) % 4 != 2
    plain = route(logits_TE, RouterConfig(**options), is_real_T=is_real_T)
    assert plain.ids_TK[~is_real_T].eq(-1).all()
    assert torch.equal(plain.ids_TK[is_real_T], ids_of(options["assignment"], 30, 6, 2)[is_real_T])
    grouped = route(
        logits_TE,
        RouterConfig(**options, num_groups=3, chosen_groups=1, selection_bias=True),
        selection_bias_E=torch.tensor([9.0, 0, 0, 0, 0, 0]),
        is_real_T=is_real_T,
    )
    assert torch.equal(grouped.ids_TK, plain.ids_TK)
    capped = route(logits_TE, RouterConfig(**options, capacity_factor=0.7), is_real_T=is_real_T)
    room = math.ceil(0.7 * 2 * is_real_T.sum().item() / 6)
    assert capped.counts_E.tolist() == plain.counts_E.clamp_max(room).tolist()
    assert capped.sums.num_dropped.item() == (plain.counts_E - capped.counts_E).sum().item() > 0
