"""One torch thread, and scratch memory that shows when nobody wrote it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def nan_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill with NaN what the package allocates, and what torch's own kernels allocate inside."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        plain = getattr(owner, name)

        def poisoned(*args: object, _plain: object = plain, **kwargs: object) -> Tensor:
            tensor = _plain(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

        monkeypatch.setattr(owner, name, poisoned)
    # With deterministic algorithms torch fills at::empty with NaN too: the outputs of grouped_mm start as NaN.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")
