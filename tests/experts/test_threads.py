"""What a thread needs before its first kernel with descriptors; `gpu_experts.py` has such a thread on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.interpreted import needs_triton


@needs_triton
def test_each_thread_asks_once_for_the_context_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie_experts.grouped_swiglu import triton_launch as launch

    asked: list[torch.device] = []
    monkeypatch.setattr(launch.torch, "zeros", lambda *size, device: asked.append(device))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)

    def work() -> None:
        for device in (first, first, second, torch.device("cpu"), second):
            launch.ensure_context(device)

    for number in (1, 2):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
        assert asked == [first, second] * number
