"""The torch back-end, forward and backward, against loops of matrix products of the same sizes, and how it scales."""

from collections.abc import Callable, Iterator

import torch
from coterie_experts import Activation, ExpertsConfig, GroupedExperts, grouped_experts, grouped_swiglu
from support.speed import Pair, Scaling
from torch import Tensor

from experts.cases import Case, clamped_swiglu, loop_of_matmuls, loop_over_tokens, make_tensors, squared_relu

LAYERS = (
    Case(name="16 experts of 32 rows, 128 x 128", counts=(32,) * 16, d_model=128, d_hidden=128),
    Case(name="64 experts of 4 rows, 128 x 64", counts=(4,) * 64, d_model=128, d_hidden=64),
    Case(name="8 experts of 256 rows, 256 x 256", counts=(256,) * 8, d_model=256, d_hidden=256),
    Case(name="skewed, 128 x 128", counts=(512, 256, 128, 64, 32, 16, 8, 0, 4, 4, 0, 0), d_model=128, d_hidden=128),
)


def bench_rows() -> Iterator[Pair]:
    for case in LAYERS:
        tensors = make_tensors(case)
        ours = tensors.differentiable()
        loop = tensors.differentiable()
        counts = list(case.counts)
        yield _pair(
            f"forward+backward: {case.name}",
            lambda t=ours: grouped_swiglu(t.rows, t.row_weights, t.offsets, t.gate_up, t.down, backend="torch"),
            (ours.rows, ours.row_weights, ours.gate_up, ours.down),
            lambda t=loop, c=counts: loop_of_matmuls(t.rows, t.row_weights, c, t.gate_up, t.down),
            (loop.rows, loop.row_weights, loop.gate_up, loop.down),
            tensors.grad_y,
        )


def bench_tokens() -> Iterator[Pair]:
    generator = torch.Generator().manual_seed(0)
    config = ExpertsConfig(d_model=128, d_hidden=128, num_experts=16, backend="torch")
    experts = GroupedExperts(config)
    x = torch.randn(512, 128, generator=generator).requires_grad_()
    ids = torch.rand(512, 16, generator=generator).argsort(dim=1)[:, :4]
    weights = torch.rand(512, 4, generator=generator).requires_grad_()
    inputs = (x, weights, experts.gate_up, experts.down)
    yield _pair(
        "forward_tokens, forward+backward: 512 tokens, 4 of 16 experts, 128 x 128",
        lambda: experts.forward_tokens(x, ids, weights),
        inputs,
        lambda: loop_over_tokens(x, ids, weights, experts.gate_up, experts.down),
        inputs,
        torch.randn(512, 128, generator=generator),
    )


def bench_activations() -> Iterator[Pair]:
    """The reference is a loop of `matmul` calls with the same activation and biases."""
    case = Case(name="", counts=(32,) * 16, d_model=128, d_hidden=128)
    for name, hidden in (("swiglu_clamped", clamped_swiglu), ("relu_squared", squared_relu)):
        activation = Activation(name=name)
        tensors = make_tensors(case)
        up = tensors.gate_up if activation.is_gated else tensors.gate_up[:, : case.d_hidden].contiguous()
        generator = torch.Generator().manual_seed(1)
        up_bias, down_bias = (torch.randn(16, n, generator=generator) for n in (up.shape[1], case.d_model))
        leaves = (tensors.rows, tensors.row_weights, up, tensors.down, up_bias, down_bias)
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)

        def ours(
            a: Activation = activation, t: tuple[Tensor, ...] = leaves, offsets: Tensor = tensors.offsets
        ) -> Tensor:
            rows, weights, up, down, up_bias, down_bias = t
            biases = {"up_bias": up_bias, "down_bias": down_bias}
            return grouped_experts(rows, weights, offsets, up, down, activation=a, backend="torch", **biases)

        def loop(h: Callable[[Tensor], Tensor] = hidden, t: tuple[Tensor, ...] = leaves) -> Tensor:
            return loop_of_matmuls(*t[:2], list(case.counts), *t[2:], hidden=h)

        yield _pair(f"{name} with biases: 16 experts of 32 rows, 128 x 128", ours, leaves, loop, leaves, tensors.grad_y)


def bench_scaling() -> Iterator[Scaling]:
    """Twice the rows, and twice the experts with the same rows in all."""
    few, many = (_step(Case(name="", counts=(n,) * 16, d_model=128, d_hidden=128)) for n in (64, 128))
    yield Scaling("torch back-end, forward+backward: twice the rows", few, many)
    few, many = (_step(Case(name="", counts=(1024 // n,) * n, d_model=64, d_hidden=64)) for n in (16, 32))
    yield Scaling("torch back-end, forward+backward: the same rows for twice the experts", few, many)


def _step(case: Case) -> Callable[[], object]:
    tensors = make_tensors(case)
    t = tensors.differentiable()

    def step() -> object:
        y = grouped_swiglu(t.rows, t.row_weights, t.offsets, t.gate_up, t.down, backend="torch")
        return torch.autograd.grad(y, (t.rows, t.row_weights, t.gate_up, t.down), tensors.grad_y)

    return step


def _pair(
    name: str,
    ours: Callable[[], Tensor],
    our_inputs: tuple[Tensor, ...],
    reference: Callable[[], Tensor],
    reference_inputs: tuple[Tensor, ...],
    grad_y: Tensor,
) -> Pair:
    def both_ways(function: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y = function()
        return (y.detach(), *torch.autograd.grad(y, inputs, grad_y))

    def check() -> None:
        pairs = zip(both_ways(ours, our_inputs), both_ways(reference, reference_inputs), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())

    return Pair(
        name=name,
        ours=lambda: both_ways(ours, our_inputs),
        reference=lambda: both_ways(reference, reference_inputs),
        check=check,
    )
