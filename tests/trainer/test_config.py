import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
from coterie_parallel import ParallelConfig
from coterie_trainer.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    config_from_dict,
    config_problems,
    config_to_dict,
    experts_config,
    load_config,
    router_config,
    smallest_world,
)

CONFIGS = Path(__file__).parents[2] / "configs"

MINIMAL = """
run_folder = "runs/x"
[model]
num_layers = 2
d_model = 48
num_heads = 12
num_kv_heads = 4
num_experts = 64
top_k = 2
expert_hidden = 16
[data]
path = "tokens"
sequence_length = 32
[train]
steps = 10
sequences_per_step = 16
sequences_per_micro_batch = 2
[optimizer]
learning_rate = 0.001
[parallel]
data = 8
expert = 8
"""


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "minimal [x].toml"
    path.write_text(MINIMAL)
    return path


def problems_of(path, *overrides, world=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, world)
    for problem in caught.value.problems:
        assert f"- {problem}" in str(caught.value)
    assert str(path) in str(caught.value)
    return caught.value.problems


def test_what_is_left_out_has_its_default(minimal):
    assert load_config(minimal) == Config(
        run_folder="runs/x",
        seed=0,
        device="auto",
        dtype="float32",
        model=ModelConfig(
            num_layers=2,
            d_model=48,
            num_heads=12,
            num_kv_heads=4,
            head_dim=None,
            norm_placement="pre",
            norm_eps=1e-6,
            qk_norm=None,
            rope_theta=10000.0,
            num_dense_layers=0,
            dense_hidden=0,
            num_experts=64,
            top_k=2,
            expert_hidden=16,
            shared_hidden=0,
            score_function="softmax",
            renormalize=True,
            route_scale=1.0,
            selection_bias=False,
            num_groups=1,
            chosen_groups=1,
            tied_embeddings=False,
            init_std=0.02,
            expert_backend="auto",
        ),
        data=DataConfig(path="tokens", source="files", vocab_size=4096, sequence_length=32),
        train=TrainConfig(
            steps=10,
            sequences_per_step=16,
            sequences_per_micro_batch=2,
            balance_coefficient=0.01,
            balance_loss="dot_product",
            balance_scope="step",
            z_coefficient=0.001,
            bias_rule=None,
            bias_rate=None,
            assignment=None,
            assignment_exponent=1.0,
            assignment_hot_share=0.1,
            evaluate_every=0,
            evaluate_sequences=0,
        ),
        optimizer=OptimizerConfig(
            learning_rate=0.001,
            warmup_steps=0,
            schedule="cosine",
            decay_steps=0,
            final_fraction=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            gradient_clip=1.0,
        ),
        parallel=ParallelConfig(data=8, expert=8),
        checkpoint=CheckpointConfig(every=0, keep=1),
        log=LogConfig(every=1, tensorboard=True),
    )


def test_three_faults_give_three_entries_with_values_that_work(minimal):
    assert problems_of(minimal, "model.num_experts=63", "model.num_kv_heads=5", "model.top_k=100", world=8) == [
        "model: num_heads (12) must be a multiple of num_kv_heads (5); "
        "num_kv_heads that work with 12 heads: 1, 2, 3, 4, 6, 12",
        "model: top_k (100) must be from 1 to num_experts (63); nearest: 63",
        "parallel: num_experts (63) must be a multiple of the expert degree (8); nearest: 56 or 64",
    ]


def test_faults_of_every_kind_are_in_one_report(minimal):
    found = problems_of(
        minimal,
        "model.num_expert=8",
        "train.steps=ten",
        "log.every=many",
        "optimizer.eps=-1",
        "modle.x=1",
        "seed",
    )
    assert found == [
        "--set seed: write table.key=value, as in --set model.num_experts=16",
        "unknown table [modle]; nearest: [model]",
        "unknown key model.num_expert; nearest: num_experts in [model]",
        'train.steps must be a whole number, not "ten"',
        'log.every must be a whole number, not "many"',
        # train could not be read, so what depends on it is left out; each of the other tables is judged
        "optimizer: eps (-1.0) must be above 0",
    ]


# Each override breaks one rule. The report holds one entry, also where several packages know the rule.
ONE_FAULT = [
    ("model.num_layers=0", "model: num_layers (0) must be at least 1"),
    ("model.d_model=0", "model: d_model (0) must be at least 1"),
    ("model.d_model=36", "model: d_model (36) must be a multiple of 2 x num_heads (12) when head_dim is not given"),
    ("model.d_model=36", "nearest: 24 or 48"),
    ("model.head_dim=5", "model: head_dim (5) must be even and at least 2"),
    ("model.head_dim=5", "nearest: 4 or 6"),
    ("model.head_dim=0", "nearest: 2"),
    ("model.num_kv_heads=0", "model: num_kv_heads (0) must be at least 1"),
    ("model.num_experts=0", "model: num_experts (0) must be at least 1"),
    ("model.expert_hidden=0", "model: expert_hidden (0) must be at least 1"),
    ("model.top_k=0", "model: top_k (0) must be from 1 to num_experts (64)"),
    ("model.top_k=1", "model: top_k (1) with renormalize (true)"),
    ("model.route_scale=0", "model: route_scale (0.0)"),
    ("model.norm_eps=0", "model: norm_eps (0.0) must be above 0"),
    ("model.shared_hidden=-1", "model: shared_hidden (-1) must be at least 0"),
    ("model.num_dense_layers=2 model.dense_hidden=8", "model: num_dense_layers (2) must be below num_layers (2)"),
    ("model.num_dense_layers=1", "model: dense_hidden (0) must be at least 1 for the 1 dense layers"),
    ("data.path=''", "data: path is empty"),
    ("data.sequence_length=0", "data: sequence_length (0) must be at least 1"),
    ("train.steps=0", "train: steps (0) must be at least 1"),
    ("train.sequences_per_step=24", "train: sequences_per_step (24) must be a multiple of data (8) x"),
    ("train.sequences_per_step=24", "= 16; nearest: 16 or 32"),
    ("train.sequences_per_step=0", "train: sequences_per_step (0) must be at least 1"),
    ("train.balance_coefficient=-0.1", "train: balance_coefficient (-0.1) must be at least 0"),
    ("model.selection_bias=true", "set train.bias_rule to one of: sign, proportional, quantile; or selection_bias to"),
    ("train.bias_rule=sign", 'train: bias_rule ("sign") needs model.selection_bias = true'),
    ("train.bias_rate=0 train.bias_rule=sign model.selection_bias=true", "train: bias rate (0.0) must be a finite"),
    ("train.bias_rule=signs", 'train.bias_rule must be one of "sign", "proportional", "quantile", or "none"'),
    ("train.bias_rule=quantile model.selection_bias=true model.top_k=64", "needs model.top_k (64) below num_experts"),
    (
        "train.bias_rule=quantile model.selection_bias=true model.num_groups=8 model.chosen_groups=4",
        "needs model.num_groups (8) to be 1",
    ),
    ("train.balance_scope=batch", 'train.balance_scope must be one of "sequence", "micro_batch", "data_parallel", "s'),
    ("train.assignment=hot train.assignment_hot_share=0.6", "train: assignment_hot_share (0.6) must be from 0 to 1 /"),
    ("model.num_groups=7", "model: num_groups (7) must divide num_experts (64) into equal groups; nearest: 8"),
    ("model.num_groups=64", "model: top_k (2) is more than a token can reach: chosen_groups (1) x 1"),
    ("optimizer.learning_rate=0", "optimizer: learning_rate (0.0) must be above 0"),
    ("optimizer.final_fraction=1.5", "optimizer: final_fraction (1.5) must be between 0 and 1"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer: betas ([0.9, 1.0]) must each be at least 0 and below 1"),
    ("optimizer.decay_steps=3", 'optimizer: decay_steps (3) belongs to the schedule "wsd"'),
    ("parallel.pipeline=0", "parallel: pipeline (0) must be at least 1"),
    (
        "parallel.pipeline_schedule=fast",
        'parallel.pipeline_schedule must be one of "gpipe", "1f1b", "interleaved_1f1b"',
    ),
    ("parallel.layers_per_stage=[2]", "parallel: layers_per_stage does nothing with pipeline (1)"),
    (
        "parallel.layers_per_stage=1+1",
        'parallel.layers_per_stage must be a list of values, each a whole number, not "1',
    ),
    (
        "parallel.pipeline=2 train.sequences_per_step=64 parallel.layers_per_stage=[2,1]",
        "parallel: layers_per_stage (2, 1) adds up to 3, and num_layers is 2",
    ),
    (
        "parallel.pipeline=2",
        "in a step (1 = sequences_per_step (16) / (data (8) x sequences_per_micro_batch (2))) must be at least 2, the ",
    ),
    (
        "parallel.pipeline=4 train.sequences_per_step=64",
        "(2) must be at least the number of stages (4) = pipeline (4) x stages_per_rank (1); largest pipeline: 2",
    ),
    (
        "parallel.pipeline=2 parallel.pipeline_schedule=zbv model.num_layers=7",
        "nearest: 4 or 8; or set layers_per_stage, for example to [2, 2, 2, 1]",
    ),
    (
        "parallel.pipeline=2 parallel.data=2 parallel.data_parallel=fsdp parallel.expert=1",
        'parallel: pipeline (2) must be 1 with data_parallel ("fsdp")',
    ),
    (
        "parallel.pipeline=2 parallel.pipeline_schedule=zbv model.num_layers=4 optimizer.gradient_sharding=true",
        "optimizer: gradient_sharding (true) needs parallel.pipeline (2) to be 1",
    ),
    ("parallel.dispatcher=pigeon", "parallel: dispatcher ('pigeon') is unknown; known: "),
    ("parallel.deep_ep.num_sms=4", 'parallel: deep_ep belongs to dispatcher "deep_ep" and does nothing with another'),
    ("parallel.deep_ep=8", 'parallel.deep_ep must be a table, or "none", not 8'),
    ("parallel.deepep.num_sms=4", "unknown key parallel.deepep; nearest: deep_ep in [parallel]"),
    ("deep_ep.num_sms=4", "unknown table [deep_ep]; nearest: [parallel.deep_ep]"),
    ("parallel.expert=16", "parallel: expert (16) must divide data (8)"),
    ("parallel.timeout_s=0", "parallel: timeout_s (0.0)"),
    ("checkpoint.keep=0", "checkpoint: keep (0) must be at least 1"),
    ("log.every=0", "log: every (0) must be at least 1"),
    ("optimizer.schedule=wsd optimizer.warmup_steps=4 optimizer.decay_steps=7", "decay_steps of 6 would work"),
    ("data.source=stdlib data.vocab_size=256", "data: vocab_size (256) must be at least 257"),
    ("seed=-1", "seed (-1) must be at least 0"),
    ("run_folder=''", "run_folder is empty"),
    # keys and types
    ("model.layers=3", "unknown key model.layers; nearest: num_layers in [model]"),
    ("train.learning_rate=1.0", "unknown key train.learning_rate; nearest: learning_rate in [optimizer]"),
    ("checkpoint.evry=1", "unknown key checkpoint.evry; nearest: every in [checkpoint]"),
    ("log.evry=1", "unknown key log.evry; nearest: every in [log]"),
    ("runfolder=x", "unknown key runfolder; nearest: run_folder at the top of the file"),
    ("steps=4", "unknown key steps; nearest: steps in [train]"),
    ("seed=1.0", "seed must be a whole number, not 1.0"),
    ("seed=true", "seed must be a whole number, not true"),
    ("model.norm_eps=nan", "model.norm_eps must be a finite number, not NaN"),
    ("model.norm_eps=true", "model.norm_eps must be a finite number, not true"),
    ("model.renormalize=1", "model.renormalize must be true or false, not 1"),
    ("model.qk_norm=heads", 'model.qk_norm must be one of "head", "width", or "none", not "heads"'),
    ("model.head_dim=big", 'model.head_dim must be a whole number, or "none", not "big"'),
    ("device=tpu", 'device must be one of "auto", "cpu", "cuda", not "tpu"'),
    ("data.path=3", "data.path must be text in quotes, not 3"),
    ("optimizer.betas=[0.9]", "optimizer.betas must be a list of 2 values, each a finite number, not [0.9]"),
    ("optimizer.betas=0.9", "optimizer.betas must be a list of 2 values, each a finite number, not 0.9"),
    ("log=3", "log must be a table, not 3"),
    ("log.every.often=1", None),
    # overrides
    ("model.d_model", "--set model.d_model: write table.key=value"),
    ("=3", "--set =3: write table.key=value"),
    ("model.=3", "--set model.=3: write table.key=value"),
    ("run_folder.x=3", "--set run_folder.x=3: run_folder is a value, not a table"),
]


@pytest.mark.parametrize(("override", "expected"), ONE_FAULT)
def test_one_fault_gives_one_entry(minimal, override, expected):
    found = problems_of(minimal, *re.split(r" (?=[a-z]+\.)", override))
    assert len(found) == 1, found
    assert (expected or "log.every must be a whole number, not a table") in found[0]


def test_a_missing_key_says_what_it_needs(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    assert problems_of(path) == [
        "run_folder is missing; it must be text in quotes",
        "model is missing; it must be a table",
        "data is missing; it must be a table",
        "train is missing; it must be a table",
        "optimizer is missing; it must be a table",
    ]


@pytest.mark.parametrize("text", ["a = ", "[model\n", "a = 1\na = 2", b"\xff\xfe"])
def test_a_file_that_is_not_toml(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (found,) = problems_of(path)
    assert found.startswith("this is not TOML: ")


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.num_experts=16", ("model", "num_experts"), 16),
        (" model.num_experts = 16 ", ("model", "num_experts"), 16),
        ("model.rope_theta=500000", ("model", "rope_theta"), 500000.0),
        ("model.qk_norm=head", ("model", "qk_norm"), "head"),
        ('model.qk_norm="none"', ("model", "qk_norm"), None),
        ("model.qk_norm=none", ("model", "qk_norm"), None),
        ("model.head_dim=none", ("model", "head_dim"), None),
        ("model.head_dim=16", ("model", "head_dim"), 16),
        ("optimizer.betas=[0, 0.5]", ("optimizer", "betas"), (0.0, 0.5)),
        ("model.renormalize=false", ("model", "renormalize"), False),
        ("run_folder=runs/a b [1]=c", ("run_folder",), "runs/a b [1]=c"),
        ("run_folder='2024'", ("run_folder",), "2024"),
        ("run_folder=2024-01-01", ("run_folder",), "2024-01-01"),
        ("run_folder=a\nseed = 5", ("run_folder",), "a\nseed = 5"),
        ("parallel.layers_per_stage=[]", ("parallel", "layers_per_stage"), ()),
        ("checkpoint.every=5", ("checkpoint", "every"), 5),  # a table that the file does not have
    ],
)
def test_an_override_replaces_one_value(minimal, override, key, value):
    before, after = load_config(minimal), load_config(minimal, [override])
    expected = {**config_to_dict(before)}
    *parents, last = key
    table = expected[parents[0]] if parents else expected
    table[last] = "none" if value is None else list(value) if isinstance(value, tuple) else value
    assert config_to_dict(after) == expected
    found = after
    for name in key:
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins(minimal):
    assert load_config(minimal, ["seed=1", "seed=2"]).seed == 2


ODD_TEXT = 'a "b" \\ \x7f \t \n é 漢 \U0001f600 # = [x]'


def test_a_config_survives_json(minimal):
    config = load_config(minimal, ["model.qk_norm=width", "optimizer.betas=[0.1, 1e-7]", "optimizer.eps=1e-30"])
    config = dataclasses.replace(config, run_folder=ODD_TEXT)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    without = dataclasses.replace(config, model=dataclasses.replace(config.model, qk_norm=None))
    assert config_from_dict(json.loads(json.dumps(config_to_dict(without)))) == without


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 8),
        (["parallel.data=-1"], 8),
        (["parallel.data=-1", "parallel.expert=-1"], 1),
        (["parallel.data=16"], 16),
        (["parallel.pipeline=2"], 16),
        (["parallel.pipeline=2", "parallel.data=-1", "parallel.expert=-1"], 2),
    ],
)
def test_the_smallest_world(minimal, overrides, expected):
    config = load_config(minimal, [*overrides, "train.sequences_per_step=32"])
    assert smallest_world(config) == expected


def test_layers_of_each_stage_are_read_and_kept(minimal):
    settings = ["parallel.pipeline=2", "train.sequences_per_step=64", "parallel.layers_per_stage=[0, 2]"]
    config = load_config(minimal, settings)
    assert config.parallel.layers_per_stage == (0, 2)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_all_that_is_wrong_with_a_pipeline_is_in_one_report(minimal):
    settings = ["parallel.pipeline=4", "parallel.pipeline_schedule=dualpipev", "parallel.layers_per_stage=[1, -1, 1]"]
    assert [re.sub(r"; .*", "", problem) for problem in problems_of(minimal, *settings)] == [
        "parallel: layers_per_stage (1, -1, 1) must have 8 numbers, one for each of the stages (8) = pipeline (4) x "
        "stages_per_rank (2)",
        "parallel: layers_per_stage (1, -1, 1) must have numbers of at least 0",
        "parallel: layers_per_stage (1, -1, 1) adds up to 1, and num_layers is 2",
        "train: micro-batches of a rank in a step (1 = sequences_per_step (16) / (data (8) x sequences_per_micro_batch "
        '(2))) must be at least 8, the number of stages, with pipeline_schedule ("dualpipev")',
    ]


def test_the_world_decides_what_minus_one_means(minimal):
    config = load_config(minimal, ["parallel.data=-1", "parallel.expert=-1"])
    assert config_problems(config, 1) == []
    assert config_problems(config, 8) == []
    assert config_problems(config, 3) == [
        "parallel: num_experts (64) must be a multiple of the expert degree (3); nearest: 63 or 66",
        "train: sequences_per_step (16) must be a multiple of data (3) x sequences_per_micro_batch (2) = 6; "
        "nearest: 12 or 18",
    ]


def test_the_parts_for_the_other_packages(minimal):
    model = load_config(minimal, ["model.qk_norm=head", "model.route_scale=2.5"]).model
    router = router_config(model)
    assert (router.d_model, router.num_experts, router.top_k, router.route_scale) == (48, 64, 2, 2.5)
    experts = experts_config(model, backend=model.expert_backend)
    assert (experts.d_model, experts.d_hidden, experts.num_experts, experts.backend) == (48, 16, 64, "auto")
    spec = model.to_spec(300, 32, 7)
    assert spec.problems() == []
    assert (spec.vocab_size, spec.max_sequence_length, spec.eos_id, spec.head_dim) == (300, 32, 7, 4)
    shared = {item.name for item in dataclasses.fields(spec)} & {item.name for item in dataclasses.fields(model)}
    assert len(shared) == 22
    for name in shared - {"head_dim"}:
        assert getattr(spec, name) == getattr(model, name), name


@pytest.mark.parametrize("name", ["demo", "shared_expert"])
def test_the_configs_of_the_repository_can_run(name):
    config = load_config(CONFIGS / f"{name}.toml")
    assert config_problems(config, 2) == []


def test_the_demo_config_explains_every_key():
    path = CONFIGS / "demo.toml"
    given = tomllib.loads(path.read_text())
    assert {name: set(table) for name, table in given.items() if isinstance(table, dict)} == {
        name: set(table) for name, table in config_to_dict(load_config(path)).items() if isinstance(table, dict)
    }
    assert set(given) == {item.name for item in dataclasses.fields(Config)}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            assert re.search(r" # .{10,}", line), line


def test_an_attention_backend_that_can_not_run_is_refused_before_it_runs(minimal):
    named = "model.attention_backend"
    assert problems_of(minimal, 'device="cpu"', f"{named}=varlen") == [
        'model: attention_backend ("varlen") needs a GPU, and this is cpu; "auto" takes what runs'
    ]
    assert problems_of(minimal, 'device="cpu"', f"{named}=flex") == [
        'model: attention_backend ("flex") needs a GPU, and this is cpu; "auto" takes what runs'
    ]
    assert problems_of(minimal, 'device="cuda"', 'dtype="float32"', f"{named}=varlen") == [
        'model: attention_backend ("varlen") needs float16 or bfloat16, and queries are torch.float32; '
        '"auto" takes what runs'
    ]
    load_config(minimal, ['device="cuda"', 'dtype="bfloat16"', f"{named}=varlen", "model.head_dim=16"])
