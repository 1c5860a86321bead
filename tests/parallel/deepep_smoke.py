"""Try the installed DeepEP on one GPU: every value and gradient of the adapter against the reference.

    python3 tests/parallel/deepep_smoke.py [--parts v1x2 v2x1 v2x2] [--timeout-s 200] [--json FILE] [--commit HASH]

Parts run at the same time, each in processes of its own over gloo groups: v1x2 is Buffer of V1 with
two processes, v2x1 and v2x2 are EPBuffer or ElasticBuffer with one and two. V2 compiles its kernels at first use, for
which it needs nvcc (CUDA_HOME) and the headers of NCCL; two of its processes on one GPU need
NCCL_MULTI_RANK_GPU_ENABLE=1 and EP_DISABLE_GIN=1, which this script sets for that part, and NCCL 2.30.4 or newer loaded
before the one of torch, for example with LD_PRELOAD. The extension must be built for the torch that runs this.

Ranks take GPUs in turn. State: all parts were right with DeepEP 2.1.0 on one H200, v1x2 and v2x2 on two.
"""

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie_parallel.dispatch.deep_ep import DeepEPDispatcher

    from parallel.deep_ep_checks import Layer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages/parallel/src")]

PARTS = {"v1x2": 2, "v2x1": 1, "v2x2": 2}


def main() -> int:
    """Run the parts and print what each found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--timeout-s", type=float, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return _rank(options.parts[0], options.rank, options.store)

    from support.device_timing import about, write_json

    with tempfile.TemporaryDirectory() as folder:
        running = {part: _start(part, Path(folder)) for part in options.parts}
        deadline = time.monotonic() + options.timeout_s
        rows = [_outcome(part, processes, Path(folder), deadline) for part, processes in running.items()]
    for row in rows:
        state = "right" if row["right"] else f"WRONG, exit codes {row['codes']}"
        print(f"{row['part']}: {state}, {row['seconds']} s\n{row['said']}", flush=True)
    if options.json:
        write_json(options.json, about(options.commit), rows)
    return 0 if all(row["right"] for row in rows) else 1


def _start(part: str, folder: Path) -> list[subprocess.Popen[str]]:
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if part == "v2x2":
        environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "EP_DISABLE_GIN": "1"}
    command = [sys.executable, __file__, "--parts", part, "--store", str(folder / f"store-{part}"), "--rank"]
    processes = []
    for rank in range(PARTS[part]):
        with (folder / f"{part}-{rank}").open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(rank)], env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
                )
            )
    return processes


def _outcome(part: str, processes: list[subprocess.Popen[str]], folder: Path, deadline: float) -> dict[str, object]:
    start = time.monotonic()
    codes: list[object] = []
    for process in processes:
        try:
            codes.append(process.wait(max(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append("late")
    for process in processes:
        process.kill()
        process.wait()
    said = "\n".join((folder / f"{part}-{rank}").read_text()[-4000:] for rank in range(len(processes)))
    return {
        "part": part,
        "right": codes == [0] * len(codes),
        "codes": codes,
        "seconds": round(time.monotonic() - start, 1),
        "said": said,
    }


def _rank(part: str, rank: int, store: str) -> int:
    import torch
    import torch.distributed as dist

    world = PARTS[part]
    faulthandler.enable()  # a broken extension ends the process without a word
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    start = time.monotonic()
    try:
        problems = _problems(part, rank, world)
    except Exception:
        problems = [traceback.format_exc()]
    print(f"rank {rank}: {len(problems)} problems, {time.monotonic() - start:.1f} s", *problems, sep="\n")
    # The destructors of a broken extension may hang.
    sys.stdout.flush()
    os._exit(1 if problems else 0)


def _problems(part: str, rank: int, world: int) -> list[str]:
    import torch
    from coterie_parallel import DispatchOptions
    from coterie_parallel.dispatch.deep_ep import DeepEPDispatcher, DeepEPOptions

    from parallel.deep_ep_checks import BASE, Layer, whole_axis

    import deep_ep  # isort: skip

    surface = "Buffer" if part == "v1x2" else ("EPBuffer" if hasattr(deep_ep, "EPBuffer") else "ElasticBuffer")
    print(f"deep_ep {deep_ep.__version__}, {surface}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    uneven = replace(BASE, name="uneven", num_tokens=(65, 129), experts_per_rank=8, top_k=8, alignment=128, routed=0.9)
    settings = [(DeepEPOptions(surface=surface, hybrid=False, max_tokens=160), uneven)]
    settings.append((settings[0][0], replace(uneven, name="empty_rank", num_tokens=(0, 33))))
    settings.append((replace(settings[0][0], payload="fp8"), uneven))
    found = []
    made: dict[DeepEPOptions, DeepEPDispatcher] = {}
    for options, case in settings:
        begun = time.monotonic()
        if options not in made:
            made[options] = DeepEPDispatcher(
                num_experts=8 * world,
                axis=whole_axis(rank, world),
                alignment=128,
                options=DispatchOptions(deep_ep=options),
            )
        dispatcher = made[options]
        layers = [Layer(dispatcher, case, rank, world, number, "cuda") for number in range(2)]
        for layer in reversed(layers):
            layer.backward()
        name = f"{case.name}, {options.payload}"
        problems = [f"{name}: {problem}" for layer in layers for problem in layer.problems()]
        if dispatcher.grow() is not None:
            problems.append(f"{name}: grow has something to say")
        problems += [f"{name}: {text}" for text in _waits(dispatcher, layers[0])]
        print(f"{name}: {len(problems)} problems, {time.monotonic() - begun:.1f} s", flush=True)
        found += problems
    for dispatcher in made.values():
        dispatcher.close()
    return found


def _waits(dispatcher: "DeepEPDispatcher", layer: "Layer") -> list[str]:
    """Return what waits for the device in one more layer, forward and backward."""
    import torch

    x_TD, ids_TK = layer.x_TD.detach().clone().requires_grad_(), layer.own.ids_TK.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = dispatcher.dispatch(x_TD, ids_TK, layer.weights_TK)
        dispatcher.combine(sent.rows_RD * 2, sent.handle).sum().backward()
    except RuntimeError:
        return [traceback.format_exc()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


if __name__ == "__main__":
    raise SystemExit(main())
