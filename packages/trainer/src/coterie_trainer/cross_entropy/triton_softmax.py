"""Softmax, loss and gradient of one row of logits in one kernel."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["losses_and_gradients"]

_BLOCK = 8192


def losses_and_gradients(logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, with_gradients: bool) -> None:
    """Write the losses of all rows, fp32, and with gradients those of their sum over the logits.

    A row is read twice and written once, the second time from the L2 cache; one program owns it, so sums are in a fixed
    order.
    """
    num_rows, vocab_size = logits_CV.shape
    assert logits_CV.stride(1) == 1
    if num_rows == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(logits_CV):  # type: ignore[no-untyped-call]  # where Triton launches
        _losses_and_gradients[(num_rows,)](
            logits_CV,
            targets_C,
            losses_C,
            logits_CV.stride(0),
            vocab_size,
            WITH_GRADIENTS=with_gradients,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
            enable_fp_fusion=True,
        )


@triton.jit
def _losses_and_gradients(
    logits_ptr, targets_ptr, losses_ptr, stride, vocab_size, WITH_GRADIENTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, BLOCK)
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        inside = start + columns < vocab_size
        x = tl.load(logits_ptr + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        now = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(x - now), 0)
        highest = now
    log_sum = highest + tl.log(total)
    has_target = target >= 0
    chosen = tl.load(logits_ptr + target, mask=has_target, other=0.0).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(has_target, log_sum - chosen, 0.0))
    if WITH_GRADIENTS:
        # The chosen logit was read above; no thread may write over it before all have it.
        tl.debug_barrier()
        for start in range(0, vocab_size, BLOCK):
            inside = start + columns < vocab_size
            x = tl.load(logits_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(has_target, gradient, 0.0)
            tl.store(logits_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
