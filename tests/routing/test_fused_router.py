import re
from pathlib import Path

import pytest
import torch
from coterie_routing import RouterConfig
from coterie_routing.fused_router import fused_route, reason_against
from support.interpreted import needs_triton, run_interpreted

CONFIG = dict(d_model=4, num_experts=8, top_k=2)


class OnHopper:
    """Stands for a CUDA tensor where there is no GPU."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> None:
        self.dtype, self.device = dtype, torch.device(device)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("coterie_routing.fused_router._has_triton", lambda: True)


def test_a_cpu_is_a_reason():
    reason = reason_against(torch.zeros(2, 4), torch.zeros(8, 4), RouterConfig(**CONFIG))
    assert reason == "it needs tokens on a CUDA device, not on cpu"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dtypes", "changes", "reason"),
    [
        ((torch.bfloat16, torch.bfloat16), {}, None),
        ((torch.bfloat16, torch.float32), dict(selection_bias=True, score_function="sigmoid"), None),
        ((torch.float32, torch.float32), dict(trained_top_k=4, route_scale=2.5), None),
        ((torch.float16, torch.float32), {}, "bfloat16 or torch.float32, not torch.float16"),
        (
            (torch.float32, torch.bfloat16),
            {},
            "the weight must be torch.float32 for torch.float32 tokens, not torch.bfloat16",
        ),
        (
            (torch.bfloat16, torch.float16),
            {},
            "weight must be torch.bfloat16 or torch.float32 for torch.bfloat16 tokens",
        ),
        ((torch.bfloat16, torch.bfloat16), dict(num_experts=513), r"num_experts \(513\) is above 512"),
        ((torch.bfloat16, torch.bfloat16), dict(num_experts=100, top_k=65), r"top_k \(65\) is above 64"),
        ((torch.bfloat16, torch.bfloat16), dict(num_groups=2), "has no num_groups"),
        ((torch.bfloat16, torch.bfloat16), dict(capacity_factor=1.25), "has no capacity_factor"),
        ((torch.bfloat16, torch.bfloat16), dict(selection="expert_choice"), "has no selection"),
        ((torch.bfloat16, torch.bfloat16), dict(assignment=object()), "has no assignment"),
    ],
)
def test_reasons(dtypes, changes, reason):
    x_TD, weight_ED = (OnHopper(dtype) for dtype in dtypes)
    found = reason_against(x_TD, weight_ED, RouterConfig(**{**CONFIG, **changes}))
    assert found is None if reason is None else re.search(reason, found or "")


@pytest.mark.usefixtures("hopper")
def test_another_gpu_no_triton_and_two_devices_are_reasons(monkeypatch):
    config = RouterConfig(**CONFIG)
    assert "must be on one device" in reason_against(OnHopper(), OnHopper(device="cuda:1"), config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert reason_against(OnHopper(), OnHopper(), config).endswith("capability 9 (Hopper); this one has 8.0")
    monkeypatch.setattr("coterie_routing.fused_router._has_triton", lambda: False)
    assert reason_against(OnHopper(), OnHopper(), config) == "the library triton is not installed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x_TD=torch.zeros(3)), r"expected tokens \(T, D\) and a weight \(E, D\), got \(3,\) and \(8, 4\)"),
        (dict(x_TD=torch.zeros(3, 5)), r"got \(3, 5\) and \(8, 4\)"),
        (dict(x_TD=torch.zeros(3, 4).half()), "tokens must be torch.bfloat16 or torch.float32, not torch.float16"),
        (dict(weight_ED=torch.zeros(513, 4)), r"number of experts \(513\) must be from 1 to 512"),
        (dict(top_k=9), r"top_k \(9\) must be from 1 to 8"),
        (dict(top_k=0), r"top_k \(0\) must be from 1 to 8"),
        (dict(score_function="softmx"), r"'softmx'\) must be one of: softmax, sigmoid, softmax_of_chosen"),
        (dict(weight_scale=0.0), r"weight_scale \(0.0\) must be a finite number above 0"),
        (dict(selection_bias_E=torch.zeros(8).bfloat16()), r"selection_bias_E must be torch.float32 of shape \(8,\)"),
        (dict(selection_bias_E=torch.zeros(7)), r"got torch.float32 of shape \(7,\) on cpu"),
        (dict(is_real_T=torch.ones(3)), r"is_real_T must be torch.bool of shape \(3,\) on cpu, got torch.float32"),
        (dict(is_real_T=torch.ones(3, device="meta").bool()), r"got torch.bool of shape \(3,\) on meta"),
    ],
)
def test_bad_input_is_refused(changes, message):
    right = dict(
        x_TD=torch.zeros(3, 4),
        weight_ED=torch.zeros(8, 4),
        top_k=2,
        score_function="softmax",
        renormalize=True,
        weight_scale=1.0,
    )
    arguments = {**right, **changes}
    with pytest.raises(ValueError, match=message):
        fused_route(arguments.pop("x_TD"), arguments.pop("weight_ED"), **arguments)


@needs_triton
def test_kernels_under_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_fused_router.py"))
