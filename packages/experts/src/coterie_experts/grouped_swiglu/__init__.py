"""The operation of a layer of experts: y = (w * act(x U^T + b)) D^T + w * c, each row with the weights of its expert.

``act`` is SwiGLU, unless another is asked for. ``reference.py`` is plain torch and the ground truth;
``torch_native.py`` uses grouped matrix products; ``triton_native.py`` and the files beside it hold our own kernels;
``quack_native.py`` and ``te_native.py`` use those of other packages. ``choice.py`` picks; this file checks arguments.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.deferred import Defer, Deferral, deferral_of
from coterie_experts.grouped_swiglu import quack_native, reference, te_native, torch_native, triton_native
from coterie_experts.grouped_swiglu.choice import BackendChoice, choose_backend
from coterie_experts.grouped_swiglu.replayed import with_deferred_weights
from coterie_experts.grouped_swiglu.requirements import whole
from coterie_experts.main_grad import into_main_grad, main_grad_problem, split_main_grad
from coterie_experts.tables import TileTable

__all__ = [
    "BackendChoice",
    "choose_backend",
    "experts_of_tokens",
    "grouped_experts",
    "grouped_swiglu",
    "misfits",
    "without_autocast",
]

_SWIGLU = Activation()
# What to do about parameters on meta.
_GIVE_MEMORY = "give the module memory (to_empty(device=...)) and numbers (init_experts, or what was saved)"


def grouped_swiglu(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Send each row through its SwiGLU expert: ``grouped_experts`` with that activation and without biases."""
    return grouped_experts(rows_RD, row_weights_R, offsets_e, gate_up, down, backend=backend)


def grouped_experts(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation = _SWIGLU,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    backend: str = "auto",
    table: TileTable | None = None,
    defer_weight_gradients: Defer | None = None,
    ask_out: Callable[[], Tensor | None] | None = None,
    ask_grad_rows: Callable[[], Tensor | None] | None = None,
) -> Tensor:
    """Send each row through its expert: rows [offsets[i-1], offsets[i]) belong to local expert i.

    The row weight multiplies the output of the expert, so that the sum over the experts of a token is a plain sum. It
    is applied to the activation before the down projection, and to the bias of that projection. Rows past
    ``offsets_e[-1]`` are not read; their output and their gradients are zero. A row of weight zero adds exactly zero
    to every output and weight gradient, whatever numbers it holds (padding may hold NaN); the gradient of its weight
    is the true one where it is finite, else zero. An expert with no rows has a zero gradient.

    Args:
        rows_RD: the dtype of the weights; any strides.
        row_weights_R: float32 (float64 if the rows are float64).
        offsets_e: int32, inclusive ends of the experts' segments, on the device of the rows.
        up: (e, P, D) with P = 2H, gate rows first, or P = H where the activation has no gate. If it has a
            ``main_grad`` its gradient is added there, else to ``grad``.
        down: (e, D, H), likewise; so are the biases.
        activation: see ``Activation``.
        up_bias: (e, P), added before the activation.
        down_bias: (e, D), added to the output of the expert.
        backend: see ``choose_backend``.
        table: what was measured on this GPU, where it is not the package's own record.
        defer_weight_gradients: takes a function in each backward pass, which computes the gradients of ``up``,
            ``down`` and the biases when it is called, and adds them as above; see ``GroupedExperts``.
        ask_out: see ``GroupedExperts.forward``.
        ask_grad_rows: likewise.

    Returns:
        Rows of the shape and dtype of ``rows_RD``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on the CPU also offsets that fall or run past the rows (on a
            GPU that check would cost a host synchronisation, so it is not made); gradients to be deferred for a
            tensor that has neither a ``main_grad`` nor, not being a leaf, a ``grad``.
    """
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    problems = activation.problems()
    problems += _argument_problems(rows_RD, row_weights_R, offsets_e, up, down, given, is_gated=activation.is_gated)
    if problems:
        raise ValueError("\n".join(problems))
    choice = choose_backend(
        backend,
        d_model=up.shape[2],
        d_hidden=down.shape[2],
        dtype=rows_RD.dtype,
        device=rows_RD.device,
        activation=activation.name,
        bias=bool(given),
        table=table,
    )
    deferral = deferral_of(defer_weight_gradients, up=up, down=down, up_bias=up_bias, down_bias=down_bias)
    inputs = (rows_RD, row_weights_R, whole(offsets_e))
    if choice.name == "triton":
        return triton_native.grouped_experts(
            *inputs,
            **_split(up, down, up_bias, down_bias, deferral),
            activation=activation,
            table=table,
            ask_out=ask_out,
            ask_grad_rows=ask_grad_rows,
        )
    if deferral is None:
        up, down = into_main_grad(up), into_main_grad(down)
        up_bias = None if up_bias is None else into_main_grad(up_bias)
        down_bias = None if down_bias is None else into_main_grad(down_bias)
    if choice.name == "quack":
        return quack_native.grouped_swiglu(*inputs, up, down, deferral=deferral)
    if choice.name == "torch":
        return torch_native.grouped_experts(
            *inputs, up, down, activation=activation, up_bias=up_bias, down_bias=down_bias, deferral=deferral
        )
    experts = {"te": te_native.grouped_experts, "reference": reference.grouped_experts}[choice.name]

    def run(rows_RD: Tensor, weights_R: Tensor, offsets_e: Tensor, parameters: Sequence[Tensor | None]) -> Tensor:
        up, down, up_bias, down_bias = parameters
        assert up is not None
        assert down is not None
        # In the dtype of the parameters, as the other back-ends.
        with without_autocast(rows_RD.device):
            return experts(
                rows_RD,
                weights_R,
                offsets_e,
                up,
                down,
                activation=activation,
                up_bias=up_bias,
                down_bias=down_bias,
            )

    if deferral is None:
        return run(*inputs, (up, down, up_bias, down_bias))
    return with_deferred_weights(run, *inputs, deferral)


def experts_of_tokens(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    backend: str,
    activation: Activation = _SWIGLU,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    table: TileTable | None = None,
    defer_weight_gradients: Defer | None = None,
) -> Tensor:
    """Send tokens through the experts they chose in the kernels of ``triton`` or ``quack``, gather and sum included.

    Equals rows in the order (expert, token, choice), ``grouped_experts``, and the sum of a token's rows in the order of
    k, bit for bit. The arguments are those of ``GroupedExperts.forward_tokens``, whose shapes have been checked, and
    what ``choose_backend`` has found that the back-end can run.

    Raises:
        ValueError: dtypes or devices do not fit; what is deferred as in ``grouped_experts``.
    """
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    up_name = "gate_up" if activation.is_gated else "up"
    problems = _tensor_problems(x_TD, {"weights": weights_TK, up_name: up, "down": down, **given})
    if problems:
        raise ValueError("\n".join(problems))
    deferral = deferral_of(defer_weight_gradients, up=up, down=down, **biases)
    if backend == "quack":
        if deferral is None:
            up, down = into_main_grad(up), into_main_grad(down)
        return quack_native.swiglu_of_tokens(x_TD, ids_TK, weights_TK, up, down, deferral=deferral)
    assert backend == "triton"
    return triton_native.experts_of_tokens(
        x_TD,
        ids_TK,
        weights_TK,
        **_split(up, down, up_bias, down_bias, deferral),
        activation=activation,
        table=table,
    )


def misfits(name: str, tensor: Tensor, parameter: Tensor) -> list[str]:
    """Return how dtype and device of a module's input differ from those of its parameters."""
    found = []
    if tensor.dtype != parameter.dtype:
        found.append(f"{name} must be {parameter.dtype}, as the parameters are, but is {tensor.dtype}")
    if tensor.device != parameter.device:
        advice = _GIVE_MEMORY if parameter.is_meta else "move it there"
        found.append(f"{name} is on {tensor.device} but the parameters are on {parameter.device}; {advice}")
    return found


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does nothing: experts compute in the dtype of their parameters."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _split(
    up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, deferral: Deferral | None
) -> dict[str, Any]:
    """Return the arguments of the Triton back-end: weights, what its kernels add gradients to, and the deferral."""
    weights = {"up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
    if deferral is not None:
        return {**weights, "deferral": deferral}
    pairs = {name: (None, None) if one is None else split_main_grad(one) for name, one in weights.items()}
    return {
        **{name: weight for name, (weight, _) in pairs.items()},
        "main_grads": tuple(main_grad for _, main_grad in pairs.values()),
    }


def _argument_problems(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    up: Tensor,
    down: Tensor,
    biases: dict[str, Tensor],
    *,
    is_gated: bool,
) -> list[str]:
    up_name = "gate_up" if is_gated else "up"
    shape_problem = _shape_problem(rows_RD, row_weights_R, offsets_e, up, down, biases, is_gated=is_gated)
    found = [] if shape_problem is None else [shape_problem]
    found += _tensor_problems(
        rows_RD, {"row_weights": row_weights_R, "offsets": offsets_e, up_name: up, "down": down, **biases}
    )
    if shape_problem is None and offsets_e.device.type == "cpu":
        found += _offset_problems(offsets_e.tolist(), rows_RD.shape[0])
    return found


def _tensor_problems(rows: Tensor, others: dict[str, Tensor]) -> list[str]:
    weight_dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    dtypes = {"row_weights": weight_dtype, "weights": weight_dtype, "offsets": torch.int32}
    found = []
    for name, tensor in others.items():
        dtype = dtypes.get(name, rows.dtype)
        if tensor.dtype != dtype:
            found.append(f"{name} must be {dtype} when the rows are {rows.dtype}, but is {tensor.dtype}")
        if tensor.device != rows.device:
            advice = _GIVE_MEMORY if tensor.is_meta and name not in dtypes else "move it there"
            found.append(f"{name} is on {tensor.device} but the rows are on {rows.device}; {advice}")
        problem = main_grad_problem(tensor)
        if problem is not None:
            found.append(f"{name}: {problem}")
    return found


def _shape_problem(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    up: Tensor,
    down: Tensor,
    biases: dict[str, Tensor],
    *,
    is_gated: bool,
) -> str | None:
    up_name, up_width = ("gate_up", "2H") if is_gated else ("up", "H")
    axes = {
        "rows": "R D",
        "row_weights": "R",
        "offsets": "e",
        up_name: f"e {up_width} D",
        "down": "e D H",
        "up_bias": f"e {up_width}",
        "down_bias": "e D",
    }
    shown = {"rows": rows_RD, "row_weights": row_weights_R, "offsets": offsets_e, up_name: up, "down": down, **biases}
    if rows_RD.dim() == 2 and down.dim() == 3:
        num_experts, d_model, d_hidden = down.shape
        sizes = {"R": rows_RD.shape[0], "e": num_experts, "D": d_model, "H": d_hidden, "2H": 2 * d_hidden}
        if min(down.shape) > 0 and all(
            tensor.shape == tuple(sizes[axis] for axis in axes[name].split()) for name, tensor in shown.items()
        ):
            return None
    wanted_text = ", ".join(f"{name} ({axes[name].replace(' ', ', ')})" for name in shown)
    found_text = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shown.items())
    return f"shapes must be {wanted_text}, but are {found_text}"


def _offset_problems(ends: list[int], num_rows: int) -> list[str]:
    found = []
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if end < start:
            found.append(f"offsets must not fall: expert {expert} would start at row {start} and end at row {end}")
    if ends and ends[-1] > num_rows:
        found.append(f"offsets end at row {ends[-1]} but there are only {num_rows} rows: the counts do not add up")
    return found
