"""All that takes several GPUs of one host: `python3 tests/multi_gpu.py --ranks 2`, with torch, triton and numpy.

    layouts      steps in the layouts of tests/layouts, fp32 and bf16, against one rank (needs pytest and hypothesis)
    conformance  the suite of the dispatchers: all_to_all, rowwise, and deep_ep where it is installed
    dispatch     dispatch and combine alone, against the rate of the link and against all_to_all; rows that are written
                 where peers read them; a CUDA graph
    sweep        tokens/s of a model with 8, 32, 64 and 128 experts
    fsdp         resident experts against FSDP2
    overlap      exchanges and new weights behind other work; rows copied, leased or fetched
    pipeline     schedules: tokens/s and peak memory
    link         only with `--parts link`: what bounds a combine; copies, pulls and pushes beside what was expected

Each part starts processes of its own, one a GPU over NCCL, or with `--device cpu` over gloo, is ended after a time of
its own, and does not stop the others. Results are checked before anything is timed. Times are between events of each
GPU: the median of the repeats, of the slowest rank. A goal of speed that is missed is shown and is no fault; the exit
code is 1 if a part found something wrong, or was not done. `--json FOLDER` writes a file for each part, with the rows
that there were. `--tiny --device cpu` is a dry run.
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]
# Nothing here needs NVLink multicast, and a process that is killed while it uses it can leave the GPUs of a host
# unusable. Each library asks for its own variable.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

if TYPE_CHECKING:
    from multi_gpu_parts.bench import Bench

__all__ = ["DEFAULT_PARTS", "LIMITS_S", "main"]

LIMITS_S = {
    "layouts": 130,
    "conformance": 80,
    "dispatch": 70,
    "sweep": 90,
    "fsdp": 70,
    "overlap": 80,
    "pipeline": 70,
    "link": 60,
}
"""The longest that each part may take on two ranks, in seconds; more ranks have half as much more."""

DEFAULT_PARTS = [name for name in LIMITS_S if name != "link"]
"""Those that run when none is named: what looks for causes is not among them."""

_WHOLE_LIMIT_S = 345
_Part = Callable[["Bench"], None]


def main(arguments: list[str] | None = None, more_parts: dict[str, _Part] | None = None) -> int:
    """Run the parts one after the other; return 1 if one of them failed.

    Args:
        arguments: those of the command line by default.
        more_parts: by name, for `--parts`; importable.
    """
    more_parts = more_parts or {}
    options = _options(arguments, [*LIMITS_S, *more_parts])
    from multi_gpu_parts.bench import Settings

    settings = Settings(
        world=options.ranks,
        device=options.device,
        tiny=options.tiny,
        compiled=not options.eager,
        commit=options.commit,
    )
    deadline_s = time.monotonic() + options.limit
    failed = []
    for name in options.parts:
        left_s = deadline_s - time.monotonic()
        own_s = LIMITS_S.get(name, 60) * (1 if options.ranks == 2 else 1.5)
        part = more_parts.get(name) or import_module(f"multi_gpu_parts.{name}").run
        faults = _run(name, part, settings, min(left_s, own_s), options.json)
        failed += [name] if faults else []
    print(f"\n{len(options.parts) - len(failed)} of {len(options.parts)} parts right", *failed, sep="\n  failed: ")
    return 1 if failed else 0


def _run(name: str, part: _Part, settings: Any, limit_s: float, folder: Path | None) -> list[str]:
    """Run a part, print what it says, write its file, and return its faults."""
    from multi_gpu_parts.ranks import run_part
    from support.device_timing import write_json

    print(f"\n== {name}, {settings.world} ranks", flush=True)
    if limit_s <= 1:
        faults = ["not run: the time of --limit is over"]
        print("FAULT", *faults, flush=True)
        return faults
    begin = time.monotonic()
    about: dict[str, object] = {"date": datetime.date.today().isoformat()}
    rows: list[dict[str, object]] = []

    def listen(kind: str, value: Any) -> None:
        if kind == "about":
            about.update(value)
        elif kind == "row":
            rows.append(value)
            print("  ".join(f"{key} {_shown(one)}" for key, one in value.items()), flush=True)
        else:
            print(value, flush=True)

    faults = run_part(part, settings, limit_s, listen)
    for fault in faults:
        print("FAULT", fault, flush=True)
    seconds = time.monotonic() - begin
    print(f"{name}: {'FAILED' if faults else 'right'}, {seconds:.1f} s", flush=True)
    if folder is not None:
        kind = str(about.get("device", settings.device)).split()[-1].lower()
        file = folder / f"multi-gpu-{name}-{settings.world}x{kind}.json"
        write_json(file, {**about, "part": name, "seconds": round(seconds, 1), "faults": faults}, rows)
    return faults


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _options(arguments: list[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=[2, 4, 8], default=2)
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=DEFAULT_PARTS,
        metavar="NAME,NAME",
        help="default: all but link",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the sizes of a dry run")
    parser.add_argument("--eager", action="store_true", help="do not compile the dense layers")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write a file for each part there")
    parser.add_argument("--commit", default="", metavar="HASH", help="commit of these sources, for the files")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"of all parts (default: {_WHOLE_LIMIT_S} on 2 ranks, else twice)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in names]
    if unknown:
        parser.error(f"--parts ({', '.join(unknown)}) must be of {', '.join(names)}")
    if options.limit is None:
        options.limit = _WHOLE_LIMIT_S * (1 if options.ranks == 2 else 2)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
