"""The training step on GPUs against the CPU: `python3 tests/gpu.py`, with torch, numpy and the sources of this clone.

Part 1, one GPU: in fp32 the losses and gradient norms of several steps are those of the CPU; in bf16 the loss falls.
With a second GPU: kernels on it while the first is current give the same bits.
Part 2, for every further GPU up to four, through NCCL: each data and expert layout gives the numbers of one GPU, and a
checkpoint that all ranks wrote is read back by them. Prints one line for each comparison; the first fault raises.
`--json FILE` also writes the differences with date and versions, as tests/trainer/results/ keeps them.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from coterie_experts import ExpertsConfig, GroupedExperts  # noqa: E402
from coterie_parallel import Mesh, make_plan  # noqa: E402
from coterie_routing import Router, RouterConfig  # noqa: E402
from coterie_routing.permutation import permute, unpermute  # noqa: E402
from coterie_routing.row_map import map_rows  # noqa: E402
from coterie_trainer.training import Run  # noqa: E402
from trainer.tiny import tiny_config, write_tokens  # noqa: E402

STEPS = 8
# The largest difference seen was 9e-8, the rounding of a loss in fp32.
TOLERANCE = 1e-6
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


def compare(name: str, expected: list[dict[str, float]], found: list[dict[str, float]]) -> dict[str, object]:
    """Return the largest relative difference of each number over the steps; raise if one is above TOLERANCE."""
    differences = {
        number: max(abs(a[number] - b[number]) / abs(a[number]) for a, b in zip(expected, found, strict=True))
        for number in NUMBERS
    }
    print(name, {number: f"{value:.1e}" for number, value in differences.items()}, flush=True)
    assert max(differences.values()) <= TOLERANCE, differences
    return {"name": name, "largest_relative_difference": differences}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the differences to FILE")
    parser.add_argument("--commit", default="", metavar="HASH", help="commit of these sources, for the file")
    options = parser.parse_args()
    assert torch.cuda.is_available(), "this needs a GPU"
    about = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": options.commit,
    }
    print(about, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        write_tokens(Path(temporary) / "tokens")
        check_another_device()
        comparisons = [*check_one_gpu(Path(temporary)), *check_several_gpus(Path(temporary))]
    if options.json:
        options.json.write_text(json.dumps({**about, "comparisons": comparisons}, indent=2) + "\n", encoding="utf-8")


def check_one_gpu(base: Path) -> list[dict[str, object]]:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    found = [
        compare(f"fp32, one GPU against the CPU{part}", train(base / "cpu", cpu, 1, 0), train(base / "one", gpu, 1, 0))
        for part in ("", ", resumed")
    ]
    half = train(base / "half", gpu, 1, 0, model__d_model=64, model__expert_hidden=32, dtype="bfloat16")
    losses = [step["loss"] for step in half]
    print("bf16", [round(loss, 4) for loss in losses], flush=True)
    assert losses[-1] < losses[0] - 0.05
    return [*found, {"name": "bf16, one GPU", "losses": losses}]


def check_another_device() -> None:
    """Triton launches on the current device, whatever its arguments are on: each operation has to see to that."""
    if torch.cuda.device_count() < 2:
        return
    from coterie_trainer.cross_entropy.triton_softmax import losses_and_gradients

    def step(device: torch.device) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x_TD, target_TD = (torch.randn(300, 256, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        router = Router(RouterConfig(d_model=256, num_experts=8, top_k=2, backend="triton")).to(device)
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * 0.05)
        config = ExpertsConfig(d_model=256, d_hidden=192, num_experts=8, backend="triton")
        experts = GroupedExperts(config, device=device, dtype=torch.bfloat16)
        later: list[Callable[[], None]] = []
        experts.defer_weight_gradients = later.append
        x_TD.requires_grad_()
        routing = router(x_TD)
        row_map = map_rows(routing.ids_TK, 8, backend="triton")
        y_TD = experts.forward_tokens(x_TD, routing.ids_TK, routing.weights_TK)
        y_TD = y_TD + unpermute(permute(x_TD, row_map, backend="triton"), row_map, backend="triton")
        logits_TD, losses_T = y_TD.detach().clone(), torch.empty(300, device=device)
        losses_and_gradients(logits_TD, routing.ids_TK[:, 0].contiguous(), losses_T, True)
        (y_TD * target_TD).sum().backward()
        later.pop()()
        parameters = (*router.parameters(), *experts.parameters())
        return [y_TD.detach(), x_TD.grad, losses_T, logits_TD, *(one.grad for one in parameters)]

    torch.cuda.set_device(0)
    first, second = (step(torch.device("cuda", index)) for index in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one.cpu(), other.cpu())
    assert torch.cuda.current_device() == 0
    print("kernels on the second GPU while the first is current: the same bits", flush=True)


def check_several_gpus(base: Path) -> list[dict[str, object]]:
    found = []
    for world in (2, 4):
        if torch.cuda.device_count() < world:
            break
        layouts = [(world, expert) for expert in (1, 2, 4) if expert <= world]
        mp.spawn(rank_main, (world, str(base), 29400 + os.getpid() % 100 + world, layouts), nprocs=world)
        one = train(base / f"one for {world}", torch.device("cuda", 0), 1, 0)
        more = train(base / f"one for {world}", torch.device("cuda", 0), 1, 0)
        for data, expert in layouts:
            name = f"fp32, data {data} x expert {expert} against one GPU"
            numbers, numbers_resumed = torch.load(base / f"data{data}-expert{expert}" / "numbers.pt")
            found += [compare(name, one, numbers), compare(f"{name}, resumed", more, numbers_resumed)]
    return found


if __name__ == "__main__":
    main()
