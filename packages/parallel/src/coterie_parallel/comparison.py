"""Compare dispatchers on equal tokens: what they move, what they wait for, how long they take, whether they agree."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import all_gather_objects, barrier
from coterie_parallel.dispatch import Dispatcher, DispatchOptions, dispatcher_class, make_dispatcher

__all__ = [
    "ROUTINGS",
    "Comparison",
    "DispatchSizes",
    "compare_dispatchers",
    "comparison_problems",
    "comparison_table",
    "routed_ids",
]

ROUTINGS = ("balanced", "random", "skewed")
"""Every expert equally often; uniformly at random; Zipf, expert i with weight 1 / (i + 1)."""


@dataclass(frozen=True, kw_only=True)
class DispatchSizes:
    """The sizes of a comparison: T tokens of width D on each rank, E experts in all, K choices.

    With ``shared_hidden`` above 0 every token also goes through a shared expert of two matrices of that width, and each
    dispatcher runs twice: with the shared expert last, and with it between sending the rows and waiting for them.
    """

    num_tokens: int = 1024
    width: int = 256
    num_experts: int = 16
    top_k: int = 4
    shared_hidden: int = 0

    def problems(self) -> list[str]:
        """Return every fault."""
        least = {"shared_hidden": 0}
        found = [
            f"{name} ({value}) must be at least {least.get(name, 1)}"
            for name, value in vars(self).items()
            if value < least.get(name, 1)
        ]
        if self.top_k > self.num_experts >= 1:
            found.append(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})")
        return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One dispatcher on one routing, forward and backward.

    Attributes:
        dispatcher: name; with "+ overlap" where the shared expert runs between sending and waiting.
        routing: one of `ROUTINGS`.
        time_ms: median over the repeats of dispatch, combine and their backward passes, of the slowest rank.
        sent_bytes: of rows and weights that must go to other ranks, there and back in both passes, whatever the
            back-end; mean of the ranks.
        written_bytes: what torch operations wrote, collectives included; mean of the ranks. Kernels that are no
            operations of torch are not seen.
        passes: written bytes in units of the bytes of the rows that arrive.
        host_reads: times that the host read a tensor, on the worst rank: each is a synchronisation on a GPU. None of a
            back-end that reads tensors on a CPU only, as that is free, where this is one.
        agrees: outputs and gradients equal those of the first dispatcher to the bit, on all ranks.
        largest_difference: of any of them from those of the first dispatcher.
    """

    dispatcher: str
    routing: str
    time_ms: float
    sent_bytes: float
    written_bytes: float
    passes: float
    host_reads: int | None
    agrees: bool
    largest_difference: float


def routed_ids(routing: str, sizes: DispatchSizes, *, source: int) -> Tensor:
    """Return ids_TK of one rank, int64, K different experts for each token.

    Raises:
        ValueError: for a routing that is not one of `ROUTINGS`.
    """
    num_pairs = sizes.num_tokens * sizes.top_k
    if routing == "balanced":
        first = source * num_pairs
        return (torch.arange(first, first + num_pairs) % sizes.num_experts).view(sizes.num_tokens, sizes.top_k)
    generator = torch.Generator().manual_seed(source)
    noise_TE = torch.rand(sizes.num_tokens, sizes.num_experts, generator=generator)
    if routing == "random":
        return noise_TE.argsort(1)[:, : sizes.top_k]
    if routing == "skewed":
        # The Gumbel trick: the K largest of log weight + noise are K draws without replacement.
        weight_E = 1.0 / torch.arange(1, sizes.num_experts + 1)
        gumbel_TE = -(-noise_TE.clamp_min(1e-20).log()).log()
        return (weight_E.log() + gumbel_TE).argsort(1, descending=True)[:, : sizes.top_k]
    raise ValueError(f"routing ({routing!r}) must be one of {', '.join(ROUTINGS)}")


def comparison_problems(
    names: Sequence[str], routings: Sequence[str], sizes: DispatchSizes, num_ranks: int
) -> list[str]:
    """Return every fault of a comparison, before any process starts."""
    found = sizes.problems()
    if num_ranks < 1:
        found.append(f"the number of ranks ({num_ranks}) must be at least 1")
    elif sizes.num_experts % num_ranks:
        found.append(f"num_experts ({sizes.num_experts}) must be a multiple of the number of ranks ({num_ranks})")
    found += [f"routing ({name!r}) must be one of {', '.join(ROUTINGS)}" for name in routings if name not in ROUTINGS]
    for name in names:
        try:
            reason = dispatcher_class(name).supports(
                num_experts=sizes.num_experts, expert_degree=max(1, num_ranks), alignment=1
            )
        except (ValueError, ImportError) as error:
            reason = str(error)
        if reason is not None:
            found.append(reason)
    return found


def compare_dispatchers(
    axis: Axis,
    names: Sequence[str],
    routings: Sequence[str],
    sizes: DispatchSizes,
    repeats: int = 10,
    *,
    options: DispatchOptions | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Comparison]:
    """Measure each dispatcher on each routing, call by call in turn; all ranks of ``axis`` call together.

    The expert in the middle is the identity times the row weight, so that all that is measured is communication. The
    first passes of each are not timed.

    Raises:
        ValueError: with every fault of the sizes and every dispatcher that cannot run here.
    """
    problems = comparison_problems(names, routings, sizes, axis.size)
    if problems:
        raise ValueError("\n".join(problems))
    found = []
    ways = [(name, overlap) for name in names for overlap in ((False, True) if sizes.shared_hidden else (False,))]
    for routing in routings:
        passes = [
            _Pass(
                make_dispatcher(name, num_experts=sizes.num_experts, axis=axis, options=options),
                routing,
                sizes,
                axis,
                device,
                dtype,
                overlap=overlap,
            )
            for name, overlap in ways
        ]
        results = [one.first_run() for one in passes]
        counts = [one.count() for one in passes]
        times_ms: list[list[float]] = [[] for _ in ways]
        for _ in range(repeats):
            for one, taken_ms in zip(passes, times_ms, strict=True):
                taken_ms.append(one.time_ms())
        for one in passes:
            one.dispatcher.close()
        own = [
            {
                "time_ms": sorted(taken_ms)[len(taken_ms) // 2],
                "written_bytes": num_bytes,
                "host_reads": reads,
                "row_bytes": one.row_bytes,
                "sent_bytes": one.sent_bytes,
                "agrees": all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True)),
                "largest_difference": max((_difference(a, b) for a, b in zip(result, results[0], strict=True))),
            }
            for one, taken_ms, (num_bytes, reads), result in zip(passes, times_ms, counts, results, strict=True)
        ]
        of_ranks = all_gather_objects(own, axis)
        for number, (name, overlap) in enumerate(ways):
            ranks: list[dict[str, Any]] = [one[number] for one in of_ranks]
            found.append(
                Comparison(
                    dispatcher=f"{name} + overlap" if overlap else name,
                    routing=routing,
                    sent_bytes=sum(one["sent_bytes"] for one in ranks) / len(ranks),
                    written_bytes=sum(one["written_bytes"] for one in ranks) / len(ranks),
                    passes=sum(one["written_bytes"] for one in ranks) / max(1, sum(one["row_bytes"] for one in ranks)),
                    agrees=all(one["agrees"] for one in ranks),
                    host_reads=max(one["host_reads"] for one in ranks) if passes[number].counts_reads else None,
                    **{key: max(one[key] for one in ranks) for key in ("time_ms", "largest_difference")},
                )
            )
    return found


def comparison_table(rows: Sequence[Comparison]) -> str:
    """Return the comparison as a table for people."""
    heading = (
        f"{'routing':10} {'dispatcher':20} {'time':>10} {'to others':>10} {'written':>10} {'passes':>7} "
        f"{'host reads':>10}  agreement"
    )
    lines = [heading]
    for row in rows:
        agreement = "same bits" if row.agrees else f"differs by up to {row.largest_difference:.1e}"
        reads = "-" if row.host_reads is None else row.host_reads
        lines.append(
            f"{row.routing:10} {row.dispatcher:20} {row.time_ms:7.2f} ms {_size(row.sent_bytes):>10} "
            f"{_size(row.written_bytes):>10} {row.passes:7.1f} {reads:>10}  {agreement}"
        )
    return "\n".join(lines)


class _Pass:
    """Dispatch, combine and their backward passes over tokens that depend on the rank alone."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        routing: str,
        sizes: DispatchSizes,
        axis: Axis,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        overlap: bool = False,
    ) -> None:
        self.dispatcher, self.axis, self.device, self.overlap = dispatcher, axis, torch.device(device), overlap
        generator = torch.Generator().manual_seed(axis.index)
        tokens = (sizes.num_tokens, sizes.width)
        ids_TK = routed_ids(routing, sizes, source=axis.index)
        self.ids_TK = ids_TK.to(device)
        self.x_TD = torch.randn(tokens, generator=generator).to(device, dtype).requires_grad_()
        self.weights_TK = torch.rand(ids_TK.shape, generator=generator).to(device).requires_grad_()
        self.grad_y_TD = torch.randn(tokens, generator=generator).to(device, dtype)
        shapes = [(sizes.width, sizes.shared_hidden), (sizes.shared_hidden, sizes.width)] if sizes.shared_hidden else []
        self.shared = [(torch.randn(shape, generator=generator) * 0.01).to(device, dtype) for shape in shapes]
        for matrix in self.shared:
            matrix.requires_grad_()
        row_bytes = sizes.width * self.x_TD.element_size()
        num_local = sizes.num_experts // axis.size
        owners = [routed_ids(routing, sizes, source=source) // num_local for source in range(axis.size)]
        self.row_bytes = row_bytes * sum(int((owner_TK == axis.index).sum()) for owner_TK in owners)
        # Rows go there and back in each pass; weights go there, and their gradients come back.
        self.sent_bytes = int((owners[axis.index] != axis.index).sum()) * (4 * row_bytes + 2 * 4)

    @property
    def counts_reads(self) -> bool:
        """Whether what the host reads here is what it would read on a GPU."""
        return self.device.type != "cpu" or self.dispatcher.reads_host_on_gpu

    def first_run(self) -> list[Tensor]:
        """Return the results of a pass for which the buffers were large enough."""
        self.dispatcher.grow()  # says that an overflow is asked for
        while True:
            results = self.run()
            if self.dispatcher.grow() is None:
                return results

    def run(self) -> list[Tensor]:
        pending = self.dispatcher.dispatch_start(self.x_TD, self.ids_TK, self.weights_TK)
        shared_TD = self._run_shared() if self.overlap else None
        sent = self.dispatcher.dispatch_finish(pending)
        with self.dispatcher.saved_rows(sent.handle):
            rows_RD = sent.rows_RD * sent.row_weights_R[:, None].to(sent.rows_RD.dtype)
        y_TD = self.dispatcher.combine(rows_RD, sent.handle)
        if self.shared:
            y_TD = y_TD + (self._run_shared() if shared_TD is None else shared_TD)
        inputs = (self.x_TD, self.weights_TK, *self.shared)
        return [y_TD.detach(), *torch.autograd.grad((y_TD * self.grad_y_TD).sum(), inputs)]

    def _run_shared(self) -> Tensor:
        up, down = self.shared
        return (self.x_TD @ up).relu() @ down

    def count(self) -> tuple[int, int]:
        """Return the bytes that torch operations wrote, and how often the host read a tensor."""
        counter = _Counter()
        tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            counter.host_reads += 1
            return tolist(tensor)

        # On the CPU this method alone does not pass by the dispatch mode.
        Tensor.tolist = counted  # type: ignore[assignment,method-assign]
        try:
            with counter:
                self.run()
        finally:
            Tensor.tolist = tolist  # type: ignore[method-assign]
        return counter.num_bytes, counter.host_reads

    def time_ms(self) -> float:
        barrier(self.axis)
        self._settle()
        start_s = time.perf_counter()
        self.run()
        self._settle()
        return (time.perf_counter() - start_s) * 1e3

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations write, and reads by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.host_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _HOST_READS or str(func) in _HOST_READS:
            self.host_reads += 1
        if name in _COPIES:
            # The tensor that is copied from, not the one that holds the result.
            self.num_bytes += _size_of(args[_COPIES[name]])
        elif name.endswith("_") and not name.endswith("__"):
            self.num_bytes += _size_of(_tensors(args)[:1])
        elif not (func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))):
            self.num_bytes += _size_of(result)
        return result


# In-place operations that write only as much as they are given: the place of that argument.
_COPIES = {"index_copy_": 3, "index_put_": 2, "index_add_": 3, "scatter_": 3, "copy_": 1}
_HOST_READS = {"_local_scalar_dense", "nonzero", "bincount", "aten.repeat_interleave.Tensor"}


def _size_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _difference(one: Tensor, other: Tensor) -> float:
    if one.numel() == 0:
        return 0.0
    difference = float((one.double() - other.double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
