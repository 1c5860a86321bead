"""A whole training step on one CPU process, against the same model of transformers with torch's AdamW."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from coterie_export import export_model
from coterie_parallel import AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from coterie_trainer.config import TrainConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.initialization import initialize
from coterie_trainer.model import build_model, placements
from coterie_trainer.step import Stepper
from support.speed import Pair

from trainer.specs import DEMO

_RATE = 1e-4


def bench_step() -> Iterator[Pair]:
    import transformers

    model = build_model(DEMO)
    initialize(model, seed=0, std=0.02)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export_model(DEMO, model.state_dict(), folder, family="qwen3_moe")
        other = transformers.AutoModelForCausalLM.from_pretrained(folder)

    mesh = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=60.0)
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig())
    # Both sides without balance losses; transformers' model computes none unless it is asked to.
    train = TrainConfig(
        steps=1, sequences_per_step=4, sequences_per_micro_batch=4, balance_coefficient=0.0, z_coefficient=0.0
    )
    stepper = Stepper(model, optimizer, mesh, train)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)

    tokens_BS = torch.randint(DEMO.vocab_size, (4, 256), generator=torch.Generator().manual_seed(0))
    targets_BS = torch.cat([tokens_BS[:, 1:], torch.full((4, 1), -1)], dim=1)
    documents_BS = torch.zeros(4, 256, dtype=torch.int32)
    batch = Batch(tokens_BS=tokens_BS, targets_BS=targets_BS, document_ids_BS=documents_BS)

    def ours() -> float:
        return stepper.run([batch], learning_rate=_RATE).loss

    def transformers_step() -> float:
        other_optimizer.zero_grad()
        loss = other(input_ids=tokens_BS, labels=tokens_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        other_optimizer.step()
        return float(loss.detach())

    def check() -> None:
        for _ in range(2):
            loss, reference = ours(), transformers_step()
            assert abs(loss - reference) <= 1e-5 * reference, (loss, reference)

    yield Pair("step of the demo's model, 4 x 256 tokens: transformers", ours, transformers_step, check)
