"""Our optimizer step against torch's: on one rank AdamW with clipping, on several DDP with AdamW, sharded and not."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from coterie_parallel import DENSE, AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from support.bench_ranks import sides_on_ranks
from support.speed import Pair
from torch import Tensor, nn

NUM_BLOCKS, WIDTH = 4, 512
CONFIG = AdamWConfig(learning_rate=1e-4, weight_decay=0.1, gradient_clip=1.0)
TORCH_SETTINGS = {"lr": CONFIG.learning_rate, "betas": CONFIG.betas, "eps": CONFIG.eps, "fused": True}


class Given(nn.Module):
    """Parameters like those of a small dense model, 4.2 million, and a loss whose gradients are given numbers."""

    def __init__(self, rank: int, factor: float) -> None:
        super().__init__()
        shapes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH), (WIDTH,)] * NUM_BLOCKS
        weights = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape, generator=weights) for shape in shapes])
        given = torch.Generator().manual_seed(1 + rank)
        self.given = [factor * torch.randn(shape, generator=given) for shape in shapes]

    def forward(self) -> Tensor:
        return torch.stack([torch.dot(p.flatten(), g.flatten()) for p, g in zip(self.weights, self.given, strict=True)])

    def groups(self) -> list[dict[str, object]]:
        """Return the parameters as torch's optimizers take them, with the decays that ours has by default."""
        matrices = [parameter for parameter in self.weights if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.weights if parameter.ndim < 2]
        return [
            {"params": matrices, "weight_decay": CONFIG.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]


def _make_ours(model: Given, rank: int, world: int) -> Optimizer:
    mesh = Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=60)
    return Optimizer(model.named_parameters(), dict.fromkeys(dict(model.named_parameters()), DENSE), mesh, CONFIG)


def _assert_same_weights(ours: Given, theirs: Given) -> None:
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        # Where the gradients of the ranks cancel, the order of their sum shows in the first step of Adam.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=CONFIG.learning_rate / 20)


def bench_one_rank() -> Iterator[Pair]:
    ours, theirs = Given(0, 1.0), Given(0, 1.0)
    optimizer = _make_ours(ours, 0, 1)
    reference = torch.optim.AdamW(theirs.groups(), **TORCH_SETTINGS)  # type: ignore[arg-type]
    for model in (ours, theirs):
        model().sum().backward()
    gradients = [parameter.grad for parameter in ours.weights]

    def our_step() -> None:
        optimizer.zero_grad()
        for parameter, gradient in zip(ours.weights, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    def torch_step() -> None:
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()

    def check() -> None:
        our_step()
        torch_step()
        _assert_same_weights(ours, theirs)

    yield Pair("optimizer step, one rank: clip_grad_norm_ and fused AdamW", our_step, torch_step, check)


def bench_two_ranks() -> Iterator[Pair]:
    yield from _on_ranks(2)


def bench_four_ranks() -> Iterator[Pair]:
    yield from _on_ranks(4)


def _on_ranks(world: int) -> Iterator[Pair]:
    for reference in ("DDP and AdamW", "DDP and ZeroRedundancyOptimizer"):
        with sides_on_ranks(_sides, world, reference) as call:
            yield Pair(
                f"backward and optimizer step, {world} ranks: {reference}",
                ours=partial(call, "ours"),
                reference=partial(call, "reference"),
                check=partial(call, "check"),
            )


def _sides(rank: int, world: int, reference: str) -> dict[str, Callable[[], None]]:
    ours, theirs = Given(rank, 1.0), Given(rank, float(world))  # DDP divides by the number of ranks, we do not
    optimizer = _make_ours(ours, rank, world)
    wrapped = nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    torch_optimizer: torch.optim.Optimizer
    if reference == "DDP and AdamW":
        torch_optimizer = torch.optim.AdamW(theirs.groups(), **TORCH_SETTINGS)  # type: ignore[arg-type]
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        torch_optimizer = ZeroRedundancyOptimizer(theirs.groups(), torch.optim.AdamW, **TORCH_SETTINGS)

    def our_step() -> None:
        optimizer.zero_grad()
        loss = ours().sum()
        with optimizer.micro_batch(is_last=True):
            loss.backward()
        optimizer.step()

    def torch_step() -> None:
        torch_optimizer.zero_grad()
        wrapped().sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        torch_optimizer.step()

    def check() -> None:
        our_step()
        torch_step()
        _assert_same_weights(ours, theirs)

    return {"ours": our_step, "reference": torch_step, "check": check}
