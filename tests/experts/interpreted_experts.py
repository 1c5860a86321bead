"""Tests of the Triton back-end, beside its conformance, for a process with TRITON_INTERPRET=1."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from coterie_experts import ExpertsConfig, GroupedExperts, grouped_swiglu
from coterie_experts.grouped_swiglu import triton_backward, triton_launch, triton_layout, triton_native
from coterie_experts.token_rows import sort_slots
from torch import Tensor

from experts import test_idle_and_padding, test_main_grad, test_module, test_once, test_tokens, test_values
from experts.cases import CASES, Case, make_tensors
from experts.test_values import NAMES, run, run_loop

# Where a GPU gives NaN in silence, numpy, which the interpreter runs on, also warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
NAN, INF = float("nan"), float("inf")
EDGES = (0, 1, 31, 32, 33, 63, 0, 64, 65, 127, 128, 129, 130)
VALUES = (
    Case(name="edges of the tiles (E11)", counts=EDGES, rows_past_the_end=3),
    Case(name="even", counts=(9, 9), d_model=64, d_hidden=64),
    Case(name="one step more than whole tiles", counts=(33, 32), d_model=20, d_hidden=36),
    *(
        case
        for case in CASES
        if case.name in ("narrowest", "wide and thin", "thin and wide", "prime number of experts")
    ),
)


@pytest.mark.parametrize("case", VALUES, ids=lambda case: case.name)
@pytest.mark.usefixtures("nan_scratch")
def test_values_and_gradients(case: Case) -> None:
    tensors = make_tensors(case)
    exact = run_loop(tensors.differentiable(torch.float64), case.counts)
    plain = run_loop(tensors.differentiable(), case.counts)
    for name, one, baseline, truth in zip(NAMES, run(tensors.differentiable(), "triton"), plain, exact, strict=True):
        assert one.shape == truth.shape, name
        if truth.numel() > 0:
            error, allowed = ((got.double() - truth).abs().max().item() for got in (one, baseline))
            # The gradient of a row weight is a sum over H here and over D in the loop, each with its own rounding.
            units = 16 if name == "grad row_weights" else 1
            unit = torch.finfo(torch.float32).eps * truth.abs().max().item()
            assert error <= 2 * allowed + units * unit, name


def test_rows_that_do_not_count(nan_scratch: None) -> None:
    test_idle_and_padding.test_rows_past_the_end_do_not_leak(nan_scratch, INF, "triton")
    test_idle_and_padding.test_rows_of_weight_zero_do_not_leak(nan_scratch, INF, "triton")


def test_weights_of_zero(nan_scratch: None) -> None:
    test_idle_and_padding.test_weight_of_a_garbage_row_has_gradient_zero(1.0, "triton")
    test_idle_and_padding.test_weight_of_a_garbage_row_has_gradient_zero(NAN, "triton")
    test_idle_and_padding.test_weight_of_zero_still_learns("triton")


def test_by_hand() -> None:
    test_values.test_by_hand("triton")


def test_strides() -> None:
    test_values.test_strides_do_not_matter("capacity rows past the end", "triton")
    test_values.test_expanded_gradient("one row", "triton")


@pytest.mark.parametrize("wanted", ["rows", "row_weights", "gate_up", "down"])
def test_one_gradient_alone(wanted: str) -> None:
    test_values.test_one_gradient_alone_is_the_same(wanted, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_main_grad_accumulates(dtype: torch.dtype) -> None:
    """In the kernel where `main_grad` is float32, after it where it is float64; the idle expert's is untouched."""
    plain, wide = test_main_grad.build("triton"), test_main_grad.build("triton")
    for parameter in wide.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype)
    for experts in (plain, wide):
        test_main_grad.run(experts, 1)
    for one, other in zip(plain.parameters(), wide.parameters(), strict=True):
        assert other.grad is None
        assert torch.equal(other.main_grad, one.grad.to(dtype))


@triton.jit
def _always(segments_ptr, num_experts, num_tiles):
    return tl.load(segments_ptr) >= 0


@triton.jit
def _never(segments_ptr, num_experts, num_tiles):
    return tl.load(segments_ptr) < 0


@pytest.mark.parametrize("counts", [(9, 9), (40, 0, 3)])
@pytest.mark.usefixtures("nan_scratch")
def test_both_orders_of_tiles_give_the_same_bits(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors(Case(name="", counts=counts, d_model=20, d_hidden=36))
    found = []
    for decide in (_always, _never):
        monkeypatch.setattr(triton_backward, "_is_even", decide)
        found.append(run(tensors.differentiable(), "triton"))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("twice", [False, True])
def test_a_kept_graph_can_be_used_again(twice: bool) -> None:
    """The gradient overwrites the pre-activation only where nobody can come back for it."""
    tensors = make_tensors(Case(name="", counts=(9, 40))).differentiable()
    leaves = (tensors.rows, tensors.row_weights, tensors.gate_up, tensors.down)
    y = grouped_swiglu(tensors.rows, tensors.row_weights, tensors.offsets, *leaves[2:], backend="triton")
    first = torch.autograd.grad(y, leaves, tensors.grad_y, retain_graph=twice)
    if twice:
        for one, other in zip(first, torch.autograd.grad(y, leaves, tensors.grad_y), strict=True):
            assert torch.equal(one, other)
    else:
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, leaves, tensors.grad_y)


def test_nothing_permuted_is_kept() -> None:
    """What waits for the backward pass: x as it came, weights, the pre-activation, and indices of a few bytes a row."""
    experts = GroupedExperts(ExpertsConfig(d_model=12, d_hidden=20, num_experts=4, backend="triton"))
    x, ids, weights, _ = test_tokens.make_batch(40, 3, 4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        experts.forward_tokens(x, ids, weights)
    wide = [tuple(tensor.shape) for tensor in kept if tensor.dim() > 1 and tensor.shape[1] > 3]
    num_padded = (40 * 3 + 4 * 31) // 32 * 32
    assert sorted(wide) == sorted([(40, 12), (4, 40, 12), (4, 12, 20), (num_padded, 40)])


def test_padded_rows_by_hand() -> None:
    """Tokens choose (2, 0), (0, -1), (2, 1) of 4 experts; segments are padded to 2 rows; slot 2 has weight 0."""
    ids = torch.tensor([[2, 0], [0, -1], [2, 1]])
    weights = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0, 6.0])
    slots, offsets = sort_slots(ids, 4)
    assert slots.tolist() == [1, 2, 5, 0, 4, 3]
    assert offsets.tolist() == [2, 3, 5, 5]
    layout = triton_layout.pad_rows(offsets, weights, slot_of_row_N=slots, num_choices=2, block=2)
    # Expert 0: slots 1 and 2; expert 1: slot 5 and padding; expert 2: slots 0 and 4; and (6 + 4) // 2 tiles at worst.
    assert layout.num_padded == 10
    assert layout.num_tiles_1.tolist() == [3]
    assert layout.slot_P.tolist() == [1, 2, 5, -1, 0, 4, -1, -1, -1, -1]
    assert layout.source_P.tolist() == [0, 1, 2, -1, 0, 2, -1, -1, -1, -1]
    assert layout.counted_P.tolist() == [0, -1, 2, -1, 0, 2, -1, -1, -1, -1]
    assert layout.weight_P.tolist() == [2, 0, 6, 0, 1, 5, 0, 0, 0, 0]
    assert layout.position_N.tolist() == [4, 0, 1, -1, 5, 2]
    assert layout.expert_M.tolist()[:3] == [0, 1, 2]
    assert layout.has_zero_M.tolist()[:3] == [1, 1, 0]
    assert layout.segments_e3.tolist() == [[0, 0, 2], [2, 4, 2], [1, 2, 1], [3, 6, 0]]


@pytest.mark.parametrize("num_experts", [1, 3, 255, 256, 300])
def test_sorted_slots_are_the_sorted_list(num_experts: int) -> None:
    """The keys are 8 bits wide up to 255 experts and 16 bits from there on; -1 comes last."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts, (50, 4), generator=generator)
    ids[0, 0], ids[1, 0] = num_experts - 1, -1
    slots, offsets = sort_slots(ids, num_experts)
    flat = [one if one >= 0 else num_experts for one in ids.flatten().tolist()]
    assert slots.tolist() == sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert offsets.tolist() == [sum(one <= expert for one in flat) for expert in range(num_experts)]


def test_only_float32_runs_here() -> None:
    sizes = {"d_model": 16, "d_hidden": 16, "device": torch.device("cpu")}
    assert triton_native.obstacle(dtype=torch.float32, **sizes) is None
    assert "runs torch.float32, not torch.bfloat16" in str(triton_native.obstacle(dtype=torch.bfloat16, **sizes))


def test_offsets_may_be_a_column() -> None:
    test_module.check_offsets_in_a_column("triton")


@pytest.mark.parametrize("place", test_values.PLACES)
def test_rows_weights_and_main_grads_anywhere(place: Callable[[Tensor], Tensor]) -> None:
    test_values.check_places("triton", place)


@pytest.mark.parametrize("offsets", [[3, 40], [1 << 30, 1 << 30], [-5, 3], [6, 2], [-5, -1]])
def test_offsets_that_do_not_fit_leave_other_memory_alone(offsets: list[int]) -> None:
    """On a GPU nobody looks at them. Every index that the kernels follow stays within what there is."""
    num_rows = 8
    layout = triton_layout.pad_rows(
        torch.tensor(offsets, dtype=torch.int32), torch.ones(num_rows), slot_of_row_N=None, num_choices=1, block=2
    )
    num_tiles = layout.num_tiles_1.item()
    assert 0 <= num_tiles <= layout.expert_M.shape[0]
    assert ((layout.expert_M[:num_tiles] >= 0) & (layout.expert_M[:num_tiles] < 2)).all()
    assert ((layout.source_P >= -1) & (layout.source_P < num_rows)).all()
    assert ((layout.slot_P >= -1) & (layout.slot_P < num_rows)).all()
    _, first_rows, counts = layout.segments_e3.T
    assert (counts >= 0).all()
    if offsets[-1] >= num_rows:
        assert sorted(one for one in layout.slot_P.tolist() if one >= 0) == list(range(num_rows))
        assert counts.sum() == num_rows
    assert (first_rows[counts > 0] + counts[counts > 0] <= layout.num_padded).all()


def test_no_pass_builds_descriptors_before_its_thread_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    build = triton_launch.TensorDescriptor.from_tensor

    def from_tensor(*values: object) -> object:
        events.append("descriptor")
        return build(*values)

    monkeypatch.setattr(triton_launch.TensorDescriptor, "from_tensor", from_tensor)
    monkeypatch.setattr(triton_launch, "ensure_context", lambda device: events.append("context"))
    experts = GroupedExperts(ExpertsConfig(d_model=16, d_hidden=16, num_experts=2, backend="triton"))
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    deferred: list[Callable[[], None]] = []
    experts.defer_weight_gradients = deferred.append
    y = experts(torch.ones(4, 16), torch.ones(4), torch.tensor([2, 4], dtype=torch.int32))
    for go_on in (lambda: None, y.sum().backward, lambda: deferred.pop()()):
        go_on()
        assert events[0] == "context"
        assert "descriptor" in events
        events.clear()


def test_passes_for_some_inputs() -> None:
    test_main_grad.check_passes_for_some_inputs("triton")


def test_gradients_that_are_asked_for_are_returned() -> None:
    test_main_grad.check_asked_gradients("triton")


@pytest.mark.parametrize("place", ["x", "gate_up", "down"])
def test_inputs_that_are_copied_can_be_differentiated_once(place: str) -> None:
    test_once.check_copied_inputs("triton", place)
