"""The operation of a layer of experts: y = (w * act(x U^T + b)) D^T + w * c, each row with the weights of its expert.

``act`` is SwiGLU, unless another is asked for. ``reference.py`` is plain torch and the ground truth;
``torch_native.py`` uses grouped matrix products; ``triton_native.py`` and the files beside it hold our own kernels;
``quack_native.py`` and ``te_native.py`` use those of other packages. ``choice.py`` picks; this file checks arguments.
"""

from itertools import pairwise

import torch
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.grouped_swiglu import quack_native, reference, te_native, torch_native, triton_native
from coterie_experts.grouped_swiglu.choice import BackendChoice, choose_backend
from coterie_experts.main_grad import into_main_grad, split_main_grad
from coterie_experts.tables import TileTable

__all__ = ["BackendChoice", "choose_backend", "grouped_experts", "grouped_swiglu", "swiglu_of_tokens"]

_SWIGLU = Activation()


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

    Returns:
        Rows of the shape and dtype of ``rows_RD``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on the CPU also offsets that fall or run past the rows (on a
            GPU that check would cost a host synchronisation, so it is not made).
    """
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    problems = activation.problems() or _argument_problems(
        rows_RD, row_weights_R, offsets_e, up, down, given, is_gated=activation.is_gated
    )
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
    if choice.name == "triton":
        (up, up_grad), (down, down_grad) = split_main_grad(up), split_main_grad(down)
        return triton_native.grouped_swiglu(
            rows_RD, row_weights_R, offsets_e, up, down, main_grads=(up_grad, down_grad), table=table
        )
    if choice.name == "quack":
        return quack_native.grouped_swiglu(rows_RD, row_weights_R, offsets_e, into_main_grad(up), into_main_grad(down))
    run = {
        "torch": torch_native.grouped_experts,
        "te": te_native.grouped_experts,
        "reference": reference.grouped_experts,
    }[choice.name]
    return run(
        rows_RD,
        row_weights_R,
        offsets_e,
        into_main_grad(up),
        into_main_grad(down),
        activation=activation,
        up_bias=None if up_bias is None else into_main_grad(up_bias),
        down_bias=None if down_bias is None else into_main_grad(down_bias),
    )


def swiglu_of_tokens(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    backend: str,
    table: TileTable | None = None,
) -> Tensor:
    """Send tokens through the experts they chose in the kernels of ``triton`` or ``quack``, gather and sum included.

    Equals rows in the order (expert, token, choice), ``grouped_swiglu``, and the sum of a token's rows in the order of
    k, bit for bit. The arguments are those of ``GroupedExperts.forward_tokens``, whose shapes have been checked.

    Raises:
        ValueError: dtypes or devices do not fit.
    """
    problems = _tensor_problems(x_TD, {"weights": weights_TK, "gate_up": gate_up, "down": down})
    if problems:
        raise ValueError("\n".join(problems))
    if backend == "quack":
        return quack_native.swiglu_of_tokens(x_TD, ids_TK, weights_TK, into_main_grad(gate_up), into_main_grad(down))
    assert backend == "triton"
    (gate_up, gate_up_grad), (down, down_grad) = split_main_grad(gate_up), split_main_grad(down)
    return triton_native.swiglu_of_tokens(
        x_TD, ids_TK, weights_TK, gate_up, down, main_grads=(gate_up_grad, down_grad), table=table
    )


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
    if shape_problem is not None:
        return [shape_problem]
    found = _tensor_problems(
        rows_RD, {"row_weights": row_weights_R, "offsets": offsets_e, up_name: up, "down": down, **biases}
    )
    if not found and offsets_e.device.type == "cpu":
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
            found.append(f"{name} is on {tensor.device} but the rows are on {rows.device}; move it there")
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
    if down.dim() == 3 and rows_RD.dim() == 2:
        num_experts, d_model, d_hidden = down.shape
        d_pre = 2 * d_hidden if is_gated else d_hidden
        wanted = {
            "rows": (rows_RD.shape[0], d_model),
            "row_weights": (rows_RD.shape[0],),
            "offsets": (num_experts,),
            "up": (num_experts, d_pre, d_model),
            "up_bias": (num_experts, d_pre),
            "down_bias": (num_experts, d_model),
        }
        tensors = {"rows": rows_RD, "row_weights": row_weights_R, "offsets": offsets_e, "up": up, **biases}
        if num_experts > 0 and all(tensor.shape == wanted[name] for name, tensor in tensors.items()):
            return None
    formulas = {"up_bias": f"up_bias (e, {up_width})", "down_bias": "down_bias (e, D)"}
    wanted_text = ", ".join(
        (
            "rows (R, D), row_weights (R), offsets (e)",
            f"{up_name} (e, {up_width}, D)",
            "down (e, D, H)",
            *(formulas[name] for name in biases),
        )
    )
    shown = {
        "rows": rows_RD,
        "row_weights": row_weights_R,
        "offsets": offsets_e,
        up_name: up,
        "down": down,
        **biases,
    }
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
