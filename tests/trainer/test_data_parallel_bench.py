"""`coterie bench data-parallel`: the bytes are those of the formulas, and so are the counts of `StepWatch`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from coterie_parallel import Axis
from coterie_parallel.comparison import DispatchSizes
from coterie_trainer.bench import add_bench
from coterie_trainer.cli import main
from coterie_trainer.data_parallel_bench import DataParallelSizes, _report, predicted_bytes, ways
from coterie_trainer.step_watch import StepWatch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

SMALL = [
    "--experts",
    "8",
    "--top-k",
    "2",
    "--layers",
    "2",
    "--width",
    "32",
    "--hidden",
    "48",
    "--tokens",
    "64",
    "--accumulation",
    "3",
]


def test_the_bytes_are_as_predicted_and_the_losses_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main(["bench", "data-parallel", "--ranks", "2", *SMALL, "--repeats", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["ranks"] == 2
    assert record["sizes"]["num_experts"] == 8
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows) == ways(2) == ["resident, expert = 2", "resident, expert = 1", "fsdp", "fsdp, reduced once"]
    for way, row in rows.items():
        assert f"\n{way} " in printed
        assert row["sent_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.01), way
        assert row["agrees"], way
        assert len(row["losses"]) == 3
        assert row["tokens_per_second"] > 0
    assert rows["fsdp"]["against_fsdp"] == 1.0
    # Whole gradients that wait for the last micro-batch, and whole weights with their gradients, take more.
    assert rows["fsdp"]["peak_bytes"] < rows["fsdp, reduced once"]["peak_bytes"]
    assert rows["resident, expert = 2"]["peak_bytes"] < rows["resident, expert = 1"]["peak_bytes"]


def test_the_first_rank_says_on_standard_error_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(2):
        _report(Axis(name="expert", size=2, index=index, group=None, ranks=(0, 1)), "round 1 of 5")
    assert tuple(capsys.readouterr()) == ("", "round 1 of 5\n")


def test_predicted_bytes_by_hand() -> None:
    sizes = DataParallelSizes(
        num_experts=4, top_k=2, width=32, expert_hidden=8, num_layers=1, vocab_size=10, num_tokens=16, accumulation=3
    )
    experts = 4 * 3 * 32 * 8
    outside = 10 * 32 + 32
    layer = 4 * 32 * 32 + 2 * 32 + 2 * 32 + 4 * 32  # attention, two norms, norms of queries and keys, router
    assert predicted_bytes(sizes, 4) == {
        "resident, expert = 4": 8 * (outside + layer) * 0.75 + 3 * 16 * 2 * 0.75 * (16 * 32 + 8),
        "resident, expert = 1": 8 * (outside + layer + experts) * 0.75,
        "fsdp": 4 * 0.75 * 3 * (3 * (layer + experts) + 2 * outside),
        "fsdp, reduced once": 4 * 0.75 * (3 * (2 * (layer + experts) + outside) + layer + experts + outside),
    }


def test_sizes_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "data-parallel", "--ranks", "3"]) == 2
    assert "num_experts (128) must be a multiple of the number of ranks (3)" in capsys.readouterr().err
    assert main(["bench", "data-parallel", "--ranks", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err
    assert DataParallelSizes(top_k=200).problems(4) != []
    assert DataParallelSizes(num_tokens=300).sequence_length == 100


def test_the_command_has_the_defaults_of_the_sizes() -> None:
    """It writes them a second time, since it shows its help without loading torch."""
    parser = argparse.ArgumentParser()
    add_bench(parser)
    options = vars(parser.parse_args(["data-parallel"]))
    names = {"experts": "num_experts", "hidden": "expert_hidden", "layers": "num_layers", "tokens": "num_tokens"}
    expected = {names.get(name, name): value for name, value in options.items()}
    for name, value in asdict(DataParallelSizes()).items():
        assert name == "vocab_size" or expected[name] == value, name
    options = vars(parser.parse_args(["dispatch"]))
    names = {"experts": "num_experts", "tokens": "num_tokens", "shared": "shared_hidden"}
    expected = {names.get(name, name): value for name, value in options.items()}
    for name, value in asdict(DispatchSizes()).items():
        assert expected[name] == value, name


def test_live_bytes_follow_storages() -> None:
    with StepWatch() as watch:
        first = torch.zeros(100)
        second = first.view(10, 10).t()
        assert watch.live_bytes == 400
        third = torch.zeros(1000)
        del third, first
        assert (watch.live_bytes, watch.peak_bytes) == (400, 4400)
        watch.reset_peak()
        second.untyped_storage().resize_(0)
        assert (watch.live_bytes, watch.peak_bytes) == (0, 400)
    assert torch.UntypedStorage.resize_.__name__ == "resize_"
    del second
    assert watch.live_bytes == 0


SPLITS = [[3, 1], [2, 4]]
"""Rows that each rank sends to each."""


def _send_all(rank: int, world: int) -> dict[str, int]:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mesh = init_device_mesh("cpu", (world,))
    with StepWatch() as watch:
        local = torch.ones(4)
        whole = DTensor.from_local(local, mesh, [Shard(0)]) * 2
        assert watch.live_bytes == 2 * 16, "the local parts of both"
        del whole
        assert watch.live_bytes == 16
        four, eight, rows = torch.ones(4), torch.ones(8), torch.ones(sum(SPLITS[rank]), 3)
        gather(torch.empty(8), four)
        scatter(torch.empty(4), eight)
        dist.all_to_all_single(torch.empty(8), eight)
        received = [one[rank] for one in SPLITS]
        dist.all_to_all_single(torch.empty(sum(received), 3), rows, received, SPLITS[rank])
        dist.all_reduce(eight)
        dist.all_gather([torch.empty(4), torch.empty(4)], four)
        with pytest.raises(ValueError, match="the bytes of the collective broadcast_ are not known"):
            dist.broadcast(four, 0)
    return dict(watch.sent_bytes)


def test_bytes_that_each_collective_sends() -> None:
    for rank, sent in enumerate(run_ranks(_send_all, 2)):
        assert sent == {
            "_allgather_base_": 16,
            "_reduce_scatter_base_": 16,
            "alltoall_base_": 16 + SPLITS[rank][1 - rank] * 3 * 4,
            "allreduce_": 2 * 16,
            "allgather_": 16,
        }
