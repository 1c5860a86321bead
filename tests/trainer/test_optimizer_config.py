"""The [optimizer] table: what it says to coterie-parallel, and its faults."""

from pathlib import Path

import pytest
from coterie_parallel import AdamWConfig, MuonConfig, OutlierConfig, ReductionConfig
from coterie_trainer.config import config_from_dict, config_problems, config_to_dict, load_config
from coterie_trainer.verify.layout import parse_layout
from coterie_trainer.verify.scaling import scaled

from trainer.test_config import CONFIGS


def test_every_setting_arrives() -> None:
    overrides = [
        'optimizer.weight_decays=[["embed.*", 0.0], ["*norm.weight", 0.5]]',
        'optimizer.learning_rate_factors=[["*.router.weight", 2]]',
        "optimizer.moments_dtype=bfloat16",
        "optimizer.muon=true",
        "optimizer.muon_scale=spectral",
        "optimizer.skip_outliers=true",
        "optimizer.gradient_dtype=bfloat16",
        "optimizer.gradient_sharding=true",
        "optimizer.gradient_overlap=false",
        "optimizer.gradient_clip=none",
    ]
    config = load_config(CONFIGS / "demo.toml", overrides)
    assert config_problems(config, 2) == []
    assert config.optimizer.to_adamw() == AdamWConfig(
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        weight_decays=(("embed.*", 0.0), ("*norm.weight", 0.5)),
        learning_rate_factors=(("*.router.weight", 2.0),),
        gradient_clip=None,
        moments_dtype="bfloat16",
        muon=MuonConfig(scale="spectral"),
        outliers=OutlierConfig(),
        reduction=ReductionConfig(send_dtype="bfloat16", sharded=True, overlap=False),
    )
    assert config_from_dict(config_to_dict(config)) == config
    assert load_config(CONFIGS / "demo.toml").optimizer.to_adamw() == AdamWConfig()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.weight_decays=[['*',-1.0]]", "optimizer: weight_decays: value (-1.0) of '*' must be at least 0"),
        (
            "optimizer.weight_decays=[['embed.weight',0],['embd.*',0]]",
            "optimizer: weight_decays: 'embd.*' matches the whole name of no parameter",
        ),
        (
            "optimizer.learning_rate_factors=[['layers.99.*',2]]",
            "optimizer: learning_rate_factors: 'layers.99.*' matches the whole name of no parameter",
        ),
        ("optimizer.weight_decays=[['a']]", "optimizer.weight_decays must be a list of values, each a list of 2"),
        ("optimizer.moments_dtype=bfloat16 optimizer.betas=[0.9,0.999]", "optimizer: betas ((0.9, 0.999)) must be at"),
        ("optimizer.eps=0", "optimizer: eps (0.0) must be above 0"),
    ],
)
def test_a_fault_is_reported_once(override: str, problem: str) -> None:
    try:
        found = config_problems(load_config(CONFIGS / "demo.toml", override.split()), 2)
    except ValueError as error:
        found = str(error).splitlines()[1:]
    assert len(found) == 1
    assert problem in found[0]


def test_a_model_scaled_down_keeps_the_patterns_that_match_something(tmp_path: Path) -> None:
    overrides = [
        "model.num_layers=9",
        'optimizer.weight_decays=[["layers.8.*", 0.0], ["layers.1.*", 0.5], ["*.router.weight", 0.25]]',
        'optimizer.learning_rate_factors=[["layers.7.*", 2], ["embed.*", 3]]',
    ]
    layout, faults = parse_layout("data=2")
    assert layout is not None, faults
    small = scaled(load_config(CONFIGS / "demo.toml", overrides), tmp_path, [layout])
    assert small.optimizer.weight_decays == (("layers.1.*", 0.5), ("*.router.weight", 0.25))
    assert small.optimizer.learning_rate_factors == (("embed.*", 3.0),)
    assert config_problems(small, 1) == []
