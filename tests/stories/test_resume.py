"""A run that stops at any step and starts again gives the same bits as one that never stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from coterie_trainer.checkpoint import Checkpoints, read_tensors

from stories.conftest import CONFIG

PERSISTENT = ("loss", "balance_loss", "z_loss", "gradient_norm", "learning_rate", "load_imbalance", "tokens")


def command(folder: Path, overrides: list[str], *more: str) -> list[str]:
    sets = [f"--set={text}" for text in (*overrides, f"run_folder={str(folder)!r}", *more)]
    return [sys.executable, "-m", "coterie_trainer", "train", str(CONFIG), *sets]


def finish(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def steps(folder: Path) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    numbers = [record["step"] for record in found if record["kind"] == "step"]
    assert numbers == sorted(set(numbers))
    return {record["step"]: record for record in found if record["kind"] == "step"}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        path = folder / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text(encoding="utf-8"):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def running(session_leader_and_children: set[int]) -> list[int]:
    alive = []
    for pid in session_leader_and_children:
        try:
            os.kill(pid, 0)
            alive.append(pid)
        except ProcessLookupError:
            pass
    return alive


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(child)} | children_of(int(child))
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, small_demo: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    finish(command(folder, small_demo))
    return folder


def assert_same_end(folder: Path, unbroken: Path) -> None:
    expected, found = steps(unbroken), steps(folder)
    assert found.keys() == expected.keys()
    for step, record in expected.items():
        for name in PERSISTENT:
            assert found[step][name] == record[name], (step, name)
    last = Checkpoints(unbroken).path(20)
    mine = Checkpoints(folder).path(20)
    for prefix in ("model/", "exp_avg/", "exp_avg_sq/", "trainer/"):
        expected_tensors, tensors = read_tensors(last, prefix), read_tensors(mine, prefix)
        assert expected_tensors.keys() == tensors.keys()
        assert expected_tensors
        for name, tensor in expected_tensors.items():
            assert tensors[name].equal(tensor), name


def test_interrupted_by_ctrl_c(tmp_path: Path, small_demo: list[str], unbroken: Path) -> None:
    process = subprocess.Popen(command(tmp_path, small_demo), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path, 7, process)
    family = {process.pid} | children_of(process.pid)
    assert len(family) >= 3
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    last = out.splitlines()[-1]
    assert re.fullmatch(r"interrupted: stopped after step \d+; start the same command again to go on", last), last
    deadline_s = time.monotonic() + 10
    while running(family - {process.pid}) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert running(family - {process.pid}) == []
    stopped_at = Checkpoints(tmp_path).latest_step()
    assert stopped_at is not None
    assert 7 <= stopped_at < 20
    finish(command(tmp_path, small_demo))
    assert_same_end(tmp_path, unbroken)


def test_killed_without_warning(tmp_path: Path, small_demo: list[str], unbroken: Path) -> None:
    process = subprocess.Popen(command(tmp_path, small_demo), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path, 8, process)
    family = children_of(process.pid)
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + 10
    while running(family) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert running(family) == []
    assert Checkpoints(tmp_path).latest_step() in (5, 10)
    finish(command(tmp_path, small_demo))
    assert_same_end(tmp_path, unbroken)


def test_a_finished_run_says_so_and_another_model_is_refused(small_demo: list[str], unbroken: Path) -> None:
    again = subprocess.run(command(unbroken, small_demo), capture_output=True, text=True, timeout=120)
    assert again.returncode == 0
    assert "is complete at step 20; raise train.steps to go on" in again.stdout
    other = subprocess.run(
        command(unbroken, small_demo, "model.num_experts=8", "seed=3"), capture_output=True, text=True, timeout=120
    )
    assert other.returncode == 2
    assert "model.num_experts was 16 and is now 8; seed was 0 and is now 3" in other.stderr
    assert "Traceback" not in other.stderr
