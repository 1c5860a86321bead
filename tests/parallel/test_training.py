"""A tiny model with routed experts: several ranks give the losses, gradients, norms and weights of one process."""

import random
import time
from typing import Any

import pytest
import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    Dispatcher,
    Mesh,
    Optimizer,
    ParallelConfig,
    ReductionConfig,
    all_gather,
    all_reduce_sum,
    make_dispatcher,
    make_plan,
    replica_problems,
)
from support.ranks import run_ranks
from torch import Tensor, nn

from parallel.cases import TRAINING, TrainingCase, share_tokens

NUM_TOKENS, WIDTH, NUM_STEPS = 24, 6, 3
EXCHANGES = ("all_to_all", "rowwise")
EVERY = [case.name for case in TRAINING]
PLACEMENTS = {"inner": DENSE, "router": DENSE, "experts": EXPERTS}


def _parameters(case: TrainingCase, mesh: Mesh) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    expert = mesh.axis("expert")
    inner = torch.randn(WIDTH, WIDTH, generator=generator)
    router = torch.randn(case.num_experts, WIDTH, generator=generator)
    experts = torch.randn(case.num_experts, WIDTH, WIDTH, generator=generator).chunk(expert.size)[expert.index]
    return {"inner": nn.Parameter(inner), "router": nn.Parameter(router), "experts": nn.Parameter(experts.clone())}


def _loss(
    case: TrainingCase, weights: dict[str, nn.Parameter], dispatcher: Dispatcher, step: int, own: slice, owner_T: Tensor
) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator)[own]
    target_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator)[own]
    hidden_TD = torch.tanh(x_TD @ weights["inner"].T)
    probability_TE = torch.softmax(hidden_TD @ weights["router"].T, dim=1)
    if case.routing == "learned":
        ids_TK = probability_TE.argsort(dim=1, descending=True, stable=True)[:, : case.top_k]
    elif case.routing == "own":  # All tokens of a rank go to the expert with the number of that rank.
        ids_TK = owner_T[own].unsqueeze(1)
    else:
        ids_TK = torch.arange(case.top_k).expand(x_TD.shape[0], -1)
    sent = dispatcher.dispatch(hidden_TD, ids_TK, probability_TE.gather(1, ids_TK))
    ends = [0, *sent.offsets_e.tolist()]
    out_RD = torch.cat([sent.rows_RD[ends[e] : ends[e + 1]] @ w_DD.T for e, w_DD in enumerate(weights["experts"])])
    out_RD = torch.cat([out_RD, sent.rows_RD[ends[-1] :]])  # nobody reads those past the last end
    y_TD = hidden_TD + dispatcher.combine(out_RD * sent.row_weights_R.unsqueeze(1), sent.handle)
    return ((y_TD - target_TD) ** 2).sum() / NUM_TOKENS


CONFIG = AdamWConfig(gradient_clip=1.0, reduction=ReductionConfig(bucket_bytes=100))


def _run(case: TrainingCase, mesh: Mesh, share: list[slice], dispatcher_name: str) -> dict[str, Any]:
    expert = mesh.axis("expert")
    weights = _parameters(case, mesh)
    dispatcher = make_dispatcher(dispatcher_name, num_experts=case.num_experts, axis=expert)
    optimizer = Optimizer(weights.items(), PLACEMENTS, mesh, CONFIG)
    owner_T = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    for rank, part in enumerate(share):
        owner_T[part] = rank
    own = share[mesh.rank] if mesh.plan.world > 1 else slice(0, NUM_TOKENS)
    losses, norms, gradients, problems = [], [], {}, []
    for step in range(NUM_STEPS):
        has_room = False
        while not has_room:
            optimizer.zero_grad()
            loss = _loss(case, weights, dispatcher, step, own, owner_T)
            with optimizer.micro_batch(is_last=True):
                loss.backward()
            has_room = dispatcher.grow() is None
        losses.append(float(all_reduce_sum(loss.detach(), mesh.axis("data"))))
        norms.append(float(optimizer.step(0.01)))
        if step == 0:
            clipped = optimizer.reducer.gathered()
            summed = {name: grad * max(1.0, norms[0]) for name, grad in clipped.items()}
            gradients = {name: summed[name].numpy() for name in ("inner", "router")}
            gradients["experts"] = torch.cat(all_gather(summed["experts"], expert)).numpy()
        problems += [f"step {step}: {problem}" for problem in replica_problems(weights.items(), PLACEMENTS, mesh)]
    dispatcher.close()
    return {"losses": losses, "norms": norms, "gradients": gradients, "problems": problems}


def _run_layouts(
    rank: int, world: int, degrees: tuple[int, ...], names: list[str]
) -> dict[tuple[str, int, str], dict[str, Any]]:
    results = {}
    for degree in degrees:
        with Mesh(make_plan(ParallelConfig(expert=degree), world), rank, timeout_s=30) as mesh:
            for case in TRAINING:
                if case.name in names:
                    share = share_tokens(NUM_TOKENS, case.share, world)
                    for name in EXCHANGES:
                        results[case.name, degree, name] = _run(case, mesh, share, name)
    return results


@pytest.mark.parametrize(
    ("world", "degrees", "names"), [(2, (1, 2), EVERY), (4, (2, 4), EVERY), (8, (8,), ["64 experts (P13)"])]
)
def test_every_layout_equals_one_process(world: int, degrees: tuple[int, ...], names: list[str]) -> None:
    results = run_ranks(_run_layouts, world, degrees, names, timeout_s=150)
    one_rank = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=5)
    for case in TRAINING:
        if case.name not in names:
            continue
        expected = _run(case, one_rank, share_tokens(NUM_TOKENS, case.share, world), "local")
        assert all(abs(grad).max() > 1e-3 for grad in expected["gradients"].values())
        for degree in degrees:
            for rank in range(world):
                result, ours = (results[rank][case.name, degree, name] for name in EXCHANGES)
                for name, grad in result.pop("gradients").items():
                    assert (ours["gradients"][name] == grad).all(), (case.name, degree, rank, name)
                result["gradients"] = ours.pop("gradients")
                assert ours == {name: result[name] for name in ours}, (case.name, degree, rank)
                assert result["problems"] == []
                assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
                assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
                for name, grad in expected["gradients"].items():
                    difference = abs(result["gradients"][name] - grad).max()
                    assert difference <= 1e-6 * abs(grad).max(), (case.name, degree, rank, name)


def _run_with_sleeps(rank: int, world: int) -> list[float]:
    generator = random.Random(rank)
    losses = []
    with Mesh(make_plan(ParallelConfig(expert=2), world), rank, timeout_s=30) as mesh:
        case = TRAINING[0]
        weights = _parameters(case, mesh)
        dispatcher = make_dispatcher("all_to_all", num_experts=case.num_experts, axis=mesh.axis("expert"))
        optimizer = Optimizer(weights.items(), PLACEMENTS, mesh, CONFIG)
        own, owner_T = share_tokens(NUM_TOKENS, case.share, world)[rank], torch.zeros(NUM_TOKENS, dtype=torch.int64)
        spare = nn.Parameter(torch.zeros(()))
        for step in range(200):
            optimizer.zero_grad()
            time.sleep(generator.uniform(0.0, 0.005))
            # One rank now and then has no gradient for the router, so its buckets are ready in another order.
            is_cut = rank == 1 and step % 3 == 0
            used = {**weights, "router": weights["router"].detach() + spare} if is_cut else weights
            loss = _loss(case, used, dispatcher, step, own, owner_T)
            loss.register_hook(lambda grad: time.sleep(generator.uniform(0.0, 0.005)))
            with optimizer.micro_batch(is_last=True):
                loss.backward()
            optimizer.step(0.01)
            losses.append(float(loss.detach()))
        assert replica_problems(weights.items(), PLACEMENTS, mesh) == []
    return losses


def test_ranks_that_come_at_different_times_and_with_different_gradients_never_wait_for_ever() -> None:
    for losses in run_ranks(_run_with_sleeps, 4):
        assert sum(losses[-20:]) < sum(losses[:20])
