"""The settings of DeepEP, from the file of a run to the calls of the package, over the stand-in for it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_parallel import DeepEPOptions, DispatchOptions, Mesh, make_plan
from coterie_parallel.dispatch.deep_ep import DeepEPDispatcher
from coterie_trainer.check import report
from coterie_trainer.config import ConfigError, config_from_dict, config_problems, config_to_dict, load_config
from coterie_trainer.launch import StopRequest
from coterie_trainer.model import build_model
from coterie_trainer.training import Run
from coterie_trainer.verify.layout import layout_config, parse_layout
from parallel.fake_deep_ep import make_fake
from support.ranks import run_ranks

from trainer.specs import SPECS
from trainer.tiny import write_tokens

RUN = """
run_folder = "{folder}"
dtype = "bfloat16"
[model]
num_layers = 2
d_model = 256
num_heads = 4
num_kv_heads = 2
num_experts = 8
top_k = 2
expert_hidden = 8
expert_backend = "reference"
[data]
path = "{tokens}"
sequence_length = 16
[train]
steps = 2
sequences_per_step = 8
sequences_per_micro_batch = 2
[optimizer]
learning_rate = 0.01
[log]
tensorboard = false
[parallel]
data = 2
expert = 2
"""
DEEP_EP = """
dispatcher = "deep_ep"
[parallel.deep_ep]
surface = "ElasticBuffer"
max_tokens = 40
payload = "fp8"
deterministic = true
hybrid = false
num_sms = 8
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in of a version with both ElasticBuffer and Buffer."""
    module = make_fake("2.1.0")
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    return module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path / "run", tokens=tmp_path / "tokens") + DEEP_EP)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, 2)
    return caught.value.problems


@pytest.mark.usefixtures("module")
def test_the_table_is_read_kept_and_shown(path: Path) -> None:
    config = load_config(path, world=2)
    expected = DeepEPOptions(
        surface="ElasticBuffer", max_tokens=40, payload="fp8", deterministic=True, hybrid=False, num_sms=8
    )
    assert config.parallel.deep_ep == expected
    assert config.parallel.dispatch_options() == DispatchOptions(deep_ep=expected)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config))), world=2) == config
    shown = (
        'DeepEP: surface = "ElasticBuffer", max_tokens = 40, payload = "fp8", deterministic = true, hybrid = false, '
        "num_sms = 8\n"
    )
    assert shown in report(config, 2)
    default = load_config(path, ["parallel.deep_ep=none"], 2)
    assert default.parallel.deep_ep is None
    assert 'DeepEP: surface = "auto", max_tokens = "none", payload = "bf16", dete' in report(default, 2)
    # One key makes a table of what was none.
    assert load_config(path, ["parallel.deep_ep=none", "parallel.deep_ep.num_sms=4"], 2).parallel.deep_ep == (
        DeepEPOptions(num_sms=4)
    )


@pytest.mark.usefixtures("module")
def test_every_fault_is_in_one_report(path: Path) -> None:
    table = "parallel.deep_ep"
    found = problems_of(
        path,
        f"{table}.max_tokens=0",
        f"{table}.num_sms=7",
        f"{table}.payload=int8",
        f"{table}.surfaces=Buffer",
        "dtype=float32",
        "device=cpu",
        "model.d_model=264",
        "parallel.overflow=drop",
        "parallel.expert=3",
    )
    assert found[:2] == [
        "unknown key parallel.deep_ep.surfaces; nearest: surface in [parallel.deep_ep]",
        'parallel.deep_ep.payload must be one of "bf16", "fp8", not "int8"',
    ]
    assert sorted(found[2:]) == [
        "parallel: deep_ep.max_tokens (0) must be at least 1; leave it out for the first batch's largest",
        "parallel: deep_ep.num_sms (7) must be even and at least 0; nearest: 6 or 8",
        "parallel: expert (3) must divide data (2), where world size (2), pipeline (1); nearest: 2",
        "parallel: num_experts (8) must be a multiple of the expert degree (3); nearest: 6 or 9",
        'parallel: overflow ("drop") does not exist with dispatcher "deep_ep", whose rows always fit; leave it out',
    ]
    # Where the file as a whole can not be read, the tables that can be are judged, each once.
    assert problems_of(path, "train.steps=ten", f"{table}.num_sms=7") == [
        'train.steps must be a whole number, not "ten"',
        "parallel: deep_ep.num_sms (7) must be even and at least 0; nearest: 6 or 8",
    ]
    assert problems_of(path, "dtype=float32", "device=cpu", "model.d_model=264", f"{table}.max_tokens=31") == [
        'parallel: dispatcher ("deep_ep"): device is "cpu", and DeepEP moves rows between GPUs only: use dispatcher '
        '"all_to_all" on cpu',
        'parallel: dispatcher ("deep_ep"): dtype ("float32") must be "bfloat16" with DeepEP',
        'parallel: dispatcher ("deep_ep"): model.d_model (264) must be a multiple of 256 with DeepEP; nearest: 256 or '
        "512",
        "parallel: deep_ep.max_tokens (31) must be at least 32, the tokens of a micro-batch = "
        "sequences_per_micro_batch (2) x sequence_length (16); or leave it out",
    ]


@pytest.mark.parametrize(
    ("version", "overrides", "expected"),
    [
        (
            "2.1.0",
            ["parallel.dispatcher=rowwise"],
            'parallel: deep_ep belongs to dispatcher "deep_ep" and does nothing with another; leave it out, or use '
            "that one",
        ),
        (
            "2.1.0",
            ["parallel.deep_ep.surface=EPBuffer"],
            "parallel: deep_ep.surface ('EPBuffer') is not in the installed deep_ep 2.1.0; it has ElasticBuffer, "
            'Buffer; "auto" takes ElasticBuffer',
        ),
        ("2.0.0", [], "parallel: deep_ep.deterministic (True) needs DeepEP 2.1 or newer; leave it out"),
        (
            "2.1.0",
            ["parallel.deep_ep.surface=Buffer", "parallel.deep_ep.deterministic=false"],
            "parallel: deep_ep.num_sms (8) is no argument of Buffer of DeepEP V1; leave it out",
        ),
        (
            "2.1.0",
            ["parallel.deep_ep.deterministic=false", 'train.recompute=["block"]'],
            'train: recompute ("block") sends rows a second time, and dispatcher "deep_ep" brings them in another '
            'order then; set parallel.deep_ep.deterministic = true, or recompute "attention" and "experts" only',
        ),
        ("2.1.0", ["parallel.deep_ep=3"], 'parallel.deep_ep must be a table, or "none", not 3'),
    ],
)
def test_one_fault_gives_one_entry(
    version: str, overrides: list[str], expected: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake(version))
    assert problems_of(path, *overrides) == [expected]


@pytest.mark.usefixtures("module")
def test_rows_in_any_order_are_not_sent_twice(path: Path) -> None:
    for names in ('["block"]', '["dispatch"]', '["experts", "attention"]'):
        assert config_problems(load_config(path, [f"train.recompute={names}"], 2), 2) == []
    load_config(path, ["parallel.deep_ep.deterministic=false", 'train.recompute=["experts", "attention"]'], 2)
    with pytest.raises(ValueError, match=r'recompute \("dispatch"\) sends rows a second time'):
        build_model(SPECS["post_norm"], dispatcher="deep_ep", recompute=["dispatch"])


@pytest.mark.usefixtures("module")
def test_a_layout_with_another_dispatcher_leaves_the_settings_out(path: Path) -> None:
    config = load_config(path, world=2)
    layout, problems = parse_layout("data=2 expert=2 dispatcher=rowwise")
    assert layout is not None
    assert problems == []
    assert layout_config(layout, config).parallel.deep_ep is None
    assert parse_layout("data=2 deep_ep=none")[0] is None


def _losses(rank: int, world: int, path: str, version: str, overrides: list[str]) -> tuple[dict[str, Any], list[float]]:
    """Return what the package was asked for in a run, and the losses of its two steps and of the held-out text."""
    sys.modules["deep_ep"] = module = make_fake(version)
    DeepEPDispatcher.device_type = "cpu"
    config = load_config(path, overrides, world)
    plan = make_plan(config.parallel, world, num_experts=config.model.num_experts, top_k=config.model.top_k)
    with Mesh(plan, rank, timeout_s=30.0) as mesh:
        run = Run(config, mesh, torch.device("cpu"))
        run.loop(StopRequest())
        run.close()
    lines = (Path(config.run_folder) / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    records = [json.loads(line) for line in lines]
    return module.asked, [record["loss"] for record in records if "loss" in record]


def test_a_run_asks_the_package_for_what_its_file_says(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    text = RUN.format(folder=tmp_path / "run", tokens=tokens)
    (tmp_path / "deep_ep.toml").write_text(text + DEEP_EP)
    (tmp_path / "plain.toml").write_text(text)
    losses = {}
    for name, overrides in (("file", []), ("set", ["parallel.deep_ep.num_sms=12", "parallel.deep_ep.payload=bf16"])):
        arguments = [f"run_folder={tmp_path / name}", *overrides]
        ranks = run_ranks(_losses, 2, str(tmp_path / "deep_ep.toml"), "2.1.0", arguments)
        for asked, _ in ranks:
            assert asked["surface"] == "ElasticBuffer"
            assert (asked["max_tokens"], asked["hidden"], asked["num_topk"]) == (40, 256, 2)
            assert asked["deterministic"] is True
            assert asked["allow_hybrid_mode"] is False
            assert asked["num_sms"] == (12 if name == "set" else 8)
            assert asked["payload"] == (torch.bfloat16 if name == "set" else torch.float8_e4m3fn)
        losses[name] = ranks[0][1]
    plain = run_ranks(_losses, 2, str(tmp_path / "plain.toml"), "2.1.0", [f"run_folder={tmp_path / 'plain'}"])
    assert plain[0][0] == {}
    assert len(plain[0][1]) == 3
    # The means of 128 losses of bf16 logits; with FP8 the rows of the experts are off by up to 2^-4.
    assert losses["set"] == pytest.approx(plain[0][1], rel=2**-8)
    assert losses["file"] == pytest.approx(plain[0][1], rel=2**-6)
