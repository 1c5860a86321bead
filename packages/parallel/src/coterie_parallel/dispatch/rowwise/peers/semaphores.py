"""POSIX semaphores that lie in shared memory, called through the C library. Linux only.

They order memory: POSIX (Base Definitions, 4.12 Memory Synchronization) lists ``sem_post``, ``sem_trywait`` and
``sem_timedwait`` among the functions that synchronise memory. What a process wrote before it posts is seen by the one
whose wait takes that post, on x86 as on ARM, where plain stores may be seen in another order. Python has no operation
on shared memory that promises it. And who waits sleeps in the kernel, woken by the post, so that waiting takes no core
from the peers that compute.
"""

import ctypes
import errno
import os
import time

__all__ = ["SEMAPHORE_BYTES", "has_semaphores", "initialize", "post", "take", "value"]

# Room for a sem_t of any C library on Linux (32 bytes at most), on a cache line of its own.
SEMAPHORE_BYTES = 64

_C = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_semaphores() -> bool:
    """Return whether the C library has what is used here."""
    return all(hasattr(_C, name) for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait", "sem_getvalue"))


def initialize(address: int) -> None:
    """Make a semaphore with value 0 at this address, to be shared between processes."""
    _call(_C.sem_init(ctypes.c_void_p(address), 1, 0))


def post(address: int) -> None:
    """Add one, and wake who waits; a release."""
    _call(_C.sem_post(ctypes.c_void_p(address)))


def value(address: int) -> int:
    """Return the number of posts that nobody has taken."""
    found = ctypes.c_int()
    _call(_C.sem_getvalue(ctypes.c_void_p(address), ctypes.byref(found)))
    return found.value


def take(address: int, *, patience_s: float = 0.0) -> bool:
    """Take one, waiting up to ``patience_s`` for it, and return whether there was one; an acquire."""
    pointer = ctypes.c_void_p(address)
    if _C.sem_trywait(pointer) == 0:
        return True
    if patience_s <= 0.0:
        return False
    if _timed_wait(pointer, int(patience_s * 1e9)) == 0:
        return True
    # Interrupted by a signal counts as not yet: its handler runs before the caller asks again.
    error = ctypes.get_errno()
    if error not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(error, os.strerror(error))
    return False


def _timed_wait(pointer: ctypes.c_void_p, patience_ns: int) -> int:
    # A time of day can be set back during the wait; the C library of some systems knows no other clock here.
    if hasattr(_C, "sem_clockwait"):
        until = _timespec(time.clock_gettime_ns(time.CLOCK_MONOTONIC) + patience_ns)
        return int(_C.sem_clockwait(pointer, time.CLOCK_MONOTONIC, ctypes.byref(until)))
    until = _timespec(time.clock_gettime_ns(time.CLOCK_REALTIME) + patience_ns)
    return int(_C.sem_timedwait(pointer, ctypes.byref(until)))


def _timespec(time_ns: int) -> _Timespec:
    return _Timespec(time_ns // 10**9, time_ns % 10**9)


def _call(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
