"""How a rank that fails in the middle of a run lets its peers know, so that they do not wait for their time-out.

Nothing here raises: what counts is the error of the computation, not that of a store or a connection that is gone.
"""

from contextlib import suppress

from coterie_parallel.axis import Axis

__all__ = ["failures_told", "tell_failure"]


def tell_failure(error: BaseException, axis: Axis) -> None:
    """Leave what this rank raised where its peers on ``axis`` find it; to be called before `end_waits`."""
    assert axis.group is not None
    with suppress(RuntimeError):
        text = f"rank {axis.ranks[axis.index]} raised {type(error).__name__}: {error}"
        axis.group.get_group_store().set(_key(axis.index), text)


def failures_told(axis: Axis) -> list[str]:
    """Return what peers on ``axis`` have raised, in the order of the axis index; waits for nothing."""
    assert axis.group is not None
    told: list[str] = []
    with suppress(RuntimeError):
        store = axis.group.get_group_store()
        keys = [_key(index) for index in range(axis.size) if index != axis.index]
        told += [store.get(key).decode() for key in keys if store.check([key])]
    return told


def _key(index: int) -> str:
    return f"coterie pipeline failure {index}"
