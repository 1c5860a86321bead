"""Steps with resident experts against FSDP2, which gathers them: an expert-heavy model on four gloo ranks."""

from collections.abc import Callable, Iterator
from functools import partial

from coterie_parallel import Mesh, ParallelConfig, make_plan
from coterie_trainer.data_parallel_bench import DataParallelSizes, _Runner, _ways
from support.bench_ranks import sides_on_ranks
from support.speed import Pair

WORLD = 4
SIZES = DataParallelSizes()  # 128 experts, top-4


def bench_data_parallel() -> Iterator[Pair]:
    with sides_on_ranks(_sides, WORLD) as run:
        yield Pair(
            f"step with resident experts, {SIZES.num_experts} experts on {WORLD} ranks: FSDP2",
            ours=partial(run, "ours"),
            reference=partial(run, "reference"),
            check=partial(run, "check"),
        )


def _sides(rank: int, world: int) -> dict[str, Callable[[], None]]:
    axis = Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=60).axis("expert")
    by_name = {way.name: way for way in _ways(world)}
    ours, reference = (_Runner(by_name[name], axis, SIZES) for name in (f"resident, expert = {world}", "fsdp"))

    def check() -> None:
        ours.timed_step()
        reference.timed_step()
        for one, other in zip(ours.losses, reference.losses, strict=True):
            assert abs(one - other) <= 1e-5 * abs(other), (one, other)

    return {"ours": ours.timed_step, "reference": reference.timed_step, "check": check}
