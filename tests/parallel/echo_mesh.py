"""One rank of a layout without the others: what its peers would send is what it sends itself.

So a process can hold what a rank holds, and start and end exchanges as it does, on a device that has no room or no
back-end for a second one. Sums are those of peers with equal gradients; gathered weights are wrong, except this rank's
own. What a real exchange allocates inside of its back-end, and how long it takes, is not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from coterie_parallel import Axis, Plan
from coterie_parallel.collectives import Pending
from coterie_parallel.gradients import reducer
from coterie_parallel.optimizer import state
from torch import Tensor, nn

__all__ = ["EchoMesh", "backward", "echoing", "given_gradient"]


class EchoMesh:
    """The axes of a rank, without groups: collectives that return small things return those of this rank alone."""

    def __init__(self, plan: Plan, device: torch.device, rank: int = 0) -> None:
        self.plan, self.device, self.rank = plan, device, rank

    def axis(self, name: str) -> Axis:
        (ranks,) = [ranks for ranks in self.plan.axis_ranks(name) if self.rank in ranks]
        return Axis(name=name, size=len(ranks), index=ranks.index(self.rank), group=None, ranks=ranks)


@contextmanager
def echoing(delay_cycles: int = 0) -> Iterator[None]:
    """Let exchanges of gradients and weights be copies of this rank's part, on a GPU so many cycles later."""

    def echo(received: Tensor, part: Tensor, what: str, axis: Axis) -> Pending:
        if delay_cycles and received.is_cuda:
            torch.cuda._sleep(delay_cycles)
        received.view(axis.size, -1).copy_(part.expand(axis.size, -1))
        return Pending(what, axis, None)

    def all_to_all(received: Tensor, sent: Tensor, axis: Axis) -> Pending:
        return echo(received, sent.view(axis.size, -1)[axis.index], "all_to_all", axis)

    def all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
        return echo(whole, part, "all_gather", axis)

    to_all = mock.patch.object(reducer, "start_all_to_all", all_to_all)
    with to_all, mock.patch.object(state, "start_all_gather", all_gather):
        yield


def given_gradient(parameter: Tensor, seed: int) -> Tensor:
    """Return the gradient that `backward` gives a parameter, in its dtype."""
    generator = torch.Generator(parameter.device).manual_seed(seed)
    return torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device, generator=generator)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, parameter: nn.Parameter, seed: int) -> Tensor:
        # Neither is saved as what a backward needs: a parameter that is updated later would be refused.
        ctx.parameter, ctx.seed = parameter, seed
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, given_gradient(ctx.parameter, ctx.seed), None


def backward(parameters: list[nn.Parameter], seed: int) -> None:
    """Run a backward that gives every parameter a gradient, the last one first, and allocates nothing else."""
    x = torch.zeros((), device=parameters[0].device, requires_grad=True)
    for number, parameter in enumerate(parameters):
        x = _Given.apply(x, parameter, 1000 * seed + number)
    x.backward()
