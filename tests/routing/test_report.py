"""The load report: the example of packed and cracked experts by hand, every verdict, and what it refuses."""

import math
import re
from pathlib import Path

import pytest
import torch
from coterie_routing import LoadSums, RouterConfig, route
from coterie_routing.report import VERDICTS, load_report, split_sums
from coterie_routing.wins import WinSums, win_sums

TOP_1 = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False)
TOP_2 = RouterConfig(d_model=1, num_experts=4, top_k=2)


def sums(counts, probability_sums=None, *, top_k=1):
    """Load sums with these counts, and with probabilities in proportion to them unless they are given."""
    counts_E = torch.tensor(counts)
    num_tokens = counts_E.sum() // top_k
    if probability_sums is None:
        probability_sums = (counts_E.double() / top_k).tolist()
    zero = torch.zeros((), dtype=torch.int64)
    return LoadSums(
        counts_E=counts_E,
        probability_sums_E=torch.tensor(probability_sums, dtype=torch.float64),
        z_sum=torch.zeros((), dtype=torch.float64),
        num_tokens=num_tokens,
        num_dropped=zero,
        num_bad=zero,
    )


def packed_and_cracked():
    """700 tokens that expert 0 wins by a hair, 300 that experts 1, 2 and 3 win by far."""
    probabilities_TE = torch.full((1000, 4), 0.001, dtype=torch.float64)
    probabilities_TE[:700] = torch.tensor([0.26, 0.2475, 0.2475, 0.245], dtype=torch.float64)
    for token in range(700, 1000):
        probabilities_TE[token, 1 + token % 3] = 0.997
    return route(probabilities_TE.log(), TOP_1)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_example_is_gerrymandered():
    routing = packed_and_cracked()
    report = load_report({"step": [routing.sums]}, top_k=1, wins=win_sums(routing))
    assert report.verdict == "gerrymandered"
    assert report.score == pytest.approx(0.83752, abs=1e-12)
    assert report.load_score == pytest.approx(2.08, abs=1e-12)  # 4 * (.49 + 3 * .01)
    assert report.gap == pytest.approx(2.08 - 0.83752, abs=1e-12)
    step = report.step
    assert step.max_over_mean == pytest.approx(2.8)
    assert step.coefficient_of_variation == pytest.approx(math.sqrt(1.08))
    assert step.entropy == pytest.approx(-(0.7 * math.log(0.7) + 0.3 * math.log(0.1)) / math.log(4))
    assert step.gini == pytest.approx(0.45)  # (3 * .6) / 4: sum of all differences over 2 * E * the sum
    assert step.dead_experts == 0
    assert "0.838" in report.reason
    assert "2.080" in report.reason


def test_the_wins_of_the_example_by_hand():
    wins = win_sums(packed_and_cracked())
    assert wins.won_E.tolist() == [700, 100, 100, 100]
    close(wins.won_probability_sums_E, [182.0, 99.7, 99.7, 99.7])
    close(wins.probability_sums_E, [182.3, 273.15, 273.15, 271.4])
    close(wins.margin_sums_E, [8.75, 99.6, 99.6, 99.6])  # 700 * (.26 - .2475), 100 * (.997 - .001)
    assert wins.narrow_E.tolist() == [700, 0, 0, 0]  # .0125 is 4.8 % of .26
    close(wins.packing_E, [0.26, 0.997, 0.997, 0.997])
    close(wins.cracking_E, [0.3 / 182.3, 173.45 / 273.15, 173.45 / 273.15, 171.7 / 271.4])
    close(wins.margin_E, [0.0125, 0.996, 0.996, 0.996])
    assert wins.wasted == pytest.approx(1 - 481.1 / 1000)
    assert wins.margin == pytest.approx(0.30755)
    assert wins.narrow_share == pytest.approx(0.7)
    assert win_sums(packed_and_cracked(), narrow=0.04).narrow_E.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("counts", "probability_sums", "verdict"),
    [
        ([250, 250, 250, 250], None, "even"),
        ([270, 240, 250, 240], None, "even"),
        ([1000, 0, 0, 0], None, "uneven, and the score shows it"),
        # 1 + CV^2 = 2.08; the score shows 11 % of 1.08, then 9 %, then less than nothing.
        ([700, 100, 100, 100], [299.5, 233.5, 233.5, 233.5], "uneven, and the score shows it"),
        ([700, 100, 100, 100], [290.5, 236.5, 236.5, 236.5], "gerrymandered"),
        ([700, 100, 100, 100], [250.0, 250.0, 250.0, 250.0], "gerrymandered"),
        ([700, 100, 100, 100], [100.0, 300.0, 300.0, 300.0], "gerrymandered"),
        ([0, 0, 0, 0], None, "unknown"),
        ([250, 250, 250, 250], [math.nan, 1.0, 1.0, 1.0], "unknown"),
    ],
)
def test_verdicts(counts, probability_sums, verdict):
    report = load_report({"step": [sums(counts, probability_sums)]}, top_k=1)
    assert report.verdict == verdict
    assert report.verdict in VERDICTS
    assert report.verdict in str(report)


def test_noise_of_a_small_batch_is_not_unevenness():
    # CV^2 = .04: below .02 + 3 / 100, above .02 + 3 / 10000.
    assert load_report({"step": [sums([30, 30, 20, 20])]}, top_k=1).verdict == "even"
    assert load_report({"step": [sums([3000, 3000, 2000, 2000])]}, top_k=1).verdict != "even"


def test_all_on_one_expert():
    step = load_report({"step": [sums([1000, 0, 0, 0])]}, top_k=1).step
    assert (step.max_over_mean, step.load_score, step.score) == (4.0, 4.0, 4.0)
    assert (step.entropy, step.dead_experts) == (0.0, 3.0)
    assert step.gini == pytest.approx(0.75)


def test_even_load_has_the_numbers_of_an_even_load_for_every_k():
    for top_k in (1, 2, 3, 4):
        step = load_report({"step": [sums([300] * 4, [300 / top_k] * 4, top_k=top_k)]}, top_k=top_k).step
        assert (step.max_over_mean, step.coefficient_of_variation, step.dead_experts) == (1.0, 0.0, 0.0)
        assert step.gini == pytest.approx(0, abs=1e-12)
        assert (step.score, step.entropy) == (pytest.approx(1.0), pytest.approx(1.0))


def test_scopes_are_means_over_units_that_hold_tokens():
    units = [sums([400, 0, 0, 0]), sums([0, 200, 0, 0]), sums([0, 0, 0, 0])]
    report = load_report({"micro_batch": units, "step": [units[0] + units[1] + units[2]]}, top_k=1)
    micro_batch, step = report.scopes
    assert (micro_batch.name, micro_batch.num_units, micro_batch.num_tokens) == ("micro_batch", 2, 600)
    assert (micro_batch.load_score, micro_batch.score, micro_batch.dead_experts) == (4.0, 4.0, 3.0)
    assert step.load_score == pytest.approx(4 * (4 / 9 + 1 / 9))
    assert report.optimized_scope == "micro_batch"
    assert report.score == 4.0
    assert load_report(
        {"micro_batch": units, "step": [units[0] + units[1]]}, top_k=1, optimized_scope="step"
    ).score == pytest.approx(step.score)


def test_shuffled_and_specialised_loads_differ_though_both_are_even_in_the_whole():
    even = sums([100, 100, 100, 100])
    left, right = sums([200, 200, 0, 0]), sums([0, 0, 200, 200])
    shuffled = load_report({"sequence": [even, even]}, top_k=1, sums_by_domain={"c": even, "python": even})
    assert (shuffled.verdict, shuffled.specialisation) == ("shuffled", 0.0)
    special = load_report({"sequence": [left, right]}, top_k=1, sums_by_domain={"c": left, "python": right})
    assert (special.verdict, special.specialisation) == ("even", 0.5)
    assert [one.distance for one in special.domains] == [0.5, 0.5]
    assert special.score == 2.0  # the price that a small scope puts on specialisation
    assert special.gap == -1.0
    # Units that mix domains are even though the experts do tell the domains apart.
    mixed = load_report({"sequence": [even, even]}, top_k=1, sums_by_domain={"c": left, "python": right})
    assert mixed.verdict == "even"
    # Units are uneven, domains alike: specialised by something else.
    other = load_report({"sequence": [left, right]}, top_k=1, sums_by_domain={"c": even, "python": even})
    assert other.verdict == "even"
    # The noise of a unit of 20 tokens is (E - 1) / 20, and 1 + CV^2 = 1.08 is within it.
    small = [sums([7, 5, 5, 3]), sums([5, 7, 3, 5]), sums([5, 3, 7, 5]), sums([3, 5, 5, 7])] * 20
    noisy = load_report({"sequence": small}, top_k=1, sums_by_domain={"c": even, "python": even})
    assert noisy.verdict == "shuffled"
    # Even inside each unit, but not told apart by domain because none is given; or one unit only.
    assert load_report({"sequence": [even, even]}, top_k=1).verdict == "even"
    assert load_report({"step": [even]}, top_k=1, sums_by_domain={"c": even, "python": even}).verdict == "even"


def test_the_verdict_is_on_the_score_of_the_optimized_scope():
    units = [sums([400, 0, 0, 0], [130, 90, 90, 90]), sums([0, 50, 25, 25])]
    scopes = {"micro_batch": units, "step": [units[0] + units[1]]}
    # 1 + CV^2 = 2.62 for both. Micro-batches: (1.3 + 1.5) / 2. Step: P = (.26, .28, .23, .23), so 1.036.
    inside = load_report(scopes, top_k=1, optimized_scope="micro_batch")
    assert (inside.score, inside.verdict) == (pytest.approx(1.4), "uneven, and the score shows it")
    whole = load_report(scopes, top_k=1, optimized_scope="step")
    assert (whole.score, whole.verdict) == (pytest.approx(1.036), "gerrymandered")


def test_the_example_of_the_page_prints_what_the_page_says(capsys):
    page = Path(__file__).parents[2] / "packages" / "routing" / "docs" / "gerrymandering.md"
    text = page.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    output = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0]
    exec(compile(example, str(page), "exec"), {})
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


def test_text_shows_every_scope_domain_and_expert():
    routing = packed_and_cracked()
    first, second = split_sums(routing, (torch.arange(1000) >= 700).long(), 2)
    report = load_report(
        {"micro_batch": [first, second], "step": [routing.sums]},
        top_k=1,
        wins=win_sums(routing),
        sums_by_domain={"python": first, "licence": second},
        optimized_scope="step",
    )
    rows = {line.split()[0]: line.split()[1:] for line in str(report).splitlines() if line.strip()}
    assert rows["step"] == ["1", "1000", "2.80", "1.039", "0.678", "0.450", "0.0", "0.838", "2.080"]
    assert rows["python"] == ["1", "700", "4.00", "1.732", "0.000", "0.750", "3.0", "1.040", "4.000", "0.300"]
    assert rows["licence"][-1] == "0.700"
    assert rows["0"] == ["0.7000", "0.1823", "0.2600", "0.0016", "0.0125", "700"]
    many = WinSums(*(torch.ones(40, dtype=dtype) for dtype in (torch.int64, *[torch.float64] * 3, torch.int64)), 0.1)
    text = str(load_report({"step": [sums([1] * 40)]}, top_k=1, wins=many))
    assert "the 16 busiest of 40 experts" in text


def test_wins_of_top_2_have_their_margin_to_the_best_expert_left_out():
    logits_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    wins = win_sums(route(logits_TE, TOP_2))
    assert wins.won_E.tolist() == [1, 1, 1, 1]
    close(wins.margin_sums_E, [0.2, 0.1, 0.1, 0.2])
    close(wins.won_probability_sums_E, [0.4, 0.3, 0.3, 0.4])
    close(wins.probability_sums_E, [0.5, 0.5, 0.5, 0.5])


def test_wins_of_sigmoid_scores_use_their_shares():
    config = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False, score_function="sigmoid")
    scores_TE = torch.tensor([[0.8, 0.6, 0.4, 0.2]], dtype=torch.float64)
    wins = win_sums(route(scores_TE.logit(), config))
    close(wins.probability_sums_E, [0.4, 0.3, 0.2, 0.1])
    close(wins.margin_sums_E, [0.1, 0, 0, 0])


def test_a_bias_can_make_a_margin_negative_and_all_experts_chosen_leaves_the_probability():
    logits_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    biased = RouterConfig(d_model=1, num_experts=4, top_k=1, renormalize=False, selection_bias=True)
    wins = win_sums(route(logits_TE, biased, selection_bias_E=torch.tensor([0.0, 0.0, 0.0, 1.0])))
    assert wins.won_E.tolist() == [0, 0, 0, 1]
    close(wins.margin_sums_E, [0, 0, 0, -0.3])
    assert wins.narrow_E.tolist() == [0, 0, 0, 1]
    everything = RouterConfig(d_model=1, num_experts=4, top_k=4)
    close(win_sums(route(logits_TE, everything)).margin_sums_E, [0.4, 0.3, 0.2, 0.1])


def test_wins_add_up_carry_no_graph_and_leave_masked_tokens_out(make_logits):
    logits_TE = make_logits(60, 4)
    is_real_T = torch.arange(60) % 3 != 0
    whole = win_sums(route(logits_TE, TOP_2, is_real_T=is_real_T))
    parts = win_sums(route(logits_TE[:25], TOP_2, is_real_T=is_real_T[:25])) + win_sums(
        route(logits_TE[25:], TOP_2, is_real_T=is_real_T[25:])
    )
    real_only = win_sums(route(logits_TE[is_real_T], TOP_2))
    assert whole.won_E.sum() == 80
    for other in (parts, real_only):
        assert torch.equal(whole.won_E, other.won_E)
        assert torch.equal(whole.narrow_E, other.narrow_E)
        for name in ("won_probability_sums_E", "probability_sums_E", "margin_sums_E"):
            torch.testing.assert_close(getattr(whole, name), getattr(other, name), rtol=1e-12, atol=1e-12)
            assert not getattr(whole, name).requires_grad
    assert whole.won_E.dtype == whole.narrow_E.dtype == torch.int64
    assert whole.margin_sums_E.dtype == torch.float64


def test_an_expert_that_won_nothing_has_no_packing_and_a_mask_of_all_gives_zeros():
    wins = win_sums(route(torch.zeros(3, 4), TOP_1))
    assert wins.packing_E.isnan().tolist() == [False, True, True, True]
    assert wins.cracking_E.tolist() == [0.0, 1.0, 1.0, 1.0]
    nothing = win_sums(route(torch.zeros(3, 4), TOP_1, is_real_T=torch.zeros(3, dtype=torch.bool)))
    assert nothing.won_E.tolist() == [0, 0, 0, 0]
    assert (nothing.wasted, nothing.margin, nothing.narrow_share) == (1.0, 0.0, 0.0)


def test_split_sums_are_the_sums_of_parts_routed_alone(make_logits):
    logits_TE = make_logits(40, 4)
    is_real_T = torch.arange(40) % 4 != 1
    part_T = torch.arange(40) % 3
    config = RouterConfig(d_model=1, num_experts=4, top_k=2, capacity_factor=1.0)
    routing = route(logits_TE, config, is_real_T=is_real_T)
    parts = split_sums(routing, part_T, 4)
    for part in range(3):
        inside = part_T == part
        alone = route(logits_TE[inside], TOP_2, is_real_T=is_real_T[inside]).sums
        assert torch.equal(parts[part].counts_E, alone.counts_E)
        assert torch.equal(parts[part].num_tokens, alone.num_tokens)
        torch.testing.assert_close(
            parts[part].probability_sums_E, alone.probability_sums_E.detach(), rtol=1e-12, atol=1e-12
        )
        assert parts[part].z_sum.isnan()
        assert not parts[part].probability_sums_E.requires_grad
    assert parts[3].num_tokens == parts[3].counts_E.sum() == 0
    total = parts[0] + parts[1] + parts[2]
    assert total.num_dropped == routing.sums.num_dropped > 0
    assert torch.equal(total.counts_E, routing.sums.counts_E)


def test_split_sums_count_a_real_token_that_no_expert_chose():
    config = RouterConfig(d_model=1, num_experts=2, top_k=1, renormalize=False, selection="expert_choice")
    logits_TE = torch.tensor([[2.0, 2.0], [1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    routing = route(logits_TE, config, is_real_T=torch.tensor([True, True, True, False]))
    unchosen = int((routing.chosen_TK[:3] < 0).all(1).sum())
    (everything,) = split_sums(routing, torch.zeros(4, dtype=torch.int64), 1)
    assert (unchosen, everything.num_tokens) == (2, 3)


def test_split_sums_count_a_nan_row_as_bad_and_real():
    logits_TE = torch.zeros(4, 4)
    logits_TE[2, 1] = math.nan
    first, second = split_sums(route(logits_TE, TOP_1), torch.tensor([0, 0, 1, 1]), 2)
    assert (first.num_bad, second.num_bad) == (0, 1)
    assert (first.num_tokens, second.num_tokens) == (2, 2)


def test_refusals():
    one = sums([1, 2, 3, 4])
    wins = win_sums(route(torch.zeros(3, 4), TOP_1))
    with pytest.raises(ValueError, match="no scope"):
        load_report({}, top_k=1)
    with pytest.raises(ValueError, match="no units: sequence"):
        load_report({"step": [one], "sequence": []}, top_k=1)
    with pytest.raises(ValueError, match=r"optimized_scope \('epoch'\) must be one of: step"):
        load_report({"step": [one]}, top_k=1, optimized_scope="epoch")
    with pytest.raises(ValueError, match=r"step has 10 choices and sequence 20"):
        load_report({"step": [one], "sequence": [one, one]}, top_k=1)
    with pytest.raises(ValueError, match=r"numbers of experts \[3, 4\]"):
        load_report({"step": [one]}, top_k=1, sums_by_domain={"c": sums([1, 2, 3])})
    with pytest.raises(ValueError, match="narrow"):
        win_sums(route(torch.zeros(3, 4), TOP_1), narrow=1.5)
    with pytest.raises(ValueError, match=r"narrow: 0.2"):
        wins + win_sums(route(torch.zeros(3, 4), TOP_1), narrow=0.2)
    with pytest.raises(ValueError, match="part_T must be int64"):
        split_sums(route(torch.zeros(3, 4), TOP_1), torch.zeros(3), 1)
