"""The launches of the fused router and its autograd function.

Nothing here waits for the device, and all sizes come from shapes: a forward and a backward pass can be captured.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-call"

import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from coterie_routing.fused_router.triton_backward import add_parts_kernel, logits_grad_kernel, weight_grad_kernel
from coterie_routing.fused_router.triton_kernels import add_blocks_kernel, forward_kernel, split_kernel

__all__ = ["FusedRoute", "Options"]

# Parts of an fp32 weight, and of a gradient that must come out in fp32, as sums of bf16 numbers.
_FP32_PARTS = 3
# Rows and columns of block sums that one program adds at a time.
_ADDED_BLOCKS = 256
_ADDED_COLUMNS = 8
_ELEMENTWISE_BLOCK = 1024
# Programs of the weight's gradient: one for each multiprocessor of an H200.
_WEIGHT_GRAD_PROGRAMS = 132
# Of each thread, the devices whose context it has.
_threads = threading.local()


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of one program of a matrix product.

    Attributes:
        tokens: Tokens at a time.
        columns: Numbers of a token at a time.
        warps: Warps of the program.
        stages: Steps of its loop whose operands are on their way at once.
        promote: Steps that are summed in the tensor cores before they are added to a total in fp32; 0 means all. A step
            of one product cannot be kept apart (the compiler adds it to the total inside the tensor cores): where the
            weight has one part the least is 2.
    """

    tokens: int
    columns: int
    warps: int
    stages: int
    promote: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What does not change with the tokens; see `coterie_routing.fused_router.fused_route`."""

    top_k: int
    score_function: str
    renormalize: bool
    weight_scale: float


# By the number of experts, rounded up to a power of two, and the parts of the weight. For 8, 64, 128 and 256 experts
# and one part they are the fastest of a few, timed on an H200; a program must fit in 227 KiB of shared memory.
_FORWARD_TILES: dict[tuple[int, int], Tile] = {
    (16, 1): Tile(tokens=128, columns=64, warps=4, stages=4, promote=2),
    (32, 1): Tile(tokens=128, columns=64, warps=4, stages=4, promote=2),
    (64, 1): Tile(tokens=128, columns=64, warps=4, stages=4, promote=2),
    (128, 1): Tile(tokens=64, columns=64, warps=4, stages=4, promote=2),
    (256, 1): Tile(tokens=64, columns=64, warps=8, stages=4, promote=2),
    (512, 1): Tile(tokens=64, columns=64, warps=8, stages=3, promote=2),
    (16, 3): Tile(tokens=128, columns=64, warps=8, stages=3, promote=1),
    (32, 3): Tile(tokens=128, columns=64, warps=8, stages=3, promote=1),
    (64, 3): Tile(tokens=128, columns=64, warps=8, stages=3, promote=1),
    (128, 3): Tile(tokens=128, columns=64, warps=8, stages=3, promote=1),
    (256, 3): Tile(tokens=64, columns=64, warps=8, stages=2, promote=1),
    (512, 3): Tile(tokens=64, columns=32, warps=8, stages=2, promote=1),
}
_WEIGHT_GRAD_TILES: dict[tuple[int, int], Tile] = {
    (16, 1): Tile(tokens=64, columns=128, warps=4, stages=4),
    (32, 1): Tile(tokens=64, columns=128, warps=4, stages=4),
    (64, 1): Tile(tokens=64, columns=128, warps=4, stages=4),
    (128, 1): Tile(tokens=64, columns=128, warps=4, stages=4),
    (256, 1): Tile(tokens=64, columns=128, warps=8, stages=3),
    (512, 1): Tile(tokens=64, columns=64, warps=8, stages=3),
    (16, 3): Tile(tokens=64, columns=128, warps=8, stages=3, promote=1),
    (32, 3): Tile(tokens=64, columns=128, warps=8, stages=3, promote=1),
    (64, 3): Tile(tokens=64, columns=128, warps=8, stages=3, promote=1),
    (128, 3): Tile(tokens=64, columns=128, warps=8, stages=3, promote=1),
    (256, 3): Tile(tokens=64, columns=64, warps=8, stages=2, promote=1),
    (512, 3): Tile(tokens=32, columns=64, warps=8, stages=2, promote=1),
}
# Products of fp32 numbers run outside the tensor cores.
_FP32_TILE = Tile(tokens=32, columns=16, warps=4, stages=2, promote=2)


class FusedRoute(torch.autograd.Function):
    """The fused router as one operation; see `coterie_routing.fused_router.fused_route`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        is_real_T: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, ...]:
        """Return the fields of `FusedRouting`, in their order."""
        ctx.set_materialize_grads(False)
        x_TD, weight_ED = x_TD.contiguous(), weight_ED.contiguous()
        num_tokens, num_experts, device = x_TD.shape[0], weight_ED.shape[0], x_TD.device
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        ids_TK = torch.empty(num_tokens, options.top_k, dtype=torch.int64, device=device)
        weights_TK = torch.empty(num_tokens, options.top_k, **fp32)
        scores_TE = torch.empty(num_tokens, num_experts, **fp32)
        lse_T = torch.empty(num_tokens, **fp32)
        # The backward pass of sigmoids needs the logits: where a sigmoid is 1.0 it does not tell them.
        keeps_logits = options.score_function == "sigmoid" and any(ctx.needs_input_grad[:2])
        # The kernel reads logits back to rank by them. Where nobody keeps them, the scores then take their place.
        stores_logits = keeps_logits or bias_E is None or options.score_function == "softmax_of_chosen"
        is_apart = keeps_logits or (stores_logits and bias_E is not None)
        logits_TE = torch.empty_like(scores_TE) if is_apart else scores_TE
        sums = _forward(
            x_TD, weight_ED, bias_E, is_real_T, options, ids_TK, weights_TK, scores_TE, logits_TE, lse_T, stores_logits
        )
        kept_TK = weights_TK if options.score_function == "softmax_of_chosen" else None
        saved_TE = logits_TE if keeps_logits else scores_TE
        ctx.options = options
        ctx.save_for_backward(x_TD, weight_ED, saved_TE, lse_T, ids_TK, kept_TK, is_real_T)
        counts_E, probability_sums_E, z_sum, num_real, num_bad = sums
        ctx.mark_non_differentiable(ids_TK, counts_E, num_real, num_bad)
        return ids_TK, weights_TK, scores_TE, counts_E, probability_sums_E, z_sum, num_real, num_bad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of the weight, in their dtypes.

        Raises:
            RuntimeError: If a graph of the gradients is asked for.
        """
        if torch.is_grad_enabled():
            # `once_differentiable` of torch does not raise where `autograd.grad` finds another path to its inputs.
            raise RuntimeError("the fused router can be differentiated once; create_graph=True is not supported")
        contiguous = [None if grad is None else grad.contiguous() for grad in grads]
        x_TD, weight_ED, saved_TE, lse_T, ids_TK, kept_TK, is_real_T = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        num_tokens, num_experts = x_TD.shape[0], weight_ED.shape[0]
        block_e = _block_e(num_experts)
        block_t = max(16, 4096 // block_e)
        # With an fp32 weight the gradient of the logits needs more digits than bf16 tokens have.
        is_split = x_TD.dtype != torch.float32 and weight_ED.dtype == torch.float32
        parts = _FP32_PARTS if is_split else 1
        grad_logits_TPE = torch.empty(num_tokens, parts, num_experts, dtype=x_TD.dtype, device=x_TD.device)
        if num_tokens > 0:
            logits_grad_kernel[(triton.cdiv(num_tokens, block_t),)](
                saved_TE,
                lse_T,
                ids_TK,
                kept_TK,
                is_real_T,
                contiguous[1],
                contiguous[2],
                contiguous[4],
                contiguous[5],
                grad_logits_TPE,
                num_tokens,
                ctx.options.weight_scale,
                E=num_experts,
                K=ctx.options.top_k,
                PARTS=parts,
                SCORE=ctx.options.score_function,
                RENORMALIZE=ctx.options.renormalize,
                HAS_MASK=is_real_T is not None,
                HAS_GRAD_WEIGHTS=contiguous[1] is not None,
                HAS_GRAD_SCORES=contiguous[2] is not None,
                HAS_GRAD_PROBABILITIES=contiguous[4] is not None,
                HAS_GRAD_Z=contiguous[5] is not None,
                BLOCK_T=block_t,
                BLOCK_E=block_e,
                BLOCK_K=_block_k(ctx.options.top_k),
                num_warps=4,
                enable_fp_fusion=True,
            )
        grad_x_TD = None
        if needs_x:
            # Two parts hold 16 bits: the gradient of the logits is then as good as exact, and the weight is rounded.
            used = min(parts, 2)
            with torch.autocast(x_TD.device.type, enabled=False):
                grad_logits_TQ = grad_logits_TPE[:, :used].flatten(1)
                grad_x_TD = torch.mm(grad_logits_TQ, weight_ED.to(x_TD.dtype).repeat(used, 1))
        grad_weight_ED = _weight_grad(x_TD, grad_logits_TPE, is_real_T, weight_ED) if needs_weight else None
        return grad_x_TD, grad_weight_ED, None, None, None


def _forward(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    is_real_T: Tensor | None,
    options: Options,
    ids_TK: Tensor,
    weights_TK: Tensor,
    scores_TE: Tensor,
    logits_TE: Tensor,
    lse_T: Tensor,
    stores_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fill the tensors of each token and return the sums: counts, probabilities, z, real tokens, bad tokens."""
    num_tokens, width = x_TD.shape
    num_experts, device = weight_ED.shape[0], x_TD.device
    block_e = _block_e(num_experts)
    parts_PED = _parts(weight_ED, x_TD.dtype)
    tile = _FP32_TILE if x_TD.dtype == torch.float32 else _FORWARD_TILES[block_e, parts_PED.shape[0]]
    num_blocks = triton.cdiv(num_tokens, tile.tokens)
    num_words = max(4, block_e // 32)
    block_probabilities_BE = torch.empty(num_blocks, num_experts, dtype=torch.float32, device=device)
    block_counts_BW8 = torch.empty(num_blocks, num_words, 8, dtype=torch.int32, device=device)
    block_stats_B2 = torch.empty(num_blocks, 2, dtype=torch.int32, device=device)
    block_z_B = torch.empty(num_blocks, dtype=torch.float64, device=device)
    if num_tokens > 0:
        # What the copy engine asks of an address and of a stride.
        tensors = (x_TD, parts_PED)
        _ensure_context(device)
        uses_tma = all(one.data_ptr() % 16 == 0 and width * one.element_size() % 16 == 0 for one in tensors)
        forward_kernel[(num_blocks,)](
            TensorDescriptor.from_tensor(x_TD, [tile.tokens, tile.columns]) if uses_tma else x_TD,
            TensorDescriptor.from_tensor(parts_PED, [1, block_e, tile.columns]) if uses_tma else parts_PED,
            bias_E,
            is_real_T,
            ids_TK,
            weights_TK,
            scores_TE,
            logits_TE,
            lse_T,
            block_probabilities_BE,
            block_counts_BW8,
            block_stats_B2,
            block_z_B,
            num_tokens,
            width,
            options.weight_scale,
            E=num_experts,
            K=options.top_k,
            PARTS=parts_PED.shape[0],
            SCORE=options.score_function,
            RENORMALIZE=options.renormalize,
            HAS_BIAS=bias_E is not None,
            HAS_MASK=is_real_T is not None,
            STORES_LOGITS=stores_logits,
            USES_TMA=uses_tma,
            PROMOTE=tile.promote,
            IS_EVEN=width % tile.columns == 0,
            BLOCK_T=tile.tokens,
            BLOCK_D=tile.columns,
            BLOCK_E=block_e,
            BLOCK_K=_block_k(options.top_k),
            num_warps=tile.warps,
            num_stages=tile.stages,
            # A score plus a bias is rounded twice, as in the reference: fused it could rank another expert first.
            enable_fp_fusion=bias_E is None,
        )
    counts_E = torch.empty(num_experts, dtype=torch.int64, device=device)
    probability_sums_E = torch.empty(num_experts, dtype=torch.float64, device=device)
    z_sum = torch.empty((), dtype=torch.float64, device=device)
    num_real, num_bad = (torch.empty((), dtype=torch.int64, device=device) for _ in range(2))
    add_blocks_kernel[(triton.cdiv(num_experts, _ADDED_COLUMNS),)](
        block_probabilities_BE,
        block_counts_BW8,
        block_stats_B2,
        block_z_B,
        probability_sums_E,
        counts_E,
        z_sum,
        num_real,
        num_bad,
        num_blocks,
        E=num_experts,
        WORDS=num_words,
        BLOCK_E=block_e,
        BLOCK=_ADDED_BLOCKS,
        COLUMNS=_ADDED_COLUMNS,
        num_warps=8,
    )
    return counts_E, probability_sums_E, z_sum, num_real, num_bad


def _weight_grad(x_TD: Tensor, grad_logits_TPE: Tensor, is_real_T: Tensor | None, weight_ED: Tensor) -> Tensor:
    num_tokens, width = x_TD.shape
    num_experts, parts = weight_ED.shape[0], grad_logits_TPE.shape[1]
    block_e = _block_e(num_experts)
    tile = _FP32_TILE if x_TD.dtype == torch.float32 else _WEIGHT_GRAD_TILES[block_e, parts]
    num_column_blocks = triton.cdiv(width, tile.columns)
    num_row_blocks = max(1, triton.cdiv(num_tokens, tile.tokens))
    wanted_splits = max(1, min(num_row_blocks, _WEIGHT_GRAD_PROGRAMS // num_column_blocks))
    rows_per_split = triton.cdiv(num_row_blocks, wanted_splits) * tile.tokens
    num_splits = max(1, triton.cdiv(num_tokens, rows_per_split))
    splits_SED = torch.empty(num_splits, num_experts, width, dtype=torch.float32, device=x_TD.device)
    weight_grad_kernel[(num_column_blocks, num_splits)](
        x_TD,
        grad_logits_TPE,
        is_real_T,
        splits_SED,
        num_tokens,
        width,
        rows_per_split,
        E=num_experts,
        PARTS=parts,
        PROMOTE=tile.promote,
        HAS_MASK=is_real_T is not None,
        IS_EVEN=width % tile.columns == 0,
        BLOCK_T=tile.tokens,
        BLOCK_D=tile.columns,
        BLOCK_E=block_e,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    grad_weight_ED = torch.empty_like(weight_ED)
    num_weights = weight_ED.numel()
    add_parts_kernel[(triton.cdiv(num_weights, _ELEMENTWISE_BLOCK),)](
        splits_SED, grad_weight_ED, num_weights, num_splits, BLOCK=_ELEMENTWISE_BLOCK, num_warps=4
    )
    return grad_weight_ED


def _ensure_context(device: torch.device) -> None:
    """Let this thread have the context of the device, which a TMA descriptor needs and does not ask for.

    PyTorch gives it to a thread with the first work that the thread launches. A thread of autograd whose first work is
    a kernel with descriptors, which another thread has loaded, would have none: "invalid device context" (PyTorch's
    issue 124565).
    """
    known = _threads.__dict__.setdefault("devices", set())
    if device.type == "cuda" and device.index not in known:
        torch.zeros(1, device=device)
        known.add(device.index)


def _parts(weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight as a sum of parts, (parts, E, D), whose products with numbers of this dtype are exact."""
    if weight_ED.dtype == dtype or dtype == torch.float32:
        return weight_ED.unsqueeze(0)
    parts_PED = torch.empty(_FP32_PARTS, *weight_ED.shape, dtype=dtype, device=weight_ED.device)
    num_weights = weight_ED.numel()
    split_kernel[(triton.cdiv(num_weights, _ELEMENTWISE_BLOCK),)](
        weight_ED, parts_PED, num_weights, PARTS=_FP32_PARTS, BLOCK=_ELEMENTWISE_BLOCK, num_warps=4
    )
    return parts_PED


def _block_e(num_experts: int) -> int:
    return max(16, int(triton.next_power_of_2(num_experts)))


def _block_k(top_k: int) -> int:
    return max(2, int(triton.next_power_of_2(top_k)))
