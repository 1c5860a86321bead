"""Whole training steps of a model spread over the ranks: build it, run some steps, time them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any
from zlib import crc32

import torch
from coterie_export import ModelSpec
from coterie_parallel import AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan, make_stages
from coterie_trainer.config import TrainConfig, assignment
from coterie_trainer.data.dataset import Batch
from coterie_trainer.fsdp import FsdpOptimizer, shard_model
from coterie_trainer.model import Decoder, build_model, dispatchers, placements
from coterie_trainer.step import Stepper, StepResult
from torch import Tensor
from trainer.step_cases import CASES, Case, Setup, make_batches

from multi_gpu_parts.bench import Bench, Spans

__all__ = ["Built", "build", "memory_formula", "spec_of", "time_steps", "tiny_case"]


def spec_of(**changes: Any) -> ModelSpec:
    """Return the spec of a model with experts in all layers, a vocabulary of 100,352 and heads of 128."""
    return replace(CASES["olmo8"].spec, **changes)


def tiny_case(*, micro_batches: int = 2, **changes: Any) -> Case:
    """Return a case of a dry run."""
    tiny = CASES["tiny"]
    return replace(tiny, spec=replace(tiny.spec, **changes), sequences=1, micro_batches=micro_batches)


def memory_formula(
    case: Case, world: int, *, capacity_factor: float = 1.25, moment_bytes: int = 2, num_dense: int = 14
) -> tuple[str, float]:
    """Return the memory of one of ``world`` ranks that share experts and sequences: the formula and its GiB.

    Args:
        case: the model and its micro-batch.
        world: N, which is also the expert degree.
        capacity_factor: rows of a buffer over T * K.
        moment_bytes: of each of Adam's moments of a weight.
        num_dense: widths of a token that autograd keeps in a layer outside of the experts.
    """
    spec, tokens = case.spec, case.tokens
    layers = spec.num_layers
    routed = layers * spec.num_experts * 3 * spec.d_model * spec.expert_hidden
    attention = 2 * spec.d_model * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    shared = 3 * spec.d_model * spec.shared_hidden
    dense = layers * (attention + shared + spec.d_model * spec.num_experts) + 2 * spec.vocab_size * spec.d_model
    rows = capacity_factor * tokens * spec.top_k
    state = 10 + 2 * moment_bytes
    kept = 2 * layers * (rows * (spec.d_model + 3 * spec.expert_hidden) + tokens * num_dense * spec.d_model)
    total = routed / world * state + dense * (6 + (4 + 2 * moment_bytes) / world)
    total += kept + 3 * rows * spec.d_model * 2
    text = (
        f"bytes of a rank = {state} R / N + (6 + {4 + 2 * moment_bytes} / N) W + 2 L (C (D + 3 H) + {num_dense} T D) "
        f"+ 6 C D = {total / 2**30:.1f} GiB; R = {routed / 1e9:.2f}e9 routed weights, W = {dense / 1e9:.2f}e9 others, "
        f"N {world}, L {layers}, D {spec.d_model}, H {spec.expert_hidden}, T {tokens}, C {rows:.0f} rows of a buffer"
    )
    return text, total / 2**30


@dataclass(kw_only=True)
class Built:
    """A model of this rank with what trains it."""

    case: Case
    mesh: Mesh
    model: Decoder
    optimizer: Optimizer | FsdpOptimizer
    stepper: Stepper
    batches: list[Batch]

    def step(self) -> StepResult:
        """Make a step and wait for its numbers."""
        return self.stepper.run(self.batches, learning_rate=1e-4)

    def close(self, bench: Bench) -> None:
        """Give up buffers and groups; all ranks call."""
        bench.barrier()
        self.model.close()
        self.mesh.close()


def build(
    bench: Bench,
    case: Case,
    parallel: ParallelConfig,
    *,
    alone: bool = False,
    compiled: bool = False,
    moments: str = "float32",
    load: str = "random",
    weights_arrive_late: bool = False,
) -> Built:
    """Return a model in some layout: the same weights in each, and the same sequences on each index of the data axis.

    Args:
        bench: of this rank.
        case: the model and the micro-batches of a rank.
        parallel: the layout.
        alone: on this rank only, with the micro-batches of all indices of the data axis of ``parallel``.
        compiled: whether dense layers are compiled.
        moments: dtype of Adam's moments.
        load: what decides the experts.
        weights_arrive_late: whether a step returns before all layers have their new weights.
    """
    num_sources = parallel.data if alone else 1
    if alone:
        mesh = _mesh_of_one(bench)
        parallel = replace(ParallelConfig(), data=1, dispatcher="local")
    else:
        mesh = bench.mesh(parallel)
    is_fsdp = parallel.data_parallel == "fsdp"
    pipeline, data = mesh.axis("pipeline"), mesh.axis("data")
    stages = make_stages(parallel, case.spec.num_layers) if pipeline.size > 1 else None
    train = TrainConfig(
        steps=1,
        sequences_per_step=case.sequences * case.micro_batches * data.size * num_sources,
        sequences_per_micro_batch=case.sequences,
        assignment=None if load == "router" else load,
    )
    model = build_model(
        case.spec,
        expert_axis=mesh.axis("expert"),
        dispatcher=parallel.dispatcher,
        options=parallel.dispatch_options() if parallel.dispatcher == "rowwise" else None,
        assignment=assignment(train),
        compiles=compiled and bench.is_gpu,
        stages=None if stages is None else stages.on_rank(pipeline.index),
        device=bench.device,
        dtype=torch.float32 if is_fsdp else bench.dtype,
    )
    _draw(model, first_expert=mesh.axis("expert").index * (case.spec.num_experts // mesh.axis("expert").size))
    optimizer: Optimizer | FsdpOptimizer
    config = AdamWConfig(moments_dtype=moments)
    if is_fsdp:
        shard_model(model, mesh, dtype=bench.dtype)
        optimizer = FsdpOptimizer(model, mesh, config, dtype=bench.dtype)
    else:
        optimizer = Optimizer(model.named_parameters(), placements(model, stages), mesh, config)
        if weights_arrive_late:
            optimizer.overlap_with_forward(model.layers)
    stepper = Stepper(model, optimizer, mesh, train, stages)
    sources = range(num_sources) if alone else [data.index]
    setup = Setup(device=bench.device.type)
    batches = [batch for source in sources for batch in make_batches(case, setup, seed=source)]
    return Built(case=case, mesh=mesh, model=model, optimizer=optimizer, stepper=stepper, batches=batches)


def _mesh_of_one(bench: Bench) -> Mesh:
    return Mesh(make_plan(ParallelConfig(data=1), 1), 0, timeout_s=bench.settings.timeout_s, device=bench.device)


@torch.no_grad()
def _draw(model: Decoder, *, first_expert: int) -> None:
    """Draw each weight on the device from its name, and each expert by itself, so that no layout changes them."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif ".moe.experts." in name:
            for number, matrix in enumerate(parameter, start=first_expert):
                _normal(matrix, f"{name} {number}")
        else:
            _normal(parameter, name)
    for buffer in model.buffers():
        buffer.zero_()


def _normal(tensor: Tensor, name: str) -> None:
    generator = torch.Generator(tensor.device).manual_seed(crc32(name.encode()))
    tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device) * 0.02)


def time_steps(bench: Bench, built: Built, *, warmups: int = 2, steps: int = 4, num_data: int) -> dict[str, Any]:
    """Run steps that follow one another as in training, and return what was seen, the same on all ranks.

    Args:
        bench: of this rank.
        built: what to run.
        warmups: steps before, of which the first one compiles and makes buffers.
        steps: timed ones.
        num_data: size of the data axis: how many ranks have sequences of their own.

    Returns:
        step_ms, median over the steps of the slowest rank, and what of it is the optimizer; tokens_per_s_per_gpu,
        peak_gib and peer_gib of the worst rank, which add up, losses.
    """
    losses = [built.step().loss for _ in range(warmups)]
    if bench.tiny:
        steps = 1
    bench.free()
    spans = Spans(bench)
    restore = _timed(built.optimizer, spans)
    bench.align()
    marks, pending = [bench.mark()], None
    for _ in range(steps):
        following = built.stepper.start(built.batches, learning_rate=1e-4)
        marks.append(bench.mark())
        if pending is not None:
            losses.append(pending.read().loss)
        pending = following
    assert pending is not None
    losses.append(pending.read().loss)
    restore()
    bench.barrier()
    own_ms = median(bench.between_ms(*pair) for pair in pairwise(marks))
    step_ms = max(bench.gather(own_ms))
    if not all(0 < loss < 100 for loss in losses) or any(one != losses for one in bench.gather(losses)):
        bench.fault(f"losses {losses}")
    tokens = built.case.tokens * built.case.micro_batches * num_data
    return {
        "step_ms": step_ms,
        "optimizer_ms": spans.ms()["optimizer"],
        "tokens_per_s_per_gpu": tokens / step_ms * 1e3 / bench.world,
        "peak_gib": bench.peak_gib(),
        "peer_gib": max(bench.gather(_peer_bytes(built.model))) / 2**30,
        "losses": losses,
    }


def _peer_bytes(model: Decoder) -> int:
    """Return the bytes of the buffers that peers write to, which torch's allocator does not count."""
    exchanges = (getattr(one, "_exchange", None) for one in dispatchers(model))
    return sum(exchange.local_bytes() for exchange in exchanges if exchange is not None)


def _timed(optimizer: Any, spans: Spans) -> Callable[[], None]:
    """Let ``spans`` time the steps of an optimizer; returns what ends that."""
    step = optimizer.step

    def timed(*args: Any, **named: Any) -> Any:
        with spans.span("optimizer", aligned=False):
            return step(*args, **named)

    optimizer.step = timed

    def restore() -> None:
        with suppress(AttributeError):
            del optimizer.step

    return restore
