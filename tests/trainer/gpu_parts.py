"""The parts of the training step on one GPU, each alone: `python3 tests/trainer/gpu_parts.py --case olmo8`.

Attention back-ends, cross-entropy variants, the MoE block (eager, and in a CUDA graph replayed with another routing),
norms and residual sums, and the optimizer, forward and backward; each is compared with plain torch first. `--packages
DIR` adds folders with Liger (`liger_kernel`) and `cut_cross_entropy`. The last row adds up what the step is made of:
gpu_step.py --parts holds the step to it. `--tiny --device cpu` is a dry run.
"""

import argparse
import site
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from step_cases import CASES, Case, Clock, Setup, about, document_ids, limited, make_step

# isort: split
import torch
import torch.nn.functional as F
from coterie_trainer.attention import attend, attention_context, count_documents
from coterie_trainer.cross_entropy import chunked_cross_entropy_sum
from coterie_trainer.layers import RMSNorm, compile_dense
from coterie_trainer.model import Decoder, MoE
from support.device_timing import write_json
from torch import Tensor, nn

Row = dict[str, object]
PARTS = ("attention", "cross_entropy", "norms", "step", "graph")


def measured(name: str, function: Callable[[], object], device: str, *, calls: int = 10) -> Row:
    """Return the time of a call, and the memory beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    function()
    row: Row = {"name": name}
    if device == "cuda":
        torch.cuda.synchronize()
        row["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    row["ms"] = Clock(device).ms(function, calls=calls)
    return row


def say(row: Row) -> Row:
    print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


def error_against(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest error of a tensor, by norm, over that of plain torch in the same dtype."""
    ratios = []
    for one, baseline, truth in zip(found, plain, exact, strict=True):
        floor = 1e-3 * truth.double().norm().item()
        error, allowed = ((got.double() - truth.double()).norm().item() for got in (one, baseline))
        ratios.append(error / max(allowed, floor))
    return max(ratios)


# Attention


@contextmanager
def _kernel(name: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        yield


ATTENTIONS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "sdpa with a mask": ("sdpa", None, ("whole", "packed")),
    "causal": ("causal", None, ("whole",)),
    "causal, flash": ("causal", "FLASH_ATTENTION", ("whole",)),
    "causal, cudnn": ("causal", "CUDNN_ATTENTION", ("whole",)),
    "varlen": ("varlen", None, ("whole", "packed")),
    "flex": ("flex", None, ("whole", "packed")),
}


def heads(case: Case, setup: Setup, num_positions: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    spec = case.spec
    return [
        torch.randn(case.sequences, num_positions, number, spec.head_dim, device=setup.device)
        .to(dtype)
        .requires_grad_()
        for number in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    ]


def attention_pass(
    case: Case, setup: Setup, num_positions: int, backend: str, documents: str, dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """Return a forward and backward of the core alone."""
    shape = case.sequences, num_positions
    ids_BS = document_ids(shape, documents, torch.Generator().manual_seed(0))
    values = heads(case, setup, num_positions, dtype)
    context = attention_context(
        ids_BS.to(setup.device),
        case.spec.head_dim,
        case.spec.rope_theta,
        dtype=dtype,
        num_documents=count_documents(ids_BS),
        backend=backend,
    )
    grad = torch.randn(*shape, case.spec.num_heads * case.spec.head_dim, device=setup.device).to(dtype)

    def run() -> list[Tensor]:
        out = attend(*values, context)
        return [out, *torch.autograd.grad(out, values, grad)]

    return run


def attention_rows(case: Case, setup: Setup) -> Iterator[Row]:
    """Check at 512 positions, time at the length of the case; FLOPs of causal scores over whole sequences."""
    spec, dtype = case.spec, setup.dtype
    flops = 3.5 * 2 * case.tokens * spec.max_sequence_length * spec.num_heads * spec.head_dim
    for name, (backend, kernel, kinds) in ATTENTIONS.items():
        if setup.device == "cpu" and (backend in ("varlen", "flex") or kernel):
            continue
        for documents in kinds:
            title = f"attention, {name}, {documents}"
            try:
                with _kernel(kernel) if kernel else nullcontext():
                    few = min(512, spec.max_sequence_length)
                    ours = attention_pass(case, setup, few, backend, documents, dtype)()
                    plain = attention_pass(case, setup, few, "sdpa", documents, dtype)()
                    exact = attention_pass(case, setup, few, "sdpa", documents, torch.float32)()
                    error = error_against(ours, plain, exact)
                    run = attention_pass(case, setup, spec.max_sequence_length, backend, documents, dtype)
                    row = measured(title, run, setup.device)
            except RuntimeError as problem:
                yield say({"name": title, "cannot": str(problem).splitlines()[0]})
                continue
            row |= {"error_over_plain": error}
            row["repeats_bits"] = all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))
            if documents == "whole":
                row["tflops"] = flops / row["ms"] / 1e9
            yield say(row)


# Cross-entropy


def losses(vocab_size: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the variants that can run here."""

    def plain(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        logits_TV = (hidden_TD @ weight_VD.T).float()
        return F.cross_entropy(logits_TV, targets_T, ignore_index=-1, reduction="sum")

    def chunked(chunk_tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda *values: chunked_cross_entropy_sum(*values, chunk_tokens=chunk_tokens)

    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"torch": plain}
    found |= {f"chunks of {size}": chunked(size) for size in (1024, 2048, 4096, 8192)}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
            # weight, targets, bias, class weights, ignored, z-loss, smoothing, reduction
            out = LigerFusedLinearCrossEntropyFunction.apply(
                hidden_TD, weight_VD, targets_T, None, None, -1, 0.0, 0.0, "sum"
            )
            return out[0] if isinstance(out, tuple) else out

        found["Liger"] = liger
    except ImportError as problem:
        print(f"without Liger: {problem}", flush=True)
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = lambda hidden_TD, weight_VD, targets_T: linear_cross_entropy(
            hidden_TD, weight_VD, targets_T, ignore_index=-1, reduction="sum"
        )
    except ImportError as problem:
        print(f"without cut-cross-entropy: {problem}", flush=True)
    return found


def cross_entropy_rows(case: Case, setup: Setup) -> Iterator[Row]:
    """Forward and backward of one micro-batch, from hidden states to the gradients of them and of the head."""
    spec, device, dtype = case.spec, setup.device, setup.dtype
    torch.manual_seed(0)

    def values(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden_TD = torch.randn(tokens, spec.d_model, device=device).to(dtype).requires_grad_()
        weight_VD = (torch.randn(spec.vocab_size, spec.d_model, device=device) * 0.02).to(dtype).requires_grad_()
        targets_T = torch.randint(spec.vocab_size, (tokens,), device=device)
        targets_T[::9] = -1
        return hidden_TD, weight_VD, targets_T

    def both(function: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        loss = function(*inputs)
        return [loss.detach(), *torch.autograd.grad(loss / case.tokens, inputs[:2])]

    variants = losses(spec.vocab_size)
    few = min(2048, case.tokens)
    exact = both(variants["torch"], values(few, torch.float32))
    plain = both(variants["torch"], values(few, dtype))
    flops = 6 * case.tokens * spec.vocab_size * spec.d_model
    for name, function in variants.items():
        try:
            error = error_against(both(function, values(few, dtype)), plain, exact)
            inputs = values(case.tokens, dtype)
            row = measured(f"cross-entropy, {name}", lambda f=function, i=inputs: both(f, i), device, calls=4)
        except (RuntimeError, TypeError) as problem:  # an opponent of another version
            yield say({"name": f"cross-entropy, {name}", "cannot": str(problem).splitlines()[0]})
            continue
        yield say(row | {"error_over_plain": error, "tflops": flops / row["ms"] / 1e9})


# Norms


def norm_rows(case: Case, setup: Setup) -> Iterator[Row]:
    """A residual sum and its norm, forward and backward, as torch runs it and compiled."""
    spec = case.spec
    shape = case.sequences, spec.max_sequence_length, spec.d_model
    torch.manual_seed(0)
    x, change = (torch.randn(shape, device=setup.device).to(setup.dtype).requires_grad_() for _ in range(2))
    for is_compiled in (False, True) if setup.device == "cuda" else (False,):
        norm = RMSNorm(spec.d_model, spec.norm_eps, setup.device).to(setup.dtype)
        nn.init.ones_(norm.weight)
        if is_compiled:
            compile_dense(norm)

        def run(norm: RMSNorm = norm) -> None:
            total, normalised = norm.after_sum(x, change)
            torch.autograd.grad((total, normalised), (x, change, norm.weight), (x.detach(), change.detach()))

        name = "residual sum and norm, " + ("compiled" if is_compiled else "eager")
        yield say(measured(name, run, setup.device))


# The step's own parts: the modules of its model, with its optimizer


def moe_pass(moe: MoE, x_TD: Tensor, grad_TD: Tensor) -> Callable[[], Tensor]:
    """Return forward and backward of the block."""
    is_real_T = torch.ones(len(x_TD), dtype=torch.bool, device=x_TD.device)

    def run() -> Tensor:
        x_TD.grad = None
        y_TD, _ = moe(x_TD, is_real_T)
        y_TD.backward(grad_TD)
        return y_TD.detach()

    return run


def captured_row(name: str, moe: MoE, run: Callable[[], Tensor], x_TD: Tensor) -> Row:
    """Capture forward and backward of the block, and replay them with tokens that go elsewhere."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y_TD = run()
        static_grad_TD = x_TD.grad
        with torch.no_grad():
            x_TD.copy_(torch.randn_like(x_TD))
        main_grad = moe.experts.down.main_grad
        main_grad.zero_()
        graph.replay()
        replayed = [y_TD.clone(), static_grad_TD.clone(), main_grad.clone()]
        main_grad.zero_()
        y_TD = run()
        eager = [y_TD, x_TD.grad, main_grad]
        is_equal = all(torch.equal(one, other) for one, other in zip(replayed, eager, strict=True))
        ms = Clock("cuda").ms(graph.replay)
    torch.cuda.current_stream().wait_stream(stream)
    return {"name": f"{name}, CUDA graph", "ms": ms, "equals_eager_with_other_routing": is_equal}


def step_rows(case: Case, setup: Setup) -> Iterator[Row]:
    """Time what the step is made of in its own model, and add it up."""
    device, spec = setup.device, case.spec
    model, optimizer, _ = make_step(case, setup)
    block = model.layers[0]
    torch.manual_seed(0)
    x_BSD = torch.randn(case.sequences, spec.max_sequence_length, spec.d_model, device=device)
    x_BSD = x_BSD.to(setup.dtype).requires_grad_()
    grad_BSD = torch.randn_like(x_BSD)
    ids_BS = document_ids(x_BSD.shape[:2], setup.documents, torch.Generator().manual_seed(0))
    context = attention_context(
        ids_BS.to(device),
        spec.head_dim,
        spec.rope_theta,
        dtype=setup.dtype,
        num_documents=count_documents(ids_BS),
    )

    def around(function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x_BSD.grad = None
            function(x_BSD).backward(grad_BSD)

        return run

    def attention(x_BSD: Tensor) -> Tensor:
        return x_BSD + block.attention(block.attention_norm(x_BSD), context)

    def residual(x_BSD: Tensor) -> Tensor:
        return x_BSD + block.mlp_norm(x_BSD)

    rows = {"attention": say(measured("layer: norm, attention, residual sum", around(attention), device))}
    yield rows["attention"]
    rows["residual"] = say(measured("layer: norm and residual sum around the MoE block", around(residual), device))
    yield rows["residual"]
    x_TD, grad_TD = x_BSD.detach().flatten(0, 1).clone().requires_grad_(), grad_BSD.flatten(0, 1)
    rows["moe"] = say(measured("layer: MoE block", moe_pass(block.moe, x_TD, grad_TD), device))
    yield rows["moe"]
    rows["head"] = say(measured("final norm and cross-entropy", _head_pass(model, x_BSD, case), device, calls=4))
    yield rows["head"]
    tokens_BS = torch.randint(spec.vocab_size, x_BSD.shape[:2], device=device)
    rows["embedding"] = say(measured("embedding", lambda: model.embed(tokens_BS).backward(grad_BSD), device))
    yield rows["embedding"]

    def update() -> None:
        optimizer.zero_grad()
        optimizer.step(0.0)

    rows["optimizer"] = say(measured("optimizer: zero, norm, clip, update", update, device, calls=4))
    yield rows["optimizer"]
    of_layer = sum(float(str(rows[name]["ms"])) for name in ("attention", "residual", "moe"))
    of_ends = sum(float(str(rows[name]["ms"])) for name in ("head", "embedding"))
    total = case.micro_batches * (spec.num_layers * of_layer + of_ends) + float(str(rows["optimizer"]["ms"]))
    yield say({"name": f"step of {case_name(case)}", "sum_of_parts_ms": total})
    model.close()


def graph_rows(case: Case, setup: Setup) -> Iterator[Row]:
    """Run the MoE block of one layer by the router's own choice, eager and in a CUDA graph."""
    one = replace(case, spec=replace(case.spec, num_layers=1))
    model, _, _ = make_step(one, replace(setup, load="router"))
    moe = model.layers[0].moe
    torch.manual_seed(0)
    x_TD = torch.randn(case.tokens, case.spec.d_model, device=setup.device).to(setup.dtype).requires_grad_()
    grad_TD = torch.randn_like(x_TD)
    run = moe_pass(moe, x_TD, grad_TD)
    yield say(measured("MoE block, eager", run, setup.device))
    if setup.device == "cuda":
        try:
            yield say(captured_row("MoE block", moe, run, x_TD))
        except RuntimeError as problem:
            yield say({"name": "MoE block, CUDA graph", "cannot": str(problem).splitlines()[0]})
    model.close()


def _head_pass(model: Decoder, x_BSD: Tensor, case: Case) -> Callable[[], None]:
    from coterie_trainer.cross_entropy import cross_entropy_sum

    targets_BS = torch.randint(case.spec.vocab_size, x_BSD.shape[:2], device=x_BSD.device)

    def run() -> None:
        x_BSD.grad = None
        (cross_entropy_sum(model, model.norm(x_BSD), targets_BS) / case.tokens).backward()

    return run


def case_name(case: Case) -> str:
    return next(name for name, one in CASES.items() if one is case)


def check(rows: list[Row]) -> list[str]:
    """Return what is wrong: more than twice the error of plain torch, or a replay that differs."""
    found = [
        f"{row['name']}: {row['error_over_plain']:.2f} times the error of plain torch"
        for row in rows
        if float(str(row.get("error_over_plain", 0.0))) > 2
    ]
    return found + [f"{row['name']}: differs" for row in rows if row.get("equals_eager_with_other_routing") is False]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="olmo8")
    parser.add_argument("--tiny", action="store_true", help="the case of a dry run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--documents", choices=["whole", "packed"], default="whole")
    parser.add_argument("--load", choices=["random", "uniform", "router"], default="random")
    parser.add_argument("--dispatcher", choices=["local", "rowwise"], default="local")
    parser.add_argument("--saved-rows", choices=["copy", "lease", "fetch"], default="copy")
    parser.add_argument("--packages", action="append", default=[], metavar="DIR")
    parser.add_argument("--limit-s", type=int, default=70, help="of each part")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="", metavar="HASH")
    options = parser.parse_args(arguments)
    options.case = "tiny" if options.tiny else options.case
    return options


def main() -> None:
    options = parse()
    for folder in options.packages:
        site.addsitedir(folder)
    case = CASES[options.case]
    setup = Setup(
        device=options.device,
        dispatcher=options.dispatcher,
        saved_rows=options.saved_rows,
        documents=options.documents,
        load=options.load,
    )
    where = about(options.device, options.commit)
    print(where, flush=True)
    functions: dict[str, Any] = {
        "attention": attention_rows,
        "cross_entropy": cross_entropy_rows,
        "norms": norm_rows,
        "step": step_rows,
        "graph": graph_rows,
    }
    rows: list[Row] = []
    found = []
    for part in options.parts.split(","):
        begin = time.perf_counter()
        try:
            with limited(options.limit_s, part):
                for row in functions[part](case, setup):
                    rows.append(row | {"case": options.case})
        except TimeoutError as late:
            found.append(str(late))
        print(f"{part}: {time.perf_counter() - begin:.1f} s", flush=True)
        if options.json:
            write_json(options.json, where, rows)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    found += check(rows)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
