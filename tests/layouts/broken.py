"""Faults like those that were reported for other training stacks, put into one layout; one process is left alone."""

from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from coterie_parallel import Axis, GradientReducer, Optimizer
from coterie_parallel.gradients import norm as norm_module
from coterie_routing import LoadSums
from coterie_trainer import step as step_module
from coterie_trainer.config import Config
from coterie_trainer.step import Stepper
from coterie_trainer.verify.running import Outcome, run_layout
from torch import Tensor

EXPERTS = "layers.1.moe.experts.down"


def divided_experts(rank: int, world: int, config: Config) -> Outcome | None:
    """Divide the gradients of experts by the number of ranks once more."""
    reduce = GradientReducer.reduce

    def divided(self: GradientReducer) -> dict[str, Tensor]:
        pieces = reduce(self)
        for name, piece in pieces.items():
            if ".experts." in name:
                piece.div_(world)
        return pieces

    with patch.object(GradientReducer, "reduce", divided):
        return run_layout(rank, world, config)


def one_element(rank: int, world: int, config: Config) -> Outcome | None:
    """Change one element of the second local expert, on the rank that sums it."""
    reduce = GradientReducer.reduce

    def changed(self: GradientReducer) -> dict[str, Tensor]:
        pieces = reduce(self)
        if rank == world - 1:
            pieces[EXPERTS][-1] += 0.5
        return pieces

    with patch.object(GradientReducer, "reduce", changed):
        return run_layout(rank, world, config)


def lost_targets(rank: int, world: int, config: Config) -> Outcome | None:
    """Divide the loss by the target tokens of this rank, as if they were those of the step."""
    whole = step_module.all_reduce_sum
    calls = []

    def own(tensor: Tensor, axis: object) -> Tensor:
        if tensor.dtype == torch.int64 and tensor.numel() == 2 and world > 1:
            calls.append(tensor)
            return tensor * world
        return whole(tensor, axis)

    with patch.object(step_module, "all_reduce_sum", own):
        outcome = run_layout(rank, world, config)
    assert world == 1 or calls
    return outcome


def partial_router(rank: int, world: int, config: Config) -> Outcome | None:
    """Leave this rank's part out of the router's gradient, in the second step."""
    make = Optimizer.__init__

    def make_and_watch(self: Optimizer, *args: object) -> None:
        make(self, *args)
        router = self.reducer.parameters["layers.2.moe.router.weight"]
        seen = []

        def hook(gradient: Tensor) -> Tensor:
            seen.append(None)
            return torch.zeros_like(gradient) if len(seen) == 2 and rank > 0 else gradient

        router.register_hook(hook)

    with patch.object(Optimizer, "__init__", make_and_watch):
        return run_layout(rank, world, config)


def diverging_replica(rank: int, world: int, config: Config) -> Outcome | None:
    """Let the last rank miss a bit of one norm, after each step."""
    step = Optimizer.step

    def missed(self: Optimizer, *args: object, **kwargs: object) -> Tensor:
        norm = step(self, *args, **kwargs)
        if rank == world - 1:
            weight = self.reducer.parameters["norm.weight"]
            weight.data[3] = torch.nextafter(weight[3], torch.tensor(2.0))
        return norm

    with patch.object(Optimizer, "step", missed):
        return run_layout(rank, world, config)


def padding_counted(rank: int, world: int, config: Config) -> Outcome | None:
    """Count one token too many for expert 5, in the sums of one rank."""
    add = LoadSums.__add__

    def too_many(self: LoadSums, other: LoadSums) -> LoadSums:
        total = add(self, other)
        if rank == 1:
            total.counts_E[5] += 1
        return total

    with patch.object(LoadSums, "__add__", too_many):
        return run_layout(rank, world, config)


def nothing_clipped(rank: int, world: int, config: Config) -> Outcome | None:
    """Leave out the clipping, which shows in the parameters alone."""
    step = Optimizer.step

    def unclipped(self: Optimizer, *args: object, **kwargs: object) -> Tensor:
        if world > 1:
            self.config = replace(self.config, gradient_clip=None)
        return step(self, *args, **kwargs)

    with patch.object(Optimizer, "step", unclipped):
        return run_layout(rank, world, config)


def head_without_gradient(rank: int, world: int, config: Config) -> Outcome | None:
    """Leave the gradient of the head out of that of a tied embedding, on the last stage of a pipeline."""
    make = Optimizer.__init__

    def make_and_hook(self: Optimizer, *args: object) -> None:
        make(self, *args)
        if world > 1 and rank >= world - config.parallel.data:
            self.reducer.parameters["embed.weight"].register_hook(torch.zeros_like)

    with patch.object(Optimizer, "__init__", make_and_hook):
        return run_layout(rank, world, config)


def embedding_apart(rank: int, world: int, config: Config) -> Outcome | None:
    """Let the embedding of the last rank miss a bit, after each step."""
    step = Optimizer.step

    def missed(self: Optimizer, *args: object, **kwargs: object) -> Tensor:
        norm = step(self, *args, **kwargs)
        if rank == world - 1:
            weight = self.reducer.parameters["embed.weight"]
            weight.data[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(2.0))
        return norm

    with patch.object(Optimizer, "step", missed):
        return run_layout(rank, world, config)


def norm_of_a_stage(rank: int, world: int, config: Config) -> Outcome | None:
    """Take the gradient norm over the ranks of one stage, so that each stage is clipped by its own."""
    gather = norm_module.all_gather

    def own_stage(tensor: Tensor, axis: Axis) -> list[Tensor]:
        everywhere = gather(tensor, axis)
        data = config.parallel.data
        return everywhere[rank // data * data :][:data]

    with patch.object(norm_module, "all_gather", own_stage):
        return run_layout(rank, world, config)


def bias_of_another_layer(rank: int, world: int, config: Config) -> Outcome | None:
    """Train the selection bias of each layer of a later stage by the load of the layer before."""
    train = Stepper._train_selection_bias

    def by_another(self: Stepper, *args: object) -> None:
        load_LE = self.load_LE
        if rank >= config.parallel.data:
            self.load_LE = load_LE.roll(1, 0)
        train(self, *args)
        self.load_LE = load_LE

    with patch.object(Stepper, "_train_selection_bias", by_another):
        return run_layout(rank, world, config)


def raises_on_two_ranks(rank: int, world: int, config: Config) -> Outcome | None:
    if world == 2:
        dist.barrier()  # a rank that left before the other has all connections would end it with another error
        raise ValueError("broken on purpose")
    return run_layout(rank, world, config)
