"""The backward kernels of the fused router.

The first makes the gradient of the logits. Its product with the weight is the gradient of the tokens, for which torch
has a good kernel. Its product with the tokens is the gradient of the weight: the second kernel makes it from parts of
the batch, and the third adds the parts in a fixed order, so that the result is the same in each run.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

__all__ = ["add_parts_kernel", "logits_grad_kernel", "weight_grad_kernel"]


@triton.jit
def _scattered(
    saved_ptr,
    ids_ptr,
    weights_ptr,
    grad_weights_ptr,
    slot_T,
    is_live_T,
    weight_scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the gradient through the weights, (BLOCK_T, BLOCK_E): of the scores, or of the logits that were chosen.

    With w = c r / (sum of r + floor), dr = c / (sum of r + floor) * (dw - (sum of dw r) / (sum of r + floor)); with
    w = c softmax(l), dl = w * (dw - (sum of dw w) / c).
    """
    choice = tl.arange(0, BLOCK_K)
    mask_TK = is_live_T[:, None] & (choice < K)[None, :]
    slot_TK = slot_T[:, None] * K + choice[None, :]
    grad_TK = tl.load(grad_weights_ptr + slot_TK, mask=mask_TK, other=0.0)
    factor_T = tl.zeros((BLOCK_T,), tl.float32) + weight_scale
    mean_T = tl.zeros((BLOCK_T,), tl.float32)
    if SCORE == "softmax_of_chosen":
        mean_T = tl.sum(grad_TK * tl.load(weights_ptr + slot_TK, mask=mask_TK, other=0.0), 1) / weight_scale
    elif RENORMALIZE:
        ids_TK = tl.load(ids_ptr + slot_TK, mask=mask_TK, other=0)
        scores_TK = tl.load(saved_ptr + slot_T[:, None] * E + ids_TK, mask=mask_TK, other=float("-inf"))
        if SCORE == "sigmoid":
            scores_TK = _sigmoid(scores_TK)
        scores_TK = tl.where(mask_TK, scores_TK, 0.0)
        sum_T = tl.sum(scores_TK, 1) + 1e-20
        factor_T = weight_scale / sum_T
        mean_T = tl.sum(grad_TK * scores_TK, 1) / sum_T
    expert = tl.arange(0, BLOCK_E)[None, :]
    grad_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for k in range(K):
        id_T = tl.load(ids_ptr + slot_T * K + k, mask=is_live_T, other=-1).to(tl.int32)
        grad_T = tl.load(grad_weights_ptr + slot_T * K + k, mask=is_live_T, other=0.0)
        if SCORE == "softmax_of_chosen":
            factor_T = tl.load(weights_ptr + slot_T * K + k, mask=is_live_T, other=0.0)
        grad_T = factor_T * (grad_T - mean_T)
        grad_TE = tl.where(expert == id_T[:, None], grad_T[:, None], grad_TE)
    return grad_TE


@triton.jit
def _sigmoid(logits):
    small = tl.exp(-tl.abs(logits))
    return tl.where(logits >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def logits_grad_kernel(
    saved_ptr,
    lse_ptr,
    ids_ptr,
    weights_ptr,
    is_real_ptr,
    grad_weights_ptr,
    grad_scores_ptr,
    grad_probabilities_ptr,
    grad_z_ptr,
    grad_logits_ptr,
    num_tokens,
    weight_scale,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_GRAD_WEIGHTS: tl.constexpr,
    HAS_GRAD_SCORES: tl.constexpr,
    HAS_GRAD_PROBABILITIES: tl.constexpr,
    HAS_GRAD_Z: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the gradient of the logits, (T, PARTS, E), for one block of tokens.

    It is stored as a sum of PARTS numbers of the dtype of the tokens. Rows that are not live get
    zeros. `saved_ptr` holds the scores, or for sigmoids the logits.
    """
    row_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = row_T < num_tokens
    is_live_T = is_token_T
    if HAS_MASK:
        is_live_T = is_token_T & (tl.load(is_real_ptr + row_T, mask=is_token_T, other=0) != 0)
    slot_T = row_T.to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < E
    slot_TE = slot_T[:, None] * E + expert[None, :]
    mask_TE = is_live_T[:, None] & is_expert[None, :]
    grad_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if HAS_GRAD_WEIGHTS:
        grad_TE = _scattered(
            saved_ptr,
            ids_ptr,
            weights_ptr,
            grad_weights_ptr,
            slot_T,
            is_live_T,
            weight_scale,
            E,
            K,
            SCORE,
            RENORMALIZE,
            BLOCK_T,
            BLOCK_E,
            BLOCK_K,
        )
    direct_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if SCORE == "softmax_of_chosen":
        direct_TE, grad_TE = grad_TE, direct_TE
    if HAS_GRAD_SCORES:
        grad_TE += tl.load(grad_scores_ptr + slot_TE, mask=mask_TE, other=0.0)
    z_T = tl.zeros((BLOCK_T,), tl.float32)
    if HAS_GRAD_Z:
        lse_T = tl.load(lse_ptr + slot_T, mask=is_live_T, other=0.0)
        z_T = 2.0 * lse_T * tl.load(grad_z_ptr).to(tl.float32)
    saved_TE = tl.load(saved_ptr + slot_TE, mask=mask_TE, other=0.0)
    if SCORE == "sigmoid":
        small_TE = tl.exp(-tl.abs(saved_TE))
        inverse_TE = 1.0 / (1.0 + small_TE)
        scores_TE = tl.where(saved_TE >= 0, 1.0, small_TE) * inverse_TE
        rest_TE = tl.where(saved_TE >= 0, small_TE, 1.0) * inverse_TE
        grad_TE *= scores_TE * rest_TE
        if HAS_GRAD_PROBABILITIES:
            largest_T = tl.max(tl.where(mask_TE, saved_TE, float("-inf")), 1)
            shift_T = tl.where(is_live_T, tl.minimum(largest_T, 0.0), 0.0)
            probabilities_TE = tl.exp(tl.minimum(saved_TE, 0.0) - shift_T[:, None]) * inverse_TE
            probabilities_TE = tl.where(is_expert[None, :], probabilities_TE, 0.0)
            probabilities_TE *= (1.0 / tl.sum(probabilities_TE, 1))[:, None]
            price_E = tl.load(grad_probabilities_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
            mean_T = tl.sum(probabilities_TE * price_E[None, :], 1)
            grad_TE += rest_TE * probabilities_TE * (price_E[None, :] - mean_T[:, None])
        if HAS_GRAD_Z:
            grad_TE += z_T[:, None] * tl.exp(saved_TE - lse_T[:, None])
    else:
        if HAS_GRAD_PROBABILITIES:
            grad_TE += tl.load(grad_probabilities_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
        mean_T = tl.sum(saved_TE * grad_TE, 1)
        grad_TE = direct_TE + saved_TE * (grad_TE + (z_T - mean_T)[:, None])
    grad_TE = tl.where(mask_TE, grad_TE, 0.0)

    dtype: tl.constexpr = grad_logits_ptr.dtype.element_ty
    stored_ptrs = grad_logits_ptr + slot_T[:, None] * (PARTS * E) + expert[None, :]
    is_stored_TE = is_token_T[:, None] & is_expert[None, :]
    for part in tl.static_range(PARTS):
        part_TE = grad_TE.to(dtype)
        tl.store(stored_ptrs + part * E, part_TE, mask=is_stored_TE)
        grad_TE -= part_TE.to(tl.float32)


@triton.jit
def weight_grad_kernel(
    x_ptr,
    grad_logits_ptr,
    is_real_ptr,
    parts_ptr,
    num_tokens,
    width,
    rows_per_split,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PROMOTE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the product of the gradient of the logits and the tokens over one part of the batch, (splits, E, D) fp32.

    Program (d, s) makes BLOCK_D columns from the tokens s * rows_per_split and on. Tokens that are not live are not
    read: what stands in a padding row may be NaN.
    """
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    expert = tl.arange(0, BLOCK_E)
    row_T = tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * rows_per_split
    last = tl.minimum(first + rows_per_split, num_tokens)
    is_inside = (column < width)[None, :]
    is_expert = (expert < E)[None, :]
    total_DE = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    grad_DE = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for start in range(first, last, BLOCK_T):
        slot_T = (start + row_T).to(tl.int64)
        is_live_T = start + row_T < last
        # Loaded for all tokens: zero for those that are not live.
        logits_ptrs = grad_logits_ptr + slot_T[:, None] * (PARTS * E) + expert[None, :]
        logits_mask = is_live_T[:, None] & is_expert
        if HAS_MASK:
            is_live_T = is_live_T & (tl.load(is_real_ptr + slot_T, mask=is_live_T, other=0) != 0)
        x_mask = is_live_T[:, None] if IS_EVEN else is_live_T[:, None] & is_inside
        x_TD = tl.load(x_ptr + slot_T[:, None] * width + column[None, :], mask=x_mask, other=0.0)
        for part in tl.static_range(PARTS - 1, -1, -1):
            logits_TE = tl.load(logits_ptrs + part * E, mask=logits_mask, other=0.0)
            grad_DE = tl.dot(x_TD.T, logits_TE, grad_DE, input_precision="ieee")
        # As in the forward kernel: long sums lose digits in tensor cores.
        if PROMOTE > 0 and ((start - first) // BLOCK_T) % PROMOTE == PROMOTE - 1:
            total_DE += grad_DE
            grad_DE = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    grad_DE += total_DE
    part_ptr = parts_ptr + tl.program_id(1).to(tl.int64) * E * width
    grad_ED = grad_DE.T
    tl.store(part_ptr + expert[:, None] * width + column[None, :], grad_ED, mask=is_inside & (expert < E)[:, None])


@triton.jit
def add_parts_kernel(parts_ptr, grad_ptr, num_weights, num_parts, BLOCK: tl.constexpr):
    """Add the parts of a gradient, (num_parts, num_weights) fp32, from the first to the last."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < num_weights
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts_ptr + part * num_weights.to(tl.int64) + index, mask=is_inside, other=0.0)
    tl.store(grad_ptr + index, total.to(grad_ptr.dtype.element_ty), mask=is_inside)
