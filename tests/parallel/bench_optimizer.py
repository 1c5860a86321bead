"""Our optimizer step against torch's: on one rank AdamW with clipping, on several DDP with AdamW, sharded and not."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from coterie_parallel import DENSE, AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from support.speed import Pair
from torch import Tensor, nn

NUM_BLOCKS, WIDTH = 4, 512
CONFIG = AdamWConfig(learning_rate=1e-4, weight_decay=0.1, gradient_clip=1.0)
TORCH_SETTINGS = {"lr": CONFIG.learning_rate, "betas": CONFIG.betas, "eps": CONFIG.eps, "fused": True}


class Given(nn.Module):
    """Parameters like those of a small dense model, 4.2 million, and a loss whose gradients are given numbers."""

    def __init__(self, rank: int, factor: float) -> None:
        super().__init__()
        shapes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH), (WIDTH,)] * NUM_BLOCKS
        weights = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape, generator=weights) for shape in shapes])
        given = torch.Generator().manual_seed(1 + rank)
        self.given = [factor * torch.randn(shape, generator=given) for shape in shapes]

    def forward(self) -> Tensor:
        return torch.stack([torch.dot(p.flatten(), g.flatten()) for p, g in zip(self.weights, self.given, strict=True)])

    def groups(self) -> list[dict[str, object]]:
        """Return the parameters as torch's optimizers take them, with the decays that ours has by default."""
        matrices = [parameter for parameter in self.weights if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.weights if parameter.ndim < 2]
        return [
            {"params": matrices, "weight_decay": CONFIG.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]


def _make_ours(model: Given, rank: int, world: int) -> Optimizer:
    mesh = Mesh(make_plan(ParallelConfig(), world), rank, timeout_s=60)
    return Optimizer(model.named_parameters(), dict.fromkeys(dict(model.named_parameters()), DENSE), mesh, CONFIG)


def _assert_same_weights(ours: Given, theirs: Given) -> None:
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def bench_one_rank() -> Iterator[Pair]:
    ours, theirs = Given(0, 1.0), Given(0, 1.0)
    optimizer = _make_ours(ours, 0, 1)
    reference = torch.optim.AdamW(theirs.groups(), **TORCH_SETTINGS)  # type: ignore[arg-type]
    for model in (ours, theirs):
        model().sum().backward()

    def torch_step() -> None:
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()

    def check() -> None:
        optimizer.step()
        torch_step()
        _assert_same_weights(ours, theirs)

    yield Pair("optimizer step, one rank: clip_grad_norm_ and fused AdamW", optimizer.step, torch_step, check)


def bench_two_ranks() -> Iterator[Pair]:
    yield from _on_ranks(2)


def bench_four_ranks() -> Iterator[Pair]:
    yield from _on_ranks(4)


def _on_ranks(world: int) -> Iterator[Pair]:
    for reference in ("DDP and AdamW", "DDP and ZeroRedundancyOptimizer"):
        with _ranks(world, reference) as call:
            yield Pair(
                f"backward and optimizer step, {world} ranks: {reference}",
                ours=partial(call, "ours"),
                reference=partial(call, "reference"),
                check=partial(call, "check"),
            )


@contextmanager
def _ranks(world: int, reference: str) -> Iterator[Callable[[str], None]]:
    """Start ranks that know both sides, and give a function that runs one of them on all and waits for the last."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "coterie_parallel"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(world)]
        processes = [
            context.Process(
                target=_serve, args=(rank, world, str(Path(folder) / "store"), reference, pipes[rank][1]), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()

        def call(name: str) -> None:
            for ours, _ in pipes:
                ours.send(name)
            for process, (ours, _) in zip(processes, pipes, strict=True):
                while not ours.poll(1.0):
                    assert process.is_alive(), f"a rank ended with exit code {process.exitcode}"
                fault = ours.recv()
                assert fault is None, fault

        try:
            yield call
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(rank: int, world: int, store: str, reference: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    sides = _sides(rank, world, reference)
    while True:
        name = end.recv()
        try:
            sides[name]()
            end.send(None)
        except Exception as error:
            end.send(f"rank {rank}: {type(error).__name__}: {error}")


def _sides(rank: int, world: int, reference: str) -> dict[str, Callable[[], None]]:
    ours, theirs = Given(rank, 1.0), Given(rank, float(world))  # DDP divides by the number of ranks, we do not
    optimizer = _make_ours(ours, rank, world)
    wrapped = nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    torch_optimizer: torch.optim.Optimizer
    if reference == "DDP and AdamW":
        torch_optimizer = torch.optim.AdamW(theirs.groups(), **TORCH_SETTINGS)  # type: ignore[arg-type]
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        torch_optimizer = ZeroRedundancyOptimizer(theirs.groups(), torch.optim.AdamW, **TORCH_SETTINGS)

    def our_step() -> None:
        optimizer.zero_grad()
        loss = ours().sum()
        with optimizer.micro_batch(is_last=True):
            loss.backward()
        optimizer.step()

    def torch_step() -> None:
        torch_optimizer.zero_grad()
        wrapped().sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        torch_optimizer.step()

    def check() -> None:
        our_step()
        torch_step()
        _assert_same_weights(ours, theirs)

    return {"ours": our_step, "reference": torch_step, "check": check}
