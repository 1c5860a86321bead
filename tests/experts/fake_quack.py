"""A stand-in for `quack.gemm_interface` on CPU tensors in float32: the calls that we make, with what they leave undone.

Signatures as in quack-kernels 0.4.1 and 0.6.5, of which these arguments are used. Like the kernels it writes no row
past the last offset and no product of an empty group, adds up the columns of a tile before the tiles, has gate and up
columns of the pre-activation in turn, and refuses what the compiled kernels refuse: strides, dtypes, and an index past
the rows.
"""

import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["install"]


def install() -> None:
    """Make `import quack.gemm_interface` find the functions below."""
    package, module = ModuleType("quack"), ModuleType("quack.gemm_interface")
    for function in (gemm, gemm_gated, gemm_dgated):
        setattr(module, function.__name__, function)
    package.gemm_interface = module
    sys.modules |= {"quack": package, "quack.gemm_interface": module}


def gemm(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    *,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
    dynamic_scheduler: bool = False,
    tuned: bool = True,
    concat_layout: tuple[str, ...] | None = None,
) -> Tensor:
    assert not tuned
    assert out is not None
    if cu_seqlens_m is not None:
        weights = _interleaved(B, dim=1) if concat_layout == ("B",) else B
        for expert, rows in _segments(cu_seqlens_m):
            out[rows] = _taken(A, A_idx, rows) @ weights[expert]
        return out
    assert A.stride(0) == 1
    assert B.is_contiguous()
    for expert, rows in _segments(cu_seqlens_k):
        product = (A[:, A_idx[rows]] if A_idx is not None else A[:, rows]) @ B[rows]
        if concat_layout == ("out",):
            product = torch.cat((product[:, ::2], product[:, 1::2]), dim=1)
        out[expert] = product
    return out


def gemm_gated(
    A: Tensor,
    B: Tensor,
    *,
    activation: str,
    preact_out: Tensor,
    postact_out: Tensor,
    cu_seqlens_m: Tensor,
    A_idx: Tensor | None = None,
    tuned: bool = True,
    concat_layout: tuple[str, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    assert (activation, tuned, concat_layout) == ("swiglu", False, ("B",))
    weights = _interleaved(B, dim=2)
    for expert, rows in _segments(cu_seqlens_m):
        pre = _taken(A, A_idx, rows) @ weights[expert]
        preact_out[rows] = pre
        postact_out[rows] = torch.nn.functional.silu(pre[:, ::2]) * pre[:, 1::2]
    return preact_out, postact_out


def gemm_dgated(
    A: Tensor,
    B: Tensor,
    PreAct: Tensor,
    *,
    activation: str,
    colvec_scale: Tensor,
    colvec_reduce: bool,
    cu_seqlens_m: Tensor,
    A_idx: Tensor | None = None,
    dynamic_scheduler: bool = True,
    tuned: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    assert (activation, colvec_reduce, dynamic_scheduler, tuned) == ("swiglu", True, False, False)
    assert colvec_scale.is_contiguous()
    assert colvec_scale.dtype == torch.float32
    nan = float("nan")
    grad_pre = torch.full_like(PreAct, nan)
    act = torch.full((PreAct.shape[0], PreAct.shape[1] // 2), nan)
    dots = torch.full((PreAct.shape[0],), nan)
    for expert, rows in _segments(cu_seqlens_m):
        grad = _taken(A, A_idx, rows) @ B[expert]
        gate, up, scale = PreAct[rows, ::2], PreAct[rows, 1::2], colvec_scale[rows, None]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dots[rows] = (grad * silu * up).sum(1)
        act[rows] = silu * up * scale
        grad_pre[rows, 1::2] = grad * scale * silu
        grad_pre[rows, ::2] = grad * scale * up * (sigmoid + silu * (1 - sigmoid))
    return grad_pre, act, dots


def _segments(starts: Tensor | None) -> list[tuple[int, slice]]:
    assert starts is not None
    assert starts.dtype == torch.int32
    ends = starts.tolist()
    return [(expert, slice(*pair)) for expert, pair in enumerate(pairwise(ends)) if pair[0] < pair[1]]


def _taken(A: Tensor, A_idx: Tensor | None, rows: slice) -> Tensor:
    assert A.is_contiguous()
    if A_idx is None:
        return A[rows]
    assert A_idx.dtype == torch.int32
    return A[A_idx[rows]]


def _interleaved(weights: Tensor, dim: int) -> Tensor:
    return torch.stack(weights.chunk(2, dim=dim), dim=dim + 1).flatten(dim, dim + 1)
