"""Sum gradients over the ranks that replicate a parameter; each rank keeps one shard of every bucket."""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from coterie_parallel.axis import Axis
from coterie_parallel.background import Background, Job
from coterie_parallel.collectives import (
    all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from coterie_parallel.gradients.agreement import (
    check_same_parameters,
    check_same_settings,
    refuse_unknown_placements,
)
from coterie_parallel.gradients.buffers import SendBuffers
from coterie_parallel.gradients.layout import BucketLayout, Slot, bucket_layouts
from coterie_parallel.mesh import Mesh
from coterie_parallel.placement import Placement, placed_parameters

__all__ = ["Bucket", "GradientReducer", "ReductionConfig", "accumulate_in_fp32"]


@dataclass(frozen=True, kw_only=True)
class ReductionConfig:
    """How gradients are summed over ranks.

    Attributes:
        bucket_bytes: a bucket takes parameters until its fp32 gradients have this size.
        send_dtype: what travels. With "bfloat16" each rank's gradient is rounded once, and summed in fp32 if the order
            is that of the ranks.
        sum_order: "ranks": an exchange of parts, and every element is summed in the order of the ranks, so the bits
            depend neither on the buckets nor on an algorithm of the back-end. "backend": its reduce-scatter, which
            needs no second buffer and adds in an order (and, with bfloat16, a precision) of its own.
        overlap: start the exchange of a bucket during the backward of the last micro-batch. Changes no bit.
        sharded: keep only this rank's shard of the summed fp32 gradients, and reduce in each micro-batch, from two
            buffers in turn. The gradient of one micro-batch then passes once through the dtype of the parameter. On
            GPUs, where ranks exchange tokens, every parameter needs a gradient in every backward.
    """

    bucket_bytes: int = 64 * 2**20
    send_dtype: Literal["float32", "bfloat16"] = "float32"
    sum_order: Literal["ranks", "backend"] = "ranks"
    overlap: bool = True
    sharded: bool = False

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = []
        if self.bucket_bytes < 1:
            found.append(f"bucket_bytes ({self.bucket_bytes}) must be at least 1, for example {64 * 2**20}")
        if self.send_dtype not in ("float32", "bfloat16"):
            found.append(f"send_dtype ({self.send_dtype!r}) must be float32 or bfloat16")
        if self.sum_order not in ("ranks", "backend"):
            found.append(f"sum_order ({self.sum_order!r}) must be ranks or backend")
        return found


class Bucket:
    """The gradients of some parameters on this rank.

    Attributes:
        layout: where everything lies.
        axis: the axis over which they are summed; None for nothing to sum.
        index: which shard this rank has.
        parameters: by name, local shapes.
        is_borrowed: nothing is summed, and ``grad`` is fp32: then that is the gradient, and the bucket has no memory.
        shard: fp32, (shard_numel), the summed gradients that this rank keeps; (0) if it is borrowed.
        pieces: views into ``shard``, 1-D, by name; empty for a parameter that lies in other shards only. If borrowed,
            views into ``grad``, and there between `fill` and `zero` only.
        flat: fp32, (numel), this rank's own gradients; parameters that are not fp32 have their part of it as
            ``main_grad``. None if it is borrowed or sharded: then gradients wait in ``grad`` until they are sent.
    """

    def __init__(self, layout: BucketLayout, parameters: Mapping[str, Tensor], mesh: Mesh, *, sharded: bool) -> None:
        self.layout = layout
        self.axis: Axis | None = mesh.axis(layout.axis) if layout.axis is not None and layout.num_shards > 1 else None
        self.index = 0 if self.axis is None else self.axis.index
        self.parameters = {slot.name: parameters[slot.name] for slot in layout.slots}
        self._slots = {slot.name: slot for slot in layout.slots}
        self.arrived: set[str] = set()
        self.is_sent = False
        self.is_sharded = sharded and self.axis is not None
        self.is_borrowed = (
            self.axis is None
            and layout.dtype == torch.float32
            and not any(hasattr(parameter, "main_grad") for parameter in self.parameters.values())
        )
        self.flat: Tensor | None = None
        self.pieces: dict[str, Tensor] = {}
        device = next(iter(self.parameters.values())).device
        if self.is_borrowed:
            self.shard = torch.zeros(0, dtype=torch.float32, device=device)
            return
        if self.is_sharded:
            self.shard = torch.zeros(layout.shard_numel, dtype=torch.float32, device=device)
            for parameter in self.parameters.values():
                if hasattr(parameter, "main_grad"):
                    del parameter.main_grad
        else:
            self.flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
            self.shard = self.part(self.flat)
            for name, view in self.views(self.flat).items():
                if layout.dtype != torch.float32 or hasattr(self.parameters[name], "main_grad"):
                    _collect_in(self.parameters[name], view)
        self.pieces = self.cut(self.shard)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of the size of the bucket, as a view."""
        return whole.narrow(0, self.index * self.layout.shard_numel, self.layout.shard_numel)

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the parameters' parts of a tensor of the size of the bucket, in their local shapes."""
        return {slot.name: self._view(whole, slot) for slot in self.layout.slots}

    def cut(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the parameters' pieces of a tensor of the size of a shard, 1-D."""
        pieces = {}
        for slot in self.layout.slots:
            first, last = self.layout.piece(slot, self.index)
            start = slot.start + first - self.index * self.layout.shard_numel if last > first else 0
            pieces[slot.name] = shard.narrow(0, start, last - first)
        return pieces

    def parts(self) -> list[Tensor]:
        """Return tensors in which every gradient that this rank keeps is once, and else only zeros."""
        return list(self.pieces.values()) if self.is_borrowed else [self.shard]

    def joined(self) -> Tensor:
        """Return the gradients that this rank keeps as they lie in its shard: fp32, (shard_numel)."""
        if not self.is_borrowed:
            return self.shard
        whole = self.shard.new_zeros(self.layout.numel)
        torch._foreach_copy_(list(self.cut(whole).values()), list(self.pieces.values()))
        return whole

    def is_complete(self) -> bool:
        """Return whether every parameter has its gradient of the present backward."""
        return len(self.arrived) == len(self.parameters)

    def move_to(self, flat: Tensor) -> None:
        """Move the gradients of a sharded bucket from ``grad`` to memory of its size; none is zero, as is padding."""
        flat.zero_()
        views = self.views(flat)
        present = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        if present:
            torch._foreach_copy_([views[name] for name in present], list(present.values()))
        for parameter in self.parameters.values():
            parameter.grad = None

    def borrow(self) -> None:
        """Take the gradients as pieces from where autograd has left them; none is zero, one with gaps is copied."""
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            self.pieces[name] = (
                self.shard.new_zeros(parameter.numel()) if grad is None else grad.detach().reshape(-1).contiguous()
            )

    def fill(self) -> Tensor:
        """Return the buffer with the gradients of all parameters in it: ``main_grad`` plus ``grad``; none is zero."""
        assert self.flat is not None
        for name, view in self.views(self.flat).items():
            parameter = self.parameters[name]
            if not hasattr(parameter, "main_grad"):
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            elif parameter.grad is not None:
                view.add_(parameter.grad)
        return self.flat

    def zero(self) -> None:
        """Forget all gradients, as far as nothing writes them over."""
        if self.is_sharded:
            self.shard.zero_()
        elif self.flat is not None and any(hasattr(one, "main_grad") for one in self.parameters.values()):
            self.flat.zero_()
        elif self.is_borrowed:
            self.pieces.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _view(self, whole: Tensor, slot: Slot) -> Tensor:
        return whole.narrow(0, slot.start, slot.numel).view(self.parameters[slot.name].shape)


class GradientReducer:
    """Sums gradients over the replication axis of their placement, bucket by bucket.

    Buckets and their order are decided at construction, alike on all ranks. Bucket ``i`` is sent only after bucket
    ``i - 1``, and what is not complete when the backward ends is sent then, so no rank can meet another in a different
    bucket, whichever gradients it has. No other collective may use these axes while a backward runs.

    A backward that raises in its middle ends this: how many buckets a rank has sent by then can depend on timing. So an
    exception that leaves `micro_batch` with gradients sharded, or with a bucket sent, is final: each later call raises.

    Its hooks hold it weakly, so it ends with the last reference to it.

    Args:
        named_parameters: local parameters by global name, in the order of their use in the forward, as
            ``Module.named_parameters`` gives them; where ranks differ in it, the first of the data axis counts.
        placements: a placement for every name.
        mesh: all its ranks must construct and use the reducer together.
        config: how to sum.
        kinds: parameters of different kinds never share a bucket.

    Attributes:
        parameters: those that need a gradient, by name, in the order of the buckets.
        buckets: in the order in which they are sent.

    Raises:
        ValueError: for settings with problems, or that differ between ranks; for a parameter without a valid placement,
            two of one name, one that is not contiguous, a placement without a parameter; for replicas whose names,
            shapes, dtypes or placements differ between ranks (their values are not compared here).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        config: ReductionConfig | None = None,
        kinds: Mapping[str, Hashable] | None = None,
    ) -> None:
        self.config = config if config is not None else ReductionConfig()
        check_same_settings(self.config, mesh)
        if self.config.problems():
            raise ValueError("\n".join(self.config.problems()))
        named = list(named_parameters)
        parameters = placed_parameters(named, placements, mesh.plan)
        refuse_unknown_placements((name for name, _ in named), placements)
        loose = [name for name, parameter in parameters.items() if not parameter.is_contiguous()]
        if loose:
            raise ValueError(f"parameters must be contiguous; these are not: {', '.join(sorted(loose))}")
        first = check_same_parameters(parameters, placements, {} if kinds is None else kinds, mesh)
        order = [name for name in first if name in parameters] + sorted(parameters.keys() - set(first))
        # Gradients come in the reverse order of the forward.
        self.parameters = {name: parameters[name] for name in order[::-1]}
        sizes = [(name, parameter.numel(), parameter.dtype) for name, parameter in self.parameters.items()]
        layouts = bucket_layouts(sizes, placements, mesh.plan, self.config.bucket_bytes, kinds)
        self.buckets = [Bucket(layout, parameters, mesh, sharded=self.config.sharded) for layout in layouts]
        self._background = Background(mesh.device)
        self._shared = [bucket for bucket in self.buckets if bucket.axis is not None]
        self._buffers = SendBuffers([one.layout for one in self._shared if one.is_sharded], mesh.device)
        # A GPU that waits for a buffer waits for its peers, which must not need its tokens before they send.
        self._needs_all = self.config.sharded and mesh.device.type == "cuda" and mesh.axis("expert").size > 1
        self._next = 0
        self._is_open = self._is_last = self._is_begun = self._is_used = self._has_failed = False
        # A node lives only as long as somebody holds it, and its hooks with it.
        self._nodes = [
            self._watch(number, name, parameter)
            for number, bucket in enumerate(self._shared)
            for name, parameter in bucket.parameters.items()
        ]

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Say which micro-batch the one backward inside belongs to; all ranks must do so alike.

        Optional, unless gradients are sharded: without it, all buckets are sent by `reduce`. After an exception that
        leaves it, `zero` and the next step may follow only if gradients are whole and no bucket was sent.
        """
        self._refuse_failed()
        self._refuse_used()
        self._is_open, self._is_last = True, is_last
        num_sent_before = self._next
        try:
            try:
                yield
            finally:
                self._is_open = False
            if self.config.sharded:
                self._refuse_missing()
                self._send_rest()
                self._forget_what_was_sent()
            if self.config.sharded or (is_last and self.config.overlap):
                self._is_begun = True
            self._background.finish_ready()
        except BaseException:
            self._has_failed = self.config.sharded or self._next > num_sent_before
            if self._has_failed:
                # The next optimizer of these parameters must not find what this one left.
                for parameter in self.parameters.values():
                    parameter.grad = None
            raise

    def reduce(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the summed gradients by name: fp32, 1-D, views into the buckets.

        Views into ``grad`` where a parameter is fp32 and nobody else has it.

        The gradient of a parameter is its ``grad`` plus its ``main_grad``, where it has them; none counts as zero.
        Gradients are good for one reduction, as sums are written over a part of them: `zero` comes before the next.
        """
        self._refuse_failed()
        self._refuse_used()
        self._is_used = True
        if not (self.config.sharded and self._is_begun):
            self._send_rest()
        for bucket in self.buckets:
            if bucket.is_borrowed:
                bucket.borrow()
            elif bucket.axis is None:
                bucket.fill()
        self._background.finish()
        self._is_begun = False
        self._forget_what_was_sent()
        return {name: piece for bucket in self.buckets for name, piece in bucket.pieces.items()}

    def gathered(self) -> dict[str, Tensor]:
        """Return the summed gradients whole, in local shapes, as copies; after `reduce`, for checks; all ranks call."""
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            parts = [bucket.joined().clone()] if bucket.axis is None else all_gather(bucket.shard, bucket.axis)
            found.update(bucket.views(torch.cat(parts)))
        return found

    def zero(self) -> None:
        """Forget all gradients.

        A reduction that a whole `micro_batch` has begun is completed first, as the peers take part in it; one that was
        broken off cannot be, and raises.
        """
        self._refuse_failed()
        if self._is_begun and not self.config.sharded:
            self._send_rest()
        self._background.finish()
        self._is_begun = False
        self._forget_what_was_sent()
        for bucket in self.buckets:
            bucket.zero()
        self._is_used = False

    def _refuse_failed(self) -> None:
        if self._has_failed:
            raise ValueError(
                "the backward of an earlier step failed in its middle, and ranks may have sent different numbers of "
                "buckets; start again from a checkpoint, with a new Mesh and a new Optimizer"
            )

    def _refuse_used(self) -> None:
        if self._is_used:
            raise ValueError("the gradients of the step before are still there; call zero_grad() after every step")

    def _refuse_missing(self) -> None:
        if not self._needs_all:
            return
        missing = [name for one in self._shared for name in one.parameters if name not in one.arrived]
        if missing:
            raise ValueError(
                "no gradient came for " + ", ".join(sorted(missing)) + "; with sharded gradients on GPUs, and ranks "
                "that exchange tokens, peers may wait for it while this rank waits for their tokens. Let these "
                "parameters have a gradient of zero (add 0 * parameter.sum() to the loss) or none on any rank "
                "(requires_grad_(False)), or leave gradients whole (sharded=False)"
            )

    def _watch(self, number: int, name: str, parameter: Tensor) -> Any:
        # Not register_post_accumulate_grad_hook: this hook also fires for a gradient that went to main_grad, and after
        # the hook of `accumulate_in_fp32`.
        node = get_gradient_edge(parameter).node
        itself = weakref.ref(self)

        def arrive(*_: Any) -> None:
            # The node, and so this hook, may live on: in a graph, or with another reducer of the same parameter.
            reducer = itself()
            if reducer is not None and not reducer._has_failed:
                reducer._arrive(reducer._shared[number], name)

        node.register_hook(arrive)
        return node

    def _arrive(self, bucket: Bucket, name: str) -> None:
        if bucket.is_sent:
            raise ValueError(
                f"a gradient of {name!r} came after its bucket was sent; run one backward in micro_batch(is_last=True) "
                "and none between it and the step"
            )
        if bucket.is_sharded:
            if not self._is_open:
                raise ValueError(
                    f"with sharded gradients every backward must run in micro_batch(), and that of {name!r} did not; "
                    "or it did, but in that of another optimizer: then drop the one that is no longer used (del "
                    "optimizer, and whatever else refers to it)"
                )
        elif not (self._is_open and self._is_last and self.config.overlap):
            return
        bucket.arrived.add(name)
        while self._next < len(self._shared) and self._shared[self._next].is_complete():
            if self._shared[self._next].layout.axis == "embedding":
                # The other end of the pipeline is still in its backward, and waits for what this rank sends later.
                return
            if bucket.is_sharded and self._buffers.stops_host(self._next):
                # A peer may need this rank to go on before it can join: the next gradient or the end tries again.
                return
            self._send()

    def _send_rest(self) -> None:
        while self._next < len(self._shared):
            self._send()

    def _send(self) -> None:
        number, bucket = self._next, self._shared[self._next]
        self._next += 1
        if bucket.is_sharded:
            flat = self._buffers.borrow(number)
            bucket.move_to(flat)
            self._buffers.lend_to(number, self._background.start(_sum(self.config, bucket, flat)))
        else:
            self._background.start(_sum(self.config, bucket, bucket.fill()))
        bucket.is_sent = True
        self._background.finish_ready()

    def _forget_what_was_sent(self) -> None:
        self._next = 0
        for bucket in self._shared:
            bucket.is_sent = False
            bucket.arrived.clear()


# No method: a job under way would keep its reducer alive.
def _sum(config: ReductionConfig, bucket: Bucket, flat: Tensor) -> Job:
    assert bucket.axis is not None
    sent = flat.to(getattr(torch, config.send_dtype))
    if config.sum_order == "backend":
        received = sent.new_empty(bucket.layout.shard_numel)
        yield start_reduce_scatter(received, sent, bucket.axis)
    else:
        received = torch.empty_like(sent)
        yield start_all_to_all(received, sent, bucket.axis)
    first, *others = torch.split(received, bucket.layout.shard_numel)
    total = first.float()
    for part in others:
        total.add_(part)
    if bucket.is_sharded:
        bucket.shard.add_(total)
    else:
        bucket.shard.copy_(total)


def accumulate_in_fp32(parameters: Iterable[Tensor]) -> None:
    """Give each parameter that is not fp32 an fp32 ``main_grad`` that collects its gradients over micro-batches.

    Each backward adds to ``main_grad`` and leaves ``grad`` None, so that small gradients are not rounded away by the
    sum of earlier ones. For loops without a `GradientReducer`, which does this by itself, with ``main_grad`` in its
    buckets. A parameter that has a ``main_grad`` keeps it.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype != torch.float32 and not hasattr(parameter, "main_grad"):
            _collect_in(parameter, torch.zeros_like(parameter, dtype=torch.float32))


def _collect_in(parameter: Tensor, main_grad: Tensor) -> None:
    if not hasattr(parameter, "main_grad"):
        parameter.register_post_accumulate_grad_hook(_fold)  # type: ignore[no-untyped-call]
    parameter.main_grad = main_grad  # type: ignore[attr-defined]


def _fold(parameter: Tensor) -> None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    # No main_grad: gradients are sharded. No grad: the backward has added to main_grad itself.
    if main_grad is not None and parameter.grad is not None:
        main_grad.add_(parameter.grad)
        parameter.grad = None
