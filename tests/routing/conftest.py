from collections.abc import Callable

import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)


@pytest.fixture
def make_logits() -> Callable[..., Tensor]:
    """Random logits of a fixed seed, fp32 unless told otherwise, that require a gradient."""

    def make(tokens: int, experts: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, experts, generator=generator, dtype=dtype).requires_grad_()

    return make
