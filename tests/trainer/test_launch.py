"""`launch_local` is tested with a stand-in for the trainer: a child that fails or stops in the way that it is told."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from coterie_trainer.launch import Process, StopRequest, detect, distributed

CHILD = """
import os, pathlib, signal, sys, time
from coterie_trainer.launch import Process, StopRequest, exit_with_parent, record_failure

folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
assert sys.argv[3::2] == ["--rank", "--world", "--store"], sys.argv
rank, world, store = int(sys.argv[4]), int(sys.argv[6]), pathlib.Path(sys.argv[8])
process = Process(rank=rank, world=world, local_rank=rank, store=store)
exit_with_parent()


def ready():
    (folder / f"{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.pid")


def fail(text, code, is_user_error=False):
    record_failure(process, text, is_user_error=is_user_error)
    sys.exit(code)


def until_stopped(ignore=False):
    with StopRequest() as stop:
        ready()
        while ignore or not stop.requested:
            time.sleep(0.01)


if what == "fine":
    print(f"output of rank {rank} of {world}")
elif what == "user_error":
    fail("coterie: error: no such folder", 2, is_user_error=True)
elif what == "crash":
    if rank == 1:
        record_failure(process, "Traceback of the cause\\nZeroDivisionError", is_user_error=False)
        ready()
        time.sleep(0.4)  # it fails first and is the last to be gone
        sys.exit(1)
    while not (folder / "1.pid").is_file():
        time.sleep(0.01)
    fail("Traceback of one that lost its peer", 7)
elif what == "native_crash_noticed":
    if rank == 1:
        ready()
        os.kill(os.getpid(), signal.SIGSEGV)
    while not (folder / "1.pid").is_file():
        time.sleep(0.001)
    time.sleep(0.01)
    fail("Traceback of one that lost its peer", 7)
elif what == "native_crash":
    ready()
    if rank == 1:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif what == "silent_exit":
    if rank == 1:
        print("\\n".join(f"line {n}" for n in range(100)))
        sys.exit(3)
    time.sleep(60)
elif what == "polite":
    until_stopped()
    (folder / f"{rank}.saved").touch()
    sys.exit(130)
elif what == "full_disk":
    until_stopped()
    fail(f"coterie: error: no space left", 2, is_user_error=True)
elif what == "early":
    if rank == 0:
        until_stopped(ignore=True)
    ready()
    time.sleep(60)
elif what == "deaf":
    until_stopped(ignore=True)
elif what == "one_stops":
    if rank == 0:
        until_stopped()
    while not (folder / "0.pid").is_file():
        time.sleep(0.01)
    sys.exit(130)
"""

PARENT = """
import signal
import sys
from coterie_trainer.launch import launch_local
for number in (signal.SIGHUP, signal.SIGTERM):  # as in a plain shell, also where nohup started the tests
    signal.signal(number, signal.SIG_DFL)
child, folder, what, procs, grace_s = sys.argv[1:]
sys.exit(launch_local([folder, what], int(procs), grace_s=float(grace_s), _command=[sys.executable, child]))
"""


class Launch:
    """A parent process with its children."""

    def __init__(self, folder: Path, what: str, procs: int, grace_s: float = 8.0) -> None:
        self.folder, self.procs = folder, procs
        (folder / "child.py").write_text(CHILD)
        command = [sys.executable, "-c", PARENT, str(folder / "child.py"), str(folder), what, str(procs), str(grace_s)]
        self.parent = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def pids(self) -> list[int]:
        """Wait until every rank is ready, and return their process ids."""
        files = [self.folder / f"{rank}.pid" for rank in range(self.procs)]
        wait_for(lambda: all(file.is_file() for file in files))
        return [int(file.read_text()) for file in files]

    def end(self, timeout_s: float = 30.0) -> tuple[int, str, str]:
        output, errors = self.parent.communicate(timeout=timeout_s)
        return self.parent.returncode, output, errors


@pytest.fixture
def start(tmp_path):
    launches = []

    def start(what, procs=2, **options):
        launches.append(Launch(tmp_path, what, procs, **options))
        return launches[-1]

    yield start
    # Children that a failed test leaves behind would hold the output open for ever.
    for file in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for launch in launches:
        launch.parent.kill()
        launch.parent.communicate()


def wait_for(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that has ended stays in the process table until the init process collects it.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.is_file() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_all_ranks_end_well_and_only_rank_0_is_heard(start):
    assert start("fine", procs=3).end() == (0, "output of rank 0 of 3\n", "")


def test_an_error_of_the_input_is_shown_once(start):
    assert start("user_error", procs=3).end() == (2, "", "coterie: error: no such folder\n")


def test_the_cause_is_shown_and_not_what_follows_from_it(start):
    assert start("crash").end() == (
        1,
        "",
        "[rank 1] Traceback of the cause\n[rank 1] ZeroDivisionError\n",
    )


def test_a_rank_that_is_killed_ends_the_run(start):
    launch = start("native_crash")
    pids = launch.pids()
    code, output, errors = launch.end()
    assert (code, output) == (128 + signal.SIGKILL, "")
    assert errors == (
        "[rank 1] last words\n"
        "[rank 1] coterie: error: this rank was killed by SIGKILL; perhaps this machine ran out of memory\n"
    )
    assert not any(map(is_alive, pids))


def test_a_crash_without_a_record_is_still_the_cause(start):
    code, output, errors = start("native_crash_noticed").end()
    assert (code, output) == (128 + signal.SIGSEGV, "")
    assert errors == "[rank 1] coterie: error: this rank was killed by SIGSEGV\n"


def test_a_rank_that_exits_without_a_reason_shows_its_last_lines(start):
    code, output, errors = start("silent_exit").end()
    assert (code, output) == (3, "")
    expected = [
        *(f"[rank 1] line {n}" for n in range(60, 100)),
        "[rank 1] coterie: error: this rank ended with exit code 3",
    ]
    assert errors.splitlines() == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_ranks_in_good_order(start, tmp_path, number):
    launch = start("polite")
    pids = launch.pids()
    launch.parent.send_signal(number)
    assert launch.end() == (130, "", "")  # where it stopped is for rank 0 to say
    assert not any(map(is_alive, pids))
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["0.saved", "1.saved"]


def test_an_error_while_stopping_is_shown_once(start):
    launch = start("full_disk")
    launch.pids()
    launch.parent.send_signal(signal.SIGINT)
    assert launch.end() == (130, "", "coterie: error: no space left\ninterrupted\n")


def test_a_stop_while_ranks_are_still_starting_does_not_wait(start):
    launch = start("early", grace_s=60.0)
    pids = launch.pids()
    launch.parent.send_signal(signal.SIGINT)
    assert launch.end(timeout_s=20.0) == (130, "", "interrupted\n")
    assert not any(map(is_alive, pids))


def test_a_rank_that_does_not_stop_is_killed_after_the_grace(start):
    launch = start("deaf", grace_s=0.5)
    pids = launch.pids()
    launch.parent.send_signal(signal.SIGINT)
    code, out, errors = launch.end()
    assert (code, out) == (130, "")
    assert errors == (
        "interrupted: the step and its checkpoint took longer than 0.5 s (checkpoint.grace_s); "
        "the same command goes on from the last checkpoint\n"
    )
    assert not any(map(is_alive, pids))


def test_a_second_ctrl_c_kills_at_once(start):
    launch = start("deaf", grace_s=60.0)
    pids = launch.pids()
    launch.parent.send_signal(signal.SIGINT)
    time.sleep(0.1)
    launch.parent.send_signal(signal.SIGINT)  # a wrapper's copy of the first one
    time.sleep(0.7)
    assert all(map(is_alive, pids))
    launch.parent.send_signal(signal.SIGINT)
    assert launch.end(timeout_s=20.0) == (130, "", "interrupted\n")
    assert not any(map(is_alive, pids))


def test_a_rank_that_was_stopped_by_itself_stops_the_run(start):
    launch = start("one_stops")
    assert launch.end() == (130, "", "")


def test_children_end_when_the_parent_is_killed(start):
    launch = start("deaf")
    pids = launch.pids()
    launch.parent.kill()
    wait_for(lambda: not any(map(is_alive, pids)), timeout_s=10.0)


def test_ctrl_c_in_a_terminal_reaches_the_parent_only(start):
    launch = start("polite")
    pids = launch.pids()
    assert all(os.getpgid(pid) == pid for pid in pids)
    os.killpg(launch.parent.pid, signal.SIGINT)
    assert launch.end() == (130, "", "")


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_a_plain_start_is_one_process():
    assert detect({}) == Process(rank=0, world=1, local_rank=0, store=None, port=None)
    assert detect({"PATH": "/bin", "RANK": ""}) == Process()


def test_torchrun_is_recognised():
    assert detect(TORCHRUN) == Process(rank=1, world=2, local_rank=1, store=None, port=29500)


@pytest.mark.parametrize("name", TORCHRUN)
def test_one_variable_alone_names_the_missing_ones(name):
    with pytest.raises(ValueError, match="torchrun") as caught:
        detect({name: TORCHRUN[name]})
    missing = ", ".join(other for other in TORCHRUN if other != name)
    assert f"the environment holds {name} but not {missing};" in str(caught.value)


@pytest.mark.parametrize("name", TORCHRUN)
def test_one_missing_variable_is_named(name):
    with pytest.raises(ValueError, match=f"but not {name};"):
        detect({other: value for other, value in TORCHRUN.items() if other != name})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "two", r"RANK \('two'\) must be a whole number"),
        ("WORLD_SIZE", "-1", r"WORLD_SIZE \('-1'\) must be a whole number"),
        ("RANK", "2", r"RANK \(2\) must be below WORLD_SIZE \(2\)"),
    ],
)
def test_a_variable_out_of_range(name, value, message):
    with pytest.raises(ValueError, match=message):
        detect({**TORCHRUN, name: value})


def test_one_process_has_no_group():
    with distributed(Process(), timeout_s=5.0, device=torch.device("cpu")):
        assert not torch.distributed.is_initialized()


RANK = """
import sys, pathlib, torch, torch.distributed as dist
from coterie_trainer.launch import Process, distributed

rank, world, store = int(sys.argv[2]), int(sys.argv[4]), pathlib.Path(sys.argv[6])
process = Process(rank=rank, world=world, local_rank=rank, store=store)
with distributed(process, timeout_s=30.0, device=torch.device("cpu")):
    assert dist.get_backend() == "gloo"
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    print(f"sum {value.item()} of {dist.get_world_size()} ranks", flush=True)
assert not dist.is_initialized()
"""


def test_local_ranks_meet_without_a_port(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    parent = (
        "import sys; from coterie_trainer.launch import launch_local; "
        "sys.exit(launch_local([], 2, _command=[sys.executable, sys.argv[1]]))"
    )
    command = [sys.executable, "-c", parent, str(tmp_path / "rank.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # Before it Gloo may say who met whom (torch 2.10).
    assert done.stdout.splitlines()[-1:] == ["sum 3.0 of 2 ranks"]
    assert done.stdout.count("sum") == 1


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("localhost", 0))
        holder.listen()
        port = holder.getsockname()[1]
        environment = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(ValueError, match=rf"MASTER_PORT \({port}\) is in use .* --master-port {port + 1}$"),
            distributed(detect(), timeout_s=5.0, device=torch.device("cpu")),
        ):
            pytest.fail("two processes share a port")


def test_a_stop_request_is_a_flag_and_the_second_one_an_interrupt():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)  # within half a second: the same request
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.insisted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
