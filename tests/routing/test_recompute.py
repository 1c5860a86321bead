"""Activation recompute runs a forward twice: the choice of the first pass holds, and nothing is counted twice."""

import pytest
import torch
from coterie_routing import BiasRule, ChoiceMemo, LoadSums, Router, RouterConfig, updated_bias
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from routing.cases import make_router

# A capacity is not causal, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::coterie_routing.CausalityWarning")


def keep_products(context, op, *args, **kwargs):
    """Save what matrix products give and recompute the rest."""
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def run_plain(function, x_TD):
    return function(x_TD)


def run_full(function, x_TD):
    return checkpoint(function, x_TD, use_reentrant=False)


def run_selective(function, x_TD):
    return checkpoint(
        function,
        x_TD,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
    )


RECOMPUTE = [run_full, run_selective]
recomputed = pytest.mark.parametrize("run", RECOMPUTE, ids=["full", "selective"])


class Block:
    """A small MoE layer: each expert is a matrix. It notes the ids of each pass."""

    def __init__(self, **options):
        self.router = make_router(**{"num_experts": 6, "d_model": 8, "top_k": 2} | options)
        generator = torch.Generator().manual_seed(5)
        self.experts_EDD = (torch.randn(6, 8, 8, generator=generator) / 8**0.5).requires_grad_()
        self.passes = []

    def __call__(self, x_TD, memo=None, is_real_T=None):
        """The output, and the sums as the tensors that leave a recomputed part."""
        routing = self.router(x_TD, is_real_T, memo=memo)
        self.passes.append(routing.ids_TK.clone())
        weights_TK = routing.weights_TK
        y_TD = sum(
            weights_TK[:, choice, None]
            * torch.einsum("td,tdf->tf", x_TD, self.experts_EDD[routing.ids_TK[:, choice].clamp_min(0)])
            for choice in range(weights_TK.shape[1])
        )
        sums = routing.sums
        return (
            y_TD.tanh(),
            sums.counts_E,
            sums.probability_sums_E,
            sums.z_sum,
            sums.num_tokens,
            sums.num_dropped,
            sums.num_bad,
        )

    def step(self, run, x_TD, *, with_memo=True, is_real_T=None, between=lambda: None):
        """Forward and backward; `between` runs after the forward. Returns the sums and all gradients."""
        memo = ChoiceMemo() if with_memo else None
        y_TD, *fields = run(lambda x_TD: self(x_TD, memo, is_real_T), x_TD)
        sums = LoadSums(*fields)
        between()
        loss = y_TD.square().sum() + sums.probability_sums_E[0] + 0.1 * sums.z_sum
        return sums.detach(), torch.autograd.grad(loss, (x_TD, self.router.weight, self.experts_EDD))


def tokens(number=10):
    return torch.randn(number, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


OPTIONS = [
    {},
    {"score_function": "sigmoid", "selection_bias": True},
    {"score_function": "softmax_of_chosen", "num_groups": 3, "chosen_groups": 2},
    {"capacity_factor": 0.8},
]


@recomputed
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_memo", [False, True])
def test_r25_recompute_counts_once_and_changes_no_gradient(run, options, with_memo):
    x_TD, is_real_T = tokens(12), torch.tensor([True] * 10 + [False] * 2)
    plain, again = Block(**options), Block(**options)
    expected_sums, expected = plain.step(run_plain, x_TD, is_real_T=is_real_T)
    sums, gradients = again.step(run, x_TD, with_memo=with_memo, is_real_T=is_real_T)
    assert len(plain.passes) == 1
    assert len(again.passes) == 2, "the case must run the router twice"
    assert sums.counts_E.sum().item() == 20, "10 tokens with 2 choices"
    assert sums.num_tokens.item() == 10
    for name in vars(expected_sums):
        assert torch.equal(getattr(sums, name), getattr(expected_sums, name)), name
    assert torch.equal(again.passes[1], plain.passes[0])
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
    if "capacity_factor" in options:
        assert sums.num_dropped.item() > 0


@recomputed
@pytest.mark.parametrize("kind", ["sign", "proportional"])
def test_r25_the_bias_step_is_the_same_as_without_recompute(run, kind):
    rule = BiasRule(kind=kind, rate=0.01)
    biases = []
    for runner in (run_plain, run):
        block = Block(score_function="sigmoid", selection_bias=True)
        total = LoadSums.zero(6)
        for micro_batch in range(3):
            sums, _ = block.step(runner, (tokens() + micro_batch).detach().requires_grad_())
            total = total + sums
        assert total.counts_E.sum().item() == 60
        biases.append(updated_bias(block.router.selection_bias, total.counts_E, rule))
    assert torch.equal(biases[0], biases[1])
    assert biases[0].abs().max().item() > 0.005


@recomputed
def test_forward_under_recompute_changes_no_state(run):
    block = Block(score_function="sigmoid", selection_bias=True)
    before = {name: value.clone() for name, value in block.router.state_dict().items()}
    block.step(run, tokens())
    assert all(torch.equal(value, before[name]) for name, value in block.router.state_dict().items())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_choice_of_the_first_pass_holds_though_the_scores_of_the_second_differ(options):
    """A router that was moved between forward and backward would choose otherwise, and must not."""
    for with_memo in (False, True):
        block = Block(**options)

        def move(router=block.router):
            with torch.no_grad():
                router.weight.copy_(router.weight.flip(0))

        block.step(run_full, tokens(), with_memo=with_memo, between=move)
        assert torch.equal(*block.passes) == with_memo, "without a memo the case must provoke another choice"


def test_the_choice_of_the_first_pass_holds_under_selective_recompute():
    """It keeps the logits, so here a bias that was moved provokes another choice."""
    for with_memo in (False, True):
        block = Block(score_function="sigmoid", selection_bias=True)

        def move(router=block.router):
            router.selection_bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0, 0.0, 0.0]))

        block.step(run_selective, tokens(), with_memo=with_memo, between=move)
        assert torch.equal(*block.passes) == with_memo


@pytest.mark.parametrize("capacity_factor", [None, 0.8])
def test_a_jitter_that_is_drawn_anew_moves_no_token(capacity_factor):
    def run(function, x_TD):
        return checkpoint(function, x_TD, use_reentrant=False, preserve_rng_state=False)

    torch.manual_seed(0)
    block = Block(jitter=0.5, capacity_factor=capacity_factor)
    block.step(run, tokens(40), with_memo=False)
    assert not torch.equal(*block.passes), "the case must provoke another choice"
    block.passes.clear()
    block.step(run, tokens(40))
    assert torch.equal(*block.passes)


def test_weights_of_the_second_pass_are_those_of_the_chosen_experts_under_its_own_scores():
    router = make_router(num_experts=5, d_model=4, top_k=2)
    memo, x_TD = ChoiceMemo(), torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    first = router(x_TD, memo=memo)
    with torch.no_grad():
        router.weight.neg_()
    second = router(x_TD, memo=memo)
    free = router(x_TD)
    assert torch.equal(second.ids_TK, first.ids_TK)
    assert not torch.equal(free.ids_TK, first.ids_TK)
    assert torch.equal(second.scores_TE, free.scores_TE)
    chosen_TK = free.scores_TE.gather(1, first.ids_TK)
    torch.testing.assert_close(second.weights_TK, chosen_TK / chosen_TK.sum(1, keepdim=True), rtol=1e-6, atol=0)


def test_what_was_dropped_in_the_first_pass_is_dropped_in_the_second():
    router = make_router(num_experts=3, d_model=4, top_k=1, renormalize=False, capacity_factor=0.6)
    memo, x_TD = ChoiceMemo(), torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    first = router(x_TD, memo=memo)
    with torch.no_grad():
        router.weight.neg_()
    second = router(x_TD, memo=memo)
    assert first.sums.num_dropped.item() > 0
    assert torch.equal(second.ids_TK, first.ids_TK)
    assert torch.equal(second.chosen_TK, first.chosen_TK)
    assert torch.equal(second.counts_E, first.counts_E)
    assert torch.equal(second.sums.num_dropped, first.sums.num_dropped)
    assert second.weights_TK[second.ids_TK < 0].eq(0).all()


@pytest.mark.filterwarnings("ignore::coterie_routing.CausalityWarning")
def test_a_memo_holds_for_expert_choice_too():
    router = Router(
        RouterConfig(d_model=4, num_experts=3, top_k=1, renormalize=False, selection="expert_choice", jitter=0.9)
    )
    torch.manual_seed(0)
    memo, x_TD = ChoiceMemo(), torch.randn(20, 4)
    first, second = router(x_TD, memo=memo), router(x_TD, memo=memo)
    assert torch.equal(first.ids_TK, second.ids_TK)
    assert not torch.equal(first.ids_TK, router(x_TD).ids_TK)


def test_a_memo_is_empty_at_first_and_one_memo_serves_one_call():
    router = make_router(num_experts=5, d_model=4, top_k=2)
    memos = [ChoiceMemo(), ChoiceMemo()]
    assert memos[0].ids_TK is None
    x_TD = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    routings = [router(x_TD[part], memo=memos[part]) for part in (0, 1)]
    assert not torch.equal(routings[0].ids_TK, routings[1].ids_TK)
    for part in (1, 0):
        assert torch.equal(router(x_TD[part], memo=memos[part]).ids_TK, routings[part].ids_TK)


def test_evaluation_after_training_steps_changes_nothing_of_the_next_training_step():
    results = []
    for evaluates in (False, True):
        block = Block()
        block.step(run_full, tokens())
        if evaluates:
            block.router.eval()
            with torch.no_grad():
                block(tokens(30))
            block.router.train()
        results.append(block.step(run_full, tokens()))
    (sums, gradients), (other_sums, other_gradients) = results
    assert torch.equal(sums.counts_E, other_sums.counts_E)
    assert all(torch.equal(*pair) for pair in zip(gradients, other_gradients, strict=True))


def test_a_memo_of_another_call_is_refused():
    memo = ChoiceMemo()
    Router(RouterConfig(d_model=4, num_experts=8, top_k=2))(torch.randn(5, 4), memo=memo)
    with pytest.raises(ValueError, match=r"choices of shape \(5, 2\), of another call: this one has \(5, 4\)"):
        Router(RouterConfig(d_model=4, num_experts=8, top_k=4))(torch.randn(5, 4), memo=memo)
