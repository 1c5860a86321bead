import dataclasses

import coterie_routing
import pytest
import torch
from coterie_routing import Assignment, BiasRule, CausalityWarning, Router, RouterConfig, route

EXPERT_CHOICE = {"selection": "expert_choice", "renormalize": False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 4},
        {"num_experts": 1, "top_k": 1, "renormalize": False},
        {"score_function": "softmax_of_chosen"},
        {"num_groups": 4, "chosen_groups": 2},  # groups of one expert
        {"num_groups": 2, "chosen_groups": 1},
        {"top_k": 1, **EXPERT_CHOICE},
        {"top_k": 1, "renormalize": False, "capacity_factor": 0.01},
        {"trained_top_k": 8},  # more than there are experts now: the model was cut down
        {"jitter": 0.0, "assignment": Assignment(kind="hot", hot_share=0.5)},
        {"top_k": 4, "assignment": Assignment(kind="hot", hot_share=0.25)},
    ],
    ids=str,
)
def test_a_good_config_has_no_problems(options):
    assert RouterConfig(**{"d_model": 8, "num_experts": 4, "top_k": 2} | options).problems() == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"d_model": 0}, "d_model (0) must be at least 1"),
        ({"num_experts": 0}, "num_experts (0) must be at least 1"),
        ({"top_k": 5}, "top_k (5) must be from 1 to num_experts (4); nearest: 4"),
        ({"top_k": 0}, "top_k (0) must be from 1 to num_experts (4); nearest: 1"),
        ({"top_k": -3}, "top_k (-3) must be from 1 to num_experts (4); nearest: 1"),
        ({"top_k": 1}, "the router gets no gradient; set renormalize to false, or top_k to 2 or more"),
        (
            {"top_k": 1, "renormalize": False, "score_function": "softmax_of_chosen"},
            'no gradient; set score_function to "softmax" with renormalize = false, or top_k to 2 or more',
        ),
        (
            {"top_k": 1, "score_function": "softmax_of_chosen"},
            'no gradient; set score_function to "softmax" with renormalize = false, or top_k to 2 or more',
        ),
        (
            {"score_function": "sofmax"},
            "score_function ('sofmax') must be one of: softmax, sigmoid, softmax_of_chosen",
        ),
        ({"selection": "topk"}, "selection ('topk') must be one of: top_k, expert_choice"),
        ({"backend": "cuda"}, "backend ('cuda') must be one of: auto, reference, triton"),
        ({"route_scale": 0.0}, "route_scale (0.0) must be a finite number above 0; 1.0 changes nothing"),
        ({"route_scale": float("nan")}, "route_scale (nan) must be a finite number above 0"),
        ({"route_scale": float("inf")}, "route_scale (inf) must be a finite number above 0"),
        ({"trained_top_k": 0}, "trained_top_k (0) must be at least 1, or None; the same K: 2"),
        ({"num_groups": 3}, "num_groups (3) must divide num_experts (4) into equal groups; nearest: 2"),
        ({"num_groups": 9}, "num_groups (9) must divide num_experts (4) into equal groups; nearest: 4"),
        ({"num_groups": 0}, "num_groups (0) must divide num_experts (4) into equal groups; nearest: 1"),
        ({"num_groups": 2, "chosen_groups": 3}, "chosen_groups (3) must be from 1 to num_groups (2); nearest: 2"),
        ({"num_groups": 2, "chosen_groups": 0}, "chosen_groups (0) must be from 1 to num_groups (2); nearest: 1"),
        (
            {"num_groups": 4, "chosen_groups": 1},
            "top_k (2) is more than a token can reach: chosen_groups (1) x 1 experts a group = 1; "
            "set chosen_groups to 2 or more",
        ),
        (
            {"num_experts": 8, "top_k": 5, "num_groups": 4, "chosen_groups": 2},
            "top_k (5) is more than a token can reach: chosen_groups (2) x 2 experts a group = 4; "
            "set chosen_groups to 3 or more",
        ),
        ({"capacity_factor": 0.0}, "capacity_factor (0.0) must be a finite number above 0, or None; usual: 1.25"),
        ({"capacity_factor": float("nan")}, "capacity_factor (nan) must be a finite number above 0"),
        ({"capacity_factor": float("inf")}, "capacity_factor (inf) must be a finite number above 0"),
        ({"jitter": 1.0}, "jitter (1.0) must be from 0 to below 1; usual: 0.01"),
        ({"jitter": -0.1}, "jitter (-0.1) must be from 0 to below 1"),
        ({"jitter": float("nan")}, "jitter (nan) must be from 0 to below 1"),
        (
            {"assignment": Assignment(kind="unifrom")},
            "assignment kind ('unifrom') must be one of: uniform, random, zipf, hot",
        ),
        (
            {"assignment": Assignment(kind="zipf", exponent=-1.0)},
            "assignment exponent (-1.0) must be a finite number of at least 0; usual: 1.0",
        ),
        (
            {"assignment": Assignment(kind="zipf", exponent=float("inf"))},
            "assignment exponent (inf) must be a finite number of at least 0",
        ),
        (
            {"assignment": Assignment(kind="hot", hot_share=0.51)},
            "assignment hot_share (0.51) must be from 0 to 1 / top_k (0.5), as a token chooses an expert at most once",
        ),
        (
            {"assignment": Assignment(kind="hot", hot_share=float("nan"))},
            "assignment hot_share (nan) must be from 0 to 1 / top_k (0.5)",
        ),
        (
            {"top_k": 4, "assignment": Assignment(kind="hot", hot_share=0.1)},
            "assignment hot_share (0.1) must be 1 / top_k (0.25) when top_k (4) takes all experts",
        ),
        (
            {"selection": "expert_choice"},
            'renormalize (true) does not fit selection ("expert_choice"), where a token has no fixed number of '
            "experts; set it to false",
        ),
        (
            {**EXPERT_CHOICE, "score_function": "softmax_of_chosen"},
            'score_function ("softmax_of_chosen") does not fit selection ("expert_choice"); use "softmax"',
        ),
        (EXPERT_CHOICE | {"trained_top_k": 4}, 'trained_top_k does not fit selection ("expert_choice")'),
        (EXPERT_CHOICE | {"num_groups": 2}, 'num_groups does not fit selection ("expert_choice")'),
        (EXPERT_CHOICE | {"selection_bias": True}, 'selection_bias does not fit selection ("expert_choice")'),
        (EXPERT_CHOICE | {"capacity_factor": 1.0}, 'capacity_factor does not fit selection ("expert_choice")'),
        (
            EXPERT_CHOICE | {"assignment": Assignment(kind="uniform")},
            'assignment does not fit selection ("expert_choice"), where the load is even by construction; leave it out',
        ),
    ],
    ids=str,
)
def test_one_fault_gives_one_sentence_with_numbers(change, text):
    config = RouterConfig(**{"d_model": 8, "num_experts": 4, "top_k": 2} | change)
    assert len(config.problems()) == 1
    assert text in config.problems()[0]


def test_router_and_route_list_all_faults_at_once(make_logits):
    config = RouterConfig(
        d_model=0, num_experts=4, top_k=9, score_function="relu", route_scale=-1.0, backend="gpu", jitter=2.0
    )
    assert len(config.problems()) == 6
    for build in (lambda: Router(config), lambda: route(make_logits(3, 4), config)):
        with pytest.raises(ValueError, match="d_model") as error:
            build()
        assert str(error.value).split("\n") == config.problems()


def test_a_sentence_with_what_would_work_holds_when_it_is_followed():
    """Each "nearest" and "set ... to" of the groups is a value with which the config is good."""
    bad = RouterConfig(d_model=8, num_experts=12, top_k=7, num_groups=5)
    assert "nearest: 4" in bad.problems()[0]
    groups = dataclasses.replace(bad, num_groups=4)
    assert "set chosen_groups to 3 or more" in groups.problems()[0]
    assert dataclasses.replace(groups, chosen_groups=3).problems() == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (BiasRule(kind="signed"), "bias rule ('signed') must be one of: sign, proportional, quantile"),
        (BiasRule(kind="sign", rate=0.0), "bias rate (0.0) must be a finite number above 0, or None; usual: 0.001"),
        (BiasRule(kind="sign", rate=float("nan")), "bias rate (nan) must be a finite number above 0"),
        (BiasRule(kind="sign", rate=float("inf")), "bias rate (inf) must be a finite number above 0"),
        (
            BiasRule(kind="quantile", rate=1.5),
            "bias rate (1.5) must be at most 1 with the rule quantile; 1.0 forgets the old bias",
        ),
    ],
    ids=str,
)
def test_one_fault_of_a_bias_rule_gives_one_sentence(rule, text):
    assert len(rule.problems()) == 1
    assert text in rule.problems()[0]


def test_a_triton_router_that_cannot_run_says_why_and_does_not_fall_back():
    router = Router(RouterConfig(d_model=8, num_experts=4, top_k=2, backend="triton"))
    with pytest.raises(
        ValueError, match=r'backend "triton" cannot run this router: .+; "auto" would take the reference'
    ):
        router(torch.zeros(3, 8))


@pytest.mark.parametrize(
    ("dtype", "num_experts", "reason", "is_fused"),
    [
        (torch.bfloat16, 4, None, True),
        (torch.bfloat16, 256, None, True),
        (torch.bfloat16, 257, None, False),
        (torch.float32, 4, None, False),
        (torch.bfloat16, 4, "there is no GPU", False),
    ],
)
def test_auto_takes_the_kernel_where_it_runs_and_was_faster(monkeypatch, dtype, num_experts, reason, is_fused):
    def kernel(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(coterie_routing.router, "reason_against", lambda *_: reason)
    monkeypatch.setattr(coterie_routing.router, "fused_route", kernel)
    x_TD = torch.zeros(3, 8, dtype=dtype)
    for backend, takes in (("auto", is_fused), ("reference", False)):
        router = Router(RouterConfig(d_model=8, num_experts=num_experts, top_k=2, backend=backend))
        if takes:
            with pytest.raises(InterruptedError):
                router(x_TD)
        else:
            assert router(x_TD).ids_TK.shape == (3, 2)


def test_public_names_are_there_once_and_in_dir():
    names = coterie_routing.__all__
    assert sorted(names) == sorted(set(names)) == dir(coterie_routing)
    missing = [name for name in names if not hasattr(coterie_routing, name)]
    assert missing == []


def test_wrong_types_are_one_report():
    config = RouterConfig(d_model="a", num_experts=8, top_k=2.0, renormalize="no", assignment="zipf")
    assert config.problems() == [
        "d_model must be int, not 'a'",
        "top_k must be int, not 2.0",
        "renormalize must be bool, not 'no'",
        "assignment must be Assignment or NoneType, not 'zipf'",
    ]


def test_a_capacity_warns_that_it_is_not_causal():
    with pytest.warns(CausalityWarning, match="a capacity looks at all tokens"):
        Router(RouterConfig(d_model=8, num_experts=4, top_k=2, capacity_factor=1.0))
