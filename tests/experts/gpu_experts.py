"""The experts on one GPU: `python3 tests/experts/gpu_experts.py`, with torch and triton.

Holds the Triton back-end to the reference: values and gradients in bfloat16, the same bits 20 times, no wait for the
host, threads that begin with a backward pass, capture in a CUDA graph and replay with other ids, the conformance suite
(its cases as they are, and in widths that the specialised kernels do), other activations and biases at the widths of
models, and sizes beyond 2^31; all of it with the specialised kernels, part of it with the plain ones, where a table has
no rings and where Triton has no Gluon, which gives the same bits. The first fault raises. `gpu_opponents.py` has the
times. What compiles many kernels runs in several processes (`--workers`); `--only conformance,activations` leaves out
the rest.
"""

import argparse
import site
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from gpu_cases import DEVICE, SIZES, Size, build, make, random_ids

# isort: split
import torch
from coterie_experts import ExpertsConfig, GroupedExperts
from coterie_experts.conformance import CASES, TOKEN_CASES, conformance_problems
from coterie_experts.grouped_swiglu import choose_backend, specialised
from coterie_experts.grouped_swiglu import triton_launch as launch
from coterie_experts.grouped_swiglu.triton_forward import sum_rows_of_tokens
from coterie_experts.tables import KERNELS, TileTable, capability_of, shape_class
from coterie_experts.token_rows import sort_slots
from torch import Tensor

NAMES = ("y", "grad x", "grad weights", "grad gate_up", "grad down")
CHECKED = (
    Size("uneven", 777, 256, 192, 7, 3),
    Size("widths of no tile", 500, 200, 136, 5, 2),
    Size("one expert", 300, 128, 256, 1, 1),
    Size("all experts", 100, 128, 128, 4, 4),
    Size("one token", 1, 256, 256, 8, 2),
    Size("several tiles", 3000, 1024, 640, 6, 3),
)
# The suite in widths that every specialised kernel does, with a remainder of the hidden units.
WIDE = {"d_model": 256, "d_hidden": 264}
# The widths of gpt-oss-20b and of a layer of Nemotron-H's kind: name, activation, biases.
ACTIVATIONS = (
    (Size("gpt-oss", 1024, 2880, 2880, 32, 4), "swiglu_clamped", True),
    (Size("no gate", 1024, 1024, 2688, 16, 4), "relu_squared", False),
)
# Rows in order, D and H: rows x D just over 2^31; the pre-activation beyond 2^32 numbers.
LONG = ((299_594, 7168, 128), (1_048_704, 64, 2048))


@contextmanager
def without_gluon() -> Iterator[None]:
    """Let the package find that the specialised kernels cannot run."""
    plain = specialised.obstacle
    specialised.obstacle = lambda device: "they are left out here"
    try:
        choice = choose_backend("triton", d_model=64, d_hidden=64, dtype=torch.bfloat16, device=DEVICE)
        assert choice.reason.endswith("the plain kernels alone: they are left out here"), choice.reason
        yield
    finally:
        specialised.obstacle = plain


def without_rings(size: Size) -> TileTable:
    """Return a table by which a layer of this size has no specialised kernels."""
    name = shape_class(size.D, size.H, num_rows=size.T * size.K, num_experts=size.E)
    tiles = {name: {kernel: {"ring": 0} for kernel in KERNELS}}
    return TileTable(capability=capability_of(DEVICE), dtype="bfloat16", tiles=tiles)


def run(size: Size, backend: str, values: list[Tensor], table: TileTable | None = None) -> tuple[Tensor, ...]:
    x, ids, weights, gate_up, down, grad_y = values
    experts = build(size, backend, gate_up, down)
    # What a config reads from a file.
    experts._table = table
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts.forward_tokens(x, ids, weights)
    y.backward(grad_y)
    return y.detach(), x.grad, weights.grad, experts.gate_up.grad, experts.down.grad


def check_values(size: Size) -> str:
    """Allow twice the error of the reference in bfloat16, by norm."""
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
    return f"check {size.name}: error / error of the reference {[round(ratio, 2) for ratio in ratios]}"


def check_plain_kernels(size: Size) -> str:
    """The same bits without the specialised kernels, for both reasons; gradients of row weights up to rounding."""
    obstacle = specialised.obstacle(DEVICE)
    assert obstacle is None, obstacle
    values = make(size, "zipf")
    ours = run(size, "triton", values)
    with without_gluon():
        others = [run(size, "triton", values)]
    others.append(run(size, "triton", values, without_rings(size)))
    for other in others:
        for name, one, plain in zip(NAMES, ours, other, strict=True):
            if name == "grad weights":
                torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
            else:
                assert torch.equal(one, plain), (size.name, name)
    return f"check {size.name}: the same bits with plain kernels"


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


def check_first_work_of_a_thread() -> str:
    """A backward pass is the first work of its thread, and another thread has loaded its kernels; of a new process."""
    size = CHECKED[0]
    values = make(size)
    with torch.autograd.set_multithreading_enabled(False):
        expected = run(size, "triton", values)
    for one, other in zip(run(size, "triton", values), expected, strict=True):
        assert torch.equal(one, other)
    return "check: a backward pass as the first work of a thread"


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


def check_activation(size: Size, activation: str, bias: bool) -> str:
    """Hold values and gradients to the reference by norm, as above; deferred in `main_grad`, the same bits again."""
    x, ids, weights, _, down, grad_y = make(size, "zipf")
    ids[::5, 1] = -1
    weights[3] = 0.0

    def layer(backend: str, dtype: torch.dtype) -> GroupedExperts:
        config = ExpertsConfig(
            d_model=size.D, d_hidden=size.H, num_experts=size.E, backend=backend, activation=activation, bias=bias
        )
        experts = GroupedExperts(config, device=DEVICE, dtype=dtype)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for name, parameter in experts.named_parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.dim() == 3 else 1.0
            values = torch.randn(parameter.shape, generator=generator, device=DEVICE) * std
            parameter.data.copy_((down if name == "down" else values).bfloat16())
        return experts

    def gradients(experts: GroupedExperts) -> dict[str, Tensor]:
        dtype = experts.down.dtype
        rows = x.detach().to(dtype).requires_grad_()
        row_weights = weights.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        y = experts.forward_tokens(rows, ids, row_weights)
        y.backward(grad_y.to(dtype))
        found = {"y": y.detach(), "x": rows.grad, "weights": row_weights.grad}
        return {**found, **{name: one.grad for name, one in experts.named_parameters() if one.grad is not None}}

    exact = gradients(layer("reference", torch.float64))
    plain, ours = (gradients(layer(name, torch.bfloat16)) for name in ("reference", "triton"))
    ratios = {}
    for name, truth in exact.items():
        error, allowed = ((one[name].double() - truth).norm().item() for one in (ours, plain))
        assert error <= 2 * allowed + 1e-6 * truth.norm().item(), (size.name, name, error, allowed)
        ratios[name] = round(error / max(allowed, 1e-30), 2)
    at_once, late = layer("triton", torch.bfloat16), layer("triton", torch.bfloat16)
    kept: list[Callable[[], None]] = []
    late.defer_weight_gradients = kept.append
    for experts in (at_once, late):
        for parameter in experts.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.5, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    found = [gradients(experts) for experts in (at_once, late)]
    kept.pop()()
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    for one, other in zip(at_once.parameters(), late.parameters(), strict=True):
        assert one.grad is None
        assert torch.equal(one.main_grad, other.main_grad)
    return f"check {size.name}: error / error of the reference {ratios}"


def check_part_of_the_suite(backend: str, number: int, parts: int) -> str:
    """Run every `parts`-th case of the package's suite in bfloat16; those of ours wide too, and by plain kernels."""
    cases, token_cases = CASES[number::parts], TOKEN_CASES[number::parts]

    def problems(**widths: int) -> list[str]:
        return conformance_problems(
            backend,
            device=DEVICE,
            dtype=torch.bfloat16,
            cases=[replace(case, **widths) for case in cases],
            token_cases=[replace(case, **widths) for case in token_cases],
        )

    found = problems()
    if backend == "triton":
        found += [f"wide: {text}" for text in problems(**WIDE)]
        with without_gluon():
            found += [f"plain kernels: {text}" for text in problems()]
    assert not found, "\n".join(found)
    return f"check: conformance of {backend}, part {number + 1} of {parts}"


def in_processes(jobs: list[Callable[[], str]], workers: int, packages: list[str]) -> None:
    """Run checks beside one another, print what they return, and raise what they raise."""
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=add_packages, initargs=(packages,)) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            print(done.result(), flush=True)


def add_packages(folders: list[str]) -> None:
    for folder in folders:
        site.addsitedir(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="append", default=[], metavar="DIR", help="folders with optional packages")
    parser.add_argument("--backends", default="triton", help="those that the suite is run on")
    parser.add_argument("--only", default="", metavar="PARTS", help="conformance, activations, values, long")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    add_packages(arguments.packages)
    only = [name for name in arguments.only.split(",") if name] or ["conformance", "activations", "values", "long"]
    jobs: list[Callable[[], str]] = []
    if "activations" in only:
        jobs += [partial(check_activation, *one) for one in ACTIVATIONS]
    if "conformance" in only:
        for backend in arguments.backends.split(","):
            jobs += [
                partial(check_part_of_the_suite, backend, number, arguments.workers)
                for number in range(arguments.workers)
            ]
    if "values" in only:
        sizes = (*CHECKED, replace(SIZES["olmoe"], T=2048), replace(SIZES["qwen3-30b"], T=1024))
        jobs += [partial(check, size) for size in sizes for check in (check_values, check_plain_kernels)]
    in_processes(jobs, arguments.workers, arguments.packages)
    if "values" in only:
        in_processes([check_first_work_of_a_thread], 1, arguments.packages)
        check_rows_in_order()
        check_promises()
    if "long" in only:
        check_one_byte_rows()
        check_long_batches()


if __name__ == "__main__":
    main()
