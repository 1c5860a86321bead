"""What the commands share: the types of their arguments, and imports that Ctrl-C can end."""

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from coterie_trainer.launch import INTERRUPTED

__all__ = ["count", "loading", "names"]


def count(text: str) -> int:
    """Return the whole number of at least 1 that ``text`` is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def names(text: str) -> list[str]:
    """Return the names that commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """End at once on Ctrl-C: a KeyboardInterrupt that is raised in the middle of an import of torch can be lost."""
    previous = signal.getsignal(signal.SIGINT)
    is_ours = previous is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, previous)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
