"""Make a config small enough for several CPU ranks, with its structure kept; and the batches that it runs on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from coterie_trainer.config import Config, ModelConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.data.shards import TokenWriter
from coterie_trainer.verify.layout import Layout, layout_problems

__all__ = ["UnevenBatches", "scaled", "scaled_values", "sequences_per_step", "verify_problems", "write_vocabulary"]

VOCAB_SIZE = 64
MOST_SEQUENCES = 256
_PARTS = 8
_EPS = 1e-4


def sequences_per_step(layouts: Sequence[Layout]) -> int:
    """Return the number of sequences that every layout can split evenly, a multiple of 8."""
    return math.lcm(2 * _PARTS, *(layout.data * layout.accumulation for layout in layouts))


def verify_problems(config: Config, layouts: Sequence[Layout]) -> list[str]:
    """Return all that keeps ``layouts`` of ``config`` from being run, or from being the same by their own meaning."""
    found = []
    scope = config.train.balance_scope
    if scope in ("micro_batch", "data_parallel") and config.train.balance_coefficient > 0:
        found.append(
            f'train: balance_scope ("{scope}") is another loss for every split into micro-batches, so layouts cannot '
            'agree; compare with --set train.balance_scope=step, or "sequence"'
        )
    count = sequences_per_step(layouts)
    if count > MOST_SEQUENCES:
        found.append(
            f"the layouts together need a step of {count} sequences, a multiple of every data x accumulation; at most "
            f"{MOST_SEQUENCES} work: compare fewer layouts at a time"
        )
    stated = sorted({sum(layout.layers_per_stage) for layout in layouts if layout.layers_per_stage})
    num_layers = _num_layers(config, layouts)
    if stated and stated != [num_layers]:
        found.append(
            f"layers_per_stage of the layouts adds up to {' or '.join(map(str, stated))}, and another layout needs a "
            f"model of {num_layers} layers; compare them apart"
        )
    small = scaled(config, Path("verify"), layouts)
    found += [f'layout "{layout}": {problem}' for layout in layouts for problem in layout_problems(layout, small)]
    return found


def scaled(config: Config, folder: Path, layouts: Sequence[Layout]) -> Config:
    """Return ``config`` with small widths, few layers and a few tokens, in fp32 on the CPU.

    Kept: the kinds of layers and their order, the number of experts, all options of routing, attention, norms, tying,
    losses and bias rule, the rules of the optimizer, and the ``[parallel]`` table but its degrees.

    Scaled: one dense layer at most and two with experts, or as many as give each stage of every layout a layer, or as
    ``layers_per_stage`` of one adds up to; two key and value heads, at most two queries for each, and the
    widths; ``init_std`` grows with the root of the width, so that router logits stay as far apart. Everything is fp32.
    The learning rate is the highest one from the first step on. AdamW's eps is at least 1e-4: the first updates are
    close to rate * g / (|g| + eps), so with 1e-8 the rounding of a sum that comes out near zero, of about 1e-9, would
    be an update of any size. Patterns of names that match only layers which are left out are left out too.

    Args:
        config: as it was read.
        folder: where its tokens, see `write_vocabulary`, and nothing else will be.
        layouts: all of them can split a step, and the layers.
    """
    model = _scaled_model(config.model, _num_layers(config, layouts))
    names = list(model.to_spec(VOCAB_SIZE, config.data.sequence_length, None).tensor_shapes())
    optimizer = replace(
        config.optimizer,
        weight_decays=_matching(config.optimizer.weight_decays, names),
        learning_rate_factors=_matching(config.optimizer.learning_rate_factors, names),
        warmup_steps=0,
        decay_steps=0,
        eps=max(config.optimizer.eps, _EPS),
        moments_dtype="float32",
        gradient_dtype="float32",
    )
    count = sequences_per_step(layouts)
    return replace(
        config,
        run_folder=str(folder / "run"),
        device="cpu",
        dtype="float32",
        model=model,
        data=replace(
            config.data,
            path=str(folder / "tokens"),
            source="files",
            sequence_length=min(16, config.data.sequence_length),
        ),
        train=replace(
            config.train,
            steps=3,
            compile=False,
            sequences_per_step=count,
            sequences_per_micro_batch=count,
            assignment=None,  # it goes by the place in the micro-batch
            evaluate_every=0,
        ),
        optimizer=optimizer,
        parallel=replace(
            config.parallel, pipeline=1, stages_per_rank=0, layers_per_stage=(), data=1, expert=1, timeout_s=60.0
        ),
        log=replace(config.log, tensorboard=False),
    )


def _matching(pairs: tuple[tuple[str, float], ...], names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    return tuple(pair for pair in pairs if any(fnmatchcase(name, pair[0]) for name in names))


def _num_layers(config: Config, layouts: Sequence[Layout]) -> int:
    """Return the layers that the layouts ask for, or what two kinds of layers ask for if that is more."""
    model = config.model
    least = min(1, model.num_dense_layers) + min(2, model.num_layers - model.num_dense_layers)
    stated = [sum(layout.layers_per_stage) for layout in layouts if layout.layers_per_stage]
    return max([least, *(layout.num_stages(config) for layout in layouts if not layout.layers_per_stage), *stated])


def _scaled_model(model: ModelConfig, num_layers: int) -> ModelConfig:
    num_kv_heads = min(2, model.num_kv_heads)
    num_heads = num_kv_heads * min(2, model.num_heads // model.num_kv_heads)
    head_dim = min(8, model.d_model // model.num_heads if model.head_dim is None else model.head_dim)
    d_model = num_heads * head_dim if model.head_dim is None else min(32, model.d_model)
    num_dense_layers = min(1, model.num_dense_layers)
    return replace(
        model,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=None if model.head_dim is None else head_dim,
        num_dense_layers=num_dense_layers,
        dense_hidden=min(24, model.dense_hidden),
        expert_hidden=min(16, model.expert_hidden),
        shared_hidden=min(16, model.shared_hidden),
        init_std=model.init_std * math.sqrt(model.d_model / d_model),
        attention_backend="auto",
        expert_backend=model.expert_backend if model.expert_backend in ("reference", "torch") else "auto",
    )


def scaled_values(before: Config, after: Config) -> list[str]:
    """Return the settings that decide numbers and that scaling has changed, as "model.d_model 2048 -> 32"."""
    found = [f"dtype {before.dtype} -> {after.dtype}"] if before.dtype != after.dtype else []
    leave_out = {"path", "source", "evaluate_every", "sequences_per_micro_batch", "vocab_size"}
    for name in ("model", "data", "train", "optimizer"):
        old, new = vars(getattr(before, name)), vars(getattr(after, name))
        found += [
            f"{name}.{key} {_shown(old[key])} -> {_shown(new[key])}"
            for key in old
            if old[key] != new[key] and key not in leave_out
        ]
    return [*found, f"vocabulary of {VOCAB_SIZE} made-up tokens"]


def _shown(value: object) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write_vocabulary(folder: Path) -> None:
    """Write a token folder of one document: a run reads the vocabulary from it; the batches come from elsewhere."""
    with TokenWriter(folder, vocab_size=VOCAB_SIZE, eos_id=0) as writer:
        writer.add("train", np.arange(1, VOCAB_SIZE), text_bytes=VOCAB_SIZE)


class UnevenBatches:
    """Batches of documents of many lengths and padding, the same sequences of a step in every layout.

    An eighth of a step's sequences has only ignored labels, and an eighth is nothing but padding; with 8 data ranks
    these are all that one rank gets. Which eighths changes from step to step.

    Args:
        config: of one layout.
        data_index: which contiguous part of a step is this rank's.
        data_size: number of parts.
    """

    def __init__(self, config: Config, data_index: int, data_size: int) -> None:
        self._config, self._data_index = config, data_index
        self._share = config.train.sequences_per_step // data_size

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of this rank in optimizer step ``step`` (from 0)."""
        first = self._data_index * self._share
        rows = [self._row(step, number) for number in range(first, first + self._share)]
        size = self._config.train.sequences_per_micro_batch
        micro_batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [
            Batch(
                tokens_BS=torch.from_numpy(np.stack([tokens for tokens, _, _ in few])),
                targets_BS=torch.from_numpy(np.stack([targets for _, targets, _ in few])),
                document_ids_BS=torch.from_numpy(np.stack([ids for _, _, ids in few])),
            )
            for few in micro_batches
        ]

    def _row(self, step: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return tokens, targets and document ids of one sequence."""
        length = self._config.data.sequence_length
        generator = np.random.default_rng([self._config.seed, step, number])
        kind = (number * _PARTS // self._config.train.sequences_per_step + step) % _PARTS
        num_real = 0 if kind == 1 else int(generator.integers((length + 1) // 2, length + 1))
        starts = np.zeros(length, np.int32)
        place = int(generator.integers(1, max(2, length // 2)))
        while place < num_real:
            starts[place] = 1
            place += int(generator.integers(1, max(2, length // 2)))
        is_real = np.arange(length) < num_real
        document_ids = np.where(is_real, np.cumsum(starts), -1).astype(np.int32)
        tokens = np.where(is_real, generator.integers(1, VOCAB_SIZE, length), 0)
        targets = np.full(length, -1, np.int64)
        goes_on = is_real[1:] & (starts[1:] == 0)
        if kind != _PARTS - 1:
            targets[:-1][goes_on] = tokens[1:][goes_on]
        return tokens, targets, document_ids
