"""Causal attention inside documents: what the layers of one forward share, and the back-ends that mix positions.

Back-ends, by name:

    "sdpa"      torch's scaled dot product with a boolean mask (B, 1, S, S); runs everywhere
    "causal"    the same without a mask; right only where every sequence is one document
    "varlen"    torch's flash attention over the documents as sequences of their own; fp16 or bf16 on a GPU
    "flex"      torch's FlexAttention, compiled, which skips blocks between documents; on a GPU
    "auto"      "causal" where every sequence is one document, "varlen" where that can run and the number of documents
                is known, else "sdpa". On a CPU always "sdpa"

All but "sdpa" need no mask, and none of them reads the device from the host.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "AttentionBackend",
    "AttentionContext",
    "attend",
    "attention_context",
    "backend_problems",
    "count_documents",
]

AttentionBackend = Literal["auto", "sdpa", "causal", "varlen", "flex"]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionContext:
    """What all attention layers of one forward share: the rotary angles and who sees whom.

    Attributes:
        backend: name of the back-end that runs, never "auto".
        cos_SH: fp32 ``(S, head_dim)``; ``sin_SH`` likewise.
        mask_B1SS: for "sdpa": bool, True where a query (first S) may see a key (second S): not later, and in the same
            document.
        starts_N: for "varlen": int32, first position of each document in the flattened batch, then B * S up to the end.
        block_mask: for "flex": a ``BlockMask``.
    """

    backend: str
    cos_SH: Tensor
    sin_SH: Tensor
    mask_B1SS: Tensor | None = None
    starts_N: Tensor | None = None
    block_mask: Any = None


def count_documents(document_ids_BS: Tensor) -> int:
    """Return the number of runs of equal ids in the rows of a CPU tensor, runs of padding included."""
    assert document_ids_BS.device.type == "cpu", "counting reads the values"
    changes = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    return len(document_ids_BS) + int(changes.sum())


def attention_context(
    document_ids_BS: Tensor,
    head_dim: int,
    rope_theta: float,
    *,
    dtype: torch.dtype | None = None,
    num_documents: int | None = None,
    backend: AttentionBackend = "auto",
) -> AttentionContext:
    """Build the rotary angles (Su et al., 2021, in the half-split pairing) and what the back-end needs of one batch.

    Args:
        document_ids_BS: int32; positions with equal ids see each other, and stand side by side. Padding has its own id,
            so no row is empty.
        head_dim: even width of one head.
        rope_theta: base of the rotary frequencies.
        dtype: of queries, keys and values; None where it is not known, which rules "varlen" out.
        num_documents: `count_documents` of the batch, taken where it was made, on the host; None where it is not known.
        backend: see above.

    Raises:
        ValueError: the back-end is unknown, or cannot run here; what would work is named.
    """
    num_sequences, num_positions = document_ids_BS.shape
    device = document_ids_BS.device
    name = _chosen(
        backend, device=device, dtype=dtype, head_dim=head_dim, num_documents=num_documents, num_sequences=num_sequences
    )
    frequencies = rope_theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(num_positions, device=device, dtype=torch.float32)[:, None] * frequencies
    angles_SH = torch.cat([angles, angles], dim=-1)
    cos_SH, sin_SH = angles_SH.cos(), angles_SH.sin()
    if name == "sdpa":
        same_document = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
        return AttentionContext(backend=name, cos_SH=cos_SH, sin_SH=sin_SH, mask_B1SS=same_document.tril()[:, None])
    if name == "varlen":
        assert num_documents is not None
        starts_N = _starts(document_ids_BS, num_documents)
        return AttentionContext(backend=name, cos_SH=cos_SH, sin_SH=sin_SH, starts_N=starts_N)
    if name == "flex":
        return AttentionContext(backend=name, cos_SH=cos_SH, sin_SH=sin_SH, block_mask=_block_mask(document_ids_BS))
    return AttentionContext(backend=name, cos_SH=cos_SH, sin_SH=sin_SH)


def backend_problems(backend: AttentionBackend, device: str, dtype: str, head_dim: int) -> list[str]:
    """Return what keeps a back-end from running, as far as the settings of a run tell; device "auto" may be a GPU."""
    place = torch.device("cuda" if device == "auto" else device)
    if backend == "varlen" and (lacking := _varlen_problem(place, getattr(torch, dtype), head_dim, 1)):
        return [f'attention_backend ("varlen") needs {lacking}; "auto" takes what runs']
    if backend == "flex" and place.type != "cuda":
        return [f'attention_backend ("flex") needs a GPU, and this is {place}; "auto" takes what runs']
    return []


def attend(q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, context: AttentionContext) -> Tensor:
    """Return the mixed values (B, S, H * d); each of the G heads of keys and values serves H / G heads of queries."""
    if context.backend == "varlen":
        return _attend_varlen(q_BSHd, k_BSGd, v_BSGd, context)
    is_grouped = q_BSHd.shape[2] != k_BSGd.shape[2]
    q, k, v = q_BSHd.transpose(1, 2), k_BSGd.transpose(1, 2), v_BSGd.transpose(1, 2)
    if context.backend == "flex":
        mixed = _flex()(q, k, v, block_mask=context.block_mask, enable_gqa=is_grouped)
    elif context.backend == "causal":
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask_B1SS, enable_gqa=is_grouped)
    out_BSQ: Tensor = mixed.transpose(1, 2).flatten(2)
    return out_BSQ


def _chosen(
    backend: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    head_dim: int,
    num_documents: int | None,
    num_sequences: int,
) -> str:
    """Resolve "auto" and refuse what cannot run."""
    if backend not in get_args(AttentionBackend):
        raise ValueError(f"attention back-end ({backend!r}) must be one of: {', '.join(get_args(AttentionBackend))}")
    no_varlen = _varlen_problem(device, dtype, head_dim, num_documents)
    if backend == "auto":
        if device.type == "cpu":
            return "sdpa"
        if num_documents == num_sequences:
            return "causal"
        return "sdpa" if no_varlen else "varlen"
    if backend == "varlen" and no_varlen:
        raise ValueError(f'attention back-end "varlen" needs {no_varlen}; "sdpa" works')
    if backend == "flex" and device.type != "cuda":
        raise ValueError(f'attention back-end "flex" needs a GPU for its backward, and this is {device}; "sdpa" works')
    if backend == "causal" and num_documents != num_sequences:
        found = "an unknown number" if num_documents is None else f"{num_documents}"
        raise ValueError(
            f'attention back-end "causal" needs every sequence to be one document, but {num_sequences} sequences hold '
            f'{found} of them, padding included; use "auto"'
        )
    return backend


def _varlen_problem(
    device: torch.device, dtype: torch.dtype | None, head_dim: int, num_documents: int | None
) -> str | None:
    """Return what flash attention over documents lacks here."""
    if device.type != "cuda":
        return f"a GPU, and this is {device}"
    if dtype not in _HALF:
        return f"float16 or bfloat16, and queries are {'of unknown dtype' if dtype is None else dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"a head_dim that is a multiple of 8 and at most 256, and it is {head_dim}"
    if num_documents is None:
        return "num_documents, which the host counts while it makes the batch"
    return None


def _starts(document_ids_BS: Tensor, num_documents: int) -> Tensor:
    """Return where each document starts in the flattened batch; int32, 1 + num_documents rounded up to a power of two.

    The rounding keeps the number of shapes small; documents beyond the last one have no positions.
    """
    is_start_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    torch.ne(document_ids_BS[:, 1:], document_ids_BS[:, :-1], out=is_start_BS[:, 1:])
    is_start_T = is_start_BS.flatten()
    num_slots = 1 << max(0, num_documents - 1).bit_length()
    number_T = is_start_T.cumsum(0) - 1
    torch._assert_async(number_T[-1] < num_slots, "there are more documents than num_documents says")
    num_tokens = is_start_T.numel()
    starts_N = torch.full((num_slots + 1,), num_tokens, dtype=torch.int32, device=document_ids_BS.device)
    # Every other position writes the end once more to the last place: the same value, so the order does not matter.
    slot_T = torch.where(is_start_T, number_T, num_slots)
    place_T = torch.arange(num_tokens, dtype=torch.int32, device=document_ids_BS.device)
    return starts_N.scatter_(0, slot_T, torch.where(is_start_T, place_T, num_tokens))


def _attend_varlen(q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, context: AttentionContext) -> Tensor:
    num_sequences, num_positions = q_BSHd.shape[:2]
    rows = q_BSHd.flatten(0, 1), k_BSGd.flatten(0, 1), v_BSGd.flatten(0, 1)
    starts_N = context.starts_N
    mixed_THd: Tensor = _varlen()(*rows, starts_N, starts_N, num_positions, num_positions)
    return mixed_THd.view(num_sequences, num_positions, -1)


@functools.cache
def _varlen() -> Callable[..., Any]:
    """Return torch's function with what makes it causal: a flag up to torch 2.10, then a window."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    settings: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:  # before it was a flag the kernel took any number of heads of keys
        settings["enable_gqa"] = True
    return functools.partial(varlen_attn, **settings)


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(document_ids_BS: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids_BS[sequence, query] == document_ids_BS[sequence, key])

    num_sequences, num_positions = document_ids_BS.shape
    return create_block_mask(
        sees, num_sequences, None, num_positions, num_positions, device=str(document_ids_BS.device)
    )
