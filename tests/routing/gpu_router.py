"""The fused router on a GPU: right first, then fast. Needs a Hopper GPU, torch and triton, and no session.

    python3 tests/routing/gpu_router.py [--json FILE] [--commit HASH]

Every output and gradient is held to fp64, 20 runs to each other bit for bit, and a captured graph to plain calls with
other tokens. Then come the times, against plain torch, eager and compiled, and against reading the tokens once.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "routing" / "src")]

import torch  # noqa: E402
from coterie_routing import RouterConfig  # noqa: E402
from coterie_routing.fused_router import fused_route, reason_against  # noqa: E402
from support.device_timing import about, copy_bandwidth_gbps, median_us, read_us, write_json  # noqa: E402
from torch import Tensor  # noqa: E402

from routing.fused_cases import FusedCase, assert_right, inputs, outputs  # noqa: E402
from routing.fused_cases import fused as run_case  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
# (T, D, E, K) of the times.
SHAPES = [
    (32768, 2048, 128, 8),
    (32768, 2048, 64, 8),
    (32768, 2048, 8, 2),
    (32768, 4096, 128, 8),
    (32768, 7168, 256, 8),
]


def cases() -> list[FusedCase]:
    dtypes = ((BF16, BF16), (BF16, FP32), (FP32, FP32))
    scores = (("softmax", False, False), ("sigmoid", True, True))
    shapes = (
        (0, 64, 8, 2),
        (1, 64, 8, 2),
        (63, 200, 20, 3),
        (65, 203, 100, 8),
        (127, 2048, 128, 8),
        (129, 2048, 64, 6),
        (1000, 1000, 256, 12),
        (300, 512, 512, 9),
    )
    found = [
        FusedCase(
            tokens=tokens,
            width=width,
            experts=experts,
            top_k=top_k,
            score=score,
            biased=biased,
            masked=masked,
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            device="cuda",
        )
        for tokens, width, experts, top_k in shapes
        for x_dtype, weight_dtype in dtypes
        for score, biased, masked in scores
    ]
    small = dict(tokens=200, width=128, experts=40, x_dtype=BF16, weight_dtype=BF16, device="cuda")
    found += [FusedCase(top_k=top_k, kind="ties", **small) for top_k in (3, 8, 20)]
    found += [FusedCase(top_k=4, kind="equal", **small), FusedCase(top_k=33, score="softmax_of_chosen", **small)]
    found += [FusedCase(top_k=4, renormalize=False, score="softmax", masked=True, **small)]
    return found


def fault_of(case: FusedCase) -> str:
    try:
        assert_right(case, margin=1e-4 if case.kind == "random" and case.tokens > 0 else 0.0)
    except AssertionError as fault:
        return str(fault)
    return ""


def check() -> None:
    # In several processes, since one compiles the kernels slowly.
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(fault_of, cases()) if fault]
    assert not faults, "\n".join(faults)
    print(f"right: {len(cases())} cases", flush=True)
    case = FusedCase(tokens=5000, width=2048, experts=128, top_k=8, x_dtype=BF16, weight_dtype=BF16, device="cuda")
    tensors = inputs(case)
    first = everything(case, *tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    repeats = [everything(case, *tensors) for _ in range(20)]
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for found in repeats for one, other in zip(first, found, strict=True))
    print("right: 20 runs are equal bit for bit, and none waits for the device", flush=True)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(everything, case, *tensors).result()
    assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))
    print("right: as the first work of a thread", flush=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything(case, *tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = everything(case, *tensors)
        with torch.no_grad():
            tensors[0].copy_(inputs(case, seed=7)[0])
        graph.replay()
        plain = everything(case, *tensors)
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, plain, strict=True))
    assert not torch.equal(plain[0], first[0])
    print("right: a captured graph with other tokens", flush=True)


def everything(case: FusedCase, *tensors: Tensor | None) -> list[Tensor]:
    """Return all outputs and the gradients of tokens and weight."""
    routing = run_case(case, *tensors)
    values = outputs(routing)
    grads = torch.autograd.grad(values, tensors[:2], [torch.ones_like(one) for one in values])
    return [routing.ids_TK, routing.counts_E, routing.num_tokens, *(one.detach() for one in values), *grads]


def plain_router(logits_TE: Tensor, top_k: int) -> list[Tensor]:
    """Route by softmax as it is usually written: topk, renormalised weights, counts, and sums in fp32."""
    scores_TE = logits_TE.softmax(-1)
    weights_TK, ids_TK = scores_TE.topk(top_k, dim=-1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    ids_N = ids_TK.flatten()
    counts_E = torch.zeros(logits_TE.shape[1], dtype=torch.int64, device=logits_TE.device)
    counts_E = counts_E.scatter_add(0, ids_N, torch.ones_like(ids_N))
    z_sum = logits_TE.logsumexp(-1).square().sum()
    return [weights_TK, scores_TE, scores_TE.sum(0), z_sum, ids_TK, counts_E]


def with_fp32_logits(x_TD: Tensor, weight_ED: Tensor, top_k: int) -> list[Tensor]:
    return plain_router(x_TD.float() @ weight_ED.float().T, top_k)


def with_bf16_logits(x_TD: Tensor, weight_ED: Tensor, top_k: int) -> list[Tensor]:
    return plain_router(torch.nn.functional.linear(x_TD, weight_ED).float(), top_k)


def ours(x_TD: Tensor, weight_ED: Tensor, top_k: int) -> list[Tensor]:
    routing = fused_route(x_TD, weight_ED, top_k=top_k, score_function="softmax", renormalize=True, weight_scale=1.0)
    return [*outputs(routing), routing.ids_TK, routing.counts_E]


def times(route: Callable[..., list[Tensor]], x_TD: Tensor, weight_ED: Tensor, top_k: int) -> dict[str, float]:
    """Return the times of the forward pass, and of the forward and backward pass, in microseconds."""

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return route(x_TD, weight_ED, top_k)

    grads = [torch.randn_like(one) for one in forward()[:4]]

    def both() -> tuple[Tensor, ...]:
        # The usual losses: through weights, probability sums and z.
        values = route(x_TD, weight_ED, top_k)
        chosen = (0, 2, 3)
        return torch.autograd.grad([values[i] for i in chosen], [x_TD, weight_ED], [grads[i] for i in chosen])

    return {"forward_us": median_us(forward), "forward_backward_us": median_us(both)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to FILE")
    parser.add_argument("--commit", default="", metavar="HASH", help="commit of these sources, for the file")
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    copy = copy_bandwidth_gbps()
    print(f"copy: {copy:.0f} GB/s", flush=True)
    rows: list[dict[str, object]] = []
    opponents = {
        "ours": ours,
        "torch eager, fp32 logits": with_fp32_logits,
        "torch.compile, fp32 logits": torch.compile(with_fp32_logits, dynamic=False),
        "torch eager, bf16 logits": with_bf16_logits,
        "torch.compile, bf16 logits": torch.compile(with_bf16_logits, dynamic=False),
    }
    # A backward pass runs on the stream of its forward pass, and a graph captures one stream, not the default one.
    with torch.cuda.stream(torch.cuda.Stream()):
        for shape_of_row, weight_dtype in [*((shape, BF16) for shape in SHAPES), (SHAPES[0], FP32)]:
            num_tokens, width, num_experts, top_k = shape_of_row
            x_TD = torch.randn(num_tokens, width, device="cuda").bfloat16().requires_grad_()
            weight_ED = (torch.randn(num_experts, width, device="cuda") / width**0.5).to(weight_dtype).requires_grad_()
            config = RouterConfig(d_model=width, num_experts=num_experts, top_k=top_k)
            reason = reason_against(x_TD, weight_ED, config)
            assert reason is None, reason
            read = read_us(x_TD)
            shape = f"T{num_tokens} D{width} E{num_experts} K{top_k}, weight {weight_dtype}".replace("torch.", "")
            for name, route in opponents.items():
                # All opponents at the first shape, the fastest one at the others.
                is_used = (
                    "fp32" in name if weight_dtype == FP32 else shape_of_row == SHAPES[0] or "compile, bf16" in name
                )
                if name != "ours" and not is_used:
                    continue
                found = times(route, x_TD, weight_ED, top_k)
                row = {"shape": shape, "name": f"{shape}: {name}", "router": name, **found, "read_x_us": read}
                # The least that forward and backward must move: x once each, and the gradient of x.
                row["floor_forward_backward_us"] = 2 * read + x_TD.numel() * x_TD.element_size() / copy / 1e3
                row["forward_over_read"] = found["forward_us"] / read
                rows.append(row)
                print(
                    f"{shape:48} {name:28} forward {found['forward_us']:8.1f} us "
                    f"= {row['forward_over_read']:5.2f} reads, with backward {found['forward_backward_us']:8.1f} us",
                    flush=True,
                )
            torch.compiler.reset()
    if options.json is not None:
        write_json(options.json, {**about(options.commit), "copy_gbps": copy}, rows)


if __name__ == "__main__":
    main()
