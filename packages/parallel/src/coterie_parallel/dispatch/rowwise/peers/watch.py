"""A thread that watches the processes of peers while the host may be blocked in a call to the device."""

import threading
from collections.abc import Callable, Mapping

from coterie_parallel.dispatch.rowwise.peers.processes import Process, is_alive

__all__ = ["Watch"]

_LOOK_EVERY_S = 0.25


class Watch:
    """Look at the peers several times a second until the first one is dead or the watch is stopped.

    Args:
        processes: the processes to watch, by peer; all of this host and namespace.
        on_death: called once, in the thread of the watch.
    """

    def __init__(self, processes: Mapping[int, Process], on_death: Callable[[], object]) -> None:
        self._processes = dict(processes)
        self._on_death = on_death
        self._is_over = threading.Event()
        # A daemon: a process that ends without `stop` is not held up.
        self._thread = threading.Thread(target=self._run, name="coterie peer watch", daemon=True)
        self._thread.start()

    def dead(self) -> list[int]:
        """Return the peers that are dead now."""
        return [peer for peer, process in self._processes.items() if not is_alive(process)]

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            if self.dead():
                self._on_death()
                return
