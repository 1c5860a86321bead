"""From a trained run to a Hugging Face folder and to text."""

from pathlib import Path

import pytest
import torch
from coterie_trainer.cli import main
from coterie_trainer.exporting import decoder_from_tensors, export_run, read_run
from coterie_trainer.generation import continue_ids

from stories.conftest import CONFIG

transformers = pytest.importorskip("transformers")

PROMPT = ("--prompt", "def f(", "--max-new-tokens", "8")


def train(folder: Path, small_demo: list[str], *layout: str) -> None:
    overrides = [*small_demo, f"run_folder={str(folder)!r}", "train.steps=2", *layout]
    assert main(["train", str(CONFIG), *(f"--set={text}" for text in overrides)]) == 0


def test_export_checks_itself_whatever_layout_the_run_had(
    tmp_path: Path, small_demo: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out [exported]"
    train(run, small_demo)  # two processes, half of the experts each
    capfd.readouterr()
    assert main(["export", str(run), str(out), "--family", "qwen3_moe", "--check"]) == 0
    printed = capfd.readouterr()
    assert "transformers gives the same logits: largest relative difference" in printed.out
    assert printed.err == ""
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}

    assert main(["generate", str(out), *PROMPT]) == 0
    text = capfd.readouterr().out
    assert text.startswith("def f(")
    assert main(["generate", str(run), *PROMPT]) == 0
    assert capfd.readouterr().out == text

    assert main(["export", str(run), str(tmp_path / "new"), "--family", "olmoe"]) == 2
    assert "qwen3_moe" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


def test_greedy_text_equals_that_of_transformers(tmp_path: Path, small_demo: list[str]) -> None:
    train(tmp_path / "run", small_demo, "parallel.data=1", "parallel.expert=1")
    export_run(tmp_path / "run", tmp_path / "out", family="qwen3_moe")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("import argparse\n")["input_ids"]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    decoder = decoder_from_tensors(*read_run(tmp_path / "run"))
    found = continue_ids(decoder, ids, max_new_tokens=12, temperature=0.0, generator=torch.Generator())
    assert found == expected[: len(found)]
    assert expected[len(found) :] in ([], [tokenizer.eos_token_id])


def test_a_bf16_run_stops_goes_on_and_exports(
    tmp_path: Path, small_demo: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["dtype=bfloat16", "data.sequence_length=16", "train.sequences_per_step=4", "train.evaluate_sequences=4"]
    layout = ["parallel.data=1", "parallel.expert=1", "train.evaluate_every=0", "checkpoint.every=1"]
    for name, stops in (("whole", (3,)), ("stopped", (2, 3))):
        for steps in stops:
            # The schedule must not see where the run stops, so the rate is constant.
            rate = ["optimizer.warmup_steps=0", "optimizer.final_fraction=1.0", f"train.steps={steps}"]
            overrides = [*small_demo, *small, *layout, *rate, f"run_folder={str(tmp_path / name)!r}"]
            assert main(["train", str(CONFIG), *(f"--set={text}" for text in overrides)]) == 0
    (_, whole), (_, stopped) = read_run(tmp_path / "whole"), read_run(tmp_path / "stopped")
    assert whole["embed.weight"].dtype == torch.bfloat16
    assert all(torch.equal(stopped[name], tensor) for name, tensor in whole.items())
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "out"), "--family", "qwen3_moe", "--check"]) == 0
    assert "transformers gives the same logits" in capfd.readouterr().out
