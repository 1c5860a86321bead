"""The stage of `torch.distributed.pipelining`; imported when a pipeline is built, as torch's module takes seconds."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage

__all__ = ["WatchedStage"]


class WatchedStage(PipelineStage):
    """A stage that enters ``around_backward`` around each of its backwards, and says what its computation raises.

    Attributes:
        on_failure: called with the error; torch raises another one in its place.
    """

    around_backward: Callable[[], AbstractContextManager[None]]
    on_failure: Callable[[BaseException], None]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward of one micro-batch, as the base class does."""
        with self._watched():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Compute the backward of one micro-batch, as the base class does."""
        with self._watched(), self.around_backward():
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Compute the weight gradients of one micro-batch, as the base class does."""
        with self._watched():
            super().backward_weight_one_chunk(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        # In torch 2.10 a rank with two neighbouring stages greets itself here, which gloo can not do.
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.group_peer != self.group_rank]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.on_failure(error.__cause__ or error)
            raise
