"""What `coterie check` shows: the resolved plan of a config, its parameters, and the memory of a rank."""

import math
from pathlib import Path

from coterie_export import ModelSpec, fitting_families
from coterie_parallel import Plan, make_plan

from coterie_trainer.config import Config, ConfigError, config_problems
from coterie_trainer.data.shards import read_index

__all__ = ["active_parameters", "report"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
    sections = {
        "plan": [*plan.describe().splitlines(), _experts_line(config, plan)],
        "model": _model_lines(config, spec, origin),
        "memory of a rank, without activations": _memory_lines(config, spec, plan),
        "step": _step_lines(config, plan),
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


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


def _parameter_sizes(spec: ModelSpec) -> dict[str, int]:
    shapes = spec.tensor_shapes()
    # The selection bias is state without a gradient: it is no parameter.
    return {name: math.prod(shape) for name, shape in shapes.items() if not name.endswith(".selection_bias")}


def _is_expert(name: str) -> bool:
    return ".moe.experts." in name


def _experts_line(config: Config, plan: Plan) -> str:
    num_experts = config.model.num_experts
    return (
        f"experts ({num_experts}) = expert ({plan.expert}) x {num_experts // plan.expert} on each rank; "
        f"dispatcher {config.parallel.dispatcher}"
    )


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
        f"export families that can hold it: {families}",
    ]


def _memory_lines(config: Config, spec: ModelSpec, plan: Plan) -> list[str]:
    sizes = _parameter_sizes(spec)
    experts = sum(size for name, size in sizes.items() if _is_expert(name)) // plan.expert
    dense = sum(size for name, size in sizes.items() if not _is_expert(name))
    count, dtype_bytes = dense + experts, _DTYPE_BYTES[config.dtype]
    main_weights = "" if config.dtype == "float32" else ", float32 main weights"
    rows = {
        f"parameters, {config.dtype}": count * dtype_bytes,
        "gradients, float32 over micro-batches and float32 for the sum over ranks": count * 8,
        f"optimizer, two float32 moments{main_weights}": count * (8 if config.dtype == "float32" else 12),
    }
    lines = [f"parameters: {count:,} = {dense:,} on every rank + {experts:,} of its own experts"]
    lines += [f"{name}: {_size(size)}" for name, size in rows.items()]
    return [*lines, f"sum: {_size(sum(rows.values()))}"]


def _step_lines(config: Config, plan: Plan) -> list[str]:
    total, micro = config.train.sequences_per_step, config.train.sequences_per_micro_batch
    length, accumulation = config.data.sequence_length, total // (plan.data * micro)
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
