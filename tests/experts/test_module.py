"""Config, choice of back-end, refused arguments, initialisation, layouts, and the example of the README."""

import math
import re
from itertools import combinations
from pathlib import Path

import pytest
import torch
from coterie_experts import (
    ExpertsConfig,
    GroupedExperts,
    SharedExpert,
    choose_backend,
    grouped_swiglu,
    init_experts,
)
from coterie_experts.grouped_swiglu import triton_native
from torch import Tensor

CPU = torch.device("cpu")


def config(**changes: object) -> ExpertsConfig:
    return ExpertsConfig(**{"d_model": 12, "d_hidden": 20, "num_experts": 8, **changes})


def test_config_reports_every_problem() -> None:
    assert config().problems() == []
    bad = config(d_model=0, num_experts=-1, backend="cuda")
    assert bad.problems() == [
        "d_model (0) must be at least 1",
        "num_experts (-1) must be at least 1",
        "backend ('cuda') must be one of auto, reference, torch, triton, quack, te",
    ]
    with pytest.raises(ValueError, match=r"d_model \(0\).*\n.*num_experts \(-1\).*\n.*backend"):
        GroupedExperts(bad)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0), (7, 2), (8, 1)])
def test_share_outside_of_the_layer_is_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"first_expert \({first}\) and num_local_experts \({count}\).*\(8\)"):
        GroupedExperts(config(), first_expert=first, num_local_experts=count)


@pytest.mark.parametrize("value", ["0", 2.0, True])
def test_a_share_is_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=rf"first_expert \({value!r}\) must be a whole number"):
        GroupedExperts(config(), first_expert=value)
    with pytest.raises(ValueError, match=rf"num_local_experts \({value!r}\) must be a whole number"):
        GroupedExperts(config(), num_local_experts=value)


def test_auto_says_what_it_chose_and_why() -> None:
    experts = GroupedExperts(config())
    assert experts.backend == "torch"
    assert experts.backend_reason == "'torch' can run torch.float32 on cpu; F.grouped_mm is faster than loops"
    experts = experts.double()
    assert experts.backend == "reference"
    assert experts.backend_reason == "'torch' cannot run: it runs torch.float32 on cpu, not torch.float64"
    odd = GroupedExperts(config(d_model=10, d_hidden=7))
    assert odd.backend == "reference"
    assert "d_model (10) and d_hidden (7) must be a multiple of 4" in odd.backend_reason
    assert GroupedExperts(config(backend="reference")).backend_reason == "'reference' was asked for by name"
    assert "backend=torch" in repr(GroupedExperts(config(backend="torch")))


@pytest.mark.parametrize("device", [None, "meta"])
def test_named_back_end_that_cannot_run_is_refused_at_build(device: str | None) -> None:
    text = r"'torch' cannot run: d_hidden \(18\) must be a multiple of 4 .* or choose backend 'auto' or 'reference'"
    with pytest.raises(ValueError, match=text):
        GroupedExperts(config(d_hidden=18, backend="torch"), device=device)


def test_named_back_end_on_another_device_or_unknown() -> None:
    sizes = {"d_model": 16, "d_hidden": 16, "dtype": torch.float32}
    with pytest.raises(ValueError, match="device xpu is not one of cpu, cuda"):
        choose_backend("torch", device=torch.device("xpu"), **sizes)
    with pytest.raises(ValueError, match=r"it runs torch\.bfloat16 on cuda, not torch\.float32"):
        choose_backend("torch", device=torch.device("cuda"), **sizes)
    with pytest.raises(ValueError, match="must be one of auto, reference, torch, triton"):
        choose_backend("tilelang", device=CPU, **sizes)


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_gpus_where_grouped_mm_reads_the_offsets_on_the_host(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "This GPU")
    monkeypatch.setattr(triton_native, "obstacle", lambda **sizes: "not here")
    choice = choose_backend("auto", d_model=16, d_hidden=8, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert choice.name == ("torch" if runs else "reference")
    assert "'triton' cannot run: not here" in choice.reason
    assert runs == (choice.reason.startswith("'torch' can run torch.bfloat16 on cuda"))
    assert runs or "'torch' cannot run: it needs compute capability 9 or 10, which This GPU has not" in choice.reason


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "relu_squared"])
def test_torch_back_end_never_looks_at_values_off_the_cpu(activation: str, bias: bool) -> None:
    """Tensors without memory raise when a value is read, as a host synchronisation would."""
    sizes = config(d_model=16, d_hidden=24, backend="torch", activation=activation, bias=bias)
    experts = GroupedExperts(sizes, device="meta", dtype=torch.bfloat16)
    x = torch.empty(10, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weights = torch.empty(10, 2, device="meta", requires_grad=True)
    experts.forward_tokens(x, torch.empty(10, 2, dtype=torch.int64, device="meta"), weights).sum().backward()
    assert (x.grad.shape, x.grad.dtype) == (x.shape, torch.bfloat16)
    assert (weights.grad.shape, weights.grad.dtype) == (weights.shape, torch.float32)
    for parameter in experts.parameters():
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.bfloat16)
    shared = SharedExpert(
        d_model=16, d_hidden=24, activation=activation, bias=bias, backend="torch", device="meta", dtype=torch.bfloat16
    )
    shared(x).sum().backward()
    assert shared.down.grad.shape == (16, 24)


def test_reference_reads_the_offsets() -> None:
    reference = GroupedExperts(config(backend="reference"), device="meta")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        reference(torch.empty(4, 12, device="meta"), torch.empty(4, device="meta"), ends(*[4] * 8).to("meta"))


def arguments() -> dict[str, Tensor]:
    return {
        "rows": torch.zeros(6, 12),
        "weights": torch.zeros(6),
        "offsets": torch.tensor([2, 2, 6], dtype=torch.int32),
        "gate_up": torch.zeros(3, 40, 12),
        "down": torch.zeros(3, 12, 20),
    }


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSED = (
    ("offsets", ends(2, 2, 7), "offsets end at row 7 but there are only 6 rows: the counts do not add up"),
    ("offsets", ends(2, 1, 6), "offsets must not fall: expert 1 would start at row 2 and end at row 1"),
    ("offsets", ends(-1, 2, 6), "expert 0 would start at row 0 and end at row -1"),
    ("offsets", torch.tensor([2, 2, 6]), "offsets must be torch.int32 .* but is torch.int64"),
    ("offsets", ends(2, 2, 6).to("meta"), "offsets is on meta but the rows are on cpu; move it there"),
    ("offsets", ends(2, 6), r"offsets \(e\).*offsets \(2,\)"),
    ("offsets", ends(2, 2, 6)[:, None], r"offsets \(e\).*offsets \(3, 1\)"),
    ("rows", torch.zeros(6, 16), r"rows \(6, 16\)"),
    ("rows", torch.zeros(6, 1, 12), r"rows \(6, 1, 12\)"),
    ("rows", torch.zeros(6, 12).bfloat16(), "gate_up must be torch.bfloat16 when the rows are torch.bfloat16"),
    ("weights", torch.zeros(5), r"row_weights \(5,\)"),
    ("weights", torch.zeros(6).bfloat16(), "row_weights must be torch.float32 .* but is torch.bfloat16"),
    ("gate_up", torch.zeros(3, 20, 12), r"gate_up \(3, 20, 12\)"),
    ("down", torch.zeros(3, 20, 12), r"down \(3, 20, 12\)"),
)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("name", "value", "text"), REFUSED)
def test_wrong_arguments_are_refused(name: str, value: Tensor, text: str, backend: str) -> None:
    good = arguments()
    grouped_swiglu(*good.values(), backend=backend)
    with pytest.raises(ValueError, match=text):
        grouped_swiglu(*{**good, name: value}.values(), backend=backend)


def test_all_wrong_arguments_in_one_report() -> None:
    good = arguments()
    bad = {**good, "weights": good["weights"].double(), "offsets": good["offsets"].long()}
    with pytest.raises(ValueError, match=r"row_weights must be torch\.float32.*\n.*offsets must be torch\.int32"):
        grouped_swiglu(*bad.values())


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([[0, 8]]), "ids must be -1 to 7, but go from 0 to 8"),
        (torch.tensor([[-2, 3]]), "ids must be -1 to 7, but go from -2 to 3"),
        (torch.tensor([[0, 1]], dtype=torch.int32), "ids must be torch.int64, but are torch.int32"),
        (torch.tensor([[0, 1, 2]]), r"\(1, 12\), \(1, 3\) and \(1, 2\)"),
        (torch.tensor([0, 1]), r"\(1, 12\), \(2,\) and \(1, 2\)"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), "ids are on meta but x is on cpu"),
    ],
)
def test_wrong_ids_are_refused(ids: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GroupedExperts(config()).forward_tokens(torch.zeros(1, 12), ids, torch.zeros(1, 2))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_tokens_of_another_width_or_without_choices_are_refused(backend: str) -> None:
    experts = GroupedExperts(config(backend=backend))
    with pytest.raises(ValueError, match="x must have the width of the experts, 12, but has 11"):
        experts.forward_tokens(torch.randn(3, 11), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    with pytest.raises(ValueError, match="at least one choice a token, but K is 0"):
        experts.forward_tokens(torch.randn(3, 12), torch.zeros(3, 0, dtype=torch.int64), torch.ones(3, 0))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_offsets_may_be_a_column(backend: str) -> None:
    check_offsets_in_a_column(backend)


def check_offsets_in_a_column(backend: str) -> None:
    experts = GroupedExperts(ExpertsConfig(d_model=16, d_hidden=24, num_experts=3, backend=backend))
    init_experts(experts, seed=0, std=0.02, name="experts")
    table = torch.tensor([[1, 6], [3, 6], [6, 6]], dtype=torch.int32)
    rows, weights = torch.randn(6, 16), torch.ones(6)
    expected = experts(rows, weights, table[:, 0].contiguous())
    assert (expected != 0).any(1).all()
    assert torch.equal(experts(rows, weights, table[:, 0]), expected)
    one = GroupedExperts(ExpertsConfig(d_model=16, d_hidden=24, num_experts=1, backend=backend))
    column = torch.tensor([[6, 0]], dtype=torch.int32)[:, 0]
    assert torch.equal(one(rows, weights, column), one(rows, weights, column.clone()))


def test_forward_tokens_needs_all_experts() -> None:
    share = GroupedExperts(config(), first_expert=4, num_local_experts=4)
    with pytest.raises(ValueError, match="needs all 8 experts on one rank, but 4 are here"):
        share.forward_tokens(torch.zeros(1, 12), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))


def build(first: int, count: int, *, name: str = "layers.0", seed: int = 5) -> GroupedExperts:
    share = GroupedExperts(config(), first_expert=first, num_local_experts=count, device="meta")
    share.to_empty(device="cpu")
    init_experts(share, seed=seed, name=name, std=0.02, down_std=0.01)
    return share


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_split_holds_the_same_experts(ranks: int) -> None:
    """E24: bit-equal to the start on one rank, and every pair of experts differs."""
    whole = build(0, 8)
    shares = [build(rank * 8 // ranks, 8 // ranks) for rank in range(ranks)]
    for name in ("gate_up", "down"):
        joined = torch.cat([getattr(share, name) for share in shares])
        assert torch.equal(joined, getattr(whole, name))
        for one, other in combinations(joined, 2):
            assert (one != other).float().mean() > 0.99


def test_initialisation_depends_on_seed_and_name_and_has_the_width_asked_for() -> None:
    first = build(0, 8)
    for other in (build(0, 8, seed=6), build(0, 8, name="layers.1")):
        assert (first.gate_up != other.gate_up).float().mean() > 0.99
        assert (first.down != other.down).float().mean() > 0.99
    for weights, std in ((first.gate_up, 0.02), (first.down, 0.01)):
        # 3,840 and 1,920 numbers: the standard deviation is known to 1.2 and 1.7 %, so 5 sigma are 6 and 8 %.
        assert weights.std().item() == pytest.approx(std, rel=0.08)
        assert abs(weights.mean().item()) < 5 * std / weights.numel() ** 0.5
        # Neighbours in the count of seeds: no correlation above 5 sigma.
        correlation = torch.corrcoef(weights.detach().flatten(1)) - torch.eye(8)
        assert correlation.abs().max() < 5 / weights[0].numel() ** 0.5
    assert torch.equal(build(0, 8).gate_up, first.gate_up)


def test_the_start_depends_on_no_default_of_torch() -> None:
    expected = GroupedExperts(config())
    assert expected.down.any()
    assert expected.gate_up.any()
    try:
        torch.set_default_dtype(torch.float64)
        found = [GroupedExperts(config(), dtype=torch.float32)]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        found.append(GroupedExperts(config(), device="cpu"))
    for experts in found:
        assert torch.equal(experts.down, expected.down)
        assert torch.equal(experts.gate_up, expected.gate_up)


@pytest.mark.parametrize("std", [math.nan, math.inf, -1.0])
def test_a_standard_deviation_is_a_number(std: float) -> None:
    with pytest.raises(ValueError, match=r"a standard deviation .* must be a finite number from 0"):
        init_experts(GroupedExperts(config()), seed=0, name="a", std=std)


def test_bfloat16_start_is_the_rounded_float32_start() -> None:
    rounded = GroupedExperts(config(), dtype=torch.bfloat16)
    assert torch.equal(rounded.gate_up, GroupedExperts(config()).gate_up.bfloat16())


def test_meta_experts_cannot_be_initialised() -> None:
    with pytest.raises(ValueError, match="call to_empty"):
        init_experts(GroupedExperts(config(), device="meta"), seed=0, name="", std=1.0)


def test_readme_examples_run() -> None:
    """The second goes on from the first, and adds the same gradients to those that are there."""
    readme = Path(__file__).parents[2] / "packages" / "experts" / "README.md"
    first, second = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, str(readme), "exec"), names)
    assert names["y"].shape == (5, 64)
    gradient = names["experts"].gate_up.grad.clone()
    assert gradient.abs().sum() > 0
    exec(compile(second, str(readme), "exec"), names)
    assert torch.equal(names["experts"].gate_up.grad, 2 * gradient)


def test_a_layer_that_cannot_run_can_be_printed() -> None:
    experts = GroupedExperts(config(backend="torch")).double()
    assert "backend=torch, which cannot run" in repr(experts)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_dtypes_that_no_back_end_has_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"dtype \({dtype}\) must be one of torch\.bfloat16, "):
        GroupedExperts(config(), device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"d_model": "16"}, r"d_model \('16'\) must be a whole number"),
        ({"d_hidden": 16.0}, r"d_hidden \(16\.0\) must be a whole number"),
        ({"num_experts": True}, r"num_experts \(True\) must be a whole number"),
        ({"bias": "no"}, r"bias \('no'\) must be true or false"),
        ({"swiglu_limit": None}, r"swiglu_limit \(None\) must be a finite number above 0"),
        ({"swiglu_alpha": "2"}, r"swiglu_alpha \('2'\) must be a finite number above 0"),
    ],
)
def test_values_of_other_types_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GroupedExperts(config(**changes))


def test_all_faults_of_arguments_at_once() -> None:
    experts = GroupedExperts(ExpertsConfig(d_model=16, d_hidden=8, num_experts=2, backend="reference"))
    wide = "gate_up must be torch.float64 when the rows are torch.float64, but is torch.float32"
    with pytest.raises(ValueError, match=rf"(?s)^shapes must be .*{re.escape(wide)}"):
        experts(torch.zeros(5, 12).double(), torch.ones(5).double(), torch.tensor([3, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match=rf"(?s)^{re.escape(wide)}.*\noffsets end at row 9 but there are only 5 rows"):
        experts(torch.zeros(5, 16).double(), torch.ones(5).double(), torch.tensor([3, 9], dtype=torch.int32))
    text = (
        "ids must be -1 to 1, but go from 9 to 9\n"
        "x must be torch.float32, as the parameters are, but is torch.float64\n"
        "weights must be torch.float32 where x is torch.float32, but are torch.bfloat16"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        experts.forward_tokens(torch.zeros(5, 16).double(), torch.full((5, 1), 9), torch.ones(5, 1).bfloat16())
