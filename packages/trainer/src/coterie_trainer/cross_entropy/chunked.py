"""Cross-entropy of hidden states over a large vocabulary that never holds the logits of all tokens.

The forward computes the loss and, while the logits of a chunk are there, both gradients for a gradient of the loss of
one; the backward multiplies them by the real one (Hsu et al., "Liger Kernel", 2024). So the head costs three matrix
products in all, as without chunks. Nothing depends on the order of threads: equal inputs give equal bits.

Memory in bytes beside inputs and parameters, for T tokens in chunks of C, width D, vocabulary V and b bytes a number:

    in the forward      C V b, logits that the gradient overwrites; without the fused kernel also C V 4 where b < 4
                        and V D 4 once more where torch cannot add 16-bit products to fp32 sums
    until the backward  T D b, the gradient of the hidden states, and V D 4 (8 in fp64), that of the weight
    T 4                 the losses of the tokens

A gradient that nobody needs is neither computed nor kept; under ``no_grad`` that is both.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from coterie_experts.once import captured_inputs, needed_inputs
from torch import Tensor
from torch.autograd.function import Function

__all__ = ["chunked_cross_entropy_sum", "tokens_in_chunk"]

_CHUNK_BYTES = 2 << 30
_Softmax = Callable[[Tensor, Tensor, Tensor, bool], None]


def tokens_in_chunk(vocab_size: int, dtype: torch.dtype) -> int:
    """Return the largest power of two of tokens whose logits take at most 2 GiB; at least 1."""
    return 1 << max(0, (_CHUNK_BYTES // (vocab_size * dtype.itemsize)).bit_length() - 1)


def chunked_cross_entropy_sum(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Return the sum over tokens of the cross-entropy in nats of ``hidden_TD @ weight_VD.T``.

    Logits and their gradients are rounded to the dtype of the inputs, as by plain torch; softmax, losses and the sum of
    the weight gradient over chunks are fp32, or fp64 for fp64. Where the weight has a ``main_grad`` the gradient is
    added to that in the backward, unrounded, and its ``grad`` stays as it is.

    Args:
        hidden_TD: any floating dtype.
        weight_VD: of the same.
        targets_T: int64, 0 to V-1, or -1 for no loss; values are not checked on a GPU.
        chunk_tokens: tokens whose logits are held at a time; None for `tokens_in_chunk`.

    Raises:
        ValueError: shapes, dtypes or ``chunk_tokens`` do not fit.
        RuntimeError: on a derivative of a gradient.
    """
    problems = _problems(hidden_TD, weight_VD, targets_T, chunk_tokens)
    if problems:
        raise ValueError("\n".join(problems))
    if chunk_tokens is None:
        chunk_tokens = tokens_in_chunk(weight_VD.shape[0], hidden_TD.dtype)
    if not torch.is_grad_enabled():
        return _Products(hidden_TD, weight_VD, targets_T, chunk_tokens).sum(for_hidden=False, for_weight=False)
    # The main_grad is looked up by now: a parameter inside an autograd function is another Python object.
    main_grad: Tensor | None = getattr(weight_VD, "main_grad", None)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_TD, weight_VD, targets_T, chunk_tokens, main_grad)
    return loss


def _problems(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_tokens: int | None) -> list[str]:
    found = []
    shapes = tuple(hidden_TD.shape), tuple(weight_VD.shape), tuple(targets_T.shape)
    if [len(shape) for shape in shapes] != [2, 2, 1] or shapes[0][1] != shapes[1][1] or shapes[0][0] != shapes[2][0]:
        found.append(f"shapes must be hidden (T, D), weight (V, D) and targets (T), but are {shapes}")
    if hidden_TD.dtype != weight_VD.dtype or not hidden_TD.is_floating_point():
        found.append(f"hidden and weight must have one floating dtype, but have {hidden_TD.dtype}, {weight_VD.dtype}")
    if targets_T.dtype != torch.int64:
        found.append(f"targets must be torch.int64, but are {targets_T.dtype}")
    if chunk_tokens is not None and chunk_tokens < 1:
        found.append(f"chunk_tokens ({chunk_tokens}) must be at least 1")
    return found


class _Products:
    """One pass over the chunks: the losses, and what of the gradients is wanted."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_tokens: int) -> None:
        self.hidden_TD, self.weight_VD, self.targets_T = hidden_TD, weight_VD, targets_T
        self.chunk_tokens = chunk_tokens
        self.wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        self.grad_hidden_TD: Tensor | None = None
        self.grad_weight_VD: Tensor | None = None

    def sum(self, *, for_hidden: bool, for_weight: bool) -> Tensor:
        """Return the summed loss; the gradients lie in the attributes then."""
        hidden_TD, weight_VD = self.hidden_TD, self.weight_VD
        losses_T = hidden_TD.new_empty(len(hidden_TD), dtype=self.wide)
        if for_hidden:
            self.grad_hidden_TD = torch.empty_like(hidden_TD)
        if for_weight:
            # Every chunk adds to it; no tokens at all leave a gradient of zero.
            make = torch.empty_like if len(hidden_TD) else torch.zeros_like
            self.grad_weight_VD = make(weight_VD, dtype=self.wide)
        losses_and_gradients = _softmax_of(hidden_TD.device)
        for start in range(0, len(hidden_TD), self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            logits_CV = hidden_TD[chunk] @ weight_VD.T
            losses_and_gradients(logits_CV, self.targets_T[chunk], losses_T[chunk], for_hidden or for_weight)
            if self.grad_hidden_TD is not None:
                torch.mm(logits_CV, weight_VD, out=self.grad_hidden_TD[chunk])
            if self.grad_weight_VD is not None:
                _add_product(self.grad_weight_VD, logits_CV, hidden_TD[chunk], is_first=start == 0)
            del logits_CV  # before the next chunk's are made
        return losses_T.sum()


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor, *, is_first: bool) -> None:
    """Add ``grad_CV.T @ hidden_CD`` to the total, unrounded; the first time write it over what is there."""
    if grad_CV.dtype == total_VD.dtype:
        torch.addmm(total_VD, grad_CV.T, hidden_CD, beta=0 if is_first else 1, out=total_VD)
    elif total_VD.is_cuda and is_first:
        torch.ops.aten.mm.dtype_out(grad_CV.T, hidden_CD, total_VD.dtype, out=total_VD)
    elif total_VD.is_cuda and _adds_to_fp32(grad_CV.dtype):
        torch.ops.aten.addmm.dtype_out(total_VD, grad_CV.T, hidden_CD, total_VD.dtype, out=total_VD)
    elif total_VD.is_cuda:
        total_VD.add_(torch.ops.aten.mm.dtype(grad_CV.T, hidden_CD, total_VD.dtype))
    else:
        wide = total_VD.dtype
        torch.addmm(total_VD, grad_CV.T.to(wide), hidden_CD.to(wide), beta=0 if is_first else 1, out=total_VD)


@functools.cache
def _adds_to_fp32(dtype: torch.dtype) -> bool:
    """Return whether torch adds a product of 16-bit matrices to an fp32 one; its first version of the call refuses."""
    total, factor = torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16, device="cuda", dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor, factor, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _softmax_of(device: torch.device) -> _Softmax:
    if device.type == "cuda":
        kernels = importlib.import_module("coterie_trainer.cross_entropy.triton_softmax")
        return cast(_Softmax, kernels.losses_and_gradients)
    return _losses_and_gradients


def _losses_and_gradients(logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, with_gradients: bool) -> None:
    """Write the losses, and over the logits the gradients of their sum; plain torch, in fp32 or wider."""
    wide_CV = logits_CV.to(losses_C.dtype)
    has_target_C1 = (targets_C >= 0)[:, None]
    index_C1 = targets_C.clamp(min=0)[:, None]
    chosen_C1 = wide_CV.gather(1, index_C1)
    log_sum_C1 = wide_CV.logsumexp(1, keepdim=True)
    losses_C.copy_((log_sum_C1 - chosen_C1).masked_fill_(~has_target_C1, 0).squeeze(1))
    if not with_gradients:
        return
    wide_CV.sub_(log_sum_C1).exp_()
    wide_CV.scatter_add_(1, index_C1, wide_CV.new_full((1, 1), -1).expand_as(index_C1))
    wide_CV.masked_fill_(~has_target_C1, 0)
    if wide_CV is not logits_CV:
        logits_CV.copy_(wide_CV)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        main_grad: Tensor | None,
    ) -> Tensor:
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        products = _Products(hidden_TD, weight_VD, targets_T, chunk_tokens)
        loss = products.sum(for_hidden=for_hidden, for_weight=for_weight)
        ctx.save_for_backward(products.grad_hidden_TD, products.grad_weight_VD)
        ctx.main_grad, ctx.dtype = main_grad, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the chunked cross-entropy can be differentiated once; create_graph=True needs the back-end 'torch'"
            )
        (grad,) = grads
        hidden_TD, weight_VD = ctx.saved_tensors
        # One by one, not a scalar: torch would round a scalar to the dtype of the tensor first.
        grad_hidden_TD = None if hidden_TD is None else (hidden_TD * grad.view(1, 1)).to(ctx.dtype)
        if weight_VD is None:
            return grad_hidden_TD, None, None, None, None
        if not needed_inputs(ctx)[1]:
            # A pass for the hidden states alone leaves the weight's main_grad as it is.
            return grad_hidden_TD, None, None, None, None
        if ctx.main_grad is None or captured_inputs(ctx)[1]:
            return grad_hidden_TD, (weight_VD * grad).to(ctx.dtype), None, None, None
        # None reaches the parameter too, so what waits for its gradient is told.
        ctx.main_grad.addcmul_(weight_VD, grad)
        return grad_hidden_TD, None, None, None, None
