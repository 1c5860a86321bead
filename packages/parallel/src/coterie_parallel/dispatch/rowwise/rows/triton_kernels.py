"""Rows to and from the buffers of peers in Triton kernels that see only a table of base addresses.

Put copies words of up to 8 bytes, whatever the dtype; get loads and adds elements. One program takes one token, or a
piece of its row, so that put reads it once and get adds its K rows in k order. None of the kernels signals or waits.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, assignment"
# mypy: disable-error-code="var-annotated, unreachable"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie_parallel.dispatch.rowwise.peers.base import PeerTensor
from coterie_parallel.dispatch.rowwise.placement.reference import RowPlan

__all__ = ["clear_padding", "get_rows", "get_values", "put_rows"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes of a row that one program of put and of get moves at most. Put is fastest with whole rows and few warps, each of
# which writes 8 KiB in a run; get with one access of 16 bytes for each thread and row.
_PUT_BYTES = 16384
_GET_BYTES = 2048
# Programs that share the padding rows of one expert.
_CLEARERS = 16
_VALUES = 512


def put_rows(
    x_TD: Tensor, weights_TK: Tensor | None, plan: RowPlan, rows: PeerTensor, row_weights: PeerTensor | None
) -> None:
    """Write each pair's row, and its weight, to its place; see `coterie_parallel.dispatch.rowwise.rows.put_rows`."""
    num_tokens, num_choices = plan.row_TK.shape
    words_TD = _as_words(x_TD)
    block = _block(words_TD, _PUT_BYTES)
    num_pieces = triton.cdiv(words_TD.shape[1], block)
    if num_tokens * num_choices * num_pieces == 0:
        return
    _put_kernel[(num_tokens * num_pieces,)](
        words_TD,
        weights_TK,
        plan.rank_TK,
        plan.row_TK,
        rows.addresses_S,
        None if row_weights is None else row_weights.addresses_S,
        rows.local.shape[0],
        K=num_choices,
        CHOICES=triton.next_power_of_2(num_choices),
        WIDTH=words_TD.shape[1],
        PIECES=num_pieces,
        BLOCK=block,
        num_warps=max(1, block * words_TD.element_size() // 8192),
    )


def clear_padding(rows_CD: Tensor, row_weights_C: Tensor | None, offsets_e: Tensor, total_e: Tensor) -> None:
    """Zero the padding rows; see `coterie_parallel.dispatch.rowwise.rows.clear_padding`."""
    words_CD = _as_words(rows_CD)
    if offsets_e.numel() == 0 or words_CD.numel() == 0:
        return
    _clear_kernel[(offsets_e.numel() * _CLEARERS,)](
        words_CD,
        row_weights_C,
        offsets_e,
        total_e,
        words_CD.shape[0],
        WIDTH=words_CD.shape[1],
        BLOCK=_block(words_CD, 8192),
        CLEARERS=_CLEARERS,
        num_warps=4,
    )


def get_rows(rows: PeerTensor, plan: RowPlan) -> Tensor:
    """Return each token's sum of its rows; see `coterie_parallel.dispatch.rowwise.rows.get_rows`."""
    num_tokens, num_choices = plan.row_TK.shape
    y_TD = rows.local.new_empty((num_tokens, rows.local.shape[1]))
    block = _block(y_TD, _GET_BYTES)
    num_pieces = triton.cdiv(y_TD.shape[1], block)
    if y_TD.numel() == 0:
        return y_TD
    _get_kernel[(num_tokens * num_pieces,)](
        y_TD,
        plan.rank_TK,
        plan.row_TK,
        rows.addresses_S,
        rows.local.shape[0],
        K=num_choices,
        WIDTH=y_TD.shape[1],
        PIECES=num_pieces,
        BLOCK=block,
        SUM=tl.float64 if y_TD.dtype == torch.float64 else tl.float32,
        num_warps=4,
    )
    return y_TD


def get_values(values: PeerTensor, plan: RowPlan) -> Tensor:
    """Return the value of each pair; see `coterie_parallel.dispatch.rowwise.rows.get_values`."""
    values_TK = values.local.new_empty(plan.row_TK.shape)
    num_pairs = values_TK.numel()
    if num_pairs:
        _values_kernel[(triton.cdiv(num_pairs, _VALUES),)](
            values_TK,
            plan.rank_TK,
            plan.row_TK,
            values.addresses_S,
            values.local.shape[0],
            num_pairs,
            BLOCK=_VALUES,
        )
    return values_TK


def _as_words(x_TD: Tensor) -> Tensor:
    """Return the rows as integers, the widest of which a row, and its address, is a multiple."""
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    return x_TD.view(_WORDS[math.gcd(row_bytes, x_TD.data_ptr(), 8)])


def _block(x_TD: Tensor, most_bytes: int) -> int:
    return int(min(most_bytes // x_TD.element_size(), triton.next_power_of_2(max(1, x_TD.shape[1]))))


@triton.jit
def _address(rank_ptr, row_ptr, addresses_ptr, pair, capacity):
    """Return the base address of a pair's buffer, its row, and whether the buffer holds it."""
    row = tl.load(row_ptr + pair)
    is_held = (row >= 0) & (row < capacity)
    base = tl.load(addresses_ptr + tl.load(rank_ptr + pair), mask=is_held, other=0)
    return base, row, is_held


@triton.jit
def _mask_of_all(is_true, like):
    """Return a mask in the shape of `like`, all of it `is_true`, which is a number.

    For the compiler the number would do. In Triton's interpreter it becomes integers, also when it is combined with a
    tensor, and as of Triton 3.9 these are refused as a mask.
    """
    return tl.where(is_true, tl.full(like.shape, True, tl.int1), False)


@triton.jit(do_not_specialize=["capacity"])
def _put_kernel(
    x_ptr,
    weights_ptr,
    rank_ptr,
    row_ptr,
    rows_addresses_ptr,
    weights_addresses_ptr,
    capacity,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) // PIECES
    piece = tl.program_id(0) % PIECES
    words = piece * BLOCK + tl.arange(0, BLOCK)
    is_inside = words < WIDTH
    # All addresses are read before the first store, after which the compiler may not move a load forward.
    addresses = ()
    for k in tl.static_range(K):
        addresses += (_address(rank_ptr, row_ptr, rows_addresses_ptr, token * K + k, capacity),)
    x = tl.load(x_ptr + token * WIDTH + words, mask=is_inside)
    for k in tl.static_range(K):
        base, row, is_held = addresses[k]
        # Base addresses are multiples of 256; the compiler cannot know, and would store word by word.
        rows_ptr = tl.multiple_of(base.to(x_ptr.dtype), 16)
        # Streaming: the buffers of all ranks are many times the cache.
        mask = is_inside & _mask_of_all(is_held, is_inside)
        tl.store(rows_ptr + row * WIDTH + words, x, mask=mask, cache_modifier=".cs")

    if weights_ptr is not None:
        choices = tl.arange(0, CHOICES)
        pairs = token * K + choices
        is_asked = (choices < K) & _mask_of_all(piece == 0, choices)
        held_row = tl.load(row_ptr + pairs, mask=is_asked, other=-1)
        are_held = (held_row >= 0) & (held_row < capacity)
        ranks = tl.load(rank_ptr + pairs, mask=are_held, other=0)
        bases = tl.load(weights_addresses_ptr + ranks, mask=are_held, other=0)
        weights = tl.load(weights_ptr + pairs, mask=are_held, other=0)
        tl.store(bases.to(weights_ptr.dtype) + held_row, weights, mask=are_held)


@triton.jit(do_not_specialize=["capacity"])
def _clear_kernel(
    rows_ptr,
    row_weights_ptr,
    offsets_e_ptr,
    total_e_ptr,
    capacity,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEARERS: tl.constexpr,
):
    expert = tl.program_id(0) // CLEARERS
    begin = tl.load(offsets_e_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    first = begin + tl.load(total_e_ptr + expert) + tl.program_id(0) % CLEARERS
    end = tl.minimum(tl.load(offsets_e_ptr + expert).to(tl.int64), capacity)
    for row in range(first, end, CLEARERS):
        for start in range(0, WIDTH, BLOCK):
            words = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), rows_ptr.dtype.element_ty)
            tl.store(rows_ptr + row * WIDTH + words, zeros, mask=words < WIDTH)
        if row_weights_ptr is not None:
            tl.store(row_weights_ptr + row, 0.0)


@triton.jit(do_not_specialize=["capacity"])
def _get_kernel(
    y_ptr,
    rank_ptr,
    row_ptr,
    addresses_ptr,
    capacity,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) // PIECES
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    y = tl.zeros((BLOCK,), SUM)
    for k in tl.static_range(K):
        base, row, is_held = _address(rank_ptr, row_ptr, addresses_ptr, token * K + k, capacity)
        rows_ptr = tl.multiple_of(base.to(y_ptr.dtype), 16)
        # A row that is not held adds +0, which changes no sum that began at +0.
        mask = is_inside & _mask_of_all(is_held, is_inside)
        y += tl.load(rows_ptr + row * WIDTH + columns, mask=mask, other=0).to(SUM)
    tl.store(y_ptr + token * WIDTH + columns, y.to(y_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["capacity", "num_pairs"])
def _values_kernel(values_ptr, rank_ptr, row_ptr, addresses_ptr, capacity, num_pairs, BLOCK: tl.constexpr):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_held = (row >= 0) & (row < capacity)
    rank = tl.load(rank_ptr + pairs, mask=is_held, other=0)
    base = tl.load(addresses_ptr + rank, mask=is_held, other=0)
    values = tl.load(base.to(values_ptr.dtype) + row, mask=is_held, other=0.0)
    tl.store(values_ptr + pairs, values, mask=pairs < num_pairs)
