import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from coterie_trainer import arguments, cli, launch
from coterie_trainer.config import ConfigError
from coterie_trainer.launch import Process, StopRequest

DEMO = str(Path(__file__).parents[2] / "configs" / "demo.toml")

SURFACE = {
    "train": ["CONFIG", "--set", "--procs"],
    "check": ["CONFIG", "--set", "--world"],
    "verify": ["CONFIG", "--set", "--layouts"],
    "tokenize": ["INPUT", "--out", "--tokenizer", "--vocab-size", "--held-out", "--field"],
    "export": ["RUN", "OUT", "--family", "--step", "--dtype", "--check"],
    "generate": ["PATH", "--prompt", "--max-new-tokens", "--temperature", "--seed"],
    "bench": ["WHAT"],
}


def run(*arguments, **options):
    command = [sys.executable, "-m", "coterie_trainer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls(monkeypatch):
    """Stand in for what takes long, and keep what it was called with."""
    made = []

    def keep(target, result=None):
        module, name = target.rsplit(".", 1)
        monkeypatch.setattr(f"{module}.{name}", lambda *args, **kwargs: made.append((name, args, kwargs)) or result)

    keep("coterie_trainer.data.tokenize.prepare_stdlib")
    keep("coterie_trainer.cli.launch_local", 0)
    keep("coterie_trainer.training.train")
    keep("coterie_trainer.exporting.export_run")
    keep("coterie_trainer.exporting.check_export", 1.5e-6)
    keep("coterie_trainer.generation.generate", "def main():")
    return made


@pytest.mark.parametrize("command", SURFACE)
def test_the_options_of_a_command(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  (?:-h, )?(--[a-z-]+|[A-Z]+)\b", shown, flags=re.MULTILINE)
    assert [name for name in listed if name != "--help"] == SURFACE[command]
    assert re.search(rf"^example:\n  coterie {command} ", shown, flags=re.MULTILINE)


def test_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert re.findall(r"^    ([a-z]+) ", shown, flags=re.MULTILINE) == list(SURFACE)


def test_the_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert re.fullmatch(r"coterie \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_help_needs_no_torch():
    code = (
        "import sys; from coterie_trainer.cli import make_parser; make_parser().format_help(); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'rich', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_option_is_not_guessed_from_its_beginning(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", DEMO, "--wor", "2"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --wor 2" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_count_is_a_whole_number(value, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", DEMO, f"--world={value}"])
    assert caught.value.code == 2
    assert f"{value!r} must be a whole number of at least 1" in capsys.readouterr().err


def test_check_shows_the_plan(capsys):
    arguments = ["check", DEMO, "--set", "parallel.data=-1", "--set", "parallel.expert=-1", "--world", "4"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "plan\n  world size (4) = pipeline (1) x data (4)\n  data (4) = expert_data (1) x expert (4)\n"
    )


THREE_FAULTS = ["model.num_experts=63", "model.num_heads=12", "model.num_kv_heads=5", "model.top_k=100"]
EIGHT_RANKS = ["parallel.data=8", "parallel.expert=8", "train.sequences_per_step=64"]


@pytest.mark.parametrize("command", [["check"], ["check", "--world", "8"], ["train"], ["train", "--procs", "8"]])
def test_three_faults_are_one_report_and_nothing_starts(command, calls, capsys):
    overrides = [f"--set={text}" for text in THREE_FAULTS + EIGHT_RANKS]
    assert cli.main([*command, DEMO, *overrides]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        f"coterie: error: {DEMO}: 3 problems",
        "  - model: num_heads (12) must be a multiple of num_kv_heads (5); "
        "num_kv_heads that work with 12 heads: 1, 2, 3, 4, 6, 12",
        "  - model: top_k (100) must be from 1 to num_experts (63); nearest: 63",
        "  - parallel: num_experts (63) must be a multiple of the expert degree (8); nearest: 56 or 64",
    ]
    assert calls == []


def test_a_world_that_does_not_match_says_what_would(calls, capsys):
    assert cli.main(["train", DEMO, "--procs", "3"]) == 2
    assert "pipeline (1) x data (2) = 2 must equal the world size (3); start 2 ranks" in capsys.readouterr().err
    assert calls == []


def test_train_prepares_the_data_and_starts_what_the_config_asks_for(calls):
    assert cli.main(["train", DEMO, "--set", "train.steps=3", "--set=data.path=a b"]) == 0
    prepared, launched = calls
    assert prepared[:2] == ("prepare_stdlib", ("a b", 4096, cli._show))
    assert launched == (
        "launch_local",
        (["train", DEMO, "--set=train.steps=3", "--set=data.path=a b"], 2),
        {"grace_s": 8.0},
    )


def test_without_a_fixed_layout_one_process_trains(calls):
    layout = ["--set=parallel.data=-1", "--set=parallel.expert=-1", "--set=data.source=files"]
    assert cli.main(["train", DEMO, *layout]) == 0
    ((name, (config, process, stop), _),) = calls
    assert (name, process, config.parallel.data) == ("train", Process(), -1)
    assert isinstance(stop, StopRequest)
    assert not stop.requested


def test_procs_starts_that_many(calls):
    layout = ["--set=parallel.data=-1", "--set=data.source=files"]
    assert cli.main(["train", DEMO, *layout, "--procs", "4"]) == 0
    ((name, (arguments, procs), _),) = calls
    assert (name, procs) == ("launch_local", 4)
    assert "--procs" not in arguments


@pytest.mark.parametrize(("local_rank", "prepares"), [(0, True), (1, False)])
def test_under_torchrun_its_processes_are_used(calls, monkeypatch, local_rank, prepares):
    set_torchrun(monkeypatch, rank=local_rank)
    assert cli.main(["train", DEMO]) == 0
    assert [name for name, _, _ in calls] == (["prepare_stdlib"] if prepares else []) + ["train"]
    process = calls[-1][1][1]
    assert process == Process(rank=local_rank, world=2, local_rank=local_rank, port=29500)


def set_torchrun(monkeypatch, rank):
    environment = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def test_procs_under_torchrun_is_refused(calls, monkeypatch, capsys):
    set_torchrun(monkeypatch, rank=0)
    assert cli.main(["train", DEMO, "--procs", "2"]) == 2
    assert "leave --procs out" in capsys.readouterr().err
    assert calls == []


def test_half_a_torchrun_names_what_is_missing(calls, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", DEMO]) == 2
    assert "RANK but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in capsys.readouterr().err
    assert calls == []


def test_under_torchrun_one_rank_reports_the_config(calls, monkeypatch, capsys):
    for rank in (0, 1):
        set_torchrun(monkeypatch, rank)
        assert cli.main(["train", DEMO, "--set=seed=-1"]) == 2
    assert capsys.readouterr().err == f"coterie: error: {DEMO}: 1 problem\n  - seed (-1) must be at least 0\n"


def test_a_stop_of_one_process_ends_with_130(calls, monkeypatch, capsys):
    monkeypatch.setattr(
        "coterie_trainer.training.train", lambda config, process, stop: os.kill(os.getpid(), signal.SIGINT)
    )
    layout = ["--set=parallel.data=-1", "--set=parallel.expert=-1", "--set=data.source=files"]
    assert cli.main(["train", DEMO, *layout]) == 130
    assert capsys.readouterr() == ("", "")  # the loop has said where it stopped


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("two\nlines"), "coterie: error: two\nlines\n"),
        (ConfigError(["a", "b"], "x.toml"), "coterie: error: x.toml: 2 problems\n  - a\n  - b\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a [b]"),
            "coterie: error: No such file or directory: a [b]\n",
        ),
        (OSError("disk full"), "coterie: error: disk full\n"),
        (ImportError("this needs transformers"), "coterie: error: this needs transformers\n"),
    ],
)
def test_a_fault_of_the_input_is_one_message(monkeypatch, capsys, error, expected):
    monkeypatch.setattr("coterie_trainer.generation.generate", raising(error))
    assert cli.main(["generate", "x", "--prompt", "y"]) == 2
    assert capsys.readouterr() == ("", expected)


def test_a_failed_checkpoint_is_one_message(monkeypatch, capsys):
    from coterie_trainer.checkpoint import CheckpointError

    monkeypatch.setattr("coterie_trainer.generation.generate", raising(CheckpointError("3 of 4")))
    assert cli.main(["generate", "x", "--prompt", "y"]) == 2
    assert capsys.readouterr().err == "coterie: error: 3 of 4\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), RuntimeError("ours")])
def test_a_fault_of_ours_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr("coterie_trainer.generation.generate", raising(error))
    with pytest.raises(type(error), match="ours"):
        cli.main(["generate", "x", "--prompt", "y"])


def test_an_interrupt_is_one_word(monkeypatch, capsys):
    monkeypatch.setattr("coterie_trainer.generation.generate", raising(KeyboardInterrupt()))
    assert cli.main(["generate", "x", "--prompt", "y"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "is_user_error", "text"),
    [
        (ValueError("wrong"), 2, True, r"coterie: error: wrong"),
        (ZeroDivisionError("ours"), 1, False, r"Traceback \(most recent call last\):[\s\S]*ZeroDivisionError: ours"),
    ],
)
def test_a_local_rank_leaves_its_reason_to_the_parent(
    calls, monkeypatch, tmp_path, capsys, error, code, is_user_error, text
):
    monkeypatch.setattr("coterie_trainer.cli.exit_with_parent", lambda: None)
    monkeypatch.setattr("coterie_trainer.training.train", raising(error))
    store = tmp_path / "store"
    assert cli.main(["train", DEMO, "--rank", "1", "--world", "2", "--store", str(store)]) == code
    record = json.loads((tmp_path / "failure-1").read_text())
    assert record["is_user_error"] == is_user_error
    assert re.fullmatch(text, record["text"])
    assert abs(record["time_ns"] - time.time_ns()) < 60e9
    assert capsys.readouterr() == ("", "")
    assert calls == []  # the parent has prepared the data


def test_export(calls, capsys):
    import torch

    assert cli.main(["export", "r", "o", "--family", "qwen3_moe"]) == 0
    assert calls == [("export_run", ("r", "o"), {"family": "qwen3_moe", "step": None, "dtype": None})]
    calls.clear()
    assert cli.main(["export", "r", "o", "--family", "f", "--dtype", "bfloat16"]) == 0
    assert calls == [("export_run", ("r", "o"), {"family": "f", "step": None, "dtype": torch.bfloat16})]
    calls.clear()
    assert cli.main(["export", "r", "o", "--family", "f", "--step", "7", "--check"]) == 0
    assert calls == [
        ("export_run", ("r", "o"), {"family": "f", "step": 7, "dtype": None}),
        ("check_export", ("r", "o"), {"step": 7}),
    ]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "transformers gives the same logits: largest relative difference 1.5e-06"
    )


def test_rounded_numbers_are_not_checked(calls, capsys):
    assert cli.main(["export", "r", "o", "--family", "f", "--dtype", "bfloat16", "--check"]) == 2
    assert "give one of the two" in capsys.readouterr().err
    assert calls == []


def test_generate(calls, capsys):
    assert (
        cli.main(["generate", "r", "--prompt", "def", "--max-new-tokens", "5", "--temperature", "0.5", "--seed", "3"])
        == 0
    )
    assert calls == [("generate", ("r", "def"), {"max_new_tokens": 5, "temperature": 0.5, "seed": 3})]
    assert capsys.readouterr().out == "def main():\n"


def test_tokenize_makes_a_folder_that_the_config_can_name(tmp_path, capsys):
    for number in range(4):
        (tmp_path / f"text {number}.txt").write_text(f"document {number}: the quick brown fox\n" * 20)
    out = tmp_path / "tokens [1]"
    arguments = ["tokenize", str(tmp_path), "--out", str(out), "--vocab-size", "300", "--held-out", "0.25"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^train: \d+ documents, \d[\d,]* tokens$", shown, flags=re.MULTILINE)
    assert re.search(r"^held_out: \d+ documents, \d[\d,]* tokens$", shown, flags=re.MULTILINE)
    assert shown.endswith(f"in the config: data.path = {str(out)!r}\n")
    assert cli.main(["check", DEMO, f"--set=data.path={out}", "--set=data.source=files"]) == 0
    vocab_size = json.loads((out / "index.json").read_text())["vocab_size"]
    assert f"vocabulary: {vocab_size} (of {out})" in capsys.readouterr().out


def test_the_program_itself(tmp_path):
    done = run("check", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"coterie: error: No such file or directory: {tmp_path / 'none.toml'}\n"
    done = run("check", DEMO)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("plan\n")


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "coterie_trainer", "check", DEMO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_exit_codes_are_those_of_the_launcher():
    assert (launch.USER_ERROR, launch.INTERRUPTED) == (2, 130)


def test_an_interrupt_while_loading_ends_at_once(monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with arguments.loading():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends == [130]
    assert capfd.readouterr().err == "interrupted\n"
