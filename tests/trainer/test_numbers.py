"""The numbers of the trainer against formulas written out here, not against itself."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from coterie_parallel import AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from coterie_trainer import training
from coterie_trainer.config import Config, TrainConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.initialization import initialize
from coterie_trainer.launch import StopRequest
from coterie_trainer.model import Decoder, build_model, placements
from coterie_trainer.step import Stepper
from coterie_trainer.training import Run, adamw_config
from export.cases import CASES, random_tensors
from export.reference import reference_logits

from trainer.specs import SPECS
from trainer.tiny import tiny_config, write_tokens


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_plain_reference(name: str) -> None:
    _, spec = CASES[name]
    tensors = random_tensors(spec)
    tokens_BS = torch.randint(spec.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    model = build_model(spec)
    model.load_state_dict({key: tensors[key] for key in spec.tensor_shapes()})
    with torch.no_grad():
        found = model.logits(model(tokens_BS, torch.zeros(2, 9, dtype=torch.int32)).hidden_BSD)
    exact = reference_logits(spec, {key: tensor.double() for key, tensor in tensors.items()}, tokens_BS)
    rounded = reference_logits(spec, tensors, tokens_BS)
    baseline = float((rounded - exact).abs().max())
    assert float((found - exact).abs().max()) <= 2 * baseline + 1e-6 * float(exact.abs().max())


def _batch(seed: int, spec_vocab: int) -> Batch:
    tokens = torch.randint(spec_vocab, (4, 16), generator=torch.Generator().manual_seed(seed))
    documents = torch.zeros(4, 16, dtype=torch.int32)
    documents[3, 10:] = -1
    targets = torch.cat([tokens[:, 1:], torch.full((4, 1), -1)], dim=1).masked_fill(documents < 0, -1)
    return Batch(tokens_BS=tokens, targets_BS=targets, document_ids_BS=documents)


def _written_out_loss(
    model: Decoder, batch: Batch, load_E: torch.Tensor | None, balance: float, z: float
) -> torch.Tensor:
    """CE/targets + balance * E/k * sum_i f_i P_i + z * mean(logsumexp^2), from the input of the one router."""
    spec, seen = model.spec, []
    router = model.layers[1].moe.router
    handle = router.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    output = model(batch.tokens_BS, batch.document_ids_BS)
    handle.remove()
    logits_TE = (seen[0] @ router.weight.T)[batch.document_ids_BS.flatten() >= 0]
    scores_TE = torch.sigmoid(logits_TE)
    mean_probability_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)
    load_E = torch.ones(spec.num_experts) if load_E is None else load_E.float()
    fraction_E = spec.top_k * load_E / load_E.sum()
    balance_loss = spec.num_experts / spec.top_k * (fraction_E * mean_probability_E).sum()
    z_loss = (torch.logsumexp(logits_TE, -1) ** 2).mean()
    loss = F.cross_entropy(
        model.logits(output.hidden_BSD).flatten(0, 1), batch.targets_BS.flatten(), ignore_index=-1, reduction="sum"
    )
    return loss / int((batch.targets_BS >= 0).sum()) + balance * balance_loss + z * z_loss


def test_the_gradient_of_two_steps_is_that_of_the_written_out_loss() -> None:
    spec = dataclasses.replace(SPECS["shared_expert"], selection_bias=False)
    mesh = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=30.0)
    model, other = build_model(spec), build_model(spec)
    for one in (model, other):
        initialize(one, seed=0, std=0.2)
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig(gradient_clip=None))
    train = TrainConfig(
        steps=2, sequences_per_step=4, sequences_per_micro_batch=4, balance_coefficient=0.7, z_coefficient=0.03
    )
    stepper = Stepper(model, optimizer, mesh, train)
    load_E = None
    for step in range(2):
        other.load_state_dict(model.state_dict())
        batch = _batch(step, spec.vocab_size)
        other.zero_grad()
        _written_out_loss(other, batch, load_E, 0.7, 0.03).backward()
        counts_E = other(batch.tokens_BS, batch.document_ids_BS).routings[0].counts_E
        result = stepper.run([batch], learning_rate=1e-2)
        for (name, parameter), reference in zip(model.named_parameters(), other.parameters(), strict=True):
            error = (parameter.grad - reference.grad).abs().max() / reference.grad.abs().max()
            assert float(error) <= 1e-5, (step, name, float(error))
        norm = math.sqrt(sum(float(reference.grad.double().square().sum()) for reference in other.parameters()))
        assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert torch.equal(stepper.load_LE, counts_E[None])
        assert not (counts_E == counts_E[0]).all()
        load_E = counts_E


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tokens = write_tokens(tmp_path / "tokens")
    return tiny_config(
        tmp_path / "run",
        tokens,
        train__steps=4,
        train__evaluate_every=4,
        optimizer__weight_decay=0.25,
        optimizer__gradient_clip=0.75,
        optimizer__betas=[0.8, 0.9],
        optimizer__eps=1e-6,
    )


def _run(config: Config) -> Run:
    return Run(config, Mesh(make_plan(config.parallel, 1), 0, timeout_s=30.0), torch.device("cpu"))


def test_bits_per_byte_and_rates_in_the_records(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(config)
    held_out = run.held_out_split
    monkeypatch.setattr(training, "evaluate", lambda *arguments, **named: 2.0)
    run.loop(StopRequest())
    lines = (Path(config.run_folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [0, 4]
    bits = 2.0 / math.log(2.0) * held_out.num_tokens / held_out.num_bytes
    assert evaluations[0]["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    steps = [record for record in records if record["kind"] == "step"]
    # Warm-up of two steps to 3e-3, then half of a cosine to a tenth of it.
    assert [step["learning_rate"] for step in steps] == pytest.approx([1.5e-3, 3e-3, 1.65e-3, 3e-4], rel=1e-9)
    real = [sum(int((batch.document_ids_BS >= 0).sum()) for batch in run.batches.step(n)) for n in range(4)]
    assert [step["tokens"] for step in steps] == [sum(real[: n + 1]) for n in range(4)]


def test_optimizer_settings_arrive(config: Config) -> None:
    assert adamw_config(config) == AdamWConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.25, gradient_clip=0.75)


def test_the_clock_counts_since_its_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([10.0, 14.0, 16.0])
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(now_s))
    clock = training._Clock()
    clock.add(100, waited_s=0.5)
    clock.add(100, waited_s=1.0)
    assert clock.read() == (50.0, 0.25, 2.0)  # 200 tokens, 1 s of waiting and 2 steps in 4 s
    clock.add(30, waited_s=1.5)
    assert clock.read() == (15.0, 0.25, 2.0)
