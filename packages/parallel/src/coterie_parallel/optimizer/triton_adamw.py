"""AdamW as a Triton kernel for GPUs: one pass over everything that an update reads or writes.

The update is that of torch.optim.AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), which
`torch._fused_adamw_` computes for other devices, with the clip inside. Beyond that it rounds moments that are not fp32
and writes the rounded weight, each of which would be a pass of its own. Bytes an element with fp32 moments and a bf16
weight: 16 read, 14 written.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["adamw_"]

_BLOCK = 2048


@triton.jit
def _update(
    main_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    weight_ptr,
    scales_ptr,
    is_skipped_ptr,
    numel,
    rate,
    kept,
    new_of_first,
    kept_of_second,
    new_of_second,
    eps,
    BLOCK: tl.constexpr,
):
    """Update a block of elements; a skipped step only writes the rounded weights, which may go to a fresh buffer."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    main = tl.load(main_ptr + place, mask=inside)
    if tl.load(is_skipped_ptr) == 0:
        clip = tl.load(scales_ptr)
        first_scale = tl.load(scales_ptr + 1)
        second_scale = tl.load(scales_ptr + 2)
        grad = tl.load(grad_ptr + place, mask=inside) * clip
        first = tl.load(first_ptr + place, mask=inside).to(tl.float32)
        second = tl.load(second_ptr + place, mask=inside).to(tl.float32)
        first += new_of_first * (grad - first)
        second = kept_of_second * second + new_of_second * grad * grad
        denominator = tl.sqrt_rn(second) * second_scale + eps
        main = kept * main - tl.div_rn(rate * first_scale * first, denominator)
        tl.store(main_ptr + place, main, mask=inside)
        tl.store(first_ptr + place, first.to(first_ptr.dtype.element_ty), mask=inside)
        tl.store(second_ptr + place, second.to(second_ptr.dtype.element_ty), mask=inside)
    if weight_ptr is not None:
        tl.store(weight_ptr + place, main.to(weight_ptr.dtype.element_ty), mask=inside)


def adamw_(
    main: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    weight: Tensor | None,
    *,
    scales: Tensor,
    is_skipped: Tensor,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update one piece in place; everything is 1-D, contiguous and of one length.

    Args:
        main: fp32, the weights.
        grad: fp32; read only.
        first: the average of gradients, any floating dtype: rounded to the nearest when it is stored.
        second: the average of their squares, likewise.
        weight: where the rounded weights go, any floating dtype; None for nowhere.
        scales: fp32 (3): what gradients are multiplied by, 1 / (1 - beta1^t), and 1 / sqrt(1 - beta2^t).
        is_skipped: fp32 scalar; not zero: nothing changes but ``weight``, which is what it would be anyway.
        rate: learning rate.
        decay: of the weights, times the rate.
        betas: of the two averages.
        eps: added to the root.
    """
    numel = main.numel()
    if numel:
        _update[(triton.cdiv(numel, _BLOCK),)](
            main,
            grad,
            first,
            second,
            weight,
            scales,
            is_skipped,
            numel,
            rate,
            1 - rate * decay,
            1 - betas[0],
            betas[1],
            1 - betas[1],  # in fp32, where the kernel would compute it, four digits would be left
            eps,
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
