"""Run some steps of one layout and gather, whole, everything that they computed."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from coterie_parallel import Chunk, Mesh, Plan, all_gather_objects, make_plan
from torch import Tensor
from torch.distributed.tensor import DTensor

from coterie_trainer.checkpoint import global_tensors
from coterie_trainer.config import Config
from coterie_trainer.fsdp import FsdpOptimizer
from coterie_trainer.training import Run
from coterie_trainer.verify.scaling import UnevenBatches

__all__ = ["Outcome", "Owners", "StepOutcome", "outcome_of", "run_layout"]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one step computed.

    Attributes:
        loss: cross-entropy of the whole step.
        balance_loss: of the whole step, before its coefficient.
        gradient_norm: before clipping.
        load_LE: int64, how many tokens chose each expert, by MoE layer.
        gradients: summed over ranks, before clipping, by global name, with the layers and the experts of all ranks; on
            rank 0.
        state: parameters and selection biases after the step, likewise, in the order of the model.
    """

    loss: float
    balance_loss: float
    gradient_norm: float
    load_LE: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Which rank sums which element of a gradient, and updates that of the parameter.

    Attributes:
        plan: the layout of the ranks.
        experts: names of the tensors whose first index is an expert.
        holders: by name, the ranks that have a part of it, in order: those of its stage, or of two stages for an
            embedding that is also the head.
        shard_ends: by name, where the piece of each rank of the replication axis ends in the flattened local tensor.
    """

    plan: Plan
    experts: frozenset[str]
    holders: dict[str, tuple[int, ...]]
    shard_ends: dict[str, tuple[int, ...]]

    def describe(self, name: str, shape: tuple[int, ...], index: tuple[int, ...]) -> str:
        """Return whose element this is, as "expert 5, held by ranks 1, 3, summed by rank 3"."""
        ranks, local_shape, local_index, held = self.holders[name], shape, index, ""
        if name in self.experts:
            num_local = shape[0] // self.plan.expert
            ranks = ranks[index[0] // num_local :: self.plan.expert]
            local_shape, local_index = (num_local, *shape[1:]), (index[0] % num_local, *index[1:])
            held = f"expert {index[0]}, held by {_ranks(ranks)}, "
        ends = self.shard_ends.get(name)
        if ends is None:  # a selection bias, which every rank of a stage computes
            return f"held by {_ranks(ranks)}"
        place = 0
        for size, at in zip(local_shape, local_index, strict=True):
            place = place * size + at
        return f"{held}summed by rank {ranks[bisect_right(ends, place)]}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all steps of one layout computed.

    Attributes:
        steps: in order.
        owners: which rank has which element.
        replica_problems: tensors and numbers that were not bit-equal on all ranks that have them.
    """

    steps: tuple[StepOutcome, ...]
    owners: Owners
    replica_problems: tuple[str, ...]


def run_layout(rank: int, world: int, config: Config, num_steps: int = 3) -> Outcome | None:
    """Train on the CPU for some steps; all ranks of the layout call together.

    Args:
        rank: of this process.
        world: number of ranks; above one, torch.distributed runs.
        config: of this layout, scaled; see `coterie_trainer.verify.scaling`.
        num_steps: optimizer steps.

    Returns:
        The outcome on rank 0, None on the others.
    """
    plan = make_plan(config.parallel, world, num_experts=config.model.num_experts, top_k=config.model.top_k)
    device = torch.device("cpu")
    with Mesh(plan, rank, timeout_s=config.parallel.timeout_s) as mesh, closing(Run(config, mesh, device)) as run:
        return outcome_of(run, num_steps)


def outcome_of(run: Run, num_steps: int) -> Outcome | None:
    """Train a fresh run on any device for some steps, with the learning rate of its config; all ranks call together.

    Returns:
        The outcome on rank 0, with tensors in fp32 on the CPU; None on the others.
    """
    config, mesh = run.config, run.mesh
    batches = UnevenBatches(config, mesh.axis("data").index, mesh.axis("data").size)
    reductions = _kept_reductions(run)
    steps: list[StepOutcome] = []
    problems: list[str] = []
    for number in range(1, num_steps + 1):
        result = run.stepper.run(batches.step(number - 1), learning_rate=config.optimizer.learning_rate)
        gradients, off_gradients = _gathered(reductions.pop(), mesh)
        state, off_state = _gathered(_state(run), mesh)
        assert not reductions, "one step reduces once"
        outcome = StepOutcome(
            loss=result.loss,
            balance_loss=result.balance_loss,
            gradient_norm=result.gradient_norm,
            load_LE=run.stepper.load_LE.to("cpu", copy=True),
            gradients={name: gradients[name] for name in run.spec.tensor_shapes() if name in gradients},
            state={name: state[name] for name in run.spec.tensor_shapes() if name in state},
        )
        off = [*_differing_numbers(outcome, mesh), *(f"gradient of {text}" for text in off_gradients), *off_state]
        problems += [f"step {number}: {text}" for text in off]
        steps.append(outcome)
    owners = _owners(run)
    if mesh.rank != 0:
        return None
    return Outcome(steps=tuple(steps), owners=owners, replica_problems=tuple(problems))


def _kept_reductions(run: Run) -> list[dict[str, Tensor | Chunk]]:
    """Return a list that gets the summed gradients of every step, before the optimizer clips them in place."""
    kept: list[dict[str, Tensor | Chunk]] = []
    optimizer = run.optimizer
    if isinstance(optimizer, FsdpOptimizer):
        step = optimizer.step

        def keep_and_step(learning_rate: float | None = None, *, loss: Tensor | None = None) -> Tensor:
            state = _state(run)
            kept.append(
                {
                    name: _like(state[name], parameter.grad.to_local())
                    for name, parameter in run.model.named_parameters()
                    if isinstance(parameter.grad, DTensor)
                }
            )
            return step(learning_rate, loss=loss)

        optimizer.step = keep_and_step  # type: ignore[method-assign]
        return kept
    reducer = optimizer.reducer
    reduce = reducer.reduce

    def reduce_and_keep() -> dict[str, Tensor]:
        pieces = reduce()
        kept.append(global_tensors(reducer.gathered(), run.placements, run.mesh.axis("expert")))
        return pieces

    reducer.reduce = reduce_and_keep  # type: ignore[method-assign]
    return kept


def _like(part: Tensor | Chunk, tensor: Tensor) -> Chunk:
    assert isinstance(part, Chunk)
    return replace(part, tensor=tensor.clone())


def _state(run: Run) -> dict[str, Tensor | Chunk]:
    """Return parameters and buffers as a checkpoint has them, in the order of the model."""
    prefix = "model/"
    return {name[len(prefix) :]: part for name, part in run.tensors().items() if name.startswith(prefix)}


def _gathered(parts: Mapping[str, Tensor | Chunk], mesh: Mesh) -> tuple[dict[str, Tensor], list[str]]:
    """Put tensors together from the parts of all ranks; on rank 0, nothing elsewhere.

    Returns:
        The whole tensors, of all names that any rank has; and, for each rank whose part has other bits than that of an
        earlier rank for the same elements, which ranks these are.
    """
    own = {}
    for name, part in parts.items():
        tensor = part.tensor if isinstance(part, Chunk) else part
        offsets = part.offsets if isinstance(part, Chunk) else (0,) * tensor.ndim
        shape = part.global_shape if isinstance(part, Chunk) else tuple(tensor.shape)
        # fp32 holds every number of a narrower dtype as it is.
        own[name] = offsets, shape, tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    everywhere = all_gather_objects(own, mesh.axis("world"))
    whole: dict[str, Tensor] = {}
    problems: list[str] = []
    if mesh.rank != 0:
        return whole, problems
    writers: dict[str, Tensor] = {}
    for rank, from_rank in enumerate(everywhere):
        for name, (offsets, shape, array) in from_rank.items():
            tensor = torch.from_numpy(array)
            if name not in whole:
                whole[name], writers[name] = torch.full(shape, torch.nan), torch.full(shape, -1)
            region = tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))
            there, writer = whole[name][region], writers[name][region]
            bits_differ = tensor.view(torch.int32) != there.contiguous().view(torch.int32)
            differs = bits_differ & (writer >= 0)
            if differs.any():
                earlier = int(writer[differs][0])
                problems.append(f"{name} of rank {rank} has other bits than that of rank {earlier}")
            is_first = writer < 0
            there.copy_(torch.where(is_first, tensor, there))
            writer.copy_(torch.where(is_first, rank, writer))
    for name, writer in writers.items():
        assert int(writer.min()) >= 0, f"{name}: some elements are on no rank"
    return whole, problems


def _owners(run: Run) -> Owners:
    """Return who has what; all ranks call."""
    optimizer, world = run.optimizer, run.mesh.axis("world")
    own_experts = {name for name, placement in run.placements.items() if "expert" in placement.sharded_over}
    state = _state(run)
    everywhere = all_gather_objects((list(state), own_experts), world)
    holders: dict[str, tuple[int, ...]] = {}
    for rank, (names, _) in enumerate(everywhere):
        for name in names:
            holders[name] = (*holders.get(name, ()), rank)
    ends: dict[str, tuple[int, ...]] = {}
    if isinstance(optimizer, FsdpOptimizer):
        own_ends = {
            name: (part.offsets[0] + len(part.tensor)) * math.prod(part.global_shape[1:])
            for name, part in state.items()
            if isinstance(part, Chunk)
        }
        of_all = all_gather_objects(own_ends, run.mesh.axis("data"))
        ends = {name: tuple(one[name] for one in of_all) for name in own_ends}
    else:
        own = {
            slot.name: tuple(bucket.layout.piece(slot, shard)[1] for shard in range(bucket.layout.num_shards))
            for bucket in optimizer.reducer.buckets
            for slot in bucket.layout.slots
        }
        for one in all_gather_objects(own, world):
            ends |= one
    experts = frozenset(name for _, names in everywhere for name in names)
    return Owners(plan=run.mesh.plan, experts=experts, holders=holders, shard_ends=ends)


def _differing_numbers(outcome: StepOutcome, mesh: Mesh) -> list[str]:
    own = {"loss": outcome.loss, "balance loss": outcome.balance_loss, "gradient norm": outcome.gradient_norm}
    everywhere = all_gather_objects(own, mesh.axis("world"))
    return [
        f"{name} of rank {rank} is {one[name]!r}, and that of rank 0 is {value!r}"
        for name, value in everywhere[0].items()
        for rank, one in enumerate(everywhere)
        if one[name] != value
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
