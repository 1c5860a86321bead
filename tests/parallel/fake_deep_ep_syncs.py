"""Find what would make the host wait for a GPU, in code that runs on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal"}
_SIZES = {"nonzero", "argwhere", "masked_select", "bincount", "unique", "unique_consecutive", "repeat_interleave"}
_INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}

_pauses = [0]


@contextmanager
def unwatched() -> Iterator[None]:
    """Find nothing in here: it belongs to the stand-in."""
    _pauses[0] += 1
    try:
        yield
    finally:
        _pauses[0] -= 1


class HostReads(TorchFunctionMode):
    """Collects the names of the calls that read a tensor on the host or have a size that depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if not _pauses[0] and (name in _READS | _SIZES or (name in _INDEXING and _by_mask(args[1]))):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def _by_mask(index: Any) -> bool:
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
