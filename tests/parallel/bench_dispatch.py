"""Dispatch and combine on one rank against a loop over the experts with a mask each."""

from collections.abc import Iterator

import torch
from coterie_parallel import Axis, make_dispatcher
from support.speed import Pair
from torch import Tensor

NUM_TOKENS, WIDTH, NUM_EXPERTS, TOP_K = 4096, 256, 64, 4


def bench_one_rank() -> Iterator[Pair]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    ids_TK = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
    weights_TK = torch.rand(NUM_TOKENS, TOP_K, generator=generator)
    grad_y_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator)

    dispatchers = {
        name: make_dispatcher(name, num_experts=NUM_EXPERTS, axis=Axis.single("expert"))
        for name in ("local", "all_to_all", "rowwise")
    }

    def through(name: str) -> tuple[Tensor, Tensor, Tensor]:
        dispatcher = dispatchers[name]
        x, weights = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        sent = dispatcher.dispatch(x, ids_TK, weights)
        y = dispatcher.combine(sent.rows_RD * sent.row_weights_R.unsqueeze(1), sent.handle)
        (y * grad_y_TD).sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        return y.detach(), x.grad, weights.grad

    def masked_loop() -> tuple[Tensor, Tensor, Tensor]:
        x, weights = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        y = torch.zeros_like(x_TD)
        for expert in range(NUM_EXPERTS):
            token, choice = torch.where(ids_TK == expert)
            y = y.index_add(0, token, x[token] * weights[token, choice].unsqueeze(1))
        (y * grad_y_TD).sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        return y.detach(), x.grad, weights.grad

    for name in dispatchers:

        def check(name: str = name) -> None:
            for ours, reference in zip(through(name), masked_loop(), strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)

        yield Pair(
            f"{name}: dispatch and combine, forward and backward, one rank",
            ours=lambda name=name: through(name),  # type: ignore[misc]
            reference=masked_loop,
            check=check,
        )
