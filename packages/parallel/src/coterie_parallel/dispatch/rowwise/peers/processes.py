"""Who a process is and whether it lives, so that a peer that died is found before a wait is over. Linux only."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "is_alive", "this_process"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process for as long as the machine runs: numbers alone are given out again, with the start time they are not.

    Attributes:
        host: name of the machine.
        namespace: inode of the namespace in which ``pid`` counts; containers have their own.
        pid: the number of the process.
        started: its start, in clock ticks since the machine started.
    """

    host: str
    namespace: int
    pid: int
    started: int


def this_process() -> Process:
    """Return who this process is."""
    state = _state_and_start(os.getpid())
    assert state is not None
    return Process(host=socket.gethostname(), namespace=_namespace(), pid=os.getpid(), started=state[1])


def is_alive(process: Process) -> bool:
    """Return whether a process of this host and namespace still runs; one that is stopped does.

    Sending signal 0 would not do: it succeeds for a dead process that its parent has not reaped.
    """
    state = _state_and_start(process.pid)
    return state is not None and state[0] not in "ZX" and state[1] == process.started


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in brackets and may itself hold brackets and blanks: see proc(5).
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
