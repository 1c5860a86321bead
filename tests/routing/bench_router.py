from collections.abc import Callable, Iterator

import torch
from coterie_routing import Router, RouterConfig, balance_loss, z_loss
from support.speed import Pair, Scaling
from torch import Tensor
from torch.nn import functional

TOKENS, WIDTH = 2048, 256
SHAPES = [(8, 2), (64, 8)]


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


def bench_scaling() -> Iterator[Scaling]:
    num_experts, top_k = SHAPES[-1]
    small = _ours(*_inputs(num_experts, top_k, TOKENS))
    large = _ours(*_inputs(num_experts, top_k, 2 * TOKENS))
    yield Scaling("router, twice the tokens", small, large)


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
