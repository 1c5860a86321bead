"""The chunked cross-entropy against torch's over all logits: values, gradients, memory, and who hears of a gradient."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from coterie_parallel import (
    DENSE,
    GradientReducer,
    Mesh,
    ParallelConfig,
    ReductionConfig,
    accumulate_in_fp32,
    make_plan,
)
from coterie_trainer import cross_entropy
from coterie_trainer.cross_entropy import chunked, chunked_cross_entropy_sum, cross_entropy_sum, tokens_in_chunk
from coterie_trainer.model import build_model
from coterie_trainer.step_watch import StepWatch
from support.interpreted import needs_triton, run_interpreted
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from trainer.specs import SPECS

T, D, V = 13, 6, 37


def _values(dtype: torch.dtype, *, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD, weight_VD = (torch.randn(size, D, generator=generator, dtype=torch.float64) for size in (tokens, V))
    targets_T = torch.randint(V, (tokens,), generator=generator)
    targets_T[::4] = -1
    return hidden_TD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), targets_T


def _plain(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    logits_TV = F.linear(hidden_TD, weight_VD)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), targets_T, ignore_index=-1, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, T - 1, T, T + 1, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradients_are_those_of_all_logits(chunk_tokens: int | None, dtype: torch.dtype) -> None:
    values = _values(dtype)
    loss, expected = chunked_cross_entropy_sum(*values, chunk_tokens=chunk_tokens), _plain(*values)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=4e-6, atol=0)
    # Not one: the gradient of the loss is known in the backward only.
    ours, theirs = (torch.autograd.grad(0.3 * one, values[:2]) for one in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("chunk_tokens", [5, None])
def test_gradient_by_differences(chunk_tokens: int | None) -> None:
    hidden_TD, weight_VD, targets_T = _values(torch.float64)

    def loss(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        return chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T, chunk_tokens=chunk_tokens)

    assert torch.autograd.gradcheck(loss, (hidden_TD, weight_VD))
    assert torch.autograd.gradcheck(lambda hidden: loss(hidden, weight_VD.detach()), (hidden_TD,))
    assert torch.autograd.gradcheck(lambda weight: loss(hidden_TD.detach(), weight), (weight_VD,))


def test_bfloat16_is_as_near_as_plain_torch() -> None:
    exact_values = _values(torch.float64, tokens=200)
    rounded = [value.detach().bfloat16() if value.is_floating_point() else value for value in exact_values]
    exact_values = [value.double() if value.is_floating_point() else value for value in rounded]
    found = []
    for values, function in (
        (exact_values, _plain),
        (rounded, _plain),
        (rounded, lambda *args: chunked_cross_entropy_sum(*args, chunk_tokens=32)),
    ):
        hidden_TD, weight_VD = (value.clone().requires_grad_() for value in values[:2])
        loss = function(hidden_TD, weight_VD, values[2])
        found.append((loss.detach(), *torch.autograd.grad(loss / 147, (hidden_TD, weight_VD))))
    for exact, plain, ours in zip(*found, strict=True):
        allowed = 2 * (plain.double() - exact).norm() + 1e-6 * exact.norm()
        assert (ours.double() - exact).norm() <= allowed


def test_the_gradient_of_the_loss_is_not_rounded() -> None:
    hidden_TD, weight_VD, targets_T = _values(torch.bfloat16)
    # bfloat16 would make it 1, and all gradients too small by 0.4 %.
    factor = 1.0039
    grads = []
    for one in (1.0, factor):
        loss = one * chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T)
        grads.append(torch.autograd.grad(loss, hidden_TD)[0])
    assert torch.equal(grads[1], (grads[0].float() * factor).bfloat16())
    assert not torch.equal(grads[1], grads[0])


def test_equal_inputs_give_equal_bits_and_padding_gives_nothing() -> None:
    hidden_TD, weight_VD, targets_T = _values(torch.float32)
    losses = [chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T, chunk_tokens=4) for _ in range(2)]
    first, second = (torch.autograd.grad(loss, (hidden_TD, weight_VD)) for loss in losses)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not first[0][targets_T < 0].any()
    nothing = chunked_cross_entropy_sum(hidden_TD, weight_VD, torch.full_like(targets_T, -1), chunk_tokens=4)
    assert not nothing.detach().any()
    assert not any(grad.any() for grad in torch.autograd.grad(nothing, (hidden_TD, weight_VD)))
    empty = chunked_cross_entropy_sum(hidden_TD[:0], weight_VD, targets_T[:0])
    assert not empty.detach().any()
    assert not torch.autograd.grad(empty, weight_VD)[0].any()


def test_a_derivative_of_the_gradient_is_refused() -> None:
    hidden_TD, weight_VD, targets_T = _values(torch.float64)
    loss = chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(loss, hidden_TD, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_that_of_the_formula(dtype: torch.dtype) -> None:
    tokens, width, vocab_size, chunk_tokens = 256, 64, 1024, 32
    size = dtype.itemsize
    given = (tokens + vocab_size) * width * size + 8 * tokens
    kept = tokens * width * size + vocab_size * width * 4
    softmax = chunk_tokens * vocab_size * (size + (4 if size < 4 else 0))
    # Columns of a chunk, and on a CPU the wide copies of a product's sides, which the GPU does not make.
    small = 4 * (tokens + 64 * chunk_tokens)
    product = 0 if size == 4 else 4 * chunk_tokens * (vocab_size + width)
    with StepWatch() as watch:
        hidden_TD, weight_VD = (torch.randn(rows, width).to(dtype).requires_grad_() for rows in (tokens, vocab_size))
        targets_T = torch.randint(vocab_size, (tokens,))
        watch.reset_peak()
        loss = chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T, chunk_tokens=chunk_tokens)
        peak, live = watch.peak_bytes, watch.live_bytes
        watch.reset_peak()
        with torch.no_grad():
            evaluated = chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T, chunk_tokens=chunk_tokens)
        without = watch.peak_bytes - live
    lower = chunk_tokens * vocab_size * size + max(product, softmax - chunk_tokens * vocab_size * size)
    assert given + kept + lower <= peak <= given + kept + lower + small
    assert given + kept <= live <= given + kept + small
    assert without <= softmax + small
    assert torch.equal(evaluated, loss.detach())


def _model(tied: bool, dtype: torch.dtype) -> nn.Module:
    """Return an embedding and a head of their own or of the embedding, as the trainer's decoder has them."""
    model = nn.Module()
    generator = torch.Generator().manual_seed(1)
    model.embed = nn.Embedding(V, D, dtype=dtype)
    model.embed.weight.data = torch.randn(V, D, generator=generator).to(dtype)
    if not tied:
        model.head = nn.Linear(D, V, bias=False, dtype=dtype)
        model.head.weight.data = torch.randn(V, D, generator=generator).to(dtype)
    model.spec = SimpleNamespace(tied_embeddings=tied, vocab_size=V)
    model.logits = lambda hidden: F.linear(hidden, cross_entropy.head_weight(model))
    return model


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens_BS, targets_BS = (torch.randint(V, (2, 9), generator=generator) for _ in range(2))
    targets_BS[:, -1] = -1
    return tokens_BS, targets_BS


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_goes_to_main_grad_beside_that_of_the_embedding(tied: bool) -> None:
    tokens_BS, targets_BS = _tokens()
    sums = {}
    for backend in ("torch", "chunked"):
        model = _model(tied, torch.bfloat16)
        accumulate_in_fp32(model.parameters())
        heard = []
        # As the reducer does: a hook of the node, which fires whether or not a gradient comes with it.
        nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
        for node, parameter in zip(nodes, model.parameters(), strict=True):
            node.register_hook(lambda *_, parameter=parameter, heard=heard: heard.append(parameter.main_grad.clone()))
        for _ in range(2):
            loss = cross_entropy_sum(model, model.embed(tokens_BS), targets_BS, backend=backend)
            (loss / 16).backward()
        assert len(heard) == 2 * len(nodes)
        assert all(parameter.grad is None for parameter in model.parameters())
        last = {id(parameter.main_grad): parameter.main_grad for parameter in model.parameters()}
        for grad in last.values():
            assert any(torch.equal(grad, one) for one in heard), "the hook came before the gradient"
        sums[backend] = [parameter.main_grad for parameter in model.parameters()]
    for ours, plain in zip(sums["chunked"], sums["torch"], strict=True):
        # Plain torch rounds each gradient to bfloat16, and logits' gradients too.
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("backend", ["torch", "chunked"])
def test_a_pass_for_some_inputs_leaves_main_grad_alone(backend: str) -> None:
    tokens_BS, targets_BS = _tokens()
    model = _model(False, torch.bfloat16)
    accumulate_in_fp32(model.parameters())
    total = model.head.weight.main_grad
    hidden = model.embed(tokens_BS).detach().requires_grad_()
    loss = cross_entropy_sum(model, hidden, targets_BS, backend=backend)
    loss.backward(inputs=[hidden], retain_graph=True)
    assert hidden.grad.any()
    (asked,) = torch.autograd.grad(loss, model.head.weight, retain_graph=True)
    assert asked.any()
    assert not total.any()
    loss.backward()
    once = total.clone()
    assert once.any()
    cross_entropy_sum(model, hidden, targets_BS, backend=backend).backward()
    assert torch.equal(total, 2 * once)


def _reduced(rank: int, world: int, tied: bool, sharded: bool) -> dict[str, dict[str, Tensor]]:
    mesh = Mesh(make_plan(ParallelConfig(data=world), world), rank, timeout_s=60.0)
    tokens_BS, targets_BS = _tokens()
    found = {}
    for backend in ("torch", "chunked"):
        model = _model(tied, torch.bfloat16)
        accumulate_in_fp32(model.parameters())
        names = {name: DENSE for name, _ in model.named_parameters()}
        config = ReductionConfig(sharded=sharded, bucket_bytes=V * D * 4)
        reducer = GradientReducer(model.named_parameters(), names, mesh, config)
        reducer.zero()
        for number in range(2):
            loss = cross_entropy_sum(model, model.embed(tokens_BS), targets_BS, backend=backend)
            with reducer.micro_batch(is_last=number == 1):
                (loss * (rank + 1) / 16).backward()
            if number == 1 and not sharded:
                # Sent during the backward: every parameter was heard of.
                assert all(bucket.is_sent for bucket in reducer.buckets), backend
        reducer.reduce()
        found[backend] = reducer.gathered()
    return found


@pytest.mark.parametrize(("tied", "sharded"), [(True, False), (False, False), (True, True)])
def test_the_reducer_hears_of_every_gradient(tied: bool, sharded: bool) -> None:
    for found in run_ranks(_reduced, 2, tied, sharded):
        for name, ours in found["chunked"].items():
            torch.testing.assert_close(ours, found["torch"][name], rtol=2e-2, atol=5e-3)
            assert ours.any()


@pytest.mark.parametrize("name", ["qk_norm_head", "qk_norm_width"])
def test_auto_takes_chunks_when_the_logits_do_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    model = build_model(spec)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    hidden_BSD = torch.randn(2, 8, spec.d_model, generator=generator)
    targets_BS = torch.randint(spec.vocab_size, (2, 8), generator=generator)
    calls = []

    def counted(*args: Tensor) -> Tensor:
        calls.append(args)
        return chunked_cross_entropy_sum(*args)

    monkeypatch.setattr(cross_entropy, "chunked_cross_entropy_sum", counted)
    whole = cross_entropy_sum(model, hidden_BSD, targets_BS)
    assert not calls
    assert torch.equal(whole, cross_entropy_sum(model, hidden_BSD, targets_BS, backend="torch"))
    monkeypatch.setattr(chunked, "_CHUNK_BYTES", 15 * spec.vocab_size * 4)
    assert tokens_in_chunk(spec.vocab_size, torch.float32) == 8
    torch.testing.assert_close(cross_entropy_sum(model, hidden_BSD, targets_BS), whole)
    assert len(calls) == 1
    assert calls[0][1] is (model.embed if spec.tied_embeddings else model.head).weight


def test_what_does_not_fit_is_refused() -> None:
    hidden_TD, weight_VD, targets_T = _values(torch.float32)
    with pytest.raises(ValueError, match=r"shapes must be hidden .*\(13, 6\), \(6, 37\), \(13,\)"):
        chunked_cross_entropy_sum(hidden_TD, weight_VD.T, targets_T)
    with pytest.raises(ValueError, match=r"one floating dtype, but have torch\.float64, torch\.float32"):
        chunked_cross_entropy_sum(hidden_TD.double(), weight_VD, targets_T)
    with pytest.raises(ValueError, match=r"targets must be torch\.int64, but are torch\.int32"):
        chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T.int())
    with pytest.raises(ValueError, match=r"chunk_tokens \(0\) must be at least 1"):
        chunked_cross_entropy_sum(hidden_TD, weight_VD, targets_T, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"back-end \('liger'\) must be one of: auto, torch, chunked"):
        cross_entropy_sum(_model(True, torch.float32), hidden_TD[None], targets_T[None], backend="liger")


@needs_triton
def test_kernel_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_cross_entropy.py"), timeout_s=60.0)
