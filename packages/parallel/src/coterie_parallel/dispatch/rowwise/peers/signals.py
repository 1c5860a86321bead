"""Counted signals between GPUs, in Triton kernels on a pad of words that peers can write to.

A pad has a word for each phase and source: 15 bits of a mark that stands for the phase, then 48 bits that count. A rank
stores the word of its next signal into the pads of its peers, with release at system scope: whoever reads it with
acquire at system scope sees all that this rank's stream wrote before. The counts of what was sent and waited for lie in
device memory of the rank, so that a captured CUDA graph counts on with each replay.

Signal and wait are kernels of their own. A wait inside the kernel that moves data would keep blocks on the GPU that
have nothing to do, and could keep out those that it waits for. Launch both with one warp: with more, one warp could
read a count that another has raised already.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["ABORTED", "LATE", "MAX_MARK", "MAX_SLOTS", "OTHER_PHASE", "read_fault", "send_signals", "wait_for_signals"]

# Why a wait ended without its peer.
LATE = 1
OTHER_PHASE = 2
ABORTED = 3

MAX_SLOTS = 256
MAX_MARK = 2**15 - 1

_LATE = tl.constexpr(LATE)
_OTHER_PHASE = tl.constexpr(OTHER_PHASE)
_ABORTED = tl.constexpr(ABORTED)
_REASONS = tl.constexpr(4)
_SLOTS = tl.constexpr(MAX_SLOTS)
_COUNT_BITS = tl.constexpr(48)
# Reading the clock and host memory takes longer than reading the pad.
_SPINS_PER_LOOK = tl.constexpr(64)


def read_fault(fault: int) -> tuple[int, int]:
    """Return the slot and the reason of a fault that is not 0."""
    return fault // _REASONS.value % MAX_SLOTS, fault % _REASONS.value


@triton.jit(do_not_specialize=["slot", "mark", "index"])
def send_signals(pad_addresses_ptr, sent_ptr, slot, mark, index, SIZE: tl.constexpr):
    """Store the next word of a phase into the pad of one peer; grid (SIZE - 1).

    Args:
        pad_addresses_ptr: (SIZE) int64, base address of each rank's pad, which is (slots, SIZE) int64.
        sent_ptr: (slots, SIZE) int64, how often this rank has signalled.
        slot: place of the phase.
        mark: stands for the phase, 1 to MAX_MARK.
        index: this rank.
        SIZE: number of ranks.
    """
    peer = _peer(index)
    count = tl.load(sent_ptr + slot * SIZE + peer) + 1
    tl.store(sent_ptr + slot * SIZE + peer, count)
    pad_ptr = tl.load(pad_addresses_ptr + peer).to(tl.pointer_type(tl.int64))
    word = (mark.to(tl.int64) << _COUNT_BITS) | count
    tl.atomic_xchg(pad_ptr + slot * SIZE + index, word, sem="release", scope="sys")


@triton.jit(do_not_specialize=["abort_address", "slot", "mark", "index", "limit"])
def wait_for_signals(
    pad_ptr, waited_ptr, faults_ptr, abort_address, slot, mark, index, limit, SIZE: tl.constexpr, TIMED: tl.constexpr
):
    """Spin until one peer has signalled a phase as often as this rank has waited for it; grid (SIZE - 1).

    A wait without its peer ends in time and notes why; a trap would end the process without a word. After the first
    such wait no other spins, nor notes anything: who is late then may only have waited for the same peer.

    Args:
        pad_ptr: (slots, SIZE) int64, the pad of this rank.
        waited_ptr: (slots, SIZE) int64, how often this rank has waited.
        faults_ptr: (SIZE) int64, for each peer 0 or why the first failed wait ended without it; see `read_fault`.
        abort_address: address of an int64; the host sets it to end every wait.
        slot: place of the phase.
        mark: stands for the phase, 1 to MAX_MARK.
        index: this rank.
        limit: nanoseconds with TIMED, else the number of times to look.
        SIZE: number of ranks.
        TIMED: use the clock of the GPU; the interpreter has none.
    """
    peer = _peer(index)
    place = slot * SIZE + peer
    wanted = tl.load(waited_ptr + place) + 1
    tl.store(waited_ptr + place, wanted)
    this_wait = wanted * _SLOTS + slot
    # Programs of one kernel need not run at one time, so that another may have given up on its peer already.
    is_over = tl.full((), 0, tl.int64)
    reason = tl.full((), 0, tl.int64)
    for other in range(SIZE):
        fault = tl.load(faults_ptr + other, volatile=True)
        is_over |= ((fault != 0) & (fault // _REASONS != this_wait)).to(tl.int64)
        reason = tl.where(fault // _REASONS == this_wait, fault % _REASONS, reason)
    abort_ptr = abort_address.to(tl.pointer_type(tl.int64))
    word = _look(pad_ptr + place)
    reason = tl.maximum(reason, _other_phase(word, mark))
    spins = tl.full((), 0, tl.int64)
    start = _now(spins, TIMED)
    while (reason == 0) & (is_over == 0) & _is_behind(word, mark, wanted):
        spins += 1
        if spins % _SPINS_PER_LOOK == 0:
            if _now(spins, TIMED) - start >= limit:
                reason = tl.full((), _LATE, tl.int64)
            if tl.load(abort_ptr, volatile=True) != 0:
                reason = tl.full((), _ABORTED, tl.int64)
        # Last, so that what a peer has signalled just before it died or the time was over is still found.
        word = _look(pad_ptr + place)
        reason = tl.maximum(reason, _other_phase(word, mark))
    if (is_over == 0) & _is_behind(word, mark, wanted):
        tl.store(faults_ptr + peer, this_wait * _REASONS + reason)


@triton.jit
def _peer(index):
    # The programs count the peers, without this rank.
    peer = tl.program_id(0)
    return peer + (peer >= index).to(tl.int32)


@triton.jit
def _look(word_ptr):
    # An atomic, as a load has no acquire here.
    return tl.atomic_add(word_ptr, tl.full((), 0, tl.int64), sem="acquire", scope="sys")


@triton.jit
def _is_behind(word, mark, wanted):
    return (word >> _COUNT_BITS != mark) | (word - (mark.to(tl.int64) << _COUNT_BITS) < wanted)


@triton.jit
def _other_phase(word, mark):
    return tl.where((word != 0) & (word >> _COUNT_BITS != mark), tl.full((), _OTHER_PHASE, tl.int64), 0)


@triton.jit
def _now(spins, TIMED: tl.constexpr):
    if TIMED:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return spins
