"""The row map, permute and un-permute on one GPU: `python3 tests/routing/gpu_rows.py`, with torch and triton.

Holds the Triton kernels to the reference first: values and gradients, the same bits 20 times, no wait for the host,
capture in a CUDA graph and replay with other ids, rows beyond 2^31 elements. Then times them against torch eager and
torch.compile and prints the share of the copy bandwidth. The first fault raises; `--json FILE` writes the times.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "routing" / "src")]

import torch  # noqa: E402
import torch._functorch.config  # noqa: E402
from coterie_routing.permutation import permute, unpermute  # noqa: E402
from coterie_routing.row_map import RowMap, map_rows  # noqa: E402
from support.device_timing import about, copy_bandwidth_gbps, median_us, write_json  # noqa: E402
from torch import Tensor  # noqa: E402

from routing.plain_rows import one_hot_map, plain_gather, plain_weighted_index_add, plain_weighted_sum  # noqa: E402
from routing.row_cases import KINDS, SIZES, filled_with_garbage, ids_of_kind  # noqa: E402

DEVICE = torch.device("cuda")
# (T, K, E, D); D 33 allows no wide access, 2880 and 7168 are no powers of two.
LARGER = [(1000, 8, 128, 2048), (777, 6, 64, 2880), (257, 8, 300, 7168), (4099, 1, 3, 33), (65, 33, 512, 64)]
TIMED = [(32768, 8, 128, 2048), (16384, 8, 128, 4096), (8192, 8, 256, 7168)]
OUTPUTS = ("permute", "permute backward", "unpermute", "weighted", "rows", "weights")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def router_ids(tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    """Return ids as a router gives them: the choices of a token differ."""
    return random(tokens, num_experts, seed=seed).topk(top_k).indices


def skewed_ids(tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    """Return ids of a router whose expert e is favoured by 4/(e+1), with every 16th token not routed."""
    favour_E = 4 / (1 + torch.arange(num_experts, device=DEVICE))
    ids_TK = (random(tokens, num_experts, seed=seed) + favour_E).topk(top_k).indices
    return ids_TK.masked_fill_(torch.arange(tokens, device=DEVICE)[:, None] % 16 == 3, -1)


def inputs(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tokens, rows, weights, and gradients of tokens and rows, for `outputs`."""
    shapes = [(tokens, width), (tokens * top_k, width), (tokens, top_k), (tokens, width), (tokens * top_k, width)]
    found = [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    found[2] = found[2].float()
    return found


def outputs(row_map: RowMap, values: list[Tensor], backend: str) -> list[Tensor]:
    """Return every output and every gradient, in the order of OUTPUTS."""
    x_TD, rows_ND, weights_TK = (tensor.detach().requires_grad_() for tensor in values[:3])
    grad_TD, grad_ND = values[3:]
    permuted_ND = permute(x_TD, row_map, backend=backend)
    weighted_TD = unpermute(rows_ND, row_map, weights_TK, backend=backend)
    return [
        permuted_ND.detach(),
        *torch.autograd.grad(permuted_ND, x_TD, grad_ND),
        unpermute(rows_ND.detach(), row_map, backend=backend),
        weighted_TD.detach(),
        *torch.autograd.grad(weighted_TD, (rows_ND, weights_TK), grad_TD),
    ]


def fields(row_map: RowMap) -> list[Tensor]:
    return [row_map.counts_E, row_map.offsets_E, row_map.row_TK, row_map.slot_N]


@contextmanager
def garbage_in_new_memory() -> Iterator[None]:
    """Fill new memory with NaN or the largest integer inside the block."""
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    torch.empty, torch.empty_like, torch.Tensor.new_empty = (filled_with_garbage(make) for make in before)
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = before


def check_values() -> None:
    for tokens, top_k, num_experts in SIZES:
        for kind in KINDS:
            ids_TK = ids_of_kind(kind, tokens, top_k, num_experts).to(DEVICE)
            check_map(ids_TK, num_experts)
            check_map(ids_TK.int(), num_experts)
    # More blocks than the sum over blocks takes in one round.
    check_map(skewed_ids(80000, 8, 16), 16)
    print(f"row map: {8 * len(SIZES) + 1} cases equal the reference", flush=True)
    cases = [(torch.bfloat16, size) for size in LARGER]
    # Each dtype and width is compiled for itself, so the others stand for few.
    cases += [(torch.float16, LARGER[0]), (torch.float32, LARGER[1]), (torch.float32, LARGER[3])]
    for dtype, (tokens, top_k, num_experts, width) in cases:
        for kind in KINDS:
            check_one(ids_of_kind(kind, tokens, top_k, num_experts).to(DEVICE), num_experts, width, dtype)
    check_one(skewed_ids(1000, 8, 128), 128, 2048, torch.bfloat16)
    print(f"permute and un-permute: {len(KINDS) * len(cases) + 1} cases equal the reference", flush=True)


def check_map(ids_TK: Tensor, num_experts: int) -> RowMap:
    with garbage_in_new_memory():
        row_map = map_rows(ids_TK, num_experts, backend="triton")
    for found, expected in zip(fields(row_map), fields(map_rows(ids_TK.cpu(), num_experts)), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected), (ids_TK.shape, num_experts)
    return row_map


def check_one(ids_TK: Tensor, num_experts: int, width: int, dtype: torch.dtype) -> None:
    row_map = check_map(ids_TK, num_experts)
    values = inputs(*ids_TK.shape, width, dtype)
    values[1][row_map.slot_N < 0] = torch.nan
    values[2][ids_TK < 0] = torch.nan
    with garbage_in_new_memory():
        found = outputs(row_map, values, "triton")
    on_cpu = RowMap(*(field.cpu() for field in fields(row_map)))
    expected = outputs(on_cpu, [value.cpu() for value in values], "reference")
    for name, value, wanted in zip(OUTPUTS, found, expected, strict=True):
        case = (name, tuple(ids_TK.shape), num_experts, width, dtype)
        assert value.dtype == wanted.dtype, case
        if name != "weights":
            assert torch.equal(value.cpu(), wanted), case
    # Two orders of one fp32 sum: at most twice the worst error of the reference, plus the rounding of one term.
    rows_TKD = values[1].cpu().double().nan_to_num()[on_cpu.row_TK.clamp_min(0)]
    grad_T1D = values[3].cpu().double()[:, None]
    exact_TK = (rows_TKD * grad_T1D).sum(-1).masked_fill(ids_TK.cpu() < 0, 0)
    scale_TK = (rows_TKD * grad_T1D).abs().sum(-1)
    error_TK, reference_error_TK = ((value.cpu() - exact_TK).abs() for value in (found[-1], expected[-1]))
    assert (error_TK <= 2 * reference_error_TK.amax().item() + 1e-7 * scale_TK).all() if error_TK.numel() else True


def check_repeats() -> None:
    tokens, top_k, num_experts, width = TIMED[0]
    ids_TK = skewed_ids(tokens, top_k, num_experts)
    values = inputs(tokens, top_k, width, torch.bfloat16)
    first: list[Tensor] = []
    for _ in range(20):
        row_map = map_rows(ids_TK, num_experts, backend="triton")
        results = [*fields(row_map), *outputs(row_map, values, "triton")]
        first = first or results
        assert all(torch.equal(one, other) for one, other in zip(first, results, strict=True))
    print("repeats: 20 runs, the same bits", flush=True)


def check_no_wait() -> None:
    for backend in ("triton", "reference"):
        ids_TK = skewed_ids(512, 4, 16)
        values = inputs(512, 4, 64, torch.bfloat16)
        outputs(map_rows(ids_TK, 16, backend=backend), values, backend)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs(map_rows(ids_TK, 16, backend=backend), values, backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    print("no wait for the host, triton and reference", flush=True)


def check_graph() -> None:
    tokens, top_k, num_experts, width = 4096, 8, 128, 512
    ids_TK = router_ids(tokens, top_k, num_experts)
    values = inputs(tokens, top_k, width, torch.bfloat16)

    def run() -> list[Tensor]:
        row_map = map_rows(ids_TK, num_experts, backend="triton")
        return [*fields(row_map), *outputs(row_map, values, "triton")]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
    torch.cuda.current_stream().wait_stream(stream)
    others = [
        skewed_ids(tokens, top_k, num_experts, seed=5),
        torch.full_like(ids_TK, -1),
        torch.full_like(ids_TK, 7),
        router_ids(tokens, top_k, num_experts, seed=6),
    ]
    for seed, other_ids_TK in enumerate(others):
        ids_TK.copy_(other_ids_TK)
        for value in values:
            value.copy_(torch.randn_like(value) * (seed + 1))
        graph.replay()
        expected_map = map_rows(ids_TK, num_experts, backend="reference")
        expected = [*fields(expected_map), *outputs(expected_map, values, "reference")]
        assert all(torch.equal(*pair) for pair in zip(captured[:-1], expected[:-1], strict=True))
        torch.testing.assert_close(captured[-1], expected[-1], rtol=1e-4, atol=1e-3 * (seed + 1) ** 2)
    print("CUDA graph: 4 replays with other ids", flush=True)


def check_large() -> None:
    tokens, top_k, num_experts, width = 131072, 8, 128, 4096
    row_map = map_rows(skewed_ids(tokens, top_k, num_experts), num_experts, backend="triton")
    x_TD = random(tokens, width, dtype=torch.bfloat16)
    weights_TK = random(tokens, top_k, seed=1)
    rows_ND = permute(x_TD, row_map, backend="triton").requires_grad_()
    assert rows_ND.numel() > 2**31
    weights_TK.requires_grad_()
    y_TD = unpermute(rows_ND, row_map, weights_TK, backend="triton")
    grad_TD = random(tokens, width, dtype=torch.bfloat16, seed=2)
    grad_ND, grad_weights_TK = torch.autograd.grad(y_TD, (rows_ND, weights_TK), grad_TD)
    with torch.no_grad():
        for slots_n, rows_nD, grad_nD in zip(
            row_map.slot_N.split(65536), rows_ND.split(65536), grad_ND.split(65536), strict=True
        ):
            token_n, is_row_n1 = slots_n.clamp_min(0) // top_k, (slots_n >= 0)[:, None]
            weights_n1 = weights_TK.flatten()[slots_n.clamp_min(0)][:, None]
            assert torch.equal(rows_nD, torch.where(is_row_n1, x_TD[token_n], 0))
            expected_nD = (grad_TD[token_n].float() * weights_n1).bfloat16()
            assert torch.equal(grad_nD, torch.where(is_row_n1, expected_nD, 0))
        for part in torch.arange(tokens, device=DEVICE).split(16384):
            row_tK = row_map.row_TK[part]
            sum_tD = torch.zeros(len(part), width, device=DEVICE)
            for k in range(top_k):
                term_tD = rows_ND[row_tK[:, k].clamp_min(0)].float() * weights_TK[part, k, None]
                sum_tD += torch.where(row_tK[:, k, None] >= 0, term_tD, 0)
            assert torch.equal(y_TD[part], sum_tD.bfloat16())
            products_t = (x_TD[part].double() * grad_TD[part].double()).sum(1)
            expected_tK = torch.where(row_tK >= 0, products_t[:, None], 0).float()
            torch.testing.assert_close(grad_weights_TK[part], expected_tK, rtol=1e-4, atol=1e-3)
    print(f"rows of {rows_ND.numel()} elements, {2 * rows_ND.numel() / 1e9:.1f} GB", flush=True)


def timed_map(tokens: int, top_k: int, num_experts: int, *, opponents: bool, skewed: bool = False) -> dict[str, object]:
    ids_TK = (skewed_ids if skewed else router_ids)(tokens, top_k, num_experts)
    ours = partial(map_rows, ids_TK, num_experts, backend="triton")
    row: dict[str, object] = {
        "name": f"map_rows T{tokens} K{top_k} E{num_experts}{' skewed' if skewed else ''}",
        "ours_us": median_us(ours),
        "ours_ids_in_cache_us": median_us(ours, cold=False),
    }
    if opponents:
        expected = fields(map_rows(ids_TK, num_experts, backend="triton"))
        assert all(torch.equal(*pair) for pair in zip(one_hot_map(ids_TK, num_experts), expected, strict=True))
        row["eager_one_hot_us"] = median_us(partial(one_hot_map, ids_TK, num_experts))
        row["eager_sort_us"] = median_us(partial(map_rows, ids_TK, num_experts, backend="reference"))
        row["compiled_one_hot_us"] = median_us(partial(torch.compile(one_hot_map), ids_TK, num_experts))
    return row


def timed_rows(tokens: int, top_k: int, num_experts: int, width: int, *, opponents: bool) -> list[dict[str, object]]:
    row_map = map_rows(router_ids(tokens, top_k, num_experts), num_experts, backend="triton")
    x_TD, rows_ND, weights_TK, grad_TD, grad_ND = inputs(tokens, top_k, width, torch.bfloat16)
    for tensor in (x_TD, rows_ND, weights_TK):
        tensor.requires_grad_()
    token_N = row_map.slot_N // top_k
    plain_unpermute = partial(plain_weighted_sum, row_TK=row_map.row_TK)
    sides: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "ours": (
            lambda x_TD: permute(x_TD, row_map, backend="triton"),
            lambda rows_ND, weights_TK: unpermute(rows_ND, row_map, weights_TK, backend="triton"),
        )
    }
    if opponents:
        # A compiled backward pass that runs many times must not give its buffers away in the first.
        torch._functorch.config.donated_buffer = False
        sides["eager"] = (partial(plain_gather, token_N=token_N), plain_unpermute)
        sides["eager_index_add"] = (
            partial(plain_gather, token_N=token_N),
            partial(plain_weighted_index_add, slot_N=row_map.slot_N),
        )
        sides["compiled"] = (
            partial(torch.compile(plain_gather), token_N=token_N),
            partial(torch.compile(plain_weighted_sum), row_TK=row_map.row_TK),
        )
    rows_bytes, tokens_bytes = rows_ND.numel() * 2, x_TD.numel() * 2
    map_bytes, weights_bytes = row_map.row_TK.numel() * 8, weights_TK.numel() * 4
    moved = {
        "permute forward": tokens_bytes + rows_bytes + map_bytes,
        "permute backward": tokens_bytes + rows_bytes + map_bytes,
        "unpermute forward": tokens_bytes + rows_bytes + map_bytes + weights_bytes,
        "unpermute backward": tokens_bytes + 2 * rows_bytes + map_bytes + 2 * weights_bytes,
    }
    table = {name: {"name": f"{name} T{tokens} K{top_k} D{width} bf16"} for name in moved}
    for side, (forward, backward) in sides.items():
        permuted_ND, y_TD = forward(x_TD), backward(rows_ND, weights_TK)
        times = {
            "permute forward": lambda f=forward: f(x_TD),
            "permute backward": lambda p=permuted_ND: torch.autograd.grad(p, x_TD, grad_ND, retain_graph=True),
            "unpermute forward": lambda b=backward: b(rows_ND, weights_TK),
            "unpermute backward": lambda y=y_TD: torch.autograd.grad(
                y, (rows_ND, weights_TK), grad_TD, retain_graph=True
            ),
        }
        for name, call in times.items():
            # Only ours needs a graph: the host prepares the others' calls while the device does the one before.
            table[name][f"{side}_us"] = median_us(call, graph=side == "ours", repeats=50 if side == "ours" else 20)
        torch.cuda.empty_cache()
    for name, row in table.items():
        row["gbps"] = moved[name] / row["ours_us"] / 1e3
        row["share_of_copy"] = row["gbps"] / copy_bandwidth_gbps()
    return list(table.values())


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
        for check in (check_values, check_repeats, check_no_wait, check_graph, check_large):
            check()
    if options.part == "checks":
        return
    where["copy_gbps"] = copy_bandwidth_gbps()
    print(f"copy {where['copy_gbps']:.0f} GB/s", flush=True)
    rows: list[dict[str, object]] = []

    def add(found: list[dict[str, object]]) -> None:
        for row in found:
            shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print(shown, flush=True)
        rows.extend(found)

    # A backward pass is captured on the stream of its forward pass, which must not be the default one.
    with torch.cuda.stream(torch.cuda.Stream()):
        add([timed_map(tokens, top_k, e, opponents=False) for tokens, top_k, e in ((4096, 8, 64), (131072, 8, 256))])
        add([timed_map(32768, 8, 128, opponents=False, skewed=True)])
        for size in TIMED[1:]:
            add(timed_rows(*size, opponents=False))
        add(timed_rows(*TIMED[0], opponents=True))
        add([timed_map(*TIMED[0][:3], opponents=True)])
    if options.json:
        write_json(options.json, where, rows)


if __name__ == "__main__":
    main()
