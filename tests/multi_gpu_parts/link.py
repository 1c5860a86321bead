"""What the link between GPUs allows, and where the time of a combine goes: copies, pulls, and pushes, one by one.

Each figure stands beside what was expected before it was measured. Three accounts of a combine that reaches less of the
link than a dispatch are told apart here:

    protocol    a pull in both directions shares the link with the requests of the other one: then both ranks that pull
                at a time are slower than one, whatever the kernel, and pushes are not
    scheduling  a kernel with other pieces, loads, or order of rows or tokens is faster
    copy        get is as fast as put, and the rest is the copy of the experts' outputs to where peers read them
"""

from collections.abc import Callable
from functools import partial

import torch
from coterie_parallel.comparison import DispatchSizes, routed_ids
from coterie_parallel.dispatch.rowwise.backends import takes_triton
from coterie_parallel.dispatch.rowwise.peers import PeerTensor, make_peers
from torch import Tensor

from multi_gpu_parts.bench import Bench, Spans
from multi_gpu_parts.link_rows import GetTry, Rows

__all__ = ["run"]

_SIZES = (
    DispatchSizes(num_tokens=8192, width=4096, top_k=8, num_experts=128),
    DispatchSizes(num_tokens=4096, width=7168, top_k=8, num_experts=256),
)
_TINY_SIZES = (DispatchSizes(num_tokens=4, width=64, top_k=2, num_experts=4),)

# What was expected: GB/s of a device copy, read plus written; of a copy to a peer; and the shares of the latter that
# kernels reach which push, which pull in both directions, and which pull in one, or mostly in one.
_DEVICE_GBPS = 4280
_LINK_GBPS = 391
_PUSHED, _PULLED, _PULLED_ONE_WAY = 0.91, 0.845, 0.92
_HAND_OVER_US = 12.0

_TRIES = (
    *(GetTry(kib=1, warps=warps) for warps in (1, 2)),
    *(GetTry(kib=2, warps=warps) for warps in (1, 2)),
    *(GetTry(kib=4, warps=warps) for warps in (1, 2, 4, 8)),
    *(GetTry(kib=8, warps=warps) for warps in (2, 4, 8)),  # one warp spills
    GetTry(cache=".cg"),  # and .cv becomes the same instruction as none
    GetTry(evict="evict_first"),
    GetTry(evict="evict_last"),
    GetTry(remote_first=True),
    GetTry(shifted=True),
    GetTry(remote_first=True, shifted=True),
    GetTry(kib=4, warps=8, remote_first=True, shifted=True),
)
_UNALLOCATED = (GetTry(unallocated=True), GetTry(kib=4, unallocated=True))
# Lets the host queue all launches of a call before the devices begin with it.
_AHEAD_CYCLES = 4_000_000


def run(bench: Bench) -> None:
    """Check and time everything; what could end the process of a GPU comes last."""
    bench.say("expected: get is as fast as put; a combine is slower than a dispatch by the copy of the outputs")
    copies = _Copies(bench)
    link_gbps = copies.engine()
    try:
        takes_triton("triton", bench.device)
    except ValueError as reason:
        bench.row(name="kernels", skipped=str(reason))
        copies.close()
        return
    meter = _Meter(bench, link_gbps)
    for number, sizes in enumerate(_TINY_SIZES if bench.tiny else _SIZES):
        for routing in ("random",) if bench.tiny else ("random", "skewed"):
            rows = Rows(bench, sizes, routed_ids(routing, sizes, source=bench.rank))
            name, pulled = ("random", _PULLED) if routing == "random" else ("Zipf", _PULLED_ONE_WAY)
            _whole(meter, rows, f"{name}, T {sizes.num_tokens} D {sizes.width}", pulled)
            if number == 0 and routing == "random":
                _tries(meter, rows)
            rows.close()
            del rows
            bench.free()
        if number == 0:
            _shares(meter, sizes)
    copies.kernels(meter)
    copies.close()


class _Meter:
    """Times calls and shows them beside what was expected."""

    def __init__(self, bench: Bench, link_gbps: float) -> None:
        self.bench, self.link_gbps = bench, link_gbps
        self.repeats, self.warmups = (1, 0) if bench.tiny else (10, 2)

    def us(self, call: Callable[[], object]) -> float:
        """Return the median time of a call on the slowest rank."""
        spans = Spans(self.bench)
        for number in range(self.repeats + self.warmups):
            if self.bench.is_gpu:
                torch.cuda._sleep(_AHEAD_CYCLES)
            with (spans if number >= self.warmups else Spans(self.bench)).span("call"):
                call()
        return spans.ms()["call"] * 1e3

    def show(
        self, name: str, call: Callable[[], object], *, num_bytes: int, expected_us: float, one_way: bool = False
    ) -> float:
        """Time a call and return its GB/s.

        ``num_bytes`` are those through the link, one way, and ``one_way`` lets only rank 0 call.
        """
        us = self.us(call if not one_way or self.bench.rank == 0 else lambda: None)
        gbps = num_bytes / us / 1e3
        share = gbps / self.link_gbps
        # What was expected is of the full sizes on a GPU.
        expected = {"expected_us": expected_us} if self.bench.is_gpu and not self.bench.tiny else {}
        self.bench.row(name=name, **expected, us=us, gbps=gbps, share_of_link=share)
        return gbps


class _Copies:
    """Plain copies of one block between this rank and the next: of the copy engines, and of kernels."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.num_bytes = 1 << (15 if bench.tiny else 28)
        self.peer = (bench.rank + 1) % bench.world
        self.peers = make_peers(bench.axis, bench.device, bench.settings.timeout_s)
        self.source: PeerTensor = self.peers.allocate("source", (self.num_bytes // 256, 64), torch.int32)
        self.target: PeerTensor = self.peers.allocate("target", (self.num_bytes // 256, 64), torch.int32)
        self.source.local.copy_(self._pattern(bench.rank))
        bench.barrier()

    def engine(self) -> float:
        """Show the rates of the copy engines and return the best one in both directions at a time, in GB/s."""
        assert self.source.views is not None
        assert self.target.views is not None
        there, target = self.source.views[self.peer], self.target.views[self.peer]
        ways = {"to": lambda: target.copy_(self.source.local), "from": lambda: self.target.local.copy_(there)}
        meter = _Meter(self.bench, _LINK_GBPS)
        both = []
        for way, expected_gbps in (("to", 391), ("from", 373)):
            name = f"copy engine, {way} a peer"
            self._check(name, ways[way], pushes=way == "to")
            expected_us = self.num_bytes / expected_gbps / 1e3
            meter.show(f"{name}, one way", ways[way], num_bytes=self.num_bytes, expected_us=expected_us, one_way=True)
            gbps = meter.show(f"{name}, both ways", ways[way], num_bytes=self.num_bytes, expected_us=expected_us)
            both.append(gbps)
        return max(both)

    def kernels(self, meter: _Meter) -> None:
        """Show the rates of kernels; those with descriptors of a peer's memory come last."""
        for kib, warps in ((2, 4), (8, 4), (16, 2)):
            call = partial(self._words, block=kib * 128, warps=warps)
            self._ways(meter, f"kernel of words, {kib} KiB, {warps} warps", call)
        self._ways(meter, "kernel of descriptors, 16 KiB", self._boxes)

    def close(self) -> None:
        """Let go of the memory; all ranks together."""
        self.bench.barrier()
        self.peers.close()

    def _ways(self, meter: _Meter, name: str, call: Callable[[bool], None]) -> None:
        for pushes, one_way_share, share in ((False, _PULLED_ONE_WAY, _PULLED), (True, _PUSHED, _PUSHED)):
            way = f"{name}, {'push' if pushes else 'pull'}"
            copy = partial(call, pushes)
            if (
                self.bench.attempt(way, lambda way=way, copy=copy, pushes=pushes: self._check(way, copy, pushes))
                is None
            ):
                continue
            for one_way in (True, False):
                expected_gbps = _LINK_GBPS * (one_way_share if one_way else share)
                meter.show(
                    f"{way}, {'one way' if one_way else 'both ways'}",
                    copy,
                    num_bytes=self.num_bytes,
                    expected_us=self.num_bytes / expected_gbps / 1e3,
                    one_way=one_way,
                )

    def _words(self, pushes: bool, *, block: int, warps: int) -> None:
        from multi_gpu_parts import link_kernels

        own, peer = self.bench.rank, self.peer
        source, target = (own, peer) if pushes else (peer, own)
        num_words = self.num_bytes // 8
        link_kernels.copy_words[(-(-num_words // block),)](
            self.source.addresses_S,
            source,
            self.target.addresses_S,
            target,
            num_words,
            BLOCK=block,
            num_warps=warps,
        )

    def _boxes(self, pushes: bool) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from multi_gpu_parts import link_kernels

        assert self.source.views is not None
        assert self.target.views is not None
        source = self.source.local if pushes else self.source.views[self.peer]
        target = self.target.views[self.peer] if pushes else self.target.local
        programs = 8 if self.bench.tiny else 264
        link_kernels.copy_boxes[(programs,)](
            TensorDescriptor.from_tensor(source, [64, 64]),
            TensorDescriptor.from_tensor(target, [64, 64]),
            source.shape[0] // 64,
            ROWS=64,
            PROGRAMS=programs,
            STAGES=4,
            num_warps=4,
        )

    def _check(self, name: str, copy: Callable[[], object], pushes: bool) -> bool:
        """Report a fault if the copy is wrong; returns True."""
        self.target.local.fill_(-1)
        self.bench.barrier()
        copy()
        self.bench.barrier()
        came = self.bench.rank + (-1 if pushes else 1)
        if not torch.equal(self.target.local, self._pattern(came % self.bench.world)):
            self.bench.fault(f"{name}: what came is not what was there")
        self.bench.barrier()
        return True

    def _pattern(self, rank: int) -> Tensor:
        generator = torch.Generator(self.bench.device).manual_seed(rank)
        shape = self.num_bytes // 256, 64
        return torch.randint(0, 2**31 - 1, shape, generator=generator, device=self.bench.device, dtype=torch.int32)


def _whole(meter: _Meter, rows: Rows, where: str, pulled: float) -> None:
    """Show the parts of a combine, and whole ones that pull and that push.

    ``pulled`` is the share of the link that get was expected to reach. With Zipf's law the first rank owns most of the
    rows, so that nearly all go one way.
    """
    base = GetTry()
    device_us = 1e-3 * rows.row_bytes / _DEVICE_GBPS
    copy_us = 2 * rows.rows_max * device_us
    get_us = rows.busiest_bytes / (_LINK_GBPS * pulled) / 1e3
    push_us = rows.busiest_bytes / (_LINK_GBPS * _PUSHED) / 1e3
    sum_us = 1.05 * rows.num_tokens * (rows.num_choices + 1) * device_us
    # The sums of all groups but the last go on beside the pushes; each group has a hand-over and two launches.
    grouped_us = {groups: push_us + 1.2 * sum_us / groups + _HAND_OVER_US + 4 * groups for groups in (4, 8)}
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "combine by pull": (partial(rows.pull_combine, base, copied=True), copy_us + _HAND_OVER_US + get_us),
        "combine by pull, nothing copied": (partial(rows.pull_combine, base, copied=False), _HAND_OVER_US + get_us),
    }
    for order in ("experts", "tokens"):
        combine = partial(rows.push_combine, base, order)
        calls[f"combine by push, order of {order}"] = combine, push_us + _HAND_OVER_US + sum_us
    for groups, expected_us in grouped_us.items():
        calls[f"combine by push, {groups} groups"] = partial(rows.grouped_combine, base, groups), expected_us
    for number, (name, (call, expected_us)) in enumerate(calls.items()):
        # The first one lays the outputs out again.
        rows.spoil(also_offered=number == 0)
        call()
        rows.check(f"{name}, {where}")
        meter.show(f"{name}, {where}", call, num_bytes=rows.busiest_bytes, expected_us=expected_us)
    parts: dict[str, tuple[Callable[[], object], float]] = {
        "copy of the outputs": (rows.copy, copy_us),
        "hand-over": (rows.hand_over, _HAND_OVER_US),
        "get": (partial(rows.get, base), get_us),
        "get of the dispatcher": (rows.dispatcher_get, get_us),
        "push": (partial(rows.push, "tokens"), push_us),
        "sums after a push": (partial(rows.add_received, base), sum_us),
    }
    for name, (call, expected_us) in parts.items():
        crosses = name.split()[0] in ("get", "push")
        meter.show(f"part: {name}, {where}", call, num_bytes=rows.busiest_bytes * crosses, expected_us=expected_us)


def _shares(meter: _Meter, sizes: DispatchSizes) -> None:
    """Show get where no row, and where every row is of a peer; the latter also on one rank alone."""
    bench = meter.bench
    num_local = sizes.num_experts // bench.world
    generator = torch.Generator().manual_seed(bench.rank)
    choices_TK = torch.rand(sizes.num_tokens, num_local, generator=generator).argsort(1)[:, : sizes.top_k]
    for share in (0, 1):
        owner = (bench.rank + share) % bench.world
        rows = Rows(bench, sizes, choices_TK + owner * num_local)
        get = partial(rows.get, GetTry())
        for one_way in (False, True) if share else (False,):
            name = f"get, remote share {share}, {'one way' if one_way else 'both ways'}"
            rows.spoil()
            if not one_way or bench.rank == 0:
                get()
            rows.check(name, to_all=not one_way)
            local_us = 1e-3 * rows.num_tokens * (rows.num_choices + 1) * rows.row_bytes / _DEVICE_GBPS
            link_us = rows.busiest_bytes / (_LINK_GBPS * (_PULLED_ONE_WAY if one_way else _PULLED)) / 1e3
            expected_us = link_us if share else 1.03 * local_us
            meter.show(name, get, num_bytes=rows.busiest_bytes, expected_us=expected_us, one_way=one_way)
        rows.close()
        del rows, get
        bench.free()


def _tries(meter: _Meter, rows: Rows) -> None:
    """Show other ways to get; none was expected to gain more than a few percent over that of the dispatcher."""
    bench = meter.bench
    tries = [*_TRIES, *(_UNALLOCATED if bench.is_gpu else ())]
    for number, how in enumerate(tries):
        # What one rank has compiled the others find.
        if number % bench.world == bench.rank:
            rows.get(how)
    bench.barrier()
    expected_us = rows.busiest_bytes / (_LINK_GBPS * _PULLED) / 1e3
    for how in tries:
        name = f"get: {how}"
        rows.spoil()
        rows.get(how)
        rows.check(name)
        meter.show(name, partial(rows.get, how), num_bytes=rows.busiest_bytes, expected_us=expected_us)
