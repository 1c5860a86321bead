import pytest
import torch
from coterie_routing import (
    BiasRule,
    Router,
    RouterConfig,
    load_imbalance,
    quantile_bias,
    required_bias,
    route,
    updated_bias,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import reference

few = settings(deadline=None, max_examples=60)
SIGN, PROPORTIONAL = BiasRule(kind="sign", rate=0.01), BiasRule(kind="proportional", rate=0.1)
QUANTILE = BiasRule(kind="quantile", rate=1.0)


def bias_of(values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("rule", "bias", "counts", "expected"),
    [
        # Mean load 5: below it the bias rises, above it falls, at it it stays.
        (SIGN, [0, 0, 0, 0], [2, 8, 5, 5], [0.01, -0.01, 0, 0]),
        # Steps of +, +, + and - have a mean of half a step, which is taken out again.
        (SIGN, [0, 0, 0, 0], [1, 1, 1, 17], [0.005, 0.005, 0.005, -0.015]),
        (SIGN, [0.5, -0.5, 0, 0], [5, 5, 5, 5], [0.5, -0.5, 0, 0]),
        # A bias with a mean of 1 loses it; the choice is the same.
        (SIGN, [1, 1, 1, 1], [2, 8, 5, 5], [0.01, -0.01, 0, 0]),
        # Errors of (5 - c) / 5: .6, -.6, 0, 0.
        (PROPORTIONAL, [0, 0, 0, 0], [2, 8, 5, 5], [0.06, -0.06, 0, 0]),
        (PROPORTIONAL, [0.2, -0.2, 0, 0], [0, 0, 0, 20], [0.3, -0.1, 0.1, -0.3]),
        (PROPORTIONAL, [0.2, -0.2, 0, 0], [1000, 1000, 1000, 1000], [0.2, -0.2, 0, 0]),
    ],
    ids=str,
)
def test_one_step_by_hand(rule, bias, counts, expected):
    after_E = updated_bias(bias_of(bias), torch.tensor(counts), rule)
    assert after_E.dtype == torch.float32
    assert after_E.tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("rule", [SIGN, PROPORTIONAL], ids=["sign", "proportional"])
def test_counts_of_zero_change_nothing_not_even_a_mean(rule):
    bias_E = bias_of([1.0, 0.3, -0.2])
    assert torch.equal(updated_bias(bias_E, torch.zeros(3, dtype=torch.int64), rule), bias_E)


@pytest.mark.parametrize("rule", [SIGN, PROPORTIONAL], ids=["sign", "proportional"])
def test_the_size_of_the_batch_does_not_matter(rule):
    bias_E, counts_E = bias_of([0.1, 0.0, -0.1]), torch.tensor([7, 1, 4])
    once, often = updated_bias(bias_E, counts_E, rule), updated_bias(bias_E, 10**6 * counts_E, rule)
    torch.testing.assert_close(once, often, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rule", [SIGN, PROPORTIONAL], ids=["sign", "proportional"])
def test_all_layers_at_once_are_each_layer_for_itself(rule):
    generator = torch.Generator().manual_seed(0)
    bias_LE = torch.randn(3, 5, generator=generator)
    counts_LE = torch.randint(0, 50, (3, 5), generator=generator)
    counts_LE[1] = 0
    together = updated_bias(bias_LE, counts_LE, rule)
    for layer in range(3):
        assert torch.equal(together[layer], updated_bias(bias_LE[layer], counts_LE[layer], rule))
    assert torch.equal(together[1], bias_LE[1])


@few
@given(st.lists(st.integers(0, 2**50), min_size=2, max_size=8), st.integers(0, 2**16))
def test_the_sign_is_that_of_the_exact_difference_and_the_mean_is_zero(counts, seed):
    bias_E = torch.rand(len(counts), generator=torch.Generator().manual_seed(seed)) - 0.5
    rule = BiasRule(kind="sign", rate=2.0**-4)
    moved_E = updated_bias(bias_E, torch.tensor(counts, dtype=torch.int64), rule).double() - bias_E.double()
    if sum(counts) == 0:
        assert moved_E.eq(0).all()
        return
    steps = [(sum(counts) > count * len(counts)) - (sum(counts) < count * len(counts)) for count in counts]
    expected = [2.0**-4 * (step - sum(steps) / len(steps)) - bias_E.double().mean().item() for step in steps]
    assert moved_E.tolist() == pytest.approx(expected, abs=1e-6)
    assert updated_bias(bias_E, torch.tensor(counts), rule).double().mean().item() == pytest.approx(0, abs=1e-7)


def test_r18_a_difference_of_one_choice_in_many_keeps_its_sign():
    for mean in (2**8, 2**24, 2**31, 2**52):
        counts_E = torch.tensor([mean + 1, mean, mean, mean - 1])
        after_E = updated_bias(torch.zeros(4), counts_E, SIGN)
        assert after_E.tolist() == pytest.approx([-0.01, 0, 0, 0.01], abs=1e-9)
    as_fp32 = torch.tensor([2**24 + 1, 2**24, 2**24, 2**24 - 1]).float()
    assert (as_fp32 - as_fp32.mean()).sign().tolist() != [1, 0, 0, -1], "the fault that integers avoid"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bias_and_counts_of_a_router_in_low_precision_train_as_in_fp32(dtype):
    router = Router(RouterConfig(d_model=8, num_experts=4, top_k=2, score_function="sigmoid", selection_bias=True))
    router.to(dtype)
    rule = BiasRule(kind="sign", rate=0.001)
    for _ in range(5):
        counts_E = router(torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).to(dtype)).sums.counts_E
        assert counts_E.dtype == torch.int64
        assert counts_E.sum().item() == 600
        router.selection_bias.copy_(updated_bias(router.selection_bias, counts_E, rule))
    assert router.selection_bias.dtype == torch.float32
    # Sums of steps of 0.001 and quarters of them, which bf16 could not hold beside a bias of 0.3.
    multiples = router.selection_bias / 0.00025
    assert torch.allclose(multiples, multiples.round(), atol=1e-2)
    assert router.selection_bias.abs().max().item() > 0.0009


def skewed_logits(tokens=2000, experts=8):
    logits_TE = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    return logits_TE + torch.linspace(1.5, -1.5, experts)


def trained(rule, steps, *, top_k=2, score_function="sigmoid"):
    """The load imbalance after each step of a router whose logits stay as they are."""
    config = RouterConfig(
        d_model=1, num_experts=8, top_k=top_k, score_function=score_function, selection_bias=True, renormalize=False
    )
    logits_TE, bias_E, imbalances = skewed_logits(), torch.zeros(8), []
    for _ in range(steps):
        routing = route(logits_TE, config, selection_bias_E=bias_E)
        imbalances.append(load_imbalance(routing.counts_E).item())
        if rule.kind == "quantile":
            bias_E = quantile_bias(bias_E, required_bias(routing, bias_E), rule, top_k=top_k)
        else:
            bias_E = updated_bias(bias_E, routing.sums.counts_E, rule)
        assert bias_E.mean().item() == pytest.approx(0, abs=1e-7)
    return imbalances


@pytest.mark.parametrize(
    ("rule", "steps", "limit"),
    [
        (BiasRule(kind="sign", rate=0.004), 200, 1.08),
        (BiasRule(kind="proportional", rate=0.1), 50, 1.07),
        (BiasRule(kind="quantile", rate=1.0), 12, 1.06),
        (BiasRule(kind="quantile", rate=0.5), 30, 1.06),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
@pytest.mark.parametrize("top_k", [1, 2])
def test_training_the_bias_evens_the_load(rule, steps, limit, top_k):
    imbalances = trained(rule, steps, top_k=top_k)
    assert imbalances[0] > 2
    assert max(imbalances[-3:]) < limit


def test_quantile_is_there_in_a_few_steps_on_softmax_scores_too():
    imbalances = trained(QUANTILE, 15, score_function="softmax")
    assert imbalances[0] > 2
    assert imbalances[-1] < 1.05


def exact_quantile_bias(required, rule, bias_E, top_k):
    """By sorting: the smallest number that as many tokens as K / E of them do not exceed."""
    num_experts = len(required)
    target = len(required[0]) * top_k / num_experts
    asked = torch.tensor([values[max(0, -(-len(values) * top_k // num_experts) - 1)] for values in required])
    assert all(
        sum(value <= number for value in values) >= target for values, number in zip(required, asked, strict=True)
    )
    mixed = (1 - rule.rate) * bias_E.double() + rule.rate * (asked - asked.mean())
    return mixed - mixed.mean()


@few
@given(
    st.integers(1, 40),
    st.integers(2, 7),
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([100, 1000, 4096]),
    st.integers(0, 2**16),
    st.data(),
)
def test_quantile_equals_sorting_to_within_a_bin(tokens, num_experts, score_function, rate, num_bins, seed, data):
    top_k = data.draw(st.integers(1, num_experts - 1))
    generator = torch.Generator().manual_seed(seed)
    logits_TE = 2 * torch.randn(tokens, num_experts, generator=generator)
    bias_E = torch.randn(num_experts, generator=generator) / 2
    is_real_T = torch.rand(tokens, generator=generator) < 0.8
    is_real_T[0] = True
    config = RouterConfig(
        d_model=1,
        num_experts=num_experts,
        top_k=top_k,
        score_function=score_function,
        renormalize=False,
        selection_bias=True,
    )
    routing = route(logits_TE, config, selection_bias_E=bias_E, is_real_T=is_real_T)
    required = required_bias(routing, bias_E, num_bins=num_bins)
    assert required.counts_EB.dtype == torch.int64
    assert required.counts_EB.sum(1).tolist() == [is_real_T.sum().item()] * num_experts
    rule = BiasRule(kind="quantile", rate=rate)
    after_E = quantile_bias(bias_E, required, rule, top_k=top_k)
    assert after_E.dtype == torch.float32
    sorted_values = reference.required_biases(routing.scores_TE, bias_E, routing.ids_TK)
    expected_E = exact_quantile_bias(sorted_values, rule, bias_E, top_k)
    bin_width = (bias_E.max() - bias_E.min() + 2).item() / num_bins
    # One bin for the number itself and one for the mean that is taken out.
    assert (after_E - expected_E).abs().max().item() <= 2 * rate * bin_width + 1e-6
    assert after_E.mean().item() == pytest.approx(0, abs=1e-6)


def test_histograms_hold_what_each_token_asks_for_by_hand():
    # One token with sigmoids .81 and .6 of two experts: it chose 0. Expert 0 would still have won it with a bias above
    # .6 - .81, expert 1 would have with one above .81 - .6. Of 10 bins from -1 to 1 these are in bins 3 and 6.
    config = RouterConfig(d_model=1, num_experts=2, top_k=1, renormalize=False, score_function="sigmoid")
    routing = route(torch.logit(torch.tensor([[0.81, 0.6]])), config)
    required = required_bias(routing, torch.zeros(2), num_bins=10)
    assert required.low.item() == -1
    assert required.high.item() == 1
    assert required.counts_EB.tolist() == [[0, 0, 0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]]


def test_parts_of_a_step_add_up(make_logits):
    config = RouterConfig(d_model=1, num_experts=6, top_k=2, score_function="sigmoid", selection_bias=True)
    logits_TE, is_real_T = make_logits(60, 6).detach(), torch.arange(60) % 7 != 0
    bias_E = torch.linspace(-0.2, 0.2, 6)

    def part(start, end):
        routing = route(logits_TE[start:end], config, selection_bias_E=bias_E, is_real_T=is_real_T[start:end])
        return required_bias(routing, bias_E)

    whole = part(0, 60)
    split = part(0, 13) + part(13, 13) + part(13, 50) + part(50, 60)
    assert torch.equal(split.counts_EB, whole.counts_EB)
    assert torch.equal(quantile_bias(bias_E, split, QUANTILE, top_k=2), quantile_bias(bias_E, whole, QUANTILE, top_k=2))


def test_no_tokens_change_no_quantile_bias():
    config = RouterConfig(d_model=1, num_experts=3, top_k=1, renormalize=False, selection_bias=True)
    bias_E = bias_of([1.0, 0.3, -0.2])
    for tokens in (0, 4):
        routing = route(
            torch.zeros(tokens, 3), config, selection_bias_E=bias_E, is_real_T=torch.zeros(tokens, dtype=torch.bool)
        )
        required = required_bias(routing, bias_E)
        assert required.counts_EB.sum().item() == 0
        assert torch.equal(quantile_bias(bias_E, required, QUANTILE, top_k=1), bias_E)


def test_required_bias_carries_no_graph_and_bad_tokens_break_nothing(make_logits):
    logits_TE = make_logits(10, 4)
    with torch.no_grad():
        logits_TE[2] = float("nan")
        logits_TE[5, 1] = float("inf")
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, selection_bias=True)
    routing = route(logits_TE, config, selection_bias_E=torch.zeros(4))
    required = required_bias(routing, torch.zeros(4))
    assert not required.counts_EB.requires_grad
    assert required.counts_EB.sum(1).tolist() == [10] * 4
    assert quantile_bias(torch.zeros(4), required, QUANTILE, top_k=2).isfinite().all()


def test_what_does_not_fit_is_refused_with_what_would(make_logits):
    bias_E, counts_E = torch.zeros(4), torch.ones(4, dtype=torch.int64)
    routing = route(make_logits(6, 4), RouterConfig(d_model=1, num_experts=4, top_k=4))
    with pytest.raises(ValueError, match=r"bias rule \('signn'\) must be one of: sign, proportional, quantile"):
        updated_bias(bias_E, counts_E, BiasRule(kind="signn"))
    with pytest.raises(ValueError, match='the rule "quantile" needs the scores of the step: use required_bias'):
        updated_bias(bias_E, counts_E, QUANTILE)
    with pytest.raises(ValueError, match=r"the selection bias must be fp32, not torch\.bfloat16"):
        updated_bias(bias_E.to(torch.bfloat16), counts_E, SIGN)
    for counts in (counts_E.int(), counts_E.float(), counts_E.to(torch.bfloat16)):
        with pytest.raises(
            ValueError, match=rf"counts must be int64 of shape \(4,\), got {counts.dtype} of shape \(4,\)"
        ):
            updated_bias(bias_E, counts, SIGN)
    with pytest.raises(ValueError, match=r"counts must be int64 of shape \(4,\), got torch\.int64 of shape \(3,\)"):
        updated_bias(bias_E, counts_E[:3], SIGN)
    with pytest.raises(ValueError, match=r"top_k \(4\) takes all 4 experts: there is nothing to balance"):
        required_bias(routing, bias_E)
    required = required_bias(route(make_logits(6, 4), RouterConfig(d_model=1, num_experts=4, top_k=2)), bias_E)
    with pytest.raises(ValueError, match="quantile_bias serves the rule \"quantile\", not 'sign'"):
        quantile_bias(bias_E, required, SIGN, top_k=2)
    with pytest.raises(ValueError, match="must be fp32"):
        quantile_bias(bias_E.double(), required, QUANTILE, top_k=2)
    with pytest.raises(ValueError, match=r"bias rate \(2\) must be at most 1"):
        quantile_bias(bias_E, required, BiasRule(kind="quantile", rate=2), top_k=2)


def test_the_quantile_rule_evens_the_load_of_one_batch_in_a_few_steps():
    # Experts that won a token and experts that did not have different thresholds. With the best one left out for both,
    # under-loaded experts stay behind.
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(4000, 16, generator=generator) + torch.linspace(-1, 1, 16)
    config = RouterConfig(d_model=1, num_experts=16, top_k=2, score_function="sigmoid", selection_bias=True)
    bias_E = torch.zeros(16)
    imbalances = []
    for _ in range(8):
        routing = route(logits_TE, config, selection_bias_E=bias_E)
        imbalances.append(load_imbalance(routing.counts_E).item())
        bias_E = quantile_bias(bias_E, required_bias(routing, bias_E), BiasRule(kind="quantile"), top_k=2)
    assert imbalances[0] > 2
    assert imbalances[-1] < 1.03
