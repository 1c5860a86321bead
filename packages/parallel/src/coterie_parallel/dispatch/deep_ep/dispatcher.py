"""The dispatcher over DeepEP."""

import sys
from types import ModuleType

import torch
from torch import Tensor

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import all_gather_objects, all_reduce_max
from coterie_parallel.dispatch.base import Dispatched, Dispatcher
from coterie_parallel.dispatch.deep_ep.buffers import delivers_expanded, make_transport
from coterie_parallel.dispatch.deep_ep.limits import batch_problems, layout_problems
from coterie_parallel.dispatch.deep_ep.package import find_package, pick_surface
from coterie_parallel.dispatch.deep_ep.transport import Transport
from coterie_parallel.dispatch.deep_ep.trip import Trip, collect_finish, collect_start, send_finish, send_start
from coterie_parallel.dispatch.deep_ep_options import SURFACES, DeepEPOptions
from coterie_parallel.dispatch.eager import runs_eagerly
from coterie_parallel.dispatch.guarantees import Guarantees
from coterie_parallel.dispatch.options import DispatchOptions
from coterie_parallel.dispatch.route import check_handle, check_rows, takes_backward

__all__ = ["DeepEPDispatcher"]


class DeepEPDispatcher(Dispatcher):
    """Moves rows with DeepEP: EPBuffer of V2.5, ElasticBuffer of V2.0 and V2.1, or Buffer of V1.

    What is promised, and what is not (`guarantees` says it to programs):
        rows_RD: ordered by local expert. Inside an expert the rows come in any order, and in another one at every
            dispatch, unless ``deterministic``, with which V2.1 and V2.5 give the order of the contract (source, token).
            So without it nothing may send the rows a second time, as a recomputed forward pass does. Padding is zero
            with weight zero. Values arrive unchanged, with ``payload="fp8"`` rounded.
        row_weights_R and their gradient: unchanged.
        y_TD and the gradient of the tokens: DeepEP adds the rows of a token that lie on one rank, rounds to bf16, adds
            these sums over the ranks and rounds again. That is off the exact sum by at most 2^-7 of the sum of the
            rows' absolute values (twice the rounding of bf16), where the contract allows half of it. Over several nodes
            the sums of the ranks of a node are rounded too, before they travel: three times the rounding of bf16.

    ``overflow="grow"``, the default, reads nothing on the host: buffers have room for the worst case, so rows always
    fit. ``"exact"`` reads the counts and agrees on the batch size in every dispatch. Tokens must be bf16 on a GPU.

    The buffers are sized once, at the first dispatch, for ``max_tokens`` tokens of a rank. A larger batch is a
    ValueError with the same text on every rank: with "exact" in the dispatch itself, else in `grow` at the end of the
    step; until then the batch that does not fit gives NaN. A token must not choose an expert twice.

    The backward pass is one cached dispatch for `combine` and one combine for `dispatch`, which takes the gradient of
    the weights along.

    Args:
        num_experts: see `Dispatcher`.
        axis: see `Dispatcher`; it needs a process group also for one rank.
        alignment: see `Dispatcher`.
        options: see `DispatchOptions`, and `DeepEPOptions` for its ``deep_ep``; "drop" and the ways to save rows do not
            exist here.

    Raises:
        ValueError: if DeepEP can not be used here or not so, with the reason and what to do.
    """

    device_type = "cuda"
    """Where tokens must be."""

    def __init__(
        self, *, num_experts: int, axis: Axis, alignment: int = 1, options: DispatchOptions | None = None
    ) -> None:
        super().__init__(num_experts=num_experts, axis=axis, alignment=alignment, options=options)
        self.deep_ep = _settings(self.options)
        self._module = _package()
        self.surface = pick_surface(self._module, self.deep_ep.surface)
        problems = layout_problems(
            self.surface, num_experts=num_experts, expert_degree=axis.size, read_counts=self._reads_counts
        )
        if axis.group is None:
            problems.append(
                f'dispatcher "deep_ep" needs a process group, and the {axis.name!r} axis of one rank has none; use '
                'dispatcher "local"'
            )
        if problems:
            raise ValueError("\n".join(problems))
        self._transport: Transport | None = None
        self._sizes = (0, 0, 0)
        self._largest_batch = 0
        self._counts: dict[str, Tensor] = {}

    @classmethod
    def supports(cls, *, num_experts: int, expert_degree: int, alignment: int) -> str | None:
        """Refuse a machine without a DeepEP that works, and sizes that its newest surface can not serve."""
        found = find_package()
        if isinstance(found, str):
            return found
        if expert_degree < 1 or num_experts % expert_degree:
            return None
        surfaces = [pick_surface(found, "auto")]
        # Reading counts lifts a limit, and whether they are read is no question of layout.
        problems = layout_problems(surfaces[0], num_experts=num_experts, expert_degree=expert_degree, read_counts=True)
        return " ".join(problems) or None

    @classmethod
    def option_problems(cls, options: DispatchOptions, *, top_k: int | None = None) -> list[str]:
        """Refuse settings of buffers that DeepEP does not have, and of DeepEP what the installed one does not have."""
        found, defaults = options.problems(top_k), DispatchOptions()
        if options.overflow == "drop":
            found.append(
                'overflow ("drop") does not exist with dispatcher "deep_ep", whose rows always fit; leave it out'
            )
        if options.saved_rows != defaults.saved_rows:
            found.append(
                f'saved_rows ({options.saved_rows!r}) does nothing with dispatcher "deep_ep", which gives each layer '
                "rows of its own; leave it out"
            )
        if options.capacity_factor != defaults.capacity_factor:
            found.append(
                f'capacity_factor ({options.capacity_factor}) does nothing with dispatcher "deep_ep", whose buffers '
                "have room for the worst case; leave it out"
            )
        module, settings = find_package(), _settings(options)
        if not isinstance(module, str) and not settings.problems():
            found += [f"deep_ep.{problem}" for problem in _setting_problems(module, settings)]
        return found

    @classmethod
    def guarantees(cls, options: DispatchOptions) -> Guarantees:
        """Declare what DeepEP rounds and what it leaves open."""
        settings = _settings(options)
        return Guarantees(
            row_order="contract" if settings.deterministic else "any",
            # The largest value of a block becomes 448, where float8_e4m3fn has steps of 32: by 16 / 448 of it, and by
            # 2^-8 in bf16, a value is off at most. Together that is below 2^-4.
            row_error=2**-4 if settings.payload == "fp8" else 0.0,
            # Of a rank, of a node and of all: nothing tells here whether there are several nodes.
            sum_roundings=3,
            sizes="first",
        )

    @classmethod
    def token_problems(
        cls, options: DispatchOptions, *, width: int, num_choices: int, dtype: torch.dtype, device: str | None = None
    ) -> list[str]:
        """Refuse what DeepEP, or the class of it that ``options`` name, can not send."""
        module, settings = find_package(), _settings(options)
        surface: str = settings.surface
        if surface == "auto":
            surface = SURFACES[0] if isinstance(module, str) else pick_surface(module, surface)
        return batch_problems(
            surface,
            width=width,
            num_choices=num_choices,
            dtype=dtype,
            device=cls.device_type if device is None else device,
            needed_device=cls.device_type,
        )

    @runs_eagerly
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """See `Dispatcher.dispatch`; ids outside [-1, E) count as not routed, and `grow` raises for them."""
        return self.dispatch_finish(self.dispatch_start(x_TD, ids_TK, weights_TK))

    @runs_eagerly
    def dispatch_start(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Trip]:
        """See `Dispatcher.dispatch_start`."""
        self.check_arguments(x_TD, ids_TK, weights_TK, reads_ids=False)
        if self._transport is None:
            self._transport = self._make_transport(x_TD, ids_TK)
        fits = self._check_batch(x_TD, ids_TK)
        outside_TK = (ids_TK < -1) | (ids_TK >= self.num_experts)
        self._counts["ids_outside"] += outside_TK.sum()
        sent_ids_TK = ids_TK.masked_fill(outside_TK, -1).to(getattr(self._module, "topk_idx_t", torch.int64))
        trip = Trip(
            self._transport,
            sent_ids_TK.contiguous(),
            fits=fits,
            fp8=self.deep_ep.payload == "fp8",
            has_backward=takes_backward(x_TD, weights_TK),
        )
        return send_start(x_TD, weights_TK, trip), trip

    @runs_eagerly
    def dispatch_finish(self, pending: tuple[Tensor, Trip]) -> Dispatched:
        """See `Dispatcher.dispatch_finish`."""
        rows_RD, row_weights_R, offsets_e = send_finish(*pending)
        most = self._counts["rows_needed_max"]
        torch.maximum(most, offsets_e[-1], out=most)
        return Dispatched(rows_RD, row_weights_R, offsets_e, pending[1])

    @runs_eagerly
    def combine(self, rows_RD: Tensor, handle: Trip) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.combine_finish(self.combine_start(rows_RD, handle))

    @runs_eagerly
    def combine_start(self, rows_RD: Tensor, handle: Trip) -> tuple[Tensor, Trip]:
        """See `Dispatcher.combine_start`."""
        check_handle(isinstance(handle, Trip) and handle.transport is self._transport, handle)
        check_rows(rows_RD, num_rows=handle.num_rows, has_backward=handle.has_backward)
        if rows_RD.dtype != torch.bfloat16:
            raise ValueError(f"dtype of rows_RD ({rows_RD.dtype}) must be torch.bfloat16 with DeepEP; cast the rows")
        return collect_start(rows_RD, handle), handle

    @runs_eagerly
    def combine_finish(self, pending: tuple[Tensor, Trip]) -> Tensor:
        """See `Dispatcher.combine_finish`."""
        return collect_finish(*pending)

    def counters(self) -> dict[str, Tensor]:
        """See `Dispatcher.counters`; until `grow` the first two are of this rank alone."""
        return dict(self._counts)

    def grow(self) -> str | None:
        """Raise the same ValueError on all ranks for a batch that did not fit or ids outside; one read of the host."""
        if self._transport is None:
            return None
        batch = torch.full((), self._coded(self._largest_batch), dtype=torch.int64)
        outside = self._counts["ids_outside"]
        most = self._counts["rows_needed_max"]
        seen = all_reduce_max(torch.stack([batch.to(outside.device), outside, most]), self.axis)
        most.copy_(seen[2])
        coded_batch, num_outside, _ = seen.tolist()
        self._refuse_large(coded_batch)
        if num_outside:
            raise ValueError(f"ids_TK must lie in [-1, {self.num_experts}); {num_outside} ids of a rank did not")
        return None

    def close(self) -> None:
        """Free the buffers of DeepEP, all ranks together; while an exception is handled they are only forgotten.

        DeepEP frees a buffer after a barrier of all peers, and a peer that failed would never come: then the memory is
        left to the end of the process.
        """
        transport, self._transport = self._transport, None
        if transport is not None and sys.exc_info()[0] is None:
            transport.close()

    @property
    def _reads_counts(self) -> bool:
        return self.options.overflow == "exact"

    def _make_transport(self, x_TD: Tensor, ids_TK: Tensor) -> Transport:
        """Agree on the sizes with all ranks and make the buffers; what is wrong on one rank is raised on all."""
        (num_tokens, width), num_choices = x_TD.shape, ids_TK.shape[1]
        problems = batch_problems(
            self.surface,
            width=width,
            num_choices=num_choices,
            dtype=x_TD.dtype,
            device=x_TD.device.type,
            needed_device=self.device_type,
        )
        gathered = all_gather_objects(((num_tokens, width, num_choices), problems), self.axis)
        found = [
            f"rank {rank}: {text}" for rank, (_, texts) in zip(self.axis.ranks, gathered, strict=True) for text in texts
        ]
        shapes = {sizes[1:] for sizes, _ in gathered}
        if len(shapes) > 1:
            found.append(
                f"width and choices must be the same on all ranks of the {self.axis.name!r} axis, got {sorted(shapes)}"
            )
        if found:
            raise ValueError("\n".join(found))
        largest = max(sizes[0] for sizes, _ in gathered)
        self._sizes = (self.deep_ep.max_tokens or max(1, largest), width, num_choices)
        self._refuse_large(max(sizes[0] * self.axis.size + index for index, (sizes, _) in enumerate(gathered)))
        zero = torch.zeros((), dtype=torch.int64, device=x_TD.device)
        self._counts = {name: zero.clone() for name in ("rows_needed_max", "overflowed", "rows_dropped", "ids_outside")}
        return make_transport(
            self._module,
            self.surface,
            axis=self.axis,
            num_experts=self.num_experts,
            alignment=self.alignment,
            max_tokens=self._sizes[0],
            width=width,
            num_choices=num_choices,
            read_counts=self._reads_counts,
            timeout_s=self.axis.timeout_s,
            options=self.deep_ep,
        )

    def _check_batch(self, x_TD: Tensor, ids_TK: Tensor) -> bool:
        """Return whether this batch fits; raise for another width, number of choices or dtype than the first had."""
        max_tokens, *shape = self._sizes
        if [x_TD.shape[1], ids_TK.shape[1]] != shape or x_TD.dtype != torch.bfloat16:
            raise ValueError(
                f"the buffers of DeepEP were made for tokens of width {shape[0]} in torch.bfloat16 with {shape[1]} "
                f"choices, got width {x_TD.shape[1]} in {x_TD.dtype} with {ids_TK.shape[1]} choices"
            )
        num_tokens = x_TD.shape[0]
        self._largest_batch = max(self._largest_batch, num_tokens)
        if self._reads_counts:
            coded = torch.full((1,), self._coded(num_tokens), dtype=torch.int64, device=x_TD.device)
            self._refuse_large(int(all_reduce_max(coded, self.axis)))
        if num_tokens > max_tokens:
            self._counts["overflowed"].fill_(1)
        return num_tokens <= max_tokens

    def _coded(self, num_tokens: int) -> int:
        # One number, so that the largest names its rank too.
        return num_tokens * self.axis.size + self.axis.index

    def _refuse_large(self, coded: int) -> None:
        num_tokens, index = divmod(coded, self.axis.size)
        if num_tokens > self._sizes[0]:
            raise ValueError(
                f"a batch of {num_tokens} tokens on rank {self.axis.ranks[index]} is larger than the {self._sizes[0]} "
                f"for which the buffers of DeepEP were sized once; set deep_ep.max_tokens to {num_tokens} or more"
            )


def _package() -> ModuleType:
    found = find_package()
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _settings(options: DispatchOptions) -> DeepEPOptions:
    return DeepEPOptions() if options.deep_ep is None else options.deep_ep


def _setting_problems(module: ModuleType, options: DeepEPOptions) -> list[str]:
    """Return which settings the class of ``module`` that they name does not have."""
    try:
        surface = pick_surface(module, options.surface)
    except ValueError as error:
        return [str(error)]
    found = []
    if surface == "Buffer":
        if options.deterministic:
            found.append(
                "deterministic (True) does not exist with Buffer of DeepEP V1; leave it out, or use a DeepEP with "
                "ElasticBuffer"
            )
        if options.num_sms:
            found.append(f"num_sms ({options.num_sms}) is no argument of Buffer of DeepEP V1; leave it out")
    elif options.deterministic and not delivers_expanded(module, surface):
        found.append("deterministic (True) needs DeepEP 2.1 or newer; leave it out")
    return found
