"""The Triton back-end under the interpreter, and where it says that it cannot run."""

import importlib.util
from pathlib import Path

import pytest
import torch
from coterie_experts import choose_backend
from coterie_experts.grouped_swiglu import triton_native
from support.interpreted import needs_triton, run_interpreted

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "interpreted_experts.py",
        "interpreted_conformance.py",
        "interpreted_activations.py",
        "interpreted_long_rows.py",
        "interpreted_quack.py",
    ],
)
def test_kernels_under_the_interpreter(name: str) -> None:
    run_interpreted(Path(__file__).with_name(name))


def obstacle(**changes: object) -> str:
    sizes = {"d_model": 16, "d_hidden": 24, "dtype": torch.bfloat16, "device": CUDA}
    return str(triton_native.obstacle(**{**sizes, **changes}))


@needs_triton
def test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "This GPU")
    assert obstacle() == "it needs compute capability 9, which This GPU has not"
    assert obstacle(dtype=torch.float32) == (
        "it runs torch.bfloat16 on cuda, not torch.float32; it needs compute capability 9, which This GPU has not"
    )
    assert obstacle(device=torch.device("xpu")) == "device xpu is not cuda"
    assert "interpreter alone, for tests" in obstacle(device=CPU, dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert obstacle() == "None"
    assert obstacle(device=torch.device("meta")) == "None"
    text = "d_model (12) and d_hidden (20) must be a multiple of 8 for torch.bfloat16 (rows of 16 bytes)"
    assert obstacle(d_model=12, d_hidden=20) == text
    choice = choose_backend("auto", d_model=16, d_hidden=24, dtype=torch.bfloat16, device=CUDA)
    assert choice.name == "triton"
    assert choice.reason.startswith(
        "'triton' can run torch.bfloat16 on cuda; nothing was measured for narrow-small widths"
    )


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert obstacle() == "triton is not installed"
    with pytest.raises(ValueError, match="backend 'triton' cannot run: triton is not installed; or choose backend"):
        choose_backend("triton", d_model=16, d_hidden=24, dtype=torch.float32, device=CPU)
