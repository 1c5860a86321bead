"""Count the bytes of tensors that are alive, on a CPU, where torch has no counter of its own."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Looks after every operation inside the context which of the storages that operations returned are alive.

    Attributes:
        most: the most bytes that were alive after an operation since this was last set to 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def now(self) -> int:
        """Return the bytes that are alive."""
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.now()
        for one in tree_flatten(result)[0]:
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now())
        return result
