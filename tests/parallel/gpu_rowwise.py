"""The row-wise kernels over 8 virtual ranks on one GPU: `python3 tests/parallel/gpu_rowwise.py`, with torch and triton.

Holds the Triton kernels to the loops of the contract and to the reference first: every buffer and every sum bit for
bit, overflow and guard rows, the same bits 20 times, no wait for the host, capture in a CUDA graph and replay with
other routing, rows beyond 2^31 elements. Then times them: addresses beside plain torch, put and get beside the copy
bandwidth, dispatch and combine together beside permute, copy and permute in torch over the same buffers. All faults of
the checks are shown before they raise; `--json FILE` writes the times.
"""

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "parallel" / "src")]

import torch  # noqa: E402
from coterie_parallel.dispatch.rowwise.peers.base import PeerTensor  # noqa: E402
from coterie_parallel.dispatch.rowwise.peers.virtual import virtual_peers  # noqa: E402
from coterie_parallel.dispatch.rowwise.placement import RowPlan, count_pairs, place_rows  # noqa: E402
from coterie_parallel.dispatch.rowwise.rows import clear_padding, get_rows, put_rows  # noqa: E402
from support.bounds import broken_bounds  # noqa: E402
from support.device_timing import about, copy_bandwidth_gbps, median_us, write_json  # noqa: E402
from torch import Tensor  # noqa: E402

from parallel.rowwise_cases import (  # noqa: E402
    ROUTINGS,
    Routing,
    allocate,
    assert_plans,
    assert_same_bits,
    capacity_of,
    exchange,
    expected,
    garbage_in_new_memory,
    plans,
    tokens_and_weights,
)

DEVICE = torch.device("cuda")
UNEVEN = (1000, 0, 777, 129, 1500, 64, 1, 333)
# Widths that are no powers of two, or allow no wide access; more choices than 8; buffers that are too small.
LARGER = [
    Routing(name="D 2048", tokens=UNEVEN, top_k=8, num_local=8, width=2048, alignment=128),
    Routing(name="D 2880, too small", tokens=UNEVEN, top_k=6, num_local=32, width=2880, alignment=16, capacity=0.6),
    Routing(name="D 7168", tokens=(257, 64, 0, 31, 5, 300, 8, 9), top_k=8, num_local=37, width=7168, kind="uneven"),
    Routing(name="D 33", tokens=UNEVEN, top_k=1, num_local=3, width=33, kind="all to the last rank", alignment=16),
    Routing(name="K 17", tokens=(65, 3, 0, 31), top_k=17, num_local=64, width=64, capacity=0.9),
]
SIZE, TOKENS, TOP_K, WIDTH, ALIGNMENT = 8, 4096, 8, 4096, 16


def check_table() -> None:
    for routing in ROUTINGS:
        ids, sent = routing.ids(), tokens_and_weights(routing, torch.float32, DEVICE)
        capacity = capacity_of(routing, ids)
        with garbage_in_new_memory():
            found = exchange(routing, [ids_TK.to(DEVICE) for ids_TK in ids], sent, capacity, "triton")
        assert_plans(found.plans, ids, num_local=routing.num_local, alignment=routing.alignment)
        assert_same_bits(found, expected(routing, ids, sent, capacity))
    print(f"{len(ROUTINGS)} routings give the bits of the loops", flush=True)


def check_larger() -> None:
    cases = [(routing, dtype) for routing in LARGER for dtype in (torch.bfloat16, torch.float32)]
    cases += [(LARGER[0], torch.float8_e4m3fn), (LARGER[4], torch.float16), (LARGER[4], torch.float64)]
    for routing, dtype in cases:
        ids = [ids_TK.to(DEVICE) for ids_TK in routing.ids()]
        sent = tokens_and_weights(routing, dtype, DEVICE)
        wanted_plans = plans(ids, num_local=routing.num_local, alignment=routing.alignment, backend="reference")
        capacity = int(routing.capacity * wanted_plans[0].need_S.max())
        with garbage_in_new_memory():
            found = exchange(routing, ids, sent, capacity, "triton")
        wanted = exchange(routing, ids, sent, capacity, "reference")
        for plan, wanted_plan in zip(found.plans, wanted_plans, strict=True):
            for name, value in vars(wanted_plan).items():
                assert torch.equal(getattr(plan, name), value), (routing.name, dtype, name)
        assert_same_bits(found, wanted)
    print(f"{len(cases)} larger cases give the bits of the reference", flush=True)


def check_graph_and_no_wait() -> None:
    routing = Routing(name="graph", tokens=UNEVEN, top_k=8, num_local=16, width=512, alignment=16)
    ids = [ids_TK.to(DEVICE) for ids_TK in routing.ids()]
    sent = tokens_and_weights(routing, torch.bfloat16, DEVICE)
    capacity = sum(UNEVEN) * routing.top_k + 16 * routing.num_local
    buffers = allocate(routing, capacity, torch.bfloat16, DEVICE)
    run = partial(exchange, routing, ids, sent, capacity, "triton", buffers)
    run()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        first = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print("no call waits for the host", flush=True)
    for _ in range(20):
        assert_same_bits(run(), first)
    print("20 runs give the same bits", flush=True)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed, kind in ((0, "uneven"), (1, "all to one"), (2, "none routed"), (3, "some not routed")):
        other = Routing(**{**vars(routing), "kind": kind})
        for static, fresh in zip(ids, other.ids(seed), strict=True):
            static.copy_(fresh)
        for static, fresh in zip(sent, tokens_and_weights(other, torch.bfloat16, DEVICE, seed), strict=True):
            static[0].copy_(fresh[0])
            static[1].copy_(fresh[1])
        graph.replay()
        assert_same_bits(captured, exchange(routing, ids, sent, capacity, "reference"))
    print("a captured graph takes other routing", flush=True)


def check_more_than_two_to_the_31() -> None:
    # An odd width of bf16 is copied in words of 2 bytes: more than 2^31 of them.
    tokens, width = 530_000, 4097
    x_TD = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16)
    row_TK = torch.arange(tokens, device=DEVICE).flip(0)[:, None].contiguous()
    end_e = torch.tensor([tokens + 1], device=DEVICE)
    plan = RowPlan(
        rank_TK=torch.zeros_like(row_TK, dtype=torch.int32),
        row_TK=row_TK,
        offsets_e=end_e.int(),
        total_e=end_e - 1,
        need_S=end_e,
    )
    (peer,) = virtual_peers(1, DEVICE)
    rows = peer.allocate("rows", (tokens + 1, width), torch.bfloat16)
    rows.local.fill_(torch.nan)
    put_rows(x_TD, None, plan, rows, None)
    clear_padding(rows.local, None, plan.offsets_e, plan.total_e)
    assert torch.equal(rows.local[:tokens], x_TD.flip(0))
    assert (rows.local[tokens] == 0).all()
    assert torch.equal(get_rows(rows, plan), x_TD)
    print("rows beyond 2^31 elements are in their place", flush=True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """8 virtual ranks with the routing of a router, their tokens and their buffers."""

    num_experts: int
    x: list[Tensor]
    weights: list[Tensor]
    ids: list[Tensor]
    plans: list[RowPlan]
    rows: list[PeerTensor]
    row_weights: list[PeerTensor]

    @property
    def num_local(self) -> int:
        return self.num_experts // SIZE

    @property
    def tokens(self) -> int:
        return self.x[0].shape[0]

    @property
    def width(self) -> int:
        return self.x[0].shape[1]

    @property
    def shape(self) -> str:
        return f"T {self.tokens} D {self.width} E {self.num_experts}"

    def place(self) -> list[RowPlan]:
        return plans(self.ids, num_local=self.num_local, alignment=ALIGNMENT)

    def put(self, placed: list[RowPlan]) -> None:
        for rank in range(SIZE):
            put_rows(self.x[rank], self.weights[rank], placed[rank], self.rows[rank], self.row_weights[rank])

    def clear(self, placed: list[RowPlan]) -> None:
        for plan, rows, row_weights in zip(placed, self.rows, self.row_weights, strict=True):
            clear_padding(rows.local, row_weights.local, plan.offsets_e, plan.total_e)

    def get(self, placed: list[RowPlan]) -> list[Tensor]:
        return [get_rows(rows, plan) for rows, plan in zip(self.rows, placed, strict=True)]

    def whole(self) -> list[Tensor]:
        placed = self.place()
        self.put(placed)
        self.clear(placed)
        return self.get(placed)


def make_setting(num_experts: int, tokens: int = TOKENS, width: int = WIDTH) -> Setting:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    ids = [random(tokens, num_experts).topk(TOP_K).indices for _ in range(SIZE)]
    placed = plans(ids, num_local=num_experts // SIZE, alignment=ALIGNMENT)
    capacity = int(placed[0].need_S.max())
    peers = virtual_peers(SIZE, DEVICE)
    return Setting(
        num_experts=num_experts,
        x=[random(tokens, width).bfloat16() for _ in range(SIZE)],
        weights=[random(tokens, TOP_K).sigmoid() for _ in range(SIZE)],
        ids=ids,
        plans=placed,
        rows=[peer.allocate("rows", (capacity, width), torch.bfloat16) for peer in peers],
        row_weights=[peer.allocate("row weights", (capacity,), torch.float32) for peer in peers],
    )


class InTorch:
    """Permute, copy, permute over the same buffers, and back; its index lists are made beforehand and not timed.

    The tokens are gathered by destination, each segment is copied to the buffer of the destination, and there the rows
    are gathered into the order of the experts, padding from a row of zeros. On the way back the last permute is a
    gather and a sum over k.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        order = [ids_TK.flatten().sort(stable=True).indices for ids_TK in setting.ids]
        owner = [plan.rank_TK.flatten()[pairs] for plan, pairs in zip(setting.plans, order, strict=True)]
        self.sent = [torch.bincount(ranks, minlength=SIZE).tolist() for ranks in owner]
        self.token_P = [pairs // TOP_K for pairs in order]
        self.slot_N = [pairs.argsort() for pairs in order]
        options = {"dtype": torch.bfloat16, "device": DEVICE}
        self.send = [torch.empty(setting.tokens * TOP_K, setting.width, **options) for _ in range(SIZE)]
        self.back = [torch.empty_like(send) for send in self.send]
        self.picked = torch.empty_like(self.send[0])
        self.arrived, self.row_P, self.source_R = [], [], []
        for rank in range(SIZE):
            row_P = torch.cat(
                [
                    plan.row_TK.flatten()[pairs][ranks == rank]
                    for plan, pairs, ranks in zip(setting.plans, order, owner, strict=True)
                ]
            )
            num_rows = int(setting.plans[rank].offsets_e[-1])
            source_R = torch.full((num_rows,), row_P.numel(), device=DEVICE)
            source_R[row_P] = torch.arange(row_P.numel(), device=DEVICE)
            self.row_P.append(row_P)
            self.source_R.append(source_R)
            self.arrived.append(torch.zeros(row_P.numel() + 1, setting.width, **options))

    def dispatch(self) -> None:
        for source in range(SIZE):
            torch.index_select(self.setting.x[source], 0, self.token_P[source], out=self.send[source])
        self._copy(self.send, self.arrived, to_owner=True)
        for rank in range(SIZE):
            rows_RD = self.setting.rows[rank].local[: self.source_R[rank].numel()]
            torch.index_select(self.arrived[rank], 0, self.source_R[rank], out=rows_RD)

    def combine(self) -> list[Tensor]:
        for rank in range(SIZE):
            arrived_PD = self.arrived[rank][:-1]
            torch.index_select(self.setting.rows[rank].local, 0, self.row_P[rank], out=arrived_PD)
        self._copy(self.back, self.arrived, to_owner=False)
        y = []
        for source in range(SIZE):
            torch.index_select(self.back[source], 0, self.slot_N[source], out=self.picked)
            y.append(self.picked.view(-1, TOP_K, self.setting.width).sum(1))
        return y

    def whole(self) -> list[Tensor]:
        self.dispatch()
        return self.combine()

    def _copy(self, at_source: list[Tensor], at_owner: list[Tensor], *, to_owner: bool) -> None:
        arrived = [0] * SIZE
        for source in range(SIZE):
            start = 0
            for rank, count in enumerate(self.sent[source]):
                here_PD = at_source[source][start : start + count]
                there_PD = at_owner[rank][arrived[rank] : arrived[rank] + count]
                there_PD.copy_(here_PD) if to_owner else here_PD.copy_(there_PD)
                start += count
                arrived[rank] += count


def time_addresses(setting: Setting) -> list[dict[str, object]]:
    counts_SE = torch.stack([count_pairs(ids_TK, setting.num_experts)[0] for ids_TK in setting.ids])

    def both(backend: str) -> RowPlan:
        _, position_TK = count_pairs(setting.ids[3], setting.num_experts, backend=backend)
        return place_rows(
            counts_SE,
            setting.ids[3],
            position_TK,
            index=3,
            num_local=setting.num_local,
            alignment=ALIGNMENT,
            backend=backend,
        )

    return [
        {
            "name": f"addresses of one rank, E {setting.num_experts}",
            "ours_us": median_us(lambda: both("triton")),
            "count_us": median_us(lambda: count_pairs(setting.ids[3], setting.num_experts)),
            "torch_graph_us": median_us(lambda: both("reference")),
            "torch_eager_us": median_us(lambda: both("reference"), graph=False),
        }
    ]


def time_rows(setting: Setting) -> list[dict[str, object]]:
    # Put reads each token once and writes K rows; get reads K rows and writes one. Addresses and weights not counted.
    moved = setting.tokens * (1 + TOP_K) * setting.width * 2
    rows = []
    calls: dict[str, Callable[[int], object]] = {
        "put": lambda rank: put_rows(
            setting.x[rank],
            setting.weights[rank],
            setting.plans[rank],
            setting.rows[rank],
            setting.row_weights[rank],
        ),
        "get": lambda rank: get_rows(setting.rows[rank], setting.plans[rank]),
    }
    for name, call in calls.items():
        all_us = median_us(lambda call=call: [call(rank) for rank in range(SIZE)])
        gbps = SIZE * moved / all_us / 1e3
        rows.append(
            {
                "name": f"{name}, {SIZE} ranks one after the other, {setting.shape}",
                "ours_us": all_us,
                "gbps": gbps,
                "share_of_copy": gbps / copy_bandwidth_gbps(),
                "one_rank_us": median_us(lambda call=call: call(3)),
            }
        )
    rows.append(
        {
            "name": f"clear padding, {SIZE} ranks one after the other, {setting.shape}",
            "ours_us": median_us(lambda: setting.clear(setting.plans)),
        }
    )
    return rows


def time_whole(setting: Setting) -> list[dict[str, object]]:
    opponent = InTorch(setting)
    ours_y = setting.whole()
    ours_rows = [
        rows.local[: int(plan.offsets_e[-1])].clone() for rows, plan in zip(setting.rows, setting.plans, strict=True)
    ]
    theirs_y = opponent.whole()
    for rows, plan, wanted in zip(setting.rows, setting.plans, ours_rows, strict=True):
        assert torch.equal(rows.local[: int(plan.offsets_e[-1])], wanted)
    for y_TD, wanted_TD in zip(ours_y, theirs_y, strict=True):
        # Two orders of one fp32 sum, each rounded to bf16 once.
        torch.testing.assert_close(y_TD, wanted_TD, rtol=2**-7, atol=1e-4)
    del ours_rows, ours_y, theirs_y
    ours_us = median_us(setting.whole, repeats=20)
    # In a graph its copies may become nodes that are slower than the same copies outside.
    theirs_us = min(median_us(opponent.whole, repeats=20, graph=graph) for graph in (True, False))
    return [
        {
            "name": f"place, put, clear and get, {SIZE} ranks, {setting.shape}",
            "ours_us": ours_us,
            "place_us": median_us(setting.place),
            "permute_copy_permute_us": theirs_us,
            "share": ours_us / theirs_us,
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to FILE")
    parser.add_argument("--commit", default="", metavar="HASH", help="commit of these sources, for the file")
    parser.add_argument("--part", choices=("all", "checks", "times"), default="all", help="leave out the other part")
    options = parser.parse_args()
    assert torch.cuda.is_available(), "this needs a GPU"
    where = about(options.commit)
    print(where, flush=True)
    if options.part != "times":
        faults = []
        for check in (check_table, check_larger, check_graph_and_no_wait, check_more_than_two_to_the_31):
            try:
                check()
            except Exception:
                faults.append(f"{check.__name__}: {traceback.format_exc()}")
                print(faults[-1][-2000:], flush=True)
        torch.cuda.empty_cache()
        if faults:
            raise AssertionError(f"{len(faults)} checks failed")
    if options.part == "checks":
        return
    where["copy_gbps"] = copy_bandwidth_gbps()
    print(f"copy {where['copy_gbps']:.0f} GB/s", flush=True)
    rows: list[dict[str, object]] = []
    every = (time_addresses, time_rows, time_whole)
    for sizes, parts in (
        ((128,), every),
        ((256,), every),
        ((128, 8192, 2048), every[1:2]),
        ((256, 2048, 7168), every[1:2]),
    ):
        setting = make_setting(*sizes)
        for timed in parts:
            for row in timed(setting):
                rows.append({**row, "top_k": TOP_K, "alignment": ALIGNMENT})
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
                sys.stdout.flush()
        del setting
        torch.cuda.empty_cache()
    if options.json:
        write_json(options.json, where, rows)
    if broken := broken_bounds(rows, Path(__file__).with_name("speed-1xh200.toml")):
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
