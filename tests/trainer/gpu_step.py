"""The whole training step on one GPU: `python3 tests/trainer/gpu_step.py --case olmo8`, with torch, triton and numpy.

Times full steps of the trainer's own classes on random tokens: tokens/s, model TFLOP/s (see
`Case.model_flops_per_token`), peak memory. `--profile` adds where the time of one step goes, `--sync-check` every place
at which the host waits for the device from the third step on; the script fails if there is one. `--parts FILE`, what
gpu_parts.py wrote for the same case, holds the step to the sum of its parts (speed-1xh200.toml). `--tiny --device cpu`
is a dry run.
"""

import argparse
import json
import time
import tomllib
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from step_cases import CASES, Case, Clock, Setup, about, limited, make_batches, make_step

# isort: split
import coterie_trainer.step as step_module
import torch
from coterie_experts import GroupedExperts
from coterie_parallel import Optimizer
from coterie_routing import Router
from coterie_trainer.cross_entropy import cross_entropy_sum
from coterie_trainer.data.dataset import Batch
from coterie_trainer.layers import Attention, FeedForward, RMSNorm
from coterie_trainer.model import Decoder, dispatchers
from coterie_trainer.step import PendingResult, Stepper
from support.device_timing import write_json
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

LIMITS = Path(__file__).with_name("speed-1xh200.toml")
_PART = "part: "
_OF_MODULES = {
    Attention: "attention projections",
    GroupedExperts: "experts",
    Router: "router",
    RMSNorm: "norms and residual sums",
    FeedForward: "shared and dense feed-forward",
    nn.Embedding: "embedding",
}
# Kernels that are launched outside of any operation of torch, which is what a part is known by.
_LAUNCHED_ALONE = {"_update": "optimizer", "_squares": "optimizer"}
_BACKWARD_FUNCTION = 1
_NAME_WIDTH, _MOST_KERNELS = 100, 25
_ENGINE = "autograd::engine::evaluate_function"


def labelled(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its name in the profile."""

    def run(*args: Any, **named: Any) -> Any:
        with record_function(_PART + part):
            return function(*args, **named)

    return run


def label(model: Decoder, optimizer: Optimizer, stepper: Stepper) -> None:
    """Name the parts of the step; autograd tells to which of them a backward belongs."""
    for module in model.modules():
        for kind, part in _OF_MODULES.items():
            if isinstance(module, kind):
                module.forward = labelled(part, module.forward)
        if isinstance(module, RMSNorm):
            module.after_sum = labelled(_OF_MODULES[RMSNorm], module.after_sum)
            module.added_to = labelled(_OF_MODULES[RMSNorm], module.added_to)
        if isinstance(module, GroupedExperts):
            module.forward_tokens = labelled(_OF_MODULES[GroupedExperts], module.forward_tokens)
        if isinstance(module, Attention):
            module._mix = labelled("attention core, rotations and norms of heads", module._mix)
    for dispatcher in dispatchers(model):
        for name in ("dispatch_start", "dispatch_finish", "combine"):
            setattr(dispatcher, name, labelled("dispatch and combine", getattr(dispatcher, name)))
    optimizer.step = labelled("optimizer", optimizer.step)
    optimizer.zero_grad = labelled("gradients set to zero", optimizer.zero_grad)
    stepper._auxiliary = labelled("balance losses", stepper._auxiliary)


def table(events: list[FunctionEvent], device: str) -> dict[str, float]:
    """Return milliseconds by part: of kernels on a GPU, else of operations themselves."""
    makers: dict[int, tuple[float, str]] = {}
    for event in events:
        is_forward = event.scope != _BACKWARD_FUNCTION and not event.name.startswith(_ENGINE)
        if is_forward and event.sequence_nr >= 0:
            # Of the operations with one number the last is the one that made the node.
            seen = makers.get(event.sequence_nr, (-1.0, ""))
            makers[event.sequence_nr] = max(seen, (event.time_range.start, _part(event) or "rest"))
    spent: dict[str, float] = defaultdict(float)
    total = 0.0
    for event in events:
        if device == "cuda":
            if event.device_type == torch.autograd.DeviceType.CUDA:
                own_us = event.time_range.elapsed_us() if _is_kernel(event) else 0.0
                total += own_us
                if event.name in _LAUNCHED_ALONE:
                    spent[_LAUNCHED_ALONE[event.name]] += own_us
                continue
            # A named part holds the kernels of the operations inside as well.
            own_us = 0.0 if event.name.startswith(_PART) else sum(kernel.duration for kernel in event.kernels)
        else:
            own_us = event.self_cpu_time_total
            total += own_us
        if own_us:
            spent[_part(event) or _part_of_backward(event, makers) or "rest"] += own_us
    spent["rest"] += total - sum(spent.values())
    return {part: us / 1e3 for part, us in sorted(spent.items(), key=lambda item: -item[1])}


def kernels(events: list[FunctionEvent]) -> dict[str, float]:
    """Return milliseconds by kernel, those that take the longest in all first."""
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and _is_kernel(event):
            spent[event.name[:_NAME_WIDTH]] += event.time_range.elapsed_us() / 1e3
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:_MOST_KERNELS])


def _is_kernel(event: FunctionEvent) -> bool:
    return not event.name.startswith(_PART) and not getattr(event, "is_user_annotation", False)


def _part(event: FunctionEvent) -> str | None:
    """Return the innermost named part around an operation."""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith(_PART):
            return str(above.name).removeprefix(_PART)
        above = above.cpu_parent
    return None


def _part_of_backward(event: FunctionEvent, makers: dict[int, tuple[float, str]]) -> str | None:
    above: FunctionEvent | None = event
    while above is not None:
        if "AccumulateGrad" in above.name:
            return "gradients added up in fp32"
        if (above.scope == _BACKWARD_FUNCTION or above.name.startswith(_ENGINE)) and above.sequence_nr in makers:
            return makers[above.sequence_nr][1] + ", backward"
        above = above.cpu_parent
    return None


def profiled(run: Callable[[], object], device: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds of one call by part and by kernel."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, acc_events=True) as watch:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    events = list(watch.events())
    return table(events, device), kernels(events)


def waits_of(run: Callable[[], object]) -> list[str]:
    """Return where the host waits for the device in one call, "file:line in function", each place once."""
    found: dict[str, None] = {}

    def note(message: object, *args: object, **named: object) -> None:
        if "called a synchronizing" not in str(message):
            return
        own = [one for one in traceback.extract_stack() if "/packages/" in one.filename]
        place = own[-1] if own else traceback.extract_stack()[-2]
        found[f"{Path(place.filename).name}:{place.lineno} in {place.name}: {place.line}"] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return list(found)


def measure(case: Case, setup: Setup, options: argparse.Namespace) -> dict[str, object]:
    """Run a case and return its row."""
    begin = time.perf_counter()
    with limited(options.limit_s, "building the model"):
        model, optimizer, stepper = make_step(case, setup)
        batches = make_batches(case, setup)
    numel = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.case}: {numel / 1e9:.3f} B parameters, built in {time.perf_counter() - begin:.1f} s", flush=True)
    losses: list[float] = []
    on_the_way: list[PendingResult] = []

    def step(batches: list[Batch] = batches) -> None:
        # As the training loop does it: the numbers of a step are read when the next one has been queued.
        on_the_way.append(stepper.start(batches, learning_rate=1e-4))
        while len(on_the_way) > 1:
            losses.append(on_the_way.pop(0).read().loss)

    row: dict[str, object] = {
        "name": options.case,
        "documents": setup.documents,
        "load": setup.load,
        "dispatcher": setup.dispatcher,
        "saved_rows": setup.saved_rows,
        "recompute": list(setup.recompute),
        "moments": setup.moments,
        "compiled_dense": setup.compiled and setup.device == "cuda",
        "sequences": case.sequences,
        "micro_batches": case.micro_batches,
        "tokens_per_step": case.tokens * case.micro_batches,
    }
    with limited(options.limit_s, "the steps"):
        for number in range(2):
            first = time.perf_counter()
            step()
            print(f"warm-up step {number}: {time.perf_counter() - first:.2f} s, losses {losses}", flush=True)
        if setup.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step_ms = Clock(setup.device).ms(step, calls=options.steps, warmups=0)
    tokens_per_s = case.tokens * case.micro_batches / step_ms * 1e3
    row |= {"step_ms": step_ms, "tokens_per_s": tokens_per_s}
    row["model_tflops"] = tokens_per_s * case.model_flops_per_token() / 1e12
    if case.olmo_core:
        row["olmo_core_tokens_per_s"] = case.olmo_core
        row["over_olmo_core"] = tokens_per_s / case.olmo_core
    if setup.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    losses.append(on_the_way.pop().read().loss)
    assert all(0 < loss < 100 for loss in losses), losses
    few = batches[:2]  # more micro-batches are more of the same, and a profile of them does not end
    if options.sync_check and setup.device == "cuda":
        with limited(options.limit_s, "the check of waits"):
            row["host_waits"] = waits_of(lambda: step(few))
        print("host waits for the device at:", *(row["host_waits"] or ["no place"]), sep="\n  ", flush=True)
    if options.profile:
        with limited(options.limit_s, "the profile"):
            label(model, optimizer, stepper)
            step(few)
            parts_ms, kernels_ms = profiled(lambda: step(few), setup.device)
        row |= {"profile_micro_batches": len(few), "profile_ms": parts_ms, "kernels_ms": kernels_ms}
        total = sum(parts_ms.values())
        for part, part_ms in parts_ms.items():
            print(f"  {part_ms:9.3f} ms {part_ms / total:6.1%}  {part}", flush=True)
        for kernel, kernel_ms in kernels_ms.items():
            print(f"  {kernel_ms:9.3f} ms  {kernel}", flush=True)
    model.close()
    return row


def faults(row: dict[str, object], options: argparse.Namespace) -> list[str]:
    """Return what keeps the step from passing."""
    found = [f"the host waits at {place}" for place in row.get("host_waits", [])]
    if options.parts is not None:
        parts_ms = next(
            one["sum_of_parts_ms"] for one in _rows_of(options.parts) if one["name"] == f"step of {row['name']}"
        )
        row["sum_of_parts_ms"], row["over_parts"] = parts_ms, row["step_ms"] / parts_ms
        print(f"step over the sum of its parts: {row['over_parts']:.3f}", flush=True)
        limit = tomllib.loads(LIMITS.read_text(encoding="utf-8"))["limits"]["step over the sum of its parts"]
        if row["over_parts"] > limit:
            found.append(f"{row['over_parts']:.3f} of the sum of the parts is above {limit}")
    return found


def _rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="olmo8")
    parser.add_argument("--tiny", action="store_true", help="the case of a dry run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--sequences", type=int, help="of a micro-batch, of which a step then has fewer or more")
    parser.add_argument("--documents", choices=["whole", "packed"], default="whole")
    parser.add_argument("--load", choices=["random", "uniform", "router"], default="random")
    parser.add_argument("--dispatcher", choices=["local", "rowwise"], default="local")
    parser.add_argument("--saved-rows", choices=["copy", "lease", "fetch"], default="copy")
    parser.add_argument("--recompute", default="", help="parts, separated by commas")
    parser.add_argument("--moments", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--eager", action="store_true", help="do not compile the dense layers")
    parser.add_argument("--cross-entropy", choices=["auto", "torch", "chunked"], default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sync-check", action="store_true")
    parser.add_argument("--parts", type=Path, metavar="FILE", help="what gpu_parts.py wrote")
    parser.add_argument("--limit-s", type=int, default=120, help="of each part of this script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a row to this file")
    parser.add_argument("--commit", default="", metavar="HASH")
    options = parser.parse_args(arguments)
    options.case = "tiny" if options.tiny else options.case
    return options


def main() -> None:
    options = parse()
    setup = Setup(
        device=options.device,
        dispatcher=options.dispatcher,
        saved_rows=options.saved_rows,
        compiled=not options.eager,
        documents=options.documents,
        load=options.load,
        recompute=tuple(filter(None, options.recompute.split(","))),
        moments=options.moments,
    )
    where = about(options.device, options.commit)
    print(where, flush=True)
    with ExitStack() as stack:

        def loss(*args: Any) -> torch.Tensor:
            return cross_entropy_sum(*args, backend=options.cross_entropy)

        stack.enter_context(mock.patch.object(step_module, "cross_entropy_sum", labelled("cross-entropy", loss)))
        row = measure(CASES[options.case].with_sequences(options.sequences), setup, options)
    row["cross_entropy"] = options.cross_entropy
    found = faults(row, options)
    if options.json:
        write_json(options.json, where, [*_rows_of(options.json), row])
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
