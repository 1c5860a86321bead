"""Kernels that ask what the link between GPUs can do: copies, combines in many ways, and rows pushed to their tokens.

All see peers through a table of base addresses, as the kernels of the row-wise dispatcher do, but for `copy_boxes`,
whose descriptors are made of views.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl

__all__ = ["copy_boxes", "copy_words", "get", "get_unallocated", "push"]


@triton.jit
def _mask_of_all(is_true, like):
    """Return a mask in the shape of `like`, all of it `is_true`, a number, which Triton's interpreter would refuse."""
    return tl.where(is_true, tl.full(like.shape, True, tl.int1), False)


# The number of words is looked at: if it is a multiple of 16, accesses are as wide as they can be.
@triton.jit(do_not_specialize=["source", "target"])
def copy_words(source_addresses_ptr, source, target_addresses_ptr, target, num_words, BLOCK: tl.constexpr):
    """Copy int64 words between the blocks of two ranks; grid: blocks."""
    source_ptr = _block(source_addresses_ptr, source, tl.int64)
    target_ptr = _block(target_addresses_ptr, target, tl.int64)
    words = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = words < num_words
    tl.store(target_ptr + words, tl.load(source_ptr + words, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_boxes"])
def copy_boxes(source, target, num_boxes, ROWS: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr):
    """Copy between two descriptors of whole rows, ROWS at a time, with STAGES loads under way; grid: PROGRAMS."""
    for box in tl.range(tl.program_id(0), num_boxes, PROGRAMS, num_stages=STAGES):
        target.store([box * ROWS, 0], source.load([box * ROWS, 0]))


@triton.jit(do_not_specialize=["first", "num_entries", "peer"])
def push(
    rows_ptr,
    row_ptr,
    slot_ptr,
    addresses_ptr,
    peer,
    first,
    num_entries,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write rows of this rank to slots of a peer; grid: entries of one launch times PIECES.

    Args:
        rows_ptr: (R, WIDTH) int64 words.
        row_ptr: int64, the row of each entry, -1 for none.
        slot_ptr: int64, its slot, -1 for none.
        addresses_ptr: base addresses of the (slots, WIDTH) blocks.
        peer: whose block is written.
        first: entry of the first program.
        num_entries: entries there are.
        WIDTH: words of a row.
        PIECES: programs of a row.
        BLOCK: words of a program.
    """
    entry = first + tl.program_id(0).to(tl.int64) // PIECES
    words = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + entry, mask=entry < num_entries, other=-1)
    slot = tl.load(slot_ptr + entry, mask=entry < num_entries, other=-1)
    inside = (words < WIDTH) & _mask_of_all((row >= 0) & (slot >= 0), words)
    target_ptr = _block(addresses_ptr, peer, tl.int64)
    tl.store(target_ptr + slot * WIDTH + words, tl.load(rows_ptr + row * WIDTH + words, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["capacity", "num_tokens", "first", "own"])
def get(
    y_ptr,
    rank_ptr,
    row_ptr,
    addresses_ptr,
    capacity,
    num_tokens,
    first,
    own,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    CACHE: tl.constexpr,
    EVICT: tl.constexpr,
    REMOTE_FIRST: tl.constexpr,
):
    """Add the K rows of each token in the order of k; grid: tokens times PIECES.

    Args:
        y_ptr: (T, WIDTH).
        rank_ptr: (T, K) int32.
        row_ptr: (T, K) int64.
        addresses_ptr: base addresses of the (capacity, WIDTH) blocks.
        capacity: rows of a block.
        num_tokens: T.
        first: token of the first program; after the last one comes token 0.
        own: this rank.
        K: choices.
        WIDTH: elements of a row.
        PIECES: programs of a token.
        BLOCK: elements of a program.
        CACHE: modifier of the loads.
        EVICT: eviction policy of the loads.
        REMOTE_FIRST: load the rows of peers before those of this rank.
    """
    token = (first + tl.program_id(0).to(tl.int64) // PIECES) % num_tokens
    columns = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    remote = ()
    if REMOTE_FIRST:
        for k in tl.static_range(K):
            pair = token * K + k
            base, row, is_held = _place(rank_ptr, row_ptr, addresses_ptr, pair, capacity)
            mask = is_inside & _mask_of_all(is_held & (tl.load(rank_ptr + pair) != own), is_inside)
            pointers = tl.multiple_of(base.to(y_ptr.dtype), 16) + row * WIDTH + columns
            remote += (tl.load(pointers, mask=mask, other=0, cache_modifier=CACHE, eviction_policy=EVICT),)
    y = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        base, row, is_held = _place(rank_ptr, row_ptr, addresses_ptr, pair, capacity)
        mask = is_inside & _mask_of_all(is_held, is_inside)
        if REMOTE_FIRST:
            mask = mask & _mask_of_all(tl.load(rank_ptr + pair) == own, is_inside)
        pointers = tl.multiple_of(base.to(y_ptr.dtype), 16) + row * WIDTH + columns
        x = tl.load(pointers, mask=mask, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
        if REMOTE_FIRST:
            x = tl.where(tl.load(rank_ptr + pair) == own, x, remote[k])
        y += x.to(tl.float32)
    tl.store(y_ptr + token * WIDTH + columns, y.to(y_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["capacity"])
def get_unallocated(
    y_ptr,
    rank_ptr,
    row_ptr,
    addresses_ptr,
    capacity,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do as `get` does on bf16 rows of whole pieces, by loads of 16 bytes that leave no line in L1; GPUs only.

    The compiler leaves these loads in their place, so that all but one are under way before the first addition. Those
    of `get` it spreads between the additions, to need few registers.
    """
    token = tl.program_id(0).to(tl.int64) // PIECES
    first = tl.program_id(0) % PIECES * BLOCK
    octets = tl.arange(0, BLOCK // 8)
    zero = tl.zeros((BLOCK // 8,), tl.float32)
    y = (zero, zero, zero, zero, zero, zero, zero, zero)
    for k in tl.static_range(K):
        base, row, is_held = _place(rank_ptr, row_ptr, addresses_ptr, token * K + k, capacity)
        addresses = base + (row * WIDTH + first + octets * 8) * 2
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .pred held;
            setp.ne.b32 held, $5, 0;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            @held ld.global.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [addresses, is_held.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        y = (
            y[0] + _low(a),
            y[1] + _high(a),
            y[2] + _low(b),
            y[3] + _high(b),
            y[4] + _low(c),
            y[5] + _high(c),
            y[6] + _low(d),
            y[7] + _high(d),
        )
    # Interleaved again: octet, then word, then half of a word.
    words_02 = tl.join(tl.join(y[0], y[4]), tl.join(y[2], y[6]))
    words_13 = tl.join(tl.join(y[1], y[5]), tl.join(y[3], y[7]))
    all_y = tl.reshape(tl.join(words_02, words_13), (BLOCK,))
    tl.store(y_ptr + token * WIDTH + first + tl.arange(0, BLOCK), all_y.to(y_ptr.dtype.element_ty))


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _block(addresses_ptr, rank, dtype: tl.constexpr):
    # Base addresses are multiples of 256; the compiler cannot know, and would move word by word.
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _place(rank_ptr, row_ptr, addresses_ptr, pair, capacity):
    """Return the base address of a pair's block, its row, and whether the block holds it."""
    row = tl.load(row_ptr + pair)
    is_held = (row >= 0) & (row < capacity)
    base = tl.load(addresses_ptr + tl.load(rank_ptr + pair), mask=is_held, other=0)
    return base, row, is_held
