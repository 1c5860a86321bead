"""The batches on which a back-end of the experts is checked, and their tensors."""

from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from coterie_experts.activation import Activation

__all__ = ["CASES", "TOKEN_CASES", "Case", "TokenCase", "TokenTensors", "make_tensors", "make_tokens"]

# A limit that numbers of the size of the cases cross on every side.
_CLAMPED = Activation(name="swiglu_clamped", limit=0.8)
_RELU_SQUARED = Activation(name="relu_squared")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows in expert order; ``why`` says which fault it finds. Widths are multiples of 8, what 16-byte rows need.

    ``signed_weights`` are of both signs, and some are zero; ``all_uses`` checks also the ways in which a caller
    differentiates and adds up (see ``passes.py``), in some thirty runs.
    """

    name: str
    why: str
    counts: tuple[int, ...]
    d_model: int = 16
    d_hidden: int = 24
    rows_past_the_end: int = 0
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    rows_std: float = 1.0
    signed_weights: bool = False
    all_uses: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    """Tokens with ``top_k`` of ``num_experts`` experts each, ``num_dropped`` of all choices set to -1; see ``Case``."""

    name: str
    why: str
    num_tokens: int
    top_k: int
    num_experts: int
    num_dropped: int = 0
    d_model: int = 16
    d_hidden: int = 24
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    signed_weights: bool = False
    all_uses: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenTensors:
    """The arguments of ``forward_tokens``, the parameters by name, and the gradient of the output."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    parameters: dict[str, Tensor]
    grad_y_TD: Tensor


CASES = (
    Case(name="uneven", why="several experts of different load", counts=(5, 17, 2)),
    Case(name="idle", why="experts without rows: zero gradients, no stale memory", counts=(16, 0, 25, 4, 0, 8)),
    Case(name="all_idle", why="nothing to do, all gradients zero", counts=(0, 0, 0, 0)),
    Case(name="first_and_third_idle", why="empty groups before full ones", counts=(0, 7, 0, 1)),
    Case(name="last_idle", why="empty groups after full ones", counts=(8, 0, 0, 0)),
    Case(name="one_expert", why="E = 1", counts=(9,)),
    Case(name="one_row", why="R = 1", counts=(0, 1, 0)),
    Case(name="edges", why="tiles of 32, 64 and 128 rows and their remains", counts=(1, 31, 32, 33, 63, 64, 65)),
    Case(name="long_edges", why="likewise", counts=(127, 128, 129, 130)),
    Case(
        name="past_the_end",
        why="capacity rows are neither read nor left unwritten",
        counts=(5, 0, 6),
        rows_past_the_end=7,
    ),
    Case(name="uses", why="how it is differentiated", counts=(5, 0, 6), rows_past_the_end=2, all_uses=True),
    Case(name="signed", why="row weights below zero, and of zero", counts=(7, 0, 12), signed_weights=True),
    Case(name="large", why="gates that are shut or wide open", counts=(5, 0, 7), rows_std=64.0),
    Case(name="only_past_the_end", why="capacity without a row", counts=(0, 0), rows_past_the_end=4),
    Case(name="wide_hidden", why="more hidden units than model width", counts=(10, 11), d_model=8, d_hidden=72),
    Case(name="wide_model", why="less", counts=(10, 11), d_model=136, d_hidden=8),
    Case(name="bias", why="biases, and their gradients", counts=(9, 0, 5), rows_past_the_end=3, bias=True),
    Case(name="clamped", why="gradients stop at the clamp", counts=(9, 0, 5), activation=_CLAMPED),
    Case(
        name="clamped_bias",
        why="gpt-oss",
        counts=(9, 0, 5),
        rows_past_the_end=3,
        activation=_CLAMPED,
        bias=True,
        all_uses=True,
    ),
    Case(name="relu_squared", why="no gate", counts=(9, 0, 5), activation=_RELU_SQUARED),
    Case(name="relu_squared_bias", why="no gate", counts=(9, 0, 5), activation=_RELU_SQUARED, bias=True),
)

TOKEN_CASES = (
    TokenCase(name="tokens", why="the order of rows and of the sum", num_tokens=33, top_k=3, num_experts=8),
    TokenCase(name="dropped", why="ids of -1", num_tokens=10, top_k=2, num_experts=4, num_dropped=3),
    TokenCase(
        name="token_uses",
        why="how it is differentiated",
        num_tokens=7,
        top_k=2,
        num_experts=4,
        num_dropped=3,
        all_uses=True,
    ),
    TokenCase(
        name="signed_tokens",
        why="weights below zero, and of zero",
        num_tokens=8,
        top_k=2,
        num_experts=3,
        signed_weights=True,
    ),
    TokenCase(name="all_experts", why="K = E", num_tokens=7, top_k=5, num_experts=5),
    TokenCase(name="single", why="T = K = E = 1", num_tokens=1, top_k=1, num_experts=1),
    TokenCase(name="no_tokens", why="T = 0", num_tokens=0, top_k=2, num_experts=4),
    TokenCase(name="nothing_routed", why="every id is -1", num_tokens=5, top_k=2, num_experts=4, num_dropped=10),
    TokenCase(
        name="clamped_bias_tokens",
        why="gpt-oss",
        num_tokens=13,
        top_k=2,
        num_experts=4,
        num_dropped=3,
        activation=_CLAMPED,
        bias=True,
    ),
    TokenCase(
        name="relu_squared_tokens",
        why="no gate",
        num_tokens=13,
        top_k=2,
        num_experts=4,
        activation=_RELU_SQUARED,
        bias=True,
    ),
)


def make_tensors(case: Case) -> dict[str, Tensor]:
    """Return rows, row_weights, up, down, the biases if there are any, and grad_y, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(crc32(case.name.encode()))
    num_rows, num_experts = sum(case.counts) + case.rows_past_the_end, len(case.counts)
    d_pre = 2 * case.d_hidden if case.activation.is_gated else case.d_hidden

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    tensors = {
        "rows": normal(num_rows, case.d_model, std=case.rows_std),
        "row_weights": _weights(case, num_rows, generator=generator),
        "up": normal(num_experts, d_pre, case.d_model, std=case.d_model**-0.5),
        "down": normal(num_experts, case.d_model, case.d_hidden, std=case.d_hidden**-0.5),
    }
    if case.bias:
        tensors |= {"up_bias": normal(num_experts, d_pre), "down_bias": normal(num_experts, case.d_model)}
    return {**tensors, "grad_y": normal(num_rows, case.d_model)}


def make_tokens(case: TokenCase) -> TokenTensors:
    """Return the tensors of a case, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(crc32(case.name.encode()))
    shape = (case.num_tokens, case.top_k)
    ids_TK = torch.rand(case.num_tokens, case.num_experts, generator=generator).argsort(dim=1)[:, : case.top_k]
    dropped = torch.randperm(ids_TK.numel(), generator=generator)[: case.num_dropped]
    sizes = (case.num_experts, case.d_model, case.d_hidden)
    up_name, d_pre = ("gate_up", 2 * case.d_hidden) if case.activation.is_gated else ("up", case.d_hidden)
    x_TD = torch.randn(case.num_tokens, case.d_model, generator=generator)
    weights_TK = _weights(case, *shape, generator=generator)
    parameters = {
        up_name: torch.randn(sizes[0], d_pre, sizes[1], generator=generator) * case.d_model**-0.5,
        "down": torch.randn(sizes, generator=generator) * case.d_hidden**-0.5,
    }
    if case.bias:
        parameters |= {
            f"{up_name}_bias": torch.randn(sizes[0], d_pre, generator=generator),
            "down_bias": torch.randn(sizes[:2], generator=generator),
        }
    return TokenTensors(
        x_TD=x_TD,
        ids_TK=ids_TK.flatten().index_fill(0, dropped, -1).view(shape),
        weights_TK=weights_TK,
        parameters=parameters,
        grad_y_TD=torch.randn(case.num_tokens, case.d_model, generator=generator),
    )


def _weights(case: Case | TokenCase, *shape: int, generator: torch.Generator) -> Tensor:
    weights = torch.rand(shape, generator=generator) + 0.1
    if case.signed_weights:
        # Not the rows that hold NaN in the check of padding.
        number = torch.arange(weights.numel()).view(shape)
        weights = torch.where(number % 2 == 0, -weights, weights).masked_fill(number % 3 == 1, 0)
    return weights
