"""The case table of the experts, the tensors of a case, and the plain loops that tests and benchmarks compare with."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Case",
    "CASES",
    "Tensors",
    "clamped_swiglu",
    "gradients",
    "loop_of_matmuls",
    "loop_over_tokens",
    "make_tensors",
    "squared_relu",
    "swiglu",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    counts: tuple[int, ...]
    d_model: int = 12
    d_hidden: int = 20
    rows_past_the_end: int = 0


CASES = (
    # E11, and the edges of tiles of 64 and 128 rows: one expert with n rows between two others.
    *(Case(name=f"{n} rows", counts=(3, n, 5)) for n in (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)),
    Case(name="idle experts (E1)", counts=(16, 0, 25, 4, 0, 8)),
    Case(name="all idle (E5)", counts=(0, 0, 0, 0)),
    Case(name="idle first and third (E5)", counts=(0, 7, 0, 1)),
    Case(name="idle last (E5)", counts=(8, 0, 0, 0)),
    Case(name="one expert", counts=(9,)),
    Case(name="one row", counts=(0, 1, 0)),
    Case(name="capacity rows past the end", counts=(5, 0, 6), rows_past_the_end=7),
    Case(name="only rows past the end", counts=(0, 0), rows_past_the_end=4),
    Case(name="narrowest", counts=(2, 3), d_model=4, d_hidden=4),
    Case(name="wide and thin", counts=(10, 11), d_model=64, d_hidden=4),
    Case(name="thin and wide", counts=(10, 11), d_model=4, d_hidden=64),
    Case(name="prime number of experts", counts=(4, 1, 0, 9, 2, 6, 3)),
)


@dataclass(kw_only=True)
class Tensors:
    """The arguments of the operation, and the gradient of its output."""

    rows: Tensor
    row_weights: Tensor
    offsets: Tensor
    gate_up: Tensor
    down: Tensor
    grad_y: Tensor

    def differentiable(self, dtype: torch.dtype = torch.float32) -> "Tensors":
        """Return fresh leaves that require a gradient, in the dtype asked for."""
        copies = {field.name: getattr(self, field.name).detach().clone() for field in fields(self)}
        for name in ("rows", "row_weights", "gate_up", "down", "grad_y"):
            copies[name] = copies[name].to(dtype)
            copies[name].requires_grad_(name != "grad_y")
        return Tensors(**copies)


def make_tensors(case: Case, *, seed: int = 0) -> Tensors:
    """Return the seeded float32 tensors of a case; rows past the end hold numbers like the others."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, d_model, d_hidden = len(case.counts), case.d_model, case.d_hidden
    num_rows = sum(case.counts) + case.rows_past_the_end

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Tensors(
        rows=normal(num_rows, d_model),
        row_weights=torch.rand(num_rows, generator=generator) + 0.1,
        offsets=torch.tensor(case.counts).cumsum(0).to(torch.int32),
        gate_up=normal(num_experts, 2 * d_hidden, d_model) * d_model**-0.5,
        down=normal(num_experts, d_model, d_hidden) * d_hidden**-0.5,
        grad_y=normal(num_rows, d_model),
    )


def gradients(y: Tensor, leaves: tuple[Tensor, ...], grad_y: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the leaves for the gradient `grad_y` of y, which arrives with its own strides.

    The same as `torch.autograd.grad(y, leaves, grad_y)`, which imports sympy for seconds on its first call.
    """
    y.register_hook(lambda _: grad_y)
    return torch.autograd.grad(y.sum(), leaves)


def swiglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, dim=1)
    return F.silu(gate) * up


def clamped_swiglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, dim=1)
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


def squared_relu(pre: Tensor) -> Tensor:
    return F.relu(pre).square()


def loop_of_matmuls(
    rows: Tensor,
    row_weights: Tensor,
    counts: list[int],
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    hidden: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Run the experts as a loop of matrix products, the way one writes it by hand when speed matters."""
    outputs = []
    for expert, (x, weights) in enumerate(zip(rows.split(counts), row_weights.split(counts), strict=True)):
        if up_bias is None or down_bias is None:
            outputs.append((hidden(x @ up[expert].T) * weights[:, None]) @ down[expert].T)
        else:
            y = F.linear(hidden(F.linear(x, up[expert], up_bias[expert])), down[expert], down_bias[expert])
            outputs.append(y * weights[:, None])
    return torch.cat(outputs)


def loop_over_tokens(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run each expert on the tokens that chose it and add with `index_add_`, as Hugging Face models do."""
    y = torch.zeros_like(x)
    for expert, (gate_up_one, down_one) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token] @ gate_up_one.T).chunk(2, dim=1)
        out = (F.silu(gate) * up) @ down_one.T
        y.index_add_(0, token, out * weights[token, choice, None])
    return y
