"""The row-wise dispatcher on its Triton kernels, for a process with TRITON_INTERPRET=1: see test_rowwise_ranks.py."""

import pytest
import torch
from coterie_parallel import Axis, DispatchOptions, Mesh, ParallelConfig, make_plan
from coterie_parallel.conformance import CASES, conformance_problems
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from coterie_parallel.dispatch.rowwise.used import copy_used, triton_kernels
from support.ranks import run_ranks

SMALL = [case for case in CASES if case.name in ("empty_rank", "some_unrouted", "aligned_16")]


class OnTriton(RowwiseDispatcher):
    kernels = "triton"


def test_one_rank_conforms() -> None:
    options = DispatchOptions(saved_rows="fetch")
    assert conformance_problems(OnTriton, Axis.single("expert"), cases=SMALL[-1:], options=options) == []


def _checks(rank: int, world: int) -> list[str]:
    with Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=100) as mesh:
        problems = []
        for options in (DispatchOptions(), DispatchOptions(overflow="drop", capacity_factor=2.0, saved_rows="lease")):
            problems += conformance_problems(OnTriton, mesh.axis("expert"), cases=SMALL[:1], options=options)
        return problems


def test_two_processes_conform() -> None:
    assert run_ranks(_checks, 2, timeout_s=200) == [[], []]


@pytest.mark.parametrize("shape", [(9, 3), (700, 5), (9,), (4, 0), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_what_is_used_is_copied_and_nothing_else(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert triton_kernels._BLOCK < 700 * 5
    source = torch.randint(1, 100, shape).to(dtype)
    for end in {0, shape[0] // 2, shape[0]}:
        target = torch.zeros((shape[0] + 2, *shape[1:]), dtype=dtype)
        copy_used(source, target, torch.tensor([0, end], dtype=torch.int32), backend="triton")
        assert torch.equal(target[:end], source[:end])
        assert not target[end:].any()
