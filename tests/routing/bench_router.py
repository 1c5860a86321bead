from collections.abc import Callable, Iterator

import torch
from coterie_routing import Router, RouterConfig, balance_loss, balance_terms, route, z_loss
from support.speed import Pair, Scaling
from torch import Tensor
from torch.nn import functional

from routing.reference import deepseek_v3_router

TOKENS, WIDTH = 2048, 256
SHAPES = [(8, 2), (64, 8)]
GROUPED = RouterConfig(
    d_model=WIDTH,
    num_experts=64,
    top_k=8,
    score_function="sigmoid",
    route_scale=2.5,
    num_groups=8,
    chosen_groups=4,
    selection_bias=True,
)
PLAIN = {"d_model": WIDTH, "num_experts": 64, "top_k": 8}
# What costs something beside plain top-k, from logits on.
OPTIONS = {
    "groups": GROUPED,
    "capacity": RouterConfig(**PLAIN, capacity_factor=1.0),
    "expert choice": RouterConfig(**PLAIN, renormalize=False, selection="expert_choice"),
}


def bench_router() -> Iterator[Pair]:
    for num_experts, top_k in SHAPES:
        router, x_TD = _inputs(num_experts, top_k, TOKENS)
        ours = _ours(router, x_TD)
        reference = _one_hot_reference(router.weight, x_TD, top_k)

        def check(ours: Callable[[], list[Tensor]] = ours, reference: Callable[[], list[Tensor]] = reference) -> None:
            for value, expected in zip(ours(), reference(), strict=True):
                # Rounding of fp32 sums over the tokens, in another order.
                scale = expected.abs().max().item()
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6 * scale, check_dtype=False)

        yield Pair(f"router E{num_experts} k{top_k} forward and backward", ours, reference, check)


def bench_groups() -> Iterator[Pair]:
    bias_E, logits_TE = torch.linspace(-0.1, 0.1, 64), _logits(TOKENS)

    def ours() -> list[Tensor]:
        routing = route(logits_TE, GROUPED, selection_bias_E=bias_E)
        loss = routing.weights_TK.square().sum() + balance_loss(routing.sums, top_k=8) + z_loss(routing.sums)
        return [routing.ids_TK, routing.counts_E, loss.detach(), *torch.autograd.grad(loss, logits_TE)]

    def reference() -> list[Tensor]:
        ids_TK, weights_TK = deepseek_v3_router(logits_TE, bias_E, top_k=8, num_groups=8, chosen_groups=4, scale=2.5)
        one_hot_TKE = functional.one_hot(ids_TK, 64)
        scores_TE = logits_TE.sigmoid()
        mean_E = (scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)).mean(0)
        balance = 64 / 8 * (one_hot_TKE.float().mean(0).sum(0) * mean_E).sum()
        loss = weights_TK.square().sum() + balance + logits_TE.logsumexp(-1).square().mean()
        return [ids_TK, one_hot_TKE.sum((0, 1)), loss.detach(), *torch.autograd.grad(loss, logits_TE)]

    def check() -> None:
        for value, expected in zip(ours(), reference(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, check_dtype=False)

    yield Pair("router of 8 groups E64 k8 from logits, forward and backward", ours, reference, check)


def bench_scaling() -> Iterator[Scaling]:
    num_experts, top_k = SHAPES[-1]
    small = _ours(*_inputs(num_experts, top_k, TOKENS))
    large = _ours(*_inputs(num_experts, top_k, 2 * TOKENS))
    yield Scaling("router, twice the tokens", small, large)
    for name, config in OPTIONS.items():
        yield Scaling(f"{name}, twice the tokens", _routed(config, TOKENS // 2), _routed(config, TOKENS))
    yield Scaling("squared load, twice the tokens", _squared_load(TOKENS // 2), _squared_load(TOKENS))


def _logits(tokens: int) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _weights_and_gradient(weights_TK: Tensor, logits_TE: Tensor) -> list[Tensor]:
    return [weights_TK.detach(), *torch.autograd.grad(weights_TK.square().sum(), logits_TE)]


def _routed(config: RouterConfig, tokens: int) -> Callable[[], list[Tensor]]:
    logits_TE = _logits(tokens)
    bias_E = torch.linspace(-0.1, 0.1, 64) if config.selection_bias else None

    def run() -> list[Tensor]:
        return _weights_and_gradient(route(logits_TE, config, selection_bias_E=bias_E).weights_TK, logits_TE)

    return run


def _squared_load(tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    logits_TE = _logits(tokens)
    routing = route(logits_TE, RouterConfig(**PLAIN))

    def run() -> tuple[Tensor, ...]:
        terms_L = balance_terms([routing], loss="squared_load", top_k=8, scope="micro_batch", step_tokens=tokens)
        return torch.autograd.grad(terms_L.sum(), logits_TE, retain_graph=True)

    return run


def _inputs(num_experts: int, top_k: int, tokens: int) -> tuple[Router, Tensor]:
    generator = torch.Generator().manual_seed(0)
    router = Router(RouterConfig(d_model=WIDTH, num_experts=num_experts, top_k=top_k))
    with torch.no_grad():
        router.weight.copy_(torch.randn(num_experts, WIDTH, generator=generator) * WIDTH**-0.5)
    return router, torch.randn(tokens, WIDTH, generator=generator, requires_grad=True)


def _ours(router: Router, x_TD: Tensor) -> Callable[[], list[Tensor]]:
    top_k = router.config.top_k

    def run() -> list[Tensor]:
        routing = router(x_TD)
        loss = routing.weights_TK.square().sum() + balance_loss(routing.sums, top_k=top_k) + z_loss(routing.sums)
        return [routing.counts_E, loss.detach(), *torch.autograd.grad(loss, (x_TD, router.weight))]

    return run


def _one_hot_reference(weight: Tensor, x_TD: Tensor, top_k: int) -> Callable[[], list[Tensor]]:
    """The usual plain-torch MoE router: top-k of the softmax, one-hot masks for load and balance loss."""
    num_experts = weight.shape[0]

    def run() -> list[Tensor]:
        logits_TE = functional.linear(x_TD, weight)
        probabilities_TE = logits_TE.softmax(-1)
        weights_TK, ids_TK = torch.topk(probabilities_TE, top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        one_hot_TKE = functional.one_hot(ids_TK, num_experts)
        fraction_E = one_hot_TKE.float().mean(0).sum(0)
        balance = num_experts / top_k * (fraction_E * probabilities_TE.mean(0)).sum()
        loss = weights_TK.square().sum() + balance + logits_TE.logsumexp(-1).square().mean()
        counts_E = one_hot_TKE.sum((0, 1))
        return [counts_E, loss.detach(), *torch.autograd.grad(loss, (x_TD, weight))]

    return run
