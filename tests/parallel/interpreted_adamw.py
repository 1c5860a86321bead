"""Tests of the Triton kernels of the optimizer, for a process with TRITON_INTERPRET=1: see test_optimizer.py."""

import pytest
import torch
from coterie_parallel import DENSE, AdamWConfig, Mesh, Optimizer, ParallelConfig, make_plan
from coterie_parallel.gradients.triton_norm import sum_of_squares
from coterie_parallel.optimizer import adamw, triton_adamw
from coterie_parallel.optimizer.triton_adamw import adamw_
from support.ranks import run_ranks

RATE, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.999), 1e-8


def given(numel: int, moments: torch.dtype) -> list[torch.Tensor]:
    """Return a weight, its gradient, and moments as they are after some steps."""
    main, grad = torch.randn(numel), torch.randn(numel)
    return [main, grad, (0.1 * torch.randn(numel)).to(moments), torch.rand(numel).to(moments)]


def scales(step: int, clip: float) -> torch.Tensor:
    return torch.tensor([clip, 1 / (1 - BETAS[0] ** step), (1 - BETAS[1] ** step) ** -0.5])


def run(tensors: list[torch.Tensor], weight: torch.Tensor | None, *, step: int, clip: float, skipped: bool) -> None:
    adamw_(
        *tensors,
        weight,
        scales=scales(step, clip),
        is_skipped=torch.tensor(float(skipped)),
        rate=RATE,
        decay=DECAY,
        betas=BETAS,
        eps=EPS,
    )


@pytest.mark.parametrize("numel", [1, 2048, 5003])
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("moments", [torch.float32, torch.float16])
def test_equals_adamw_of_torch(numel: int, step: int, moments: torch.dtype) -> None:
    torch.manual_seed(numel + step)
    tensors = given(numel, moments)
    # In fp64, from what the kernel reads.
    main, grad, first, second = (tensor.double() for tensor in tensors)
    torch._fused_adamw_(
        [main],
        [grad * 0.25],
        [first],
        [second],
        [],
        [torch.tensor(float(step))],
        lr=RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )
    weight, grad_before = torch.full((numel,), torch.nan, dtype=torch.float16), tensors[1].clone()
    run(tensors, weight, step=step, clip=0.25, skipped=False)
    torch.testing.assert_close(tensors[0], main.float(), rtol=1e-6, atol=1e-7)
    rounding = 1e-6 if moments == torch.float32 else 2.0**-11
    torch.testing.assert_close(tensors[2].double(), first, rtol=rounding, atol=1e-7)
    torch.testing.assert_close(tensors[3].double(), second, rtol=rounding, atol=1e-7)
    assert torch.equal(weight, tensors[0].to(torch.float16))
    assert torch.equal(tensors[1], grad_before)


def test_a_skipped_step_writes_nothing_but_the_rounded_weight() -> None:
    tensors = given(3000, torch.float32)
    tensors[1].fill_(torch.nan)
    before = [tensor.clone() for tensor in tensors]
    weight = torch.full((3000,), torch.nan, dtype=torch.float16)
    run(tensors, weight, step=1, clip=torch.nan, skipped=True)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True) if one is not tensors[1])
    assert torch.equal(weight, before[0].to(torch.float16))


def test_an_fp32_weight_has_no_rounded_one_and_nothing_behind_the_end_is_touched() -> None:
    tensors = [torch.cat([tensor, torch.full((50,), 7.0)]) for tensor in given(2050, torch.float32)]
    run([tensor[:2050] for tensor in tensors], None, step=3, clip=1.0, skipped=False)
    assert all(tensor[2050:].eq(7).all() for tensor in tensors)


@pytest.mark.parametrize("numel", [1, 65_536, 65_537, 200_003])
def test_sums_of_squares_are_those_of_fp64(numel: int) -> None:
    values = torch.randn(numel + 1)
    values[-1] = torch.inf  # behind the end
    found = sum_of_squares(values[:-1])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, values[:-1].double().square().sum(), rtol=1e-14, atol=0)


def test_squares_that_fp32_does_not_hold() -> None:
    assert sum_of_squares(torch.tensor([1e30, 1e-30])).sqrt().item() == pytest.approx(1e30, rel=1e-7)
    assert sum_of_squares(torch.tensor([1e-30])).sqrt().item() == pytest.approx(1e-30, rel=1e-7)
    assert sum_of_squares(torch.tensor([1.0, torch.nan])).isnan()


SHAPES = {"norm.weight": (5,), "layer.weight": (40, 50), "experts.down": (3, 20, 41), "embed.weight": (7, 3)}


def optimizer_steps(rank: int, world: int, fused: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights and state after three steps of an `Optimizer`, the second of them skipped."""
    mesh = Mesh(make_plan(ParallelConfig(data=world), world), rank, timeout_s=30)
    generator = torch.Generator().manual_seed(0)
    named = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    }
    config = AdamWConfig(weight_decays=(("embed.*", 0.0),), moments_dtype="float32")
    placements = dict.fromkeys(named, DENSE)
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(adamw, "kernels_of", lambda device: triton_adamw)
        optimizer = Optimizer(named.items(), placements, mesh, config)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            for parameter in named.values():
                gradient = torch.randn(parameter.shape, generator=generator)
                gradient.flatten()[0] = torch.inf if step == 1 else 1.0
                parameter.grad = gradient.to(dtype)
            optimizer.step(RATE)
        optimizer.wait_for_weights()
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    return state | {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_optimizer_with_the_kernels_is_the_one_without(world: int, dtype: torch.dtype) -> None:
    for one, other in zip(
        run_ranks(optimizer_steps, world, True, dtype), run_ranks(optimizer_steps, world, False, dtype), strict=True
    ):
        assert one.keys() == other.keys()
        assert one["num_skipped"] == other["num_skipped"] == 1
        for key, value in one.items():
            is_rounded = value.dtype == torch.float16
            torch.testing.assert_close(value, other[key], rtol=2.0**-10 if is_rounded else 1e-6, atol=1e-7, msg=key)
            if is_rounded and world == 1:
                assert torch.equal(value.flatten(), one[f"main/{key}"].half())
