from collections.abc import Callable, Iterator
from functools import partial

import torch
from coterie_routing.permutation import permute, unpermute
from coterie_routing.row_map import map_rows
from support.speed import Pair, Scaling
from torch import Tensor

from routing.plain_rows import one_hot_map, plain_gather, plain_weighted_index_add

# Rows of 16 MiB, for the scaling less: an allocator that maps larger blocks anew would be timed instead.
TOKENS, TOP_K, NUM_EXPERTS, WIDTH = 2048, 8, 64, 256


def bench_row_map() -> Iterator[Pair | Scaling]:
    ids_TK = _ids(TOKENS)
    ours, reference = partial(map_rows, ids_TK, NUM_EXPERTS), partial(one_hot_map, ids_TK, NUM_EXPERTS)

    def check() -> None:
        found = ours()
        fields = (found.counts_E, found.offsets_E, found.row_TK, found.slot_N)
        assert all(torch.equal(*pair) for pair in zip(fields, reference(), strict=True))

    yield Pair("row map E64 k8", ours, reference, check)
    yield Scaling("row map, twice the tokens", ours, partial(map_rows, _ids(2 * TOKENS), NUM_EXPERTS))


def bench_permute() -> Iterator[Pair | Scaling]:
    yield _pair("permute k8 forward and backward", *_permute_sides(TOKENS))
    yield Scaling("permute, twice the tokens", _permute_sides(TOKENS // 4)[0], _permute_sides(TOKENS // 2)[0])


def bench_unpermute() -> Iterator[Pair | Scaling]:
    yield _pair("un-permute k8 forward and backward", *_unpermute_sides(TOKENS))
    yield Scaling("un-permute, twice the tokens", _unpermute_sides(TOKENS // 4)[0], _unpermute_sides(TOKENS // 2)[0])


def _ids(tokens: int) -> Tensor:
    return torch.randn(tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)).topk(TOP_K).indices


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _permute_sides(tokens: int) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    row_map = map_rows(_ids(tokens), NUM_EXPERTS)
    token_N = row_map.slot_N // TOP_K
    x_TD, grad_ND = _random(tokens, WIDTH, seed=1).requires_grad_(), _random(tokens * TOP_K, WIDTH, seed=2)

    def run(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        rows_ND = forward(x_TD)
        return [rows_ND.detach(), *torch.autograd.grad(rows_ND, x_TD, grad_ND)]

    return partial(run, lambda x_TD: permute(x_TD, row_map)), partial(run, partial(plain_gather, token_N=token_N))


def _unpermute_sides(tokens: int) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    row_map = map_rows(_ids(tokens), NUM_EXPERTS)
    rows_ND = _random(tokens * TOP_K, WIDTH, seed=1).requires_grad_()
    weights_TK, grad_TD = _random(tokens, TOP_K, seed=2).requires_grad_(), _random(tokens, WIDTH, seed=3)

    def run(forward: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        y_TD = forward(rows_ND, weights_TK)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, (rows_ND, weights_TK), grad_TD)]

    def ours(rows_ND: Tensor, weights_TK: Tensor) -> Tensor:
        return unpermute(rows_ND, row_map, weights_TK)

    return partial(run, ours), partial(run, partial(plain_weighted_index_add, slot_N=row_map.slot_N))


def _pair(name: str, ours: Callable[[], list[Tensor]], reference: Callable[[], list[Tensor]]) -> Pair:
    def check() -> None:
        for value, expected in zip(ours(), reference(), strict=True):
            # Sums of up to WIDTH fp32 terms in another order.
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5 * WIDTH**0.5)

    return Pair(name, ours, reference, check)
