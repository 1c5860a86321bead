"""The configuration of a run: frozen dataclasses that are read from TOML, with every fault in one report.

A file has the top-level keys of `Config` and one table for each of its parts: ``[model]``, ``[data]``, ``[train]``,
``[optimizer]``, ``[parallel]``, ``[checkpoint]`` and ``[log]``; a field that is a dataclass itself is a table in a
table, as ``[parallel.deep_ep]``. Keys are the field names below. TOML has no null, so the text ``"none"`` stands for
None where a field allows it.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from coterie_parallel import ParallelConfig, dispatcher_class, known_dispatchers, plan_problems, stage_problems
from coterie_routing import BIAS_RULES, Assignment, BiasRule

from coterie_trainer.attention import backend_problems
from coterie_trainer.bounds import at_least, nearest
from coterie_trainer.model_config import ModelConfig, experts_config, router_config
from coterie_trainer.optimizer_config import OptimizerConfig
from coterie_trainer.reading import TableReader, apply_override, to_dict
from coterie_trainer.recompute import combination_problems, name_problems

__all__ = [
    "Config",
    "ModelConfig",
    "DataConfig",
    "TrainConfig",
    "OptimizerConfig",
    "CheckpointConfig",
    "LogConfig",
    "ConfigError",
    "load_config",
    "config_problems",
    "assignment",
    "bias_rule",
    "experts_config",
    "router_config",
    "smallest_world",
    "config_to_dict",
    "config_from_dict",
]


# What dispatchers call the settings that decide what a token is.
_TOKEN_WORDS = {
    "dtype of x_TD": "dtype",
    "width of x_TD": "model.d_model",
    "choices of a token": "model.top_k",
    "x_TD is on cpu": 'device is "cpu"',
}
_TABLES = ("model", "data", "train", "optimizer", "parallel", "checkpoint", "log")


class ConfigError(ValueError):
    """A configuration that cannot run; ``problems`` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {problem}" for problem in self.problems)]))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens are; ``source = "stdlib"`` makes them at ``path`` on first use, with ``vocab_size`` tokens."""

    path: str
    source: Literal["stdlib", "files"] = "files"
    vocab_size: int = 4096
    sequence_length: int

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = [] if self.path else ["path is empty; name the folder of the token files"]
        if self.source == "stdlib" and self.vocab_size < 257:
            found.append(f"vocab_size ({self.vocab_size}) must be at least 257: 256 bytes and the end-of-text token")
        return found + at_least(self, 1, "sequence_length")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, on how much, and how the load of the experts is balanced.

    ``sequences_per_step`` counts all ranks, ``sequences_per_micro_batch`` one rank. ``bias_rule`` trains the selection
    bias of a model that has one. ``assignment`` replaces the router's choice of experts, to measure the speed of a
    system under a known load: "uniform", "random", "zipf" with its exponent, or "hot" with the share of one expert.
    ``recompute`` names what the backward computes again, to save memory: see `coterie_trainer.recompute`. ``compile``
    fuses norms, residual sums, rotations and SwiGLU of dense layers with `torch.compile`; the first step takes longer.
    """

    steps: int
    sequences_per_step: int
    sequences_per_micro_batch: int
    balance_coefficient: float = 0.01
    balance_loss: Literal["dot_product", "squared_load"] = "dot_product"
    balance_scope: Literal["sequence", "micro_batch", "data_parallel", "step"] = "step"
    z_coefficient: float = 0.001
    bias_rule: Literal["sign", "proportional", "quantile"] | None = None
    bias_rate: float | None = None
    assignment: Literal["uniform", "random", "zipf", "hot"] | None = None
    assignment_exponent: float = 1.0
    assignment_hot_share: float = 0.1
    recompute: tuple[str, ...] = ()
    compile: bool = False
    evaluate_every: int = 0
    evaluate_sequences: int = 0

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = at_least(self, 1, "steps", "sequences_per_step", "sequences_per_micro_batch")
        found += at_least(self, 0, "balance_coefficient", "z_coefficient", "evaluate_every", "evaluate_sequences")
        rule = bias_rule(self)
        if rule is None and self.bias_rate is not None:
            found.append(f"bias_rate ({self.bias_rate}) belongs to a bias_rule, and there is none")
        found += name_problems(self.recompute)
        return found + ([problem.replace("or None", 'or "none"') for problem in rule.problems()] if rule else [])


def bias_rule(train: TrainConfig) -> BiasRule | None:
    """Return the rule that trains the selection bias, if there is one."""
    return None if train.bias_rule is None else BiasRule(kind=train.bias_rule, rate=train.bias_rate)


def assignment(train: TrainConfig) -> Assignment | None:
    """Return what decides the load in place of the routers, if anything does."""
    if train.assignment is None:
        return None
    return Assignment(kind=train.assignment, exponent=train.assignment_exponent, hot_share=train.assignment_hot_share)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save (``every`` 0: only at the end), how many of the last checkpoints to keep, and how long to wait.

    ``grace_s`` is how long the processes of this machine may take, after Ctrl-C, to finish their step and to save.
    """

    every: int = 0
    keep: int = 1
    grace_s: float = 8.0

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        return at_least(self, 0, "every", "grace_s") + at_least(self, 1, "keep")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How often to report progress, and whether TensorBoard, where it is installed, gets it too."""

    every: int = 1
    tensorboard: bool = True

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        return at_least(self, 1, "every")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes and where it leaves the result."""

    run_folder: str
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def problems(self) -> list[str]:
        """Return every fault that shows without a number of ranks; each names its table."""
        found = [] if self.run_folder else ["run_folder is empty; name a folder for checkpoints and records"]
        if self.seed < 0:
            found.append(f"seed ({self.seed}) must be at least 0")
        for name in _TABLES:
            found += [f"{name}: {problem}" for problem in getattr(self, name).problems()]
        warmup, decay, steps = self.optimizer.warmup_steps, self.optimizer.decay_steps, self.train.steps
        if self.optimizer.schedule == "wsd" and decay >= 0 and warmup + decay > steps >= 1:
            found.append(
                f"optimizer: warmup_steps ({warmup}) + decay_steps ({decay}) must be at most train.steps ({steps}); "
                f"decay_steps of {max(0, steps - warmup)} would work"
            )
        found += [f"train: {problem}" for problem in combination_problems(self.train.recompute, self.parallel)]
        if self.parallel.data_parallel == "fsdp":
            found += [f"optimizer: {problem}" for problem in _fsdp_problems(self.optimizer)]
        elif self.parallel.pipeline > 1 and self.optimizer.gradient_sharding:
            found.append(
                f"optimizer: gradient_sharding (true) needs parallel.pipeline ({self.parallel.pipeline}) to be 1: it "
                "sums over ranks after each micro-batch, and in a pipeline several are under way; set it to false"
            )
        model = self.model
        head_dim = model.head_dim or model.d_model // max(1, model.num_heads)
        no_attention = backend_problems(model.attention_backend, self.device, self.dtype, head_dim)
        return [*found, *(f"model: {problem}" for problem in no_attention), *self._balancing_problems()]

    def _balancing_problems(self) -> list[str]:
        """Return what does not fit together between the router of the model and how its load is steered."""
        model, train = self.model, self.train
        found = []
        if model.selection_bias and train.bias_rule is None:
            found.append(
                "model: selection_bias (true) would stay zero without a rule that trains it; set train.bias_rule to "
                f"one of: {', '.join(BIAS_RULES)}; or selection_bias to false"
            )
        if train.bias_rule is not None and not model.selection_bias:
            found.append(f'train: bias_rule ("{train.bias_rule}") needs model.selection_bias = true')
        if train.bias_rule == "quantile" and model.num_groups != 1:
            found.append(
                f'train: bias_rule ("quantile") needs model.num_groups ({model.num_groups}) to be 1: with groups an '
                'expert has no single threshold; use "sign" or "proportional"'
            )
        if train.bias_rule == "quantile" and model.top_k >= model.num_experts:
            found.append(
                f'train: bias_rule ("quantile") needs model.top_k ({model.top_k}) below num_experts '
                f"({model.num_experts}): a token that takes all has nothing to balance"
            )
        if train.bias_rule is not None and train.assignment is not None:
            found.append(
                f'train: bias_rule ("{train.bias_rule}") does not go with assignment ("{train.assignment}"), which no '
                "bias can change; leave one of them out"
            )
        replaced = assignment(train)
        if replaced is not None and 1 <= model.top_k <= model.num_experts:
            problems = replaced.problems(num_experts=model.num_experts, top_k=model.top_k)
            found += [f"train: {problem.replace('assignment ', 'assignment_', 1)}" for problem in problems]
        return found


def _fsdp_problems(optimizer: OptimizerConfig) -> list[str]:
    """Return a sentence for each setting of the optimizer that is there with resident weights only."""
    only: dict[str, object] = {
        "moments_dtype": "float32",
        "muon": False,
        "skip_outliers": False,
        "gradient_dtype": "float32",
        "gradient_sharding": False,
    }
    return [
        f'{name} ({getattr(optimizer, name)}) needs parallel.data_parallel = "resident"; with "fsdp" only {value} works'
        for name, value in only.items()
        if getattr(optimizer, name) != value
    ]


def config_problems(config: Config, world: int | None, vocab_size: int | None = None) -> list[str]:
    """Return everything that keeps ``config`` from running on ``world`` ranks: each package's faults and cross checks.

    Args:
        config: What to judge.
        world: Number of ranks; None takes the smallest number that the parallel table allows.
        vocab_size: Size of the vocabulary in the data, where it is known already.
    """
    world = smallest_world(config) if world is None else world
    num_experts = config.model.num_experts if config.model.num_experts >= 1 else None
    found = config.problems()
    layout = plan_problems(config.parallel, world, num_experts=num_experts, top_k=config.model.top_k)
    found += [f"parallel: {problem}" for problem in layout]
    found += _token_problems(config)
    data = config.parallel.data if config.parallel.data >= 1 else world // max(1, config.parallel.pipeline)
    total, micro = config.train.sequences_per_step, config.train.sequences_per_micro_batch
    if min(data, total, micro) >= 1 and total % (data * micro):
        found.append(
            f"train: sequences_per_step ({total}) must be a multiple of data ({data}) x sequences_per_micro_batch "
            f"({micro}) = {data * micro}; nearest: {nearest(total, data * micro)}"
        )
    found += _stage_problems(config, data)
    if not any(problem.startswith(("model:", "data:")) for problem in found):
        # The export's own rules come last: where they repeat a rule from above, it was reported in the file's words.
        spec = config.model.to_spec(vocab_size or config.data.vocab_size, config.data.sequence_length, None)
        found += [f"model: {problem}" for problem in spec.problems()]
        if not spec.problems():
            unused = config.optimizer.to_adamw().unused_patterns(spec.tensor_shapes())
            found += [f"optimizer: {problem}" for problem in unused]
    return list(dict.fromkeys(found))


def _token_problems(config: Config) -> list[str]:
    """Return why the dispatcher can not send the tokens of this model, in the words of the file."""
    parallel, model = config.parallel, config.model
    options = parallel.dispatch_options()
    if parallel.dispatcher not in known_dispatchers() or options.problems() or min(model.d_model, model.top_k) < 1:
        return []  # which is reported already
    refused = dispatcher_class(parallel.dispatcher).token_problems(
        options,
        width=model.d_model,
        num_choices=model.top_k,
        dtype=getattr(torch, config.dtype),
        device="cpu" if config.device == "cpu" else None,
    )
    found = []
    for problem in refused:
        text = re.sub(r"torch\.(\w+)", r'"\1"', problem).replace("; cast the tokens", "")
        for theirs, ours in _TOKEN_WORDS.items():
            text = text.replace(theirs, ours)
        found.append(f'parallel: dispatcher ("{parallel.dispatcher}"): {text}')
    room = None if options.deep_ep is None else options.deep_ep.max_tokens
    sequences, length = config.train.sequences_per_micro_batch, config.data.sequence_length
    if room is not None and room < sequences * length:
        found.append(
            f"parallel: deep_ep.max_tokens ({room}) must be at least {sequences * length}, the tokens of a micro-batch "
            f"= sequences_per_micro_batch ({sequences}) x sequence_length ({length}); or leave it out"
        )
    return found


def _stage_problems(config: Config, data: int) -> list[str]:
    """Return what keeps the stages of the pipeline from their layers, and the schedule from its micro-batches."""
    parallel, train = config.parallel, config.train
    known, found = stage_problems(parallel), []
    if config.model.num_layers >= 1:
        found += [f"parallel: {text}" for text in stage_problems(parallel, num_layers=config.model.num_layers)]
    total, share = train.sequences_per_step, data * train.sequences_per_micro_batch
    if min(total, share) >= 1 and total % share == 0:
        count = total // share
        origin = (
            f"{count} = sequences_per_step ({total}) / (data ({data}) x sequences_per_micro_batch "
            f"({train.sequences_per_micro_batch}))"
        )
        found += [
            f"train: {text.replace(f'in a step ({count})', f'in a step ({origin})')}"
            for text in stage_problems(parallel, num_micro_batches=count)
            if text not in known
        ]
    return found


def smallest_world(config: Config) -> int:
    """Return the smallest world that the parallel table allows: pipeline x data, each -1 as small as can be."""
    parallel = config.parallel
    least = 2 if parallel.data_parallel == "fsdp" else 1
    data = parallel.data if parallel.data >= 1 else max(least, parallel.expert)
    return max(1, parallel.pipeline) * data


def load_config(path: str | Path, overrides: Sequence[str] = (), world: int | None = None) -> Config:
    """Read a TOML file, apply ``table.key=value`` overrides, and check all of it.

    Args:
        path: The TOML file.
        overrides: As given to ``--set``. The value is read as TOML; what is not TOML is taken as text.
        world: Number of ranks to check for; None checks for the smallest that the parallel table allows.

    Raises:
        ConfigError: With everything that is wrong: unknown keys, types, values, and values that do not fit together.
    """
    with open(path, "rb") as file:
        try:
            table = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError([f"this is not TOML: {error}"], str(path)) from None
    wrong_overrides = [problem for text in overrides if (problem := apply_override(table, text))]
    return config_from_dict(table, source=str(path), world=world, known_problems=wrong_overrides)


def config_from_dict(
    table: Mapping[str, Any], *, source: str = "config", world: int | None = None, known_problems: Sequence[str] = ()
) -> Config:
    """Read a `Config` from nested mappings, strictly; the inverse of `config_to_dict`.

    Args:
        table: Keys as in the TOML file.
        source: What the error calls the origin.
        world: As for `load_config`.
        known_problems: Faults found before, to be reported with the rest.

    Raises:
        ConfigError: With everything that is wrong.
    """
    reader = TableReader(Config)
    config: Config | None = reader.read(table)
    problems = [*known_problems, *reader.problems]
    if config is not None:
        problems += config_problems(config, world)
    else:
        problems += [f"{name}: {text}" for name, part in reader.complete.items() for text in part.problems()]
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return ``config`` as nested dicts of plain values that both TOML and JSON can hold (None as ``"none"``)."""
    return to_dict(config)
