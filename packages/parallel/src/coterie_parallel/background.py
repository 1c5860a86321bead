"""Collectives that run beside the computation, with the work that belongs to them."""

from collections import deque
from collections.abc import Iterator

import torch

from coterie_parallel.collectives import Pending

__all__ = ["Background", "Job", "Ticket"]

Job = Iterator[Pending]
"""A generator that starts collectives, yields each, and goes on when its result is there."""


class Ticket:
    """One job under way."""

    def __init__(self, job: Job, stream: torch.cuda.Stream | None) -> None:
        self._job = job
        self._pending: Pending | None = None
        self._event: torch.cuda.Event | None = None
        self._device = None if stream is None else stream.device
        with torch.no_grad():
            if stream is None:
                self._pending = next(job)
                return
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                for pending in job:
                    pending.wait()
                self._event = stream.record_event()

    def is_done(self) -> bool:
        """Return whether `wait` would not block."""
        if self._event is not None:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._pending is None or self._pending.is_done()

    def wait(self) -> None:
        """Finish the job (CPU), or let the current stream wait for it (GPU); a second call changes nothing."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        with torch.no_grad():
            while self._pending is not None:
                self._pending.wait()
                self._pending = next(self._job, None)


class Background:
    """Runs jobs one after the other, in the order in which they were started.

    On a GPU all of a job runs on one stream of its own, which first waits for the current one; the host waits for
    nothing. On a CPU the collective runs in the threads of the back-end, and the rest of the job when it is finished,
    so that a hook of the backward pass never blocks: a peer may need this rank to go on before it can join.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._tickets: deque[Ticket] = deque()

    def __del__(self) -> None:
        # Whoever gets the memory of a job that was not waited for comes after it.
        if self._stream is not None and self._tickets:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def start(self, job: Job) -> Ticket:
        """Start ``job``; it ends with its ticket's ``wait``, or with `finish`."""
        ticket = Ticket(job, self._stream)
        self._tickets.append(ticket)
        return ticket

    def finish_ready(self) -> None:
        """End the oldest jobs as far as that needs no waiting, which frees their buffers."""
        while self._tickets and self._tickets[0].is_done():
            self._tickets.popleft().wait()

    def finish(self) -> None:
        """End all jobs."""
        while self._tickets:
            self._tickets.popleft().wait()
