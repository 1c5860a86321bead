"""The stage of `torch.distributed.pipelining`; imported when a pipeline is built, as torch's module takes seconds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.pipelining import PipelineStage

__all__ = ["WatchedStage"]


class WatchedStage(PipelineStage):
    """A stage that enters ``around_backward`` around each of its backwards."""

    around_backward: Callable[[], AbstractContextManager[None]]

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Compute the backward of one micro-batch, as the base class does."""
        if not self.has_backward:
            return
        with self.around_backward():
            super().backward_one_chunk(*args, **kwargs)
