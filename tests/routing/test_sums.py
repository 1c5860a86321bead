import pytest
import torch
from coterie_routing import LoadSums, RouterConfig, load_imbalance, pack, route, unpack
from hypothesis import given, settings
from hypothesis import strategies as st


def make_sums(counts, probability_sums, num_tokens, z_sum=0.0):
    return LoadSums(
        counts_E=torch.tensor(counts, dtype=torch.int64),
        probability_sums_E=torch.tensor(probability_sums, dtype=torch.float64),
        z_sum=torch.tensor(z_sum, dtype=torch.float64),
        num_tokens=torch.tensor(num_tokens, dtype=torch.int64),
    )


def assert_equal_sums(left, right):
    for name in ("counts_E", "probability_sums_E", "z_sum", "num_tokens"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def test_addition_adds_every_field():
    total = make_sums([3, 1], [2.5, 1.5], 4, 7.0) + make_sums([0, 2], [0.5, 0.25], 1, 0.5)
    assert_equal_sums(total, make_sums([3, 3], [3.0, 1.75], 5, 7.5))
    assert_equal_sums(LoadSums.zero(2) + total, total)


def test_addition_of_different_expert_numbers_is_refused():
    with pytest.raises(ValueError, match="2 experts and of 3 experts"):
        LoadSums.zero(2) + LoadSums.zero(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_r18_counts_of_another_dtype_are_refused(dtype):
    good = LoadSums.zero(2)
    with pytest.raises(ValueError, match=r"LoadSums\.counts_E must be torch.int64"):
        LoadSums(torch.zeros(2, dtype=dtype), good.probability_sums_E, good.z_sum, good.num_tokens)


def test_r18_300_batches_of_one_token_count_300():
    one = route(torch.tensor([[5.0, 0.0]]), RouterConfig(d_model=1, num_experts=2, top_k=1, renormalize=False)).sums
    total = LoadSums.zero(2)
    for _ in range(300):
        total = total + one
    assert total.counts_E.tolist() == [300, 0]
    assert total.num_tokens.item() == 300
    bf16 = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(300):
        bf16 += 1
    assert bf16.item() == 256, "the fault that integers avoid"


def test_r18_packed_sum_over_64_ranks_is_exact():
    ranks = [make_sums([608 + rank, 676 - rank], [1.0, 2.0], 1284) for rank in range(64)]
    flat = torch.stack([pack([one]) for one in ranks]).sum(0)
    (total,) = unpack(flat, ranks[:1])
    assert total.counts_E.tolist() == [64 * 608 + 2016, 64 * 676 - 2016]
    assert total.num_tokens.item() == 64 * 1284


def test_counts_up_to_2_to_the_53_survive_packing():
    sums = make_sums([2**53 - 1, 2**53], [0.0, 0.0], 2**53 - 1)
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
        )
        for width in widths
    ]
    flat = pack(layers)
    assert flat.shape == (sum(2 * width + 2 for width in widths),)
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


def test_unpack_refuses_what_pack_did_not_make():
    with pytest.raises(ValueError, match="packed fp64 tensor of 6 numbers"):
        unpack(torch.zeros(7, dtype=torch.float64), [LoadSums.zero(2)])
    with pytest.raises(ValueError, match="packed fp64 tensor of 6 numbers"):
        unpack(torch.zeros(6), [LoadSums.zero(2)])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([5, 5, 5], 1.0), ([9, 0, 0], 3.0), ([6, 2, 0, 0], 3.0), ([3, 1], 1.5), ([0, 0], 1.0), ([1], 1.0)],
)
def test_load_imbalance_is_max_over_mean(counts, expected):
    imbalance = load_imbalance(torch.tensor(counts))
    assert imbalance.dtype == torch.float64
    assert imbalance.item() == expected
