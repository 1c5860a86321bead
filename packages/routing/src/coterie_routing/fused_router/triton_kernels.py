"""The forward kernels of the fused router.

One kernel reads the tokens once: logits, scores, the choice, weights and the sums over its block of tokens. A small one
adds the sums of the blocks, in fp64 and in a fixed order, so that every result is the same in each run.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from coterie_routing.fused_router.triton_top_k import bit_of_id, choose, counts_of_words, lowest_id

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

__all__ = ["add_blocks_kernel", "forward_kernel", "split_kernel"]


@triton.jit
def split_kernel(weight_ptr, parts_ptr, num_weights, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write fp32 numbers as a sum of PARTS bf16 numbers, (PARTS, num_weights): three hold all 24 bits."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < num_weights
    rest = tl.load(weight_ptr + index, mask=is_inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts_ptr + part * num_weights.to(tl.int64) + index, rounded, mask=is_inside)
        rest -= rounded.to(tl.float32)


@triton.jit
def _logits(
    x_ptr,
    weight_ptr,
    row_T,
    is_live_T,
    width,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    USES_TMA: tl.constexpr,
    PROMOTE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return fp32 logits (BLOCK_T, BLOCK_E); rows that are not live are never read and give 0."""
    expert = tl.arange(0, BLOCK_E)
    column = tl.arange(0, BLOCK_D)
    is_expert = (expert < E)[:, None]
    if not USES_TMA:
        x_ptrs = x_ptr + row_T.to(tl.int64)[:, None] * width + column[None, :]
        weight_ptrs = weight_ptr + expert.to(tl.int64)[:, None] * width + column[None, :]
    total_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    logits_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, width, BLOCK_D):
        is_inside = (column < width - start)[None, :]
        if USES_TMA:
            x_TD = x_ptr.load([tl.program_id(0) * BLOCK_T, start])
        else:
            x_mask = is_live_T[:, None] if IS_EVEN else is_live_T[:, None] & is_inside
            x_TD = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        # The smallest part first: each addition to a large sum cuts it short.
        for part in tl.static_range(PARTS - 1, -1, -1):
            if USES_TMA:
                weight_ED = weight_ptr.load([part, 0, start]).reshape(BLOCK_E, BLOCK_D)
            elif IS_EVEN and E == BLOCK_E:
                weight_ED = tl.load(weight_ptrs + (part * E * width.to(tl.int64) + start))
            else:
                part_ptrs = weight_ptrs + (part * E * width.to(tl.int64) + start)
                weight_ED = tl.load(part_ptrs, mask=is_expert & is_inside, other=0.0)
            # The products of bf16 numbers are exact in fp32; "ieee" is for fp32 operands, which tf32 would cut short.
            logits_TE = tl.dot(x_TD, weight_ED.to(x_TD.dtype).T, logits_TE, input_precision="ieee")
        # Tensor cores cut sums short instead of rounding them, so that the error grows with the length of the sum.
        if PROMOTE > 0 and (start // BLOCK_D) % PROMOTE == PROMOTE - 1:
            total_TE += logits_TE
            logits_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    logits_TE += total_TE
    if HAS_MASK:
        logits_TE = tl.where(is_live_T[:, None], logits_TE, 0.0)
    return logits_TE


@triton.jit
def forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    is_real_ptr,
    ids_ptr,
    weights_ptr,
    scores_ptr,
    logits_ptr,
    lse_ptr,
    block_probabilities_ptr,
    block_counts_ptr,
    block_stats_ptr,
    block_z_ptr,
    num_tokens,
    width,
    weight_scale,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    STORES_LOGITS: tl.constexpr,
    USES_TMA: tl.constexpr,
    PROMOTE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Route one block of tokens, at most 255.

    A row is live if it is a real token. The sums over the block go to one row of the block tensors: probabilities
    (blocks, E) fp32; counts (blocks, words, 8) int32, see `counts_of_words`; stats (blocks, 2) int32, the live and the
    bad rows; z (blocks) fp64. With USES_TMA tokens and weight come as tensor descriptors, else as pointers; the weight
    is the sum of PARTS tensors, (PARTS, E, D). With STORES_LOGITS the memory of the logits may be that of the scores.
    """
    block = tl.program_id(0).to(tl.int64)
    row_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = row_T < num_tokens
    is_live_T = is_token_T
    if HAS_MASK:
        is_live_T = is_token_T & (tl.load(is_real_ptr + row_T, mask=is_token_T, other=0) != 0)
    expert = tl.arange(0, BLOCK_E)
    is_expert = (expert < E)[None, :]
    logits_TE = _logits(
        x_ptr,
        weight_ptr,
        row_T,
        is_live_T,
        width,
        E,
        PARTS,
        HAS_MASK,
        USES_TMA,
        PROMOTE,
        IS_EVEN,
        BLOCK_T,
        BLOCK_D,
        BLOCK_E,
    )

    slot_T = row_T.to(tl.int64)
    slot_TE = slot_T[:, None] * E + expert[None, :]
    is_stored_TE = is_token_T[:, None] & is_expert
    if STORES_LOGITS:
        tl.store(logits_ptr + slot_TE, logits_TE, mask=is_stored_TE)
    # A sum of finite logits is finite, and one with an infinite one or NaN is not.
    is_bad_T = is_live_T & ~(tl.abs(tl.sum(logits_TE, 1)) < float("inf"))
    tl.store(block_stats_ptr + 2 * block, tl.sum(is_live_T.to(tl.int32), 0))

    # Where logits rank, the choice comes first: it then shares the registers with no other tile.
    rank_TE = logits_TE
    if HAS_BIAS:
        comparable_TE = tl.where((logits_TE == logits_TE) & is_expert, logits_TE, float("-inf"))
        largest_T = tl.max(comparable_TE, 1)
        scores_TE, probabilities_TE, lse_T, shift_T, norm_T = _scores(
            logits_TE, largest_T, is_live_T, is_expert, SCORE, HAS_MASK
        )
        tl.store(scores_ptr + slot_TE, scores_TE, mask=is_stored_TE)
        bias_E = tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
        rank_TE = scores_TE + bias_E[None, :]
        is_bad_T |= is_live_T & (tl.max((bias_E != bias_E).to(tl.int32), 0) > 0)
    tl.store(block_stats_ptr + 2 * block + 1, tl.sum(is_bad_T.to(tl.int32), 0))
    if E < BLOCK_E:
        rank_TE = tl.where(is_expert, rank_TE, float("-inf"))
    # Not a number ranks as the lowest: rare, except that a bias may hold it too.
    if HAS_BIAS or tl.max(is_bad_T.to(tl.int32), 0) > 0:
        rank_TE = tl.where(rank_TE == rank_TE, rank_TE, float("-inf"))
    largest_rank_T, words_TW = choose(rank_TE, is_live_T, K, BLOCK_T, BLOCK_E)
    WORDS: tl.constexpr = words_TW.shape[1]
    counts_W8 = counts_of_words(tl.where(is_live_T[:, None], words_TW, 0))
    counts_ptrs = block_counts_ptr + block * (8 * WORDS) + tl.arange(0, 8 * WORDS)
    tl.store(counts_ptrs, tl.reshape(counts_W8, (8 * WORDS,)))
    choice = tl.arange(0, BLOCK_K)[None, :]
    ids_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for k in range(K):
        id_T, lowest_TW = lowest_id(words_TW, BLOCK_E)
        words_TW ^= lowest_TW
        ids_TK = tl.where(choice == k, id_T[:, None], ids_TK)
    # Other threads of the block wrote the logits or scores that are read now.
    tl.debug_barrier()
    is_choice_TK = is_token_T[:, None] & (choice < K)
    id_slot_TK = slot_T[:, None] * E + ids_TK
    if STORES_LOGITS:
        logits_TK = tl.load(logits_ptr + id_slot_TK, mask=is_choice_TK, other=float("-inf"))
    if HAS_BIAS:
        scores_TK = tl.load(scores_ptr + id_slot_TK, mask=is_choice_TK, other=0.0)
        rank_TK = scores_TK + tl.load(bias_ptr + ids_TK)
    else:
        rank_TK = logits_TK
        # The scores may take the memory of the logits.
        tl.debug_barrier()
        scores_TE, probabilities_TE, lse_T, shift_T, norm_T = _scores(
            logits_TE, largest_rank_T, is_live_T, is_expert, SCORE, HAS_MASK
        )
        tl.store(scores_ptr + slot_TE, scores_TE, mask=is_stored_TE)
    tl.store(block_probabilities_ptr + block * E + expert, tl.sum(probabilities_TE, 0), mask=expert < E)
    tl.store(lse_ptr + slot_T, lse_T, mask=is_token_T)
    z_T = tl.where(is_live_T, lse_T, 0.0).to(tl.float64)
    tl.store(block_z_ptr + block, tl.sum(z_T * z_T, 0))

    # The ids of a row stand by rising id; a choice comes after those of a higher rank and equal ones of a lower id.
    rank_TK = tl.where((rank_TK == rank_TK) & is_choice_TK, rank_TK, float("-inf"))
    place_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for k in range(K):
        other_T = tl.max(tl.where(choice == k, rank_TK, float("-inf")), 1)
        is_ahead_TK = (other_T[:, None] > rank_TK) | ((other_T[:, None] == rank_TK) & (k < choice))
        place_TK += is_ahead_TK.to(tl.int32)
    if SCORE == "softmax_of_chosen" or (SCORE == "softmax" and RENORMALIZE and not HAS_BIAS):
        # The same where the largest logit is chosen: the chosen part of a softmax, renormalised.
        weights_TK = tl.exp2((logits_TK - tl.max(logits_TK, 1)[:, None]) * LOG2_E)
        weights_TK *= (weight_scale / tl.sum(weights_TK, 1))[:, None]
        if SCORE == "softmax":
            # A NaN among the logits that were not chosen reaches the weights too.
            weights_TK += (0.0 * lse_T)[:, None]
    else:
        if HAS_BIAS:
            weights_TK = scores_TK
        elif SCORE == "sigmoid":
            weights_TK = 1.0 / (1.0 + tl.exp2(-logits_TK * LOG2_E))
        else:
            weights_TK = tl.exp2(logits_TK * LOG2_E - shift_T[:, None]) * norm_T[:, None]
        if RENORMALIZE:
            weights_TK *= (weight_scale / (tl.sum(weights_TK, 1) + 1e-20))[:, None]
        else:
            weights_TK *= weight_scale
    sorted_TK = slot_T[:, None] * K + place_TK
    tl.store(ids_ptr + sorted_TK, tl.where(is_live_T[:, None], ids_TK, -1).to(tl.int64), mask=is_choice_TK)
    tl.store(weights_ptr + sorted_TK, tl.where(is_live_T[:, None], weights_TK, 0.0), mask=is_choice_TK)


@triton.jit
def _scores(logits_TE, largest_T, is_live_T, is_expert, SCORE: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return scores and probabilities, (BLOCK_T, BLOCK_E), 0 in rows that are not live, and numbers of each row.

    These are the logsumexp, and the two with which a logit l has the softmax 2^(l log2(e) - shift) * norm.
    `largest_T` is the largest logit of each row that is not NaN.
    """
    shift_T = largest_T * LOG2_E
    exponential_TE = tl.where(is_expert, tl.exp2(logits_TE * LOG2_E - shift_T[:, None]), 0.0)
    sum_T = tl.sum(exponential_TE, 1)
    norm_T = tl.where(is_live_T, 1.0 / sum_T, 0.0)
    lse_T = (shift_T + tl.log2(sum_T)) * LN_2
    if SCORE == "sigmoid":
        small_TE = tl.exp2(-tl.abs(logits_TE) * LOG2_E)
        inverse_TE = 1.0 / (1.0 + small_TE)
        scores_TE = tl.where(logits_TE >= 0, 1.0, small_TE) * inverse_TE
        # softmax(logsigmoid(logits)), in which nothing underflows: all sigmoids, over the largest of them or 1.
        lowered_TE = tl.minimum(logits_TE, 0.0) * LOG2_E - tl.minimum(shift_T, 0.0)[:, None]
        probabilities_TE = tl.where(is_expert, tl.exp2(lowered_TE) * inverse_TE, 0.0)
        total_T = tl.sum(probabilities_TE, 1)
        probabilities_TE *= tl.where(is_live_T, 1.0 / total_T, 0.0)[:, None]
        if HAS_MASK:
            scores_TE = tl.where(is_live_T[:, None], scores_TE, 0.0)
    else:
        scores_TE = exponential_TE * norm_T[:, None]
        probabilities_TE = scores_TE
    return scores_TE, probabilities_TE, lse_T, shift_T, norm_T


@triton.jit
def add_blocks_kernel(
    block_probabilities_ptr,
    block_counts_ptr,
    block_stats_ptr,
    block_z_ptr,
    probability_sums_ptr,
    counts_ptr,
    z_sum_ptr,
    num_tokens_ptr,
    num_bad_ptr,
    num_blocks,
    E: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the sums of all blocks, COLUMNS experts in each program and the other numbers in the first."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    word, bit = bit_of_id(expert, BLOCK_E)
    probabilities = tl.zeros((BLOCK, COLUMNS), tl.float64)
    counts = tl.zeros((BLOCK, COLUMNS), tl.int32)
    z = tl.zeros((BLOCK,), tl.float64)
    num_live = tl.zeros((BLOCK,), tl.int32)
    num_bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK).to(tl.int64)
        is_block = block < num_blocks
        mask = is_block[:, None] & (expert < E)[None, :]
        slots = block[:, None] * E + expert[None, :]
        probabilities += tl.load(block_probabilities_ptr + slots, mask=mask, other=0.0).to(tl.float64)
        slots = block[:, None] * (8 * WORDS) + (8 * word + bit % 8)[None, :]
        counts += (tl.load(block_counts_ptr + slots, mask=mask, other=0) >> (8 * (bit // 8))[None, :]) & 0xFF
        z += tl.load(block_z_ptr + block, mask=is_block, other=0.0)
        num_live += tl.load(block_stats_ptr + 2 * block, mask=is_block, other=0)
        num_bad += tl.load(block_stats_ptr + 2 * block + 1, mask=is_block, other=0)
    tl.store(probability_sums_ptr + expert, tl.sum(probabilities, 0), mask=expert < E)
    tl.store(counts_ptr + expert, tl.sum(counts.to(tl.int64), 0), mask=expert < E)
    if tl.program_id(0) == 0:
        tl.store(z_sum_ptr, tl.sum(z, 0))
        tl.store(num_tokens_ptr, tl.sum(num_live.to(tl.int64), 0))
        tl.store(num_bad_ptr, tl.sum(num_bad.to(tl.int64), 0))
