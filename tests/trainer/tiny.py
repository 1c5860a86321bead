"""A tiny run that the trainer's tests share: a folder of token files and a config that fits it."""

from pathlib import Path

import numpy as np
from coterie_trainer.config import Config, config_from_dict
from coterie_trainer.data.shards import TokenWriter

VOCAB_SIZE = 64


def write_tokens(folder: Path, *, documents: int = 60, seed: int = 0) -> Path:
    """Write documents of 3 to 40 tokens in which each token mostly follows from the one before."""
    generator = np.random.default_rng(seed)
    with TokenWriter(folder, vocab_size=VOCAB_SIZE, eos_id=0) as writer:
        for number in range(documents):
            length = int(generator.integers(3, 41))
            start = int(generator.integers(1, VOCAB_SIZE))
            tokens = (start * 5 ** np.arange(length) + generator.integers(0, 2, length)) % (VOCAB_SIZE - 1) + 1
            writer.add("held_out" if number % 10 == 9 else "train", np.append(tokens, 0), text_bytes=3 * length)
    return folder


def tiny_config(folder: Path, tokens: Path, **changes: object) -> Config:
    """Return the config of a run of a few seconds; ``changes`` are given as ``table__key=value`` or ``key=value``."""
    tables: dict[str, dict[str, object]] = {
        "model": dict(
            num_layers=2,
            d_model=16,
            num_heads=4,
            num_kv_heads=2,
            qk_norm="head",
            num_dense_layers=1,
            dense_hidden=24,
            num_experts=8,
            top_k=2,
            expert_hidden=8,
            tied_embeddings=True,
        ),
        "data": dict(path=str(tokens), sequence_length=16),
        "train": dict(steps=6, sequences_per_step=8, sequences_per_micro_batch=2),
        "optimizer": dict(learning_rate=3e-3, warmup_steps=2),
        "parallel": dict(data=1, expert=1),
        "checkpoint": {},
        "log": dict(tensorboard=False),
    }
    top: dict[str, object] = {"run_folder": str(folder), "seed": 1}
    for key, value in changes.items():
        table, _, name = key.rpartition("__")
        (tables[table] if table else top)[name] = value
    return config_from_dict({**top, **tables})
