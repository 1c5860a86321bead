"""Tests of the Triton softmax, for a process with TRITON_INTERPRET=1: see test_cross_entropy.py."""

import pytest
import torch
from coterie_trainer.cross_entropy import chunked, triton_softmax


@pytest.mark.parametrize(("vocab_size", "with_gradients"), [(1, True), (64, True), (65, False), (129, True)])
def test_rows_of_no_and_of_several_blocks(vocab_size, with_gradients, monkeypatch):
    monkeypatch.setattr(triton_softmax, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    # A column more than there are: rows need not follow one another.
    logits_CV = (torch.randn(5, vocab_size + 1, generator=generator) * 20)[:, :vocab_size]
    targets_C = torch.randint(vocab_size, (5,), generator=generator)
    targets_C[1] = -1
    targets_C[2], targets_C[3] = 0, vocab_size - 1
    ours, plain = logits_CV.clone(), logits_CV.clone()
    losses, expected = torch.full((5,), float("nan")), torch.empty(5)
    chunked._losses_and_gradients(plain, targets_C, expected, with_gradients)
    triton_softmax.losses_and_gradients(ours, targets_C, losses, with_gradients)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours, logits_CV) or with_gradients


def test_no_rows():
    empty = torch.empty(0, 7)
    triton_softmax.losses_and_gradients(empty, torch.empty(0, dtype=torch.int64), torch.empty(0), True)
