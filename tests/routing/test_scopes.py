"""What the table at the top of losses.py promises: which split of a step changes which gradient."""

import dataclasses

import pytest
import torch
from coterie_routing import (
    BALANCE_LOSSES,
    BALANCE_SCOPES,
    LoadSums,
    RouterConfig,
    balance_loss,
    balance_terms,
    route,
    squared_load_loss,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import reference

few = settings(deadline=None, max_examples=60)
both_losses = pytest.mark.parametrize("loss", BALANCE_LOSSES)
all_scopes = pytest.mark.parametrize("scope", BALANCE_SCOPES)
scores = pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])


def terms_of_ranks(routings, **options):
    """The sum over ranks of the terms of one micro-batch: `routings` holds the layers of each rank.

    Every rank makes its call with a callable that adds the counts of all ranks, which a first round of calls collects.
    """
    counts = []

    def collect(tensor):
        counts.append(tensor)
        return tensor

    if options["scope"] == "data_parallel":
        for layers in routings:
            balance_terms(layers, **options, sum_over_ranks=collect)
    return sum(balance_terms(layers, **options, sum_over_ranks=lambda _: sum(counts)) for layers in routings)


def step_terms(micro_batches, config, is_real_T, **options):
    """The sum of all terms of a step: `micro_batches` is a list of micro-batches, each a list of the ranks' logits.

    The mask follows the tokens in the order of the list.
    """
    total, start = torch.zeros(1, dtype=torch.float64), 0
    for ranks in micro_batches:
        routings = []
        for logits_TE in ranks:
            end = start + logits_TE.shape[0]
            routings.append([route(logits_TE, config, is_real_T=is_real_T[start:end])])
            start = end
        total = total + terms_of_ranks(routings, **options)
    return total


def layout(logits_TE, ranks, micro_batches):
    """Cut the tokens into micro-batches, one after the other, and each into ranks."""
    return [part_TE.chunk(ranks) for part_TE in logits_TE.chunk(micro_batches)]


class Step:
    """Eight sequences of three tokens, some of them padding, for every layout of 1, 2 or 4 ranks and micro-batches."""

    def __init__(self, loss, score_function="softmax", top_k=2):
        generator = torch.Generator().manual_seed(0)
        self.logits_TE = torch.randn(24, 5, generator=generator, dtype=torch.float64).requires_grad_()
        self.is_real_T = torch.rand(24, generator=generator) < 0.8
        self.config = RouterConfig(
            d_model=1, num_experts=5, top_k=top_k, score_function=score_function, renormalize=top_k > 1
        )
        self.load_LE = torch.tensor([[9, 3, 2, 0, 2]])
        self.loss = loss

    def value_and_gradient(self, scope, ranks, micro_batches):
        terms_L = step_terms(
            layout(self.logits_TE, ranks, micro_batches),
            self.config,
            self.is_real_T,
            scope=scope,
            loss=self.loss,
            top_k=self.config.top_k,
            step_tokens=self.is_real_T.sum(),
            num_sequences=8 // (ranks * micro_batches),
            load_LE=self.load_LE,
        )
        return terms_L.item(), torch.autograd.grad(terms_L.sum(), self.logits_TE)[0]


# The table: for each scope, layouts (ranks, micro-batches) that promise the same result, and layouts that do not.
SAME = {
    "sequence": [[(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (8, 1)]],
    "micro_batch": [[(2, 1), (1, 2)], [(4, 1), (1, 4), (2, 2)]],
    "data_parallel": [[(1, 1), (2, 1), (4, 1), (8, 1)], [(1, 2), (2, 2), (4, 2)], [(1, 4), (2, 4)]],
    "step": [[(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (8, 1)]],
}
DIFFERENT = {
    "micro_batch": [((1, 1), (2, 1)), ((1, 1), (1, 2)), ((2, 1), (4, 1)), ((1, 2), (2, 2))],
    "data_parallel": [((1, 1), (1, 2)), ((2, 1), (2, 2)), ((1, 2), (1, 4))],
}


@all_scopes
@both_losses
@scores
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_promised_yes_holds_in_value_and_gradient(scope, loss, score_function, top_k):
    step = Step(loss, score_function, top_k)
    for layouts in SAME[scope]:
        value, gradient = step.value_and_gradient(scope, *layouts[0])
        assert gradient.abs().max().item() > 1e-4
        for ranks, micro_batches in layouts[1:]:
            other_value, other_gradient = step.value_and_gradient(scope, ranks, micro_batches)
            assert other_value == pytest.approx(value, rel=1e-13)
            torch.testing.assert_close(other_gradient, gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("scope", DIFFERENT)
@both_losses
@scores
def test_a_promised_no_does_differ(scope, loss, score_function):
    step = Step(loss, score_function)
    for one, other in DIFFERENT[scope]:
        value, gradient = step.value_and_gradient(scope, *one)
        other_value, other_gradient = step.value_and_gradient(scope, *other)
        assert abs(other_value - value) > 1e-3
        assert (other_gradient - gradient).abs().max().item() > 1e-3


@both_losses
def test_a_sequence_that_is_cut_has_another_gradient_as_the_table_says(loss):
    step = Step(loss)
    options = {"scope": "sequence", "loss": loss, "top_k": 2, "step_tokens": step.is_real_T.sum()}
    gradients = []
    for ranks in ([step.logits_TE], step.logits_TE.split([7, 17])):  # all tokens as one sequence, and cut
        terms_L = step_terms([ranks], step.config, step.is_real_T, **options)
        gradients.append(torch.autograd.grad(terms_L.sum(), step.logits_TE)[0])
    assert (gradients[1] - gradients[0]).abs().max().item() > 1e-3


@few
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from(["step", "data_parallel", "sequence"]),
    st.sampled_from(BALANCE_LOSSES),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(1, 4),
    st.integers(2, 6),
    st.integers(0, 2**16),
    st.data(),
)
def test_any_split_into_ranks_and_micro_batches_of_any_size(
    sequences, scope, loss, score_function, length, num_experts, seed, data
):
    """`sequences` counts those of each rank in each micro-batch; some have none."""
    top_k = data.draw(st.integers(1, num_experts))
    tokens = sum(map(sum, sequences)) * length
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float64).requires_grad_()
    is_real_T = torch.rand(tokens, generator=generator) < 0.8
    config = RouterConfig(
        d_model=1, num_experts=num_experts, top_k=top_k, score_function=score_function, renormalize=top_k > 1
    )
    options = {
        "scope": scope,
        "loss": loss,
        "top_k": top_k,
        "step_tokens": is_real_T.sum(),
        "load_LE": torch.randint(0, 50, (1, num_experts), generator=generator),
    }

    def terms(parts):
        """A list of micro-batches, each a list of the number of sequences of its ranks."""
        pieces = iter(logits_TE.split([number * length for ranks in parts for number in ranks]))
        if scope != "sequence":
            return step_terms(
                [[next(pieces) for _ in ranks] for ranks in parts], config, is_real_T=is_real_T, **options
            )
        total, start = torch.zeros(1, dtype=torch.float64), 0
        for number in (number for ranks in parts for number in ranks):
            routing = route(next(pieces), config, is_real_T=is_real_T[start : start + number * length])
            total = total + balance_terms([routing], **options, num_sequences=max(number, 1))
            start += number * length
        return total

    split = terms(sequences)
    # "data_parallel" promises it for ranks only: each micro-batch on one rank.
    whole = terms([[sum(ranks)] for ranks in sequences] if scope == "data_parallel" else [[sum(map(sum, sequences))]])
    assert split.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-300)
    (expected,) = torch.autograd.grad(whole.sum(), logits_TE)
    (gradient,) = torch.autograd.grad(split.sum(), logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-15)


@scores
def test_scopes_agree_where_they_must(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function=score_function)
    routing = route(make_logits(12, 4), config)
    options = {
        "top_k": 2,
        "step_tokens": 12,
        "load_LE": routing.counts_E[None],
        "sum_over_ranks": lambda counts: counts,
    }
    expected = {
        "dot_product": balance_loss(routing.sums, top_k=2).item(),
        "squared_load": squared_load_loss(routing.counts_E).item(),
    }
    for loss in BALANCE_LOSSES:
        of_scopes = [balance_terms([routing], scope=scope, loss=loss, **options).item() for scope in BALANCE_SCOPES]
        assert of_scopes == pytest.approx([expected[loss]] * 4, rel=1e-12)


def test_sequence_terms_by_hand():
    config = RouterConfig(d_model=1, num_experts=2, top_k=1, renormalize=False)
    logits_TE = torch.tensor([[50.0, 0.0], [50.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    # Sequence 0: both tokens on expert 0, loss 2. Sequence 1: one on each, loss 1. The mean is 1.5; over the whole
    # micro-batch f = P = (3/4, 1/4) and the loss is 2 * (9/16 + 1/16) = 1.25. With certain choices both losses agree.
    routing = route(logits_TE, config)
    for loss in BALANCE_LOSSES:
        options = {"loss": loss, "top_k": 1, "step_tokens": 4}
        two = balance_terms([routing], scope="sequence", num_sequences=2, **options)
        one = balance_terms([routing], scope="micro_batch", **options)
        assert two.tolist() == pytest.approx([1.5], abs=1e-12)
        assert one.tolist() == pytest.approx([1.25], abs=1e-12)
    # With the last token masked, sequence 1 has one token and loss 2, and each sequence weighs as many as it has.
    routing = route(logits_TE[[0, 3, 1, 2]], config, is_real_T=torch.tensor([True, True, True, False]))
    for loss in BALANCE_LOSSES:
        terms_L = balance_terms([routing], scope="sequence", loss=loss, top_k=1, num_sequences=2, step_tokens=3)
        assert terms_L.tolist() == pytest.approx([(2 * 1 + 1 * 2) / 3], abs=1e-12)


@scores
def test_sequence_terms_and_gradient_equal_a_loop_over_sequences(make_logits, score_function):
    config = RouterConfig(d_model=1, num_experts=5, top_k=2, score_function=score_function)
    logits_TE = make_logits(12, 5, dtype=torch.float64)
    is_real_T = torch.tensor([True] * 5 + [False, True, True] + [True, False, False, False])  # 4, 3 and 1 real
    routing = route(logits_TE, config, is_real_T=is_real_T)
    terms_L = balance_terms([routing], scope="sequence", top_k=2, num_sequences=3, step_tokens=20)
    expected = sum(
        reference.loop_balance_loss(routing.scores_TE[start : start + 4], routing.ids_TK[start : start + 4])
        * is_real_T[start : start + 4].sum()
        / 20
        for start in (0, 4, 8)
    )
    assert terms_L.item() == pytest.approx(expected.item(), rel=1e-13)
    (gradient,) = torch.autograd.grad(terms_L.sum(), logits_TE, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, logits_TE)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-14)


@all_scopes
@both_losses
def test_layers_are_priced_each_for_itself(make_logits, scope, loss):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    routings = [route(make_logits(6, 4, seed=seed), config) for seed in range(3)]
    load_LE = torch.tensor([[5, 1, 1, 1], [0, 0, 0, 0], [1, 2, 3, 4]])
    options = {"scope": scope, "loss": loss, "top_k": 2, "step_tokens": 6, "num_sequences": 2}
    together = balance_terms(routings, **options, load_LE=load_LE, sum_over_ranks=lambda counts: 3 * counts)
    assert together.dtype == torch.float64
    assert together.shape == (3,)
    for layer, routing in enumerate(routings):
        (alone,) = balance_terms(
            [routing], **options, load_LE=load_LE[layer : layer + 1], sum_over_ranks=lambda counts: 3 * counts
        )
        assert together[layer].item() == pytest.approx(alone.item(), rel=1e-14)


@all_scopes
@both_losses
def test_one_coalesced_reduction_for_all_layers_and_none_where_none_is_needed(make_logits, scope, loss):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    routings = [route(make_logits(6, 4, seed=seed), config) for seed in range(5)]
    calls = []

    def sum_over_ranks(tensor):
        calls.append((tensor.dtype, tensor.numel(), tensor.requires_grad))
        return tensor

    balance_terms(routings, scope=scope, loss=loss, top_k=2, step_tokens=6, sum_over_ranks=sum_over_ranks)
    assert calls == ([(torch.int64, 5 * 4, False)] if scope == "data_parallel" else [])


@both_losses
def test_a_reduction_in_place_does_not_reach_the_own_counts(make_logits, loss):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    routing = route(make_logits(6, 4), config)
    before_E = routing.sums.counts_E.clone()
    other_E = torch.tensor([1, 8, 2, 1])
    options = {"scope": "data_parallel", "loss": loss, "top_k": 2, "step_tokens": 12}
    in_place = balance_terms([routing], **options, sum_over_ranks=lambda counts: counts.add_(other_E))
    plain = balance_terms([routing], **options, sum_over_ranks=lambda counts: counts + other_E)
    assert torch.equal(in_place, plain)
    assert torch.equal(routing.sums.counts_E, before_E)


@pytest.mark.parametrize("load_LE", [None, torch.zeros(1, 4, dtype=torch.int64)], ids=["none", "all zero"])
@both_losses
def test_the_first_step_prices_with_an_even_load(make_logits, load_LE, loss):
    logits_TE = make_logits(12, 4, dtype=torch.float64)
    routing = route(logits_TE, RouterConfig(d_model=1, num_experts=4, top_k=2))
    terms_L = balance_terms([routing], loss=loss, top_k=2, load_LE=load_LE, step_tokens=48)
    assert terms_L.item() == pytest.approx(12 / 48, rel=1e-14)
    (gradient,) = torch.autograd.grad(terms_L.sum(), logits_TE)
    assert gradient.abs().max().item() < 1e-17


@both_losses
def test_the_load_that_prices_gets_no_gradient_and_only_its_proportions_count(make_logits, loss):
    routing = route(make_logits(6, 4), RouterConfig(d_model=1, num_experts=4, top_k=2))
    load_LE = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).requires_grad_()
    terms_L = balance_terms([routing], loss=loss, top_k=2, load_LE=load_LE, step_tokens=6)
    terms_L.sum().backward()
    assert load_LE.grad is None
    counts = balance_terms([routing], loss=loss, top_k=2, load_LE=torch.tensor([[400, 300, 200, 100]]), step_tokens=6)
    assert counts.item() == pytest.approx(terms_L.item(), rel=1e-7)


@all_scopes
@both_losses
@pytest.mark.parametrize("tokens", [0, 4])
def test_no_real_tokens_give_zero_and_a_gradient_of_zero(scope, loss, tokens):
    config = RouterConfig(d_model=1, num_experts=3, top_k=2, score_function="sigmoid")
    logits_TE = torch.full((tokens, 3), float("nan")).requires_grad_()
    routing = route(logits_TE, config, is_real_T=torch.zeros(tokens, dtype=torch.bool))
    for step_tokens in (0, torch.tensor(0), 7):
        terms_L = balance_terms(
            [routing],
            scope=scope,
            loss=loss,
            top_k=2,
            step_tokens=step_tokens,
            num_sequences=4,
            sum_over_ranks=lambda counts: counts,
        )
        assert terms_L.tolist() == [0.0]
        assert torch.autograd.grad(terms_L.sum(), logits_TE, retain_graph=True)[0].eq(0).all()
    assert balance_terms([], top_k=2, step_tokens=0, scope=scope, loss=loss).shape == (0,)


@all_scopes
@both_losses
@pytest.mark.parametrize("low", [0.0, -60.0, -90.0, -120.0, -1000.0])
def test_a_sigmoid_router_cannot_shrink_its_loss_by_low_logits(scope, loss, low):
    """Megatron-LM issue 1545: a floor of 1e-20 under the sum of the sigmoids lets the loss fall below 1."""
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, score_function="sigmoid")
    shape_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0], [2.0, 1.0, -1.0, 0.0]]).repeat(3, 1)
    logits_TE = (low + shape_TE).requires_grad_()
    routing = route(logits_TE, config)
    terms_L = balance_terms(
        [routing],
        scope=scope,
        loss=loss,
        top_k=2,
        step_tokens=6,
        num_sequences=3,
        load_LE=routing.counts_E[None],
        sum_over_ranks=lambda counts: counts,
    )
    # In fp64: all tokens choose experts 0 and 1, so f = (1, 1, 0, 0) and the loss is 2 (P_0 + P_1) or 2.
    exact_TE = torch.nn.functional.logsigmoid(low + shape_TE.double()).softmax(1)
    expected = 2 * exact_TE[:, :2].sum().item() / 6 if loss == "dot_product" else 2.0
    assert terms_L.item() == pytest.approx(expected, rel=1e-4 if low < -500 else 1e-6)
    assert terms_L.item() >= 1
    (gradient,) = torch.autograd.grad(terms_L.sum(), logits_TE)
    assert gradient.isfinite().all()
    # It pulls the chosen down and the others up, as strongly as anywhere else on the tail of the sigmoid.
    assert (gradient[:, :2].sum(1) > 0.01).all()


def test_dropped_choices_are_still_priced(make_logits):
    """The load that a loss sees is the one that the router asked for: dropping must not hide an imbalance."""
    options = {"d_model": 1, "num_experts": 4, "top_k": 2}
    logits_TE = make_logits(12, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    free = route(logits_TE, RouterConfig(**options))
    capped = route(logits_TE, RouterConfig(**options, capacity_factor=0.5))
    assert capped.sums.num_dropped.item() > 0
    for scope in ("sequence", "micro_batch"):
        for loss in BALANCE_LOSSES:
            terms = [
                balance_terms([routing], scope=scope, loss=loss, top_k=2, step_tokens=12, num_sequences=3).item()
                for routing in (free, capped)
            ]
            assert terms[0] == terms[1]


def test_unknown_names_and_wrong_shapes_are_refused_with_what_would_work(make_logits):
    routing = route(make_logits(6, 4), RouterConfig(d_model=1, num_experts=4, top_k=2))
    wide = route(make_logits(6, 5), RouterConfig(d_model=1, num_experts=5, top_k=2))
    options = {"top_k": 2, "step_tokens": 6}
    with pytest.raises(
        ValueError, match=r"balance scope \('batch'\) must be one of: sequence, micro_batch, data_parallel, step"
    ):
        balance_terms([routing], scope="batch", **options)
    with pytest.raises(ValueError, match=r"balance loss \('dot'\) must be one of: dot_product, squared_load"):
        balance_terms([routing], loss="dot", **options)
    with pytest.raises(ValueError, match="6 tokens cannot be 4 sequences of one length"):
        balance_terms([routing], scope="sequence", num_sequences=4, **options)
    with pytest.raises(ValueError, match="6 tokens cannot be 0 sequences of one length"):
        balance_terms([routing], scope="sequence", num_sequences=0, **options)
    with pytest.raises(ValueError, match=r"expected a load of shape \(1, 4\), got \(4,\)"):
        balance_terms([routing], load_LE=torch.ones(4), **options)
    with pytest.raises(ValueError, match=r"expected a load of shape \(2, 4\), got \(1, 4\)"):
        balance_terms([routing, routing], load_LE=torch.ones(1, 4), **options)
    with pytest.raises(ValueError, match=r'"data_parallel" needs sum_over_ranks, which adds a tensor over the ranks'):
        balance_terms([routing], scope="data_parallel", **options)
    with pytest.raises(ValueError, match=r"the same number of experts, got \[4, 5\]; call once for each number"):
        balance_terms([routing, wide], **options)


def test_terms_do_not_change_what_they_are_given(make_logits):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    routing = route(make_logits(6, 4), config)
    before = {field.name: getattr(routing.sums, field.name).clone() for field in dataclasses.fields(LoadSums)}
    load_LE = torch.tensor([[1, 2, 3, 4]])
    for scope in BALANCE_SCOPES:
        for loss in BALANCE_LOSSES:
            balance_terms(
                [routing],
                scope=scope,
                loss=loss,
                top_k=2,
                step_tokens=6,
                load_LE=load_LE,
                sum_over_ranks=lambda counts: counts.mul_(2),
            )
    assert load_LE.tolist() == [[1, 2, 3, 4]]
    assert all(torch.equal(getattr(routing.sums, name), value) for name, value in before.items())
