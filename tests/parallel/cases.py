"""Cases that the tests of coterie-parallel share."""

from dataclasses import dataclass

import torch
from coterie_parallel import DeepEPOptions, ParallelConfig
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """A routing small enough to write its rows down: (source, token, choice), None for padding, for each rank."""

    name: str
    ids_by_source: list[list[list[int]]]
    num_experts: int
    alignment: int = 1
    rows_by_rank: list[list[tuple[int, int, int] | None]]
    offsets_by_rank: list[list[int]]


_IDS = [
    [[2, 0], [0, 3]],
    [[0, 1], [-1, 2], [3, 0]],
]
_EXPERT_0 = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 1)]
_EXPERT_1 = [(1, 0, 1)]
_EXPERT_2 = [(0, 0, 0), (1, 1, 1)]
_EXPERT_3 = [(0, 1, 1), (1, 2, 0)]

LAYOUTS = [
    LayoutCase(
        name="two ranks",
        ids_by_source=_IDS,
        num_experts=4,
        rows_by_rank=[_EXPERT_0 + _EXPERT_1, _EXPERT_2 + _EXPERT_3],
        offsets_by_rank=[[4, 5], [2, 4]],
    ),
    LayoutCase(
        name="two ranks, aligned to 4",
        ids_by_source=_IDS,
        num_experts=4,
        alignment=4,
        rows_by_rank=[
            [*_EXPERT_0, *_EXPERT_1, None, None, None],
            [*_EXPERT_2, None, None, *_EXPERT_3, None, None],
        ],
        offsets_by_rank=[[4, 8], [4, 8]],
    ),
    LayoutCase(
        name="two ranks, the second without tokens, the third expert without rows",
        ids_by_source=[[[3, 1], [1, 0]], []],
        num_experts=4,
        alignment=2,
        rows_by_rank=[[(0, 1, 1), None, (0, 0, 1), (0, 1, 0)], [(0, 0, 0), None]],
        offsets_by_rank=[[2, 4], [0, 2]],
    ),
    LayoutCase(
        name="one rank, two choices of a token on one expert",
        ids_by_source=[[[1, 1], [0, -1]]],
        num_experts=3,
        rows_by_rank=[[(0, 1, 0), (0, 0, 0), (0, 0, 1)]],
        offsets_by_rank=[[1, 3, 3]],
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A layout that is refused, and what its report must say, one list of words for each sentence."""

    name: str
    config: ParallelConfig
    world: int
    num_experts: int | None = None
    sentences: list[list[str]]


REFUSED = [
    PlanCase(
        name="degree does not fill the world (P24)",
        config=ParallelConfig(data=3),
        world=8,
        sentences=[["pipeline (1)", "data (3)", "= 3", "world size (8)"]],
    ),
    PlanCase(
        name="expert degree does not divide (P24)",
        config=ParallelConfig(expert=6),
        world=8,
        sentences=[["expert (6)", "data (8)", "world size (8)", "pipeline (1)", "4 or 8"]],
    ),
    PlanCase(
        name="three faults at once",
        config=ParallelConfig(data=4, expert=8, timeout_s=0),
        world=8,
        num_experts=63,
        sentences=[
            ["timeout_s (0)", "600"],
            ["data (4)", "= 4", "world size (8)"],
            ["expert (8)", "data (4)", "nearest: 4"],
            ["num_experts (63)", "expert degree (8)", "56 or 64"],
        ],
    ),
    PlanCase(
        name="fewer experts than ranks",
        config=ParallelConfig(expert=8),
        world=8,
        num_experts=4,
        sentences=[["num_experts (4)", "expert degree (8)", "nearest: 8"]],
    ),
    PlanCase(
        name="pipeline and fsdp",
        config=ParallelConfig(pipeline=2, data_parallel="fsdp"),
        world=4,
        sentences=[["pipeline (2)", "must be 1", "fsdp", '"resident"']],
    ),
    PlanCase(
        name="pipeline that does not divide",
        config=ParallelConfig(pipeline=3),
        world=4,
        sentences=[["world size (4)", "pipeline (3)", "2 or 4"]],
    ),
    PlanCase(
        name="pipeline x data is not the world, and stages that the schedule does not have",
        config=ParallelConfig(pipeline=2, data=3, stages_per_rank=2),
        world=4,
        sentences=[["stages_per_rank (2)", '"1f1b"'], ["pipeline (2) x data (3) = 6", "world size (4)"]],
    ),
    PlanCase(
        name="expert degree beyond the data axis of a stage",
        config=ParallelConfig(pipeline=2, expert=4),
        world=4,
        sentences=[["expert (4)", "data (2)", "pipeline (2)", "nearest: 2"]],
    ),
    PlanCase(
        name="degrees below one",
        config=ParallelConfig(pipeline=0, data=-2, expert=0),
        world=4,
        sentences=[["pipeline (0)"], ["data (-2)", "-1"], ["expert (0)", "-1"]],
    ),
    PlanCase(
        name="unknown dispatcher",
        config=ParallelConfig(dispatcher="all2all"),
        world=1,
        sentences=[["'all2all'", "all_to_all, deep_ep, local, rowwise"]],
    ),
    PlanCase(
        name="local with more than one rank",
        config=ParallelConfig(expert=2, dispatcher="local"),
        world=2,
        sentences=[['"local"', "got 2", '"all_to_all"']],
    ),
    PlanCase(
        name="local with more than one rank and experts that do not divide",
        config=ParallelConfig(expert=2, dispatcher="local"),
        world=2,
        num_experts=-3,
        sentences=[["num_experts (-3)", "nearest: 2"], ['"local"', "got 2"]],
    ),
    PlanCase(
        name="settings of DeepEP for another dispatcher, of a layout that can not be settled",
        config=ParallelConfig(pipeline=0, deep_ep=DeepEPOptions(num_sms=3)),
        world=4,
        sentences=[["pipeline (0)"], ["deep_ep.num_sms (3)", "2 or 4"], ["deep_ep belongs", '"deep_ep"']],
    ),
    PlanCase(
        name="the same where it can be, and another fault of the buffers",
        config=ParallelConfig(dispatcher="rowwise", capacity_factor=0.0, deep_ep=DeepEPOptions()),
        world=4,
        sentences=[["capacity_factor (0.0)"], ["deep_ep belongs", '"deep_ep"']],
    ),
    PlanCase(name="no ranks", config=ParallelConfig(), world=0, sentences=[["world size (0)"]]),
]


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A tiny model that is trained for three steps on several ranks and on one.

    ``share`` is the share of the tokens that each rank has, repeated over the ranks.
    """

    name: str
    num_experts: int = 8
    top_k: int = 2
    routing: str = "learned"
    share: tuple[int, ...] = (1,)


TRAINING = [
    TrainingCase(name="uneven tokens (P15)", share=(1, 3)),
    TrainingCase(name="64 experts (P13)", num_experts=64, top_k=4),
    TrainingCase(name="each rank has an expert of its own (P1)", routing="own", top_k=1),
    TrainingCase(name="other ranks receive no rows (P2 a)", routing="first"),
    TrainingCase(name="a rank has no tokens (P2 b)", share=(1, 0)),
    TrainingCase(name="no tokens there and no rows (P2 c)", routing="first", share=(1, 0)),
]


def share_tokens(num_tokens: int, share: tuple[int, ...], world: int) -> list[slice]:
    """Cut the tokens into consecutive parts, one for each rank."""
    parts = [share[rank % len(share)] for rank in range(world)]
    ends = torch.tensor(parts).cumsum(0) * num_tokens // sum(parts)
    return [slice(start, end) for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


def coded_tokens(ids_by_source: list[list[list[int]]], source: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and weights whose values say where they come from: source * 100 + token * 10 (+ choice)."""
    ids_TK = torch.tensor(ids_by_source[source], dtype=torch.int64).view(-1, len(ids_by_source[0][0]))
    base_T1 = source * 100.0 + torch.arange(ids_TK.shape[0]).unsqueeze(1) * 10.0
    return base_T1.expand(-1, 2).clone(), ids_TK, base_T1 + torch.arange(ids_TK.shape[1])
