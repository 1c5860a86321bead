"""Count, while a step runs, the bytes of live tensors and the bytes that a rank sends to others."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StepWatch"]


class StepWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts; for the CPU, where the backward runs in the thread that called it.

    Only what is made inside is counted as live, so enter it before the model is built. What an operation makes and
    frees inside of itself is not seen. Bytes sent are those that must leave this rank, whatever the algorithm: of an
    all-gather the own part to each other rank, of a reduce-scatter and an all-to-all every part but the own one, of an
    all-reduce twice that.

    Attributes:
        live_bytes: of all tensors that are alive now.
        peak_bytes: the most since the start or the last `reset_peak`.
        sent_bytes: to other ranks, by collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self._bytes_of: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> "StepWatch":
        """Start to count."""
        # A storage changes its size without an operation: FSDP frees and fills the gathered weights so.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop to count."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made or sent."""
        if DTensor in types:
            return NotImplemented  # it comes again as operations on the local tensors
        if func.namespace == "c10d":
            self._send(func.overloadpacket.__name__, args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return
        key = storage._cdata
        if key not in self._bytes_of:
            self._bytes_of[key] = 0
            weakref.finalize(storage, self._free, key)
        self.live_bytes += storage.nbytes() - self._bytes_of[key]
        self._bytes_of[key] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        self.live_bytes -= self._bytes_of.pop(key)

    def _send(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject)), None)
        assert group is not None, name
        size = group.size()
        if name == "alltoall_base_":
            splits = args[4]
            whole = args[1].nbytes
            own = whole // size if not splits else splits[group.rank()] * whole // max(1, sum(splits))
            self.sent_bytes[name] += whole - own
        elif name in ("_allgather_base_", "allgather_"):
            part = args[1] if name == "_allgather_base_" else args[1][0]
            self.sent_bytes[name] += (size - 1) * part.nbytes
        elif name == "_reduce_scatter_base_":
            self.sent_bytes[name] += args[1].nbytes * (size - 1) // size
        elif name == "allreduce_":
            self.sent_bytes[name] += 2 * args[0][0].nbytes * (size - 1) // size
        elif name != "barrier":
            raise ValueError(f"the bytes of the collective {name} are not known")
