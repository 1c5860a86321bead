"""The back-ends of attention against the masked one, which is choice, and what each refuses."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from coterie_export import ModelSpec
from coterie_trainer import attention
from coterie_trainer.attention import attend, attention_context, count_documents
from coterie_trainer.layers import Attention
from torch import Tensor

from trainer.specs import SPECS

DOCUMENTS_BS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12, [0] + [1] * 11, [-1] * 12], dtype=torch.int32)
NUM_DOCUMENTS = 7
HEADS = [(4, 4), (4, 2), (3, 1)]


def _mix_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, num_positions: int) -> Tensor:
    """Mix each document by itself, as flash attention does."""
    assert starts.dtype == torch.int32
    out = []
    ends = starts.tolist()
    assert ends[0] == 0
    assert ends[-1] == len(q)
    assert max(end - start for start, end in itertools.pairwise(ends)) <= num_positions
    for start, end in itertools.pairwise(ends):
        parts = (one[start:end].transpose(0, 1)[None] for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def _of_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    assert cu_seq_q is cu_seq_k
    return _mix_documents(q, k, v, cu_seq_q, max(max_q, max_k))


def _of_2_11(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    assert window_size == (-1, 0)
    return _mix_documents(q, k, v, cu_seq_q, max(max_q, max_k))


def _of_2_14(
    q,
    k,
    v,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    window_size=(-1, -1),
    enable_gqa=False,
    num_splits=None,
):
    assert window_size == (-1, 0)
    assert enable_gqa
    return _mix_documents(q, k, v, cu_seq_q, max(max_q, max_k))


@pytest.fixture
def varlen_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Let "varlen" run on a CPU with a function in the place of torch's."""

    def put(function: object) -> None:
        attention._varlen.cache_clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        monkeypatch.setattr(attention, "_varlen_problem", lambda *args: None)

    yield put
    attention._varlen.cache_clear()


def _heads(num_heads: int, num_kv_heads: int, *, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = DOCUMENTS_BS.shape
    return [
        torch.randn(*shape, heads, 8, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def _with_gradients(heads: list[Tensor], context: attention.AttentionContext) -> list[Tensor]:
    out = attend(*heads, context)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, heads, grad)]


def _assert_equal_to_masked(heads: list[Tensor], context: attention.AttentionContext, documents_BS: Tensor) -> None:
    masked = attention_context(documents_BS, 8, 1e4, backend="sdpa")
    for ours, expected in zip(_with_gradients(heads, context), _with_gradients(heads, masked), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_runs_are_counted_with_padding() -> None:
    assert count_documents(DOCUMENTS_BS) == NUM_DOCUMENTS
    assert count_documents(DOCUMENTS_BS[1:2, :1]) == 1


@pytest.mark.parametrize("of_torch", [_of_2_10, _of_2_11, _of_2_14])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_varlen_equals_the_mask(varlen_here, of_torch: object, num_heads: int, num_kv_heads: int) -> None:
    varlen_here(of_torch)
    context = attention_context(DOCUMENTS_BS, 8, 1e4, num_documents=NUM_DOCUMENTS, backend="varlen")
    assert context.mask_B1SS is None
    assert context.starts_N.tolist() == [0, 5, 9, 12, 24, 25, 36, 48, 48]
    _assert_equal_to_masked(_heads(num_heads, num_kv_heads), context, DOCUMENTS_BS)


@pytest.mark.parametrize("num_documents", [1, 2, 3, 4, 5])
def test_starts_have_one_of_few_shapes(varlen_here, num_documents: int) -> None:
    varlen_here(_of_2_14)
    ids_BS = (torch.arange(5) * num_documents // 5)[None].int()
    context = attention_context(ids_BS, 8, 1e4, num_documents=num_documents, backend="varlen")
    assert context.starts_N.numel() == {1: 2, 2: 3, 3: 5, 4: 5, 5: 9}[num_documents]
    changes = torch.nonzero(ids_BS[0, 1:] != ids_BS[0, :-1]).flatten() + 1
    assert context.starts_N[:num_documents].tolist() == [0, *changes.tolist()]
    assert (context.starts_N[num_documents:] == 5).all()


def test_more_documents_than_said_are_an_error(varlen_here) -> None:
    varlen_here(_of_2_14)
    with pytest.raises(RuntimeError, match="more documents than num_documents says"):
        attention_context(DOCUMENTS_BS, 8, 1e4, num_documents=4, backend="varlen")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_causal_equals_the_mask_where_a_sequence_is_a_document(num_heads: int, num_kv_heads: int) -> None:
    whole_BS = torch.tensor([[0] * 12, [3] * 12, [-1] * 12, [0] * 12], dtype=torch.int32)
    context = attention_context(whole_BS, 8, 1e4, num_documents=count_documents(whole_BS), backend="causal")
    assert context.mask_B1SS is None
    _assert_equal_to_masked(_heads(num_heads, num_kv_heads), context, whole_BS)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_flex_equals_the_mask(monkeypatch: pytest.MonkeyPatch, num_heads: int, num_kv_heads: int) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    # On a CPU torch has its forward only, and this test does not wait for a compiler.
    monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    heads = _heads(num_heads, num_kv_heads, requires_grad=False)
    context = attention.AttentionContext(
        backend="flex",
        cos_SH=torch.empty(0),
        sin_SH=torch.empty(0),
        block_mask=attention._block_mask(DOCUMENTS_BS),
    )
    masked = attention_context(DOCUMENTS_BS, 8, 1e4)
    torch.testing.assert_close(attend(*heads, context), attend(*heads, masked), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["qk_norm_head", "qk_norm_width", "shared_expert"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_gives_the_same_over_documents_and_masked(varlen_here, name: str, recompute: bool) -> None:
    varlen_here(_of_2_11)
    spec = dataclasses.replace(SPECS[name], head_dim=8)
    layer = _random(Attention(spec, recompute=recompute))
    x_BSD = torch.randn(*DOCUMENTS_BS.shape, spec.d_model, dtype=torch.float64, requires_grad=True)
    found = []
    for backend in ("varlen", "sdpa"):
        context = attention_context(DOCUMENTS_BS, 8, 1e4, num_documents=NUM_DOCUMENTS, backend=backend)
        out = layer(x_BSD, context)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x_BSD, *layer.parameters()])])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # rotations are fp32


def _random(layer: Attention) -> Attention:
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return layer.double()


def _as_written_first(layer: Attention, spec: ModelSpec, x_BSD: Tensor, documents_BS: Tensor) -> Tensor:
    """The layer with heads before positions all along."""
    cos_SH, sin_SH, mask_B1SS = _angles_and_mask(documents_BS, spec.head_dim, spec.rope_theta)

    def normalised(x: Tensor, norm: torch.nn.Module) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), norm.weight.float(), norm.eps).to(x.dtype)

    def rotated(x_BHSd: Tensor) -> Tensor:
        x = x_BHSd.float()
        first, second = x.chunk(2, dim=-1)
        return (x * cos_SH + torch.cat([-second, first], dim=-1) * sin_SH).to(x_BHSd.dtype)

    q, k, v = layer.q(x_BSD), layer.k(x_BSD), layer.v(x_BSD)
    if spec.qk_norm == "width":
        q, k = normalised(q, layer.q_norm), normalised(k, layer.k_norm)
    q, k, v = (one.unflatten(-1, (-1, spec.head_dim)) for one in (q, k, v))
    if spec.qk_norm == "head":
        q, k = normalised(q, layer.q_norm), normalised(k, layer.k_norm)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    is_grouped = spec.num_heads != spec.num_kv_heads
    mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=mask_B1SS, enable_gqa=is_grouped)
    return layer.o(mixed.transpose(1, 2).flatten(2))


def _angles_and_mask(documents_BS: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor, Tensor]:
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(documents_BS.shape[1], dtype=torch.float32)[:, None] * frequencies
    angles_SH = torch.cat([angles, angles], dim=-1)
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    return angles_SH.cos(), angles_SH.sin(), same.tril()[:, None]


@pytest.mark.parametrize("name", ["qk_norm_head", "qk_norm_width", "plain_renormalize_off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_bits_are_those_of_the_mask(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    layer = _random(Attention(spec)).to(dtype)
    x_BSD = torch.randn(*DOCUMENTS_BS.shape, spec.d_model, dtype=dtype, requires_grad=True)
    context = attention_context(
        DOCUMENTS_BS, spec.head_dim, spec.rope_theta, dtype=dtype, num_documents=NUM_DOCUMENTS, backend="auto"
    )
    found = []
    for out in (layer(x_BSD, context), _as_written_first(layer, spec, x_BSD, DOCUMENTS_BS)):
        found.append([out, *torch.autograd.grad(out.square().sum(), [x_BSD, *layer.parameters()])])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)
    assert found[0][0].isfinite().all()


CUDA, CPU, HALF = torch.device("cuda"), torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "num_documents", "expected"),
    [
        (CPU, HALF, 64, 4, "sdpa"),
        (CUDA, HALF, 64, 4, "causal"),
        (CUDA, torch.float32, 64, 4, "causal"),
        (CUDA, HALF, 64, 9, "varlen"),
        (CUDA, torch.float16, 256, 9, "varlen"),
        (CUDA, torch.float32, 64, 9, "sdpa"),
        (CUDA, HALF, 64, None, "sdpa"),
        (CUDA, HALF, 60, 9, "sdpa"),
        (CUDA, HALF, 264, 9, "sdpa"),
        (CUDA, None, 64, 9, "sdpa"),
    ],
)
def test_what_auto_takes(device, dtype, head_dim, num_documents, expected) -> None:
    sizes = dict(device=device, dtype=dtype, head_dim=head_dim, num_documents=num_documents, num_sequences=4)
    assert attention._chosen("auto", **sizes) == expected


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("varlen", dict(device=CPU), r'"varlen" needs a GPU, and this is cpu; "sdpa" works'),
        ("varlen", dict(dtype=torch.float32), "needs float16 or bfloat16, and queries are torch.float32"),
        ("varlen", dict(dtype=None), "and queries are of unknown dtype"),
        ("varlen", dict(head_dim=12), "multiple of 8 and at most 256, and it is 12"),
        ("varlen", dict(num_documents=None), "needs num_documents, which the host counts"),
        ("flex", dict(device=CPU), '"flex" needs a GPU for its backward, and this is cpu'),
        ("causal", {}, "but 4 sequences hold 9 of them, padding included"),
        ("causal", dict(num_documents=None), "hold an unknown number of them"),
        ("flash", {}, r"back-end \('flash'\) must be one of: auto, sdpa, causal, varlen, flex"),
    ],
)
def test_what_cannot_run_is_refused(backend: str, changes: dict[str, object], message: str) -> None:
    sizes = dict(device=CUDA, dtype=HALF, head_dim=64, num_documents=9, num_sequences=4)
    with pytest.raises(ValueError, match=message):
        attention._chosen(backend, **(sizes | changes))
