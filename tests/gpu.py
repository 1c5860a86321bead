"""The training step on GPUs against the CPU: `python3 tests/gpu.py`, with torch, numpy and the sources of this clone.

Part 1, one GPU: in fp32 the losses and gradient norms of several steps are those of the CPU; in bf16 the loss falls.
Part 2, for every further GPU up to four, through NCCL: each data and expert layout gives the numbers of one GPU, and a
checkpoint that all ranks wrote continues on one GPU. Prints one line for each comparison; the first fault raises.
"""

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from coterie_parallel import Mesh, make_plan  # noqa: E402
from coterie_trainer.training import Run  # noqa: E402
from trainer.tiny import tiny_config, write_tokens  # noqa: E402

STEPS = 8
NUMBERS = ("loss", "balance_loss", "z_loss", "gradient_norm", "load_imbalance")


def train(folder: Path, device: torch.device, world: int, rank: int, **changes: object) -> list[dict[str, float]]:
    """Run STEPS steps from the newest checkpoint of the folder, save one, and return the numbers of each step."""
    config = tiny_config(folder, folder.parent / "tokens", train__steps=STEPS, **changes)
    with Mesh(make_plan(config.parallel, world), rank, timeout_s=120.0, device=device) as mesh:
        run = Run(config, mesh, device)
        latest = run.checkpoints.latest_step()
        if latest is not None:
            run.load(latest)
        found = []
        for step in range(run.step, run.step + STEPS):
            result = run.stepper.run(run.batches.step(step), learning_rate=1e-3)
            found.append({name: getattr(result, name) for name in NUMBERS})
        run.step += STEPS
        run.save()
        return found


def compare(name: str, expected: list[dict[str, float]], found: list[dict[str, float]], tolerance: float) -> None:
    """Raise if a number of any step differs by more than the relative tolerance; else print the largest difference."""
    differences = {
        number: max(abs(a[number] - b[number]) / abs(a[number]) for a, b in zip(expected, found, strict=True))
        for number in NUMBERS
    }
    print(name, {number: f"{value:.1e}" for number, value in differences.items()}, flush=True)
    assert max(differences.values()) <= tolerance, differences


def rank_main(rank: int, world: int, base: str, port: int, layouts: list[tuple[int, int]]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world, device_id=device)
    for data, expert in layouts:
        folder = Path(base) / f"data{data}-expert{expert}"
        layout = dict(parallel__data=data, parallel__expert=expert)
        found = train(folder, device, world, rank, **layout)
        more = train(folder, device, world, rank, **layout)
        if rank == 0:
            torch.save((found, more), folder / "numbers.pt")
    dist.destroy_process_group()


def main() -> None:
    assert torch.cuda.is_available(), "this needs a GPU"
    print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.device_count(), "GPUs", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        write_tokens(base / "tokens")
        gpu = torch.device("cuda", 0)
        cpu = train(base / "cpu", torch.device("cpu"), 1, 0)
        one = train(base / "one", gpu, 1, 0)
        compare("fp32, one GPU against the CPU", cpu, one, 1e-4)
        more = train(base / "one", gpu, 1, 0)
        compare("fp32, resumed", train(base / "cpu", torch.device("cpu"), 1, 0), more, 1e-4)
        half = train(base / "half", gpu, 1, 0, model__d_model=64, model__expert_hidden=32, dtype="bfloat16")
        print("bf16", [round(step["loss"], 4) for step in half], flush=True)
        assert half[-1]["loss"] < half[0]["loss"] - 0.05
        for world in (2, 4):
            if torch.cuda.device_count() < world:
                break
            layouts = [(world, expert) for expert in (1, 2, 4) if expert <= world]
            mp.spawn(rank_main, (world, temporary, 29400 + os.getpid() % 100 + world, layouts), nprocs=world)
            for data, expert in layouts:
                folder = base / f"data{data}-expert{expert}"
                found, again = torch.load(folder / "numbers.pt")
                compare(f"fp32, data {data} x expert {expert} against one GPU", one, found, 1e-4)
                compare(f"fp32, data {data} x expert {expert}, resumed", more, again, 1e-4)


if __name__ == "__main__":
    main()
