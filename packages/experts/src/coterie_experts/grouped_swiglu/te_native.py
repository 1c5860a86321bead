"""Experts on ``GroupedLinear`` of Transformer Engine (extra ``te``): both projections; the rest is plain torch.

``transformer_engine.pytorch.GroupedLinear`` (2.10 and newer) keeps a weight for each expert and takes the numbers of
rows as a list: they are read on the host, which stops the queue once a pass, and no CUDA graph can be captured. Our
weights stand in for its own, expert by expert, and autograd carries their gradients back. Only experts with rows are
given to it, so that those without have a gradient of exactly zero.

It multiplies float32 in TF32 whatever torch is set to (``cublaslt_gemm.cu``), so float32 is refused.
"""

import functools
import importlib.util
import threading
from typing import Any

import torch
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.grouped_swiglu import reference
from coterie_experts.grouped_swiglu.requirements import in_one_sentence, whole, width_obstacle
from coterie_experts.once import refuse_second_derivative

__all__ = ["grouped_experts", "obstacle"]

# A layer is every thread's, and takes its weights from one of them for as long as it runs.
_LOCK = threading.Lock()


def obstacle(
    *, d_model: int, d_hidden: int, dtype: torch.dtype, device: torch.device, bias: bool = False
) -> str | None:
    """Return why this back-end cannot run, with what would work, or None if it can."""
    found = []
    if bias:
        found.append("it has no biases")
    if importlib.util.find_spec("transformer_engine") is None:
        found.append("transformer_engine is not installed; pip install 'coterie-experts[te]'")
    if device.type not in ("cuda", "meta"):
        found.append(f"device {device.type} is not cuda")
    if device.type != "meta" and dtype == torch.float32:
        found.append("it runs torch.bfloat16 and torch.float16; Transformer Engine multiplies torch.float32 in TF32")
    elif device.type != "meta" and dtype not in (torch.bfloat16, torch.float16):
        found.append(f"it runs torch.bfloat16 and torch.float16, not {dtype}")
    return in_one_sentence(*found, width_obstacle(d_model=d_model, d_hidden=d_hidden, dtype=dtype))


def grouped_experts(
    rows_RD: Tensor,
    row_weights_R: Tensor,
    offsets_e: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Run the experts in grouped linear layers; see ``coterie_experts.grouped_experts`` for the contract."""
    assert up_bias is None
    assert down_bias is None
    ends = offsets_e.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if not any(counts):
        # Nothing is multiplied, but the gradients are to be zeros.
        return reference.grouped_experts(
            rows_RD, row_weights_R, offsets_e, up, down, activation=activation, up_bias=None, down_bias=None
        )

    # It takes memory without gaps for granted and reads what is in them.
    up, down = whole(up), whole(down)

    def output(x_RD: Tensor, weights_R: Tensor) -> Tensor:
        pre_RP = _linear(x_RD, up, counts)
        hidden_RH = activation.forward(pre_RP.to(weights_R.dtype)) * weights_R[:, None]
        return _linear(hidden_RH.to(x_RD.dtype), down, counts)

    with torch.cuda.device_of(rows_RD):  # type: ignore[no-untyped-call]  # where its kernels are launched
        y_RD = reference.weighted_rows(output, rows_RD[: ends[-1]], row_weights_R[: ends[-1]])
    return torch.cat((y_RD, rows_RD.new_zeros(rows_RD.shape[0] - ends[-1], rows_RD.shape[1])))


def _linear(x_RI: Tensor, weights_eOI: Tensor, counts: list[int]) -> Tensor:
    busy = [(weight, count) for weight, count in zip(weights_eOI.unbind(), counts, strict=True) if count > 0]
    layer = _grouped_linear(len(busy), weights_eOI.shape[2], weights_eOI.shape[1], weights_eOI.dtype)
    stand_ins = {f"weight{number}": weight for number, (weight, _) in enumerate(busy)}
    with _LOCK:
        y_RO = torch.func.functional_call(layer, stand_ins, (x_RI, [count for _, count in busy]))
    same_RO: Tensor = _Once.apply(y_RO, x_RI, weights_eOI)
    return same_RO


class _Once(torch.autograd.Function):
    """Its output is its first argument; a second derivative is refused, which Transformer Engine leaves out silently.

    The others are what that output depends on, and what it keeps too.
    """

    @staticmethod
    def forward(ctx: Any, y_RO: Tensor, x_RI: Tensor, weights_eOI: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weights_eOI)
        return y_RO.view_as(y_RO)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative(grad_RO, *ctx.saved_tensors)
        return grad_RO, None, None


@functools.lru_cache(maxsize=256)
def _grouped_linear(num_gemms: int, in_features: int, out_features: int, dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch import GroupedLinear  # type: ignore[import-not-found]

    return GroupedLinear(
        num_gemms,
        in_features,
        out_features,
        bias=False,
        params_dtype=dtype,
        device="meta",
        # Otherwise it empties the slices of the input that it kept once it has used them, and a second pass through a
        # kept graph gives weight gradients of zero.
        save_original_input=True,
    )
