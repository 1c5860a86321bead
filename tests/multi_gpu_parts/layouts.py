"""The layout matrix of tests/layouts on these ranks: fp32 against one rank to 1e-5, losses of bf16 within rounding."""

import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from coterie_parallel import Mesh, Plan, make_plan
from coterie_trainer.config import Config
from coterie_trainer.training import Run
from coterie_trainer.verify.comparison import Comparison, compare
from coterie_trainer.verify.layout import Layout, layout_config, parse_layout, reference_config
from coterie_trainer.verify.running import Outcome, outcome_of
from coterie_trainer.verify.scaling import write_vocabulary
from layouts.models import VARIANTS, small_config
from layouts.test_layouts import LAYOUTS, PIPELINES

from multi_gpu_parts.bench import Bench

__all__ = ["run"]

_WIDEST = "data=8 accumulation=4"  # all degrees of the matrix divide these
_TINY = ("data=2 expert=2 dispatcher=rowwise", "pipeline=2 data=1 accumulation=4")
_BF16_TOLERANCE = 2.0**-8


def run(bench: Bench) -> None:
    """Run every layout of exactly these ranks, and on two ranks those of one as well."""
    begin = time.monotonic()
    cases = _cases(bench)
    bench.say(f"{len(cases)} layouts in fp32 and bf16")
    with tempfile.TemporaryDirectory(prefix="coterie-") as temporary:
        folder = Path(bench.gather(temporary)[0])
        if bench.rank == 0:
            write_vocabulary(folder / "tokens")
        bench.barrier()
        meshes = _Meshes(bench)
        for dtype in ("float32", "bfloat16"):
            expected: dict[tuple[str, int], Outcome | None] = {}
            wrong = 0
            for variant, layout in cases[:1] if bench.tiny and dtype == "bfloat16" else cases:
                case = partial(_run_case, bench, meshes, folder, variant, layout, dtype, expected)
                wrong += not bench.attempt(f"{dtype}, {layout}", case)
            seconds = time.monotonic() - begin
            bench.row(name=f"layouts, {dtype}", layouts=len(cases), wrong=wrong, seconds=seconds)
        bench.barrier()
        meshes.close()


class _Meshes:
    """The meshes of this rank, one for each way to fold the ranks: to make groups takes longer than the steps."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._found: dict[Plan, Mesh] = {}
        self._stack = ExitStack()

    def of(self, plan: Plan) -> Mesh:
        """Return the mesh of a plan; all its ranks call."""
        if plan not in self._found:
            bench = self._bench
            mesh = Mesh(plan, bench.rank, timeout_s=bench.settings.timeout_s, device=bench.device)
            self._found[plan] = self._stack.enter_context(mesh)
        return self._found[plan]

    def close(self) -> None:
        """Destroy the groups of all of them."""
        self._stack.close()


def _cases(bench: Bench) -> list[tuple[str, Layout]]:
    texts = _TINY if bench.tiny else (*LAYOUTS, *PIPELINES)
    named = [("bias", text) for text in texts]
    if not bench.tiny:
        # 64 experts over all ranks, by both ways to move rows.
        everywhere = f"data={bench.world} expert={bench.world}"
        named += [("no_auxiliary_loss", f"{everywhere} dispatcher={name}") for name in ("all_to_all", "rowwise")]
        named.append(("bias", f"{everywhere} accumulation=4 gradient_sharding=true"))
        whole = "pipeline=2 data=2 expert=2 accumulation=4 schedule=zbv"
        named += [(variant, f"{whole} dispatcher=rowwise") for variant in VARIANTS if variant != "bias"]
    found = []
    for variant, text in named:
        layout, problems = parse_layout(text)
        assert layout is not None, problems
        if layout.world == bench.world or layout.world < bench.world == 2:
            found.append((variant, layout))
    return found


def _run_case(
    bench: Bench,
    meshes: _Meshes,
    folder: Path,
    variant: str,
    layout: Layout,
    dtype: str,
    expected: dict[tuple[str, int], Outcome | None],
) -> bool:
    begin = time.monotonic()
    small = small_config(folder, list(dict.fromkeys([_WIDEST, str(layout)])), variant)
    small = replace(small, device=bench.device.type, dtype=dtype)
    key = variant, small.model.num_layers
    if key not in expected:
        expected[key] = _run_on(bench, meshes, reference_config(small), 1)
    found = _run_on(bench, meshes, layout_config(layout, small), layout.world)
    bench.barrier()
    faults: list[str] = []
    row: dict[str, object] = {}
    wanted = expected[key]
    if wanted is not None and found is not None:  # on rank 0
        comparison = compare(wanted, found)
        row = _figures(comparison, wanted, found)
        faults = comparison.problems() if dtype == "float32" else _bf16_problems(wanted, found)
    faults = bench.gather(faults)[0]
    seconds = time.monotonic() - begin
    name = f"{dtype}, {layout}" + (f", model {variant}" if variant != "bias" else "")
    bench.row(name=name, verdict="DIFFERS" if faults else "same", **row, seconds=seconds)
    if bench.rank == 0:
        for text in faults:
            bench.fault(f"{name}: {text}")
    return not faults


def _figures(comparison: Comparison, wanted: Outcome, found: Outcome) -> dict[str, object]:
    return {"loss_difference": _loss_difference(wanted, found), "largest_differences": comparison.largest}


def _loss_difference(wanted: Outcome, found: Outcome) -> float:
    return max(abs(b.loss - a.loss) / abs(a.loss) for a, b in zip(wanted.steps, found.steps, strict=True))


def _bf16_problems(wanted: Outcome, found: Outcome) -> list[str]:
    """Judge losses and replicas only: a router that rounds otherwise sends tokens elsewhere."""
    problems = [f"replicas differ: {text}" for text in found.replica_problems[:2]]
    off = _loss_difference(wanted, found)
    if not off <= _BF16_TOLERANCE:
        problems.append(f"the loss differs by {off:.1e}, more than {_BF16_TOLERANCE:.1e}")
    return problems


def _run_on(bench: Bench, meshes: _Meshes, config: Config, world: int, num_steps: int = 3) -> Outcome | None:
    """Run a layout on the devices of the first ``world`` ranks; what one can do alone the others leave to rank 0."""
    if bench.rank >= world:
        return None
    assert world in (1, bench.world)
    plan = make_plan(config.parallel, world, num_experts=config.model.num_experts, top_k=config.model.top_k)
    mesh = meshes.of(plan)
    with closing(Run(config, mesh, bench.device)) as trained:
        return outcome_of(trained, num_steps)
