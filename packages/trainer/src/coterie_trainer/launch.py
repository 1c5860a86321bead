"""How the processes of a run start, meet, stop and end, with or without torchrun.

`launch_local` starts N processes on this machine. They meet through a file in a temporary folder, so no port is used,
and learn their rank from command line options. Each child is the leader of its own session: Ctrl-C in a terminal
reaches only the parent, which asks the children to stop. A child whose parent is gone (even by ``kill -9``) reads the
end of its standard input and exits.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds to import, and the parent of local processes needs none of it
    import torch

__all__ = [
    "INTERRUPTED",
    "USER_ERROR",
    "Process",
    "StopRequest",
    "detect",
    "distributed",
    "exit_with_parent",
    "launch_local",
    "record_failure",
]

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""

USER_ERROR = 2
"""Exit code after a fault of the input, reported in one message."""

_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_POLL_S = 0.05
_SETTLE_S = 1.0
_OUTPUT_LINES = 40
# A wrapper may pass on a Ctrl-C that the terminal sent us as well; that is one request, not two.
_SAME_REQUEST_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among all processes of the run.

    Attributes:
        rank: Number of this process in the run.
        world: Number of processes in the run.
        local_rank: Number of this process on this machine.
        store: File through which processes started by `launch_local` meet; else None.
        port: MASTER_PORT under torchrun; else None.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    store: Path | None = None
    port: int | None = None


def detect(environment: Mapping[str, str] = os.environ) -> Process:
    """Return this process as torchrun describes it, or a run of one process when no launcher left a trace.

    Raises:
        ValueError: Some of torchrun's variables are set and others missing, or a number is none.
    """
    found = {name: environment[name] for name in _TORCHRUN_NAMES if environment.get(name)}
    if not found:
        return Process()
    missing = [name for name in _TORCHRUN_NAMES if name not in found]
    if missing:
        raise ValueError(
            f"the environment holds {', '.join(found)} but not {', '.join(missing)}; start with torchrun, which sets "
            f"all of them, or unset {', '.join(found)} to run without a launcher"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not found[name].isdecimal():
            raise ValueError(f"the environment variable {name} ({found[name]!r}) must be a whole number of at least 0")
        numbers[name] = int(found[name])
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ValueError(f"RANK ({numbers['RANK']}) must be below WORLD_SIZE ({numbers['WORLD_SIZE']})")
    return Process(
        rank=numbers["RANK"],
        world=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        port=numbers["MASTER_PORT"],
    )


@contextlib.contextmanager
def distributed(process: Process, *, timeout_s: float, device: "torch.device") -> Iterator[None]:
    """Hold the default process group of the run: gloo for the CPU, and NCCL for the tensors of a GPU.

    A run of one process needs no group and gets none. Local processes share the cores of the machine and talk over
    the loop-back interface only.

    Args:
        process: This process.
        timeout_s: Time-out of the meeting and of the default group.
        device: Where this process computes.

    Raises:
        ValueError: MASTER_PORT is in use.
    """
    if process.world == 1:
        yield
        return
    import torch
    import torch.distributed as dist
    from coterie_parallel.local_ranks import loop_back

    with contextlib.ExitStack() as stack:
        store = None
        if process.store is not None:
            torch.set_num_threads(max(1, torch.get_num_threads() // process.world))
            stack.enter_context(loop_back())
            store = dist.FileStore(str(process.store), process.world)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method="env://" if store is None else None,
                store=store,
                rank=process.rank,
                world_size=process.world,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise ValueError(f"this process cannot meet the others: {str(error).splitlines()[0]}") from error
            raise ValueError(
                f"MASTER_PORT ({process.port}) is in use on this machine; end the process that holds it, or choose "
                f"another port, as in torchrun --master-port {(process.port or 0) + 1}"
            ) from None
        try:
            yield
        except BaseException:
            # NCCL's farewell waits for peers, which may be gone; the end of the process frees everything.
            if device.type != "cuda":
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


class StopRequest:
    """While entered, turns SIGINT, SIGTERM and SIGHUP into a flag that the training loop polls.

    A second SIGINT raises KeyboardInterrupt at once. Works in the main thread only, as signal handlers do.

    Attributes:
        requested: Whether a signal has come.
        insisted: Whether a second SIGINT has come.
    """

    def __init__(self, *, raise_on_second: bool = True) -> None:
        self.requested = False
        self.insisted = False
        self._raise_on_second = raise_on_second
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # nohup has SIGHUP ignored, a shell has SIGINT ignored for jobs in the background; so it stays.
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since_s = True, now
        elif number == signal.SIGINT and now - self._since_s > _SAME_REQUEST_S:
            self.insisted = True
            if self._raise_on_second:
                raise KeyboardInterrupt


def exit_with_parent() -> None:
    """Start a thread that ends this process when its parent, which holds the other end of its input, is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def record_failure(process: Process, text: str, *, is_user_error: bool) -> None:
    """Leave the reason of this local process's end to its parent, which shows one of all ranks' reasons."""
    assert process.store is not None, process
    record = {"time_ns": time.time_ns(), "text": text, "is_user_error": is_user_error}
    _failure_file(process.store, process.rank).write_text(json.dumps(record), encoding="utf-8")


def launch_local(
    arguments: Sequence[str], procs: int, *, grace_s: float = 8.0, _command: Sequence[str] | None = None
) -> int:
    """Run ``coterie`` with ``arguments`` as ``procs`` processes of one run on this machine; return the exit code.

    Rank 0 writes to the terminal. The first rank that fails ends the others; its reason is shown once. SIGINT or
    SIGTERM asks all ranks to stop; those that have not ended ``grace_s`` later, or at a second SIGINT, are killed.

    Args:
        arguments: Command line of the children, without the program's name.
        procs: Number of processes.
        grace_s: Seconds for an orderly stop.
    """
    command = [sys.executable, "-P", "-m", "coterie_trainer"] if _command is None else list(_command)
    children: list[_Child] = []
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder, StopRequest(raise_on_second=False) as stop:
        store = Path(folder) / "store"
        try:
            for rank in range(procs):
                options = ["--rank", str(rank), "--world", str(procs), "--store", str(store)]
                children.append(_Child([*command, *arguments, *options], rank, store))
            return _watch(children, stop, grace_s)
        finally:
            killed = [child.end() for child in children]
            if any(killed) and sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # a live line that was killed left the cursor hidden
                sys.stdout.flush()


class _Child:
    """One local rank. Rank 0 shares our output; what the others write is kept in case one of them dies."""

    def __init__(self, command: Sequence[str], rank: int, store: Path) -> None:
        self.rank, self.store = rank, store
        self.seen_alive_ns = time.time_ns()
        self.code: int | None = None
        with contextlib.ExitStack() as stack:
            output = None if rank == 0 else stack.enter_context(open(self._output_file(), "wb"))
            errors = None if rank == 0 else subprocess.STDOUT
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True
            )

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs, and note when it was last seen alive."""
        now_ns = time.time_ns()
        if self.code is None:
            self.code = self.process.poll()
            if self.code is None:
                self.seen_alive_ns = now_ns
        return self.code

    def ask_to_stop(self) -> None:
        if self.poll() is None:
            self.process.terminate()

    def end(self) -> bool:
        """Kill the process and what it started, if it runs; return whether it did."""
        running = self.poll() is None
        if running:
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        return running

    def failure(self) -> tuple[int, str, bool]:
        """Return when this rank failed, why, and whether that is a fault of the input."""
        path = _failure_file(self.store, self.rank)
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            return record["time_ns"], record["text"], record["is_user_error"]
        # Nothing recorded: it crashed or was killed, at some moment after it was last seen alive.
        assert self.code is not None
        if self.code < 0:
            reason = f"was killed by {signal.Signals(-self.code).name}"
            if -self.code == signal.SIGKILL:
                reason += "; perhaps this machine ran out of memory"
        else:
            reason = f"ended with exit code {self.code}"
        lines = [] if self.rank == 0 else self._output_file().read_text(encoding="utf-8", errors="replace").splitlines()
        return self.seen_alive_ns, "\n".join([*lines[-_OUTPUT_LINES:], f"coterie: error: this rank {reason}"]), False

    def _output_file(self) -> Path:
        return self.store.with_name(f"output-{self.rank}")


def _failure_file(store: Path, rank: int) -> Path:
    return store.with_name(f"failure-{rank}")


def _watch(children: Sequence[_Child], stop: StopRequest, grace_s: float) -> int:
    while True:
        codes = [child.poll() for child in children]
        # A rank that ends as interrupted got a signal of its own; the whole run stops with it.
        if stop.requested or INTERRUPTED in codes:
            is_late = _wait_for_stop(children, stop, grace_s)
            if is_late:
                print(
                    f"interrupted: the step and its checkpoint took longer than {grace_s:g} s (checkpoint.grace_s); "
                    "the same command goes on from the last checkpoint",
                    file=sys.stderr,
                )
            elif children[0].code != INTERRUPTED:  # else rank 0 has said at which step it stopped
                print("interrupted", file=sys.stderr)
            return INTERRUPTED
        if any(codes):
            return _report_failure(children)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


def _wait_for_stop(children: Sequence[_Child], stop: StopRequest, grace_s: float) -> bool:
    """Ask the ranks to stop and wait for that; return whether some had not ended when the time was up."""
    for child in children:
        child.ask_to_stop()
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s and not stop.insisted:
        codes = [child.poll() for child in children]
        # A rank that SIGTERM ended was not yet in the training loop, so no rank can end in good order.
        if None not in codes or -signal.SIGTERM in codes:
            break
        time.sleep(_POLL_S)
    # Errors of ranks that lost a peer are noise now; a full disk while saving is not.
    reasons = [child.failure() for child in children if child.code not in (None, 0, INTERRUPTED)]
    for text in {text for _, text, is_user_error in reasons if is_user_error}:
        print(text, file=sys.stderr)
    return time.monotonic() >= deadline_s and None in [child.code for child in children]


def _report_failure(children: Sequence[_Child]) -> int:
    """Show the reason of the rank that failed first, and return its exit code."""
    deadline_s = time.monotonic() + _SETTLE_S
    while None in [child.poll() for child in children] and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    failed = [child for child in children if child.code]
    first = min(failed, key=lambda child: child.failure()[0])
    _, text, is_user_error = first.failure()
    if not is_user_error:
        text = "\n".join(f"[rank {first.rank}] {line}" for line in text.splitlines())
    print(text, file=sys.stderr)
    assert first.code is not None
    return first.code if first.code > 0 else 128 - first.code
