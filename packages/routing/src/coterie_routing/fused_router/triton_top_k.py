"""The K largest of each row of a tile in registers, as an exact threshold: the Triton functions of the forward kernel.

K rounds of arg-max cost 6 instructions for each number and round. Here 8 registers of a thread are put in order by a
sorting network, ordered lists of 8 are merged, and only values move: about 10 instructions for each number and 8
choices. The K-th largest value then tells which numbers are chosen; equal ones at the threshold are told apart by id.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

__all__ = ["bit_of_id", "choose", "counts_of_words", "lowest_id"]


@triton.jit
def _order(a, b):
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def _sort_bitonic(a, b, c, d, e, f, g, h):
    a, e = _order(a, e)
    b, f = _order(b, f)
    c, g = _order(c, g)
    d, h = _order(d, h)
    a, c = _order(a, c)
    b, d = _order(b, d)
    e, g = _order(e, g)
    f, h = _order(f, h)
    a, b = _order(a, b)
    c, d = _order(c, d)
    e, f = _order(e, f)
    g, h = _order(g, h)
    return a, b, c, d, e, f, g, h


@triton.jit
def _merge(a0, b0, c0, d0, e0, f0, g0, h0, a1, b1, c1, d1, e1, f1, g1, h1):
    # The 8 largest of two falling lists are the larger ones of each pair from opposite ends; they rise, then fall.
    a, b, c, d = tl.maximum(a0, h1), tl.maximum(b0, g1), tl.maximum(c0, f1), tl.maximum(d0, e1)
    e, f, g, h = tl.maximum(e0, d1), tl.maximum(f0, c1), tl.maximum(g0, b1), tl.maximum(h0, a1)
    return _sort_bitonic(a, b, c, d, e, f, g, h)


@triton.jit
def _top_8(v_TE, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the 8 largest numbers of each row, in falling order, as 8 vectors."""
    # In the layout of a tensor-core product these three bits of a column number are registers of one thread.
    INNER: tl.constexpr = 8 if BLOCK_E >= 64 else BLOCK_E // 8
    split = tl.reshape(v_TE, (BLOCK_T, BLOCK_E // 8 // INNER, 2, 2, 2, INNER))
    split = tl.reshape(tl.permute(split, (0, 1, 5, 2, 3, 4)), (BLOCK_T, BLOCK_E // 8, 2, 2, 2))
    even, odd = tl.split(split)
    even_even, even_odd = tl.split(even)
    odd_even, odd_odd = tl.split(odd)
    a, b = tl.split(even_even)
    c, d = tl.split(even_odd)
    e, f = tl.split(odd_even)
    g, h = tl.split(odd_odd)
    # The network of 19 exchanges, the fewest for 8 numbers (Knuth, The Art of Computer Programming 3, section 5.3.4).
    a, c = _order(a, c)
    b, d = _order(b, d)
    e, g = _order(e, g)
    f, h = _order(f, h)
    a, e = _order(a, e)
    b, f = _order(b, f)
    c, g = _order(c, g)
    d, h = _order(d, h)
    a, b = _order(a, b)
    c, d = _order(c, d)
    e, f = _order(e, f)
    g, h = _order(g, h)
    c, e = _order(c, e)
    d, f = _order(d, f)
    b, e = _order(b, e)
    d, g = _order(d, g)
    b, c = _order(b, c)
    d, e = _order(d, e)
    f, g = _order(f, g)
    return tl.reduce((a, b, c, d, e, f, g, h), 1, _merge)


@triton.jit
def _pick(a, b, c, d, e, f, g, h, place):
    found = tl.where(place == 1, a, b)
    found = tl.where(place == 3, c, found)
    found = tl.where(place == 4, d, found)
    found = tl.where(place == 5, e, found)
    found = tl.where(place == 6, f, found)
    found = tl.where(place == 7, g, found)
    return tl.where(place >= 8, h, found)


@triton.jit
def choose(v_TE, is_live_T, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the largest number of each row, and as bits which K numbers of each live row are the largest.

    Of equal numbers the first are chosen. There must be no NaN; -inf may stand anywhere. The bits are int32
    (BLOCK_T, words), see `bit_of_id`; a row that is not live may have any.
    """
    a, b, c, d, e, f, g, h = _top_8(v_TE, BLOCK_T, BLOCK_E)
    threshold = _pick(a, b, c, d, e, f, g, h, tl.full((BLOCK_T,), K, tl.int32))
    for _found in range(8, K, 8):
        missing = K - tl.sum((v_TE >= threshold[:, None]).to(tl.int32), 1)
        rest_TE = tl.where(v_TE < threshold[:, None], v_TE, float("-inf"))
        b0, b1, b2, b3, b4, b5, b6, b7 = _top_8(rest_TE, BLOCK_T, BLOCK_E)
        threshold = tl.where(missing > 0, _pick(b0, b1, b2, b3, b4, b5, b6, b7, missing), threshold)
    words_TW = _words(_spread(v_TE, BLOCK_T, BLOCK_E) >= threshold[:, None, None, None, None], BLOCK_T, BLOCK_E)
    num_chosen_T = tl.sum(_count_bits(words_TW), 1)
    if tl.max(tl.where(is_live_T & (num_chosen_T != K), 1, 0), 0) > 0:
        spread = _spread(v_TE, BLOCK_T, BLOCK_E)
        words_TW = _words(spread > threshold[:, None, None, None, None], BLOCK_T, BLOCK_E)
        equal_TW = _words(spread == threshold[:, None, None, None, None], BLOCK_T, BLOCK_E)
        missing = K - tl.sum(_count_bits(words_TW), 1)
        for k in range(K):
            _id_T, lowest_TW = lowest_id(equal_TW, BLOCK_E)
            equal_TW ^= lowest_TW
            words_TW |= tl.where((k < missing)[:, None], lowest_TW, 0)
    return a, words_TW


@triton.jit
def _spread(tile_TE, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    # Columns as (word of a thread, its pair of bits, thread, one of the pair): what a thread has of a row in the layout
    # of a tensor-core product, so that making the words moves nothing between threads.
    GROUPS: tl.constexpr = BLOCK_E // 8
    PER_WORD: tl.constexpr = GROUPS if GROUPS < 16 else 16
    return tl.reshape(tile_TE, (BLOCK_T, GROUPS // PER_WORD, PER_WORD, 4, 2))


@triton.jit
def _words(is_chosen, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    GROUPS: tl.constexpr = BLOCK_E // 8
    PER_WORD: tl.constexpr = GROUPS if GROUPS < 16 else 16
    bit = 2 * tl.arange(0, PER_WORD)[:, None, None] + tl.arange(0, 2)[None, None, :]
    bits = tl.where(is_chosen, (1 << bit)[None, None], 0)
    return tl.reshape(tl.sum(tl.sum(bits, 4), 2), (BLOCK_T, GROUPS // PER_WORD * 4))


@triton.jit
def _count_bits(word):
    # The usual sums of 2, 4 and 8 bits side by side, known to compilers as one instruction.
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@triton.jit
def lowest_id(words_TW, BLOCK_E: tl.constexpr):
    """Return the lowest column whose bit is set in each row, BLOCK_E if none is, and the words with that bit alone."""
    GROUPS: tl.constexpr = BLOCK_E // 8
    PER_WORD: tl.constexpr = GROUPS if GROUPS < 16 else 16
    word = tl.arange(0, GROUPS // PER_WORD * 4)[None, :]
    lowest_TW = words_TW & -words_TW
    # The exponent of a power of two as a float is the place of its bit.
    bit_TW = ((lowest_TW.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    id_TW = 8 * PER_WORD * (word // 4) + 2 * (word % 4) + 8 * (bit_TW // 2) + bit_TW % 2
    id_TW = tl.where(words_TW == 0, BLOCK_E, id_TW)
    id_T = tl.min(id_TW, 1)
    return id_T, tl.where(id_TW == id_T[:, None], lowest_TW, 0)


@triton.jit
def bit_of_id(column, BLOCK_E: tl.constexpr):
    """Return the word and the bit that stand for a column."""
    GROUPS: tl.constexpr = BLOCK_E // 8
    PER_WORD: tl.constexpr = GROUPS if GROUPS < 16 else 16
    group = column // 8
    return 4 * (group // PER_WORD) + (column % 8) // 2, 2 * (group % PER_WORD) + column % 2


@triton.jit
def counts_of_words(words_TW):
    """Return how often each bit is set in the rows, as bytes: byte b of number j of a word counts its bit 8 b + j.

    There may be 255 rows at most.
    """
    shift = tl.arange(0, 8)[None, None, :]
    return tl.sum((words_TW[:, :, None] >> shift) & 0x01010101, 0)
