"""Resident weights against FSDP2: the same model and tokens on CPU ranks, with what each sends, holds and takes.

Bytes that a rank sends in a step, fp32, with an even load of the experts: n ranks, k of them sharing the experts, A
micro-batches of T tokens a rank, L layers with experts, D model width, K choices; W_d weights outside of the routed
experts, W_e in them, W_r of W_d outside of all layers (embedding and last norm).

    resident            8 * W_d * (n-1)/n  +  8 * W_e/k * (n-k)/n  +  A * L * T * K * (k-1)/k * (16 * D + 8)
    fsdp                4 * A * (n-1)/n * (3 * (W_d - W_r + W_e) + 2 * W_r)
    fsdp, reduced once  4 * (n-1)/n * (A * (2 * (W_d - W_r + W_e) + W_r) + W_d + W_e)

Resident: gradients and new weights once a step, then rows there and back in both passes, with their weights. FSDP2:
each layer is gathered for the forward and for the backward, what is outside of layers once, and gradients are reduced
in each micro-batch or in the last one. Counts of rows, the norm, metrics and padding are not in the formulas.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from coterie_export import ModelSpec
from coterie_parallel import (
    AdamWConfig,
    Axis,
    Mesh,
    Optimizer,
    ParallelConfig,
    all_gather_objects,
    barrier,
    make_plan,
)
from coterie_routing import Assignment

from coterie_trainer.config import TrainConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.fsdp import FsdpOptimizer, shard_model
from coterie_trainer.initialization import initialize
from coterie_trainer.model import build_model, placements
from coterie_trainer.step import StepOptimizer, Stepper
from coterie_trainer.step_watch import StepWatch

__all__ = [
    "DataParallelRow",
    "DataParallelSizes",
    "compare_data_parallel",
    "data_parallel_table",
    "predicted_bytes",
    "ways",
]

_HEAD_DIM = 32
_LONGEST_SEQUENCE = 128


@dataclass(frozen=True, kw_only=True)
class DataParallelSizes:
    """The sizes of a comparison; ``num_tokens`` is of one rank and one of ``accumulation`` micro-batches."""

    num_experts: int = 128
    top_k: int = 4
    width: int = 128
    expert_hidden: int = 256
    num_layers: int = 1
    vocab_size: int = 512
    num_tokens: int = 512
    accumulation: int = 4

    @property
    def sequence_length(self) -> int:
        """Tokens of one sequence: as long as divides the tokens, up to 128."""
        return next(length for length in range(_LONGEST_SEQUENCE, 0, -1) if self.num_tokens % length == 0)

    def spec(self) -> ModelSpec:
        """Return the model: every layer has experts, and the embeddings are tied."""
        num_heads = max(1, self.width // _HEAD_DIM)
        return ModelSpec(
            vocab_size=self.vocab_size,
            d_model=self.width,
            num_layers=self.num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=_HEAD_DIM,
            qk_norm="head",
            max_sequence_length=_LONGEST_SEQUENCE,
            num_dense_layers=0,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_hidden=self.expert_hidden,
            tied_embeddings=True,
        )

    def problems(self, num_ranks: int) -> list[str]:
        """Return every fault on so many ranks."""
        found = [f"{name} ({value}) must be at least 1" for name, value in vars(self).items() if value < 1]
        if num_ranks < 2:
            found.append(f"the number of ranks ({num_ranks}) must be at least 2: one rank has nothing to share")
        elif self.num_experts % num_ranks:
            found.append(f"num_experts ({self.num_experts}) must be a multiple of the number of ranks ({num_ranks})")
        return found or self.spec().problems()


@dataclass(frozen=True, kw_only=True)
class DataParallelRow:
    """One way to share a model.

    Attributes:
        way: one of `ways`.
        tokens_per_second: of all ranks together, at the median time of a step of the slowest rank.
        against_fsdp: median over the rounds of the time of "fsdp" over the time of this way.
        sent_bytes: of one rank in one step, counted at the collectives; mean of the ranks.
        predicted_bytes: the same by the formulas of this module.
        peak_bytes: the most bytes of live tensors in a step, on the worst rank: weights, gradients, optimizer state,
            activations. What an operation holds only inside of itself is not in it.
        losses: of each step.
        agrees: every loss is that of the first way, to a relative 1e-5.
    """

    way: str
    tokens_per_second: float
    against_fsdp: float
    sent_bytes: float
    predicted_bytes: float
    peak_bytes: int
    losses: list[float]
    agrees: bool


@dataclass(frozen=True, kw_only=True)
class _Way:
    name: str
    expert: int = 1
    is_fsdp: bool = False
    reduce_each: bool = True


def ways(num_ranks: int) -> list[str]:
    """Return the names of what is compared on so many ranks."""
    return [way.name for way in _ways(num_ranks)]


def _ways(num_ranks: int) -> list[_Way]:
    return [
        _Way(name=f"resident, expert = {num_ranks}", expert=num_ranks),
        _Way(name="resident, expert = 1"),
        _Way(name="fsdp", is_fsdp=True),
        _Way(name="fsdp, reduced once", is_fsdp=True, reduce_each=False),
    ]


def predicted_bytes(sizes: DataParallelSizes, num_ranks: int) -> dict[str, float]:
    """Return what a rank sends in a step, by way: the formulas of this module."""
    count = {name: torch.Size(shape).numel() for name, shape in sizes.spec().tensor_shapes().items()}
    experts = sum(numel for name, numel in count.items() if ".moe.experts." in name)
    dense = sum(count.values()) - experts
    outside = sum(numel for name, numel in count.items() if not name.startswith("layers."))
    layers = dense - outside + experts
    share = (num_ranks - 1) / num_ranks
    found = {}
    for way in _ways(num_ranks):
        if way.is_fsdp:
            gathered = sizes.accumulation * (2 * layers + outside)
            reduced = (sizes.accumulation if way.reduce_each else 1) * (dense + experts)
            found[way.name] = 4 * share * (gathered + reduced)
            continue
        rows = sizes.accumulation * sizes.num_layers * sizes.num_tokens * sizes.top_k * (way.expert - 1) / way.expert
        found[way.name] = (
            8 * dense * share
            + 8 * experts / way.expert * (num_ranks - way.expert) / num_ranks
            + rows * (16 * sizes.width + 8)
        )
    return found


def compare_data_parallel(axis: Axis, sizes: DataParallelSizes, repeats: int = 5) -> list[DataParallelRow]:
    """Run whole steps in each of the `ways`, in turn; all ranks of ``axis``, which is the whole world, call together.

    The load of the experts is even, so that each way has the same work. Two steps of each are not timed: one makes all
    buffers, and one is counted.

    Raises:
        ValueError: with every fault of the sizes.
    """
    if problems := sizes.problems(axis.size):
        raise ValueError("\n".join(problems))
    runners = []
    for way in _ways(axis.size):
        _report(axis, f"{way.name}: two steps that are not timed")
        runners.append(_Runner(way, axis, sizes))
    for number in range(repeats):
        _report(axis, f"round {number + 1} of {repeats}")
        for runner in runners:
            runner.timed_step()
    own = [(runner.times_s, runner.sent_bytes, runner.peak_bytes, runner.losses) for runner in runners]
    for runner in runners:
        runner.close()
    of_ranks = all_gather_objects(own, axis)
    # A step is over when it is on the last rank.
    times_s = {
        runner.way.name: [max(taken) for taken in zip(*(one[number][0] for one in of_ranks), strict=True)]
        for number, runner in enumerate(runners)
    }
    predicted = predicted_bytes(sizes, axis.size)
    num_tokens = axis.size * sizes.num_tokens * sizes.accumulation
    rows = []
    for number, (name, taken) in enumerate(times_s.items()):
        losses = of_ranks[0][number][3]
        pairs = zip(losses, of_ranks[0][0][3], strict=True)
        rows.append(
            DataParallelRow(
                way=name,
                tokens_per_second=num_tokens / statistics.median(taken),
                against_fsdp=statistics.median(other / one for one, other in zip(taken, times_s["fsdp"], strict=True)),
                sent_bytes=statistics.mean(one[number][1] for one in of_ranks),
                predicted_bytes=predicted[name],
                peak_bytes=max(one[number][2] for one in of_ranks),
                losses=losses,
                agrees=all(abs(one - first) <= 1e-5 * abs(first) for one, first in pairs),
            )
        )
    return rows


def data_parallel_table(rows: Sequence[DataParallelRow]) -> str:
    """Return the comparison as a table for people."""
    mib = 2**20
    lines = [f"{'':24} {'tokens/s':>10} {'speed':>8} {'sent':>12} {'predicted':>12} {'peak memory':>12}  losses"]
    for row in rows:
        lines.append(
            f"{row.way:24} {row.tokens_per_second:10,.0f} {row.against_fsdp:7.2f}x {row.sent_bytes / mib:8.2f} MiB "
            f"{row.predicted_bytes / mib:8.2f} MiB {row.peak_bytes / mib:8.1f} MiB  "
            + ("as the first" if row.agrees else "differ from the first")
        )
    return "\n".join(lines)


def _report(axis: Axis, text: str) -> None:
    """Say on standard error, which results do not go to, how far a comparison is: it takes minutes."""
    if axis.index == 0:
        print(text, file=sys.stderr, flush=True)


class _Runner:
    """One way on this rank, after its steps that are not timed."""

    def __init__(self, way: _Way, axis: Axis, sizes: DataParallelSizes) -> None:
        self.way, self._axis = way, axis
        self.times_s: list[float] = []
        self.losses: list[float] = []
        plan = make_plan(ParallelConfig(data=axis.size, expert=way.expert), axis.size)
        self._mesh = Mesh(plan, axis.index, timeout_s=axis.timeout_s)
        self._batches = _batches(axis.index, sizes)
        with StepWatch() as watch:
            self._stepper = _stepper(way, self._mesh, sizes)
            self._step()
            watch.sent_bytes.clear()
            watch.reset_peak()
            self._step()
            self.sent_bytes, self.peak_bytes = watch.sent_bytes.total(), watch.peak_bytes

    def timed_step(self) -> None:
        barrier(self._axis)
        start_s = time.perf_counter()
        self._step()
        self.times_s.append(time.perf_counter() - start_s)

    def close(self) -> None:
        self._stepper.model.close()
        self._mesh.close()

    def _step(self) -> None:
        self.losses.append(self._stepper.run(self._batches, learning_rate=1e-3).loss)


def _batches(rank: int, sizes: DataParallelSizes) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    shape = (sizes.num_tokens // sizes.sequence_length, sizes.sequence_length)
    found = []
    for _ in range(sizes.accumulation):
        tokens_BS = torch.randint(sizes.vocab_size, shape, generator=generator)
        documents_BS = torch.zeros(shape, dtype=torch.int32)
        found.append(Batch(tokens_BS=tokens_BS, targets_BS=tokens_BS.roll(-1, 1), document_ids_BS=documents_BS))
    return found


def _stepper(way: _Way, mesh: Mesh, sizes: DataParallelSizes) -> Stepper:
    model = build_model(
        sizes.spec(),
        expert_axis=mesh.axis("expert"),
        dispatcher="local" if way.expert == 1 else "all_to_all",
        assignment=Assignment(kind="uniform"),
    )
    initialize(model, seed=0, std=0.02)
    settings = AdamWConfig()
    optimizer: StepOptimizer
    if way.is_fsdp:
        shard_model(model, mesh)
        optimizer = FsdpOptimizer(model, mesh, settings, reduce_each=way.reduce_each)
    else:
        optimizer = Optimizer(model.named_parameters(), placements(model), mesh, settings)
    num_sequences = sizes.num_tokens // sizes.sequence_length
    train = TrainConfig(
        steps=1,
        sequences_per_step=num_sequences * sizes.accumulation * mesh.axis("data").size,
        sequences_per_micro_batch=num_sequences,
    )
    return Stepper(model, optimizer, mesh, train)
