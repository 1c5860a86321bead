import coterie_routing
import pytest
from coterie_routing import Router, RouterConfig, route


def test_a_good_config_has_no_problems():
    assert RouterConfig(d_model=8, num_experts=4, top_k=2).problems() == []
    assert RouterConfig(d_model=8, num_experts=4, top_k=4).problems() == []
    assert RouterConfig(d_model=8, num_experts=1, top_k=1, renormalize=False).problems() == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"d_model": 0}, "d_model (0) must be at least 1"),
        ({"num_experts": 0}, "num_experts (0) must be at least 1"),
        ({"top_k": 5}, "top_k (5) must be from 1 to num_experts (4); nearest: 4"),
        ({"top_k": 0}, "top_k (0) must be from 1 to num_experts (4); nearest: 1"),
        ({"top_k": 1}, "set renormalize to false, or top_k to 2 or more"),
        ({"score_function": "sofmax"}, "score_function ('sofmax') must be one of: softmax, sigmoid"),
        ({"route_scale": 0.0}, "route_scale (0.0) must be a finite number above 0"),
        ({"route_scale": float("nan")}, "route_scale (nan) must be a finite number above 0"),
    ],
)
def test_one_fault_gives_one_sentence_with_numbers(change, text):
    config = RouterConfig(**{"d_model": 8, "num_experts": 4, "top_k": 2} | change)
    assert len(config.problems()) == 1
    assert text in config.problems()[0]


def test_router_and_route_list_all_faults_at_once(make_logits):
    config = RouterConfig(d_model=0, num_experts=4, top_k=9, score_function="relu", route_scale=-1.0)
    assert len(config.problems()) == 4
    for build in (lambda: Router(config), lambda: route(make_logits(3, 4), config)):
        with pytest.raises(ValueError, match="d_model") as error:
            build()
        assert str(error.value).split("\n") == config.problems()


def test_r26_top_1_with_renormalisation_is_refused_and_the_reason_given():
    with pytest.raises(ValueError, match="router gets no gradient"):
        Router(RouterConfig(d_model=8, num_experts=4, top_k=1))


def test_public_names():
    assert sorted(coterie_routing.__all__) == dir(coterie_routing)
    assert dir(coterie_routing) == [
        "BALANCE_SCOPES",
        "LoadSums",
        "Router",
        "RouterConfig",
        "Routing",
        "SCORE_FUNCTIONS",
        "balance_loss",
        "balance_term",
        "load_imbalance",
        "pack",
        "route",
        "scoped_balance_term",
        "sequence_balance_term",
        "unpack",
        "z_loss",
        "z_term",
    ]
