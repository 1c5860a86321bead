"""`coterie verify` on a user's config."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from coterie_parallel.local_ranks import RankError
from coterie_trainer.cli import main
from coterie_trainer.config import load_config
from coterie_trainer.verify import command, running
from coterie_trainer.verify.layout import Layout, default_layouts, layout_config, parse_layout, reference_config
from coterie_trainer.verify.scaling import UnevenBatches, scaled, verify_problems

from layouts import broken
from layouts.models import config_of, small_config

CONFIG = str(Path(__file__).parents[2] / "configs" / "demo.toml")


def test_every_layout_has_a_line_and_the_code_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", CONFIG, "--layouts", "data=2 expert=2 dispatcher=rowwise", "data=1 accumulation=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("scaled: model.num_layers 4 -> 3, model.d_model 192 -> 32, ")
    for layout in ("data=2 dispatcher=rowwise", "data=1 accumulation=2"):
        layout = layout.replace("data=2", "data=2 expert=2")
        (line,) = [line for line in lines if line.startswith(layout)]
        assert re.fullmatch(r"(  +\d\.\de[+-]\d\d){6}  same", line.removeprefix(layout)), line
    assert lines[-1] == "2 layouts, all as one process"


def test_a_difference_is_named_and_the_code_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "run_layout", broken.divided_experts)
    assert main(["verify", CONFIG, "--layouts", "data=1 accumulation=2", "data=4 expert=2"]) == 1
    same, differs, first, how_many, *_, verdict = capsys.readouterr().out.splitlines()[4:]
    assert same.endswith("  same")
    assert differs.startswith("data=4 expert=2 ")
    assert differs.endswith("  DIFFERS")
    assert first.startswith("    first difference: step 1, gradient of layers.2.moe.experts.")
    assert re.search(
        r"most at \[\d+, \d+, \d+\] by .* instead of .*; expert \d+, held by ranks \d, \d, summed by", first
    )
    assert re.fullmatch(r"    \d+ of \d+ tensors and numbers differ", how_many)
    assert verdict == "2 layouts, 1 not as one process"


def test_a_rank_that_fails_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "run_layout", broken.raises_on_two_ranks)
    assert main(["verify", CONFIG, "--layouts", "data=2", "data=1"]) == 1
    output = capsys.readouterr().out
    assert re.search(r"data=2  failed: rank [01] raised:", output)
    assert "broken on purpose" in output
    assert "\ndata=1 " in output
    assert output.endswith("2 layouts, 1 not as one process\n")


def test_a_terminal_shows_the_layout_that_is_running(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        def run(self, *call: object) -> list[object]:
            shown.append(capsys.readouterr().out)
            raise RankError("too slow")

    shown: list[str] = []
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert not command._compare(Layout(data=2), load_config(CONFIG), None, Pool(), 9)  # type: ignore[arg-type]
        shown.append(capsys.readouterr().out)
    name = f"{Layout(data=2)!s:<9}"
    assert shown == [name, "  failed: too slow\n", "", f"{name}  failed: too slow\n"]


def test_all_faults_of_the_arguments_are_in_one_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("coterie_parallel.local_ranks.RankPool.run")
    layouts = ["data=4 expert=3", "data=64", "data=2 dispatcher=deep_ep", "data=2 overflow=drop dispatcher=rowwise"]
    assert main(["verify", CONFIG, "--layouts", *layouts, "--set", "train.balance_scope=micro_batch"]) == 2
    text = capsys.readouterr().err
    assert "train.balance_scope=step" in text
    assert 'layout "data=4 expert=3": parallel: expert (3) must divide data (4)' in text
    assert "nearest: 15 or 18" in text
    assert 'layout "data=64": data (64) means as many processes on this machine; at most 32 work' in text
    assert "needs GPUs" in text
    assert "overflow=grow" in text


def test_faults_of_the_config_and_of_the_spelling_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", CONFIG, "--set", "model.top_k=99", "--layouts", "dta=4", "data=0 data", ""]) == 2
    text = capsys.readouterr().err
    assert "5 problems" in text
    assert "top_k (99)" in text
    assert "layout \"dta=4\": 'dta' is unknown; known: pipeline, data, expert, accumulation, schedule, stages_" in text
    assert "data (0) must be a whole number of at least 1" in text
    assert "'data' must be NAME=VALUE" in text
    assert 'layout "": it names nothing' in text


def test_layouts_are_read_and_shown() -> None:
    layout, problems = parse_layout("recompute=attention+experts data=4 dispatcher=rowwise expert=2")
    assert problems == []
    assert str(layout) == "data=4 expert=2 recompute=attention+experts dispatcher=rowwise"
    assert parse_layout("data=2 data=3")[1] == ["data is given twice"]
    layout, problems = parse_layout("schedule=zbv data=2 pipeline=4 layers_per_stage=0+1+1+2+1+1+1+0")
    assert problems == []
    assert str(layout) == "pipeline=4 data=2 schedule=zbv layers_per_stage=0+1+1+2+1+1+1+0"
    assert (layout.world, layout.layers_per_stage) == (8, (0, 1, 1, 2, 1, 1, 1, 0))
    assert parse_layout("pipeline=4 pipeline_schedule=gpipe") == parse_layout("schedule=gpipe pipeline=4")
    assert parse_layout("pipeline=2 layers_per_stage=1+x")[1] == [
        "layers_per_stage (1+x) must be whole numbers joined by +, as in 1+2"
    ]
    assert parse_layout("schedule=zbv pipeline_schedule=gpipe")[1] == ["schedule is given twice"]


@pytest.mark.parametrize(
    ("layouts", "num_layers", "stages"),
    [
        (["pipeline=2 accumulation=2"], 3, [(2, 1)]),
        (["pipeline=2 accumulation=2 layers_per_stage=1+2"], 3, [(1, 2)]),
        (["pipeline=4 accumulation=4", "pipeline=2 accumulation=2"], 4, [(1, 1, 1, 1), (2, 2)]),
        (["pipeline=4 schedule=zbv", "pipeline=3 schedule=gpipe"], 8, [(1,) * 8, (3, 3, 2)]),
        (["pipeline=2 schedule=interleaved_1f1b stages_per_rank=3"], 6, [(1,) * 6]),
        (["pipeline=2 schedule=dualpipev accumulation=4 layers_per_stage=0+2+5+0"], 7, [(0, 2, 5, 0)]),
        (["data=2", "data=1"], 3, [(), ()]),
    ],
)
def test_the_scaled_model_has_layers_for_every_stage(
    tmp_path: Path, layouts: list[str], num_layers: int, stages: list[tuple[int, ...]]
) -> None:
    small = small_config(tmp_path, layouts)
    assert (small.model.num_layers, small.model.num_dense_layers) == (num_layers, 1)
    configs = [layout_config(parse_layout(text)[0], small) for text in layouts]
    assert [config.parallel.layers_per_stage for config in configs] == stages
    assert reference_config(small).parallel.pipeline == 1


def test_pipelines_that_can_not_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = [
        "pipeline=2",
        "pipeline=2 data=32",
        "pipeline=2 schedule=gpipe gradient_sharding=true",
        "pipeline=2 data=2 data_parallel=fsdp accumulation=2",
        "pipeline=2 accumulation=2 layers_per_stage=2+3",
        "pipeline=2 accumulation=2 layers_per_stage=2+2",
    ]
    assert main(["verify", CONFIG, "--layouts", *layouts]) == 2
    found = capsys.readouterr().err.splitlines()
    expected = {
        0: "accumulation (1) must be at least 2, the number of stages, with",
        1: "pipeline (2) x data (32) means as many processes on this machine; at most 32 work",
        2: "optimizer: gradient_sharding (true) needs parallel.pipeline (2) to be 1",
        3: 'parallel: pipeline (2) must be 1 with data_parallel ("fsdp")',
        5: "parallel: layers_per_stage (2, 2) adds up to 4, and num_layers is 5",
    }
    assert found[1] == (
        "  - layers_per_stage of the layouts adds up to 4 or 5, and another layout needs a model of 5 layers; compare "
        "them apart"
    )
    for line, (number, words) in zip(found[2:], expected.items(), strict=True):
        assert line.startswith(f'  - layout "{parse_layout(layouts[number])[0]}": ')
        assert words in line


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            "pipeline=2",
            'must be at least 2, the number of stages, with pipeline_schedule ("1f1b"); or use "gpipe", which takes '
            "any number; write accumulation=2, the next that works",
        ),
        ("pipeline=2 accumulation=3 schedule=dualpipev", "write accumulation=4, the next that works"),
        ("pipeline=2 accumulation=7 schedule=interleaved_1f1b", "nearest: 6 or 8; write accumulation=8, the next that"),
    ],
)
def test_too_few_micro_batches_name_the_accumulation_that_works(layout: str, text: str) -> None:
    config = load_config(CONFIG)
    parsed, _ = parse_layout(layout)
    assert parsed is not None
    (problem,) = verify_problems(config, [parsed])
    assert problem.startswith(f'layout "{parsed}": accumulation ({parsed.accumulation}) must be ')
    assert text in problem
    works = int(problem.split("write accumulation=")[1].split(",")[0])
    assert verify_problems(config, [replace(parsed, accumulation=works)]) == []


def test_a_layout_decides_the_split_and_nothing_else(tmp_path: Path) -> None:
    small = small_config(tmp_path, ["data=8 accumulation=4"])
    assert small.train.sequences_per_step == 32
    layout, _ = parse_layout("data=4 expert=2 accumulation=4 dispatcher=rowwise saved_rows=lease recompute=block")
    config = layout_config(layout, small)
    assert (config.parallel.data, config.parallel.expert, config.parallel.dispatcher) == (4, 2, "rowwise")
    assert (config.parallel.saved_rows, config.train.recompute) == ("lease", ("block",))
    assert (config.train.sequences_per_step, config.train.sequences_per_micro_batch) == (32, 2)
    assert config.model == small.model
    plain = reference_config(config)
    assert (plain.parallel.data, plain.parallel.dispatcher, plain.parallel.saved_rows) == (1, "local", "copy")
    assert (plain.train.recompute, plain.train.sequences_per_micro_batch) == ((), 32)
    other = layout_config(Layout(data=2, settings=(("dispatcher", "all_to_all"),)), config)
    assert other.parallel.saved_rows == "copy"


def test_scaling_keeps_the_structure(tmp_path: Path) -> None:
    changes = [
        "model.num_layers=40",
        "model.num_dense_layers=3",
        "model.num_heads=32",
        "model.num_kv_heads=8",
        "model.d_model=4096",
        "model.num_experts=256",
        "model.top_k=8",
        "model.num_groups=8",
        "model.chosen_groups=4",
        "model.shared_hidden=2048",
        "model.init_std=0.006",
        "dtype=bfloat16",
        "train.assignment=zipf",
        "train.sequences_per_step=256",
        "optimizer.warmup_steps=100",
        "parallel.data=64",
        "parallel.expert=32",
    ]
    config = load_config(CONFIG, changes)
    small = scaled(config, tmp_path, [Layout(data=3, accumulation=2)])
    model = small.model
    assert (model.num_layers, model.num_dense_layers) == (3, 1)
    assert (model.d_model, model.num_heads, model.num_kv_heads) == (32, 4, 2)
    assert (model.num_experts, model.top_k, model.num_groups, model.chosen_groups) == (256, 8, 8, 4)
    assert (model.dense_hidden, model.expert_hidden, model.shared_hidden) == (24, 16, 16)
    assert model.init_std == pytest.approx(0.006 * (4096 / 32) ** 0.5)
    assert (small.dtype, small.train.assignment, small.optimizer.warmup_steps) == ("float32", None, 0)
    assert small.train.sequences_per_step == 48
    assert reference_config(small).problems() == []


@pytest.mark.parametrize(
    ("dispatcher", "num_experts", "expected"),
    [("rowwise", 16, {"rowwise", "all_to_all"}), ("local", 6, {"all_to_all", "rowwise"})],
)
def test_the_default_layouts_fit(dispatcher: str, num_experts: int, expected: set[str]) -> None:
    expert = 2 if dispatcher == "rowwise" else 1
    changes = [f"parallel.dispatcher={dispatcher}", f"model.num_experts={num_experts}", f"parallel.expert={expert}"]
    config = load_config(CONFIG, changes)
    layouts = default_layouts(config)
    small = scaled(config, Path("folder"), layouts)
    found = {layout_config(layout, small).parallel.dispatcher for layout in layouts}
    assert found == expected
    assert {layout.expert for layout in layouts} == ({1, 2, 4} if num_experts == 16 else {1, 2})
    assert {layout.pipeline for layout in layouts} == {1, 2, 4}
    sharded = load_config(CONFIG, [*changes, "optimizer.gradient_sharding=true"])
    assert {layout.pipeline for layout in default_layouts(sharded)} == {1}


def test_the_batches_of_a_step_are_the_same_in_every_split(tmp_path: Path) -> None:
    small = small_config(tmp_path, ["data=8 accumulation=4"])
    (whole,) = UnevenBatches(reference_config(small), 0, 1).step(1)
    for layout in (Layout(data=8), Layout(data=2, accumulation=4)):
        config = layout_config(layout, small)
        parts = [batch for index in range(layout.data) for batch in UnevenBatches(config, index, layout.data).step(1)]
        assert len(parts) == layout.data * layout.accumulation
        for name in ("tokens_BS", "targets_BS", "document_ids_BS"):
            pieces = [row.tolist() for batch in parts for row in getattr(batch, name)]
            assert pieces == getattr(whole, name).tolist(), name


def test_batches_have_padding_short_documents_and_ranks_without_targets_or_tokens(tmp_path: Path) -> None:
    small = layout_config(Layout(data=8), small_config(tmp_path, ["data=8"]))
    by_rank = [UnevenBatches(small, index, 8).step(0)[0] for index in range(8)]
    num_targets = [int((batch.targets_BS >= 0).sum()) for batch in by_rank]
    num_real = [int((batch.document_ids_BS >= 0).sum()) for batch in by_rank]
    assert [rank for rank, count in enumerate(num_targets) if count == 0] == [1, 7]
    assert [rank for rank, count in enumerate(num_real) if count == 0] == [1]
    batch = by_rank[0]
    for tokens, targets, documents in zip(batch.tokens_BS, batch.targets_BS, batch.document_ids_BS, strict=True):
        for place in range(len(tokens) - 1):
            goes_on = documents[place] >= 0 and documents[place] == documents[place + 1]
            assert int(targets[place]) == (int(tokens[place + 1]) if goes_on else -1)
        assert int(targets[-1]) == -1
    lengths = {int((row == number).sum()) for batch in by_rank for row in batch.document_ids_BS for number in range(12)}
    assert len(lengths - {0}) >= 4


def test_every_variant_is_a_config_without_problems() -> None:
    assert config_of("groups").model.num_groups == 4
    assert config_of("softmax").optimizer.muon


def test_what_only_a_gpu_runs_or_takes_long_to_compile_is_left_out(tmp_path: Path) -> None:
    config = config_of()
    on_gpu = replace(
        config,
        device="cuda",
        dtype="bfloat16",
        model=replace(config.model, attention_backend="varlen", expert_backend="triton"),
        train=replace(config.train, compile=True),
    )
    small = scaled(on_gpu, tmp_path, [Layout()])
    assert (small.model.attention_backend, small.model.expert_backend, small.train.compile) == ("auto", "auto", False)
