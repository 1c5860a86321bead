"""Sharded gradients on several processes, on any device that their back-end takes, against a plain loop."""

from collections.abc import Callable
from typing import Any

import torch
from coterie_parallel import AdamWConfig, Mesh, Optimizer, ParallelConfig, ReductionConfig, make_plan, replica_problems
from torch import Tensor, nn

from parallel.echo_mesh import backward, given_gradient
from parallel.optimizer_checks import SHARDED_SHAPES, placements_of

__all__ = ["check_sharded_ranks"]

WORLD, NUM_MICRO_BATCHES = 2, 3
# For an expert degree of 1: with experts spread over two ranks, no gradient of theirs would be summed.
PLACEMENTS = placements_of(SHARDED_SHAPES)


def _named(device: torch.device) -> dict[str, nn.Parameter]:
    generator = torch.Generator(device).manual_seed(5)
    return {
        name: nn.Parameter(torch.randn(shape, device=device, generator=generator).bfloat16())
        for name, shape in SHARDED_SHAPES.items()
    }


def _seed(rank: int, number: int) -> int:
    return 10 * rank + number


def _problems_of_rank(rank: int, world: int, kind: str) -> list[str]:
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    named = _named(device)
    with Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=50, device=device) as mesh:
        # Without a clip, which may change what `gathered` returns after the step.
        config = AdamWConfig(gradient_clip=None, reduction=ReductionConfig(bucket_bytes=40_000, sharded=True))
        optimizer = Optimizer(named.items(), PLACEMENTS, mesh, config)
        for number in range(NUM_MICRO_BATCHES):
            with optimizer.micro_batch(is_last=number == NUM_MICRO_BATCHES - 1):
                backward(list(named.values()), _seed(rank, number))
        optimizer.step(1e-3)
        found = optimizer.reducer.gathered()
        wrong = [
            f"rank {rank}: the gradient of {name} has other bits than a plain loop gives"
            for place, (name, parameter) in enumerate(named.items())
            if not torch.equal(found[name], _expected(parameter, place, world))
        ]
        return wrong + replica_problems(named.items(), PLACEMENTS, mesh)


def _expected(parameter: Tensor, place: int, world: int) -> Tensor:
    """Return the gradients of all ranks, added in fp32 in their order, micro-batch by micro-batch."""
    total = torch.zeros_like(parameter, dtype=torch.float32)
    for number in range(NUM_MICRO_BATCHES):
        of_ranks = [given_gradient(parameter, 1000 * _seed(rank, number) + place).float() for rank in range(world)]
        total += torch.stack(of_ranks).sum(0)  # exact for two
    return total


def check_sharded_ranks(kind: str, run: Callable[..., list[Any]]) -> list[str]:
    """Return what is wrong on two processes whose tensors are on a device of this kind, and travel through gloo."""
    return [problem for problems in run(_problems_of_rank, WORLD, kind) for problem in problems]
