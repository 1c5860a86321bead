"""From a trained run to a Hugging Face folder and to text."""

import subprocess
import sys
from pathlib import Path

import pytest

from stories.conftest import CONFIG

pytest.importorskip("transformers")


def coterie(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coterie_trainer", *arguments], capture_output=True, text=True, timeout=240
    )


def train(folder: Path, small_demo: list[str], *layout: str) -> None:
    overrides = [*small_demo, f"run_folder={str(folder)!r}", "train.steps=2", *layout]
    done = coterie("train", str(CONFIG), *(f"--set={text}" for text in overrides))
    assert done.returncode == 0, done.stderr


def test_export_checks_itself_and_is_the_same_from_every_layout(tmp_path: Path, small_demo: list[str]) -> None:
    folders = []
    for name, layout in (("one", ("parallel.data=1", "parallel.expert=1")), ("two", ())):
        run, out = tmp_path / name, tmp_path / f"{name} [exported]"
        train(run, small_demo, *layout)
        done = coterie("export", str(run), str(out), "--family", "qwen3_moe", "--check")
        assert done.returncode == 0, done.stderr
        assert "transformers gives the same logits" in done.stdout
        folders.append(out)
    names = {path.name for path in folders[0].iterdir()}
    assert names == {path.name for path in folders[1].iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert (folders[0] / "config.json").read_bytes() == (folders[1] / "config.json").read_bytes()

    prompt = ("--prompt", "def f(", "--max-new-tokens", "8")
    text = coterie("generate", str(folders[1]), *prompt)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("def f(")
    assert text.stdout == coterie("generate", str(tmp_path / "two"), *prompt).stdout

    refused = coterie("export", str(tmp_path / "two"), str(tmp_path / "new"), "--family", "olmoe")
    assert refused.returncode == 2
    assert "qwen3_moe" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_greedy_text_equals_that_of_transformers(tmp_path: Path, small_demo: list[str]) -> None:
    import torch
    import transformers
    from coterie_trainer.exporting import decoder_from_tensors, export_run, read_run
    from coterie_trainer.generation import continue_ids

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
