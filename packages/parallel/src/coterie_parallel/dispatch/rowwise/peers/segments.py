"""Named segments of POSIX shared memory that never outlive their use.

A name is needed only until every rank has mapped the segment, then it is unlinked: the memory lives on with the
mappings, and whatever kills the processes later leaves nothing behind. Between the two a crash can leave a name. The
name says who made it, and `remove_leftovers` unlinks those whose maker is dead.
"""

import mmap
import os
import secrets
from pathlib import Path

from coterie_parallel.dispatch.rowwise.peers.processes import Process, is_alive, this_process

__all__ = ["FOLDER", "create", "free_bytes", "map_segment", "remove_leftovers", "unlink"]

FOLDER = Path("/dev/shm")
_PREFIX = "coterie"


def create(num_bytes: int) -> str:
    """Create an empty segment of this many bytes, for this user only, and return its name."""
    own = this_process()
    name = "-".join(map(str, (_PREFIX, os.getuid(), own.namespace, own.pid, own.started, secrets.token_hex(8))))
    descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        unlink(name)
        raise
    finally:
        os.close(descriptor)
    return name


def map_segment(name: str, *, start: int, num_bytes: int) -> mmap.mmap:
    """Map a whole segment and return the mapping; take room for ``num_bytes`` from ``start`` on.

    Without room of its own a segment would grow when it is written to, and a full file system would then kill the
    writer with SIGBUS. Here it is an OSError (ENOSPC).
    """
    descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise PermissionError(f"{FOLDER / name} belongs to user {status.st_uid}, not to {os.getuid()}")
        os.posix_fallocate(descriptor, start, num_bytes)
        return mmap.mmap(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def unlink(name: str) -> None:
    """Remove the name of a segment, if it is still there; who has mapped it keeps the memory."""
    (FOLDER / name).unlink(missing_ok=True)


def free_bytes() -> int:
    """Return how much room is left for segments."""
    status = os.statvfs(FOLDER)
    return status.f_bavail * status.f_frsize


def remove_leftovers() -> list[str]:
    """Unlink the segments of this user whose maker is dead, and return their names.

    Numbers of another namespace say nothing here, so what a process of another container made is left alone.
    """
    own = this_process()
    removed = []
    for path in FOLDER.glob(f"{_PREFIX}-{os.getuid()}-{own.namespace}-*"):
        parts = path.name.split("-")
        if len(parts) != 6 or not (parts[3].isdecimal() and parts[4].isdecimal()):
            continue
        maker = Process(host=own.host, namespace=own.namespace, pid=int(parts[3]), started=int(parts[4]))
        if not is_alive(maker):
            unlink(path.name)
            removed.append(path.name)
    return removed
