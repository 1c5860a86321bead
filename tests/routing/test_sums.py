import dataclasses

import pytest
import torch
from coterie_routing import LoadSums, RouterConfig, load_imbalance, pack, reduce_sums, route, squared_load_loss, unpack
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.cases import make_sums


def assert_equal_sums(left, right):
    for field in dataclasses.fields(LoadSums):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), field.name


def test_addition_adds_every_field():
    left = make_sums([3, 1], [2.5, 1.5], 4, z_sum=7.0, num_dropped=2, num_bad=1)
    right = make_sums([0, 2], [0.5, 0.25], 1, z_sum=0.5, num_dropped=1, num_bad=3)
    total = left + right
    assert_equal_sums(total, make_sums([3, 3], [3.0, 1.75], 5, z_sum=7.5, num_dropped=3, num_bad=4))
    assert_equal_sums(LoadSums.zero(2) + total, total)
    assert_equal_sums(left, make_sums([3, 1], [2.5, 1.5], 4, z_sum=7.0, num_dropped=2, num_bad=1))


def test_addition_keeps_the_graph_of_both_sides(make_logits):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2)
    first, second = make_logits(3, 4), make_logits(5, 4, seed=1)
    total = route(first, config).sums + route(second, config).sums
    whole = torch.cat([first, second]).detach().requires_grad_()
    expected = route(whole, config).sums
    assert torch.equal(total.counts_E, expected.counts_E)
    assert total.num_tokens.item() == 8

    def loss(sums):
        return sums.probability_sums_E[0] + 0.1 * sums.z_sum

    gradients = torch.autograd.grad(loss(total), (first, second))
    torch.testing.assert_close(torch.cat(gradients), torch.autograd.grad(loss(expected), whole)[0], rtol=1e-6, atol=0)


def test_addition_of_different_expert_numbers_is_refused():
    with pytest.raises(ValueError, match="2 experts and of 3 experts"):
        LoadSums.zero(2) + LoadSums.zero(3)


WRONG_DTYPES = [
    ("counts_E", torch.bfloat16),
    ("counts_E", torch.float32),
    ("counts_E", torch.int32),
    ("probability_sums_E", torch.float32),
    ("z_sum", torch.float32),
    ("num_tokens", torch.int32),
    ("num_dropped", torch.float64),
    ("num_bad", torch.bool),
]


@pytest.mark.parametrize(("name", "dtype"), WRONG_DTYPES)
def test_r18_a_field_of_another_dtype_is_refused(name, dtype):
    good = LoadSums.zero(2)
    with pytest.raises(ValueError, match=rf"LoadSums\.{name} must be torch\.\w+, not {dtype}"):
        dataclasses.replace(good, **{name: getattr(good, name).to(dtype)})


def test_counts_up_to_2_to_the_53_survive_packing():
    sums = make_sums([2**53 - 1, 2**53], [0.0, 0.0], 2**53 - 1, num_dropped=2**53 - 3)
    assert_equal_sums(unpack(pack([sums]), [sums])[0], sums)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.integers(0, 2**16))
def test_packing_layers_of_any_width_and_taking_them_apart_is_the_identity(widths, seed):
    generator = torch.Generator().manual_seed(seed)
    layers = [
        LoadSums(
            counts_E=torch.randint(0, 1000, (width,), generator=generator),
            probability_sums_E=torch.rand(width, generator=generator, dtype=torch.float64),
            z_sum=torch.rand((), generator=generator, dtype=torch.float64),
            num_tokens=torch.randint(0, 1000, (), generator=generator),
            num_dropped=torch.randint(0, 1000, (), generator=generator),
            num_bad=torch.randint(0, 1000, (), generator=generator),
        )
        for width in widths
    ]
    flat = pack(layers)
    assert flat.shape == (sum(2 * width + 4 for width in widths),)
    back = unpack(flat, layers)
    flat.fill_(float("nan"))  # What was taken out is a copy.
    assert len(back) == len(layers)
    for ours, theirs in zip(back, layers, strict=True):
        assert_equal_sums(ours, theirs)


def test_packed_and_detached_sums_carry_no_graph(make_logits):
    sums = route(make_logits(3, 4), RouterConfig(d_model=1, num_experts=4, top_k=2)).sums
    assert sums.probability_sums_E.requires_grad
    assert sums.z_sum.requires_grad
    assert not pack([sums]).requires_grad
    assert not sums.detach().probability_sums_E.requires_grad
    assert not sums.detach().z_sum.requires_grad
    assert_equal_sums(sums.detach(), sums)


@pytest.mark.parametrize("in_place", [False, True], ids=["new tensor", "in place"])
def test_the_sums_of_all_layers_are_reduced_in_one_call(make_logits, in_place):
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, capacity_factor=0.5)
    wide = RouterConfig(d_model=1, num_experts=7, top_k=3)
    ranks = [
        [route(make_logits(5 + rank, width.num_experts, seed=seed), width).sums for seed, width in layers]
        for rank, layers in enumerate([[(0, config), (1, wide), (2, config)], [(3, config), (4, wide), (5, config)]])
    ]
    before = [one.detach() for one in ranks[0]]
    calls = []

    def sum_over_ranks(flat):
        calls.append(flat.shape)
        other = pack(ranks[1])
        return flat.add_(other) if in_place else flat + other

    reduced = reduce_sums(ranks[0], sum_over_ranks)
    assert calls == [torch.Size([2 * (4 + 7 + 4) + 3 * 4])]
    assert len(reduced) == 3
    for ours, left, right, untouched in zip(reduced, *ranks, before, strict=True):
        assert_equal_sums(ours, left + right)
        assert_equal_sums(left, untouched)
        assert not ours.probability_sums_E.requires_grad


def test_one_mask_reaches_every_field(make_logits):
    config = RouterConfig(d_model=1, num_experts=5, top_k=2, capacity_factor=0.6, score_function="sigmoid")
    logits_TE = make_logits(20, 5).detach()
    logits_TE[3] = float("nan")
    is_real_T = torch.arange(20) % 3 != 0  # hides the row of NaN too
    with_mask = route(logits_TE, config, is_real_T=is_real_T).sums
    alone = route(logits_TE[is_real_T], config).sums
    torch.testing.assert_close(with_mask.probability_sums_E, alone.probability_sums_E, rtol=1e-6, atol=0)
    torch.testing.assert_close(with_mask.z_sum, alone.z_sum, rtol=1e-6, atol=0)
    for name in ("counts_E", "num_tokens", "num_dropped", "num_bad"):
        assert torch.equal(getattr(with_mask, name), getattr(alone, name)), name
    assert with_mask.num_dropped.item() > 0
    assert route(logits_TE, config).sums.num_bad.item() == 1


def test_unpack_refuses_what_pack_did_not_make():
    with pytest.raises(ValueError, match="packed fp64 tensor of 8 numbers"):
        unpack(torch.zeros(9, dtype=torch.float64), [LoadSums.zero(2)])
    with pytest.raises(ValueError, match="packed fp64 tensor of 8 numbers"):
        unpack(torch.zeros(8), [LoadSums.zero(2)])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([5, 5, 5], 1.0), ([9, 0, 0], 3.0), ([6, 2, 0, 0], 3.0), ([3, 1], 1.5), ([0, 0], 1.0), ([1], 1.0)],
)
def test_load_imbalance_is_max_over_mean(counts, expected):
    imbalance = load_imbalance(torch.tensor(counts))
    assert imbalance.dtype == torch.float64
    assert imbalance.item() == expected


def test_the_built_in_sum_adds_them():
    parts = [make_sums([3, 1], [2.5, 1.5], 4), make_sums([0, 2], [0.5, 0.25], 1)]
    assert_equal_sums(sum(parts), parts[0] + parts[1])
    with pytest.raises(TypeError):
        1 + parts[0]


def test_a_reduction_that_returns_nothing_is_refused():
    with pytest.raises(ValueError, match="must return the sum as a tensor, but returned None"):
        reduce_sums([LoadSums.zero(2)], lambda flat: None)


def test_reducing_the_counts_of_a_routing_in_place_leaves_its_sums_alone():
    routing = route(torch.zeros(3, 4), RouterConfig(d_model=1, num_experts=4, top_k=2))
    routing.counts_E.mul_(2)
    assert routing.sums.counts_E.tolist() == [3, 3, 0, 0]


def test_a_load_of_nan_is_not_even():
    assert load_imbalance(torch.tensor([torch.nan, 1.0])).isnan()
    assert squared_load_loss(torch.tensor([torch.nan, 1.0])).isnan()
