"""Dispatchers on real ranks: equal to the reference, to the rows written down, and to one rank with the whole batch."""

import pytest
import torch
from coterie_parallel import Axis, Dispatcher, Mesh, ParallelConfig, make_dispatcher, make_plan
from coterie_parallel.conformance import CASES, conformance_problems
from support.ranks import run_ranks
from torch import Tensor

from parallel.cases import LAYOUTS, coded_tokens, share_tokens

Result = dict[str, Tensor]
EXCHANGES = ["all_to_all", "rowwise"]


@pytest.mark.parametrize("name", ["local", *EXCHANGES])
def test_one_rank_conforms(name: str) -> None:
    assert conformance_problems(name, Axis.single("expert")) == []


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_with_the_contract_and_with_one_rank(world: int) -> None:
    for rank, problems in enumerate(run_ranks(_all_checks, world, timeout_s=150)):
        assert problems == [], f"rank {rank}"


def test_eight_ranks_agree_with_one_rank() -> None:
    for rank, problems in enumerate(run_ranks(_checks_of_eight, 8, timeout_s=150)):
        assert problems == [], f"rank {rank}"


def _all_checks(rank: int, world: int) -> list[str]:
    problems = []
    for degree in {2, world}:
        with Mesh(make_plan(ParallelConfig(expert=degree), world), rank, timeout_s=30) as mesh:
            axis = mesh.axis("expert")
            for name in EXCHANGES:
                problems += conformance_problems(name, axis)
                for share in ((1,), (1, 3, 0), (0, 1)):
                    for alignment in (1, 16):
                        problems += _whole_batch_problems(name, axis, share, alignment)
                if degree == 2:
                    problems += _written_down_problems(name, axis) + _all_rows_kept_problems(name, axis)
    return problems


def _checks_of_eight(rank: int, world: int) -> list[str]:
    with Mesh(make_plan(ParallelConfig(expert=world), world), rank, timeout_s=60) as mesh:
        axis = mesh.axis("expert")
        cases = [case for case in CASES if case.name in ("uneven", "first_rank", "aligned_16")]
        problems = []
        for name in EXCHANGES:
            problems += conformance_problems(name, axis, cases=cases)
            problems += _whole_batch_problems(name, axis, (1, 3, 0), 16)
        return problems


def _whole_batch_problems(name: str, axis: Axis, share: tuple[int, ...], alignment: int) -> list[str]:
    """Compare rows, combined tokens and gradients with `local` on one rank that holds the tokens of all."""
    generator = torch.Generator().manual_seed(alignment)
    num_tokens, num_experts, top_k = 40, 8, 3
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    ids_TK[torch.rand(ids_TK.shape, generator=generator) < 0.1] = -1
    x_TD = torch.randn(num_tokens, 5, generator=generator)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    grad_y_TD = torch.randn(num_tokens, 5, generator=generator)
    scales_E = torch.randn(num_experts, generator=generator)

    local = make_dispatcher("local", num_experts=num_experts, axis=Axis.single("expert"), alignment=alignment)
    whole = _layer(local, x_TD, ids_TK, weights_TK, grad_y_TD, scales_E)
    own = share_tokens(num_tokens, share, axis.size)[axis.index]
    experts = slice(axis.index * num_experts // axis.size, (axis.index + 1) * num_experts // axis.size)
    exchange = make_dispatcher(name, num_experts=num_experts, axis=axis, alignment=alignment)
    part = _layer(exchange, x_TD[own], ids_TK[own], weights_TK[own], grad_y_TD[own], scales_E[experts])
    while exchange.grow() is not None:
        part = _layer(exchange, x_TD[own], ids_TK[own], weights_TK[own], grad_y_TD[own], scales_E[experts])
    exchange.close()

    ends = [0, *whole["offsets_e"].tolist()]
    rows = slice(ends[experts.start], ends[experts.stop])
    used = int(part["offsets_e"][-1])  # what follows is room
    part |= {key: part[key][:used] for key in ("rows_RD", "row_weights_R", "grad_rows_RD")}
    expected = {
        "offsets_e": whole["offsets_e"][experts] - ends[experts.start],
        **{key: whole[key][rows] for key in ("rows_RD", "row_weights_R", "grad_rows_RD")},
        **{key: whole[key][own] for key in ("y_TD", "grad_x_TD", "grad_weights_TK")},
    }
    return [
        f"{name}, share {share}, alignment {alignment}, degree {axis.size}: {key} differs from one rank"
        for key in expected
        if not torch.equal(part[key], expected[key])
    ]


def _layer(dispatcher: Dispatcher, x: Tensor, ids: Tensor, weights: Tensor, grad_y: Tensor, scales_e: Tensor) -> Result:
    x_TD, weights_TK = x.clone().requires_grad_(), weights.clone().requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    sent.rows_RD.retain_grad()
    starts_e = torch.cat([torch.zeros(1, dtype=torch.int32), sent.offsets_e[:-1]])
    scales_R = torch.zeros(sent.rows_RD.shape[0])
    scales_R[: sent.offsets_e[-1]] = scales_e.repeat_interleave(sent.offsets_e - starts_e)
    # Elementwise only, so that an expert's numbers do not depend on how many rows it has.
    out_RD = sent.rows_RD * sent.rows_RD * (scales_R * sent.row_weights_R).unsqueeze(1)
    y_TD = dispatcher.combine(out_RD, sent.handle)
    # A loop over the width: the sums in the weights' gradient must not depend on the number of rows either.
    loss = sum((y_TD[:, column] * grad_y[:, column]).sum() for column in range(y_TD.shape[1]))
    loss.backward()
    return {
        "rows_RD": sent.rows_RD.detach(),
        "row_weights_R": sent.row_weights_R.detach(),
        "offsets_e": sent.offsets_e,
        "y_TD": y_TD.detach(),
        "grad_rows_RD": sent.rows_RD.grad,
        "grad_x_TD": x_TD.grad,
        "grad_weights_TK": weights_TK.grad,
    }


def _written_down_problems(name: str, axis: Axis) -> list[str]:
    problems = []
    for case in LAYOUTS:
        if len(case.rows_by_rank) != axis.size:
            continue
        x_TD, ids_TK, weights_TK = coded_tokens(case.ids_by_source, axis.index)
        dispatcher = make_dispatcher(name, num_experts=case.num_experts, axis=axis, alignment=case.alignment)
        sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
        assert dispatcher.grow() is None
        used = int(sent.offsets_e[-1])
        rows = case.rows_by_rank[axis.index]
        expected_x = [[0.0] * 2 if row is None else [row[0] * 100.0 + row[1] * 10] * 2 for row in rows]
        expected_weights = [0.0 if row is None else row[0] * 100.0 + row[1] * 10 + row[2] for row in rows]
        got = (sent.rows_RD[:used].tolist(), sent.row_weights_R[:used].tolist(), sent.offsets_e.tolist())
        dispatcher.close()
        if got != (expected_x, expected_weights, case.offsets_by_rank[axis.index]):
            problems.append(f"{name}, {case.name}: got {got}")
    return problems


def _all_rows_kept_problems(name: str, axis: Axis) -> list[str]:
    """P12: 10 tokens with 3 choices, two of them on one rank, are 30 rows in all, whatever counts them."""
    tokens_of_rank = [7, 3][axis.index]
    first = torch.arange(tokens_of_rank) % 2
    ids_TK = torch.stack([first * 4, first * 4 + 1, (1 - first) * 4 + 3], dim=1)
    x_TD = torch.ones(tokens_of_rank, 2)
    dispatcher = make_dispatcher(name, num_experts=8, axis=axis, alignment=1)
    sent = dispatcher.dispatch(x_TD, ids_TK, torch.ones(ids_TK.shape))
    y_TD = dispatcher.combine(sent.rows_RD, sent.handle)
    dispatcher.close()
    # Rank 0 has 4 even and 3 odd tokens, rank 1 has 2 and 1: 6 even tokens and 4 odd ones.
    expected_ends = [[6, 12, 12, 16], [4, 8, 8, 14]][axis.index]
    num_ones = int((sent.row_weights_R[: expected_ends[-1]] == 1).sum())
    if sent.offsets_e.tolist() != expected_ends or num_ones != expected_ends[-1]:
        return [f"P12, {name}: {sent.offsets_e.tolist()} and {num_ones} rows, expected {expected_ends}"]
    if not torch.equal(y_TD, torch.full_like(y_TD, 3.0)):
        return [f"P12, {name}: a token does not get its three rows back"]
    return []


@pytest.mark.parametrize("name", ["local", "rowwise"])
def test_gradients_pass_gradcheck_in_fp64(name: str) -> None:
    ids_TK = torch.tensor([[2, 0], [0, -1], [1, 2], [-1, -1]])
    dispatcher = make_dispatcher(name, num_experts=3, axis=Axis.single("expert"), alignment=2)

    def through(x_TD: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD, ids_TK, torch.ones(4, 2))
        return dispatcher.combine(sent.rows_RD.sin(), sent.handle)

    x_TD = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(through, x_TD)


def test_rows_cut_off_from_the_graph_are_refused_before_anybody_waits() -> None:
    dispatcher = make_dispatcher("local", num_experts=2, axis=Axis.single("expert"))
    x_TD = torch.ones(2, 3, requires_grad=True)
    sent = dispatcher.dispatch(x_TD, torch.full((2, 1), -1), torch.ones(2, 1))
    with pytest.raises(ValueError, match="depend on the dispatched rows"):
        dispatcher.combine(torch.zeros(0, 3), sent.handle)
    with torch.no_grad():
        assert torch.equal(dispatcher.combine(torch.zeros(0, 3), sent.handle), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="matrix of 0 rows"):
        dispatcher.combine(torch.zeros(1, 3), sent.handle)


@pytest.mark.parametrize("name", ["local", "all_to_all", "rowwise"])
def test_a_second_derivative_is_an_error_and_not_wrong(name: str) -> None:
    dispatcher = make_dispatcher(name, num_experts=2, axis=Axis.single("expert"))
    x_TD = torch.ones(2, 3, requires_grad=True)
    sent = dispatcher.dispatch(x_TD, torch.tensor([[0], [1]]), torch.ones(2, 1))
    y_TD = dispatcher.combine(sent.rows_RD**3, sent.handle)
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(y_TD.sum() * x_TD.sum(), x_TD, create_graph=True)
    dispatcher.close()


_X, _IDS, _WEIGHTS = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((_X[0], _IDS, _WEIGHTS), r"x_TD must be a floating-point matrix, got torch.float32 of shape \(3,\)"),
        ((_X.long(), _IDS, _WEIGHTS), r"x_TD must be a floating-point matrix, got torch.int64"),
        ((_X, _IDS.int(), _WEIGHTS), r"ids_TK must be int64 of shape \(4, K\)"),
        ((_X, _IDS[:3], _WEIGHTS[:3]), r"ids_TK must be int64 of shape \(4, K\).*\(3, 2\)"),
        ((_X, _IDS, _WEIGHTS.double()), r"weights_TK must be float32 of shape \(4, 2\)"),
        ((_X, _IDS, _WEIGHTS[:, :1]), r"weights_TK must be float32 of shape \(4, 2\)"),
        ((_X, _IDS - 2, _WEIGHTS), r"\[-1, 4\), got values from -2 to -2"),
        ((_X, torch.tensor([[0, 4]] * 4), _WEIGHTS), r"\[-1, 4\), got values from 0 to 4"),
        ((_X, _IDS.to("meta"), _WEIGHTS), r"one device, got cpu, meta, cpu"),
    ],
)
@pytest.mark.parametrize("name", ["local", *EXCHANGES])
def test_wrong_arguments_are_named(name: str, arguments: tuple[Tensor, Tensor, Tensor], message: str) -> None:
    dispatcher = make_dispatcher(name, num_experts=4, axis=Axis.single("expert"))
    with pytest.raises(ValueError, match=message):
        dispatcher.dispatch(*arguments)
