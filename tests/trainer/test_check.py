import dataclasses
import math
import re
from pathlib import Path

import pytest
from coterie_parallel import ParallelConfig, make_plan, make_stages
from coterie_trainer.check import _buffer_bytes, _parameter_shapes, active_parameters, report
from coterie_trainer.check_stages import rank_parts
from coterie_trainer.config import ConfigError, load_config
from coterie_trainer.data.shards import TokenWriter
from coterie_trainer.model import MoE, build_model, placements
from coterie_trainer.placement import placement_of

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"

# One dense layer and one with experts; every number below is worked out by hand.
TINY = """
run_folder = "r"
[model]
num_layers = 2
d_model = 8
num_heads = 2
num_kv_heads = 1
num_dense_layers = 1
dense_hidden = 12
num_experts = 4
top_k = 2
expert_hidden = 6
[data]
path = "nowhere"
vocab_size = 10
sequence_length = 16
[train]
steps = 5
sequences_per_step = 8
sequences_per_micro_batch = 1
[optimizer]
learning_rate = 0.1
[parallel]
expert = -1
"""

EMBEDDING_AND_HEAD = 2 * 10 * 8
NORMS = 2 * 2 * 8 + 8
ATTENTION = 2 * (8 * 8 + 4 * 8 + 4 * 8 + 8 * 8)
DENSE_MLP = 3 * 12 * 8
ROUTER = 4 * 8
DENSE = EMBEDDING_AND_HEAD + NORMS + ATTENTION + DENSE_MLP + ROUTER
EXPERT = 3 * 6 * 8


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_minus_one_is_resolved_and_every_number_shown(tiny):
    assert (DENSE, EXPERT) == (904, 144)
    assert report(load_config(tiny), 4) == "\n".join(
        [
            "plan",
            "  world size (4) = pipeline (1) x data (4)",
            "  data (4) = expert_data (1) x expert (4)",
            "  experts (4) = expert (4) x 1 on each rank; dispatcher all_to_all",
            "  rank 0: data 0 = expert_data 0 x expert 0; expert 0",
            "  rank 1: data 1 = expert_data 0 x expert 1; expert 1",
            "  rank 2: data 2 = expert_data 0 x expert 2; expert 2",
            "  rank 3: data 3 = expert_data 0 x expert 3; expert 3",
            "  optimizer state of a rank: 1/4 of the dense parameters', all of its own experts'",
            "",
            "model",
            "  layers: 2 = 1 dense + 1 with experts",
            "  experts: 4 of width 6, 2 for each token, no shared one",
            "  vocabulary: 10 (data.vocab_size, as nowhere is not there yet)",
            f"  parameters: {904 + 4 * 144:,}",
            f"  active parameters for a token: {904 + 2 * 144:,}",
            "  export families that can hold it: none",
            "",
            "memory of a rank, without activations",
            "  parameters: 1,048 = 904 on every rank + 144 of its own experts",
            "  weights, float32: 4,192 bytes = 4.1 KiB",
            "  gradients as autograd leaves them, float32: 4,192 bytes = 4.1 KiB",
            # In buckets a tensor begins at a multiple of 64 and so does a shard: 1,472 dense numbers, 4 shards of 384;
            # 128 + 48 of the expert, in one of 192, whose gradients no other rank has.
            f"  gradients for the sum over ranks, float32: {4 * 4 * 384:,} bytes = 6.0 KiB",
            f"  moments, float32: {2 * 4 * (384 + 192):,} bytes = 4.5 KiB",
            "  counters: 16 bytes",
            "  in passing, for the exchange of one bucket: 7,680 bytes = 7.5 KiB",
            "  sum: 26,832 bytes = 26.2 KiB",
            "",
            "bytes that a rank sends in a step",
            f"  gradients: {3 * 384 * 4:,} bytes = 4.5 KiB",
            f"  new weights: {3 * 384 * 4:,} bytes = 4.5 KiB",
            "  collectives for both: 3",
            # 32 tokens x 2 choices x 3/4 away; 4 times 8 numbers of 4 bytes, a weight and its gradient.
            "  rows of the experts, with an even load: 6,528 bytes = 6.4 KiB = 48 rows x 136 bytes",
            "",
            "step",
            "  tokens: 128 = 8 sequences x 16",
            "  sequences: 8 = data (4) x 2 micro-batches x 1 sequences",
            "  run: 5 steps, 640 tokens",
        ]
    )


@pytest.mark.parametrize(("world", "expert", "local"), [(1, 1, 4), (2, 2, 2), (4, 4, 1)])
def test_experts_are_split_and_the_rest_is_not(tiny, world, expert, local):
    shown = report(load_config(tiny), world)
    assert f"experts (4) = expert ({expert}) x {local} on each rank" in shown
    assert f"parameters: {904 + local * 144:,} = 904 on every rank + {local * 144:,} of its own experts" in shown


def test_bfloat16_needs_main_weights(tiny):
    shown = report(load_config(tiny, ["dtype=bfloat16", "optimizer.moments_dtype=bfloat16"]), 4)
    assert f"weights, bfloat16: {2 * 1048:,} bytes" in shown
    assert f"gradients for the sum over ranks, float32: {4 * (4 * 384 + 192):,} bytes" in shown
    assert "as autograd leaves them" not in shown
    assert f"main weights, float32: {4 * (384 + 192):,} bytes" in shown
    assert f"moments, bfloat16: {2 * 2 * (384 + 192):,} bytes" in shown


@pytest.mark.parametrize(("dtype", "saves"), [("float32", True), ("bfloat16", False)])
def test_gradient_sharding_is_beside_the_sum_without_it(tiny, dtype, saves):
    """Its two buffers take more than it saves of so small a model in bfloat16, where autograd leaves no gradients."""

    def sums(**changes):
        shown = report(load_config(tiny, [f"dtype={dtype}", *(f"optimizer.{k}={v}" for k, v in changes.items())]), 4)
        return dict(re.findall(r"  (sum[a-z_ ]*): ([\d,]+) bytes", shown))

    whole, sharded = sums(), sums(gradient_sharding="true")
    assert list(whole) == ["sum"]
    assert sharded["sum without gradient_sharding"] == whole["sum"]
    held, without = (int(one.replace(",", "")) for one in (sharded["sum"], whole["sum"]))
    assert held != without
    assert (held < without) == saves


def test_muon_and_adamw_share_the_parameters(tiny):
    assert "Muon" not in report(load_config(tiny), 4)
    muon = ATTENTION + DENSE_MLP + 4 * EXPERT
    line = f"  parameters updated by Muon: {muon:,}; by AdamW: {EMBEDDING_AND_HEAD + NORMS + ROUTER:,}\n"
    assert line in report(load_config(tiny, ["optimizer.muon=true"]), 4)


@pytest.mark.parametrize(("saved_rows", "num_buffers"), [("copy", 3 + 1), ("lease", 1 + 2), ("fetch", 4)])
def test_row_buffers_of_the_dispatcher_count(tiny, saved_rows, num_buffers):
    """One layer, 16 tokens of 2 choices: room for twice that, but not more than the pairs of all ranks."""
    settings = ["parallel.expert=2", "parallel.dispatcher=rowwise", f"parallel.saved_rows={saved_rows}"]
    shown = report(load_config(tiny, settings), 4)
    tokens = 16 * 32 if saved_rows == "fetch" else 0
    assert (
        f"row buffers of the dispatcher, saved_rows = {saved_rows}: {num_buffers * 64 * 32 + tokens:,} bytes" in shown
    )
    assert "optimizer state of a rank: 1/4 of the dense parameters', 1/2 of its own experts'" in shown


def test_of_a_large_world_the_first_and_the_last_ranks_are_shown(tiny):
    settings = ["model.num_experts=64", "train.sequences_per_step=64"]
    lines = report(load_config(tiny, settings), 64).splitlines()
    assert "  rank 7: data 7 = expert_data 0 x expert 7; expert 7" in lines
    assert "  ... 48 more ranks, in the same order ..." in lines
    assert "  rank 56: data 56 = expert_data 0 x expert 56; expert 56" in lines
    assert not any(line.startswith(("  rank 8:", "  rank 55:")) for line in lines)


def test_the_order_of_the_parameters_is_that_of_the_model(tiny):
    """Buckets are filled in this order, so their sizes depend on it."""
    spec = load_config(tiny).model.to_spec(10, 16, None)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in build_model(spec).named_parameters()]
    assert shapes == list(_parameter_shapes(spec).items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("schedule", "sizes"), [("1f1b", (1, 3)), ("zbv", (0, 1, 3, 0)), ("interleaved_1f1b", ())])
def test_a_rank_of_a_pipeline_holds_what_its_part_of_the_model_has(tiny, schedule, sizes, tied):
    spec = dataclasses.replace(load_config(tiny).model.to_spec(10, 16, None), num_layers=4, tied_embeddings=tied)
    config = ParallelConfig(pipeline=2, pipeline_schedule=schedule, layers_per_stage=sizes)
    stages = make_stages(config, 4)
    parts = rank_parts(spec, _parameter_shapes(spec), stages, 4)
    for index, part in enumerate(parts):
        model = build_model(spec, stages=stages.on_rank(index))
        assert [(name, tuple(one.shape)) for name, one in model.named_parameters()] == list(part.shapes.items())
        assert placements(model, stages) == {name: placement_of(name, spec, stages) for name in part.shapes}
        assert part.num_moe_layers == sum(isinstance(one, MoE) for one in model.modules())
    together = {name for part in parts for name in part.shapes}
    assert together == set(_parameter_shapes(spec))


# The tiny model with 4 layers, 3 of them with experts: stage 0 has the dense layer and one with experts.
PIPELINE = ["model.num_layers=4", "parallel.pipeline=2", "parallel.expert=2", "train.sequences_per_step=8"]
ONE_LAYER = 2 * 8 + ATTENTION // 2


def test_every_stage_of_a_pipeline_and_the_rank_that_needs_most(tiny):
    lines = report(load_config(tiny, PIPELINE), 4).splitlines()
    first = 10 * 8 + 2 * ONE_LAYER + DENSE_MLP + ROUTER + 2 * EXPERT
    last = 10 * 8 + 8 + 2 * (ONE_LAYER + ROUTER + 2 * EXPERT)
    memory = lines[lines.index("memory of a rank, without activations") + 1 :]
    assert lines[1:13] == [
        "  world size (4) = pipeline (2) x data (2)",
        "  data (2) = expert_data (1) x expert (2)",
        "  stages (2) = pipeline (2) x 1 on each rank; schedule 1f1b; layers (4) = 2 + 2",
        "  stage 0 on ranks 0 to 1: embedding, layers 0 to 1 (1 dense, 1 with experts)",
        "  stage 1 on ranks 2 to 3: layers 2 to 3 (2 with experts), norm, head",
        "  experts (4) = expert (2) x 2 on each rank; dispatcher all_to_all",
        "  rank 0: pipeline 0, data 0 = expert_data 0 x expert 0; experts 0 to 1",
        "  rank 1: pipeline 0, data 1 = expert_data 0 x expert 1; experts 2 to 3",
        "  rank 2: pipeline 1, data 0 = expert_data 0 x expert 0; experts 0 to 1",
        "  rank 3: pipeline 1, data 1 = expert_data 0 x expert 1; experts 2 to 3",
        "  optimizer state of a rank: 1/2 of what is dense in its stages, all of its own experts'",
        "",
    ]
    assert memory[0] == "  pipeline 1, which needs most:"
    dense, experts = last - 4 * EXPERT, 4 * EXPERT
    assert (
        memory[1] == f"    parameters: {last:,} = {dense:,} on every rank of its stages + {experts} of its own experts"
    )
    sums = [line for line in memory if "; sum: " in line]
    assert [line.split(";")[0] for line in sums] == [
        f"  pipeline 0: {first:,} parameters",
        f"  pipeline 1: {last:,} parameters",
    ]
    assert sums[1].split("; ")[1] in " ".join(memory[1:10])


def test_what_a_pipeline_sends_and_waits_for(tiny):
    lines = report(load_config(tiny, PIPELINE), 4).splitlines()
    # 4 micro-batches of one sequence of 16 tokens, 8 numbers of 4 bytes each.
    sent = lines.index("bytes that a rank sends to other stages in a step")
    assert lines[sent + 1 : sent + 3] == [
        "  ranks 0 to 1: 2,048 bytes = 4 micro-batches x (1 activations + 0 gradients) x 512 bytes",
        "  ranks 2 to 3: 2,048 bytes = 4 micro-batches x (0 activations + 1 gradients) x 512 bytes",
    ]
    waiting = lines.index("activations that wait for their backward")
    assert lines[waiting + 1 : waiting + 3] == [
        "  ranks 0 to 1: activations of at most 2 of 4 micro-batches",
        "  ranks 2 to 3: activations of at most 1 of 4 micro-batches",
    ]
    assert lines[-2:] == [
        "  ideal bubble: 20.0% of the step = (p - 1) / (m + p - 1), p = pipeline (2), m = micro-batches (4); Narayanan "
        "et al., 2021",
        "    for stages of equal time, in which either half of a backward takes as long as a forward",
    ]
    # 64 tokens x 2 choices x 2 layers x 1/2 away, on the ranks of the last stage.
    assert "    rows of the experts, with an even load: 17,408 bytes = 17.0 KiB = 128 rows x 136 bytes" in lines


def test_a_v_sends_nothing_where_it_turns_and_ties_its_embedding_on_one_rank(tiny):
    settings = [*PIPELINE, "parallel.pipeline_schedule=zbv", "model.tied_embeddings=true"]
    text = report(load_config(tiny, settings), 4)
    assert "stage 3 on ranks 0 to 1: layer 3 (1 with experts), norm, head, which is the embedding\n" in text
    assert "ranks 0 to 1: 4,096 bytes = 4 micro-batches x (1 activations + 1 gradients) x 512 bytes" in text
    assert "ranks 2 to 3: 4,096 bytes = 4 micro-batches x (1 activations + 1 gradients) x 512 bytes" in text
    assert "ranks 2 to 3: activations of at most 4 of 8 passes of a stage" in text
    assert (
        "ideal bubble: 4.0% of the step = (p - 1) / (6 m + p - 1), p = pipeline (2), m = micro-batches (4); Qi" in text
    )


def test_a_tied_embedding_at_both_ends_is_on_both_and_its_state_is_spread_over_both(tiny):
    apart = report(load_config(tiny, [*PIPELINE, "model.tied_embeddings=true"]), 4)
    assert "norm, head, which is the embedding once more\n" in apart
    # Buckets of 64: of the embedding a rank has a quarter, 80 numbers in 4 shards of 64; of the rest a half.
    alone = report(load_config(tiny, PIPELINE), 4)
    assert "collectives for both: 3" in alone
    assert "collectives for both: 5" in apart


@pytest.mark.parametrize(("saved_rows", "num_buffers"), [("copy", 3 + 2), ("lease", 2 + 2), ("fetch", 4)])
def test_row_buffers_of_a_pipeline_count_the_micro_batches_under_way(tiny, saved_rows, num_buffers):
    """Stage 0 has one layer with experts, and two micro-batches wait for their backward."""
    settings = [*PIPELINE, "parallel.layers_per_stage=[2, 2]", "parallel.dispatcher=rowwise"]
    config = load_config(tiny, [*settings, f"parallel.saved_rows={saved_rows}"])
    spec = config.model.to_spec(10, 16, None)
    plan = make_plan(config.parallel, 4, 4)
    part = rank_parts(spec, _parameter_shapes(spec), make_stages(config.parallel, 4), 4)[0]
    tokens = 2 * 16 * 32 if saved_rows == "fetch" else 0
    assert _buffer_bytes(config, spec, plan, part) == num_buffers * 64 * 32 + tokens


def test_the_parameters_are_all_tensors_but_the_selection_bias(tiny):
    spec = dataclasses.replace(load_config(tiny).model.to_spec(10, 16, None), selection_bias=True)
    sizes = {name: math.prod(shape) for name, shape in spec.tensor_shapes().items()}
    assert sum(sizes.values()) == 904 + 4 * 144 + 4
    everything = dataclasses.replace(spec, top_k=4)
    assert active_parameters(everything) == sum(sizes.values()) - sizes["layers.1.moe.router.selection_bias"]


def test_problems_are_raised_in_place_of_the_plan(tiny):
    with pytest.raises(ConfigError) as caught:
        report(load_config(tiny), 3)
    assert caught.value.problems == [
        "parallel: num_experts (4) must be a multiple of the expert degree (3); nearest: 3 or 6",
        "train: sequences_per_step (8) must be a multiple of data (3) x sequences_per_micro_batch (1) = 3; "
        "nearest: 6 or 9",
    ]


def test_the_vocabulary_of_made_token_files_counts(tiny, tmp_path):
    config = load_config(tiny)
    folder = tmp_path / "tokens"
    found = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(folder)))
    with TokenWriter(folder, vocab_size=300, eos_id=0) as writer:
        writer.add("train", [1, 2, 299, 0], text_bytes=9)
        writer.add("held_out", [3, 0], text_bytes=3)
    shown = report(found, 4)
    assert f"vocabulary: 300 (of {folder})" in shown
    assert f"parameters: {904 + 4 * 144 + 2 * 290 * 8:,}\n" in shown
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match="is not a folder of token files"):
        report(found, 4)


def test_the_demo_can_be_exported():
    assert "export families that can hold it: qwen3_moe" in report(load_config(DEMO), 2)


def test_with_fsdp_a_rank_holds_a_part_of_everything(tiny):
    lines = report(load_config(tiny, ["parallel.expert=1", "parallel.data_parallel=fsdp"], 4), 4).splitlines()
    # Rows of 8 that do not divide by 4 ranks: the embedding and the head have 10, and a rank has 3 of each.
    outside = 2 * 3 * 8 + 8 // 4
    layers = (NORMS - 8 + ATTENTION + DENSE_MLP + ROUTER + 4 * EXPERT) // 4
    largest = 2 * 8 + ATTENTION // 2 + ROUTER + 4 * EXPERT
    for text, size in {
        "weights, float32": 4 * (outside + layers),
        "gradients, float32": 4 * (outside + layers),
        "moments, float32": 8 * (outside + layers),
        "outside of layers, gathered": 4 * (2 * 10 * 8 + 8),
        "in passing, two layers gathered": 8 * largest,
        "in passing, gradients of a layer before and in their sum": 8 * largest,
        # Two micro-batches; a rank sends its part to three others.
        "weights of layers, for every forward and backward": 2 * 3 * 2 * 4 * layers,
        "weights outside of layers": 2 * 3 * 4 * outside,
        "gradients, in each micro-batch": 2 * 3 * 4 * (outside + layers),
    }.items():
        assert [line for line in lines if line.startswith(f"  {text}: {size:,} bytes")], (text, size, lines)
    assert "  every rank: 1/4 of each parameter, of its gradient and of its optimizer state" in lines


@pytest.mark.parametrize("saved_rows", ["copy", "lease", "fetch"])
def test_a_recomputed_block_keeps_no_row_buffers(tiny, saved_rows):
    changes = ["parallel.dispatcher=rowwise", f"parallel.saved_rows={saved_rows}", "train.recompute=['block']"]
    text = report(load_config(tiny, changes, 4), 4)
    assert f"saved_rows = {saved_rows}: {3 * 64 * 8 * 4:,} bytes" in text
