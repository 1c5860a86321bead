"""What `coterie check` shows: the resolved plan of a config, its parameters, the memory of a rank and its messages."""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from coterie_export import ModelSpec, fitting_families
from coterie_parallel import DeepEPOptions, OptimizerMemory, Plan, Stages, make_plan, make_stages, optimizer_memory
from coterie_parallel.dispatch.rowwise.buffers import peak_row_bytes
from coterie_parallel.dispatch.rowwise.capacity import first_capacity

from coterie_trainer.check_fsdp import FsdpSizes
from coterie_trainer.check_stages import (
    RankPart,
    bubble_lines,
    in_flight_lines,
    rank_parts,
    sent_lines,
    stage_lines,
)
from coterie_trainer.config import Config, ConfigError, config_problems
from coterie_trainer.data.shards import read_index
from coterie_trainer.placement import placement_of
from coterie_trainer.reading import to_dict

__all__ = ["active_parameters", "report"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MOST_RANKS = 16


def report(config: Config, world: int) -> str:
    """Return the plan, the sizes and the memory of ``config`` on ``world`` ranks.

    Raises:
        ConfigError: all that is wrong with it, judged with the vocabulary of the data where that is there.
    """
    vocab_size, origin = _vocabulary(config)
    problems = config_problems(config, world, vocab_size)
    if problems:
        raise ConfigError(problems)
    plan = make_plan(config.parallel, world, num_experts=config.model.num_experts, top_k=config.model.top_k)
    spec = config.model.to_spec(vocab_size, config.data.sequence_length, None)
    stages, number = make_stages(config.parallel, spec.num_layers), _num_micro_batches(config, plan)
    parts = rank_parts(spec, _parameter_shapes(spec), stages, number)
    if config.parallel.data_parallel == "fsdp":
        holds = [f"every rank: 1/{plan.data} of each parameter, of its gradient and of its optimizer state"]
        memory_lines, message_lines = _fsdp_lines(config, spec, plan, parts[0])
    else:
        holds = _holds_lines(config, plan)
        memories = [_memory(config, spec, plan, stages, part) for part in parts]
        totals = [_total(config, spec, plan, *both) for both in zip(parts, memories, strict=True)]
        # Where several need the same, the first stands for them.
        most = totals.index(max(totals))
        memory_lines = _memory_lines(config, spec, plan, parts[most], memories[most])
        message_lines = _message_lines(config, spec, plan, parts[most], memories[most])
        if config.optimizer.gradient_sharding:
            # Its own buffers take memory too, and of a small model more than it saves.
            whole = replace(config, optimizer=replace(config.optimizer, gradient_sharding=False))
            memory = _memory(whole, spec, plan, stages, parts[most])
            size = _size(_total(whole, spec, plan, parts[most], memory))
            memory_lines.append(f"sum without gradient_sharding: {size}")
        if plan.pipeline > 1:
            memory_lines = [f"pipeline {most}, which needs most:", *(f"  {line}" for line in memory_lines)]
            memory_lines += [
                f"pipeline {part.index}: {_numel(part, plan):,} parameters; sum: {_size(total)}"
                for part, total in zip(parts, totals, strict=True)
            ]
            message_lines = [f"pipeline {most}:", *(f"  {line}" for line in message_lines)]
    tokens = config.train.sequences_per_micro_batch * config.data.sequence_length
    one = tokens * spec.d_model * _DTYPE_BYTES[config.dtype]
    sections = {
        "plan": [
            *plan.describe().splitlines(),
            *stage_lines(spec, plan, stages),
            _experts_line(config, plan),
            *_deep_ep_lines(config),
            *holds,
        ],
        "model": _model_lines(config, spec, origin),
        "memory of a rank, without activations": memory_lines,
        "activations that wait for their backward": in_flight_lines(parts, plan, stages, number),
        "bytes that a rank sends in a step": message_lines,
        "bytes that a rank sends to other stages in a step": sent_lines(parts, plan, stages, number, one),
        "step": [*_step_lines(config, plan), *bubble_lines(plan, stages, number)],
    }
    shown = {title: lines for title, lines in sections.items() if lines}
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in shown.items())


def active_parameters(spec: ModelSpec) -> int:
    """Return how many parameters one token meets: all but the routed experts that it does not choose."""
    sizes = _parameter_sizes(spec)
    return sum(size * spec.top_k // spec.num_experts if _is_expert(name) else size for name, size in sizes.items())


def _vocabulary(config: Config) -> tuple[int, str]:
    """Return the size of the vocabulary and where it comes from."""
    folder = Path(config.data.path)
    if folder.is_dir():
        return read_index(folder).vocab_size, f"of {folder}"
    if config.data.source == "stdlib":
        return config.data.vocab_size, "data.vocab_size"
    return config.data.vocab_size, f"data.vocab_size, as {folder} is not there yet"


def _parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    # The selection bias is state without a gradient: it is no parameter.
    return {name: shape for name, shape in spec.tensor_shapes().items() if not name.endswith(".selection_bias")}


def _parameter_sizes(spec: ModelSpec) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in _parameter_shapes(spec).items()}


def _is_expert(name: str) -> bool:
    return ".moe.experts." in name


def _experts_line(config: Config, plan: Plan) -> str:
    num_experts = config.model.num_experts
    if config.parallel.data_parallel == "fsdp":
        return f"experts ({num_experts}): gathered on each rank, with every layer, by FSDP2"
    return (
        f"experts ({num_experts}) = expert ({plan.expert}) x {num_experts // plan.expert} on each rank; "
        f"dispatcher {config.parallel.dispatcher}"
    )


def _deep_ep_lines(config: Config) -> list[str]:
    """Say with which settings DeepEP runs, where it does."""
    if config.parallel.dispatcher != "deep_ep":
        return []
    settings = to_dict(config.parallel.deep_ep or DeepEPOptions())
    return ["DeepEP: " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())]


def _model_lines(config: Config, spec: ModelSpec, vocabulary: str) -> list[str]:
    total, dense = sum(_parameter_sizes(spec).values()), spec.num_dense_layers
    families = ", ".join(fitting_families(spec)) or "none"
    return [
        f"layers: {spec.num_layers} = {dense} dense + {spec.num_layers - dense} with experts",
        f"experts: {spec.num_experts} of width {spec.expert_hidden}, {spec.top_k} for each token, "
        + (f"and a shared one of width {spec.shared_hidden}" if spec.shared_hidden else "no shared one"),
        f"vocabulary: {spec.vocab_size:,} ({vocabulary})",
        f"parameters: {total:,}",
        f"active parameters for a token: {active_parameters(spec):,}",
        *_muon_lines(config, spec),
        f"export families that can hold it: {families}",
    ]


def _muon_lines(config: Config, spec: ModelSpec) -> list[str]:
    """Say how many parameters Muon updates and how many AdamW, where there is Muon."""
    settings = config.optimizer.to_adamw()
    if settings.muon is None:
        return []
    numel = {"muon": 0, "adamw": 0}
    for name, shape in _parameter_shapes(spec).items():
        numel[settings.kind_of(name, len(shape))] += math.prod(shape)
    return [f"parameters updated by Muon: {numel['muon']:,}; by AdamW: {numel['adamw']:,}"]


def _holds_lines(config: Config, plan: Plan) -> list[str]:
    """Say what each rank holds, of a large world the first and the last ranks."""
    num_local = config.model.num_experts // plan.expert
    lines = []
    for rank in range(plan.world):
        at = plan.coordinates(rank)
        first, last = at.expert * num_local, (at.expert + 1) * num_local - 1
        held = f"experts {first} to {last}" if last > first else f"expert {first}"
        pipeline = f"pipeline {at.pipeline}, " if plan.pipeline > 1 else ""
        lines.append(
            f"rank {rank}: {pipeline}data {at.data} = expert_data {at.expert_data} x expert {at.expert}; {held}"
        )
    if len(lines) > _MOST_RANKS:
        half = _MOST_RANKS // 2
        lines[half:-half] = [f"... {len(lines) - 2 * half} more ranks, in the same order ..."]
    dense, experts = (f"1/{parts}" if parts > 1 else "all" for parts in (plan.data, plan.expert_data))
    of = "the dense parameters'" if plan.pipeline == 1 else "what is dense in its stages"
    return [*lines, f"optimizer state of a rank: {dense} of {of}, {experts} of its own experts'"]


def _memory(config: Config, spec: ModelSpec, plan: Plan, stages: Stages, part: RankPart) -> OptimizerMemory:
    dtype = getattr(torch, config.dtype)
    local = {}
    for name, shape in part.shapes.items():
        local[name] = ((shape[0] // plan.expert, *shape[1:]) if _is_expert(name) else shape, dtype)
    placements = {name: placement_of(name, spec, stages) for name in local}
    return optimizer_memory(local, placements, plan, config.optimizer.to_adamw())


def _total(config: Config, spec: ModelSpec, plan: Plan, part: RankPart, memory: OptimizerMemory) -> int:
    return memory.total + _buffer_bytes(config, spec, plan, part)


def _numel(part: RankPart, plan: Plan) -> int:
    return sum(
        math.prod(shape) // plan.expert if _is_expert(name) else math.prod(shape) for name, shape in part.shapes.items()
    )


def _memory_lines(config: Config, spec: ModelSpec, plan: Plan, part: RankPart, memory: OptimizerMemory) -> list[str]:
    dense = sum(math.prod(shape) for name, shape in part.shapes.items() if not _is_expert(name))
    experts = _numel(part, plan) - dense
    buffers = _buffer_bytes(config, spec, plan, part)
    rows = {
        f"weights, {config.dtype}": memory.parameters,
        "gradients as autograd leaves them, float32": memory.autograd_gradients,
        "gradients for the sum over ranks, float32": memory.main_gradients,
        "main weights, float32": memory.main_weights,
        f"moments, {config.optimizer.moments_dtype}": memory.moments,
        "counters": memory.counters,
        "in passing, for the exchange of one bucket": memory.transient,
        f"row buffers of the dispatcher, saved_rows = {config.parallel.saved_rows}": buffers,
    }
    return [
        f"parameters: {dense + experts:,} = {dense:,} on every rank{' of its stages' if plan.pipeline > 1 else ''} + "
        f"{experts:,} of its own experts",
        *(f"{name}: {_size(size)}" for name, size in rows.items() if size > 0),
        f"sum: {_size(_total(config, spec, plan, part, memory))}",
    ]


def _buffer_bytes(config: Config, spec: ModelSpec, plan: Plan, part: RankPart) -> int:
    """Return the bytes of the row-wise buffers as they begin; others have none of a fixed size."""
    if config.parallel.dispatcher != "rowwise" or part.num_moe_layers == 0:
        return 0
    num_tokens = config.train.sequences_per_micro_batch * config.data.sequence_length
    capacity = first_capacity(
        config.parallel.capacity_factor,
        num_tokens=num_tokens,
        top_k=spec.top_k,
        size=plan.expert,
        num_local=spec.num_experts // plan.expert,
        alignment=1,
    )
    # Rows that the backward sends again stay in no layer, whatever saved_rows says.
    keeps_rows = not {"block", "dispatch"} & set(config.train.recompute)
    return peak_row_bytes(
        config.parallel.saved_rows if keeps_rows else "copy",
        num_layers=part.kept_moe_layers if keeps_rows else 0,
        capacity=capacity,
        num_tokens=num_tokens,
        width=spec.d_model,
        itemsize=_DTYPE_BYTES[config.dtype],
    )


def _fsdp_lines(config: Config, spec: ModelSpec, plan: Plan, part: RankPart) -> tuple[list[str], list[str]]:
    """Return the lines of memory and those of messages."""
    sizes = FsdpSizes(_parameter_shapes(spec), plan.data, _DTYPE_BYTES[config.dtype])
    memory = sizes.memory()
    buffers = _buffer_bytes(config, spec, plan, part)
    memory |= {f"row buffers of the dispatcher, saved_rows = {config.parallel.saved_rows}": buffers} if buffers else {}
    messages = sizes.messages(_num_micro_batches(config, plan))
    lines = [
        [*(f"{name}: {_size(size)}" for name, size in rows.items()), f"sum: {_size(sum(rows.values()))}"]
        for rows in (memory, messages)
    ]
    return [f"parameters: {sum(_parameter_sizes(spec).values()):,} on all ranks together", *lines[0]], lines[1]


def _num_micro_batches(config: Config, plan: Plan) -> int:
    return config.train.sequences_per_step // (plan.data * config.train.sequences_per_micro_batch)


def _message_lines(config: Config, spec: ModelSpec, plan: Plan, part: RankPart, memory: OptimizerMemory) -> list[str]:
    tokens = config.train.sequences_per_step * config.data.sequence_length // plan.data
    # There and back in the forward and in the backward; a weight goes there and its gradient comes back.
    row_bytes = 4 * spec.d_model * _DTYPE_BYTES[config.dtype] + 2 * 4
    rows = tokens * spec.top_k * part.num_moe_layers * (plan.expert - 1) // plan.expert
    return [
        f"gradients: {_size(memory.gradient_bytes_sent)}"
        + (" in each micro-batch" if config.optimizer.gradient_sharding else ""),
        f"new weights: {_size(memory.weight_bytes_sent)}",
        f"collectives for both: {memory.num_messages}",
        f"rows of the experts, with an even load: {_size(rows * row_bytes)} = {rows:,} rows x {row_bytes:,} bytes",
    ]


def _step_lines(config: Config, plan: Plan) -> list[str]:
    total, micro = config.train.sequences_per_step, config.train.sequences_per_micro_batch
    length, accumulation = config.data.sequence_length, _num_micro_batches(config, plan)
    return [
        f"tokens: {total * length:,} = {total} sequences x {length}",
        f"sequences: {total} = data ({plan.data}) x {accumulation} micro-batches x {micro} sequences",
        f"run: {config.train.steps:,} steps, {config.train.steps * total * length:,} tokens",
    ]


def _size(num_bytes: int) -> str:
    """Return a number of bytes as "1,536 bytes = 1.5 KiB"."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes:,} bytes" + ("" if unit == "bytes" else f" = {value:.1f} {unit}")
