"""The experts on one GPU: `python3 tests/experts/gpu_experts.py`, with torch and triton.

Holds the Triton back-end to the reference first: values and gradients in bfloat16, the same bits 20 times, no wait for
the host, capture in a CUDA graph and replay with other ids. Then times it against plain torch and against six dense
products of the same FLOPs. The first fault raises; `--json FILE` writes the times. `--kernels` times single kernels
with several tiles instead.
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "experts" / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from coterie_experts import ExpertsConfig, GroupedExperts  # noqa: E402
from coterie_experts.conformance import conformance_problems  # noqa: E402
from coterie_experts.grouped_swiglu import triton_launch as launch  # noqa: E402
from coterie_experts.grouped_swiglu import triton_tiles  # noqa: E402
from coterie_experts.grouped_swiglu.triton_forward import sum_rows_of_tokens  # noqa: E402
from coterie_experts.grouped_swiglu.triton_layout import pad_rows  # noqa: E402
from coterie_experts.grouped_swiglu.triton_tiles import Tile  # noqa: E402
from coterie_experts.token_rows import sort_slots  # noqa: E402
from support.device_timing import about, median_us, write_json  # noqa: E402
from torch import Tensor  # noqa: E402

DEVICE = torch.device("cuda")
NAMES = ("y", "grad x", "grad weights", "grad gate_up", "grad down")


@dataclass(frozen=True)
class Size:
    """Tokens, model width, hidden width, experts, choices."""

    name: str
    T: int
    D: int
    H: int
    E: int
    K: int

    @property
    def flops(self) -> float:
        """Of the forward pass; three times that forward and backward."""
        return 6.0 * self.T * self.K * self.D * self.H


SIZES = {
    size.name: size
    for size in (
        Size("olmoe", 32768, 2048, 1024, 64, 8),
        Size("qwen3-30b", 32768, 2048, 768, 128, 8),
        Size("sweep-e8", 32768, 2048, 2048, 8, 4),
        Size("sweep-e32", 32768, 2048, 2048, 32, 4),
        Size("sweep-e128", 32768, 2048, 2048, 128, 4),
        Size("dsv3-local32", 8192, 7168, 2048, 32, 8),
        Size("mixtral", 16384, 4096, 14336, 8, 2),
        Size("sonic-30b", 32768, 4096, 1024, 128, 8),
        Size("fine", 32768, 4096, 256, 256, 16),
        Size("small-t", 8192, 2048, 768, 128, 8),
    )
}
CHECKED = (
    Size("uneven", 777, 256, 192, 7, 3),
    Size("widths of no tile", 500, 200, 136, 5, 2),
    Size("one expert", 300, 128, 256, 1, 1),
    Size("all experts", 100, 128, 128, 4, 4),
    Size("one token", 1, 256, 256, 8, 2),
)
# Rows in order, D and H: rows x D just over 2^31; the pre-activation beyond 2^32 numbers.
LONG = ((299_594, 7168, 128), (1_048_704, 64, 2048))


def random_ids(size: Size, kind: str = "balanced", seed: int = 0) -> Tensor:
    """Return ids as a router gives them; "zipf": expert e has weight 1/(e+1); "one": one has 25 % of the rows."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise_TE = torch.rand(size.T, size.E, generator=generator, device=DEVICE)
    if kind == "zipf":
        load_E = 1.0 / torch.arange(1, size.E + 1, device=DEVICE)
        noise_TE = noise_TE.log().neg().log().neg() + load_E.log()
    if kind == "one":
        share = min(1.0, 0.25 * size.K)
        noise_TE[torch.rand(size.T, generator=generator, device=DEVICE) < share, 0] = 2.0
    return noise_TE.topk(size.K).indices


def make(size: Size, kind: str = "balanced") -> list[Tensor]:
    """Return x, ids, weights, gate_up, down and the gradient of y."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) * std).bfloat16()

    return [
        normal(size.T, size.D),
        random_ids(size, kind),
        torch.rand(size.T, size.K, generator=generator, device=DEVICE) + 0.1,
        normal(size.E, 2 * size.H, size.D, std=size.D**-0.5),
        normal(size.E, size.D, size.H, std=size.H**-0.5),
        normal(size.T, size.D),
    ]


def build(size: Size, backend: str, gate_up: Tensor, down: Tensor) -> GroupedExperts:
    config = ExpertsConfig(d_model=size.D, d_hidden=size.H, num_experts=size.E, backend=backend)
    experts = GroupedExperts(config, device="meta", dtype=gate_up.dtype)
    experts.gate_up = torch.nn.Parameter(gate_up)
    experts.down = torch.nn.Parameter(down)
    return experts


def run(size: Size, backend: str, values: list[Tensor]) -> tuple[Tensor, ...]:
    x, ids, weights, gate_up, down, grad_y = values
    experts = build(size, backend, gate_up, down)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts.forward_tokens(x, ids, weights)
    y.backward(grad_y)
    return y.detach(), x.grad, weights.grad, experts.gate_up.grad, experts.down.grad


def check_values() -> None:
    """Allow twice the error of the reference in bfloat16, by norm."""
    for size in (*CHECKED, replace(SIZES["olmoe"], T=2048), replace(SIZES["qwen3-30b"], T=1024)):
        values = make(size, "zipf")
        if size.name == "uneven":
            values[1][::5, 1] = -1
            values[2][3] = 0.0
        wide = [value.double() if value.is_floating_point() else value for value in values]
        exact = run(size, "reference", wide)
        plain, ours = run(size, "reference", values), run(size, "triton", values)
        ratios = []
        for name, one, baseline, truth in zip(NAMES, ours, plain, exact, strict=True):
            error, allowed = ((got.double() - truth).norm().item() for got in (one, baseline))
            assert error <= 2 * allowed + 1e-6 * truth.norm().item(), (size.name, name, error, allowed)
            ratios.append(error / max(allowed, 1e-30))
        print(f"check {size.name}: error / error of the reference {[round(ratio, 2) for ratio in ratios]}", flush=True)


def check_promises() -> None:
    """The same bits 20 times; no wait for the host; a graph captured with other ids."""
    size = replace(SIZES["olmoe"], T=4096)
    values = make(size, "zipf")
    first = run(size, "triton", values)
    for _ in range(20):
        for one, other in zip(first, run(size, "triton", values), strict=True):
            assert torch.equal(one, other)
    torch.cuda.set_sync_debug_mode("error")
    run(size, "triton", values)
    torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(size, "triton", values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(size, "triton", values)
        values[1].copy_(random_ids(size, "one", seed=5))
        graph.replay()
        stream.synchronize()
        for one, other in zip(captured, run(size, "triton", values), strict=True):
            assert torch.equal(one, other)
    torch.cuda.current_stream().wait_stream(stream)
    print("check: same bits, no sync, graph replay with other ids", flush=True)


def check_rows_in_order() -> None:
    """`forward` equals `forward_tokens` where each token has one choice, bit for bit, and leaves the rest alone."""
    size = Size("rows", 1000, 256, 192, 6, 1)
    x, ids, weights, gate_up, down, grad_y = make(size)
    order, offsets = sort_slots(ids, size.E)
    expected = run(size, "triton", [x, ids, weights, gate_up, down, grad_y])
    experts = build(size, "triton", gate_up, down)
    extra = torch.full((50, size.D), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    rows = torch.cat((x[order], extra)).requires_grad_()
    row_weights = torch.cat((weights.flatten()[order], extra[:, 0].float())).requires_grad_()
    y = experts(rows, row_weights, offsets)
    y.backward(torch.cat((grad_y[order], extra)))
    assert torch.equal(y[:-50], expected[0][order])
    assert torch.equal(rows.grad[:-50], expected[1][order])
    assert torch.equal(row_weights.grad[:-50], expected[2].flatten()[order])
    for tail in (y, rows.grad, row_weights.grad):
        assert not tail[-50:].any()
    assert torch.equal(experts.gate_up.grad, expected[3])
    assert torch.equal(experts.down.grad, expected[4])
    with_main = build(size, "triton", gate_up, down)
    for parameter in with_main.parameters():
        parameter.main_grad = torch.ones(parameter.shape, device=DEVICE)
    with_main(rows.detach(), row_weights.detach(), offsets).backward(torch.cat((grad_y[order], extra)))
    for one, other in zip(with_main.parameters(), experts.parameters(), strict=True):
        assert one.grad is None
        torch.testing.assert_close((one.main_grad - 1).bfloat16(), other.grad, rtol=1e-2, atol=1e-5)
    print("check: rows in order, main_grad", flush=True)


def check_one_byte_rows() -> None:
    """E8 in rows of one byte: the last row begins at 2^31, or ends past 2^32."""
    for num_rows, width in ((32_769, 65_536), (1_525_202, 2_816)):
        rows = torch.zeros(num_rows, width, dtype=torch.uint8, device=DEVICE)
        places = [0, num_rows // 2, num_rows - 1]
        for number, place in enumerate(places):
            rows[place] = (torch.arange(width, device=DEVICE) % 50 + 60 * number).to(torch.uint8)
        expected = rows[places].clone()
        position = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        out = torch.empty(3, width, dtype=torch.uint8, device=DEVICE)
        sum_rows_of_tokens[(3, -(-width // 1024))](rows, position, out, width, width, CHOICES=1, COLUMNS=1024)
        assert torch.equal(out, expected)
        launch.clear_past_the_end(rows, torch.tensor([num_rows - 1], dtype=torch.int32, device=DEVICE))
        assert torch.equal(rows[places[:2]], expected[:2])
        assert not rows[-1].any()
    print("check: rows of one byte beyond 2^31 and 2^32", flush=True)


def check_long_batches() -> None:
    """E8: rows x D just over 2^31, and the pre-activation beyond 2^32 numbers; against the same rows in short parts."""
    for R, D, H in LONG:
        size = Size("long", R, D, H, 2, 1)
        x, _, weights, gate_up, down, grad_y = make(size)
        experts = build(size, "triton", gate_up, down)

        def sums(begin: int, end: int, half: int = R // 2, layer=experts, values=(x, weights, grad_y)):
            """Return y, grad rows and grad weights of a part of the rows; weight gradients go to main_grad."""
            rows, row_weights = values[0][begin:end].requires_grad_(), values[1][begin:end, 0].clone().requires_grad_()
            offsets = torch.tensor([min(max(half - begin, 0), end - begin), end - begin], device=DEVICE).int()
            y = layer(rows, row_weights, offsets)
            y.backward(values[2][begin:end])
            return y.detach(), rows.grad, row_weights.grad

        def fresh(layer=experts) -> list[Tensor]:
            for parameter in layer.parameters():
                parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
            return [parameter.main_grad for parameter in layer.parameters()]

        long_sums = fresh()
        found = sums(0, R)
        short_sums = fresh()
        step = -(-R // 64)
        for begin in range(0, R, step):
            part = slice(begin, min(begin + step, R))
            for one, other in zip(found, sums(part.start, part.stop), strict=True):
                torch.testing.assert_close(one[part], other, rtol=1e-2, atol=1e-2)
        for one, other in zip(long_sums, short_sums, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
        print(f"check: {R} rows, D {D}, H {H}", flush=True)
        del x, grad_y, found, experts, sums, fresh
        torch.cuda.empty_cache()


def check_conformance() -> None:
    """The suite of the package, in bfloat16."""
    found = conformance_problems("triton", device=DEVICE, dtype=torch.bfloat16)
    assert not found, "\n".join(found)
    print("check: conformance", flush=True)


def plain_torch(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort, gather, two grouped products, weighted index_add."""
    slots = ids.flatten().argsort(stable=True)
    tokens = slots // ids.shape[1]
    offsets = torch.searchsorted(ids.flatten()[slots], torch.arange(1, len(down) + 1, device=x.device)).int()
    gate, up = F.grouped_mm(x[tokens], gate_up.mT, offs=offsets).chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
    return torch.zeros_like(x).index_add_(0, tokens, rows * weights.flatten()[slots, None].to(rows.dtype))


def time_layer(function: Callable[..., Tensor], values: list[Tensor], repeats: int) -> dict[str, float]:
    """Return microseconds of forward, of forward and backward (in a graph too), and GiB beyond inputs and results."""
    x, ids, weights, gate_up, down, grad_y = values
    leaves = [value.detach().requires_grad_() for value in (x, weights, gate_up, down)]

    def both() -> tuple[Tensor, ...]:
        y = function(leaves[0], ids, leaves[1], leaves[2], leaves[3])
        return torch.autograd.grad(y, leaves, grad_y)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(leaves[0], ids, leaves[1], leaves[2], leaves[3])

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = both()
    # The output is as large as x.
    results = sum(tensor.numel() * tensor.element_size() for tensor in (*kept, x))
    found = {"extra_gib": (torch.cuda.max_memory_allocated() - before - results) / 2**30}
    del kept
    with torch.cuda.stream(torch.cuda.Stream()):
        found["graph_us"] = median_us(both, repeats=repeats, cold=False)
    found["forward_us"] = median_us(forward, graph=False, repeats=repeats, cold=False, warmups=2)
    found["both_us"] = median_us(both, graph=False, repeats=repeats, cold=False, warmups=2)
    return found


def time_dense(size: Size, repeats: int) -> float:
    """Return microseconds of six plain products of the FLOPs of forward and backward."""
    rows, D, H = size.T * size.K, size.D, size.H
    x, pre, act, y = (torch.randn(rows, n, device=DEVICE, dtype=torch.bfloat16) for n in (D, 2 * H, H, D))
    gate_up, down = (torch.randn(n, m, device=DEVICE, dtype=torch.bfloat16) for n, m in ((2 * H, D), (D, H)))

    def products() -> None:
        x @ gate_up.T, act @ down.T, y @ down, y.T @ act, pre @ gate_up, pre.T @ x

    return median_us(products, graph=False, repeats=repeats, cold=False, warmups=2)


def time_sizes(names: list[str], kinds: list[str], repeats: int, opponents: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in names:
        size = SIZES[name]
        for kind in kinds:
            values = make(size, kind)

            def ours(x, ids, weights, gate_up, down, size=size):
                return build_once(size, gate_up, down).forward_tokens(x, ids, weights)

            row: dict[str, object] = {"size": name, "kind": kind}
            for label, function in (("triton", ours), ("plain", plain_torch)):
                if label == "plain" and not opponents:
                    continue
                found = time_layer(function, values, repeats)
                row[label] = {
                    "forward": size.flops / found["forward_us"] / 1e6,
                    "backward": 2 * size.flops / (found["both_us"] - found["forward_us"]) / 1e6,
                    "both": 3 * size.flops / found["both_us"] / 1e6,
                    "graph": 3 * size.flops / found["graph_us"] / 1e6,
                    "extra_gib": found["extra_gib"],
                }
                torch.cuda.empty_cache()
            if opponents and kind == "balanced":
                row["dense"] = 3 * size.flops / time_dense(size, repeats) / 1e6
            rows.append(row)
            shown = {k: {n: round(v, 2) for n, v in x.items()} if isinstance(x, dict) else x for k, x in row.items()}
            print(shown, flush=True)
            if kind == "balanced":
                profile(ours, values)
            del values
            torch.cuda.empty_cache()
    return rows


def build_once(size: Size, gate_up: Tensor, down: Tensor) -> GroupedExperts:
    experts = GroupedExperts(
        ExpertsConfig(d_model=size.D, d_hidden=size.H, num_experts=size.E, backend="triton"),
        device="meta",
        dtype=gate_up.dtype,
    )
    for name, weight in (("gate_up", gate_up), ("down", down)):
        delattr(experts, name)
        setattr(experts, name, weight)
    return experts


def profile(function: Callable[..., Tensor], values: list[Tensor]) -> None:
    """Print the time of each kernel of one forward and backward pass."""
    x, ids, weights, gate_up, down, grad_y = values
    leaves = [value.detach().requires_grad_() for value in (x, weights, gate_up, down)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            torch.autograd.grad(function(leaves[0], ids, leaves[1], leaves[2], leaves[3]), leaves, grad_y)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    parts = [f"{event.key[:40]} {event.device_time_total / 3:.0f}us/{event.count / 3:.0f}" for event in events[:14]]
    print("   ", "; ".join(parts), flush=True)


def kernel_calls(size: Size, kind: str = "balanced") -> dict[str, tuple[Callable[[Tile], object], float]]:
    """Return, for each matrix kernel, a call with a tile and its FLOPs."""
    x, ids, weights, gate_up, down, grad_y = make(size, kind)
    slots, offsets = sort_slots(ids, size.E)
    tiles = triton_tiles.choose_tiles(interpreted=False)
    layout = pad_rows(offsets, weights.flatten(), slot_of_row_N=slots, num_choices=size.K, block=tiles.block_rows)
    pre, act = launch.pre_and_activation(x, layout, gate_up, tiles)
    unit = 2.0 * size.T * size.K * size.D * size.H

    def rows(rows_PK: Tensor, matrices: Tensor, transposed: bool) -> Callable[[Tile], object]:
        width = matrices.shape[1] if transposed else matrices.shape[2]
        out = rows_PK.new_empty(layout.num_padded, width)
        return lambda tile: launch._multiply(
            rows_PK, matrices, layout, tile, transposed=transposed, first=0, width=width, products=out
        )

    return {
        "up": (lambda tile: launch.pre_and_activation(x, layout, gate_up, replace(tiles, up=tile)), 2 * unit),
        "down": (rows(act, down, True), unit),
        "grad_hidden": (
            lambda tile: launch.hidden_gradients(
                grad_y, pre, layout, down, replace(tiles, grad_hidden=tile), overwrite=False
            ),
            unit,
        ),
        "grad_rows": (rows(pre, gate_up, False), 2 * unit),
        "grad_down": (
            lambda tile: launch.weight_gradient(grad_y, act, layout, tile, transposed=False, main_grad=None),
            unit,
        ),
        "grad_gate_up": (
            lambda tile: launch.weight_gradient(x, pre, layout, tile, transposed=True, main_grad=None),
            2 * unit,
        ),
    }


def variants() -> dict[str, list[tuple[str, Tile]]]:
    """Return the tiles to try for each kernel: the recorded one first."""
    tiles = triton_tiles.choose_tiles(interpreted=False)
    found = {}
    for name in ("up", "down", "grad_hidden", "grad_rows", "grad_down", "grad_gate_up"):
        base = getattr(tiles, name)
        found[name] = [("recorded", base)]
        if name.startswith("grad_") and name not in ("grad_hidden", "grad_rows"):
            continue
        found[name] += [(f"band {band}", replace(base, band=band)) for band in (2, 4, 8, 16) if band != base.band]
        if name in ("down", "grad_rows"):
            found[name].append((f"flatten {not base.flatten}", replace(base, flatten=not base.flatten)))
    return found


def compile_one(argument: tuple[str, str, str]) -> str:
    """Compile one variant in a process of its own, with few tokens."""
    size_name, kernel, label = argument
    try:
        calls = kernel_calls(replace(SIZES[size_name], T=256))
        calls[kernel][0](dict(variants()[kernel])[label])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{kernel} {label}: {type(error).__name__} {str(error)[:200]}"
    return ""


def time_kernels(names: list[str], repeats: int) -> None:
    start = time.monotonic()
    jobs = [(names[0], kernel, label) for kernel, tiles in variants().items() for label, _ in tiles]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(compile_one, jobs) if fault]
    print(f"compiled {len(jobs)} variants in {time.monotonic() - start:.0f} s", *faults, sep="\n", flush=True)
    for name in names:
        calls = kernel_calls(SIZES[name])
        for kernel, (call, flops) in calls.items():
            shown = []
            for label, tile in variants()[kernel]:
                try:
                    us = median_us(lambda call=call, tile=tile: call(tile), graph=False, repeats=repeats, cold=False)
                    shown.append(f"{label} {flops / us / 1e6:.0f}")
                except Exception as error:
                    shown.append(f"{label} {type(error).__name__}")
            print(f"{name} {kernel}: " + "; ".join(shown), flush=True)
        del calls, call
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="olmoe,qwen3-30b,sweep-e8,sweep-e128,dsv3-local32")
    parser.add_argument("--kinds", default="balanced")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-opponents", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    names = arguments.sizes.split(",")
    if not arguments.no_checks:
        check_values()
        check_rows_in_order()
        check_promises()
        check_conformance()
        check_one_byte_rows()
        check_long_batches()
    if arguments.kernels:
        time_kernels(names, arguments.repeats)
        return
    rows = time_sizes(names, arguments.kinds.split(","), arguments.repeats, not arguments.no_opponents)
    if arguments.json:
        write_json(arguments.json, about(arguments.commit), rows)


if __name__ == "__main__":
    main()
