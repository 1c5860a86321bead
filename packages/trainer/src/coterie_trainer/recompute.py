"""Activation recompute: what the forward does not keep and the backward computes again, or gets sent again.

What a layer keeps for its backward, in numbers (elements, not bytes) and besides what it keeps anyway: T tokens of this
rank, D model width, Q and V widths of all queries and of all keys, R received rows, H expert width, S shared width.

    nothing         all of it; the parts below are those that can be left out
    "attention"     of the core, T * (2 * Q + 2 * V): queries, keys and values as projected, and the mixed values;
                    not the norms and rotations, nor, where attention has no fused kernel, the S * S weights of a head
    "experts"       of the experts, R * (D + 1): the rows and their weights; not R * 2 * H before the activation.
                    Of a shared expert, its input alone; not T * 4 * S
    "dispatch"      of the rows, nothing; not R * D, but T * D, the tokens that are sent again
    "block"         T * D, the input of the layer; besides, the routing that leaves it: T * E scores and 2 * T * K

A part that is computed again costs its forward once more, and "dispatch" one more exchange of rows. The bits do not
change as long as torch's kernels give the same ones twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from coterie_parallel import Dispatcher, DispatchOptions, ParallelConfig, dispatcher_class, known_dispatchers
from coterie_parallel.dispatch import guarantees_of
from coterie_parallel.once import differentiated_once
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

__all__ = ["PARTS", "SentAgain", "again", "combination_problems", "name_problems", "order_problems"]

PARTS = ("block", "attention", "experts", "dispatch")
"""A whole layer; the core of attention; the routed and the shared experts; the rows that experts receive."""


def name_problems(names: Sequence[str]) -> list[str]:
    """Return what is wrong with ``train.recompute`` itself."""
    found = []
    for name in dict.fromkeys(names):
        if name not in PARTS:
            found.append(f'recompute ("{name}") must be a list of any of: {", ".join(PARTS)}; [] for none')
        if names.count(name) > 1:
            found.append(f'recompute names "{name}" {names.count(name)} times; once is enough')
    others = [name for name in dict.fromkeys(names) if name in PARTS[1:]]
    if "block" in names and others:
        found.append(f'recompute ("block") holds all other parts, so it stands alone; leave out {", ".join(others)}')
    return found


def combination_problems(names: Sequence[str], parallel: ParallelConfig) -> list[str]:
    """Return what in ``parallel`` does not go with ``train.recompute``."""
    found = []
    if "dispatch" in names and parallel.saved_rows == "fetch":
        found.append(
            'recompute ("dispatch") and parallel.saved_rows ("fetch") both send rows again; leave one of them out'
        )
    if "dispatch" in names and parallel.saved_rows == "lease":
        found.append(
            'recompute ("dispatch") does not go with parallel.saved_rows ("lease"), which keeps the buffer of the rows '
            'for every layer; set saved_rows = "copy"'
        )
    sent_twice = [name for name in ("block", "dispatch") if name in names]
    if sent_twice and parallel.overflow == "drop":
        found.append(
            f'recompute ("{sent_twice[0]}") does not go with parallel.overflow ("drop"): rows that are sent twice '
            'would be dropped, and counted, by two decisions; set overflow to "grow" or "exact"'
        )
    return found + order_problems(names, parallel.dispatcher, parallel.dispatch_options())


def order_problems(names: Sequence[str], dispatcher: str, options: DispatchOptions) -> list[str]:
    """Return why a dispatcher can not send rows a second time: they would not be in the order of what was kept."""
    sent_twice = [name for name in ("block", "dispatch") if name in names]
    if not sent_twice or dispatcher not in known_dispatchers():
        return []
    if guarantees_of(dispatcher_class(dispatcher), options).row_order == "contract":
        return []
    ordered = "set parallel.deep_ep.deterministic = true" if dispatcher == "deep_ep" else "use another dispatcher"
    return [
        f'recompute ("{sent_twice[0]}") sends rows a second time, and dispatcher "{dispatcher}" brings them in another '
        f'order then; {ordered}, or recompute "attention" and "experts" only'
    ]


def again(function: Callable[..., Any], *args: Any, preserve_rng: bool = False) -> Any:
    """Call ``function`` so that its backward calls it a second time in place of keeping what is inside.

    Args:
        function: gives the same for the same arguments; the gradient of all that it uses is right.
        args: kept until the backward.
        preserve_rng: whether the second call draws the random numbers of the first.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng)


class SentAgain:
    """Rows that the experts' backward gets by a second dispatch; nothing of R rows is kept until then.

    Let the experts run as ``after(experts(before(rows_RD)))`` inside of `keeping`. All ranks send together, in the
    backward of `after`, whatever a rank has saved; the rows are forgotten in the backward of `before`.

    Args:
        dispatcher: that sent them.
        x_TD: tokens, ``ids_TK`` and ``weights_TK``: what it sent.
        rows_RD: what came.
    """

    def __init__(
        self, dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, rows_RD: Tensor
    ) -> None:
        self._dispatcher = dispatcher
        self._sent = x_TD.detach(), ids_TK, weights_TK.detach()
        self._version = x_TD._version
        self._place = rows_RD.data_ptr(), rows_RD.nbytes, rows_RD.dtype
        self._rows_RD: Tensor | None = None

    def keeping(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which the experts run, where autograd keeps no view of the rows."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def before(self, rows_RD: Tensor) -> Tensor:
        """Return the rows for the experts."""
        found: Tensor = _BeforeBackward.apply(rows_RD, self._forget)
        return found

    def after(self, rows_RD: Tensor) -> Tensor:
        """Return what the experts made of them."""
        found: Tensor = _BeforeBackward.apply(rows_RD, self._send)
        return found

    def _send(self) -> None:
        x_TD = self._sent[0]
        if x_TD._version != self._version:
            raise RuntimeError('the dispatched tokens were changed in place, and recompute "dispatch" sends them again')
        with torch.no_grad():
            self._rows_RD = self._dispatcher.dispatch(*self._sent).rows_RD

    def _forget(self) -> None:
        self._rows_RD = None

    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        start, num_bytes, dtype = self._place
        offset = saved.data_ptr() - start
        if not 0 <= offset < num_bytes:
            return saved
        if saved.dtype != dtype:
            return saved.clone()
        shape, strides, first = saved.shape, saved.stride(), offset // saved.element_size()

        def sent() -> Tensor:
            assert self._rows_RD is not None, "the backward of what follows the experts comes first"
            return self._rows_RD.as_strided(shape, strides, self._rows_RD.storage_offset() + first)

        return sent


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


class _BeforeBackward(Function):
    """Returns rows as they are; its backward calls something before it passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return rows_RD.view_as(rows_RD)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None
